"""What the numbers of a validation mean, in words."""

from __future__ import annotations

HELP = {
    "kl": "binary KL from the acceptance probability, nats a token, without w_acc and w_rej, calibrated output",
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
    "tau": "emitted tokens per target call, greedy chains; end tokens are ignored where tau_behind_end is there",
    "tau_behind_end": "share of those tokens that come behind an end token: the target serves no such text",
}
STEPS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


def metric_help(name: str) -> str:
    """What a number of a validation means, in words; nothing for one that is not known."""
    stem, _, number = name.rpartition("_")
    if stem == "agreement" and number.isdigit():
        step = STEPS[int(number) - 1] if 0 < int(number) <= len(STEPS) else f"{number}th"
        return f"share of drafts whose {step} token is the target's choice, of those that were right until then"
    return HELP.get(name, "")
