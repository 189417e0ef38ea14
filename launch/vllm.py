"""`draftsmith launch vllm`: a vLLM server that hands out hidden states of its target, for training elsewhere."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# States that pass through at a time may take as much.
LEAST_BYTES = 2 * 2**30


@dataclass(frozen=True)
class VllmConfig:
    """Start a vLLM server that hands out hidden states: draftsmith launch vllm --target BIG --drafter eagle3 -- ...

    Any number of `train` and `data features` commands may read from it, and every command with --server.

    Attributes:
        command: Further options of `vllm serve`, after a lone --.
        target: Directory or hub id of the target model.
        drafter: Kind of the drafter to train, as `train` names it, if it reads other states than those after the final
            norm.
        layers: Layers that the drafter reads. Default: its own choice for this target. Without --drafter any layers;
            the last state comes with them.
        states: Directory that the states pass through, on a file system that the readers share. They bound what is in
            it: by default, the states of two steps for each rank that trains.
        feature_dtype: Type of the states: bf16, or fp8 with a scale per token, half the bytes.
        dtype: Type of the weights; auto is the checkpoint's own.
        engine_path: The python of an environment with vLLM. Default: that of `make engines`, or this one.
        dry_run: Print the command instead of running it.
    """

    command: tuple[str, ...] = ()
    target: str = ""
    drafter: str | None = None
    layers: tuple[int, ...] = ()
    states: Path = Path("runs/states")
    feature_dtype: Literal["bf16", "fp8"] = "bf16"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    engine_path: Path | None = None
    dry_run: bool = False


def run(config: VllmConfig) -> int:
    """Replace this process by the server.

    Raises:
        InputError: no target, no vLLM, or a drafter that has no layers of this target.
    """
    from draftsmith.data.console import log_note, print_text
    from draftsmith.data.engines.vllm_states import connector_options
    from draftsmith.data.features import captured_layers
    from draftsmith.eval.engines.vllm import engine_python
    from draftsmith.modules.pretrained.checkpoint import Checkpoint
    from draftsmith.modules.pretrained.files import check_disk, make_directory
    from draftsmith.modules.pretrained.hub import loadable
    from draftsmith.modules.targets.base import check_aux_layers, final_state
    from draftsmith.modules.types import InputError

    if not config.target:
        raise InputError("target", "nothing", "a model", "Pass --target.")
    shape = Checkpoint(config.target).shape
    if config.layers and config.drafter is None:
        layers = tuple(sorted({*config.layers, final_state(shape.num_layers)}))
        check_aux_layers(layers, shape.num_layers)
    else:
        layers = captured_layers(config.drafter, config.layers, shape) or (final_state(shape.num_layers),)
    options = connector_options(layers, shape.num_layers, config.states, config.feature_dtype)
    words = ["--model", loadable(config.target), "--served-model-name", config.target]
    words += [] if config.dtype == "auto" else ["--dtype", config.dtype]
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}", json.dumps(value)]
    words += config.command
    python = engine_python(config.engine_path)
    argv = [str(python), "-m", "draftsmith.data.engines.vllm_serve", *words]
    if config.dry_run:
        print_text(shlex.join(argv))
        return 0
    # A full /dev/shm, of 64 MB in many containers, would end vLLM itself, whose processes talk through it.
    check_disk(config.states, LEAST_BYTES, "states", "Choose a directory with more room, or enlarge /dev/shm.")
    make_directory(config.states)
    log_note(f"states of layers {', '.join(map(str, layers))} pass through {config.states}")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.execv(python, argv)
