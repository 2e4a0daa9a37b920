"""Checks of images/ that need no build. `images/try` builds an image and trains in it."""

import inspect
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import tailtune
from tailtune.fetch import dataset as fetch
from tailtune.jobs.pods import CACHES
from tailtune.provenance import git_commit

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ("pipeline", "trainer")
LOCKED = ("setuptools.txt", "pipeline/requirements.txt", "pipeline/torch.txt", "trainer/requirements.txt")
each_image = pytest.mark.parametrize("image", IMAGES)


def instructions(image: str) -> list[tuple[str, str]]:
    """(instruction, its arguments), with continued lines joined and without comments."""
    text = (ROOT / "images" / image / "Containerfile").read_text()
    lines = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)).splitlines()
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in lines if line]


def arguments(image: str) -> dict[str, str]:
    return dict(value.partition("=")[::2] for name, value in instructions(image) if name == "ARG")


def environment(image: str) -> dict[str, str]:
    return dict(
        word.partition("=")[::2] for name, value in instructions(image) if name == "ENV" for word in shlex.split(value)
    )


def locked(name: str) -> Iterator[tuple[Requirement, list[str]]]:
    """Each requirement of a lock file with its hashes. Raises for any other line."""
    text = re.sub(r"^#.*\n", "", (ROOT / "images" / name).read_text(), flags=re.MULTILINE)
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        requirement, *hashes = re.split(r"\s+--hash=", line.strip())
        yield Requirement(requirement), hashes


def versions(name: str) -> dict[str, str]:
    return {
        canonicalize_name(requirement.name): str(requirement.specifier).removeprefix("==")
        for requirement, _ in locked(name)
    }


def constraints() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


# ---- requirements -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOCKED)
def test_every_line_is_one_version_with_hashes_and_no_index(name: str) -> None:
    requirements = list(locked(name))
    assert requirements
    for requirement, hashes in requirements:
        assert re.fullmatch(r"==[\w.+]+", str(requirement.specifier)) and requirement.url is None
        assert hashes and all(re.fullmatch(r"sha256:[0-9a-f]{64}", sha256) for sha256 in hashes)


@pytest.mark.parametrize("name", LOCKED)
def test_the_locked_versions_are_those_of_the_tests(name: str) -> None:
    tested = constraints()
    for requirement, _ in locked(name):
        if requirement.marker is None or requirement.marker.evaluate({"sys_platform": "linux"}):
            [version] = [str(clause.version).removesuffix("+cpu") for clause in requirement.specifier]
            assert version == tested[canonicalize_name(requirement.name)], f"{requirement.name}: run `make lock`"


@each_image
def test_every_dependency_except_torch_is_locked(image: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions_locked = versions(f"{image}/requirements.txt")
    for requirement in map(Requirement, project["dependencies"] + project["optional-dependencies"]["train"]):
        if requirement.name != "torch":
            assert requirement.specifier.contains(Version(versions_locked[canonicalize_name(requirement.name)]))


@each_image
def test_torch_is_not_locked_with_the_other_packages(image: str) -> None:
    names = set(versions(f"{image}/requirements.txt"))
    assert not {name for name in names if name in ("torch", "triton") or name.startswith("nvidia-")} - {"nvidia-ml-py"}
    if image == "pipeline":  # its base image does not have torch's dependencies
        assert {"networkx", "sympy", "mpmath", "jinja2", "filelock", "fsspec", "typing-extensions"} <= names


# ---- Containerfiles ---------------------------------------------------------------------------------


@each_image
def test_the_base_image_is_an_argument_with_a_fixed_default(image: str) -> None:
    assert [value for name, value in instructions(image) if name == "FROM"] == ["${BASE_IMAGE}"]
    assert re.fullmatch(r"[\w.-]+(/[\w.-]+)+(:[\w.-]+|@sha256:[0-9a-f]{64})", arguments(image)["BASE_IMAGE"])
    assert ":latest" not in (ROOT / "images" / image / "Containerfile").read_text()


@each_image
def test_only_what_is_locked_is_installed(image: str) -> None:
    assert "--no-deps" in arguments(image)["INSTALL"] and "--no-build-isolation" in arguments(image)["INSTALL"]
    installs = [part for name, value in instructions(image) if name == "RUN" for part in re.split(r"&&", value)
                if "${INSTALL}" in part or "pip" in part.split()]  # fmt: skip
    assert len(installs) > 2
    for install in installs:
        assert ("--require-hashes" in install and "-r " in install) or "--no-index" in install


@each_image
def test_the_image_runs_as_any_user_and_writes_to_scratch_space(image: str) -> None:
    assert [value for name, value in instructions(image) if name == "USER"] == ["0", "1001"]
    variables = environment(image)
    assert {name: variables[name] for name in CACHES} == CACHES
    assert variables["PATH"].startswith("/opt/tailtune/venv/bin:")
    for name, value in instructions(image):
        if name == "RUN":
            assert value.startswith("umask 0002 &&"), "OpenShift's users share only the group"


@each_image
def test_the_version_is_the_projects_own(image: str) -> None:
    assert arguments(image)["VERSION"] == tailtune.__version__
    assert environment(image)["TAILTUNE_IMAGE"] == f"tailtune-{image}:${{VERSION}}"


@each_image
def test_the_build_fails_unless_all_packages_of_the_steps_are_there(image: str) -> None:
    """The doctor demands those of the extra `train` where it knows that it is in an image."""
    names = [name if name == "RUN" else value.partition("=")[0] for name, value in instructions(image)]
    last_run = len(names) - 1 - names[::-1].index("RUN")
    assert names.index("TAILTUNE_IMAGE") < last_run
    assert instructions(image)[last_run][1].endswith("tailtune doctor --local")


@pytest.mark.parametrize("name", ["TAILTUNE_GIT_COMMIT", "OPENSHIFT_BUILD_COMMIT"])
def test_a_run_in_an_image_records_the_commit_of_the_image(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "TAILTUNE_GIT_COMMIT" in environment("pipeline") and "TAILTUNE_GIT_COMMIT" in environment("trainer")
    monkeypatch.setenv("TAILTUNE_GIT_COMMIT", "")  # as in an image built without the argument
    monkeypatch.setenv(name, "0123456789ab")
    assert git_commit() == "0123456789ab"


@each_image
def test_copied_files_are_in_the_build_context_and_the_code_is_copied_last(image: str) -> None:
    kept = {line[1:].rstrip("/") for line in (ROOT / ".containerignore").read_text().splitlines() if line[:1] == "!"}
    sources = [word for name, value in instructions(image) if name == "COPY" for word in value.split()[:-1]]
    for source in sources:
        path = source.replace("${DATA}", arguments(image).get("DATA", ""))
        assert (ROOT / path).exists() and path.split("/")[0] in kept, path
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    code = [pattern.removesuffix("*") for pattern in packages]
    assert sources[-len(code) :] == code


def test_the_embedded_data_file_is_where_fetch_looks() -> None:
    [copied] = [value for name, value in instructions("pipeline") if name == "COPY" and "${DATA}" in value]
    assert f'"{copied.split()[-1].rstrip("/")}"' in inspect.getsource(fetch._embedded_file)
    assert not fetch.DATA_FILE_NAME.search(arguments("pipeline")["DATA"]), "by default there is no data file"


def test_the_trial_mounts_all_that_the_pipeline_imports() -> None:
    mounted = re.search(r"^for path in (.*); do", (ROOT / "images" / "try").read_text(), re.MULTILINE)
    assert mounted is not None
    paths = {path for pattern in mounted[1].split() for path in ROOT.glob(pattern)}
    imported = {path for path in ROOT.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert imported - {ROOT / "tailtune"} <= paths
