"""A draft head in a plain `lightning.Trainer`, with a DataLoader that knows nothing of ours."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from tiny_models import tiny_llama_dir
from torch.utils.data import DataLoader

import draftsmith
from draftsmith.modules.types import InputError
from draftsmith.train.lit_drafter import LitDrafter

WIDTHS = (5, 9, 12, 7, 3, 11, 8, 6)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return draftsmith.load_target(
        str(tiny_llama_dir(tmp_path_factory.mktemp("models") / "target", seed=0, layers=7)), "float64"
    )


@pytest.fixture(scope="module")
def rows(target) -> list[dict[str, torch.Tensor]]:
    """Texts whose answers are of very unlike lengths: a mean of means is not their mean."""
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(target.info.vocab_size, (width,), generator=generator) for width in WIDTHS]
    return [{"input_ids": own, "loss_mask": torch.arange(len(own)) >= (1, 7)[n % 2]} for n, own in enumerate(ids)]


def module_of(target: Any, kind: str = "eagle", learner: type[LitDrafter] = LitDrafter, **values: Any) -> LitDrafter:
    config = draftsmith.settings(kind, **{"lr": 1e-2, "schedule": "constant", "warmup_share": 0, "clip": 0, **values})
    config = dataclasses.replace(config, target=target.info.path)
    return learner(draftsmith.new_head(config, target).double(), target, config)


def trainer_of(output: Path, **values: Any) -> pl.Trainer:
    settings = {"max_steps": 2, "log_every_n_steps": 1, **values}
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(accelerator="cpu", logger=CSVLogger(output, name="", version=""), **quiet, **settings)


def loader(rows: Any, size: int) -> DataLoader:
    return DataLoader(rows, batch_size=size, collate_fn=draftsmith.collate)


def logged(output: Path, name: str) -> list[float]:
    with (output / "metrics.csv").open() as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


@pytest.mark.parametrize("kind", ["dflash", "draft", "dspark", "eagle", "eagle3", "medusa", "hydra"])
def test_it_learns_logs_and_validates(kind, target, rows, tmp_path):
    module = module_of(target, kind)
    before = {name: own.clone() for name, own in module.head.named_parameters()}
    trainer = trainer_of(tmp_path, max_steps=20)
    trainer.fit(module, loader(rows, 4), loader(rows[:4], 2))
    losses = logged(tmp_path, "train/loss")
    assert len(losses) == 20 and losses[-1] < 0.9 * losses[0]
    assert len(logged(tmp_path, "lr")) == len(logged(tmp_path, "grad_norm")) == 20
    assert {"val/loss", "val/top1"} <= trainer.callback_metrics.keys()
    assert any(not torch.equal(own, before[name]) for name, own in module.head.named_parameters())


def test_every_token_of_an_accumulated_step_counts_alike(target, rows, tmp_path):
    """Eight rows in one part, and in four of two whose answers differ in length: the same weights."""
    heads = []
    for parts in (1, 4):
        module = module_of(target, noise=0.0)
        trainer_of(tmp_path / str(parts), accumulate_grad_batches=parts).fit(module, loader(rows, 8 // parts))
        heads.append(module.head.state_dict())
    for name, own in heads[0].items():
        torch.testing.assert_close(own, heads[1][name], rtol=1e-9, atol=1e-11)


def test_a_part_at_the_end_of_an_epoch_is_a_step_of_its_own(target, rows, tmp_path):
    """Lightning steps with what it has, and still divides by all parts of a step."""
    heads = []
    for parts, size in ((1, 2), (2, 2)):
        module = module_of(target, noise=0.0)
        trainer_of(tmp_path / str(parts), accumulate_grad_batches=parts, max_steps=1).fit(
            module, loader(rows[:2], size)
        )
        heads.append(module.head.state_dict())
    assert all(torch.allclose(own, heads[1][name], rtol=1e-9) for name, own in heads[0].items())


def test_a_loss_of_ones_own(target, rows, tmp_path):
    class Doubled(LitDrafter):
        def loss(self, batch, step):
            found = super().loss(batch, step)
            return dataclasses.replace(found, loss=2 * found.loss)

    norms = []
    for learner in (LitDrafter, Doubled):
        trainer_of(tmp_path / learner.__name__, max_steps=1).fit(module_of(target, learner=learner), loader(rows, 8))
        norms += logged(tmp_path / learner.__name__, "grad_norm")
    assert norms[1] == pytest.approx(2 * norms[0], rel=1e-9)


def test_noise_is_scaled_by_the_features_of_the_first_batch(target, rows, tmp_path):
    module = module_of(target)
    trainer_of(tmp_path, max_steps=1).fit(module, loader(rows, 8))
    read = [target.features(row["input_ids"][None])[0] for row in rows]
    assert module.feature_std == pytest.approx(float(torch.cat(read).std(correction=0)), rel=1e-6)


def test_a_resumed_training_draws_the_same_noise(target, rows, tmp_path):
    straight, resumed = module_of(target), module_of(target)
    trainer_of(tmp_path / "straight", max_steps=4).fit(straight, loader(rows, 8))
    first = trainer_of(tmp_path / "first", max_steps=2)
    first.fit(module_of(target), loader(rows, 8))
    first.save_checkpoint(tmp_path / "two.ckpt")
    trainer = trainer_of(tmp_path / "resumed", max_steps=4)
    trainer.fit(resumed, loader(rows, 8), ckpt_path=tmp_path / "two.ckpt", weights_only=True)
    assert trainer.global_step == 4
    for name, own in straight.head.state_dict().items():
        assert torch.equal(own, resumed.head.state_dict()[name])


@pytest.mark.parametrize(
    ("trainers", "own", "expected"),
    [
        ("bf16-mixed", "auto", torch.bfloat16),
        ("bf16-mixed", "32", torch.float32),
        ("32-true", "bf16", torch.bfloat16),
        ("32-true", "auto", torch.float32),
    ],
)
def test_products_are_of_the_precision_asked_for(trainers, own, expected, target, rows, tmp_path):
    """In training and validation; weights stay float32."""
    plain = draftsmith.load_target(target.info.path, "float32")
    module, types = module_of(plain, precision=own), []
    module.head.float().fc.register_forward_hook(lambda layer, inputs, output: types.append(output.dtype))
    trainer_of(tmp_path, max_steps=1, precision=trainers).fit(module, loader(rows, 4), loader(rows[:4], 2))
    assert set(types) == {expected} and len(types) > 2
    assert {weight.dtype for weight in module.head.parameters()} == {torch.float32}


@pytest.mark.parametrize("precision", ["bf16-true", "64-true", "16-true"])
def test_weights_of_another_type_are_refused_in_a_line(precision, target, rows, tmp_path):
    with pytest.raises(InputError, match=f"precision: found {precision}, expected 32-true, 16-mixed or bf16-mixed"):
        trainer_of(tmp_path, precision=precision).fit(module_of(target), loader(rows, 4))


def test_another_batch_is_refused_in_a_line(target, rows, tmp_path):
    plain = [{name: own[None] for name, own in row.items()} for row in rows]
    with pytest.raises(InputError, match="collate_fn"):
        trainer_of(tmp_path).fit(module_of(target), DataLoader(plain, batch_size=None))


def test_a_trainer_without_an_end_is_refused(target, rows, tmp_path):
    with pytest.raises(InputError, match="max_steps"):
        trainer_of(tmp_path, max_steps=-1, max_epochs=-1).fit(module_of(target), loader(rows, 8))


def test_what_is_not_finite_is_named_by_its_row(target, rows, tmp_path):
    class Broken(LitDrafter):
        def loss(self, batch, step):
            found = super().loss(batch, step)
            return dataclasses.replace(found, loss=found.loss * float("nan"))

    with pytest.raises(InputError, match="row 1 of batch 0"):
        trainer_of(tmp_path).fit(module_of(target, learner=Broken, max_bad_steps=0), loader(rows, 8))
