"""Attention by document equals attention under a mask of documents, in every family that may use it.

torch's kernel needs a GPU, where `windlass check --self-test` compares it with each document by itself. Here a plain
one of the same arguments stands in for it: what is tested is everything around it.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from test_long_rows import CONFIGS, FAMILIES
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

from windlass import hardware, tiny
from windlass.compat import enable_checkpointing
from windlass.data.collate import PaddedPackingCollator
from windlass.model.family import FAMILIES as KNOWN
from windlass.plan import make_plan, split_rows
from windlass.runfile import read_run_file
from windlass.sweep import slices
from windlass.train.collate import Batch, Collate
from windlass.train.head import Head
from windlass.train.kernels import documents
from windlass.train.patches import Patches

QUICK = ("llama", "mistral", "mistral4")  # no window, a window, heads of two widths
# mistral3 wraps ministral3 or mistral4; gpt_oss has no kernel of torch's.
USERS = [name for name in split_rows.FAMILIES if name not in ("mistral3", "gpt_oss")]


def find_class(family: str) -> Any:
    known = KNOWN.get(family)
    name = known.causal_lm if known else modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]
    return getattr(transformers, name)


def attend_plainly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    edges: Tensor,
    _edges: Tensor,
    longest: int,
    _longest: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool = False,
) -> Tensor:
    assert value.shape == key.shape
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert window_size[1] == 0
    assert int(edges.diff().max()) == longest
    outputs = []
    for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        place = torch.arange(stop - start)
        seen = place[:, None] >= place
        if window_size[0] >= 0:
            seen &= place[:, None] - place <= window_size[0]
        q, k, v = (tensor[start:stop].transpose(0, 1) for tensor in (query, key, value))
        sdpa = nn.functional.scaled_dot_product_attention
        outputs.append(sdpa(q, k, v, attn_mask=seen, scale=scale, enable_gqa=enable_gqa).transpose(0, 1))
    return torch.cat(outputs)


def make_rows(*rows: list[int]) -> list[dict[str, Any]]:
    dice = np.random.default_rng(0)
    ids = [dice.integers(1, 200, sum(lengths)) for lengths in rows]
    return [
        {"input_ids": row, "labels": row, "row": number, "seq_lengths": lengths}
        for number, (row, lengths) in enumerate(zip(ids, rows, strict=True))
    ]


ROWS = ([40, 1, 1, 33, 5], [7, 50], [60])


def collate(rows: list[dict[str, Any]]) -> Batch:
    return Collate(PaddedPackingCollator(0))(rows)


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in USERS]
)
def test_equals_attention_under_a_mask(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "varlen_attn", attend_plainly)
    monkeypatch.setattr(documents, "GROUPED", {"enable_gqa": True})
    tiny.write_family(tmp_path / "model", family, config={**CONFIGS, **FAMILIES}.get(family, {}))
    batch = collate(make_rows(*ROWS))
    model = find_class(family).from_pretrained(tmp_path / "model", dtype=torch.float32, attn_implementation="sdpa")
    enable_checkpointing(model, {"use_reentrant": False})
    model.train()
    found = []
    for by_document in (False, True):
        model.zero_grad()
        torch.manual_seed(0)
        with Patches() as patches:
            patches.patch_forward(model)
            if by_document:
                patches.patch_attention(model, documents.NAME)
                monkeypatch.setattr(documents, "sdpa_mask", None)  # no mask is made
            loss, _ = Head(model).loss(model(**batch.inputs).last_hidden_state, batch.targets)
            loss.backward()  # type: ignore[no-untyped-call]
        found.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(found[0]) == len(found[1])
    for masked, by_its_own in zip(*found, strict=True):
        torch.testing.assert_close(by_its_own, masked, rtol=2e-4, atol=2e-5)


def test_edges_are_those_of_documents_and_padding_is_one() -> None:
    inputs = collate(make_rows(*ROWS)).inputs
    width = 80
    assert inputs["document_edges"].tolist() == [
        0, 40, 41, 42, 75, 80, 87, 137, 160, 220, 240,
    ]  # fmt: skip
    assert inputs["longest_document"] == 60
    assert inputs["input_ids"].shape == (3, width)
    alone = collate(make_rows([9])).inputs
    assert alone["several"] is False


def test_trials_below_each_other_keep_their_documents() -> None:
    rows = make_rows(*ROWS)
    both = [collate(rows[:2]).inputs, collate(rows[2:] + make_rows([3, 4])).inputs]
    parts = slices.place_parts(both, [None, None])  # type: ignore[list-item]
    combined = slices.combine(both, parts[1], parts[0])
    together = collate([*rows, *make_rows([3, 4])]).inputs
    more = set(combined["document_edges"].tolist()) - set(together["document_edges"].tolist())
    assert more == {4 * 80 - 20}  # where the last row ended before it was filled up
    assert len(combined["document_edges"]) == len(together["document_edges"]) + 1
    assert combined["document_edges"].dtype == torch.int32
    assert combined["longest_document"] == combined["document_edges"].diff().max()


def test_an_option_that_the_kernel_lacks_is_refused() -> None:
    query = torch.zeros(1, 2, 4, 8)
    mask = documents.DocumentMask(torch.tensor([0, 4], dtype=torch.int32), 4)
    with pytest.raises(AssertionError, match="s_aux"):
        documents.attend(nn.Identity(), query, query, query, mask, s_aux=torch.zeros(2))
    with pytest.raises(AssertionError, match="dropout"):
        documents.attend(nn.Identity(), query, query, query, mask, dropout=0.1)


RUN = """
model: {{model_name_or_path: {folder}/llama}}
lora: {{r: 4, lora_alpha: 8, lora_dropout: 0, target_modules: all-linear}}
data: {{dataset_name_or_path: {folder}/rows.jsonl, val_split: null, max_length: 64, packing: true}}
train: {{output_dir: {folder}/run, max_steps: 2, eval_strategy: "no", report_to: none}}
layout: {{name: resident}}
cluster: {{gpu: h100, nodes: 1, gpus_per_node: 1}}
"""


def test_planned_where_it_is_used(tmp_path: Path) -> None:
    for family in ("llama", "gemma2"):
        tiny.write_family(tmp_path / family, family, tokenizer=True)
    (tmp_path / "rows.jsonl").write_text('{"text": "anchor bark cable"}\n' * 40)
    (tmp_path / "run.yaml").write_text(RUN.format(folder=tmp_path))
    for overrides, by_document in (
        ([], True),
        (["cluster.gpu=t4"], False),  # older than Ampere
        (["cluster.gpu=mi300x"], False),
        (["cluster.gpu=cpu"], False),
        (["data.packing=false"], False),
        (["model.attn_implementation=eager"], False),
        (["train.compile=true"], False),
        (["model.torch_dtype=float32", "train.bf16=false"], False),  # flash attention computes in 16 bits
        ([f"model.model_name_or_path={tmp_path}/gemma2"], False),  # a family that is not proven: it caps its scores
    ):
        plan = make_plan(read_run_file(tmp_path / "run.yaml", overrides))
        assert plan.by_document is by_document, overrides
        if plan.run.data.packs:
            assert plan.search.work.masked is not by_document
            assert (plan.search.work.attention_length < 64) is by_document  # a document's, not the row's


def test_a_device_without_the_kernel_is_found_out() -> None:
    assert not documents.check_documents(torch.device("cpu"))
    assert hardware.find_gpu("t4").has_bf16 is False  # such GPUs are planned with a mask
