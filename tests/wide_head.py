"""A head beside EAGLE-1 on the same drafting: it reads captured layers, and has its own lm_head over fewer tokens."""

from __future__ import annotations

import torch
from torch import nn

from draftsmith.modules.drafters.eagle.head import EagleConfig, EagleHead
from draftsmith.modules.drafters.eagle.net import LeanEagle

KNOWN = torch.arange(3, 41, 2)  # tokens of the target that the head knows


class LeanWide(LeanEagle):
    def __init__(self, head: WideHead, target):
        super().__init__(head, target)
        self.project = head.features_in

        def lm_head(states):
            logits = states.new_full((*states.shape[:-1], target.info.vocab_size), -torch.inf)
            logits[..., KNOWN] = head.own_lm_head(states)
            return logits

        self.lm_head = lm_head


class WideHead(EagleHead):
    """Reads the states after two layers, and guesses tokens of KNOWN."""

    kind = "wide"

    def __init__(self, config: EagleConfig, num_layers: int):
        super().__init__(config)
        self.num_layers = num_layers
        self.features_in = nn.Linear(2 * config.hidden_size, config.hidden_size)
        self.own_lm_head = nn.Linear(config.hidden_size, len(KNOWN), bias=False)

    @property
    def capture(self):
        return (0, self.num_layers - 1)

    def lean(self, target):
        return LeanWide(self, target)


def wide_head(lm) -> WideHead:
    """One for a lean target, with random weights, in float64."""
    torch.manual_seed(0)
    made = WideHead(EagleConfig.for_target(lm.config), lm.info.num_layers).double().requires_grad_(False)
    for weight in made.parameters():
        weight.normal_(std=0.3)
    return made
