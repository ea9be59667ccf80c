"""Read a model folder's config.json and safetensors headers, and check them against each other and the files' lengths.

A safetensors file is eight bytes with the header's length, a JSON header (name -> dtype, shape, byte offsets), and the
tensors. The format allows neither gaps nor overlaps, so damage to the header or the file nearly always shows here,
before any weight is read. safetensors' own reader makes the same checks but imports numpy, which a plan doesn't need.
"""

import json
from collections.abc import Collection, Sequence
from math import prod
from pathlib import Path
from typing import Any, Final

from windlass.errors import Problem, UserError, raise_all
from windlass.files import refuse_duplicate_keys
from windlass.model.parameters import Stored

CONFIG = "config.json"
SINGLE = "model.safetensors"
PARAMS: Final = "params.json"  # of Mistral's own layout
INDEX = "model.safetensors.index.json"
HEADERS: Final = "windlass-headers.json"  # headers of files that `windlass fetch --headers-only` did not download
DIGEST: Final = "digest of all weights"  # its key for the digest that loading must find; renamed if it is redefined
PUBLISHED: Final = "windlass-published.json"  # samples of files whose SHA-256 was the published one when fetched
CONVERT: Final = (
    "python -c \"import transformers as t; a, b = '{folder}', '{folder}-safetensors'; "
    "t.AutoModelForCausalLM.from_pretrained(a, dtype='auto').save_pretrained(b); "
    't.AutoTokenizer.from_pretrained(a).save_pretrained(b)"'
)
LENGTH: Final = 8  # bytes of a header's length
MAX_HEADER: Final = 100_000_000  # the format's own limit
COMPARED_BYTES: Final = 2**18
FETCH_FILE: Final = "fetch it again from the publisher"
DAMAGED: Final = "the file is damaged or incomplete: fetch it again and compare its checksum with the publisher's"

# Bits per element of every dtype of the format, by its own spelling.
BITS: Final[dict[str, int]] = {
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}


def list_names(folder: Path) -> frozenset[str]:
    try:
        return frozenset(entry.name for entry in folder.iterdir())
    except OSError as error:
        hint = "name a model's folder; check that its volume is mounted, its owner and mode"
        raise UserError(f"the folder can't be read: {error.strerror}", str(folder), hint, "unreadable") from None


def read_table(file: Path) -> dict[str, Any]:
    """Read the JSON object in config.json or an index."""
    text = b""
    try:
        text = file.read_bytes()
        table = json.loads(text, object_pairs_hook=refuse_duplicate_keys)
    except OSError as error:
        raise _explain_unreadable(file, error) from None
    except (ValueError, RecursionError) as error:
        lfs = text.startswith(b"version https://git-lfs")
        hint = "it is a Git LFS pointer: run git lfs pull" if lfs else FETCH_FILE
        raise UserError(f"it is not JSON: {error}", str(file), hint, "not-json") from None
    if not isinstance(table, dict):
        raise UserError("it is JSON, but not an object", str(file), FETCH_FILE, "not-an-object")
    return table


def _explain_unreadable(file: Path, error: OSError) -> UserError:
    if file.is_symlink() and not file.exists():
        problem = f"it is a link to {file.readlink()}, and nothing is there"
        hint = "copy or mount what it points to, or fetch the model again"
        return UserError(problem, str(file), hint, "dangling-link")
    return UserError(f"it can't be read: {error.strerror}", str(file), "check its owner and mode", "unreadable")


def read_tensors(folder: Path, names: Collection[str]) -> dict[str, Stored]:
    """Read all stored tensors of a folder. As in transformers, a single file takes precedence over an index."""
    if SINGLE in names:
        return read_header(folder / SINGLE)
    if INDEX not in names:
        pickled = sorted(name for name in names if name.startswith("pytorch_model") and name.endswith(".bin"))
        if pickled:
            listed = abbreviate(pickled)
            problem = f"the weights are there only as a pickle, which can run code when it is opened ({listed})"
            raise UserError(problem, str(folder), f"convert it: {CONVERT.format(folder=folder)}", "only-pickle")
        problem = f"the model folder has no {SINGLE} and no {INDEX}; it contains {abbreviate(sorted(names))}"
        hint = "fetch or convert the model's safetensors and their index; an adapter belongs in lora.adapter"
        raise UserError(problem, str(folder), hint, "no-weights")
    index = folder / INDEX
    weight_map = read_table(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError("it has no weight_map", str(index), FETCH_FILE, "no-weight-map")
    files = dict.fromkeys(map(str, weight_map.values()))
    if foreign := [file[:80] for file in files if Path(file).name != file]:
        raise UserError(
            f"weight_map names what is not a file of this folder: {abbreviate(foreign)}",
            str(index),
            FETCH_FILE,
            "foreign-file",
        )
    if missing := [file for file in files if file not in names]:
        problem = f"it names {len(files)} files, {len(missing)} of them are missing: {abbreviate(missing)}"
        raise UserError(
            problem, str(index), "the download or copy did not finish: fetch the missing files", "missing-files"
        )
    tensors: list[Stored] = []
    problems: list[Problem] = []
    for file in files:
        try:
            tensors += read_header(folder / file).values()
        except UserError as error:
            problems += error.problems
    raise_all(problems)
    if wrong := sorted({(tensor.key, tensor.file.name) for tensor in tensors} ^ {*weight_map.items()}):
        problem = f"it and the files disagree about which file holds a tensor ({len(wrong)})"
        listed = abbreviate([f"{key} in {file}" for key, file in wrong])
        hint = "index and files are of different versions: fetch the whole folder again"
        raise UserError(f"{problem}: {listed}", str(index), hint, "index-disagrees")
    return {tensor.key: tensor for tensor in tensors}


def have_equal_bytes(one: Stored, other: Stored, first: int = 0, step: int = 1) -> bool:
    """Return whether two stored tensors are equal: all of their blocks, or every `step`th from the `first` on."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with one.file.open("rb") as one_file, other.file.open("rb") as other_file:
        for begin in range(first * COMPARED_BYTES, one.end - one.start, step * COMPARED_BYTES):
            one_file.seek(one.start + begin)
            other_file.seek(other.start + begin)
            length = min(COMPARED_BYTES, one.end - one.start - begin)
            if one_file.read(length) != other_file.read(length):
                return False
    return True


def read_header(file: Path) -> dict[str, Stored]:
    """Read the tensors of one safetensors file, by name. Any fault is an error that names the file."""
    where = str(file)
    try:
        with file.open("rb") as opened:
            size = opened.seek(0, 2)
            opened.seek(0)
            length = opened.read(LENGTH)
            text = opened.read(min(int.from_bytes(length, "little"), MAX_HEADER))
    except OSError as error:
        raise _explain_unreadable(file, error) from None
    if length == b"version ":
        raise UserError("it is a Git LFS pointer, not the weights", where, "run: git lfs pull", "lfs-pointer")
    return _parse_header(file, text, LENGTH + len(text), size)


def read_headers(folder: Path) -> dict[str, Stored]:
    """Read all tensors of files that are still at the hub, from headers that were fetched without them."""
    stored: dict[str, Stored] = {}
    for name, entry in read_table(folder / HEADERS).items():
        try:
            header = entry["header"]
            size = entry["size"]
            begin = size - max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            why = f"{name!r} has no header: {type(error).__name__}: {error}"
            raise UserError(
                why, str(folder / HEADERS), "remove it, then `windlass fetch RUN --headers-only`", "damaged-header"
            ) from None
        stored |= _parse_header(folder / name, json.dumps(header).encode(), begin, size)
    return stored


def _parse_header(file: Path, text: bytes, begin: int, size: int) -> dict[str, Stored]:
    where = str(file)
    try:
        header = json.loads(text, object_pairs_hook=refuse_duplicate_keys)
        metadata = header.pop("__metadata__", None)
        if metadata is not None and {*map(type, metadata.values())} - {str}:
            raise TypeError("__metadata__ is not a table of texts")
        stored = {}
        for key, entry in header.items():
            start, end = entry["data_offsets"]
            stored[key] = Stored(key, entry["dtype"], tuple(entry["shape"]), file, begin + start, begin + end)
            numbers = (start, end, *stored[key].shape)
            if not all(type(number) is int and number >= 0 for number in numbers):
                raise ValueError(f"{key!r} has an impossible shape or offset")
            if (end - start) * 8 != prod(stored[key].shape) * BITS[entry["dtype"]]:
                raise ValueError(f"{key!r} has {end - start} bytes, which is not its shape's size")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"[:300]
        raise UserError(f"its header is not a safetensors header: {why}", where, DAMAGED, "damaged-header") from None

    end = begin  # tensors follow one another from the header's end to the file's end
    in_order = sorted(stored.values(), key=lambda tensor: (tensor.start, tensor.end))
    for tensor in in_order:
        if tensor.start != end:
            raise UserError(
                f"{tensor.key!r} starts at byte {tensor.start}, not {end}", where, DAMAGED, "damaged-header"
            )
        end = tensor.end
    if end < size:
        raise UserError(f"the last {size - end} bytes belong to no tensor", where, DAMAGED, "damaged-header")
    if end > size:
        lost = [tensor.key for tensor in in_order if tensor.end > size]
        problem = f"it is truncated: {size} of {end} bytes, {len(lost)} tensors lost from {lost[0]!r} on"
        raise UserError(problem, where, "the download or copy did not finish: fetch the file again", "truncated-file")
    return stored


def abbreviate(names: Sequence[str], shown: int = 3) -> str:
    """List the first few of many names."""
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")
