"""Submitting and scheduling over HTTP, with the real kfp client and the real command line."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from dashboard_server import Server, dashboard, logged_in
from http_server import NAMESPACE
from https_server import make_certificate, wrap
from kubernetes_server import ADMIN_ROLE, cluster

import pipeline
import pipeline_cli
import pipeline_server
from tailtune import images
from tailtune.errors import UserError
from tailtune.recipe.load import load_recipe

ROOT = Path(pipeline.__file__).parent
COMPILED = ROOT / "compiled" / "survival.yaml"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with logged_in(monkeypatch) as running:
        yield running


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(pipeline_cli.main, list(arguments))


def test_exactly_the_compiled_file_is_uploaded_and_started(server: Server) -> None:
    result = invoke("--submit", "--run-name", "mine", "-p", "epochs=2", "-p", "stages.0.trainer.weight_decay=0.1")
    assert result.exit_code == 0, result.stderr
    (run,) = server.runs.values()
    assert result.stdout == f"{server.url}/#/runs/details/{run['run_id']}\n"
    assert list(server.files.values()) == [COMPILED.read_bytes()]
    parameters = run["runtime_config"]["parameters"]
    recipe = json.loads(parameters["recipe"])
    assert parameters["epochs"] == 2 and parameters["run_name"] == "mine" == run["display_name"]
    assert recipe["stages"][0]["trainer"]["weight_decay"] == 0.1 and recipe["local"] == {}
    assert next(iter(server.experiments.values()))["display_name"] == "tailtune"


def test_a_second_run_of_a_name_is_refused_while_the_first_is_active(server: Server) -> None:
    assert invoke("--submit", "--run-name", "mine").exit_code == 0
    (run,) = server.runs
    refused = invoke("--submit", "--run-name", "mine", "-p", "learning_rate=1e-3")
    assert refused.exit_code == 2 and list(server.runs) == [run]
    assert refused.stderr == (
        f"error: run 'mine' is already in progress, as pipeline run {run}; wait for it, end it with "
        f"python pipeline.py --cancel {run}, choose another --run-name, or delete the run in the dashboard if its "
        "workflow is gone\n"
    )
    assert invoke("--submit", "--run-name", "another").exit_code == 0
    server.runs[run]["state"] = "FAILED"
    assert invoke("--submit", "--run-name", "mine").exit_code == 0


def test_a_run_is_submitted_after_oc_login_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Project and token are those of the login, the address is the DSPA's route, whose certificate is the router's."""
    public, private = make_certificate(tmp_path)
    dspas = "datasciencepipelinesapplications"
    with dashboard() as server, cluster(tmp_path / "cluster") as kubernetes:
        wrap(server.http, public, private)
        kubernetes.person = [*ADMIN_ROLE, ("list", f"{dspas}.opendatahub.io", dspas)]
        route = {"externalUrl": server.url.replace("http:", "https:")}
        kubernetes.objects[dspas, f"{NAMESPACE}/dspa"] = {"metadata": {"name": "dspa"},
                                                          "status": {"components": {"apiServer": route}}}  # fmt: skip
        server.token = kubernetes.token
        monkeypatch.setenv("KUBECONFIG", str(kubernetes.kubeconfig))
        monkeypatch.setattr(pipeline_server, "RETRY_SECONDS", 1)
        untrusted = invoke("--submit", "--run-name", "mine")
        assert untrusted.exit_code == 2 and "TAILTUNE_CA_FILE" in untrusted.stderr and not server.runs
        monkeypatch.setenv("TAILTUNE_CA_FILE", str(public))
        result = invoke("--submit", "--run-name", "mine")
        assert result.exit_code == 0, result.stderr
        (run,) = server.runs.values()
        assert result.stdout == f"{run['run_id']}\n"


@pytest.mark.parametrize("mode", [["--submit"], ["--schedule", "0 2 * * *"], ["--schedule", "0 2 * * *", "--latest"]])
@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        ("stages.0.trainer.warmup_step=10",
         "error: stages.0.trainer.warmup_step is not an argument of trl.SFTConfig, did you mean 'warmup_steps'?\n"),
        ("hardware.profile=B200", "error: hardware.profile 'B200' is not known; use auto or one of T4"),
        ("ca_secret=ca-bundle", "error: ca_secret 'ca-bundle' is also the name of a volume that every pod has"),
        ("workspace_pvc=my.claim", "error: recipe with workspace_pvc: cluster.workspace_claim: "),
    ],
)  # fmt: skip
def test_bad_values_are_refused_before_anything_is_uploaded(
    server: Server, mode: list[str], parameter: str, message: str
) -> None:
    result = invoke(*mode, "-p", parameter)
    assert result.exit_code == 2 and result.stderr.startswith(message)
    assert result.stdout == "" and not server.pipelines and not server.experiments
    assert not server.runs and not server.recurring
    assert invoke("--dry-run", "-p", parameter).stderr == result.stderr, "the same check"


def test_the_same_file_is_one_version_another_file_is_a_new_one(server: Server, tmp_path: Path) -> None:
    for name in ("one", "two"):
        assert invoke("--submit", "--run-name", name).exit_code == 0
    digest = hashlib.sha256(COMPILED.read_bytes()).hexdigest()[:8]
    client = pipeline_server.PipelineServer(pipeline_server.find_connection(None, None))
    other = tmp_path / "survival.yaml"
    other.write_bytes(COMPILED.read_bytes() + b"\n# other\n")
    client.upload(other, "survival", "other")
    names = [version["display_name"] for version in server.versions.values()]
    assert len(server.pipelines) == 1 and len(server.runs) == 2 and len(names) == 2 and names[1] == "other"
    assert names[0].endswith(f"-{digest}")


def test_a_compiled_file_that_is_out_of_date_is_not_submitted(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline_cli, "COMPILED", tmp_path)
    (tmp_path / "survival.yaml").write_bytes(COMPILED.read_bytes() + b"\n")
    result = invoke("--submit")
    assert result.exit_code == 2 and "run python pipeline.py first" in result.stderr and not server.pipelines


def test_the_steps_are_those_that_run_a_container() -> None:
    assert pipeline_cli.step_names(COMPILED) == {
        "resolve-recipe", "fetch-dataset", "write-parquet", "fetch-model", "train-stage", "evaluate-model",
        "promotion-gate", "write-report", "fail-if-rejected", "stop-jobs",
    }  # fmt: skip


@pytest.mark.parametrize(("status", "words"), [(401, "log in with oc login"), (403, "check your rights")])
def test_a_refused_token_is_reported_and_not_shown(server: Server, status: int, words: str) -> None:
    server.statuses = [status] * 9
    result = invoke("--submit")
    assert result.exit_code == 2 and words in result.stderr
    assert server.token not in result.stderr + result.stdout
    assert result.stderr.count("\n") == 1


def test_a_missing_server_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_server, "RETRY_SECONDS", 1)
    for name, value in (("ENDPOINT", "http://127.0.0.1:9"), ("NAMESPACE", "x"), ("TOKEN", "secret-token")):
        monkeypatch.setenv(f"TAILTUNE_{name}", value)
    result = invoke("--submit")
    assert result.exit_code == 2 and "http://127.0.0.1:9 does not answer" in result.stderr
    assert "secret-token" not in result.stderr


def test_applying_a_schedule_twice_leaves_one(server: Server) -> None:
    first = invoke("--schedule", "0 2 * * *", "-p", "epochs=1")
    again = invoke("--schedule", "30 3 * * 1", "--max-concurrency", "2", "--latest")
    assert first.exit_code == again.exit_code == 0, first.stderr + again.stderr
    (schedule,) = server.recurring.values()
    assert schedule["trigger"]["cron_schedule"]["cron"] == "0 30 3 * * 1"
    assert schedule["max_concurrency"] == "2" and schedule["no_catchup"] is True and schedule["mode"] == "ENABLE"
    assert "pipeline_version_id" not in schedule["pipeline_version_reference"]
    schedules = invoke("--list-schedules")
    assert schedules.stdout.startswith("survival\t0 30 3 * * 1\tenabled\t")
    deletion = invoke("--unschedule", "survival")
    assert deletion.exit_code == 0 and not server.recurring and deletion.stderr == "schedule 'survival' deleted\n"
    assert invoke("--unschedule", "survival").exit_code == 2


def schedule_with_a_run(server: Server) -> tuple[str, str]:
    """Create a schedule; return its id and that of its first run."""
    created = invoke("--schedule", "every 6 hours", "--schedule-name", "a-schedule-with-a-long-name")
    assert created.exit_code == 0, created.stderr
    (schedule,), (run,) = server.recurring, server.runs
    return schedule, run


def test_a_schedule_is_not_deleted_while_its_run_is_in_progress(server: Server) -> None:
    schedule, run = schedule_with_a_run(server)
    result = invoke("--unschedule", "a-schedule-with-a-long-name")
    assert result.exit_code == 0 and not server.lost and server.recurring[schedule]["status"] == "DISABLED"
    assert result.stderr.startswith(
        f"schedule 'a-schedule-with-a-long-name' is disabled and starts no more runs; run {run} continues. "
    )
    server.runs[run]["state"] = "SUCCEEDED"
    again = invoke("--unschedule", "a-schedule-with-a-long-name")
    assert again.stderr == "schedule 'a-schedule-with-a-long-name' deleted\n"
    assert not server.recurring and not server.lost and not server.terminated


def test_a_run_that_the_schedule_has_just_started_is_not_lost(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule, _ = schedule_with_a_run(server)
    server.runs.clear()
    monkeypatch.setattr(pipeline_server, "SETTLE_SECONDS", 1.0)
    server.report_seconds = 0.5
    run = server.start_scheduled_run(schedule)
    result = invoke("--unschedule", "a-schedule-with-a-long-name")
    assert f"run {run} continues" in result.stderr and not server.lost and schedule in server.recurring


def test_a_schedules_runs_are_ended_when_asked_to(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline_server, "POLL_SECONDS", 0.01)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    _, run = schedule_with_a_run(server)
    result = invoke("--unschedule", "a-schedule-with-a-long-name", "--end-runs")
    assert result.exit_code == 0, result.stderr
    assert server.terminated == [run] and not server.recurring and not server.lost
    assert "runs ended: 1" in result.stderr and result.stderr.endswith("deleted\n")


def test_a_changed_schedule_leaves_the_run_of_the_earlier_one(server: Server) -> None:
    earlier, run = schedule_with_a_run(server)
    changed = invoke("--schedule", "0 2 * * *", "--schedule-name", "a-schedule-with-a-long-name")
    assert changed.exit_code == 0 and not server.lost and not server.terminated
    assert f"the earlier schedule is disabled; run {run} continues, next to the new one's" in changed.stderr
    assert server.recurring.pop(earlier)["status"] == "DISABLED"
    (schedule,) = server.recurring.values()
    assert schedule["status"] == "ENABLED"


def test_the_runs_of_a_schedule_are_cancelled_by_its_name(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server cuts the schedule's name in the names of its runs."""
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    _, run = schedule_with_a_run(server)
    assert invoke("--cancel", "a-schedule-with-a-long-name").exit_code == 0
    assert server.terminated == [run]


@pytest.mark.parametrize(
    ("when", "cron"),
    [("0 2 * * *", "0 0 2 * * *"), ("15 0 2 * * *", "15 0 2 * * *"), ("*/10 8-18 * * 1-5", "0 */10 8-18 * * 1-5")],
)
def test_cron_gets_six_fields(when: str, cron: str) -> None:
    assert pipeline_server.six_fields(when) == cron


@pytest.mark.parametrize(
    ("when", "words"),
    [("2 * *", "give five or six fields"), ("0 25 * * *", "hour is '25'; give 0 to 23"), ("*/0 * * * *", "minute is"),
     ("0 2 * * mon", "weekday is 'mon'"), ("", "give five or six fields")],
)  # fmt: skip
def test_a_wrong_schedule_is_refused_before_anything_is_uploaded(server: Server, when: str, words: str) -> None:
    result = invoke("--schedule", when)
    assert result.exit_code == 2 and words in result.stderr and not server.pipelines


def test_a_schedule_of_the_latest_version_carries_only_the_given_parameters(server: Server) -> None:
    assert invoke("--schedule", "0 2 * * *", "--latest", "-p", "epochs=1").exit_code == 0
    (schedule,) = server.recurring.values()
    assert schedule["runtime_config"]["parameters"] == {"epochs": 1}, "the recipe is always that of the version"
    refused = invoke("--schedule", "0 2 * * *", "--latest", "-p", "data.skip_unchanged=true")
    assert refused.exit_code == 2 and "so -p data.skip_unchanged has no place" in refused.stderr
    pinned = invoke("--schedule", "0 2 * * *", "-p", "data.skip_unchanged=true")
    assert pinned.exit_code == 0, pinned.stderr
    (schedule,) = server.recurring.values()
    assert json.loads(schedule["runtime_config"]["parameters"]["recipe"])["data"]["skip_unchanged"] is True


def test_a_users_own_recipe_is_compiled_and_submitted(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = json.loads(load_recipe("survival").to_json()) | {"name": "mine", "local": {}}
    recipe["resources"]["step_memory"] = "3Gi"
    Path("mine.json").write_text(json.dumps(recipe))
    result = invoke("--submit", "--recipe", "mine.json")
    assert result.exit_code == 0, result.stderr
    assert [entry["display_name"] for entry in server.pipelines.values()] == ["mine"]
    (file,) = server.files.values()
    assert b"3Gi" in file


def test_the_address_in_the_dashboard(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAILTUNE_DASHBOARD", "https://data-science-gateway.apps.example.com/")
    result = invoke("--submit")
    (run,) = server.runs
    assert result.stdout == (
        f"https://data-science-gateway.apps.example.com/develop-train/pipelines/runs/{NAMESPACE}/runs/{run}\n"
    )


def test_cancelling_ends_the_run(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mine", "other"):
        assert invoke("--submit", "--run-name", name).exit_code == 0
    run = next(run_id for run_id, content in server.runs.items() if content["display_name"] == "mine")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    result = invoke("--cancel", "mine")
    assert result.exit_code == 0 and server.terminated == [run]
    assert "jobs are left to the run's own steps: no cluster to talk to" in result.stderr
    again = invoke("--cancel", run)
    assert again.exit_code == 0 and server.terminated == [run], "a run that is ending is not terminated again"
    server.runs[run]["state"] = "CANCELED"
    assert invoke("--cancel", "mine").exit_code == 2


def test_cancelling_by_display_name_deletes_the_jobs_of_the_run(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert invoke("--submit", "--run-name", "mine").exit_code == 0
    (run,) = server.runs
    server.runs[run]["display_name"] = "Duplicate of mine"
    with cluster(tmp_path / "cluster") as kubernetes:
        monkeypatch.setenv("KUBECONFIG", str(kubernetes.kubeconfig))

        def jobs(*labels: dict[str, str]) -> None:
            for number, own in enumerate(labels):
                managed = {"app.kubernetes.io/managed-by": "tailtune", **own}
                name = f"job-{number}"
                kubernetes.jobs[name] = {
                    "kind": "PyTorchJob", "status": {}, "metadata": {"name": name, "labels": managed}
                }  # fmt: skip
                kubernetes.pods[name] = []

        jobs({"tailtune.io/run": "mine"}, {"tailtune.io/pipeline-run": run}, {"tailtune.io/run": "other"})
        result = invoke("--cancel", "Duplicate of mine")
        assert result.exit_code == 0, result.stderr
        assert result.stdout == "job-1\n" and "runs ended: 1, jobs deleted: 1 at http://127" in result.stderr
        by_id = invoke("--cancel", run)
        assert by_id.exit_code == 0 and by_id.stdout == "", "another run of that name keeps its job"
        assert invoke("--cancel", "mine").stdout == "job-0\n"
        unknown = invoke("--cancel", "unknown")
        assert unknown.exit_code == 2 and f"no active run 'unknown' in {NAMESPACE}; see" in unknown.stderr
        kubernetes.allowed = [rule for rule in kubernetes.allowed if rule[1] != "kubeflow.org"]
        ended = invoke("--cancel", "mine")
        assert ended.exit_code == 0 and "runs ended: 1, jobs deleted: 0" in ended.stderr
        assert "jobs are left to the run's own steps: this account is not allowed to list training jobs" in ended.stderr
        refused = invoke("--cancel", "unknown")
        assert refused.exit_code == 2 and "not allowed to list training jobs" in refused.stderr


def test_a_run_is_not_started_twice_when_the_answer_is_lost(server: Server) -> None:
    client = pipeline_server.PipelineServer(pipeline_server.find_connection(None, None))
    pipeline_id, version = client.upload(COMPILED, "survival", "one")
    client.call(client.client.create_experiment, "tailtune", namespace=NAMESPACE)
    requests = []

    def break_off(*args: object, **kwargs: object) -> None:
        requests.append(args)
        raise ConnectionError("the answer is lost")

    client.client.run_pipeline = break_off
    with pytest.raises(
        UserError, match=r"does not answer: the answer is lost; check --endpoint.*; see in the dashboard"
    ):
        client.start(pipeline_id, version, experiment="tailtune", run_name="mine", parameters={})
    assert len(requests) == 1


def test_a_start_that_is_refused_asks_to_check_the_dashboard(server: Server) -> None:
    client = pipeline_server.PipelineServer(pipeline_server.find_connection(None, None))
    with pytest.raises(UserError) as error:
        client.start("none", "none", experiment="tailtune", run_name="mine", parameters={})
    assert error.value.remedy == "see in the dashboard that 'mine' is not there before you try again"


def test_images_and_gpu_are_parameters_of_the_run(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The committed file serves every project and registry; `-p` and the registry's option mean the same."""
    committed = (ROOT / "compiled" / "survival.yaml").read_bytes()
    trainer = images.TRAINER
    for number, (arguments, expected) in enumerate((
        ([], trainer),
        (["--image-registry", "quay.io/me"], f"quay.io/me/{trainer}"),
        (["-p", "trainer_image=quay.io/you/t:1"], "quay.io/you/t:1"),
        (["--image-registry", "quay.io/me", "-p", "trainer_image=quay.io/you/t:1"], "quay.io/you/t:1"),
    )):  # fmt: skip
        result = invoke("--submit", "--run-name", f"run-{number}", "-p", "gpu=", *arguments)
        assert result.exit_code == 0, result.stderr
        parameters = list(server.runs.values())[-1]["runtime_config"]["parameters"]
        assert (parameters["trainer_image"], parameters["gpu"]) == (expected, "")
    monkeypatch.setenv("TAILTUNE_IMAGE_REGISTRY", "registry.example.com/ml")
    assert invoke("--schedule", "every 6 hours").exit_code == 0
    (schedule,) = server.recurring.values()
    assert schedule["runtime_config"]["parameters"]["trainer_image"] == f"registry.example.com/ml/{trainer}"
    assert {*server.files.values()} == {committed}
    wrong = invoke("--submit", "--image-registry", "https://quay.io")
    assert wrong.exit_code == 2 and "give HOST[:PORT]/PROJECT without scheme and tag" in wrong.stderr


def test_other_nodes_are_compiled_for_the_run(server: Server) -> None:
    result = invoke("--submit", "-p", "resources.node_selector={pool: cpu}", "-p", "queue=tailtune")
    assert result.exit_code == 0, result.stderr
    (file,) = server.files.values()
    assert file.count(b"pool: cpu") == 10 == file.count(b"kueue.x-k8s.io/queue-name: tailtune") + 1, "every step"


def test_overrides_belong_to_the_run_not_to_the_version(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = json.loads(load_recipe("survival").to_json()) | {"name": "mine", "local": {}}
    Path("mine.json").write_text(json.dumps(recipe))
    for epochs in ("1", "2"):
        result = invoke("--submit", "--recipe", "mine.json", "--run-name", f"epochs-{epochs}", "-p", f"epochs={epochs}")
        assert result.exit_code == 0, result.stderr
    assert len(server.versions) == 1, "the same file, so the same version"
    Path("mine.json").write_text(json.dumps({**recipe, "name": "survival", "seed": 1}))
    named = invoke("--submit", "--recipe", "mine.json")
    assert named.exit_code == 2 and "give it another name" in named.stderr


def test_an_interval(server: Server) -> None:
    assert invoke("--schedule", "every 6 hours").exit_code == 0
    (schedule,) = server.recurring.values()
    assert schedule["trigger"]["periodic_schedule"]["interval_second"] == "21600"
