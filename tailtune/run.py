"""One run: a resolved recipe and its directories. The layout of the volumes is defined here, and only here."""

import re
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from tailtune.config import Config
from tailtune.errors import UserError
from tailtune.recipe.addresses import literal
from tailtune.recipe.schema import Recipe

DATA_FILE = "data.parquet"
"""Name of the file that the parquet step publishes: all rows, split when read."""
RUN_NAME = re.compile(r"\w[\w.-]{0,99}", re.ASCII)
"""A run's name is the name of its directories."""
SHARED_DIRECTORIES = frozenset({"base_models", "hidden_state_cache", "promoted", "small_models"})
"""Directories of all runs next to theirs on the volumes, so no run may have these names."""

MOUNTS = {"data_dir": "/shared/data", "models_dir": "/shared/models", "workspace_dir": "/shared/workspace"}
"""Where the claims are mounted in every pod of a cluster, steps and training alike."""


def local_directories(local_dir: Path) -> dict[str, str]:
    """Return the three directories of a run on one machine, by their name in `Run`: all in one, runs/NAME/."""
    return {f"{name}_dir": str(local_dir / name) for name in ("data", "models", "workspace")}


class RunDirectories(Config):
    """Where the files of a run are."""

    name: str
    data_dir: Path
    """This run's directory on the data volume."""
    models_dir: Path
    """This run's directory on the model volume."""
    workspace_dir: Path
    """This run's directory on the workspace volume: reports, logs, caches."""
    local: bool
    """Whether the run is on one machine, with the recipe's `local:` overlay and the layout of `local_directories`."""

    @property
    def raw_dir(self) -> Path:
        """The source files as fetched, with their manifest."""
        return self.data_dir / "raw"

    @property
    def parquet_dir(self) -> Path:
        """`data.parquet`, `rejects.jsonl`, manifest."""
        return self.data_dir / "parquet"

    @property
    def base_model_dir(self) -> Path:
        """The base model: built for this run, a link into `base_models_dir`, or a copy that an earlier version made."""
        return self.models_dir / "base_model"

    @property
    def base_models_dir(self) -> Path:
        """Base models from the hub, shared by all runs, one directory per model and commit."""
        return self.local_dir.parent / ".base_models" if self.local else self.models_dir.parent / "base_models"

    @property
    def best_model_dir(self) -> Path:
        return self.models_dir / "best_model"

    @property
    def checkpoints_dir(self) -> Path:
        """Checkpoints of the training, and from which step each attempt started."""
        return self.models_dir / "checkpoints"

    @property
    def demo_dir(self) -> Path:
        return self.models_dir / "demo_outputs"

    @property
    def hidden_state_cache_dir(self) -> Path:
        """Hidden states of frozen layers, shared by all runs, one directory per key."""
        return self._shared_dir("hidden_state_cache")

    @property
    def small_model_cache_dir(self) -> Path:
        """Small base models, shared by all runs, one directory per key."""
        return self._shared_dir("small_models")

    @property
    def promotions_dir(self) -> Path:
        """What the last run that passed the gate was made from, one file per recipe and settings."""
        return self._shared_dir("promoted")

    @property
    def local_dir(self) -> Path:
        """Directory of a local run, runs/NAME/: `local_directories` puts the workspace directly into it."""
        assert self.local, "a run on a cluster has a directory on each volume"
        return self.workspace_dir.parent

    def _shared_dir(self, name: str) -> Path:
        """Directory of all runs: runs/.NAME next to the local runs, NAME next to the runs on the workspace volume."""
        return self.local_dir.parent / f".{name}" if self.local else self.workspace_dir.parent / name

    @property
    def data_check_path(self) -> Path:
        """What the rows teach, against what the recipe expects."""
        return self.workspace_dir / "data_check.json"

    @property
    def evaluation_path(self) -> Path:
        return self.workspace_dir / "evaluation.json"

    @property
    def verdict_path(self) -> Path:
        return self.workspace_dir / "verdict.json"

    @property
    def log_dir(self) -> Path:
        """The log of each node of a training job on a cluster, also after the job is gone."""
        return self.workspace_dir / "logs"

    @property
    def owner_path(self) -> Path:
        """Id of the pipeline run that these directories belong to."""
        return self.workspace_dir / "owner.json"

    @property
    def permanent_failure_path(self) -> Path:
        """Why the training cannot succeed, for the next attempt of its step."""
        return self.workspace_dir / "permanent_failure.json"

    @property
    def report_path(self) -> Path:
        """The report, in the workspace on a cluster, next to it on one machine."""
        return (self.local_dir if self.local else self.workspace_dir) / "report.html"

    @property
    def run_path(self) -> Path:
        """This object, as JSON."""
        return self.workspace_dir / "run.json"

    def siblings(self) -> Iterator["RunDirectories"]:
        """Yield the directories of every run in the same place, this one included if it has a `run.json`."""
        root = self.local_dir.parent if self.local else self.workspace_dir.parent
        for path in sorted(root.glob("*/workspace/run.json" if self.local else "*/run.json")):
            name = path.relative_to(root).parts[0]
            directories = {field: getattr(self, field).parent / name for field in MOUNTS}
            if self.local:
                directories = {field: Path(each) for field, each in local_directories(root / name).items()}
            yield RunDirectories(name=name, local=self.local, **directories)

    def base_model_links(self) -> Iterator[Path]:
        """Yield every link in the same place that is where a run has its `base_model`, also if it leads nowhere."""
        root = self.local_dir.parent if self.local else self.models_dir.parent
        own = self.base_model_dir.relative_to(root / self.name)
        yield from (path / own for path in sorted(root.glob("*/")) if (path / own).is_symlink())

    @property
    def is_linked(self) -> bool:
        """Whether one of the directories is a link, which may lead out of the volume."""
        own = [self.data_dir, self.models_dir, self.workspace_dir, *([self.local_dir] if self.local else [])]
        return any(directory.is_symlink() for directory in own)


def any_run() -> RunDirectories:
    """Return directories as those of a run where the command is started: on the mounted volumes, or below runs/."""
    local = not Path(MOUNTS["workspace_dir"]).is_dir()
    directories = local_directories(Path("runs/any")) if local else {k: f"{path}/any" for k, path in MOUNTS.items()}
    return RunDirectories(name="any", local=local, **{field: Path(path) for field, path in directories.items()})


class Run(RunDirectories):
    """The input of every step, passed between them as one JSON parameter."""

    recipe: Recipe
    pipeline_run: str = ""
    """Id of the pipeline's run: tells several runs of the same name apart."""

    @property
    def base_model_path(self) -> Path:
        """Where the base model is, or will be: the directory that the recipe names, or this run's own."""
        named = self.recipe.model.directory
        return named.resolve() if named else self.base_model_dir

    def to_json(self) -> str:
        return literal(self.model_dump_json())

    @classmethod
    def from_json(cls, text: str) -> "Run":
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"]) or "run"
            if all(problem["loc"][:1] == ("recipe",) for problem in error.errors()):  # valid when it was written
                raise UserError(
                    f"this run was made by an earlier version of tailtune, in which {field} had a different form",
                    "choose another --run-name, or check out that version",
                ) from None
            problem = f"this is not the output of the resolve step: {field}: {first['msg']}"
            raise UserError(problem, "run the pipeline again") from None
