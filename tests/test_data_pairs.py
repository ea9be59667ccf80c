"""Pairs of answers in every form: exact tokens and loss, what is refused and at which row, and batches of them."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset
from refusals import refused
from text_run import prepare_rows, write_rows
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from trl import DPOTrainer

from windlass import tiny
from windlass.data.collate import PaddingFreeCollator, PairCollator
from windlass.data.packing import PAIRS, iter_documents
from windlass.data.preference import find_answers
from windlass.data.prepare import PreparedData
from windlass.rehearse.material import list_requested_columns, make_up_rows
from windlass.runfile import RunFile
from windlass.serve.rows import choose_rows

Prepare = Callable[..., PreparedData]
Row = dict[str, Any]


def user(text: str) -> Row:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> Row:
    return {"role": "assistant", "content": text, **more}


def said(speaker: str, text: str) -> Row:
    return {"from": speaker, "value": text}


TEXTS = {"prompt": "How much is 2 + 2?", "chosen": " It is 4.", "rejected": " It is 5, or 6."}
CHATS = {"prompt": [user("2 + 2?")], "chosen": [assistant("It is 4.")], "rejected": [assistant("It is 5, or 6.")]}
WHOLE = {
    "chosen": [user("2 + 2?"), assistant("4."), user("Sure?"), assistant("Yes.")],
    "rejected": [user("2 + 2?"), assistant("4."), user("Sure?"), assistant("No, 5.")],
}
HH = {
    "chosen": "\n\nHuman: 2 + 2?\n\nAssistant: It is 4.",
    "rejected": "\n\nHuman: 2 + 2?\n\nAssistant: It was 5.",
}
ALPACA = {"instruction": "Add.", "input": "2 and 2", "chosen": "4", "rejected": "5", "history": [["Hi", "Hello"]]}
SHAREGPT = {
    "conversations": [said("human", "2 + 2?")],
    "chosen": said("gpt", "It is 4."),
    "rejected": said("gpt", "It is 5."),
}
AXOLOTL = {"messages": [user("2 + 2?")], "chosen": assistant("It is 4."), "rejected": assistant("It is 5.")}
SWIFT = {"messages": [user("2 + 2?"), assistant("It is 4.")], "rejected_response": "It is 5."}
SWIFT_CHATS = {"messages": WHOLE["chosen"], "rejected_messages": WHOLE["rejected"], "system": "Be brief."}
INTEL = {"system": "Be brief.", "question": "2 + 2?", "chosen": "4", "rejected": "5"}
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    made = AutoTokenizer.from_pretrained(tiny.write_tokenizer(tmp_path_factory.mktemp("tokenizer"), vocab=600))
    made.chat_template = TEMPLATE
    return made


@pytest.fixture
def prepared(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Prepare:
    def make(*rows: Any, objective: str = "dpo", **section: Any) -> PreparedData:
        return prepare_rows(tmp_path, rows, tokenizer, {"objective": objective}, **section)

    return make


def split_sides(row: Row) -> list[tuple[list[int], list[int]]]:
    """Return the ids and labels of both sequences of a row."""
    edge = row["seq_lengths"][0]
    assert sum(row["seq_lengths"]) == len(row["input_ids"]) == len(row["labels"])
    return [(row["input_ids"][part], row["labels"][part]) for part in (slice(edge), slice(edge, None))]


def mark(side: tuple[list[int], list[int]], tokenizer: Any) -> str:
    """Write a sequence with what the loss is computed on in brackets."""
    ids, labels = side
    begin = next(i for i, label in enumerate(labels) if label != -100)
    assert labels == [-100] * begin + ids[begin:]
    return f"{tokenizer.decode(ids[:begin])}[{tokenizer.decode(ids[begin:])}]"


ASKED = "<user>2 + 2?<end><assistant>"
BOTH = [f"{ASKED}[It is {answer}.<end>]" for answer in "45"]
SURE = [f"{ASKED}4.<end><user>Sure?<end><assistant>[{answer}<end>]" for answer in ("Yes.", "No, 5.")]


@pytest.mark.parametrize(
    ("row", "section", "kind", "expected"),
    [
        (TEXTS, {}, "preference", [f"<s>How much is 2 + 2?[ {it}</s>]" for it in ("It is 4.", "It is 5, or 6.")]),
        (CHATS, {}, "preference", [f"{ASKED}[It is 4.<end>]", f"{ASKED}[It is 5, or 6.<end>]"]),
        (WHOLE, {}, "preference", SURE),
        # As UltraFeedback: the prompt, and the chosen chat, once more.
        ({**WHOLE, "prompt": "2 + 2?", "messages": WHOLE["chosen"], "score_chosen": 8.0}, {}, "preference", SURE),
        (HH, {}, "preference", [f"<s>\n\nHuman: 2 + 2?\n\nAssistant:[ {it}</s>]" for it in ("It is 4.", "It was 5.")]),
        ({"chosen": "The sky is blue", "rejected": "The sky is blueish"}, {}, "preference",
         ["<s>The sky is[ blue</s>]", "<s>The sky is[ blueish</s>]"]),
        (ALPACA, {}, "alpaca",
         [f"<user>Hi<end><assistant>Hello<end><user>Add.\n\n2 and 2<end><assistant>[{it}<end>]" for it in "45"]),
        (SHAREGPT, {}, "sharegpt", BOTH),
        (AXOLOTL, {}, "messages", BOTH),
        (SWIFT, {}, "messages", BOTH),
        ({"talk": SWIFT["messages"], "bad": [assistant("It is 5.")]},
         {"columns": {"messages": "talk", "rejected_response": "bad"}}, "messages", BOTH),
        (SWIFT_CHATS, {"format": "messages"}, "messages", [f"<system>Be brief.<end>{text}" for text in SURE]),
        (INTEL, {"columns": {"prompt": "question"}}, "preference",
         [f"<system>Be brief.<end>{ASKED}[{it}<end>]" for it in "45"]),
        # Texts as a chat.
        ({"question": "2 + 2?", "good": "4", "bad": "5"},
         {"format": "messages", "columns": {"messages": "question", "chosen": "good", "rejected": "bad"}},
         "messages", [f"{ASKED}[{it}<end>]" for it in "45"]),
        ({**TEXTS, "prompt": "2 + 2?"}, {"chat_template": TEMPLATE}, "preference", None),
    ],
)  # fmt: skip
def test_every_form_has_loss_on_the_answers_alone(
    prepared: Prepare, tokenizer: Any, row: Row, section: Row, kind: str, expected: list[str] | None
) -> None:
    done = prepared(row, **section)
    assert done.pairs
    assert done.audit["shape"]["name"] == kind
    (made,) = done.train.to_pylist()
    marked = [mark(side, tokenizer) for side in split_sides(made)]
    assert marked == (expected or [f"{ASKED}[ It is 4.<end>]", f"{ASKED}[ It is 5, or 6.<end>]"])


SPLIT = {"prompt": "How much? t", "chosen": "he", "rejected": "zq"}  # a token spans prompt and chosen answer


@pytest.mark.parametrize("row", [SPLIT, HH, WHOLE])
def test_tokens_are_those_of_trl(prepared: Prepare, tokenizer: Any, row: Row) -> None:
    """TRL keeps the end of a token that spans prompt and answer with the answer, on both sides, and so does windlass.
    Of texts that begin with their prompt it counts the first common words of the answers to the prompt."""
    args = SimpleNamespace(dataset_num_proc=None, max_length=None, truncation_mode="keep_start")
    trainer: Any = SimpleNamespace(_tokenizer=tokenizer)
    (theirs,) = DPOTrainer._prepare_dataset(trainer, Dataset.from_list([row]), tokenizer, args, "train")
    (made,) = prepared(row).train.to_pylist()
    for (ids, labels), name in zip(split_sides(made), ("chosen", "rejected"), strict=True):
        assert ids == theirs["prompt_ids"] + theirs[f"{name}_ids"]
        if row is not HH:
            assert [label for label in labels if label != -100] == theirs[f"{name}_ids"]


REFUSED: list[tuple[str, Row, str]] = [
    ("empty chosen text", {**TEXTS, "chosen": "  "}, "empty-answer"),
    ("empty rejected messages", {**CHATS, "rejected": []}, "empty-answer"),
    ("an answer that isn't trained on", {**CHATS, "chosen": [assistant("4", weight=0)]}, "empty-answer"),
    ("a chat that ends with the prompt", {**WHOLE, "rejected": WHOLE["chosen"][:3]}, "empty-answer"),
    ("another question", {**WHOLE, "rejected": [user("3 + 3?"), assistant("6")]}, "prompt-differs"),
    ("another turn", {**WHOLE, "rejected": [*WHOLE["chosen"][:2], user("So?"), assistant("So.")]}, "prompt-differs"),
    ("one chat in full, one answer", {**CHATS, "rejected": [user("2 + 2?"), assistant("5")]}, "prompt-differs"),
    ("a prompt of another chat", {**WHOLE, "prompt": "3 + 3?"}, "prompt-differs"),
    ("texts with nothing in common", {"chosen": "Four.", "rejected": "Five."}, "prompt-differs"),
    ("a prompt that ends with an answer", {**CHATS, "prompt": [user("2 + 2?"), assistant("So")]}, "prompt-answered"),
    ("a number", {**TEXTS, "chosen": 4}, "column-not-text"),
    ("a chat without the chosen answer", {**SWIFT, "messages": [user("2 + 2?")]}, "empty-answer"),
    ("a chat without the rejected answer", {**SWIFT, "rejected_response": None}, "empty-answer"),
    ("two other chats", {**SWIFT_CHATS, "rejected_messages": [user("3 + 3?"), assistant("6")]}, "prompt-differs"),
    ("a missing answer", {"prompt": "2 + 2?", "chosen": "4"}, "incomplete-row"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "code"), [each[1:] for each in REFUSED], ids=[each[0] for each in REFUSED])
def test_wrong_pairs_are_refused_with_their_row(prepared: Prepare, row: Row, code: str) -> None:
    is_text = isinstance(row.get("chosen"), str | int)
    good: Row = TEXTS if is_text else CHATS
    if "messages" in row:
        good = SWIFT_CHATS if "rejected_messages" in row else SWIFT
    elif "prompt" not in row:
        good = HH if is_text else WHOLE
    prepared(good, good)
    with refused(code, "a.jsonl: row 2"):
        prepared(good, row, good)


@pytest.mark.parametrize(
    ("good", "equal"),
    [
        (TEXTS, {**TEXTS, "rejected": TEXTS["chosen"]}),
        (HH, {**HH, "rejected": HH["chosen"]}),
        (WHOLE, {**WHOLE, "rejected": WHOLE["chosen"]}),
    ],
)
def test_pairs_with_equal_answers_are_left_out_and_counted(prepared: Prepare, good: Row, equal: Row) -> None:
    """They carry no gradient; published sets have some."""
    data = prepared(good, equal, good, equal)
    assert len(data.train) == 2
    figures = data.audit["splits"]["train"]
    (line,) = figures["left_out"]
    assert line.startswith("2 rows left out (chosen equals rejected)")
    assert "a.jsonl: rows 2, 4" in line
    assert figures["dropped"] == 2
    assert data.train.to_pylist() == prepared(good, good).train.to_pylist()
    with refused("nothing-supervised", "data.train_split") as problems:
        prepared(equal, equal)
    assert "chosen equals rejected" in problems[0].problem


def test_templates_that_write_no_prompt_or_two(prepared: Prepare) -> None:
    marked = "{% generation %}{{ m.content }}<end>{% endgeneration %}"
    bare = "{% if m.role == 'assistant' %}" + marked + "{% else %}{{ m.content }}<end>{% endif %}"
    bare = "{% for m in messages %}" + bare + "{% endfor %}"
    with refused("prompt-differs", "a.jsonl: row 1"):
        prepared(CHATS, chat_template="{% if '5' in messages[-1].content %}Beware. {% endif %}" + bare)
    # The first token of both sequences has no loss.
    (row,) = prepared({**CHATS, "prompt": []}, chat_template=bare).train.to_pylist()
    for ids, labels in split_sides(row):
        assert labels == [-100, *ids[1:]]


def test_long_pairs_are_refused_or_lose_the_beginning_of_their_prompt(prepared: Prepare, tokenizer: Any) -> None:
    long = {**TEXTS, "prompt": "So " * 60 + "how much is 2 + 2?"}
    (made,) = prepared(long).train.to_pylist()
    longest = max(made["seq_lengths"])
    with refused("too-long", "a.jsonl: rows 2, 3") as problems:
        prepared(TEXTS, long, long, max_length=100)
    assert f"data.max_length: {longest}," in problems[0].hint
    whole = [ids for ids, _ in split_sides(made)]
    assert prepared(TEXTS, long, max_length=longest).train.to_pylist()[1] == made

    done = prepared(TEXTS, long, max_length=100, truncation="prompt")
    short, cut = (split_sides(row) for row in done.train.to_pylist())
    assert short == split_sides(prepared(TEXTS).train.to_pylist()[0])
    excess = longest - 100
    for (ids, labels), before, (_, uncut) in zip(cut, whole, split_sides(made), strict=True):
        assert ids == [tokenizer.bos_token_id, *before[1 + excess :]]
        assert labels[1:] == uncut[1 + excess :]
    assert max(len(ids) for ids, _ in cut) == 100
    (fact,) = (fact for fact in done.audit["facts"] if "data.truncation" in fact)
    assert fact.startswith(f"1 pair of 2 exceeded max_length and lost the beginning: {2 * excess:,} tokens")
    assert not [note for note in done.audit["notes"] if "max_length" in note]

    answer = sum(label != -100 for label in cut[1][1])
    (tight,) = prepared(long, max_length=answer + 2, truncation="prompt").train.to_pylist()
    assert max(tight["seq_lengths"]) == answer + 2
    with refused("too-long", "a.jsonl: row 1") as problems:
        prepared(long, max_length=answer + 1, truncation="prompt")
    assert problems[0].hint.startswith(f"set data.max_length: {answer + 2},")


@pytest.mark.parametrize(
    ("row", "section", "code", "place"),
    [
        (TEXTS, {"objective": "sft"}, "wrong-objective", "data.dataset_name_or_path"),
        (TEXTS, {"objective": "sft", "format": "preference"}, "wrong-objective", "data.format"),
        ({"text": "2 + 2 is 4"}, {}, "wrong-objective", "train.objective"),
        ({"prompt": "2 + 2?", "chosen": "4"}, {}, "wrong-objective", "train.objective"),
        (TEXTS, {"format": "text"}, "wrong-objective", "data.format"),
        (TEXTS, {"columns": {"chosen": "better"}}, "no-such-column", "data.columns.chosen"),
        (INTEL, {}, "no-such-column", "data.columns"),
        (TEXTS, {"prompt_template": "{prompt} [[{chosen}]]"}, "not-in-format", "data.prompt_template"),
        (CHATS, {"turns": "last"}, "no-effect", "data.turns"),
        (TEXTS, {"completion_only_loss": False}, "no-effect", "data.completion_only_loss"),
    ],
)
def test_settings_that_do_not_fit_are_refused(prepared: Prepare, row: Row, section: Row, code: str, place: str) -> None:
    with refused(code, place):
        prepared(row, **section)


def test_an_sft_run_on_chats_says_that_pairs_are_not_compared(prepared: Prepare) -> None:
    chat = {**AXOLOTL, "messages": WHOLE["chosen"]}
    notes = prepared(chat, objective="sft").audit["notes"]
    assert any(note.startswith("the columns chosen and rejected are not trained on") for note in notes)
    named = prepared(chat, objective="sft", format="messages").audit["notes"]
    assert not any("chosen" in note for note in named)


def test_hints_pass(prepared: Prepare) -> None:
    """What the hints of a wrong objective and of other names say works."""
    with refused("wrong-objective") as problems:
        prepared(TEXTS, objective="sft")
    assert "data.columns: {completion: chosen}" in problems[0].hint
    assert (
        prepared(TEXTS, objective="sft", columns={"completion": "chosen"}).audit["shape"]["name"] == "prompt-completion"
    )
    with refused("wrong-objective") as problems:
        prepared(WHOLE, objective="sft")
    assert "data.columns: {messages: chosen}" in problems[0].hint
    done = prepared(WHOLE, objective="sft", columns={"messages": "chosen"})
    assert not done.pairs
    assert not any("chosen" in note for note in done.audit["notes"])
    with refused("wrong-objective") as problems:
        prepared({"query": "2?", "accepted": "2", "worse": "3"})
    assert "data.columns: {prompt: query, chosen: accepted, rejected: worse}" in problems[0].hint


def make_rows(count: int) -> list[Row]:
    return [
        {"prompt": f"What is {i} + 1?", "chosen": f" {i + 1}" * (1 + i % 7), "rejected": f" {i}" * (1 + i % 5)}
        for i in range(count)
    ]


def test_a_pair_is_one_row_of_order_hold_out_and_mix(prepared: Prepare, tmp_path: Path) -> None:
    rows = make_rows(60)
    done = prepared(*rows, *rows[:6], val_fraction=0.2)
    assert done.validation is not None
    every = [*done.train.to_pylist(), *done.validation.to_pylist()]
    assert len(every) == 66
    alone = [tuple(row["input_ids"]) for row in prepared(*rows).train.to_pylist()]
    assert sorted({tuple(row["input_ids"]) for row in every}) == sorted(alone)
    held = {tuple(row["input_ids"]) for row in done.validation.to_pylist()}
    assert held.isdisjoint(tuple(row["input_ids"]) for row in done.train.to_pylist())
    figures = done.audit["splits"]["train"]
    assert figures["documents"] == len(done.train)
    swapped = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in rows[3:4]]
    assert prepared(rows[3], *swapped).audit["splits"]["train"]["duplicates"] == 0

    chats, intel = write_rows(tmp_path / "b.jsonl", [CHATS] * 3), write_rows(tmp_path / "c.jsonl", [INTEL] * 2)
    mixed = prepared(mix=[{"path": str(chats), "epochs": 2}, {"path": str(intel), "columns": {"prompt": "question"}}])
    assert mixed.shares == ((3, 6), (2, 2))
    assert [row["source"] for row in mixed.train.to_pylist()] == [[0]] * 3 + [[1]] * 2
    assert len(mixed.order(seed=1, epoch=0, global_batch=2)) == 8


def test_batches_of_pairs(prepared: Prepare) -> None:
    """Two rows a pair, chosen first, padded to the longest; end to end, two documents a pair."""
    done = prepared(*make_rows(8))
    rows = done.train.to_pylist()
    assert done.lengths is not None
    assert done.lengths.tolist() == [2 * max(row["seq_lengths"]) for row in rows]
    assert isinstance(done.collator(0), PairCollator)
    batch = PairCollator(0)(rows[2:5])
    sides = [side for row in rows[2:5] for side in split_sides(row)]
    longest = max(len(ids) for ids, _ in sides)
    assert batch["input_ids"].tolist() == [ids + [0] * (longest - len(ids)) for ids, _ in sides]
    assert batch["labels"].tolist() == [labels + [-100] * (longest - len(labels)) for _, labels in sides]
    assert batch["attention_mask"].sum(1).tolist() == [len(ids) for ids, _ in sides]
    fill = {"input_ids": [0] * 4, "labels": [-100] * 4, "seq_lengths": [2, 2]}
    assert PairCollator(0, 16)([rows[0], fill])["input_ids"].shape[0] == 4
    laid = PaddingFreeCollator()(rows[2:5])
    assert laid["cu_seq_lens_q"].diff().tolist() == [len(ids) for ids, _ in sides]
    assert laid["labels"][0].tolist() == [label for _, labels in sides for label in labels]


def test_tokens_are_cached_by_objective_and_truncation(prepared: Prepare, tmp_path: Path) -> None:
    columns = {"completion": "chosen"}
    inputs = [
        prepared(TEXTS).inputs,
        prepared(TEXTS, truncation="prompt").inputs,
        prepared(TEXTS, objective="sft", columns=columns).inputs,
    ]
    assert len({*inputs}) == 3
    assert prepared(TEXTS, objective="orpo").inputs == inputs[0]
    assert len([*(tmp_path / "out" / "tokens").glob("*/audit.json")]) == 3


def test_the_audit_counts_pairs(prepared: Prepare) -> None:
    rows = [{**TEXTS, "chosen": f" It is {i} or more or less, roughly."} for i in range(20)]
    done = prepared(*rows, rows[0])
    figures = done.audit["splits"]["train"]
    assert (figures["documents"], figures["duplicates"], figures["chosen_longer"]) == (21, 1, 1.0)
    assert figures["chosen_tokens"] > figures["rejected_tokens"] > 0
    assert [sample["side"] for sample in done.audit["samples"]] == ["chosen", "rejected"] * 3
    assert any("the chosen answer is the longer one" in note for note in done.audit["notes"])
    assert not any("longer one" in note for note in prepared(*make_rows(60)).audit["notes"])


@pytest.mark.parametrize("kind", [None, "messages", "alpaca"])
def test_made_up_rows_are_pairs(prepared: Prepare, kind: str | None) -> None:
    """Of a rehearsal of data that are on another machine."""
    columns = {"chosen": "good"} if kind else {}
    run = RunFile.model_validate({"data": {"format": kind, "columns": columns}, "train": {"objective": "dpo"}})
    rows = make_up_rows(list_requested_columns(run.data), 20)
    assert len(prepared(*rows, format=kind, columns=columns).train) == 20


def test_a_probe_takes_the_chosen_sequences(prepared: Prepare) -> None:
    table = prepared(*make_rows(12)).train
    assert table.schema.metadata == {name.encode(): value.encode() for name, value in PAIRS.items()}
    chosen = [split_sides(row)[0] for row in table.to_pylist()]
    assert [ids.tolist() for ids, _ in iter_documents(table)] == [ids for ids, _ in chosen]
    assert all(row["ids"] in [ids for ids, _ in chosen] for row in choose_rows(table))


def test_answers_to_a_prompt_in_common_begin_with_their_space() -> None:
    """Tokenizers join it to the word."""
    for chosen, rejected, answer in (
        ("The sky is blue", "The sky is blueish", " blue"),
        ("The sky is\nblue", "The sky is\nred", "blue"),
        ("Why?\n\nAssistant: Blue.", "Why?\n\nAssistant: Blue it is.", " Blue."),  # behind the speaker's mark
    ):
        assert chosen[find_answers(chosen, rejected) :] == answer
