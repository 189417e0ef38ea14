"""Labellers of `data acceptance`: one drafted token at every position of an answer, or whole drafts from some of them.

Whole drafts are made as the decoder makes them: from every `stride`-th token of an answer the drafter drafts K tokens,
and the target, which reads them all in one pass, gives each its acceptance probability: P = min(1, p/q) for sampled
drafts, agreement with its argmax for greedy ones. Drafts go on behind a rejected token; `reached` is the probability
that a round verifies the token.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.data.console import Advance
from draftsmith.data.engines.own import check_lengths, length_batches, pad_right
from draftsmith.data.responses import TEXT_FIELDS
from draftsmith.data.store.datasets import DRAFT_COLUMNS
from draftsmith.data.store.manifest import Field
from draftsmith.data.store.rows import Rows
from draftsmith.data.store.shards import Shard, ShardContent, row_uniforms
from draftsmith.data.text.answers import spans
from draftsmith.modules.acceptance.repeats import repeat_scores
from draftsmith.modules.decoding.confidence import confidences_of
from draftsmith.modules.drafters.branches import BranchDrafter, BranchedText, pieces, target_states
from draftsmith.modules.finite import NO_TOKEN, NonFinite, first_broken, name_nonfinite
from draftsmith.modules.pretrained.heads import FrozenDrafter
from draftsmith.modules.sampling import draw_rows, probabilities, row_probabilities
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import SamplingParams

MIXED_FIELDS = (
    *TEXT_FIELDS,
    Field("draft_ids", "list<int32>", ("R",)),
    *(Field(name, "list<float32>", ("R",)) for name in ("log_p", "log_q", "accept_prob", "overlap")),
    Field("task", "string"),
)
# Lists of drafted tokens, draft after draft: token i of a list has depth i % K + 1 in draft i // K.
ROLLOUT_FIELDS = (
    *TEXT_FIELDS,
    Field("task", "string"),
    Field("starts", "list<int32>", ("S",)),
    Field("temperature", "list<float32>", ("S",)),
    Field("draft_ids", "list<int32>", ("S*K",)),
    *(Field(name, "list<float32>", ("S*K",)) for name in DRAFT_COLUMNS),
)


@dataclass(frozen=True)
class MixedTextLabels:
    """Labeller of one drafted token at every position of the answers.

    batch_size: responses that are read together. chunk: positions whose distributions are in memory at once.
    """

    target: CausalLM
    draft: CausalLM
    params: SamplingParams
    batch_size: int
    chunk: int
    seed: int

    def label_shard(self, source: Rows, shard: Shard, advance: Advance) -> ShardContent:
        """Label every response of a shard, in batches of similar length."""
        rows = source.read(shard.start, shard.stop)
        check_lengths(rows, shard.start, min(self.target.info.max_position, self.draft.info.max_position))
        labeled: list[dict[str, Any]] = [{} for _ in rows]
        for batch in length_batches([len(row["input_ids"]) for row in rows], self.batch_size):
            ids, masks = [rows[i]["input_ids"] for i in batch], [rows[i]["loss_mask"] for i in batch]
            counts = [sum(mask) for mask in masks]
            uniforms = np.concatenate(
                [row_uniforms("acceptance", self.seed, shard.start + i, n) for i, n in zip(batch, counts, strict=True)]
            )
            with name_nonfinite([rows[i]["id"] for i in batch]):
                labels = self.label(ids, masks, torch.from_numpy(uniforms))
            # Give each row its part of the labels.
            columns = {name: values.split(counts) for name, values in labels.items()}
            for place, i in enumerate(batch):
                labeled[i] = text_columns(rows[i]) | {name: parts[place].numpy() for name, parts in columns.items()}
            advance(len(batch))
        drafted = sum(len(row["draft_ids"]) for row in labeled)
        tokens = sum(len(row["input_ids"]) for row in labeled)
        return ShardContent(labeled, {"tokens": tokens, "drafted_tokens": drafted})

    @torch.inference_mode()
    def label(
        self, input_ids: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]], uniforms: Tensor
    ) -> dict[str, Tensor]:
        """Label all N positions where the rows' masks [T] are true (never the first), row after row.

        One forward per model; distributions exist for `chunk` positions at a time, in float32.
        uniforms: [N] float64; uniforms[n] draws Y_n. Returns as `label_positions`.

        Raises:
            NonFinite: a model's logits.
        """
        target, draft, params = self.target, self.draft, self.params
        padded = pad_right(input_ids, target)  # [B, T]
        # The hidden state at position t - 1 gives the distribution of the token at t.
        places = [torch.tensor(mask).nonzero()[:, 0] - 1 for mask in masks]
        positions = torch.cat(places).to(target.device)  # [N]
        owners = torch.cat([torch.full_like(place, i) for i, place in enumerate(places)]).to(target.device)  # [N]
        target_hidden = target.features(padded)[owners, positions]  # [N, H]
        draft_hidden = draft.features(padded.to(draft.device))[owners.to(draft.device), positions.to(draft.device)]
        # Distributions [chunk, V] exist for a chunk of positions at a time.
        parts = []
        for piece in pieces(len(positions), self.chunk):
            target_prob = probabilities(target.lm_head(target_hidden[piece]), params)  # [chunk, V]
            draft_prob = probabilities(draft.lm_head(draft_hidden[piece]), params).to(target_prob.device)
            parts.append(label_positions(target_prob, draft_prob, uniforms[piece].to(target_prob.device)))
        labels = {name: torch.cat([part[name] for part in parts]).cpu() for name in parts[0]}
        # The overlap is NaN where p or q has a NaN.
        broken = labels["overlap"].isnan().nonzero()
        if len(broken):
            n = int(broken[0])
            model = "draft" if labels["draft_ids"][n] == NO_TOKEN else "target"
            raise NonFinite(model=model, position=int(positions[n]) + 1, row=int(owners[n]))
        return labels


def label_positions(target_prob: Tensor, draft_prob: Tensor, uniforms: Tensor) -> dict[str, Tensor]:
    """Draw Y ~ q and label it, for distributions p and q [N, V] in float32 or wider.

    Returns draft_ids [N] int64 and, in float32 [N], log_p and log_q of Y (-inf where p is 0), accept_prob, the
    probability that the target accepts Y, and overlap, sum_v min(p, q), its expectation over q.

    Greedy distributions are one-hot: then Y is the draft's argmax, and accept_prob and overlap are 1 if it is the
    target's too, else 0. If p or q has a NaN the overlap is NaN; if q has one there is no Y.
    """
    drafted = draw_rows(draft_prob, uniforms)
    p, q = (prob.gather(-1, drafted.clamp_min(0)[:, None])[:, 0] for prob in (target_prob, draft_prob))
    # Here q > 0: a token of probability zero is never drawn.
    accept_prob = (p / q).clamp(max=1.0)
    overlap = torch.minimum(target_prob, draft_prob).sum(-1).clamp(max=1.0)
    # log p is -inf for a token that the target never samples.
    labels = {"log_p": p.log(), "log_q": q.log(), "accept_prob": accept_prob, "overlap": overlap}
    return {"draft_ids": drafted, **{name: values.float() for name, values in labels.items()}}


@dataclass(frozen=True)
class Rollouts:
    """Labeller of whole drafts.

    depth: tokens per draft, K. stride: tokens from one draft's start to the next. sampling: drafts take these in turn.
    chunk: positions whose distributions are in memory at once. context: most tokens of a text and a draft together.
    """

    target: CausalLM
    drafter: FrozenDrafter
    depth: int
    stride: int
    sampling: tuple[SamplingParams, ...]
    chunk: int
    seed: int
    context: int

    @functools.cached_property
    def text(self) -> BranchedText:
        """The target's reader of responses and of the drafts that branch off them."""
        return BranchedText(self.target, self.depth)

    def starts(self, mask: Sequence[bool], min_start: int, uniform: float) -> list[int]:
        """Return the first positions of the drafts: every `stride` tokens of the answers, where `mask` [T] is true.

        The first of them is drawn with `uniform`, and each has room for K tokens. An answer's own first token has
        none: the decoder gets it from reading the prompt, before the first draft.
        """
        # A draft needs room for K tokens.
        stop = self.context - self.depth + 1
        places = [at for first, end in spans(mask) for at in range(max(first + 1, min_start), min(end, stop))]
        return places[int(uniform * min(self.stride, len(places))) :: self.stride]

    def label_shard(self, source: Rows, shard: Shard, advance: Advance) -> ShardContent:
        """Label drafts of every response of a shard that has room for one."""
        rows, labeled = source.read(shard.start, shard.stop), []
        check_lengths(rows, shard.start, self.context)
        branches = self.drafter.branches(self.depth)
        for offset, row in enumerate(rows):
            with name_nonfinite([row["id"]]):
                labels = self.label_response(branches, row, shard.start + offset)
            labeled += [labels] if labels else []
            advance(1)
        drafts = sum(len(row["starts"]) for row in labeled)
        counts = {"tokens": sum(len(row["input_ids"]) for row in labeled), "drafts": drafts}
        # Responses without room for a draft have no row.
        too_short = shard.stop - shard.start - len(labeled)
        return ShardContent(labeled, {**counts, "drafted_tokens": drafts * self.depth, "too_short_dropped": too_short})

    @torch.inference_mode()
    def label_response(self, branches: BranchDrafter, row: dict[str, Any], number: int) -> dict[str, Any] | None:
        """Return the labeled row of the `number`-th response; None if no draft has room.

        branches: where the drafter reads the response.

        Raises:
            NonFinite: a model's logits.
        """
        ids, depth = row["input_ids"], self.depth
        # The first uniform places the drafts, the others draw their tokens.
        most = -(-len(ids) // self.stride)
        uniforms = torch.from_numpy(row_uniforms("rollouts", self.seed, number, 1 + most * depth))
        starts = self.starts(row["loss_mask"], branches.min_start, float(uniforms[0]))
        if not starts:
            return None

        # Draft from all S starts. The row's number shifts the settings, so that short responses do not all take the
        # first.
        count = len(starts)
        params = [self.sampling[(number + i) % len(self.sampling)] for i in range(count)]
        draws = uniforms[1 : 1 + count * depth].view(count, depth)
        tokens, labels = self.label(branches, ids, starts, params, draws)
        broken = labels["log_p"].isnan().nonzero()
        if len(broken):
            draft, level = broken[0].tolist()
            raise NonFinite(model="target", position=starts[draft] + level)

        # Labels that depend on the whole text or draft.
        labels["repeat"] = repeat_scores(ids, starts, tokens)
        labels["reached"] = reached(labels["accept_prob"], tokens, self.target.info.eos_ids)
        labels["draft_ids"] = tokens
        drafts = {"starts": starts, "temperature": [setting.temperature for setting in params]}
        return text_columns(row) | drafts | {name: values.flatten().numpy() for name, values in labels.items()}

    def label(
        self,
        branches: BranchDrafter,
        ids: list[int],
        starts: list[int],
        params: list[SamplingParams],
        draws: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Draft from S starts; return the tokens [S, K] and what `label_drafts` says of them, [S, K] each, on the CPU.

        params: of each draft. draws: [S, K] uniforms.
        """
        count, depth, target = len(starts), self.depth, self.target
        greedy = all(setting.greedy for setting in self.sampling)
        opening = ids[: starts[-1]]
        self.text.open(opening)
        features = self.drafter.features(ids, len(opening)) if self.drafter.aux_layers else self.text.features
        branches.open(opening, features)
        try:
            drafted = branches.draft(starts, depth, params, None if greedy else draws)
        except NonFinite as error:
            # A head that reads broken features is not to blame for its logits.
            if self.drafter.head is not None and features is not None:
                error.model = "target" if first_broken(features) is not None else error.model
            raise

        # Let the target read all drafts, then label their tokens, `chunk` at a time.
        states = target_states(self.text, starts, drafted.tokens).flatten(0, 1)  # [S*K, H]
        hidden, tokens = drafted.hidden.flatten(0, 1), drafted.tokens.flatten()  # [S*K, H], [S*K]
        token_params, levels = [params[i // depth] for i in range(count * depth)], torch.arange(depth).repeat(count)
        parts = []
        for piece in pieces(len(tokens), self.chunk):
            p_logits = target.lm_head(states[piece])  # [chunk, V]
            q_logits = branches.lm_head(hidden[piece], levels[piece]).to(states.device)
            parts.append(self.label_drafts(p_logits, q_logits, tokens[piece].to(states.device), token_params[piece]))
        labels = {name: torch.cat([part[name] for part in parts]).cpu().view(count, depth) for name in parts[0]}
        return drafted.tokens.cpu(), labels

    def label_drafts(
        self,
        target_logits: Tensor,
        draft_logits: Tensor,
        tokens: Tensor,
        params: Sequence[SamplingParams],
    ) -> dict[str, Tensor]:
        """Label N drafted tokens [N] by logits [N, V]: DRAFT_COLUMNS except `reached` and repetitions, float32 [N].

        At temperature 0, log_q, log_max_q, entropy and log_p are those at temperature 1; accept_prob is agreement.
        """
        # Greedy distributions are one-hot, and say nothing about confidence.
        drawn = [SamplingParams(1.0) if setting.greedy else setting for setting in params]
        p, q = (row_probabilities(logits, drawn) for logits in (target_logits, draft_logits))  # [N, V]
        confidences = confidences_of(q, tokens, tokens, tokens)
        p_drafted = p.gather(-1, tokens[:, None])[:, 0]
        greedy = torch.tensor([setting.greedy for setting in params], device=p.device)
        agreed = (target_logits.argmax(-1) == tokens).to(p.dtype)
        accept_prob = torch.where(greedy, agreed, (p_drafted / confidences.log_q.exp()).clamp(max=1.0))
        labels = {"log_q": confidences.log_q, "log_max_q": confidences.log_max_q, "entropy": confidences.entropy}
        labels |= {"log_p": p_drafted.log(), "accept_prob": accept_prob}
        return {name: values.float() for name, values in labels.items()}


def text_columns(row: dict[str, Any]) -> dict[str, Any]:
    """Return the columns of a response that its labels repeat."""
    return {name: row[name] for name in ("id", "input_ids", "loss_mask", "turn", "task")}


def reached(accept_prob: Tensor, drafted: Tensor, eos_ids: Sequence[int]) -> Tensor:
    """Return the probability [S, K] that a round verifies each token of drafts [S, K].

    All tokens before it must be accepted, and none of them may be an end token.
    """
    ends = torch.isin(drafted, torch.tensor(eos_ids, dtype=drafted.dtype))
    # Shifted by one: a token is verified if all before it passed.
    passed = (accept_prob * ~ends).cumprod(-1)
    return torch.cat([torch.ones_like(passed[:, :1]), passed[:, :-1]], -1)
