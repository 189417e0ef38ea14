"""What a mutant is: one small wrong change of one file, and the tests that are to notice it."""

from __future__ import annotations

from dataclasses import dataclass

DECODING = "tests/modules/decoding"
EXACT, BATCH, ROWS_ALONE, GREEDY, TREE, TRACE, LIMITS, POOL = (
    f"{DECODING}/{name}_test.py" for name in ("exactness", "batch", "rows", "greedy", "tree", "trace", "limits", "pool")
)
POLICIES, NODES = f"{DECODING}/stop_test.py", "tests/modules/decoding/tree_rule_test.py"
REPLAY_TEST = "tests/benchmarks/papers_replay_test.py"


def emitted(*methods: str, at: str = "T=1") -> tuple[str, ...]:
    """The tests that these methods' outputs follow the target exactly."""
    return tuple(f"{EXACT}::test_emitted_distribution_is_the_targets[{method}-{at}]" for method in methods)


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
