"""Tokenize a sample of the rows as training would, to know what all of them make. Imports no torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from windlass.data.choose import choose_format
from windlass.data.packing import pack_rows
from windlass.data.reading import Row
from windlass.data.tokenize import tokenize
from windlass.errors import Where
from windlass.runfile import Data

Located = tuple[Path, int, Row]
# Its tokens, of a pair those of the longer sequence, and the position of the first one that loss is computed on.
Document = tuple[int, int]
GROUPS = 20  # parts of a sample, whose differences show how far it can be off
UNCUT = 1 << 30  # tokens
PACKED_DOCUMENTS = 20_000  # as many fill rows as well as any larger number


def open_fast_tokenizer(folder: Path) -> PreTrainedTokenizerFast | None:
    """Open tokenizer.json with what stands beside it, without the class that the model's own config names: that
    imports torch. None if there is none."""
    if not (folder / "tokenizer.json").is_file():
        return None
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        return PreTrainedTokenizerFast.from_pretrained(str(folder))
    except Exception:  # any kind of error for a damaged file, which is reported when the data are prepared
        return None
    finally:
        logging.set_verbosity(verbosity)


def tokenize_sample(
    data: Data, located: Sequence[Located], tokenizer: PreTrainedTokenizerFast, where: Where
) -> list[list[Document]]:
    """Return the documents of the rows in groups of every GROUPS-th row."""
    columns = dict.fromkeys(key for *_, row in located for key in row)
    kind = choose_format(data, tuple(columns), tokenizer, where)
    groups = []
    for first in range(min(GROUPS, len(located))):
        chosen = located[first::GROUPS]

        def place(*numbers: int, chosen: Sequence[Located] = chosen) -> str:
            return "; ".join(f"{path}: row {own}" for path, own, _ in (chosen[number] for number in numbers))

        documents = tokenize((row for *_, row in chosen), kind, tokenizer, UNCUT, place=place)
        flags = [documents.supervised[span] for span in documents.spans()]
        lengths = documents.sides.max(1).tolist()
        groups.append([(n, int(each[1:].argmax()) + 1) for n, each in zip(lengths, flags, strict=True)])
    return groups


def count_packed(lengths: Sequence[int], count: float, capacity: int) -> float:
    """Return the rows that `count` documents fill if their lengths are distributed like these."""
    tried = min(PACKED_DOCUMENTS, max(1, round(count)))
    repeated = [*itertools.islice(itertools.cycle(lengths), tried)]
    return len(pack_rows(repeated, capacity)) * count / tried
