"""Coverage-guided fuzzing for a minute. A target is a program in this folder."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
SECONDS = 60


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris has no wheel for this Python")
@pytest.mark.parametrize("target", sorted(path.stem for path in FOLDER.glob("*.py") if path != Path(__file__)))
def test_no_input_is_found_that_fails(target: str, tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / f"{target}.py"), "corpus", f"-max_total_time={SECONDS}", "-max_len=4096"]
    environment = {**os.environ, "PYTHONPATH": str(FOLDER.parents[1])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, errors="replace")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "DONE" in done.stderr, "it has run for the whole time"
