"""The frozen model of a training that is planned: its sizes by config.json, and a model of them without weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from draftsmith.data.models.hub import model_directory
from draftsmith.data.models.loading import DTYPES, read_config
from draftsmith.modules.layers import LlamaConfig, LlamaModel
from draftsmith.modules.targets.base import CausalLM, ModelInfo
from draftsmith.modules.targets.hf import HFLM
from draftsmith.modules.targets.llama import SUPPORTED, LlamaLM, llama_config, model_from_state
from draftsmith.modules.types import InputError
from draftsmith.train.planning.dry_run import FROZEN, DryRun


@dataclass(frozen=True)
class FrozenModel:
    """A frozen model by its config.json.

    config: of our lean path, or of transformers for a family that only transformers runs. params: tied weights once.
    stored, dtype: types of the weights in the checkpoint and in memory.
    """

    path: str
    config: Any
    info: ModelInfo
    params: int
    stored: torch.dtype
    dtype: torch.dtype

    @property
    def llama(self) -> LlamaConfig | None:
        """None for a family that only transformers runs."""
        return self.config if isinstance(self.config, LlamaConfig) else None

    def loaded(self, run: DryRun, on_cpu: bool, engine: str) -> tuple[CausalLM, int, int]:
        """The model without its weights, made in a dry run, and bytes: of its weights as they stay, and of most while
        they are read. On a GPU both are the model's own.

        On a CPU a checkpoint is mapped. Read by our lean path in its own type, it stays so, beside the fused copies of
        what it holds in parts; in another type, or by transformers, it is there beside the whole model.
        """
        lm: CausalLM
        with run.making(FROZEN):
            model, before = self._model(), run.made
            lm = LlamaLM(model, self.info) if isinstance(model, LlamaModel) else HFLM(model, self.info)
        size, fused = run.now[FROZEN], run.made - before
        if not on_cpu:
            return lm, size, size
        if self.llama is not None and engine != "hf" and self.stored == self.dtype:
            return lm, size + fused, size + fused
        return lm, size, size + self.params * self.stored.itemsize

    def _model(self) -> Any:
        if self.llama is None:
            return AutoModelForCausalLM.from_config(self.config, dtype=self.dtype)
        with torch.device("meta"):
            shapes = {name: weight.shape for name, weight in LlamaModel(self.llama).named_parameters()}
        state = {name: torch.empty(shape, dtype=self.dtype) for name, shape in shapes.items()}
        return model_from_state(self.llama, state, self.dtype)


def frozen_model(path: str, dtype: str) -> FrozenModel:
    """Sizes from config.json.

    dtype: float32, bfloat16, or auto for the checkpoint's own.

    Raises:
        InputError: no such model, or a config that neither we nor transformers can make a model of.
    """
    raw = read_config(path)
    stored = DTYPES.get(str(raw.get("dtype") or raw.get("torch_dtype") or "float32"), torch.float32)
    width = stored if dtype == "auto" else DTYPES[dtype]
    config: Any
    model: Any
    if raw.get("model_type") in SUPPORTED:
        config = llama_config(raw)
        sizes = (config.hidden_size, config.vocab_size, config.num_layers, config.max_position)
        with torch.device("meta"):
            model = LlamaModel(config)
    else:
        try:
            config = AutoConfig.from_pretrained(str(model_directory(path)))
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, dtype=width)
        except (ValueError, KeyError, OSError) as error:
            found = f"{path} ({raw.get('model_type')}: {str(error).splitlines()[0]})"
            remedy = "Only models that transformers knows by their config.json can be planned."
            raise InputError("model", found, "a causal language model", remedy) from error
        text = config.get_text_config()
        context = getattr(text, "max_position_embeddings", None) or 2048
        sizes = (text.hidden_size, text.vocab_size, text.num_hidden_layers, context)
    params = sum(p.numel() for p in model.parameters())
    return FrozenModel(path, config, ModelInfo(*sizes, (), {}), params, stored, width)
