"""Features of the target in a training, computed in the step, stored, or from a server: the head learns the same."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from states_server import StatesServer
from trainings import a_module, config, losses, micro_batch, texts
from transformers import AutoModelForCausalLM, AutoTokenizer
from worlds import DEVICES, tiny_llama_dir

import draftsmith
from draftsmith.data import prompts
from draftsmith.data.engines import vllm_states
from draftsmith.data.engines.served_proof import ANSWERED_ROWS
from draftsmith.data.features import FeaturesConfig, text_dataset
from draftsmith.data.features import run as make_features
from draftsmith.data.responses import ResponsesConfig
from draftsmith.data.responses import run as make_responses
from draftsmith.data.store import feature_codec
from draftsmith.data.store.datasets import collate_features, open_dataset, pack_features
from draftsmith.data.store.manifest import Manifest
from draftsmith.data.store.spool import row_name
from draftsmith.modules.drafters.eagle import EagleConfig, EagleHead
from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.types import FeatureBatch, InputError
from draftsmith.train import features
from draftsmith.train.command import run
from draftsmith.train.config import TrainDrafterConfig
from draftsmith.train.data import MicroBatch
from draftsmith.train.module import LitDrafter


def in_step(artifacts, output: Path, **changes) -> TrainDrafterConfig:
    return config(artifacts, output, **{"data": artifacts.responses, "log_every": 1, **changes})


def part_of(batch: FeatureBatch) -> MicroBatch:
    return micro_batch(batch, EagleHead.loss_count(batch, EagleHead.Settings()))


def test_features_are_transformers_states_packed_or_padded(artifacts, tmp_path):
    """Without gradient, and in float32 under autocast too."""
    oracle = AutoModelForCausalLM.from_pretrained(artifacts.target, dtype=torch.float32).eval()
    data, module, rows = texts(artifacts), a_module(artifacts, tmp_path, noise=0.0), (0, 5, 6)
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


def test_training_online_is_training_on_a_features_artifact_but_for_its_rounding(artifacts, tmp_path):
    run(in_step(artifacts, tmp_path / "online"))
    run(in_step(artifacts, tmp_path / "stored", data=artifacts.features))
    # bf16 keeps 8 bits of the features' mantissas: losses differ by far less than 2^-8 of theirs, as rounding averages.
    assert losses(tmp_path / "online") == pytest.approx(losses(tmp_path / "stored"), rel=4e-3)
    assert losses(tmp_path / "online") != losses(tmp_path / "stored")
    for name in ("val/loss", "val/top1"):
        # top1 counts few tokens: a near tie that falls the other way is one of them.
        online, stored = losses(tmp_path / "online", name), losses(tmp_path / "stored", name)
        assert len(online) == len(stored) and online == pytest.approx(stored, rel=0.05), name


def test_data_that_no_head_can_be_trained_on_is_named(artifacts, tmp_path):
    def refused(words: str, **changes) -> None:
        with pytest.raises(InputError, match=words):
            run(in_step(artifacts, tmp_path / "run", **changes))

    refused(r"made with another target\.config", target=str(artifacts.draft))
    refused("expected kind responses or prompts or features", data=artifacts.acceptance)
    refused("expected responses to compute them of", data=artifacts.features, server="http://127.0.0.1:9")
    refused("data: found prompts without answers", data=artifacts.responses.parent / "prompts")


def test_in_python_too_data_of_another_target_and_without_answers_is_refused(artifacts, tmp_path):
    target = draftsmith.load_target(str(artifacts.draft))
    settings = draftsmith.settings("eagle", max_steps=1, val_share=0.2, output=tmp_path / "run")
    module = LitDrafter(draftsmith.new_head(settings, target), target, settings)
    for data in (artifacts.responses, open_dataset(artifacts.responses)):
        with pytest.raises(InputError, match=r"made with another target\.config"):
            draftsmith.fit(module, draftsmith.HeadDataModule(data, None, settings))
    with pytest.raises(InputError, match="train: found prompts without answers, expected responses"):
        draftsmith.HeadDataModule(artifacts.responses.parent / "prompts", None, settings)


def test_data_made_with_another_template_of_the_target_is_refused(artifacts, tmp_path):
    """Unless that template came from a file of its own."""
    changed = shutil.copytree(artifacts.target, tmp_path / "target")
    (template := changed / "chat_template.jinja").write_text(f"{template.read_text()} ")
    # What to make again is the prompts: no other stage applies a template.
    what = r"another own_template: \w+ here, \w+ given, .* Make its prompts again first \(draftsmith data prompts\)"
    for data in (artifacts.responses, artifacts.features):
        with pytest.raises(InputError, match=what):
            run(in_step(artifacts, tmp_path / "run", target=str(changed), data=data))
    asked = Path(Manifest.read(artifacts.responses).config["data"])
    what = "made with another own_template: .* Make it again: draftsmith data prompts --source"
    with pytest.raises(InputError, match=what):
        make_responses(ResponsesConfig(asked, str(changed), tmp_path / "answers"))
    (source := tmp_path / "rows.jsonl").write_text('{"prompt": "def add", "answer": "return"}')
    made = {"source": str(source), "target": str(artifacts.target), "output": tmp_path / "prompts", "supervised": True}
    directory = prompts.run(prompts.PromptsConfig(**made, chat_template=artifacts.target / template.name))
    assert len(text_dataset(directory, Checkpoint(changed))) == 1


def test_a_template_that_is_stored_otherwise_is_the_same(artifacts, tmp_path):
    moved = shutil.copytree(artifacts.target, tmp_path / "target")
    text = (moved / "chat_template.jinja").read_text()
    (moved / "chat_template.jinja").unlink()
    settings = json.loads((moved / "tokenizer_config.json").read_text())
    for template in (text, [{"name": "default", "template": text}]):
        (moved / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
        assert len(text_dataset(artifacts.responses, Checkpoint(moved))) > 0
    AutoTokenizer.from_pretrained(moved).save_pretrained(tmp_path / "saved")
    shutil.copytree(moved, tmp_path / "saved", dirs_exist_ok=True, ignore=lambda *_: ["tokenizer_config.json"])
    assert len(text_dataset(artifacts.responses, Checkpoint(tmp_path / "saved"))) > 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("collate", [collate_features, pack_features])
def test_fp8_travels_as_it_is_stored_and_is_decoded_on_the_device(artifacts, collate, device):
    """What the loss sees is, to the bit, what decoding each row on the host gives."""
    target, data = load_lm(str(artifacts.target)), texts(artifacts)
    items = [data[row] for row in range(4)]
    stored = [feature_codec.encode(target.features(item["input_ids"][None])[0], "fp8") for item in items]
    shipped = collate([item | feature_codec.as_item(kept) for item, kept in zip(items, stored, strict=True)])
    assert shipped.features.dtype == torch.float8_e4m3fn and shipped.scale.shape == shipped.input_ids.shape
    module = LitDrafter(EagleHead(EagleConfig.for_target(target.config)), target)
    read, states = module.read(micro_batch(shipped, 1).to(torch.device(device)))
    assert states is None
    decoded = [{"features": feature_codec.decode(kept)} for kept in stored]
    wanted = collate([item | kept for item, kept in zip(items, decoded, strict=True)])
    assert read.scale is None and read.features.dtype == torch.bfloat16
    assert read.features.cpu().view(torch.int16).equal(wanted.features.view(torch.int16))


FINAL = (3,)  # the target has two layers


@pytest.fixture(autouse=True)
def every_client_is_closed():
    yield
    assert not [thread.name for thread in threading.enumerate() if thread.name == "draftsmith-states"]


@pytest.fixture
def stored(artifacts):
    """Row name -> the states that `data features` has stored."""
    return {row_name(item["input_ids"]): item["features"] for item in open_dataset(artifacts.features)}


@pytest.fixture
def target(artifacts):
    return load_lm(str(artifacts.target))


def streamed(artifacts, server, output, **changes):
    more = {"server": server.url, "tau_prompts": 0, **changes}
    return run(config(artifacts, output, data=artifacts.responses, **more))


def weights(best):
    return load_file(best / "model.safetensors")


@pytest.fixture
def expected(artifacts, tmp_path):
    return weights(run(config(artifacts, tmp_path / "stored", tau_prompts=0)))


def test_a_head_is_that_of_stored_features_and_the_target_is_not_loaded(
    artifacts, target, stored, expected, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("draftsmith.train.prepare.load_lm", None)
    most = 0

    def watch(row):
        nonlocal most
        most = max(most, sum(path.stat().st_size for path in (tmp_path / "spool").rglob("*.safetensors")))

    with StatesServer(target, FINAL, tmp_path / "spool", stored, watch) as server:
        trained = weights(streamed(artifacts, server, tmp_path / "run"))
    assert all(torch.equal(trained[name], value) for name, value in expected.items())
    assert "nat to the files, 0.0% other choices" in capsys.readouterr().err
    # Two steps of 8 rows of 44 tokens, and the headers of its files: of 48 rows.
    assert 0 < most < 60_000
    header = (tmp_path / "run" / "metrics.csv").read_text().splitlines()[0]
    assert {"cost/features_mb_s", "cost/features_mb_s_needed", "cost/server_idle"} <= set(header.split(","))
    assert not [path for path in (tmp_path / "spool").rglob("*") if path.is_file()]


def test_a_server_that_is_killed_and_comes_back_changes_nothing(artifacts, target, stored, expected, tmp_path):
    seen = 0

    def break_down(row):
        nonlocal seen
        seen += 1
        if seen == 40:
            threading.Thread(target=restart).start()
            time.sleep(0.1)
            raise ConnectionError

    def restart():
        server.stop()
        time.sleep(0.5)
        server.start()

    with StatesServer(target, FINAL, tmp_path / "spool", stored, break_down) as server:
        trained = weights(streamed(artifacts, server, tmp_path / "run"))
    assert seen > 40 and all(torch.equal(trained[name], value) for name, value in expected.items())


def test_a_signal_ends_a_run_whose_server_is_gone(artifacts, target, stored, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(features, "GRACE_S", 0.2)
    seen = 0

    def die(row):
        nonlocal seen
        seen += 1
        if seen == 60:
            threading.Thread(target=end).start()
            raise ConnectionError

    def end():
        server.stop()
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGTERM)

    server = StatesServer(target, FINAL, tmp_path / "spool", stored, die)
    server.start()
    with pytest.raises(SystemExit) as ended:
        streamed(artifacts, server, tmp_path / "run")
    assert ended.value.code == 143 and "Continue by the same command" in capsys.readouterr().err


def test_a_row_whose_file_never_comes_is_asked_for_again_and_then_given_up(
    artifacts, target, stored, expected, tmp_path, monkeypatch
):
    monkeypatch.setattr(vllm_states, "LATE_S", 0.2)
    with StatesServer(target, FINAL, tmp_path / "spool", stored) as server:
        put, lost = server.writer.put, []

        def lose_one(folder, name, *rest):
            # Of a training row, not of those that are compared first.
            if name in stored and not lost:
                lost.append(name)
            else:
                put(folder, name, *rest)

        server.writer.put = lose_one
        trained = weights(streamed(artifacts, server, tmp_path / "run"))
        assert lost and all(torch.equal(trained[name], value) for name, value in expected.items())
        server.writer.put = lambda folder, name, *rest: None if name in stored else put(folder, name, *rest)
        with pytest.raises(InputError, match="no states of a row in 3 attempts"):
            streamed(artifacts, server, tmp_path / "other")


@pytest.mark.parametrize(
    "served, message",
    [
        ({"layers": (1,)}, "teacher: found"),
        ({"layers": (1, 3)}, "states of width 64, expected 1 layers of 32"),
        ({"layers": FINAL, "connector": False}, "without our connector"),
    ],
)
def test_states_of_another_numbering_are_refused_before_the_first_step(artifacts, target, tmp_path, served, message):
    with StatesServer(target, directory=tmp_path / "spool", **served) as server:
        with pytest.raises(InputError, match=message):
            streamed(artifacts, server, tmp_path / "run")
        with pytest.raises(InputError, match=message):
            make_features(features_config(artifacts, server, tmp_path / "features"))
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert not list((tmp_path / "features").glob("shard*"))


def test_states_of_another_layer_beside_a_proved_last_one_are_refused(artifacts, target, tmp_path):
    with StatesServer(target, (0, 3), tmp_path / "spool") as server:
        settings = features_config(artifacts, server, tmp_path / "features", drafter="eagle3", layers=(1,))
        with pytest.raises(InputError, match=r"states of layer 1 off by .* nearest to layer 0"):
            make_features(settings)


def test_no_server_is_one_line(artifacts, tmp_path):
    with pytest.raises(InputError, match=r"server: found no connection to http://127.0.0.1:9 \(.*\), expected a vLLM"):
        run(config(artifacts, tmp_path, data=artifacts.responses, server="http://127.0.0.1:9"))


def features_config(artifacts, server, output, **changes):
    return FeaturesConfig(
        data=artifacts.responses,
        target=str(artifacts.target),
        output=output,
        server=server.url,
        rows_per_shard=20,
        num_threads=1,
        **changes,
    )


def test_stored_features_of_a_server_are_our_own_and_resume(artifacts, target, stored, tmp_path, capsys):
    seen = 0

    def fail(row):
        nonlocal seen
        seen += 1
        if seen > 30:
            raise KeyboardInterrupt

    with StatesServer(target, FINAL, tmp_path / "spool", stored) as server:
        settings = features_config(artifacts, server, tmp_path / "features")
        make_features(settings)
        made = open_dataset(settings.output, "features", {"target": target.info.identity})
        assert made.manifest.identity["read_by"] == {"vllm": "0.32.0"}
        assert made.manifest.teacher["norm"] == "rms" and made.manifest.teacher["median"] < 0.1
        for item, own in zip(made, open_dataset(artifacts.features), strict=True):
            assert all(torch.equal(item[name], own[name]) for name in own)
        # One shard is made again, and nothing if nothing is missing.
        (settings.output / "shard-00001.done.json").unlink()
        server.rows.clear()
        make_features(settings)
        # Those of the proof too.
        again = {row_name(made[i]["input_ids"]) for i in (*range(ANSWERED_ROWS), *range(20, 40))}
        assert set(server.rows) & set(stored) == again
        server.rows.clear()
    make_features(settings)  # the server is gone
    assert not server.rows and "already done" in capsys.readouterr().err


def test_a_mixture_of_experts_gives_its_states_to_a_dense_head(artifacts, tmp_path, capsys):
    """The target runs by transformers at the server, which is compared with its files."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    path = str(tiny_llama_dir(tmp_path / "experts", family="qwen3_moe", **experts))
    responses = make_responses(ResponsesConfig(artifacts.prompts, path, tmp_path / "responses", max_new_tokens=12))
    target = load_lm(path)
    with StatesServer(target, FINAL, tmp_path / "spool") as server:
        more = {"data": responses, "target": path, "server": server.url}
        served = run(config(artifacts, tmp_path / "served", **more))
    assert "nat to the files, 0.0% other choices" in capsys.readouterr().err
    stored = make_features(FeaturesConfig(responses, path, tmp_path / "features"))
    here = run(config(artifacts, tmp_path / "here", data=stored, target=path, tau_prompts=0))
    for name, value in weights(here).items():
        # States of a row alone and of padded batches differ in the last bit of bf16 now and then.
        torch.testing.assert_close(weights(served)[name], value, rtol=0, atol=1e-3)
