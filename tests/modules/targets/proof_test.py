"""Wrong teachers of a real target are refused, right ones pass in every type that states are computed in."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from draftsmith.data.store.feature_codec import decode, encode
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.targets.proof import Reference, compare, prove, prove_reading, prove_states
from draftsmith.modules.targets.readout import Readout
from draftsmith.modules.types import InputError

TEXT = torch.arange(40, 168)


@pytest.fixture(scope="module")
def target():
    return load_lm("embedded:target")


def test_stored_states_of_the_target_pass(target):
    encoded = encode(target.features(TEXT[None])[0], "bf16")
    proof = prove_states(target, TEXT, decode(encoded), encoded[""].dtype, "stored features")
    assert proof.distance.largest > 0 and proof.tokens == len(TEXT)
    assert proof.as_json()["norm"] == "none" and "128 tokens of stored features" in str(proof)


def test_wrong_teachers_are_refused(target):
    right = target.features(TEXT[None], aux_layers=(11, 13))[0]
    width = target.info.hidden_size
    before, states = right[:, :width], right[:, width:]
    prove_states(target, TEXT, states, torch.float32, "the target")
    gain = target.model.norm.weight
    wrong = {
        "shifted": states.roll(1, 0),
        "layer": before,
        "norm twice": target.norm(states),
        "gain": states / gain * (1 + gain),
        "NaN": states.clone().index_fill_(0, torch.tensor([77]), torch.nan),
    }
    for name, teacher in wrong.items():
        for dtype in (torch.float32, torch.bfloat16):
            with pytest.raises(InputError, match=r"teacher: found .* nat .*, expected") as error:
                prove_states(target, TEXT, teacher, dtype, name)
            assert "\n" not in str(error.value)


def test_of_readouts_that_fit_alike_the_likeliest_is_taken():
    """Rounding would choose: the first one is off by less than any bar, the second by nothing."""
    logits = torch.randn(9, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    likely, other = Readout(softcap=30.0), Readout()
    off = {likely: logits + 1e-6 * logits.sin(), other: logits}
    proof = prove(
        "rounding", [likely, other], off.__getitem__, Reference.of_logits(logits, torch.arange(9)), logits.dtype
    )
    assert proof.readout == likely and proof.distance.largest > 0


def test_a_server_that_rounds_logits_passes_whatever_their_size_and_two_tokens_swapped_do_not(target):
    """vLLM in bf16 rounds its states and its logits, a reader computes in float32. Logits are as large as SmolLM2's."""
    weight = target.lm_head_weight().bfloat16()
    states = (4 * target.features(TEXT[None])[0]).bfloat16()
    own, read = states @ weight.T, states.float() @ weight.float().T
    reference = Reference.of_logits(own, torch.cat([TEXT[1:], torch.tensor([-1])]))
    assert own.max() > 32

    def proof(logits):
        return prove("vLLM's states", [Readout()], lambda _: logits, reference, torch.bfloat16)

    # More than a bar of 0.02, which was that of smaller logits.
    assert proof(read).distance.own > 0.02
    one, other = own.softmax(-1).mean(0).topk(2).indices.tolist()
    swapped = read.clone()
    swapped[:, [one, other]] = read[:, [other, one]]
    with pytest.raises(InputError, match="what rounding in bfloat16 explains"):
        proof(swapped)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_begins_behind_128_tokens_or_beside_a_longer_text_is_seen(dtype):
    lm = load_lm("embedded:target", dtype)
    text = torch.arange(300) * 7 % 200 + 40

    def alone(own):
        return lm.features(own[None])[0]

    def window(texts):
        return [torch.cat([alone(own[:128]), alone(own[64:])[64:]]) if len(own) > 128 else alone(own) for own in texts]

    def left_padded(texts):
        longest = [*sorted(map(len, texts))][1]
        pads = [text.new_zeros(max(0, longest - len(own))) for own in texts]
        return [alone(torch.cat([pad, own]))[len(pad) :] for pad, own in zip(pads, texts, strict=True)]

    right = prove_reading(lm, text, lambda texts: [alone(own) for own in texts], "the target")
    assert right.tokens == 128 + 128 + 96
    for wrong in (window, left_padded):
        with pytest.raises(InputError, match="teacher: found"):
            prove_reading(lm, text, wrong, "the target")


def test_the_distance_is_that_of_whole_distributions_at_the_likeliest_tokens():
    logits, other = torch.randn(2, 9, 50, dtype=torch.float64)
    following = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, -1])
    distance = compare(other, Reference.of_logits(logits, following), torch.float32)
    difference = (logits.log_softmax(-1) - other.log_softmax(-1)).abs()
    likeliest = logits.topk(20).indices
    places = torch.stack([difference[t, likeliest[t]].max() for t in range(9)])
    own = torch.stack([difference[t, following[t]] for t in range(8)]).mean()
    # Of the likeliest tokens, and all others together.
    p, q = (
        torch.cat([probs.gather(1, likeliest), 1 - probs.gather(1, likeliest).sum(1, keepdim=True)], 1)
        for probs in (logits.softmax(-1), other.softmax(-1))
    )
    expected = (places.max(), places.median(), own, (p * (p / q).log()).sum(1).mean(), places.max() / 1e-3)
    for found, wanted in zip(dataclasses.astuple(distance), expected, strict=True):
        assert found == pytest.approx(float(wanted), rel=1e-12)


def test_logits_are_scaled_before_they_are_bounded():
    """softcap * tanh(scale * product / softcap); no published family has both."""
    hidden, weight = torch.tensor([[1.0, -3.0]]), torch.tensor([[2.0, 0.5], [1.0, 4.0]])
    products = [2 - 1.5, 1 - 12.0]
    found = Readout("none", scale=0.25, softcap=2.0).logits(hidden, weight)
    assert found[0].tolist() == pytest.approx([2 * math.tanh(0.25 * product / 2) for product in products], rel=1e-6)
