"""Targets that are larger than one device, as transformers spreads them.

device_map: accelerate puts the layers one after the other onto the GPUs that this process sees; one works at a time.
tensor: every layer is split over all processes, which work at the same time, on the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

from draftsmith.data.ranks import place
from draftsmith.modules.types import InputError

DONE = -1
# Whole on every rank: each rank embeds and scores tokens of its own, when it trains a head on them.
WHOLE = {"lm_head": "replicate", "model.embed_tokens": "replicate"}


def placement(parallel: str, raw: dict[str, Any]) -> dict[str, Any]:
    """What `from_pretrained` is told. raw: the model's config.json.

    Raises:
        InputError: the processes of this job do not fit it, or a package is missing.
    """
    here = place()
    if parallel == "none":
        return {}
    if parallel == "device_map":
        if here.local_world > 1:
            found = f"device_map with {here.local_world} processes on this machine"
            remedy = "Start one process, or use --target-parallel tensor."
            raise InputError("target_parallel", found, "one, which has all GPUs", remedy)
        if not _installed("accelerate"):
            remedy = 'Install it: pip install "draftsmith[large]"'
            raise InputError("target_parallel", "device_map without the package accelerate", "accelerate", remedy)
        return {"device_map": "auto"}
    assert parallel == "tensor"
    if here.world == 1 or here.world != here.local_world:
        found = f"tensor with {here.world} processes, {here.local_world} of them on this machine"
        expected = "several processes on one machine, one for each GPU"
        raise InputError("target_parallel", found, expected, "Launch with torchrun --nproc-per-node N.")
    text = raw.get("text_config") or raw
    heads = text.get("num_key_value_heads") or text.get("num_attention_heads") or here.world
    if heads % here.world:
        found = f"tensor with {here.world} processes"
        remedy = "Start another number of them, or use device_map."
        raise InputError("target_parallel", found, f"a divisor of the {heads} key/value heads", remedy)
    try:
        from transformers.distributed import DistributedConfig

        config = DistributedConfig(tp_size=here.world, tp_plan=WHOLE)
    except (ImportError, TypeError) as error:
        found = "tensor with a transformers that does not have it"
        raise InputError("target_parallel", found, "5.20 or later", "pip install -U transformers") from error
    return {"distributed_config": config}


def check_placed(model: Any, parallel: str) -> None:
    """Raises:
    InputError: some layers did not fit the devices, or the model has no plan that keeps its embeddings whole.
    """
    if parallel == "device_map":
        # There is no map where one device holds everything.
        devices = {str(device) for device in getattr(model, "hf_device_map", {}).values()}
        outside = sorted(devices & ({"cpu", "disk"} if torch.cuda.is_available() else {"disk"}))
        if outside:
            found = f"layers on {' and '.join(outside)}: the GPUs are too small"
            raise InputError("target_parallel", found, "all of them on GPUs", "Use more GPUs, or --dtype bfloat16.")
        return
    for weight in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
        if hasattr(weight, "full_tensor") and any(part.is_shard() for part in weight.placements):
            found = f"{type(model).__name__}, whose embeddings are split by other names than {', '.join(WHOLE)}"
            raise InputError("target_parallel", found, "a Llama-like model", "Use device_map.")


def tell(number: int, device: torch.device) -> None:
    """Send from the first process to all others what they compute with it next, or DONE."""
    dist.broadcast(torch.tensor(number, device=device), src=0)


def told(device: torch.device) -> Iterator[int]:
    """What the first process tells, until it is done. Where it fails, its launcher ends this process."""
    number = torch.tensor(DONE, device=device)
    while True:
        dist.broadcast(number, src=0)
        if int(number) == DONE:
            return
        yield int(number)


def _installed(package: str) -> bool:
    return find_spec(package) is not None
