"""Rows whose tokens several ranks share train exactly as on one rank, and planted faults at each seam show.

Ranks start slowly, so all runs of one number of ranks share one start: tests/long_row_ranks.py runs them in turn.
"""

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from test_train import WORDS, launched, write_run
from text_run import write_rows

from windlass import tiny
from windlass.data.collate import PaddedCollator, PaddedPackingCollator
from windlass.errors import SAVED
from windlass.files import read_json_lines
from windlass.plan import split_rows
from windlass.run_folder import ADAPTER, SAMPLES
from windlass.train import long_rows
from windlass.train.collate import Batch, Collate
from windlass.train.noise import add_noise


def write_family_run(folder: Path, family: str, config: dict[str, Any]) -> None:
    tiny.write_family(folder / family, family, config=config, tokenizer=True)
    train = {"max_steps": 4, "learning_rate": 0.002, "eval_strategy": "steps", "eval_steps": 2}
    write_run(
        folder / f"{family}.yaml",
        model={"model_name_or_path": f"{folder}/{family}", "torch_dtype": "float32"},
        data__val_fraction=0.05,
        data__max_length=150,
        layout={"base_dtype": "bf16"},
        **{f"train__{key}": value for key, value in train.items()},
    )


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma3_text": {"sliding_window": 24},
    "gpt_oss": {"sliding_window": 24},
    "mistral": {"sliding_window": 24},
    "mixtral": {},
    "mistral4": {},
}
# Families that are proven on two ranks alone, and what their tiny models have beside the shrunk defaults.
OTHERS = [name for name in split_rows.FAMILIES if name not in FAMILIES]
CONFIGS: dict[str, dict[str, Any]] = {name: {"sliding_window": 24} for name in ("olmo3", "cohere2", "exaone4")} | {
    "ministral": {"head_dim": 16, "sliding_window": 24},
    "qwen3_moe": {"mlp_only_layers": [0]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "seed_oss": dict.fromkeys(("dropout", "attention_dropout", "residual_dropout"), 0.0),
}


def case(family: str, ranks: int, split: int = 1, *faults: str, resume: bool = False, **rest: Any) -> dict[str, Any]:
    """Return a run of four rows a step, each of which `split` ranks share."""
    readers = ranks // split
    rest = {"train__per_device_train_batch_size": 4 // readers} | rest
    if rest.get("train__gradient_accumulation_steps"):
        rest["train__gradient_accumulation_steps"] = 4 // readers
    rest |= {"cluster__gpus_per_node": ranks, "layout__context_parallel": split}
    rest = {"layout__name": "resident"} | rest if ranks == 1 else rest
    overrides = {key.replace("__", "."): value for key, value in rest.items()}
    return {
        "file": f"{{folder}}/{family}.yaml",
        "overrides": [f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in overrides.items()],
        "faults": faults,
        "resume": resume,
    }


PACKED: dict[str, Any] = {"data__packing": True}
RESIDENT: dict[str, Any] = {"layout__name": "resident"}
CHECKPOINTING: dict[str, Any] = {"train__gradient_checkpointing": True}
SPLIT: dict[str, Any] = {"layout__name": "expert-parallel", "layout__expert_parallel": 2}
BALANCED: dict[str, Any] = {"train__router_aux_loss_coef": 0.5}
MICRO: dict[str, Any] = {"train__per_device_train_batch_size": 1, "train__gradient_accumulation_steps": 4}
# What two ranks of one group train as one rank does: in every run of the tests.
SHORT: dict[str, dict[str, Any]] = {
    "llama": {"train__sample": {"prompts": ["anchor bark", "cable"], "max_new_tokens": 4}},
    "llama packed": {**PACKED, **RESIDENT, **CHECKPOINTING},
    "mixtral packed": {**PACKED, **SPLIT, **BALANCED, **CHECKPOINTING, **MICRO},
}
SAVING: dict[str, Any] = {"train__save_strategy": "steps", "train__save_steps": 3, "lora__lora_dropout": 0.1}
# What groups of two and four ranks train as one rank does: by `make prove`.
MORE: dict[str, dict[str, Any]] = {
    "llama accumulated": MICRO,
    "qwen3 packed": PACKED,
    "gemma3_text": {**RESIDENT, **CHECKPOINTING},
    "gemma3_text packed": PACKED,
    "gpt_oss": {**SPLIT, **CHECKPOINTING},
    "mistral packed": PACKED,
    "mixtral": {**BALANCED, **MICRO},
    "mixtral packed": {**PACKED, **SPLIT, "train__gradient_checkpointing": "selective"},
    "mistral4": {**SPLIT, **CHECKPOINTING},
    "mistral4 packed": {**PACKED, **RESIDENT},
}
OFFLOADED: dict[str, Any] = {"train__offload_activations": True, "lora__lora_dropout": 0.1, **CHECKPOINTING}
# What is bit-equal with layer inputs in host memory.
INPUTS: dict[str, dict[str, Any]] = {
    "llama packed": {**PACKED, **OFFLOADED},
    "gemma3_text": {**RESIDENT, **OFFLOADED},
}
FAULTS: dict[str, str] = {  # and the run that they are planted in
    "label lost": "llama",
    "gradient twice": "llama",
    "positions restart": "llama packed",
    "documents mixed": "llama packed",
}
STOPPED: dict[str, Any] = {**PACKED, **SAVING, "train__max_steps": 6}


def on_ranks(ranks: int, split: int, cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: case(name.split()[0], ranks, split, **settings) for name, settings in cases.items()}


def on_one_rank(cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the same runs on one rank."""
    return {
        name: case(name.split()[0], 1, **{key: value for key, value in settings.items() if "layout" not in key})
        for name, settings in cases.items()
    }


# --- the cut, and who sees whom ---


LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=12)


@given(LENGTHS, st.integers(2, 4), st.none() | st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_spans_are_what_a_full_mask_shows(lengths: list[int], ranks: int, window: int | None) -> None:
    """Documents, sliding windows and padding: the masks of all ranks' spans, put together."""
    positions = np.concatenate([np.arange(length) for length in lengths])
    positions = np.pad(positions, (0, -len(positions) % (2 * ranks)))
    documents = long_rows._find_documents(positions)
    number = torch.from_numpy(np.cumsum(np.diff(positions, prepend=-1) != 1))
    place = torch.arange(len(positions))
    expected = (number[:, None] == number) & (place <= place[:, None])
    if window:
        expected &= place > place[:, None] - window
    found = torch.zeros_like(expected)
    for rank in range(ranks):
        row = long_rows.RowPieces((documents,), long_rows.Cut(ranks, rank).pieces(len(positions)))
        mask = long_rows.Mask(None, row, window)  # type: ignore[arg-type]
        for span in mask.spans(documents, 3):
            shown = mask.scores(span, 2, torch.zeros(0)) == 0
            assert torch.equal(*shown.chunk(2))  # of two heads that share keys
            found[span.stop - span.queries : span.stop, span.first_key : span.stop] |= shown.chunk(2)[0]
    assert torch.equal(found, expected)


def list_targets(batch: Batch) -> Iterator[tuple[int, int, int]]:
    """Yield the token at each supervised position, its target and its data set."""
    assert batch.sources is not None
    tokens = batch.inputs["input_ids"].flatten()[batch.inputs["supervised"]]
    yield from zip(tokens.tolist(), batch.targets.tolist(), batch.sources.tolist(), strict=True)


@given(LENGTHS, st.integers(2, 4), st.booleans())
@settings(max_examples=60, deadline=None)
def test_each_token_and_target_is_on_one_rank(lengths: list[int], ranks: int, packed: bool) -> None:
    ids = itertools.count(1)
    rows: list[dict[str, Any]] = []
    for number, length in enumerate(lengths):
        row = np.fromiter(ids, np.int64, length)
        rows.append({"input_ids": row, "labels": row, "row": number, "seq_lengths": [length], "source": [number % 2]})
    if packed:
        whole = np.concatenate([row["input_ids"] for row in rows])
        rows = [{**rows[0], "input_ids": whole, "labels": whole, "seq_lengths": lengths}]
    collator = (PaddedPackingCollator if packed else PaddedCollator)(0)
    uncut = Collate(collator, mark_tokens=True)(rows)
    parts = [Collate(collator, mark_tokens=True, cut=long_rows.Cut(ranks, rank))(rows) for rank in range(ranks)]
    assert sorted(target for part in parts for target in list_targets(part)) == sorted(list_targets(uncut))
    assert sum(part.tokens for part in parts) == uncut.tokens == sum(lengths)
    assert sum(part.collated["sequences"] for part in parts) == len(rows)  # counted once
    assert sum(part.supervised for part in parts) == uncut.supervised
    assert sum(part.collated["counts"] for part in parts)[::2].tolist() == uncut.collated["counts"][::2].tolist()
    assert len({part.inputs["input_ids"].shape for part in parts}) == 1
    for part in parts:
        assert part.mask is not None
        marked = part.inputs["input_ids"][part.mask.bool()]
        assert bool((marked > 0).all())


# --- whole runs ---


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models and rows of very different lengths."""
    folder = tmp_path_factory.mktemp("long")
    for family, config in FAMILIES.items():
        write_family_run(folder, family, config)
    chance = random.Random(0)
    texts = [" ".join(chance.choices(WORDS.split(), k=chance.randint(3, 30))) for _ in range(120)]
    (folder / "data").mkdir()
    write_rows(folder / "data" / "train.jsonl", ({"text": text} for text in texts))
    return folder


NUMBERS = itertools.count()  # of folders


class Runs:
    """Outcomes of cases on one number of ranks."""

    def __init__(self, material: Path, ranks: int, cases: dict[str, dict[str, Any]]) -> None:
        found = launched(material, ranks, cases, f"{next(NUMBERS)} ", "long_row_ranks.py")
        self.folder, self.outcomes = found.folder, found.ranks[0]
        for name, outcome in self.outcomes.items():
            assert "error" not in outcome, (name, outcome)

    def lines(self, name: str, kind: str = "loss") -> list[dict[str, Any]]:
        file = "steps-rank0.jsonl" if kind == "loss" else "events.jsonl"
        return [line for line in read_json_lines(self.folder / name / file) if kind in line]

    def gradients(self, name: str) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = torch.load(self.folder / name / "gradients.pt")
        return found


def difference(found: Runs, expected: Runs, name: str, reference: str) -> float:
    """Return the largest difference of a first gradient, as a share of its norm."""
    gradients = found.gradients(name)
    references = expected.gradients(reference)
    assert gradients.keys() == references.keys() != set()
    scale = torch.stack([gradient.norm() for gradient in references.values()]).norm()
    return float(max((gradients[name] - references[name]).abs().max() for name in gradients) / scale)


def assert_equal(found: Runs, expected: Runs, name: str, reference: str, steps: int = 4) -> None:
    lines = found.lines(name)
    references = expected.lines(reference)
    assert len(lines) == len(references) == steps
    for step, other in zip(lines, references, strict=True):
        for key in ("loss", "grad_norm"):
            assert step[key] == pytest.approx(other[key], rel=1e-6), (name, step, other)
        assert step["job_tokens"] == other["job_tokens"]
    evaluations = [line["eval_loss"] for line in found.lines(name, "eval_loss")]
    others = [line["eval_loss"] for line in expected.lines(reference, "eval_loss")]
    assert others
    assert evaluations == pytest.approx(others, rel=1e-6), name


@pytest.fixture(scope="session")
def one(material: Path) -> Runs:
    return Runs(material, 1, on_one_rank(SHORT))


@pytest.fixture(scope="session")
def two(material: Path) -> Runs:
    in_two: dict[str, Any] = {**STOPPED, "train__output_dir": "{out}/in two"}
    faulty = {fault: case("llama", 2, 2, fault, **{**SHORT[of], "train__sample": None}) for fault, of in FAULTS.items()}
    cases = {
        "whole": case("llama", 2, 2, **STOPPED),
        "stopped": case("llama", 2, 2, "terminate 4", **in_two),
        "resumed": case("llama", 2, 2, resume=True, **in_two),
    }
    return Runs(material, 2, on_ranks(2, 2, SHORT) | faulty | cases)


@pytest.mark.long
@pytest.mark.parametrize("name", SHORT)
def test_two_ranks_equal_one(one: Runs, two: Runs, name: str) -> None:
    assert_equal(two, one, name, name)
    if "mixtral" not in name:  # whose experts are split over the ranks
        assert difference(two, one, name, name) < 1e-6


@pytest.mark.long
def test_samples_are_those_of_one_rank(one: Runs, two: Runs) -> None:
    """Continued without a cut."""
    texts = [[line["text"] for line in read_json_lines(runs.folder / "llama" / SAMPLES)] for runs in (one, two)]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 2 * len(one.lines("llama", "eval_loss"))


def test_each_rank_of_a_group_drops_other_values_of_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    group: Any = None
    masks = []
    for rank in (2, 3):
        monkeypatch.setattr("torch.distributed.get_rank", lambda rank=rank: rank)
        long_rows.RowGroup(2, group).draw_apart(7)
        masks.append(torch.nn.functional.dropout(torch.ones(64)))
    assert not torch.equal(*masks)


def test_the_product_of_a_query_and_its_sink_is_the_heads_sink() -> None:
    """At a scaling that is not the usual one of the width."""
    query, sinks = torch.randn(2, 6, 5, 16), torch.randn(6)
    wider, keys = long_rows.add_sinks(query, sinks, 3, 0.3)
    scores = wider @ keys.mT.repeat_interleave(3, 1) * 0.3  # 2 groups of 3 heads
    torch.testing.assert_close(scores, sinks[None, :, None, None].expand_as(scores))
    assert torch.equal(wider[..., :16], query)


def test_noise_of_a_part_is_as_large_as_of_the_row() -> None:
    embeddings = torch.nn.Embedding(8, 16)
    torch.nn.init.zeros_(embeddings.weight)
    for ranks, tokens in ((1, 4096), (4, 1024)):
        handle = embeddings.register_forward_hook(add_noise(5.0, ranks))
        assert float(embeddings(torch.zeros(1, tokens, dtype=torch.int64)).detach().abs().max()) == pytest.approx(
            5 / 256, 1e-2
        )
        handle.remove()


@pytest.mark.long
def test_planted_faults_show(one: Runs, two: Runs) -> None:
    for fault, name in FAULTS.items():
        with pytest.raises(AssertionError):
            assert_equal(two, one, fault, name)


@pytest.mark.long
def test_a_resumed_run_is_bit_equal(two: Runs) -> None:
    """With dropout, whose masks differ between the ranks of a group."""
    assert [two.outcomes[name]["code"] for name in ("whole", "stopped", "resumed")] == [0, SAVED, 0]
    whole, resumed = (load_file(two.folder / name / "final" / ADAPTER) for name in ("whole", "in two"))
    assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())


@pytest.mark.long
def test_layer_inputs_in_host_memory_change_no_bit(material: Path) -> None:
    """With dropout. A planted fault, which changes the first gradient, shows that they do come from there."""

    def cases(way: str, *faults: str, **changes: Any) -> dict[str, dict[str, Any]]:
        return {
            f"{name} {way}": case(name.split()[0], 1, 1, *faults, **{**of, **changes}) for name, of in INPUTS.items()
        }

    one_step: dict[str, Any] = {"train__max_steps": 1, "train__eval_strategy": "no"}
    kept, sent = cases("kept", train__offload_activations=False), cases("sent")
    runs = Runs(material, 1, {**kept, **sent, **cases("faulty", "another token's input", **one_step)})
    for name, other in zip(sent, kept, strict=True):
        steps, others = runs.lines(name), runs.lines(other)
        assert len(steps) == len(others) == 4
        for step, expected in zip(steps, others, strict=True):
            assert all(step[key] == expected[key] for key in ("loss", "grad_norm", "job_tokens")), (
                name,
                step,
                expected,
            )
        losses = [[line["eval_loss"] for line in runs.lines(run, "eval_loss")] for run in (name, other)]
        assert losses[0] == losses[1] != []
        gradients = runs.gradients(other)
        assert all(torch.equal(gradients[key], gradient) for key, gradient in runs.gradients(name).items())
        step, *_ = runs.lines(name.replace("sent", "faulty"))
        assert step["grad_norm"] != others[0]["grad_norm"]


@pytest.mark.prove
@pytest.mark.timeout(1800)
def test_two_groups_of_two_ranks_equal_one_rank(material: Path) -> None:
    alone, found = Runs(material, 1, on_one_rank(MORE)), Runs(material, 4, on_ranks(4, 2, MORE))
    for name in MORE:
        assert_equal(found, alone, name, name)
        if found.gradients(name):  # none is compared of experts that are split over the ranks
            assert difference(found, alone, name, name) < 1e-6


@pytest.mark.prove
@pytest.mark.timeout(1800)
def test_every_other_family_equals_one_rank(material: Path) -> None:
    for name in OTHERS:
        write_family_run(material, name, CONFIGS.get(name, {}))
    settings = {name: {**PACKED, **RESIDENT, **CHECKPOINTING, "train__max_steps": 2} for name in OTHERS}
    alone, found = Runs(material, 1, on_one_rank(settings)), Runs(material, 2, on_ranks(2, 2, settings))
    for name in OTHERS:
        assert_equal(found, alone, name, name, steps=2)
        assert difference(found, alone, name, name) < 1e-6


@pytest.mark.prove
def test_the_first_gradient_differs_by_rounding_only(material: Path) -> None:
    """In float64 nothing is left: a wrong term would be."""
    name = "gemma3_text"  # torch's products of experts have no float64
    settings = {**PACKED, **RESIDENT, "train__max_steps": 1, "train__eval_strategy": "no"}

    def start(ranks: int) -> Runs:
        of = case(name, ranks, ranks, "double", **settings)
        of["overrides"].append("train.gradient_accumulation_steps=16")  # over more rows less is left
        return Runs(material, ranks, {name: of})

    alone = start(1)
    assert difference(start(4), alone, name, name) < 1e-12
