"""Rows to text, text to tokens, tokens to sets: what is learnt, what is dropped, what is said about it."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, ClassVar

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from windlass import tiny
from windlass.data.chat import ChatTemplate, chat_template
from windlass.data.prepare import Prepared, prepare
from windlass.data.show import render
from windlass.errors import UserError
from windlass.runfile import RunFile

PARAGRAPHS = [part for name in sorted(topics) for part in topics[name].split("\n\n")]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    folder = tiny.write_tokenizer(tmp_path_factory.mktemp("tokenizer"), vocab=600)
    return AutoTokenizer.from_pretrained(folder)


def run_file(folder: Path, source: Path | str, *, batch: int = 4, least: float = 0.0, **section: Any) -> RunFile:
    """A run file whose data section is this, everything else as small as it gets."""
    return RunFile.model_validate(
        {
            "model": {"model_name_or_path": str(folder / "model")},
            "data": {"dataset_name_or_path": str(source), "max_length": 128, **section},
            "train": {"output_dir": str(folder / "out"), "per_device_train_batch_size": batch, "max_steps": 5},
            "watch": {"min_supervised_fraction": least},
        }
    )


def json_lines(path: Path, rows: Sequence[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def learnt(prepared: Prepared, row: int = 0) -> list[int]:
    found = prepared.train[row]
    return [token for token in found.get("labels", found["input_ids"]) if token != -100]


def test_text_is_tokenised_as_the_tokenizer_does_and_ends(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [*PARAGRAPHS[:40], "  \n\t", "", "x"]
    done = prepare(
        run_file(tmp_path, json_lines(tmp_path / "a.jsonl", [{"text": t} for t in rows]), max_length=4000), tokenizer
    )
    expected = [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in rows if text.strip()]
    assert done.train["input_ids"] == expected
    figures = done.audit["splits"]["train"]
    assert (figures["rows"], figures["empty"], figures["documents"]) == (
        43,
        2 + PARAGRAPHS[:40].count(""),
        len(expected),
    )
    assert figures["tokens"] == sum(map(len, expected))
    assert figures["supervised_tokens"] == figures["tokens"] - len(expected)  # a first token is never predicted
    assert figures["end_learnt_share"] == 1


def test_rows_are_cut_and_counted(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    long, short = "word " * 500, "short"
    done = prepare(run_file(tmp_path, json_lines(tmp_path / "a.jsonl", [{"text": long}, {"text": short}])), tokenizer)
    whole = len(tokenizer(long)["input_ids"]) + 1
    figures = done.audit["splits"]["train"]
    assert (figures["truncated"], figures["tokens_cut"]) == (1, whole - 128)
    assert len(done.train[0]["input_ids"]) == 128
    assert done.train[0]["input_ids"][-1] != tokenizer.eos_token_id
    assert any("cut at max_length" in note for note in done.audit["notes"])


def test_a_prompt_is_read_and_a_completion_learnt(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"prompt": "What is a list?", "completion": " A sequence."}, {"prompt": "Nothing", "completion": " "}]
    done = prepare(run_file(tmp_path, json_lines(tmp_path / "a.jsonl", rows)), tokenizer)
    assert tokenizer.decode(learnt(done)) == " A sequence.</s>"
    assert done.audit["shape"]["name"] == "prompt-completion"
    assert done.audit["splits"]["train"]["empty"] == 1
    everything = prepare(run_file(tmp_path, tmp_path / "a.jsonl", completion_only_loss=False), tokenizer)
    assert tokenizer.decode(learnt(everything)) == "<s>What is a list? A sequence.</s>"


def test_a_template_learns_what_it_marks(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"q": "six times seven", "a": {"text": ["42"]}}, {"q": "who", "a": {"text": [""]}}]
    path = json_lines(tmp_path / "a.jsonl", rows)
    done = prepare(run_file(tmp_path, path, prompt_template=r"\[[Q\]] {q}? {{}} A:[[ {a[text][0]}]]"), tokenizer)
    assert tokenizer.decode(done.train[0]["input_ids"]) == "<s>[[Q]] six times seven? {} A: 42</s>"
    assert tokenizer.decode(learnt(done)) == " 42</s>"
    assert done.audit["splits"]["train"]["empty"] == 1  # a row with no answer is no example
    *_, asked, answered = done.audit["samples"][0]["parts"]
    assert asked["text"].endswith("A:")
    assert not asked["learnt"]
    assert answered == {"text": " 42</s>", "learnt": True}
    middle = prepare(run_file(tmp_path, path, prompt_template="[[{q}]] and more"), tokenizer)
    assert tokenizer.decode(learnt(middle)) == "six times seven"  # what follows is not learnt, nor is the end
    assert middle.audit["splits"]["train"]["end_learnt_share"] == 0
    assert any("not learn to stop" in note for note in middle.audit["notes"])
    unmarked = prepare(run_file(tmp_path, path, prompt_template="{q}"), tokenizer)
    assert "loss on every token" in unmarked.audit["shape"]["said"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{question}", r"no column 'question'; they have 'quest', 'answer'"),
        ("{quest} [[{answer}", "never closed"),
        ("{quest}]] {answer}", "without its other half"),
        ("[[{quest} [[{answer}]]]]", "without its other half"),
        ("{quest", "not a template"),
        ("no column", "names no column"),
    ],
)
def test_a_template_that_is_wrong(tmp_path: Path, tokenizer: Any, text: str, said: str) -> None:
    path = json_lines(tmp_path / "a.jsonl", [{"quest": "a", "answer": "b"}])
    with pytest.raises(UserError, match=said.replace("[", r"\[")) as caught:
        prepare(run_file(tmp_path, path, prompt_template=text), tokenizer, where=lambda key: f"run.yaml:9: {key}")
    assert "run.yaml:9: data.prompt_template" in str(caught.value)


CHATS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello?"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "Because."},
]


@pytest.mark.parametrize("own", [True, False])
def test_a_chat_learns_the_assistant(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, own: bool) -> None:
    if not own:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
        tokenizer.chat_template = None
    done = prepare(run_file(tmp_path, json_lines(tmp_path / "a.jsonl", [{"messages": CHATS}])), tokenizer)
    eos = tokenizer.eos_token
    assert tokenizer.decode(learnt(done)).replace(" ", "") == f"Hi.{eos}Because.{eos}"
    text = tokenizer.decode(done.train[0]["input_ids"])
    assert text.count(tokenizer.bos_token) == 1
    assert done.audit["splits"]["train"]["end_learnt_share"] == 1
    assert any("Mistral's is used" in note for note in done.audit["notes"]) is not own


def test_a_template_with_generation_marks_and_the_other_names_of_roles(tokenizer: PreTrainedTokenizerFast) -> None:
    marked = ChatTemplate(
        tokenizer,
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}!"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
        "",
    )
    text, spans = marked.render([{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}])
    assert [text[slice(*span)] for span in spans] == ["b!"]


def test_a_template_without_marks_learns_answers_and_their_ends(tokenizer: PreTrainedTokenizerFast) -> None:
    plain = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<end>\n{% endfor %}"
    asking = plain + "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    text, spans = ChatTemplate(tokenizer, asking, "").render(CHATS)
    assert [text[slice(*span)] for span in spans] == ["Hi.<end>\n", "Because.<end>\n"]
    thinking = plain + "{% if add_generation_prompt %}<|assistant|>\n<think>\n{% endif %}"
    text, spans = ChatTemplate(tokenizer, thinking, "").render(CHATS)
    assert [text[slice(*span)] for span in spans] == ["Hi.<end>\n", "Because.<end>\n"]
    # A stop that only the very end has: where an answer in the middle ends can't be told.
    with pytest.raises(UserError, match="earlier turns differently"):
        ChatTemplate(tokenizer, plain + "{% if not add_generation_prompt %}<stop>{% endif %}", "").render(CHATS)


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    forgetful = ChatTemplate(tokenizer, "{% for m in messages %}{{ loop.revindex }}{{ m.content }}{% endfor %}", "")
    with pytest.raises(UserError, match="earlier turns differently"):
        forgetful.render(CHATS)
    with pytest.raises(UserError, match="refuses a chat"):
        ChatTemplate(tokenizer, "{{ raise_exception('no') }}", "").render(CHATS)
    with pytest.raises(UserError, match="no role"):
        chat_template(tokenizer).render([{"content": "x"}])


def test_a_conversational_prompt_and_completion(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"prompt": CHATS[1:4], "completion": CHATS[4:]}]
    done = prepare(run_file(tmp_path, json_lines(tmp_path / "a.jsonl", rows)), tokenizer)
    assert "Because" in tokenizer.decode(learnt(done))
    assert "Hi" not in tokenizer.decode(learnt(done))


def test_a_token_across_the_edge_is_learnt_and_said(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"prompt": "the answer is th", "completion": "e"}]
    done = prepare(run_file(tmp_path, json_lines(tmp_path / "a.jsonl", rows)), tokenizer)
    assert tokenizer.decode(learnt(done)).strip() == "the</s>"
    assert done.audit["splits"]["train"]["straddling"] == 1
    assert any("across the edge" in note for note in done.audit["notes"])


@pytest.mark.parametrize(
    ("section", "rows", "said"),
    [
        ({"text_field": "body"}, [{"text": "a"}], "no column 'body'; they have 'text'"),
        ({}, [{"body": "a"}], "no column 'text'; they have 'body'"),
        ({}, [{"text": ["a"]}], "has a list, not text"),
        ({"messages_field": "talk"}, [{"messages": CHATS}], "no column 'talk'"),
        ({"val_split": "held"}, [{"text": "a"}], "no split 'held'; it has 'train'"),
        ({"train_split": "train[5:]"}, [{"text": "a"}], "has no rows"),
        ({}, [{"text": " "}, {"text": ""}], "no row of train has a supervised token: of 2 rows 2 are empty"),
        ({"max_length": 4}, [{"prompt": "a b c d e f g", "completion": "h"}], "1 have nothing supervised"),
        (
            {"streaming": True, "val_fraction": 0.1},
            [{"text": "a b c"}],
            "rows are held out of a set that is read in full",
        ),
    ],
)
def test_data_that_can_not_be_trained_on(
    tmp_path: Path, tokenizer: Any, section: dict[str, Any], rows: list[Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        prepare(run_file(tmp_path, json_lines(tmp_path / "a.jsonl", rows), **section), tokenizer)


def test_too_little_supervised_and_ids_beyond_the_vocabulary(tmp_path: Path, tokenizer: Any) -> None:
    path = json_lines(tmp_path / "a.jsonl", [{"prompt": "a long question " * 5, "completion": "yes"}])
    seen: list[dict[str, Any]] = []
    with pytest.raises(UserError) as caught:
        prepare(run_file(tmp_path, path, least=0.5), tokenizer, vocabulary=100, audited=seen.append)
    assert [p.problem for p in caught.value.problems] == [
        f"train has token id {seen[0]['splits']['train']['highest_id']}, the model's vocabulary ends at 99",
        f"{seen[0]['splits']['train']['supervised_fraction']:.2%} of the training tokens are supervised, less than "
        "watch.min_supervised_fraction = 50.00%",
    ]
    prepare(run_file(tmp_path, path, least=0.01), tokenizer, vocabulary=len(tokenizer))


def test_held_out_rows_are_the_same_every_time_and_no_duplicate_crosses(tmp_path: Path, tokenizer: Any) -> None:
    texts = [text for text in PARAGRAPHS[:300] if text.strip()]
    path = json_lines(tmp_path / "a.jsonl", [{"text": text} for text in texts + texts[:50]])
    one = prepare(run_file(tmp_path, path, val_fraction=0.1), tokenizer)
    two = prepare(run_file(tmp_path, path, val_fraction=0.1), tokenizer, cache=tmp_path / "other")
    assert one.validation is not None
    assert two.validation is not None
    assert one.validation["input_ids"] == two.validation["input_ids"]
    assert 0.09 < len(one.validation) / (len(one.train) + len(one.validation)) < 0.13
    assert one.audit["overlap"]["documents"] == 0
    assert one.audit["splits"]["train"]["duplicates"] > 0


def test_evaluation_without_validation_rows(tmp_path: Path, tokenizer: Any) -> None:
    run = run_file(tmp_path, json_lines(tmp_path / "a.jsonl", [{"text": "one two"}]))
    done = prepare(run, tokenizer)
    assert done.arguments["eval_strategy"] == "no"  # the default is switched off, and said
    assert any("nothing is evaluated" in note for note in done.audit["notes"])
    asked = type(run.train)(**run.train.model_dump(exclude_unset=True), eval_steps=5)
    with pytest.raises(UserError, match=r"train.eval_steps wants evaluation, .* their splits: train"):
        prepare(run.model_copy(update={"train": asked}), tokenizer)


def test_overlap_and_duplicates_are_counted(tmp_path: Path, tokenizer: Any) -> None:
    json_lines(tmp_path / "train.jsonl", [{"text": t} for t in ("one two", "one two", "three four", "five six")])
    json_lines(tmp_path / "validation.jsonl", [{"text": t} for t in ("three four", "seven eight")])
    done = prepare(run_file(tmp_path, tmp_path), tokenizer)
    assert done.audit["overlap"] == {"documents": 1, "share": 0.5}
    assert done.audit["splits"]["train"]["duplicates"] == 1
    assert done.audit["splits"]["validation"]["duplicates"] == 0


def test_every_format_gives_the_same_rows(tmp_path: Path, tokenizer: Any) -> None:
    import csv

    from datasets import Dataset, DatasetDict

    texts = [f"{text.splitlines()[0]} «é»" for text in PARAGRAPHS[:30] if text.strip()]
    rows = Dataset.from_dict({"text": texts})
    rows.to_parquet(str(tmp_path / "a.parquet"))
    (tmp_path / "a.json").write_text(json.dumps([{"text": text} for text in texts]))
    (tmp_path / "a.txt").write_text("\n".join(texts))
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["text"], *([text] for text in texts)])
    with (tmp_path / "a.tsv").open("w", newline="") as file:
        csv.writer(file, delimiter="\t").writerows([["text"], *([text] for text in texts)])
    rows.save_to_disk(str(tmp_path / "one"))
    DatasetDict({"train": rows, "val": rows.select([0])}).save_to_disk(str(tmp_path / "dict"))
    names = ("a.parquet", "a.json", "a.txt", "a.csv", "a.tsv", "one", "dict")
    expected = prepare(run_file(tmp_path, json_lines(tmp_path / "a.jsonl", rows.to_list())), tokenizer).train[
        "input_ids"
    ]
    for name in names:
        done = prepare(run_file(tmp_path, tmp_path / name), tokenizer)
        assert done.train["input_ids"] == expected, name
        assert (done.validation is not None) == (name == "dict")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', r"a.jsonl:2: not JSON"),
        ("a.jsonl", b"[1]\n", "a.jsonl:1: a list, not an object"),
        ("a.json", b'[{"text": "a"}, 3]', "element 1: a int"),
        ("a.txt", b"caf\xe9\n", "not UTF-8"),
        ("a.csv", b"text\na,b\n", "more fields than the header"),
        ("a.csv", b'text\n"never closed\nb\n', "can't be read: unexpected end of data"),
        ("a.jsonl", b'{"text": "\\ud800 x"}\n', "half a surrogate pair"),
        ("a.parquet", b"version https://git-lfs.github.com/spec/v1\n", "not Parquet"),
        ("a.json", b'[{"text": "a"}, {]', "a.json:1: not JSON"),
    ],
)
def test_a_file_that_is_broken_is_named(tmp_path: Path, tokenizer: Any, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=said) as caught:
        prepare(run_file(tmp_path, tmp_path / name), tokenizer)
    assert caught.value.problems[0].hint


def test_a_tokenizer_without_offsets_keeps_the_edge(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    class Slow:
        """Speaks as a Python tokenizer does: ids, no offsets."""

        is_fast = False
        init_kwargs: ClassVar[dict[str, Any]] = {}

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def build_inputs_with_special_tokens(self, ids: list[int]) -> list[int]:
            return [tokenizer.bos_token_id, *ids]

    rows = [{"prompt": "What is a list?", "completion": " A sequence."}]
    path = json_lines(tmp_path / "a.jsonl", rows)
    slow = prepare(run_file(tmp_path, path), Slow())
    quick = prepare(run_file(tmp_path, path), tokenizer)
    assert slow.fingerprint != quick.fingerprint
    assert slow.train[0] == quick.train[0]


def test_the_audit_is_shown(tmp_path: Path, tokenizer: Any) -> None:
    from rich.console import Console

    rows = [{"prompt": f"question {i}?", "completion": f" answer {i}."} for i in range(50)]
    done = prepare(run_file(tmp_path, json_lines(tmp_path / "a.jsonl", rows), val_fraction=0.2), tokenizer)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(render(done.audit))
    text = console.export_text()
    assert "[[ answer" in text
    assert "supervised share" in text
    assert "packed" in text
    json.dumps(done.audit, allow_nan=False)


def test_rows_lie_end_to_end_where_attention_is_per_document(tmp_path: Path, tokenizer: Any) -> None:
    path = json_lines(tmp_path / "a.jsonl", [{"text": t} for t in PARAGRAPHS[:50]])
    run = run_file(tmp_path, path)
    assert prepare(run, tokenizer).arguments["padding_free"] is False
    assert prepare(run, tokenizer).audit["batching"]["configured"] == "padded in batches of like length"
    flash = run.model_copy(update={"model": run.model.model_copy(update={"attn_implementation": "flash_attention_2"})})
    assert prepare(flash, tokenizer).arguments["padding_free"] is True
    assert prepare(flash, tokenizer).audit["batching"]["configured"] == "padding-free"
    assert prepare(flash, tokenizer, batch=1).arguments["padding_free"] is False  # nothing to lay end to end


def test_the_order_is_the_same_for_any_number_of_ranks(tmp_path: Path, tokenizer: Any) -> None:
    path = json_lines(tmp_path / "a.jsonl", [{"text": t} for t in PARAGRAPHS[:400]])
    done = prepare(run_file(tmp_path, path), tokenizer)
    assert done.lengths is not None
    order = done.order(seed=3, epoch=0, global_batch=16)
    assert sorted(order.tolist()) == list(range(len(done.train)))
    assert order.tolist() != done.order(seed=3, epoch=1, global_batch=16).tolist()
    assert done.lengths[order[:16]].max() == done.lengths.max()
    spread = [int(np.ptp(done.lengths[order[i : i + 16]])) for i in range(0, len(order) - 16, 16)]
    assert np.mean(spread) < 0.2 * np.ptp(done.lengths)  # of like length: at random it is near the whole range
