"""The run file's sections. Names and defaults in `model`, `lora`, `data`, `train` are the published recipe's."""

from __future__ import annotations

import re
import warnings
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from windlass.runfile.kinds import Count, Number, RunName, Section, Share, Text
from windlass.runfile.machines import Cluster, LayoutSection
from windlass.runfile.training import Train


class Model(Section):
    """Which model is adapted, and how it is computed."""

    model_name_or_path: Text = "/data/input/Models/Mistral-Small-4-119B-2603"
    """Folder of the checkpoint (config.json and safetensors). For a plan alone, a known model's name is enough."""
    torch_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Dtype of the base weights once loaded. Also written `dtype`."""
    device_map: str | dict[str, str | int] | None = "auto"
    """`auto`, as in the published recipe: windlass places the model. Anything else contradicts more than one rank."""
    use_cache: bool = False
    """Keep keys and values while computing. Training needs none of it; it contradicts packing and checkpointing."""
    attn_implementation: Text | None = None
    """eager, sdpa, flash_attention_2, flash_attention_3, flex_attention, a hub kernel; null: the model's own."""
    trust_remote_code: bool = False
    """Run Python code that comes with the checkpoint. Off unless asked for."""


class ExpertLora(Section):
    """Low-rank adapters of the routed experts."""

    r: Count
    """Rank per expert. Default: that of `lora.r`."""
    lora_alpha: Annotated[Number, Field(gt=0)]
    """Scaling numerator. Default: keeps the ratio lora_alpha / r of the other adapters."""
    targets: Annotated[list[Text], Field(min_length=1)] = Field(default=["gate_up_proj", "down_proj"])
    """Fused expert parameters to adapt, by the last part of their name."""


def _pattern(value: list[str] | str) -> list[str] | str:
    if isinstance(value, str):
        if value not in ("all", "all-linear"):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # Python's doubts about a pattern are no error of the run file
                    re.compile(value)
            except (re.error, RecursionError, OverflowError) as error:
                raise ValueError(f"is neither `all`, `all-linear` nor a regular expression: {error}") from error
        return value
    twice = sorted({name for name in value if value.count(name) > 1})
    if twice:
        raise ValueError(f"names {', '.join(twice)} more than once")
    return value


def _experts(section: Any) -> Any:
    """`experts: true` and partly given experts take rank and ratio from the section around them."""
    if not isinstance(section, dict) or "experts" not in section:
        return section
    experts = section["experts"]
    if isinstance(experts, bool):
        experts = {} if experts else None
    if not isinstance(experts, dict):
        return {**section, "experts": experts}
    r, alpha = section.get("r", 16), section.get("lora_alpha", 32)
    if not (_positive(r) and _positive(alpha)):  # reported where they stand; anything valid will do here
        r, alpha = 1, 1
    own = experts.get("r", r)
    scaled = alpha * own / r if _positive(own) else alpha
    scaled = int(scaled) if float(scaled).is_integer() else scaled
    return {**section, "experts": {"r": r, "lora_alpha": scaled, **experts}}


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e9


class Lora(Section):
    """The adapter: PEFT's names and meanings."""

    r: Count = 16
    """Rank of the adapter matrices."""
    lora_alpha: Annotated[Number, Field(gt=0)] = 32
    """Scaling numerator: updates are scaled by lora_alpha / r (by lora_alpha / sqrt(r) with use_rslora)."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Dropout before the adapter, that of routed experts too."""
    target_modules: Annotated[
        Annotated[list[Text], Field(min_length=1)] | Text,
        AfterValidator(_pattern),
    ] = Field(default=["q_proj", "k_proj", "v_proj", "o_proj"])
    """Module names to adapt, `all`, `all-linear`, or one regular expression over full names. Each must match."""
    bias: Literal["none", "all", "lora_only"] = "none"
    """Train the base's bias vectors too: none, all of them, or those of adapted modules."""
    task_type: Literal["CAUSAL_LM"] = "CAUSAL_LM"
    """What the adapter is for; windlass trains causal language models."""
    use_rslora: bool = False
    """Scale by lora_alpha / sqrt(r), which keeps large ranks stable."""
    use_dora: bool = False
    """Train magnitude and direction apart (DoRA). Not for routed experts."""
    init_lora_weights: bool | Literal["gaussian"] = True
    """true: A random, B zero, so that step 0 is the base model; gaussian: A normal; false: both random (for tests)."""
    adapter: Text | None = None
    """Folder of an existing PEFT adapter to start from."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the adapter's weights; the optimizer's state follows it."""
    experts: ExpertLora | None = None
    """Adapt the routed experts too: true for the same rank, or their own r, lora_alpha and targets."""

    _fill = model_validator(mode="before")(_experts)


class Data(Section):
    """What it learns from, and how text becomes tokens."""

    dataset_name_or_path: Text = "/data/input/Datasets/wikitext"
    """A local folder, file or glob (JSONL, JSON, Parquet, CSV, text, save_to_disk), or a dataset's hub name."""
    dataset_config_name: Text | None = "wikitext-2-raw-v1"
    """Configuration within the dataset, where it has several."""
    text_field: Text = "text"
    """Column that holds plain text. Also written `dataset_text_field`."""
    train_split: Text = "train"
    """Split to train on; a slice such as `train[:5%]` is taken as well."""
    val_split: Text | None = "validation"
    """Split to evaluate on; null for none."""
    max_length: Count = 1024
    """Longest sequence in tokens; what is longer is cut, and counted. Also written `max_seq_length`."""
    prompt_template: Text | None = None
    """A format string over columns, the learnt part in [[ ]], instead of `text_field`: "{question} [[{answer}]]"."""
    packing: bool = False
    """Fill each sequence with several documents, kept apart (best fit). Usually several times faster on short texts."""
    val_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the training split to hold out for evaluation where there is no validation split."""
    streaming: bool = False
    """Read the set as a stream, for sets larger than memory."""
    prompt_field: Text | None = None
    """Column with the prompt; needs `completion_field`."""
    completion_field: Text | None = None
    """Column with the text to learn after the prompt; needs `prompt_field`."""
    messages_field: Text | None = None
    """Column with chats: lists of {role, content}, put through the tokenizer's chat template."""
    completion_only_loss: bool | None = None
    """Learn from completions and assistant turns alone. null: yes where the data have a prompt."""

    @model_validator(mode="before")
    @classmethod
    def _held_out(cls, section: Any) -> Any:
        """A held-out share replaces the validation split that nobody named."""
        if isinstance(section, dict) and section.get("val_fraction") is not None and "val_split" not in section:
            return {**section, "val_split": None}
        return section


Action = Literal["off", "warn", "checkpoint", "stop"]
"""On an alarm: look away, say it, say it and save a checkpoint, or end the run with an error."""


class Watch(Section):
    """What is looked for while the run trains, and what happens when it is found."""

    non_finite: Literal["stop", "skip"] = "stop"
    """On a loss or gradient norm that is not finite: stop the run, or skip that step and say so."""
    min_supervised_fraction: Share = 0.0
    """Least share of tokens that must be learnt from. A set with none at all is an error whatever this says."""
    loss_divergence: Action = "warn"
    """The median loss of 5 steps is `deviations` above the lowest median of 50, and 10 % above it."""
    gradient_spike: Action = "warn"
    """A gradient norm is `gradient_factor` times the median of 50 steps, and `deviations` above it; names the rows."""
    straggler: Action = "warn"
    """In one phase a rank takes longer than the others, by `straggler_share` of the step; median of 20 steps."""
    memory_growth: Action = "warn"
    """Memory grows steadily, and would exceed `memory_fraction` of what there is before the run ends."""
    memory_imbalance: Action = "warn"
    """A rank holds `memory_ratio` times what the others hold, and 5 % of the memory more."""
    stall: Literal["off", "warn", "stop"] = "warn"
    """No progress for `stall_seconds`: stacks of all ranks, and who is absent from which collective."""
    throughput: Action = "warn"
    """Over 10 steps the speed is below `throughput_fraction` of its median."""
    throttling: Action = "warn"
    """A GPU holds its clock down for heat or supply in half of the samples."""
    sockets: Action = "warn"
    """NCCL goes over sockets although `cluster.network` is InfiniBand."""
    eval_loss: Action = "warn"
    """`eval_patience` evaluations in a row are above the best one and do not fall."""
    dead_experts: Action = "warn"
    """In three looks in a row, a layer has experts that no token chose on any rank."""
    deviations: Annotated[Number, Field(gt=0)] = 8
    """Distance from the median that counts, in standard deviations estimated from the median absolute deviation."""
    gradient_factor: Annotated[Number, Field(gt=1)] = 5
    """Multiple of the median gradient norm that is a spike."""
    straggler_share: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Share of a step by which a straggler is late."""
    memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.95
    """Share of the GPU's memory, or of the host's without one, that growth may reach."""
    memory_ratio: Annotated[Number, Field(gt=1)] = 1.3
    """Multiple of the other ranks' memory that is an imbalance."""
    throughput_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of the median speed below which it has fallen."""
    eval_patience: Annotated[Count, Field(ge=2)] = 3
    """Evaluations in a row that must be worse than the best."""
    stall_seconds: Annotated[Number, Field(gt=0)] | None = None
    """Time without progress that is a stall; null: half of train.ddp_timeout, and never more than that."""
    prometheus_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port of rank 0 that serves each rank's latest step as /metrics; null: none."""
    prometheus_address: Text = "127.0.0.1"
    """Address it is served on: this machine's own unless told otherwise, such as 0.0.0.0."""


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


class RunFile(Section):
    """One run: the model, the adapter, the data, the training, and the machines it runs on."""

    kind: Literal["lora"] = "lora"
    """What is run: the adapter of a language model (lora), or any PyTorch script (script), with other sections."""
    name: RunName | None = None
    """Name of the run and of the job that is submitted. Default: made from train.output_dir."""
    model: Model = Field(default_factory=Model)
    """Which model is adapted, and how it is computed."""
    lora: Lora = Field(default_factory=Lora)
    """The adapter: PEFT's names and meanings."""
    data: Data = Field(default_factory=Data)
    """What it learns from, and how text becomes tokens."""
    train: Train = Field(default_factory=Train)
    """The training: the names of transformers' and TRL's arguments."""
    layout: Annotated[LayoutSection, BeforeValidator(_named)] = Field(default_factory=LayoutSection)
    """How the run is spread over ranks: a name (`auto` by default), or a section."""
    cluster: Cluster = Field(default_factory=Cluster)
    """The machines: how many, which GPUs and fabrics, and how a job gets onto them."""
    watch: Watch = Field(default_factory=Watch)
    """What is looked for while the run trains, and what happens when it is found."""

    folder_key: ClassVar[str] = "train.output_dir"

    @property
    def folder(self) -> str:
        """The run folder."""
        return self.train.output_dir

    @property
    def masked(self) -> bool:
        """Whether a mask keeps packed documents apart; flash and flex attention take them one by one."""
        attention = self.model.attn_implementation or "sdpa"
        return self.data.packing and not ("flash" in attention or attention == "flex_attention")

    @property
    def workers(self) -> int:
        """Processes per rank that prepare batches."""
        return self.train.dataloader_num_workers

    @property
    def ranks(self) -> int:
        """Processes of the run, one per GPU: what `layout.ranks` demands, else what the cluster has."""
        return self.layout.ranks or self.cluster.nodes * self.cluster.gpus_per_node
