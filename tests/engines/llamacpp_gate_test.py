"""`draftsmith check --engine llamacpp` on exports of heads that know something (`served.py`), on a draft model, and on
files with one defect each: llama.cpp's server is started on each. Run by `make test-engines`, by our own python."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from exported import command, documented
from torch import Tensor

# Shared with the tests that need no engine.
sys.path.append(str(Path(__file__).parents[1]))
from gguf_models import write_gguf_model

from draftsmith.data.engines.process import running
from draftsmith.data.prompts import PromptsConfig
from draftsmith.data.prompts import run as make_prompts
from draftsmith.data.responses import ResponsesConfig
from draftsmith.data.responses import run as make_responses
from draftsmith.eval.certify import CertifyConfig
from draftsmith.eval.certify import run as certify
from draftsmith.eval.check.check import run
from draftsmith.eval.engines.served import ServedConfig
from draftsmith.eval.engines.served import run as serve
from draftsmith.eval.settings import CheckConfig
from draftsmith.modules.drafters.block.net import default_layers
from draftsmith.modules.formats.llama import to_adjacent, to_halves
from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.pretrained.gguf import copied_metadata, open_gguf, read_tensor
from draftsmith.modules.pretrained.gguf_writer import write_gguf

torch.set_num_threads(1)
SERVED = Path(os.environ["DRAFTSMITH_ENGINES"]) / "served"
SERVER = Path(os.environ["DRAFTSMITH_LLAMA_SERVER"])
# The first four prompts are those that the head `three` learned by heart.
TARGET, PROMPTS = "embedded:target", 4
Edit = Callable[[dict[str, Any], dict[str, Tensor]], None]


@pytest.fixture(scope="module")
def target_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("target") / "target.gguf"
    write_gguf_model(file, Checkpoint(TARGET))
    return file


@pytest.fixture
def gate(target_gguf: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def call(directory: Path, **settings: Any) -> tuple[int, str]:
        given = {"target": TARGET, "target_gguf": target_gguf, "engine": "llamacpp", "engine_path": SERVER}
        given = {**given, "limit": PROMPTS, **settings}
        code = run(CheckConfig(directory=directory, **given))
        shown = capsys.readouterr().out
        with capsys.disabled():
            print(f"\n{shown}")
        return code, " ".join(shown.split())

    return call


def edited(to: Path, edit: Edit, case: str = "three") -> Path:
    """A copy of an export whose metadata and tensors `edit` changed."""
    shutil.copytree(SERVED / case / "llamacpp", to)
    (to / "draftsmith.json").unlink()
    metadata = {name: value for name, value in copied_metadata(to / "head.gguf").items() if not name.startswith("GGUF")}
    kind = metadata.pop("general.architecture")[0]
    del metadata["general.file_type"]
    tensors = {name: read_tensor(tensor) for name, tensor in open_gguf(to / "head.gguf")[1].items()}
    edit(metadata, tensors)
    write_gguf(to / "head.gguf", kind, metadata, tensors)
    return to


def test_every_printed_and_documented_command_is_read_and_one_is_started(target_gguf: Path):
    printed = {path.parent.name: command(path) for path in sorted(SERVED.glob("*/llamacpp"))}
    mtp = ["llama-server", "-m", "TARGET.gguf", "--spec-type", "draft-mtp"]
    for _, *words in [*printed.values(), *documented("llama-server"), mtp]:
        assert not subprocess.run([SERVER, *words, "--help"], capture_output=True, check=False).returncode, words
    assert subprocess.run([SERVER, "--spec-type", "draft-none", "--help"], capture_output=True, check=False).returncode
    words = [{"TARGET.gguf": str(target_gguf)}.get(word, word) for word in printed["three"][1:]]
    with running([str(SERVER), *words], {}) as url:
        answer = httpx.post(f"{url}/completion", json={"prompt": [5, 6, 7], "n_predict": 16}, timeout=60).json()
    assert answer["timings"]["draft_n"] > 0


BLOCKS = ["dflash", "dflash2", "dspark", "filling", "dflash-window", "dflash2-window", "dspark-window"]
BLOCKS += ["dflash-reduced", "dspark-reduced"]
CASES = ["three", "whole", "residual", *BLOCKS]


@pytest.mark.parametrize("case", CASES)
def test_an_export_is_served_as_it_drafts_here(gate, case: str):
    code, shown = gate(SERVED / case / "llamacpp", head=SERVED / case / "head")
    assert code == 0 and f"equal: text, drafts and accepted tokens of all {PROMPTS} prompts" in shown


def test_a_draft_model_is_served_as_it_drafts_here(gate, tmp_path: Path):
    write_gguf_model(tmp_path / "draft.gguf", Checkpoint("embedded:draft"))
    code, shown = gate(tmp_path / "draft.gguf", num_drafted=3)
    assert code == 0 and "beside our chain of 3" in shown
    assert float(re.findall(r"at place 3 ([\d.]+)%", shown)[0]) > 20


def test_a_running_server_that_drafts_follows_its_target(tmp_path: Path):
    target, draft, counts = "embedded:prose/target", "embedded:prose/draft", []
    write_gguf_model(tmp_path / "target.gguf", Checkpoint(target))
    write_gguf_model(tmp_path / "draft.gguf", Checkpoint(draft))
    prompts = make_prompts(PromptsConfig("embedded:prose/prompts", target, tmp_path / "prompts", limit=200))
    words = [str(SERVER), "-m", str(tmp_path / "target.gguf"), "-c", "2048", "-np", "4", "-t", "1", "--fit", "off"]
    drafting = ["-md", str(tmp_path / "draft.gguf"), "--spec-type", "draft-simple", "--spec-draft-n-max", "3"]
    for name, more in (("plain", []), ("drafted", drafting)):
        with running([*words, *more, "--no-cache-prompt", "--metrics"], {}) as url:
            asked: Any = {"server": f"{url}/v1", "concurrency": 4}
            make_responses(
                ResponsesConfig(prompts, target, tmp_path / name, engine="llamacpp", max_new_tokens=48, **asked)
            )
            metrics = httpx.get(f"{url}/metrics").text
            counts.append(int(re.findall(r"^llamacpp:n_decode_total (\d+)", metrics, re.MULTILINE)[0]))
    assert counts[1] < counts[0], "nothing was drafted"
    config = CertifyConfig(
        target=target, data=tmp_path / "drafted", control=tmp_path / "plain", head=draft, output=tmp_path / "page"
    )
    assert certify(config) == 0


def test_a_head_is_measured_beside_the_plain_server(target_gguf: Path, tmp_path: Path):
    config = ServedConfig(
        target=str(target_gguf), head=SERVED / "three/llamacpp", data="embedded:prompts", split="test",
        limit=PROMPTS, num_drafted="3", concurrency="1,3", max_new_tokens=48, engine_path=SERVER,
        output=tmp_path / "served",
    )  # fmt: skip
    assert serve(config) == 0
    rows = json.loads((tmp_path / "served/results.json").read_text())["rows"]
    assert [(row["requests"], row["num_drafted"]) for row in rows] == [(1, 0), (1, 3), (3, 0), (3, 3)]
    for plain, drafted in (rows[:2], rows[2:]):
        assert plain["tau"] == 1 and drafted["tau"] > 1.5 and drafted["first_token_s"] > 0
    assert rows[1]["num_differing"] == 0


def layers(numbers: list[int]) -> Edit:
    def edit(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        metadata["eagle3.target_layers"] = numbers

    return edit


def unpermuted(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    for name, heads in (("attn_q", 4), ("attn_k", metadata["eagle3.attention.head_count_kv"][0])):
        tensors[f"blk.0.{name}.weight"] = to_halves(tensors[f"blk.0.{name}.weight"], heads)


def no_norm(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    metadata["eagle3.norm_before_fc"] = False
    del tensors["enc.output_norm.weight"]


def another_rope(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    metadata["eagle3.rope.freq_base"] = 10000.0


def offsets(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["d2t"] = torch.arange(len(tensors["d2t"]))


def setting(**values: Any) -> Edit:
    def edit(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        metadata.update({name.replace("__", "."): value for name, value in values.items()})

    return edit


def adjacent(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    for name, heads in (("attn_q", 4), ("attn_k", metadata["dflash.attention.head_count_kv"][0])):
        tensors[f"blk.0.{name}.weight"] = to_adjacent(tensors[f"blk.0.{name}.weight"], heads)


LAYERS = [k + 1 for k in default_layers(12, 5)]


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (setting(dflash__target_layers=LAYERS), f"layers {', '.join(map(str, LAYERS))} in place of"),
        (setting(dflash__sample_from_anchor=False), "layout fill-in in place of anchor-first"),
        (setting(dflash__attention__causal=True), "slots that see no later ones"),
        (setting(tokenizer__ggml__mask_token_id=0), "mask token 0"),
        (adjacent, "the head of the directory by llama.cpp's rules"),
    ],
    ids=["layers one off", "layout", "causal", "mask", "rotary neighbors"],
)
def test_a_defect_of_a_block_drafter_is_named(gate, tmp_path: Path, edit: Edit, words: str):
    code, shown = gate(edited(tmp_path / "edited", edit, "dspark"), head=SERVED / "dspark/head")
    assert code == 1 and re.search(f"exactly what our chain gives with[^.]*{words}", shown)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (layers([2, 6, 9]), r"layers 2, 6, 9 \(the default\) in place of 1, 4, 11"),
        (layers([0, 3, 10]), "layers 0, 3, 10 in place of 1, 4, 11"),
        (no_norm, "the target's states without their norm"),
        (another_rope, "rope of base 10000"),
        (offsets, r"drafted ids as the target's own \(no d2t\)"),
        (unpermuted, "the head of the directory by llama.cpp's rules"),
    ],
    ids=["default layers", "layers one off", "no norm", "rope", "no d2t", "rotary halves"],
)
def test_a_defect_is_named(gate, tmp_path: Path, edit: Edit, words: str):
    # The head has seen such answers: with other layers its drafts change in few of them, and no fewer are accepted.
    code, shown = gate(edited(tmp_path / "edited", edit), head=SERVED / "three/head", limit=3 * PROMPTS)
    assert code == 1
    assert re.search(f"exactly what our chain gives with[^.]*{words}", shown)
    (theirs, ours), *_ = re.findall(r"\btau ([\d.]+) ([\d.]+)", shown)
    assert words.startswith("layers") or float(theirs) < float(ours)
