"""Full runs with real processes over gloo: equal to plain TRL + PEFT, and stopped by every planted fault.

Ranks start slowly, so all runs of one number of ranks share one start. A run is a *case*: a name in `CASES[ranks]` with
what `case()` returns. tests/train_ranks.py runs them in turn, in every rank, and each rank writes its outcomes as JSON.
Fixtures read them, once per session: `alone` (one rank), `two` and `four`; `make prove` runs those of `MORE`, too.

For example, `CASES[2]["nan"] = case(2, faults=["nan"], **SAVING)`:

- `case()` makes overrides of the run file RUN: 8 sequences a step over 2 ranks, and `train__save_steps=3` of SAVING
  becomes `train.save_steps=3`. Keys without `__` (`faults`, `count`, `resume`, `plain`, `probed`, `on_rank_1`) are
  for train_ranks.py, which looks up `FAULTS["nan"]`: before step 3, rank 1's next forward returns NaN.
- `two["nan"]` is rank 0's outcome: "code", or "error", "kind" and "where" of what it raised, "placements",
  "collectives"; `two.ranks[1]["nan"]` is rank 1's; `two.steps("nan")` are the lines of its steps-rank0.jsonl, and
  `two.folder / "nan"` is its run folder. `test_a_nan_stops_the_run_and_names_step_rank_and_rows` compares them.
- A case in `EQUAL` is also compared with TRL step by step: with `CASES[1]["plain"]`, or the plain one of its kind.
"""

import copy
import functools
import importlib.util
import itertools
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
import warm
import yaml
from datasets import Dataset
from peft import PeftConfig
from ports import free_port
from safetensors.torch import load_file
from transformers import AutoTokenizer, MixtralConfig, MixtralForCausalLM
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from windlass import tiny
from windlass.data.collate import PaddedCollator
from windlass.errors import RANK_USER_INPUT, SAVED
from windlass.files import read_json, read_json_lines
from windlass.run_folder import ADAPTER, PROBE
from windlass.train.checkpoint.folder import find_damage, list_checkpoints
from windlass.train.collate import Collate
from windlass.train.head import ChunkedCrossEntropy, Head, LogitShaping
from windlass.train.kernels.compiled import TOLERANCE as TOLERANCES
from windlass.train.loss import balance_router, router_loss_weight
from windlass.train.patches import Patches

STEPS = 6  # that are compared with TRL in every run of the tests
PROVEN = 10  # by `make prove`
TOLERANCE = 1e-5
WORDS = "anchor bark cable deck eddy fathom galley hull inlet jib keel lee mast north oar pier quay reef sail tide"

RUN = """
model: {{model_name_or_path: {folder}/model, torch_dtype: float32}}
lora: {{r: 4, lora_alpha: 8, lora_dropout: 0, target_modules: all-linear}}
data:
  dataset_name_or_path: {folder}/data
  dataset_config_name: null
  text_field: text
  val_split: null
  max_length: 48
train:
  output_dir: {folder}/out
  max_steps: {steps}
  per_device_eval_batch_size: 1
  learning_rate: 0.005
  warmup_ratio: 0.1
  lr_scheduler_type: cosine
  weight_decay: 0.01
  bf16: false
  gradient_checkpointing: false
  logging_steps: 5
  max_grad_norm: 0.25
  eval_strategy: "no"
  save_strategy: "no"
  report_to: none
  seed: 3
  ddp_timeout: 60
"""


def write_run(path: Path, **changed: Any) -> None:
    """Write `RUN` with other sections, and other values of section__key."""
    run = yaml.safe_load(RUN.format(folder=path.parent, steps=4))
    for key, value in changed.items():
        section, _, name = key.partition("__")
        if name:
            run.setdefault(section, {})[name] = value
        else:
            run[section] = value
    path.write_text(yaml.safe_dump(run, sort_keys=False))


# Three sets in three formats, an evaluation set with a name, and rows held out of each.
DATED = "{{ strftime_now('%d %B') }}{% for m in messages %}{{ m.role }} {{ m.content }}{% endfor %}"
MIX = """  mix:
  - {{path: {folder}/data, name: words, rows: 16}}
  - {{path: {folder}/talks.jsonl, epochs: 0.5}}
  - {{path: {folder}/ids.jsonl, epochs: 2}}
  eval: {{asked: {{path: {folder}/asked.jsonl}}}}
  val_fraction: 0.1
"""
STREAM = """  mix:
  - {{path: {folder}/data, name: words, weight: 2}}
  - {{path: {folder}/talks.jsonl, weight: 1}}
  eval: {{asked: {{path: {folder}/asked.jsonl}}}}
  val_split: null
  streaming: true
"""


def case(
    world: int, *, micro: int = 0, accumulation: int = 1, layout: str = "full-shard", **rest: Any
) -> dict[str, Any]:
    """Return a run of 8 sequences per step, distributed as requested."""
    micro = micro or 8 // world // accumulation
    overrides = {
        "layout.name": layout if world > 1 else "resident",
        "cluster.gpus_per_node": world,
        "train.per_device_train_batch_size": micro,
        "train.gradient_accumulation_steps": accumulation,
        **{key.replace("__", "."): value for key, value in rest.items() if "__" in key},
    }
    return {
        "overrides": [f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in overrides.items()],
        **{key: value for key, value in rest.items() if "__" not in key},
    }


EXPERTS: dict[str, Any] = {"lora__experts": {"r": 2, "lora_alpha": 4}}
SPLIT: dict[str, Any] = {"layout": "expert-parallel", "layout__expert_parallel": 2}
PACKED: dict[str, Any] = {"data__packing": True}
# w1 to w3 are names of routed experts alone: of this model's, nothing else is adapted.
ONLY: dict[str, Any] = {**EXPERTS, "lora__target_modules": ["w1", "w2", "w3"]}
AS_LOADED: dict[str, Any] = {"layout__base_dtype": "bf16"}  # and not FP8 where the plan finds that faster
KEPT: dict[str, Any] = {"layout__reshard_after_forward": False, **AS_LOADED}
BRIEF: dict[str, Any] = {"train__max_steps": 4}
BALANCED: dict[str, Any] = {**BRIEF, "train__router_aux_loss_coef": 0.5, "layout__base_dtype": "bf16"}
COUNT: dict[str, Any] = {**BRIEF, "count": 4}  # the steps before also look for dead tensors
DROPOUT: dict[str, Any] = {**EXPERTS, **BRIEF, "lora__lora_dropout": 0.2}
CHECKPOINTING: dict[str, Any] = {"train__gradient_checkpointing": True}
NARROW: dict[str, Any] = {**EXPERTS, **BRIEF, "train__bf16": True}
IN_FULL: dict[str, Any] = {"lora__modules_to_save": ["embed_tokens", "lm_head"], "layout__base_dtype": "bf16"}
PISSA: dict[str, Any] = {"lora__init_lora_weights": "pissa"}
HELD_OUT: dict[str, Any] = {"data__val_fraction": 0.05}
EVALUATED: dict[str, Any] = {**BRIEF, **HELD_OUT, "train__eval_strategy": "steps", "train__eval_steps": 2}
SAVING: dict[str, Any] = {
    "train__max_steps": 6,
    "train__save_strategy": "steps",
    "train__save_steps": 3,
    "train__eval_strategy": "steps",
    "train__eval_steps": 3,
    **HELD_OUT,
}
GO_ON: dict[str, Any] = {**EXPERTS, "lora__adapter": "{out}/experts split/final", "train__max_steps": 3}
COUNTED: dict[str, Any] = {"layout": "resident", "accumulation": 4, **COUNT}
MIXED: dict[str, Any] = {**SAVING, "file": "{folder}/mix.yaml"}
del MIXED["data__val_fraction"]
STREAMED: dict[str, Any] = {**MIXED, "file": "{folder}/stream.yaml"}
SAMPLED: dict[str, Any] = {**EVALUATED, "train__sample": {"prompts": ["anchor bark"], "max_new_tokens": 4}}

# What is compared with plain TRL, step by step.
EQUAL: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "alone": case(1),
        "packed accumulated": case(1, accumulation=4, **PACKED),
        "experts": case(1, **CHECKPOINTING, **EXPERTS),
    },
    2: {
        "full-shard": case(2),
        "fused": case(2, fused=True, accumulation=2),
        "packed in FP8": case(2, layout="resident", layout__base_dtype="fp8", **PACKED),
        "kept for all passes": case(2, layout="no-reshard", accumulation=2, count=4, **AS_LOADED),
        "kept for all passes, split": case(2, **SPLIT, **KEPT, accumulation=2, count=4),
        "experts unmerged": case(2, accumulation=2, **EXPERTS),
        "experts split": case(2, **SPLIT, **EXPERTS),
        "in full, split": case(2, **SPLIT, **CHECKPOINTING, **IN_FULL),
    },
    4: {
        "experts hybrid": case(4, **SPLIT, layout__shard=2, layout__replicate=2, **EXPERTS),
    },
}
CASES: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "plain": case(1, plain=True),
        "plain packed": case(1, plain=True, **PACKED),
        "plain experts": case(1, plain=True, **EXPERTS),
        "plain in full": case(1, plain=True, **IN_FULL),
        "plain narrow": case(1, plain=True, **NARROW),
        **EQUAL[1],
        "balanced": case(1, accumulation=2, **BALANCED),
        "mix": case(1, **MIXED),
    },
    2: {
        **EQUAL[2],
        "one pass": case(2, layout="no-reshard", **AS_LOADED, **COUNT),
        "one pass, split": case(2, probed=True, **SPLIT, **KEPT, **COUNT),
        "narrow": case(2, **SPLIT, **NARROW),
        "experts go on": case(2, **GO_ON),
        "experts go on, split": case(2, **SPLIT, **GO_ON),
        "counted": case(2, **COUNTED),
        "a wait for each": case(2, faults=["wait 0"], **COUNTED),
        "mix": case(2, layout="resident", accumulation=2, count=4, **MIXED),
        "uneven": case(2, micro=3, data__train_split="train[:13]", **SAVING),
        "nan": case(2, faults=["nan"], **SAVING),
        "overflow": case(
            2, faults=["overflow 0", "overflow 1"], watch__non_finite="skip", layout="resident", train__max_steps=4
        ),
        "balanced": case(2, **BALANCED),
        "nan left out": case(2, faults=["nan"], watch__non_finite="skip", train__max_steps=6),
        "slow": case(2, accumulation=2, faults=["slow"], train__max_steps=3),
        "drift": case(2, faults=["drift"], **SAVING),
        "dead": case(2, faults=["detach 0", "detach 1"]),
        "whole": case(2, probed=True, **SAVING),
        "over a finished one": case(2, resume=True, train__output_dir="{out}/whole", **SAVING),
        "unlike nodes": case(2, layout__base_dtype="bf16", on_rank_1=["layout.base_dtype=fp8"]),
        "unlike run files": case(
            2,
            on_rank_1=["lora.lora_alpha=16", "train.learning_rate=0.1", "watch.non_finite=skip"],
            versions_of_rank_1={"peft": "0.19.0"},
        ),
        "unlike models": case(2, model_of_rank_1="{folder}/other model"),
        "unlike rows": case(2, data__dataset_name_or_path="data", folder_of_rank_1="{folder}/other"),
        "unlike clocks": case(
            2,
            data__dataset_name_or_path="{folder}/chats.jsonl",
            data__text_field=None,
            data__chat_template="{folder}/dated.jinja",
            train__output_dir="own",
            folder_of_rank_1="{folder}/other",
            time_zones=["day+12", "day-14"],  # 26 hours apart
        ),
        "no data": case(2, data__text_field="nope", train__output_dir="{out}/mended"),
        "mended": case(2, train__max_steps=1),
        "over an unfinished one": case(2, train__output_dir="{out}/nan"),
        "resumed with another adapter": case(2, resume=True, train__output_dir="{out}/nan", lora__r=8, **SAVING),
    },
    4: {
        **EQUAL[4],
        "unlike nodes": case(4, **SPLIT, on_rank_1=["layout.expert_parallel=4"]),
        "experts not averaged": case(4, **SPLIT, faults=[f"alone {rank}" for rank in range(4)], **EXPERTS),
    },
}
# Trained eagerly and compiled, on two ranks, so that weights are gathered and tokens sent.
COMPILED: dict[str, dict[str, Any]] = {
    "sharded": {**BRIEF, **EXPERTS, **CHECKPOINTING},
    "split in bfloat16": {**SPLIT, **NARROW},
    "in 4 bits, sampled": {**SAMPLED, "layout__base_dtype": "nf4"},
}
# Run by `make prove`. Pairs of a run's other options are in tests/test_pairs.py.
MORE: dict[int, dict[str, dict[str, Any]]] = {
    1: {name: each for name, each in CASES[1].items() if name.startswith("plain")}
    | {"plain only experts": case(1, plain=True, **ONLY), "plain pissa": case(1, plain=True, **PISSA)},
    2: {
        "resident": case(2, layout="resident"),
        "expert-parallel": case(2, **SPLIT, **CHECKPOINTING),
        "packed accumulated": case(2, accumulation=2, **PACKED),
        "packed in FP8, split": case(2, **SPLIT, layout__base_dtype="fp8", **PACKED),
        # So many tokens for such small experts: merged into their weights.
        "experts": case(2, layout__base_dtype="bf16", **EXPERTS),
        "only experts": case(2, **SPLIT, **ONLY),
        "dropout": case(2, **SPLIT, **DROPOUT),
        "dropout, checkpointing": case(2, **SPLIT, **DROPOUT, **CHECKPOINTING),
        "in full, kept": case(2, layout="no-reshard", accumulation=2, **IN_FULL),
        "pissa": case(2, **AS_LOADED, **PISSA),
        **{name: case(2, **each) for name, each in COMPILED.items()},
        **{f"{name}, compiled": case(2, train__compile=True, **each) for name, each in COMPILED.items()},
        # Last: what replaces layers as on a GPU is not undone, and isn't compiled.
        "experts split, fused": case(2, **SPLIT, fused=True, accumulation=2, **CHECKPOINTING, **EXPERTS),
    },
    4: {
        "full-shard": case(4),
        "in full, hybrid": case(4, layout="hybrid", layout__shard=2, layout__replicate=2, **IN_FULL),
        "experts split": case(4, layout="expert-parallel", layout__expert_parallel=4, **EXPERTS),
    },
}


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in the published layout (wrapper, FP8), rows of very different lengths, and the run file."""
    folder = tmp_path_factory.mktemp("train")
    tiny.write_model(folder / "model", experts=4)
    tiny.write_model(folder / "other model", experts=4, seed=1)
    chance = random.Random(0)
    for data in (folder / "data", folder / "other" / "data"):
        data.mkdir(parents=True)
        rows = [" ".join(chance.choices(WORDS.split(), k=chance.randint(3, 12))) for _ in range(240)]
        (data / "train.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    (folder / "run.yaml").write_text(RUN.format(folder=folder, steps=STEPS))
    printed = [" ".join(chance.choices(WORDS.split(), k=chance.randint(3, 9))) for _ in range(120)]
    pairs = [{"prompt": f"{text}?", "completion": f" {text}"} for text in printed]
    sets: dict[str, list[dict[str, Any]]] = {
        "talks": pairs[:20],
        "asked": pairs[40:46],
        "ids": [{"input_ids": [*range(5, 9 + i)]} for i in range(7)],
        "chats": [
            {"messages": [{"role": role, "content": text} for role in ("user", "assistant")]} for text in printed
        ],
    }
    (folder / "dated.jinja").write_text(DATED)
    for name, lines in sets.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    start, end = RUN.index("  dataset_name_or_path"), RUN.index("  max_length")
    for name, section in (("mix", MIX), ("stream", STREAM)):
        (folder / f"{name}.yaml").write_text((RUN[:start] + section + RUN[end:]).format(folder=folder, steps=STEPS))
    return folder


def start_ranks(
    script: str, world: int, folder: Path, *arguments: object, timeout: float = 1500
) -> subprocess.CompletedProcess[str]:
    """Run one of the scripts of this folder in ranks of this machine."""
    command = [warm.python(), str(Path(__file__).with_name(script)), *map(str, arguments)]
    program = (
        "import json, os, sys; from windlass.ranks import supervisor;"
        f"sys.exit(supervisor.start_ranks(json.loads(sys.argv[1]), {world}, dict(os.environ)))"
    )
    return subprocess.run(
        [sys.executable, "-c", program, json.dumps(command)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def launched(
    material: Path, world: int, wanted: dict[str, dict[str, Any]], folder: str = "", script: str = "train_ranks.py"
) -> "Outcomes":
    """Run all cases in the same processes of this number of ranks."""
    out = material / f"{folder}of {world}"
    out.mkdir()
    cases = {name: {**each, "overrides": list(each["overrides"])} for name, each in wanted.items()}
    for name, each in cases.items():
        if not any(text.startswith("train.output_dir") for text in each["overrides"]):
            each["overrides"].append(f"train.output_dir={out / name}")
    described = json.dumps(cases).replace("{out}", str(out)).replace("{folder}", str(material))
    (out / "cases.json").write_text(described)
    done = start_ranks(script, world, material, material / "run.yaml", out / "cases.json", out / "outcome")
    assert done.returncode == 0, done.stdout + done.stderr
    return Outcomes(out, [json.loads((out / f"outcome-{rank}").read_text()) for rank in range(world)], done.stderr)


class Outcomes:
    """What the ranks of one start reported, and their run folders."""

    def __init__(self, folder: Path, ranks: list[dict[str, Any]], printed: str) -> None:
        self.folder, self.ranks, self.printed = folder, ranks, printed

    def __getitem__(self, name: str) -> dict[str, Any]:
        outcome: dict[str, Any] = self.ranks[0][name]
        return outcome

    def steps(self, name: str) -> list[dict[str, Any]]:
        outcome = self.ranks[0].get(name, {})
        if "steps" in outcome:
            found: list[dict[str, Any]] = outcome["steps"]
            return found
        return list(read_json_lines(self.folder / name / "steps-rank0.jsonl"))


@pytest.fixture(scope="session")
def alone(material: Path) -> Outcomes:
    return launched(material, 1, CASES[1])


@pytest.fixture(scope="session")
def two(material: Path) -> Outcomes:
    return launched(material, 2, CASES[2])


@pytest.fixture(scope="session")
def four(material: Path) -> Outcomes:
    return launched(material, 4, CASES[4])


@pytest.fixture(scope="session")
def more(material: Path) -> Callable[[int], Outcomes]:
    """Runs of `PROVEN` steps, unless a case has its own number."""

    @functools.cache
    def start(world: int) -> Outcomes:
        cases = {
            name: {**each, "overrides": [f"train.max_steps={PROVEN}", *each["overrides"]]}
            for name, each in MORE[world].items()
        }
        return launched(material, world, cases, "more ")

    return start


def assert_equal(steps: list[dict[str, Any]], reference: list[dict[str, Any]], count: int = STEPS) -> None:
    assert len(steps) == len(reference) == count
    for step, expected in zip(steps, reference, strict=True):
        for key in ("loss", "grad_norm"):
            assert step[key] == pytest.approx(expected[key], rel=TOLERANCE), (step, expected)


def reference(name: str) -> str:
    kinds = ("packed", "experts", "only experts", "in full", "pissa")
    return next((f"plain {kind}" for kind in kinds if name.startswith(kind)), "plain")


@pytest.mark.parametrize(
    ("fixture", "name"),
    [
        *(("alone", name) for name in EQUAL[1]),
        *(("two", name) for name in EQUAL[2]),
        *(pytest.param("four", name, marks=pytest.mark.long) for name in EQUAL[4]),
    ],
)
def test_ranks_equal_plain_trl(alone: Outcomes, request: pytest.FixtureRequest, fixture: str, name: str) -> None:
    outcomes: Outcomes = request.getfixturevalue(fixture)
    assert outcomes[name].get("error") is None
    assert_equal(outcomes.steps(name), alone.steps(reference(name)))


@pytest.mark.prove
@pytest.mark.parametrize(
    ("world", "name"),
    [(world, name) for world in (2, 4) for name in MORE[world] if "compiled" not in name and "dropout" not in name],
)
def test_more_ways_equal_plain_trl(more: Callable[[int], Outcomes], world: int, name: str) -> None:
    steps = more(world).steps(name)
    if name in COMPILED:
        steps, expected = more(world).steps(f"{name}, compiled"), steps
        assert [[rank[way]["compiled"] for way in (name, f"{name}, compiled")] for rank in more(world).ranks] == [
            [False, True]
        ] * 2, more(world).printed
        bound, _ = TOLERANCES[torch.bfloat16 if "bfloat16" in name else torch.float32]
        assert len(steps) == 4
        assert [step["loss"] for step in steps] == pytest.approx([step["loss"] for step in expected], rel=bound)
    else:
        assert_equal(steps, more(1).steps(reference(name)), PROVEN)


def rows_of_steps(of: Outcomes, name: str) -> list[list[int]]:
    """Return every rank's rows of each step, together."""
    files = sorted((of.folder / name).glob("steps-rank*.jsonl"))
    lines = [[line["rows"] for line in read_json_lines(file)] for file in files]
    return [sorted(itertools.chain(*step)) for step in zip(*lines, strict=True)]


def evaluations(run: Path) -> list[dict[str, float]]:
    events = [line for line in read_json_lines(run / "events.jsonl") if line["kind"] == "eval"]
    return [{key: value for key, value in event.items() if key.endswith("loss")} for event in events]


def test_a_mix_is_the_same_on_any_number_of_ranks(alone: Outcomes, two: Outcomes) -> None:
    expected, rows = alone.steps("mix"), rows_of_steps(alone, "mix")
    assert [len(step) for step in rows[:4]] == [8] * 4
    assert rows_of_steps(two, "mix") == rows
    for step, other in zip(two.steps("mix"), expected, strict=True):
        assert step["source_loss"] == pytest.approx(other["source_loss"], rel=TOLERANCE)
    found, wanted = (evaluations(of.folder / "mix") for of in (two, alone))
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours == pytest.approx(theirs, rel=TOLERANCE)
    sets = {"words", "talks", "ids"}
    assert set().union(*(step["source_loss"] for step in expected)) == sets
    assert wanted[0].keys() == {"eval_loss", "eval_asked_loss", *(f"eval_{each}_loss" for each in sets)}
    assert two["mix"]["collectives"] == ["allreduce_"]  # the losses by source are in the one that there is


@pytest.mark.long
def test_a_mix_of_streams_is_the_same_on_any_number_of_ranks_and_when_resumed(material: Path) -> None:
    alone = launched(material, 1, {"whole": case(1, **STREAMED)}, "streamed ")
    in_two: dict[str, Any] = {"train__output_dir": "{out}/in two", **STREAMED}
    cases = {"stopped": case(2, faults=["terminate 5"], **in_two), "resumed": case(2, resume=True, **in_two)}
    two = launched(material, 2, {"whole": case(2, **STREAMED), **cases}, "streamed ")
    assert (two["stopped"]["code"], two["resumed"]["code"]) == (SAVED, 0)
    expected, rows = alone.steps("whole"), rows_of_steps(alone, "whole")
    assert [len(step) for step in rows] == [8] * 6
    assert set().union(*(step["source_loss"] for step in expected)) == {"words", "talks"}
    wanted = evaluations(alone.folder / "whole")
    assert wanted[0].keys() == {"eval_loss", "eval_asked_loss"}
    for name in ("whole", "in two"):
        assert rows_of_steps(two, name) == rows, name
        for step, other in zip(two.steps(name), expected, strict=True):
            assert step["source_loss"] == pytest.approx(other["source_loss"], rel=TOLERANCE)
        for ours, theirs in zip(evaluations(two.folder / name), wanted, strict=True):
            assert ours == pytest.approx(theirs, rel=TOLERANCE)


def test_base_is_sharded_and_the_adapter_replicated(alone: Outcomes, two: Outcomes) -> None:
    for name in ("full-shard", "kept for all passes", "one pass, split"):
        found = two[name]["placements"]
        assert (found["whole"], found["adapter sharded"]) == (0, 0), name
        assert found["sharded"] == alone["alone"]["placements"]["whole"]
    assert two["counted"]["placements"]["sharded"] == 0


def test_sharded_runs_write_a_probe(two: Outcomes) -> None:
    for name in ("whole", "one pass, split"):
        probe = read_json(two.folder / name / PROBE)
        assert probe["difference"]["mean"] > 0
        assert {"base", "adapter"} < {*probe["hypotheses"]}


def test_step_has_one_collective_and_one_synchronization(two: Outcomes) -> None:
    assert two["counted"]["collectives"] == ["allreduce_"]
    assert two["counted"]["waits"] == ["train_step: tolist"]
    assert two["a wait for each"]["waits"] == ["forward: __float__"] * 4 + ["train_step: tolist"]  # planted


def test_gathered_weights_are_sent_once_per_step(two: Outcomes) -> None:
    for kept, once in (("kept for all passes", "one pass"), ("kept for all passes, split", "one pass, split")):
        assert two[once]["gathered"]
        assert two[kept]["gathered"] == two[once]["gathered"], kept  # bytes of each gather
    assert sum(two["one pass, split"]["gathered"]) < sum(two["one pass"]["gathered"])  # experts are not sent


@pytest.mark.prove
def test_dropout_of_experts_adapters_is_applied_and_the_same_when_recomputed(
    two: Outcomes, more: Callable[[int], Outcomes]
) -> None:
    """Masks differ between distributions of the rows: only a run and its recomputation can be equal."""
    dropped, again = more(2).steps("dropout"), more(2).steps("dropout, checkpointing")
    without = two.steps("experts split")[0]
    assert dropped[0]["loss"] == pytest.approx(without["loss"], rel=TOLERANCE)  # B is still zero
    assert dropped[0]["grad_norm"] != pytest.approx(without["grad_norm"], rel=100 * TOLERANCE)
    assert len(dropped) == len(again) == 4
    for step, expected in zip(again, dropped, strict=True):
        assert [step["loss"], step["grad_norm"]] == pytest.approx([expected["loss"], expected["grad_norm"]], rel=1e-5)


def test_mix_epoch_has_the_configured_shares(alone: Outcomes) -> None:
    audit = read_json(alone.folder / "mix" / "data.json")
    sets = audit["sources"]
    firsts = np.cumsum([0, *(each["sequences"] for each in sets.values())])
    counts = [each["in_epoch"] for each in sets.values()]
    assert counts == [16, round(sets["talks"]["sequences"] / 2), 2 * sets["ids"]["sequences"]]
    of_epoch = list(itertools.chain(*rows_of_steps(alone, "mix")[: sum(counts) // 8]))
    taken = [[row for row in of_epoch if low <= row < high] for low, high in itertools.pairwise(firsts)]
    assert len(set(taken[0])) == len(taken[0])  # none twice where there are enough
    assert set(np.bincount(taken[2])[firsts[2] :]) <= {1, 2}
    for step in alone.steps("mix"):  # by tokens; here of a step with rows of one set alone, or within them
        assert min(step["source_loss"].values()) - 1e-4 <= step["loss"] <= max(step["source_loss"].values()) + 1e-4


def test_bfloat16_training_equals_plain_trl(alone: Outcomes, two: Outcomes) -> None:
    """bfloat16 has 8 bits: sums over other batches round differently."""
    steps, expected = two.steps("narrow"), alone.steps("plain narrow")
    assert [step["loss"] for step in steps] == pytest.approx([step["loss"] for step in expected], rel=2**-9)
    norms = [[step["grad_norm"] for step in each] for each in (steps, expected)]
    assert norms[0] == pytest.approx(norms[1], rel=2**-5)
    exact = alone.steps("plain experts")[0]["loss"]
    assert steps[0]["loss"] != pytest.approx(exact, rel=TOLERANCE)  # it was in bfloat16


@pytest.mark.fault(
    "a router's loss that nothing asks for",
    "`windlass train`",
    "added only where config.json or the run file asks for it",
)
@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
def test_micro_batch_loss_and_gradients_equal_trls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a router's balancing loss, in chunks of a few tokens or at once, with masked prompts and padding."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = MixtralConfig(vocab_size=300, num_key_value_heads=2, num_local_experts=4, **sizes)
    config.router_aux_loss_coef = 0.5
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = [
        {"input_ids": torch.randint(300, (length,)).tolist(), "row": length} for length in (9, 5)
    ]
    rows[0]["labels"] = [-100] * 4 + rows[0]["input_ids"][4:]
    rows[1]["labels"] = rows[1]["input_ids"]
    theirs = MixtralForCausalLM(config)
    ours = copy.deepcopy(theirs)
    settings = SFTConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        bf16=False,
        report_to=[],
        activation_checkpointing=False,
        save_strategy="no",
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    trl = SFTTrainer(
        model=theirs,
        args=settings,
        train_dataset=Dataset.from_list(rows),
        data_collator=DataCollatorForLanguageModeling(pad_token_id=0),
        processing_class=AutoTokenizer.from_pretrained(tiny.write_tokenizer(tmp_path / "tokenizer", vocab=300)),
    )
    trl.current_gradient_accumulation_steps = 2
    tokens = 31.0  # of all micro-batches
    expected = trl.compute_loss(theirs.train(), trl.data_collator(rows), num_items_in_batch=torch.tensor(tokens))
    expected.backward()

    Patches().patch_forward(ours)
    ours.get_output_embeddings().requires_grad_(False)
    head = Head(ours)
    batch = Collate(PaddedCollator(0), mark_tokens=True)(rows)
    assert batch.supervised == 5 + 4
    assert router_loss_weight(ours) == 0, "added only where config.json or the run file asks for it"
    ours.config.output_router_logits = True
    assert (router_loss_weight(ours), router_loss_weight(ours, 0.0)) == (0.5, 0)
    for chunk in (2, 256):
        # Chunks of a few tokens are what a vocabulary of billions would give.
        monkeypatch.setattr("windlass.train.head.tokens_per_chunk", lambda *_, chunk=chunk: chunk)
        ours.zero_grad()
        share = torch.tensor(router_loss_weight(ours, 0.5) * tokens / 2)  # of two micro-batches
        outputs = ours.train()(**batch.inputs, output_router_logits=True)
        summed, of_targets = head.loss(outputs.last_hidden_state, batch.targets)
        balance = balance_router(outputs.router_logits.layers, ours.config, batch.mask)
        loss = (summed + share * balance) / tokens  # as `TrainedModel.compute_loss` adds them
        without = head.loss(ours(**batch.inputs).last_hidden_state, batch.targets)[0] / tokens
        assert loss.item() - without.item() == pytest.approx(0.5 * balance.item() / 2, rel=1e-4)
        loss.backward()  # type: ignore[no-untyped-call]
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        for (name, one), other in zip(ours.model.named_parameters(), theirs.model.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, msg=name)
        hidden = ours(**batch.inputs).last_hidden_state
        torch.testing.assert_close(head.figures(hidden, batch.targets)[0], of_targets)
        torch.testing.assert_close(-head.log_probs(hidden, batch.targets), of_targets)
        assert of_targets.sum().item() == pytest.approx(summed.item(), rel=1e-6)


# --- what the run leaves behind ---


def adapter(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "final" / ADAPTER)


def test_steps_whose_loss_or_gradient_is_not_finite_are_skipped(two: Outcomes) -> None:
    """Also where gradients overflow in the sum alone; the schedule advances."""
    for name in ("nan left out", "overflow"):
        steps = two.steps(name)
        assert [step["step"] for step in steps if step.get("skipped")] == [3]
        assert all(tensor.isfinite().all() for tensor in adapter(two.folder / name).values())
    steps = two.steps("nan left out")
    assert steps[2].get("loss") is None
    assert all(math.isfinite(step["loss"]) for step in steps if not step.get("skipped"))
    assert [step["learning_rate"] for step in steps] == [step["learning_rate"] for step in two.steps("whole")]


def test_slow_rank_is_distinguished_from_waiting_ranks(two: Outcomes) -> None:
    own, forward = [], []
    for rank in range(2):
        lines = list(read_json_lines(two.folder / "slow" / f"steps-rank{rank}.jsonl"))
        forward.append(median(line["forward_seconds"] for line in lines))
        own.append(median(line["forward_seconds"] - line["wait_seconds"] for line in lines))
    assert own[1] - own[0] > 0.2  # two micro-batches of 0.15 s
    assert abs(forward[1] - forward[0]) < 0.2


def test_run_folder_records_the_run(two: Outcomes) -> None:
    folder, steps = two.folder / "whole", two.steps("full-shard")
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    promised = {"step", "loss", "grad_norm", "learning_rate", "step_seconds", "tokens"}
    assert all(promised <= step.keys() for step in steps)
    assert steps[0]["learning_rate"] == 0
    assert max(step["learning_rate"] for step in steps) == pytest.approx(0.005)
    assert all(0 < step["supervised_tokens"] <= step["job_tokens"] for step in steps)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["state"], manifest["steps"], manifest["run"]["lora"]["r"]) == ("finished", 6, 4)
    assert {"torch", "transformers", "peft", "windlass"} <= manifest["versions"].keys()
    certificate = json.loads((folder / "load.json").read_text())
    assert certificate["loaded"] == len(certificate["parameters"]) == certificate["checked"]["parameters"]
    assert json.loads((folder / "plan.json").read_text())
    final, last = adapter(folder), load_file(folder / "checkpoints" / "step-6" / ADAPTER)
    assert final.keys() == last.keys()
    assert all(torch.equal(final[key], last[key]) for key in final)
    assert PeftConfig.from_pretrained(str(folder / "final")).r == 4
    assert (folder / "final" / "tokenizer.json").exists()
    assert [path.name for path in list_checkpoints(folder / "checkpoints")] == ["step-3", "step-6"]
    assert (two["uneven"]["code"], len(two.steps("uneven"))) == (0, 6), "uneven batches and evaluation sets end"


def test_other_ranks_are_silent_and_rank_0_prints_plain_lines(two: Outcomes) -> None:
    printed = two.printed.split("--- whole\n")[1].split("--- ")[0]
    lines = printed.splitlines()
    assert sum(line.startswith("step     6/6  loss ") for line in lines) == 1
    assert sum("evaluation loss" in line for line in lines) == 2
    assert not [word for word in ("Traceback", "Warning", "\x1b") if word in printed]


def test_saved_adapter_continues_sharded_and_unsharded(two: Outcomes) -> None:
    whole, parts = two.steps("experts go on"), two.steps("experts go on, split")
    assert len(whole) == len(parts) == 3
    assert whole[0]["loss"] < two.steps("experts split")[0]["loss"] - 0.01  # it has been trained before
    for one, other in zip(whole, parts, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=TOLERANCE)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=TOLERANCE)


@pytest.mark.parametrize(
    ("fixture", "name"), [("two", "experts split"), pytest.param("four", "experts hybrid", marks=pytest.mark.long)]
)
def test_every_rank_has_its_own_experts_adapter_and_files_hold_the_whole(
    two: Outcomes, request: pytest.FixtureRequest, fixture: str, name: str
) -> None:
    whole = two["experts unmerged"]["placements"]["adapter of experts"]
    run: Outcomes = request.getfixturevalue(fixture)
    assert run[name]["placements"]["adapter of experts"] * 2 == whole
    final = adapter(run.folder / name)
    assert sum(tensor.numel() for name, tensor in final.items() if ".experts." in name) == whole
    one, other = adapter(two.folder / "experts split"), adapter(two.folder / "experts unmerged")
    assert one.keys() == other.keys()
    assert all(torch.allclose(one[name], other[name], atol=1e-4) for name in one)


# --- faults ---


@pytest.mark.fault(
    "a loss that is no number", "`windlass train`", "non-finite loss or gradient at step 3: rank 1, rows"
)
def test_a_nan_stops_the_run_and_names_step_rank_and_rows(two: Outcomes) -> None:
    for outcome in (ranks_outcome["nan"] for ranks_outcome in two.ranks):
        assert outcome["kind"] == "AlarmError"
        assert "non-finite loss or gradient at step 3: rank 1, rows " in outcome["error"]
    rows = two["nan"]["error"].split("rank 1, rows ")[1].split("\n")[0]
    assert len([int(row) for row in rows.split(", ")]) == 4
    folder = two.folder / "nan"
    assert list_checkpoints(folder / "checkpoints") == []
    assert not (folder / "final").exists()
    assert [step["step"] for step in two.steps("nan")] == [1, 2]


def test_scaled_logits_have_scaled_gradients() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(5, 8, requires_grad=True)
    weight = torch.randn(11, 8)
    targets = torch.arange(5)
    shaping = LogitShaping(scale=0.25)
    loss, _ = ChunkedCrossEntropy.apply(hidden, weight, targets, shaping)  # type: ignore[no-untyped-call]
    loss.backward()
    plain = hidden.detach().clone().requires_grad_()
    torch.nn.functional.cross_entropy(0.25 * plain @ weight.T, targets, reduction="sum").backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(hidden.grad, plain.grad)


def test_a_routers_balancing_loss_is_shared_among_the_ranks(alone: Outcomes, two: Outcomes) -> None:
    """Two ranks have the same micro-batches that one has in turn."""
    steps = two.steps("balanced")
    expected = alone.steps("balanced")
    assert len(steps) == 4
    for key in ("loss", "grad_norm", "router_aux_loss"):
        assert [step[key] for step in steps] == pytest.approx([step[key] for step in expected], rel=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "kind", "messages"),
    [
        ("drift", "RunError", ["1 adapter tensors differ between ranks"]),
        ("dead", "RunError", ["layers.0.mlp.shared_experts"]),
        (
            "unlike nodes",
            "UserError",
            ["the ranks plan different runs: layout.base_dtype is fp8 on rank 1, bf16 on rank 0"],
        ),
        (
            "unlike run files",
            "UserError",
            [
                "lora.lora_alpha is 16 on rank 1, 8 on rank 0",
                "train.learning_rate is 0.1 on rank 1",
                "watch.non_finite is skip on rank 1, stop",
                "peft's version is 0.19.0 on rank 1, 0.",
            ],
        ),
        ("unlike models", "UserError", ["the ranks plan different runs: the base model's fingerprint is "]),
        ("unlike rows", "UserError", ["the ranks have different data, though the run file names the same"]),
        ("unlike clocks", "UserError", ["the ranks make different tokens of the same files", "writes the date"]),
        ("no data", "UserError", ["no column 'nope'"]),
        ("over a finished one", "UserError", ["contains a finished run"]),
        ("over an unfinished one", "UserError", ["contains an unfinished run"]),
        ("resumed with another adapter", "UserError", ["was 4 when this run began, is 8 now"]),
    ],
)
@pytest.mark.fault("ranks with other library versions", "`windlass train`", "peft's version is")
@pytest.mark.fault("ranks with other run files", "`windlass train`", "lora.lora_alpha is 16 on rank 1, 8 on rank 0")
@pytest.mark.fault(
    "ranks with other base weights",
    "`windlass train`",
    "the ranks plan different runs: the base model's fingerprint is ",
)
@pytest.mark.fault(
    "ranks with other rows",
    "`windlass train`",
    "the ranks have different data, though the run file names the same",
)
@pytest.mark.fault(
    "a chat template that writes the date, and nodes whose clocks are a day apart",
    "`windlass train`",
    "the ranks make different tokens of the same files",
)
@pytest.mark.fault(
    "nodes that choose other layouts",
    "`windlass train`",
    "the ranks plan different runs: layout.base_dtype is fp8 on rank 1, bf16 on rank 0",
)
@pytest.mark.fault(
    "replicas of the adapter that drift apart", "`windlass train`", "1 adapter tensors differ between ranks"
)
@pytest.mark.fault("a part of the adapter that gets no gradient", "`windlass train`", "layers.0.mlp.shared_experts")
def test_a_fault_stops_every_rank(two: Outcomes, name: str, kind: str, messages: list[str]) -> None:
    for outcome in (ranks_outcome[name] for ranks_outcome in two.ranks):
        assert outcome["kind"] == kind
        assert [message for message in messages if message not in outcome["error"]] == [], outcome["error"]


def test_failed_stage_keeps_its_files(two: Outcomes) -> None:
    assert [path.name for path in list_checkpoints(two.folder / "drift" / "checkpoints")] == ["step-3"]
    assert two.steps("dead") == []
    assert read_json(two.folder / "unlike rows" / "manifest.json")["state"] == "failed", "and not running"
    assert two.printed.count("warning: too few steps (1) to see all of the adapter train") == 1
    assert (two["mended"]["code"], len(two.steps("mended"))) == (0, 1), "one that failed before its first step"


@pytest.mark.long
@pytest.mark.fault(
    "gradients of split experts that are not averaged", "`windlass train`", "differ between ranks after a step"
)
def test_a_fault_stops_every_rank_of_groups(four: Outcomes) -> None:
    for outcome in four.ranks:
        # Unseen, they would wait in collectives of groups that others don't have.
        assert "layout.expert_parallel is 2 on rank 0, 4 on the others" in outcome["unlike nodes"]["error"]
        assert "experts" in outcome["experts not averaged"]["error"]
        assert "differ between ranks after a step" in outcome["experts not averaged"]["error"]


MOUNT = """
import ctypes, subprocess, sys
from windlass import cli

own = ctypes.CDLL(None).unshare(0x20000) == 0  # CLONE_NEWNS
if not own or subprocess.run(["mount", "--make-rprivate", "/"]).returncode or subprocess.run(
    ["mount", "-t", "tmpfs", "-o", f"size={sys.argv[2]}", "none", sys.argv[1]]
).returncode:
    sys.exit(99)
"""


def run_mounted(program: list[str], ranks: int) -> subprocess.CompletedProcess[str]:
    """Run a program that begins with `MOUNT`: its text, where a file system is mounted, and that one's size."""
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    environ = {**os.environ, **rank, "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [warm.python(), "-c", *program]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=280)
    if done.returncode == 99:
        pytest.skip(f"no file system can be mounted here: {done.stderr}")
    return done


# A run on a small file system of its own, which is full from a step on (0: from when the model is loaded, before
# load.json), for good or until a later step.
FULL_DISK = f"""{MOUNT}
import os, shutil
from contextlib import suppress
from pathlib import Path
from windlass.train import run
from windlass.train.loop import Loop

disk, full_from, emptied_at, ranks = Path(sys.argv[1]), *map(int, sys.argv[3:6])
children = []
for rank in range(ranks):
    if child := os.fork():  # the file system is gone with the last of these processes
        children.append(child)
        continue
    os.environ |= {{"RANK": str(rank), "LOCAL_RANK": str(rank)}}
    break
else:
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    shutil.copytree(disk / "run", disk.parent / "copy")
    sys.exit(max(codes))
plainly, load, filler = Loop.train_step, run.load_base, disk / "filler"


def fill():
    if rank == 0:
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(512)):
                pass


def loaded(*given, **more):
    found = load(*given, **more)
    fill() if full_from == 0 else None
    return found


def train_step(loop, batches):
    if loop.step + 1 == full_from:
        fill()
    if loop.step + 1 == emptied_at and rank == 0:
        filler.unlink()
    return plainly(loop, batches)


Loop.train_step, run.load_base = train_step, loaded
cli.main(sys.argv[6:])
"""


@pytest.mark.long
@pytest.mark.parametrize(("full_from", "emptied_at", "ranks"), [(5, 0, 1), (0, 14, 2)])
@pytest.mark.fault(
    "a full disk before load.json, two ranks, a tracker on it",
    "`windlass train`",
    "/load.json can't be written: No space left on device (0 bytes are free there)",
)
@pytest.mark.fault(
    "a full disk at every file of a run",
    "`windlass train`",
    "/checkpoints can't be written: No space left on device (0 bytes are free there)",
)
def test_full_disk_does_not_stop_training(
    material: Path, tmp_path: Path, full_from: int, emptied_at: int, ranks: int
) -> None:
    """Steps, events, heartbeat, checkpoint, final: each is reported once, and earlier saves stay."""
    disk, run, copied = tmp_path / "disk", tmp_path / "disk" / "run", tmp_path / "copy"
    disk.mkdir()
    values = {"output_dir": run, "max_steps": 24, "save_strategy": "steps", "save_steps": 4}
    if importlib.util.find_spec("tensorboard"):
        values["report_to"] = "tensorboard"
    words = ["train", str(material / "run.yaml"), "--override", "layout.name=resident"]
    words += ["--override", f"cluster.gpus_per_node={ranks}"]
    words += [word for key, value in values.items() for word in ("--override", f"train.{key}={value}")]
    numbers = map(str, (full_from, emptied_at, ranks))
    done = run_mounted([FULL_DISK, str(disk), "16m", *numbers, *words], ranks)
    assert "Traceback" not in done.stderr, done.stderr
    steps = [line["step"] for line in read_json_lines(copied / "steps-rank0.jsonl")]
    manifest, final = read_json(copied / "manifest.json"), copied / "final" / "adapter_model.safetensors"
    # (A heartbeat comes every five seconds: there need not be one while the disk is full.)
    assert done.stderr.count("/checkpoints can't be written: No space left on device (0 bytes are free there)") == 1
    assert done.stderr.count("/heartbeat-rank0.json can't be written: ") <= 1
    if emptied_at:
        assert "/load.json can't be written: No space left on device (0 bytes are free there)" in done.stderr
        unwritten = ["load.json", "meter-rank0.json", "steps-rank0.jsonl", "events.jsonl"]
        unwritten += ["tensorboard"] * ("report_to" in values)
        assert [done.stderr.count(f"/{name} can't be written: No space left on device") for name in unwritten] == [
            1 for _ in unwritten
        ], done.stderr
        assert (done.returncode, manifest["state"], final.is_file()) == (0, "finished", True), done.stderr
        assert steps == sorted({*steps, *range(14, 25)}), "a line is there in full or not at all"
        return
    assert (done.returncode, manifest["state"], final.exists()) == (1, "failed", False), done.stderr
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= 4
    assert [path.name for path in (copied / "checkpoints").iterdir()] == ["step-4"]
    assert find_damage(copied / "checkpoints" / "step-4") == ""
    assert "/final/adapter_model.safetensors can't be written: No space left on device" in done.stderr
    assert "hint: make room, then run again with --resume: it continues from step-4" in done.stderr


SMALL_MEMORY = MOUNT + "cli.main(sys.argv[3:])\n"


@pytest.mark.long
@pytest.mark.fault(
    "a /dev/shm that is too small for workers", "`windlass train`", "/dev/shm has 64 KiB free, and the batches"
)
def test_shared_memory_that_is_too_small_for_workers_is_refused(material: Path, tmp_path: Path) -> None:
    """torch's workers would lose a batch, and training would wait for it."""
    words = ["train", str(material / "run.yaml"), "--override", f"train.output_dir={tmp_path / 'run'}"]
    words += ["--override", "layout.name=resident", "--override", "cluster.gpus_per_node=1"]
    words += ["--override", "train.dataloader_num_workers=2"]
    done = run_mounted([SMALL_MEMORY, "/dev/shm", "64k", *words], 1)
    assert done.returncode == RANK_USER_INPUT, done.stderr
    assert "/dev/shm has 64 KiB free, and the batches of this node's workers take " in done.stderr
