"""Next-token loss of a causal LM, in chunks of tokens: the logits of a full batch never exist at once."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from windlass.compat import CACHE
from windlass.errors import UserError
from windlass.introspect.describe import read_logit_shaping
from windlass.settings import TILE_TOKENS, TILE_VOCABULARY
from windlass.train.kernels import on_cpu
from windlass.train.kernels.documents import separate
from windlass.train.long_rows import Row, RowGroup, balance_over

# The head's weight is read once per chunk: with fewer tokens a GPU would wait for memory, not for arithmetic.
LEAST_TOKENS: Final = 256
ONE_SLICE: Final = 2**20  # up to this many logits are converted to float32 at once


class SourceLosses:
    """The loss per data set, accumulated along with the total and reduced in the same collective."""

    def __init__(self, names: Sequence[str], device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.names = names if len(names) > 1 else ()
        self.sums = torch.zeros(2 * len(self.names), dtype=dtype, device=device)  # losses per data set, then tokens

    def add(self, sources: Tensor, losses: Tensor) -> None:
        losses = losses.to(self.sums.dtype)
        self.sums.index_add_(0, sources, losses)
        self.sums.index_add_(0, sources + len(self.names), torch.ones_like(losses))

    def take(self) -> Tensor:
        """Return the sums since the last call."""
        sums = self.sums
        self.sums = torch.zeros_like(sums)
        return sums

    def means(self, sums: Sequence[float]) -> dict[str, float]:
        """Return the mean loss of each data set that had a token, from all ranks' sums."""
        losses = sums[: len(self.names)]
        tokens = sums[len(self.names) :]
        return {name: loss / n for name, loss, n in zip(self.names, losses, tokens, strict=True) if n}

    def describe(self, sums: Sequence[float], _: float) -> dict[str, Any]:
        """Return what is recorded of a step, by name."""
        return {"source_loss": self.means(sums) or None}


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


def make_forward(
    model: PreTrainedModel,
    search: DocumentSearch,
    by_source: SourceLosses | None = None,
    group: RowGroup | None = None,
) -> Callable[..., Any]:
    """Return a forward for a causal LM that returns its summed loss, or per-token figures if `per_token` is set. With
    `balances`, the router's balancing loss is returned beside it.
    group: the ranks that share rows."""
    config = model.config.get_text_config()
    scale, cap = read_logit_shaping(config)

    def forward(
        self: PreTrainedModel,
        input_ids: Tensor,
        supervised: Tensor,
        targets: Tensor,
        tokens: Tensor | None = None,
        balances: bool = False,
        sources: Tensor | None = None,
        per_token: bool = False,
        summed: bool = True,
        choose: bool = False,
        states: bool = False,
        against: "States | None" = None,
        several: bool | None = None,
        document_edges: Tensor | None = None,
        longest_document: int = 0,
        row: Row | None = None,
        parts: Sequence[tuple[Tensor, Tensor | None]] = (),
        **inputs: Any,
    ) -> Any:
        """Compute the loss.

        supervised: positions in the flattened batch whose next token counts; targets: those tokens. tokens: for the
        balancing loss, 1 for each token that is not padding; no layer needs it, because padding follows a row's tokens
        and attention is causal. sources: data set of each target, for `by_source`. summed: false for the loss of each
        target instead of their sum. states: return what the logits are made of; against: compare with these states of
        the adapted model (`compare_figures`). several: whether a row has more than one document; None: transformers
        finds out. document_edges, longest_document: of packed rows: see kernels/documents.py. row: how the rows are cut
        that `group` shares; None: they aren't. parts: positions in the flattened batch, each with its `tokens`, that
        get a balancing loss of their own.
        """
        if balances or parts:
            inputs["output_router_logits"] = True
        search.several = several
        documents = separate(document_edges if several else None, longest_document)
        try:
            with documents, group.attending(self, row) if group else nullcontext():
                outputs = self.model(input_ids=input_ids, **{"use_cache": False, **inputs})
        finally:
            search.several = None
        hidden = outputs.last_hidden_state.flatten(0, 1).index_select(0, supervised)
        head = self.get_output_embeddings()
        weight = _unsharded(head.weight)
        bias = getattr(head, "bias", None)
        if bias is not None:
            bias = _unsharded(bias.detach())
        shaping = LogitShaping(scale, cap, bias)
        if choose:  # return the likeliest next tokens, and keys and values for those after them
            chunks = (logits if bias is None else logits + bias for _, logits, _ in _iter_chunks(hidden, weight))
            return torch.cat([logits.argmax(1) for logits in chunks]), getattr(outputs, CACHE, None)
        if per_token:
            return token_figures(hidden, weight, targets, shaping)
        if states:
            return States(hidden, *copy_trained(head, weight, bias), shaping)
        if against is not None:
            return compare_figures(against, hidden, weight, shaping, targets)
        loss: Tensor
        if summed:
            loss = ChunkedCrossEntropy.apply(hidden, weight, targets, shaping, sources, by_source)  # type: ignore[no-untyped-call]
        else:
            loss = TokenCrossEntropy.apply(hidden, weight, targets, shaping)  # type: ignore[no-untyped-call]
        if parts:
            routed = [tuple(logits[part] for logits in outputs.router_logits) for part, _ in parts]
            of_parts = [balance_router(own, config, mask) for own, (_, mask) in zip(routed, parts, strict=True)]
            return loss, torch.stack(of_parts)
        if balances and group and row:
            assert tokens is not None
            return loss, balance_over(group, outputs.router_logits, config.num_experts_per_tok, tokens)
        return (loss, balance_router(outputs.router_logits, config, tokens)) if balances else loss

    return forward


def balance_router(logits: tuple[Tensor, ...], config: Any, tokens: Tensor | None) -> Tensor:
    """Return the balancing loss: Mixtral's, which every mixture in transformers uses."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    experts = getattr(config, "num_experts", None) or config.num_local_experts
    loss: Tensor = load_balancing_loss_func(logits, experts, config.num_experts_per_tok, tokens)
    return loss


def _unsharded(tensor: Tensor) -> Tensor:
    """Return the full tensor, also of a head that FSDP2 shards in a group of its own."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def router_loss_weight(model: PreTrainedModel, coefficient: float | None = None) -> float:
    """Return the weight of the balancing loss: the run file's, else config.json's if it enables this loss, else 0.

    TRL's SFTTrainer adds it to every mixture, whatever config.json says.
    """
    config = model.config.get_text_config()
    if coefficient and not hasattr(config, "output_router_logits"):
        problem = f"{type(model).__name__} has no balancing loss of its router to weight"
        raise UserError(problem, "train.router_aux_loss_coef", "leave it out", "no-balancing-loss")
    if coefficient is not None or not getattr(config, "output_router_logits", False):
        return coefficient or 0.0
    return float(getattr(config, "router_aux_loss_coef", 0.0) or 0.0)


class LogitShaping(NamedTuple):
    """What a family does to the head's product before the softmax."""

    scale: float = 1.0
    cap: float | None = None  # bound of the logits, by tanh
    bias: Tensor | None = None

    def apply(self, logits: Tensor) -> Tensor | None:
        """Shape logits in place. Returns the factor of their gradient, if it is not constant."""
        if self.bias is not None:
            logits += self.bias.to(logits.dtype)
        if self.scale != 1.0:
            logits *= self.scale
        if self.cap is None:
            return None
        logits.div_(self.cap).tanh_()
        slope = 1 - logits * logits
        logits *= self.cap
        return slope

    def differentiate(self, gradient: Tensor, slope: Tensor | None) -> None:
        """Turn the gradient of shaped logits, in place, into that of the product."""
        if slope is not None:
            gradient *= slope
        if self.scale != 1.0:
            gradient *= self.scale


PLAIN: Final = LogitShaping()


class ChunkedCrossEntropy(torch.autograd.Function):
    """The summed cross entropy of `hidden @ weight.T` against `targets`; `weight` is usually frozen.

    Gradients are computed along with the loss, chunk by chunk, while the logits exist: two products with the head
    instead of three. They are gradients of the sum: the number of tokens to divide by is known only once all ranks have
    counted, and divides the adapter's gradients then.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        shaping: LogitShaping = PLAIN,
        sources: Tensor | None = None,
        by_source: SourceLosses | None = None,
    ) -> Tensor:
        wants_gradient = ctx.needs_input_grad[0]
        grad_hidden = torch.empty_like(hidden) if wants_gradient else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for rows, logits, blocks in _iter_chunks(hidden, weight):
            slope = shaping.apply(logits)
            differentiate = wants_gradient or grad_weight is not None
            for part, picked in _pick_targets(logits, targets[rows], differentiate=differentiate):
                total -= picked.sum()
                if sources is not None and by_source is not None:
                    by_source.add(sources[rows][part], -picked)
            if differentiate:
                shaping.differentiate(logits, slope)
            if grad_hidden is not None:
                grad_hidden[rows] = _times_weight(logits, blocks)
            if grad_weight is not None:
                grad_weight += logits.t() @ hidden[rows].to(logits.dtype)
            del logits
        ctx.gradients = grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        grad_hidden, grad_weight = ctx.gradients
        ctx.gradients = None
        if grad_hidden is not None:
            grad_hidden.mul_(upstream)
        if grad_weight is not None:
            grad_weight.mul_(upstream)
        return grad_hidden, grad_weight, None, None, None, None


class TokenCrossEntropy(torch.autograd.Function):
    """The cross entropy of each target, whose factors in the loss depend on all of them, as those of pairs do.

    As in `ChunkedCrossEntropy` the gradient of `hidden` is computed while the logits exist, for a factor of 1: what a
    token's own factor scales. A trained head's gradient sums over tokens, so it is computed in backward.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, shaping: LogitShaping = PLAIN) -> Tensor:
        wants_gradient = ctx.needs_input_grad[0]
        grad_hidden = torch.empty_like(hidden) if wants_gradient else None
        losses = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        for rows, logits, blocks in _iter_chunks(hidden, weight):
            slope = shaping.apply(logits)
            of_chunk = losses[rows]
            for part, picked in _pick_targets(logits, targets[rows], differentiate=wants_gradient):
                of_chunk[part] = -picked
            if grad_hidden is not None:
                shaping.differentiate(logits, slope)
                grad_hidden[rows] = _times_weight(logits, blocks)
            del logits
        ctx.gradient = grad_hidden
        ctx.shaping = shaping
        if ctx.needs_input_grad[1]:
            ctx.save_for_backward(hidden, weight, targets)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad_hidden = ctx.gradient
        ctx.gradient = None
        if grad_hidden is not None:
            grad_hidden.mul_(upstream[:, None])
        if not ctx.needs_input_grad[1]:
            return grad_hidden, None, None, None
        hidden, weight, targets = ctx.saved_tensors
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for rows, logits, _ in _iter_chunks(hidden, weight):
            slope = ctx.shaping.apply(logits)
            for _ in _pick_targets(logits, targets[rows], differentiate=True):
                pass
            ctx.shaping.differentiate(logits, slope)
            logits *= upstream[rows, None]
            grad_weight += logits.t() @ hidden[rows].to(logits.dtype)
            del logits
        return grad_hidden, grad_weight.to(weight.dtype), None, None


@torch.no_grad()
def token_figures(hidden: Tensor, weight: Tensor, targets: Tensor, shaping: LogitShaping = PLAIN) -> Tensor:
    """Return per supervised token: loss, whether the first choice is correct, entropy. Shape [3, tokens]."""
    figures = torch.empty(3, len(targets), dtype=torch.float32, device=hidden.device)
    for rows, logits, _ in _iter_chunks(hidden, weight):
        shaping.apply(logits)
        targets_of_chunk = targets[rows]
        figures_of_chunk = figures[:, rows]
        for part in _slices(logits):
            log_probs = torch.log_softmax(logits[part], -1, dtype=torch.float32)
            target = targets_of_chunk[part]
            figures_of_chunk[0, part] = -log_probs.gather(1, target.unsqueeze(1)).squeeze(1)
            figures_of_chunk[1, part] = (log_probs.argmax(1) == target).float()
            figures_of_chunk[2, part] = -(log_probs.exp() * log_probs).sum(1)
            del log_probs
        del logits
    return figures


@dataclass(frozen=True)  # not a tuple: FSDP2 casts the tensors of arguments that it knows how to open
class States:
    """What the logits of a batch's supervised positions are made of."""

    hidden: Tensor
    weight: Tensor | None  # of the head, and its bias; None if they are not trained
    bias: Tensor | None
    shaping: LogitShaping


def copy_trained(head: nn.Module, weight: Tensor, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return copies of a head's weight and bias if they are trained: the base's are written into them."""
    if not any(parameter.requires_grad for parameter in head.parameters(recurse=False)):
        return None, bias
    return weight.detach().clone(), None if bias is None else bias.clone()


@torch.no_grad()
def compare_figures(adapted: States, hidden: Tensor, weight: Tensor, shaping: LogitShaping, targets: Tensor) -> Tensor:
    """Return per supervised token: the adapted model's loss, the base's, and KL(adapted || base). Shape [3, tokens].

    hidden, weight, shaping: the base's. The divergence is that of the adapted model's prediction p from the base's q,
    the sum of p (log p - log q) over the vocabulary. q - p, whose sum is 0, takes out how their sums are rounded.
    """
    figures = torch.empty(3, len(targets), dtype=torch.float32, device=hidden.device)
    shaping_of_adapted = adapted.shaping._replace(bias=adapted.bias)
    for rows, of_base, blocks in _iter_chunks(hidden, weight):
        if adapted.weight is not None:
            blocks = _split_weight(adapted.weight, of_base.dtype)
        of_adapted = _compute_logits(adapted.hidden[rows], blocks, of_base.dtype)
        shaping.apply(of_base)
        shaping_of_adapted.apply(of_adapted)
        figures_of_chunk = figures[:, rows]
        for part in _slices(of_base):
            log_p = torch.log_softmax(of_adapted[part], -1, dtype=torch.float32)
            log_q = torch.log_softmax(of_base[part], -1, dtype=torch.float32)
            target = targets[rows][part].unsqueeze(1)
            figures_of_chunk[0, part] = -log_p.gather(1, target).squeeze(1)
            figures_of_chunk[1, part] = -log_q.gather(1, target).squeeze(1)
            p = log_p.exp()
            figures_of_chunk[2, part] = (p * (log_p - log_q) + (log_q.exp() - p)).sum(1)
            del log_p, log_q, p
        del of_base, of_adapted
    return figures


def tokens_per_chunk(count: int, vocabulary: int) -> int:
    """Return how many tokens' logits fit in the memory planned for them; a quarter of it is for float32 copies."""
    return max(LEAST_TOKENS, min(count, TILE_TOKENS) * TILE_VOCABULARY * 3 // (4 * vocabulary))


def _iter_chunks(hidden: Tensor, weight: Tensor) -> Iterator[tuple[slice, Tensor, tuple[Tensor, ...]]]:
    """Yield rows, their logits, and the weight's blocks in the compute dtype (one block if no cast is needed). Delete
    the logits before asking for the next ones: else the logits of two chunks exist at once."""
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    blocks = _split_weight(weight, dtype)
    tokens = tokens_per_chunk(len(hidden), len(weight))
    with torch.autocast(device, enabled=False):
        for start in range(0, len(hidden), tokens):
            rows = slice(start, min(start + tokens, len(hidden)))
            of_chunk = _compute_logits(hidden[rows], blocks, dtype)
            yield rows, of_chunk, blocks
            del of_chunk


def _split_weight(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return the weight's blocks that are cast one at a time; one block if no cast is needed."""
    return (weight,) if weight.dtype == dtype else torch.split(weight, TILE_VOCABULARY)


def _compute_logits(hidden: Tensor, blocks: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    logits = [on_cpu.multiply(hidden.to(dtype), block.to(dtype).t()) for block in blocks]
    return logits[0] if len(logits) == 1 else torch.cat(logits, 1)


def _pick_targets(logits: Tensor, targets: Tensor, *, differentiate: bool) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of a chunk and the targets' log-probabilities. With `differentiate` the logits become the gradient
    of the negative ones: softmax, minus 1 at the target."""
    for part in _slices(logits):
        log_probs = torch.log_softmax(logits[part], -1, dtype=torch.float32)
        target = targets[part].unsqueeze(1)
        picked = log_probs.gather(1, target)
        yield part, picked.squeeze(1)
        if differentiate:
            at_target = log_probs.exp_().gather(1, target) - 1
            logits[part] = log_probs.scatter_(1, target, at_target)
        del log_probs


def _slices(logits: Tensor) -> list[slice]:
    """Return slices that convert an eighth of a large chunk's rows to float32 at a time."""
    rows = len(logits) if logits.numel() <= ONE_SLICE else max(1, len(logits) // 8)
    return [slice(start, start + rows) for start in range(0, len(logits), rows)]


def _times_weight(logits: Tensor, blocks: tuple[Tensor, ...]) -> Tensor:
    if len(blocks) == 1:
        return on_cpu.multiply(logits, blocks[0].to(logits.dtype))
    parts = torch.split(logits, [len(block) for block in blocks], 1)
    total = torch.zeros(len(logits), blocks[0].shape[1], dtype=torch.float32, device=logits.device)
    for part, block in zip(parts, blocks, strict=True):
        total += on_cpu.multiply(part, block.to(logits.dtype))
    return total
