"""The schema of a recipe: what is trained, on which data, and when it is good enough. Imports neither torch nor kfp."""

import difflib
import json
import math
import os
import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    SerializerFunctionWrapHandler,
    Tag,
    model_serializer,
    model_validator,
)

from tailtune import images
from tailtune.config import Config, copied_column, refuse_doubled, template_fields
from tailtune.errors import did_you_mean
from tailtune.kinds import metric_table
from tailtune.kinds.chat.config import Demo, Evaluation, Generation, Prompt
from tailtune.recipe.addresses import check_address, check_plain, literal, without_secrets
from tailtune.recipe.values import parse_yaml, texts

Quantity = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if isinstance(value, int) else value),
    Field(pattern=r"^\d+(\.\d+)?(m|k|[KMGT]i|[MGT])?$"),
]
"""A quantity as Kubernetes writes it: `6`, `500m`, `20Gi`."""
UNITS: dict[str, int | Decimal] = {
    "": 1, "m": Decimal("0.001"), "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40,
}  # fmt: skip
PlainText = Annotated[str, AfterValidator(check_plain)]
"""A text that is a run parameter as it is."""
VolumeName = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")]
"""Name of a claim or secret. KFP gives a pod's volume the same name, which has to be a DNS label (RFC 1123)."""
ImageName = Annotated[str, Field(pattern=r"^[a-z0-9][\w./:@-]*$")]
"""Reference of an image: `NAME:TAG`, `HOST/FOLDER/NAME:TAG` or `…@sha256:…`."""

NO_SECRETS = (
    "a recipe is no place for secrets; hf_secret and s3_secret name those that are mounted as files into the steps "
    "that fetch"
)
REFUSED_VARIABLES = {
    r"(.*_)?(KEY|KEY_ID|PASS|PWD|PAT|AUTH|DSN)|.*TOKEN|.*(PASSWORD|PASSWD|PASSPHRASE|SECRET|CREDENTIAL|COOKIE|BEARER"
    r"|SIGNATURE|(API|ACCESS|PRIVATE)_?KEY).*": NO_SECRETS,
    r"((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|NODE_RANK|(MASTER|PET)_.*|POD_IP|JOB_COMPLETION_INDEX":
        "torchrun and the operator set it; use resources.num_nodes and resources.ranks_per_node",
    r"DATA_DIR|OUTPUT_DIR|HIDDEN_STATE_CACHE_DIR|TERMINATION_LOG|TAILTUNE_.*": "tailtune sets it; leave it out",
}  # fmt: skip
"""Patterns of the names that `resources.environment` may not have, in any case, and why."""


def _check_environment(environment: Any) -> Any:
    """Look at the names first: other messages show values."""
    for name, value in environment.items() if isinstance(environment, dict) else ():
        for pattern, why in REFUSED_VARIABLES.items():
            if re.fullmatch(pattern, str(name), re.IGNORECASE):
                raise ValueError(f"{name} cannot be set here: {why}")
        if "://" in str(value) and without_secrets(str(value)) != str(value):
            raise ValueError(f"{name} cannot be set here: its address has a login or a query; {NO_SECRETS}")
    return environment


def _check_overlay(overlay: Any) -> Any:
    """Look for secrets in the addresses that are used only later."""
    for key, text in texts(overlay):
        if ADDRESS_KEY.fullmatch(key):
            check_address(text)
    return overlay


ADDRESS_KEY = re.compile(r"(.*\.)?((validation_|data_)?source|base_model)(\.\d+)?")
"""Of an address or a path."""


Environment = Annotated[
    dict[str, Annotated[str, BeforeValidator(lambda v: str(v) if type(v) in (int, float) else v)]],
    BeforeValidator(_check_environment),
]
"""Environment variables: names and texts. A number is taken as its text."""


class SmallModel(Config):
    """A small model of the recipe's architecture, built instead of downloaded: for laptops and tests."""

    model_type: str
    """The architecture's name in Transformers, for example `smollm3`."""
    vocab_size: Annotated[int, Field(ge=300)]
    """Size of the byte-level BPE tokenizer that is trained on the data; 256 of its tokens are the bytes."""
    hidden_size: Annotated[int, Field(ge=8)]
    intermediate_size: Annotated[int, Field(ge=8)]
    num_layers: Annotated[int, Field(ge=1)]
    num_heads: Annotated[int, Field(ge=1)]
    num_key_value_heads: Annotated[int, Field(ge=1)]
    pretrain_steps: Annotated[int, Field(ge=0)]
    """Pretraining steps on plain text, so that the base model is more than noise."""
    pretrain_learning_rate: Annotated[float, Field(gt=0)] = 3e-3

    @model_validator(mode="after")
    def _heads_divide(self) -> "SmallModel":
        for size, number in (("hidden_size", "num_heads"), ("num_heads", "num_key_value_heads")):
            if getattr(self, size) % getattr(self, number):
                raise ValueError(f"{size} {getattr(self, size)} is not a multiple of {number} {getattr(self, number)}")
        return self


class Model(Config):
    base_model: Annotated[str, Field(min_length=1), AfterValidator(check_address)]
    """A hub name (`OWNER/NAME`), a directory, or `small` for the model that `small:` describes."""
    revision: PlainText = "main"
    """Branch, tag or commit on the hub. The commit is recorded at the first fetch, and later fetches keep it."""
    small: SmallModel | None = None

    @property
    def directory(self) -> Path | None:
        """The directory that `base_model` names, if it is one."""
        path = Path(os.path.expanduser(self.base_model))
        return path if self.base_model != "small" and path.is_dir() else None

    @model_validator(mode="after")
    def _small_is_described(self) -> "Model":
        if self.base_model == "small" and self.small is None:
            raise ValueError("base_model is 'small' but model.small is not given; describe it, or name a model")
        return self


def _check_sources(value: Any) -> Any:
    """Return one source or a list of them; a text that begins with `[` is a list, as in the dashboard.

    Text after the `]` makes it a glob, as in `[ab]*.jsonl`.
    """
    if isinstance(value, str) and re.fullmatch(r"\s*\[([^]]*|.*\]\s*)", value, re.DOTALL):
        try:
            value = parse_yaml(value)
        except ValueError:
            raise ValueError('is not a list; write ["first.jsonl", "second.jsonl"]') from None
    sources = value if isinstance(value, list) and value else [value]
    for source in sources:
        if isinstance(source, str):
            check_address(source)
    if not all(isinstance(source, str) and source for source in sources):
        raise ValueError("give one source, or a list of them, each a text that is not empty")
    return value


Sources = Annotated[str | list[str], BeforeValidator(_check_sources)]
"""One source or several: a file, a directory, a glob, `https://`, `s3://BUCKET/KEY`, `s3://BUCKET/FOLDER/`,
`hf://datasets/OWNER/NAME[@REVISION][/FILE][?config=NAME&split=NAME]`, or `embedded`."""


def source_list(sources: str | list[str] | None) -> list[str]:
    """Return the sources as a list."""
    return [sources] if isinstance(sources, str) else sources or []


def show_sources(sources: str | list[str]) -> str:
    """Return the sources for logs and reports, without secrets in addresses."""
    return ", ".join(map(without_secrets, source_list(sources)))


IS_VALIDATION = "is_validation"
"""Column of the Parquet file that marks the rows of `validation_source`."""


class Data(Config):
    source: Sources
    validation_source: Sources | None = None
    """The validation rows, where the data set has its own; then nothing is split off from `source`."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """Of the file, where `source` is a single one."""
    format: Literal["auto", "json", "jsonl", "csv", "txt", "parquet"] = "auto"
    columns: Annotated[dict[str, str], Field(min_length=1)]
    """Column of the Parquet file → template over the source's columns, for example `For {topic}, {question}`. `{tags}`
    alone copies a column of lists or objects."""
    optional_columns: list[str] = []
    """Source columns that may be empty or missing; otherwise, rows without a value are rejected."""
    max_rows: Annotated[int, Field(ge=1)] | None = None
    """Of `source`, and again of `validation_source`."""
    max_rejected_share: Annotated[float, Field(ge=0, le=1)] = 0.01
    max_row_bytes: Annotated[int, Field(ge=1, le=1_000_000_000)] = 16_000_000
    """Longer rows are rejected. Bounds the memory of the parquet step."""
    max_file_bytes: Annotated[int, Field(ge=1)] = 100_000_000_000
    """Of a compressed file, after decompression; the step stops there."""
    split_by: str | None = None
    """The column that decides between training and validation: rows with equal values are on the same side."""
    validation_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """0.1, unless there is a `validation_source`."""
    skip_unchanged: bool = False
    """End a run early, with a note, when data and settings equal those of the recipe's last promoted run."""

    @property
    def all_sources(self) -> list[str]:
        return [*source_list(self.source), *source_list(self.validation_source)]

    @model_validator(mode="before")
    @classmethod
    def _default_share(cls, raw: Any) -> Any:
        if isinstance(raw, dict) and raw.get("validation_source") is None:
            return {"validation_share": 0.1, **raw}
        return raw

    @model_validator(mode="after")
    def _templates_are_sound(self) -> "Data":
        used = {name for template in self.columns.values() for name in template_fields(template)}
        for column, template in self.columns.items():
            refuse_doubled(f"columns.{column}", template, used | set(self.columns))
            if not template_fields(template):
                raise ValueError(
                    f"columns.{column} names no source column; write for example "
                    f"'{{{template.strip('{ }') or 'question'}}}'"
                )
        for name in self.optional_columns:
            if name not in used:
                raise ValueError(f"optional_columns names '{name}', which columns does not use; "
                                 f"it uses {sorted(used)}")  # fmt: skip
        return self

    @model_validator(mode="after")
    def _one_way_to_validation_rows(self) -> "Data":
        if self.validation_source is None:
            if self.split_by is None or self.validation_share is None:
                missing = "split_by" if self.split_by is None else "validation_share"
                raise ValueError(f"{missing} is missing; add it, or a validation_source")
            if self.split_by not in self.columns:
                columns = list(self.columns)
                raise ValueError(f"split_by is '{self.split_by}', which is not a column; use one of {columns}")
        elif given := [name for name in ("split_by", "validation_share") if getattr(self, name) is not None]:
            raise ValueError(f"validation_source and {given[0]} are both given, but validation_source leaves nothing "
                             f"to split; remove {' and '.join(given)}, or set null")  # fmt: skip
        elif IS_VALIDATION in self.columns:
            raise ValueError(f"columns.{IS_VALIDATION} is tailtune's own where there is a validation_source; rename it")
        return self


REMOVED_TAIL_KEYS = ("stop_backward", "packing", "answer_head", "shared_prompt")
"""Former keys of `tail`, for the message that refuses an old recipe."""


class TailSettings(Config):
    """Tail training: computes the frozen layers once and trains the last layers on their hidden states.

    The result is the same as without it. A model that cannot be split is trained as a whole, with a warning.
    """

    mode: Literal["auto", "off"] = "auto"
    """`off` runs TRL's SFTTrainer on the whole model."""
    cache: Literal["auto", "gpu", "host", "disk", "none"] = "auto"
    """Where the hidden states of the frozen layers are kept; `none` computes them in every step."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_removed_keys(cls, raw: Any) -> Any:
        for key in REMOVED_TAIL_KEYS:
            if isinstance(raw, dict) and key in raw:
                raise ValueError(
                    f"{key} is no longer a recipe key (only benchmarks/tail.py can still change it); delete it"
                )
        return raw


class LastLayers(Config):
    """Train the last layers and the head; everything below them is frozen."""

    last_layers: Annotated[int, Field(ge=0)]
    """How many decoder layers train, counted from the last one."""
    head: bool = True
    """Whether the language-modelling head trains, untied from the input embedding."""

    @model_validator(mode="after")
    def _something_trains(self) -> "LastLayers":
        if self.last_layers == 0 and not self.head:
            raise ValueError("last_layers is 0 and head is false, so nothing would train")
        return self


UNION_TAGS = ("<last_layers>", "<all>")
"""They are not part of a key: messages leave them out."""
TrainWeights = Annotated[
    Annotated[LastLayers, Tag(UNION_TAGS[0])] | Annotated[Literal["all"], Tag(UNION_TAGS[1])],
    Discriminator(lambda value: UNION_TAGS[isinstance(value, str)]),
]

RENAMED = {
    "num_trainable_layers": "train_weights.last_layers",
    "train_head": "train_weights.head",
}
"""Former key of a stage → its present name, for the message that refuses an old recipe."""


class JobResources(Config):
    """Of a training job."""

    num_nodes: Annotated[int, Field(ge=1)] = 1
    ranks_per_node: Annotated[int, Field(ge=1)] = 1
    """One rank per GPU; without a GPU, processes on the CPU."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    shutdown_seconds: Annotated[int, Field(ge=1)] = 300
    """How long the ranks may take to write a checkpoint after SIGTERM before they are killed."""
    checkpoint_seconds: Annotated[int, Field(ge=1)] = 900
    """A checkpoint is saved at the end of the first step after this time, the first one after a minute."""
    # Per pod, on a cluster:
    gpu: PlainText = "nvidia.com/gpu"
    """Name of the GPU resource. Empty: train on the CPU."""
    cpu: Quantity = "6"
    cpu_request: Quantity = "4"
    memory: Quantity = "20Gi"
    memory_request: Quantity = "16Gi"
    queue: PlainText = ""
    """Name of a Kueue LocalQueue; empty where jobs do not queue."""
    tolerations: list[dict[str, str]] = []
    node_selector: dict[str, str] = {}
    environment: Environment = {}
    """Environment variables of the ranks, for example `{NCCL_DEBUG: WARN}`. Not for secrets."""
    start_seconds: Annotated[int, Field(ge=1)] = 3600
    """How long it may take until all pods run: queue, node, image."""
    deadline_seconds: Annotated[int, Field(ge=1)] = 24 * 3600
    """How long the whole job may take."""


class Resources(JobResources):
    """Of the training jobs, and of the steps.

    The steps that load models have the `gpu`, `cpu` and `memory` of a job's pods; `queue`, `tolerations` and
    `node_selector` apply to all steps.
    """

    step_cpu: Quantity = "2"
    step_cpu_request: Quantity = "100m"
    step_memory: Quantity = "4Gi"
    step_memory_request: Quantity = "1Gi"
    """Of the steps that load no models. The step that builds a small model needs the memory."""
    job_kind: Literal["auto", "pytorchjob", "trainjob"] = "auto"
    """Kind of the training jobs. `auto` takes the first kind that the cluster has, PyTorchJob before TrainJob."""


class StageResources(JobResources):
    """What a stage's job has instead of the recipe's `resources`: only the fields that are given.

    A mapping or list replaces the recipe's as a whole. `Recipe.resources_of` merges the two.
    """

    @model_validator(mode="before")
    @classmethod
    def _refuse_fields_of_the_run(cls, raw: Any) -> Any:
        for name in raw if isinstance(raw, dict) else ():
            if name in Resources.model_fields and name not in cls.model_fields:
                raise ValueError(f"{name} is the same for all stages; set resources.{name}")
        return raw

    @model_serializer(mode="wrap")
    def _only_given_fields(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in handler(self).items() if name in self.model_fields_set}


class Stage(Config):
    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")]
    kind: Literal["chat"]
    """What is learned: `chat`, answers to questions."""
    train_weights: TrainWeights
    """Which weights train: `{last_layers: 2, head: true}`, or `all`, embeddings and norms included."""
    loss: Literal["answer", "all"] = "answer"
    """Which tokens carry a label: those of the answer, or all."""
    tail: TailSettings = TailSettings()
    scale_learning_rate: bool = True
    """Multiply the learning rate by the world size (linear scaling, Goyal et al. 2017)."""
    trainer: dict[str, Any]
    """Arguments of `trl.SFTConfig`, checked before anything runs and then passed on."""
    resources: StageResources = StageResources()
    """For this stage's job, in place of single fields of the recipe's `resources`, which run parameters change."""

    @model_validator(mode="after")
    def _trainer_has_the_run_parameters(self) -> "Stage":
        if secret := next((name for name in self.trainer if name.endswith("hub_token")), None):
            raise ValueError(f"trainer.{secret} cannot be set here: {NO_SECRETS}")
        for name in ("num_train_epochs", "per_device_train_batch_size", "learning_rate"):
            value = self.trainer.get(name)
            if name not in self.trainer:
                near = difflib.get_close_matches(name, self.trainer, n=1)
                raise ValueError(
                    f"trainer.{name} is missing{f'; did you misspell it as {near[0]!r}?' if near else '; add it'}"
                )
            if name == "per_device_train_batch_size" and isinstance(value, float) and value % 1:
                raise ValueError(f"trainer.{name} must be a whole number, found {value!r}")
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"trainer.{name} must be a finite number above 0, found {value!r}")
        return self

    @model_validator(mode="before")
    @classmethod
    def _refuse_former_keys(cls, raw: Any) -> Any:
        if isinstance(raw, dict):
            changes = [f"{key} is now {name}" for key, name in RENAMED.items() if key in raw]
            changes += ["kind sft is now kind chat"] if raw.get("kind") == "sft" else []
            if changes:
                raise ValueError(f"{', '.join(changes)}; rename")
        return raw


class GateRule(Config):
    metric: str
    comparison: Literal["<", "<=", ">", ">="]
    threshold: float


class ClusterNames(Config):
    """Names of the images, volume claims and secrets on a cluster."""

    pipeline_image: ImageName = images.PIPELINE
    """Image of the steps that need no GPU. A short name is an image stream of the run's project."""
    trainer_image: ImageName = images.TRAINER
    """Image of the training job's pods and of the steps that load models."""

    data_claim: VolumeName = "training-data-pvc"
    """Volume claims. Training on several nodes needs ReadWriteMany."""
    models_claim: VolumeName = "trained-models-pvc"
    workspace_claim: VolumeName = "workspace-pvc"
    hf_secret: VolumeName = "huggingface-token"
    """Secrets are mounted as files into the steps that fetch; missing ones are ignored. Key of this one: `token`."""
    s3_secret: VolumeName = "data-connection"
    """Keys as in an OpenShift AI connection: `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_S3_ENDPOINT`, …"""
    ca_secret: VolumeName = "tailtune-ca"
    """Key `ca-bundle.crt`: certificates to trust in addition to the public ones."""


class Hardware(Config):
    """`auto` takes the value of the hardware profile that fits the device."""

    profile: str = "auto"
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    attention: Literal["auto", "flash_attention_2", "sdpa", "eager"] = "auto"


class Recipe(Config):
    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")]
    description: str
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 42
    model: Model
    data: Data
    prompt: Prompt
    stages: Annotated[list[Stage], Field(min_length=1, max_length=1)]
    generation: Generation = Generation()
    evaluation: Evaluation = Evaluation()
    gate: Annotated[list[GateRule], Field(min_length=1)]
    expect: list[GateRule] = []
    """What the prompt asks of an answer, as rules on the data. Rows that teach something else are a warning."""
    demo: Demo
    resources: Resources = Resources()
    cluster: ClusterNames = ClusterNames()
    hardware: Hardware = Hardware()
    keep_runs: Annotated[int, Field(ge=1)] | None = 2
    """How many of the newest runs keep their checkpoints, base model and data; `null`: all. On a cluster, each run
    removes these of older runs of the recipe, except of runs that somebody has named (tailtune/retention.py)."""
    keep_models: Annotated[int, Field(ge=1)] | None = 3
    """How many of the newest promoted models are kept when their runs are older than that; `null`: all."""
    local: Annotated[dict[str, Any], BeforeValidator(_check_overlay)] = {}
    """Dotted keys and values that apply only to local runs."""

    @model_validator(mode="after")
    def _metrics_of_rules_are_measured(self) -> "Recipe":
        table = metric_table(self.stages[0].kind)
        for key, rules, names in (
            ("gate", self.gate, list(table.labels)),
            ("expect", self.expect, [metric.name for metric in table.of_texts]),
        ):
            for rule in rules:
                if rule.metric not in names:
                    raise ValueError(
                        f"{key}: metric '{rule.metric}' is not measured{did_you_mean(rule.metric, names)}; "
                        f"measured: {', '.join(names) or 'none'}"
                    )
        return self

    @model_validator(mode="after")
    def _small_model_has_the_layers(self) -> "Recipe":
        small = self.model.small if self.model.base_model == "small" else None
        for i, stage in enumerate(self.stages):
            wanted = stage.train_weights
            if small and isinstance(wanted, LastLayers) and wanted.last_layers > small.num_layers:
                asked = f"stages.{i}.train_weights.last_layers is {wanted.last_layers}"
                raise ValueError(f"{asked}, but model.small has {small.num_layers} layers; lower it")
        return self

    @model_validator(mode="after")
    def _no_request_is_above_its_limit(self) -> "Recipe":
        """The API server would refuse every such pod, one by one, while the job waits for them."""
        for _, (limit_key, limit), (request_key, request) in self.container_sizes():
            if _amount(request) > _amount(limit):
                raise ValueError(f"{limit_key} is {limit}, less than {request_key}, which is {request}; set both")
        return self

    @model_validator(mode="after")
    def _prompt_uses_columns(self) -> "Recipe":
        messages = self.prompt.messages
        if messages is not None:
            template = self.data.columns.get(messages)
            if template is None:
                raise ValueError(f"prompt.messages is '{messages}', which data.columns does not define; "
                                 f"it defines {list(self.data.columns)}")  # fmt: skip
            if copied_column(template) is None:
                raise ValueError(f"data.columns.{messages} is '{template}', but a conversation is one column as it "
                                 f"is; write for example '{{{template_fields(template)[0]}}}'")  # fmt: skip
            return self
        for field in ("user", "assistant"):
            refuse_doubled(f"prompt.{field}", getattr(self.prompt, field), self.data.columns)
            for column in template_fields(getattr(self.prompt, field)):
                if column not in self.data.columns:
                    raise ValueError(
                        f"prompt.{field} uses column '{column}', which data.columns does not define; "
                        f"it defines {list(self.data.columns)}"
                    )
                if set(template_fields(self.data.columns[column])) <= set(self.data.optional_columns):
                    raise ValueError(f"data.columns.{column}, which prompt.{field} uses, consists only of "
                                     "data.optional_columns, so it could be empty; add another column")  # fmt: skip
        if not template_fields(self.prompt.assistant or ""):
            raise ValueError("prompt.assistant uses no column, so every answer would be the same; "
                             f"use one of {list(self.data.columns)}, for example '{{answer}}'")  # fmt: skip
        return self

    def resources_of(self, stage: Stage) -> Resources:
        """Return the resources of a stage's job: the recipe's, with the stage's own in their place.

        Run parameters such as `num_nodes` change the recipe's, so a stage's own value wins over them.
        """
        own = {name: getattr(stage.resources, name) for name in stage.resources.model_fields_set}
        return self.resources.model_copy(update=own)

    def resource_key(self, index: int, field: str) -> str:
        """Return the dotted key at which a resource of a stage's job can be changed."""
        own = field in self.stages[index].resources.model_fields_set
        return f"stages.{index}.resources.{field}" if own else f"resources.{field}"

    def container_sizes(self) -> Iterator[tuple[str, tuple[str, str], tuple[str, str]]]:
        """For each size of a step's or a job's container: `cpu` or `memory`, and key and value of limit and request."""
        for resource in ("cpu", "memory"):
            for name in (resource, f"step_{resource}"):
                fields = name, f"{name}_request"
                limit, request = ((f"resources.{field}", getattr(self.resources, field)) for field in fields)
                yield resource, limit, request
            fields = resource, f"{resource}_request"
            for index, stage in enumerate(self.stages):
                if stage.resources.model_fields_set.isdisjoint(fields):
                    continue
                own = self.resources_of(stage)
                limit, request = ((self.resource_key(index, field), getattr(own, field)) for field in fields)
                yield resource, limit, request

    def to_json(self) -> str:
        """Return the recipe as JSON, the form in which it is one parameter of the pipeline."""
        return literal(json.dumps(self.model_dump(mode="json"), ensure_ascii=False))


def _amount(quantity: str) -> Decimal:
    number = quantity.rstrip("mkKMGTi")
    return Decimal(number) * UNITS[quantity.removeprefix(number)]
