"""The variants that are measured beside each other compute the same, and the measuring itself is right."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from draftsmith.benchmarks import throughput
from draftsmith.benchmarks.step_peak import in_new_process, peak_above
from draftsmith.benchmarks.step_variants import Bare, ByHand, Padded, Shape, TakenStep, Work, padded_loss, train_ours
from draftsmith.benchmarks.throughput import ThroughputConfig, paired_steps, slower, tokens_per_s
from draftsmith.benchmarks.training_data import dialogue_lengths
from draftsmith.data.store.datasets import collate_features
from draftsmith.launch.cli import main_of
from draftsmith.modules.drafters.eagle.head import eagle_loss, shift
from draftsmith.modules.types import InputError

TINY = Shape(hidden=64, vocab=48, tokens=160, documents=12, scale=0.1)


@pytest.mark.parametrize("variant", [Bare, ByHand])
def test_a_plain_loop_takes_the_steps_that_a_training_takes(variant, tmp_path):
    """Same batches, loss, gradient, clipping, optimizer and schedule: the losses stay the same from step to step."""
    work = Work(TINY)
    config = work.settings(tmp_path / "run", steps=7, noise=0.0)
    ours, bare = train_ours(work, config), variant(work, config)
    theirs = [bare.step() for _ in ours]
    assert len(ours) == 6
    assert [step.tokens for step in ours] == [step.tokens for step in theirs]
    assert [step.loss for step in ours] == pytest.approx([step.loss for step in theirs], rel=1e-5)
    assert len({round(step.loss, 4) for step in ours}) > 3  # it learns something, or the schedule would not matter


def test_the_straightforward_loss_is_the_chunked_one():
    """In float32, over padded documents: 1e-5 of sums over 48 tokens of vocabulary."""
    work = Work(TINY)
    batch = collate_features([work.samples.item(i, 0) for i in (0, 5, 7)])
    pair = shift(batch)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(pair.features.shape, generator=generator, requires_grad=True)
    values, grads = [], []
    for loss in (
        padded_loss(hidden, pair.target_features.float(), pair.loss_mask, work.target.lm_head, 0.7, 0.3),
        eagle_loss([hidden], pair.target_features.float(), [pair.loss_mask], work.target.lm_head, 0.7, 0.3).loss,
    ):
        values.append(loss.item())
        grads.append(*torch.autograd.grad(loss, hidden))
    assert values[0] == pytest.approx(values[1], rel=1e-5)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-5, atol=1e-8)


def test_padded_batches_hold_as_many_tokens_on_average(tmp_path):
    work = Work(Shape(hidden=64, vocab=48, tokens=400, documents=40, scale=0.1))
    loop = Padded(work, work.settings(tmp_path, steps=40 // Padded(work, work.settings(tmp_path, 1)).batch_size))
    steps = [loop.step() for _ in range(loop.config.max_steps)]
    assert sum(step.tokens for step in steps) / len(steps) == pytest.approx(400, rel=0.25)


@pytest.mark.parametrize("other", ["bare", "padded"])
def test_both_variants_are_timed_on_as_many_steps(other):
    ours, theirs = paired_steps(Work(TINY), 3, other, warm_up=1)
    assert len(ours) == len(theirs) == 3
    assert ([step.tokens for step in ours] == [step.tokens for step in theirs]) == (other == "bare")
    assert all(step.seconds > 0 for step in ours + theirs)


def test_the_command_reads_every_document_once_unless_told_otherwise():
    config = ThroughputConfig(output=Path("absent"), hidden=64, vocab=16, tokens=1500, documents=2)
    row = next(throughput.speed(config))
    assert row.what.startswith("bare") and row.value > 0


def test_ratios_are_of_sums_and_of_pairs():
    ours = [TakenStep(100, 0.0, 1.0), TakenStep(300, 0.0, 2.2), TakenStep(50, 0.0, 3.0)]
    bare = [TakenStep(100, 0.0, 1.0), TakenStep(300, 0.0, 2.0), TakenStep(50, 0.0, 2.0)]
    assert tokens_per_s(ours) == pytest.approx(450 / 6.2)
    assert slower(ours, bare) == pytest.approx(10.0)


def test_the_peak_of_a_call_is_what_it_held_at_most():
    """Whatever the process did before, as to free more than that where the C library keeps it: below a block that is
    still there, and that was too small for a mapping of its own once a larger one had been freed."""
    torch.ones(24 * 2**20, dtype=torch.uint8)
    blocks = [torch.ones(2**20, dtype=torch.uint8) for _ in range(200)]
    above = torch.ones(2**20, dtype=torch.uint8)
    del blocks
    size = 96 * 2**20
    for _ in range(2):  # the first leaves its own block behind
        found = peak_above(lambda: torch.ones(size, dtype=torch.uint8))
        assert 0.99 * size < found < 1.3 * size  # the kernel counts in batches of pages
    assert peak_above(lambda: None) < 2**22  # it is gone again
    assert len(above)


def test_the_chunked_loss_needs_less_memory_than_the_naive_one():
    """At once: three blocks of 2^20 logits, 4 MiB each, against four or so of 2^25."""
    shape = Shape(hidden=16, vocab=2**12, tokens=2**13)
    small, large = (in_new_process(what, shape) for what in ("loss", "naive loss"))
    assert large > 2**28 and 2**23 < small < large / 3


def test_the_command_writes_its_table(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        throughput, "in_new_process", lambda what, shape: {"loss": 100, "naive loss": 1000}[what] * 10**6
    )
    words = ["--only", "loss-memory", "--output", str(tmp_path)]
    assert main_of(ThroughputConfig, throughput.run, words) == 0
    assert "in chunks / naive, peak memory | 10.0% | <= 33" in capsys.readouterr().out
    assert "| in chunks / naive, peak memory | 10.0% | <= 33 |" in (tmp_path / "throughput.md").read_text()
    rows = json.loads((tmp_path / "throughput.json").read_text())["rows"]
    assert [row["value"] for row in rows] == [100, 1000, 10]


def test_settings_that_make_no_sense_are_told():
    with pytest.raises(InputError, match="tokens: found 100"):
        ThroughputConfig(tokens=100, output=Path("absent"))


def test_dialogues_are_short_and_long():
    lengths = dialogue_lengths(4000)
    assert min(lengths) == 50 and max(lengths) == 1500
    assert 350 < sorted(lengths)[2000] < 450
    assert dialogue_lengths(10) == lengths[:10] != random.sample(lengths, 10)
