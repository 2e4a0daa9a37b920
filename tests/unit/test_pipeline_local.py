"""Marked lines reach the user, everything reaches the log."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import subprocess, sys
from pathlib import Path
from pipeline_local import quiet
with quiet(Path(sys.argv[1])) as errors:
    print("pages of JSON")
    print("    tailtune | fetch: done", flush=True)
    subprocess.run(["sh", "-c", "echo 'tailtune | train: error: no data; give data' >&2; echo noise"])
print("outside", errors)
"""


def test_only_marked_lines_are_shown(tmp_path: Path) -> None:
    log = tmp_path / "deep" / "log"
    result = subprocess.run([sys.executable, "-c", PROGRAM, str(log)], capture_output=True, text=True, check=True)
    assert result.stderr.splitlines() == ["fetch: done"]
    assert result.stdout.splitlines() == ["outside ['train: no data; give data']"]
    assert "pages of JSON" in log.read_text() and "noise" in log.read_text()


def test_steps_overwrite_each_other_on_a_terminal(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from pipeline_local import quiet\n"
        "with quiet(Path(sys.argv[1])):\n"
        "    for text in ('train: step 1/2 loss 3', 'train: step 2/2 loss 2', 'train: done'):\n"
        "        print('tailtune | ' + text, flush=True)\n"
    )
    master, slave = os.openpty()
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "log")], stdout=slave, stderr=slave, check=True)
    os.close(slave)
    shown = os.read(master, 10_000).decode()
    os.close(master)
    assert "\r\x1b[Ktrain: step 2/2" in shown and shown.endswith("train: done\r\n")
