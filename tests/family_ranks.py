"""Runs in every rank of tests/test_families.py: loads every family and compares with transformers' own loading."""

import json
import os
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import DTensor

from windlass.model import Base, read_base
from windlass.model.wrapped import outer_name
from windlass.plan.layout import Layout
from windlass.ranks.collectives import all_gather
from windlass.train.load import list_unique_tensors, load_base

TOKENS = torch.arange(24)[None] + 20


def truth(base: Base, dtype: torch.dtype) -> Any:
    """Return transformers' own unsharded model, and the names of its states that belong to the language model."""
    assert base.path
    name = base.wrapper.architecture if base.wrapper else base.family.causal_lm
    attention = "sdpa" if getattr(transformers, name)._supports_sdpa else "eager"
    path = base.path.with_name(base.path.name.removesuffix(" in FP8"))  # of the same values
    model, info = getattr(transformers, name).from_pretrained(
        path, dtype=dtype, attn_implementation=attention, output_loading_info=True
    )
    assert not any(info.values()), info
    if not base.wrapper:
        return model, {key: key for key in model.state_dict()}
    inner = base.wrapper.place
    names = {key: f"model.{key.removeprefix(inner)}" for key in model.state_dict() if key.startswith(inner)}
    return model, names | {key: "lm_head.weight" for key in model.state_dict() if key.endswith("lm_head.weight")}


def equal(base: Base, dtype: torch.dtype, layout: Layout) -> None:
    """Require weights equal to transformers' bit for bit, in the same dtypes, and equal logits."""
    true, names = truth(base, dtype)
    model, _ = load_base(base, layout, dtype=dtype)
    wanted = {names[key]: tensor for key, tensor in list_unique_tensors(true).items() if key in names}
    mine = list_unique_tensors(model)
    assert mine.keys() == wanted.keys() - ({"lm_head.weight"} - mine.keys())
    for name, tensor in mine.items():
        assert isinstance(tensor, DTensor) or name not in dict(model.named_parameters()) or layout.shard == 1, name
        found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert found.dtype == wanted[name].dtype, (name, found.dtype, wanted[name].dtype)
        assert torch.equal(found, wanted[name]), name
    for name, buffer in model.named_non_persistent_buffers():
        outer = outer_name(name, base.wrapper.place) if base.wrapper else name
        assert torch.equal(buffer, true.get_buffer(outer)), name
    with torch.no_grad():
        one, other = model(TOKENS).logits.float(), true(input_ids=TOKENS, use_cache=False).logits.float()
    slack = (2e-2 if dtype == torch.bfloat16 else 1e-5) * float(other.abs().max())
    assert (one - other).abs().max() <= slack, (one - other).abs().max()


def main(root: Path, out: Path) -> None:
    dist.init_process_group("gloo")
    ranks, results = dist.get_world_size(), dict[str, str]()
    whole = Layout("full-shard", "test", 1, ranks, shard=ranks, precision="no")
    for folder in sorted(root.iterdir()):
        base = read_base(folder)
        layouts = [whole]
        if not base.family.shards:
            layouts = [replace(whole, name="resident", shard=1, replicate=ranks)]
        elif "experts" in base.dims and base.family.expert_parallel:
            layouts.append(replace(whole, name="expert-parallel", expert_parallel=ranks))
        for layout in layouts:
            for dtype in (torch.float32, torch.bfloat16):
                case = f"{folder.name} {layout.name} {dtype}"
                try:
                    equal(base, dtype, layout)
                    mine = ""
                except Exception:
                    mine = traceback.format_exc(limit=-6)
                results[case] = "\n".join(each for each in all_gather(mine) if each)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(results))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
