"""Where a model is: a directory, one of the shipped models by its `embedded:` name, or a repository of the hub.

A repository is written as everywhere, `gpt2` or `organisation/name`, and may name one of its revisions (a branch, a tag
or a commit) behind an @: `organisation/name@v1.1`.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

from draftsmith.modules.types import InputError

EMBEDDED = "embedded:"
REPOSITORY = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?)(@(?P<revision>[\w./+-]+))?")
WANTED = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.bpe", "*.py")
# The same weights again for other programs, and weights that no model at the top reads.
UNWANTED = ("consolidated*", "original/*", "*.pth", "*/*.safetensors", "onnx/*", "checkpoint-*/*")
KINDS = "a transformers model directory, a hub id or embedded:target"


def resolve_model(path: str) -> str:
    """`embedded:NAME` -> the shipped file or directory; a local directory or a hub id stays as it is."""
    if not str(path).startswith(EMBEDDED):
        return str(path)
    name = str(path).removeprefix(EMBEDDED)
    root = Path(__file__).parents[1] / "embedded"
    found = root / (f"{name}.jsonl" if name.endswith("prompts") else name)
    if not found.exists():
        shipped = sorted(p.parent.relative_to(root).as_posix() for p in root.rglob("config.json"))
        raise InputError("path", path, f"one of {', '.join(EMBEDDED + name for name in shipped)}", "Name one of these.")
    return str(found)


def repository(path: str) -> tuple[str, str | None] | None:
    """(id, revision) of what is no path here and may be a repository of the hub; else None."""
    match = None if Path(path).exists() else REPOSITORY.fullmatch(path)
    return None if match is None else (match["id"], match["revision"])


def loadable(path: str) -> str:
    """What other programs load it by: they know no @, so a repository at a revision is its local copy."""
    wanted = repository(resolve_model(path))
    return resolve_model(path) if wanted is None or wanted[1] is None else str(model_directory(path))


def model_directory(path: str, more: tuple[str, ...] = ()) -> Path:
    """The local directory of a model; a repository is downloaded, or taken from the cache, first.

    more: patterns of files to download beside those that a model of our own kind has.

    Raises:
        InputError: nothing there, or no model; one line that says where it was looked for.
    """
    resolved = resolve_model(path)
    directory = Path(resolved)
    try:
        if directory.is_dir():
            _check_model(path, directory)
            return directory
        if directory.exists():
            raise InputError("model", f"{path}, which is a file", KINDS, "Check the path.")
    except OSError as error:  # a name that is too long, a directory that may not be entered
        raise InputError("model", f"{path[:200]} ({error.strerror})", KINDS, "Check the path.") from error
    wanted = repository(resolved)
    if wanted is None:
        raise InputError("model", f"no directory {path}", KINDS, "Check the path.")
    fetched = _fetch(*wanted, more)
    _check_model(path, fetched)
    return fetched


def _check_model(path: str, directory: Path) -> None:
    if (directory / "adapter_config.json").exists() or any(directory.glob("adapter_model.*")):
        found = f"{path}, which has a PEFT adapter"
        remedy = "Merge it first: model.merge_and_unload().save_pretrained(NEW_DIR)."
        raise InputError("model", found, "a whole model, its adapters merged into its weights", remedy)
    if not (directory / "config.json").exists():
        raise InputError("model", f"{path} without config.json", "a transformers model directory", "Check the path.")


@functools.cache  # one command reads one state of a repository, and asks for it once
def _fetch(name: str, revision: str | None, more: tuple[str, ...]) -> Path:
    from huggingface_hub import errors, snapshot_download

    shown = name if revision is None else f"{name}@{revision}"
    try:
        patterns = [*WANTED, *more]
        found = snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=list(UNWANTED))
        return Path(found)
    except errors.GatedRepoError as error:
        remedy = f"Accept its terms at https://huggingface.co/{name}, then hf auth login, or set HF_TOKEN."
        raise InputError("model", f"{shown}, which is gated", "a repository that you may read", remedy) from error
    except errors.RevisionNotFoundError as error:
        found = f"no revision {revision} of {name} on the hub"
        raise InputError("model", found, "a branch, a tag or a commit", "Correct what follows the @.") from error
    except errors.RepositoryNotFoundError as error:
        found = f"no directory {shown} here, and no such repository on the hub, or a private one"
        remedy = "Check the path; for a private repository: hf auth login, or set HF_TOKEN."
        raise InputError("model", found, KINDS, remedy) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        found = f"no directory {shown} here, nor in the hub's cache, and the hub cannot be asked"
        remedy = "Check the path, the network, and HF_HUB_OFFLINE."
        raise InputError("model", found, KINDS, remedy) from error
    except Exception as error:  # the client has a family of errors, and its connection and disk have theirs
        found = f"{shown} ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
        raise InputError("model", found, "a repository that can be fetched", "Check the path.") from error
