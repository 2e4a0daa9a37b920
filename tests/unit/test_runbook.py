"""The runbook, the pages that it leads to and the README say what is so: commands, keys, files, names, messages."""

import ast
import json
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner
from dashboard_server import dashboard
from kubernetes.client import ApiClient
from kubernetes_server import cluster
from test_deploy import DEPLOY, documents, of_kind, violations
from trl import SFTConfig

import pipeline
import pipeline_cli
import pipeline_server
import tailtune.cli
from tailtune import images
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
DESK = ROOT / "deploy" / "inspect-pod.yaml"
PAGES = (RUNBOOK, README, ROOT / "docs" / "which-technique.md", ROOT / "docs" / "journal-template.md",
         ROOT / "images" / "README.md", ROOT / "images" / "data" / "README.md")  # fmt: skip
NAMESPACE = yaml.safe_load((DEPLOY / "kustomization.yaml").read_text())["namespace"]


def name_of(value: Any) -> str | None:
    return value.name if isinstance(value, Path) else None


every_page = pytest.mark.parametrize("page", PAGES, ids=name_of)

# ---- reading the pages ------------------------------------------------------------------------------


@cache
def code_blocks(page: Path) -> tuple[tuple[str, str], ...]:
    """(language, text) of every block: fenced, or indented as in the README (without a language)."""
    text = page.read_text(encoding="utf-8")
    fenced = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
    found = [(language, re.sub(rf"^{indent}", "", body, flags=re.M)) for indent, language, body in fenced.findall(text)]
    indented = re.findall(r"(?:(?<=\n\n)|\A)((?: {4}.*\n|\n(?= {4}))+)", fenced.sub("", text))
    return (*found, *(("", re.sub(r"^ {4}", "", block, flags=re.M)) for block in indented))


@cache
def inline_code(page: Path) -> tuple[str, ...]:
    text = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return tuple(" ".join(one.split()) for one in re.findall(r"(?<!`)`([^`]+)`(?!`)", text))


def lines_of_code(page: Path) -> Iterator[str]:
    """The lines of a page that a reader may type: of its blocks, but for those of output, and inline code."""
    for language, block in code_blocks(page):
        if language != "text":
            yield from block.replace("\\\n", " ").splitlines()
    yield from inline_code(page)


def commands(page: Path, program: str) -> list[list[str]]:
    """Arguments of every call of `tailtune` or `pipeline.py`."""
    found = []
    for line in lines_of_code(page):
        for start in re.finditer(rf"(?:^|[\s/(]){re.escape(program)}(?= |$|\))", line):
            rest = line[start.end() :]
            if line[start.start() :].startswith("/pipeline.py") or rest[:1] == ")":
                rest = rest.removeprefix(")")
            try:
                words = shlex.split(rest, comments=True)
            except ValueError:  # an opened $( … ) or quote that ends outside
                words = shlex.split(rest.rstrip(")'\""), comments=True)
            stop = next((i for i, word in enumerate(words) if word in ("&&", "|", ">", ";", "<")), len(words))
            words = [word.removesuffix(")") for word in words[:stop]]
            if program == "tailtune" and (not words or not (words[0] in COMMANDS or words[0].startswith("-"))):
                continue  # the word in a sentence, a directory
            found.append(words)
    return found


COMMANDS = tailtune.cli.main.commands


def parse(program: str, arguments: list[str]) -> dict[str, Any]:
    """What click makes of a command line; raises what click raises. Nothing runs."""
    command: click.Command = pipeline_cli.main
    if program == "tailtune":
        if arguments[0].startswith("-"):
            command = tailtune.cli.main
        else:
            command, arguments = COMMANDS[arguments[0]], arguments[1:]
    try:
        return command.make_context(program, list(arguments)).params
    except click.exceptions.Exit:  # --help, --version
        return {}


def bare(arguments: list[str]) -> bool:
    """A command that is named, without what it needs: `tailtune cancel` in a sentence."""
    return len(arguments) == 1


# ---- commands ---------------------------------------------------------------------------------------


@every_page
def test_every_command_line_parses(page: Path) -> None:
    for program in ("tailtune", "pipeline.py"):
        for arguments in commands(page, program):
            if program == "tailtune" and bare(arguments) and arguments[0] in COMMANDS:
                continue
            try:
                params = parse(program, [re.sub("…", "x=1", one) for one in arguments])
            except click.ClickException as error:
                pytest.fail(f"{page.name}: {program} {shlex.join(arguments)}: {error.format_message()}")
            if params.get("when"):
                pipeline_server.trigger(params["when"])


def test_the_pages_hold_commands() -> None:
    """The reading above finds them."""
    assert len(commands(RUNBOOK, "tailtune")) > 10 and len(commands(RUNBOOK, "pipeline.py")) > 12
    assert len(commands(README, "tailtune")) > 5 and len(commands(README, "pipeline.py")) > 8
    assert ["ask", "How do I treat a nosebleed?", "--model", "both"] in commands(RUNBOOK, "tailtune")
    short = [word for one in ("num_nodes=1", "epochs=1", "data.max_rows=500") for word in ("-p", one)]
    assert ["--submit", "--run-name", "first", *short] in commands(RUNBOOK, "pipeline.py")


REFUSED = ("epoch=2",)
"""`-p` values that a page shows being refused."""


@every_page
def test_every_parameter_is_one(page: Path) -> None:
    pairs = [
        value
        for line in lines_of_code(page)
        if re.match(r"-p ", line) or "pipeline.py" in line or "tailtune" in line
        for value in re.findall(r"(?:^|\s)-p ('[^']+'|[\w.]+=\S*)", line)
    ]
    for pair in (one.strip("'").rstrip(")") for one in pairs):
        key, _, value = pair.partition("=")
        if pair in REFUSED:
            with pytest.raises(ValueError, match="did you mean"):
                with_overrides(load_recipe("survival"), parse_parameters([pair]))
        elif "…" in value or key.endswith("…"):
            assert key_exists(key.rstrip(".…")), f"{page.name}: -p {pair}"
        else:
            recipe = with_overrides(load_recipe("survival"), parse_parameters([pair]))
            if ".trainer." in key:
                check_trainer_arguments(recipe)


SECTIONS = tuple(Recipe.model_fields)


def key_exists(key: str) -> bool:
    """Whether a dotted key is one of the recipe's, or of what TRL takes."""
    at: Any = load_recipe("survival").model_dump(mode="json")
    parts = PARAMETERS.get(key, key).split(".")
    for index, part in enumerate(parts):
        if index and parts[index - 1] == "trainer":
            return part in {one.name for one in fields(SFTConfig)}
        if isinstance(at, list):
            part = "0" if part == "N" else part
            if not part.isdigit() or int(part) >= len(at):
                return False
            at = at[int(part)]
        elif isinstance(at, dict) and part in at:
            at = at[part]
        else:
            return False
    return True


@every_page
def test_every_key_of_a_recipe_exists(page: Path) -> None:
    for code in inline_code(page):
        if found := re.fullmatch(rf"((?:{'|'.join(SECTIONS)})(?:\.\w+)+)(?:=\S+)?", code):
            if (ROOT / found[1]).suffix in (".py", ".yaml", ".json", ".jsonl", ".parquet", ".questions"):
                continue
            assert key_exists(found[1]), f"{page.name}: {code}"


# ---- files and links --------------------------------------------------------------------------------

FOLDERS = ("recipes", "deploy", "docs", "compiled", "tests", "components", "tailtune", "benchmarks", "images")


@every_page
def test_every_file_exists(page: Path) -> None:
    text = "\n".join(lines_of_code(page))
    for path in re.findall(rf"(?<![\w./-])((?:{'|'.join(FOLDERS)})/[\w./-]*)", text):
        if Path(path).name.startswith("my."):
            continue  # the reader's own
        named = ROOT / path
        assert named.exists() or list(named.parent.glob(f"{named.name}-*")), f"{page.name}: {path}"
    for folder in re.findall(r"oc (?:apply|delete) -k (\S+)", text):
        if "PROJECT" not in folder:
            assert (ROOT / folder / "kustomization.yaml").is_file(), folder
    for file in re.findall(r"oc (?:apply|delete) -f (\S+)", text):
        assert (ROOT / file).is_file(), file


@every_page
def test_every_make_target_exists(page: Path) -> None:
    rules = re.findall(r"^([\w -]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    targets = {target for rule in rules for target in rule.split()}
    for line in lines_of_code(page):
        if found := re.match(r"make ([a-z][\w-]*)", line):
            assert found[1] in targets, f"{page.name}: {line}"


def anchors(page: Path) -> set[str]:
    """GitHub's names of a page's headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@every_page
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        other = (page.parent / file).resolve() if file else page
        assert other.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(other), f"{page.name}: {target}"


def test_the_readme_leads_to_the_runbook_and_the_runbook_to_its_pages() -> None:
    assert "(notebooks-free-runbook.md)" in README.read_text() and "(docs/which-technique.md)" in README.read_text()
    assert "(docs/which-technique.md)" in RUNBOOK.read_text() and "(docs/journal-template.md)" in RUNBOOK.read_text()


# ---- names on the cluster ---------------------------------------------------------------------------

NOT_OURS = {"pipeline/runid"}
"""Labels that Kubeflow Pipelines puts on the pods of steps."""


@pytest.fixture
def labels(make_run: Callable[..., Run]) -> dict[str, set[str]]:
    """Every label, with its values, of the jobs, their pods and what deploy/ makes."""
    run = make_run("first").model_copy(update={"local": False})
    job = make_job(run, run.parquet_dir, run.base_model_dir, run.models_dir / "recipe.json", "registry/trainer:1")
    found: dict[str, set[str]] = {name: {value} for name, value in job.labels.items()}
    found["tailtune.io/run"] |= {"second"}  # any name that a run may have
    found[pytorchjob.POD_SELECTOR.split("=")[0]] = found[trainjob.POD_SELECTOR.split("=")[0]] = set()
    for path in [*DEPLOY.rglob("*.yaml"), DESK]:
        for document in documents(path):
            pairs = [pair for one in document.get("labels", []) for pair in one.get("pairs", {}).items()] if isinstance(
                document.get("labels"), list) else []  # fmt: skip
            for name, value in [*(document.get("metadata", {}).get("labels") or {}).items(), *pairs]:
                found.setdefault(name, set()).add(value)
    return found


@every_page
def test_every_label_is_made(page: Path, labels: dict[str, set[str]]) -> None:
    for line in lines_of_code(page):
        for selector in re.findall(r"(?:^|\s)(?:-l|--selector)[ =](\S+)", line.split(" -- ")[0]):
            for pair in selector.strip("'\"").split(","):
                name, _, value = pair.partition("=")
                assert name in labels or name in NOT_OURS, f"{page.name}: {line}"
                assert name in NOT_OURS or value in labels[name], f"{page.name}: {line}"


@every_page
def test_every_annotation_is_in_the_code(page: Path) -> None:
    code = "".join(path.read_text() for path in (ROOT / "tailtune").rglob("*.py"))
    for name in re.findall(r"tailtune\.io/[\w-]+", page.read_text(encoding="utf-8")):
        assert name in code, name


@every_page
def test_every_claim_object_container_and_project_is_ours(page: Path) -> None:
    text = "\n".join([*lines_of_code(page), *(block for _, block in code_blocks(page))])
    made = {document["metadata"]["name"] for path in DEPLOY.rglob("*.yaml") for document in documents(path)
            if "metadata" in document}  # fmt: skip
    claims = {getattr(ClusterNames(), name) for name in ClusterNames.model_fields if name.endswith("_claim")}
    assert set(re.findall(r"\b[a-z-]+-pvc\b", text)) <= claims <= made
    desk = yaml.safe_load(DESK.read_text())["metadata"]["name"]
    assert set(re.findall(r"(?<![\w/.])tailtune-[a-z]+", text)) <= made | {desk}
    containers = {pytorchjob.CONTAINER, trainjob.CONTAINER}
    assert set(re.findall(r"oc exec .* -c (\w+)", text)) <= containers
    assert set(re.findall(r"oc project (\S+)", text)) <= {NAMESPACE}
    for name in re.findall(r"first-sft-[0-9a-f]+", text):
        assert name.startswith(job_name("first", "sft"))
    for paths in re.findall(r"/shared/\w+", text):
        assert any(paths in one for one in pipeline.DIRECTORIES.values()), paths


def test_the_desk_is_a_restricted_pod_on_the_same_volumes_and_image() -> None:
    (pod,) = documents(DESK)
    api = ApiClient()
    known = api.deserialize(SimpleNamespace(data=json.dumps(pod)), "V1Pod")
    assert api.sanitize_for_serialization(known) == pod  # an unknown field would be gone
    assert violations(pod) == []
    (container,) = pod["spec"]["containers"]
    assert container["image"] == images.TRAINER
    claims = {v["name"]: v["persistentVolumeClaim"]["claimName"] for v in pod["spec"]["volumes"]}
    mounted = {mount["mountPath"]: claims[mount["name"]] for mount in container["volumeMounts"]}
    expected = ClusterNames()
    assert mounted == {"/shared/data": expected.data_claim, "/shared/models": expected.models_claim,
                       "/shared/workspace": expected.workspace_claim}  # fmt: skip
    (policy,) = of_kind(documents(DEPLOY / "base" / "network-policy.yaml"), "NetworkPolicy")
    assert not policy["spec"]["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()


# ---- what you should see ----------------------------------------------------------------------------


def output_with(words: str) -> list[str]:
    """The lines of the runbook's block of output that contains the words."""
    (block,) = [block for language, block in code_blocks(RUNBOOK) if language == "text" and words in block]
    return block.splitlines()


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
        server.allowed.append(("*", "*", "*"))  # the project's administrator
        pipelines.token = server.token
        ready = {"status": {"components": {"apiServer": {"externalUrl": pipelines.url}}}}
        server.objects["datasciencepipelinesapplications", f"{NAMESPACE}/dspa"] = ready
        for image in ("pipeline", "trainer"):
            server.objects["imagestreamtags", f"{NAMESPACE}/tailtune-{image}:{tailtune.__version__}"] = {}
        result = CliRunner().invoke(tailtune.cli.main, ["doctor"])
    printed = {normal(line) for line in result.stdout.splitlines()}
    shown = [normal(line) for line in output_with("✓ login")]
    on_a_gpu = {line for line in shown if "gpu" in line}  # this machine may have one
    assert set(shown) - on_a_gpu <= printed
    assert len(shown) == len(result.stdout.splitlines()), "the runbook shows every check"


def test_submitting_and_scheduling_print_what_the_runbook_shows(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def run(*arguments: str) -> set[str]:
        result = CliRunner().invoke(pipeline_cli.main, list(arguments))
        assert result.exit_code == 0, result.output
        return {normal(line) for line in result.output.splitlines()}

    monkeypatch.setattr(pipeline_server, "POLL_SECONDS", 0.01)
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


def test_the_gate_prints_what_the_runbook_shows() -> None:
    rules = [re.match(r"  pass  (\w+) (\S+) \((\S+) (\S+)\)", line) for line in output_with("gate passed")[1:]]
    verdict = {"passed": True, "rules": [
        {"metric": r[1], "value": float(r[2]), "comparison": r[3], "threshold": float(r[4]), "passed": True,
         "reason": ""} for r in rules if r]}  # fmt: skip
    assert verdict_lines(verdict) == output_with("gate passed")
    local = {f"gate.{i}.threshold": float(r[4]) for i, r in enumerate(rules) if r}
    assert local == {key: value for key, value in load_recipe("survival").local.items() if key.startswith("gate.")}


@cache
def templates() -> tuple[str, ...]:
    """Regular expressions of all texts with holes in the code: f-strings, and formats of log lines."""
    found = []
    for path in [*ROOT.glob("pipeline*.py"), *(ROOT / "tailtune").rglob("*.py")]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        inner = {id(value) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for value in node.values}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = [v.value if isinstance(v, ast.Constant) else None for v in node.values]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
                pieces = re.split(r"%(?:[-.\d]*[sdrfeg])", node.value.replace("%%", "\0"))
                parts = [x for one in pieces for x in (one.replace("\0", "%"), None)][:-1]
            else:
                continue
            if sum(len(re.findall(r"\w", str(part))) for part in parts if part) >= 6:
                found.append("".join(".*" if part is None else re.escape(str(part)) for part in parts))
    return tuple(found)


def is_said(line: str) -> bool:
    """Whether some text of the code, with its holes filled, is this line."""
    return any(re.fullmatch(template, line, re.DOTALL) for template in templates())


@pytest.mark.parametrize("words", ["survival in runs/demo", "the job is a PyTorchJob", "0 jobs would be deleted"])
def test_every_line_of_output_is_one_of_the_code(words: str) -> None:
    for line in output_with(words):
        text = line.removeprefix("tailtune | ")
        assert is_said(text) or re.fullmatch(r"gate: (passed|FAILED)", text), line


def test_the_reading_of_templates_finds_drift() -> None:
    assert is_said("train: job first-sft-fcae487e created, 1 nodes x 1 ranks")
    assert not is_said("train: job first-sft-fcae487e made, 1 nodes x 1 ranks")


def test_a_parameter_that_is_refused_says_what_the_runbook_shows() -> None:
    result = CliRunner().invoke(pipeline_cli.main, ["--dry-run", "-p", "epoch=2"])
    (shown,) = output_with("unknown key")
    assert result.stderr.startswith(shown.removesuffix("…"))


OF_OTHERS = {
    # Kubernetes, OpenShift, the operating system
    "ImagePullBackOff", "Pending", "Multi-Attach error", "No space left on device", "Permission denied", "OOMKilled",
    'persistentvolumeclaim "…" not found', "nodes are available",
}  # fmt: skip


@cache
def constants() -> str:
    """All texts of the code, in pieces between their holes."""
    found = []
    for path in [*ROOT.glob("pipeline*.py"), *(ROOT / "tailtune").rglob("*.py")]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                found += re.split(r"%(?:[-.\d]*[sdrfeg])", node.value)
    return "\n".join(found)


def quoted_messages() -> list[str]:
    """The code in the first column of the tables of errors, and what follows "If it does not work" as a message."""
    rows = re.findall(r"^\| (.*?) \|", RUNBOOK.read_text(encoding="utf-8"), re.MULTILINE)
    sections = re.split(r"^\| what (?:you see|it says) \|.*\n", RUNBOOK.read_text(encoding="utf-8"), flags=re.M)[1:]
    tables = [row for section in sections for row in section.split("\n\n")[0].splitlines() if row.startswith("| ")]
    assert rows and len(tables) > 25
    messages = [code for row in tables for code in re.findall(r"`([^`]+)`", row.split(" | ")[0])]
    text = " ".join(RUNBOOK.read_text(encoding="utf-8").split())
    return messages + re.findall(r"`([^`]+)`(?: or `[^`]+`)? means? that", text) + re.findall(
        r"\(`((?:out of memory|network)[^`]+)`\)", text)  # fmt: skip


def test_every_message_in_the_tables_is_one_of_the_code() -> None:
    for message in quoted_messages():
        if message in OF_OTHERS or re.fullmatch(r"(eval_)?loss", message):
            continue
        if is_said(f"train: {message.replace('checkpoint-…', 'checkpoint-1, next step is 2')}"):
            continue
        for piece in re.split(r"…|[()]|'[^']*'|\b\d+/\d+\b|stages\.\S+|\bnan\b", message):
            text = piece.strip(" .:;")
            assert len(text) < 4 or text in constants() or text in OF_OTHERS, message


# ---- figures ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [p for p in PAGES if p != README], ids=name_of)
def test_figures_of_speed_are_those_of_the_benchmarks(page: Path) -> None:
    measured = (ROOT / "BENCHMARKS.md").read_text(encoding="utf-8")
    text = " ".join(page.read_text(encoding="utf-8").split())
    for figure in re.findall(r"([\d.]+) times faster", text):
        assert re.search(rf"\| {re.escape(figure)} \|", measured), figure
    for share in re.findall(r"with (\d+) % of its memory", text):
        assert re.search(rf"\b{share} (?:and \d+ )?%", measured), share


def test_the_arithmetic_of_the_head_is_right() -> None:
    text = RUNBOOK.read_text(encoding="utf-8")
    (rows, width, millions, gigabytes) = re.search(
        r"([\d,]+) × ([\d,]+)\s+=\s+(\d+)\s+million\s+parameters, so about ([\d.]+)\s+GB", text
    ).groups()  # type: ignore[union-attr]
    count = int(rows.replace(",", "")) * int(width.replace(",", ""))
    assert round(count / 1e6) == int(millions) and round(count * 16 / 1e9, 1) == float(gigabytes)


def test_steps_are_numbered_in_order_and_have_all_four_parts() -> None:
    text = RUNBOOK.read_text(encoding="utf-8")
    numbers = [int(n) for n in re.findall(r"^## Step (\d+):", text, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))
    starts = [found.start() for found in re.finditer(r"^## ", text, re.MULTILINE)]
    for begin, end in pairwise([*starts, len(text)]):
        section = text[begin:end]
        if section.startswith("## Step"):
            assert "**You should see**" in section, section.splitlines()[0]
            assert "**Why.**" in section and "**If it does not work**" in section, section.splitlines()[0]
            assert "```bash" in section or "| what you want |" in section, section.splitlines()[0]


def test_the_example_of_the_journal_is_arithmetically_right() -> None:
    text = (ROOT / "docs" / "journal-template.md").read_text(encoding="utf-8")
    tuned, base, ratio = map(float, re.search(r"loss ([\d.]+), base ([\d.]+), ratio ([\d.]+)", text).groups())  # type: ignore[union-attr]
    assert round(tuned / base, 2) == ratio


def test_the_dashboards_parameters_are_those_of_the_pipeline() -> None:
    names = {*PARAMETERS} | {"recipe", "run_name", "local", *pipeline.DIRECTORIES}
    (step,) = re.findall(r"3\. Create run:.*?(?=\n4\. )", RUNBOOK.read_text(encoding="utf-8"), re.DOTALL)
    assert set(re.findall(r"`(\w+)`", step)) - {"tailtune"} <= names
