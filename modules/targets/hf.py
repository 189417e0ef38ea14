"""Any transformers causal language model: the universal path, and the oracle for the lean one."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)

from draftsmith.modules.engine.cache import tree_mask
from draftsmith.modules.llama_config import MOST_LAYERS
from draftsmith.modules.targets.base import ModelInfo, Rows, Scores, check_aux_layers, final_state, fit_logits
from draftsmith.modules.targets.hybrid import LinearStates, Mixers, is_linear
from draftsmith.modules.targets.readout import Readout
from draftsmith.modules.targets.shape import is_hybrid, kinds_in
from draftsmith.modules.types import InputError

# Most entries of a mask [T, S] while a text is read: longer texts than 5,792 tokens are read in parts.
MASK_ELEMENTS = 2**25
LAYER = re.compile(r"\.\d+\.")  # in the names of modules inside a layer
SAME = 0.999  # least cosine of two states that are one, in any type


def decoder_layers(model: Any, least: int, most: int) -> tuple[str, nn.ModuleList]:
    """Return the name of a model's list of decoder layers, and the list; an empty one if none has so many."""
    decoder = model.get_decoder() or model.base_model
    lists = ((name, part) for name, part in decoder.named_modules() if isinstance(part, nn.ModuleList))
    return next((pair for pair in lists if least <= len(pair[1]) <= most), ("none", nn.ModuleList()))


class HFLM:
    """A `CausalLM` over a transformers model (an architecture with a decoder and an output embedding).

    no_trees: why this model cannot read trees, from `self_test` at load; empty if it can. They need 4-D attention
        masks: an attention implementation that takes none (flash_attention_2) reads chains only.
    mixers: layers with recurrent or convolution states, and how `self_test` found them to behave.
    The model's own forward is never wrapped or changed; hooks on mixers exist during a read only.
    """

    packed = False

    def __init__(self, model: Any, info: ModelInfo):
        self.model, self.info = model.eval().requires_grad_(False), info
        # Llama 4 names its decoder otherwise than its class says.
        self.decoder = model.base_model if model.base_model is not model else model.model
        weight = model.get_input_embeddings().weight
        self.device, self.dtype = weight.device, weight.dtype
        self.no_trees, self.readout = "", Readout()
        self._norms_last = False  # a text has shown that the final norm reads the last layer's state alone
        layers = DynamicCache(config=model.config).layers
        self.kinds = kinds_in(layers)
        self.mixers = Mixers(is_hybrid(self.kinds))
        # Some layers keep more than keys and values: states, or keys of an indexer.
        self.own_cache = any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)
        # Mamba has another name for the cache.
        names = inspect.signature(self.decoder.forward).parameters
        self.cache_name = "cache_params" if "cache_params" in names else "past_key_values"
        self._missing = 0  # tokens of the target's vocabulary

    def session(
        self, rows: int, capacity: int, aux_layers: tuple[int, ...] = (), static: bool | None = None
    ) -> HFSession | HFRows:
        # Rows need their own masks and positions, as trees do; dynamic rotary angles depend on the longest row.
        dynamic = "dynamic" in str(getattr(self.model.config.get_text_config(), "rope_parameters", ""))
        alone = rows == 1 or bool(aux_layers) or bool(self.no_trees) or self.own_cache or dynamic
        return HFSession(self, aux_layers) if alone else HFRows(self, rows)

    def features(
        self, input_ids: Tensor, position_ids: Tensor | None = None, aux_layers: tuple[int, ...] = ()
    ) -> Tensor:
        # Computed as decoding does, whatever precision a surrounding training uses for its own weights.
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            length = input_ids.shape[1]
            part = MASK_ELEMENTS // length
            if length <= part or position_ids is not None or self.mixers.stepwise:
                return self.read(aux_layers, input_ids=input_ids, position_ids=position_ids, use_cache=False)[1]
            # As decoding reads: masks and the states of all layers exist for a part of the text alone.
            features = torch.empty(0)
            for row, ids in enumerate(input_ids.tolist()):
                session = self.session(1, length, aux_layers)
                for start in range(0, length, part):
                    own = session.extend([ids[start : start + part]]).features  # [1, t, F]
                    if not len(features):
                        features = own.new_empty(*input_ids.shape, own.shape[-1])
                    features[row, start : start + part] = own[0]
            return features

    def read(self, aux_layers: tuple[int, ...] = (), **inputs: object) -> tuple[Tensor, Tensor]:
        """Return hidden states after the final norm, and features (`base.CausalLM.session`).

        With layers on several devices they come from the last one; the caller's tensors are on the first.
        """
        num_layers = self.info.num_layers
        check_aux_layers(aux_layers, num_layers)
        with self._last_state() if num_layers in aux_layers else nullcontext(list[Tensor]()) as last:
            output = self.decoder(**inputs, output_hidden_states=bool(aux_layers))
        hidden = output.last_hidden_state.to(self.device)
        if not aux_layers:
            return hidden, hidden
        if last and not self._norms_last:
            self._norms_last = self._norms(last[0].to(self.device), hidden)
        if last and not self._norms_last:
            remedy = "Train a head that reads the states of other layers."
            raise InputError("target", "a final norm of more than the last layer", "that of its state alone", remedy)
        # Of transformers' states the last one is normed.
        known = {final_state(num_layers): hidden, **dict(enumerate([*output.hidden_states[:num_layers], *last]))}
        states = [known[number].to(self.device) for number in aux_layers]
        if any(state.shape != hidden.shape for state in states):
            found = "a model whose layers give several states a token"
            remedy = "Train a head that reads the last state."
            raise InputError("target", found, f"states of width {self.info.hidden_size}", remedy)
        return hidden, torch.cat(states, -1)

    def _norms(self, last: Tensor, hidden: Tensor) -> bool:
        """Return whether a state [B, T, H] is what the final norm reads, some module behind the layers."""
        parts = (part for name, part in self.decoder.named_modules() if not LAYER.search(name))
        for part in (nn.Identity(), *(part for part in parts if not list(part.children()))):
            try:
                normed = part(last)
            except (TypeError, ValueError, RuntimeError, IndexError):  # an embedding, rotary positions
                continue
            # Some families scale it.
            if isinstance(normed, Tensor) and normed.shape == hidden.shape:
                apart = F.cosine_similarity(normed.float().flatten(), hidden.float().flatten(), 0)
                if apart > SAME:
                    return True
        return False

    @contextmanager
    def _last_state(self) -> Iterator[list[Tensor]]:
        """Yield a list that receives the state after the last layer, before the final norm, from a forward."""
        # Layers for images are not counted, nor called for a text.
        found, (_, layers) = list[Tensor](), decoder_layers(self.model, self.info.num_layers, MOST_LAYERS)
        if not layers:
            remedy = "Train a head that reads the states of other layers."
            raise InputError("target", "a model whose last layer is not found", "a list of its layers", remedy)

        def keep(_: nn.Module, __: object, output: Any) -> None:
            found[:] = [output if isinstance(output, Tensor) else output[0]]

        hooks = [layer.register_forward_hook(keep) for layer in layers]
        try:
            yield found
        finally:
            for hook in hooks:
                hook.remove()

    def logits(self, input_ids: Tensor, keep: int) -> Tensor:
        part = {"logits_to_keep": keep} if "logits_to_keep" in inspect.signature(self.model.forward).parameters else {}
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            logits = self.model(input_ids=input_ids[None].to(self.device), use_cache=False, **part).logits
        return logits[0, -keep:].to(self.device)

    def attention(self, visible: Tensor, positions: Tensor) -> Tensor | dict[str, Tensor]:
        """Build the additive mask [B, 1, T, S] of T tokens, from visible [B, T, S] and positions [B, S] of all slots.

        transformers takes a ready mask as it is, so a sliding window has to be in it; a model whose layers differ takes
        one mask for each kind of layer.
        """
        if self.no_trees:
            remedy = "Use a method that drafts chains."
            raise InputError("model", self.no_trees, "a model that reads trees", remedy)
        window = next((kind.window for kind in self.kinds if kind.window), None)
        nothing = torch.zeros(visible.shape, dtype=self.dtype, device=self.device)
        full = nothing.masked_fill(~visible, torch.finfo(self.dtype).min)[:, None]
        if window is None:
            return full
        far = (positions[:, -visible.shape[1] :, None] - positions[:, None] >= window)[:, None]
        windowed = full.masked_fill(far, torch.finfo(self.dtype).min)
        named = getattr(self.model.config.get_text_config(), "layer_types", None)
        return {"full_attention": full, "sliding_attention": windowed} if named else windowed

    def embed(self, input_ids: Tensor | Sequence[int]) -> Tensor:
        return F.embedding(torch.as_tensor(input_ids, device=self.device), self.model.get_input_embeddings().weight)

    def lm_head(self, hidden: Tensor) -> Tensor:
        head = self.model.get_output_embeddings()
        # torch multiplies a slice [B, n, H] of bfloat16 states hundreds of times slower than a copy of it, on a CPU.
        # Mamba's states stay float32.
        states = hidden.to(head.weight.device, self.dtype).contiguous()
        logits = self.readout.bounded(head(states).to(self.device))
        return fit_logits(logits, self._missing)

    def lm_head_of(self, tokens: Tensor) -> Callable[[Tensor], Tensor]:
        bias = getattr(self.model.get_output_embeddings(), "bias", None)
        bias = None if bias is None else bias.to(self.device)[tokens]
        return partial(self.readout.logits, weight=self.lm_head_weight()[tokens], bias=bias)

    def fit_vocabulary(self, vocab_size: int) -> None:
        self._missing += vocab_size - self.info.vocab_size
        embedding = self.model.get_input_embeddings()
        rows = F.pad(embedding.weight, (0, 0, 0, max(0, vocab_size - len(embedding.weight))))
        embedding.weight = torch.nn.Parameter(rows, requires_grad=False)
        self.info = dataclasses.replace(self.info, vocab_size=vocab_size)

    def lm_head_weight(self) -> Tensor:
        return self.model.get_output_embeddings().weight.detach().to(self.device)


class HFSession:
    """A `Session` over an `HFLM`, of one row.

    It drops tokens: keys are cropped, and states of linear layers return to those of fewer tokens.
    """

    static, most_rows = False, 1

    def __init__(self, lm: HFLM, aux_layers: tuple[int, ...] = ()):
        self._lm, self.aux_layers = lm, aux_layers
        self.reset(1)

    def reset(self, rows: int) -> None:
        lm = self._lm
        self._cache, self.lengths = new_cache(lm.model.config) if lm.own_cache else DynamicCache(), [0]
        self._states = LinearStates(lm.model, self._cache, lm.mixers) if lm.mixers.hybrid else None

    def prefill(self, rows: Sequence[int], prompts: Rows) -> Tensor:
        self.reset(len(rows))
        return self.extend(prompts).logits[:, -1]

    @torch.inference_mode()
    def extend(
        self, tokens: Rows | Tensor, parents: Sequence[Sequence[int]] | None = None, logits_to_keep: int = 1
    ) -> Scores:
        lm, (length,) = self._lm, self.lengths
        ids = torch.as_tensor(tokens[0], device=lm.device)
        count = len(ids)
        positions = torch.arange(length + count, device=lm.device)
        if parents is None:
            hidden, features = self._read(ids, positions)
        else:
            depths, visible = tree_mask(parents[0], length, lm.device)
            positions[length:] = depths + length
            hidden, features = self._read(ids, positions, attention_mask=lm.attention(visible[None], positions[None]))
        return Scores(lm.lm_head(hidden[:, count - logits_to_keep :]), features)

    def step(self, tokens: Rows | Tensor) -> tuple[Tensor, Tensor]:
        scores = self.extend(tokens)
        return scores.logits[:, 0], scores.features[:, 0]

    @torch.inference_mode()
    def read_masked(self, tokens: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        return self._read(tokens, positions, attention_mask=self._lm.attention(visible[None], positions[None]))[1][0]

    def _read(self, ids: Tensor, positions: Tensor, **masked: object) -> tuple[Tensor, Tensor]:
        """Return hidden states and features [1, T, ..] of ids [T]; positions of all slots, those of `ids` last."""
        with self._states.reading(ids) if self._states else nullcontext():
            output = self._lm.read(
                self.aux_layers,
                input_ids=ids[None],
                position_ids=positions[None, -len(ids) :],
                use_cache=True,
                **{self._lm.cache_name: self._cache},
                **masked,
            )
        self.lengths = [self.lengths[0] + len(ids)]
        return output

    @torch.inference_mode()
    def keep(self, lengths: Sequence[int], slots: Sequence[Sequence[int]] | None = None) -> None:
        length, path = lengths[0], list(slots[0]) if slots else []
        end = length + len(path)
        if path == list(range(length, end)):
            if end < self.lengths[0]:
                self._drop_after(end)
            if self._states:
                self._states.commit()
        else:
            kept = torch.tensor([*range(length), *path], device=self._lm.device)
            for layer in self._cache.layers:
                index = kept.to(layer.keys.device)
                layer.keys, layer.values = layer.keys.index_select(2, index), layer.values.index_select(2, index)
                if getattr(layer, "indexer_keys", None) is not None:
                    layer.indexer_keys = layer.indexer_keys.index_select(1, index)
        self.lengths = [end]

    def _drop_after(self, end: int) -> None:
        """Drop all tokens but the first `end`. Linear layers read again those of them that their states do not have."""
        unread = None if self._states is None else self._states.rewind(end)
        kept = end if unread is None else end - len(unread)
        if kept == 0:
            self.reset(1)
        for layer in self._cache.layers if kept else ():
            # transformers 5 takes minus the number of tokens to drop.
            if not is_linear(layer):
                layer.crop(kept - self.lengths[0])
            elif isinstance(layer, DynamicLayer):
                DynamicLayer.crop(layer, kept - self.lengths[0])
        self.lengths = [kept]
        if unread is not None and kept < end:
            self._read(unread, torch.arange(end, device=self._lm.device))

    def select(self, rows: Sequence[int]) -> None:
        assert list(rows) in ([], [0])


class HFRows:
    """A `Session` over an `HFLM` for rows that are answered side by side, without trees and dropped tokens.

    The newest token of each row is in the last slot of the cache; what a row does not fill is masked.
    """

    static, aux_layers = False, tuple[int, ...]()

    def __init__(self, lm: HFLM, rows: int):
        self._lm, self.most_rows = lm, rows
        self.reset(0)

    def reset(self, rows: int) -> None:
        self._cache, self.lengths = DynamicCache(), [0] * rows

    @torch.inference_mode()
    def prefill(self, rows: Sequence[int], prompts: Rows) -> Tensor:
        width, cache, lengths = max(map(len, prompts)), DynamicCache(), [len(prompt) for prompt in prompts]
        if len(rows) > 1 and len(rows) * width**2 > MASK_ELEMENTS:
            half = len(rows) // 2
            return torch.cat([self.prefill(rows[:half], prompts[:half]), self.prefill(rows[half:], prompts[half:])])
        padded = [[*[0] * (width - len(prompt)), *prompt] for prompt in prompts]
        hidden = self._read(cache, torch.tensor(padded, device=self._lm.device), lengths)
        for row, length in zip(rows, lengths, strict=True):
            self.lengths[row : row + 1] = [length]
        old, width = self._cache.layers or [None] * len(cache.layers), max(self.lengths)
        for layer, kept in zip(cache.layers, old, strict=True):
            layer.keys = self._placed(layer.keys, None if kept is None else kept.keys, rows, width)
            layer.values = self._placed(layer.values, None if kept is None else kept.values, rows, width)
        self._cache = cache
        return self._lm.lm_head(hidden[:, -1])

    def _placed(self, fresh: Tensor, kept: Tensor | None, rows: Sequence[int], width: int) -> Tensor:
        """Return the keys or values [B, heads, width, D] of all rows, those of the fresh ones at their places."""
        every = fresh.new_zeros(len(self.lengths), fresh.shape[1], width, fresh.shape[3])
        if kept is not None:
            kept = kept[:, :, -width:]
            every[: len(kept), :, width - kept.shape[2] :] = kept
        fresh = fresh[:, :, -width:]
        every[list(rows)] = 0
        every[list(rows), :, width - fresh.shape[2] :] = fresh
        return every

    @torch.inference_mode()
    def extend(
        self, tokens: Rows | Tensor, parents: Sequence[Sequence[int]] | None = None, logits_to_keep: int = 1
    ) -> Scores:
        assert parents is None and logits_to_keep == 1
        self.lengths = [length + 1 for length in self.lengths]
        hidden = self._read(self._cache, torch.as_tensor(tokens, device=self._lm.device), self.lengths)  # [B, 1, H]
        return Scores(self._lm.lm_head(hidden), hidden)

    def step(self, tokens: Rows | Tensor) -> tuple[Tensor, Tensor]:
        scores = self.extend(tokens)
        return scores.logits[:, 0], scores.features[:, 0]

    def read_masked(self, tokens: Tensor, positions: Tensor, visible: Tensor) -> NoReturn:
        raise TypeError("it is for one row")

    def _read(self, cache: DynamicCache, ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """Read ids [B, n], whose rows then have these lengths; return their hidden states [B, n, H]."""
        slots = cache.get_seq_length() + ids.shape[1]
        places = torch.tensor(lengths, device=ids.device)[:, None] - slots + torch.arange(slots, device=ids.device)
        own = places[:, -ids.shape[1] :]  # negative before a row begins
        mask = None  # transformers' own does for prompts of one length, and a long one's takes no room
        if slots > ids.shape[1] or min(lengths) < slots:
            # Tokens before a row begins see all: where they see none, float16 overflows to a softmax of NaN.
            visible = (places[:, None] >= 0) & (places[:, None] <= own[..., None]) | (own[..., None] < 0)
            mask = self._lm.attention(visible, places)
        return self._lm.read(
            input_ids=ids,
            position_ids=own.clamp(min=0),
            attention_mask=mask,
            use_cache=True,
            **{self._lm.cache_name: cache},
        )[0]

    def select(self, rows: Sequence[int]) -> None:
        self.lengths = [self.lengths[row] for row in rows]
        for layer in self._cache.layers if rows else ():
            index, width = torch.tensor(rows, device=layer.keys.device), max(self.lengths)
            layer.keys, layer.values = layer.keys[index, :, -width:], layer.values[index, :, -width:]

    def keep(self, lengths: Sequence[int], slots: Sequence[Sequence[int]] | None = None) -> None:
        assert list(lengths) == list(self.lengths) and not slots


def new_cache(config: Any) -> DynamicCache:
    """Make an empty cache for a model of this config, some of whose layers keep more than keys and values.

    Its sliding-window layers keep all keys, as those of a cache without a config do, and the mask does the windowing:
    drafted tokens could not be dropped from a rolling buffer.
    """
    cache = DynamicCache(config=config)
    for number, layer in enumerate(cache.layers):
        if isinstance(layer, LinearAttentionAndSlidingWindowAttentionLayer):
            cache.layers[number] = LinearAttentionAndFullAttentionLayer(layer.number_of_states)
        elif isinstance(layer, DynamicSlidingWindowLayer):
            cache.layers[number] = DynamicLayer()
    return cache
