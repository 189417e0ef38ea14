"""What a mutant is: one small wrong change of one file, and the tests that are to notice it."""

from __future__ import annotations

from dataclasses import dataclass

DECODING = "tests/modules/decoding"
EXACT, BATCH, CUBE, CHAINS, GREEDY, TREE, TRACE, POLICIES, NODES, LIMITS = (
    f"{DECODING}/{name}_test.py"
    for name in (
        "exactness", "batch", "batch_exact", "chains", "greedy", "tree", "trace", "policies", "nodes", "limits",
    )
)  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """file: from the root. old: text that stands in it exactly once; new: what takes its place.

    tests: files or tests that are to fail. reason: why none needs to, of a mutant that is known to survive; else empty.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    reason: str = ""
