"""What identifies a model's description: the hash of the entries of config.json that define it."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

FETCH: Final = "fetch config.json again from where the model was published"  # hint for a wrong one
MAX_LAYERS: Final = 4096  # far above any model, but low enough that a typo makes no list of a billion parameters
# Entries of config.json that don't affect names, shapes or classes.
ASIDE: Final = (
    *("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "quantization_config"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "attention_dropout", "architectures"),
    *("max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "rms_norm_eps", "auto_map"),
)


def hash_config(config: Mapping[str, Any]) -> str:
    """Hash the entries that define the model, without those in ASIDE."""
    return hashlib.sha256(json.dumps(_strip(config), sort_keys=True).encode()).hexdigest()[:16]


def _strip(table: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in table.items() if key not in ASIDE}
    return {key: _strip(value) if isinstance(value, dict) else value for key, value in kept.items()}
