"""Streamed answers of a llama.cpp server, as the client reads and `check` compares them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from servers import Request, Server

from draftsmith.eval.check.engine import ComparedPrompt, print_comparison
from draftsmith.eval.engines.llamacpp import LlamaCppClient, moved_states

# Two rounds of three drafted tokens: the first ends with 7, the second begins with 8. 7 ends inside of a character.
EVENTS = [([5], 0, 0), ([6], 3, 1), ([8], 6, 3), ([9], 6, 3), ([2], 6, 3)]
WHOLE = [5, 6, 7, 8, 9, 2]


def reply(request: Request) -> Any:
    """Answer as llama.cpp does: a token that ends inside of a character has no event of its own."""
    if not request.content:
        return {"build_info": "fake"}
    if request.path != "/completion":  # its own endpoint, which lies beside /v1
        return 404, {}, "File Not Found"
    if not request.body.get("stream"):
        return {"tokens": WHOLE}
    lines = []
    for number, (tokens, drafted, accepted) in enumerate(EVENTS):
        timings = {"prompt_ms": 1.0, "predicted_ms": 2.0, "draft_n": drafted, "draft_n_accepted": accepted}
        timings["predicted_n"] = number + 1 + (number > 1)
        lines.append(f"data: {json.dumps({'tokens': tokens, 'timings': timings})}\n\n")
    return "".join(lines)


@pytest.fixture
def client():
    with Server(reply) as server:
        yield LlamaCppClient(server.url, 6, num_drafted=3)


def test_tokens_that_are_not_streamed_are_asked_for_and_compared_by_sums(client, capsys):
    found = client.complete([1])
    assert (found.tokens, found.unsent, found.num_tokens) == ((5, 6, 8, 9, 2), 1, 6)
    assert (found.counts, found.drafted) == ((2, 2, 1, 0), 6)

    answer = client.answer(0, [1])
    assert answer.tokens == tuple(WHOLE) and not answer.by_place and (answer.drafted, answer.accepted) == (6, 3)
    ours = type(answer)(tuple(WHOLE), (2, 2, 1, 0), drafted=6)
    other = type(answer)(tuple(WHOLE), (3, 2, 1, 0), drafted=7)
    emoji, plain = ComparedPrompt("emoji", answer, ours), ComparedPrompt("plain", ours, ours)
    assert emoji.same_text and emoji.same_counts and not ComparedPrompt("emoji", answer, other).same_counts
    print_comparison("head", "llama.cpp", "float32", [emoji, plain], [])
    shown = " ".join(capsys.readouterr().out.split())
    assert "accepted tokens 6 6" in shown and "drafts 2 2" in shown and "without emoji: llama.cpp streams no" in shown
    assert "equal: text, drafts and accepted tokens of all 2 prompts, tau 2.000" in shown


def test_a_draft_reads_the_last_state_of_a_part_before_it():
    """Parts of a prompt as llama.cpp's server reads them: `n_batch`, and checkpoints of targets that need them."""
    assert moved_states(30, checkpoints=False) == [] and moved_states(4, checkpoints=True) == []
    assert moved_states(30, checkpoints=True) == [(25, 29)]
    assert moved_states(600, checkpoints=True) == [(83, 595), (595, 599)]
    assert moved_states(2100, checkpoints=False) == [(2047, 2099)]
