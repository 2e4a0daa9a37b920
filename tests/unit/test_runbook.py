"""What the documentation names exists: commands, parameters, keys, files, objects on the cluster, messages, figures.

Nothing in backticks is taken on trust: a span is a command, an option, a key, a file, a word of the code, or a message
that the code prints. Everything else has to be listed in `OF_OTHERS`.
"""

import json
import re
import shlex
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import kubernetes_server
import pytest
import yaml
from click.testing import CliRunner
from dashboard_server import dashboard
from kubernetes.client import ApiClient
from kubernetes_server import StepPod, cluster
from printed_texts import is_printed, literals
from test_deploy import DEPLOY, PIPELINE_SERVERS, change, check_manifest, documents, of_kind, render, violations

import pipeline
import pipeline_cli
import pipeline_runs
import pipeline_server
import tailtune.cli
from tailtune import images
from tailtune.doctor.cluster import RUNNER
from tailtune.gate import verdict_lines
from tailtune.jobs import pytorchjob, trainjob
from tailtune.jobs.job import job_name
from tailtune.jobs.train_step import make_job
from tailtune.log import LINE_PREFIX, log
from tailtune.recipe.load import PARAMETERS, load_recipe, parse_parameters, with_overrides
from tailtune.recipe.schema import ClusterNames, Recipe
from tailtune.run import Run
from tailtune.train.arguments import check_trainer_arguments

ROOT = Path(pipeline.__file__).parent
RUNBOOK, README = ROOT / "notebooks-free-runbook.md", ROOT / "README.md"
INSPECT_POD = DEPLOY / "inspect-pod.yaml"
PAGES = (
    *(RUNBOOK, README, ROOT / "CONTRIBUTING.md", ROOT / "tailtune" / "kinds" / "README.md"),
    *(ROOT / "images" / "README.md", ROOT / "images" / "data" / "README.md"),
    *sorted((ROOT / "docs").glob("*.md")),
)
NAMESPACE = render(DEPLOY)[0]["metadata"]["namespace"]
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


# ---- reading the pages ------------------------------------------------------------------------------

FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


@cache
def code_blocks(page: Path) -> tuple[tuple[str, str], ...]:
    """(language, text) of every block: fenced, or indented as in the README (without a language)."""
    text = page.read_text(encoding="utf-8")
    fenced = [(name, re.sub(rf"^{indent}", "", body, flags=re.M)) for indent, name, body in FENCED.findall(text)]
    indented = re.findall(r"(?:(?<=\n\n)|\A)((?: {4}.*\n|\n(?= {4}))+)", FENCED.sub("", text))
    return (*fenced, *(("", re.sub(r"^ {4}", "", block, flags=re.M)) for block in indented))


@cache
def spans(page: Path) -> tuple[str, ...]:
    """The inline code of a page."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    return tuple(" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", text))


def typed_lines(page: Path) -> Iterator[str]:
    """The lines that a reader may type: inline code, and blocks except those of output."""
    for language, block in code_blocks(page):
        if language != "text":
            yield from block.replace("\\\n", " ").splitlines()
    yield from spans(page)


def output_blocks() -> list[list[str]]:
    """The blocks that show what a reader should see, of all pages, as lines; the README's tree is none."""
    blocks = [block for page in PAGES for language, block in code_blocks(page) if language == "text"]
    return [block.splitlines() for block in blocks if block != readme_tree()]


def output_with(words: str) -> list[str]:
    """The lines of the one block of output that contains the words."""
    (block,) = [block for block in output_blocks() if any(words in line for line in block)]
    return block


# ---- commands ---------------------------------------------------------------------------------------

COMMANDS = tailtune.cli.main.commands
PROGRAM = re.compile(r"(?:^|[\s/(])(tailtune|pipeline\.py)(?= |$|\))")


@cache
def calls(page: Path) -> list[tuple[str, tuple[str, ...]]]:
    """(program, arguments) of every call of `tailtune` or `pipeline.py`."""
    found = []
    for line in typed_lines(page):
        for match in PROGRAM.finditer(line):
            program, rest = match[1], line[match.end() :].rstrip()
            try:
                words = shlex.split(rest, comments=True)
            except ValueError:  # a quote that opens before the call
                words = shlex.split(rest.rstrip(")'\""), comments=True)
            stop = next((i for i, word in enumerate(words) if word in ("&&", "|", ">", ";", "<")), len(words))
            arguments = tuple(word.removesuffix(")") for word in words[:stop])
            if program == "tailtune" and not (arguments and (arguments[0] in COMMANDS or arguments[0][0] == "-")):
                continue  # a directory, a module, an experiment of this name
            found.append((program, arguments))
    return found


def parse(program: str, arguments: list[str]) -> dict[str, Any]:
    """What click makes of a command line; raises what click raises. Nothing runs."""
    command: click.Command = pipeline_cli.main if program == "pipeline.py" else tailtune.cli.main
    if arguments and arguments[0] in COMMANDS and program == "tailtune":
        command, arguments = COMMANDS[arguments[0]], arguments[1:]
    try:
        return command.make_context(program, arguments).params
    except click.exceptions.Exit:  # --help, --version
        return {}


@every_page
def test_every_command_line_parses(page: Path) -> None:
    for program, arguments in calls(page):
        if program == "tailtune" and len(arguments) == 1 and arguments[0] in COMMANDS:
            continue  # only named: `tailtune cancel` in a sentence
        try:
            params = parse(program, [re.sub("…", "x=1", argument) for argument in arguments])
        except click.ClickException as error:
            pytest.fail(f"{page.name}: {program} {shlex.join(arguments)}: {error.format_message()}")
        if params.get("when"):
            pipeline_server.trigger(params["when"])


def test_the_commands_of_the_pages_are_found() -> None:
    counts = {page: [program for program, _ in calls(page)] for page in (RUNBOOK, README)}
    moved = sum(program == "tailtune" for page in (ROOT / "docs").glob("*.md") for program, _ in calls(page))
    assert counts[RUNBOOK].count("tailtune") > 10 and counts[RUNBOOK].count("pipeline.py") > 12
    assert counts[README].count("tailtune") + moved > 5, "some of the README's commands moved to pages of docs/"
    assert counts[README].count("tailtune") >= 5 and counts[README].count("pipeline.py") > 8
    assert ("tailtune", ("ask", "How do I treat a nosebleed?", "--model", "both")) in calls(RUNBOOK)
    short = [word for pair in ("num_nodes=1", "epochs=1", "data.max_rows=500") for word in ("-p", pair)]
    assert ("pipeline.py", ("--submit", "--run-name", "first", *short)) in calls(RUNBOOK)


OPTIONS_OF_OTHERS = {"--insecure-skip-tls-verify", "--from-file", "--build-arg", "--cluster", "--cluster-parameter",
                     "--driver", "--max-log-requests"}  # fmt: skip


@every_page
def test_every_option_exists(page: Path) -> None:
    commands = [pipeline_cli.main, *COMMANDS.values()]
    known = {name for command in commands for param in command.params for name in param.opts} | OPTIONS_OF_OTHERS
    known |= set(re.findall(r'"(--[\w-]+)"', (ROOT / "tailtune" / "train" / "__main__.py").read_text()))
    for span in spans(page):
        if match := re.match(r"--[\w-]+", span):
            assert match[0] in known, f"{page.name}: {span}"


# ---- parameters and keys ----------------------------------------------------------------------------

REFUSED = ("epoch=2",)
"""`-p` values that a page shows being refused."""
SECTIONS = tuple(Recipe.model_fields)


@cache
def survival() -> Recipe:
    return load_recipe("survival")


@every_page
def test_every_parameter_is_accepted(page: Path) -> None:
    lines = {line for line in typed_lines(page) if line.startswith("-p ") or PROGRAM.search(line)}
    together = {tuple(re.findall(r"(?:^|\s)-p ('[^']+'|[\w.]+=\S*)", line)) for line in lines}
    for pairs in together:
        given = []
        for pair in (each.strip("'").rstrip(")") for each in pairs):
            key, _, value = pair.partition("=")
            if pair in REFUSED:
                with pytest.raises(ValueError, match="did you mean"):
                    with_overrides(survival(), parse_parameters([pair]))
            elif "…" in value:
                assert key_exists(key), f"{page.name}: -p {pair}"
            else:
                given.append(pair)
        recipe = with_overrides(survival(), parse_parameters(given))
        if any(".trainer." in pair for pair in given):
            check_trainer_arguments(recipe)


def key_exists(key: str) -> bool:
    """Whether a dotted key is one of the recipe's, or an argument of `trl.SFTConfig`. `N` stands for an index."""
    content: Any = survival().model_dump(mode="json")
    parts = PARAMETERS.get(key, key).split(".")
    for previous, part in pairwise(["", *parts]):
        if previous == "trainer":
            from trl import SFTConfig

            return part in SFTConfig.__dataclass_fields__
        if isinstance(content, list) and (part == "N" or part.isdigit()):
            content = content[0 if part == "N" else int(part)]
        elif isinstance(content, dict) and part in content:
            content = content[part]
        else:
            return False
    return True


# ---- files and links --------------------------------------------------------------------------------

FOLDERS = ("recipes", "deploy", "docs", "compiled", "tests", "components", "tailtune", "benchmarks", "images")


@every_page
def test_every_file_exists(page: Path) -> None:
    text = "\n".join(typed_lines(page))
    for path in re.findall(rf"(?<![\w./-])((?:{'|'.join(FOLDERS)})/[\w./-]*)", text):
        if Path(path).name.startswith("my."):
            continue  # the reader's own
        named = ROOT / path
        assert named.exists() or list(named.parent.glob(f"{named.name}-*")), f"{page.name}: {path}"
    for folder in re.findall(r"(?:oc|kubectl) (?:apply|delete) -k ([a-z]\S+)", text):
        assert "PROJECT" in folder or (ROOT / folder / "kustomization.yaml").is_file(), folder
    for file in re.findall(r"oc (?:apply|delete) -f (\S+)", text):
        assert (ROOT / file).is_file(), file


@cache
def readme_tree() -> str:
    (tree,) = [block for _, block in code_blocks(README) if block.startswith("pipeline.py ")]
    return tree


def test_the_tree_of_the_readme_is_that_of_the_repository() -> None:
    parents: list[Path] = [ROOT]
    for line in readme_tree().splitlines():
        indent, name, words = re.fullmatch(r"((?:  )*)(\S+) +(.+)", line).groups()  # type: ignore[union-attr]
        folder = parents[len(indent) // 2]
        entry = folder / name
        assert entry.is_dir() if name.endswith("/") else entry.is_file(), line
        parents[len(indent) // 2 + 1 :] = [entry]
        for other in re.findall(r"\b\w+\.py\b", words):
            near = entry if entry.is_dir() else folder
            assert list(near.glob(f"**/{other}")) or (ROOT / other).is_file(), line
    names = set(re.findall(r"[\w.]+", readme_tree()))
    for entry in [*ROOT.glob("*.py"), *(ROOT / "tailtune").iterdir()]:
        assert entry.name in names or entry.name.startswith("__"), f"{entry} is not in the README's tree"


@every_page
def test_every_make_target_exists(page: Path) -> None:
    rules = re.findall(r"^([\w -]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    targets = {target for rule in rules for target in rule.split()}
    for line in typed_lines(page):
        if match := re.match(r"make ([a-z][\w-]*)", line):
            assert match[1] in targets, f"{page.name}: {line}"


@cache
def anchors(page: Path) -> set[str]:
    """GitHub's names of a page's headings."""
    titles = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "BENCHMARKS.md", ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        other = (page.parent / file).resolve() if file else page
        assert other.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(other), f"{page.name}: {target}"


def test_the_readme_leads_to_every_page_and_the_runbook_to_its_own() -> None:
    for page in (RUNBOOK, ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        assert page.name == "journal-template.md" or f"({page.relative_to(ROOT)})" in README.read_text(), page
    assert "(docs/which-technique.md)" in RUNBOOK.read_text() and "(docs/journal-template.md)" in RUNBOOK.read_text()


# ---- names on the cluster ---------------------------------------------------------------------------

LABELS_OF_OTHERS = {"pipeline/runid"}
"""Labels that Kubeflow Pipelines puts on the pods of steps."""


@cache
def manifests() -> list[dict[str, Any]]:
    return [document for path in DEPLOY.rglob("*.yaml") for document in documents(path)]


@pytest.fixture
def labels(make_run: Callable[..., Run]) -> dict[str, set[str]]:
    """Every label, with its values, of the jobs, their pods and what deploy/ creates."""
    run = make_run("first").model_copy(update={"local": False})
    job = make_job(run, run.parquet_dir, run.base_model_dir, run.models_dir / "recipe.json")
    values: dict[str, set[str]] = {name: {value} for name, value in job.labels.items()}
    values["tailtune.io/run"] |= {"second", "third"}  # any name that a run may have
    values[pytorchjob.POD_SELECTOR.split("=")[0]] = values[trainjob.POD_SELECTOR.split("=")[0]] = set()
    for document in manifests():
        added = [entry["pairs"] for entry in document.get("labels", [])]
        for pairs in (document.get("metadata", {}).get("labels") or {}, *added):
            for name, value in pairs.items():
                values.setdefault(name, set()).add(value)
    return values


def test_every_label_is_made(labels: dict[str, set[str]]) -> None:
    lines = [line for page in PAGES for line in typed_lines(page)]
    selectors = [s for line in lines for s in re.findall(r"(?:^|\s)(?:-l|--selector)[ =](\S+)", line.split(" -- ")[0])]
    assert len(selectors) > 8
    for pair in [pair for selector in selectors for pair in selector.strip("'\"").split(",")]:
        name, _, value = pair.partition("=")
        assert name in LABELS_OF_OTHERS or value in labels[name], pair


@every_page
def test_every_claim_object_container_and_project_is_ours(page: Path) -> None:
    text = "\n".join([*typed_lines(page), *(block for _, block in code_blocks(page))])
    made = {document["metadata"]["name"] for document in manifests() if "metadata" in document}
    claims = {getattr(ClusterNames(), name) for name in ClusterNames.model_fields if name.endswith("_claim")}
    assert set(re.findall(r"\b[a-z-]+-pvc\b", text)) <= claims <= made
    assert set(re.findall(r"(?<![\w/.])tailtune-[a-z]+", text)) <= {*made, ClusterNames().ca_secret}
    assert set(re.findall(r"oc exec .* -c (\w+)", text)) <= {pytorchjob.CONTAINER, trainjob.CONTAINER}
    assert set(re.findall(r"oc (?:new-)?project ([a-z]\S+)", text)) <= {NAMESPACE}
    for name in re.findall(r"first-[a-z]+-[0-9a-f]{8}", text):
        assert name == job_name("first", survival().stages[0].name)
    for path in re.findall(r"/shared/\w+", text):
        assert any(path in directory for directory in pipeline.DIRECTORIES.values()), path


@every_page
def test_every_annotation_is_in_the_code(page: Path) -> None:
    for name in re.findall(r"tailtune\.io/[\w-]+", page.read_text(encoding="utf-8")):
        assert name in sources(), name


def test_the_inspect_pod_is_a_restricted_pod_on_the_same_volumes_and_image() -> None:
    (pod,) = documents(INSPECT_POD)
    api = ApiClient()
    known = api.deserialize(SimpleNamespace(data=json.dumps(pod)), "V1Pod")
    assert api.sanitize_for_serialization(known) == pod  # an unknown field would be gone
    assert violations(pod) == []
    (container,) = pod["spec"]["containers"]
    assert container["image"] == images.TRAINER.rpartition("/")[2]  # found in the pod's own project
    claims = {v["name"]: v["persistentVolumeClaim"]["claimName"] for v in pod["spec"]["volumes"]}
    mounted = {mount["mountPath"]: claims[mount["name"]] for mount in container["volumeMounts"]}
    names = ClusterNames()
    assert mounted == {
        "/shared/data": names.data_claim,
        "/shared/models": names.models_claim,
        "/shared/workspace": names.workspace_claim,
    }
    (policy,) = of_kind(documents(DEPLOY / "base" / "network-policy.yaml"), "NetworkPolicy")
    assert not policy["spec"]["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()


COMPONENTS = {"dashboard", "workbenches", "aipipelines", "kserve", "kueue", "ray", "trustyai", "modelregistry",
              "trainingoperator", "feastoperator", "trainer"}  # fmt: skip
"""Of a DataScienceCluster: opendatahub-io/opendatahub-operator, api/datasciencecluster/v2."""


def test_the_components_that_are_to_be_enabled_exist() -> None:
    text = RUNBOOK.read_text(encoding="utf-8")
    (patch,) = re.findall(r"oc patch datasciencecluster default-dsc --type=merge -p '(.+?)'", text, re.DOTALL)
    components = json.loads(patch)["spec"]["components"]
    assert set(components) <= COMPONENTS
    assert all(component == {"managementState": "Managed"} for component in components.values())
    awaited = re.findall(r"--for=condition=(\w+)Ready datasciencecluster/default-dsc", text)
    assert {name.lower() for name in awaited} == set(components)
    doctor = (ROOT / "tailtune" / "doctor" / "cluster.py").read_text(encoding="utf-8")
    named = re.findall(r"enable the (.+?): oc edit datasciencecluster", doctor)
    assert len(named) == 3
    assert set(re.findall(r"\w+", " ".join(named))) - {"component", "or"} <= COMPONENTS


def test_the_secrets_have_the_names_and_keys_that_are_looked_for() -> None:
    [server] = render(PIPELINE_SERVERS[0])
    store, names = server["spec"]["objectStorage"]["externalStorage"]["s3CredentialsSecret"], ClusterNames()
    keys = {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}
    expected = {store["secretName"]: {store["accessKey"], store["secretKey"]}, names.hf_secret: {"token"},
                names.s3_secret: keys, names.ca_secret: {"ca-bundle.crt"}}  # fmt: skip
    created = {}
    for line in typed_lines(RUNBOOK):
        for name, options in re.findall(r"oc create secret generic (\S+)((?: --from-\w+=\S+)+)", line):
            created[name] = set(re.findall(r"--from-\w+=([\w.-]+)", options))
    assert created == expected


def test_the_patch_for_volumes_on_one_node_fits_the_claims() -> None:
    (block,) = [block for language, block in code_blocks(RUNBOOK) if language == "yaml"]
    (line,) = [line for line in (DEPLOY / "project/kustomization.yaml").read_text().splitlines() if "op: add" in line]
    assert block.startswith(line.split("op:")[0]), "indented as its neighbour"
    for claim in of_kind(render(DEPLOY), "PersistentVolumeClaim"):
        for operation in yaml.safe_load(block):
            change(claim, operation)
        check_manifest(claim)
        assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]


# ---- what you should see ----------------------------------------------------------------------------


def normal(line: str) -> str:
    """Without what differs between machines and runs."""
    line = re.sub(r"https?://\S+", "ADDRESS", line)
    line = re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4,12}){4}", "ID", line)
    line = re.sub(r"-[0-9a-f]{8}\b", "-HASH", line)
    line = re.sub(r"\d+(\.\d+)*(\+\w+)?", "N", line)
    return re.sub(r"\s*,?\s*\Z", "", line.replace("ADDRESS,", "ADDRESS"))


def test_the_doctor_prints_what_the_runbook_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster(tmp_path / "server") as server, dashboard() as pipelines:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
        server.log_in(("*", "*", "*"))  # the administrator of the project
        pipelines.token = server.token
        ready = {"metadata": {"name": "dspa"}, "status": {"components": {"apiServer": {"externalUrl": pipelines.url}}}}
        server.objects["datasciencepipelinesapplications", f"{NAMESPACE}/dspa"] = ready
        result = CliRunner().invoke(tailtune.cli.main, ["doctor"])
    printed = {normal(line) for line in result.stdout.splitlines()}
    shown = [normal(line) for line in output_with("✓ login")]
    on_a_gpu = {line for line in shown if "gpu" in line}  # this machine may have one
    assert set(shown) - on_a_gpu <= printed
    assert len(shown) == len(result.stdout.splitlines()), "the runbook shows every check"


def test_the_doctor_finds_nothing_that_would_stop_the_tiny_run_on_plain_kubernetes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (line,) = [line for line in typed_lines(RUNBOOK) if line.startswith("export TAILTUNE_ENDPOINT=")]
    for name, value in (word.split("=", 1) for word in shlex.split(line)[1:]):
        monkeypatch.setenv(name, value)
    options = [[*arguments] for _, arguments in calls(RUNBOOK) if "gpu=" in arguments and "-p" in arguments]
    doctor, submit = (next(each for each in options if each[0] == first)[1:] for first in ("doctor", "--submit"))
    assert set(doctor) <= set(submit), "the doctor is asked about the run that follows"
    with cluster(tmp_path / "server") as server:
        server.log_in(("*", "*", "*"))
        server.groups = ["kubeflow.org", "authorization.k8s.io"]
        monkeypatch.setattr(kubernetes_server, "RUNNER", RUNNER)
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
        result = CliRunner().invoke(tailtune.cli.main, ["doctor", *doctor])
    assert "? pipeline server" in result.stdout and result.exit_code == 0, result.stdout


def test_the_doctor_accepts_what_the_runbook_says_about_volumes_on_one_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (selector,) = {span for span in spans(RUNBOOK) if span.startswith("-p 'resources.node_selector=")}
    with cluster(tmp_path / "server") as server:
        server.log_in(("*", "*", "*"))
        server.access_mode = "ReadWriteOnce"
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
        for options, is_accepted in ([], False), (shlex.split(selector), True):
            result = CliRunner().invoke(tailtune.cli.main, ["doctor", "--json", "-p", "num_nodes=1", *options])
            findings = [each for each in json.loads(result.stdout) if each["check"].startswith("volume")]
            assert len(findings) == 3
            assert {each["status"] for each in findings} == {"ok" if is_accepted else "blocks"}, findings


def test_submitting_and_scheduling_print_what_the_runbook_shows(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def run(*arguments: str) -> set[str]:
        result = CliRunner().invoke(pipeline_cli.main, list(arguments))
        assert result.exit_code == 0, result.output
        return {normal(line) for line in result.output.splitlines()}

    monkeypatch.setattr(pipeline_runs, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(log, "handlers", [caplog.handler])
    caplog.set_level("INFO", "tailtune")
    with dashboard() as server:
        for name, value in (("ENDPOINT", server.url), ("NAMESPACE", NAMESPACE), ("TOKEN", server.token)):
            monkeypatch.setenv(f"TAILTUNE_{name}", value)
        server.states = ["RUNNING", "SUCCEEDED"]
        watched = run("--submit", "--watch", "--run-name", "first")
        scheduled = run("--schedule", "0 2 * * *", "--schedule-name", "nightly") | run("--list-schedules")
        assert run("--unschedule", "nightly") == {"schedule 'nightly' deleted"}
    watched |= {f"{LINE_PREFIX}{message}" for message in caplog.messages}
    assert {normal(line) for line in output_with("the run succeeded")} <= watched
    assert {normal(line) for line in output_with("nightly")} <= scheduled
    assert "survival N-HASH runs as first" in watched


def test_the_commands_for_runs_print_what_the_runbook_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*arguments: str) -> list[str]:
        result = CliRunner().invoke(pipeline_cli.main, list(arguments))
        assert result.exit_code == 0, result.output
        return [" ".join(normal(line).split()) for line in result.stdout.splitlines()]

    with dashboard() as server, cluster(tmp_path / "cluster") as kubernetes:
        for name, value in (("ENDPOINT", server.url), ("NAMESPACE", NAMESPACE), ("TOKEN", server.token)):
            monkeypatch.setenv(f"TAILTUNE_{name}", value)
        monkeypatch.setenv("KUBECONFIG", str(kubernetes.kubeconfig))
        run("--submit", "--run-name", "first")
        (first,) = server.runs
        earlier = (datetime.now(UTC) - timedelta(minutes=14)).isoformat()
        server.runs[first] |= {"state": "FAILED", "created_at": earlier}
        server.steps[first] = {"resolve-recipe": "Succeeded", "fetch-dataset": "Succeeded", "fetch-model": "Failed",
                               "write-parquet": "Succeeded", "train-stage": "Omitted",
                               "stop-jobs": "Succeeded"}  # fmt: skip
        end = {"exitCode": 137, "reason": "OOMKilled"}
        kubernetes.pods_of_steps.append(StepPod(first, "fetch-model", 3, [], end=end))
        run("--submit", "--run-name", "second")
        run("--schedule", "every 6 hours", "--schedule-name", "weekly")
        server.states = ["RUNNING"]
        assert run("--runs") == [" ".join(normal(line).split()) for line in output_with("SCHEDULE")]
        assert run("--status", "first") == [" ".join(normal(line).split()) for line in output_with("OOMKilled")]


def test_the_gate_prints_what_the_runbook_shows() -> None:
    lines = output_with("gate passed")
    rules = []
    for line in lines[1:]:
        metric, value, comparison, threshold = re.fullmatch(r"  pass  (\w+) (\S+) \((\S+) (\S+)\)", line).groups()  # type: ignore[union-attr]
        rules.append({"metric": metric, "value": float(value), "comparison": comparison,
                      "threshold": float(threshold), "passed": True, "reason": ""})  # fmt: skip
    assert verdict_lines({"passed": True, "rules": rules}) == lines
    local = {f"gate.{i}.threshold": rule["threshold"] for i, rule in enumerate(rules)}
    assert local == {key: value for key, value in survival().local.items() if key.startswith("gate.")}


def test_a_parameter_that_is_refused_says_what_the_runbook_shows() -> None:
    result = CliRunner().invoke(pipeline_cli.main, ["--dry-run", "-p", "epoch=2"])
    (shown,) = output_with("unknown key")
    assert result.stderr.startswith(shown.removesuffix("…"))


# ---- messages ---------------------------------------------------------------------------------------

COMPARED_ABOVE = ("SCHEDULE", "OOMKilled", "✓ login", "gate passed", "nightly", "unknown key", "the run succeeded")
OF_OTHERS = set(
    # Kubernetes, OpenShift, the operating system
    "0/4 nodes are available: 4 Insufficient nvidia.com/gpu. | 0/4 nodes are available | 401 Unauthorized |"
    "already exists |"
    'persistentvolumeclaim "…" not found | Multi-Attach error | No space left on device | Permission denied | Killed |'
    "error: You must be logged in | Unauthorized | Forbidden | Connection refused | timed out | WaitForFirstConsumer |"
    'RWX | Running | nvidia.com/gpu: "1" | secret/huggingface-token created | ocs-storagecluster-cephfs |'
    "rm -r | open | TAG | dir: | yes | <none> | standard | Ready | Removed | 0.1.0-fcd0bdac | Unmanaged |"
    "TrainerReady | TrainingOperatorReady |"
    "openshift-storage.cephfs.csi.ceph.com | efs.csi.aws.com | file.csi.azure.com | filestore.csi.storage.gke.io |"
    "nfs.csi.k8s.io | openshift-storage.rbd.csi.ceph.com | ebs.csi.aws.com | disk.csi.azure.com |"
    "pd.csi.storage.gke.io |"
    # libraries, planned recipes
    "SFTTrainer | Trainer | alpha | venv | PIP_INDEX_URL | lyrics | resnet18 | gemma | llama7b |"
    # the reader's own, and examples
    "ADDRESS-OF-THIS-REPOSITORY | first-report.html | my.jsonl | second-b | topic | question | current | first-sft- |"
    ":latest | clustertest-… | pipeline → components → tailtune | UserError(problem, remedy) | config.py | Stage.kind |"
    "✓ | ✗"
    .replace(" |", "|").replace("| ", "|").split("|")
)  # fmt: skip
"""Code spans and parts of messages that do not come from tailtune."""
PROGRAMS = re.compile(
    r"(oc|kubectl|minikube|make|python3?|pipeline\.py|tailtune|git|ls|bash|export|read|podman|skopeo|tensorboard|nvidia-smi|xdg-open"
    r"|BUILD_FLAGS)(?![-\w/.])"
)
ADDRESS = re.compile(r"[a-z0-9]+://\S*|/(?:tmp|opt|shared)\b\S*|runs/\S*|\.venv|\*/requirements.txt")


@cache
def sources() -> str:
    """The source text of everything that is run or applied."""
    files = [*ROOT.glob("pipeline*.py"), *(ROOT / "components").glob("*.py"), *(ROOT / "tailtune").rglob("*.py")]
    files += [ROOT / "Makefile", *ROOT.glob("images/*/Containerfile"), *DEPLOY.rglob("*.yaml")]
    files += [ROOT / "images" / "build", ROOT / "images" / "try"]
    files += [*(ROOT / "compiled").glob("*.yaml"), *(ROOT / "tailtune" / "recipes").glob("*.yaml")]
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


def without_words_of_others(message: str) -> str:
    for text in sorted(OF_OTHERS, key=len, reverse=True):
        message = message.replace(text, "…") if " " in text else message
    return message


def test_messages_are_compared_word_by_word() -> None:
    assert is_printed("train: job first-sft-fcae487e created; nodes: 1, ranks per node: 1")
    assert not is_printed("train: job first-sft-fcae487e made; nodes: 1, ranks per node: 1")
    assert is_printed("contains no run; there are:")
    assert not is_printed("contains no run; give a directory below runs/")


def test_every_line_of_output_is_printed_by_the_code() -> None:
    blocks = [block for block in output_blocks() if not any(words in "\n".join(block) for words in COMPARED_ABOVE)]
    assert sum(map(len, blocks)) > 15
    for line in [line for block in blocks for line in block]:
        if line.startswith("evaluate: answer loss "):
            continue  # the one line that is put together from several texts: tests/unit/kinds/test_evaluate.py
        assert is_printed(without_words_of_others(line.removeprefix(LINE_PREFIX))), line


def is_a_word_of_the_code(word: str) -> bool:
    parts = [word] if word.endswith((".py", ".yaml", ".md")) else word.split(".")
    return all(re.search(rf"(?<!\w){re.escape(part)}(?!\w)", sources()) for part in parts)


def is_a_test(text: str) -> bool:
    """Whether this is `tests/…/test_x.py::test_y`, or `::test_y` of a file that was named before."""
    match = re.fullmatch(r"(tests/[\w/]+\.py)?::(test_\w+)", text)
    files = [ROOT / match[1]] if match and match[1] else (ROOT / "tests").rglob("test_*.py")
    return match is not None and any(f"def {match[2]}(" in file.read_text(encoding="utf-8") for file in files)


@every_page
def test_everything_in_backticks_exists(page: Path) -> None:
    for span in spans(page):
        word = span.rstrip("/=:…")
        key = re.fullmatch(rf"((?:{'|'.join(SECTIONS)})(?:\.[\w-]+)+)(?:=.*)?", span)
        if key and not re.search(r"\.(py|yaml|jsonl?|parquet)$", key[1]):
            assert key_exists(key[1]), f"{page.relative_to(ROOT)}: `{span}` is not a key of a recipe"
        exists = (
            span in OF_OTHERS
            or PROGRAMS.match(span)  # checked above where it is ours
            or re.match(r"-", span)  # an option or a parameter
            or is_a_test(span)
            or ADDRESS.match(span)
            or any((folder / word).exists() for folder in (ROOT, page.parent, page.parent / "chat"))
            or any(key_exists(prefix + re.split("=|: ", word)[0]) for prefix in ("", "stages.N."))
            or (" " not in word and all(map(is_a_word_of_the_code, word.split("=")[0].split("/"))))
            or (is_printed(without_words_of_others(span)) if " " in span else span in literals())
        )
        assert exists, f"{page.relative_to(ROOT)}: `{span}` is nothing that the code knows or prints"


# ---- figures ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [page for page in PAGES if page != README], ids=lambda page: page.name)
def test_figures_of_speed_are_those_of_the_benchmarks(page: Path) -> None:
    measured = (ROOT / "BENCHMARKS.md").read_text(encoding="utf-8")
    text = " ".join(page.read_text(encoding="utf-8").split())
    for figure in re.findall(r"([\d.]+) times faster", text):
        assert re.search(rf"\| {re.escape(figure)} \|", measured), figure
    for share in re.findall(r"with (\d+) % of its memory", text):
        assert re.search(rf"\b{share} (?:and \d+ )?%", measured), share


def test_the_arithmetic_of_the_head_is_right() -> None:
    text = " ".join(RUNBOOK.read_text(encoding="utf-8").split())
    rows, width, millions, gigabytes = re.search(
        r"([\d,]+) × ([\d,]+) = (\d+) million parameters, so about ([\d.]+) GB", text
    ).groups()  # type: ignore[union-attr]
    count = int(rows.replace(",", "")) * int(width.replace(",", ""))
    assert round(count / 1e6) == int(millions) and round(count * 16 / 1e9, 1) == float(gigabytes)


def test_the_example_of_the_journal_is_arithmetically_right() -> None:
    text = (ROOT / "docs" / "journal-template.md").read_text(encoding="utf-8")
    tuned, base, ratio = map(float, re.search(r"loss ([\d.]+), base ([\d.]+), ratio ([\d.]+)", text).groups())  # type: ignore[union-attr]
    assert round(tuned / base, 2) == ratio


def test_decision_2_counts_the_run_parameters() -> None:
    (decision,) = (ROOT / "docs" / "decisions").glob("0002-*.md")
    assert f"The {len(PARAMETERS)} run parameters" in decision.read_text()


def test_steps_are_numbered_in_order_and_have_all_four_parts() -> None:
    steps = re.split(r"^## Step (?=\w+:)", RUNBOOK.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    names = [step.split(":")[0] for step in steps]
    numbers, letters = ([name for name in names if name.isdigit() == wanted] for wanted in (True, False))
    assert names == [*letters, *numbers] and len(letters) > 5  # part 0 comes first
    assert numbers == [str(number + 1) for number in range(len(numbers))]
    assert letters == [chr(ord("A") + number) for number in range(len(letters))]
    for step in steps:
        title, _, section = re.split(r"^#+ ", step, maxsplit=1, flags=re.MULTILINE)[0].partition("\n")
        for part in ("**You should see**", "**Why.**", "**If it does not work**"):
            assert part in section, (title, part)
        assert "```bash" in section or "| what you want |" in section, title


def test_the_dashboards_parameters_are_those_of_the_pipeline() -> None:
    names = {*PARAMETERS} | {"recipe", "run_name", "local", *pipeline.DIRECTORIES}
    (step,) = re.findall(r"3\. Create run:.*?(?=\n4\. )", RUNBOOK.read_text(encoding="utf-8"), re.DOTALL)
    assert set(re.findall(r"`(\w+)`", step)) - {"tailtune"} <= names
