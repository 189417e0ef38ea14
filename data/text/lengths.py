"""Prompts of given lengths, cut from long rows: recorded conversations, and documents with a question.

A prompt ends where the row's assistant speaks: behind its last question, or behind an earlier one of a conversation
that is longer than wanted. What is still too much is cut out of its longest message, in front of that message's last
lines, where a question about a document stands.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from typing import Any

from draftsmith.data.text.template import Messages, TemplateInputs, prompt_ids

# Roles whose messages are answered, and may be shortened.
ASKING = ("user", "tool")
# Characters at the end of a shortened message that stay, of one that has twice as many.
CLOSING = 500


def length_name(length: int) -> str:
    """Return a number of tokens as users write it: 4k is 4,096."""
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def cut_to(
    tokenizer: Any, messages: Messages, inputs: TemplateInputs, length: int
) -> tuple[Messages, list[int]] | None:
    """Cut messages to a prompt of `length` tokens, or a few more if no cut gives as many; return it with its tokens.

    Returns None for messages that have fewer tokens, or cannot be shortened to that.

    Raises:
        RowError: the chat template refuses them.
    """

    def ids(messages: Messages) -> list[int]:
        return prompt_ids(tokenizer, messages, inputs)

    if len(ids(messages)) < length:
        return None
    # The shortest beginning that is long enough, of those that an answer follows.
    roles = [*(message["role"] for message in messages), "assistant"]
    ends = [
        place for place, pair in enumerate(itertools.pairwise(roles), 1) if pair[0] in ASKING and pair[1] == "assistant"
    ]
    if not ends:
        return None
    end = ends[bisect_left(ends[:-1], length, key=lambda end: len(ids(messages[:end])))]
    messages = [dict(message) for message in messages[:end]]

    asking = (message for message in messages if message["role"] in ASKING)
    message = max(asking, key=lambda message: len(message["content"]))
    text = message["content"]
    closing = max(len(text) // 2, len(text) - CLOSING)
    # In front of a line break or a blank, which stays.
    breaks = (text.find(end, closing) for end in "\n ")
    closing = next((place for place in breaks if 0 <= place < len(text) - 1), closing)

    def without(kept: int) -> list[int]:
        message["content"] = text[:kept] + text[closing:]
        return ids(messages)

    tokens = without(bisect_left(range(closing), length, key=lambda kept: len(without(kept))))
    return (messages, tokens) if len(tokens) <= length + length // 8 else None
