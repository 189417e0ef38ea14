"""Conversations that the target answers turn by turn, each turn after its own answers to those before it.

What a later turn shows of an earlier answer is what a server shows: the answer's text, through the chat template. Where
that begins with the very tokens that were asked and sampled, the conversation goes on in the same row, and what it
shares is read once. Where it does not (a template that drops the thinking of earlier turns or trims answers, a text
that has other tokens when it is read again), another row begins, with what is really shown as its prompt.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from draftsmith.data.models.identity import template_hash
from draftsmith.data.store.manifest import Manifest
from draftsmith.data.store.shards import SPLIT, ShardContent
from draftsmith.data.text.answers import spans
from draftsmith.data.text.template import Messages, RowError, load_chat_tokenizer, prompt_ids
from draftsmith.modules.types import InputError, SamplingParams


@dataclass(frozen=True)
class TargetTurn:
    """What the target said in one turn.

    tokens: as sampled. ended: by an end token, the last of them. text, server_tokens: what a server returned, and
    counted. retokenised: the tokens are of that text.
    """

    tokens: Sequence[int]
    ended: bool
    text: str | None = None
    retokenised: bool = False
    server_tokens: int | None = None


@dataclass(frozen=True)
class AnswerSettings:
    """How the target answers, whoever asks it. Names as of `data responses`."""

    target: str
    params: SamplingParams
    max_new_tokens: int
    ignore_eos: bool
    seed: int

    def row_seed(self, row: int, turn: int) -> int:
        """31 bits, of this row of the prompts and this turn alone, for who takes a seed with each request."""
        name = f"{self.seed}/{row}" if turn == 1 else f"{self.seed}/{row}/{turn}"
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") >> 1


class Turn(NamedTuple):
    """What waits for an answer. row: of the prompts. number: which turn of its conversation, from 1."""

    row: int
    number: int
    id: str
    prompt_ids: Sequence[int]


@dataclass
class _TurnSequence:
    """One sequence. turn: which its first answer is to."""

    turn: int
    input_ids: list[int]
    loss_mask: list[bool]
    answers: list[TargetTurn] = field(default_factory=list)


class Talk:
    """One conversation while it is answered.

    prompt: token ids that wait for an answer; None when it is over. messages: the same as chat messages, known where
    there are later turns. turn: which it is, from 1. counts: turns that were not asked, by reason, and rows that had to
    begin anew.
    """

    def __init__(self, row: Mapping[str, Any], tokenizer: Any, longest: int | None):
        """row: of the artefact `prompts`. tokenizer: with the prompts' chat template, for later turns. longest: a later
        turn's prompt must have fewer tokens."""
        self._row, self._tokenizer, self._longest = row, tokenizer, longest
        self._later: list[Messages] = later_turns(row)
        self._rows: list[_TurnSequence] = []
        self.prompt: list[int] | None = list(row["prompt_ids"])
        self.messages: Messages = json.loads(row["messages"]) if self._later else []
        self.turn = 1
        self.counts: Counter[str] = Counter()

    @property
    def turns_left(self) -> int:
        """Turns to be asked, this one included."""
        return (self.prompt is not None) + len(self._later)

    def asked(self) -> dict[str, Any]:
        """What waits for an answer, as a row of prompts."""
        messages = json.dumps(self.messages, ensure_ascii=False) if self.turn > 1 else self._row["messages"]
        return {**self._row, "prompt_ids": self.prompt, "messages": messages}

    def hear(self, answer: TargetTurn) -> None:
        """Take the answer to `prompt`, which is the next turn's then."""
        assert self.prompt is not None
        row = self._row_of(self.prompt)
        row.input_ids += answer.tokens
        row.loss_mask += [True] * len(answer.tokens)
        row.answers.append(answer)
        self.prompt = None
        if self._later:
            self._go_on(answer)

    def rows(self) -> list[dict[str, Any]]:
        """Rows of the artefact `responses`: one, but for the breaks that the template makes."""
        return [self._finished(row) for row in self._rows]

    def held(self) -> dict[str, Any]:
        """What was said, as JSON values: rows and counts."""
        return {"rows": self.rows(), "counts": dict(self.counts)}

    def _row_of(self, prompt: list[int]) -> _TurnSequence:
        """The row that the answer to this prompt belongs to, up to where the answer begins."""
        if self._rows:
            row, known = self._rows[-1], len(self._rows[-1].input_ids)
            if prompt[:known] == row.input_ids:
                row.input_ids += prompt[known:]
                row.loss_mask += [False] * (len(prompt) - known)
                return row
            self.counts[SPLIT] += 1
        self._rows.append(_TurnSequence(self.turn, list(prompt), [False] * len(prompt)))
        return self._rows[-1]

    def _go_on(self, answer: TargetTurn) -> None:
        if not answer.ended:
            self._leave("turns_after_cut_answer")
            return
        said = answer.text if answer.retokenised else None
        if said is None:
            said = self._tokenizer.decode(list(answer.tokens), skip_special_tokens=True)
        messages = [*self.messages, {"role": "assistant", "content": said}, *self._later[0]]
        try:
            prompt = prompt_ids(self._tokenizer, messages)
        except RowError:
            self._leave("turns_refused_by_template")
            return
        if self._longest is not None and len(prompt) >= self._longest:
            self._leave("turns_beyond_context")
            return
        self.prompt, self.messages, self.turn = prompt, messages, self.turn + 1
        del self._later[0]

    def _leave(self, reason: str) -> None:
        """Nobody can answer the turns that are left."""
        self.counts[reason] += len(self._later)
        self._later = []

    def _finished(self, row: _TurnSequence) -> dict[str, Any]:
        texts = [answer.text for answer in row.answers]
        counted = [answer.server_tokens for answer in row.answers]
        return {
            "id": self._row["id"] if row.turn == 1 else f"{self._row['id']}/turn-{row.turn}",
            "input_ids": row.input_ids,
            "loss_mask": row.loss_mask,
            "turn": row.turn,
            "ended": row.answers[-1].ended,
            "retokenised": any(answer.retokenised for answer in row.answers),
            "task": self._row["task"],
            "text": None if None in texts else "".join(text for text in texts if text is not None),
            "server_tokens": None if None in counted else sum(number for number in counted if number is not None),
        }


Talks = Callable[[Mapping[str, Any]], Talk]  # of a row of prompts


def shard_content(held: Sequence[Mapping[str, Any]]) -> ShardContent:
    """The shard of conversations that were held, as `Talk.held` has them."""
    rows = [row for talk in held for row in talk["rows"]]
    counts: Counter[str] = Counter(count_responses(rows))
    for talk in held:
        counts.update(talk["counts"])
    return ShardContent(rows, dict(counts))


def count_responses(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Counts of a shard of responses."""
    masks = [row["loss_mask"] for row in rows]
    return {
        "tokens": sum(len(row["input_ids"]) for row in rows),
        "answers": sum(len(spans(mask)) for mask in masks),
        "response_tokens": sum(map(sum, masks)),
        "ended": sum(row["ended"] for row in rows),
        "retokenised": sum(row["retokenised"] for row in rows),
    }


def later_turns(row: Mapping[str, Any]) -> list[Messages]:
    """What is said after each of the target's answers, of a row of prompts."""
    return json.loads(row.get("later") or "[]")


def has_later_turns(manifest: Manifest) -> bool:
    """True for prompts of which some have later turns."""
    return manifest.counts.get("later_turns", 0) > 0


def turns_tokenizer(target: str, manifest: Manifest, chat_template: Path | None) -> Any:
    """The tokenizer with the template that these prompts were made with.

    chat_template: a file that has it; None looks where the prompts had it from, and else takes the tokenizer's own.

    Raises:
        InputError: it is another one.
    """
    wanted, recorded = manifest.identity.get("chat_template"), manifest.config.get("chat_template")
    lost = chat_template is None and recorded is not None and not Path(recorded).is_file()
    path = chat_template or (Path(recorded) if recorded and not lost else None)
    tokenizer = load_chat_tokenizer(target, path)
    if (found := template_hash(tokenizer)) != wanted:
        remedy = "Pass --chat-template FILE: later turns are asked as the first one was."
        said = f"nothing at {recorded}, and {found} in {target}" if lost else found
        raise InputError("chat_template", said, f"the prompts' template, {wanted}", remedy)
    # Later turns that are too long are left out and counted.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    return tokenizer
