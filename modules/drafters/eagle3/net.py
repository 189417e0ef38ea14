"""Network of an EAGLE-3 head (Li et al. 2025, section 3; SafeAILab/EAGLE eagle/traineagle3/cnets.py)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.modules.attention import Documents, Entry, attend_pass
from draftsmith.modules.layers import (
    CaptureConfig,
    LlamaConfig,
    PairLayer,
    RMSNorm,
    RopeScaling,
    add_rope_table,
)
from draftsmith.modules.types import InputError, check_config, whole_number


@dataclass(frozen=True)
class Eagle3Config(CaptureConfig):
    """Config of an EAGLE-3 head. Rotary positions are its own: those of published heads differ from their targets'.

    draft_vocab_size: tokens that it can draft, the rows of its lm_head; the target's vocabulary if that is whole.
    fc_norm: each of these states is normed before they are joined (EAGLE-3.1).
    norm_before_fc: they are normed side by side, as one vector of n H, before they are joined.
    norm_output: its own states are normed before it reads them again (EAGLE-3.1).
    norm_before_residual: the residual of its layer is the normed state; only heads of other trainers have it.
    """

    draft_vocab_size: int
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_config(self, draft_vocab_size=(1, self.vocab_size))
        whole_number("num_layers", self.llama.num_layers, 1, 1)
        if self.fc_norm and self.norm_before_fc:
            raise InputError("norm_before_fc", "true with fc_norm", "one norm of the states", "Correct it.")

    @property
    def reduced(self) -> bool:
        """It can draft only some of the target's tokens."""
        return self.draft_vocab_size < self.llama.vocab_size


def default_layers(num_layers: int) -> tuple[int, ...]:
    """Return the layers that every system reads by default; they collapse for a target of fewer than seven.

    Source: SafeAILab/EAGLE eagle/traineagle3/modeling_llama_kv.py.
    """
    return 2, num_layers // 2, num_layers - 3


def layer_like(target: LlamaConfig, rope_theta: float | None = None, plain_rope: bool = False) -> LlamaConfig:
    """Return one layer like the target's, as far as servers support it: no biases, q/k norms or window."""
    layer = dataclasses.replace(
        target,
        num_layers=1,
        sliding_window=None,
        qk_norm=False,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        tie_embeddings=False,
    )
    if plain_rope:
        layer = dataclasses.replace(layer, rope_scaling=RopeScaling())
    return layer if rope_theta is None else dataclasses.replace(layer, rope_theta=rope_theta)


class Eagle3Net(nn.Module):
    """Network g_t = fc([states of the layers at t]); h_t = layer(embed(x_{t+1}), g_t); lm_head(norm(h_t)) ~ x_{t+2}.

    Later in a draft h takes the place of g.

    d2t: [draft_vocab_size] int64, the target's id of each token that it can draft, ascending.
    """

    cos: Tensor
    sin: Tensor
    d2t: Tensor

    def __init__(self, config: Eagle3Config):
        super().__init__()
        self.config = config
        size, eps = config.hidden_size, config.llama.rms_eps
        self.fc = nn.Linear(len(config.capture) * size, size, bias=False)
        norms = len(config.capture) if config.fc_norm else 0
        self.fc_norm = nn.ModuleList(RMSNorm(size, eps) for _ in range(norms))
        self.input_norm = RMSNorm(len(config.capture) * size, eps) if config.norm_before_fc else None
        self.layer = PairLayer(config.llama, config.norm_before_residual)
        self.norm = RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False).requires_grad_(False)
        self.register_buffer("d2t", torch.arange(config.draft_vocab_size), persistent=config.reduced)
        self.register_load_state_dict_post_hook(_check_d2t)
        add_rope_table(self, config.llama, config.max_position)

    def read(self, states: Tensor) -> Tensor:
        """Join the states [.., n H] of the target's n layers to g [.., H]."""
        if len(self.fc_norm):
            parts = states.chunk(len(self.fc_norm), -1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        if self.input_norm is not None:
            states = self.input_norm(states)
        return self.fc(states)

    @property
    def layers(self) -> list[Any]:
        return [self.layer]

    def fuse(self, embeds: Tensor, states: Tensor) -> Tensor:
        """Return the layer's input [.., 2H] of embeddings and states [.., H]; the layer norms both."""
        return torch.cat([embeds, states], -1)

    def normed(self, hidden: Tensor) -> Tensor:
        """Return the head's states [.., H] for the layer's outputs."""
        return self.norm(hidden) if self.config.norm_output else hidden

    def logits_input(self, hidden: Tensor) -> Tensor:
        """Return the input [.., H] of lm_head for states [.., H]."""
        return hidden if self.config.norm_output else self.norm(hidden)

    def logits(self, hidden: Tensor, lm_head: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return logits [.., V] of states [.., H] by the head's own lm_head; -inf for tokens that it cannot draft."""
        logits = self.lm_head(self.logits_input(hidden))
        if not self.config.reduced:
            return logits
        whole = logits.new_full((*logits.shape[:-1], self.config.vocab_size), -torch.inf)
        return whole.index_copy_(-1, self.d2t, logits)

    def unroll(
        self,
        embeds: Tensor,
        states: Tensor,
        num_passes: int,
        position_ids: Tensor | None = None,
        documents: Documents | None = None,
    ) -> list[Tensor]:
        """Run drafts of num_passes tokens from every row at once (training-time test, section 3.2).

        Returns h [B, T, H] of each pass: row t of pass j has read x_{t+1} .. x_{t+1+j} behind the states up to t.

        embeds: [B, T + num_passes - 1, H], of x_{t+1} at t. states: [B, T, n H]. position_ids: [B, T]; 0, 1, .. by
        default. documents: of a flat batch [1, N, ..], which needs position_ids; drafts that leave their document mean
        nothing.
        """
        hidden, rows, layer = self.read(states), states.shape[1], self.layer  # [B, T, H]
        if position_ids is None:
            position_ids = torch.arange(rows, device=hidden.device)[None]
        normed = layer.input_layernorm(embeds)  # [B, T + num_passes - 1, H]
        passes: list[Tensor] = []
        entries: list[Entry] = []
        for j in range(num_passes):
            state = layer.hidden_norm(hidden)
            pair = torch.cat([normed[:, j : j + rows], state], -1)  # [B, T, 2H]
            # The loss has no token where a draft would leave the context.
            at = (position_ids + j).clamp_max(len(self.cos) - 1)
            cos, sin = self.cos[at][:, None].to(pair.dtype), self.sin[at][:, None].to(pair.dtype)  # [B, 1, T, D]
            mixed = attend_pass(layer.self_attn, pair, cos, sin, entries, documents)
            hidden = (state if layer.normed_residual else hidden) + mixed
            hidden = self.normed(hidden + layer.mlp(layer.post_attention_layernorm(hidden)))
            passes.append(hidden)  # [B, T, H]
        return passes

    def use_draft_vocabulary(self, tokens: Tensor, lm_head: Tensor | None = None) -> None:
        """Restrict drafts to these tokens (int64 [draft_vocab_size], ascending).

        lm_head: [V, H] of the target, whose rows of these tokens become the head's own.
        """
        self.d2t.copy_(tokens)
        if lm_head is not None:
            with torch.no_grad():
                self.lm_head.weight.copy_(lm_head[tokens.to(lm_head.device)])


def _check_d2t(net: Eagle3Net, _: Any) -> None:
    """Raise InputError unless `d2t` holds ids of the target, each once, ascending."""
    ids = net.d2t
    if not bool((ids[1:] > ids[:-1]).all()) or not 0 <= int(ids[0]) <= int(ids[-1]) < net.config.vocab_size:
        span = f"ids from {int(ids.min())} to {int(ids.max())} in no order"
        expected = f"ascending ids below {net.config.vocab_size}"
        raise InputError("d2t", span, expected, "Take the head's directory from where it was trained.")
