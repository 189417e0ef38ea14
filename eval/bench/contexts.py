"""Prompts of given lengths, built from long rows: recorded conversations and documents with a question.

A prompt ends where the row's assistant speaks: behind its last question, or behind an earlier one of a conversation
that is longer than wanted. What is still too much is cut out of its longest message, in front of that message's last
lines, where a question about a document stands.
"""

from __future__ import annotations

import dataclasses
import itertools
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any

from draftsmith.data.console import log_note
from draftsmith.data.text.template import Messages, prompt_ids
from draftsmith.eval.bench.prompts import BenchPrompt, row_errors
from draftsmith.modules.types import InputError

# Roles whose messages are answered, and may be shortened.
ASKING = ("user", "tool")
# Characters at the end of a shortened message that stay, of one that has twice as many.
CLOSING = 500


def context_name(context: int) -> str:
    """Return a number of tokens as users write it: 4k is 4,096."""
    return f"{context // 1024}k" if context % 1024 == 0 else str(context)


def check_contexts(contexts: Sequence[int], max_new_tokens: int, reader: str, most: int | None) -> None:
    """Raise InputError for a prompt and answer that are longer than `most`, the context of `reader`; None: unknown."""
    if most is not None and contexts[-1] + max_new_tokens > most:
        found = f"{contexts[-1]:,} tokens, and {max_new_tokens:,} of an answer"
        expected = f"at most {most:,} together, the context of {reader}"
        raise InputError("contexts", found, expected, "Pass shorter ones, or lower --max-new-tokens.")


def context_prompts(
    prompts: Iterable[BenchPrompt], tokenizer: Any, contexts: Sequence[int], limit: int
) -> list[list[BenchPrompt]]:
    """Build up to `limit` prompts (0: all) of each length, tasks by its name, of rows that are at least as long.

    All lengths take the same rows as far as these are long enough, and rows are read until `limit` are for all.

    prompts: whole rows, with their messages. contexts: ascending.

    Raises:
        InputError: no row is long enough for a length.
    """
    rows, num_read, num_longest, longest = list[BenchPrompt](), 0, 0, 0
    for prompt in prompts:
        length = len(prompt.prompt_ids)
        num_read, longest, num_longest = num_read + 1, max(longest, length), num_longest + (length >= contexts[-1])
        rows += [prompt] if length >= contexts[0] else []
        if limit and num_longest == limit:
            break
    rows.sort(key=lambda row: -len(row.prompt_ids))

    files, counts, number = list[list[BenchPrompt]](), list[str](), itertools.count()
    for context in contexts:
        name, long = context_name(context), [row for row in rows if len(row.prompt_ids) >= context]
        built = (made for row in long if (made := at_length(tokenizer, row, context)) is not None)
        file = list(itertools.islice(built, limit or None))
        if not file:
            found = f"no prompt of {name} in {num_read} rows, the longest of {longest:,} tokens"
            expected = f"rows of {context:,} tokens or more, with a long message of the user's or a tool's"
            raise InputError("contexts", found, expected, f"Leave {name} out, or pass longer rows.")
        files.append([dataclasses.replace(prompt, task=name, number=next(number)) for prompt in file])
        counts.append(f"{len(long)} for {name} ({len(file)} prompts)")
    log_note(f"draftsmith: {num_read} rows read; long enough: {', '.join(counts)}")
    return files


def at_length(tokenizer: Any, row: BenchPrompt, context: int) -> BenchPrompt | None:
    """Cut a row that has at least `context` tokens to a prompt of that many, or a few more if no cut gives as many.

    Returns None if its messages cannot be shortened to that.

    Raises:
        InputError: its tokens are those of another chat template.
    """
    messages: Messages = list(map(dict, row.messages))

    def ids(messages: Messages) -> list[int]:
        with row_errors(f"prompt {row.id}"):
            return prompt_ids(tokenizer, messages, row.template_inputs)

    if ids(messages) != row.prompt_ids:
        found, remedy = f"prompt {row.id} in another chat template", "Make the prompts again, or pass the chats."
        raise InputError("prompts", found, "the target's, which prompts of other lengths are written in", remedy)

    # The shortest beginning that is long enough, of those that an answer follows.
    roles = [*(message["role"] for message in messages), "assistant"]
    ends = [
        place for place, pair in enumerate(itertools.pairwise(roles), 1) if pair[0] in ASKING and pair[1] == "assistant"
    ]
    if not ends:
        return None
    messages = messages[: ends[bisect_left(ends[:-1], context, key=lambda end: len(ids(messages[:end])))]]

    asking = (message for message in messages if message["role"] in ASKING)
    message = max(asking, key=lambda message: len(message["content"]))
    text = message["content"]
    closing = max(len(text) // 2, len(text) - CLOSING)
    if 0 < (line := text.find("\n", closing) + 1) < len(text):
        closing = line

    def without(kept: int) -> list[int]:
        message["content"] = text[:kept] + text[closing:]
        return ids(messages)

    tokens = without(bisect_left(range(closing), context, key=lambda kept: len(without(kept))))
    if len(tokens) > context + context // 8:
        return None
    return BenchPrompt.of(row.id, tokens, row.task, messages, (), row.template_inputs)
