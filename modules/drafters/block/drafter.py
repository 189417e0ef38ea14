"""Drafting with a block drafter: chains and trees, both from one pass over the block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from draftsmith.modules.acceptance.tree_rule import TreeRule
from draftsmith.modules.decoding.branches import BranchDrafter, as_decoding
from draftsmith.modules.decoding.confidence import sigmoid
from draftsmith.modules.decoding.stop import SlotConfidenceStop, StopPolicy
from draftsmith.modules.decoding.tree import DraftTree, DynamicTree, StaticTree
from draftsmith.modules.drafters.block.net import BlockNet, DocumentBlocks
from draftsmith.modules.drafters.growth import Level
from draftsmith.modules.drafters.row_drafter import RowDrafter
from draftsmith.modules.engine.cache import KVCache, RowsCache, as_bias
from draftsmith.modules.engine.lean import LeanNorm, LeanStack
from draftsmith.modules.engine.low_precision import Precision, linear_of
from draftsmith.modules.finite import NonFinite
from draftsmith.modules.sampling import Source
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import SamplingParams, at_most


class LeanBlock:
    """Network for inference, with the target's embedding and lm_head."""

    def __init__(self, head: BlockNet, target: CausalLM, precision: Precision = "dtype"):
        """precision: of products with its weights."""
        config, llama = head.config, head.config.llama
        make_linear = partial(linear_of, pack=target.packed, precision=precision)
        self.config, self._head, self._embed = config, head, target.embed
        self.lm_head: Callable[[Tensor], Tensor] = head.output or target.lm_head
        # The slots of a block may stand behind the context's end.
        reach = replace(llama, max_position=llama.max_position + config.block_size)
        layers: Any = list(head.layers)
        self.stack = LeanStack(layers, reach, target.dtype, target.device, make_linear)
        self._fc = make_linear(head.fc.weight, None)
        self._hidden_norm = LeanNorm(head.hidden_norm.weight, head.hidden_norm.eps)
        self._norm = LeanNorm(head.norm.weight, head.norm.eps)
        # Context states are the same in every layer: one product makes the keys and values of all.
        attentions = [layer.self_attn for layer in layers]
        projections = [own.weight for a in attentions for own in (a.k_proj, a.v_proj)]
        biases = [own.bias for a in attentions for own in (a.k_proj, a.v_proj)]
        bias = None if biases[0] is None else torch.cat([own.detach() for own in biases])
        self._keys_values = make_linear(torch.cat([weight.detach() for weight in projections]), bias)
        norms = [a.k_norm.weight.expand(llama.num_kv_heads, -1) for a in attentions if a.qk_norm]
        self._key_norm = LeanNorm(torch.stack(norms), llama.rms_eps) if norms else None  # [layers, kv_heads, D]
        markov = head.markov_head
        self.markov_w2 = None if markov is None else make_linear(markov.markov_w2.weight, None)
        if head.confidence_head is not None:
            # Of the previous token: one number each, looked up.
            weight, size = head.confidence_head.proj.weight.detach()[0].float(), config.hidden_size
            self._of_state, offset = weight[:size], head.confidence_head.proj.bias.detach().float()
            table = offset if markov is None else markov.markov_w1.weight.detach().float() @ weight[size:] + offset
            self._of_token = table.expand(config.vocab_size).tolist()

    def context(self, features: Tensor, positions: Tensor) -> Tensor:
        """Return the keys and values [C, layers, 2 * kv_heads, D] of the target's states [C, F] at positions [C]."""
        llama, stack = self.config.llama, self.stack
        states = self._hidden_norm(self._fc(features))
        shape = len(states), llama.num_layers, 2 * llama.num_kv_heads, llama.head_dim
        keys_values = self._keys_values(states).view(shape)
        keys = keys_values[:, :, : llama.num_kv_heads]
        if self._key_norm is not None:
            keys.copy_(self._key_norm(keys))
        # See `LeanLayer` for the sign of sin.
        rolled = keys.roll(llama.head_dim // 2, -1)
        keys.mul_(stack.cos[positions][:, None]).addcmul_(rolled, stack.sin[positions][:, None])
        return keys_values

    def embed(self, anchors: Tensor, slots: int) -> Tensor:
        """Return the input [.., S, H] of blocks behind these anchors, ids [..]."""
        ids = anchors[..., None].repeat(*[1] * anchors.dim(), slots)
        ids[..., 1:] = self.config.mask_token
        return self._embed(ids)

    def finish(self, x: Tensor) -> Tensor:
        """Return the states [.., n, H] of the slots that predict, from those [.., S, H] after the layers."""
        return self._norm(x)[..., self.config.first_slot :, :]

    def after(
        self, hidden: Tensor, logits: Tensor, previous: Tensor, memory: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Add the Markov head to a slot's logits [.., V]; return them and the head's memory.

        hidden: [.., H]. previous: the tokens [..] before the predicted ones.
        """
        if self._head.markov_head is None or self.markov_w2 is None:
            return logits, None
        z, memory = self._head.markov_head.step(hidden, previous, memory)
        return logits + self.markov_w2(z), memory

    def confidence_logits(self, hidden: Tensor) -> list[list[float]]:
        """Return the confidence head's log-odds for states [B, n, H], without the previous token's part."""
        return (hidden.float() @ self._of_state).tolist()

    def confidence(self, logit: float, previous: int) -> float:
        """Return the probability that a slot's token is accepted, behind this token."""
        return sigmoid(logit + self._of_token[previous])


class BlockDrafter(RowDrafter):
    """Drafts chains or, given a shape, trees: one pass lays a block behind the text, and its slots are drawn in order.

    A block has as many slots as drafts may be long, as servers lay it, and not as many as it was trained on: slots see
    each other, so that a longer block is another one.
    """

    def __init__(
        self,
        head: BlockNet,
        target: CausalLM,
        stops: Sequence[StopPolicy],
        capacity: int,
        shape: StaticTree | DynamicTree | None = None,
        rules: Sequence[TreeRule] | None = None,
    ):
        """stops: a policy for each row, for chains. capacity: most tokens of a row, drafts included."""
        config, self.shape, self.rules = head.config, shape, rules
        slots = min(capacity, config.max_position)
        super().__init__(stops, longest_text=slots, longest_draft=config.drafts)
        self.model, self.capture = head.kind, head.capture
        self.net = net = LeanBlock(head, target, head.precision)
        if isinstance(shape, StaticTree):
            longest = max(shape.depths)
        elif isinstance(shape, DynamicTree):
            longest = shape.depth + 1
        else:
            longest = max(stop.max_drafted for stop in stops)
        self._slots = config.slots(min(longest, config.drafts))
        data = net.stack.new_slots(len(stops), slots + config.block_size)
        # A row alone lies in one piece and needs no indices.
        self._cache = KVCache(data) if len(stops) == 1 else RowsCache(data)
        self._read = list[int]()  # tokens of each row whose states are in the cache

    def begin(self, row: int, prompt: Sequence[int], features: Tensor, first_token: int) -> None:
        super().begin(row, prompt, features, first_token)
        self._read[row : row + 1] = [0]
        if isinstance(self._cache, RowsCache):
            self._cache.wipe(row, row + 1)
        else:
            self._cache.keep(0)

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self._read = [self._read[row] for row in rows]
        if isinstance(self._cache, RowsCache):
            self._cache.select_rows(torch.tensor(rows))

    def _draft(self, limits: Sequence[int], params: SamplingParams, sources: Sequence[Source]) -> Sequence[DraftTree]:
        self._read_context(limits)
        hidden = self._run_block()  # [B, n, H]
        base = self.net.lm_head(hidden)  # [B, n, V]
        anchors = torch.tensor([row.tokens[-1] for row in self._rows], device=hidden.device)
        if self.shape is not None:
            trees = self._grow(hidden, base, anchors, limits, params, sources)
        else:
            limits = self._opened(hidden, limits)
            slot, (first, memory) = 0, self.net.after(hidden[:, 0], base[:, 0], anchors, None)

            def step(tokens: list[list[int]] | Tensor) -> tuple[Tensor, Tensor]:
                nonlocal slot, memory
                slot += 1
                # Rows that have stopped read anything.
                ids = tokens[:, 0] if isinstance(tokens, Tensor) else torch.tensor([(own or [0])[-1] for own in tokens])
                states = hidden[:, slot]
                logits, memory = self.net.after(states, base[:, slot], ids.to(hidden.device), memory)
                return logits, states

            trees = self._chains(first, hidden[:, 0], step, limits, params, sources)
        return [replace(tree, draft_calls=1) if tree.tokens else tree for tree in trees]

    def _opened(self, hidden: Tensor, limits: Sequence[int]) -> Sequence[int]:
        """Show this round's confidences to the rows' policies; return limits of 0 for rows that draft nothing."""
        if not any(isinstance(row.stop, SlotConfidenceStop) for row in self._rows):
            return limits
        opened = list(limits)
        for place, (row, logits) in enumerate(zip(self._rows, self.net.confidence_logits(hidden), strict=True)):
            if isinstance(row.stop, SlotConfidenceStop):
                row.stop.confidence_logits, row.stop.confidence = logits, self.net.confidence
                # Rows without a limit have read nothing new.
                if limits[place] > 0:
                    try:
                        opened[place] = limits[place] if row.stop.drafts_first(row.tokens[-1]) else 0
                    except NonFinite as error:
                        error.row, error.position = place, 0
                        raise
        return opened

    def _read_context(self, limits: Sequence[int]) -> None:
        """Read the unread states of the rows that draft."""
        reading = [place for place, limit in enumerate(limits) if limit > 0]
        features = [self._rows[place].features for place in reading]
        starts = [self._read[place] for place in reading]
        device = self.net.stack.device
        places = [torch.arange(start, start + len(own)) for start, own in zip(starts, features, strict=True)]
        keys_values = self.net.context(torch.cat(features), torch.cat(places).to(device))
        for place, start, own in zip(reading, starts, keys_values.split(list(map(len, features))), strict=True):
            cache = self._cache.row(place) if isinstance(self._cache, RowsCache) else self._cache
            cache.length = start
            for layer, fresh in enumerate(own.unbind(1)):
                cache.write(layer, fresh[None])
            cache.length = self._read[place] = start + len(own)
            self._rows[place].features = self._rows[place].features[:0]

    def _run_block(self) -> Tensor:
        """Return the states [B, n, H] of the slots that predict, of every row's block."""
        stack, slots, rows = self.net.stack, self._slots, self._rows
        anchors = torch.tensor([row.tokens[-1] for row in rows], device=stack.device)
        x, window = self.net.embed(anchors, slots), self.net.config.llama.sliding_window
        ends = torch.tensor(self._read) + slots
        span = int(ends.max())
        own = (ends - slots)[:, None] + torch.arange(slots)  # [B, S]
        seen = torch.arange(span) < ends[:, None, None]  # [B, 1, span]
        if window is not None:
            # A block within a window is causal.
            seen = (torch.arange(span) <= own[..., None]) & (torch.arange(span) > own[..., None] - window)
        bias = as_bias(seen.expand(-1, slots, -1), stack.dtype).to(stack.device)  # [B, S, span]
        at = own.to(stack.device)
        if isinstance(self._cache, RowsCache):
            self._cache.place(at, span)
        cos, sin = stack.cos[at], stack.sin[at]
        states = stack.run(x, cos, sin, self._cache, bias[:, None], False)
        return self.net.finish(states)

    def _grow(
        self,
        hidden: Tensor,
        base: Tensor,
        anchors: Tensor,
        limits: Sequence[int],
        params: SamplingParams,
        sources: Sequence[Source],
    ) -> list[DraftTree]:
        """Grow trees: the Markov head gives every node's children a distribution of their own without another pass."""
        first, memory = self.net.after(hidden[:, :1], base[:, :1], anchors[:, None], None)

        def expand(tokens: Tensor, above: Tensor, depth: int) -> Level:
            nonlocal memory
            count = tokens.shape[1]
            states = hidden[:, depth : depth + 1].expand(-1, count, -1)
            if memory is not None:
                memory = memory.gather(1, above[..., None].expand(-1, -1, memory.shape[-1]))
            logits = base[:, depth : depth + 1].expand(-1, count, -1)
            logits, memory = self.net.after(states, logits, tokens, memory)
            return Level(states, logits)

        return self._grown(Level(hidden[:, :1], first), expand, limits, params, sources)


class BlockBranches(BranchDrafter):
    """Drafts from many places of one text, as `BlockDrafter` makes them, from blocks of `depth` tokens.

    A state is the slot's and the Markov head's z side by side, [H + r]: what the logits, and a confidence head, are
    computed from.
    """

    # The first token has nothing before it to read.
    min_start = 2

    def __init__(self, head: BlockNet, target: CausalLM, depth: int):
        """depth: most tokens of a draft."""
        at_most("depth", depth, head.config.drafts)
        super().__init__(target, depth)
        self.model, self._head, self._net = head.kind, head, LeanBlock(head, target, head.precision)

    def open(self, tokens: Sequence[int], features: Tensor | None = None) -> None:
        assert features is not None and len(features) == len(tokens)
        self._tokens = torch.tensor(tokens, device=self.device)
        with as_decoding(self.device):
            positions = torch.arange(len(tokens), device=self.device)
            self._context = self._net.context(features, positions)  # [T, layers, 2 * kv_heads, D]

    def _before(self, starts: Tensor) -> Tensor:
        net, stack, slots = self._net, self._net.stack, self._net.config.slots(self._depth)
        self._starts = starts.to(self.device)
        anchors = self._starts - 1
        x = net.embed(self._tokens[anchors], slots).flatten(0, 1)  # [S * slots, H]
        at = (anchors[:, None] + torch.arange(slots, device=self.device)).flatten()
        length = len(self._tokens)
        cache = stack.new_cache(1, length + len(x))
        for layer, own in enumerate(self._context.unbind(1)):
            cache.write(layer, own[None])
        cache.length = length
        visible = DocumentBlocks.of(0, anchors, slots, net.config.llama.sliding_window).visible
        seen = visible.new_zeros(len(x), length + len(x))
        shorter = visible.shape[1] - len(x)
        seen[:, :shorter], seen[:, length:] = visible[:, :shorter], visible[:, shorter:]
        states = stack.run(x, stack.cos[at], stack.sin[at], cache, seen, False)
        self._slots = net.finish(states.view(len(anchors), slots, -1))  # [S, n, H]
        return self._state(0, self._tokens[anchors], None)

    def _state(self, level: int, previous: Tensor, memory: Tensor | None) -> Tensor:
        hidden = self._slots[:, level]
        self._memory: Tensor | None = None
        if self._head.markov_head is None:
            return hidden
        z, self._memory = self._head.markov_head.step(hidden, previous, memory)
        return torch.cat([hidden, z], -1)

    def _step(self, starts: Tensor, level: int, tokens: Tensor, hidden: Tensor) -> Tensor:
        if level + 1 >= self._slots.shape[1]:
            # Behind the block's last slot there is no state.
            return hidden
        return self._state(level + 1, tokens.to(self.device), self._memory)

    def _drop(self) -> None:
        del self._slots

    def lm_head(self, hidden: Tensor, level: int | Tensor = 0) -> Tensor:
        size = self._net.config.hidden_size
        logits, markov_w2 = self._net.lm_head(hidden[..., :size]), self._net.markov_w2
        return logits if markov_w2 is None else logits + markov_w2(hidden[..., size:])
