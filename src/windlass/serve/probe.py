"""The probe: what a server's answers are compared with, `probe.json` of an export (docs/verify.md). No torch."""

import hashlib
import json
import math
import statistics
from collections.abc import Sequence
from operator import mul
from pathlib import Path
from typing import Any, Final

from windlass.errors import UserError
from windlass.files import read_json
from windlass.run_folder import ADAPTER as WEIGHTS
from windlass.run_folder import PROBE, describe_files

BASE: Final = "base"
ADAPTER: Final = "adapter"  # other hypotheses continue this word: "without q_proj", "at 0.5 x its scale"
LOGPROBS: Final = "logprobs"  # a row's, by hypothesis, in float32 where the model fits
ROUNDED: Final = "rounded"  # the same, as a server in bfloat16 computes them
AT_SCALE: Final = "at {:g} x its scale"
SCALES: Final = (0.5, 0.9, 1.1, 2.0)
ROWS: Final = 12
TOKENS: Final = 160  # most of a row
POSITIONS: Final = 24  # most of a row whose log-probabilities are kept
TEXT: Final = "def half(n: int) -> float:\n\treturn n / 2  # naïve: 12,345.67 → ½ 東京"  # identifies a tokenizer
FAINT: Final = 0.005  # nats, mean: what rounding to bf16 alone changes
OUTLIER: Final = 1.5 * 1.48  # medians of absolute residuals from which on they count less (Huber)
ITERATIONS: Final = 12
SETTLED: Final = 0.01  # of the standard error
TINY: Final = 1e-9


def describe_difference(values: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """Return how far two sequences of log-probabilities are apart, in nats."""
    differences = sorted(abs(one - other) for one, other in zip(values, others, strict=True))
    count = len(differences)
    mean = sum(differences) / count
    return {"mean": mean, "median": differences[count // 2], "largest": differences[-1]}


def list_logprobs(probe: dict[str, Any], hypothesis: str, key: str = LOGPROBS) -> list[float]:
    """Return the log-probabilities of all rows' kept positions."""
    return [value for row in probe["rows"] for value in row[key][hypothesis]]


def hash_probe(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def find_probe(run_folder: Path | None, adapter: Path) -> dict[str, Any]:
    """Return the probe that the run has written for this adapter; empty if there is none, or an older windlass's."""
    probe = read_json(run_folder / PROBE) if run_folder else {}
    return probe if "noise" in probe and probe["adapter"] == describe_files(adapter)["files"] else {}


def read_probe(folder: Path, recorded: dict[str, Any]) -> dict[str, Any]:
    """Read an export's probe. recorded: export.json, which names it by its hash."""
    path = folder / PROBE
    if not path.is_file():
        hint = f"export again where base and adapter can be computed: {recorded.get('no_probe', 'on a larger machine')}"
        raise UserError("the export has no probe to compare with", str(path), hint, "no-probe")
    try:
        probe: dict[str, Any] = json.loads(path.read_bytes())
    except ValueError:
        raise UserError("it is not JSON", str(path), "export again", "damaged-probe") from None
    if "noise" not in probe:
        raise UserError("an older windlass wrote this probe", str(path), "export again", "older-probe")
    written = recorded.get("files")
    changed = written and (folder / WEIGHTS).is_file() and describe_files(folder)["files"] != written
    if changed or recorded.get("probe") != hash_probe(path):
        problem = "the adapter beside it was changed" if changed else "it was not written with this export"
        raise UserError(problem, str(path), "export again into a new folder", "other-probe")
    return probe


def describe_probe(probe: dict[str, Any]) -> str:
    """Summarize a probe in a line."""
    apart = probe["difference"]
    line = f"{len(probe['rows'])} rows of {probe['rows_from']}: base and adapter are {apart['mean']:.3g} nats apart"
    line += f" (mean), {apart['largest']:.3g} (largest)"
    if apart["mean"] < FAINT:
        line += "; too little for a server in bf16 to be told from the base"
    return line


# --- the share of an adapter's effect that arrives: robust slopes between differences of log-probabilities ---


def subtract(values: Sequence[float], others: Sequence[float]) -> list[float]:
    return [one - other for one, other in zip(values, others, strict=True)]


def median_size(values: Sequence[float]) -> float:
    return statistics.median(map(abs, values))


def fit_slope(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Return the slope of y against x through the origin, and its standard error.

    Unlikely tokens have log-probabilities with much more noise than others: they must not decide.
    """
    weighted: Sequence[float] = x
    slope = error = 0.0
    for _ in range(ITERATIONS):
        square = sum(map(mul, weighted, x))
        if square < TINY * TINY:
            return 0.0, math.inf
        before, slope = slope, sum(map(mul, weighted, y)) / square
        if abs(slope - before) < SETTLED * error:
            break
        rest = [b - slope * a for a, b in zip(x, y, strict=True)]
        parts = list(map(mul, weighted, rest))
        error = math.sqrt(sum(map(mul, parts, parts))) / square
        sizes = [abs(r) + TINY for r in rest]
        limit = OUTLIER * statistics.median(sizes)
        weighted = [a if size <= limit else a * limit / size for a, size in zip(x, sizes, strict=True)]
    return slope, error


def measure_kept(effect: Sequence[float], served: Sequence[float], noise: Sequence[float]) -> tuple[float, float]:
    """Return the share of an adapter's effect that is served, and its standard error.

    noise: as in the effect itself, which makes a slope smaller; empty if there is none. An infinite error if the effect
    is no larger than its noise."""
    slope, error = fit_slope(effect, served)
    heard = 1 - sum(map(mul, noise, noise)) / max(sum(map(mul, effect, effect)), TINY)
    return (min(1.0, slope / heard), error / heard) if heard > 0 else (1.0, math.inf)
