"""Exports that go wrong: each fault is planted, and must be reported."""

from __future__ import annotations

import importlib
import json
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from windlass import cli, tiny
from windlass.errors import RunError, UserError
from windlass.export import export, push
from windlass.export.deltas import read_deltas
from windlass.export.merge import plan_merge, write_merge
from windlass.export.proof import prove_files
from windlass.export.source import base_of, choose_adapter
from windlass.model import Stored, read_base
from windlass.model.files import read_header

test_export = importlib.import_module("test_export")  # the file next to this one
pytestmark = [
    pytest.mark.xdist_group("export"),
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*_pattern keys did not match any targeted module:RuntimeWarning"),
]
LAYER = "language_model.model.layers.1"
O_PROJ, DOWN = f"{LAYER}.self_attn.o_proj.weight", f"{LAYER}.mlp.experts.down_proj"
silent = test_export.silent


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The published layout: base, adapter, and right merges of both dtypes, to be damaged in copies."""
    root: Path = test_export.make(tmp_path_factory.mktemp("faults"), "published")
    for dtype in ("bf16", "fp8"):
        merge(root, root / dtype, dtype)
    yield root
    shutil.rmtree(root)


def merge(root: Path, to: Path, dtype: str | None = None) -> dict[str, Any]:
    return export(root / "adapter", to, merge=True, dtype=dtype, say=silent).record


def stored(folder: Path, key: str) -> Stored:
    headers = (read_header(path) for path in sorted(folder.glob("model*.safetensors")))
    return next(header[key] for header in headers if key in header)


def tensor(folder: Path, key: str) -> Tensor:
    return load_file(stored(folder, key).file)[key]


def overwrite(folder: Path, key: str, values: Tensor) -> None:
    place = stored(folder, key)
    with place.file.open("r+b") as file:
        file.seek(place.start)
        file.write(values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


# Faults in a merged model: each gets the folder with base and adapter, the copy to damage, and its dtype.


def lose_tensor(_made: Path, copy: Path, _dtype: str) -> None:
    path = stored(copy, O_PROJ).file
    kept = {name: value for name, value in load_file(path).items() if name != O_PROJ}
    save_file(kept, path, metadata={"format": "pt"})


def flip_bit(key: str) -> Callable[[Path, Path, str], None]:
    def fault(_made: Path, copy: Path, _dtype: str) -> None:
        place = stored(copy, key)
        with place.file.open("r+b") as file:
            file.seek(place.end - 1)
            last = file.read(1)
            file.seek(place.end - 1)
            file.write(bytes([last[0] ^ 1]))

    return fault


def forget_adapter(made: Path, copy: Path, dtype: str) -> None:
    """The weight of the base instead of the merged one."""
    base, scale = tensor(made / "base", O_PROJ), f"{O_PROJ}_scale_inv"
    if dtype == "fp8":
        overwrite(copy, scale, tensor(made / "base", scale))
    else:
        base = (base.float() * tensor(made / "base", scale).float()).bfloat16()
    overwrite(copy, O_PROJ, base)


def swap_packing(wrong: str) -> Callable[[Path, Path, str], None]:
    """A merged with rank before expert, or B with expert before rank: plausible weights, and all wrong."""

    def fault(made: Path, copy: Path, dtype: str) -> None:
        factors = load_file(made / "adapter" / "adapter_model.safetensors")
        a, b = (factors[f"base_model.model.model.layers.1.mlp.experts.lora_{which}.weight"] for which in "AB")
        experts = 8
        a = a.view(-1, experts, a.shape[1]).transpose(0, 1) if wrong == "A" else a.view(experts, -1, a.shape[1])
        b = b.view(b.shape[0], experts, -1) if wrong == "B" else b.view(b.shape[0], -1, experts).transpose(1, 2)
        delta = torch.einsum("oer,eri->eoi", b, a) * (8 / 2)  # alpha 8, and rank 2 by the case's rank_pattern
        values = tensor(made / "base", DOWN).float() * tensor(made / "base", f"{DOWN}_scale_inv").float() + delta
        new = tensor(copy, f"{DOWN}_scale_inv").float() if dtype == "fp8" else torch.ones(())
        overwrite(copy, DOWN, (values / new).to(torch.float8_e4m3fn if dtype == "fp8" else torch.bfloat16))

    return fault


def keep_old_scale(made: Path, copy: Path, _dtype: str) -> None:
    """The weight outgrew the base's scale: the case's adapter is large."""
    old = tensor(made / "base", f"{DOWN}_scale_inv")
    assert not torch.equal(tensor(copy, f"{DOWN}_scale_inv"), old)
    overwrite(copy, f"{DOWN}_scale_inv", old)


UNTOUCHED = (
    "vision_tower.transformer.layers.0.attention.q_proj.weight",
    f"{LAYER}.input_layernorm.weight",
    f"{LAYER}.mlp.shared_experts.up_proj.weight",
)
FAULTS: list[tuple[str, Callable[[Path, Path, str], None], str]] = [
    *(
        (dtype, lose_tensor, f"the files disagree about which file holds a tensor (1): {O_PROJ}")
        for dtype in ("bf16", "fp8")
    ),
    *(("fp8", flip_bit(key), f"{key} is not byte-equal to the base's, though not adapted") for key in UNTOUCHED),
    *((dtype, forget_adapter, "self_attn.o_proj") for dtype in ("bf16", "fp8")),
    *((dtype, swap_packing(which), "experts.down_proj") for dtype in ("bf16", "fp8") for which in "AB"),
    ("fp8", keep_old_scale, "experts.down_proj"),
]


@pytest.mark.parametrize(("dtype", "fault", "message"), FAULTS)
def test_a_damaged_merge_is_not_proven(
    made: Path, tmp_path: Path, dtype: str, fault: Callable[[Path, Path, str], None], message: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(made / dtype, copy)
    assert prove(made, copy, dtype) == []  # the faults must be able to fail
    fault(made, copy, dtype)
    deviations = prove(made, copy, dtype)
    assert deviations
    assert all(message in deviation for deviation in deviations), deviations


def prove(made: Path, copy: Path, dtype: str) -> list[str]:
    source = choose_adapter(made / "adapter")
    base = base_of(source)
    deltas = read_deltas(source, base)
    plan = plan_merge(base, deltas, copy, dtype)
    return prove_files(base, deltas, plan, copy, source.weights, lambda _: None).deviations


def test_a_deviation_is_an_error_and_deletes_nothing(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_badly(*arguments: Any) -> None:
        write_merge(*arguments)
        flip_bit(UNTOUCHED[0])(made, tmp_path / "out", "")
        (tmp_path / "out" / "tokenizer.json").write_text("{}")

    monkeypatch.setattr("windlass.export.write_merge", write_badly)
    with pytest.raises(RunError, match=r"not base \+ adapter: tokenizer.json is not the base's") as raised:
        merge(made, tmp_path / "out")
    assert "nothing was deleted" in raised.value.problems[0].hint
    record = json.loads((tmp_path / "out" / "export.json").read_text())
    assert (len(record["deviations"]), record["logits"]) == (1, {"skipped": "the files are wrong"})


def test_a_block_of_zeros_stays_one(tmp_path: Path) -> None:
    """Its scale is zero, and where the adapter adds nothing either, the new one as well: no 0 / 0."""
    root = test_export.make(tmp_path, "blocks")
    key = "model.layers.1.self_attn.q_proj.weight"
    place = stored(root / "base", key)
    weights = load_file(place.file)
    side = min(128, weights[key].shape[0])
    weights[key].view(torch.uint8)[:side, :128] = 0
    weights[f"{key}_scale_inv"][0, 0] = 0
    save_file(weights, place.file, metadata={"format": "pt"})
    path = root / "adapter" / "adapter_model.safetensors"
    factors = load_file(path)
    factors["base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"][:side] = 0
    save_file(factors, path, metadata={"format": "pt"})
    assert merge(root, root / "merged")["deviations"] == []
    merged = tensor(root / "merged", key).float()
    assert merged.isfinite().all()
    assert not merged[:side, :128].any()
    assert tensor(root / "merged", f"{key}_scale_inv")[0, 0] == 0


@pytest.mark.parametrize("merging", [False, True])
def test_an_adapter_of_another_model(made: Path, tmp_path: Path, merging: bool) -> None:
    others: tuple[dict[str, Any], ...] = ({"hidden": 96}, {"layers": 1}, {"family": "mistral"})
    for number, other in enumerate(others):
        base = tiny.write(tmp_path / str(number), tokenizer=False, **other)
        with pytest.raises(UserError, match="does not fit this model"):
            export(made / "adapter", tmp_path / "out", merge=merging, base=str(base), say=silent)
    assert not (tmp_path / "out").exists()


def lose_half(factors: dict[str, Tensor]) -> None:
    del factors[next(key for key in factors if key.endswith("o_proj.lora_B.weight"))]


def add_embedding(factors: dict[str, Tensor]) -> None:
    factors["base_model.model.model.embed_tokens.lora_embedding_A"] = torch.zeros(4, 512)


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        ({"peft_type": "IA3"}, None, "of the kind IA3"),
        ({"init_lora_weights": "pissa"}, None, "changed the base"),
        ({"use_dora": True}, None, "use_dora is True in adapter_config.json, and not in the weights"),
        ({"r": 16}, None, "has rank 4, and adapter_config.json has 16"),
        ({"layer_replication": [[0, 2], [1, 2]]}, None, "layer_replication"),
        ({"fan_in_fan_out": True}, None, "fan_in_fan_out"),
        ({}, add_embedding, "lora_embedding_A"),
        ({}, lose_half, "not a pair of matrices"),
    ],
)
def test_what_would_merge_wrongly_is_refused(
    made: Path,
    tmp_path: Path,
    config: dict[str, Any],
    change: Callable[[dict[str, Tensor]], None] | None,
    message: str,
) -> None:
    adapter = tmp_path / "changed"
    shutil.copytree(made / "adapter", adapter)
    given = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(given | config))
    if change:
        factors = load_file(adapter / "adapter_model.safetensors")
        change(factors)
        save_file(factors, adapter / "adapter_model.safetensors")
    with pytest.raises(UserError, match=message):
        export(adapter, tmp_path / "out", merge=True, say=silent)
    assert not (tmp_path / "out").exists()


def test_dtypes_and_folders_that_can_not_be(made: Path, tmp_path: Path) -> None:
    adapter, out = made / "adapter", tmp_path / "out"
    plain = str(tiny.write(tmp_path / "plain", "mistral4", quantization="none", tokenizer=False))
    with pytest.raises(UserError, match="is not quantised"):
        export(adapter, out, merge=True, dtype="fp8", base=plain, say=silent)
    shutil.copytree(made / "fp8", tmp_path / "copy")
    with pytest.raises(UserError, match="holds a merged model"):
        merge(made, tmp_path / "copy", "bf16")
    with pytest.raises(UserError, match="holds a merged model"):
        export(adapter, tmp_path / "copy", say=silent)
    assert not (tmp_path / "copy" / "adapter_config.json").exists()
    with pytest.raises(UserError, match="the base model's folder"):
        merge(made, made / "base")
    taken, file = tmp_path / "taken", tmp_path / "file"
    taken.mkdir()
    for place in (taken / "thesis.tex", file):
        place.write_text("years of work")
    for merging in (True, False):
        with pytest.raises(UserError, match="'int4'"):
            export(adapter, out, merge=merging, dtype="int4", say=silent)
        with pytest.raises(UserError, match="1 other files"):
            export(adapter, taken, merge=merging, say=silent)
        with pytest.raises(UserError, match="can't be written: Not a directory"):
            export(adapter, file / "inside", merge=merging, say=silent)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """As on a disk that is full beyond so many bytes of a file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_an_interrupted_merge_begins_anew(made: Path, tmp_path: Path) -> None:
    to = tmp_path / "out"
    largest = max(path.stat().st_size for path in (made / "base").glob("model-*"))
    with largest_file(largest - 1), pytest.raises(RunError, match="File too large") as caught:
        merge(made, to)
    assert "make room and repeat the command" in caught.value.problems[0].hint
    assert not (to / "config.json").exists()  # nothing that could be taken for a model

    @contextmanager
    def interrupted(_stage: str, size: int) -> Iterator[Callable[[int], None]]:
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            if done > size / 2:
                raise KeyboardInterrupt

        yield advance

    with pytest.raises(KeyboardInterrupt):
        export(made / "adapter", to, merge=True, dtype="bf16", say=silent, progress=interrupted)
    assert not (to / "config.json").exists()
    merge(made, to)
    assert sorted(path.name for path in to.iterdir()) == sorted(path.name for path in (made / "fp8").iterdir())
    for path in to.glob("model*"):
        assert path.read_bytes() == (made / "fp8" / path.name).read_bytes(), path.name
    # The rounded adapter is written by safetensors, which has an error of its own.
    with largest_file(4000), pytest.raises(UserError, match="File too large"):
        export(made / "adapter", tmp_path / "adapter", dtype="bf16", say=silent)


def test_no_room_is_known_before_anything_is_written(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=1000))
    with pytest.raises(UserError, match="GiB are free there"):
        merge(made, tmp_path / "out")


def test_a_hub_that_is_not_there(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    for name, words in (("org/name", "can't be reached"), ("no name/at all", "organisation/name")):
        with pytest.raises(UserError, match=words) as caught:
            push(made / "fp8", name, say=silent)
        assert "verysecret" not in str(caught.value)


def test_the_commands(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = [str(made / "adapter"), "--to", str(tmp_path / "out"), "--merge", "--serve-check", "--json"]
    with pytest.raises(SystemExit, match="0"):
        cli.main(["export", *run])
    record = json.loads(capsys.readouterr().out)
    assert record["deviations"] == []
    assert record["served"]["commands"]["merged model"].startswith("vllm serve")
    with pytest.raises(SystemExit, match="0"):
        cli.main(["generate", str(tmp_path / "out"), "--prompt", "import", "--tokens", "3"])
    assert read_base(tmp_path / "out").wrapper
