"""Features of the target for a drafter's training: computed in the step, stored, or from a vLLM server.

`FeatureSource` computes those of batches that come without any. `--features cache` stores them when they are first
computed (`FeatureCache`); with `--features vllm` a server sends them and they are dropped after use (`FeatureStream`).
"""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.data.console import log_note
from draftsmith.data.engines.vllm_states import ServedStates
from draftsmith.data.store import feature_codec
from draftsmith.data.store.feature_codec import FeatureDtype, FeatureFiles, decoded, rounded
from draftsmith.data.store.spool import row_name
from draftsmith.modules.attention import Documents
from draftsmith.modules.finite import NonFinite, first_broken
from draftsmith.modules.pretrained.files import CannotWrite, is_temporary, make_directory, write_json, write_tensors
from draftsmith.modules.pretrained.provenance import changes
from draftsmith.modules.pretrained.reading import read_object
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import FeatureBatch, InputError
from draftsmith.train.data import SampleKey, Samples
from draftsmith.train.metrics import gather_rows, say_on_rank_zero

# Tokens that the target reads at once on a CPU. In bfloat16 four rows of 200 tokens take 0.64 of the time of one by
# one, in float32 0.92 (one thread, an Intel Xeon with AMX); more of them no less.
TOKENS_READ = 1024
# Samples from which the features' standard deviation is measured.
STD_SAMPLES = 32
# Most rows from which the size of a feature cache is estimated: some seconds.
COUNTED_ROWS = 20_000
ABOUT = "cache.json"
# In memory twice at most, while one shard is written and the next collected. A killed run computes one again.
SHARD_BYTES = 256 * 2**20
# Seconds between two listings of the cache's directory for rows that other ranks have written.
LOOK_EVERY_S = 1.0
LEFTOVER_S = 3600.0
# Seconds between lines on what passes from a server and who waits.
NOTE_EVERY_S = 30.0
# Seconds that a step may wait for the server after a signal that is to end the run.
GRACE_S = 10.0


class FeatureSource:
    """Reader of a batch's features: stored ones decoded, or the target's, in its dtype or as a cache stores them."""

    def __init__(
        self,
        target: CausalLM,
        capture: tuple[int, ...] = (),
        cache: FeatureCache | None = None,
        stream: FeatureStream | None = None,
    ):
        """capture: the states to read (`DraftHead.capture`). stream: where batches come from that have theirs."""
        self.target, self.capture, self.cache, self.stream = target, capture, cache, stream

    @property
    def stored(self) -> Callable[[Tensor], dict[str, Tensor]] | None:
        """Function from a row's token ids [T] to its stored features, if there are any."""
        keeper = self.cache or self.stream
        return None if keeper is None else keeper.item

    def read(self, data: FeatureBatch) -> tuple[FeatureBatch, Tensor | None]:
        """Return the batch with features [B, T, L*H], and the same features if they were computed here, else None."""
        if data.features is not None:
            # Stored features were checked when they were written.
            if data.scale is not None:
                data = dataclasses.replace(data, features=decoded(data.features, data.scale), scale=None)
            return data, None
        if data.lengths is None:
            assert data.attention_mask is not None
            # Only a cache needs the lengths, for which a device is waited for.
            lengths = [] if self.cache is None else data.attention_mask.sum(-1).tolist()
            states = self.compute(data.input_ids, lengths)  # [B, T, L*H]
        else:
            # The target reads documents side by side, padded; everything else has them end to end.
            documents = Documents.of(data.lengths, data.input_ids.device)
            states = self.compute(documents.side_by_side(data.input_ids), documents.lengths)  # [D, L, L*H]
            states = documents.end_to_end(states)  # [1, N, L*H]
        return dataclasses.replace(data, features=states), states

    @torch.no_grad()
    def compute(self, input_ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """Compute states [B, T, L*H] of right-padded ids [B, T]; those of padding are arbitrary.

        lengths: tokens of each row, which a cache needs. With a cache the states are written to it, and rounded as it
        stores them.
        """
        target, capture, ids = self.target, self.capture, input_ids.to(self.target.device)
        if lengths and ids.device.type == "cpu":
            features = self._read_by_length(ids, lengths)
        else:
            features = target.features(ids, capture=capture)
        features = features.to(input_ids.device)
        if self.cache is None:
            return features
        stored = torch.zeros_like(features, dtype=torch.bfloat16)
        for ids, length, row, kept in zip(input_ids.cpu(), lengths, features, stored, strict=True):
            kept[:length] = self.cache.put(ids[:length], row[:length])
        return stored

    def _read_by_length(self, ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """Read rows of similar length together, TOKENS_READ at a time: a CPU would compute what padding there is."""
        features = torch.zeros(0)
        order, begun = sorted(range(len(lengths)), key=lengths.__getitem__), 0
        while begun < len(order):
            # The last row of a part is its longest.
            end = begun + 1
            while end < len(order) and (end + 1 - begun) * lengths[order[end]] <= TOKENS_READ:
                end += 1
            rows, width = order[begun:end], lengths[order[end - 1]]
            part = self.target.features(ids[rows, :width], capture=self.capture)
            if not begun:
                features = part.new_zeros(*ids.shape, part.shape[-1])
            features[rows, :width] = part
            begun = end
        return features


def feature_std(samples: Samples, source: FeatureSource) -> float:
    """Return the standard deviation of the features' elements over the first samples, the unit of noise.

    What a cache already holds is not read, so that nothing depends on it, but rounded as it would be stored.
    """
    stored: FeatureDtype | None = None if source.cache is None else source.cache.dtype
    count, first, second = 0, 0.0, 0.0
    keys = [(SampleKey(0, i),) for i in range(min(STD_SAMPLES, len(samples)))]
    for (key,) in keys if samples.stream is None else samples.stream.ahead(samples, keys):
        item: Mapping[str, Tensor] = samples.item(key.index, 0)
        features = None if stored or "features" not in item else decoded(item["features"], item.get("scale"))
        if features is None:
            ids = item["input_ids"][None].to(source.target.device)
            features = source.target.features(ids, capture=source.capture)[0]  # [T, L*H]
            place = first_broken(features)
            if place is not None:
                raise NonFinite("hidden states", "target", place).of([samples.name(key.index)])
            features = rounded(features, stored) if stored else features
        features = features.double()
        count, first = count + features.numel(), first + float(features.sum())
        second += float(features.square().sum())
    return max(second / count - (first / count) ** 2, 0.0) ** 0.5


class FeatureCache:
    """A directory of safetensors shards that only grows; each shard is complete or absent.

    A row is named by a hash of its token ids, because features depend on these and the target alone: the order of
    samples, the number of ranks, splitting, packing and the dataset do not matter. Ranks and runs may share a
    directory. Computed features are rounded as stored ones are, so that training sees the same.

    shard_of: row name -> file, of the rows on disk that this process has seen.
    """

    def __init__(self, directory: Path, identity: Mapping[str, Any], dtype: FeatureDtype, model_dtype: str):
        """identity: the target's. model_dtype: in which it computes.

        Raises:
            InputError: the directory holds features of another target or dtype, or is something else.
        """
        self._directory, self.dtype = Path(directory), dtype
        self._begin({"kind": "feature-cache", "target": dict(identity), "dtype": dtype, "model_dtype": model_dtype})
        self._shards: set[str] = set()
        self.shard_of: dict[str, str] = {}
        self._files = FeatureFiles(self._directory)
        # Encoded rows, and the bytes of those that no shard is being written of.
        self._unwritten: dict[str, dict[str, Tensor]] = {}
        self._new_bytes = 0
        self._writer: ThreadPoolExecutor | None = None
        self._writing: Future[tuple[str, list[str]]] | None = None
        self._full = False
        self._looked = -LOOK_EVERY_S
        self._look()

    @property
    def num_rows(self) -> int:
        """Rows that this process has seen."""
        return len(self.shard_of) + len(self._unwritten)

    def missing_tokens(self, samples: Sequence[Samples]) -> int:
        """Estimate the tokens of the samples that are not stored yet; a row that occurs twice is stored once."""
        # Of many rows some are read: the other ranks wait meanwhile.
        apart = -(-sum(map(len, samples)) // COUNTED_ROWS)
        chosen = [(part, i) for part in samples for i in range(0, len(part), apart)]
        lengths = {row_name(ids): len(ids) for ids in (part.text(i) for part, i in chosen)}
        missing = sum(length for name, length in lengths.items() if name not in self.shard_of)
        share = sum(int(part.lengths[i]) for part, i in chosen) / sum(int(part.lengths.sum()) for part in samples)
        return round(missing / share)

    def item(self, input_ids: Tensor) -> dict[str, Tensor]:
        """Return the stored features (`feature_codec.as_item`) of a row with token ids [T], if there are any."""
        name = row_name(input_ids)
        stored = self._unwritten.get(name)
        if stored is None:
            if name not in self.shard_of:
                self._look()
            if name not in self.shard_of:
                return {}
            stored = self._files.read(self.shard_of[name], name, f"row {name}")
        return feature_codec.as_item(stored)

    def put(self, input_ids: Tensor, features: Tensor) -> Tensor:
        """Store the features [T, H] of a row with token ids [T] (on the CPU); return them as they are read, in bf16."""
        encoded = feature_codec.encode(features, self.dtype)
        name = row_name(input_ids)
        known = name in self.shard_of or name in self._unwritten
        if not (self._full or known) and first_broken(features) is None:
            # Copies, because slices would keep the whole batch in memory.
            self._unwritten[name] = {suffix: tensor.to("cpu", copy=True) for suffix, tensor in encoded.items()}
            self._new_bytes += sum(tensor.nbytes for tensor in encoded.values())
            if self._new_bytes >= SHARD_BYTES:
                self.flush(wait=False)
        return feature_codec.decode(encoded)

    def flush(self, wait: bool = True) -> None:
        """Write the stored rows. wait: return when they are on the disk."""
        self._collect()
        if self._unwritten:
            self._new_bytes = 0
            self._writer = self._writer or ThreadPoolExecutor(1)
            self._writing = self._writer.submit(self._write, dict(self._unwritten))
        if wait:
            self._collect()

    def _collect(self) -> None:
        """Wait for the shard that is being written, if any. A full disk ends the caching, not the training."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            shard, names = writing.result()
        except (OSError, CannotWrite) as error:
            self._full, self._unwritten = True, {}
            log_note(f"feature cache: {self._directory}: {error}. Nothing more is cached; training goes on without.")
            return
        self._shards.add(shard)
        self.shard_of |= dict.fromkeys(names, shard)
        for name in names:
            del self._unwritten[name]

    def _write(self, rows: dict[str, dict[str, Tensor]]) -> tuple[str, list[str]]:
        """Write a shard and return its name and those of its rows.

        The name is random, because runs that share the directory do not coordinate.
        """
        shard = f"{uuid.uuid4().hex}.safetensors"
        tensors = {name + suffix: tensor for name, row in rows.items() for suffix, tensor in row.items()}
        write_tensors(self._directory / shard, tensors)
        return shard, list(rows)

    def _begin(self, about: dict[str, Any]) -> None:
        directory, path = self._directory, self._directory / ABOUT
        make_directory(directory)
        if path.exists():
            if changed := changes(about, read_object(path, {}, "Delete the cache's directory.")):
                found, remedy = f"{directory} with another {changed}", "Delete it, or pass another --feature-cache."
                raise InputError("feature_cache", found, "features of this target and dtype", remedy)
        elif not all(is_temporary(entry.name) for entry in directory.iterdir()):
            # Another rank may have written it meanwhile.
            if not path.exists():
                remedy = "Choose a new one."
                raise InputError("feature_cache", f"{directory}, which holds something else", "a cache", remedy)
        else:
            write_json(path, about)
        # Killed runs leave temporary files; those of a running one are younger.
        for leftover in directory.iterdir():
            if is_temporary(leftover.name) and time.time() - leftover.stat().st_mtime > LEFTOVER_S:
                leftover.unlink(missing_ok=True)

    def _look(self) -> None:
        """Read the names of rows in new shards, whichever process wrote them."""
        if time.monotonic() - self._looked < LOOK_EVERY_S:
            return
        self._looked = time.monotonic()
        for path in self._directory.glob("*.safetensors"):
            if path.name not in self._shards:
                self.shard_of |= dict.fromkeys(self._files.keys(path.name), path.name)
                self._shards.add(path.name)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a reader process, which reads only files."""
        return {**self.__dict__, "_unwritten": {}, "_writer": None, "_writing": None}


class FeatureStream:
    """Features of one rank's samples from a vLLM server, in the order of its steps.

    The samples of the coming steps are known, so their rows are requested ahead of time: as many as fit a window of
    bytes. A slow trainer requests less, so that the server waits; a slow server lets the trainer wait. A resumed
    trainer requests its rows again, and missing rows are requested again from a server that has restarted.
    """

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

        features_mb_s: features used. features_mb_s_needed: rate that the trainer would
        use if the server never kept it waiting.
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
