"""The run file as it is meant: the recipe's keys and defaults, old spellings, places, starts, reference, schema."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from windlass.errors import UserError
from windlass.runfile import (
    ExpertLora,
    LoadedScript,
    RunFile,
    Secret,
    describe,
    init,
    keys,
    presets,
    read,
    read_any,
    schema,
)
from windlass.runfile.names import ATTENTION, OPTIMIZERS, OPTIMIZERS_REFUSED, RENAMED, SCHEDULES, TRACKERS

EXAMPLES = Path(__file__).parent.parent / "examples" / "mistral-small-4"
RUNS = [EXAMPLES / name for name in ("train.yaml", "configs/mistral4small_2xH200.yaml", "mistral_fsdpv2.yaml")]
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def to(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return to


def test_the_recipes_defaults() -> None:
    """The defaults of the published script's dataclasses, key by key."""
    run = RunFile()
    assert run.model.model_dump(exclude={"trust_remote_code"}) == {
        "model_name_or_path": "/data/input/Models/Mistral-Small-4-119B-2603",
        "torch_dtype": "bfloat16",
        "device_map": "auto",
        "use_cache": False,
        "attn_implementation": None,
    }
    wanted: dict[str, dict[str, Any]] = {
        "lora": {"r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "target_modules": SEVEN[:4], "bias": "none"},
        "data": {
            "dataset_name_or_path": "/data/input/Datasets/wikitext",
            "dataset_config_name": "wikitext-2-raw-v1",
            "text_field": "text",
            "train_split": "train",
            "val_split": "validation",
            "max_length": 1024,
            "prompt_template": None,
        },
        "train": {
            "output_dir": "/data/output/Models/mistral4small-lora-fsdp",
            "num_train_epochs": 1,
            "per_device_train_batch_size": 1,
            "per_device_eval_batch_size": 1,
            "gradient_accumulation_steps": 16,
            "gradient_checkpointing": False,
            "optim": "adamw_torch",
            "learning_rate": 1e-4,
            "lr_scheduler_type": "cosine",
            "warmup_ratio": 0.05,
            "weight_decay": 0.01,
            "bf16": True,
            "fp16": False,
            "logging_steps": 25,
            "eval_strategy": "steps",
            "eval_steps": 200,
            "save_strategy": "steps",
            "save_steps": 200,
            "save_total_limit": 3,
            "load_best_model_at_end": False,
            "report_to": "none",
            "seed": 42,
            "ddp_find_unused_parameters": False,
        },
    }
    for section, values in wanted.items():
        dumped = getattr(run, section).model_dump()
        assert {key: dumped[key] for key in values} == values
    assert run.lora.task_type == "CAUSAL_LM"


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_example_keeps_every_value(path: Path) -> None:
    """What an example says is what comes out, under the key it says or the one that this is another spelling of."""
    run = read(path).run.model_dump()
    said = yaml.safe_load(path.read_text(encoding="utf-8"))
    for section, values in said.items():
        for key, value in values.items():
            new_section, _, new_key = RENAMED.get(f"{section}.{key}", f"{section}.{key}").partition(".")
            value = float(value) if key == "learning_rate" else value  # 2e-5 is text to YAML 1.1
            assert run[new_section][new_key] == value, (section, key)


def test_example_of_three_nodes() -> None:
    loaded = read(RUNS[0])
    assert loaded.run.lora.target_modules == SEVEN
    assert (loaded.run.lora.r, loaded.run.lora.lora_alpha, loaded.run.lora.lora_dropout) == (16, 32, 0.05)
    assert loaded.run.ranks == 3
    assert loaded.run.cluster.network == "infiniband-400"
    assert any("model.device_map" in note and "windlass places" in note for note in loaded.notes)


def test_third_forms_settings() -> None:
    run = read(RUNS[2]).run
    assert (run.lora.r, run.lora.lora_alpha, run.lora.target_modules) == (8, 16, SEVEN[:4])
    assert (run.train.per_device_train_batch_size, run.train.gradient_accumulation_steps) == (4, 8)
    assert (run.train.learning_rate, run.train.warmup_ratio, run.data.max_length) == (2e-5, 0.1, 4096)
    assert run.model.attn_implementation == "flash_attention_2"


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_old_spelling_is_read_and_said(write: Write, old: str, new: str) -> None:
    section, _, key = old.partition(".")
    value = {"torch_dtype": "float32", "text_field": "body", "eval_strategy": "epoch", "resume": "auto"}
    text = value.get(new.partition(".")[2], "true" if describe(new) and "true or false" in str(describe(new)) else "7")
    loaded = read(write(f"{section}:\n  {key}: {text}\n"))
    new_section, _, new_key = new.partition(".")
    assert str(getattr(getattr(loaded.run, new_section), new_key)).lower() == text
    assert loaded.where(new).endswith(f"run.yaml:2: {old}")
    assert any(f"is read as {new}" in note for note in loaded.notes)


def test_old_and_new_spelling_together_name_both(write: Write) -> None:
    with pytest.raises(UserError, match=r"run\.yaml:2: data\.max_seq_length.*run\.yaml:3: data\.max_length"):
        read(write("data:\n  max_seq_length: 5\n  max_length: 6\n"))


def test_places(write: Write) -> None:
    text = "lora:\n  r: 4\n  target_modules:\n    - a\n    - b\ncluster: {env: {A: '1'}}\n"
    loaded = read(write(text), ["lora.lora_alpha=8"])
    assert loaded.where("lora.r").endswith("run.yaml:2: lora.r")
    assert loaded.where("lora.target_modules[1]").endswith("run.yaml:5: lora.target_modules[1]")
    assert loaded.where("cluster.env.A").endswith("run.yaml:6: cluster.env.A")
    assert loaded.where("lora.lora_alpha") == "--override lora.lora_alpha=8"
    assert loaded.where("train.seed") == "default: train.seed"
    assert read(write("lora:\n  r: 1\nlayout: hybrid\n")).where("layout.name").endswith("run.yaml:3: layout")
    assert read(write("lora: {r: 1}"), ["layout=hybrid"]).where("layout.name") == "--override layout=hybrid"
    assert loaded.given("lora.r")
    assert not loaded.given("train.seed")


def test_yaml_as_people_mean_it(write: Write) -> None:
    """1e-4 is a number, a bare `no` is the word where a word is wanted, leading zeros and dates are text."""
    text = "name: a\ntrain:\n  learning_rate: 1e-4\n  eval_strategy: no\n  save_steps: 1_000\n  max_steps: 1e3\n"
    run = read(write(text + "data: {dataset_config_name: 2024-01-01, text_field: 007}\n")).run
    assert run.train.learning_rate == 1e-4
    assert run.train.eval_strategy == "no"
    assert (run.train.save_steps, run.train.max_steps) == (1000, 1000)
    assert isinstance(run.train.max_steps, int)
    assert (run.data.dataset_config_name, run.data.text_field) == ("2024-01-01", "007")


def test_experts_take_rank_and_ratio(write: Write) -> None:
    both = ["gate_up_proj", "down_proj"]
    assert read(write("lora: {experts: true}")).run.lora.experts == ExpertLora(r=16, lora_alpha=32, targets=both)
    assert read(write("lora: {experts: {r: 4}}")).run.lora.experts == ExpertLora(r=4, lora_alpha=8, targets=both)
    assert read(write("lora: {experts: false}")).run.lora.experts is None
    scaled = read(write("lora: {experts: {targets: [down_proj]}}"), ["lora.r=8", "lora.lora_alpha=20"]).run.lora.experts
    assert scaled == ExpertLora(r=8, lora_alpha=20, targets=["down_proj"])


def test_warm_up_has_one_meaning(write: Write) -> None:
    """Steps replace the default share, 0 steps beside a share are transformers' default, shares are rounded up."""
    assert read(write("train: {warmup_steps: 7}")).run.train.warmup(100) == 7
    assert read(write("train: {warmup_steps: 0}")).run.train.warmup(100) == 0
    assert read(write("train: {warmup_steps: 0, warmup_ratio: 0.1}")).run.train.warmup(101) == 11
    assert read(write("train: {seed: 1}")).run.train.warmup(100) == 5


def test_other_shapes_of_values(write: Write) -> None:
    text = """
    lora: {target_modules: '.*self_attn.*', init_lora_weights: gaussian}
    data: {val_fraction: 0.1}
    train: {report_to: [wandb, mlflow], save_total_limit: null, resume: true}
    layout: hybrid
    watch:
    cluster:
      nodes: 2
      network: {name: mine, gb_per_second: 12}
      gpu: {name: mine, memory_gib: 90, bf16_tflops: 800, memory_gb_per_second: 3000}
      volumes: [{claim: project-001, path: /data}]
      env: {HF_TOKEN: {secret: hub, key: token}, A: 3}
      extended_resources: {openshift.io/mellanoxnics: 1}
      annotations: {k8s.v1.cni.cncf.io/networks: ssa}
      cpu: 8
    """
    run = read(write(text)).run
    assert run.lora.target_modules == ".*self_attn.*"
    assert run.data.val_split is None
    assert (run.train.report_to, run.train.save_total_limit, run.train.resume) == (["wandb", "mlflow"], None, "auto")
    assert run.layout.name == "hybrid"
    assert run.cluster.env == {"HF_TOKEN": Secret(secret="hub", key="token"), "A": "3"}
    assert run.cluster.cpu == "8"


def test_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        RunFile().lora.r = 3  # type: ignore[misc]


def test_aliases_of_yaml(write: Write) -> None:
    loaded = read(write("lora:\n  target_modules: &t [a, b]\n  experts:\n    targets: *t\n"))
    assert loaded.run.lora.experts is not None
    assert loaded.run.lora.experts.targets == ["a", "b"]
    assert loaded.where("lora.experts.targets[1]").endswith("run.yaml:4: lora.experts.targets[1]")


@pytest.mark.parametrize("name", presets())
def test_start_reads_without_a_word(tmp_path: Path, name: str) -> None:
    text = init(name)
    assert text.startswith(f"# {presets()[name]}\n")
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    loaded = read_any(path)
    assert all("sequences" not in note for note in loaded.notes)
    assert isinstance(loaded, LoadedScript) or accumulation_is_said(text, loaded.run)


def accumulation_is_said(text: str, run: RunFile) -> bool:
    assert run.train.global_batch_size is not None
    assert isinstance(run.train.per_device_train_batch_size, int)
    steps = run.train.global_batch_size // (run.train.per_device_train_batch_size * run.ranks)
    product = f"/ ({run.train.per_device_train_batch_size} x {run.ranks}) = "
    return product not in text or f"{product}{steps}" in text


def test_what_starts_comment_out_is_valid(tmp_path: Path) -> None:
    """The keys that a start only shows can be switched on."""
    shown = [
        "lora.experts=true",
        "lora.lora_dropout=0",
        "cluster.platform=runai",
        "cluster.image=registry.example/pytorch@sha256:0",
        "cluster.volumes=[{claim: project-001, path: /data}]",
        "cluster.networks=[ssa]",
        "cluster.extended_resources={openshift.io/mellanoxnics: 1}",
        "cluster.env.NCCL_SOCKET_IFNAME=net1",
        "cluster.env.HF_TOKEN={secret: hub, key: token}",
    ]
    path = tmp_path / "run.yaml"
    path.write_text(init(), encoding="utf-8")
    run = read(path, shown).run
    assert run.cluster.env["HF_TOKEN"] == Secret(secret="hub", key="token")
    assert run.cluster.env["NCCL_SOCKET_IFNAME"] == "net1"


def test_unknown_start() -> None:
    with pytest.raises(UserError, match="tiny-cpu"):
        init("tiny")


def test_every_key_is_described() -> None:
    for key in keys():
        said = describe(key)
        assert said is not None, key
        assert len(said.split("\n")[1].strip()) > 8, f"{key} has no docstring"
    assert "also written: data.max_seq_length" in str(describe("max_length"))
    assert "another spelling of train.eval_strategy" in str(describe("evaluation_strategy"))
    assert "default: 16" in str(describe("lora.r"))
    assert "cluster.volumes.claim" in str(describe("cluster.volumes[0].claim"))
    assert str(describe("cluster.env.HOME")).startswith("cluster.env\n")
    assert describe("lora.rank") is None


@pytest.mark.parametrize("text", [*(path.read_text() for path in RUNS), *map(init, presets()), "layout: {shard: 1}"])
def test_schema_takes_what_is_read(write: Write, text: str) -> None:
    read_any(write(text))
    assert unfit(yaml.safe_load(text.replace("2e-5", "2.0e-5").replace("1e-", "1.0e-")), schema()) == []


@pytest.mark.parametrize("text", ["lora: {rank: 8}", "lora: {r: a}", "layout: fast", "train: {eval_strategy: never}"])
def test_schema_refuses(text: str) -> None:
    assert unfit(yaml.safe_load(text), schema())


TYPES: dict[str, Any] = {
    "string": str,
    "number": int | float,
    "integer": int,
    "boolean": bool,
    "null": type(None),
    "array": list,
    "object": dict,
}


def unfit(value: Any, rule: dict[str, Any], root: dict[str, Any] | None = None) -> list[str]:
    """As much of JSON Schema as the run file's uses."""
    root = root or rule
    if "if" in rule:
        return unfit(value, rule["else" if unfit(value, rule["if"], root) else "then"], root)
    if "$ref" in rule:
        return unfit(value, root["$defs"][rule["$ref"].rpartition("/")[2]], root)
    if "anyOf" in rule:
        tried = [unfit(value, option, root) for option in rule["anyOf"]]
        return [] if [] in tried else tried[0]
    allowed = rule.get("enum", [rule["const"]] if "const" in rule else [value])
    if value not in allowed or (isinstance(value, bool) and not any(value is one for one in allowed)):
        return [f"{value!r} is none of {allowed}"]
    if "type" in rule and (not isinstance(value, TYPES[rule["type"]]) or (rule["type"] != "boolean" and value is True)):
        return [f"{value!r} is no {rule['type']}"]
    if value is not None and not isinstance(value, str | bool | list | dict) and value < rule.get("minimum", value):
        return [f"{value!r} is too small"]
    if isinstance(value, list):
        return [wrong for item in value for wrong in unfit(item, rule.get("items", {}), root)]
    if isinstance(value, dict):
        known, more = rule.get("properties", {}), rule.get("additionalProperties", {})
        rest = [key for key in value if key not in known and more is False]
        rest += [f"no {key}" for key in rule.get("required", ()) if key not in value]
        return rest + [
            w for key, item in value.items() if key not in rest for w in unfit(item, known.get(key, more), root)
        ]
    return []


def test_names_are_the_librarys() -> None:
    """The lists kept as data are those of the transformers that the tests run with."""
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.trainer_utils import SchedulerType
    from transformers.training_args import OptimizerNames

    optimizers, schedules = ({one.value for one in names} for names in (OptimizerNames, SchedulerType))
    trackers, attention = set(INTEGRATION_TO_CALLBACK), set(ALL_ATTENTION_FUNCTIONS.keys())
    assert set(OPTIMIZERS) | set(OPTIMIZERS_REFUSED) == optimizers
    assert set(SCHEDULES) == schedules
    assert TRACKERS.keys() - {"none"} == trackers - {"kubeflow"}  # kubeflow is a job's progress, not a tracker
    assert set(ATTENTION) - {"eager"} == {name for name in attention if "|" not in name}


def test_no_torch_and_quick() -> None:
    code = "import sys, windlass.runfile; print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
