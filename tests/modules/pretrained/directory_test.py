"""Directories of other projects' heads: read whole or refused in one line; nothing in them runs or leads elsewhere."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.modules.pretrained import hub
from draftsmith.modules.pretrained.directory import read_package, weight_files
from draftsmith.modules.types import InputError


def weights() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"fc.weight": torch.randn(4, 8).bfloat16(), "layers.0.self_attn.q_proj.weight": torch.randn(4, 4)}


@pytest.fixture
def head(tmp_path) -> Path:
    directory = tmp_path / "repo" / "head"
    directory.mkdir(parents=True)
    (directory / "config.json").write_text('{"hidden_size": 4}')
    return directory


def refusal(directory: Path) -> str:
    """Return the error of reading this directory, which is one line."""
    with pytest.raises(InputError) as error:
        read_package(str(directory))
    assert "\n" not in str(error.value)
    return str(error.value)


def assert_same(found, expected) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
        assert type(found[name]) is Tensor and not found[name].requires_grad


def save_torch(content: object, file: Path, legacy: bool = False) -> None:
    torch.save(content, file, _use_new_zipfile_serialization=not legacy)


# Each way in which published heads store their weights.
LAYOUTS: dict[str, Callable[[Path], object]] = {
    "safetensors": lambda d: save_file(weights(), d / "model.safetensors"),
    "safetensors of another name": lambda d: save_file(weights(), d / "head.safetensors"),
    "zip": lambda d: save_torch(weights(), d / "pytorch_model.bin"),
    "legacy": lambda d: save_torch(weights(), d / "pytorch_model.bin", legacy=True),
    "parameters": lambda d: save_torch({n: torch.nn.Parameter(t) for n, t in weights().items()}, d / "head.bin"),
    "a trainer's leavings": lambda d: (
        save_torch(weights(), d / "pytorch_model.bin"), save_torch({"lr": 1.0}, d / "training_args.bin"),
        save_torch({"step": 3}, d / "optimizer.pt"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_come_back_as_they_were_stored(head, layout):
    LAYOUTS[layout](head)
    package = read_package(str(head))
    assert package.config == {"hidden_size": 4}
    assert_same(package.tensors, weights())


class Evil:
    """An object whose unpickling makes a directory."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize(
    ("form", "name"),
    [("zip", "pytorch_model.bin"), ("legacy", "head.bin"), ("bare pickle", "head.pt")],
)
def test_code_in_a_pickle_is_refused_and_never_run(head, tmp_path, form, name):
    marker, file = tmp_path / "ran", head / name
    content = {**weights(), "evil": Evil(marker)}
    if form == "bare pickle":
        file.write_bytes(pickle.dumps(Evil(marker), protocol=2))
    else:
        save_torch(content, file, legacy=form == "legacy")
    message = refusal(head)
    assert not marker.exists()
    assert str(file) in message and "weights_only" not in message  # torch advises to switch its check off
    assert f"{os.mkdir.__module__}.mkdir" in message
    pickle.loads(pickle.dumps(Evil(marker)))
    assert marker.exists()  # it would have run


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (torch.ones(3), "a Tensor"),
        ({"state_dict": weights()}, "'state_dict' (dict)"),
        ({**weights(), "step": 3}, "'step' (int)"),
        ({"fc.weight": torch.eye(3).to_sparse()}, "'fc.weight' (Tensor)"),
        ({"fc.weight": torch.empty(3, device="meta")}, "'fc.weight' (Tensor)"),
    ],
    ids=["a tensor", "nested", "a number", "sparse", "meta"],
)
def test_other_content_than_named_tensors_is_refused(head, content, said):
    save_torch(content, head / "pytorch_model.bin")
    assert said in refusal(head)


def test_a_stale_copy_that_some_systems_read_first_is_refused(head):
    """SafeAILab's code opens pytorch_model.bin; vLLM, SGLang and we the safetensors beside it."""
    save_file(weights(), head / "model.safetensors")
    save_torch(weights(), head / "pytorch_model.bin")
    assert_same(read_package(str(head)).tensors, weights())
    stale = weights()
    next(iter(stale.values())).view(-1)[0] += 1
    save_torch(stale, head / "pytorch_model.bin")
    assert "other tensors in pytorch_model.bin than in model.safetensors" in refusal(head)


def test_names_that_a_terminal_would_obey_are_refused(head):
    save_file({"\x1b[2Jfc.weight": torch.ones(2)}, head / "model.safetensors")
    assert "\x1b" not in refusal(head)


@pytest.mark.parametrize(("layout", "share"), [("safetensors", 0.9), ("zip", 0.3), ("legacy", 0.9)])
def test_a_truncated_file_is_refused(head, layout, share):
    LAYOUTS[layout](head)
    (file,) = weight_files(head)
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * share)])
    assert str(file) in refusal(head)


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "without config.json"), (b"[1]", "expected an object"), (b"[" * 100_000, "damaged")],
    ids=["absent", "a list", "nested"],
)
def test_a_config_that_is_none_is_refused(head, content, said):
    save_file(weights(), head / "model.safetensors")
    (head / "config.json").unlink()
    if content is not None:
        (head / "config.json").write_bytes(content)
    assert said in refusal(head)


def sharded(directory: Path, **changes: str) -> dict[str, Tensor]:
    """Two shards and their index; changes: other files that the index is to name for a tensor."""
    state = {"first": torch.ones(2), "second": torch.zeros(3)}
    files = {"first": "model-00001-of-00002.safetensors", "second": "model-00002-of-00002.safetensors"}
    for name, file in files.items():
        save_file({name: state[name]}, directory / file)
    index = {"metadata": {"total_size": 20}, "weight_map": files | changes}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return state


def test_shards_are_read_as_one(head):
    expected = sharded(head)
    assert_same(read_package(str(head)).tensors, expected)
    assert [file.name for file in weight_files(head)] == [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]


def test_files_that_systems_read_otherwise_are_refused(head):
    """transformers opens no index beside model.safetensors; vLLM alone reads an embedding of the mask token."""
    state = sharded(head, first="model.safetensors")
    (head / "model-00001-of-00002.safetensors").rename(head / "model.safetensors")
    assert "Systems differ in which of them they read" in refusal(head)
    for file in head.glob("*.safetensors*"):
        file.unlink()
    save_file(state, head / "model.safetensors")
    torch.save(torch.ones(2), head / "mask_embedding.pt")
    assert "mask_embedding.pt: found an embedding of the mask token" in refusal(head)


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/{root}/outside.safetensors", "sub/inside.safetensors", ".."]
)
def test_an_index_cannot_name_another_place(head, name):
    save_file({"second": torch.zeros(3)}, head.parent / "outside.safetensors")
    sharded(head, second=name.format(root=head.parent))
    (head / "model-00002-of-00002.safetensors").unlink()
    assert "expected a plain file name" in refusal(head)


def test_an_index_that_does_not_describe_its_files_is_refused(head):
    sharded(head, second="model-00003-of-00002.safetensors")
    (head / "model-00002-of-00002.safetensors").unlink()
    assert "no such file" in refusal(head)
    (head / "model.safetensors.index.json").write_text('{"weight_map": {"first": 1}}')
    assert "no weight_map" in refusal(head)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_a_link_that_leaves_the_directory_is_refused(head, name):
    outside = head.parent / "outside"
    outside.mkdir()
    (outside / "config.json").write_text("{}")
    save_file(weights(), outside / "model.safetensors")
    sharded(outside)
    if name == "config.json":
        (head / name).unlink()
        save_file(weights(), head / "model.safetensors")
    (head / name).symlink_to(outside / name)
    assert f"a link to {outside / name}" in refusal(head)


def cached(tmp_path: Path) -> Path:
    """A snapshot as huggingface_hub keeps it: links to ../../blobs/HASH."""
    repository = tmp_path / "models--org--head"
    (snapshot := repository / "snapshots" / "0123abc").mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "aaaa").write_text('{"hidden_size": 4}')
    save_file(weights(), repository / "blobs" / "bbbb")
    for name, blob in (("config.json", "aaaa"), ("model.safetensors", "bbbb")):
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
    return snapshot


def test_the_cache_of_the_hub_is_read_through_its_links(tmp_path):
    assert_same(read_package(str(cached(tmp_path))).tensors, weights())


def test_a_link_out_of_the_cache_is_refused(tmp_path):
    snapshot = cached(tmp_path)
    blobs = snapshot.parent.parent / "blobs"
    (blobs / "bbbb").rename(tmp_path / "elsewhere")
    (blobs / "bbbb").symlink_to(tmp_path / "elsewhere")
    assert "a link to" in refusal(snapshot)


def test_what_is_no_file_is_refused(head):
    os.mkfifo(head / "model.safetensors")  # opening it would wait for ever
    assert "a pipe or a device, expected a file" in refusal(head)
    (head / "model.safetensors").unlink()
    (head / "model.safetensors").symlink_to("model.safetensors")
    assert str(head) in refusal(head)


def test_a_hub_id_is_downloaded_with_its_bin_files(head, monkeypatch):
    import huggingface_hub

    asked = []

    def download(name, allow_patterns, **_):
        asked.append((name, allow_patterns))
        return head

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    save_torch(weights(), head / "pytorch_model.bin")
    assert_same(read_package("org/head").tensors, weights())
    ((name, patterns),) = asked
    hub.download.cache_clear()
    assert name == "org/head" and {"*.json", "*.safetensors", "*.bin", "*.pt"} <= set(patterns)
