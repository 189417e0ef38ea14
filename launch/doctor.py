"""`draftsmith doctor`: versions, devices and kernels here, for a problem report."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Packages beside those of pyproject.toml that change how fast something runs, or whether it does.
OTHER_PACKAGES = ("triton", "flash-attn", "sglang", "torchao", "mkl")
VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "WANDB_MODE", "HF_HUB_OFFLINE")
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """Print versions, devices, kernels and free space, for a problem report. Nothing is sent anywhere, and none of your
    paths is printed."""


def run(config: DoctorConfig) -> None:
    """Print one table for the packages, and one for the machine."""
    from draftsmith.data.console import print_facts

    print_facts(software(), "software", key="software")
    print_facts(machine(), "machine", key="machine")


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
    """Return processors, memory, GPUs, fast kernels, free space and what of the environment changes a run; never the
    value of a key."""
    import torch

    from draftsmith.eval.meta import cpu_name
    from draftsmith.modules.engine.lean import can_pack
    from draftsmith.train.config import has_wandb_key

    facts: dict[str, Any] = {"system": f"{platform.system()} {platform.release()} {platform.machine()}"}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts |= {"processor": cpu_name(), "cores": f"{cores} usable, {torch.get_num_threads()} threads of torch"}
    with contextlib.suppress(OSError, ValueError, AttributeError):
        facts["memory"] = f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / GIB:.1f} GiB"
    packed = [str(dtype)[6:] for dtype in (torch.float32, torch.bfloat16) if can_pack(dtype)]
    facts["CPU vectors"] = torch.backends.cpu.get_cpu_capability()
    facts["packed weights"] = ", ".join(packed) or "no type"
    facts["cuda"] = f"torch for CUDA {torch.version.cuda}" if torch.version.cuda else "torch without CUDA"
    for number in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(number)
        facts[f"gpu {number}"] = f"{gpu.name}, {gpu.total_memory / GIB:.0f} GiB, compute {gpu.major}.{gpu.minor}"
    driver = Path("/proc/driver/nvidia/version")
    facts["driver"] = driver.read_text().splitlines()[0] if driver.exists() else None
    facts["free here"] = f"{shutil.disk_usage(Path.cwd()).free / GIB:.1f} GiB"
    facts["SLURM"] = "yes" if shutil.which("sbatch") else "no"
    facts["Weights & Biases key"] = "found" if has_wandb_key() else "none: nothing is logged there (`wandb login`)"
    return facts | {name: os.environ[name] for name in VARIABLES if name in os.environ}
