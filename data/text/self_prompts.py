"""Prompts that the target writes itself, for users who have a model and no prompts.

A chat model has learned whole conversations: given its template up to where the user's words begin, it writes what a
user might say (Magpie, Xu et al. 2024, arXiv:2406.08464). Most of our turns begin with a few words of ours, which steer
the text towards questions, code and arithmetic. Three commands, of which any engine can run the second:

1. `data prompts --source self --limit N` makes prompts that end inside the user's turn.
2. `data responses` lets the target write on until the turn ends.
3. `data prompts --source RESPONSES` reads those turns as prompts.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from pathlib import Path
from typing import Any

from draftsmith.data.stages import SELF
from draftsmith.data.store.manifest import open_artifact
from draftsmith.data.store.rows import Rows
from draftsmith.data.text.sources import Row, RowSource
from draftsmith.data.text.template import RowError, TemplateInputs, encode, user_turn
from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.pretrained.identity import template_hash
from draftsmith.modules.types import InputError

# First words of user turns, by task; after an empty one the target chooses.
OPENINGS = {
    "chat": (
        "", "", "", "", "How", "What", "Why", "Explain", "Give me", "Can you", "Write a short", "Describe", "Compare",
    ),
    "code": (
        "Write a Python function", "Write a Python function that takes a list", "Write a function to check if",
        "Write a program", "Complete the code:\n\ndef", "How do I use Python to", "Fix this Python code:",
    ),
    "maths": (
        "Sarah bought 4", "A farmer has", "Tom has 3 times as many", "A train travels", "There are 24 students",
        "Calculate", "If a shirt costs $", "What is the sum of",
    ),
    "text": ("Summarize the following text:", "Rewrite the following sentence", "List"),
}  # fmt: skip


def opening_rows(limit: int) -> RowSource:
    """Return `limit` rows, each with the first words of a user turn as its prompt.

    Raises:
        InputError: no limit.
    """
    if not limit:
        raise InputError("limit", "0 with --source self", "the number of prompts", "Pass --limit, for example 2000.")
    openings = [(task, words) for task, several in OPENINGS.items() for words in several]

    def read(index: int) -> dict[str, Any]:
        task, words = openings[index % len(openings)]
        return {"id": f"{SELF}-{index:06d}", "task": task, "prompt": words}

    # A filter on the task still finds `limit` rows.
    digest = hashlib.sha256(repr(openings).encode()).hexdigest()
    return RowSource(SELF, range(limit * len(openings)), read, lambda: digest)


def open_prompt(row: Row, tokenizer: Any, inputs: TemplateInputs) -> dict[str, Any]:
    """Return the row of `prompts` that ends behind the first words of the user's turn."""
    words = row["prompt"]
    ids = user_turn(tokenizer, inputs)[0] + encode(tokenizer, words)
    messages = json.dumps([{"role": "user", "content": words}])
    labels = {"id": row["id"], "task": row["task"], "turn": 1}
    return {**labels, "prompt_ids": ids, "messages": messages, "later": "[]", "template_inputs": json.dumps(inputs)}


def written_turns(directory: Path, target: Checkpoint, tokenizer: Any) -> RowSource:
    """Open the user turns that the target wrote: the responses to prompts of `opening_rows`.

    A turn that was cut ends behind its last whole sentence or line. The id is a hash of the text, so that `data
    prompts` sees duplicates.

    Raises:
        InputError: an artifact of another kind, target or template, or responses to other prompts.
    """
    identity = {**target.text_identity(), "chat_template": template_hash(tokenizer)}
    manifest = open_artifact(directory, "responses", identity)
    rows = Rows(manifest)
    if not rows.read(0, 1)[0]["id"].startswith(f"{SELF}-"):
        found, expected = f"{directory}, responses to whole prompts", f"responses to prompts of --source {SELF}"
        raise InputError("source", found, expected, "Pass the data that the prompts were made from.")
    start, closing = user_turn(tokenizer, {"date": manifest.identity.get("template_date")})
    special = set(tokenizer.all_special_ids)

    def read(index: int) -> dict[str, Any]:
        row = rows.read(index, index + 1)[0]
        written = row["input_ids"][len(start) :]
        ids = list(itertools.takewhile(lambda token: token not in special, written))
        text, end, _ = tokenizer.decode(ids).partition(closing)
        if not (row["ended"] or end or len(ids) < len(written)):
            whole = re.match(r"(?s).*[.!?:\n]", text)
            text = whole[0] if whole else ""
        if not (text := text.strip()):
            raise RowError("a turn without a whole sentence", reason="unfinished")
        return {"id": hashlib.sha256(text.encode()).hexdigest()[:16], "task": row["task"], "prompt": text}

    return RowSource(directory, range(len(rows)), read, lambda: manifest.digest, content_ids=True)
