"""The recipe: WHAT is trained, on what, and when it is good enough. Data only, no torch, no kfp.

A recipe is a YAML file. Values are overridden, in this order of precedence, by the recipe's own
`local:` overlay (laptop runs only), by run parameters (`-p`, the dashboard) and by environment
variables of the training container. Every override is a dotted key, for example
`stages.0.trainer.learning_rate`; `PARAMETERS` gives the common ones a short name.
"""

import difflib
import json
import math
import os
import re
import string
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from tailtune.errors import UserError

BUILT_IN = Path(__file__).resolve().parent.parent / "recipes"

PARAMETERS: dict[str, str] = {
    "base_model": "model.base_model",
    "model_revision": "model.revision",
    "data_source": "data.source",
    "epochs": "stages.0.trainer.num_train_epochs",
    "batch_size": "stages.0.trainer.per_device_train_batch_size",
    "learning_rate": "stages.0.trainer.learning_rate",
    "num_nodes": "resources.num_nodes",
    "ranks_per_node": "resources.ranks_per_node",
    "queue": "resources.queue",
    "training_data_pvc": "cluster.data_claim",
    "trained_models_pvc": "cluster.models_claim",
    "workspace_pvc": "cluster.workspace_claim",
    "hf_secret": "cluster.hf_secret",
    "s3_secret": "cluster.s3_secret",
    "ca_secret": "cluster.ca_secret",
    "seed": "seed",
}
"""Run parameter → dotted key of the recipe."""

ENVIRONMENT: dict[str, str] = {
    "EPOCHS": "epochs",
    "BATCH_SIZE": "batch_size",
    "LEARNING_RATE": "learning_rate",
}
"""Environment variable of the training container → run parameter."""


Quantity = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if isinstance(value, int) else value),
    Field(pattern=r"^\d+(\.\d+)?(m|[kMGT]i?)?$"),
]
"""Kubernetes' notation of an amount: `6`, `500m`, `20Gi`."""
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")]
"""Of an object of Kubernetes."""


class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class SmallModel(Config):
    """A model of the recipe's own architecture that is built, not downloaded: for laptops and tests."""

    model_type: str
    """Transformers' name of the architecture, for example `smollm3`."""
    vocab_size: Annotated[int, Field(ge=300)]
    """Tokens of the byte-level BPE tokenizer that is trained on the data (256 are the bytes)."""
    hidden_size: Annotated[int, Field(ge=8)]
    intermediate_size: Annotated[int, Field(ge=8)]
    num_layers: Annotated[int, Field(ge=1)]
    num_heads: Annotated[int, Field(ge=1)]
    num_key_value_heads: Annotated[int, Field(ge=1)]
    pretrain_steps: Annotated[int, Field(ge=0)]
    """Steps of pretraining on plain text, so that "before" is more than noise."""
    pretrain_learning_rate: Annotated[float, Field(gt=0)] = 3e-3

    @model_validator(mode="after")
    def _heads_divide(self) -> "SmallModel":
        for size, number in (("hidden_size", "num_heads"), ("num_heads", "num_key_value_heads")):
            if getattr(self, size) % getattr(self, number):
                raise ValueError(f"{size} {getattr(self, size)} is no multiple of {number} {getattr(self, number)}")
        return self


class Model(Config):
    base_model: Annotated[str, Field(min_length=1)]
    """A hub name (`OWNER/NAME`), a directory, or `small` for the model that `small:` describes."""
    revision: str = "main"
    """Branch, tag or commit on the hub; the commit is recorded at the first fetch and kept."""
    small: SmallModel | None = None

    @model_validator(mode="after")
    def _small_is_described(self) -> "Model":
        if self.base_model == "small" and self.small is None:
            raise ValueError("base_model is 'small' but model.small is not given; describe it, or name a model")
        return self


class Data(Config):
    source: Annotated[str, Field(min_length=1)]
    """`hf://datasets/OWNER/NAME[@revision][/file]`, `https://`, `s3://`, a path, or `embedded`."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    format: Literal["auto", "json", "jsonl", "csv", "txt", "parquet"] = "auto"
    columns: Annotated[dict[str, str], Field(min_length=1)]
    """Column of the Parquet file → template over the source's columns, `For {topic}, {question}`."""
    max_rows: Annotated[int, Field(ge=1)] | None = None
    max_rejected_share: Annotated[float, Field(ge=0, le=1)] = 0.01
    split_by: str
    """The column whose value decides the side of the split: equal values never stand on both."""
    validation_share: Annotated[float, Field(gt=0, lt=1)] = 0.1
    skip_unchanged: bool = False
    """End a run early, with a note, when data and settings are those of the recipe's last promoted run."""

    @model_validator(mode="after")
    def _templates_are_sound(self) -> "Data":
        for column, template in self.columns.items():
            if not template_fields(template):
                raise ValueError(
                    f"columns.{column} names no source column; write for example '{{{template.strip() or 'question'}}}'"
                )
        if self.split_by not in self.columns:
            raise ValueError(f"split_by is '{self.split_by}', which is not a column; use one of {list(self.columns)}")
        return self


class Prompt(Config):
    system: Annotated[str, Field(min_length=1)]
    """Read by training, evaluation, `ask` and serving: one text."""
    user: str
    assistant: str


class TailSettings(Config):
    """Tail training and its five savings; each can be switched off, for measurement and for doubt.

    The result is the same training. A model that cannot be split runs whole, with a warning.
    """

    mode: Literal["auto", "off"] = "auto"
    """`off` runs TRL's SFTTrainer on the whole model."""
    stop_backward: bool = True
    """End the backward pass where training ends."""
    packing: bool = True
    """No pads in matrix products."""
    answer_head: bool = True
    """Run the head only where there is a label."""
    cache: Literal["auto", "gpu", "host", "disk", "none"] = "auto"
    """Where the frozen layers' states are kept from their one computation."""
    shared_prompt: bool = True
    """Compute the prompt that rows share once."""

    @model_validator(mode="after")
    def _cached_states_have_no_gradient(self) -> "TailSettings":
        if not self.stop_backward and self.cache != "none":
            raise ValueError("stop_backward is false, so states need their gradient; set cache to 'none' as well")
        return self


class Stage(Config):
    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")]
    kind: Literal["sft"]
    num_trainable_layers: Annotated[int, Field(ge=0)]
    """The last layers that train; everything below them is frozen."""
    train_head: bool = True
    """Whether the language-modelling head trains, untied from the input embedding."""
    loss: Literal["answer", "all"] = "answer"
    """Positions that carry a label: the answer's tokens, or all."""
    tail: TailSettings = TailSettings()
    scale_learning_rate: bool = True
    """Multiply the learning rate by the world size (linear scaling, Goyal et al. 2017)."""
    trainer: dict[str, Any]
    """Arguments of `trl.SFTConfig`, passed through and checked before anything runs."""

    @model_validator(mode="after")
    def _trainer_has_the_run_parameters(self) -> "Stage":
        for name in ("num_train_epochs", "per_device_train_batch_size", "learning_rate"):
            value = self.trainer.get(name)
            if name not in self.trainer:
                near = difflib.get_close_matches(name, self.trainer, n=1)
                raise ValueError(f"trainer.{name} is missing{f'; is it meant by {near[0]!r}?' if near else '; add it'}")
            if name == "per_device_train_batch_size" and isinstance(value, float) and value % 1:
                raise ValueError(f"trainer.{name} must be a whole number, found {value!r}")
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"trainer.{name} must be a finite number above 0, found {value!r}")
        return self

    @model_validator(mode="after")
    def _something_trains(self) -> "Stage":
        if self.num_trainable_layers == 0 and not self.train_head:
            raise ValueError("num_trainable_layers is 0 and train_head is false, so nothing would train")
        return self


class Generation(Config):
    """Greedy decoding, the same for evaluation, demo and `ask`, so that answers can be compared."""

    max_new_tokens: Annotated[int, Field(ge=1)] = 256
    repetition_penalty: Annotated[float, Field(ge=1)] = 1.0


class Evaluation(Config):
    batch_size: Annotated[int, Field(ge=1)] = 8
    num_generated_answers: Annotated[int, Field(ge=0)] = 64
    """Validation rows whose answer is generated for ROUGE-L and chrF; 0 leaves both out."""


MODEL_METRICS = ("answer_loss", "perplexity", "bits_per_byte", "token_accuracy", "rouge_l", "chrf", "tokens_per_second")
METRICS = (
    *(f"{side}_{metric}" for side in ("base", "tuned") for metric in MODEL_METRICS),
    *("unigram_answer_loss", "answer_loss_vs_base", "answer_loss_vs_unigram"),
)
"""What the evaluation of an `sft` stage measures (`tailtune.evaluate`)."""


class GateRule(Config):
    metric: str
    comparison: Literal["<", "<=", ">", ">="]
    threshold: float


class Demo(Config):
    questions: Annotated[list[str], Field(min_length=1)]


class Resources(Config):
    num_nodes: Annotated[int, Field(ge=1)] = 1
    ranks_per_node: Annotated[int, Field(ge=1)] = 1
    """One rank per GPU; without a GPU, processes on the CPU."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    shutdown_seconds: Annotated[int, Field(ge=1)] = 300
    """Time that a checkpoint may take after SIGTERM before the ranks are killed."""
    # of a pod, on a cluster; quantities as Kubernetes writes them
    gpu: str = "nvidia.com/gpu"
    """Name of the GPU resource; empty to train on the CPU."""
    cpu: Quantity = "6"
    cpu_request: Quantity = "4"
    memory: Quantity = "20Gi"
    memory_request: Quantity = "16Gi"
    job_kind: Literal["auto", "pytorchjob", "trainjob"] = "auto"
    """What the training job is made as; `auto` takes what the cluster has, PyTorchJob first."""
    queue: str = ""
    """LocalQueue of Kueue; empty where jobs do not queue."""
    tolerations: list[dict[str, str]] = []
    node_selector: dict[str, str] = {}
    environment: dict[str, str] = {}
    """Variables of the ranks, for example `{NCCL_DEBUG: INFO}`; secrets do not belong here."""
    start_seconds: Annotated[int, Field(ge=1)] = 3600
    """How long all pods may take until they run: queue, node, image."""
    deadline_seconds: Annotated[int, Field(ge=1)] = 24 * 3600
    """How long the whole job may take."""


class Cluster(Config):
    """What a cluster holds for the run, by name."""

    data_claim: Name = "training-data-pvc"
    """Volume claims. Several nodes need ReadWriteMany."""
    models_claim: Name = "trained-models-pvc"
    workspace_claim: Name = "workspace-pvc"
    hf_secret: Name = "huggingface-token"
    """Secrets, mounted as files into the steps that fetch; one that does not exist is left out. Key `token`."""
    s3_secret: Name = "data-connection"
    """Keys of an OpenShift AI connection: `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_S3_ENDPOINT`, …"""
    ca_secret: Name = "ca-bundle"
    """Key `ca-bundle.crt`: certificates that are trusted besides the public ones."""


class Hardware(Config):
    """`auto` takes the value of the profile that fits the device found."""

    profile: str = "auto"
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    attention: Literal["auto", "flash_attention_2", "sdpa", "eager"] = "auto"


class Recipe(Config):
    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")]
    description: str
    seed: Annotated[int, Field(ge=0)] = 42
    model: Model
    data: Data
    prompt: Prompt
    stages: Annotated[list[Stage], Field(min_length=1, max_length=1)]
    generation: Generation = Generation()
    evaluation: Evaluation = Evaluation()
    gate: Annotated[list[GateRule], Field(min_length=1)]
    demo: Demo
    resources: Resources = Resources()
    cluster: Cluster = Cluster()
    hardware: Hardware = Hardware()
    local: dict[str, Any] = {}
    """Dotted keys and values that apply to runs on this machine only."""

    @model_validator(mode="after")
    def _gate_metrics_are_measured(self) -> "Recipe":
        for rule in self.gate:
            if rule.metric not in METRICS:
                raise ValueError(
                    f"gate: metric '{rule.metric}' is not measured{_nearest(rule.metric, list(METRICS))}; "
                    f"measured: {', '.join(METRICS)}"
                )
        return self

    @model_validator(mode="after")
    def _small_model_has_the_layers(self) -> "Recipe":
        small = self.model.small if self.model.base_model == "small" else None
        for i, stage in enumerate(self.stages):
            if small and stage.num_trainable_layers > small.num_layers:
                asked = f"stages.{i}.num_trainable_layers is {stage.num_trainable_layers}"
                raise ValueError(f"{asked}, but model.small has {small.num_layers} layers; lower it")
        return self

    @model_validator(mode="after")
    def _prompt_uses_columns(self) -> "Recipe":
        for field in ("user", "assistant"):
            for column in template_fields(getattr(self.prompt, field)):
                if column not in self.data.columns:
                    raise ValueError(
                        f"prompt.{field} uses column '{column}', which data.columns does not make; "
                        f"it makes {list(self.data.columns)}"
                    )
        if not template_fields(self.prompt.assistant):
            raise ValueError("prompt.assistant uses no column, so every answer would be the same; "
                             f"use one of {list(self.data.columns)}, for example '{{answer}}'")  # fmt: skip
        return self

    def public_dump(self) -> dict[str, Any]:
        """As plain values, without what an address may hide: for reports and summaries."""
        dumped = self.model_dump(mode="json")
        dumped["data"]["source"] = without_secrets(self.data.source)
        return dumped

    def to_json(self) -> str:
        """JSON: the form in which the recipe travels as one parameter of the pipeline."""
        return json.dumps(self.model_dump(mode="json"), ensure_ascii=False)


def without_secrets(source: str) -> str:
    """An address without user, password and query, which may hold a signature: for logs and reports."""
    scheme, mark, rest = source.partition("://")
    if scheme not in ("http", "https"):
        return source
    host, slash, path = rest.partition("/")
    return scheme + mark + host.rsplit("@", 1)[-1] + slash + re.sub(r"[?#].*", "", path)


def template_fields(template: str) -> list[str]:
    """The `{names}` of a template, in order. Raises ValueError on broken braces and on `{a:b}`, `{a!r}`."""
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"template '{template}': {error}; write {{name}}, and {{{{ or }}}} for a brace") from None
    for _, name, specification, conversion in parts:
        if specification or conversion:
            raise ValueError(f"template '{template}': '{name}' is followed by ':' or '!'; write {{{name}}}")
    return [name for _, name, _, _ in parts if name]


def fill_template(template: str, row: Mapping[str, Any]) -> str:
    """`For {topic}, {question}` with the row's values."""
    return "".join(
        literal + (str(row[name]) if name else "") for literal, name, _, _ in string.Formatter().parse(template)
    )


class _Loader(yaml.SafeLoader):
    """YAML with floats and booleans of 1.2: `5e-5` is a number and `off` a text, unlike in PyYAML's YAML 1.1.

    A key that stands twice is an error: PyYAML would take the last one without a word.
    """

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"key '{key.value}' stands twice", problem_mark=key.start_mark)
            seen |= {key.value} if isinstance(key.value, str) else set()
        return node


_BOOL = "tag:yaml.org,2002:bool"
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _BOOL]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_BOOL, re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|\.[0-9]+(?:[eE][-+]?[0-9]+)?"
               r"|[0-9][0-9_]*[eE][-+]?[0-9]+|\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"),
    list("-+0123456789."),
)  # fmt: skip


def parse_yaml(text: str) -> Any:
    """YAML text → plain values."""
    return yaml.load(text, Loader=_Loader)


def list_recipes() -> list[str]:
    """Names of the built-in recipes."""
    return sorted(path.stem for path in BUILT_IN.glob("*.yaml"))


def load_recipe(name_or_path: str | os.PathLike[str]) -> Recipe:
    """A built-in recipe by name, or a user's file by path.

    Paths in the file (`data.source`, `model.base_model`, also in `local:`) are relative to the
    file. Raises UserError that names the field and the remedy.
    """
    text = os.fspath(name_or_path)
    if text in list_recipes():
        path = BUILT_IN / f"{text}.yaml"
    elif text.endswith((".yaml", ".yml", ".json")) or os.sep in text:
        path = Path(text)
    else:
        raise UserError(f"no recipe '{text}'{_nearest(text, list_recipes())}; built in: "
                        f"{', '.join(list_recipes())}; or give a path that ends in .yaml")  # fmt: skip
    try:
        content = path.read_text(encoding="utf-8")
        raw = json.loads(content) if path.suffix == ".json" else parse_yaml(content)
    except FileNotFoundError:
        raise UserError(f"recipe file {path} does not exist; check the path, or see --list") from None
    except (IsADirectoryError, PermissionError, UnicodeDecodeError) as error:
        raise UserError(f"recipe file {path} cannot be read: {error}; give a readable YAML file") from None
    except json.JSONDecodeError as error:
        raise UserError(f"recipe file {path}: {error}; correct the JSON") from None
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where else ""
        problem = getattr(error, "problem", None) or "not YAML"
        raise UserError(f"recipe file {path}{line}: {problem}; correct the YAML") from None
    if not isinstance(raw, dict):
        raise UserError(f"recipe file {path} holds no mapping; start from a built-in one (recipes/survival.yaml)")
    return _validate(_with_absolute_paths(raw, path.parent), source=str(path))


def parse_recipe(text: str) -> Recipe:
    """A recipe from its JSON form, the pipeline's parameter. Raises UserError."""
    try:
        raw = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"parameter 'recipe' is no JSON ({error}); leave it at its default, or paste the "
                        "value of `recipe` that `pipeline.py --dry-run` prints") from None  # fmt: skip
    if not isinstance(raw, dict):
        raise UserError("parameter 'recipe' is no JSON object; leave it at its default")
    return _validate(raw, source="parameter 'recipe'")


def with_overrides(recipe: Recipe, overrides: Mapping[str, Any]) -> Recipe:
    """The recipe with run parameters and dotted keys replaced. Raises UserError on unknown keys."""
    if not overrides:
        return recipe
    raw = recipe.model_dump(mode="json")
    for key, value in overrides.items():
        _set(raw, key, value)
    return _validate(raw, source="with " + ", ".join(overrides))


def with_local_overlay(recipe: Recipe) -> Recipe:
    """The recipe as it runs on this machine."""
    try:
        return with_overrides(recipe, recipe.local)
    except UserError as error:
        raise UserError(f"the recipe's local: overlay: {error}") from None


def with_environment(recipe: Recipe, environment: Mapping[str, str]) -> Recipe:
    """The recipe with the training container's variables (`EPOCHS`, …) on top: they win."""
    found = {name: environment[name] for name in ENVIRONMENT if environment.get(name)}
    return with_overrides(recipe, {ENVIRONMENT[name]: parse_value(text) for name, text in found.items()})


def parse_parameters(pairs: Iterable[str]) -> dict[str, Any]:
    """`KEY=VALUE` texts → overrides. Raises UserError on a text without `=`."""
    overrides = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key.strip():
            raise UserError(f"-p {pair}: write KEY=VALUE, for example -p epochs=2")
        overrides[key.strip()] = parse_value(text)
    return overrides


def parse_value(text: str) -> Any:
    """The typed value of a `-p KEY=VALUE` text: a YAML scalar, list or `{a: 1}`.

    `{answer}` and `Answer: briefly`, mappings in YAML, are texts.
    """
    try:
        value = parse_yaml(text) if text.strip() else text
    except yaml.YAMLError:
        return text
    is_text = isinstance(value, dict) and not (text.lstrip().startswith("{") and ":" in text)
    return text if is_text else value


def _set(raw: dict[str, Any], key: str, value: Any) -> None:
    """Replace one value of the raw recipe by its parameter name or dotted key."""
    path = PARAMETERS.get(key, key).split(".")
    at: Any = raw
    for depth, part in enumerate(path):
        last = depth == len(path) - 1
        prefix = ".".join(path[:depth])
        if isinstance(at, list):
            if not part.isdigit() or int(part) >= len(at):
                raise UserError(f"unknown key '{key}': '{prefix}' has entries 0 to {len(at) - 1}")
            index: Any = int(part)
        elif isinstance(at, dict):
            free = depth >= 1 and path[depth - 1] in ("trainer", "columns", "local", "environment", "node_selector")
            if part not in at and not (free and last):
                known = [f"{prefix}.{name}" if prefix else name for name in at]
                known += list(PARAMETERS) if depth == 0 else []
                raise UserError(f"unknown key '{key}'{_nearest('.'.join(path[: depth + 1]), known)}; "
                                f"known here: {', '.join(known)}")  # fmt: skip
            index = part
        else:
            raise UserError(f"unknown key '{key}': '{prefix}' is a single value; set that")
        if last:
            at[index] = value
        else:
            at = at[index]


def _validate(raw: dict[str, Any], source: str) -> Recipe:
    try:
        return Recipe.model_validate(raw)
    except ValidationError as error:
        # an unknown key first: it is the likely cause of a key that is missing
        problems = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
        shown = "; ".join(_describe(problem) for problem in problems[:3])
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise UserError(f"recipe {source}: {shown}{more}") from None


def _describe(problem: Any) -> str:
    """One of pydantic's errors: the field, what is wrong, and the remedy."""
    field = ".".join(str(part) for part in problem["loc"]) or "recipe"
    if problem["type"] == "extra_forbidden":
        known = _fields_at(problem["loc"][:-1])
        return f"{field}: unknown key{_nearest(str(problem['loc'][-1]), known)}; known: {', '.join(known)}"
    if problem["type"] == "missing":
        return f"{field}: is missing; add it"
    detail = problem["msg"].removeprefix("Value error, ")
    given = problem.get("input")
    return f"{field}: {detail}" + ("" if isinstance(given, dict) else f" (got {given!r})")


def _fields_at(location: tuple[Any, ...]) -> list[str]:
    """Field names of the configuration class at a location of the recipe."""
    kind: Any = Recipe
    for part in location:
        if isinstance(part, int):
            continue
        annotation = kind.model_fields[part].annotation
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        kind = next(c for c in candidates if isinstance(c, type) and issubclass(c, Config))
    return list(kind.model_fields)


def _nearest(word: str, known: list[str]) -> str:
    found = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f", did you mean '{found[0]}'?" if found else ""


def _with_absolute_paths(raw: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Resolve the file paths that a recipe file names against the file's own folder."""

    def resolved(value: Any) -> Any:
        if not isinstance(value, str) or "://" in value:
            return value
        own = (folder / Path(value).expanduser()).resolve()
        if not own.exists() and value.startswith("samples/") and (BUILT_IN / value).exists():
            return str(BUILT_IN / value)  # a copy of a built-in recipe still finds the samples that came with it
        return str(own) if own.exists() or value.startswith(("./", "../", "~", "samples/")) else value

    for section, field in (("data", "source"), ("model", "base_model")):
        if isinstance(raw.get(section), dict) and field in raw[section]:
            raw[section][field] = resolved(raw[section][field])
    if isinstance(raw.get("local"), dict):
        path_keys = {"data.source", "model.base_model", "data_source", "base_model"}
        raw["local"] = {k: resolved(v) if k in path_keys else v for k, v in raw["local"].items()}
    return raw
