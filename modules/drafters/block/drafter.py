"""Drafting with a block drafter: chains and trees, both from one pass over the block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftsmith.modules.decoding.drafter import Level
from draftsmith.modules.decoding.stop import SlotConfidenceStop, StopPolicy, sigmoid
from draftsmith.modules.drafters.block.net import BlockNet, DocumentBlocks, GroupedConv, LayerMask
from draftsmith.modules.drafters.branches import group_of
from draftsmith.modules.drafters.net import DraftNet
from draftsmith.modules.engine.cache import KVCache, any_shape, as_bias, prepared
from draftsmith.modules.engine.lean import LeanLayer, LeanLinear, LeanNorm, LeanStack, Linear, swap_modules
from draftsmith.modules.targets.base import CausalLM


class Convolved:
    """First and last linear of a sublayer between convolutions: one before the first, one behind the last.

    The deltas of the second convolution are kept between the two calls. layer: its `unit` is the slots of a block.
    """

    def __init__(self, conv: GroupedConv, layer: LeanLayer, first: Linear, last: Linear):
        self._conv, self._layer, self._first, self._last = conv, layer, first, last

    def __call__(self, x: Tensor) -> Tensor:
        x, self._delta = self._conv.before(x.unflatten(0, (-1, self._layer.unit)))
        return self._first(x.flatten(0, 1))

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        blocks = self._last(x).unflatten(0, (-1, self._layer.unit))
        return residual + self._conv.behind(blocks, self._delta).flatten(0, 1)


class SlotNet(DraftNet):
    """Drafts from the slots of a block: one pass lays it behind the text, and each level is a slot.

    A block has as many slots as drafts may be long, as servers lay it, and not as many as it was trained on: slots see
    each other, so that a longer block is another one. The Markov head or selector gives the children of every node
    logits of their own without another pass.

    Of branches a state is the slot's and z of the Markov head or selector side by side, [H + r]: what the logits, and a
    confidence head, are computed from.
    """

    one_pass = True

    def __init__(self, head: BlockNet, target: CausalLM):
        super().__init__(head.kind, target.device, target.embed)
        plain, config, llama = head.like(target), head.config, head.config.llama
        self.config, self.aux_layers, self.longest_draft = config, head.aux_layers, config.drafts

        # Context states are the same in every layer: one product makes the keys and values of all.
        layers: Any = plain.layers
        attentions = [layer.self_attn for layer in layers]
        projections = [own for a in attentions for own in (a.k_proj, a.v_proj)]
        bias = None if projections[0].bias is None else torch.cat([own.bias for own in projections])
        self._keys_values = LeanLinear(torch.cat([own.weight for own in projections]), bias, target.packed)
        norms = [a.k_norm.weight.expand(llama.num_kv_heads, -1) for a in attentions if a.qk_norm]
        self._key_norm = LeanNorm(torch.stack(norms), llama.rms_eps) if norms else None  # [layers, kv_heads, D]

        # What the confidence head reads of the previous token is one number for each, looked up.
        if plain.confidence_head is not None:
            weight, offset = (own.float() for own in plain.confidence_head.proj.parameters())
            self._of_state, of_token = weight[0].split([config.hidden_size, weight.shape[1] - config.hidden_size])
            markov = plain.markov_head
            table = offset if markov is None else markov.markov_w1.weight.float() @ of_token + offset
            self._of_token = table.expand(config.vocab_size).tolist()

        convolutions = [(layer.attention_conv, layer.mlp_conv) for layer in layers if layer.mlp_conv is not None]
        self.head: BlockNet = swap_modules(plain, target.packed)
        own = head.output if config.draft_vocab_size is None else self.head.lm_head
        self._lm_head: Callable[[Tensor], Tensor] = own or target.lm_head
        lean_layers: Any = self.head.layers
        for lean, convs in zip(lean_layers, convolutions, strict=bool(convolutions)):
            attention, mlp = (swap_modules(conv, target.packed) for conv in convs)
            lean.qkv = lean.o = Convolved(attention, lean, lean.qkv, lean.o)
            lean.gate_up = lean.down = Convolved(mlp, lean, lean.gate_up, lean.down)
        # The slots of a block may stand behind the context's end.
        reach = replace(llama, max_position=llama.max_position + config.block_size)
        self.stack = LeanStack(list(lean_layers), reach, target.dtype, target.device)

    def _read_context(self, cache: KVCache, features: Tensor, positions: Tensor) -> None:
        """Write the keys and values of the target's states [C, F] at positions [C] behind what a cache holds."""
        llama, stack = self.config.llama, self.stack
        shape = len(features), llama.num_layers, 2 * llama.num_kv_heads, llama.head_dim
        keys_values = self._keys_values(self.head.read(features)).view(shape)
        keys = keys_values[:, :, : llama.num_kv_heads]
        if self._key_norm is not None:
            keys.copy_(self._key_norm(keys))
        # See `LeanLayer` for the sign of sin.
        rotated = keys[..., : llama.rotary_dim]
        rolled = rotated.roll(llama.rotary_dim // 2, -1)
        rotated.mul_(stack.cos[positions][:, None]).addcmul_(rolled, stack.sin[positions][:, None])
        for layer, fresh in enumerate(keys_values.unbind(1)):
            cache.write(layer, *fresh[None].chunk(2, 2))
        cache.length += len(keys_values)

    def _run_blocks(self, cache: KVCache, tokens: Tensor, anchors: Tensor) -> Tensor:
        """Return the states [S, n, H] of the slots that predict, of S blocks behind the text in a cache.

        tokens: [S] int64, the anchors' ids, on the device. anchors: [S] int64, where they stand in the cache.
        """
        stack, count = self.stack, len(anchors)
        ids = torch.full((count, self._num_slots), self.config.mask_token, device=self.device)
        ids[:, 0] = tokens
        at = anchors[:, None] + torch.arange(self._num_slots, device=anchors.device) + cache.offset
        at = at.flatten().to(self.device)
        biases = self._biases(anchors, cache.length)
        with any_shape(self.device):
            x = stack.run(self.embed(ids).flatten(0, 1), stack.cos[at], stack.sin[at], cache, biases, False)
        return self.head.norm(x.view(count, self._num_slots, -1))[:, self.config.first_slot :]

    def _lay(self, drafts: int) -> None:
        """Lay blocks that draft so many tokens from now on."""
        self._num_slots = self.config.slots(drafts)
        layers: Any = self.stack.layers
        for layer in layers:
            layer.unit = self._num_slots

    # -- a sequence

    def allocate(self, capacity: int, depth: int, slots: int = 0, static: bool | None = None) -> None:
        self.longest_text = min(capacity, self.config.max_position)
        self._lay(min(depth, self.config.drafts))
        # With windows in all layers what is kept moves to the front when the cache is full.
        kept = min(self.longest_text, 2 * (self.config.reach or self.longest_text))
        self._cache = KVCache(self.stack.new_slots(1, kept + self.config.block_size))

    def begin(self) -> None:
        self._cache.keep(0)
        self._cache.offset = 0

    def start(self, tokens: Sequence[int], features: Tensor) -> Level:
        cache, unread = self._cache, len(features)
        start = cache.length + cache.offset
        skipped = cache.make_room(self.config.reach, unread, self.config.block_size)
        positions = torch.arange(start + skipped, start + unread).to(self.device)
        self._read_context(cache, features[skipped:], positions)
        anchor = torch.tensor(tokens[-1:], device=self.device)
        self._hidden = self._run_blocks(cache, anchor, torch.tensor([cache.length]))[0]  # [n, H], of the slots
        self._logits = self._lm_head(self._hidden)  # [n, draft vocabulary], of the slots alone
        self._memory: Tensor | None = None
        return self._slot(0, anchor)

    def _biases(self, anchors: Tensor, length: int) -> list[Tensor]:
        """Return the attention bias of each layer, of blocks at anchors [S] of a text of so many cached tokens."""
        llama, biases = self.config.llama, dict[LayerMask, Tensor]()
        blocks = DocumentBlocks(0, anchors, self._num_slots, 0, length)
        for mask in set(self.config.masks):
            bias = as_bias(blocks.visible(anchors, 0, length, mask), self.stack.dtype).to(self.device)
            biases[mask] = prepared(bias, llama.num_heads // llama.num_kv_heads)
        return [biases[mask] for mask in self.config.masks]

    def open_round(self, stop: StopPolicy, root: int, limit: int) -> int:
        if not isinstance(stop, SlotConfidenceStop):
            return limit
        # The confidence head's log-odds, without the previous token's part.
        stop.confidence_logits, stop.confidence = (self._hidden.float() @ self._of_state).tolist(), self._confidence
        return limit if stop.drafts_first(root) else 0

    def _confidence(self, logit: float, previous: int) -> float:
        """Return the probability that a slot's token is accepted, behind this token."""
        return sigmoid(logit + self._of_token[previous])

    def expand(self, tokens: Sequence[int] | Tensor, parents: Tensor | None, depth: int) -> Level:
        if parents is not None and self._memory is not None:
            self._memory = self._memory[parents]
        return self._slot(depth, self.ids(tokens))

    def _slot(self, slot: int, previous: Tensor) -> Level:
        """Return the states and logits of a slot, behind the tokens [n] before the predicted ones."""
        count = len(previous)
        hidden = self._hidden[slot : slot + 1].expand(count, -1)
        logits = self._logits[slot : slot + 1].expand(count, -1)
        if (sequential := self.head.sequential) is not None:
            z, self._memory = sequential.step(hidden, previous, self._memory)
            logits = sequential.add(logits, z)
        return Level(hidden, self.head.over_target(logits))

    # -- branches

    def open(self, tokens: Sequence[int], features: Tensor | None, depth: int) -> None:
        assert features is not None and len(features) == len(tokens)
        self._tokens = torch.tensor(tokens, device=self.device)
        self._lay(depth)
        self._text = self.stack.new_cache(1, len(tokens) + group_of(depth) * self._num_slots)
        self._read_context(self._text, features, torch.arange(len(tokens), device=self.device))

    def branch(self, starts: Tensor) -> Tensor:
        anchors = starts.to(self.device) - 1
        tokens = self._tokens[anchors]
        self._hidden = self._run_blocks(self._text, tokens, anchors)  # [S, n, H]
        self._memory = None
        return self._branch_state(0, tokens)

    def read(self, tokens: Tensor, depth: int) -> Tensor:
        # Behind the block's last slot there is no state.
        if depth < self._hidden.shape[1]:
            self._state = self._branch_state(depth, self.ids(tokens))
        return self._state

    def _branch_state(self, slot: int, previous: Tensor) -> Tensor:
        """Return the states [S, H + r] of a slot, behind these tokens [S]."""
        self._state = self._hidden[:, slot]
        if (sequential := self.head.sequential) is not None:
            z, self._memory = sequential.step(self._state, previous, self._memory)
            self._state = torch.cat([self._state, z], -1)
        return self._state

    def logits(self, hidden: Tensor) -> Tensor:
        size = self.config.hidden_size
        logits, sequential = self._lm_head(hidden[..., :size]), self.head.sequential
        return self.head.over_target(logits if sequential is None else sequential.add(logits, hidden[..., size:]))

    def drop(self) -> None:
        del self._hidden
