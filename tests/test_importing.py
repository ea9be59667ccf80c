"""Other tools' configurations become run files: every key is carried over, translated, listed or refused."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from refusals import refused
from transformers import AutoTokenizer

from windlass import cli, tiny
from windlass.data.prepare import prepare_data
from windlass.errors import UserError
from windlass.runfile import read_run_file
from windlass.runfile.document import load_document
from windlass.runfile.importers import TRANSLATE, import_file, render_run_file
from windlass.runfile.importers.imported import ImportedRun
from windlass.runfile.names import IMPORTED, TOOLS, group_by_name
from windlass.runfile.reference import list_keys

AXOLOTL = """
base_model: ./mistral
adapter: lora
sequence_len: 2048
sample_packing: true
datasets: [{path: chats.jsonl, type: chat_template}]
val_set_size: 0.05
output_dir: ./outputs/out
lora_r: 32
lora_alpha: 16
lora_target_linear: true
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 3
optimizer: adamw_torch_fused
lr_scheduler: cosine
learning_rate: 2e-4
bf16: auto
tf32: true
gradient_checkpointing: true
flash_attention: true
warmup_steps: 10
evals_per_epoch: 4
saves_per_epoch: 1
weight_decay: 0.1
special_tokens: {pad_token: <pad>}
wandb_project: llm
wandb_name: first
"""
MISTRAL_4 = """
base_model: mistralai/Mistral-Small-4-119B-2603
plugins: [axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin]
load_in_4bit: true
quantize_moe_experts: true
datasets: [{path: org/messages, type: chat_template, split: train}]
dataset_prepared_path: prepared
val_set_size: 0
output_dir: ./out
adapter: qlora
sequence_len: 4096
sample_packing: true
lora_r: 16
lora_alpha: 32
lora_dropout: 0.05
lora_target_modules: 'model.language_model.layers.[\\d]+.(mlp|self_attn).(up|down|gate|o)_proj'
micro_batch_size: 1
gradient_accumulation_steps: 1
num_epochs: 1
optimizer: adamw_bnb_8bit
learning_rate: 0.0002
bf16: true
attn_implementation: flash_attention_2
warmup_ratio: 0.1
"""
LLAMA_FACTORY = """
model_name_or_path: ./qwen
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: rows.jsonl
template: qwen3
cutoff_len: 2048
max_samples: 1000
preprocessing_num_workers: 16
output_dir: saves/sft
logging_steps: 10
save_steps: 500
plot_loss: true
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
"""
TRL = """
model_name_or_path: ./llama
dtype: bfloat16
use_peft: true
lora_r: 64
lora_alpha: 16
dataset_name: org/chats
output_dir: out
max_length: 4096
packing: true
learning_rate: 2.0e-4
gradient_checkpointing_kwargs: {use_reentrant: false}
eval_strategy: steps
eval_steps: 50
"""
SWIFT = """#!/bin/bash
# 14 GiB
CUDA_VISIBLE_DEVICES=0,1 \\
NPROC_PER_NODE=2 \\
swift sft \\
    --model ./qwen \\
    --tuner_type lora \\
    --dataset 'rows.jsonl#500' \\
    --torch_dtype bfloat16 \\
    --num_train_epochs 1 \\
    --learning_rate 1e-4 \\
    --lora_rank 8 --lora_alpha=32 \\
    --target_modules q_proj v_proj \\
    --gradient_accumulation_steps 16 \\
    --eval_strategy no --save_steps 50 \\
    --max_length 2048 \\
    --deepspeed zero3 \\
    --attn_impl flash_attn
"""


def edited(text: str, **values: Any) -> str:
    """Return the configuration with other values; None removes a key."""
    lines = [line for line in text.splitlines() if line.partition(":")[0] not in values]
    return "\n".join([*lines, *(f"{key}: {json.dumps(value)}" for key, value in values.items() if value is not None)])


USUAL_SET = {
    "path": "a.jsonl",
    "ds_type": "json",
    "type": "chat_template",
    "chat_template": "chatml",
    "roles_to_train": ["assistant"],
    "train_on_eos": "turn",
    "message_property_mappings": {"role": "speaker", "content": "value"},
    "field_tools": "functions",
    "roles": {"assistant": ["gpt"], "user": ["human"]},
}
Case = tuple[str, dict[str, Any], list[str]]  # a configuration, what it becomes, and which of its keys are refused


def case(text: str, becomes: dict[str, Any] | None = None, keys: Sequence[str] = (), /, **edits: Any) -> Case:
    return edited(text, **edits) if edits else text, becomes or {}, [*keys]


CASES: dict[str, Case] = {
    "axolotl": case(
        AXOLOTL,
        {
            "model.model_name_or_path": "./mistral",
            "model.attn_implementation": "flash_attention_2",
            "lora.target_modules": "all-linear",
            "lora.lora_dropout": 0.0,
            "data.dataset_name_or_path": "chats.jsonl",
            "data.dataset_config_name": None,
            "data.messages_field": "messages",
            "data.completion_only_loss": True,
            "data.packing": True,
            "data.val_fraction": 0.05,
            "train.learning_rate": 2e-4,
            "train.per_device_train_batch_size": 2,
            "train.warmup_steps": 10,
            "train.eval_strategy": "epoch",
            "train.report_to": ["wandb"],
            "train.run_name": "first",
            "train.bf16": True,
        },
    ),
    "axolotl mistral 4 in 4 bits": case(
        MISTRAL_4,
        {
            "train.optim": "adamw_bnb_8bit",
            "data.val_split": None,
            "train.eval_strategy": "no",
            "lora.r": 16,
            "layout.base_dtype": "nf4",
        },
    ),
    "axolotl mistral 4 in 16 bits, experts": case(
        MISTRAL_4,
        {"lora.experts": {"targets": ["gate_up_proj"]}},
        load_in_4bit=False,
        adapter="lora",
        lora_target_parameters=["mlp.experts.gate_up_proj"],
    ),
    "axolotl text": case(
        AXOLOTL,
        {"data.text_field": "body", "data.dataset_config_name": "en"},
        datasets=[{"path": "t", "type": "completion", "field": "body", "name": "en"}],
    ),
    "axolotl own prompt": case(
        AXOLOTL,
        {"data.prompt_template": "{q}\n[[{a}]]"},
        datasets=[{"path": "t", "type": {"field_instruction": "q", "field_output": "a", "format": "{instruction}\n"}}],
    ),
    "axolotl lowest learning rate": case(
        AXOLOTL,
        {"train.lr_scheduler_type": "cosine_with_min_lr", "train.lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
        cosine_min_lr_ratio=0.1,
    ),
    "axolotl on prompts too": case(
        AXOLOTL, {"data.completion_only_loss": False}, train_on_inputs=True, fsdp_version=2, deepspeed="zero3.json"
    ),
    "axolotl all weights": case(AXOLOTL, {}, ["adapter"], adapter=None),
    "axolotl other preferences": case(AXOLOTL, {}, ["rl", "rl_beta"], rl="kto", rl_beta=0.1),
    "axolotl dpo": case(
        AXOLOTL,
        {
            "train.objective": "dpo",
            "dpo.beta": 0.2,
            "dpo.loss": "ipo",
            "data.messages_field": "messages",
            "data.columns": {"chosen": "good"},
        },
        rl="ipo",
        rl_beta=0.2,
        datasets=[{"path": "p.jsonl", "type": "chat_template.default", "field_chosen": "good"}],
    ),
    "axolotl styles of pairs": case(
        AXOLOTL,
        {
            "train.objective": "orpo",
            "orpo.beta": 0.3,
            "data.mix": [
                {
                    "path": "a.jsonl",
                    "split": "train",
                    "format": "messages",
                    "chat_template": "chatml",
                    "columns": {"messages": "question"},
                },
                {"path": "b.jsonl", "split": "train", "format": "preference", "chat_template": "llama3"},
                {"path": "c.jsonl", "split": "train", "format": "preference"},
            ],
        },
        rl="orpo",
        orpo_alpha=0.3,
        datasets=[
            {"path": "a.jsonl", "type": "chatml.intel"},
            {"path": "b.jsonl", "type": "llama3.ultra"},
            {"path": "c.jsonl", "type": "chat_template.argilla_chat"},
        ],
    ),
    "axolotl unknown pairs": case(
        AXOLOTL, {}, ["datasets"], rl="dpo", datasets=[{"path": "a", "type": "zephyr.nectar"}]
    ),
    "axolotl smoothing of sigmoid": case(AXOLOTL, {}, ["dpo_label_smoothing"], rl="dpo", dpo_label_smoothing=0.1),
    "axolotl noise": case(
        AXOLOTL,
        {"train.neftune_noise_alpha": 5, "train.compile": True},
        ["use_eaft"],
        neftune_noise_alpha=5,
        torch_compile="auto",
        use_eaft=True,
    ),
    "axolotl new tokens": case(
        AXOLOTL, {"lora.modules_to_save": ["lm_head"]}, ["tokens"], lora_modules_to_save=["lm_head"], tokens=["<a>"]
    ),
    "axolotl other end": case(AXOLOTL, {}, ["special_tokens"], special_tokens={"eos_token": "<e>"}),
    "axolotl misspelt": case(AXOLOTL, {}, ["lora_aplha"], lora_aplha=3),
    "axolotl float16": case(AXOLOTL, {}, ["fp16"], bf16=False, fp16=True),
    "llamafactory": case(
        LLAMA_FACTORY,
        {
            "lora.lora_alpha": 16,
            "lora.lora_dropout": 0.0,
            "lora.target_modules": "all-linear",
            "data.train_split": "train[:1000]",
            "data.max_length": 2048,
            "data.val_split": None,
            "train.gradient_checkpointing": True,
            "train.eval_strategy": "no",
            "train.weight_decay": 0.0,
        },
    ),
    "llamafactory names": case(
        LLAMA_FACTORY,
        {
            "lora.target_modules": ["q_proj", "v_proj"],
            "data.val_fraction": 0.1,
            "train.eval_steps": 500,
            "train.eval_on_start": True,
        },
        lora_target="q_proj, v_proj",
        val_size=0.1,
        eval_on_start=True,
        eval_strategy="steps",
        eval_steps=500,
    ),
    "llamafactory neat packing": case(
        LLAMA_FACTORY,
        {"data.packing": True, "lora.modules_to_save": ["embed_tokens", "lm_head"]},
        neat_packing=True,
        additional_target="embed_tokens,lm_head",
    ),
    "axolotl alpaca": case(
        AXOLOTL,
        {"data.format": "alpaca", "data.chat_template": "alpaca"},
        datasets=[{"path": "a.jsonl", "type": "alpaca"}],
        chat_template="chatml",
    ),
    "llamafactory alpaca": case(LLAMA_FACTORY, {}, ["template"], template="alpaca"),
    "llamafactory chatml": case(LLAMA_FACTORY, {"data.chat_template": "chatml"}, template="chatml"),
    "llamafactory other preferences": case(LLAMA_FACTORY, {}, ["stage"], stage="kto"),
    "llamafactory dpo": case(
        LLAMA_FACTORY,
        {"train.objective": "dpo", "dpo.beta": 0.3, "dpo.sft_weight": 0.5},
        stage="dpo",
        pref_beta=0.3,
        pref_ftx=0.5,
        mask_history=True,
    ),
    "llamafactory orpo": case(
        LLAMA_FACTORY, {"train.objective": "orpo", "orpo.beta": 0.1}, stage="dpo", pref_loss="orpo"
    ),
    "llamafactory hinge": case(LLAMA_FACTORY, {}, ["pref_loss"], stage="dpo", pref_loss="hinge"),
    "trl dpo": case(
        TRL,
        {"train.objective": "dpo", "dpo.beta": 0.2, "dpo.label_smoothing": 0.1},
        loss_type=["robust"],
        beta=0.2,
        label_smoothing=0.1,
    ),
    "trl beta alone": case(TRL, {}, ["beta"], beta=0.2),
    "trl several losses": case(TRL, {}, ["loss_type"], loss_type=["sigmoid", "sft"]),
    "llamafactory 4 bits": case(LLAMA_FACTORY, {"layout.base_dtype": "nf4"}, quantization_bit=4),
    "llamafactory 8 bits": case(LLAMA_FACTORY, {}, ["quantization_bit"], quantization_bit=8),
    "llamafactory fp4": case(LLAMA_FACTORY, {}, ["quantization_type"], quantization_bit=4, quantization_type="fp4"),
    "llamafactory hqq": case(
        LLAMA_FACTORY, {}, ["quantization_bit", "quantization_method"], quantization_bit=4, quantization_method="hqq"
    ),
    "llamafactory last turn": case(LLAMA_FACTORY, {"data.turns": "last"}, mask_history=True),
    "llamafactory several sets": case(
        LLAMA_FACTORY,
        {
            "data.mix": [{"split": "train[:1000]", "path": name} for name in ("a.jsonl", "b.jsonl")],
            "data.eval": {"c": {"split": "train[:1000]", "path": "c.jsonl"}},
            "train.eval_strategy": "steps",
        },
        dataset="a.jsonl,b.jsonl",
        eval_dataset="c.jsonl",
        eval_strategy="steps",
    ),
    "llamafactory evaluation sets of one name": case(
        LLAMA_FACTORY,
        {
            "data.eval": {
                name: {"split": "train[:1000]", "path": path}
                for name, path in {"test": "a/test.jsonl", "test-2": "b/test.jsonl", "test-2-2": "test-2.jsonl"}.items()
            },
        },
        eval_dataset="a/test.jsonl,b/test.jsonl,test-2.jsonl",
        eval_strategy="steps",
    ),
    "axolotl several sets": case(
        AXOLOTL,
        {
            "data.mix": [
                {"path": "a.jsonl", "split": "train", "format": "alpaca", "chat_template": "alpaca"},
                {"path": "b.jsonl", "split": "train", "messages_field": "messages"},
            ],
            "data.chat_template": "chatml",
        },
        datasets=[{"path": "a.jsonl", "type": "alpaca"}, {"path": "b.jsonl", "type": "chat_template"}],
        chat_template="chatml",
    ),
    "axolotl settings of a set": case(
        AXOLOTL,
        {"data.chat_template": "chatml", "data.columns": {"role": "speaker", "tools": "functions"}},
        datasets=[USUAL_SET],
        plugins=["axolotl.integrations.liger.LigerPlugin"],
    ),
    "axolotl settings of a set that change training": case(
        AXOLOTL,
        {},
        ["datasets[0].roles_to_train", "datasets[0].shards", "datasets[0].roles", "train_on_eos", "plugins"],
        datasets=[USUAL_SET | {"roles_to_train": ["user"], "shards": 4, "roles": {"assistant": ["expert"]}}],
        train_on_eos="none",
        plugins=["axolotl.integrations.kd.KDPlugin"],
    ),
    "axolotl twice the same file": case(
        AXOLOTL,
        {
            "data.mix": [
                {"path": "a", "split": "train[:5]", "format": "alpaca", "chat_template": "alpaca"},
                {"path": "a", "split": "train[9:]", "format": "alpaca", "chat_template": "alpaca", "name": "a-2"},
            ]
        },
        datasets=[{"path": "a", "type": "alpaca", "split": f"train[{part}]"} for part in (":5", "9:")],
    ),
    "llamafactory order of sets": case(
        LLAMA_FACTORY, {}, ["mix_strategy"], dataset="a.jsonl,b.jsonl", mix_strategy="interleave_under"
    ),
    "trl loss on answers": case(
        TRL,
        {"data.completion_only_loss": True, "data.chat_template": "t.jinja"},
        assistant_only_loss=True,
        completion_only_loss=False,
        chat_template_path="t.jinja",
    ),
    "trl another tokenizer's template": case(
        TRL,
        {"data.dataset_name_or_path": "a"},
        ["chat_template_path", "datasets[0].data_dir"],
        chat_template_path="org/chat",
        datasets=[{"path": "a", "data_dir": "b"}],
        dataset_name=None,
    ),
    "swift text": case(SWIFT.replace("swift sft", "swift pt"), {"data.completion_only_loss": False}),
    "swift last turn": case(
        SWIFT.replace("swift sft", "swift sft --loss_scale last_round"),
        {"data.completion_only_loss": True, "data.turns": "last"},
    ),
    "swift dpo": case(
        SWIFT.replace("swift sft", "swift rlhf --beta 0.4 --loss_type ipo"),
        {"train.objective": "dpo", "dpo.beta": 0.4, "dpo.loss": "ipo"},
    ),
    "swift dpo on last turns": case(
        SWIFT.replace("swift sft", "swift rlhf --loss_scale last_round"),
        {"train.objective": "dpo", "data.turns": "absent", "data.completion_only_loss": "absent"},
    ),
    "swift dpo on prompts too": case(SWIFT.replace("swift sft", "swift rlhf --loss_scale all"), {}, ["loss_scale"]),
    "swift orpo": case(
        SWIFT.replace("swift sft", "swift rlhf --rlhf_type orpo"), {"train.objective": "orpo", "orpo.beta": 0.1}
    ),
    "swift grpo": case(SWIFT.replace("swift sft", "swift rlhf --rlhf_type grpo"), {}, ["rlhf_type"]),
    "swift weights of words": case(SWIFT.replace("swift sft", "swift sft --loss_scale react"), {}, ["loss_scale"]),
    "trl": case(
        TRL,
        {
            "data.dataset_name_or_path": "org/chats",
            "data.val_split": "test",
            "lora.lora_dropout": 0.05,
            "lora.target_modules": "all-linear",
            "train.lr_scheduler_type": "linear",
            "train.per_device_train_batch_size": 8,
            "train.logging_steps": 10,
        },
    ),
    "trl all weights": case(TRL, {}, ["use_peft"], use_peft=False),
    "swift": case(
        SWIFT,
        {
            "model.attn_implementation": "flash_attention_2",
            "lora.target_modules": ["q_proj", "v_proj"],
            "lora.lora_alpha": 32,
            "data.train_split": "train[:500]",
            "train.gradient_accumulation_steps": 16,
            "train.weight_decay": 0.1,
            "train.adam_beta2": 0.95,
        },
    ),
    "swift without accumulation": case(
        SWIFT.replace("    --gradient_accumulation_steps 16 \\\n", ""), {"train.global_batch_size": 16}
    ),
    "swift system": case(SWIFT.replace("--deepspeed zero3", "--system 'Be kind.'"), {}, ["system"]),
    "trl on a command line": case(
        "accelerate launch --num_processes 2 trl/scripts/sft.py --model_name_or_path m --dataset_name d --use_peft\n",
        {"model.model_name_or_path": "m", "data.val_split": None},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_configuration_becomes_a_run_file(name: str, tmp_path: Path) -> None:
    text, expected, keys = CASES[name]
    file = tmp_path / ("run.sh" if "--" in text else "run.yml")
    file.write_text(text)
    made = import_file(file)
    assert {problem.where.rpartition(": ")[2] for problem in made.problems} == set(keys)
    assert all(problem.code for problem in made.problems)
    assert {key: made.settings.get(key, "absent") for key in expected} == expected
    written = tmp_path / "run.yaml"
    written.write_text(render_run_file(made))
    if keys:  # it can't be used as it is
        with refused("incomplete", "run.yaml:1") as problems:
            read_run_file(written)
        assert all(key in problems[0].problem for key in keys)
        written.write_text(written.read_text().partition("\n")[2])
    run = read_run_file(written).run.model_dump()
    for key, value in made.settings.items():  # what is written is what is read
        section, _, field = key.partition(".")
        if key not in ("lora.experts", "data.mix", "data.eval"):  # which defaults fill up
            assert run[section][field] == value


def test_pairs_of_swift_are_read(tmp_path: Path) -> None:
    """The rows that its documentation shows, with the run file that its command becomes."""
    asked = [{"role": "user", "content": "2 + 2?"}]
    four, five = ({"role": "assistant", "content": text} for text in ("4", "5"))
    rows = [{"messages": [*asked, four], "rejected_response": "5"} for _ in range(4)]
    chats = [{"messages": [*asked, four], "rejected_messages": [*asked, five]} for _ in range(4)]
    tokenizer = AutoTokenizer.from_pretrained(tiny.write_tokenizer(tmp_path / "tokenizer", vocab=600))
    tables = []
    for name, lines in (("rows", rows), ("chats", chats)):
        file = tmp_path / "run.sh"
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        file.write_text(f"swift rlhf --model ./qwen --rlhf_type dpo --dataset {tmp_path}/{name}.jsonl\n")
        made = import_file(file, overrides=["data.max_length=64", "data.packing=false", "data.chat_template=chatml"])
        (tmp_path / "run.yaml").write_text(render_run_file(made))
        run = read_run_file(tmp_path / "run.yaml", [f"train.output_dir={tmp_path}/out"]).run
        tables.append(prepare_data(run, tokenizer, say=print).train)
    assert tables[0].num_rows == 4
    assert tables[0].equals(tables[1])


def test_preferences_are_never_turned_into_answers(tmp_path: Path) -> None:
    """The hint said `write stage: sft`: the chosen rows, and with a mix the rejected ones, were then trained on."""
    file = tmp_path / "run.yml"
    for text, changes, key in (
        (LLAMA_FACTORY, {"stage": "kto"}, "stage"),
        (LLAMA_FACTORY, {"stage": "dpo", "pref_loss": "simpo"}, "pref_loss"),
        (LLAMA_FACTORY, {"pref_loss": "orpo"}, "pref_loss"),
        (AXOLOTL, {"rl": "kto"}, "rl"),
        (TRL, {"dpo_beta": 0.1}, "dpo_beta"),
    ):
        file.write_text(edited(text, **changes))
        (problem,) = [each for each in import_file(file).problems if each.where.endswith(f": {key}")]
        assert problem.hint.startswith("train this with "), (key, problem)
        assert "write stage" not in problem.hint
        assert "import again" not in problem.hint


def test_llamafactory_data_set_that_is_described_nowhere_is_refused(tmp_path: Path) -> None:
    """`dataset: identity` became the path `identity`, a name on the hub."""
    file = tmp_path / "l.yaml"
    file.write_text(edited(LLAMA_FACTORY, dataset="identity"))
    (problem,) = import_file(file).problems
    assert problem.problem == "'identity' is described in data/dataset_info.json, which isn't here"
    assert "dataset_dir" in problem.hint
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(json.dumps({"identities": {"file_name": "a.jsonl"}}))
    (problem,) = import_file(file).problems
    assert problem.problem == "data/dataset_info.json describes no 'identity'"
    assert problem.hint == "did you mean identities?"
    file.write_text(edited(LLAMA_FACTORY, dataset="identity", dataset_dir="ONLINE"))
    assert not import_file(file).problems


def test_the_machine_and_overrides_are_written_into_the_run_file(tmp_path: Path) -> None:
    file = tmp_path / "a.yml"
    file.write_text(AXOLOTL)
    assert "No machine is set" in render_run_file(import_file(file)).splitlines()[1]
    made = import_file(file, gpus="2x8xh100", overrides=["lora.r=64", "name=mine"])
    (tmp_path / "run.yaml").write_text(render_run_file(made))
    run = read_run_file(tmp_path / "run.yaml").run
    assert (run.cluster.nodes, run.cluster.gpus_per_node, run.cluster.gpu, run.lora.r) == (2, 8, "h100", 64)
    assert "No machine" not in render_run_file(made)
    with pytest.raises(UserError, match="--gpus"):
        import_file(file, gpus="8")


def test_a_file_is_written_in_full_or_not_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = tmp_path / "a.yml"
    good.write_text(AXOLOTL)
    bad = tmp_path / "b.yml"
    bad.write_text(edited(AXOLOTL, rl="kto"))
    out = tmp_path / "run.yaml"
    out.write_text("mine\n")

    def run(*arguments: str) -> tuple[Any, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main([*arguments, "--out", str(out)])
        printed = capsys.readouterr()
        assert printed.out == ""
        return ended.value.code, printed.err

    code, said = run("import", str(good))
    assert (code, out.read_text()) == (2, "mine\n")
    assert "exists already" in said
    code, said = run("import", str(bad), "--force")
    assert (code, out.read_text()) == (2, "mine\n")
    code, said = run("import", str(good), "--force")
    assert code == 0, said
    assert read_run_file(out).run.lora.r == 32
    assert run("init", "tiny-cpu", "--force")[0] == 0
    assert read_run_file(out).run.cluster.gpu == "cpu"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.yml", "b.yml", "run.yaml"]


def test_llamafactory_data_set_names_are_resolved(tmp_path: Path) -> None:
    info = {
        "own": {"file_name": "a.jsonl", "columns": {"prompt": "question", "response": "output"}, "num_samples": 50},
        "chats": {
            "hf_hub_url": "org/chats",
            "split": "sft",
            "formatting": "sharegpt",
            "columns": {"messages": "turns", "tools": "functions"},
            "tags": {"role_tag": "who", "content_tag": "content", "user_tag": "human", "assistant_tag": "expert"},
        },
        "pairs": {"file_name": "p.jsonl", "ranking": True, "columns": {"chosen": "good"}, "folder": "sub"},
    }
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(info))
    file = tmp_path / "l.yaml"
    file.write_text(edited(LLAMA_FACTORY, dataset="own,chats,pairs"))
    made = import_file(file)
    own, chats, _ = made.settings["data.mix"]
    assert own == {
        "path": "data/a.jsonl", "split": "train[:50]", "format": "alpaca", "columns": {"instruction": "question"}
    }  # fmt: skip
    assert chats == {
        "path": "org/chats", "split": "sft[:1000]", "messages_field": "turns",
        "columns": {"role": "who", "tools": "functions"},
    }  # fmt: skip
    assert {problem.where.rpartition(": ")[2] for problem in made.problems} == {
        "chats.tags", "pairs.ranking", "pairs.columns", "pairs.folder"
    }  # fmt: skip


def test_llamafactory_pairs_are_resolved(tmp_path: Path) -> None:
    texts = {"prompt": "q", "query": "input", "chosen": "good", "rejected": "rejected"}
    chats = {"messages": "turns", "chosen": "chosen", "rejected": "bad"}
    info = {
        "texts": {"file_name": "a.jsonl", "ranking": True, "columns": texts},
        "chats": {"file_name": "b.jsonl", "ranking": True, "formatting": "sharegpt", "columns": chats},
        "answers": {"file_name": "c.jsonl"},
    }
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(info))
    file = tmp_path / "l.yaml"
    file.write_text(edited(LLAMA_FACTORY, stage="dpo", dataset="texts,chats"))
    made = import_file(file)
    assert not made.problems
    assert made.settings["data.mix"] == [
        {
            "path": "data/a.jsonl",
            "split": "train[:1000]",
            "format": "alpaca",
            "columns": {"instruction": "q", "chosen": "good"},
        },
        {"path": "data/b.jsonl", "split": "train[:1000]", "messages_field": "turns", "columns": {"rejected": "bad"}},
    ]
    file.write_text(edited(LLAMA_FACTORY, stage="dpo", dataset="texts,answers"))
    assert [problem.where for problem in import_file(file).problems] == [f"{file}: dataset_info.json: answers"]
    file.write_text(edited(LLAMA_FACTORY, dataset="texts"))
    assert any(problem.where.endswith("texts.ranking") for problem in import_file(file).problems)


def test_trl_objective_is_read_from_its_command(tmp_path: Path) -> None:
    options = "--model_name_or_path m --dataset_name d.jsonl --use_peft --output_dir out --beta 0.2 --packing"
    file = tmp_path / "run.sh"
    for command, objective in (("trl dpo", "dpo"), ("trl orpo", "orpo"), ("python examples/dpo.py", "dpo")):
        file.write_text(f"{command} {options}")
        made = import_file(file)
        assert not made.problems
        assert (made.settings["train.objective"], made.settings[f"{objective}.beta"]) == (objective, 0.2)
        assert "data.packing" not in made.settings
        assert made.no_effect["packing"] == "pairs are not packed, and their loss is on both answers"


def test_every_key_of_the_tables_is_known_once() -> None:
    ours = set(list_keys())
    assert TRANSLATE.keys() == TOOLS.keys()
    for tool in TOOLS:
        table = IMPORTED[tool]
        named = [*table["keys"].values(), *table["defaults"], *table.get("values", {})]
        assert not set(named) - ours
        kinds = [set(table["keys"]), set(group_by_name(table["no_effect"]))]
        assert not kinds[0] & kinds[1]
    common = [set(group_by_name(IMPORTED["all_tools"][kind])) for kind in ("no_effect", "refused")]
    assert not common[0] & common[1]


def test_shell_scripts_are_parsed(tmp_path: Path) -> None:
    file = tmp_path / "s.sh"
    file.write_text(SWIFT.replace("accumulation_steps 16", "accumulation_steps $(expr 16 / 2)"))
    with refused("shell-expression", "s.sh:14: gradient_accumulation_steps"):
        import_file(file)
    file.write_text("llamafactory-cli train examples/sft.yaml\n")
    with refused("settings-elsewhere", "s.sh") as problems:
        import_file(file)
    assert "`windlass import examples/sft.yaml --from llamafactory" in problems[0].hint
    file.write_text("python train.py --lr 3\n")
    with refused("no-tool", "s.sh"):
        import_file(file)


def test_a_file_of_no_tool_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("learning_rate: 1e-4\n")
    with refused("no-tool", "a.yaml"):
        import_file(file)
    assert import_file(file, "trl").settings["train.learning_rate"] == 1e-4
    with refused("no-such-tool", "--from"):
        import_file(file, "unsloth")
    file.write_text("- 1\n")
    with refused("no-settings", "a.yaml"):
        import_file(file)


def test_the_command_prints_a_run_file_and_what_has_no_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.yml"
    file.write_text(edited(MISTRAL_4, load_in_8bit=True))
    command = [sys.executable, "-m", "windlass", "import", "a.yml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "  r: 16  # lora_r\n" in done.stdout
    assert "  name: auto  # the fastest that fits" in done.stdout
    assert "load_in_8bit: windlass stores the base in 16 bits, in FP8 as published" in done.stderr
    assert "  base_dtype: nf4  # load_in_4bit\n" in done.stdout
    assert "quantize_moe_experts" in done.stderr
    file.write_text(edited(MISTRAL_4, load_in_4bit=False))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"^0$"):
        cli.main(command[3:])


ODD: tuple[Any, ...] = (None, True, -1, 2.5, "", "odd", [], ["odd"], [{"path": 3}], {}, {"odd": [1]})


@pytest.mark.long
@pytest.mark.parametrize("text", [AXOLOTL, MISTRAL_4, LLAMA_FACTORY, TRL], ids=["axolotl", "mistral 4", "lf", "trl"])
def test_a_value_of_another_kind_is_refused_or_taken_and_never_a_traceback(text: str, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    tool = import_file(file).tool
    extra = ("special_tokens", "test_datasets", "chat_template_kwargs", "cosine_min_lr_ratio", "evals_per_epoch")
    for key in (*load_document(file).value, *extra):
        for value in ODD:
            file.write_text("\n".join(line for line in text.splitlines() if line.partition(":")[0] != key))
            with file.open("a") as more:
                more.write(f"\n{key}: {json.dumps(value)}\n")
            with contextlib.suppress(UserError):
                render_run_file(import_file(file, tool))


def test_wrong_types_and_unclosed_quotes_are_reported(tmp_path: Path) -> None:
    file = tmp_path / "a.yml"
    file.write_text(edited(AXOLOTL, special_tokens=True))
    (problem,) = import_file(file).problems
    assert str(problem).startswith(f"{file}:")
    assert "special_tokens: is True, which Axolotl does not take" in str(problem)
    (tmp_path / "s.sh").write_text(SWIFT.replace("'rows.jsonl#500'", "'rows.jsonl#500"))
    with refused("not-shell", "s.sh:5"):
        import_file(tmp_path / "s.sh")


def test_keys_with_one_counterpart_agree_or_are_named_with_both(tmp_path: Path) -> None:
    path = tmp_path / "a.yml"
    lines = ["base_model: m", "adapter: lora", "micro_batch_size: 2", "datasets: [{path: x, type: alpaca}]"]
    lines += ["warmup_steps: 9", "warmup_ratio: 0.1", "lora_target_linear: true", "lora_target_modules: [q_proj]"]
    path.write_text("\n".join([*lines, "bf16: true", "bfloat16: true"]))
    made = import_file(path, "axolotl")
    assert not made.problems
    assert {"warmup_ratio", "lora_target_modules"} <= made.no_effect.keys()
    path.write_text(
        "\n".join([*lines, "bf16: true", "bfloat16: false", "sdp_attention: true", "flash_attention: true"])
    )
    assert "Next step: windlass plan" in render_run_file(made)
    made = import_file(path, "axolotl")
    assert render_run_file(made).startswith("# INCOMPLETE")
    (first, second) = made.problems
    assert first.where == f"{path}:10: bfloat16"
    assert first.problem == "makes train.bf16 false, and bf16 makes it true"
    assert "model.attn_implementation" in second.problem


def import_text(text: str, folder: Path, name: str = "a.yml") -> ImportedRun:
    (folder / name).write_text(text)
    return import_file(folder / name)


def test_lists_stand_where_names_between_commas_are_usual(tmp_path: Path) -> None:
    text = edited(LLAMA_FACTORY, additional_target=["embed_tokens", "lm_head"], dataset=["a.jsonl", "b.jsonl"])
    made = import_text(text, tmp_path)
    assert made.settings["lora.modules_to_save"] == ["embed_tokens", "lm_head"]
    assert [part["path"] for part in made.settings["data.mix"]] == ["a.jsonl", "b.jsonl"]


def test_what_would_be_lost_of_an_import_is_named(tmp_path: Path) -> None:
    prompt = {"format": "{instruction}", "field_instruction": "q", "field_output": "a", "no_input_format": "{q}?"}
    data = [{"path": "t", "type": {**prompt, "system_prompt": "Be brief.", "field_system": ""}}]
    made = import_text(edited(AXOLOTL, datasets=data, resume_from_checkpoint="out/checkpoint-500"), tmp_path)
    places = {problem.where.rpartition(": ")[2] for problem in made.problems}
    assert places == {"datasets[0].type.no_input_format", "datasets[0].type.system_prompt", "resume_from_checkpoint"}
    assert "train.resume" not in made.settings
    pictures = {"file_name": "p.jsonl", "formatting": "sharegpt", "columns": {"messages": "m", "images": "images"}}
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(json.dumps({"pictures": pictures}))
    (problem,) = import_text(edited(LLAMA_FACTORY, dataset="pictures"), tmp_path).problems
    assert "these rows have images, and windlass trains on text alone" in problem.problem


def test_axolotls_batch_size_is_that_of_each_process(tmp_path: Path) -> None:
    made = import_text(edited(AXOLOTL, batch_size=8, gradient_accumulation_steps=None), tmp_path)
    assert made.settings["train.gradient_accumulation_steps"] == 4
    assert "train.global_batch_size" not in made.settings
    (problem,) = import_text(edited(AXOLOTL, batch_size=9, gradient_accumulation_steps=None), tmp_path).problems
    assert "9 rows of a process are no multiple of micro_batch_size: 2" in problem.problem
