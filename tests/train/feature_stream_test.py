"""`--features vllm`: heads are those of stored features, whatever happens to the server on the way."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
from eagle_trainings import config
from safetensors.torch import load_file
from states_server import StatesServer
from tiny_models import tiny_llama_dir

from draftsmith.data.engines import vllm_states
from draftsmith.data.features import FeaturesConfig
from draftsmith.data.features import run as make_features
from draftsmith.data.responses import ResponsesConfig
from draftsmith.data.responses import run as make_responses
from draftsmith.data.store.datasets import open_dataset
from draftsmith.data.store.spool import row_name
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.types import InputError
from draftsmith.train import features
from draftsmith.train.command import run

FINAL = (2,)  # the target has two layers


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
    more = {"features": "vllm", "feature_server": server.url, "tau_prompts": 0, "feature_window": 2e-5, **changes}
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
    assert "those of our own engine, off by" in capsys.readouterr().err
    # A window of 20 kB, and the headers of its files.
    assert 0 < most < 40_000
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
        if seen == 40:
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
        ({"layers": (1,)}, "states of layer 2 off by .* nearest to layer 1"),
        ({"layers": (1, 2)}, "states of width 64, expected 1 layers of 32"),
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


def test_another_model_at_the_server_is_refused(artifacts, tmp_path):
    other = load_lm(str(artifacts.draft))
    with StatesServer(other, (1,), tmp_path / "spool") as server, pytest.raises(InputError, match="off by"):
        streamed(artifacts, server, tmp_path / "run")


def test_no_server_is_one_line(artifacts, tmp_path):
    with pytest.raises(InputError, match=r"server: found nothing that listens at http://127.0.0.1:9, expected a vLLM"):
        run(config(artifacts, tmp_path, data=artifacts.responses, features="vllm", feature_server="http://127.0.0.1:9"))


def features_config(artifacts, server, output):
    return FeaturesConfig(
        responses=artifacts.responses,
        target=str(artifacts.target),
        output=output,
        engine="vllm",
        server=server.url,
        rows_per_shard=20,
        num_threads=1,
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
        for item, own in zip(made, open_dataset(artifacts.features), strict=True):
            assert all(torch.equal(item[name], own[name]) for name in own)
        # One shard is made again, and nothing if nothing is missing.
        (settings.output / "shard-00001.done.json").unlink()
        server.rows.clear()
        make_features(settings)
        assert len(set(server.rows) & set(stored)) == len({row_name(made[i]["input_ids"]) for i in range(20, 40)})
        server.rows.clear()
    make_features(settings)  # the server is gone
    assert not server.rows and "already complete" in capsys.readouterr().err


def test_a_mixture_of_experts_gives_its_states_to_a_dense_head(artifacts, tmp_path, capsys):
    """Its layers are not ours, so that the numbering is not compared; the target runs by transformers at the server."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    path = str(tiny_llama_dir(tmp_path / "experts", family="qwen3_moe", **experts))
    responses = make_responses(ResponsesConfig(artifacts.prompts, path, tmp_path / "responses", max_new_tokens=12))
    target = load_lm(path)
    with StatesServer(target, FINAL, tmp_path / "spool") as server:
        more = {"data": responses, "target": path, "features": "vllm", "feature_server": server.url}
        served = run(config(artifacts, tmp_path / "served", **more))
    assert "are not compared with our own" in capsys.readouterr().err
    stored = make_features(FeaturesConfig(responses, path, tmp_path / "features"))
    here = run(config(artifacts, tmp_path / "here", data=stored, target=path, tau_prompts=0))
    for name, value in weights(here).items():
        # States of a row alone and of padded batches differ in the last bit of bf16 now and then.
        torch.testing.assert_close(weights(served)[name], value, rtol=0, atol=1e-3)
