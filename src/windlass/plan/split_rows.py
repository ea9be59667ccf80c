"""Refuse rows split over ranks (`layout.context_parallel`) where the result would not be that of one rank.

A group of N consecutive ranks trains on the same rows. Each rank has an early and a late piece of every row, so that
causal attention is balanced, and keys and values of all pieces are gathered before attention.
"""

from collections.abc import Iterator

from windlass.errors import Problem
from windlass.hardware import Gpu
from windlass.model import Base
from windlass.plan.layout import Layout, list_divisors
from windlass.runfile import Loaded, RunFile

KEY = "layout.context_parallel"
PIECES = 2  # of each row on every rank of its group: an early and a late one
# model_type of families proven equal to one rank. Add a family once tests/test_long_rows.py proves it.
PROVEN = """
arcee cohere cohere2 deepseek_v2 deepseek_v3 dots1 ernie4_5 ernie4_5_moe exaone4 gemma gemma3 gemma3_text glm glm4
glm4_moe gpt_oss granite granitemoe hunyuan_v1_dense llama minimax_m2 ministral ministral3 mistral mistral3 mistral4
mixtral olmo2 olmo3 olmoe phi3 qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 starcoder2
"""
FAMILIES = tuple(PROVEN.split())
# Kinds of rotary positions that depend on the longest position in a batch, of which a rank sees its own pieces only.
ROPE_OF_BATCH = ("dynamic", "longrope")


def pad_to_pieces(tokens: int, split: int) -> int:
    """Return the tokens of a row once padded to pieces of equal length."""
    pieces = PIECES * split if split > 1 else 1
    return -(-tokens // pieces) * pieces


def check_split_rows(request: Layout, loaded: Loaded, base: Base) -> Iterator[Problem]:
    """Yield a problem for each setting that rows split over ranks don't work with."""
    split = request.context_parallel
    if split < 2:
        return
    where = loaded.where
    place = where(KEY)
    if why_not := why_not_split(base):
        yield Problem(why_not, place, "leave layout.context_parallel out, or use another model", "not-splittable")
    if request.ranks % split:
        possible = [str(size) for size in list_divisors(request.ranks) if size > 1]
        hint = f"it may be {', '.join(possible)}" if possible else "leave it out, or set cluster.gpus_per_node"
        text = f"context_parallel {split} does not divide the number of ranks, {request.ranks}"
        yield Problem(text, place, hint, "ranks-not-divisible")
    length = loaded.run.data.max_length
    if length != "auto" and length < PIECES * split:
        text = f"a row of at most {length} tokens can't be cut into {PIECES * split} pieces, two for each rank"
        hint = f"set data.max_length to {PIECES * split} or more, or leave layout.context_parallel out"
        yield Problem(text, where("data.max_length"), hint, "row-too-short")
    for key, what, hint in _list_unsupported(loaded, base):
        text = f"{what} with context_parallel {split}: not supported yet"
        yield Problem(text, where(key), hint, "not-with-split-rows")


def list_splits(request: Layout, loaded: Loaded, base: Base) -> tuple[int, ...]:
    """Return the numbers of ranks that rows could be split over. Groups lie within a node, or have all of its GPUs."""
    if why_not_split(base) or any(_list_unsupported(loaded, base)):
        return ()
    length = loaded.run.data.length
    gpus = request.gpus_per_node
    divisors = list_divisors(request.ranks)
    return tuple(n for n in divisors if 1 < n <= length // PIECES and 0 in (gpus % n, n % gpus))


def needs_mask(run: RunFile, base: Base, gpu: Gpu) -> bool:
    """Return whether a square mask separates packed documents. Attention by document (train/kernels/documents.py) asks
    of a model what split rows ask, and of a GPU flash attention in 16 bits: NVIDIA's from Ampere on."""
    attention = run.model.attn_implementation or base.family.usual_attention
    proven = attention == "sdpa" and base.family.model_type in FAMILIES and not base.config.get("attention_dropout")
    capable = gpu.has_bf16 and gpu.name != "cpu" and not gpu.name.startswith("mi")
    return run.masked and not (proven and capable and run.in_16_bits and not run.train.compile)


def why_not_split(base: Base) -> str:
    """Return why this model's rows can't be split over ranks; empty if they can."""
    family = base.family
    if family.without_formula:
        layers = f"{family.without_formula} of {base.dims['layers']} layers"
        return f"{layers} of {family.causal_lm} carry a state along the row (linear attention, a state space or alike)"
    if family.model_type not in FAMILIES:
        return f"context_parallel is not proven for {family.causal_lm} ({family.model_type})"
    kind = find_rope_of_batch(base)
    return f"rope type {kind} of {base.name} depends on the row's length, and a rank has pieces of it" if kind else ""


def find_rope_of_batch(base: Base) -> str:
    """Return the kind of rotary positions that depend on the longest row of a batch; empty if none do."""
    rope = base.config.get("rope_parameters") or base.config.get("rope_scaling") or {}
    tables = (rope, *(value for value in rope.values() if isinstance(value, dict)))
    kinds = (str(table.get("rope_type", table.get("type"))) for table in tables)
    return next((kind for kind in kinds if kind in ROPE_OF_BATCH), "")


def _list_unsupported(loaded: Loaded, base: Base) -> Iterator[tuple[str, str, str]]:
    """Yield a key, what it sets, and a hint."""
    run = loaded.run
    train = run.train
    attention = run.model.attn_implementation or base.family.usual_attention
    if attention not in ("sdpa", base.family.usual_attention):
        yield "model.attn_implementation", f"attention {attention}", "write sdpa"
    if run.objective.of_pairs:
        yield "train.objective", f"objective {train.objective}", "leave layout.context_parallel out"
    if train.compile:
        yield "train.compile", "compiled layers", "set train.compile: false"
    if run.data.keep:
        yield "data.keep", "kept sets", "leave data.keep out"
    if loaded.trial:
        yield KEY, "a sweep", "start separate runs, or leave layout.context_parallel out"
