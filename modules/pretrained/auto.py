"""transformers' classes for a config.json: of causal models, and of multimodal ones, which read text alone here."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

logger = logging.getLogger("draftsmith")

# Names of these parts, as transformers' `get_encoder` has them.
TOWER = re.compile(r"(^|\.)(visual|(vision|image|audio|speech)_(tower|model|encoder))$")


def read_config(directory: Path, raw: Mapping[str, Any], trusted: bool) -> PreTrainedConfig:
    """Read config.json by the class of its family, which may come with the model if `trusted`.

    A family that transformers lacks is that of its class in `architectures`, as in servers: Kimi-K2 is DeepSeek-V3.
    """
    from transformers import CONFIG_MAPPING, AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if not trusted and raw.get("model_type") not in CONFIG_MAPPING:
        classes = {name: family for family, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()}
        for name in filter(classes.get, raw.get("architectures") or ()):
            logger.info("%s is read as %s, by its class %s", raw.get("model_type"), classes[name], name)
            return CONFIG_MAPPING[classes[name]].from_dict({**raw, "model_type": classes[name]})
    # Without an answer of ours transformers asks whether to run the model's code.
    return AutoConfig.from_pretrained(directory, trust_remote_code=trusted)


def auto_class(config: PreTrainedConfig) -> Any:
    """Return transformers' Auto class that has models of this config: of multimodal ones if there is no causal one."""
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    kinds = (AutoModelForCausalLM, AutoModelForMultimodalLM)
    return next((kind for kind in kinds if type(config) in kind._model_mapping), AutoModelForCausalLM)


def text_part(model: Any) -> Any:
    """Return what reads text of a model, without the layers that read images and sound, which text never reaches."""
    # Nemotron Omni has a whole causal model as a part, and no output embedding of its own.
    if model.get_output_embeddings() is None and model.get_decoder().get_output_embeddings() is not None:
        return model.get_decoder()
    known = type(model).__module__.startswith("transformers.")  # code of a repository may name others so
    towers = [part for name, part in model.named_modules() if known and TOWER.search(name)]
    for stacks in (vars(part)["_modules"] for tower in towers for part in tower.modules()):
        # Only these: some models ask for the device of a tower, whose other weights are few.
        stacks.update({name: nn.ModuleList() for name, own in stacks.items() if isinstance(own, nn.ModuleList)})
    return model
