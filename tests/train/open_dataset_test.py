"""Any artefact by its directory; here, where all kinds are made for trainings anyway."""

from __future__ import annotations

import pytest
import torch

import draftsmith
from draftsmith.data.store.manifest import Manifest
from draftsmith.data.store.rows import Rows
from draftsmith.modules.types import InputError


@pytest.mark.parametrize("name", ["prompts", "responses", "features", "acceptance", "rollouts"])
def test_rows_and_columns_of_an_artefact(artefacts, rollouts, name):
    directory = {"rollouts": rollouts, "prompts": artefacts.responses.parent / "prompts"}.get(name)
    data = draftsmith.open_dataset(directory or getattr(artefacts, name))
    columns = Rows(data.directory, data.manifest).table().to_pylist()
    assert len(columns) == len(data) > 0
    item = data[len(data) - 1]
    ids = "prompt_ids" if name == "prompts" else "input_ids"
    if name != "acceptance":  # whose tokens are mixed
        assert torch.equal(item["input_ids"], torch.tensor(columns[-1][ids]))
    assert ("loss_mask" in item) == (name != "prompts")


def test_another_kind_is_refused(tmp_path):
    Manifest("results").write(tmp_path)
    with pytest.raises(InputError, match="kind results"):
        draftsmith.open_dataset(tmp_path)
    with pytest.raises(InputError):
        draftsmith.open_dataset(tmp_path / "nowhere")
