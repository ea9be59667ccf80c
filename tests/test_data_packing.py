"""Packed rows, their batches, order and streams: none cut, and documents isolated from their neighbours."""

import itertools
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from text_run import write_rows
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Mistral4Config,
    Mistral4ForCausalLM,
    PreTrainedTokenizerFast,
)
from trl import pack_dataset
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from windlass import tiny
from windlass.data import prepare
from windlass.data.collate import Collator, PaddedCollator, PaddedPackingCollator, PaddingFreeCollator
from windlass.data.packing import group_by_length, pack_rows, shuffle
from windlass.data.prepare import PreparedData, prepare_data
from windlass.observe.recorder import count_tokens_in
from windlass.runfile import RunFile

LENGTH, VOCABULARY = 256, 600
PACKED: dict[str, Collator] = {"end to end": PaddingFreeCollator(), "one below the other": PaddedPackingCollator(7)}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(tiny.write_tokenizer(tmp_path_factory.mktemp("tokenizer"), vocab=VOCABULARY))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts and completions of many lengths, some longer than a row."""
    path = tmp_path_factory.mktemp("rows") / "train.jsonl"
    lines = [line.strip() for name in sorted(topics) for line in topics[name].splitlines() if line.strip()]
    found = [{"prompt": " ".join(a.split()[:5]), "completion": " " + b} for a, b in itertools.pairwise(lines[:301])]
    return write_rows(path, found)


def run_file(rows: Path, **section: Any) -> RunFile:
    data = {"dataset_name_or_path": str(rows), "max_length": LENGTH, "packing": True, **section}
    train = {"output_dir": str(rows.parent / "out"), "per_device_train_batch_size": 2, "max_steps": 3}
    return RunFile.model_validate({"model": {"model_name_or_path": "unused"}, "data": data, "train": train})


@pytest.fixture(scope="module")
def packed(rows: Path, tokenizer: PreTrainedTokenizerFast) -> PreparedData:
    return prepare_data(run_file(rows), tokenizer, say=print)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 50), max_size=200))
def test_packing_keeps_all_tokens_and_fills_like_trl(lengths: list[int]) -> None:
    rows = pack_rows(lengths, 50)
    assert sorted(itertools.chain(*rows)) == list(range(len(lengths)))
    fills = sorted(sum(lengths[i] for i in row) for row in rows)
    assert all(fill <= 50 for fill in fills)
    # No two rows could be one: whatever opened the later did not fit into the earlier.
    assert len(fills) < 2 or fills[0] + fills[1] > 50
    with pytest.raises(ValueError, match=f"document {len(lengths)} has 51 tokens"):
        pack_rows([*lengths, 51], 50)
    if lengths:
        data = Dataset.from_dict({"input_ids": [[0] * length for length in lengths]})
        theirs = pack_dataset(data, 50, "bfd")["input_ids"]
        assert sorted(map(len, theirs)) == fills


def test_documents_are_complete_in_packed_rows(
    rows: Path, tokenizer: PreTrainedTokenizerFast, packed: PreparedData
) -> None:
    plain = prepare_data(run_file(rows, packing=False), tokenizer, say=print).train
    found = []
    for row in packed.train.to_pylist():
        edges = np.cumsum([0, *row["seq_lengths"]]).tolist()
        assert edges[-1] == len(row["input_ids"]) == len(row["labels"]) <= LENGTH
        found += [(row["input_ids"][a:b], row["labels"][a:b]) for a, b in itertools.pairwise(edges)]
    assert sorted(found) == sorted(zip(plain["input_ids"].to_pylist(), plain["labels"].to_pylist(), strict=True))
    ways = packed.audit["batching"]["ways"]
    assert ways["packed"]["rows"] == len(packed.train)
    assert ways["packed"]["useful_share"] > 0.95


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=4), st.booleans())
def test_batches_equal_trls(documents: list[list[int]], labelled: bool) -> None:
    """TRL's collator is the oracle, on rows with and without packed documents and labels."""
    packed = [{"input_ids": [*range(10, 10 + sum(lengths))], "seq_lengths": lengths} for lengths in documents]
    plain = [{"input_ids": row["input_ids"]} for row in packed]
    for rows in (packed, plain):
        if labelled:
            rows = [{**row, "labels": [-100, *row["input_ids"][1:]]} for row in rows]
        for ours, padding_free in ((PaddedCollator(7), False), (PaddingFreeCollator(), True)):
            batch = ours(rows)
            expected = DataCollatorForLanguageModeling(pad_token_id=7, padding_free=padding_free)(rows)
            assert batch.keys() == expected.keys()
            for name, value in expected.items():
                if isinstance(value, torch.Tensor):
                    assert (batch[name].dtype, batch[name].tolist()) == (value.dtype, value.tolist()), name
                else:
                    assert batch[name] == value, name


def small_model(family: str, attention: str) -> Any:
    """With plain attention, and with Mistral Small 4's latent attention under routed experts."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, attn_implementation=attention)).eval()
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    routed = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_key_value_heads": 4}
    config = Mistral4Config(vocab_size=VOCABULARY, **sizes, **latent, **routed, attn_implementation=attention)
    return Mistral4ForCausalLM(config).eval()


@pytest.mark.parametrize(
    ("family", "attention", "form"),
    [
        ("llama", "eager", "end to end"),
        ("mistral4", "eager", "one below the other"),
        ("mistral4", "sdpa", "end to end"),
    ],
)
def test_packed_documents_are_isolated(packed: PreparedData, family: str, attention: str, form: str) -> None:
    model = small_model(family, attention)
    rows = packed.train.to_pylist()
    several = sorted((row for row in rows if len(row["seq_lengths"]) > 2), key=lambda row: len(row["input_ids"]))
    chosen = [several[-1], several[0]]
    assert len({len(row["input_ids"]) for row in chosen}) == 2  # the shorter one is padded
    batch = PACKED[form](chosen)
    ids, (start, end) = batch["input_ids"], np.cumsum(chosen[0]["seq_lengths"])[:2]
    changed = torch.zeros_like(ids, dtype=torch.bool)
    changed[0, start:end] = True

    def change(positions: torch.Tensor, where: torch.Tensor = changed, **more: Any) -> tuple[float, float]:
        """Return how far the logits of the changed document move, and all others."""
        with torch.no_grad():
            logits = [
                model(input_ids=each, position_ids=positions, use_cache=False, **more).logits
                for each in (ids, torch.where(where, (ids + 7) % VOCABULARY, ids))
            ]
        moved = (logits[0] - logits[1]).abs().amax(-1)
        return float(moved[where].max()), float(moved[~where].max())

    inside, outside = change(batch["position_ids"])
    assert inside > 1e-2
    assert outside < 1e-5
    # The guard can fail: positions that do not restart join the documents, a mask of ones does, and the change leaks.
    assert change(torch.arange(ids.shape[1]).expand(ids.shape))[1] > 1e-3
    assert change(batch["position_ids"], attention_mask=torch.ones_like(ids))[1] > 1e-3
    padding = torch.arange(ids.shape[1]) >= torch.tensor([[len(row["input_ids"])] for row in chosen])
    if form == "one below the other":
        assert change(batch["position_ids"], padding)[1] < 1e-5


def test_stacked_rows_equal_rows_end_to_end(packed: PreparedData) -> None:
    """The losses of the same tokens are equal."""
    model, chosen = small_model("mistral4", "sdpa"), packed.train.to_pylist()[-3:]
    chosen[1] |= {"input_ids": chosen[1]["input_ids"][:2], "labels": chosen[1]["labels"][:2], "seq_lengths": [1, 1]}
    losses = []
    for collate in PACKED.values():
        batch = collate(chosen)
        inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
        with torch.no_grad():
            logits = model(**inputs, use_cache=False).logits[:, :-1]
        labels = batch["labels"][:, 1:]
        supervised = labels != -100
        losses.append(torch.nn.functional.cross_entropy(logits[supervised], labels[supervised], reduction="none"))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-5)
    counted = [count_tokens_in(collate(chosen)) for collate in PACKED.values()]
    tokens = sum(len(row["input_ids"]) for row in chosen)
    assert [one[[0, 2]].tolist() for one in counted if one is not None] == [[tokens, len(losses[0])]] * 2


def test_no_document_is_predicted_from_the_one_before() -> None:
    """Rows stacked and rows end to end: the first token of a document, and padding, have no loss."""
    rows = [
        {"input_ids": np.array([5, 6, 7, 8, 9]), "seq_lengths": [2, 3]},
        {"input_ids": np.array([3, 4]), "seq_lengths": [2]},
    ]
    stacked = PaddedPackingCollator(0)(rows)["labels"].tolist()
    assert stacked == [[-100, 6, -100, 8, 9], [-100, 4, -100, -100, -100]]
    (laid,) = PaddingFreeCollator()(rows)["labels"].tolist()
    assert laid == [-100, 6, -100, 8, 9, -100, 4]


def test_order_depends_only_on_seed_and_epoch() -> None:
    """Exactly these orders: otherwise a run resumed from an older windlass would train on other rows."""
    lengths = np.array([5, 3, 8, 1, 9, 2, 7, 6])
    assert shuffle(8, 3, 1).tolist() == [2, 1, 4, 0, 5, 7, 6, 3]
    assert group_by_length(lengths, 2, 5, 1).tolist() == [4, 2, 6, 7, 5, 3, 0, 1]


@given(st.lists(st.integers(1, 500), min_size=1, max_size=300), st.integers(1, 16), st.integers(0, 3))
def test_grouping_by_length_is_a_permutation(lengths: list[int], batch: int, epoch: int) -> None:
    order = group_by_length(np.array(lengths), batch, 0, epoch)
    assert sorted(order.tolist()) == list(range(len(lengths)))


def test_a_stream_gives_every_row_once_an_epoch_in_one_order(rows: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    streamed = prepare_data(run_file(rows, streaming=True, packing=False), tokenizer, say=print).train
    plain = prepare_data(run_file(rows, packing=False), tokenizer, say=print).train
    count = len(plain)
    first = [tuple(row["input_ids"]) for row in itertools.islice(streamed, 2 * count)]
    assert sorted(first[:count]) == sorted(first[count:]) == sorted(map(tuple, plain["input_ids"].to_pylist()))
    assert first[:count] != first[count:]  # shuffled anew
    assert [tuple(row["input_ids"]) for row in itertools.islice(streamed, count)] == first[:count]
    packed = prepare_data(run_file(rows, streaming=True), tokenizer, say=print)
    batch = packed.collator(7)(list(itertools.islice(packed.train, 2)))
    assert (batch["position_ids"] == 0).sum() > 2


def test_a_bad_row_of_a_stream_is_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the rows that are audited before training."""
    monkeypatch.setattr(prepare, "STREAM_AUDIT_ROWS", 10)
    rows: list[dict[str, Any]] = [{"text": f"One of {number} rows."} for number in range(60)]
    rows[40] = {"text": ["no", "text"]}
    path = write_rows(tmp_path / "rows.jsonl", rows)
    streamed = prepare_data(run_file(path, streaming=True, packing=False), tokenizer, say=print).train
    with refused("column-not-text", f"{path}: row 41"):
        next(iter(streamed))


def test_writing_and_reading_rows_imports_no_pandas(tmp_path: Path) -> None:
    """pandas costs half a second of every start: Arrow's own conversions import it wherever it is installed."""
    code = """
import sys
from pathlib import Path
import numpy as np
from windlass.data.packing import open_rows, to_numpy, write_rows
from windlass.data.documents import Documents
ids = np.array([0, 1, 2, 0, 1, 2, 3], np.int32)
made = Documents(ids, np.ones(7, bool), np.array([3, 4]), np.zeros(2, np.uint64))
write_rows([made], Path(sys.argv[1]), capacity=None)
chunk = open_rows(Path(sys.argv[1])).column("input_ids").chunks[0]
assert to_numpy(chunk.values).tolist() == [0, 1, 2, 0, 1, 2, 3] and to_numpy(chunk.offsets).tolist() == [0, 3, 7]
assert "pandas" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "rows.arrow")], check=True, timeout=120)
