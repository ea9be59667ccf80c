"""A real pretrained model, SmolLM2-135M-Instruct, and the same weights as a mixture: layouts, objectives, bases and
rows that must agree do, on its weights and on chats. `make prove-real` prints the figures and times as well."""

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import real
import torch
from peft import PeftModel
from peft.tuners.lora.layer import ParamWrapper
from real import of_four
from safetensors.torch import load_file
from test_sweep import assert_same_run, run
from test_train import Outcomes, case
from transformers import AutoModelForCausalLM, AutoTokenizer

from windlass.errors import SAVED
from windlass.export import export
from windlass.files import read_json, read_json_lines
from windlass.observe.recorder import ExpertBalance
from windlass.run_folder import ADAPTER
from windlass.settings import FOUR_BITS

pytestmark = [
    pytest.mark.prove,
    pytest.mark.timeout(1800),
    # PEFT uses names that transformers will drop, and doesn't look for patterns among expert parameters when it warns.
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*_pattern keys did not match any targeted module:RuntimeWarning"),
]

PAIRS: dict[str, Any] = {
    "data__dataset_name_or_path": "{folder}/pairs",
    "train__learning_rate": 5e-5,
    "train__max_steps": 10,
    "train__eval_steps": 10,
}
DPO: dict[str, Any] = {**PAIRS, "train__objective": "dpo"}
ORPO: dict[str, Any] = {**PAIRS, "train__objective": "orpo"}
BRIEF: dict[str, Any] = {"train__max_steps": 1, "train__eval_steps": 1}
FEW: dict[str, Any] = {"data__dataset_name_or_path": "{folder}/few", "train__eval_strategy": "no"}
SPLIT: dict[str, Any] = {"layout": "expert-parallel", "layout__expert_parallel": 2}
MIXTURE: dict[str, Any] = {
    "model__model_name_or_path": "{folder}/mixtral",
    "lora__experts": {"r": 2, "lora_alpha": 4},
    "train__max_steps": 2,
    "train__eval_steps": 2,
}
BY_EXPERT: dict[str, Any] = {**MIXTURE, "model__model_name_or_path": "{folder}/qwen2_moe"}  # published one by one
IN_8_BITS: dict[str, Any] = {
    **MIXTURE,
    **BRIEF,
    "model__model_name_or_path": "{folder}/mixtral in 8 bits",
    "layout__base_dtype": "fp8",
}


ALONE = {
    "alone": of_four(1),
    "by TRL": of_four(1, plain=True),
    "checkpointing": of_four(1, train__gradient_checkpointing=True),
    "stopped": of_four(1, faults=["stop 3"], train__output_dir="{out}/in two", train__save_strategy="steps"),
    "resumed": of_four(1, resume=True, train__output_dir="{out}/in two", train__save_strategy="steps"),
    "bf16": of_four(1, train__bf16=True, model__torch_dtype="bfloat16", **BRIEF),
    "nf4": of_four(1, layout__base_dtype="nf4", **BRIEF),
    "packed": case(1, micro=1, data__packing=True, data__max_length=1024, **FEW),
    "padded": case(1, micro=8, **FEW),
    "dpo": of_four(1, micro=2, **DPO),
    "dpo by TRL": of_four(1, micro=2, plain=True, **DPO),
    "orpo": of_four(1, micro=2, **ORPO),
    "orpo by TRL": of_four(1, micro=2, plain=True, **ORPO),
    "mixture": of_four(1, **MIXTURE),
    "mixture by TRL": of_four(1, plain=True, **MIXTURE),
    "mixture in FP8": of_four(1, **IN_8_BITS),
    "mixture of Qwen2": of_four(1, **BY_EXPERT),
}
ON_TWO = {
    "full-shard": of_four(2),
    "resident": of_four(2, layout="resident"),
    "context": of_four(2, layout="resident", layout__context_parallel=2, micro=4),
    "full-shard, bf16": of_four(2, train__bf16=True, **BRIEF),
    "resident, bf16": of_four(2, layout="resident", train__bf16=True, **BRIEF),
    "mixture, expert-parallel": of_four(2, **SPLIT, **MIXTURE),
    "mixture, full-shard": of_four(2, **MIXTURE),
    "mixture of Qwen2, expert-parallel": of_four(2, **SPLIT, **BY_EXPERT),
}
TRIALS = [
    {"name": "small", "lora.r": 4, "train.learning_rate": 1e-4},
    {"name": "large", "lora.r": 16, "train.seed": 7},
]
ON_FOUR = {"hybrid": of_four(4, layout="hybrid", layout__shard=2, layout__replicate=2)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("real")
    real.write_rows(root)
    return root


@pytest.fixture(scope="module")
def model() -> Path:
    return real.get_model()


@pytest.fixture(scope="module")
def mixture(folder: Path, model: Path) -> Path:
    made = real.make_mixture(model, folder / "mixtral")
    real.make_mixture(model, folder / "qwen2_moe", "qwen2_moe")
    real.publish(made, folder / "mixtral in 8 bits", "fp8")
    return made


@pytest.fixture(scope="module")
def alone(folder: Path, model: Path, mixture: Path) -> Outcomes:
    return real.run_cases(folder, model, 1, ALONE)


@pytest.fixture(scope="module")
def two(folder: Path, model: Path, mixture: Path) -> Outcomes:
    return real.run_cases(folder, model, 2, ON_TWO)


@pytest.fixture(scope="module")
def four(folder: Path, model: Path) -> Outcomes:
    return real.run_cases(folder, model, 4, ON_FOUR)


def assert_alike(found: Outcomes, name: str, expected: Outcomes, other: str, within: float = 2e-5) -> None:
    losses = [real.read_losses(of, one) for of, one in ((found, name), (expected, other))]
    print(f"{name}: {losses[0]}; {other}: {losses[1]}")
    assert len(losses[0]) == len(losses[1]) > 0
    assert losses[0] == pytest.approx(losses[1], rel=within)


@pytest.mark.parametrize("name", ["full-shard", "resident", "context", "hybrid"])
def test_ranks_equal_one_process(two: Outcomes, four: Outcomes, alone: Outcomes, name: str) -> None:
    found = four if name in ON_FOUR else two
    assert_alike(found, name, alone, "alone")
    runs = found.folder / name, alone.folder / "alone"
    evaluated = [real.read_evaluations(run) for run in runs]
    assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-5)
    difference = real.compare_adapters(*runs)
    print(f"{name}: B differs by {difference:.1e} of its size, evaluation {evaluated[0]}")
    assert difference < 2e-3


@pytest.mark.parametrize(
    ("name", "other"),
    [("alone", "by TRL"), ("dpo", "dpo by TRL"), ("orpo", "orpo by TRL"), ("mixture", "mixture by TRL")],
)
def test_steps_equal_trls(alone: Outcomes, name: str, other: str) -> None:
    assert_alike(alone, name, alone, other, 1e-4)


def test_recomputed_layers_change_nothing(alone: Outcomes) -> None:
    assert_alike(alone, "checkpointing", alone, "alone", 1e-6)


def test_resumed_run_equals_the_uninterrupted_one(alone: Outcomes) -> None:
    assert (alone["stopped"]["code"], alone["resumed"]["code"]) == (SAVED, 0)
    whole, parts = (real.read_adapter(alone.folder / name) for name in ("alone", "in two"))
    assert all(torch.equal(whole[key], parts[key]) for key in whole)


def test_packed_rows_equal_padded_ones(alone: Outcomes) -> None:
    assert_alike(alone, "packed", alone, "padded")
    assert real.compare_adapters(alone.folder / "packed", alone.folder / "padded") < 2e-3


def test_bases_in_fewer_bits_answer_alike(alone: Outcomes) -> None:
    exact, narrow, four_bits = (real.read_base_loss(alone.folder / name) for name in ("alone", "bf16", "nf4"))
    print(f"evaluation loss of the base: float32 {exact:.4f}, bfloat16 {narrow:.4f}, NF4 {four_bits:.4f}")
    assert narrow == pytest.approx(exact, abs=0.02)
    assert exact + 0.02 < four_bits < exact + 0.5
    wrong = read_json(alone.folder / "nf4" / "load.json")["quantisation"]["relative_rms"]
    print(f"NF4: its weights are off by {wrong:.1%}")
    assert wrong == pytest.approx(FOUR_BITS["nf4"].error, rel=0.05)


def test_bfloat16_means_the_same_in_every_layout(two: Outcomes, alone: Outcomes) -> None:
    """Within twice its own noise, which is how far it is from float32: shards are cast, autocast casts products."""
    exact = real.read_base_loss(alone.folder / "alone")
    sharded, whole = (real.read_base_loss(two.folder / f"{name}, bf16") for name in ("full-shard", "resident"))
    print(f"evaluation loss of the base: float32 {exact:.4f}; bf16, full-shard {sharded:.4f}, resident {whole:.4f}")
    assert abs(sharded - whole) < 2 * max(abs(sharded - exact), abs(whole - exact), 1e-3)
    assert [sharded, whole] == pytest.approx([exact] * 2, abs=0.02)


def test_mixture_answers_like_the_dense_model(alone: Outcomes) -> None:
    names = ("alone", "mixture", "mixture of Qwen2", "mixture in FP8")
    dense, mixture, of_qwen2, in_8_bits = (real.read_base_loss(alone.folder / name) for name in names)
    print(
        f"evaluation loss of the base: dense {dense:.4f}, mixtures {mixture:.4f}, {of_qwen2:.4f}; FP8 {in_8_bits:.4f}"
    )
    assert [mixture, of_qwen2] == pytest.approx([dense] * 2, abs=0.05)  # their experts have 1 % of noise
    assert mixture + 0.01 < in_8_bits < mixture + 0.2


@pytest.mark.parametrize(
    "name", ["mixture, expert-parallel", "mixture, full-shard", "mixture of Qwen2, expert-parallel"]
)
def test_mixture_on_two_ranks_equals_one_process(two: Outcomes, alone: Outcomes, name: str) -> None:
    one = name.partition(",")[0]
    assert_alike(two, name, alone, one)
    assert real.compare_adapters(two.folder / name, alone.folder / one) < 2e-3


# --- trials, exports ---


def test_trials_equal_the_run_alone(folder: Path, model: Path) -> None:
    """In turns bit for bit; together they have products of more rows."""
    text = real.RUN.format(model=model, folder=folder) + "cluster: {gpus_per_node: 2, gpu: cpu}\n"
    text = text.replace('save_strategy: "no"', "save_strategy: steps\n  save_steps: 2").replace(
        "max_steps: 3", "max_steps: 2"
    )
    for name, options in (("in turns", ""), ("together", "together: 2, ")):
        file = folder / f"{name}.yaml"
        given = text.replace("/out", f"/{name}") + f"sweep: {{{options}trials: {json.dumps(TRIALS)}}}\n"
        file.write_text(given)
        with real.timed(f"two trials {name}"):
            run(f"train '{file}'", folder)
    for trial in ("small", "large"):
        in_turns, together = (folder / name / "trials" / trial for name in ("in turns", "together"))
        run(f"train '{in_turns / 'run.yaml'}' --override train.output_dir=alone/{trial}", folder)
        assert_same_run(folder / "alone" / trial, in_turns)
        difference = real.compare_adapters(together, in_turns)
        print(f"trial {trial}: B differs by {difference:.1e} of its size from the run alone if trained together")
        assert difference < 2e-3


@pytest.fixture(scope="module")
def text(folder: Path, model: Path) -> torch.Tensor:
    """Return real rows as tokens: the held-out chats, end to end."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    chats = [line["messages"] for line in read_json_lines(folder / "chats" / "validation.jsonl")]
    whole = "".join(tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats)
    return torch.tensor([tokenizer(whole).input_ids[:512]])


def load(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def test_the_merged_mixture_answers_as_the_adapted_one(
    alone: Outcomes, mixture: Path, text: torch.Tensor, tmp_path: Path
) -> None:
    """Experts' adapters too. PEFT says what the adapted one answers."""
    trained = alone.folder / "mixture"
    export(trained, tmp_path / "merged", merge=True, probes=False)
    with torch.no_grad():
        base = load(mixture)(text).logits
        adapted = PeftModel.from_pretrained(load(mixture), trained / "final")(text).logits - base
        merged = load(tmp_path / "merged")(text).logits - base
    kept = float((merged * adapted).sum() / adapted.square().sum())
    print(f"mixture: merged in bfloat16 keeps {kept:.1%} of what the adapter does to the logits: {adapted.std():.3f}")
    assert kept == pytest.approx(1, abs=0.05)


def test_the_experts_of_an_export_for_vllm_are_pefts(alone: Outcomes, mixture: Path, tmp_path: Path) -> None:
    """Each expert's matrix has a pair of its own there: its product is what PEFT adds to the expert's weight."""
    trained = alone.folder / "mixture"
    export(trained, tmp_path / "for vllm", server="vllm", probes=False)
    pairs = load_file(tmp_path / "for vllm" / ADAPTER)
    adapted = PeftModel.from_pretrained(load(mixture), trained / "final")
    config = read_json(tmp_path / "for vllm" / "adapter_config.json")
    scale = config["lora_alpha"] / config["r"]
    compared = 0
    for name, wrapper in adapted.named_modules():
        if isinstance(wrapper, ParamWrapper):
            stem = name.removesuffix(".base_layer").replace("mlp.experts", "block_sparse_moe.experts")
            matrices = ["w1", "w3"] if wrapper.parameter_name == "gate_up_proj" else ["w2"]
            for expert, expected in enumerate(wrapper.get_delta_weight("default")):
                of_parts = ([pairs[f"{stem}.{expert}.{part}.lora_{x}.weight"] for x in "BA"] for part in matrices)
                found = torch.cat([scale * b @ a for b, a in of_parts])
                assert torch.allclose(found, expected, atol=1e-3 * float(expected.abs().max()))
                assert expected.any()
                compared += 1
    assert compared == 2 * real.EXPERTS * adapted.config.num_hidden_layers


def test_the_balance_of_experts_on_real_text_is_that_of_the_routers(mixture: Path, text: torch.Tensor) -> None:
    model = load(mixture)
    balance = ExpertBalance(model)
    balance.start()
    routers = model(text, output_router_logits=True).router_logits
    counted = balance.stop()
    assert counted is not None
    chosen = [logits.topk(real.CHOSEN).indices.flatten().bincount(minlength=real.EXPERTS) for logits in routers]
    busiest = [float(counts.max() / counts.float().mean()) for counts in chosen]
    print(f"busiest expert of a layer, of an even share: {median(busiest):.2f} (median), {max(busiest):.2f} (most)")
    assert counted["busiest"] == pytest.approx(busiest, abs=1e-3)
