"""Stage `data responses`: the target answers the prompts. What is stored is what it sampled: token ids, not text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from draftsmith.data.batched import answer_all, row_uniforms, set_threads
from draftsmith.data.device import pick_device
from draftsmith.data.manifest import Field, open_artefact, volatile
from draftsmith.data.models import load_lm, text_identity
from draftsmith.data.naming import naming
from draftsmith.data.progress import Advance
from draftsmith.data.prompts import check_not_negative, check_positive
from draftsmith.data.server import ServerConfig
from draftsmith.data.shards import Plan, Rows, Shard, ShardContent, run_stage
from draftsmith.data.writer import sole_writer
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import InputError, SamplingParams

FIELDS = (
    Field("id", "string"),
    Field("input_ids", "list<int32>", ("T",)),
    Field("prompt_length", "int32"),
    Field("ended", "bool"),
    Field("retokenised", "bool"),
    Field("task", "string"),
    Field("text", "string"),
    Field("server_tokens", "int32"),
)


@dataclass(frozen=True)
class ResponsesConfig:
    """How the target answers.

    Attributes:
        prompts: Directory that `data prompts` wrote.
        target: Directory or hub id of the target model, or embedded:target.
        output: Directory to write.
        engine: In process with our own batching (transformers), or through an OpenAI-compatible server (openai).
        temperature: 0 is greedy.
        top_k: Sample among the k most probable tokens; 0 is all.
        top_p: Sample among the most probable tokens that hold this much probability; 1 is all.
        max_new_tokens: Longest answer, in tokens.
        seed: Of the sampling. Each row has random numbers of its own, whatever shares its batch.
        limit: Only the first so many prompts; 0 takes all.
        batch_size: Prompts answered together.
        rows_per_shard: Prompts in each shard; what a killed run loses at most.
        dtype: Type of the weights: float32, bfloat16, float16, or auto for the checkpoint's own.
        lm_engine: How the model runs in process: lean for Llama-family weights, hf for any transformers model.
        device: cpu, cuda:0, ... ; auto takes this rank's GPU where there is one.
        num_threads: CPU threads; 0 is torch's own choice.
        trust_remote_code: Let the model's repository run its own code.
        server: Where and how to ask, for engine openai.
    """

    prompts: Path = volatile()
    target: str = volatile()
    output: Path = volatile()
    engine: Literal["transformers", "openai"] = "transformers"
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int = 256
    seed: int = 0
    limit: int = 0
    batch_size: int = 32
    rows_per_shard: int = 256
    dtype: str = "float32"
    lm_engine: Literal["auto", "lean", "hf"] = "auto"
    device: str = volatile("auto")
    num_threads: int = volatile(0)
    trust_remote_code: bool = volatile(False)
    server: ServerConfig = field(default_factory=ServerConfig)

    def __post_init__(self) -> None:
        check_positive(self, "max_new_tokens", "batch_size", "rows_per_shard")
        check_not_negative(self, "limit", "num_threads")
        _ = self.params

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(self.temperature, self.top_k, self.top_p)


@sole_writer(shared=True)
def run(config: ResponsesConfig) -> Path:
    """Write the artefact `responses`; returns its directory."""
    set_threads(config.num_threads)
    manifest = open_artefact(config.prompts, "prompts", text_identity(config.target))
    prompts = Rows(config.prompts, manifest)
    num_rows = min(len(prompts), config.limit) if config.limit else len(prompts)
    if config.engine == "openai":
        from draftsmith.data.server import ServerEngine

        engine = ServerEngine(config, manifest.identity["chat_template"])
        make, target = engine.make(prompts), engine.identity
    else:
        device = pick_device(config.device)
        lm = load_lm(config.target, config.dtype, device, config.lm_engine, config.trust_remote_code, packed=True)
        make, target = in_process(lm, prompts, config), lm.info.identity
    plan = Plan(
        kind="responses",
        stage="data responses",
        directory=config.output,
        config=config,
        num_rows=num_rows,
        rows_per_shard=config.rows_per_shard,
        fields=FIELDS,
        inputs={"prompts": manifest.digest},
        identity={**manifest.identity, "target": target},
        sampling={"temperature": config.temperature, "top_k": config.top_k, "top_p": config.top_p},
        seed=config.seed,
    )
    run_stage(plan, make)
    return config.output


def in_process(lm: CausalLM, prompts: Rows, config: ResponsesConfig) -> Callable[[Shard, Advance], ShardContent]:
    """Answers a shard in batches of like length. A batch never crosses a shard, so that a row's company, and with it
    the last bits of its logits, does not depend on what was there before or on the number of ranks."""

    def make(shard: Shard, advance: Advance) -> ShardContent:
        rows = prompts.read(shard.start, shard.stop)
        ids = [row["prompt_ids"] for row in rows]
        for offset, prompt in enumerate(ids):
            check_context(shard.start + offset, len(prompt), lm.info.max_position)

        def uniforms(offset: int) -> np.ndarray:
            return row_uniforms("responses", config.seed, shard.start + offset, config.max_new_tokens)

        with naming([row["id"] for row in rows]):
            answers = answer_all(lm, ids, config.params, config.max_new_tokens, config.batch_size, uniforms, advance)
        return content(rows, answers, lm.info.eos_ids)

    return make


def check_context(row: int, length: int, max_position: int) -> None:
    """Raises InputError where a prompt leaves no room for an answer."""
    if length >= max_position:
        remedy = "Make the prompts for this target: data prompts --overlong drop."
        raise InputError(
            f"prompt {row}", f"{length} tokens", f"fewer than the target's context, {max_position}", remedy
        )


def content(rows: list[dict[str, Any]], answers: list[list[int]], eos_ids: tuple[int, ...]) -> ShardContent:
    """The shard of answers that were sampled here."""
    made = [
        {
            "id": row["id"],
            "input_ids": row["prompt_ids"] + tokens,
            "prompt_length": len(row["prompt_ids"]),
            "ended": tokens[-1] in eos_ids,
            "retokenised": False,
            "task": row["task"],
        }
        for row, tokens in zip(rows, answers, strict=True)
    ]
    return ShardContent(made, count(made))


def count(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Counts of a shard of responses."""
    return {
        "tokens": sum(len(row["input_ids"]) for row in rows),
        "response_tokens": sum(len(row["input_ids"]) - row["prompt_length"] for row in rows),
        "ended": sum(row["ended"] for row in rows),
        "retokenised": sum(row["retokenised"] for row in rows),
    }
