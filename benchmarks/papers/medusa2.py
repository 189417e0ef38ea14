"""Train Medusa heads together with their target (Medusa-2, Cai et al. 2024, section 2.2.2).

The target learns by LoRA and is its own teacher: the same weights without the adapters (section 2.3.2). The result is
ANOTHER model. Measure the heads against the new target's own autoregressive decoding, and look at the printed distance
from the original before you serve it.

    pip install "draftsmith[lora]"
    python benchmarks/papers/medusa2.py DATA TARGET OUTPUT      (DATA: what `draftsmith data responses` wrote)
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, random_split
from transformers import AutoTokenizer

import draftsmith
from draftsmith.benchmarks.papers.drafters import register

HEAD_WEIGHT = 0.2  # of the heads' loss, beside the divergence from the original target
HEADS_FIRST = 0.2  # share of the steps in which only the heads learn: new heads would spoil the target
HEAD_LR, LORA_LR = 1e-3, 2.5e-4


def states_of(model, batch):
    """Return hidden states after the final norm."""
    inputs = {"input_ids": batch.input_ids, "position_ids": batch.position_ids, "use_cache": False}
    mask = None if batch.attention_mask is None else batch.attention_mask.long()
    return model.base_model(**inputs, attention_mask=mask).last_hidden_state  # [B, T, H]


def divergence(target, adapted, batch, states):
    """Return KL(original || target) in nats and total variation, means over the answers' tokens."""
    with adapted.disable_adapter(), torch.no_grad():
        original = states_of(target.model, batch)  # [B, T, H]
    # Position t predicts token t + 1, so it counts where token t + 1 belongs to an answer.
    predicts = F.pad(batch.loss_mask[:, 1:], (0, 1))  # [B, T]
    log_p = target.lm_head(original[predicts]).float().log_softmax(-1)  # [N, V]
    log_q = target.lm_head(states[predicts]).float().log_softmax(-1)  # [N, V]
    count = predicts.sum().clamp_min(1)
    kl = F.kl_div(log_q, log_p, reduction="sum", log_target=True) / count
    total_variation = (log_p.exp() - log_q.exp()).abs().sum() / 2 / count
    return kl, total_variation.detach()


def loss_of(target, adapted, head, settings, batch, heads_alone):
    """Return the loss of a step and the divergence in it."""
    with torch.set_grad_enabled(not heads_alone):
        states = states_of(target.model, batch)
    heads = head.loss(dataclasses.replace(batch, features=states), target, settings, None).loss
    if heads_alone:
        return heads, torch.zeros(())
    kl, _ = divergence(target, adapted, batch, states)
    return kl + HEAD_WEIGHT * heads, kl.detach()


def train(target, adapted, head, settings, loader, steps):
    adapters = [weight for weight in adapted.parameters() if weight.requires_grad]
    groups = [{"params": list(head.parameters()), "lr": HEAD_LR}, {"params": adapters, "lr": LORA_LR}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    step = 0
    while step < steps:
        for batch in loader:
            loss, kl = loss_of(target, adapted, head, settings, batch, heads_alone=step < HEADS_FIRST * steps)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_([*head.parameters(), *adapters], 1.0)
            optimizer.step()
            schedule.step()
            step += 1
            if step % 20 == 0 or step == steps:
                print(f"step {step}/{steps}: loss {loss.item():.4g}, KL from the original {kl.item():.3g}")
            if step == steps:
                break


def main(data, target_path, output, steps=150, batch_size=8):
    register()
    torch.manual_seed(0)
    # peft finds the layers of a transformers model by their names.
    target: Any = draftsmith.load_target(target_path, "float32", loader="hf")
    settings = draftsmith.settings("medusa", lm_head="own")
    head = draftsmith.new_head(settings, target)
    lora = LoraConfig(r=32, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted: Any = get_peft_model(target.model, lora)

    rows = draftsmith.open_dataset(data)
    val_size = max(1, len(rows) // 20)
    val, training = random_split(rows, [val_size, len(rows) - val_size])
    loader = DataLoader(training, batch_size, shuffle=True, collate_fn=draftsmith.collate)
    train(target, adapted, head, settings, loader, steps)

    with torch.no_grad():
        batches = list(DataLoader(val, batch_size, collate_fn=draftsmith.collate))
        distances = [divergence(target, adapted, batch, states_of(target.model, batch)) for batch in batches]
    kl, total_variation = (sum(values).item() / len(distances) for values in zip(*distances, strict=True))
    print(f"distance from the original on {len(val)} held-out answers: KL {kl:.3g}, TV {total_variation:.3g}")

    # The merged model is a new target: it is saved under its own name, and the heads record its identity.
    new_target = Path(output) / "target"
    adapted.merge_and_unload().save_pretrained(new_target)
    AutoTokenizer.from_pretrained(target.info.path).save_pretrained(new_target)
    heads = draftsmith.save(head, Path(output) / "heads", draftsmith.load_target(str(new_target)))
    print(f"Measure it: draftsmith eval bench --target {new_target} --head {heads} --methods medusa --data FILE")
    return new_target, heads


if __name__ == "__main__":
    main(*sys.argv[1:4])
