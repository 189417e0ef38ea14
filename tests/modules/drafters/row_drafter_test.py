"""What drafters of rows tell their stop policies."""

from __future__ import annotations

import pytest
from table_methods import random_eagle_head, random_hydra_heads, random_medusa_heads
from table_models import PROMPT, TableLM

from draftsmith.modules.decoding.loop import generate_one
from draftsmith.modules.decoding.stop import FixedLengthStop
from draftsmith.modules.drafters.draft_model import DraftModelNet
from draftsmith.modules.drafters.net import ChainDrafter
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.types import SamplingParams


class Verdicts(FixedLengthStop):
    def __init__(self, k):
        super().__init__(k)
        self.heard = []

    def observe(self, num_drafted, num_accepted):
        self.heard.append((num_drafted, num_accepted))


@pytest.mark.parametrize("name", ["draft", "eagle", "medusa", "hydra"])
def test_policies_hear_the_verdict_on_every_round_but_the_last(name):
    target, stop = TableLM(1), Verdicts(2)
    if name == "draft":
        drafter = ChainDrafter(DraftModelNet(TableLM(2)), [stop], 64)
    else:
        made = {"eagle": random_eagle_head, "medusa": random_medusa_heads, "hydra": random_hydra_heads}
        drafter = ChainDrafter(made[name](2).net(target), [stop], 64)
    done = generate_one(target, drafter, PROMPT, SamplingParams(1.0), 30, TorchSource(0), ())
    assert stop.heard == [(step.num_drafted, step.num_accepted) for step in done.trace.steps[:-1]]
    assert any(accepted for _, accepted in stop.heard)
