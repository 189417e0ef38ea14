"""Targets larger than one device, spread by transformers.

device_map: accelerate places whole layers on the GPUs that this process sees; one GPU works at a time.
tensor: every layer is split over all processes, which work together on the same tokens.
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
# Kept whole on every rank, which embeds and scores tokens of its own when it trains a head on them.
WHOLE = {"lm_head": "replicate", "model.embed_tokens": "replicate"}


def placement(parallel: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that spread a model. config: config.json."""
    ranks = place()
    if parallel == "none":
        return {}
    if parallel == "device_map":
        if ranks.local_world > 1:
            found = f"device_map with {ranks.local_world} processes on this machine"
            remedy = "Start one process, or use --target-parallel tensor."
            raise InputError("target_parallel", found, "one, which has all GPUs", remedy)
        if find_spec("accelerate") is None:
            remedy = 'Install it: pip install "draftsmith[large]"'
            raise InputError("target_parallel", "device_map without the package accelerate", "accelerate", remedy)
        return {"device_map": "auto"}
    assert parallel == "tensor"
    if ranks.world == 1 or ranks.world != ranks.local_world:
        found = f"tensor with {ranks.world} processes, {ranks.local_world} of them on this machine"
        expected = "several processes on one machine, one for each GPU"
        raise InputError("target_parallel", found, expected, "Launch with torchrun --nproc-per-node N.")
    # transformers splits attention by key/value heads.
    text = config.get("text_config") or config
    heads = text.get("num_key_value_heads") or text.get("num_attention_heads") or ranks.world
    if heads % ranks.world:
        found = f"tensor with {ranks.world} processes"
        remedy = "Start another number of them, or use device_map."
        raise InputError("target_parallel", found, f"a divisor of the {heads} key/value heads", remedy)
    # In transformers from 5.20 on.
    from transformers.distributed import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=ranks.world, tp_plan=WHOLE)}


def check_placed(model: Any, parallel: str) -> None:
    """Raise InputError if layers did not fit the devices, or the embeddings are not whole on every rank."""
    if parallel == "device_map":
        # There is no map if one device holds everything.
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


def broadcast_number(number: int, device: torch.device) -> None:
    """Send the number of the next work item, or DONE, from the first process to the others."""
    dist.broadcast(torch.tensor(number, device=device), src=0)


def received_numbers(device: torch.device) -> Iterator[int]:
    """Yield the numbers that the first process sends, until DONE. If it fails, the launcher ends this process."""
    number = torch.tensor(DONE, device=device)
    while True:
        dist.broadcast(number, src=0)
        if int(number) == DONE:
            return
        yield int(number)
