"""Streamed answers of a llama.cpp server, as the client reads and `check` compares them."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from draftsmith.eval.check.engine import ComparedPrompt, GateClient, print_comparison

# Two rounds of three drafted tokens: the first ends with 7, the second begins with 8. 7 ends inside of a character.
EVENTS = [([5], 0, 0), ([6], 3, 1), ([8], 6, 3), ([9], 6, 3), ([2], 6, 3)]
WHOLE = [5, 6, 7, 8, 9, 2]


class Server(BaseHTTPRequestHandler):
    """Answers as llama.cpp does: a token that ends inside of a character has no event of its own."""

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.reply(json.dumps({"build_info": "fake"}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not body.get("stream"):
            return self.reply(json.dumps({"tokens": WHOLE}))
        lines = []
        for number, (tokens, drafted, accepted) in enumerate(EVENTS):
            timings = {"prompt_ms": 1.0, "predicted_ms": 2.0, "draft_n": drafted, "draft_n_accepted": accepted}
            timings["predicted_n"] = number + 1 + (number > 1)
            lines.append(f"data: {json.dumps({'tokens': tokens, 'timings': timings})}\n\n")
        return self.reply("".join(lines))

    def reply(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def client():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield GateClient(f"http://127.0.0.1:{server.server_port}", 6, 3)
    server.shutdown()


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
    assert "equal: text, drafts and accepted tokens of all 2 prompts, 2.500 tokens a round" in shown
