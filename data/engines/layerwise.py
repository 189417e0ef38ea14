"""Hidden states of a few short rows, computed layer by layer: a target of any size in the memory of one layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.modules.attention import attend_text
from draftsmith.modules.layers import DecoderLayer, RMSNorm
from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.pretrained.reading import FETCH
from draftsmith.modules.rotary import rope_table
from draftsmith.modules.targets.shape import llama_config
from draftsmith.modules.types import InputError


@torch.no_grad()
def layer_states(target: Checkpoint, rows: Sequence[Sequence[int]]) -> Iterator[list[Tensor]]:
    """Yield the states [T, H] of each row in float32: embeddings, then after each layer, then after the final norm.

    rows: shorter than a sliding window, if the target has one.

    Raises:
        InputError: a family other than those of the lean engine, or weights that are stored in another form.
    """
    target.check_weights()
    config = llama_config(target.config)
    names = {name.removeprefix("model."): name for name in target.weights}

    def read(name: str) -> Tensor:
        if name not in names:
            raise InputError(str(target.directory), f"no tensor {name}", "weights as transformers stores them", FETCH)
        return target.read(names[name]).float()

    embeddings = read("embed_tokens.weight")
    states = [F.embedding(torch.tensor(row), embeddings) for row in rows]
    del embeddings
    yield states
    tables = rope_table(config, max(map(len, rows)))
    with torch.device("meta"):
        layer, norm = DecoderLayer(config), RMSNorm(config.hidden_size, config.rms_eps)
    for number in range(config.num_layers):
        weights = {name: read(f"layers.{number}.{name}") for name, _ in layer.named_parameters()}
        layer.load_state_dict(weights, assign=True)
        states = [layer(x[None], *(table[: len(x), None] for table in tables), attend_text)[0] for x in states]
        yield states
    norm.load_state_dict({"weight": read("norm.weight")}, assign=True)
    yield [norm(x) for x in states]
