"""Models of any size with random weights, for measuring time only.

The draft model is the target's own layer 0 under the target's output embedding. The other layers of the target write
little into the residual stream, so that drafts are accepted about as often as those of a trained draft model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.modules.drafters import head_class
from draftsmith.modules.layers import LlamaModel
from draftsmith.modules.llama_config import LlamaConfig
from draftsmith.modules.targets.base import ModelInfo
from draftsmith.modules.targets.llama import LlamaLM, model_from_state
from draftsmith.modules.targets.shape import llama_config

# transformers' config.json. 88m: a forward reads 14 x 4.8 M weights of layers and 20.5 M of the output embedding.
SHAPES: dict[str, dict[str, Any]] = {
    "88m": {
        "vocab_size": 32000,
        "hidden_size": 640,
        "intermediate_size": 1664,
        "num_hidden_layers": 14,
        "num_attention_heads": 10,
        "num_key_value_heads": 10,
        "max_position_embeddings": 8192,
    },
    "llama-3-8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
    },
    # Computes next to nothing: all its time is calls.
    "tiny": {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 512,
    },
}
# Output of the later layers relative to the first: about 0.8 of the drafted tokens are accepted.
LATER_LAYERS = 0.02


@dataclass(frozen=True)
class Weights:
    """A `config.json` and tensors under transformers' names, shared by the engines."""

    raw: dict[str, Any]
    state: Mapping[str, Tensor]

    @property
    def forward_bytes(self) -> int:
        """Bytes that a forward of one token reads: all weights but the other rows of the embedding."""
        return sum(tensor.nbytes for name, tensor in self.state.items() if "embed" not in name)

    @property
    def config(self) -> LlamaConfig:
        return llama_config(self.raw)

    def lean(self, packed: bool) -> LlamaLM:
        """Return the model in this project's engine."""
        config = self.config
        info = ModelInfo(config.hidden_size, config.vocab_size, config.num_layers, config.max_position, (), {})
        weight = self.state["lm_head.weight"]
        return LlamaLM(model_from_state(config, self.state, weight.dtype).to(weight.device), info, packed)

    def transformers(self) -> Any:
        """Return the same model in transformers."""
        from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig(**self.raw))
        model.load_state_dict(dict(self.state), assign=True)
        weight = self.state["lm_head.weight"]
        with torch.device(weight.device):  # rotary tables are no parameters
            model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
        model.generation_config = GenerationConfig()
        return model.eval().requires_grad_(False)


def random_weights(raw: dict[str, Any], dtype: torch.dtype, device: str, later_layers: float = 1.0) -> Weights:
    """Draw weights that keep states finite.

    later_layers: factor on what all layers but the first write into the residual stream.
    """
    with torch.device("meta"):
        parameters = dict(LlamaModel(llama_config(raw)).named_parameters())
    rng = torch.Generator(device).manual_seed(0)
    state: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        full_name = name if name.startswith("lm_head") else f"model.{name}"
        if parameter.ndim == 1:
            state[full_name] = torch.ones(parameter.shape, dtype=dtype, device=device)
            continue
        # Layers keep the size of their input; the embedding starts the residual stream at 1.
        scale = 1.0 if name.startswith("embed") else parameter.shape[1] ** -0.5
        if name.startswith("layers.") and not name.startswith("layers.0.") and ("o_proj" in name or "down" in name):
            scale *= later_layers
        weight = torch.randn(parameter.shape, generator=rng, device=device, dtype=dtype)
        state[full_name] = weight.mul_(scale)
    return Weights(raw, state)


def random_pair(shape: str, dtype: torch.dtype, device: str) -> tuple[Weights, Weights]:
    """Return a target of this shape, and its first layer as the draft model."""
    raw = {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 10000.0, **SHAPES[shape]}
    raw |= {"tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    target = random_weights(raw, dtype, device, LATER_LAYERS)
    first = {
        name: tensor
        for name, tensor in target.state.items()
        if ".layers." not in name or name.startswith("model.layers.0.")
    }
    return target, Weights({**raw, "num_hidden_layers": 1}, first)


def random_head(kind: str, target: LlamaLM) -> Any:
    """Return an untrained head of the target's shape, with its kind's default options."""
    torch.manual_seed(0)
    drafter: Any = head_class(kind)
    head = drafter(drafter.new_config(drafter.Settings(), target.config))
    return head.to(target.device, target.dtype).eval().requires_grad_(False)
