"""Try every causal language model of transformers on tiny random models, and record what works.

python benchmarks/families.py            every family that docs/families.md doesn't have yet
python benchmarks/families.py FAMILY …   these
python benchmarks/families.py all        every family, anew

Each family runs in its own processes, forked from one that has the libraries imported. Its row is written as soon as it
is known, and a failure costs only its own row. Rows measured with other versions of the libraries are dropped.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from peft.tuners.tuners_utils import _maybe_include_all_linear_layers
from safetensors.torch import load_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from windlass import plan as planning
from windlass import runfile, tiny
from windlass.errors import UserError
from windlass.model import Base, read_base
from windlass.model.config import describe
from windlass.model.targets import resolve_adapter
from windlass.train.parallel import build_on_meta, make_config

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
tests: Any = importlib.import_module("test_families")
runs: Any = importlib.import_module("test_train")
warm: Any = importlib.import_module("warm")

COLUMNS = (
    *("family", "plan", "all-linear", "buffers", "trained on 2 ranks", "equal to TRL", "on an FP8 base"),
    *("opens in PEFT", "experts", "merge", "packing"),
)
NAMES = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} | tests.FAMILIES.keys())
NOT_DROPPED = dict.fromkeys(("dropout", "attention_dropout", "residual_dropout", "activation_dropout"), 0.0)
QWEN4 = {"ple_layer_ids": [1], "ple_embed_dim": 64, "ngram_vocab_size_base": 64, "indexer_n_heads": 2}
QWEN4 |= {
    "eos_token_id": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
NO_LAYER_INPUTS = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
TOWER = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
TOWER |= {"adapter_out_dim": 64}
# What the tiny models of families have beside the shrunk defaults, that the tests don't try
MORE: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE}},
    "dbrx": {"attn_config": {"rope_theta": 5e5}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "dots3_note": {
        "vision_config": {**TOWER, "adapter_in_dim": 64, "mlp_layer_types": ["dense"], "per_layer_config": {}},
        "audio_config": {**TOWER, "adapter_input_size": 64, "num_key_value_heads": 4},
    },
    "emu3": {
        **NOT_DROPPED,
        "vocabulary_map": {"<image>": 5, **{f"<|visual token {i:06}|>": 6 + i for i in range(64)}},
        "vq_config": {"codebook_size": 64, "base_channels": 32, "hidden_size": 32},
    },
    "gemma4": tests.WIDE,
    "gemma4_assistant": {"text_config": NO_LAYER_INPUTS},
    "gemma4_unified": tests.WIDE,
    "gemma4_unified_text": tests.WIDE,
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 8, "moe_topk": 2},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp": QWEN4,
    "qwen4_exp_text": QWEN4,
    "seed_oss": NOT_DROPPED,  # at random
    "xglm": {**NOT_DROPPED, "d_model": 64, "ffn_dim": 128, "attention_heads": 4},
}
SETTINGS: dict[str, dict[str, Any]] = tests.FAMILIES | MORE
PAGE = Path(__file__).parents[1] / "docs" / "families.md"
MARK = "<!-- benchmarks/families.py -->"
LIBRARIES = ", ".join(f"{each} {version(each)}" for each in ("torch", "transformers", "peft", "trl"))
LIMIT = 900  # seconds of a family


def try_family(folder: Path, name: str, tell: Callable[[str, str], None]) -> None:
    """Report each column as soon as it is known."""
    config = SETTINGS.get(name, {})
    try:
        small = tiny.make_small_config(name, config)
    except Exception:  # refused for what it is, or a failure in what follows
        small = transformers.CONFIG_MAPPING[name](**config)
    try:
        describe(small.to_dict() | {"architectures": None}, "config.json")
        path = tiny.write_family(folder / "models" / name, name, config=config, tokenizer=True)
        base = read_base(path)
        adapts = "experts" in base.dims and base.family.expert_adapters
        given: dict[str, Any] = {"model__model_name_or_path": str(path)} | (runs.EXPERTS if adapts else {})
        given |= {} if base.family.shards else {"layout": "resident"}
        planning.make_plan(runfile.read_run_file(folder / "run.yaml", runs.case(2, **given)["overrides"]))
    except UserError as error:
        tell("refused", f"{error.problems[0].code}: {error.problems[0].problem}")
        return
    tell("plan", "yes" if base.family.shards else "resident only")
    tell("experts", "yes" if adapts else "no" if "experts" in base.dims else "-")
    tell("packing", "yes" if base.family.isolates else "refused")
    tell("all-linear", compare_targets(base))
    loaded = compare_loaded(folder)
    tests.write_fp8(path)  # whose true values the plain one has from here on
    fp8 = given | {"model__model_name_or_path": str(path.with_name(in_fp8(name))), "layout__base_dtype": "fp8"}
    cases = {name: runs.case(2, **given), in_fp8(name): runs.case(2, **fp8)}
    try:
        planning.make_plan(runfile.read_run_file(folder / "run.yaml", cases[in_fp8(name)]["overrides"]))
    except UserError:  # experts of a form that can't be computed with in codes
        tell("on an FP8 base", "refused")
        del cases[in_fp8(name)]
    one = runs.launched(folder, 1, {name: runs.case(1, plain=True, **given)})
    two = runs.launched(folder, 2, cases)
    certificate = two.folder / name / "load.json"
    buffers = json.loads(certificate.read_text())["checked"]["buffers"] if certificate.exists() else "-"
    tell("buffers", loaded or str(buffers))
    tell("trained on 2 ranks", f"failed: {two[name]['error']}" if "error" in two[name] else "yes")
    tell("equal to TRL", compare(two, name, one.steps(name)))
    if in_fp8(name) in cases:
        tell("on an FP8 base", compare(two, in_fp8(name), one.steps(name)))
    exported = folder / f"{name} exported"
    export(two.folder / name, exported)
    tell("opens in PEFT", opens(base, exported))
    export(two.folder / name, folder / f"{name} merged", "--merge")
    tell("merge", "yes")


def compare_targets(base: Base) -> str:
    """Return how many modules all-linear adapts, of how many that PEFT's would: the description must say the rest."""
    config = make_config(base, torch.float32, "eager")
    model = build_on_meta(getattr(transformers, base.family.causal_lm), config, torch.float32)
    wanted = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    theirs = {*_maybe_include_all_linear_layers(wanted, model).target_modules}
    ours = {*resolve_adapter(tests.lora(), base, str).target_modules}
    left_out = base.family.peft_takes | base.family.idle
    plain = {each for each in theirs - ours if type(model.get_submodule(each)) is torch.nn.Linear}
    unexplained = {each for each in plain if not any(f".{leaf}." in f".{each}." for leaf in left_out)}
    if odd := sorted((ours - theirs) | unexplained):
        return f"no: {odd[0]} and {len(odd) - 1} more"
    return f"{len(ours)}" if ours == theirs else f"{len(ours)} of {len(theirs)}"


def compare_loaded(folder: Path) -> str:
    """Return the first difference of weights, buffers and logits from transformers' own loading, on any rank."""
    script, out = Path(tests.__file__).with_name("family_ranks.py"), folder / "loaded"
    command = [warm.python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run([*command, str(folder / "models"), str(out)], capture_output=True, text=True, check=False)
    failed = json.loads(out.read_text()) if out.exists() else {"": done.stderr.strip()}
    return next((f"no: {why.splitlines()[-1][:80]}" for why in failed.values() if why), "")


def in_fp8(name: str) -> str:
    return f"{name} in FP8"  # as write_fp8 calls its folder


def compare(trained: Any, name: str, reference: Sequence[dict[str, Any]]) -> str:
    """Return the largest relative difference of loss and gradient norm."""
    if error := trained[name].get("error"):
        return "refused" if error.startswith("layout.base_dtype: ") else f"failed: {error}"
    pairs = zip(trained.steps(name), reference, strict=True)
    return f"{max(abs(a[key] / b[key] - 1) for a, b in pairs for key in ('loss', 'grad_norm')):.0e}"


def export(run: Path, to: Path, *more: str) -> None:
    command = [warm.python(), "-m", "windlass", "export", str(run), "--to", str(to), *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr or done.stdout)[-600:])


def opens(base: Base, adapter: Path) -> str:
    """Return whether plain transformers and PEFT find a place for every tensor of the file."""
    name = base.wrapper.architecture if base.wrapper else base.family.causal_lm
    model = getattr(transformers, name).from_pretrained(base.path)
    with warnings.catch_warnings(record=True) as caught:
        opened = PeftModel.from_pretrained(model, str(adapter))
    here, there = get_peft_model_state_dict(opened), load_file(adapter / "adapter_model.safetensors")
    if missing := [str(each.message) for each in caught if "missing" in str(each.message)]:
        return f"no: {missing[0]}"
    values = {each.float().sum().item() for each in there.values()}
    same = {each.float().sum().item() for each in here.values()} == values
    return "yes" if same else f"no: {len(here)} tensors for {len(there)} saved"


def try_alone(name: str, results: Path) -> None:
    """Try it in its own process, which prints a line per column."""
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as place, results.open("a") as file:
        folder = Path(place)
        (folder / "data").mkdir()
        chance = random.Random(0)
        rows = [" ".join(chance.choices(runs.WORDS.split(), k=chance.randint(3, 12))) for _ in range(96)]
        (folder / "data" / "train.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
        (folder / "run.yaml").write_text(runs.RUN.format(folder=folder, steps=10))
        try_family(folder, name, lambda *pair: print(json.dumps(pair), file=file, flush=True))


def row_of(name: str) -> dict[str, str]:
    """Return the family's columns; the first that was not reached has the reason."""
    with tempfile.TemporaryDirectory() as place:
        results = Path(place, "results")
        results.touch()
        program = f"import families, pathlib; families.try_alone({name!r}, pathlib.Path({str(results)!r}))"
        process = subprocess.Popen(
            [warm.python(), "-c", program],
            cwd=Path(__file__).parent,
            env=os.environ | {"TMPDIR": place, "XDG_CACHE_HOME": place},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            text = process.communicate(timeout=LIMIT)[1].strip()
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            text = f"not ready after {LIMIT} seconds"
        row = {"family": name} | dict(json.loads(line) for line in results.read_text().splitlines())
    if len(row) < len(COLUMNS) and "refused" not in row:
        print(f"{name}: {text}", file=sys.stderr, flush=True)
        why = " ".join(text.splitlines()[-1:])[:200]
        row[next(each for each in COLUMNS if each not in row)] = f"failed: {why}"
    return {column: cell.replace("|", "/").replace("\n", " ") for column, cell in row.items()}


def read_page() -> dict[str, dict[str, str]]:
    """Return the columns of each family that the page has, with the libraries that are installed."""
    block = PAGE.read_text().partition(MARK)[2].partition("<!-- end -->")[0]
    if LIBRARIES not in block:
        return {}
    cells = [line.strip("| ").split(" | ") for line in block.splitlines() if line.startswith("| ")]
    rows = {row[0]: dict(zip(COLUMNS, row, strict=True)) for row in cells if len(row) == len(COLUMNS)}
    for code, says, names in re.findall(r"^- `(.+)`, as (.+): (.+)$", block.replace("\n  ", " "), re.MULTILINE):
        rows |= {name: {"family": name, "refused": f"{code}: {says}"} for name in names.split(", ")}
    return {name: rows[name] for name in NAMES if name in rows}


def write_page(rows: dict[str, dict[str, str]]) -> None:
    """Write the table of what was tried, and the list of what `plan` refuses by the errors' codes."""
    tried = [row for row in rows.values() if "refused" not in row]
    lines = ["| " + " | ".join(row.get(each, "-") for each in COLUMNS) + " |" for row in tried]
    refused: dict[str, list[str]] = {}
    for name, row in rows.items():
        if "refused" in row:
            refused.setdefault(row["refused"].partition(": ")[0], []).append(name)
    block = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS), *lines, ""]
    block += [f"Tried: {len(tried)} families. Refused at `plan`: {len(rows) - len(tried)}, by the error's code:", ""]
    for code, names in sorted(refused.items()):
        says = rows[names[0]]["refused"].partition(": ")[2]
        line = f"- `{code}`, as {says}: {', '.join(names)}"
        block.append(textwrap.fill(line, 120, subsequent_indent="  ", break_on_hyphens=False))
    block += ["", f"With {LIBRARIES}; last row of {datetime.now(UTC):%Y-%m-%d}."]
    before, _, rest = PAGE.read_text().partition(MARK)
    PAGE.write_text(f"{before}{MARK}\n" + "\n".join(block) + f"\n{rest[rest.index('<!-- end -->') :]}")


def main(names: list[str]) -> None:
    os.environ |= {"OMP_NUM_THREADS": "1", warm.SHARED: warm.python()}
    rows = read_page()
    if names == ["all"]:
        names = NAMES
    for name in names or [name for name in NAMES if name not in rows]:
        rows[name] = row_of(name)
        print(" | ".join(rows[name].values()), flush=True)
        rows = {name: rows[name] for name in NAMES if name in rows}
        write_page(rows)


if __name__ == "__main__":
    if unknown := {*sys.argv[1:]} - {*NAMES, "all"}:
        sys.exit(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(NAMES)}")
    main(sys.argv[1:])
