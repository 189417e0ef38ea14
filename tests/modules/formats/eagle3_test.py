"""EAGLE-3 heads in five systems' directories: round trips, other trainers' spellings, and planted defects."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from foreign_heads import (
    D2T,
    DEFAULT,
    EAGLE3,
    IDS,
    LAYERS,
    LINEAR,
    LLAMA3,
    PART,
    TARGET,
    YARN,
    H,
    V,
    assert_same,
    changed,
    facts,
    llama,
    rand,
    random_eagle3,
    where,
    written,
)
from oracles.heads import PlainEagle3

from draftsmith.modules.formats import formats
from draftsmith.modules.formats.base import Package
from draftsmith.modules.formats.foreign import detect, head_kind
from draftsmith.modules.formats.gguf import head_from_gguf, head_to_gguf
from draftsmith.modules.formats.llama import flat
from draftsmith.modules.llama_config import RopeScaling
from draftsmith.modules.pretrained.heads import stored_tensors
from draftsmith.modules.types import InputError

# Settings of a head -> the systems that hold it.
HELD = {
    "plain": ({}, tuple(EAGLE3)),
    "3.1": ({"fc_norm": True, "norm_output": True}, ("vllm", "sglang", "speculators")),
    "norm before fc": ({"norm_before_fc": True}, ("vllm", "sglang", "speculators")),
    "other layers": ({"aux_layers": (1, 4, 11)}, ("vllm", "sglang", "speculators")),
    "two layers": ({"aux_layers": (1, 4), "fc_norm": True}, ("vllm", "sglang", "speculators")),
    "norm before the residual": ({"norm_before_residual": True}, ("vllm", "speculators")),
    "llama3 rope": ({"llama_config": llama(rope_scaling=LLAMA3)}, ("vllm", "sglang", "speculators")),
    "linear rope": ({"llama_config": llama(rope_scaling=LINEAR, rope_theta=10000.0)}, tuple(EAGLE3)),
    "yarn rope": ({"llama_config": llama(head_dim=8, rope_scaling=YARN)}, ("vllm", "sglang", "speculators")),
    "half a head, scaled": ({"llama_config": llama(head_dim=8, rope_scaling=PART)}, ("vllm",)),
    "window": ({"llama_config": llama(sliding_window=4)}, ("vllm", "sglang", "speculators")),
    "wide heads": ({"llama_config": llama(head_dim=8)}, ("vllm", "sglang", "speculators")),
    "own embedding": ({"own_embedding": True}, ("eagle", "vllm", "speculators")),
    "three decoder layers": (
        {"llama_config": llama(num_layers=3, sliding_window=4)},
        ("vllm", "sglang", "speculators"),
    ),
}
CASES = [(case, name) for case, (_, names) in HELD.items() for name in names]
GGUF_ROPE = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)  # the only one that such files can mean
STEEP = RopeScaling("yarn", 4.0, original_max_position=64, beta_fast=4.0, beta_slow=0.5)
LLAMACPP = [
    *({}, {"norm_before_fc": True, "aux_layers": (1, 4, 11)}, {"norm_before_residual": True, "own_embedding": True}),
    *({"llama_config": llama(rope_scaling=rope, head_dim=16)} for rope in (GGUF_ROPE, LINEAR, YARN, PART, STEEP)),
]


@pytest.mark.parametrize(("case", "name"), CASES)
def test_a_head_comes_back_bit_by_bit(case, name):
    for dtype, reduced in ((torch.float32, True), (torch.bfloat16, True), (torch.float32, False)):
        head = random_eagle3(reduced=reduced, **HELD[case][0]).to(dtype)
        package = EAGLE3[name].write(head.config, stored_tensors(head), dtype, TARGET)
        assert_same(EAGLE3[name].read(package, TARGET), head)
        other = detect(package, TARGET).read(package, TARGET)
        assert other.config == head.config


@pytest.mark.parametrize("settings", LLAMACPP)
def test_a_head_comes_back_from_gguf(settings):
    """It has ids, not offsets; layers by name; an embedding only if it is not the target's."""
    for reduced in (True, False):
        head = random_eagle3(reduced=reduced, **settings)
        metadata, tensors = head_to_gguf(written("llamacpp", reduced=reduced, **settings))
        package = head_from_gguf({"general.architecture": "eagle3", **metadata}, tensors)
        assert_same(detect(package, TARGET).read(package, TARGET), head)
        assert not reduced or torch.equal(tensors["d2t"], D2T)
        assert metadata["eagle3.target_layers"] == list(head.config.aux_layers)
        assert ("token_embd.weight" in tensors) == head.config.own_embedding


@pytest.mark.parametrize(("case", "name"), CASES)
def test_a_written_head_drafts_as_a_plain_implementation(case, name):
    settings = HELD[case][0]
    head, package = random_eagle3(**settings), written(name, **settings)
    torch.manual_seed(7)
    ids, states = torch.randint(V, (6,)), torch.randn(6, len(head.aux_layers) * H)
    expected = PlainEagle3(package, head.config.llama).draft(TARGET.embed_tokens.double(), ids, states.double(), 3)
    tokens = expected.argmax(-1)
    table = TARGET.embed_tokens if head.embed_tokens is None else head.embed_tokens.weight
    embeds = table[torch.cat([ids, tokens[:-1]])][None]
    for j, hidden in enumerate(head.unroll(embeds, states[None], 3)):
        logits = head.lm_head(head.logits_input(hidden[0, len(ids) - 1]))
        torch.testing.assert_close(logits.double(), expected[j, D2T], rtol=0, atol=2e-4)  # float32 against float64


def test_layers_are_numbered_as_each_system_does_and_left_out_if_they_are_its_default():
    configs = {name: written(name, aux_layers=(1, 4, 11)).config for name in ("vllm", "sglang", "speculators")}
    assert configs["vllm"][IDS] == configs["speculators"][IDS] == [1, 4, 11] and configs["sglang"] == configs["vllm"]
    assert configs["sglang"]["eagle_config"] == {"use_aux_hidden_state": True, IDS: [0, 3, 10]}
    assert "eagle_config" not in written("vllm", aux_layers=(0, 4, 11)).config  # SGLang has no number for the first
    assert written("vllm", aux_layers=(1, 4), fc_norm=True).config["num_aux_hidden_states"] == 2
    for name in EAGLE3:
        config = written(name).config
        assert config.get(IDS) is None and "eagle_config" not in config
    head, other = random_eagle3(), facts(num_hidden_layers=16)  # whose default layers are others
    assert EAGLE3["vllm"].write(head.config, stored_tensors(head), torch.float32, other).config[IDS] == list(DEFAULT)
    with pytest.raises(InputError, match=r"layers: found \[2, 6, 9\], expected \[2, 8, 13\].*--format vllm"):
        EAGLE3["eagle"].write(head.config, stored_tensors(head), torch.float32, other)


def test_a_head_names_the_type_of_its_targets_text_and_speculators_the_target():
    """SGLang runs it in the type that its own config names."""
    head = random_eagle3()
    for fields in ({"torch_dtype": "bfloat16"}, {"text_config": {**TARGET.raw, "dtype": "bfloat16"}}):
        target = dataclasses.replace(TARGET, raw={**TARGET.raw, "architectures": ["A"], **fields}, path="org/model")
        for name in ("vllm", "sglang", "speculators"):
            config = EAGLE3[name].write(head.config, stored_tensors(head), torch.float32, target).config
            assert config["torch_dtype"] == config["dtype"] == "bfloat16"
    assert config["speculators_config"]["verifier"] == {"name_or_path": "org/model", "architectures": ["A"]}


def test_a_window_is_read_where_each_server_has_it():
    """vLLM's models/llama.py and speculators' eagle3/core.py by the type of the layer; SGLang's llama_eagle3.py by a
    flag, of the tokens before the one that attends."""
    window = {"llama_config": llama(sliding_window=4)}
    fields = {"layer_types": ["sliding_attention"], "sliding_window": 4}
    for name in ("vllm", "speculators"):
        package = written(name, **window)
        layer = package.config.get("transformer_layer_config", package.config)
        assert {key: layer[key] for key in fields} == fields
        assert not {"layer_types", "sliding_window"} & flat(written(name).config).keys()
        # A window that no layer has is none.
        idle = changed(package, {"layer_types": ["full_attention"]})
        assert EAGLE3[name].read(idle, TARGET).config.llama.sliding_window is None
    (note,) = EAGLE3["sglang"].read(written("sglang", **window), TARGET).notes
    assert note.endswith("without --speculative-draft-window-size 3 the head attends to all tokens")
    assert where(EAGLE3["eagle"].read(changed(written("eagle"), fields), TARGET)) == ["sliding_window"]
    # speculators train with one by default since 0.8.
    published = changed(written("vllm"), {**fields, "sliding_window": 2048, "use_sliding_window": True})
    assert EAGLE3["vllm"].read(published, TARGET).config.llama.sliding_window == 2048
    # A target whose layers all have one lends it to a head without (vLLM's attention.py).
    mistral = facts(num_hidden_layers=LAYERS, model_type="mistral", sliding_window=32)
    assert (
        EAGLE3["vllm"].read(written("vllm"), mistral).notes[-1]
        == "vLLM gives the head the target's window of 32 tokens"
    )
    assert not EAGLE3["vllm"].read(written("vllm", **window), mistral).notes


def test_the_tables_of_a_draft_vocabulary():
    for name in EAGLE3:
        tensors = written(name).tensors
        assert torch.equal(tensors["d2t"] + torch.arange(len(D2T)), D2T) and tensors["d2t"].dtype == torch.int64
        assert torch.equal(tensors["t2d"].nonzero()[:, 0], D2T) and tensors["t2d"].dtype == torch.bool
        assert not {"d2t", "t2d"} & written(name, reduced=False).tensors.keys()
        assert ("embed_tokens.weight" in tensors) == (name == "speculators")
        assert written(name, reduced=False).config["draft_vocab_size"] == V
    assert written("speculators").config["norm_before_residual"] is False


REFUSED = [
    ({"norm_before_residual": True}, "norm_before_residual: found True.*vllm", ("eagle", "sglang")),
    ({"fc_norm": True}, "fc_norm: found True.*ignores it and says nothing.*--format vllm", ("eagle",)),
    ({"norm_output": True}, "norm_output: found True.*--format vllm", ("eagle",)),
    ({"aux_layers": (1, 4, 11)}, r"layers: found \[1, 4, 11\].*always reads", ("eagle",)),
    ({"aux_layers": (0, 4, 11)}, r"layers: found \[0, 4, 11\], expected layers from 1", ("sglang",)),
    ({"llama_config": llama(rope_scaling=LLAMA3)}, "rope_scaling: found llama3", ("eagle",)),
    ({"llama_config": llama(head_dim=8)}, "head_dim: found 8", ("eagle",)),
    ({"llama_config": llama(qkv_bias=True)}, "qkv_bias: found True", tuple(EAGLE3)),
    ({"llama_config": llama(sliding_window=4)}, "sliding_window: found 4, expected none", ("eagle", "llamacpp")),
    ({"own_embedding": True}, "own_embedding: found True, expected false: SGLang takes the target's", ("sglang",)),
    ({"llama_config": llama(num_layers=2)}, "num_layers: found 2, expected 1", ("eagle", "llamacpp")),
    ({"fc_norm": True}, "fc_norm: found True, expected no norms.*--version 3", ("llamacpp",)),
    ({"norm_output": True}, "norm_output: found True.*--version 3", ("llamacpp",)),
    ({"aux_layers": (1, 4)}, r"layers: found \[1, 4\], expected 3 layers", ("llamacpp",)),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "reason", "names"), REFUSED)
def test_a_head_that_a_system_would_compute_otherwise_is_refused_in_one_line(settings, reason, names):
    for name in names:
        assert not formats()[name, "eagle3"].holds(random_eagle3(**settings).config)
        with pytest.raises(InputError, match=reason) as error:
            written(name, **settings)
        assert "\n" not in str(error.value)


def test_foreign_spellings_are_one_head():
    head, plain = random_eagle3(), written("eagle")
    packages = {
        "bare": changed(plain, {"architectures": ..., "rope_parameters": ...}),
        "NeMo Automodel": Package(
            plain.config | {"architectures": ["LlamaEagle3DraftModel"]},
            {f"model.{key}": tensor for key, tensor in plain.tensors.items()},
        ),
        "ModelOpt": changed(plain, {"eagle_config": {IDS: [1, 5, 8]}}),
        "no d2t": changed(plain, {}, {"d2t": None}),
        "ids in d2t": changed(plain, {}, {"d2t": D2T}),
        "with the target's embedding": changed(plain, {}, {"embed_tokens.weight": TARGET.embed_tokens}),
    }
    for name, package in packages.items():
        imported = detect(package, TARGET).read(package, TARGET)
        assert imported.config == head.config, name
        assert all(torch.equal(imported.state[key], tensor) for key, tensor in stored_tensors(head).items())
    order = torch.randperm(len(D2T), generator=torch.Generator().manual_seed(1))
    lm_head = plain.tensors["lm_head.weight"][order]
    shuffled = changed(plain, {}, {"d2t": D2T[order] - torch.arange(len(D2T)), "lm_head.weight": lm_head})
    assert torch.equal(EAGLE3["eagle"].read(shuffled, TARGET).state["lm_head.weight"], head.lm_head.weight)
    package = written("sglang", fc_norm=True, norm_output=True)
    names = dict(zip((f"fc_norm.{i}.weight" for i in range(3)), ("low", "mid", "high"), strict=True))
    old = {f"aux_norm_{names[key]}.weight" if key in names else key: tensor for key, tensor in package.tensors.items()}
    old = Package(changed(package, {"fc_norm": ..., "use_aux_norm": True}).config, old)
    imported = EAGLE3["sglang"].read(old, TARGET)
    assert imported.config == random_eagle3(fc_norm=True, norm_output=True).config and imported.problems == ()


def test_a_head_without_lm_head_has_the_targets():
    whole = EAGLE3["vllm"].read(changed(written("vllm", reduced=False), {}, {"lm_head.weight": None}), TARGET)
    assert whole.problems == () and torch.equal(whole.state["lm_head.weight"], TARGET.lm_head)
    reduced = EAGLE3["vllm"].read(changed(written("vllm"), {}, {"lm_head.weight": None}), TARGET)
    assert where(reduced) == ["lm_head.weight"] and torch.equal(reduced.state["lm_head.weight"], TARGET.lm_head[D2T])


def test_biases_are_kept_if_the_system_creates_them():
    sizes = {"q": H, "k": 4, "v": 4, "o": H}
    biases = {f"midlayer.self_attn.{name}_proj.bias": rand(size) for name, size in sizes.items()}
    imported = EAGLE3["vllm"].read(changed(written("vllm"), {"attention_bias": True}, biases), TARGET)
    assert imported.problems == () and imported.config.llama.qkv_bias and imported.config.llama.o_bias
    assert torch.equal(imported.state["layer.self_attn.q_proj.bias"], biases["midlayer.self_attn.q_proj.bias"])
    zeros = {name: torch.zeros_like(tensor) for name, tensor in biases.items()}
    for config in ({}, {"attention_bias": True}):
        assert EAGLE3["vllm"].read(changed(written("vllm"), config, zeros), TARGET).config == random_eagle3().config


def test_without_a_target_only_a_head_that_names_its_layers_is_read():
    with pytest.raises(InputError, match=r"target: found none.*layers 2, L/2 and L-3.*Pass --target"):
        EAGLE3["vllm"].read(written("vllm"), None)
    assert EAGLE3["vllm"].read(written("vllm", aux_layers=(1, 4, 11)), None).config.aux_layers == (1, 4, 11)


def test_an_embedding_of_its_own_is_kept_where_the_server_keeps_it():
    """vLLM's llm_base_proposer.py and speculators' model.py keep it, SGLang's eagle_worker_v2.py does not. One that was
    not trained is that of another target."""
    embedding = TARGET.embed_tokens.clone()
    embedding[3:5, 2] += 0.5
    for name in ("vllm", "sglang", "eagle"):
        imported = EAGLE3[name].read(changed(written(name), {}, {"embed_tokens.weight": embedding}), TARGET)
        assert imported.config.own_embedding and torch.equal(imported.state["embed_tokens.weight"], embedding)
        assert "is the head's own: 2 of 20 rows differ from the target's, by at most 0.5." in imported.notes[0]
        assert where(imported) == ["own_embedding"] * (name == "sglang")
    theirs = written("speculators")
    assert theirs.config["embed_requires_grad"] is False
    for name in ("vllm", "speculators"):
        with pytest.raises(InputError, match=r"embed_tokens.weight: found an embedding that differs.*was trained for"):
            EAGLE3[name].read(changed(theirs, {}, {"embed_tokens.weight": embedding}), TARGET)
    with pytest.raises(InputError, match="an embedding that differs"):
        EAGLE3["vllm"].read(changed(written("vllm"), {}, {"embed_tokens.weight": embedding[:-1]}), TARGET)


def test_the_norm_of_a_later_layer_is_where_each_server_reads_it():
    """vLLM's and SGLang's llama_eagle3.py; trainers write what vLLM and speculators read (modeling_eagle.py of
    ModelOpt, eagle3/core.py of speculators)."""
    several = {"llama_config": llama(num_layers=2)}
    norm, other = "layers.1.input_layernorm.weight", "layers.1.hidden_norm.weight"
    both = written("vllm", **several)
    assert torch.equal(both.tensors[norm], both.tensors[other])
    trained = changed(both, {}, {other: None})
    assert {norm, other} & written("speculators", **several).tensors.keys() == {norm}
    assert detect(trained, TARGET).name == "vllm" and not EAGLE3["vllm"].read(trained, TARGET).problems
    assert where(EAGLE3["sglang"].read(trained, TARGET)) == [other]
    assert where(EAGLE3["eagle"].read(both, TARGET)) == ["num_layers"]
    # Two heads in one directory.
    two = changed(both, {}, {other: torch.ones(H)})
    heads = [EAGLE3[name].read(two, TARGET) for name in ("vllm", "sglang")]
    assert [where(head) for head in heads] == [[], []]
    assert torch.equal(heads[0].state[norm], both.tensors[norm]) and torch.equal(heads[1].state[norm], torch.ones(H))
    for stated in (1, 3):
        assert where(EAGLE3["vllm"].read(changed(both, {"num_hidden_layers": stated}), TARGET)) == ["num_hidden_layers"]
    with pytest.raises(InputError, match=r"layers\.1\.mlp\.down_proj\.weight is missing"):
        EAGLE3["vllm"].read(changed(both, {}, {"layers.1.mlp.down_proj.weight": None}), TARGET)


# Edit of config and tensors -> problem of each system.
DEFECTS = {
    "layers at the top only": ({IDS: list(DEFAULT)}, {}, {"vllm": [], "sglang": [IDS], "eagle": []}),
    "ids in d2t": ({}, {"d2t": D2T}, {key: ["d2t"] for key in EAGLE3}),
    "no d2t": ({}, {"d2t": None}, {key: ["d2t"] for key in EAGLE3}),
    "no t2d": ({}, {"t2d": None}, {"vllm": [], "sglang": [], "eagle": [], "speculators": ["t2d"]}),
    "no embedding": ({}, {"embed_tokens.weight": None}, {"vllm": [], "speculators": []}),
    "another class": ({"architectures": ["LlamaEagle3DraftModel"]}, {},
                      {"vllm": ["architectures"], "sglang": ["architectures"], "eagle": []}),
    "no draft_vocab_size": ({"draft_vocab_size": ...}, {},
                            {"vllm": ["draft_vocab_size"], "sglang": ["draft_vocab_size"] * 2,
                             "eagle": ["draft_vocab_size"] * 2}),
    "bias": ({"bias": True}, {}, {"sglang": None, "eagle": []}),
}  # fmt: skip


@pytest.mark.parametrize("name", DEFECTS)
def test_a_directory_that_a_system_reads_in_another_way_has_a_problem(name):
    config, tensors, expected = DEFECTS[name]
    for system, problems in expected.items():
        copy = changed(written(system), config, tensors)
        if problems is None:  # SGLang creates one of fc, which is not in the file
            with pytest.raises(InputError, match=r"no fc bias in the file"):
                EAGLE3[system].read(copy, TARGET)
        else:
            assert where(EAGLE3[system].read(copy, TARGET)) == problems, system


def test_names_of_the_layer_that_a_system_does_not_know():
    for name, format in EAGLE3.items():
        package = written(name)
        for layer in ("midlayer", "layers.0"):
            known = format.layer_names
            tensors = {key.replace(known[0], layer): tensor for key, tensor in package.tensors.items()}
            problems = [] if layer in known else [layer]
            assert where(format.read(Package(package.config, tensors), TARGET)) == problems
        prefixed = Package(package.config, {f"model.{key}": tensor for key, tensor in package.tensors.items()})
        assert where(format.read(prefixed, TARGET)) == ["model."]  # SGLang knows all names with it but lm_head


def test_one_list_of_layers_is_two_heads_to_vllm_and_sglang():
    both = {IDS: [2, 5, 8], "eagle_config": {IDS: [2, 5, 8]}}
    assert EAGLE3["vllm"].read(changed(written("vllm"), both), TARGET).config.aux_layers == (2, 5, 8)
    assert EAGLE3["sglang"].read(changed(written("sglang"), both), TARGET).config.aux_layers == (3, 6, 9)
    assert EAGLE3["eagle"].read(changed(written("eagle"), both), TARGET).config.aux_layers == DEFAULT


def test_a_speculators_directory_that_says_nothing_of_the_residual_is_two_heads():
    silent = changed(written("speculators"), {"norm_before_residual": ...})
    assert not EAGLE3["speculators"].read(silent, TARGET).config.norm_before_residual
    assert EAGLE3["vllm"].read(silent, TARGET).config.norm_before_residual


UNREADABLE = [
    ({}, {"fc.weight": rand(H, 3 * H + 1)}, r"fc.weight: found a tensor \[12, 37\]"),
    ({}, {"fc.weight": rand(H, 2 * H)}, r"layers: found \[2, 6, 9\], expected 2 distinct ones"),
    ({}, {"d2t": torch.zeros(len(D2T), dtype=torch.int64) + 19}, "d2t: found ids of"),
    ({}, {"t2d": torch.ones(V, dtype=torch.bool)}, "d2t: found ids of"),
    ({"draft_vocab_size": 9}, {}, "draft_vocab_size: found 9, expected the 8 rows of lm_head"),
    ({IDS: [2, 6, 14]}, {}, r"layers: found \[2, 6, 14\], expected 3 distinct ones.*at most 12"),
    ({IDS: "2,6,9"}, {}, "expected a list of integers"),
    ({"fc_norm": True}, {}, "fc_norm: found no norm of the target's states in the file"),
    ({"norm_before_fc": True}, {}, r"norm_before_fc: found no norm .* \(input_norm.weight\)"),
    ({"target_hidden_size": 99}, {}, "target_hidden_size: found 99"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, {}, "use_aux_hidden_state: found False, expected true"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "tensors", "words"), UNREADABLE)
def test_a_head_that_ours_cannot_be_is_refused_in_one_line(config, tensors, words):
    with pytest.raises(InputError, match=words) as error:
        EAGLE3["vllm"].read(changed(written("vllm"), config, tensors), TARGET)
    assert "\n" not in str(error.value)


def test_eagle3_of_two_states_is_not_taken_for_eagle1():
    assert head_kind(written("vllm", aux_layers=(1, 4))) == "eagle3"
