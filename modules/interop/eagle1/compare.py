"""A head as another system holds it, beside the same head as one of ours, on real hidden states."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from draftsmith.data.exchange.states import Probe
from draftsmith.modules.interop.base import Package, Reading, TargetFacts
from draftsmith.modules.interop.eagle1.reference import hidden
from draftsmith.modules.layers import rope_frequencies
from draftsmith.modules.targets.llama import SUPPORTED, llama_config

# Two float32 implementations of one layer; another rope, order or bias changes logits by tenths at least.
LARGEST_DIFFERENCE = 1e-4
LARGEST_SHARE = 1e-5  # of the largest logit, where that is more: a draft goes on from its own rounded states
# Steps that a draft is followed on its own tokens and features.
DRAFT_STEPS = 3
# Another reading has to agree this much more often with the target, chance aside, to be called the right one.
CLEARLY_BETTER = 0.1


@dataclass(frozen=True)
class Measure:
    """One number of a check: what it is, its value and the bar, in words, and whether it is met."""

    name: str
    value: str
    bar: str
    passed: bool


@dataclass(frozen=True)
class Rows:
    """What an EAGLE head reads of a probe (row t: token x_{t+1} and feature f_t), and what the target says then.

    next_ids [T-1]; features [T-1, H]; choices [T-1]: the target's greedy choice of x_{t+2}; counts [T-1]: whether that
    token is one of the answer.
    """

    next_ids: Tensor
    features: Tensor
    choices: Tensor
    counts: Tensor

    @staticmethod
    def of(probe: Probe, lm_head: Tensor) -> Rows:
        choices = (probe.features[1:] @ lm_head.T).argmax(-1)
        counts = torch.arange(2, len(probe.ids) + 1) >= probe.start
        return Rows(probe.ids[1:], probe.features[:-1], choices, counts)


Forward = Callable[[Tensor, Tensor], Tensor]  # embeddings and features [T, H] -> the head's hidden states [T, H]


def compare_eagle(
    reading: Reading, head: nn.Module, facts: TargetFacts, probes: Sequence[Probe], package: Package
) -> list[Measure]:
    """Logits of `reading` by the system's rules against those of `head`, and how often it chooses as the target does.

    head: ours, in float32. facts: with embedding and lm_head.
    """
    assert facts.embed_tokens is not None and facts.lm_head is not None
    embedding, lm_head = facts.embed_tokens.float(), facts.lm_head.float()
    rows = [Rows.of(probe, lm_head) for probe in probes]

    def theirs(embeds: Tensor, features: Tensor) -> Tensor:
        return hidden(reading, embeds, features)

    def ours(embeds: Tensor, features: Tensor) -> Tensor:
        return head(embeds[None], features[None])[0]

    own = reading.weights["embed_tokens.weight"] if reading.settings["embed"] == "file" else embedding
    scale = float(reading.settings.get("logit_scale", 1.0))
    fed, drafted, size = 0.0, 0.0, 0.0
    for row in rows:
        their_logits = drafted_logits(theirs, own, lm_head, row, scale)
        our_logits = drafted_logits(ours, embedding, lm_head, row, 1.0)
        count, size = len(row.next_ids), max(size, largest(our_logits))
        fed = max(fed, largest(their_logits[:count] - our_logits[:count]))
        drafted = max(drafted, largest(their_logits[count:] - our_logits[count:]))
    number = sum(len(row.next_ids) for row in rows)
    return [
        difference(f"logits of {number} rows", fed, size),
        difference(f"logits in {len(rows)} drafts", drafted, size),
        working(reading, facts, rows, probes, package),
    ]


def drafted_logits(forward: Forward, embedding: Tensor, lm_head: Tensor, rows: Rows, scale: float) -> Tensor:
    """Logits [T-1 + DRAFT_STEPS, V] of all rows, then of a greedy draft from the last one, on the head's own states."""
    embeds, features = embedding[rows.next_ids], rows.features
    logits = torch.empty(0)
    states = forward(embeds, features)
    for _ in range(DRAFT_STEPS):
        logits = scale * states @ lm_head.T
        chosen = logits[-1:].nan_to_num(-math.inf).argmax(-1)
        embeds, features = torch.cat([embeds, embedding[chosen]]), torch.cat([features, states[-1:]])
        states = forward(embeds, features)
    return torch.cat([logits, scale * states[-1:] @ lm_head.T])


def largest(difference: Tensor) -> float:
    """Largest absolute value; infinite where anything is not a number."""
    return float(difference.abs().nan_to_num(math.inf, math.inf, math.inf).max()) if difference.numel() else 0.0


def difference(name: str, value: float, size: float) -> Measure:
    """size: the largest of our own."""
    bar = max(LARGEST_DIFFERENCE, LARGEST_SHARE * size) if math.isfinite(size) else LARGEST_DIFFERENCE
    return Measure(name, f"differ by {value:.1e}", f"at most {bar:.2g}", value <= bar)


def working(
    reading: Reading, facts: TargetFacts, rows: Sequence[Rows], probes: Sequence[Probe], package: Package
) -> Measure:
    """Whether the head, read by the system's rules, drafts what the target says; and whether it would do so clearly
    more often when read another way, which is then how it was made.

    Neither needs our reading of the directory: this is what finds a mistake that all readers share.
    """
    assert facts.embed_tokens is not None and facts.lm_head is not None
    embedding, lm_head = facts.embed_tokens.float(), facts.lm_head.float()
    own = reading.weights["embed_tokens.weight"] if reading.settings["embed"] == "file" else embedding
    count = sum(int(row.counts.sum()) for row in rows)

    def agreement(other: Reading, inputs: Sequence[tuple[Tensor, Tensor]]) -> float:
        right = 0
        for row, (embeds, features) in zip(rows, inputs, strict=True):
            logits = hidden(other, embeds, features) @ lm_head.T
            right += int(((logits.nan_to_num(0.0).argmax(-1) == row.choices) & row.counts).sum())
        return right / max(count, 1)

    served = [(own[row.next_ids], row.features) for row in rows]
    value = agreement(reading, served)
    needed = value + CLEARLY_BETTER + 3 * math.sqrt(0.25 / max(count, 1))
    better = [
        (share, name)
        for name, other, inputs in other_readings(reading, facts, embedding, rows, probes, package, served)
        if (share := agreement(other, inputs)) > needed
    ]
    said = f"{value:.1%} of {count} tokens"
    if better:
        share, name = max(better)
        said += f"; {share:.1%} with {name}"
    return Measure("chooses as the target", said, "no other reading better", not better)


Inputs = list[tuple[Tensor, Tensor]]


def other_readings(
    reading: Reading,
    facts: TargetFacts,
    embedding: Tensor,
    rows: Sequence[Rows],
    probes: Sequence[Probe],
    package: Package,
    served: Inputs,
) -> Iterator[tuple[str, Reading, Inputs]]:
    """What a head may have been made for, if not for what the system does with it."""
    fc = reading.weights["fc.weight"]
    swapped = {**reading.weights, "fc.weight": torch.cat(fc.chunk(2, dim=1)[::-1], dim=1)}
    yield "the feature before the embedding in fc", dataclasses.replace(reading, weights=swapped), served
    states = [probe.before_norm for probe in probes]
    if all(state is not None for state in states):
        inputs = [(embeds, state[:-1]) for (embeds, _), state in zip(served, states, strict=True) if state is not None]
        yield "features from before the final norm", reading, inputs
    tokens = [probe.ids[:-1] for probe in probes]
    inputs = [(embedding[ids], row.features) for ids, row in zip(tokens, rows, strict=True)]
    yield "each feature beside its own token instead of the next", reading, inputs
    bias = package.tensors.get("fc.bias")
    if bias is not None and "fc.bias" not in reading.weights:
        biased = {**reading.weights, "fc.bias": bias.float()}
        yield "the fc.bias of the file", dataclasses.replace(reading, weights=biased), served
    frequencies = reading.settings["inv_freq"]
    if facts.raw.get("model_type") in SUPPORTED:
        other = rope_frequencies(llama_config(facts.raw))
        if other.shape == frequencies.shape and not torch.allclose(other, frequencies.float()):
            settings = {**reading.settings, "inv_freq": other}
            yield "the rotary settings of the target", dataclasses.replace(reading, settings=settings), served
    if reading.settings["embed"] == "file":
        yield "the target's embedding", reading, [(embedding[row.next_ids], row.features) for row in rows]


def compare_acceptance(accept_prob: Tensor, ours: Tensor) -> list[Measure]:
    """P(accept) by the system's rules and by ours, of the same hidden states."""
    value, low, high = largest(accept_prob - ours), float(ours.min()), float(ours.max())
    name, bar = f"P(accept) of {ours.numel()} states", f"at most {LARGEST_DIFFERENCE:g}"
    return [
        Measure(name, f"differs by {value:.1e}", bar, value <= LARGEST_DIFFERENCE),
        Measure("its opinions", f"P from {low:.3f} to {high:.3f}", "not all the same", high > low),
    ]
