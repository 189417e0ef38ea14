"""An EAGLE-1 head as another system holds it, beside the same head as one of ours, on real hidden states."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.modules.interop.base import Finding, Measure, Package, Probe, Reading, Trial, largest
from draftsmith.modules.interop.eagle1.reference import hidden
from draftsmith.modules.layers import LlamaConfig, RopeScaling, rope_frequencies

SIZES = ("num_layers", "num_heads", "num_kv_heads", "head_dim", "rms_eps")
# Two float32 implementations of one layer; another rope, order or bias changes logits by tenths at least.
LARGEST_DIFFERENCE = 1e-4
LARGEST_SHARE = 1e-5  # of the largest logit, where that is more: a draft goes on from its own rounded states
# Steps that a draft is followed on its own tokens and features.
DRAFT_STEPS = 3
# Another reading has to agree this much more often with the target, chance aside, to be called the right one.
CLEARLY_BETTER = 0.1

Forward = Callable[[Tensor, Tensor], Tensor]  # embeddings and features [T, H] -> the head's hidden states [T, H]
Inputs = list[tuple[Tensor, Tensor]]  # embeddings and features [T, H] of each probe


@dataclass(frozen=True)
class ProbeRows:
    """What an EAGLE head reads of a probe (row t: token x_{t+1} and feature f_t), and what the target says then.

    next_ids [T-1]; features [T-1, H]; choices [T-1]: the target's greedy choice of x_{t+2}; counts [T-1]: whether that
    token is one of the answer.
    """

    next_ids: Tensor
    features: Tensor
    choices: Tensor
    counts: Tensor

    @staticmethod
    def of(probe: Probe, lm_head: Tensor) -> ProbeRows:
        choices = (probe.features[1:] @ lm_head.T).argmax(-1)
        counts = torch.arange(2, len(probe.ids) + 1) >= probe.start
        return ProbeRows(probe.ids[1:], probe.features[:-1], choices, counts)


class ReadingComparison:
    """One reading of a directory on probes of the target."""

    def __init__(self, reading: Reading, package: Package, trial: Trial):
        """trial: with the target's embedding and lm_head."""
        embedding, lm_head = trial.facts.embed_tokens, trial.facts.lm_head
        assert embedding is not None and lm_head is not None
        self.reading, self.package, self.trial = reading, package, trial
        self.embedding, self.lm_head = embedding.float(), lm_head.float()
        own_table = reading.settings["embed"] == "file"
        self.own_embedding = reading.weights["embed_tokens.weight"] if own_table else self.embedding
        self.rows = [ProbeRows.of(probe, self.lm_head) for probe in trial.probes]

    def measures(self, head: nn.Module) -> list[Measure]:
        """Logits by the system's rules against those of `head`, and how often it chooses as the target does.

        head: ours, in float32.
        """

        def theirs(embeds: Tensor, features: Tensor) -> Tensor:
            return hidden(self.reading, embeds, features)

        def ours(embeds: Tensor, features: Tensor) -> Tensor:
            return head(embeds[None], features[None])[0]

        scale = float(self.reading.settings.get("logit_scale", 1.0))
        fed, drafted, size = 0.0, 0.0, 0.0
        for row in self.rows:
            their_logits = self.drafted_logits(theirs, self.own_embedding, row, scale)
            our_logits = self.drafted_logits(ours, self.embedding, row, 1.0)
            count, size = len(row.next_ids), max(size, largest(our_logits))
            fed = max(fed, largest(their_logits[:count] - our_logits[:count]))
            drafted = max(drafted, largest(their_logits[count:] - our_logits[count:]))
        number = sum(len(row.next_ids) for row in self.rows)
        return [
            difference(f"logits of {number} rows", fed, size),
            difference(f"logits in {len(self.rows)} drafts", drafted, size),
            self.working(),
        ]

    def drafted_logits(self, forward: Forward, embedding: Tensor, rows: ProbeRows, scale: float) -> Tensor:
        """[T-1 + DRAFT_STEPS, V] of all rows, then of a greedy draft from the last one, on the head's own states."""
        embeds, features = embedding[rows.next_ids], rows.features
        logits = torch.empty(0)
        states = forward(embeds, features)
        for _ in range(DRAFT_STEPS):
            logits = scale * states @ self.lm_head.T
            chosen = logits[-1:].nan_to_num(-math.inf).argmax(-1)
            embeds, features = torch.cat([embeds, embedding[chosen]]), torch.cat([features, states[-1:]])
            states = forward(embeds, features)
        return torch.cat([logits, scale * states[-1:] @ self.lm_head.T])

    def working(self) -> Measure:
        """Whether the head, read by the system's rules, drafts what the target says; and whether it would do so clearly
        more often when read another way, which is then how it was made.

        Neither needs our reading of the directory: this is what finds a mistake that all readers share.
        """
        count = sum(int(row.counts.sum()) for row in self.rows)

        def agreement(reading: Reading, inputs: Inputs) -> float:
            right = 0
            for row, (embeds, features) in zip(self.rows, inputs, strict=True):
                logits = hidden(reading, embeds, features) @ self.lm_head.T
                right += int(((logits.nan_to_num(0.0).argmax(-1) == row.choices) & row.counts).sum())
            return right / max(count, 1)

        served = [(self.own_embedding[row.next_ids], row.features) for row in self.rows]
        value = agreement(self.reading, served)
        needed = value + CLEARLY_BETTER + 3 * math.sqrt(0.25 / max(count, 1))
        others = ((agreement(reading, inputs), name) for name, reading, inputs in self.other_readings(served))
        better = [(share, name) for share, name in others if share > needed]
        said = f"{value:.1%} of {count} tokens"
        if better:
            share, name = max(better)
            said += f"; {share:.1%} with {name}"
        return Measure("chooses as the target", said, "no other reading better", not better)

    def other_readings(self, served: Inputs) -> Iterator[tuple[str, Reading, Inputs]]:
        """What a head may have been made for, if not for what the system does with it. served: the system's inputs."""
        reading, probes = self.reading, self.trial.probes
        fc = reading.weights["fc.weight"]
        swapped = {**reading.weights, "fc.weight": torch.cat(fc.chunk(2, dim=1)[::-1], dim=1)}
        yield "the feature before the embedding in fc", dataclasses.replace(reading, weights=swapped), served
        states = [probe.before_norm for probe in probes if probe.before_norm is not None]
        if len(states) == len(probes):
            inputs = [(embeds, state[:-1]) for (embeds, _), state in zip(served, states, strict=True)]
            yield "features from before the final norm", reading, inputs
        inputs = [(self.embedding[probe.ids[:-1]], row.features) for probe, row in zip(probes, self.rows, strict=True)]
        yield "each feature beside its own token instead of the next", reading, inputs
        bias = self.package.tensors.get("fc.bias")
        if bias is not None and "fc.bias" not in reading.weights:
            biased = {**reading.weights, "fc.bias": bias.float()}
            yield "the fc.bias of the file", dataclasses.replace(reading, weights=biased), served
        frequencies, other = reading.settings["inv_freq"], self.trial.facts.inv_freq
        if other is not None and other.shape == frequencies.shape and not torch.allclose(other, frequencies.float()):
            settings = {**reading.settings, "inv_freq": other}
            yield "the rotary settings of the target", dataclasses.replace(reading, settings=settings), served
        if reading.settings["embed"] == "file":
            yield "the target's embedding", reading, [(self.embedding[row.next_ids], row.features) for row in self.rows]


def difference(name: str, value: float, size: float) -> Measure:
    """size: the largest of our own."""
    bar = max(LARGEST_DIFFERENCE, LARGEST_SHARE * size) if math.isfinite(size) else LARGEST_DIFFERENCE
    return Measure(name, f"differ by {value:.1e}", f"at most {bar:.2g}", value <= bar)


def settings_differ(config: Mapping[str, Any], reading: Reading) -> list[Finding]:
    """Sizes and rotary frequencies of the exported head against those that the system takes."""
    llama = LlamaConfig(**{**config["llama"], "rope_scaling": RopeScaling(**config["llama"]["rope_scaling"])})
    settings = reading.settings
    found = [
        Finding("error", name, f"{settings[name]} in this system, exported with {value}")
        for name in SIZES
        if settings[name] != (value := config["llama"][name])
    ]
    frequencies = rope_frequencies(llama)
    if settings["inv_freq"].shape != frequencies.shape or not torch.allclose(
        settings["inv_freq"].float(), frequencies, rtol=1e-5
    ):
        found.append(Finding("error", "rope", "other rotary frequencies than the head was exported with"))
    return found
