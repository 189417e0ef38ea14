"""Way from a target's last hidden state to its logits: final norm, output embedding, scale, softcap.

Families differ in all four, and a wrong one gives a teacher that is wrong and looks right. So none is looked up by the
family's name: what config.json and the weights allow are candidates, and the target's own logits choose among them
(`targets.proof`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

# Gain of the final norm: `rms` x / rms(x) * w, `layer` LayerNorm with w; with `+1` the gain is 1 + w.
Norm = Literal["none", "rms", "rms+1", "layer", "layer+1"]
NORMS: tuple[Norm, ...] = ("rms", "rms+1", "layer", "layer+1", "none")
# Settings that scale logits or bound them, by the names that families use: logit_scale, logits_scaling,
# logits_mup_width_multiplier, lm_head_multiplier, output_multiplier_scale; final_logit_softcapping, logits_soft_cap.
# Not attention's softcap.
SCALE = re.compile(r"^(logits?_scal\w*|logits?_mult\w*|logits?_mup\w*|lm_head_mult\w*|output_mult\w*)$")
SOFTCAP = re.compile(r"^(?!attn)\w*logits?_soft_?cap\w*$")
EPS = re.compile(r"^(rms_|layer_?)?norm_(eps|epsilon)$")


@dataclass(frozen=True)
class Readout:
    """Steps from a target's last state to its logits.

    norm, eps: of a state from before the final norm. scale: of the products with the output embedding. softcap: then
    logits are softcap * tanh(logits / softcap).
    """

    norm: Norm = "none"
    eps: float = 1e-6
    scale: float = 1.0
    softcap: float | None = None

    def normed(self, state: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> Tensor:
        """Return the state [.., H] behind the final norm, in float32. weight, bias: [H]; None: ones, zeros."""
        x = state.float()
        if self.norm == "none":
            return x
        gain = torch.ones(x.shape[-1:], device=x.device) if weight is None else weight.float()
        gain = 1 + gain if self.norm.endswith("+1") else gain
        if self.norm.startswith("rms"):
            return F.rms_norm(x, gain.shape, gain, self.eps)
        return F.layer_norm(x, gain.shape, gain, None if bias is None else bias.float(), self.eps)

    def bounded(self, logits: Tensor) -> Tensor:
        """Scale and bound products [.., V] of states with the output embedding."""
        if self.scale != 1:
            logits = logits * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return logits [.., V] of normed states [.., H]. weight: [V, H], bias: [V], of the output embedding."""
        return self.bounded(F.linear(hidden, weight, bias))

    def __str__(self) -> str:
        scaled = "" if self.scale == 1 else f", logits times {self.scale:g}"
        return f"norm {self.norm}{scaled}" + ("" if self.softcap is None else f", softcap {self.softcap:g}")


def candidates(config: Mapping[str, object], norms: tuple[Norm, ...] = NORMS) -> Iterator[Readout]:
    """Yield every readout that a `config.json` (its text part) allows, the likeliest first.

    norms: ("none",) for states from behind the final norm.
    """
    numbers = {key: float(value) for key, value in config.items() if _is_number(value)}
    eps = next((value for key, value in numbers.items() if EPS.match(key)), 1e-6)
    given = [(key, value) for key, value in numbers.items() if SCALE.match(key) and value not in (0, 1)]
    # Granite divides by its `logits_scaling`; the others multiply.
    scales = [scale for key, value in given for scale in (value, 1 / value)[:: -1 if key.endswith("scaling") else 1]]
    # MiniCPM divides the state by its width over that of a small model.
    if (base := numbers.get("dim_model_base")) and (width := numbers.get("hidden_size")):
        scales.append(base / width)
    softcaps = [value for key, value in numbers.items() if SOFTCAP.match(key) and value > 0]
    for softcap in (*softcaps, None):
        for scale in (*dict.fromkeys(scales), 1.0):
            for norm in norms:
                yield Readout(norm, eps, scale, softcap)


def behind_norm(readout: Readout) -> Readout:
    """Return the readout of states that are normed already."""
    return replace(readout, norm="none")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
