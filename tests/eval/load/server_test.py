"""The client that loads a server, against one whose times and tokens are known."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
from streaming_server import StreamingServer

from draftsmith.data.text.turns import AnswerSettings
from draftsmith.eval.load.requests import Block, Load, Plan
from draftsmith.eval.load.server import LoadedServer
from draftsmith.eval.load.summary import Goals, summarise
from draftsmith.modules.types import InputError, SamplingParams

PROMPTS = [[10, 11], [20], [30, 31, 32]]


@pytest.fixture
def server() -> Iterator[StreamingServer]:
    found = StreamingServer()
    yield found
    found.shutdown()
    found.server_close()


def loaded(server: StreamingServer, models: dict[str, str], dialect: str = "vllm") -> LoadedServer:
    settings = AnswerSettings(models["target"], SamplingParams(), 6, True, 0)
    return LoadedServer(f"{server.url}/v1", settings, PROMPTS, dialect)  # type: ignore[arg-type]


def run(server: StreamingServer, models: dict[str, str], load: Load, count: int = 9, warmup: int = 3, **more) -> Block:
    return loaded(server, models, **more).block(load.arrivals(0), Plan([0, 1, 2], warmup, count))


def test_answers_times_and_counts_of_a_closed_loop(server, models):
    block = run(server, models, Load("closed", 2))
    assert [request.prompt for request in block.requests] == [0, 1, 2] * 3
    for request in block.requests:
        first = PROMPTS[request.prompt][0]
        assert request.token_ids == list(range(first, first + 6)) and request.counts == [1, 3, 2]
        # A busy client reads late, so that of the gaps nothing is certain.
        assert request.first_token >= 0.01 and request.latency >= 0.03 and len(request.gaps) > 0
        assert request.intended <= request.started <= request.times[0] and request.error is None
    assert server.most_under_way == 2
    row = summarise("spec", Load("closed", 2), [block], Goals(), 0)
    assert row["round_tokens"] == pytest.approx(1 + 3 / 2)
    # Two users, at most 6 tokens every 0.03 seconds each.
    assert 0 < row["tokens_per_s"] < 400
    assert row["tokens_per_s"] == pytest.approx(row["window_tokens_per_s"], rel=0.5)
    body = server.bodies[0]
    assert body["stream"] and body["stream_options"] == {"include_usage": True}
    assert body["return_token_ids"] and body["ignore_eos"] and body["max_tokens"] == 6 and body["model"] == "served"


def test_a_server_of_the_plain_protocol(server, models):
    """No token ids, no counters: text, and `usage` says how many tokens it was."""
    server.ids = server.counts = False
    block = run(server, models, Load("closed", 1), dialect="openai")
    assert not {"top_k", "return_token_ids", "ignore_eos", "repetition_penalty"} & server.bodies[0].keys()
    for request in block.requests:
        assert request.token_ids == [] and request.counts == [2, 2, 2] and request.tokens == 6
        first = PROMPTS[request.prompt][0]
        assert request.text == "".join(f" {first + n}" for n in range(6))
    assert summarise("x", Load("closed", 1), [block], Goals(), 0)["round_tokens"] is None


def test_an_open_loop_does_not_wait_for_answers(server, models):
    server.gap = 0.1
    block = run(server, models, Load("open", 60.0), count=30, warmup=0)
    late = [request.started - request.intended for request in block.requests]
    assert np.median(late) < 0.05 and server.most_under_way > 8  # 18 on average


def test_a_stall_is_seen_by_all_who_were_to_begin_in_it(server, models):
    """The server answers in turn, and the tenth answer takes 0.8 s: those behind it wait from their own start on."""
    server.pieces, server.gap, server.serial, server.stall_s, server.stalled = (1,), 0.001, True, 0.8, 10
    block = run(server, models, Load("open", 50.0), count=60, warmup=0)
    waits = [request.first_token for request in block.requests]
    assert sum(wait > 0.3 for wait in waits) > 15
    assert summarise("x", Load("open", 50.0), [block], Goals(), 0)["ttft_p95"] > 0.6


def test_a_late_client_does_not_hide_it(server, models, monkeypatch):
    """The client itself hangs for 0.4 s with 60 requests a second: what was to begin then began late, and says so."""
    true, asked = LoadedServer.body, []

    def hangs(self, request):
        asked.append(request)
        if len(asked) == 10:
            time.sleep(0.4)
        return true(self, request)

    monkeypatch.setattr(LoadedServer, "body", hangs)
    block = run(server, models, Load("open", 60.0), count=40, warmup=0)
    late = [request for request in block.requests if request.started - request.intended > 0.1]
    assert len(late) > 8 and all(request.first_token > 0.1 for request in late)


def test_requests_that_fail_say_why_and_lose_nobody_else(server, models):
    server.spoil = {3: "refuse", 4: "cut", 5: "error", 6: "html"}
    block = run(server, models, Load("closed", 1))
    errors = [request.error for request in block.requests]
    assert errors[4:] == [None] * 5
    for said, error in zip(("status 429, too much", "", "out of memory", "not JSON but"), errors[:4], strict=True):
        assert error is not None and said in error
    row = summarise("x", Load("closed", 1), [block], Goals(), 0)
    assert (row["requests"], row["failed"]) == (5, 4)


def test_no_server_there(models, server):
    gone = StreamingServer()
    gone.shutdown()
    gone.server_close()
    with pytest.raises(InputError) as told:
        loaded(gone, models)
    assert told.value.field == "server" and gone.url in str(told.value)
