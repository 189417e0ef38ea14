"""Stage `data acceptance`: which tokens would the draft propose along the target's text, and would they be kept?

SpecDec++ (Huang et al. 2024), section 3.3. X is the target's response. The draft reads prompt and X (teacher forcing)
and at every response position proposes Y_j ~ q(. | x, X_<j); the target keeps it with P_j = min(1, p(Y_j) / q(Y_j)).
Labels hold for the sampling settings they were made with only: those are in the manifest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from draftsmith.data.batched import by_length, pad_right, pick_device, row_uniforms, set_threads
from draftsmith.data.manifest import Field, open_artefact, volatile
from draftsmith.data.models import check_same_tokenizer, load_lm, tokenizer_identity
from draftsmith.data.progress import Advance
from draftsmith.data.prompts import check_not_negative, check_positive
from draftsmith.data.shards import Plan, Rows, Shard, ShardContent, run_stage
from draftsmith.modules.sampling import draw_rows, probabilities
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import InputError, SamplingParams

FIELDS = (
    Field("id", "string"),
    Field("input_ids", "list<int32>", ("T",)),
    Field("prompt_length", "int32"),
    Field("draft_ids", "list<int32>", ("R",)),
    Field("log_p", "list<float32>", ("R",)),
    Field("log_q", "list<float32>", ("R",)),
    Field("accept_prob", "list<float32>", ("R",)),
    Field("overlap", "list<float32>", ("R",)),
    Field("task", "string"),
)


@dataclass(frozen=True)
class AcceptanceConfig:
    """Which pair to label, and how it decodes.

    Attributes:
        responses: Directory that `data responses` wrote with this target.
        target: Directory or hub id of the target model, or embedded:target.
        draft: Directory or hub id of the draft model, or embedded:draft.
        output: Directory to write.
        temperature: Of target and draft; 0 is greedy. Without it, what the responses were sampled with.
        top_k: As temperature; 0 is all.
        top_p: As temperature; 1 is all.
        seed: Of the drafted tokens. Each row has random numbers of its own.
        limit: Only the first so many responses; 0 takes all.
        batch_size: Responses read together.
        chunk: Positions whose distributions are in memory at once, two rows of the vocabulary's size for each.
        rows_per_shard: Responses in each shard; what a killed run loses at most.
        dtype: Type of the weights: float32, bfloat16, float16, or auto for the checkpoint's own.
        engine: How the models run: lean for Llama-family weights, hf for any transformers model.
        device: cpu, cuda:0, ... ; auto takes this rank's GPU where there is one.
        num_threads: CPU threads; 0 is torch's own choice.
        trust_remote_code: Let the models' repositories run their own code.
    """

    responses: Path = volatile()
    target: str = volatile()
    draft: str = volatile()
    output: Path = volatile()
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    limit: int = 0
    batch_size: int = 8
    chunk: int = 512
    rows_per_shard: int = 256
    dtype: str = "float32"
    engine: Literal["auto", "lean", "hf"] = "auto"
    device: str = volatile("auto")
    num_threads: int = volatile(0)
    trust_remote_code: bool = volatile(False)

    def __post_init__(self) -> None:
        check_positive(self, "batch_size", "chunk", "rows_per_shard")
        check_not_negative(self, "limit", "num_threads")
        _ = self.params({})

    def params(self, sampled: dict[str, float]) -> SamplingParams:
        """These settings; where one is not given, that of the responses."""
        own = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        merged = {**sampled, **{name: value for name, value in own.items() if value is not None}}
        return SamplingParams(**merged)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Labels:
    """One entry for each of N positions: the drafted token, log p and log q of it (-inf where p is 0), the probability
    that the target keeps it, and sum_v min(p, q), which is that probability averaged over q."""

    draft_ids: Tensor  # [N] int64
    log_p: Tensor  # [N] float32, as all below
    log_q: Tensor
    accept_prob: Tensor
    overlap: Tensor


def run(config: AcceptanceConfig) -> Path:
    """Write the artefact `acceptance`; returns its directory."""
    set_threads(config.num_threads)
    check_same_tokenizer(config.target, config.draft)
    settings = (config.dtype, pick_device(config.device), config.engine, config.trust_remote_code)
    target, draft = load_lm(config.target, *settings), load_lm(config.draft, *settings)
    check_pair(target, draft)
    tokenizer = tokenizer_identity(config.target)["tokenizer"]
    identity = {"tokenizer": tokenizer, "target": target.info.identity}
    manifest = open_artefact(config.responses, "responses", identity)
    rows = Rows(config.responses, manifest)
    params = config.params(manifest.sampling or {})
    plan = Plan(
        kind="acceptance",
        stage="data acceptance",
        directory=config.output,
        config=config,
        num_rows=min(len(rows), config.limit) if config.limit else len(rows),
        rows_per_shard=config.rows_per_shard,
        fields=FIELDS,
        inputs={"responses": manifest.digest},
        identity={**manifest.identity, "target": target.info.identity, "draft": draft.info.identity},
        sampling=_sampling(params),
        seed=config.seed,
    )

    def make(shard: Shard, advance: Advance) -> ShardContent:
        return label_shard(target, draft, rows, shard, params, config, advance)

    run_stage(plan, make)
    return config.output


def _sampling(params: SamplingParams) -> dict[str, float]:
    return {"temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p}


def check_pair(target: CausalLM, draft: CausalLM) -> None:
    """Raises InputError where p and q are not laws over the same tokens."""
    if target.info.vocab_size != draft.info.vocab_size:
        expected = f"{target.info.vocab_size}, the target's"
        raise InputError("draft: vocabulary", draft.info.vocab_size, expected, "Use a draft of the same family.")


def label_shard(
    target: CausalLM,
    draft: CausalLM,
    source: Rows,
    shard: Shard,
    params: SamplingParams,
    config: AcceptanceConfig,
    advance: Advance,
) -> ShardContent:
    """Labels of every response of a shard, in batches of like length."""
    rows = source.read(shard.start, shard.stop)
    context = min(target.info.max_position, draft.info.max_position)
    for offset, row in enumerate(rows):
        if len(row["input_ids"]) > context:
            expected = f"at most {context}, the shorter context of target and draft"
            found = f"{len(row['input_ids'])} tokens"
            remedy = "Make shorter responses: data responses --max-new-tokens, data prompts --max-length."
            raise InputError(f"response {shard.start + offset}", found, expected, remedy)
    made: list[dict[str, Any]] = [{} for _ in rows]
    for batch in by_length([len(row["input_ids"]) for row in rows], config.batch_size):
        ids, starts = [rows[i]["input_ids"] for i in batch], [rows[i]["prompt_length"] for i in batch]
        drawn = [
            row_uniforms("acceptance", config.seed, shard.start + i, len(rows[i]["input_ids"]) - start)
            for i, start in zip(batch, starts, strict=True)
        ]
        labels = label(target, draft, ids, starts, params, torch.from_numpy(np.concatenate(drawn)), config.chunk)
        for i, own in zip(batch, split(labels, [len(uniforms) for uniforms in drawn]), strict=True):
            kept = ("id", "input_ids", "prompt_length", "task")
            made[i] = {**{name: rows[i][name] for name in kept}, **own}
        advance(len(batch))
    drafted = sum(len(row["draft_ids"]) for row in made)
    return ShardContent(made, {"tokens": sum(len(row["input_ids"]) for row in made), "drafted_tokens": drafted})


@torch.inference_mode()
def label(
    target: CausalLM,
    draft: CausalLM,
    input_ids: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    params: SamplingParams,
    uniforms: Tensor,
    chunk: int,
) -> Labels:
    """Labels of all response positions of these rows, one row after the other: N in all.

    One forward of each model; distributions exist for `chunk` positions at a time, in float32.
    uniforms: [N] float64; uniforms[n] draws Y_n.
    """
    padded = pad_right(input_ids, target.device)
    # The hidden state at position t - 1 gives the law of the token at t.
    spans = [torch.arange(start - 1, len(ids) - 1) for ids, start in zip(input_ids, prompt_lengths, strict=True)]
    positions = torch.cat(spans).to(target.device)
    owners = torch.cat([torch.full_like(span, i) for i, span in enumerate(spans)]).to(target.device)
    target_hidden = target.features(padded)[owners, positions]
    draft_hidden = draft.features(padded.to(draft.device))[owners.to(draft.device), positions.to(draft.device)]
    parts = []
    for start in range(0, len(positions), chunk):
        piece = slice(start, start + chunk)
        target_prob = probabilities(target.lm_head(target_hidden[piece]), params)
        draft_prob = probabilities(draft.lm_head(draft_hidden[piece]), params).to(target_prob.device)
        parts.append(label_positions(target_prob, draft_prob, uniforms[piece].to(target_prob.device)))
    columns = ("draft_ids", "log_p", "log_q", "accept_prob", "overlap")
    return Labels(*(torch.cat([getattr(part, name) for part in parts]).cpu() for name in columns))


def label_positions(target_prob: Tensor, draft_prob: Tensor, uniforms: Tensor) -> Labels:
    """Y ~ q and its labels for laws p and q, each [N, V] in float32 or wider. Greedy laws are one-hot: then Y is the
    draft's argmax, and P and the overlap are 1 where the target's is the same, else 0."""
    drafted = draw_rows(draft_prob, uniforms)
    p, q = (prob.gather(-1, drafted[:, None])[:, 0] for prob in (target_prob, draft_prob))
    accept_prob = (p / q).clamp(max=1.0)  # q > 0: a token of probability zero is never drawn
    overlap = torch.minimum(target_prob, draft_prob).sum(-1).clamp(max=1.0)
    return Labels(drafted, p.log().float(), q.log().float(), accept_prob.float(), overlap.float())


def split(labels: Labels, counts: Sequence[int]) -> list[dict[str, np.ndarray]]:
    """Labels of N positions as one dictionary of columns for each row."""
    columns = {name: values.split(list(counts)) for name, values in vars(labels).items()}
    return [{name: values[i].numpy() for name, values in columns.items()} for i in range(len(counts))]
