"""Continuations of fixed prompts at evaluations: equal to plain PEFT's, and training as without them."""

import copy
import html
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_faults import windlass
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.neftune import neftune_post_forward_hook

from windlass import tiny
from windlass.files import read_json_lines
from windlass.observe import report
from windlass.train.logits import open_adapter
from windlass.train.patches import Patches

pytestmark = pytest.mark.long

RUN = """
model: {{model_name_or_path: model, torch_dtype: float32}}
lora: {{r: 4, lora_alpha: 8, target_modules: all-linear, experts: true}}
data: {{dataset_name_or_path: rows.jsonl, dataset_config_name: null, max_length: 48, val_fraction: 0.1}}
train:
  output_dir: {folder}
  max_steps: 4
  per_device_train_batch_size: 2
  gradient_accumulation_steps: 1
  per_device_eval_batch_size: 2
  learning_rate: 0.01
  bf16: false
  neftune_noise_alpha: 5
  eval_steps: 2
  save_strategy: "no"
{sample}
layout: {{name: expert-parallel, expert_parallel: 2}}
cluster: {{gpu: cpu, gpus_per_node: 2}}
"""
PROMPTS = ["hull keel", "mast", "the quay by the north sea"]
STATED = f"  eval_on_start: true\n  sample: {{prompts: {json.dumps(PROMPTS)}, max_new_tokens: 6}}"
ROWS = "  sample: {from_eval: 6, max_new_tokens: 24, every: 2, max_seconds: 1.0e-6}"  # time for a token each of four


def steps(folder: Path) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in read_json_lines(folder / "steps-rank0.jsonl")]


def samples(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_prompts_are_continued_by_all_ranks_and_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    tiny.write_model(tmp_path / "model", "mixtral", dtype="float32")
    words = ["anchor", "bark", "cable", "deck", "eddy", "fathom", "galley", "hull"]
    rows = [{"text": " ".join(words[(n * k) % 8] for k in range(1, 12))} for n in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, sample in (("without", ""), ("stated", STATED), ("rows", ROWS)):
        (tmp_path / f"{name}.yaml").write_text(RUN.format(folder=name, sample=sample))
        code, printed = windlass(f"train {name}.yaml", tmp_path)
        assert code == 0, printed
        assert ("4 of 6 prompts were reached within max_seconds: 1e-06" in " ".join(printed.split())) == (
            name == "rows"
        )
    assert steps(tmp_path / "stated") == steps(tmp_path / "rows") == steps(tmp_path / "without")
    assert not (tmp_path / "without" / "samples.jsonl").exists()

    lines = samples(tmp_path / "stated")
    assert [(line["step"], line["prompt"]) for line in lines] == [(step, p) for step in (0, 2, 4) for p in PROMPTS]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    adapted = open_adapter(copy.deepcopy(model), tmp_path / "stated" / "final")
    for line in (*lines[:3], *lines[6:]):  # untrained, and trained
        ids = tokenizer(line["prompt"], return_tensors="pt")["input_ids"]
        output = (adapted if line["step"] else model).generate(input_ids=ids, do_sample=False, max_new_tokens=6)[
            0, ids.shape[1] :
        ]
        assert line["text"] == tokenizer.decode(output, skip_special_tokens=True)
        assert line["ended"] == (tokenizer.eos_token_id in output.tolist())

    shown = report.make_report([tmp_path / "stated"]).runs[0]["samples"]
    assert [sample["prompt"] for sample in shown] == PROMPTS
    assert [text["step"] for text in shown[0]["texts"]] == [0, 2, 4]
    page = (tmp_path / "stated" / "report.html").read_text()
    assert "Continued prompts" in page
    text = "".join(itertools.takewhile(str.isprintable, shown[0]["texts"][2]["text"]))  # the page names other letters
    assert html.escape(text, quote=False)[:8] in page

    lines = samples(tmp_path / "rows")
    assert [line["step"] for line in lines] == [2, 2, 2, 2]  # every second evaluation, from the first on
    texts = [row["text"] for row in rows]
    assert all(f"{line['prompt']}{line['reference']}" in texts for line in lines)


def test_embedding_noise_equals_transformers_and_skips_evaluations() -> None:
    embeddings, ids = nn.Embedding(16, 8), torch.arange(12).view(2, 6)
    plain = embeddings(ids)
    Patches().add_embedding_noise(embeddings, 5.0)
    torch.manual_seed(1)
    noisy = embeddings(ids)
    torch.manual_seed(1)
    embeddings.neftune_noise_alpha = 5.0  # type: ignore[assignment]
    expected = neftune_post_forward_hook(embeddings, None, plain.clone())
    torch.testing.assert_close(noisy, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(embeddings.eval()(ids), plain)
