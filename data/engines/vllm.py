"""Responses from vLLM in this process, with its batching, cache and kernels, and its own drafters if configured."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from draftsmith.data.console import log_note
from draftsmith.data.engines.process import leave
from draftsmith.data.ranks import place
from draftsmith.data.text.turns import AnswerSettings, PendingTurn, TargetTurn
from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.pretrained.reading import read_object
from draftsmith.modules.targets.shape import text_config
from draftsmith.modules.types import InputError


def family_arguments(target: Checkpoint, states: bool) -> dict[str, Any]:
    """Return the arguments of vLLM that this target's family needs, as vLLM's own classes tell.

    states: hidden states are to be read.

    Raises:
        InputError: vLLM has no class that gives hidden states of this family.
    """
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.interfaces import is_hybrid, supports_eagle3
    from vllm.platforms import current_platform

    config, arguments = target.config, dict[str, Any]()
    native = next((name for name in config.get("architectures") or () if name in ModelRegistry.models), None)
    if native is None:
        # vLLM then runs transformers' class by itself.
        return arguments
    model = ModelRegistry.models[native].load_model_cls()
    if states and not supports_eagle3(model):
        if is_hybrid(model) or not native.endswith("ForCausalLM"):
            remedy = "Read its states with --loader hf."
            raise InputError("engine", f"vLLM's {native}, which gives no hidden states", "a class that does", remedy)
        # vLLM's option --model-impl would also hold for the model that stands for the states, which has one only.
        experts = any(config.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
        arguments["hf_overrides"] = {"architectures": [f"Transformers{'MoE' * experts}ForCausalLM"]}
    if is_hybrid(model) and current_platform.is_cpu():
        # Cached prefixes of recurrent states ask for chunked prefill, whose kernels need a GPU.
        arguments["enable_prefix_caching"] = False
        if "linear_key_head_dim" in text_config(config):
            arguments["dtype"] = "bfloat16"
    return arguments


def open_llm(
    target: Checkpoint, dtype: str, args: Path | None, trust_remote_code: bool, options: Mapping[str, Any] | None = None
) -> tuple[Any, dict[str, Any]]:
    """Start vLLM's engine on a target; return it with the arguments of its family and of the JSON file `args`.

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
    path, family = str(target.directory), family_arguments(target, states=bool(options))
    if family:
        log_note(f"vLLM: this target needs {json.dumps(family)}")
    # Killed without it, this process would leave vLLM's behind.
    signal.signal(signal.SIGTERM, leave)
    try:
        llm = LLM(
            model=path,
            trust_remote_code=trust_remote_code,
            **{"dtype": dtype, **defaults, **family, **arguments, **fixed},
        )
    except (TypeError, ValueError, RuntimeError) as error:
        found = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300]}"
        raise InputError("vllm_args", found, "what vllm.LLM takes", "Correct them, or choose an engine.") from error
    return llm, {**family, **arguments}


class VllmEngine(AbstractContextManager["VllmEngine"]):
    """vLLM in this process; its worker processes end with the context.

    dtype: of the weights. args: JSON file with further arguments of `vllm.LLM` (--vllm-args).

    Attributes:
        identity: of the target, from its files; and vLLM's version and `args`, which can change the distribution (a
            quantized cache, for example). context: longest sequence here.
    """

    def __init__(self, settings: AnswerSettings, dtype: str, args: Path | None, trust_remote_code: bool):
        self._llm, arguments = open_llm(settings.target, dtype, args, trust_remote_code)
        from vllm import SamplingParams

        answered_by = {"vllm": importlib.metadata.version("vllm"), **arguments}
        self.identity = {"target": settings.target.identity, "answered_by": answered_by}
        self._eos_ids = () if settings.ignore_eos else settings.target.end_tokens
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
