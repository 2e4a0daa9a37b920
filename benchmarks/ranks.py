"""Measures the cost of more ranks: the same training on 1, 2 and 4 ranks of one machine, started by the launcher.

    python benchmarks/ranks.py --data offline-practical-skills-qa.jsonl

Each rank has one thread. All runs use the same 16 rows per step, so their losses have to be the same. With more ranks
than cores, wall time means little; the CPU seconds of all processes show the overhead of the ranks.
"""

import json
import os
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parent))
from tail import child  # prepares model and data in a separate process

ROWS_PER_STEP = 16


def train(folder: Path, num_ranks: int, *, launcher: bool = True) -> dict[str, Any]:
    """Train one epoch. Returns seconds, CPU seconds of all processes and losses.

    Without `launcher`, the training module is started directly.
    """
    output = folder / f"ranks-{num_ranks}"
    shutil.rmtree(output, ignore_errors=True)
    settings = {"epochs": 1, "stages.0.trainer.per_device_train_batch_size": ROWS_PER_STEP // num_ranks,
                "stages.0.trainer.gradient_accumulation_steps": 1, "stages.0.trainer.logging_steps": 1,
                "stages.0.scale_learning_rate": False, "resources.num_nodes": 1,
                "resources.ranks_per_node": num_ranks}  # fmt: skip
    arguments = ["--recipe", "survival", "--data-dir", str(folder / "data"), "--model-dir", str(folder / "base"),
                 "--output-dir", str(output)]  # fmt: skip
    arguments += [part for key, value in settings.items() for part in ("-p", f"{key}={json.dumps(value)}")]
    program = f"""
import sys
from tailtune.jobs.job import Job
from tailtune.jobs.local import run_job
run_job(Job("ranks", "tailtune.train", tuple(sys.argv[1:]), ranks_per_node={num_ranks}))
"""
    command = [sys.executable, "-c", program] if launcher else [sys.executable, "-m", "tailtune.train"]
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([*command, *arguments], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    summary = json.loads((output / "training_summary.json").read_text())
    history = json.loads((output / "training_history.json").read_text())
    fill = summary["tail_training"]["fill_seconds"]
    return {
        "seconds": seconds,
        "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "fill_seconds": fill,
        "step_seconds": (summary["train_seconds"] - fill) / summary["num_steps"],
        "outside_seconds": seconds - summary["train_seconds"],
        "losses": [entry["loss"] for entry in history["train"]],
        "eval_loss": history["eval"][-1]["eval_loss"],
        "num_trainable": summary["num_trainable_parameters"],
    }


def all_reduce(num_ranks: int, num_bytes: int) -> float:
    """Return the median seconds to sum `num_bytes` of fp32 with gloo, which DDP does once per step."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={num_ranks}",
               f"--master-port={port}", __file__, "--child-all-reduce", str(num_bytes)]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    return float(output.split()[-1])


def all_reduce_child(num_bytes: int) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    gradient = torch.zeros(num_bytes // 4)
    seconds = []
    for _ in range(30):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(gradient)
        seconds.append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        print(statistics.median(seconds[5:]))
    dist.destroy_process_group()


@click.command()
@click.option("--data", type=click.Path(exists=True, path_type=Path), help="JSON Lines with topic, question, answer.")
@click.option("--folder", type=click.Path(path_type=Path), default="runs/.benchmark-ranks")
@click.option("--child-all-reduce", type=int, hidden=True)
def main(data: Path | None, folder: Path, child_all_reduce: int | None) -> None:
    if child_all_reduce is not None:
        all_reduce_child(child_all_reduce)
        return
    if data is None:
        raise click.UsageError("--data is missing; give a JSON Lines file with topic, question and answer")
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    folder.mkdir(parents=True, exist_ok=True)
    child(folder, "prepare", {"data": str(data.resolve()), "shape": "hidden128"})
    runs = {"1, without the launcher": train(folder, 1, launcher=False)}
    runs |= {str(number): train(folder, number) for number in (1, 2, 4)}
    single = runs["1"]
    for run, number in zip(runs.values(), (1, 1, 2, 4), strict=True):
        run["all_reduce_seconds"] = all_reduce(number, 4 * run["num_trainable"]) if number > 1 else 0.0
        pairs = zip(single["losses"], run["losses"], strict=True)
        run["difference"] = max([abs(a - b) / a for a, b in pairs][:-1])  # several ranks fill up the last step
    (folder / "results.json").write_text(json.dumps(runs, indent=1))
    print("| ranks | seconds | outside training | filling | step, ms | all-reduce in it, ms | CPU seconds | "
          "largest difference of a loss | eval_loss |\n|---|" + "---:|" * 8)  # fmt: skip
    for name, run in runs.items():
        print(f"| {name} | {run['seconds']:.0f} | {run['outside_seconds']:.1f} | {run['fill_seconds']:.1f} | "
              f"{1000 * run['step_seconds']:.0f} | {1000 * run['all_reduce_seconds']:.0f} | {run['cpu_seconds']:.0f} | "
              f"{run['difference']:.0e} | {run['eval_loss']:.5f} |")  # fmt: skip


if __name__ == "__main__":
    main()
