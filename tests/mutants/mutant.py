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
REPLAYS = tuple(
    f"tests/eval/rollouts/replay_test.py::test_a_replay_is_the_decoders_trace[tiny-{name}]"
    for name in ("spec:k=4", "self-verify:k=9", "eagle2:nodes=7:depth=2:topk=3", "pld:k=8:ngram=2")
)


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
