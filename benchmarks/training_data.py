"""What trainings are measured on: targets with random weights, and documents of random tokens with lengths of
dialogues, as responses or as features."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.benchmarks.synthetic import Weights
from draftsmith.data.features import FIELDS, FeaturesConfig, index_row, key
from draftsmith.data.models.hub import model_directory
from draftsmith.data.models.loading import tokenizer_identity
from draftsmith.data.responses import FIELDS as RESPONSE_FIELDS
from draftsmith.data.responses import ResponsesConfig
from draftsmith.data.store import feature_codec
from draftsmith.data.store.datasets import Item
from draftsmith.data.store.files import copy_file, make_directory, write_json, write_tensors
from draftsmith.data.store.shards import Shard, ShardContent, StagePlan, run_stage
from draftsmith.data.text.turns import count_responses
from draftsmith.modules.layers import LlamaConfig, LlamaModel
from draftsmith.modules.targets.llama import LlamaLM, llama_config

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


def raw_config(
    hidden: int, layers: int, vocab: int, *, intermediate: int | None = None, head_dim: int = 64, context: int = 4096
) -> dict[str, Any]:
    """transformers' config.json of a Llama of these sizes; the MLP is 8/3 of the width by default, as in Llama 2."""
    heads = max(1, hidden // head_dim)
    return {
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate or -(-hidden * 8 // 3 // 64) * 64,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": 0,
    }


def random_state(config: LlamaConfig, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """Random weights under transformers' names, scaled so that states stay finite."""
    with torch.device("meta"):
        named = dict(LlamaModel(config).named_parameters())
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, Tensor] = {}
    for name, parameter in named.items():
        full = name if name.startswith("lm_head") else f"model.{name}"
        if parameter.ndim == 1:
            state[full] = torch.ones(parameter.shape, dtype=dtype)
        else:
            bound = parameter.shape[1] ** -0.5
            state[full] = torch.empty(parameter.shape, dtype=dtype).uniform_(-bound, bound, generator=generator)
    return state


def random_target(raw: dict[str, Any], dtype: torch.dtype = torch.float32, seed: int = 0) -> LlamaLM:
    """A target of this shape in memory."""
    return Weights(raw, random_state(llama_config(raw), dtype, seed)).lean(packed=False)


def write_target(directory: Path, raw: dict[str, Any], seed: int = 0) -> Path:
    """A transformers directory of random bf16 weights, with the embedded target's tokenizer."""
    make_directory(directory)
    for file in model_directory("embedded:target").glob("*token*"):
        copy_file(file, directory / Path(file).name)
    write_json(directory / "config.json", raw)
    write_tensors(directory / "model.safetensors", random_state(llama_config(raw), torch.bfloat16, seed))
    return directory


class SyntheticFeatures:
    """Documents of these lengths with random features, as `data.datasets.FeatureDataset` gives them; in memory."""

    def __init__(self, lengths: Sequence[int], hidden: int, vocab: int, seed: int = 0):
        self.lengths = list(lengths)
        generator = torch.Generator().manual_seed(seed)
        self._items: list[Item] = []
        for length in self.lengths:
            mask = torch.arange(length) >= int(length * PROMPT_SHARE)
            self._items.append(
                {
                    "input_ids": torch.randint(vocab, (length,), generator=generator),
                    "features": torch.randn(length, hidden, generator=generator).to(torch.bfloat16),
                    "loss_mask": mask,
                }
            )

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, row: int) -> Item:
        return self.item(row, 0)

    def item(self, row: int, epoch: int) -> Item:
        return dict(self._items[row])

    def answer_lengths(self, rows: Sequence[int]) -> np.ndarray:
        return np.array([int(self._items[row]["loss_mask"].sum()) for row in rows])


def write_features(
    directory: Path, identity: dict[str, str], lengths: Sequence[int], hidden: int, vocab: int, seed: int = 0
) -> Path:
    """A real `features` artefact of random documents, for the target with this identity."""
    documents = SyntheticFeatures(lengths, hidden, vocab, seed)
    plan = StagePlan(
        kind="features",
        stage="data features",
        config=FeaturesConfig(Path("synthetic"), "synthetic", directory, rows_per_shard=max(1, len(lengths) // 4)),
        num_rows=len(lengths),
        fields=FIELDS + feature_codec.fields("bf16"),
        inputs={},
        identity={"target": identity},
        seed=seed,
    )

    def make(shard: Shard, advance: Any) -> ShardContent:
        rows, tensors = [], {}
        for number in range(shard.start, shard.stop):
            item = documents.item(number, 0)
            ids, start = item["input_ids"].tolist(), int(len(item["input_ids"]) * PROMPT_SHARE)
            row = {"id": str(number), "input_ids": ids, "prompt_length": start, "task": "synthetic"}
            rows.append(index_row(number, shard, row))
            tensors[key(number)] = item["features"]
        counts = {"tokens": sum(row["length"] for row in rows), "loss_tokens": sum(sum(r["loss_mask"]) for r in rows)}
        return ShardContent(rows, counts, tensors)

    run_stage(plan, make)
    return directory


def write_responses(directory: Path, target: str, lengths: Sequence[int], vocab: int, seed: int = 0) -> Path:
    """A real `responses` artefact of random tokens, which any target of this tokenizer may be trained on."""
    generator = torch.Generator().manual_seed(seed)
    documents = [torch.randint(vocab, (length,), generator=generator).tolist() for length in lengths]
    plan = StagePlan(
        kind="responses",
        stage="data responses",
        config=ResponsesConfig(prompts=Path("synthetic"), target=target, output=directory),
        num_rows=len(lengths),
        fields=RESPONSE_FIELDS,
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
