"""Features of the target for a drafter's training: computed in the step, stored, or from a vLLM server.

`FeatureSource` computes those of batches that come without any. With `--server URL` a server sends them, and they
are dropped after use (`FeatureStream`).
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from draftsmith.data.console import log_note
from draftsmith.data.engines.vllm_states import ServedStates
from draftsmith.data.store import feature_codec
from draftsmith.data.store.datasets import collate_features
from draftsmith.data.store.feature_codec import decoded
from draftsmith.modules.attention import Documents, group_by_length
from draftsmith.modules.finite import NonFinite, first_broken
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.targets.proof import prove_reading
from draftsmith.modules.transfer import to_device
from draftsmith.modules.types import FeatureBatch
from draftsmith.train.data import SampleKey, Samples
from draftsmith.train.metrics import gather_rows, say_on_rank_zero

# Tokens that the target reads at once on a CPU. In bfloat16 four rows of 200 tokens take 0.64 of the time of one by
# one, in float32 0.92 (one thread, an Intel Xeon with AMX); more of them no less.
TOKENS_READ = 1024
# On a GPU: as fast as more, and the memory of a read stays small beside the head's.
TOKENS_READ_ON_GPU = 16_384
# Samples from which the features' standard deviation is measured.
STD_SAMPLES = 32
# Seconds between lines on what passes from a server and who waits.
NOTE_EVERY_S = 30.0
# Seconds that a step may wait for the server after a signal that is to end the run.
GRACE_S = 10.0


class FeatureSource:
    """Reader of a batch's features: stored or served ones decoded, or those that the target computes, in its dtype."""

    def __init__(
        self,
        target: CausalLM,
        aux_layers: tuple[int, ...] = (),
        stream: FeatureStream | None = None,
        teacher: dict[str, Any] | None = None,
    ):
        """aux_layers: the states to read (`DraftHead.aux_layers`). stream: where batches come from that have theirs.
        teacher: how its states were proved, for the manifest."""
        self.target, self.aux_layers, self.stream, self.teacher = target, aux_layers, stream, teacher

    def prove(self, item: dict[str, Tensor]) -> None:
        """Prove a sample's states, as the head is given them, against the target's own logits. fp8 is rounded too much
        for that: it was proved before it was.

        Raises:
            InputError: they give other distributions.
        """
        if "scale" in item:
            return
        size, stored = self.target.info.hidden_size, item.get("features")

        def states(texts: list[Tensor]) -> list[Tensor]:
            if stored is not None:
                return [stored[: len(text), -size:] for text in texts]
            lengths = [len(text) for text in texts]
            return list(self.compute(torch.cat(texts)[None], lengths)[0, :, -size:].split(lengths))

        source = "the target in this process" if stored is None else "stored features"
        proof = prove_reading(self.target, item["input_ids"], states, source)
        self.teacher = proof.as_json()
        say_on_rank_zero(str(proof))

    def read(self, data: FeatureBatch) -> tuple[FeatureBatch, Tensor | None]:
        """Return the batch with features [B, T, L*H], and the same features if they were computed here, else None."""
        if data.features is not None:
            # Stored features were checked when they were written.
            if data.scale is not None:
                data = dataclasses.replace(data, features=decoded(data.features, data.scale), scale=None)
            return data, None
        states = self.compute(data.input_ids, data.lengths or ())  # [B, T, L*H]
        return dataclasses.replace(data, features=states), states

    @torch.no_grad()
    def compute(self, input_ids: Tensor, lengths: Sequence[int] = ()) -> Tensor:
        """Compute states [B, T, L*H] of right-padded ids [B, T], those of padding arbitrary.

        lengths: of sequences that lie end to end in one row [1, N], without padding.
        """
        ids = input_ids.to(self.target.device)
        if len(lengths) > 1:
            states = self._read_together(ids, lengths)
        else:
            states = self.target.features(ids, aux_layers=self.aux_layers)
        return states.to(input_ids.device)

    def _read_together(self, ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """Read sequences of like lengths side by side, a limited number of tokens at a time: a long one pads none."""
        starts, states = [0, *itertools.accumulate(lengths)], ids.new_empty(0)
        most = TOKENS_READ if ids.device.type == "cpu" else TOKENS_READ_ON_GPU
        for group in group_by_length(lengths, most):
            documents = Documents.of([lengths[i] for i in group], ids.device)
            places = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in group])
            places = to_device(places, ids.device)
            padded = self.target.features(documents.pad(ids[:, places]), aux_layers=self.aux_layers)  # [D, L, L*H]
            if not len(states):
                states = padded.new_empty(1, len(ids[0]), padded.shape[-1])
            states[:, places] = documents.unpad(padded)
        return states


def feature_std(samples: Samples, source: FeatureSource) -> float:
    """Return the standard deviation of the features' elements over the first samples, the unit of noise."""
    count, first, second = 0, 0.0, 0.0
    keys = [(SampleKey(0, i),) for i in range(min(STD_SAMPLES, len(samples)))]
    for (key,) in keys if samples.stream is None else samples.stream.ahead(samples, keys):
        batch, computed = source.read(collate_features([samples.item(key.index, 0)]))
        if computed is not None and (place := first_broken(computed[0])) is not None:
            raise NonFinite("hidden states", "target", place).of([samples.name(key.index)])
        features = cast(Tensor, batch.features).double()  # [1, T, L*H]
        count, first = count + features.numel(), first + float(features.sum())
        second += float(features.square().sum())
    return max(second / count - (first / count) ** 2, 0.0) ** 0.5


class FeatureStream:
    """Features of one rank's samples from a vLLM server, in the order of its steps.

    The samples of the coming steps are known, so their rows are requested ahead of time: as many as fit a window of
    bytes. A slow trainer requests less, so that the server waits; a slow server lets the trainer wait. A resumed
    trainer requests its rows again, and missing rows are requested again from a server that has restarted.
    """

    def __init__(self, server: ServedStates, window: float, token_bytes: int):
        """window: most bytes that are asked for and not yet used. token_bytes: of features."""
        self.server, self._window, self._token_bytes = server, window, token_bytes
        self._open_bytes = 0
        # Since the last log: bytes used, seconds without a row to read, and the server's idle time before.
        self._used, self._waited, self._since, self._idle = 0, 0.0, time.monotonic(), server.idle_s
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
                self.server.ask(samples.text(key.index).tolist())
            self._open_bytes += size
            waiting.append(batch)
        yield from waiting

    def item(self, input_ids: Tensor) -> dict[str, Tensor]:
        """Return the features (`feature_codec.as_item`) of a row with token ids [T], once they are here."""
        began = time.monotonic()
        stored = self.server.take(input_ids.tolist(), self._check_signal)
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

        features_mb_s: features used. features_mb_s_needed: rate that the trainer would
        use if the server never kept it waiting.
        features_ahead_mb: asked for and not used. server_idle: share of the time in which the server had nothing to do.
        """
        now, idle = time.monotonic(), self.server.idle_s
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
