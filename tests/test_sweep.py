"""`sweep:` every trial is what it would be alone, on a base that stays as it was loaded; what is wrong is refused."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_faults import windlass

from windlass import tiny
from windlass.files import read_json, read_json_lines
from windlass.run_folder import FINISHED, list_trials

WORDS = "anchor bark cable deck eddy fathom galley hull inlet jib keel lee mast north oar pier quay reef sail tide"
RUN = """\
model: {model_name_or_path: model, torch_dtype: float32}
lora: {r: 4, lora_alpha: 8, target_modules: [q_proj, o_proj]}
data: {dataset_name_or_path: data.txt, max_length: 48, packing: false, val_fraction: 0.1}
train:
  output_dir: sweep
  max_steps: 4
  per_device_train_batch_size: 2
  gradient_accumulation_steps: 2
  learning_rate: 0.005
  bf16: false
  eval_steps: 2
  save_steps: 2
  save_total_limit: null
  logging_steps: 1
  neftune_noise_alpha: 5
cluster: {nodes: 1, gpus_per_node: 2, gpu: cpu}
"""
# Different ranks, targets, seeds, rates, data, dropout and optimizers; all experts in one, none in the others.
TRIALS: dict[str, dict[str, Any]] = {
    "first": {"lora.r": 8, "train.learning_rate": 1e-3, "train.seed": 7, "lora.lora_dropout": 0.0},
    "second": {"lora.target_modules": "all-linear", "lora.experts": True, "lora.lora_dropout": 0.1, "train.seed": 3},
    "third": {"data.dataset_name_or_path": "other.txt", "train.optim": "adafactor", "train.max_grad_norm": 0.1},
}


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    tiny.write_model(folder / "model", files=2, experts=4)
    chance = random.Random(0)
    for name in ("data.txt", "other.txt"):
        (folder / name).write_text("".join(" ".join(chance.choices(WORDS.split(), k=9)) + "\n" for _ in range(60)))
    return folder


def write_sweep(folder: Path, name: str, trials: dict[str, dict[str, Any]], more: str = "") -> Path:
    listed = [{"name": trial, **settings} for trial, settings in trials.items()]
    path = folder / f"{name}.yaml"
    text = RUN.replace("output_dir: sweep", f"output_dir: {name}") + more
    path.write_text(f"{text}sweep:\n  trials: {json.dumps(listed)}\n")
    return path


def run(command: str, folder: Path, code: int = 0) -> str:
    got, printed = windlass(command, folder)
    assert (got, "Traceback" in printed) == (code, False), printed
    return printed


def assert_same_run(one: Path, other: Path) -> None:
    """Adapters, optimizers, random numbers and losses, bit for bit, at every checkpoint and at the end."""
    steps = sorted(path.name for path in (one / "checkpoints").iterdir())
    assert steps == sorted(path.name for path in (other / "checkpoints").iterdir())
    files = [path.relative_to(one) for path in one.rglob("*.safetensors")]
    assert files
    for file in files:
        ours, theirs = load_file(one / file), load_file(other / file)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours), file
    for file in [path.relative_to(one) for path in one.rglob("*.pt")]:
        assert_same(*(torch.load(folder / file, weights_only=False) for folder in (one, other)))
    for file in [path.relative_to(one) for name in ("random.json", "scheduler.json") for path in one.rglob(name)]:
        assert read_json(one / file) == read_json(other / file)
    for rank in range(2):
        lines = [
            [
                {key: line.get(key) for key in ("step", "loss", "grad_norm", "learning_rate", "rows", "tokens")}
                for line in read_steps(folder / f"steps-rank{rank}.jsonl")
            ]
            for folder in (one, other)
        ]
        assert lines[0] == lines[1]
    losses = [[event.get("eval_loss") for event in read_json_lines(folder / "events.jsonl")] for folder in (one, other)]
    assert losses[0] == losses[1]
    recorded = [read_json(folder / "manifest.json") for folder in (one, other)]
    for manifest in recorded:
        del manifest["run"]["train"]["output_dir"], manifest["layout"]["reason"]
    for key in ("run", "base_digest", "data", "layout"):
        assert recorded[0].get(key) == recorded[1].get(key), key


def read_steps(path: Path) -> list[dict[str, Any]]:
    from windlass.observe.reader import Tail

    return list(Tail(path).objects())


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for ours, theirs in zip(one, other, strict=True):
            assert_same(ours, theirs)
    else:
        assert one is other or repr(one) == repr(other)


# --- a trial is the run alone ---


LAYOUTS = {
    "resident": "layout: resident\n",
    "full-shard": "layout: full-shard\n",
    "expert-parallel": "layout: {name: expert-parallel, expert_parallel: 2}\n",
    "no-reshard": "layout: no-reshard\n",
    "recomputed": "layout: {name: full-shard, activation_checkpointing: true}\n",
}


@pytest.mark.long
@pytest.mark.parametrize("layout", [*LAYOUTS])
def test_every_trial_equals_the_run_alone_in_any_order(layout: str, material: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(material, tmp_path / "here")
    trials = {name: dict(settings) for name, settings in TRIALS.items()}
    if layout == "expert-parallel":
        del trials["third"]["train.optim"]  # adafactor looks at a full tensor
    forward = write_sweep(folder, "forward", trials, LAYOUTS[layout])
    backward = write_sweep(folder, "backward", dict(reversed(trials.items())), LAYOUTS[layout])
    run(f"train {forward}", folder)
    run(f"train {backward}", folder)
    for name in trials:
        file = folder / "forward" / "trials" / name / "run.yaml"
        run(f"train {file} --override train.output_dir=alone/{name}", folder)
        assert_same_run(folder / "alone" / name, folder / "forward" / "trials" / name)
        assert_same_run(folder / "alone" / name, folder / "backward" / "trials" / name)
    assert set(list_trials(folder / "forward").values()) == {FINISHED}
