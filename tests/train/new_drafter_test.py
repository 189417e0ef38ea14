"""A trained drafter is one file: docs/examples/drafters/bigram.py, from training to decoding and acceptance heads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from trainings import losses

from draftsmith.data import acceptance as labels
from draftsmith.data import features
from draftsmith.data.features import text_dataset
from draftsmith.data.store.datasets import collate_features, open_dataset
from draftsmith.data.store.manifest import Manifest
from draftsmith.modules import drafters
from draftsmith.modules.decoding.loop import generate_one
from draftsmith.modules.drafters.method import Models
from draftsmith.modules.drafters.method_names import known_methods, parse_method
from draftsmith.modules.drafters.plug_ins import add_folder
from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.pretrained.heads import drafter_identity, kind_at, load_draft_head, load_head
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.types import InputError, SamplingParams
from draftsmith.train.acceptance import TrainAcceptanceConfig
from draftsmith.train.command import run
from draftsmith.train.config import drafter_config
from draftsmith.train.fit import fit
from draftsmith.train.module import FeatureSource
from draftsmith.train.prepare import make_head, prepare

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "examples" / "drafters"
QUICK = {"max_steps": 12, "batch_size": 8, "val_share": 0.25, "log_every": 3, "loggers": ("csv",), "tau_prompts": 1}


@pytest.fixture(scope="module", autouse=True)
def another_drafter():
    """Register the drafters of the examples, for this module."""
    before = dict(known_methods())
    add_folder(str(FOLDER))
    yield
    drafters.__path__.remove(str(FOLDER))
    del drafters.HEADS["bigram"]
    for name in known_methods().keys() - before:
        del known_methods()[name]


@pytest.fixture(scope="module")
def trained(artifacts, tmp_path_factory) -> Path:
    settings = {"data": artifacts.responses, "target": str(artifacts.target), **QUICK}
    settings |= {"output": tmp_path_factory.mktemp("bigram") / "run"}
    return run(drafter_config("bigram")(**settings))


def test_the_registry_has_it_and_its_settings_are_flags(tmp_path):
    assert drafters.learned()["bigram"].startswith("Bigram head: a trained head in one file")
    config = drafter_config("bigram")(data=tmp_path, output=tmp_path, target="t")
    assert (config.scale, config.lr, config.epochs, config.kind) == (1.0, 1e-2, 3, "bigram")
    with pytest.raises(InputError, match="scale: found 0"):
        drafter_config("bigram")(data=tmp_path, output=tmp_path, target="t", scale=0)


def test_it_is_trained_loaded_and_lossless(artifacts, trained):
    found = losses(trained.parent)
    assert len(found) == 4 and found[-1] < found[0] and losses(trained.parent, "val/tau")[-1] >= 1
    assert json.loads((trained / "config.json").read_text())["kind"] == "bigram"
    target = load_lm(str(artifacts.target))
    head = load_draft_head(trained, target)
    assert type(head).__name__ == "BigramHead" and not head.training
    models, prompt = Models(target, heads={"bigram": head}, capacity=64), [5, 6, 7, 8]
    drafter = parse_method("bigram:k=3").build(models)
    plain, drafted = (
        generate_one(target, used, prompt, SamplingParams(), 24, TorchSource(0), ()) for used in (None, drafter)
    )
    assert plain.tokens == drafted.tokens and drafted.trace.num_draft_tokens > 0


def test_a_head_is_fine_tuned(artifacts, tmp_path, trained):
    target = load_lm(str(artifacts.target))
    settings = {"data": artifacts.responses, "target": str(artifacts.target), "output": tmp_path, **QUICK}
    tuned = make_head(drafter_config("bigram")(init=str(trained), **settings), target)
    assert torch.equal(tuned.mix.weight, load_head(trained).mix.weight) and tuned.mix.weight.requires_grad
    with pytest.raises(InputError, match="a bigram head, expected an eagle head"):
        make_head(drafter_config("eagle")(init=str(trained), **settings), target)


def test_its_drafts_are_labeled_and_an_acceptance_head_learns_from_its_states(artifacts, tmp_path, trained):
    models = {"head": str(trained), "target": str(artifacts.target), "num_threads": 1}
    asked = {"temperature": 0.0, "depth": 3, "limit": 16}
    made = labels.run(labels.AcceptanceConfig(data=artifacts.responses, output=tmp_path / "labels", **models, **asked))
    identity = drafter_identity(trained, load_lm(str(artifacts.target)))
    assert set(identity) > {"bigram"} and Manifest.read(made).identity["draft"] == identity
    quick = {"max_steps": 3, "batch_size": 4, "val_share": 0.25, "loggers": ("csv",)}
    best = fit(*prepare(TrainAcceptanceConfig(data=made, output=tmp_path / "run", **models, **quick)))
    written = json.loads((best / "config.json").read_text())
    assert (written["drafter"], written["target"]) == ("bigram", identity)


class Captured:
    """A target whose layers' states are its final ones, once and twice."""

    def __init__(self, lm):
        self._lm = lm

    def __getattr__(self, name):
        return getattr(self._lm, name)

    def features(self, input_ids, position_ids=None, aux_layers=()):
        states = self._lm.features(input_ids)
        return torch.cat([states * (layer + 1) for layer in aux_layers], -1) if aux_layers else states


def test_residual_states_of_layers_are_read_where_a_drafter_asks_for_them(artifacts, tmp_path, monkeypatch):
    bigram = drafters.head_class("bigram")
    monkeypatch.setattr(bigram, "loss_layers", classmethod(lambda cls, config, num_layers: (0, num_layers - 1)))
    settings = {"target": str(artifacts.target), "output": tmp_path / "run", **QUICK}
    with pytest.raises(InputError, match="features of layers final-norm, expected those of 0,1"):
        prepare(drafter_config("bigram")(data=artifacts.features, **settings))
    monkeypatch.setattr(features, "load_lm", lambda *args, **kwargs: Captured(load_lm(*args, **kwargs)))
    asked = {"data": artifacts.responses, "target": str(artifacts.target), "num_threads": 1}
    made = features.run(features.FeaturesConfig(output=tmp_path / "features", drafter="bigram", **asked))
    assert Manifest.read(made).identity["target"]["layers"] == "0,1"
    stored, plain = open_dataset(made)[3]["features"], open_dataset(artifacts.features)[3]["features"]
    assert torch.equal(stored, torch.cat([plain, 2 * plain], -1))
    target = Captured(load_lm(str(artifacts.target)))
    batch = collate_features([text_dataset(artifacts.responses, Checkpoint(artifacts.target))[3]])
    online = FeatureSource(target, (0, 1)).compute(batch.input_ids, [])[0]
    torch.testing.assert_close(online, stored.float(), rtol=2**-8, atol=1e-3)  # bf16


GOOD = "class Mine(DraftHead):\n    kind = 'mine'\n    Config = Settings = int\n"
HEAD = f"from draftsmith.modules.drafters.base import DraftHead\n{GOOD}"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"{HEAD}HEADS = Mine", "a tuple of classes"),
        ("HEADS = ('mine',)", "derives from DraftHead"),
        (f"{HEAD.replace('    kind', '    sort')}HEADS = (Mine,)", "Mine without kind"),
        (f"{HEAD.replace('mine', 'my:ne')}HEADS = (Mine,)", "a kind of letters"),
        (f"{HEAD}    drafts = ('chains',)\nHEADS = (Mine,)", "some of .'chain'"),
        (f"{HEAD}    drafts = 'chain'\nHEADS = (Mine,)", "some of .'chain'"),
        ("METHODS = [1]", "methods by their names"),
        ("METHODS = {'mine': int}", "Write .mine.: MyMethod"),
        ("from draftsmith.modules.drafters.methods import METHODS as OWN\nMETHODS = {'st:re': OWN['ar']}", "a name of"),
    ],
)
def test_a_folder_that_lists_something_else_is_refused_by_its_file(tmp_path, drafters_registry, text, found):
    name = f"plug_{abs(hash(text))}"  # Python imports a name once
    (tmp_path / f"{name}.py").write_text(text)
    with pytest.raises(InputError, match=f"^(HEADS|METHODS) of .*{name}.*{found}"):
        add_folder(str(tmp_path))


def test_a_head_whose_folder_is_not_registered_is_said_to_be_one(trained, monkeypatch):
    monkeypatch.delitem(drafters.HEADS, "bigram")
    with pytest.raises(InputError, match=r"^kind: found bigram, .*DRAFTSMITH_DRAFTERS"):
        kind_at(trained)
