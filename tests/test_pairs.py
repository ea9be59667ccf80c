"""All pairs of a run's options: each trained as TRL and PEFT train it, or refused in `plan`; nothing in between.

An option is a *factor* with its *levels*, the first of them the default: FACTORS["kind"]["rslora"] are its overrides of
the run file. `cover()` makes few cases in which each pair of levels of two factors occurs, other ones at each run: it
prints its seed, and `WINDLASS_SEED=N` draws the same cases again. Pairs that contradict each other are refused by
`plan`: CONTRADICTIONS has them all, and `cover()` avoids them.

Some levels loosen the comparison (bfloat16 has 8 bits), so a fault in another pair could hide behind them: a case with
one of LOOSE counts for the pairs of that level only.
"""

import functools
import itertools
import json
import os
import random
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from test_train import start_ranks, write_run
from text_run import WORDS, write_rows

from windlass import tiny
from windlass.data.packing import open_rows
from windlass.errors import Problem, UserError
from windlass.files import read_json, read_json_lines
from windlass.plan import make_plan
from windlass.run_folder import ADAPTER
from windlass.runfile import read_run_file

SEED = int(os.environ.get("WINDLASS_SEED") or secrets.randbits(32))
Overrides = dict[str, Any]
OPTIONS = yaml.safe_load((Path(__file__).parent / "golden" / "pairs.yaml").read_text())
FACTORS: dict[str, dict[str, Overrides]] = OPTIONS["factors"]
CONTRADICTIONS: list[tuple[Mapping[str, Sequence[str]], str, str]] = OPTIONS["contradictions"]
INCOMPARABLE: list[Mapping[str, Sequence[str]]] = OPTIONS["incomparable"]
LOOSE = {("precision", level) for level in ("autocast", "bfloat16", "all bfloat16")} | {("adapter", "bfloat16")}
Case = dict[str, str]  # the level of each factor
Level = tuple[str, str]
DEFAULTS: Case = {factor: next(iter(levels)) for factor, levels in FACTORS.items()}
BIASED: list[Case] = [  # a sharded bias has the adapter's dtype, not its base's
    {"model": "dense", "layout": "full-shard", "precision": "bfloat16", "bias": "all"},
    {"model": "dense", "layout": "no-reshard", "precision": "autocast", "adapter": "bfloat16", "bias": "all"},
]
LEVELS: list[Level] = [(factor, level) for factor, levels in FACTORS.items() for level in levels]

OF_PAIRS = ("dpo", "orpo")
SAID: list[tuple[Case, str]] = [
    (
        {"model": "mixture", "layout": "expert-parallel", "bias": "all", "experts": "the same"},
        "lora.bias: all trains biases of the base, and experts' adapters would be split",
    ),
    (
        {"layout": "full-shard", "in full": "both", "optimizer": "adafactor"},
        "train.optim: adafactor looks at a full tensor, and what is trained of the base would be sharded",
    ),
    (
        {"start": "pissa", "optimizer": "adafactor"},
        "adafactor looks at a full tensor, and half of it is fixed with lora.init_lora_weights: pissa",
    ),
    (
        {"model": "dense", "precision": "all bfloat16", "bias": "all"},
        "the base's biases are trained in float32 (lora.dtype), and layers in bfloat16 can't add them",
    ),
    ({"dora": "yes", "adapter": "bfloat16"}, "norms of weights, of which bfloat16 rounds updates away"),
    (
        {"model": "mixture", "start": "pissa", "targets": "all-linear"},
        "pissa with rank 4, and the weight of shared_expert_gate has only rank 1",
    ),
]
# An adapter as large as the base: a rounding to 8 bits, or a token whose expert changes, grows with every step, and two
# right runs drift apart as fast as either from one in float32. Their first steps and adapters are compared.
CHAOTIC: list[Mapping[str, Sequence[str]]] = [
    {"start": ("both random",), "precision": ("autocast", "bfloat16", "all bfloat16")},
    {"start": ("both random",), "adapter": ("bfloat16",)},
    {"start": ("both random",), "router": ("balanced",)},
]
# Small steps on large values, which bfloat16 rounds away: the run or the resumed one stops and says what doesn't train.
ROUNDED_AWAY: Mapping[str, Sequence[str]] = {"adapter": ("bfloat16",), "optimizer": ("sgd",)}


def matches(case: Case, levels: Mapping[str, Sequence[str]]) -> bool:
    return all(case.get(factor) in names for factor, names in levels.items())


def is_allowed(case: Case) -> bool:
    """Return whether a case, or a part of one, has nothing that contradicts."""
    avoided = [*(levels for levels, _, _ in CONTRADICTIONS), *INCOMPARABLE]
    return not any(matches(case, levels) for levels in avoided)


def is_possible(part: Case) -> bool:
    """Return whether any model, with an adapter in any dtype, completes a part of a case."""
    hubs = itertools.product(FACTORS["model"], FACTORS["adapter"])
    return any(is_allowed({**DEFAULTS, "model": model, "adapter": dtype, **part}) for model, dtype in hubs)


def drops_in_experts(case: Case) -> bool:
    """Return whether experts' adapters have dropout, which PEFT refuses."""
    routed = case["model"] in ("published", "mixture")
    return case["dropout"] == "some" and (case["experts"] != "none" or (routed and case["targets"] == "all"))


def pairs_of(case: Case) -> set[frozenset[Level]]:
    """Return the pairs of levels that a case is a proof of."""
    pairs = {frozenset(pair) for pair in itertools.combinations(case.items(), 2)}
    if drops_in_experts(case):
        return {pair for pair in pairs if {("dropout", "some"), ("experts", case["experts"])} == pair}
    loose = LOOSE & case.items()
    return {pair for pair in pairs if pair & loose} if loose else pairs


def list_cases() -> list[Case]:
    """Return cases in which every possible pair of levels occurs, and then those of a fault that no pair shows."""
    return [*cover(), *({**DEFAULTS, **case} for case in BIASED)]


@functools.cache
def cover(seed: int = SEED, tries: int = 6) -> list[Case]:
    """Return cases in which every possible pair of levels occurs."""
    chance = random.Random(seed)
    pairs = [pair for pair in itertools.combinations(LEVELS, 2) if pair[0][0] != pair[1][0] and is_possible(dict(pair))]
    missing = dict.fromkeys(map(frozenset, pairs))
    cases: list[Case] = []
    while missing:
        built = [case for _ in range(tries) if (case := build(chance, missing))]
        if not built:
            continue
        best = max(built, key=lambda case: len(pairs_of(case) & missing.keys()))
        for pair in pairs_of(best):
            missing.pop(pair, None)
        cases.append({factor: best[factor] for factor in FACTORS})
    chance.shuffle(cases)
    return cases


def build(chance: random.Random, missing: dict[frozenset[Level], None]) -> Case | None:
    """Return a case with a missing pair, and with as many more as a random order of the factors finds."""
    first = chance.choice(list(missing))
    case = dict(sorted(first))
    loose = bool(LOOSE & first)
    factors = [factor for factor in FACTORS if factor not in case]
    chance.shuffle(factors)
    for factor in factors:
        levels = [level for level in FACTORS[factor] if is_possible({**case, factor: level})]
        if not loose:
            levels = [level for level in levels if (factor, level) not in LOOSE]
        if not levels:
            return None

        def gain(level: str, factor: str = factor) -> int:
            return sum(frozenset([(factor, level), other]) in missing for other in case.items())

        chance.shuffle(levels)
        case[factor] = max(levels, key=gain)
    return case if pairs_of(case) & missing.keys() else None


def overrides(case: Case, folder: Path) -> list[str]:
    """Return what a case sets, as `--override` takes it."""
    merged: Overrides = {}
    for factor, level in case.items():
        merged |= FACTORS[factor][level]
    texts = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in merged.items()]
    return [text.replace("{folder}", str(folder)) for text in texts]


def write_material(folder: Path) -> Path:
    """Write four tiny models, rows of five kinds, and the run file."""
    sizes: dict[str, Any] = {"hidden": 64, "layers": 2, "heads": 2, "intermediate": 64, "vocab": 512}
    tiny.write_model(folder / "published", experts=4, moe_intermediate=32, **sizes)
    biased = {"attention_bias": True}
    tiny.write_model(folder / "dense", "qwen3", dtype="float32", config=biased, **sizes)
    tiny.write_model(folder / "tied", "qwen3", dtype="float32", tied=True, **sizes)
    routed = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 4}
    tiny.write_family(folder / "mixture", "qwen2_moe", layers=2, config=routed, tokenizer=True)
    chance = random.Random(0)
    said = [" ".join(chance.choices(WORDS.split(), k=chance.randint(3, 12))) for _ in range(200)]
    asked = [{"prompt": f"{text}?", "completion": f" {text[::-1]}"} for text in said]
    few = [" ".join(chance.choices(WORDS.split(), k=chance.randint(1, 2))) for _ in range(200)]
    dialogs = [few[start : start + 4] for start in range(0, 200, 4)]
    sets: dict[str, list[dict[str, Any]]] = {
        "text": [{"text": text} for text in said],
        "completions": asked,
        "chats": [
            {
                "messages": [
                    {"role": "user", "content": row["prompt"]},
                    {"role": "assistant", "content": row["completion"].strip()},
                ]
            }
            for row in asked
        ],
        "asked": asked[30:36],
        "dialogs": [
            {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]}
            for texts in dialogs
        ],
        "pairs": [{"prompt": f"{a} {b}:", "chosen": f" {c}", "rejected": f" {d}"} for a, b, c, d in dialogs],
    }
    for name, lines in sets.items():
        write_rows(folder / f"{name}.jsonl", lines)
    train: dict[str, Any] = {
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "warmup_ratio": 0,
    }
    train |= {"gradient_accumulation_steps": 1, "weight_decay": 0.05, "adam_epsilon": 1e-6, "logging_steps": 1}
    write_run(
        folder / "run.yaml",
        model__model_name_or_path=f"{folder}/published",
        lora__lora_alpha=6,
        lora__target_modules=["q_proj", "v_proj", "o_proj"],
        data={"dataset_config_name": None, "val_split": None, "max_length": 48, "packing": False},
        layout={"name": "resident", "base_dtype": "bf16"},
        cluster={"gpus_per_node": 2, "gpu": "cpu"},
        train__save_strategy="steps",
        train__save_steps=2,
        **{f"train__{key}": value for key, value in train.items()},
    )
    return folder


def parts(case: Case) -> list[str]:
    """Return the runs that a case is compared in."""
    swept = [] if case["sweep"] == "none" else ["swept"]
    return ["recomputed" if drops_in_experts(case) else "trl", "windlass", "resumed", *swept]


def refusal(case: Case, folder: Path) -> list[Problem]:
    """Return what `plan` objects to, nothing if it takes the case."""
    try:
        make_plan(read_run_file(folder / "run.yaml", overrides(case, folder)), compare=False)
    except UserError as error:
        return list(error.problems)
    return []


def launch(cases: Mapping[str, Case], material: Path, out: Path, seconds: float) -> str:
    """Run cases in one start of two ranks, each in a folder of its own name; none begins later than these seconds
    after the ranks. Return what the ranks wrote if they didn't end well."""
    out.mkdir()
    described = {name: {"overrides": overrides(case, material), "parts": parts(case)} for name, case in cases.items()}
    (out / "cases.json").write_text(json.dumps(described))
    files = (material / "run.yaml", out / "cases.json", out)
    done = start_ranks("pair_ranks.py", 2, material, *files, seconds, timeout=seconds + 180)
    return (done.stdout + done.stderr)[-9000:] if done.returncode else ""


# --- comparisons ---

AT_ONCE = 20  # cases of one start: gloo's groups stay, each with three threads that never rest
TIGHT = {"loss": 1e-5, "grad_norm": 1e-4, "adapter": 1e-4, "logits": 1e-4, "eval_loss": 1e-5}
LOOSELY = {"loss": 2**-9, "grad_norm": 2**-5, "adapter": 2**-5, "logits": 2**-4, "eval_loss": 2**-9}
EXACT = ("loss", "grad_norm", "learning_rate", "job_tokens", "rows", "source_loss", "router_aux_loss")


def read_steps(run: Path) -> list[dict[str, Any]]:
    return list(read_json_lines(run / "steps-rank0.jsonl"))


def read_evaluations(run: Path) -> list[float]:
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return [line["eval_loss"] for line in events if line["kind"] == "eval"]


def last_adapter(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / "step-3" / ADAPTER)


def differences(case: Case, out: Path) -> list[str]:
    """Return where a case's run differs from TRL's and PEFT's, and from itself."""
    outcomes = [read_json(out / f"outcome-{rank}.json") for rank in range(2)]
    errors = [outcome["error"] for outcome in outcomes if "error" in outcome]
    if matches(case, ROUNDED_AWAY) and all("not training" in error for error in errors[:2]) and len(errors) == 2:
        return []
    if errors:
        return errors
    run = out / "run"
    steps = read_steps(run)
    found = [] if len(steps) == 3 else [f"{len(steps)} steps"]
    dtypes = {str(tensor.dtype) for tensor in last_adapter(run).values()}
    if dtypes != {f"torch.{case['adapter']}"}:
        found.append(f"adapter in {sorted(dtypes)}, and not {case['adapter']}")
    bounds = LOOSELY if LOOSE & case.items() else TIGHT
    drifts = any(matches(case, levels) for levels in CHAOTIC)
    compared = slice(1 if drifts else None)  # of the steps
    if drifts and bounds is LOOSELY:
        bounds = {**LOOSELY, "grad_norm": 2**-3}

    def compare(what: str, bound: float, value: float, expected: float, relative: bool = True) -> None:
        if not abs(value - expected) <= bound * (abs(expected) if relative else 1):
            found.append(f"{what}: {value}, and not {expected}")

    if "recomputed" in parts(case):
        for step, other in zip(steps[compared], read_steps(out / "recomputed")[compared], strict=True):
            for key in ("loss", "grad_norm"):
                compare(f"recomputed {key} of step {step['step']}", bounds[key], step[key], other[key])
    else:
        by_trl = outcomes[0]["trl"]
        for step, other in zip(steps[compared], by_trl["steps"][compared], strict=True):
            for key in ("loss", "grad_norm"):
                compare(f"{key} of step {step['step']}", bounds[key], step[key], other[key])
        evaluated = read_evaluations(run)[-1:]
        if case["objective"] in OF_PAIRS or drifts:
            pass  # of pairs TRL evaluates another mean
        elif evaluated and by_trl["eval_loss"] is not None:
            compare("eval_loss", bounds["eval_loss"], evaluated[0], by_trl["eval_loss"])
        elif evaluated or by_trl["eval_loss"] is not None:
            found.append("only one of the two was evaluated")
        found += differences_of_adapters(case, out, bounds, drifts)
    if case["rows"] == "mix" and case["router"] == "none":  # whose loss is added
        for step, tokens in zip(steps, count_tokens_by_source(run), strict=True):
            together = sum(step["source_loss"][name] * count for name, count in tokens.items() if count)
            compare(f"loss by source of step {step['step']}", 1e-5, together / sum(tokens.values()), step["loss"])
    found += [f"resumed: {difference}" for difference in differences_of_runs(run, out / "resumed")]
    trial = out / "swept" / "trials" / "same"
    if case["sweep"] == "in turns":
        found += [f"as a trial: {difference}" for difference in differences_of_runs(run, trial)]
    elif case["sweep"] == "together":
        for step, other in zip(steps[compared], read_steps(trial)[compared], strict=True):
            for key in ("loss", "grad_norm"):
                compare(f"together, {key} of step {step['step']}", bounds[key], other[key], step[key])
        ours, shared = last_adapter(run), last_adapter(trial)
        off = max((ours[name].float() - shared[name].float()).abs().max().item() for name in ours)
        compare("together, the adapter", bounds["adapter"], off, 0, relative=False)
    if FACTORS["evaluation"][case["evaluation"]].get("train.load_best_model_at_end"):
        evaluations = read_evaluations(run)
        best = run / "checkpoints" / f"step-{1 + evaluations.index(min(evaluations))}"
        if unequal(load_file(run / "final" / ADAPTER), load_file(best / ADAPTER)):
            found.append(f"final is not the best, {best.name}")
    return found


def count_tokens_by_source(run: Path) -> list[Counter[str]]:
    """Return each step's tokens with loss, by the data set of a mix that they come from."""
    (file,) = (run / "tokens").glob("*/train.arrow")
    rows = open_rows(file).to_pylist()
    names = list(read_json(file.with_name("audit.json"))["sources"])
    counts = [Counter[str]() for _ in range(3)]
    for rank in range(2):
        for step in read_json_lines(run / f"steps-rank{rank}.jsonl"):
            for row in (rows[number] for number in step["rows"]):
                labels = list(row.get("labels") or row["input_ids"])
                ends = itertools.accumulate(row.get("seq_lengths") or [len(labels)], initial=0)
                for first in list(ends)[:-1]:
                    labels[first] = -100  # a document's first token is predicted from nothing
                counts[step["step"] - 1][names[row["source"][0]]] += sum(label != -100 for label in labels)
    return counts


def differences_of_adapters(case: Case, out: Path, bounds: dict[str, float], drifts: bool) -> list[str]:
    found = []
    ours = last_adapter(out / "run")
    theirs = load_file(out / "trl.tensors")
    if ours.keys() != theirs.keys():
        found.append(f"tensors of one alone: {sorted(ours.keys() ^ theirs.keys())}")
    elif case["start"] not in ("pissa", "olora"):  # these have twice the rank
        furthest = {name: (ours[name].float() - theirs[name].float()).abs().max().item() for name in ours}
        name = max(furthest, key=lambda name: furthest[name])
        if not furthest[name] <= bounds["adapter"]:
            found.append(f"{name} is off by {furthest[name]}")
    logits = [load_file(out / name)["logits"] for name in ("peft.logits", "trl.logits")]
    off = (logits[0] - logits[1]).abs().max().item()
    if not drifts and not off <= bounds["logits"]:
        found.append(f"logits by PEFT from the saved adapter are off by {off}")
    return found


def unequal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    if one.keys() != other.keys():
        return sorted(one.keys() ^ other.keys())
    return [name for name in one if not torch.equal(one[name], other[name])]


def differences_of_runs(run: Path, other: Path) -> list[str]:
    """Return where a run, stopped and resumed, differs from one that wasn't stopped, in any bit."""
    found = [f"{name} differs" for name in unequal(last_adapter(run), last_adapter(other))[:2]]
    for step, again in zip(read_steps(run), read_steps(other), strict=True):
        found += [f"{key} of step {step['step']}" for key in EXACT if step.get(key) != again.get(key)]
    if read_evaluations(run) != read_evaluations(other):
        found.append("evaluations")
    states = [read_json(folder / "checkpoints" / "step-3" / "trainer_state.json") for folder in (run, other)]
    if states[0]["num_input_tokens_seen"] != states[1]["num_input_tokens_seen"]:
        found.append("tokens seen")
    return found


# --- tests ---


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_material(tmp_path_factory.mktemp("pairs"))


@pytest.mark.fault(
    "biases trained next to split experts' adapters",
    "`windlass plan run.yaml`",
    "lora.bias: all trains biases of the base, and experts' adapters would be split",
)
@pytest.mark.fault(
    "Adafactor for sharded weights of the base",
    "`windlass plan run.yaml`",
    "train.optim: adafactor looks at a full tensor, and what is trained of the base would be sharded",
)
@pytest.mark.fault(
    "Adafactor for adapters that begin as their weights",
    "`windlass plan run.yaml`",
    "adafactor looks at a full tensor, and half of it is fixed with lora.init_lora_weights: pissa",
)
@pytest.mark.fault(
    "biases trained in another dtype than their layers have",
    "`windlass plan run.yaml`",
    "the base's biases are trained in float32 (lora.dtype), and layers in bfloat16 can't add them",
)
@pytest.mark.fault(
    "DoRA's magnitudes in bfloat16",
    "`windlass plan run.yaml`",
    "norms of weights, of which bfloat16 rounds updates away",
)
@pytest.mark.fault(
    "PiSSA with a rank above the weight's",
    "`windlass plan run.yaml`",
    "pissa with rank 4, and the weight of shared_expert_gate has only rank 1",
)
@pytest.mark.long
def test_contradictions_are_refused_by_the_plan(material: Path) -> None:
    wrong = []
    for levels, code, place in CONTRADICTIONS:
        for combination in itertools.product(*levels.values()):
            case = dict(zip(levels, combination, strict=True))
            problems = refusal({**DEFAULTS, **case}, material)
            as_told = [problem for problem in problems if problem.code == code and place in problem.where]
            if not as_told or not all(problem.hint for problem in problems):
                wrong.append((case, problems))
    assert wrong == []
    for case, words in SAID:
        assert any(words in problem.problem for problem in refusal({**DEFAULTS, **case}, material)), words


@pytest.mark.long
def test_what_is_trained_is_planned(material: Path) -> None:
    refused = [(case, problems) for case in list_cases() if (problems := refusal(case, material))]
    assert refused == []


def run_and_compare(cases: Mapping[str, Case], material: Path, out: Path, seconds: float) -> list[str]:
    """Compare the cases that begin within these seconds, and return their names."""
    failure = launch(cases, material, out, seconds)
    names = [name for name in cases if (out / name / "outcome-1.json").exists()]
    found = {name: differences(cases[name], out / name) for name in names}
    of_cases = [
        f"case {name}: {'; '.join(found[name])}\n  { ({k: v for k, v in cases[name].items() if v != DEFAULTS[k]}) }"
        for name in names
        if found[name]
    ]
    problems = "\n".join(filter(None, [*of_cases, failure]))
    assert not problems, f"WINDLASS_SEED={SEED}\n{problems}"
    return names


@pytest.mark.long
def test_some_cases_equal_trl_and_peft(material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\nWINDLASS_SEED={SEED}")
    cases = {str(number): case for number, case in enumerate([*list_cases()[-len(BIASED) :], *cover()])}
    names = run_and_compare(cases, material, tmp_path / "out", seconds=10)
    assert names
    usual = [name for name in names[len(BIASED) :] if not matches(cases[name], ROUNDED_AWAY)]
    compared = [name for name in usual if "trl" in parts(cases[name])]
    for name, other in itertools.pairwise(compared):  # they can differ
        for file in ("outcome-0.json", "trl.tensors", "trl.logits"):
            shutil.copy(tmp_path / "out" / other / file, tmp_path / "out" / name / file)
        assert differences(cases[name], tmp_path / "out" / name), (SEED, name, other)


@pytest.mark.prove
@pytest.mark.timeout(1200)
def test_pairs_equal_trl_and_peft_for_four_minutes(
    material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    end = time.monotonic() + 240
    seed = SEED
    with capsys.disabled():
        print(f"\nWINDLASS_SEED={SEED}")
    while time.monotonic() < end:
        cases = [(f"{seed}-{number}", case) for number, case in enumerate(cover(seed))]
        for first in range(0, len(cases), AT_ONCE):
            some = dict(cases[first : first + AT_ONCE])
            if (left := end - time.monotonic()) > 0:
                run_and_compare(some, material, tmp_path / f"{seed} from {first}", left)
        seed += 1
