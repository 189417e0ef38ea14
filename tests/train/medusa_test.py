"""`train medusa`: nothing is trained that is not saved, and the target is as it was."""

from __future__ import annotations

import pytest
import torch
from eagle_trainings import QUICK
from safetensors.torch import load_file

from draftsmith.modules.pretrained.heads import load_head
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.train import prepare
from draftsmith.train.command import run
from draftsmith.train.config import drafter_config
from draftsmith.train.module import LitHead


@pytest.mark.parametrize("lm_head", ["own", "target"])
def test_what_the_optimizer_holds_is_saved_and_the_target_stays_bit_equal(artifacts, tmp_path, monkeypatch, lm_head):
    """The published trainer moves the shared lm_head, and does not save it."""
    seen = {}
    make_head, optimizers = prepare.make_head, LitHead.configure_optimizers

    def watched_head(config, target, counts=None):
        seen["target"] = target
        seen["before"] = {name: weight.clone() for name, weight in target.model.state_dict().items()}
        return make_head(config, target, counts)

    def watched_optimizers(self):
        made = optimizers(self)
        seen["held"] = [weight for group in made.param_groups for weight in group["params"]]
        seen["named"] = {weight: name for name, weight in self.head.named_parameters()}
        return made

    monkeypatch.setattr(prepare, "make_head", watched_head)
    monkeypatch.setattr(LitHead, "configure_optimizers", watched_optimizers)
    own = {"num_heads": 2, "lm_head": lm_head, "tau_prompts": 2}
    quick = {name: value for name, value in QUICK.items() if name != "token_weight"}
    config = drafter_config("medusa")(
        data=artifacts.features, target=str(artifacts.target), output=tmp_path, **{**quick, **own}
    )
    run(config)
    after = seen["target"].model.state_dict()
    assert all(torch.equal(weight, after[name]) for name, weight in seen["before"].items())
    saved = load_file(tmp_path / "last" / "model.safetensors")
    names = {seen["named"][weight] for weight in seen["held"]}
    assert names == set(saved) and len(names) == 2 * (2 + (lm_head == "own"))
    for weight in seen["held"]:  # and what is saved is what was trained
        assert torch.equal(saved[seen["named"][weight]], weight)
    head = load_head(tmp_path / "best", load_lm(str(artifacts.target)), kind="medusa")
    assert head.config.own_lm_head == (lm_head == "own")
    if lm_head == "own":
        start = seen["before"]["lm_head.weight"]
        assert not any(torch.equal(layer.weight, start) for layer in head.lm_heads)
