"""The check finds ways in which a directory can mean another EAGLE-1 head in the system that loads it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from head_directory import Directory
from tiny_models import tiny_llama_dir

from draftsmith.eval.check.check import RECORD, CheckConfig
from draftsmith.eval.check.check import run as check
from draftsmith.modules.drafters.eagle import EagleHead
from draftsmith.modules.pretrained.heads import load_head, save_head
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.types import InputError

FORMATS = ("eagle", "vllm", "sglang")
# An edit of an export without its record -> the line of each system; None if it computes the same.
BROKEN: dict[str, tuple[Callable[[Directory], None], dict[str, str | None]]] = {
    "stray lm_head": (
        lambda d: d.add("lm_head.weight", torch.zeros(300, 48)),
        {"vllm": "vLLM raises: it has no such parameter", "sglang": "takes the target's, which differs"},
    ),
    "missing tensor": (lambda d: d.remove("fc.weight"), {"vllm": "fc.weight is missing"}),
    "fc bias that is lost": (
        lambda d: d.add("fc.bias", torch.full((48,), 0.01)),
        {"eagle": "drops it and says nothing", "vllm": "drops it and says nothing", "sglang": None},
    ),
    "bias read as attention bias": (lambda d: d.set(bias=True), {"eagle": "fc bias", "vllm": "qkv bias"}),
    "another family": (
        lambda d: d.set(architectures=["Qwen3ForCausalLM"]),
        {"eagle": None, "vllm": "architectures", "sglang": "architectures"},
    ),
}
CASES = [(name, format) for name, (_, systems) in BROKEN.items() for format in systems]


@pytest.mark.parametrize(("name", "format"), CASES, ids=lambda value: value.replace(" ", "-"))
def test_a_directory_that_a_system_reads_otherwise_is_found_without_the_original(copy_of, checked, name, format):
    """The record that export leaves is removed: these are the mistakes of public directories."""
    edit, systems = BROKEN[name]
    directory = copy_of(format)
    (directory / RECORD).unlink()
    edit(Directory(directory))
    code, shown = checked(directory, format)
    expected = systems[format]
    if expected is None:
        assert code == 0 and "nothing differs" in shown
    else:
        assert code == 1 and expected in shown and "nothing differs" not in shown, shown


RECORDED = {
    "positions": (
        lambda d: d.set(rope_theta=123.0, rope_parameters={"rope_theta": 123.0, "rope_type": "default"}),
        "other rotary frequencies",
    ),
    "another epsilon": (lambda d: d.set(rms_norm_eps=1e-3), "0.001 in this system, exported with 1e-06"),
    "halves of fc": (lambda d: d.change("fc.weight", lambda w: torch.cat(w.chunk(2, 1)[::-1], 1)), "fc.weight"),
    "a bias of fc": (lambda d: d.add("fc.bias", torch.full((48,), 0.5)), "fc.bias"),
}


@pytest.mark.parametrize("name", RECORDED)
def test_another_head_is_found_by_the_exports_record(copy_of, checked, name):
    edit, words = RECORDED[name]
    directory = copy_of("sglang")
    edit(Directory(directory))
    code, shown = checked(directory, "sglang")
    assert code == 1 and words in shown and "nothing differs" not in shown, shown


@pytest.mark.parametrize("format", FORMATS)
def test_an_export_as_it_was_written_passes(exported, checked, format):
    code, shown = checked(exported(format), format)
    assert code == 0 and "nothing differs" in shown, shown


def test_without_a_format_every_system_that_holds_such_heads_gets_a_verdict(copy_of, checked):
    directory = copy_of("eagle")
    (directory / RECORD).unlink()
    code, shown = checked(directory, "auto")
    assert code == 0 and "Written as SafeAILab/EAGLE does." in shown
    assert "eagle: computes this head" in shown and "vllm: computes this head" in shown
    assert "sglang: another head, or none (architectures" in shown and "speculators" not in shown


def test_logits_are_compared_with_the_original_head(exported, checked, eagle_dir, tiny_target, tmp_path):
    other = EagleHead(load_head(eagle_dir).config)
    other.load_state_dict(load_head(eagle_dir).state_dict())
    other.layers[0].mlp.up_proj.weight.data[3, 5] += 0.1  # one weight
    lm = load_lm(str(tiny_target))
    save_head(tmp_path / "other", other, {"target": lm.info.identity}, "card")
    code, shown = checked(exported("vllm"), "vllm", head=tmp_path / "other")
    assert code == 1 and "DIFFERS" in shown
    assert checked(exported("vllm"), "vllm", head=eagle_dir)[0] == 0


def test_a_directory_made_for_another_target_is_found(exported, checked, tmp_path):
    other = tiny_llama_dir(tmp_path / "other", seed=5, layers=2, hidden=48)
    code, shown = checked(exported("vllm"), "vllm", target=other)
    assert code == 1 and "is another than the model that the head was trained for" in shown


def test_a_head_of_our_own_is_no_export(eagle_dir, checked):
    with pytest.raises(InputError, match="one of draftsmith's own heads"):
        checked(eagle_dir, "vllm")


@pytest.mark.parametrize(("changes", "field"), [({"target": None}, "target"), ({"format": "specdec_pp"}, "draft")])
def test_the_model_whose_states_are_read_has_to_be_named(exported, changes, field):
    config = CheckConfig(directory=exported("vllm"), format="vllm", target="somewhere")
    with pytest.raises(InputError, match=f"{field}: found none"):
        check(dataclasses.replace(config, **changes))
