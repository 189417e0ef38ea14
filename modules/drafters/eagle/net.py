"""Network of an EAGLE-1 head (Li et al. 2024, "EAGLE", section 4): one decoder layer at the feature level."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.modules.attention import Documents, Entry, attend_pass
from draftsmith.modules.layers import (
    MOST_LAYERS,
    DecoderLayer,
    LlamaConfig,
    LlamaHeadConfig,
    RopeScaling,
    add_rope_table,
)
from draftsmith.modules.types import whole_number

Rope = Literal["target", "plain"]


@dataclass(frozen=True)
class EagleConfig(LlamaHeadConfig):
    """Config of an EAGLE head. fc_bias: bias of the fusion layer, off by default because vLLM drops it silently."""

    fc_bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number("num_layers", self.llama.num_layers, 1, MOST_LAYERS)

    @classmethod
    def for_target(
        cls, target: LlamaConfig, num_layers: int = 1, fc_bias: bool = False, rope: Rope = "target"
    ) -> EagleConfig:
        """Return a config with layers like the target's, as far as other systems support them.

        rope: `plain` leaves the target's rope scaling out; the base stays.
        """
        layer = dataclasses.replace(
            target,
            num_layers=num_layers,
            sliding_window=None,
            # A head has only what the EAGLE-1 layers of vLLM 0.33.0 and SGLang 0.5.23 (models/llama_eagle.py of both)
            # and of SafeAILab/EAGLE (eagle/model/cnets1.py) all have: no q/k norms, no biases in the MLP (SGLang) or
            # o_proj (SafeAILab), but biases of q, k and v.
            qk_norm=False,
            o_bias=False,
            mlp_bias=False,
        )
        return cls(layer if rope == "target" else dataclasses.replace(layer, rope_scaling=RopeScaling()), fc_bias)


def rope_of(head: LlamaConfig) -> Rope:
    """Return the option that gives a head its rotary positions."""
    return "plain" if head.rope_scaling.kind == "default" else "target"


class EagleNet(nn.Module):
    """Network h_t = layers(fc([embed(x_{t+1}); f_t])) ~ f_{t+1}, whose lm_head, the target's, predicts x_{t+2}.

    The embedding comes first; there is no norm before attention in layer 0, and no final norm.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: EagleConfig):
        super().__init__()
        self.config = config
        size = config.llama.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=config.fc_bias)
        self.layers = nn.ModuleList(
            DecoderLayer(config.llama, input_norm=i > 0) for i in range(config.llama.num_layers)
        )
        add_rope_table(self, config.llama, config.max_position)

    def fuse(self, embeds: Tensor, states: Tensor) -> Tensor:
        """Return the layers' input [.., H] of embeddings and states [.., H]."""
        return self.fc(torch.cat([embeds, states], -1))

    def forward(self, embeds: Tensor, features: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Return hidden states [B, T, H] of embeds and features [B, T, H]; causal, so right padding needs no mask."""
        return self.unroll(embeds, features, 1, position_ids)[0]

    def unroll(
        self,
        embeds: Tensor,
        features: Tensor,
        num_passes: int,
        position_ids: Tensor | None = None,
        documents: Documents | None = None,
    ) -> list[Tensor]:
        """Return hidden states [B, T, H] of every row as each of the first `num_passes` steps of a draft.

        Rows of pass 0 read true features. In pass j row t reads the head's own h_{t-1} of pass j-1 in place of f_t, and
        attends as in a draft that began at row t-j: to rows up to t-j of pass 0, and to one row of each later pass.
        Rows before j mean nothing (HASS, section 3.2; EAGLE-3's training-time test).

        documents: of a flat batch [1, N, H], whose position_ids start at 0 in every document.
        """
        rows = embeds.shape[1]
        if position_ids is None:
            position_ids = torch.arange(rows, device=embeds.device)[None]
        layers: list[Any] = list(self.layers)
        entries: list[list[Entry]] = [[] for _ in layers]
        passes: list[Tensor] = []
        hidden, embeds = features, F.pad(embeds, (0, 0, 0, num_passes - 1))  # [B, T, H], [B, T + num_passes - 1, H]
        for j in range(num_passes):
            # Here row t is the draft that began there; it reads the token of row t + j, at that row's position.
            at = (position_ids + j).clamp_max(len(self.cos) - 1)
            cos, sin = (table[at][:, None].to(embeds.dtype) for table in (self.cos, self.sin))  # [B, 1, T, D]
            hidden = self.fuse(embeds[:, j : j + rows], hidden)  # [B, T, H]
            for layer, layer_entries in zip(layers, entries, strict=True):
                normed = layer.input_layernorm(hidden)
                hidden = hidden + attend_pass(layer.self_attn, normed, cos, sin, layer_entries, documents)
                hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            passes.append(F.pad(hidden, (0, 0, j, 0))[:, :rows])  # [B, T, H], row t of the draft at its last token
        return passes
