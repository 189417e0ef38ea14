"""Recording chains at every position of the target's answers: those of any drafter, and what prompt lookup finds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftsmith.data.models.loading import name_nonfinite
from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.replay.coupling import CoupledDraws, ReadAnswer, confidence_columns
from draftsmith.eval.replay.record import Recording, TargetAnswers, seed_of, walk
from draftsmith.eval.replay.rollouts import ChainRollouts, Floats, Ints
from draftsmith.modules.acceptance.head import AcceptanceHead
from draftsmith.modules.acceptance.repeats import followers, mean_score, repeat_scores
from draftsmith.modules.decoding.branches import BranchDrafter, BranchedText, DraftModelBranches, pieces, target_states
from draftsmith.modules.decoding.confidence import TokenConfidences, draft_distribution
from draftsmith.modules.decoding.protocols import DraftView, EachRow
from draftsmith.modules.decoding.stop import FixedLength
from draftsmith.modules.drafters.chains import build_chains
from draftsmith.modules.drafters.methods import Models
from draftsmith.modules.drafters.prompt_lookup import PromptLookupDrafter
from draftsmith.modules.finite import NonFinite
from draftsmith.modules.sampling import probabilities
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import SamplingParams


class _Keep(FixedLength):
    """Drafts a fixed number of tokens, and keeps what a stop policy is shown of each until it is taken."""

    def __init__(self, k: int):
        super().__init__(k)
        self._views: list[DraftView] = []

    def should_stop(self, view: DraftView) -> bool:
        self._views.append(view)
        return super().should_stop(view)

    def take(self) -> list[DraftView]:
        views, self._views = self._views, []
        return views


@dataclass(frozen=True)
class _Drafts:
    """Drafts of at most K tokens from all S places of an answer where a round may begin.

    token [S, K]: -1 behind a draft's end. known: columns of `ChainRollouts` [S, K], by name. read [S, K]: tokens that
    the drafter has read. before, after: its states [N, H] that predicted the N tokens, and those once it has read the
    N tokens of `read`.
    """

    token: Ints
    known: Mapping[str, Floats]
    read: NDArray[np.bool_]
    before: Tensor
    after: Tensor


class ChainRecorder:
    """Records one answer after another, with one drafter."""

    def __init__(
        self,
        models: Models,
        drafter: str,
        how: Recording,
        heads: Mapping[str, AcceptanceHead],
        answers: TargetAnswers | None = None,
        along: bool = False,
        side_by_side: bool = False,
    ):
        """answers: those of other recordings of the same prompts, if there are any. along: sampling, ask the target
        of drafted tokens below the first rejection too. side_by_side: draft from all places of an answer together, ten
        times as fast; logits then differ in the last bits from those of the decoder's own drafter, and greedy drafts
        where two tokens are that close."""
        self._models, self._name, self._how, self._heads = models, drafter, how, heads
        self._answers = answers or TargetAnswers(models.target, how)
        self._side_by_side = side_by_side
        self._along = BranchedText(models.target, how.depth) if along and not how.params.greedy else None
        # One token more than is kept: a head of state `after` predicts for a token once the forward behind it has read
        # it.
        self._keep = _Keep(how.depth + 1)
        self._drafter = build_chains(models, drafter, [self._keep])

    @torch.inference_mode()
    def __call__(self, prompt: BenchPrompt, number: int) -> ChainRollouts:
        """number: of the answer, which seeds it."""
        with name_nonfinite([prompt.id]):
            reading = self._answers.read(prompt, number, self._how.depth, self._drafter.capture)
            together = self._side_by_side and self._fits(prompt, reading)
            drafts = (self._together if together else self._one_by_one)(prompt, number, reading)
            found = chain_rollouts(reading, drafts.token, drafts.known)
            text = [*prompt.prompt_ids, *reading.answer.tokens]
            starts = range(len(prompt.prompt_ids) + 1, len(text))
            token = torch.from_numpy(found.token)
            halves, expected = followers(text, starts, token)
            found = replace(found, repeat=repeat_scores(halves, expected, token).double().numpy())
            means = self._repeat_means(drafts, halves, expected)
            found = replace(
                found, heads={name: self._head_logits(head, drafts, found, means) for name, head in self._heads.items()}
            )
            if self._along is None:
                return found
            along = accept_along(self._along, self._models.target, prompt.prompt_ids, self._how.params, found)
            return replace(found, accept_along=along)

    def _fits(self, prompt: BenchPrompt, reading: ReadAnswer) -> bool:
        """No draft meets the end of the drafter's context; and there is one."""
        models, count = self._models, len(reading.answer.tokens)
        if self._name == "draft":
            assert models.draft is not None
            own = models.draft.info.max_position
        else:
            own = models.heads[self._name].config.max_position
        most = min(models.target.info.max_position, own)
        return count > 1 and len(prompt.prompt_ids) + count + self._how.depth + 1 <= most

    def _one_by_one(self, prompt: BenchPrompt, number: int, reading: ReadAnswer) -> _Drafts:
        """By the decoder's own drafter, round after round."""
        depth = self._how.depth
        shape = (len(reading.answer.tokens) - 1, depth)
        token, read = np.full(shape, -1, np.int64), np.zeros(shape, bool)
        known: dict[str, Floats] = {}
        states: list[Tensor] = []  # of all rounds: of each the first and the last `depth`
        after: list[Tensor] = []
        for row, _ in enumerate(walk(self._drafter, reading, prompt.prompt_ids, self._how, depth + 1, number)):
            views = self._keep.take()  # that of a token has read the one before it
            kept = views[:depth]
            if not kept:
                continue
            read[row, : len(views) - 1] = True
            if self._heads:
                states += [view.hidden for view in kept]
                after += [view.hidden for view in views[1:]]
            drafted = torch.tensor([view.token for view in kept])
            distributions = torch.stack([draft_distribution(view) for view in kept])
            token[row, : len(kept)] = drafted
            places = row + 1 + torch.arange(len(kept))
            columns = confidence_columns(distributions, drafted.to(distributions.device), reading.text, places)
            for name, values in columns.items():
                known.setdefault(name, np.full(shape, np.nan))[row, : len(kept)] = values.cpu().numpy()
        return _Drafts(token, known, read, _stacked(states), _stacked(after))

    def _branches(self, depth: int) -> BranchDrafter:
        models = self._models
        if self._name != "draft":
            return models.heads[self._name].branches(models.target, depth)
        assert models.draft is not None
        return DraftModelBranches(models.draft, depth)

    def _together(self, prompt: BenchPrompt, number: int, reading: ReadAnswer) -> _Drafts:
        """From all places at once. Drafts end with an end token here too."""
        depth, first, answer = self._how.depth, len(prompt.prompt_ids), reading.answer.tokens
        models, branches = self._models, self._branches(depth + 1)
        # The last token is not needed: no round begins behind it.
        branches.open([*prompt.prompt_ids, *answer[:-1]], reading.features[: first + len(answer) - 1])
        draws = CoupledDraws(reading, depth + 1, self._how.params, seed_of(self._how.seed, number, depth + 1))
        drafted = branches.grow([first + start for start in range(1, len(answer))], depth + 1, draws)
        token = drafted.tokens[:, :depth].cpu().numpy()
        is_end = np.isin(token, list(models.ends))
        behind = (is_end.cumsum(1) - is_end) > 0
        read = ~behind & ~is_end
        before, after = drafted.hidden[:, :-1], drafted.hidden[:, 1:]
        known = {name: values[:, :-1].numpy() for name, values in draws.known.items()}
        return _Drafts(
            np.where(behind, -1, token), known, read, before[torch.from_numpy(~behind)], after[torch.from_numpy(read)]
        )

    def _repeat_means(self, drafts: _Drafts, halves: Tensor, expected: Tensor) -> Floats | None:
        """[S, K]: `RepeatScores.mean` of every token, by the states that predicted them; None where no head asks."""
        if not any("repeat_mean" in head.config.features for head in self._heads.values()):
            return None
        params, mask = self._how.params, torch.from_numpy(drafts.token >= 0)
        logits = self._branches(1).lm_head(drafts.before, mask.nonzero()[:, 1])
        q = logits.float().softmax(-1) if params.greedy else probabilities(logits, params)
        followed = q.gather(-1, expected[mask].clamp_min(0)[:, None].to(q.device))[:, 0]
        means = torch.zeros_like(halves, dtype=torch.float64)
        means[mask] = mean_score(halves[mask].double(), followed.double().cpu())
        return means.numpy()

    def _head_logits(
        self, head: AcceptanceHead, drafts: _Drafts, rollouts: ChainRollouts, means: Floats | None
    ) -> Floats:
        """Raw logits [S, K], NaN where there is no token, or none that the head can predict for: all of an answer in
        one call. means: as of `_repeat_means`."""
        config = head.config
        mask, hidden = (drafts.read, drafts.after) if config.late else (rollouts.token >= 0, drafts.before)
        logits = np.full(mask.shape, np.nan)
        if not mask.any():
            return logits

        def of_tokens(values: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values[mask])).to(hidden.device)

        embeds = features = None
        if config.reads_token:
            embeds = self._models.embedder(self._name).embed(of_tokens(rollouts.token))
        if config.features:
            assert rollouts.repeat is not None
            depth = of_tokens(np.broadcast_to(np.arange(1, rollouts.depth + 1), mask.shape)).double()
            confidences = TokenConfidences(
                of_tokens(rollouts.log_q),
                of_tokens(rollouts.log_max_q),
                of_tokens(rollouts.entropy),
                depth,
                torch.full_like(depth, self._how.params.temperature),
                of_tokens(rollouts.repeat),
                None if means is None else of_tokens(means),
            )
            features = head.feature_values(confidences)
        logits[mask] = head(hidden, embeds, features).double().cpu().numpy()
        if not np.isfinite(logits[mask]).all():
            raise NonFinite("output", "acceptance", None)
        return logits


def _stacked(states: list[Tensor]) -> Tensor:
    return torch.stack(states) if states else torch.empty(0, 0)


class LookupRecorder:
    """Records what prompt lookup would draft; no model is asked. A lookup has no distribution: what is known of one is
    NaN, accepted or not is not, since its tokens are kept where they are the text's, greedy and sampling alike."""

    def __init__(self, answers: TargetAnswers, how: Recording, ngram: int):
        """how: of drafts of `depth` tokens or fewer."""
        self._answers, self._how, self._ngram = answers, how, ngram

    def __call__(self, prompt: BenchPrompt, number: int) -> ChainRollouts:
        """number: of the answer, which seeds it."""
        how = self._how
        reading = self._answers.read(prompt, number, how.depth)
        token = np.full((len(reading.answer.tokens) - 1, how.depth), -1, np.int64)
        drafter = EachRow([PromptLookupDrafter(how.depth, self._ngram)])
        for row, tree in enumerate(walk(drafter, reading, prompt.prompt_ids, how, how.depth, number)):
            token[row, : len(tree.tokens)] = tree.tokens
        return chain_rollouts(reading, token, {})


def chain_rollouts(reading: ReadAnswer, token: Ints, known: Mapping[str, Floats]) -> ChainRollouts:
    """Rollouts of one answer: what its text says of the drafts [S, K] that begin in all of its places.

    token: -1 behind a draft's end. known: `log_q` and so on [S, K], NaN where they are not among it; without
    `accept_prob` a token is accepted where it is the text's.
    """
    text, count = np.array(reading.text.tokens), len(token)
    start, offset = np.arange(1, count + 1), np.arange(token.shape[1])
    place = start[:, None] + offset
    same = (place < len(text)) & (token == text[np.minimum(place, len(text) - 1)])
    equal = same.cumprod(1).sum(1)  # a coupled draft differs from the text exactly where it is rejected
    left = count + 1 - start
    accepted = np.minimum(equal, left)
    labelled = (offset <= equal[:, None]) & (offset < left[:, None])
    drafted = token >= 0

    def column(name: str) -> Floats:
        return np.where(drafted, known.get(name, np.nan), np.nan)

    return ChainRollouts(
        answers=[reading.answer],
        answer=np.zeros(count, np.int64),
        start=start,
        token=token,
        num_accepted=accepted,
        log_q=column("log_q"),
        log_max_q=column("log_max_q"),
        entropy=column("entropy"),
        accept_prob=np.where(labelled & drafted, known.get("accept_prob", same), np.nan),
        past_end=equal - accepted,
    )


def accept_along(
    text: BranchedText, target: CausalLM, prompt: list[int], params: SamplingParams, recorded: ChainRollouts
) -> Floats:
    """[S, K]: min(1, p(y)/q(y)) of every drafted token of one answer's rounds, p after the drafted tokens before it.

    text: where the target reads. Where `recorded.accept_prob` has it, it is that. NaN beyond a draft's end, and beyond
    the target's context.

    Raises:
        NonFinite: the target's logits.
    """
    (answer,), first = recorded.answers, len(prompt)
    found = recorded.accept_prob.copy()
    room = np.minimum(target.info.max_position - first - recorded.start, recorded.depth)
    text.open([*prompt, *answer.tokens[:-1]])  # no round begins behind the last token
    for depth in np.unique(room[room > 0]).tolist():  # near the context's end drafts are cut short
        rows = np.flatnonzero(room == depth)
        for group in (rows[piece] for piece in pieces(len(rows), text.group)):
            token = torch.from_numpy(recorded.token[group, :depth])
            drafted = token.clamp_min(0)
            states = target_states(text, (first + recorded.start[group]).tolist(), drafted)
            p = probabilities(target.lm_head(states), params)
            own = p.gather(-1, drafted[..., None].to(p.device))[..., 0].double().cpu().numpy()
            wanted = np.isnan(found[group, :depth]) & (token.numpy() >= 0)
            if (broken := wanted & np.isnan(own)).any():
                row, place = np.argwhere(broken)[0].tolist()
                raise NonFinite(model="target", position=first + int(recorded.start[group[row]]) + place)
            found[group, :depth] = np.where(
                wanted, np.minimum(own / np.exp(recorded.log_q[group, :depth]), 1.0), found[group, :depth]
            )
    return found
