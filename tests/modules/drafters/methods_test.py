"""Names of methods, their settings, and what is said about wrong ones."""

from __future__ import annotations

import pytest

from draftsmith.modules.decoding.tree import MAX_NODES
from draftsmith.modules.drafters import head_class, learned
from draftsmith.modules.drafters.method_names import check_needs, known_methods, parse_method, parse_methods
from draftsmith.modules.drafters.methods import CostMethod, FixedLengthMethod, OnlineMethod, SpecDecPlusPlusMethod
from draftsmith.modules.types import InputError


def test_methods_and_settings_are_read_in_order():
    named = parse_methods("ar, spec:k=3,specdec++:h=0.5:min=1:max=9:calibrated=on,eagle")
    assert [item.label for item in named] == ["ar", "spec:k=3", "specdec++:h=0.5:min=1:max=9:calibrated=on", "eagle"]
    assert [item.method for item in named[1:]] == [
        FixedLengthMethod(3),
        SpecDecPlusPlusMethod(1, 9, 0.5, True),
        FixedLengthMethod(drafter="eagle"),
    ]


@pytest.mark.parametrize("kind", [kind for kind in learned() if kind != "draft"])
def test_the_methods_of_a_kind_are_its_chain_and_its_trees(kind):
    """`spec:drafter=KIND` is the same chain."""
    names = {name.removeprefix(kind) for name, method in known_methods().items() if method.needs == (kind,)}
    drafts = head_class(kind).drafts
    assert names == {"", *(f"-{draft}" for draft in drafts if draft != "chain")}
    assert parse_method(f"spec:drafter={kind}") == parse_method(kind)
    lengths = {"dflash": 7, "dflash2": 7, "dspark": 7, "medusa": MAX_NODES, "hydra": MAX_NODES}
    assert parse_method(kind).length == lengths.get(kind, 5)
    assert parse_method(f"spec:k=3:drafter={kind}") == parse_method(f"{kind}:k=3") == FixedLengthMethod(3, drafter=kind)


def test_a_cost_is_a_number_or_measured():
    assert parse_method("online") == OnlineMethod(c="auto", min=1, max=16, drafter="draft")
    assert parse_method("cost:c=0.25:drafter=eagle") == CostMethod(c=0.25, drafter="eagle")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ["methods", "ar"]),
        ("nosuch", ["'nosuch'", ", ".join(known_methods())]),
        ("spec:depth=3", ["'depth'", "expected drafter, k."]),
        ("ar:k=3", ["'k'", "no settings"]),
        ("spec:k=three", ["spec, k", "'three'", "an integer"]),
        ("spec:k=0", ["k: found 0", "1 or more"]),
        ("spec:k=０３", ["spec, k", "'０３'", "an integer"]),
        ("cost:c=inf", ["cost, c", "'inf'", "a number or auto"]),
        ("eagle3@:k=2", ["'eagle3@:k=2'", "name of a drafter behind eagle3@"]),
        ("eagle3-static:tree=", ["eagle3-static, tree", "''", "a word"]),
        ("confidence:t=nan", ["confidence, t", "'nan'", "a number"]),
        ("confidence:drafter=lookup", ["'lookup'", "one of draft, dflash"]),
        ("spec:k=1:k=2", ["k twice"]),
        ("spec,spec", ["spec twice"]),
        ("specdec++:h=0", ["h: found 0.0", "in (0, 1)"]),
        ("eagle-tree:nodes=200", ["nodes: found 200", "1 to 128"]),
        ("specdec++:calibrated=maybe", ["'maybe'", "on or off"]),
        ("specdec++:min=5:max=4", ["max: found 4", "5 or more"]),
        ("medusa:tree=medusa-63", ["medusa: found setting 'tree', expected k", "medusa-static has it."]),
        ("eagle3:drafter=eagle", ["setting 'drafter'", "expected k."]),
    ],
)
def test_a_wrong_method_is_told_with_what_is_allowed(text, expected):
    with pytest.raises(InputError) as raised:
        parse_methods(text)
    assert all(part in str(raised.value) for part in expected), str(raised.value)


@pytest.mark.parametrize("label", [name for name in known_methods() if parse_method(name).needs])
def test_a_missing_model_is_told_with_its_flag(label):
    (named,) = parse_methods(label)
    given = {name: name for name in ("target", "draft", "mid", "acceptance", *learned())}
    check_needs(named, given)
    for need in named.method.needs:
        expected = {"draft": "--head DIR: a draft model"}.get(need, f"--{need} ")
        expected = f"--head HEAD: a head of kind {need}" if need in learned() and need != "draft" else expected
        with pytest.raises(InputError, match=f"Pass {expected}"):
            check_needs(named, {name: path for name, path in given.items() if name != need})
