"""The run file's sections. Names and defaults in `model`, `lora`, `data` and `train` are those of the recipe in
examples/mistral-small-4; the docstring under a key is what `windlass explain` prints."""

from __future__ import annotations

import math
import re
import warnings
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator

from windlass.runfile.machines import Cluster, LayoutSection, Ranks
from windlass.runfile.objectives import OBJECTIVES, Dpo, Objective, ObjectiveName, Orpo
from windlass.runfile.rows import Data
from windlass.runfile.values import (
    Auto,
    Count,
    LooseText,
    Natural,
    Number,
    Positive,
    Section,
    Share,
    Text,
    match_pattern,
)

# The name of a run becomes the name of a job, and a JobSet's pods append `-node-0-99-abcde` to that: 63 - 16.
RUN_NAME_LETTERS = 47
RunName = Annotated[
    str,
    match_pattern(
        rf"[a-z]([-a-z0-9]{{0,{RUN_NAME_LETTERS - 2}}}[a-z0-9])?",
        f"at most {RUN_NAME_LETTERS} lower-case letters, digits and dashes, starting with a letter, no dash last",
    ),
]


class Model(Section):
    """The base model."""

    model_name_or_path: Text = "/data/input/Models/Mistral-Small-4-119B-2603"
    """Folder of the checkpoint (config.json and safetensors). `plan` alone also accepts a known model's name."""
    torch_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Dtype of the base weights once loaded. float32 takes twice the memory; bfloat16 rounds weights published in
    float32."""
    device_map: str | dict[str, str | int] | None = "auto"
    """Only `auto` or null with more than one GPU: windlass places the model itself."""
    use_cache: bool = False
    """Keep keys and values during the forward pass. Training has no use for it."""
    attn_implementation: Text | None = None
    """eager, sdpa, flash_attention_2, flash_attention_3, flex_attention or a Hub kernel; null: the model's default.
    flash and flex attention are faster on packed rows: they skip what a row's documents don't see of each other."""
    trust_remote_code: bool = False
    """Run Python code that comes with the checkpoint, with your rights."""


class ExpertLora(Section):
    """Low-rank adapters on the routed experts."""

    r: Count
    """Rank per expert. Default: `lora.r`."""
    lora_alpha: Annotated[Number, Field(gt=0)]
    """Scaling numerator. Default: keeps the ratio lora_alpha / r of the other adapters."""
    targets: Annotated[list[Text], Field(min_length=1)] = Field(default=["gate_up_proj", "down_proj"])
    """Fused expert parameters to adapt, by the last part of their name."""


def _check_targets(value: list[str] | str) -> list[str] | str:
    if isinstance(value, list):
        if twice := sorted({name for name in value if value.count(name) > 1}):
            raise ValueError(f"lists {', '.join(twice)} more than once")
    elif value not in ("all", "all-linear"):
        try:
            _check_pattern(value)
        except ValueError as error:
            raise ValueError(f"is neither `all`, `all-linear` nor a regular expression: {error}") from error
    return value


def _check_pattern(value: str) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a doubtful pattern is still a valid one
            re.compile(value)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(str(error)) from error
    return value


Pattern = Annotated[Text, AfterValidator(_check_pattern)]


class Lora(Section):
    """The adapter, in PEFT's terms."""

    r: Count = 16
    """Rank: each adapted weight W (out x in) becomes W + scale * B A, with A (r x in) and B (out x r) trained. Capacity
    and the number of trained parameters grow in proportion to it. Each trained parameter takes 16 bytes of memory."""
    lora_alpha: Annotated[Number, Field(gt=0)] = 32
    """Scale of the adapter's update: lora_alpha / r, or lora_alpha / sqrt(r) with use_rslora. Doubling it is much like
    doubling the learning rate."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Dropout on the adapter's input during training, also for routed experts. Less overfitting on few rows; above 0 it
    takes memory and time for masks."""
    target_modules: Annotated[Annotated[list[Text], Field(min_length=1)] | Text, AfterValidator(_check_targets)] = (
        Field(default=["q_proj", "k_proj", "v_proj", "o_proj"])
    )
    """Modules to adapt: names, `all`, `all-linear`, or one regular expression over full names. Each must match.
    all-linear learns more than attention alone."""
    rank_pattern: dict[Pattern, Count] = Field(default={})
    """Modules with a rank of their own, by name or regular expression, as in PEFT: {"layers.(0|1).*q_proj": 32}."""
    alpha_pattern: dict[Pattern, Annotated[Number, Field(gt=0)]] = Field(default={})
    """Modules with a lora_alpha of their own, in the same way."""
    layers_to_transform: Annotated[list[Natural], Field(min_length=1)] | Natural | None = None
    """Only adapt these layers, counted from 0. null: all."""
    bias: Literal["none", "all", "lora_only"] = "none"
    """Also train the base model's bias vectors: none, all, or those of adapted modules. A merged model then has other
    biases than the base, and few serving engines take the adapter unmerged."""
    task_type: Literal["CAUSAL_LM"] = "CAUSAL_LM"
    """windlass trains causal language models."""
    use_rslora: bool = False
    """Scale by lora_alpha / sqrt(r), which keeps large ranks stable."""
    use_dora: bool = False
    """Train magnitude and direction separately (DoRA). Not for routed experts. Slower: it needs the norm of every
    adapted weight in each micro-batch. At times better with a small r."""
    init_lora_weights: bool | Literal["gaussian", "pissa", "pissa_niter_4", "pissa_niter_16", "olora"] = True
    """true: A random, B zero; gaussian: A normal; pissa: the weight's largest singular values, found much faster with
    _niter_4 or _niter_16; olora: its QR decomposition. All begin as the base model. With pissa and olora the saved
    adapter has twice the rank and works on the unchanged base. false: both random (for tests)."""
    modules_to_save: list[Text] | None = None
    """Also train these in full and save them with the adapter: the embedding and the head, [embed_tokens, lm_head]. For
    new tokens or another language. Takes 16 bytes of memory a parameter, sharded as the base is, and 8 unsharded while
    a step runs."""
    adapter: Text | None = None
    """Folder of an existing PEFT adapter to continue from. It decides r, lora_alpha, targets and the like, so leave
    them out; lora_dropout, dtype and the optimizer are this run's."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the adapter's weights and of the optimizer's state. bfloat16 halves their memory but loses small
    updates."""
    experts: ExpertLora | None = None
    """Also adapt the routed experts: true for the same r, or a section with r, lora_alpha and targets. They are most
    of an adapter's size, and reach most of a mixture's weights."""

    @property
    def trains_base(self) -> bool:
        """Whether parameters of the base are trained beside the adapter."""
        return bool(self.modules_to_save) or self.bias != "none"

    @property
    def starts_from_weights(self) -> bool:
        """Whether an adapter starts as a part of its base weight."""
        return str(self.init_lora_weights).startswith(("pissa", "olora"))

    @property
    def stored(self) -> Lora:
        """As adapters are built and saved: those that start as a part of their weights have a fixed half, too."""
        if not self.starts_from_weights:
            return self
        more = math.sqrt(2) if self.use_rslora else 2  # so that the scale stays
        ranks = {"r": 2 * self.r, "rank_pattern": {name: 2 * r for name, r in self.rank_pattern.items()}}
        alphas = {name: more * alpha for name, alpha in self.alpha_pattern.items()}
        return self.model_copy(update={**ranks, "lora_alpha": more * self.lora_alpha, "alpha_pattern": alphas})

    @model_validator(mode="before")
    @classmethod
    def _no_default_dropout(cls, section: Any) -> Any:
        """Dropout would also drop what takes the part of the weight away."""
        if isinstance(section, dict) and str(section.get("init_lora_weights")).startswith(("pissa", "olora")):
            return {"lora_dropout": 0.0, **section}
        return section

    @model_validator(mode="before")
    @classmethod
    def _fill_experts(cls, section: Any) -> Any:
        """`experts: true` and partly given experts take rank and ratio from the other adapters."""
        if not isinstance(section, dict) or not isinstance(experts := section.get("experts"), bool | dict):
            return section
        given = experts if isinstance(experts, dict) else {}
        r = section.get("r", 16)
        alpha = section.get("lora_alpha", 32)
        numbers: tuple[Any, ...] = (r, alpha, given.get("r", r))
        if all(type(number) in (int, float) and 0 < number < 1e9 for number in numbers):
            scaled = alpha * given.get("r", r) / r
            filled = {"r": r, "lora_alpha": int(scaled) if scaled.is_integer() else scaled}
        else:  # reported by their own fields; any valid value does here
            filled = {"r": 1, "lora_alpha": 1}
        return {**section, "experts": None if experts is False else {**filled, **given}}


def _false_as_no(value: Any) -> Any:
    """A bare `no` is false to YAML 1.1."""
    return "no" if value is False else value


When = Annotated[
    Literal["no", "steps", "epoch"],
    BeforeValidator(_false_as_no, json_schema_input_type=Literal["no", "steps", "epoch", False]),
]
WhenOrAuto = Annotated[
    Literal["no", "steps", "epoch", "auto"],
    BeforeValidator(_false_as_no, json_schema_input_type=Literal["no", "steps", "epoch", "auto", False]),
]


class SampleSection(Section):
    """Prompts that the model continues at evaluations, greedily, into samples.jsonl and the report."""

    prompts: Annotated[list[Text], Field(min_length=1)] | None = None
    """The prompts; or set `file` or `from_eval`."""
    file: Text | None = None
    """File with one prompt per line: text, or JSON with a `prompt`."""
    from_eval: Count | None = None
    """Number of validation rows to use as prompts, up to where the loss begins, or their first half."""
    chat: bool = False
    """Write each prompt as a user's turn, by the chat template."""
    every: Count = 1
    """Continue the prompts at every Nth evaluation."""
    max_new_tokens: Count = 64
    """Longest continuation in tokens."""
    max_seconds: Positive = 60.0
    """Time after which the continuations of an evaluation are cut off."""


class Train(Section):
    """The training, in the terms of transformers' TrainingArguments."""

    objective: ObjectiveName = "sft"
    """What is minimized. sft: the next-token loss; dpo and orpo: losses of pairs of a chosen and a rejected answer,
    each with a section of its own."""
    output_dir: Text = "/data/output/Models/mistral4small-lora-fsdp"
    """The run folder: everything that the run writes goes there. Keep it on a volume that outlives the job."""
    num_train_epochs: Positive | Auto = "auto"
    """Passes over the training data; may be a fraction. auto: 1; up to 3 if one has fewer than 50 optimizer steps, and
    neither max_steps nor a batch size is set. Few rows are learned by heart in more than three."""
    max_steps: Count | Literal[-1] = -1
    """Optimizer steps to train for, overriding num_train_epochs; -1: by epochs."""
    per_device_train_batch_size: Count | Auto | None = None
    """Sequences (with dpo and orpo: pairs) per GPU in one micro-batch. auto: the plan picks the fastest that fits and
    keeps the sequences per optimizer step. null: 1 if gradient_accumulation_steps is a number, else as auto. Larger
    takes more memory for activations and keeps a GPU busier."""
    per_device_eval_batch_size: Count = 1
    """Sequences, or pairs, per GPU in one evaluation batch."""
    gradient_accumulation_steps: Count | Auto = "auto"
    """Micro-batches per optimizer step. auto: computed from global_batch_size; 16 if that isn't set either. More of
    them take no more memory and reduce gradients less often."""
    global_batch_size: Count | None = None
    """Sequences, or pairs, per optimizer step over all GPUs; gradient_accumulation_steps is computed from it. Larger
    means fewer, steadier steps; fewer than 50 steps hardly train."""
    gradient_checkpointing: bool | Literal["selective", "auto"] = "auto"
    """Recompute activations in backward instead of storing them: far less memory, about a third more compute.
    selective: keep the products of routed experts and the tokens sent to them. auto: only if the run doesn't fit
    otherwise."""
    offload_activations: bool | Auto = "auto"
    """Keep the inputs of recomputed layers in host memory until their backward: longer rows fit, a GPU then has two of
    them. auto: only if the run doesn't fit otherwise."""
    compile: bool = False
    """Compile the layers with torch.compile: fewer, larger kernels after minutes of compiling. Checked on the first
    micro-batch: layers that fail the check run eagerly, and the reason is printed. The plan doesn't estimate the
    gain."""
    optim: Text = "adamw_torch"
    """Optimizer, by transformers' name. 8-bit ones take 2 bytes of memory a trained parameter instead of 8."""
    learning_rate: Positive = 1e-4
    """Peak learning rate. 1e-4 to 3e-4 is usual for LoRA: too high diverges or forgets, too low learns nothing. About
    1e-5 with dpo and orpo, ten times TRL's 1e-6 for whole models: at a higher one both answers become unlikely."""
    lr_scheduler_type: Text = "cosine"
    """Learning rate schedule, by transformers' name. cosine and linear end near 0."""
    lr_scheduler_kwargs: dict[str, int | float | str | bool] | None = None
    """Further arguments of the schedule, such as min_lr for cosine_with_min_lr."""
    warmup_ratio: Share = 0.05
    """Share of all steps in which the learning rate rises from 0 to its peak; 0 if warmup_steps is set. Without any the
    first steps may be too large."""
    warmup_steps: Natural | None = None
    """Steps in which the learning rate rises, instead of a share."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Weight decay of the adapter. It pulls the adapter towards zero, so the model towards the base."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Adam's decay rate of the first moment. Nearer to 1 averages more gradients into a step."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Adam's decay rate of the second moment. Nearer to 1 averages the step size over more steps."""
    adam_epsilon: Positive = 1e-8
    """Adam's term that prevents division by zero. Larger values damp steps of small gradients."""
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """Clip gradients to this norm; 0: never. If most steps are clipped, it rules the learning rate."""
    router_aux_loss_coef: Annotated[float, Field(ge=0)] | None = None
    """Weight of the router's balancing loss in a mixture of experts; 0: none. null: from config.json if that sets
    output_router_logits, else none. It evens out the experts' load, a little against the loss."""
    bf16: bool | Auto = "auto"
    """Compute in bfloat16. auto: as an Accelerate file's mixed_precision says, else true, but for float32 weights on a
    processor without instructions for it. Half the memory for activations and twice the arithmetic rate of float32,
    rounded to 3 digits."""
    fp16: bool = False
    """Must be false: float16 overflows, and windlass stops a run at a step that isn't finite."""
    neftune_noise_alpha: Positive | None = None
    """Scale of uniform noise on the input embeddings during training (NEFTune), often 5 to 15; null: none. Less
    overfitting on few instructions, at times worse on facts."""
    sample: SampleSection | None = None
    """Prompts that the model continues at evaluations, to read what it learns. Training is bit-equal without them."""
    logging_steps: Count = 25
    """Log every N optimizer steps."""
    eval_strategy: WhenOrAuto = "auto"
    """When to evaluate: never (no), every eval_steps (steps), or after each epoch. auto: as steps if the data have
    validation rows. Without evaluations no best checkpoint is known."""
    eval_steps: Count = 200
    """Evaluate every N optimizer steps."""
    eval_on_start: bool = False
    """Also evaluate, and continue the prompts of `sample`, before the first step: what the model does untrained."""
    save_strategy: When = "steps"
    """When to save a checkpoint: never (no), every save_steps (steps), or after each epoch. After a failure the run
    continues from the newest checkpoint."""
    save_steps: Count = 200
    """Save a checkpoint every N optimizer steps."""
    save_total_limit: Count | None = 3
    """Checkpoints to keep, the newest and the best; null: all."""
    load_best_model_at_end: bool = False
    """End with the adapter of the checkpoint with the lowest evaluation loss."""
    report_to: Annotated[
        Text | list[Text], BeforeValidator(lambda v: v or "none", json_schema_input_type=str | list[str] | None)
    ] = "none"
    """Experiment trackers such as wandb, by transformers' names."""
    run_name: Text | None = None
    """Name of the run in those trackers."""
    seed: Natural = 42
    """Seed of the adapter's initialization, dropout and the order of the data."""
    data_seed: Natural | None = None
    """Seed of the order of the data alone; null: `seed`."""
    dataloader_num_workers: Natural = 0
    """Processes per GPU that prepare batches. Worth it only if the report shows time in data."""
    dataloader_pin_memory: bool = True
    """Keep batches in page-locked host memory, from which GPUs copy faster."""
    ddp_find_unused_parameters: bool = False
    """Accepted without effect: windlass doesn't use DistributedDataParallel."""
    ddp_timeout: Count = 600
    """Seconds after which a hanging collective ends the run."""
    resume: Annotated[
        Literal["never", "auto"],
        BeforeValidator(
            lambda v: {True: "auto", False: "never"}[v] if isinstance(v, bool) else v,
            json_schema_input_type=Literal["never", "auto", True, False],
        ),
    ] = "never"
    """auto: resume from the newest complete checkpoint in output_dir; never: refuse a folder that has one."""

    @model_validator(mode="before")
    @classmethod
    def _one_warm_up(cls, section: Any) -> Any:
        """Steps replace the default share; 0 steps next to a given share are transformers' default."""
        if not isinstance(section, dict) or section.get("warmup_steps") is None:
            return section
        if "warmup_ratio" not in section:
            return {**section, "warmup_ratio": 0.0}
        return {**section, "warmup_steps": None} if section["warmup_steps"] == 0 else section

    @property
    def sides(self) -> int:
        """Sequences of a row: a pair has two."""
        return OBJECTIVES[self.objective].sides

    @property
    def unit(self) -> str:
        """What the batch sizes count."""
        return OBJECTIVES[self.objective].unit

    @property
    def least_batch(self) -> int:
        """per_device_train_batch_size, or the smallest that the plan may choose."""
        return self.per_device_train_batch_size if isinstance(self.per_device_train_batch_size, int) else 1

    @property
    def plan_cuts_batches(self) -> bool:
        """Whether the plan chooses how an optimizer step is cut into micro-batches."""
        if self.per_device_train_batch_size is None:
            return self.gradient_accumulation_steps == "auto"
        return self.per_device_train_batch_size == "auto"

    @property
    def micro_batches(self) -> int:
        """gradient_accumulation_steps, or what it is if neither that nor global_batch_size is set."""
        return 16 if self.gradient_accumulation_steps == "auto" else self.gradient_accumulation_steps

    @property
    def sets_batch(self) -> bool:
        """Whether any key says how many sequences an optimizer step has."""
        cut = self.per_device_train_batch_size is not None or self.gradient_accumulation_steps != "auto"
        return cut or self.global_batch_size is not None

    @property
    def evaluation(self) -> Literal["no", "steps", "epoch"]:
        """eval_strategy, where auto is steps; without validation rows nothing is evaluated."""
        return "steps" if self.eval_strategy == "auto" else self.eval_strategy

    @property
    def epochs(self) -> float:
        """num_train_epochs, once chosen."""
        assert self.num_train_epochs != "auto"
        return self.num_train_epochs

    @property
    def in_bf16(self) -> bool:
        """bf16, once chosen."""
        assert self.bf16 != "auto"
        return self.bf16

    @property
    def keeps_products(self) -> bool:
        """Of routed experts, where the rest of a layer is computed again."""
        return self.gradient_checkpointing == "selective"

    @property
    def order_seed(self) -> int:
        """Seed of the order of the data."""
        return self.seed if self.data_seed is None else self.data_seed

    def warmup(self, steps: int) -> int:
        """Warm-up steps of a run of so many; a share is rounded up, as transformers does."""
        return self.warmup_steps if self.warmup_steps is not None else math.ceil(self.warmup_ratio * steps)


Action = Literal["off", "warn", "checkpoint", "stop"]
"""On an alarm: ignore it, log it, log it and save a checkpoint, or end the run with an error."""


class Watch(Section):
    """Alarms while the run trains, and what to do about them."""

    non_finite: Literal["stop", "skip"] = "stop"
    """The loss or gradient norm is not finite: stop the run, or skip that step and log it."""
    min_supervised_fraction: Share = 0.0
    """Smallest share of tokens that loss is computed on. A data set with none is always an error."""
    loss_divergence: Action = "warn"
    """The loss rose by `deviations` and by 10 %, or to the level of the tokens' frequencies alone, or stays there."""
    falling_likelihood: Action = "warn"
    """With objective dpo: over 50 steps both answers of the pairs are less likely than before step 1, by a quarter of
    their log-probability, and the chosen one lost more than it gained on the other. They then make room for a third."""
    gradient_spike: Action = "warn"
    """A gradient norm is `gradient_factor` times the median of 50 steps, and `deviations` above it; names the rows."""
    dead_adapter: Action = "stop"
    """The gradient is exactly zero in 5 steps; or in 10 below 1 % of the first while the loss has not fallen, or the
    loss is that of guessing, or the same to 6 digits."""
    straggler: Action = "warn"
    """In one phase a rank takes longer than the others, by `straggler_share` of the step; median of 20 steps."""
    memory_growth: Action = "warn"
    """Memory grows steadily and would exceed `memory_fraction` of the total before the run ends."""
    memory_imbalance: Action = "warn"
    """A rank uses `memory_ratio` times the memory of the others, and at least 5 % of the total more."""
    stall: Literal["off", "warn", "stop"] = "warn"
    """No progress for `stall_seconds`: prints all ranks' stacks, and which rank is missing from which collective."""
    throughput: Action = "warn"
    """Over 10 steps the speed is below `throughput_fraction` of its median."""
    throttling: Action = "warn"
    """A GPU lowers its clock for heat or power in half of the samples."""
    sockets: Action = "warn"
    """NCCL uses sockets although `cluster.network` is InfiniBand."""
    eval_loss: Action = "warn"
    """`eval_patience` evaluations in a row are worse than the best one and don't improve."""
    kept_worse: Action = "warn"
    """The loss of a set of `data.keep` is above that of the base by more than `keep_tolerance`."""
    dead_experts: Action = "warn"
    """In three samples in a row, a layer has experts that no token was routed to on any rank."""
    deviations: Annotated[Number, Field(gt=0)] = 8
    """Distance from the median that counts, in standard deviations estimated from the median absolute deviation."""
    gradient_factor: Annotated[Number, Field(gt=1)] = 5
    """Multiple of the median gradient norm that is a spike."""
    straggler_share: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Share of a step by which a straggler is late."""
    memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.95
    """Share of the GPU's memory (without a GPU: the host's) that growth may reach."""
    memory_ratio: Annotated[Number, Field(gt=1)] = 1.3
    """Multiple of the other ranks' memory that is an imbalance."""
    throughput_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of the median speed that is too slow."""
    eval_patience: Annotated[Count, Field(ge=2)] = 3
    """Evaluations in a row that must be worse than the best."""
    keep_tolerance: Annotated[Number, Field(ge=0)] | None = None
    """By how much per token the loss of a kept set may exceed the base's; null: any, it is only reported."""
    stall_seconds: Annotated[Number, Field(gt=0)] | None = None
    """Seconds without progress that are a stall; null: half of train.ddp_timeout, which is also the most it can be."""
    prometheus_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port on rank 0 that serves each rank's latest step as /metrics; null: none."""
    prometheus_address: Text = "127.0.0.1"
    """Address to serve it on; 0.0.0.0 for all interfaces."""


class Export(Section):
    """Where the adapter will be used."""

    server: Literal["vllm", "sglang", "llama.cpp", "peft"] = "peft"
    """The server that will apply the adapter, also written `export.for`: `plan` warns if it doesn't apply every adapted
    module, and `export` writes the form that it reads."""


class Run(Section):
    """What both kinds of run have."""

    folder_key: ClassVar[str]

    name: RunName | None = None
    """Name of the run and of the submitted job. Default: made from the name of the run folder."""
    layout: Ranks = Field(default_factory=Ranks)
    """How many processes. How they share the work is up to the script."""
    cluster: Cluster = Field(default_factory=Cluster)
    """The machines, and how a job is submitted to them."""
    watch: Watch = Field(default_factory=Watch)
    """Alarms while the run trains, and what to do about them."""

    @property
    def ranks(self) -> int:
        """Processes of the run, one per GPU."""
        return self.layout.ranks or math.prod(self.cluster.size)


class Sweep(Section):
    """Keys of the run file with lists of values, and what a sweep does besides."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, list[Any]]

    trials: list[Any] = Field(default=[])
    """The trials one by one, as mappings of keys to values, instead of lists of values; `name` names one."""
    keep: Count | None = None
    """Successive halving, with `at`: how many trials train to their end."""
    at: list[Count] = Field(default=[])
    """Successive halving, with `keep`: steps with an evaluation. At each the better half of the trials goes on, though
    never fewer than `keep`; after the last of them, `keep` do."""
    together: Count | Auto = 1
    """How many trials train at a time, with their rows in one micro-batch for which the base computes once. 1: one
    after the other; auto: as many as the plan finds fastest."""


class RunFile(Run):
    """One run: the model, the adapter, the data, the training, and the machines it runs on."""

    folder_key = "train.output_dir"

    kind: Literal["lora"] = "lora"
    """What to run: lora trains a language model's adapter, script runs any PyTorch script and has other sections."""
    model: Model = Field(default_factory=Model)
    """The base model."""
    lora: Lora = Field(default_factory=Lora)
    """The adapter, in PEFT's terms."""
    data: Data = Field(default_factory=Data)
    """The data set, and how text becomes tokens."""
    train: Train = Field(default_factory=Train)
    """The training, in the terms of transformers' TrainingArguments."""
    layout: Annotated[LayoutSection, BeforeValidator(lambda v: {"name": v} if isinstance(v, str) else v)] = Field(
        default_factory=LayoutSection
    )
    """How the model is placed on the GPUs: a name (`auto` by default), or a section."""
    dpo: Dpo = Field(default_factory=Dpo)
    """Direct preference optimization, with train.objective: dpo. The reference is the model as it is before step 1, the
    base or with the adapter of lora.adapter: no second one is loaded. A learning rate for pairs is about 1e-5."""
    orpo: Orpo = Field(default_factory=Orpo)
    """Odds-ratio preference optimization, with train.objective: orpo. It has no reference, and needs no sft before."""
    export: Export = Field(default_factory=Export)
    """Where the adapter will be used."""
    sweep: Sweep = Field(default_factory=Sweep)
    """Several trials on one loaded base, one after the other: values of keys, of which every combination is a trial, or
    under `trials` a list of mappings. Each trial is a run in a folder below output_dir, and what it would be alone."""

    @model_validator(mode="after")
    def _tell_data(self) -> Self:
        """Rows are read without the other sections."""
        self.data._pairs = self.objective.of_pairs
        return self

    @property
    def objective(self) -> Objective:
        """What follows from train.objective."""
        return OBJECTIVES[self.train.objective]

    @property
    def readers(self) -> int:
        """Ranks, or groups of ranks that split rows, that read rows of their own."""
        return max(1, self.ranks // (self.layout.context_parallel or 1))

    @property
    def folder(self) -> str:
        return self.train.output_dir

    @property
    def workers(self) -> int:
        """Processes per rank that prepare batches."""
        return self.train.dataloader_num_workers

    @property
    def pads(self) -> bool:
        """Whether rows are padded: unpacked ones can be laid end to end if attention is computed per document, not over
        a square mask."""
        return not self.data.packs and "flash" not in (self.model.attn_implementation or "")

    @property
    def in_16_bits(self) -> bool:
        """Whether steps compute in 16 bits: by autocast, or because the weights are."""
        return self.train.in_bf16 or self.model.torch_dtype != "float32"

    @property
    def masked(self) -> bool:
        """Whether a mask separates packed documents; flash and flex attention separate them without one."""
        attention = self.model.attn_implementation or "sdpa"
        return self.data.packs and not ("flash" in attention or attention == "flex_attention")


class Script(Section):
    """The script that every rank runs, as torchrun would start it."""

    path: Text | None = None
    """Python file, relative to the folder that the run is started in; this or `module`."""
    module: Text | None = None
    """Python module, as `python -m` takes it; this or `path`."""
    args: list[LooseText] = Field(default=[])
    """Its arguments, word by word: [--epochs, 2]. No shell interprets them."""
    output_dir: Text = "run"
    """The run folder, which the ranks find in WINDLASS_OUTPUT_DIR."""
    workers: Natural = 0
    """Processes per rank that prepare batches; sets the CPUs and /dev/shm to request."""


class ScriptRun(Run):
    """One run of any PyTorch script that torchrun could start, on the same machines."""

    folder_key = "script.output_dir"

    kind: Literal["script"]
    """What to run: script runs any PyTorch script, lora trains a language model's adapter and has other sections."""
    script: Script = Field(default_factory=Script)
    """The script that every rank runs, as torchrun would start it."""

    @property
    def folder(self) -> str:
        return self.script.output_dir

    @property
    def workers(self) -> int:
        return self.script.workers

    @property
    def command(self) -> list[str]:
        """What follows the name of the interpreter."""
        script = self.script
        return [*(["-m", script.module] if script.module else [script.path or ""]), *script.args]
