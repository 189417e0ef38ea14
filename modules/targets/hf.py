"""Any transformers causal language model: the universal path, and the oracle for the lean one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from draftsmith.modules.lean import tree_mask
from draftsmith.modules.targets.base import ModelInfo, Rows, Scores, check_capture
from draftsmith.modules.types import InputError


class HFLM:
    """A `CausalLM` over a transformers model (any architecture with a decoder and an output embedding).

    Trees need 4-D attention masks: with an attention implementation that takes none (flash_attention_2) only chains
    work. The model's own forward is never wrapped or changed.
    """

    packed = False

    def __init__(self, model: Any, info: ModelInfo):
        self.model, self.info = model.eval().requires_grad_(False), info
        weight = model.get_input_embeddings().weight
        self.device, self.dtype = weight.device, weight.dtype

    def session(self, rows: int, capacity: int, capture: tuple[int, ...] = (), static: bool | None = None) -> HFSession:
        """Raises:
        InputError: several rows, whose lengths transformers' caches do not tell apart.
        """
        if rows > 1:
            found = "a model that only transformers can run"
            raise InputError("model", found, "a Llama-family model, to decode in batches", "Pass --batch-size 1.")
        return HFSession(self, capture)

    @torch.inference_mode()
    def batch_session(self, prompts: Sequence[Sequence[int]], capacity: int) -> tuple[HFBatchSession, Tensor]:
        session = HFBatchSession(self, prompts)
        return session, session.prefill(prompts)

    def features(self, input_ids: Tensor, position_ids: Tensor | None = None, capture: tuple[int, ...] = ()) -> Tensor:
        # As decoding computes them, whatever a training around this does with its own weights.
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            return self.read(capture, input_ids=input_ids, position_ids=position_ids, use_cache=False)[1]

    def read(self, capture: tuple[int, ...] = (), **inputs: Any) -> tuple[Tensor, Tensor]:
        """Hidden states after the final norm, and features (`base.CausalLM.session`). Where the layers are on several
        devices they come from the last one; the caller's are on the first."""
        check_capture(capture, self.info.num_layers)
        found = self.model.base_model(**inputs, output_hidden_states=bool(capture))
        hidden = found.last_hidden_state.to(self.device)
        if not capture:
            return hidden, hidden
        return hidden, torch.cat([found.hidden_states[number].to(self.device) for number in capture], -1)

    def tree_attention(self, visible: Tensor, positions: Tensor) -> Tensor | dict[str, Tensor]:
        """The additive mask [1, 1, T, S] of T nodes, from visible [T, S] (bool) and the positions [S] of all slots, the
        nodes' own last.

        transformers takes a ready mask as it is, so a sliding window has to be in it; a model whose layers differ takes
        one mask a kind of layer.
        """
        config = self.model.config.get_text_config()
        window = getattr(config, "sliding_window", None)
        if window is None:
            return self._additive(visible)
        near = positions[-len(visible) :, None] - positions < window
        if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
            return {
                "full_attention": self._additive(visible),
                "sliding_attention": self._additive(visible & near),
            }
        return self._additive(visible & near)

    def _additive(self, visible: Tensor) -> Tensor:
        bias = torch.zeros(visible.shape, dtype=self.dtype, device=self.device)
        return bias.masked_fill(~visible, torch.finfo(self.dtype).min)[None, None]

    def embed(self, input_ids: Tensor) -> Tensor:
        return self.model.get_input_embeddings()(input_ids)

    def lm_head(self, hidden: Tensor) -> Tensor:
        head = self.model.get_output_embeddings()
        return head(hidden.to(head.weight.device)).to(self.device)


class HFSession:
    """One sequence over an `HFLM`. Only layers with plain key/value caches can drop tokens: others are refused by
    transformers' own cache, loudly."""

    static = False

    def __init__(self, lm: HFLM, capture: tuple[int, ...] = ()):
        # No config: sliding-window layers then keep all keys, and the mask does the windowing; dropping drafted tokens
        # from a rolling buffer would be impossible.
        self._lm, self._cache, self._length, self.capture = lm, DynamicCache(), 0, capture

    @property
    def lengths(self) -> Sequence[int]:
        return [self._length]

    def reset(self, rows: int) -> None:
        assert rows <= 1
        self.keep([0])

    @torch.inference_mode()
    def extend(
        self, tokens: Rows | Tensor, parents: Sequence[Sequence[int]] | None = None, num_logits: int = 1
    ) -> Scores:
        lm, length = self._lm, self._length
        ids = torch.as_tensor(tokens[0], device=lm.device)
        count = len(ids)
        positions = torch.arange(length + count, device=lm.device)
        if parents is None:
            hidden, features = self._read(ids, positions)
        else:
            depths, visible = tree_mask(parents[0], length, lm.device)
            positions[length:] = depths + length
            hidden, features = self._read(ids, positions, attention_mask=lm.tree_attention(visible, positions))
        return Scores(lm.lm_head(hidden[:, count - num_logits :]), features)

    def step(self, tokens: Rows | Tensor) -> tuple[Tensor, Tensor]:
        scores = self.extend(tokens)
        return scores.logits[:, 0], scores.features[:, 0]

    @torch.inference_mode()
    def graft(self, tokens: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        return self._read(tokens, positions, attention_mask=self._lm.tree_attention(visible, positions))[1][0]

    def _read(self, ids: Tensor, positions: Tensor, **masked: Any) -> tuple[Tensor, Tensor]:
        """Hidden states and features [1, T, ..] of ids [T]; positions of all slots, those of `ids` last."""
        own = positions[None, -len(ids) :]
        found = self._lm.read(
            self.capture, input_ids=ids[None], position_ids=own, past_key_values=self._cache, use_cache=True, **masked
        )
        self._length += len(ids)
        return found

    @torch.inference_mode()
    def keep(self, lengths: Sequence[int], slots: Sequence[Sequence[int]] | None = None) -> None:
        length, path = lengths[0], list(slots[0]) if slots else []
        cached = self._cache.get_seq_length()
        end = length + len(path)
        if path == list(range(length, end)):
            if end < cached:
                self._cache.crop(end - cached)  # transformers 5: minus the number of tokens to drop
        else:
            kept = torch.tensor([*range(length), *path], device=self._lm.device)
            for layer in self._cache.layers:
                index = kept.to(layer.keys.device)
                layer.keys, layer.values = layer.keys.index_select(2, index), layer.values.index_select(2, index)
        self._length = end

    def select(self, rows: Sequence[int]) -> None:
        assert list(rows) == [0]


class HFBatchSession:
    """Rows of different lengths, padded at the left with an attention mask."""

    def __init__(self, lm: HFLM, prompts: Sequence[Sequence[int]]):
        width = max(len(prompt) for prompt in prompts)
        padding = torch.tensor([width - len(prompt) for prompt in prompts], device=lm.device)
        self._lm, self._cache = lm, DynamicCache()
        self._mask = (torch.arange(width, device=lm.device)[None] >= padding[:, None]).long()

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        width = self._mask.shape[1]
        ids = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        positions = (self._mask.cumsum(-1) - 1).clamp_min(0)
        return self._forward(torch.tensor(ids, device=self._lm.device), positions)

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], dim=1)
        return self._forward(tokens[:, None], self._mask.sum(-1, keepdim=True) - 1)

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        hidden, _ = self._lm.read(
            input_ids=ids,
            attention_mask=self._mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
        )
        return self._lm.lm_head(hidden[:, -1])

    @torch.inference_mode()
    def select(self, rows: Tensor) -> None:
        self._mask = self._mask[rows]
        self._cache.batch_select_indices(rows)
