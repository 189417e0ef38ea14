"""DFlash and DSpark heads in other systems' directories: round trips, trainers' spellings, and planted defects."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from foreign_heads import CONTEXT, LLAMA3, PART, TARGET, YARN, H, V, assert_same, changed, facts, llama, where

from draftsmith.modules.drafters import head_class
from draftsmith.modules.drafters.block.net import layers_like
from draftsmith.modules.formats import formats
from draftsmith.modules.formats.base import Package
from draftsmith.modules.formats.foreign import detect
from draftsmith.modules.formats.gguf import head_from_gguf, head_to_gguf
from draftsmith.modules.pretrained.heads import build_head, stored_tensors
from draftsmith.modules.rotary import rope_frequencies
from draftsmith.modules.types import InputError

SERVERS = ("vllm", "sglang", "speculators")
OWN_VOCABULARY = ("vllm", "speculators", "llamacpp")
CAPTURE, OUTPUTS, SLOTS, MASK = (2, 5, 9), [1, 4, 8], 4, 17
SELECTOR = {"conv_kernel": 3, "conv_group": 2, "selector_rank": 3, "selector_top_k": 3}
# Kind and shape -> the systems that hold it.
HELD: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "dflash": ("dflash", {"layout": "fill-in"}, (*SERVERS, "llamacpp")),
    "windowed": ("dflash", {"layout": "fill-in", "window": 6}, (*SERVERS, "llamacpp")),
    "dflash2": ("dflash2", {"layout": "fill-in", **SELECTOR}, (*SERVERS, "llamacpp")),
    "windowed2": ("dflash2", {"layout": "fill-in", "window": 6, **SELECTOR}, (*SERVERS, "llamacpp")),
    "dspark": ("dspark", {"markov_rank": 3, "confidence": True}, (*SERVERS, "llamacpp")),
    "unsure": ("dspark", {"markov_rank": 3, "rope": LLAMA3}, SERVERS),
    "yarn": ("dspark", {"markov_rank": 3, "rope": YARN}, (*SERVERS, "llamacpp")),
    "half a head": ("dspark", {"markov_rank": 3, "rope": PART}, ("vllm", "sglang", "llamacpp")),
    "filling": ("dspark", {"markov_rank": 3, "confidence": True, "layout": "fill-in"}, (*SERVERS, "llamacpp")),
    "gated": ("dspark", {"markov_rank": 3, "confidence": True, "markov_type": "gated"}, ("sglang", "speculators")),
    "rnn": ("dspark", {"markov_rank": 3, "markov_type": "rnn"}, ("sglang", "speculators")),
    "reduced": ("dspark", {"markov_rank": 3, "confidence": True, "draft_vocab_size": 12}, OWN_VOCABULARY),
    "reduced fill-in": ("dflash", {"layout": "fill-in", "draft_vocab_size": 12}, OWN_VOCABULARY),
    # The embedding and the state after the last of twelve layers.
    "ends": ("dspark", {"markov_rank": 3, "aux_layers": (0, 5, 12)}, ("vllm", "speculators")),
    "bidirectional": ("dflash", {"layout": "fill-in", "window": 6, "causal": False}, (*SERVERS, "llamacpp")),
    "causal": ("dspark", {"markov_rank": 3, "causal": True}, ("vllm", "sglang", "llamacpp")),
    "mixed": ("dflash", {"layout": "fill-in", "window": 6, "full_layers": (1,)}, ("vllm", "sglang")),
    "mixed spark": ("dspark", {"markov_rank": 3, "window": 6, "full_layers": (0,)}, SERVERS),
    "mixed2": (
        "dflash2",
        {"layout": "fill-in", "window": 6, "full_layers": (0,), "causal": False, **SELECTOR},
        (*SERVERS, "llamacpp"),
    ),
}
CASES = [(case, name) for case, (_, _, names) in HELD.items() for name in names]


def random_block(case: str = "dspark", **changes: Any) -> Any:
    """Return a head whose parameters are all random."""
    kind, shape, _ = HELD[case]
    shape = {**shape, **changes}
    window, rope, layers_read = shape.pop("window", None), shape.pop("rope", None), shape.pop("aux_layers", CAPTURE)
    layers = layers_like(llama(**({} if rope is None else {"rope_scaling": rope})), 2)
    torch.manual_seed(4)
    fields = {**vars(layers), "sliding_window": window}
    made = head_class(kind)
    head = made(made.Config(type(layers)(**fields), layers_read, SLOTS, MASK, **shape)).requires_grad_(False)
    for weight in head.parameters():
        weight.normal_(std=0.4)
    if head.tokens is not None:
        head.use_draft_vocabulary(torch.randperm(V)[: len(head.tokens)].sort().values)
    return head


def written(name: str, case: str = "dspark", dtype: torch.dtype = torch.float32, **changes: Any) -> Package:
    head = random_block(case, **changes).to(dtype)
    return formats()[name, head.kind].write(head.config, stored_tensors(head), dtype, TARGET)


def read_gguf(metadata: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Package:
    return head_from_gguf({"general.architecture": "dflash", **metadata}, tensors)


@pytest.mark.parametrize(("case", "name"), CASES)
def test_a_head_comes_back_bit_by_bit(case, name):
    for dtype in (torch.float32, torch.bfloat16):
        head, package = random_block(case).to(dtype), written(name, case, dtype)
        if name == "llamacpp":
            package = read_gguf(*head_to_gguf(package))
        assert_same(formats()[name, head.kind].read(package, TARGET), head)
        found = detect(package, TARGET)
        alike = name == "sglang" and "vllm" in HELD[case][2]
        assert (found.name, found.kind) == ("vllm" if alike else name, head.kind)


def test_config_json_is_what_servers_read():
    """Names of DeepSpec and z-lab: layers are numbered by their outputs, and no switch is left to a default."""
    config = written("vllm").config
    wanted = {
        "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "block_size": SLOTS, "mask_token_id": MASK,
        "target_layer_ids": OUTPUTS, "num_target_layers": 12, "sample_from_anchor": True, "markov_rank": 3,
        "markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True,
        "layer_types": ["full_attention"] * 2, "attention_bias": False, "tie_word_embeddings": False,
    }  # fmt: skip
    assert {name: config[name] for name in wanted} == wanted
    assert written("sglang").config == config
    config = written("vllm", "dflash").config
    assert config["architectures"] == ["DFlashDraftModel"] and config["sample_from_anchor"] is False
    assert config["dflash_config"] == {"mask_token_id": MASK, "target_layer_ids": OUTPUTS}
    assert not {"markov_rank", "enable_confidence_head", "mask_token_id"} & config.keys()
    config, sizes = written("vllm", "dflash2").config, {"conv_kernel_size": 3, "conv_group_size": 2}
    sizes |= {"selector_rank": 3, "selector_top_k": 3}
    assert config["architectures"] == ["DFlash2DraftModel"] and written("sglang", "dflash2").config == config
    assert config["dflash_config"] == {"mask_token_id": MASK, "target_layer_ids": OUTPUTS, **sizes}
    capped = dataclasses.replace(TARGET, raw={**TARGET.raw, "final_logit_softcapping": 30.0})
    head = random_block("dflash2")
    config = formats()["vllm", "dflash2"].write(head.config, stored_tensors(head), torch.float32, capped).config
    assert config["dflash_config"]["final_logit_softcapping"] == 30.0
    config = written("speculators", "dflash2").config
    assert {name: config[name] for name in sizes} == sizes and config["speculators_model_type"] == "dflash2"
    config = written("vllm", "unsure").config
    assert config["enable_confidence_head"] is False and config["confidence_head_with_markov"] is False
    config = written("speculators").config
    assert config["aux_hidden_state_layer_ids"] == list(CAPTURE) and config["sample_from_anchor"] is True
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == SLOTS
    assert not {"embed_tokens.weight", "lm_head.weight"} & written("speculators").tensors.keys()


REFUSED = [
    ("gated", {}, "markov_type: found gated, expected vanilla: vLLM computes no other.*train dspark", ("vllm",)),
    ("dspark", {"markov_rank": 0, "confidence": False}, "markov_rank: found 0.*refuses DSpark without", SERVERS),
    ("dflash", {"layout": "anchor-first"}, "layout: found anchor-first, expected fill-in", (*SERVERS, "llamacpp")),
    ("dflash2", {"selector_top_k": 4}, r"selector_top_k: found 4, .* <= 12, the hidden size: llama.cpp", ("llamacpp",)),
    ("dflash2", {"confidence": True}, "markov_rank, confidence: found True, expected neither in a dflash2", SERVERS),
    ("half a head", {}, "partial_rotary_factor: found 0.5, expected 1: speculators rotates whole", ("speculators",)),
    ("reduced", {}, "draft_vocab_size: found 12, expected the target's whole vocabulary: SGLang maps no", ("sglang",)),
    ("ends", {"aux_layers": (2, 5, 12)}, r"layers: found \[2, 5, 12\], expected at most 11: .* gives no",
     ("sglang", "llamacpp")),
    ("ends", {"aux_layers": (0, 5, 9)}, "expected layers from 1: SGLang counts outputs", ("sglang",)),
    # After the final norm.
    ("ends", {"aux_layers": (2, 5, 13)}, "expected at most 12: .* gives no state behind", ("vllm", "speculators")),
    ("mixed", {}, r"full_layers: found \[1\], expected none: vLLM makes these causal", ("speculators",)),
    ("causal", {}, "causal: found True, expected false: speculators has no causal layers without", ("speculators",)),
    ("dspark", {"window": 6, "causal": False}, "causal: found False, expected true within a window", ("speculators",)),
    ("mixed spark", {}, "causal: found that of windowed layers alone, expected one value.*llama.cpp", ("llamacpp",)),
]  # fmt: skip


@pytest.mark.parametrize(("case", "changes", "reason", "names"), REFUSED)
def test_a_head_that_a_system_does_not_serve_is_refused_in_one_line(case, changes, reason, names):
    for name in names:
        with pytest.raises(InputError, match=reason) as error:
            written(name, case, **changes)
        assert "\n" not in str(error.value)


def deepspec(case: str, tensors: dict[str, Any] | None = None, **config: Any) -> Package:
    """As DeepSpec saves: the target's config with more fields and without a layout, and the target's tables."""
    head = random_block(case)
    fields = {
        **written("sglang", "dspark").config, "num_anchors": 512, "sample_from_anchor": ...,
        "markov_rank": head.config.markov_rank, "enable_confidence_head": head.config.confidence,
        "rope_theta": 5000.0, **config,
    }  # fmt: skip
    tables = {"embed_tokens.weight": TARGET.embed_tokens, "lm_head.weight": TARGET.lm_head}
    return changed(Package({}, stored_tensors(head)), fields, tables | (tensors or {}))


def test_every_trainers_spelling_is_the_same_head():
    head, plain = random_block(), written("vllm")
    inner = ("mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type", "enable_confidence_head",
             "confidence_head_with_markov")  # fmt: skip
    nested = {name: plain.config[name] for name in inner}
    removed = dict.fromkeys((*inner, "sample_from_anchor"), ...)
    flat = {name.replace("markov_head.", "").replace("confidence_head.proj", "confidence_proj"): tensor
            for name, tensor in plain.tensors.items()}  # fmt: skip
    modelopt = {"shift_label": True, "projector_type": "dspark", "use_confidence_head": True, **nested}
    del modelopt["enable_confidence_head"], modelopt["confidence_head_with_markov"]
    packages = {
        "deepspec": deepspec("dspark"),
        "specforge": changed(plain, {**removed, "architectures": ["DSparkDraftModel"], "dflash_config": nested}),
        "modelopt": Package(
            changed(plain, {**removed, "architectures": ["DFlashDraftModel"], "dflash_config": modelopt}).config, flat
        ),
    }  # fmt: skip
    for name, package in packages.items():
        format = detect(package, TARGET)
        assert (format.name, format.kind) == (name, "dspark")
        assert_same(format.read(package, TARGET), head)
    # No server knows ModelOpt's names.
    assert "markov_w1.weight" in where(formats()["vllm", "dspark"].read(packages["modelopt"], TARGET))


def test_deepspecs_dflash_is_anchor_first_and_no_server_takes_it():
    package = deepspec("dflash")
    format = detect(package, TARGET)
    assert (format.name, format.kind) == ("deepspec", "dflash")
    assert format.read(package, TARGET).config == random_block("dflash", layout="anchor-first").config
    assert where(formats()["vllm", "dflash"].read(package, TARGET)) == ["architectures"]
    with pytest.raises(InputError, match="layout: found anchor-first"):
        formats()["vllm", "dflash"].check(format.read(package, TARGET).config)


def test_a_confidence_head_that_reads_the_state_alone_is_given_zeros():
    weight = written("sglang").tensors["confidence_head.proj.weight"]
    package = changed(
        written("sglang"), {"confidence_head_with_markov": False}, {"confidence_head.proj.weight": weight[:, :H]}
    )
    imported = formats()["sglang", "dspark"].read(package, TARGET)
    got = imported.state["confidence_head.proj.weight"]
    assert torch.equal(got[:, :H], weight[:, :H]) and not got[:, H:].any() and imported.notes


def test_what_is_assumed_or_left_out_of_a_config_is_noted():
    """A target that caps its logits so, too, gives the head's."""
    edit = {"block_size": ..., "rms_norm_eps": ..., "output_multiplier": 2.0, "final_logit_softcapping": 30.0}
    format, package = formats()["vllm", "dspark"], changed(written("vllm"), edit, {})
    imported = format.read(package, TARGET)
    assert imported.config.block_size == 16 and imported.config.llama.rms_eps == 1e-6
    assert [note.split()[0] for note in imported.notes if note.split()[0] in edit] == [
        "rms_norm_eps", "output_multiplier", "final_logit_softcapping", "block_size",
    ]  # fmt: skip
    capped = dataclasses.replace(TARGET, raw={**TARGET.raw, "final_logit_softcapping": 30.0})
    assert not [note for note in format.read(package, capped).notes if "softcapping" in note]
    assert not [note for note in format.read(written("vllm"), TARGET).notes if note.split()[0] in edit]


# Case, edit of config and tensors, problem of each system.
DEFECTS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, list[str]]]] = {
    "confidence unsaid": ("dspark", {"enable_confidence_head": ...}, {},
                          {"vllm": ["enable_confidence_head"], "sglang": []}),
    "token unsaid": ("dspark", {"confidence_head_with_markov": ...}, {},
                     {"vllm": ["confidence_head_with_markov"], "sglang": []}),
    "no Markov type": ("dspark", {"markov_head_type": ...}, {}, {"vllm": [], "sglang": ["markov_head_type"]}),
    "prefix": ("dflash", {}, {"model.fc.weight": "fc.weight"}, {"vllm": ["model."], "sglang": ["model."]}),
}  # fmt: skip


@pytest.mark.parametrize("name", DEFECTS)
def test_a_directory_that_a_system_reads_in_another_way_has_a_problem(name):
    case, config, tensors, expected = DEFECTS[name]
    plain = written("sglang", case)
    moved = {new: plain.tensors[old] for new, old in tensors.items()} | dict.fromkeys(tensors.values())
    for system, problems in expected.items():
        package = changed(plain, config, moved)
        assert where(formats()[system, HELD[case][0]].read(package, TARGET)) == problems, system


def test_silent_traps_are_other_heads():
    """Nothing in such a directory says that it is wrong: the record of an export, or its head, does."""
    read = {name: formats()[name, "dspark"].read for name in SERVERS}
    assert read["vllm"](changed(written("vllm"), {"sample_from_anchor": False}), TARGET).config.layout == "fill-in"
    late = changed(written("vllm"), {"target_layer_ids": [2, 5, 9]})
    assert read["vllm"](late, TARGET).config.aux_layers == (3, 6, 10)
    assert read["vllm"](changed(written("vllm"), {"mask_token_id": 0}), TARGET).config.mask_token == 0
    # Without the flag a directory is older than it, and filled in; speculators 0.9 would draft from the anchor.
    unsaid = changed(written("speculators"), {"sample_from_anchor": ...})
    assert where(read["speculators"](unsaid, TARGET)) == ["sample_from_anchor"]
    assert all(read[name](unsaid, TARGET).config.layout == "fill-in" for name in ("vllm", "speculators"))


def test_rows_of_drafted_tokens_in_any_order_come_back_sorted():
    head, package, order = random_block("reduced"), written("vllm", "reduced"), torch.randperm(12)
    rows = {name: package.tensors[name][order] for name in ("lm_head.weight", "markov_head.markov_w2.weight")}
    offsets = {"d2t": head.d2t[order] - torch.arange(12)}
    imported = formats()["vllm", "dspark"].read(changed(package, {}, rows | offsets), TARGET)
    assert_same(imported, head)
    assert imported.notes == ("the draft vocabulary is sorted by id",)


def test_states_are_joined_by_the_layers_and_by_deepspecs_list():
    """Servers capture states layer by layer; DeepSpec's extract_context_feature follows the list. ModelOpt takes both
    from transformers' hidden_states, of which the last one is normed (hf_dspark.py)."""
    head, listed = random_block(), {"target_layer_ids": [8, 1, 4]}
    served = formats()["vllm", "dspark"].read(changed(written("vllm"), listed), TARGET)
    assert_same(served, head)
    (note,) = served.notes
    assert note.endswith("target_layer_ids 8, 1, 4: vLLM has the states in the order of the layers")
    trained = formats()["deepspec", "dspark"].read(deepspec("dspark", **listed), TARGET)
    first, second, third = head.fc.weight.chunk(3, 1)
    assert trained.config.aux_layers == CAPTURE
    assert torch.equal(trained.state["fc.weight"], torch.cat([second, third, first], 1))
    last = changed(written("vllm"), {"shift_label": True, "target_layer_ids": [11, 1, 4]})
    read = {name: formats()[name, "dspark"].read(last, TARGET) for name in ("modelopt", "vllm")}
    assert [own.config.aux_layers for own in read.values()] == [(2, 5, 13), (2, 5, 12)]
    assert torch.equal(read["modelopt"].state["fc.weight"], torch.cat([second, third, first], 1))


def test_vllm_takes_the_causality_of_windows_for_that_of_all_layers():
    """Met in its engine: one accepted token in eighty, and nothing says why. Of DSpark it reads none."""
    for case, said, lost in (
        ("dflash", False, True), ("dflash2", False, True), ("windowed", True, False), ("windowed", ..., True),
        ("windowed2", ..., False), ("mixed2", False, True), ("mixed spark", True, True), ("mixed spark", ..., False),
    ):  # fmt: skip
        kind = HELD[case][0]
        package = written("speculators", case)
        assert formats()["vllm", kind].read(package, TARGET).problems == ()
        copy = changed(package, {"sliding_window_non_causal": said})
        theirs, served = (formats()[name, kind].read(copy, TARGET) for name in ("speculators", "vllm"))
        assert theirs.problems == () and where(served) == ["sliding_window_non_causal"] * lost, (case, said)
        assert (served.config != theirs.config) is lost


WINDOW = {"sliding_window": 6, "use_sliding_window": True}
SWA = {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": OUTPUTS, "use_swa": True, "swa_window_size": 6}}
SLIDES = ["sliding_attention"] * 2
# Fields of `config.json` -> window, full layers and causality in vLLM (models/qwen3_dflash.py) and in SGLang
# (models/dflash.py), which reads no ModelOpt's.
FULL = (None, (), False)
ATTENTION: list[tuple[dict[str, Any], tuple[Any, ...], tuple[Any, ...]]] = [
    ({}, FULL, FULL),
    ({"layer_types": SLIDES, **WINDOW}, (6, (), True), (6, (), True)),
    ({"layer_types": SLIDES, **WINDOW, "is_causal": False}, (6, (), False), (6, (), False)),
    ({"layer_types": [*SLIDES[:1], "full_attention"], **WINDOW}, (6, (1,), None), (6, (1,), None)),
    ({"is_causal": True}, (None, (), True), (None, (), True)),
    ({"layer_types": ..., **WINDOW, "max_window_layers": 1}, (6, (0,), None), (6, (0,), None)),
    (WINDOW, FULL, FULL),
    (SWA, (6, (), False), FULL),
    ({"dflash_config": {**SWA["dflash_config"], "causal": True}}, (6, (), True), FULL),
    ({"dflash_config": {**SWA["dflash_config"], "causal": True}, "is_causal": False}, (6, (), False), FULL),
]


@pytest.mark.parametrize(("fields", "vllm", "sglang"), ATTENTION)
def test_windows_and_causality_are_read_as_each_server_does(fields, vllm, sglang):
    package = changed(written("vllm", "dflash"), {"is_causal": ..., **fields})
    for name, wanted in (("vllm", vllm), ("sglang", sglang)):
        read = formats()[name, "dflash"].read(package, TARGET)
        assert (read.config.llama.sliding_window, read.config.full_layers, read.config.causal) == wanted, name
        assert read.problems == ()
    # transformers gives servers no window then.
    idle = changed(written("vllm", "windowed"), {"use_sliding_window": ...})
    assert where(formats()["sglang", "dflash"].read(idle, TARGET)) == ["use_sliding_window"]


def test_speculators_computes_blocks_from_the_anchor_and_without_a_markov_head():
    """Its own classes' logits of such heads are ours within 7e-6; vLLM, which serves its directories, refuses them."""
    anchor = changed(written("speculators", "dflash"), {"sample_from_anchor": True})
    bare = changed(written("speculators", "dspark"), {"markov_rank": 0, "enable_confidence_head": False})
    bare = Package(bare.config, {n: t for n, t in bare.tensors.items() if not n.startswith(("markov", "confidence"))})
    for kind, package in (("dflash", anchor), ("dspark", bare)):
        problems = {name: formats()[name, kind].read(package, TARGET).problems for name in ("speculators", "vllm")}
        assert problems["speculators"] == () and problems["vllm"]


TABLE = torch.zeros(V, H)
UNREADABLE = [
    ("dspark", {}, {"markov_head.markov_w2.weight": None}, "markov_head.markov_w2.weight is missing"),
    ("dspark", {"target_layer_ids": [1, 4]}, {}, r"target_layer_ids: found \[1, 4\], expected 3 distinct"),
    ("dspark", {"target_layer_ids": [1, 4, 12]}, {}, r"outputs of layers below 12"),
    ("dspark", {"draft_vocab_size": 12}, {}, "d2t: found none, and no t2d"),
    ("dspark", {"mask_token_id": V}, {}, "mask_token_id: found 20, expected a token of the target's 20"),
    ("dspark", {"markov_head_type": "cond"}, {}, "markov_type: found 'cond'"),
    ("windowed", {"layer_types": ["sliding_attention"]}, {}, "layer_types: found 1 layers, expected 2"),
    ("windowed", {"sliding_window": ...}, {}, "sliding_window: found 0, expected a positive integer"),
    ("bidirectional", {"sliding_window": 3}, {}, "sliding_window: found 3, expected 4 or more"),
    ("dspark", {"layer_types": 3}, {}, "layer_types: found 3, expected a list of names"),
    ("dspark", {"target_layer_ids": []}, {}, r"target_layer_ids: found \[\], expected a list of integers"),
    ("dspark", {"architectures": 7}, {"confidence_head.proj.weight": torch.zeros(3)}, r"proj.weight is \[3\]"),
    ("dflash2", {"input_embedding_scale": 3.0}, {}, "input_embedding_scale: found 3.0, expected 1.0, as our drafter"),
    ("dflash", {"attention_value_scale": 0.707}, {}, "attention_value_scale: found 0.707, expected 1.0"),
    ("dflash2", {"final_logit_softcapping": 30.0}, {}, "final_logit_softcapping: found 30.0, expected None"),
    ("dflash2", {"dflash_config": {"mask_token_id": MASK}}, {}, "conv_kernel_size: found 0, expected a positive"),
    ("dflash2", {}, {"candidate_selector.predecessor_codebook": None}, "predecessor_codebook is missing"),
    ("dflash2", {}, {"layers.0.mlp_conv.base_kernel": torch.zeros(2, 2, H)}, "base_kernel is .2, 2,"),
    ("dspark", {}, {"lm_head.weight": TABLE}, "lm_head.weight: found one that differs from the target's"),
    ("dspark", {}, {"embed_tokens.weight": TABLE}, "an embedding that differs from the target's"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "config", "tensors", "words"), UNREADABLE)
def test_a_head_that_ours_cannot_be_is_refused_in_one_line(case, config, tensors, words):
    with pytest.raises(InputError, match=words) as error:
        formats()["sglang", HELD[case][0]].read(changed(written("sglang", case), config, tensors), TARGET)
    assert "\n" not in str(error.value)


def test_rotary_pairs_of_neighbors_become_halves():
    """Products of turned queries and keys are those of the file's order, turned pair by pair."""
    package = changed(written("sglang"), {"rope_is_neox_style": False})
    read = formats()["sglang", "dspark"].read(package, TARGET)
    llama, angle = read.config.llama, 7.0 * rope_frequencies(read.config.llama)  # [D / 2]

    def turned(rows, pairs):  # [D] at position 7
        one, two = rows.unflatten(0, pairs).unbind(pairs.index(2))
        both = one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin()
        return torch.stack(both, pairs.index(2)).flatten()

    for prefix in ("layers.0.self_attn.", "layers.1.self_attn."):
        files = (read.state, package.tensors)
        here, there = ({part: own[f"{prefix}{part}_proj.weight"] for part in "qk"} for own in files)
        for head in range(llama.num_kv_heads):
            rows = slice(head * llama.head_dim, (head + 1) * llama.head_dim)
            ours = turned(here["q"][rows, 0], (2, -1)) @ here["k"][rows, 1]
            assert torch.allclose(ours, turned(there["q"][rows, 0], (-1, 2)) @ there["k"][rows, 1], atol=1e-5)
    assert not formats()["vllm", "dspark"].read(package, TARGET).notes  # it knows another field


def test_what_llamacpp_reads():
    """src/models/dflash.cpp: layers by the states before them, rotary halves as they are, the mask token's own key."""
    package = written("llamacpp", "windowed")
    metadata, tensors = head_to_gguf(package)
    assert metadata["dflash.target_layers"] == list(CAPTURE) and metadata["dflash.block_size"] == SLOTS
    assert metadata["tokenizer.ggml.mask_token_id"] == MASK and metadata["dflash.attention.causal"] is True
    assert metadata["dflash.context_length"] == CONTEXT
    assert torch.equal(tensors["blk.1.attn_q.weight"], package.tensors["layers.1.self_attn.q_proj.weight"])
    metadata, tensors = head_to_gguf(written("llamacpp"))
    assert metadata["dflash.sample_from_anchor"] is True and metadata["dflash.has_confidence_head"] is True
    assert {"markov_w1.weight", "markov_w2.weight", "conf_proj.weight", "conf_proj.bias", "enc.output_norm.weight"} < {
        *tensors
    }
    assert not {"token_embd.weight", "output.weight"} & tensors.keys()
    package = written("llamacpp", "dflash2")
    both = head_to_gguf(package)
    # conversion/qwen.py and gguf-py's tensor_mapping.py: names without an own weight get one, but for base kernels.
    assert [both[0][f"dflash.{name}"] for name in ("conv_kernel_size", "conv_group_size")] == [3, 2]
    assert [both[0][f"dflash.{name}"] for name in ("selector_rank", "selector_top_k")] == [3, 3]
    for theirs, name in (
        ("selector_predecessor.weight", "candidate_selector.predecessor_codebook"),
        ("selector_successor.weight", "candidate_selector.successor_codebook"),
        ("selector_hidden.weight", "candidate_selector.hidden_projection.weight"),
        ("blk.1.attn_conv_base", "layers.1.attention_conv.base_kernel"),
        ("blk.1.ffn_conv_proj.weight", "layers.1.mlp_conv.kernel_projection.weight"),
    ):
        assert torch.equal(both[1][theirs], package.tensors[name])
    unheard = {**metadata, "dflash.has_confidence_head": False}
    read = formats()["llamacpp", "dspark"].read
    assert where(read(read_gguf(unheard, tensors), TARGET)) == ["enable_confidence_head"]
    package = read_gguf(metadata, tensors)
    assert where(read(package, facts(model_type="qwen2", num_hidden_layers=12))) == ["target"]


@pytest.mark.parametrize("case", ["dspark", "gated", "rnn", "dflash2"])
def test_a_factor_on_the_targets_logits_is_within_the_written_head(case):
    """Servers borrow lm_head and have no factor (Granite): logits and confidences are ours with it."""
    head, target = random_block(case), dataclasses.replace(TARGET, scale=0.3)
    format = formats()["sglang", head.kind]
    package = format.write(head.config, stored_tensors(head), torch.float32, target)
    served = format.read(package, TARGET)
    state, previous = torch.randn(5, H), torch.randint(V, (5,))

    def outputs(net: Any, factor: float) -> list[torch.Tensor]:
        hidden = net.norm(state)
        z = net.sequential.step(hidden, previous)[0]
        logits = net.sequential.add(hidden @ TARGET.lm_head.T * factor, z)
        return [logits, net.confidence(hidden, previous)] if net.config.confidence else [logits]

    theirs = build_head(head.kind, served.config, served.state)
    torch.testing.assert_close(outputs(theirs, 1.0), outputs(head, 0.3))
    again = format.read(package, target).state
    torch.testing.assert_close(again, dict(stored_tensors(head)))


def test_a_softcap_that_no_server_has_is_said():
    bounded = dataclasses.replace(TARGET, left_out="softcap")
    imported = formats()["vllm", "dspark"].read(written("vllm"), bounded)
    assert imported.notes == ("vLLM drafts from logits without the target's softcap",)
    head = random_block("dflash2")  # to whose logits a selector adds
    with pytest.raises(InputError, match="target: found a target with a softcap, expected none: speculators"):
        formats()["speculators", "dflash2"].check(head.config, bounded)
    formats()["vllm", "dflash2"].check(head.config, bounded)
