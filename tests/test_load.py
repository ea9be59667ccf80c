"""The loader's promise: exactly the stored weights are trained, in any layout, or the run doesn't start."""

import importlib
import itertools
import json
import math
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from windlass import tiny
from windlass.errors import RunError, UserError
from windlass.model import Base, Piece, Stored, read_base
from windlass.model.files import DIGEST, PUBLISHED
from windlass.plan.layout import Layout
from windlass.train import parallel
from windlass.train.load import list_unique_tensors, load_base
from windlass.weights import certificate
from windlass.weights.digest import MODULUS, digest_box
from windlass.weights.quantized import dequantize, list_quantized_params
from windlass.weights.reading import byte_ranges, intersect, split_box, to_float32
from windlass.weights.same_base import digest_files

load_ranks = importlib.import_module("load_ranks")  # beside this file; also run by every rank
pytestmark = pytest.mark.xdist_group("load")
ALONE = Layout(name="resident", reason="test", nodes=1, gpus_per_node=1, shard=1, precision="no")
FP8 = replace(ALONE, base_dtype="fp8")
IN_BOTH = pytest.mark.parametrize("layout", [ALONE, FP8], ids=["in 16 bits", "in FP8"])
EXPERTS = "language_model.model.layers.1.mlp.experts"
STACK = "model.layers.0.mlp.experts.down_proj"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints")
    for name in ("published", "blocks", "llama", "mixtral"):
        tiny.write_model(directory / name, tokenizer=False, **load_ranks.CHECKPOINTS[name])
    for name in load_ranks.QUANTIZED:
        load_ranks.write_decoded(directory / name, directory / f"{name}-nf4", "nf4")
    tiny.write_model(
        directory / "bnb", "mixtral", quantization="nf4", moe_intermediate=64, intermediate=64, tokenizer=False
    )
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    tiny.write_family(directory / "oss", "gpt_oss", config=sizes, layers=2, quantized={"quant_method": "mxfp4"})
    for name, (family, scheme) in load_ranks.COMPRESSED.items():
        tiny.write_model(directory / name, family, quantization=scheme, tokenizer=False, layers=2)
    for name, kind in load_ranks.PUBLISHED:
        load_ranks.write_unpacked(directory / name, directory / f"{name}-{kind}", kind)
    return directory


@pytest.fixture(scope="module")
def every(root: Path) -> Path:
    for name, options in load_ranks.CHECKPOINTS.items():
        if not (root / name).exists():
            tiny.write_model(root / name, tokenizer=False, **options)
        load_ranks.dequantize(root / name, root / f"{name}-true", load_ranks.DTYPE.get(name, torch.bfloat16))
    tiny.write_family(root / "falcon_h1", "falcon_h1", config={"ssm_multipliers": [0.5, 0.25, 2.0, 3.0, 0.125]})
    tiny.write_model(root / "large", tokenizer=False, **load_ranks.LARGE)
    return root


@pytest.mark.fault(
    "nodes whose copies of the base differ",
    "`windlass train`",
    "copies of the base model that are not equal: model.safetensors differs",
)
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.prove)])
def test_every_case_on_several_ranks(ranks: int, every: Path, tmp_path: Path) -> None:
    """Checkpoints x layouts, faults and training, in one start of these processes."""
    assert count_passed(ranks, every, tmp_path / "out") >= 35
    assert load_ranks.MIXED == "have copies of the base model that are not equal: model.safetensors differs"


@pytest.mark.prove
def test_training_on_a_base_of_few_bits_equals_its_dequantized_weights(root: Path, tmp_path: Path) -> None:
    assert count_passed(2, root, tmp_path / "out", "later") == len(load_ranks.LATER)


def count_passed(ranks: int, root: Path, out: Path, *later: str) -> int:
    """Return how many cases passed in all ranks: all."""
    command = [warm.python(), "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*command, str(Path(__file__).with_name("load_ranks.py")), str(root), str(out), *later],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads(out.read_text())
    failed = {case: why for case, why in results.items() if why}
    assert not failed, "\n".join(f"{case}\n{why}" for case, why in failed.items())
    return len(results)


# --- in one process: the faults that files or a reader of headers may have ---


def damaged(root: Path, to: Path, change: Callable[[dict[str, Tensor]], None], name: str = "published") -> Path:
    """Return a copy of a checkpoint with changed tensors."""
    stored = load_file(root / name / "model.safetensors")
    change(stored)
    save_file(stored, to / "model.safetensors", metadata={"format": "pt"})
    (to / "config.json").write_bytes((root / name / "config.json").read_bytes())
    return to


@pytest.mark.parametrize(("name", "kind"), [*((name, "nf4") for name in load_ranks.QUANTIZED), *load_ranks.PUBLISHED])
def test_4_bit_model_equals_its_dequantized_weights(root: Path, name: str, kind: str) -> None:
    """Loss and gradient in float32; several ranks are in load_ranks.py."""
    found = []
    for folder, base_dtype in ((name, kind), (f"{name}-{kind}", "bf16")):
        model, _ = load_base(read_base(root / folder), replace(ALONE, base_dtype=base_dtype), dtype=torch.float32)
        embedded = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        loss = model(inputs_embeds=embedded, labels=torch.arange(32).view(2, 16)).loss
        found.append((loss.detach(), *torch.autograd.grad(loss, embedded)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6 * float(other.abs().max()))


@pytest.mark.parametrize(("name", "kind"), load_ranks.PUBLISHED)
def test_published_4_bit_weights_are_read_exactly(root: Path, name: str, kind: str) -> None:
    dtype = torch.bfloat16
    base, true = read_base(root / name), read_base(root / f"{name}-{kind}")
    wanted = list_unique_tensors(load_base(true, ALONE, dtype=dtype)[0])
    for base_dtype in ("bf16", kind):
        model, made = load_base(base, replace(ALONE, base_dtype=base_dtype), dtype=dtype)
        weights = list_quantized_params(model)
        assert made["base_digest"] == digest_files(base)
        assert bool(weights) == (base_dtype == kind)
        for key, tensor in list_unique_tensors(model).items():
            if key in weights:
                coding = weights[key].format
                values = dequantize(*coding.parts(tensor, weights[key].scale), coding, dtype)
                tensor = values.transpose(-1, -2) if coding.transposed else values
            assert torch.equal(tensor, wanted[key]), (key, base_dtype)
    parameter = next(p for p in base.parameters if p.name in weights)
    targets = list_unique_tensors(model)
    targets[parameter.name][..., 1] ^= 16
    (wrong,) = certificate.check_parameters(targets, base, 0, weights)[0]
    assert re.fullmatch(rf"{parameter.name} is not what '.*' of model.safetensors holds, in {kind}", wrong)


ODD = "model.layers.0.self_attn.q_proj.weight"
NV = "language_model.model.layers.0.self_attn.o_proj.weight"


def negate(scales: Tensor) -> Tensor:
    return put(scales, -float(scales[-1, -1]))


def erase(scales: Tensor) -> Tensor:
    return put(scales, 0)


def put(scales: Tensor, value: float) -> Tensor:
    """Put this scale at the end of the last row, which no sample of rows needs to meet."""
    changed = scales.float()
    changed[-1, -1] = value
    return changed.to(scales.dtype)


SPOILT_IN_4_BITS: dict[str, tuple[str, str, Callable[[Tensor], Tensor], str]] = {
    "another block": ("bnb", f"{ODD}.quant_state.bitsandbytes__nf4", lambda old: old.flip(0), "does not describe its"),
    "another table": ("bnb", f"{ODD}.quant_map", lambda old: old * 2, "does not describe its weight"),
    "no number": ("bnb", f"{ODD}.nested_absmax", lambda old: old * math.nan, "scales that are not finite"),
    "infinite": ("oss", f"{STACK}_scales", lambda old: old | 255, "scales that are not finite numbers"),
    "a scale below zero": ("nv", f"{NV}_scale", negate, f"{NV}_scale' contains scales below zero"),
    "a factor below zero": ("nv", f"{NV}_global_scale", torch.neg, f"{NV}_global_scale' contains scales below zero"),
    "a scale of zero": ("nv", f"{NV}_scale", erase, f"{NV}_packed' contains codes that are not zero"),
    "an infinite scale": ("words", f"{ODD}_scale", lambda old: old / 0, f"{ODD}_scale' contains scales that are not"),
    "a shifted scale below zero": ("shifted", f"{ODD}_scale", negate, f"{ODD}_scale' contains scales below zero"),
    "nested below zero": ("bnb", f"{ODD}.nested_absmax", torch.neg, f"{ODD}.nested_absmax' contains scales below"),
    "rows cut": ("oss", f"{STACK}_blocks", lambda old: old[:, 1:].clone(), "weights in 4 bits that do not fit"),
    "a factor of zero": ("nv", f"{NV}_global_scale", lambda old: old * 0, "scales that are not finite numbers"),
    "zeros cut": ("shifted", f"{ODD}_zero_point", lambda old: old[1:].clone(), "weights in 4 bits that do not fit"),
}


@pytest.mark.fault(
    "a scale below zero of codes in NVFP4, NF4 or INT4 with zero points",
    "`windlass train`",
    "contains scales below zero",
)
@pytest.mark.fault(
    "a scale of zero over codes in NVFP4 or INT4", "`windlass train`", "contains codes that are not zero"
)
@pytest.mark.parametrize("case", SPOILT_IN_4_BITS)
def test_4_bits_that_are_not_what_was_published_are_refused(root: Path, tmp_path: Path, case: str) -> None:
    name, key, change, why = SPOILT_IN_4_BITS[case]

    def spoil(stored: dict[str, Tensor]) -> None:
        stored[key] = change(stored[key])

    with pytest.raises(UserError, match=why):
        load_base(read_base(damaged(root, tmp_path, spoil, name)), ALONE)


def test_scales_that_publishers_write_are_read(root: Path, tmp_path: Path) -> None:
    """AutoRound's int4 has signs in its scales; blocks of zeros have any scale."""

    def turn(stored: dict[str, Tensor]) -> None:
        stored[f"{ODD}_scale"] = negate(stored[f"{ODD}_scale"])

    def empty(stored: dict[str, Tensor]) -> None:
        stored[f"{NV}_packed"][-1, -8:] = torch.tensor([0x00, 0x08, 0x80, 0x88, 0, 0, 0, 0])
        stored[f"{NV}_scale"] = erase(stored[f"{NV}_scale"])

    for name, change in (("words", turn), ("nv", empty)):
        load_base(read_base(damaged(root, tmp_path, change, name)), ALONE)


def odd(key: str, place: tuple[int, ...], value: float) -> Callable[[dict[str, Tensor]], None]:
    def change(stored: dict[str, Tensor]) -> None:
        values = stored[f"language_model.model.{key}"].float()
        values[place] = value
        stored[f"language_model.model.{key}"] = values.to(stored[f"language_model.model.{key}"].dtype)

    return change


HELD, LONE = "layers.0.mlp.experts.down_proj", "layers.0.self_attn.o_proj.weight"


@IN_BOTH
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (odd("embed_tokens.weight", (7, 3), math.nan), "embed_tokens.weight' contains values that are not finite"),
        (odd(HELD, (3, 5, 1), math.nan), "down_proj' contains values that are not finite"),
        (odd(f"{HELD}_scale_inv", (3, 0, 0), -1e-3), "down_proj_scale_inv' contains scales below"),
        (odd(f"{LONE}_scale_inv", (), math.nan), "o_proj.weight_scale_inv' contains scales that"),
        (odd(f"{HELD}_scale_inv", (3, 0, 0), 0), "down_proj' contains codes that are not zero"),
    ],
    ids=["NaN", "NaN code", "negative scale", "NaN scale", "zero scale"],
)
def test_weights_that_are_no_finite_numbers_stop_the_run_by_name(
    root: Path, tmp_path: Path, layout: Layout, change: Callable[[dict[str, Tensor]], None], named: str
) -> None:
    """Also in rows that the certificate doesn't sample and no token may ever look up."""
    with pytest.raises(UserError, match=named):
        load_base(read_base(damaged(root, tmp_path, change)), layout)


@pytest.mark.takes("digests a base after each change")
def test_base_digest_covers_every_byte_and_its_place(root: Path, tmp_path: Path) -> None:
    """The same from files alone, in 16 bits and FP8; different after any change. Layouts are in load_ranks.py."""
    base = read_base(damaged(root, tmp_path, lambda _: None))
    expected = digest_files(base)
    assert {load_base(base, layout)[1]["base_digest"] for layout in (ALONE, FP8)} == {expected}
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    pieces = [piece for parameter in base.parameters for piece in parameter.pieces]
    found = {expected}
    for one in [one for piece in pieces for one in (piece.stored, piece.scale) if one]:
        for place in {one.start, (one.start + one.end) // 2, one.end - 1}:
            file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            changed = digest_files(base)
            assert changed not in found, one.key
            found.add(changed)

    def exchange(stored: dict[str, Tensor]) -> None:
        scale = stored["language_model.model.layers.0.mlp.experts.down_proj_scale_inv"]
        assert not torch.equal(scale[2], scale[5])
        scale[[2, 5]] = scale[[5, 2]]

    damaged(root, tmp_path, exchange)
    assert digest_files(base) not in found


def test_signs_and_places_of_rows_count_in_the_digest() -> None:
    """Sums lose the highest bits of words first. Parts add up to the full digest, wherever they are cut."""
    for shape in ((1100, 24), (2, 700, 8), (3000,)):
        values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
        stored = Stored("w", "BF16", shape, Path("f"), 0, values.nbytes)

        def digest(changed: Tensor, box: Any, stored: Stored = stored, file: Tensor = values) -> int:
            def read(_: Stored, box: Any, into: Tensor) -> None:
                into.copy_(file[tuple(slice(*span) for span in box)])

            return digest_box(stored, box, changed[tuple(slice(*span) for span in box)].contiguous(), read)

        box, rows = [(0, size) for size in shape], max(len(shape) - 2, 0)
        swapped, few = values.clone(), values.clone()
        swapped[[0, 1]] = swapped[[1, 0]]
        few.view(-1)[[70, 75]] *= -1
        others = [digest(each, box) for each in (values, swapped, few)]
        assert len(set(others)) == 3
        cuts = [0, shape[rows] // 3, shape[rows] // 2, shape[rows]]
        parts = [digest(values, [*box[:rows], (a, b), *box[rows + 1 :]]) for a, b in itertools.pairwise(cuts)]
        assert sum(parts) % MODULUS == others[0], shape


def test_a_file_cut_short_after_its_header_was_read_stops_the_run(root: Path, tmp_path: Path) -> None:
    base = read_base(damaged(root, tmp_path, lambda _: None))
    last = max((piece.stored for p in base.parameters for piece in p.pieces), key=lambda stored: stored.end)
    with (tmp_path / "model.safetensors").open("r+b") as opened:
        opened.truncate(last.end - 10)
    with pytest.raises(UserError, match=f"ends within '{last.key}'"):
        load_base(base, ALONE)


Pieces = tuple[Piece, ...]
# What a faulty reader of headers would make of the experts' pieces
FAULTS: dict[str, tuple[Callable[[Pieces], Pieces], str]] = {
    "without scales": (
        lambda all_: tuple(replace(p, scale=None) for p in all_),
        r"w2\.weight' is FP8 and has no scale",
    ),
    "a piece less": (lambda all_: all_[:-1], f"{STACK} was not read"),
    "two in one place": (lambda all_: (all_[0], replace(all_[1], offset=all_[0].offset), *all_[2:]), "is not what"),
    "scales exchanged": (
        lambda all_: (replace(all_[0], scale=all_[1].scale), replace(all_[1], scale=all_[0].scale), *all_[2:]),
        f"{STACK} is not what",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_header_reader_is_detected(root: Path, fault: str) -> None:
    change, named = FAULTS[fault]
    base = read_base(root / "mixtral")
    parameters = (replace(p, pieces=change(p.pieces)) if p.name == STACK else p for p in base.parameters)
    with pytest.raises(UserError, match=named):
        load_base(replace(base, parameters=tuple(parameters)), FP8)


def write_hole(folder: Path, base: Base, name: str, start: int, length: int) -> None:
    """Overwrite bytes of a stored weight with zeros, from its byte `start` on (or before its end)."""
    stored = next(p for p in base.parameters if p.name == name).pieces[0].stored
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek((stored.end if start < 0 else stored.start) + start)
        file.write(bytes(length))


@pytest.mark.fault("zeros in the middle of a weight", "`windlass train`", "on, where weights should be")
@pytest.mark.fault("zeros at the end of the head", "`windlass train`", "rows of zeros in lm_head.weight")
def test_holes_of_an_interrupted_download_are_named(tmp_path: Path) -> None:
    """An unfinished file of full size: from anywhere in a row on. In rows of padding, zeros are right."""
    sizes: dict[str, Any] = {"hidden": 1024, "heads": 8, "intermediate": 256}
    whole = tiny.write_model(tmp_path / "whole", "llama", tokenizer=False, **sizes)
    down, head = "model.layers.1.mlp.down_proj.weight", "lm_head.weight"  # rows of 512 bytes, and of 2,048
    holes = [(down, 700 * 512 + 100, 5000, 700), (down, -3000, 3000, 1018), (head, 2048 * 9 + 512, 600, 9)]
    for name, start, length, row in (*holes, (head, 5000, 90_000, 2)):
        folder = shutil.copytree(whole, tmp_path / str(start))
        write_hole(folder, read_base(folder), name, start, length)
        found = f"'{name}' has zeros from within row {row} on, where weights should be"
        for layout in (ALONE, replace(ALONE, base_dtype="nf4")):
            with pytest.raises(UserError, match=found):
                load_base(read_base(folder), layout)
    base = read_base(whole)
    assert load_base(base, ALONE, tokens=512)[1]["notes"] == []
    write_hole(whole, base, head, -2048 * 12, 2048 * 12)
    write_hole(whole, base, "model.embed_tokens.weight", 2048 * 7, 2048)
    assert load_base(base, ALONE, tokens=500)[1]["notes"] == [
        "rows of zeros in model.embed_tokens.weight (1): tokens 7, damaged or never trained"
    ]
    notes = load_base(base, ALONE, tokens=512)[1]["notes"]
    assert notes[1] == "rows of zeros in lm_head.weight (12): tokens 500, 501, 502 and 9 more, damaged or never trained"
    write_hole(whole, base, down, 9 * 512 + 100, 5000)
    (whole / PUBLISHED).write_text(json.dumps({DIGEST: digest_files(base)}))  # the publisher's own are taken, and said
    assert "has zeros from within row 9 on" in load_base(base, ALONE)[1]["notes"][0]


DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def paged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which every eighth row of `down_proj`, of 512 bytes, begins where a page of the file does."""
    sizes: dict[str, Any] = {"hidden": 1024, "heads": 8, "intermediate": 256}
    folder = tiny.write_model(tmp_path_factory.mktemp("pages") / "m", "llama", tokenizer=False, **sizes)
    file = folder / "model.safetensors"
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    start = next(p for p in read_base(folder).parameters if p.name == DOWN).pieces[0].stored.start
    header = content[8:end].ljust(-start % 4096 + end - 8)
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])
    return folder


@pytest.mark.fault("zeros that end just within a row", "`windlass train`", "has zeros from within row")
@pytest.mark.parametrize(("start", "length"), [(512 * 16 - 24, 512 * 3 + 24), (512 * 15, 512 * 4 + 24)])
def test_holes_that_end_just_within_a_row_are_named(paged: Path, tmp_path: Path, start: int, length: int) -> None:
    folder = shutil.copytree(paged, tmp_path / "m")
    base = read_base(folder)
    write_hole(folder, base, "model.layers.1.mlp.down_proj.weight", start, length)
    with pytest.raises(
        UserError, match=r"down_proj\.weight' has zeros from within row 1\d on, where weights should be"
    ):
        load_base(base, ALONE)


@pytest.mark.fault(
    "zeros of full rows, as long as pages", "`windlass train`", "has zeros in rows …, where weights should be"
)
def test_holes_of_full_rows_are_known_by_the_pages_of_the_file(paged: Path, tmp_path: Path) -> None:
    for start, length, rows in ((512 * 16, 4096, "16 to 23"), (-(1 << 14), 1 << 14, "992 to 1,023")):
        folder = shutil.copytree(paged, tmp_path / str(start))
        base = read_base(folder)
        write_hole(folder, base, DOWN, start, length)
        for layout in (ALONE, replace(ALONE, base_dtype="nf4")):
            with pytest.raises(UserError, match=f"'{DOWN}' has zeros in rows {rows}, where weights should be"):
                load_base(base, layout)


def test_pruned_neurons_are_no_damage(paged: Path, tmp_path: Path) -> None:
    """Runs that end where no page does, and runs in many matrices."""
    folder = shutil.copytree(paged, tmp_path / "m")
    base = read_base(folder)
    for start, length in ((512 * 17, 4096), (512 * 40, 4608), (512 * 999, 512)):
        write_hole(folder, base, DOWN, start, length)
    assert load_base(base, ALONE)[1]["notes"] == []
    for layer in (0, 1):
        for name in ("mlp.down_proj", "mlp.gate_proj", "mlp.up_proj"):
            write_hole(folder, base, f"model.layers.{layer}.{name}.weight", 1 << 14, 1 << 13)
    (note,) = load_base(base, ALONE)[1]["notes"]
    assert note.startswith("rows of zeros in weights (5), damaged or pruned: ")


def test_zeros_that_are_meant_are_no_damage(tmp_path: Path) -> None:
    """Padded columns and rows, an expert that was never used, a block that begins as nothing, sparse weights."""
    folder = tiny.write_model(tmp_path / "m", "mixtral", tokenizer=False, hidden=512, quantization="none")
    stored = load_file(folder / "model.safetensors")
    layer = "model.layers.0"
    stored[f"{layer}.self_attn.q_proj.weight"][:, 300:] = 0
    stored[f"{layer}.self_attn.q_proj.weight"][400:] = 0
    stored[f"{layer}.self_attn.k_proj.weight"][:, :200] = 0
    sparse = stored[f"{layer}.self_attn.v_proj.weight"]
    sparse *= torch.rand(sparse.shape, generator=torch.Generator().manual_seed(0)) < 0.2
    experts = [key for key in stored if ".experts.3." in key and key.startswith(layer)]
    for key in (*experts, f"{layer}.self_attn.o_proj.weight", f"{layer}.input_layernorm.weight"):
        stored[key].zero_()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    (note,) = load_base(read_base(folder), ALONE)[1]["notes"]
    assert note.startswith("weights of zeros, in full or for the most part (4): ")
    assert f"{layer}.self_attn.o_proj.weight" in note


@pytest.mark.fault("a buffer that holds uninitialized memory", "`windlass train`", "is not what transformers computes")
def test_a_buffer_of_other_values_stops_the_run(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several ranks, one of which has another, are in load_ranks.py."""
    allocate = parallel.allocate

    def poison(model: Any, layout: Layout) -> None:
        allocate(model, layout)
        model.get_buffer("model.rotary_emb.inv_freq")[1] = 0.5

    base = read_base(root / "llama")
    assert load_base(base, ALONE)[1]["checked"]["buffers"] == 2
    monkeypatch.setattr(parallel, "allocate", poison)
    with pytest.raises(RunError, match=r"the buffer model\.rotary_emb\.inv_freq is not what transformers computes"):
        load_base(base, ALONE)


@IN_BOTH
def test_each_tensor_and_each_expert_is_compared(root: Path, layout: Layout) -> None:
    base = read_base(root / "published")
    model, _ = load_base(base, layout)
    targets, in_fp8 = list_unique_tensors(model), list_quantized_params(model)
    assert certificate.check_parameters(targets, base, 0, in_fp8)[0] == []

    by_name = {parameter.name: replace(base, parameters=(parameter,)) for parameter in base.parameters}

    def wrong(of: Base) -> list[str]:
        return [problem.split()[0] for problem in certificate.check_parameters(targets, of, 0, in_fp8)[0]]

    for name, part in parts(targets):
        kept = part.clone()
        if part.dtype == torch.uint8:
            part.bitwise_xor_(1)
        else:
            part.mul_(1.0078125)  # one unit in the last place of BF16
        assert wrong(by_name[name]) == [name]
        part.copy_(kept)
    # Fused experts have one tensor of scales: here the values of two experts are exchanged.
    experts = targets[STACK].data
    experts[[2, 5]] = experts[[5, 2]]
    assert wrong(base) == [STACK]


def parts(targets: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of every kind, experts one by one."""
    for name, tensor in targets.items():
        if "layers.1." not in name:
            yield from ((name, one) for one in (tensor.data if tensor.ndim == 3 else [tensor.data]))


def test_each_scale_is_compared(root: Path) -> None:
    """All scales: a wrong block may be in rows that no sample hits."""
    base = read_base(root / "blocks")
    model, _ = load_base(base, FP8)
    targets, in_fp8 = list_unique_tensors(model), list_quantized_params(model)
    assert certificate.check_parameters(targets, base, 0, in_fp8)[0] == []
    for name in [name for name in in_fp8 if "layers.1." not in name]:
        scale = in_fp8[name].scale
        for place in {(0,) * scale.ndim, tuple(size - 1 for size in scale.shape)}:
            kept = scale[place].clone()
            scale[place] = kept * (1 + 2**-20)
            own = replace(base, parameters=tuple(p for p in base.parameters if p.name == name))
            (wrong,) = certificate.check_parameters(targets, own, 0, in_fp8)[0]
            assert name in wrong
            scale[place] = kept


def test_only_weights_stored_in_fp8_stay_in_fp8(root: Path, tmp_path: Path) -> None:
    """One expert of a stack is stored in 16 bits: loaded in 16 bits it is right, FP8 can't express it."""
    with pytest.raises(UserError, match=r"layout\.base_dtype: llama is not stored in FP8.*\n.*\n.*base_dtype: bf16"):
        load_base(read_base(root / "llama"), FP8)

    def one_in_16_bits(stored: dict[str, Tensor]) -> None:
        key = "model.layers.0.block_sparse_moe.experts.3.w2.weight"
        stored[key] = stored[key].to(torch.bfloat16)
        del stored[f"{key}_scale_inv"]
        stored.pop(f"{key.removesuffix('weight')}activation_scale", None)

    base = read_base(damaged(root, tmp_path, one_in_16_bits, "mixtral"))
    load_base(base, ALONE)
    with pytest.raises(UserError, match=rf"{STACK} is stored in more than one dtype"):
        load_base(base, FP8)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_code_decodes_as_in_torch(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).reshape(4, 64)
    assert torch.equal(to_float32(codes).nan_to_num(-1.5), codes.float().nan_to_num(-1.5))


@given(data=st.data())
def test_any_box_is_read_in_byte_ranges_and_chunks(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    ends = [sorted(data.draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True))) for n in shape]
    box = tuple((start, stop) for start, stop in ends)
    stored = torch.arange(math.prod(shape), dtype=torch.int32).reshape(shape)
    wanted = stored[tuple(slice(*extent) for extent in box)]
    flat = stored.flatten()
    got = [flat[skip // 4 : (skip + length) // 4] for skip, length in byte_ranges(shape, box, 4)]
    assert torch.equal(torch.cat(got), wanted.flatten())
    assert len(got) <= math.prod(wanted.shape[:-1])
    limit = data.draw(st.integers(1, 40))
    cut = list(split_box(box, limit))
    assert all(math.prod(b - a for a, b in part) <= limit for part in cut)
    assert sum(math.prod(b - a for a, b in part) for part in cut) == wanted.numel()
    assert not any(intersect(one, other) for one, other in itertools.combinations(cut, 2))


def test_the_certificate_accounts_for_everything(root: Path) -> None:
    model, made = load_base(read_base(root / "published"), ALONE)
    written = json.loads(json.dumps(made))
    assert {"parameters", "loaded", "unread", "checked", "ranks"} <= written.keys()
    assert model.config.name_or_path == str(root / "published")
    assert written["loaded"] == len(written["parameters"]) == len(list(model.parameters()))
    sources = [source for each in written["parameters"] for source in each["sources"]]
    used = {source["key"] for source in sources} | {source["scale"] for source in sources if source["scale"]}
    unread = {each["key"] for each in written["unread"]}
    stored: dict[str, Any] = load_file(root / "published" / "model.safetensors")
    assert used | unread == stored.keys()
    assert not used & unread
    assert {each["why"] for each in written["unread"]} == {
        "vision part",
        "scale of activations: weights are converted, activations are not quantized",
    }
    (rank,) = written["ranks"]
    assert rank["bytes_read"] == sum(stored[key].nbytes for key in used)
    assert rank["peak_rss_bytes"] > rank["rss_before_bytes"] > 0
