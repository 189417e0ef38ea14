"""Names of methods, their settings, and what is said about wrong ones."""

from __future__ import annotations

import dataclasses

import pytest

from draftsmith.eval.methods import (
    METHODS,
    EagleChain,
    FixedK,
    SpecDecPlusPlus,
    check_needs,
    parse_method,
    parse_methods,
)
from draftsmith.modules.types import InputError


def test_methods_and_settings_are_read_in_order():
    named = parse_methods("ar, spec:k=3,specdec++:h=0.5:min=1:max=9:calibrated=on,eagle")
    assert [item.label for item in named] == ["ar", "spec:k=3", "specdec++:h=0.5:min=1:max=9:calibrated=on", "eagle"]
    assert [item.method for item in named[1:]] == [FixedK(3), SpecDecPlusPlus(0.5, 1, 9, True), EagleChain()]


def test_specdecpp_defaults_are_the_papers():
    assert parse_method("specdec++") == SpecDecPlusPlus(h=0.7, min=2, max=20, calibrated=False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ["methods", "ar"]),
        ("medusa", ["'medusa'", "ar, spec, specdec++, eagle, hf, hf-assisted"]),
        ("spec:depth=3", ["'depth'", "expected k."]),
        ("ar:k=3", ["'k'", "no settings"]),
        ("spec:k=three", ["spec, k", "'three'", "an integer"]),
        ("spec:k=0", ["k: found 0", "1 or more"]),
        ("spec:k", ["'k'", "k=VALUE"]),
        ("spec:k=1:k=2", ["k twice"]),
        ("spec,spec", ["spec twice"]),
        ("specdec++:h=1.5", ["h: found 1.5"]),
        ("specdec++:min=5:max=4", ["max: found 4", "5 or more"]),
        ("specdec++:calibrated=maybe", ["'maybe'", "on or off"]),
    ],
)
def test_a_wrong_method_is_told_with_what_is_allowed(text, expected):
    with pytest.raises(InputError) as raised:
        parse_methods(text)
    assert all(part in str(raised.value) for part in expected), str(raised.value)


@pytest.mark.parametrize("label", ["spec", "specdec++", "eagle", "hf-assisted"])
def test_a_missing_model_is_told_with_its_flag(label):
    (named,) = parse_methods(label)
    given = {"target": "t", "draft": "d", "eagle": "e", "acceptance": "a"}
    check_needs(named, given)
    for flag in named.method.needs:
        with pytest.raises(InputError, match=f"Pass --{flag} "):
            check_needs(named, {**given, flag: None})


@pytest.mark.parametrize("name", METHODS)
def test_a_registered_method_is_a_frozen_dataclass_with_defaults(name):
    method = parse_method(name)
    assert dataclasses.is_dataclass(method) and method.__dataclass_params__.frozen
    assert set(method.needs) <= {"draft", "eagle", "acceptance"}
