"""What the card of an acceptance head says that no other card does: its inputs, its calibration and its method."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from draftsmith.data.heads.markdown import code, markdown_lines
from draftsmith.modules.drafters.base import HeadCard
from draftsmith.modules.formats.acceptance import DISTRIBUTION, PREDICTED, inputs_of, uses_of

WHAT = (
    "Predicts from a drafter's last hidden state whether the target will keep a drafted token (SpecDec++, Huang et al. "
    "2024). It stops drafts that are likely to fail."
)
SETTINGS = ("num_blocks", "tied", "state", "w_acc", "w_rej", "mix", "calibrate")
ERRORS = {
    "ece": "with the correction for the weights alone",
    "ece_platt": "with scale and shift, cross-fitted",
}


def about(head: Mapping[str, Any], drafter: str | None) -> HeadCard:
    """head: its settings as JSON values; empty where they are not known. drafter: kind of the drafting head whose
    states it reads; None for a draft model's."""
    shape: tuple[str, ...] = ()
    if head:
        blocks = f"{head['num_blocks']} {'tied ' if head.get('tied') else ''}residual block(s)"
        layers = f"{blocks} of width {head.get('width') or head['hidden_size']}, then one logit"
        if head.get("activation") == "relu":
            read = "the state" if head["state"] == "undrawn" else "state and embedding"
            layers = f"a rectified layer over {read}, {layers}; the numbers go straight to it"
        shape = (
            f"- {layers}",
            f"- predicts for {PREDICTED}",
            *(f"- {use}" for use in uses_of(head.get("state", "after")).values()),
        )
    return HeadCard("Acceptance head", WHAT, ("specdec++",), method_of(head, drafter), shape=shape)


def method_of(head: Mapping[str, Any], drafter: str | None) -> str:
    """The method that decodes with the head, as `decode` and `eval bench` are told it."""
    by = f":drafter={drafter}" if drafter else ""
    return f"specdec++:h=0.7{by}" if head.get("state", "after") == "after" else f"online:head=on{by}"


def inputs_table(head: Mapping[str, Any]) -> str:
    """What the head is fed, in order."""
    inputs = inputs_of(head["hidden_size"], head.get("state", "after"), head.get("features", ()))
    rows = [(str(place), part["name"], str(part["size"]), part["is"]) for place, part in enumerate(inputs, 1)]
    table = "\n".join(["", *markdown_lines(("input", "name", "numbers", "what it is"), rows)])
    return f"{table}\n\n{DISTRIBUTION}" if head.get("features") else table


def calibration(manifest: Mapping[str, Any], unknown: str) -> str:
    """How the output becomes a probability, where that holds, and how good it was. unknown: said of what is not
    known."""
    head, metrics, sampling = (manifest.get(name) or {} for name in ("head", "metrics", "sampling"))
    lines = [f"The sampling that its labels were made with is {unknown}."]
    if sampling:
        lines = [f"Labels and calibration hold for this sampling only: {code(sampling)}."]
    if head:
        lines.append(corrections(head, manifest.get("imported") is not None))
    known = [f"{metrics[name]:.4g} {said}" for name, said in ERRORS.items() if name in metrics]
    lines.append(f"Calibration error on held-out tokens: {', '.join(known) or unknown}.")
    return "\n\n".join(lines)


def corrections(head: Mapping[str, Any], assumed: bool) -> str:
    """Steps from the raw output to a probability. assumed: the weights of the loss are those that an import takes."""
    scale, shift = head.get("calibration", (1.0, 0.0))
    weights = f"w_acc {head['w_acc']:g} and w_rej {head['w_rej']:g}{', as its import assumes' if assumed else ''}"
    alike = head["w_acc"] == head["w_rej"]
    said = "accepted and rejected tokens alike" if alike else "rejected tokens otherwise than accepted ones"
    logarithm = f"the logarithm is {math.log(head['w_rej'] / head['w_acc']):.4g}"
    formula = f"scale * (logit + log(w_rej / w_acc)) + shift; {logarithm}, scale {scale:.4g}, shift {shift:.4g}."
    return (
        f"The loss weighs {said} ({weights}){'' if alike else ', so the raw output is no probability'}. The calibrated "
        f"logit is {formula}"
    )
