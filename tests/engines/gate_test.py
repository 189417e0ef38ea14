"""`draftsmith check --engine vllm` on exports of heads that know something (`served.py`), on a draft model, and on
directories with one defect each: the whole vLLM engine is started on each. Run by `make test-engines`, by our own
python."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.eval.check.check import run
from draftsmith.eval.engines.served import ServedConfig
from draftsmith.eval.engines.served import run as serve
from draftsmith.eval.settings import CheckConfig
from draftsmith.modules.formats import formats
from draftsmith.modules.pretrained.directory import read_package
from draftsmith.modules.pretrained.heads import load_head, stored_tensors
from draftsmith.modules.types import InputError

torch.set_num_threads(1)
SERVED = Path(os.environ["DRAFTSMITH_ENGINES"]) / "served"
PYTHON = Path(os.environ["DRAFTSMITH_ENGINE_PYTHON"])
# The first four prompts are those that the heads `taught` and `biased` learned by heart.
TARGET, PROMPTS = "embedded:target", 4


@pytest.fixture
def gate(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def call(directory: Path | str, **settings: Any) -> tuple[int, str]:
        given = {"target": TARGET, "engine": "vllm", "engine_path": PYTHON, "limit": PROMPTS, **settings}
        code = run(CheckConfig(directory=Path(directory), **given))
        shown = capsys.readouterr().out
        with capsys.disabled():
            print(f"\n{shown}")
        return code, " ".join(shown.split())

    return call


def shares(shown: str) -> list[tuple[float, float]]:
    """Accepted by place, in the engine and here."""
    found = re.findall(r"at place \d+ ([\d.]+)% ([\d.]+)%", shown)
    return [(float(theirs), float(ours)) for theirs, ours in found]


def edited(export: str, to: Path, config: dict[str, Any]) -> Path:
    """A copy of an export with these fields of `config.json`, and no record of what was exported."""
    shutil.copytree(SERVED / export, to)
    fields = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**fields, **config}))
    (to / "draftsmith.json").unlink()
    return to


EXPORTS = [
    "eagle/vllm",
    "taught/vllm",
    "reduced/speculators",
    "dflash/vllm",
    "dflash/speculators",
    "window/vllm",
    "ends/vllm",
    "residual/speculators",
]


@pytest.mark.parametrize("export", [*EXPORTS, "dflash-window/vllm", "dflash-reduced/vllm"])
def test_an_export_is_served_as_it_drafts_here(gate, export: str):
    code, shown = gate(SERVED / export, head=SERVED / export / "../head")
    assert code == 0 and f"equal: text, drafts and accepted tokens of all {PROMPTS} prompts" in shown
    far = 5 if "dflash" not in export else 0
    assert shares(shown)[3][0] > far, "the head knows nothing: no draft is followed far"


def test_wrong_layers_of_a_block_drafter_are_named(gate, tmp_path: Path):
    own = json.loads((SERVED / "dflash/vllm/config.json").read_text())["dflash_config"]
    late = {**own, "target_layer_ids": [number + 1 for number in own["target_layer_ids"]]}
    directory = edited("dflash/vllm", tmp_path / "layers", {"dflash_config": late})
    code, shown = gate(directory, head=SERVED / "dflash/head")
    assert code == 1 and "exactly what our chain gives with layers 3, 5, 7, 9, 11 in place of 2, 4, 6, 8, 10" in shown


@pytest.mark.parametrize(
    ("export", "edit", "words"),
    [
        ("window", {"layer_types": ["full_attention"] * 2}, "no window in place of 12 tokens"),
        ("window", {"sliding_window": 11}, "a window of 11 tokens in place of 12"),
        ("dflash-window", {"layer_types": ["full_attention"]}, "no window in place of 12 tokens"),
    ],
)
def test_another_window_is_named(gate, tmp_path: Path, export: str, edit: dict[str, Any], words: str):
    code, shown = gate(edited(f"{export}/vllm", tmp_path / "other", edit), head=SERVED / export / "head")
    assert code == 1 and re.search(rf"exactly what our chain gives with .*{words}", shown)


def test_dspark_is_not_served_without_triton():
    given = {"target": TARGET, "engine": "vllm", "engine_path": PYTHON, "limit": 1}
    with pytest.raises(InputError, match="engine: found a vLLM without Triton") as error:
        run(CheckConfig(directory=SERVED / "dspark/vllm", **given))
    assert "\n" not in str(error.value)


def test_a_draft_model_is_served_as_it_drafts_here(gate):
    code, shown = gate("embedded:draft", num_drafted=3)
    assert code == 0 and "beside our chain of 3" in shown
    assert shares(shown)[2][0] > 20


def test_a_head_is_measured_beside_the_plain_server(tmp_path: Path):
    config = ServedConfig(
        engine="vllm", target=TARGET, head=SERVED / "taught/vllm", data="embedded:prompts", split="test",
        limit=PROMPTS, num_drafted="3", max_new_tokens=48, engine_path=PYTHON, output=tmp_path / "served",
    )  # fmt: skip
    assert serve(config) == 0
    plain, drafted = json.loads((tmp_path / "served/results.json").read_text())["rows"]
    assert plain["tau"] == 1 and drafted["tau"] > 1.5 and drafted["num_differing"] == 0
    assert plain["tokens_per_s"] > 1 and 0.1 < drafted["speedup"] < 10


def assert_falls(shown: str, length: float) -> None:
    """Assert that the engine has so much less tau than our chain of the head as it was trained."""
    (theirs, ours), *_ = re.findall(r"\btau ([\d.]+) ([\d.]+)", shown)
    assert float(ours) - float(theirs) >= length


def test_wrong_layers_are_named(gate, tmp_path: Path):
    directory = edited("taught/vllm", tmp_path / "layers", {"eagle_aux_hidden_state_layer_ids": [0, 3, 10]})
    code, shown = gate(directory, head=SERVED / "taught/head")
    assert code == 1
    assert "exactly what our chain gives with layers 0, 3, 10 in place of 1, 4, 11" in shown
    # The head knows these answers by heart: other states change its drafts, and hardly how many are accepted.
    assert "differs: " in shown


def test_another_rope_is_named(gate, tmp_path: Path):
    rope = {"rope_theta": 10000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    code, shown = gate(edited("taught/vllm", tmp_path / "rope", rope), head=SERVED / "taught/head")
    assert code == 1
    assert "exactly what our chain gives with rope of base 10000 (the target's) in place of base 300" in shown
    assert_falls(shown, 0.5)


def test_a_lost_bias_is_named_without_the_trained_head(gate, tmp_path: Path):
    """SafeAILab's code computes with the bias of fc, vLLM leaves it out without a word."""
    head: Any = load_head(SERVED / "biased/head")
    state = stored_tensors(head)
    directory = edited("eagle/vllm", tmp_path / "bias", {})
    config = json.loads((directory / "config.json").read_text())
    del config["bias"]  # which to SafeAILab's code says that there is none
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, directory / "model.safetensors")
    assert load_file(directory / "model.safetensors")["fc.bias"].any()
    package = read_package(str(directory))
    assert any(found.where == "fc.bias" for found in formats()["vllm", "eagle"].read(package).problems)
    code, shown = gate(directory)
    assert code == 1
    assert "exactly what our chain gives with no bias of fc" in shown
    assert_falls(shown, 0.3)
