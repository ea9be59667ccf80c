"""Run files as they come: broken, hostile, misspelt. Every one a sentence with a place and a next step."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from windlass.errors import Problem, UserError
from windlass.runfile import read


def problems(path: Path, text: str | bytes, overrides: list[str] | None = None) -> list[Problem]:
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
    with pytest.raises(UserError) as caught:
        read(path, overrides or [])
    return list(caught.value.problems)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run.yaml"


DEEP = b"a: " + b"[" * 200_000
BOMB = b"a: &a [x,x,x,x,x,x,x,x,x,x]\n" + b"".join(
    b"%c: &%c [%s]\n" % (one, one, b",".join([b"*%c" % (one - 1)] * 10)) for one in range(98, 110)
)
FILES = {
    "empty": (b"", "is empty"),
    "blank": (b" \n\n", "is empty"),
    "comments": (b"# nothing\n", "nothing but comments"),
    "empty mapping": (b"{}", "is empty"),
    "list": (b"- a\n- b\n", "a list, not sections"),
    "text": (b"hello", "not sections"),
    "binary": (b"\x7fELF\x00\x01\xff\xfe", "is not UTF-8"),
    "zip": (b"PK\x03\x04" + b"\x00" * 30, "is a binary file"),
    "UTF-16": ("train: {seed: 1}".encode("utf-16"), "is not UTF-8"),
    "Latin-1": ("name: é".encode("latin-1"), "is not UTF-8"),
    "tab": (b"train:\n\tseed: 1\n", "a tab where YAML wants spaces"),
    "open bracket": (b"lora: {r: 1\n", "is not YAML"),
    "colon in text": (b"name: a: b\n", "is not YAML"),
    "two documents": (b"name: a\n---\nname: b\n", "second document"),
    "100 MB": (b"a: b\n" * 20_000_000, "larger than 1 MiB"),
    "deep": (DEEP, "more than 32 deep"),
    "bomb": (BOMB, "more than 20,000 values"),
    "many": (b"name: [" + b"a," * 30_000 + b"]", "more than 20,000 values"),
    "alias of itself": (b"a: &a [*a]\n", "names nothing that stands before it"),
    "alias of nothing": (b"a: *b\n", "is not YAML|names nothing"),
    "python tag": (b"name: !!python/object/apply:os.system [ls]\n", "the tag !!python/object/apply:os.system"),
    "escape beyond Unicode": (b'name: "\\UFFFFFFFF"\n', "is not YAML"),
    "surrogate": (b'name: "\\ud800"\n', "can't be printed"),
    "zero byte": (b'train: {output_dir: "a\\0b"}\n', "can't be printed"),
    "control character": (b"name: a\x07b\n", "is not YAML"),
    "merge key": (b"train: {<<: {seed: 1}}\n", "merge keys"),
    "key that is no text": (b"train: {yes: 1}\n", "the key yes is not text to YAML"),
    "key that is a list": (b"? [a, b]\n: 1\n", "a key must be plain text"),
    "version of YAML": (b"%YAML " + b"9" * 5000 + b".1\n---\nname: a\n", "is not YAML"),
}


@pytest.mark.parametrize(("content", "said"), FILES.values(), ids=FILES)
def test_bad_file(run: Path, content: bytes, said: str) -> None:
    started = time.monotonic()
    found = problems(run, content)
    assert re.search(said, str(found[0])), found
    assert found[0].where.startswith(str(run))
    assert found[0].hint
    assert time.monotonic() - started < 5


def test_no_file(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text("name: a")
    for path, said in {
        tmp_path / "trian.yaml": "nearest: train.yaml",
        tmp_path: "is a folder",
        tmp_path / "no" / "run.yaml": "isn't there",
        tmp_path / ("x" * 5000): "can't be read",
        Path("a\0b"): "can't be read",
        Path("/dev/zero"): "not a regular file",
    }.items():
        with pytest.raises(UserError, match=said):
            read(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_no_right(run: Path) -> None:
    run.write_text("name: a")
    run.chmod(0)
    with pytest.raises(UserError, match="can't be read: Permission denied"):
        read(run)


def test_pipe_is_refused_not_waited_for(run: Path) -> None:
    os.mkfifo(run)
    with pytest.raises(UserError, match="not a regular file"):
        read(run)


def test_byte_order_mark_and_windows_lines(run: Path) -> None:
    run.write_bytes(b"\xef\xbb\xbftrain:\r\n  seed: 7\r\n")
    assert read(run).run.train.seed == 7


def test_equal_keys_name_both_lines(run: Path) -> None:
    (found,) = problems(run, "train:\n  seed: 1\n  seed: 2\n")
    assert found.where == f"{run}:3: train.seed"
    assert f"{run}:2" in found.problem


def test_lost_lora_header(run: Path) -> None:
    """The published recipe's first training file begins with these keys and no header."""
    (found,) = problems(run, "lora_dropout: 0.05\ntarget_modules:\n  - q_proj\nbias: none\ntask_type: CAUSAL_LM\n")
    assert found.where == f"{run}:1: lora_dropout"
    assert "the header `lora:` is missing" in found.problem
    for key in ("lora_dropout", "target_modules", "bias", "task_type"):
        assert key in found.problem
        assert f"  {key}: …" in found.hint
    assert "\nlora:\n" in found.hint


def test_lost_header_beside_the_section(run: Path) -> None:
    (found,) = problems(run, "lora:\nr: 8\n")
    assert found.where == f"{run}:2: r"
    assert found.hint == "move it under `lora:`"


UNKNOWN = {
    "train: {lerning_rate: 1}": ("train.lerning_rate", "nearest: learning_rate"),
    "lora: {alpha: 1}": ("lora.alpha", "nearest: lora_alpha"),
    "lora: {learning_rate: 1}": ("lora.learning_rate", "write it as train.learning_rate"),
    "trian: {}": ("trian", "nearest: train"),
    "train: {deepspeed: x}": ("train.deepspeed", "full-shard"),
    "model: {load_in_4bit: true}": ("model.load_in_4bit", "no 4-bit base"),
    "train: {torch_compile: true}": ("train.torch_compile", "nothing is compiled"),
    "cluster: {volumes: [{claim: a, pth: /a, path: /b}]}": ("cluster.volumes[0].pth", "nearest: path"),
    "cluster: {user: {uid: 1, gip: 2}}": ("cluster.user.gip", "nearest: gid"),
    "watch: {zzzzzzz: 1}": ("watch.zzzzzzz", "there are: non_finite"),
    "layout: {expert_paralel: 2}": ("layout.expert_paralel", "nearest: expert_parallel"),
    "train: {evaluation_stratgy: no}": ("train.evaluation_stratgy", "nearest: evaluation_strategy"),
}


@pytest.mark.parametrize(("text", "said"), UNKNOWN.items(), ids=UNKNOWN)
def test_unknown_key(run: Path, text: str, said: tuple[str, str]) -> None:
    (found,) = problems(run, text)
    assert found.where == f"{run}:1: {said[0]}"
    assert said[1] in found.hint


WRONG = {
    "layout: {state_dict: sharded}": ("layout.state_dict: must be full or null, not 'sharded'", ""),
    "layout: {base_dtype: nf4}": ("layout.base_dtype: must be bf16, fp8 or null, not 'nf4'", "silently leaves fused"),
    "lora: {r: '16'}": ("lora.r: must be a whole number, not '16'", "without quotes"),
    "lora: {r: 16.5}": ("lora.r: must be a whole number, not 16.5", ""),
    "lora: {r: 0}": ("lora.r: must be at least 1, not 0", ""),
    "lora: {r: true}": ("lora.r: must be a whole number, not true", ""),
    "lora: {r: null}": ("lora.r: must be a whole number, not empty", "take the line out"),
    "lora: {r: 0x}": ("lora.r: must be a whole number, not '0x'", ""),
    "lora: {lora_dropout: 1}": ("lora.lora_dropout: must be below 1, not 1", ""),
    "lora: {lora_dropout: -0.1}": ("lora.lora_dropout: must be at least 0, not -0.1", ""),
    "lora: {lora_alpha: 0}": ("lora.lora_alpha: must be above 0, not 0", ""),
    "lora: {lora_alpha: a}": ("lora.lora_alpha: must be a number, not 'a'", ""),
    "lora: {target_modules: []}": ("lora.target_modules: must not be empty", ""),
    "lora: {target_modules: [a, 1]}": ("lora.target_modules[1]: must be text, not 1", "in quotes"),
    "lora: {target_modules: [a, a]}": ("lora.target_modules: names a more than once", ""),
    "lora: {target_modules: '*.q'}": ("lora.target_modules: is neither `all`, `all-linear` nor a regular", ""),
    "lora: {target_modules: 3}": ("lora.target_modules: must be a list or text, not 3", "in quotes"),
    "lora: {bias: some}": ("lora.bias: must be none, all or lora_only, not 'some'", ""),
    "lora: {experts: {r: -1}}": ("lora.experts.r: must be at least 1, not -1", ""),
    "lora: {task_type: SEQ_CLS}": ("lora.task_type: must be CAUSAL_LM, not 'SEQ_CLS'", ""),
    "lora: 5": ("lora: must be a section: keys and values, indented under it, not 5", ""),
    "train: [a]": ("train: must be a section", ""),
    "train: {bf16: 'True'}": ("train.bf16: must be true or false, not 'True'", "write true without quotes"),
    "train: {bf16: 1}": ("train.bf16: must be true or false, not 1", ""),
    "train: {learning_rate: .nan}": ("train.learning_rate: must be a finite number", ""),
    "train: {learning_rate: 1e999}": ("train.learning_rate: must be a finite number", ""),
    "train: {learning_rate: 0}": ("train.learning_rate: must be above 0, not 0", ""),
    "train: {max_steps: 0}": ("train.max_steps: must be a number of steps above 0, or -1", ""),
    "train: {seed: 099}": ("train.seed: must be a whole number, not '099'", "leading zeros"),
    f"train: {{seed: {'9' * 5000}}}": ("train.seed: must be a whole number, not '9999", ""),
    "train: {eval_strategy: step}": ("train.eval_strategy: must be no, steps or epoch", "nearest: steps"),
    "train: {per_device_train_batch_size: -4}": ("train.per_device_train_batch_size: must be at least 1", ""),
    "data: {dataset_config_name: no}": ("data.dataset_config_name: must be text or null, not false", "quotes"),
    "data: {val_fraction: 1.0}": ("data.val_fraction: must be below 1, not 1.0", ""),
    "data: {text_field: ''}": ("data.text_field: must not be empty", ""),
    "model: {torch_dtype: bf16}": ("model.torch_dtype: must be bfloat16, float16 or float32", ""),
    "layout: fastest": ("layout: must be auto, full-shard, no-reshard", ""),
    "layout: 3": ("layout: must be", ""),
    "name: My Run": ("name: must be at most 47 small letters", ""),
    "name: 3": ("name: must be text or null, not 3", "in quotes"),
    "cluster: {volumes: [{claim: a}]}": ("cluster.volumes[0].path: is missing", ""),
    "cluster: {volumes: [{claim: A_b, path: /x}]}": ("cluster.volumes[0].claim: must be small letters", ""),
    "cluster: {volumes: [{claim: a, path: x}]}": ("cluster.volumes[0].path: must be an absolute path", ""),
    "cluster: {memory_limit: '64'}": ("cluster.memory_limit: must be an amount with its unit", ""),
    "cluster: {trainer_version: 2.3}": ("cluster.trainer_version: must be text or null, not 2.3", 'quotes: "2.3"'),
    "cluster: {env: {A-B: x}}": ("cluster.env.A-B: must be a variable's name", ""),
    "cluster: {env: {A: true}}": ("cluster.env.A: must be text or a section", 'quotes: "true"'),
    "cluster: {env: {A: {secret: s}}}": ("cluster.env.A.key: is missing", ""),
    "cluster: {extended_resources: {rdma/nic: 0}}": ("cluster.extended_resources.rdma/nic: must be at least 1", ""),
    "cluster: {namespace: a.b}": ("cluster.namespace: must be at most 63", ""),
    "cluster: {image: 'a b'}": ("cluster.image: must be an image's name, without spaces", ""),
    "cluster: {nodes: -3}": ("cluster.nodes: must be at least 1, not -3", ""),
    "cluster: {gpu: {name: x}}": ("cluster.gpu.memory_gib: is missing", ""),
    "watch: {min_supervised_fraction: 2}": ("watch.min_supervised_fraction: must be at most 1, not 2", ""),
}


@pytest.mark.parametrize(("text", "said"), WRONG.items(), ids=[text[:60] for text in WRONG])
def test_wrong_value(run: Path, text: str, said: tuple[str, str]) -> None:
    found = problems(run, text)[0]
    assert str(found).startswith(f"{run}:1: {said[0]}"), found
    assert said[1] in found.hint


def test_all_at_once_in_the_files_order_of_kinds(run: Path) -> None:
    """Form, overrides, unknown keys, wrong values and contradictions of what is sound: one error."""
    text = (
        "train:\n  seed: 1\n  seed: 2\n  fp16: true\n  warmup: 3\n  eval_steps: x\n"
        "lora: {r: -1}\ncluster: {nodes: 0}\ndata: {val_split: null}\n"
    )
    found = problems(run, text, ["lora.q=1"])
    places = {problem.where.removeprefix(f"{run}:") for problem in found}
    assert places == {
        "3: train.seed",
        "--override lora.q=1",
        "5: train.warmup",
        "6: train.eval_steps",
        "7: lora.r",
        "8: cluster.nodes",
        "4: train.fp16",
        "9: data.val_split",
    }


def test_a_wrong_value_makes_no_second_problem(run: Path) -> None:
    """save_steps against eval_steps can't be judged while one of them is no number."""
    (found,) = problems(run, "train: {load_best_model_at_end: true, eval_steps: x, save_steps: 70}")
    assert "eval_steps" in found.where
