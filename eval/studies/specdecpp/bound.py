"""When a draft has to end whatever follows: the bound of SpecDec++'s theorem 3.1."""

from __future__ import annotations


def rejection_bound(t_draft: float, t_target: float, delta: float = 0.0) -> float:
    """Stopping is best once P(some drafted token is rejected) reaches (c2 + delta) / (c1 + c2 + delta): no threshold h
    above it can be. It may be best before.

    Times are those of the cost model (eq. 2.1). c1 = t_draft is what one more token costs in vain where one before it
    is rejected; c2 = t_target - t_draft what it saves at most where none is: a target call, less its own step. That
    holds while the rest of the answer is decoded as well as can be, since a plain call always brings one token; delta
    is then 0, and the bound 1 - t_draft / t_target. Where another policy decodes it, delta is how much more than c2
    for every token a draft of it may save by going on.
    """
    c1, c2 = t_draft, t_target - t_draft
    return (c2 + delta) / (c1 + c2 + delta)
