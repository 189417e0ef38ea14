"""`train eagle`: what is trained, what is reported, what is saved."""

from __future__ import annotations

import csv
import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from eagle_trainings import QUICK, a_module, a_part, change, config
from safetensors.torch import load_file
from tiny_models import tiny_llama_dir
from trained_runs import newest_state

from draftsmith.data.heads.directory import load_head
from draftsmith.data.models.loading import load_lm
from draftsmith.data.store.datasets import collate_features, open_dataset, pack_features
from draftsmith.modules.decoding.loop import generate_one
from draftsmith.modules.decoding.stop import FixedLength
from draftsmith.modules.drafters.eagle.head import EagleHead, eagle_loss, eagle_training, noise_like, shift
from draftsmith.modules.drafters.feature_heads import FeatureDrafter
from draftsmith.modules.flops import layers_forward
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.types import InputError, SamplingParams
from draftsmith.train import fit
from draftsmith.train.data_module import Key, Part, Samples, held_out
from draftsmith.train.drafter import feature_std
from draftsmith.train.run import run


def test_a_run_goes_on_with_its_own_target_only(artefacts, tmp_path, capsys):
    """Supervised prompts are of a tokenizer, not of a target: the run itself remembers what it read."""
    settings = config(artefacts, tmp_path, resume=True)
    identity = load_lm(str(artefacts.target)).info.identity
    texts = {"tokenizer": identity["tokenizer"]}
    begun = fit._state(settings, fit.Provenance("eagle", {}, identity, texts))
    (tmp_path / fit.STARTED).write_text(json.dumps(begun))
    tuned = fit.Provenance("eagle", {}, {**identity, "weights": "other"}, texts)
    with pytest.raises(InputError, match=r"resume: found another read_model\.weights: other"):
        fit._checkpoint(settings, tuned)
    earlier = {key: value for key, value in begun.items() if not key.startswith("read_model")}
    (tmp_path / fit.STARTED).write_text(json.dumps(earlier))
    assert fit._checkpoint(settings, tuned) is None
    assert "read_model" in capsys.readouterr().err


def test_training_reports_both_losses_agreement_and_tau(eagle_run):
    with (eagle_run / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    reported = [row for row in rows if row["val/loss"]]
    assert [row["step"] for row in reported] == ["6", "12"]
    for name in ("feature_loss", "token_loss", "top1", "top3"):
        assert all(float(row[f"val/{name}"]) >= 0 for row in reported), name
    assert [bool(row["val/tau"]) for row in reported] == [False, True]  # every 12 steps
    assert float(reported[-1]["val/tau"]) >= 1.0
    losses = [float(row["train/loss"]) for row in rows if row["train/loss"]]
    assert len(losses) == 4 and losses[-1] < losses[0]


def test_the_first_choices_are_looked_for_in_steps_that_are_logged_only(artefacts, tmp_path, monkeypatch):
    asked, loss = [], EagleHead.loss

    def watched(self, batch, target, settings, step):
        output = loss(self, batch, target, settings, step)
        if step is not None and step.number < step.total:  # behind the last one are those of the plan
            asked.append((step.number + 1, "top1" in output.sums, "top3" in output.sums))
        return output

    monkeypatch.setattr(EagleHead, "loss", watched)
    run(config(artefacts, tmp_path, max_steps=5, log_every=2, val_every=5, accumulate=2, tau_prompts=0))
    assert asked == [(step, step in (2, 4, 5), step in (2, 4, 5)) for step in range(1, 6) for _ in range(2)]
    with (tmp_path / "metrics.csv").open() as file:
        logged = {row["step"] for row in csv.DictReader(file) if row["train/top1"] and row["train/loss"]}
    assert logged == {"2", "4", "5"}


def test_best_and_last_are_heads_that_decode(eagle_run, artefacts):
    target = load_lm(str(artefacts.target))
    for name in ("best", "last"):
        head = load_head(eagle_run / name, target, kind="eagle")
        drafter = FeatureDrafter(head, target, [FixedLength(4)], 64)
        prompt, params = [5, 6, 7, 8], SamplingParams()
        drafted = generate_one(target, drafter, prompt, params, 12, TorchSource(0)).tokens
        assert drafted == generate_one(target, None, prompt, params, 12, TorchSource(0)).tokens
        assert "emitted tokens per target call" in (eagle_run / "last" / "README.md").read_text()
    manifest = json.loads((eagle_run / "best" / "manifest.json").read_text())
    assert manifest["models"]["target"] == target.info.identity == manifest["target"]


@pytest.mark.parametrize("init", ["random", "target-last-layer"])
def test_the_gradient_reaches_every_weight_of_the_head_and_none_of_the_target(artefacts, tmp_path, init):
    module = a_module(artefacts, tmp_path, init=init)
    module.part_loss(a_part(artefacts, range(6))).loss.backward()
    assert all(p.grad is not None and p.grad.any() for p in module.head.parameters())
    assert not any(p.requires_grad or p.grad is not None for p in module.objective.target.model.parameters())


def test_the_target_is_no_part_of_module_or_checkpoint(artefacts, tmp_path, eagle_run):
    module = a_module(artefacts, tmp_path)
    ours = {f"head.{name}" for name in module.head.state_dict()}
    assert set(module.state_dict()) == ours == {name for name, _ in module.named_parameters()}
    assert set(newest_state(eagle_run)["state_dict"]) == ours


def test_noise_belongs_to_the_sample_not_to_its_batch(artefacts, tmp_path):
    module = a_module(artefacts, tmp_path, noise=0.1)
    alone, together = a_part(artefacts, [3]), a_part(artefacts, range(8))
    length = len(open_dataset(artefacts.features)[3]["input_ids"]) - 2

    def noise(part: Part) -> torch.Tensor:
        size, step = part.data.features.shape, module._step(part.keys)
        return noise_like(torch.zeros(size[0], size[1] - 2, size[2]), step, 0.2, flat=False)

    assert torch.equal(noise(alone)[0, :length], noise(together)[3, :length])
    assert 0.15 < noise(together).abs().max() <= 0.2
    later = Part(together.data, tuple(Key(1, key.index) for key in together.keys), 1, 1, True, True)
    assert not torch.equal(noise(later), noise(together))
    plain, pair = shift(together.data), module.head.unroll
    read = []
    module.head.unroll = lambda embeds, features, *rest: read.append(features) or pair(embeds, features, *rest)
    module.part_loss(together)  # 0.1 of the features' standard deviation, 2
    assert torch.equal(read[0], plain.features.float() + noise(together))


def test_unrolled_training_is_the_weighted_mean_of_the_drafts_steps_and_reports_the_first(artefacts, tmp_path):
    module = a_module(artefacts, tmp_path, noise=0.0)
    part = a_part(artefacts, [0, 1])
    first = module.part_loss(part)
    change(module, unroll=2, unroll_decay=0.5)
    both = module.part_loss(part)
    pair, target, settings = shift(part.data), module.objective.target, module.objective.settings
    hidden = module.head.unroll(target.embed(pair.next_ids), pair.features.float(), 2)[1:]
    second = eagle_loss(
        hidden, pair.target_features, [pair.loss_mask], target.lm_head, settings.feature_weight, settings.token_weight
    )  # no loss before the second row: prompts are longer
    torch.testing.assert_close(both.loss, (first.loss + 0.5 * second.loss) / 1.5)
    assert both.sums["loss"] == first.sums["loss"]
    change(module, unroll_after=1 / 12)  # after the first of 12 steps
    torch.testing.assert_close(module.part_loss(part).loss, first.loss)
    module.trainer.global_step = 1
    torch.testing.assert_close(module.part_loss(part).loss, both.loss)


def test_a_packed_batch_has_the_loss_and_the_gradient_of_the_padded_one(artefacts, tmp_path):
    module = a_module(artefacts, tmp_path, noise=0.1)
    change(module, unroll=2)
    found = {}
    for collate in (collate_features, pack_features):
        module.zero_grad()
        output = module.part_loss(a_part(artefacts, range(9), collate))
        output.loss.backward()
        found[collate] = output, [p.grad.clone() for p in module.head.parameters()]
    (padded, grads), (packed, packed_grads) = found.values()
    # The bar is 1e-5; what differs is the order of float32 sums.
    assert packed.loss.item() == pytest.approx(padded.loss.item(), rel=1e-5)
    assert {k: v.item() for k, v in packed.sums.items()} == pytest.approx(
        {k: v.item() for k, v in padded.sums.items()}, rel=1e-5
    )
    for ours, theirs in zip(packed_grads, grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6 * float(theirs.abs().max()))


def test_training_on_packed_steps_with_split_sequences_runs_and_says_so(artefacts, tmp_path, capsys):
    lengths = open_dataset(artefacts.features).lengths
    limit = sorted(lengths)[-6]
    output = run(config(artefacts, tmp_path / "run", tokens_per_batch=200, max_length=limit, accumulate=2)).parent
    longer = sum(length > limit for length in lengths)
    assert f"{longer} of {len(lengths)} sequences are longer than {limit} tokens: split" in capsys.readouterr().err
    with (output / "metrics.csv").open() as file:
        found = [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]
    assert len(found) == 4 and found[-1] < found[0]


def test_validation_is_the_mean_over_tokens_and_without_noise(artefacts, tmp_path):
    module = a_module(artefacts, tmp_path)
    whole = module.validate([a_part(artefacts, range(7))])
    pieces = module.validate([a_part(artefacts, [0]), a_part(artefacts, range(1, 7))])
    assert pieces == pytest.approx(whole, rel=1e-5)  # float32 sums in another order


def test_the_noise_unit_is_the_features_standard_deviation(artefacts):
    data = open_dataset(artefacts.features)
    samples = Samples(data, range(5))
    everything = torch.cat([data[i]["features"].double().flatten() for i in range(5)])
    assert feature_std(samples, load_lm(str(artefacts.target))) == pytest.approx(
        float(everything.std(correction=0)), rel=1e-9
    )


def test_what_will_be_learned_is_said_and_recorded(artefacts, eagle_run, tmp_path, capsys):
    recorded = json.loads((eagle_run / "best" / "manifest.json").read_text())["samples"]["training"]
    data = open_dataset(artefacts.features)
    train, _ = held_out(len(data), QUICK["val_share"])
    lengths = [int(data[i]["loss_mask"].sum()) for i in train]
    assert (recorded["answers"], recorded["answer_tokens"]) == (len(lengths), sum(lengths))
    assert recorded["tokens_p50"] == pytest.approx(float(np.median(lengths)))
    assert recorded["early_share"] == pytest.approx(sum(min(5, n) for n in lengths) / sum(lengths), abs=1e-4)
    assert f"{len(lengths)} answers of {sum(lengths)} tokens" in (eagle_run / "best" / "README.md").read_text()
    run(config(artefacts, tmp_path / "run", max_steps=1, val_every=1))
    shown = capsys.readouterr().err
    assert f"data: {len(lengths)} answers with {sum(lengths)} tokens to learn from" in shown
    assert shown.partition("step 1/1")[0].count("fewer than 60,000") == 1
    assert "(tau on 3 prompt(s) of " in shown and "8 each, end tokens ignored, chains of 5)" in shown


def test_bf16_trains_float32_weights(artefacts, tmp_path):
    run(config(artefacts, tmp_path / "run", precision="bf16", max_steps=4, tau_prompts=0))
    state = load_file(tmp_path / "run" / "last" / "model.safetensors")
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert all(tensor.isfinite().all() for tensor in state.values())


def test_features_of_another_target_are_refused(artefacts, tmp_path):
    other = tiny_llama_dir(tmp_path / "other", seed=5)
    with pytest.raises(InputError, match="made with another target"):
        run(config(artefacts, tmp_path / "run", target=str(other)))


def test_a_damaged_shard_is_named(artefacts, tmp_path):
    copy = shutil.copytree(artefacts.features, tmp_path / "features")
    shard = next(copy.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(InputError, match=f"{shard.name}.*sha256"):
        run(config(artefacts, tmp_path / "run", data=copy))


def test_flops_are_those_of_the_real_tokens_and_of_the_draft_steps_trained(artefacts, tmp_path):
    module, part = a_module(artefacts, tmp_path), a_part(artefacts, [0, 1, 5])
    filler = Part(part.data, (*part.keys[:2], Key(0, 5, filler=True)), part.tokens, part.tokens, True, True)
    config = module.head.config.llama
    lengths = [len(open_dataset(artefacts.features)[i]["input_ids"]) - 2 for i in (0, 1, 5)]
    assert module.flops(part) == eagle_training(config, lengths, part.tokens)
    assert module.flops(filler) == eagle_training(config, lengths[:2], part.tokens)
    change(module, unroll=3)
    assert module.flops(part) == eagle_training(config, lengths, part.tokens, passes=3)
    online = Part(dataclasses.replace(part.data, features=None), part.keys, part.tokens, part.tokens, True, True)
    target = layers_forward(module.objective.target.config, [length + 2 for length in lengths])
    assert module.flops(online) - module.flops(part) == pytest.approx(target)
