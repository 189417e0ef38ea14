"""What every results.json of `draftsmith eval` says of its run: settings, prompts, versions and machine."""

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

from draftsmith.data.store.manifest import command_line, resolved
from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.modules.pretrained.provenance import git_commit, package_versions
from draftsmith.modules.pretrained.reading import read_object
from draftsmith.modules.types import InputError

RESULTS = "results.json"  # written last
MEASURE = "Measure it again."


def describe(
    kind: str, config: Any, prompts: Sequence[BenchPrompt] = (), source: str = "", **more: Any
) -> dict[str, Any]:
    """Build `meta` of a results.json: what its numbers hold for, and how to measure them again.

    kind: bench, served, ... config: the command's options. source: of the prompts, as the user named it. more: further
    entries.
    """
    # Later turns are part of what is asked.
    asked = [[prompt.prompt_ids, *prompt.later] if prompt.later else prompt.prompt_ids for prompt in prompts]
    digest = hashlib.sha256(json.dumps(asked).encode()).hexdigest()
    device = getattr(config, "chosen_device", None)
    return {
        "kind": kind,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command_line(f"eval {kind}", config),
        "settings": resolved(config) | ({"device": device} if device else {}),
        "prompts": {"source": source, "count": len(prompts), "sha256": digest},
        "versions": {**package_versions(), "python": platform.python_version()},
        "git_commit": git_commit(),
        "hardware": hardware(device or "cpu"),
        **more,
    }


def read_results(directory: Path, shape: Mapping[str, Any]) -> dict[str, Any]:
    """Read results.json of a finished run.

    Raises:
        InputError: no such directory, no results in it, or damaged ones.
    """
    if not (directory / RESULTS).exists():
        found, remedy = f"no directory {directory}", "Check the path."
        if directory.is_dir():
            found, remedy = f"no {RESULTS} in {directory}", "Run its command again: it continues with what is left."
        raise InputError("runs", found, "a finished run, which ends by writing it", remedy)
    return read_object(directory / RESULTS, shape, MEASURE)


def hardware(device: str) -> dict[str, Any]:
    """Describe the machine: speeds mean little without it."""
    facts = {
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
    }
    if torch.device(device).type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(torch.device(device))
    return facts


def cpu_name() -> str:
    """Return the model of the CPU; `platform` knows only its architecture on Linux."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
