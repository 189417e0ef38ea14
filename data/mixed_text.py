"""Labels of `data acceptance --labels mix`, of SpecDec++ (Huang et al. 2024), section 3.3: one drafted token at every
position of an answer.

X is what the target answered, in one turn or several. The draft reads prompt and X (teacher forcing) and at every token
of an answer proposes Y_j ~ q(. | x, X_<j); the target keeps it with P_j = min(1, p(Y_j) / q(Y_j)).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.data.console import Advance
from draftsmith.data.engines.own import check_lengths, length_batches, pad_right, row_uniforms
from draftsmith.data.models.loading import name_nonfinite
from draftsmith.data.responses import TEXT_FIELDS
from draftsmith.data.rollouts import kept_of
from draftsmith.data.store.manifest import Field
from draftsmith.data.store.shards import Rows, Shard, ShardContent
from draftsmith.data.text.answers import answer_mask
from draftsmith.modules.decoding.branches import pieces
from draftsmith.modules.finite import NO_TOKEN, NonFinite
from draftsmith.modules.sampling import draw_rows, probabilities
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import SamplingParams

FIELDS = (
    *TEXT_FIELDS,
    Field("draft_ids", "list<int32>", ("R",)),
    *(Field(name, "list<float32>", ("R",)) for name in ("log_p", "log_q", "accept_prob", "overlap")),
    Field("task", "string"),
)


@dataclass(frozen=True)
class MixedTextLabels:
    """How to label.

    batch_size: responses that are read together. chunk: positions whose distributions are in memory at once.
    """

    kind = "acceptance"
    fields = FIELDS

    target: CausalLM
    draft: CausalLM
    params: SamplingParams
    batch_size: int
    chunk: int
    seed: int

    def label_shard(self, source: Rows, shard: Shard, advance: Advance) -> ShardContent:
        """Labels of every response of a shard, in batches of like length."""
        rows = source.read(shard.start, shard.stop)
        check_lengths(rows, shard.start, min(self.target.info.max_position, self.draft.info.max_position))
        made: list[dict[str, Any]] = [{} for _ in rows]
        for batch in length_batches([len(row["input_ids"]) for row in rows], self.batch_size):
            ids, masks = [rows[i]["input_ids"] for i in batch], [answer_mask(rows[i]) for i in batch]
            counts = [sum(mask) for mask in masks]
            drawn = [
                row_uniforms("acceptance", self.seed, shard.start + i, n) for i, n in zip(batch, counts, strict=True)
            ]
            with name_nonfinite([rows[i]["id"] for i in batch]):
                labels = self.label(ids, masks, torch.from_numpy(np.concatenate(drawn)))
            columns = {name: values.split(counts) for name, values in labels.items()}
            for place, i in enumerate(batch):
                made[i] = {**kept_of(rows[i]), **{name: parts[place].numpy() for name, parts in columns.items()}}
            advance(len(batch))
        drafted = sum(len(row["draft_ids"]) for row in made)
        return ShardContent(made, {"tokens": sum(len(row["input_ids"]) for row in made), "drafted_tokens": drafted})

    @torch.inference_mode()
    def label(
        self, input_ids: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]], uniforms: Tensor
    ) -> dict[str, Tensor]:
        """What `label_positions` says of all positions of these rows where their masks [T] are true (never the first),
        one row after the other: N in all.

        One forward of each model; distributions exist for `chunk` positions at a time, in float32.
        uniforms: [N] float64; uniforms[n] draws Y_n.

        Raises:
            NonFinite: a model's logits.
        """
        target, draft, params = self.target, self.draft, self.params
        padded = pad_right(input_ids, target)
        # The hidden state at position t - 1 gives the distribution of the token at t.
        places = [torch.tensor(mask).nonzero()[:, 0] - 1 for mask in masks]
        positions = torch.cat(places).to(target.device)
        owners = torch.cat([torch.full_like(own, i) for i, own in enumerate(places)]).to(target.device)
        target_hidden = target.features(padded)[owners, positions]
        draft_hidden = draft.features(padded.to(draft.device))[owners.to(draft.device), positions.to(draft.device)]
        parts = []
        for piece in pieces(len(positions), self.chunk):
            target_prob = probabilities(target.lm_head(target_hidden[piece]), params)
            draft_prob = probabilities(draft.lm_head(draft_hidden[piece]), params).to(target_prob.device)
            parts.append(label_positions(target_prob, draft_prob, uniforms[piece].to(target_prob.device)))
        labels = {name: torch.cat([part[name] for part in parts]).cpu() for name in parts[0]}
        broken = labels["overlap"].isnan().nonzero()  # where p or q has a NaN
        if len(broken):
            n = int(broken[0])
            model = "draft" if labels["draft_ids"][n] == NO_TOKEN else "target"
            raise NonFinite(model=model, position=int(positions[n]) + 1, row=int(owners[n]))
        return labels


def label_positions(target_prob: Tensor, draft_prob: Tensor, uniforms: Tensor) -> dict[str, Tensor]:
    """Y ~ q and its labels for distributions p and q, each [N, V] in float32 or wider: draft_ids [N] int64; and in
    float32 [N] log_p and log_q of it (-inf where p is 0), accept_prob, the probability that the target keeps it, and
    overlap, sum_v min(p, q), which is that probability averaged over q.

    Greedy distributions are one-hot: then Y is the draft's argmax, and P and the overlap are 1 where the target's is
    the same, else 0. Where p or q has a NaN the overlap is NaN, and where it is q's there is no Y.
    """
    drafted = draw_rows(draft_prob, uniforms)
    p, q = (prob.gather(-1, drafted.clamp_min(0)[:, None])[:, 0] for prob in (target_prob, draft_prob))
    accept_prob = (p / q).clamp(max=1.0)  # q > 0: a token of probability zero is never drawn
    overlap = torch.minimum(target_prob, draft_prob).sum(-1).clamp(max=1.0)
    labels = {"log_p": p.log(), "log_q": q.log(), "accept_prob": accept_prob, "overlap": overlap}
    return {"draft_ids": drafted, **{name: values.float() for name, values in labels.items()}}
