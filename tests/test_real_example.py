"""The example of a real model, without the model: its rows are valid JSON, and its run file plans."""

import json
import subprocess
import sys
from pathlib import Path

from test_faults import windlass

ROOT = Path(__file__).parent.parent
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}


def test_rows_are_json_of_disjoint_names_and_the_run_file_plans(tmp_path: Path) -> None:
    """A model that is there is not fetched."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    model = tmp_path / "real-run" / "SmolLM2-135M-Instruct"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(CONFIG))
    done = subprocess.run(
        [sys.executable, "examples/smollm2/prepare.py"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "Apache-2.0" in done.stdout
    assert "4 bits" in done.stdout
    names: dict[str, set[str]] = {}
    for split, count in (("train", 480), ("validation", 32)):
        lines = (tmp_path / "real-run" / "data" / f"{split}.jsonl").read_text().splitlines()
        assert len(set(lines)) == count
        names[split] = set()
        for line in lines:
            user, assistant = json.loads(line)["messages"]
            answer = json.loads(assistant["content"])
            assert list(answer) == ["name", "date", "amount"]
            assert answer["name"] in user["content"]
            assert f"${answer['amount']:,.2f}" in user["content"]
            assert answer["date"][:4] in user["content"]
            names[split].update(answer["name"].split())
    assert not names["train"] & names["validation"]
    code, printed = windlass("plan examples/smollm2/run.yaml", tmp_path)
    assert code == 0, printed
    printed = " ".join(printed.split())  # also of spaces that do not break
    assert "135 M" in printed
    assert "2 ranks" in printed
