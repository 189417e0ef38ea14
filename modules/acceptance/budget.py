"""How long the drafts of rows that are decoded together should be: one round's time, shared out where it brings most.

A target that serves few rows reads more tokens in nearly no more time, and long drafts pay; with many rows every token
is paid for, and only what is nearly sure is worth drafting, or nothing. A length that is fixed is wrong at one end.
Here the next tokens of few rows compete: each is worth the probability that it and all before it are accepted, and
costs what the machine takes for one more row of a draft step and one more token of the target's call. Many rows draft
alike, as long as pays for all.

What has been drawn stays in the draft, so that none of it can bias the output (`protocols.StopPolicy`).
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

from draftsmith.modules.acceptance.policies import Predictor, PredictorStop, RecentRatio, ThresholdRule
from draftsmith.modules.decoding.learner import Learner
from draftsmith.modules.decoding.protocols import DraftView, StopPolicy
from draftsmith.modules.decoding.stop import Around

Curve = Mapping[int, float]
Step = Literal["first", "step"]


def between(curve: Mapping[Any, float], x: float) -> float:
    """A straight line between the curve's points, and on beyond the outer ones, never down there."""
    points = sorted(curve)
    if len(points) == 1:
        return curve[points[0]]
    place = min(max(bisect.bisect_left(points, x), 1), len(points) - 1)
    low, high = points[place - 1], points[place]
    slope = (curve[high] - curve[low]) / (high - low)
    if x > high:
        return curve[high] + max(slope, 0.0) * (x - high)
    return curve[low] + (max(slope, 0.0) if x < low else slope) * (x - low)


@dataclass(frozen=True)
class BatchTimes:
    """Seconds of the parts of a round, by rows that are decoded together.

    plain: of a round without drafts. read: what reading drafted tokens adds, by tokens a row on average, where all rows
    have the same number. uneven: how many times as long it takes where they have not. first, step: of a draft's first
    step and of every further one, by the rows that draft.
    """

    plain: Curve
    read: Mapping[int, Curve]
    first: Mapping[int, Curve]
    step: Mapping[int, Curve]
    uneven: Curve = field(default_factory=lambda: {1: 1.0})
    _known: dict[Any, list[float]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def reading(self, rows: int, most: int) -> Sequence[float]:
        """By the number of drafted tokens, from 0 to `most` at least: what the round takes more for them."""
        known = self._known.setdefault(rows, [0.0])
        while len(known) <= most:  # a machine reads more tokens in no less time: where the clock says so, it errs
            each = len(known) / rows
            more = between({own: between({0: 0.0, **curve}, each) for own, curve in self.read.items()}, rows)
            known.append(max(more, known[-1]))
        return known

    def unevenly(self, rows: int) -> float:
        """How many times as long reading takes where drafts are of unequal lengths."""
        return max(between(self.uneven, rows), 1.0)

    def drafting(self, step: Step, rows: int) -> Sequence[float]:
        """By the rows that draft, from 0 to `rows`: what a `first` or another `step` takes."""
        known = self._known.setdefault((step, rows), [0.0])
        while len(known) <= rows:
            curves = getattr(self, step).items()
            own = between({size: between(curve, min(len(known), size)) for size, curve in curves}, rows)
            known.append(max(own, known[-1]))
        return known


class SharedStop(PredictorStop):
    """A row's policy where the rows share a round's time: what it predicts is looked at there, and by itself it ends a
    draft only at `max_drafted`.

    asleep: nobody looks in this round, and nothing is predicted.
    """

    KEPT, TRUST = 0.8, 2.0  # of a round's verdict after another one; rounds that the mean of all rows counts as

    def __init__(self, predictor: Predictor, max_drafted: int):
        super().__init__(predictor, ThresholdRule(1.0), 1, max_drafted)
        self._accepted = self._seen = 0.0
        self.asleep = False

    def should_stop(self, view: DraftView) -> bool:
        return view.num_drafted >= self.max_drafted if self.asleep else super().should_stop(view)

    def reset(self) -> None:
        super().reset()
        self._accepted = self._seen = 0.0

    def first(self, mean: float) -> float:
        """Probability that this row's next first token is accepted, by its last ones. mean: of all rows."""
        return (self._accepted + self.TRUST * mean) / (self._seen + self.TRUST)

    def next(self, mean: float) -> float:
        """Probability that the draft and one more token are accepted. mean: acceptance of any token behind another."""
        return self._survival * mean ** (1 + self.predictor.late)

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        if not self.asleep:
            super().observe(num_drafted, num_accepted)
        self._accepted *= self.KEPT
        self._seen *= self.KEPT
        if num_drafted:
            self._accepted += num_accepted > 0
            self._seen += 1


class SharedBudget(Learner):
    """Says which rows draft on, step by step, by marginal value.

    Time is worth tokens at the pace so far (Dinkelbach 1967, as in `policies.CostRule`). Of the rows that could draft
    one more token those go on, best first, whose expected tokens less the time of all of them are most. Which draft at
    all is decided by the same numbers, from the acceptance of first tokens and from what later ones brought beyond
    their time. Once `EXPLORED` rounds had no second tokens, one has them all the same: else nothing would be learned of
    them any more.

    That is for `FEW` rows at most. With more of them unequal lengths, and a prediction for every token, take more time
    than they save (docs/evaluation.md): all rows draft alike then, the length that gives most tokens by time at the
    acceptance of all rows' tokens by their place, and one more every `LONGER` rounds, to learn of the next place.
    """

    FEW, EXPLORED, LONGER = 4, 128, 32

    def __init__(self, times: BatchTimes):
        self._times = times
        # Hopeful to begin with: what is tried is soon known, and what is not tried never.
        self._first, self._later = RecentRatio(0.8, 1.0), RecentRatio(0.8, 1.0)
        self._beyond = RecentRatio(0.0, 1.0)  # tokens that later steps brought, less their time, by drafting rows
        self._paces: dict[int, RecentRatio] = {}  # of rounds with drafts, by rows
        self._places: list[RecentRatio] = []  # acceptance by place, where all before it were accepted
        self._length = self._same = 0  # of all drafts of this round, where they are alike; such rounds so far
        self._untried = 0  # rounds without second tokens
        self._begin(1)

    def _begin(self, rows: int) -> None:
        self._rows, self._drafting, self._drafted, self._even = rows, 0, 0, True
        self._read = 0.0  # seconds of reading what is drafted so far
        self._steps, self._alike = 0, rows > self.FEW
        self._seconds = self._first_seconds = self._plain = between(self._times.plain, rows)

    @property
    def pace(self) -> float:
        """Tokens by second that time is worth: those of rounds without drafts, or of those with. Of a number of rows
        that never was the second is that of the nearest one, as many times the first."""
        plain = self._rows / self._plain
        if not self._paces:
            return plain
        nearest = min(self._paces, key=lambda rows: abs(rows - self._rows))
        faster = self._paces[nearest].value * between(self._times.plain, nearest) / nearest
        return plain * max(faster, 1.0)

    def start(self, able: Sequence[int], stops: Sequence[StopPolicy]) -> Sequence[int]:
        """The rows that draft in this round, of those that can. stops: of all rows that are decoded."""
        self._begin(len(stops))
        for stop in stops:
            innermost(stop).asleep = self._alike
        if self._alike and able:
            most = stops[able[0]].max_drafted
            self._same += 1
            self._length = min(self._best_length(len(able), most) + (self._same % self.LONGER == 0), most)
        mean, beyond = self._first.value, max(self._beyond.value, 0.0)  # they need not be drafted
        if self._alike:
            chosen = list(able) if self._length else []
        else:
            chosen = self._choose({row: innermost(stops[row]).first(mean) + beyond for row in able}, "first")
        self._untried += 1
        if self._untried > self.EXPLORED and not self._alike:
            chosen = list(able)
        self._pay(len(chosen), "first")
        self._drafting, self._first_seconds = len(chosen), self._seconds
        return chosen

    def share(self, rows: Sequence[int], stops: Sequence[StopPolicy]) -> Sequence[int]:
        """The rows that draft one more token, of those that may. stops: as of `start`."""
        self._steps += 1
        mean = self._later.value
        if self._alike:
            chosen = list(rows) if self._steps < self._length else []
        else:
            chosen = self._choose({row: innermost(stops[row]).next(mean) for row in rows}, "step")
        if self._untried > self.EXPLORED and not self._alike:
            chosen = list(rows)
        if chosen:
            self._untried = 0
        self._pay(len(chosen), "step")
        return chosen

    def observe(self, verdicts: Sequence[tuple[int, int] | None]) -> None:
        """The verdicts on a round's drafts: drafted and accepted tokens of each row; None of rows that are complete."""
        known = [verdict for verdict in verdicts if verdict is not None]
        drafts = [(drafted, accepted) for drafted, accepted in known if drafted]
        if not drafts:
            return
        for place in range(max(accepted for _, accepted in drafts) + 1):
            tried = [accepted > place for drafted, accepted in drafts if place < drafted and place <= accepted]
            if tried:
                if place == len(self._places):
                    self._places.append(RecentRatio(self._acceptance(place), 1.0))
                self._places[place].add(sum(tried), len(tried))
        self._first.add(sum(accepted > 0 for _, accepted in drafts), len(drafts))
        behind = [(min(accepted, drafted - 1), accepted - 1) for drafted, accepted in drafts if accepted]
        self._later.add(sum(accepted for _, accepted in behind), sum(verified for verified, _ in behind))
        emitted, later = len(known) + sum(accepted for _, accepted in drafts), sum(accepted for _, accepted in behind)
        if self._rows not in self._paces:
            self._paces[self._rows] = RecentRatio(self.pace * self._plain, self._plain)  # as if a round had been
        pace = self._paces[self._rows]
        # Rows that are complete emitted something too, which nobody tells: as much as the others.
        pace.add(emitted * self._rows / len(known), self._seconds)
        net = later * self._drafting / len(drafts) - (self._seconds - self._first_seconds) * self.pace
        self._beyond.add(net, self._drafting)

    def _acceptance(self, place: int) -> float:
        """Of a token there; of what was never drafted that of the last place that was."""
        known = self._places[: place + 1]
        return known[-1].value if known else self._first.value

    def _best_length(self, able: int, most: int) -> int:
        """Of as many drafts: what gives most tokens by time; 0 for none."""
        first, step = (self._times.drafting(kind, self._rows)[able] for kind in ("first", "step"))
        reading = self._times.reading(self._rows, able * most)
        unequal = 1.0 if able == self._rows else self._times.unevenly(self._rows)
        tokens, survival, best, length = float(self._rows), 1.0, self._rows / self._plain, 0
        for count in range(1, most + 1):
            survival *= self._acceptance(count - 1)
            tokens += able * survival
            pace = tokens / (self._plain + first + (count - 1) * step + unequal * reading[able * count])
            if pace > best:
                best, length = pace, count
        return length

    def _choose(self, values: Mapping[int, float], step: Step) -> list[int]:
        """The rows, best first, of which all are worth their time; none where nothing is, or nothing can be said (NaN).
        values: tokens that each would bring."""
        best = sorted(values, key=values.__getitem__, reverse=True)
        seconds = self._times.drafting(step, self._rows)
        pace, most, count = self.pace, 0.0, 0
        for number, total in enumerate(accumulate(values[row] for row in best), start=1):
            net = total - pace * (seconds[number] + self._reading(number) - self._read)
            if net > most:
                most, count = net, number
        return best[:count]

    def _reading(self, count: int) -> float:
        """Seconds of reading what is drafted once so many rows have drafted one token more."""
        known = self._times.reading(self._rows, self._drafted + self._rows)
        even = self._even and count in (0, self._rows)
        return known[self._drafted + count] * (1.0 if even else self._times.unevenly(self._rows))

    def _pay(self, count: int, step: Step) -> None:
        read = self._reading(count)
        self._seconds += self._times.drafting(step, self._rows)[count] + read - self._read
        self._even &= count in (0, self._rows)
        self._drafted, self._read = self._drafted + count, read

    def state_dict(self) -> dict[str, Any]:
        ratios = {"first": self._first, "later": self._later, "beyond": self._beyond}
        paces = {str(rows): pace.state_dict() for rows, pace in self._paces.items()}
        places = [one.state_dict() for one in self._places]
        return {
            "paces": paces,
            "places": places,
            "untried": self._untried,
            "same": self._same,
            **{name: one.state_dict() for name, one in ratios.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, ratio in (("first", self._first), ("later", self._later), ("beyond", self._beyond)):
            ratio.load_state_dict(state[name])
        self._paces, self._untried, self._same = {}, state["untried"], state["same"]
        self._places = [RecentRatio(0.0, 1.0) for _ in state["places"]]
        for place, one in zip(self._places, state["places"], strict=True):
            place.load_state_dict(one)
        for rows, pace in state["paces"].items():
            self._paces[int(rows)] = RecentRatio(0.0, 1.0)
            self._paces[int(rows)].load_state_dict(pace)


def innermost(stop: StopPolicy) -> Any:
    """The `SharedStop` inside whatever is around it."""
    return stop.innermost if isinstance(stop, Around) else stop
