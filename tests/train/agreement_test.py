"""Agreement by draft step is that of drafting greedily from every position."""

from __future__ import annotations

import dataclasses

import torch
from eagle_trainings import a_module, change
from trained_runs import micro_batch, step_loss

from draftsmith.data.store.datasets import collate_features, open_dataset, pack_features
from draftsmith.modules.decoding.loop import generate_one
from draftsmith.modules.drafters.eagle.head import EagleHead
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.types import SamplingParams
from draftsmith.train.data_module import MicroBatch
from draftsmith.train.lit_drafter import LitDrafter


def drafted_by_hand(module: LitDrafter, item: dict[str, torch.Tensor], steps: int) -> list[list[bool]]:
    """For every draft of a text, whether each of its steps was right: drafted greedily from each response token on,
    the head reading all rows anew for every token. A draft ends at its first wrong step, at `steps`, or with the text.
    """
    head, target = module.head, module.target
    ids, features, is_response = item["input_ids"], item["features"].float(), item["loss_mask"].tolist()
    wanted = target.lm_head(features).argmax(-1)  # [T], what the target says after token t
    drafts = []
    for start in range(len(ids) - 2):  # the target's last true feature is f_start; x_{start+1} is known
        known, states, right = ids[1 : start + 2].tolist(), features[: start + 1], []
        while len(right) < steps and start + len(right) + 2 < len(ids) and is_response[start + len(right) + 2]:
            hidden = head(target.embed(torch.tensor([known])), states[None])[0, -1]
            drafted = int(target.lm_head(hidden).argmax())
            right.append(drafted == int(wanted[len(known)]))
            if not right[-1] or drafted != int(ids[len(known) + 1]):
                break
            known, states = known + [drafted], torch.cat([states, hidden[None]])
        drafts.append(right)
    return drafts


def greedy_items(target, number: int) -> list[dict[str, torch.Tensor]]:
    """Texts that the target has written greedily after random prompts, with its features."""
    items, generator = [], torch.Generator().manual_seed(3)
    for i in range(number):
        prompt = torch.randint(target.info.vocab_size, (4 + i % 3,), generator=generator).tolist()
        ids = prompt + generate_one(target, None, prompt, SamplingParams(), 30, TorchSource(0)).tokens
        row = torch.tensor(ids)
        items.append(
            {
                "input_ids": row,
                "features": target.features(row[None])[0],
                "loss_mask": torch.arange(len(ids)) >= len(prompt),
            }
        )
    return items


def part_of(items: list[dict[str, torch.Tensor]], packed: bool = False) -> MicroBatch:
    batch = (pack_features if packed else collate_features)(items)
    return micro_batch(batch, EagleHead.loss_count(batch, None))


def test_agreement_by_draft_step_is_that_of_drafting_greedily_from_everywhere(artefacts, tmp_path):
    module = a_module(artefacts, tmp_path)
    greedy, data = greedy_items(module.target, 12), open_dataset(artefacts.features)
    learn = torch.optim.AdamW(module.head.parameters(), lr=1e-2)
    change(module, noise=0.0, unroll=4)
    for _ in range(30):  # until drafts go on for some steps
        step_loss(module, part_of(greedy)).loss.backward()
        learn.step()
        learn.zero_grad()
    change(module, agreement_steps=4)
    for items in (greedy, greedy[:5] + [data[i] for i in range(7)]):  # and sampled text, which leaves the greedy path
        metrics = module.validate([part_of(items[:7]), part_of(items[7:])])
        with torch.no_grad():
            drafts = [draft for item in items for draft in drafted_by_hand(module, item, 4)]
        assert metrics["agreement_1"] == metrics["top1"]
        for j in range(4):
            reached = [draft[j] for draft in drafts if len(draft) > j]
            assert len(reached) > 20 and 0.1 < sum(reached) / len(reached) < 0.95, j  # else it would say nothing
            assert metrics[f"agreement_{j + 1}"] == sum(reached) / len(reached), j
    packed = module.validate([part_of(items, packed=True)])
    assert {k: v for k, v in packed.items() if "agree" in k} == {k: v for k, v in metrics.items() if "agree" in k}


def test_a_draft_ends_with_its_document(artefacts, tmp_path, monkeypatch):
    module = a_module(artefacts, tmp_path)
    right = lambda target, hidden, rows: torch.where(rows, batch.input_ids[:, 2:], -1)  # noqa: E731
    monkeypatch.setattr("draftsmith.modules.drafters.eagle.head.choices", right)
    target = module.target
    first, second = greedy_items(target, 2)
    items = [{k: v[-8:] for k, v in item.items()} for item in (first, second)]  # responses from their first token on
    joined = {k: torch.cat([item[k] for item in items]) for k in items[0]}
    positions = torch.arange(8).repeat(2)[None]
    batch = dataclasses.replace(collate_features([joined]), position_ids=positions)
    output = module.head.agreement(batch, target, 2)
    assert output.sums == output.counts
    # 14 rows of the pairing; the second document's first one continues no draft.
    assert [int(count) for count in output.counts.values()] == [14, 12]
