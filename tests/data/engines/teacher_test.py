"""The proof of a teacher whose states come from vLLM: on every family the right reading is found, and wrong states are
refused. The states and log-probabilities are transformers'; tests/engines has those of the engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from twins import TWINS, final_norm, save_twin, states_of

from draftsmith.data.engines.served_proof import prove_teacher
from draftsmith.data.engines.vllm_states import LogProbs, Stored
from draftsmith.modules.pretrained.models import load_outer
from draftsmith.modules.targets.readout import Readout
from draftsmith.modules.types import InputError

GENERATOR = torch.Generator().manual_seed(3)
ROWS = [torch.randint(2, 512, (n,), generator=GENERATOR).tolist() for n in (90, 128, 40)]
ROW = [*ROWS[0], *ROWS[1][:38]]
# How logits follow from the state before the final norm.
RIGHT = {
    "gemma3": Readout("rms+1"),
    "gemma4": Readout("rms", softcap=30.0),
    "gpt_oss": Readout("rms", 1e-5),
    "glm4_moe": Readout("rms", 1e-5),
    "granite": Readout("rms", scale=1 / 8),
    "qwen3_5": Readout("rms+1"),
    "qwen3_next": Readout("rms+1"),
}
# Settings of config.json without which a family's logits are wrong.
LEFT_OUT = {"gemma4": "final_logit_softcapping", "granite": "logits_scaling"}


class Recorded:
    """States and log-probabilities of one row, as `ServedStates` hands them out.

    fault: changes the states [T, H] that are handed out; `named`: only those behind a norm.
    """

    def __init__(self, name: str, directory: Path):
        model = save_twin(name, directory)
        states, self.raw, logits = states_of(model, ROW)
        self.before_last, self.weight = states[-2], final_norm(model).weight.detach()
        places = zip(logits[:-1].log_softmax(-1), ROW[1:], strict=True)
        self.log_probs = [{i: row[i].item() for i in {*row.topk(20).indices.tolist(), own}} for row, own in places]
        self.fault: Callable[[Tensor], Tensor] = lambda states: states
        self.wrong_norm: Readout | None = None
        self.dtype: Any = torch.float32
        self.readout: Readout | None = None
        self.teacher: dict[str, Any] | None = None

    def read_with_log_probs(self, row: Sequence[int]) -> tuple[Stored, LogProbs]:
        assert list(row) == ROW
        raw = self.fault(self.raw).to(self.dtype)
        if self.readout is None:
            return {"": raw}, self.log_probs
        return {"": (self.wrong_norm or self.readout).normed(raw, self.weight).to(self.dtype)}, self.log_probs


@pytest.fixture(scope="module")
def twin_of(tmp_path_factory):
    made: dict[str, tuple[Recorded, Path]] = {}

    def make(name: str) -> tuple[Recorded, Path]:
        if name not in made:
            directory = tmp_path_factory.mktemp(name)
            made[name] = Recorded(name, directory), directory
        recorded, directory = made[name]
        fresh = object.__new__(Recorded)
        fresh.__dict__.update(recorded.__dict__)
        return fresh, directory

    return make


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TWINS)
def test_the_reading_that_fits_is_taken_and_proved_as_stored(twin_of, name, dtype):
    source, directory = twin_of(name)
    source.dtype = dtype
    outer = load_outer(str(directory))
    proof = prove_teacher(source, outer, ROWS)
    assert source.readout == proof.readout == RIGHT[name]
    assert outer.readout == replace(RIGHT[name], norm="none")
    assert source.teacher == proof.as_json() and source.teacher["tokens"] == len(ROW) - 1


FAULTS: dict[str, Callable[[Recorded], Any]] = {
    "the state before the last layer": lambda source: setattr(source, "fault", lambda raw: source.before_last),
    "rows shifted by one": lambda source: setattr(source, "fault", lambda raw: raw.roll(1, 0)),
    "gain w for 1 + w, or 1 + w for w": lambda source: setattr(
        source, "wrong_norm", replace(source.right, norm="rms" if source.right.norm == "rms+1" else "rms+1")
    ),
    "no norm": lambda source: setattr(source, "wrong_norm", replace(source.right, norm="none")),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", TWINS)
def test_wrong_states_are_refused(twin_of, name, fault, dtype):
    source, directory = twin_of(name)
    source.right, source.dtype = RIGHT[name], dtype
    FAULTS[fault](source)
    with pytest.raises(InputError, match="teacher: found"):
        prove_teacher(source, load_outer(str(directory)), ROWS)
    assert source.teacher is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_softcap_or_scale_that_is_left_out_is_refused(twin_of, tmp_path, name, dtype):
    source, directory = twin_of(name)
    source.dtype = dtype
    for path in directory.iterdir():
        (tmp_path / path.name).symlink_to(path)
    config = json.loads((directory / "config.json").read_text())
    # transformers' own defaults do not count: the file is read.
    del config[LEFT_OUT[name]]
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="teacher: found"):
        prove_teacher(source, load_outer(str(tmp_path)), ROWS)
