"""A server whose replies are not those of vLLM is refused in one line."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from servers import Server, drip

from draftsmith.data.engines import server as http
from draftsmith.data.stages import ServerConfig
from draftsmith.eval.engines.vllm import VllmClient
from draftsmith.modules.types import InputError

PLACES = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
GOOD: dict[str, Any] = {
    "/v1/models": {"data": [{"id": "served", "max_model_len": 64}]},
    "/version": {"version": "1.0"},
    "/metrics": f'vllm:spec_decode_num_drafts_total{{engine="0"}} 3.0\n{PLACES}{{position="0"}} 2.0\n'
    'vllm:request_success_total{engine="0",finished_reason="stop"} 7.0\n',
    "/tokenize": {"tokens": [1, 2]},
}


@pytest.fixture
def client() -> Iterator[Callable[[dict[str, Any]], VllmClient]]:
    """Clients of servers that answer an address with an object or a text; None closes the connection."""
    servers = []

    def start(changed: dict[str, Any]) -> VllmClient:
        pages = GOOD | changed
        servers.append(Server(lambda request: pages[request.path]))
        servers[-1].start()
        return VllmClient(servers[-1].url, "embedded:target", 8)

    yield start
    for server in servers:
        server.stop()


def ask(client: VllmClient) -> tuple[Any, ...]:
    counts = client.counts()
    by_place = counts.drafts, *counts.by_place
    return client.version, client.length, client.num_drafted, by_place, counts.finished, client.templated("Hi")


def test_a_good_server_is_read(client):
    assert ask(client({})) == ("1.0", 64, 1, (3, 2), 7, [1, 2])


@pytest.mark.parametrize(
    ("page", "content", "said"),
    [
        ("/v1/models", {"data": [{"id": "m", "max_model_len": "long"}]}, "max_model_len: \"long\""),
        ("/v1/models", {"data": []}, "without a model"),
        ("/v1/models", "[" * 100_000, "v1/models: "),
        ("/metrics", "vllm:request_success_total{} 1.0", "without vllm:spec_decode"),
        ("/metrics", 'vllm:request_success_total{} NaN', "request_success_total{} NaN, expected counts"),
        ("/metrics", 'vllm:spec_decode_num_drafts_total{} +Inf', "+Inf, expected counts"),
        ("/metrics", f'{PLACES}{{position="{"1" * 5000}"}} 1.0', "expected counts"),
        ("/tokenize", {"tokens": ["a"]}, r"tokens\[0\]"),
        ("/tokenize", None, "RemoteProtocolError"),
    ],
)  # fmt: skip
def test_what_is_no_page_of_vllms_is_one_line(client, page, content, said):
    with pytest.raises(InputError, match=f"^server: found .*{said.replace('+', '.')}"):
        ask(client({page: content}))


ENDLESS = {
    "pings": (lambda: drip(b": ping\n\n", lambda: time.sleep(0.02)), "no whole answer in 0.3 s"),
    "one line without end": (lambda: drip(b"data: {" + bytes(2**16), lambda: None), "more than 1,048,576 bytes"),
    "events without end": (lambda: drip(event({"token_ids": [1]}), lambda: None), "more than 1,048,576 bytes"),
    "words for ids": (lambda: event({"token_ids": "1"}), "token_ids"),
    "no JSON": (lambda: b"data: {\xff\n\n", "JSONDecodeError"),
}  # fmt: skip


def event(choice: dict[str, Any]) -> bytes:
    return f"data: {json.dumps({'choices': [choice]})}\n\n".encode()


@pytest.mark.parametrize("kind", ENDLESS)
def test_what_a_server_streams_without_end_is_refused(client, kind, monkeypatch):
    monkeypatch.setattr(http.within, "__defaults__", (2**20,))
    content, said = ENDLESS[kind]
    asked = client({"/v1/completions": content()})
    asked._server.config = ServerConfig(timeout_s=0.3 if kind == "pings" else 20.0)
    with pytest.raises(InputError, match=f"^server: found .*{said}"):
        asked.complete([1, 2])


def test_an_address_with_a_password_is_refused_without_it():
    with pytest.raises(InputError, match="no user, password or query") as error:
        VllmClient("http://user:secret@127.0.0.1:9", "embedded:target", 8)
    assert "secret" not in str(error.value)
