"""EAGLE-3 heads in four systems' directories: round trips bit by bit, one broken copy for every way in which a
directory goes wrong unnoticed, and what is refused."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from foreign_heads import (
    CONTEXT,
    D2T,
    DEFAULT,
    LAYERS,
    LINEAR,
    LLAMA3,
    H,
    V,
    changed,
    facts,
    llama,
    random_eagle3,
)
from plain_eagle3 import PlainEagle3
from torch import Tensor

from draftsmith.data.heads.directory import build_head, stored_tensors
from draftsmith.modules.interop import formats
from draftsmith.modules.interop.base import Package, Probe, Served, Trial
from draftsmith.modules.interop.compare import DRAFT_STEPS, Drafting3, net3_of
from draftsmith.modules.interop.detect import detect
from draftsmith.modules.types import InputError

NAMES = ("eagle", "vllm", "sglang", "speculators")
SYSTEMS = {name: formats()[name, "eagle3"] for name in NAMES}
TARGET = facts(num_hidden_layers=LAYERS)
IDS = "eagle_aux_hidden_state_layer_ids"
ABSOLUTE = {"d2t": D2T}


def written(name: str, dtype: torch.dtype = torch.float32, **settings: Any) -> Package:
    head = random_eagle3(**settings)
    return SYSTEMS[name].write(head.config, stored_tensors(head), dtype, TARGET)


# What each system holds beside the plain head.
HELD = {
    "plain": ({}, NAMES),
    "3.1": ({"fc_norm": True, "norm_output": True}, ("vllm", "sglang", "speculators")),
    "other layers": ({"capture": (1, 4, 11)}, ("vllm", "sglang", "speculators")),
    "one layer": ({"capture": (3,)}, ("vllm", "sglang", "speculators")),
    "two layers": ({"capture": (1, 4), "fc_norm": True}, ("vllm", "sglang", "speculators")),
    "five layers": ({"capture": (1, 4, 6, 9, 11)}, ("vllm", "sglang", "speculators")),
    "norm before the residual": ({"norm_before_residual": True}, ("vllm", "speculators")),
    "llama3 rope": ({"llama_config": llama(rope_scaling=LLAMA3)}, ("vllm", "sglang", "speculators")),
    "linear rope": ({"llama_config": llama(rope_scaling=LINEAR, rope_theta=10000.0)}, NAMES),
    "wide heads": ({"llama_config": llama(head_dim=8)}, ("vllm", "sglang", "speculators")),
}
CASES = [(case, name) for case, (_, names) in HELD.items() for name in names]


@pytest.mark.parametrize("reduced", [True, False], ids=["reduced", "full"])
@pytest.mark.parametrize(("case", "name"), CASES)
def test_a_head_comes_back_bit_by_bit(case, name, reduced):
    for dtype in (torch.float32, torch.bfloat16):
        head = random_eagle3(reduced=reduced, **HELD[case][0]).to(dtype)
        package = SYSTEMS[name].write(head.config, stored_tensors(head), dtype, TARGET)
        shapes = {key: tuple(tensor.shape) for key, tensor in package.tensors.items()}
        for reader in {SYSTEMS[name], detect(package.config, shapes)}:
            parsed = reader.parse(package, TARGET)
            assert parsed.config == head.config
            again = stored_tensors(build_head("eagle3", parsed.config, parsed.state))
            assert again.keys() == stored_tensors(head).keys()
            for key, tensor in stored_tensors(head).items():
                assert again[key].dtype == tensor.dtype and torch.equal(again[key], tensor), key
        reading = SYSTEMS[name].read(package, TARGET)
        assert reading.errors == [] and set(reading.used) | {"embed_tokens.weight"} >= package.tensors.keys()
        fields = json.loads(json.dumps({"llama": _json(head.config.llama)} | _flags(head.config)))
        assert SYSTEMS[name].settings_differ(fields, reading) == []


def _json(llama_config: Any) -> dict[str, Any]:
    return {**vars(llama_config), "rope_scaling": vars(llama_config.rope_scaling)}


def _flags(config: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(config).items() if name != "llama"}


@pytest.mark.parametrize(("case", "name"), CASES)
def test_what_is_read_drafts_as_the_systems_own_rules_do_and_as_our_head(case, name):
    package = written(name, **HELD[case][0])
    head, torch_embedding = random_eagle3(**HELD[case][0]), TARGET.embed_tokens
    torch.manual_seed(7)
    ids, states = torch.randint(V, (6,)), torch.randn(6, len(head.capture) * H)
    plain = PlainEagle3(package, head.config.llama)
    expected = plain.draft(torch_embedding.double(), ids, states.double(), DRAFT_STEPS + 1).float()
    read = net3_of(SYSTEMS[name].read(package, TARGET), 20)
    for net in (read, head):
        drafting = Drafting3(torch_embedding, net, TARGET.lm_head)
        logits = drafting.draft(ids, net.read(states))[len(ids) - 1 :]
        known = expected.isfinite()
        assert torch.equal(known, logits.isfinite())
        # float32 against float64, over a draft of several steps
        torch.testing.assert_close(logits[known], expected[known], rtol=0, atol=2e-4)


def test_layers_are_numbered_as_each_system_does_and_left_out_where_they_are_its_default():
    said = {name: written(name, capture=(1, 4, 11)).config for name in ("vllm", "sglang", "speculators")}
    assert said["vllm"][IDS] == said["speculators"][IDS] == [1, 4, 11]
    assert (
        said["sglang"]["eagle_config"] == {"use_aux_hidden_state": True, IDS: [0, 3, 10]} and IDS not in said["sglang"]
    )
    for name in NAMES:
        config = written(name).config
        assert config.get(IDS) is None and "eagle_config" not in config
    head = random_eagle3()
    other = facts(num_hidden_layers=16)  # its default are others
    assert SYSTEMS["vllm"].write(head.config, stored_tensors(head), torch.float32, other).config[IDS] == list(DEFAULT)
    with pytest.raises(InputError, match=r"layers: found \[2, 6, 9\], expected \[2, 8, 13\], .*--format vllm"):
        SYSTEMS["eagle"].write(head.config, stored_tensors(head), torch.float32, other)


def test_the_tables_of_a_draft_vocabulary():
    for name in NAMES:
        tensors = written(name).tensors
        assert torch.equal(tensors["d2t"] + torch.arange(len(D2T)), D2T) and tensors["d2t"].dtype == torch.int64
        assert torch.equal(tensors["t2d"].nonzero()[:, 0], D2T) and tensors["t2d"].dtype == torch.bool
        assert not {"d2t", "t2d"} & written(name, reduced=False).tensors.keys()
        assert ("embed_tokens.weight" in tensors) == (name == "speculators")
        config = written(name, reduced=False).config
        assert config["draft_vocab_size"] == V
    assert written("speculators").config["norm_before_residual"] is False
    assert written("speculators").config["transformer_layer_config"]["vocab_size"] == V


REFUSED = [
    ({"norm_before_residual": True}, "norm_before_residual: found True.*says nothing.*vllm", ("eagle", "sglang")),
    ({"fc_norm": True}, "fc_norm: found True.*ignores it and says nothing.*--format vllm", ("eagle",)),
    ({"norm_output": True}, "norm_output: found True.*--format vllm", ("eagle",)),
    ({"capture": (1, 4, 11)}, r"layers: found \[1, 4, 11\].*always reads", ("eagle",)),
    ({"capture": (0, 4, 11)}, r"layers: found \[0, 4, 11\], expected layers from 1", ("sglang",)),
    ({"llama_config": llama(rope_scaling=LLAMA3)}, "rope_scaling: found llama3", ("eagle",)),
    ({"llama_config": llama(head_dim=8)}, "head_dim: found 8", ("eagle",)),
    ({"llama_config": llama(qkv_bias=True)}, "qkv_bias: found True", NAMES),
    ({"llama_config": llama(qk_norm=True)}, "qk_norm: found True", NAMES),
    ({"llama_config": llama(o_bias=True)}, "o_bias: found True", NAMES),
    ({"llama_config": llama(mlp_bias=True)}, "mlp_bias: found True", NAMES),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "reason", "names"), REFUSED)
def test_what_a_system_ignores_is_refused_in_one_line(settings, reason, names):
    for name in names:
        config = random_eagle3(**settings).config
        assert not SYSTEMS[name].holds(config)
        with pytest.raises(InputError, match=reason) as error:
            written(name, **settings)
        assert "\n" not in str(error.value)


@dataclass(frozen=True)
class Trap:
    """A broken copy, and for each system the field or tensor of an error and a part of its text; None: it reads it
    well, which `but` names."""

    config: dict[str, Any]
    tensors: dict[str, Tensor | None]
    where: str
    text: str
    fine: tuple[str, ...] = ()
    settings: tuple[tuple[str, Any], ...] = ()


LAYER = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
         "mlp.down_proj", "input_layernorm", "hidden_norm", "post_attention_layernorm")  # fmt: skip


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


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


def test_foreign_spellings_are_one_head():
    head, plain = random_eagle3(), written("eagle")
    bare = changed(plain, {"architectures": ..., "rope_parameters": ...})
    prefixed = Package(
        plain.config | {"architectures": ["LlamaEagle3DraftModel"]}, {f"model.{k}": t for k, t in plain.tensors.items()}
    )
    modelopt = changed(plain, {"eagle_config": {IDS: [1, 5, 8]}})
    unsaid = changed(plain, {}, {"d2t": None})
    absolute = changed(plain, {}, ABSOLUTE)
    embedded = changed(plain, {}, {"embed_tokens.weight": TARGET.embed_tokens})
    for package in (bare, prefixed, modelopt, unsaid, absolute, embedded):
        shapes = {key: tuple(tensor.shape) for key, tensor in package.tensors.items()}
        parsed = detect(package.config, shapes).parse(package, TARGET)
        assert parsed.config == head.config
        assert all(torch.equal(parsed.state[key], tensor) for key, tensor in stored_tensors(head).items())
    order = torch.randperm(len(D2T), generator=torch.Generator().manual_seed(1))
    shuffled = changed(
        plain,
        {},
        {"d2t": D2T[order] - torch.arange(len(D2T)), "lm_head.weight": plain.tensors["lm_head.weight"][order]},
    )
    assert torch.equal(SYSTEMS["eagle"].parse(shuffled, TARGET).state["lm_head.weight"], head.lm_head.weight)
    late = random_eagle3(fc_norm=True, norm_output=True)
    package = written("sglang", fc_norm=True, norm_output=True)
    names = {"fc_norm.0.weight": "aux_norm_low.weight", "fc_norm.1.weight": "aux_norm_mid.weight",
             "fc_norm.2.weight": "aux_norm_high.weight"}  # fmt: skip
    old = changed(package, {"fc_norm": ..., "use_aux_norm": True})
    old = Package(old.config, {names.get(key, key): tensor for key, tensor in old.tensors.items()})
    assert SYSTEMS["sglang"].parse(old, TARGET).config == late.config
    assert SYSTEMS["sglang"].read(old, TARGET).errors == []


def test_a_head_without_lm_head_has_the_targets():
    whole = changed(written("vllm", reduced=False), {}, {"lm_head.weight": None})
    reading, parsed = SYSTEMS["vllm"].read(whole, TARGET), SYSTEMS["vllm"].parse(whole, TARGET)
    assert reading.errors == [] and torch.equal(reading.weights["lm_head.weight"], TARGET.lm_head)
    assert torch.equal(parsed.state["lm_head.weight"], TARGET.lm_head)
    for name in NAMES[:3]:
        copy = changed(written(name), {}, {"lm_head.weight": None})
        assert any(finding.where == "lm_head.weight" for finding in SYSTEMS[name].read(copy, TARGET).errors)
    null = changed(written("sglang", reduced=False), {"draft_vocab_size": None}, {"lm_head.weight": None})
    assert SYSTEMS["sglang"].read(null, TARGET).errors == []


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


MISREAD = {
    "layers one earlier": lambda package: changed(package, {IDS: [3, 7, 10]}),
    "layers one later": lambda package: changed(package, {IDS: [1, 5, 8]}),
    "the layers in the opposite order": reversed_states,
    "the state before the embedding in q, k and v": swapped,
    "the state as it is as the residual": lambda package: changed(package, {"norm_before_residual": True}),
    "ids in d2t": lambda package: changed(package, {}, {"d2t": torch.arange(8), "t2d": None}),
    "the rotary settings of the target": lambda package: changed(package, {"rope_theta": 7.0, "rope_parameters": ...}),
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


def test_biases_are_kept_where_the_system_uses_them():
    sizes = {"q": H, "k": 4, "v": 4, "o": H}
    biases = {f"midlayer.self_attn.{name}_proj.bias": rand(size) for name, size in sizes.items()}
    copy = changed(written("vllm"), {"attention_bias": True}, biases)
    parsed, reading = SYSTEMS["vllm"].parse(copy, TARGET), SYSTEMS["vllm"].read(copy, TARGET)
    assert reading.errors == [] and parsed.config.llama.qkv_bias and parsed.config.llama.o_bias
    head = build_head("eagle3", parsed.config, parsed.state)
    ids, states = torch.arange(6), torch.randn(6, 3 * H)
    ours, theirs = (Drafting3(TARGET.embed_tokens, net, TARGET.lm_head) for net in (head, net3_of(reading, 20)))
    assert torch.equal(ours.draft(ids, head.read(states)), theirs.draft(ids, theirs.net.read(states)))
    zeros = {name: torch.zeros_like(tensor) for name, tensor in biases.items()}
    for config in ({}, {"attention_bias": True}):
        parsed = SYSTEMS["vllm"].parse(changed(written("vllm"), config, zeros), TARGET)
        assert parsed.config == random_eagle3().config


def test_without_a_target_only_a_head_that_names_its_layers_is_read():
    with pytest.raises(InputError, match=r"target: found none.*layers 2, L/2 and L-3.*Pass --target"):
        SYSTEMS["vllm"].parse(written("vllm"), None)
    assert SYSTEMS["vllm"].parse(written("vllm", capture=(1, 4, 11)), None).config.capture == (1, 4, 11)
    raised = SYSTEMS["vllm"].parse(
        written("vllm"), facts(num_hidden_layers=LAYERS, max_position_embeddings=4 * CONTEXT)
    )
    assert raised.config.llama.max_position == 4 * CONTEXT


def test_the_serving_commands():
    words = {name: shlex.split(SYSTEMS[name].serve(Served("org/target", "my heads/one", 4))) for name in NAMES}
    for name in ("vllm", "speculators"):
        assert json.loads(words[name][-1]) == {"method": "eagle3", "model": "my heads/one", "num_speculative_tokens": 4}
    assert words["sglang"][words["sglang"].index("--speculative-algorithm") + 1] == "EAGLE3"
    assert words["eagle"][-2:] == ["my heads/one", "--no-eagle3"]
