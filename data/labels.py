"""Labellers of `data acceptance`: one drafted token at every position of an answer, or whole drafts from some of them.

Whole drafts are made as the decoder makes them: from every `stride`-th token of an answer the drafter drafts K tokens,
and the target, which reads them all in one pass, gives each its acceptance probability. Drafts go on behind a rejected
token; `reached` is the probability that a round verifies the token.
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
from draftsmith.data.responses import TEXT_FIELDS, text_columns
from draftsmith.data.store.manifest import Field
from draftsmith.data.store.rows import Rows
from draftsmith.data.store.shards import Shard, ShardContent, row_uniforms
from draftsmith.data.text.answers import spans
from draftsmith.modules.along import Text
from draftsmith.modules.drafters.branches import BranchDrafter, BranchedText, pieces, target_states
from draftsmith.modules.finite import NO_TOKEN, NonFinite, name_nonfinite
from draftsmith.modules.pretrained.heads import FrozenDrafter
from draftsmith.modules.sampling import best_tokens, draw_rows, probabilities
from draftsmith.modules.targets.base import CausalLM, final_state
from draftsmith.modules.types import SamplingParams

LABELS = ("log_p", "log_q", "accept_prob")
MIXED_FIELDS = (
    *TEXT_FIELDS,
    Field("draft_ids", "list<int32>", ("R",)),
    *(Field(name, "list<float32>", ("R",)) for name in LABELS),
    Field("task", "string"),
)
# Lists of drafted tokens, draft after draft: token i of a list has depth i % K + 1 in draft i // K.
ROLLOUT_FIELDS = (
    *TEXT_FIELDS,
    Field("task", "string"),
    Field("starts", "list<int32>", ("S",)),
    Field("draft_ids", "list<int32>", ("S*K",)),
    *(Field(name, "list<float32>", ("S*K",)) for name in (*LABELS, "reached")),
)


def label_tokens(
    target_logits: Tensor,
    draft_logits: Tensor,
    params: SamplingParams,
    tokens: Tensor | None = None,
    uniforms: Tensor | None = None,
) -> dict[str, Tensor]:
    """Label drafted tokens [N] by logits [N, V] of the target and of the draft, p and q.

    tokens: those that were drafted; None takes Y ~ q, drawn with uniforms [N] in [0, 1).

    Returns draft_ids [N] int64 (NO_TOKEN where q has a NaN) and, in float32 [N], log_p and log_q of Y (-inf where p is
    0) and accept_prob, the probability that the target accepts Y, min(1, p/q).

    Greedy distributions are one-hot and say nothing about confidence: then Y is the draft's argmax, accept_prob is 1 if
    it is the target's too, else 0, and log_p and log_q are those at temperature 1.
    """
    p, q = (
        probabilities(logits, SamplingParams(1.0) if params.greedy else params)
        for logits in (target_logits, draft_logits)
    )  # [N, V]
    if tokens is None:
        assert uniforms is not None or params.greedy
        tokens = best_tokens(draft_logits) if uniforms is None or params.greedy else draw_rows(q, uniforms)
    p_drafted, q_drafted = (prob.gather(-1, tokens.clamp_min(0)[:, None])[:, 0] for prob in (p, q))
    if params.greedy:
        accept_prob = (best_tokens(target_logits) == tokens).to(p.dtype)
    else:
        # Here q > 0: a token of probability zero is never drawn.
        accept_prob = (p_drafted / q_drafted).clamp(max=1.0)
    labels = {"log_p": p_drafted.log(), "log_q": q_drafted.log(), "accept_prob": accept_prob}
    return {"draft_ids": tokens, **{name: values.float() for name, values in labels.items()}}


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
        uniforms: [N] float64; uniforms[n] draws Y_n. Returns as `label_tokens`.

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
            target_logits = target.lm_head(target_hidden[piece])  # [chunk, V]
            draft_logits = draft.lm_head(draft_hidden[piece]).to(target_logits.device)
            draws = uniforms[piece].to(target_logits.device)
            parts.append(label_tokens(target_logits, draft_logits, params, uniforms=draws))
        labels = {name: torch.cat([part[name] for part in parts]).cpu() for name in parts[0]}
        no_draft = labels["draft_ids"] == NO_TOKEN
        broken = (no_draft | labels["log_p"].isnan()).nonzero()
        if len(broken):
            n = int(broken[0])
            raise NonFinite(
                model="draft" if no_draft[n] else "target", position=int(positions[n]) + 1, row=int(owners[n])
            )
        return labels


@dataclass(frozen=True)
class Rollouts:
    """Labeller of whole drafts.

    depth: tokens per draft, K. stride: tokens from one draft's start to the next. chunk: positions whose distributions
    are in memory at once. context: most tokens of a text and a draft together.
    """

    target: CausalLM
    drafter: FrozenDrafter
    depth: int
    stride: int
    params: SamplingParams
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

        draws = uniforms[1 : 1 + len(starts) * depth].view(len(starts), depth)
        labels = self.label(branches, ids, starts, draws)
        broken = labels["log_p"].isnan().nonzero()
        if len(broken):
            draft, level = broken[0].tolist()
            raise NonFinite(model="target", position=starts[draft] + level)
        labels["reached"] = reached(labels["accept_prob"], labels["draft_ids"], self.target.info.eos_ids)
        flat = {name: values.flatten().numpy() for name, values in labels.items()}
        return text_columns(row) | {"starts": starts} | flat

    def label(self, branches: BranchDrafter, ids: list[int], starts: list[int], draws: Tensor) -> dict[str, Tensor]:
        """Draft from S starts; return what `label_tokens` says of the tokens, [S, K] each, on the CPU.

        draws: [S, K] uniforms.
        """
        count, depth, target, params = len(starts), self.depth, self.target, self.params
        self.text.open(ids[: starts[-1]])
        if branches.aux_layers:
            text = Text.read(target, ids, (), branches.aux_layers)
        else:
            text = Text.of(ids, (), self.text.features, [final_state(target.info.num_layers)])
        drafted = text.open(branches, starts[-1]).draft(starts, depth, params, draws)

        # Let the target read all drafts, then label their tokens, `chunk` at a time.
        states = target_states(self.text, starts, drafted.tokens).flatten(0, 1)  # [S*K, H]
        hidden, tokens = drafted.hidden.flatten(0, 1), drafted.tokens.flatten()  # [S*K, H], [S*K]
        parts = []
        for piece in pieces(len(tokens), self.chunk):
            p_logits = target.lm_head(states[piece])  # [chunk, V]
            q_logits = branches.lm_head(hidden[piece]).to(states.device)
            parts.append(label_tokens(p_logits, q_logits, params, tokens[piece].to(states.device)))
        return {name: torch.cat([part[name] for part in parts]).cpu().view(count, depth) for name in parts[0]}


def reached(accept_prob: Tensor, drafted: Tensor, eos_ids: Sequence[int]) -> Tensor:
    """Return the probability [S, K] that a round verifies each token of drafts [S, K].

    All tokens before it must be accepted, and none of them may be an end token.
    """
    ends = torch.isin(drafted, torch.tensor(eos_ids, dtype=drafted.dtype))
    # Shifted by one: a token is verified if all before it passed.
    passed = (accept_prob * ~ends).cumprod(-1)
    return torch.cat([torch.ones_like(passed[:, :1]), passed[:, :-1]], -1)
