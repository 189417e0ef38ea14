"""How a run ends and what it is judged by: exit codes, verdicts, and tau while it trains."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from trainings import a_module, config, losses

from draftsmith.data.responses import ResponsesConfig
from draftsmith.data.responses import run as make_responses
from draftsmith.data.store.datasets import open_dataset
from draftsmith.data.store.manifest import Manifest
from draftsmith.data.store.rows import Rows
from draftsmith.modules.decoding.loop import generate_one
from draftsmith.modules.decoding.stop import FixedLengthStop
from draftsmith.modules.drafters.net import ChainDrafter
from draftsmith.modules.pretrained.checkpoint import load_tokenizer
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.types import InputError, SamplingParams
from draftsmith.train import callbacks
from draftsmith.train.callbacks import (
    Progress,
    exit_code,
    mismatch,
    verdict,
)
from draftsmith.train.checkpoints import FOLDER, all_in
from draftsmith.train.command import run
from draftsmith.train.config import drafter_config
from draftsmith.train.data import Samples
from draftsmith.train.tau import TauProbe, general_prompts, held_out_prompts, probe_prompts


def test_progress_says_while_it_validates(monkeypatch):
    """The steps stand still then, and a log would show nothing else for minutes."""
    states = []
    monkeypatch.setattr(callbacks, "progress_bar", lambda *_, state, **__: states.append(state) or nullcontext())
    head, run_state = SimpleNamespace(kind="eagle3"), SimpleNamespace(time_limit=None)
    module = SimpleNamespace(state=run_state, total_steps=3, head=head, logged={"train/loss": 2.5})
    trainer = SimpleNamespace(global_step=1, validating=False)
    Progress(None).on_train_start(trainer, module)
    assert states[0]() == "; training loss 2.5"
    trainer.validating = True
    assert states[0]() == "; validating"


@pytest.mark.parametrize(
    ("values", "larger", "begins"),
    [
        ([1.4, 1.7, 1.8, 1.94, 1.98], True, "still learning: tau 1.75 after half of the steps, 1.98 at the end"),
        ([1.4, 1.95, 1.97, 1.98, 1.98], True, "settled: tau 1.96 after half of the steps, 1.98 at the end"),
        ([1.4, 1.7, 1.98, 1.9, 1.8], True, "overfits: tau went from 1.98 at step 300 to 1.8, and best/ is of step 300"),
        # A dip within the noise of a few prompts is no overfitting.
        ([1.4, 1.7, 1.9, 1.98, 1.96], True, "still learning"),
        ([0.9, 0.5, 0.4, 0.5, 0.6], False, "overfits: tau went from 0.4 at step 300 to 0.6"),
        ([0.9, 0.5, 0.45, 0.4, 0.3], False, "still learning"),
        ([7.739] * 5, False, "flat: tau 7.74 after half of the steps, 7.74 at the end; nothing was learned"),
    ],
)
def test_verdict(values, larger, begins):
    curve = [(100 * (i + 1), value) for i, value in enumerate(values)]
    assert verdict("tau", curve, larger).startswith(begins)
    # The validation before the first step is no part of the trend.
    assert verdict("tau", [(0, 1.0), *curve], larger) == verdict("tau", curve, larger)


def test_two_validations_show_no_trend():
    assert verdict("tau", [(0, 1.0), (100, 1.4), (200, float("nan")), (300, 1.5)]) == ""


@pytest.mark.parametrize(
    ("metrics", "warns"),
    [
        ({"tau": 2.0, "tau_general": 1.6}, True),
        ({"tau": 2.0, "tau_general": 1.9}, False),
        ({"tau": 1.6, "tau_general": 2.0}, False),
        # Not measured: prompts to be served are given, or the models are those that ship.
        ({"tau": 2.0}, False),
        ({}, False),
    ],
)
def test_text_unlike_the_training_is_named(metrics, warns):
    assert mismatch(metrics)[:22] == ("warning: tau is 2.00 o" if warns else "")


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """Replace SLURM's program; return a function that lists its calls. STUB_CODE: its exit code."""
    program, record = tmp_path / "scontrol", tmp_path / "calls"
    program.write_text(f'#!/bin/sh\necho "$@" >>{record}\necho "scontrol: not allowed" >&2\nexit "$STUB_CODE"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    monkeypatch.setenv("STUB_CODE", "0")
    return lambda: record.read_text().splitlines() if record.exists() else []


def test_sigusr1_requeues_the_job_once(scontrol, monkeypatch, capsys):
    assert exit_code(signal.SIGUSR1) == 0
    assert scontrol() == ["requeue 42"] and "to requeue job 42" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert exit_code(signal.SIGUSR1) == 0
    assert len(scontrol()) == 1


def test_a_job_that_cannot_be_requeued_fails_with_the_reason(scontrol, monkeypatch, capsys):
    monkeypatch.setenv("STUB_CODE", "1")
    assert exit_code(signal.SIGUSR1) == 128 + signal.SIGUSR1
    assert "job 42 cannot be requeued: scontrol: not allowed" in capsys.readouterr().err
    monkeypatch.setenv("PATH", "/nonexistent")
    assert exit_code(signal.SIGUSR1) == 128 + signal.SIGUSR1
    assert "scontrol" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_after_other_signals_the_job_is_not_requeued(scontrol, number):
    assert exit_code(number) == 128 + number
    assert scontrol() == []


# -- tau


def test_tau_is_emitted_tokens_by_target_calls_of_real_decoding(artifacts, tmp_path):
    module = a_module(artifacts, tmp_path)
    prompts = list(held_out_prompts(Samples(open_dataset(artifacts.features), range(3))))
    assert len(prompts) == 3
    target, tokens, calls, behind = module.target, 0, 0, 0
    plain = generate_one(target, None, prompts[0], SamplingParams(), 10, TorchSource(0))
    ends = plain.tokens[3:4]  # as if it ended there
    target.info = dataclasses.replace(target.info, eos_ids=tuple(ends))
    for prompt in prompts:
        drafter = ChainDrafter(module.head.net(target), FixedLengthStop(2), 128)
        generation = generate_one(target, drafter, prompt, SamplingParams(), 10, TorchSource(0), eos_ids=())
        tokens, calls = tokens + len(generation.tokens), calls + 1 + len(generation.trace.steps)
        first = generation.tokens.index(ends[0]) if ends[0] in generation.tokens else 9
        behind += 9 - first
    assert tokens == 30 and behind > 0
    probe = TauProbe(target, prompts, config(artifacts, tmp_path, tau_k=2, tau_max_new_tokens=10), 1)
    assert probe(module.head, module.device) == {"tau": tokens / calls, "tau_behind_end": behind / tokens}
    assert probe.measured.endswith("tokens, 10 each, end tokens ignored, chains of 2")


class Conversations:
    """Samples of 20 tokens with answers at these places."""

    def __init__(self, *answers: list[tuple[int, int]]):
        self.answers, self.lengths = answers, [20] * len(answers)

    def __len__(self) -> int:
        return len(self.answers)

    def whole_texts(self, rows):
        for row in rows.tolist():
            mask = np.zeros(20, dtype=bool)
            for start, end in self.answers[row]:
                mask[start:end] = True
            yield np.arange(20), mask


def test_tau_is_measured_on_prompts_as_long_as_conversations_get(artifacts, tmp_path):
    rows = Conversations([(3, 5), (8, 9)], [(2, 4), (10, 12)], [(0, 4)], [(7, 20)], [(4, 6), (9, 10), (15, 20)])
    samples = Samples(rows, range(5))
    # The first answer of the first, the second of the second, and so on; then those that are left.
    assert [len(prompt) for prompt in held_out_prompts(samples)] == [3, 10, 7, 9, 8, 2, 15, 4]
    settings = config(artifacts, tmp_path, tau_prompts=3, tau_max_new_tokens=8)
    target = load_lm(settings.target)
    assert [len(prompt) for prompt in probe_prompts(settings, target, samples, 256)] == [3, 10, 7]
    # An answer of the stated length has room behind each, where there are such.
    assert [len(prompt) for prompt in probe_prompts(settings, target, samples, 16)] == [3, 7, 8]
    assert [len(prompt) for prompt in probe_prompts(settings, target, samples, 9)] == [3, 7, 8]
    served = artifacts.responses.with_name("prompts")
    ids = [row["prompt_ids"] for row in Rows(served, Manifest.read(served)).read(0, 3)]
    assert probe_prompts(dataclasses.replace(settings, tau_data=served), target, samples, 256) == ids
    with pytest.raises(InputError, match="an artifact of kind features, expected kind prompts"):
        probe_prompts(dataclasses.replace(settings, tau_data=artifacts.features), target, samples, 256)


def test_tau_is_measured_on_whole_prompts_where_the_training_reads_pieces(artifacts):
    whole = open_dataset(artifacts.features)
    pieces = whole.in_pieces(16)
    assert len(pieces) > len(whole)
    prompts = [list(held_out_prompts(Samples(each, range(len(each))))) for each in (whole, pieces)]
    assert prompts[0] == prompts[1] and all(prompts[0])


def test_tau_of_general_prompts_stands_beside_that_of_held_out_ones(artifacts, tmp_path, capsys):
    settings = config(artifacts, tmp_path, tau_k=2, tau_max_new_tokens=10)
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
    held_out, alone = (
        TauProbe(module.target, part, settings, 1)(module.head, module.device) for part in (prompts, general[:2])
    )
    both = TauProbe(module.target, prompts, settings, 1, general[:2])
    assert (
        both(module.head, module.device) == held_out | {"tau_general": alone["tau"]}
        and "tau_general on 2 that ship" in both.measured
    )
    # A target without a template has none, which is said.
    (copy / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer_config = json.loads((copy / "tokenizer_config.json").read_text())
    tokenizer_config.pop("chat_template", None)
    (copy / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    assert general_prompts(other, load_lm(copy), 1024) == [] and "no tau_general" in capsys.readouterr().err


def test_best_is_chosen_by_the_loss_where_no_answer_is_as_long_as_a_draft(artifacts, tmp_path):
    short = {"prompts": artifacts.prompts, "target": str(artifacts.target), "output": tmp_path / "short"}
    data = make_responses(ResponsesConfig(**short, max_new_tokens=3, num_threads=1))
    settings = {"data": data, "target": str(artifacts.target), "output": tmp_path / "run", "layers": (0, 1)}
    settings |= {"max_steps": 6, "val_every": 2, "lr": 3e-3, "tau_prompts": 0, "loggers": ("csv",)}
    best = run(drafter_config("eagle3")(**settings))
    validated = losses(tmp_path / "run", "val/loss")
    step = json.loads((best / "manifest.json").read_text())["step"]
    assert len(validated) == 3 and step == 2 * (1 + validated.index(min(validated)))
    shutil.rmtree(best)
    with pytest.raises(InputError, match="a finished training whose best/ is gone"):
        run(drafter_config("eagle3")(**settings))


@pytest.mark.parametrize("prompts", [(0, 1), (1, 0)])
def test_a_run_goes_on_with_tau_and_without(prompts, artifacts, tmp_path):
    settings = config(artifacts, tmp_path / "run", save_every=6, keep=9, max_steps=12, val_every=6)
    run(dataclasses.replace(settings, tau_prompts=prompts[0]))
    # As if it had been killed after the sixth step.
    shutil.rmtree(all_in(tmp_path / "run" / FOLDER)[-1])
    (tmp_path / "run" / "training.json").unlink()
    best = run(dataclasses.replace(settings, tau_prompts=prompts[1]))
    manifest = json.loads((best / "manifest.json").read_text())
    assert len(losses(tmp_path / "run", "val/tau")) == 1
    assert ("tau" in manifest["metrics"]) == (manifest["step"] == (6 if prompts[0] else 12))
