"""Draft heads trained by `draftsmith.fit` on rows in memory and by `train eagle` on artifacts: steps and losses."""

from __future__ import annotations

import csv
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import datasets
import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from trainings import QUICK, a_module, a_part, change, config, losses, step_loss
from worlds import tiny_llama_dir

import draftsmith
from draftsmith.data.store.datasets import collate_features, open_dataset, pack_features
from draftsmith.modules.drafters.eagle import EagleHead, noise_like
from draftsmith.modules.types import InputError
from draftsmith.train.checkpoints import FOLDER, STATE, all_in
from draftsmith.train.command import run
from draftsmith.train.data import MicroBatch, held_out
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
    plain |= {"loggers": ("csv",), "tau_prompts": 0, "device": "cpu", "max_steps": 2, "output": output}
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


SPANNED = [("eagle3", 0), ("eagle3", 9), ("dspark", 0), ("dflash", 9)]  # windows; the EAGLE-3 head has two layers


@pytest.mark.parametrize(("kind", "window"), SPANNED)
def test_span_by_span_a_head_learns_what_it_learns_at_once(kind, window, target, tmp_path):
    """Packed texts: some in one span, the longest in several, and without an answer in one of these."""
    generator = torch.Generator().manual_seed(1)
    lengths = (61, 4, 40, 7, 23, 16, 9, 31)
    ids = [torch.randint(target.info.vocab_size, (length,), generator=generator) for length in lengths]
    rows = [{"input_ids": own, "loss_mask": torch.arange(len(own)) % 40 > 15 - n} for n, own in enumerate(ids)]
    shape = {"eagle3": {"ttt_steps": 3, "num_layers": 2}, "dflash": {"block": 3, "num_layers": 2}}.get(
        kind, {"block": 3, "anchors": 5}
    )
    whole, spans = (
        trained(
            module_of(
                target, tmp_path / str(span), kind, max_steps=4, tokens_per_batch=110, span_tokens=span, window=window,
                accumulate=2, **shape,
            ), rows,
        )
        for span in (0, 16)
    )  # fmt: skip
    for name, own in whole.head.state_dict().items():
        torch.testing.assert_close(spans.head.state_dict()[name], own, rtol=1e-9, atol=1e-11)
    for column in ("train/loss", "train/top1", "grad_norm"):
        assert losses(tmp_path / "16", column) == pytest.approx(losses(tmp_path / "0", column), rel=1e-6), column


def test_a_loss_of_the_users_own_sees_the_whole_batch(target, rows, tmp_path):
    """It need not know of spans, which would count a batch several times."""
    spans = []

    class Own(LitDrafter):
        def loss(self, batch, step):
            spans.append(step.span)
            return super().loss(batch, step)

    options = {"max_steps": 1, "tokens_per_batch": 200, "span_tokens": 16, "ttt_steps": 2}
    trained(module_of(target, tmp_path, "eagle3", learner=Own, **options), rows)
    assert spans == [None]


class Doubled(LitDrafter):
    def loss(self, batch, step):
        found = super().loss(batch, step)
        return dataclasses.replace(found, loss=2 * found.loss)


def test_a_subclass_learns_its_own_loss_and_resumes_exactly(target, rows, tmp_path):
    """With the noise of the straight run, whose unit is measured."""
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
    ("flag", "option"), [({"precision": "bf16-mixed"}, "precision"), ({"limit_train_batches": 2}, "max_steps")]
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


AS_GIVEN = {
    "lists": lambda rows: [{name: own.tolist() for name, own in row.items()} for row in rows],
    "arrays": lambda rows: [{name: own.numpy() for name, own in row.items()} for row in rows],
    "numbers": lambda rows: [{"input_ids": r["input_ids"].int(), "loss_mask": r["loss_mask"].float()} for r in rows],
    "datasets": lambda rows: datasets.Dataset.from_list(AS_GIVEN["lists"](rows)),
}


@pytest.mark.parametrize("kind", AS_GIVEN)
def test_rows_of_other_types_are_the_same_rows(kind, target, rows, tmp_path):
    config = module_of(target, tmp_path).config
    ours, theirs = (draftsmith.HeadDataModule(own, rows, config).train for own in (AS_GIVEN[kind](rows), rows))
    assert ours.dataset.digest == theirs.dataset.digest
    for number in range(len(rows)):
        assert all(torch.equal(rows[number][name], own) for name, own in ours.item(number, 0).items())


ODD = {
    "another shape": (lambda row: {name: own[None] for name, own in row.items()}, r"row 7: found input_ids \[1, 6\]"),
    "labels": (lambda row: {"input_ids": row["input_ids"], "labels": row["input_ids"]}, r"row 7: .*labels != -100"),
    "a short mask": (lambda row: {**row, "loss_mask": row["loss_mask"][:-1]}, r"row 7: .*loss_mask \[5\]"),
    "labels for a mask": (lambda row: {**row, "loss_mask": row["input_ids"]}, r"row 7: .*0 and 1"),
    "no token": (lambda row: {name: own[:0] for name, own in row.items()}, r"row 7: .*T at least 1"),
    "words": (lambda row: {**row, "input_ids": ["a"] * 6}, "row 7: "),
    "no dictionary": (lambda row: 7, "row 7: "),
    "beyond the vocabulary": (lambda row: {**row, "input_ids": row["input_ids"] + 10**5}, "the vocabulary"),
    "below it": (lambda row: {**row, "input_ids": row["input_ids"] - 10**5}, "the vocabulary"),
    "beyond the context": (
        lambda row: {name: own.repeat(99) for name, own in row.items()},
        "594 tokens, .*at most 256",
    ),
}


@pytest.mark.parametrize("kind", ODD)
def test_rows_that_are_none_are_one_line(kind, target, rows, tmp_path):
    change, words = ODD[kind]
    with pytest.raises(InputError, match=words) as caught:
        trained(module_of(target, tmp_path), [*rows[:7], change(rows[7])])
    assert "\n" not in str(caught.value)


def test_what_is_no_sequence_of_rows_is_one_line(target, rows, tmp_path):
    for given in (iter(rows), datasets.Dataset.from_list(AS_GIVEN["lists"](rows)).to_iterable_dataset()):
        with pytest.raises(InputError, match=r"expected a sequence of rows\. Pass list\(rows\)"):
            draftsmith.HeadDataModule(given, None, module_of(target, tmp_path).config)
    twice = [{name: own.repeat(2) for name, own in row.items()} for row in rows]
    with pytest.raises(InputError, match="max_length: found rows of 24 tokens, expected at most 16"):
        draftsmith.HeadDataModule(twice, None, module_of(target, tmp_path, max_length=16, val_share=0.2).config)


def test_rows_in_memory_resume_and_finish_as_the_same_rows_only(target, rows, tmp_path):
    trained(module_of(target, tmp_path), rows)
    other = [*rows[:7], {**rows[7], "input_ids": rows[7]["input_ids"].flip(0)}]
    before = (tmp_path / "last" / "model.safetensors").read_bytes()
    for finished in (True, False):
        if not finished:
            (tmp_path / "training.json").unlink()
        with pytest.raises(InputError, match=r"another inputs\.data: "):
            trained(module_of(target, tmp_path), other)
        trained(module_of(target, tmp_path), rows)
    assert (tmp_path / "last" / "model.safetensors").read_bytes() == before


def test_a_callbacks_state_is_saved_behind_its_own_step(target, rows, tmp_path):
    class Count(pl.Callback):
        steps = 0

        def on_train_batch_end(self, trainer, *_):
            self.steps += 1

        def state_dict(self):
            return {"steps": self.steps}

    trained(module_of(target, tmp_path, max_steps=3, val_every=2, save_every=1, keep=9), rows, Count())
    for path in all_in(tmp_path / FOLDER):
        state = torch.load(path / STATE, weights_only=True)
        (counted,) = (own["steps"] for name, own in state["callbacks"].items() if "Count" in name)
        assert counted == state["global_step"]


def test_without_a_validation_the_last_head_is_the_best(target, rows, tmp_path):
    trained(module_of(target, tmp_path), rows, limit_val_batches=0)
    best, last = (load_file(tmp_path / name / "model.safetensors") for name in ("best", "last"))
    assert all(torch.equal(own, last[name]) for name, own in best.items())
    trained(module_of(target, tmp_path), rows)


def test_what_is_not_finite_is_named_by_its_row(target, rows, tmp_path, monkeypatch):
    monkeypatch.setattr("draftsmith.train.metrics.MOST_BAD_STEPS", 0)

    class Broken(LitDrafter):
        def loss(self, batch, step):
            found = super().loss(batch, step)
            return dataclasses.replace(found, loss=found.loss * float("nan"))

    with pytest.raises(InputError, match="row 1"):
        trained(module_of(target, tmp_path, learner=Broken, batch_size=8), rows)


# -- train eagle


def test_training_reports_both_losses_and_tau(eagle_run):
    with (eagle_run / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    reported = [row for row in rows if row["val/loss"]]
    assert [row["step"] for row in reported] == ["6", "12"]
    for name in ("feature_loss", "token_loss", "top1"):
        assert all(float(row[f"val/{name}"]) >= 0 for row in reported), name
    assert all(float(row["val/tau"]) > 1 for row in reported)
    found = losses(eagle_run)
    assert len(found) == 4 and found[-1] < found[0]


def test_the_first_choices_are_looked_for_in_steps_that_are_logged_only(artifacts, tmp_path, monkeypatch):
    asked, loss = [], EagleHead.loss

    def watched(self, batch, target, settings, step):
        output = loss(self, batch, target, settings, step)
        if step is not None:
            asked.append((step.number + 1, "top1" in output.sums))
        return output

    monkeypatch.setattr(EagleHead, "loss", watched)
    run(config(artifacts, tmp_path, max_steps=5, log_every=2, val_every=5, accumulate=2, tau_prompts=0))
    assert asked == [(step, step in (2, 4, 5)) for step in range(1, 6) for _ in range(2)]


def test_noise_belongs_to_the_sample_not_to_its_batch(artifacts, tmp_path):
    module = a_module(artifacts, tmp_path, noise=0.1)
    alone, together = a_part(artifacts, [3]), a_part(artifacts, range(8))
    length = len(open_dataset(artifacts.features)[3]["input_ids"])

    def noise(batch: MicroBatch) -> torch.Tensor:
        return noise_like(batch.data.features.float(), module.train_step(batch), 0.2, flat=False)

    assert torch.equal(noise(alone)[0, :length], noise(together)[3, :length])
    assert 0.15 < noise(together).abs().max() <= 0.2
    assert not torch.equal(noise(a_part(artifacts, range(8), epoch=1)), noise(together))
    unroll, read = module.head.unroll, []
    module.head.unroll = lambda embeds, states, *rest: read.append(states) or unroll(embeds, states, *rest)
    step_loss(module, together)  # 0.1 of the features' standard deviation, 2
    assert torch.equal(read[0], together.data.features.float() + noise(together))


def test_later_steps_of_drafts_begin_where_they_are_told(artifacts, tmp_path):
    module = a_module(artifacts, tmp_path, noise=0.0)
    batch = a_part(artifacts, [0, 1])
    first = step_loss(module, batch)
    change(module, ttt_steps=2)
    both = step_loss(module, batch)
    assert both.loss != first.loss
    change(module, ttt_steps_after=1 / 12)  # after the first of 12 steps
    torch.testing.assert_close(step_loss(module, batch).loss, first.loss)
    module.trainer.global_step = 1
    torch.testing.assert_close(step_loss(module, batch).loss, both.loss)


def test_a_packed_batch_has_the_loss_and_the_gradient_of_the_padded_one(artifacts, tmp_path):
    module = a_module(artifacts, tmp_path, noise=0.1)
    change(module, ttt_steps=2)
    found = {}
    for collate in (collate_features, pack_features):
        module.zero_grad()
        output = step_loss(module, a_part(artifacts, range(9), collate))
        output.loss.backward()
        found[collate] = output, [p.grad.clone() for p in module.head.parameters()]
    (padded, grads), (packed, packed_grads) = found.values()
    # float32 sums in another order.
    assert packed.loss.item() == pytest.approx(padded.loss.item(), rel=1e-5)
    assert {k: v.item() for k, v in packed.sums.items()} == pytest.approx(
        {k: v.item() for k, v in padded.sums.items()}, rel=1e-5
    )
    for ours, theirs in zip(packed_grads, grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6 * float(theirs.abs().max()))


def test_training_in_bf16_on_packed_steps_with_split_sequences(artifacts, tmp_path, capsys):
    lengths = open_dataset(artifacts.features).lengths
    limit = int(sorted(lengths)[-6])
    packed = {"tokens_per_batch": 200, "max_length": limit, "accumulate": 2}
    output = run(config(artifacts, tmp_path / "run", precision="bf16", **packed)).parent
    longer = sum(length > limit for length in lengths)
    assert f"{longer} of {len(lengths)} sequences are longer than {limit} tokens: split" in capsys.readouterr().err
    found = losses(output)
    assert len(found) == 4 and found[-1] < found[0]
    weights = load_file(output / "last" / "model.safetensors").values()
    assert all(weight.dtype == torch.float32 and weight.isfinite().all() for weight in weights)


def test_the_amount_of_supervision_is_logged_and_recorded(artifacts, eagle_run, tmp_path, capsys):
    recorded = json.loads((eagle_run / "best" / "manifest.json").read_text())["samples"]["training"]
    data = open_dataset(artifacts.features)
    train, _ = held_out(data.hashes, QUICK["val_share"])
    lengths = [int(data[i]["loss_mask"].sum()) for i in train]
    assert (recorded["answers"], recorded["answer_tokens"]) == (len(lengths), sum(lengths))
    assert recorded["tokens_p50"] == pytest.approx(float(np.median(lengths)))
    run(config(artifacts, tmp_path / "run", max_steps=1, val_every=1))
    shown = capsys.readouterr().err
    assert f"data: {len(lengths)} answers with {sum(lengths)} tokens, a median of" in shown
    assert shown.partition("step 1/1")[0].count("fewer than 60,000") == 1
