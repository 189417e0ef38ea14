"""From command-line words to a frozen dataclass of settings.

jsonargparse checks types, reads YAML and merges dotted overrides. Before it, `normalise` gives every word one form
(`--name=value`, underscores), so that `--max-new-tokens 9`, `--max_new_tokens=9`, flags without a value and repeated
lists all work, and so that a wrong name is told in our own words.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import yaml

from draftsmith.launch.errors import UsageError, did_you_mean, one_line, yaml_message

TRUTH = {"true", "false", "yes", "no", "on", "off"}
MAX_INTEGER = 2**63 - 1  # what torch, Arrow and NumPy hold
MAX_THREADS = 1024  # more end the process inside the threads' library, without a word of ours


def parse(prog: str, config_class: type, args: Sequence[str], positional: tuple[str, ...], about: str) -> Any | None:
    """The settings that `args` describe; None when help or the configuration was printed instead.

    Raises UsageError for whatever the user wrote wrong.
    """
    options = option_types(config_class)
    owner = revised(options)
    if owner is not None:
        options["revision"] = str
    if wants_help(args):
        from draftsmith.launch.help import print_options

        print_options(prog, config_class, positional, about)
        return None
    words = normalise(prog, args, options, positional)
    revision = None
    if owner is not None:
        given = [word.partition("=")[2] for word in words if word.startswith("--revision=")]
        revision = given[-1] if given else None
        words = [word for word in words if not word.startswith("--revision=")]
    for number, word in enumerate(words):
        if word.startswith("--config="):
            file = config_file(prog, word.removeprefix("--config="))
            check_config_file(file, config_class)
            words[number] = f"--config={file}"
    config = parse_words(prog, config_class, words, options)
    return config if revision is None or config is None else at_revision(config, str(owner), revision)


def revised(options: Mapping[str, Any]) -> str | None:
    """The setting whose repository --revision is of: the first of these that a command has. All other models take
    ID@REVISION only, and so does this one in a YAML file."""
    if "revision" in options:  # of something else
        return None
    return next((name for name in ("directory", "target", "draft") if name in options), None)


def at_revision(config: Any, owner: str, revision: str) -> Any:
    """`--target ID --revision R` is `--target ID@R`."""
    named = getattr(config, owner)
    if named is None or "@" in str(named) or str(named).startswith("embedded:") or Path(named).exists():
        found = f"{revision} with --{dashed(owner)} {named}"
        raise UsageError(f"--revision: found {found}, expected a hub id without one. Leave --revision out.")
    return dataclasses.replace(config, **{owner: type(named)(f"{named}@{revision}")})


def wants_help(args: Sequence[str]) -> bool:
    before = args[: args.index("--")] if "--" in args else args
    return any(arg in {"-h", "--help"} for arg in before)


def parse_words(prog: str, config_class: type, words: list[str], options: dict[str, Any]) -> Any | None:
    """jsonargparse over words in one form."""
    from argparse import ArgumentError

    from jsonargparse import ArgumentParser

    parser = ArgumentParser(prog=prog, exit_on_error=False, add_help=False)
    parser.add_argument("--config", action="config")
    # jsonargparse looks the names of types up in the class' own module, where those of inherited fields need not be;
    # so they are resolved before. (mypy takes __init__ of a class for one that a subclass may change.)
    config_class.__init__.__annotations__.update(get_type_hints(config_class))  # type: ignore[misc]
    parser.add_class_arguments(config_class)
    try:
        found = parser.parse_args(words)
    except ArgumentError as error:
        raise UsageError(explain(prog, str(error), options)) from error
    except SystemExit as exit:
        if exit.code:  # 0 after --print_config
            raise UsageError(f"bad arguments. Run `{prog} --help`.") from exit
        return None
    # jsonargparse 4.49 renamed the method.
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes
    values = instantiate(found)
    check_numbers(found.as_dict())
    return config_class(**{f.name: values[f.name] for f in dataclasses.fields(config_class) if f.init})


def check_numbers(settings: dict[str, Any], prefix: str = "") -> None:
    """What is true of the numbers of every command: finite, within 64 bits; seeds not negative. Their own ranges are
    checked where they are used."""
    for name, value in settings.items():
        if isinstance(value, dict):
            check_numbers(value, f"{prefix}{name}.")
        for number in value if isinstance(value, list | tuple) else (value,):
            expected = allowed(name, number)
            if expected is not None:
                raise UsageError(f"--{prefix}{dashed(name)}: found {number}, expected {expected}. Correct it.")


def allowed(name: str, value: object) -> str | None:
    """What a setting of this name may be, where `value` is not; None where it may be `value`."""
    if isinstance(value, float) and not math.isfinite(value):
        return "a finite number"
    if not isinstance(value, int):
        return None
    least = 0 if name.endswith("seed") else -MAX_INTEGER
    most = MAX_THREADS if name == "num_threads" else MAX_INTEGER
    return None if least <= value <= most else f"an integer from {least} to {most}"


def option_types(config_class: type, prefix: str = "") -> dict[str, Any]:
    """Dotted name -> type of every setting, nested dataclasses included under their own names too."""
    hints, found = get_type_hints(config_class), {}
    for field in dataclasses.fields(config_class):
        if field.init:
            kind = hints[field.name]
            found[prefix + field.name] = kind
            if dataclasses.is_dataclass(kind):
                found |= option_types(typing.cast(type, kind), f"{prefix}{field.name}.")
    return found


def normalise(prog: str, args: Sequence[str], options: dict[str, Any], positional: tuple[str, ...]) -> list[str]:
    """Every word as `--name=value` with the dataclass' spelling; lists as one JSON value."""
    words: list[str] = []
    lists: dict[str, list[str]] = {}
    free: list[str] = []
    literal: list[str] = []  # what follows `--`: words of another command are never split at commas
    queue = list(args)

    def value_follows() -> bool:
        return bool(queue) and not queue[0].startswith("--")

    while queue:
        word = queue.pop(0)
        if word == "--":
            literal = queue
            break
        if not word.startswith("--"):
            free.append(word)
            continue
        name, equals, value = word[2:].partition("=")
        name, negated = spelling(prog, name, options)
        kind = options.get(name, str)
        if name == "print_config":
            words.append(f"--print_config{equals}{value}")
        elif is_bool(kind) and not equals:
            explicit = queue.pop(0) if queue and queue[0].lower() in TRUTH else "true"
            words.append(f"--{name}={'false' if negated else explicit}")
        elif is_list(kind):
            given = lists.setdefault(name, [])
            given += [value] if equals else []
            while not equals and value_follows():
                given.append(queue.pop(0))
            if not given:
                raise UsageError(f"--{dashed(name)}: found nothing, expected one or more values. Write them after it.")
        elif equals or value_follows():
            words.append(f"--{name}={value if equals else queue.pop(0)}")
        else:
            raise UsageError(f"--{dashed(name)}: found nothing, expected a value ({type_name(kind)}). Write it after.")
    words += place_positionals(prog, free, literal, options, positional, lists)
    return words + [f"--{name}={join(values)}" for name, values in lists.items()]


def place_positionals(
    prog: str,
    free: list[str],
    literal: list[str],
    options: dict[str, Any],
    positional: tuple[str, ...],
    lists: dict[str, list[str]],
) -> list[str]:
    """Words without a name go to the settings that allow it, in order; a list takes all that remain, and those of
    `literal` (behind the others) as they are."""
    words, rest = [], [*free, *literal]
    for name in positional:
        if rest and is_list(options[name]):
            num_literal = min(len(rest), len(literal))
            given = lists.setdefault(name, [])
            given += rest[: len(rest) - num_literal]
            if num_literal:
                lists[name] = [json.dumps([*json.loads(join(given)), *rest[-num_literal:]])]
            rest = []
        elif rest:
            words.append(f"--{name}={rest.pop(0)}")
    if rest:
        raise UsageError(f"found {rest[0]!r} without a name, expected --name value. Run `{prog} --help`.")
    return words


def spelling(prog: str, typed: str, options: dict[str, Any]) -> tuple[str, bool]:
    """The dataclass' name for what was typed, and whether it was `--no-NAME` of a flag."""
    name = typed.replace("-", "_")
    if name in options or name in {"config", "print_config"}:
        return name, False
    if name.startswith("no_") and is_bool(options.get(name[3:])):
        return name[3:], True
    parent, _, key = typed.partition(".")
    parent = parent.replace("-", "_")
    if key and get_origin(options.get(parent)) is dict:
        return f"{parent}.{key}", False
    shown = ["--" + dashed(option) for option in options]
    raise UsageError(f"unknown option --{typed}.{did_you_mean('--' + typed, shown)} Run `{prog} --help` for all.")


def config_file(prog: str, name: str) -> Path:
    """A YAML file by its path, or one that ships with the package by its name: `eagle-small` after `train eagle`, and
    the recipes of real models, which are settings of a training."""
    file = Path(name)
    if file.is_file():
        return file
    group = prog.split()[1] if len(prog.split()) > 1 else ""
    folders = ("train", "recipes") if group in {"train", "plan"} else (group,)
    shipped = {
        path.stem: path
        for folder in folders
        for path in (Path(__file__).parents[1] / "configs" / folder).glob("*.yaml")
    }
    if name.removesuffix(".yaml") in shipped:
        return shipped[name.removesuffix(".yaml")]
    what = "a directory" if file.is_dir() else "no such file"
    names = ", ".join(sorted(shipped)) or "none"
    raise UsageError(f"--config: found {what} at {name}, expected a YAML file or a shipped one ({names}). Correct it.")


def check_config_file(file: Path, config_class: type) -> None:
    """A YAML mapping whose keys are settings; jsonargparse's own messages name neither file nor remedy."""
    try:
        content = yaml.safe_load(file.read_text("utf-8"))
    except yaml.YAMLError as error:
        raise UsageError(yaml_message(error, str(file))) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--config: found bytes that are not UTF-8 in {file}, expected a YAML file.") from error
    if not isinstance(content, dict):
        raise UsageError(f"--config: found {type(content).__name__} in {file}, expected `key: value` lines.")
    check_keys(content, config_class, str(file), "")


def check_keys(content: dict[str, Any], config_class: type, path: str, prefix: str) -> None:
    hints = get_type_hints(config_class)
    known = [field.name for field in dataclasses.fields(config_class) if field.init]
    for key, value in content.items():
        if str(key).split(".")[0] not in known:
            raise UsageError(
                f"{path}: unknown key {prefix}{key}.{did_you_mean(str(key), known)} Expected: {', '.join(known)}."
            )
        kind = hints.get(key)
        if isinstance(value, dict) and dataclasses.is_dataclass(kind):
            check_keys(value, typing.cast(type, kind), path, f"{prefix}{key}.")


def explain(prog: str, message: str, options: dict[str, Any]) -> str:
    """jsonargparse's message in our form: the field, what was found, what was expected, the remedy."""
    wrong = re.match(r'Parser key "([^"]+)":', message)
    got = re.findall(r"Got value: (.*)", message)
    if wrong and got and wrong[1] in options:
        shown, kind = f"--{dashed(wrong[1])}", type_name(options[wrong[1]])
        return one_line(f"{shown}: found {got[-1]!r}, expected {kind}. Correct it; `{prog} --help` explains it.")
    missing = re.search(r"required: (.+)", message) or re.search(r'[Kk]ey "([^"]+)" is required', message)
    if missing:
        names = ", ".join("--" + dashed(name.strip()) for name in missing[1].split(","))
        return one_line(f"{names}: found nothing, expected a value. Pass it, or set it in a --config file.")
    return one_line(f"{message}. Run `{prog} --help`.")


def dashed(name: str) -> str:
    return name.replace("_", "-")


def alternatives(kind: Any) -> tuple[Any, ...]:
    """Members of a union, or the type itself."""
    return get_args(kind) if get_origin(kind) in {typing.Union, types.UnionType} else (kind,)


def is_bool(kind: Any) -> bool:
    return kind is bool


def is_list(kind: Any) -> bool:
    return any(get_origin(k) in {list, tuple} or k in {list, tuple} for k in alternatives(kind))


def join(values: list[str]) -> str:
    """Several words, or one that already is a list or a comma-separated one, as JSON."""
    if len(values) == 1 and values[0].startswith("["):
        return values[0]
    return json.dumps([part for value in values for part in value.split(",") if part])


def type_name(kind: Any) -> str:
    """A type in words: `integer`, `path`, `float32 or bfloat16`."""
    names = {int: "an integer", float: "a number", str: "text", bool: "true or false", Path: "a path"}
    kinds = [k for k in alternatives(kind) if k is not type(None)]
    words = []
    for k in kinds:
        if get_origin(k) is typing.Literal:
            words += [str(value) for value in get_args(k)]
        elif get_origin(k) in {list, tuple}:
            words.append("a list")
        else:
            words.append(names.get(k, getattr(k, "__name__", str(k))))
    return ", ".join(words[:-1]) + (" or " if len(words) > 1 else "") + words[-1] if words else "nothing"
