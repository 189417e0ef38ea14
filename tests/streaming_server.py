"""A server with vLLM's addresses that streams answers of known tokens at known times."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class StreamingServer(ThreadingHTTPServer):
    """`pieces` are the lengths of what it sends, `gap` seconds apart; the n-th token of an answer is the prompt's first
    one plus n.

    serial: it answers one request after the other. stall_s: before that one answer which is the `stalled`-th. spoil:
    request number -> what becomes of it: refuse, cut, error or html. ids: whether it sends token ids. counts: whether
    it has counters.
    """

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, pieces: tuple[int, ...] = (1, 3, 2), gap: float = 0.01):
        super().__init__(("127.0.0.1", 0), Handler)
        self.pieces, self.gap = pieces, gap
        self.serial, self.stall_s, self.stalled = False, 0.0, -1
        self.spoil: dict[int, str] = {}
        self.ids, self.counts = True, True
        self.bodies: list[dict[str, Any]] = []
        self.under_way, self.most_under_way = 0, 0
        self.drafts = self.accepted = 0
        self.lock, self.turn = threading.Lock(), threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: StreamingServer

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        server = self.server
        if self.path == "/v1/models":
            self.reply(json.dumps({"data": [{"id": "served"}]}).encode())
        elif self.path == "/version":
            self.reply(b'{"version": "0.0.1"}')
        elif server.counts:
            lines = [f'vllm:spec_decode_num_drafts_total{{engine="0"}} {float(server.drafts)}']
            lines += [f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {float(server.accepted)}']
            lines += ['vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 99.0']
            self.reply("\n".join([*lines, ""]).encode())
        else:
            self.reply(b"", 404)

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            number = len(server.bodies)
            server.bodies.append(body)
            server.under_way += 1
            server.most_under_way = max(server.most_under_way, server.under_way)
        try:
            if server.serial:
                with server.turn:
                    self.answer(number, body)
            else:
                self.answer(number, body)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the client has what it wants
        finally:
            with server.lock:
                server.under_way -= 1

    def answer(self, number: int, body: dict[str, Any]) -> None:
        server, how = self.server, self.server.spoil.get(number)
        if number == server.stalled:
            time.sleep(server.stall_s)
        if how == "refuse":
            return self.reply(b"too much", 429)
        self.send_response(200)
        self.end_headers()
        if how == "html":
            return self.send("<html>")
        said = 0
        for piece in server.pieces:
            time.sleep(server.gap)
            if how == "error":
                return self.send({"error": {"message": "out of memory"}})
            tokens = [body["prompt"][0] + said + n for n in range(piece)]
            choice: dict[str, Any] = {"index": 0, "text": "".join(f" {token}" for token in tokens)}
            self.send({"choices": [choice | ({"token_ids": tokens} if server.ids else {})]})
            said += piece
            if how == "cut":
                return None
        with server.lock:
            server.drafts += len(server.pieces) - 1
            server.accepted += said - len(server.pieces)
        self.wfile.write(b": a comment\n\n")
        self.send({"choices": [], "usage": {"completion_tokens": said}})
        return self.send("[DONE]")

    def send(self, event: Any) -> None:
        text = event if isinstance(event, str) else json.dumps(event)
        self.wfile.write(f"data: {text}\n\n".encode())
        self.wfile.flush()

    def reply(self, data: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
