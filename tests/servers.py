"""HTTP servers on this machine: one that replies what a function says, and what stands for vLLM, its connector and the
model hub."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from worlds import run_models

from draftsmith.data.text.template import prompt_ids
from draftsmith.modules.decoding.loop import generate_one
from draftsmith.modules.drafters.method_names import parse_method
from draftsmith.modules.pretrained.checkpoint import load_tokenizer
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.types import SamplingParams


@dataclass(frozen=True)
class Request:
    """What a client asked. token: of its Authorization."""

    path: str
    content: bytes
    token: str

    @property
    def body(self) -> dict[str, Any]:
        """Return the JSON object that it sent; empty without one."""
        return json.loads(self.content or b"{}")


class Server:
    """Runs from `start`, or `with`, until `stop`; may be started again on its port.

    answer: what it replies to a request: an object as JSON, text or bytes, an iterator of bytes that are sent one by
        one, or (status, headers, any of these). None, and a ConnectionError, close the connection without a reply.
    """

    def __init__(self, answer: Callable[[Request], Any]):
        self.answer, self.port, self.running = answer, 0, False

    def __enter__(self) -> Any:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.running = True
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), _handler(self))
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Close it. Requests on connections that are still open get no reply."""
        self.running = False
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def do_POST(self) -> None:
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            with suppress(ConnectionError):
                content = self.read_body()
                reply = server.answer(Request(self.path, content, token)) if server.running else None
                if reply is not None:
                    self.send(reply)
                    return
            self.close_connection = True

        do_GET = do_HEAD = do_POST

        def read_body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                length = int(self.headers.get("Content-Length", 0))
                content = self.rfile.read(length)
                if len(content) < length:
                    raise ConnectionError("the client has left")
                return content
            content = b""
            while size := int(self.rfile.readline(), 16):
                content += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return content

        def send(self, reply: Any) -> None:
            status, headers, data = reply if isinstance(reply, tuple) else (200, {}, reply)
            if isinstance(data, Mapping | list):
                data = json.dumps(data)
            parts = [data.encode() if isinstance(data, str) else data] if isinstance(data, str | bytes) else data
            # Without a length the reply ends with the connection; one of another length than the data is broken off.
            known = isinstance(parts, list)
            headers = ({"Content-Length": str(len(parts[0]))} if known else {}) | headers
            self.close_connection |= not known or headers["Content-Length"] != str(len(parts[0]))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            for part in parts if self.command != "HEAD" else ():
                self.wfile.write(part)
                self.wfile.flush()

    return Handler


def completion(tokenizer: Any, prompt: list[int], ids: list[int], ends: Collection[int]) -> dict[str, Any]:
    """Return vLLM's reply to a prompt with these tokens."""
    choice = {"finish_reason": "stop" if ids[-1] in ends else "length", "token_ids": ids, "prompt_token_ids": prompt}
    choice |= {"text": tokenizer.decode(ids, skip_special_tokens=True)}
    return {"choices": [choice], "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}}


PLACES = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


class EngineLike(Server):
    """A server with vLLM's addresses, over a head of ours: chains of `length` tokens of a head of this kind, which it
    counts by itself. One request at a time.

    spoil: changes the tokens of an answer. more_requests: of somebody else, counted with each of ours. template: makes
    other tokens of messages. counts: it tells what it drafted.
    """

    def __init__(self, lm: Any, path: str, kind: str, head: Any, length: int = 3):
        super().__init__(self.reply)
        self.lm, self.path, self.kind, self.head, self.length = lm, path, kind, head, length
        self.drafts, self.ended, self.places = 0, 0, [0] * length
        self.spoil: Callable[[list[int]], list[int]] = list
        self.more_requests, self.returns_ids, self.counts = 0, True, True
        self.template: Callable[[list[int]], list[int]] = list

    def reply(self, request: Request) -> Any:
        if request.path == "/metrics":
            return self.metrics()
        if request.path == "/v1/models":
            return {"data": [{"id": "served", "max_model_len": 1024}]}
        if request.path == "/tokenize":
            return {"tokens": self.template(prompt_ids(load_tokenizer(self.path), request.body["messages"]))}
        return self.complete(request.body) if request.content else {"version": "0.0.1"}

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt, most = body["prompt"], body["max_tokens"]
        models = run_models(self.lm, **{self.kind: self.head}, capacity=1024)
        drafter = parse_method(f"{self.kind}:k={self.length}").build(models)
        made = generate_one(self.lm, drafter, prompt, SamplingParams(), most + self.length + 1, TorchSource(0))
        emitted = made.trace.prefill_emitted
        for step in made.trace.steps:
            if emitted < most:
                self.drafts += 1
                for place in range(step.num_accepted):
                    self.places[place] += 1
            emitted += step.num_emitted
        self.ended += 1 + self.more_requests
        ids = self.spoil(made.tokens[:most])
        reply = completion(load_tokenizer(self.path), prompt, ids, self.lm.info.eos_ids)
        if not self.returns_ids:
            del reply["choices"][0]["token_ids"]
        return {"model": body["model"], **reply}

    def metrics(self) -> str:
        labels = f'engine="0",model_name="{self.path}"'
        lines = [f'vllm:request_success_total{{finished_reason="stop",{labels}}} {float(self.ended)}']
        if self.counts:
            lines += [f"vllm:spec_decode_num_drafts_total{{{labels}}} {float(self.drafts)}"]
            lines += [f"vllm:spec_decode_num_drafts_created{{{labels}}} 1.79e+09"]
            lines += [f'{PLACES}{{{labels},position="{n}"}} {float(own)}' for n, own in enumerate(self.places)]
        return "\n".join(["# TYPE vllm:spec_decode_num_drafts_total counter", *lines, ""])


class Hub(Server):
    """A model hub that speaks the parts of the protocol that downloads need.

    repositories: id -> {revision: directory}; `main` is what is taken without one. tokens: id -> the token that may
    read it. fetched: every path that was.
    """

    def __init__(self) -> None:
        super().__init__(self.give)
        self.repositories: dict[str, dict[str, Path]] = {}
        self.tokens: dict[str, str] = {}
        self.gated: set[str] = set()
        self.fetched: list[str] = []

    def commit(self, name: str, revision: str) -> str:
        return hashlib.sha1(f"{name}@{self.repositories[name][revision]}".encode()).hexdigest()

    def give(self, request: Request) -> Any:
        """Reply to a download."""
        path = unquote(urlsplit(request.path).path)
        for name, revisions in self.repositories.items():
            about, files = f"/api/models/{name}/", f"/{name}/resolve/"
            if path.rstrip("/") != about.rstrip("/") and not path.startswith((about, files)):
                continue
            if name in self.gated:
                return 403, {"X-Error-Code": "GatedRepo"}, {}
            if self.tokens.get(name, request.token) != request.token:
                break  # a private repository is none to strangers
            rest = path.removeprefix(about if path.startswith(about) else files)
            wanted = rest.removeprefix("revision/").removeprefix("tree/").split("/")[0]
            commits = {self.commit(name, revision): revision for revision in revisions}
            revision = commits.get(wanted, wanted)
            if revision not in revisions:
                return 404, {"X-Error-Code": "RevisionNotFound"}, {}
            return self.files(name, revisions[revision], self.commit(name, revision), rest, path.startswith(about))
        return 401, {"X-Error-Code": "RepoNotFound"}, {}

    def files(self, name: str, root: Path, sha: str, rest: str, about: bool) -> Any:
        """Reply with a tree, what a repository holds, or a file."""
        names = {str(file.relative_to(root)): file for file in sorted(root.rglob("*")) if file.is_file()}
        if rest.startswith("tree/"):
            return [{"type": "file", "path": n, "size": f.stat().st_size, "oid": "0" * 40} for n, f in names.items()]
        if about:
            return {"id": name, "sha": sha, "siblings": [{"rfilename": n} for n in names]}
        file = root / rest.split("/", 1)[1]
        if not file.is_file():
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha}, b""
        content = file.read_bytes()
        self.fetched.append(str(file.relative_to(root)))
        return 200, {"X-Repo-Commit": sha, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}, content


def drip(part: bytes, pause: Callable[[], object]) -> Iterator[bytes]:
    """Yield the same bytes for ever."""
    while True:
        yield part
        pause()
