"""Tiny models that agree now and then: a target, a draft with disturbed weights, one head of each kind, prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from tiny_models import tiny_llama_dir, tiny_tokenizer

from draftsmith.modules.acceptance.head import AcceptanceHead, AcceptanceHeadConfig
from draftsmith.modules.drafters.block.head import DFlashHead, DSparkHead
from draftsmith.modules.drafters.block.net import BlockConfig, layers_like
from draftsmith.modules.drafters.eagle import EagleConfig, EagleHead
from draftsmith.modules.drafters.eagle3 import Eagle3Config, Eagle3Head, layer_like
from draftsmith.modules.drafters.hydra import HydraHead, HydraSettings
from draftsmith.modules.drafters.medusa import MedusaHead, MedusaSettings
from draftsmith.modules.pretrained.heads import save_head
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.targets.llama import llama_config

NUM_PROMPTS = 5


def draft_options(models: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a command: `draft` and `eagle` of `models` together as its `draft`; what is None is left out."""
    options = {name: value for name, value in models.items() if name != "eagle" and value is not None}
    drafts = tuple(models[name] for name in ("draft", "eagle") if models.get(name) is not None)
    return {**options, "draft": drafts} if drafts else options


def draft_words(models: Mapping[str, Any]) -> list[str]:
    """The same as words of a command line."""
    return [
        f"--{name.replace('_', '-')}={word}"
        for name, value in draft_options(models).items()
        for word in (value if isinstance(value, tuple) else (value,))
    ]


def make_tiny_world(root: Path) -> dict[str, str]:
    """target, draft, eagle, acceptance and prompts: flag -> path below `root`, where the other heads are."""
    target = tiny_llama_dir(root / "target", seed=0, layers=3)
    model = transformers.AutoModelForCausalLM.from_pretrained(target)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():  # the target's own weights, disturbed: some drafts are accepted, some are not
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data.add_(0.08 * parameter.data.std() * noise)
    model.save_pretrained(root / "draft")
    tiny_tokenizer().save_pretrained(str(root / "draft"))

    target_lm, draft_lm = load_lm(str(target)), load_lm(str(root / "draft"))
    torch.manual_seed(2)
    acceptance = AcceptanceHead(AcceptanceHeadConfig(hidden_size=32, num_blocks=2))
    torch.nn.init.normal_(acceptance.out.weight, std=1.0)  # a new head says one half to everything
    save_head(root / "acceptance", acceptance, {"target": draft_lm.info.identity}, "card")
    raw = json.loads((Path(target) / "config.json").read_text())
    eagle = EagleHead(EagleConfig.for_target(llama_config(raw)))
    save_head(root / "eagle", eagle, {"target": target_lm.info.identity}, "card")
    shape = Eagle3Config(layer_like(llama_config(raw)), (0, 1, 2), llama_config(raw).vocab_size)
    save_head(root / "eagle3", Eagle3Head(shape), {"target": target_lm.info.identity}, "card")
    medusa = MedusaHead(MedusaHead.new_config(MedusaSettings(num_heads=3), llama_config(raw)))
    save_head(root / "medusa", medusa, {"target": target_lm.info.identity}, "card")
    hydra = HydraHead(HydraHead.new_config(HydraSettings(num_heads=3, prefix_attention=True), llama_config(raw)))
    save_head(root / "hydra", hydra, {"target": target_lm.info.identity}, "card")
    layers = layers_like(llama_config(raw), 1)
    dflash = DFlashHead(BlockConfig(layers, (1, 2), 5, 7, "fill-in"))
    save_head(root / "dflash", dflash, {"target": target_lm.info.identity}, "card")
    dspark = DSparkHead(BlockConfig(layers, (1, 2), 4, 7, markov_rank=8, confidence=True))
    save_head(root / "dspark", dspark, {"target": target_lm.info.identity}, "card")
    rows = [
        {"id": f"row-{i}", "task": "ab"[i % 2], "split": "test" if i < NUM_PROMPTS else "train",
         "messages": [{"role": "user", "content": f"What does function number {i} do?" + " Rename a to b:" * i}]}
        for i in range(NUM_PROMPTS + 1)
    ]  # fmt: skip
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = {name: str(root / name) for name in ("target", "draft", "eagle", "acceptance")}
    return {**found, "prompts": str(root / "prompts.jsonl")}
