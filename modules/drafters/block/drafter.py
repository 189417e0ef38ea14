"""Drafting with a block drafter: chains and trees, both from one pass over the block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftsmith.modules.decoding.growth import Level
from draftsmith.modules.decoding.stop import SlotConfidenceStop, sigmoid
from draftsmith.modules.drafters.block.net import BlockNet, DocumentBlocks, GroupedConv
from draftsmith.modules.drafters.net import DraftNet, RowState
from draftsmith.modules.engine.cache import KVCache, RowsCache, any_shape, as_bias
from draftsmith.modules.engine.lean import LeanLayer, LeanLinear, LeanNorm, LeanStack, Linear, swap_modules
from draftsmith.modules.finite import located
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
        self._lm_head: Callable[[Tensor], Tensor] = head.output or target.lm_head

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
        lean_layers: Any = self.head.layers
        for lean, convs in zip(lean_layers, convolutions, strict=bool(convolutions)):
            attention, mlp = (swap_modules(conv, target.packed) for conv in convs)
            lean.qkv = lean.o = Convolved(attention, lean, lean.qkv, lean.o)
            lean.gate_up = lean.down = Convolved(mlp, lean, lean.gate_up, lean.down)
        # The slots of a block may stand behind the context's end.
        reach = replace(llama, max_position=llama.max_position + config.block_size)
        self.stack = LeanStack(list(lean_layers), reach, target.dtype, target.device)

    def _context(self, features: Tensor, positions: Tensor) -> Tensor:
        """Return the keys and values [C, layers, 2 * kv_heads, D] of the target's states [C, F] at positions [C]."""
        llama, stack = self.config.llama, self.stack
        states = self.head.read(features)
        shape = len(states), llama.num_layers, 2 * llama.num_kv_heads, llama.head_dim
        keys_values = self._keys_values(states).view(shape)
        keys = keys_values[:, :, : llama.num_kv_heads]
        if self._key_norm is not None:
            keys.copy_(self._key_norm(keys))
        # See `LeanLayer` for the sign of sin.
        rotated = keys[..., : llama.rotary_dim]
        rolled = rotated.roll(llama.rotary_dim // 2, -1)
        rotated.mul_(stack.cos[positions][:, None]).addcmul_(rolled, stack.sin[positions][:, None])
        return keys_values

    def _block(self, anchors: Tensor, slots: int) -> Tensor:
        """Return the input [B, S, H] of blocks behind these anchors, ids [B]."""
        ids = torch.full((len(anchors), slots), self.config.mask_token, device=self.device)
        ids[:, 0] = anchors
        return self.embed(ids)

    def _slots_of(self, x: Tensor) -> Tensor:
        """Return the states [B, n, H] of the slots that predict, from those [B, S, H] after the layers."""
        return self.head.norm(x)[:, self.config.first_slot :]

    def _lay(self, drafts: int) -> None:
        """Lay blocks that draft so many tokens from now on."""
        self._num_slots = self.config.slots(drafts)
        layers: Any = self.stack.layers
        for layer in layers:
            layer.unit = self._num_slots

    # -- rows

    def allocate(self, rows: int, capacity: int, depth: int, slots: int = 0, static: bool | None = None) -> None:
        self.longest_text = min(capacity, self.config.max_position)
        self._lay(min(depth, self.config.drafts))
        # With a window what is kept moves to the front when the cache is full.
        kept = min(self.longest_text, 2 * (self.config.llama.sliding_window or self.longest_text))
        data = self.stack.new_slots(rows, kept + self.config.block_size)
        # A row alone lies in one piece and needs no indices.
        self._cache = KVCache(data) if rows == 1 else RowsCache(data)
        # Tokens of each row that are read, and those of them that a window let go.
        self._read, self._dropped = list[int](), list[int]()

    def begin(self, row: int) -> None:
        self._read[row : row + 1], self._dropped[row : row + 1] = [0], [0]
        if isinstance(self._cache, RowsCache):
            self._cache.wipe(row, row + 1)
        else:
            self._cache.keep(0)

    def select(self, rows: Sequence[int]) -> None:
        self._read, self._dropped = ([part[row] for row in rows] for part in (self._read, self._dropped))
        if isinstance(self._cache, RowsCache):
            self._cache.select_rows(torch.tensor(rows))

    def start(self, rows: Sequence[RowState], limits: Sequence[int]) -> Level:
        self._read_context([place for place, limit in enumerate(limits) if limit > 0], rows)
        anchors = torch.tensor([row.tokens[-1:] for row in rows], device=self.device)  # [B, 1]
        self._hidden = self._run_block(anchors[:, 0])  # [B, n, H]
        self._logits = self._lm_head(self._hidden)  # [B, n, V], of the slots alone
        self._memory: Tensor | None = None
        return self._slot(0, anchors)

    def _read_context(self, reading: Sequence[int], rows: Sequence[RowState]) -> None:
        """Read the unread states of the rows that draft."""
        caches, features, places = list[KVCache](), list[Tensor](), list[Tensor]()
        for place in reading:
            cache = self._cache.row(place) if isinstance(self._cache, RowsCache) else self._cache
            unread, start, cache.offset = rows[place].features, self._read[place], self._dropped[place]
            cache.length = start - cache.offset
            skipped = cache.make_room(self.config.llama.sliding_window, len(unread), self.config.block_size)
            self._read[place], self._dropped[place] = start + len(unread), cache.offset
            caches.append(cache)
            features.append(unread[skipped:])
            places.append(torch.arange(start + skipped, start + len(unread)))
            rows[place].features = unread[:0]
        keys_values = self._context(torch.cat(features), torch.cat(places).to(self.device))
        for cache, own in zip(caches, keys_values.split(list(map(len, features))), strict=True):
            for layer, fresh in enumerate(own.unbind(1)):
                cache.write(layer, *fresh[None].chunk(2, 2))
            cache.length += len(own)

    def _run_block(self, anchors: Tensor) -> Tensor:
        """Return the states [B, n, H] of the slots that predict, of the blocks behind all rows."""
        stack, slots, window = self.stack, self._num_slots, self.config.llama.sliding_window
        dropped = torch.tensor(self._dropped)
        ends = torch.tensor(self._read) - dropped + slots
        span = int(ends.max())
        own = (ends - slots)[:, None] + torch.arange(slots)  # [B, S], slots of the cache
        seen = torch.arange(span) < ends[:, None, None]  # [B, 1, span]
        if window is not None:
            # A block within a window is causal.
            seen = (torch.arange(span) <= own[..., None]) & (torch.arange(span) > own[..., None] - window)
        bias = as_bias(seen.expand(-1, slots, -1), stack.dtype).to(self.device)  # [B, S, span]
        if isinstance(self._cache, RowsCache):
            self._cache.place(own.to(self.device), span)
        at = (own + dropped[:, None]).to(self.device)
        x = self._block(anchors, slots)
        with any_shape(self.device):
            x = stack.run(x, stack.cos[at], stack.sin[at], self._cache, bias[:, None], False)
        return self._slots_of(x)

    def open_round(self, rows: Sequence[RowState], limits: Sequence[int]) -> Sequence[int]:
        if not any(isinstance(row.policy, SlotConfidenceStop) for row in rows):
            return limits
        opened = list(limits)
        # The confidence head's log-odds, without the previous token's part.
        of_states = (self._hidden.float() @ self._of_state).tolist()
        for place, (row, logits) in enumerate(zip(rows, of_states, strict=True)):
            if isinstance(row.policy, SlotConfidenceStop):
                row.policy.confidence_logits, row.policy.confidence = logits, self._confidence
                # Rows without a limit have read nothing new.
                if limits[place] > 0:
                    with located(place):
                        opened[place] = limits[place] if row.policy.drafts_first(row.tokens[-1]) else 0
        return opened

    def _confidence(self, logit: float, previous: int) -> float:
        """Return the probability that a slot's token is accepted, behind this token."""
        return sigmoid(logit + self._of_token[previous])

    def step(self, tokens: Any, depth: int) -> tuple[Tensor, Tensor]:
        if depth == 1 and self._memory is not None:
            self._memory = self._memory[:, 0]
        hidden = self._hidden[:, depth]
        return self._behind(hidden, self._logits[:, depth], self.ids(tokens)[:, 0]), hidden

    def expand(self, tokens: Any, parents: Tensor | None, depth: int) -> Level:
        if parents is not None and self._memory is not None:
            self._memory = self._memory.gather(1, parents[..., None].expand(-1, -1, self._memory.shape[-1]))
        return self._slot(depth, self.ids(tokens))

    def _slot(self, slot: int, previous: Tensor) -> Level:
        """Return the states and logits of a slot, behind the tokens [B, n] before the predicted ones."""
        count = previous.shape[1]
        hidden = self._hidden[:, slot : slot + 1].expand(-1, count, -1)
        logits = self._logits[:, slot : slot + 1].expand(-1, count, -1)
        return Level(hidden, self._behind(hidden, logits, previous))

    def _behind(self, hidden: Tensor, logits: Tensor, previous: Tensor) -> Tensor:
        """Return the logits of tokens behind these, from those of their slots."""
        if (sequential := self.head.sequential) is None:
            return logits
        z, self._memory = sequential.step(hidden, previous, self._memory)
        return sequential.add(logits, z)

    # -- branches

    def open(self, tokens: Sequence[int], features: Tensor | None, depth: int) -> None:
        assert features is not None and len(features) == len(tokens)
        self._tokens = torch.tensor(tokens, device=self.device)
        self._lay(depth)
        positions = torch.arange(len(tokens), device=self.device)
        self._text = self._context(features, positions)  # [T, layers, 2 * kv_heads, D]

    def branch(self, starts: Tensor) -> Tensor:
        stack, slots = self.stack, self._num_slots
        anchors = starts.to(self.device) - 1
        x = self._block(self._tokens[anchors], slots).flatten(0, 1)  # [S * slots, H]
        at = (anchors[:, None] + torch.arange(slots, device=self.device)).flatten()
        length = len(self._tokens)
        cache = stack.new_cache(1, length + len(x))
        for layer, own in enumerate(self._text.unbind(1)):
            cache.write(layer, *own[None].chunk(2, 2))
        cache.length = length
        blocks = DocumentBlocks(0, anchors, slots, self.config.llama.sliding_window, 0, length)
        seen = blocks.visible(anchors, 0, length)
        with any_shape(self.device):
            states = stack.run(x, stack.cos[at], stack.sin[at], cache, seen, False)
        self._hidden = self._slots_of(states.view(len(anchors), slots, -1))  # [S, n, H]
        self._memory = None
        return self._branch_state(0, self._tokens[anchors][:, None])[:, 0]

    def read(self, tokens: Any, parents: Tensor | None, depth: int) -> Tensor:
        # Behind the block's last slot there is no state.
        if depth < self._hidden.shape[1]:
            self._state = self._branch_state(depth, self.ids(tokens))
        return self._state

    def _branch_state(self, slot: int, previous: Tensor) -> Tensor:
        """Return the states [S, 1, H + r] of a slot, behind these tokens [S, 1]."""
        self._state = self._hidden[:, slot : slot + 1]
        if (sequential := self.head.sequential) is not None:
            z, self._memory = sequential.step(self._state, previous, self._memory)
            self._state = torch.cat([self._state, z], -1)
        return self._state

    def logits(self, hidden: Tensor) -> Tensor:
        size = self.config.hidden_size
        logits, sequential = self._lm_head(hidden[..., :size]), self.head.sequential
        return logits if sequential is None else sequential.add(logits, hidden[..., size:])

    def drop(self) -> None:
        del self._hidden
