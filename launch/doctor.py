"""`draftsmith doctor`: what is installed here, and what of it Draftsmith can use; for a report of a problem."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Packages beside those of pyproject.toml that decide how fast, or whether, something runs.
MORE = ("triton", "flash-attn", "sglang", "torchao", "mkl")
VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "WANDB_MODE", "HF_HUB_OFFLINE"),
    *("DRAFTSMITH_VLLM_ESTIMATOR", "CUDA_LAUNCH_BLOCKING", "NCCL_P2P_DISABLE"),
)
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """Prints versions, devices, kernels and room: what a report of a problem should have with it. Nothing is sent
    anywhere, and no path of yours is in it."""


def run(config: DoctorConfig) -> None:
    from draftsmith.data.console import print_facts

    for part in (software, machine, kernels, surroundings):
        print_facts(part(), part.__name__, key=part.__name__)


def software() -> dict[str, Any]:
    """Versions: of Draftsmith, what it needs and what it can use; None of what is not installed."""
    from draftsmith import __version__
    from draftsmith.data.store.manifest import git_commit

    lines: dict[str, Any] = {"draftsmith": __version__, "commit": git_commit(), "python": platform.python_version()}
    for name in (*requirements(), *MORE):
        lines[name] = None
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            lines[name] = importlib.metadata.version(name)
    return lines


def requirements() -> Iterator[str]:
    """Names of the packages that Draftsmith names, those of its extras too but the developers', each once."""
    required = importlib.metadata.requires("draftsmith") or ()
    lines = [line for line in required if not re.search("extra == .dev", line)]
    names = (re.match(r"[\w.-]+", line) for line in lines)
    yield from dict.fromkeys(match[0] for match in names if match is not None and match[0] != "draftsmith")


def machine() -> dict[str, Any]:
    """Processor, memory and GPUs, and how many processes may share them."""
    import torch

    from draftsmith.eval.bench.results import cpu_name

    lines: dict[str, Any] = {"system": f"{platform.system()} {platform.release()} {platform.machine()}"}
    lines["processor"] = cpu_name()
    lines["cores"] = f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} usable"
    lines["torch threads"] = torch.get_num_threads()
    with contextlib.suppress(OSError, ValueError, AttributeError):
        lines["memory"] = f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / GIB:.1f} GiB"
    lines["cuda"] = f"torch for CUDA {torch.version.cuda}" if torch.version.cuda else "torch without CUDA"
    for number in range(torch.cuda.device_count()):
        of = torch.cuda.get_device_properties(number)
        lines[f"gpu {number}"] = f"{of.name}, {of.total_memory / GIB:.0f} GiB, compute {of.major}.{of.minor}"
    lines["driver"] = driver()
    return lines


def driver() -> str | None:
    """Of NVIDIA; None without one."""
    if shutil.which("nvidia-smi") is None:
        return None
    words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        made = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
        return next(iter(made.stdout.splitlines()), None) if made.returncode == 0 else None
    return None


def kernels() -> dict[str, Any]:
    """What computes here: the fast ways that Draftsmith asks for, and whether they are there."""
    import torch

    from draftsmith.modules.engine.packed import can_pack
    from draftsmith.modules.engine.quantized import can_int8

    lines: dict[str, Any] = {"CPU vectors": torch.backends.cpu.get_cpu_capability()}
    lines["packed float32 weights"] = yes(can_pack(torch.float32))
    lines["packed bfloat16 weights"] = yes(can_pack(torch.bfloat16))
    lines["int8 products"] = yes(can_int8())
    if torch.cuda.is_available():
        lines["bfloat16 on the GPU"] = yes(torch.cuda.is_bf16_supported(including_emulation=False))
        lines["flash attention"] = yes(torch.backends.cuda.flash_sdp_enabled())
        lines["memory-efficient attention"] = yes(torch.backends.cuda.mem_efficient_sdp_enabled())
    lines["NCCL"] = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None
    lines["gloo"] = yes(torch.distributed.is_available() and torch.distributed.is_gloo_available())
    return lines


def yes(there: bool) -> str:
    return "yes" if there else "no"


def surroundings() -> dict[str, Any]:
    """Room on the disk, tracking, launchers, and variables that change what is done. Values of keys are not shown."""
    from draftsmith.data.tracking import has_wandb_key

    lines: dict[str, Any] = {"free here": f"{shutil.disk_usage(Path.cwd()).free / GIB:.1f} GiB"}
    lines["Weights & Biases key"] = "found" if has_wandb_key() else "none: runs stay offline"
    lines["SLURM"] = yes(shutil.which("sbatch") is not None)
    lines["terminal"] = f"{shutil.get_terminal_size().columns} columns, {sys.stdout.encoding}"
    lines |= {name: os.environ[name] for name in VARIABLES if name in os.environ}
    return lines
