"""What windlass has to do with every supported version of its libraries, on tiny models.

`make test-versions` runs this file with the oldest and with the newest ones, and `make prove` with those of the tests.
`-m smallest`: every module is imported, and one step is made.
"""

import importlib
import json
import pkgutil
from pathlib import Path
from typing import Any

import pytest
import real
import torch
import transformers
from peft import PeftModel
from test_faults import windlass
from test_train import Outcomes

import windlass as package
from windlass import tiny, versions
from windlass.errors import SAVED
from windlass.export import export
from windlass.files import read_json_lines

# Of transformers 5.23 and newer, of names that PEFT uses.
V6 = "ignore:.*is deprecated and will be removed in v6:FutureWarning"
pytestmark = [pytest.mark.prove, pytest.mark.filterwarnings(V6)]

PAIRS: dict[str, Any] = {"data__dataset_name_or_path": "{folder}/pairs", "data__max_length": 128}
IN_TWO: dict[str, Any] = {"train__output_dir": "{out}/in two", "train__save_strategy": "steps"}
DPO: dict[str, Any] = {**PAIRS, "train__objective": "dpo", "train__max_steps": 3}
EXPERTS: dict[str, Any] = {"model__model_name_or_path": "{folder}/mixture", "lora__experts": {"r": 2, "lora_alpha": 4}}
STORED: dict[str, dict[str, Any]] = {
    dtype: {"model__model_name_or_path": f"{{folder}}/{dtype}", "layout__base_dtype": dtype}
    for dtype in ("fp8", "int4")
}
DECODED: dict[str, Any] = {"layout__base_dtype": "bf16"}
SPLIT: dict[str, Any] = {"layout": "expert-parallel", "layout__expert_parallel": 2}
ONLY_TRITON = {"windlass.weights.dequantize_kernel"}  # a module that needs triton, which CPUs' torch doesn't bring


ALONE = {
    "alone": real.of_four(1),
    "alone by TRL": real.of_four(1, plain=True),
    "nf4": real.of_four(1, layout__base_dtype="nf4"),
    **{dtype: real.of_four(1, **stored) for dtype, stored in STORED.items()},
    **{f"{dtype} decoded": real.of_four(1, **{**stored, **DECODED}) for dtype, stored in STORED.items()},
    "dpo": real.of_four(1, **DPO),
    "dpo by TRL": real.of_four(1, plain=True, **DPO),
    "experts": real.of_four(1, **EXPERTS),
    "experts by TRL": real.of_four(1, plain=True, **EXPERTS),
}
ON_TWO = {
    "full-shard": real.of_four(2),
    "stopped": real.of_four(2, faults=["stop 3"], **IN_TWO),
    "resumed": real.of_four(2, resume=True, **IN_TWO),
    "experts, full-shard": real.of_four(2, **EXPERTS),
    "experts, expert-parallel": real.of_four(2, **SPLIT, **EXPERTS),
    "fp8, full-shard": real.of_four(2, **STORED["fp8"]),
}
NEEDS = {"experts, expert-parallel": "expert parallelism", "fp8, full-shard": "sharding of a quantized base"}
HAVE = {"torch": torch.__version__, "transformers": transformers.__version__}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("versions")
    real.write_rows(root, 24)
    tiny.write_model(root / "model", "llama")
    tiny.write_model(root / "mixture", "mixtral")
    tiny.write_model(root / "fp8", wrapper=False)
    tiny.write_model(root / "int4", "llama", quantization="int4")
    (root / "run.yaml").write_text(real.RUN.format(model=root / "model", folder=root))
    return root


@pytest.fixture(scope="module")
def alone(folder: Path) -> Outcomes:
    return real.run_cases(folder, folder / "model", 1, ALONE)


@pytest.fixture(scope="module")
def two(folder: Path) -> Outcomes:
    return real.run_cases(folder, folder / "model", 2, ON_TWO)


@pytest.mark.smallest
def test_every_module_is_imported() -> None:
    names = {found.name for found in pkgutil.walk_packages(package.__path__, "windlass.")}
    for name in sorted(names - ONLY_TRITON - {"windlass.__main__"}):
        importlib.import_module(name)


@pytest.mark.smallest
def test_one_step_is_planned_and_made(folder: Path, tmp_path: Path) -> None:
    said = "--override train.max_steps=1 --override train.eval_strategy=no --override train.output_dir="
    code, printed = windlass(f"plan {folder}/run.yaml --json {said}{tmp_path}/run", tmp_path)
    assert code == 0, printed
    plan = json.loads(printed)
    assert (plan["layout"]["name"], plan["batch"]["steps"]) == ("resident", 1)
    assert 0 < plan["memory"]["gpu_gib"] < 4
    code, printed = windlass(f"train {folder}/run.yaml {said}{tmp_path}/run", tmp_path)
    assert code == 0, printed
    (step,) = read_json_lines(tmp_path / "run" / "steps-rank0.jsonl")
    assert step["loss"] > 0


def test_a_published_model_is_planned(tmp_path: Path) -> None:
    code, printed = windlass("plan mistralai/Mistral-Small-4-119B-2603 --gpus 4xh200 --json", tmp_path)
    assert code == 0, printed
    plan = json.loads(printed)
    assert plan["parameters"]["total"] == 118_972_826_624
    assert (plan["layout"]["name"], plan["layout"]["expert_parallel"]) == ("expert-parallel", 4)  # versions unknown
    assert plan["memory"]["gpu_gib"] == pytest.approx(122.0, rel=0.02)
    assert plan["estimate"]["tokens_per_second"] == pytest.approx(41_104, rel=0.05)


def test_trials_of_a_sweep_are_what_each_is_alone(alone: Outcomes, folder: Path, tmp_path: Path) -> None:
    batch = "train.per_device_train_batch_size=4", "train.gradient_accumulation_steps=1"
    overrides = ["train.output_dir=sweep", *batch, "'sweep.lora.r=[8, 4]'"]
    code, printed = windlass(f"train {folder}/run.yaml --override {' --override '.join(overrides)}", tmp_path)
    assert code == 0, printed
    eight, four = (tmp_path / "sweep" / "trials" / name for name in ("r8", "r4"))
    assert real.compare_adapters(eight, alone.folder / "alone") < 1e-5
    assert {tensor.shape[0] for name, tensor in real.read_adapter(four).items() if ".q_proj.lora_A" in name} == {4}


def test_the_demo_runs(tmp_path: Path) -> None:
    code, printed = windlass("demo --dir demo", tmp_path)
    assert code == 0, printed


@pytest.mark.parametrize(("name", "other"), [(name, f"{name} by TRL") for name in ("alone", "dpo", "experts")])
def test_steps_equal_trls(alone: Outcomes, name: str, other: str) -> None:
    losses = real.read_losses(alone, name)
    assert losses == pytest.approx(real.read_losses(alone, other), rel=1e-4)
    assert len(losses) == 3


@pytest.mark.parametrize("name", [name for name in ON_TWO if name not in ("stopped", "resumed")])
def test_ranks_equal_one_process(two: Outcomes, alone: Outcomes, name: str) -> None:
    if name in NEEDS and versions.find_lacking([NEEDS[name]], HAVE):
        assert f"has no {NEEDS[name]}" in two[name]["error"]
        return
    one = {"experts": "experts", "fp8": "fp8"}.get(name.partition(",")[0], "alone")
    assert real.read_losses(two, name) == pytest.approx(real.read_losses(alone, one), rel=2e-5)
    assert real.compare_adapters(two.folder / name, alone.folder / one) < 2e-3


def test_a_resumed_run_equals_the_uninterrupted_one(two: Outcomes) -> None:
    assert (two["stopped"]["code"], two["resumed"]["code"]) == (SAVED, 0)
    whole, parts = (real.read_adapter(two.folder / name) for name in ("full-shard", "in two"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[key], parts[key]) for key in whole)


def test_bases_in_fewer_bits_train(alone: Outcomes) -> None:
    exact, nf4 = (real.read_losses(alone, name) for name in ("alone", "nf4"))
    assert nf4 == pytest.approx(exact, rel=0.05)
    assert nf4 != exact
    for dtype in STORED:
        decoded = real.read_losses(alone, f"{dtype} decoded")
        assert real.read_losses(alone, dtype) == pytest.approx(decoded, rel=1e-3), dtype


def test_peft_opens_an_export_and_a_merged_one_is_the_same(alone: Outcomes, folder: Path, tmp_path: Path) -> None:
    export(alone.folder / "alone", tmp_path / "adapter", probes=False)
    export(alone.folder / "alone", tmp_path / "merged", merge=True, dtype="float32", probes=False)
    ids = torch.arange(20)[None]

    def load(model: Path) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    with torch.no_grad():
        adapted = PeftModel.from_pretrained(load(folder / "model"), tmp_path / "adapter")(ids).logits
        merged = load(tmp_path / "merged")(ids).logits
        base = load(folder / "model")(ids).logits
    assert torch.allclose(adapted, merged, atol=1e-4)
    assert not torch.allclose(adapted, base, atol=1e-4)
