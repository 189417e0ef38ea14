"""A pair of one's own text: conversations in the form of ShareGPT, of which the first question and answer are taken."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path

from draftsmith.benchmarks.embedded.tasks import Turn
from draftsmith.modules.types import InputError

HELD_OUT = 10  # one of so many for dev, and one for test


def own_turns(files: Sequence[Path], seed: int) -> list[Turn]:
    """A turn of every conversation; its task is the name of the file. A question is in train, dev or test by content
    hash, and no answer is there twice.

    Raises:
        InputError: a line that is no conversation.
    """
    found: dict[str, Turn] = {}
    for path in files:
        for number, line in enumerate(path.read_text("utf-8").strip("\n").split("\n"), 1):
            try:
                said = json.loads(line)["conversations"]
                prompt, answer = (str(said[place]["value"]).strip() for place in (0, 1))
            except (ValueError, KeyError, IndexError, TypeError) as error:
                expected = '{"conversations": [{"value": QUESTION}, {"value": ANSWER}, ...]}'
                raise InputError("text", f"line {number} of {path}", expected, "Mend or leave out the line.") from error
            key = hashlib.sha256(prompt.encode()).hexdigest()[:16]
            split = {0: "dev", 1: "test"}.get(int(key, 16) % HELD_OUT, "train")
            found.setdefault(answer, Turn(path.stem, key, split, prompt, answer, path.stem, "as the file says"))
    turns = list(found.values())
    random.Random(seed).shuffle(turns)
    return turns
