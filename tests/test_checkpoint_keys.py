"""What a resumed run may change: every key of the run file is compared, or is free for a reason."""

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
from test_faults import material, windlass  # noqa: F401

from windlass import tiny
from windlass.errors import UserError
from windlass.files import read_json, write_json
from windlass.plan import Plan, make_plan
from windlass.runfile import RunFile, read_run_file
from windlass.runfile.recorded import FREE
from windlass.train.checkpoint.resume import describe_run, require_same_run

RESUME = "train run.yaml --resume"


def list_keys() -> list[str]:
    sections = RunFile.model_fields
    keys = []
    for name, field in sections.items():
        inner = getattr(field.annotation, "model_fields", None)
        keys += [f"{name}.{key}" for key in inner] if inner else [name]
    return keys


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    folder = tmp_path_factory.mktemp("keys")
    tiny.write_model(folder / "model", experts=4)
    (folder / "data.txt").write_text("mast keel\n" * 40)
    (folder / "run.yaml").write_text(
        f"model: {{model_name_or_path: {folder}/model, torch_dtype: float32}}\n"
        f"data: {{dataset_name_or_path: {folder}/data.txt, max_length: 16, val_fraction: 0.1}}\n"
        f"train: {{output_dir: {folder}/run, bf16: false}}\n"
        "cluster: {gpu: cpu}\n"
    )
    return make_plan(read_run_file(folder / "run.yaml"))


def test_the_table_names_keys_that_exist() -> None:
    keys = list_keys()
    assert len(keys) > 120
    assert {*FREE} <= {*keys} | {key.partition(".")[0] for key in keys}
    assert all(FREE.values())


@pytest.mark.parametrize("key", list_keys())
def test_a_key_that_changed_after_a_stop_is_refused_or_free(plan: Plan, key: str) -> None:
    now = describe_run(plan, "base")
    before: dict[str, Any] = copy.deepcopy(now)
    section, _, name = key.partition(".")
    if section in FREE or key in FREE:
        if name:
            before["run"][section][name] = "another"
        require_same_run(before, now, plan, allow_other_base=False)
        return
    before["run"][section][name] = "another"
    with pytest.raises(UserError) as caught:
        require_same_run(before, now, plan, allow_other_base=False)
    assert [problem.where.endswith(key) for problem in caught.value.problems] == [True]


# --- real runs ---


def stop(folder: Path, run: str = "run", last: int = 2) -> None:
    """Leave the run as a stop before its last step does."""
    shutil.rmtree(folder / run / "final")
    shutil.rmtree(folder / run / "checkpoints" / f"step-{last}")
    manifest = folder / run / "manifest.json"
    write_json(manifest, read_json(manifest) | {"state": "stopped"})


@pytest.fixture
def stopped(material: Path, tmp_path: Path) -> Path:  # noqa: F811
    folder = shutil.copytree(material, tmp_path / "here")
    stop(folder)
    return folder


@pytest.mark.fault(
    "a run made shorter than it is", "`windlass train --resume`", "the run has 3 steps now, and has reached step 5"
)
@pytest.mark.fault(
    "a run made longer at the resume",
    "`windlass train --resume`",
    "the run had 2 steps when step 1 was saved, and has 6 now",
)
@pytest.mark.takes("prepares data and plans several times")
def test_another_length_is_reported(stopped: Path) -> None:
    code, said = windlass(f"{RESUME} --override train.max_steps=6", stopped)
    said = " ".join(said.split())
    assert code == 0, said
    assert "the run had 2 steps when step 1 was saved, and has 6 now" in said
    stop(stopped, last=6)
    code, said = windlass(f"{RESUME} --override train.max_steps=3", stopped)
    assert code == 2, said
    assert "the run has 3 steps now, and has reached step 5" in " ".join(said.split())


@pytest.mark.fault(
    "noise on the embeddings from the resume on",
    "`windlass train --resume`",
    "was null when this run began, is 5.0 now",
)
def test_noise_from_the_resume_on_is_refused(stopped: Path) -> None:
    code, said = windlass(f"{RESUME} --override train.neftune_noise_alpha=5", stopped)
    assert code == 2
    assert "was null when this run began, is 5.0 now" in " ".join(said.split())


@pytest.fixture
def continued(material: Path, tmp_path: Path) -> Path:  # noqa: F811
    """A run that began with the adapter of another, stopped after its first step."""
    folder = shutil.copytree(material, tmp_path / "here")
    code, said = windlass("train run.yaml --override lora.adapter=run/final --override train.output_dir=on", folder)
    assert code == 0, said
    shutil.copytree(folder / "on", folder / "whole")
    stop(folder, "on")
    return folder


ON = f"{RESUME} --override lora.adapter=run/final --override train.output_dir=on"


@pytest.mark.fault(
    "another adapter in the folder that the run began with",
    "`windlass train --resume`",
    "lora.lora_alpha: was 8 when this run began, is 16 now",
)
@pytest.mark.takes("prepares data and plans several times")
def test_the_checkpoint_decides_and_not_the_folder_that_the_run_began_with(continued: Path) -> None:
    folder = shutil.copytree(continued, continued.with_name("changed"))
    file = folder / "run" / "final" / "adapter_config.json"
    write_json(file, read_json(file) | {"lora_alpha": 16})
    (folder / "run.yaml").write_text((folder / "run.yaml").read_text().replace("lora_alpha: 8, ", ""))
    code, said = windlass(ON, folder)
    said = " ".join(said.split())
    assert code == 2, said
    assert "lora.lora_alpha: was 8 when this run began, is 16 now" in said

    shutil.rmtree(continued / "run")  # gone: the checkpoint has everything
    code, said = windlass(ON, continued)
    assert code == 0, said
    ours, whole = ((continued / run / "final" / "adapter_model.safetensors").read_bytes() for run in ("on", "whole"))
    assert ours == whole
