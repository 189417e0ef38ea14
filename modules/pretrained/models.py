"""Load models and tokenizers by path: a directory, a hub id, or a shipped model by its `embedded:` name."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from draftsmith.modules.formats.base import FLOATS, same_values
from draftsmith.modules.llama_config import layers_of
from draftsmith.modules.pretrained.auto import auto_class, text_part
from draftsmith.modules.pretrained.checkpoint import Checkpoint, opened
from draftsmith.modules.pretrained.identity import tensor_hash
from draftsmith.modules.pretrained.parity import check_lean
from draftsmith.modules.pretrained.quantized import SCALE
from draftsmith.modules.pretrained.reading import FETCH
from draftsmith.modules.pretrained.tokenizers import TRUST
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.targets.llama import LlamaLM, model_from_state
from draftsmith.modules.targets.outer import OuterLM, OuterWeights
from draftsmith.modules.targets.readout import Readout, candidates
from draftsmith.modules.targets.self_test import REMEDY as OTHER_MODEL
from draftsmith.modules.targets.self_test import self_test
from draftsmith.modules.targets.shape import ON_HF, SUPPORTED, llama_config
from draftsmith.modules.types import InputError, describe_error

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from draftsmith.modules.targets.hf import HFLM

logger = logging.getLogger("draftsmith")

IN_BFLOAT16 = "Its weights have several types: pass --dtype bfloat16."
# Tokens on which the way from states to logits is found.
NUM_FITTED = 24


def check_device(name: str) -> None:
    """Raise InputError for a name that is no device, or a device that this machine does not have."""
    num_gpus = torch.cuda.device_count()
    gpu = re.fullmatch(r"cuda(?::(\d+))?", name)
    if name != "cpu" and (gpu is None or int(gpu[1] or 0) >= num_gpus):
        expected = f"cpu, or cuda:N with N below the number of visible GPUs, {num_gpus}"
        raise InputError("device", name, expected, "Correct it.")


def dtype_of(dtype: str, checkpoint: Checkpoint, device: str) -> str:
    """Return the name of the type that weights have. `auto` is float32 on a CPU, elsewhere the checkpoint's own.

    On a CPU float32 is faster than bfloat16 at the row counts of small models.
    """
    if dtype != "auto":
        return dtype
    return "float32" if device == "cpu" else checkpoint.dtype


def weight_type(dtype: str, checkpoint: Checkpoint, device: str) -> torch.dtype:
    """Return the type that weights have (`dtype_of`)."""
    name = dtype_of(dtype, checkpoint, device)
    if name not in FLOATS:
        raise InputError("dtype", name, f"auto, {', '.join(FLOATS)}", "Choose one of these.")
    return FLOATS[name]


def load_lm(
    model: str | Path | Checkpoint,
    dtype: str = "auto",
    device: str = "cpu",
    loader: str = "auto",
    trust_remote_code: bool = False,
    packed: bool = False,
) -> CausalLM:
    """Load a frozen language model for decoding and teacher forcing.

    dtype: float32, bfloat16, float16, or auto (`dtype_of`).
    loader: lean (Llama family), hf (any transformers causal model), or auto: lean where it applies.
    packed: for decoding on a CPU with the lean loader: keep the weights only in the layout of the CPU's kernels. Such
        a model cannot be differentiated through.

    Raises:
        InputError: unknown path, dtype or loader, or weights that do not fit the config.
    """
    if loader not in ("auto", "lean", "hf"):
        raise InputError("loader", loader, "auto, lean or hf", "Choose one of these.")
    check_device(device)
    checkpoint = opened(model)
    checkpoint.trust_remote_code |= trust_remote_code
    weights = weight_type(dtype, checkpoint, device)
    # The lean engine is preferred: it runs trees and rows without transformers' overhead.
    if loader == "lean" or (loader == "auto" and checkpoint.config.get("model_type") in SUPPORTED):
        try:
            return _load_lean(checkpoint, weights, device, packed)
        except InputError as error:
            # `auto` falls back to transformers only for what the lean engine does not support, not for damage.
            if loader == "lean" or error.remedy != ON_HF:
                raise
            logger.info("%s runs on transformers (%s: %s)", checkpoint.directory, error.field, error.found)
    return _load_hf(checkpoint, weights, device)


def load_fitting(model: str | Path | Checkpoint, target: CausalLM, **loading: Any) -> CausalLM:
    """Load a draft of the target's tokenizer, and fit its vocabulary to the target's."""
    lm = load_lm(model, **loading)
    lm.fit_vocabulary(target.info.vocab_size)
    return lm


def load_outer(model: str | Path | Checkpoint, dtype: str = "auto", device: str = "cpu") -> OuterLM:
    """Load only what surrounds a target's layers, for heads that learn from states of another process.

    An output embedding of its own counts whatever `tie_word_embeddings` says, as in transformers and vLLM.

    Raises:
        InputError: unknown path or dtype, or or weights that are missing, quantized or of other sizes.
    """
    check_device(device)
    checkpoint = opened(model)
    info, wanted = checkpoint.info, weight_type(dtype, checkpoint, device)
    sizes, names = (info.vocab_size, info.hidden_size), checkpoint.outer_names
    tensors = checkpoint.read_outer(tuple(names))
    if "output" in tensors and same_values(tensors["embeddings"], tensors["output"]):
        del tensors["output"]
    for field in {"embeddings", "output"} & tensors.keys():
        if (shape := tuple(tensors[field].shape)) != sizes:
            what = f"{checkpoint.directory} with {names[field]} of {shape[0]} x {shape[1]}"
            raise InputError("model", what, f"{sizes[0]} x {sizes[1]}, as config.json says", FETCH)
    # One after the other: of a large target not everything is held in both types.
    moved = {field: tensors.pop(field).to(device, wanted) for field in list(tensors)}
    weights = OuterWeights(**{"output": moved["embeddings"], **moved})
    return OuterLM(weights, info, next(candidates(checkpoint.text, ("none",))))


def _load_lean(checkpoint: Checkpoint, dtype: torch.dtype, device: str, packed: bool) -> CausalLM:
    checkpoint.check_weights()
    shape = checkpoint.shape
    if shape.reasons or shape.family not in SUPPORTED:
        # Raises the reason why the lean engine does not compute such layers.
        llama_config(checkpoint.config)
    check_lean(checkpoint.config, shape)
    model = model_from_state(layers_of(shape), checkpoint.state(dtype), dtype)
    return LlamaLM(model.to(device), checkpoint.info, packed)


def _load_hf(checkpoint: Checkpoint, dtype: torch.dtype, device: str) -> CausalLM:
    from draftsmith.modules.targets.hf import HFLM

    model = load_transformers(checkpoint, dtype).to(device)
    with _reading_text(model):
        lm = HFLM(model, checkpoint.info)
    # The files store the output embedding under another name than is known.
    if "lm_head" not in lm.info.identity:
        lm.info.identity["lm_head"] = tensor_hash(model.get_output_embeddings().weight)
    fit_readout(lm, candidates(checkpoint.text, ("none",)))
    lm.no_trees = self_test(model, lm, lm.mixers)
    return lm


@contextlib.contextmanager
def _reading_text(model: Any) -> Iterator[None]:
    """Raise InputError for a model that cannot read a text: some multimodal ones need an image."""
    try:
        yield
    except (torch.OutOfMemoryError, InputError):
        raise
    except Exception as error:  # each architecture fails in its own way
        what = f"{type(model).__name__}, which fails when it reads a text ({describe_error(error)})"
        # Some quantization methods of transformers compute in bfloat16, whatever type was asked for.
        remedy = IN_BFLOAT16 if len({weight.dtype for weight in model.parameters()}) > 1 else OTHER_MODEL
        raise InputError("model", what, "logits and hidden states of a text", remedy) from error


@torch.inference_mode()
def fit_readout(lm: HFLM, readouts: Iterable[Readout]) -> None:
    """Take the way from states to logits whose logits are nearest to the model's own; `self_test` refuses other ways.

    Raises:
        InputError: the model cannot read a text, or gives states of another number of layers than config.json says.
    """
    ids = torch.arange(1, NUM_FITTED, device=lm.device)[None] * (lm.info.vocab_size // NUM_FITTED)
    with _reading_text(lm.model):
        output = lm.model(input_ids=ids, use_cache=False, output_hidden_states=True)
        own, states, found = output.logits.to(lm.device), lm.features(ids), dict[float, Readout]()
    for lm.readout in readouts:
        found.setdefault((lm.lm_head(states) - own).float().norm().nan_to_num(math.inf).item(), lm.readout)
    lm.readout = found[min(found)]
    if output.hidden_states is not None and len(output.hidden_states) != lm.info.num_layers + 1:
        what = f"{type(lm.model).__name__}, with states of {len(output.hidden_states) - 1} layers"
        raise InputError("model", what, f"{lm.info.num_layers}, as its config.json counts them", OTHER_MODEL)


def without_quantization(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a copy of a config by which transformers reads plain weights."""
    config = copy.deepcopy(config)
    for part in (config, config.get_text_config()):
        vars(part).pop("quantization_config", None)
    return config


def load_transformers(checkpoint: Checkpoint, dtype: torch.dtype | str, state: dict[str, Tensor] | None = None) -> Any:
    """Load a model that reads text with transformers, on the CPU.

    dtype: `auto` is the checkpoint's own. state: weights in the place of the files'.
    """
    # Raises for a directory with pickles only, which transformers would load, for a file that is damaged, and for a
    # pointer of git-lfs.
    directory, trusted, quantized = checkpoint.directory, checkpoint.trust_remote_code, checkpoint.quantized
    checkpoint.check_weights(by_transformers=True)
    source: dict[str, Any] = {"pretrained_model_name_or_path": directory}
    if quantized.weights:
        computed = dtype if isinstance(dtype, torch.dtype) else weight_type(checkpoint.dtype, checkpoint, "cpu")
        state = checkpoint.state(computed) if state is None else state
    if state is not None:
        source = {"pretrained_model_name_or_path": None, "state_dict": state}
    try:
        config = checkpoint.known if quantized.by_transformers else without_quantization(checkpoint.known)
        kind = auto_class(config)
        if state is not None:
            # An Auto class looks for an adapter beside the files, and here are none.
            with torch.device("meta"):
                built = kind.from_config(config, trust_remote_code=trusted)
            # Of some wrappers it takes the text part.
            kind, config = type(built), built.config
        how = {"config": config, "dtype": dtype, "trust_remote_code": trusted}
        model, loading = kind.from_pretrained(**source, **how, output_loading_info=True)
    except torch.OutOfMemoryError:
        # Memory says nothing about the checkpoint.
        raise
    except ImportError as error:
        found = f"{directory}, which needs a package ({describe_error(error)})"
        raise InputError("model", found, "packages that are installed", "Install it.") from error
    except Exception as error:
        # Each architecture, and code that a model brings, fails in its own way.
        if "trust_remote_code" in str(error):
            raise InputError("model", f"{directory}, which runs its own code", "leave to run it", TRUST) from error
        if quantized.by_transformers:
            raise quantized.error(directory, describe_error(error)) from error
        found, invalid = f"{directory} ({describe_error(error)})", "Validation" in type(error).__name__
        expected, remedy = ("valid settings", "Correct config.json.") if invalid else ("a whole checkpoint", FETCH)
        raise InputError("model", found, expected, remedy) from error
    # transformers fills missing tensors with random numbers and only warns.
    if missing := sorted(loading["missing_keys"]):
        found = f"{len(missing)} tensors missing ({', '.join(missing[:4])})"
        raise InputError("model", found, "exactly the tensors config.json asks for", "Check the checkpoint.")
    if not quantized.weights or loading["unexpected_keys"]:
        checkpoint.log_unread(loading["unexpected_keys"])
    if scales := sorted(filter(SCALE.search, loading["unexpected_keys"])):
        raise quantized.error(directory, f"{len(scales)} scales that transformers does not read, {scales[0]}")
    return text_part(model)
