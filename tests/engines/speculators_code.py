"""Drafts of speculators' own models on a CPU, along a text."""

from __future__ import annotations

from typing import Any

import torch
from speculators.models.attention import create_float_mask
from torch import Tensor


def load(kind: Any, directory: Any) -> Any:
    """Load a head by its class, in float32 and with attention that a CPU has for any length."""
    model = kind.from_pretrained(str(directory), dtype=torch.float32).eval()
    model._attn_impl, model._create_mask_fn = "eager", create_float_mask
    for layer in model.layers:
        layer.self_attn.config._attn_implementation = "eager"
    return model


def eagle3_logits(model: Any, states: Tensor, ids: Tensor, passes: int) -> list[Tensor]:
    """Return the logits [T, drafted tokens] of every pass. states: [T, n H], of the tokens before ids [T]."""
    logits: list[Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda module, inputs, output: logits.append(output[0]))
    read = ids[None]
    model(states[None].clone(), read, torch.zeros_like(read), ttt_steps=passes)
    hook.remove()
    return logits


def block_logits(model: Any, states: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits [A, slots, drafted tokens] of the blocks at places [A] of a text, along its own tokens.

    What a selector does not choose among has -inf."""
    read, block = ids[None], model.block_size
    first, count = int(not model.config.sample_from_anchor), len(ids) - 1 - block
    mask = torch.ones_like(read)
    mask[:, 0] = 0
    nothing = torch.zeros(1, len(ids), model.config.transformer_layer_config.hidden_size)
    hidden, logits, *_, places = model._backbone_forward(
        states[None], read, mask, nothing, torch.zeros_like(read), max_anchors=count
    )
    logits, hidden, places = logits.view(count, block, -1), hidden.view(count, block, -1), places.view(count, block)
    tokens = ids[places]
    previous = torch.cat([tokens[:, :1], tokens[:, :-1]], 1) if first else tokens
    if getattr(model, "candidate_selector", None) is not None:
        candidates, scores = model.candidate_selector.select(logits, hidden, previous)
        logits = torch.full_like(logits, -torch.inf).scatter(-1, candidates, scores)
    if getattr(model, "markov_head", None) is not None:
        logits = logits + model.markov_head.block_bias(
            prev_token_ids=previous, hidden_states=hidden, prev_emb=model.markov_head.prev_embeddings(previous)
        )
    return logits[:, first:], places[:, 0]
