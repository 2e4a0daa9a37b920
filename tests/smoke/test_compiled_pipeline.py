"""compiled/survival.yaml as it is in the repository, uploaded in a project of another name: every step is a pod there.

Steps and training pods are containers with the volumes, users and credentials of their pods, which are admitted as on
plain Kubernetes or under OpenShift's restricted-v2.
"""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from admission import INTERNAL_REGISTRY, Admission
from argo import Workflow
from conftest import write_rows
from container import why_not
from https_server import make_certificate
from kubelet import ROOT, Kubelet
from kubernetes_server import Server, cluster

from tailtune import __version__
from tailtune.recipe.load import load_recipe, with_overrides

PROJECT, REGISTRY, RUN = "other-name", "registry.example.com/team", "first"
COMPILED = (ROOT / "compiled" / "survival.yaml").read_text()
STEPS = {"resolve-recipe": "pipeline", "fetch-dataset": "pipeline", "fetch-model": "pipeline",
         "write-parquet": "pipeline", "train-stage": "pipeline", "evaluate-model": "trainer",
         "promotion-gate": "pipeline", "write-report": "trainer", "stop-jobs": "pipeline"}  # fmt: skip
"""The image of each step that runs."""
RECIPE = {
    "model.small": {"model_type": "smollm3", "vocab_size": 400, "hidden_size": 32, "intermediate_size": 64,
                    "num_layers": 3, "num_heads": 4, "num_key_value_heads": 2, "pretrain_steps": 2},
    "evaluation.num_generated_answers": 2, "generation.max_new_tokens": 4,
    "demo.questions": ["What is the easiest loop knot to tie?"],
    "gate.0.threshold": 9, "gate.1.threshold": 9, "gate.2.threshold": 0,
    "gate.3.metric": "tuned_answer_words", "gate.3.threshold": 0,
}  # fmt: skip
"""What a person edits in the run parameter `recipe`, so that the run is short and passes its gate."""
PARAMETERS: dict[str, Any] = {
    "run_name": RUN, "base_model": "small", "data_source": "/shared/data/rows.jsonl", "epochs": 1, "batch_size": 4,
    "num_nodes": 2, "gpu": "", "recipe": with_overrides(load_recipe("survival"), RECIPE).to_json(),
}  # fmt: skip
IMAGES = {f"{image}_image": f"{REGISTRY}/tailtune-{image}:7" for image in ("pipeline", "trainer")}
"""Run parameters where no image stream makes the short names of the compiled file those of the project's own images."""


@pytest.fixture(scope="module", autouse=True)
def containers(tmp_path_factory: pytest.TempPathFactory) -> None:
    if why := why_not(tmp_path_factory.mktemp("root")):
        pytest.skip(f"this machine lets no user make a container: {why}")


@contextmanager
def project(folder: Path, *, openshift: bool) -> Iterator[Server]:
    """A cluster with one project, in which deploy/ and the images are."""
    with cluster(folder, namespace=PROJECT) as server:
        server.objects["serviceaccounts", f"{PROJECT}/tailtune-training"] = {"automountServiceAccountToken": False}
        server.serve_tls(*make_certificate(folder))
        certificate = folder / "ca-bundle.crt"
        server.is_openshift = openshift
        if openshift:  # and its projects may enforce the restricted standard as well
            server.admission = Admission(PROJECT, "restricted", range(1000100000, 1000110000))
            server.kubelet = Kubelet(server, certificate)
        else:
            server.groups.remove("image.openshift.io")
            for image in ("pipeline", "trainer"):
                del server.objects["imagestreamtags", f"{PROJECT}/tailtune-{image}:{__version__}"]
            server.admission = Admission(PROJECT, "baseline")
            server.kubelet = Kubelet(server, certificate, REGISTRY, "7")
        write_rows(server.kubelet.claim("training-data-pvc") / "rows.jsonl")
        yield server


def projects_asked_for(server: Server) -> set[str]:
    return set(re.findall(r"/namespaces/([^/ ]+)", "\n".join(server.requests)))


@pytest.mark.parametrize(
    ("openshift", "kind"),
    [
        pytest.param(True, "pytorchjob", id="restricted-v2"),
        pytest.param(True, "trainjob", id="restricted-v2 TrainJob", marks=pytest.mark.slow),
        pytest.param(False, "pytorchjob", id="Kubernetes", marks=pytest.mark.slow),
    ],
)
def test_the_file_runs_in_a_project_of_another_name(tmp_path: Path, openshift: bool, kind: str) -> None:
    with project(tmp_path, openshift=openshift) as server:
        if kind == "trainjob":
            server.install_trainer(only=True)
            server.trainer.install_version_2_1()
        workflow = Workflow(server, COMPILED, {**PARAMETERS, **({} if openshift else IMAGES)})
        phase = workflow.run(seconds=600)
        assert phase == "Succeeded" and not server.refused_pods, workflow.log()
        assert {name for name, phase in workflow.phases.items() if name in STEPS and phase == "Succeeded"} == {*STEPS}
        assert workflow.phases["condition-2"] == "Skipped", "the gate has passed"
        assert [*workflow.phases][-1] == "stop-jobs"

        step_images = {pod.role.split(".")[-2]: pod.container["image"] for pod in workflow.steps}
        registry, tag = (f"{INTERNAL_REGISTRY}/{PROJECT}", __version__) if openshift else (REGISTRY, "7")
        assert step_images == {step: f"{registry}/tailtune-{image}:{tag}" for step, image in STEPS.items()}
        job_pods = [pod for pods in server.pods.values() for pod in pods]
        assert [pod.container["image"] for pod in job_pods] == [f"{registry}/tailtune-trainer:{tag}"] * 2
        assert {pod.manifest["metadata"]["namespace"] for pod in [*workflow.steps, *job_pods]} == {PROJECT}
        assert projects_asked_for(server) == {PROJECT}
        users = {pod.container["securityContext"].get("runAsUser") for pod in job_pods}
        assert users == {1000100000 if openshift else None}

        (job,) = server.jobs.values()
        assert job["kind"].lower() == kind and job["metadata"]["namespace"] == PROJECT
        assert all(pod.process and pod.process.poll() == 0 for pod in job_pods)
        assert server.kubelet is not None
        models, workspace = (server.kubelet.claim(name) / RUN for name in ("trained-models-pvc", "workspace-pvc"))
        assert (models / "best_model" / "model.safetensors").is_file()
        assert json.loads((models / "training_summary.json").read_text())["world_size"] == 2
        assert json.loads((workspace / "verdict.json").read_text())["passed"] is True
        assert (workspace / "report.html").read_bytes() == workflow.artifacts["write-report/report"]


EXECUTORS = {"limits": {"cpu": "500m", "memory": "512Mi"}, "requests": {"cpu": "10m", "memory": "32Mi"}}
HARD_WIRED = "    import tailtune.jobs.kubernetes as k; k._namespace = lambda: 'lyric-professor'\n"


def without_cpu(workflow: Workflow) -> None:
    for executor in workflow.spec["deploymentSpec"]["executors"].values():
        for name in [name for name in executor["container"]["resources"] if "cpu" in name.lower()]:
            del executor["container"]["resources"][name]


def with_project_in_the_code(workflow: Workflow) -> None:
    command = workflow.spec["deploymentSpec"]["executors"]["exec-resolve-recipe"]["container"]["command"]
    command[-1] = command[-1].replace("    from tailtune.log", f"{HARD_WIRED}    from tailtune.log", 1)


def without_a_parameter(workflow: Workflow) -> None:
    """As kfp compiles a task inside of groups when it does not know that the task takes the parameter."""
    group, root = workflow.spec["components"]["comp-exit-handler-1"], workflow.spec["root"]
    task = root["dag"]["tasks"]["exit-handler-1"]
    for parameters in (group["inputDefinitions"]["parameters"], task["inputs"]["parameters"]):
        del parameters["pipelinechannel--pipeline_image"]


def without_resources_of_argo(workflow: Workflow) -> None:
    workflow.executor_resources = None


def with_certificates_in_the_first_step(workflow: Workflow) -> None:
    """Where no step before it refuses the secret's name."""
    workflow.kubernetes["exec-resolve-recipe"] = {
        "secretAsVolume": workflow.kubernetes["exec-fetch-dataset"]["secretAsVolume"]
    }


@pytest.mark.parametrize(
    ("change", "parameters", "phase", "message"),
    [
        (without_cpu, {}, "Error", "failed quota: compute: must specify requests.cpu for: main"),
        (without_resources_of_argo, {}, None, "must specify requests.cpu for: init,wait"),
        (with_project_in_the_code, {}, "Failed", "is not allowed to create pytorchjobs, get pytorchjobs"),
        (without_a_parameter, {}, "Failed", "parent DAG does not have input parameter pipelinechannel--pipeline_image"),
        (None, {"pipeline_image": f"{REGISTRY}/tailtune-pipeline:7"}, "Error", "Back-off pulling image"),
        (None, {"training_data_pvc": "of-another-project"}, "Failed", "volume of-another-project: does not exist"),
        (None, {"pipeline_image": f"{INTERNAL_REGISTRY}/{PROJECT}/tailtune-pipeline:0"}, "Error",
         "Back-off pulling image"),
        (with_certificates_in_the_first_step, {"ca_secret": "ca-bundle"}, "Error",
         "volumes[ca-bundle]: must have one volume type, may not specify more than 1: ['configMap', 'secret']"),
    ],
    ids=["no CPU under a quota", "no CPU for Argo under a quota", "project in the code", "parameter not passed on",
         "no image", "no claim", "no such tag", "a secret named as a volume of an earlier KFP"],
)  # fmt: skip
def test_what_the_cluster_would_not_run_fails(
    tmp_path: Path,
    change: Callable[[Workflow], None] | None,
    parameters: dict[str, Any],
    phase: str | None,
    message: str,
) -> None:
    with project(tmp_path, openshift=True) as server:
        hard = {"requests.cpu": "20", "limits.cpu": "40", "requests.memory": "64Gi"}
        server.objects["resourcequotas", f"{PROJECT}/compute"] = {"status": {"hard": hard, "used": {}}}
        certificate = (tmp_path / "ca-bundle.crt").read_text()
        server.objects["configmaps", f"{PROJECT}/dsp-trusted-ca-dspa"] = {"data": {"dsp-ca.crt": certificate}}
        workflow = Workflow(server, COMPILED, {**PARAMETERS, **parameters}, executor_resources=EXECUTORS,
                            ca_config_map="dsp-trusted-ca-dspa")  # fmt: skip
        if change:
            change(workflow)
        assert workflow.run(seconds=4 if "pipeline_image" in parameters else 60) == "Failed"
        assert workflow.phases.get("resolve-recipe") == phase, workflow.log()
        assert message in workflow.log() + json.dumps([pod.manifest["status"] for pod in workflow.steps])
        assert "fetch-dataset" not in workflow.phases
        assert ("stop-jobs" in workflow.phases) == (phase is not None), "unless the run's first driver is refused"
        assert not server.jobs
