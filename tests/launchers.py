"""Run the launcher against the tests' server: in this process, or in its own process as a pipeline step does."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
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
    "user": "import json, os, sys\nfrom pathlib import Path\n"
            "error = {'problem': 'the data are no data', 'remedy': 'give data'}\n"
            "Path(os.environ['TAILTUNE_ERROR_FILE']).write_text(json.dumps(error))\n"
            "print('this line is for people only', flush=True)\nsys.exit(1)",
    "steps": "import json, os, time\nfrom pathlib import Path\npath = Path(os.environ['PROGRESS'])\n"
             "for i in range(1, 31):\n"
             "    train = {'loss': 3 / i, 'learning_rate': 1e-3, 'grad_norm': None, 'tokens_per_second': i * 100}\n"
             "    progress = {'step': i, 'max_steps': 30, 'remaining_seconds': 30 - i, 'train': train, 'eval': {},\n"
             "                'updated_at': '2026-01-01T00:00:00Z'}\n"
             "    if os.environ['RANK'] == '0':\n"
             "        path.with_suffix('.new').write_text(json.dumps(progress))\n"
             "        path.with_suffix('.new').rename(path)\n"
             "    time.sleep(0.1)",
    "long": "import time\nprint('step 2/9', flush=True)\ntime.sleep(300)",
    "dies": "import os, signal, time\nif os.environ['RANK'] == '0':\n    open(os.environ['STARTS'], 'a').write('x')\n"
            "    os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)",
    "until": "import os, sys, time\nfrom pathlib import Path\nfile = Path(os.environ['FILE'])\n"
             "while not file.exists(): time.sleep(0.05)\nsys.exit(int(file.read_text()))",
    "once": "import os, sys, time\nfrom pathlib import Path\nmarks = [Path(os.environ['MARK'] + r) for r in '01']\n"
            "if all(m.exists() for m in marks): sys.exit(0)\nmarks[int(os.environ['RANK'])].write_text('x')\n"
            "while not all(m.exists() for m in marks): time.sleep(0.05)\nprint('step 2/9', flush=True)\ntime.sleep(60)",
}  # fmt: skip


def make_job(module: str, kind: str = "auto", **changes: Any) -> Job:
    """A job of two pods that run one of MODULES; `changes` are other fields of the job."""
    pod = PodSpec(image="registry/trainer:1", cpu="2", memory="2Gi", cpu_request="1", memory_request="1Gi", gpu="",
              kind=kind,
              volumes=(("training-data-pvc", "/shared/data"), ("workspace-pvc", "/shared/workspace")))  # fmt: skip
    job = Job(name=job_name("a run", "sft"), module=f"pod_{module}", args=(), num_nodes=2, ranks_per_node=1,
              shutdown_seconds=5, start_seconds=60, pod=pod, labels={"tailtune.io/run": "a-run"})  # fmt: skip
    return replace(job, **changes)


def run(job: Job, api_seconds: float = 30) -> None:
    """Run the launcher in this process."""
    launcher.run_job(job, KubernetesClient(api_seconds=api_seconds))


def in_background(action: Callable[[], None]) -> threading.Thread:
    """Call the action in a thread."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    return thread


def line_numbers(text: str, rank: int) -> list[int]:
    """Numbers of the lines of the module "lines" in the log of a rank."""
    return [int(n) for n in re.findall(rf"^\[rank {rank}\] line (\d+)$", text, re.MULTILINE)]


def start_launcher(server: Server, program: str, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
    """Start Python with `program`, which can import the tests' modules and is logged in to the server.

    Its stderr is a pipe. `environment` is added to that of this process.
    """
    paths = os.pathsep.join([str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "KUBECONFIG": str(server.kubeconfig), "PYTHONPATH": paths, **environment}
    return subprocess.Popen([sys.executable, "-c", program, *arguments], stderr=subprocess.PIPE, text=True,
                            env=environment, start_new_session=True)  # fmt: skip


def wait_until(condition: Callable[[], Any], seconds: float = 120) -> None:
    give_up_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.05)


LAUNCH = """
import json
import sys
from tailtune.jobs import follow as launcher
from tailtune.jobs.kubernetes import KubernetesClient
from tailtune.log import step
from launchers import make_job
launcher.POLL_SECONDS = 0.2
with step("train"):
    labels = {"app.kubernetes.io/managed-by": "tailtune"} | (
        {"tailtune.io/pipeline-run": sys.argv[3]} if sys.argv[3] else {})
    job = make_job(sys.argv[1], kind=sys.argv[2], labels=labels, **json.loads(sys.argv[4]))
    launcher.run_job(job, KubernetesClient())
"""


def stop_step(process: "subprocess.Popen[str]") -> str:
    """Stop a launcher as Argo stops a step of a pipeline, and return what it printed.

    Argo's executor sends SIGTERM to the process group, and a second later it has ended, and all with it: argo,
    workflow/executor/os-specific/signal_linux.go, cmd/argoexec/commands/emissary.go.
    """
    signal_step(process)
    return process.communicate(timeout=30)[1]


def signal_step(process: "subprocess.Popen[str]") -> None:
    """Send the signals of `stop_step` to a process whose output somebody else reads."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        time.sleep(1)
        os.killpg(process.pid, signal.SIGKILL)


def start_job(
    server: Server, module: str = "long", kind: str = "auto", pipeline_run: str = "", **changes: Any
) -> "subprocess.Popen[str]":
    """Start the launcher in its own process and wait until the job's pods have started.

    `changes` are other fields of the job.
    """
    process = start_launcher(server, LAUNCH, module, kind, pipeline_run, json.dumps(changes))
    wait_until(lambda: any(p.process for pods in list(server.pods.values()) for p in pods))
    wait_until(lambda: not server.requests[-1].startswith("POST"))  # the launcher has the answer to the job's creation
    return process
