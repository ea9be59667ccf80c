"""Base + adapter against merged on sample rows: what the rounding of the merged weights does to the model's answers.

Both run in float32 from exactly the stored values, so the difference is the merge's alone. The bound is stated for
the dtype, and as a share of what the adapter itself changes: rounding is harmless while it is small against that.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from windlass.export.choose import Chosen
from windlass.model import Base, read_base
from windlass.plan.layout import Layout

ROWS, LENGTH = 4, 128
SHARE_OF_MEMORY = 0.6  # of what is free, for the weights in float32
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Bound:
    """What is allowed: so much, or so much of what the adapter itself changes, whichever is larger."""

    kl: float  # mean, nats a token
    kl_share: float
    difference: float  # of the logits of a token
    difference_share: float


# Set from trained adapters on wide and narrow twins: about ten times what a right merge shows there.
BOUNDS: Final = {
    "F64": Bound(1e-6, 1e-4, 0.01, 0.01),
    "F32": Bound(1e-6, 1e-4, 0.01, 0.01),
    "F16": Bound(1e-4, 0.01, 0.1, 0.1),
    "BF16": Bound(5e-3, 0.01, 0.5, 0.2),
    "F8_E4M3": Bound(0.05, 0.1, 1.0, 0.5),
    "F8_E5M2": Bound(0.1, 0.2, 2.0, 0.5),
}


def compare(checkpoint: Base, chosen: Chosen, to: Path) -> dict[str, Any]:
    """The comparison as a record; `skipped` says why there is none, `deviation` what is out of bounds."""
    needs, free = 4 * checkpoint.total, available()
    if needs > SHARE_OF_MEMORY * free:
        where = "on the GPU" if torch.cuda.is_available() else "here"
        why = f"the model needs {needs / GIB:.1f} GiB in float32, and {free / GIB:.1f} GiB are free {where}"
        return {"skipped": why}
    rows = sample_rows(chosen, checkpoint.dims["vocab"])
    plain, adapted = with_and_without(checkpoint, chosen, rows)
    gc.collect()
    merged_checkpoint = read_base(to)
    merged = of(model_of(merged_checkpoint), rows)
    # A token at a tie between two experts goes to the other one by the last bit of a weight, and its logits jump:
    # where there are experts, the token in the middle is judged, not the worst.
    routed = "experts" in checkpoint.dims
    record: dict[str, Any] = {**measure(plain, adapted, merged), "judged": "median token" if routed else "largest"}
    judged = record["median_difference"] if routed else record["max_difference"]
    adapters = record["adapter_median_difference"] if routed else record["adapter_max_difference"]
    dtype = coarsest(merged_checkpoint)
    bound = BOUNDS[dtype]
    kl_bound = max(bound.kl, bound.kl_share * record["adapter_kl"])
    most = max(bound.difference, bound.difference_share * adapters)
    record |= {"dtype": dtype, "bound_kl": kl_bound, "bound_difference": most, "rows": list(rows.shape)}
    found = (("KL", record["kl"], kl_bound), (f"the difference of the {record['judged']}", judged, most))
    over = [f"{what} is {value:.3g}, over {allowed:.3g}" for what, value, allowed in found if not value <= allowed]
    if over:
        record["deviation"] = (
            f"the logits of base + adapter and merged differ: {', '.join(over)}; "
            f"if nothing else is wrong, {dtype} is too coarse for it: merge with another --dtype, or serve it unmerged"
        )
    return record


def measure(plain: Tensor, adapted: Tensor, merged: Tensor) -> dict[str, float]:
    """KL in nats a token, and differences of logits: the largest, and the largest of the token in the middle.

    The same for what the adapter changes, for scale.
    """
    record: dict[str, float] = {}
    for name, other in (("", merged), ("adapter_", plain)):
        worst = (adapted - other).abs().amax(-1)
        record |= {
            f"{name}kl": kl(adapted, other),
            f"{name}max_difference": float(worst.max()),
            f"{name}median_difference": float(worst.median()),
        }
    return record | {"same_top_token": float((adapted.argmax(-1) == merged.argmax(-1)).float().mean())}


def kl(true: Tensor, other: Tensor) -> float:
    p, q = (torch.log_softmax(logits.double(), -1) for logits in (true, other))
    return max(0.0, float((p.exp() * (p - q)).sum(-1).mean()))


def coarsest(checkpoint: Base) -> str:
    """The dtype of the most elements of the checkpoint: what the bound goes by."""
    counts: dict[str, int] = {}
    for parameter in checkpoint.parameters:
        for piece in parameter.pieces:
            dtype = piece.stored.dtype
            counts[dtype] = counts.get(dtype, 0) + piece.stored.end - piece.stored.start
    return max((dtype for dtype in counts), key=lambda dtype: BOUNDS[dtype].kl)


def model_of(checkpoint: Base) -> Any:
    from windlass.train.load import load

    return load(checkpoint, Layout("resident", "compared", 1, 1, shard=1), dtype=torch.float32)[0].eval()


def with_and_without(checkpoint: Base, chosen: Chosen, rows: Tensor) -> tuple[Tensor, Tensor]:
    model = with_adapter(model_of(checkpoint), chosen.folder)
    with model.disable_adapter():
        plain = of(model, rows)
    return plain, of(model, rows)


def with_adapter(model: Any, folder: Path) -> Any:
    """PEFT's own way to put an adapter on a model."""
    from peft import PeftModel

    with warnings.catch_warnings():
        # PEFT looks for rank_pattern among modules only, not among expert parameters, where it does apply it.
        warnings.filterwarnings("ignore", message=r".*(rank|alpha)_pattern keys did not match")
        # PEFT 0.21 asks for an attribute that transformers 5.23 has renamed.
        warnings.filterwarnings("ignore", message=r".*is_gradient_checkpointing", category=FutureWarning)
        return PeftModel.from_pretrained(model, str(folder)).eval()


@torch.no_grad()
def of(model: Any, rows: Tensor) -> Tensor:
    """In host memory, wherever the model is."""
    there = next(model.parameters()).device
    found = [model(input_ids=row.unsqueeze(0).to(there), use_cache=False).logits.float().cpu() for row in rows]
    return torch.cat(found)


def sample_rows(chosen: Chosen, vocab: int) -> Tensor:
    """Tokens of the run's own data where they are still there; else tokens by chance."""
    dice = torch.Generator().manual_seed(0)
    rows = torch.randint(vocab, (ROWS, LENGTH), generator=dice)
    found = sorted((chosen.run_folder / "tokens").glob("*/*.arrow")) if chosen.run_folder else []
    held = sorted(found, key=lambda path: path.stem != "validation")
    if not held:
        return rows
    from datasets import Dataset

    data = Dataset.from_file(str(held[0]))
    if "input_ids" not in data.column_names:
        return rows
    tokens = [token for row in data.select(range(min(len(data), 256)))["input_ids"] for token in row]
    size = min(LENGTH, len(tokens) // ROWS)
    if size < 2 or max(tokens) >= vocab:
        return rows
    return torch.tensor(tokens[: ROWS * size]).view(ROWS, size)


def available() -> int:
    """Free bytes where a model is loaded: on the GPU, where there is one."""
    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[0])
    import psutil  # type: ignore[import-untyped]

    return int(psutil.virtual_memory().available)


def told(record: dict[str, Any], say: Callable[[str], None]) -> None:
    if "skipped" in record:
        say(f"logits    not compared: {record['skipped']}")
        return
    say(
        f"logits    base + adapter to merged: KL {record['kl']:.2e} nats a token (bound {record['bound_kl']:.1e}), "
        f"same top token {record['same_top_token']:.1%}"
    )
    say(
        f"          largest difference {record['max_difference']:.3g}, of the median token "
        f"{record['median_difference']:.3g} (bound on the {record['judged']}: {record['bound_difference']:.3g})"
    )
    say(
        f"          the adapter itself: KL {record['adapter_kl']:.2e}, largest {record['adapter_max_difference']:.3g}, "
        f"median {record['adapter_median_difference']:.3g}"
    )
