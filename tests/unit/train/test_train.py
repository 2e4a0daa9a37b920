"""What trains and what does not, profiles, intervals, checkpoints."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tail_runs
import torch
from accelerate import PartialState
from conftest import tiny_recipe, write_rows
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from transformers.trainer_utils import rotate_checkpoints

from tailtune import progress
from tailtune.config import Truncation
from tailtune.errors import UserError
from tailtune.kinds.chat.prompt import encode_row
from tailtune.kinds.chat.train import count_truncated, make_trainer
from tailtune.parquet.split import read_split
from tailtune.parquet.write import write_parquet
from tailtune.progress import Progress
from tailtune.recipe.load import list_recipes, load_recipe, with_local_overlay
from tailtune.recipe.schema import Hardware, LastLayers, Recipe
from tailtune.resolve import check_recipe
from tailtune.train import callbacks, checkpoints, hardware
from tailtune.train.arguments import NUM_CHECKPOINTS, check_trainer_arguments, num_steps, sft_config
from tailtune.train.callbacks import LogLines, SaveByTime, WriteProgress, peak_memory_bytes
from tailtune.train.checkpoints import COMPLETE, MarkComplete, latest_complete, remove_incomplete, step_of
from tailtune.train.hardware import find_profile, largest_divisor, plan_hardware
from tailtune.train.run import Context, Paths, Prepared, find_checkpoint, read_attempts, record_attempt
from tailtune.train.weights import decoder_layers, save_model, select_trainable
from tailtune.training_key import training_key

SMALL = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4,
         "num_attention_heads": 2, "num_key_value_heads": 2,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip


def new_model(model_type: str, **overrides: object) -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**SMALL, **overrides}))


def stage(**overrides: object) -> object:
    return tiny_recipe(**{f"stages.0.{key}": value for key, value in overrides.items()}).stages[0]


@pytest.mark.parametrize("model_type", ["smollm3", "llama", "gpt_neox", "qwen3"])
def test_only_the_last_layers_and_the_untied_head_train(model_type: str) -> None:
    model = new_model(model_type, tie_word_embeddings=True)
    select_trainable(model, stage().train_weights)
    model(input_ids=torch.randint(0, 64, (2, 8)), labels=torch.randint(0, 64, (2, 8))).loss.backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert trained == {name for name, p in model.named_parameters() if p.requires_grad}
    layers = {part for name in trained for part in name.split(".") if part.isdigit()}
    assert layers == {"2", "3"}
    assert model.get_output_embeddings().weight is not model.get_input_embeddings().weight
    assert not model.get_input_embeddings().weight.requires_grad
    assert model.config.tie_word_embeddings is False


def test_the_backward_stops_where_training_stops() -> None:
    """With a tied head it would walk through every frozen layer to the embedding."""
    model = new_model("smollm3", tie_word_embeddings=True)
    select_trainable(model, stage().train_weights)
    entered: list[bool] = []
    decoder_layers(model)[2].register_forward_pre_hook(lambda module, inputs: entered.append(inputs[0].requires_grad))
    model(input_ids=torch.randint(0, 64, (2, 8)))
    assert entered == [False]


def test_bf16_keeps_fp32_master_weights_where_it_trains_only(tmp_path: Path) -> None:
    model = new_model("smollm3").to(torch.bfloat16)
    select_trainable(model, stage().train_weights)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    save_model(model, model.state_dict(), tmp_path, torch.bfloat16)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight.bfloat16())


SHARD = """
import json, os, sys
from pathlib import Path
from types import SimpleNamespace
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from tail_runs import new_model
from tailtune.train.weights import decoder_layers, save_model, whole_state_dict
dist.init_process_group("gloo")
model = new_model("llama")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for layer in decoder_layers(model):
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
state_dict = whole_state_dict(model, SimpleNamespace(is_fsdp_enabled=True, model_wrapped=model))
if dist.get_rank() == 0:
    save_model(model, state_dict, Path(sys.argv[1]), torch.float32)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_weights_that_two_ranks_share_are_saved_whole(tmp_path: Path) -> None:
    """FSDP2 on the CPU, without Trainer: accelerate shards on accelerators only."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
               str(write(tmp_path / "shard.py", SHARD)), str(tmp_path / "model")]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(command, check=True, timeout=120, env=environment)
    saved, model = load_file(tmp_path / "model" / "model.safetensors"), tail_runs.new_model("llama")
    assert saved.keys() == model.state_dict().keys()
    assert all(torch.equal(saved[name], value) for name, value in model.state_dict().items())


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_all_weights_train_embeddings_and_norms_included() -> None:
    model = new_model("smollm3", tie_word_embeddings=True).to(torch.bfloat16)
    select_trainable(model, "all")
    assert all(p.requires_grad and p.dtype is torch.float32 for p in model.parameters())
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_survival_trains_13_62_percent_of_smollm3_3b() -> None:
    """418.9 M of 3.075 B parameters: the recipe's figure, on the true shape without its memory."""
    config = AutoConfig.for_model("smollm3", vocab_size=128256, hidden_size=2048, intermediate_size=11008,
                                  num_hidden_layers=36, num_attention_heads=16, num_key_value_heads=4)  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        model.tie_weights()
        total = model.num_parameters()
        select_trainable(model, stage().train_weights)
    trainable = model.num_parameters(only_trainable=True)
    assert total == pytest.approx(3.075e9, rel=1e-3)
    assert trainable == pytest.approx(418.9e6, rel=1e-3)
    assert 100 * trainable / total == pytest.approx(13.62, abs=0.01)


def test_more_layers_than_there_are_is_refused() -> None:
    with pytest.raises(UserError, match=r"train_weights.last_layers is 9, but the model has 4 layers; lower it"):
        select_trainable(new_model("llama"), LastLayers(last_layers=9))


@pytest.mark.parametrize(
    ("device", "expected"),
    [("NVIDIA L4", "L4"), ("NVIDIA L40S", "L40S"), ("NVIDIA A40", "A40"), ("NVIDIA A100-SXM4-80GB", "A100"),
     ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H200", "H200"), ("Tesla T4", "T4"), ("cpu", "CPU"),
     ("NVIDIA GeForce RTX 4090", "generic")],
)  # fmt: skip
def test_the_profile_follows_from_the_device(device: str, expected: str) -> None:
    assert find_profile(device).name == expected


def test_a_profile_can_be_named_and_an_unknown_one_lists_all() -> None:
    assert find_profile("cpu", "h100").name == "H100"
    with pytest.raises(UserError, match=r"hardware.profile 'H900' is not known; use auto or one of .*H200"):
        find_profile("cpu", "H900")


def test_the_effective_batch_never_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "device_name", lambda: "cpu")
    for batch, accumulation in [(8, 2), (24, 1), (7, 3), (64, 2), (100, 1)]:
        choice = plan_hardware(Hardware(profile="L4"), batch, accumulation)
        assert choice.per_device_train_batch_size * choice.gradient_accumulation_steps == batch * accumulation
        assert choice.per_device_train_batch_size <= 8
    assert largest_divisor(17, 8) == 1


def test_fp16_on_a_cpu_is_reported_as_what_it_is() -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    assert plan_hardware(Hardware(precision="fp16"), 8, 1).precision == "fp32"
    assert plan_hardware(Hardware(), 8, 1).describe() == "cpu (profile CPU), fp32, sdpa, batch 8 x 1 per rank"


@pytest.mark.parametrize(("num_rows", "epochs"), [(5, 1), (40, 3), (2845, 4)])
def test_intervals_fit_the_length_of_the_run(num_rows: int, epochs: int, tmp_path: Path) -> None:
    """An interval longer than the run would leave "best model" nothing to choose from."""
    recipe = tiny_recipe(epochs=epochs)
    choice = plan_hardware(recipe.hardware, 2, 1)
    config = sft_config(recipe, recipe.stages[0], choice, output_dir=tmp_path, num_train_rows=num_rows, world_size=2)
    steps = num_steps(recipe.stages[0].trainer, choice, num_rows, 2)
    assert 1 <= config.save_steps == config.eval_steps <= max(1, steps // 2)
    assert config.learning_rate == pytest.approx(0.002)
    assert config.gradient_checkpointing is False
    assert config.load_best_model_at_end is True


def test_the_recipe_may_name_its_own_intervals(tmp_path: Path) -> None:
    recipe = tiny_recipe(**{"stages.0.trainer.eval_steps": 7, "stages.0.trainer.save_steps": 14})
    config = sft_config(recipe, recipe.stages[0], plan_hardware(recipe.hardware, 2, 1), output_dir=tmp_path,
                        num_train_rows=40, world_size=1)  # fmt: skip
    assert (config.eval_steps, config.save_steps) == (7, 14)


def test_peak_memory_does_not_fall_when_memory_is_freed() -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    block = torch.ones(40_000_000)  # 160 MB
    high = peak_memory_bytes()
    del block
    assert peak_memory_bytes() >= high > 160e6


def write_checkpoint(directory: Path, step: int, *, complete: bool) -> Path:
    path = directory / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "weights").write_bytes(b"1234")
    if complete:
        (path / COMPLETE).write_text(json.dumps({"weights": 4}))
    return path


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's own setting")
def test_freed_memory_is_used_again_without_fresh_pages() -> None:
    program = """
import resource, sys, torch
from tailtune.train.hardware import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for mib in (4, 8, 24, 4) * 3:
        [torch.ones(mib << 18) for _ in range(3)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""
    kept, given_back = (
        int(subprocess.run([sys.executable, "-c", program, way], check=True, capture_output=True, text=True).stdout)
        for way in ("keep", "give back")
    )
    assert kept < 100 < given_back


def test_rows_that_the_maximum_length_cuts_are_counted(prepared: Path) -> None:
    tokenizer, recipe = AutoTokenizer.from_pretrained(prepared / "base"), tiny_recipe()
    answers = ["So.", "So and so.", "So. " * 9, "So. " * 30]
    rows = [encode_row(tokenizer, recipe.prompt, {"full-question": "How?", "answer": text}) for text in answers]
    assert count_truncated(rows, Truncation(len(rows[2].ids))) == 1, "the third one just fits"
    assert count_truncated(rows, Truncation(1000)) == count_truncated(rows, Truncation()) == 0
    with pytest.raises(UserError, match="leaves no room for its answer"):
        count_truncated(rows, Truncation(rows[0].question_length))
    assert count_truncated(rows, Truncation(rows[0].question_length + 1)) == 4


def test_a_row_whose_end_is_kept_keeps_its_answer(prepared: Path) -> None:
    tokenizer, prompt = AutoTokenizer.from_pretrained(prepared / "base"), tiny_recipe().prompt
    row = encode_row(tokenizer, prompt, {"full-question": "How?", "answer": "So and so."})
    assert count_truncated([row], Truncation(2, keep_end=True)) == 1
    with pytest.raises(UserError, match="leaves no room for its answer in max_length 1"):
        count_truncated([row], Truncation(1, keep_end=True))


def chat_trainer(prepared: Path, tmp_path: Path, max_length: int) -> Prepared:
    recipe = tiny_recipe(**{"stages.0.trainer.max_length": max_length})
    paths = Paths(prepared / "data" / "data.parquet", prepared / "base", tmp_path / "models", tmp_path / "cache")
    return make_trainer(Context(recipe, recipe.stages[0], paths, plan_hardware(recipe.hardware, 2, 1), 1, True, "", ()))


def test_the_numbers_of_rows_are_those_that_are_used(prepared: Path, tmp_path: Path) -> None:
    """Also where all rows are cut."""
    tokenizer, prompt = AutoTokenizer.from_pretrained(prepared / "base"), tiny_recipe().prompt
    rows = pq.read_table(prepared / "data" / "data.parquet").to_pylist()
    shortest = 1 + max(encode_row(tokenizer, prompt, row).question_length for row in rows)
    for max_length, num_truncated in ((1024, 0), (shortest, len(rows))):
        made = chat_trainer(prepared, tmp_path, max_length)
        assert made.facts["num_train_rows"] == len(made.trainer.train_dataset)
        assert made.facts["num_validation_rows"] == len(made.trainer.eval_dataset)
        assert made.facts["num_truncated_rows"] == num_truncated


def test_rows_that_spell_special_tokens_are_counted(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_markers(recipe: Recipe, path: Path) -> list[pa.Table]:
        train, validation = read_split(recipe, path)
        rows = train.to_pylist()
        rows[0]["answer"] += "<|im_end|>"
        rows[2]["full-question"] += "<|im_start|>"
        return [pa.Table.from_pylist(rows, train.schema), validation]

    assert chat_trainer(prepared, tmp_path, 1024).facts["num_rows_with_special_tokens"] == 0
    monkeypatch.setattr("tailtune.kinds.chat.train.read_split", with_markers)
    assert chat_trainer(prepared, tmp_path, 1024).facts["num_rows_with_special_tokens"] == 2


@pytest.mark.parametrize("is_here", [True, False])
def test_a_moved_or_copied_run_has_its_own_best_checkpoint(tmp_path: Path, is_here: bool) -> None:
    (before := tmp_path / "before" / "checkpoint-20").mkdir(parents=True)
    here = tmp_path / "here"
    if is_here:
        (here / "checkpoint-20").mkdir(parents=True)
    state = TrainerState(best_global_step=20, best_metric=1.0, best_model_checkpoint=str(before))
    callback = MarkComplete({}, lambda: None)
    callback.on_train_begin(SimpleNamespace(output_dir=str(here)), state, TrainerControl())
    assert state.best_model_checkpoint == (str(here / "checkpoint-20") if is_here else None)
    new = TrainerState()
    callback.on_train_begin(SimpleNamespace(output_dir=str(here)), new, TrainerControl())
    assert new.best_model_checkpoint is None


def test_half_a_line_of_a_full_disk_ends_no_run(tmp_path: Path) -> None:
    record_attempt(tmp_path, 0)
    record_attempt(tmp_path, 7)
    with (tmp_path / "attempts.jsonl").open("a") as file:
        file.write('{"from_st')
    assert read_attempts(tmp_path) == [0, 7]
    record_attempt(tmp_path, 9)
    assert read_attempts(tmp_path) == [0, 7, 9]


@pytest.mark.parametrize("side", [0, 1], ids=["train", "validation"])
def test_a_row_that_loses_its_answer_is_refused_on_both_sides(
    side: int, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_a_long_question(recipe: Recipe, path: Path) -> list[pa.Table]:
        sides = list(read_split(recipe, path))
        long = sides[side].to_pylist()[:1]
        long[0]["full-question"] += " Why?" * 200
        sides[side] = pa.concat_tables([sides[side], pa.Table.from_pylist(long, sides[side].schema)])
        return sides

    monkeypatch.setattr("tailtune.kinds.chat.train.read_split", with_a_long_question)
    with pytest.raises(UserError, match="tokens, which leaves no room for its answer in max_length 256"):
        chat_trainer(prepared, tmp_path, 256)


def test_only_complete_checkpoints_count(tmp_path: Path) -> None:
    assert latest_complete(tmp_path) is None
    write_checkpoint(tmp_path, 9, complete=True)
    whole = write_checkpoint(tmp_path, 10, complete=True)
    truncated = write_checkpoint(tmp_path, 11, complete=True)
    (truncated / "weights").write_bytes(b"12")
    interrupted = write_checkpoint(tmp_path, 12, complete=False)
    (tmp_path / "checkpoint-best").mkdir()
    assert latest_complete(tmp_path) == whole
    remove_incomplete(tmp_path)
    assert not truncated.exists() and not interrupted.exists()
    assert sorted(step_of(p) for p in tmp_path.iterdir()) == [-1, 9, 10]


class WorseAndWorse(torch.nn.Module):
    """Every evaluation has a higher loss, so the first checkpoint remains the best one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.num_evaluations = 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.num_evaluations += not self.training
        return {"loss": ((x * self.weight - labels) ** 2).mean() + self.num_evaluations, "logits": x}


class BeforeItIsComplete(TrainerCallback):
    """What a run could resume from, and what is on the volume, if it were killed before the list of files is there."""

    def __init__(self) -> None:
        self.resumable: list[int] = []
        self.steps: list[list[int]] = []

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        newest = latest_complete(Path(args.output_dir))
        self.resumable.append(step_of(newest) if newest else 0)
        self.steps.append(sorted(map(step_of, Path(args.output_dir).glob("checkpoint-*"))))


@pytest.mark.parametrize(("limit", "kept"), [(None, [1, 5]), (3, [1, 4, 5])])
def test_the_newest_complete_checkpoint_remains_until_the_next_one_is_complete(
    tmp_path: Path, limit: int | None, kept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rotated: list[int] = []

    def rotate(directory: str, *arguments: Any) -> None:
        newest = latest_complete(Path(directory))
        rotated.append(step_of(newest) if newest else 0)
        rotate_checkpoints(directory, *arguments)

    monkeypatch.setattr(checkpoints, "rotate_checkpoints", rotate)
    limits = {"stages.0.trainer.save_total_limit": limit} if limit else {}
    recipe = tiny_recipe(**{"stages.0.trainer.max_steps": 5, "stages.0.trainer.eval_steps": 1}, **limits)
    config = sft_config(recipe, recipe.stages[0], plan_hardware(recipe.hardware, 2, 1), output_dir=tmp_path,
                        num_train_rows=20, world_size=1)  # fmt: skip
    config.report_to, config.disable_tqdm, config.include_num_input_tokens_seen = [], True, "no"
    killed = BeforeItIsComplete()
    saver = MarkComplete({}, lambda: None, limit=limit or NUM_CHECKPOINTS)
    rows = [{"x": torch.ones(1), "labels": torch.ones(1)}] * 20
    Trainer(WorseAndWorse(), config, train_dataset=rows, eval_dataset=rows[:2], callbacks=[killed, saver]).train()
    assert killed.resumable == [0, 1, 2, 3, 4] and rotated == [1, 2, 3, 4, 5]
    assert max(map(len, killed.steps)) == len(kept) + 1, "those that are kept, and the one that is being written"
    assert sorted(map(step_of, tmp_path.glob("checkpoint-*"))) == kept


@pytest.mark.parametrize("event", ["on_step_end", "on_epoch_end", "on_evaluate"])
def test_rank_0_asks_before_every_save_whether_the_run_was_taken_over(event: str) -> None:
    def refuse() -> None:
        raise UserError("taken over")

    saver = MarkComplete({}, refuse)
    saving = SimpleNamespace(should_save=True)
    getattr(saver, event)(None, SimpleNamespace(is_world_process_zero=False), saving)
    with pytest.raises(UserError, match="taken over"):
        getattr(saver, event)(None, SimpleNamespace(is_world_process_zero=True), saving)


def test_a_run_that_was_taken_over_does_not_resume(tmp_path: Path) -> None:
    def refuse() -> None:
        raise UserError("taken over")

    interrupted = write_checkpoint(tmp_path, 1, complete=False)
    with pytest.raises(UserError, match="taken over"):
        find_checkpoint(tmp_path, {}, PartialState(cpu=True), refuse)
    assert interrupted.exists(), "the other run may be writing it"


@pytest.mark.parametrize(
    ("report_to", "message"),
    [
        (["tensorbord"], "report_to: 'tensorbord' is not known, did you mean 'tensorboard'"),
        ("nothing", "report_to: 'nothing' is not known"),
        (["tensorboard", "neptune"], "report_to: the package of 'neptune' is not installed; install it"),
    ],
)
def test_a_reporter_that_cannot_report_is_refused(report_to: object, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"stages.0.trainer.{message}")):
        check_trainer_arguments(tiny_recipe(**{"stages.0.trainer.report_to": report_to}))


@pytest.mark.parametrize("report_to", [None, "none", "tensorboard", ["tensorboard"], []])
def test_a_reporter_that_is_there_is_accepted(report_to: object) -> None:
    check_trainer_arguments(tiny_recipe(**{"stages.0.trainer.report_to": report_to}))


def test_a_stage_does_not_depend_on_the_settings_of_others(prepared: Path) -> None:
    """The schema takes one stage today; the key has to be right before there are several."""
    recipe = tiny_recipe()
    first = recipe.stages[0]
    later = [first.model_copy(update={"name": "second", "loss": loss}) for loss in ("answer", "all")]
    keys = [
        [training_key(both, stage, prepared / "data", prepared / "base") for stage in both.stages]
        for both in (recipe.model_copy(update={"stages": [first, other]}) for other in later)
    ]
    assert keys[0][0] == keys[1][0]
    assert keys[0][1] != keys[1][1]
    assert training_key(recipe, first, prepared / "data", prepared / "base") == keys[0][0]


@pytest.mark.parametrize(("field", "value", "same"), [("ranks_per_node", 1, False), ("memory", "80Gi", True)])
def test_of_a_stages_resources_only_the_number_of_ranks_changes_the_training(
    prepared: Path, field: str, value: object, same: bool
) -> None:
    recipes = [tiny_recipe(), tiny_recipe(**{f"stages.0.resources.{field}": value})]
    plain, own = (training_key(each, each.stages[0], prepared / "data", prepared / "base") for each in recipes)
    assert (plain == own) is same
    assert own["settings"]["world_size"] == (2 if same else 1) and "resources" not in own["settings"]["stages.0"]


@pytest.mark.parametrize(
    "setting",
    [{"seed": 7}, {"prompt.system": "Answer at length."}, {"hardware.precision": "fp32"}, {"learning_rate": 0.5},
     {"data.validation_share": 0.3}, {"data.split_by": "answer"}, {"ranks_per_node": 4}, {"stages.0.tail.mode": "off"}],
    ids=str,
)  # fmt: skip
def test_the_key_depends_on_each_setting_of_the_weights(setting: dict[str, Any], prepared: Path) -> None:
    recipes = tiny_recipe(), tiny_recipe(**{"generation.max_new_tokens": 9}), tiny_recipe(**setting)
    first, same, other = (training_key(r, r.stages[0], prepared / "data", prepared / "base") for r in recipes)
    assert first == same != other


def test_the_key_depends_on_the_data_and_the_base_model(prepared: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe()
    write_parquet(write_rows(tmp_path / "rows.jsonl", num_rows=51), tmp_path / "data", recipe.data)
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    places = [(prepared / "data", prepared / "base"), (tmp_path / "data", prepared / "base"),
              (prepared / "data", tmp_path / "base")]  # fmt: skip
    keys = [training_key(recipe, recipe.stages[0], *place) for place in places]
    assert keys[0] != keys[1] and keys[0] != keys[2]


def test_a_checkpoint_is_saved_after_a_minute_and_then_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(callbacks, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(callbacks.signal, "signal", lambda number, handler: None)
    saver, state = SaveByTime(900), SimpleNamespace(global_step=1, max_steps=1000)
    saver.on_train_begin(None, state, None)
    saved = []
    for now in range(0, 2000, 10):
        control = SimpleNamespace(should_save=False)
        saver.on_step_end(None, state, control)
        if control.should_save:
            saver.on_save(None, state, control)
            saved.append(now)
    assert saved == [60, 960, 1860]


def test_the_log_has_a_line_per_entry_and_none_of_other_ranks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 100.0
    monkeypatch.setattr(progress, "_clock", lambda: now)
    caplog.set_level("INFO", "tailtune")
    lines = LogLines(Progress("train: step", unit="steps"))
    state = SimpleNamespace(is_world_process_zero=True, global_step=1000, max_steps=3000)
    lines.on_train_begin(None, state, None)
    now, state.global_step = 160.0, 1200
    lines.on_step_end(None, state, None)
    logs = {"loss": 3.046, "learning_rate": 2e-3, "grad_norm": 0.797, "tokens_per_second": 45717.4}
    lines.on_log(None, state, None, logs)
    lines.on_log(None, state, None, {"eval_loss": 2.25})
    lines.on_log(None, state, None, {"train_runtime": 3.0})
    lines.on_log(None, SimpleNamespace(is_world_process_zero=False), None, logs)
    assert caplog.messages == [
        "train: step 1,200/3,000 loss 3.0460 lr 2.00e-03 grad_norm 0.797 45,717 tokens/s ETA 9 min 00 s",
        "train: step 1,200/3,000 eval_loss 2.2500",
    ]
    assert lines.progress._line(60) == "train: step 1,200/3,000 loss 3.0460 3.3 steps/s ETA 9 min 00 s"


def test_progress_is_a_file_for_the_launcher(tmp_path: Path) -> None:
    writer = WriteProgress(tmp_path / "progress.json")
    state = SimpleNamespace(is_world_process_zero=True, global_step=3, max_steps=9)
    writer.on_log(None, state, None, {"loss": 2.5, "grad_norm": float("nan"), "learning_rate": 1e-3, "epoch": 1.0})
    writer.on_log(None, state, None, {"eval_loss": 2.25})
    written = json.loads((tmp_path / "progress.json").read_text())
    assert (written["step"], written["max_steps"]) == (3, 9) and written["remaining_seconds"] >= 0
    assert written["train"] == {"loss": 2.5, "grad_norm": None, "learning_rate": 1e-3}
    assert written["eval"] == {"eval_loss": 2.25}
    writer.on_log(None, SimpleNamespace(is_world_process_zero=False), None, {"loss": 0.0})
    assert json.loads((tmp_path / "progress.json").read_text()) == written


@pytest.mark.parametrize("name", list_recipes())
@pytest.mark.parametrize("change", [lambda recipe: recipe, with_local_overlay], ids=["cluster", "local"])
def test_the_trainer_arguments_of_built_in_recipes_are_right(name: str, change: Callable[[Recipe], Recipe]) -> None:
    """Runs do not check them again (resolve.py)."""
    check_recipe(change(load_recipe(name)))
