"""Answers in conversations of public templates, by hand; and templates that lose words or mark the wrong ones."""

from __future__ import annotations

import datetime

import pytest
import tokenizers
from chats import (
    ASSISTANT,
    CHATML,
    CHATML_TAGGED,
    HARMONY,
    LLAMA3,
    QWEN3,
    R1,
    SPECIAL,
    SYSTEM,
    USER,
    chat,
    chat_model,
    chat_tokenizer,
    rendered,
)
from tokenizers import AddedToken, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftsmith.data.text.masks import check_mask, supervised_ids
from draftsmith.data.text.template import RowError, load_chat_tokenizer, pin_date, prompt_ids
from draftsmith.modules.pretrained.hub import resolve_model
from draftsmith.modules.types import InputError

TWO = chat((USER, "Hi"), (ASSISTANT, "Ho"), (USER, "And?"), (ASSISTANT, " So."))
PLAIN_TURNS = "{% for m in messages %}{{ '\n' + m.role + ': ' + m.content + '\n' }}{% endfor %}"
PLAIN_TURNS += "{% if add_generation_prompt %}{{ '\nassistant: ' }}{% endif %}"
BEGIN = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
AGAIN = "\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
# Template, messages, other inputs of the template, and the expected text; ⟦...⟧ encloses the target's answers.
CASES = {
    "chatml": (CHATML, TWO, {}, f"{BEGIN}⟦Ho<|im_end|>⟧{AGAIN}⟦ So.<|im_end|>⟧\n"),
    "chatml with tags": (
        CHATML_TAGGED, TWO, {},
        f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Ho<|im_end|>⟧{AGAIN}⟦ So.<|im_end|>⟧\n",
    ),
    "llama 3": (
        LLAMA3, TWO, {"date": "2026-11-05"},
        "<|begin|><|header|>system<|/header|>\n\nToday: 05 Nov 2026<|eot|>"
        "<|header|>user<|/header|>\n\nHi<|eot|><|header|>assistant<|/header|>\n\n⟦Ho<|eot|>⟧"
        "<|header|>user<|/header|>\n\nAnd?<|eot|><|header|>assistant<|/header|>\n\n⟦So.<|eot|>⟧",
    ),
    "thinking turned off": (
        QWEN3, TWO, {"variables": {"enable_thinking": False}},
        f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Ho<|im_end|>⟧{AGAIN}"
        "<think>\n\n</think>\n\n⟦ So.<|im_end|>⟧\n",
    ),
    "a prompt that opens a thought": (
        R1, chat((USER, "Hi"), (ASSISTANT, "<think>hm</think>Ho"), (USER, "And?"), (ASSISTANT, "So.")), {},
        "<|User|>Hi<|Assistant|>⟦Ho<|eos|>⟧<|User|>And?<|Assistant|>⟦So.<|eos|>⟧",
    ),
    "a greeting": (
        CHATML, chat((SYSTEM, "s"), (ASSISTANT, "Hi"), (USER, "Ho")), {},
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>assistant\n⟦Hi<|im_end|>⟧\n<|im_start|>user\nHo<|im_end|>\n",
    ),
    "a greeting before all": (
        CHATML_TAGGED.replace("{% generation %}", "").replace("{% endgeneration %}", ""), TWO[1:], {},
        f"<|im_start|>assistant\n⟦Ho<|im_end|>⟧{AGAIN}⟦ So.<|im_end|>⟧\n",
    ),
    # The target was asked with one line break and samples another: no token of two is its.
    "an answer that begins with a line break": (
        CHATML, chat((USER, "Hi"), (ASSISTANT, "\nHo")), {}, f"{BEGIN[:-1]}\n\n⟦Ho<|im_end|>⟧\n",
    ),
    # One token ends the answer and begins the next turn.
    "turns without special tokens": (
        PLAIN_TURNS, TWO, {}, "\nuser: Hi\n\nassistant: ⟦Ho⟧\n\nuser: And?\n\nassistant: ⟦ So.\n⟧",
    ),
    # As Command-R's, and as Bielik's behind results of tools.
    "a template that opens an answer whether asked or not": (
        CHATML.replace("if add_generation_prompt", "if true"), TWO, {},
        f"{BEGIN}⟦Ho<|im_end|>⟧{AGAIN}⟦ So.<|im_end|>⟧\n<|im_start|>assistant\n",
    ),
    "a template that ends the user's turn in a prompt only": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
        "{{ '<|im_end|>\n' if m.role == 'assistant' or loop.last }}{% endfor %}"
        "{{ '<|im_start|>assistant\n' if add_generation_prompt }}", TWO, {},
        "<|im_start|>user\nHi<|im_start|>assistant\n⟦Ho<|im_end|>⟧\n"
        "<|im_start|>user\nAnd?<|im_start|>assistant\n⟦ So.<|im_end|>⟧\n",
    ),
    "an answer that the template leaves empty": (
        R1, chat((USER, "Hi"), (ASSISTANT, "<think>hm</think>"), (USER, "And?"), (ASSISTANT, "So.")), {},
        "<|User|>Hi<|Assistant|><|eos|><|User|>And?<|Assistant|>⟦So.<|eos|>⟧",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_mask_is_on_what_the_target_samples_with_any_public_template(case):
    template, messages, inputs, marked = CASES[case]
    tokenizer = chat_tokenizer(template)
    expected: list[tuple[int, bool]] = []
    for number, piece in enumerate(marked.replace("⟦", "⟧").split("⟧")):  # every second piece is sampled
        ids = tokenizer(piece, add_special_tokens=False)["input_ids"]
        expected += [(token, number % 2 == 1) for token in ids]
    ids, mask = supervised_ids(tokenizer, messages, inputs)
    assert list(zip(ids, mask, strict=True)) == expected


@pytest.mark.parametrize("template", [CHATML, CHATML_TAGGED, HARMONY])
def test_an_answer_of_weight_0_is_not_in_the_mask(template):
    tokenizer = chat_tokenizer(template)
    ids, mask = supervised_ids(tokenizer, TWO, {}, not_learned=[1])
    learned = tokenizer.decode([token for token, counted in zip(ids, mask, strict=True) if counted])
    assert " So." in learned and "Ho" not in learned
    assert ids == supervised_ids(tokenizer, TWO)[0]
    with pytest.raises(RowError, match="weight 0"):
        supervised_ids(tokenizer, TWO, {}, not_learned=[1, 3])


def test_a_mask_ends_with_its_answer_where_the_last_letter_has_no_token():
    """transformers#47325: its own mask runs to the end of the text behind a dropped letter, and behind token 0."""
    words = {word: i for i, word in enumerate(["one", "<unk>", *SPECIAL, "hello", "user", "words", "answer", "two"])}
    fast = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}<|Assistant|>{% generation %}{{ m.content + ' ' }}"
        "{% endgeneration %}<|eos|>{% else %}<|User|>{{ m.content }}<|eos|>{% endif %}{% endfor %}"
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="<unk>", chat_template=template)
    said = chat((USER, "hello"), (ASSISTANT, "answer one"), (USER, "user words"), (ASSISTANT, "two"))
    ids, mask = supervised_ids(tokenizer, said)
    assert [token for token, counted in zip(ids, mask, strict=True) if counted] == [words["answer"], 0, words["two"]]


PLAIN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
PARTS = "{% for m in messages %}<s>{% for c in m.content %}{{ c.text }}{% endfor %}</s>{% endfor %}"


def test_a_template_that_reads_parts_only_is_refused_before_any_row(pair, tmp_path):
    (path := tmp_path / "template.jinja").write_text(PARTS)
    with pytest.raises(InputError, match=r"template\.jinja, which drops a message.*the user's words.*--chat-template"):
        load_chat_tokenizer(str(pair[0]), path)


# Nothing is tagged; the user's words are; a macro's tags, which transformers places wrongly.
WRONG_TAGS = {
    "tags that never hold": PLAIN + "{% if false %}{% generation %}x{% endgeneration %}{% endif %}",
    "tags around all": "{% generation %}" + PLAIN + "{% endgeneration %}",
    "tags in a block": "{% set shown %}{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}{% endset %}<s>{{ shown }}",
}


@pytest.mark.parametrize("case", WRONG_TAGS)
def test_tags_on_other_words_than_the_assistants_are_refused(case):
    with pytest.raises(InputError, match=r"chat_template: found a mask on .*--chat-template FILE"):
        check_mask(chat_tokenizer(WRONG_TAGS[case]), {})


def test_a_byte_order_mark_of_a_template_is_no_token(tmp_path):
    directory = chat_model(tmp_path / "target", CHATML)
    expected = prompt_ids(load_chat_tokenizer(str(directory)), TWO[:1])
    assert chat_tokenizer(CHATML).decode(expected) == rendered(CHATML, TWO[:1], add_generation_prompt=True)
    marked = b"\xef\xbb\xbf" + CHATML.encode()
    (tmp_path / "marked.jinja").write_bytes(marked)
    assert prompt_ids(load_chat_tokenizer(str(directory), tmp_path / "marked.jinja"), TWO[:1]) == expected
    (directory / "chat_template.jinja").write_bytes(marked)
    assert prompt_ids(load_chat_tokenizer(str(directory)), TWO[:1]) == expected


def test_the_date_of_a_template_can_be_pinned_in_every_form():
    forms = ["%d %B %Y", "%Y-%m-%d", "%A, %-d. %b", "%j of %y", "%x"]
    template = "{% macro day(form) %}{{ strftime_now(form) }}{% endmacro %}"
    template += "".join(f"{{{{ day('{form}') }}}}|" for form in forms) + "{% if strftime_now is defined %}!{% endif %}"
    day = datetime.datetime(2024, 2, 29)
    text = chat_tokenizer(CHATML).apply_chat_template(
        TWO, tokenize=False, chat_template=pin_date(template, "2024-02-29")
    )
    assert text == "|".join(map(day.strftime, forms)) + "|!"


@pytest.mark.parametrize("space", ["", "\n", "  ", "\n\n  "])
def test_a_pinned_template_keeps_the_white_space_in_front(space):
    template = space + "{{ strftime_now('%Y') }}" + PLAIN
    pinned = pin_date(template, "2024-02-29")
    text = chat_tokenizer(CHATML).apply_chat_template(TWO, tokenize=False, chat_template=pinned)
    assert text == rendered(template, TWO, now=datetime.datetime(2024, 2, 29))


def test_the_shipped_targets_template_marks_the_answers():
    for name in ("embedded:target", "embedded:prose/target"):
        check_mask(load_chat_tokenizer(resolve_model(name)), {})
