"""EAGLE-3 heads in four systems' directories: round trips bit by bit, what is refused, other trainers' spellings."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest
import torch
from foreign_heads import (
    ABSOLUTE,
    CONTEXT,
    D2T,
    DEFAULT,
    IDS,
    LAYERS,
    LINEAR,
    LLAMA3,
    SYSTEMS,
    TARGET,
    H,
    V,
    changed,
    facts,
    llama,
    rand,
    random_eagle3,
    written,
)
from foreign_heads import EAGLE3_FORMATS as NAMES
from plain_eagle3 import PlainEagle3

from draftsmith.data.heads.directory import build_head, stored_tensors
from draftsmith.modules.formats.base import Package, Served
from draftsmith.modules.formats.compare import DRAFT_STEPS, Drafting3, net3_of
from draftsmith.modules.formats.detect import detect
from draftsmith.modules.types import InputError

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
