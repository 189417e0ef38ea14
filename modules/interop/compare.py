"""An EAGLE head as another system holds it, beside the same head as one of ours, on real hidden states."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.modules.drafters.eagle.net import EagleConfig, EagleNet
from draftsmith.modules.interop.base import Measure, Package, Reading, Trial, largest
from draftsmith.modules.interop.rope import KNOWN, Rope, frequencies, transformers_rope
from draftsmith.modules.layers import RopeScaling

# Two float32 implementations of one layer; another rope, order or bias changes logits by tenths at least.
LARGEST_DIFFERENCE = 1e-4
LARGEST_SHARE = 1e-5  # of the largest logit, where that is more: a draft goes on from its own rounded states
# Steps that a draft is followed on its own tokens and features.
DRAFT_STEPS = 3
# Another reading has to agree this much more often with the target, chance aside, to be called the right one.
CLEARLY_BETTER = 0.1

Inputs = list[tuple[Tensor, Tensor]]  # token ids [T] and features [T, H] of each probe: row t has x_{t+1} and f_t


def net_of(reading: Reading, positions: int) -> EagleNet:
    """The head with the weights, sizes and rotary settings that a system has; where no tensor filled a weight, or our
    layers do not compute its rope, every result is NaN."""
    llama = dataclasses.replace(reading.settings["llama"], max_position=positions)
    followed = llama.rope_scaling.kind in KNOWN
    llama = llama if followed else dataclasses.replace(llama, rope_scaling=RopeScaling())
    net = EagleNet(EagleConfig(llama, "fc.bias" in reading.weights)).requires_grad_(False)
    net.load_state_dict({name: reading.weights[name] for name in net.state_dict()})
    if not followed or any(bool(weight.isnan().any()) for weight in net.parameters()):
        net.fc.weight.fill_(math.nan)  # further on, attention on a CPU may take NaN for a score like any other
    return net


@dataclass(frozen=True)
class Drafting:
    """How a head drafts. embedding, lm_head: [V, H]. net: embeddings and features [1, T, H] -> hidden states."""

    embedding: Tensor
    net: nn.Module
    lm_head: Tensor

    def states(self, ids: Tensor, features: Tensor) -> Tensor:
        """[T, H]."""
        return self.net(self.embedding[ids][None], features[None])[0]

    def logits(self, ids: Tensor, features: Tensor) -> Tensor:
        """[T, V]."""
        return self.states(ids, features) @ self.lm_head.T

    def draft(self, ids: Tensor, features: Tensor) -> Tensor:
        """[T + DRAFT_STEPS, V]: logits of all rows, then of a greedy draft from the last one, on its own states."""
        for _ in range(DRAFT_STEPS):
            states = self.states(ids, features)
            chosen = (states[-1:] @ self.lm_head.T).nan_to_num(-math.inf).argmax(-1)
            ids, features = torch.cat([ids, chosen]), torch.cat([features, states[-1:]])
        return self.logits(ids, features)


def compare_eagle(reading: Reading, head: nn.Module, package: Package, trial: Trial) -> list[Measure]:
    """Logits by the system's rules against those of `head`, and how often it chooses as the target does.

    head: ours, in float32. trial: with the target's embedding and lm_head.
    """
    assert trial.facts.embed_tokens is not None and trial.facts.lm_head is not None
    embedding, lm_head = trial.facts.embed_tokens.float(), trial.facts.lm_head.float()
    table = reading.weights.get("embed_tokens.weight", embedding)
    inputs = [(probe.ids[1:], probe.features[:-1]) for probe in trial.probes]
    scale = float(reading.settings["logit_scale"])
    positions = max(len(ids) for ids, _ in inputs) + DRAFT_STEPS
    theirs = Drafting(table, net_of(reading, positions), scale * lm_head)
    ours = Drafting(embedding, head, lm_head)
    fed, drafted, size = 0.0, 0.0, 0.0
    for ids, features in inputs:
        our_logits = ours.draft(ids, features)
        differences = theirs.draft(ids, features) - our_logits
        size = max(size, largest(our_logits))
        fed, drafted = max(fed, largest(differences[: len(ids)])), max(drafted, largest(differences[len(ids) :]))
    number = sum(len(ids) for ids, _ in inputs)
    others = other_readings(reading, package, trial, theirs, inputs)
    return [
        difference(f"logits of {number} rows", fed, size),
        difference(f"logits in {len(inputs)} drafts", drafted, size),
        working(trial, theirs, inputs, others),
    ]


def difference(name: str, value: float, size: float) -> Measure:
    """size: the largest of our own."""
    bar = max(LARGEST_DIFFERENCE, LARGEST_SHARE * size) if math.isfinite(size) else LARGEST_DIFFERENCE
    return Measure(name, f"differ by {value:.1e}", f"at most {bar:.2g}", value <= bar)


def working(trial: Trial, theirs: Drafting, inputs: Inputs, others: Iterator[tuple[str, Drafting, Inputs]]) -> Measure:
    """Whether the head, read by the system's rules, drafts what the target says; and whether it would do so clearly
    more often when read another way, which is then how it was made.

    Neither needs our reading of the directory: this is what finds a mistake that all readers share.
    """
    # Row t: the target's greedy choice of x_{t+2}, and whether that token is one of the answer.
    choices = [probe.choices[1:] for probe in trial.probes]
    counts = [torch.arange(2, len(probe.ids) + 1) >= probe.start for probe in trial.probes]
    count = max(sum(int(counted.sum()) for counted in counts), 1)

    def agreement(drafting: Drafting, inputs: Inputs) -> float:
        chosen = [drafting.logits(*rows).nan_to_num(0.0).argmax(-1) for rows in inputs]
        return sum(int(((own == best) & n).sum()) for own, best, n in zip(chosen, choices, counts, strict=True)) / count

    value = agreement(theirs, inputs)
    needed = value + CLEARLY_BETTER + 3 * math.sqrt(0.25 / count)
    shares = ((agreement(drafting, rows), name) for name, drafting, rows in others)
    best, name = max((share for share in shares if share[0] > needed), default=(0.0, ""))
    said = f"{value:.1%} of {count} tokens" + (f"; {best:.1%} with {name}" if name else "")
    return Measure("chooses as the target", said, "no other reading better", not name)


def other_readings(
    reading: Reading, package: Package, trial: Trial, theirs: Drafting, inputs: Inputs
) -> Iterator[tuple[str, Drafting, Inputs]]:
    """What a head may have been made for, if not for what the system does with it. inputs: the system's."""
    assert trial.facts.embed_tokens is not None
    positions = max(len(ids) for ids, _ in inputs)

    def read_as(**changes: Any) -> Drafting:
        return dataclasses.replace(theirs, net=net_of(dataclasses.replace(reading, **changes), positions))

    weights, settings = reading.weights, reading.settings
    swapped = torch.cat(weights["fc.weight"].chunk(2, dim=1)[::-1], dim=1)
    yield "the feature before the embedding in fc", read_as(weights=weights | {"fc.weight": swapped}), inputs
    states = [probe.before_norm for probe in trial.probes if probe.before_norm is not None]
    if len(states) == len(inputs):
        before = [(ids, state[:-1]) for (ids, _), state in zip(inputs, states, strict=True)]
        yield "features from before the final norm", theirs, before
    plain = dataclasses.replace(theirs, embedding=trial.facts.embed_tokens.float())
    own = [(probe.ids[:-1], features) for probe, (_, features) in zip(trial.probes, inputs, strict=True)]
    yield "each feature beside its own token instead of the next", plain, own
    bias = package.tensors.get("fc.bias")
    if bias is not None and "fc.bias" not in weights:
        yield "the fc.bias of the file", read_as(weights=weights | {"fc.bias": bias.float()}), inputs
    llama, rope = settings["llama"], transformers_rope(trial.facts.raw)
    target = dataclasses.replace(llama, rope_theta=rope.theta, rope_scaling=rope.scaling)
    if rope.kind in KNOWN and not torch.equal(frequencies(llama, rope), frequencies(llama, Rope.of(llama))):
        yield "the rotary settings of the target", read_as(settings=settings | {"llama": target}), inputs
    if settings["embed"] == "file":
        yield "the target's embedding", plain, inputs
