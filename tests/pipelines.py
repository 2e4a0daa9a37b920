"""The local pipeline as a user starts it, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import yaml
from conftest import TINY, write_rows

from tailtune.recipe.load import load_recipe

ROOT = Path(__file__).resolve().parents[1]
PASSING = [{"metric": "tuned_answer_loss", "comparison": "<", "threshold": 100}]


def write_recipe(folder: Path, **overrides: object) -> Path:
    """A user's own recipe file with the tiny settings."""
    recipe = json.loads(load_recipe("survival").to_json())
    recipe |= {"name": "tiny", "local": {}, "gate": PASSING}
    for key, value in {**TINY, "data.source": str(write_rows(folder / "rows.jsonl")), **overrides}.items():
        *path, last = key.split(".")
        at = recipe
        for part in path:
            at = at[int(part)] if part.isdigit() else at[part]
        at[last] = value
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return path


def start(folder: Path, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, str(ROOT / "pipeline.py"), "--local", *arguments]
    (folder / "tmp").mkdir(exist_ok=True)
    environment = {**os.environ, "TMPDIR": str(folder / "tmp")}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run(folder: Path, *arguments: str) -> tuple[int, str, str]:
    process = start(folder, *arguments)
    out, err = process.communicate(timeout=400)
    return process.returncode, out, err
