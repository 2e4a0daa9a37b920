"""Compares tail training with stock TRL on the survival data: headline, the five savings, scaling.

    python benchmarks/tail.py --data offline-practical-skills-qa.jsonl                  # 2 CPU cores
    python benchmarks/tail.py --data … --part scaling                                   # curves, docs/tail-scaling.png
    python benchmarks/tail.py --data … --device cuda --model smollm3-3b                 # one GPU, no network

The variants run one after the other, each in its own process. Tail training runs completely, from process start to
saved model, through the entry point that a cluster uses (`python -m tailtune.train`). Stock variants are timed over
`--steps` optimizer steps and one evaluation, and extrapolated to the whole run with its evaluations. Results are
written to `results.json` in `--folder`, tables to stdout.
"""

import json
import math
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import psutil

SHAPES: dict[str, dict[str, int]] = {
    # SmolLM3's proportions; this vocabulary gives the head the same share of the parameters (8 %)
    "hidden256": {"hidden_size": 256, "intermediate_size": 1376, "num_hidden_layers": 36, "num_attention_heads": 4,
                  "num_key_value_heads": 1, "vocab_size": 16384},
    # for the curves, which need dozens of runs
    "hidden128": {"hidden_size": 128, "intermediate_size": 688, "num_hidden_layers": 16, "num_attention_heads": 4,
                  "num_key_value_heads": 1, "vocab_size": 8192},
    "smollm3-3b": {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
                   "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 128256},
}  # fmt: skip
TOKENIZER_WORDS = 16384
EPOCHS = 4
BATCH, ACCUMULATION = 8, 2
MAX_SPREAD = 1.1
"""A ratio is printed only where the slowest round took at most this much longer than the fastest."""
OFF = {"stop_backward": False, "packing": False, "answer_head": False, "cache": "none", "shared_prefix": False}
"""Tail training with all of its savings switched off: the fields of `Savings`, and the recipe's `tail.cache`."""
EARLIER = {"tied": True, "recipe": {"stages.0.loss": "all"}, "args": {"gradient_checkpointing": True}}
"""The earlier system: dynamic padding, gradient checkpointing, tied head, loss over all tokens."""


# ---- measurements: each of these functions runs in a child process ---------------------------------


def prepare(folder: Path, data: Path, shape: str) -> None:
    """Write the Parquet file, a tokenizer trained on the data, and random weights, in the same files as a run."""
    import pyarrow.parquet as pq
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from tailtune.fetch.small_model import train_tokenizer
    from tailtune.kinds.chat.prompt import row_messages
    from tailtune.manifest import publish
    from tailtune.parquet.write import write_parquet
    from tailtune.recipe.load import load_recipe, with_overrides

    recipe = with_overrides(load_recipe("survival"), {"model.small.vocab_size": TOKENIZER_WORDS})
    write_parquet(data, folder / "data", recipe.data)
    rows = pq.read_table(folder / "data" / "data.parquet").to_pylist()
    texts = ["\n".join(message["content"] for message in row_messages(recipe.prompt, row)[1:]) for row in rows]
    assert recipe.model.small is not None
    tokenizer = train_tokenizer(recipe.model.small, texts)
    config = AutoConfig.for_model("smollm3", **SHAPES[shape], max_position_embeddings=2048, tie_word_embeddings=True,
                                  pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id,
                                  eos_token_id=tokenizer.eos_token_id)  # fmt: skip
    torch.manual_seed(0)
    cuda = torch.cuda.is_available()
    with torch.device("cuda" if cuda else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if cuda else torch.float32)
    with publish(folder / "base", {"shape": shape}, {}) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    print(json.dumps({"parameters": model.num_parameters(), "words": len(tokenizer)}))


def steps(folder: Path, spec: dict[str, Any]) -> dict[str, Any]:
    """Run some optimizer steps of one variant. Returns seconds per step, tokens, counted operations and memory.

    `spec` has the recipe's `tail.cache` as `cache` and the fields of `Savings` as `savings` where the tail trains;
    without `cache`, TRL trains the whole model.
    """
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from transformers.utils import logging
    from trl import SFTConfig, SFTTrainer

    from tailtune.kinds.chat.prompt import encode_row, freeze_chat_template
    from tailtune.kinds.chat.train import tokenized
    from tailtune.parquet.split import split_rows
    from tailtune.recipe.load import load_recipe, with_overrides
    from tailtune.recipe.schema import TailSettings
    from tailtune.train.tail.savings import Savings
    from tailtune.train.tail.trainer import TailLoop, attach
    from tailtune.train.weights import select_trainable

    logging.set_verbosity_error()
    datasets.disable_progress_bars()
    baseline = memory()
    cuda = torch.cuda.is_available()
    dtype = torch.bfloat16 if cuda else torch.float32
    recipe = with_overrides(load_recipe("survival"), spec.get("recipe", {}))
    stage, accumulation = recipe.stages[0], spec.get("accumulation", ACCUMULATION)
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    freeze_chat_template(tokenizer)
    train, validation = split_rows(pq.read_table(folder / "data" / "data.parquet"), recipe.data.split_by,
                                   recipe.data.validation_share, recipe.seed)  # fmt: skip
    train = pa.concat_tables([numbered(train, i) for i in range(spec.get("times_rows", 1))])
    num_rows = train.num_rows
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=dtype, device_map="cuda" if cuda else None)
    if spec.get("tied"):  # the earlier system: the last layers and the head, which is also the input embedding
        model.requires_grad_(False)
        for part in (*model.model.layers[-stage.train_weights.last_layers :], model.lm_head):
            part.requires_grad_(True)
    else:
        select_trainable(model, stage.train_weights)
    args = SFTConfig(
        output_dir=str(folder / "steps"), max_steps=spec["steps"] + spec.get("warmup", 2), report_to=[],
        per_device_train_batch_size=BATCH, gradient_accumulation_steps=accumulation, learning_rate=5e-5,
        max_grad_norm=1.0, use_cpu=not cuda, bf16=cuda, logging_steps=10_000, save_strategy="no", eval_strategy="no",
        disable_tqdm=True, per_device_eval_batch_size=BATCH, dataloader_pin_memory=cuda, seed=recipe.seed,
        completion_only_loss=stage.loss == "answer", include_num_input_tokens_seen="non_padding",
        **{"gradient_checkpointing": False, "max_length": 1024, **spec.get("args", {})},
    )  # fmt: skip
    clock = Clock(spec.get("warmup", 2), bool(spec.get("flops")))
    callbacks = [type("Callback", (TrainerCallback,), {"on_step_begin": clock.begin, "on_step_end": clock.end})()]
    train_rows, eval_rows = (
        tokenized([encode_row(tokenizer, recipe.prompt, row) for row in rows.to_pylist()], stage.loss)
        for rows in (train, validation)
    )
    plain = SFTTrainer(model=model, args=args, train_dataset=train_rows, eval_dataset=eval_rows,
                       processing_class=tokenizer, callbacks=callbacks)  # fmt: skip
    trainer: Any = plain
    frozen_seconds = 0.0
    if "cache" in spec:
        start = time.perf_counter()
        shutil.rmtree(folder / "cache", ignore_errors=True)
        with clock.counting("frozen layers"):
            trainer = attach(
                plain, TailSettings(cache=spec["cache"]), dtype=dtype, cache_dir=folder / "cache",
                base_model_sha256="benchmark", callbacks=callbacks, trainer_class=TailLoop,
                savings=Savings(**spec.get("savings", {})),
            )  # fmt: skip
        assert trainer is not None
        frozen_seconds = time.perf_counter() - start
    start_seconds = time.time() - psutil.Process().create_time() - frozen_seconds
    trainer.train()
    evaluate_seconds = 0.0
    if spec.get("evaluate"):
        start = Clock.now()
        trainer.evaluate()
        evaluate_seconds = Clock.now() - start
    seconds = sum(clock.seconds) / len(clock.seconds)
    total = math.ceil(num_rows * spec.get("epochs", EPOCHS) / (BATCH * accumulation))
    flops = clock.flops.get("frozen layers", 0) + clock.flops.get("step", 0) * total
    source = trainer.model.source if "cache" in spec else None
    return {
        "flops_of": clock.flops, "fill_seconds": getattr(source, "fill_seconds", 0.0),
        "step_seconds": seconds, "frozen_seconds": frozen_seconds, "steps_timed": len(clock.seconds),
        "total_steps": total, "start_seconds": start_seconds, "flops": flops,
        "evaluate_seconds": evaluate_seconds,
        "total_seconds": start_seconds + frozen_seconds + seconds * total + evaluate_seconds * EPOCHS,
        "tokens_per_second": trainer.state.num_input_tokens_seen / trainer.state.global_step / seconds,
        "memory": memory() - baseline, "num_rows": num_rows,
        "prefix_share": prefix_share(trainer) if "cache" in spec else None,
        "source": type(source).__name__,
    }  # fmt: skip


def ceiling() -> float:
    """Return the operations per second of a large matrix product, in the precision of the runs.

    Model FLOPs utilization (MFU) is relative to it.
    """
    import torch

    cuda = torch.cuda.is_available()
    size = 8192 if cuda else 2048
    a, b = (torch.randn(size, size, device="cuda" if cuda else "cpu", dtype=torch.bfloat16 if cuda else None)
            for _ in range(2))  # fmt: skip
    best = math.inf
    for _ in range(20):
        start = Clock.now()
        torch.mm(a, b)
        best = min(best, Clock.now() - start)
    return 2 * size**3 / best


def prefix_share(trainer: Any) -> float:
    """Return the share of all tokens that are in the shared prefix."""
    rows = trainer.model.rows
    return float(rows.starts.sum() / sum(map(len, rows.ids)))


def numbered(rows: Any, number: int) -> Any:
    """Return the same rows with different questions, so that they share only the system prompt."""
    if number == 0:
        return rows
    import pyarrow as pa

    questions = pa.array([f"{number}. {text}" for text in rows["full-question"].to_pylist()])
    return rows.set_column(rows.column_names.index("full-question"), rows.schema.field("full-question"), questions)


class Clock:
    """Times optimizer steps after a warm-up, and counts the operations of one warm-up step."""

    def __init__(self, warmup: int, flops: bool) -> None:
        self.warmup, self.count = warmup, flops
        self.seconds: list[float] = []
        self.flops: dict[str, int] = {}
        self.step, self.start = 0, 0.0
        self.counter: Any = None

    def begin(self, *_: Any, **__: Any) -> None:
        self.counter = self.counting("step") if self.count and self.step == self.warmup - 1 else None
        if self.counter:
            self.counter.__enter__()
        self.start = self.now()

    def end(self, *_: Any, **__: Any) -> None:
        seconds = self.now() - self.start
        if self.counter:
            self.counter.__exit__(None, None, None)
        self.step += 1
        if self.step > self.warmup:
            self.seconds.append(seconds)

    def counting(self, name: str) -> Any:
        """Count the operations (multiplications and additions) of matrix products and attention within the block."""
        from contextlib import contextmanager

        import torch
        from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

        def forward(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
            return int(sdpa_flop_count(q, k, v))

        def backward(g: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
            return int(sdpa_backward_flop_count(g, q, k, v))

        aten = torch.ops.aten
        mapping = {aten._scaled_dot_product_flash_attention_for_cpu: forward,
                   aten._scaled_dot_product_flash_attention_for_cpu_backward: backward}  # fmt: skip

        @contextmanager
        def within() -> Any:
            with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
                yield
            self.flops[name] = counter.get_total_flops()

        if not self.count:
            from contextlib import nullcontext

            return nullcontext()
        return within()

    @staticmethod
    def now() -> float:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()


def memory() -> int:
    """Return the peak memory of this process so far, in bytes: on the GPU where there is one, otherwise resident."""
    import torch

    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# ---- the parent process ------------------------------------------------------------------------------------


def child(folder: Path, function: str, spec: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", json.dumps([function, str(folder), spec])]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return dict(json.loads(output.splitlines()[-1]))


def whole(folder: Path, recipe: dict[str, Any]) -> dict[str, Any]:
    """Run tail training through its own entry point, from process start to saved model."""
    shutil.rmtree(folder / "out", ignore_errors=True)
    overrides = {"stages.0.trainer.eval_strategy": "epoch", "resources.num_nodes": 1, **recipe}
    parameters = [part for key, value in overrides.items() for part in ("-p", f"{key}={json.dumps(value)}")]
    log = (folder / "whole.log").open("w")
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "tailtune.train", "--recipe", "survival", "--data-dir", str(folder / "data"),
         "--model-dir", str(folder / "base"), "--output-dir", str(folder / "out"),
         "--hidden-state-cache-dir", str(folder / "out" / "cache"), *parameters],
        stdout=log, stderr=subprocess.STDOUT)  # fmt: skip
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, (folder / "whole.log").read_text()[-4000:]
    seconds = time.perf_counter() - start
    summary = json.loads((folder / "out" / "training_summary.json").read_text())
    peak = summary["peak_memory_bytes"] if summary["hardware"]["device"] != "cpu" else usage.ru_maxrss * 1024
    return {"seconds": seconds, "peak": peak, "train_seconds": summary["train_seconds"],
            "best_eval_loss": summary["best_eval_loss"], "log": (folder / "whole.log").read_text()}  # fmt: skip


def headline(folder: Path, num_steps: int, device: str, results: dict[str, Any]) -> None:
    """Compare a complete tail training with the two stock setups. A stock step is a micro-batch of 8 rows.

    The variants alternate in two rounds, so that background load affects all of them equally.
    """
    stock = {"steps": math.ceil(num_steps / 2), "accumulation": 1, "evaluate": True}
    padding_free = {"steps": math.ceil(num_steps / 10), "args": {"padding_free": True, "max_length": None}}
    results["imports"] = child(folder, "imports", {})["memory"]
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in ("whole", "tuned", "earlier")}
    results["rounds"] = rounds
    for _ in range(2):
        rounds["whole"].append(whole(folder, {}))
        rounds["tuned"].append(child(folder, "steps", stock))
        rounds["earlier"].append(child(folder, "steps", {**stock, **EARLIER}))
    rounds["whole"].append(whole(folder, {}))
    rounds["tuned, padding-free"] = [child(folder, "steps", {**stock, **padding_free})]
    tail = {"cache": "gpu" if device == "cuda" else "host"}
    results["ceiling"] = child(folder, "ceiling", {})["flops_per_second"]
    results["counted"] = child(folder, "steps", {**tail, "steps": 1, "flops": True})
    results["timed"] = child(folder, "steps", {**tail, "steps": 60})


def savings(folder: Path, results: dict[str, Any]) -> None:
    """Measure each saving alone, all but one, and all of them, relative to the same code with all of them off."""
    on: dict[str, Any] = dict.fromkeys(OFF, True) | {"cache": "host"}
    variants = {"none of them": OFF}
    variants |= {f"only {name}": {**OFF, name: on[name]} for name in OFF if name != "cache"}
    variants["only cache"] = {**OFF, "stop_backward": True, "cache": "host"}
    variants |= {f"all but {name}": {**on, name: OFF[name]} for name in OFF if name != "stop_backward"}
    variants["all but stop_backward and cache"] = {**on, "stop_backward": False, "cache": "none"}
    variants["all"] = on
    results["savings"] = {}
    for name, switches in variants.items():
        cache = switches["cache"]
        switches = {key: value for key, value in switches.items() if key != "cache"}
        spec = {"steps": 8 if cache == "none" else 40, "cache": cache, "savings": switches, "flops": True}
        results["savings"][name] = child(folder, "steps", spec)
        print(name, results["savings"][name], file=sys.stderr, flush=True)


def scaling(folder: Path, results: dict[str, Any]) -> None:
    """Vary rows, trainable layers and prompt share: with the cache, without it, and with TRL on the whole model."""
    ways = {
        "cached": {"cache": "host", "steps": 30},
        "on the fly": {"cache": "none", "steps": 12},
        "whole": {"steps": 6},
    }
    prompt = (
        "Answer thoroughly and step by step, put safety warnings first, say when to call for professional help, and "
        "offer more than one way where there is one, because you teach rather than being brief. "
    )
    sweeps: dict[str, list[tuple[Any, dict[str, Any]]]] = {
        "rows": [(n, {"times_rows": n}) for n in (1, 4, 16)],
        "trainable layers": [(n, {"recipe": {"stages.0.train_weights.last_layers": n}}) for n in (1, 2, 4, 8)],
        "prompt share": [(n, {"recipe": {"prompt.system": (prompt * 20)[:n]}}) for n in (1, 150, 500, 1100, 2800)],
    }
    results["scaling"] = {}
    for sweep, points in sweeps.items():
        results["scaling"][sweep] = []
        for at, changes in points:
            point = {way: child(folder, "steps", {**settings, **changes}) for way, settings in ways.items()}
            results["scaling"][sweep].append({"at": at, **point})
            print(sweep, at, json.dumps({way: run["total_seconds"] for way, run in point.items()}), file=sys.stderr,
                  flush=True)  # fmt: skip


def plot(scaling: dict[str, Any], path: Path) -> None:
    """Plot the seconds of a run against each of the four, one curve per way, for light and dark pages."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 4, figsize=(15, 3.6), constrained_layout=True)
    base = scaling["trainable layers"][1]
    epochs = (1, 2, 4, 8)
    curves: dict[str, tuple[list[float], dict[str, list[float]]]] = {}
    for sweep, points in scaling.items():
        share = sweep == "prompt share"
        x = [100 * p["cached"]["prefix_share"] if share else p["at"] for p in points]
        curves[sweep] = x, {way: [p[way]["total_seconds"] for p in points] for way in ("whole", "on the fly", "cached")}
    curves["epochs"] = (
        list(epochs),
        {way: [run_seconds(base[way], number) for number in epochs] for way in ("whole", "on the fly", "cached")},
    )
    for axis, (name, (x, ways)) in zip(axes, curves.items(), strict=True):
        for (way, y), style in zip(ways.items(), ("s-", "^-", "o-"), strict=True):
            axis.plot(x, y, style, label={"whole": "TRL, whole model"}.get(way, f"tail, {way}"))
        axis.set(title=f"{name}, %" if name == "prompt share" else name, yscale="log", ylim=(5, None))
        if name != "prompt share":
            axis.set_xscale("log", base=2)
            axis.set_xticks(x, [f"{value}×" if name == "rows" else str(value) for value in x])
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("seconds of a run")
    axes[0].legend()
    figure.savefig(path, dpi=110)


def run_seconds(result: dict[str, Any], epochs: int) -> float:
    """Return the seconds of a run of `epochs`, from a result for EPOCHS."""
    steps = result["total_steps"] * epochs / EPOCHS
    return float(result["start_seconds"] + result["frozen_seconds"] + steps * result["step_seconds"])


def each(runs: list[dict[str, Any]], name: str) -> str:
    return ", ".join(f"{run[name]:.0f}" for run in runs)


def ratios(stock: list[float], tail: list[float]) -> str:
    """The smallest and the largest ratio of two rounds' seconds; none where the rounds of one of them disagree."""
    for name, seconds in (("its", stock), ("tail training's", tail)):
        if max(seconds) > MAX_SPREAD * min(seconds):
            return f"none: {name} rounds differ by {100 * (max(seconds) / min(seconds) - 1):.0f} %"
    return f"{min(stock) / max(tail):.1f} to {max(stock) / min(tail):.1f}"


def tables(results: dict[str, Any]) -> None:
    if "rounds" in results:
        rounds = results["rounds"]
        best = min(rounds["whole"], key=lambda run: run["seconds"])
        tail = [run["seconds"] for run in rounds["whole"]]
        print("| way | seconds, each run | tail training = 1 | memory above imports, MiB |")
        print("|---|---:|---:|---:|")
        memory = (best["peak"] - results["imports"]) / 2**20
        print(f"| tail training, complete | {each(rounds['whole'], 'seconds')} | 1 | {memory:.0f} |")
        for name in ("tuned", "tuned, padding-free", "earlier"):
            runs = rounds[name]
            ratio = ratios([run["total_seconds"] for run in runs], tail)
            steps = f"{sum(run['steps_timed'] for run in runs)} steps of {runs[0]['total_steps']}"
            memory = max(run["memory"] for run in runs) / 2**20
            print(f"| stock, {name}, {steps} | {each(runs, 'total_seconds')} | {ratio} | {memory:.0f} |")
    if "ceiling" in results:
        timed, counted = results["timed"], results["counted"]["flops_of"]
        seconds = {"frozen layers": timed["fill_seconds"], "step": timed["step_seconds"]}
        print(f"\nMatrix product: {results['ceiling'] / 1e12:.2f} TFLOP/s.", end=" ")
        for phase, value in seconds.items():
            print(f"{phase}: {value:.3f} s, {counted[phase] / 1e12:.2f} TFLOP, "
                  f"{100 * counted[phase] / value / results['ceiling']:.0f} % of it.", end=" ")  # fmt: skip
        print()
    if "scaling" in results:
        print("| sweep | at | TRL, whole model, s | on the fly, s | cached, s | whole / cached |\n|---|" + "---:|" * 5)
        for sweep, points in results["scaling"].items():
            for point in points:
                seconds = [point[way]["total_seconds"] for way in ("whole", "on the fly", "cached")]
                share = point["cached"]["prefix_share"]
                at = f"{100 * share:.0f} %" if sweep == "prompt share" else point["at"]
                print(f"| {sweep} | {at} |", " | ".join(f"{value:.0f}" for value in seconds),
                      f"| {seconds[0] / seconds[2]:.1f} |")  # fmt: skip
        base = results["scaling"]["trainable layers"][1]
        for epochs in (1, 2, 4, 8):
            seconds = [run_seconds(base[way], epochs) for way in ("whole", "on the fly", "cached")]
            print(f"| epochs | {epochs} |", " | ".join(f"{value:.0f}" for value in seconds),
                  f"| {seconds[0] / seconds[2]:.1f} |")  # fmt: skip
    if "savings" in results:
        none = results["savings"]["none of them"]
        print("| savings | seconds | tokens/s | PFLOP | time | operations | share | MiB |\n" + "|---|" + "---:|" * 7)
        for name, run in results["savings"].items():
            times, flops = none["total_seconds"] / run["total_seconds"], none["flops"] / run["flops"]
            print(f"| {name} | {run['total_seconds']:.0f} | {run['tokens_per_second']:.0f} | {run['flops'] / 1e15:.3f} "
                  f"| {times:.1f} | {flops:.1f} | {times / flops:.2f} | {run['memory'] / 2**20:.0f} |")  # fmt: skip


@click.command()
@click.option("--data", type=click.Path(exists=True, path_type=Path), help="JSON Lines with topic, question, answer.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu")
@click.option("--model", "shape", type=click.Choice(list(SHAPES)), default="hidden256")
@click.option("--steps", "num_steps", default=200, help="Steps of the stock variants.")
@click.option("--folder", type=click.Path(path_type=Path), default="runs/.benchmark")
@click.option(
    "--part",
    "parts",
    multiple=True,
    default=["headline", "savings"],
    type=click.Choice(["headline", "savings", "scaling"]),
)
@click.option("--child", "child_spec", hidden=True)
def main(data: Path | None, device: str, shape: str, num_steps: int, folder: Path, parts: tuple[str, ...],
         child_spec: str | None) -> None:  # fmt: skip
    if child_spec:
        function, where, spec = json.loads(child_spec)
        if function == "prepare":
            prepare(Path(where), Path(spec["data"]), spec["shape"])
        elif function == "ceiling":
            print(json.dumps({"flops_per_second": ceiling()}))
        elif function == "imports":
            import tailtune.kinds.chat.train  # noqa: F401

            print(json.dumps({"memory": memory()}))
        else:
            print(json.dumps(steps(Path(where), spec)))
        return
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["HF_HUB_OFFLINE"] = "1"
    folder.mkdir(parents=True, exist_ok=True)
    if data is None:
        raise click.UsageError("--data is missing; give a JSON Lines file with topic, question and answer")
    results: dict[str, Any] = {"model": child(folder, "prepare", {"data": str(data.resolve()), "shape": shape})}
    for part in parts:
        try:
            if part == "headline":
                headline(folder, num_steps, device, results)
            elif part == "savings":
                savings(folder, results)
            else:
                results["model"] = child(folder, "prepare", {"data": str(data.resolve()), "shape": "hidden128"})
                scaling(folder, results)
                plot(results["scaling"], Path(__file__).resolve().parent.parent / "docs" / "tail-scaling.png")
        finally:  # a part takes up to an hour; keep its results when it is interrupted
            (folder / "results.json").write_text(json.dumps(results, indent=1))
    tables(results)


if __name__ == "__main__":
    main()
