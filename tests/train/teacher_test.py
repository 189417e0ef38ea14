"""A wrong teacher is refused before anything is learned from it or stored."""

from __future__ import annotations

import json

import pytest
from trainings import config

from draftsmith.data.features import run as make_features
from draftsmith.data.stages import FeaturesConfig
from draftsmith.data.store.manifest import MANIFEST, Manifest
from draftsmith.modules.targets.llama import LlamaLM
from draftsmith.modules.types import InputError
from draftsmith.train.prepare import prepare

CORRECT = LlamaLM.features
WRONG = {
    "rows shifted by one": lambda lm, *args, **how: CORRECT(lm, *args, **how).roll(1, 1),
    "a layer too early": lambda lm, ids, *_, **__: CORRECT(lm, ids, aux_layers=(lm.info.num_layers - 1,)),
    # fp8 rounds by more.
    "logits that are 1 % larger": lambda lm, *args, **how: CORRECT(lm, *args, **how) * 1.01,
    "without the final norm": lambda lm, *args, **how: CORRECT(lm, *args, **how) / lm.model.norm.weight * 3.0,
}


@pytest.mark.parametrize("feature_dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_teacher_is_refused_before_the_first_step_and_before_it_is_stored(
    artifacts, tmp_path, monkeypatch, name, feature_dtype
):
    where = {"data": artifacts.responses, "output": tmp_path / "features", "target": str(artifacts.target)}
    stored = FeaturesConfig(**where, feature_dtype=feature_dtype)
    monkeypatch.setattr(LlamaLM, "features", WRONG[name])
    with pytest.raises(InputError, match=r"teacher: found .*the target in this process"):
        prepare(config(artifacts, tmp_path / "run", data=artifacts.responses))
    with pytest.raises(InputError, match=r"teacher: found .*stored features"):
        make_features(stored)
    assert not (tmp_path / "features" / MANIFEST).exists()


def test_a_right_teacher_is_proved_and_recorded(artifacts, tmp_path, capsys):
    module, _ = prepare(config(artifacts, tmp_path / "run", data=artifacts.responses))
    assert "teacher proved on" in capsys.readouterr().err
    assert module.source.teacher["largest"] < 1e-3
    directory = make_features(
        FeaturesConfig(data=artifacts.responses, output=tmp_path / "features", target=str(artifacts.target))
    )
    teacher = Manifest.read(directory).teacher
    assert teacher["source"] == "stored features" and 0 <= teacher["largest"] < 0.3

    manifest = json.loads((directory / MANIFEST).read_text())
    (directory / MANIFEST).write_text(json.dumps({**manifest, "teacher": None}))
    with pytest.raises(InputError, match="features whose teacher was not proved"):
        prepare(config(artifacts, tmp_path / "other", data=directory))
