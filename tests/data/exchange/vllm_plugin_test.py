"""vLLM's plugin where there is no vLLM: what it says then, and the priors that it reads. With vLLM: tests/engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from draftsmith.data.exchange import vllm_plugin
from draftsmith.data.exchange.vllm_plugin import VARIABLE, read_start, register
from draftsmith.modules.acceptance.served import Start
from draftsmith.modules.types import InputError

START = Start((0.5, 0.4), (0.1, -0.2), (((1.0, 0.5, 0.2),) * 3,) * 2)


def test_the_entry_point_is_it():
    project = tomllib.loads(Path(vllm_plugin.__file__).parents[2].joinpath("pyproject.toml").read_text())["project"]
    assert project["entry-points"]["vllm.general_plugins"] == {"draftsmith": f"{vllm_plugin.__name__}:register"}


def test_nothing_heavy_is_loaded_unless_asked_for():
    """Each process of vLLM loads it."""
    heavy = "print({'torch', 'vllm'} & {*sys.modules})"
    code = f"import sys, {vllm_plugin.__name__} as plugin; plugin.register(); {heavy}"
    env = {name: value for name, value in os.environ.items() if name != VARIABLE}
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert made.stdout == "set()\n", made.stderr


@pytest.mark.parametrize("asked", ["1", "priors"])
def test_no_vllm_is_said_in_one_line(monkeypatch, tmp_path, asked):
    path = tmp_path / "priors.json"
    path.write_text(json.dumps(vars(START)))
    monkeypatch.setenv(VARIABLE, str(path) if asked == "priors" else asked)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(
        InputError, match=r"vllm: found .*vllm.*, expected the acceptance estimator .* leave"
    ) as refused:
        register()
    assert "\n" not in str(refused.value)


def test_priors_come_back(tmp_path):
    path = tmp_path / "priors.json"
    path.write_text(json.dumps(vars(START)))
    weights, intercepts, information = read_start(str(path)).tensors(3)
    assert weights.tolist() == pytest.approx([0.5, 0.4])
    assert intercepts.tolist() == pytest.approx([0.1, -0.2, -0.2])
    assert information[0, 0].tolist() == pytest.approx([1.0, 0.5, 0.2]) and not information[2].any()


@pytest.mark.parametrize("text", [
    None, "no JSON", "[]", "{}", json.dumps(vars(START) | {"weights": [1.0]}), json.dumps(vars(START) | {"more": 1}),
    json.dumps(vars(START) | {"intercepts": [0.0]}), json.dumps(vars(START) | {"information": [1.0, 2.0]}),
    json.dumps(vars(START) | {"weights": ["a", "b"]}), json.dumps(vars(START) | {"intercepts": []}),
    json.dumps(vars(START) | {"weights": [float("nan"), 1.0]}),
])  # fmt: skip
def test_what_are_no_priors_is_refused_in_one_line(tmp_path, text):
    path = tmp_path / "priors.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=f"{VARIABLE}: found .*, expected ") as refused:
        read_start(str(path))
    assert "\n" not in str(refused.value)
