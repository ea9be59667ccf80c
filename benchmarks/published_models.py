"""Shapes of the models in published runs: facts from their config.json on the Hugging Face hub.

Columns: names (a regular expression, matched against the last part of a model's name in lower case), a family with such
layers, hidden, layers, heads, key-value heads, feed-forward, vocabulary, tied head; then further keys. Families that
windlass does not train are represented by their sizes only: a gated feed-forward is a gated feed-forward.
"""

from __future__ import annotations

import re
from typing import Any

MOE8 = {"num_local_experts": 8, "num_experts_per_tok": 2}
QWEN3_MOE = {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8}


def qwen3_moe(width: int, **more: Any) -> dict[str, Any]:
    return {**QWEN3_MOE, "moe_intermediate_size": width, **more}


ROWS: tuple[tuple[Any, ...], ...] = (
    (r"(open[-_]?)?(llama-?[12]?|code-?llama|vicuna|alpaca)-?7b.*", "llama", 4096, 32, 32, 32, 11008, 32000, 0),
    (r"(llama-?[12]?|code-?llama|vicuna|alpaca)-?13b.*", "llama", 5120, 40, 40, 40, 13824, 32000, 0),
    (r"(llama-?1?)-?(30|33)b.*", "llama", 6656, 60, 52, 52, 17920, 32000, 0),
    (r"(llama-?1?)-?65b.*", "llama", 8192, 80, 64, 64, 22016, 32000, 0),
    (r"code-?llama-?34b.*", "llama", 8192, 48, 64, 8, 22016, 32000, 0),
    (r"(llama-2|llama2|code-?llama)-?70b.*", "llama", 8192, 80, 64, 8, 28672, 32000, 0),
    (r"(meta-)?llama-?3(\.[0-9])?-8b.*", "llama", 4096, 32, 32, 8, 14336, 128256, 0),
    (r"(meta-)?llama-?3(\.[0-9])?-70b.*", "llama", 8192, 80, 64, 8, 28672, 128256, 0),
    (r"(meta-)?llama-?3\.1-405b.*", "llama", 16384, 126, 128, 8, 53248, 128256, 0),
    (r"(meta-)?llama-?3\.2-1b.*", "llama", 2048, 16, 32, 8, 8192, 128256, 1, {"head_dim": 64}),
    (r"(meta-)?llama-?3\.2-3b.*", "llama", 3072, 28, 24, 8, 8192, 128256, 1, {"head_dim": 128}),
    (r"tinyllama.*", "llama", 2048, 22, 32, 4, 5632, 32000, 0),
    (r"smollm2?-135m.*", "llama", 576, 30, 9, 3, 1536, 49152, 1),
    (r"smollm2?-360m.*", "llama", 960, 32, 15, 5, 2560, 49152, 1),
    (r"smollm2?-1\.7b.*", "llama", 2048, 24, 32, 32, 8192, 49152, 1),
    (r"smollm3-3b.*", "llama", 2048, 36, 16, 4, 11008, 128256, 1),
    (r"yi-(1\.5-)?6b.*", "llama", 4096, 32, 32, 4, 11008, 64000, 0),
    (r"yi-1\.5-9b.*|yi-9b.*", "llama", 4096, 48, 32, 4, 11008, 64000, 0),
    (r"yi-(1\.5-)?34b.*", "llama", 7168, 60, 56, 8, 20480, 64000, 0),
    (r"(deepseek-llm|deepseek-coder)-(6\.7b|7b).*", "llama", 4096, 30, 32, 32, 11008, 102400, 0),
    (r"baichuan2?-7b.*", "llama", 4096, 32, 32, 32, 11008, 125696, 0),
    (r"baichuan2?-13b.*", "llama", 5120, 40, 40, 40, 13696, 125696, 0),
    (r"internlm2(_5)?-7b.*", "llama", 4096, 32, 32, 8, 14336, 92544, 0),
    (r"internlm2(_5)?-20b.*", "llama", 6144, 48, 48, 8, 16384, 92544, 0),
    (r"powerlm-3b|granite-3\.0-3b-dense.*", "llama", 2304, 40, 36, 36, 9216, 49152, 1),
    (r"granite-3\.[0-3]-2b.*", "llama", 2048, 40, 32, 8, 8192, 49155, 1),
    (r"granite-3\.[0-3]-8b.*", "llama", 4096, 40, 32, 8, 12800, 49155, 1),
    (r"granite-(7b|8b)-code.*|granite-8b.*", "llama", 4096, 36, 32, 8, 14336, 49152, 1),
    (r"solar-10\.7b.*", "llama", 4096, 48, 32, 8, 14336, 32000, 0),
    (r"falcon3-7b.*", "llama", 3072, 28, 12, 4, 23040, 131072, 0, {"head_dim": 256}),
    (r"falcon3-10b.*", "llama", 3072, 40, 12, 4, 23040, 131072, 0, {"head_dim": 256}),
    (r"falcon3-3b.*", "llama", 3072, 22, 12, 4, 9216, 131072, 0, {"head_dim": 256}),
    (r"falcon3-1b.*", "llama", 2048, 18, 8, 4, 8192, 131072, 0, {"head_dim": 256}),
    (r"olmo-2-.*7b.*", "llama", 4096, 32, 32, 32, 11008, 100352, 0),
    (r"olmo-2-.*13b.*", "llama", 5120, 40, 40, 40, 13824, 100352, 0),
    (r"stablelm-2-1_6b.*", "llama", 2048, 24, 32, 32, 5632, 100352, 0),
    (r"stablelm-3b.*", "llama", 2560, 32, 32, 32, 6912, 50304, 0),
    (r"mistral-(7b).*v0\.[12].*|zephyr-7b.*|mistral-7b|openhermes.*7b.*", "mistral", 4096, 32, 32, 8, 14336, 32000, 0),
    (r"mistral-7b.*v0\.3.*", "mistral", 4096, 32, 32, 8, 14336, 32768, 0),
    (r"mistral-nemo.*", "mistral", 5120, 40, 32, 8, 14336, 131072, 0, {"head_dim": 128}),
    (r"(ministral-8b).*", "mistral", 4096, 36, 32, 8, 12288, 131072, 0, {"head_dim": 128}),
    (r"mistral-small-22b.*|mistral-small-.*2409", "mistral", 6144, 56, 48, 8, 16384, 32768, 0, {"head_dim": 128}),
    (r"(mistral-small|devstral).*(24b|250[0-9]).*", "mistral", 5120, 40, 32, 8, 32768, 131072, 0, {"head_dim": 128}),
    (r"mistral-large.*", "mistral", 12288, 88, 96, 8, 28672, 32768, 0),
    (r"codestral-22b.*", "mistral", 6144, 56, 48, 8, 16384, 32768, 0),
    (r"qwen-1[._]8b.*", "qwen2", 2048, 24, 16, 16, 5504, 151936, 0),
    (r"qwen-7b.*", "qwen2", 4096, 32, 32, 32, 11008, 151936, 0),
    (r"qwen-14b.*", "qwen2", 5120, 40, 40, 40, 13696, 152064, 0),
    (r"qwen-72b.*", "qwen2", 8192, 80, 64, 64, 24576, 152064, 0),
    (r"qwen1\.5-0\.5b.*", "qwen2", 1024, 24, 16, 16, 2816, 151936, 1),
    (r"qwen1\.5-1\.8b.*", "qwen2", 2048, 24, 16, 16, 5504, 151936, 0),
    (r"qwen1\.5-4b.*", "qwen2", 2560, 40, 20, 20, 6912, 151936, 0),
    (r"qwen1\.5-7b.*", "qwen2", 4096, 32, 32, 32, 11008, 151936, 0),
    (r"qwen1\.5-14b.*", "qwen2", 5120, 40, 40, 40, 13696, 152064, 0),
    (r"qwen1\.5-32b.*", "qwen2", 5120, 64, 40, 8, 27392, 152064, 0),
    (r"qwen1\.5-72b.*", "qwen2", 8192, 80, 64, 64, 24576, 152064, 0),
    (r"qwen2(\.5)?(-coder|-math)?-0\.5b.*", "qwen2", 896, 24, 14, 2, 4864, 151936, 1),
    (r"qwen2(\.5)?(-coder|-math)?-1\.5b.*", "qwen2", 1536, 28, 12, 2, 8960, 151936, 1),
    (r"qwen2\.5(-coder)?-3b.*", "qwen2", 2048, 36, 16, 2, 11008, 151936, 1),
    (r"qwen2(\.5)?(-coder|-math)?-7b.*", "qwen2", 3584, 28, 28, 4, 18944, 152064, 0),
    (r"qwen2\.5(-coder)?-14b.*", "qwen2", 5120, 48, 40, 8, 13824, 152064, 0),
    (r"qwen2\.5(-coder)?-32b.*|qwq-32b.*", "qwen2", 5120, 64, 40, 8, 27648, 152064, 0),
    (r"qwen2(\.5)?(-math)?-72b.*", "qwen2", 8192, 80, 64, 8, 29568, 152064, 0),
    (r"qwen3-0\.6b.*", "qwen3", 1024, 28, 16, 8, 3072, 151936, 1, {"head_dim": 128}),
    (r"qwen3-1\.7b.*", "qwen3", 2048, 28, 16, 8, 6144, 151936, 1, {"head_dim": 128}),
    (r"qwen3-4b.*", "qwen3", 2560, 36, 32, 8, 9728, 151936, 1, {"head_dim": 128}),
    (r"qwen3-8b.*", "qwen3", 4096, 36, 32, 8, 12288, 151936, 0, {"head_dim": 128}),
    (r"qwen3-14b.*", "qwen3", 5120, 40, 40, 8, 17408, 151936, 0, {"head_dim": 128}),
    (r"qwen3-32b.*", "qwen3", 5120, 64, 64, 8, 25600, 151936, 0, {"head_dim": 128}),
    (r"qwen3(-coder)?-30b-a3b.*", "qwen3_moe", 2048, 48, 32, 4, 6144, 151936, 0, qwen3_moe(768)),
    (r"qwen3-235b-a22b.*", "qwen3_moe", 4096, 94, 64, 4, 12288, 151936, 0, qwen3_moe(1536)),
    (r"mixtral-8x7b.*", "mixtral", 4096, 32, 32, 8, 14336, 32000, 0, MOE8),
    (r"mixtral-8x22b.*", "mixtral", 6144, 56, 48, 8, 16384, 32768, 0, MOE8),
    (r"gemma-2b.*", "llama", 2048, 18, 8, 1, 16384, 256000, 1, {"head_dim": 256}),
    (r"gemma-7b.*|codegemma-7b.*", "llama", 3072, 28, 16, 16, 24576, 256000, 1, {"head_dim": 256}),
    (r"gemma-2-2b.*", "llama", 2304, 26, 8, 4, 9216, 256000, 1, {"head_dim": 256}),
    (r"gemma-2-9b.*", "llama", 3584, 42, 16, 8, 14336, 256000, 1, {"head_dim": 256}),
    (r"gemma-2-27b.*", "llama", 4608, 46, 32, 16, 36864, 256000, 1, {"head_dim": 128}),
    (r"gemma-3-1b.*", "llama", 1152, 26, 4, 1, 6912, 262144, 1, {"head_dim": 256}),
    (r"gemma-3-4b.*", "llama", 2560, 34, 8, 4, 10240, 262208, 1, {"head_dim": 256}),
    (r"gemma-3-12b.*", "llama", 3840, 48, 16, 8, 15360, 262208, 1, {"head_dim": 256}),
    (r"gemma-3-27b.*", "llama", 5376, 62, 32, 16, 21504, 262208, 1, {"head_dim": 128}),
    (r"phi-3(\.5)?-mini.*", "llama", 3072, 32, 32, 32, 8192, 32064, 0),
    (r"phi-4-mini.*", "llama", 3072, 32, 24, 8, 8192, 200064, 1, {"head_dim": 128}),
    (r"phi-3-small.*", "llama", 4096, 32, 32, 8, 14336, 100352, 1),
    (r"phi-3-medium.*", "llama", 5120, 40, 40, 10, 17920, 32064, 0),
    (r"phi-4.*", "llama", 5120, 40, 40, 10, 17920, 100352, 0),
)


def config_of(name: str) -> dict[str, Any] | None:
    """Return config.json of a model by its usual name, or None."""
    short = re.sub(r"[\s_]+(?=\d)", "-", name.rpartition("/")[2].strip().lower())
    for pattern, family, hidden, layers, heads, kv, width, vocab, tied, *more in ROWS:
        if re.fullmatch(pattern, short):
            return {
                "model_type": family,
                "hidden_size": hidden,
                "num_hidden_layers": layers,
                "num_attention_heads": heads,
                "num_key_value_heads": kv,
                "intermediate_size": width,
                "vocab_size": vocab,
                "tie_word_embeddings": bool(tied),
                **(more[0] if more else {}),
            }
    return None
