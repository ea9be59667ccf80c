"""Which parameters of a base are stored quantized, and in which dtype."""

from windlass.model.compressed import is_ignored
from windlass.model.parameters import Base, Parameter

# Parts that publishers store in FP8, for configs without weights.
_FP8_PARTS = ("attention", "mlp", "shared_experts", "experts")


def published_dtype(base: Base) -> str:
    """Return the checkpoint's quantized dtype, as layout.base_dtype names it; empty if it is not quantized."""
    return {"bitsandbytes": "nf4"}.get(base.method, base.method) if _quantized_names(base) else ""


def _quantized_names(base: Base) -> frozenset[str]:
    """Return the names of parameters that are stored quantized; without weights, those that publishers usually do."""
    if base.quantization is None:
        return frozenset()
    mxfp4 = base.method == "mxfp4"
    ignore = base.quantization.get("ignore") or ()
    parts, least = (("experts",), 3) if mxfp4 else (_FP8_PARTS, 2)

    def is_quantized(parameter: Parameter) -> bool:
        if parameter.pieces:
            return all(piece.packed or piece.stored.dtype.startswith("F8") for piece in parameter.pieces)
        module = parameter.name.rpartition(".")[0]
        return parameter.part in parts and len(parameter.shape) >= least and not is_ignored(module, ignore)

    return frozenset(p.name for p in base.parameters if is_quantized(p))


def quantizable_names(base: Base) -> frozenset[str]:
    """Return the names of the parameters that `layout.base_dtype` applies to: those that the checkpoint stores
    quantized; if it is in 16 bits, the linears and experts of its layers."""
    return _quantized_names(base) or frozenset(
        p.name
        for p in base.parameters
        if p.part in _FP8_PARTS
        and (p.linear or (p.part == "experts" and len(p.shape) == 3))
        and p.name.split(".")[-2] not in base.family.bare
    )
