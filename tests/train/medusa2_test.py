"""`train medusa2`: another target, a stated distance from the original, and heads that are its."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tiny_models import tiny_llama_dir

from draftsmith.data.heads.directory import load_head
from draftsmith.data.models.loading import load_lm
from draftsmith.data.store.datasets import ResponsesDataset
from draftsmith.modules.decoding.loop import generate_one
from draftsmith.modules.drafters.medusa import MedusaHead
from draftsmith.modules.drafters.methods import Models, parse_method
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.types import InputError, SamplingParams
from draftsmith.train.data_module import held_out
from draftsmith.train.medusa2 import HEADS, TARGET, Joint, Medusa2Config, batches, compared, run

QUICK = {"num_heads": 2, "lm_head": "own", "max_steps": 8, "batch_size": 8, "val_share": 0.25, "lora_rank": 4,
         "lora_lr": 5e-3, "heads_first": 0.25}  # fmt: skip


def config(artefacts, output: Path, **changes) -> Medusa2Config:
    where = {"data": artefacts.responses, "target": str(artefacts.target), "output": output}
    return Medusa2Config(**{**where, **QUICK, **changes})


@pytest.fixture(scope="module")
def made(artefacts, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("medusa2") / "run"
    run(config(artefacts, output))
    return output


def test_the_divergence_is_its_formula_with_a_gradient_to_the_student_alone(monkeypatch):
    monkeypatch.setattr("draftsmith.train.medusa2.CHUNK_ELEMENTS", 3 * 7)
    rng = torch.Generator().manual_seed(0)
    lm_head = torch.randn(7, 4, generator=rng)
    one, two = (torch.randn(8, 4, generator=rng, requires_grad=True) for _ in range(2))
    kl, tv, same = compared(one.detach(), two, lambda states: states @ lm_head.T)
    p, q = ((x.double() @ lm_head.double().T).softmax(-1) for x in (one.detach(), two))
    wanted = (p * (p.log() - q.log())).sum()
    assert float(kl.detach()) == pytest.approx(float(wanted.detach()), rel=1e-5)
    assert float(tv) == pytest.approx(float((p - q).abs().sum().detach() / 2), rel=1e-5)
    assert int(same) == int((p.argmax(-1) == q.argmax(-1)).sum())
    (ours,), (theirs,) = torch.autograd.grad(kl, [two]), torch.autograd.grad(wanted, [two])
    assert torch.allclose(ours, theirs, atol=1e-5)


def test_what_is_saved_is_another_target_and_the_original_is_as_it_was(artefacts, made):
    ours, theirs = (load_file(path / "model.safetensors") for path in (made / TARGET, artefacts.target))
    assert ours.keys() == theirs.keys()
    changed = {name for name in ours if not torch.equal(ours[name], theirs[name])}
    assert changed == {name for name in ours if name.endswith("_proj.weight")}  # and no norm, embedding or lm_head
    assert "It is another model" in (made / TARGET / "README.md").read_text()
    load_head(made / HEADS, load_lm(str(made / TARGET)), kind="medusa")
    with pytest.raises(InputError, match="another model"):
        load_head(made / HEADS, load_lm(str(artefacts.target)), kind="medusa")


def test_its_distance_is_what_transformers_computes_of_the_two_on_held_out_answers(artefacts, made):
    manifest = json.loads((made / HEADS / "manifest.json").read_text())
    told = manifest["medusa2"]["distance"]
    models = [transformers.AutoModelForCausalLM.from_pretrained(p) for p in (artefacts.target, made / TARGET)]
    data = ResponsesDataset(artefacts.responses, str(artefacts.target), load_lm(str(artefacts.target)).info.identity)
    sums = torch.zeros(4, dtype=torch.float64)
    for row in held_out(len(data), QUICK["val_share"])[1]:
        item = data.item(int(row), 0)
        with torch.no_grad():
            p, q = (m(item["input_ids"][None]).logits[0, :-1].double().softmax(-1) for m in models)
        p, q = (law[item["loss_mask"][1:]] for law in (p, q))
        kl, tv = (p * (p.log() - q.log())).sum(), (p - q).abs().sum() / 2
        sums += torch.stack([kl, tv, (p.argmax(-1) == q.argmax(-1)).sum(), torch.tensor(len(p))])
    kl, tv, same, tokens = sums.tolist()
    assert told["tokens"] == tokens > 0 and told["kl"] > 1e-4
    wanted = {"kl": kl / tokens, "tv": tv / tokens, "top1": same / tokens}
    assert {name: told[name] for name in wanted} == pytest.approx(wanted, rel=1e-3)  # float32 models, merged weights
    assert manifest["medusa2"]["original"]["target"] == load_lm(str(artefacts.target)).info.identity
    assert manifest["target"] != manifest["medusa2"]["original"]["target"]


def test_its_heads_decode_it_greedily_as_it_decodes_alone(made):
    target = load_lm(str(made / TARGET))
    models = Models(target, heads={"medusa": load_head(made / HEADS, target)}, capacity=80)
    alone, drafted = (
        generate_one(target, drafter, [5, 6, 7, 8], SamplingParams(), 24, TorchSource(0), ())
        for drafter in (None, parse_method("medusa-chain:k=2").build(models))
    )
    assert alone.tokens == drafted.tokens


def test_while_the_heads_learn_alone_the_target_is_the_original(artefacts, tmp_path):
    run(config(artefacts, tmp_path / "run", heads_first=1.0, max_steps=3))
    ours, theirs = (load_file(path / "model.safetensors") for path in (tmp_path / "run" / TARGET, artefacts.target))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    distance = json.loads((tmp_path / "run" / HEADS / "manifest.json").read_text())["medusa2"]["distance"]
    assert distance["kl"] < 1e-6 and distance["top1"] == 1.0
    heads = load_file(tmp_path / "run" / HEADS / "model.safetensors")
    assert not torch.equal(heads["lm_heads.0.weight"], theirs["lm_head.weight"])  # they did learn


def test_the_loss_reaches_heads_and_adapters_by_the_weight_of_the_heads(artefacts, tmp_path):
    """d (KL + w heads): an adapter's gradient is that of both."""
    settings = config(artefacts, tmp_path)
    joint = Joint(settings)
    data = ResponsesDataset(artefacts.responses, str(artefacts.target), joint.target.info.identity)
    batch = next(batches([data.item(number, 0) for number in range(4)], range(4), 4))
    for name, weight in joint.adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    adapters = [weight for weight in joint.adapted.parameters() if weight.requires_grad]
    assert adapters
    divergence, heads = joint.loss(batch, settings, alone=False)
    grads = [torch.autograd.grad(loss, adapters, retain_graph=True) for loss in (divergence, heads)]
    assert all(any(bool(g.any()) for g in grad) for grad in grads) and divergence.item() > 0
    _, heads = joint.loss(batch, settings, alone=True)
    assert all(g is None for g in torch.autograd.grad(heads, adapters, allow_unused=True))
    assert isinstance(joint.head, MedusaHead)


def test_without_peft_it_says_what_to_install(artefacts, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(InputError, match="draftsmith\\[lora\\]"):
        run(config(artefacts, tmp_path / "run"))


def test_data_of_another_target_is_refused(artefacts, tmp_path):
    other = tiny_llama_dir(tmp_path / "other", seed=5)
    with pytest.raises(InputError, match="target"):
        run(config(artefacts, tmp_path / "run", target=str(other)))
