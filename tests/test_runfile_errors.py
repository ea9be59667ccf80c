"""Broken, hostile, misspelt and contradictory run files: each error has a place, a sentence and a hint, all at once."""

import os
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import refused

from windlass.errors import Problem, UserError
from windlass.explain import explain_topic
from windlass.runfile import list_keys, read_presets, read_run_file

Problems = Callable[..., list[Problem]]


@pytest.fixture
def problems(tmp_path: Path) -> Problems:
    def to(text: str | bytes = "train: {seed: 1}", *overrides: str) -> list[Problem]:
        path = tmp_path / "run.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
        with pytest.raises(UserError) as caught:
            read_run_file(path, overrides)
        found = caught.value.problems
        assert all(problem.code and problem.problem and problem.where for problem in found)
        shorten = partial(re.sub, re.escape(f"{path}"), "F")
        return [replace(problem, problem=shorten(problem.problem), where=shorten(problem.where)) for problem in found]

    return to


BOMB = b"a: &a [x,x,x,x,x,x,x,x,x,x]\n" + b"".join(
    b"%c: &%c [%s]\n" % (one, one, b",".join([b"*%c" % (one - 1)] * 10)) for one in range(98, 110)
)
# text of the file: code
FILES: dict[bytes, str] = {
    b"": "no-sections",
    b"# nothing\n": "no-sections",
    b"hello": "no-sections",
    b"\x7fELF\x00\x01\xff\xfe": "not-utf8",
    "train: {seed: 1}".encode("utf-16"): "not-utf8",
    "name: é".encode("latin-1"): "not-utf8",
    b"PK\x03\x04" + b"\x00" * 30: "not-yaml",
    b"train:\n\tseed: 1\n": "tab",
    b"lora: {r: 1\n": "not-yaml",
    b"name: a: b\n": "not-yaml",
    b"name: a\n---\nname: b\n": "second-document",
    b"a: b\n" * 30_000: "too-large",
    b"a: " + b"[" * 3_000: "too-deep",
    BOMB: "too-many-values",
    b"name: [" + b"a," * 30_000 + b"]": "too-many-values",
    b"a: &a [*a]\n": "too-deep",
    b"a: *b\n": "not-yaml",
    b"name: !!python/object/apply:os.system [ls]\n": "yaml-tag",
    b'name: "\\UFFFFFFFF"\n': "not-yaml",
    b'name: "\\ud800"\n': "unprintable",
    b'train: {output_dir: "a\\0b"}\n': "unprintable",
    b"name: a\x07b\n": "not-yaml",
    b"? [a, b]\n: 1\n": "key-not-text",
    b"%YAML " + b"9" * 5000 + b".1\n---\nname: a\n": "not-yaml",
}


@pytest.mark.takes("reads many damaged files")
def test_bad_files_and_paths(problems: Problems, tmp_path: Path) -> None:
    for content, code in FILES.items():
        problem = problems(content)[0]
        assert problem.code == code, problem
        assert problem.where.startswith("F")
        assert problem.hint
    (tmp_path / "run.yaml").unlink()
    (tmp_path / "train.yaml").write_text("name: a")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "locked.yaml").touch(0)
    (tmp_path / "chats.jsonl").write_text('{"messages": []}\n{"messages": []}\n')
    for path, code in {
        tmp_path / "trian.yaml": "no-such-file",
        tmp_path: "not-a-file",
        tmp_path / "no" / "run.yaml": "no-such-file",
        tmp_path / ("x" * 5000): "unreadable",
        Path("a\0b"): "unreadable",
        Path("/dev/zero"): "not-a-file",
        tmp_path / "pipe": "not-a-file",
        tmp_path / "chats.jsonl": "not-a-run-file",
        tmp_path / "mine" / "locked.yaml": "no-sections" if os.geteuid() == 0 else "unreadable",
    }.items():
        with refused(code):
            read_run_file(path)
    with pytest.raises(UserError, match=r"no such file\n\nhint: did you mean train.yaml\?"):
        read_run_file(tmp_path / "trian.yaml")


# text of the file: where, hint
BAD_KEYS = {
    "lora: {learning_rate: 1}": ("lora.learning_rate", "write train.learning_rate"),
    "trian: {}": ("trian", "did you mean train?"),
    "train: {deepspeed: x}": ("train.deepspeed", "full-shard"),
    "model: {load_in_4bit: true}": ("model.load_in_4bit", "write layout.base_dtype: nf4"),
    "cluster: {volumes: [{claim: a, pth: /a, path: /b}]}": ("cluster.volumes[0].pth", "did you mean path?"),
    "cluster: {slurm: {queue: a}}": ("cluster.slurm.queue", "write cluster.slurm.partition"),
    "cluster: {slurm: {node_selector: {a: b}}}": ("cluster.slurm.node_selector", "sbatch: {constraint: FEATURE}"),
    "cluster: {openshift: {queue: a}}": ("cluster.openshift", "write cluster.kubernetes"),
    "watch: {zzzzzzz: 1}": ("watch.zzzzzzz", "windlass explain watch"),
    "lora: {experts: {zzzzzzz: 1}}": ("lora.experts.zzzzzzz", "its keys are r, lora_alpha, targets"),
    "layout: {rank: 2}": ("layout.rank", "did you mean ranks?"),
    "lora: {rank_: 8}": ("lora.rank_", "did you mean lora.r?"),
    "train: {<<: {seed: 1}}": ("train.<<", "windlass explain train"),
    "train: {evaluation_stratgy: no}": ("train.evaluation_stratgy", "evaluation_strategy"),
    "script: {path: a.py}": ("script", "write `kind: script`"),
    # The published recipe's first training file lacks the header `lora:`.
    "bias: none": ("bias", "the line `lora:` is missing"),
    "lora:\nr: 8": ("r", "indent it under `lora:`"),
    # What other tools call them.
    "lora: {trainable_token_indices: [8]}": ("lora.trainable_token_indices", "write lora.modules_to_save: [embed"),
    "train: {micro_batch_size: 8}": ("train.micro_batch_size", "write train.per_device_train_batch_size"),
    "lr: 8": ("lr", "write train.learning_rate"),
    "layout: {tensor_parallel: 2}": ("layout.tensor_parallel", "there is no tensor parallelism"),
    "train: {sequence_parallel_size: 2}": ("train.sequence_parallel_size", "write layout.context_parallel"),
    "distributed: {strategy: fsdp2}": ("distributed", "full-shard (FSDP, ZeRO-3)"),
    "data: {train: a.jsonl}": ("data.train", "write data.dataset_name_or_path"),
    "cluster.image: a/b": ("cluster.image", "write `image:` indented below `cluster:`"),
}
# text of the file: where, what is wrong, hint
BAD_VALUES = {
    "layout: {state_dict: sharded}": ("layout.state_dict", "must be 'full', not 'sharded'", ""),
    "layout: {base_dtype: fp4}": ("layout.base_dtype", "'int4' or 'uint4', not 'fp4'", "write nf4"),
    "lora: {init_lora_weights: PiSSA}": ("lora.init_lora_weights", "not 'PiSSA'", "did you mean pissa?"),
    "lora: {init_lora_weights: corda}": ("lora.init_lora_weights", "not 'corda'", "write true: corda changes the base"),
    "cluster: {platform: k8s}": ("cluster.platform", "not 'k8s'", "write kubernetes"),
    "lora: {r: '16'}": ("lora.r", "must be a whole number, not '16'", "without quotes"),
    "lora: {r: 0}": ("lora.r", "must be at least 1, not 0", "windlass explain lora.r"),
    "lora: {r: null}": ("lora.r", "must be a whole number, not null", "remove the line"),
    "lora: {lora_dropout: 1}": ("lora.lora_dropout", "must be less than 1, not 1", ""),
    "lora: {target_modules: []}": ("lora.target_modules", "must not be empty", ""),
    "lora: {target_modules: [a, 1]}": ("lora.target_modules[1]", "must be text, not 1", "in quotes"),
    "lora: {target_modules: [a, a]}": ("lora.target_modules", "lists a more than once", ""),
    "lora: {target_modules: '*.q'}": ("lora.target_modules", "is neither `all`, `all-linear` nor a regular", ""),
    "lora: 5": ("lora", "must be a section, not 5", "indent its keys below it: r,"),
    "train: {bf16: 'True'}": ("train.bf16", "must be true, false or 'auto', not 'True'", "write true without quotes"),
    "train: {learning_rate: .nan}": ("train.learning_rate", "must be a number, not '.nan'", ""),
    "train: {learning_rate: 1e999}": ("train.learning_rate", "must be a finite number", ""),
    "train: {max_steps: 0}": ("train.max_steps", "must be at least 1 or -1, not 0", ""),
    "train: {seed: 099}": ("train.seed", "must be a whole number, not '099'", "leading zeros"),
    f"train: {{seed: {'9' * 5000}}}": ("train.seed", "must be a whole number, not '9999", ""),
    "train: {per_device_train_batch_size: -4}": ("train.per_device_train_batch_size", "at least 1 or 'auto'", ""),
    "data: {dataset_config_name: no}": ("data.dataset_config_name", "must be text, not false", '"false"'),
    "layout: fastest": ("layout", "must be 'auto', 'full-shard'", "windlass explain layout"),
    "layout: full-shrd": ("layout", "must be 'auto'", "did you mean full-shard?"),
    "layout: fsdp2": ("layout", "must be 'auto'", "write full-shard"),
    "name: My Run": ("name", "must be at most 47 lower-case letters", ""),
    "cluster: {volumes: [{claim: a, path: x}]}": ("cluster.volumes[0].path", "must be an absolute path", ""),
    "cluster: {memory_limit: '64'}": ("cluster.memory_limit", "must be an amount with its unit", ""),
    "cluster: {env: {A-B: x}}": ("cluster.env.A-B", "must be a variable's name", ""),
    "cluster: {env: {A: true}}": ("cluster.env.A", "must be text or a section, not true", ""),
    "cluster: {image: 'a b'}": ("cluster.image", "must be an image's name, without spaces", ""),
    "cluster: {gpu: {name: x}}": ("cluster.gpu.memory_gib", "is missing", ""),
}


def test_bad_settings(problems: Problems) -> None:
    rows = [(text, "unknown-key", where, "", hint) for text, (where, hint) in BAD_KEYS.items()]
    rows += [(text, "wrong-value", where, what, hint) for text, (where, what, hint) in BAD_VALUES.items()]
    for text, code, where, what, hint in rows:
        problem = problems(text)[0]
        assert (problem.code, problem.where) == (code, f"F:{text.count(chr(10)) + 1}: {where}"), text
        assert what in problem.problem, text
        assert problem.hint, text
        assert hint in problem.hint, text


def test_a_platforms_key_outside_of_its_section_is_answered_with_its_place(problems: Problems) -> None:
    queue, affinity = problems("cluster:\n  queue: gpu\n  affinity: {a: b}\n")
    assert (queue.where, queue.hint) == ("F:2: cluster.queue", "write cluster.kubernetes.queue")
    assert affinity.hint == "write cluster.kubernetes.affinity"
    (found,) = problems("cluster: {platform: slurm}", "cluster.sbatch={mem: 0}")
    assert (found.code, found.hint) == ("unknown-key", "write cluster.slurm.sbatch")


def test_a_hint_to_explain_names_a_key_that_explain_knows(problems: Problems) -> None:
    """Entries of mappings have names that explain doesn't know."""
    hints = set()
    anything = {"cluster.kubernetes.affinity", "data.template_kwargs"}  # whose entries may be
    for path in {*list_keys()} - anything:
        tree: Any = {"layers.0 x": [[1]], "": {"zzzzzzz": [1]}}
        for key in reversed(path.split(".")):
            tree = {key: tree}
        hints |= {problem.hint for problem in problems(yaml.safe_dump(tree))}
    explained = [name for hint in hints for name in re.findall("`windlass explain (.*?)`", hint)]
    assert {"lora.rank_pattern", "cluster.env", "cluster.kubernetes.labels", "data.eval"} <= {*explained}
    for name in explained:
        assert explain_topic(name), name


THREE = "cluster.nodes=3"
# Overrides, by the code of what is wrong with the first of them.
CLASHES = {
    "broken-rule": [
        ["train.output_dir=/data/run", "cluster.volumes=[{claim: a, path: /}, {empty_dir: 1Gi, path: /data}]"],
        ["train.output_dir=/data/run", "cluster.volumes=[{claim: a, path: /data, read_only: true}]"],
        ["train.fp16=true"],
        ["data.val_split=null"],
        ["data.val_fraction=0.1", "data.val_split=test"],
        ["train.load_best_model_at_end=true", "train.eval_strategy=no"],
        ["train.load_best_model_at_end=true", "train.save_strategy=epoch"],
        ["train.save_steps=300", "train.load_best_model_at_end=true"],
        ["train.optim=paged_adamw_8bit", THREE],
        ["train.optim=adamw_troch"],
        ["train.optim=galore_adamw"],
        ["train.lr_scheduler_type=cosin"],
        ["train.lr_scheduler_type=cosine_with_min_lr"],
        ["train.lr_scheduler_type=reduce_lr_on_plateau", "train.eval_strategy=no"],
        ["train.warmup_steps=10", "train.warmup_ratio=0.1"],
        ["train.warmup_steps=10", "train.max_steps=10"],
        ["watch.stall_seconds=400"],
        ["model.attn_implementation=flash_atention_2"],
        ["train.report_to=wandd"],
        ["model.device_map=cpu", THREE],
        ["lora.use_dora=true", "lora.experts=true"],
        ["lora.dtype=bfloat16", "lora.use_dora=true"],
        ["data.streaming=true"],
        ["data.val_fraction=0.1", "data.streaming=true", "train.max_steps=9"],
        ["data.prompt_field=q"],
        ["data.prompt_template=[[{a}]]", "data.messages_field=m"],
        ["layout.ranks=2", THREE],
        ["layout.activation_checkpointing=false", "train.gradient_checkpointing=selective"],
        ["cluster.env.RANK=0"],
        ["cluster.env.HF_TOKEN=hf_abc"],
        ["train.global_batch_size=50", THREE],
        ["train.sample={}"],
        ["train.sample={prompts: [a], from_eval: 2}"],
        ["train.sample={from_eval: 2}", "train.eval_strategy=no"],
        ["data.dataset_name_or_path=x", "data.mix=[{path: x}]"],
        ["data.mix=[{path: x, weight: 1}, {path: y}]"],
        ["data.mix=[{path: x, weight: 1, rows: 2}]"],
        ["data.mix=[{path: x/a.jsonl}, {path: y/a.parquet}]"],
        ["data.mix=[{path: x/a.jsonl}]", "data.eval={a: {path: x}}"],
        ["data.mix=[{path: x, epochs: 2}]", "data.streaming=true", "train.max_steps=9"],
        ["data.packing=true", "train.objective=dpo"],
        ["data.streaming=true", "train.max_steps=9", "train.objective=orpo", "data.max_length=64"],
        ["data.truncation=prompt"],
    ],
    "wrong-value": [
        *(['data.prompt_template=""'], ["lora.r=x"], ["lora.r="]),
        *(["train.sample={prompts: []}"], ["data.mix=[{path: x, epochs: 0}]"]),
    ],
    "unknown-key": [
        *(["train.lerning_rate=1"], ["lora.target_modules[0]=x"], ["lora[0]=a"], ["cluster.volumes[0].path=/x"]),
        *(["lora={q: 1}"], ["data.mix=[{path: x, epoch: 1}]"]),
    ],
    "duplicate-key": [["lora={r: 1, r: 2}"]],
    "not-an-assignment": [["lora.r"], ["=3"]],
    "not-yaml": [["lora.target_modules=[a"]],
    "unprintable": [["train.output_dir=a\ud800"]],
}


HINTS = {
    "train.lerning_rate=1": "did you mean learning_rate?",
    "learning_rate=1": "write train.learning_rate",
    "lora.rank=1": "write lora.r",
    "lora.target_modules[0]=x": "give the whole list",
    "train.optim=adamw_troch": "adamw_torch",
}


@pytest.mark.fault("a run folder that is gone with its pod", "`windlass plan`", "in an empty_dir")
@pytest.mark.fault("a run folder on a volume that is read-only", "`windlass plan`", "on a volume that can't be written")
def test_bad_overrides_and_combinations(problems: Problems) -> None:
    for code, overrides in [(code, overrides) for code, rows in CLASHES.items() for overrides in rows]:
        (problem,) = problems("train: {seed: 1}", *overrides)
        assert problem.code == code, problem
        assert problem.where.startswith(f"--override {overrides[0].partition('=')[0]}"), problem
        assert problem.hint, problem
    for override, hint in HINTS.items():
        assert hint in problems("train: {seed: 1}", override)[0].hint
    for clash, what in zip(
        CLASHES["broken-rule"], ("in an empty_dir", "on a volume that can't be written"), strict=False
    ):
        assert f"/data/run is {what}" in problems("train: {seed: 1}", *clash)[0].problem


# overrides: what is remarked on; empty: nothing, and no contradiction either
REMARKS: list[tuple[list[str], str]] = [
    (["model.device_map=auto"], "windlass places the model"),
    (["train.ddp_find_unused_parameters=true"], "no effect"),
    (["train.max_steps=5", "train.num_train_epochs=2"], "overrides train.num_train_epochs"),
    (["train.eval_on_start=true", "train.eval_strategy=no"], "no effect while train.eval_strategy is `no`"),
    (["train.eval_steps=5", "train.eval_strategy=no"], "no effect unless train.eval_strategy"),
    (["train.lr_scheduler_type=constant"], "constant has no warm-up"),
    (
        ["train.global_batch_size=48", "train.per_device_train_batch_size=1", THREE],
        "48 = 1 per GPU x 3 GPUs x 16 micro-batches",
    ),
    (["model.use_cache=true"], "stays off"),
    (["cluster.env.NCCL_IB_HCAS=mlx5"], "did you mean NCCL_IB_HCA?"),
    (["cluster.env.NCCL_IB_SL=1"], ""),  # exists, although the table of variables lacks it
    (["train.optim=paged_adamw_8bit"], ""),  # one rank: nothing is sharded
    (["train.bf16=false", "train.fp16=true"], ""),
    (["data.val_fraction=0.1"], ""),
    (["train.load_best_model_at_end=true", "train.save_steps=400"], ""),
    (["train.load_best_model_at_end=true", "train.save_strategy=epoch", "train.eval_strategy=epoch"], ""),
    (["train.lr_scheduler_type=cosine_with_min_lr", "train.lr_scheduler_kwargs={min_lr: 1e-6}"], ""),
    (["layout.shard=4", "layout.replicate=2", "cluster.gpus_per_node=8", "layout.expert_parallel=4"], ""),
    (["model.attn_implementation=kernels-community/flash-attn", "cluster.env.TOKENIZERS_PARALLELISM=false"], ""),
]


def test_valid_combinations(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("train: {seed: 1}")
    for overrides, remark in REMARKS:
        notes = read_run_file(tmp_path / "run.yaml", overrides).notes
        assert remark in " ".join(notes), overrides
        assert bool(notes) == bool(remark), overrides


def test_all_problems_at_once_with_all_places(problems: Problems) -> None:
    """Form, overrides, unknown keys, wrong values and contradictions among valid ones, in one error."""
    (found,) = problems("train:\n  bf16: true\n  fp16: true\n")
    assert (found.where, found.problem) == ("F:3: train.fp16", "bf16 and fp16 are both on (F:2: train.bf16)")
    (found,) = problems("train:\n  load_best_model_at_end: true\n  eval_steps: 30\n  save_steps: 100\n")
    assert all(f"F:{line}: train." in str(found) for line in (2, 3, 4))
    assert "set train.save_steps to 90" in found.hint
    (found,) = problems("train:\n  seed: 1\n  seed: 2\n")
    assert (found.where, found.problem) == ("F:3: train.seed", "is set twice, first at F:2")

    text = (
        "train:\n  seed: 1\n  seed: 2\n  fp16: true\n  warmup: 3\n  eval_steps: x\n"
        "lora: {r: -1}\ncluster: {nodes: 0}\ndata: {val_split: null}\n"
    )
    assert {problem.where for problem in problems(text, "lora.q=1")} == {
        *("F:3: train.seed", "--override lora.q=1", "F:5: train.warmup", "F:6: train.eval_steps", "F:7: lora.r"),
        *("F:8: cluster.nodes", "F:4: train.fp16", "F:9: data.val_split"),
    }
    # save_steps can't be compared with eval_steps while one of them isn't a number.
    (found,) = problems("train: {load_best_model_at_end: true, eval_steps: x, save_steps: 70}")
    assert "eval_steps" in found.where


# --- whatever is in a run file or an override, only a UserError comes out, and it can be printed ---------------------

ROOT = Path(__file__).parent.parent / "examples" / "mistral-small-4"
EXAMPLES = [
    *(path.read_bytes() for path in sorted(ROOT.glob("*.yaml"))),
    *(text.encode() for text in read_presets().values()),
]
QUICK = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
LONG = settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))

SPECIAL = ["auto", "no", "1e999", "-1", "0", "nan", "[", "{}", "all", "*", "\ud800", "\0", "9" * 400, "~"]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(SPECIAL)
KEYS = st.sampled_from([part for key in list_keys() for part in (key, key.rpartition(".")[2])]) | st.text(max_size=10)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=5), max_leaves=12
)
ENDS = st.sampled_from(["", "[0]", "[99]", ".0", ".x", "[-1]", ".", "[", "a" * 300])
SETTINGS = st.builds(lambda key, end, value: f"{key}{end}={value}", KEYS, ENDS, st.text(max_size=20) | VALUES.map(str))
OVERRIDES = st.lists(SETTINGS | st.text(max_size=30), max_size=4)
ODD = [b"-1", b"0", b"1e400", b".nan", b"null", b"[]", b"{}", b"[[[[", b"'", b"no", b"12:30:00", b"2020-01-01"]


def read_or_refuse(path: Path, content: bytes, overrides: list[str]) -> None:
    path.write_bytes(content)
    problems: Sequence[Problem] = ()
    try:
        loaded = read_run_file(path, overrides)
        assert all(map(loaded.where, list_keys()))
        loaded.run.model_dump_json()
    except UserError as error:
        problems = error.problems or (Problem(""),)
    assert all(problem.problem and problem.where for problem in problems), problems
    assert len("".join(map(str, problems)).encode("utf-8")) < 400_000


def mutate(content: bytes, seed: int) -> bytes:
    """Change a few bytes, lines or indentations of a real file."""
    choice = random.Random(seed)
    lines = content.split(b"\n")
    for _ in range(choice.randint(1, 4)):
        at = choice.randrange(len(lines))
        line, half = lines[at], len(lines[at]) // 2
        lines[at] = choice.choice(
            [
                b" " * choice.randint(0, 6) + line.strip(),
                line + line,
                line.replace(b":", choice.choice([b"", b": &a", b": *a", b": !!int", b":\t"])),
                line[:half] + bytes([choice.randrange(256)]) + line[half:],
                lines[choice.randrange(len(lines))],
                line.partition(b":")[0] + b": " + choice.choice(ODD),
            ]
        )
    return b"\n".join(lines)


@pytest.mark.parametrize("how", [QUICK, pytest.param(LONG, marks=pytest.mark.prove)], ids=["quick", "long"])
def test_only_user_errors_are_raised(tmp_path: Path, how: settings) -> None:
    path = tmp_path / "run.yaml"

    @how
    @given(content=st.binary(max_size=300))
    def any_bytes(content: bytes) -> None:
        read_or_refuse(path, content, [])

    @how
    @given(content=st.text(st.sampled_from(list("abr:-[]{}&*!|>%@`'\"#,? \n\t01~<\\xU")), max_size=80))
    def any_yaml_like(content: str) -> None:
        read_or_refuse(path, b"lora:\n  r: 1\n" + content.encode(), [])

    @how
    @given(example=st.sampled_from(EXAMPLES), seed=st.integers(0, 2**32), overrides=OVERRIDES)
    def any_mutation(example: bytes, seed: int, overrides: list[str]) -> None:
        read_or_refuse(path, mutate(example, seed), overrides if seed % 3 == 0 else [])

    any_bytes()
    any_yaml_like()
    any_mutation()
