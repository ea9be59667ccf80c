"""Valid run files: the recipe's keys and defaults, old spellings, places, overrides, presets, schema."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import warm
import yaml
from pydantic import ValidationError

from windlass.errors import UserError
from windlass.runfile import (
    ExpertLora,
    Loaded,
    LoadedScript,
    RunFile,
    Secret,
    list_keys,
    make_schema,
    read_any,
    read_preset,
    read_presets,
    read_run_file,
    resolve_accumulation,
)
from windlass.runfile.names import ATTENTION, OPTIMIZERS, OPTIMIZERS_REFUSED, OTHER_NAMES, RENAMED, SCHEDULES, TRACKERS
from windlass.runfile.recorded import read_recorded_data, record_run
from windlass.runfile.reference import UPSTREAM, find_annotation, list_alternatives

EXAMPLES = Path(__file__).parent.parent / "examples" / "mistral-small-4"
RUNS = [EXAMPLES / name for name in ("train.yaml", "configs/mistral4small_2xH200.yaml", "mistral_fsdpv2.yaml")]

Read = Callable[..., Loaded]


@pytest.fixture
def load(tmp_path: Path) -> Read:
    def to(text: str = "train: {seed: 1}", *overrides: str) -> Loaded:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return read_run_file(path, overrides)

    return to


def value_at(run: RunFile, path: str) -> Any:
    found: Any = run
    for name in path.split("."):
        found = getattr(found, name)
    return found


# The defaults of the published script's dataclasses.
RECIPE = """
model: {model_name_or_path: /data/input/Models/Mistral-Small-4-119B-2603, torch_dtype: bfloat16, device_map: auto,
        use_cache: false, attn_implementation: null}
lora: {r: 16, lora_alpha: 32, lora_dropout: 0.05, target_modules: [q_proj, k_proj, v_proj, o_proj], bias: none,
       task_type: CAUSAL_LM}
data: {dataset_name_or_path: /data/input/Datasets/wikitext, dataset_config_name: wikitext-2-raw-v1, text_field: text,
       train_split: train, val_split: validation, max_length: 1024, prompt_template: null}
train: {output_dir: /data/output/Models/mistral4small-lora-fsdp, num_train_epochs: 1, per_device_train_batch_size: 1,
        per_device_eval_batch_size: 1, gradient_accumulation_steps: 16, gradient_checkpointing: false,
        optim: adamw_torch, learning_rate: 1.0e-4, lr_scheduler_type: cosine, warmup_ratio: 0.05, weight_decay: 0.01,
        bf16: true, fp16: false, logging_steps: 25, eval_strategy: steps, eval_steps: 200, save_strategy: steps,
        save_steps: 200, save_total_limit: 3, load_best_model_at_end: false, report_to: none, seed: 42,
        ddp_find_unused_parameters: false}
"""


# What the plan or the data choose if the run file doesn't.
CHOSEN = {"max_length", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps", "bf16"}
CHOSEN |= {"gradient_checkpointing", "text_field", "dataset_config_name", "val_split", "eval_strategy"}


def test_defaults_and_examples_are_the_recipes() -> None:
    run = RunFile()
    for section, values in yaml.safe_load(RECIPE).items():
        dumped = getattr(run, section).model_dump()
        assert {key: dumped[key] for key in values if key not in CHOSEN} == {
            key: value for key, value in values.items() if key not in CHOSEN
        }
        assert {dumped[key] for key in values if key in CHOSEN} <= {"auto", None}
    recorded = record_run(run)
    chosen = yaml.safe_load(RECIPE)
    for key in ("text_field", "dataset_config_name", "val_split"):
        assert recorded["data"][key] == chosen["data"][key]
    assert recorded["train"]["eval_strategy"] == chosen["train"]["eval_strategy"]
    assert read_recorded_data(recorded["data"]) == {}
    assert run.model.trust_remote_code is False
    with pytest.raises(ValidationError, match="frozen"):
        run.lora.r = 3  # type: ignore[misc]
    for path in RUNS:
        loaded = read_run_file(path)
        for section, values in yaml.safe_load(path.read_text(encoding="utf-8")).items():
            for key, value in values.items():
                value = float(value) if key == "learning_rate" else value  # 2e-5 is text to YAML 1.1
                name = RENAMED.get(f"{section}.{key}", f"{section}.{key}")
                assert value_at(loaded.run, name) == value, (path, section, key)
    loaded = read_run_file(RUNS[0])
    assert (loaded.run.ranks, loaded.run.cluster.network) == (3, "infiniband-400")
    assert any("model.device_map" in note and "windlass places" in note for note in loaded.notes)


def test_old_spellings_are_accepted_with_a_note(load: Read) -> None:
    special = {"torch_dtype": "float32", "text_field": "body", "eval_strategy": "epoch", "resume": "auto"}
    special["server"] = "vllm"
    for old, new in RENAMED.items():
        section, _, key = old.partition(".")
        boolean = bool in list_alternatives(find_annotation(tuple(new.split("."))))
        text = special.get(new.partition(".")[2], "true" if boolean else "7")
        loaded = load(f"{section}:\n  {key}: {text}\n")
        assert str(value_at(loaded.run, new)).lower() == text
        assert loaded.where(new).endswith(f"run.yaml:2: {old}")
        assert any(f"is read as {new}" in note for note in loaded.notes)


def test_places(load: Read) -> None:
    text = "lora:\n  r: 4\n  target_modules: &t\n    - a\n    - b\n  experts: {targets: *t}\ncluster: {env: {A: '1'}}\n"
    loaded = load(text, "lora.lora_alpha=8")
    for path, place in {
        "lora.r": "run.yaml:2: lora.r",
        "lora.target_modules[1]": "run.yaml:5: lora.target_modules[1]",
        "lora.experts.targets": "run.yaml:6: lora.experts.targets",
        "cluster.env.A": "run.yaml:7: cluster.env.A",
        "lora.lora_alpha": "--override lora.lora_alpha=8",
        "train.seed": "default: train.seed",
    }.items():
        assert loaded.where(path).endswith(place)
    assert loaded.run.lora.experts is not None
    assert loaded.run.lora.experts.targets == ["a", "b"]
    assert load("lora:\n  r: 1\nlayout: hybrid\n").where("layout.name").endswith("run.yaml:3: layout")
    assert load("lora: {r: 1}", "layout=hybrid").where("layout.name") == "--override layout=hybrid"
    with pytest.raises(UserError, match=r"run\.yaml:2: data\.max_seq_length.*run\.yaml:3: data\.max_length"):
        load("data:\n  max_seq_length: 5\n  max_length: 6\n")


VALUES: list[tuple[str, str, Any]] = [  # of plain YAML 1.2, with 1.1's `no` where a word is wanted
    ("train: {learning_rate: 1e-4}", "train.learning_rate", 1e-4),
    ("train: {eval_strategy: no}", "train.eval_strategy", "no"),
    ("train: {save_steps: 1_000}", "train.save_steps", 1000),
    ("data: {dataset_config_name: 2024-01-01}", "data.dataset_config_name", "2024-01-01"),
    ("train: {report_to: [wandb, mlflow]}", "train.report_to", ["wandb", "mlflow"]),
    ("train: {report_to: null}", "train.report_to", "none"),
    ("data: {val_fraction: 0.1}", "data.validation_split", None),
    ("lora: {target_modules: '.*self_attn.*'}", "lora.target_modules", ".*self_attn.*"),
    ("watch:\nlayout: hybrid", "layout.name", "hybrid"),
    ("cluster: {cpu: 8}", "cluster.cpu", "8"),
    ("cluster: {env: {HF_TOKEN: {secret: hub, key: token}, ON: 3}}", "cluster.env",
     {"HF_TOKEN": Secret(secret="hub", key="token"), "ON": "3"}),
    ("lora: {experts: true}", "lora.experts",
     ExpertLora(r=16, lora_alpha=32, targets=["gate_up_proj", "down_proj"])),
    ("lora: {experts: {r: 4}}", "lora.experts.lora_alpha", 8),
    ("lora: {experts: false}", "lora.experts", None),
    ("lora: {r: 8, lora_alpha: 20, experts: {targets: [a]}}", "lora.experts",
     ExpertLora(r=8, lora_alpha=20, targets=["a"])),
    ("\ufefftrain:\r\n  seed: 7\r\n", "train.seed", 7),
]  # fmt: skip


OVERRIDES: list[tuple[str, str, Any]] = [
    ("train.max_steps=1e4", "train.max_steps", 10_000),
    ("lora.target_modules=[q_proj, o_proj]", "lora.target_modules", ["q_proj", "o_proj"]),
    (r"lora.target_modules=.*\.(q|k)_proj", "lora.target_modules", r".*\.(q|k)_proj"),
    ("model.attn_implementation=null", "model.attn_implementation", None),
    ("data.dataset_config_name=2024", "data.dataset_config_name", "2024"),
    ("data.dataset_config_name=no", "data.dataset_config_name", "no"),
    ("data.prompt_template={q}: [[{a}]]", "data.prompt_template", "{q}: [[{a}]]"),
    ("train.run_name='two words'", "train.run_name", "two words"),
    ("train.report_to=none", "train.report_to", "none"),
    ("train.max_seq_length=77", "data.max_length", 77),
    ("layout.offload=true", "layout.offload", True),
    ("lora.experts.r=2", "lora.experts.r", 2),
    ("cluster.kubernetes.annotations.k8s.v1.cni/net=a", "cluster.kubernetes.annotations", {"k8s.v1.cni/net": "a"}),
    ("cluster.env.A=1", "cluster.env", {"A": "1"}),
    ("cluster.kubernetes.extended_resources.rdma/nic=2", "cluster.kubernetes.extended_resources", {"rdma/nic": 2}),
]


def test_values_are_parsed_as_intended(load: Read) -> None:
    for text, path, value in VALUES:
        found = value_at(load(text).run, path)
        assert (found, type(found)) == (value, type(value)), text
    for override, path, value in OVERRIDES:
        found = value_at(load("train: {seed: 1}", override).run, path)
        assert (found, type(found)) == (value, type(value)), override


def test_overrides_are_combined(load: Read) -> None:
    text = "layout: hybrid\nlora: {experts: true, r: 4, target_modules: [a, b]}\n"
    overrides = ["lora.r=8", "lora.r=2", "layout.shard=1", "lora.experts.targets=[down_proj]"]
    loaded = load(text, *overrides, "cluster.volumes=[{claim: c, path: /c}]")
    run = loaded.run
    assert (run.lora.r, run.layout.name, run.layout.shard, run.lora.target_modules) == (2, "hybrid", 1, ["a", "b"])
    assert run.lora.experts is not None
    assert (run.lora.experts.r, run.lora.experts.targets) == (2, ["down_proj"])
    assert loaded.where("lora.target_modules[1]").endswith("run.yaml:2: lora.target_modules[1]")
    assert loaded.where("cluster.volumes[0].claim") == "--override cluster.volumes=[{claim: c, path: /c}]"


def test_batches_and_warm_up(load: Read) -> None:
    """Accumulation follows from the global batch; warm-up steps replace the default share; shares are rounded up."""
    assert load("train: {warmup_steps: 7}").run.train.warmup(100) == 7
    assert load("train: {warmup_steps: 0}").run.train.warmup(100) == 0
    assert load("train: {warmup_steps: 0, warmup_ratio: 0.1}").run.train.warmup(101) == 11
    assert load("train: {seed: 1}").run.train.warmup(100) == 5
    loaded = load("train: {global_batch_size: 48, per_device_train_batch_size: 2}", "cluster.nodes=3")
    assert resolve_accumulation(loaded.run.train, 3, loaded.where) == 8
    assert resolve_accumulation(loaded.run.train, 4, loaded.where) == 6
    with pytest.raises(UserError, match=r"run\.yaml:1: train\.global_batch_size.*\n.*\n?hint: set it to 40 or 50"):
        resolve_accumulation(loaded.run.train, 5, loaded.where)
    assert resolve_accumulation(load().run.train, 3, load().where) == 16
    text = "train:\n  global_batch_size: 48\n  gradient_accumulation_steps: 8\n"
    with pytest.raises(UserError, match=r"run\.yaml:2: .*run\.yaml:3: .*\n\nhint: .*gradient_accumulation_steps to 16"):
        load(text, "cluster.nodes=3")
    assert load(text.replace("steps: 8", "steps: 16"), "cluster.nodes=3").run.train.global_batch_size == 48
    load("train: {optim: adamw_8bit}")
    with pytest.raises(UserError, match="sharded over 2 ranks"):
        load("train: {optim: adamw_8bit}", "cluster.nodes=2")


def test_presets_have_no_remarks(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    for name, text in read_presets().items():
        assert text == read_preset(name)
        assert text.startswith("# ")
        path.write_text(text, encoding="utf-8")
        loaded = read_any(path)
        if isinstance(loaded, LoadedScript):
            continue
        train = loaded.run.train
        assert isinstance(train.per_device_train_batch_size, int)
        assert train.global_batch_size is not None
        steps = train.global_batch_size // (train.per_device_train_batch_size * loaded.run.ranks)
        product = f"/ ({train.per_device_train_batch_size} x {loaded.run.ranks}) = "
        assert product not in text or f"{product}{steps}" in text
    shown = [  # the keys that a preset only shows in comments can be switched on
        "lora.experts=true",
        "lora.lora_dropout=0",
        "cluster.platform=runai",
        "cluster.image=registry.example/pytorch@sha256:0",
        "cluster.volumes=[{claim: project-001, path: /data}]",
        "cluster.runai.networks=[ssa]",
        "cluster.runai.extended_resources={openshift.io/mellanoxnics: 1}",
        "cluster.env.NCCL_SOCKET_IFNAME=net1",
        "cluster.env.HF_TOKEN={secret: hub, key: token}",
    ]
    path.write_text(read_preset(), encoding="utf-8")
    env = read_run_file(path, shown).run.cluster.env
    assert env == {"HF_TOKEN": Secret(secret="hub", key="token"), "NCCL_SOCKET_IFNAME": "net1"}
    with pytest.raises(UserError, match="tiny-cpu"):
        read_preset("tiny")


def test_the_schema_accepts_what_is_read_and_refuses_what_is_not(tmp_path: Path) -> None:
    validator = jsonschema.Draft202012Validator(make_schema())
    for text in (
        *(path.read_text() for path in RUNS),
        *read_presets().values(),
        "layout: {shard: 1}",
        "watch:",
        "cluster: {slurm: }",
    ):
        (tmp_path / "run.yaml").write_text(text)
        read_any(tmp_path / "run.yaml")
        validator.validate(yaml.safe_load(text.replace("2e-5", "2.0e-5").replace("1e-", "1.0e-")))
    for text in ("lora: {rank: 8}", "lora: {r: a}", "layout: fast", "train: {eval_strategy: never}"):
        assert not validator.is_valid(yaml.safe_load(text)), text


UPSTREAM_NAMES = """
import dataclasses, json
from peft import LoraConfig
from transformers import TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.trainer_utils import SchedulerType
from transformers.training_args import OptimizerNames
print(json.dumps({
    "optimizers": [one.value for one in OptimizerNames], "schedules": [one.value for one in SchedulerType],
    "trackers": list(INTEGRATION_TO_CALLBACK), "attention": list(ALL_ATTENTION_FUNCTIONS.keys()),
    "lora": [field.name for field in dataclasses.fields(LoraConfig)],
    "train": [field.name for field in dataclasses.fields(TrainingArguments)],
}))
"""


def test_names_are_the_libraries() -> None:
    """Names kept as data exist in the installed libraries; every other name leads to one of our keys."""
    done = subprocess.run([warm.python(), "-c", UPSTREAM_NAMES], capture_output=True, text=True, check=True)
    upstream = {kind: set(names) for kind, names in json.loads(done.stdout).items()}
    assert set(OPTIMIZERS) | set(OPTIMIZERS_REFUSED) == upstream["optimizers"]
    assert set(SCHEDULES) == upstream["schedules"]
    assert TRACKERS.keys() - {"none"} < upstream["trackers"]
    own = {"windlass", "windlass-documents", "windlass-long-rows"}  # a warm process has windlass.train
    assert set(ATTENTION) - {"eager"} == {name for name in upstream["attention"] if "|" not in name} - own
    for section in ("lora", "train"):
        ours = {key.partition(".")[2] for key in list_keys() if key.startswith(f"{section}.") and key.count(".") == 1}
        assert ours - UPSTREAM[section][1] <= upstream[section]
        assert not UPSTREAM[section][1] & upstream[section]
    assert set(OTHER_NAMES.values()) <= set(list_keys())
