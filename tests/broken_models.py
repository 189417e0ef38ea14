"""Small real models, one of them with a NaN among its weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from run_models import run_models

from draftsmith.eval.costs import MeasuredTimes
from draftsmith.modules.acceptance.head import AcceptanceHead, AcceptanceHeadConfig
from draftsmith.modules.drafters.block.head import DFlashHead, DSparkHead
from draftsmith.modules.drafters.block.net import BlockConfig, layers_like
from draftsmith.modules.drafters.eagle import EagleConfig, EagleHead
from draftsmith.modules.drafters.eagle3 import Eagle3Config, Eagle3Head, layer_like
from draftsmith.modules.drafters.hydra import HydraConfig, HydraHead
from draftsmith.modules.drafters.medusa import MedusaConfig, MedusaHead
from draftsmith.modules.drafters.method import Models
from draftsmith.modules.layers import LlamaConfig, LlamaModel, rope_table
from draftsmith.modules.targets.base import ModelInfo
from draftsmith.modules.targets.llama import LlamaLM

V, H, CONTEXT = 24, 8, 64
CONFIG = LlamaConfig(
    vocab_size=V, hidden_size=H, intermediate_size=12, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4,
    max_position=CONTEXT,
)  # fmt: skip


def spoil(module: Any, name: str, place: tuple[int, ...]) -> None:
    """One NaN in one weight."""
    module.get_parameter(name).data[place] = math.nan


def small_lm(seed: int, nan_in: tuple[str, tuple[int, ...]] | None = None) -> LlamaLM:
    rng = torch.Generator().manual_seed(seed)
    model = LlamaModel(CONFIG)
    for weight in model.parameters():
        noise = torch.randn(weight.shape, generator=rng)
        weight.data = 0.6 * noise if weight.ndim == 2 else 1 + 0.2 * noise
    model.cos, model.sin = rope_table(CONFIG, CONTEXT)
    if nan_in is not None:
        spoil(model, *nan_in)
    return LlamaLM(model.eval().requires_grad_(False), ModelInfo(H, V, 1, CONTEXT, (), {}))


def models(broken: str | None = None) -> Models:
    """All models that methods use, one of them with a NaN."""
    inner = ("layers.0.mlp.down_proj.weight", (0, 0))
    lms = {
        name: small_lm(seed, inner if name == broken else None)
        for name, seed in (("target", 1), ("draft", 2), ("mid", 3))
    }
    torch.manual_seed(4)
    eagle = EagleHead(EagleConfig(CONFIG)).requires_grad_(False)
    eagle3 = Eagle3Head(Eagle3Config(layer_like(CONFIG), (0, 1), V)).requires_grad_(False)
    medusa = MedusaHead(MedusaConfig(H, V, CONTEXT, num_heads=3)).requires_grad_(False)
    hydra = HydraHead(HydraConfig(CONFIG, num_heads=3)).requires_grad_(False)
    layers = layers_like(CONFIG, 1)
    dflash = DFlashHead(BlockConfig(layers, (0, 1), 4, 7, "fill-in")).requires_grad_(False)
    dspark = DSparkHead(BlockConfig(layers, (0, 1), 3, 7, markov_rank=4, confidence=True)).requires_grad_(False)
    acceptance = AcceptanceHead(AcceptanceHeadConfig(H, num_blocks=1)).requires_grad_(False)
    if broken == "eagle":
        spoil(eagle, *inner)
    if broken == "eagle3":
        spoil(eagle3, "layer.mlp.down_proj.weight", (0, 0))
    for kind, head in (("dflash", dflash), ("dspark", dspark)):
        if broken == kind:
            spoil(head, *inner)
    if broken == "medusa":
        spoil(medusa, "heads.0.0.linear.weight", (0, 0))
    if broken == "hydra":
        spoil(hydra, "heads.0.linear.weight", (0, 0))
    if broken == "acceptance":
        spoil(acceptance, "out.weight", (0, 0))
    return run_models(
        *lms.values(), eagle=eagle, eagle3=eagle3, dflash=dflash, dspark=dspark, medusa=medusa, hydra=hydra,
        acceptance=acceptance, capacity=CONTEXT, times=MeasuredTimes(),
    )  # fmt: skip
