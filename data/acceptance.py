"""Stage `data acceptance`: which tokens would the draft propose along the target's text, and would they be kept?

Labels `mix`, of SpecDec++ (Huang et al. 2024), section 3.3; those of whole drafts, `rollout`, are made in
data/rollouts.py. X is what the target answered, in one turn or several. The draft reads prompt and X (teacher forcing)
and at every token of an answer proposes Y_j ~ q(. | x, X_<j); the target keeps it with P_j = min(1, p(Y_j) / q(Y_j)).
Labels hold for the sampling settings they were made with only: those are in the manifest.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from draftsmith.data import rollouts
from draftsmith.data.answering.batched import by_length, check_lengths, pad_right, row_uniforms, set_threads
from draftsmith.data.heads.directory import eagle_identity, load_head
from draftsmith.data.models.device import pick_device
from draftsmith.data.models.loading import check_same_tokenizer, load_lm, text_identity
from draftsmith.data.models.naming import naming
from draftsmith.data.progress import Advance
from draftsmith.data.prompts import check_not_negative, check_positive, numbers
from draftsmith.data.store.manifest import Field, open_artefact, volatile
from draftsmith.data.store.shards import Plan, Rows, Shard, ShardContent, run_stage
from draftsmith.data.store.writer import sole_writer
from draftsmith.data.text.answers import answer_mask
from draftsmith.modules.decoding.branches import BranchDrafter, DraftModelBranches
from draftsmith.modules.drafters.eagle.drafting import EagleBranches
from draftsmith.modules.drafters.eagle.head import EagleHead
from draftsmith.modules.finite import NO_TOKEN, NonFinite
from draftsmith.modules.sampling import draw_rows, probabilities
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import InputError, SamplingParams

FIELDS = (
    Field("id", "string"),
    Field("input_ids", "list<int32>", ("T",)),
    Field("prompt_length", "int32"),
    Field("loss_mask", "list<bool>", ("T",)),
    Field("turn", "int32"),
    Field("draft_ids", "list<int32>", ("R",)),
    Field("log_p", "list<float32>", ("R",)),
    Field("log_q", "list<float32>", ("R",)),
    Field("accept_prob", "list<float32>", ("R",)),
    Field("overlap", "list<float32>", ("R",)),
    Field("task", "string"),
)


Mode = Literal["sampling", "greedy"]
ROLLOUT_ONLY = {"eagle", "temperatures", "depth", "stride", "children", "greedy_label"}


def mode_of(params: SamplingParams) -> Mode:
    """What labels made with these settings are for."""
    return "greedy" if params.greedy else "sampling"


@dataclass(frozen=True)
class AcceptanceConfig:
    """Which pair to label, and how it decodes.

    Attributes:
        responses: Directory that `data responses` wrote with this target.
        target: Directory or hub id of the target model, or embedded:target.
        output: Directory to write.
        draft: Directory or hub id of the draft model, or embedded:draft.
        eagle: EAGLE head directory, for rollout labels of its chains in place of a draft model's.
        labels: mix is SpecDec++'s, one drafted token at every position of the answer; rollout is whole drafts, as the
            decoder makes them, from some of the positions.
        mode: sampling (P is min(1, p/q)) or greedy (P is agreement); by default what the temperature says.
        temperature: Of target and draft; 0 is greedy. Without it, what the responses were sampled with.
        temperatures: rollout: several of them, separated by commas (0.5,0.7,1), which the drafts take in turn, for a
            head that reads the temperature.
        top_k: As temperature; 0 is all.
        top_p: As temperature; 1 is all.
        depth: rollout: tokens of a draft.
        stride: rollout: a draft begins at every so many tokens of the answer.
        children: rollout: label also so many most probable tokens beside every drafted one, for heads that judge trees.
        greedy_label: rollout, greedy: agreement of the token with the target's argmax, or prob, its probability at
            temperature 1.
        seed: Of the drafted tokens. Each row has random numbers of its own.
        limit: Only the first so many responses; 0 takes all.
        batch_size: mix: responses read together.
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
    output: Path = volatile()
    draft: str | None = volatile(None)
    eagle: str | None = volatile(None)
    labels: Literal["mix", "rollout"] = "mix"
    mode: Mode | None = None
    temperature: float | None = None
    temperatures: str | None = None
    top_k: int | None = None
    top_p: float | None = None
    depth: int = 10
    stride: int = 4
    children: int = 0
    greedy_label: Literal["agreement", "prob"] = "agreement"
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
        check_positive(self, "batch_size", "chunk", "rows_per_shard", "depth", "stride")
        check_not_negative(self, "limit", "num_threads", "children")
        if (self.draft is None) == (self.eagle is None):
            found = "neither" if self.draft is None else "both"
            raise InputError("draft, eagle", found, "one of them", "Pass --draft MODEL, or --eagle HEAD.")
        if self.labels == "mix":
            for spec in dataclasses.fields(self):
                if spec.name in ROLLOUT_ONLY and getattr(self, spec.name) != spec.default:
                    raise InputError(spec.name, getattr(self, spec.name), "labels rollout", "Pass --labels rollout.")
        if None not in (self.temperature, self.temperatures):
            found = f"{self.temperature} and temperatures {self.temperatures}"
            raise InputError("temperature", found, "one of the two", "Pass --temperature or --temperatures.")
        # What the responses were sampled with is not known yet; nothing of it may contradict by itself.
        _ = self.sampling({"temperature": 1.0 if self.mode == "sampling" else 0.0})

    def sampling(self, sampled: dict[str, Any]) -> tuple[SamplingParams, ...]:
        """These settings, one for each temperature; what is not given is as in `sampled`, the responses' own.

        Raises:
            InputError: the mode, the temperatures and the kind of label contradict each other.
        """
        top_k = sampled.get("top_k", 0) if self.top_k is None else self.top_k
        top_p = sampled.get("top_p", 1.0) if self.top_p is None else self.top_p
        if self.temperatures is not None:
            several = numbers("temperatures", self.temperatures, float)
            if min(several) <= 0:
                remedy = "Greedy labels are made apart, by --mode greedy."
                raise InputError("temperatures", self.temperatures, "numbers above 0", remedy)
        elif self.temperature is not None:
            several = [self.temperature]
        else:
            several = [0.0 if self.mode == "greedy" else sampled.get("temperature", 0.0)]
        made = tuple(SamplingParams(temperature, top_k, top_p) for temperature in several)
        mode = mode_of(made[0])
        if self.mode not in (None, mode):
            at = ", ".join(f"{temperature:g}" for temperature in several)
            raise InputError("mode", f"{self.mode} at temperature {at}", mode, "Change the mode or the temperature.")
        if self.greedy_label == "prob" and mode != "greedy":
            raise InputError("greedy_label", "prob in mode sampling", "mode greedy", "Pass --mode greedy.")
        return made


@dataclass(frozen=True)
class Labels:
    """One entry for each of N positions: the drafted token, log p and log q of it (-inf where p is 0), the probability
    that the target keeps it, and sum_v min(p, q), which is that probability averaged over q."""

    draft_ids: Tensor  # [N] int64
    log_p: Tensor  # [N] float32, as all below
    log_q: Tensor
    accept_prob: Tensor
    overlap: Tensor


@sole_writer(shared=True)
def run(config: AcceptanceConfig) -> Path:
    """Write the artefact `acceptance`, or `rollouts`; returns its directory."""
    set_threads(config.num_threads)
    rollout = config.labels == "rollout"
    if config.draft is not None:
        check_same_tokenizer(config.target, config.draft)
    # Branches are read in the way of decoding, for which weights are packed.
    load = functools.partial(
        load_lm, dtype=config.dtype, device=pick_device(config.device), engine=config.engine,
        trust_remote_code=config.trust_remote_code, packed=rollout,
    )  # fmt: skip
    target = load(config.target)
    draft = None if config.draft is None else load(config.draft)
    if draft is not None:
        check_pair(target, draft)
    identity = {**text_identity(config.target), "target": target.info.identity}
    manifest = open_artefact(config.responses, "responses", identity)
    rows = Rows(config.responses, manifest)
    sampling = config.sampling(manifest.sampling or {})
    config = dataclasses.replace(config, mode=mode_of(sampling[0]))
    if not rollout:
        assert draft is not None, "only rollouts have another drafter"
        drafter_identity, fields = draft.info.identity, tuple(FIELDS)
        make = functools.partial(label_shard, target, draft, rows, params=sampling[0], config=config)
    else:
        drafter, context, drafter_identity = load_drafter(config, target, draft)
        settings = rollouts_of(config, sampling, context, target.info.vocab_size)
        fields = settings.fields
        make = functools.partial(rollouts.label_shard, target, drafter, rows, rollouts=settings)
    plan = Plan(
        kind="rollouts" if rollout else "acceptance",
        stage="data acceptance",
        directory=config.output,
        config=config,
        num_rows=min(len(rows), config.limit) if config.limit else len(rows),
        rows_per_shard=config.rows_per_shard,
        fields=fields,
        inputs={"responses": manifest.digest},
        identity={**manifest.identity, "target": target.info.identity, "draft": drafter_identity},
        sampling=_sampling(sampling),
        seed=config.seed,
    )
    run_stage(plan, lambda shard, advance: make(shard=shard, advance=advance))
    return config.output


def load_drafter(
    config: AcceptanceConfig, target: CausalLM, draft: CausalLM | None
) -> tuple[BranchDrafter, int, dict[str, str]]:
    """What drafts the rollouts, the longest text that it and the target can read, and its identity."""
    if draft is not None:
        context = min(target.info.max_position, draft.info.max_position)
        return DraftModelBranches(draft, config.depth), context, draft.info.identity
    assert config.eagle is not None
    head = load_head(config.eagle, target, kind="eagle")
    assert isinstance(head, EagleHead)
    context = min(target.info.max_position, head.config.llama.max_position)
    return EagleBranches(head, target, config.depth), context, eagle_identity(config.eagle, target)


def rollouts_of(
    config: AcceptanceConfig, sampling: tuple[SamplingParams, ...], context: int, vocab_size: int
) -> rollouts.Rollouts:
    """How to draft and label.

    Raises:
        InputError: no draft of this depth fits, or more children are asked for than there are tokens.
    """
    if config.depth >= context:
        raise InputError("depth", config.depth, f"less than the context, {context}", "Draft fewer tokens.")
    if config.children > vocab_size:
        raise InputError("children", config.children, f"at most {vocab_size}, the vocabulary", "Label fewer.")
    return rollouts.Rollouts(
        depth=config.depth,
        stride=config.stride,
        sampling=sampling,
        children=config.children,
        prob=config.greedy_label == "prob",
        chunk=config.chunk,
        seed=config.seed,
        context=context,
    )


def _sampling(sampling: tuple[SamplingParams, ...]) -> dict[str, Any]:
    first, temperatures = sampling[0], [params.temperature for params in sampling]
    return {
        "temperature": temperatures if len(temperatures) > 1 else temperatures[0],
        "top_k": first.top_k,
        "top_p": first.top_p,
    }


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
    advance: Advance,
    params: SamplingParams,
    config: AcceptanceConfig,
) -> ShardContent:
    """Labels of every response of a shard, in batches of like length."""
    rows = source.read(shard.start, shard.stop)
    check_lengths(rows, shard.start, min(target.info.max_position, draft.info.max_position))
    made: list[dict[str, Any]] = [{} for _ in rows]
    for batch in by_length([len(row["input_ids"]) for row in rows], config.batch_size):
        ids, masks = [rows[i]["input_ids"] for i in batch], [answer_mask(rows[i]) for i in batch]
        drawn = [
            row_uniforms("acceptance", config.seed, shard.start + i, sum(mask))
            for i, mask in zip(batch, masks, strict=True)
        ]
        with naming([rows[i]["id"] for i in batch]):
            labels = label(target, draft, ids, masks, params, torch.from_numpy(np.concatenate(drawn)), config.chunk)
        for i, own in zip(batch, split(labels, [len(uniforms) for uniforms in drawn]), strict=True):
            made[i] = {**rollouts.kept_of(rows[i]), **own}
        advance(len(batch))
    drafted = sum(len(row["draft_ids"]) for row in made)
    return ShardContent(made, {"tokens": sum(len(row["input_ids"]) for row in made), "drafted_tokens": drafted})


@torch.inference_mode()
def label(
    target: CausalLM,
    draft: CausalLM,
    input_ids: Sequence[Sequence[int]],
    masks: Sequence[Sequence[bool]],
    params: SamplingParams,
    uniforms: Tensor,
    chunk: int,
) -> Labels:
    """Labels of all positions of these rows where their masks [T] are true (never the first), one row after the other:
    N in all.

    One forward of each model; distributions exist for `chunk` positions at a time, in float32.
    uniforms: [N] float64; uniforms[n] draws Y_n.

    Raises:
        NonFinite: a model's logits.
    """
    padded = pad_right(input_ids, target)
    # The hidden state at position t - 1 gives the law of the token at t.
    places = [torch.tensor(mask).nonzero()[:, 0] - 1 for mask in masks]
    positions = torch.cat(places).to(target.device)
    owners = torch.cat([torch.full_like(own, i) for i, own in enumerate(places)]).to(target.device)
    target_hidden = target.features(padded)[owners, positions]
    draft_hidden = draft.features(padded.to(draft.device))[owners.to(draft.device), positions.to(draft.device)]
    parts = []
    for start in range(0, len(positions), chunk):
        piece = slice(start, start + chunk)
        target_prob = probabilities(target.lm_head(target_hidden[piece]), params)
        draft_prob = probabilities(draft.lm_head(draft_hidden[piece]), params).to(target_prob.device)
        parts.append(label_positions(target_prob, draft_prob, uniforms[piece].to(target_prob.device)))
    columns = ("draft_ids", "log_p", "log_q", "accept_prob", "overlap")
    labels = Labels(*(torch.cat([getattr(part, name) for part in parts]).cpu() for name in columns))
    broken = labels.overlap.isnan().nonzero()  # where p or q has a NaN
    if len(broken):
        n = int(broken[0])
        model = "draft" if labels.draft_ids[n] == NO_TOKEN else "target"
        raise NonFinite(model=model, position=int(positions[n]) + 1, row=int(owners[n]))
    return labels


def label_positions(target_prob: Tensor, draft_prob: Tensor, uniforms: Tensor) -> Labels:
    """Y ~ q and its labels for laws p and q, each [N, V] in float32 or wider. Greedy laws are one-hot: then Y is the
    draft's argmax, and P and the overlap are 1 where the target's is the same, else 0. Where p or q has a NaN the
    overlap is NaN, and where it is q's there is no Y."""
    drafted = draw_rows(draft_prob, uniforms)
    p, q = (prob.gather(-1, drafted.clamp_min(0)[:, None])[:, 0] for prob in (target_prob, draft_prob))
    accept_prob = (p / q).clamp(max=1.0)  # q > 0: a token of probability zero is never drawn
    overlap = torch.minimum(target_prob, draft_prob).sum(-1).clamp(max=1.0)
    return Labels(drafted, p.log().float(), q.log().float(), accept_prob.float(), overlap.float())


def split(labels: Labels, counts: Sequence[int]) -> list[dict[str, np.ndarray]]:
    """Labels of N positions as one dictionary of columns for each row."""
    columns = {name: values.split(list(counts)) for name, values in vars(labels).items()}
    return [{name: values[i].numpy() for name, values in columns.items()} for i in range(len(counts))]
