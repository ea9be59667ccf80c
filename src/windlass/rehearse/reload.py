"""A process of the rehearsal: open the exports with plain transformers and PEFT, and compare with what was trained.

`python -m windlass.rehearse.reload FOLDER` prints one line of JSON.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers

from windlass.files import read_json
from windlass.model import Base, read_base
from windlass.plan.layout import Layout
from windlass.train.load import load
from windlass.train.logits import compute_logits, kl_by_token, kl_divergence, logits_without_and_with, sample_rows

ROWS, LENGTH = 4, 64
NEAR = 1e-3  # nats: 16-bit weights of these replicas have shown up to 2e-4
KEPT = 0.2  # how far from all of the adapter's change what is merged may be
EQUAL = 1e-3  # of logits in float32: the same arithmetic, perhaps in another order
UNSHARDED = Layout("resident", "compared", 1, 1, shard=1)


class Differs(Exception):  # noqa: N818  (a finding, not an error of this process)
    """What was exported is not what was trained."""


def main(folder: Path) -> list[str]:
    """What is proven, in sentences."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("peft").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    base, record = read_base(folder / "model"), read_json(folder / "adapter" / "export.json")
    rows = sample_rows(folder / "run", base.dims["vocab"], ROWS, LENGTH)

    # The adapter as the run itself saved it, on the base as windlass loads and certifies it.
    name = record["adapter"]
    own = next(path for path in (folder / "run" / "checkpoints" / name, folder / "run" / name) if path.is_dir())
    untrained, trained = logits_without_and_with(load_certified(base), own, rows)
    effect = kl_divergence(trained, untrained)
    if not effect > 0:
        raise Differs("the adapter changes nothing: the logits with and without it are the same")

    # The exported adapter, in plain PEFT.
    if base.quantization:
        opener = "windlass (which decodes the base as its publisher does) and plain PEFT"
        plain = load_certified(base)
    else:
        kind = base.wrapper.architecture if base.wrapper else base.family.causal_lm
        opener = f"plain transformers ({kind}) and PEFT"
        plain, info = open_plainly(folder / "model", kind)
        if info["missing_keys"]:
            raise Differs(f"plain transformers misses {len(info['missing_keys'])} weights of the base")
    _, adapted = logits_without_and_with(plain, folder / "adapter", rows)
    worst = float((trained - adapted).abs().max())
    if not worst <= EQUAL:
        raise Differs(f"base + exported adapter in plain PEFT: logits differ by {worst:.3g} from what was trained")

    proved = [f"base + adapter, opened by {opener}: logits as trained, to {worst:.0e}"]
    if not (folder / "merged").is_dir():  # a base in 4 bits
        return proved

    # The merged model, by the class that its config names, with nothing missing, unknown or of another shape.
    (kind,) = read_json(folder / "merged" / "config.json")["architectures"]
    merged, info = open_plainly(folder / "merged", kind)
    for what, keys in info.items():
        if what.endswith("_keys") and keys:
            seen = f"{len(keys)} {what.replace('_', ' ')}: {keys}"
            raise Differs(f"plain transformers opens the merged model with {seen}")
    # Rounding sends a few tokens to other experts, and these would outweigh all others in a mean: hence the median.
    logits = compute_logits(merged, rows)
    far = float(kl_by_token(trained, logits).median())
    if not far <= NEAR:
        raise Differs(
            f"the merged model in plain transformers is {far:.3g} nats from what was trained, at the median token"
        )
    change = (trained - untrained).double()
    kept = float((((logits - untrained) * change).sum(-1) / (change * change).sum(-1)).median())
    if not abs(kept - 1) <= KEPT:
        raise Differs(
            f"of what the adapter changes in the logits, {kept:.0%} is in the merged model, at the median token"
        )
    return [
        *proved,
        f"the merged model, opened by plain transformers as {kind}, no weight missing or unknown: at the median token, "
        f"KL {far:.1e} nats to what was trained, {kept:.0%} of the adapter's change of logits",
    ]


def load_certified(base: Base) -> Any:
    return load(base, UNSHARDED, dtype=torch.float32)[0].eval()


def open_plainly(model: Path, kind: str) -> tuple[Any, dict[str, Any]]:
    cls = getattr(transformers, kind)
    found, info = cls.from_pretrained(model, dtype=torch.float32, output_loading_info=True)
    return found.eval(), info


if __name__ == "__main__":
    try:
        print(json.dumps({"proved": main(Path(sys.argv[1]))}))
    except Differs as found:
        print(json.dumps({"problem": str(found)}))
