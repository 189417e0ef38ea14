"""Models and tokenizers from a path: a directory, a hub id, or one of the shipped models by its `embedded:` name."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from draftsmith.data.models.checkpoint import (
    check_proportions,
    checkpoint_files,
    end_tokens,
    read_model_json,
    read_settings,
    read_state,
)
from draftsmith.data.models.device import check_device
from draftsmith.data.models.digests import tensor_hash
from draftsmith.data.models.hub import model_directory
from draftsmith.data.models.identity import encoding_hash, model_identity, template_hash, vocabulary_hash
from draftsmith.data.models.parallel import check_placed, placement
from draftsmith.data.models.self_tests import cached_self_test
from draftsmith.modules.engine.low_precision import Precision, check_precision
from draftsmith.modules.layers import LlamaConfig
from draftsmith.modules.targets.base import CausalLM, ModelInfo
from draftsmith.modules.targets.llama import SUPPORTED, LlamaLM, llama_config, model_from_state
from draftsmith.modules.types import InputError

LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
# Names that a Llama's output embedding may have in its files; of a tied one, its embedding's.
OUTPUTS = ("lm_head.weight", "embed_tokens.weight")
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def load_lm(
    path: str,
    dtype: str = "float32",
    device: str = "cpu",
    engine: str = "auto",
    trust_remote_code: bool = False,
    packed: bool = False,
    parallel: str = "none",
    precision: Precision = "dtype",
) -> CausalLM:
    """A language model for decoding and teacher forcing, frozen.

    dtype: float32, bfloat16, float16, or auto (the checkpoint's own).
    engine: lean (Llama family), hf (any transformers causal model), or auto: lean where it applies.
    packed: for decoding on a CPU: the lean engine holds its weights in the layout of the CPU's kernels only. Such a
        model cannot be differentiated through.
    parallel: for a model larger than one device, on the hf engine: device_map spreads its layers over the devices of
        this process; tensor splits every layer over all processes, which then call it together, with the same input
        (`data/models/parallel.py`). none is one device.
    precision: of its weights where they are multiplied, on the lean engine (`modules.quantized`).

    Raises:
        InputError: unknown path, dtype or engine, or weights that do not fit the config.
    """
    if engine not in ("auto", "lean", "hf"):
        raise InputError("engine", engine, "auto, lean or hf", "Choose one of these.")
    check_device(device)
    check_precision("precision", precision, device)
    directory = model_directory(path)
    raw = read_settings(directory)
    resolved = _resolve_dtype(dtype, raw)
    check_proportions(raw, checkpoint_files(directory))
    if precision != "dtype":
        engine = "lean" if engine == "auto" and parallel == "none" else engine
        if engine != "lean":
            found = f"{precision} on the hf engine"
            raise InputError("precision", found, "the lean engine", "Leave the precision out, or pass --engine lean.")
    if parallel != "none":
        if engine == "lean":
            found = f"{parallel} on the lean engine"
            raise InputError("target_parallel", found, "the hf engine", "Pass --engine hf or auto.")
        return _load_hf(directory, raw, resolved, device, trust_remote_code, parallel)
    if engine == "lean" or (engine == "auto" and raw.get("model_type") in SUPPORTED):
        try:
            return _load_lean(directory, raw, resolved, device, packed, precision)
        except InputError as error:
            if engine == "lean" or "--engine hf" not in str(error):
                raise
    return _load_hf(directory, raw, resolved, device, trust_remote_code)


def read_config(path: str) -> dict[str, Any]:
    """`config.json` of a model, checked."""
    return read_settings(model_directory(path))


def vocabulary_size(path: str) -> int | None:
    """Return the vocabulary size in a model's `config.json`, or None if it has none."""
    raw = read_config(path)
    return {**raw, **(raw.get("text_config") or {})}.get("vocab_size")


def _resolve_dtype(dtype: str, raw: dict[str, Any]) -> torch.dtype:
    if dtype == "auto":
        dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32")
    if dtype not in DTYPES:
        raise InputError("dtype", dtype, f"auto, {', '.join(DTYPES)}", "Choose one of these.")
    return DTYPES[dtype]


def _load_lean(
    directory: Path, raw: dict[str, Any], dtype: torch.dtype, device: str, packed: bool, precision: Precision
) -> CausalLM:
    try:
        config = llama_config(raw)
        eos_ids = end_tokens(directory, raw)
        model = model_from_state(config, read_state(directory), dtype)
    except InputError:
        raise
    except (KeyError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        # Settings that contradict each other: more heads than width, rope of an unknown spelling.
        found = f"settings that make no model ({type(error).__name__}: {first_line(error)})"
        raise InputError(str(directory / "config.json"), found, "a model's", "Check the checkpoint.") from error
    model = model.to(device)
    info = ModelInfo(
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_layers=config.num_layers,
        max_position=config.max_position,
        eos_ids=eos_ids,
        identity=_identity(directory, raw, OUTPUTS),
        path=str(directory),
    )
    return LlamaLM(model, info, packed, precision)


def _load_hf(
    directory: Path,
    raw: dict[str, Any],
    dtype: torch.dtype,
    device: str,
    trust_remote_code: bool,
    parallel: str = "none",
) -> CausalLM:
    from draftsmith.modules.targets.hf import HFLM

    of_text = {**raw, **{key: value for key, value in (raw.get("text_config") or {}).items() if value is not None}}
    eos_ids = end_tokens(directory, of_text)
    model = load_transformers(directory, dtype, trust_remote_code, **placement(parallel, raw))
    if parallel == "none":
        model = model.to(device)
    else:
        check_placed(model, parallel)
    text = model.config.get_text_config()  # knows each architecture's own names (GPT-2's n_embd)
    for field in LOGIT_CHANGES:
        # These act on the logits after the output embedding, where `CausalLM.lm_head` ends: the distribution would be
        # wrong.
        if getattr(text, field, None) not in (None, 0, 1, 1.0):
            remedy = "This model family is not supported yet."
            raise InputError(field, getattr(text, field), "logits as the output embedding gives them", remedy)
    weight = model.get_output_embeddings().weight
    outputs = [name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter is weight]
    identity = _identity(directory, raw, outputs)
    if "lm_head" not in identity:  # of a name that the files do not have
        identity["lm_head"] = tensor_hash(weight)
    info = ModelInfo(
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        num_layers=text.num_hidden_layers,
        max_position=_longest(text),
        eos_ids=eos_ids,
        identity=identity,
        path=str(directory),
    )
    lm = HFLM(model, info)
    lm.refusals = cached_self_test(model, lm, parallel)
    return lm


def _longest(config: Any) -> int:
    """Most positions that a model reads by one function of its tokens.

    LongRoPE takes other frequencies for ALL positions once a text is longer than `original_max_position_embeddings`:
    keys in a cache are then of the wrong kind, and what a token's distribution is depends on what is read with it.
    """
    names = ("max_position_embeddings", "max_seq_len")  # MPT's
    longest = next((size for name in names if isinstance(size := getattr(config, name, None), int) and size > 0), 2048)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        longest = min(longest, rope.get("original_max_position_embeddings") or longest)
    return longest


def load_transformers(directory: Path, dtype: torch.dtype | str, trust_remote_code: bool = False, **spread: Any) -> Any:
    """A causal model as transformers builds it, on the CPU unless `spread` (`placement`) says otherwise.

    dtype: `auto` is the checkpoint's own.

    Raises:
        InputError: a checkpoint that is damaged, absent or not whole, or settings that transformers makes no model of.
    """
    from transformers import AutoModelForCausalLM

    checkpoint_files(directory)  # never pickles
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True, **spread
        )
    except torch.OutOfMemoryError:
        raise  # nothing is wrong with the checkpoint
    except ImportError as error:
        found = f"{directory}, which needs a package ({first_line(error)})"
        raise InputError("model", found, "packages that are installed", "Install it.") from error
    except Exception as error:  # what others wrote fails in the ways of each architecture, and of code that it brings
        if "trust_remote_code" in str(error):
            remedy = "Pass --trust-remote-code if you trust it."
            raise InputError("model", f"{directory}, which runs its own code", "leave to run it", remedy) from error
        found = f"{directory} ({type(error).__name__}: {first_line(error)})"
        raise InputError("model", found, "a whole checkpoint", "Fetch or build it again.") from error
    # transformers fills what is missing with random numbers and a warning.
    if missing := sorted(loading["missing_keys"]):
        found = f"{len(missing)} tensors missing ({', '.join(missing[:4])})"
        raise InputError("model", found, "exactly the tensors config.json asks for", "Check the checkpoint.")
    return model


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")[:300]


def saved_identity(path: str) -> dict[str, str]:
    """What `load_lm` says that a model is, from its files alone."""
    directory = model_directory(path)
    return _identity(directory, read_settings(directory), OUTPUTS)


def _identity(directory: Path, raw: dict[str, Any], outputs: Any) -> dict[str, str]:
    found = model_identity(directory, raw, outputs)
    if has_tokenizer(directory):
        found["tokenizer"] = tokenizer_identity(str(directory))["tokenizer"]
    return found


_trusted = False


def trust_code() -> None:
    """Let code that comes with a tokenizer run from here on: a command's --trust-remote-code holds for all its models,
    and the command line calls this."""
    global _trusted
    _trusted = True


def has_tokenizer(directory: Path) -> bool:
    return any((directory / name).exists() for name in TOKENIZERS)


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a model directory, hub id or embedded name.

    Raises:
        InputError: there is none, or its files are damaged.
    """
    from transformers import AutoTokenizer

    directory = model_directory(path)
    if not has_tokenizer(directory):
        raise InputError("tokenizer", f"{path} without tokenizer files", "tokenizer.json", "Save the tokenizer there.")
    read_settings(directory)  # which the library asks for the tokenizer's class
    for file in (directory / name for name in TOKENIZERS[:2]):
        if file.exists():
            read_model_json(file)
    try:
        return AutoTokenizer.from_pretrained(str(directory), trust_remote_code=_trusted)
    except Exception as error:  # the library in Rust raises plain exceptions
        if "trust_remote_code" in str(error):
            remedy = "Pass --trust-remote-code if you trust it."
            raise InputError("tokenizer", f"{path}, which runs its own code", "leave to run it", remedy) from error
        found = f"{path} with a damaged one ({type(error).__name__}: {first_line(error)})"
        raise InputError("tokenizer", found, "a tokenizer's files", "Fetch or save it again.") from error


def tokenizer_identity(path: str) -> dict[str, str]:
    """Content hashes: `tokenizer` of the vocabulary (with special tokens), `encoding` of all that makes ids of text,
    `chat_template`."""
    directory = model_directory(path)
    if not has_tokenizer(directory):
        load_tokenizer(path)  # raises
    files = sorted(file for file in directory.iterdir() if file.is_file() and file.suffix != ".safetensors")
    written = tuple(
        (file.name, *(file.stat().st_mtime_ns, file.stat().st_ctime_ns, file.stat().st_size)) for file in files
    )
    return dict(_tokenizer_identity(str(directory), written))


@functools.lru_cache(maxsize=16)
def _tokenizer_identity(directory: str, written: tuple[tuple[str, int, int, int], ...]) -> dict[str, str]:
    tokenizer = load_tokenizer(directory)
    return {
        "tokenizer": vocabulary_hash(tokenizer),
        "encoding": encoding_hash(Path(directory)),
        "chat_template": template_hash(tokenizer),
    }


def text_identity(path: str) -> dict[str, str]:
    """The part of `tokenizer_identity` that text's token ids depend on."""
    found = tokenizer_identity(path)
    return {name: found[name] for name in ("tokenizer", "encoding")}


def check_same_tokenizer(target: str, draft: str, flag: str = "draft") -> None:
    """Speculative decoding compares token ids: both models must mean the same by them. flag: what the user passed."""
    ours, theirs = tokenizer_identity(target)["tokenizer"], tokenizer_identity(draft)["tokenizer"]
    if ours != theirs:
        raise InputError(
            flag,
            f"{draft} with tokenizer {theirs}",
            f"the tokenizer of {target} ({ours})",
            "Use a draft of the same family.",
        )


def llama_shape(lm: CausalLM, path: str) -> LlamaConfig:
    """Sizes of a model that is loaded. Raises as `target_shape`."""
    return lm.config if isinstance(lm, LlamaLM) else target_shape(path)


def target_shape(path: str) -> LlamaConfig:
    """Sizes of a Llama-family target that runs by transformers.

    Raises:
        InputError: another family, or a switch that the head's layers do not have.
    """
    raw = read_config(path)
    try:
        return llama_config(raw)
    except InputError as error:
        found = f"{path} ({error.field}: {raw.get(error.field)})"
        expected = f"a target whose layers are those of {', '.join(SUPPORTED)}: the head is one of them"
        raise InputError("target", found, expected, "Train a head for another target.") from error
