"""Settings that no other setting beats in both of two costs."""

from __future__ import annotations

from collections.abc import Sequence


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Numbers of the points (x, y), less of each being better, that no other point beats in one without being worse in
    the other; by rising x. Of equal points the first."""
    front: list[int] = []
    for number in sorted(range(len(points)), key=lambda i: (*points[i], i)):
        if not front or points[number][1] < points[front[-1]][1]:
            front.append(number)
    return front
