"""Every field of every head's config refuses what is of another type or out of range, in one line."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import pytest

from draftsmith.modules.acceptance.head import AcceptanceHeadConfig
from draftsmith.modules.drafters.block.net import BlockConfig
from draftsmith.modules.drafters.eagle import EagleConfig
from draftsmith.modules.drafters.eagle3 import Eagle3Config
from draftsmith.modules.drafters.medusa import MedusaConfig
from draftsmith.modules.llama_config import LlamaConfig, RopeScaling
from draftsmith.modules.types import InputError

LLAMA = LlamaConfig(60, 8, 16, 1, 2, 1, 4, 64, sliding_window=8)
PLAIN = dataclasses.replace(LLAMA, sliding_window=None)
GOOD = [
    RopeScaling("yarn", attention_factor=1.0, mscale=1.0, mscale_all_dim=1.0),
    LLAMA,
    EagleConfig(PLAIN),
    Eagle3Config(PLAIN, (0, 1), 60),
    BlockConfig(LLAMA, (0, 1), 4, 3, draft_vocab_size=40),
    MedusaConfig(8, 60, 64),
    AcceptanceHeadConfig(8),
]
NUMBERS = ["1", [1], True, -1, 10**9, 10**18, 2**70, math.nan, math.inf, -math.inf]
# Of values like these: others that no head has.
WRONG: dict[type, list[Any]] = {
    bool: [0, 1, "yes", None],
    int: [*NUMBERS, 1.0, None],
    float: [value for value in NUMBERS if value not in (10**9, -1)] + [1e18, -1e18, None],
    str: [3, None, ["default"], "nothing of the kind"],
    tuple: ["abc", 3, (True,), (-1,), (1.5,), ("nothing",), (2**70,), (0.5, math.nan), (1, 1, 1)],
}


def cases(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield every field with every value that it must refuse."""
    for spec in dataclasses.fields(config):
        for wrong in WRONG.get(type(getattr(config, spec.name)), [3, None, {}]):
            optional = wrong is None and "None" in str(spec.type)
            free = spec.name == "kind" and isinstance(wrong, str)  # other systems' kinds: heads refuse them
            if not optional and not free:
                yield spec.name, wrong


@pytest.mark.parametrize("config", GOOD, ids=lambda config: type(config).__name__)
def test_a_field_refuses_what_it_cannot_be(config):
    for name, wrong in cases(config):
        with pytest.raises(InputError, match=name) as error:
            dataclasses.replace(config, **{name: wrong})
        assert "\n" not in str(error.value) and len(str(error.value)) < 250


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: dataclasses.replace(LLAMA, rope_theta=0), "rope_theta: found 0, expected a finite number from 1"),
        (lambda: dataclasses.replace(LLAMA, head_dim=3), "even"),
        (lambda: EagleConfig(dataclasses.replace(LLAMA, rope_scaling=RopeScaling("longrope"))), "longrope"),
        (lambda: EagleConfig(dataclasses.replace(PLAIN, num_layers=0)), "num_layers: found 0"),
        (lambda: Eagle3Config(dataclasses.replace(PLAIN, num_layers=0), (0,), 60), "num_layers: found 0"),
        (lambda: Eagle3Config(PLAIN, (1, 0), 60), "ascending"),
        (lambda: Eagle3Config(PLAIN, (1, 1), 60), "each once"),
        (lambda: Eagle3Config(PLAIN, (), 60), "some layers"),
        # Decoding would look through the window, and training does not.
        (lambda: EagleConfig(LLAMA), "sliding_window: found 8, expected none"),
        (lambda: dataclasses.replace(LLAMA, rms_eps=0.0), "rms_eps: found 0.0"),
        (lambda: dataclasses.replace(LLAMA, max_position=1), "max_position: found 1, expected a whole number from 2"),
        (lambda: MedusaConfig(8, 60, 1), "max_position: found 1, expected a whole number from 2"),
        (lambda: dataclasses.replace(LLAMA, num_heads=3, num_kv_heads=2), "num_key_value_heads: found 2"),
        (lambda: Eagle3Config(PLAIN, (0,), 61), "draft_vocab_size: found 61, expected a whole number from 1 to 60"),
    ],
)
def test_fields_fit_each_other(make, says):
    with pytest.raises(InputError, match=says):
        make()
