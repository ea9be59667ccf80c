"""Real run files, read by the real reader, and Accelerate files become one layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from windlass import runfile
from windlass.errors import UserError
from windlass.plan.layout import Demand, demand, read_accelerate, settle

EXAMPLES = Path(__file__).parent.parent / "examples" / "mistral-small-4"


def wanted(folder: Path, text: str, *overrides: str, accelerate: str = "") -> Demand:
    path = folder / "run.yaml"
    path.write_text("model: {model_name_or_path: Mistral-Small-4-119B-2603}\ndata: {val_split: null}\n" + text)
    loaded = runfile.read(path, ["train.eval_strategy=no", *overrides])
    file = read_accelerate(EXAMPLES / accelerate) if accelerate else None
    return demand(loaded.run, loaded.where, None, file)


def test_a_run_file_without_layout_takes_the_accelerate_files(tmp_path: Path) -> None:
    found = wanted(tmp_path, "", accelerate="fsdp.yaml")
    assert (found.name, found.nodes, found.gpus_per_node, found.offload) == ("full-shard", 3, 1, True)
    assert wanted(tmp_path, "").name == "auto"


@pytest.mark.parametrize(
    ("text", "name", "shard"),
    [
        ("layout: full-shard\n", "full-shard", 4),
        ("layout: {name: hybrid}\n", "hybrid", 2),
        ("layout: {replicate: 2}\n", "hybrid", 2),
        ("layout: {expert_parallel: 2}\n", "expert-parallel", 4),
        ("layout: {wrap: [Mistral4DecoderLayer], name: resident}\n", "resident", 1),
    ],
)
def test_layouts_as_they_are_written(text: str, name: str, shard: int, tmp_path: Path) -> None:
    found = wanted(tmp_path, "cluster: {nodes: 2, gpus_per_node: 2, network: infiniband-400}\n" + text)
    assert found.where.startswith(f"{tmp_path}/run.yaml:4: layout")
    layout = settle(found, 128)
    assert (layout.name, layout.shard) == (name, shard)


def test_a_disagreement_names_both_files_and_lines(tmp_path: Path) -> None:
    text = "cluster:\n  nodes: 2\n  network: infiniband-400\ntrain:\n  bf16: false\n  fp16: true\n"
    with pytest.raises(UserError) as caught:
        wanted(tmp_path, text, accelerate="fsdp.yaml")
    told = str(caught.value)
    assert "fsdp.yaml:11: num_machines: the number of nodes is 3 here, but 2 at" in told
    assert "run.yaml:4: cluster.nodes" in told
    assert "fsdp.yaml:10: mixed_precision: precision is bf16 here, but fp16 at" in told
    assert "run.yaml:8: train.fp16" in told


def test_an_override_disagrees_by_its_own_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--override cluster\.nodes=2"):
        wanted(tmp_path, "", "cluster.nodes=2", "cluster.network=infiniband-400", accelerate="fsdp.yaml")
