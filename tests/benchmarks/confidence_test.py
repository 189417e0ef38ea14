"""benchmarks/confidence.py on rounds whose probabilities are known."""

from __future__ import annotations

import json
import random

import pytest

from draftsmith.benchmarks.confidence import ConfidenceConfig, read_traces, run
from draftsmith.eval.bench.trace import TRACE
from draftsmith.modules.types import InputError


def rounds(path, shift: float) -> None:
    """Drafts of three tokens with true probabilities of acceptance; a method states them, another too high ones."""
    rng, lines = random.Random(0), []
    for number in range(4000):
        chances = [rng.uniform(0.1, 0.9) for _ in range(3)]
        accepted = next((i for i, chance in enumerate(chances) if rng.random() >= chance), 3)
        labels = [1.0] * accepted + [0.0] * (accepted < 3)
        where = {"temperature": 0.0, "prompt": number % 10, "accept_prob": labels}
        lines.append({"method": "true", "head": chances, **where})
        lines.append({"method": "high", "head": [min(chance + shift, 0.999) for chance in chances], **where})
        lines.append({"method": "true", "prefill": True, "temperature": 0.0, "prompt": number % 10})
    (path / TRACE).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_true_probabilities_are_calibrated_and_too_high_ones_are_not(tmp_path, capsys):
    rounds(tmp_path, shift=0.09)
    rows = {row["method"]: row for row in run(ConfidenceConfig(tmp_path))}
    true, high = rows["true"], rows["high"]
    assert true["ece"] < 0.03 and true["draft_ece"] < 0.03
    assert high["ece"] == pytest.approx(0.09, abs=0.02) and high["draft_ece"] > 0.06
    assert high["ece_scaled"] < 0.03
    assert true["auc"] == pytest.approx(high["auc"], abs=0.01) and 0.7 < true["auc"] < 0.8
    # A token behind the first rejected one was not verified, and counts for whole drafts only.
    found = read_traces(tmp_path / TRACE)["true", 0.0]
    assert len(found.prob) == 12_000 and true["tokens"] == int(found.verified.sum()) < 12_000
    assert "ECE of drafts" in capsys.readouterr().out


def test_a_run_without_traces_is_refused(tmp_path):
    with pytest.raises(InputError, match="--traces"):
        run(ConfidenceConfig(tmp_path))
