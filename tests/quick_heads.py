"""Heads that are good enough for a test: an EAGLE head that knows some answers, an acceptance head of varied opinions.

A random EAGLE head would never have a token accepted, and a new acceptance head says one half to everything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from draftsmith.modules.acceptance.head import AcceptanceHead, AcceptanceHeadConfig
from draftsmith.modules.acceptance.predictor import HeadPredictor
from draftsmith.modules.decoding.stop import PredictorStop, ThresholdRule
from draftsmith.modules.drafters import head_class
from draftsmith.modules.drafters.eagle import EagleConfig, EagleHead, EagleInputs, eagle_loss, shift
from draftsmith.modules.drafters.eagle3 import Eagle3Config, Eagle3Head, Eagle3Settings, draft_vocabulary, layer_like
from draftsmith.modules.types import FeatureBatch
from draftsmith.train.optimizers import MuonAdamW


def quick_eagle_head(
    target: Any, rows: Sequence[Sequence[int]], steps: int, batch_size: int = 16, fc_bias: float = 0.0
) -> EagleHead:
    """Trained for some seconds on rows of token ids, cut to the shortest's length; no claim about quality.

    target: a lean Llama, whose sizes the head takes. fc_bias: what a bias of fc begins with, its standard deviation; 0
    is a head without.
    """
    torch.manual_seed(0)
    head = EagleHead(EagleConfig.for_target(target.config, fc_bias=fc_bias > 0))
    if fc_bias:
        torch.nn.init.normal_(head.fc.bias, std=fc_bias)
    width = min(map(len, rows))
    ids = torch.tensor([row[-width:] for row in rows])
    batches = [_inputs(target, part) for part in ids.split(batch_size)]
    matrices = [weight for weight in head.parameters() if weight.ndim == 2]
    others = [weight for weight in head.parameters() if weight.ndim != 2]
    optimizer = MuonAdamW(matrices, others, 5e-3, weight_decay=0.0)
    for step in range(steps):
        inputs, embeds = batches[step % len(batches)]
        hidden = head(embeds, inputs.features, inputs.position_ids)
        counted, vocab_size = [inputs.loss_mask], target.info.vocab_size
        loss = eagle_loss([hidden], inputs.target_features, counted, target.lm_head, vocab_size, 0.2, 1.0).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step > steps // 2:
            for group in optimizer.param_groups:
                group["lr"] *= 0.97
    return head.eval().requires_grad_(False)


def quick_eagle3_head(
    target: Any, rows: Sequence[Sequence[int]], steps: int, draft_vocab: int = 0, ttt_steps: int = 2, **shape: Any
) -> Eagle3Head:
    """The same of an EAGLE-3 head, by its own loss. draft_vocab: tokens that it can draft, those of the rows first.
    ttt_steps: how far it learns to draft. shape: fields of its config that are not as training sets them."""
    torch.manual_seed(0)
    # Of version 3, which every format holds.
    settings = Eagle3Settings(draft_vocab=draft_vocab, ttt_steps=ttt_steps, version="3")
    head = Eagle3Head(dataclasses.replace(Eagle3Head.new_config(settings, target.config), **shape))
    width = min(map(len, rows))
    ids = torch.tensor([row[-width:] for row in rows])
    counts = torch.bincount(ids.flatten(), minlength=head.config.vocab_size)
    tokens = draft_vocabulary(counts, head.config.draft_vocab_size) if head.config.reduced else head.d2t
    head.use_draft_vocabulary(tokens, target.model.lm_head.weight)
    features = target.features(ids, aux_layers=Eagle3Head.loss_layers(head.config, target.info.num_layers))
    positions = torch.arange(width).expand_as(ids)
    batch = FeatureBatch(ids, features, torch.ones_like(ids, dtype=torch.bool), positions)
    trained = [weight for weight in head.parameters() if weight.requires_grad]
    matrices = [weight for weight in trained if weight.ndim == 2]
    optimizer = MuonAdamW(matrices, [weight for weight in trained if weight.ndim != 2], 5e-3, weight_decay=0.0)
    for _ in range(steps):
        optimizer.zero_grad()
        head.loss(batch, target, settings, None).loss.backward()
        optimizer.step()
    return head.eval().requires_grad_(False)


def quick_block_head(
    target: Any, rows: Sequence[Sequence[int]], steps: int, kind: str = "dspark", rate: float = 5e-3, **options: Any
) -> Any:
    """The same of a DFlash or DSpark head of one layer, by its own loss. options: of its training."""
    torch.manual_seed(0)
    head_type = head_class(kind)
    settings = head_type.Settings(**{"num_layers": 1, "markov_rank": 16 * (kind == "dspark"), **options})
    head: Any = head_type(head_type.new_config(settings, target.config))
    width = min(map(len, rows))
    ids = torch.tensor([row[-width:] for row in rows])
    features = target.features(ids, aux_layers=head_type.loss_layers(head.config, target.info.num_layers))
    positions = torch.arange(width).expand_as(ids)
    batch = FeatureBatch(ids, features, torch.ones_like(ids, dtype=torch.bool), positions)
    # The Markov head's tables are not orthogonalised: most of their rows have no gradient.
    tables = {id(weight) for name, weight in head.named_parameters() if "markov_w" in name or weight.ndim != 2}
    matrices = [weight for weight in head.parameters() if id(weight) not in tables]
    others = [weight for weight in head.parameters() if id(weight) in tables]
    optimizer = MuonAdamW(matrices, others, rate, weight_decay=0.0)
    for _ in range(steps):
        optimizer.zero_grad()
        head.loss(batch, target, settings, None).loss.backward()
        optimizer.step()
    return head.eval().requires_grad_(False)


# Tokens that `captured_head` can draft.
KNOWN = torch.arange(3, 41, 2)


def captured_head(lm: Any) -> Eagle3Head:
    """A random EAGLE-3 head of a lean target, in float64: it reads two layers and drafts the tokens of KNOWN."""
    torch.manual_seed(0)
    config = Eagle3Config(layer_like(lm.config), (0, lm.info.num_layers - 1), len(KNOWN))
    head = Eagle3Head(config).double().requires_grad_(False)
    for weight in head.parameters():
        weight.normal_(std=0.3)
    head.use_draft_vocabulary(KNOWN)
    return head


def _inputs(target: Any, ids: Tensor) -> tuple[EagleInputs, Tensor]:
    """What the head reads of rows of ids, and the embeddings of the ids it is fed."""
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    inputs = shift(FeatureBatch(ids, target.features(ids), torch.ones_like(ids, dtype=torch.bool), positions))
    return inputs, target.embed(inputs.next_ids)


def varied_acceptance_head(hidden_size: int, seed: int = 1, std: float = 0.3, **settings: Any) -> AcceptanceHead:
    """Random, with outputs spread over (0, 1), so that drafts stop at different lengths."""
    torch.manual_seed(seed)
    head = AcceptanceHead(AcceptanceHeadConfig(hidden_size, num_blocks=2, **settings)).requires_grad_(False)
    torch.nn.init.normal_(head.out.weight, std=std)
    return head


def specdecpp(
    head: AcceptanceHead, h: float, min_drafted: int, max_drafted: int, calibrated: bool = False, embed: Any = None
) -> PredictorStop:
    """The stop policy of SpecDec++."""
    return PredictorStop(HeadPredictor(head, embed, calibrated), ThresholdRule(h), min_drafted, max_drafted)
