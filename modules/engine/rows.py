"""Cached sequences for lean layers: a single row with its slots in order, or several rows of different lengths.

Both run a `Network`, so that a target, a draft model and a draft head share them; they are sessions of a target
(`targets.base.Session`). Inputs have an item for each row: lists of ids, lists of tensors [T, ..], or a tensor
[B, n, ..]. B rows, n inputs of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import add
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.modules.attention import group_by_length
from draftsmith.modules.engine.cache import ALIGNMENT, KVCache, RowsCache, any_shape, as_bias, tree_mask
from draftsmith.modules.engine.graphs import Graphed
from draftsmith.modules.engine.lean import Captured, LeanStack
from draftsmith.modules.transfer import to_device, to_device_together

# With static shapes the slots that are read are this many times a power of two.
SPAN_BUCKET = 256
# With static shapes a tree's own slots are padded to multiples of this.
SEEN_BUCKET = 64
# Longer inputs are prompts, and are read without padding.
MAX_WIDTH = 256
# Prompts that are read side by side: most tokens, padding included, and how much of a row may be padding. A small call
# costs a GPU as much as a large one; a CPU pays for every token.
GROUPS = {"cpu": (1024, 0.1), "cuda": (16384, 0.5)}
Parents = Sequence[Sequence[int]]


class Scores(NamedTuple):
    """Result of one call, of B rows that were fed up to n tokens each.

    logits: of each row's LAST `logits_to_keep` fed tokens; each scores what follows its token. features: entry i is the
    state once fed token i was read; F is H, or L*H with captured layers. For a row that was fed fewer tokens, its own
    entries come first and the rest is undefined.
    """

    logits: Tensor  # [B, logits_to_keep, V]
    features: Tensor  # [B, n, F]


class Network(Protocol):
    """Layers, with what stands before and behind them.

    aux_layers: numbers of the layers whose inputs `outputs` reads.
    """

    stack: LeanStack
    aux_layers: tuple[int, ...]

    def inputs(self, ids: Any, *others: Any) -> Tensor:
        """Return the layers' input: ids and others are a list or tensor [T, ..] of one row, or tensors [B, n, ..]."""

    def outputs(self, hidden: Tensor, keep: Tensor | slice | None, captured: Captured | None) -> tuple[Tensor, Tensor]:
        """Return logits of the outputs to keep (`select_outputs`) of the layers, and states of these or of all.

        captured: states by layer; None if there are none.
        """


def to_capture(network: Network, x: Tensor) -> Captured | None:
    """Return where the layers leave the states that the network captures."""
    return dict.fromkeys(network.aux_layers, x) if network.aux_layers else None


def select_outputs(hidden: Tensor, keep: Tensor | slice | None) -> Tensor:
    """Select outputs: a slice of hidden [T, H], or places [B, m] of each row of [B, n, H]; None takes all."""
    if keep is None:
        return hidden
    if isinstance(keep, slice):
        return hidden[keep]
    return hidden.gather(1, keep[..., None].expand(-1, -1, hidden.shape[-1]))


class OneRow:
    """A single row, whose slots lie in order: no padding and no lookups."""

    static, most_rows = False, 1

    def __init__(self, network: Network, cache: KVCache):
        self._network, self.stack, self.cache = network, network.stack, cache
        self.aux_layers = network.aux_layers

    @property
    def lengths(self) -> Sequence[int]:
        return [self.cache.offset + self.cache.length]

    def reset(self, rows: int) -> None:
        assert rows <= 1
        self.cache.keep(0)
        self.cache.offset = 0

    def prefill(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor:
        self.reset(len(rows))
        return self.extend(prompts).logits[:, -1]

    @torch.inference_mode()
    def extend(
        self, tokens: Any, parents: Parents | None = None, logits_to_keep: int = 1, others: Sequence[Any] = ()
    ) -> Scores:
        """Read inputs (`targets.base.Session.extend`). others: those of the network beside the tokens."""
        own = [part[0] for part in (tokens, *others)]
        count = len(own[0])
        keep = None if logits_to_keep >= count else slice(count - logits_to_keep, count)
        x = self._network.inputs(*own)
        captured = to_capture(self._network, x)
        if parents is None:
            hidden = self.stack.chain(x, self.cache, captured)
        else:
            hidden = self.stack.tree(x, parents[0], self.cache, captured)
        self.cache.length += count
        logits, states = self._network.outputs(hidden, keep, captured)
        return Scores(logits[None], states[None])

    @torch.inference_mode()
    def read_masked(self, tokens: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        assert not self.aux_layers
        hidden = self.stack.read_masked(self._network.inputs(tokens), positions, visible, self.cache)
        self.cache.length += len(tokens)
        return self._network.outputs(hidden, slice(0, 0), None)[1]

    # Without a mode of its own, which costs 4 us: the decoder's loop has set it.
    def step(self, *inputs: Any) -> tuple[Tensor, Tensor]:
        """Read one input of each row, or none. Returns logits [B, V] and states [B, F], undefined for rows with none.

        inputs: first a list with one or no id for each row, or a tensor [B, 1]; the others [B, ..].
        """
        # For a single row [1, ..] is both its sequence of inputs and one input for each row.
        tokens, *others = inputs
        x = self._network.inputs(tokens[0], *others)
        captured = to_capture(self._network, x)
        hidden = self.stack.chain(x, self.cache, captured)
        self.cache.length += 1
        return self._network.outputs(hidden, None, captured)

    def nodes(self, inputs: Sequence[Any], seen: Tensor, depth: int) -> tuple[Tensor, ...]:
        """Read n nodes of each row's tree, inputs [B, n, ..]. Returns logits [B, n, V] and states.

        seen: bias [B, n, m + n]: which of the last m slots (the tree's nodes so far) and of the n new ones a node sees.
        All nodes see what precedes these; their position is that of the first of them, plus depth - 1.
        """
        stack, cache, count = self.stack, self.cache, seen.shape[1]
        before = cache.length + count - seen.shape[2]
        position = cache.offset + before + depth - 1
        if stack.config.sliding_window is not None:
            cache.first = max(0, before + depth - stack.config.sliding_window)
        x = self._network.inputs(*(rows[0] for rows in inputs))
        mask = F.pad(seen[0], (before - cache.first, 0))
        hidden = stack.run(x, stack.cos[position], stack.sin[position], cache, mask, False)
        cache.length, cache.first = cache.length + count, 0
        logits, states = self._network.outputs(hidden, None, None)
        return logits[None], states[None]

    def keep(self, lengths: Sequence[int], slots: Sequence[Sequence[int]] | None = None) -> None:
        offset = self.cache.offset
        self.cache.keep(lengths[0] - offset, [slot - offset for slot in slots[0]] if slots else ())

    def make_room(self, unread: int, room: int) -> int:
        """Make room (`KVCache.make_room`)."""
        return self.cache.make_room(self.stack.reach, unread, room)

    def select(self, rows: Sequence[int]) -> None:
        assert list(rows) in ([], [0])


class ManyRows:
    """Several rows that read a prompt and then a token each; or one, of chains and trees, with static shapes.

    Rows are padded to a common width. With static shapes CUDA replays graphs. Inputs past the capacity are harmless,
    and their outputs undefined.
    """

    def __init__(self, network: Network, rows: int, capacity: int, static: bool):
        self._network, self._stack, self.static, self.most_rows = network, network.stack, static, rows
        self.aux_layers = network.aux_layers
        # At least one slot more, for inputs past the capacity, which padding has.
        slots = -(-(capacity + 1) // ALIGNMENT) * ALIGNMENT
        self._cache = RowsCache(self._stack.new_slots(rows, slots), capacity)
        self._slots = torch.arange(slots, device=self._stack.device)
        # Filled slots of each row. The position of the first slot, where a window let go what stood before it.
        self._filled, self._offset = [0] * rows, 0
        self._chains, self._tree = Graphed(self._read_chains), Graphed(self._read_tree)

    @property
    def lengths(self) -> Sequence[int]:
        return [filled + self._offset for filled in self._filled]

    def reset(self, rows: int) -> None:
        self._filled, self._offset = [0] * rows, 0
        self._cache.wipe(0, rows)

    @torch.inference_mode()
    def prefill(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor:
        """Read prompts in these rows, in groups of similar length; the rows may hold earlier sequences.

        Returns the logits [R, V] of their last tokens.
        """
        counts, device = list(map(len, prompts)), self._stack.device
        for row, count in zip(rows, counts, strict=True):
            self._filled[row : row + 1] = [count]
            self._cache.wipe(row, row + 1)
        logits: dict[int, Tensor] = {}
        for group in group_by_length(counts, *GROUPS.get(device.type, GROUPS["cuda"])):
            if len(group) == 1:
                logits[group[0]] = self._alone(rows[group[0]], (prompts[group[0]],), 0, None, 1).logits[0]
                continue
            # Padding stands behind its prompt, where neither the prompt nor what follows it looks.
            ids = to_device(_padded([prompts[i] for i in group], counts[group[0]]), device)
            last = to_device([[counts[i] - 1] for i in group], device)
            cache = self._cache.prompts([rows[i] for i in group])
            with any_shape(device):
                read, _ = self._network.outputs(self._stack.chain(self._network.inputs(ids), cache), last, None)
            logits |= dict(zip(group, read, strict=True))
        return torch.cat([logits[i] for i in range(len(rows))])

    @torch.inference_mode()
    def extend(
        self, tokens: Any, parents: Parents | None = None, logits_to_keep: int = 1, others: Sequence[Any] = ()
    ) -> Scores:
        inputs, starts = (tokens, *others), self._filled
        counts = [tokens.shape[1]] * len(tokens) if isinstance(tokens, Tensor) else list(map(len, tokens))
        assert len(counts) == 1 or (parents is None and max(counts) <= 1), "several rows read a token each"
        self._filled = list(map(add, starts, counts))
        # Padding a prompt to a static width would cost too much.
        if len(counts) == 1 and (counts[0] > MAX_WIDTH or not starts[0]):
            own = [part[0] for part in inputs]
            return self._alone(0, own, starts[0], parents, logits_to_keep)
        width = max(counts)
        whole = logits_to_keep >= width
        width = bucket(width) if self.static else width
        span = self._span(max(starts) + width)

        # Places of the last logits_to_keep outputs of each row, with any behind them.
        first = [0 if whole else max(count - logits_to_keep, 0) for count in counts]
        places = [[min(own + i, width - 1) for i in range(0 if whole else logits_to_keep)] for own in first]

        # Everything that lies on the host goes to the device in one transfer.
        depths, bias = list[list[int]](), None
        if parents is not None:
            # Of a tree's nodes among each other; padding sees itself only.
            depth, visible = tree_mask([*parents[0], *[-1] * (width - counts[0])], 0, torch.device("cpu"))
            if (window := self._stack.config.sliding_window) is not None:
                visible &= depth[:, None] - depth < window
            depths, bias = [depth.tolist()], to_device(as_bias(visible, self._stack.dtype), self._stack.device)
        fed = [_padded(part, width) for part in inputs]
        on_host = [part for part in fed if not isinstance(part, Tensor)]
        positions = [start + self._offset for start in starts]
        sent = to_device_together([starts, positions, places, depths, *on_host], self._stack.device)
        slot, position, keep, below, *ids = sent
        read = [part if isinstance(part, Tensor) else ids.pop(0) for part in fed]
        if bias is None:
            return Scores(*self._chains(slot, position, keep, *read, static=(span, whole)))
        return Scores(*self._tree(slot, slot, position, below, bias, keep, *read, static=(span, whole)))

    def step(self, *inputs: Any) -> tuple[Tensor, Tensor]:
        tokens, *others = inputs
        logits, states = self.extend(tokens, others=[own[:, None] for own in others])
        return logits[:, 0], states[:, 0]

    def nodes(self, inputs: Sequence[Any], seen: Tensor, depth: int) -> tuple[Tensor, ...]:
        count, width = seen.shape[1:]
        tree, written = self._filled[0] + count - width, self._filled[0]
        self._filled = [written + count]
        bias = F.pad(seen[0], (0, -width % SEEN_BUCKET), value=-torch.inf) if self.static else seen[0]
        host = [[tree], [written], [tree + self._offset]]
        first, slot, position = to_device_together(host, self._stack.device)
        below = torch.full((1, 1), depth - 1, device=self._slots.device)
        # All outputs are wanted, so `keep` is not used: any tensor will do.
        static = self._span(written + count), True
        return self._tree(first, slot, position, below, bias, first, *inputs, static=static)

    def keep(self, lengths: Sequence[int], slots: Sequence[Sequence[int]] | None = None) -> None:
        self._filled = [length - self._offset for length in lengths]
        if not slots:
            return
        (path,), (first,) = slots, self._filled
        # A contiguous path lies in its place already.
        moved = [(0, old - self._offset, new) for new, old in enumerate(path, first) if old - self._offset != new]
        self._filled = [first + len(path)]
        if moved:
            self._cache.move(*to_device(moved, self._stack.device).unbind(1))

    def select(self, rows: Sequence[int]) -> None:
        self._cache.select_rows(rows)
        self._filled = [self._filled[row] for row in rows]

    def make_room(self, unread: int, room: int) -> int:
        cache = self._cache.row(0)
        cache.length, cache.offset = self._filled[0], self._offset
        skipped = cache.make_room(self._stack.reach, unread, room)
        self._filled, self._offset = [cache.length], cache.offset
        return skipped

    def read_masked(self, tokens: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        # Only drafts along a text read masks, in a single row of any shape.
        raise NotImplementedError("several rows, and one of fixed shapes, read no masks")

    def _alone(
        self, row: int, inputs: Sequence[Any], length: int, parents: Parents | None, logits_to_keep: int
    ) -> Scores:
        """Read one row without padding, behind its first `length` slots."""
        alone = OneRow(self._network, self._cache.row(row))
        alone.cache.length, alone.cache.offset = length, self._offset
        with any_shape(self._stack.device):
            tokens, *others = ([part] for part in inputs)
            return alone.extend(tokens, parents, logits_to_keep, others)

    def _read_chains(self, slot: Tensor, position: Tensor, keep: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        """Read inputs into the slots from slot [B] on, at positions from position [B] on; each sees all before it."""
        *inputs, span, whole = rest
        x = self._network.inputs(*inputs)
        own = torch.arange(x.shape[1], device=x.device)
        slots = (slot[:, None] + own).clamp_max(self._cache.capacity)  # [B, n]
        visible = self._slots[:span] <= slots[..., None]  # [B, n, span]
        bias = as_bias(self._near(visible, slots), self._stack.dtype)
        return self._run(x, position[:, None] + own, slots, bias, None if whole else keep)

    def _read_tree(
        self, tree: Tensor, slot: Tensor, position: Tensor, depths: Tensor, among: Tensor, keep: Tensor, *rest: Any
    ) -> tuple[Tensor, Tensor]:
        """Read n inputs into the slots from slot [1] on, of a tree that begins at slot `tree` and position [1].

        Inputs see all slots before the tree, and the tree's m by the bias among [n, m]. depths: [1, n or 1] of their
        positions.
        """
        *inputs, span, whole = rest
        x = self._network.inputs(*inputs)
        count, width = among.shape
        below = depths.expand(1, count)
        slots = (slot[:, None] + torch.arange(count, device=x.device)).clamp_max(self._cache.capacity)
        place = self._slots[:span] - tree  # [span] of the slots in the tree
        own = among.index_select(1, place.clamp(0, width - 1)).masked_fill(place >= width, -torch.inf)  # [n, span]
        before = self._near((place < 0).expand(1, count, -1), tree[:, None] + below)
        bias = torch.where(place < 0, as_bias(before, among.dtype), own)  # [1, n, span]
        return self._run(x, position[:, None] + below, slots, bias, None if whole else keep)

    def _run(
        self, x: Tensor, positions: Tensor, slots: Tensor, bias: Tensor, keep: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run the layers on x [B, n, H] at positions [B, n], into slots [B, n], and return the network's outputs.

        bias: [B, n, span].
        """
        stack, captured = self._stack, to_capture(self._network, x)
        self._cache.place(slots, bias.shape[-1])
        rotated = positions.clamp_max(len(stack.cos) - 1)
        hidden = stack.run(x, stack.cos[rotated], stack.sin[rotated], self._cache, bias[:, None], False, captured)
        return self._network.outputs(hidden, keep, captured)

    def _near(self, visible: Tensor, slots: Tensor) -> Tensor:
        """Apply the sliding window, if there is one, to visible [B, n, span]. slots: [B, n], where inputs stand."""
        window = self._stack.config.sliding_window
        if window is None:
            return visible
        return visible & (self._slots[: visible.shape[-1]] > slots[..., None] - window)

    def _span(self, end: int) -> int:
        """Return how many slots to read if the longest row ends at `end`; with static shapes one of few numbers."""
        return min(SPAN_BUCKET * bucket(-(-end // SPAN_BUCKET)) if self.static else end, len(self._slots))


def _padded(part: Any, width: int) -> Tensor | list[list[int]]:
    """Pad inputs to [B, width, ..]: lists of ids, a tensor [B, n, ..], or a list of the tensor [n, ..] of one row."""
    if not isinstance(part, Tensor) and not isinstance(part[0], Tensor):
        return [[*ids, *[0] * (width - len(ids))] for ids in part]
    rows = part if isinstance(part, Tensor) else part[0][None]
    missing = width - rows.shape[1]
    return F.pad(rows, [0, 0] * (rows.dim() - 2) + [0, missing]) if missing else rows


def bucket(count: int) -> int:
    """Return the power of two that inputs are padded to."""
    return 1 << (count - 1).bit_length()


def cached_rows(network: Network, rows: int, capacity: int, static: bool | None) -> OneRow | ManyRows:
    """Allocate rows of at most `capacity` slots. static: fixed shapes; None: on CUDA only."""
    static = network.stack.device.type == "cuda" if static is None else static
    if static or rows > 1:
        return ManyRows(network, rows, capacity, static)
    return OneRow(network, network.stack.new_cache(1, capacity))
