"""Compares the start and end of the processes that import torch, with and without garbage collection of their modules.

    python benchmarks/imports.py

The variants alternate. CPU seconds are those of the whole process, its end included.
"""

import resource
import subprocess
import sys

ROUNDS = 2
PROCESSES = {
    "resolve: checks the trainer's arguments": "from tailtune.recipe.load import load_recipe\n"
    "from tailtune.resolve import check_recipe\ncheck_recipe(load_recipe('survival'))",
    "evaluate, report": "from tailtune.kinds import kind_module\nkind_module('chat', 'evaluate')",
    "a rank": "from tailtune.kinds import kind_module\nkind_module('chat', 'train')",
}
COLLECTED = "import contextlib\nimport tailtune.imports\ntailtune.imports.uncollected = contextlib.nullcontext\n"


def cpu_seconds(program: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", program], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    print("| process | collected, CPU s | uncollected, CPU s | ratio |\n|---|---:|---:|---:|")
    for name, program in PROCESSES.items():
        pairs = [(cpu_seconds(COLLECTED + program), cpu_seconds(program)) for _ in range(ROUNDS)]
        collected, uncollected = (min(seconds) for seconds in zip(*pairs, strict=True))
        print(f"| {name} | {collected:.1f} | {uncollected:.1f} | {uncollected / collected:.2f} |", flush=True)


if __name__ == "__main__":
    main()
