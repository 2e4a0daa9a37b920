"""JSON Lines → Parquet: the tailtune step beside `datasets` and a pandas loop, in one run.

    python benchmarks/parquet.py                      # 5,000,000 rows, 1.3 GB, about 5 minutes
    python benchmarks/parquet.py --rows 200000 --repeats 1

Every way runs in a process of its own, so that its peak of resident memory is its own.
"""

import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click

SAMPLE = Path(__file__).resolve().parent.parent / "tailtune" / "recipes" / "samples" / "survival.jsonl"
COLUMNS = {"full-question": "For {topic}, {question}", "answer": "{answer}"}


def tailtune_step(source: Path, out: Path, num_rows: int) -> int:
    """All of the step: checks, mapping, rejects, duplicates, compression, hash of the result, manifest."""
    from tailtune.parquet.write import write_parquet
    from tailtune.recipe.schema import Data

    data = Data(source=str(source), columns=COLUMNS, split_by="full-question")
    return write_parquet(source, out, data).num_rows


def datasets_map(source: Path, out: Path, num_rows: int) -> int:
    """Batched and in two processes, its fastest way. No rejects, no duplicates: a bad row ends it."""
    import datasets

    def fill(batch: dict[str, list[str]]) -> dict[str, list[str]]:
        pairs = zip(batch["topic"], batch["question"], strict=True)
        return {"full-question": [f"For {topic}, {question}" for topic, question in pairs]}

    table = datasets.load_dataset("json", data_files=str(source), split="train", cache_dir=str(out / "cache"))
    table = table.map(fill, batched=True, num_proc=2, remove_columns=["topic", "question"])
    table.to_parquet(str(out / "data.parquet"))
    return len(table)


def pandas_loop(source: Path, out: Path, num_rows: int) -> int:
    """Row by row, as notebooks do it. The whole file is in memory, so only its first rows are read."""
    import pandas as pd  # type: ignore[import-untyped]

    frame = pd.read_json(source, lines=True, nrows=num_rows)
    rows = []
    for _, row in frame.iterrows():
        rows.append({"full-question": f"For {row['topic']}, {row['question']}", "answer": row["answer"]})
    pd.DataFrame(rows).to_parquet(out / "data.parquet", compression="zstd")
    return len(rows)


WAYS: dict[str, Callable[[Path, Path, int], int]] = {
    "tailtune": tailtune_step,
    "datasets, batched map, 2 processes": datasets_map,
    "pandas, row by row": pandas_loop,
}


def generate(path: Path, num_rows: int) -> None:
    """Rows like survival's: its topics and questions, answers of four clauses of its answers."""
    sample = [json.loads(line) for line in SAMPLE.read_text(encoding="utf-8").splitlines()]
    topics = sorted({row["topic"] for row in sample})
    questions = [row["question"].rstrip("?") for row in sample]
    clauses = [part.strip() for row in sample for part in re.split(r"[,.;]\s", row["answer"]) if part.strip()]
    chosen = random.Random(42)
    with path.open("w", encoding="utf-8") as file:
        for number in range(num_rows):
            question = f"{chosen.choice(questions)} ({number})?"
            answer = ", ".join(chosen.choices(clauses, k=4)) + "."
            row = {"topic": chosen.choice(topics), "question": question, "answer": answer}
            file.write(json.dumps(row) + "\n")


def measure(way: str, source: Path, num_rows: int) -> dict[str, float]:
    """Seconds, CPU seconds, peak of resident MiB and rows of one way in a process of its own."""
    environment = os.environ | {"HF_DATASETS_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    with tempfile.TemporaryDirectory(dir=source.parent.parent) as out:
        command = [sys.executable, __file__, "--worker", way, "--source", str(source), "--out", out]
        done = subprocess.run(
            [*command, "--rows", str(num_rows)], env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        size = next(Path(out).rglob("data.parquet")).stat().st_size
    return json.loads(done.stdout.splitlines()[-1]) | {"parquet_mb": size / 1e6}


def work(way: str, source: Path, out: Path, num_rows: int) -> None:
    target = out / "result" if way == "tailtune" else out
    start = time.perf_counter()
    done = WAYS[way](source, target, num_rows)
    seconds = time.perf_counter() - start
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    cpu_seconds = own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
    peak_mib = max(own.ru_maxrss, children.ru_maxrss) / 1024
    click.echo(json.dumps({"seconds": seconds, "cpu": cpu_seconds, "peak_mib": peak_mib, "rows": done}))


@click.command()
@click.option("--rows", default=5_000_000, show_default=True, help="Rows of the generated file.")
@click.option("--pandas-rows", default=100_000, show_default=True, help="Rows for pandas; the rest is extrapolated.")
@click.option("--repeats", default=3, show_default=True, help="Runs of each way; the fastest counts.")
@click.option("--worker", hidden=True)
@click.option("--source", type=Path, hidden=True)
@click.option("--out", type=Path, hidden=True)
def main(rows: int, pandas_rows: int, repeats: int, worker: str | None, source: Path, out: Path) -> None:
    """Print a Markdown table of the three ways."""
    if worker:
        work(worker, source, out, rows)
        return
    from tailtune.manifest import publish

    with tempfile.TemporaryDirectory(prefix="parquet-benchmark-") as folder:
        source = Path(folder) / "raw" / "data.jsonl"
        with publish(source.parent, {"step": "fetch"}, {}) as partial:  # as the fetch step leaves it
            generate(partial / source.name, rows)
        source_mb = source.stat().st_size / 1e6
        click.echo(f"{rows:,} rows, {source_mb:,.0f} MB of JSON Lines, {os.cpu_count()} CPU cores\n")
        results: dict[str, dict[str, float]] = {way: {} for way in WAYS}
        for _ in range(repeats):  # in turns, so that a slow minute of the machine meets all of them
            for way in WAYS:
                found = measure(way, source, min(rows, pandas_rows) if "pandas" in way else rows)
                results[way] = min(results[way] or found, found, key=lambda result: result["seconds"])
        click.echo("| way | MB/s | seconds | CPU seconds | peak resident MiB | Parquet MB | time, tailtune = 1 |")
        click.echo("|---|---:|---:|---:|---:|---:|---:|")
        for way, best in results.items():
            part = best["rows"] / rows
            mb_per_second = source_mb * part / best["seconds"]
            ratio = results["tailtune"]["seconds"] and best["seconds"] / part / results["tailtune"]["seconds"]
            note = "" if part == 1 else f", first {best['rows']:,.0f} rows"
            click.echo(
                f"| {way}{note} | {mb_per_second:.0f} | {best['seconds']:.1f} | {best['cpu']:.1f} "
                f"| {best['peak_mib']:.0f} | {best['parquet_mb']:.1f} | {ratio:.1f} |"
            )


if __name__ == "__main__":
    main()
