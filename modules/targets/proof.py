"""Proof of a teacher: its distributions beside those that the target itself gives for the same text.

A head learns from hidden states, by lm_head. Where states come from another place or process than the target's logits
(a server, a file), or a family scales or bounds its logits, the distribution may be another one, and training goes on
without a sign of it. So some rows are compared before the first step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from draftsmith.modules.sampling import wide
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.targets.readout import Readout
from draftsmith.modules.types import InputError

# Tokens that are compared at the begin of a text and at its end, and how many of the likeliest a target is asked for at
# each. A longer text is cut: behind LONGEST what is wrong behind a window of 4,096 tokens has shown.
NUM_TOKENS, TOP, LONGEST = 128, 20, 4096 + 128
# Largest difference of log-probabilities in float32. Measured: right teachers 4e-5, wrong ones 0.4 and more.
LARGEST = 1e-3
# In 16 bits logits themselves are rounded, to multiples of u = eps 2^floor(log2 |logit|): in bf16 0.125 from 16 to 32.
# If each side is off by u / 2, logits differ by u at most. Then log-probabilities differ by 2 u at most, by 0.5 u in
# the mean, and KL is at most u^2 / 2 (Hoeffding's lemma). Each place has its own u, by the largest logit of its
# likeliest tokens. Allowed are this most of the median place's largest difference and of the mean KL, and twice that
# mean of the text's own tokens, as layers round too. Measured with SmolLM2 in bf16, as shares of what is allowed: a
# server's states 0.27, the same model by other kernels 0.5; wrong teachers 1.2 (KL 0.01) to 190. What passed had a KL
# of 0.006 at most.
MEDIAN, OWN, KL = 2.0, 1.0, 0.5


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
        log_prob = wide(logits).log_softmax(-1)
        top = log_prob.topk(min(TOP, log_prob.shape[-1]))
        own = log_prob.gather(1, following.clamp_min(0)[:, None])[:, 0]
        return Reference(top.indices, top.values.double(), following, own.double())

    def at(self, places: Tensor) -> Reference:
        """Return it at some of the T tokens."""
        return Reference(*(getattr(self, own.name)[places] for own in fields(self)))


@dataclass(frozen=True)
class Distance:
    """Distance of a teacher from the target in log-probabilities (nat).

    largest, median: of the places' largest differences. own: mean difference of the text's own tokens. kl: mean
    divergence KL(target || teacher). rounding: share of what rounding explains, above 1 for a wrong teacher.
    """

    largest: float
    median: float
    own: float
    # Manifests of earlier heads have neither.
    kl: float = math.nan
    rounding: float = math.nan

    def __str__(self) -> str:
        return f"{self.largest:.2g} nat at most, {self.median:.2g} in the median, {self.own:.2g} at the text's tokens"


@dataclass(frozen=True)
class Served:
    """Comparison of the model that a server runs with the target's files, and with answers that the target gave.

    tokens: compared with the files; 0 if they were not, and `why`. kl, most: mean KL(server || files), nat, and the
    largest that was allowed. changed: share of
    other first choices. layers, off: those whose states were compared, and their largest distance as a share.
    answer_tokens: of the answers; 0 if the data has none of the target's. perplexity: to the server. first: share of
    greedy tokens that are its first choices. excess: of sampled ones, how much less likely (nat) they are than its own.
    """

    tokens: int = 0
    kl: float | None = None
    most: float | None = None
    changed: float | None = None
    layers: list[int] = field(default_factory=list)
    off: float | None = None
    why: str | None = None
    answer_tokens: int = 0
    perplexity: float | None = None
    first: float | None = None
    excess: float | None = None

    def __str__(self) -> str:
        lines = [f"server not compared with the files: {self.why}"]
        if self.kl is not None:
            changed = f"{self.changed:.1%} other choices"
            lines = [f"server: KL {self.kl:.2g} of {self.most:.2g} nat to the files, {changed}, {self.tokens} tokens"]
        if self.off is not None:
            numbers = ", ".join(map(str, self.layers))
            lines.append(f"server: states of layers {numbers} are those of the files, off by {self.off:.1%}")
        if not self.answer_tokens:
            lines.append("server not compared with answers of the target's own: none were within 512 tokens")
        elif self.first is not None:
            lines.append(f"server: first choices are {self.first:.1%} of {self.answer_tokens} tokens of greedy answers")
        else:
            own = f"{self.excess:+.2g} nat to its own samples"
            lines.append(f"server: perplexity {self.perplexity:.3g} of {self.answer_tokens} sampled tokens, {own}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Proof:
    """Comparison by which a teacher was proved. source: of its states. tokens: how many were compared. served: of a
    server, that it runs the target."""

    source: str
    readout: Readout
    tokens: int
    distance: Distance
    served: Served | None = None

    def as_json(self) -> dict[str, object]:
        """Return it as recorded in manifests and model cards."""
        served = {} if self.served is None else {"served": asdict(self.served)}
        return {"source": self.source, "tokens": self.tokens, **asdict(self.readout), **asdict(self.distance), **served}

    @staticmethod
    def from_json(proof: Mapping[str, Any]) -> Proof:
        """Return the proof that `as_json` recorded."""
        readout = Readout(**{own.name: proof[own.name] for own in fields(Readout)})
        distance = Distance(**{own.name: proof[own.name] for own in fields(Distance) if own.name in proof})
        served = Served(**proof["served"]) if proof.get("served") else None
        return Proof(proof["source"], readout, proof["tokens"], distance, served)

    def __str__(self) -> str:
        proved = f"teacher proved on {self.tokens} tokens of {self.source}: {self.readout}; {self.distance}"
        return proved if self.served is None else f"{proved}\n{self.served}"


def compare(logits: Tensor, reference: Reference, dtype: torch.dtype) -> Distance:
    """Compare a teacher's logits [T, V] with the target's log-probabilities. dtype: of target and states, the narrower
    one."""
    tokens, following = reference.tokens, reference.following
    log_prob = wide(logits).log_softmax(-1)  # [T, V]
    ours = log_prob.gather(1, tokens).double()
    places = (ours - reference.log_prob).abs().amax(-1)  # [T]
    own = (log_prob.gather(1, following.clamp_min(0)[:, None])[:, 0] - reference.own).abs()
    own = torch.where(following >= 0, own, 0.0)
    p, q = with_rest(reference.log_prob), with_rest(ours)
    kl = (p.exp() * (p - q)).sum(-1)
    if dtype in (torch.float32, torch.float64):
        rounding = places.max() / LARGEST
    else:
        largest = logits.gather(1, tokens).abs().amax(-1).double()
        unit = torch.finfo(dtype).eps * largest.log2().floor().exp2()
        shares = (places / unit).median() / MEDIAN, (own / unit).mean() / OWN, (kl / unit**2).mean() / KL
        rounding = torch.stack(shares).max()
    numbers = places.max(), places.median(), own.sum() / (following >= 0).sum().clamp_min(1), kl.mean(), rounding
    return Distance(*(number.item() for number in numbers))


def with_rest(log_prob: Tensor) -> Tensor:
    """Append to log-probabilities [T, K] of some tokens that of all others together, [T, K+1]."""
    rest = 1 - log_prob.exp().sum(-1, keepdim=True)
    return torch.cat([log_prob, rest.clamp_min(1e-9).log()], -1)


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
    found = [(compare(logits(readout), reference, dtype), readout) for readout in readouts]
    sums = [math.inf if math.isnan(distance.own) else distance.own + distance.median for distance, _ in found]
    # Where a softcap hardly matters, rounding would choose: of those that fit about equally, the likeliest is taken.
    near = 2 * min(sums) + LARGEST
    fitting = (pair for pair, total in zip(found, sums, strict=True) if total <= near and pair[0].rounding <= 1)
    distance, readout = next(fitting, found[sums.index(min(sums))])
    if not distance.rounding <= 1:
        raise InputError(
            "teacher",
            f"{distance} from the target's own distributions, at best ({source}: {readout})",
            f"what rounding in {str(dtype).removeprefix('torch.')} explains, {distance.rounding:.2g} times less",
            "These states would teach another model: check that states and logits are of the same target and layer.",
        )
    return Proof(source, readout, len(reference.tokens), distance)


def prove_states(target: CausalLM, text: Tensor, states: Tensor, dtype: torch.dtype, source: str) -> Proof:
    """Prove final states [T, H] of a text [T], the last NUM_TOKENS, against the distributions that the target answers
    with.

    dtype: that they were computed or are stored in. source: where they come from.

    Raises:
        InputError: they give other ones.
    """
    following = torch.cat([text[1:], text.new_full((1,), -1)]).to(target.device)[-NUM_TOKENS:]
    reference = Reference.of_logits(target.logits(text, len(following)), following)
    with torch.no_grad():
        logits = target.lm_head(states[-NUM_TOKENS:].to(target.device, target.dtype))  # [T, V]
    dtype = max(target.dtype, dtype, key=lambda dtype: torch.finfo(dtype).eps)
    return prove(source, [target.readout], lambda _: logits, reference, dtype)


def prove_reading(
    target: CausalLM, text: Tensor, read: Callable[[list[Tensor]], Sequence[Tensor]], source: str
) -> Proof:
    """Prove the states that `read` gives of texts: the end of this one, its begin, and a shorter begin, beside which
    those are read. Returns the proof of the worst, with the tokens of all.

    read: returns states [T, H] of each of several texts [T]. source: where they come from.

    Raises:
        InputError: one of them gives other distributions.
    """
    text = text[:LONGEST]
    texts = [text, text[:NUM_TOKENS], text[: max(1, min(len(text), NUM_TOKENS) * 3 // 4)]]
    proofs = [
        prove_states(target, own, states, states.dtype, source) for own, states in zip(texts, read(texts), strict=True)
    ]
    worst = max(proofs, key=lambda proof: proof.distance.rounding)
    return replace(worst, tokens=sum(proof.tokens for proof in proofs))
