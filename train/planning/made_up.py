"""Made-up responses to measure a training on, where there is no data yet: random tokens, with lengths of dialogues."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from draftsmith.data.models.loading import tokenizer_identity
from draftsmith.data.responses import FIELDS, ResponsesConfig
from draftsmith.data.store.shards import Shard, ShardContent, StagePlan, run_stage
from draftsmith.data.text.turns import count_responses

# Lengths of conversations in tokens: log-normal, the median and spread of shared chats, cut at both ends.
DIALOGUE_MEDIAN, DIALOGUE_SIGMA = 400, 0.9
DIALOGUE_SHORTEST, DIALOGUE_LONGEST = 50, 1500
# Of a document, what the user wrote; the rest is the answer, which the loss counts.
PROMPT_SHARE = 0.3


def dialogue_lengths(count: int, seed: int = 0, scale: float = 1.0) -> list[int]:
    """Tokens of `count` conversations; scale: of all lengths, for small runs."""
    rng = random.Random(f"dialogue/{seed}")
    drawn = (rng.lognormvariate(math.log(DIALOGUE_MEDIAN), DIALOGUE_SIGMA) for _ in range(count))
    return [max(4, round(min(max(length, DIALOGUE_SHORTEST), DIALOGUE_LONGEST) * scale)) for length in drawn]


def write_responses(directory: Path, target: str, lengths: Sequence[int], vocab: int, seed: int = 0) -> Path:
    """A real `responses` artefact of random tokens, which any target of this tokenizer may be trained on."""
    generator = torch.Generator().manual_seed(seed)
    documents = [torch.randint(vocab, (length,), generator=generator).tolist() for length in lengths]
    plan = StagePlan(
        kind="responses",
        stage="data responses",
        config=ResponsesConfig(prompts=Path("synthetic"), target=target, output=directory),
        num_rows=len(lengths),
        fields=FIELDS,
        inputs={},
        identity={"tokenizer": tokenizer_identity(target)["tokenizer"], "target": {}},
        seed=seed,
    )

    def make(shard: Shard, advance: Any) -> ShardContent:
        rows = [
            {
                "id": str(number),
                "input_ids": documents[number],
                "prompt_length": (start := int(len(documents[number]) * PROMPT_SHARE)),
                "loss_mask": [at >= start for at in range(len(documents[number]))],
                "turn": 1,
                "ended": True,
                "retokenised": False,
                "task": "synthetic",
            }
            for number in range(shard.start, shard.stop)
        ]
        return ShardContent(rows, count_responses(rows))

    run_stage(plan, make)
    return directory
