"""Check that an adapter is used with the base model that it was trained on, by the digest of the base's weights."""

import contextlib
import hashlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from windlass.errors import UserError
from windlass.files import find_cache_folder, read_json, write_json
from windlass.model import Base, Stored
from windlass.model.files import DIGEST, PUBLISHED
from windlass.ranks.collectives import all_gather, get_rank
from windlass.run_folder import BASE_MODEL, MANIFEST
from windlass.settings import CONVERTED_VALUES, LOADER_THREADS
from windlass.weights.digest import MODULUS, digest_box, format_digest
from windlass.weights.reading import DTYPES, UNCONVERTED, Box, DamagedError, Files, read_box, split_box

FETCH_AGAIN: Final = "remove {folder}, then `windlass fetch RUN` again"
FLAG: Final = "--allow-other-base"
CHAT_TEMPLATE: Final = "chat_template"  # what wrote the rows that an adapter was trained on
# Keys of config.json that don't affect the forward.
NO_FORWARD: Final = re.compile(
    r"_name_or_path|architectures|auto_map|(torch_)?dtype|transformers_version|use_cache|initializer_range|.*_token_id"
    r"|router_aux_loss_coef|output_.*|return_dict.*|id2label|label2id|quantization_config"
)
Part = tuple[tuple[int, ...], tuple[int, ...], int]  # part of a parameter: offset, shape, digest


def combine_digests(by_rank: Sequence[Mapping[str, Part]]) -> tuple[str, list[str]]:
    """Return the base's digest from the parts that the ranks have read, and the parts that they read differently.

    A part that several ranks have counts once.
    """
    parts: dict[tuple[str, tuple[int, ...], tuple[int, ...]], tuple[int, int]] = {}
    problems = []
    for rank, parts_of_rank in enumerate(by_rank):
        for name, (offset, shape, digest) in parts_of_rank.items():
            if 0 in shape:
                continue
            first, expected = parts.setdefault((name, offset, shape), (rank, digest))
            if digest != expected:
                problems.append(f"rank {first} and rank {rank} have read different values of {name}")
    return format_digest(sum(digest for _, digest in parts.values())), problems


def find_other_copies(base: Base) -> list[str]:
    """Return which ranks read other files than rank 0, of other values. A collective, before loading.

    Under sharding a rank reads its own part alone: copies that differ would be trained as a mixture, whose parts no
    other rank could compare. Ranks that see equal inodes and times read the same files, and there is nothing to do.
    Else the ranks of each copy read it once, together, and compare one digest. A ring in which each rank reads its
    neighbour's part would read less on many nodes, but two versions could still alternate. The files' digests are kept
    in the user's cache, by names, sizes, times and inodes: only the first run pays, at the speed of the storage.
    """
    facts = [describe_copy(file) for file in sorted({stored.file for stored in base.stored()})]
    cache = find_cache_folder() / "digests" / f"{hashlib.sha256(repr((DIGEST, facts)).encode()).hexdigest()[:32]}.json"
    seen: list[tuple[Any, dict[str, int]]] = all_gather((facts, read_json(cache).get("files", {})))
    if all(other == facts for other, _ in seen):
        return []
    readers = [rank for rank, (other, _) in enumerate(seen) if other == facts]
    known = next((seen[rank][1] for rank in readers if seen[rank][1]), None)
    share: dict[str, int] = {}
    problem = ""
    if known is None:
        try:
            share = sum_digests(base, readers.index(get_rank()), len(readers))
        except (DamagedError, OSError) as error:
            problem = str(error)
    shares: list[tuple[dict[str, int], str]] = all_gather((share, problem))
    digests = known or add_digests([shares[rank][0] for rank in readers])
    problems = [
        f"rank {rank} can't read its copy of the base model: {why}" for rank, (_, why) in enumerate(shares) if why
    ]
    if not problems and known is None:
        with contextlib.suppress(OSError):  # it will be computed again
            cache.parent.mkdir(parents=True, exist_ok=True)
            write_json(cache, {"files": digests, "folder": str(base.path)})
    by_rank: list[dict[str, int]] = all_gather(digests)
    first = by_rank[0]
    others = [rank for rank, other in enumerate(by_rank) if format_total(other) != format_total(first)]
    if others and not problems:
        ranks = ", ".join(map(str, others))
        text = f"rank 0 and rank {ranks} have copies of the base model that are not equal"
        unequal = sorted(name for rank in others for name, digest in by_rank[rank].items() if digest != first.get(name))
        problems = [f"{text}: {unequal[0]} differs"]
    return problems


def add_digests(shares: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Return the digest of each file from those of its parts."""
    names = sorted({name for share in shares for name in share})
    return {name: sum(share.get(name, 0) for share in shares) % MODULUS for name in names}


def format_total(digests: Mapping[str, int]) -> str:
    """Return the base's digest from those of its files."""
    return format_digest(sum(digests.values()))


def describe_copy(file: Path) -> tuple[str, int, int, int]:
    """Return what tells this file from a copy of it, and from itself after a change."""
    status = file.stat()
    return file.name, status.st_size, status.st_mtime_ns, status.st_ino


def sum_digests(
    base: Base, first: int = 0, step: int = 1, advance: Callable[[int], None] = lambda _: None
) -> dict[str, int]:
    """Return for each file the sum of the digests of every `step`th block of the weights, from the `first` on."""

    def jobs() -> Iterator[tuple[Stored, Box]]:
        for parameter in base.parameters:
            for piece in parameter.pieces:
                for stored in piece.tensors:
                    box = tuple((0, size) for size in stored.shape)
                    yield from ((stored, chunk) for chunk in split_box(box, CONVERTED_VALUES * UNCONVERTED))

    with Files() as files, ThreadPoolExecutor(LOADER_THREADS) as pool:

        def digest(job: tuple[Stored, Box]) -> dict[str, int]:
            stored, box = job
            values = torch.empty([stop - start for start, stop in box], dtype=DTYPES[stored.dtype])
            read_box(stored, box, values, files)
            advance(values.nbytes)
            return {stored.file.name: digest_box(stored, box, values, partial(read_box, files=files))}

        return add_digests([*pool.map(digest, itertools.islice(jobs(), first, None, step))])


def digest_files(base: Base, advance: Callable[[int], None] = lambda _: None) -> str:
    """Return the same digest as `combine_digests`, from the files, with a few blocks in memory at a time."""
    try:
        total = format_total(sum_digests(base, advance=advance))
    except (DamagedError, OSError) as error:
        raise UserError(
            f"it can't be read: {error}", str(base.path), "fetch the base model again", "unreadable"
        ) from None
    for problem in find_fetch_differences(base, total):
        raise UserError(problem, str(base.path), FETCH_AGAIN.format(folder=base.path), "not-as-fetched")
    return total


def find_fetch_differences(base: Base, digest: str) -> list[str]:
    """Return what is wrong if these are not the weights whose SHA-256 `windlass fetch` compared with the hub's."""
    recorded = read_json(base.path / PUBLISHED).get(DIGEST, digest) if base.path else digest
    if recorded == digest:
        return []
    return [f"its weights have changed since they were fetched: digest {recorded} then, {digest} now"]


def has_published_digest(base: Base) -> bool:
    """Return whether these files are known to be the hub's, by `windlass fetch`."""
    return base.path is not None and DIGEST in read_json(base.path / PUBLISHED)


def bytes_to_digest(base: Base) -> int:
    """Return the number of bytes that `digest_files` reads."""
    pieces = [piece for parameter in base.parameters for piece in parameter.pieces]
    return sum(stored.end - stored.start for piece in pieces for stored in piece.tensors)


def read_forward_config(base: Base) -> dict[str, Any]:
    """Return the keys of config.json that change the forward: another rotary base or epsilon is another model too."""
    return {key: value for key, value in base.config.items() if value is not None and not NO_FORWARD.fullmatch(key)}


def describe_base(
    base: Base, digest: str, other_base: str = "", quantization: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the base's facts for manifests. `other_base`: what the user accepted with --allow-other-base;
    `quantization`: load.json's."""
    facts = {"base_name": base.name, "base_digest": digest, "base_config": read_forward_config(base)}
    optional = {"other_base": other_base, "base_quantisation": quantization}
    return facts | {key: value for key, value in optional.items() if value}


def describe_quantization(quantization: Mapping[str, Any]) -> str:
    """Summarize load.json's quantization in a line; empty if windlass did not quantize the base."""
    if not quantization:
        return ""
    worst = quantization["worst"]
    return (
        f"{quantization['format'].upper()} in blocks of {quantization['block']}: relative RMS error "
        f"{quantization['relative_rms']:.1%}, at most {worst['relative_rms']:.1%} in {worst['name']}"
    )


def read_recorded_base(adapter: Path) -> dict[str, Any]:
    """Return what is recorded next to an adapter about the base it was trained on; empty for adapters made
    elsewhere."""
    record = read_json(adapter / BASE_MODEL) or read_json(adapter / MANIFEST)
    keys = ("base_name", "base_digest", "base_config", "other_base", "base_quantisation", CHAT_TEMPLATE)
    return {key: record[key] for key in keys if record.get(key)}


def require_same_base(
    adapter: Path, base: Base, digest: str, where: str, *, allow_other: bool, say: Callable[[str], None]
) -> str:
    """Refuse another base than the adapter was trained on. Returns what has been accepted instead, if anything."""
    recorded = read_recorded_base(adapter)
    name = "/".join(adapter.resolve().parts[-2:])
    if "base_digest" not in recorded:
        say(f"note: {name} has no digest of its base model: that it was trained on {base.name} is unproven")
        return str(recorded.get("other_base", ""))
    then = recorded.get("base_config") or {}
    now = read_forward_config(base)
    changed = sorted(key for key in then.keys() | now.keys() if then.get(key) != now.get(key))
    if recorded["base_digest"] != digest:
        problem = (
            f"the weights of {base.name} (digest {digest}) are not those that {name} was trained on: "
            f"{recorded.get('base_name', 'a base')} (digest {recorded['base_digest']})"
        )
    elif then and changed:
        values = ", ".join(f"{key} {then.get(key)} then, {now.get(key)} now" for key in changed[:4])
        problem = f"config.json of {base.name} is not the one that {name} was trained with: {values}"
    else:
        return str(recorded.get("other_base", ""))
    if not allow_other:
        hint = f"use the base model that it was trained on, or add {FLAG}"
        raise UserError(problem, where, hint, "other-base")
    say(f"warning: {problem}; accepted with {FLAG}")
    return problem
