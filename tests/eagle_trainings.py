"""Short trainings of EAGLE heads on features, and their modules before the first step."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from trained_runs import fake_trainer

from draftsmith.data.models.loading import load_lm
from draftsmith.data.store.datasets import collate_features, open_dataset
from draftsmith.modules.drafters.eagle.head import EagleHead
from draftsmith.train.config import TrainDrafterConfig, drafter_config
from draftsmith.train.data_module import Key, Part
from draftsmith.train.drafter import make_head
from draftsmith.train.drafter_objective import DrafterObjective
from draftsmith.train.lit_head import LitHead

QUICK = {
    "lr": 3e-3,
    "max_steps": 12,
    "batch_size": 8,
    "val_share": 0.25,
    "val_every": 6,
    "log_every": 3,
    "wandb": "off",
}
QUICK |= {"token_weight": 1.0, "tau_prompts": 3, "tau_max_new_tokens": 8}


def config(artefacts, output: Path, **changes) -> TrainDrafterConfig:
    settings = {"data": artefacts.features, "target": str(artefacts.target), "output": output, **QUICK, **changes}
    return drafter_config("eagle")(**settings)


def a_module(artefacts, tmp_path, **changes) -> LitHead:
    settings, target = config(artefacts, tmp_path, **changes), load_lm(str(artefacts.target))
    objective = DrafterObjective(EagleHead, settings, target, feature_std=2.0)
    module = LitHead(make_head(settings, target), objective, settings, 12)
    module.trainer = fake_trainer(open_dataset(artefacts.features))
    return module


def change(module: LitHead, **settings) -> None:
    """Go on with other settings."""
    module.objective.settings = dataclasses.replace(module.objective.settings, **settings)


def a_part(artefacts, indices, collate=collate_features) -> Part:
    data = open_dataset(artefacts.features)
    batch = collate([data[i] for i in indices])
    tokens = EagleHead.num_loss_tokens(batch)
    return Part(batch, tuple(Key(0, i) for i in indices), tokens, tokens, True, True)
