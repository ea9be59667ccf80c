"""The fault matrix: every fault of tests/faults.py, planted, and reported by the first command that meets it."""

import contextlib
import os
import random
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import warm
from faults import FAULTS, NEW, Fault

from windlass import tiny
from windlass.files import read_json

WORDS = "anchor bark cable deck eddy fathom galley hull inlet jib keel lee mast north oar pier quay reef sail tide"
RUN = """\
model: {model_name_or_path: model, torch_dtype: float32}
lora: {r: 4, lora_alpha: 8, lora_dropout: 0, target_modules: [q_proj, o_proj]}
data: {dataset_name_or_path: data, dataset_config_name: null, text_field: text, val_split: null, max_length: 48}
train:
  output_dir: run
  max_steps: 2
  per_device_train_batch_size: 4
  learning_rate: 0.005
  warmup_ratio: 0.1
  bf16: false
  eval_strategy: "no"
  save_steps: 1
  report_to: none
cluster: {nodes: 1, gpus_per_node: 1, gpu: cpu}
"""


def windlass(command: str, folder: Path, **environ: str) -> tuple[int, str]:
    done = subprocess.run(
        [warm.python(), "-m", "windlass", *shlex.split(command.replace("\\", "\\\\"))],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "80", **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models of the same shapes, rows, a run file, and its finished run."""
    folder = tmp_path_factory.mktemp("faults")
    for seed, name in enumerate(("model", "other")):
        tiny.write_model(folder / name, files=2, experts=4, seed=seed)
    (folder / "data").mkdir()
    chance = random.Random(0)
    rows = [" ".join(chance.choices(WORDS.split(), k=12)) for _ in range(60)]
    (folder / "data" / "train.jsonl").write_text("".join(f'{{"text": "{row}"}}\n' for row in rows))
    (folder / "run.yaml").write_text(RUN)
    code, printed = windlass("train run.yaml", folder)
    assert code == 0, printed
    return folder


@pytest.mark.prove
@pytest.mark.parametrize(
    "fault",
    [pytest.param(one, marks=pytest.mark.fault(one.what, one.command, one.says), id=one.what) for one in FAULTS],
)
def test_a_planted_fault_is_named(fault: Fault, material: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(material, tmp_path / "here")
    with contextlib.chdir(folder):
        fault.plant()
    code, printed = windlass(fault.command, folder, **fault.environ)
    printed = re.sub(r"\s+", " ", printed)
    assert "Traceback" not in printed, printed
    assert code == fault.code, printed
    states = [read_json(manifest)["state"] for manifest in folder.glob("*/manifest.json")]
    assert "running" not in states, "nothing runs any more"
    assert re.search(".*?".join(re.escape(part.strip()) for part in fault.says.split("…")), printed), printed


@pytest.mark.prove
@pytest.mark.fault("a bad row far into a stream", "`windlass train`", "met in step")
def test_a_bad_row_of_a_stream_ends_all_ranks_and_keeps_what_was_trained(material: Path, tmp_path: Path) -> None:
    """The row comes after the audited ones, in a loader's worker: the error has its place, a checkpoint, and a next
    step."""
    folder = shutil.copytree(material, tmp_path / "here")
    rows = ['{"text": "mast keel"}\n'] * 10_400
    rows[10_199] = '{"text": 5}\n'
    (folder / "data" / "train.jsonl").write_text("".join(rows))
    settings = {
        "data.streaming": "true",
        "data.packing": "true",
        "data.max_length": 512,
        "train.save_strategy": '"no"',
        "train.dataloader_num_workers": 1,
        "train.max_steps": 20,
        "cluster.gpus_per_node": 2,
    }
    options = " ".join(f"--override {key}={value}" for key, value in settings.items())
    code, said = windlass(f"{NEW} {options}", folder)
    assert (code, "Traceback" in said) == (2, False), said
    assert "data/train.jsonl: row 10200: " in said, said
    step = int(re.search(r"met in step (\d+) of the stream", said)[1]) - 1  # type: ignore[index]
    assert step >= 1
    assert (folder / "new" / "checkpoints" / f"step-{step}" / "manifest.json").is_file()
    going_on = re.search(r"`windlass (train run\.yaml --override train\.output_dir=[^`]+)`", said)
    assert going_on, said
    rows[10_199] = rows[0]
    (folder / "data" / "train.jsonl").write_text("".join(rows))
    code, said = windlass(f"{going_on[1]} {options} --override train.max_steps={step + 2}", folder)
    assert code == 0, said
