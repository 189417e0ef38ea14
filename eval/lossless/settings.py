"""Settings of `draftsmith eval lossless`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from draftsmith.data.heads.draft_settings import DraftSettings
from draftsmith.data.settings import Sampling, check_not_negative, check_positive
from draftsmith.eval.settings import AnswerLength, PromptChoice, Running
from draftsmith.modules.types import InputError, at_least, between


@dataclass(frozen=True)
class LosslessConfig(DraftSettings, PromptChoice, AnswerLength, Sampling, Running):
    """Certifies that decoding methods do not change what the target says. Exit code 1 when one does.

    Attributes:
        target: model directory, hub id or embedded:target.
        prompts: JSONL, JSON or Parquet file of chats, a prompts artefact, a data set, or embedded:prompts.
        output: directory that receives lossless.json.
        methods: name:setting=value, separated by commas, as in `draftsmith eval bench`.
        mid: model between draft and target.
        acceptance: acceptance head directory.
        limit: prompts of the greedy test.
        max_new_tokens: longest answer of the greedy test.
        sampled_prompts: prompts of the sampling test, the first of them; 0 leaves it out.
        sampled_tokens: longest answer of the sampling test.
        bias: size of a bias that is to be found: mean over emitted tokens of the total variation between the
            distribution that a token was drawn from and the target's.
        power: probability to find it; with bias and alpha it says how many answers are sampled.
        alpha: chance that all sampling tests together fail lossless methods, at most.
        temperature: of the sampling test.
        batch_size: prompts that are answered together, in rows.
        max_gap: largest logit gap to the best token of a greedy token, where the dtype is not float32.
        dtype: float32, bfloat16 or float16. engine: lean (Llama family), hf (any transformers model, alone
            only), or auto.
    """

    target: str
    prompts: str
    output: Path
    methods: str = "spec:k=5"
    mid: str | None = None
    acceptance: str | None = None
    limit: int = 20
    max_new_tokens: int = field(default=64, kw_only=True)
    sampled_prompts: int = 4
    sampled_tokens: int = 32
    bias: float = 0.015
    power: float = 0.9
    alpha: float = 1e-3
    temperature: float = field(default=1.0, kw_only=True)
    batch_size: int = 8
    max_gap: float = 0.5
    dtype: Literal["float32", "bfloat16", "float16"] = field(default="float32", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "limit", "max_new_tokens", "batch_size", "num_threads")
        check_not_negative(self, "sampled_prompts")
        at_least("sampled_tokens", self.sampled_tokens, 2)  # the first one is the prefill's
        for name in ("alpha", "bias", "power"):
            between(name, getattr(self, name), 0, 1)
        if not self.max_gap >= 0:
            raise InputError("max_gap", self.max_gap, "0 or more", "Correct it.")
        if self.sampling.greedy:
            raise InputError("temperature", self.temperature, "more than 0", "The greedy test is always made.")
