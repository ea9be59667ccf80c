"""Split the tokens of rows over a group of ranks (`layout.context_parallel`): each rank computes its own tokens.

Only attention needs other tokens. Keys and values are gathered over the group in each layer, and every rank computes
its own queries against them; gradients of keys and values are reduced and scattered in the backward. Chosen over the
alternatives because it is exact for whatever attention can mask, with one collective of a few values a token:
- a ring over blocks of keys merges partial softmaxes in float32 and needs a kernel of its own for windows and sinks,
  and its many small messages gain only where keys of a row don't fit into memory;
- all-to-all over heads is limited by the number of key heads (8, often fewer) and splits neither latent keys nor sinks;
- torch's context parallelism replaces the scaled product of a full causal square: no documents, no windows, no sinks.

A row is cut into 2 x ranks pieces. Rank i has pieces i and 2 x ranks - 1 - i: an early one that sees few keys and a
late one that sees many, so that all ranks compute as much. Positions are those in the document, targets are shifted
before the cut, and each token counts on one rank only, so the sum over the ranks is that of uncut rows.

Attention is registered with transformers under `NAME`; no family's code is changed. A forward of uncut rows (samples,
probes) uses the implementation that the model had before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, from_numpy, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from windlass.data.collate import Array
from windlass.settings import SPLIT_QUERIES

NAME: Final = "windlass-long-rows"
ALIGNED: Final = 16  # torch's kernels copy masks of other widths


# --- the cut ---


class RowDocument(NamedTuple):
    """Tokens of a row that see no others. Padding consists of documents of one token, joined here to one with a window
    of 1."""

    start: int
    stop: int
    window: int | None


class RowPieces(NamedTuple):
    """Documents of the padded rows that this rank has two pieces of."""

    documents: tuple[tuple[RowDocument, ...], ...]  # of each row
    pieces: tuple[range, range]

    @property
    def alike(self) -> bool:
        return all(documents == self.documents[0] for documents in self.documents)


class CutBatch(NamedTuple):
    """A rank's part of a micro-batch."""

    inputs: dict[str, Any]
    tokens: Tensor  # of each row, without padding
    here: Tensor  # which targets of the uncut rows it has


@dataclass(frozen=True, slots=True)
class Cut:
    """Cuts a micro-batch down to the tokens of one rank of a group."""

    ranks: int
    rank: int

    def pieces(self, length: int) -> tuple[range, range]:
        """Return the columns of this rank's pieces of rows that are padded to a multiple of the pieces."""
        size = length // (2 * self.ranks)
        late = 2 * self.ranks - 1 - self.rank
        return range(self.rank * size, (self.rank + 1) * size), range(late * size, (late + 1) * size)

    def __call__(self, inputs: dict[str, Any], lengths: Sequence[int]) -> CutBatch:
        """Return this rank's part of a model's inputs. lengths: tokens of each row."""
        assert "cu_seq_lens_q" not in inputs, "rows that are laid end to end are not cut"
        ids = inputs["input_ids"].numpy()
        count, width = ids.shape
        fill = -width % (2 * self.ranks)
        pieces = self.pieces(width + fill)
        columns = np.concatenate([np.asarray(piece) for piece in pieces])

        def cut(rows: Array) -> Tensor:
            return from_numpy(np.pad(rows, ((0, 0), (0, fill)))[:, columns])

        positions = np.broadcast_to(np.arange(width + fill), (count, width + fill))
        if "position_ids" in inputs:
            positions = np.pad(inputs["position_ids"].numpy(), ((0, 0), (0, fill)))
        is_token = np.arange(width) < np.array(lengths)[:, None]
        local = np.full(width + fill, -1)
        local[columns] = np.arange(len(columns))
        supervised = inputs["supervised"].numpy()
        place = local[supervised % width]
        here = from_numpy(place >= 0)
        part = {
            **inputs,
            "input_ids": cut(ids),
            "position_ids": from_numpy(positions[:, columns]),
            "several": False,  # documents are separated here, where positions of two pieces look like more of them
            "row": RowPieces(tuple(map(_find_documents, positions)), pieces),
            "supervised": from_numpy(supervised // width * len(columns) + place)[here],
            "targets": inputs["targets"][here],
        }
        for name in ("document_edges", "longest_document"):  # of whole rows
            part.pop(name, None)
        if "sources" in inputs:
            part["sources"] = inputs["sources"][here]
        if "mask" in inputs:  # all that an uncut row has, but nothing of what fills up the last piece
            mask = np.ones_like(ids) if inputs["mask"] is None else inputs["mask"].numpy()
            part["mask"] = cut(mask)
        return CutBatch(part, cut(is_token).sum(1), here)


def _find_documents(positions: Array) -> tuple[RowDocument, ...]:
    """Return a row's documents, which begin where positions don't go on."""
    starts = [0, *(np.flatnonzero(np.diff(positions) != 1) + 1).tolist()]
    documents: list[RowDocument] = []
    for start, stop in zip(starts, [*starts[1:], len(positions)], strict=True):
        single = 1 if stop - start == 1 else None
        if single and documents and documents[-1].window:
            documents[-1] = documents[-1]._replace(stop=stop)
        else:
            documents.append(RowDocument(start, stop, single))
    return tuple(documents)


# --- the group ---


@dataclass(eq=False)
class RowGroup:
    """The ranks that share this rank's rows, by consecutive numbers."""

    ranks: int
    group: dist.ProcessGroup
    usual: str | None = None  # the attention of rows that are not cut
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext  # within it keys are waited for

    @classmethod
    def create(cls, ranks: int, timeout_seconds: float) -> RowGroup | None:
        """Create the groups. A collective. None if rows are not cut."""
        if ranks == 1:
            return None
        own, _ = dist.new_subgroups(ranks, timeout=timedelta(seconds=timeout_seconds))  # type: ignore[no-untyped-call]
        assert own is not None
        return cls(ranks, own)

    @property
    def cut(self) -> Cut:
        return Cut(self.ranks, dist.get_rank() % self.ranks)

    def draw_apart(self, seed: int) -> None:
        """Draw other random numbers on each rank: else dropout would have the same masks in every part of a row."""
        torch.manual_seed(seed + self.cut.rank)

    @contextmanager
    def attending(self, model: PreTrainedModel, row: RowPieces | None) -> Iterator[None]:
        """Compute attention over the group if a row is cut, else as usual. Layers that are recomputed in the backward
        need the same implementation then: it stays until the next forward."""
        self.usual = self.usual or model.config._attn_implementation
        wanted = NAME if row else self.usual
        if model.config._attn_implementation != wanted:
            model.set_attn_implementation(wanted)
        token = CURRENT.set((self, row) if row else None)
        try:
            yield
        finally:
            CURRENT.reset(token)


CURRENT: ContextVar[tuple[RowGroup, RowPieces] | None] = ContextVar("row", default=None)


# --- attention ---


class QuerySpan(NamedTuple):
    """Queries that are computed at once, and the keys that they see: up to the last query."""

    queries: int
    first_key: int
    stop: int
    window: int | None


class Mask:
    """Which keys this rank's queries see: what transformers passes to attention as its mask."""

    def __init__(self, group: RowGroup, row: RowPieces, window: int | None) -> None:
        self.group = group
        self.row = row
        self.window = window
        self.known: dict[Any, Any] = {}

    def spans(self, documents: Sequence[RowDocument], at_once: int | None) -> list[QuerySpan]:
        """Return the spans of this rank's pieces, in their order."""
        spans = []
        for piece in self.row.pieces:
            for document in documents:
                start = max(piece.start, document.start)
                stop = min(piece.stop, document.stop)
                window = document.window or self.window
                if window and document.stop - document.start <= window:
                    window = None
                size = SPLIT_QUERIES if window else at_once or max(1, stop - start)
                for first in range(start, stop, size):
                    end = min(first + size, stop)
                    key = document.start
                    if window:
                        key = max(key, (first - window + 1) // ALIGNED * ALIGNED)
                    spans.append(QuerySpan(end - first, key, end, window))
        return spans

    def by_rows(self, at_once: int | None) -> list[tuple[slice, list[QuerySpan]]]:
        """Return the spans of each row, or of all rows at once if they are alike."""
        if at_once not in self.known:
            row = self.row
            each = [(slice(i, i + 1), documents) for i, documents in enumerate(row.documents)]
            rows = [(slice(None), row.documents[0])] if row.alike else each
            self.known[at_once] = [(which, self.spans(documents, at_once)) for which, documents in rows]
        spans: list[tuple[slice, list[QuerySpan]]] = self.known[at_once]
        return spans

    def scores(self, span: QuerySpan, folds: int, like: Tensor) -> Tensor:
        """Return what is added to the scores: 0, or -inf of a key that a query doesn't see, for `folds` heads below
        each other. Keys end at the last query, so all masks of a window are lower right corners of one."""
        keys = span.window + SPLIT_QUERIES + ALIGNED if span.window else max(piece.stop for piece in self.row.pieces)
        keys = -(-keys // ALIGNED) * ALIGNED
        known = (folds, span.window, like.dtype)
        if known not in self.known:
            queries = SPLIT_QUERIES if span.window else max(1, SPLIT_QUERIES // folds)
            query = torch.arange(keys - queries, keys, device=like.device)[:, None]
            key = torch.arange(keys, device=like.device)
            hidden = key > query
            if span.window:
                hidden |= key <= query - span.window
            corner = torch.zeros(folds, queries, keys, dtype=like.dtype, device=like.device)
            self.known[known] = corner.masked_fill_(hidden, -torch.inf)
        corner = self.known[known][:, -span.queries :, -(span.stop - span.first_key) :]
        scores: Tensor = corner.reshape(-1, span.stop - span.first_key)
        return scores


def make_mask(*_: Any, local_size: int | None = None, **_others: Any) -> Mask:
    """Return the mask of the rows in this forward; `local_size`: the sliding window. For transformers' registry."""
    current = CURRENT.get()
    assert current is not None, "rows that are not cut have another attention"
    return Mask(*current, local_size)


def attend(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask,
    scaling: float | None = None,
    dropout: float = 0.0,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return the attention of this rank's queries to the keys of all ranks of its group. For transformers' registry.

    s_aux: sinks, a score per head that takes a share of each query's softmax.
    """
    device = query.device.type
    if torch.is_autocast_enabled(device):  # as torch's kernels do, but before keys are sent
        query, key, value = (tensor.to(torch.get_autocast_dtype(device)) for tensor in (query, key, value))
    folds = query.shape[1] // key.shape[1]
    # Kernels that need no mask, as those of torch have it: of full heads, or of grouped ones in 16 bits.
    unmasked = query.is_cuda and s_aux is None and (folds == 1 or query.element_size() == 2)
    rows = attention_mask.by_rows(None if unmasked else max(1, SPLIT_QUERIES // folds))
    spans = [(which, span.first_key, span.stop) for which, of_row in rows for span in of_row]
    gathered = GatherKeys.apply(key, value, attention_mask.group, spans)  # type: ignore[no-untyped-call]
    parts = iter(gathered)
    sinks = None
    if s_aux is not None:
        query, sinks = add_sinks(query, s_aux, folds, scaling or query.shape[-1] ** -0.5)
    outputs = []
    for which, of_row in rows:
        queries = torch.split(query[which], [span.queries for span in of_row], 2)
        attended = []
        for span, q in zip(of_row, queries, strict=True):
            k = next(parts)
            v = next(parts)
            if unmasked and not span.window:
                bias = causal_lower_right(q.shape[2], k.shape[2])
                grouped = {"enable_gqa": True} if folds > 1 else {}
                out = nn.functional.scaled_dot_product_attention(q, k, v, bias, dropout, scale=scaling, **grouped)
            else:  # heads that share keys are laid end to end, so that their keys exist once
                folded = torch.unflatten(q, 1, (-1, folds)).flatten(2, 3)
                scores = attention_mask.scores(span, folds, q)
                if sinks is not None:
                    k = torch.cat([sinks.expand(len(k), -1, -1, -1), nn.functional.pad(k, (0, folds))], 2)
                    v = nn.functional.pad(v, (0, 0, 1, 0))
                    scores = nn.functional.pad(scores, (1, 0))
                out = nn.functional.scaled_dot_product_attention(folded, k, v, scores, dropout, scale=scaling)
                out = torch.unflatten(out, 2, (folds, -1)).flatten(1, 2)
            attended.append(out)
        outputs.append(torch.cat(attended, 2))
    return torch.cat(outputs).transpose(1, 2).contiguous(), None


def add_sinks(query: Tensor, sinks: Tensor, folds: int, scaling: float) -> tuple[Tensor, Tensor]:
    """Return wider queries, and a key for each group of heads, whose product is each head's sink: torch's attention has
    none. The added columns number the heads that share keys."""
    heads = sinks.to(query.dtype).view(-1, folds)
    which = torch.eye(folds, dtype=query.dtype, device=query.device).repeat(len(heads), 1)[None, :, None]
    wider = torch.cat([query, which.expand(len(query), -1, query.shape[2], -1)], -1)
    return wider, nn.functional.pad(heads / scaling, (query.shape[-1], 0))[None, :, None]


class GatherKeys(torch.autograd.Function):
    """Gathers keys and values of a group's rows, and returns those that each span sees. Spans overlap: gradients are
    added up in one tensor of a full row, whose parts go back to the ranks that the keys came from."""

    @staticmethod
    def forward(
        ctx: Any, key: Tensor, value: Tensor, group: RowGroup, spans: Sequence[tuple[slice, int, int]]
    ) -> tuple[Tensor, ...]:
        ctx.group = group
        ctx.spans = spans
        ctx.shapes = key.shape, value.shape
        sent = torch.cat([key.flatten(), value.flatten()])
        received = sent.new_empty(group.ranks, len(sent))
        with group.waiting():
            dist.all_gather_into_tensor(received.view(-1), sent, group=group.group)
        wholes = []
        for shape, part in zip(ctx.shapes, torch.split(received, [key.numel(), value.numel()], 1), strict=True):
            whole = sent.new_empty(*shape[:2], group.ranks * shape[2], shape[3])
            for mine, there in _pair_pieces(part, whole, shape):
                there.copy_(mine)
            wholes.append(whole)
        return tuple(whole[rows, :, start:stop] for rows, start, stop in spans for whole in wholes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, Tensor, None, None]:
        group = ctx.group
        like = next(gradient for gradient in gradients if gradient is not None)
        sizes = [shape.numel() for shape in ctx.shapes]
        sent = like.new_empty(group.ranks, sum(sizes))
        for number, (shape, part) in enumerate(zip(ctx.shapes, torch.split(sent, sizes, 1), strict=True)):
            # Wide: rows with sinks add a gradient for each of many spans.
            dtype = torch.promote_types(like.dtype, torch.float32)
            whole = like.new_zeros(*shape[:2], group.ranks * shape[2], shape[3], dtype=dtype)
            for (rows, start, stop), gradient in zip(ctx.spans, gradients[number::2], strict=True):
                if gradient is not None:
                    whole[rows, :, start:stop] += gradient
            for mine, there in _pair_pieces(part, whole, shape):
                mine.copy_(there)
        received = like.new_empty(sum(sizes))
        dist.reduce_scatter_tensor(received, sent.view(-1), group=group.group)
        grad_key, grad_value = torch.split(received, sizes)
        return grad_key.view(ctx.shapes[0]), grad_value.view(ctx.shapes[1]), None, None


def _pair_pieces(parts: Tensor, whole: Tensor, shape: torch.Size) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield views of each piece: in the ranks' parts, and in the whole rows."""
    of_ranks = torch.unflatten(parts, 1, shape)
    size = shape[2] // 2
    for rank, part in enumerate(of_ranks):
        for mine, piece in zip(torch.split(part, size, 2), Cut(len(parts), rank).pieces(whole.shape[2]), strict=True):
            yield mine, whole[:, :, piece.start : piece.stop]


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, make_mask)


# --- the router's balancing loss ---


def balance_over(group: RowGroup, router_logits: Sequence[Tensor], top_k: int, tokens: Tensor) -> Tensor:
    """Return this rank's part of Mixtral's balancing loss of whole rows: the parts of a group add up to it.

    The loss is a sum over experts of their share of tokens, which has no gradient, times their mean probability, which
    is linear in the tokens of each rank.
    """
    weights = tokens.flatten().float()
    experts = router_logits[0].shape[-1]
    chosen = weights.new_zeros(experts)
    probabilities = weights.new_zeros(experts)
    for logits in router_logits:
        routed = logits.softmax(-1)
        picked = routed.topk(top_k, -1).indices
        chosen = chosen.scatter_add(0, picked.flatten(), weights.repeat_interleave(top_k))
        probabilities = probabilities + (routed.float() * weights[:, None]).sum(0)
    sums = torch.cat([chosen, weights.sum()[None]])
    dist.all_reduce(sums, group=group.group)
    count = sums[-1] * len(router_logits)
    share: Tensor = (sums[:-1] / count * (probabilities / count)).sum() * experts
    return share
