"""EAGLE-3 heads from a head directory to another system's and back, and defects that the check finds."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from head_directory import Directory
from quick_heads import quick_eagle3_head

from draftsmith.eval.check.check import RECORD, CheckConfig
from draftsmith.eval.check.check import run as check
from draftsmith.eval.check.states import answered_prompts
from draftsmith.launch.export.export import ExportConfig
from draftsmith.launch.export.export import run as export
from draftsmith.launch.export.import_head import ImportConfig, tied_to_target
from draftsmith.launch.export.import_head import run as import_head
from draftsmith.modules.formats.base import ImportedHead
from draftsmith.modules.pretrained.card import model_card
from draftsmith.modules.pretrained.heads import head_fields, load_head, save_head, stored_tensors
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.types import InputError

FORMATS = ("eagle", "vllm", "sglang", "speculators")
IDS = "eagle_aux_hidden_state_layer_ids"
TARGET = "embedded:target"


@pytest.fixture(scope="module")
def head_dir(tmp_path_factory) -> Path:
    lm = load_lm(TARGET)
    texts = answered_prompts(TARGET, lm, lm.info.max_position)
    head = quick_eagle3_head(lm, [text["input_ids"] for text in texts], steps=60, draft_vocab=1500)
    manifest = {"target": lm.info.identity, "config": {"target": TARGET}}
    return save_head(tmp_path_factory.mktemp("heads") / "eagle3", head, manifest, "card")


@pytest.fixture(scope="module")
def exported(head_dir, tmp_path_factory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("exports")

    def make(format: str) -> Path:
        if not (root / format).exists():
            assert export(ExportConfig(format=format, head=head_dir, output=root / format)) == 0
        return root / format

    return make


@pytest.fixture
def checked(capsys, monkeypatch) -> Callable[..., tuple[int, str]]:
    monkeypatch.setenv("COLUMNS", "400")

    def run(directory: Path, format: str = "auto") -> tuple[int, str]:
        capsys.readouterr()
        code = check(CheckConfig(directory=directory, format=format, target=TARGET))
        return code, " ".join(capsys.readouterr().out.split())

    return run


@pytest.mark.parametrize("format", ["sglang", "speculators"])
def test_a_head_comes_back_as_it_was(exported, head_dir, tmp_path, checked, format):
    code, shown = checked(exported(format), format)
    assert code == 0 and "nothing differs" in shown, shown
    import_head(ImportConfig(directory=str(exported(format)), output=tmp_path / "back", target=TARGET))
    head, back = load_head(head_dir), load_head(tmp_path / "back")
    assert head.config == back.config and head.config.reduced
    assert all(torch.equal(tensor, stored_tensors(back)[name]) for name, tensor in stored_tensors(head).items())


def swap_halves(directory: Directory) -> None:
    """The state before the embedding in q, k and v."""
    for part in "qkv":
        name = next(name for name in directory.tensors if name.endswith(f"{part}_proj.weight"))
        directory.change(name, lambda weight: torch.cat(weight.chunk(2, dim=1)[::-1], dim=1))


# Edit of an export -> the check's line.
BROKEN: dict[str, tuple[Callable[[Directory], None], str]] = {
    "ids in d2t": (lambda d: d.change("d2t", lambda table: table + torch.arange(len(table))), "wants offsets"),
    "an empty d2t": (lambda d: d.change("d2t", lambda table: table[:0].clone()), "d2t is missing"),
    "layer ids": (lambda d: d.set(**{IDS: [3, 7, 10]}), "aux_layers"),
    "halves of q, k and v": (swap_halves, "layer.self_attn.q_proj.weight"),
    "states in another order": (
        lambda d: d.change("fc.weight", lambda w: torch.cat(w.chunk(3, dim=1)[::-1], dim=1)),
        "fc.weight",
    ),
    "another residual": (lambda d: d.set(norm_before_residual=True), "norm_before_residual"),
    "another recurrent state": (lambda d: d.set(norm_output=True), "norm_output"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_another_head_than_was_exported_is_found(exported, checked, tmp_path, name):
    edit, words = BROKEN[name]
    directory = Path(shutil.copytree(exported("vllm"), tmp_path / "vllm"))
    edit(Directory(directory))
    code, shown = checked(directory, "vllm")
    assert code == 1 and words in shown and "nothing differs" not in shown, shown


# Edit of a stranger's directory -> the reading under which it drafts better. (Other layers cost this head nothing.)
MISREAD = {
    "": "",
    "halves of q, k and v": "read with the state before the embedding in q, k and v",
    "another residual": "read with norm_before_residual off",
}


@pytest.mark.parametrize("name", MISREAD)
def test_a_strangers_directory_that_is_read_otherwise_than_it_was_made_is_found(exported, checked, tmp_path, name):
    directory = Path(shutil.copytree(exported("vllm"), tmp_path / "vllm"))
    (directory / RECORD).unlink()
    if name:
        BROKEN[name][0](Directory(directory))
    code, shown = checked(directory, "vllm")
    assert code == bool(name) and MISREAD[name] in shown and ("read with" in shown) == bool(name), shown


def test_a_directory_without_a_format_gets_a_verdict_of_every_server(exported, checked, tmp_path):
    (Path(shutil.copytree(exported("speculators"), tmp_path / "speculators")) / RECORD).unlink()
    code, shown = checked(tmp_path / "speculators")
    assert code == 0 and "Written as speculators does." in shown
    assert "speculators: computes this head" in shown and "vllm: computes this head" in shown
    assert "eagle: another head, or none" in shown and "sglang: another head, or none" in shown


def test_the_card_proposes_the_formats_that_hold_the_head(head_dir, tmp_path):
    fields = head_fields(load_head(head_dir))

    def proposed(**changes: bool) -> set[str]:
        card = model_card("eagle3", {"head": {**fields, **changes}})
        return {name for name in FORMATS if f"--format {name} " in card}

    assert proposed() == set(FORMATS)
    assert proposed(fc_norm=True, norm_output=True) == {*FORMATS} - {"eagle"}
    assert proposed(norm_before_residual=True) == {"vllm", "speculators"}
    expected = r"an eagle3 head, expected an acceptance head, which specdec_pp holds\. Choose"
    with pytest.raises(InputError, match=expected):
        export(ExportConfig(format="specdec_pp", head=head_dir, output=tmp_path / "out"))


def test_an_import_knows_whether_the_lm_head_is_the_targets():
    target, ids = torch.randn(20, 12, generator=torch.Generator().manual_seed(0)), torch.tensor([1, 4, 9])
    own, rows = target.clone(), {"d2t": ids, "lm_head.weight": target[ids]}
    own[3, 5] += 1e-6
    states = [{"lm_head.weight": target}, rows, {"d2t": ids, "lm_head.weight": target[ids].bfloat16()},
              {"lm_head.weight": own}, {**rows, "d2t": ids + 1}, {}]  # fmt: skip
    assert [tied_to_target(ImportedHead(None, state), target) for state in states] == [["lm_head.weight"]] * 3 + [
        []
    ] * 3
    assert tied_to_target(ImportedHead(None, rows), None) == []  # no target is named
