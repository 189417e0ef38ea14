"""EAGLE-3 heads from a head directory to another system's and back, and what the check finds without the original."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from head_directory import Directory
from quick_heads import quick_eagle3_head

from draftsmith.data.export.check import CheckConfig
from draftsmith.data.export.check import run as check
from draftsmith.data.export.directory import read_package
from draftsmith.data.export.export import ExportConfig
from draftsmith.data.export.export import run as export
from draftsmith.data.export.import_head import ImportConfig, of_target
from draftsmith.data.export.import_head import run as import_head
from draftsmith.data.export.record import RECORD, against_record, read_record
from draftsmith.data.export.states import facts_of, make_probes
from draftsmith.data.heads.card import model_card
from draftsmith.data.heads.directory import head_fields, load_head, save_head, stored_tensors
from draftsmith.data.models.loading import load_lm
from draftsmith.modules.formats import formats
from draftsmith.modules.formats.base import Parsed
from draftsmith.modules.types import InputError

FORMATS = ("eagle", "vllm", "sglang", "speculators")
IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def target() -> str:
    """One that knows something, of whose states a head learns quickly; twelve layers."""
    return "embedded:target"


@pytest.fixture(scope="module")
def head_dir(target, tmp_path_factory) -> Path:
    lm = load_lm(target)
    probes = make_probes(target, lm, lm.info.max_position)
    head = quick_eagle3_head(lm, [probe.ids.tolist() for probe in probes], steps=80, draft_vocab=1500)
    manifest = {"target": lm.info.identity, "config": {"target": target}}
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
def checked(target, capsys, monkeypatch) -> Callable[..., tuple[int, str]]:
    monkeypatch.setenv("COLUMNS", "400")

    def run(directory: Path, format: str = "auto") -> tuple[int, str]:
        capsys.readouterr()
        code = check(CheckConfig(directory=directory, format=format, target=target))
        return code, " ".join(capsys.readouterr().out.split())

    return run


@pytest.mark.parametrize("format", FORMATS)
def test_a_head_comes_back_as_it_was(exported, head_dir, target, tmp_path, checked, format):
    code, said = checked(exported(format), format)
    assert code == 0 and "nothing differs" in said and "hs[2], hs[6], hs[9]" in said, said
    import_head(ImportConfig(directory=str(exported(format)), output=tmp_path / "back", target=target))
    head, back = load_head(head_dir), load_head(tmp_path / "back")
    assert head.config == back.config and head.config.reduced
    assert all(torch.equal(tensor, stored_tensors(back)[name]) for name, tensor in stored_tensors(head).items())


def swap(weight: torch.Tensor) -> torch.Tensor:
    return torch.cat(weight.chunk(2, dim=1)[::-1], dim=1)


def swap_all(directory: Directory) -> None:
    for name in [
        name for name in directory.tensors if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
    ]:
        directory.change(name, swap)


def later(directory: Directory) -> None:
    """Every layer id one too high, where the system reads them."""
    directory.set(**{IDS: [3, 7, 10], "eagle_config": {IDS: [2, 6, 9]}})


# What is done to an export, and what each system then says; None where that system does not care.
BROKEN: dict[str, tuple[Callable[[Directory], None], dict[str, str | None]]] = {
    "ids in d2t": (
        lambda d: d.change("d2t", lambda table: table + torch.arange(len(table))),
        dict.fromkeys(FORMATS, "the file has ids where all systems want offsets"),
    ),
    "an empty d2t": (
        lambda d: d.change("d2t", lambda table: table[:0].clone()),
        {"vllm": "another shape (file [0]", "speculators": "another shape (file [0]"},
    ),
    "missing norm": (
        lambda d: d.write({name: tensor for name, tensor in d.tensors.items() if "hidden_norm" not in name}),
        dict.fromkeys(FORMATS, "hidden_norm.weight"),
    ),
    "lost prefix of the layer": (
        lambda d: d.rename(lambda name: name.replace("midlayer.", "").replace("layers.0.", "")),
        dict.fromkeys(FORMATS, "self_attn.q_proj.weight"),
    ),
    "an embedding of its own": (
        lambda d: d.add("embed_tokens.weight", torch.zeros(2048, 128)),
        dict.fromkeys(FORMATS, "embed_tokens.weight"),
    ),
}
CASES = [(name, format) for name, (_, systems) in BROKEN.items() for format in systems]


@pytest.mark.parametrize(("name", "format"), CASES, ids=lambda value: value.replace(" ", "-"))
def test_what_a_system_would_read_otherwise_is_found_without_the_original(exported, checked, tmp_path, name, format):
    directory = Path(shutil.copytree(exported(format), tmp_path / format))
    (directory / RECORD).unlink()
    breakage, systems = BROKEN[name]
    breakage(Directory(directory))
    code, said = checked(directory, format)
    if systems[format] is None:
        assert (code, "nothing differs" in said) == (0, True), said
    else:
        assert code == 1 and systems[format] in said and "nothing differs" not in said, said


@pytest.fixture(scope="module")
def normed(target, tmp_path_factory) -> Path:
    """An export of a head that reads its own states normed, as EAGLE-3.1 does."""
    lm, root = load_lm(target), tmp_path_factory.mktemp("normed")
    probes = make_probes(target, lm, lm.info.max_position)
    head = quick_eagle3_head(lm, [probe.ids.tolist() for probe in probes], steps=60, norm_output=True)
    save_head(root / "head", head, {"target": lm.info.identity, "config": {"target": target}}, "card")
    assert export(ExportConfig(format="vllm", head=root / "head", output=root / "vllm")) == 0
    return root / "vllm"


# What is done to an export whose record is gone, and what the check says; where the two other readings of layers are as
# good, and where no draft is right.
MISREAD: dict[str, tuple[Callable[[Directory], None], int, str]] = {
    "halves of q, k and v": (swap_all, 1, "with the state before the embedding in q, k and v"),
    "another recurrent state": (lambda d: d.set(norm_output=None), 1, "with norm_output on"),
    "layer ids": (later, 0, "do not tell it from a head made for layers one later, layers one earlier"),
    "weak": (lambda d: d.change("lm_head.weight", lambda w: w.roll(1, 0)), 0, "too weak to tell"),
}


@pytest.mark.parametrize("name", MISREAD)
def test_how_a_head_drafts_tells_how_it_was_made_or_that_it_cannot(exported, normed, checked, tmp_path, name):
    directory = tmp_path / "copy"
    shutil.copytree(normed if name == "another recurrent state" else exported("vllm"), directory)
    (directory / RECORD).unlink()
    breakage, expected, said = MISREAD[name]
    breakage(Directory(directory))
    code, shown = checked(directory, "vllm")
    assert said in shown and code == expected, shown
    assert name != "weak" or "nothing differs" not in shown


# The head works about as well, or only its drafts are worse: this target's layers have much the same states.
RECORDED: dict[str, tuple[Callable[[Directory], None], tuple[str, ...], str]] = {
    "layer ids": (later, FORMATS[1:], "capture: (3, 7, 10) in this system"),
    "halves of q, k and v": (swap_all, FORMATS, "layer.self_attn.q_proj.weight: is not what was exported"),
    "states in another order": (
        lambda d: d.change("fc.weight", lambda w: torch.cat(w.chunk(3, dim=1)[::-1], dim=1)),
        FORMATS,
        "fc.weight: is not what was exported",
    ),
    "another residual": (lambda d: d.set(norm_before_residual=True), FORMATS, "norm_before_residual"),
    "another recurrent state": (lambda d: d.set(norm_output=True), FORMATS, "norm_output"),
}


@pytest.mark.parametrize(("name", "format"), [(name, format) for name in RECORDED for format in RECORDED[name][1]])
def test_what_the_trained_head_would_tell_is_found_by_the_exports_record(exported, tmp_path, target, name, format):
    breakage, _, text = RECORDED[name]
    directory = Path(shutil.copytree(exported(format), tmp_path / format))
    breakage(Directory(directory))
    system, package = formats()[format, "eagle3"], read_package(str(directory))
    record = read_record(directory)
    assert record is not None
    reading = system.read(package, facts_of(target, load_lm(target)))
    found = [f"{finding.where}: {finding.text}" for finding in against_record(record, reading, system)]
    assert any(text in said for said in (*found, *(finding.where for finding in reading.errors))), found


def test_someone_elses_directory_is_named_and_every_server_gets_a_verdict(exported, checked, tmp_path):
    for format in FORMATS:
        directory = Path(shutil.copytree(exported(format), tmp_path / format))
        (directory / RECORD).unlink()
    code, said = checked(tmp_path / "vllm")
    assert code == 0 and "Written as SGLang (SpecForge, ModelOpt) does." in said
    assert all(f"{name}: computes this head" in said for name in ("eagle", "vllm", "sglang"))
    assert "speculators: another head, or none" in said
    code, said = checked(tmp_path / "speculators")
    assert code == 0 and "Written as speculators does." in said
    assert "speculators: computes this head" in said and "vllm: computes this head" in said
    assert "eagle: another head, or none" in said and "sglang: another head, or none" in said
    Directory(tmp_path / "vllm").set(norm_before_residual=True)
    code, said = checked(tmp_path / "vllm")
    assert "Written as vLLM does." in said and "sglang: another head, or none (norm_before_residual" in said


def test_what_a_server_ignores_is_refused_and_not_proposed_on_the_card(head_dir, tmp_path):
    head = load_head(head_dir)
    fields = head_fields(head)
    proposed = {name for name in FORMATS if f"--format {name} " in model_card("eagle3", {"head": fields})}
    assert proposed == set(FORMATS)
    late = {**fields, "fc_norm": True, "norm_output": True}
    assert {n for n in FORMATS if f"--format {n} " in model_card("eagle3", {"head": late})} == {*FORMATS} - {"eagle"}
    before = {**fields, "norm_before_residual": True}
    proposed = {name for name in FORMATS if f"--format {name} " in model_card("eagle3", {"head": before})}
    assert proposed == {"vllm", "speculators"}
    with pytest.raises(
        InputError, match=r"an eagle3 head, expected an acceptance head, which specdec_pp holds\. Choose"
    ):
        export(ExportConfig(format="specdec_pp", head=head_dir, output=tmp_path / "out"))


def test_an_import_knows_whether_the_lm_head_is_the_targets():
    target, ids = torch.randn(20, 12, generator=torch.Generator().manual_seed(0)), torch.tensor([1, 4, 9])
    own, rows = target.clone(), {"d2t": ids, "lm_head.weight": target[ids]}
    own[3, 5] += 1e-6
    states = [{"lm_head.weight": target}, rows, {"d2t": ids, "lm_head.weight": target[ids].bfloat16()},
              {"lm_head.weight": own}, {**rows, "d2t": ids + 1}, {}]  # fmt: skip
    found = [of_target(Parsed(None, state), target) for state in states]
    assert found == [["lm_head.weight"]] * 3 + [[]] * 3
    assert of_target(Parsed(None, rows), None) == []  # no target is named
