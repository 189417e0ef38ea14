"""Every registered method on the shipped pair: greedy answers are the target's own, token by token."""

from __future__ import annotations

import pytest
import torch

from draftsmith.data.models import load_lm
from draftsmith.eval.methods import METHODS, parse_method
from draftsmith.eval.methods.base import Models
from draftsmith.eval.methods.hf import HFAssisted, HFGenerate
from draftsmith.eval.prompts import read_prompts
from draftsmith.modules.decoding.loop import generate
from draftsmith.modules.heads.acceptance import AcceptanceHead, AcceptanceHeadConfig
from draftsmith.modules.heads.eagle import EagleConfig, EagleHead, shift
from draftsmith.modules.losses import eagle_loss
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.types import FeatureBatch, SamplingParams
from draftsmith.train.muon import MuonAdamW

NUM_PROMPTS, NEW_TOKENS, CAPACITY = 8, 128, 1024
OWN = [name for name in METHODS if METHODS[name] not in (HFGenerate, HFAssisted)]
pytestmark = pytest.mark.slow


def quick_eagle_head(target, rows: list[list[int]]) -> EagleHead:
    """Some seconds of training on the very answers: enough to have tokens accepted, and no claim."""
    torch.manual_seed(0)
    head = EagleHead(EagleConfig.for_target(target.config))
    width = min(map(len, rows))
    ids = torch.tensor([row[-width:] for row in rows])
    batch = FeatureBatch(
        ids, target.features(ids), torch.ones_like(ids, dtype=torch.bool), torch.arange(width).expand_as(ids)
    )
    inputs = shift(batch)
    embeds = target.embed(inputs.next_ids)
    matrices = [weight for weight in head.parameters() if weight.ndim == 2]
    optimizer = MuonAdamW(
        matrices, [weight for weight in head.parameters() if weight.ndim != 2], 5e-3, weight_decay=0.0
    )
    for _ in range(80):
        hidden = head(embeds, inputs.features, inputs.position_ids)
        loss = eagle_loss(hidden, inputs.target_features, inputs.loss_mask, target.lm_head, 0.2, 1.0).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return head.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def world():
    target, draft, small = (load_lm(f"embedded:{name}") for name in ("target", "draft", "draft-small"))
    prompts = [row.prompt_ids for row in read_prompts("embedded:prompts", "embedded:target", "test", None, NUM_PROMPTS)]
    greedy = SamplingParams()
    answers = [generate(target, None, p, greedy, NEW_TOKENS, TorchSource(0), ()).tokens for p in prompts]
    torch.manual_seed(1)
    acceptance = AcceptanceHead(AcceptanceHeadConfig(draft.info.hidden_size, num_blocks=2)).requires_grad_(False)
    torch.nn.init.normal_(acceptance.out.weight, std=0.3)
    eagle = quick_eagle_head(target, [p + a for p, a in zip(prompts, answers, strict=True)])
    models = Models(target, draft, draft, eagle, acceptance, capacity=CAPACITY)
    return models, Models(target, small, draft, eagle, acceptance, capacity=CAPACITY), prompts, answers


@pytest.mark.parametrize("name", OWN)
def test_greedy_answers_are_the_targets(world, name):
    models, three, prompts, answers = world
    method = parse_method(name)
    drafter = method.build(three if "mid" in method.needs else models)
    accepted = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        made = generate(models.target, drafter, prompt, SamplingParams(), NEW_TOKENS, TorchSource(0), ())
        assert made.tokens == answer
        accepted += made.trace.num_accepted
    assert name == "ar" or accepted > NUM_PROMPTS
