"""images/: what can be said of the Containerfiles without building them. `images/try` builds one and trains in it."""

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
    """(instruction, its arguments), with continued lines joined and comments dropped."""
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
    """Each requirement of a locked file, and its hashes. Fails for every other line."""
    text = re.sub(r"^#.*\n", "", (ROOT / "images" / name).read_text(), flags=re.MULTILINE)
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        requirement, *hashes = re.split(r"\s+--hash=", line.strip())
        yield Requirement(requirement), hashes


def versions(name: str) -> dict[str, str]:
    return {canonicalize_name(one.name): str(one.specifier).removeprefix("==") for one, _ in locked(name)}


def constraints() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


# ---- requirements -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOCKED)
def test_every_line_is_one_version_with_hashes_and_no_index(name: str) -> None:
    found = list(locked(name))
    assert found
    for requirement, hashes in found:
        assert re.fullmatch(r"==[\w.+]+", str(requirement.specifier)) and requirement.url is None
        assert hashes and all(re.fullmatch(r"sha256:[0-9a-f]{64}", one) for one in hashes)


@pytest.mark.parametrize("name", LOCKED)
def test_the_versions_are_those_that_the_tests_run_with(name: str) -> None:
    tested = constraints()
    for requirement, _ in locked(name):
        if requirement.marker is None or requirement.marker.evaluate({"sys_platform": "linux"}):
            [version] = [str(one.version).removesuffix("+cpu") for one in requirement.specifier]
            assert version == tested[canonicalize_name(requirement.name)], f"{requirement.name}: run `make lock`"


@each_image
def test_all_that_tailtune_needs_is_locked_except_torch(image: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    there = versions(f"{image}/requirements.txt")
    for requirement in map(Requirement, project["dependencies"]):
        if requirement.name != "torch":
            assert requirement.specifier.contains(Version(there[canonicalize_name(requirement.name)]))


@each_image
def test_torch_is_not_among_what_replaces_the_base_images_packages(image: str) -> None:
    there = versions(f"{image}/requirements.txt")
    assert not {name for name in there if name in ("torch", "triton") or name.startswith("nvidia-")} - {"nvidia-ml-py"}
    if image == "pipeline":  # where no base image brings what torch needs
        assert {"networkx", "sympy", "mpmath", "jinja2", "filelock", "fsspec", "typing-extensions"} <= set(there)


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
    for one in installs:
        assert ("--require-hashes" in one and "-r " in one) or "--no-index" in one


@each_image
def test_the_image_runs_as_anybody_and_writes_into_scratch_space(image: str) -> None:
    assert [value for name, value in instructions(image) if name == "USER"] == ["0", "1001"]
    there = environment(image)
    assert {name: there[name] for name in CACHES} == CACHES
    assert there["PATH"].startswith("/opt/tailtune/venv/bin:")
    for name, value in instructions(image):
        if name == "RUN":
            assert value.startswith("umask 0002 &&"), "OpenShift's users share the group alone"


@each_image
def test_the_version_is_the_projects_own(image: str) -> None:
    assert arguments(image)["VERSION"] == tailtune.__version__
    assert environment(image)["TAILTUNE_IMAGE"] == f"tailtune-{image}:${{VERSION}}"


@pytest.mark.parametrize("name", ["TAILTUNE_GIT_COMMIT", "OPENSHIFT_BUILD_COMMIT"])
def test_a_run_in_an_image_names_the_commit_of_the_image(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "TAILTUNE_GIT_COMMIT" in environment("pipeline") and "TAILTUNE_GIT_COMMIT" in environment("trainer")
    monkeypatch.setenv("TAILTUNE_GIT_COMMIT", "")  # as in an image that was built without the argument
    monkeypatch.setenv(name, "0123456789ab")
    assert git_commit() == "0123456789ab"


@each_image
def test_what_is_copied_is_in_the_build_context_and_the_code_comes_last(image: str) -> None:
    kept = {line[1:].rstrip("/") for line in (ROOT / ".containerignore").read_text().splitlines() if line[:1] == "!"}
    sources = [word for name, value in instructions(image) if name == "COPY" for word in value.split()[:-1]]
    for source in sources:
        path = source.replace("${DATA}", arguments(image).get("DATA", ""))
        assert (ROOT / path).exists() and path.split("/")[0] in kept, path
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    code = {name.split(".")[0] for name in packages}
    assert set(sources[-len(code) :]) == code


def test_the_embedded_data_set_lies_where_fetch_looks() -> None:
    [copied] = [value for name, value in instructions("pipeline") if name == "COPY" and "${DATA}" in value]
    assert f'"{copied.split()[-1].rstrip("/")}"' in inspect.getsource(fetch._embedded_file)
    assert not fetch.DATA_FILE_NAME.search(arguments("pipeline")["DATA"]), "by default there is none"
