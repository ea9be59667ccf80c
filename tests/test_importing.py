"""Other tools' configurations become run files: every key is carried over, translated, listed or refused."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from refusals import refused

from windlass import cli
from windlass.errors import UserError
from windlass.runfile import read_run_file
from windlass.runfile.document import load_document
from windlass.runfile.importers import TRANSLATE, import_file, render_run_file
from windlass.runfile.importers.imported import ImportedRun
from windlass.runfile.names import IMPORTED, TOOLS, group_by_name
from windlass.runfile.reference import list_keys

FOLDER = Path(__file__).parent / "golden" / "importing"
AXOLOTL, MISTRAL_4, LLAMA_FACTORY, TRL, SWIFT = (
    (FOLDER / name).read_text()
    for name in ("axolotl.yaml", "axolotl-mistral-4.yaml", "llamafactory.yaml", "trl.yaml", "swift.sh")
)
CASES: dict[str, dict[str, dict[str, Any]]] = yaml.safe_load((FOLDER / "cases.yaml").read_text())


def edited(text: str, **values: Any) -> str:
    """Return the configuration with other values; None removes a key."""
    lines = [line for line in text.splitlines() if line.partition(":")[0] not in values]
    return "\n".join([*lines, *(f"{key}: {json.dumps(value)}" for key, value in values.items() if value is not None)])


@pytest.mark.parametrize(("base", "name"), [(base, name) for base, cases in CASES.items() for name in cases])
def test_a_configuration_becomes_a_run_file(base: str, name: str, tmp_path: Path) -> None:
    case = CASES[base][name]
    text = case.get("of") or edited((FOLDER / base).read_text(), **case.get("with", {}))
    for old, new in case.get("instead", {}).items():
        text = text.replace(old, new)
    expected, keys = case.get("becomes", {}), case.get("refused", [])
    if "info" in case:
        (tmp_path / "data").mkdir()
        (tmp_path / "data/dataset_info.json").write_text(json.dumps(case["info"]))
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
    info = {"texts": {"file_name": "a.jsonl", "ranking": True, "columns": {"chosen": "good"}}}
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(info))
    file.write_text(edited(LLAMA_FACTORY, dataset="texts"))
    assert any(problem.where.endswith("texts.ranking") for problem in import_file(file).problems)


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
