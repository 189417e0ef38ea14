"""`check` finds the ways in which a directory can mean another head in the system that loads it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from worlds import tiny_llama_dir

from draftsmith.eval.check import check as check_command
from draftsmith.eval.check.check import run as check
from draftsmith.eval.diagnose.drafts import head_variants
from draftsmith.eval.settings import CheckConfig
from draftsmith.modules.drafters.eagle import EagleHead
from draftsmith.modules.formats.llama import to_adjacent
from draftsmith.modules.pretrained.directory import RECORD
from draftsmith.modules.pretrained.heads import load_head, save_head
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.types import InputError


class Directory:
    """A head's directory as an object to break."""

    def __init__(self, path: Path):
        self.path = path

    @property
    def config(self) -> dict[str, Any]:
        return json.loads((self.path / "config.json").read_text())

    def set(self, **changes: Any) -> None:
        """Fields of config.json; None removes one."""
        config = {name: value for name, value in {**self.config, **changes}.items() if value is not None}
        (self.path / "config.json").write_text(json.dumps(config))

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return load_file(self.path / "model.safetensors")

    def write(self, tensors: dict[str, torch.Tensor]) -> None:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, self.path / "model.safetensors")

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self.write({**self.tensors, name: tensor})

    def rename(self, renamed: Callable[[str], str]) -> None:
        self.write({renamed(name): tensor for name, tensor in self.tensors.items()})

    def change(self, name: str, changed: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.write({**self.tensors, name: changed(self.tensors[name])})

    def remove(self, name: str) -> None:
        self.write({other: tensor for other, tensor in self.tensors.items() if other != name})


IDS = "eagle_aux_hidden_state_layer_ids"


def interleaved(directory: Directory) -> None:
    """q and k as if converted for adjacent rotary pairs."""
    for part, heads in (("q", 4), ("k", 2)):
        directory.change(f"layers.0.self_attn.{part}_proj.weight", lambda rows, n=heads: to_adjacent(rows, n))


def swap_halves(directory: Directory) -> None:
    """The state before the embedding in q, k and v."""
    for part in "qkv":
        name = next(name for name in directory.tensors if name.endswith(f"{part}_proj.weight"))
        directory.change(name, lambda weight: torch.cat(weight.chunk(2, dim=1)[::-1], dim=1))


# Kind and system, edit of an export, and the line of a check beside the export's record.
Edit = Callable[[Directory], None]
RECORDED: dict[str, tuple[str, str, Edit, str]] = {
    "positions": ("eagle", "sglang",
        lambda d: d.set(rope_theta=123.0, rope_parameters={"rope_theta": 123.0, "rope_type": "default"}),
        "other rotary frequencies"),
    "another epsilon": ("eagle", "sglang", lambda d: d.set(rms_norm_eps=1e-3),
        "0.001 in this system, exported with 1e-06"),
    "a bias of fc": ("eagle", "sglang", lambda d: d.add("fc.bias", torch.full((48,), 0.5)), "fc.bias"),
    "ids in d2t": ("eagle3", "vllm", lambda d: d.change("d2t", lambda table: table + torch.arange(len(table))),
        "wants offsets"),
    "layer ids": ("eagle3", "vllm", lambda d: d.set(**{IDS: [3, 7, 10]}), "aux_layers"),
    "states in another order": ("eagle3", "vllm",
        lambda d: d.change("fc.weight", lambda w: torch.cat(w.chunk(3, dim=1)[::-1], dim=1)), "fc.weight"),
    "another residual": ("eagle3", "vllm", lambda d: d.set(norm_before_residual=True), "norm_before_residual"),
    "layout": ("dspark", "vllm", lambda d: d.set(sample_from_anchor=False),
        "fill-in in this system, exported with anchor-first"),
    "layers": ("dspark", "vllm", lambda d: d.set(target_layer_ids=[1, 3, 5]),
        "[2, 4, 6] in this system, exported with [1, 3, 5]"),
    "mask": ("dspark", "vllm", lambda d: d.set(mask_token_id=3), "mask_token"),
    "rotary pairs": ("dspark", "vllm", interleaved, "layers.0.self_attn.q_proj.weight"),
    "norm": ("dspark", "vllm", lambda d: d.remove("hidden_norm.weight"), "hidden_norm.weight is missing"),
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDED)
def test_another_head_is_found_by_the_exports_record(copy_of, checked, exchange, name):
    kind, system, edit, words = RECORDED[name]
    directory = copy_of(system, kind)
    edit(Directory(directory))
    code, shown = checked(directory, system, kind)
    assert code == 1 and words in shown and "nothing differs" not in shown, shown
    if kind == "dspark":  # and beside the head itself, without the record
        (directory / RECORD).unlink()
        code, shown = checked(directory, system, kind, head=exchange.head(kind))
        assert code == 1, shown


@pytest.mark.parametrize(("system", "kind"), [("vllm", "eagle3"), ("vllm", "dspark")])
def test_tensors_of_another_type_are_one_line(copy_of, checked, system, kind):
    """Rounded weights are other values in each tensor, which would hide what else differs."""
    directory = copy_of(system, kind)
    head = Directory(directory)
    head.write({name: t.bfloat16() if t.is_floating_point() else t for name, t in head.tensors.items()})
    code, shown = checked(directory, system, kind)
    assert code == 1 and "tensors are in bfloat16, and were exported in float32: rounded, or" in shown
    assert "is not what was exported" not in shown and "1 difference" in shown
    head.write({name: t.float() if t.is_floating_point() else t for name, t in head.tensors.items()})
    assert "is not what was exported" in checked(directory, system, kind)[1]


# A stranger's directory, which has no record: kind and system, edit, and the line; empty if nothing is wrong. (Other
# layers cost these heads nothing.)
STRANGE: dict[str, tuple[str, str, Edit, str]] = {
    "fc bias that vLLM drops": ("eagle", "vllm", lambda d: d.add("fc.bias", torch.full((48,), 0.01)),
        "drops it and says nothing"),
    "fc bias that SGLang reads": ("eagle", "sglang", lambda d: d.add("fc.bias", torch.full((48,), 0.01)), ""),
    "another family": ("eagle", "sglang", lambda d: d.set(architectures=["Qwen3ForCausalLM"]), "architectures"),
    "nothing": ("eagle3", "vllm", lambda d: None, ""),
    "halves of q, k and v": ("eagle3", "vllm", swap_halves,
        "read with the state before the embedding in q, k and v"),
    "another residual": ("eagle3", "vllm", lambda d: d.set(norm_before_residual=True),
        "read with norm_before_residual off"),
    "layout": ("dspark", "vllm", lambda d: d.set(sample_from_anchor=False),
        "read with layout anchor-first in place of fill-in"),
    "confidence": ("dspark", "vllm", lambda d: d.set(enable_confidence_head=None), "drops the confidence head"),
}  # fmt: skip


@pytest.mark.parametrize("name", STRANGE)
def test_a_strangers_directory_that_is_read_otherwise_than_it_was_made_is_found(copy_of, checked, name):
    kind, system, edit, words = STRANGE[name]
    directory = copy_of(system, kind)
    (directory / RECORD).unlink()
    edit(Directory(directory))
    code, shown = checked(directory, system, kind)
    sound = "nothing differs" in shown or "no difference found, but cannot tell" in shown
    unclear = "cannot tell: " in shown
    assert code == (1 if words else 3 if unclear else 0) and words in shown and sound == (not words), shown


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 19735944\n"


def of_another_model(d: Directory) -> None:
    d.set(vocab_size=96, hidden_size=32)


def in_ddp(d: Directory) -> None:
    d.rename(lambda name: f"module.{name}")


# A damage to an EAGLE-3 head for vLLM whose record is gone, and what names it; exit code 2 where nothing can be read.
DAMAGES: dict[str, tuple[Edit, int, str]] = {
    "no class": (lambda d: d.set(architectures=None), 1,
        "─ architectures SGLang does not build this head for none (the field is missing): write"),
    "no type": (lambda d: d.set(model_type=None), 1,
        "builds another model for none (the field is missing): write llama"),
    "other layers": (lambda d: d.set(**{IDS: [3, 7, 10]}), 3,
        "read with layers 2, 6, 9 (the default) in place of 3, 7, 10"),
    "rotary base": (lambda d: d.set(rope_theta=1e6, rope_parameters=None), 3,
        "(the target's) in place of base 1e+06"),
    "no d2t": (lambda d: d.remove("d2t"), 1, "d2t is missing"),
    "neither table": (lambda d: d.write({n: t for n, t in d.tensors.items() if n not in ("d2t", "t2d")}), 1,
        "d2t found none, and no t2d, expected the target's ids of lm_head's 1500 rows"),
    "torch's wrapper": (in_ddp, 2, "found names that begin with module. (module."),
    "a pointer": (lambda d: (d.path / "model.safetensors").write_text(LFS), 2, "git lfs pull"),
    "a pointer's config": (lambda d: (d.path / "config.json").write_text(LFS), 2, "git lfs pull"),
    "another model's": (of_another_model, 1, "found vocab_size 96, hidden_size 32, expected the target's"),
    "no sizes": (lambda d: d.set(vocab_size=None, hidden_size=None), 1,
        "found no vocab_size (read as 32000), no hidden_size (read as 4096), expected the target's"),
    "another width": (lambda d: d.change("fc.weight", lambda w: torch.cat([w, w])), 1, "fc.weight found a tensor"),
    "truncated": (lambda d: (d.path / "model.safetensors").write_bytes(
        (d.path / "model.safetensors").read_bytes()[:9000]), 2, "damaged"),
    "broken": (lambda d: (d.path / "config.json").write_text('{"vocab_size": 1,'), 2, "damaged"),
    "another residual": (lambda d: d.set(norm_before_residual=True), 1, "vllm: another head, or none (read with norm"),
    "half a layer": (lambda d: d.add("layers.1.self_attn.q_proj.weight", torch.zeros(1)), 1, "is missing"),
    "other states": (lambda d: d.set(target_hidden_size=7), 3, "not read here: config.json, target_hidden_size"),
    "a drafter of several tokens": (lambda d: d.add("mask_hidden", torch.zeros(1, 1, 1)), 3,
        "Such heads are trained by speculators 0.9.0, SpecForge 0.2.0, Automodel 0.7.0, served by vLLM 0.33.0."),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_no_damaged_head_is_called_right(copy_of, checked, name):
    edit, expected, words = DAMAGES[name]
    directory = copy_of("vllm", "eagle3")
    (directory / RECORD).unlink()
    edit(Directory(directory))
    try:
        code, shown = checked(directory, kind="eagle3")
    except InputError as error:
        code, shown = 2, str(error)
    assert code == expected and words in shown and "nothing differs" not in shown, shown
    lacking = "says nothing about the files" in shown and "another head" not in shown
    assert (code == 3) == (lacking or "no difference found, but cannot tell: " in shown), shown


def test_our_own_export_is_known_by_its_record(copy_of, checked, monkeypatch):
    """Default layers are written alike for vLLM and SGLang, and a weak head is still the right one."""
    monkeypatch.setattr(check_command, "STRONG", 0.9)
    directory = copy_of("vllm", "eagle3")
    code, shown = checked(directory, kind="eagle3")
    assert code == 0 and "as vllm reads it" in shown and "nothing differs" in shown, shown
    assert "a weak head" in shown and "cannot tell" not in shown, shown
    (directory / RECORD).unlink()
    code, shown = checked(directory, kind="eagle3")
    assert code == 3 and "DIFFERS" not in shown and "vllm: computes this head" in shown, shown


@pytest.mark.parametrize(
    ("kind", "system", "others"),
    [
        ("eagle", "eagle", {"eagle": True, "vllm": True, "sglang": False}),
        ("eagle3", "speculators", {"speculators": True, "vllm": True, "sglang": False, "eagle": False}),
        ("dspark", "speculators", {"speculators": True, "vllm": True, "sglang": False}),
    ],
)
def test_without_a_format_every_system_that_holds_such_heads_gets_a_verdict(copy_of, checked, kind, system, others):
    directory = copy_of(system, kind)
    (directory / RECORD).unlink()
    code, shown = checked(directory, kind=kind)
    assert code == (3 if "cannot tell: " in shown else 0) and f"as {system} reads it" in shown
    for name, computes in others.items():
        assert f"{name}: {'computes this head' if computes else 'another head, or none ('}" in shown, shown
    # Trainers load heads only to train them, and llama.cpp loads GGUF files alone.
    absent = ["specforge", "deepspec", "llamacpp"] + ["eagle"] * (kind == "dspark")
    assert not [name for name in absent if f" {name}:" in shown], shown


def test_logits_are_compared_with_the_original_head(exchange, checked, tmp_path):
    eagle = exchange.head("eagle")
    other = EagleHead(load_head(eagle).config)
    other.load_state_dict(load_head(eagle).state_dict())
    other.layers[0].mlp.up_proj.weight.data[3, 5] += 0.1  # one weight
    lm = load_lm(exchange.target("eagle"))
    save_head(tmp_path / "other", other, {"target": lm.info.identity}, "card")
    code, shown = checked(exchange.export("vllm", "eagle"), "vllm", head=tmp_path / "other")
    assert code == 1 and "DIFFERS" in shown


def test_a_directory_made_for_another_target_is_found(exchange, checked, tmp_path):
    other = tiny_llama_dir(tmp_path / "other", seed=5, layers=2, hidden=48)
    code, shown = checked(exchange.export("vllm", "eagle"), "vllm", target=str(other))
    assert code == 1 and "is another than the model that the head was trained for" in shown


def test_a_head_of_our_own_is_no_export(exchange, checked):
    with pytest.raises(InputError, match="one of draftsmith's own heads"):
        checked(exchange.head("eagle"), "vllm")


def test_the_model_whose_states_are_read_has_to_be_named(exchange):
    with pytest.raises(InputError, match="target: found none"):
        check(CheckConfig(directory=exchange.export("vllm", "eagle"), format="vllm"))


def test_a_diagnosis_tries_what_a_block_drafter_may_be_instead(exchange):
    target = SimpleNamespace(info=SimpleNamespace(num_layers=8))
    variants = head_variants(load_head(exchange.head("dspark")), None, target)
    assert [(one.factor, one.label) for one in variants if one.factor != "rotary"] == [
        ("", "as it is"),
        ("layers", "layers 0, 2, 4 in place of 1, 3, 5"),
        ("layers", "layers 2, 4, 6 in place of 1, 3, 5"),
        ("layers", "layers 5, 3, 1 in place of 1, 3, 5"),
        ("weights", "q and k as if not converted from interleaved pairs"),
        ("weights", "q and k as if converted twice from interleaved pairs"),
        ("layout", "layout fill-in in place of anchor-first"),
        ("causality", "slots that see no later ones"),
    ]
