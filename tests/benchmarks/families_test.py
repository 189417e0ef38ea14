"""Small targets of other families."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftsmith.benchmarks.embedded import families, language_model
from draftsmith.benchmarks.embedded.language_model import PaddedBatch
from draftsmith.modules.pretrained.models import load_lm


@pytest.mark.parametrize("name", families.FAMILIES)
def test_a_family_has_two_to_four_million_weights_and_its_loss_is_that_of_transformers(name):
    torch.manual_seed(0)
    model = families.FAMILIES[name](vocab_size=4096, pad_token_id=0, eos_token_id=4, **families.SHAPE)
    assert 2e6 < sum(weight.numel() for weight in model.parameters()) < 4e6

    ids = torch.randint(5, 4096, (2, 12))
    weights = torch.ones(2, 12)
    weights[:, 0] = 0
    weights[1, 9:] = 0  # padding
    labels = ids.masked_fill(weights == 0, -100)
    expected = model(ids, labels=labels).loss
    assert families.next_token_loss(model, PaddedBatch(ids, weights)).item() == pytest.approx(expected.item(), abs=1e-5)


def test_a_target_is_saved_with_its_tokenizer_and_finished_stages_are_not_trained_again(tmp_path, monkeypatch):
    monkeypatch.setattr(families, "STAGE", replace(families.STAGE, steps=1, tokens_per_step=64))
    monkeypatch.setattr(families, "RATES", (1e-3,))
    config = families.FamiliesConfig(tmp_path, families="gemma4", num_threads=1)
    families.run(config)
    lm = load_lm(str(tmp_path / "gemma4"))
    logits = lm.lm_head(100 * torch.randn(4, 128))
    assert logits.abs().max() <= 30  # the softcap

    monkeypatch.setattr(language_model, "train_steps", pytest.fail)
    families.run(config)
