"""`train eagle3` from supervised prompts of the embedded target to decoding: stored and online features, a reduced
vocabulary, fine-tuning."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from draftsmith.data import features, prompts
from draftsmith.data.store.datasets import open_dataset
from draftsmith.data.store.manifest import Manifest
from draftsmith.data.store.rows import Rows
from draftsmith.modules.decoding.loop import generate_one
from draftsmith.modules.decoding.stop import FixedLengthStop
from draftsmith.modules.drafters.eagle3 import Eagle3Head
from draftsmith.modules.drafters.net import ChainDrafter
from draftsmith.modules.pretrained.heads import load_head, save_head
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.types import SamplingParams
from draftsmith.train.command import run
from draftsmith.train.config import drafter_config
from draftsmith.train.prepare import make_head

TARGET = "embedded:target"
QUICK = {"max_steps": 3, "batch_size": 4, "val_share": 0.25, "val_every": 3, "log_every": 1, "loggers": ("csv",),
         "ttt_steps": 3, "tau_prompts": 1, "tau_max_new_tokens": 8}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> SimpleNamespace:
    root: Path = tmp_path_factory.mktemp("eagle3")
    texts = prompts.run(
        prompts.PromptsConfig(
            "embedded:prompts", TARGET, root / "texts", columns="prompt=prompt,answer=answer", split="train",
            task="sort_imports", limit=12, supervised=True,
        )
    )  # fmt: skip
    stored = features.run(features.FeaturesConfig(texts, TARGET, root / "features", drafter="eagle3", num_threads=1))
    return SimpleNamespace(root=root, texts=texts, features=stored)


def trained(made, name: str, **changes) -> Path:
    settings = {"data": made.features, "target": TARGET, "output": made.root / name, **QUICK, **changes}
    return run(drafter_config("eagle3")(**settings))


def test_features_are_the_three_states_and_the_final_one(made):
    target, manifest = load_lm(TARGET), Manifest.read(made.features)
    assert manifest.identity["target"]["layers"] == "2,6,9,12"
    row = open_dataset(made.features)[0]
    wanted = target.features(row["input_ids"][None], aux_layers=(2, 6, 9, 12))[0]
    assert row["features"].shape == wanted.shape == (len(row["input_ids"]), 4 * 128)
    assert torch.equal(row["features"], wanted.bfloat16())
    final = target.features(row["input_ids"][None])[0]
    assert torch.equal(wanted[:, -128:], final)


def test_a_head_with_a_reduced_vocabulary_is_trained_saved_and_lossless(made):
    best = trained(made, "reduced", draft_vocab=64)
    head = load_head(best)
    assert isinstance(head, Eagle3Head) and head.config.draft_vocab_size == 64
    target = load_lm(TARGET)
    rows = Rows(made.texts, Manifest.read(made.texts))
    counts = torch.zeros(2048, dtype=torch.int64)
    data = open_dataset(made.features)
    for row in range(len(data)):
        item = data[row]
        counts += torch.bincount(item["input_ids"][item["loss_mask"]], minlength=2048)
    # All but the end tokens that are always there occur in the answers.
    assert counts[head.d2t].gt(0).float().mean() > 0.9
    assert set(target.info.eos_ids) <= set(head.d2t.tolist())
    assert torch.equal(head.lm_head.weight, target.model.lm_head.weight[head.d2t])  # frozen: the target's own rows
    prompt = next(iter(rows.read(0, 1)))["input_ids"][:20]
    drafter = ChainDrafter(head.net(target), [FixedLengthStop(3)], 64)
    source = TorchSource(0)
    plain, drafted = (
        generate_one(target, used, prompt, SamplingParams(), 24, source).tokens for used in (None, drafter)
    )
    assert plain == drafted


def test_the_target_in_the_training_gives_what_stored_features_give(made):
    online, stored = (
        load_head(trained(made, name, data=data, tau_prompts=0))
        for name, data in (("online", made.texts), ("stored", made.features))
    )
    pairs = zip(online.named_parameters(), stored.named_parameters(), strict=True)
    assert all((a - b).abs().max() < 0.02 for (_, a), (_, b) in pairs)  # stored ones are rounded to bf16


def test_a_head_is_fine_tuned_with_its_own_layers_and_vocabulary(made):
    first = trained(made, "first", draft_vocab=64, layers=(1, 4, 7), data=made.texts, tau_prompts=0)
    second = trained(made, "again", init=str(first), data=made.texts, tau_prompts=0, train_lm_head=True)
    before, again = load_head(first), load_head(second)
    assert again.config == before.config and again.config.aux_layers == (1, 4, 7)
    assert torch.equal(again.d2t, before.d2t)
    assert not torch.equal(again.lm_head.weight, before.lm_head.weight)
    # For another target its frozen rows are that one's; trained ones, and those of which nothing is known, stay.
    published = save_head(made.root / "published", before, {}, "card")
    other = load_lm(TARGET)
    other.model.lm_head.weight.data.mul_(1.25)
    for start, kept in ((first, None), (second, again), (published, before)):
        for train in (False, True):
            settings = {"data": made.texts, "target": TARGET, "output": made.root / "on", "init": str(start)}
            head = make_head(drafter_config("eagle3")(**settings, train_lm_head=train), other)
            rows = other.model.lm_head.weight[before.d2t] if kept is None else kept.lm_head.weight
            assert torch.equal(head.lm_head.weight, rows) and torch.equal(head.d2t, before.d2t)
            assert head.tied_to_target == (("lm_head.weight",) if kept is None and not train else ())
