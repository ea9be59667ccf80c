"""The loader's promise: what is on disk is what is trained, whatever the layout, or the run does not start."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from windlass import tiny
from windlass.errors import RunError, UserError
from windlass.model import Base, Parameter, read_base
from windlass.plan.layout import Layout
from windlass.train import certificate, fp8
from windlass.train.load import incomplete, load, not_filled, read_all, tiles, unique_tensors
from windlass.train.reading import AT_ONCE, chunks, decode, intersection, runs

load_ranks = importlib.import_module("load_ranks")  # beside this file; also run by every rank
pytestmark = pytest.mark.xdist_group("load")
ALONE = Layout(name="resident", reason="test", nodes=1, gpus_per_node=1, shard=1, precision="no")
HELD = replace(ALONE, base_dtype="fp8")
IN_BOTH = pytest.mark.parametrize("layout", [ALONE, HELD], ids=["in 16 bits", "in FP8"])
EXPERTS = "language_model.model.layers.1.mlp.experts"
MIB = 2**20


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints")
    for name, options in load_ranks.CHECKPOINTS.items():
        tiny.write(directory / name, tokenizer=False, **options)
        load_ranks.dequantise(directory / name, directory / f"{name}-true", load_ranks.DTYPE.get(name, torch.bfloat16))
    large: dict[str, Any] = {"hidden": 1024, "heads": 8, "experts": 16, "moe_intermediate": 1024, "layers": 6}
    tiny.write(directory / "large", tokenizer=False, **large)
    return directory


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.prove)])
def ranks(request: pytest.FixtureRequest, root: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Every case in one start of so many processes; each rank's results."""
    out = tmp_path_factory.mktemp("results")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={request.param}"]
    done = subprocess.run(
        [*command, str(Path(__file__).with_name("load_ranks.py")), str(root), str(out)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((out / f"{request.param}-{rank}.json").read_text()) for rank in range(request.param)]


def test_every_checkpoint_under_every_layout_is_the_truth(ranks: list[dict[str, Any]]) -> None:
    cases = [name for name in ranks[0] if "/" in name]
    assert len(cases) >= {2: 30, 4: 14}[len(ranks)]
    for rank in ranks:
        for case in cases:
            result = rank[case]
            assert result["names"], case
            assert result["differ"] == [], case
            assert result["trainable"] == [], case
            # Expert parallelism adds the experts' outputs in another order.
            slack = 0.02 if "expert-parallel" in case else 0.0
            assert result["logits"] <= slack, case
            assert result["again"] <= slack, case


def test_sharded_layouts_hold_no_plain_tensor(ranks: list[dict[str, Any]]) -> None:
    for case, result in ranks[0].items():
        if "/" in case:
            assert bool(result["plain"]) == case.endswith("resident"), case


def test_each_rank_asks_for_its_part_alone(ranks: list[dict[str, Any]]) -> None:
    for name in load_ranks.CHECKPOINTS if len(ranks) == 2 else load_ranks.FOUR:
        whole = ranks[0][f"{name}/resident"]["bytes_read"][0]
        for layout, parts in (("full-shard", len(ranks)), ("no-reshard", len(ranks)), ("hybrid", len(ranks) // 2)):
            for asked in ranks[0][f"{name}/{layout}"]["bytes_read"]:
                assert asked <= 1.05 * whole / parts, (name, layout)


def test_every_parameter_was_compared(ranks: list[dict[str, Any]]) -> None:
    for case, result in ranks[0].items():
        if "/" in case:
            assert result["checked"]["slices"] >= len(ranks) * result["checked"]["parameters"] / 2, case


def test_parts_swapped_between_ranks_are_named(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "model.layers.1.mlp.experts.down_proj is not what" in rank["swapped"]


def test_one_rank_in_doubt_stops_all(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "model.layers.0.self_attn.o_proj.weight is not what" in rank["one_wrong"]
        assert "(rank 1)" in rank["one_wrong"]


def test_a_run_that_only_claims_to_be_sharded_is_stopped(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "not sharded as full-shard plans it" in rank["unsharded"]
        assert "a plain tensor on every rank" in rank["unsharded"]


def test_weights_stay_gathered_between_micro_batches_and_no_longer(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["kept"] == [True, False]


def test_what_the_engine_cannot_do_is_refused(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        uneven, none, count, offload = rank["refused"]
        assert "has 8 experts to split evenly over 3 ranks" in uneven
        assert "LlamaForCausalLM has no experts" in none
        assert f"the layout is for {len(ranks) + 1} ranks" in count
        assert "ranks that compute in host memory have nothing to offload" in offload


def in_fp8(rank: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {case: result for case, result in rank.items() if case.startswith("fp8 ")}


def test_held_in_fp8_every_layout_computes_the_truth(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert len(in_fp8(rank)) >= {2: 24, 4: 8}[len(ranks)]
        for case, result in in_fp8(rank).items():
            assert result["held"] > 10, case
            assert result["differ"] == [], case
            assert "float8_e4m3fn" in result["dtypes"], case
            # Expert parallelism adds the experts' outputs in another order.
            slack = 0.02 if "expert-parallel" in case else 0.0
            assert result["logits"] <= slack, case
            assert result["gradient"] <= slack, case


def test_held_in_fp8_a_weight_is_one_byte_in_memory_and_on_the_wire(ranks: list[dict[str, Any]]) -> None:
    """Embeddings, head, norms and routers are stored in 16 bits, and stay so."""
    for case, result in in_fp8(ranks[0]).items():
        assert result["own_bytes"] == 2 * result["own_numbers"] - result["own_codes"], case
        _, name, layout = case.split()
        saved = ranks[0][f"{name}/{layout}"]["wire"] - result["wire"]
        # Full shard gathers each layer for its forward and for its backward.
        gathers = {"full-shard": 2, "no-reshard": 1}.get(layout, 0)
        if gathers:
            assert saved == gathers * result["codes"], case
        assert saved >= 0, case


def test_codes_and_scales_in_the_wrong_place_are_named(ranks: list[dict[str, Any]]) -> None:
    victim = "model.layers.1.mlp.experts.down_proj"
    for rank in ranks:
        for change in ("codes", "experts' codes", "experts' scales", "one rank's scale"):
            assert f"{victim} " in rank[change], change
        assert "scale" in rank["one rank's scale"]


def test_bytes_and_memory_are_bounded(ranks: list[dict[str, Any]]) -> None:
    if len(ranks) != 2:
        pytest.skip("measured on two ranks")
    for each in ranks[0]["bounds"]:
        assert each["bytes"] > 500 * MIB  # else the constant below hides a whole model
        assert each["bytes_read"] <= 1.05 * each["stored"] / 2
        grown = each["peak_rss_bytes"] - each["rss_before_bytes"]
        assert grown <= each["bytes"] / 2 + 2 * each["largest"] / 2 + 200 * MIB
        assert grown <= 0.9 * each["bytes"]
    for each in ranks[0]["bounds in FP8"]:
        assert each["bytes_read"] <= 1.05 * each["stored"] / 2
        # Read straight to where it stays: no 16-bit copy, nothing converted.
        assert each["peak_rss_bytes"] - each["rss_before_bytes"] <= each["bytes"] / 4 + 150 * MIB


# One process: the faults that a checkpoint or a reader of headers may have.


@pytest.fixture
def copy(root: Path, tmp_path: Path) -> Path:
    """The published twin, to be damaged."""
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((root / "published" / file).read_bytes())
    return tmp_path


def damage(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    stored = load_file(directory / "model.safetensors")
    change(stored)
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})


def drop(key: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(stored: dict[str, torch.Tensor]) -> None:
        del stored[key]

    return change


def other_prefix(stored: dict[str, torch.Tensor]) -> None:
    for key in [key for key in stored if key.startswith("language_model.")]:
        stored[key.replace("language_model.", "text_decoder.")] = stored.pop(key)


def other_shape(stored: dict[str, torch.Tensor]) -> None:
    stored["language_model.model.norm.weight"] = torch.ones(32, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (other_prefix, "text_decoder|embed_tokens"),
        (drop("language_model.model.layers.1.self_attn.o_proj.weight"), "layers.1.self_attn.o_proj"),
        (drop(f"{EXPERTS}.gate_up_proj_scale_inv"), "layers.1.mlp.experts.gate_up_proj"),
        (drop("language_model.model.layers.0.self_attn.kv_b_proj.weight_scale_inv"), "layers.0.self_attn.kv_b_proj"),
        (other_shape, "model.norm.weight"),
    ],
    ids=["wrong prefix", "missing", "expert scale dropped", "scale dropped", "wrong shape"],
)
@IN_BOTH
def test_damaged_files_stop_the_run_by_name(
    copy: Path, change: Callable[[dict[str, torch.Tensor]], None], named: str, layout: Layout
) -> None:
    damage(copy, change)
    with pytest.raises(UserError, match=named):
        load(read_base(copy), layout)


@IN_BOTH
def test_a_file_cut_short_stops_the_run(copy: Path, layout: Layout) -> None:
    checkpoint = read_base(copy)
    file = copy / "model.safetensors"
    last = max((piece.stored for p in checkpoint.parameters for piece in p.pieces), key=lambda stored: stored.end)
    with file.open("r+b") as opened:
        opened.truncate(last.end - 10)
    with pytest.raises(UserError, match=f"ends within '{last.key}'"):
        load(checkpoint, layout)


@IN_BOTH
def test_values_written_after_the_headers_were_read_are_read(copy: Path, layout: Layout) -> None:
    """The other side of the coin: a checkpoint without damage loads."""
    model, made = load(read_base(copy), layout)
    assert made.loaded == len(unique_tensors(model))


def test_what_nothing_was_read_into_is_named(root: Path) -> None:
    """Whatever the lists before it say: what counts as loaded is what was read."""
    checkpoint = read_base(root / "published")
    model, _ = load(checkpoint, ALONE)
    targets, (lost, *others) = unique_tensors(model), checkpoint.parameters
    problems, filled, _ = read_all(targets, replace(checkpoint, parameters=tuple(others)))
    assert (problems, len(filled)) == ([], len(others))
    assert not_filled(targets, filled) == [f"{lost.name} was not read"]


def changed(checkpoint: Base, name: str, change: Callable[[Parameter], Parameter]) -> Base:
    parameters = tuple(change(p) if p.name == name else p for p in checkpoint.parameters)
    assert parameters != checkpoint.parameters
    return replace(checkpoint, parameters=parameters)


@IN_BOTH
def test_a_scale_that_the_header_reader_lost_is_missed(root: Path, layout: Layout) -> None:
    broken = changed(
        read_base(root / "published"),
        "model.layers.0.mlp.experts.down_proj",
        lambda p: replace(p, pieces=tuple(replace(piece, scale=None) for piece in p.pieces)),
    )
    with pytest.raises(UserError, match=r"layers\.0\.mlp\.experts\.down_proj' is FP8 and has no scale"):
        load(broken, layout)


@IN_BOTH
def test_the_scale_of_another_expert_is_found_out(root: Path, layout: Layout) -> None:
    def shift(parameter: Parameter) -> Parameter:
        first, second, *rest = parameter.pieces
        return replace(
            parameter, pieces=(replace(first, scale=second.scale), replace(second, scale=first.scale), *rest)
        )

    broken = changed(read_base(root / "mixtral"), "model.layers.1.mlp.experts.down_proj", shift)
    with pytest.raises(RunError, match=r"model\.layers\.1\.mlp\.experts\.down_proj is not what"):
        load(broken, layout)


@IN_BOTH
def test_two_experts_in_each_others_place_are_found_out(root: Path, layout: Layout) -> None:
    """Fused experts have one tensor of scales: here the values of two experts are exchanged after loading."""
    checkpoint = read_base(root / "published")
    model, _ = load(checkpoint, layout)
    targets = unique_tensors(model)
    experts = targets["model.layers.0.mlp.experts.gate_up_proj"].data
    experts[[2, 5]] = experts[[5, 2]]
    wrong, _ = certificate.check(targets, checkpoint, 0, fp8.fp8_weights(model))
    assert [problem.split()[0] for problem in wrong] == ["model.layers.0.mlp.experts.gate_up_proj"]


@IN_BOTH
def test_each_tensor_and_each_expert_is_looked_at(root: Path, layout: Layout) -> None:
    checkpoint = read_base(root / "published")
    model, _ = load(checkpoint, layout)
    targets, held = unique_tensors(model), fp8.fp8_weights(model)
    assert certificate.check(targets, checkpoint, 0, held)[0] == []
    for name, part in parts(targets):
        kept = part.clone()
        if part.dtype == torch.uint8:
            part.bitwise_xor_(1)
        else:
            part.mul_(1.0078125)  # one unit in the last place of BF16
        wrong, _ = certificate.check(targets, checkpoint, 0, held)
        assert [problem.split()[0] for problem in wrong] == [name]
        part.copy_(kept)


def test_each_scale_is_looked_at(root: Path) -> None:
    """All of them: a block's scale is wrong for rows that no sample may hit."""
    checkpoint = read_base(root / "blocks")
    model, _ = load(checkpoint, HELD)
    targets, held = unique_tensors(model), fp8.fp8_weights(model)
    assert certificate.check(targets, checkpoint, 0, held)[0] == []
    for name in [name for name in held if "layers.1." not in name]:
        scale = held[name].scale
        for place in {(0,) * scale.ndim, tuple(size - 1 for size in scale.shape)}:
            kept = scale[place].clone()
            scale[place] = kept * (1 + 2**-20)
            wrong, _ = certificate.check(targets, checkpoint, 0, held)
            assert len(wrong) == 1
            assert name in wrong[0]
            scale[place] = kept


def test_what_is_not_stored_in_fp8_can_not_be_held_so(root: Path) -> None:
    with pytest.raises(UserError, match=r"layout\.base_dtype: llama is not stored in FP8.*\n.*\n.*base_dtype: bf16"):
        load(read_base(root / "llama"), HELD)


def test_a_parameter_stored_in_fp8_in_part_is_refused_by_name(root: Path, tmp_path: Path) -> None:
    """One expert of a stack in 16 bits: loaded in 16 bits it is right, held in FP8 it can't be said."""

    def one_in_16_bits(stored: dict[str, torch.Tensor]) -> None:
        key = "model.layers.0.block_sparse_moe.experts.3.w2.weight"
        stored[key] = stored[key].to(torch.bfloat16)
        del stored[f"{key}_scale_inv"]
        stored.pop(f"{key.removesuffix('weight')}activation_scale", None)

    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((root / "mixtral" / file).read_bytes())
    damage(tmp_path, one_in_16_bits)
    checkpoint = read_base(tmp_path)
    load(checkpoint, ALONE)
    with pytest.raises(UserError, match=r"model\.layers\.0\.mlp\.experts\.down_proj is stored in more than one dtype"):
        load(checkpoint, HELD)


def parts(targets: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of two layers' worth of kinds, experts one by one."""
    for name, tensor in targets.items():
        if "layers.1." in name:
            continue
        yield from ((name, one) for one in (tensor.data if tensor.ndim == 3 else [tensor.data]))


def test_a_gap_in_a_parameter_is_seen(root: Path) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    broken = changed(read_base(root / "mixtral"), name, lambda p: replace(p, pieces=p.pieces[:-1]))
    assert any(problem.startswith(name) for problem in incomplete(broken))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_code_is_decoded_as_torch_does(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).reshape(4, 64)
    assert torch.equal(decode(codes).nan_to_num(-1.5), codes.float().nan_to_num(-1.5))


@pytest.mark.parametrize(
    ("boxes", "exact"),
    [
        ([((0, 2), (0, 3)), ((2, 4), (0, 3))], True),
        ([((0, 2), (0, 1)), ((0, 2), (1, 3)), ((2, 4), (0, 3))], True),
        ([((0, 2), (0, 3)), ((3, 4), (0, 3))], False),
        ([((0, 2), (0, 3)), ((1, 4), (0, 3))], False),
        ([((0, 4), (0, 3)), ((0, 4), (0, 3))], False),
        ([((0, 5), (0, 3))], False),
    ],
)
def test_tiling(boxes: list[Any], exact: bool) -> None:
    assert tiles(boxes, (4, 3)) == exact


@given(data=st.data())
def test_any_box_is_read_by_its_runs_and_cut_into_chunks(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    ends = [sorted(data.draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True))) for n in shape]
    box = tuple((start, stop) for start, stop in ends)
    stored = torch.arange(math.prod(shape), dtype=torch.int32).reshape(shape)
    wanted = stored[tuple(slice(*extent) for extent in box)]
    flat = stored.flatten()
    got = [flat[skip // 4 : (skip + length) // 4] for skip, length in runs(shape, box, 4)]
    assert torch.equal(torch.cat(got), wanted.flatten())
    assert len(got) <= math.prod(wanted.shape[:-1])
    limit = data.draw(st.integers(1, 40))
    cut = list(chunks(box, limit))
    assert all(math.prod(b - a for a, b in part) <= limit for part in cut)
    assert sum(math.prod(b - a for a, b in part) for part in cut) == wanted.numel()
    assert not any(intersection(one, other) for one, other in itertools.combinations(cut, 2))


def test_large_matrices_are_converted_in_parts(root: Path) -> None:
    assert len(list(chunks(((0, 16), (0, 2048), (0, 1024)), AT_ONCE))) == 32


def test_the_certificate_accounts_for_everything(root: Path) -> None:
    checkpoint = read_base(root / "published")
    model, made = load(checkpoint, ALONE)
    written = json.loads(json.dumps(asdict(made)))
    assert {"parameters", "loaded", "unread", "checked", "ranks"} <= written.keys()
    assert model.config.name_or_path == str(root / "published")
    assert written["loaded"] == len(written["parameters"]) == len(list(model.parameters()))
    by_name = {each["name"]: each for each in written["parameters"]}
    assert by_name["model.layers.1.mlp.experts.gate_up_proj"] == {
        "name": "model.layers.1.mlp.experts.gate_up_proj",
        "shape": [8, 64, 64],
        "part": "experts",
        "dtype": "bfloat16",
        "sources": [
            {
                "file": "model.safetensors",
                "key": f"{EXPERTS}.gate_up_proj",
                "dtype": "F8_E4M3",
                "scale": f"{EXPERTS}.gate_up_proj_scale_inv",
            }
        ],
    }
    sources = [source for each in written["parameters"] for source in each["sources"]]
    used = {source["key"] for source in sources} | {source["scale"] for source in sources if source["scale"]}
    unread = {each["key"] for each in written["unread"]}
    stored = load_file(root / "published" / "model.safetensors").keys()
    assert used | unread == stored
    assert not used & unread
    assert {each["why"] for each in written["unread"]} == {
        "vision part",
        "scale of activations: weights are converted, activations are not quantised",
    }
    (rank,) = written["ranks"]
    assert rank["bytes_read"] == sum(stored_bytes(root / "published", key) for key in used)
    assert rank["peak_rss_bytes"] > rank["rss_before_bytes"] > 0


def stored_bytes(directory: Path, key: str) -> int:
    return int(load_file(directory / "model.safetensors")[key].nbytes)
