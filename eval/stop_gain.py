"""What it would gain to end drafts by a prediction, told from the target's answers before any head is trained.

A round is drafted from every place of the answers, and the target reads it (data/rollouts.py): that says how likely so
many of its tokens are accepted, and so where the next round begins. Expectations over the accept draws are exact, and
none is drawn. Whatever is fitted or chosen is so on other answers than those that it is measured on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftsmith.data.console import Column, Table, format_interval, progress_bar
from draftsmith.data.rollouts import Rollouts
from draftsmith.eval.bootstrap import Resamples
from draftsmith.modules.acceptance.fitting import begin, descend, predicted, shuffled
from draftsmith.modules.acceptance.head import AcceptanceHead, AcceptanceHeadConfig, Feature, feature_value
from draftsmith.modules.decoding.branches import BranchedText
from draftsmith.modules.decoding.confidence import TokenConfidences
from draftsmith.modules.metrics import binary_kl, fit_logistic
from draftsmith.modules.types import AcceptanceBatch, InputError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]
SEED, FOLDS, FEWEST = 0, 4, 8
# The head that `train acceptance` makes of labels of rounds, small and with a low learning rate, as wide ones learn few
# answers by heart; where a drafter is wider, with that by which Adam changes what the first layer gives as much.
WIDTH, EPOCHS, BATCH, LR, LR_SIZE, WEIGHT_DECAY, STOPPING = 32, 3, 768, 1e-3, 128, 0.1, 5
FEATURES: tuple[Feature, ...] = ("log_q", "logit_q", "depth", "repeat")
PRIOR = 1.0  # of `OnlineLogistic`
LEAST_WEIGHT = 1e-3  # tokens that fewer rounds reach teach nothing measurable
TOKENS_AT_ONCE = 2**14
WORTH = 0.01  # of tokens by time: what a head has to gain over `online`, as it takes more time itself
FIXED, ONLINE, HEAD, KNOWN = "fixed K", "online", "a head", "true p/q"


@dataclass(frozen=True)
class Rounds:
    """S rounds of K tokens from every place of A answers but the first, place after place; N = S*K tokens, round after
    round.

    answer [S]: number of the answer. place [S]: of the round's first token in the answer, from 0. owner [A]: number of
    the sequence that each answer is of. accept_prob [N]: those before it in the round given. reached [N]: probability
    that they are all accepted, and none is an end token. hidden [N, H], features [N, F]: what a head reads, and the
    embeddings of ids [N], which `embed` gives.
    """

    answer: Ints
    place: Ints
    owner: Ints
    accept_prob: Tensor
    reached: Tensor
    hidden: Tensor
    features: Tensor
    ids: Tensor
    embed: Callable[[Tensor], Tensor]

    def by_round(self, tokens: Tensor) -> Floats:
        """[S, K] of values [N]."""
        return tokens.double().view(len(self.place), -1).numpy()

    def tokens_of(self, answers: Mask) -> Tensor:
        """Numbers of the tokens of the answers that a mask [A] keeps, those aside that no round comes to."""
        own = torch.from_numpy(np.repeat(answers[self.answer], len(self.ids) // len(self.place)))
        return (own & (self.reached >= LEAST_WEIGHT)).nonzero()[:, 0]

    def of_head(self, rows: Tensor) -> AcceptanceBatch:
        """What a head reads of some tokens."""
        label, weight, embeds = self.accept_prob[rows], self.reached[rows], self.embed(self.ids[rows]).cpu()
        counts = torch.ones(len(rows), dtype=torch.bool)
        return AcceptanceBatch(self.hidden[rows], label, counts, weight, embeds, self.features[rows])


def head_settings(hidden_size: int) -> AcceptanceHeadConfig:
    """What `train acceptance` makes of labels of real rounds, but for the width."""
    return AcceptanceHeadConfig(
        hidden_size, num_blocks=0, w_rej=1.0, state="before", features=FEATURES, width=WIDTH, activation="relu",
        standardize=True,
    )  # fmt: skip


def drafted_rounds(rollouts: Rollouts, rows: Sequence[Mapping[str, Any]]) -> Rounds:
    """Rounds from every place of the rows' answers, all in memory. rollouts: of stride 1 and one temperature.

    Raises:
        InputError: fewer than FEWEST rows have room for a round. NonFinite: a model's logits.
    """
    drafter, depth = rollouts.drafter, rollouts.depth
    text, branches = BranchedText(rollouts.target, depth), drafter.branches(depth)
    made, hidden = [], []
    with progress_bar("rounds", len(rows), "answers") as advance:
        for number, row in enumerate(rows):
            named = {"id": f"row {number}", "turn": 1, "task": "", **row}
            labels = rollouts.label_response(text, branches, named, number)
            if labels is not None:
                ids, starts = labels["input_ids"][: labels["starts"][-1]], labels["starts"]
                branches.open(ids, drafter.features(ids))
                drafts = torch.from_numpy(labels["draft_ids"]).view(-1, depth)
                hidden.append(branches.states(starts, drafts[:, :-1])[:, :depth].flatten(0, 1).cpu().clone())
                made.append(labels)
            advance(1)
    if len(made) < FEWEST:
        raise InputError("data", f"{len(made)} answers with room for drafts", f"{FEWEST} or more", "Make more answers.")
    places = np.concatenate([labels["starts"] for labels in made])
    owner = np.repeat(np.arange(len(made)), [len(labels["starts"]) for labels in made])
    first = np.r_[True, (np.diff(places) != 1) | (np.diff(owner) != 0)]  # between two answers is what the user says
    answer = first.cumsum() - 1
    names = ("log_q", "log_max_q", "entropy", "repeat", "accept_prob", "reached", "draft_ids")
    found = {name: torch.from_numpy(np.concatenate([labels[name] for labels in made])) for name in names}
    levels = torch.arange(1.0, depth + 1).repeat(len(places))
    known = TokenConfidences(
        found["log_q"], found["log_max_q"], found["entropy"], levels, torch.zeros(()), found["repeat"]
    )
    return Rounds(
        answer, places - places[first][answer], owner[first], found["accept_prob"], found["reached"],
        torch.cat(hidden), torch.stack([feature_value(name, known) for name in FEATURES], -1), found["draft_ids"],
        branches.embed,
    )  # fmt: skip


@dataclass(frozen=True)
class Played:
    """What rounds come to that end after given numbers of tokens, of each of A answers, in expectation: target calls,
    drafted tokens, and those of them that were accepted, and verified. tokens: that were to be emitted."""

    tokens: Floats
    calls: Floats
    drafted: Floats
    accepted: Floats
    verified: Floats

    def time(self, c: float) -> Floats:
        """[A], in target calls."""
        return self.calls + c * self.drafted

    def pace(self, c: float, kept: Mask) -> float:
        """Tokens by time of the answers that a mask [A] keeps."""
        return float(self.tokens[kept].sum() / self.time(c)[kept].sum())

    def acceptance(self, kept: Mask) -> float:
        """Accepted tokens by verified ones (`CostRule.acceptance`)."""
        return float(self.accepted[kept].sum() / self.verified[kept].sum())


def play(rounds: Rounds, lengths: Ints) -> Played:
    """The rounds that begin at an answer's second token and, each n = lengths [S] tokens long, where the one before it
    ended: with i of its tokens accepted, i + 1 places further."""
    reached, accepted = rounds.by_round(rounds.reached), rounds.by_round(rounds.reached * rounds.accept_prob)
    drafted = np.arange(reached.shape[1]) < lengths[:, None]
    reached, accepted = np.where(drafted, reached, 0.0), np.where(drafted, accepted, 0.0)
    count, width, last = len(rounds.owner), reached.shape[1] + 1, int(rounds.place.max()) + 1
    begun, over = np.ones((len(lengths), 1)), np.zeros((len(lengths), 1))
    ends = np.zeros((count, last, width))  # by tokens that are accepted
    ends[rounds.answer, rounds.place] = -np.diff(accepted, prepend=begun, append=over)
    begins = np.zeros((count, last + width))
    begins[:, 0] = 1.0
    for place in range(last):
        begins[:, place + 1 : place + 1 + width] += begins[:, place, None] * ends[:, place]
    visits = begins[rounds.answer, rounds.place]

    def total(each: Floats | Ints) -> Floats:
        return np.bincount(rounds.answer, visits * each, count).astype(np.float64)

    tokens = np.bincount(rounds.answer, minlength=count).astype(float)
    return Played(tokens, total(np.ones(1)), total(lengths), total(accepted.sum(1)), total(reached.sum(1)))


def cost_lengths(prob: Floats, c: float, pace: float, acceptance: float) -> Ints:
    """[S]: where `CostRule` ends drafts whose tokens are accepted with these probabilities [S, K]."""
    enough = ~(prob.cumprod(1) * acceptance >= c * pace)
    enough[:, -1] = True
    return enough.argmax(1).astype(np.int64) + 1


def settled(rounds: Rounds, prob: Floats, c: float, kept: Mask, start: Played) -> Ints:
    """`cost_lengths` with the pace that they come to on the answers that a mask [A] keeps (Dinkelbach 1967)."""
    pace, acceptance = start.pace(c, kept), start.acceptance(kept)
    for _ in range(20):
        lengths = cost_lengths(prob, c, pace, acceptance)
        found = play(rounds, lengths)
        before, pace, acceptance = pace, found.pace(c, kept), found.acceptance(kept)
        if abs(pace - before) < 1e-6 * pace:
            break
    return lengths


def online_probs(rounds: Rounds, kept: Mask) -> Floats:
    """[S, K]: by the logistic that `OnlinePredictor` comes to on the answers that a mask [A] keeps."""
    known, rows = rounds.features[:, [FEATURES.index("logit_q"), FEATURES.index("repeat")]], rounds.tokens_of(kept)
    fitted = fit_logistic(known[rows], rounds.accept_prob[rows], (1.0, 0.0, 0.0), PRIOR / 2, rounds.reached[rows])
    return rounds.by_round(torch.sigmoid(known.double() @ fitted[:-1] + fitted[-1]))


def head_probs(rounds: Rounds, kept: Mask) -> Floats:
    """[S, K]: by a head trained on the answers that a mask [A] keeps, for as long as it predicts a fifth of them, which
    it does not see, better and better."""
    apart = kept & (kept.cumsum() % STOPPING == 0)
    learned, judged, size = rounds.tokens_of(kept & ~apart), rounds.tokens_of(apart), rounds.hidden.shape[-1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        head = AcceptanceHead(head_settings(size))
    begin(head, map(rounds.of_head, learned.split(TOKENS_AT_ONCE)))

    def logits(rows: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.cat([predicted(head, rounds.of_head(part)) for part in rows.split(TOKENS_AT_ONCE)])

    optimizer = torch.optim.AdamW(head.parameters(), LR * LR_SIZE / max(size, LR_SIZE), weight_decay=WEIGHT_DECAY)
    steps = EPOCHS * -(-len(learned) // BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    lowest, found = torch.inf, rounds.reached
    for epoch in range(EPOCHS + 1):
        if epoch:
            order = shuffled(len(learned), BATCH, 1, epoch)
            descend(head, (rounds.of_head(learned[chosen]) for chosen in order), optimizer, schedule, clip=1.0)
        kl = float(binary_kl(logits(judged), rounds.accept_prob[judged], rounds.reached[judged]))
        if kl >= lowest:
            break
        lowest, found = kl, logits(torch.arange(len(rounds.ids)))
    return rounds.by_round(torch.sigmoid(found.double()))


PREDICTORS: dict[str, Callable[[Rounds, Mask], Floats]] = {
    ONLINE: online_probs,
    HEAD: head_probs,
    KNOWN: lambda rounds, kept: rounds.by_round(rounds.accept_prob),
}


@dataclass(frozen=True)
class Gain:
    """Relative gain in tokens by time, with the ends of its 95 % interval, NaN for fewer than two prompts."""

    value: float
    low: float = np.nan
    high: float = np.nan

    @property
    def text(self) -> str:
        return f"{self.value:+.1%} ({self.ends})" if self.ends else f"{self.value:+.1%}"

    @property
    def ends(self) -> str:
        return format_interval((self.low, self.high), "+.1%", " to ")


def gain(own: Floats, base: Floats, seed: int) -> Gain:
    """Compare tokens and time [prompts, 2] of the same prompts, which are resampled in pairs."""
    drawn = Resamples(range(len(own)), seed)
    ends = drawn.interval(
        lambda: drawn.sums(own[:, 0]) / drawn.sums(own[:, 1]) * drawn.sums(base[:, 1]) / drawn.sums(base[:, 0]) - 1
    )
    (tokens, time), (base_tokens, base_time) = own.sum(0), base.sum(0)
    return Gain(float((tokens / time) / (base_tokens / base_time)) - 1, *(ends or ()))


@dataclass(frozen=True)
class AtCost:
    """What is gained at one c over the best fixed K, by name, and by a head over `online`. k: that K of all answers."""

    c: float
    k: int
    gains: Mapping[str, Gain]
    over_online: Gain

    @property
    def pays(self) -> str:
        """What to end drafts by: the simplest that nothing is told to be better than."""
        if self.over_online.low > 0 and self.over_online.value >= WORTH:
            return HEAD
        return ONLINE if self.gains[ONLINE].low > 0 else FIXED


def stop_gains(rounds: Rounds, cs: Sequence[float], greedy: bool) -> list[AtCost]:
    """At each c. For every fold of the sequences, what is fitted or chosen is so on the others. greedy: true p/q would
    be no prediction, but the verdict."""
    count = int(rounds.owner.max()) + 1
    fold = np.random.default_rng(SEED).permutation(count)[rounds.owner] % FOLDS  # [A]
    fixed = [play(rounds, np.full(len(rounds.place), k + 1)) for k in range(len(rounds.ids) // len(rounds.place))]
    names = [name for name in PREDICTORS if not (greedy and name == KNOWN)]
    times = {(name, c): np.zeros(len(fold)) for name in (FIXED, *names) for c in cs}
    for held in range(FOLDS):
        own, kept = fold == held, fold != held
        probs = {name: PREDICTORS[name](rounds, kept) for name in names}
        for c in cs:
            best = max(fixed, key=lambda played: played.pace(c, kept))
            times[FIXED, c][own] = best.time(c)[own]
            for name, prob in probs.items():
                lengths = settled(rounds, prob, c, kept, best)
                times[name, c][own] = play(rounds, lengths).time(c)[own]

    def pairs(name: str, c: float) -> Floats:
        return np.stack([np.bincount(rounds.owner, each, count) for each in (fixed[0].tokens, times[name, c])], 1)

    found = []
    for c in cs:
        k = 1 + int(np.argmax([played.pace(c, fold >= 0) for played in fixed]))
        gains = {name: gain(pairs(name, c), pairs(FIXED, c), SEED) for name in names}
        found.append(AtCost(c, k, gains, gain(pairs(HEAD, c), pairs(ONLINE, c), SEED)))
    return found


def gains_table(found: Sequence[AtCost], count: int) -> Table:
    """count: answers."""
    rows = [
        {"c": at.c, "k": at.k, "pays": at.pays}
        | {name: own.value for name, own in at.gains.items()}
        | {f"{name} ends": own.ends for name, own in at.gains.items()}
        for at in found
    ]
    columns = [Column("c", "c", ".3g"), Column("k", "best K", "d")]
    for name in found[0].gains:
        columns += [Column(name, name, "+.1%"), Column(f"{name} ends", "", below=True)]
    return Table(
        "stops",
        f"Ending drafts by a prediction, over the best fixed K: tokens by time, {count} answers",
        [*columns, Column("pays", "pays")],
        rows,
        "c: time of one more drafted token by that of a round without a draft. What it takes to predict is not "
        "counted. Intervals are 95 %. A head was trained on three quarters of the answers: it learns from more.",
    )


def advice(at: AtCost) -> str:
    """What to do at this c."""
    what = {
        HEAD: "train one, on 1,000 answers or more (data acceptance --labels rollout, train acceptance).",
        ONLINE: "`online` is enough.",
        FIXED: f"no gain that these answers can tell from none. Draft a fixed K of {at.k}.",
    }
    online, head, over = (own.text for own in (at.gains[ONLINE], at.gains[HEAD], at.over_online))
    return (
        f"At c = {at.c:.3g} `online` gains {online} over the best fixed K, a head trained on these answers {head}, "
        f"which is {over} over `online`: {what[at.pays]}"
    )
