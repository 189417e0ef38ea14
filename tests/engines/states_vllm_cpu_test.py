"""Hidden states from the whole vLLM engine on a CPU, as `data features` stores them and as a training drains them: they
are those of our own engine, whatever is killed on the way. Run by `make test-engines`."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from exported import FIGURES
from safetensors.torch import load_file

from draftsmith.data.features import FeaturesConfig
from draftsmith.data.features import run as make_features
from draftsmith.data.prompts import PromptsConfig
from draftsmith.data.prompts import run as make_prompts
from draftsmith.data.responses import ResponsesConfig
from draftsmith.data.responses import run as make_responses
from draftsmith.data.store.datasets import open_dataset
from draftsmith.modules.formats.readings import other_weights
from draftsmith.modules.pretrained.heads import build_head, load_head, save_head, stored_tensors
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.types import InputError
from draftsmith.train.tau import ANSWERS, TauProbe, answer_prompts, read_answers

sys.path.insert(0, str(Path(__file__).parents[1]))  # the other tests' helpers
from worlds import quick_eagle3_head

torch.set_num_threads(1)
TARGET, ROWS = "embedded:target", 120
TARGETED = ["--target", TARGET, "--drafter", "eagle3", "--dtype", "float32"]
SERVE = ["--enforce-eager", "--max-num-seqs", "8", "--max-model-len", "1024"]
TRAIN = [
    "--config",
    "eagle3-embedded",
    "--target",
    TARGET,
    "--loggers",
    "csv",
    "--num-threads",
    "1",
]
TRAIN += ["--max-steps", "60", "--save-every", "10", "--val-every", "30", "--log-every", "10"]


@pytest.fixture(scope="module")
def responses(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("texts")
    prompts = make_prompts(PromptsConfig("embedded:prompts", TARGET, root / "prompts"))
    more: dict[str, Any] = {"limit": ROWS, "max_new_tokens": 96, "num_threads": 1}
    return make_responses(ResponsesConfig(prompts, TARGET, root / "responses", **more))


@pytest.fixture(scope="module")
def own(responses: Path) -> Path:
    """Features by our own engine, in float32 before they are stored."""
    return make_features(config(responses, responses.parent / "own"))


def config(responses: Path, output: Path, **changes: Any) -> FeaturesConfig:
    return FeaturesConfig(responses, TARGET, output, "eagle3", num_threads=1, **changes)


def compare(made: Path, own: Path, tolerance: float) -> float:
    """Return the share of stored numbers that differ, and check that none is off by more than tolerance of itself.

    bf16 keeps 8 bits: where two float32 numbers lie on different sides of an edge, they are stored 2^-8 apart.
    """
    differing = total = 0
    theirs, ours = open_dataset(made), open_dataset(own)
    assert len(theirs) == len(ours) == ROWS
    for one, other in zip(theirs, ours, strict=True):
        assert torch.equal(one["input_ids"], other["input_ids"]) and torch.equal(one["loss_mask"], other["loss_mask"])
        left, right = one["features"].float(), other["features"].float()
        # 1e-4 of the row's scale beside it, for numbers near zero.
        torch.testing.assert_close(left, right, rtol=tolerance, atol=1e-4 * float(right.abs().max()))
        differing, total = differing + int((left != right).sum()), total + left.numel()
    return differing / total


def served(responses: Path, output: Path, words: list[str], *options: str, **changes: Any) -> Path:
    """Features of a server that is started with these words, and options of `vllm serve`."""
    with serving(output.with_name(f"{output.name}-states"), words, *options) as server:
        return make_features(config(responses, output, server=server.url, **changes))


def test_states_are_those_of_our_own_engine(responses: Path, own: Path, tmp_path: Path):
    share = compare(served(responses, tmp_path / "made", TARGETED), own, 2**-7)
    FIGURES.append(f"vLLM's states in float32: {share:.2%} of the numbers are rounded to another bf16 number than ours")
    assert share < 0.01

    bf16 = served(responses, tmp_path / "bf16", [*TARGETED[:-1], "bfloat16"])
    here = make_features(config(responses, tmp_path / "here", dtype="bfloat16"))
    errors = [distance(directory, own) for directory in (bf16, here)]
    FIGURES.append("states in bf16, median distance to float32's: vLLM {:.2%}, our own engine {:.2%}".format(*errors))
    assert errors[0] < 2 * errors[1]


def distance(made: Path, own: Path) -> float:
    """Median over tokens of the distance between states, as a share of their length."""
    away = []
    for one, other in zip(open_dataset(made), open_dataset(own), strict=True):
        left, right = one["features"].float(), other["features"].float()
        away.append((left - right).norm(dim=-1) / right.norm(dim=-1))
    return float(torch.cat(away).median())


def test_two_workers_with_a_prefix_cache_and_fp8(responses: Path, own: Path, tmp_path: Path):
    """A cached prefix keeps its states, because they lie in blocks of the same cache."""
    settings: dict[str, Any] = {"feature_dtype": "fp8", "rows_per_shard": 50}
    words = [*TARGETED, "--feature-dtype", "fp8"]
    options = "--tensor-parallel-size", "2", "--enable-prefix-caching"
    made = served(responses, tmp_path / "made", words, *options, **settings)
    here = make_features(config(responses, tmp_path / "here", **settings))
    # fp8 keeps 4 bits.
    assert compare(made, here, 2**-3) < 0.01


class Server:
    """`draftsmith launch vllm` in a process group of its own. words: its options. options: of `vllm serve`."""

    def __init__(self, directory: Path, words: list[str], *options: str):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url, self.directory, self.words = f"http://127.0.0.1:{self.port}", directory, words
        self.options = options

    def start(self) -> None:
        words = [sys.executable, "-m", "draftsmith", "launch", "vllm", *self.words]
        words += ["--states", str(self.directory), "--engine-path", sys.executable]
        words += ["--", *SERVE, *self.options, "--port", str(self.port)]
        log = self.directory.with_suffix(".log").open("ab")
        self.process = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
        until = time.monotonic() + 180
        while time.monotonic() < until and self.process.poll() is None:
            with suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health").is_success:
                    return
            time.sleep(0.5)
        raise AssertionError(self.directory.with_suffix(".log").read_text()[-3000:])

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def serving(directory: Path, words: list[str], *options: str) -> Iterator[Server]:
    server = Server(directory, words, *options)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@pytest.mark.parametrize("mistake", [None, "weights"])
def test_a_server_that_runs_the_target_gives_the_same_diagnosis(responses: Path, tmp_path: Path, mistake: str | None):
    """On greedy answers: vLLM's CPU build samples wrong ones beside the states, as with any drafter
    (certify_vllm_cpu_test.py)."""
    target = load_lm(TARGET)
    more: dict[str, Any] = {"limit": 24, "max_new_tokens": 96, "num_threads": 1, "temperature": 0.0}
    greedy = make_responses(ResponsesConfig(responses.parent / "prompts", TARGET, tmp_path / "greedy", **more))
    rows = [item["input_ids"][-64:].tolist() for item in open_dataset(greedy)]
    head = quick_eagle3_head(target, rows, 200)
    state = stored_tensors(head)
    if mistake is not None:
        state = next(other.state for other in other_weights(head.config, state) if "twice" in other.label)
    planted = build_head(head.kind, head.config, state)
    save_head(tmp_path / "head", planted, {"target": target.info.identity}, "card")
    command = [sys.executable, "-m", "draftsmith", "diagnose", str(tmp_path / "head"), "--target", TARGET]
    command += ["--data", str(greedy)]
    layers = ["--layers", *map(str, range(1, target.info.num_layers + 1))]
    with serving(tmp_path / "states", ["--target", TARGET, "--dtype", "float32", *layers]) as server:
        found = [
            subprocess.run([*command, *more], capture_output=True, text=True, check=True).stdout.splitlines()
            for more in ([], ["--server", server.url])
        ]
    # The same findings, verdicts and causes, and shares within 1 %.
    assert [line[:20] for line in found[0]] == [line[:20] for line in found[1]]
    causes = [line for line in found[1] if line.startswith("Likeliest cause")]
    assert mistake is None or causes[0].startswith(f"Likeliest cause ({mistake})")
    own, served = ([float(number) for number in re.findall(r"\d+\.\d+", "\n".join(lines))] for lines in found)
    # Of those above 5 %: a token more or less is 1 % of a smaller one.
    worst = max(abs(a - b) / a for a, b in zip(own, served, strict=True) if a > 0.05)
    FIGURES.append(f"diagnosis by a server ({mistake or 'sound'}): {len(own)} numbers within {worst:.1%}")
    assert worst < 0.01


def steps(output: Path) -> int:
    return max((int(path.name[5:]) for path in output.glob("checkpoints/step-*") if path.suffix == ""), default=0)


def wait_for(output: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 300
    while steps(output) < step and time.monotonic() < until:
        assert process.poll() is None, "the training ended"
        time.sleep(0.02)


def test_a_training_drains_a_server_and_survives_kills_of_both(responses: Path, own: Path, tmp_path: Path):
    expected = tmp_path / "stored"
    base = [sys.executable, "-m", "draftsmith", "train", "eagle3", *TRAIN]
    subprocess.run([*base, "--data", str(own), "--output", str(expected)], check=True)
    output = tmp_path / "streamed"
    with serving(tmp_path / "states", TARGETED) as server:
        # The layers of this server are not those of another drafter, or of other options.
        for wrong in ({"layers": (3, 6, 9)}, {"layers": (2, 6)}, {"layers": (1, 6, 9)}):
            with pytest.raises(InputError, match="server: found"):
                make_features(config(responses, tmp_path / "wrong", server=server.url, **wrong))
        made = make_features(config(responses, tmp_path / "made", server=server.url))
        assert compare(made, own, 2**-7) < 0.01

        words = [*base, "--data", str(responses), "--server", server.url]
        words += ["--output", str(output)]
        training = subprocess.Popen(words)
        try:
            wait_for(output, 10, training)
            server.kill()
            time.sleep(2)
            server.start()
            wait_for(output, 30, training)
        finally:
            training.kill()
            training.wait()
        left = sum(path.stat().st_size for path in (tmp_path / "states").rglob("*.safetensors"))
        assert left < 6e6, "more than two steps"
        assert subprocess.run(words).returncode == 0
        assert not list((tmp_path / "states").rglob("*.safetensors"))
    heads = [load_file(directory / "last" / "model.safetensors") for directory in (expected, output)]
    away = max(float((heads[1][name] - value).norm() / value.norm()) for name, value in heads[0].items())
    FIGURES.append(f"a head from a server, both sides killed: weights within {away:.1e} of those from stored features")
    assert away < 1e-3

    # The server's answers are the target's own, and tau along them is that along its own states.
    target = load_lm(TARGET)
    kept = read_answers(output / ANSWERS, target)
    here = answer_prompts(target, None, [answered.prompt for answered in kept])
    same = sum(mine.ids == answered.ids for mine, answered in zip(here, kept, strict=True))
    head = load_head(output / "last", target, kind="eagle3")
    layers, depth = head.loss_layers(head.config, target.info.num_layers), 3  # ttt_steps
    taus = [TauProbe(target, layers, depth, answers)(head, torch.device("cpu")) for answers in (kept, here)]
    measured = json.loads((output / "last" / "manifest.json").read_text())["metrics"]
    FIGURES.append(
        f"val/tau by a server {measured['tau']:.4f}, here {taus[1]['tau']:.4f}; {same} of {len(kept)} answers equal"
    )
    assert {name: measured[name] for name in taus[0]} == pytest.approx(taus[0])
    assert len(kept) == same > 0 and measured["tau"] == pytest.approx(taus[1]["tau"], rel=0.02)
