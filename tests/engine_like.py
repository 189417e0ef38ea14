"""A server with vLLM's addresses, over a head of ours: what it drafts is counted here by itself."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from run_models import run_models

from draftsmith.data.text.template import prompt_ids
from draftsmith.modules.decoding.loop import generate_one
from draftsmith.modules.drafters.methods import parse_method
from draftsmith.modules.pretrained.tokenizers import load_tokenizer
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.types import SamplingParams

PLACES = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


class EngineLike(ThreadingHTTPServer):
    """One request at a time, chains of `length` tokens of a head of this kind.

    spoil: changes the tokens of an answer. more_requests: of somebody else, counted with each of ours. template: makes
    other tokens of messages. counts: it tells what it drafted.
    """

    daemon_threads = True

    def __init__(self, lm: Any, path: str, kind: str, head: Any, length: int = 3):
        super().__init__(("127.0.0.1", 0), Handler)
        self.lm, self.path, self.kind, self.head, self.length = lm, path, kind, head, length
        self.drafts, self.ended, self.places = 0, 0, [0] * length
        self.spoil: Callable[[list[int]], list[int]] = list
        self.more_requests, self.returns_ids, self.counts = 0, True, True
        self.template: Callable[[list[int]], list[int]] = list
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

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
        ended = ids[-1] in self.lm.info.eos_ids
        choice: dict[str, Any] = {"finish_reason": "stop" if ended else "length"}
        text = load_tokenizer(self.path).decode(ids, skip_special_tokens=True)
        choice |= {"text": text, "prompt_token_ids": prompt}
        choice |= {"token_ids": ids} if self.returns_ids else {}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        return {"model": body["model"], "choices": [choice], "usage": usage}

    def metrics(self) -> str:
        labels = f'engine="0",model_name="{self.path}"'
        lines = [f'vllm:request_success_total{{finished_reason="stop",{labels}}} {float(self.ended)}']
        if self.counts:
            lines += [f"vllm:spec_decode_num_drafts_total{{{labels}}} {float(self.drafts)}"]
            lines += [f"vllm:spec_decode_num_drafts_created{{{labels}}} 1.79e+09"]
            lines += [f'{PLACES}{{{labels},position="{n}"}} {float(own)}' for n, own in enumerate(self.places)]
        return "\n".join(["# TYPE vllm:spec_decode_num_drafts_total counter", *lines, ""])


class Handler(BaseHTTPRequestHandler):
    server: EngineLike

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self.reply(self.server.metrics().encode())
        elif self.path == "/v1/models":
            self.reply(json.dumps({"data": [{"id": "served", "max_model_len": 1024}]}).encode())
        else:
            self.reply(json.dumps({"version": "0.0.1"}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            ids = prompt_ids(load_tokenizer(self.server.path), body["messages"])
            found: dict[str, Any] = {"tokens": self.server.template(ids)}
        else:
            found = self.server.complete(body)
        self.reply(json.dumps(found).encode())

    def reply(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
