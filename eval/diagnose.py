"""`draftsmith diagnose`: why a head's acceptance is low, and what stop rule pays for a drafter.

The gain of stop rules is computed from the target's answers before any acceptance head is trained: a round is drafted
from every position, and the target reads it (data/rollouts.py). That gives the probability that so many of its tokens
are accepted, and so where the next round begins: expectations over the accept draws are exact. Whatever is fitted or
chosen is measured on other answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftsmith.data.acceptance import AcceptanceConfig, labels_of
from draftsmith.data.console import format_interval, print_text, progress_bar
from draftsmith.data.heads.diagnosis import diagnose
from draftsmith.data.heads.directory import kind_at, load_drafter
from draftsmith.data.models.loading import check_same_tokenizer, load_lm, text_identity, vocabulary_size
from draftsmith.data.rollouts import Rollouts
from draftsmith.data.settings import Loading, check_positive
from draftsmith.data.store.manifest import open_artefact
from draftsmith.data.store.rows import Rows
from draftsmith.data.text.repetition import Repetition
from draftsmith.eval.bootstrap import Resamples
from draftsmith.eval.costs import MeasuredTimes
from draftsmith.modules.acceptance.fitting import begin, descend, predicted, shuffled
from draftsmith.modules.acceptance.head import AcceptanceHead, AcceptanceHeadConfig, Feature, feature_value
from draftsmith.modules.decoding.branches import BranchedText
from draftsmith.modules.decoding.confidence import TokenConfidences
from draftsmith.modules.drafters.methods import Models
from draftsmith.modules.metrics import binary_kl, fit_logistic
from draftsmith.modules.types import AcceptanceBatch, InputError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]
DEPTH = 10
CAPACITY = 512  # tokens: the prompts that c is measured on are shorter
SEED, FOLDS, FEWEST = 0, 4, 8
# A small version of the head that `train acceptance` trains on rollout labels, with a low learning rate: wide heads
# memorise few answers. For wider drafters the rate keeps Adam's changes of the first layer's outputs the same.
WIDTH, EPOCHS, BATCH, LR, LR_SIZE, WEIGHT_DECAY, STOPPING = 32, 3, 768, 1e-3, 128, 0.1, 5
FEATURES: tuple[Feature, ...] = ("log_q", "logit_q", "depth", "repeat")
PRIOR = 1.0  # of `OnlineLogistic`
LEAST_WEIGHT = 1e-3  # tokens that fewer rounds reach teach nothing measurable
TOKENS_AT_ONCE = 2**14
WORTH = 0.01  # gain that a head needs over `online`, as it takes more time itself
FIXED, ONLINE, HEAD = "fixed K", "online", "a head"


@dataclass(frozen=True)
class DiagnoseConfig(Loading):
    """Measures a trained drafter, its data and its target, and names the likeliest cause of low acceptance with its
    remedy. Also for a draft model: the gain of ending drafts by a prediction, before an acceptance head is trained.

    Attributes:
        draft: Directory of a trained drafter of any kind, or directory or hub id of a draft model, or embedded:draft.
            The training's output around a drafter is read too.
        data: Answers like those that it was trained on: responses, features, or supervised prompts.
        target: Directory or hub id of the target model, or embedded:target.
        limit: Rows to read.
        stops: Compare stop rules at the answers' temperature. It takes one to two times as long as the answers took.
        c: Time of a drafted token relative to a round without a draft, where it will decode; 0 measures it here.
    """

    draft: str
    data: Path
    target: str = "embedded:target"
    limit: int = 200
    stops: bool = True
    c: float = 0.0


def run(config: DiagnoseConfig) -> None:
    """Print the diagnosis of a head, then the gains of stop rules.

    Raises:
        InputError: no drafter, another target's, or data without answers or of another tokenizer.
    """
    check_positive(config, "limit")
    if not 0 <= config.c < float("inf"):
        raise InputError("c", config.c, "a time, or 0 to measure it", "Correct it.")
    manifest = open_artefact(config.data, ("responses", "features", "prompts"), text_identity(config.target), "size")
    if "input_ids" not in {spec.name for spec in manifest.fields}:
        remedy = "Make responses first (data responses)."
        raise InputError("data", f"{config.data}, prompts without answers", "answers", remedy)
    rows = list(Rows(config.data, manifest, limit=config.limit, vocab_size=vocabulary_size(config.target)).iterate())
    # A draft model has no training to diagnose: only its stop rules are compared.
    is_model = kind_at(config.draft) is None
    if is_model:
        check_same_tokenizer(config.target, config.draft)
    target = load_lm(config.target, **config.loading)
    if not is_model:
        print_text(diagnose(Path(config.draft), target, config.target, rows, manifest))
    if not config.stops:
        return

    drafter = load_drafter(config.draft, lambda: target, lambda path: load_lm(path, **config.loading))
    # Medusa drafts one token per head.
    depth = min(DEPTH, getattr(drafter.head and drafter.head.config, "num_heads", DEPTH))
    how = AcceptanceConfig(
        responses=config.data, target=config.target, output=config.data, draft=config.draft, labels="rollout",
        depth=depth, stride=1,
    )  # fmt: skip
    sampling = how.sampling(manifest.sampling or {})
    rollouts = labels_of(how, sampling, target, drafter)
    assert isinstance(rollouts, Rollouts)
    heads = {} if drafter.head is None else {drafter.name: drafter.head}
    models = Models(target, draft=drafter.lm, heads=heads, capacity=min(CAPACITY, target.info.max_position))
    c = config.c or MeasuredTimes().step_cost(models, drafter.name)
    gains = stop_gains(drafted_rounds(rollouts, rows), c)
    copied = Repetition.of((row["input_ids"], row["loss_mask"]) for row in rows)
    mode = "greedy" if sampling[0].greedy else f"temperature {sampling[0].temperature:g}"
    print_text(f"Of the tokens of {len(rows)} answers ({mode}), {copied.text()}.")
    print_text(gains.advice())


@dataclass(frozen=True)
class Rounds:
    """S rounds of K tokens from every position of A answers but the first; N = S*K tokens, round after round.

    Attributes:
        answer [S]: number of the answer.
        place [S]: position of the round's first token in the answer, from 0.
        owner [A]: number of the sequence that holds the answer.
        accept_prob [N]: given that all tokens before it in the round are accepted.
        reached [N]: probability that they all are, and that none is an end token.
        hidden [N, H], features [N, F], ids [N]: what an acceptance head reads; `embed` gives the ids' embeddings.
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
        """Return values [N] as [S, K]."""
        return tokens.double().view(len(self.place), -1).numpy()

    def tokens_of(self, answers: Mask) -> Tensor:
        """Return the numbers of the tokens of the answers in a mask [A] that rounds reach."""
        kept = torch.from_numpy(np.repeat(answers[self.answer], len(self.ids) // len(self.place)))
        return (kept & (self.reached >= LEAST_WEIGHT)).nonzero()[:, 0]

    def head_batch(self, rows: Tensor) -> AcceptanceBatch:
        """Return what a head reads of some tokens."""
        label, weight, embeds = self.accept_prob[rows], self.reached[rows], self.embed(self.ids[rows]).cpu()
        counts = torch.ones(len(rows), dtype=torch.bool)
        return AcceptanceBatch(self.hidden[rows], label, counts, weight, embeds, self.features[rows])


def drafted_rounds(rollouts: Rollouts, rows: Sequence[Mapping[str, Any]]) -> Rounds:
    """Draft rounds from every position of the rows' answers. rollouts: of stride 1 and one temperature.

    Raises:
        InputError: fewer than FEWEST rows have room for a round. NonFinite: a model's logits.
    """
    drafter, depth = rollouts.drafter, rollouts.depth
    text, branches = BranchedText(rollouts.target, depth), drafter.branches(depth)
    labelled, hidden = [], []
    with progress_bar("rounds", len(rows), "answers") as advance:
        for number, row in enumerate(rows):
            labels = rollouts.label_response(
                text, branches, {"id": f"row {number}", "turn": 1, "task": "", **row}, number
            )
            if labels is not None:
                ids, starts = labels["input_ids"][: labels["starts"][-1]], labels["starts"]
                branches.open(ids, drafter.features(ids, len(ids)))
                drafts = torch.from_numpy(labels["draft_ids"]).view(-1, depth)
                hidden.append(branches.states(starts, drafts[:, :-1])[:, :depth].flatten(0, 1).cpu().clone())
                labelled.append(labels)
            advance(1)
    if len(labelled) < FEWEST:
        expected = f"{FEWEST} or more"
        raise InputError("data", f"{len(labelled)} answers with room for drafts", expected, "Make more answers.")
    places = np.concatenate([labels["starts"] for labels in labelled])
    owner = np.repeat(np.arange(len(labelled)), [len(labels["starts"]) for labels in labelled])
    # The user's text separates two answers of a conversation.
    first = np.r_[True, (np.diff(places) != 1) | (np.diff(owner) != 0)]
    answer = first.cumsum() - 1
    names = ("log_q", "log_max_q", "entropy", "repeat", "accept_prob", "reached", "draft_ids")
    columns = {name: torch.from_numpy(np.concatenate([labels[name] for labels in labelled])) for name in names}
    levels = torch.arange(1.0, depth + 1).repeat(len(places))
    confidences = TokenConfidences(
        columns["log_q"], columns["log_max_q"], columns["entropy"], levels, torch.zeros(()), columns["repeat"]
    )
    features = torch.stack([feature_value(name, confidences) for name in FEATURES], -1)  # [N, F]
    return Rounds(
        answer, places - places[first][answer], owner[first], columns["accept_prob"], columns["reached"],
        torch.cat(hidden), features, columns["draft_ids"], branches.embed,
    )  # fmt: skip


@dataclass(frozen=True)
class ExpectedCounts:
    """Expected counts per answer [A]: target calls, drafted, accepted and verified tokens. tokens: to emit."""

    tokens: Floats
    calls: Floats
    drafted: Floats
    accepted: Floats
    verified: Floats

    def time(self, c: float) -> Floats:
        """Return the time [A] in target calls."""
        return self.calls + c * self.drafted

    def pace(self, c: float, kept: Mask) -> float:
        """Return tokens per time of the answers in a mask [A]."""
        return float(self.tokens[kept].sum() / self.time(c)[kept].sum())

    def acceptance(self, kept: Mask) -> float:
        """Return accepted tokens per verified token (`CostRule.acceptance`)."""
        return float(self.accepted[kept].sum() / self.verified[kept].sum())


def expected_counts(rounds: Rounds, lengths: Ints) -> ExpectedCounts:
    """Compute the expectation over all sequences of rounds, each `lengths` [S] tokens long.

    The first begins at an answer's second token; after i accepted tokens the next begins i + 1 positions further.
    """
    reached, accepted = rounds.by_round(rounds.reached), rounds.by_round(rounds.reached * rounds.accept_prob)
    drafted = np.arange(reached.shape[1]) < lengths[:, None]
    reached, accepted = np.where(drafted, reached, 0.0), np.where(drafted, accepted, 0.0)
    count, width, last = len(rounds.owner), reached.shape[1] + 1, int(rounds.place.max()) + 1
    begun, over = np.ones((len(lengths), 1)), np.zeros((len(lengths), 1))
    # Probability that the round at each position accepts 0 .. K tokens.
    ends = np.zeros((count, last, width))  # [A, P, K + 1]
    ends[rounds.answer, rounds.place] = -np.diff(accepted, prepend=begun, append=over)
    # Probability that a round begins at each position, carried forward in order.
    begins = np.zeros((count, last + width))  # [A, P + K + 1]
    begins[:, 0] = 1.0
    for place in range(last):
        begins[:, place + 1 : place + 1 + width] += begins[:, place, None] * ends[:, place]
    visits = begins[rounds.answer, rounds.place]

    def total(each: Floats | Ints) -> Floats:
        return np.bincount(rounds.answer, visits * each, count).astype(np.float64)

    tokens = np.bincount(rounds.answer, minlength=count).astype(float)
    return ExpectedCounts(tokens, total(np.ones(1)), total(lengths), total(accepted.sum(1)), total(reached.sum(1)))


def cost_lengths(prob: Floats, c: float, pace: float, acceptance: float) -> Ints:
    """Return where `CostRule` ends drafts [S] whose tokens are accepted with these probabilities [S, K]."""
    # Negated, so that a NaN ends the draft as in `CostRule`.
    enough = ~(prob.cumprod(1) * acceptance >= c * pace)
    enough[:, -1] = True
    return enough.argmax(1).astype(np.int64) + 1


def settled_lengths(rounds: Rounds, prob: Floats, c: float, kept: Mask, start: ExpectedCounts) -> Ints:
    """Return `cost_lengths` at the pace that they reach on the answers in a mask [A] (Dinkelbach 1967)."""
    pace, acceptance = start.pace(c, kept), start.acceptance(kept)
    for _ in range(20):
        lengths = cost_lengths(prob, c, pace, acceptance)
        counts = expected_counts(rounds, lengths)
        before, pace, acceptance = pace, counts.pace(c, kept), counts.acceptance(kept)
        if abs(pace - before) < 1e-6 * pace:
            break
    return lengths


def online_probs(rounds: Rounds, kept: Mask) -> Floats:
    """Return probabilities [S, K] of the logistic that `OnlinePredictor` reaches on the answers in a mask [A]."""
    known, rows = rounds.features[:, [FEATURES.index("logit_q"), FEATURES.index("repeat")]], rounds.tokens_of(kept)
    fitted = fit_logistic(known[rows], rounds.accept_prob[rows], (1.0, 0.0, 0.0), PRIOR / 2, rounds.reached[rows])
    return rounds.by_round(torch.sigmoid(known.double() @ fitted[:-1] + fitted[-1]))


def head_probs(rounds: Rounds, kept: Mask) -> Floats:
    """Return probabilities [S, K] of a head trained on the answers in a mask [A].

    Training stops when the head gets worse on a fifth of them, which it does not see.
    """
    # Every fifth kept answer is only judged by.
    apart = kept & (kept.cumsum() % STOPPING == 0)
    learned, judged, size = rounds.tokens_of(kept & ~apart), rounds.tokens_of(apart), rounds.hidden.shape[-1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        # As `train acceptance` for rollout labels, but narrower.
        config = AcceptanceHeadConfig(
            size, num_blocks=0, w_rej=1.0, state="before", features=FEATURES, width=WIDTH, activation="relu",
            standardize=True,
        )  # fmt: skip
        head = AcceptanceHead(config)
    begin(head, map(rounds.head_batch, learned.split(TOKENS_AT_ONCE)))

    def logits(rows: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.cat([predicted(head, rounds.head_batch(part)) for part in rows.split(TOKENS_AT_ONCE)])

    optimizer = torch.optim.AdamW(head.parameters(), LR * LR_SIZE / max(size, LR_SIZE), weight_decay=WEIGHT_DECAY)
    steps = EPOCHS * -(-len(learned) // BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    lowest, best = torch.inf, rounds.reached
    for epoch in range(EPOCHS + 1):
        if epoch:
            order = shuffled(len(learned), BATCH, 1, epoch)
            descend(head, (rounds.head_batch(learned[chosen]) for chosen in order), optimizer, schedule, clip=1.0)
        kl = float(binary_kl(logits(judged), rounds.accept_prob[judged], rounds.reached[judged]))
        if kl >= lowest:
            break
        lowest, best = kl, logits(torch.arange(len(rounds.ids)))
    return rounds.by_round(torch.sigmoid(best.double()))


PREDICTORS: dict[str, Callable[[Rounds, Mask], Floats]] = {ONLINE: online_probs, HEAD: head_probs}


@dataclass(frozen=True)
class Gain:
    """Relative gain in tokens per time with its 95 % interval, NaN for fewer than two prompts."""

    value: float
    low: float = np.nan
    high: float = np.nan

    @property
    def text(self) -> str:
        interval = format_interval((self.low, self.high), "+.1%", " to ")
        return f"{self.value:+.1%} ({interval})" if interval else f"{self.value:+.1%}"


@dataclass(frozen=True)
class StopGains:
    """Gains of stop rules at one c over the best fixed K, and of a head over `online`. k: the best K of all answers."""

    c: float
    k: int
    online: Gain
    head: Gain
    over_online: Gain

    def advice(self) -> str:
        """Describe the gains, and recommend the simplest rule that no other beats significantly."""
        if self.over_online.low > 0 and self.over_online.value >= WORTH:
            remedy = "train one, on 1,000 answers or more (data acceptance --labels rollout, train acceptance)."
        elif self.online.low > 0:
            remedy = "`online` is enough."
        else:
            remedy = f"no gain that these answers can tell from none. Draft a fixed K of {self.k}."
        return (
            f"At c = {self.c:.3g} `online` gains {self.online.text} over the best fixed K, a head trained on these "
            f"answers {self.head.text}, which is {self.over_online.text} over `online`: {remedy}"
        )


def stop_gains(rounds: Rounds, c: float) -> StopGains:
    """Compute the gains, cross-fitted: every fold of the sequences is measured with what the others give."""
    count = int(rounds.owner.max()) + 1
    # By sequence: answers of one conversation are alike and stay in one fold.
    fold = np.random.default_rng(SEED).permutation(count)[rounds.owner] % FOLDS  # [A]
    depth = len(rounds.ids) // len(rounds.place)
    fixed = [expected_counts(rounds, np.full(len(rounds.place), k + 1)) for k in range(depth)]
    times = {name: np.zeros(len(fold)) for name in (FIXED, *PREDICTORS)}
    for held in range(FOLDS):
        # Fit and choose on the other folds, measure on this one.
        own, kept = fold == held, fold != held
        best = max(fixed, key=lambda counts: counts.pace(c, kept))
        times[FIXED][own] = best.time(c)[own]
        for name, predict in PREDICTORS.items():
            lengths = settled_lengths(rounds, predict(rounds, kept), c, kept, best)
            times[name][own] = expected_counts(rounds, lengths).time(c)[own]

    # Prompts are resampled with all their answers.
    resamples = Resamples(rounds.owner.tolist(), SEED)

    def gain(name: str, base: str) -> Gain:
        # The tokens are the same, so a ratio of paces is one of times.
        ends = resamples.interval(lambda: resamples.sums(times[base]) / resamples.sums(times[name]) - 1) or ()
        return Gain(float(times[base].sum() / times[name].sum()) - 1, *ends)

    k = 1 + int(np.argmax([counts.pace(c, fold >= 0) for counts in fixed]))
    return StopGains(c, k, gain(ONLINE, FIXED), gain(HEAD, FIXED), gain(HEAD, ONLINE))
