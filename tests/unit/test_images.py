"""Checks of images/ that need no build. `images/try` builds an image and trains in it."""

import hashlib
import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from https_server import https_server
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import tailtune
from tailtune.fetch import choice
from tailtune.jobs.pods import CACHES
from tailtune.provenance import git_commit

ROOT = Path(__file__).resolve().parents[2]
IMAGES = {
    "pipeline": "images/pipeline/Containerfile",
    "trainer": "images/trainer/Containerfile",
    "stand-in": "images/try-base.Containerfile",
}
"""Containerfiles. The stand-in is what `images/try trainer` builds in place of OpenShift AI's training image."""
LOCKED = ("setuptools.txt", "pipeline/requirements.txt", "pipeline/torch.txt", "trainer/requirements.txt")
each_image = pytest.mark.parametrize("image", ["pipeline", "trainer"])
with_the_stand_in = pytest.mark.parametrize("image", IMAGES)


def instructions(image: str) -> list[tuple[str, str]]:
    """(instruction, its arguments), with continued lines joined and without comments."""
    text = (ROOT / IMAGES[image]).read_text()
    lines = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)).splitlines()
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in lines if line]


def arguments(image: str) -> dict[str, str]:
    return {name: value.strip('"') for name, _, value in
            (value.partition("=") for name, value in instructions(image) if name == "ARG")}  # fmt: skip


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


@pytest.mark.parametrize("name", [*LOCKED, "try-base.txt"])
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


@with_the_stand_in
def test_only_what_is_locked_is_installed(image: str) -> None:
    commands = [part for name, value in instructions(image) if name == "RUN" for part in re.split(r"&&|;", value)]
    installs = [command for command in commands if "${INSTALL}" in command or re.search(r"(?<![-\w])pip\b", command)]
    assert len(installs) > (0 if image == "stand-in" else 2)
    assert image == "stand-in" or "--ignore-installed" in arguments(image)["INSTALL"], "the base image's are older"
    for install in (install.replace("${INSTALL}", arguments(image).get("INSTALL", "")) for install in installs):
        assert "--no-deps" in install and "--cert" in install
        [source] = shlex.split(install)[-1:]
        if "--no-index" in install:
            assert "--no-build-isolation" in install and source == "/opt/tailtune/source"
        else:
            assert "--require-hashes" in install and source.endswith(".txt")


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


@with_the_stand_in
def test_copied_files_are_in_the_build_context_and_the_code_is_copied_last(image: str) -> None:
    kept = {line[1:].rstrip("/") for line in (ROOT / ".containerignore").read_text().splitlines() if line[:1] == "!"}
    sources = [word for name, value in instructions(image) if name == "COPY" for word in value.split()[:-1]]
    for source in sources:
        path = re.sub(r"\$\{(\w+)\}", lambda match: arguments(image)[match[1]], source)
        assert (ROOT / path).exists() and path.split("/")[0] in kept, path
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    code = [pattern.removesuffix("*") for pattern in packages]
    assert image == "stand-in" or sources[-len(code) :] == code


def test_the_embedded_data_file_is_where_fetch_looks() -> None:
    [copied] = [value for name, value in instructions("pipeline") if name == "COPY" and "${DATA}" in value]
    assert f'"{copied.split()[-1].rstrip("/")}"' in inspect.getsource(choice._embedded_file)
    assert not choice._is_data(arguments("pipeline")["DATA"]), "by default there is no data file"


def test_the_trial_mounts_all_that_the_pipeline_imports() -> None:
    mounted = re.search(r"^for path in (.*); do", (ROOT / "images" / "try").read_text(), re.MULTILINE)
    assert mounted is not None
    paths = {path for pattern in mounted[1].split() for path in ROOT.glob(pattern)}
    imported = {path for path in ROOT.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert imported - {ROOT / "tailtune"} <= paths


# ---- mirrors ----------------------------------------------------------------------------------------

BASH = shutil.which("bash") or "/bin/bash"
BUILD_ARGUMENTS = ("BASE_IMAGE", "PIP_INDEX_URL", "TORCH_INDEX_URL", "EXTRA_CA", "TORCH", "DATA")


def documented() -> dict[str, tuple[str, set[str]]]:
    """Of each build argument in images/README.md: (default, images)."""
    rows = re.findall(
        r"^\| `([A-Z_]+)` \| (.*?) \|.*\| (.*?) \|$", (ROOT / "images/README.md").read_text(), re.MULTILINE
    )
    return {
        name: (default.strip("`"), set(IMAGES) if images == "all" else set(images.split(", ")))
        for name, default, images in rows
    }


def test_the_documented_build_arguments_are_declared_under_one_name() -> None:
    assert tuple(documented()) == BUILD_ARGUMENTS
    for image in IMAGES:
        for name, (default, images) in documented().items():
            assert (name in arguments(image)) == (image in images), f"{image}: {name}"
            if image in images and name != "BASE_IMAGE":
                assert arguments(image)[name] == default, f"{image}: {name}"


@with_the_stand_in
def test_build_arguments_are_declared_before_their_use(image: str) -> None:
    """An ARG before FROM is not set after it; of the others, pip reads PIP_INDEX_URL itself."""
    text = "\n".join(f"{name} {value}" for name, value in instructions(image))
    first_install = min(text.index(words) for words in ("--require-hashes", "-m pip ") if words in text)
    assert (
        text.index("ARG BASE_IMAGE")
        < text.index("FROM ${BASE_IMAGE}")
        < text.index("ARG PIP_INDEX_URL")
        < first_install
    )
    for name in set(BUILD_ARGUMENTS) & set(arguments(image)) - {"BASE_IMAGE", "PIP_INDEX_URL"}:
        assert text.index("FROM ") < text.index(f"ARG {name}=") < text.index(f"${{{name}}}"), name


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., tuple[dict[str, dict[str, str]], subprocess.CompletedProcess[str]]]:
    """Run a command with programs that record their calls. Gives {Containerfile: build arguments}, and the end."""
    programs, calls = tmp_path / "bin", tmp_path / "calls"
    programs.mkdir()
    calls.mkdir()
    script = f"""#!{BASH}
        printf '%s\\0' "$@" > {calls}/$(basename "$0").$$
        case "$(basename "$0") $*" in
          "podman image exists"* | "podman run"*" -m pip "*) exit 1 ;;
          mmdebstrap*) touch "$TRY_DIR/base.tar" ;;
          *tailtune.jobs.node*) for run in pod runs/try/models; do
            mkdir -p "$TRY_DIR/volume/$run/best_model"; touch "$TRY_DIR/volume/$run/best_model/model.safetensors"
          done ;;
        esac"""
    for program in ("podman", "runc", "mmdebstrap"):
        (programs / program).write_text(script)
        (programs / program).chmod(0o755)

    def run(*command: str, **settings: str) -> tuple[dict[str, dict[str, str]], subprocess.CompletedProcess[str]]:
        others = {*BUILD_ARGUMENTS, "BUILDER", "BUILD_FLAGS", "REGISTRY", "TAG", "KEEP", "MAKEFLAGS"}
        environment = {name: value for name, value in os.environ.items() if name not in others}
        environment |= {"PATH": f"{programs}:{os.environ['PATH']}", "TRY_DIR": str(tmp_path / "try")} | settings
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        built = {}
        for call in calls.iterdir():
            words = call.read_text().split("\0")[:-1]
            if words[0] == "build":
                assert words[-1] == ".", "the build context is the repository's root"
                passed = [words[i + 1] for i, word in enumerate(words) if word == "--build-arg"]
                built[words[words.index("--file") + 1]] = dict(word.split("=", 1) for word in passed)
                built[words[words.index("--file") + 1]]["flags"] = " ".join(words)
        return built, done

    return run


MIRROR = {
    "PIP_INDEX_URL": "https://mirror/pypi/simple",
    "TORCH_INDEX_URL": "https://mirror/torch",
    "EXTRA_CA": "images/data",
    "TORCH": "base",
    "DATA": "images/data/README.md",
    "BUILD_FLAGS": "--network host",
}


@pytest.mark.parametrize(
    ("command", "base", "images"),
    [
        ("make images", None, {"pipeline", "trainer"}),
        ("make image-pipeline", "own/base:1", {"pipeline"}),
        ("make image-trainer", "own/base:1", {"trainer"}),
        ("make try-images", None, {"pipeline"}),
        ("images/try", "own/base:1", {"pipeline"}),
        ("images/try trainer", None, {"trainer", "stand-in"}),
        ("images/try trainer", "own/base:1", {"trainer"}),
    ],
)
def test_every_way_to_build_passes_the_build_arguments_to_every_image(
    command: str, base: str | None, images: set[str], build: Callable
) -> None:
    settings = MIRROR | ({"BASE_IMAGE": base} if base else {})
    if command in ("make images", "make try-images"):  # the others: by the environment
        built, done = build(*command.split(), *(f"{name}={value}" for name, value in settings.items()))
    else:
        built, done = build(*command.split(), **settings)
    assert done.returncode == 0, done.stderr
    assert set(built) == {IMAGES[image] for image in images}
    trial = "try" in command
    for image in images:
        passed = built[IMAGES[image]]
        assert "--network host" in passed["flags"] and set(passed) - {"flags"} <= set(arguments(image))
        expected = settings | ({"DATA": "tailtune/recipes/samples/survival.jsonl"} if trial else {})
        for name in {name for name, (_, users) in documented().items() if image in users} & set(settings):
            assert passed[name] == expected[name]
        if trial and not base:
            assert passed["BASE_IMAGE"].startswith("localhost/")
    if "stand-in" in images:
        assert f"--tag {built[IMAGES['trainer']]['BASE_IMAGE']} " in built[IMAGES["stand-in"]]["flags"]


def test_without_build_arguments_the_defaults_apply(build: Callable) -> None:
    built, done = build("make", "images")
    assert done.returncode == 0, done.stderr
    for passed in built.values():
        assert set(passed) == {"VERSION", "GIT_COMMIT", "flags"} and passed["VERSION"] == tailtune.__version__


@pytest.mark.parametrize("name", ["/etc/ssl/ca.pem", "images/ca/missing.pem", "images/../ca.pem"])
def test_a_certificate_outside_the_build_context_is_refused(name: str, build: Callable) -> None:
    built, done = build("make", "image-trainer", EXTRA_CA=name)
    assert done.returncode != 0 and not built
    assert f"EXTRA_CA={name}: no such file in images/; copy the certificate to images/ca/" in done.stderr.splitlines()


def test_without_a_program_that_builds_images_one_line_says_so(tmp_path: Path) -> None:
    for name in ("bash", "dirname", "env"):
        (tmp_path / name).symlink_to(shutil.which(name) or name)
    done = subprocess.run([ROOT / "images/build", IMAGES["trainer"], "x"], env={"PATH": str(tmp_path)},
                          capture_output=True, text=True)  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "the images need podman or buildah; install one of them\n")


class Build:
    """Executes RUN instructions here, with `opt` for the image's /opt, and without this machine's settings of pip."""

    def __init__(self, image: str, folder: Path, **values: str) -> None:
        self.image, self.opt = image, folder / "opt"
        (self.opt / "tailtune").mkdir(parents=True)
        settings = re.compile("PIP_|SSL_|REQUESTS_CA|CURL_CA|PYTHON|.*_PROXY$", re.IGNORECASE)
        self.environment = {name: value for name, value in os.environ.items() if not settings.match(name)}
        self.environment |= {
            "PIP_CONFIG_FILE": os.devnull,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        self.environment |= {name: self.here(value) for name, value in (arguments(image) | values).items()}

    def here(self, text: str) -> str:
        return text.replace("/opt/", f"{self.opt}/")

    def copy(self, extra_ca: Path) -> None:
        """The COPY of EXTRA_CA: a file, or the contents of a folder, beside trust.py."""
        trust = self.opt / "tailtune" / "trust" if self.image != "stand-in" else self.opt / "trust"
        trust.mkdir()
        for path in (ROOT / "images" / "trust.py", *(extra_ca.iterdir() if extra_ca.is_dir() else [extra_ca])):
            shutil.copy(path, trust)

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([BASH, "-c", self.here(command)], env=self.environment, capture_output=True, text=True)

    def run_of(self, words: str) -> subprocess.CompletedProcess[str]:
        [command] = [value for name, value in instructions(self.image) if name == "RUN" and words in value]
        return self.run(command)


@pytest.fixture
def index(tmp_path: Path) -> Iterator[tuple[str, Path, str]]:
    """(address, certificate, a requirement with its hash) of a package index with its own certificate."""
    folder = tmp_path / "index"
    simple = folder / "served" / "tiny"
    simple.mkdir(parents=True)
    wheel = simple / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny.py", "")
        archive.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        archive.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tiny-1.0.dist-info/RECORD", "")
    (simple / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
    with https_server(folder) as (address, certificate):
        yield address, certificate, f"tiny==1.0 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}"


@pytest.mark.parametrize(
    ("image", "trusted"), [("pipeline", True), ("trainer", True), ("trainer", False), ("stand-in", True)]
)
def test_the_builds_pip_trusts_the_extra_certificate(
    image: str, trusted: bool, index: tuple[str, Path, str], tmp_path: Path
) -> None:
    address, certificate, requirement = index
    build = Build(image, tmp_path, PIP_INDEX_URL=address, PIP_RETRIES="0")
    build.copy(certificate if trusted else ROOT / arguments(image)["EXTRA_CA"])
    if image == "stand-in":
        (build.opt / "try-base.txt").write_text(requirement)
        done = build.run_of("--require-hashes")
    else:
        (build.opt / "requirements.txt").write_text(requirement)
        assert build.run_of("/trust.py").returncode == 0
        bundle = (build.opt / "tailtune" / "ca.pem").read_text()
        assert bundle.count("BEGIN CERTIFICATE") > 50, "the public ones are still trusted"
        assert build.run("python3 -m venv --without-pip /opt/tailtune/venv").returncode == 0
        done = build.run("${INSTALL} --require-hashes -r /opt/requirements.txt")
    assert (done.returncode == 0) == trusted, done.stderr
    assert trusted or "CERTIFICATE_VERIFY_FAILED" in done.stdout + done.stderr
    assert bool(list(build.opt.rglob("tiny.py"))) == trusted


@each_image
def test_the_certificates_are_not_in_the_finished_image(image: str) -> None:
    last = [value for name, value in instructions(image) if name == "RUN"][-1]
    assert "cd /opt/tailtune && rm -r source trust ca.pem" in last
    assert "PIP_CERT" not in environment(image)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x30\x82\x03", "EXTRA_CA: site.crt is not a certificate in PEM; convert it: openssl x509 -inform der"),
        (b"PRIVATE KEY", "EXTRA_CA: site.crt contains a private key, which would stay in a layer; remove it"),
    ],
    ids=["DER", "key"],
)
def test_a_file_that_is_no_certificate_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    with https_server(tmp_path) as (_, certificate):
        pem = certificate.read_bytes()
    extra = tmp_path / "site.crt"
    extra.write_bytes(pem + content if b"KEY" in content else content)
    build = Build("trainer", tmp_path)
    build.copy(extra)
    done = build.run_of("/trust.py")
    assert (done.returncode, done.stderr.strip()) == (1, message)


@pytest.mark.parametrize(("torch", "found"), [("base", True), ("index", False)])
def test_the_pipelines_image_can_use_its_bases_torch(torch: str, found: bool, tmp_path: Path) -> None:
    build = Build("pipeline", tmp_path, TORCH=torch)
    assert build.run_of("python3 -m venv").returncode == 0
    done = build.run(
        "/opt/tailtune/venv/bin/python -c 'import importlib.util as u; print(u.find_spec(\"torch\").origin)'"
    )
    assert (done.returncode == 0) == found
    assert not found or Path(done.stdout.strip()).is_relative_to(sys.prefix)
    build.environment["INSTALL"] = "echo installs"
    done = build.run_of("torch.txt")
    assert "-r setuptools.txt" in done.stdout and ("-r torch.txt" in done.stdout) != found


def test_an_unknown_source_of_torch_is_refused(tmp_path: Path) -> None:
    done = Build("pipeline", tmp_path, TORCH="Base").run_of("python3 -m venv")
    assert (done.returncode, done.stderr) == (1, "TORCH=Base: use index or base\n")
