"""How far a target in fewer bits is from itself, against scipy's formulas."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.special
import torch
from tiny_models import tiny_llama_dir

from draftsmith.data.models.loading import load_lm
from draftsmith.eval.bench import measuring
from draftsmith.eval.bench.measuring import measure_fidelity
from draftsmith.eval.bench.tables import fidelity_of

TEXTS = [[5, 17, 250, 31, 7], [9, 8, 7], [1, 2, 3, 4]]


@pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="no VNNI: int8 may be refused here")
def test_means_are_those_of_every_token(tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "FIDELITY_TOKENS", 10)
    directory = str(tiny_llama_dir(tmp_path))
    target, reference = load_lm(directory, precision="int8"), load_lm(directory)
    kls, variations, same = [], [], []
    for text in ([5, 17, 250, 31, 7], [9, 8, 7], [1, 2]):  # ten tokens
        logits = [lm.lm_head(lm.features(torch.tensor([text])))[0].double().numpy() for lm in (reference, target)]
        p, q = (scipy.special.softmax(own, -1) for own in logits)
        kls += scipy.special.rel_entr(p, q).sum(-1).tolist()
        variations += (0.5 * np.abs(p - q).sum(-1)).tolist()
        same += (p.argmax(-1) == q.argmax(-1)).tolist()
    found = measure_fidelity(target, reference, TEXTS)
    assert found["tokens"] == 10 and found["kl"] > 0
    # Both are float64 from the same logits.
    assert found["kl"] == pytest.approx(np.mean(kls), rel=1e-6)
    assert found["total_variation"] == pytest.approx(np.mean(variations), rel=1e-6)
    assert found["same_choice"] == pytest.approx(np.mean(same))
    said = fidelity_of({"settings": {"target_precision": "int8", "dtype": "float32"}, "target_fidelity": found})
    assert "in int8" in said and f"{np.mean(same):.1%}" in said


def test_a_target_is_itself(tmp_path):
    target = load_lm(str(tiny_llama_dir(tmp_path)))
    assert measure_fidelity(target, target, TEXTS) == {"tokens": 12, "kl": 0, "total_variation": 0, "same_choice": 1}
    assert fidelity_of({"settings": {}}) == ""
