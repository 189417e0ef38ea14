"""How far a target in fewer bits is from the same target as it was loaded without: a decoder is lossless against the
former, and users have to know what they get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from draftsmith.modules.targets.base import CausalLM

MOST_TOKENS = 4096  # read of all texts together: the means stand still long before


@torch.inference_mode()
def fidelity(target: CausalLM, reference: CausalLM, texts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Means over tokens of the texts, at temperature 1: KL(reference || target) in nats, the total variation, and how
    often both choose the same token.

    texts: token ids that neither was made with, each read as it stands; the first MOST_TOKENS tokens of them count.
    """
    sums, left = torch.zeros(3, dtype=torch.float64), MOST_TOKENS
    for text in texts:
        ids = torch.tensor([list(text[:left])], device=target.device)
        left -= ids.shape[1]
        if not ids.numel():
            break
        ours, wanted = (lm.lm_head(lm.features(ids)[0]).double() for lm in (target, reference))
        q, p = ours.log_softmax(-1), wanted.log_softmax(-1)
        kl = (p.exp() * (p - q)).sum(-1)
        variation = (p.exp() - q.exp()).abs().sum(-1) / 2
        agree = (p.argmax(-1) == q.argmax(-1)).double()
        sums += torch.stack([kl, variation, agree]).sum(-1).cpu()
    tokens = MOST_TOKENS - left
    means = (sums / max(tokens, 1)).tolist()
    return {"tokens": tokens, **dict(zip(("kl", "total_variation", "same_choice"), means, strict=True))}


def fidelity_of(meta: Mapping[str, Any]) -> str:
    """One sentence; nothing of a target that is as it was loaded."""
    found = meta.get("target_fidelity")
    if not found:
        return ""
    bits, dtype = meta["settings"]["target_precision"], meta["settings"]["dtype"]
    return (
        f" The target is the one in {bits}, and = ar, and lossless, hold for it: its distributions against those of "
        f"{dtype} over {found['tokens']:,} tokens of the prompts: KL {found['kl']:.2g} nats, total variation "
        f"{found['total_variation']:.2g}, the same first choice {found['same_choice']:.1%}."
    )
