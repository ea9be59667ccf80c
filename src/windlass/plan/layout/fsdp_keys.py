"""The keys of `fsdp_config`, FSDP1's and FSDP2's. Checked against Accelerate 1.15's launcher and plugin."""

from __future__ import annotations

from windlass.plan.layout.fate import ANY, AS_READ, Fate, Key, honoured, no_effect, refused, translated

_FULL = honoured(
    "layout full-shard: each layer is gathered, used and dropped", name="full-shard", reshard_after_forward=True
)
_GRAD = translated(
    "layout no-reshard: FSDP2 keeps the gathered weights from forward to backward", reshard_after_forward=False
)
_NONE = translated("layout resident: every rank holds the whole base", name="resident")
_HYBRID = translated(
    "layout hybrid: sharded inside a node, replicated across nodes", name="hybrid", reshard_after_forward=True
)
_HYBRID2 = translated("layout hybrid, without resharding after the forward", name="hybrid", reshard_after_forward=False)
# Accelerate takes the strategy's number too, counted from 1 in its own order.
STRATEGIES: dict[str, Fate] = {
    "FULL_SHARD": _FULL,
    "SHARD_GRAD_OP": _GRAD,
    "NO_SHARD": _NONE,
    "HYBRID_SHARD": _HYBRID,
    "HYBRID_SHARD_ZERO2": _HYBRID2,
    "1": _FULL,
    "2": _GRAD,
    "3": _NONE,
    "4": _HYBRID,
    "5": _HYBRID2,
}

_PREFETCH = no_effect(
    "FSDP2 gathers the next layer of the backward while the present one computes, always; the setting is FSDP1's"
)
_ORIG = no_effect(
    "FSDP2 never flattens parameters: they keep their shapes, so a LoRA adapter trains with or without it. "
    "FSDP1 needed it"
)
_SYNC = no_effect(
    "no rank broadcasts weights: each reads its own shard from the files. A frozen base is proven equal by the "
    "loader's certificate"
)
_WRITTEN_WHOLE = honoured("the adapter is written whole, by one rank")
_NOT_SHARDED = translated("a full one: only the adapter is saved, in one file, whoever trains parts of it")
_STATE_OFFLOAD = no_effect(
    "Accelerate reads no such key and already gathers a full state dict into host memory; "
    "windlass saves the adapter alone"
)


def _fsdp(name: str, about: str, kind: str, fates: dict[str, Fate]) -> Key:
    # Accelerate puts the prefix before a key of this section that lacks it.
    return Key(name, about, kind, fates, "fsdp_config", (name.removeprefix("fsdp_"),))


FSDP_KEYS: tuple[Key, ...] = (
    _fsdp(
        "fsdp_version",
        "which of torch's two implementations shards the model",
        "word",
        {
            "2": honoured("the engine is FSDP2"),
            "1": translated("FSDP2: the engine has no FSDP1; losses are the same, FSDP1's own settings fall away"),
        },
    ),
    _fsdp(
        "fsdp_sharding_strategy",
        "FSDP1's name for what is sharded; fsdp_reshard_after_forward has taken its place",
        "word",
        STRATEGIES,
    ),
    _fsdp(
        "fsdp_reshard_after_forward",
        "whether a layer's gathered weights are dropped after its forward",
        "word",
        {
            "TRUE": honoured("layout full-shard: gathered again for the backward", reshard_after_forward=True),
            "FALSE": honoured("layout no-reshard: gathered once, kept for the backward", reshard_after_forward=False),
            **{name: fate for name, fate in STRATEGIES.items() if not name.isdigit()},
        },
    ),
    _fsdp(
        "fsdp_offload_params",
        "where the shards rest: host memory instead of the GPU",
        "bool",
        {
            "TRUE": honoured(
                "the frozen base rests in host memory, and each layer of it crosses PCIe in every forward and "
                "backward; the adapter, its gradients and its optimizer stay on the GPU",
                offload=True,
            ),
            "FALSE": honoured("shards stay on the GPU", offload=False),
        },
    ),
    _fsdp(
        "fsdp_auto_wrap_policy",
        "how modules are grouped for gathering",
        "word",
        {
            "TRANSFORMER_BASED_WRAP": honoured("one group per decoder layer"),
            "SIZE_BASED_WRAP": translated("one group per decoder layer: by size, a layer could be cut anywhere"),
            "NO_WRAP": translated("one group per decoder layer: without groups the whole model is gathered at once"),
        },
    ),
    _fsdp(
        "fsdp_transformer_layer_cls_to_wrap",
        "class of the layer that is one group",
        "names",
        {ANY: honoured("compared with the model's own layer class; another name is an error", wrap=AS_READ)},
    ),
    _fsdp(
        "fsdp_min_num_params",
        "smallest group of SIZE_BASED_WRAP",
        "int",
        {ANY: no_effect("groups are decoder layers, whatever their size")},
    ),
    _fsdp(
        "fsdp_backward_prefetch",
        "FSDP1: when the backward gathers the next layer",
        "word",
        dict.fromkeys(("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH", "1", "2", "3"), _PREFETCH),
    ),
    _fsdp(
        "fsdp_forward_prefetch",
        "FSDP1: gather the next layer while the present one runs forward",
        "bool",
        {
            ANY: no_effect(
                "FSDP2 issues the next layer's gather from its own stream, so forward overlaps already; "
                "Accelerate has no such setting for FSDP2"
            )
        },
    ),
    _fsdp(
        "fsdp_limit_all_gathers",
        "FSDP1: hold the CPU back so that few gathers are in flight",
        "bool",
        {ANY: no_effect("a rate limit of FSDP1; FSDP2 frees memory without blocking the CPU, and Accelerate drops it")},
    ),
    _fsdp(
        "fsdp_use_orig_params",
        "FSDP1: keep original parameters instead of one flat tensor per group",
        "bool",
        {ANY: _ORIG},
    ),
    _fsdp("fsdp_sync_module_states", "FSDP1: broadcast rank 0's weights to the others", "bool", {ANY: _SYNC}),
    _fsdp(
        "fsdp_cpu_ram_efficient_loading",
        "only rank 0 reads the checkpoint, then broadcasts it",
        "bool",
        {
            "TRUE": translated(
                "windlass' shard-on-read loader: each rank reads its own shard, so no host ever holds the model; "
                "Accelerate's way saves nothing where loading converts the dtype (FP8 to BF16)"
            ),
            "FALSE": no_effect("no rank reads the whole model: each reads its own shard"),
        },
    ),
    _fsdp(
        "fsdp_state_dict_type",
        "how a checkpoint is written",
        "word",
        {
            "FULL_STATE_DICT": _WRITTEN_WHOLE,
            "SHARDED_STATE_DICT": _NOT_SHARDED,
            "LOCAL_STATE_DICT": refused("FSDP2 has no local state dict", "write FULL_STATE_DICT, or leave the key out"),
            "1": _WRITTEN_WHOLE,
            "2": refused("FSDP2 has no local state dict", "write FULL_STATE_DICT, or leave the key out"),
            "3": _NOT_SHARDED,
        },
    ),
    _fsdp(
        "fsdp_state_dict_cpu_offload",
        "gather the state dict into host memory",
        "bool",
        {ANY: _STATE_OFFLOAD},
    ),
    _fsdp(
        "fsdp_activation_checkpointing",
        "recompute each layer in the backward instead of keeping its activations",
        "bool",
        {
            "TRUE": translated("train.gradient_checkpointing: true", activation_checkpointing=True),
            "FALSE": no_effect("train.gradient_checkpointing alone decides"),
        },
    ),
    _fsdp(
        "fsdp_activation_checkpointing_offload",
        "keep each checkpointed layer's input in host memory",
        "bool",
        {
            "TRUE": refused(
                "the engine keeps the inputs of checkpointed layers on the GPU",
                "leave it out; smaller micro-batches or a shorter data.max_length save the same memory",
            ),
            "FALSE": no_effect("it is off anyway"),
        },
    ),
    _fsdp(
        "fsdp_ignored_modules",
        "modules that are not sharded",
        "text",
        {
            ANY: refused(
                "the loader certifies every weight in its place, sharded by the model's own plan",
                "leave the key out",
            )
        },
    ),
)
