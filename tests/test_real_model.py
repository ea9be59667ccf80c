"""A real pretrained model, SmolLM2-135M-Instruct, and the same weights as a mixture: layouts, objectives and bases that
must agree do, on its weights and on chats, and bfloat16 keeps what its adapters add. `make prove-real` prints the
figures and times as well."""

import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import real
import torch
from peft import PeftModel
from test_train import Outcomes
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoTokenizer
from windlass.serve.share import fit_slope

from windlass.data.prepare import prepare_data
from windlass.export import export
from windlass.files import read_json, read_json_lines
from windlass.model import read_base
from windlass.plan import make_plan
from windlass.plan.finished import load_finished_run
from windlass.runfile import read_run_file
from windlass.settings import FOUR_BITS
from windlass.train.batches import make_validation_batches
from windlass.train.checkpoint.snapshot import load_adapter
from windlass.train.head import Head
from windlass.train.kernels.products import as_served
from windlass.train.load import describe_precision, load_base
from windlass.train.logits import compute_both_logits, compute_logits, load_float32, open_adapter, sample_rows
from windlass.train.lora import attach_adapter
from windlass.train.patches import Patches
from windlass.train.precision import in_float32

pytestmark = [
    pytest.mark.prove,
    pytest.mark.timeout(1800),
    # PEFT uses names that transformers will drop, and doesn't look for patterns among expert parameters when it warns.
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*_pattern keys did not match any targeted module:RuntimeWarning"),
]

DPO: dict[str, Any] = {"data__dataset_name_or_path": "{folder}/pairs", "train__objective": "dpo"}
DPO |= {"train__learning_rate": 5e-5, "train__max_steps": 4, "train__eval_steps": 4}
BRIEF: dict[str, Any] = {"train__max_steps": 1, "train__eval_steps": 1}
SPLIT: dict[str, Any] = {"layout": "expert-parallel", "layout__expert_parallel": 2}
EXPERT_ADAPTERS = {"r": 2, "lora_alpha": 4}
MIXTURE: dict[str, Any] = {
    "model__model_name_or_path": "{folder}/mixtral",
    "lora__experts": EXPERT_ADAPTERS,
    "train__max_steps": 2,
    "train__eval_steps": 2,
}


ALONE = {
    "alone": real.of_four(1),
    "by TRL": real.of_four(1, plain=True),
    "bf16": real.of_four(1, train__bf16=True, model__torch_dtype="bfloat16", **BRIEF),
    "nf4": real.of_four(1, layout__base_dtype="nf4", **BRIEF),
    "dpo": real.of_four(1, micro=2, **DPO),
    "dpo by TRL": real.of_four(1, micro=2, plain=True, **DPO),
    "mixture": real.of_four(1, **MIXTURE),
    "mixture by TRL": real.of_four(1, plain=True, **MIXTURE),
}
ON_TWO = {
    "full-shard": real.of_four(2),
    "full-shard, bf16": real.of_four(2, train__bf16=True, **BRIEF),
    "resident, bf16": real.of_four(2, layout="resident", train__bf16=True, **BRIEF),
    "mixture, expert-parallel": real.of_four(2, **SPLIT, **MIXTURE),
}


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
    return real.make_mixture(model, folder / "mixtral")


@pytest.fixture(scope="module")
def alone(folder: Path, model: Path, mixture: Path) -> Outcomes:
    return real.run_cases(folder, model, 1, ALONE)


@pytest.fixture(scope="module")
def two(folder: Path, model: Path, mixture: Path) -> Outcomes:
    return real.run_cases(folder, model, 2, ON_TWO)


def assert_alike(found: Outcomes, name: str, expected: Outcomes, other: str, within: float = 2e-5) -> None:
    losses = [real.read_losses(of, one) for of, one in ((found, name), (expected, other))]
    print(f"{name}: {losses[0]}; {other}: {losses[1]}")
    assert len(losses[0]) == len(losses[1]) > 0
    assert losses[0] == pytest.approx(losses[1], rel=within)


@pytest.mark.parametrize(("name", "other"), [("full-shard", "alone"), ("mixture, expert-parallel", "mixture")])
def test_two_ranks_equal_one_process(two: Outcomes, alone: Outcomes, name: str, other: str) -> None:
    assert_alike(two, name, alone, other)
    runs = two.folder / name, alone.folder / other
    evaluated = [real.read_evaluations(run) for run in runs]
    assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-5)
    difference = real.compare_adapters(*runs)
    print(f"{name}: B differs by {difference:.1e} of its size, evaluation {evaluated[0]}")
    assert difference < 2e-3


@pytest.mark.parametrize(("name", "other"), [("alone", "by TRL"), ("dpo", "dpo by TRL"), ("mixture", "mixture by TRL")])
def test_steps_equal_trls(alone: Outcomes, name: str, other: str) -> None:
    assert_alike(alone, name, alone, other, 1e-4)


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
    dense, mixture = (real.read_base_loss(alone.folder / name) for name in ("alone", "mixture"))
    print(f"evaluation loss of the base: dense {dense:.4f}, mixture {mixture:.4f}")
    assert mixture == pytest.approx(dense, abs=0.05)  # its experts have 1 % of noise


# --- exports ---


def load(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def test_the_merged_mixture_answers_as_the_adapted_one(alone: Outcomes, mixture: Path, tmp_path: Path) -> None:
    """Experts' adapters too. PEFT says what the adapted one answers."""
    trained = alone.folder / "mixture"
    text = sample_rows(trained, read_base(mixture).dims["vocab"])
    export(trained, tmp_path / "merged", merge=True, probes=False)
    with torch.no_grad():
        base = load(mixture)(text).logits
        adapted = PeftModel.from_pretrained(load(mixture), trained / "final")(text).logits - base
        merged = load(tmp_path / "merged")(text).logits - base
    kept = float((merged * adapted).sum() / adapted.square().sum())
    print(f"mixture: merged in bfloat16 keeps {kept:.1%} of what the adapter does to the logits: {adapted.std():.3f}")
    assert kept == pytest.approx(1, abs=0.05)


# --- bfloat16 ---

STORED = ("bf16", "nf4", "fp8", "int4", "nvfp4")
KEPT = {0.2: 0.97, 0.06: 0.9}  # of an adapter of so many nats a token, within two standard errors
MERGED = 0.8  # of an adapter of 0.1 nats a token, within two standard errors: beside it, the noise is large
PUBLISHED = STORED[2:]  # the others are made of 16 bits as they load


def test_bfloat16_computes_what_an_adapter_adds(
    alone: Outcomes, folder: Path, model: Path, mixture: Path, tmp_path: Path
) -> None:
    """However the base is stored: by how much an adapter changes tokens' losses, against float32. Each storage rounds
    in its own way, and none of them always towards the base: most of the adapter was lost when sums were rounded twice.
    """
    once: dict[float, list[float]] = {gain: [] for gain in KEPT}
    for kind, base, dtypes in (("alone", model, STORED), ("mixture", mixture, STORED[:3])):
        for dtype in dtypes:
            stored = real.publish(base, tmp_path / kind / dtype, dtype) if dtype in PUBLISHED else base
            shares = compute_shares(folder, stored, dtype, alone.folder / kind / "final", kind)
            for gain, (share, error) in shares.items():
                once[gain].append(share)
                assert share + 2 * error > KEPT[gain]
    means = {gain: sum(found) / len(found) for gain, found in once.items()}
    print(f"mean of {len(once[0.2])} storages: {means}")
    assert once[0.2] == pytest.approx([1.0] * len(once[0.2]), abs=0.1)
    assert means[0.2] == pytest.approx(1, abs=0.04)
    assert means[0.06] == pytest.approx(1, abs=0.1)


def test_a_merge_into_4_bits_keeps_what_an_adapter_adds(alone: Outcomes, model: Path, tmp_path: Path) -> None:
    """Nearly every change is smaller than half a step of 4 bits: rounded to the nearest code, nothing would be left."""
    trained = alone.folder / "alone"
    for scheme in ("int4", "nvfp4", "nf4"):
        base, to = real.publish(model, tmp_path / scheme, scheme), tmp_path / f"merged-{scheme}"
        with real.timed(scheme):
            record = export(
                trained / "final", to, merge=True, base=str(base), allow_other_base=True, probes=False, say=print
            )
        rows = sample_rows(trained, read_base(base).dims["vocab"])
        adapted = open_adapter(load_float32(read_base(base)), trained / "final")
        logits = [*compute_both_logits(adapted, rows), compute_logits(load_float32(read_base(to)), rows)]
        scores = [each[:, :-1].double().log_softmax(-1).gather(-1, rows[:, 1:, None]).flatten() for each in logits]
        exact, found = (each - scores[0] for each in scores[1:])
        share, error = fit_slope(exact.tolist(), found.tolist())
        kl, own = record["logits"]["kl"], record["logits"]["adapter_kl"]
        print(
            f"{scheme}: {float(exact.mean()):.3f} nats a token, merged {share:.1%} +- {error:.1%}; "
            f"KL {kl:.1e} of {own:.1e}"
        )
        assert record["kept"] == pytest.approx(1, abs=0.1)  # of sampled rows
        assert share + 2 * error > MERGED
        assert kl < 0.05


def compute_shares(
    folder: Path, base: Path, base_dtype: str, trained: Path, kind: str
) -> dict[float, tuple[float, float]]:
    """Return the share of an adapter's effect that bfloat16 computes, and its standard error, with B scaled so that it
    is worth these nats. Rounded once it is nearer to float32 than rounded twice."""
    stored = [f"model.model_name_or_path={base}", "model.torch_dtype=bfloat16", f"layout.base_dtype={base_dtype}"]
    experts = [] if kind == "alone" else [f"lora.experts={json.dumps(EXPERT_ADAPTERS)}"]
    here = ["cluster.gpu=cpu", "cluster.gpus_per_node=1", "train.bf16=true", "train.per_device_eval_batch_size=8"]
    plan = make_plan(read_run_file(folder / "run.yaml", [*stored, *experts, *here]))
    loaded, _ = load_base(plan.base, plan.layout, **describe_precision(plan))
    adapted = attach_adapter(loaded, plan.run.lora, plan.adapter, plan.run.train.seed).eval()
    Patches().patch_forward(adapted.get_base_model())
    load_adapter(adapted, trained)
    tokenizer = AutoTokenizer.from_pretrained(base)
    data = prepare_data(plan.run, tokenizer, where=plan.where, cache=folder / "tokens", say=print)
    batch = next(make_validation_batches(plan, data, tokenizer.pad_token_id).epoch(0))
    head = Head(loaded)
    cpu = torch.device("cpu")

    precisions: dict[str, Any] = {
        "exact": partial(in_float32, loaded),
        "once": partial(torch.autocast, "cpu", torch.bfloat16),
        "twice": partial(as_served, cpu),
    }

    @torch.no_grad()
    def measure(name: str) -> torch.Tensor:
        with precisions[name]():
            losses: torch.Tensor = head.figures(loaded(**batch.inputs).last_hidden_state, batch.targets)[0].double()
        return losses

    with adapted.disable_adapter():
        of_base = {name: measure(name) for name in precisions}
    exact, shares = measure("exact") - of_base["exact"], {}
    for gain in KEPT:
        scale_adapter(adapted, gain / -float(exact.mean()))
        exact, once, twice = (measure(name) - of_base[name] for name in precisions)
        shares[gain] = share, error = fit_slope(exact.tolist(), once.tolist())
        wrong = [float((found - exact).norm() / exact.norm()) for found in (once, twice)]
        print(
            f"{kind}, {base_dtype}: {-float(exact.mean()):.3f} nats a token, bfloat16 keeps {share:.1%} +- "
            f"{error:.1%}, rounded twice {fit_slope(exact.tolist(), twice.tolist())[0]:.1%}; "
            f"error {wrong[0]:.0%} and {wrong[1]:.0%} of the effect"
        )
        assert wrong[0] < wrong[1]
    return shares


BRIEF_DPO: dict[str, Any] = {**DPO, "model__torch_dtype": "bfloat16", "train__bf16": True}
BRIEF_DPO |= {"train__learning_rate": 5e-6, "train__max_steps": 50, "train__eval_steps": 50}


def test_pairs_after_a_brief_dpo_are_evaluated_as_in_float32(model: Path, tmp_path: Path) -> None:
    """50 steps at 5e-6 in bfloat16 on two ranks, whose base is sharded: the evaluation's loss, margins and accuracy are
    those of transformers and PEFT in float32; the margins of the pass that is optimized carry its noise."""
    real.write_rows(tmp_path, count=50, held_out=24)
    trained = real.run_cases(tmp_path, model, 2, {"dpo": real.of_four(2, micro=1, **BRIEF_DPO)}).folder / "dpo"
    found = [line for line in read_json_lines(trained / "events.jsonl") if line["kind"] == "eval"][-1]
    plan = make_plan(load_finished_run(trained, eval_data=None, ranks=1))
    loaded, _ = load_base(plan.base, plan.layout, **describe_precision(plan))
    adapted = attach_adapter(loaded, plan.run.lora, plan.adapter, plan.run.train.seed).eval()
    load_adapter(adapted, trained / "final")
    Patches().patch_adapted_linears(adapted)
    exact = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), trained / "final"
    )
    tokenizer = AutoTokenizer.from_pretrained(model)
    data = prepare_data(plan.run, tokenizer, where=plan.where, cache=tmp_path / "tokens", say=print)
    batches = [*make_validation_batches(plan, data, tokenizer.pad_token_id).epoch(0)]
    margins = {
        "exact": measure_margins(exact, batches, nullcontext),
        "evaluation": measure_margins(adapted, batches, partial(in_float32, loaded)),
        "step": measure_margins(adapted, batches, partial(torch.autocast, "cpu", torch.bfloat16)),
    }
    true = margins["exact"]
    correlation = {name: float(torch.corrcoef(torch.stack([true, each]))[0, 1]) for name, each in margins.items()}
    error = {name: float((each - true).square().mean().sqrt()) for name, each in margins.items()}
    print(f"{len(true)} pairs, margins of {true.std():.4f} nats; correlation {correlation}; error {error}")
    beta = plan.run.dpo.beta
    expected = [-logsigmoid(beta * true).mean(), beta * true.mean(), (true > 0).double().mean()]
    names = ("eval_loss", "eval_rewards/margins", "eval_rewards/accuracies")
    print(f"evaluation {[found[name] for name in names]}; in float32 {[float(each) for each in expected]}")
    assert [found[name] for name in names] == pytest.approx([float(each) for each in expected], rel=1e-3, abs=1e-6)
    assert correlation["evaluation"] > 0.95
    assert error["evaluation"] < 0.05 * error["step"]


@torch.no_grad()
def measure_margins(model: Any, batches: Any, precision: Any) -> torch.Tensor:
    """Return by how much more the adapter favours each pair's chosen answer than the base does."""

    def compute(batch: Any) -> torch.Tensor:
        logits = model(input_ids=batch.inputs["input_ids"], use_cache=False).logits.flatten(0, 1)
        scores = logits[batch.inputs["supervised"]].float().log_softmax(-1).gather(1, batch.targets[:, None])
        sums = torch.zeros(len(batch.pairs.lengths)).double().index_add(0, batch.pairs.sequences, scores[:, 0].double())
        chosen, rejected = sums.view(-1, 2).unbind(1)
        return (chosen - rejected)[: len(batch.rows)]

    margins = []
    for batch in batches:
        with precision():
            margin = compute(batch)
            with model.disable_adapter():
                margins.append(margin - compute(batch))
    return torch.cat(margins)


def scale_adapter(model: Any, factor: float) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter *= factor
