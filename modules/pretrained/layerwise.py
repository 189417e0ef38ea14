"""Run a text through a target of any size in the memory of one of its layers, by transformers' own layers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.pretrained.models import load_transformers
from draftsmith.modules.targets.hf import decoder_layers
from draftsmith.modules.types import InputError, describe_error

OnState = Callable[[int, Tensor], None]


@torch.inference_mode()
def read_layerwise(
    target: Checkpoint, text: Sequence[int], on_state: OnState, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the target's logits [T, V] of a text [T], computed from its files in this type.

    on_state: called with the number of each layer and the state [T, H] that the layer reads, and with the number of all
        layers and the state after the last one.

    Raises:
        InputError: transformers does not compute this target so.
    """
    try:
        with _outer_alone(target, dtype) as (model, layers, load):
            _read_when_called(layers, load, on_state)
            logits: Tensor = model(input_ids=torch.tensor([text]), use_cache=False).logits[0]
    except (InputError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # each architecture fails in its own way
        found = f"{target.directory}, which transformers does not run layer by layer ({describe_error(error)})"
        raise InputError("target", found, "layers that need no other's weights", "Compare by answers.") from error
    return logits.float()


@contextmanager
def _outer_alone(target: Checkpoint, dtype: torch.dtype) -> Iterator[tuple[Any, nn.ModuleList, Callable[[int], None]]]:
    """Load what surrounds the layers. Yields the model, its layers and what reads the weights of one of them."""
    from transformers import PreTrainedModel
    from transformers.utils import logging

    whole, found = PreTrainedModel._load_pretrained_model, list[Any]()

    def load_outer(model: Any, _state: object, _files: object, how: Any) -> Any:
        name, layers = decoder_layers(model, target.info.num_layers, target.info.num_layers)
        numbered = re.compile(rf"(?:^|\.){name.split('.')[-1]}\.(\d+)\.")
        groups: dict[int, list[str]] = {}
        for key in set(target.weights) - set(target.leftovers):
            match = numbered.search(key)
            groups.setdefault(int(match[1]) if match else -1, []).append(key)

        def load(number: int) -> Any:
            return whole(model, {key: target.view(key) for key in groups.get(number, ())}, None, how)

        info, index = load(-1)
        # Else they would be filled with random numbers.
        info.missing_keys = {key for key in info.missing_keys if not numbered.search(key)}
        found.append((layers, load))
        return info, index

    shows = logging.is_progress_bar_enabled()
    # One for every layer.
    logging.disable_progress_bar()
    try:
        PreTrainedModel._load_pretrained_model = staticmethod(load_outer)
        try:
            model = load_transformers(target, dtype, {})
        finally:
            PreTrainedModel._load_pretrained_model = staticmethod(whole)
        yield model, *found[0]
    finally:
        if shows:
            logging.enable_progress_bar()


def _read_when_called(layers: nn.ModuleList, load: Callable[[int], Any], on_state: OnState) -> None:
    """Let each layer read its weights when it is called, and drop them behind it."""
    for number, layer in enumerate(layers):

        def before(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any], number: int = number) -> None:
            on_state(number, args[0][0] if args else named["hidden_states"][0])
            load(number)

        layer.register_forward_pre_hook(before, with_kwargs=True)
        layer.register_forward_hook(lambda layer, *_: layer.to("meta") and None)
    for last in layers[-1:]:
        last.register_forward_hook(
            lambda _, __, output: on_state(len(layers), (output if isinstance(output, Tensor) else output[0])[0])
        )
