"""One run: a resolved recipe and the directories it lives in. The volumes' layout stands here, once."""

import re
from pathlib import Path

from pydantic import ValidationError

from tailtune.config import Config
from tailtune.errors import UserError
from tailtune.recipe.schema import Recipe

DATA_FILE = "data.parquet"
"""Name of the file that the parquet step publishes: all rows, split when read."""
RUN_NAME = re.compile(r"\w[\w.-]{0,99}", re.ASCII)
"""A run's name is a directory's name."""


MOUNTS = {"data_dir": "/shared/data", "models_dir": "/shared/models", "workspace_dir": "/shared/workspace"}
"""Where the claims are mounted in every pod of a cluster, steps and training alike."""


class Run(Config):
    """What every step is given. Travels as one JSON parameter."""

    name: str
    recipe: Recipe
    data_dir: Path
    """This run's directory on the data volume."""
    models_dir: Path
    """This run's directory on the model volume."""
    workspace_dir: Path
    """This run's directory on the workspace volume: reports, logs, caches."""
    pipeline_run: str = ""
    """Id of the pipeline's run: of several runs of this name, one."""
    local: bool
    """Whether the run is on one machine, with the recipe's `local:` overlay."""

    @property
    def raw_dir(self) -> Path:
        """The source file as fetched, with its manifest."""
        return self.data_dir / "raw"

    @property
    def parquet_dir(self) -> Path:
        """`data.parquet`, `rejects.jsonl`, manifest."""
        return self.data_dir / "parquet"

    @property
    def base_model_dir(self) -> Path:
        """The base model, when it was downloaded or built."""
        return self.models_dir / "base_model"

    @property
    def best_model_dir(self) -> Path:
        return self.models_dir / "best_model"

    @property
    def demo_dir(self) -> Path:
        return self.models_dir / "demo_outputs"

    @property
    def hidden_state_cache_dir(self) -> Path:
        """States of frozen layers, shared by all runs: their key decides."""
        return self._of_all_runs("hidden_state_cache")

    @property
    def promotions_dir(self) -> Path:
        """What the last runs that passed the gate were made from."""
        return self._of_all_runs("promoted")

    def _of_all_runs(self, name: str) -> Path:
        """Local runs lie in runs/NAME/, those of a cluster in a directory NAME on each volume."""
        return self.workspace_dir.parent.parent / f".{name}" if self.local else self.workspace_dir.parent / name

    @property
    def evaluation_path(self) -> Path:
        return self.workspace_dir / "evaluation.json"

    @property
    def verdict_path(self) -> Path:
        return self.workspace_dir / "verdict.json"

    @property
    def bad_input_path(self) -> Path:
        """Why the training of a run cannot succeed, for the next attempt of its step."""
        return self.workspace_dir / "bad_input.json"

    @property
    def report_path(self) -> Path:
        """Local runs keep `data/`, `models/`, `workspace/` in one directory; the report lies beside them."""
        return self.workspace_dir.parent / "report.html" if self.local else self.workspace_dir / "report.html"

    @property
    def run_path(self) -> Path:
        """This object, as JSON."""
        return self.workspace_dir / "run.json"

    def to_json(self) -> str:
        return self.model_dump_json()

    @classmethod
    def from_json(cls, text: str) -> "Run":
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"]) or "run"
            if all(problem["loc"][:1] == ("recipe",) for problem in error.errors()):  # valid when it was written
                raise UserError(f"this run was made by an earlier version of tailtune, with another form of {field}",
                                "choose another --run-name, or check out that version") from None  # fmt: skip
            raise UserError(f"this is not the output of the resolve step: {field}: {first['msg']}; "
                            "run the pipeline again") from None  # fmt: skip
