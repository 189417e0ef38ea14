"""KV connector that vLLM loads into its own processes, to hand out hidden states of the target.

vLLM's method `extract_hidden_states` (0.32) keeps the inputs of chosen layers of every token in a cache of their own,
beside keys and values. When a request ends, this connector copies them out of the cache, encodes them as features are
stored, and writes them to a spool (data/store/spool.py), many requests a file, on CPUs and GPUs. Requests name the
folder that their rows go to, and how the last state is normed (`targets.readout.Readout`): {"kv_transfer_params":
{"spool": FOLDER, "norm": "rms+1", "eps": 1e-6}}. Without a norm the states are stored as vLLM has them, in its own type
and before the final norm: from these a reader finds the norm out (`vllm_states.prove_teacher`). With "unrounded": true
they are normed and of its own type, so that fp8 hides nothing from the proof. Requests without a folder are served as
usual. With "only_ask": true they are told the spool's directory and the layers, and nothing is written.

States are numbered as here: k is the state after the first k layers, and one more than all layers stands for that after
the final norm, of which vLLM has the state before it. Nothing of vLLM is patched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer
from vllm.v1.kv_cache_interface import HiddenStateCacheSpec

from draftsmith.data.store import feature_codec
from draftsmith.data.store.spool import SpoolWriter, is_folder, row_name
from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.targets.base import final_state
from draftsmith.modules.targets.readout import NORMS, Readout

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = init_logger("vllm.draftsmith")


@dataclass
class FinishedRow:
    """A finished request whose states are still in the cache.

    length: tokens of the row. blocks: of the states. readout: norm of the last state; None: the states as they are.
    unrounded: they are stored in vLLM's own type.
    """

    request: str
    folder: str
    name: str
    length: int
    blocks: list[int]
    readout: Readout | None
    unrounded: bool


@dataclass
class FinishedRows(KVConnectorMetadata):
    """Message from the scheduler to the workers."""

    rows: list[FinishedRow] = field(default_factory=list)


class HiddenStatesConnector(KVConnectorBase_V1, SupportsHMA):
    """Writes the states of finished requests to a spool.

    Extra config: directory, of the spool; feature_dtype, bf16 or fp8; layers, whose states are written.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        extra = self._kv_transfer_config.get_from_extra_config
        self.directory, self.dtype = Path(extra("directory", "")), extra("feature_dtype", "bf16")
        speculative = vllm_config.speculative_config
        if speculative is None or speculative.method != "extract_hidden_states" or not self.directory.is_absolute():
            raise ValueError("HiddenStatesConnector needs the method extract_hidden_states and an absolute directory")
        kept = list(speculative.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids)
        model, self.layers = vllm_config.model_config, list(extra("layers", []))
        num_layers = model.get_total_num_hidden_layers()
        self.final_norm = final_state(num_layers) in self.layers
        # Where each state stands in the cache, which has the one after the last layer once.
        self.columns = [kept.index(min(layer, num_layers)) for layer in self.layers]
        self.model, self.hidden_size = model.model, model.get_hidden_size()

        # Of the scheduler: its group of cache blocks, and rows that the workers have not been told of.
        groups = kv_cache_config.kv_cache_groups
        kinds = [isinstance(group.kv_cache_spec, HiddenStateCacheSpec) for group in groups]
        self.group = kinds.index(True) if any(kinds) else 0
        self.finished: list[FinishedRow] = []
        # Of a worker: the states' cache, on the one worker that writes, and rows that are still to be copied from it.
        self.cache: Tensor | None = None
        self.waiting: deque[FinishedRow] = deque()

    # -- scheduler

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        rows, self.finished = self.finished, []
        return FinishedRows(rows)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Return whether the request's blocks are kept until its states are copied, and what its reply says."""
        params, tokens = request.kv_transfer_params or {}, list(request.prompt_token_ids or ())
        # An aborted request has not read its whole prompt. An error here would end the server for all.
        name, folder, norm, eps = row_name(tokens), params.get("spool"), params.get("norm"), params.get("eps", 0.0)
        known = norm is None or (norm in NORMS and isinstance(eps, float))
        if not is_folder(folder) or not known or not tokens or request.num_computed_tokens < len(tokens):
            return False, None
        said = {"row": name, "directory": str(self.directory), "layers": self.layers}
        if params.get("only_ask"):
            return False, said
        readout = None if norm is None else Readout(norm, eps)
        unrounded = readout is None or bool(params.get("unrounded"))
        row = FinishedRow(request.request_id, folder, name, len(tokens), list(block_ids), readout, unrounded)
        self.finished.append(row)
        return True, said

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        # A request that was never scheduled has no blocks.
        return self.request_finished(request, block_ids[self.group]) if self.group < len(block_ids) else (False, None)

    def get_finished_count(self) -> int:
        # Only one worker reports that a row is copied.
        return 1

    # -- workers

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Take the states' cache: with tensor and pipeline parallelism, the first worker of the last stage has it."""
        layers = get_layers_from_vllm_config(self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches))
        if not layers or get_tensor_model_parallel_rank():
            return
        (layer,) = layers
        self.cache = kv_caches[layer]  # [blocks, L, block size, H]
        self.writer = SpoolWriter(self.directory, logger.error)
        # Weight and bias, where there are any.
        fields = ("norm", "norm_bias")
        found = Checkpoint(self.model).read_outer(fields) if self.final_norm else {}
        self.norm = [found[field].to(self.cache.device) if field in found else None for field in fields]
        self.stream = torch.cuda.Stream() if self.cache.is_cuda else None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Copy states of finished requests while the writer has room; return the requests whose blocks are free.

        If the disk is slower than the engine, blocks stay in use, so that the scheduler begins no new requests.
        """
        if self.cache is None:
            return None, None
        if self.has_connector_metadata():
            metadata = self._get_connector_metadata()
            assert isinstance(metadata, FinishedRows)
            self.waiting.extend(metadata.rows)
        copied = set()
        while self.waiting and self.writer.has_room():
            row = self.waiting.popleft()
            self._copy(row)
            copied.add(row.request)
        return copied or None, None

    def shutdown(self) -> None:
        if self.cache is not None:
            self.writer.flush()

    @torch.inference_mode()
    def _copy(self, row: FinishedRow) -> None:
        """Copy a row's states out of the cache and hand them to the writer."""
        assert self.cache is not None
        size, device = self.cache.shape[2], self.cache.device
        places = torch.arange(row.length, device=device)
        blocks = torch.tensor(row.blocks, device=device)[places // size]
        states = self.cache[blocks, :, places % size][:, self.columns]  # [T, L, H]
        if row.readout is not None and self.final_norm:
            final = row.readout.normed(states[:, -1], *self.norm).to(states.dtype)
            states = torch.cat([states[:, :-1], final[:, None]], 1)
        states = states.flatten(1)  # [T, L*H]
        stored = {"": states} if row.unrounded else feature_codec.encode(states, self.dtype)
        if self.stream is None:
            self.writer.put(row.folder, row.name, stored, lambda: None)
            return
        # The gather is ordered before the next step's writes to these blocks; the copy to the host need not be.
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            host = {name: torch.empty_like(values, device="cpu", pin_memory=True) for name, values in stored.items()}
            for name, values in stored.items():
                host[name].copy_(values, non_blocking=True)
                values.record_stream(self.stream)
            done: Callable[[], None] = self.stream.record_event().synchronize
        self.writer.put(row.folder, row.name, host, done)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        # All states of a token lie together.
        return "LBNHC"
