"""Features in fp8: what rounding in float64, done without torch's fp8, gives; and half the bytes."""

from __future__ import annotations

import math

import pytest
import torch
from worlds import DEVICES

from draftsmith.data.store.feature_codec import SCALE, broken_position, decode, encode
from draftsmith.data.store.manifest import Manifest
from draftsmith.modules.finite import first_broken


def like_hidden_states(tokens: int = 64, size: int = 96) -> torch.Tensor:
    """Tokens of scales from 1e-4 to 1e3, each with a few values far above the others."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(tokens, size, generator=generator, dtype=torch.float64)
    values[:, :3] *= 40
    return (values * torch.logspace(-4, 3, tokens, dtype=torch.float64)[:, None]).float()


def nearest_e4m3(value: float) -> float:
    """The nearest number of 1 sign, 4 exponent and 3 mantissa bits (bias 7, subnormals), ties to even."""
    if value == 0:
        return 0.0
    exponent = max(math.frexp(value)[1] - 1, -6)
    step = 2.0 ** (exponent - 3)
    return round(value / step) * step  # Python rounds ties to even


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_every_device_codes_alike(dtype, device):
    """To the bit, but for which NaN it is: what one wrote another reads."""
    features = like_hidden_states()
    features[-1, 5], features[4] = math.nan, 0
    wanted, found = encode(features, dtype), encode(features.to(device), dtype)
    for name, stored in wanted.items():
        assert torch.equal(found[name].cpu()[:-1].view(torch.uint8), stored[:-1].view(torch.uint8))
    decoded = decode({name: stored.to(device) for name, stored in wanted.items()}).cpu()
    assert decoded[:-1].equal(decode(wanted)[:-1]) and decoded[-1].isnan().equal(decode(wanted)[-1].isnan())


def test_every_value_is_the_nearest_one_that_fp8_has_at_the_tokens_scale():
    features = like_hidden_states()
    decoded = decode(encode(features, "fp8"))
    assert decoded.dtype == torch.bfloat16
    for row, got in zip(features.double(), decoded.double(), strict=True):
        scale = 2.0 ** math.ceil(math.log2(float(row.abs().max()) / 448))
        assert got.tolist() == [nearest_e4m3(value / scale) * scale for value in row.tolist()]


@pytest.mark.parametrize("largest", [448.0, 448.1, 1e-30, 3e38])
def test_the_largest_value_fills_the_range_without_leaving_it(largest):
    row = torch.tensor([[largest, -largest / 3]])
    ratio = float(row[0, 0].double() / encode(row, "fp8")[SCALE][0].double())
    assert 224 < ratio <= 448
    assert decode(encode(row, "fp8")).isfinite().all()


def test_an_artifact_in_fp8_is_that_of_bf16_rounded_with_half_the_bytes(chain, remake, capsys):
    from draftsmith.data.inspect import InspectConfig
    from draftsmith.data.inspect import run as inspect
    from draftsmith.data.store.datasets import open_dataset

    plain, directory = open_dataset(chain.directory("features")), remake("features", feature_dtype="fp8")
    coded = open_dataset(directory)
    for before, after in zip(plain, coded, strict=True):
        assert after["features"].dtype == torch.bfloat16 and after["features"].shape == before["features"].shape
        # 2^-4 of fp8 and 2^-8 of bf16; small values as their token's scale has it.
        torch.testing.assert_close(after["features"], before["features"], rtol=0.07, atol=0.01)
        assert not torch.equal(after["features"], before["features"])
    described = {f.name: (f.dtype, f.shape) for f in Manifest.read(directory).fields}
    assert described["features"] == ("float8_e4m3fn", ("T", "H"))
    assert described["features.scale"] == ("bfloat16", ("T",))
    tokens = Manifest.read(directory).counts["tokens"]
    written = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    assert tokens * 34 < written < tokens * 34 + 11 * 400  # 32 values and a scale; and headers for each row
    capsys.readouterr()
    inspect(InspectConfig(directory))
    assert "all finite" in capsys.readouterr().out


def test_a_row_that_is_not_finite_is_seen_as_it_is_stored():
    """As decoding it would show, which is not done for it: also where rounding up passed the largest number."""
    features = like_hidden_states(4, 32)
    features[1, 3], features[3, 7] = math.nan, -math.inf
    huge = torch.full((3, 32), 3.38e38).bfloat16()
    for rows in (features, features[:1], features[2:], features[2:3], huge, huge / 4):
        for dtype in ("bf16", "fp8"):
            stored = encode(rows, dtype)
            assert broken_position(stored) == first_broken(decode(stored))
    assert broken_position(encode(features, "fp8")) == 1 and broken_position(encode(huge, "fp8")) == 0
