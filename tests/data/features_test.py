"""Features against transformers' hidden states; how much is written is said, and bounded, before it is."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from draftsmith.data.prompts import PromptsConfig, run
from draftsmith.data.store.datasets import open_dataset
from draftsmith.data.store.manifest import Manifest
from draftsmith.data.store.rows import Rows
from draftsmith.modules.types import InputError

TOKENS, HIDDEN = 298, 32  # of the shared chain


def test_a_feature_is_the_state_after_the_final_norm_in_bf16(chain):
    oracle = AutoModelForCausalLM.from_pretrained(chain.target, dtype=torch.float32).eval()
    data = open_dataset(chain.directory("features"))
    assert len(data) == 11
    for item in data:
        with torch.no_grad():
            expected = oracle.model(item["input_ids"][None]).last_hidden_state[0]
        assert item["features"].dtype == torch.bfloat16
        # bf16 keeps 8 bits of the mantissa.
        torch.testing.assert_close(item["features"].float(), expected, rtol=2**-8, atol=1e-3)


def test_supervised_prompts_bring_their_own_mask(chain, remake, tmp_path):
    config = PromptsConfig(str(chain.source), str(chain.target), tmp_path / "supervised", supervised=True)
    supervised = Rows(Manifest.read(run(config))).read(0, 11)
    data = open_dataset(remake("features", data=config.output))
    assert [item["loss_mask"].tolist() for item in data] == [row["loss_mask"] for row in supervised]
    assert [item["input_ids"].tolist() for item in data] == [row["input_ids"] for row in supervised]


def test_prompts_without_answers_are_refused(chain, remake):
    with pytest.raises(InputError, match="found prompts without answers"):
        remake("features", data=chain.directory("prompts"))


def test_the_bytes_are_said_first(remake, tmp_path, capsys):
    remake("features")
    assert f"{TOKENS} tokens x {2 * HIDDEN} bytes" in capsys.readouterr().err
    written = sum(path.stat().st_size for path in (tmp_path / "features").glob("*.safetensors"))
    assert 2 * HIDDEN * TOKENS < written < 2 * HIDDEN * TOKENS + 11 * 200  # and a header for each row


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(remake, tmp_path, monkeypatch):
    import shutil

    real = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real._replace(free=1000))
    with pytest.raises(InputError, match="output: found 1,000 bytes free"):
        remake("features")
    assert not (tmp_path / "features").exists()
