"""Responses from vLLM in this process, with its batching, cache and kernels, and its own drafters if configured."""

from __future__ import annotations

import importlib.metadata
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from draftsmith.data.engines.process import leave
from draftsmith.data.text.turns import AnswerSettings, PendingTurn, TargetTurn
from draftsmith.modules.pretrained.checkpoint import end_tokens
from draftsmith.modules.pretrained.hub import model_directory, read_config
from draftsmith.modules.pretrained.models import saved_identity
from draftsmith.modules.pretrained.ranks import place
from draftsmith.modules.pretrained.reading import read_object
from draftsmith.modules.types import InputError


def open_llm(
    target: str, dtype: str, args: Path | None, trust_remote_code: bool, options: Mapping[str, Any] | None = None
) -> tuple[Any, dict[str, Any]]:
    """Start vLLM's engine on a target; return it with the arguments of the JSON file `args`.

    options: arguments that a user may not change.

    Raises:
        InputError: vLLM is missing, refuses the arguments, or there are several ranks.
    """
    if place().world > 1:
        remedy = 'Give it the GPUs in --vllm-args, {"tensor_parallel_size": 8}, or ask a server.'
        raise InputError("engine", f"vllm in {place().world} ranks", "one process, which starts its own", remedy)
    # vLLM reports its use to its makers unless told otherwise.
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    try:
        from vllm import LLM
    except ImportError as error:
        found = f"vllm, which cannot be imported: {error}"
        remedy = "pip install 'draftsmith[vllm]', or choose another engine."
        raise InputError("engine", found, "vLLM in this environment", remedy) from error
    arguments = {} if args is None else read_object(args, {}, "Correct it.")
    if taken := sorted(set(options or {}) & set(arguments)):
        raise InputError("vllm_args", ", ".join(taken), "arguments that this stage leaves free", "Leave them out.")
    # On a CPU vLLM 0.32 fails where it cuts the prompt of a request with a seed ("CPU Generator does not use offset").
    defaults = {"disable_log_stats": True} | ({} if torch.cuda.device_count() else {"enable_chunked_prefill": False})
    # Without its tokenizer and generation config vLLM samples exactly what the request says.
    fixed = {"tokenizer": None, "skip_tokenizer_init": True, "generation_config": "vllm", **(options or {})}
    path = str(model_directory(target))
    # Killed without it, this process would leave vLLM's behind.
    signal.signal(signal.SIGTERM, leave)
    try:
        llm = LLM(
            model=path,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            **{**defaults, **arguments, **fixed},
        )
    except (TypeError, ValueError, RuntimeError) as error:
        found = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300]}"
        raise InputError("vllm_args", found, "what vllm.LLM takes", "Correct them, or choose an engine.") from error
    return llm, arguments


class VllmEngine(AbstractContextManager["VllmEngine"]):
    """vLLM in this process; its worker processes end with the context.

    dtype: of the weights. args: JSON file with further arguments of `vllm.LLM` (--vllm-args).

    Attributes:
        identity: of the target, from its files; and vLLM's version and `args`, which can change the distribution (a
            quantized cache, for example). context: longest sequence here.
    """

    def __init__(self, settings: AnswerSettings, dtype: str, args: Path | None, trust_remote_code: bool):
        directory = model_directory(settings.target)
        self._llm, arguments = open_llm(settings.target, dtype, args, trust_remote_code)
        from vllm import SamplingParams

        answered_by = {"vllm": importlib.metadata.version("vllm"), **arguments}
        self.identity = {"target": saved_identity(settings.target), "answered_by": answered_by}
        self._eos_ids = () if settings.ignore_eos else end_tokens(directory, read_config(settings.target))
        self.settings, self._params = settings, SamplingParams
        self.context = int(self._llm.llm_engine.model_config.max_model_len)

    def __exit__(self, *error: object) -> None:
        self._llm.llm_engine.engine_core.shutdown()

    def answers(self, turns: Sequence[PendingTurn]) -> Iterator[tuple[int, TargetTurn]]:
        """Yield (number in `turns`, response) when all are complete."""
        settings, params = self.settings, self.settings.params
        sampling = [
            self._params(
                temperature=params.temperature,
                top_k=params.top_k or -1,
                top_p=params.top_p,
                max_tokens=min(settings.max_new_tokens, self.context - len(turn.prompt_ids)),
                seed=settings.row_seed(turn.row, turn.number),
                stop_token_ids=list(self._eos_ids),
                ignore_eos=settings.ignore_eos,
                detokenize=False,
            )
            for turn in turns
        ]
        prompts = [{"prompt_token_ids": turn.prompt_ids} for turn in turns]
        # vLLM returns outputs in the order of the prompts.
        for i, output in enumerate(self._llm.generate(prompts, sampling, use_tqdm=False)):
            tokens = list(output.outputs[0].token_ids)
            yield i, TargetTurn(tokens, ended=tokens[-1] in self._eos_ids)
