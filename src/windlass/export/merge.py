"""Merge an adapter into its base: check, write, open it again and prove it."""

import shlex
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch

from windlass.data.trained_template import write_template
from windlass.errors import Problem, UserError, raise_all
from windlass.export.card import describe_evaluation, write_card
from windlass.export.deltas import Deltas, read_deltas
from windlass.export.merged_files import COPIED, HUGGING_FACE, MISTRAL, OWN, MergePlan, plan_merge, write_merge
from windlass.export.mistral_files import BOTH, HF, LAYOUTS, choose_layout, plan_beside, plan_conversion, read_beside
from windlass.export.proof import Proof, compare_logits, prove_files
from windlass.export.screen import Say, ShowProgress
from windlass.export.served import report_missing_files
from windlass.export.source import MERGED, AdapterSource, claim_folder, require_local_base
from windlass.files import read_json
from windlass.hardware import GIB
from windlass.model import Base, read_base
from windlass.model.mistral_layout import has_mistral_layout_alone
from windlass.model.quantization import published_dtype
from windlass.model.stored import EMBEDDING, UNTIE, find_untied_heads
from windlass.observe.format import format_are, format_plural
from windlass.run_folder import BASES
from windlass.serve.servers import find_row
from windlass.weights.same_base import (
    CHAT_TEMPLATE,
    bytes_to_digest,
    describe_quantization,
    digest_files,
    read_recorded_base,
)

UNTOLD: Final = 0.95  # of an adapter, that rounding may take: then a merge is not told from its base
NOISY: Final = 0.2  # of the adapter's own KL, from which on a merge into 4 bits names a finer dtype
MISTRALS_FILES: Final = ("consolidated", "params.json")  # beginnings of names


def merge_adapter(
    source: AdapterSource,
    to: Path,
    *,
    base_name: str,
    dtype: str | None,
    layout: str | None,
    workers: int | None,
    say: Say,
    progress: ShowProgress,
) -> dict[str, Any]:
    """Write and prove the merged model; return what export.json records."""
    # 1. The adapter checked against the base, and every file of the result planned from headers.
    base = require_local_base(source)
    deltas = read_deltas(source, base)
    raise_all([Problem(problem, str(base.path), UNTIE, "untied-head") for problem in find_untied_heads(base)])
    if EMBEDDING in deltas.by_name and all(parameter.part != "head" for parameter in base.parameters):
        problem = "PEFT trained a copy of the embedding and left the head, which is tied to it, as it was"
        hint = "leave --merge out: one stored tensor can't be both"
        raise UserError(problem, str(source.weights), hint, "tied-embedding")
    is_mistrals = has_mistral_layout_alone(base)
    plan = plan_merge(base, deltas, to, dtype or OWN, MISTRAL if is_mistrals else HUGGING_FACE)
    has_mistrals = choose_layout(base, layout)
    beside = read_beside(base) if has_mistrals else None
    beside_plan = plan_beside(base, beside, deltas, to, dtype or OWN) if beside else None
    if not any(bool(torch.any(deltas.factors(name).b)) for name in deltas.by_name):
        say("note      every lora_B is zero: the adapter was never trained, and the merged model is the base")
    say(f"base      {base.name}: {format_are(len(deltas.by_name), 'parameter')} adapted")
    recorded = read_recorded_base(source.folder)
    quantization = recorded.get("base_quantisation", {})
    trained_on = describe_quantization(quantization)
    if trained_on:
        say(f"note      trained on the base in {trained_on}")
        say("note      merged into the published weights, which are nearer to the original")
        say(_compare_base_losses(source, base))
    digest = ""
    if recorded:
        with progress("comparing", bytes_to_digest(base)) as advance:
            digest = digest_files(base, advance)
    other_base = source.require_same_base(base, digest, say)

    # 2. Write each layout, open it again and compare it with base and adapter.
    size = plan.size
    if has_mistrals:
        size += beside_plan.size if beside_plan else plan.size
    claim_folder(source, base.path, to, MERGED, size)
    with_mistrals = has_mistrals or is_mistrals
    left_out = [name for name in plan.left_out if not (with_mistrals and name.startswith(MISTRALS_FILES))]
    if left_out:
        say(f"left out  {', '.join(left_out)}: they hold, or point to, weights without the adapter")
    served = find_row("vllm", base.family.model_type, "merged")
    if served.form and not with_mistrals:
        say(f"note      vLLM doesn't open this folder, {served.note}: add --layout mistral")
    report_missing_files(base, base_name, to, with_mistrals, say)

    def write(which: Base, plan: MergePlan, deltas: Deltas) -> Proof:
        counts = Counter(entry.how for entry in plan.entries)
        tensors = ", ".join(f"{count} {how}" for how, count in counts.items())
        say(f"writing   {plan.size / GIB:.2f} GiB in {format_plural(len(plan.headers), 'file')}: {tensors}")
        if plan.dropped:
            say(f"dropped   {len(plan.dropped)} scales: the weights are not quantized now, and scales mean nothing")
        with progress("merging", plan.size) as advance:
            write_merge(plan, which, deltas, to, advance, workers)
        copied = sum(entry.out.end - entry.out.start for entry in plan.entries if entry.how == COPIED)
        with progress("proving", copied) as advance:
            proof = prove_files(which, deltas, plan, to, source.weights, advance)
        _report_files(proof, say)
        return proof

    proof = write(base, plan, deltas)
    if beside and beside_plan:
        proof.deviations += write(beside, beside_plan, deltas).deviations
    elif has_mistrals and not proof.deviations:
        merged = read_base(to)
        proof.deviations += write(merged, plan_conversion(merged, to), Deltas({})).deviations
    is_served = served.result == "applied" or (served.form == "mistral" and with_mistrals)
    written_dtype = None if plan.dtype == OWN else plan.dtype
    write_template(to, recorded.get(CHAT_TEMPLATE, {}))
    write_card(
        source,
        to,
        base_name,
        merged=True,
        dtype=written_dtype,
        other_base=other_base,
        commands=["vllm serve ."] if is_served else [],
        evaluation=describe_evaluation(source, base, "pretrained=."),
    )

    # 3. Compare its logits with those of base and adapter.
    proof.logits = {"skipped": "the files are wrong"}
    if not proof.deviations:
        proof.logits = compare_logits(base, source, to)
    if "deviation" in proof.logits:
        proof.deviations.append(proof.logits["deviation"])
    _report_logits(proof.logits, say)
    return {
        "dtype": plan.dtype,
        "layouts": list(LAYOUTS) if has_mistrals else [BOTH if is_mistrals else HF],
        "base_digest": digest or None,
        "other_base": other_base,
        "base_quantisation": quantization or None,
        **asdict(proof),
    }


def _compare_base_losses(source: AdapterSource, base: Base) -> str:
    """Return held-out losses on the base as it was trained on, and as it is published."""
    run = source.run_folder
    record = read_json(run / BASES) if run else {}
    if not record:
        dtype = published_dtype(base) or "bf16"
        place = shlex.quote(str(run)) if run else "RUN"
        return f"hint      windlass best {place} --base-dtype {dtype}: both bases' held-out losses"
    by_dtype = record["losses"].items()
    losses = [f"{dtype.upper()} {alone:.4f}, with the adapter {adapted:.4f}" for dtype, (alone, adapted) in by_dtype]
    return f"held out  loss of {record['rows']} rows, by base ({record['adapter']}): {'; '.join(losses)}"


def _report_files(proof: Proof, say: Say) -> None:
    say(
        f"proven    {proof.tensors} tensors opened again; {proof.untouched} untouched are byte-equal "
        f"({proof.untouched_bytes / GIB:.2f} GiB); {proof.touched} touched computed again, {proof.elements:,} values"
    )
    if proof.kept is None or proof.least_kept is None:
        return
    parameter, least = proof.least_kept
    say(f"kept      {proof.kept:.1%} of the adapter is in the rounded weights; least: {least:.1%} in {parameter}")
    if proof.explained >= UNTOLD:
        say(
            f"warning   rounding alone may change that share by {proof.explained:.0%}: it can't tell whether so small "
            "an adapter is there; --dtype float32 rounds nothing away"
        )


def _report_logits(logits: dict[str, Any], say: Say) -> None:
    if "skipped" in logits:
        say(f"logits    not compared: {logits['skipped']}")
        return
    median = "" if logits["judged"] == "largest" else f", of the median token {logits['median_kl']:.2e}"
    say(
        f"logits    base + adapter to merged: KL {logits['kl']:.2e} nats a token{median} "
        f"(bound {logits['bound_kl']:.1e}; the adapter itself {logits['adapter_kl']:.2e}), "
        f"same top token {logits['same_top_token']:.1%}\n"
        f"          difference at most {logits['max_difference']:.3g}, of the median token "
        f"{logits['median_difference']:.3g} (bound on the {logits['judged']}: {logits['bound_difference']:.3g})"
    )
    if logits["dtype"] == "U8" and logits["kl"] > NOISY * logits["adapter_kl"]:
        say("hint      rounding to 4 bits adds noise that is large beside this adapter: --dtype bf16 has less")
