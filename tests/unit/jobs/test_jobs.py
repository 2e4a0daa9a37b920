"""The local back end: torchrun with modules that fail in different ways."""

import inspect
import os
import sys
import tempfile
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import PContext
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend

from tailtune.jobs import node
from tailtune.jobs.job import Job, JobFailed
from tailtune.jobs.local import run_job
from tailtune.jobs.node import NodeLog, torchrun_options
from tailtune.train import torchrun

MODULES = {
    "settings": "import os\nassert not {'EPOCHS', 'BATCH_SIZE', 'LEARNING_RATE'} & {*os.environ}\n"
                "assert os.environ['OTHER'] == '1'",
    "fine": "print('all is well')",
    "raises": "import os\nfrom torch.distributed.elastic.multiprocessing.errors import record\n"
              "@record\ndef main():\n    if os.environ['RANK'] == '1': raise RuntimeError('the disk is on fire')\n"
              "    import time; time.sleep(60)\nmain()",
    "exits": "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(60)",
    "killed": "import os, signal, time\nif os.environ['RANK'] == '0': os.kill(os.getpid(), signal.SIGKILL)\n"
              "time.sleep(60)",
    "once": "import os, sys\nfrom pathlib import Path\n"
            "sys.exit(3 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' else 0)",
    "deaf": "import os, signal, time\ndef stop(*_):\n    start = time.monotonic()\n    while True:\n"
            "        print('asked to stop for', round(time.monotonic() - start), flush=True)\n        time.sleep(0.5)\n"
            "signal.signal(signal.SIGTERM, stop)\ntime.sleep(1)\n"
            "if os.environ['RANK'] == '1': os.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(60)",
    "stopped": "import os, signal, sys, time\n"
               "def stop(*_):\n    print('tailtune | checkpoint saved', flush=True)\n    sys.exit(143)\n"
               "signal.signal(signal.SIGTERM, stop)\ntime.sleep(1)\n"
               "launcher = int(os.environ['LAUNCHER'])\n"
               "if os.environ['RANK'] == '1': os.kill(launcher, signal.SIGTERM)\ntime.sleep(60)",
    "draws": "import sys\nprint('the last words')\n"
             "for i in range(100): print('tailtune ~ █ train: step', i)\nsys.exit(7)",
    "user": "import json, os, sys\nopen(os.environ['STARTS'], 'a').write('x')\n"
            "error = {'problem': 'the data are no data; none', 'remedy': 'give data'}\n"
            "open(os.environ['TAILTUNE_ERROR_FILE'], 'w').write(json.dumps(error))\n"
            "print('this line is for people only')\nsys.exit(1)",
}  # fmt: skip


@pytest.fixture
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Job:
    for name, source in MODULES.items():
        (tmp_path / f"job_{name}.py").write_text(source)
    environment = {"PYTHONPATH": str(tmp_path), "STARTS": str(tmp_path / "starts"), "LAUNCHER": str(os.getpid())}
    return Job(name="test", module=f"job_{request.param}", args=(), ranks_per_node=2, environment=environment,
               max_restarts=1 if request.param in ("once", "user") else 0, shutdown_seconds=5)  # fmt: skip


@pytest.mark.parametrize("job", ["fine", "once"], indirect=True)
def test_a_job_succeeds_at_the_first_or_second_attempt(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress_path, temporary = tmp_path / "progress.json", tmp_path / "tmp"
    progress_path.write_text("of an earlier job")
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    run_job(replace(job, progress_path=progress_path))
    assert not progress_path.exists() and not any(temporary.iterdir())


@pytest.mark.parametrize("job", ["settings"], indirect=True)
def test_settings_in_the_launchers_environment_do_not_reach_the_ranks(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would train something else than the launcher's key says, for example where an image sets them."""
    for name in ("EPOCHS", "BATCH_SIZE", "LEARNING_RATE", "OTHER"):
        monkeypatch.setenv(name, "1")
    run_job(job)


@pytest.mark.parametrize(
    ("job", "message"),
    [("raises", "the disk is on fire"),
     pytest.param("exits", "rank 1 failed first, exit status 7", marks=pytest.mark.slow),
     ("killed", r"rank 0 failed first, exit status -9 \(SIGKILL\)")],
    indirect=["job"],
)  # fmt: skip
def test_a_failure_names_the_first_rank_and_its_reason(job: Job, message: str) -> None:
    with pytest.raises(JobFailed, match=message) as error:
        run_job(job)
    assert "ChildFailedError" not in str(error.value) and "=====" not in str(error.value), (
        "only the ranks' lines, not torchrun's"
    )


@pytest.mark.parametrize("job", ["draws"], indirect=True)
def test_a_bar_is_passed_on_but_does_not_replace_the_last_words(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(JobFailed) as error:
        run_job(job)
    details = "\n".join(error.value.details)
    assert "the last words" in details and "step" not in details
    assert "tailtune ~ █ train: step 99\n" in capfd.readouterr().err


@pytest.mark.parametrize("job", ["user"], indirect=True)
def test_bad_input_is_not_retried(job: Job, tmp_path: Path) -> None:
    with pytest.raises(JobFailed) as error:
        run_job(job)
    assert (error.value.problem, error.value.remedy) == ("the data are no data; none", "give data")
    assert len((tmp_path / "starts").read_text()) <= 2  # one start of two ranks; the second may end before it writes


@pytest.mark.parametrize("job", ["deaf"], indirect=True)
def test_a_rank_gets_the_shutdown_seconds_to_stop_and_no_more(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(JobFailed):
        run_job(job)
    num_lines = capfd.readouterr().err.count("asked to stop")  # two a second and rank; a clock would count pauses too
    assert 2 * 2 * 3 < num_lines < 2 * 2 * 20  # 5 s; torchrun's own default is 30


def test_the_shutdown_seconds_are_passed_to_versions_of_torchrun_without_the_option(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    received = []
    monkeypatch.setattr(run, "main", lambda: received.append((sys.argv[1:], PContext.close.__defaults__)))
    own = PContext.close.__defaults__
    monkeypatch.setattr(PContext.close, "__defaults__", own)
    for version in ("2.12.0", "2.9.0+cu128"):
        monkeypatch.setattr(metadata, "version", lambda package, version=version: version)
        monkeypatch.setattr(sys, "argv", ["torchrun", "300", "-m", "module"])
        torchrun.main()
    assert received == [(["--shutdown-timeout=300", "-m", "module"], own), (["-m", "module"], (None, 300))]


@pytest.mark.parametrize("job", ["fine"], indirect=True)
def test_several_nodes_are_a_mistake_of_the_caller(job: Job) -> None:
    with pytest.raises(AssertionError, match="the resolve step"):
        run_job(Job(name="test", module=job.module, args=(), num_nodes=4))


def test_every_timeout_of_the_rendezvous_is_start_seconds() -> None:
    """The c10d backend connects with `read_timeout`, 60 s by default; other nodes wait for the first one's image."""
    environment = {"PET_MASTER_ADDR": "first", "PET_MASTER_PORT": "1", "PET_NODE_RANK": "1", "PET_NNODES": "4"}
    (option,) = (o for o in torchrun_options("job", 3600, environment) if o.startswith("--rdzv-conf="))
    conf = dict(pair.split("=") for pair in option.removeprefix("--rdzv-conf=").split(","))
    assert conf == {"is_host": "0", "join_timeout": "3600", "timeout": "3600", "read_timeout": "3600"}
    backend = inspect.getsource(c10d_rendezvous_backend)
    assert 'get_as_int("read_timeout"' in backend, "the name that torch reads"


def test_a_nodes_log_outlives_its_pod_and_its_restarts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("first", "second"):
        show = NodeLog(tmp_path / "logs" / "node-0.log")
        show(f"[rank 0] {text}\n")
        show.close()
    lines = (tmp_path / "logs" / "node-0.log").read_text().splitlines()
    assert [line for line in lines if not line.startswith("==== 20")] == ["[rank 0] first", "[rank 0] second"]
    assert len(lines) == 4 and capsys.readouterr().out == "[rank 0] first\n[rank 0] second\n"


@pytest.mark.parametrize("path", ["/dev/full", "/dev/null/node-0.log", "FIFO"])
def test_a_volume_that_is_full_or_hangs_does_not_hold_up_the_training(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "CLOSE_SECONDS", 0.1)
    monkeypatch.setattr(node, "NUM_WAITING_LINES", 2)
    if path == "FIFO":  # without a reader, opening it for writing never returns
        os.mkfifo(tmp_path / "fifo")
        path = str(tmp_path / "fifo")
    show = NodeLog(Path(path))
    for i in range(5):
        show(f"line {i}\n")
    show.close()
    assert capsys.readouterr().out == "".join(f"line {i}\n" for i in range(5))


@pytest.mark.parametrize("job", ["stopped"], indirect=True)
def test_a_stop_that_was_asked_for_is_no_traceback(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(JobFailed, match="was stopped by a signal"):
        run_job(job)
    err = capfd.readouterr().err
    assert "tailtune | checkpoint saved" in err
    assert "SignalException" not in err and "torch/distributed" not in err
