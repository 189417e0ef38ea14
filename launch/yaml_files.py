"""Read options from YAML files, which are named by path or, if they ship, by name. Words mean what they mean on the
command line."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from draftsmith.launch.errors import UsageError


def config_file(prog: str, name: str) -> Path:
    """Find a YAML file by its path, or a shipped one by its name: `eagle-embedded` after `train eagle`."""
    file = Path(name)
    if file.is_file():
        return file
    shipped = shipped_configs(prog)
    if name.removesuffix(".yaml") in shipped:
        return shipped[name.removesuffix(".yaml")]
    names = ", ".join(shipped) or "none"
    raise UsageError(
        f"--config: found no such file at {name}, expected a YAML file or a shipped one ({names}). Correct it."
    )


def shipped_configs(prog: str) -> dict[str, Path]:
    """List the YAML files that ship for a command, by name; recipes of real models are options of a training."""
    _, group, name = [*prog.split(), "", ""][:3]
    folders = ("train", "recipes") if group == "train" else (group,)
    root = Path(__file__).parents[1] / "configs"
    files = {path.stem: path for folder in folders for path in (root / folder).glob("*.yaml")}
    return {stem: files[stem] for stem in sorted(files) if name in stem.split("-")}


class PlainLoader(yaml.SafeLoader):
    """Loader of options: words are texts, as on the command line, but null, true and false.

    YAML 1.1 reads 24:00:00 as 86400, off and no as false, 010 as 8, 0.10 as 0.1 and 2026-11-27 as a date.
    """

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag.endswith((":null", ":merge"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


PlainLoader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("(?i:true|false)$"), list("tTfF"))


def read_yaml(file: Path) -> dict[str, Any]:
    """Read a YAML mapping whose keys are texts at every level.

    Raises:
        UsageError: it is not one; YAML reads keys such as null or true as something else.
    """

    def check_keys(value: Any) -> None:
        for key, inner in value.items() if isinstance(value, dict) else ():
            if not isinstance(key, str):
                raise UsageError(f"--config: found the key {key!r} in {file}, expected names of settings. Correct it.")
            check_keys(inner)

    with file.open("rb") as stream:
        content = yaml.load(stream, PlainLoader)
    if not isinstance(content, dict):
        raise UsageError(f"--config: found {type(content).__name__} in {file}, expected `key: value` lines.")
    check_keys(content)
    return content


def as_yaml(settings: Mapping[str, Any]) -> str:
    """Format options as --config reads them."""

    def plain(value: Any) -> Any:
        return vars(value) if dataclasses.is_dataclass(value) else str(value)

    return yaml.safe_dump(json.loads(json.dumps(settings, default=plain)), sort_keys=False, allow_unicode=True)
