"""Tests on a real cluster.

    pytest --cluster tests/cluster

needs a login (KUBECONFIG) with the role `edit` in a project that has a pipeline server, what deploy/cluster-admin
grants, and the images of deploy/. How long it takes depends on the cluster; the runs are tiny and use only the CPU. The
pipeline's image has to contain a data set, or --cluster-parameter data_source= names one that the cluster can reach.
Only runs, models and data remain afterwards, all named clustertest-….
"""

import time

import pytest

from pipeline_server import PipelineServer, find_connection
from tailtune.jobs.kubernetes import KubernetesClient
from tailtune.jobs.objects import JOB_KINDS

TINY = (
    "base_model=small", "data_source=embedded", "epochs=1", "num_nodes=2", "ranks_per_node=1",
    "model.small.pretrain_steps=20", "evaluation.num_generated_answers=4", "generation.max_new_tokens=8",
    'gpu=""', 'resources.cpu="2"', "resources.cpu_request=200m", "resources.memory=4Gi",
    "resources.memory_request=1Gi", "gate.0.threshold=9", "gate.1.threshold=9", "gate.2.threshold=0",
    "gate.3.metric=tuned_answer_words", "gate.3.threshold=0",
)  # fmt: skip
"""Parameters of a run that needs few resources and passes its gate."""
NEEDED = (("get", "pods/log"), ("delete", "pods"), ("create", "pods/exec"), ("create", "pods/eviction"))


@pytest.fixture(scope="session")
def name() -> str:
    return f"clustertest-{int(time.time())}"


@pytest.fixture(scope="session")
def parameters(request: pytest.FixtureRequest) -> list[str]:
    given = [*TINY, *request.config.getoption("--cluster-parameter")]
    return [part for parameter in given for part in ("-p", parameter)]


@pytest.fixture(scope="session")
def server() -> PipelineServer:
    """kfp's client, for what has no command."""
    return PipelineServer(find_connection(None, None))


@pytest.fixture(scope="session")
def cluster(server: PipelineServer) -> KubernetesClient:
    """The cluster's API, for the faults. Skips tests if this person is not allowed to cause them."""
    cluster = KubernetesClient(server.connection.namespace, api_seconds=60)
    missing = [f"{verb} {resource}" for verb, resource in NEEDED if not cluster.may(verb, "", resource)]
    if not any(cluster.may("list", kind.GROUP, kind.PLURAL) for kind in JOB_KINDS.values()):
        missing.append("list training jobs")
    if missing:
        pytest.skip(f"needs the role edit in {cluster.namespace}, and deploy/cluster-admin: {', '.join(missing)}")
    return cluster
