"""The forward of a causal LM without its head: the hidden states of the positions whose next token counts."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from windlass.train.kernels.documents import separate
from windlass.train.long_rows import RowGroup, RowPieces


class RouterLogits:
    """What each layer's router gave, where FSDP2 doesn't find it.

    A gradient of any tensor in a model's output makes FSDP2 gather the head's weights again: that of a router's logits
    comes late, and on those ranks alone that balance the router. So this is no tuple and no dataclass.
    """

    def __init__(self, layers: tuple[Tensor, ...]) -> None:
        self.layers = layers


class DocumentSearch:
    """transformers' search for restarted positions, for which the host waits in every forward, skipped where a batch
    says whether a row has more than one document."""

    def __init__(self, original: Callable[[Tensor], Tensor | None]) -> None:
        self.original = original
        self.several: bool | None = None  # whether a row has more than one document; None: search

    def __call__(self, positions: Tensor) -> Tensor | None:
        """Return the document's number of each position, None if each row is one document."""
        if self.several is None:
            return self.original(positions)
        if not self.several:
            return None
        return (torch.diff(positions, prepend=positions[:, :1] - 1) != 1).cumsum(-1)


def make_forward(search: DocumentSearch, group: RowGroup | None = None) -> Callable[..., Any]:
    """Return a forward for a causal LM that stops before the head: see `head.Head` for the rest.
    group: the ranks that share rows."""

    def forward(
        self: PreTrainedModel,
        input_ids: Tensor,
        supervised: Tensor,
        several: bool | None = None,
        document_edges: Tensor | None = None,
        longest_document: int = 0,
        row: RowPieces | None = None,
        **inputs: Any,
    ) -> Any:
        """Return the decoder's output, with the hidden states [tokens, width] of the supervised positions alone.

        supervised: positions in the flattened batch. several: whether a row has more than one document; None:
        transformers finds out. document_edges, longest_document: of packed rows: see kernels/documents.py. row: how the
        rows are cut that `group` shares; None: they aren't. No layer needs a padding mask, because padding follows a
        row's tokens and attention is causal.
        """
        search.several = several
        documents = separate(document_edges if several else None, longest_document)
        try:
            with documents, group.attending(self, row) if group else nullcontext():
                outputs = self.model(input_ids=input_ids, **{"use_cache": False, **inputs})
        finally:
            search.several = None
        outputs.last_hidden_state = outputs.last_hidden_state.flatten(0, 1).index_select(0, supervised)
        if getattr(outputs, "router_logits", None) is not None:
            outputs.router_logits = RouterLogits(outputs.router_logits)
        return outputs

    return forward
