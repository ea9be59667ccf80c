"""What contradicts what, what is only remarked on, how overrides are read, and how accumulation follows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from windlass.errors import UserError
from windlass.runfile import Loaded, accumulation, contradictions, read

BASE = "train: {seed: 1}"


def loaded(tmp_path: Path, text: str = BASE, *overrides: str) -> Loaded:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return read(path, overrides)


THREE = "cluster.nodes=3"
CLASHES: list[tuple[list[str], str, str]] = [
    (["train.fp16=true"], "train.fp16", "bf16 and fp16 are both on"),
    (["data.val_split=null"], "data.val_split", "nothing to evaluate on"),
    (["data.val_fraction=0.1", "data.val_split=test"], "data.val_fraction", "held out too"),
    (["train.load_best_model_at_end=true", "train.eval_strategy=no"], "train.load_best", "nothing is evaluated"),
    (["train.load_best_model_at_end=true", "train.save_strategy=no"], "train.load_best", "nothing is saved"),
    (["train.load_best_model_at_end=true", "train.save_strategy=epoch"], "train.load_best", "evaluation goes by steps"),
    (["train.load_best_model_at_end=true", "train.save_steps=300"], "train.save_steps", "no multiple of 200"),
    (["train.optim=paged_adamw_8bit", THREE], "train.optim", "sharded over 3 ranks"),
    (["train.optim=adamw_8bit", "cluster.gpus_per_node=2"], "train.optim", "sharded over 2 ranks"),
    (["train.optim=adamw_troch"], "train.optim", "there is no optimizer"),
    (["train.optim=galore_adamw"], "train.optim", "low-rank already"),
    (["train.lr_scheduler_type=cosin"], "train.lr_scheduler_type", "there is no schedule"),
    (["train.lr_scheduler_type=cosine_with_min_lr"], "train.lr_scheduler_type", "needs min_lr"),
    (
        ["train.lr_scheduler_type=reduce_lr_on_plateau", "train.eval_strategy=no"],
        "train.lr_scheduler_type",
        "nothing is evaluated",
    ),
    (["train.warmup_steps=10", "train.warmup_ratio=0.1"], "train.warmup_steps", "as steps and as a share"),
    (["train.warmup_steps=10", "train.max_steps=10"], "train.warmup_steps", "fill the whole run"),
    (["train.torch_compile=true"], "train.torch_compile", "the run file has no train.torch_compile"),
    (["model.attn_implementation=flash_atention_2"], "model.attn_implementation", "there is no attention"),
    (["train.report_to=wandd"], "train.report_to", "there is no tracker"),
    (["train.report_to=[none, wandb]"], "train.report_to", "trackers and none"),
    (["model.device_map=cpu", THREE], "model.device_map", "3 ranks each load their own part"),
    (["model.device_map=balanced", "cluster.gpus_per_node=2"], "model.device_map", "2 ranks"),
    (["model.use_cache=true", "train.gradient_checkpointing=true"], "model.use_cache", "computed again"),
    (["model.use_cache=true", "data.packing=true"], "model.use_cache", "see each other"),
    (["lora.use_dora=true", "lora.experts=true"], "lora.use_dora", "no form for routed experts"),
    (["data.prompt_field=q"], "data.prompt_field", "needs data.completion_field"),
    (["data.completion_field=q"], "data.completion_field", "needs data.prompt_field"),
    (["data.messages_field=m", "data.prompt_template=[[{a}]]"], "data.prompt_template", "say what a row is"),
    (["layout.ranks=2", THREE], "layout.ranks", "2 ranks, but the cluster has 3 x 1 = 3 GPUs"),
    (["layout.shard=2", THREE], "layout.shard", "does not make 3 ranks"),
    (["layout.shard=2", "layout.replicate=2", "cluster.nodes=8"], "layout.shard", "= 4 does not make 8 ranks"),
    (["layout.expert_parallel=2", THREE], "layout.expert_parallel", "2 does not divide the 3 ranks"),
    (["cluster.memory_request=2Ti", "cluster.memory_limit=500G"], "cluster.memory_request", "may take only 500G"),
    (["cluster.env.RANK=0"], "cluster.env.RANK", "is set by what starts the ranks"),
    (["cluster.env.PET_NNODES=0"], "cluster.env.PET_NNODES", "is set by what starts the ranks"),
    (["cluster.env.GROUP_RANK=0"], "cluster.env.GROUP_RANK", "is set by what starts the ranks"),
    (["cluster.env.HF_TOKEN=hf_abc"], "cluster.env.HF_TOKEN", "looks like a secret"),
    (["train.global_batch_size=50", THREE], "train.global_batch_size", "don't divide by 1 per GPU x 3 GPUs = 3"),
]


@pytest.mark.parametrize(("overrides", "key", "said"), CLASHES, ids=[" ".join(case[0]) for case in CLASHES])
def test_contradiction(tmp_path: Path, overrides: list[str], key: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        loaded(tmp_path, BASE, *overrides)
    (found,) = caught.value.problems
    assert found.where.startswith(f"--override {key}")
    assert said in found.problem
    assert found.hint


def test_mounted_twice(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"volumes\[1\]\.path: /data is mounted twice"):
        loaded(tmp_path, "cluster:\n  volumes:\n  - {claim: a, path: /data}\n  - {claim: b, path: /data/}\n")


def test_both_places_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"run\.yaml:2: train\.bf16: .* \(.*run\.yaml:3: train\.fp16\)|run\.yaml:3"):
        loaded(tmp_path, "train:\n  bf16: true\n  fp16: true\n")
    with pytest.raises(UserError) as caught:
        loaded(tmp_path, "train:\n  load_best_model_at_end: true\n  eval_steps: 30\n  save_steps: 100\n")
    for line in (2, 3, 4):
        assert f"run.yaml:{line}: train." in str(caught.value)
    assert "set train.save_steps to 90" in str(caught.value)


FINE = [
    ["train.optim=paged_adamw_8bit"],  # one rank: nothing is sharded
    ["train.bf16=false", "train.fp16=true"],
    ["data.val_split=null", "train.eval_strategy=no"],
    ["data.val_fraction=0.1"],
    ["train.load_best_model_at_end=true", "train.save_steps=400"],
    ["train.load_best_model_at_end=true", "train.save_strategy=epoch", "train.eval_strategy=epoch"],
    ["train.warmup_steps=10"],
    ["train.warmup_ratio=0.2", "train.warmup_steps=0"],
    ["train.lr_scheduler_type=cosine_with_min_lr", "train.lr_scheduler_kwargs={min_lr: 1e-6}"],
    ["layout.ranks=4"],
    ["layout.shard=4", "layout.replicate=2", "cluster.gpus_per_node=8", "layout.expert_parallel=4"],
    ["cluster.memory_request=1500Mi", "cluster.memory_limit=2G"],
    ["model.attn_implementation=kernels-community/flash-attn"],
    ["cluster.env.TOKENIZERS_PARALLELISM=false"],
]


@pytest.mark.parametrize("overrides", FINE, ids=" ".join)
def test_no_contradiction(tmp_path: Path, overrides: list[str]) -> None:
    loaded(tmp_path, BASE, *overrides)


def test_ranks_may_be_given_later(tmp_path: Path) -> None:
    """What one rank may, two may not: the same rules judge a run that is started with more."""
    run = loaded(tmp_path, "train: {optim: adamw_8bit}")
    (found,) = contradictions(run.run, run.where, ranks=2)
    assert "2 ranks" in found.problem


REMARKS = [
    (["model.device_map=auto"], "windlass places the model"),
    (["train.ddp_find_unused_parameters=true"], "no effect"),
    (["train.max_steps=5", "train.num_train_epochs=2"], "num_train_epochs has no say"),
    (["train.eval_steps=5", "train.eval_strategy=no"], "no effect while train.eval_strategy"),
    (["train.lr_scheduler_type=constant"], "knows no warm-up"),
    (["train.global_batch_size=48", THREE], "48 = 1 per GPU x 3 GPUs x 16 passes"),
    (["model.use_cache=true"], "left off"),
]


@pytest.mark.parametrize(("overrides", "said"), REMARKS, ids=[case[1] for case in REMARKS])
def test_remark(tmp_path: Path, overrides: list[str], said: str) -> None:
    assert any(said in note for note in loaded(tmp_path, BASE, *overrides).notes)
    assert not any(said in note for note in loaded(tmp_path).notes)


def test_accumulation(tmp_path: Path) -> None:
    run = loaded(tmp_path, "train: {global_batch_size: 48, per_device_train_batch_size: 2}", THREE)
    assert accumulation(run.run.train, 3, run.where) == 8
    assert accumulation(run.run.train, 4, run.where) == 6
    with pytest.raises(UserError, match=r"run\.yaml:1: train\.global_batch_size.*\n.*\n?hint: take 40 or 50"):
        accumulation(run.run.train, 5, run.where)
    assert accumulation(loaded(tmp_path).run.train, 3, loaded(tmp_path).where) == 16


def test_accumulation_that_contradicts_names_both(tmp_path: Path) -> None:
    text = "train:\n  global_batch_size: 48\n  gradient_accumulation_steps: 8\n"
    with pytest.raises(UserError, match=r"run\.yaml:2: .*run\.yaml:3: .*\n\nhint: .*gradient_accumulation_steps to 16"):
        loaded(tmp_path, text, THREE)
    assert loaded(tmp_path, text.replace("8\n", "16\n", 2).replace("416", "48"), THREE).run.train.global_batch_size


OVERRIDES: list[tuple[str, str, Any]] = [
    ("train.learning_rate=1e-4", "train.learning_rate", 1e-4),
    ("train.learning_rate=1", "train.learning_rate", 1.0),
    ("lora.r=32", "lora.r", 32),
    ("train.max_steps=1_000_000", "train.max_steps", 1_000_000),
    ("train.max_steps=1e4", "train.max_steps", 10_000),
    ("lora.target_modules=[q_proj, o_proj]", "lora.target_modules", ["q_proj", "o_proj"]),
    ("lora.target_modules=all-linear", "lora.target_modules", "all-linear"),
    (r"lora.target_modules=.*\.(q|k)_proj", "lora.target_modules", r".*\.(q|k)_proj"),
    ("lora.target_modules[1]=x_proj", "lora.target_modules", ["q_proj", "x_proj", "v_proj", "o_proj"]),
    ("lora.target_modules.4=x_proj", "lora.target_modules", ["q_proj", "k_proj", "v_proj", "o_proj", "x_proj"]),
    ("model.attn_implementation=null", "model.attn_implementation", None),
    ("data.dataset_config_name=null", "data.dataset_config_name", None),
    ("data.dataset_config_name=2024", "data.dataset_config_name", "2024"),
    ("data.dataset_config_name=no", "data.dataset_config_name", "no"),
    ("data.prompt_template={q}: [[{a}]]", "data.prompt_template", "{q}: [[{a}]]"),
    ("train.run_name='two words'", "train.run_name", "two words"),
    ("train.output_dir=/a=b", "train.output_dir", "/a=b"),
    ("data.packing=yes", "data.packing", True),
    ("train.eval_strategy=no", "train.eval_strategy", "no"),
    ("train.report_to=none", "train.report_to", "none"),
    ("train.max_seq_length=77", "data.max_length", 77),
    ("name=fast", "name", "fast"),
    ("layout=hybrid", "layout.name", "hybrid"),
    ("layout.offload=true", "layout.offload", True),
    ("lora.experts={r: 2}", "lora.experts.r", 2),
    ("lora.experts.r=2", "lora.experts.r", 2),
    ("cluster.nodes=1", "cluster.nodes", 1),
    (
        "cluster.annotations.k8s.v1.cni.cncf.io/networks=ssa",
        "cluster.annotations",
        {"k8s.v1.cni.cncf.io/networks": "ssa"},
    ),
    ("cluster.env.A=1", "cluster.env", {"A": "1"}),
    ("cluster.extended_resources.rdma/nic=2", "cluster.extended_resources", {"rdma/nic": 2}),
]


@pytest.mark.parametrize(("override", "key", "value"), OVERRIDES, ids=[case[0] for case in OVERRIDES])
def test_override(tmp_path: Path, override: str, key: str, value: Any) -> None:
    found: Any = loaded(tmp_path, BASE, override).run
    for name in key.split("."):
        found = getattr(found, name)
    assert found == value
    assert type(found) is type(value)


def test_overrides_add_up(tmp_path: Path) -> None:
    text = "layout: hybrid\nlora: {experts: true, r: 4, target_modules: [a, b]}\n"
    text += "cluster: {volumes: [{claim: a, path: /a}]}"
    run = loaded(
        tmp_path, text, "lora.r=8", "lora.r=2", "layout.shard=1", "lora.experts.targets=[down_proj]",
        "cluster.volumes[0].path=/b", "cluster.volumes[1]={claim: c, path: /c}", "lora.target_modules[0]=z",
    )  # fmt: skip
    assert run.run.lora.r == 2
    assert (run.run.layout.name, run.run.layout.shard) == ("hybrid", 1)
    assert run.run.lora.experts is not None
    assert (run.run.lora.experts.r, run.run.lora.experts.targets) == (2, ["down_proj"])
    assert [volume.path for volume in run.run.cluster.volumes] == ["/b", "/c"]
    assert run.run.lora.target_modules == ["z", "b"]
    assert run.where("lora.target_modules[0]") == "--override lora.target_modules[0]=z"
    assert run.where("lora.target_modules[1]").endswith("run.yaml:2: lora.target_modules[1]")
    assert run.where("cluster.volumes[1].claim") == "--override cluster.volumes[1]={claim: c, path: /c}"


BAD = [
    ("train.lerning_rate=1", "the run file has no train.lerning_rate", "nearest: train.learning_rate"),
    ("learning_rate=1", "the run file has no learning_rate", "nearest: train.learning_rate"),
    ("lora.rank=1", "the run file has no lora.rank", "nearest: lora"),
    ("lora.r", "is not of the form a.b=value", "--override train.learning_rate=1e-4"),
    ("=3", "is not of the form a.b=value", ""),
    ("lora.r=x", "must be a whole number, not 'x'", ""),
    ("lora.r=", "must be a whole number, not empty", ""),
    ("lora.r=-1", "must be at least 1, not -1", ""),
    ("lora.target_modules[9]=x", "there is no [9]", "[4] would append one"),
    ("lora.target_modules=[a", "is not YAML", ""),
    ("lora.target_modules.x=a", "the run file has no", ""),
    ("lora.r.x=a", "the run file has no", ""),
    ("lora[0]=a", "the run file has no", ""),
    ("train.output_dir=a\ud800", "can't be printed", ""),
    ("cluster.volumes[0].path=/x", "has 0 items", ""),
    ("lora={q: 1}", "`lora` has no such key", ""),
]


@pytest.mark.parametrize(("override", "said", "hint"), BAD, ids=[repr(case[0]) for case in BAD])
def test_bad_override(tmp_path: Path, override: str, said: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        loaded(tmp_path, BASE, override)
    (found,) = caught.value.problems
    assert found.where.startswith("--override")
    assert said in found.problem
    assert hint in found.hint


def test_index_into_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a list here"):
        loaded(tmp_path, "lora: {target_modules: all}", "lora.target_modules[0]=x")
