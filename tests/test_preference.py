"""Losses of pairs against the papers' formulas and TRL's functions; the reference and its guards."""

import json
import math
from contextlib import nullcontext
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refused
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy, logsigmoid

from windlass.best import find_first_adapter
from windlass.data.cache import hash_file
from windlass.data.collate import PaddingFreeCollator, PairCollator
from windlass.files import read_json, write_json
from windlass.observe.steps import IGNORED
from windlass.run_folder import ADAPTER, ADAPTER_CONFIG, REFERENCE, begin_manifest
from windlass.runfile import Lora
from windlass.runfile.objectives import Dpo, Orpo
from windlass.train.collate import ROW
from windlass.train.head import LogitShaping, TargetLogProbs
from windlass.train.pairs import PairCollate
from windlass.train.preference import PairAnswers, dpo_loss, orpo_loss
from windlass.train.reference import describe_reference, read_reference, require_finite, require_first_adapter
from windlass.train.run import find_base_figures


def answers(count: int = 5) -> PairAnswers:
    torch.manual_seed(0)
    lengths = torch.randint(3, 40, (count, 2))
    reference = -torch.rand(count, 2, dtype=torch.float64) * 3 * lengths
    moved = torch.randn(count, 2, dtype=torch.float64)
    return PairAnswers((reference + moved).clamp(max=-0.1).requires_grad_(), lengths, reference)


def test_flipped_labels_are_corrected_for_without_bias() -> None:
    """The mean over labels that are flipped at that rate is the loss of the true ones."""
    given = answers()
    flipped = PairAnswers(*(each.flip(1) for each in given))
    smoothed = Dpo(beta=0.3, label_smoothing=0.2)
    mean = 0.8 * dpo_loss(smoothed, given).losses + 0.2 * dpo_loss(smoothed, flipped).losses
    torch.testing.assert_close(mean, dpo_loss(Dpo(beta=0.3), given).losses)


def test_ipo_and_length_normalized_scores_are_per_token() -> None:
    given = answers()
    per_token = (given.logps - given.reference) / given.lengths
    margin = per_token[:, 0] - per_token[:, 1]
    torch.testing.assert_close(dpo_loss(Dpo(beta=0.3, loss="ipo"), given).losses, (margin - 1 / 0.6) ** 2)
    normalized = dpo_loss(Dpo(beta=0.3, length_normalized=True), given).losses
    torch.testing.assert_close(normalized, -logsigmoid(0.3 * margin))


def test_weight_of_the_chosen_answers_own_loss() -> None:
    given = answers()
    added = dpo_loss(Dpo(sft_weight=0.5), given).losses - dpo_loss(Dpo(), given).losses
    torch.testing.assert_close(added, -0.5 * given.logps[:, 0] / given.lengths[:, 0])


@pytest.mark.parametrize("value", [-1e-12, -0.5, -60.0])
def test_odds_are_exact_near_certainty_and_far_from_it(value: float) -> None:
    """log(1 - p) of p = exp(value), and its gradient -1 / (exp(-value) - 1)."""
    means = torch.tensor([[value, -1.0]], dtype=torch.float64, requires_grad=True)
    loss = orpo_loss(Orpo(beta=1.0), PairAnswers(means, torch.ones(1, 2), means)).losses.sum()
    loss.backward()  # type: ignore[no-untyped-call]
    odds = value - math.log(-math.expm1(value))
    difference = odds - (-1 - math.log1p(-math.exp(-1)))
    assert loss.item() == pytest.approx(-value + math.log1p(math.exp(-difference)), rel=1e-12)
    assert means.grad is not None
    slope = 1 + 1 / math.expm1(-value)
    assert means.grad[0, 0].item() == pytest.approx(-1 - slope / (1 + math.exp(difference)), rel=1e-9)


@pytest.mark.parametrize("shaping", [LogitShaping(), LogitShaping(scale=0.25, cap=3.0)])
def test_each_tokens_loss_has_its_own_factor_in_the_gradient(shaping: LogitShaping) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(700, 8, requires_grad=True)  # several chunks
    weight = torch.randn(300, 8, requires_grad=True)
    targets = torch.randint(300, (700,))
    factors = torch.randn(700)
    log_probs: torch.Tensor = TargetLogProbs.apply(hidden, weight, targets, shaping)  # type: ignore[no-untyped-call]
    (log_probs * factors).sum().backward()  # type: ignore[no-untyped-call]
    plain, head = (each.detach().clone().requires_grad_() for each in (hidden, weight))
    logits = plain @ head.T * shaping.scale
    if shaping.cap is not None:
        logits = shaping.cap * torch.tanh(logits / shaping.cap)
    expected = -cross_entropy(logits, targets, reduction="none")
    (expected * factors).sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(log_probs, expected)
    torch.testing.assert_close(hidden.grad, plain.grad)
    torch.testing.assert_close(weight.grad, head.grad, rtol=1e-4, atol=1e-5)


def pair(number: int, chosen: int, rejected: int, prompt: int = 2) -> dict[str, Any]:
    """Return a row of a pair whose answers have so many tokens."""
    lengths = [prompt + chosen, prompt + rejected]
    ids = np.arange(1, sum(lengths) + 1, dtype=np.int32) + 100 * number
    labels = ids.copy()
    for start in (0, lengths[0]):
        ids[start : start + prompt] = ids[:prompt]
        labels[start : start + prompt] = IGNORED
    return {"input_ids": ids, "labels": labels, "seq_lengths": np.array(lengths, np.int32), ROW: number}


def test_padded_and_padding_free_pairs_have_the_same_answers() -> None:
    rows = [pair(3, 4, 1), pair(0, 2, 5), PairCollate.fill]
    table = torch.arange(8.0).view(4, 2)
    padded, free = (
        PairCollate(collator, reference=table)(rows) for collator in (PairCollator(0), PaddingFreeCollator())
    )
    assert padded.pairs is not None
    assert free.pairs is not None
    assert padded.inputs["input_ids"].shape == (6, 7)
    for batch in (padded, free):
        pairs = batch.pairs
        assert pairs is not None
        assert (batch.rows, batch.supervised, batch.tokens) == ([3, 0], 2, 9 + 11)
        assert pairs.lengths.tolist() == [4, 1, 2, 5, 0, 0]
        assert batch.sequences.tolist() == pairs.sequences.tolist()
        assert pairs.sequences.tolist() == [0] * 4 + [1] + [2] * 2 + [3] * 5
        assert pairs.reference.tolist()[:4] == [6.0, 7.0, 0.0, 1.0]
    assert (
        padded.targets.tolist()
        == free.targets.tolist()
        == [
            *(303, 304, 305, 306),  # the chosen answer behind a prompt of two tokens
            309,
            *(3, 4),
            *(7, 8, 9, 10, 11),
        ]
    )


@pytest.mark.fault("half a pair among the rows of a rank", "`windlass train`", "row 3 is no pair")
def test_half_a_pair_is_no_batch() -> None:
    half = {key: value if key == ROW else value[:6] for key, value in pair(3, 4, 1).items()}
    half["seq_lengths"] = np.array([6], np.int32)
    with pytest.raises(AssertionError, match="row 3 is no pair"):
        PairCollate(PaddingFreeCollator())([half])
    silent = pair(3, 4, 1)
    silent["labels"][6:] = IGNORED
    with pytest.raises(AssertionError, match="row 3 has an answer without a token"):
        PairCollate(PaddingFreeCollator())([silent])


@pytest.mark.fault("prompt tokens in the loss of a pair", "`windlass train`", "row 3 has loss on tokens of its prompt")
@pytest.mark.parametrize("places", [[1], [7], [0, 1, 6, 7], [0, 1, 2, 6]])
def test_prompts_have_no_loss(places: list[int]) -> None:
    row = pair(3, 4, 1)  # prompts at 0 and 6
    PairCollate(PairCollator(0))([row])
    row["labels"][places] = row["input_ids"][places]
    with pytest.raises(AssertionError, match="row 3 has loss on tokens of its prompt"):
        PairCollate(PairCollator(0))([row])
    other = pair(3, 4, 1, prompt=1)  # without a prompt the first tokens are the answers'
    other["input_ids"][0] = 9
    PairCollate(PairCollator(0))([other])
    other = pair(3, 4, 1, prompt=3)
    other["input_ids"][1] = 9
    with pytest.raises(AssertionError, match="row 3 has loss on tokens of its prompt"):
        PairCollate(PairCollator(0))([other])
    del row["labels"]
    with pytest.raises(AssertionError, match="row 3 has loss on tokens of its prompt"):
        PairCollate(PairCollator(0))([row])


def plan_with(adapter: Path | None) -> Any:
    run = SimpleNamespace(
        lora=Lora(adapter=str(adapter) if adapter else None),
        train=SimpleNamespace(in_bf16=True),
        model=SimpleNamespace(torch_dtype="bfloat16", attn_implementation=None),
        objective=SimpleNamespace(of_pairs=True),
    )
    base = SimpleNamespace(family=SimpleNamespace(usual_attention="sdpa"))
    return SimpleNamespace(run=run, base=base, layout=SimpleNamespace(base_dtype="nf4", is_sharded=False))


def read(
    path: Path, identity: dict[str, str], adapter: Path | None, resumed: Path | None, said: list[str], **more: bool
) -> dict[str, torch.Tensor]:
    allowed = {"allow_other_base": False, **more}
    return read_reference(path, identity, plan_with(adapter), resumed=resumed, say=said.append, **allowed)


@pytest.mark.fault("a damaged reference of a run's pairs", "`windlass train --resume`", "is damaged")
def test_a_damaged_reference_is_computed_again_where_it_can_be(tmp_path: Path) -> None:
    path = tmp_path / "reference.safetensors"
    path.write_bytes(b"cut off")
    said: list[str] = []
    for resumed, adapter in ((None, None), (None, tmp_path), (tmp_path, None)):
        assert read(path, {}, adapter, resumed, said) == {}
    assert said == [f"reference {path} is damaged: it is computed again"] * 3
    with refused("no-reference", "reference.safetensors") as problems:
        read(path, {}, tmp_path, tmp_path, said)
    assert "is damaged" in problems[0].problem


FACTS: dict[str, Any] = {"base_digest": "b", "base_config": {"rope_theta": 1e4}, "data": "d"}


@pytest.mark.fault(
    "another attention before the first step of a run on pairs",
    "`windlass train`",
    "another attention implementation",
)
@pytest.mark.parametrize(
    ("changed", "value", "says"),
    [
        ("layout.base_dtype", "bf16", "other dtypes"),
        ("run.model.torch_dtype", "float32", "other dtypes"),
        ("run.train.in_bf16", False, "other dtypes"),
        ("run.model.attn_implementation", "eager", "another attention implementation"),
        ("run.lora", Lora(dtype="bfloat16"), "another dtype or initialization of the adapter"),
        ("run.lora", Lora(init_lora_weights="pissa"), "another dtype or initialization of the adapter"),
        ("base_digest", "c", "another base"),
        ("base_config", {"rope_theta": 1e6}, "another config.json"),
        ("data", "e", "other rows"),
    ],
)
def test_whatever_changes_a_forward_makes_another_reference(
    changed: str, value: Any, says: str, tmp_path: Path
) -> None:
    """Of a run that was stopped while its reference was computed: no checkpoint says what it was begun with."""
    path = tmp_path / "reference.safetensors"
    plan = plan_with(None)
    save_file({"train": torch.zeros(2, 2)}, path, {"identity": json.dumps(describe_reference(plan, FACTS))})
    said: list[str] = []
    assert read(path, describe_reference(plan, FACTS), None, None, said).keys() == {"train"}
    owner, _, name = changed.rpartition(".")
    if owner:
        setattr(attrgetter(owner)(plan), name, value)
    assert read(path, describe_reference(plan, FACTS | ({} if owner else {name: value})), None, None, said) == {}
    assert said == [f"reference {path} is of {says}: it is computed again"]


def test_shards_make_another_reference_only_if_gathering_rounds_them() -> None:
    for dtype, same in (("bfloat16", True), ("float32", False)):
        plan = plan_with(None)
        plan.run.model.torch_dtype = dtype
        plan.run.train.in_bf16 = True
        resident = describe_reference(plan, FACTS)
        plan.layout.is_sharded = True
        assert (describe_reference(plan, FACTS) == resident) is same


def test_figures_of_the_base_are_of_the_same_forward() -> None:
    """They are kept over resumes, too, and a sweep's are those of all its trials."""
    plans = [plan_with(None) for _ in range(2)]
    for plan in plans:
        plan.run.objective = SimpleNamespace(of_pairs=False, has_reference=False)
        plan.run.train.objective = "sft"
        plan.folder = Path()
    plans[1].run.model.attn_implementation = "eager"
    data: Any = SimpleNamespace(audit={"row_hashes": {"validation": "v"}}, evaluated=())
    figures = [
        find_base_figures(plan, SimpleNamespace(around=None), data, facts, lambda _: nullcontext())  # type: ignore[arg-type]
        for plan in plans
        for facts in (FACTS, FACTS | {"base_config": {"rope_theta": 1e6}})
    ]
    assert len({each.identity for each in figures if each}) == 4


def test_only_the_base_of_a_reference_may_be_another_at_the_resume(tmp_path: Path) -> None:
    path = tmp_path / "reference.safetensors"
    written = describe_reference(plan_with(None), FACTS)
    save_file({"train": torch.zeros(2, 2)}, path, {"identity": json.dumps(written)})
    said: list[str] = []
    assert read(path, written, None, tmp_path, said).keys() == {"train"}
    assert said == []
    assert read(path, {**written, "precision": "sharded"}, None, tmp_path, said) == {}
    assert said.pop().startswith(f"reference {path} is of other dtypes: it is computed again")
    for other in ({"base": "c"}, {"config": "c"}, {"base": "c", "config": "c", "precision": "sharded"}):
        assert read(path, {**written, **other}, None, tmp_path, said, allow_other_base=True) == {}
        assert "under the adapter that the run began with on this base" in said.pop()
    for other in ({"rows": "e"}, {"adapter": "a"}, {"base": "c", "rows": "e"}, {"attention": "eager"}):
        with refused("other-reference", "reference.safetensors"):
            read(path, {**written, **other}, None, tmp_path, said, allow_other_base=True)


def test_a_resumed_run_may_have_another_adapter_in_its_file_and_began_with_the_first(tmp_path: Path) -> None:
    """The checkpoint has its adapter, and the tables the reference: neither depends on lora.adapter any more."""
    path = tmp_path / "reference.safetensors"
    first, second = (write_adapter(tmp_path / name, name) for name in ("first", "second"))
    identity = describe_reference(plan_with(first), FACTS)
    for unnamed in ("", "lora"):  # a file that doesn't name the dtype is of float32
        kept = {name: value for name, value in identity.items() if name != unnamed}
        save_file({"train": torch.zeros(2, 2)}, path, {"identity": json.dumps(kept)})
        said: list[str] = []
        other = describe_reference(plan_with(second), FACTS)
        assert read(path, other, second, tmp_path, said).keys() == {"train"}
        assert read(path, identity, first, None, said).keys() == {"train"}
        assert said == []
        assert read(path, other, second, None, said) == {}
        assert said == [f"reference {path} is of another adapter to begin with: it is computed again"]
    with refused("other-reference", "reference.safetensors"):  # without it, missing pairs would be of the base
        read(path, describe_reference(plan_with(None), FACTS), None, tmp_path, said)


def write_adapter(folder: Path, weights: str) -> Path:
    folder.mkdir()
    (folder / ADAPTER).write_text(weights)
    write_json(folder / ADAPTER_CONFIG, {"r": 4, "base_model_name_or_path": "base", "peft_version": "0.19"})
    return folder


def test_an_adapter_is_the_same_under_another_name_of_its_base(tmp_path: Path) -> None:
    given = write_adapter(tmp_path / "first", "weights")
    (tmp_path / "run").mkdir()
    file, config = tmp_path / "run" / REFERENCE, given / ADAPTER_CONFIG
    identity = describe_reference(plan_with(given), FACTS)
    bytewise = f"{hash_file(given / ADAPTER)} {hash_file(config)}"  # as an older windlass wrote it
    for then in (identity, {**identity, "adapter": bytewise}):
        save_file({"train": torch.zeros(2, 2)}, file, {"identity": json.dumps(then)})
        assert require_first_adapter(file.parent, str(given)) == given
        assert read(file, identity, given, None, []).keys() == {"train"}
    save_file({"train": torch.zeros(2, 2)}, file, {"identity": json.dumps(identity)})
    write_json(config, read_json(config) | {"base_model_name_or_path": "/moved", "peft_version": "0.20"})
    assert require_first_adapter(file.parent, str(given)) == given
    write_json(config, read_json(config) | {"r": 8})
    with refused("other-reference", str(given)):
        require_first_adapter(file.parent, str(given))


@pytest.mark.fault(
    "an adapter that was trained again since a run on pairs began with it",
    "`windlass best`",
    "is not the adapter that … began with",
)
def test_the_adapter_that_a_run_began_with_is_known_by_its_hash(tmp_path: Path) -> None:
    given, run = tmp_path / "first", tmp_path / "second"
    for folder in (given, run):
        folder.mkdir()
    for name in (ADAPTER, ADAPTER_CONFIG):
        (given / name).write_text("{}")
    begin_manifest(run, {"run": {"lora": {"adapter": str(given)}}})
    with refused("other-reference", str(given)) as problems:
        find_first_adapter(run)
    assert "nothing says whether" in problems[0].problem
    with refused("no-reference", "gone"):
        begin_manifest(tmp_path, {"run": {"lora": {"adapter": "gone"}}})
        find_first_adapter(tmp_path)
    identity = describe_reference(plan_with(given), FACTS)
    save_file({"train": torch.zeros(2, 2)}, run / REFERENCE, {"identity": json.dumps(identity)})
    assert find_first_adapter(run) == given
    (given / ADAPTER).write_text("trained again")
    with refused("other-reference", str(given)) as problems:
        find_first_adapter(run)
    assert problems[0].problem.startswith("is not the adapter that ")
    assert "began with" in problems[0].problem


@pytest.mark.fault("a base whose answers have no probability", "`windlass train`", "train pair 2: a log-probability")
def test_a_reference_is_finite(tmp_path: Path) -> None:
    table = torch.zeros(3, 2)
    require_finite(table, "train", tmp_path)
    table[1, 1] = math.nan
    table[2, 0] = -math.inf
    with refused("not-finite", str(tmp_path)) as problems:
        require_finite(table, "train", tmp_path)
    assert "train pair 2: a log-probability" in problems[0].problem
    assert "2 of 3 pairs" in problems[0].problem
