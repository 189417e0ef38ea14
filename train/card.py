"""The model card of a head: what it is, what it was made from, what was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

WHAT = {
    "acceptance": (
        "Acceptance head",
        "Predicts from a draft model's last hidden state whether the target will keep the token the draft has just "
        "read (SpecDec++, Huang et al. 2024). It stops drafts that are likely to fail.",
    ),
    "eagle": (
        "EAGLE head",
        "Drafts tokens from the target's own features (EAGLE, Li et al. 2024). Embedding and lm_head are the target's "
        "and not in this directory.",
    ),
}
MEANING = {
    "kl": "binary KL from the acceptance probability, nats a token, unweighted, calibrated output",
    "brier": "mean squared distance from the acceptance probability, calibrated output",
    "ece": "calibration error, 15 bins of equal mass, corrected for the loss' weights only",
    "ece_platt": "the same with the fitted scale and shift, 2-fold cross-fitted",
    "auc": "AUC with soft labels: each token counts P as positive, 1-P as negative",
    "auc_q": "the same for the draft's own probability of the token: what the head has to beat",
    "loss": "training loss on held-out samples",
    "feature_loss": "smooth-L1 distance of features",
    "token_loss": "soft cross-entropy against the target's distribution, nats a token",
    "top1": "share of response tokens where the head's first choice is the target's, teacher-forced",
    "top3": "share where the target's choice is among the head's first three",
    "tau": "emitted tokens per target call, greedy chains on held-out prompts",
}

STEPS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


def meaning(name: str) -> str:
    """Of a metric, in words; nothing for one that is not known."""
    stem, _, number = name.rpartition("_")
    if stem == "agreement" and number.isdigit():
        step = STEPS[int(number) - 1] if 0 < int(number) <= len(STEPS) else f"{number}th"
        return f"share of drafts whose {step} token is the target's choice, of those that were right until then"
    return MEANING.get(name, "")


def model_card(job: str, manifest: Mapping[str, Any]) -> str:
    """Markdown from a head's manifest (train/fit.py writes it)."""
    title, what = WHAT[job]
    config = manifest["config"]
    rows = "\n".join(f"| {n} | {v:.4g} | {meaning(n)} |" for n, v in sorted(manifest["metrics"].items()))
    measured = f"| metric | value | meaning |\n|---|---|---|\n{rows}" if rows else "Not validated yet."
    settings = ("batch_size", "lr", "schedule", "weight_decay", "clip", "precision", "seed")
    trained = ", ".join(f"{name} {config[name]}" for name in settings)
    sampling = manifest["sampling"]
    valid = f"\nLabels and calibration hold for this sampling only: {json.dumps(sampling)}.\n" if sampling else ""
    return f"""# {title}

{what}
{valid}
## Measured on held-out samples

After step {manifest["step"]}:

{measured}

## Made from

- data: `{config["data"]}`
- models: `{json.dumps(manifest["models"], sort_keys=True)}`
- training: {trained}
- versions: draftsmith {manifest["packages"].get("draftsmith")}, torch {manifest["packages"].get("torch")}

`manifest.json` holds everything, with hashes.
"""
