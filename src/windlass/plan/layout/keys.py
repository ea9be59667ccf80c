"""Every key of an Accelerate file and its fate. Checked against Accelerate 1.15's configuration classes."""

from __future__ import annotations

from windlass.plan.layout.fate import ANY, AS_READ, NO_EFFECT, Fate, Key, honoured, no_effect, refused, translated
from windlass.plan.layout.fsdp_keys import FSDP_KEYS

_LAUNCHER = "the platform says it, or the command that starts the ranks; the plan is the same for every value"
_SPREAD = Fate(
    NO_EFFECT,
    "it only starts ranks; how the model is spread over them is `layout` in the run file",
    (("sharded", False),),
)
_DEVICE = refused("windlass trains on NVIDIA GPUs, or on the CPU", "write FSDP")
_TPU = no_effect("read only for TPUs, which windlass does not train on")
_SAGEMAKER = no_effect("read only by Amazon SageMaker, which windlass does not launch on")
_FP8 = no_effect("read only with mixed_precision: fp8, which windlass refuses")
_COMPILE = no_effect("read only when a dynamo backend is named; windlass compiles nothing")
_FP16 = refused("float16 overflows now and then, and here such a step ends a run", "write mixed_precision: bf16")
_NOT_HERE = "tensors stay whole inside a layer: neither tensor, context nor sequence parallelism is run"


def _top(name: str, about: str, kind: str, fates: dict[str, Fate]) -> Key:
    return Key(name, about, kind, fates)


def _section(name: str, about: str) -> Key:
    return Key(name, about, "section", {ANY: honoured("read key by key")})


RUNS: tuple[Key, ...] = (
    _top(
        "distributed_type",
        "what spreads the run over processes",
        "word",
        {
            "FSDP": honoured("the model is sharded, by the one engine that windlass has", sharded=True),
            "MULTI_GPU": _SPREAD,
            "MULTI_CPU": _SPREAD,
            "NO": honoured("one process, one GPU", ranks=1, sharded=False),
            "DEEPSPEED": refused("DeepSpeed is not run: its ZeRO stages have an equal in `layout`", ""),
            "MEGATRON_LM": refused("Megatron-LM is not run", "write FSDP, or layout: expert-parallel in the run file"),
            "TP": refused(_NOT_HERE, "write FSDP"),
            **dict.fromkeys(("XLA", "TPU"), refused("TPUs are not supported", "write FSDP and train on GPUs")),
            **{f"MULTI_{device}": _DEVICE for device in ("MLU", "SDAA", "MUSA", "NPU", "XPU", "HPU", "NEURON")},
        },
    ),
    _top("num_machines", "nodes", "int", {ANY: honoured("compared with cluster.nodes", nodes=AS_READ)}),
    _top(
        "num_processes",
        "ranks of all nodes together",
        "int",
        {
            "-1": no_effect("-1 leaves the number to the launcher's command line"),
            ANY: honoured("compared with cluster.nodes x cluster.gpus_per_node", ranks=AS_READ),
        },
    ),
    _top(
        "mixed_precision",
        "dtype that compute runs in",
        "word",
        {
            "BF16": honoured("compared with train.bf16", precision="bf16"),
            "FP16": _FP16,
            "NO": honoured("compute stays in the dtype of the weights", precision="no"),
            "FP8": refused("compute in FP8 is not run", "write bf16; FP8 weights are read, and computed with in BF16"),
        },
    ),
    _top(
        "fp16",
        "an old name of mixed_precision: fp16",
        "bool",
        {"TRUE": _FP16, "FALSE": no_effect("mixed_precision says it")},
    ),
    _top(
        "use_cpu",
        "train on the CPU",
        "bool",
        {
            "TRUE": honoured(
                "cluster.gpu must be cpu then; the same engine shards over gloo, where Accelerate would run plain data "
                "parallelism, unsharded",
                cpu=True,
            ),
            "FALSE": honoured("GPUs are used where there are any", cpu=False),
        },
    ),
    _top(
        "compute_environment",
        "where the ranks run",
        "word",
        {
            "LOCAL_MACHINE": no_effect("where the ranks run is cluster.platform"),
            "AMAZON_SAGEMAKER": refused("SageMaker is not launched on", "write LOCAL_MACHINE"),
        },
    ),
    _top("machine_rank", "this node's number", "int", {ANY: no_effect(_LAUNCHER)}),
    _top("main_process_ip", "address of node 0", "text", {ANY: no_effect(_LAUNCHER)}),
    _top("main_process_port", "port on node 0 where ranks meet", "int", {ANY: no_effect(_LAUNCHER)}),
    _top(
        "rdzv_backend",
        "how ranks find each other",
        "text",
        {
            "STATIC": honoured("ranks are told their master and number, as windlass starts them"),
            ANY: no_effect("windlass starts ranks with the static way: the platform gives master and number"),
        },
    ),
    _top(
        "same_network",
        "whether nodes reach node 0 by its address",
        "bool",
        {ANY: no_effect("it picks between two spellings of node 0's address; the static way needs the address alone")},
    ),
    _top("gpu_ids", "GPUs of this node that are used", "text", {ANY: no_effect(_LAUNCHER)}),
    _top(
        "debug",
        "Accelerate compares tensor shapes before its own collectives",
        "bool",
        {ANY: no_effect("the engine's collectives are torch's, not Accelerate's; see TORCH_DISTRIBUTED_DEBUG")},
    ),
    _top(
        "enable_cpu_affinity",
        "bind each process to the CPU cores near its GPU",
        "bool",
        {"FALSE": no_effect("it is off anyway"), "TRUE": no_effect(_LAUNCHER)},
    ),
    _top(
        "main_training_function",
        "name of the function that a notebook or TPU starts",
        "text",
        {ANY: no_effect("windlass starts its own")},
    ),
    _top("downcast_bf16", "TPUs: cast doubles to bfloat16", "bool", {ANY: _TPU}),
    _top(
        "dynamo_backend",
        "an old place of dynamo_config.dynamo_backend",
        "word",
        {
            "NO": no_effect("windlass compiles nothing"),
            ANY: refused(
                "compiling is untested with sharded weights and adapters", "write dynamo_backend: NO, or take it out"
            ),
        },
    ),
    _section("fsdp_config", "how FSDP shards"),
    _section("parallelism_config", "sizes of the mesh of ranks"),
    _section("dynamo_config", "torch.compile"),
    _section("fp8_config", "compute in FP8"),
    _section("deepspeed_config", "DeepSpeed"),
    _section("megatron_lm_config", "Megatron-LM"),
    _section("mpirun_config", "ranks started by mpirun"),
)

TPU_KEYS = tuple(
    _top(name, "TPUs", kind, {ANY: _TPU})
    for name, kind in {
        "tpu_name": "text",
        "tpu_zone": "text",
        "tpu_use_cluster": "bool",
        "tpu_use_sudo": "bool",
        "command_file": "text",
        "commands": "any",
        "tpu_vm": "any",
        "tpu_env": "any",
    }.items()
)

SAGEMAKER_KEYS = tuple(
    _top(name, "Amazon SageMaker", "any", {ANY: _SAGEMAKER})
    for name in (
        "ec2_instance_type",
        "iam_role_name",
        "image_uri",
        "profile",
        "region",
        "base_job_name",
        "pytorch_version",
        "transformers_version",
        "py_version",
        "sagemaker_inputs_file",
        "sagemaker_metrics_file",
        "additional_args",
    )
)


def _mesh(name: str, about: str, kind: str, fates: dict[str, Fate]) -> Key:
    return Key(f"parallelism_config_{name}", about, kind, fates, "parallelism_config")


_ONE = {"1": no_effect("1 is none"), ANY: refused(_NOT_HERE, "write 1; layout: expert-parallel splits experts instead")}
_UNUSED = {ANY: no_effect(f"it has no meaning here: {_NOT_HERE}")}
MESH_KEYS = (
    _mesh("dp_replicate_size", "replicas", "int", {ANY: translated("layout.replicate", replicate=AS_READ)}),
    _mesh(
        "dp_shard_size",
        "ranks that one replica is sharded over",
        "int",
        {ANY: translated("layout.shard", shard=AS_READ)},
    ),
    _mesh("tp_size", "tensor parallelism", "int", _ONE),
    _mesh("cp_size", "context parallelism", "int", _ONE),
    _mesh("sp_size", "sequence parallelism", "int", _ONE),
    *(
        _mesh(name, "context or sequence parallelism", "any", _UNUSED)
        for name in (
            "cp_backend",
            "cp_comm_strategy",
            "sp_backend",
            "sp_seq_length",
            "sp_seq_length_is_variable",
            "sp_attn_implementation",
        )
    ),
)

DYNAMO_KEYS = (
    Key(
        "dynamo_backend",
        "compiler behind torch.compile",
        "word",
        {
            "NO": no_effect("windlass compiles nothing"),
            ANY: refused(
                "compiling is untested with sharded weights and adapters", "write dynamo_backend: NO, or take it out"
            ),
        },
        "dynamo_config",
        ("backend",),
    ),
    *(
        Key(f"dynamo_{name}", "torch.compile", "any", {ANY: _COMPILE}, "dynamo_config", (name,))
        for name in ("mode", "use_fullgraph", "use_dynamic", "use_regional_compilation")
    ),
)

FP8_KEYS = tuple(
    Key(f"fp8_{name}", "compute in FP8", "any", {ANY: _FP8}, "fp8_config", (name, *others))
    for name, *others in (
        ("backend",),
        ("use_autocast_during_eval",),
        ("margin",),
        ("interval",),
        ("format", "fp8_fp8_format"),
        ("amax_history_len", "amax_history_length", "fp8_amax_history_length"),
        ("amax_compute_algo", "amax_compute_algorithm", "fp8_amax_compute_algorithm"),
        ("override_linear_precision",),
        ("opt_level", "optimization_level", "fp8_optimization_level"),
        ("enable_fsdp_float8_all_gather",),
        ("pad_inner_dim",),
    )
)

# What each DeepSpeed setting is called here: all of them fall away with DeepSpeed, none of them is misspelt.
_DEEPSPEED = {
    "zero_stage": "3 is layout full-shard; 0, 1 and 2 are layout resident: the adapter's own states are small",
    "offload_param_device": "cpu is layout.offload: true, which moves the frozen base; nvme has no equal",
    "offload_optimizer_device": "nothing: the adapter's optimizer is small and stays on the GPU; layout.offload moves "
    "the frozen base",
    "offload_param_nvme_path": "nothing: NVMe is not offloaded to",
    "offload_optimizer_nvme_path": "nothing: NVMe is not offloaded to",
    "gradient_accumulation_steps": "train.gradient_accumulation_steps",
    "gradient_clipping": "train.max_grad_norm",
    "zero3_init_flag": "nothing: every rank reads its own shard",
    "zero3_save_16bit_model": "nothing: the adapter is written whole; `windlass export` merges it",
    "deepspeed_config_file": "the run file",
    "deepspeed_hostfile": "cluster",
    "deepspeed_exclusion_filter": "cluster",
    "deepspeed_inclusion_filter": "cluster",
    "deepspeed_multinode_launcher": "cluster.platform",
    "deepspeed_moe_layer_cls_names": "nothing: windlass knows the layers of each model family",
}
DEEPSPEED_KEYS = tuple(
    Key(
        name,
        "DeepSpeed",
        "any",
        {ANY: no_effect(f"read only by DeepSpeed, which windlass does not run. Its equal: {equal}")},
        "deepspeed_config",
    )
    for name, equal in _DEEPSPEED.items()
)

# Sections whose keys are all alike: `*` stands for the rest of the name.
OPEN_KEYS = (
    Key(
        "megatron_lm_*",
        "Megatron-LM",
        "any",
        {ANY: no_effect("read only by Megatron-LM, which windlass does not run")},
        "megatron_lm_config",
    ),
    Key(
        "mpirun_*",
        "ranks started by mpirun",
        "any",
        {ANY: no_effect("windlass starts the ranks itself, never with mpirun")},
        "mpirun_config",
    ),
)

KEYS: tuple[Key, ...] = (
    *RUNS,
    *FSDP_KEYS,
    *MESH_KEYS,
    *DYNAMO_KEYS,
    *FP8_KEYS,
    *DEEPSPEED_KEYS,
    *OPEN_KEYS,
    *TPU_KEYS,
    *SAGEMAKER_KEYS,
)

# By section, then by every spelling.
FATES: dict[str, dict[str, Key]] = {}
for _key in KEYS:
    for _name in (_key.name, *_key.spellings):
        FATES.setdefault(_key.section, {})[_name] = _key


def find(section: str, name: str) -> Key | None:
    """The key of that name in that section."""
    names = FATES.get(section, {})
    if name in names:
        return names[name]
    return next((key for key in OPEN_KEYS if key.section == section and name.startswith(key.name[:-1])), None)
