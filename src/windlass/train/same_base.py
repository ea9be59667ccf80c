"""Whether an adapter is used with the base model that it was trained on: by the digest of the base's weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import torch

from windlass.errors import UserError
from windlass.files import read_json
from windlass.model import Base, Stored
from windlass.plan.memory import AT_ONCE, THREADS
from windlass.run_folder import MANIFEST
from windlass.train.digest import digest_box, digest_text
from windlass.train.reading import DTYPES, UNCONVERTED, Box, DamagedError, Files, chunks, read_box

RECORD: Final = "base_model.json"  # beside adapter_config.json: PEFT passes it over
FLAG: Final = "--allow-other-base"
Part = tuple[tuple[int, ...], tuple[int, ...], int]  # of a parameter: where it begins, its shape, its digest


def combine(by_rank: Sequence[Mapping[str, Part]]) -> tuple[str, list[str]]:
    """The base's digest from the parts that the ranks have read, and what they have read differently.

    A part that several ranks have counts once.
    """
    parts: dict[tuple[str, tuple[int, ...], tuple[int, ...]], tuple[int, int]] = {}
    problems = []
    for rank, own in enumerate(by_rank):
        for name, (offset, shape, digest) in own.items():
            if 0 in shape:
                continue
            first, expected = parts.setdefault((name, offset, shape), (rank, digest))
            if digest != expected:
                problems.append(f"rank {first} and rank {rank} have read different values of {name}")
    return digest_text(sum(digest for _, digest in parts.values())), problems


def digest_files(base: Base, advance: Callable[[int], None] = lambda _: None) -> str:
    """The same digest from the files alone, a few blocks of them in memory."""

    def jobs() -> Iterator[tuple[Stored, Box]]:
        for parameter in base.parameters:
            for piece in parameter.pieces:
                for stored in (piece.stored, piece.scale) if piece.scale else (piece.stored,):
                    box = tuple((0, size) for size in stored.shape)
                    yield from ((stored, chunk) for chunk in chunks(box, AT_ONCE * UNCONVERTED))

    with Files() as files, ThreadPoolExecutor(THREADS) as pool:

        def digest(job: tuple[Stored, Box]) -> int:
            stored, box = job
            values = torch.empty([stop - start for start, stop in box], dtype=DTYPES[stored.dtype])
            read_box(stored, box, values, files)
            advance(values.nbytes)
            return digest_box(stored, box, values)

        try:
            return digest_text(sum(pool.map(digest, jobs())))
        except (DamagedError, OSError) as error:
            raise UserError(f"it can't be read: {error}", str(base.path), "fetch the base model again") from None


def digest_size(base: Base) -> int:
    """Bytes that `digest_files` reads."""
    pieces = [piece for parameter in base.parameters for piece in parameter.pieces]
    return sum(one.end - one.start for piece in pieces for one in (piece.stored, piece.scale) if one)


def describe_base(base: Base, digest: str, other_base: str = "") -> dict[str, str]:
    """For manifests; `other_base`: what the user accepted with --allow-other-base."""
    return {"base_name": base.name, "base_digest": digest, **({"other_base": other_base} if other_base else {})}


def recorded_base(adapter: Path) -> dict[str, Any]:
    """What is recorded beside an adapter of the base that it was trained on; nothing of those made elsewhere."""
    found = read_json(adapter / RECORD) or read_json(adapter / MANIFEST)
    return {key: found[key] for key in ("base_name", "base_digest", "other_base") if found.get(key)}


def require_same_base(
    adapter: Path, base: Base, digest: str, where: str, *, allow_other: bool, say: Callable[[str], None]
) -> str:
    """Refuse another base than the adapter was trained on. Returns what has been accepted instead, if anything."""
    recorded, name = recorded_base(adapter), "/".join(adapter.resolve().parts[-2:])
    if "base_digest" not in recorded:
        say(f"note: {name} has no digest of its base model: that it was trained on {base.name} is unproven")
    elif recorded["base_digest"] != digest:
        problem = (
            f"the weights of {base.name} (digest {digest}) are not those that {name} was trained on: "
            f"{recorded.get('base_name', 'a base')} (digest {recorded['base_digest']})"
        )
        if not allow_other:
            raise UserError(problem, where, f"use the base model that it was trained on, or add {FLAG}")
        say(f"warning: {problem}; accepted with {FLAG}")
        return problem
    return str(recorded.get("other_base", ""))
