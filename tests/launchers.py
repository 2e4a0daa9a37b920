"""The launcher on the tests' server, in this process or in one of its own, as a pipeline's step runs it."""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from kubernetes_server import Server

from tailtune.jobs import follow as launcher
from tailtune.jobs.job import Job, PodSpec, job_name
from tailtune.jobs.kubernetes import KubernetesClient

HERE = Path(__file__).resolve().parent
MODULES = {
    "lines": "import os, time\nfor i in range(40):\n    print(f'line {i}', flush=True)\n    time.sleep(0.02)",
    "raises": "import os, time\nfrom torch.distributed.elastic.multiprocessing.errors import record\n"
              "@record\ndef main():\n    if os.environ['RANK'] == '1': raise RuntimeError('the disk is on fire')\n"
              "    time.sleep(60)\nmain()",
    "gpu": "import os, time\nfrom torch import OutOfMemoryError\n"
           "from torch.distributed.elastic.multiprocessing.errors import record\n"
           "@record\ndef main():\n    if os.environ['RANK'] == '0': raise OutOfMemoryError('CUDA out of memory.')\n"
           "    time.sleep(60)\nmain()",
    "user": "import sys, time\nprint('tailtune | train: error: the data are no data; give data', flush=True)\n"
            "sys.exit(1)",
    "steps": "import os, time\nfor i in range(1, 31):\n    rest = f'grad_norm 1.0 {i * 100} tokens/s ETA {30 - i} s'\n"
             "    if os.environ['RANK'] == '0':\n"
             "        print(f'tailtune | train: step {i}/30 loss {3 / i:.4f} lr 1.00e-03 {rest}', flush=True)\n"
             "    time.sleep(0.1)",
    "long": "import time\nprint('step 2/9', flush=True)\ntime.sleep(300)",
    "once": "import os, sys, time\nfrom pathlib import Path\nmarks = [Path(os.environ['MARK'] + r) for r in '01']\n"
            "if all(m.exists() for m in marks): sys.exit(0)\nmarks[int(os.environ['RANK'])].write_text('x')\n"
            "while not all(m.exists() for m in marks): time.sleep(0.05)\nprint('step 2/9', flush=True)\ntime.sleep(60)",
}  # fmt: skip


def make_job(module: str, kind: str = "auto", **changes: Any) -> Job:
    """Two pods that run one of MODULES."""
    pod = PodSpec(image="registry/trainer:1", cpu="2", memory="2Gi", cpu_request="1", memory_request="1Gi", gpu="",
              kind=kind,
              volumes=(("training-data-pvc", "/shared/data"), ("workspace-pvc", "/shared/workspace")))  # fmt: skip
    job = Job(name=job_name("a run", "sft"), module=f"pod_{module}", args=(), num_nodes=2, ranks_per_node=1,
              shutdown_seconds=5, start_seconds=60, pod=pod, labels={"tailtune.io/run": "a-run"})  # fmt: skip
    return replace(job, **changes)


def run(job: Job, api_seconds: float = 30) -> None:
    launcher.run_job(job, KubernetesClient(api_seconds=api_seconds))


def in_background(action: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    return thread


def numbered(text: str, rank: int) -> list[int]:
    return [int(n) for n in re.findall(rf"^\[rank {rank}\] line (\d+)$", text, re.MULTILINE)]


def start_launcher(server: Server, program: str, *arguments: str) -> "subprocess.Popen[str]":
    """Python that runs `program` beside the tests' modules, logged in to the server; its stderr is a pipe."""
    paths = os.pathsep.join([str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "KUBECONFIG": str(server.kubeconfig), "PYTHONPATH": paths}
    return subprocess.Popen([sys.executable, "-c", program, *arguments], stderr=subprocess.PIPE, text=True,
                            env=environment)  # fmt: skip


def wait_until(condition: Callable[[], Any], seconds: float = 120) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.05)


LAUNCH = """
import sys
from tailtune.jobs import follow as launcher
from tailtune.jobs.kubernetes import KubernetesClient
from tailtune.log import step
from launchers import make_job
launcher.POLL_SECONDS = 0.2
with step("train"):
    launcher.run_job(make_job(sys.argv[1], kind=sys.argv[2]), KubernetesClient())
"""


def start_job(server: Server, module: str = "long", kind: str = "auto") -> "subprocess.Popen[str]":
    """The launcher with a job whose pods have started."""
    process = start_launcher(server, LAUNCH, module, kind)
    wait_until(lambda: any(p.process for pods in list(server.pods.values()) for p in pods))
    return process
