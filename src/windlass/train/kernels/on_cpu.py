"""What a CPU computes in another way than a GPU, because it is measurably faster there. Nothing else asks for a CPU.

Attention of packed rows, document by document: in a packed row each token attends to its own document only. A CPU
kernel computes the full square all the same: six times too much for six documents. (On GPUs, flash attention handles
documents itself.) Registered as an attention implementation of transformers. It handles masks that separate documents
in long enough rows and passes all others on to transformers' own.

Products of experts, one after the other with rounded numbers of rows, and of the head: see `rounds_rows`.

Adapters of experts, in float32 and transposed as one matrix: see `stack_adapters`. Their products, in parts that a
cache holds: see `split_by_expert`.
"""

from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from windlass.settings import BY_DOCUMENT_ELEMENTS, DOCUMENT_TOKENS
from windlass.weights.expert_shards import pack_experts, view_by_expert

NAME: Final = "windlass"  # of this implementation among transformers' own
PART_NUMBERS: Final = 2**20  # in the rows that are multiplied with experts' adapters at once
ROWS: Final = 16  # products have multiples of so many rows: see `rounds_rows`
DocumentLengths = list[int]
PRODUCTS: Final = {
    *(nn.functional.linear, nn.functional.scaled_dot_product_attention, torch.mm, torch.bmm, torch.addmm),
    *(torch.baddbmm, torch.matmul, Tensor.matmul, Tensor.__matmul__),
}


# --- experts ---


def is_on_cpu(tensor: Tensor) -> bool:
    return not tensor.is_cuda


def rounds_rows(x: Tensor) -> bool:
    """Return whether products of these rows have rounded numbers of rows; experts then multiply one after the other.

    On a CPU, oneDNN prepares each 16-bit product for its number of rows, which takes half a millisecond, and caches
    1,024 of them.
    """
    return x.device.type == "cpu" and x.element_size() == 2


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight, without a graph. Rows that exceed a rounded number are multiplied with those before them."""
    full = len(x) // ROWS * ROWS
    if not rounds_rows(x) or full in (0, len(x)):
        return x @ weight
    product = x.new_empty(len(x), weight.shape[1])
    torch.mm(x[:full], weight, out=product[:full])
    torch.mm(x[-ROWS:], weight, out=product[-ROWS:])
    return product


def split_by_expert(edges: Tensor, width: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield parts of rows that are sorted by expert: a slice of rows, one of experts, and where their rows end in it.

    Rows of this width are widened to float32, and so are the results that are added to the base's. Of all rows at once,
    these are tens of megabytes that the system maps, clears and takes back for every product.
    """
    ends = edges.tolist()
    first = 0
    for expert in range(1, len(ends)):
        is_last = expert + 1 == len(ends)
        if is_last or (ends[expert + 1] - ends[first]) * width > PART_NUMBERS:
            yield slice(ends[first], ends[expert]), slice(first, expert), edges[first + 1 : expert + 1] - ends[first]
            first = expert


def stack_adapters(a: Tensor, b: Tensor, experts: int, scaling: float) -> tuple[Tensor, Tensor]:
    """Return A as [experts, r, in] and s B as [experts, r, out], in float32: five times as fast as 16 bits for such
    narrow matrices.

    B's innermost dimension is the expert. Transposed as one matrix it can be read by expert without moving each number.
    It is scaled afterwards, because copying transposes in blocks and multiplying does not.
    """
    down = view_by_expert(".lora_A.", a, experts).float()
    turned = b.t().contiguous().float().mul_(scaling)
    return down, view_by_expert(".lora_B.", turned.t(), experts)


def pack_grad_b(grad_b: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Return s times the gradient [experts, r, out], packed like b. Copies full rows, then transposes one matrix."""
    experts, r, _ = grad_b.shape
    rows = b.new_empty(r, experts, b.shape[0])
    torch.mul(grad_b.transpose(0, 1), scaling, out=rows)
    return pack_experts(".lora_B.", rows.transpose(0, 1)).contiguous()


# --- bfloat16 that is only emulated ---


class RoundedProducts(TorchFunctionMode):
    """Products under autocast to bfloat16, computed in float32: kernels for bfloat16 on a processor without
    instructions for it take many times as long. Without gradients."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in PRODUCTS or not torch.is_autocast_enabled("cpu"):
            return func(*args, **(kwargs or {}))
        rounded = [each.bfloat16().float() if _is_floating(each) else each for each in args]
        with torch.autocast("cpu", enabled=False):
            return func(*rounded, **(kwargs or {})).bfloat16()


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


# --- attention ---


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    long = query[0].numel() >= BY_DOCUMENT_ELEMENTS and not query.is_cuda and not torch.compiler.is_compiling()
    lengths = find_documents(attention_mask) if attention_mask is not None and long else None
    if lengths is None or options.get("position_bias") is not None:
        output: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return output
    rows = zip(query, key, value, lengths, strict=True)
    return torch.stack([attend_by_document(module, *row, options) for row in rows]), None


def attend_by_document(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, lengths: DocumentLengths, options: dict[str, Any]
) -> Tensor:
    """Return [tokens, heads, width] of one row. Adjacent documents of equal length, which padding consists of, are
    batched."""
    groups = [(length, len(list(alike))) for length, alike in groupby(lengths)]
    tokens = [length * count for length, count in groups]
    parts = [torch.split(tensor, tokens, dim=1) for tensor in (query, key, value)]
    outputs = []
    for (length, count), *query_key_value in zip(groups, *parts, strict=True):
        fill = -length % DOCUMENT_TOKENS if length > 1 else 0  # causal attention hides it from the document
        documents = [tensor.unflatten(1, (count, length)).transpose(0, 1) for tensor in query_key_value]
        padded = [nn.functional.pad(tensor, (0, 0, 0, fill)) for tensor in documents]
        output, _ = sdpa_attention_forward(module, *padded, None, **{**options, "is_causal": True})
        outputs.append(output[:, :length].flatten(0, 1))
    return torch.cat(outputs)


def find_documents(mask: Tensor) -> list[DocumentLengths] | None:
    """Return the lengths of each row's documents if the mask encodes nothing else. Computed once per mask."""
    known: list[DocumentLengths] | bool | None = getattr(mask, "documents", False)
    if not isinstance(known, bool):
        return known
    lengths = _read_mask(mask)
    mask.documents = lengths  # type: ignore[attr-defined]
    return lengths


def _read_mask(mask: Tensor) -> list[DocumentLengths] | None:
    if mask.dtype != torch.bool or mask.shape[1] != 1 or mask.shape[2] != mask.shape[3]:
        return None
    places = torch.arange(mask.shape[2])
    first = mask[:, 0].int().argmax(-1)  # the first token that each token attends to
    if not torch.equal(mask[:, 0], (places >= first[..., None]) & (places <= places[:, None])):
        return None  # not a contiguous range that ends at the token itself
    begins = first == places
    if not torch.equal(first, torch.where(begins, places, 0).cummax(-1).values):
        return None  # a sliding window: the range begins inside a document
    edges = [[*torch.nonzero(row).flatten().tolist(), len(row)] for row in begins]
    return [[stop - start for start, stop in pairwise(row)] for row in edges]


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
