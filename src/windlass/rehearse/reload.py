"""A process of the rehearsal: what was exported, opened by plain transformers and PEFT, against what was trained.

`python -m windlass.rehearse.reload FOLDER` prints one line of JSON. Imports torch.
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

from windlass.model import Base, read_base
from windlass.plan.layout import Layout
from windlass.train.load import load

ROWS, LENGTH = 4, 64
KEPT = 0.5  # how far from all of the adapter's change what is merged may be: 16-bit weights are rounded by as much
EQUAL = 1e-3  # of logits in float32: the same arithmetic, perhaps in another order
ALONE = Layout("resident", "compared", 1, 1, shard=1)
# transformers' own way to read a wrapper's language model alone.
INNER = {r"^language_model\.model\.": "model.", r"^model\.language_model\.": "model.", r"^language_model\.": ""}


class Differs(Exception):  # noqa: N818  (what it is for)
    """What was exported is not what was trained."""


def main(folder: Path) -> dict[str, Any]:
    quiet()
    base = read_base(folder / "model")
    record = json.loads((folder / "merged" / "export.json").read_text())
    rows = sample(folder / "run", base.dims["vocab"])
    untrained, trained = with_adapter(certified(base), trained_adapter(folder / "run", record["adapter"]), rows)
    plain, opener = opened(folder / "model", base)
    _, adapted = with_adapter(plain, folder / "adapter", rows)
    merged = of(whole(folder / "merged"), rows)

    effect = kl(trained, untrained)
    if not effect > 0:
        raise Differs("the adapter changes nothing: the logits with and without it are the same")
    worst = float((trained - adapted).abs().max())
    if not worst <= EQUAL:
        raise Differs(f"base + exported adapter in plain PEFT: logits differ by {worst:.3g} from what was trained")
    bound = float(record["logits"].get("bound_kl", 5e-3))
    far, kept = kl(trained, merged), share(merged - untrained, trained - untrained)
    if not far <= bound:
        raise Differs(f"the merged model in plain transformers is {far:.3g} nats a token from what was trained")
    if not abs(kept - 1) <= KEPT:
        raise Differs(f"of what the adapter changes in the logits, {kept:.0%} is in the merged model")
    return {
        "proved": [
            f"base + adapter, opened by {opener}: logits as trained, to {worst:.0e}",
            f"the merged model, opened by plain transformers as {type_of(folder / 'merged')}, no weight missing or "
            f"unknown: KL {far:.1e} nats a token to what was trained (the adapter itself: {effect:.1e}), "
            f"{kept:.0%} of the adapter's change of the logits",
        ],
        "adapter_kl": effect,
        "merged_kl": far,
        "merged_share": kept,
        "adapter_difference": worst,
    }


def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("peft").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")


def trained_adapter(run: Path, name: str) -> Path:
    """Where the run itself saved the adapter that was exported."""
    return next(path for path in (run / "checkpoints" / name, run / name) if path.is_dir())


def certified(base: Base) -> Any:
    return load(base, ALONE, dtype=torch.float32)[0].eval()


def opened(model: Path, base: Base) -> tuple[Any, str]:
    """The base, by plain transformers where that reads it; it drops the scales of fused FP8 experts."""
    if base.quantization:
        return certified(base), "windlass (transformers would drop scales of this FP8 base) and plain PEFT"
    kind = getattr(transformers, base.family.causal_lm)
    mapping = {"key_mapping": INNER} if base.wrapper else {}
    found, info = kind.from_pretrained(model, dtype=torch.float32, output_loading_info=True, **mapping)
    if info["missing_keys"]:
        raise Differs(f"plain transformers misses {len(info['missing_keys'])} weights of the base")
    return found.eval(), "plain transformers and PEFT"


def whole(model: Path) -> Any:
    """The merged model by the class that its config names, with nothing missing, unknown or of another shape."""
    kind = getattr(transformers, type_of(model))
    found, info = kind.from_pretrained(model, dtype=torch.float32, output_loading_info=True)
    wrong = {name: keys for name, keys in info.items() if name.endswith("_keys") and keys}
    if wrong:
        name, keys = next(iter(wrong.items()))
        raise Differs(f"plain transformers opens the merged model with {len(keys)} {name.replace('_', ' ')}: {keys}")
    return found.eval()


def type_of(model: Path) -> str:
    (name,) = json.loads((model / "config.json").read_text())["architectures"]
    return str(name)


def with_adapter(model: Any, adapter: Path, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Logits without and with it."""
    adapted = PeftModel.from_pretrained(model, str(adapter)).eval()
    with adapted.disable_adapter():
        plain = of(adapted, rows)
    return plain, of(adapted, rows)


@torch.no_grad()
def of(model: Any, rows: Tensor) -> Tensor:
    logits: Tensor = torch.cat([model(input_ids=row[None], use_cache=False).logits.float() for row in rows])
    return logits


def kl(true: Tensor, other: Tensor) -> float:
    p, q = (torch.log_softmax(logits.double(), -1) for logits in (true, other))
    return float((p.exp() * (p - q)).sum(-1).mean())


def share(part: Tensor, whole: Tensor) -> float:
    """How much of one change lies in another: rounding, which goes anywhere, cancels out over so many logits."""
    return float((part * whole).double().sum() / (whole * whole).double().sum())


def sample(run: Path, vocab: int) -> Tensor:
    """Tokens that the run was trained or evaluated on."""
    from datasets import Dataset

    held = sorted((run / "tokens").glob("*/*.arrow"), key=lambda path: path.stem != "validation")
    found = Dataset.from_file(str(held[0]))["input_ids"]
    tokens = [token for row in found[:256] for token in row]
    size = min(LENGTH, len(tokens) // ROWS)
    return torch.tensor(tokens[: ROWS * size]).clamp(max=vocab - 1).view(ROWS, size)


if __name__ == "__main__":
    try:
        print(json.dumps(main(Path(sys.argv[1]))))
    except Differs as found:
        print(json.dumps({"problem": str(found)}))
        sys.exit(1)
