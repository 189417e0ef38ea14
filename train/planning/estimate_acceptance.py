"""What the training of an acceptance head will take; the rest of a plan is in estimate.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draftsmith.data.acceptance import AcceptanceConfig
from draftsmith.data.heads.directory import head_settings, kind_at
from draftsmith.data.store.manifest import MANIFEST, Manifest
from draftsmith.modules import flops
from draftsmith.modules.acceptance.head import AcceptanceHead, AcceptanceHeadConfig
from draftsmith.modules.decoding.branches import GROUP_TOKENS
from draftsmith.modules.drafters.eagle.head import EagleHead
from draftsmith.modules.layers import LlamaConfig
from draftsmith.train.acceptance import TrainAcceptanceConfig, acceptance_settings, filled
from draftsmith.train.planning import footprint
from draftsmith.train.planning.documents import Documents
from draftsmith.train.planning.estimate import (
    FrozenModel,
    Plan,
    finish,
    largest_part,
    libraries,
    order_of,
    planned_device,
    planned_world,
    resident,
)
from draftsmith.train.planning.footprint import PartShape
from draftsmith.train.planning.memory import FLOAT32, HeadSizes, Sizes


@dataclass(frozen=True)
class Reading:
    """What the frozen drafter takes, and what it leaves.

    frozen, forward: bytes of an EAGLE head's weights, and most of a step's reading. epoch_flops: of reading everything.
    judged: of an epoch's tokens, those the head judges; part_judged: of the largest part's. tokens: that a part's
    inputs are picked from.
    """

    frozen: int
    forward: int
    epoch_flops: float
    judged: int
    part_judged: int
    tokens: int


def plan_acceptance(
    config: TrainAcceptanceConfig, model: FrozenModel, documents: Documents, world: int = 0, base: int | None = None
) -> Plan:
    """As `estimate.plan_eagle`; the drafter runs in every step, as its states are not stored.

    model: the draft, or the model that an EAGLE head drafts for.
    """
    config = filled(config)
    settings = acceptance_settings(config, model.hidden_size)
    with torch.device("meta"):
        head = HeadSizes.of(AcceptanceHead(settings))
    world, rollouts = planned_world(config, world), documents.kind == "rollouts"
    order = order_of(config, documents.lengths)
    part = largest_part(order, documents, world * config.accumulate, packed=rollouts)
    frozen, loading = resident(model, config)
    reading = (rollouts_read if rollouts else text_read)(config, settings, model, documents, part)
    sizes = Sizes(
        head=head,
        base=libraries(config) if base is None else base,
        frozen=frozen + reading.frozen,
        loading=loading,
        batch=footprint.batch_bytes(0, part, config.accumulate),
        inputs=reading.tokens * model.hidden_size * model.width
        + footprint.acceptance_inputs(settings, reading.part_judged, model.width),
        activations=footprint.acceptance_saved(settings, reading.part_judged),
        widest=part.tokens * model.hidden_size * FLOAT32 * 2,
        loss=reading.part_judged * FLOAT32 * 8,
        frozen_forward=reading.forward,
        optimizer=config.optimizer,
        accumulates=config.accumulate > 1,
        on_cpu=planned_device(config) == "cpu",
    )
    epoch_flops = reading.epoch_flops + flops.acceptance_training(settings, reading.judged)
    return finish("acceptance", config, model, documents, order, part, sizes, world, epoch_flops, None)


def text_read(
    config: TrainAcceptanceConfig, head: AcceptanceHeadConfig, draft: FrozenModel, documents: Documents, part: PartShape
) -> Reading:
    """Of mixed text: the head judges drafted tokens only, those of responses but for what is mixed in."""
    assert config.mix is not None
    judged = round(documents.tokens * documents.loss_share * (1 - config.mix))
    forward = part.tokens * draft.hidden_size * draft.width
    if draft.llama is not None:
        forward = footprint.frozen_forward(draft.llama, part, draft.width)
    read = layers_flops(draft, documents.lengths)
    return Reading(0, forward, read, judged, part.loss_tokens, part.tokens)


def rollouts_read(
    config: TrainAcceptanceConfig, head: AcceptanceHeadConfig, model: FrozenModel, documents: Documents, part: PartShape
) -> Reading:
    """Of drafts that hang off texts, which are read one by one. Every labelled token is taken to be judged; those that
    no round reaches are not. Drafts are taken to begin at the ends of their texts."""
    depth, children = labelled(config)
    children = children if head.judges == "tree" else 1
    drafted = [round(length * documents.loss_share) for length in documents.lengths]
    texts = [length - tokens for length, tokens in zip(documents.lengths, drafted, strict=True)]
    # A head that reads the state before a token has no use for the last token of a draft.
    levels = depth - (head.state == "before")
    starts = [text for text, tokens in zip(texts, drafted, strict=True) for _ in range(tokens // depth)]
    eagle = eagle_shape(config)
    shape, frozen = (model.llama, 0) if eagle is None else eagle
    read = 0.0 if eagle is None else layers_flops(model, texts)
    if shape is None:
        read += layers_flops(model, documents.lengths)
    else:
        read += flops.rollouts_forward(shape, texts, starts, levels)
        read += flops.fusion_forward(shape, sum(texts) + len(starts) * levels) if eagle is not None else 0.0
    slots = part.longest + GROUP_TOKENS
    forward = slots * model.hidden_size * model.width
    if shape is not None:
        forward = footprint.frozen_forward(shape, PartShape(slots, slots, slots, 0), model.width)
    masks = GROUP_TOKENS * slots * (1 + model.width)  # who sees whom, and as what is added to the scores
    judged = round(documents.tokens * documents.loss_share)
    tokens = part.loss_tokens
    return Reading(frozen * model.width, forward + masks, read, judged * children, tokens * children, tokens)


def labelled(config: TrainAcceptanceConfig) -> tuple[int, int]:
    """Tokens of a draft and children of each of its places; where there are no labels yet, as they are made if nothing
    else is asked for."""
    made = Manifest.read(config.data).config if (config.data / MANIFEST).exists() else {}
    return made.get("depth", AcceptanceConfig.depth), made.get("children", 1)


def layers_flops(model: FrozenModel, lengths: Sequence[int]) -> float:
    """A frozen model's forward over documents of these lengths."""
    if model.llama is not None:
        return flops.layers_forward(model.llama, lengths)
    return flops.parameters_forward(model.params, sum(lengths))


def eagle_shape(config: TrainAcceptanceConfig) -> tuple[LlamaConfig, int] | None:
    """Layers and parameters of the EAGLE head that drafts, if one does."""
    if kind_at(config.drafter) is None:
        return None
    settings = head_settings(config.drafter, "eagle")
    with torch.device("meta"):
        return settings.llama, sum(weight.numel() for weight in EagleHead(settings).parameters())
