"""Rows of a probe: the documents that tell most, and their chats as a request to a server has them."""

import itertools
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import pyarrow as pa

from windlass.data.choose import choose_format
from windlass.data.formats import Format
from windlass.data.packing import iter_documents
from windlass.data.reading import Row, read_rows, split_into_batches
from windlass.data.select import list_all_sets, select_rows
from windlass.data.tokenize import encode_batch
from windlass.errors import UserError, Where
from windlass.runfile import RunFile
from windlass.serve.probe import ROWS, TOKENS

SEARCHED: Final = 256  # rows from which a probe's are chosen
READ: Final = 20_000  # rows of a data set in which their chats are looked for
SHORTEST: Final = 8


def choose_rows(table: pa.Table) -> list[dict[str, Any]]:
    """Return the documents with the most supervised tokens at their beginning; `start`: of the first of these. Of pairs
    these are the chosen sequences."""
    documents = []
    for ids, supervised in iter_documents(table.slice(0, SEARCHED)):
        told = supervised[:TOKENS]
        documents.append({"ids": ids[:TOKENS].tolist(), "start": int(told.argmax()), "told": int(told.sum())})
    long = [document for document in documents if len(document["ids"]) >= SHORTEST] or documents
    chosen = sorted(long, key=lambda document: -document.pop("told"))
    distinct = {tuple(document["ids"]): document for document in reversed(chosen)}
    return [document for document in chosen if distinct[tuple(document["ids"])] is document][:ROWS]


def add_chats(rows: Sequence[dict[str, Any]], run: RunFile, where: Where, tokenizer: Any) -> None:
    """Add the chat of each row that was one, and all of its tokens, by reading the data set again."""
    wanted = {tuple(row["ids"]): row for row in rows}
    most = min(TOKENS, run.data.length)
    for listed in list_all_sets(run.data, where):
        selected = select_rows(listed, lambda _: None)
        kind = choose_format(selected.data, selected.columns, tokenizer, selected.where)
        if kind.chat is None:
            continue
        parts = (*selected.validation, *selected.train)
        for batch in split_into_batches(itertools.islice(read_rows(parts), READ)):
            pairs = [(source, rendered) for source in batch for rendered in kind.render(source)]
            encoded = encode_batch([rendered for _, rendered in pairs], tokenizer)
            for (source, rendered), (ids, *_) in zip(pairs, encoded, strict=True):
                row = wanted.pop(tuple(ids[:most]), None)
                chat = _find_chat(kind, source, rendered.text) if row else None
                if row and chat:
                    dates = kind.template.dates if kind.template else []
                    told = {"dates": dates} if dates else {}
                    row["chat"] = {**chat, "ids": [int(token) for token in ids][: 8 * TOKENS], **told}
            if not wanted:
                return


def _find_chat(kind: Format, source: Row, text: str) -> dict[str, Any] | None:
    """Return the chat that a row was rendered from: of a chat that became several rows, its beginning."""
    assert kind.chat is not None
    assert kind.template is not None
    chat = kind.chat(source)
    for end in range(len(chat["messages"]), 0, -1):
        messages = chat["messages"][:end]
        with suppress(UserError):  # a template may refuse a beginning
            if kind.template.render_whole(messages, chat["tools"]) == text:
                return {**chat, "messages": messages}
    return None
