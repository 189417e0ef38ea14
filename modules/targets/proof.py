"""Proof of a teacher: its distributions beside those that the target itself gives for the same text.

A head learns from hidden states, by lm_head. Where states come from another place or process than the target's logits
(a server, a file), or a family scales or bounds its logits, the distribution may be another one, and training goes on
without a sign of it. So some rows are compared before the first step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.targets.readout import Readout
from draftsmith.modules.types import InputError

# Tokens that are compared, and how many of the likeliest a target is asked for at each.
NUM_TOKENS, TOP = 128, 20
# Largest difference of log-probabilities in float32. Measured: right teachers 4e-5, wrong ones 0.4 and more.
LARGEST = 1e-3
# In 16 bits: median of the places' largest differences, and mean difference of the rows' own tokens. Measured: right
# teachers 0.02 and 0.004; wrong ones 0.07 to 5 in the mean.
MEDIAN, OWN = 0.1, 0.02
# fp8 keeps 4 bits of a state less than bf16. Measured: right teachers 17 times as far.
FP8 = 16


def bars(dtype: torch.dtype) -> dict[str, float]:
    """Return how far a right teacher may be, by field of `Distance`, for states and a target in this type."""
    if dtype in (torch.float32, torch.float64):
        return {"largest": LARGEST}
    coarser = FP8 if dtype.itemsize == 1 else 1
    return {"median": MEDIAN * coarser, "own": OWN * coarser}


@dataclass(frozen=True)
class Reference:
    """The target's log-probabilities of what follows each of T tokens.

    tokens: [T, K] int64, some of the likeliest. log_prob: [T, K]. following: [T] int64, each place's next token in the
    text; -1 at the end of a row. own: [T], its log-probability.
    """

    tokens: Tensor
    log_prob: Tensor
    following: Tensor
    own: Tensor

    @staticmethod
    def of_logits(logits: Tensor, following: Tensor) -> Reference:
        """Take it from whole logits [T, V]."""
        log_prob = logits.double().log_softmax(-1)
        top = log_prob.topk(min(TOP, log_prob.shape[-1]))
        own = log_prob.gather(1, following.clamp_min(0)[:, None])[:, 0]
        return Reference(top.indices, top.values, following, own)


@dataclass(frozen=True)
class Distance:
    """Distance of a teacher from the target in log-probabilities (nat).

    largest, median: of the places' largest differences. own: mean difference of the text's own tokens.
    """

    largest: float
    median: float
    own: float

    def fits(self, dtype: torch.dtype) -> bool:
        """Return whether it is no more than rounding, for states and a target in this type. NaN is more."""
        return all(getattr(self, name) <= bar for name, bar in bars(dtype).items())

    def __str__(self) -> str:
        return f"{self.largest:.2g} nat at most, {self.median:.2g} in the median, {self.own:.2g} at the text's tokens"


@dataclass(frozen=True)
class Proof:
    """Comparison by which a teacher was proved. source: of its states. tokens: how many were compared."""

    source: str
    readout: Readout
    tokens: int
    distance: Distance

    def as_json(self) -> dict[str, Any]:
        """Return it as recorded in manifests and model cards."""
        return {"source": self.source, "tokens": self.tokens, **asdict(self.readout), **asdict(self.distance)}

    @staticmethod
    def from_json(proof: Mapping[str, Any]) -> Proof:
        """Return the proof that `as_json` recorded."""
        readout = Readout(**{field.name: proof[field.name] for field in fields(Readout)})
        distance = Distance(**{field.name: proof[field.name] for field in fields(Distance)})
        return Proof(proof["source"], readout, proof["tokens"], distance)

    def __str__(self) -> str:
        return f"teacher proved on {self.tokens} tokens of {self.source}: {self.readout}; {self.distance}"


def compare(logits: Tensor, reference: Reference) -> Distance:
    """Compare a teacher's logits [T, V] with the target's log-probabilities."""
    log_prob = logits.double().log_softmax(-1)
    places = (log_prob.gather(1, reference.tokens) - reference.log_prob).abs().amax(-1)  # [T]
    own = log_prob.gather(1, reference.following.clamp_min(0)[:, None])[:, 0] - reference.own
    own = own[reference.following >= 0].abs()
    return Distance(places.max().item(), places.median().item(), own.mean().item() if len(own) else 0.0)


def prove(
    source: str,
    readouts: Iterable[Readout],
    logits: Callable[[Readout], Tensor],
    reference: Reference,
    dtype: torch.dtype,
) -> Proof:
    """Return the proof of the readout that fits the target best.

    source: where the states come from. logits: returns the teacher's [T, V] by a readout. dtype: of target and states,
    the narrower one.

    Raises:
        InputError: none fits.
    """
    found = [(compare(logits(readout), reference), readout) for readout in readouts]
    sums = [math.inf if math.isnan(distance.own) else distance.own + distance.median for distance, _ in found]
    # Where a softcap hardly matters, rounding would choose: of those that fit about equally, the likeliest is taken.
    near = 2 * min(sums) + LARGEST
    fitting = (pair for pair, total in zip(found, sums, strict=True) if total <= near and pair[0].fits(dtype))
    distance, readout = next(fitting, found[sums.index(min(sums))])
    if not distance.fits(dtype):
        allowed = ", ".join(f"{name} {bar:g}" for name, bar in bars(dtype).items())
        raise InputError(
            "teacher",
            f"{distance} from the target's own distributions, at best ({source}: {readout})",
            f"{allowed} at most",
            "These states would teach another model: check that states and logits are of the same target and layer.",
        )
    return Proof(source, readout, len(reference.tokens), distance)


def prove_states(target: CausalLM, text: Tensor, states: Tensor, dtype: torch.dtype, source: str) -> Proof:
    """Prove final states [T, H] of a text [T] against the distributions that the target answers with.

    dtype: that they are stored in. source: where they come from.

    Raises:
        InputError: they give other ones.
    """
    following = torch.cat([text[1:], text.new_full((1,), -1)]).to(target.device)
    reference = Reference.of_logits(target.logits(text), following)
    with torch.no_grad():
        logits = target.lm_head(states.to(target.device, target.dtype))  # [T, V]
    dtype = min(target.dtype, dtype, key=lambda dtype: dtype.itemsize)
    return prove(source, [target.readout], lambda _: logits, reference, dtype)
