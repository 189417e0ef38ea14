"""Artifacts of another target are refused by every command that reads them."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from draftsmith.launch.cli import main


def test_data_of_a_fine_tuned_target_is_refused_everywhere(chain, tmp_path, capsys):
    tuned = Path(shutil.copytree(chain.target, tmp_path / "tuned"))
    state = load_file(tuned / "model.safetensors")
    state |= {name: tensor * 1.15 for name, tensor in state.items() if "_proj" in name}
    save_file(state, tuned / "model.safetensors", {"format": "pt"})
    responses, out = chain.directory("responses"), tmp_path / "out"
    labels, made = chain.directory("acceptance"), chain.directory("features")
    for words in (
        f"data features --responses {responses} --target {tuned}",
        f"data acceptance --responses {responses} --target {tuned} --draft {chain.draft}",
        f"train eagle --data {made} --target {tuned}",
        f"train eagle --data {responses} --target {tuned}",
        f"train acceptance --data {labels} --draft {tuned}",
    ):
        assert main([*words.split(), "--output", str(out)]) == 2, words
        error = capsys.readouterr().err.splitlines()[-1]
        assert ".weights: " in error and "Make it again: draftsmith data" in error, error
