"""What the model card of an acceptance head says beside what every head's card does: inputs, calibration, methods.

Pure, from the head's settings and its manifest, as data/heads/card.py is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from draftsmith.data.heads.markdown import code, markdown_lines
from draftsmith.modules.interop.acceptance import JUDGES, LAW, inputs_of


def described(head: Mapping[str, Any]) -> list[str]:
    """Lines on what the head is."""
    blocks = f"{head['num_blocks']} {'tied ' if head.get('tied') else ''}residual block(s)"
    return [
        f"- {blocks} of width {head.get('width') or head['hidden_size']}, then one logit",
        f"- judges {JUDGES[head.get('judges', 'chain')]}",
    ]


def inputs_table(head: Mapping[str, Any]) -> str:
    """What the head is fed, in order."""
    inputs = inputs_of(head["hidden_size"], head.get("state", "after"), head.get("features", ()))
    rows = [(str(place), part["name"], str(part["size"]), part["is"]) for place, part in enumerate(inputs, 1)]
    table = "\n".join(markdown_lines(("input", "name", "numbers", "what it is"), rows))
    return f"{table}\n\n{LAW}" if head.get("features") else table


def calibration_text(manifest: Mapping[str, Any], unknown: str) -> str:
    """From the output to a probability, where that holds, and how good it was. unknown: said of what is not known."""
    head, metrics = manifest.get("head") or {}, manifest.get("metrics") or {}
    sampling = manifest.get("sampling")
    lines = [f"Labels and calibration hold for this sampling only: {code(sampling)}."]
    if not sampling:
        lines = [f"The sampling that its labels were made with is {unknown}."]
    if head:
        lines.append(corrections(head, manifest.get("imported") is not None))
    errors = {
        "ece": "with the correction for the weights alone",
        "ece_platt": "with scale and shift, cross-fitted",
        "ece_isotonic": "with the knots, cross-fitted",
    }
    known = [f"{metrics[name]:.4g} {said}" for name, said in errors.items() if name in metrics]
    lines.append(f"Calibration error on held-out tokens: {', '.join(known) or unknown}.")
    return "\n\n".join(lines)


def corrections(head: Mapping[str, Any], assumed: bool) -> str:
    """From the raw output to a probability. assumed: the weights of the loss are those that an import takes."""
    scale, shift = head.get("calibration", (1.0, 0.0))
    weights = f"w_acc {head['w_acc']:g} and w_rej {head['w_rej']:g}{', as its import assumes' if assumed else ''}"
    alike = head["w_acc"] == head["w_rej"]
    said = "accepted and rejected tokens alike" if alike else "rejected tokens otherwise than accepted ones"
    logarithm = f"the logarithm is {math.log(head['w_rej'] / head['w_acc']):.4g}"
    knots = len(head.get("knots", ()))
    formula = f"scale * (logit + log(w_rej / w_acc)) + shift; {logarithm}, scale {scale:.4g}, shift {shift:.4g}."
    if knots:
        formula = f"read off {knots} knots, straight lines between them, at logit + log(w_rej / w_acc); {logarithm}."
    return (
        f"The loss weighs {said} ({weights}){'' if alike else ', so the raw output is no probability'}. The calibrated "
        f"logit is {formula}"
    )


def method_of(head: Mapping[str, Any], by_eagle: bool) -> str:
    """The method that decodes with the head, as `decode` and `eval bench` are told it. by_eagle: it judges the drafts
    of an EAGLE head."""
    if head.get("judges") == "tree":
        return "eagle2:value=head"
    drafter = ":drafter=eagle" if by_eagle else ""
    return f"cost{drafter}" if head.get("state") == "before" else f"specdec++:h=0.7{drafter}"


def export_formats(head: Mapping[str, Any]) -> list[str]:
    """Formats of `draftsmith export` that hold it. SpecDec_pp's layout holds one block, or several that are the same
    one, and its class is fed the state after the token alone."""
    blocks = bool(head.get("tied")) or head.get("num_blocks", 2) <= 1
    published = head.get("state", "after") == "after" and not head.get("features") and head.get("judges") != "tree"
    return ["specdec_pp"] * (blocks and published) + ["acceptance"]
