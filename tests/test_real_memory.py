"""Memory of a real pretrained model over many steps, on rows of all lengths. Part of `make prove-real`."""

from pathlib import Path
from typing import Any

import pytest
import real
from test_train import case

from windlass.hardware import has_bf16_products

STEPS = 200


@pytest.mark.prove
@pytest.mark.timeout(1800)
def test_memory_does_not_grow_with_steps(tmp_path: Path) -> None:
    """In bfloat16, if the processor has instructions for it: its kernels are then prepared, and kept, for each number
    of rows and each length of a document. 20 steps meet most of them."""
    real.write_rows(tmp_path, 300)
    settings: dict[str, Any] = {
        "train__bf16": has_bf16_products(),
        "train__max_steps": STEPS,
        "train__eval_strategy": "no",
    }
    settings |= {"data__packing": True, "data__max_length": 64}
    found = real.run_cases(tmp_path, real.get_model(), 1, {"memory": case(1, micro=4, **settings)})
    used = [step["rss_gib"] for step in found.steps("memory")]
    print(f"GiB at steps 1, 20, 100, {STEPS}: {[used[step - 1] for step in (1, 20, 100, STEPS)]}")
    assert len(used) == STEPS
    assert max(used[20:]) < 1.03 * max(used[:20])
