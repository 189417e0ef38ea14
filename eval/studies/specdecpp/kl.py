"""How near acceptance heads come to the labels they are trained for: SpecDec++'s table of train and eval KL by weight
and depth."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.data.store.datasets import collate_acceptance, open_dataset
from draftsmith.modules.acceptance.head import AcceptanceHead
from draftsmith.modules.metrics import binary_kl, soft_label_auc
from draftsmith.modules.targets.base import CausalLM

# Share of tokens that the draft reads from the target's text instead of its own (SpecDec++ section 3.3).
MIX = 0.15
BATCH = 16


# N drafted tokens of an `acceptance` artefact: the draft's hidden states once it has read them [N, H], and their labels
# [N].
LabelledStates = tuple[Tensor, Tensor]


@torch.inference_mode()
def read_labels(directory: Path, draft: CausalLM, seed: int, limit: int) -> LabelledStates:
    """The drafted tokens of the first `limit` rows, mixed as a training's first epoch mixes them.

    Raises:
        InputError: no artefact, or one made with another draft.
    """
    dataset = open_dataset(directory, "acceptance", {"draft": draft.info.identity}, mix=MIX, seed=seed)
    hidden, accept_prob = [], []
    rows = range(min(limit, len(dataset)))
    for start in range(0, len(rows), BATCH):
        batch = collate_acceptance([dataset.item(row, 0) for row in rows[start : start + BATCH]])
        mask = batch.loss_mask.to(draft.device)
        hidden.append(draft.features(batch.z_ids.to(draft.device))[mask].float())
        accept_prob.append(batch.accept_prob.to(draft.device)[mask])
    return torch.cat(hidden), torch.cat(accept_prob)


@torch.inference_mode()
def kl_rows(heads: Mapping[str, AcceptanceHead], sets: Mapping[str, LabelledStates]) -> list[dict[str, Any]]:
    """One row for each head that reads what the published one does: name, w_rej, depth, and by set (`train`, `eval`)
    NAME_kl, NAME_kl_corrected, NAME_auc.

    kl: mean KL(P || P^) [nats] of the head's output as it is, which the paper's threshold reads; corrected: after
    log(w_rej / w_acc) was added to its logit, without any further calibration. Labels of mixed text are of no rounds:
    they have nothing that heads of other inputs could read.
    """
    rows = []
    for name, head in heads.items():
        if not head.config.as_published:
            continue
        row: dict[str, Any] = {"head": name, "w_rej": head.config.w_rej, "depth": head.config.num_blocks}
        for kind, (hidden, label) in sets.items():
            raw = head(hidden)
            row |= {
                f"{kind}_kl": float(binary_kl(raw, label)),
                f"{kind}_kl_corrected": float(binary_kl(head.corrected(raw), label)),
                f"{kind}_auc": float(soft_label_auc(raw, label)),
            }
        rows.append(row)
    return sorted(rows, key=lambda row: (row["w_rej"], row["depth"]))


def constant_kl(label: Tensor) -> float:
    """KL [nats] of the best constant prediction, the mean label: what a head that looks at nothing reaches."""
    return float(binary_kl(torch.logit(label.double().mean()).expand(len(label)), label))
