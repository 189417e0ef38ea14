"""DFlash and DSpark heads from a head directory to another system's and back, and what `check` says of silent traps."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from head_directory import Directory
from quick_heads import quick_block_head
from tiny_models import tiny_llama_dir

from draftsmith.eval.check.check import RECORD, CheckConfig
from draftsmith.eval.check.check import run as check
from draftsmith.eval.check.states import answered_prompts
from draftsmith.eval.diagnose.diagnosis import head_variants
from draftsmith.launch.export.export import ExportConfig
from draftsmith.launch.export.export import run as export
from draftsmith.launch.export.import_head import ImportConfig
from draftsmith.launch.export.import_head import run as import_head
from draftsmith.modules.formats.gguf import to_adjacent
from draftsmith.modules.pretrained.heads import load_head, save_head, stored_tensors
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.types import InputError


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> str:
    return str(tiny_llama_dir(tmp_path_factory.mktemp("block") / "target", layers=8, hidden=48))


@pytest.fixture(scope="module")
def heads(tmp_path_factory, target) -> dict[str, Path]:
    """Trained on the very answers that they are checked on: what a wrong reading costs has to show."""
    lm, root = load_lm(target), tmp_path_factory.mktemp("heads")
    rows = [text["input_ids"] for text in answered_prompts(target, lm, lm.info.max_position)]
    manifest = {"target": lm.info.identity, "config": {"target": target}}
    saved = {}
    for kind in ("dflash", "dspark"):
        head = quick_block_head(lm, rows, 60, kind, layers=(1, 3, 5), block=4, anchors=128)
        saved[kind] = save_head(root / kind, head, manifest, "card")
    return saved


@pytest.fixture(scope="module")
def exported(heads, tmp_path_factory) -> Callable[[str, str], Path]:
    root = tmp_path_factory.mktemp("exports")

    def make(format: str, kind: str) -> Path:
        path = root / f"{format}-{kind}"
        if not path.exists():
            assert export(ExportConfig(format=format, head=heads[kind], output=path)) == 0
        return path

    return make


@pytest.fixture
def checked(capsys, monkeypatch, target) -> Callable[..., tuple[int, str]]:
    monkeypatch.setenv("COLUMNS", "400")

    def run(directory: Path, format: str = "auto", head: Path | None = None) -> tuple[int, str]:
        capsys.readouterr()
        code = check(CheckConfig(directory=directory, format=format, target=target, head=head))
        return code, " ".join(capsys.readouterr().out.split())

    return run


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
@pytest.mark.parametrize("format", ["vllm", "sglang", "speculators", "llamacpp"])
def test_a_head_comes_back_as_it_was(exported, heads, target, tmp_path, checked, format, kind):
    code, shown = checked(exported(format, kind), format, heads[kind])
    assert code == 0 and "nothing differs" in shown, shown
    import_head(ImportConfig(directory=str(exported(format, kind)), output=tmp_path / "back", target=target))
    head, back = load_head(heads[kind]), load_head(tmp_path / "back")
    assert head.config == back.config
    assert all(torch.equal(tensor, stored_tensors(back)[name]) for name, tensor in stored_tensors(head).items())


def test_the_command_drafts_whole_blocks_and_no_more(heads, tmp_path, capsys, monkeypatch):
    export(ExportConfig(format="vllm", head=heads["dflash"], output=tmp_path / "vllm"))
    assert '"method": "dflash"' in (shown := capsys.readouterr().out) and '"num_speculative_tokens": 4' in shown
    # Before any model is read.
    monkeypatch.setattr("draftsmith.launch.export.export.state_source", lambda *_: pytest.fail("read a model"))
    with pytest.raises(InputError, match="num_drafted: found 5, expected at most 4"):
        export(ExportConfig(format="vllm", head=heads["dflash"], output=tmp_path / "more", num_drafted=5))


def interleaved(directory: Directory) -> None:
    """q and k as if converted for adjacent rotary pairs."""
    for part, heads in (("q", 4), ("k", 2)):
        directory.change(f"layers.0.self_attn.{part}_proj.weight", lambda rows, n=heads: to_adjacent(rows, n))


# Edit of an export, the line of a check beside the export's record or the head, and without both; None: too little is
# lost, or nothing that a check tries.
TRAPS: dict[str, tuple[Callable[[Directory], None], str, str | None]] = {
    "layout": (
        lambda d: d.set(sample_from_anchor=False),
        "fill-in in this system, exported with anchor-first",
        "read with layout anchor-first in place of fill-in",
    ),
    "layers": (
        lambda d: d.set(target_layer_ids=[1, 3, 5]),
        "[2, 4, 6] in this system, exported with [1, 3, 5]",
        None,
    ),
    "mask": (lambda d: d.set(mask_token_id=3), "mask_token", None),
    "rotary": (interleaved, "layers.0.self_attn.q_proj.weight", None),
    "norm": (lambda d: d.remove("hidden_norm.weight"), "hidden_norm.weight is missing", "weight is missing"),
    "confidence": (
        lambda d: d.set(enable_confidence_head=None), "drops the confidence head", "drops the confidence head"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TRAPS)
def test_a_silent_trap_is_named(exported, heads, checked, tmp_path, name):
    edit, recorded, alone = TRAPS[name]
    directory = Path(shutil.copytree(exported("vllm", "dspark"), tmp_path / "vllm"))
    edit(Directory(directory))
    code, shown = checked(directory, "vllm")
    assert code == 1 and recorded in shown, shown
    (directory / RECORD).unlink()
    code, shown = checked(directory, "vllm", heads["dspark"])
    assert code == 1, shown
    if alone is not None:
        code, shown = checked(directory, "vllm")
        assert code == 1 and alone in shown, shown


def test_a_diagnosis_tries_what_a_block_drafter_may_be_instead(heads):
    variants = head_variants(load_head(heads["dspark"]), None, 8)
    assert [(one.factor, one.label) for one in variants if one.factor != "rotary"] == [
        ("", "as it is"),
        ("layers", "layers 0, 2, 4 in place of 1, 3, 5"),
        ("layers", "layers 2, 4, 6 in place of 1, 3, 5"),
        ("layers", "layers 5, 3, 1 in place of 1, 3, 5"),
        ("weights", "the rotary pairs of q and k as if not converted from interleaved"),
        ("weights", "the rotary pairs of q and k as if converted twice from interleaved"),
        ("layout", "layout fill-in in place of anchor-first"),
        ("causality", "slots that see no later ones"),
    ]


def test_a_directory_gets_a_verdict_of_every_server(exported, checked, tmp_path):
    directory = Path(shutil.copytree(exported("speculators", "dspark"), tmp_path / "speculators"))
    (directory / RECORD).unlink()
    code, shown = checked(directory)
    assert code == 0 and "Written as speculators does." in shown, shown
    assert "speculators: computes this head" in shown and "vllm: computes this head" in shown
    assert "sglang: another head, or none" in shown and "eagle:" not in shown
