"""Rows of cached sequences that lean layers read on: a single one as it lies, or several of lengths of their own.

Both are driven by a `Forward`, which gives the layers what they read and makes logits of what they give, so that a
target, a draft model and a head that drafts share all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftsmith.modules.engine.attention import ALIGNMENT
from draftsmith.modules.engine.cache import KVCache, RowsCache
from draftsmith.modules.engine.graphs import Graphed
from draftsmith.modules.engine.lean import LeanStack, Taps, as_bias, tree_mask
from draftsmith.modules.engine.ragged import Ragged
from draftsmith.modules.transfer import to_device, to_device_together

SPAN_BUCKET = 256  # slots that are looked at are this times a power of two where shapes are to recur
SEEN_BUCKET = 64  # slots of a tree's own, where shapes are to recur
MAX_WIDTH = 256  # what is longer is a prompt, and read without padding
MOST_THERE = 0.7  # of the inputs of padded rows: with more of them, leaving padding out takes longer than reading it

Run = Callable[..., Tensor]
Parents = Sequence[Sequence[int]]


class Forward(Protocol):
    """The computation around the layers.

    run(x, taps=None): the layers over inputs x [T, H] of one row or [B, n, H], `LeanStack.run`'s output and taps.
    picked: which outputs are asked for, as `picked_of` takes it. inputs: of one row a list or a tensor [T, ..], and so
    of several that are laid out one behind the other, else [B, n, ..].
    Returns logits of what is picked, and states: of what is picked, or of all.
    """

    def __call__(self, run: Run, picked: Tensor | slice | None, *inputs: Any) -> tuple[Tensor, Tensor]:
        """The logits and the states."""


def picked_of(hidden: Tensor, picked: Tensor | slice | None) -> Tensor:
    """A slice of hidden [T, H], or those at picked [B, m], or those of [B, n, H] at picked [B, m]; None picks all."""
    if picked is None:
        return hidden
    if isinstance(picked, slice) or hidden.dim() == 2:
        return hidden[picked]
    return hidden.gather(1, picked[..., None].expand(-1, -1, hidden.shape[-1]))


class CachedRows(Protocol):
    """What layers have read of each row: `lengths[b]` kept slots.

    Inputs of rows are sequences of what each row is fed: lists of ids, lists of tensors [T, ..], or a tensor
    [B, n, ..].
    """

    static: bool

    @property
    def lengths(self) -> Sequence[int]:
        """Kept slots of each row; what `extend` and `nodes` read is kept until `keep` says otherwise."""

    def reset(self, rows: int) -> None:
        """Forget everything: so many empty rows."""

    def begin(self, row: int) -> None:
        """Forget this row alone, or go on with one more, which is empty: the one behind those in use."""

    def prefill(self, rows: Sequence[int], inputs: Sequence[Any]) -> tuple[Tensor, ...]:
        """`begin` these rows and read what they are fed: the last logits [len(rows), 1, V] and all states, of them
        alone."""

    def extend(self, inputs: Sequence[Any], parents: Parents | None = None, num_logits: int = 1) -> tuple[Tensor, ...]:
        """What `targets.base.Session.extend` does, by the forward: its logits [B, num_logits, V] and states."""

    def step(self, *inputs: Any) -> tuple[Tensor, Tensor]:
        """`extend` by one input a row, or none: logits [B, V] and states [B, F], which mean nothing of rows fed none.

        inputs: the first one a list of one or none a row, or a tensor [B, 1]; the others [B, ..].
        """

    def nodes(self, inputs: Sequence[Any], seen: Tensor, depth: int) -> tuple[Tensor, ...]:
        """Read n nodes a row, inputs [B, n, ..], behind m others of the same trees: logits [B, n, V] and states.

        seen: [B, n, m + n], added to scores: 0 where a node sees one of the m + n, which are the last m kept slots of
        each row and its own. All see what precedes those; their position is that of the first of the m, and depth - 1.
        """

    def keep(self, lengths: Sequence[int], slots: Sequence[Sequence[int]] | None = None) -> None:
        """Keep each row's first slots and those at `slots`, moved to follow them."""

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, in this order: place i gets one that is not before it."""


def cached_rows(stack: LeanStack, forward: Forward, rows: int, capacity: int, static: bool | None) -> CachedRows:
    """static: None takes fixed shapes on CUDA only."""
    static = stack.device.type == "cuda" if static is None else static
    return ManyRows(stack, forward, rows, capacity, static) if static or rows > 1 else OneRow(stack, forward, capacity)


class OneRow:
    """A single row, whose slots lie in order: nothing is padded and nothing looked up."""

    static = False

    def __init__(self, stack: LeanStack, forward: Forward, capacity: int):
        self.stack, self._forward = stack, forward
        self.cache = stack.new_cache(1, capacity)

    @property
    def lengths(self) -> Sequence[int]:
        return [self.cache.length]

    def reset(self, rows: int) -> None:
        assert rows <= 1
        self.cache.keep(0)

    def begin(self, row: int) -> None:
        self.reset(row + 1)

    def prefill(self, rows: Sequence[int], inputs: Sequence[Any]) -> tuple[Tensor, ...]:
        self.reset(len(rows))
        return self.extend(inputs)

    def extend(self, inputs: Sequence[Any], parents: Parents | None = None, num_logits: int = 1) -> tuple[Tensor, ...]:
        count = len(inputs[0][0])
        found = _read_on(self.stack, self.cache, self._forward, [own[0] for own in inputs], parents, num_logits)
        self.cache.length += count
        return found[0][None], found[1][None]

    def step(self, *inputs: Any) -> tuple[Tensor, Tensor]:
        tokens, *others = inputs  # of a single row [1, ..] is both what it is fed, and a row for each
        found = self._forward(partial(self.stack.chain, cache=self.cache), None, tokens[0], *others)
        self.cache.length += 1
        return found

    def nodes(self, inputs: Sequence[Any], seen: Tensor, depth: int) -> tuple[Tensor, ...]:
        stack, cache, count = self.stack, self.cache, seen.shape[1]
        before = cache.length + count - seen.shape[2]
        position = before + depth - 1
        cos, sin, mask = stack.cos[position], stack.sin[position], F.pad(seen[0], (before, 0))

        def run(x: Tensor, taps: Taps | None = None) -> Tensor:
            return stack.run(x, cos, sin, cache, mask, False, taps)

        logits, states = self._forward(run, None, *(own[0] for own in inputs))
        cache.length += count
        return logits[None], states[None]

    def keep(self, lengths: Sequence[int], slots: Sequence[Sequence[int]] | None = None) -> None:
        self.cache.keep(lengths[0], slots[0] if slots else ())

    def select(self, rows: Sequence[int]) -> None:
        assert list(rows) in ([], [0])


def _read_on(
    stack: LeanStack,
    cache: KVCache,
    forward: Forward,
    inputs: Sequence[Any],
    parents: Parents | None,
    num_logits: int,
) -> tuple[Tensor, Tensor]:
    """What a forward gives of T inputs of one row that go on after its kept slots, as they lie. parents: of one row."""
    count = len(inputs[0])
    picked = None if num_logits >= count else slice(count - num_logits, count)
    if parents is None:
        return forward(partial(stack.chain, cache=cache), picked, *inputs)
    return forward(partial(stack.tree, parents=parents[0], cache=cache), picked, *inputs)


def _padded(rows: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    """Logits and states of rows as tensors; behind the shorter ones are zeros."""
    return tuple(pad_sequence(list(part), batch_first=True) for part in zip(*rows, strict=True))


class ManyRows:
    """Several rows, each of its own length, padded to the widest, or where padding is much laid out one behind the
    other; or one where shapes are to recur.

    On CUDA static rows are read by graphs. Inputs past the capacity are harmless, and their outputs void.
    """

    def __init__(self, stack: LeanStack, forward: Forward, rows: int, capacity: int, static: bool):
        self._stack, self._forward, self.static, self._capacity = stack, forward, static, capacity
        # One slot more at least, for the inputs past the capacity: rows padded to a common width have them.
        slots = -(-(capacity + 1) // ALIGNMENT) * ALIGNMENT
        self._cache = RowsCache(stack.new_slots(rows, slots))
        self._slots = torch.arange(slots, device=stack.device)
        self.lengths = [0] * rows
        self._chains, self._trees = Graphed(self._read_chains), Graphed(self._read_trees)

    def reset(self, rows: int) -> None:
        self.lengths = [0] * rows
        self._cache.wipe(0, rows)

    def begin(self, row: int) -> None:
        assert row <= len(self.lengths)
        self.lengths[row : row + 1] = [0]
        self._cache.wipe(row, row + 1)

    def prefill(self, rows: Sequence[int], inputs: Sequence[Any]) -> tuple[Tensor, ...]:
        found = []
        for place, row in enumerate(rows):
            self.begin(row)
            found.append(self._alone(row, [given[place] for given in inputs], 0, None, 1))
            self.lengths[row] = len(inputs[0][place])
        return _padded(found)

    def extend(self, inputs: Sequence[Any], parents: Parents | None = None, num_logits: int = 1) -> tuple[Tensor, ...]:
        counts, lengths = [len(row) for row in inputs[0]], self.lengths
        self.lengths = [length + count for length, count in zip(lengths, counts, strict=True)]
        # Prompts, which would pad the others far too much.
        long = [count > MAX_WIDTH or (count > 0 and not length) for length, count in zip(lengths, counts, strict=True)]
        if not any(long):
            return self._together(inputs, lengths, parents, num_logits)
        found: list[Any] = [None] * len(counts)
        if any(count and not alone for count, alone in zip(counts, long, strict=True)):
            short = [[own[:0] if alone else own for own, alone in zip(given, long, strict=True)] for given in inputs]
            above = parents and [[] if alone else own for own, alone in zip(parents, long, strict=True)]
            # Before the prompts: what pads their rows is overwritten by them.
            found = list(zip(*self._together(short, lengths, above, num_logits), strict=True))
        for row, alone in enumerate(long):
            if alone:
                above = parents and parents[row : row + 1]
                found[row] = self._alone(row, [given[row] for given in inputs], lengths[row], above, num_logits)
        some = next(scores for scores in found if scores is not None)
        return _padded([scores or [part[:0] for part in some] for scores in found])

    def _together(
        self, inputs: Sequence[Any], lengths: Sequence[int], parents: Parents | None, num_logits: int
    ) -> tuple[Tensor, ...]:
        """All rows side by side. lengths: of what they have read."""
        counts = [len(row) for row in inputs[0]]
        wide, total = max(counts), sum(counts)
        width = bucket(wide) if self.static else wide
        ragged = None
        if not self.static and total <= MOST_THERE * wide * len(counts):
            ragged = Ragged(counts, self._stack.device)
        whole = num_logits >= wide
        places: list[list[int]] = []
        if not whole:  # of every row the last outputs, and whatever follows where it has fewer
            begun = [0] * len(counts) if ragged is None else [0, *accumulate(counts[:-1])]
            end = (width if ragged is None else total) - 1
            first = [start + max(count - num_logits, 0) for start, count in zip(begun, counts, strict=True)]
            places = [[min(i + own, end) for i in range(num_logits)] for own in first]
        fed = [self._batched(own, width) if ragged is None else _laid_out(own, ragged) for own in inputs]
        below, seen = ([], None) if parents is None else self._tree_inputs(parents, width)
        starts, picked, depths, *ids = self._upload(lengths, places, below, *(own for own in fed if _is_host(own)))
        fed = [ids.pop(0) if _is_host(own) else own for own in fed]
        static = (ragged, self._span(max(lengths) + width), whole)
        if seen is None:
            found = self._chains(starts, picked, *fed, static=static)
        else:
            found = self._trees(starts, starts, depths, seen, picked, *fed, static=static)
        return found if ragged is None else tuple(ragged.spread(part) if part.dim() == 2 else part for part in found)

    def step(self, *inputs: Any) -> tuple[Tensor, Tensor]:
        tokens, *others = inputs
        logits, states = self.extend((tokens, *(own[:, None] for own in others)))
        return logits[:, 0], states[:, 0]

    def nodes(self, inputs: Sequence[Any], seen: Tensor, depth: int) -> tuple[Tensor, ...]:
        count, width = seen.shape[1:]
        starts = [length + count - width for length in self.lengths]
        fresh, self.lengths = self.lengths, [length + count for length in self.lengths]
        span = self._span(max(self.lengths))
        if self.static:
            seen = F.pad(seen, (0, -width % SEEN_BUCKET), value=-torch.inf)
        depths = torch.full((1, 1), depth - 1, device=self._slots.device)
        first, behind = self._upload(starts, fresh)
        # Everything is picked: any tensor will do in the place of what is.
        return self._trees(first, behind, depths, seen, first, *inputs, static=(None, span, True))

    def keep(self, lengths: Sequence[int], slots: Sequence[Sequence[int]] | None = None) -> None:
        moved = []
        self.lengths = list(lengths)
        for row, path in enumerate(slots or ()):
            first = lengths[row]
            # A contiguous path lies in its place already.
            moved += [(row, old, first + i) for i, old in enumerate(path) if old != first + i]
            self.lengths[row] += len(path)
        if moved:
            self._cache.move(*self._upload(moved)[0].unbind(1))

    def select(self, rows: Sequence[int]) -> None:
        self._cache.select_rows(torch.tensor(rows))
        self.lengths = [self.lengths[row] for row in rows]

    def _alone(
        self, row: int, inputs: Sequence[Any], length: int, parents: Parents | None, num_logits: int
    ) -> tuple[Tensor, Tensor]:
        """A row as it lies, after its first `length` slots. inputs, parents: its own."""
        cache = self._cache.row(row)
        cache.length = length
        return _read_on(self._stack, cache, self._forward, inputs, parents, num_logits)

    def _read_chains(self, starts: Tensor, picked: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        """Inputs at the positions from starts [B] on, seeing what precedes them."""
        *inputs, ragged, span, whole = rest

        def run(x: Tensor, taps: Taps | None = None) -> Tensor:
            count = x.shape[1] if ragged is None else ragged.width
            positions = starts[:, None] + torch.arange(count, device=x.device)
            positions = positions.clamp_max(self._capacity)
            visible = self._slots[:span] <= positions[..., None]
            return self._run(x, positions, positions, self._near(visible, positions), ragged, taps)

        return self._forward(run, None if whole else picked, *inputs)

    def _read_trees(
        self, starts: Tensor, fresh: Tensor, depths: Tensor, seen: Tensor, picked: Tensor, *rest: Any
    ) -> tuple[Tensor, Tensor]:
        """Inputs in slots from fresh [B] on, which see all slots before starts [B], and of those from there on what
        seen [B, n, m] says, which is added to scores. depths: [B or 1, n or 1] of their positions behind starts."""
        *inputs, ragged, span, whole = rest

        def run(x: Tensor, taps: Taps | None = None) -> Tensor:
            count, width = seen.shape[1:]
            positions = (starts[:, None] + depths).expand(-1, count)
            slots = fresh[:, None] + torch.arange(count, device=x.device)
            place = (self._slots[:span] - starts[:, None])[:, None]  # [B, 1, span] of the slots in the tree
            own = seen.gather(2, place.clamp(0, width - 1).expand(-1, count, -1))
            own = own.masked_fill(place >= width, -torch.inf)
            kept = as_bias(self._near(place.expand(-1, count, -1) < 0, positions), seen.dtype)
            slots = slots.clamp_max(self._capacity)
            return self._run(x, positions, slots, torch.where(place < 0, kept, own), ragged, taps)

        return self._forward(run, None if whole else picked, *inputs)

    def _run(
        self, x: Tensor, positions: Tensor, slots: Tensor, mask: Tensor, ragged: Ragged | None, taps: Taps | None
    ) -> Tensor:
        """x [B, n, H], or ragged [N, H], at positions [B, n], written to slots [B, n]; mask [B, n, span]."""
        stack = self._stack
        self._cache.place(slots, mask.shape[-1], ragged)
        rotated = positions.clamp_max(len(stack.cos) - 1)
        if ragged is not None:
            rotated = ragged.pack(rotated)[None]
        bias = as_bias(mask, stack.dtype) if mask.dtype == torch.bool else mask
        return stack.run(x, stack.cos[rotated], stack.sin[rotated], self._cache, bias[:, None], False, taps)

    def _near(self, visible: Tensor, positions: Tensor) -> Tensor:
        """visible [B, n, span], within the sliding window where there is one."""
        window = self._stack.config.sliding_window
        if window is None:
            return visible
        return visible & (self._slots[: visible.shape[-1]] > positions[..., None] - window)

    def _tree_inputs(self, parents: Parents, width: int) -> tuple[list[list[int]], Tensor]:
        """Depths [B, width], and on the device what trees see of themselves [B, width, width]; padding sees itself
        alone."""
        made = [tree_mask([*own, *[-1] * (width - len(own))], 0, torch.device("cpu")) for own in parents]
        depths, visible = (torch.stack(parts) for parts in zip(*made, strict=True))
        window = self._stack.config.sliding_window
        if window is not None:
            visible &= depths[:, :, None] - depths[:, None] < window
        return depths.tolist(), to_device(as_bias(visible, self._stack.dtype), self._stack.device)

    def _batched(self, own: Any, width: int) -> Any:
        """What the rows are fed, [B, width, ..]: a tensor, or lists of ids."""
        if not isinstance(own, Tensor):
            if not isinstance(own[0], Tensor):
                return [[*ids, *[0] * (width - len(ids))] for ids in own]
            own = pad_sequence(list(own), batch_first=True)
        missing = width - own.shape[1]
        return F.pad(own, [0, 0] * (own.dim() - 2) + [0, missing]) if missing else own

    def _span(self, end: int) -> int:
        """Slots to look at where the longest row ends at `end`: one of few numbers, where shapes are to recur."""
        return min(SPAN_BUCKET * bucket(-(-end // SPAN_BUCKET)) if self.static else end, len(self._slots))

    def _upload(self, *values: Any) -> list[Tensor]:
        return to_device_together(values, self._stack.device)


def _laid_out(own: Any, ragged: Ragged) -> Any:
    """What the rows are fed, one behind the other: a list of ids, or a tensor [N, ..]."""
    if isinstance(own, Tensor):
        return ragged.pack(own)
    return torch.cat(list(own)) if isinstance(own[0], Tensor) else [token for ids in own for token in ids]


def _is_host(own: Any) -> bool:
    """Ids that are not on a device yet."""
    return not isinstance(own, Tensor)


def bucket(count: int) -> int:
    """The power of two that inputs are padded to."""
    return 1 << (count - 1).bit_length()
