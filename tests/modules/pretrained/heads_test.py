"""Head directories: saved whole, loaded unchanged, and refused for other models."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from forked import forked
from worlds import tiny_llama_dir

from draftsmith.modules.acceptance.head import AcceptanceHead, AcceptanceHeadConfig
from draftsmith.modules.drafters.eagle import EagleConfig, EagleHead
from draftsmith.modules.drafters.eagle3 import Eagle3Config, Eagle3Head, layer_like
from draftsmith.modules.pretrained import heads as heads
from draftsmith.modules.pretrained.heads import (
    another_mode,
    build_head,
    kind_at,
    load_draft_head,
    load_head,
    save_head,
    starting_head,
    starting_settings,
)
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.pretrained.reading import read_tensors
from draftsmith.modules.types import InputError, SamplingParams

HIDDEN = 32
CARD = "# A head\n"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_lm(str(tiny_llama_dir(tmp_path_factory.mktemp("target"))))


@pytest.fixture(scope="module")
def other_target(tmp_path_factory):
    """The same config, other weights."""
    return load_lm(str(tiny_llama_dir(tmp_path_factory.mktemp("other"), seed=1)))


def acceptance_head(seed: int = 0, **changes) -> AcceptanceHead:
    torch.manual_seed(seed)
    head = AcceptanceHead(AcceptanceHeadConfig(HIDDEN, **changes))
    for weight in head.parameters():
        weight.data.normal_(std=0.3)
    return head


def eagle_head(target, seed: int = 0) -> EagleHead:
    torch.manual_seed(seed)
    return EagleHead(EagleConfig.for_target(target.config, fc_bias=True))


def manifest_of(target) -> dict:
    return {"target": target.info.identity, "sampling": {"temperature": 1.0}}


@pytest.fixture
def saved(tmp_path, target) -> Path:
    return save_head(tmp_path / "head", eagle_head(target), manifest_of(target), CARD)


def test_a_loaded_head_is_frozen_and_in_the_targets_dtype(saved, target):
    head = load_head(saved, target, kind="eagle")
    assert not head.training and not any(p.requires_grad for p in head.parameters())
    assert {p.dtype for p in head.parameters()} == {target.dtype}


def test_an_acceptance_head_stays_in_float32(tmp_path, target):
    directory = save_head(tmp_path / "head", acceptance_head(), manifest_of(target), CARD)

    class Bfloat16Target:
        info, device, dtype = target.info, target.device, torch.bfloat16

    assert {p.dtype for p in load_head(directory, Bfloat16Target()).parameters()} == {torch.float32}


def test_tied_blocks_round_trip_as_one_block(tmp_path):
    """SpecDec++'s published code repeats one block object: its "3-layer" checkpoints have tied blocks."""
    head = acceptance_head(tied=True, num_blocks=3)
    assert sum(p.numel() for p in head.parameters()) == HIDDEN * HIDDEN + HIDDEN + HIDDEN + 1
    loaded = load_head(save_head(tmp_path / "tied", head, {}, CARD))
    assert loaded.blocks[0] is loaded.blocks[1] is loaded.blocks[2]
    hidden = torch.randn(5, HIDDEN)
    assert torch.equal(loaded(hidden), head(hidden))


def edited(directory: Path, **changes) -> Path:
    """Change settings of a head directory, with their hash in its manifest."""
    config, manifest = (json.loads((directory / name).read_text()) for name in ("config.json", "manifest.json"))
    inner = config["head"]["llama"] if changes.keys() & config["head"].get("llama", {}).keys() else config["head"]
    inner.update(changes)
    (directory / "config.json").write_text(json.dumps(config))
    manifest["sha256"]["config.json"] = heads.file_sha256(directory / "config.json")
    (directory / "manifest.json").write_text(json.dumps(manifest))
    return directory


@pytest.mark.parametrize(
    "changes",
    [
        {"num_layers": 10**7},
        {"head_dim": 1, "num_heads": 32, "num_kv_heads": 16},  # fits the tensors
        {"fc_bias": 1},
        {"rope_scaling": {"kind": "longrope"}},
    ],
    ids=str,
)
def test_an_edited_config_is_one_line_before_anything_is_allocated(saved, target, changes):
    with pytest.raises(InputError, match=r"config\.json|weights") as error:
        load_head(edited(saved, **changes), target)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_weights_that_no_layer_computes_with_are_refused(saved, dtype):
    state = read_tensors(saved / "model.safetensors")
    with pytest.raises(InputError, match=f"fc.weight is {str(dtype).removeprefix('torch.')} in place of float32"):
        build_head(
            "eagle",
            starting_settings(saved, "eagle"),
            state | {"fc.weight": state["fc.weight"].to(dtype)},
        )


def test_an_eagle3_head_fits_its_targets_layers_and_ids(tmp_path, target):
    head = Eagle3Head(Eagle3Config(layer_like(target.config), (0, 1, 2), target.info.vocab_size - 1))
    directory = save_head(tmp_path / "head", head, manifest_of(target), CARD)
    state = read_tensors(directory / "model.safetensors")
    with pytest.raises(InputError, match="d2t is int32 in place of int64"):
        build_head("eagle3", head.config, state | {"d2t": state["d2t"].int()})
    assert load_head(directory, target).config == head.config
    with pytest.raises(InputError, match=r"aux_layers: found \(0, 1, 9\), expected .* 0 to 2, the target's layers"):
        load_head(edited(directory, aux_layers=[0, 1, 9]), target)


def test_a_head_of_another_model_is_refused_by_identity(saved, other_target):
    with pytest.raises(InputError, match=r"another model \(lm_head, weights differ\).*draftsmith train"):
        load_head(saved, other_target)


def test_an_unknown_kind_is_refused(tmp_path):
    directory = save_head(tmp_path / "head", acceptance_head(), {}, CARD)
    for name in ("config.json", "manifest.json"):
        content = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps({**content, "kind": "hydra9", "sha256": {}}))
    with pytest.raises(InputError, match=r"kind: found hydra9, expected acceptance or .* or eagle3 or hydra"):
        load_head(directory)


def test_changed_bytes_are_found(saved):
    content = bytearray((saved / "model.safetensors").read_bytes())
    content[len(content) // 2] ^= 1
    (saved / "model.safetensors").write_bytes(content)
    with pytest.raises(InputError, match=r"model\.safetensors: found missing or changed content"):
        load_head(saved)


def test_a_directory_without_a_manifest_is_not_a_head(saved, tmp_path):
    (saved / "manifest.json").unlink()
    for path in (saved, tmp_path / "nowhere"):
        with pytest.raises(InputError, match="a head directory"):
            load_head(path)


def test_a_save_that_fails_leaves_the_older_head_whole(saved, target):
    before = {file.name: file.read_bytes() for file in saved.iterdir()}
    # A manifest that is no JSON fails after the weights were written: a real failure in the middle.
    with pytest.raises(TypeError):
        save_head(saved, acceptance_head(), {**manifest_of(target), "seed": object()}, CARD)
    assert [path.name for path in saved.parent.iterdir()] == ["head"]
    assert {file.name: file.read_bytes() for file in saved.iterdir()} == before
    load_head(saved, target)


def test_a_directory_says_what_it_is(saved, tmp_path):
    model = tiny_llama_dir(tmp_path / "model")
    assert [kind_at(path) for path in (saved, model, tmp_path / "nowhere", "embedded:draft")] == ["eagle", *[None] * 3]


def test_what_does_not_draft_is_no_drafter(saved, tmp_path, target):
    assert load_draft_head(saved, target).kind == "eagle"
    directory = save_head(tmp_path / "other", acceptance_head(), {}, CARD)
    with pytest.raises(InputError, match="an acceptance head, expected a drafter"):
        load_draft_head(directory, target)


def test_a_head_to_train_on_is_float32_trainable_and_of_no_particular_model(saved, other_target):
    head = starting_head(saved, "eagle", HIDDEN, other_target.info.vocab_size)
    assert head.training and all(p.requires_grad and p.dtype == torch.float32 for p in head.parameters())
    frozen = load_head(saved).state_dict()
    assert all(torch.equal(value, frozen[name]) for name, value in head.state_dict().items())
    assert starting_settings(saved, "eagle", HIDDEN) == head.config


@pytest.mark.parametrize(
    ("directory", "kind", "width", "vocab", "expected"),
    [
        ("head", "eagle", 16, None, "init: found .* of width 32, expected width 16"),
        ("head", "eagle", HIDDEN, 7, "init: found .* of vocabulary .*, expected 7"),
        ("head", "acceptance", HIDDEN, None, "eagle head, expected an acceptance head"),
        ("nowhere", "eagle", HIDDEN, None, "init: found .*nowhere"),
    ],
)
def test_a_head_that_cannot_be_trained_on_is_refused(saved, directory, kind, width, vocab, expected):
    with pytest.raises(InputError, match=expected):
        starting_head(saved.with_name(directory), kind, width, vocab)


@pytest.mark.parametrize(
    ("sampling", "params", "expected"),
    [
        ({"temperature": 0.0}, SamplingParams(0.0, top_k=5), None),
        ({"temperature": 1.0}, SamplingParams(), r"'temperature': 1.0.*data acceptance --temperature 0 "),
        ({"temperature": 1.0}, SamplingParams(1.0, top_k=9), r"'top_k': 0.* --temperature 1 --top-k 9 "),
    ],
)
def test_another_mode_than_the_labels_is_a_warning_with_a_command(tmp_path, sampling, params, expected):
    manifest = {"sampling": {"top_k": 0, "top_p": 1.0, **sampling}}
    warning = another_mode(save_head(tmp_path / "head", acceptance_head(), manifest, "card"), params)
    assert warning is None if expected is None else re.search(expected, str(warning))


def test_a_file_that_is_cut_later_leaves_a_loaded_head_whole(saved, target):
    def cut() -> None:
        head = load_head(saved, target)
        (saved / "model.safetensors").write_bytes(b"")
        assert all(weight.isfinite().all() for weight in head.parameters())

    process = forked(cut)
    process.join()
    assert process.exitcode == 0
