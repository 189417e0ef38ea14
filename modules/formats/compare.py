"""An EAGLE head as another system holds it, beside the same head as one of ours, on real hidden states."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.modules.drafters.eagle.net import EagleConfig, EagleNet
from draftsmith.modules.drafters.eagle3.net import Eagle3Config, Eagle3Net
from draftsmith.modules.formats.alternatives import DEPTH, SWITCHES, compare_readings, other_ropes, other_weights, right
from draftsmith.modules.formats.base import Measure, Package, Reading, Trial, largest
from draftsmith.modules.formats.draft_vocabulary import table_fault
from draftsmith.modules.formats.rope import KNOWN, transformers_rope
from draftsmith.modules.layers import RopeScaling

# Two float32 implementations of one layer; another rope, order or bias changes logits by tenths at least.
LARGEST_DIFFERENCE = 1e-4
LARGEST_SHARE = 1e-5  # of the largest logit, where that is more: a draft goes on from its own rounded states
# Steps that a draft is followed on its own tokens and features.
DRAFT_STEPS = 3

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

    def of_states(self, states: Tensor) -> Tensor:
        """Logits [T, V]."""
        return states @ self.lm_head.T

    def logits(self, ids: Tensor, features: Tensor) -> Tensor:
        """[T, V]."""
        return self.of_states(self.states(ids, features))

    def passes(self, ids: Tensor, features: Tensor) -> list[Tensor]:
        """Logits [T, V] of the first, second, ... token of a draft from each row, the text's own tokens before it."""
        net: Any = self.net
        # Row t of pass j belongs to the draft from row t - j.
        states = net.unroll(self.embedding[ids][None], features[None], DEPTH)
        return [self.of_states(own[0].roll(-j, 0)) for j, own in enumerate(states)]

    def draft(self, ids: Tensor, features: Tensor) -> Tensor:
        """[T + DRAFT_STEPS, V]: logits of all rows, then of a greedy draft from the last one, on its own states."""
        for _ in range(DRAFT_STEPS):
            states = self.states(ids, features)
            chosen = self.of_states(states[-1:]).nan_to_num(-math.inf).argmax(-1)
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
    return [
        *differences(theirs, ours, inputs, inputs),
        working(trial, theirs, inputs, other_readings(reading, package, trial, theirs, inputs)),
    ]


def differences(theirs: Drafting, ours: Drafting, their_inputs: Inputs, our_inputs: Inputs) -> list[Measure]:
    """Logits of two readings over the same texts, fed and drafted."""
    fed, drafted, size = 0.0, 0.0, 0.0
    for (ids, features), own in zip(their_inputs, our_inputs, strict=True):
        our_logits, their_logits = ours.draft(*own), theirs.draft(ids, features)
        # Tokens that a head cannot draft have -inf.
        apart = torch.where(their_logits == our_logits, 0.0, their_logits - our_logits)
        size = max(size, largest(our_logits[our_logits.isfinite()]))
        fed, drafted = max(fed, largest(apart[: len(ids)])), max(drafted, largest(apart[len(ids) :]))
    number = sum(len(ids) for ids, _ in our_inputs)
    return [
        difference(f"logits of {number} rows", fed, size),
        difference(f"logits in {len(our_inputs)} drafts", drafted, size),
    ]


def difference(name: str, value: float, size: float) -> Measure:
    """size: the largest of our own."""
    bar = max(LARGEST_DIFFERENCE, LARGEST_SHARE * size) if math.isfinite(size) else LARGEST_DIFFERENCE
    return Measure(name, f"differ by {value:.1e}", f"at most {bar:.2g}", value <= bar)


def working(trial: Trial, theirs: Any, inputs: Inputs, others: Iterator[tuple[str, Any, Inputs]]) -> Measure:
    """Compare how far the head, read by the system's rules, drafts what the target says with how far it does so when
    read another way. The reading that drafts best is how the head was made.

    Neither needs our reading of the directory: this is what finds a mistake that all readers share. theirs: its
    `passes` gives logits [T, V] of each token of a draft.
    """
    depth = 1 if trial.known else DEPTH
    own = accepted(trial, theirs, inputs, depth)
    lengths = {name: accepted(trial, drafting, rows, depth) for name, drafting, rows in others}
    comparison = compare_readings(own, lengths)
    said = f"{right(own):.1%} of {len(own)} tokens"
    if comparison.better:
        best = lengths[comparison.better[0]]
        said += f"; {right(best):.1%} with {comparison.better[0]}"
        said += f", and {right(best, 2):.1%} of two in place of {right(own, 2):.1%}" * (right(best) == right(own))
    measure = Measure("chooses as the target", said, "no other reading better", not comparison.better)
    return measure if trial.known else dataclasses.replace(measure, weak=comparison.weak, alike=comparison.alike)


def accepted(trial: Trial, drafting: Any, inputs: Inputs, depth: int) -> Tensor:
    """Count the first tokens, at most `depth`, of a greedy draft that the target would accept, [N] places in the
    answers."""
    lengths = []
    for probe, rows in zip(trial.probes, inputs, strict=True):
        # Row t: the target's greedy choice of x_{t+2}, and whether that token is one of the answer.
        choices, counted = probe.choices[1:], torch.arange(2, len(probe.ids) + 1) >= probe.start
        hits = [
            logits.nan_to_num(0.0).argmax(-1)[: len(choices) - j] == choices[j:]
            for j, logits in enumerate(drafting.passes(*rows)[:depth])
        ]
        padded = torch.stack([F.pad(own, (0, len(choices) - len(own))) for own in hits], -1)
        lengths.append(padded.long().cumprod(-1).sum(-1)[counted])
    return torch.cat(lengths)


def other_readings(
    reading: Reading, package: Package, trial: Trial, theirs: Drafting, inputs: Inputs
) -> Iterator[tuple[str, Drafting, Inputs]]:
    """What a head may have been made for, if not for what the system does with it. inputs: the system's."""
    assert trial.facts.embed_tokens is not None
    positions = max(len(ids) for ids, _ in inputs)

    def read_as(**changes: Any) -> Drafting:
        return dataclasses.replace(theirs, net=net_of(dataclasses.replace(reading, **changes), positions))

    weights, settings = reading.weights, reading.settings
    for name, changed in other_weights(weights, settings["llama"].head_dim):
        yield name, read_as(weights=changed), inputs
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
    for name, llama in other_ropes(settings["llama"], transformers_rope(trial.facts.raw)):
        yield name, read_as(settings=settings | {"llama": llama}), inputs
    if settings["embed"] == "file":
        yield "the target's embedding", plain, inputs


@dataclass(frozen=True)
class Drafting3(Drafting):
    """How an EAGLE-3 head drafts, from g [T, H] on. net: an `Eagle3Net`; lm_head is not read."""

    def states(self, ids: Tensor, features: Tensor) -> Tensor:
        net: Any = self.net
        return net.follow(self.embedding[ids][None], features[None], 1)[0][0]

    def passes(self, ids: Tensor, features: Tensor) -> list[Tensor]:
        net: Any = self.net
        embeds = F.pad(self.embedding[ids], (0, 0, 0, DEPTH - 1))
        return [self.of_states(own[0]) for own in net.follow(embeds[None], features[None], DEPTH)]

    def of_states(self, states: Tensor) -> Tensor:
        net: Any = self.net
        logits = net.lm_head(net.logits_input(states))
        return logits.new_full((len(logits), len(self.embedding)), -math.inf).index_copy_(1, net.d2t, logits)

    def inputs(self, trial: Trial, capture: tuple[int, ...], shift: int = 1) -> Inputs:
        """Token ids and g of each probe; undefined where the target has no such layers."""
        net: Any = self.net
        rows: Inputs = []
        for probe in trial.probes:
            ids, last = probe.ids[shift:], len(probe.ids) - 1
            none = torch.full_like(probe.features, math.nan)
            states = torch.cat([probe.states.get(number, none) for number in capture], -1)[:last]
            fits = states.shape[-1] == net.fc.in_features
            rows.append((ids[:last], net.read(states) if fits else none[:last]))
        return rows


def net3_of(reading: Reading, positions: int) -> Eagle3Net:
    """As `net_of`."""
    settings = reading.settings
    llama = dataclasses.replace(settings["llama"], num_layers=1, max_position=positions)
    followed = llama.rope_scaling.kind in KNOWN
    llama = llama if followed else dataclasses.replace(llama, rope_scaling=RopeScaling())
    flags = {name: settings[name] for name in ("fc_norm", "norm_output", "norm_before_residual")}
    config = Eagle3Config(llama, tuple(range(settings["num_states"])), settings["draft_vocab_size"], **flags)
    net = Eagle3Net(config).requires_grad_(False)
    weights, drafted = dict(reading.weights), reading.weights.get("d2t")
    inside, count = True, config.draft_vocab_size
    if drafted is not None:  # ours are ascending, a system's need not be
        inside = drafted.shape == (count,) and not table_fault(drafted, None, llama.vocab_size)
        order = drafted.argsort() if inside else torch.arange(count)
        weights["lm_head.weight"] = weights["lm_head.weight"][order]
        weights["d2t"] = drafted[order] if inside else order
    net.load_state_dict({name: weights[name] for name in net.state_dict()})
    if not followed or not inside or any(bool(weight.isnan().any()) for weight in net.parameters()):
        for weight in (net.fc.weight, net.lm_head.weight):
            weight.fill_(math.nan)
    return net


def layers_beside(layers: Iterable[int], num_layers: int) -> tuple[int, ...]:
    """The layers, and those one before and one after them, of so many."""
    near = {number + step for number in layers for step in (-1, 0, 1)}
    return tuple(sorted(number for number in near if 0 <= number < num_layers))


def compare_eagle3(reading: Reading, head: nn.Module, package: Package, trial: Trial) -> list[Measure]:
    """As `compare_eagle`. trial: with the states of `layers_beside`."""
    assert trial.facts.embed_tokens is not None and trial.facts.lm_head is not None
    embedding, lm_head = trial.facts.embed_tokens.float(), trial.facts.lm_head.float()
    table = reading.weights.get("embed_tokens.weight", embedding)
    positions = max(len(probe.ids) for probe in trial.probes) + DRAFT_STEPS
    theirs = Drafting3(table, net3_of(reading, positions), lm_head)
    ours, config = Drafting3(embedding, head, lm_head), cast(Any, head).config
    inputs = theirs.inputs(trial, reading.settings["capture"])
    return [
        *differences(theirs, ours, inputs, ours.inputs(trial, config.capture)),
        working(trial, theirs, inputs, other_readings3(reading, package, trial, theirs, inputs)),
    ]


def other_readings3(
    reading: Reading, package: Package, trial: Trial, theirs: Drafting3, inputs: Inputs
) -> Iterator[tuple[str, Drafting, Inputs]]:
    """What an EAGLE-3 head may have been made for, if not for what the system does with it."""
    assert trial.facts.embed_tokens is not None
    weights, settings = reading.weights, reading.settings
    capture, positions = settings["capture"], max(len(ids) for ids, _ in inputs)

    def read_as(weights: dict[str, Tensor] = weights, **changes: Any) -> tuple[Drafting3, Inputs]:
        other = dataclasses.replace(reading, weights=weights, settings={**settings, **changes})
        drafting = dataclasses.replace(theirs, net=net3_of(other, positions))
        return drafting, drafting.inputs(trial, capture)

    for name, step in (("one later", 1), ("one earlier", -1)):
        yield f"layers {name}", theirs, theirs.inputs(trial, tuple(number + step for number in capture))
    if len(capture) > 1:
        yield "the layers in the opposite order", theirs, theirs.inputs(trial, capture[::-1])
    for name, changed in other_weights(weights, settings["llama"].head_dim):
        yield name, *read_as(changed)
    for name in SWITCHES:
        yield f"{name} {'off' if settings[name] else 'on'}", *read_as(weights, **{name: not settings[name]})
    if "d2t" in weights and "d2t" in package.tensors:
        yield "ids in d2t", *read_as({**weights, "d2t": package.tensors["d2t"].long()})
    plain = dataclasses.replace(theirs, embedding=trial.facts.embed_tokens.float())
    yield "each state beside its own token instead of the next", plain, plain.inputs(trial, capture, shift=0)
    for name, llama in other_ropes(settings["llama"], transformers_rope(trial.facts.raw)):
        yield name, *read_as(llama=llama)
    if settings["embed"] == "file":
        yield "the target's embedding", plain, inputs
