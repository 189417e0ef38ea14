"""Directory of a draft model for plain transformers: written with measured settings, and checked by using it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from draftsmith.data.export.report import CheckReport, Measure
from draftsmith.data.models.checkpoint import INDEX, weight_map
from draftsmith.data.models.hub import model_directory
from draftsmith.data.models.loading import load_tokenizer, load_transformers, tokenizer_identity
from draftsmith.data.store.files import copy_file, make_directory, write_json
from draftsmith.data.store.reading import read_object
from draftsmith.modules.formats import hf_assisted
from draftsmith.modules.formats.base import Problem
from draftsmith.modules.formats.hf_assisted import FIELDS, Tuning
from draftsmith.modules.types import InputError

SUFFIXES = {".json", ".safetensors", ".jinja", ".txt", ".model"}
SETTINGS = "generation_config.json"
FETCH = "Fetch the model again."
PROMPTS = ("def add(a, b):", "The first of them is")
MAX_NEW_TOKENS = 24
RETUNED = f"{FIELDS[2]} is the first value only where scikit-learn is installed: every round re-tunes it"


def write_assistant(draft_path: str, tuning: Tuning, directory: Path) -> None:
    """Copy the draft's own files into a directory, with `generation_config.json` set by the tuning.

    Weights are safetensors only. The draft's own README.md is left out: the directory is another one.

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


def _files(source: Path) -> list[Path]:
    """Return the files of a model: config, tokenizer, templates, licences and safetensors."""
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
        raise InputError("draft", found, f"files of {source}", FETCH)
    if read_object(source / "config.json", {}, FETCH).get("auto_map"):
        found = f"{source}, which brings its own code"
        raise InputError("draft", found, "a model that transformers has built in", "Export another draft.")
    return kept


def check_assistant(directory: str | Path, target: str) -> CheckReport:
    """Use a directory as a user of transformers would, in float32 on the CPU.

    Greedy answers to two short prompts are compared with the target's own, token by token.

    target: directory, hub id or embedded name of the model that it drafts for.

    Raises:
        InputError: the TARGET cannot be loaded.
    """
    from transformers import GenerationConfig

    # Assisted generation warns about the arguments that it passes to itself.
    logging.getLogger("transformers.generation.utils").setLevel(logging.ERROR)
    large = load_transformers(model_directory(target), torch.float32).eval()
    report = CheckReport()
    try:
        source = model_directory(str(directory))
        _files(source)
        stored = read_object(source / SETTINGS, {}, FETCH) if (source / SETTINGS).exists() else {}
        draft = load_transformers(source, torch.float32).eval()
    except ValueError as error:  # ours, and what transformers says of a config that it does not know
        report.problems.append(Problem(str(directory), str(error).strip().splitlines()[0]))
        return report

    # Settings, vocabulary and tokenizer.
    absent = f"absent from {SETTINGS}: transformers takes its own default"
    report.problems += [Problem(name, absent) for name in FIELDS if name not in stored]
    report.notes += [f"{name}: {stored[name]}" for name in FIELDS if name in stored]
    report.notes += [RETUNED] * bool(stored.get(FIELDS[2]))
    sizes = [model.config.get_text_config().vocab_size for model in (draft, large)]
    if sizes[0] != sizes[1]:
        text = f"{sizes[0]}, the target has {sizes[1]}: transformers takes them for models of different tokenizers"
        report.problems.append(Problem("vocab_size", f"{text} and raises"))
    else:
        try:
            if tokenizer_identity(str(source))["tokenizer"] != tokenizer_identity(target)["tokenizer"]:
                report.problems.append(Problem("tokenizer", "not the target's: token ids mean something else"))
        except InputError as error:
            report.notes.append(f"tokenizer: the target's is used ({error})")
    if report.problems:
        return report

    # Greedy answers of the bare model, without the target's own sampling defaults and penalties.
    ends = large.generation_config.eos_token_id
    pad = (ends[0] if isinstance(ends, list) else ends) or 0
    large.generation_config = GenerationConfig()
    config = GenerationConfig(max_new_tokens=MAX_NEW_TOKENS, do_sample=False, eos_token_id=ends, pad_token_id=pad)
    tokenizer, first = load_tokenizer(target), None
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer(prompt).input_ids])
        inputs: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "generation_config": config}
        try:
            answers = [large.generate(ids, **more, **inputs)[0].tolist() for more in ({}, {"assistant_model": draft})]
        except ValueError as error:  # how transformers refuses a pair
            report.problems.append(Problem("generate", str(error).strip().splitlines()[0]))
            return report
        if first is None and answers[0] != answers[1]:
            pairs = enumerate(zip(*answers, strict=False))
            first = next((i for i, (a, b) in pairs if a != b), min(map(len, answers))) - ids.shape[1]
    value = "as the target alone" if first is None else f"another from token {first} on"
    report.measures.append(Measure("greedy answers to two prompts", value, "the target's own", first is None))
    return report
