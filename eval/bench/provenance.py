"""What a reader needs to judge a measurement, or to take it again: settings, versions, models, prompts, machine."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from draftsmith.data.models.loading import tokenizer_identity
from draftsmith.data.store.manifest import command_line, git_commit, package_versions, resolved
from draftsmith.eval.bench.measure import BenchPrompt
from draftsmith.modules.targets.base import CausalLM

RESULTS = "results.json"  # what a directory of results ends with
SCHEMA_VERSION = 3


def describe(
    kind: str,
    config: Any,
    target: CausalLM,
    prompts: Sequence[BenchPrompt],
    source: str,
    models: Mapping[str, CausalLM | None],
    **more: Any,
) -> dict[str, Any]:
    """`meta` of a results.json.

    kind: of the results: bench, specdecpp, ... config: the command's settings, `target`, `device` and `seed` among
    them. source: of the prompts, as the user named it. models: role -> the smaller models, None where there is none.
    more: what else belongs there.
    """
    asked = [[prompt.prompt_ids, *prompt.later] if prompt.later else prompt.prompt_ids for prompt in prompts]
    ids = json.dumps(asked).encode()
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": kind,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command_line(f"eval {kind}", config),
        "seed": config.seed,
        "settings": resolved(config),
        "target": {**target.info.identity, **tokenizer_identity(config.target)},
        "models": {role: lm.info.identity for role, lm in models.items() if lm is not None},
        "prompts": {"source": source, "count": len(prompts), "sha256": hashlib.sha256(ids).hexdigest()},
        "versions": {**package_versions(), "python": platform.python_version()},
        "git_commit": git_commit(),
        "hardware": hardware(config.device),
        **more,
    }


def hardware(device: str) -> dict[str, Any]:
    """The machine: numbers without it mean little."""
    found = {
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
    }
    if torch.device(device).type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(torch.device(device))
    return found


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
