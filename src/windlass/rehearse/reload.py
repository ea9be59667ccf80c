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
from peft import PeftModel
from torch import Tensor

from windlass.files import read_json
from windlass.model import Base, read_base
from windlass.plan.layout import Layout
from windlass.train.load import load

ROWS, LENGTH = 4, 64
KEPT = 0.5  # how far from all of the adapter's change what is merged may be: 16-bit weights are rounded by as much
EQUAL = 1e-3  # of logits in float32: the same arithmetic, perhaps in another order
UNSHARDED = Layout("resident", "compared", 1, 1, shard=1)
# transformers' own way to read a wrapper's language model alone.
INNER = {r"^language_model\.model\.": "model.", r"^model\.language_model\.": "model.", r"^language_model\.": ""}


class Differs(Exception):  # noqa: N818  (a finding, not an error of this process)
    """What was exported is not what was trained."""


def main(folder: Path) -> list[str]:
    """What is proven, in sentences."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("peft").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    base, record = read_base(folder / "model"), read_json(folder / "merged" / "export.json")
    rows = sample_tokens(folder / "run", base.dims["vocab"])

    # The adapter as the run itself saved it, on the base as windlass loads and certifies it.
    name = record["adapter"]
    own = next(path for path in (folder / "run" / "checkpoints" / name, folder / "run" / name) if path.is_dir())
    untrained, trained = logits_with_adapter(load_certified(base), own, rows)
    effect = kl(trained, untrained)
    if not effect > 0:
        raise Differs("the adapter changes nothing: the logits with and without it are the same")

    # The exported adapter, in plain PEFT.
    opener = "plain transformers and PEFT"
    if base.quantization:  # transformers drops the scales of fused FP8 experts
        opener, plain = (
            "windlass (transformers would drop scales of this FP8 base) and plain PEFT",
            load_certified(base),
        )
    else:
        mapping = {"key_mapping": INNER} if base.wrapper else {}
        plain, info = open_plainly(folder / "model", base.family.causal_lm, **mapping)
        if info["missing_keys"]:
            raise Differs(f"plain transformers misses {len(info['missing_keys'])} weights of the base")
    _, adapted = logits_with_adapter(plain, folder / "adapter", rows)
    worst = float((trained - adapted).abs().max())
    if not worst <= EQUAL:
        raise Differs(f"base + exported adapter in plain PEFT: logits differ by {worst:.3g} from what was trained")

    # The merged model, by the class that its config names, with nothing missing, unknown or of another shape.
    (kind,) = read_json(folder / "merged" / "config.json")["architectures"]
    merged, info = open_plainly(folder / "merged", kind)
    for what, keys in info.items():
        if what.endswith("_keys") and keys:
            raise Differs(
                f"plain transformers opens the merged model with {len(keys)} {what.replace('_', ' ')}: {keys}"
            )
    logits = logits_of(merged, rows)
    bound, far = float(record["logits"].get("bound_kl", 5e-3)), kl(trained, logits)
    if not far <= bound:
        raise Differs(f"the merged model in plain transformers is {far:.3g} nats a token from what was trained")
    # How much of the adapter's change is in the merged model: rounding cancels out over so many logits.
    change = (trained - untrained).double()
    kept = float(((logits - untrained) * change).sum() / (change * change).sum())
    if not abs(kept - 1) <= KEPT:
        raise Differs(f"of what the adapter changes in the logits, {kept:.0%} is in the merged model")
    return [
        f"base + adapter, opened by {opener}: logits as trained, to {worst:.0e}",
        f"the merged model, opened by plain transformers as {kind}, no weight missing or unknown: KL {far:.1e} nats "
        f"a token to what was trained (the adapter itself: {effect:.1e}), {kept:.0%} of the adapter's change of logits",
    ]


def load_certified(base: Base) -> Any:
    return load(base, UNSHARDED, dtype=torch.float32)[0].eval()


def open_plainly(model: Path, kind: str, **more: Any) -> tuple[Any, dict[str, Any]]:
    cls = getattr(transformers, kind)
    found, info = cls.from_pretrained(model, dtype=torch.float32, output_loading_info=True, **more)
    return found.eval(), info


def logits_with_adapter(model: Any, adapter: Path, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Logits without and with it."""
    adapted = PeftModel.from_pretrained(model, str(adapter)).eval()
    with adapted.disable_adapter():
        plain = logits_of(adapted, rows)
    return plain, logits_of(adapted, rows)


@torch.no_grad()
def logits_of(model: Any, rows: Tensor) -> Tensor:
    logits: Tensor = torch.cat([model(input_ids=row[None], use_cache=False).logits.float() for row in rows])
    return logits


def kl(true: Tensor, other: Tensor) -> float:
    p, q = (torch.log_softmax(logits.double(), -1) for logits in (true, other))
    return float((p.exp() * (p - q)).sum(-1).mean())


def sample_tokens(run: Path, vocab: int) -> Tensor:
    """Tokens that the run was trained or evaluated on."""
    from datasets import Dataset

    cached = sorted((run / "tokens").glob("*/*.arrow"), key=lambda path: path.stem != "validation")
    found = Dataset.from_file(str(cached[0]))["input_ids"]
    tokens = [token for row in found[:256] for token in row]
    size = min(LENGTH, len(tokens) // ROWS)
    return torch.tensor(tokens[: ROWS * size]).clamp(max=vocab - 1).view(ROWS, size)


if __name__ == "__main__":
    try:
        print(json.dumps({"proved": main(Path(sys.argv[1]))}))
    except Differs as found:
        print(json.dumps({"problem": str(found)}))
        sys.exit(1)
