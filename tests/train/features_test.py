"""Features of the target in a training, computed in the step or stored: the head learns the same."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from devices import DEVICES
from eagle_trainings import a_module, config, texts
from trained_runs import losses, micro_batch, step_loss
from transformers import AutoModelForCausalLM

from draftsmith.data import prompts
from draftsmith.data.features import text_dataset
from draftsmith.data.store import feature_codec
from draftsmith.data.store.datasets import collate_features, open_dataset, pack_features
from draftsmith.data.store.manifest import Manifest
from draftsmith.data.store.rows import Rows
from draftsmith.modules.drafters.eagle import EagleConfig, EagleHead
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.types import FeatureBatch, InputError
from draftsmith.train.command import run
from draftsmith.train.config import TrainDrafterConfig
from draftsmith.train.data import MicroBatch, Samples
from draftsmith.train.features import FeatureSource, feature_std
from draftsmith.train.module import LitDrafter


def in_step(artifacts, output: Path, **changes) -> TrainDrafterConfig:
    return config(artifacts, output, **{"data": artifacts.responses, "log_every": 1, **changes})


def part_of(batch: FeatureBatch) -> MicroBatch:
    return micro_batch(batch, EagleHead.loss_count(batch, None))


def test_supervised_prompts_are_texts_with_masks_of_their_own(artifacts, tmp_path):
    source = tmp_path / "rows.jsonl"
    source.write_text('{"prompt": "def add(first, second):", "answer": "return first + second"}\n' * 3)
    made = prompts.PromptsConfig(str(source), str(artifacts.target), tmp_path / "prompts", supervised=True)
    directory = prompts.run(made)
    data = text_dataset(directory, str(artifacts.target), {})
    expected = Rows(directory, Manifest.read(directory)).read(0, 3)
    for name in ("loss_mask", "input_ids"):
        assert [data[i][name].tolist() for i in range(len(data))] == [row[name] for row in expected]


def test_features_are_transformers_states_packed_or_padded(artifacts, tmp_path):
    """Without gradient, and in float32 under autocast too."""
    oracle = AutoModelForCausalLM.from_pretrained(artifacts.target, dtype=torch.float32).eval()
    data, module, rows = texts(artifacts), a_module(artifacts, tmp_path, noise=0.0), (0, 5, 6)
    padded, flat = (collate([data[i] for i in rows]) for collate in (collate_features, pack_features))
    with torch.autocast("cpu", torch.bfloat16):
        features, packed = (module.read(part_of(batch))[0].features for batch in (padded, flat))
    assert features.dtype == torch.float32 and not features.requires_grad
    assert packed.shape[:2] == flat.input_ids.shape == (1, sum(flat.lengths))
    for row, i in enumerate(rows):
        with torch.no_grad():
            expected = oracle.model(data[i]["input_ids"][None]).last_hidden_state[0]
        # float32 sums in another order, through two layers with states of about 1.
        torch.testing.assert_close(features[row, : len(expected)], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(packed[0], features[padded.attention_mask], rtol=1e-5, atol=1e-5)


def test_the_loss_is_exactly_that_of_a_batch_that_brings_the_same_features(artifacts, tmp_path):
    data, module = texts(artifacts), a_module(artifacts, tmp_path, noise=0.0)
    batch = collate_features([data[i] for i in range(4)])
    brought = dataclasses.replace(batch, features=module.target.features(batch.input_ids))
    online, stored = (step_loss(module, part_of(b)) for b in (batch, brought))
    assert online.loss == stored.loss and online.sums == stored.sums
    online.loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.head.parameters())


def test_training_online_is_training_on_a_features_artifact_but_for_its_rounding(artifacts, tmp_path):
    run(in_step(artifacts, tmp_path / "online"))
    run(in_step(artifacts, tmp_path / "stored", data=artifacts.features))
    # bf16 keeps 8 bits of the features' mantissas: losses differ by far less than 2^-8 of theirs, as rounding averages.
    assert losses(tmp_path / "online") == pytest.approx(losses(tmp_path / "stored"), rel=4e-3)
    assert losses(tmp_path / "online") != losses(tmp_path / "stored")
    for name in ("val/loss", "val/top1", "val/tau"):
        # top1 and tau are counts over few tokens: a near tie that falls the other way is one of them.
        online, stored = losses(tmp_path / "online", name), losses(tmp_path / "stored", name)
        assert len(online) == len(stored) and online == pytest.approx(stored, rel=0.05), name


def test_the_noise_unit_is_that_of_the_stored_features(artifacts, tmp_path):
    target = load_lm(str(artifacts.target))
    samples = Samples(texts(artifacts), range(6))
    stored = feature_std(Samples(open_dataset(artifacts.features), range(6)), FeatureSource(target))
    assert feature_std(samples, FeatureSource(target)) == pytest.approx(stored, rel=1e-3)  # bf16


def test_data_that_no_head_can_be_trained_on_is_named(artifacts, tmp_path):
    def refused(words: str, **changes) -> None:
        with pytest.raises(InputError, match=words):
            run(in_step(artifacts, tmp_path / "run", **changes))

    refused(r"made with another target\.config", target=str(artifacts.draft))
    refused("expected kind responses or prompts or features", data=artifacts.acceptance)
    refused("expected responses to compute them of", data=artifacts.features, features="vllm")
    refused("data: found prompts without answers", data=artifacts.responses.parent / "prompts")


def test_the_universal_engine_trains_the_same_head(artifacts, tmp_path):
    short = {"max_steps": 4, "val_every": 4}
    run(in_step(artifacts, tmp_path / "lean", **short))
    run(in_step(artifacts, tmp_path / "hf", engine="hf", **short))
    for name in ("train/loss", "val/loss", "val/tau"):
        # Two implementations of one float32 forward.
        assert losses(tmp_path / "hf", name) == pytest.approx(losses(tmp_path / "lean", name), rel=1e-4), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("collate", [collate_features, pack_features])
def test_fp8_travels_as_it_is_stored_and_is_decoded_on_the_device(artifacts, collate, device):
    """What the loss sees is, to the bit, what decoding each row on the host gives."""
    target, data = load_lm(str(artifacts.target)), texts(artifacts)
    items = [data[row] for row in range(4)]
    stored = [feature_codec.encode(target.features(item["input_ids"][None])[0], "fp8") for item in items]
    shipped = collate([item | feature_codec.as_item(kept) for item, kept in zip(items, stored, strict=True)])
    assert shipped.features.dtype == torch.float8_e4m3fn and shipped.scale.shape == shipped.input_ids.shape
    module = LitDrafter(EagleHead(EagleConfig.for_target(target.config)), target)
    read, states = module.read(micro_batch(shipped, 1).to(torch.device(device)))
    assert states is None
    decoded = [{"features": feature_codec.decode(kept)} for kept in stored]
    wanted = collate([item | kept for item, kept in zip(items, decoded, strict=True)])
    assert read.scale is None and read.features.dtype == torch.bfloat16
    assert read.features.cpu().view(torch.int16).equal(wanted.features.view(torch.int16))
