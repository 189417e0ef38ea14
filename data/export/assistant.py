"""A draft model's directory for plain transformers: written with measured settings, and checked by using it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.data.models.checkpoint import INDEX, weight_map
from draftsmith.data.models.hub import model_directory
from draftsmith.data.models.loading import load_tokenizer, load_transformers, tokenizer_identity
from draftsmith.data.store.files import copy_file, make_directory, write_json
from draftsmith.data.store.reading import read_object
from draftsmith.modules.formats import hf_assisted
from draftsmith.modules.formats.base import Finding
from draftsmith.modules.formats.hf_assisted import FIELDS, Tuning
from draftsmith.modules.types import InputError

SUFFIXES = {".json", ".safetensors", ".jinja", ".txt", ".model"}
SETTINGS = "generation_config.json"
FETCH = "Fetch the model again."
PROMPTS = ("def add(a, b):", "The first of them is")
MAX_NEW_TOKENS = 24


def write_assistant(draft_path: str, tuning: Tuning, directory: Path) -> Path:
    """The draft's own files with `generation_config.json` set by the tuning, into a directory of the caller's. Weights
    are safetensors only. The draft's own README.md is left out: the directory is another one.

    Raises:
        InputError: a draft without safetensors, with shards missing or code of its own; nothing is written then.
    """
    source = model_directory(draft_path)
    files, config = _files(source), read_object(source / "config.json", {}, FETCH)
    # Without the file transformers takes the end tokens from config.json; with it, only from there.
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config.get(key) is not None}
    fields = read_object(source / SETTINGS, {}, FETCH) if (source / SETTINGS).exists() else ends
    make_directory(directory)
    for file in files:
        copy_file(file, directory / file.name)  # the content: a hub cache holds links
    write_json(directory / SETTINGS, hf_assisted.generation_config(fields, tuning))
    return directory


def _files(source: Path) -> list[Path]:
    """What makes the model: config, tokenizer, templates, licences and safetensors."""
    files = [file for file in sorted(source.iterdir()) if file.is_file()]
    kept = [file for file in files if file.suffix in SUFFIXES or file.stem in ("LICENSE", "NOTICE")]
    kept = [file for file in kept if not file.name.startswith("pytorch_model")]
    names = {file.name for file in kept}
    if not any(name.endswith(".safetensors") for name in names):
        remedy = "Save it as safetensors first."
        raise InputError("draft", f"{source} without safetensors", "model.safetensors", remedy)
    shards = set(weight_map(source / INDEX, FETCH).values()) if INDEX in names else set()
    if shards - names:
        found = f"{INDEX} that names {', '.join(sorted(shards - names)[:3])}"
        raise InputError("draft", found, f"files of {source}", "Fetch the model again.")
    if read_object(source / "config.json", {}, FETCH).get("auto_map"):
        found = f"{source}, which brings its own code"
        raise InputError("draft", found, "a model that transformers has built in", "Export another draft.")
    return kept


def check_assistant(directory: str | Path, target: str) -> tuple[list[Finding], dict[str, Any]]:
    """Use the directory as a user of transformers would, in float32 on the CPU, and compare greedy answers to two short
    prompts with the target's own, token by token.

    target: directory, hub id or embedded name of the model that it drafts for.
    Returns: what was found, and what was seen: the settings in effect, sizes, drafted tokens by round.

    Raises:
        InputError: the TARGET cannot be loaded.
    """
    # Assisted generation warns about the arguments that it passes to itself.
    logging.getLogger("transformers.generation.utils").setLevel(logging.ERROR)
    large = load_transformers(model_directory(target), torch.float32).eval()
    try:
        source = model_directory(str(directory))
        _files(source)
        stored = read_object(source / SETTINGS, {}, FETCH) if (source / SETTINGS).exists() else {}
        draft = load_transformers(source, torch.float32).eval()
    except ValueError as error:  # ours, and what transformers says of a config that it does not know
        return [Finding("error", str(directory), str(error).strip().splitlines()[0])], {}
    settings: dict[str, Any] = {name: getattr(draft.generation_config, name, None) for name in FIELDS}
    facts: dict[str, Any] = {
        **settings,
        "vocab_size": draft.config.get_text_config().vocab_size,
        "target_vocab_size": large.config.get_text_config().vocab_size,
    }
    findings = [*_check_settings(stored), *_check_vocabulary(source, target, facts)]
    if not any(finding.level == "error" for finding in findings):
        rounds, found = _compare(large, draft, [load_tokenizer(target)(text).input_ids for text in PROMPTS])
        longest = max(rounds, default=0)
        facts |= {"rounds": len(rounds), "drafted": sum(rounds), "longest_round": longest}
        if longest > settings["num_assistant_tokens"]:
            found.append(Finding("error", FIELDS[0], f"{settings[FIELDS[0]]}, but a round drafted {longest}"))
        findings += found
    return findings, facts


def _check_settings(stored: dict[str, Any]) -> list[Finding]:
    """The three settings."""
    from transformers.utils import is_sklearn_available

    absent = f"absent from {SETTINGS}: transformers takes its own default"
    findings = [Finding("error", name, absent) for name in FIELDS if name not in stored]
    schedule, threshold = stored.get(FIELDS[1], "constant"), stored.get(FIELDS[2])
    if schedule != "constant":
        findings.append(Finding("note", FIELDS[1], f"{schedule}: transformers changes the number in every round"))
    if threshold and is_sklearn_available():
        text = f"{threshold} is the first value only: with scikit-learn, which is installed, every round re-tunes it"
        findings.append(Finding("note", FIELDS[2], text))
    return findings


def _check_vocabulary(source: Path, target: str, facts: dict[str, Any]) -> list[Finding]:
    ours, theirs = facts["vocab_size"], facts["target_vocab_size"]
    if ours != theirs:
        text = f"{ours}, the target has {theirs}: transformers takes them for models of different tokenizers and raises"
        return [Finding("error", "vocab_size", text)]
    try:
        draft = tokenizer_identity(str(source))["tokenizer"]
    except InputError as error:
        return [Finding("note", "tokenizer", f"the target's is used ({error})")]
    if draft != tokenizer_identity(target)["tokenizer"]:
        return [Finding("error", "tokenizer", "not the target's: token ids mean something else")]
    return []


def _compare(target: Any, draft: Any, prompts: Sequence[Sequence[int]]) -> tuple[list[int], list[Finding]]:
    """Drafted tokens of every round, and answers that differ from the target's own."""
    from transformers import GenerationConfig

    ends = target.generation_config.eos_token_id
    pad = ends[0] if isinstance(ends, list) else ends
    # The target's own sampling defaults and penalties are no part of this: greedy answers of the bare model.
    target.generation_config = GenerationConfig()
    config = GenerationConfig(
        max_new_tokens=MAX_NEW_TOKENS, do_sample=False, eos_token_id=ends, pad_token_id=0 if pad is None else pad
    )
    rounds: list[int] = []
    findings: list[Finding] = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        inputs: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "generation_config": config}
        try:
            own, (assisted, fed) = target.generate(ids, **inputs), _assisted(target, draft, ids, inputs)
        except ValueError as error:  # how transformers refuses a pair
            findings.append(Finding("error", "generate", str(error).strip().splitlines()[0]))
            break
        # The first call reads the prompt, each later one the last known token; the rest was drafted.
        rounds += [count - (1 if i else len(prompt)) for i, count in enumerate(fed)]
        if own.tolist() != assisted.tolist():
            findings.append(Finding("error", "generate", _difference(own[0], assisted[0], len(prompt))))
    return rounds, findings


def _assisted(target: Any, draft: Any, ids: Tensor, inputs: dict[str, Any]) -> tuple[Tensor, list[int]]:
    """The assisted answer, and how many tokens each call of the target was fed."""
    fed: list[int] = []

    def record(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        fed.append(kwargs["input_ids"].shape[1])

    # A hook and not a wrapper, which `generate` would take for another signature.
    hook = target.register_forward_pre_hook(record, with_kwargs=True)
    try:
        return target.generate(ids, assistant_model=draft, **inputs), fed
    finally:
        hook.remove()


def _difference(own: Tensor, assisted: Tensor, start: int) -> str:
    pairs = zip(own[start:].tolist(), assisted[start:].tolist(), strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(own), len(assisted)) - start)
    return f"the assisted answer leaves the target's own at token {first}"
