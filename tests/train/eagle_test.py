"""`train eagle`: what is trained, reported and saved."""

from __future__ import annotations

import csv
import dataclasses
import json

import numpy as np
import pytest
import torch
from eagle_trainings import QUICK, a_module, a_part, change, config
from safetensors.torch import load_file
from trained_runs import losses, newest_state, step_loss, validate

from draftsmith.data.store.datasets import collate_features, open_dataset, pack_features
from draftsmith.modules.decoding.loop import generate_one
from draftsmith.modules.decoding.stop import FixedLengthStop
from draftsmith.modules.drafters.eagle import EagleHead, eagle_loss, eagle_training, noise_like, shift
from draftsmith.modules.drafters.net import ChainDrafter
from draftsmith.modules.flops import layers_forward
from draftsmith.modules.pretrained.heads import load_head
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.types import SamplingParams
from draftsmith.train.command import run
from draftsmith.train.data import MicroBatch, held_out


def test_training_reports_both_losses_and_tau(eagle_run):
    with (eagle_run / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    reported = [row for row in rows if row["val/loss"]]
    assert [row["step"] for row in reported] == ["6", "12"]
    for name in ("feature_loss", "token_loss", "top1", "top3"):
        assert all(float(row[f"val/{name}"]) >= 0 for row in reported), name
    assert [bool(row["val/tau"]) for row in reported] == [False, True]  # every 12 steps
    assert float(reported[-1]["val/tau"]) >= 1.0
    found = losses(eagle_run)
    assert len(found) == 4 and found[-1] < found[0]


def test_the_first_choices_are_looked_for_in_steps_that_are_logged_only(artifacts, tmp_path, monkeypatch):
    asked, loss = [], EagleHead.loss

    def watched(self, batch, target, settings, step):
        output = loss(self, batch, target, settings, step)
        if step is not None:
            asked.append((step.number + 1, "top1" in output.sums, "top3" in output.sums))
        return output

    monkeypatch.setattr(EagleHead, "loss", watched)
    run(config(artifacts, tmp_path, max_steps=5, log_every=2, val_every=5, accumulate=2, tau_prompts=0))
    assert asked == [(step, step in (2, 4, 5), step in (2, 4, 5)) for step in range(1, 6) for _ in range(2)]


def test_best_and_last_are_heads_that_decode(eagle_run, artifacts):
    target = load_lm(str(artifacts.target))
    for name in ("best", "last"):
        head = load_head(eagle_run / name, target, kind="eagle")
        drafter = ChainDrafter(head.net(target), [FixedLengthStop(4)], 64)
        prompt, params = [5, 6, 7, 8], SamplingParams()
        drafted = generate_one(target, drafter, prompt, params, 12, TorchSource(0)).tokens
        assert drafted == generate_one(target, None, prompt, params, 12, TorchSource(0)).tokens
    manifest = json.loads((eagle_run / "best" / "manifest.json").read_text())
    assert manifest["models"]["target"] == target.info.identity == manifest["target"]


def test_the_gradient_reaches_every_weight_of_the_head_and_nothing_else(artifacts, tmp_path, eagle_run):
    """The target is neither trained nor a part of the module or its checkpoints."""
    module = a_module(artifacts, tmp_path)
    step_loss(module, a_part(artifacts, range(6))).loss.backward()
    assert all(p.grad is not None and p.grad.any() for p in module.head.parameters())
    assert not any(p.requires_grad or p.grad is not None for p in module.target.model.parameters())
    ours = {f"head.{name}" for name in module.head.state_dict()}
    assert set(module.state_dict()) == ours == {name for name, _ in module.named_parameters()}
    assert set(newest_state(eagle_run)["state_dict"]) == ours


def test_noise_belongs_to_the_sample_not_to_its_batch(artifacts, tmp_path):
    module = a_module(artifacts, tmp_path, noise=0.1)
    alone, together = a_part(artifacts, [3]), a_part(artifacts, range(8))
    length = len(open_dataset(artifacts.features)[3]["input_ids"]) - 2

    def noise(batch: MicroBatch) -> torch.Tensor:
        rows, width, size = batch.data.features.shape
        return noise_like(torch.zeros(rows, width - 2, size), module.train_step(batch), 0.2, flat=False)

    assert torch.equal(noise(alone)[0, :length], noise(together)[3, :length])
    assert 0.15 < noise(together).abs().max() <= 0.2
    assert not torch.equal(noise(a_part(artifacts, range(8), epoch=1)), noise(together))
    plain, unroll = shift(together.data), module.head.unroll
    read = []
    module.head.unroll = lambda embeds, features, *rest: read.append(features) or unroll(embeds, features, *rest)
    step_loss(module, together)  # 0.1 of the features' standard deviation, 2
    assert torch.equal(read[0], plain.features.float() + noise(together))


def test_unrolled_training_is_the_weighted_mean_of_the_drafts_steps_and_reports_the_first(artifacts, tmp_path):
    module = a_module(artifacts, tmp_path, noise=0.0)
    batch = a_part(artifacts, [0, 1])
    first = step_loss(module, batch)
    change(module, unroll=2, unroll_decay=0.5)
    both = step_loss(module, batch)
    pair, target, settings = shift(batch.data), module.target, module.settings
    hidden = module.head.unroll(target.embed(pair.next_ids), pair.features.float(), 2)[1:]
    weights, vocab_size = (settings.feature_weight, settings.token_weight), module.head.config.vocab_size
    second = eagle_loss(
        hidden, pair.target_features, [pair.loss_mask], target.lm_head, vocab_size, *weights
    )  # no loss before the second row: prompts are longer
    torch.testing.assert_close(both.loss, (first.loss + 0.5 * second.loss) / 1.5)
    assert both.sums["loss"] == first.sums["loss"]
    change(module, unroll_after=1 / 12)  # after the first of 12 steps
    torch.testing.assert_close(step_loss(module, batch).loss, first.loss)
    module.trainer.global_step = 1
    torch.testing.assert_close(step_loss(module, batch).loss, both.loss)


def test_a_packed_batch_has_the_loss_and_the_gradient_of_the_padded_one(artifacts, tmp_path):
    module = a_module(artifacts, tmp_path, noise=0.1)
    change(module, unroll=2)
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


def test_validation_is_the_mean_over_tokens_and_without_noise(artifacts, tmp_path):
    module = a_module(artifacts, tmp_path)
    whole = validate(module, [a_part(artifacts, range(7))])
    pieces = validate(module, [a_part(artifacts, [0]), a_part(artifacts, range(1, 7))])
    assert pieces == pytest.approx(whole, rel=1e-5)  # float32 sums in another order


def test_the_amount_of_supervision_is_logged_and_recorded(artifacts, eagle_run, tmp_path, capsys):
    recorded = json.loads((eagle_run / "best" / "manifest.json").read_text())["samples"]["training"]
    data = open_dataset(artifacts.features)
    train, _ = held_out(len(data), QUICK["val_share"])
    lengths = [int(data[i]["loss_mask"].sum()) for i in train]
    assert (recorded["answers"], recorded["answer_tokens"]) == (len(lengths), sum(lengths))
    assert recorded["tokens_p50"] == pytest.approx(float(np.median(lengths)))
    run(config(artifacts, tmp_path / "run", max_steps=1, val_every=1))
    shown = capsys.readouterr().err
    assert f"data: {len(lengths)} answers with {sum(lengths)} tokens, a median of" in shown
    assert shown.partition("step 1/1")[0].count("fewer than 60,000") == 1


def test_flops_are_those_of_the_real_tokens_and_of_the_draft_steps_trained(artifacts, tmp_path):
    module, batch = a_module(artifacts, tmp_path), a_part(artifacts, [0, 1, 5])
    filler = dataclasses.replace(batch, keys=(*batch.keys[:2], dataclasses.replace(batch.keys[2], filler=True)))
    config = module.head.config.llama
    rows = [length - 2 for length in batch.lengths]
    assert module.flops(batch) == eagle_training(config, rows, batch.tokens)
    assert module.flops(filler) == eagle_training(config, rows[:2], batch.tokens)
    change(module, unroll=3)
    assert module.flops(batch) == eagle_training(config, rows, batch.tokens, ttt_steps=3)
    online = dataclasses.replace(batch, data=dataclasses.replace(batch.data, features=None))
    target_flops = layers_forward(module.target.config, batch.lengths)
    assert module.flops(online) - module.flops(batch) == pytest.approx(target_flops)
