"""Collect statistics of a data set while it is tokenized, and judge it before a model is loaded. The keys of
data.json."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from windlass.data.chat import list_ends
from windlass.data.documents import Documents
from windlass.data.formats import Format
from windlass.data.packing import group_by_length, pack_rows, shuffle
from windlass.data.preference import SIDES
from windlass.data.progress import show_progress
from windlass.data.select import RowSet, count_per_epoch
from windlass.errors import Problem, Where
from windlass.observe.format import format_are, format_plural

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from windlass.runfile import Data, RunFile

Audit = dict[str, Any]
Chosen = Sequence[tuple[RowSet, Format]]
Lengths = npt.NDArray[np.int64]
Runs = npt.NDArray[np.uint64]
# Ways to batch rows, by their names in data.json.
PACKED = "packed"
PADDING_FREE = "padding-free"
LENGTH_GROUPED = "padded in batches of like length"
# Most documents that they are compared on: with more, the shares change by less than 0.1 %.
BATCHED_DOCUMENTS = 200_000
# Two documents are near duplicates if they share this fraction of all runs of this many tokens that either has.
NEAR = 0.8
RUN = 5
TEMPLATE_DOCUMENTS, TEMPLATE_SHARE = 8, 0.01  # a run in more validation documents than this belongs to a template
COMPARED_TOKENS = 1 << 24  # in larger sets an eighth of the runs is compared
HASHED_TOKENS = 1 << 18  # at a time, which a processor's cache has room for
MARK_BITS = 24  # of a hash, by which runs that no validation document has are told at once
MARK_SHIFT = np.uint64(64 - MARK_BITS)

LONGER = 0.9  # of the pairs whose chosen answer is the longer one: more are warned of
MOST_IDS = 1 << 24  # token ids above it are none of any vocabulary, and are counted as one
TAIL = 3  # tokens at the end of a supervised part among which the end token is: templates write a line break behind it
# What is said of rows, by kinds of `remarks`: facts, and warnings.
FACTS = {
    "split": "{chats} became {split_into:,} rows: {example}. Each answer is trained on once, behind the prompt of "
    "inference ({where})",
    "date": "the chat template writes today's date into {rows}, so that other days give other rows ({example})",
    "filled": "in {rows} nulls among a call's arguments, as of {example!r}, were taken for Parquet's filler and left "
    "out: write arguments as JSON text to keep them ({where})",
    "tools": "in {rows} nulls in `tools` were taken for Parquet's filler and left out: write tools as JSON text to "
    "keep them ({where})",
    "thought": "in {rows} an answer lacks the end of the prompt that generation would start from, such as a thought "
    "that it opens or closes: {example} ({where})",
    "blank": "in {rows} the prompt before an answer ends in other white space than the one that generation would start "
    "from: {example} ({where})",
}
WARNINGS = {
    "prompt": "in {rows} the chat template doesn't write an answer behind the prompt that generation would start from: "
    "join it to the answer that it follows, or name another data.chat_template ({where})",
    "bare": "{rows} of text are joined as they are, without the chat template by which servers ask this model: "
    "{example} writes them as chats ({where})",
    "empty": "{rows} with an empty answer: the model learns to end its turn at once ({where})",
    "ends": "in {rows} an answer spells the token that ends it, {example!r}: what follows it is trained on and never "
    "generated; take it out of the text ({where})",
    "special": "in {rows} a message that is not the assistant's spells a special token, such as {example!r}, and "
    "becomes it: leave such rows out, or write it differently ({where})",
}


def audit_splits(
    splits: Mapping[str, Mapping[str, Documents]], sequences: Mapping[str, Sequence[int]], data: Data, tokenizer: Any
) -> Audit:
    """Return the audit of each split's sets, of which `sequences` counts the rows that they make."""
    audit: Audit = {"splits": {}, "sources": {}, "evaluated": {}, "kept": {}}
    together = {split: Documents.concatenate([*sets.values()]) for split, sets in splits.items()}
    train = together["train"]
    audit["samples"] = sample_documents(train, tokenizer)
    if "validation" in splits:
        audit["overlap"] = count_overlap(train, together["validation"])
    named = {"train": ("sources", data.mix), "validation": ("evaluated", data.eval), "keep": ("kept", data.keep)}
    for split, sets in splits.items():
        key, listed = named[split]
        audit["splits"][split] = audit_split(together[split], tokenizer)
        if not listed and len(sets) == 1:
            continue  # the only set of a run needs no figures of its own
        for (name, documents), count in zip(sets.items(), sequences[split], strict=True):
            audit[key][name] = {**audit_split(documents, tokenizer), "sequences": count}
            if split != "train":
                audit[key][name]["overlap"] = count_overlap(train, documents)
    # Of pairs, which are never packed, there is no number of packs.
    one_each = train.chosen_lengths is None
    audit["packs"] = len(pack_rows(sample_lengths(train.sides)[:, 0].tolist(), data.length)) if one_each else None
    return audit


def audit_split(documents: Documents, tokenizer: Any) -> Audit:
    """Return the statistics of one split, all counted, none estimated."""
    lengths = documents.sides.ravel()
    counts = documents.counts
    kept = len(documents.lengths)
    tokenized = kept + counts["unsupervised"]
    tokens = int(lengths.sum())
    supervised = answers = answers_ended = ended_documents = 0
    lowest: list[int] = []
    highest: list[int] = []
    occurrences = np.zeros(0, np.int64)
    answer_tokens: list[int] = []
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    stops = {*list_ends(tokenizer), *tokenizer.all_special_ids, *special}  # those that end a turn
    for _, block in documents.blocks() if tokens else ():
        supervised += int(block.supervised.sum()) - int(block.supervised[block.starts].sum())
        owners, ended = find_ended_parts(block, stops, tokenizer)
        answers += len(owners)
        answers_ended += int(ended.sum())
        ended_documents += len(np.unique(owners[ended]))
        lowest.append(int(block.ids.min()))
        highest.append(int(block.ids.max()))
        more = np.bincount(np.minimum(block.ids[block.supervised], MOST_IDS), minlength=len(occurrences))
        more[: len(occurrences)] += occurrences
        occurrences = more
        if block.chosen_lengths is not None:
            answer_tokens += [int(block.supervised[side].sum()) for side in block.spans(sides=True)]
    unigrams = occurrences[occurrences > 0] / max(1, occurrences.sum())
    figures: Audit = {
        **counts,
        "left_out": documents.left_out,
        "remarks": documents.remarks,
        "answers": answers,
        "answers_ended": answers_ended,
        "documents": kept,
        "tokens": tokens,
        "supervised_tokens": supervised,
        "supervised_fraction": supervised / tokens if tokens else 0.0,
        # Rows that were held out are no longer here, but were cut before: at most all.
        "truncated_share": min(1.0, counts["truncated"] / max(1, tokenized)),
        "dropped": counts["empty"] + counts["unsupervised"],
        "duplicates": kept - len(np.unique(documents.hashes)),
        "end_trained_share": ended_documents / kept if kept else 0.0,
        # Of a model that knows only how often each supervised token occurs.
        "unigram_loss": float(-(unigrams * np.log(unigrams)).sum()),
        "lowest_id": min(lowest, default=None),
        "highest_id": max(highest, default=None),
        "lengths": {},
        "histogram": [],  # [from, to, sequences], each bin twice as wide as the one before
    }
    if documents.chosen_lengths is not None:
        of_answers = np.array(answer_tokens).reshape(-1, 2)
        chosen, rejected = np.median(of_answers, axis=0).tolist() if kept else (0.0, 0.0)
        longer = float((of_answers[:, 0] > of_answers[:, 1]).mean()) if kept else 0.0
        figures |= {"chosen_tokens": chosen, "rejected_tokens": rejected, "chosen_longer": longer}
    if kept:
        least, median, high, most = np.percentile(lengths, (0, 50, 95, 100)).tolist()
        figures["lengths"] = {"least": int(least), "mean": float(lengths.mean()), "median": median}
        figures["lengths"] |= {"percentile_95": high, "most": int(most)}
        powers = np.floor(np.log2(lengths)).astype(int)
        bins = range(powers.min(), powers.max() + 1)
        figures["histogram"] = [[2**p, 2 ** (p + 1) - 1, int((powers == p).sum())] for p in bins]
    return figures


def find_ended_parts(
    documents: Documents, stops: set[int], tokenizer: Any
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return the document of each supervised part, and whether the part ends, white space aside, in one of `stops`."""
    supervised = documents.supervised
    following = np.append(supervised[1:], False)
    lasts = documents.starts + documents.lengths - 1
    following[lasts] = False
    ends = np.flatnonzero(supervised & ~following)
    owners = np.searchsorted(documents.starts, ends, "right") - 1
    at = ends
    for _ in range(TAIL - 1):
        blank = [token for token in np.unique(documents.ids[at]).tolist() if not tokenizer.decode([token]).strip()]
        back = np.isin(documents.ids[at], sorted({*blank} - stops))
        at = np.maximum(at - back, documents.starts[owners])
    return owners, supervised[at] & np.isin(documents.ids[at], sorted(stops))


def count_overlap(train: Documents, validation: Documents) -> Audit:
    """Count validation documents that are also trained on: exact duplicates and near duplicates."""
    same = np.isin(validation.hashes, train.hashes)
    with show_progress("looking for validation rows in train", partial(len, train.lengths)) as progress:
        near = int((find_near_duplicates(train, validation, progress) & ~same).sum())
    shared = int(same.sum())
    return {"documents": shared, "share": shared / len(same) if len(same) else 0.0, "near": near}


def find_near_duplicates(
    train: Documents, validation: Documents, progress: Callable[[int], None]
) -> npt.NDArray[np.bool_]:
    """Return which validation documents share most of their runs of tokens with one training document.

    Runs that occur in many validation documents belong to a template and are skipped. In large sets a fraction of all
    runs is compared, the same on both sides.
    """
    found = np.zeros(len(validation.lengths), np.bool_)
    one_of = 1 if len(train.ids) < COMPARED_TOKENS else 8
    owners, runs = keep_distinct(*map(np.concatenate, zip(*hash_token_runs(validation, one_of), strict=True)))
    values, counts = np.unique(runs, return_counts=True)
    usual = values[counts > max(TEMPLATE_DOCUMENTS, TEMPLATE_SHARE * len(found))]
    kept = ~np.isin(runs, usual)
    order = np.argsort(runs[kept], kind="stable")
    owners = owners[kept][order]
    runs = runs[kept][order]
    sizes = np.bincount(owners, minlength=len(found))
    marks = np.zeros(1 << MARK_BITS, np.bool_)
    marks[runs >> MARK_SHIFT] = True
    for documents, theirs in hash_token_runs(train, one_of):
        marked = marks[theirs >> MARK_SHIFT]  # few runs of a training document are in a validation document
        sharing, shared_runs = keep_distinct(documents[marked], theirs[marked])
        low = np.searchsorted(runs, shared_runs, "left")
        hits = np.searchsorted(runs, shared_runs, "right") - low
        which = np.repeat(low - (np.cumsum(hits) - hits), hits) + np.arange(int(hits.sum()))
        both, shared = np.unique(np.repeat(sharing, hits) * len(found) + owners[which], return_counts=True)
        trained, evaluated = np.divmod(both, len(found))
        close = shared >= NEAR * sizes[evaluated]  # what both have together is at least what the one has
        trained, evaluated, shared = (part[close] for part in (trained, evaluated, shared))
        own = np.isin(documents, trained)
        whole, own_runs = keep_distinct(documents[own], theirs[own])
        whole = whole[~np.isin(own_runs, usual)]
        their_sizes = np.searchsorted(whole, trained, "right") - np.searchsorted(whole, trained, "left")
        found[evaluated[shared >= NEAR * (their_sizes + sizes[evaluated] - shared)]] = True
        progress(int(documents.max(initial=0)) + 1)
    return found


def keep_distinct(documents: Lengths, runs: Runs) -> tuple[Lengths, Runs]:
    """Return each document's runs once, sorted."""
    order = np.lexsort((runs, documents))
    documents = documents[order]
    runs = runs[order]
    first = np.ones(len(runs), np.bool_)
    first[1:] = (np.diff(documents) != 0) | (runs[1:] != runs[:-1])
    return documents[first], runs[first]


def hash_token_runs(documents: Documents, one_of: int) -> Iterator[tuple[Lengths, Runs]]:
    """Yield hashes of the documents' runs of RUN tokens, with the document, a group of documents at a time."""
    for first, block in documents.blocks(HASHED_TOKENS):
        ids = block.ids.astype(np.uint64)
        owner = np.repeat(np.arange(first, first + len(block.lengths)), block.lengths)
        count = max(0, len(ids) - RUN + 1)
        mixed = np.zeros(count, np.uint64)
        shifted = np.empty(count, np.uint64)
        for place in range(RUN):
            mixed ^= ids[place : place + count]
            mixed *= np.uint64(0x9E3779B97F4A7C15)
            mixed ^= np.right_shift(mixed, 29, out=shifted)
        inside = owner[:count] == owner[len(ids) - count :]
        if one_of > 1:
            inside &= mixed % np.uint64(one_of) == 0
        yield owner[:count][inside], mixed[inside]


def sample_lengths(lengths: Lengths) -> Lengths:
    """Return the lengths of BATCHED_DOCUMENTS at most."""
    if len(lengths) <= BATCHED_DOCUMENTS:
        return lengths
    return lengths[shuffle(len(lengths), 0, 0)[:BATCHED_DOCUMENTS]]


def compare_batching(
    lengths: Lengths, packs: int | None, *, batch: int, max_length: int, configured: str, seed: int
) -> Audit:
    """Return the fraction of computed positions that hold a token, for each way of batching, and name the configured
    one. lengths: of each row's sequences, two for pairs; packs: the rows that they fill, or so many of them as
    are compared."""
    if not len(lengths):
        return {}
    documents, sides = lengths.shape
    lengths = sample_lengths(lengths)
    count = len(lengths)
    tokens = int(lengths.sum())
    padded_lengths = lengths.max(1) * sides
    ordered = padded_lengths[group_by_length(padded_lengths, batch, seed, 0)]
    longest = np.maximum.reduceat(ordered, np.arange(0, count, batch))
    computed = {LENGTH_GROUPED: (count, int(longest.sum()) * batch - int(longest[-1]) * (-count % batch))}
    computed[PADDING_FREE] = (count, tokens)
    if packs is not None:
        computed[PACKED] = (packs, packs * max_length)
    ways = {}
    for way, (rows, positions) in computed.items():
        rows = round(rows * documents / count)
        ways[way] = {"rows": rows, "micro_batches": -(-rows // batch), "useful_share": tokens / positions}
    return {"configured": configured, "padding_waste": 1 - ways[configured]["useful_share"], "ways": ways}


def sample_documents(documents: Documents, tokenizer: PreTrainedTokenizerBase) -> list[Audit]:
    """Return the first, middle and last document decoded, of pairs both sequences, in parts that are supervised
    (`trained`) or not."""
    count = len(documents.lengths)
    samples = []
    chosen = np.array(sorted({0, count // 2, count - 1}) if count else [], np.int64)
    found = documents.take(chosen)
    sides = documents.sides.shape[1]
    for number, span in enumerate(found.spans(sides=True)):
        place, side = divmod(number, sides)
        ids = found.ids[span]
        supervised = found.supervised[span]
        edges = [0, *(np.flatnonzero(np.diff(supervised)) + 1).tolist(), len(ids)]
        parts = [
            {"trained": bool(supervised[a]), "text": tokenizer.decode(ids[a:b].tolist(), skip_special_tokens=False)}
            for a, b in itertools.pairwise(edges)
        ]
        named = {"side": SIDES[side]} if sides > 1 else {}
        samples.append({"split": "train", "document": int(chosen[place]), **named, "tokens": len(ids), "parts": parts})
    return samples


def complete_audit(folder: Path, run: RunFile, chosen: Chosen, batching: str, batch: int, sampled: int | None) -> Audit:
    """Return the audit of the cached folder with what this run does with its rows. sampled: rows of a stream that were
    audited."""
    data = run.data
    audit: Audit = json.loads((folder / "audit.json").read_text())
    lengths = np.load(folder / "train.lengths.npy")
    packs = audit.pop("packs")
    audit["batching"] = compare_batching(
        lengths, packs, batch=batch, max_length=data.length, configured=batching, seed=run.train.order_seed
    )
    trained = [rows for rows, _ in chosen if not rows.evaluated]
    sources = [{"name": s.source.name, "config": s.source.config, "how": s.source.how} for s, _ in chosen]
    rows, format_ = chosen[0]
    audit |= {
        "sampled_rows": sampled,
        "source": sources[0],
        "shape": {"name": format_.name, "description": format_.description, "columns": list(rows.columns)},
        "max_length": data.length,
        "packing": data.packs,
        "held_out": rows.fraction,
    }
    if data.mix:
        names = ", ".join(rows.name for rows in trained)
        audit["source"] = {"name": f"a mix of {names}", "config": None, "how": format_plural(len(trained), "set")}
    for (rows, format_), source in zip(chosen, sources, strict=True):
        named = {"kept": rows.name} if rows.kept else {"evaluated": rows.name}
        if not rows.evaluated:
            named = {"sources": rows.name, "evaluated": rows.held_out_name}
        for key, name in named.items():
            if name in audit[key]:  # there are several sets
                audit[key][name] |= {"source": source, "description": format_.description}
    if data.mix and not data.streaming:
        figures = [audit["sources"][rows.name] for rows in trained]
        counts = [figure["sequences"] for figure in figures]
        in_epoch = count_per_epoch(trained, [figure["rows"] for figure in figures], counts)
        for figure, count, used in zip(figures, counts, in_epoch, strict=True):
            figure |= {"in_epoch": used, "epochs": used / max(1, count)}
    return audit


def add_notes(audit: Audit, notes: Iterable[str], *, evaluates: bool) -> None:
    """Add what a user should know: facts, and notes after these."""
    facts, differences = zip(*audit.pop("mistral"), strict=True)
    audit["facts"] = [*list_facts(audit), *filter(None, facts)]
    audit["notes"] = [*dict.fromkeys(notes), *find_warnings(audit), *filter(None, differences)]
    counts = {split: figures["documents"] for split, figures in audit["splits"].items()}
    total = sum(counts.values())
    held = counts.get("validation", 0)
    if audit["held_out"] and held > 2 * max(1, audit["held_out"] * total):
        share = f"{held:,} of {total:,} rows are held out, more than data.val_fraction {audit['held_out']:g}"
        audit["notes"].append(f"{share}: equal rows stay together, and nearly all rows occur several times")
    if not evaluates:
        audit["notes"].append("there are no validation rows, so nothing is evaluated: data.val_fraction holds some out")


def find_problems(
    audit: Mapping[str, Any], *, vocabulary: int | None, least_fraction: float, where: Where
) -> list[Problem]:
    """Return what makes these data unfit for training, each with the next step."""
    found = []
    keys = {"train": "data.train_split", "validation": "data.val_split"}  # of the kept sets each is judged
    sets = [(split, each, keys[split]) for split, each in audit["splits"].items() if split in keys]
    for key, section in (("sources", "data.mix"), ("evaluated", "data.eval"), ("kept", "data.keep")):
        named = audit.get(key, {}).items()
        sets += [(name, each, section) for name, each in named if key == "kept" or not each["documents"]]
    for split, figures, key in sets:
        place = where(key)
        if not figures["documents"]:
            problem = f"no row of {split} has a supervised token: of {format_plural(figures['rows'], 'row')} "
            problem += f"{figures['empty']} empty, {figures['unsupervised']} with nothing supervised, "
            problem += f"{figures['truncated']} cut at data.max_length"
            problem += "".join(f"; {line}" for line in figures["left_out"])
            hint = "check the column or template; a prompt longer than data.max_length leaves no room for its answer"
            code = "nothing-supervised"
            if not figures["rows"]:
                code = "no-rows"
                problem = f"no row is left in {split}"
                hint = "name a split with rows; data.val_fraction holds equal rows out together"
            found.append(Problem(problem, place, hint, code))
        if vocabulary is not None and (figures["highest_id"] or 0) >= vocabulary:
            problem = f"{split} has token id {figures['highest_id']}, the model's vocabulary ends at {vocabulary - 1}"
            hint = "take the tokenizer files of the model's own folder; for tokens of your own, resize the model once "
            hint += "with transformers' resize_token_embeddings, save it, and train lora.modules_to_save"
            found.append(Problem(problem, where("model.model_name_or_path"), hint, "beyond-vocabulary"))
    train = audit["splits"]["train"]
    if train["documents"] and train["supervised_fraction"] < least_fraction:
        problem = (
            f"{train['supervised_fraction']:.2%} of the training tokens are supervised, less than "
            f"watch.min_supervised_fraction = {least_fraction:.2%}"
        )
        hint = "`windlass data RUN --sample 3` shows what is supervised: fix the template, or lower the limit"
        found.append(Problem(problem, where("watch.min_supervised_fraction"), hint, "little-supervised"))
    return found


def find_warnings(audit: Mapping[str, Any]) -> list[str]:
    """Return what a user should know although it is no error."""
    train = audit["splits"]["train"]
    shared = audit.get("overlap", {"documents": 0, "share": 0})
    waste = audit["batching"].get("padding_waste", 0)
    all_tokens = max(1, train["tokens"] + train["tokens_cut"])
    of_pairs = "chosen_longer" in train
    remedy = "data.packing: true leaves next to none"
    if of_pairs:
        remedy = "fewer pairs in a micro-batch leave less"
    if audit["batching"].get("configured") == PACKED:
        remedy = "most documents share a sequence with no other: a larger data.max_length leaves less"
    unended = round(train["documents"] * (1 - train["end_trained_share"]))
    lesson = "from which the model learns to go on" if train["answers_ended"] else "so the model will not learn to stop"
    warnings = []
    if train["truncated"] and not of_pairs:
        lost = f"{train['tokens_cut']:,} tokens ({train['tokens_cut'] / all_tokens:.1%}) are lost"
        rows = f"{format_plural(train['truncated'], 'row')} ({train['truncated_share']:.1%})"
        warnings.append(f"{rows} cut at max_length: {lost}")
    if train["unsupervised"]:
        rows = format_are(train["unsupervised"], "row")
        warnings.append(f"{rows} dropped: no supervised token within max_length")
    if train["straddling"]:
        rows = format_plural(train["straddling"], "row")
        why = "a token spans the edge of the supervised part and is supervised"
        warnings.append(f"in {rows} {why}: let the white space at the edge belong to that part")
    if train["documents"] and (not train["answers_ended"] or unended > train["truncated"]):
        rows = f"in {unended / max(1, train['documents']):.1%} of the rows"
        ends = f"no supervised part ends with a token at which generation stops, {lesson}"
        closing = "take a data.chat_template that closes the assistant's turn with one, behind the last turn too"
        warnings.append(f"{rows} {ends}: {closing}")
    if shared["documents"]:
        rows = format_are(shared["documents"], "validation row")
        warnings.append(f"{rows} in the training set as well ({shared['share']:.1%})")
    if shared.get("near"):
        rows = format_are(shared["near"], "validation row")
        why = "the evaluation loss will look better than it is"
        warnings.append(f"{rows} nearly the same as one that is trained on: {why}")
    if waste > 0.2:
        warnings.append(f"{waste:.0%} of the computed positions are padding: {remedy}")
    if train.get("chosen_longer", 0) > LONGER:
        share = f"in {train['chosen_longer']:.1%} of the pairs the chosen answer is the longer one"
        warnings.append(f"{share}: the model may learn to write more, not better")
    for name, figures in audit.get("kept", {}).items():
        if same := figures["overlap"]["documents"] + figures["overlap"]["near"]:
            rows = f"of the kept set {name} {format_are(same, 'row')} in the training set as well"
            warnings.append(f"{rows}, word for word or nearly: it does not show what becomes of other rows")
    remarks = [describe_remark(remark, train, WARNINGS) for remark in train["remarks"] if remark["kind"] in WARNINGS]
    left_out = itertools.chain(*(figures["left_out"] for figures in audit["splits"].values()))
    return [*dict.fromkeys(left_out), *remarks, *warnings]


def list_facts(audit: Mapping[str, Any]) -> list[str]:
    """Return what is worth knowing of the rows though nothing is wrong."""
    train = audit["splits"]["train"]
    facts = [describe_remark(remark, train, FACTS) for remark in train["remarks"] if remark["kind"] in FACTS]
    if "chosen_longer" in train and train["truncated"]:
        pairs = format_plural(train["truncated"], "pair")
        what = f"{train['tokens_cut']:,} tokens of both sequences' prompts (data.truncation: prompt)"
        facts.append(f"{pairs} of {train['documents']:,} exceeded max_length and lost the beginning: {what}")
    return facts


def describe_remark(remark: Mapping[str, Any], figures: Mapping[str, Any], sentences: Mapping[str, str]) -> str:
    rows = format_plural(remark["rows"], "row")
    chats = format_plural(figures["split"], "chat")
    return sentences[remark["kind"]].format(**{**figures, **remark, "rows": rows, "chats": chats})
