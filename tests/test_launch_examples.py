"""The examples' platforms: each run file is planned, rendered unchanged, and validated."""

import json
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from launch_jobs import EXAMPLES, SITE, client_model, compared, example, lost, plan_of, workload_of
from test_launch_kubernetes import MODELS, SCHEMA, pod_templates
from test_launch_runai import DISTRIBUTED, read_back

from windlass.cli import main
from windlass.errors import UserError
from windlass.launch import submit as submitting

PLATFORMS = EXAMPLES / "platforms"
WRITTEN = {  # by platform: what it writes besides the files of launch.sh
    "runai": ("submit.sh", "payload.json"),
    "kubernetes": ("job.yaml",),
    "openshift": ("job.yaml",),
    "slurm": ("job.sbatch",),
    "skypilot": ("task.yaml",),
}


def test_every_platform_has_an_example() -> None:
    assert {path.stem for path in PLATFORMS.iterdir()} == set(WRITTEN)
    train = yaml.safe_load((EXAMPLES / "train.yaml").read_text())
    for path in PLATFORMS.iterdir():
        run = yaml.safe_load(path.read_text())
        machines = {key: run["cluster"][key] for key in train["cluster"]}
        assert {**run, "cluster": machines} == train, "the same run on the same machines"


@pytest.mark.parametrize("to", WRITTEN)
@pytest.mark.takes("plans and renders every example")
def test_every_example_plans_and_renders_unchanged(to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = PLATFORMS / f"{to}.yaml"
    plan = plan_of(file)
    assert plan.cost.fits
    with pytest.raises(SystemExit) as caught:
        main(["submit", str(file), "--dry-run", "--out", str(tmp_path)])
    assert not caught.value.code, capsys.readouterr().err
    for name in WRITTEN[to]:
        text = (tmp_path / name).read_text()
        compared(f"platforms/{to}/{name}", workload_of(text) if name == "job.yaml" else text)
    if to == "runai":
        assert read_back(DISTRIBUTED, json.loads((tmp_path / "payload.json").read_text())) == []
    if to in ("kubernetes", "openshift"):
        valid(list(yaml.safe_load_all((tmp_path / "job.yaml").read_text())))


def valid(documents: list[dict[str, Any]]) -> None:
    *others, workload = documents
    for document in others:
        kubernetes_validate.validate(document, SCHEMA, strict=True)
    for template in pod_templates(workload):
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": {"template": template}}
        kubernetes_validate.validate(job, SCHEMA, strict=True)
    again = client_model(MODELS["jobset"]).from_dict(json.loads(json.dumps(workload))).to_dict()
    assert lost(workload, json.loads(json.dumps(again, default=str))) == []


def test_a_base_for_kustomize_has_the_same_objects(tmp_path: Path) -> None:
    plan, overrides, _ = example("train", (*SITE, "cluster.kubernetes.network_policy=ingress"))
    submit = submitting.submit
    for to in ("kubernetes", "openshift"):
        base, out = tmp_path / to, tmp_path / f"{to}-job"
        assert submit(plan, to, overrides=overrides, dry_run=True, kustomize=base, say=print) == 0
        assert submit(plan, to, overrides=overrides, dry_run=True, out=out, say=print) == 0
        names = yaml.safe_load((base / "kustomization.yaml").read_text())["resources"]
        assert names == ["configmap.yaml", "service.yaml", "networkpolicy.yaml", "job.yaml"]
        parts = [yaml.safe_load((base / name).read_text()) for name in names]
        assert parts == list(yaml.safe_load_all((out / "job.yaml").read_text()))
    for to, dry_run in (("slurm", True), ("kubernetes", False)):
        with pytest.raises(UserError, match="starts nothing"):
            submit(plan, to, overrides=overrides, dry_run=dry_run, kustomize=tmp_path / "x", say=print)
