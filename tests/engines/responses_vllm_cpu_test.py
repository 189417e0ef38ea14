"""`data responses --engine vllm`, with the whole engine on a CPU. Run by `make test-engines`."""

from __future__ import annotations

import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import json
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import own_code  # noqa: F401
import psutil
import pytest
import torch

from draftsmith.data.prompts import PromptsConfig
from draftsmith.data.prompts import run as make_prompts
from draftsmith.data.responses import ResponsesConfig
from draftsmith.data.responses import run as make_responses
from draftsmith.data.store.manifest import Manifest
from draftsmith.data.store.rows import Rows
from draftsmith.modules.pretrained.hub import resolve_model
from draftsmith.modules.types import InputError

torch.set_num_threads(1)
ARGS = {"enforce_eager": True, "max_num_seqs": 8, "max_model_len": 1024}
SAID = ("user", "Rename x to y in: x = 1"), ("assistant", "y = 1"), ("user", "Now wrap it in try")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve held-out prompts, and a conversation of two turns."""
    directory = tmp_path_factory.mktemp("prompts")
    rows = [json.loads(line) for line in Path(resolve_model("embedded:prompts")).read_text().splitlines()]
    talks: list[dict[str, Any]] = [{"prompt": row["prompt"]} for row in rows if row["split"] == "test"][:12]
    talks.append({"messages": [{"role": role, "content": content} for role, content in SAID]})
    source = directory / "talks.jsonl"
    source.write_text("".join(f"{json.dumps(talk)}\n" for talk in talks))
    return make_prompts(PromptsConfig(str(source), "embedded:target", directory / "made"))


def responses(prompts: Path, output: Path, **settings: Any) -> tuple[list[dict[str, Any]], Manifest]:
    config = ResponsesConfig(prompts, "embedded:target", output, max_new_tokens=48, num_threads=1, **settings)
    manifest = Manifest.read(make_responses(config))
    return Rows(manifest).read(0, 99), manifest


def test_they_are_those_of_our_own_decoder(prompts: Path, tmp_path: Path):
    args = tmp_path / "args.json"
    args.write_text(json.dumps(ARGS))
    vllm: dict[str, Any] = {"engine": "vllm", "vllm_args": args}
    theirs, manifest = responses(prompts, tmp_path / "theirs", temperature=0.0, **vllm)
    assert theirs == responses(prompts, tmp_path / "ours", temperature=0.0)[0]
    assert manifest.identity["answered_by"] == {"vllm": version("vllm"), **ARGS}
    mask = theirs[-1]["loss_mask"]
    assert mask.count(False) > theirs[-1]["loss_mask"].index(True), "the second turn was not asked"
    # A row's random numbers are its own, whatever its company. Together the prompts are longer than a step of vLLM.
    args.write_text(json.dumps({**ARGS, "max_num_batched_tokens": 1024}))
    sampled, _ = responses(prompts, tmp_path / "sampled", rows_per_shard=4, **vllm)
    assert sampled == responses(prompts, tmp_path / "again", **vllm)[0]
    assert sampled != theirs


def test_arguments_that_vllm_does_not_know_are_one_line(prompts: Path, tmp_path: Path):
    args = tmp_path / "args.json"
    args.write_text('{"nonsense": 8}')
    with pytest.raises(InputError, match=r"vllm_args: found TypeError.*nonsense"):
        responses(prompts, tmp_path / "refused", engine="vllm", vllm_args=args)


def test_its_processes_end_with_a_killed_command(prompts: Path, tmp_path: Path):
    """`kill PID` ends vLLM's processes too. They rename themselves, so the test follows them by their numbers."""
    words = ["data", "responses", "--engine", "vllm", "--data", str(prompts), "--target", "embedded:target"]
    words += ["--max-new-tokens", "900", "--ignore-eos", "--output", str(tmp_path / "killed")]
    run = f"import own_code, runpy, sys; sys.argv[1:] = {words!r}; runpy.run_module('draftsmith', None, '__main__')"
    env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen([sys.executable, "-c", run], env=env, stderr=subprocess.PIPE, text=True) as process:
        command, until = psutil.Process(process.pid), time.monotonic() + 240
        while not (own := [child for child in command.children(True) if child.name().startswith("VLLM::")]):
            assert process.poll() is None, process.stderr and process.stderr.read()
            assert time.monotonic() < until
            time.sleep(0.2)
        own = command.children(True)
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    _, alive = psutil.wait_procs(own, 30)
    assert not alive
