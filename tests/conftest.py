"""A run small enough for tests: the survival recipe's structure, a three-layer model, made-up rows."""

import gc
import inspect
import json
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tailtune import progress
from tailtune.recipe.load import load_recipe, with_overrides
from tailtune.recipe.schema import Recipe
from tailtune.run import Run

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # two pytest workers share two cores
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cluster", action="store_true", help="Run tests/cluster on the cluster that KUBECONFIG names.")
    parser.addoption(
        "--cluster-parameter",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="With --cluster: a run parameter for this cluster, as pipeline.py's -p. Repeatable.",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--cluster"):
        for item in items:
            if item.get_closest_marker("cluster"):
                item.add_marker(
                    pytest.mark.skip(reason="needs a cluster: oc login, then pytest --cluster tests/cluster")
                )


@pytest.fixture(scope="session", autouse=True)
def temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Temporary files of the tests, and of programs that they kill, are where pytest removes them in the end."""
    folder = str(tmp_path_factory.mktemp("tmp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield


def _stack(context: int = 0) -> list[inspect.FrameInfo]:
    frames = traceback.walk_stack(sys._getframe(1))
    return [inspect.FrameInfo(at, at.f_code.co_filename, line, at.f_code.co_name, None, None) for at, line in frames]


@pytest.fixture(scope="session", autouse=True)
def stack_without_source_lines() -> Iterator[None]:
    """For each setting of a task, KFP asks for its callers with their source lines: 2 s a compilation below pytest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inspect, "stack", _stack)
        yield


_num_modules = 0


def pytest_runtest_setup() -> None:
    """Leave what has been imported out of garbage collection: with torch, every full collection takes 0.3 s."""
    global _num_modules
    if len(sys.modules) > _num_modules + 100:
        _num_modules = len(sys.modules)
        gc.collect()
        gc.freeze()


TINY: dict[str, Any] = {
    "model.base_model": "small",
    "model.small": {
        "model_type": "smollm3", "vocab_size": 400, "hidden_size": 32, "intermediate_size": 64, "num_layers": 3,
        "num_heads": 4, "num_key_value_heads": 2, "pretrain_steps": 2,
    },
    "prompt.system": "Answer in one sentence.",
    "data.source": "embedded",
    "data.validation_share": 0.2,
    "resources.num_nodes": 1,
    "resources.ranks_per_node": 2,
    "evaluation.num_generated_answers": 4,
    "generation.max_new_tokens": 8,
    "stages.0.trainer.num_train_epochs": 3,
    "stages.0.trainer.per_device_train_batch_size": 2,
    "stages.0.trainer.gradient_accumulation_steps": 1,
    "stages.0.trainer.learning_rate": 0.001,
}  # fmt: skip


def tiny_recipe(**overrides: Any) -> Recipe:
    """The tiny recipe; keyword names are run parameters, dotted keys go through `with_overrides`."""
    return with_overrides(load_recipe("survival"), {**TINY, **overrides})


def as_written_before_train_weights(run: Run) -> str:
    """`run.json` as earlier versions wrote it, with the former keys of a stage."""
    document = run.model_dump(mode="json")
    for stage in document["recipe"]["stages"]:
        weights = stage.pop("train_weights")
        stage |= {"kind": "sft", "num_trainable_layers": weights["last_layers"], "train_head": weights["head"]}
    return json.dumps(document)


def write_rows(path: Path, num_rows: int = 50) -> Path:
    """Question/answer rows that a tiny model can learn a little of."""
    rows = [
        {
            "topic": f"Topic {i % 3}",
            "question": f"What is {i} plus {i % 7}?",
            "answer": f"It is {i + i % 7}, as counted.",
        }
        for i in range(num_rows)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def made_once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """Return a directory that the first of pytest's workers fills, and that the others wait for."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    with FileLock(root / f"{name}.lock"):
        if not (root / name).exists():
            (root / f"{name}.partial").mkdir()
            make(root / f"{name}.partial")
            (root / f"{name}.partial").rename(root / name)
    return root / name


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `data/` (Parquet) and `base/` (small model) that tests may read."""

    def prepare(folder: Path) -> None:
        from tailtune.fetch.model import provide_base_model
        from tailtune.parquet.write import write_parquet

        recipe = tiny_recipe()
        write_parquet(write_rows(folder / "rows.jsonl"), folder / "data", recipe.data)
        provide_base_model(recipe, folder / "data", folder / "base")

    return made_once(tmp_path_factory, "prepared", prepare)


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Run]:
    """A function that makes a run of the tiny recipe in a fresh directory."""

    def make(name: str = "run", **overrides: Any) -> Run:
        root = tmp_path / name
        return Run(
            name=name,
            recipe=tiny_recipe(**overrides),
            local=True,
            data_dir=root / "data",
            models_dir=root / "models",
            workspace_dir=root / "workspace",
        )

    return make


RATE_AND_TIME = re.compile(r"( [\d.,]+ [\w/]+/s)? in \d+ s$")


@pytest.fixture
def last_lines(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """A function that returns the last lines of works, which short ones leave here too, without rate and time."""
    caplog.set_level("INFO", "tailtune")
    monkeypatch.setattr(progress, "FIRST_LINE_SECONDS", 0.0)
    return lambda: [RATE_AND_TIME.sub("", line) for line in caplog.messages if RATE_AND_TIME.search(line)]
