"""Training of an acceptance head on labels of mixed text and of real rounds: inputs, start, loss, metrics, card."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.data.store.datasets import collate_rollouts, open_dataset
from draftsmith.modules.acceptance.head import AcceptanceHead, AcceptanceHeadConfig
from draftsmith.modules.drafters.eagle import EagleConfig, EagleHead
from draftsmith.modules.pretrained.heads import FrozenDrafter, drafter_identity, load_head, save_head
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.types import InputError
from draftsmith.train.acceptance import Reader, make_head
from draftsmith.train.command import run
from draftsmith.train.config import TrainAcceptanceConfig

# A learning rate and a number of steps at which a 32-wide head learns something.
QUICK = {"lr": 5e-3, "max_steps": 12, "batch_size": 8, "val_share": 0.25, "val_every": 6, "log_every": 3}
QUICK |= {"loggers": ("csv",)}


def config(artifacts, output: Path, **changes) -> TrainAcceptanceConfig:
    settings = {"data": artifacts.acceptance, "head": str(artifacts.draft), "output": output, **QUICK, **changes}
    return TrainAcceptanceConfig(**settings)


def rows_of(output: Path) -> list[dict[str, str]]:
    with (output / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def trained(artifacts, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("acceptance") / "run"
    run(config(artifacts, output))
    return output


def test_validation_logs_all_metrics_and_the_loss_falls(trained):
    reported = [row for row in rows_of(trained) if row.get("val/kl")]
    assert [row["step"] for row in reported] == ["6", "12"]
    for name in ("kl", "brier", "ece", "ece_platt", "auc", "auc_q", "loss"):
        assert math.isfinite(float(reported[-1][f"val/{name}"])), name
    losses = [float(row["train/loss"]) for row in rows_of(trained) if row.get("train/loss")]
    assert len(losses) == 4 and losses[-1] < losses[0]


def test_best_and_last_are_heads_with_a_card_and_a_manifest(trained, artifacts):
    draft = load_lm(str(artifacts.draft))
    for name in ("best", "last"):
        head = load_head(trained / name, draft, kind="acceptance")
        assert head.config.num_blocks == 3 and head.config.w_rej == 6.0
        manifest = json.loads((trained / name / "manifest.json").read_text())
        assert manifest["sampling"] == {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
        assert manifest["inputs"]["data"] == open_dataset(artifacts.acceptance).manifest.digest
        assert f"| auc | {manifest['metrics']['auc']:.4g} |" in (trained / name / "README.md").read_text()


def test_the_fitted_calibration_is_saved_with_the_head(trained, artifacts):
    head = load_head(trained / "best", load_lm(str(artifacts.draft)))
    scale, shift = head.config.calibration
    assert (scale, shift) != (1.0, 0.0)
    logit = torch.tensor([0.3])
    assert torch.allclose(head.calibrated(logit), scale * (logit + math.log(6)) + shift)


def test_separate_validation_labels_must_share_the_sampling(artifacts, tmp_path):
    from draftsmith.data.acceptance import AcceptanceConfig
    from draftsmith.data.acceptance import run as label

    labels = AcceptanceConfig(
        data=artifacts.responses,
        target=str(artifacts.target),
        head=str(artifacts.draft),
        output=tmp_path / "greedy",
        temperature=0.0,
    )
    with pytest.raises(InputError, match=r"val: found.*'temperature': 0.0.*labels made with.*'temperature': 1.0"):
        run(config(artifacts, tmp_path / "run", val=label(labels)))
    same = dataclasses.replace(config(artifacts, tmp_path / "run"), val=artifacts.acceptance)
    assert run(same) == tmp_path / "run" / "best"


def saved_head(directory: Path, width: int = 32, **settings) -> Path:
    """Save a head of another draft."""
    torch.manual_seed(3)
    head = AcceptanceHead(AcceptanceHeadConfig(width, **settings))
    for weight in head.parameters():
        weight.data.normal_(std=0.1)
    return save_head(directory, head, {"target": {"config": "other", "lm_head": "other"}}, "card")


def test_training_starts_from_a_given_head(artifacts, tmp_path):
    start = saved_head(tmp_path / "start", num_blocks=2, tied=True, w_rej=1.0, calibration=(2.0, 1.0))
    head = make_head(config(artifacts, tmp_path / "run", init=start), 32)
    assert all(torch.equal(head.state_dict()[n], w) for n, w in load_file(start / "model.safetensors").items())
    assert all(weight.requires_grad and weight.dtype == torch.float32 for weight in head.parameters())
    # Its blocks; the loss weights of this training; no calibration, which was fitted to other outputs.
    assert head.config == AcceptanceHeadConfig(32, num_blocks=2, tied=True, w_rej=6.0)

    run(config(artifacts, tmp_path / "run", init=start, lr=1e-6))
    trained = load_file(tmp_path / "run" / "last" / "model.safetensors")
    moved = [(trained[name] - weight).abs().max() for name, weight in load_file(start / "model.safetensors").items()]
    # 12 steps of AdamW move a weight by at most 12 lr, up to rounding of weights of about 0.1: it started there.
    assert all(0 < float(distance) < 2e-5 for distance in moved)


@pytest.mark.parametrize(
    ("settings", "changes", "found"),
    [
        ({}, {"num_blocks": 2}, "num_blocks 2 asked of .*expected num_blocks 3, as that head has"),
        ({"num_blocks": 1}, {"num_blocks": 3}, "num_blocks 3 asked of .*expected num_blocks 1"),  # the default, given
        ({}, {"tied": True}, "tied True asked of .*expected tied False"),
        ({"width": 16}, {}, "of width 16, expected width 32"),
    ],
)
def test_a_start_that_does_not_fit_is_one_error(artifacts, tmp_path, settings, changes, found):
    start = saved_head(tmp_path / "start", **settings)
    with pytest.raises(InputError, match=f"init: found .*{found}"):
        make_head(config(artifacts, tmp_path / "run", init=start, **changes), 32)


DEPTH = 4  # of the labels: conftest.py


def a_config(artifacts, eagle, rollouts, output: Path, **changes) -> TrainAcceptanceConfig:
    settings = {"head": str(eagle), "target": str(artifacts.target), "data": rollouts, "output": output, **QUICK}
    return TrainAcceptanceConfig(**{**settings, "max_steps": 8, "val_every": 8, **changes})


@pytest.fixture(scope="module")
def trained_on_rounds(artifacts, eagle, rollouts, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("trained") / "run"
    run(a_config(artifacts, eagle, rollouts, output))
    return output


def a_batch(rollouts: Path, rows=(0, 3, 5)):
    data = open_dataset(rollouts)
    return collate_rollouts([data[row] for row in rows])


def drafts_of(batch):
    """Yield the number of every draft and the text before it."""
    number = 0
    for text, starts in zip(batch.input_ids.split(batch.lengths), batch.starts, strict=True):
        for start in starts:
            yield number, text[:start].tolist()
            number += 1


@pytest.mark.parametrize("depth", [DEPTH, 1])
def test_states_equal_those_of_each_draft_read_alone(artifacts, rollouts, depth):
    draft, batch = load_lm(str(artifacts.draft)), a_batch(rollouts)
    names = ("draft_ids", "loss_mask", "accept_prob", "log_q")
    batch = dataclasses.replace(batch, **{name: getattr(batch, name)[:, :depth] for name in names})
    drafter = FrozenDrafter(draft, {})
    found = Reader(drafter, drafter.branches(depth)).read(batch)
    states = []
    for number, text in drafts_of(batch):
        hidden = draft.features(torch.tensor([[*text, *batch.draft_ids[number].tolist()]]))[0]
        states.append(hidden[len(text) :])
    owners = [row for row, starts in enumerate(batch.starts) for _ in starts]
    mask = batch.loss_mask
    assert torch.allclose(found.hidden, torch.stack(states)[mask], atol=1e-5)
    assert torch.equal(found.accept_prob, batch.accept_prob[mask])
    assert torch.equal(found.log_q, batch.log_q[mask])
    assert found.row.tolist() == [owners[at] for at in mask.nonzero()[:, 0].tolist()]
    assert not found.hidden.is_inference()


def test_an_eagle_heads_states_are_those_over_the_targets_features(artifacts, rollouts, eagle):
    target = load_lm(str(artifacts.target))
    head = load_head(eagle, target)
    batch = a_batch(rollouts, rows=(1, 2))
    drafter = FrozenDrafter(target, {}, head)
    found = Reader(drafter, drafter.branches(DEPTH)).states(batch)
    for number, text in drafts_of(batch):
        ids = torch.tensor([text])
        features, embeds = target.features(ids)[:, :-1], target.embed(ids[:, 1:])
        for place, token in enumerate(batch.draft_ids[number].tolist()):
            # The drafted token is read beside the head's own state before it.
            features = torch.cat([features, head.unroll(embeds, features, 1)[0][:, -1:]], 1)
            embeds = torch.cat([embeds, target.embed(torch.tensor([[token]]))], 1)
            assert torch.allclose(found[number, place], head.unroll(embeds, features, 1)[0][0, -1], atol=1e-5)


def test_config_and_card_name_the_heads_inputs_and_labels(artifacts, eagle, trained_on_rounds):
    best = trained_on_rounds / "best"
    written = json.loads((best / "config.json").read_text())
    target = load_lm(str(artifacts.target))
    identity = drafter_identity(eagle, target)
    assert (written["target"], written["drafter"], written["mode"]) == (identity, "eagle", "sampling")
    head = load_head(best, target, kind="acceptance", identity=identity)
    assert head.config.num_blocks == 3 and head.config.calibration != (1.0, 0.0)
    card = (best / "README.md").read_text()
    assert "ece_platt" in card and "--method specdec++:h=0.7:drafter=eagle" in card


def test_a_head_of_another_drafter_is_refused(artifacts, eagle, rollouts, tmp_path):
    settings = a_config(artifacts, eagle, rollouts, tmp_path / "run")
    with pytest.raises(InputError, match=r"made with another draft\.eagle"):
        chain = EagleHead(EagleConfig.for_target(load_lm(str(artifacts.target)).config))
        other = save_head(tmp_path / "other-eagle", chain, {}, "card")
        run(dataclasses.replace(settings, head=str(other)))
    with pytest.raises(InputError, match=r"^mix: found 0\.5"):
        run(dataclasses.replace(settings, mix=0.5))
    with pytest.raises(InputError, match=r"max_length: found 20.*label shorter responses"):
        run(dataclasses.replace(settings, max_length=20))
