"""The verdict of `windlass verify` over made-up log-probabilities: servers in float32 and bfloat16, right and wrong."""

import math
import random
from dataclasses import dataclass, field
from itertools import starmap
from operator import add

import pytest
from refusals import refused

from windlass.observe.format import describe_served
from windlass.serve.probe import ADAPTER, AT_SCALE, BASE, LOGPROBS, ROUNDED, SCALES, fit_slope, measure_kept
from windlass.serve.verify import APPLIED, AS_BASE, IN_PART, UNDECIDED, Verdict, judge

TOKENS = 320
# Share of the adapter's effect that each group has, and what bfloat16 keeps of it.
GROUPS = {"q_proj": (0.15, 0.9), "v_proj": (0.3, 1.1), "o_proj": (0.2, 1.0), "down_proj": (0.35, 0.95)}
FLOAT32 = 5e-6  # nats, median noise


@dataclass
class World:
    """A base, an adapter that changes log-probabilities by `effect` nats, and servers that round as bfloat16 does."""

    seed: int = 0
    effect: float = 0.8
    kept: float = 0.93  # of the effect in bfloat16
    noise: float = 0.06  # nats, median, in bfloat16
    parts: dict[str, list[float]] = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        common = self.draw(self.effect)
        drawn = {name: (self.draw(self.effect), share) for name, (share, _) in GROUPS.items()}
        self.parts = {
            name: [share * (0.7 * shared + 0.7 * one) for shared, one in zip(common, values, strict=True)]
            for name, (values, share) in drawn.items()
        }
        self.base = [-abs(value) for value in self.draw(2.0)]
        self.probe = {"dtype": "BF16", "base": "base", "noise": self.noise}
        self.expected = {LOGPROBS: self.compute_all(False), ROUNDED: self.compute_all(True)}

    def draw(self, size: float) -> list[float]:
        """Draw values with heavy tails: few tokens have ten times the median."""
        return [size * self.random.gauss(0, 1.5) * math.exp(self.random.gauss(0, 0.8)) for _ in range(TOKENS)]

    def compute(
        self, *, bf16: bool, without: str = BASE, scale: float = 1.0, noise: float | None = None
    ) -> list[float]:
        """Return what a server answers. It saturates a little, and bfloat16 takes more of smaller adapters."""
        sums = [0.0] * TOKENS
        for name, part in self.parts.items():
            kept = self.kept ** (1 / scale**0.5 if scale else 1) * GROUPS[name][1] if bf16 else 1.0
            if name != without:
                sums = [total + scale * kept * value for total, value in zip(sums, part, strict=True)]
        effect = [value / (1 + 0.05 * abs(value)) for value in sums]
        noise = (self.noise if bf16 else FLOAT32) if noise is None else noise
        return list(starmap(add, zip(map(add, self.base, effect), self.draw(noise), strict=True)))

    def compute_all(self, bf16: bool) -> dict[str, list[float]]:
        noise = None if bf16 else 0.0
        found = {ADAPTER: self.compute(bf16=bf16, noise=noise), BASE: self.compute(bf16=bf16, scale=0, noise=noise)}
        for name in GROUPS:
            found[f"without {name}"] = self.compute(bf16=bf16, without=name, noise=noise)
        for scale in SCALES:
            found[AT_SCALE.format(scale)] = self.compute(bf16=bf16, scale=scale, noise=noise)
        return found

    def judge(self, answers: list[float], base: list[float] | None = None) -> Verdict:
        return judge(answers, base or [], self.expected, self.probe, "mine", "prompt_logprobs")


BF16 = pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])


@pytest.mark.takes("verifies many servers")
def test_right_servers_in_bfloat16_raise_no_alarm() -> None:
    for seed in range(8):
        small = seed % 2 == 0
        world = World(seed, effect=0.3, kept=0.5) if small else World(seed)
        base = world.compute(bf16=True, scale=0) if seed % 4 < 2 else None
        result = world.judge(world.compute(bf16=True), base)
        assert result.verdict == APPLIED, (seed, result.summary)
        if small:
            assert "applied, and rounding in 16 bits takes " in result.summary
            assert " % of it: serve it merged, or in float32 (" in result.summary
        once = [value + noise for value, noise in zip(world.compute(bf16=False), world.draw(0.06), strict=True)]
        result = world.judge(once, base)  # a server that rounds the sum
        assert result.verdict == APPLIED, (seed, result.summary)


def test_a_right_server_in_float32() -> None:
    world = World()
    result = world.judge(world.compute(bf16=False))
    assert (result.verdict, result.nearest, result.notes) == (APPLIED, ADAPTER, [])
    assert abs(result.share - 1) < 1e-3
    assert result.summary.startswith("applied: 100.0 ± 0.0 % of its effect, 320 tokens")


@BF16
def test_the_base(bf16: bool) -> None:
    for seed in range(3):
        world = World(seed)
        answers = world.compute(bf16=bf16, scale=0)
        assert world.judge(answers).verdict == AS_BASE
        assert world.judge(answers, world.compute(bf16=bf16, scale=0)).verdict == AS_BASE


@BF16
@pytest.mark.parametrize("name", ["without q_proj", AT_SCALE.format(0.5)])
def test_a_part_is_named(name: str, bf16: bool) -> None:
    for seed in range(5):
        world = World(seed)
        scale = float(name.split()[1]) if name.startswith("at") else 1.0
        result = world.judge(world.compute(bf16=bf16, without=name.removeprefix("without "), scale=scale))
        assert (result.verdict, result.nearest) == (IN_PART, name), (seed, result.summary, result.notes)
        assert f"fits the adapter {name}, not as exported" in result.summary


@pytest.mark.fault(
    "a server that applies the adapter at another scale", "`windlass verify`", "fits the adapter … not as exported"
)
@pytest.mark.parametrize("scale", [0.7, 1.08, 1.3])
def test_any_scale_is_named_where_the_noise_allows_it(scale: float) -> None:
    world = World()
    for dtype in ("BF16", "F8"):  # of the base's weights; the server computes in float32
        world.probe["dtype"] = dtype
        result = world.judge(world.compute(bf16=False, scale=scale))
        assert (result.verdict, result.nearest) == (IN_PART, AT_SCALE.format(scale)), dtype
    world.probe["dtype"] = "BF16"
    assert world.judge(world.compute(bf16=True, scale=1.3)).verdict == IN_PART


def test_a_scale_near_1_is_named_or_not_excluded_in_bfloat16() -> None:
    """With the base served beside the adapter; docs/verify.md says so."""
    verdicts = set()
    for seed in range(10):
        world = World(seed)
        result = world.judge(world.compute(bf16=True, scale=1.08), world.compute(bf16=True, scale=0))
        verdicts.add(result.verdict)
        if result.verdict == APPLIED:
            assert result.notes == ["too faint to be excluded at this precision: the adapter at 1.1 x its scale"]
        else:
            assert (result.verdict, result.nearest) == (IN_PART, AT_SCALE.format(1.1))
    assert verdicts == {APPLIED, IN_PART}


@pytest.mark.fault("a server with another adapter", "`windlass verify`", "fits none")
@BF16
def test_another_adapter(bf16: bool) -> None:
    for seed in range(5):
        world = World(seed)
        other = World(seed + 100)
        other.base = world.base
        answers = other.compute(bf16=bf16)
        with refused("another-model"):
            world.judge(answers)
        result = world.judge(answers, world.compute(bf16=bf16, scale=0))  # its base is the right one
        assert (result.verdict, result.summary[:9]) == (IN_PART, "fits none")
        assert result.notes == ["it may be another adapter, or this one in part"]


def test_another_base_beside_the_adapter() -> None:
    world = World()
    other = [value + change for value, change in zip(world.base, world.draw(1.0), strict=True)]
    with refused("another-model") as problems:
        world.judge(world.compute(bf16=False), other)
    assert "its base is " in problems[0].problem


@pytest.mark.fault(
    "an adapter smaller than the server's noise", "`windlass verify`", "the adapter is smaller than this server's noise"
)
@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_an_adapter_that_is_smaller_than_the_noise(scale: float) -> None:
    world = World(effect=0.002, kept=0.1)
    result = world.judge(world.compute(bf16=True, scale=scale))
    assert result.verdict == UNDECIDED
    assert "the adapter is smaller than this server's noise" in result.summary
    assert "serve it in float32, or merged" in result.summary
    assert world.judge(world.compute(bf16=False, scale=1.0)).verdict == APPLIED  # float32 tells
    assert world.judge(world.compute(bf16=False, scale=0.0)).verdict == AS_BASE


def test_the_share_is_that_of_the_bulk() -> None:
    world = World(effect=1.0)
    part = world.draw(1.0)
    measured = [0.63 * value for value in part]
    assert fit_slope(part, measured)[0] == pytest.approx(0.63)
    measured[:8] = [20.0] * 8
    assert fit_slope(part, measured)[0] == pytest.approx(0.63, abs=0.01)
    assert fit_slope([0.0] * TOKENS, part) == (0.0, math.inf)


@pytest.mark.parametrize("size", [0.03, 0.06, 0.6])
def test_noise_of_a_probe_in_bfloat16_is_not_taken_for_a_lost_adapter(size: float) -> None:
    """Ranks that hold shards compute the adapter's effect in bfloat16 too. What is lost is said."""
    world = World()
    true, first, second = world.draw(size), world.draw(0.06), world.draw(0.06)
    effect, served, lost = (
        [share * value + off for value, off in zip(true, noise, strict=True)]
        for share, noise in ((1.0, first), (1.0, second), (0.3, second))
    )
    assert bool(describe_served(*fit_slope(effect, served))) == (size < 0.6)  # the fault
    noise = world.draw(0.06)
    assert not describe_served(*measure_kept(effect, served, noise))
    assert describe_served(*measure_kept(effect, lost, noise))
