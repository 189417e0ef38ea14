"""Hidden states of a target that a vLLM server runs (`draftsmith launch vllm`).

vLLM reads every row as a prompt and writes its states to a spool (data/engines/vllm_connector.py). Reading finished
rows a second time was faster than keeping the states while they are generated, where vLLM verifies a dummy draft token
beside every token.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor

from draftsmith.data.engines.server import REPLY_BYTES, SHOWN_CHARS, Server, check_model
from draftsmith.data.ranks import place
from draftsmith.data.settings import FeatureDtype
from draftsmith.data.stages import ServerConfig
from draftsmith.data.store.spool import SpoolReader, row_name
from draftsmith.data.text.template import RowError
from draftsmith.modules.targets.proof import TOP
from draftsmith.modules.targets.readout import Readout
from draftsmith.modules.types import InputError

# How long a row may take after vLLM has read it, and how often it is asked for.
LATE_S, ATTEMPTS = 30.0, 3
# A server may be away for about an hour: attempts, and seconds between them.
RETRIES, MAX_WAIT_S = 720, 10.0
ROUNDING = 0.01  # of a log-probability, in nats

Stored = dict[str, Tensor]
# Log-probabilities of some tokens, among them the text's own, behind each token of a row but the last.
LogProbs = list[dict[int, float]]


def connector_options(
    layers: Sequence[int], num_layers: int, directory: Path, dtype: FeatureDtype
) -> dict[str, dict[str, Any]]:
    """Return the arguments by which vLLM hands out the states of these layers, as JSON values.

    layers: ascending, `targets.base.final_state` among them or not. num_layers: of the target.
    """
    # The connector norms the last state itself.
    shape = {"hf_config": {"eagle_aux_hidden_state_layer_ids": sorted({min(k, num_layers) for k in layers})}}
    return {
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": shape,
        },
        "kv_transfer_config": {
            "kv_connector": "HiddenStatesConnector",
            "kv_connector_module_path": "draftsmith.data.engines.vllm_connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {
                "directory": str(directory.absolute()),
                "feature_dtype": dtype,
                "layers": list(layers),
            },
        },
    }


class ServedStates(AbstractContextManager["ServedStates"]):
    """Client of a running vLLM server that has our connector. Rows are requested ahead of time and taken later.

    If the server restarts, requests without an answer are repeated.

    Attributes:
        about: vLLM's version, for the manifest.
        readout, teacher: norm of the last state, and its proof for the manifest (`prove_teacher`). Before it, states
            are as vLLM has them.
        asked: requests without a reply.
        url, model: address without /v1, and the model's name there.
        context: most tokens of a row, if the server says.
    """

    readout: Readout | None = None
    teacher: dict[str, Any] | None = None

    def __init__(self, url: str, owner: Path, concurrency: int = 256):
        """owner: output directory of the command. With the rank it names the folder of this reader, so that a resumed
        command deletes the files of the killed one."""
        server = ServerConfig(server=url, concurrency=concurrency)
        self._server = Server(server, "a vLLM server", root=True, max_wait_s=MAX_WAIT_S, retries=RETRIES)
        name = f"{owner.absolute()}/{place().rank}"
        self._folder = hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
        self._reader: SpoolReader | None = None
        self._layers: tuple[int, ...] = ()
        self._error: Exception | None = None
        self.asked, self._idle_s, self._idle_since = 0, 0.0, time.monotonic()
        self._replied: dict[str, float] = {}
        self._attempts: dict[str, int] = {}
        self.about = {"vllm": self._server.json("version", {"version": str})["version"]}
        self.url = self._server.url
        self.model, most = self._server.served_model()
        # It reads a row as a prompt, behind which it answers a token.
        self.context = most - 1 if most else None
        # Last, as nothing would close them after an error.
        self._slots = asyncio.Semaphore(concurrency)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="draftsmith-states", daemon=True)
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def idle_s(self) -> float:
        """Seconds without a request so far: the server waited for this reader."""
        return self._idle_s if self.asked else self._idle_s + time.monotonic() - self._idle_since

    def close(self) -> None:
        """End all requests and delete this reader's folder."""

        async def end() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._server.close()

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        if self._reader is not None:
            self._reader.close()

    def read(self, rows: Sequence[Sequence[int]]) -> Iterator[tuple[int, Stored]]:
        """Yield the numbers of rows [T], each with its encoded states, in their order. All are asked for at once."""
        for row in rows:
            self.ask(row)
        for number, row in enumerate(rows):
            yield number, self.take(row)

    def read_with_log_probs(self, row: Sequence[int]) -> tuple[Stored, LogProbs]:
        """Return the states of a row [T], unrounded, and the server's own log-probabilities of its tokens."""
        stored, reply = self._read_unrounded(row, prompt_logprobs=TOP)
        return stored, log_probs_of(reply, row)

    def read_unrounded(self, row: Sequence[int]) -> Tensor:
        """Return the states of a row [T] as the server computes them, [T, L*H]."""
        return self._read_unrounded(row)[0][""]

    def _read_unrounded(self, row: Sequence[int], **params: Any) -> tuple[Stored, dict[str, Any]]:
        """Return the states of a row, and the reply to a request with these parameters."""
        reader, name = self._opened(row), row_name(row)
        reader.expect(name)
        self._attempts[name] = 0
        reply = self._run(self._request(list(row), unrounded=True, **params))
        self._replied[name] = time.monotonic()
        return self.take(row), reply

    def log_probs(self, row: Sequence[int], top: int) -> LogProbs:
        """Return the server's log-probabilities of a row [T], with or without our connector: of the `top` likeliest
        tokens at each place, -1 for all, and of its own.

        Raises:
            InputError: the server refuses so many, or the row, or gives none.
        """
        body = {"model": self.model, "prompt": list(row), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": top}
        try:
            # The whole vocabulary at each place, if it is asked for.
            reply = self._run(self._server.ask("v1/completions", body, len(row) * REPLY_BYTES))
        except RowError as error:
            remedy = f"Serve with --max-logprobs {top}, and a --max-model-len above the longest text."
            raise InputError("server", f"{error} to prompt_logprobs {top}", "log-probabilities", remedy) from error
        check_model(reply, self.model)
        return log_probs_of(reply, row)

    def ask(self, row: Sequence[int]) -> None:
        """Ask for the states of a row [T], without waiting."""
        name = row_name(row)
        if self._opened(row).expect(name):
            self._attempts[name] = 0
            self._submit(name, row)

    def take(self, row: Sequence[int], while_waiting: Callable[[], None] = lambda: None) -> Stored:
        """Wait for a row that was asked for, and return its encoded states. while_waiting: called often; may raise.

        Raises:
            InputError: the server refuses the row, stays away, or writes no states.
        """
        name, reader = row_name(row), self._reader
        assert reader is not None, "ask first"
        pause = 0.001
        while not reader.arrived(name):
            if self._error is not None:
                raise self._error
            replied = self._replied.get(name)
            if replied is not None and time.monotonic() > replied + LATE_S:
                # The server was killed between its reply and the file, or its disk is full.
                if self._attempts[name] >= ATTEMPTS:
                    found = f"no states of a row in {ATTEMPTS} attempts (folder {self._folder})"
                    remedy = "Read the server's log, and see that this machine sees its directory."
                    raise InputError("server", found, "a file in the server's spool", remedy)
                self._submit(name, row)
            while_waiting()
            # A look lists the directory, which may be on a network.
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        self._replied.pop(name, None)
        self._attempts.pop(name, None)
        return reader.take(name)

    def _run(self, request: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
        return asyncio.run_coroutine_threadsafe(request, self._loop).result()

    def _opened(self, row: Sequence[int]) -> SpoolReader:
        """Return the reader of this client's folder; the first time, ask for the spool's directory."""
        if self._reader is not None:
            return self._reader
        reply = self._run(self._request(list(row[:1]), only_ask=True))["kv_transfer_params"]
        directory = Path(reply["directory"])
        if not directory.is_dir():
            found = f"{directory}, the server's spool, which this machine does not have"
            remedy = "Put it on a file system that both see under this path (launch vllm --states)."
            raise InputError("server", found, "a directory that both see", remedy)
        self._reader, self._layers = SpoolReader(directory, self._folder), tuple(reply["layers"])
        return self._reader

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers whose states lie side by side in a row, as of `connector_options`."""
        self._opened([0])
        return self._layers

    def _submit(self, name: str, row: Sequence[int]) -> None:
        self._replied.pop(name, None)
        self._attempts[name] += 1
        self._loop.call_soon_threadsafe(self._begin, name, list(row))

    def _begin(self, name: str, row: list[int]) -> None:
        """Start a request, in the thread of the requests."""
        if not self.asked:
            self._idle_s += time.monotonic() - self._idle_since
        self.asked += 1

        async def ask() -> None:
            try:
                async with self._slots:
                    await self._request(row)
                self._replied[name] = time.monotonic()
            except Exception as error:
                # Raised where a row is waited for.
                self._error = error
            finally:
                self.asked -= 1
                if not self.asked:
                    self._idle_since = time.monotonic()

        self._loop.create_task(ask())

    async def _request(
        self, row: list[int], only_ask: bool = False, unrounded: bool = False, **params: Any
    ) -> dict[str, Any]:
        """Let the server read a row, and return its reply. only_ask: no states are written. params: of the request.

        Raises:
            InputError: the server refuses it, has no connector, or is away for too long.
        """
        body = {"model": self.model, "prompt": row, "max_tokens": 1, "temperature": 0.0, **params}
        how = {"only_ask": only_ask, "unrounded": unrounded, **norm_words(self.readout)}
        body["kv_transfer_params"] = {"spool": self._folder, **how}
        try:
            reply = await self._server.ask("v1/completions", body)
        except RowError as error:
            remedy = "Serve with a --max-model-len above the longest row, or pass --max-length."
            raise InputError("server", f"{error} to a row of {len(row):,} tokens", "a reply", remedy) from error
        if not isinstance(reply, dict) or "layers" not in (reply.get("kv_transfer_params") or {}):
            found, remedy = f"{self.url} without our connector", "Start it with: draftsmith launch vllm."
            raise InputError("server", found, "one that hands out states", remedy)
        return reply


def log_probs_of(reply: Any, row: Sequence[int]) -> LogProbs:
    """Return the log-probabilities of a server's reply to a row.

    Raises:
        InputError: they cannot be read, or a token of the row is not among those of its place.
    """
    found: LogProbs = []
    try:
        for token, place in zip(row[1:], reply["choices"][0]["prompt_logprobs"][1:], strict=True):
            found.append({int(key): float(value["logprob"]) for key, value in place.items()})
            found[-1][token]
            if not all(number < ROUNDING for number in found[-1].values()):
                raise ValueError("NaN, or the logarithm of more than 1")
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        shown = f"at token {len(found) + 1} of {len(row)} by a reply {json.dumps(reply)[:SHOWN_CHARS]}"
        expected = "prompt_logprobs of every token, numbers by ids"
        raise InputError("server", f"none {shown}", expected, "Ask a vLLM server that serves --target.") from error
    return found


def norm_words(readout: Readout | None) -> dict[str, Any]:
    """Return how a request names the norm of the last state to the connector."""
    return {} if readout is None else {"norm": readout.norm, "eps": readout.eps}
