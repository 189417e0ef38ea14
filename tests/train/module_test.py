"""Draft heads trained by `draftsmith.fit` on rows in memory, with Lightning's own callbacks and flags."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from tiny_models import tiny_llama_dir
from torch.utils.data import DataLoader
from trained_runs import losses

import draftsmith
from draftsmith.modules.types import InputError
from draftsmith.train.checkpoints import FOLDER, all_in
from draftsmith.train.module import LitDrafter

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


def module_of(target: Any, output: Path, kind: str = "eagle", learner: type[LitDrafter] = LitDrafter, **values: Any):
    plain = {"lr": 1e-2, "schedule": "constant", "warmup_share": 0, "clip": 0, "batch_size": 4, "log_every": 1}
    plain |= {"loggers": ("csv",), "tau_prompts": 0, "accelerator": "cpu", "max_steps": 2, "output": output}
    config = dataclasses.replace(draftsmith.settings(kind, **plain | values), target=target.info.path)
    return learner(draftsmith.new_head(config, target).double(), target, config)


def trained(module: LitDrafter, rows: Any, *callbacks: pl.Callback, **flags: Any) -> LitDrafter:
    draftsmith.fit(module, draftsmith.HeadDataModule(rows, rows[:4], module.config), callbacks, **flags)
    return module


@pytest.mark.parametrize("kind", ["dflash", "draft", "dspark", "eagle", "eagle3", "medusa", "hydra"])
def test_it_learns_logs_and_validates(kind, target, rows, tmp_path):
    module = module_of(target, tmp_path, kind, max_steps=20)
    before = {name: own.clone() for name, own in module.head.named_parameters()}
    trained(module, rows)
    found = losses(tmp_path)
    assert len(found) == 20 and found[-1] < 0.9 * found[0]
    assert len(losses(tmp_path, "lr")) == len(losses(tmp_path, "grad_norm")) == 20
    assert {"val/loss", "val/top1", "train/loss"} <= module.trainer.callback_metrics.keys()
    assert any(not torch.equal(own, before[name]) for name, own in module.head.named_parameters())
    assert (tmp_path / "best" / "manifest.json").is_file()


def test_every_token_of_an_accumulated_step_counts_alike(target, rows, tmp_path):
    """Eight rows in one part, and in four of two whose answers differ in length: the same weights."""
    one, four = (
        trained(module_of(target, tmp_path / str(parts), noise=0.0, batch_size=8, accumulate=parts), rows).head
        for parts in (1, 4)
    )
    for name, own in one.state_dict().items():
        torch.testing.assert_close(own, four.state_dict()[name], rtol=1e-9, atol=1e-11)


class Doubled(LitDrafter):
    def loss(self, batch, step):
        found = super().loss(batch, step)
        return dataclasses.replace(found, loss=2 * found.loss)


def test_a_subclass_learns_its_own_loss_and_resumes_exactly(target, rows, tmp_path):
    """With the noise of the straight run, whose unit is measured."""
    steps = {"save_every": 2, "max_steps": 4, "keep": 9}
    steps = {"save_every": 2, "max_steps": 4, "keep": 9}
    for learner in (LitDrafter, Doubled):
        trained(module_of(target, tmp_path / learner.__name__, learner=learner, **steps), rows)
    first, doubled = (losses(tmp_path / name, "grad_norm") for name in ("LitDrafter", "Doubled"))
    assert doubled[0] == pytest.approx(2 * first[0], rel=1e-6)
    # As if it had been killed after the second step.
    straight, killed = tmp_path / "Doubled", tmp_path / "killed"
    shutil.copytree(straight, killed)
    shutil.rmtree(all_in(killed / FOLDER)[-1])
    (killed / "training.json").unlink()
    trained(module_of(target, killed, learner=Doubled, **steps), rows)
    for name in ("train/loss", "val/loss", "grad_norm", "lr"):
        assert losses(killed, name) == losses(straight, name)
    left, right = ((path / "last" / "model.safetensors").read_bytes() for path in (straight, killed))
    assert left == right


def test_the_unit_of_noise_is_measured_on_the_first_samples(target, rows, tmp_path):
    module = trained(module_of(target, tmp_path, max_steps=1), rows)
    read = [target.features(row["input_ids"][None])[0] for row in rows]
    assert module.feature_std == pytest.approx(float(torch.cat(read).std(correction=0)), rel=1e-6)


def test_lightnings_callbacks_loggers_and_flags_work(target, rows, tmp_path):
    class Seen(pl.Callback):
        validated = 0

        def on_validation_end(self, trainer, pl_module):
            self.validated += 1

    seen, best = Seen(), ModelCheckpoint(tmp_path / "theirs", monitor="val/loss", save_top_k=1)
    flags = {"limit_val_batches": 1, "logger": CSVLogger(tmp_path / "csv", name="", version="")}
    module = module_of(target, tmp_path / "run", max_steps=6, val_every=2)
    trained(module, rows, seen, best, LearningRateMonitor(), **flags)
    assert seen.validated == 3 and best.best_model_score is not None
    # A file as of any Lightning training, and one: earlier ones are removed.
    (file,) = (tmp_path / "theirs").iterdir()
    assert torch.load(file, weights_only=True)["global_step"] in (2, 4, 6)
    assert len(losses(tmp_path / "csv")) == 6 and module.trainer.num_val_batches == [1]


@pytest.mark.parametrize("monitor", ["train/loss", "val/loss"])
def test_a_training_that_a_callback_stops_is_finished(monitor, target, rows, tmp_path):
    module = module_of(target, tmp_path, max_steps=9, val_every=2, save_every=9)
    # No loss falls below that, so that it stops at its second look.
    stop = EarlyStopping(monitor, patience=1, min_delta=1e9)
    trained(module, rows, stop)
    assert module.trainer.global_step == 4
    assert json.loads((tmp_path / "training.json").read_text())["steps"] == 4
    assert [path.name for path in all_in(tmp_path / FOLDER)] == ["step-00000004"]
    assert json.loads((tmp_path / "last" / "manifest.json").read_text())["step"] == 4


@pytest.mark.parametrize(
    ("flag", "option"), [({"precision": "bf16-mixed"}, "precision"), ({"max_epochs": 2}, "epochs")]
)
def test_a_flag_that_an_option_decides_is_refused_in_a_line(flag, option, target, rows, tmp_path):
    with pytest.raises(InputError, match=f"pass {option} to draftsmith"):
        trained(module_of(target, tmp_path), rows, **flag)


def test_products_are_of_the_precision_asked_for(target, rows, tmp_path):
    """In training and validation; weights stay float32."""
    plain = draftsmith.load_target(target.info.path, "float32")
    for precision, expected in (("bf16", torch.bfloat16), ("32", torch.float32), ("auto", torch.float32)):
        module, types = module_of(plain, tmp_path / precision, precision=precision), set()
        module.head.float().fc.register_forward_hook(lambda layer, inputs, output, to=types: to.add(output.dtype))
        trained(module, rows)
        assert types == {expected} and {weight.dtype for weight in module.head.parameters()} == {torch.float32}


def test_in_another_trainer_what_does_not_fit_is_refused_in_a_line(target, rows, tmp_path):
    module, quiet = module_of(target, tmp_path), {"logger": False, "enable_checkpointing": False, "accelerator": "cpu"}
    with pytest.raises(InputError, match="expected a HeadDataModule"):
        pl.Trainer(**quiet).fit(module, DataLoader(rows, batch_size=4, collate_fn=draftsmith.collate))
    data = draftsmith.HeadDataModule(rows, rows, module.config)
    with pytest.raises(InputError, match="precision: found bf16-mixed"):
        pl.Trainer(precision="bf16-mixed", **quiet).fit(module, datamodule=data)


def test_lightnings_advice_is_not_shown(target, rows, tmp_path, monkeypatch, recwarn):
    """As on a machine with many processors."""
    from lightning.pytorch.trainer.connectors import data_connector

    monkeypatch.setattr(data_connector, "suggested_max_num_workers", lambda devices: 8)
    trained(module_of(target, tmp_path), rows)
    assert not [str(warning.message) for warning in recwarn if "lightning" in str(warning.filename)]


def test_a_run_needs_a_directory_and_samples(target, rows, tmp_path):
    with pytest.raises(InputError, match="expected a directory for the run"):
        trained(module_of(target, Path("given in Python")), rows)
    with pytest.raises(InputError, match="train: found no samples"):
        draftsmith.HeadDataModule([], rows, module_of(target, tmp_path).config)


def test_what_is_not_finite_is_named_by_its_row(target, rows, tmp_path):
    class Broken(LitDrafter):
        def loss(self, batch, step):
            found = super().loss(batch, step)
            return dataclasses.replace(found, loss=found.loss * float("nan"))

    with pytest.raises(InputError, match="row 1"):
        trained(module_of(target, tmp_path, learner=Broken, max_bad_steps=0, batch_size=8), rows)
