"""`train NAME --features vllm`: features come from a vLLM server while the head is trained, and are dropped after use.

The samples of the coming steps are known, so their rows are requested ahead of time: as many as fit a window of bytes.
A slow trainer requests less, so that the server waits; a slow server lets the trainer wait. Nothing else is stored. A
resumed trainer requests its rows again, and missing rows are requested again from a server that has restarted.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from draftsmith.data.console import log_note
from draftsmith.data.engines.vllm_states import ServedStates
from draftsmith.data.store import feature_codec
from draftsmith.train.data_module import SampleKey, Samples
from draftsmith.train.metrics import gather_rows, say_on_rank_zero

# Seconds between lines on what passes and who waits.
NOTE_EVERY_S = 30.0
# Seconds that a step may wait for the server after a signal that is to end the run.
GRACE_S = 10.0


class FeatureStream:
    """Features of one rank's samples, in the order of its steps."""

    def __init__(self, source: ServedStates, window: float, token_bytes: int):
        """window: most bytes that are asked for and not yet used. token_bytes: of features."""
        self._source, self._window, self._token_bytes = source, window, token_bytes
        self._open_bytes = 0
        # Since the last log: bytes used, seconds without a row to read, and the server's idle time before.
        self._used, self._waited, self._since, self._idle = 0, 0.0, time.monotonic(), source.idle_s
        self._noted = -NOTE_EVERY_S
        # The number of a signal that is to end the run, 0 before.
        self.signal_received: Callable[[], int] = lambda: 0
        self._signal_since = 0.0

    def ahead(self, samples: Samples, keys: Iterable[tuple[SampleKey, ...]]) -> Iterator[tuple[SampleKey, ...]]:
        """Yield the keys of micro-batches, each after its rows and as many later ones as fit are asked for."""
        waiting: deque[tuple[SampleKey, ...]] = deque()
        for batch in keys:
            size = sum(int(samples.lengths[key.index]) for key in batch) * self._token_bytes
            while waiting and self._open_bytes + size > self._window:
                yield waiting.popleft()
            for key in batch:
                self._source.ask(samples.text(key.index).tolist())
            self._open_bytes += size
            waiting.append(batch)
        yield from waiting

    def item(self, input_ids: Tensor) -> dict[str, Tensor]:
        """Return the features (`feature_codec.as_item`) of a row with token ids [T], once they are here."""
        began = time.monotonic()
        stored = self._source.take(input_ids.tolist(), self._check_signal)
        self._waited += time.monotonic() - began
        size = len(input_ids) * self._token_bytes
        self._open_bytes -= size
        self._used += size
        return feature_codec.as_item(stored)

    def _check_signal(self) -> None:
        """End the run after a signal, if the server lets the running step wait: the last checkpoint is what is left.

        Raises:
            SystemExit: as after a signal.
        """
        number = self.signal_received()
        if not number:
            return
        self._signal_since = self._signal_since or time.monotonic()
        if time.monotonic() - self._signal_since > GRACE_S:
            log_note("the server sends no states for the running step: it is given up. Continue by the same command")
            raise SystemExit(128 + number)

    def costs(self, device: torch.device) -> dict[str, float]:
        """Return the stream's numbers since the last call, of all ranks; every rank must call it.

        features_mb_s: features used. features_mb_s_needed: those that the steps would use without waiting.
        features_ahead_mb: asked for and not used. server_idle: share of the time in which the server had nothing to do.
        """
        now, idle = time.monotonic(), self._source.idle_s
        passed = max(now - self._since, 1e-9)
        worked = max(passed - self._waited, 1e-9)
        numbers = [self._used / passed, self._used / worked, self._open_bytes, (idle - self._idle) / passed]
        numbers.append(self._waited / passed)
        self._used, self._waited, self._since, self._idle = 0, 0.0, now, idle
        rows = gather_rows(torch.tensor([numbers], dtype=torch.float64, device=device))  # [ranks, 5]
        rate, needed, ahead = (rows[:, :3].sum(0) / 1e6).tolist()
        # The server has work as long as one rank waits for it.
        server_idle, waited = float(rows[:, 3].min()), float(rows[:, 4].mean())
        if now - self._noted > NOTE_EVERY_S:
            self._noted = now
            waits = f"the head waits {waited:.0%} of the time, the server {server_idle:.0%}"
            say_on_rank_zero(f"features: {rate:,.1f} MB/s, {needed:,.1f} needed; {waits}")
        return {
            "features_mb_s": rate,
            "features_mb_s_needed": needed,
            "features_ahead_mb": ahead,
            "server_idle": server_idle,
        }
