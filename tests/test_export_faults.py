"""Exports that go wrong: each fault is planted, and is told."""

from __future__ import annotations

import importlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from windlass import cli, tiny
from windlass.errors import RunError, UserError
from windlass.export import export
from windlass.model import Stored, read_base
from windlass.model.files import read_header

test_export = importlib.import_module("test_export")  # beside this file
pytestmark = [
    pytest.mark.xdist_group("export"),
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*_pattern keys did not match any targeted module:RuntimeWarning"),
]
PREFIX = "language_model.model.layers.1"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The published layout: base, adapter, and right merges of both dtypes, to be damaged in copies."""
    root: Path = test_export.make(tmp_path_factory.mktemp("faults"), "published")
    for dtype in ("bf16", "fp8"):
        merge(root, root / dtype, dtype)
    yield root
    shutil.rmtree(root)


def merge(root: Path, to: Path, dtype: str | None = None, adapter: str = "adapter") -> dict[str, Any]:
    return export(root / adapter, to, merge=True, dtype=dtype, say=test_export.silent).record


def damaged(made: Path, dtype: str, tmp_path: Path, act: Callable[[Path], object]) -> dict[str, Any]:
    """Damage a copy of a right merge and repeat the command: what is finished is proven again, and found wrong."""
    copy = tmp_path / "copy"
    shutil.copytree(made / dtype, copy)
    act(copy)
    with pytest.raises(RunError) as raised:
        merge(made, copy, dtype)
    assert "nothing was deleted" in raised.value.problems[0].hint
    record: dict[str, Any] = json.loads((copy / "export.json").read_text())
    assert record["deviations"]
    return record


def stored(folder: Path, key: str) -> Stored:
    return next(
        header[key] for path in sorted(folder.glob("model*.safetensors")) if key in (header := read_header(path))
    )


def overwrite(folder: Path, key: str, values: Tensor) -> None:
    place = stored(folder, key)
    with place.file.open("r+b") as file:
        file.seek(place.start)
        file.write(values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def tensor(folder: Path, key: str) -> Tensor:
    return load_file(stored(folder, key).file)[key]


def test_an_undamaged_copy_is_proven_again(made: Path, tmp_path: Path) -> None:
    """The other tests must be able to fail: without damage there is nothing to report."""
    shutil.copytree(made / "fp8", tmp_path / "copy")
    assert merge(made, tmp_path / "copy", "fp8")["deviations"] == []


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_a_tensor_missing(made: Path, tmp_path: Path, dtype: str) -> None:
    key = f"{PREFIX}.self_attn.o_proj.weight"

    def act(folder: Path) -> None:
        path = stored(folder, key).file
        kept = {name: value for name, value in load_file(path).items() if name != key}
        save_file(kept, path, metadata={"format": "pt"})
        index = folder / "model.safetensors.index.json"
        said = json.loads(index.read_text())
        del said["weight_map"][key]
        index.write_text(json.dumps(said))

    record = damaged(made, dtype, tmp_path, act)
    assert any(f"tensors that their file does not hold (1): {key}" in said for said in record["deviations"])


@pytest.mark.parametrize(
    "key",
    [
        "vision_tower.transformer.layers.0.attention.q_proj.weight",
        f"{PREFIX}.input_layernorm.weight",
        f"{PREFIX}.mlp.shared_experts.up_proj.weight",
    ],
)
def test_one_bit_of_an_untouched_tensor(made: Path, tmp_path: Path, key: str) -> None:
    def act(folder: Path) -> None:
        place = stored(folder, key)
        with place.file.open("r+b") as file:
            file.seek(place.end - 1)
            last = file.read(1)
            file.seek(place.end - 1)
            file.write(bytes([last[0] ^ 1]))

    record = damaged(made, "fp8", tmp_path, act)
    assert record["deviations"] == [f"{key} is not byte-equal to the base's, though not adapted"]


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_a_touched_tensor_left_as_it_was(made: Path, tmp_path: Path, dtype: str) -> None:
    """The weight of the base where the merged one should be: the adapter was forgotten."""
    key = f"{PREFIX}.self_attn.o_proj.weight"
    scale = f"{key}_scale_inv"

    def act(folder: Path) -> None:
        base = tensor(made / "base", key)
        if dtype == "fp8":
            overwrite(folder, scale, tensor(made / "base", scale))
        else:
            base = (base.float() * tensor(made / "base", scale).float()).bfloat16()
        overwrite(folder, key, base)

    record = damaged(made, dtype, tmp_path, act)
    assert any("self_attn.o_proj" in said for said in record["deviations"])


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("wrong", ["lora_A", "lora_B"])
def test_experts_packed_in_the_other_order(made: Path, tmp_path: Path, dtype: str, wrong: str) -> None:
    """A merged with rank before expert, or B with expert before rank: plausible weights, and all wrong."""
    key = f"{PREFIX}.mlp.experts.down_proj"
    held = load_file(made / "adapter" / "adapter_model.safetensors")
    a, b = (held[f"base_model.model.model.layers.1.mlp.experts.{which}.weight"] for which in ("lora_A", "lora_B"))
    experts = 8
    a = a.view(-1, experts, a.shape[1]).transpose(0, 1) if wrong == "lora_A" else a.view(experts, -1, a.shape[1])
    b = b.view(b.shape[0], experts, -1) if wrong == "lora_B" else b.view(b.shape[0], -1, experts).transpose(1, 2)
    delta = torch.einsum("oer,eri->eoi", b, a) * (8 / 2)  # alpha 8, and rank 2 by the case's rank_pattern

    def act(folder: Path) -> None:
        scale = tensor(made / "base", f"{key}_scale_inv").float()
        values = tensor(made / "base", key).float() * scale + delta
        new = tensor(folder, f"{key}_scale_inv").float() if dtype == "fp8" else torch.ones(())
        overwrite(folder, key, (values / new).to(torch.float8_e4m3fn if dtype == "fp8" else torch.bfloat16))

    record = damaged(made, dtype, tmp_path, act)
    assert all("experts.down_proj" in said for said in record["deviations"])


def test_a_scale_of_the_base_kept_where_the_weight_outgrew_it(made: Path, tmp_path: Path) -> None:
    key = f"{PREFIX}.mlp.experts.down_proj_scale_inv"
    assert not torch.equal(tensor(made / "fp8", key), tensor(made / "base", key))  # the case's adapter is large

    def act(folder: Path) -> None:
        overwrite(folder, key, tensor(made / "base", key))

    record = damaged(made, "fp8", tmp_path, act)
    assert any("experts.down_proj" in said for said in record["deviations"])


def test_a_block_of_zeros_stays_one(tmp_path: Path) -> None:
    """Its scale is zero, and where the adapter adds nothing either, the new one as well: no 0 / 0."""
    root = test_export.make(tmp_path, "blocks")
    key = "model.layers.1.self_attn.q_proj.weight"
    place = stored(root / "base", key)
    held = load_file(place.file)
    side = min(128, held[key].shape[0])
    held[key].view(torch.uint8)[:side, :128] = 0
    held[f"{key}_scale_inv"][0, 0] = 0
    save_file(held, place.file, metadata={"format": "pt"})
    path = root / "adapter" / "adapter_model.safetensors"
    factors = load_file(path)
    factors["base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"][:side] = 0
    save_file(factors, path, metadata={"format": "pt"})
    assert merge(root, root / "merged")["deviations"] == []
    merged = tensor(root / "merged", key).float()
    assert merged.isfinite().all()
    assert not merged[:side, :128].any()
    assert tensor(root / "merged", f"{key}_scale_inv")[0, 0] == 0


def test_a_tokenizer_of_another_model(made: Path, tmp_path: Path) -> None:
    """A resumed merge copies what lies beside the weights anew."""
    copy = tmp_path / "copy"
    shutil.copytree(made / "fp8", copy)
    (copy / "tokenizer.json").write_text("{}")
    merge(made, copy, "fp8")
    assert (copy / "tokenizer.json").read_bytes() == (made / "base" / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("kind", ["--adapter", "--merge"])
@pytest.mark.parametrize("other", [{"hidden": 96}, {"layers": 1}, {"family": "mistral"}])
def test_an_adapter_of_another_model(made: Path, tmp_path: Path, kind: str, other: dict[str, Any]) -> None:
    tiny.write(tmp_path / "other", tokenizer=False, **other)
    with pytest.raises(UserError, match="does not fit this model"):
        export(
            made / "adapter",
            tmp_path / "out",
            merge=kind == "--merge",
            base=str(tmp_path / "other"),
            say=test_export.silent,
        )
    assert not (tmp_path / "out").exists()


def changed(made: Path, tmp_path: Path, config: dict[str, Any]) -> Path:
    adapter = tmp_path / "changed"
    shutil.copytree(made / "adapter", adapter)
    said = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(said | config))
    return adapter


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"peft_type": "IA3"}, "of the kind IA3"),
        ({"init_lora_weights": "pissa"}, "changed the base"),
        ({"use_dora": True}, "use_dora is True in adapter_config.json, and not in the weights"),
        ({"r": 16}, "has rank 4, and adapter_config.json has 16"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
    ],
)
def test_what_would_merge_wrongly_is_refused(made: Path, tmp_path: Path, config: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        export(changed(made, tmp_path, config), tmp_path / "out", merge=True, say=test_export.silent)
    assert not (tmp_path / "out").exists()


def test_a_tensor_of_an_unknown_kind_is_refused(made: Path, tmp_path: Path) -> None:
    adapter = changed(made, tmp_path, {})
    held = load_file(adapter / "adapter_model.safetensors")
    held["base_model.model.model.embed_tokens.lora_embedding_A"] = torch.zeros(4, 512)
    save_file(held, adapter / "adapter_model.safetensors")
    with pytest.raises(UserError, match="lora_embedding_A"):
        export(adapter, tmp_path / "out", merge=True, say=test_export.silent)


def test_one_half_of_a_pair_is_refused(made: Path, tmp_path: Path) -> None:
    adapter = changed(made, tmp_path, {})
    held = load_file(adapter / "adapter_model.safetensors")
    del held[next(key for key in held if key.endswith("o_proj.lora_B.weight"))]
    save_file(held, adapter / "adapter_model.safetensors")
    with pytest.raises(UserError, match="not a pair of matrices"):
        export(adapter, tmp_path / "out", merge=True, say=test_export.silent)


def test_dtypes_that_can_not_be(made: Path, tmp_path: Path) -> None:
    tiny.write(tmp_path / "plain", "mistral4", quantization="none", tokenizer=False)
    with pytest.raises(UserError, match="is not quantised"):
        export(
            made / "adapter",
            tmp_path / "out",
            merge=True,
            dtype="fp8",
            base=str(tmp_path / "plain"),
            say=test_export.silent,
        )
    with pytest.raises(UserError, match="'int4'"):
        export(made / "adapter", tmp_path / "out", merge=True, dtype="int4", say=test_export.silent)
    with pytest.raises(UserError, match="'int4'"):
        export(made / "adapter", tmp_path / "out", dtype="int4", say=test_export.silent)


def test_folders_that_are_taken(made: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    for merging in (True, False):
        with pytest.raises(UserError, match="1 other files"):
            export(made / "adapter", tmp_path, merge=merging, say=test_export.silent)
    with pytest.raises(UserError, match="the base model's folder"):
        merge(made, made / "base")
    shutil.copytree(made / "fp8", tmp_path / "copy")
    with pytest.raises(UserError, match="something else"):
        merge(made, tmp_path / "copy", "bf16")
    with pytest.raises(UserError, match="holds a merged model"):
        export(made / "adapter", tmp_path / "copy", say=test_export.silent)
    assert not (tmp_path / "copy" / "adapter_config.json").exists()


@pytest.mark.parametrize("merging", [True, False])
def test_a_place_that_is_no_folder_is_told_with_what_to_do(made: Path, tmp_path: Path, merging: bool) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="can't be written: Not a directory") as caught:
        export(made / "adapter", tmp_path / "file" / "inside", merge=merging, say=test_export.silent)
    assert caught.value.problems[0].hint == "check that the folder can be written, and has room"


def started(made: Path, to: Path, limit: int | None, *words: str) -> subprocess.Popen[str]:
    """The command itself, which may write files of so many bytes."""

    def limited() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    command = [sys.executable, "-m", "windlass", "export", str(made / "adapter"), "--to", str(to), *words]
    return subprocess.Popen(
        command,
        preexec_fn=limited,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
    )


def test_a_full_disk_is_told_and_gone_on_from(made: Path, tmp_path: Path) -> None:
    to = tmp_path / "out"
    sizes = sorted(path.stat().st_size for path in (made / "base").glob("model-*"))
    process = started(made, to, sizes[-1] - 1, "--merge")  # the largest file does not fit
    _, said = process.communicate(timeout=120)
    assert process.returncode == 1, said
    assert "Traceback" not in said
    assert "make room and repeat the command" in said
    assert not (to / "config.json").exists()  # nothing that could be taken for a model
    finished = {path: path.stat().st_mtime_ns for path in to.glob("model-*")}
    assert len(finished) < len(sizes)
    process = started(made, to, None, "--merge")
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert f"{len(finished)} of {len(sizes)} files were finished" in said
    assert all(path.stat().st_mtime_ns == when for path, when in finished.items())
    same_as_at_once(made, to)


@pytest.mark.parametrize(("words", "limit", "code"), [(("--merge",), 300, 1), (("--dtype", "bf16"), 4000, 2)])
def test_a_full_disk_is_told_whichever_library_writes(
    made: Path, tmp_path: Path, words: tuple[str, ...], limit: int, code: int
) -> None:
    """The new scales and the rounded adapter are written by safetensors, which has an error of its own."""
    process = started(made, tmp_path / "out", limit, *words)
    _, said = process.communicate(timeout=120)
    assert process.returncode == code, said
    assert "File too large" in said
    assert "Traceback" not in said


def test_scales_that_can_not_be_read_are_computed_again(made: Path, tmp_path: Path) -> None:
    to = tmp_path / "out"
    started(made, to, 300, "--merge").communicate(timeout=120)
    (to / ".windlass" / "scales.safetensors").write_bytes(b"half a file")
    merge(made, to)
    same_as_at_once(made, to)


def test_killed_and_gone_on_from(made: Path, tmp_path: Path) -> None:
    to = tmp_path / "out"
    process = started(made, to, None, "--merge")
    deadline = time.monotonic() + 60
    while not list(to.glob("model-*")) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert (to / ".windlass").is_dir()
    merge(made, to)
    same_as_at_once(made, to)


def same_as_at_once(made: Path, to: Path) -> None:
    assert sorted(path.name for path in to.iterdir()) == sorted(path.name for path in (made / "fp8").iterdir())
    for path in to.glob("model*"):
        assert path.read_bytes() == (made / "fp8" / path.name).read_bytes(), path.name


def test_no_room_is_known_before_anything_is_written(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=1000))
    with pytest.raises(UserError, match="GiB are free there"):
        merge(made, tmp_path / "out")


def test_a_hub_that_is_not_there(made: Path, tmp_path: Path) -> None:
    """In a process of its own: the hub's client reads its address when it is imported."""
    script = (
        "import sys; from pathlib import Path\n"
        "from windlass.export import push; from windlass.errors import UserError\n"
        "for name in sys.argv[2:]:\n"
        "    try: push(Path(sys.argv[1]), name)\n"
        "    except UserError as error: print(error)\n"
    )
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_TOKEN": "hf_verysecret", "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", script, str(made / "fp8"), "org/name", "no name/at all"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "can't be reached" in done.stdout
    assert "organisation/name" in done.stdout
    assert "verysecret" not in done.stdout + done.stderr


def test_the_commands(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = [str(made / "adapter"), "--to", str(tmp_path / "out"), "--merge", "--serve-check", "--json"]
    with pytest.raises(SystemExit) as ended:
        cli.main(["export", *run])
    assert ended.value.code == 0
    said = json.loads(capsys.readouterr().out)
    assert said["deviations"] == []
    assert said["served"]["commands"]["merged model"].startswith("vllm serve")
    with pytest.raises(SystemExit) as ended:
        cli.main(["generate", str(tmp_path / "out"), "--prompt", "import", "--tokens", "3"])
    assert ended.value.code == 0
    assert read_base(tmp_path / "out").wrapper
