"""Find settings that the model, the adapter or the machine does not support."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from windlass.data.select import find_no_rows
from windlass.errors import Problem, Where
from windlass.model import Base
from windlass.model.family import Family
from windlass.model.quantization import published_dtype, quantizable_names
from windlass.plan.layout import ELEMENTWISE, LAYOUTS, Layout, why_not_codes
from windlass.plan.rows import DataSample
from windlass.runfile import RunFile, Train
from windlass.runfile.names import ATTENTION
from windlass.settings import FOUR_BITS, PUBLISHED


def check_rows(sample: DataSample) -> list[Problem]:
    """Refuse training sets that are here and have no rows. Unknown counts are no problem: the rows may be elsewhere."""
    empty = [split.of for split in sample.train if split.rows.count == 0]
    return [problem for of in empty for problem in find_no_rows(of).problems]


def check_expert_settings(train: Train, base: Base, where: Where) -> Iterator[Problem]:
    """Yield a problem for each setting of routed experts that the model lacks or that is not supported."""
    place = where("train.gradient_checkpointing")
    if train.keeps_products and "experts" not in base.dims:
        text = f"{base.name} has no routed experts, whose products could be kept"
        yield Problem(text, place, "write true", "no-experts")
    elif train.keeps_products and train.compile:
        text = "compiled layers keep no products of experts"
        yield Problem(text, place, "write true, or train.compile: false", "compiled-products")
    if train.router_aux_loss_coef and "experts" not in base.dims:
        text = f"{base.name} has no routed experts, and so no balancing loss to weight"
        yield Problem(text, where("train.router_aux_loss_coef"), "leave it out", "no-experts")


def check_wrapped_layers(run: RunFile, family: Family, place: str) -> list[Problem]:
    wrap = run.layout.wrap or []
    classes = wrap.split(",") if isinstance(wrap, str) else wrap
    lacking = [name for name in map(str.strip, classes) if name and name not in family.layers]
    if not lacking:
        return []
    text = f"{family.causal_lm} has no layer class {', '.join(map(repr, lacking))}"
    hint = f"write {family.layer}, or leave the key out: windlass knows the layer of each model family"
    return [Problem(f"{text}; it is sharded by {family.layer!r}", place, hint, "no-such-layer")]


def check_family(run: RunFile, base: Base, where: Where) -> Iterator[Problem]:
    family = base.family
    yield from check_wrapped_layers(run, family, where("layout.wrap"))
    if family.logits is not True:
        text = f"the logits of {family.causal_lm} are not its head's product, which the loss is computed from"
        if family.logits is None:
            text = f"{family.causal_lm} could not be run as a tiny model, so it is unknown how its loss is computed"
        yield Problem(text, where("model.model_name_or_path"), "use a model of another family", "unsupported-loss")
    if run.data.packs and family.isolates is not True:
        seen = "attend to each other (tried)" if family.isolates is False else "may attend to each other"
        text = f"packed documents would {seen} in {family.causal_lm}: packing is refused for it"
        yield Problem(text, where("data.packing"), "set data.packing: false", "unsupported-packing")
    name = run.model.attn_implementation
    if name in ATTENTION and name not in family.attention:
        text = f"{family.causal_lm} does not take {name}"
        hint = f"leave it out, or write {' or '.join(family.attention)}"
        yield Problem(text, where("model.attn_implementation"), hint, "unsupported-attention")


@dataclass(frozen=True, slots=True)
class BaseDtypes:
    """Dtypes that the base can be stored in besides bfloat16. A reason is empty if there is none against it."""

    published: str  # the checkpoint's quantized dtype; empty if it isn't quantized
    why_not_kept: str  # why the base can't stay in that dtype
    why_not_four_bits: str  # why the base can't be quantized to 4 bits as it is loaded


def find_base_dtypes(run: RunFile, base: Base) -> BaseDtypes:
    published = published_dtype(base)
    form = f"the experts of {base.family.causal_lm} are of a form that windlass can't compute with in codes"
    why_not_kept = why_not_codes(run.lora)
    if not why_not_kept and not base.family.expert_adapters:
        why_not_kept = form
    why_not_four_bits = why_not_kept
    if not quantizable_names(base):
        why_not_four_bits = f"{base.name} has neither linears nor experts that windlass could quantize"
    elif published in FOUR_BITS:
        why_not_four_bits = f"{base.name} is published in {published.upper()}"
    elif any(parameter.transposed for parameter in base.parameters):
        why_not_four_bits = form
    return BaseDtypes(published, why_not_kept, why_not_four_bits)


def check_request(
    request: Layout, barred: Mapping[str, str], run: RunFile, base: Base, dtypes: BaseDtypes, gpu: str, where: Where
) -> Iterator[Problem]:
    """Yield a problem for each part of the requested layout that this GPU, model or adapter rules out."""
    if request.name in barred and request.ranks > 1:
        others = [other for other in LAYOUTS if other not in barred]
        yield Problem(barred[request.name], request.reason, f"layout may be {', '.join(others)}", "barred-layout")
    if request.precision == "fp16":
        text = "float16 overflows now and then; its loss scaler skips such steps, and here they would end the run"
        hint = "write train.bf16: true in its place (mixed_precision: bf16), which has float32's range"
        yield Problem(text, where("train.fp16"), hint, "float16")
    if gpu == "cpu" and request.offload:
        text = "offload on a CPU: the base is stored in host memory already, and nothing would be moved"
        yield Problem(text, where("layout.offload"), "leave it out, or write false", "offload-on-cpu")
    if request.offload_activations:
        place = where("train.offload_activations")
        if request.activation_checkpointing is False:
            text = "offload_activations without activation checkpointing: it moves the inputs of recomputed layers"
            yield Problem(text, place, "set train.gradient_checkpointing: true", "nothing-to-offload")
        elif run.train.compile:
            text = "offload_activations with compiled layers: not supported yet"
            yield Problem(text, place, "set train.compile: false", "not-with-compiled")
    if run.lora.starts_from_weights and run.train.optim not in ELEMENTWISE:
        text = f"{run.train.optim} looks at a full tensor, and half of it is fixed with lora.init_lora_weights: "
        hint = "use adamw_torch, or set lora.init_lora_weights: true"
        yield Problem(f"{text}{run.lora.init_lora_weights}", where("train.optim"), hint, "optimizer-of-halves")
    if run.lora.bias != "none" and request.precision == "no" and run.lora.dtype != run.model.torch_dtype:
        text = f"the base's biases are trained in {run.lora.dtype} (lora.dtype), and layers in {run.model.torch_dtype}"
        hint = "set train.bf16: true, which computes in one dtype, or lora.bias: none"
        yield Problem(f"{text} can't add them", where("lora.bias"), hint, "dtype-of-biases")
    yield from _check_base_dtype(request.base_dtype, run, base, dtypes, where("layout.base_dtype"))
    if request.base_dtype in FOUR_BITS and request.offload:
        text = f"base_dtype: {request.base_dtype} with offload: in 4 bits the base stays on the GPU"
        yield Problem(text, where("layout.offload"), "leave it out, or write base_dtype: bf16", "offload-of-4-bits")
    if run.lora.trains_base and request.offload:
        key = "modules_to_save" if run.lora.modules_to_save else "bias"
        text = f"{key} with offload: what is trained stays on the GPU"
        yield Problem(text, where(f"lora.{key}"), "leave it out, or set layout.offload: false", "offload-of-trained")


def _check_base_dtype(dtype: str, run: RunFile, base: Base, dtypes: BaseDtypes, place: str) -> Iterator[Problem]:
    if dtype in ("", "bf16"):
        return
    why_not = dtypes.why_not_kept if dtype == dtypes.published else dtypes.why_not_four_bits
    if dtype in PUBLISHED and dtype != dtypes.published:
        why_not = f"{base.name} is not published in {dtype.upper()}"
    if not why_not:
        return
    hint = "leave it out, or write bf16"
    if dtypes.published and not dtypes.why_not_kept:
        hint += f", or {dtypes.published}, as published"
    if not dtypes.why_not_four_bits:
        hint += ", or nf4, which windlass quantizes to as it loads"
    if run.lora.use_dora:
        hint += "; or set lora.use_dora: false"
    yield Problem(f"base_dtype: {dtype}, but {why_not}", place, hint, "base-dtype")
