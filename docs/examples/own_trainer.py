"""Train a head on one's own rows, with callbacks of Lightning's, then decode with it."""

import sys

import torch
from lightning.pytorch.callbacks import EarlyStopping

import draftsmith


def rows_of(target, texts):
    """Token ids, and true where the target's answer stands: what it is to learn to draft."""
    tokenizer = draftsmith.load_tokenizer(target.info.path)
    for question, answer in texts:
        chat = [{"role": "user", "content": question}]
        asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        answered = tokenizer(answer, add_special_tokens=False)["input_ids"]
        ids = torch.tensor(asked + answered)
        yield {"input_ids": ids, "loss_mask": torch.arange(len(ids)) >= len(asked)}


def main(target_path, texts, output, steps=20):
    target = draftsmith.load_target(target_path)
    rows = list(rows_of(target, texts))
    settings = draftsmith.settings("eagle", lr=3e-3, max_steps=steps, batch_size=4, loggers=("csv",), output=output)
    module = draftsmith.LitDrafter(draftsmith.new_head(settings, target), target, settings)
    data = draftsmith.HeadDataModule(rows[2:], rows[:2], settings)
    best = draftsmith.fit(module, data, callbacks=[EarlyStopping("val/loss")])

    drafter = draftsmith.load_drafter(str(best), target, "eagle:k=3")
    return [draftsmith.generate(target, question, drafter, max_new_tokens=32) for question, _ in texts[:4]]


if __name__ == "__main__":
    given = [("What is 2 + 3?", "5"), ("What is 4 + 4?", "8")] * 8
    for answer in main(sys.argv[1], given, sys.argv[2]):
        print(answer.text, answer.totals.tau)
