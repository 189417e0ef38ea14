"""Report of `check` and `diagnose` for an issue: one Markdown block that says how to see the same again."""

from __future__ import annotations

import importlib.metadata
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from draftsmith.data.console import copied_results, log_note
from draftsmith.launch.errors import user_message
from draftsmith.modules.pretrained.directory import package_directory, weight_files
from draftsmith.modules.pretrained.files import write_text
from draftsmith.modules.pretrained.provenance import file_sha256
from draftsmith.modules.types import InputError, without_passwords

PACKAGES = ("draftsmith", "torch", "transformers", "vllm", "sglang")


def reported(run: Callable[[Any], int], config: Any, words: Sequence[str]) -> int:
    """Run a command and write its report, also if it refuses its input. words: of the command line."""
    with copied_results() as copy:
        try:
            code = run(config)
            result = f"exit code {code}"
        except Exception as error:
            result = f"error: {user_message(error) or repr(error)}"
            raise
        finally:
            write_text(config.report, report(config, words, f"{copy.getvalue().strip()}\n{result}"))
            log_note(f"The report: {config.report}")
    return code


def report(config: Any, words: Sequence[str], results: str) -> str:
    """Return the block: a table of what was run on what, and the results."""
    versions = []
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    facts = {
        "command": f"`{without_passwords(shlex.join(['draftsmith', *words]))}`",
        "versions": ", ".join(versions),
        "engine": f"{config.engine} {getattr(config, 'engine_path', None) or ''}",
        "head": identity(str(getattr(config, "directory", None) or config.draft), weights=True),
        "target": identity(config.target) if config.target else "none",
    }
    lines = [f"| {name} | {value} |" for name, value in facts.items()]
    return "\n".join(["| | |", "|---|---|", *lines, "", "```", without_passwords(results.strip()), "```", ""])


def identity(path: str, weights: bool = False) -> str:
    """Return hashes of a model's config, and of its weights; and the revision of a hub id."""
    try:
        directory = package_directory(path)
        files = [directory / "config.json", *(weight_files(directory) if weights else ())]
        hashes = [f"{file.name} {file_sha256(file)[:12]}" for file in files if file.is_file()]
    except (InputError, OSError):
        return f"`{path}`"
    revision = [f"revision {directory.name}"] if directory.parent.name == "snapshots" else []
    return ", ".join([f"`{path}`", *revision, *hashes])
