"""Packed rows: as few as can be, none cut, and no document knows of its neighbours."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Mistral4Config,
    Mistral4ForCausalLM,
    PreTrainedTokenizerFast,
)
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from windlass import tiny
from windlass.data.collate import PaddedCollator, PaddedPackingCollator, PaddingFreeCollator
from windlass.data.order import length_grouped
from windlass.data.packing import pack
from windlass.data.prepare import Prepared, prepare
from windlass.errors import UserError
from windlass.observe.recorder import token_counts
from windlass.runfile import RunFile

LENGTH = 256
VOCABULARY = 600


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(tiny.write_tokenizer(tmp_path_factory.mktemp("tokenizer"), vocab=VOCABULARY))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts and completions of many lengths, some longer than a row."""
    path = tmp_path_factory.mktemp("rows") / "train.jsonl"
    lines = [line.strip() for name in sorted(topics) for line in topics[name].splitlines() if line.strip()]
    found = [{"prompt": " ".join(a.split()[:5]), "completion": " " + b} for a, b in itertools.pairwise(lines[:301])]
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return path


def run_file(rows: Path, **section: Any) -> RunFile:
    return RunFile.model_validate(
        {
            "model": {"model_name_or_path": "unused"},
            "data": {"dataset_name_or_path": str(rows), "max_length": LENGTH, "packing": True, **section},
            "train": {"output_dir": str(rows.parent / "out"), "per_device_train_batch_size": 2, "max_steps": 3},
        }
    )


@pytest.fixture(scope="module")
def packed(rows: Path, tokenizer: PreTrainedTokenizerFast) -> Prepared:
    return prepare(run_file(rows), tokenizer)


@given(st.lists(st.integers(1, 50), max_size=200))
def test_packing_loses_nothing_and_overfills_nothing(lengths: list[int]) -> None:
    rows = pack(lengths, 50)
    assert sorted(itertools.chain(*rows)) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= 50 for row in rows)
    # No two rows could be one: whatever opened the later did not fit into the earlier.
    fills = sorted(sum(lengths[i] for i in row) for row in rows)
    assert len(fills) < 2 or fills[0] + fills[1] > 50
    assert pack(lengths, 50) == rows


def test_packing_takes_the_tightest_fit() -> None:
    assert pack([6, 5, 4, 5], 10) == [[0, 2], [1, 3]]
    assert pack([7, 8, 2, 3], 10) == [[0, 3], [1, 2]]
    with pytest.raises(ValueError, match="document 1 has 11 tokens"):
        pack([3, 11], 10)


def test_documents_are_whole_in_packs(rows: Path, tokenizer: PreTrainedTokenizerFast, packed: Prepared) -> None:
    apart = prepare(run_file(rows, packing=False), tokenizer)
    whole = sorted(zip(apart.train["input_ids"], apart.train["labels"], strict=True))
    found = []
    for row in packed.train:
        edges = np.cumsum([0, *row["seq_lengths"]]).tolist()
        assert edges[-1] == len(row["input_ids"]) == len(row["labels"]) <= LENGTH
        found += [(row["input_ids"][a:b], row["labels"][a:b]) for a, b in itertools.pairwise(edges)]
    assert sorted(found) == whole
    ways = packed.audit["batching"]["ways"]
    assert ways["packed"]["rows"] == len(packed.train)
    assert ways["packed"]["useful_share"] > 0.95 > ways["padded in random batches"]["useful_share"]


def small_model(family: str, attention: str) -> Any:
    """Plain attention, and Mistral Small 4's: latent attention under routed experts."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, attn_implementation=attention)).eval()
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    routed = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_key_value_heads": 4}
    settings = Mistral4Config(vocab_size=VOCABULARY, **sizes, **latent, **routed, attn_implementation=attention)
    return Mistral4ForCausalLM(settings).eval()


def laid(rows: list[dict[str, Any]], form: str) -> dict[str, Any]:
    """End to end in one row, or one below the other and the shorter filled up."""
    collate = (
        PaddedPackingCollator(7)
        if form == "apart"
        else DataCollatorForLanguageModeling(pad_token_id=7, padding_free=True)
    )
    made: dict[str, Any] = collate(rows)
    return made


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=4), st.booleans())
def test_batches_are_those_of_trl(documents: list[list[int]], masked: bool) -> None:
    """TRL's collator is the oracle, on rows with and without packed documents and labels."""
    packed = [{"input_ids": [*range(10, 10 + sum(lengths))], "seq_lengths": lengths} for lengths in documents]
    plain = [{"input_ids": row["input_ids"]} for row in packed]
    for rows in (packed, plain):
        if masked:
            rows = [{**row, "labels": [-100, *row["input_ids"][1:]]} for row in rows]
        for ours, padding_free in ((PaddedCollator(7), False), (PaddingFreeCollator(), True)):
            batch = ours(rows)
            expected = DataCollatorForLanguageModeling(pad_token_id=7, padding_free=padding_free)(rows)
            assert batch.keys() == expected.keys()
            for name, value in expected.items():
                if isinstance(value, torch.Tensor):
                    assert batch[name].dtype == value.dtype, name
                    assert batch[name].tolist() == value.tolist(), name
                else:
                    assert batch[name] == value, name


@pytest.mark.parametrize("family", ["llama", "mistral4"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("form", ["end to end", "apart"])
def test_no_document_sees_another(packed: Prepared, family: str, attention: str, form: str) -> None:
    model = small_model(family, attention)
    chosen = [row for row in packed.train if len(row["seq_lengths"]) > 2][-2:]
    assert len({len(row["input_ids"]) for row in chosen}) == 2  # the shorter one is filled up
    batch = laid(chosen, form)
    ids, (start, end) = batch["input_ids"], np.cumsum(chosen[0]["seq_lengths"])[:2]
    changed = torch.zeros_like(ids, dtype=torch.bool)
    changed[0, start:end] = True

    def change(positions: torch.Tensor, where: torch.Tensor = changed, **said: Any) -> tuple[float, float]:
        """How far the logits of what was changed move, and all others."""
        with torch.no_grad():
            logits = [
                model(input_ids=each, position_ids=positions, use_cache=False, **said).logits
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
    if form == "apart":
        filled = torch.arange(ids.shape[1]) >= torch.tensor([[len(row["input_ids"])] for row in chosen])
        assert filled.any()
        assert change(batch["position_ids"], filled)[1] < 1e-5


def test_rows_apart_are_the_rows_end_to_end(packed: Prepared) -> None:
    """The same losses of the same tokens, in less than half the square."""
    model, chosen = small_model("mistral4", "sdpa"), packed.train.to_list()[-3:]
    chosen[1] |= {"input_ids": chosen[1]["input_ids"][:2], "labels": chosen[1]["labels"][:2], "seq_lengths": [1, 1]}
    losses = []
    for form in ("end to end", "apart"):
        batch = laid(chosen, form)
        said = {name: batch[name] for name in ("input_ids", "position_ids")}
        with torch.no_grad():
            logits = model(**said, use_cache=False).logits[:, :-1]
        labels = batch["labels"][:, 1:]
        learnt = labels != -100
        losses.append(torch.nn.functional.cross_entropy(logits[learnt], labels[learnt], reduction="none"))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-5)
    counted = [token_counts(laid(chosen, form)) for form in ("end to end", "apart")]
    tokens = sum(len(row["input_ids"]) for row in chosen)
    assert [one[[0, 2]].tolist() for one in counted if one is not None] == [
        [tokens, len(losses[0])],
        [tokens - 2, len(losses[0])],  # documents of one token at a row's end look as what fills it up does
    ]


@pytest.mark.parametrize(
    ("said", "masked"),
    [({}, True), ({"attn_implementation": "flash_attention_2"}, False), ({"attn_implementation": "eager"}, True)],
)
def test_a_mask_is_needed_where_attention_is_not_per_document(rows: Path, said: dict[str, Any], masked: bool) -> None:
    run = run_file(rows)
    assert run.model_copy(update={"model": run.model.model_copy(update=said)}).masked is masked
    assert not run_file(rows, packing=False).masked


def trainer(prepared: Prepared, tokenizer: PreTrainedTokenizerFast, folder: Path) -> SFTTrainer:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes))
    settings = SFTConfig(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=3,
        per_device_train_batch_size=2,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        bf16=False,
        activation_checkpointing=False,
        **prepared.arguments,
    )
    return SFTTrainer(
        model=model,
        args=settings,
        train_dataset=prepared.train,
        eval_dataset=prepared.validation,
        processing_class=tokenizer,
    )


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
@pytest.mark.parametrize(
    "section", [{}, {"packing": False}, {"streaming": True}, {"streaming": True, "packing": False}]
)
def test_the_trainer_takes_the_rows_as_they_are(
    rows: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, section: dict[str, Any]
) -> None:
    prepared = prepare(run_file(rows, **section), tokenizer)
    made = trainer(prepared, tokenizer, tmp_path)
    batch = next(iter(made.get_train_dataloader()))
    learnt = batch["labels"] != -100
    assert learnt.any()
    assert not learnt.all()
    assert batch["labels"][learnt].tolist() == batch["input_ids"][learnt].tolist()
    if section.get("packing", True):
        assert "attention_mask" not in batch
        assert (batch["position_ids"] == 0).sum() > 2
    else:
        assert batch["attention_mask"].shape == batch["input_ids"].shape
    losses = [entry["loss"] for entry in made.train() and made.state.log_history if "loss" in entry]
    assert len(losses) == 3
    assert all(np.isfinite(losses))


def test_a_stream_gives_every_row_once_an_epoch_in_one_order(rows: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    streamed = prepare(run_file(rows, streaming=True, packing=False), tokenizer).train
    held = prepare(run_file(rows, packing=False), tokenizer).train
    count = len(held)
    first = [tuple(row["input_ids"]) for row in itertools.islice(streamed, 2 * count)]
    assert sorted(first[:count]) == sorted(first[count:]) == sorted(map(tuple, held["input_ids"]))
    assert first[:count] != first[count:]  # shuffled anew
    assert [tuple(row["input_ids"]) for row in itertools.islice(streamed, count)] == first[:count]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_share_a_stream_without_overlap(rows: Path, tokenizer: PreTrainedTokenizerFast, ranks: int) -> None:
    """What Accelerate does with a stream that it does not dispatch: the ranks' batches side by side are the stream."""
    from accelerate.data_loader import IterableDatasetShard

    streamed = prepare(run_file(rows, streaming=True), tokenizer).train
    expected = [row["input_ids"] for row in itertools.islice(streamed, 16)]
    batch = 8 // ranks  # the global batch stays
    parts = [
        itertools.islice(IterableDatasetShard(streamed, batch, num_processes=ranks, process_index=rank), 2 * batch)
        for rank in range(ranks)
    ]
    found = [[row["input_ids"] for row in part] for part in parts]
    steps = [[row for part in found for row in part[step * batch : (step + 1) * batch]] for step in range(2)]
    assert [row for step in steps for row in step] == expected


def test_a_stream_without_a_number_of_steps_is_refused(rows: Path, tokenizer: Any) -> None:
    run = run_file(rows, streaming=True)
    endless = run.model_copy(update={"train": run.train.model_copy(update={"max_steps": -1})})
    with pytest.raises(UserError, match="epochs can't be counted"):
        prepare(endless, tokenizer)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=300), st.integers(1, 16), st.integers(0, 3))
def test_grouping_by_length_is_a_permutation(lengths: list[int], batch: int, epoch: int) -> None:
    order = length_grouped(np.array(lengths), batch, 0, epoch)
    assert sorted(order.tolist()) == list(range(len(lengths)))
