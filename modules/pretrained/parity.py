"""Check of the lean engine beside transformers' own forward, for one config.json, on a tiny random model of it.

transformers reads more of a config.json than we do. What it reads in another way shows here as other logits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from draftsmith.modules import layers
from draftsmith.modules.llama_config import LlamaConfig
from draftsmith.modules.pretrained.auto import auto_class, read_config
from draftsmith.modules.pretrained.files import CannotWrite, cache_folder, make_directory, write_json
from draftsmith.modules.pretrained.identity import config_hash
from draftsmith.modules.targets.base import ModelInfo
from draftsmith.modules.targets.llama import LlamaLM, model_from_state
from draftsmith.modules.targets.shape import ON_HF, llama_config
from draftsmith.modules.types import InputError, describe_error

NUM_TOKENS, VOCAB = 192, 64
# Token numbers of a config.json are beyond the tiny vocabulary.
TOKENS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
# Two float32 layers differ by 1e-6 of the logits' spread, and by 1e-2 without Llama 3's scaling.
TOLERANCE = 5e-5


def check_lean(config: Mapping[str, Any], shape: LlamaConfig) -> None:
    """Check that the lean engine computes what transformers computes for a config.json. shape: of it.

    The result is kept in the user's cache: importing transformers' models takes two seconds.

    Raises:
        InputError: it does not, or transformers cannot build such a model.
    """
    tiny, small = _cut(config, shape)
    versions = [importlib.metadata.version(name) for name in ("torch", "transformers")]
    entry = cache_folder("lean") / f"{_hash(config_hash(small), *versions, _engine_hash())}.json"
    problem = None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        problem = str(json.loads(entry.read_text("utf-8"))["problem"])
    if problem is None:
        problem = _compare(tiny, small)
        if entry.is_absolute():
            with contextlib.suppress(CannotWrite):
                make_directory(entry.parent)
                write_json(entry, {"problem": problem})
    if problem:
        raise InputError("loader", f"lean, {problem}", "what transformers computes", ON_HF)


def _cut(config: Mapping[str, Any], shape: LlamaConfig) -> tuple[LlamaConfig, dict[str, Any]]:
    """Return sizes and config.json of a tiny model with the same head_dim, rotary settings, norms and biases."""
    num_kv_heads = min(shape.num_kv_heads, 2)
    heads = num_kv_heads * min(max(shape.num_heads // shape.num_kv_heads, 1), 2)
    kinds = list(dict.fromkeys(config.get("layer_types") or []))
    small = {
        **config,
        **TOKENS,
        "vocab_size": VOCAB,
        "hidden_size": heads * (shape.hidden_size // shape.num_heads),
        "intermediate_size": VOCAB,
        "num_hidden_layers": max(len(kinds), 2),
        "num_attention_heads": heads,
        "num_key_value_heads": num_kv_heads,
    }
    if kinds:
        small["layer_types"] = kinds if len(kinds) > 1 else kinds * 2
    if shape.sliding_window is not None:
        small["sliding_window"] = min(shape.sliding_window, 8)
    # transformers has no table of positions, and a context of 131,072 would make ours large.
    return dataclasses.replace(llama_config(small), max_position=NUM_TOKENS), small


def _compare(shape: LlamaConfig, small: dict[str, Any]) -> str:
    """Return the difference between both engines' logits, empty if there is none."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB, (1, NUM_TOKENS), generator=generator)
    try:
        with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices=[]), torch.no_grad():
            # From a file, as for the model itself: transformers takes some files for those of another family.
            write_json(Path(folder, "config.json"), small)
            settings = read_config(Path(folder), small, trusted=False)
            model = auto_class(settings).from_config(settings, dtype=torch.float32, trust_remote_code=False).eval()
            for name, weight in model.named_parameters():
                # Small embeddings, so that the norms' epsilon counts.
                scale = 0.02 if "embed" in name else weight.shape[-1] ** -0.5 if weight.ndim > 1 else 0.1
                weight.add_(torch.randn(weight.shape, generator=generator), alpha=scale)
            theirs = model(input_ids=ids, use_cache=False).logits[0]
    except Exception as error:  # each architecture refuses in its own way
        return f"of a config.json that transformers refuses ({describe_error(error)})"
    info = ModelInfo(shape.hidden_size, VOCAB, shape.num_layers, NUM_TOKENS, (), {})
    try:
        lean = LlamaLM(model_from_state(shape, model.state_dict(), torch.float32), info)
    except InputError as error:
        return f"whose tensors are not transformers' ({error.found})"
    with torch.no_grad():
        difference = lean.lm_head(lean.features(ids))[0] - theirs
    spread = theirs - theirs.mean(-1, keepdim=True)
    share = (difference.norm() / spread.norm()).item()
    if share <= TOLERANCE:  # NaN differs
        return ""
    return f"whose logits differ from transformers' by {share:.2g} of their spread"


def _engine_hash() -> str:
    """Hash the source of the lean engine and of this check, so that a changed one is compared again."""
    folder = Path(layers.__file__).parent
    files = (
        Path(__file__),
        folder / "layers.py",
        folder / "llama_config.py",
        folder / "rotary.py",
        folder / "targets" / "llama.py",
        folder / "targets" / "shape.py",
        *sorted((folder / "engine").glob("*.py")),
    )
    return _hash(*(file.read_text("utf-8") for file in files))


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
