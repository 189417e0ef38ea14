"""Other readings of a draft head, one factor changed each, and the one rule by which `draftsmith diagnose` and
`draftsmith check` tell whether another reading drafts better."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.modules.formats.rope import BASE, KNOWN, Rope, frequencies
from draftsmith.modules.layers import LlamaConfig, RopeScaling

# Chance of naming a reading that is no better, over all readings tried. Places of a text are not independent; still, of
# 19 sound heads of the embedded pair, stopped after 5 to 840 steps, the lowest of about 170 single chances was 0.03.
CHANCE = 0.01
# Share of right first tokens from which every misreading that costs tokens showed on 1,815 places (EAGLE and EAGLE-3 of
# the embedded pair, docs/guides/low-acceptance.md); at 0.40 a wrong rotary base did not.
STRONG = 0.5
# Tokens of a draft that are compared: a head learns of its own states what the second one shows.
DEPTH = 2
# Switches of EAGLE-3 heads that no tensor shows.
SWITCHES = ("norm_output", "norm_before_residual")
# Weights that read [embedding; state].
JOINT = ("fc.weight", *(f"layer.self_attn.{name}_proj.weight" for name in "qkv"))
ROTATED = ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")


@dataclass(frozen=True)
class Comparison:
    """Result of comparing readings.

    better: readings that draft better than the head's own, the best first. alike: those that cannot be distinguished
    from its own. first: share of right first tokens under the best reading. weak: none is better, and `first` is too
    low for a better one to show.
    """

    better: tuple[str, ...]
    alike: tuple[str, ...]
    first: float
    weak: bool


def sign_test(wins: int, losses: int) -> float:
    """Probability of at least so many wins in so many fair draws (one-sided sign test, exact)."""
    draws = wins + losses
    k = torch.arange(wins, draws + 1, dtype=torch.float64)
    total = torch.tensor(draws + 1.0, dtype=torch.float64)
    logs = torch.lgamma(total) - torch.lgamma(k + 1) - torch.lgamma(draws - k + 1) - draws * math.log(2)
    return min(1.0, math.exp(torch.logsumexp(logs, 0)))


def compare_readings(own: Tensor, others: Mapping[str, Tensor]) -> Comparison:
    """Compare readings of a head by a paired sign test over the places that they drafted from.

    First tokens are compared, and later ones where a reading changes no first token: those depend on how far the head
    was trained on its own states, too.

    own, others: [N] int, how many tokens of a draft from each place the target would accept. The places are the same.
    """
    chance = CHANCE / max(1, len(others))
    better, alike = [], []
    for label, lengths in others.items():
        first, own_first = lengths > 0, own > 0
        pair = (lengths, own) if torch.equal(first, own_first) else (first.int(), own_first.int())
        wins, losses = int((pair[0] > pair[1]).sum()), int((pair[0] < pair[1]).sum())
        if sign_test(wins, losses) < chance:
            better.append(label)
        elif sign_test(losses, wins) >= chance:
            alike.append(label)
    hits = max([int((lengths > 0).sum()) for lengths in (own, *others.values())])
    # With so few hits, not even a reading without any could be distinguished from the best.
    weak = not better and (hits < STRONG * len(own) or sign_test(hits, 0) >= chance)
    better.sort(key=lambda label: -float(others[label].float().mean()))
    return Comparison(tuple(better), tuple(alike), hits / max(1, len(own)), weak)


def right(lengths: Tensor, depth: int = 1) -> float:
    """Share of drafts whose first tokens, so many, are right."""
    return float((lengths >= depth).float().mean()) if len(lengths) else 0.0


def other_weights(weights: Mapping[str, Tensor], head_dim: int) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield the weights of a Llama-like head as another convention stores them, by the convention's name.

    weights: by the names of an EAGLE, EAGLE-3 or Hydra head. head_dim: of its attention.
    """
    joint = [name for name in JOINT if name in weights]
    if joint[1:]:  # EAGLE-3, whose fc reads states alone
        joint = joint[1:]
    exchanged = {name: torch.cat(weights[name].chunk(2, 1)[::-1], 1) for name in joint}
    if joint:
        said = "state before the embedding in q, k and v" if joint[1:] else "feature before the embedding in fc"
        yield f"the {said}", {**weights, **exchanged}
    # Llama's own code rotates neighbours (0, 1), transformers halves (0, d/2): converters permute q and k.
    rotated = [name for name in weights if name.endswith(ROTATED)]
    for said, shape in (("not converted", (head_dim // 2, 2)), ("converted twice", (2, head_dim // 2))):
        other = {name: weights[name].unflatten(0, (-1, *shape)).transpose(1, 2).flatten(0, 2) for name in rotated}
        if rotated:
            yield f"the rotary pairs of q and k as if {said} from interleaved", {**weights, **other}


def other_ropes(llama: LlamaConfig, target: Rope | None) -> Iterator[tuple[str, LlamaConfig]]:
    """Yield a head's sizes with its target's rotary settings, and with those of most published heads."""
    tables = [frequencies(llama, Rope.of(llama))]
    for rope in (target, Rope(BASE, RopeScaling())):
        if rope is None or rope.kind not in KNOWN:
            continue
        tables.append(frequencies(llama, rope))
        if not any(torch.equal(tables[-1], table) for table in tables[:-1]):
            yield f"rotary {rope}", dataclasses.replace(llama, rope_theta=rope.theta, rope_scaling=rope.scaling)
