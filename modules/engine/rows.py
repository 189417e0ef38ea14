"""Cached sequences for lean layers: a single row with its slots in order, or several rows of different lengths.

Both run a `Network`, so that a target, a draft model and a draft head share them, and have the methods of
`targets.base.Session`. Inputs come as a tuple of sequences with an item for each row: lists of ids, lists of tensors
[T, ..], or a tensor [B, n, ..]. B rows, n inputs of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import add, itemgetter, sub
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

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

    static = False

    def __init__(self, network: Network, cache: KVCache):
        self._network, self.stack, self.cache = network, network.stack, cache

    @property
    def lengths(self) -> Sequence[int]:
        return [self.cache.offset + self.cache.length]

    def reset(self, rows: int) -> None:
        assert rows <= 1
        self.cache.keep(0)
        self.cache.offset = 0

    def begin(self, row: int) -> None:
        self.reset(row + 1)

    def prefill(self, rows: Sequence[int], inputs: Sequence[Any]) -> tuple[Tensor, ...]:
        self.reset(len(rows))
        return self.extend(inputs)

    def extend(
        self, inputs: Sequence[Any], parents: Parents | None = None, logits_to_keep: int = 1
    ) -> tuple[Tensor, ...]:
        own = list(map(itemgetter(0), inputs))
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
        return logits[None], states[None]

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

    def make_room(self, row: int, unread: int, room: int) -> int:
        """Make room in a row (`KVCache.make_room`)."""
        return self.cache.make_room(self.stack.config.sliding_window, unread, room)

    def select(self, rows: Sequence[int]) -> None:
        assert list(rows) in ([], [0])


class ManyRows:
    """Several rows of different lengths, or one with static shapes.

    Rows are padded to the widest. With static shapes CUDA replays graphs. Inputs past the capacity are harmless, and
    their outputs undefined.
    """

    def __init__(self, network: Network, rows: int, capacity: int, static: bool):
        self._network, self._stack, self.static = network, network.stack, static
        # At least one slot more, for inputs past the capacity, which rows padded to a common width have.
        slots = -(-(capacity + 1) // ALIGNMENT) * ALIGNMENT
        self._cache = RowsCache(self._stack.new_slots(rows, slots), capacity)
        self._slots = torch.arange(slots, device=self._stack.device)
        # Of each row: filled slots, and the position of the first one (`make_room`).
        self._filled, self._offsets = [0] * rows, [0] * rows
        self._chains, self._trees = Graphed(self._read_chains), Graphed(self._read_trees)

    @property
    def lengths(self) -> Sequence[int]:
        return list(map(add, self._filled, self._offsets))

    def reset(self, rows: int) -> None:
        self._filled, self._offsets = [0] * rows, [0] * rows
        self._cache.wipe(0, rows)

    def begin(self, row: int) -> None:
        assert row <= len(self._filled)
        self._filled[row : row + 1], self._offsets[row : row + 1] = [0], [0]
        self._cache.wipe(row, row + 1)

    def prefill(self, rows: Sequence[int], inputs: Sequence[Any]) -> tuple[Tensor, ...]:
        for row in rows:
            self.begin(row)
        for row, own in zip(rows, inputs[0], strict=True):
            self._filled[row] = len(own)
        return _side_by_side(self._prompts(rows, inputs))

    def extend(
        self, inputs: Sequence[Any], parents: Parents | None = None, logits_to_keep: int = 1
    ) -> tuple[Tensor, ...]:
        lengths, tokens = self._filled, inputs[0]
        counts = [tokens.shape[1]] * len(tokens) if isinstance(tokens, Tensor) else list(map(len, tokens))
        self._filled = list(map(add, lengths, counts))
        # Prompts are read alone: they would pad the other rows far too much.
        long = [count > MAX_WIDTH or (count > 0 and not length) for length, count in zip(lengths, counts, strict=True)]
        if isinstance(tokens, Tensor) or not any(long):
            return self._together(inputs, lengths, parents, logits_to_keep)
        outputs: list[Any] = [None] * len(counts)
        if any(count and not alone for count, alone in zip(counts, long, strict=True)):
            short = [[own[:0] if alone else own for own, alone in zip(part, long, strict=True)] for part in inputs]
            above = parents and [[] if alone else own for own, alone in zip(parents, long, strict=True)]
            # Before the prompts, which overwrite the padding of their rows.
            outputs = list(zip(*self._together(short, lengths, above, logits_to_keep), strict=True))
        prompts = [row for row, alone in enumerate(long) if alone and not lengths[row] and logits_to_keep == 1]
        read = self._prompts(prompts, [[part[row] for row in prompts] for part in inputs])
        for row, output in zip(prompts, read, strict=True):
            outputs[row], long[row] = output, False
        for row, alone in enumerate(long):
            if alone:
                above = parents and parents[row : row + 1]
                outputs[row] = self._alone(row, [part[row] for part in inputs], lengths[row], above, logits_to_keep)
        some = next(output for output in outputs if output is not None)
        return _side_by_side([output or [part[:0] for part in some] for output in outputs])

    def step(self, *inputs: Any) -> tuple[Tensor, Tensor]:
        tokens, *others = inputs
        logits, states = self.extend((tokens, *(own[:, None] for own in others)))
        return logits[:, 0], states[:, 0]

    def nodes(self, inputs: Sequence[Any], seen: Tensor, depth: int) -> tuple[Tensor, ...]:
        count, width = seen.shape[1:]
        starts = [length + count - width for length in self._filled]
        fresh, self._filled = self._filled, [length + count for length in self._filled]
        span = self._span(max(self._filled))
        if self.static:
            seen = F.pad(seen, (0, -width % SEEN_BUCKET), value=-torch.inf)
        depths = torch.full((1, 1), depth - 1, device=self._slots.device)
        positions = list(map(add, starts, self._offsets))
        first, behind, turned = to_device_together([starts, fresh, positions], self._stack.device)
        # All outputs are wanted, so `keep` is not used: any tensor will do.
        return self._trees(first, behind, turned, depths, seen, first, *inputs, static=(span, True))

    def keep(self, lengths: Sequence[int], slots: Sequence[Sequence[int]] | None = None) -> None:
        moved = []
        self._filled = list(map(sub, lengths, self._offsets))
        for row, path in enumerate(slots or ()):
            first, offset = self._filled[row], self._offsets[row]
            # A contiguous path lies in its place already.
            moved += [(row, old - offset, first + i) for i, old in enumerate(path) if old - offset != first + i]
            self._filled[row] += len(path)
        if moved:
            self._cache.move(*to_device(moved, self._stack.device).unbind(1))

    def select(self, rows: Sequence[int]) -> None:
        self._cache.select_rows(torch.tensor(rows))
        self._filled, self._offsets = ([part[row] for row in rows] for part in (self._filled, self._offsets))

    def make_room(self, row: int, unread: int, room: int) -> int:
        cache = self._cache.row(row)
        cache.length, cache.offset = self._filled[row], self._offsets[row]
        skipped = cache.make_room(self._stack.config.sliding_window, unread, room)
        self._filled[row], self._offsets[row] = cache.length, cache.offset
        return skipped

    def _prompts(self, rows: Sequence[int], inputs: Sequence[Any]) -> list[tuple[Tensor, Tensor]]:
        """Read the prompts of empty rows, in groups of like lengths. Returns the last logits [1, V] and the states of
        each."""
        counts, device = [len(own) for own in inputs[0]], self._stack.device
        outputs: dict[int, tuple[Tensor, Tensor]] = {}
        groups = group_by_length(counts, *GROUPS.get(device.type, GROUPS["cuda"]))
        if any(self._offsets[row] for row in rows):
            # They stand at positions of their own.
            groups = [[i] for i in range(len(rows))]
        for group in groups:
            own = [[part[i] for i in group] for part in inputs]
            if len(group) == 1:
                logits, states = self._alone(rows[group[0]], [part[0] for part in own], 0, None, 1)
                outputs[group[0]] = logits, states
                continue
            # Padding stands behind its prompt, where neither the prompt nor what follows it looks.
            fed = [to_device(_padded(part, counts[group[0]]), device) for part in own]
            last = to_device([[counts[i] - 1] for i in group], device)
            cache = self._cache.prompts([rows[i] for i in group])
            with any_shape(device):
                x = self._network.inputs(*fed)
                captured = to_capture(self._network, x)
                read = self._network.outputs(self._stack.chain(x, cache, captured), last, captured)
            outputs |= {i: (logits, states[: counts[i]]) for i, logits, states in zip(group, *read, strict=True)}
        return [outputs[i] for i in range(len(rows))]

    def _alone(
        self, row: int, inputs: Sequence[Any], length: int, parents: Parents | None, logits_to_keep: int
    ) -> tuple[Tensor, ...]:
        """Read one row without padding, behind its first `length` slots. inputs, parents: of this row."""
        alone = OneRow(self._network, self._cache.row(row))
        alone.cache.length, alone.cache.offset = length, self._offsets[row]
        with any_shape(self._stack.device):
            logits, states = alone.extend([[part] for part in inputs], parents, logits_to_keep)
        return logits[0], states[0]

    def _together(
        self, inputs: Sequence[Any], lengths: Sequence[int], parents: Parents | None, logits_to_keep: int
    ) -> tuple[Tensor, ...]:
        """Read all rows side by side. lengths: slots of each row before this call."""
        counts = [len(row) for row in inputs[0]]
        width = max(counts)
        whole = logits_to_keep >= width
        width = bucket(width) if self.static else width

        # Places of the last logits_to_keep outputs of each row; in shorter rows they are followed by any others.
        first = [0 if whole else max(count - logits_to_keep, 0) for count in counts]
        places = [[min(i + own, width - 1) for i in range(0 if whole else logits_to_keep)] for own in first]

        # Everything that lies on the host goes to the device in one transfer.
        fed = [_padded(part, width) for part in inputs]
        below, seen = list[list[int]](), None
        if parents is not None:
            # Depths [B, width], and the bias [B, width, width] among a tree's nodes; padding sees itself only.
            masks = [tree_mask([*own, *[-1] * (width - len(own))], 0, torch.device("cpu")) for own in parents]
            depths, visible = (torch.stack(parts) for parts in zip(*masks, strict=True))
            window = self._stack.config.sliding_window
            if window is not None:
                visible &= depths[:, :, None] - depths[:, None] < window
            below, seen = depths.tolist(), to_device(as_bias(visible, self._stack.dtype), self._stack.device)
        on_host = [part for part in fed if not isinstance(part, Tensor)]
        positions = list(map(add, lengths, self._offsets))
        on_host = [lengths, positions, places, below, *on_host]
        starts, turned, keep, depths, *ids = to_device_together(on_host, self._stack.device)
        fed = [part if isinstance(part, Tensor) else ids.pop(0) for part in fed]

        static = (self._span(max(lengths) + width), whole)
        if seen is None:
            return self._chains(starts, turned, keep, *fed, static=static)
        return self._trees(starts, starts, turned, depths, seen, keep, *fed, static=static)

    def _read_chains(self, starts: Tensor, turned: Tensor, keep: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        """Read inputs into the slots from starts [B] on, at positions from turned [B] on, which see all before them."""
        *inputs, span, whole = rest
        x = self._network.inputs(*inputs)
        own = torch.arange(x.shape[1], device=x.device)
        slots = (starts[:, None] + own).clamp_max(self._cache.capacity)  # [B, n]
        visible = self._slots[:span] <= slots[..., None]  # [B, n, span]
        bias = as_bias(self._near(visible, slots), self._stack.dtype)
        return self._run(x, turned[:, None] + own, slots, bias, None if whole else keep)

    def _read_trees(
        self, starts: Tensor, fresh: Tensor, turned: Tensor, depths: Tensor, seen: Tensor, keep: Tensor, *rest: Any
    ) -> tuple[Tensor, Tensor]:
        """Read inputs into the slots from fresh [B] on; trees begin at slots starts [B], at positions turned [B].

        Inputs see all slots before the tree, and the tree's by the bias seen [B, n, m]. depths: [B or 1, n or 1] of
        their positions behind starts.
        """
        *inputs, span, whole = rest
        x = self._network.inputs(*inputs)
        count, width = seen.shape[1:]
        below = depths.expand(len(starts), count)
        slots = (fresh[:, None] + torch.arange(count, device=x.device)).clamp_max(self._cache.capacity)
        place = (self._slots[:span] - starts[:, None])[:, None]  # [B, 1, span] of the slots in the tree
        own = seen.gather(2, place.clamp(0, width - 1).expand(-1, count, -1))
        own = own.masked_fill(place >= width, -torch.inf)
        kept = as_bias(self._near(place.expand(-1, count, -1) < 0, starts[:, None] + below), seen.dtype)
        bias = torch.where(place < 0, kept, own)  # [B, n, span]
        return self._run(x, turned[:, None] + below, slots, bias, None if whole else keep)

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


def _padded(part: Any, width: int) -> Any:
    """Pad one of the inputs to [B, width, ..]: a tensor, or lists of ids."""
    if not isinstance(part, Tensor):
        if not isinstance(part[0], Tensor):
            return [[*ids, *[0] * (width - len(ids))] for ids in part]
        part = pad_sequence(list(part), batch_first=True)
    missing = width - part.shape[1]
    return F.pad(part, [0, 0] * (part.dim() - 2) + [0, missing]) if missing else part


def _side_by_side(outputs: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    """Stack logits and states of rows, with zeros behind the shorter ones."""
    return tuple(pad_sequence(list(part), batch_first=True) for part in zip(*outputs, strict=True))


def bucket(count: int) -> int:
    """Return the power of two that inputs are padded to."""
    return 1 << (count - 1).bit_length()


def cached_rows(network: Network, rows: int, capacity: int, static: bool | None) -> OneRow | ManyRows:
    """Allocate rows of at most `capacity` slots. static: fixed shapes; None: on CUDA only."""
    static = network.stack.device.type == "cuda" if static is None else static
    if static or rows > 1:
        return ManyRows(network, rows, capacity, static)
    return OneRow(network, network.stack.new_cache(1, capacity))
