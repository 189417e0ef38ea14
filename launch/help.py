"""What `--help` prints: the overview of commands, and the settings of one command."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from draftsmith.launch.arguments import alternatives, dashed, is_bool, is_list, revised, type_name

if TYPE_CHECKING:
    from draftsmith.launch.cli import Command

NAME_STYLE, TITLE_STYLE, QUIET = "cyan", "bold", "dim"
NAME_WIDTH = 32  # longer names of settings are folded
MAX_WIDTH = 100  # lines longer than this are hard to read, however wide the terminal


def console() -> Console:
    screen = Console(highlight=False, soft_wrap=False)
    return Console(highlight=False, width=min(screen.width, MAX_WIDTH))


def print_overview(
    version: str, commands: Mapping[str, Command], sections: Mapping[str, tuple[str, ...]], group: str | None = None
) -> None:
    """All commands by section, or those of one group."""
    out = console()
    if group is None:
        out.print(Text.assemble(("draftsmith ", TITLE_STYLE), version))
        out.print("Trains the learned parts of speculative decoding; measures what they are worth\n")
        out.print(Text.assemble(("Usage: ", TITLE_STYLE), "draftsmith <command> [--config FILE] [--name value ...]\n"))
    else:
        out.print(Text.assemble(("Usage: ", TITLE_STYLE), f"draftsmith {group} <command> [--name value ...]\n"))
    for title, names in sections.items():
        shown = [name for name in names if group in (None, name.split()[0])]
        if not shown:
            continue
        out.print(Text(title, TITLE_STYLE))
        table = Table.grid(padding=(0, 2))
        table.add_column(min_width=max(len(name) for name in commands), no_wrap=True, style=NAME_STYLE)
        table.add_column()
        for name in shown:
            table.add_row(name, commands[name].help)
        out.print(Padding(table, (0, 0, 1, 2)))
    if group is None:
        out.print("--help after a command lists its settings; --print-config prints them as YAML;")
        out.print("--debug shows the traceback of an error; --version prints the version.")


def print_options(prog: str, config_class: type, positional: tuple[str, ...], about: str) -> None:
    """Every setting with its type, meaning and default."""
    out = console()
    launches = positional == ("command",)  # another command, behind `--`
    free = "" if launches else "".join(f" [{name.upper()}]" for name in positional)
    rest = " -- COMMAND ..." if launches else ""
    out.print(Text.assemble(("Usage: ", TITLE_STYLE), f"{prog}{free} [--config FILE] [--name value ...]{rest}\n"))
    out.print(Text(first_paragraph(config_class) or about + "."))
    groups: dict[str, list[tuple[Text, Text]]] = {"Required": [], "Settings": []}
    for name, kind, default, meaning in settings(config_class):
        required = default is dataclasses.MISSING
        note = "" if required else f" [{show(default)}]"
        row = (Text.assemble((f"--{dashed(name)}", NAME_STYLE), (value_hint(kind), QUIET)), Text(meaning))
        row[1].append(note, QUIET)
        groups["Required" if required else "Settings"].append(row)
    names = [name for name, *_ in settings(config_class)]
    if (owner := revised(dict.fromkeys(names))) is not None:
        meaning = f"branch, tag or commit of the hub's repository {owner.upper()}; of others: ID@REVISION"
        row = (Text.assemble(("--revision", NAME_STYLE), (" TEXT", QUIET)), Text(meaning))
        row[1].append(" [none]", QUIET)
        groups["Settings"].append(row)
    groups["Always"] = [
        (Text.assemble(("--config", NAME_STYLE), (" FILE", QUIET)), Text("YAML settings: a path, or a shipped name")),
        (Text("--print-config", NAME_STYLE), Text("print the settings as YAML and stop")),
        (Text("--debug", NAME_STYLE), Text("show the traceback of an error")),
    ]  # fmt: skip
    width = min(max(row[0].cell_len for rows in groups.values() for row in rows), NAME_WIDTH)
    for title, rows in groups.items():
        if rows:
            out.print()
            out.print(Text(title, TITLE_STYLE))
            table = Table.grid(padding=(0, 2))
            table.add_column(width=width)
            table.add_column()
            for row in rows:
                table.add_row(*row)
            out.print(Padding(table, (0, 0, 0, 2)))


def settings(config_class: type, prefix: str = "") -> list[tuple[str, Any, Any, str]]:
    """(dotted name, type, default, meaning) of every setting; a nested dataclass gives its own rows."""
    hints, meanings, rows = get_type_hints(config_class), field_meanings(config_class), []
    for field in dataclasses.fields(config_class):
        if not field.init:
            continue
        kind = hints[field.name]
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if dataclasses.is_dataclass(kind):
            rows += settings(typing.cast(type, kind), f"{prefix}{field.name}.")
        else:
            rows.append((prefix + field.name, kind, default, meanings.get(field.name, "")))
    return rows


def field_meanings(config_class: type) -> dict[str, str]:
    """`name: meaning.` lines of a class' docstring; deeper-indented or following lines go on with the meaning."""
    names = {field.name for field in dataclasses.fields(config_class)}
    found: dict[str, str] = {}
    current = None
    for line in inspect.cleandoc(config_class.__doc__ or "").splitlines():
        start = re.match(r"\s*(\w+)(?:\s*\([^)]*\))?:\s+(.*)", line)
        if start and start[1] in names:
            current = start[1]
            found[current] = start[2].strip()
        elif not line.strip():
            current = None
        elif current:
            found[current] += " " + line.strip()
    for base in config_class.__mro__[1:]:
        if dataclasses.is_dataclass(base):
            found = field_meanings(base) | found
    return found


def first_paragraph(config_class: type) -> str:
    text = inspect.cleandoc(config_class.__doc__ or "").split("\n\n")[0]
    return " ".join(text.split())


def value_hint(kind: Any) -> str:
    """What to write after an option: nothing for a flag."""
    kinds = [k for k in alternatives(kind) if k is not type(None)]
    if is_bool(kind):
        return ""
    if len(kinds) == 1 and typing.get_origin(kinds[0]) is typing.Literal:
        return " " + "|".join(str(v) for v in typing.get_args(kinds[0]))
    if is_list(kind):
        return " A B ..."
    words = {int: "N", float: "X", Path: "PATH", str: "TEXT"}
    return " " + "|".join(words.get(k, type_name(k)) for k in kinds)


def show(default: Any) -> str:
    if default is None:
        return "none"
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, list | tuple):
        return ", ".join(str(v) for v in default) or "none"
    return str(default) or "none"
