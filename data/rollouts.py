"""Labels of `data acceptance --labels rollout`: rounds as the decoder drafts them, from places of the target's text.

From every `stride`-th token of an answer the drafter drafts K tokens of its own, and the target, which reads them all
in one pass, says of each how likely it keeps it: P = min(1, p/q) where the drafts are sampled, agreement with its
argmax where they are greedy. Drafts go on behind a rejected token; `reached` is the probability
that a round comes that far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.data.console import Advance
from draftsmith.data.engines.own import check_lengths, row_uniforms
from draftsmith.data.heads.frozen_drafter import FrozenDrafter
from draftsmith.data.models.loading import name_nonfinite
from draftsmith.data.responses import TEXT_FIELDS
from draftsmith.data.store.manifest import Field
from draftsmith.data.store.shards import Rows, Shard, ShardContent
from draftsmith.data.text.answers import answer_mask, spans
from draftsmith.modules.acceptance.repeats import followers, mean_score, repeat_scores
from draftsmith.modules.decoding.branches import BranchDrafter, BranchedText, Drafted, pieces, target_states
from draftsmith.modules.decoding.confidence import confidences_of
from draftsmith.modules.finite import NonFinite, first_broken
from draftsmith.modules.sampling import row_probabilities
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import SamplingParams

# Of each drafted token, draft after draft: token i of the list is at depth i % K + 1 of draft i // K.
LABELS = ("log_q", "log_max_q", "entropy", "repeat", "repeat_mean", "log_p", "accept_prob", "overlap", "reached")
FIELDS = (
    *TEXT_FIELDS,
    Field("task", "string"),
    Field("starts", "list<int32>", ("S",)),
    Field("temperature", "list<float32>", ("S",)),
    Field("draft_ids", "list<int32>", ("S*K",)),
    *(Field(name, "list<float32>", ("S*K",)) for name in LABELS),
)


@dataclass(frozen=True)
class Rollouts:
    """How to draft and label.

    drafter: what drafts; the target reads the drafts.
    depth: tokens of a draft, K. stride: a draft begins at every so many tokens.
    sampling: drafts take them in turn.
    chunk: places whose distributions are in memory at once. context: most tokens of a text and a draft together.
    """

    kind = "rollouts"
    fields = FIELDS  # columns of the artefact

    target: CausalLM
    drafter: FrozenDrafter
    depth: int
    stride: int
    sampling: tuple[SamplingParams, ...]
    chunk: int
    seed: int
    context: int

    @property
    def greedy(self) -> bool:
        """Nothing is drawn."""
        return all(params.greedy for params in self.sampling)

    def starts(self, mask: Sequence[bool], min_start: int, uniform: float) -> list[int]:
        """Where drafts begin: every `stride` tokens of the answers, which `mask` [T] is true on, from a random place
        on, each with room for K tokens.

        The decoder's first draft follows an answer's first token, which the reading of the prompt gives.
        """
        stop = self.context - self.depth + 1
        places = [at for first, end in spans(mask) for at in range(max(first + 1, min_start), min(end, stop))]
        return places[int(uniform * min(self.stride, len(places))) :: self.stride]

    def label_shard(self, source: Rows, shard: Shard, advance: Advance) -> ShardContent:
        """Labelled drafts of every response of a shard that has room for one."""
        rows, made = source.read(shard.start, shard.stop), []
        check_lengths(rows, shard.start, self.context)
        text, branches = BranchedText(self.target, self.depth), self.drafter.branches(self.depth)
        for offset, row in enumerate(rows):
            with name_nonfinite([row["id"]]):
                labelled = self.label_response(text, branches, row, shard.start + offset)
            made += [labelled] if labelled else []
            advance(1)
        drafts = sum(len(row["starts"]) for row in made)
        counts = {"tokens": sum(len(row["input_ids"]) for row in made), "drafts": drafts}
        short = shard.stop - shard.start - len(made)
        return ShardContent(made, {**counts, "drafted_tokens": drafts * self.depth, "too_short_dropped": short})

    @torch.inference_mode()
    def label_response(
        self, text: BranchedText, branches: BranchDrafter, row: dict[str, Any], number: int
    ) -> dict[str, Any] | None:
        """The artefact's row of one response, the source's `number`-th; None where no draft has room.

        text: where the target reads it. branches: where the drafter does.

        Raises:
            NonFinite: a model's logits.
        """
        ids, depth, target = row["input_ids"], self.depth, self.target
        most = -(-len(ids) // self.stride)
        uniforms = torch.from_numpy(row_uniforms("rollouts", self.seed, number, 1 + most * depth))
        starts = self.starts(answer_mask(row), branches.min_start, float(uniforms[0]))
        if not starts:
            return None
        count = len(starts)
        # By the row's number too, so that short responses do not all take the first.
        params = [self.sampling[(number + i) % len(self.sampling)] for i in range(count)]
        own = uniforms[1 : 1 + count * depth].view(count, depth)
        drafted = self._draft(text, branches, ids[: starts[-1]], starts, params, None if self.greedy else own)
        states = target_states(text, starts, drafted.tokens).flatten(0, 1)
        hidden, tokens = drafted.hidden.flatten(0, 1), drafted.tokens.flatten()
        every, levels = [params[i // depth] for i in range(count * depth)], torch.arange(depth).repeat(count)
        halves, expected = followers(ids, starts, drafted.tokens.cpu())
        parts = []
        for piece in pieces(len(tokens), self.chunk):
            p_logits = target.lm_head(states[piece])
            q_logits = branches.lm_head(hidden[piece], levels[piece]).to(states.device)
            own, followed = (t.flatten()[piece].to(states.device) for t in (tokens, expected))
            parts.append(self.label_drafts(p_logits, q_logits, own, every[piece], followed))
        labels = {name: torch.cat([part[name] for part in parts]).cpu() for name in parts[0]}
        broken = labels["log_p"].isnan().nonzero()
        if len(broken):
            n = int(broken[0])
            raise NonFinite(model="target", position=starts[n // depth] + n % depth)
        tokens, accept_prob = drafted.tokens.cpu(), labels["accept_prob"].view(count, depth)
        labels["repeat"] = repeat_scores(halves, expected, tokens)
        labels["repeat_mean"] = mean_score(halves, labels.pop("q_followed").view(count, depth))
        labels["reached"] = reached(accept_prob, tokens, target.info.eos_ids)
        labels["draft_ids"] = tokens
        drafts = {"starts": starts, "temperature": [own.temperature for own in params]}
        return {**kept_of(row), **drafts, **{name: values.flatten().numpy() for name, values in labels.items()}}

    def _draft(
        self,
        text: BranchedText,
        branches: BranchDrafter,
        ids: Sequence[int],
        starts: Sequence[int],
        params: Sequence[SamplingParams],
        uniforms: Tensor | None,
    ) -> Drafted:
        """Drafts from all starts of a text [T], which target and drafter read."""
        text.open(ids)
        features = self.drafter.features(ids) if self.drafter.capture else text.features
        branches.open(ids, features)
        try:
            return branches.draft(starts, self.depth, params, uniforms)
        except NonFinite as error:
            head = self.drafter.head
            if head is not None and head.needs_features and features is not None:
                error.model = "target" if first_broken(features) is not None else error.model
            raise

    def label_drafts(
        self,
        target_logits: Tensor,
        draft_logits: Tensor,
        tokens: Tensor,
        params: Sequence[SamplingParams],
        followed: Tensor,
    ) -> dict[str, Tensor]:
        """What LABELS names of N drafted tokens [N], `reached` and repetitions aside, and q of the tokens `followed`
        [N], of which some are none; float32 [N]. Logits [N, V].

        Greedy distributions are those at temperature 1 in log_q, log_max_q, entropy and log_p; the overlap is
        agreement.
        """
        drawn = [SamplingParams(1.0) if own.greedy else own for own in params]
        p, q = (row_probabilities(logits, drawn) for logits in (target_logits, draft_logits))
        known = confidences_of(q, tokens, tokens, tokens)
        own = p.gather(-1, tokens[:, None])[:, 0]
        greedy = torch.tensor([own.greedy for own in params], device=p.device)
        agreed = (target_logits.argmax(-1) == tokens).to(p.dtype)
        overlap = torch.where(greedy, agreed, torch.minimum(p, q).sum(-1).clamp(max=1.0))
        accept_prob = torch.where(greedy, agreed, (own / known.log_q.exp()).clamp(max=1.0))
        labels = {"log_q": known.log_q, "log_max_q": known.log_max_q, "entropy": known.entropy}
        labels["q_followed"] = q.gather(-1, followed.clamp_min(0)[:, None])[:, 0]
        labels |= {"log_p": own.log(), "accept_prob": accept_prob, "overlap": overlap}
        return {name: values.float() for name, values in labels.items()}


def kept_of(row: dict[str, Any]) -> dict[str, Any]:
    """What labels take over from a response."""
    kept = {name: row[name] for name in ("id", "input_ids", "prompt_length", "task")}
    return {**kept, "loss_mask": answer_mask(row), "turn": row.get("turn", 1)}


def reached(accept_prob: Tensor, drafted: Tensor, eos_ids: Sequence[int]) -> Tensor:
    """[S, K]: the probability that a round verifies each token of drafts [S, K]: that all before it are kept, none of
    them an end token."""
    ends = torch.isin(drafted, torch.tensor(eos_ids, dtype=drafted.dtype))
    passed = (accept_prob * ~ends).cumprod(-1)
    return torch.cat([torch.ones_like(passed[:, :1]), passed[:, :-1]], -1)
