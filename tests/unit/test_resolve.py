"""The first step checks everything before anything runs."""

import json
from pathlib import Path

import pytest
from conftest import as_written_before_train_weights, tiny_recipe
from kubernetes_server import Server
from launchers import make_job as pod_job

from tailtune import resolve as resolve_module
from tailtune.errors import UserError
from tailtune.jobs.pods import pod_template
from tailtune.jobs.train_step import make_job
from tailtune.recipe.load import load_recipe, with_local_overlay, with_overrides
from tailtune.recipe.schema import Recipe
from tailtune.resolve import RESERVED_VOLUMES, check_volume_names, claim_directories, resolve_run
from tailtune.run import MOUNTS, Run


@pytest.fixture(autouse=True)
def mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("data", "models", "workspace"):
        monkeypatch.setitem(MOUNTS, f"{kind}_dir", str(tmp_path / kind))


def resolve(folder: Path, name: str = "mine", *, local: bool = True, **overrides: object) -> Run:
    templates = [str(folder / kind / "{run}") for kind in ("data", "models", "workspace")]
    return resolve_run(tiny_recipe().to_json(), overrides, name, "", *templates, local=local)


def start(folder: Path, pipeline_run: str, **overrides: object) -> Run:
    """The first two steps on a cluster: one that mounts no volume, and one that does."""
    templates = [str(folder / kind / "{run}") for kind in ("data", "models", "workspace")]
    run = resolve_run(tiny_recipe(gpu="", num_nodes=2).to_json(), overrides, "mine", pipeline_run, *templates,
                      local=False)  # fmt: skip
    claim_directories(run)
    return run


def test_the_run_is_written_with_its_parameters_and_directories(tmp_path: Path) -> None:
    run = resolve(tmp_path, epochs=2.0)
    assert run.best_model_dir == tmp_path / "models" / "mine" / "best_model"
    assert json.loads(run.run_path.read_text())["recipe"]["stages"][0]["trainer"]["num_train_epochs"] == 2


def test_a_variable_of_the_ranks_is_part_of_the_runs_settings(tmp_path: Path, server: Server) -> None:
    """Else the ranks would train with 9 epochs, and the train step would look for a model of 2."""
    recipe = tiny_recipe(epochs=2, gpu="")
    raw = json.loads(recipe.to_json())
    raw["resources"]["environment"] = {"EPOCHS": "9"}
    templates = [str(tmp_path / kind / "{run}") for kind in ("data", "models", "workspace")]
    run = resolve_run(json.dumps(raw), {"seed": 3}, "mine", "", *templates, local=False)
    assert run.recipe.stages[0].trainer["num_train_epochs"] == 9
    job = make_job(run, run.parquet_dir, tmp_path, tmp_path / "recipe.json")
    assert "EPOCHS" not in job.environment


def test_a_local_run_is_on_one_node_in_every_stage(tmp_path: Path) -> None:
    recipe = tiny_recipe(**{"stages.0.resources.num_nodes": 2}).to_json()
    templates = [str(tmp_path / kind / "{run}") for kind in ("data", "models", "workspace")]
    with pytest.raises(
        UserError, match=r"num_nodes is 2, but this machine is one node; set stages\.0\.resources\.num_nodes=1"
    ):
        resolve_run(recipe, {"num_nodes": 1}, "mine", "", *templates, local=True)


@pytest.mark.parametrize("name", ["../up", "a/b", "", ".hidden", "two words", "x" * 101])
def test_a_name_that_cannot_be_a_directorys_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=r"run_name .*: use letters, digits"):
        resolve(tmp_path, name)
    assert not list(tmp_path.iterdir())


def test_a_run_without_a_name_is_named_by_its_id(tmp_path: Path, server: Server) -> None:
    templates = [str(tmp_path / kind / "{run}") for kind in ("data", "models", "workspace")]
    recipe = tiny_recipe(gpu="").to_json()
    run = resolve_run(recipe, {}, "", "0f3c-id", *templates, local=False)
    assert run.name == run.pipeline_run == "0f3c-id" and run.models_dir == tmp_path / "models" / "0f3c-id"
    assert resolve_run(recipe, {}, "mine", "another", *templates, local=True).pipeline_run == ""


def test_the_first_step_on_a_cluster_needs_no_volume_and_asks_the_doctor(tmp_path: Path, server: Server) -> None:
    server.claims.remove("workspace-pvc")
    with pytest.raises(UserError, match="volume workspace-pvc: does not exist"):
        start(tmp_path, "first")
    assert not any((tmp_path / kind).exists() for kind in ("data", "models", "workspace"))


@pytest.mark.parametrize(
    ("overrides", "is_checked"),
    [({"epochs": 2.0, "batch_size": 4, "learning_rate": 1e-3, "seed": 3}, False),
     ({"stages.0.trainer.weight_decay": 0.1}, True), ({"stages.0.trainer.warmup_step": 1}, True),
     ({"hardware.profile": "A100"}, True), ({"name": "mine"}, True)],
)  # fmt: skip
@pytest.mark.parametrize("local", [True, False])
def test_the_trainer_arguments_of_built_in_recipes_are_not_checked_in_every_run(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch, overrides: dict[str, object], is_checked: bool,
    local: bool,
) -> None:  # fmt: skip
    """It takes TRL, which takes many seconds to import in a small pod."""
    checked: list[Recipe] = []
    monkeypatch.setattr(resolve_module, "check_recipe", checked.append)
    recipe = load_recipe("survival")
    recipe = with_local_overlay(recipe) if local else with_overrides(recipe, {"gpu": ""})
    recipe = recipe.model_copy(update={"name": overrides.get("name", recipe.name)})
    given = {key: value for key, value in overrides.items() if key != "name"}
    templates = [str(tmp_path / kind / "{run}") for kind in ("data", "models", "workspace")]
    resolve_run(recipe.to_json(), given, "mine", "id", *templates, local=local)
    assert bool(checked) is is_checked


def test_a_second_run_of_a_name_waits_until_the_first_has_ended(tmp_path: Path, server: Server) -> None:
    server.workflows = {"first": "Running", "second": "Running"}
    before = start(tmp_path, "first").run_path.read_bytes()
    with pytest.raises(UserError, match="run 'mine' is already in progress, as pipeline run first"):
        start(tmp_path, "second")
    assert (tmp_path / "workspace" / "mine" / "run.json").read_bytes() == before
    server.workflows["first"] = "Failed"
    assert start(tmp_path, "second").pipeline_run == "second"
    server.workflows["second"] = ""  # not yet seen by Argo's controller
    with pytest.raises(UserError, match="as pipeline run second"):
        start(tmp_path, "third")
    del server.workflows["second"]  # deleted with its schedule, or after its time to live
    assert start(tmp_path, "third").pipeline_run == "third"


def test_an_account_that_may_not_see_other_runs_takes_over_and_says_so(
    tmp_path: Path, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.workflows = {"first": "Running"}
    server.allowed = [rule for rule in server.allowed if rule[2] != "workflows"]
    start(tmp_path, "first")
    assert start(tmp_path, "second").pipeline_run == "second"
    assert "whether pipeline run first has ended is unknown (403 " in caplog.text


@pytest.mark.parametrize("models_dir", ["TMP/elsewhere/{run}", "TMP/models", "TMP/models/shared", "TMP/models/{run}/x"])
def test_directories_outside_the_volumes_or_shared_by_runs_are_refused(tmp_path: Path, models_dir: str) -> None:
    templates = [
        str(tmp_path / "data" / "{run}"),
        models_dir.replace("TMP", str(tmp_path)),
        str(tmp_path / "workspace" / "{run}"),
    ]
    with pytest.raises(UserError, match=r"models_dir '.*': give a directory below .*/models, .* that ends in /\{run\}"):
        resolve_run(tiny_recipe().to_json(), {}, "mine", "id", *templates, local=False)
    assert not list(tmp_path.iterdir())


def test_more_than_one_node_is_refused_on_one_machine(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="num_nodes is 4, but this machine is one node; set num_nodes=1"):
        resolve(tmp_path, local=True, num_nodes=4)
    assert not list(tmp_path.iterdir())


def test_a_run_that_has_trained_keeps_its_data_and_settings(tmp_path: Path) -> None:
    run = resolve(tmp_path)
    resolve(tmp_path, learning_rate=0.5)  # nothing has trained yet
    resolve(tmp_path)
    (run.models_dir / "checkpoints" / "checkpoint-1").mkdir(parents=True)
    resolve(tmp_path, learning_rate=0.5)  # no complete checkpoint yet: a bad setting may be corrected
    resolve(tmp_path)
    (run.models_dir / "checkpoints" / "checkpoint-1" / "complete.json").write_text("{}")
    before = run.run_path.read_bytes()
    for overrides, field in (
        ({"learning_rate": 0.5}, "learning_rate"),
        ({"data_source": "s3://b/other.csv"}, "source"),
    ):
        with pytest.raises(UserError, match=rf"was trained with other settings: .*{field}.*choose another --run-name"):
            resolve(tmp_path, **overrides)
    assert run.run_path.read_bytes() == before
    resolve(tmp_path, **{"generation.max_new_tokens": 9})


def test_a_run_of_an_earlier_version_that_has_trained_is_refused(tmp_path: Path) -> None:
    run = resolve(tmp_path)
    run.run_path.write_text(as_written_before_train_weights(run))
    before = run.run_path.read_bytes()
    (run.models_dir / "checkpoints" / "checkpoint-1").mkdir(parents=True)
    (run.models_dir / "checkpoints" / "checkpoint-1" / "complete.json").write_text("{}")
    with pytest.raises(UserError) as error:
        resolve(tmp_path)
    assert error.value.problem == (
        "this run was made by an earlier version of tailtune, in which recipe.stages.0 had a different form"
    )
    assert error.value.remedy == "choose another --run-name, or check out that version"
    assert run.run_path.read_bytes() == before


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"ca_secret": "ca-bundle"}, "ca_secret 'ca-bundle' is also the name of a volume that every pod has"),
        (
            {"workspace_pvc": "kfp-launcher"},
            "workspace_pvc 'kfp-launcher' is also the name of a volume that every pod has",
        ),
        ({"s3_secret": "store", "hf_secret": "store"}, "hf_secret 'store' is also the name of another claim or secret"),
        ({"hf_secret": "workspace-pvc"}, "hf_secret 'workspace-pvc' is also the name of another claim or secret"),
    ],
)
def test_names_that_clash_in_a_steps_pod_are_refused(overrides: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}; choose another"):
        check_volume_names(tiny_recipe(**overrides).cluster)


def test_the_volumes_of_every_training_pod_are_reserved() -> None:
    job = pod_job("long")
    assert job.pod
    own = {volume["name"] for volume in pod_template(job, "main")["spec"]["volumes"]} - {n for n, _ in job.pod.volumes}
    assert own and own <= RESERVED_VOLUMES


def test_the_claims_may_be_one_claim() -> None:
    check_volume_names(tiny_recipe(**dict.fromkeys(("training_data_pvc", "trained_models_pvc"), "one")).cluster)
    check_volume_names(tiny_recipe().cluster)


def test_a_run_with_the_former_default_of_a_secret_goes_on(tmp_path: Path) -> None:
    run = resolve(tmp_path, ca_secret="ca-bundle")
    assert Run.from_json(run.run_path.read_text()).recipe.cluster.ca_secret == "ca-bundle"


def test_a_run_in_progress_is_named_before_other_settings(tmp_path: Path, server: Server) -> None:
    """The remedy for other settings is to delete the directories, which a run in progress uses."""
    server.workflows = {"first": "Running"}
    run = start(tmp_path, "first")
    checkpoint = run.models_dir / "checkpoints" / "checkpoint-5"
    checkpoint.mkdir(parents=True)
    (checkpoint / "complete.json").write_text("{}")
    with pytest.raises(UserError, match="run 'mine' is already in progress, as pipeline run first"):
        start(tmp_path, "second", learning_rate=0.5)
    server.workflows = {"first": "Failed"}
    with pytest.raises(UserError, match=r"trained with other settings: .*learning_rate"):
        start(tmp_path, "second", learning_rate=0.5)
    assert json.loads(run.owner_path.read_text())["pipeline_run"] == "first", "whose job may still train"
