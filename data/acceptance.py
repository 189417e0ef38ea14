"""Stage `data acceptance`: label tokens that a drafter proposes along the target's text with their acceptance.

Labels `mix` are SpecDec++'s (Huang et al. 2024, section 3.3), one drafted token at every position of an answer: the
draft reads prompt and response X (teacher forcing) and proposes Y_j ~ q(. | x, X_<j), which the target accepts with
P_j = min(1, p(Y_j) / q(Y_j)). Labels `rollout` are of whole drafts, as the decoder makes them (data/rollouts.py).
Labels hold only for the sampling settings that they were made with, which the manifest records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.data.console import Advance
from draftsmith.data.engines.own import check_lengths, length_batches, pad_right, set_threads
from draftsmith.data.responses import TEXT_FIELDS
from draftsmith.data.rollouts import ROLLOUT_FIELDS, Rollouts, StoredRollouts, text_columns
from draftsmith.data.settings import AcceptanceConfig
from draftsmith.data.store.manifest import Field, open_artifact
from draftsmith.data.store.rows import Rows
from draftsmith.data.store.shards import Shard, ShardContent, StagePlan, row_uniforms, run_stage
from draftsmith.data.store.stored_target import StoredLM, load_stored
from draftsmith.data.store.writer import sole_writer
from draftsmith.modules.drafters.branches import pieces
from draftsmith.modules.finite import NO_TOKEN, NonFinite, name_nonfinite
from draftsmith.modules.pretrained.heads import FrozenDrafter, kind_at, load_drafter
from draftsmith.modules.pretrained.models import load_lm, pick_device
from draftsmith.modules.pretrained.tokenizers import check_same_tokenizer, text_identity
from draftsmith.modules.sampling import draw_rows, probabilities
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import InputError, SamplingParams

MIXED_FIELDS = (
    *TEXT_FIELDS,
    Field("draft_ids", "list<int32>", ("R",)),
    *(Field(name, "list<float32>", ("R",)) for name in ("log_p", "log_q", "accept_prob", "overlap")),
    Field("task", "string"),
)


@sole_writer(shared=True)
def run(config: AcceptanceConfig) -> Path:
    """Write the artifact `acceptance` or `rollouts` and return its directory."""
    set_threads(config.num_threads)

    def load(path: str) -> CausalLM:
        # Rollouts read branches in the way of decoding, for which weights are packed.
        return load_lm(path, **config.loading, packed=config.labels == "rollout")

    if kind_at(config.draft) is None:
        check_same_tokenizer(config.target, config.draft)
    target: CausalLM
    if config.target_features is None:
        target = load(config.target)
    else:
        target = load_stored(config.target, config.target_features, config.dtype, pick_device(config.device))
    drafter = load_drafter(config.draft, lambda: target, load)
    identity = {**text_identity(config.target), "target": target.info.identity}
    manifest = open_artifact(config.responses, "responses", identity)
    rows = Rows(config.responses, manifest, limit=config.limit, vocab_size=target.info.vocab_size)

    # Label with the settings of the responses, unless others are given.
    sampling = config.sampling(manifest.sampling or {})
    temperatures = [params.temperature for params in sampling]
    own = replace(config, temperature=(), top_k=None, top_p=None).sampling(manifest.sampling or {})
    if config.target_features is not None and sampling != own:
        remedy = "Leave --temperature, --top-k and --top-p out, or --target-features."
        raise InputError("target_features", "another sampling than that of the responses", "the same", remedy)
    labels = labels_of(config, sampling, target, drafter)
    plan = StagePlan(
        kind="rollouts" if config.labels == "rollout" else "acceptance",
        stage="data acceptance",
        config=config,
        num_rows=len(rows),
        fields=ROLLOUT_FIELDS if config.labels == "rollout" else MIXED_FIELDS,
        inputs={"responses": manifest.digest},
        identity={**manifest.identity, "target": target.info.identity, "draft": drafter.identity},
        sampling={
            "temperature": temperatures if len(temperatures) > 1 else temperatures[0],
            "top_k": sampling[0].top_k,
            "top_p": sampling[0].top_p,
        },
        seed=config.seed,
    )
    run_stage(plan, lambda shard, advance: labels.label_shard(rows, shard, advance))
    return config.output


def labels_of(
    config: AcceptanceConfig, sampling: tuple[SamplingParams, ...], target: CausalLM, drafter: FrozenDrafter
) -> MixedTextLabels | Rollouts:
    """Build the labeller.

    Raises:
        InputError: target and drafter do not fit each other, or the settings do not fit them.
    """
    if drafter.head is None:
        # Labels compare p and q, which must be distributions over the same tokens.
        drafter.lm.fit_vocabulary(target.info.vocab_size)
    if config.labels == "mix":
        if drafter.head is not None:
            # It has no states along a text that the target alone wrote.
            raise InputError("draft", f"{config.draft}, a head", "a language model", "Pass --labels rollout.")
        return MixedTextLabels(target, drafter.lm, sampling[0], config.batch_size, config.chunk, config.seed)
    # A draft must fit into both contexts.
    context = min(target.info.max_position, drafter.max_position)
    if config.depth >= context:
        raise InputError("depth", config.depth, f"less than the context, {context}", "Draft fewer tokens.")
    kind = Rollouts if config.target_features is None else StoredRollouts
    return kind(target, drafter, config.depth, config.stride, sampling, config.chunk, config.seed, context)


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
        if isinstance(target, StoredLM):
            # Whole rows, by which their states are found.
            read = [target.features(torch.tensor([row], device=target.device))[0] for row in input_ids]
            target_hidden = torch.cat([row[place] for row, place in zip(read, places, strict=True)])  # [N, H]
        else:
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
