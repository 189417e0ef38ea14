"""Proofs of a server's states: that they give its own distributions (`prove_teacher`), and that these are the target's.

A server may run another model: a fine-tune, other settings, or a lower precision. So it is compared with the target's
files, one layer at a time, and with answers that it gave before (`prove_served`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.data.console import log_note
from draftsmith.data.engines.vllm_states import ROUNDING, LogProbs, ServedStates
from draftsmith.data.store.feature_codec import decode
from draftsmith.modules.pretrained.checkpoint import Checkpoint, checkpoint_of
from draftsmith.modules.pretrained.layerwise import read_layerwise
from draftsmith.modules.targets.outer import OuterLM
from draftsmith.modules.targets.proof import NUM_TOKENS, TOP, Proof, Reference, Served, prove, with_rest
from draftsmith.modules.targets.readout import Norm, Readout, behind_norm, candidates
from draftsmith.modules.types import InputError

# Longest text of a proof: vLLM holds the log-probabilities of a whole text at once.
LONGEST_PROVED = 512
# Rows of the output embedding that are in float32 at a time.
VOCAB_PART = 2**14
# Rows whose answers are asked again.
ANSWERED_ROWS = 8
# Two likeliest tokens as near as this (nat) change places by the rounding of bf16 alone.
TIE = 0.25
# Largest KL(server || files) in nat and share of other first choices, and least share of greedy answers that are first
# choices. Measured with SmolLM2 in bf16: 0.001, 0 and 1.
KL, CHANGED = 0.05, 0.05
# Largest distance of a layer's states, as a share of their length. bf16 is off by 0.01 to 0.03.
FAR = 0.1
# Servers of quantized weights round layers' inputs too: SmolLM2 then has a KL of up to 0.043 nat, of FP4 0.23.
QUANTIZED, QUANTIZED_FP4 = 4, 10


@dataclass(frozen=True)
class Recorded:
    """Rows of the data, with masks of the tokens that are answers.

    sampling: how the target sampled these; None if other text stands there.
    """

    rows: Sequence[Sequence[int]]
    masks: Sequence[Sequence[bool]]
    sampling: Mapping[str, float] | None


def check_log_probs(log_probs: LogProbs, vocab_size: int) -> None:
    """Raise InputError if a server gives fewer log-probabilities than TOP, those of other tokens than the target's, or
    numbers that are none, such as logits."""
    tokens = set[int]().union(*log_probs)
    if not 0 <= min(tokens) <= max(tokens) < vocab_size:
        found = f"log-probabilities of tokens {min(tokens)} to {max(tokens)}"
        raise InputError("server", found, f"0 to {vocab_size - 1} at most", "Serve the model of --target.")
    if (least := min(map(len, log_probs))) < min(TOP, vocab_size):
        found, remedy = f"{least} log-probabilities of a token", f"Serve with --max-logprobs {TOP} or more."
        raise InputError("server", found, f"{TOP}, as asked for", remedy)
    for number, given in enumerate(log_probs, 1):
        # No other token is likelier than the most probable ones, of which the text's own need not be one.
        own = sorted(map(math.exp, given.values()), reverse=True)
        most = sum(own) + (vocab_size - len(own)) * own[-2:][0]
        if sum(own) > 1 + ROUNDING or most < 1 - ROUNDING:
            found = f"{len(own)} of {vocab_size} probabilities at token {number} with a sum of {sum(own):.3g}"
            remedy = "Serve with --logprobs-mode raw_logprobs, vLLM's default."
            raise InputError("server", found, "log-probabilities, of 1 in all", remedy)


def proof_row(rows: Sequence[Sequence[int]]) -> list[int]:
    """Return the text of a proof: the first tokens of the data, as many as the longest row has."""
    return list(itertools.chain(*rows))[: min(LONGEST_PROVED, max(map(len, rows)))]


def prove_teacher(source: ServedStates, outer: OuterLM, rows: Sequence[Sequence[int]]) -> Proof:
    """Find how the target's logits follow from vLLM's last state, and have it store the state behind that norm.

    One request brings the state before the norm and the log-probabilities that vLLM itself gives; a second one proves
    the states as they are stored from then on, but for rounding to fp8. outer: the target's own weights; takes the
    readout. rows: of the data; up to LONGEST_PROVED of their tokens are read, and the first and last NUM_TOKENS
    compared.

    Raises:
        InputError: no reading of the state gives vLLM's distributions.
    """
    row = proof_row(rows)
    places = torch.arange(len(row) - 1)
    places = places[(places < NUM_TOKENS) | (places >= len(places) - NUM_TOKENS)]
    config, weights = checkpoint_of(outer).text, outer.weights

    def proved(readouts: Iterable[Readout]) -> Proof:
        stored, log_probs = source.read_with_log_probs(row)
        check_log_probs(log_probs, outer.info.vocab_size)
        states = decode(stored)[places, -outer.info.hidden_size :].to(outer.device)  # [N, H]

        @functools.cache
        def products(norm: Norm, eps: float) -> Tensor:
            normed = Readout(norm, eps).normed(states, weights.norm, weights.norm_bias)
            parts = [F.linear(normed, part.float()) for part in weights.output.split(VOCAB_PART)]
            return torch.cat(parts, -1).add_(0 if weights.bias is None else weights.bias).cpu()  # [N, V]

        def logits(readout: Readout) -> Tensor:
            return readout.bounded(products(readout.norm, readout.eps))

        # The narrowest that the states went through.
        dtype = max(outer.dtype, stored[""].dtype, key=lambda dtype: torch.finfo(dtype).eps)
        return prove("vLLM's states", readouts, logits, reference_of(row, log_probs).at(places), dtype)

    found = proved(candidates(config)).readout
    source.readout, outer.readout = found, behind_norm(found)
    proof = replace(proved([outer.readout]), readout=found)
    source.teacher = proof.as_json()
    return proof


def reference_of(row: Sequence[int], log_probs: LogProbs) -> Reference:
    """Return log-probabilities of a row [T] as the proof reads them, those of the likeliest tokens first."""
    ordered = [sorted(place.items(), key=lambda item: -item[1]) for place in log_probs]
    top = min(map(len, ordered))
    tokens, values = (torch.tensor([[item[i] for item in place[:top]] for place in ordered]) for i in (0, 1))
    own = torch.tensor([place[token] for place, token in zip(log_probs, row[1:], strict=True)])
    return Reference(tokens, values.double(), torch.tensor(row[1:]), own.double())


def prove_served(
    source: ServedStates,
    outer: OuterLM,
    recorded: Recorded,
    layers: Sequence[int],
    dtype: str | None = None,
) -> Proof:
    """Prove a server's teacher (`prove_teacher`), and that the server runs the target; record both in the source.

    layers: as of `connector_options`. dtype: in which the states are to be stored; None: in any.

    Raises:
        InputError: another model, states of other layers, or stored in another type.
    """
    target = checkpoint_of(outer)
    proof = prove_teacher(source, outer, recorded.rows)
    row = proof_row(recorded.rows)
    ((_, stored),) = source.read([row])
    kind = "fp8" if len(stored) > 1 else "bf16"
    if kind != (dtype := dtype or kind):
        remedy = "Start the server with the same --feature-dtype, or pass its type here."
        raise InputError("feature_dtype", f"states in {kind} from the server", dtype, remedy)
    states, hidden_size = decode(stored).float(), target.shape.hidden_size  # [T, L * H]
    if states.shape[-1] != len(layers) * hidden_size:
        found, expected = f"states of width {states.shape[-1]}", f"{len(layers)} layers of {hidden_size}"
        raise InputError("server", found, expected, "Start it for this target and head: draftsmith launch vllm.")
    served = compare_answers(source, recorded)
    unrounded, log_probs = source.read_with_log_probs(row)
    states, proved = (each.unflatten(-1, (len(layers), -1)) for each in (states, decode(unrounded).float()))
    if not (off := max(distances_of(states, proved))) <= FAR:
        found = f"stored states off by {off:.0%} from those beside the log-probabilities"
        raise InputError("server", found, f"the same within {FAR:.0%}", "Restart it: draftsmith launch vllm.")
    served = compare_files(target, row, states, layers, log_probs, served)
    proof = replace(proof, served=served)
    source.teacher = proof.as_json()
    return proof


def distances_of(states: Tensor, own: Tensor) -> list[float]:
    """Return how far states [T, L, H] are from others [T, L or 1, H], as shares of these: a number for each of L.

    Medians, as a few tokens have states a hundred times as large; the largest of parts, as an error may begin anywhere.
    """
    away = (states - own).norm(dim=-1) / own.norm(dim=-1).clamp_min(1e-9)  # [T, L]
    parts = away.chunk(max(1, len(away) // NUM_TOKENS))
    numbers: list[float] = torch.stack([part.median(0).values for part in parts]).amax(0).tolist()
    return numbers


def compare_files(
    target: Checkpoint, row: Sequence[int], states: Tensor, layers: Sequence[int], log_probs: LogProbs, served: Served
) -> Served:
    """Compare a server's states [T, L, H] and log-probabilities of a row [T] with those by the target's own layers, if
    these can be computed here.

    Raises:
        InputError: they differ.
    """
    distances: dict[int, list[float]] = {}

    def compare(number: int, own: Tensor) -> None:
        if own.shape != (len(row), states.shape[-1]):
            raise InputError("target", "several states a token of a layer", "one", "Compare by answers.")
        distances[number] = distances_of(states, own[:, None])

    reference, slack = reference_of(row, log_probs), 1
    if target.quantized.method:
        slack = QUANTIZED_FP4 if target.quantized.fp4 else QUANTIZED
    most = KL * slack, CHANGED * slack
    size = sum(file.stat().st_size for file in target.files) / 1e9
    log_note(f"comparing the server with the files of {target.path}, {size:.1f} GB")
    try:
        logits = read_layerwise(target, row, compare)[:-1]
        kl, changed = divergence(reference, logits)
    except InputError as error:
        return replace(served, why=str(error))
    if not (kl <= most[0] and changed <= most[1]):
        # Rounding changes some models more than others.
        with suppress(InputError):
            rounded = read_layerwise(target, row, lambda *_: None, torch.bfloat16)[:-1]
            own = divergence(Reference.of_logits(rounded, reference.following), logits)
            most = max(most[0], 2 * own[0]), max(most[1], 2 * own[1])
    if not (kl <= most[0] and changed <= most[1]):
        found = f"a model with KL {kl:.2g} nat from that of {target.path}, and {changed:.0%} other first choices"
        remedy = "Serve the weights and settings of --target, or name the model that the server runs."
        raise InputError("server", found, f"at most {most[0]:.2g} nat and {most[1]:.0%}", remedy)

    # The state behind the final norm is proved by its distributions.
    read = [(column, layer) for column, layer in enumerate(layers) if layer in distances]
    for column, layer in read:
        by_layer = {number: own[column] for number, own in distances.items()}
        nearest = min(by_layer, key=by_layer.__getitem__)
        # Of rounded inputs a neighbor may be as near.
        if by_layer[nearest] < by_layer[layer] / 2 or by_layer[layer] > FAR * slack:
            found = f"vLLM's states of layer {layer} off by {by_layer[layer]:.0%}, nearest to layer {nearest}"
            remedy = "Serve the weights of --target, and the layers of this head: draftsmith launch vllm --drafter."
            raise InputError("server", found, f"those of layer {layer}, within {FAR * slack:.0%}", remedy)
    off = max((distances[layer][column] for column, layer in read), default=None)
    return replace(
        served, tokens=len(row), kl=kl, changed=changed, most=most[0], layers=[layer for _, layer in read], off=off
    )


def divergence(reference: Reference, logits: Tensor) -> tuple[float, float]:
    """Return the mean KL(reference || logits [T, V]), nat, and the share of other first choices, but for ties."""
    log_prob = logits.log_softmax(-1)
    p, q = with_rest(reference.log_prob), with_rest(log_prob.gather(1, reference.tokens).double())
    behind = log_prob.amax(-1) - log_prob.gather(1, reference.tokens[:, :1])[:, 0]
    return (p.exp() * (p - q)).sum(-1).mean().item(), (behind > TIE).double().mean().item()


def compare_answers(source: ServedStates, recorded: Recorded) -> Served:
    """Ask a server for the log-probabilities of recorded answers, and compare them with how these were sampled.

    Each token of a greedy answer is the likeliest, but for ties. Sampled tokens have, in the mean, the log-probability
    that the server's own distributions give to a sample.

    Raises:
        InputError: another model answered.
    """
    if recorded.sampling is None:
        return Served()
    temperature = recorded.sampling["temperature"]
    found = list[tuple[float, float, float, float]]()
    for row, mask in list(zip(recorded.rows, recorded.masks, strict=True))[:ANSWERED_ROWS]:
        row = row[:LONGEST_PROVED]
        if any(mask[1 : len(row)]):
            places = zip(source.read_with_log_probs(row)[1], row[1:], mask[1:], strict=False)
            found += [surprise(place, token, temperature or 1.0) for place, token, answer in places if answer]
    if not found:
        return Served()
    behind, own, excess, variance = torch.tensor(found, dtype=torch.float64).unbind(-1)  # [N]
    served = Served(answer_tokens=len(found), perplexity=math.exp(-own.mean()))
    if temperature == 0:
        first = (behind <= TIE).double().mean().item()
        served = replace(served, first=first)
        wrong, expected = f"likeliest at {first:.0%}", f"at {1 - CHANGED:.0%} or more"
        right = first >= 1 - CHANGED
    else:
        less, most = excess.mean().item(), KL + 3 * variance.sum().sqrt().item() / len(found)
        served = replace(served, excess=less)
        wrong, expected = f"less likely by {less:.2g} nat than its own samples", f"by {most:.2g} at most"
        # Of flatter distributions than the model's the likeliest tokens say too little.
        right = less <= most or temperature > 1
    if not right:
        what = f"a model to which the recorded answers' {len(found)} tokens are {wrong}"
        raise InputError("server", what, expected, "Serve the model that gave these answers, or make them again.")
    return served


def surprise(place: Mapping[int, float], token: int, temperature: float) -> tuple[float, float, float, float]:
    """Compare a token with a place's log-probabilities: how far it lies behind the likeliest, its own, and at this
    temperature, with the tokens behind the TOP likeliest as one, by how much it is less likely than a sample, in the
    mean, and a sample's variance."""
    likeliest = sorted(place, key=place.__getitem__, reverse=True)[:TOP]
    log_prob = with_rest(torch.tensor([place[other] for other in likeliest], dtype=torch.float64)) / temperature
    log_prob = log_prob.log_softmax(-1)
    mean = (log_prob.exp() * log_prob).sum()
    variance = (log_prob.exp() * (log_prob - mean) ** 2).sum()
    own = log_prob[likeliest.index(token) if token in likeliest else -1]
    return place[likeliest[0]] - place[token], place[token], (mean - own).item(), variance.item()
