"""Languages of texts, of the Universal Declaration of Human Rights as the United Nations publish its translations."""

from __future__ import annotations

import sys

import pytest

from draftsmith.data.text import languages
from draftsmith.data.text.languages import language_of
from draftsmith.modules.types import InputError

pytest.importorskip("py3langid", reason="the extra `languages` is not installed")

ARTICLE_1 = {
    "en": "All human beings are born free and equal in dignity and rights. They are endowed with reason and "
    "conscience and should act towards one another in a spirit of brotherhood.",
    "de": "Alle Menschen sind frei und gleich an Würde und Rechten geboren. Sie sind mit Vernunft und Gewissen "
    "begabt und sollen einander im Geist der Brüderlichkeit begegnen.",
    "fr": "Tous les êtres humains naissent libres et égaux en dignité et en droits. Ils sont doués de raison et de "
    "conscience et doivent agir les uns envers les autres dans un esprit de fraternité.",
    "es": "Todos los seres humanos nacen libres e iguales en dignidad y derechos y, dotados como están de razón y "
    "conciencia, deben comportarse fraternalmente los unos con los otros.",
    "zh": "人人生而自由，在尊严和权利上一律平等。他们赋有理性和良心，并应以兄弟关系的精神相对待。",
    "ja": "すべての人間は、生れながらにして自由であり、かつ、尊厳と権利とについて平等である。",
    "da": "Alle mennesker er født frie og lige i værdighed og rettigheder. De er udstyret med fornuft og "
    "samvittighed, og de bør handle mod hverandre i en broderskabets ånd.",
    "pt": "Todos os seres humanos nascem livres e iguais em dignidade e em direitos. Dotados de razão e de "
    "consciência, devem agir uns para com os outros em espírito de fraternidade.",
    "it": "Tutti gli esseri umani nascono liberi ed eguali in dignità e diritti. Essi sono dotati di ragione e di "
    "coscienza e devono agire gli uni verso gli altri in spirito di fratellanza.",
    "ru": "Все люди рождаются свободными и равными в своем достоинстве и правах. Они наделены разумом и совестью и "
    "должны поступать в отношении друг друга в духе братства.",
}  # fmt: skip
CODE = "```python\n" + 'raise ValueError("the number of the users should be larger than this one")\n' * 5 + "```\n"
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "where should the weather be good"}}\n</tool_call>'


@pytest.mark.parametrize("code", ARTICLE_1)
def test_an_answers_language_is_that_of_its_prose(code):
    text = ARTICLE_1[code]
    assert language_of(text) == code
    assert language_of(f"{CODE}\n{text}<|im_end|>") == code  # English code is longer than the prose
    assert language_of(f"<think>\n{ARTICLE_1['en'] * 3}\n</think>\n{text}\n{CALL}") == code
    assert language_of(f"{ARTICLE_1['en'] * 3}\n</think>\n{text}", "<|im_start|>assistant\n<think>\n") == code


def test_texts_of_no_language_are_named_for_what_they_are():
    assert language_of(CODE) == language_of(CALL) == language_of(f"OK.\n{CODE}") == "code"
    assert (
        language_of("") == language_of("12 * 4 = 48\n#### 48") == language_of("https://example.org/wo/ist/das") == "und"
    )
    assert language_of(f"<think>\n{ARTICLE_1['de']}") == "de"  # cut before its answer


def test_the_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "py3langid.langid", None)
    languages.classifier.cache_clear()
    with pytest.raises(InputError, match=r"draftsmith\[languages\]"):
        language_of(ARTICLE_1["de"])
