"""A server whose replies are not those of vLLM is refused in one line."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

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


class Pages(ThreadingHTTPServer):
    """Answers each address with an object or a text; None closes the connection."""

    daemon_threads = True

    def __init__(self, changed: dict[str, Any]):
        super().__init__(("127.0.0.1", 0), Handler)
        self.pages = GOOD | changed
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    server: Pages

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        page = self.server.pages[self.path]
        if page is not None:
            text = page if isinstance(page, str) else json.dumps(page)
            self.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n" + text.encode())

    do_POST = do_GET


@pytest.fixture
def client() -> Iterator[Callable[[dict[str, Any]], VllmClient]]:
    servers = []

    def start(changed: dict[str, Any]) -> VllmClient:
        servers.append(Pages(changed))
        return VllmClient(f"http://127.0.0.1:{servers[-1].server_port}", "embedded:target", 8)

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def ask(client: VllmClient) -> tuple[Any, ...]:
    counts = client.counts()
    return client.version, client.length, client.num_drafted, counts.drafts, counts.finished, client.templated("Hi")


def test_a_good_server_is_read(client):
    assert ask(client({})) == ("1.0", 64, 1, (3, 2), 7, [1, 2])


@pytest.mark.parametrize(
    ("page", "content", "said"),
    [
        ("/v1/models", {"data": [{"id": "m", "max_model_len": "long"}]}, "max_model_len: \"long\""),
        ("/v1/models", {"data": []}, "without a model"),
        ("/v1/models", "[" * 100_000, "v1/models: "),
        ("/metrics", "vllm:request_success_total{} 1.0", "without vllm:spec_decode"),
        ("/tokenize", {"tokens": ["a"]}, r"tokens\[0\]"),
        ("/tokenize", None, "RemoteProtocolError"),
    ],
)  # fmt: skip
def test_what_is_no_page_of_vllms_is_one_line(client, page, content, said):
    with pytest.raises(InputError, match=f"^server: found .*{said.replace('+', '.')}"):
        ask(client({page: content}))


def test_an_address_with_a_password_is_refused_without_it():
    with pytest.raises(InputError, match="no user, password or query") as error:
        VllmClient("http://user:secret@127.0.0.1:9", "embedded:target", 8)
    assert "secret" not in str(error.value)
