"""The head of a causal LM: losses, log-probabilities and tokens from hidden states.

In chunks of tokens: the logits of a full batch never exist at once.
"""

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from windlass.introspect.describe import read_logit_shaping
from windlass.settings import TILE_TOKENS, TILE_VOCABULARY
from windlass.train.kernels import on_cpu

# The head's weight is read once per chunk: with fewer tokens a GPU would wait for memory, not for arithmetic.
LEAST_TOKENS: Final = 256
ONE_SLICE: Final = 2**20  # up to this many logits are converted to float32 at once


class Head:
    """What a causal LM makes of the hidden states [tokens, width] that its forward returns: see forward.py."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.scale, self.cap = read_logit_shaping(model.config.get_text_config())

    def loss(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the summed cross entropy, and each target's without a gradient."""
        return ChunkedCrossEntropy.apply(hidden, self.weight, targets, self.shaping)  # type: ignore[no-untyped-call, no-any-return]

    def log_probs(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return each target's log-probability."""
        return TargetLogProbs.apply(hidden, self.weight, targets, self.shaping)  # type: ignore[no-untyped-call, no-any-return]

    @torch.no_grad()
    def figures(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return per target: loss, whether the first choice is correct, entropy. Shape [3, tokens]."""
        figures = torch.empty(3, len(targets), dtype=torch.float32, device=hidden.device)
        shaping = self.shaping
        for rows, logits, _ in _iter_chunks(hidden, self.weight):
            shaping.apply(logits)
            figures_of_chunk = figures[:, rows]
            for part in _slices(logits):
                log_probs = torch.log_softmax(logits[part], -1, dtype=torch.float32)
                target = targets[rows][part]
                figures_of_chunk[0, part] = -log_probs.gather(1, target.unsqueeze(1)).squeeze(1)
                figures_of_chunk[1, part] = (log_probs.argmax(1) == target).float()
                figures_of_chunk[2, part] = -(log_probs.exp() * log_probs).sum(1)
                del log_probs
            del logits
        return figures

    @torch.no_grad()
    def argmax(self, hidden: Tensor) -> Tensor:
        """Return the likeliest next tokens."""
        bias = self.shaping.bias
        chunks = (logits if bias is None else logits + bias for _, logits, _ in _iter_chunks(hidden, self.weight))
        return torch.cat([logits.argmax(1) for logits in chunks])

    def capture(self, hidden: Tensor) -> "States":
        """Return what the logits are made of, to be compared with a base that is written over a trained head."""
        shaping = self.shaping
        module = self.model.get_output_embeddings()
        if not any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
            return States(hidden, None, shaping)
        bias = None if shaping.bias is None else shaping.bias.clone()
        return States(hidden, self.weight.detach().clone(), shaping._replace(bias=bias))

    @torch.no_grad()
    def compare(self, adapted: "States", hidden: Tensor, targets: Tensor) -> Tensor:
        """Return per target: the adapted model's loss, the base's, and KL(adapted || base). Shape [3, tokens].

        hidden: the base's. The divergence is that of the adapted model's prediction p from the base's q, the sum of
        p (log p - log q) over the vocabulary. q - p, whose sum is 0, takes out how their sums are rounded.
        """
        figures = torch.empty(3, len(targets), dtype=torch.float32, device=hidden.device)
        shaping = self.shaping
        for rows, of_base, blocks in _iter_chunks(hidden, self.weight):
            if adapted.weight is not None:
                blocks = _split_weight(adapted.weight, of_base.dtype)
            of_adapted = _compute_logits(adapted.hidden[rows], blocks, of_base.dtype)
            shaping.apply(of_base)
            adapted.shaping.apply(of_adapted)
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

    @property
    def weight(self) -> Tensor:
        return _unsharded(self.model.get_output_embeddings().weight)

    @property
    def shaping(self) -> "LogitShaping":
        bias = getattr(self.model.get_output_embeddings(), "bias", None)
        return LogitShaping(self.scale, self.cap, None if bias is None else _unsharded(bias.detach()))


def _unsharded(tensor: Any) -> Tensor:
    """Return the full tensor, also of a head that FSDP2 shards in a group of its own."""
    whole: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole


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
    """The summed cross entropy of `hidden @ weight.T` against `targets`, and each target's; `weight` is usually frozen.

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
    ) -> tuple[Tensor, Tensor]:
        wants_gradient = ctx.needs_input_grad[0]
        grad_hidden = torch.empty_like(hidden) if wants_gradient else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        losses = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        for rows, logits, blocks in _iter_chunks(hidden, weight):
            slope = shaping.apply(logits)
            differentiate = wants_gradient or grad_weight is not None
            for part, picked in _pick_targets(logits, targets[rows], differentiate=differentiate):
                total -= picked.sum()
                losses[rows][part] = -picked
            if differentiate:
                shaping.differentiate(logits, slope)
            if grad_hidden is not None:
                grad_hidden[rows] = _times_weight(logits, blocks)
            if grad_weight is not None:
                grad_weight += logits.t() @ hidden[rows].to(logits.dtype)
            del logits
        ctx.gradients = grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype)
        ctx.mark_non_differentiable(losses)
        return total, losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Any) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad_hidden, grad_weight = ctx.gradients
        ctx.gradients = None
        if grad_hidden is not None:
            grad_hidden.mul_(upstream)
        if grad_weight is not None:
            grad_weight.mul_(upstream)
        return grad_hidden, grad_weight, None, None


class TargetLogProbs(torch.autograd.Function):
    """The log-probability of each target, whose factors in the loss depend on all of them, as those of pairs do.

    As in `ChunkedCrossEntropy` the gradient of `hidden` is computed while the logits exist, for a factor of -1: what a
    token's own factor scales. A trained head's gradient sums over tokens, so it is computed in backward.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, shaping: LogitShaping = PLAIN) -> Tensor:
        wants_gradient = ctx.needs_input_grad[0]
        grad_hidden = torch.empty_like(hidden) if wants_gradient else None
        log_probs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        for rows, logits, blocks in _iter_chunks(hidden, weight):
            slope = shaping.apply(logits)
            for part, picked in _pick_targets(logits, targets[rows], differentiate=wants_gradient):
                log_probs[rows][part] = picked
            if grad_hidden is not None:
                shaping.differentiate(logits, slope)
                grad_hidden[rows] = _times_weight(logits, blocks)
            del logits
        ctx.gradient = grad_hidden
        ctx.shaping = shaping
        if ctx.needs_input_grad[1]:
            ctx.save_for_backward(hidden, weight, targets)
        return log_probs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad_hidden = ctx.gradient
        ctx.gradient = None
        if grad_hidden is not None:
            grad_hidden.mul_(-upstream[:, None])
        if not ctx.needs_input_grad[1]:
            return grad_hidden, None, None, None
        hidden, weight, targets = ctx.saved_tensors
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for rows, logits, _ in _iter_chunks(hidden, weight):
            slope = ctx.shaping.apply(logits)
            for _ in _pick_targets(logits, targets[rows], differentiate=True):
                pass
            ctx.shaping.differentiate(logits, slope)
            logits *= -upstream[rows, None]
            grad_weight += logits.t() @ hidden[rows].to(logits.dtype)
            del logits
        return grad_hidden, grad_weight.to(weight.dtype), None, None


class States(NamedTuple):
    """What the logits of a batch's supervised positions are made of."""

    hidden: Tensor
    weight: Tensor | None  # of a trained head; None: the base's
    shaping: LogitShaping


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
