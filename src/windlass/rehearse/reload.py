"""A process of the rehearsal: open the exports with plain transformers and PEFT, and compare with what was trained.

`python -m windlass.rehearse.reload FOLDER` prints one line of JSON.
"""

import json
import logging
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers

from windlass.files import read_json
from windlass.model import Base, read_base
from windlass.train.logits import (
    compute_both_logits,
    compute_logits,
    kl_divergence,
    load_float32,
    open_adapter,
    sample_rows,
)
from windlass.weights.reading import DTYPES

ROWS = 4
LENGTH = 64
DEVIATIONS = 6  # standard deviations of dithered rounding
EQUAL = 1e-3  # bound for logits in float32: the same arithmetic, perhaps in another order


class ReloadMismatch(Exception):  # noqa: N818  (a finding, not an error of this process)
    """What was exported is not what was trained."""


def main(folder: Path) -> list[str]:
    """Return what is proven, in sentences."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("peft").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    base = read_base(folder / "model")
    record = read_json(folder / "adapter" / "export.json")
    rows = sample_rows(folder / "run", base.dims["vocab"], ROWS, LENGTH)

    # The adapter as the run itself saved it, on the base as windlass loads and certifies it.
    name = record["adapter"]
    own = next(path for path in (folder / "run" / "checkpoints" / name, folder / "run" / name) if path.is_dir())
    ours = open_adapter(load_float32(base), own)
    untrained, trained = compute_both_logits(ours, rows)
    effect = kl_divergence(trained, untrained)
    if not effect > 0:
        raise ReloadMismatch("the adapter changes nothing: the logits with and without it are the same")

    # The exported adapter, in plain PEFT.
    if base.quantization:
        opener = "windlass (which decodes the base as its publisher does) and plain PEFT"
        plain = load_float32(base)
    else:
        kind = base.wrapper.architecture if base.wrapper else base.family.causal_lm
        opener = f"plain transformers ({kind}) and PEFT"
        plain, info = open_plainly(folder / "model", kind)
        if info["missing_keys"]:
            raise ReloadMismatch(f"plain transformers misses {len(info['missing_keys'])} weights of the base")
    adapted = compute_logits(open_adapter(plain, folder / "adapter"), rows)
    worst = float((trained - adapted).abs().max())
    if not worst <= EQUAL:
        opened = "base + exported adapter in plain PEFT"
        raise ReloadMismatch(f"{opened}: logits differ by {worst:.3g} from what was trained")

    proved = [f"base + adapter, opened by {opener}: logits as trained, to {worst:.2g}"]
    if not (folder / "merged").is_dir():  # a base in 4 bits
        return proved

    # The merged model, by the class that its config names, with nothing missing, unknown or of another shape.
    (kind,) = read_json(folder / "merged" / "config.json")["architectures"]
    merged, info = open_plainly(folder / "merged", kind)
    for what, keys in info.items():
        if what.endswith("_keys") and keys:
            seen = f"{len(keys)} {what.replace('_', ' ')}: {keys}"
            raise ReloadMismatch(f"plain transformers opens the merged model with {seen}")
    # Each of its weights must be PEFT's merged one, rounded up or down, and open plainly as windlass loads it.
    logits = compute_logits(merged, rows)
    stored = read_base(folder / "merged")
    written = load_float32(stored)
    require_rounded(ours.merge_and_unload(), written, load_float32(read_base(folder / "model")), stored)
    rounded = compute_logits(written, rows)
    # The median token counts: a last bit sends some tokens to other experts.
    far = float((logits - rounded).abs().amax(-1).median())
    if not far <= EQUAL:
        raise ReloadMismatch(
            f"the merged model in plain transformers: the median token's logits differ by {far:.3g} from those of its "
            "weights, which are PEFT's merge"
        )
    change = (trained - untrained).double()
    kept = float((((logits - untrained) * change).sum(-1) / (change * change).sum(-1)).median())
    return [
        *proved,
        f"the merged model, opened by plain transformers as {kind}, no weight missing or unknown: each is PEFT's "
        f"merged one, rounded up or down; logits as theirs, to {far:.2g} at the median token; rounding keeps "
        f"{kept:.0%} of the adapter's change of logits",
    ]


@torch.no_grad()
def require_rounded(merged_by_peft: Any, written: Any, base: Any, stored: Base) -> None:
    """Require that each written weight is a neighbour, in its stored dtype, of the one that PEFT has merged, and that
    all together have changed as much: rounded up and down, not back to the base."""
    kept = changed = variance = 0.0
    for parameter in stored.parameters:
        dtype = torch.finfo(DTYPES[parameter.pieces[0].stored.dtype])
        exact, value, before = (
            model.get_parameter(parameter.name).double() for model in (merged_by_peft, written, base)
        )
        step = torch.exp2(torch.floor(torch.log2(exact.abs().clamp(min=dtype.smallest_normal)))) * dtype.eps
        wrong = int(((value - exact).abs() > step * (1 + EQUAL)).sum())
        if wrong:
            raise ReloadMismatch(
                f"{wrong:,} of {exact.numel():,} weights of {parameter.name} are not base + adapter, merged by PEFT, "
                "rounded up or down"
            )
        change = exact - before
        place = (exact / step).frac().abs()
        kept += float(((value - before) * change).sum())
        changed += float(change.square().sum())
        variance += float((change * step).square().mul(place * (1 - place)).sum())
    if abs(kept - changed) > DEVIATIONS * math.sqrt(variance) + EQUAL * changed:
        raise ReloadMismatch(f"the merged weights have {kept / changed:.0%} of what the adapter adds to the base")


def open_plainly(model: Path, kind: str) -> tuple[Any, dict[str, Any]]:
    cls = getattr(transformers, kind)
    found, info = cls.from_pretrained(model, dtype=torch.float32, output_loading_info=True)
    return found.eval(), info


if __name__ == "__main__":
    try:
        print(json.dumps({"proved": main(Path(sys.argv[1]))}))
    except ReloadMismatch as found:
        print(json.dumps({"problem": str(found)}))
