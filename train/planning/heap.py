"""What a process on a CPU keeps of the memory that it frees: the C library's malloc, as far as large blocks go."""

from __future__ import annotations

from bisect import insort

# glibc: larger blocks are mapped and go back to the system when they are freed. The bound follows the largest mapped
# block that was freed, up to a most; free memory at the heap's end goes back from twice as much on.
FIRST_BOUND, LAST_BOUND = 128 * 2**10, 32 * 2**20


class Heap:
    """Places of blocks that are not mapped, best fit first (malloc(3), mallopt(3)).

    end: bytes of the heap, which are in memory whether they are in use or not. used: those in use.
    """

    def __init__(self) -> None:
        self.end, self.used = 0, 0
        self._bound = FIRST_BOUND
        self._holes: list[tuple[int, int]] = []  # (start, stop), ascending and apart

    def take(self, size: int) -> int | None:
        """Where a new block begins; None where it is mapped."""
        if size >= self._bound:
            return None
        self.used += size
        fitting = [(stop - start, start) for start, stop in self._holes if stop - start >= size]
        if fitting:
            _, start = min(fitting)
            place = next(i for i, hole in enumerate(self._holes) if hole[0] == start)
            stop = self._holes[place][1]
            self._holes[place : place + 1] = [(start + size, stop)] if stop - start > size else []
            return start
        start = self.end
        if self._holes and self._holes[-1][1] == self.end:  # the heap grows by what its end lacks
            start = self._holes.pop()[0]
        self.end = start + size
        return start

    def give(self, start: int | None, size: int) -> None:
        """Free a block that `take` placed."""
        if start is None:
            if size <= LAST_BOUND:
                self._bound = max(self._bound, size)
            return
        self.used -= size
        insort(self._holes, (start, start + size))
        place = self._holes.index((start, start + size))
        low, high = max(place - 1, 0), place + 2
        joined: list[tuple[int, int]] = []
        for hole in self._holes[low:high]:
            if joined and joined[-1][1] == hole[0]:
                joined[-1] = joined[-1][0], hole[1]
            else:
                joined.append(hole)
        self._holes[low:high] = joined
        begin, stop = self._holes[-1]
        if stop == self.end and stop - begin > 2 * self._bound:
            self._holes.pop()
            self.end = begin
