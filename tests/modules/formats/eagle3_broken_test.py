"""Broken copies of EAGLE-3 directories, one for every way in which one goes wrong unnoticed: each system's reader says
what that system does, and the check finds how the head was meant."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from foreign_heads import (
    ABSOLUTE,
    DEFAULT,
    IDS,
    LAYERS,
    SYSTEMS,
    TARGET,
    H,
    V,
    changed,
    facts,
    rand,
    random_eagle3,
    written,
)
from foreign_heads import EAGLE3_FORMATS as NAMES
from torch import Tensor

from draftsmith.data.heads.directory import build_head, stored_tensors
from draftsmith.modules.formats.base import Package, Probe, Trial
from draftsmith.modules.formats.compare import Drafting3
from draftsmith.modules.types import InputError


@dataclass(frozen=True)
class Trap:
    """A broken copy, and for each system the field or tensor of an error and a part of its text; None: it reads it
    well, which `but` names."""

    config: dict[str, Any]
    tensors: dict[str, Tensor | None]
    where: str
    text: str
    fine: tuple[str, ...] = ()


TRAPS = {
    "ids in d2t": Trap({}, ABSOLUTE, "d2t", "the file has ids where all systems want offsets"),
    "ids in d2t, without t2d": Trap({}, ABSOLUTE | {"t2d": None}, "d2t", "beyond the target's 20"),
    "another head's d2t": Trap({}, {"d2t": torch.zeros(8, dtype=torch.int64)}, "d2t", "other tokens than t2d marks"),
    "no d2t": Trap({}, {"d2t": None}, "d2t", "takes drafted ids for the target's own"),
    "short d2t": Trap({}, {"d2t": torch.zeros(7, dtype=torch.int64)}, "d2t", "another shape (file [7], model [8])"),
    "no t2d": Trap({}, {"t2d": None}, "t2d", "raises", ("eagle", "vllm", "sglang")),
    "missing norm": Trap({}, {"@hidden_norm.weight": None}, "@hidden_norm.weight", "it keeps ones"),
    "missing final norm": Trap({}, {"norm.weight": None}, "norm.weight", "it keeps ones"),
    "missing matrix": Trap({}, {"@self_attn.k_proj.weight": None}, "@self_attn.k_proj.weight", "does not find it"),
    "fc of two states": Trap({}, {"fc.weight": rand(H, 2 * H)}, "fc.weight", "(file [12, 24], model [12, 36])"),
    "norm_before_residual": Trap(
        {"norm_before_residual": True}, {}, "norm_before_residual", "does not read it", ("vllm", "speculators")
    ),
    "fc_norm without its norms": Trap({"fc_norm": True}, {}, "fc_norm", ""),
    "norms without fc_norm": Trap({}, {f"fc_norm.{i}.weight": rand(H) for i in range(3)}, "fc_norm.0.weight", ""),
    "norm_output": Trap({"norm_output": True}, {}, "norm_output", "does not read it", NAMES[1:]),
    "one norm before fc": Trap({"norm_before_fc": True}, {"input_norm.weight": rand(3 * H)}, "norm_before_fc", ""),
    "an unannounced norm": Trap({}, {"input_norm.weight": rand(3 * H)}, "input_norm.weight", "drops it"),
    "no draft_vocab_size": Trap({"draft_vocab_size": ...}, {}, "lm_head.weight", "(file [8, 12], model [20, 12])"),
    "another model's vocabulary": Trap({"@vocab_size": 19}, {}, "vocab_size", "goes by 19, the target has 20 tokens"),
    "stray bias": Trap({}, {"@self_attn.q_proj.bias": rand(H)}, "@self_attn.q_proj.bias", "drops it"),
    "two layers": Trap({"@num_hidden_layers": 2}, {}, "num_hidden_layers", "builds 2 layers", ("eagle",)),
    "rope in the file's new spelling only": Trap(
        {"@rope_theta": ..., "@rope_scaling": ...}, {}, "rope_theta", "reads rope_theta and rope_scaling", NAMES[1:]
    ),
    "quantised": Trap({"@quantization_config": {"bits": 4}}, {}, "quantization_config", "does not follow"),
}  # fmt: skip


def broken(name: str, trap: Trap) -> tuple[Package, str]:
    """The copy in a system's own spelling, and where the error is to be: @ is of the layer."""
    layer, package = SYSTEMS[name].layer, written(name)
    tensors = {key.replace("@", f"{layer}."): tensor for key, tensor in trap.tensors.items()}
    fields, inner = {}, dict(package.config.get("transformer_layer_config", {}))
    for key, value in trap.config.items():
        (inner if key.startswith("@") and inner else fields)[key.removeprefix("@")] = value
    inner = {key: value for key, value in inner.items() if value is not ...}
    return changed(
        package, fields | ({"transformer_layer_config": inner} if inner else {}), tensors
    ), trap.where.replace("@", f"{layer}.")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("trap", TRAPS)
def test_each_system_meets_a_broken_copy_in_its_own_way(trap, name):
    package, where = broken(name, TRAPS[trap])
    reading = SYSTEMS[name].read(package, TARGET)
    if name in TRAPS[trap].fine:
        assert reading.errors == []
    else:
        found = [finding for finding in reading.errors if where in finding.where]
        assert any(TRAPS[trap].text in finding.text for finding in found), [str(f) for f in reading.errors]
    # Whatever the copy: no tensor is without a trace, and none of the system's parameters without a value.
    named = {finding.where for finding in reading.findings}
    assert package.tensors.keys() <= named | set(reading.used)
    unknown = {SYSTEMS[name].disk_name(key) for key, tensor in reading.weights.items() if tensor.isnan().any()}
    assert unknown <= named


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_under_another_name_is_lost_where_the_system_has_only_its_own(name):
    package = written(name)
    layer = SYSTEMS[name].layer
    for by, fine in (("midlayer.", NAMES[:3]), ("layers.0.", NAMES[1:]), ("", ()), (f"model.{layer}.", ("sglang",))):
        tensors = {key.replace(f"{layer}.", by): tensor for key, tensor in package.tensors.items()}
        assert (SYSTEMS[name].read(Package(package.config, tensors), TARGET).errors == []) == (name in fine), by


def test_sglang_knows_every_name_behind_model_but_that_of_lm_head():
    prefixed = {f"model.{key}": tensor for key, tensor in written("sglang").tensors.items()}
    reading = SYSTEMS["sglang"].read(Package(written("sglang").config, prefixed), TARGET)
    assert {finding.where for finding in reading.errors} == {"model.lm_head.weight", "lm_head.weight"}


def test_sglang_takes_the_targets_lm_head_over_the_files_where_no_size_is_said():
    copy = changed(written("sglang", reduced=False), {"draft_vocab_size": None})
    reading = SYSTEMS["sglang"].read(copy, TARGET)
    assert [finding.where for finding in reading.errors] == ["lm_head.weight"]
    assert torch.equal(reading.weights["lm_head.weight"], TARGET.lm_head)


def test_a_full_vocabularys_d2t_stops_vllm_and_nobody_else():
    zeros = {"d2t": torch.zeros(V, dtype=torch.int64), "t2d": torch.ones(V, dtype=torch.bool)}
    for name in NAMES:
        copy = changed(written(name, reduced=False), {}, zeros)
        errors = SYSTEMS[name].read(copy, TARGET).errors
        assert [finding.where for finding in errors] == (["d2t"] if name == "vllm" else [])
        assert SYSTEMS[name].parse(copy, TARGET).config == random_eagle3(reduced=False).config


def test_one_list_of_layers_is_two_things_to_vllm_and_sglang():
    copy = changed(written("vllm"), {"eagle_config": {IDS: [1, 5, 8]}})
    assert SYSTEMS["vllm"].read(copy, TARGET).settings["capture"] == (1, 5, 8)
    assert SYSTEMS["sglang"].read(copy, TARGET).settings["capture"] == DEFAULT
    assert SYSTEMS["sglang"].parse(copy, TARGET).config.capture == DEFAULT
    assert SYSTEMS["eagle"].read(copy, TARGET).settings["capture"] == DEFAULT
    for name, ids in (("vllm", [9, 2, 6]), ("sglang", [8, 1, 5])):  # both read them in the order of the layers
        reading = SYSTEMS[name].read(changed(written(name), {"eagle_config": {IDS: ids}}), TARGET)
        assert reading.settings["capture"] == DEFAULT and reading.errors == []
    above = changed(written("vllm"), {IDS: [1, 5, 8]})
    assert any(finding.where == IDS for finding in SYSTEMS["sglang"].read(above, TARGET).errors)
    shallow = SYSTEMS["vllm"].read(written("vllm"), facts(num_hidden_layers=6))
    assert any("[2, 3, 3], not 3 distinct" in finding.text for finding in shallow.errors)


def wheres(name: str, package: Package) -> set[str]:
    return {finding.where for finding in SYSTEMS[name].read(package, TARGET).errors}


def test_vllm_builds_fc_for_three_states_unless_a_field_beside_the_ids_says_how_many():
    count, inner = "num_aux_hidden_states", "transformer_layer_config"
    for capture in (DEFAULT, (1, 4, 6)):
        assert count not in written("vllm", capture=capture).config
    two = written("vllm", capture=(1, 4))
    assert two.config[count] == 2 and wheres("vllm", two) == set()
    assert {"layers", "fc.weight"} <= wheres("vllm", changed(two, {count: ...}))
    theirs = written("speculators", capture=(1, 4))
    assert theirs.config[inner][count] == 2 and wheres("vllm", theirs) == set()
    unsaid = changed(theirs, {inner: {key: value for key, value in theirs.config[inner].items() if key != count}})
    assert wheres("speculators", unsaid) == set()  # which counts the ids
    assert {"layers", "fc.weight"} <= wheres("vllm", unsaid)


@pytest.mark.parametrize("capture", [(1, 4), (2, 6, 8, 9), (2,)])
def test_safeailabs_code_always_reads_three(capture):
    with pytest.raises(InputError, match=r"layers: found .*, which SafeAILab/EAGLE always reads"):
        written("eagle", capture=capture)
    assert "fc.weight" in wheres("eagle", written("sglang", capture=capture))


def test_a_speculators_directory_that_says_nothing_of_the_residual_is_two_things():
    copy = changed(written("speculators"), {"norm_before_residual": ...})
    assert SYSTEMS["speculators"].read(copy, TARGET).settings["norm_before_residual"] is False
    assert SYSTEMS["vllm"].read(copy, TARGET).settings["norm_before_residual"] is True
    assert SYSTEMS["vllm"].read(written("speculators"), TARGET).errors == []
    for name in ("eagle", "sglang"):
        assert any(f.where == "speculators_model_type" for f in SYSTEMS[name].read(copy, TARGET).errors)


def trial_of(head: Any, shift: int = 1) -> Trial:
    """Texts whose tokens the head, rightly read, always chooses as the target does."""
    torch.manual_seed(11)
    drafting, probes = Drafting3(TARGET.embed_tokens, head, TARGET.lm_head), []
    for _ in range(8):
        ids, states = torch.randint(V, (40,)), {number: torch.randn(40, H) for number in range(LAYERS)}
        probe = Probe(ids, 2, ids, torch.randn(40, H), None, states)
        (rows,) = drafting.inputs(Trial(TARGET, [probe]), head.config.capture, shift)
        probes.append(replace(probe, choices=torch.cat([ids[:1], drafting.logits(*rows).argmax(-1)])))
    return Trial(TARGET, probes)


def attentive() -> Any:
    """A random head whose output is of what it attends to as much as of its own state."""
    head = random_eagle3()
    head.layer.self_attn.o_proj.weight.mul_(10)
    head.fc.weight.mul_(0.3)
    return head


def swapped(package: Package) -> Package:
    names = [f"midlayer.self_attn.{name}_proj.weight" for name in "qkv"]
    return changed(package, {}, {n: torch.cat(package.tensors[n].chunk(2, dim=1)[::-1], dim=1) for n in names})


def reversed_states(package: Package) -> Package:
    return changed(package, {}, {"fc.weight": torch.cat(package.tensors["fc.weight"].chunk(3, dim=1)[::-1], dim=1)})


def interleaved(package: Package) -> Package:
    """Rows of q and k as Llama's own code has them: (0, d/2), (1, 1 + d/2), .. side by side."""
    d = package.config["head_dim"]
    order = torch.arange(d).view(2, d // 2).T.flatten()
    names = [f"midlayer.self_attn.{name}_proj.weight" for name in "qk"]
    tensors = {n: package.tensors[n].unflatten(0, (-1, d))[:, order].flatten(0, 1) for n in names}
    return changed(package, {}, tensors)


MISREAD = {
    "layers one earlier": lambda package: changed(package, {IDS: [3, 7, 10]}),
    "layers one later": lambda package: changed(package, {IDS: [1, 5, 8]}),
    "the layers in the opposite order": reversed_states,
    "the state before the embedding in q, k and v": swapped,
    "norm_before_residual off": lambda package: changed(package, {"norm_before_residual": True}),
    "ids in d2t": lambda package: changed(package, {}, {"d2t": torch.arange(8), "t2d": None}),
    "rotary base 5000": lambda package: changed(package, {"rope_theta": 7.0, "rope_parameters": ...}),
    "the rotary pairs of q and k as if not converted from interleaved": interleaved,
    "the target's embedding": lambda package: changed(package, {}, {"embed_tokens.weight": rand(V, H)}),
}


@pytest.mark.parametrize("said", MISREAD)
def test_a_head_that_would_work_when_read_in_another_way_is_found(said):
    """Nothing but how often it agrees with the target tells these."""
    head, vllm = attentive(), SYSTEMS["vllm"]
    package = vllm.write(head.config, stored_tensors(head), torch.float32, TARGET)
    if said == "ids in d2t":  # the table is meant as it is
        head.use_draft_vocabulary(torch.arange(8))
    trial = trial_of(head)
    if said != "ids in d2t":
        assert all(measure.passed for measure in vllm.compare(vllm.read(package, TARGET), head, package, trial))
    broken = MISREAD[said](package)
    reading = vllm.read(broken, TARGET)
    assert set(vllm.layers(reading, head, LAYERS)) >= {1, 2, 3, 5, 6, 7, 8, 9, 10}
    measure = vllm.compare(reading, head, broken, trial)[-1]
    assert not measure.passed and f"with {said}" in measure.value, measure
    lost = changed(package, {}, {"midlayer.mlp.up_proj.weight": None})
    fed, drafted, _ = vllm.compare(vllm.read(lost, TARGET), head, lost, trial)
    assert not fed.passed and not drafted.passed


def test_a_head_that_stands_beside_its_own_tokens_is_found():
    head, vllm = attentive(), SYSTEMS["vllm"]
    package = vllm.write(head.config, stored_tensors(head), torch.float32, TARGET)
    measure = vllm.compare(vllm.read(package, TARGET), head, package, trial_of(head, shift=0))[-1]
    assert "with each state beside its own token instead of the next" in measure.value


@pytest.mark.parametrize(
    ("config", "tensors", "words"),
    [
        ({}, {"input_norm.weight": rand(3 * H)}, "input_norm.weight is unknown"),
        ({"norm_before_fc": True}, {}, "norm_before_fc"),
        ({}, {"@hidden_norm.weight": None}, "layer.hidden_norm.weight is missing"),
        ({}, {"d2t": None, "t2d": None}, "d2t: found 20 tokens, expected 8 different ones"),
        ({}, {"d2t": torch.zeros(8, dtype=torch.int64)}, "d2t: found other tokens than t2d marks"),
        ({}, {"d2t": torch.zeros(8, dtype=torch.bool)}, "d2t: found a tensor of bool, expected whole numbers"),
        ({}, {"d2t": torch.zeros(2, 4, dtype=torch.int64)}, r"d2t: found a tensor \[2, 4\]"),
        ({}, {"lm_head.weight": torch.zeros(())}, r"lm_head.weight: found a tensor \[\]"),
        ({"draft_vocab_size": "many"}, {}, "draft_vocab_size: found many"),
        ({"eagle_config": ["a"], "architectures": "x"}, {"d2t": None, "t2d": None}, "d2t: found 20 tokens"),
        ({"draft_vocab_size": 9}, {}, "draft_vocab_size: found 9, expected the 8 rows of lm_head"),
        ({IDS: [1, 2]}, {}, r"layers: found \[1, 2\], expected 3 distinct ones, as fc reads"),
        ({IDS: [1, 2, 3, 4]}, {}, "expected 3 distinct ones"),
        ({}, {"fc.weight": rand(H, 2 * H)}, r"layers: found \[2, 6, 9\], expected 2 distinct ones"),
        ({}, {"fc.weight": rand(H, 3 * H + 1)}, "fc.weight: found a tensor"),
        ({}, {"fc.weight": None}, "fc.weight: found none"),
        ({IDS: [1, 2, 12]}, {}, "below 12"),
        ({IDS: "all"}, {}, "expected a list of integers"),
        ({"fc_norm": True}, {}, "fc_norm: found no norm of the target's states"),
        ({}, {"embed_tokens.weight": rand(V, H)}, "an embedding that differs from the target's"),
        ({}, {"@self_attn.q_proj.bias": rand(H)}, "weights: found a self_attn.q_proj.bias.*none, as vLLM builds it"),
        ({"attention_bias": True}, {}, "weights: found no self_attn.q_proj.bias"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, {}, "use_aux_hidden_state"),
    ],
)
def test_what_our_head_cannot_be_is_refused(config, tensors, words):
    package = changed(written("vllm"), config, {k.replace("@", "midlayer."): t for k, t in tensors.items()})
    with pytest.raises(InputError, match=words):
        parsed = SYSTEMS["vllm"].parse(package, TARGET)
        build_head("eagle3", parsed.config, parsed.state)
