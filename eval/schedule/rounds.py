"""Tokens by rounds at every number of drafted tokens, from rounds that were recorded at one number.

With another K rounds begin at other places of the text. A recorded round says of the places that it came to whether the
draft was right there: of the accepted ones that it was, of the one behind them that it was not. So an answer is a row
of places, and rounds of any smaller K are walked along it. Only behind a draft that was accepted as a whole nobody
knows: there a token counts as accepted with the rate of a draft's last place.

For a draft model, whose drafts depend on the text before them alone, this has the distribution of real rounds but for
those unknown places. A head's later tokens are worse than its first ones: it accepts a little more than is counted
here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from draftsmith.eval.bootstrap import Floats

Round = Mapping[str, int]  # of a row's `rounds` in prompts.parquet


@dataclass(frozen=True)
class RoundCounts:
    """Of A answers. owners [A]: number of the prompt of each. tokens [A]: emitted behind the first one, which the
    prompt's own target call gives. rounds [A, K+1]: that take these, on average, by drafted tokens, from 0."""

    owners: Sequence[int]
    tokens: Floats
    rounds: Floats

    @property
    def tokens_per_round(self) -> Floats:
        """[K+1]: emitted tokens by rounds; 1 without drafts."""
        found: Floats = self.tokens.sum() / self.rounds.sum(0)
        return found


def count_rounds(rows: Sequence[Mapping[str, Any]], k: int) -> RoundCounts:
    """Rounds of 0 to k drafted tokens. rows: of prompts.parquet, whose rounds drafted k; answers without a round are
    left out."""
    kept = [row for row in rows if row["rounds"]]
    last = last_place_rate([done for row in kept for done in row["rounds"]], k)
    places = [accept_probs(row["rounds"], k, last) for row in kept]
    rounds = np.array([[expected_rounds(own, length) for length in range(k + 1)] for own in places])
    return RoundCounts([row["prompt"] for row in kept], np.array([float(len(own)) for own in places]), rounds)


def last_place_rate(rounds: Sequence[Round], k: int) -> float:
    """How often the last token of a draft is accepted where all before it are; 0 where none is ever reached."""
    reached = [done for done in rounds if done["num_drafted"] == k and done["num_accepted"] >= k - 1]
    return sum(done["num_accepted"] == k for done in reached) / max(len(reached), 1)


def accept_probs(rounds: Sequence[Round], k: int, unknown: float) -> list[float]:
    """Of every token that the rounds emitted: 1 where it was drafted, 0 where the draft said something else or ended
    before, as one does that has nothing more to say, and `unknown` behind k accepted tokens."""
    found = list[float]()
    for done in rounds:
        accepted = min(done["num_accepted"], done["num_emitted"])
        found += [1.0] * accepted
        if done["num_emitted"] > accepted:
            found.append(unknown if accepted == k else 0.0)
    return found


def expected_rounds(accept_prob: Sequence[float], k: int) -> float:
    """Rounds of k drafted tokens that emit as many tokens as there are places, where each is accepted with its
    probability, whatever becomes of the others."""
    count = len(accept_prob)
    begins = [1.0, *([0.0] * (count + k))]  # probability that a round begins at a place
    for place in range(count):
        going = begins[place]
        for at in range(place, place + k):
            if not going or at >= count:
                break
            begins[at + 1] += going * (1 - accept_prob[at])
            going *= accept_prob[at]
        else:
            begins[place + k + 1] += going
    return sum(begins[:count])
