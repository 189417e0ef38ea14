"""Settings of `draftsmith check`, with those of a check by a whole engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from draftsmith.data.export.check import CheckConfig
from draftsmith.data.settings import check_not_negative, check_positive


@dataclass(frozen=True, kw_only=True)
class EngineCheckConfig(CheckConfig):
    """Read a directory as another system would and compare it with what this project makes of it: names, settings,
    and logits on hidden states of the real model; or, with --engine vllm, serve it and compare the answers, drafts and
    accepted tokens with those of our own chain. Exits with 1 when anything differs.

    Attributes:
        engine: How models run here: lean for Llama-family weights, hf for any transformers model; auto takes lean where
            it can. vllm serves the directory (a head, or a draft model) with the target, greedily.
        dtype: Type of the weights; auto takes what the checkpoint holds, and with --engine vllm float32.
        engine_python: The python of an environment with vLLM, which is started. Default: that of `make engines` in this
            directory, or this one.
        server: Address of a vLLM server that runs with this target and drafter, in place of starting one.
        prompts: Held-out prompts, as of `eval bench`. Default for the embedded target: its own, of the split test.
        split: Keep prompts of this split.
        limit: Ask the first so many.
        max_new_tokens: Longest answer.
        num_drafted: Drafted tokens a round; 0 takes 5, or what the server drafts.
    """

    engine: Literal["auto", "lean", "hf", "vllm"] = "auto"  # type: ignore[assignment]  # one more than Loading has
    engine_python: Path | None = None
    server: str | None = None
    prompts: str | None = None
    split: str | None = None
    limit: int = 12
    max_new_tokens: int = 96
    num_drafted: int = 0

    def __post_init__(self) -> None:
        check_positive(self, "limit", "max_new_tokens")
        check_not_negative(self, "num_drafted")

    @property
    def serves(self) -> bool:
        return self.engine == "vllm"

    @property
    def loading(self) -> dict[str, Any]:
        dtype = "float32" if self.serves and self.dtype == "auto" else self.dtype
        return super().loading | {"dtype": dtype, "engine": "auto" if self.serves else self.engine}
