"""Compare converting JSON to Parquet with the tailtune step, with `datasets`, and with a pandas loop.

    python benchmarks/parquet.py                      # 760,000 rows, 199 MB
    python benchmarks/parquet.py --rows 200000 --repeats 1
    python benchmarks/parquet.py --only tailtune --array --level 9

Each variant runs in its own process, so that the peak of resident memory is measured separately.
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
    """Run the whole step: checks, columns, rejects, duplicates, compression, hash of the result, manifest."""
    from tailtune.parquet import write
    from tailtune.recipe.schema import Data

    write.COMPRESSION_LEVEL = int(os.environ.get("BENCHMARK_LEVEL", write.COMPRESSION_LEVEL))
    data = Data(source=str(source), columns=COLUMNS, split_by="full-question")
    return write.write_parquet(source, out, data).num_rows


def datasets_map(source: Path, out: Path, num_rows: int) -> int:
    """Map in batches and in two processes, the fastest way. A bad row is an error, and duplicates stay."""
    import datasets

    def fill(batch: dict[str, list[str]]) -> dict[str, list[str]]:
        pairs = zip(batch["topic"], batch["question"], strict=True)
        return {"full-question": [f"For {topic}, {question}" for topic, question in pairs]}

    table = datasets.load_dataset("json", data_files=str(source), split="train", cache_dir=str(out / "cache"))
    table = table.map(fill, batched=True, num_proc=2, remove_columns=["topic", "question"])
    table.to_parquet(str(out / "data.parquet"))
    return len(table)


def pandas_loop(source: Path, out: Path, num_rows: int) -> int:
    """Convert row by row, as notebooks do. Reads only the first rows, because pandas holds them all in memory."""
    import pandas as pd  # type: ignore[import-untyped]

    frame = pd.read_json(source, lines=True, nrows=num_rows)  # JSON Lines only
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


def generate(path: Path, num_rows: int, array: bool = False) -> None:
    """Write rows like those of survival: its topics and questions, and answers of four clauses from its answers."""
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
            before = ("[" if number == 0 else ",") if array else ""
            file.write(before + json.dumps(row) + "\n")
        file.write("]" if array else "")


def measure(way: str, source: Path, num_rows: int) -> dict[str, float]:
    """Run one variant in its own process; return its seconds, CPU seconds, peak resident MiB, and rows."""
    environment = os.environ | {"HF_DATASETS_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    with tempfile.TemporaryDirectory(dir=source.parent.parent) as out:
        command = [sys.executable, __file__, "--worker", way, "--source", str(source), "--out", out]
        process = subprocess.run(
            [*command, "--rows", str(num_rows)], env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        size = next(Path(out).rglob("data.parquet")).stat().st_size
    return json.loads(process.stdout.splitlines()[-1]) | {"parquet_mb": size / 1e6}


def work(way: str, source: Path, out: Path, num_rows: int) -> None:
    target = out / "result" if way == "tailtune" else out
    start = time.perf_counter()
    num_converted = WAYS[way](source, target, num_rows)
    seconds = time.perf_counter() - start
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    cpu_seconds = own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
    peak_mib = max(own.ru_maxrss, children.ru_maxrss) / 1024
    click.echo(json.dumps({"seconds": seconds, "cpu": cpu_seconds, "peak_mib": peak_mib, "rows": num_converted}))


@click.command()
@click.option("--rows", default=760_000, show_default=True, help="Rows of the generated file.")
@click.option("--pandas-rows", default=100_000, show_default=True, help="Rows for pandas; the rest is extrapolated.")
@click.option("--repeats", default=3, show_default=True, help="Runs of each variant; the fastest counts.")
@click.option("--only", type=click.Choice(list(WAYS)), help="Measure only this variant.")
@click.option("--array", is_flag=True, help="Generate a JSON array instead of JSON Lines; pandas cannot read it.")
@click.option("--level", help="Compression level of the tailtune step instead of its own.")
@click.option("--worker", hidden=True)
@click.option("--source", type=Path, hidden=True)
@click.option("--out", type=Path, hidden=True)
def main(
    rows: int,
    pandas_rows: int,
    repeats: int,
    only: str | None,
    array: bool,
    level: str | None,
    worker: str | None,
    source: Path,
    out: Path,
) -> None:
    """Print a Markdown table of the variants."""
    if worker:
        work(worker, source, out, rows)
        return
    from tailtune.manifest import publish

    if level:
        os.environ["BENCHMARK_LEVEL"] = level
    ways = [way for way in WAYS if only in (None, way) and not (array and "pandas" in way)]
    with tempfile.TemporaryDirectory(prefix="parquet-benchmark-") as folder:
        source = Path(folder) / "raw" / ("data.json" if array else "data.jsonl")
        with publish(source.parent, {"step": "fetch"}, {}) as partial:  # as the fetch step leaves it
            generate(partial / source.name, rows, array)
        source_mb = source.stat().st_size / 1e6
        file_type = "a JSON array" if array else "JSON Lines"
        click.echo(f"{rows:,} rows, {source_mb:,.0f} MB of {file_type}, {os.cpu_count()} CPU cores\n")
        results: dict[str, dict[str, float]] = {way: {} for way in ways}
        for _ in range(repeats):  # the variants alternate, so that background load affects all of them
            for way in ways:
                result = measure(way, source, min(rows, pandas_rows) if "pandas" in way else rows)
                results[way] = min(results[way] or result, result, key=lambda run: run["seconds"])
        click.echo("| variant | MB/s | seconds | CPU seconds | peak resident MiB | Parquet MB | relative time |")
        click.echo("|---|---:|---:|---:|---:|---:|---:|")
        for way, best in results.items():
            part = best["rows"] / rows
            mb_per_second = source_mb * part / best["seconds"]
            ratio = best["seconds"] / part / results[ways[0]]["seconds"]
            note = "" if part == 1 else f", first {best['rows']:,.0f} rows"
            click.echo(
                f"| {way}{note} | {mb_per_second:.0f} | {best['seconds']:.1f} | {best['cpu']:.1f} "
                f"| {best['peak_mib']:.0f} | {best['parquet_mb']:.1f} | {ratio:.1f} |"
            )


if __name__ == "__main__":
    main()
