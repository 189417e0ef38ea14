"""The card of an acceptance head: beside what every head's card says, its inputs, calibration and methods."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from draftsmith.data.heads.markdown import code, markdown_lines
from draftsmith.data.heads.sections import ModelCard
from draftsmith.modules.drafters import head_class, learned
from draftsmith.modules.drafters.base import HeadCard
from draftsmith.modules.interop import formats_of
from draftsmith.modules.interop.acceptance import DISTRIBUTION, PREDICTED, inputs_of

WHAT = (
    "Predicts from a drafter's last hidden state whether the target will keep a drafted token (SpecDec++, Huang et al. "
    "2024). It stops drafts that are likely to fail."
)


class AcceptanceCard(ModelCard):
    """The card of an acceptance head."""

    @property
    def about(self) -> HeadCard:
        method = method_of(self.head, self.drafter)
        return HeadCard("Acceptance head", WHAT, ("specdec++",), method, shape=describe_head(self.head))

    @cached_property
    def drafter(self) -> str | None:
        """Kind of the drafting head whose hidden states it reads; None where it reads a draft model's."""
        return next((kind for kind in learned() if kind in (self.manifest.get("target") or {})), None)

    @property
    def reads(self) -> str:
        return "draft"

    @property
    def read_model(self) -> str | None:
        # Earlier versions recorded a drafting head by its kind.
        return self.recorded("draft") or (self.recorded(self.drafter) if self.drafter else None)

    @property
    def reads_name(self) -> str:
        return head_class(self.drafter).card({}).title if self.drafter else "draft"

    @property
    def base_model(self) -> str | None:
        return self.target if self.drafter else self.read_model

    @property
    def models_words(self) -> str:
        drafter = shlex.quote(self.read_model or "DRAFT")
        return f"--target {shlex.quote(self.target or 'TARGET')} --draft {drafter} --acceptance DIR"

    def own_settings(self) -> list[str]:
        return ["num_blocks", "tied", "state", "judges", "w_acc", "w_rej", "mix", "calibrate"]

    def tables(self) -> list[str]:
        return [inputs_table(self.head)] if "num_blocks" in self.head else []

    def verdicts(self) -> list[str]:
        return [f"- identity of the target, whose verdicts it predicts: {self.known(self.models.get('target'))}"]

    def exports(self) -> list[str]:
        names = [format.name for format in formats_of(self.kind) if format.holds(self.head)]
        return [f"draftsmith export --head DIR --format {name} --output DIR-{name}" for name in names]

    def calibration_section(self) -> str:
        return calibration_text(self.manifest, self.unknown)

    def licence_section(self, others: str = "of the target, whose verdicts it predicts, and of the data") -> str:
        return super().licence_section(others)


def describe_head(head: Mapping[str, Any]) -> tuple[str, ...]:
    """Lines on what the head is."""
    if "num_blocks" not in head:
        return ()
    blocks = f"{head['num_blocks']} {'tied ' if head.get('tied') else ''}residual block(s)"
    return (
        f"- {blocks} of width {head.get('width') or head['hidden_size']}, then one logit",
        f"- predicts for {PREDICTED[head.get('judges', 'chain')]}",
    )


def inputs_table(head: Mapping[str, Any]) -> str:
    """What the head is fed, in order."""
    inputs = inputs_of(head["hidden_size"], head.get("state", "after"), head.get("features", ()))
    rows = [(str(place), part["name"], str(part["size"]), part["is"]) for place, part in enumerate(inputs, 1)]
    table = "\n".join(markdown_lines(("input", "name", "numbers", "what it is"), rows))
    return f"{table}\n\n{DISTRIBUTION}" if head.get("features") else table


def calibration_text(manifest: Mapping[str, Any], unknown: str) -> str:
    """How the output becomes a probability, where that holds, and how good it was. unknown: said of what is not
    known."""
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
    """Steps from the raw output to a probability. assumed: the weights of the loss are those that an import takes."""
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


def method_of(head: Mapping[str, Any], drafter: str | None) -> str:
    """The method that decodes with the head, as `decode` and `eval bench` are told it. drafter: as of the card."""
    if head.get("judges") == "tree":
        methods = (head_class(kind).card({}).tree_method for kind in ([drafter] if drafter else learned()))
        return next(filter(None, methods), "METHOD")
    by = f":drafter={drafter}" if drafter else ""
    return f"cost{by}" if head.get("state") == "before" else f"specdec++:h=0.7{by}"
