"""Adapters in the forms of servers, read back as a server reads them: by names, and alpha / r alone."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refused
from safetensors.torch import load_file
from test_export import MLA, export, peft_model, plain_model, silent
from torch import Tensor

from windlass import cli, tiny
from windlass.init import draft_run
from windlass.plan import make_plan
from windlass.runfile import read_run_file
from windlass.serve.servers import ROWS, SERVERS, list_commands

pytestmark = [
    pytest.mark.xdist_group("export"),
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*_pattern keys did not match any targeted module:RuntimeWarning"),
]
ROOT = Path(__file__).parent.parent
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
RS = {"use_rslora": True, "rank_pattern": {"q_proj": 2}}
PATTERNS = {"rank_pattern": {"o_proj": 2}, "alpha_pattern": {"q_proj": 3}}
DENSE = {"target_modules": ["q_proj", "o_proj", "down_proj"]}
ROUTED = {"target_modules": ["q_proj"], "target_parameters": EXPERTS}
OWN = {"rank_pattern": {r"experts\.down_proj": 2}, "alpha_pattern": {r"experts\.down_proj": 4}}
BY_EXPERT = "mlp.experts gate_proj down_proj up_proj"
SMALL: dict[str, Any] = {"layers": 2, "hidden": 64, "tokenizer": False}

# Family, PEFT's config, server, and the names of an expert's gate, down and up matrix there.
FORMS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "llama, rsLoRA and ranks": ("llama", {**DENSE, **RS}, "llama.cpp", ""),
    "qwen3_moe, patterns": ("qwen3_moe", {"target_modules": ["q_proj", "o_proj"], **PATTERNS}, "sglang", ""),
    "mixtral": ("mixtral", ROUTED, "vllm", "block_sparse_moe.experts w1 w2 w3"),
    "qwen3_moe": ("qwen3_moe", {**ROUTED, **RS}, "vllm", BY_EXPERT),
    "qwen3_moe, one of two": ("qwen3_moe", {**ROUTED, "target_parameters": EXPERTS[1:]}, "vllm", BY_EXPERT),
    "one scale, two ranks": ("mistral4", {**ROUTED, "target_modules": ["q_b_proj"], **OWN}, "vllm", BY_EXPERT),
}


def make_adapter(folder: Path, family: str, config: dict[str, Any]) -> tuple[Path, dict[str, Tensor]]:
    """Return an adapter that PEFT saved, and what PEFT itself adds to each weight."""
    base = tiny.write_model(folder / "base", family, quantization="none", dtype="float32", **SMALL)
    model = peft_model(base, config)
    adapter = folder / "adapter"
    model.save_pretrained(str(adapter), save_embedding_layers=False)
    before = plain_model(base).state_dict()
    after = model.merge_and_unload().state_dict()
    changes = {name: after[name] - before[name] for name in before}
    return adapter, {name: change for name, change in changes.items() if change.any()}


def read_as_a_server(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield module names and their changes, by the file alone: one scale for all, one rank for all."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    assert not config["use_rslora"]
    assert not config["rank_pattern"]
    assert not config["alpha_pattern"]
    for key, a in tensors.items():
        match = re.fullmatch(r"base_model\.model\.(.+)\.lora_A\.weight", key)
        if match:
            b = tensors[key.replace("lora_A", "lora_B")]
            assert a.shape[0] == b.shape[1] == config["r"], key
            yield match[1], b.double() @ a.double() * config["lora_alpha"] / config["r"]


@pytest.mark.parametrize("name", FORMS)
def test_a_server_reads_the_adapters_change(name: str, tmp_path: Path) -> None:
    """Also from an adapter with rsLoRA, ranks and alphas by module; experts in PEFT's packing, one by one."""
    family, config, server, experts = FORMS[name]
    adapter, true = make_adapter(tmp_path, family, config)
    record = export(adapter, tmp_path / "out", server=server, say=silent)
    assert (record["deviations"], record["for"]) == ([], server)
    place, *matrices = experts.split() or [""]
    seen: set[str] = set()
    for module, change in read_as_a_server(tmp_path / "out"):
        inner = module.replace("model.language_model.", "model.")
        assert (inner != module) == (family == "mistral4"), module
        match = re.fullmatch(rf"(.+)\.{re.escape(place)}\.(\d+)\.(\w+)", inner) if place else None
        expected = true.get(f"{inner}.weight")
        if match:
            gate_up, down = (true.get(f"{match[1]}.mlp.experts.{leaf}") for leaf in ("gate_up_proj", "down_proj"))
            number = int(match[2])
            which = matrices.index(match[3])
            whole = down if which == 1 else gate_up
            seen.add(f"{match[1]}.mlp.experts.{'down_proj' if which == 1 else 'gate_up_proj'}")
            expected = None if whole is None else whole[number]
            if expected is not None and which != 1:
                half = len(expected) // 2
                expected = expected[:half] if which == 0 else expected[half:]
        if expected is None:
            assert not change.any(), module  # beside an adapted matrix
        else:
            assert torch.allclose(change, expected.double(), atol=2e-6), module
        seen.add(f"{inner}.weight")
    assert true.keys() <= seen


REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("mistral4", "vllm", {"target_modules": ["q_a_proj"]}, "vLLM refuses q_a_proj"),
    ("mistral4", "llama.cpp", {"target_modules": ["o_proj"]}, "llama.cpp crashes on attention"),
    ("mistral4", "sglang", {"target_modules": ["o_proj"]}, "SGLang refuses attention"),
    ("llama", "vllm", {"target_modules": ["q_proj"], "use_dora": True}, "vLLM refuses dora"),
    ("llama", "vllm", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "vLLM refuses modules_to_save"),
    ("llama", "llama.cpp", {"target_modules": ["q_proj"], "use_dora": True}, "llama.cpp refuses dora"),
    ("qwen3_moe", "llama.cpp", ROUTED, "llama.cpp refuses experts"),
    ("mixtral", "sglang", ROUTED, "SGLang ignores without a word experts"),
]


@pytest.mark.parametrize(("family", "server", "config", "message"), REFUSED)
def test_what_a_server_does_not_apply_is_refused(
    family: str, server: str, config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    adapter, _ = make_adapter(tmp_path, family, config)
    with refused("not-served", f"--for {server}") as problems:
        export(adapter, tmp_path / "out", server=server, say=silent)
    assert len(problems) == 1
    assert problems[0].problem.startswith(message)
    assert f"merge it: `windlass export {adapter} --to merged --merge" in problems[0].hint
    assert not (tmp_path / "out").exists()


@pytest.mark.fault(
    "an adapter on a module that the server ignores", "`windlass export --for`", "vLLM ignores without a word kv_b_proj"
)
def test_the_way_on_works_as_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter, _ = make_adapter(tmp_path, "mistral4", {"target_modules": MLA[1:2] + MLA[3:]})
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VLLM_MLA_DISABLE", raising=False)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["export", str(adapter), "--to", "DIR", "--for", "vllm"])
    shown = capsys.readouterr().err
    assert "vLLM ignores without a word kv_b_proj" in shown
    merge, again = re.findall(r"`(?:VLLM_MLA_DISABLE=1 )?windlass (.+?)`", shown.replace("\n", " "))
    assert "VLLM_MLA_DISABLE=1 windlass" in shown.replace("\n", " ")
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    for command in (merge, again):
        with pytest.raises(SystemExit, match="0"):
            cli.main(command.split())
    card = (tmp_path / "DIR" / "README.md").read_text()
    assert "VLLM_MLA_DISABLE=1 vllm serve base --enable-lora --max-lora-rank 8 --lora-modules adapter=." in card
    assert "from peft" not in card or "Mistral3ForConditionalGeneration" in card


def test_the_plan_warns_of_what_the_server_does_not_apply(tmp_path: Path) -> None:
    """At once, by what the run file names; not of what `export` converts."""
    train = ROOT / "examples" / "mistral-small-4" / "train.yaml"

    def warnings(*overrides: str) -> list[str]:
        plan = make_plan(read_run_file(train, overrides))
        return [warning.text for warning in plan.warnings if warning.text.startswith("export.server: ")]

    assert warnings() == []
    ignored, refused_module = warnings("export.for=vllm", "lora.target_modules=[q_a_proj, kv_b_proj, o_proj]")[::-1]
    assert "vLLM ignores without a word kv_b_proj (36 modules)" in ignored
    assert "VLLM_MLA_DISABLE=1 windlass export" in ignored
    assert "vLLM refuses q_a_proj (36 modules)" in refused_module
    assert "--merge --layout mistral" in refused_module
    assert warnings("export.for=vllm", "lora.target_modules=[q_b_proj, o_proj, down_proj]", "lora.experts=true") == []
    crash = warnings("export.server=llama.cpp", "lora.target_modules=[o_proj]", "lora.use_dora=true")
    assert [text.split(" (")[0].split(";")[0] for text in crash] == [
        "export.server: llama.cpp crashes on attention",
        "export.server: llama.cpp refuses dora",
    ]
    with refused("wrong-value", "export.for=triton"):
        read_run_file(train, ("export.for=triton",))


def test_init_leaves_out_what_the_server_does_not_apply(tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "model", "mistral4")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": "hull " * 20}) + "\n" for _ in range(20)))
    made = draft_run(str(model), str(rows), "1xcpu", silent, overrides=["export.server=vllm"])
    targets, reason = made.settings["lora.target_modules"]
    assert set(targets) == {"q_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert reason.startswith("without kv_a_proj_with_mqa, kv_b_proj, q_a_proj: ")
    assert draft_run(str(model), str(rows), "1xcpu", silent).settings["lora.target_modules"][0] == "all-linear"


def test_a_template_that_is_not_the_bases_is_given_to_the_server(tmp_path: Path) -> None:
    adapter, _ = make_adapter(tmp_path, "llama", {"target_modules": ["q_proj"]})
    (tmp_path / "base" / "chat_template.jinja").write_text("{{ bos_token }}{{ messages }}")
    for text, option in (("{{ bos_token }}{{ messages }}", ""), ("{{ messages }}", "--chat-")):
        record = {"chat_template": {"source": "its own", "text": text}}
        (adapter / "base_model.json").write_text(json.dumps(record))
        export(adapter, tmp_path / f"out{option}", server="vllm", say=silent)
        (command,) = re.findall(r"vllm serve .*", (tmp_path / f"out{option}" / "README.md").read_text())
        assert command.endswith(option + "template chat_template.jinja" if option else "adapter=.")


def test_a_base_on_the_hub_is_fetched_before_it_is_converted() -> None:
    fetch, base, adapter, server = list_commands("llama.cpp", "org/name", {"r": 8}, [], own_template=True)
    assert fetch == "hf download org/name --local-dir name"
    assert "convert_hf_to_gguf.py name --outfile" in base
    assert "--base name . --outfile" in adapter
    assert server.endswith("--lora adapter.gguf --chat-template-file chat_template.jinja")
    assert list_commands("vllm", "org/name", {"r": 8}, [])[0].startswith("vllm serve org/name --enable-lora")


def test_the_run_files_server_is_the_exports(tmp_path: Path) -> None:
    adapter, _ = make_adapter(tmp_path, "mixtral", ROUTED)
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    adapter = adapter.rename(run / "final")
    (run / "manifest.json").write_text(json.dumps({"run": {"export": {"server": "vllm"}}}))
    assert export(run, tmp_path / "out", say=silent)["for"] == "vllm"
    assert "w1.lora_A" in str(load_file(tmp_path / "out" / "adapter_model.safetensors").keys())
    card = (tmp_path / "out" / "README.md").read_text()
    assert "vllm serve base --enable-lora --max-lora-rank 8 --lora-modules adapter=." in card
    assert "import PeftModel" not in card
    assert export(run, tmp_path / "peft", server="peft", say=silent)["for"] == "peft"
    shutil.move(tmp_path / "base", tmp_path / "gone")
    with refused("base-not-here", "--for vllm"):
        export(run, tmp_path / "again", say=silent)


def test_the_table_is_consistent() -> None:
    results = {"applied", "ignored", "refused", "misscaled", "crash"}
    for row in ROWS:
        assert row.server in SERVERS
        assert row.result in results
        assert row.seen
        assert not row.form or (row.form == "per-expert") == bool(row.matrices)
