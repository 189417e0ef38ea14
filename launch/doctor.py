"""`draftsmith doctor`: versions, devices and kernels here, for a problem report."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Packages beside those of pyproject.toml that change how fast something runs, or whether it does.
OTHER_PACKAGES = ("triton", "flash-attn", "sglang", "torchao", "mkl")
VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "WANDB_MODE", "HF_HUB_OFFLINE"),
    *("CUDA_LAUNCH_BLOCKING", "NCCL_P2P_DISABLE"),
)
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """Print versions, devices, kernels and free space, for a problem report. Nothing is sent anywhere, and none of your
    paths is printed."""


def run(config: DoctorConfig) -> None:
    """Print one table for each part."""
    from draftsmith.data.console import print_facts

    for part in (software, machine, kernels, surroundings):
        print_facts(part(), part.__name__, key=part.__name__)


def software() -> dict[str, Any]:
    """Return the versions of Draftsmith and of its packages, required and optional; None if not installed."""
    from draftsmith import __version__
    from draftsmith.modules.pretrained.provenance import git_commit

    facts: dict[str, Any] = {"draftsmith": __version__, "commit": git_commit(), "python": platform.python_version()}
    requirements = importlib.metadata.requires("draftsmith") or ()
    matches = [re.match(r"[\w.-]+", line) for line in requirements if not re.search("extra == .dev", line)]
    names = [match[0] for match in matches if match is not None and match[0] != "draftsmith"]
    for name in dict.fromkeys([*names, *OTHER_PACKAGES]):
        facts[name] = None
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            facts[name] = importlib.metadata.version(name)
    return facts


def machine() -> dict[str, Any]:
    """Return processor, memory, GPUs, and the number of processes that may share them."""
    import torch

    from draftsmith.eval.meta import cpu_name

    facts: dict[str, Any] = {"system": f"{platform.system()} {platform.release()} {platform.machine()}"}
    facts["processor"] = cpu_name()
    facts["cores"] = f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} usable"
    facts["torch threads"] = torch.get_num_threads()
    with contextlib.suppress(OSError, ValueError, AttributeError):
        facts["memory"] = f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / GIB:.1f} GiB"
    facts["cuda"] = f"torch for CUDA {torch.version.cuda}" if torch.version.cuda else "torch without CUDA"
    for number in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(number)
        memory = f"{gpu.total_memory / GIB:.0f} GiB"
        facts[f"gpu {number}"] = f"{gpu.name}, {memory}, compute {gpu.major}.{gpu.minor}"

    facts["driver"] = None
    if shutil.which("nvidia-smi") is not None:
        words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            result = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
            if result.returncode == 0:
                facts["driver"] = next(iter(result.stdout.splitlines()), None)
    return facts


def kernels() -> dict[str, Any]:
    """Return which fast kernels are available."""
    import torch

    from draftsmith.modules.engine.lean import can_pack

    facts: dict[str, Any] = {"CPU vectors": torch.backends.cpu.get_cpu_capability()}
    facts["packed float32 weights"] = yes(can_pack(torch.float32))
    facts["packed bfloat16 weights"] = yes(can_pack(torch.bfloat16))
    if torch.cuda.is_available():
        facts["bfloat16 on the GPU"] = yes(torch.cuda.is_bf16_supported(including_emulation=False))
        facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return facts


def yes(available: bool) -> str:
    return "yes" if available else "no"


def surroundings() -> dict[str, Any]:
    """Return free disk space, tracking, launchers, and environment variables that matter; never the value of a key."""
    from draftsmith.train.config import has_wandb_key

    facts: dict[str, Any] = {"free here": f"{shutil.disk_usage(Path.cwd()).free / GIB:.1f} GiB"}
    facts["Weights & Biases key"] = "found" if has_wandb_key() else "none: nothing is logged there (`wandb login`)"
    facts["SLURM"] = yes(shutil.which("sbatch") is not None)
    facts |= {name: os.environ[name] for name in VARIABLES if name in os.environ}
    return facts
