"""Short trainings of EAGLE heads on features, modules before the first step, and what a training has left."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from worlds import tiny_llama_dir

from draftsmith.data import prompts, responses
from draftsmith.data.features import text_dataset
from draftsmith.data.store.datasets import ArtifactDataset, collate_features, open_dataset
from draftsmith.modules.drafters.eagle import EagleHead
from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.train.checkpoints import FOLDER, STATE, all_in
from draftsmith.train.config import TrainDrafterConfig, drafter_config
from draftsmith.train.data import MicroBatch, SampleKey, Samples
from draftsmith.train.module import LitDrafter
from draftsmith.train.prepare import make_head

NUM_PROMPTS = 48


def answered_prompts(root: Path) -> dict[str, Path]:
    """Two models of one tokenizer, prompts, and the target's responses to them, made by the data stages."""
    made = {name: root / name for name in ("prompts", "responses")}
    made["target"] = tiny_llama_dir(root / "target", seed=0, layers=2)
    made["draft"] = tiny_llama_dir(root / "draft", seed=1, layers=1)
    source, target = root / "prompts.jsonl", str(made["target"])
    rows = [{"prompt": f"def add{i}(a, b): " + "a + " * (i % 7)} for i in range(NUM_PROMPTS)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts.run(prompts.PromptsConfig(source=str(source), target=target, output=made["prompts"]))
    options: dict[str, Any] = {"max_new_tokens": 24, "num_threads": 1}
    responses.run(responses.ResponsesConfig(made["prompts"], target, made["responses"], **options))
    return made


class Clock:
    """A clock that a test moves, in seconds."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def fake_trainer(dataset: Any, step: int = 0) -> Any:
    """What a `LitHead` asks of Lightning's trainer: its samples, which are all of a data set, and how far it is."""
    samples = Samples(dataset, range(len(dataset)))
    return SimpleNamespace(datamodule=SimpleNamespace(train=samples, val=samples), global_step=step)


def micro_batch(data: Any, tokens: float, indices: Any = None, epoch: int = 0) -> MicroBatch:
    """A collated batch as a whole step of one rank; the samples are the first ones unless `indices` says which."""
    mask = getattr(data, "attention_mask", None)
    mask = data.loss_mask if mask is None else mask
    lengths = getattr(data, "lengths", None) or tuple(mask.sum(-1).tolist())
    keys = tuple(SampleKey(epoch, i) for i in (range(len(lengths)) if indices is None else indices))
    return MicroBatch(data, keys, lengths, tokens)


def step_loss(module: Any, batch: MicroBatch) -> Any:
    """Output of a module's loss in a training step."""
    return module.loss(module.read(batch)[0], module.train_step(batch))


def validate(module: Any, parts: Iterable[MicroBatch]) -> dict[str, float]:
    """Metrics of a module over these validation batches."""
    module.on_validation_epoch_start()
    with torch.no_grad():
        for part in parts:
            module.validation_step(part, 0)
    return module.validation_metrics()


def newest_state(output: Path) -> dict[str, Any]:
    """The content of the newest checkpoint."""
    return torch.load(all_in(output / FOLDER)[-1] / STATE, weights_only=True)


def weights(output: Path, name: str = "last") -> dict[str, torch.Tensor]:
    return load_file(output / name / "model.safetensors")


def losses(output: Path, column: str = "train/loss") -> list[float]:
    """One for each row that has it."""
    with (output / "metrics.csv").open(newline="") as file:
        return [float(row[column]) for row in csv.DictReader(file) if row[column]]


QUICK = {"lr": 3e-3, "max_steps": 12, "batch_size": 8, "val_share": 0.25, "val_every": 6, "log_every": 3}
QUICK |= {"loggers": ("csv",)}
QUICK |= {"token_weight": 1.0, "tau_prompts": 3}


def config(artifacts, output: Path, **changes) -> TrainDrafterConfig:
    settings = {"data": artifacts.features, "target": str(artifacts.target), "output": output, **QUICK, **changes}
    return drafter_config("eagle")(**settings)


def a_module(artifacts, tmp_path, **changes) -> LitDrafter:
    settings, target = config(artifacts, tmp_path, **changes), load_lm(str(artifacts.target))
    module = LitDrafter(make_head(settings, target), target, settings)
    module.total_steps, module.feature_std = 12, 2.0
    module.trainer = fake_trainer(open_dataset(artifacts.features))
    return module


def texts(artifacts) -> ArtifactDataset:
    """Responses, whose features the target computes."""
    return text_dataset(artifacts.responses, Checkpoint(artifacts.target))


def change(module: LitDrafter, **settings) -> None:
    """Continue with other settings."""
    module.settings = dataclasses.replace(module.settings, **settings)


def a_part(artifacts, indices, collate=collate_features, epoch: int = 0) -> MicroBatch:
    data = open_dataset(artifacts.features)
    batch = collate([data[i] for i in indices])
    return micro_batch(batch, EagleHead.loss_count(batch, EagleHead.Settings()), indices, epoch)
