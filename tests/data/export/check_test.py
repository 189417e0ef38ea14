"""The check finds every way in which a directory can mean another head in the system that loads it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import pytest
import torch
from head_directory import Directory
from quick_heads import quick_eagle_head
from tiny_models import tiny_llama_dir

from draftsmith.data.export.export import ExportConfig
from draftsmith.data.export.export import run as export
from draftsmith.data.export.record import RECORD
from draftsmith.data.export.states import make_probes
from draftsmith.data.heads.directory import load_head, save_head
from draftsmith.data.models.loading import load_lm
from draftsmith.modules.drafters.eagle.head import EagleHead
from draftsmith.modules.engine.cache import NoCache
from draftsmith.modules.types import InputError

FORMATS = ("eagle", "vllm", "sglang")


def swap(weight: torch.Tensor) -> torch.Tensor:
    return torch.cat(weight.chunk(2, dim=1)[::-1], dim=1)


# What is done to an export, and what each system then says; None where that system does not care.
BROKEN: dict[str, tuple[Callable[[Directory], None], dict[str, str | None]]] = {
    "concatenation order": (
        lambda d: d.change("fc.weight", swap),
        dict.fromkeys(FORMATS, "with the feature before the embedding in fc"),
    ),
    "stray lm_head": (
        lambda d: d.add("lm_head.weight", torch.zeros(300, 48)),
        dict.fromkeys(FORMATS, "lm_head.weight"),  # vLLM refuses it, the others drop another lm_head than the target's
    ),
    "layer-0 input norm": (
        lambda d: d.add("layers.0.input_layernorm.weight", torch.ones(48)),
        dict.fromkeys(FORMATS, "layers.0.input_layernorm.weight"),
    ),
    "model. prefix": (
        lambda d: d.rename(lambda name: f"model.{name}"),
        dict.fromkeys(FORMATS, "fc.weight"),
    ),
    "renamed tensor": (
        lambda d: d.rename(lambda name: name.replace("mlp.up_proj", "mlp.w3")),
        dict.fromkeys(FORMATS, "layers.0.mlp.up_proj.weight"),
    ),
    "missing tensor": (
        lambda d: d.remove("layers.0.post_attention_layernorm.weight"),
        dict.fromkeys(FORMATS, "layers.0.post_attention_layernorm.weight"),
    ),
    "fc bias that is lost": (
        lambda d: d.add("fc.bias", torch.full((48,), 0.01)),
        {"eagle": "fc.bias", "vllm": "fc.bias", "sglang": None},  # SGLang computes with it
    ),
    "bias read as attention bias": (
        lambda d: d.set(bias=True),
        {"eagle": "fc.bias", "vllm": "q_proj.bias", "sglang": "q_proj.bias"},
    ),
    "bias not said to be absent": (
        lambda d: d.set(bias=None),
        {"eagle": "fc.bias", "vllm": None, "sglang": None},
    ),
    "truncated vocabulary": (
        lambda d: d.set(vocab_size=200),
        dict.fromkeys(FORMATS, "vocab_size"),
    ),
    "another family": (
        lambda d: d.set(architectures=["Qwen3ForCausalLM"]),
        {"eagle": None, "vllm": "architectures", "sglang": "architectures"},
    ),
    "number of heads": (
        lambda d: d.set(num_attention_heads=8),
        dict.fromkeys(FORMATS, "self_attn"),
    ),
}
CASES = [(name, format) for name, (_, systems) in BROKEN.items() for format in systems]


@pytest.mark.parametrize(("name", "format"), CASES, ids=lambda value: value.replace(" ", "-"))
def test_what_a_system_would_read_otherwise_is_found_without_the_original(copy_of, checked, name, format):
    """The record that export leaves is taken away: these are the mistakes of public directories."""
    breakage, systems = BROKEN[name]
    directory = copy_of(format)
    (directory / RECORD).unlink()
    breakage(Directory(directory))
    code, said = checked(directory, format)
    if systems[format] is None:  # the head drafts 35 % of its tokens, which is too little to say that nothing differs
        assert (code, "too weak to tell" in said) == (0, True), said
    else:
        assert code == 1 and systems[format] in said and "nothing differs" not in said, said


RECORDED = {
    "positions": lambda d: d.set(rope_theta=123.0, rope_parameters={"rope_theta": 123.0, "rope_type": "default"}),
    "another epsilon": lambda d: d.set(rms_norm_eps=1e-3),
    "one changed row": lambda d: d.change("fc.weight", lambda w: w.index_fill(0, torch.tensor(0), 0.0)),
    "a bias of fc": lambda d: d.add("fc.bias", torch.full((48,), 0.5)),
}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", RECORDED)
def test_what_only_the_trained_head_can_tell_is_found_by_the_exports_record(copy_of, checked, name, format):
    directory = copy_of(format)
    RECORDED[name](Directory(directory))
    code, said = checked(directory, format)
    assert code == 1 and "nothing differs" not in said, said


@pytest.mark.parametrize("format", FORMATS)
def test_an_export_as_it_was_written_passes(exported, checked, format):
    code, said = checked(exported(format), format)
    assert code == 0 and "nothing differs" in said, said
    assert "hs[2]" in said  # which state of the target is fed, by transformers' numbering: two layers, after the norm


def test_without_a_format_every_system_that_holds_such_heads_gets_a_verdict(copy_of, checked):
    directory = copy_of("eagle")
    (directory / RECORD).unlink()
    code, said = checked(directory, "auto")
    assert code == 0 and "Written as SafeAILab/EAGLE does." in said
    assert "eagle: computes this head" in said and "vllm: computes this head" in said
    assert "sglang: another head, or none" in said and "speculators" not in said


def test_the_original_head_is_what_logits_are_compared_with(exported, checked, eagle_dir, tiny_target, tmp_path):
    other = EagleHead(load_head(eagle_dir).config)
    torch.nn.init.normal_(other.fc.weight)
    lm = load_lm(str(tiny_target))
    save_head(tmp_path / "other", other, {"target": lm.info.identity}, "card")
    code, said = checked(exported("vllm"), "vllm", head=tmp_path / "other")
    assert code == 1 and "DIFFERS" in said
    assert checked(exported("vllm"), "vllm", head=eagle_dir)[0] == 0


def test_a_head_made_for_features_before_the_final_norm_is_found(tiny_target, tmp_path, capsys, monkeypatch):
    """Such a head is whole in every file and config; only how it drafts tells."""
    lm = load_lm(str(tiny_target))
    probes = make_probes(str(tiny_target), lm, lm.info.max_position)

    class BeforeNorm:
        """The target, but for the features that its head is trained on."""

        config, embed, lm_head = lm.config, lm.embed, lm.lm_head

        def features(self, ids: torch.Tensor) -> torch.Tensor:
            return lm.stack.chain(lm.embed(ids), NoCache())

    head = quick_eagle_head(BeforeNorm(), [probe.ids.tolist() for probe in probes], steps=200)
    save_head(tmp_path / "head", head, {"target": lm.info.identity}, "card")
    out = tmp_path / "out"
    monkeypatch.setenv("COLUMNS", "400")
    code = export(ExportConfig(format="vllm", head=tmp_path / "head", output=out, target=str(tiny_target)))
    assert "with features from before the final norm" in " ".join(capsys.readouterr().out.split())
    assert (code, list(tmp_path.iterdir())) == (1, [tmp_path / "head"])  # a failed export leaves nothing behind


def test_a_directory_made_for_another_target_is_found(exported, checked, tmp_path):
    other = tiny_llama_dir(tmp_path / "other", seed=5, layers=2, hidden=48)
    code, said = checked(exported("vllm"), "vllm", target=other)
    assert code == 1 and "lm_head is another than the model that the head was trained for" in said


def test_a_damaged_record_is_one_line(copy_of, checked):
    directory = copy_of("vllm")
    (directory / RECORD).write_text(json.dumps({"format": "vllm"}))
    with pytest.raises(InputError, match=r"draftsmith\.json: found no tensors"):
        checked(directory, "vllm")


def test_a_directory_that_was_exported_for_a_head_of_another_kind_is_found(copy_of, checked, eagle_dir):
    directory = copy_of("vllm")
    record = json.loads((directory / RECORD).read_text())
    (directory / RECORD).write_text(json.dumps({**record, "format": "specdec_pp"}))
    code, said = checked(directory, "vllm")
    assert code == 1 and "this was exported as specdec_pp" in said
    with pytest.raises(InputError, match="one of draftsmith's own heads"):
        checked(eagle_dir, "vllm")


@pytest.mark.parametrize(("changes", "field"), [({"target": None}, "target"), ({"format": "specdec_pp"}, "draft")])
def test_the_model_whose_states_are_read_has_to_be_named(exported, changes, field):
    from draftsmith.data.export.check import CheckConfig, run

    config = CheckConfig(directory=exported("vllm"), format="vllm", target="somewhere")
    with pytest.raises(InputError, match=f"{field}: found none"):
        run(dataclasses.replace(config, **changes))
