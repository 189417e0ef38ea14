"""A finished command, repeated, says so and does nothing: a script of commands continues where it was interrupted.

`finished.json` records the command that wrote an output, its options, hashes of its inputs and of the files that it
wrote, and what it printed. It is written last, so an output without this file is not finished.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from draftsmith.modules.types import InputError

FINISHED = "finished.json"
SHAPE = {"state": dict, "files": {"*": str}, "document": dict}
# Commands that compare their options with what lies in an output, and continue it or write it anew.
CONTINUED = ("data ", "train ", "eval bench", "eval report")
# Options whose words are never the path of a model or of data.
WORDS = ("split", "subset", "columns", "device", "job_name")
# Files that later commands write beside a head or a run: its card, what was measured with it, a report.
LATER = (FINISHED, "README.md", "measured.json", "report.html")
# Files by which commands know what an output holds.
BELIEVED = ("manifest.json", "results.json")
# A larger file is compared by its size and by samples from its beginning to its end: between them it may be changed
# unseen.
WHOLE, SAMPLE, NUM_SAMPLES = 2**26, 2**16, 64


def run_once(name: str, run: Callable[[Any], Any], config: Any) -> Any:
    """Run a command, unless the same command has already written its output. Return its result.

    Raises:
        InputError: the output was written by a command with other options, or from other content.
    """
    from draftsmith.data.console import DONE, add_result, done_line, json_values, log_note, results
    from draftsmith.data.ranks import place
    from draftsmith.data.store.manifest import options_of
    from draftsmith.modules.pretrained.files import write_json

    options = {option: value for option, _, value in options_of(config)}
    output = options.get("output") or options.get("write")
    if not isinstance(output, Path):
        return run(config)
    state = state_of(name, config, output)
    if not options.get("again") and (record := finished(name, output, state)) is not None:
        if place().rank == 0:
            log_note(done_line(name, output, "again" in options))
        add_result(**record["document"])
        returned = record["returned"]
        return output / returned if isinstance(returned, str) else returned

    with results() as document:
        returned = run(config)
        # Said by the command: what its own record compares is less, or in another order.
        was_done = document.pop(DONE, False) and record_of(output).exists()
    # A planned training returns nothing, and of an export that differed nothing is left.
    files = files_of(output) if returned is not None and place().rank == 0 and not was_done else []
    if files:
        relative = os.path.relpath(returned, output) if isinstance(returned, os.PathLike) else returned
        digests = {os.path.relpath(file, output): digest(file) for file in files}
        record = {"state": state, "files": digests, "returned": relative, "document": json_values(document)}
        # As --json writes what JSON has no form for.
        write_json(record_of(output), json.loads(json.dumps(record, default=str)))
    return returned


def finished(name: str, output: Path, state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the record of the command that wrote an output; None if the command has to run.

    Raises:
        InputError: as `run_once`.
    """
    from draftsmith.modules.pretrained.provenance import changes
    from draftsmith.modules.pretrained.reading import read_object

    try:
        record = read_object(record_of(output), SHAPE)
    except (OSError, InputError):  # no record, or a damaged one
        return None
    changed = changes(state, record["state"])
    if changed and not name.startswith(CONTINUED):
        remedy = "Choose another output or delete it" + (", or pass --again." if name == "eval served" else ".")
        raise InputError("output", f"{output}, made with another {changed}", "what it was made with", remedy)
    if changed:
        return None
    damaged = [file for file, sha256 in record["files"].items() if digest_of(output / file) != sha256]
    # Others a command makes again, or refuses to write over; a training makes nothing again.
    for file in damaged:
        if (file in BELIEVED or name.startswith("train ")) and (output / file).exists():
            remedy = f"Put it back, or delete {output} and run the command again."
            raise InputError("output", f"{output / file}, changed since it was written", "what was written", remedy)
    return None if damaged else record


def state_of(name: str, config: Any, output: Path) -> dict[str, Any]:
    """Return what decides a command's output: its options, the content behind those that are paths, and for a
    measurement the machine."""
    from draftsmith.data.ranks import pick_device
    from draftsmith.data.store.manifest import options_of

    options, content, measures = dict[str, Any](), dict[str, Any](), False
    for option, spec, value in options_of(config):
        measures |= option == "again"
        if option in ("output", "write", "again"):
            continue
        parts = parts_of(value)
        found = [] if option in WORDS else [content_of(part, output) for part in parts]
        if any(found):
            content[option] = [one or part for one, part in zip(found, parts, strict=True)]
        elif parts or not spec.metadata.get("volatile"):
            options[option] = value
    state: dict[str, Any] = {"command": name, "options": options, "content": content}
    if measures:
        from draftsmith.eval.meta import hardware
        from draftsmith.modules.pretrained.provenance import package_versions

        machine = hardware(pick_device("auto"))
        state["machine"] = {"cpu": machine["cpu"], "gpu": machine.get("gpu"), **package_versions()}
    as_read: dict[str, Any] = json.loads(json.dumps(state, default=str))
    return as_read


def parts_of(value: Any) -> list[str]:
    """Return the texts of an option, of which each may be a path; empty for numbers and switches."""
    if isinstance(value, str | Path):
        return str(value).split(",")
    return [part for item in value for part in parts_of(item)] if isinstance(value, list | tuple) else []


def content_of(text: str, output: Path) -> str | None:
    """Return a digest of the model or the data that a text names, with its share (`runs/a*2`); None if it is none.

    A text that holds the name of a file, `eagle-static:tree=FILE`, stands with that file's digest.
    """
    from draftsmith.data.store.parts import part_of
    from draftsmith.modules.pretrained.hub import resolve_model

    with suppress(InputError, OSError, ValueError):  # a name that begins like a model's, or no name of a file
        part = part_of(text) if "*" in text else None
        path, share = Path(resolve_model(str(part.path) if part else text)), part.weight if part else 1
        if text and path.exists() and path != output:
            return f"{digest(path)} * {share:g}"
    # A file inside a word: `tree=FILE` of a method, `FILE.py:FUNCTION`.
    files = [Path(word) for word in re.split("[:=]", text) if word and Path(word).is_file()]
    return f"{text} {' '.join(map(digest, files))}" if files else None


def digest(path: Path) -> str:
    """Return a digest of a file, or of the files of a directory with their names.

    Data of a stage is identified by its manifest, which has the hashes of its files.
    """
    sha256 = hashlib.sha256()
    if path.is_dir():
        manifest, started = path / "manifest.json", path / "started.json"
        listed = manifest.exists() and started.exists()
        for file in files_of(path):
            what = file.stat().st_size if listed and file != manifest else digest(file)
            sha256.update(f"{file.relative_to(path)} {what}\n".encode())
        return sha256.hexdigest()
    size = path.stat().st_size
    with path.open("rb") as opened:
        if size <= WHOLE:
            return hashlib.file_digest(opened, "sha256").hexdigest()
        for number in range(NUM_SAMPLES):
            opened.seek(number * (size - SAMPLE) // (NUM_SAMPLES - 1))
            sha256.update(opened.read(SAMPLE))
    return f"{size} {sha256.hexdigest()}"


def digest_of(path: Path) -> str | None:
    """Return a file's digest; None if it is gone."""
    try:
        return digest(path)
    except OSError:
        return None


def files_of(output: Path) -> list[Path]:
    """Return the files that a command wrote to a directory, or the file that it wrote."""
    if output.is_file():
        return [output]

    def counts(path: Path) -> bool:
        parts = path.relative_to(output).parts
        hidden = any(part.startswith(".") or part == "wandb" or ".tmp-" in part for part in parts)
        return not hidden and path.name not in LATER and path.suffix != ".lock" and path.is_file()

    return sorted(filter(counts, output.rglob("*")))


def record_of(output: Path) -> Path:
    """Return the path of an output's record: in a directory, or beside a file."""
    return output.with_name(f".{output.name}.{FINISHED}") if output.is_file() else output / FINISHED
