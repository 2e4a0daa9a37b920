"""The default installation, without the extra `train`: enough for everything that runs on a cluster."""

import gzip
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from conftest import made_once
from dashboard_server import Server, logged_in
from kubernetes_server import cluster
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import tailtune
from tailtune.errors import UserError
from tailtune.imports import INSTALL, INSTALL_TRAIN, require_train, requirements

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def write_metadata(folder: Path) -> None:
    """Write what pip records of tailtune from pyproject.toml, as setuptools would."""
    extras = {extra: [Requirement(text) for text in texts] for extra, texts in EXTRAS.items()}
    lines = [f"Metadata-Version: 2.4\nName: tailtune\nVersion: {tailtune.__version__}"]
    lines += [f"Requires-Dist: {text}" for text in PROJECT["dependencies"]]
    lines += [f"Requires-Dist: {text} {'and' if text.marker else ';'} extra == \"{extra}\""
              for extra, texts in extras.items() for text in texts]  # fmt: skip
    (folder / f"tailtune-{tailtune.__version__}.dist-info").mkdir()
    (folder / f"tailtune-{tailtune.__version__}.dist-info" / "METADATA").write_text("\n".join(lines) + "\n")


def install(folder: Path, texts: list[str]) -> None:
    """Link the installed files of these requirements, and of all that they require, into a folder."""
    waiting, done = [(Requirement(text), "") for text in texts], set()
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        for wanted in ("", *requirement.extras):
            key = (canonicalize_name(requirement.name), wanted)
            if key not in done:
                done.add(key)
                waiting += [(Requirement(text), wanted) for text in metadata.requires(requirement.name) or []]
    for name in {name for name, _ in done}:
        distribution = metadata.distribution(name)
        for file in distribution.files or []:
            source, target = Path(str(distribution.locate_file(file))), folder / file
            if ".." not in file.parts and source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(source)


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site-packages folder as `pip install .` leaves it, except for tailtune's own modules."""

    def make(folder: Path) -> None:
        install(folder, PROJECT["dependencies"])
        write_metadata(folder)

    return made_once(tmp_path_factory, "light", make)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with logged_in(monkeypatch) as running:
        yield running


def run(light: Path, *arguments: str, cwd: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    """Run pipeline.py, or tailtune, with nothing but the packages in `light`."""
    program = ["-c", "from tailtune.cli import main; main()", *arguments[1:]]
    if arguments[0] == "pipeline.py":
        program = [str(ROOT / arguments[0]), *arguments[1:]]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{light}", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-S", *program]  # without site, and so without site-packages
    return subprocess.run(command, cwd=cwd, env=environment, text=True, capture_output=True)


def test_the_light_installation_has_nothing_that_only_runs_of_models_need(light: Path) -> None:
    program = "import importlib.util, sys; print([n for n in sys.argv[1:] if importlib.util.find_spec(n)])"
    names = ["torch", "transformers", "trl", "datasets", "accelerate", "pyarrow", "numpy", "pandas", "huggingface_hub",
             "s3fs", "tensorboard", "click"]  # fmt: skip
    found = subprocess.run([sys.executable, "-S", "-c", program, *names], env={"PYTHONPATH": str(light)},
                           capture_output=True, text=True, check=True).stdout  # fmt: skip
    assert found == "['click']\n"


@pytest.mark.parametrize("arguments", [["--list"], ["--check"], ["--dry-run", "-p", "epochs=2"]], ids=" ".join)
def test_what_needs_no_cluster(arguments: list[str], light: Path) -> None:
    done = run(light, "pipeline.py", *arguments)
    assert done.returncode == 0, done.stderr
    assert "--check" in arguments or "survival" in done.stdout


def test_a_run_is_compiled_submitted_watched_and_cancelled(
    light: Path, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "mine.yaml"  # compiled, because it is not in compiled/
    own.write_text((ROOT / "tailtune" / "recipes" / "survival.yaml").read_text().replace("name: survival", "name: mine")
                   .replace("samples/", f"{ROOT}/tailtune/recipes/samples/"))  # fmt: skip
    submitted = run(light, "pipeline.py", "--submit", "--watch", "--recipe", str(own), "-p", "epochs=2")
    assert submitted.returncode == 0 and "the run succeeded" in submitted.stderr, submitted.stderr
    assert len(server.runs) == 1 and [file for file in server.files.values() if b"train-stage" in file]
    assert (
        f"the run's first step checks the trainer arguments; to check them here: {INSTALL_TRAIN}\n" in submitted.stderr
    )
    server.states = ["RUNNING"]
    assert run(light, "pipeline.py", "--submit", "--run-name", "one").returncode == 0
    with cluster(tmp_path / "cluster") as kubernetes:
        monkeypatch.setenv("KUBECONFIG", str(kubernetes.kubeconfig))
        cancelled = run(light, "pipeline.py", "--cancel", "one")
    assert cancelled.returncode == 0 and "runs ended: 1, jobs deleted: 0" in cancelled.stderr, cancelled.stderr


def test_a_schedule_is_made_listed_and_deleted(light: Path, server: Server) -> None:
    for arguments in (["--schedule", "0 2 * * *", "--latest"], ["--list-schedules"], ["--unschedule", "survival"]):
        done = run(light, "pipeline.py", *arguments)
        assert done.returncode == 0 and "survival" in done.stdout + done.stderr, done.stderr
    assert not server.recurring


def test_the_doctor_and_the_clean_up(light: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster(tmp_path / "cluster") as kubernetes:
        monkeypatch.setenv("KUBECONFIG", str(kubernetes.kubeconfig))
        doctor = run(light, "tailtune", "doctor")
        others = [run(light, "tailtune", *arguments) for arguments in (["gc"], ["cancel", "one"])]
    assert doctor.returncode == 0 and "PyTorchJob is available" in doctor.stdout, doctor.stdout + doctor.stderr
    assert re.search(rf"✓ packages +kfp [\d.]+, enough to submit; for local runs: {re.escape(INSTALL_TRAIN)}\n",
                     doctor.stdout)  # fmt: skip
    assert not re.search("gpu|ports|disk", doctor.stdout.split("login")[0]), "these are about local runs"
    assert [done.returncode for done in others] == [0, 0], [done.stderr for done in others]


ROWS = '{"question": "Why?", "answer": "It burns."}\n'


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("data.jsonl", ROWS.encode()),
        ("data.json", f"[{ROWS}]".encode()),
        ("data.csv", b"question,answer\nWhy?,It burns.\n"),
        ("data.jsonl.gz", gzip.compress(ROWS.encode(), mtime=0)),
    ],
)
def test_files_are_inspected(name: str, content: bytes, light: Path, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    done = run(light, "pipeline.py", "--inspect", name, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"{name}: 1 rows" in done.stdout and '    question: "{question}"\n' in done.stdout


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("data.parquet", "reading Parquet"),
        ("data.jsonl.zst", "reading data.jsonl.zst"),
        ("hf://datasets/owner/name", "--inspect of an address"),
    ],
)
def test_what_cannot_be_inspected_says_what_to_install(source: str, what: str, light: Path, tmp_path: Path) -> None:
    (tmp_path / "data.parquet").touch()
    (tmp_path / "data.jsonl.zst").touch()
    done = run(light, "pipeline.py", "--inspect", source, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith(f"error: {what} needs packages that are not installed")
    assert INSTALL_TRAIN in done.stderr


def test_a_verdict(light: Path, tmp_path: Path) -> None:
    metrics = {"answer_loss_vs_base": 0.5, "answer_loss_vs_unigram": 0.5, "tuned_token_accuracy": 0.9,
               "answer_words_vs_base": 0.9}  # fmt: skip
    (tmp_path / "evaluation.json").write_text(json.dumps({"metrics": metrics}))
    done = run(light, "tailtune", "gate", "evaluation.json", "--recipe", "survival", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("gate passed"), done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-p", "hardware.profile=H900"], "hardware.profile 'H900' is not known; use auto or one of T4, "),
        (["-p", "stages.0.trainer.bf16=true"], "stages.0.trainer.bf16 cannot be set: set `hardware.precision`"),
        (["-p", "stages.0.trainer.max_length=0"], "stages.0.trainer.max_length is 0; give a finite number above 0"),
    ],
)
def test_what_tailtune_itself_knows_is_checked_before_the_upload(
    arguments: list[str], message: str, light: Path, server: Server
) -> None:
    done = run(light, "pipeline.py", "--submit", *arguments)
    assert done.returncode == 2 and message in done.stderr and not server.files


@pytest.mark.parametrize(
    ("arguments", "status", "what"),
    [
        (["pipeline.py", "--local"], 2, "--local"),
        (["pipeline.py", "--local", "--dry-run"], 2, "--local"),
        (["tailtune", "ask", "Is it safe?"], 1, "ask"),
        (["tailtune", "evaluate", "model", "--recipe", "survival", "--data-dir", "."], 1, "evaluate"),
    ],
)
def test_what_runs_models_says_what_to_install(
    arguments: list[str], status: int, what: str, light: Path, tmp_path: Path
) -> None:
    done = run(light, *arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (status, "") and not list(tmp_path.iterdir())
    message = rf"error: {what} needs packages that are not installed: accelerate, [\w-]+, [\w-]+ and \d+ more; "
    assert re.fullmatch(f"{message}{re.escape(INSTALL_TRAIN)}\n", done.stderr)


def test_an_image_must_have_all_packages(light: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAILTUNE_IMAGE", "tailtune-pipeline:1")
    done = run(light, "tailtune", "doctor", "--local")
    assert done.returncode == 1 and "✗ packages" in done.stdout
    missing = re.findall(r"([\w-]+) is missing", done.stdout)
    assert {"torch", "trl", "pyarrow", "s3fs"} <= set(missing) and f"→ {INSTALL_TRAIN}" in done.stdout


def test_the_doctor_warns_of_a_half_installed_extra(light: Path, tmp_path: Path) -> None:
    both = tmp_path / "site"
    both.mkdir()
    for entry in light.iterdir():
        (both / entry.name).symlink_to(entry)
    (both / "torch.py").touch()
    done = run(both, "tailtune", "doctor", "--local")
    assert done.returncode == 0
    assert re.search(r"! packages +enough to submit; local runs also need accelerate, .* more\n", done.stdout)


def test_the_requirements_of_an_extra_are_only_what_it_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["everywhere", 'here; python_version >= "3"', 'elsewhere; python_version < "3"', 'added; extra == "train"',
             'tests; extra == "dev"']  # fmt: skip
    monkeypatch.setattr(metadata, "requires", lambda name: texts)
    assert [requirement.name for requirement in requirements()] == ["everywhere", "here"]
    assert [requirement.name for requirement in requirements("train")] == ["added"]


def test_a_checkout_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_found(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", not_found)
    with pytest.raises(UserError, match=re.escape(f"tailtune itself is not installed; {INSTALL}")):
        require_train("--local")
