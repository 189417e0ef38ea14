"""Read options from YAML files, which are named by path or, if they ship, by name. Words mean what they mean on the
command line."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from draftsmith.launch.errors import UsageError

MOST_VALUES = 10_000  # of a file, with those that its aliases stand for


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
    """Loader of options: words are texts, as on the command line, but null, true and false. Other types are unknown.

    YAML 1.1 reads 24:00:00 as 86400, off and no as false, 010 as 8, 0.10 as 0.1 and 2026-11-27 as a date.
    """

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag.endswith((":null", ":merge"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    yaml_constructors = {
        tag: construct
        for tag, construct in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.endswith((":null", ":bool", ":str", ":seq", ":map"))
    }


PlainLoader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("(?i:true|false)$"), list("tTfF"))


def read_yaml(file: Path) -> dict[str, Any]:
    """Read a YAML mapping whose keys are texts at every level.

    Raises:
        UsageError: it is not one, or one without end; YAML reads keys such as null or true as something else.
    """
    values = itertools.count(1)

    def check(value: Any) -> None:
        if next(values) > MOST_VALUES:
            raise RecursionError
        for key in value if isinstance(value, dict) else ():
            if not isinstance(key, str):
                raise UsageError(f"--config: found the key {key!r} in {file}, expected names of settings. Correct it.")
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            check(inner)

    try:
        with file.open("rb") as stream:
            content = yaml.load(stream, PlainLoader)
        check(content)
    except (RecursionError, KeyError) as error:  # KeyError: !!bool before another word
        expected = f"at most {MOST_VALUES:,} values with those of aliases"
        raise UsageError(f"--config: found values without end in {file}, expected {expected}. Correct it.") from error
    if not isinstance(content, dict):
        raise UsageError(f"--config: found {type(content).__name__} in {file}, expected `key: value` lines.")
    return content


def as_yaml(settings: Mapping[str, Any]) -> str:
    """Format options as --config reads them."""
    return yaml.safe_dump(json.loads(json.dumps(settings, default=str)), sort_keys=False, allow_unicode=True)
