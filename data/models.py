"""Models and tokenizers from a path: a directory, a hub id, or one of the shipped models by its `embedded:` name."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from draftsmith.data.parallel import check_placed, placement
from draftsmith.modules.targets.base import CausalLM, ModelInfo
from draftsmith.modules.types import InputError

EMBEDDED = "embedded:"
LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def resolve_model(path: str) -> str:
    """`embedded:NAME` -> the shipped file or directory; a local directory or a hub id stays as it is."""
    if not str(path).startswith(EMBEDDED):
        return str(path)
    name = str(path).removeprefix(EMBEDDED)
    root = Path(__file__).parent / "embedded"
    found = root / ("prompts.jsonl" if name == "prompts" else name)
    if not found.exists():
        shipped = sorted(p.name for p in root.iterdir() if (p / "config.json").exists())
        raise InputError("path", path, f"one of {', '.join(EMBEDDED + name for name in shipped)}", "Name one of these.")
    return str(found)


def model_directory(path: str, more: tuple[str, ...] = ()) -> Path:
    """The local directory of a model; a hub id is downloaded (or taken from the cache) first.

    more: patterns of files to download beside those that a model of our own kind has.
    """
    resolved = resolve_model(path)
    directory = Path(resolved)
    if directory.is_dir():
        if not (directory / "config.json").exists():
            raise InputError(
                "model", f"{path} without config.json", "a transformers model directory", "Check the path."
            )
        return directory
    if directory.exists() or resolved.startswith((".", "/", "~")) or resolved.count("/") != 1:
        raise InputError(
            "model", path, "a transformers model directory, a hub id or embedded:target", "Check the path."
        )
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", *more]
    try:
        return Path(snapshot_download(resolved, allow_patterns=patterns))
    except Exception as error:  # the hub client raises a family of its own: no network, no such id, no access
        raise InputError(
            "model", f"{path} ({type(error).__name__})", "a directory or a hub id", "Check it, or log in."
        ) from error


def read_state(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory's safetensors files, as stored."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = sorted(directory.glob("model*.safetensors"))
    if not files:
        raise InputError(
            "model", f"{directory} without safetensors", "model*.safetensors", "Save it as safetensors first."
        )
    state: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            state.update(load_file(file))
        except SafetensorError as error:
            raise InputError(
                str(file), f"damaged ({error})", "a whole safetensors file", "Fetch or build it again."
            ) from error
    return state


def tensor_hash(tensor: torch.Tensor) -> str:
    """Content hash of a tensor's values in bf16, so that it does not depend on the dtype it was loaded in."""
    data = tensor.detach().to("cpu", torch.bfloat16).contiguous().view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()[:16]


def end_tokens(directory: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    """End tokens: generation_config.json first, as `generate` does, then config.json."""
    ids = raw.get("eos_token_id")
    generation = directory / "generation_config.json"
    if generation.exists():
        ids = json.loads(generation.read_text()).get("eos_token_id", ids)
    return () if ids is None else tuple(ids) if isinstance(ids, list) else (ids,)


def config_hash(raw: dict[str, Any]) -> str:
    """Hash of what makes the model: bookkeeping fields that saving changes do not count."""
    skipped = ("transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache")
    kept = {key: value for key, value in raw.items() if key not in skipped}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def load_lm(
    path: str,
    dtype: str = "float32",
    device: str = "cpu",
    engine: str = "auto",
    trust_remote_code: bool = False,
    packed: bool = False,
    parallel: str = "none",
) -> CausalLM:
    """A language model for decoding and teacher forcing, frozen.

    dtype: float32, bfloat16, float16, or auto (the checkpoint's own).
    engine: lean (Llama family), hf (any transformers causal model), or auto: lean where it applies.
    packed: for decoding on a CPU: the lean engine holds its weights in the layout of the CPU's kernels only. Such a
        model can not be differentiated through.
    parallel: for a model larger than one device, on the hf engine: device_map spreads its layers over the devices of
        this process; tensor splits every layer over all processes, which then call it together, with the same input
        (`data/parallel.py`). none is one device.

    Raises:
        InputError: unknown path, dtype or engine, or weights that do not fit the config.
    """
    from draftsmith.modules.targets.llama import SUPPORTED

    if engine not in ("auto", "lean", "hf"):
        raise InputError("engine", engine, "auto, lean or hf", "Choose one of these.")
    directory = model_directory(path)
    raw = read_object(directory / "config.json")
    resolved = _resolve_dtype(dtype, raw)
    if parallel != "none":
        if engine == "lean":
            found = f"{parallel} on the lean engine"
            raise InputError("target_parallel", found, "the hf engine", "Pass --engine hf or auto.")
        return _load_hf(directory, raw, resolved, device, trust_remote_code, parallel)
    if engine == "lean" or (engine == "auto" and raw.get("model_type") in SUPPORTED):
        try:
            return _load_lean(directory, raw, resolved, device, packed)
        except InputError as error:
            if engine == "lean" or "--engine hf" not in str(error):
                raise
    return _load_hf(directory, raw, resolved, device, trust_remote_code)


def read_config(path: str) -> dict[str, Any]:
    """`config.json` of a model, as it is."""
    return read_object(model_directory(path) / "config.json")


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        InputError: damaged, or JSON of another kind.
    """
    try:
        found = json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError) as error:  # no JSON or no text; nested without end
        raise InputError(str(file), f"damaged ({error})", "JSON", "Fetch or build it again.") from error
    if not isinstance(found, dict):
        raise InputError(str(file), f"a JSON {type(found).__name__}", "a JSON object", "Fetch or build it again.")
    return found


def _resolve_dtype(dtype: str, raw: dict[str, Any]) -> torch.dtype:
    if dtype == "auto":
        dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32")
    if dtype not in DTYPES:
        raise InputError("dtype", dtype, f"auto, {', '.join(DTYPES)}", "Choose one of these.")
    return DTYPES[dtype]


def _load_lean(directory: Path, raw: dict[str, Any], dtype: torch.dtype, device: str, packed: bool) -> CausalLM:
    from draftsmith.modules.targets.llama import LlamaLM, llama_config, model_from_state

    config = llama_config(raw)
    model = model_from_state(config, read_state(directory), dtype).to(device)
    info = ModelInfo(
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_layers=config.num_layers,
        max_position=config.max_position,
        eos_ids=end_tokens(directory, raw),
        identity=_identity(raw, model.lm_head.weight),
    )
    return LlamaLM(model, info, packed)


def _load_hf(
    directory: Path,
    raw: dict[str, Any],
    dtype: torch.dtype,
    device: str,
    trust_remote_code: bool,
    parallel: str = "none",
) -> CausalLM:
    from draftsmith.modules.targets.hf import HFLM

    model = load_transformers(directory, dtype, trust_remote_code, **placement(parallel, raw))
    if parallel == "none":
        model = model.to(device)
    else:
        check_placed(model, parallel)
    text = model.config.get_text_config()  # knows each architecture's own names (GPT-2's n_embd)
    for field in LOGIT_CHANGES:
        # These act on the logits after the output embedding, where `CausalLM.lm_head` ends: the law would be wrong.
        if getattr(text, field, None) not in (None, 0, 1, 1.0):
            remedy = "This model family is not supported yet."
            raise InputError(field, getattr(text, field), "logits as the output embedding gives them", remedy)
    info = ModelInfo(
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        num_layers=text.num_hidden_layers,
        max_position=getattr(text, "max_position_embeddings", None) or 2048,
        eos_ids=end_tokens(directory, raw.get("text_config") or raw),
        identity=_identity(raw, model.get_output_embeddings().weight),
    )
    return HFLM(model, info)


def load_transformers(directory: Path, dtype: torch.dtype | str, trust_remote_code: bool = False, **spread: Any) -> Any:
    """A causal model as transformers builds it, on the CPU unless `spread` (`placement`) says otherwise.

    dtype: `auto` is the checkpoint's own.

    Raises:
        InputError: a checkpoint that is damaged, absent or not whole.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True, **spread
        )
    except (SafetensorError, OSError, RuntimeError) as error:  # damaged, absent, or tensors of another shape
        found = str(error).strip().splitlines()[0]
        raise InputError("model", f"{directory} ({found})", "a whole checkpoint", "Fetch or build it again.") from error
    # transformers fills what is missing with random numbers and a warning.
    if missing := sorted(loading["missing_keys"]):
        found = f"{len(missing)} tensors missing ({', '.join(missing[:4])})"
        raise InputError("model", found, "exactly the tensors config.json asks for", "Check the checkpoint.")
    return model


def _identity(raw: dict[str, Any], lm_head: torch.Tensor) -> dict[str, str]:
    return {"config": config_hash(raw), "lm_head": tensor_hash(lm_head), "layers": "final-norm"}


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a model directory, hub id or embedded name."""
    from transformers import AutoTokenizer

    directory = model_directory(path)
    if not any((directory / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        raise InputError("tokenizer", f"{path} without tokenizer files", "tokenizer.json", "Save the tokenizer there.")
    return AutoTokenizer.from_pretrained(str(directory))


def tokenizer_identity(path: str) -> dict[str, str]:
    """Content hashes of the vocabulary (with special tokens) and of the chat template."""
    tokenizer = load_tokenizer(path)
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    template = json.dumps(tokenizer.chat_template, sort_keys=True)
    return {
        "tokenizer": hashlib.sha256(vocabulary.encode()).hexdigest()[:16],
        "chat_template": hashlib.sha256(template.encode()).hexdigest()[:16],
    }


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
