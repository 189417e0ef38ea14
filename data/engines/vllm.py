"""Answers from vLLM in this process: its batches, cache and kernels, and its own drafters where it is told of one."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

from draftsmith.data.engines.server_answer import BadAnswer, checked_ids
from draftsmith.data.models.checkpoint import end_tokens
from draftsmith.data.models.hub import model_directory
from draftsmith.data.models.loading import read_config, saved_identity
from draftsmith.data.ranks import place
from draftsmith.data.store.reading import read_object
from draftsmith.data.text.turns import AnswerSettings, TargetTurn, Turn
from draftsmith.modules.types import InputError

OURS = ("model", "tokenizer", "skip_tokenizer_init", "dtype", "trust_remote_code", "generation_config")


class VllmEngine(AbstractContextManager["VllmEngine"]):
    """Answers turns, all that are asked together; ends its processes with the context.

    dtype: of the weights. args: a JSON object of what else `vllm.LLM` is to be told, as `--vllm-args` says.

    Attributes:
        identity: the target's, as of its files. context: its longest sequence here.
        answered_by: the version, and `args`, which may give another distribution (a quantised cache, say).

    Raises:
        InputError: vLLM is not installed, does not know an argument, or cannot hold this model; several ranks.
    """

    def __init__(self, settings: AnswerSettings, dtype: str, args: Path | None, trust_remote_code: bool):
        if place().world > 1:
            remedy = 'Give it the GPUs in --vllm-args, {"tensor_parallel_size": 8}, or pass --engine openai.'
            raise InputError("engine", f"vllm in {place().world} ranks", "one process, which starts its own", remedy)
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # nobody asked for what it would send
        try:
            from vllm import LLM, SamplingParams
        except ImportError as error:
            found = f"vllm, which cannot be imported: {error}"
            remedy = "pip install vllm, or pass --engine transformers, or openai and a server's address."
            raise InputError("engine", found, "vLLM in this environment", remedy) from error
        given = {} if args is None else read_arguments(args)
        self.identity = saved_identity(settings.target)
        self.answered_by = {"vllm": importlib.metadata.version("vllm"), **given}
        ours = {"tokenizer": None, "skip_tokenizer_init": True, "generation_config": "vllm"}
        try:
            self._llm = LLM(
                model=str(model_directory(settings.target)),
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                **{**ours, "disable_log_stats": True, **given},
            )
        except (TypeError, ValueError, RuntimeError) as error:
            found = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300]}"
            raise InputError("vllm_args", found, "what vllm.LLM takes", "Correct them, or choose an engine.") from error
        directory = model_directory(settings.target)
        raw = read_config(settings.target)
        self._ends = () if settings.ignore_eos else end_tokens(directory, raw)
        self._vocab_size = int((raw.get("text_config") or raw)["vocab_size"])
        self.settings, self._params = settings, SamplingParams
        self.context = int(self._llm.llm_engine.model_config.max_model_len)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._llm.llm_engine.engine_core.shutdown()

    def answers(self, turns: Sequence[Turn]) -> Iterator[tuple[int, TargetTurn]]:
        """Each turn's answer with its place in `turns`, when all are complete.

        Raises:
            InputError: an answer that is empty, too long or not of the vocabulary.
        """
        settings = self.settings
        own = settings.params
        sampling = [
            self._params(
                temperature=own.temperature,
                top_k=own.top_k or -1,
                top_p=own.top_p,
                max_tokens=min(settings.max_new_tokens, self.context - len(turn.prompt_ids)),
                seed=settings.row_seed(turn.row, turn.number),
                stop_token_ids=list(self._ends),
                ignore_eos=settings.ignore_eos,
                detokenize=False,
            )
            for turn in turns
        ]
        asked = [{"prompt_token_ids": turn.prompt_ids} for turn in turns]
        for i, made in enumerate(self._llm.generate(asked, sampling, use_tqdm=False)):
            try:
                tokens = checked_ids(list(made.outputs[0].token_ids), settings.max_new_tokens, self._vocab_size)
                if not tokens:
                    raise BadAnswer("an empty answer")
            except BadAnswer as error:
                remedy = "Leave --vllm-args out, or pass --engine transformers."
                raise InputError(
                    "engine", f"{error} to prompt {turns[i].row}", "an answer of vLLM's", remedy
                ) from error
            yield i, TargetTurn(tokens, ended=tokens[-1] in self._ends)


def read_arguments(path: Path) -> dict[str, Any]:
    """What `vllm.LLM` is to be told beside what `data responses` decides itself.

    Raises:
        InputError: no JSON object, or one with a key that is decided here.
    """
    try:
        given = read_object(path, {}, "Correct it.")
    except OSError as error:
        raise InputError("vllm_args", f"{path} ({error.strerror})", "a JSON file", "Check the path.") from error
    if taken := sorted(set(OURS) & set(given)):
        remedy = "Leave it out; --target, --dtype and --trust-remote-code say it."
        raise InputError("vllm_args", f"{taken[0]} in {path}", "what data responses does not decide itself", remedy)
    return given
