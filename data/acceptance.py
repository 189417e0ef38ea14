"""Stage `data acceptance`: which tokens would the drafter propose along the target's text, and would they be kept?

Labels `mix` are SpecDec++'s, of one token at every position (data/mixed_text.py); labels `rollout` are of whole drafts,
as the decoder makes them (data/rollouts.py). Labels hold for the sampling settings they were made with only: those are
in the manifest.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from draftsmith.data.engines.own import set_threads
from draftsmith.data.heads.directory import kind_at
from draftsmith.data.heads.frozen_drafter import FrozenDrafter, load_drafter
from draftsmith.data.mixed_text import MixedTextLabels
from draftsmith.data.models.loading import check_same_tokenizer, load_lm, text_identity
from draftsmith.data.rollouts import Rollouts
from draftsmith.data.settings import StageLoading, check_not_negative, check_positive, comma_numbers
from draftsmith.data.store.manifest import open_artefact, volatile
from draftsmith.data.store.shards import Rows, StagePlan, run_stage
from draftsmith.data.store.writer import sole_writer
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import InputError, SamplingParams

Mode = Literal["sampling", "greedy"]
ROLLOUT_ONLY = ("temperatures", "depth", "stride")


def mode_of(*sampling: SamplingParams) -> Mode:
    """What labels made with these settings are for; with several, greedy where nothing is drawn."""
    return "greedy" if all(params.greedy for params in sampling) else "sampling"


@dataclass(frozen=True)
class AcceptanceConfig(StageLoading):
    """Which pair to label, and how it decodes.

    Attributes:
        responses: Directory that `data responses` wrote with this target.
        target: Directory or hub id of the target model, or embedded:target.
        output: Directory to write.
        draft: Directory or hub id of the draft model, or embedded:draft; or, for rollout labels, directory of a trained
            drafter's head.
        labels: mix is SpecDec++'s, one drafted token at every position of the answer; rollout is whole drafts, as the
            decoder makes them, from some of the positions.
        mode: sampling (P is min(1, p/q)) or greedy (P is agreement); by default what the temperature says.
        temperature: Of target and draft; 0 is greedy. Without it, what the responses were sampled with.
        temperatures: rollout: several of them, separated by commas (0,0.7,1; 0 is greedy), which the drafts take in
            turn, for a head that reads the temperature.
        top_k: As temperature; 0 is all.
        top_p: As temperature; 1 is all.
        depth: rollout: tokens of a draft.
        stride: rollout: a draft begins at every so many tokens of the answer.
        seed: Of the drafted tokens. Each row has random numbers of its own.
        limit: Only the first so many responses; 0 takes all.
        batch_size: mix: responses read together.
        chunk: Positions whose distributions are in memory at once, two rows of the vocabulary's size for each.
        rows_per_shard: Responses in each shard; what a killed run loses at most.
    """

    responses: Path = volatile()
    target: str = volatile()
    output: Path = volatile()
    draft: str = volatile()
    labels: Literal["mix", "rollout"] = "mix"
    mode: Mode | None = None
    temperature: float | None = None
    temperatures: str | None = None
    top_k: int | None = None
    top_p: float | None = None
    depth: int = 10
    stride: int = 4
    seed: int = 0
    limit: int = 0
    batch_size: int = 8
    chunk: int = 512
    rows_per_shard: int = 256

    def __post_init__(self) -> None:
        check_positive(self, "batch_size", "chunk", "rows_per_shard", "depth", "stride")
        check_not_negative(self, "limit", "num_threads")
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
            several = comma_numbers("temperatures", self.temperatures, float)
            if min(several) < 0:
                raise InputError("temperatures", self.temperatures, "numbers from 0 on", "0 is greedy.")
        elif self.temperature is not None:
            several = [self.temperature]
        else:
            several = [0.0 if self.mode == "greedy" else sampled.get("temperature", 0.0)]
        made = tuple(SamplingParams(temperature, top_k, top_p) for temperature in several)
        mode = mode_of(*made)
        if self.mode not in (None, mode):
            at = ", ".join(f"{temperature:g}" for temperature in several)
            raise InputError("mode", f"{self.mode} at temperature {at}", mode, "Change the mode or the temperature.")
        return made


@sole_writer(shared=True)
def run(config: AcceptanceConfig) -> Path:
    """Write the artefact `acceptance`, or `rollouts`; returns its directory."""
    set_threads(config.num_threads)

    # Branches are read in the way of decoding, for which weights are packed.
    def load(path: str) -> CausalLM:
        return load_lm(path, **config.loading, packed=config.labels == "rollout")

    if kind_at(config.draft) is None:
        check_same_tokenizer(config.target, config.draft)
    target = load(config.target)
    drafter = load_drafter(config.draft, lambda: target, load)
    identity = {**text_identity(config.target), "target": target.info.identity}
    manifest = open_artefact(config.responses, "responses", identity)
    rows = Rows(config.responses, manifest, limit=config.limit, vocab_size=target.info.vocab_size)
    sampling = config.sampling(manifest.sampling or {})
    first, temperatures = sampling[0], [params.temperature for params in sampling]
    labels = labels_of(config, sampling, target, drafter)
    plan = StagePlan(
        kind=labels.kind,
        stage="data acceptance",
        config=dataclasses.replace(config, mode=mode_of(*sampling)),
        num_rows=len(rows),
        fields=labels.fields,
        inputs={"responses": manifest.digest},
        identity={**manifest.identity, "target": target.info.identity, "draft": drafter.identity},
        sampling={
            "temperature": temperatures if len(temperatures) > 1 else first.temperature,
            "top_k": first.top_k,
            "top_p": first.top_p,
        },
        seed=config.seed,
    )
    run_stage(plan, lambda shard, advance: labels.label_shard(rows, shard, advance))
    return config.output


def labels_of(
    config: AcceptanceConfig, sampling: tuple[SamplingParams, ...], target: CausalLM, drafter: FrozenDrafter
) -> MixedTextLabels | Rollouts:
    """How to draft and label.

    Raises:
        InputError: target and drafter do not fit each other, or the settings do not fit them.
    """
    vocab_size, own = target.info.vocab_size, drafter.lm.info.vocab_size
    if own != vocab_size:  # p and q are distributions over the same tokens
        raise InputError("draft: vocabulary", own, f"{vocab_size}, the target's", "Use a draft of the same family.")
    if config.labels == "mix":
        if drafter.head is not None:  # it has no states along a text of the target's alone
            raise InputError("draft", f"{config.draft}, a head", "a language model", "Pass --labels rollout.")
        return MixedTextLabels(target, drafter.lm, sampling[0], config.batch_size, config.chunk, config.seed)
    context = min(target.info.max_position, drafter.max_position)
    if config.depth >= context:
        raise InputError("depth", config.depth, f"less than the context, {context}", "Draft fewer tokens.")
    return Rollouts(
        target=target,
        drafter=drafter,
        depth=config.depth,
        stride=config.stride,
        sampling=sampling,
        chunk=config.chunk,
        seed=config.seed,
        context=context,
    )
