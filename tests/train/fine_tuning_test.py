"""What a head starts from: random weights, the target's, or another head's."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from safetensors.torch import load_file
from trainings import a_module, a_part, config, validate
from worlds import tiny_llama_dir

from draftsmith.launch.export.export import run as export
from draftsmith.launch.export.export import write_package
from draftsmith.launch.export.settings import ExportConfig
from draftsmith.launch.training import run as train
from draftsmith.modules.drafters import head_class, learned
from draftsmith.modules.drafters.eagle import EagleHead
from draftsmith.modules.formats import formats
from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.pretrained.heads import load_head, save_head, stored_tensors
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.types import InputError
from draftsmith.train.command import run
from draftsmith.train.config import drafter_config
from draftsmith.train.prepare import make_head, prepare, with_shape


def test_initial_weights_depend_on_the_seed_alone(artifacts, tmp_path):
    target = load_lm(str(artifacts.target))

    def weight(seed: int) -> torch.Tensor:
        state = torch.random.get_rng_state()
        head: EagleHead = make_head(config(artifacts, tmp_path, seed=seed, init="random"), target)
        assert torch.equal(torch.random.get_rng_state(), state)
        torch.rand(3)
        return head.fc.weight

    assert torch.equal(weight(1), weight(1)) and not torch.equal(weight(1), weight(2))


def test_only_a_draft_model_needs_a_target_of_llama_layers(artifacts, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=300, eos_token_id=3)
    GPT2LMHeadModel(sizes).save_pretrained(tmp_path / "gpt2")
    path = str(tmp_path / "gpt2")
    target = load_lm(path)
    head = make_head(config(artifacts, tmp_path / "run", target=path), target)
    # As GPT-2 says them, and without an MLP's width.
    assert (head.config.llama.num_heads, head.config.llama.head_dim, head.config.llama.intermediate_size) == (2, 16, 96)
    options = {"data": artifacts.responses, "target": path, "output": tmp_path / "draft"}
    with pytest.raises(InputError, match=r"a plain Llama layer, .* gpt2.*expected layers of Llama, Mistral"):
        make_head(drafter_config("draft")(**options), target)


def test_fine_tuning_starts_at_the_heads_own_loss(artifacts, tmp_path, eagle_run):
    """Of a target that is not the recorded one, too: a head is fine-tuned for a changed model."""
    other = tmp_path / "head"
    shutil.copytree(eagle_run / "best", other)
    config_file = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config_file, "target": {"config": "another"}}))
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["sha256"]["config.json"] = hashlib.sha256((other / "config.json").read_bytes()).hexdigest()
    (other / "manifest.json").write_text(json.dumps(manifest))
    module, data = prepare(config(artifacts, tmp_path / "run", init=str(other)))
    part = a_part(artifacts, data.val.indices)
    loaded = a_module(artifacts, tmp_path)
    loaded.head = load_head(eagle_run / "best")
    fresh = a_module(artifacts, tmp_path)
    found, wanted = validate(module, [part]), validate(loaded, [part])
    assert {name: found[name] for name in wanted} == wanted and found["loss"] < validate(fresh, [part])["loss"]
    assert all(p.requires_grad for p in module.head.parameters())


def test_a_fine_tuned_head_goes_on_only_from_the_same_start(artifacts, tmp_path, eagle_run):
    start = shutil.copytree(eagle_run / "best", tmp_path / "start")
    settings = config(artifacts, tmp_path / "run", init=str(start), max_steps=2, tau_prompts=0)
    run(settings)
    before, after = load_file(start / "model.safetensors"), load_file(tmp_path / "run" / "last" / "model.safetensors")
    assert any(not torch.equal(before[name], after[name]) for name in before)
    sha256 = hashlib.sha256((start / "model.safetensors").read_bytes()).hexdigest()
    assert json.loads((tmp_path / "run" / "last" / "manifest.json").read_text())["inputs"]["init"] == sha256
    (tmp_path / "run" / "training.json").unlink()  # as if it had been interrupted
    shutil.rmtree(start)
    save_head(start, a_module(artifacts, tmp_path).head, {}, "card")  # another head of the same shape at the same path
    with pytest.raises(InputError, match=r"another inputs\.init"):
        run(settings)


def test_another_systems_head_goes_on_and_is_written_as_it_came(artifacts, tmp_path, eagle_run):
    """If training makes the head worse, best/ is the head at step 0."""
    head, theirs, output = load_head(eagle_run / "best"), tmp_path / "theirs", tmp_path / "run"
    package = formats()["vllm", "eagle"].write(head.config, stored_tensors(head), torch.float32)
    theirs.mkdir()
    write_package(theirs, package)
    settings = config(artifacts, output, init=str(theirs), max_steps=2, lr=3.0, tau_prompts=0)
    best = train(settings)
    assert json.loads((best / "manifest.json").read_text())["step"] == 0.0
    before, after = (load_file(path / "model.safetensors") for path in (best, output / "last"))
    assert all(torch.equal(before[name], weight) for name, weight in stored_tensors(head).items())
    assert not torch.equal(before["fc.weight"], after["fc.weight"])
    assert train(settings) == best

    for kept, tensors in ((best, before), (output / "last", after)):
        back = tmp_path / kept.name
        assert export(ExportConfig(output=back, head=kept, target=str(artifacts.target))) == 0
        assert json.loads((back / "config.json").read_text()) == package.config
        written = load_file(back / "model.safetensors")
        assert written.keys() == package.tensors.keys()
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in written.items())
    package.tensors["fc.weight"].add_(1.0)
    write_package(theirs, package)
    with pytest.raises(InputError, match=r"init: found .*theirs, expected the head that .*run was begun with"):
        train(settings)
    with pytest.raises(InputError, match=r"format: found none, and .* has no files to be written as they came"):
        export(ExportConfig(output=tmp_path / "none", head=eagle_run / "best", target=str(artifacts.target)))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_layers": 2}, r"num_layers: found 2, expected 1, as the head of --init has"),
        ({"init": "target-first-layer"}, "init: found target-first-layer"),
        ({"target": "NARROW"}, "init: found .* of width 32, expected width 16"),
    ],
)
def test_a_start_that_does_not_fit_is_refused(artifacts, tmp_path, eagle_run, changes, expected):
    settings = config(artifacts, tmp_path / "run", **{"init": str(eagle_run / "best"), **changes})
    if settings.target == "NARROW":
        settings = dataclasses.replace(settings, target=str(tiny_llama_dir(tmp_path / "narrow", hidden=16)))
    with pytest.raises(InputError, match=expected):
        make_head(settings, load_lm(settings.target))


# An option of a drafter -> a value that no new head has by default, if its type does not name one.
OTHER = {"layers": (0, 1, 3), "mask_token": 5, "rope_theta": 5e5, "draft_vocab": 100, "num_layers": 3, "num_heads": 2}
OTHER |= {"block": 4, "markov_rank": 16, "window": 9}
OTHER |= {"conv_kernel": 3, "conv_group": 8, "selector_rank": 5, "selector_top_k": 4}


def other_value(settings: type, name: str, default: Any) -> Any:
    """Return another value of an option."""
    kinds = get_type_hints(settings)[name]
    choices = [value for kind in (kinds, *get_args(kinds)) if get_origin(kind) is Literal for value in get_args(kind)]
    if name in OTHER or not choices:
        return OTHER.get(name, default)
    return next(value for value in reversed(choices) if value != default)


# An MTP module has the shape that its target gives it.
@pytest.mark.parametrize("kind", sorted(set(learned()) - {"draft", "mtp"}))
def test_no_option_that_shapes_a_head_has_another_value_beside_a_start(kind, tmp_path):
    """Options that shape it are those that give a new head another config; its manifest has its own values of them."""
    scaling = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    path = str(tiny_llama_dir(tmp_path / "target", layers=8, rope_parameters=scaling))
    head_type, shape, target = head_class(kind), Checkpoint(path).shape, load_lm(path)

    def training(**changes):
        return drafter_config(kind)(data=tmp_path, output=tmp_path, target=path, **changes)

    plain = head_type.new_config(training(), shape)
    for field in dataclasses.fields(head_type.Settings):
        other = {field.name: other_value(head_type.Settings, field.name, field.default)}
        if (kind, field.name) == ("dflash2", "markov_rank"):
            with pytest.raises(InputError, match="markov_rank: found 16, expected 0: a selector takes its place"):
                head_type.new_config(training(**other), shape)
            continue
        if other[field.name] == field.default or head_type.new_config(training(**other), shape) == plain:
            continue
        made = make_head(training(**other), target, lambda: torch.arange(target.info.vocab_size))
        start = str(save_head(tmp_path / field.name, made, {"tied_to_target": list(made.tied_to_target)}, "card"))
        # With the head's own value, and with none.
        for given in (other, {}):
            settled = with_shape(training(init=start, **given), Checkpoint(training(init=start, **given).target).shape)
            assert getattr(settled, field.name) == other[field.name]
            assert make_head(settled, target).config == made.config
        new = getattr(with_shape(training(), Checkpoint(training().target).shape), field.name)
        if field.name == "window":
            # A head may be trained on with another one: no weight depends on it.
            assert make_head(training(init=start, window=0), target).config.llama.sliding_window is None
            continue
        with pytest.raises(InputError, match=f"{field.name}: found .*, as the head of --init has"):
            make_head(training(init=start, **{field.name: new}), target)


def test_blocks_of_one_token_do_not_vary(artifacts, tmp_path):
    settings = {"data": artifacts.responses, "target": str(artifacts.target), "output": tmp_path / "run"}
    target = load_lm(str(artifacts.target))
    head = make_head(drafter_config("dspark")(block=1, layers=(0, 1), **settings), target)
    start = str(save_head(tmp_path / "head", head, {}, "card"))
    with pytest.raises(InputError, match="block: found 1, expected a whole number, 2 or more"):
        run(drafter_config("dspark")(init=start, vary_block=True, loggers=("csv",), **settings))


def test_a_head_with_plain_positions_leaves_the_targets_scaling_out(artifacts, tmp_path):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 64, "rope_theta": 5e5}
    path = str(tiny_llama_dir(tmp_path / "scaled", rope_parameters=scaling))
    heads = [make_head(config(artifacts, tmp_path, target=path, rope=r), load_lm(path)) for r in ("target", "plain")]
    assert [head.config.llama.rope_scaling.kind for head in heads] == ["llama3", "default"]
    saved = save_head(tmp_path / "head", heads[0], {}, "card")
    with pytest.raises(InputError, match="rope: found plain, expected target"):
        make_head(config(artifacts, tmp_path, target=path, rope="plain", init=str(saved)), load_lm(path))
