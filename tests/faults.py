"""Planted faults as data: how each is planted into a small run, the command that must report it, and the message.

tests/test_faults.py runs them with real commands. Others have their own tests, marked `@pytest.mark.fault(what, by,
says)`. `page()` is docs/faults.md: the table of both.
"""

import ast
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

Plant = Callable[[], object]  # in the folder of the run
RUN, DATA, INDEX = "run.yaml", "data/train.jsonl", "model/model.safetensors.index.json"
SHARD, ADAPTER = "model/model-00001-of-00002.safetensors", "run/final/adapter_model.safetensors"
CONFIG, TRAIN, RESUME = "model/config.json", "train run.yaml", "train run.yaml --resume"
MERGE, MERGE_FINAL = "export run --merge --to out", "export run/final --merge --to out"
NORM, EMBEDDING, MORE = (f"language_model.model.{name}" for name in ("norm.weight", "embed_tokens.weight", "more"))
PAIRS = "data run.yaml --override data.text_field=null --override train.objective=dpo"
NEW = "train run.yaml --override train.output_dir=new"
GENERATE = "generate run --prompt import --tokens 1"


@dataclass(frozen=True)
class Fault:
    what: str
    plant: Plant
    command: str  # after `windlass`
    says: str  # parts of what it prints, with … between them
    code: int = 2
    environ: dict[str, str] = field(default_factory=dict)


# --- plants ---


def nothing() -> None:
    """Plant nothing: the fault is in the command."""


def link_model() -> None:
    Path("model").rename("blobs")
    Path("model").mkdir()
    for path in Path("blobs").iterdir():
        (Path("model") / path.name).symlink_to(path.absolute())


def swap(file: str, old: str, new: str) -> Plant:
    def plant() -> None:
        text = Path(file).read_text()
        assert old in text, f"{file} has no {old!r}"
        Path(file).write_text(text.replace(old, new, 1))

    return plant


def table(file: str, change: Callable[[dict[str, Any]], object]) -> Plant:
    def plant() -> None:
        content = json.loads(Path(file).read_text())
        change(content)
        Path(file).write_text(json.dumps(content))

    return plant


def text_config(**changes: Any) -> Plant:
    return table(CONFIG, lambda config: config["text_config"].update(changes))


def write(file: str, content: str) -> Plant:
    return lambda: Path(file).write_text(content)


def pairs(**second: str | None) -> Plant:
    """Replace the rows by pairs, and columns of the second pair."""
    row = {"prompt": "2 + 2?", "chosen": " It is 4.", "rejected": " It is 5."}
    return lambda: Path(DATA).write_text("".join(json.dumps(each) + "\n" for each in (row, {**row, **second}, row)))


def pairs_of_equals() -> None:
    row = json.dumps({"prompt": "2 + 2?", "chosen": " It is 4.", "rejected": " It is 4."})
    Path(DATA).write_text(f"{row}\n" * 3)


def head(file: str, line: str) -> Plant:
    """Put a line before the others."""
    return lambda: Path(file).write_text(f"{line}\n{Path(file).read_text()}")


def remove(pattern: str) -> Plant:
    return lambda: [*map(Path.unlink, Path().glob(pattern))]


def dangle(file: str) -> Plant:
    """Replace a file by a link to nothing, as a hub's cache has it after a copy of its snapshot alone."""

    def plant() -> None:
        Path(file).unlink()
        Path(file).symlink_to("gone")

    return plant


def cut(file: str) -> Plant:
    return lambda: Path(file).write_bytes(Path(file).read_bytes()[:-100])


def flip(file: str, place: int = -1) -> Plant:
    """Flip one bit."""

    def plant() -> None:
        content = bytearray(Path(file).read_bytes())
        content[place] ^= 1
        Path(file).write_bytes(content)

    return plant


def tensors(file: str, change: Callable[[dict[str, Any]], object]) -> Plant:
    def plant() -> None:
        from safetensors.torch import load_file, save_file

        stored = load_file(file)
        change(stored)
        save_file({key: value.contiguous() for key, value in stored.items()}, file, {"format": "pt"})

    return plant


def weight(end: str, value: float, *place: int) -> Plant:
    """Change one value of the stored tensor whose name ends so, in whichever shard it is."""

    def plant() -> None:
        key, file = next(
            (k, f) for k, f in json.loads(Path(INDEX).read_text())["weight_map"].items() if k.endswith(end)
        )

        def change(stored: dict[str, Any]) -> None:
            values = stored[key].float()
            values[place] = value
            stored[key] = values.to(stored[key].dtype)

        tensors(f"model/{file}", change)()

    return plant


def unfinished(*more: Plant) -> Plant:
    """Leave the run as a stop after its first step does."""

    def plant() -> None:
        import shutil

        shutil.rmtree("run/final")
        shutil.rmtree("run/checkpoints/step-2")
        table("run/manifest.json", lambda manifest: manifest.update(state="stopped"))()
        for one in more:
            one()

    return plant


def foreign(plant: Plant) -> Plant:
    """Make it another tool's adapter, without a record of its base."""

    def both() -> None:
        Path("run/final/base_model.json").unlink()
        plant()

    return both


def key(text: str) -> Plant:
    """Insert a line into the section before `cluster`."""
    return swap(RUN, "cluster:", f"{text}\ncluster:")


# command -> what is planted: how, and what the command says
PLANTED: dict[str, dict[str, tuple[Plant, str]]] = {
    "plan run.yaml": {
        "an imported run file with keys that were refused": (
            head(RUN, "# INCOMPLETE: from a.yml of Axolotl, without a counterpart of: rl"),
            "run.yaml:1: is incomplete: from a.yml of Axolotl, without a counterpart of: rl",
        ),
        "a misspelt key": (
            swap(RUN, "lora_alpha", "lora_alhpa"),
            "run.yaml:2: lora.lora_alhpa: `lora` has no such key … did you mean lora_alpha?",
        ),
        "another tool's name for a key": (
            swap(RUN, "{r: 4,", "{rank: 4,"),
            "run.yaml:2: lora.rank: `lora` has no such key … write lora.r",
        ),
        "a key twice": (swap(RUN, "{r: 4,", "{r: 4, r: 8,"), "run.yaml:2: lora.r: is set twice, first at run.yaml:2"),
        "a section twice": (key("lora: {r: 8}"), "lora: is set twice, first at run.yaml:2"),
        "a bracket that is not closed": (
            swap(RUN, "{r: 4", "{r: [4"),
            "run.yaml:2: is not valid YAML: expected ',' or ']'",
        ),
        "a merge key that hides another": (
            swap(RUN, "{r: 4,", "{<<: {r: 8}, r: 4,"),
            "run.yaml:2: lora.<<: `lora` has no such key",
        ),
        "config.json says a key twice": (
            swap(CONFIG, "{", '{"model_type": "mistral3",'),
            "model/config.json: it is not JSON: the key 'model_type' is there twice",
        ),
        "one layer too many in config.json": (
            text_config(num_hidden_layers=3),
            "missing weights (15): model.layers.2.self_attn.q_a_proj.weight",
        ),
        "an unknown architecture": (
            text_config(model_type="mistral5"),
            "text_config: unknown model type 'mistral5' … a newer one may know it",
        ),
        "the index says a key twice": (
            swap(INDEX, "{", '{"weight_map": {},'),
            "model.safetensors.index.json: it is not JSON: the key 'weight_map' is there twice",
        ),
        "the index names another shard": (
            table(INDEX, lambda i: i["weight_map"].update({NORM: Path(SHARD).name})),
            "disagree about which file holds a tensor (2): language_model.model.norm.weight",
        ),
        "a shard that is away": (
            remove(SHARD),
            "it names 2 files, 1 of them are missing: model-00001-of-00002.safetensors",
        ),
        "a shard that is a link to nothing": (
            dangle(SHARD),
            "model-00001-of-00002.safetensors: it is a link to gone, and nothing is there",
        ),
        "a shard cut short": (cut(SHARD), "model-00001-of-00002.safetensors: it is truncated"),
        "a pointer instead of a shard": (
            write(SHARD, "version https://git-lfs.github.com/spec/v1\n"),
            "it is a Git LFS pointer, not the weights … git lfs pull",
        ),
        "a tensor in two shards": (
            tensors(SHARD, lambda t: t.update({NORM: t[EMBEDDING][0].clone()})),
            "disagree about which file holds a tensor (1): language_model.model.norm.weight",
        ),
        "a tensor that nothing uses": (
            tensors(SHARD, lambda t: t.update({MORE: t[EMBEDDING][0].clone()})),
            "disagree about which file holds a tensor (1): language_model.model.more",
        ),
        "a weight of another shape": (
            tensors(SHARD, lambda t: t.update({EMBEDDING: t[EMBEDDING][1:]})),
            "embed_tokens.weight is [511, 64], not [512, 64]",
        ),
    },
    "plan run.yaml --accelerate fsdp.yaml": {
        "a misspelt key of Accelerate": (
            write("fsdp.yaml", "distributed_type: FSDP\nfsdp_config: {fsdp_versoin: 2}\n"),
            "fsdp.yaml:2: fsdp_config.fsdp_versoin: no such key … did you mean fsdp_version?",
        ),
        "other ranks in Accelerate's file": (
            write("fsdp.yaml", "distributed_type: FSDP\nnum_processes: 3\nfsdp_config: {fsdp_version: 2}\n"),
            "fsdp.yaml:2: num_processes: asks for cluster.gpus_per_node 3, but it is 1 at",
        ),
    },
    NEW: {
        "a tokenizer that is away, to training": (
            remove("model/tokenizer.json"),
            "has no tokenizer that can be opened",
        ),
        "weights that are away": (remove("model/*.safetensors*"), "model contains no weights"),
        "a row that is no JSON": (swap(DATA, '{"text"', '{"text'), "data/train.jsonl:1: not JSON"),
        "a key twice in a row": (
            swap(DATA, '{"text"', '{"text": "", "text"'),
            "data/train.jsonl:1: the key 'text' is there twice",
        ),
        "a row without the column": (
            swap(DATA, '"text"', '"test"'),
            "data/train.jsonl: row 1: a row has no 'text'; it has 'test'",
        ),
        "a number for a text": (
            swap(DATA, '"text": "', '"text": 3, "was": "'),
            "data/train.jsonl: row 1: column 'text' has a number, not text: 3",
        ),
        "rows of blanks alone": (
            write(DATA, '{"text": " "}\n' * 40),
            "no row of train has a supervised token: of 40 rows 40 empty",
        ),
        "NaN in a row of the embedding that no text uses": (
            weight("embed_tokens.weight", float("nan"), 500, 3),
            "embed_tokens.weight' contains values that are not finite numbers",
        ),
        "an infinite weight": (
            weight(NORM, float("inf"), 5),
            "norm.weight' contains values that are not finite numbers",
        ),
        "an FP8 scale below zero": (
            weight("experts.down_proj_scale_inv", -1e-3, 3, 0, 0),
            "down_proj_scale_inv' contains scales below zero",
        ),
        "an FP8 scale of zero": (
            weight("experts.down_proj_scale_inv", 0.0, 3, 0, 0),
            "down_proj' contains codes that are not zero, and their scale is",
        ),
    },
    RESUME: {
        "one bit of the base differs at the resume": (
            unfinished(flip(SHARD, -5000)),
            "the weights of model … are not those that checkpoints/step-1 was trained on",
        ),
        "another rotary base at the resume": (
            unfinished(text_config(rope_theta=5.0)),
            "config.json of model is not the one that checkpoints/step-1 was trained with: rope_theta",
        ),
        "another rank of the adapter at the resume": (
            unfinished(swap(RUN, "{r: 4,", "{r: 8,")),
            "run.yaml:2: lora.r: was 4 when this run began, is 8 now",
        ),
        "other rows at the resume": (
            unfinished(swap(DATA, "mast", "spar")),
            "the data are not those this run began with",
        ),
        "the newest checkpoint is damaged": (
            unfinished(flip("run/checkpoints/step-1/optimizer.pt")),
            "step-1: optimizer.pt is not what was written",
        ),
        "the adapter of the checkpoint is another": (
            unfinished(flip("run/checkpoints/step-1/adapter_model.safetensors")),
            "step-1: adapter_model.safetensors is not what was written",
        ),
        "a checkpoint that says another step": (
            unfinished(swap("run/checkpoints/step-1/manifest.json", '"step": 1', '"step": 2')),
            "step-1: manifest.json is not what was written",
        ),
    },
    MERGE_FINAL: {
        "a tensor of the adapter is away": (
            foreign(tensors(ADAPTER, lambda t: t.pop(min(t)))),
            "has lora_B, not a pair of matrices lora_A and lora_B",
        ),
        "one bit of the adapter differs": (
            flip(ADAPTER),
            "adapter_model.safetensors: not what was written … base_model.json",
        ),
        "another alpha next to the adapter": (
            table("run/final/adapter_config.json", lambda c: c.update(lora_alpha=800)),
            "adapter_config.json: not what was written",
        ),
        "another rank next to the adapter": (
            foreign(table("run/final/adapter_config.json", lambda c: c.update(r=2))),
            "o_proj has rank 4, and adapter_config.json has 2",
        ),
        "an adapter that moved its base": (
            foreign(table("run/final/adapter_config.json", lambda c: c.update(init_lora_weights="pissa"))),
            "init_lora_weights: pissa changed the base when training began",
        ),
    },
    "submit run.yaml --to kubernets --dry-run": {
        "a platform that is not known": (nothing, "unknown platform 'kubernets'"),
    },
    "submit run.yaml --to skypilot --dry-run": {
        "a run folder that goes away with its rented machines": (
            nothing,
            "train.output_dir: run is on no mount: what the run writes would vanish with its machines",
        ),
        "rented machines without windlass": (nothing, "cluster.install: its nodes have no windlass"),
        "a model of links, which are not uploaded": (
            link_model,
            "model.model_name_or_path: model has links, which are not uploaded",
        ),
    },
    TRAIN: {
        "a finished run trained again": (nothing, "run.yaml:5: train.output_dir: run contains a finished run"),
        "an unfinished run begun anew": (unfinished(), "run contains an unfinished run … add --resume to continue it"),
    },
    f"{NEW} --override data.val_fraction=0.1": {
        "a file with prompts that is not there": (
            swap(RUN, 'eval_strategy: "no"', "sample: {file: p.txt}"),
            "train.sample.file: p.txt can't be read: No such file or directory",
        ),
    },
    f"{NEW} --override lora.adapter=run/final": {
        "trained on from a part of an adapter": (
            tensors(ADAPTER, lambda t: t.pop(min(t))),
            "run/final: adapter_model.safetensors has no tensors for model.layers.0.self_attn",
        ),
    },
    "plan run.yaml --override lora.adapter=run/final": {
        "an adapter of another kind to continue": (
            foreign(table("run/final/adapter_config.json", lambda c: c.update(peft_type="LOHA"))),
            "run/final/adapter_config.json: the adapter is of the kind LOHA",
        ),
        "an adapter to continue that moved its base": (
            foreign(table("run/final/adapter_config.json", lambda c: c.update(init_lora_weights="pissa"))),
            "init_lora_weights: pissa changed the base when training began",
        ),
    },
    f"{MERGE} --base other": {
        "merged into another base": (nothing, "the weights of other … are not those that run/final was trained on"),
    },
    f"{GENERATE} --base other": {
        "generated with another base": (nothing, "the weights of other … are not those that run/final was trained on"),
    },
    "export run --for LlamaForCausalLM --to out": {
        "a class that the base is not": (nothing, "--for: model is no LlamaForCausalLM"),
    },
    "export run --merge --to model": {
        "an export over the model": (nothing, "--to model: it is the base model's folder"),
    },
    "import kto.yaml --out new.yaml": {
        "preference data imported as answers": (
            write(
                "kto.yaml", "model_name_or_path: model\nstage: kto\nfinetuning_type: lora\ndataset: data/train.jsonl\n"
            ),
            "kto.yaml:2: stage: is kto … train this with LLaMA-Factory",
        ),
    },
    PAIRS.replace("dpo", "sft"): {
        "pairs trained on as answers": (
            pairs(),
            "the rows are pairs of a chosen and a rejected answer, and train.objective is sft",
        ),
    },
    PAIRS: {
        "dpo of rows without pairs": (nothing, "compares pairs of answers, and the rows have 'text', but no"),
        "a rejected answer that is empty": (pairs(rejected=None), "row 2: the rejected answer is empty"),
        "pairs whose chosen answers all equal the rejected ones": (
            pairs_of_equals,
            "3 rows left out (chosen equals rejected)",
        ),
        "answers to different prompts": (
            write(DATA, '{"chosen": "\\n\\nHuman: 2?\\n\\nAssistant: 2", "rejected": "Human: 3?\\n\\nAssistant: 3"}\n'),
            "row 1: chosen and rejected have no beginning in common, which would be their prompt",
        ),
        "an answer cut at max_length": (
            pairs(rejected=" It is 5, or 6." * 20),
            "row 2: 1 of 3 pairs with a sequence longer than data.max_length 48",
        ),
    },
    f"{PAIRS} --override data.packing=true": {
        "packed pairs": (pairs(), "data.packing=true: pairs aren't packed"),
    },
    "data run.yaml --override data.val_fraction=0.1 --override data.val_split=null": {
        "rows that are all equal, of which some are held out": (
            write(DATA, '{"text": "the same"}\n' * 9),
            "all 9 rows are equal",
        ),
    },
    MERGE: {
        "merged with another epsilon": (
            text_config(rms_norm_eps=0.1),
            "config.json of model is not the one that run/final was trained with: rms_norm_eps 1e-06 then, 0.1 now",
        ),
    },
    GENERATE: {
        "generated with another rotary base": (
            text_config(rope_theta=5.0),
            "config.json of model is not the one that run/final was trained with: rope_theta",
        ),
    },
    "export run/final --to out": {
        "NaN in the adapter": (
            foreign(tensors(ADAPTER, lambda t: t[min(t)].fill_(float("nan")))),
            "lora_A.weight contains values that are not finite numbers",
        ),
    },
    "export run/checkpoints/step-2 --to out": {
        "one bit of a checkpoint's adapter differs": (
            flip("run/checkpoints/step-2/adapter_model.safetensors"),
            "adapter_model.safetensors is not what was written",
        ),
    },
    "generate run/final --prompt import --tokens 1 --chat": {
        "a chat template where there is none": (
            remove("run/final/chat_template.jinja"),
            "the tokenizer has no chat template",
        ),
    },
}
# command -> what an override gets wrong: the override, and what the command says
OVERRIDDEN: dict[str, dict[str, list[str]]] = yaml.safe_load("""
plan run.yaml:
  a sweep over a key that changes the base: ["sweep.layout.name=[resident,full-shard]",
    "trials can't differ in layout.name: every layout computes the same"]
  a sweep with one value: ["sweep.lora.r=[8]", "sweep.lora.r=[8]: has one value: nothing is compared"]
  two trials that are the same run: ["sweep.lora.r=[8,8]", "sweep.lora.r=[8,8]: is the same as number 1"]
  a sweep that would train the base itself: ["sweep.lora.r=[8,16] --override lora.modules_to_save=[lm_head]",
    "it trains weights of the base, which all trials share"]
  a key of a sweep that an option sets too: ["sweep.lora.r=[8,16] --override lora.r=4",
    lora.r has a value for all trials]
  a word for a number: [train.learning_rate=fast, "train.learning_rate=fast: must be a number, not 'fast'"]
  a number that is none: [train.learning_rate=.nan, "train.learning_rate=.nan: must be a number, not '.nan'"]
  an override of no key: [lora.rnk=8, "--override lora.rnk=8: the run file has no lora.rnk"]
  a layout that these GPUs can't make: [layout.shard=3,
    "layout.shard=3: shard 3 x replicate 1 = 3, not the number of ranks, 1"]
  two lengths of warm-up: [train.warmup_steps=5,
    "warm-up is set both as steps and as a share (run.yaml:9: train.warmup_ratio)"]
  best model at the end, and no evaluation: [train.load_best_model_at_end=true,
    "the best checkpoint is wanted, but evaluation is off"]
  sets that should not get worse, and no evaluation: ["'data.keep={old: {path: data/train.jsonl}}'",
    "kept sets are measured at evaluations, and train.eval_strategy is no"]
  a target that nothing has: ["lora.target_modules=[q_proj,wq]",
    "'wq' matches no module of Mistral4ForCausalLM … known: q_a_proj"]
  the head as a target: ["lora.target_modules=[o_proj,lm_head]",
    "lm_head can't be adapted: the loss is computed from its weight"]
  DoRA with experts: [lora.use_dora=true --override lora.experts=true, "DoRA doesn't work on routed experts"]
  another alpha than that of the adapter to continue: [lora.adapter=run/final --override lora.lora_alpha=16,
    "lora.lora_alpha=16: is 16, and run/final was trained with 8"]
  another scale than that of the adapter to continue: [lora.adapter=run/final --override lora.use_rslora=true,
    "lora.use_rslora=true: is True, and run/final was trained with False"]
  other targets than those of the adapter to continue:
    ["lora.adapter=run/final --override lora.target_modules=[o_proj]",
     "run/final is another adapter: it adapts model.layers.0.self_attn.q_a_proj, and this run would not"]
  no model at the path: [model.model_name_or_path=models,
    "no folder 'models', and no published model of that name is known"]
train run.yaml --override train.output_dir=new:
  a trial whose value is invalid: ["sweep.lora.r=[8,0]", "trial r0: must be"]
  a GPU is planned, and none is here: [cluster.gpu=h200, "the run is planned for h200, and torch … finds no usable GPU"]
  data that are away: [data.dataset_name_or_path=dta, dta is not on this machine]
  a column that is not there: [data.text_field=txt, "the data have no column 'txt'; they have 'text'"]
  trained on with another base: [lora.adapter=run/final --override model.model_name_or_path=other,
    the weights of other … are not those that run/final was trained on]
  trained on from no adapter: [lora.adapter=data, "--override lora.adapter=data: no adapter_config.json in data"]
data run.yaml:
  a data file that is not there, named like a set on the hub: [data.dataset_name_or_path=rows/train.jsonl,
    rows/train.jsonl does not exist]
""")
OTHERS = (
    Fault(
        "a regular expression that reaches the least",
        nothing,
        r"plan run.yaml --override lora.target_modules=.*attn\.(q|k|v|o)_proj",
        "lora.target_modules reaches o_proj of self_attn, not q_a_proj, q_b_proj, kv_a_proj_with_mqa, kv_b_proj",
        0,
    ),
    Fault(
        "a platform whose command is not here",
        nothing,
        "submit run.yaml --to skypilot --override train.output_dir=new",
        "PATH: sky is not installed here: nothing was submitted",
        environ={"PATH": "/nowhere"},
    ),
    Fault(
        "a tokenizer that is away",
        remove("model/tokenizer.json"),
        "check run.yaml",
        "has no tokenizer that can be opened",
        1,
    ),
    Fault(
        "a tokenizer of another model",
        swap("model/tokenizer.json", '"<unk>"', '"<unknown>"'),
        "check run.yaml",
        "513 tokens, and the embedding has 512 rows",
        1,
    ),
    Fault(
        "a misspelt variable of NCCL",
        nothing,
        NEW,
        "warning: NCCL_SOCKET_IFNAM in the environment",
        0,
        {"NCCL_SOCKET_IFNAM": "eth0"},
    ),
    Fault(
        "validation rows that are trained on",
        lambda: Path("data/validation.jsonl").write_text(Path(DATA).read_text()),
        f"{NEW} --override data.val_split=validation",
        "warning: data: 60 validation rows are in the training set as well (100.0%)",
        0,
    ),
)
FAULTS = (
    *(Fault(what, plant, command, says) for command, rows in PLANTED.items() for what, (plant, says) in rows.items()),
    *(
        Fault(what, nothing, f"{command} --override {override}", says)
        for command, rows in OVERRIDDEN.items()
        for what, (override, says) in rows.items()
    ),
    *OTHERS,
)


def page() -> str:
    shown = (
        (fault, fault.command if fault.plant is nothing else fault.command.partition(" --o")[0]) for fault in FAULTS
    )
    rows = [(fault.what, f"`windlass {command}`".replace("|", r"\|"), fault.says) for fault, command in shown]
    rows += marked()
    count = len(rows)
    table = "".join(f"| {what} | {by} | {says.replace('|', chr(92) + '|')} |\n" for what, by, says in rows)
    return f"""\
# Faults that are planted, and what names them

Generated by `make docs` from `tests/faults.py` and from the tests that plant a fault of their own. `make prove`
plants all {count}, each into a run of its own, requires the message, and prints the table. `…` stands for what differs.

| planted | found by | message |
|---|---|---|
{table}"""


def marked() -> Iterator[tuple[str, str, str]]:
    """Return (what, by, says) of every test that plants its own fault, read from the files."""
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "mark.fault(" in text else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.fault":
                what, by, says = (ast.literal_eval(one) if isinstance(one, ast.Constant) else "" for one in node.args)
                assert all(text.count(part) > 1 for part in says.split("…")), f"{path}: nothing requires {says!r}"
                if what:
                    yield what, by, says
