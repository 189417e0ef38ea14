"""What the public formats need to know of a loaded model."""

from __future__ import annotations

from typing import Any, cast

from draftsmith.data.models.loading import read_config
from draftsmith.modules.interop.base import TargetFacts
from draftsmith.modules.targets.base import CausalLM


def facts_of(path: str, lm: CausalLM) -> TargetFacts:
    """path: what `lm` was loaded from. The tables are the model's own weights in the dtype it was loaded in, as other
    systems read them from its files, and not what `lm.embed` makes of them; on the CPU."""
    assert not lm.packed, "packed models have given their tables up"
    model = cast(Any, lm).model  # a LlamaModel, or one of transformers
    if hasattr(model, "get_output_embeddings"):
        embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    else:
        embed, head = model.embed_tokens, model.lm_head
    return TargetFacts(read_config(path), embed.weight.detach().cpu(), head.weight.detach().cpu())
