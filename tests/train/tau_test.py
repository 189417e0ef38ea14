"""tau while training: along the target's answers it is decoding's tau, for every kind of head and source of states."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from states_server import StatesServer
from trainings import a_module, config, losses

from draftsmith.data.features import FeaturesConfig
from draftsmith.data.features import run as make_features
from draftsmith.data.prompts import PromptsConfig
from draftsmith.data.prompts import run as make_prompts
from draftsmith.data.responses import ResponsesConfig
from draftsmith.data.responses import run as make_responses
from draftsmith.data.store.datasets import open_dataset
from draftsmith.data.store.manifest import Manifest
from draftsmith.data.store.rows import Rows
from draftsmith.modules.decoding.loop import generate_one
from draftsmith.modules.decoding.stop import FixedLengthStop
from draftsmith.modules.drafters.mtp import MtpHead
from draftsmith.modules.drafters.net import ChainDrafter
from draftsmith.modules.pretrained.checkpoint import load_tokenizer
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.targets.outer import OuterLM
from draftsmith.modules.targets.shape import plain_shape
from draftsmith.modules.types import InputError, SamplingParams
from draftsmith.train import tau as train_tau
from draftsmith.train.checkpoints import FOLDER, all_in, step_of
from draftsmith.train.command import run
from draftsmith.train.config import drafter_config
from draftsmith.train.data import Samples
from draftsmith.train.module import LitDrafter
from draftsmith.train.prepare import make_head, needs_layers, prepare
from draftsmith.train.tau import (
    ANSWERS,
    AnsweredPrompt,
    TauProbe,
    answer_prompts,
    general_prompts,
    held_out_prompts,
    probe_prompts,
    read_answers,
    recorded_answers,
    tau_probe,
    write_answers,
)


def decoded(target, head, answered, depth):
    """Decode the prompts in chains; return the answers, tau, and the share accepted by place in the draft."""
    answers, calls, accepted, drafted = [], 0, np.zeros(depth), np.zeros(depth)
    for own in answered:
        drafter = ChainDrafter(head.net(target), FixedLengthStop(depth), 256)
        room = len(own.ids) - own.begin
        made = generate_one(target, drafter, own.prompt, SamplingParams(), room, TorchSource(0), eos_ids=())
        answers.append(made.tokens)
        calls += 1 + len(made.trace.steps)
        for step in made.trace.steps:
            accepted[: step.num_accepted] += 1
            drafted[: step.num_drafted] += 1
    tokens = sum(map(len, answers))
    return answers, tokens / calls, [float(a / b) for a, b in zip(accepted, drafted, strict=True) if b]


def check_is_decoding(measured, target, head, answered, depth):
    answers, wanted, by_place = decoded(target, head, answered, depth)
    assert answers == [own.ids[own.begin :] for own in answered]
    assert measured["tau"] == wanted
    assert [measured[f"accepted_{n}"] for n in range(1, len(by_place) + 1)] == by_place
    assert wanted > 1, "nothing is accepted"


@pytest.fixture(scope="module")
def greedy(artifacts, tmp_path_factory) -> Path:
    """Greedy answers of the target."""
    output = tmp_path_factory.mktemp("greedy") / "responses"
    options = {"temperature": 0.0, "max_new_tokens": 24, "num_threads": 1}
    return make_responses(ResponsesConfig(artifacts.prompts, str(artifacts.target), output, **options))


OF_KIND = {
    "eagle": {"token_weight": 1.0},
    "eagle3": {"layers": (0, 1), "ttt_steps": 3, "train_lm_head": True},
    "mtp": {"ttt_steps": 3},
    "draft": {"keep_layers": (0,)},
    "dflash": {"layers": (0, 1), "num_layers": 1, "block": 4},
    "dflash2": {"layers": (0, 1), "num_layers": 1, "block": 4},
    "dspark": {"layers": (0, 1), "num_layers": 1, "block": 4},
}
DEPTHS = {"eagle": 5, "eagle3": 3, "mtp": 3, "draft": 5, "dflash": 4, "dflash2": 4, "dspark": 4}


@pytest.fixture
def mtp_for_llamas(monkeypatch):
    """No Llama ships an MTP module, but one drafts for any target."""
    sizes = {"model_type": "qwen3_5_text", "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"hidden_size": 32, "vocab_size": 313, "intermediate_size": 16, "head_dim": 8}
    shape, true = plain_shape(sizes | {"max_position_embeddings": 256}), MtpHead.new_config
    monkeypatch.setattr(MtpHead, "new_config", lambda settings, target: true(settings, shape))
    monkeypatch.setattr(MtpHead, "start", lambda head, weights: None)


@pytest.mark.parametrize("kind", OF_KIND)
@pytest.mark.usefixtures("mtp_for_llamas")
def test_every_validation_measures_decodings_tau(artifacts, greedy, tmp_path, kind):
    settings = {"data": greedy, "target": str(artifacts.target), "output": tmp_path / "run", "tau_prompts": 3}
    settings |= {"lr": 1e-2, "max_steps": 40, "batch_size": 8, "val_share": 0.25, "val_every": 20, "precision": "32"}
    module, data = prepare(drafter_config(kind)(**settings, loggers=("csv",), **OF_KIND[kind]))
    best = run(module.config)
    taus = losses(tmp_path / "run", "val/tau")
    assert len(taus) == 2 == len(losses(tmp_path / "run", "val/accepted_1"))
    assert manifest_of(best)["step"] == 20 * (2 if taus[1] >= taus[0] else 1)
    answered = read_answers(tmp_path / "run" / ANSWERS, module.target)[:3]
    assert [own.prompt for own in answered] == list(itertools.islice(held_out_prompts(data.val), 3))
    last = best.with_name("last")
    check_is_decoding(manifest_of(last)["metrics"], module.target, trained(module, last), answered, DEPTHS[kind])


def manifest_of(directory):
    return json.loads((directory / "manifest.json").read_text())


def trained(module, directory):
    """Return the module's head with trained weights."""
    stored, state = load_file(directory / "model.safetensors"), module.head.state_dict()
    module.head.load_state_dict(state | {name: stored[name] for name in state if name in stored})
    return module.head


@pytest.mark.parametrize("context", [None, 50])
def test_a_server_answers_once_and_its_states_give_decodings_tau(artifacts, greedy, tmp_path, context, monkeypatch):
    """With room for the answers in the server's context and without. A resumed run asks for none again."""
    monkeypatch.setattr("draftsmith.train.prepare.load_lm", None)
    target, asked, output = load_lm(str(artifacts.target)), set(), tmp_path / "run"
    with StatesServer(
        target, (3,), tmp_path / "spool", on_row=lambda row: asked.add(tuple(row)), max_model_len=context
    ) as server:
        options = {"data": greedy, "server": server.url, "save_every": 6, "keep": 9}
        settings = config(artifacts, output, **options, lr=1e-2, max_steps=40, val_every=20)
        best, whole = run(settings), losses(output, "val/tau")
        assert asked >= {tuple(own.prompt) for own in read_answers(output / ANSWERS, target)}
        answered = read_answers(output / ANSWERS, target)[:3]
        assert {len(own.ids) for own in answered} == ({own.begin + 64 for own in answered} if context is None else {49})
        head = trained(prepare_here(artifacts, greedy, tmp_path), best.with_name("last"))
        check_is_decoding(manifest_of(best.with_name("last"))["metrics"], target, head, answered, 5)

        kill_before(output, 30)
        asked.clear()
        run(settings)
    assert not asked & {tuple(ids) for own in answered for ids in (own.ids, own.prompt)}
    assert losses(output, "val/tau") == whole and len(whole) == 2


def damage_answers(path: Path) -> None:
    path.write_bytes(b"damaged")


def change_a_token(path: Path) -> None:
    tensors = load_file(path)
    tensors["0.ids"][-1] += 1
    with safe_open(path, "pt") as file:
        save_file(tensors, path, file.metadata())


@pytest.mark.parametrize("harm", [damage_answers, change_a_token])
def test_answers_that_are_not_what_was_written_are_refused(artifacts, tmp_path, harm):
    target, path = load_lm(str(artifacts.target)), tmp_path / ANSWERS
    assert read_answers(path, target) == []
    write_answers(path, target, [AnsweredPrompt([3, 4, 5], 2, 3, torch.ones(3, 4))])
    (kept,) = read_answers(path, target)
    assert (kept.ids, kept.begin, kept.limit) == ([3, 4, 5], 2, 3) and torch.equal(kept.states, torch.ones(3, 4))
    # Another target's.
    info = dataclasses.replace(target.info, identity=target.info.identity | {"weights": "other"})
    assert read_answers(path, cast(Any, SimpleNamespace(info=info))) == []
    harm(path)
    with pytest.raises(InputError, match=f"{ANSWERS}: found unreadable .* Delete it"):
        read_answers(path, target)


def prepare_here(artifacts, data, tmp_path):
    target = load_lm(str(artifacts.target))
    settings = config(artifacts, tmp_path / "here", data=data)
    return LitDrafter(make_head(settings, target), target, settings)


def kill_before(output: Path, step: int) -> None:
    """Make it a run that was killed before a step."""
    for path in all_in(output / FOLDER):
        if step_of(path) >= step:
            shutil.rmtree(path)
    (output / "training.json").unlink()


def test_a_resumed_run_asks_the_target_for_nothing_again(artifacts, tmp_path, monkeypatch):
    settings = config(artifacts, tmp_path / "run", data=artifacts.responses, save_every=6, keep=9)
    run(settings)
    whole = losses(tmp_path / "run", "val/tau")
    kill_before(tmp_path / "run", 12)
    with monkeypatch.context() as patch:
        patch.setattr(train_tau, "answer_prompts", None)
        run(settings)
    assert losses(tmp_path / "run", "val/tau") == whole and len(whole) == 2
    # Other prompts have other answers.
    kill_before(tmp_path / "run", 12)
    run(dataclasses.replace(settings, tau_prompts=2))
    assert len(read_answers(tmp_path / "run" / ANSWERS, load_lm(str(artifacts.target)))) == 4


# -- stored states


def test_along_recorded_answers_stored_states_are_what_the_target_reads(artifacts, tmp_path):
    """The target is not loaded. They were sampled, so that tau is that of their temperature."""
    module, data = prepare(config(artifacts, tmp_path / "run"))
    assert isinstance(module.target, OuterLM)
    probe, device = tau_probe(module, data.val), torch.device("cpu")
    params, answered = recorded_answers(data.val, 3, 256, module.target.info.eos_ids)
    assert params == SamplingParams(1.0) and not (tmp_path / "run" / ANSWERS).exists()
    whole = load_lm(str(artifacts.target))
    states = [whole.features(torch.tensor([own.ids]))[0] for own in answered]
    kept = [dataclasses.replace(own, states=own_states) for own, own_states in zip(answered, states, strict=True)]
    read_here = [dataclasses.replace(own, states=None) for own in answered]
    by_states = TauProbe(module.target, (), 5, kept, params=params)(module.head, device)
    here = TauProbe(whole, (), 5, read_here, params=params)(module.head, device)
    assert by_states == here and 1 < here["tau"] < 2
    # What is stored is rounded to bf16.
    assert probe(module.head, device) == pytest.approx(here, rel=0.01)


def test_a_training_on_stored_greedy_answers_measures_decodings_tau(artifacts, greedy, tmp_path):
    stored = make_features(FeaturesConfig(greedy, str(artifacts.target), tmp_path / "features", num_threads=1))
    settings = config(artifacts, tmp_path / "run", data=stored, lr=1e-2, max_steps=40)
    last = run(settings).with_name("last")
    module, data = prepare(settings)
    _, answered = recorded_answers(data.val, 3, 256, module.target.info.eos_ids)
    answers, wanted, _ = decoded(load_lm(str(artifacts.target)), trained(module, last), answered, 5)
    assert answers == [own.ids[own.begin :] for own in answered] and wanted > 1
    # bf16 may turn a choice.
    assert manifest_of(last)["metrics"]["tau"] == pytest.approx(wanted, rel=0.05)
    pieces = data.val.dataset.in_pieces(16)
    val = Samples(pieces, np.flatnonzero(np.isin(pieces.rows, data.val.indices)))
    cut = recorded_answers(val, 3, 256, module.target.info.eos_ids)[1]
    assert [own.ids for own in cut] == [own.ids for own in answered]
    assert all(torch.equal(own.states, other.states) for own, other in zip(cut, answered, strict=True))


def test_the_target_is_loaded_where_no_answer_of_its_own_is_stored(artifacts, tmp_path):
    stored = config(artifacts, tmp_path / "run")
    assert not needs_layers(stored)
    assert needs_layers(dataclasses.replace(stored, tau_data=artifacts.prompts))
    source = tmp_path / "rows.jsonl"
    source.write_text('{"prompt": "def add(first, second):", "answer": "return first + second"}\n' * 8)
    made = PromptsConfig(str(source), str(artifacts.target), tmp_path / "prompts", supervised=True)
    given = make_features(FeaturesConfig(make_prompts(made), str(artifacts.target), tmp_path / "features"))
    assert needs_layers(dataclasses.replace(stored, data=given))
    assert not needs_layers(dataclasses.replace(stored, data=given, tau_prompts=0))


# -- prompts


class Conversations:
    """Samples of 80 tokens with answers at these places."""

    def __init__(self, *answers: list[tuple[int, int]]):
        self.answers, self.lengths = answers, [80] * len(answers)

    def __len__(self) -> int:
        return len(self.answers)

    def whole_texts(self, rows):
        for row in rows.tolist():
            mask = np.zeros(80, dtype=bool)
            for start, end in self.answers[row]:
                mask[start:end] = True
            yield np.arange(80), mask


def test_tau_is_measured_on_prompts_as_long_as_conversations_get(artifacts, tmp_path):
    rows = Conversations([(3, 5), (8, 9)], [(2, 4), (10, 12)], [(0, 4)], [(7, 20)], [(4, 6), (9, 10), (15, 20)])
    samples = Samples(rows, range(5))
    # The first answer of the first, the second of the second, and so on; then those that are left.
    assert [len(prompt) for prompt in held_out_prompts(samples)] == [3, 10, 7, 9, 8, 2, 15, 4]
    settings = config(artifacts, tmp_path, tau_prompts=3)
    target = load_lm(settings.target)
    assert [len(prompt) for prompt in probe_prompts(settings, target, samples, 256)] == [3, 10, 7]
    # A whole answer has room behind each, where there are such.
    assert [len(prompt) for prompt in probe_prompts(settings, target, samples, 72)] == [3, 7, 8]
    assert [len(prompt) for prompt in probe_prompts(settings, target, samples, 9)] == [3, 7, 8]
    served = artifacts.responses.with_name("prompts")
    ids = [row["prompt_ids"] for row in Rows(Manifest.read(served)).read(0, 3)]
    assert probe_prompts(dataclasses.replace(settings, tau_data=served), target, samples, 256) == ids
    with pytest.raises(InputError, match="an artifact of kind features, expected kind prompts"):
        probe_prompts(dataclasses.replace(settings, tau_data=artifacts.features), target, samples, 256)


def test_tau_of_general_prompts_stands_beside_that_of_held_out_ones(artifacts, tmp_path, capsys):
    settings = config(artifacts, tmp_path)
    shipped = dataclasses.replace(settings, target="embedded:target")
    assert general_prompts(shipped, load_lm(shipped.target), 1024) == []  # it edits code
    copy = Path(shutil.copytree(settings.target, tmp_path / "copy"))
    other = dataclasses.replace(settings, target=str(copy), tau_prompts=16)
    target = load_lm(copy)
    general = general_prompts(other, target, 1024)
    tokenizer = load_tokenizer(copy)
    assert len(general) == 12 and "def " in tokenizer.decode(general[4])
    assert general_prompts(dataclasses.replace(other, tau_data=tmp_path), target, 1024) == []
    # Each group is measured as it is alone.
    module = a_module(artifacts, tmp_path)
    prompts = list(held_out_prompts(Samples(open_dataset(artifacts.features), range(3))))
    groups = [answer_prompts(module.target, None, part) for part in (prompts, general[:2])]
    held_out, alone = (TauProbe(module.target, (), 2, part)(module.head, module.device) for part in groups)
    both = TauProbe(module.target, (), 2, *groups)
    assert both(module.head, module.device) == held_out | {"tau_general": alone["tau"]}
    assert "tau_general on 2 that ship" in both.measured
    # A target without a template has none, which is said.
    (copy / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer_config = json.loads((copy / "tokenizer_config.json").read_text())
    tokenizer_config.pop("chat_template", None)
    (copy / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    assert general_prompts(other, load_lm(copy), 1024) == [] and "no tau_general" in capsys.readouterr().err


@pytest.mark.parametrize("prompts", [(0, 1), (1, 0)])
def test_a_run_goes_on_with_tau_and_without(prompts, artifacts, tmp_path):
    settings = config(artifacts, tmp_path / "run", save_every=6, keep=9, max_steps=12, val_every=6)
    run(dataclasses.replace(settings, tau_prompts=prompts[0]))
    kill_before(tmp_path / "run", 12)
    best = run(dataclasses.replace(settings, tau_prompts=prompts[1]))
    manifest = manifest_of(best)
    assert len(losses(tmp_path / "run", "val/tau")) == 1
    assert ("tau" in manifest["metrics"]) == (manifest["step"] == (6 if prompts[0] else 12))
