"""Languages of texts, by py3langid (the extra `languages`): offline, by n-grams of bytes. Code has no language."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

from draftsmith.data.text.kinds import kinds_of
from draftsmith.modules.types import InputError

UNKNOWN, CODE = "und", "code"
# Of 14,000 texts of 50 tokens and more in 24 languages, 0.1 % of the right answers and two thirds of the wrong ones are
# less probable.
LEAST_PROBABILITY = 0.5
# Inline code, addresses, tags and special tokens, commands of LaTeX, and numbers.
NO_LANGUAGE = re.compile(r"`+[^`\n]*`+|\w+://\S+|<[|/\w][^<>\n]*>|\\\w+|\d+")


def language_of(text: str, prompt: str = "") -> str:
    """Return the ISO 639-1 code of the language of a text's prose, or of its thinking where it has no prose.

    It is `code` where code and calls leave too little text, and `und` where there is too little of anything, or two
    languages are as probable. Code outside of fences counts as prose: it is `und`, or `en` for its words.

    prompt: end of what the text answers, which may open its thinking (`kinds_of`).

    Raises:
        InputError: the extra `languages` is not installed.
    """
    kinds = kinds_of(text, prompt)
    for wanted in ("prose", "thinking"):
        part = "".join(letter for letter, kind in zip(text, kinds, strict=True) if kind == wanted)
        language, _ = classifier()(NO_LANGUAGE.sub(" ", part))
        if language != UNKNOWN:
            return language
    return CODE if {"code", "call"} & {*kinds} else UNKNOWN


@functools.cache
def classifier() -> Callable[[str], tuple[str, float]]:
    """Load the model (4.6 MB, a second): text -> the likeliest language with an ISO 639-1 code, its probability."""
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError as error:
        remedy = "Run: pip install 'draftsmith[languages]', or give the rows a column `language`."
        raise InputError("language", "no py3langid", "the extra `languages`", remedy) from error
    loaded = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True, min_confidence=LEAST_PROBABILITY)
    # The others, such as Wu beside Chinese, and Nigerian Pidgin beside English, are seldom meant.
    loaded.set_languages([label for label in loaded.labels if len(label) == 2])
    return loaded.classify
