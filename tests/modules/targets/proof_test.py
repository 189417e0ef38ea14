"""Wrong teachers of a real target are refused, right ones pass in every type that states are stored in."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from draftsmith.data.store.feature_codec import decode, encode
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.targets.proof import Reference, compare, prove, prove_states
from draftsmith.modules.targets.readout import Readout
from draftsmith.modules.types import InputError

TEXT = torch.arange(40, 168)


@pytest.fixture(scope="module")
def target():
    return load_lm("embedded:target")


@pytest.mark.parametrize("stored", ["bf16", "fp8"])
def test_stored_states_of_the_target_pass(target, stored):
    encoded = encode(target.features(TEXT[None])[0], stored)
    proof = prove_states(target, TEXT, decode(encoded), encoded[""].dtype, "stored features")
    assert proof.distance.largest > 0 and proof.tokens == len(TEXT)
    assert proof.as_json()["norm"] == "none" and "128 tokens of stored features" in str(proof)


def test_wrong_teachers_are_refused(target):
    right = target.features(TEXT[None], aux_layers=(11, 12))[0]
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
        for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
            with pytest.raises(InputError, match=r"teacher: found .* nat .*, expected") as error:
                prove_states(target, TEXT, teacher, dtype, name)
            assert "\n" not in str(error.value)


def test_float32_has_stricter_bars_than_bf16():
    """Whatever those are: what is just right in bf16 is wrong in float32."""
    logits = torch.randn(9, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    noise = torch.randn(9, 50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    reference = Reference.of_logits(logits, torch.arange(9))

    def passes(size: float, dtype: torch.dtype) -> bool:
        try:
            prove("noise", [Readout()], lambda _: logits + size * noise, reference, dtype)
        except InputError:
            return False
        return True

    sizes = [2.0**-power for power in range(30)]
    coarse, fine = (next(size for size in sizes if passes(size, dtype)) for dtype in (torch.bfloat16, torch.float32))
    assert 1 > coarse >= 4 * fine and not passes(coarse, torch.float32)


def test_of_readouts_that_fit_alike_the_likeliest_is_taken():
    """Rounding would choose: the first one is off by less than any bar, the second by nothing."""
    logits = torch.randn(9, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    likely, other = Readout(softcap=30.0), Readout()
    off = {likely: logits + 1e-6 * logits.sin(), other: logits}
    proof = prove(
        "rounding", [likely, other], off.__getitem__, Reference.of_logits(logits, torch.arange(9)), logits.dtype
    )
    assert proof.readout == likely and proof.distance.largest > 0


def test_the_distance_is_that_of_whole_distributions_at_the_likeliest_tokens():
    logits, other = torch.randn(2, 9, 50, dtype=torch.float64)
    following = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, -1])
    distance = compare(other, Reference.of_logits(logits, following))
    difference = (logits.log_softmax(-1) - other.log_softmax(-1)).abs()
    likeliest = logits.topk(20).indices
    places = torch.stack([difference[t, likeliest[t]].max() for t in range(9)])
    own = torch.stack([difference[t, following[t]] for t in range(8)]).mean()
    expected = (places.max(), places.median(), own)
    for found, wanted in zip(dataclasses.astuple(distance), expected, strict=True):
        assert found == pytest.approx(float(wanted), rel=1e-12)
