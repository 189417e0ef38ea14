"""The lean path for Llama-family weights: Llama, Mistral, Qwen2, Qwen3."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.modules.engine.cache import KVCache, NoCache, any_shape
from draftsmith.modules.engine.lean import Captured, LeanLinear, LeanNorm, LeanStack
from draftsmith.modules.engine.rows import ManyRows, OneRow, cached_rows, select_outputs
from draftsmith.modules.layers import LlamaModel
from draftsmith.modules.llama_config import LlamaConfig
from draftsmith.modules.rotary import rope_table
from draftsmith.modules.targets.base import ModelInfo, check_aux_layers, final_state, fit_logits
from draftsmith.modules.targets.readout import Readout
from draftsmith.modules.types import InputError

UNUSED = ("rotary_emb.inv_freq", ".k_scale", ".v_scale")  # ends of names: constants, and scales of a server's FP8 cache


def model_from_state(config: LlamaConfig, state: Mapping[str, Tensor], dtype: torch.dtype) -> LlamaModel:
    """Load weights with transformers' names (`model.layers.0...`, `lm_head.weight`) into our module.

    Raises:
        InputError: a tensor is missing, unknown or of another shape.
    """
    renamed = {name.removeprefix("model."): tensor.to(dtype) for name, tensor in state.items()}
    renamed = {name: tensor for name, tensor in renamed.items() if not name.endswith(UNUSED)}
    if config.tie_embeddings and "embed_tokens.weight" in renamed:
        renamed.setdefault("lm_head.weight", renamed["embed_tokens.weight"])
    model = empty_model(config, {name: tuple(tensor.shape) for name, tensor in renamed.items()}, "model.safetensors")
    model.load_state_dict(renamed, assign=True, strict=False)
    model.cos, model.sin = rope_table(config, config.max_position)
    return model.eval().requires_grad_(False)


def empty_model(config: LlamaConfig, shapes: Mapping[str, tuple[int, ...]], file: str) -> LlamaModel:
    """Build a model without weights, for a file whose tensors have these shapes.

    Raises:
        InputError: a tensor is missing, unknown or of another shape.
    """
    with torch.device("meta"):
        model = LlamaModel(config)
    names = {name: tuple(weight.shape) for name, weight in model.named_parameters(remove_duplicate=False)}
    if wrong := sorted(name for name in {*names, *shapes} if names.get(name) != shapes.get(name)):
        found = f"{len(wrong)} tensors missing, unknown or of another shape ({', '.join(wrong[:4])})"
        raise InputError(file, found, "exactly the tensors its settings ask for", "Check the checkpoint.")
    return model


class LlamaLM:
    """A `CausalLM` over frozen `LlamaModel` weights: fused layers over preallocated caches.

    packed: large weights are only held in the layout of the CPU's kernels (`engine.lean`), so `model` itself cannot be
    called any more.
    """

    def __init__(self, model: LlamaModel, info: ModelInfo, packed: bool = False):
        self.model, self.info, self.config, self.packed = model, info, model.config, packed
        weight = model.embed_tokens.weight
        self.device, self.dtype = weight.device, weight.dtype
        layers: list[Any] = list(model.layers)
        self.stack = LeanStack(layers, model.config, self.dtype, self.device, packed, share=True)
        self.embeddings = weight.detach()  # [V, H]
        self.norm = LeanNorm(model.norm.weight, model.norm.eps)
        # A tied embedding is held twice: products from the plain layout, which lookups need, take 2 to 4 times as long.
        self._head = LeanLinear(model.lm_head.weight, None, packed)
        self.readout, self._missing = Readout(), 0  # missing: tokens of the target's vocabulary
        if self._head.packed and not model.config.tie_embeddings:
            model.lm_head.weight.data = weight.new_empty(0)

    def session(
        self, rows: int, capacity: int, aux_layers: tuple[int, ...] = (), static: bool | None = None
    ) -> OneRow | ManyRows:
        check_aux_layers(aux_layers, self.info.num_layers)
        return cached_rows(_Capturing(self, aux_layers), rows, capacity, static)

    def features(
        self, input_ids: Tensor, position_ids: Tensor | None = None, aux_layers: tuple[int, ...] = ()
    ) -> Tensor:
        check_aux_layers(aux_layers, self.info.num_layers)
        if position_ids is not None and not torch.equal(
            position_ids, torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        ):
            raise ValueError("position_ids: the lean Llama counts from 0 in every row")
        # Computed as decoding does, whatever precision a surrounding training uses for its own weights.
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False), any_shape(self.device):
            length = input_ids.shape[1]
            window = self.config.sliding_window or length
            # A text longer than the window passes a cache of two windows: no mask is [T, T].
            cache = NoCache() if length <= window else self.stack.new_cache(len(input_ids), 2 * window)
            parts = []
            for ids in input_ids.split(window, 1):
                if isinstance(cache, KVCache):
                    cache.make_room(window, ids.shape[1], 0)
                captured: Captured = dict.fromkeys(aux_layers, self.embeddings)
                last = self.stack.chain(self.embed(ids), cache, captured)
                final = self.norm(last)
                parts.append(_joined(captured, last, final, self.info.num_layers) if aux_layers else final)
                cache.length += ids.shape[1]
            return torch.cat(parts, 1) if len(parts) > 1 else parts[0]

    def logits(self, input_ids: Tensor, keep: int) -> Tensor:
        session = self.session(1, len(input_ids), static=False)
        return session.extend([input_ids.tolist()], logits_to_keep=keep).logits[0]

    def embed(self, input_ids: Tensor | Sequence[int]) -> Tensor:
        if isinstance(input_ids, Tensor):
            return F.embedding(input_ids, self.embeddings)
        if len(input_ids) == 1:  # a slice of the table is one call; a tensor of ids and a lookup are two
            return self.embeddings[input_ids[0] : input_ids[0] + 1]
        return F.embedding(torch.tensor(input_ids, device=self.device), self.embeddings)

    def lm_head(self, hidden: Tensor) -> Tensor:
        logits = self._head(hidden)
        return fit_logits(logits, self._missing) if self._missing else logits

    def fit_vocabulary(self, vocab_size: int) -> None:
        self._missing += vocab_size - self.info.vocab_size
        self.embeddings = F.pad(self.embeddings, (0, 0, 0, max(0, vocab_size - len(self.embeddings))))
        self.info = dataclasses.replace(self.info, vocab_size=vocab_size)

    def lm_head_of(self, tokens: Tensor) -> Callable[[Tensor], Tensor]:
        return partial(F.linear, weight=self.lm_head_weight()[tokens])

    def lm_head_weight(self) -> Tensor:
        assert not self.packed, "packed models have no tables"
        return self.model.lm_head.weight.detach()


class _Capturing:
    """A `LlamaLM` as a session reads it (`engine.rows.Network`): logits, and the captured features.

    Not the model itself, whose sessions capture different layers.
    """

    def __init__(self, lm: LlamaLM, aux_layers: tuple[int, ...]):
        self._lm, self.stack, self.aux_layers = lm, lm.stack, aux_layers

    def inputs(self, ids: Any) -> Tensor:
        return self._lm.embed(ids)

    def outputs(self, hidden: Tensor, keep: Tensor | slice | None, captured: Captured | None) -> tuple[Tensor, Tensor]:
        """Return logits of the outputs to keep, and all features."""
        lm = self._lm
        final = lm.norm(hidden)  # [T, H] or [B, n, H]
        logits = lm.lm_head(final if keep is None else select_outputs(final, keep))
        return logits, final if captured is None else _joined(captured, hidden, final, lm.info.num_layers)


def _joined(captured: Captured, last: Tensor, final: Tensor, num_layers: int) -> Tensor:
    """Join captured states, [.., L*H], with those [.., H] after the last layer and after the final norm."""
    for number, state in ((num_layers, last), (final_state(num_layers), final)):
        if number in captured:
            captured[number] = state.reshape(-1, final.shape[-1])
    return torch.cat([*captured.values()], -1).view(*final.shape[:-1], -1)
