"""Features of the target in a training, computed in the step or read from a cache: the head learns the same."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import pickle
import shutil
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from devices import DEVICES
from online_cases import config, curve, stored, texts
from trained_runs import fake_trainer, micro_batch, step_loss
from transformers import AutoModelForCausalLM

from draftsmith.data import prompts
from draftsmith.data.features import text_dataset
from draftsmith.data.store import feature_codec
from draftsmith.data.store.datasets import collate_features, open_dataset, pack_features
from draftsmith.data.store.manifest import Manifest
from draftsmith.data.store.rows import Rows
from draftsmith.modules.drafters.eagle import EagleConfig, EagleHead
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.targets.llama import LlamaLM
from draftsmith.modules.types import FeatureBatch, InputError
from draftsmith.train import features as train_features
from draftsmith.train.command import run
from draftsmith.train.data import MicroBatch, SampleKey, Samples
from draftsmith.train.features import FeatureCache, FeatureSource, feature_std
from draftsmith.train.module import LitDrafter
from draftsmith.train.prepare import feature_source, make_head


def a_module(artefacts, tmp_path) -> LitDrafter:
    settings, target = config(artefacts, tmp_path, noise=0.0), load_lm(str(artefacts.target))
    module = LitDrafter(make_head(settings, target), target, settings)
    module.trainer = fake_trainer(texts(artefacts))
    return module


def part_of(batch: FeatureBatch) -> MicroBatch:
    return micro_batch(batch, EagleHead.loss_count(batch, None))


def test_supervised_prompts_are_texts_with_masks_of_their_own(artefacts, tmp_path):
    source = tmp_path / "rows.jsonl"
    source.write_text('{"prompt": "def add(first, second):", "answer": "return first + second"}\n' * 3)
    made = prompts.PromptsConfig(str(source), str(artefacts.target), tmp_path / "prompts", supervised=True)
    directory = prompts.run(made)
    data = text_dataset(directory, str(artefacts.target), {})
    expected = Rows(directory, Manifest.read(directory)).read(0, 3)
    for name in ("loss_mask", "input_ids"):
        assert [data[i][name].tolist() for i in range(len(data))] == [row[name] for row in expected]


def test_features_are_transformers_states_packed_or_padded(artefacts, tmp_path):
    """Without gradient, and in float32 under autocast too."""
    oracle = AutoModelForCausalLM.from_pretrained(artefacts.target, dtype=torch.float32).eval()
    data, module, rows = texts(artefacts), a_module(artefacts, tmp_path), (0, 5, 6)
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


def test_the_loss_is_exactly_that_of_a_batch_that_brings_the_same_features(artefacts, tmp_path):
    data, module = texts(artefacts), a_module(artefacts, tmp_path)
    batch = collate_features([data[i] for i in range(4)])
    brought = dataclasses.replace(batch, features=module.target.features(batch.input_ids))
    online, stored = (step_loss(module, part_of(b)) for b in (batch, brought))
    assert online.loss == stored.loss and online.sums == stored.sums
    online.loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.head.parameters())


def test_training_online_is_training_on_a_features_artefact_but_for_its_rounding(artefacts, tmp_path):
    run(config(artefacts, tmp_path / "online"))
    run(config(artefacts, tmp_path / "stored", data=artefacts.features))
    # bf16 keeps 8 bits of the features' mantissas: losses differ by far less than 2^-8 of theirs, as rounding averages.
    assert curve(tmp_path / "online") == pytest.approx(curve(tmp_path / "stored"), rel=4e-3)
    assert curve(tmp_path / "online") != curve(tmp_path / "stored")
    for name in ("val/loss", "val/top1", "val/tau"):
        # top1 and tau are counts over few tokens: a near tie that falls the other way is one of them.
        online, stored = curve(tmp_path / "online", name), curve(tmp_path / "stored", name)
        assert len(online) == len(stored) and online == pytest.approx(stored, rel=0.05), name


def test_the_noise_unit_is_that_of_the_stored_features(artefacts, tmp_path):
    target = load_lm(str(artefacts.target))
    samples = Samples(texts(artefacts), range(6))
    stored = feature_std(Samples(open_dataset(artefacts.features), range(6)), FeatureSource(target))
    assert feature_std(samples, FeatureSource(target)) == pytest.approx(stored, rel=1e-3)  # bf16
    # Alone or in a batch, the sums differ in their order only, and so, rarely, what they round to.
    for dtype, rel in (("bf16", 1e-5), ("fp8", 1e-2)):
        cache = FeatureCache(tmp_path / dtype, target.info.identity, dtype, "float32")
        assert feature_std(samples, FeatureSource(target, cache=cache)) == pytest.approx(stored, rel=rel)


def test_a_row_that_was_computed_is_what_reading_the_cache_gives(artefacts, tmp_path):
    target, data = load_lm(str(artefacts.target)), texts(artefacts)
    batch = collate_features([data[i] for i in (0, 6)])
    cache = FeatureCache(tmp_path / "cache", target.info.identity, "fp8", "float32")
    computed = FeatureSource(target, cache=cache).compute(batch.input_ids, [data.lengths[i] for i in (0, 6)])
    plain = target.features(batch.input_ids)
    for row, i in enumerate((0, 6)):
        length = data.lengths[i]
        assert torch.equal(computed[row, :length], feature_codec.rounded(plain[row, :length], "fp8"))
        assert torch.equal(stored(cache, data[i]["input_ids"]), computed[row, :length])


def test_data_that_no_head_can_be_trained_on_is_named(artefacts, tmp_path):
    def refused(words: str, **changes) -> None:
        with pytest.raises(InputError, match=words):
            run(config(artefacts, tmp_path / "run", **changes))

    refused(r"made with another target\.config", target=str(artefacts.draft))
    refused("expected kind responses or prompts or features", data=artefacts.acceptance)
    refused("expected responses to compute them of", data=artefacts.features, features="cache")
    refused("data: found prompts without answers", data=artefacts.responses.parent / "prompts")


def test_the_universal_engine_trains_the_same_head(artefacts, tmp_path):
    short = {"max_steps": 4, "val_every": 4}
    run(config(artefacts, tmp_path / "lean", **short))
    run(config(artefacts, tmp_path / "hf", engine="hf", **short))
    for name in ("train/loss", "val/loss", "val/tau"):
        # Two implementations of one float32 forward.
        assert curve(tmp_path / "hf", name) == pytest.approx(curve(tmp_path / "lean", name), rel=1e-4), name


IDENTITY = {"config": "abc", "lm_head": "def", "layers": "final-norm"}


def a_cache(directory: Path, dtype: feature_codec.FeatureDtype = "bf16") -> FeatureCache:
    return FeatureCache(directory, IDENTITY, dtype, "float32")


def a_row(seed: int, length: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [T] and features [T, 16]."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 300, (length,), generator=generator)
    return ids, torch.randn(length, 16, generator=generator)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_a_row_reads_the_same_before_it_is_written_and_after_and_in_another_process(tmp_path, dtype):
    cache, rows = a_cache(tmp_path, dtype), [a_row(seed) for seed in range(5)]
    assert stored(cache, rows[0][0]) is None
    put = [cache.put(ids, features) for ids, features in rows]
    waiting = [stored(cache, ids) for ids, _ in rows]
    cache.flush()
    other = pickle.loads(pickle.dumps(cache))
    for (ids, features), *found in zip(rows, put, waiting, strict=True):
        expected = feature_codec.rounded(features, dtype)
        for tensor in (*found, stored(cache, ids), stored(a_cache(tmp_path, dtype), ids), stored(other, ids)):
            assert tensor is not None and torch.equal(tensor, expected) and tensor.dtype == torch.bfloat16


def test_a_rank_reads_what_another_wrote_after_it_began(tmp_path, monkeypatch):
    monkeypatch.setattr(train_features, "LOOK_EVERY_S", 0.0)
    first, second, (ids, features) = a_cache(tmp_path), a_cache(tmp_path), a_row(1)
    first.put(ids, features)
    assert stored(second, ids) is None
    first.flush()
    assert torch.equal(stored(second, ids), stored(first, ids))
    second.put(ids, features)
    second.flush()
    assert len(list(tmp_path.glob("*.safetensors"))) == 1  # what is there is not written again


def kill_while_writing(directory: Path) -> None:
    cache, real = a_cache(directory), os.fsync
    cache.put(*a_row(1))
    cache.flush()
    cache.put(*a_row(2))

    def die(descriptor: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
        real(descriptor)

    os.fsync = die
    cache.flush()


def test_a_killed_run_leaves_whole_shards_only(tmp_path, monkeypatch):
    process = multiprocessing.get_context("fork").Process(target=kill_while_writing, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert len(list(tmp_path.glob("*.tmp*"))) == 1  # it was killed in the middle of it
    cache = a_cache(tmp_path)
    assert stored(cache, a_row(1)[0]) is not None and stored(cache, a_row(2)[0]) is None
    cache.put(*a_row(2))
    cache.flush()
    assert stored(a_cache(tmp_path), a_row(2)[0]) is not None
    monkeypatch.setattr(train_features, "LEFTOVER_S", -1.0)
    (tmp_path / "notes.tmp").touch()  # somebody else's
    a_cache(tmp_path)
    assert [path.name for path in tmp_path.glob("*.tmp*")] == ["notes.tmp"]


def test_a_cache_of_another_target_or_dtype_is_refused_and_so_is_another_directory(tmp_path):
    a_cache(tmp_path / "cache")
    for other in (
        lambda: FeatureCache(tmp_path / "cache", {**IDENTITY, "lm_head": "xyz"}, "bf16", "float32"),
        lambda: FeatureCache(tmp_path / "cache", IDENTITY, "fp8", "float32"),
        lambda: FeatureCache(tmp_path / "cache", IDENTITY, "bf16", "bfloat16"),
    ):
        with pytest.raises(InputError, match=r"feature_cache: found .* with another \w+.*now"):
            other()
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="holds something else"):
        a_cache(tmp_path / "strange")


def test_a_disk_that_fills_up_ends_the_caching_and_not_the_training(tmp_path, monkeypatch, capsys):
    def full(tensors, path, metadata):
        raise OSError(28, "No space left on device")

    cache, (ids, features) = a_cache(tmp_path), a_row(1)
    monkeypatch.setattr("draftsmith.modules.pretrained.files.save_file", full)
    for seed in (1, 2):
        cache.put(*a_row(seed))
        cache.flush()
    assert capsys.readouterr().err.count("No space left on device") == 1
    assert torch.equal(cache.put(ids, features), feature_codec.rounded(features, "bf16"))
    assert not list(tmp_path.glob("*.safetensors*"))


def test_the_disk_is_looked_at_before_the_first_step(artefacts, tmp_path, monkeypatch, capsys):
    data, target = texts(artefacts), load_lm(str(artefacts.target))
    unique = {tuple(data[i]["input_ids"].tolist()) for i in range(len(data))}
    tokens, whole = sum(map(len, unique)), [Samples(data, range(len(data))) for _ in range(2)]
    settings = config(artefacts, tmp_path / "run", features="cache", feature_dtype="fp8")
    cache = feature_source(settings, target, (), whole, ExitStack()).cache
    assert f"{tokens * (32 + 2):,} bytes" in capsys.readouterr().err  # a value is a byte, a token's scale two
    cache.put(data[0]["input_ids"], torch.zeros(data.lengths[0], 32))
    cache.flush()
    feature_source(settings, target, (), whole, ExitStack())
    assert f"{(tokens - data.lengths[0]) * (32 + 2):,} bytes" in capsys.readouterr().err
    real = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real._replace(free=1000))
    with pytest.raises(InputError, match="found 1,000 bytes free"):
        run(settings)
    assert not (tmp_path / "run" / "started.json").exists()


def test_of_many_rows_some_are_read_as_other_ranks_wait(artefacts, tmp_path, monkeypatch, capsys):
    data, target, read = texts(artefacts), load_lm(str(artefacts.target)), []
    text = Samples.text
    monkeypatch.setattr(Samples, "text", lambda part, i: read.append(i) or text(part, i))
    settings = config(artefacts, tmp_path / "run", features="cache")
    needed = []
    for most in (1000, 12):
        monkeypatch.setattr("draftsmith.train.features.COUNTED_ROWS", most)
        read.clear()
        feature_source(settings, target, (), [Samples(data, range(40)), Samples(data, range(40, 48))], ExitStack())
        needed.append(int(capsys.readouterr().err.split("; ")[1].split()[0].replace(",", "")))
    # Lengths of rows differ by a factor of two.
    assert len(read) <= 12 and 0.5 < needed[1] / needed[0] < 2


@dataclasses.dataclass
class Counted:
    """How many tokens the target has read for features since `reset`."""

    tokens: int = 0


@pytest.fixture
def counted(monkeypatch) -> Counted:
    counter, real = Counted(), LlamaLM.features

    def features(self, input_ids, position_ids=None, capture=()):
        counter.tokens += input_ids.numel()
        return real(self, input_ids, position_ids, capture)

    monkeypatch.setattr(LlamaLM, "features", features)
    monkeypatch.setattr("draftsmith.train.plan.check_space", lambda config: None)
    return counter


@pytest.mark.parametrize("batches", [{"feature_dtype": "fp8"}, {"tokens_per_batch": 400, "max_length": 36}])
def test_later_epochs_and_runs_read_and_learn_the_same(artefacts, tmp_path, counted, batches, monkeypatch):
    # A diagnosis would read texts again after the training.
    monkeypatch.setattr("draftsmith.train.command.explain", lambda *_: None)
    settings = {"max_steps": 15, "features": "cache", **batches}  # about three epochs of five steps
    run(config(artefacts, tmp_path / "first", **settings))
    first, counted.tokens = counted.tokens, 0
    cache = tmp_path / "first" / "feature-cache"
    run(config(artefacts, tmp_path / "again", **settings, feature_cache=cache))
    data = texts(artefacts)
    measured = counted.tokens  # the second run reads all but what it measures the noise's unit by
    assert measured < sum(data.lengths)
    # Every row once, with its padding (much of it beside short pieces), and not once in each of the three epochs.
    assert sum(data.lengths) <= first - measured < 2 * sum(data.lengths)
    run(config(artefacts, tmp_path / "few", **{**settings, "max_steps": 2}))
    part = tmp_path / "few" / "feature-cache"  # as of a run that was killed in its first epoch
    run(config(artefacts, tmp_path / "continued", **settings, feature_cache=part))
    # Nothing that is logged differs in any digit, whether it was computed or read.
    for name in ("train/loss", "val/loss", "val/tau"):
        for other in ("again", "continued"):
            assert curve(tmp_path / other, name) == curve(tmp_path / "first", name), name


def test_reader_processes_read_what_is_there(artefacts, tmp_path):
    target, data = load_lm(str(artefacts.target)), texts(artefacts)
    cache = FeatureCache(tmp_path, target.info.identity, "bf16", "float32")
    for i in range(0, 10, 2):
        cache.put(data[i]["input_ids"], target.features(data[i]["input_ids"][None])[0])
    cache.flush()
    samples = Samples(data, range(10))
    samples.cached = cache.item
    samples.collate, samples.count = pack_features, lambda batch: 1.0
    keys = [(SampleKey(0, i),) for i in range(10)]
    loader = torch.utils.data.DataLoader(samples, None, sampler=keys, num_workers=1)
    held = {tuple(data[i]["input_ids"].tolist()) for i in range(0, 10, 2)}
    for batch in loader:
        ids = tuple(batch.data.input_ids[0].tolist())
        assert (batch.data.features is not None) == (ids in held)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("collate", [collate_features, pack_features])
def test_fp8_travels_as_it_is_stored_and_is_decoded_on_the_device(artefacts, tmp_path, collate, device):
    """What the loss sees is, to the bit, what decoding each row on the host gives."""
    target, data = load_lm(str(artefacts.target)), texts(artefacts)
    cache = FeatureCache(tmp_path, target.info.identity, "fp8", "float32")
    for row in range(4):
        cache.put(data[row]["input_ids"], target.features(data[row]["input_ids"][None])[0])
    cache.flush()
    samples = Samples(data, range(4))
    samples.cached = cache.item
    shipped = collate([samples.item(row, 0) for row in range(4)])
    assert shipped.features.dtype == torch.float8_e4m3fn and shipped.scale.shape == shipped.input_ids.shape
    module = LitDrafter(EagleHead(EagleConfig.for_target(target.config)), target)
    read, states = module.read(micro_batch(shipped, 1).to(torch.device(device)))
    assert states is None
    samples.cached = lambda ids: {"features": stored(cache, ids)}
    wanted = collate([samples.item(row, 0) for row in range(4)])
    assert read.scale is None and read.features.dtype == torch.bfloat16
    assert read.features.cpu().view(torch.int16).equal(wanted.features.view(torch.int16))
