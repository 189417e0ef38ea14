"""Exported DFlash, DFlash2 and DSpark heads in SGLang's own code, on a CPU: its model config, loader and modules.

Its server drafts with them on a GPU only. Run by `make test-engines`.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sglang_code import load_draft, start  # isort: skip (before SGLang)
from exported import Exported, assert_close, cases, read
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.server_args import ServerArgs
from torch import Tensor, nn

CASES = [(kind, case) for kind in ("dflash", "dflash2", "dspark") for case in cases(kind, "sglang")]
ANCHORS = (1, 7, 20, 40)


@pytest.fixture(scope="module", autouse=True)
def server(tmp_path_factory: pytest.TempPathFactory) -> ServerArgs:
    return start(read("eagle3", "whole", "sglang"), "EAGLE3", tmp_path_factory.mktemp("store") / "store")


class BlockAttention(nn.Module):
    """One block behind a context, in place of the server's attention and cache. Its slots see all of both, or the
    tokens of a window before them."""

    def __init__(self, attention: nn.Module):
        super().__init__()
        self.heads, self.kv_heads = attention.num_heads, attention.num_kv_heads
        self.left, self.causal = attention.sliding_window_size, attention.attn_type == AttentionType.DECODER
        self.context: tuple[Tensor, Tensor] = (torch.zeros(0), torch.zeros(0))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
        key, value = (torch.cat(pair) for pair in zip(self.context, (key, value), strict=True))
        q, k, v = (
            x.reshape(len(x), heads, -1).transpose(0, 1)[None]
            for x, heads in ((query, self.heads), (key, self.kv_heads), (value, self.kv_heads))
        )
        place = torch.arange(len(key))
        own = place[-len(query) :, None]
        seen = (place <= own) | (not self.causal)
        seen = seen if self.left < 0 else seen & (own - place <= self.left)
        mixed = F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
        return mixed[0].transpose(0, 1).reshape(len(query), -1)


def slots(draft: nn.Module, exported: Exported, anchor: int) -> Tensor:
    """States [S, H] of the slots of a block, from the target's states before the anchor."""
    ours, config = exported.ours, draft.config
    context, mask = draft.project_target_hidden(ours["states"][:anchor]), draft.draft_config.mask_token_id
    for layer in draft.layers:
        attention = layer.self_attn
        key, value = attention.kv_proj_only(draft.prepare_context_hidden_for_kv(layer, context))
        key = attention.apply_k_rope(torch.arange(anchor), attention.apply_k_norm(key))
        attention.attn.context = (key, value)
    ids = torch.full((config.block_size,), config.mask_token_id if mask is None else mask)
    ids[0] = ours["ids"][anchor]
    return draft(ids, anchor + torch.arange(len(ids)), None, ours["embed_tokens"][ids]).hidden_states


def selected(draft: nn.Module, row: Tensor, previous: Tensor, logits: Tensor) -> Tensor:
    """Logits [1, V] of what its selector chooses among for a slot of state row [1, H] behind a token [1]."""
    values, candidates = draft._transform_unary_logits(logits).topk(draft.candidate_selector.top_k)
    scores = draft.candidate_selector.build_lattice(
        candidate_ids=candidates[None], unary_logits=values[None], hidden_states=row[None], anchor_token_ids=previous
    )
    return torch.full_like(logits, -torch.inf).scatter(1, candidates, scores[0, 0, :1])


@pytest.mark.parametrize(("kind", "case"), CASES)
@torch.inference_mode()
def test_an_export_is_loaded_whole_and_gives_our_logits(
    server: ServerArgs, kind: str, case: str, monkeypatch: pytest.MonkeyPatch
):
    exported = read(kind, case, "sglang")
    sure = "confidence_head.proj.weight" in exported.state
    # It builds a confidence head in this mode, whatever config.json says, and in no other.
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "compact" if sure else "static")
    draft, _ = load_draft(server, exported)
    assert not [name for name, parameter in draft.named_parameters() if parameter.isnan().any()]
    for layer in draft.layers:
        layer.self_attn.attn = BlockAttention(layer.self_attn)
    ours, markov = exported.ours, getattr(draft, "markov_head", None)
    first = int(not getattr(draft.config, "sample_from_anchor", kind == "dspark"))
    logits: dict[str, list[Tensor]] = {"logits.0": [], "logits.1": []}
    for anchor in ANCHORS:
        hidden = slots(draft, exported, anchor)
        state = None if markov is None else markov.init_state(hidden[:1])
        for j, name in enumerate(logits):
            row = hidden[first + j : first + j + 1]
            scores = row @ ours["lm_head"].T
            previous = ours["ids"][anchor + j : anchor + j + 1]
            if kind == "dflash2":
                scores = selected(draft, row, previous, scores)
            if markov is not None:
                bias, state = markov.step_bias(previous, hidden_states=row, state=state)
                scores = scores + bias
            logits[name].append(scores)
    rows = torch.tensor(ANCHORS) - 1
    wanted, theirs = {name: ours[name][rows] for name in logits}, {name: torch.cat(own) for name, own in logits.items()}
    finite = {name: part.isfinite() for name, part in wanted.items()}  # what a selector chooses among
    assert all(torch.equal(theirs[name].isfinite(), own) for name, own in finite.items())
    wanted, theirs = ({name: part[finite[name]] for name, part in own.items()} for own in (wanted, theirs))
    assert_close(f"SGLang {kind} {case}", wanted, **theirs)
    if sure:
        assert torch.equal(draft.confidence_head.proj.weight, exported.state["confidence_head.proj.weight"])
