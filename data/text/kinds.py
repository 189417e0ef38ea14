"""Kinds of an answer's tokens, by the markers in its text: thinking, calls of tools, code, and prose.

A part reaches from its opening marker to behind its closing one, or to the end of the answer. A token belongs to the
part that its first character stands in. Inside a part other markers mean nothing: code in thinking is thinking.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_right
from collections.abc import Sequence
from typing import Literal, cast

Kind = Literal["thinking", "call", "code", "prose"]
KINDS: tuple[Kind, ...] = ("thinking", "call", "code", "prose")
# Opening marker -> kind and closing marker; an empty one is the end of the answer.
MARKERS: dict[str, tuple[Kind, str]] = {
    "[THINK]": ("thinking", "[/THINK]"),  # Mistral
    "<|channel|>analysis": ("thinking", "<|end|>"),  # gpt-oss
    "<|channel>thought": ("thinking", "<channel|>"),  # Gemma 4
    "<|START_THINKING|>": ("thinking", "<|END_THINKING|>"),  # Cohere
    "<|inner_prefix|>": ("thinking", "<|inner_suffix|>"),  # Apertus
    "[TOOL_CALLS]": ("call", ""),  # Mistral
    "<|python_tag|>": ("call", ""),  # Llama 3
    "<|python_start|>": ("call", "<|python_end|>"),  # Llama 4
    "<|channel|>commentary to=": ("call", "<|call|>"),  # gpt-oss
    "<|start|>assistant to=": ("call", "<|call|>"),
    " to=functions.": ("call", "<|call|>"),
    "<｜tool▁calls▁begin｜>": ("call", "<｜tool▁calls▁end｜>"),  # DeepSeek
    "<|tool_calls_section_begin|>": ("call", "<|tool_calls_section_end|>"),  # Kimi
    "<|tool_call_start|>": ("call", "<|tool_call_end|>"),  # LFM
    "<|tool_call|>": ("call", "<|/tool_call|>"),  # Phi; Granite 3 closes none
    "<|tool_call>": ("call", "<tool_call|>"),  # Gemma 4
    "<start_function_call>": ("call", "<end_function_call>"),  # FunctionGemma
    "```tool_code": ("call", "```"),  # Gemma 3
    "<function=": ("call", "</function>"),
    "<|START_ACTION|>": ("call", "<|END_ACTION|>"),
    "<|tools_prefix|>": ("call", "<|tools_suffix|>"),
    "<|action_start|>": ("call", "<|action_end|>"),  # InternLM
}
# Tags that </name> closes: <think>, <seed:think>; <tool_call> of Qwen, GLM and others, <minimax:tool_call>.
TAGS = r"<(?P<thinking>[\w:]*(?:think(?:ing)?|thought|reasoning))>|<(?P<call>[\w:]*(?:tool_|function_)calls?|TOOLCALL)>"
# A fence of CommonMark: three or more backticks or tildes at a line's beginning, closed by as many or more.
FENCE = r"^ {0,3}(?P<code>`{3,}|~{3,})"
# The longest first: one may begin with another.
OPENING = "|".join([TAGS, *(re.escape(marker) for marker in sorted(MARKERS, key=len, reverse=True)), FENCE])
OPENS, OPENS_LAST = re.compile(OPENING, re.MULTILINE), re.compile(rf"(?:{OPENING})\s*\Z", re.MULTILINE)
# Llama 3 and others call a tool by JSON, or by Python in brackets, without a marker: it is the whole answer.
BARE_CALL = re.compile(r'\s*(\[?\s*\{\s*"(name|type)"\s*:\s*"|\[\w+\()')
PROMPT_TOKENS = 16  # at the end of a prompt, where its template may open the answer's thinking


def kinds_of(pieces: Sequence[str], prompt: str = "") -> list[Kind]:
    """Return the kind of each token of an answer.

    pieces: text of each token, special ones included; a marker may be spread over several. prompt: end of the prompt,
    which may leave a part open.
    """
    text, opened = "".join(pieces), OPENS_LAST.search(prompt)
    if opened is None and BARE_CALL.match(text):
        return ["call"] * len(pieces)
    kind: Kind = "prose"
    closing: re.Pattern[str] | None = None
    if opened is not None:
        kind, closing = opened_by(opened)
    begins, kinds, place = [0], [kind], 0
    while place < len(text):
        if kind == "prose":
            found = OPENS.search(text, place)
            if found is None:
                break
            kind, closing = opened_by(found)
            begin, place = found.span()
        else:
            found = closing and closing.search(text, place)
            if found is None:
                break
            kind, begin = "prose", found.end()
            place = begin
        begins.append(begin)
        kinds.append(kind)
    starts = itertools.accumulate(map(len, pieces[:-1]), initial=0)
    return [kinds[bisect_right(begins, start) - 1] for start, _ in zip(starts, pieces, strict=False)]


def opened_by(found: re.Match[str]) -> tuple[Kind, re.Pattern[str] | None]:
    """Return the kind of the part that a marker opens, and what closes it; None for the end of the answer."""
    if found.lastgroup is None:
        kind, closing = MARKERS[found[0].rstrip()]
        return kind, re.compile(re.escape(closing)) if closing else None
    opened = found[found.lastgroup]
    if found.lastgroup == "code":
        return "code", re.compile(rf"^ {{0,3}}{opened}{opened[0]}*(?!\w)", re.MULTILINE)  # an end token may follow
    return cast(Kind, found.lastgroup), re.compile(f"</{re.escape(opened)}>")
