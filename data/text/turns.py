"""Conversations that the target answers turn by turn, each turn after its own answers to the turns before.

A later turn shows earlier answers as a server does: their text, through the chat template; or their tokens as sampled,
where special tokens give an answer structure. If that begins with the very tokens that were asked and sampled, the
conversation continues in the same row, and the shared part is read once. If not (a template that drops earlier thinking
or trims answers, a text that tokenizes differently), another row begins with what is really shown as its prompt.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from draftsmith.data.store.manifest import Manifest
from draftsmith.data.store.shards import SPLIT, ShardContent
from draftsmith.data.text.answers import spans
from draftsmith.data.text.template import NO_TEMPLATE, Messages, RowError, follow_answer, load_chat_tokenizer
from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.pretrained.identity import template_hash
from draftsmith.modules.types import InputError, SamplingParams


@dataclass(frozen=True)
class TargetTurn:
    """The target's answer in one turn, as sampled. ended: whether the last token is an end token."""

    tokens: Sequence[int]
    ended: bool


@dataclass(frozen=True)
class AnswerSettings:
    """How the target answers, with any engine. Names as in `data responses`."""

    target: Checkpoint
    params: SamplingParams
    max_new_tokens: int
    ignore_eos: bool
    seed: int

    def row_seed(self, row: int, turn: int) -> int:
        """Return a seed of 31 bits for one turn of a row of prompts, for engines that take a seed per request."""
        name = f"{self.seed}/{row}" if turn == 1 else f"{self.seed}/{row}/{turn}"
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") >> 1


class PendingTurn(NamedTuple):
    """A turn that waits for an answer. row: number in the prompts. number: turn of its conversation, from 1."""

    row: int
    number: int
    id: str
    prompt_ids: Sequence[int]


class Conversation:
    """A conversation while it is answered.

    prompt: token ids of the turn that waits for an answer; None at the end. messages: the same as chat messages, only
    if there are later turns. turn: its number, from 1, or from that of the row of prompts. rows: of the artifact
    `responses`, one unless the template forced others to begin. counts: turns that cannot be asked, by reason, and rows
    that had to begin anew.
    """

    def __init__(self, row: Mapping[str, Any], tokenizer: Any, max_length: int | None):
        """row: of the artifact `prompts`. tokenizer: with the prompts' chat template, for later turns. max_length: a
        later turn's prompt must have fewer tokens."""
        self._prompt_row, self._tokenizer, self._max_length = row, tokenizer, max_length
        self._later: list[Messages] = json.loads(row["later"])
        self._inputs = json.loads(row.get("template_inputs", "{}"))
        self.rows: list[dict[str, Any]] = []
        self.prompt: list[int] | None = list(row["prompt_ids"])
        self.messages: Messages = json.loads(row["messages"]) if self._later else []
        self.turn = self._first = row.get("turn", 1)
        self.counts: Counter[str] = Counter()

    def to_prompt_row(self) -> dict[str, Any]:
        """Return the waiting turn as a row of prompts."""
        asked = self._prompt_row["messages"]
        messages = json.dumps(self.messages, ensure_ascii=False) if self.turn > self._first else asked
        return {**self._prompt_row, "prompt_ids": self.prompt, "messages": messages}

    def add_answer(self, answer: TargetTurn) -> None:
        """Append the answer to `prompt` and advance to the next turn."""
        assert self.prompt is not None
        # Append the answer to its row.
        row = self._row_for(self.prompt)
        row["input_ids"] += answer.tokens
        row["loss_mask"] += [True] * len(answer.tokens)
        row["ended"] = answer.ended

        asked, self.prompt = self.prompt, None
        if not self._later:
            return
        reason, messages, prompt = "", self.messages, list[int]()
        try:
            conversation = (asked, self.messages, self._inputs, answer.tokens, self._later[0])
            messages, prompt = follow_answer(self._tokenizer, *conversation)
        except RowError:
            reason = "turns_refused_by_template"
        if not answer.ended:
            reason = "turns_after_cut_answer"
        elif self._max_length is not None and len(prompt) >= self._max_length:
            reason = "turns_beyond_context"
        # The turns that are left cannot be asked.
        if reason:
            self.counts[reason] += len(self._later)
            self._later = []
        else:
            self.prompt, self.messages, self.turn = prompt, messages, self.turn + 1
            del self._later[0]

    def _row_for(self, prompt: list[int]) -> dict[str, Any]:
        """Return the row that the answer to this prompt belongs to, extended up to where the answer begins."""
        if self.rows:
            row, known = self.rows[-1], len(self.rows[-1]["input_ids"])
            # The same tokens again: the conversation continues in the same row.
            if prompt[:known] == row["input_ids"]:
                row["input_ids"] += prompt[known:]
                row["loss_mask"] += [False] * (len(prompt) - known)
                return row
            self.counts[SPLIT] += 1
        row_id = self._prompt_row["id"] if self.turn == self._first else f"{self._prompt_row['id']}/turn-{self.turn}"
        row = {"id": row_id, "input_ids": list(prompt), "loss_mask": [False] * len(prompt), "turn": self.turn}
        row |= {"ended": False, "task": self._prompt_row["task"], "labels": self._prompt_row.get("labels")}
        self.rows.append(row)
        return row


# Begins the conversation of a row of prompts.
BeginConversation = Callable[[Mapping[str, Any]], Conversation]


def shard_content(conversations: Sequence[Conversation]) -> ShardContent:
    """Build the shard of finished conversations."""
    rows = [row for conversation in conversations for row in conversation.rows]
    masks = [row["loss_mask"] for row in rows]
    counts = Counter(
        tokens=sum(map(len, masks)),
        answers=sum(len(spans(mask)) for mask in masks),
        response_tokens=sum(map(sum, masks)),
        ended=sum(row["ended"] for row in rows),
    )
    for conversation in conversations:
        counts.update(conversation.counts)
    return ShardContent(rows, dict(counts))


def turns_tokenizer(target: Checkpoint, manifest: Manifest, chat_template: Path | None) -> Any:
    """Load the tokenizer with the template that the prompts were made with.

    chat_template: a file that has it, or `NO_TEMPLATE`; by default what the prompts took it from.

    Raises:
        InputError: it is another one.
    """
    expected, recorded = manifest.identity["chat_template"], manifest.config.get("chat_template")
    # The file whose path the prompts recorded may be gone.
    path = chat_template
    if path is None and recorded and (recorded == NO_TEMPLATE or Path(recorded).is_file()):
        path = Path(recorded)
    tokenizer = load_chat_tokenizer(target, path)
    if (found := template_hash(tokenizer)) != expected:
        remedy = "Pass --chat-template FILE: later turns are asked as the first one was."
        found = f"{found} of {path or target.path}"
        expected = f"the prompts' template, {expected}, of {recorded or target.path}"
        raise InputError("chat_template", found, expected, remedy)
    return tokenizer
