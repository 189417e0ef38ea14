"""A frozen dataclass of settings from command-line words.

To cyclopts a command is a function whose parameters are the fields of its dataclass: it reads words, YAML files and
defaults into them, checks their types, explains them in --help and completes them in a shell. Ours are the shipped
files by their names, commas in lists, `null`, `--flag true`, --print-config, --revision and the limits of numbers.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import docstring_parser
import yaml
from cyclopts import App, ArgumentCollection, CoercionError, CycloptsError, Group, Parameter, Token, convert
from cyclopts.config import Dict
from cyclopts.exceptions import UnknownOptionError, UnusedCliTokensError
from cyclopts.help import ColumnSpec, DefaultFormatter, DescriptionRenderer, NameRenderer

from draftsmith.launch import MAX_WIDTH, OUTPUT_OPTIONS
from draftsmith.launch.errors import UsageError, did_you_mean, one_line

TRUTH = {"true", "false", "yes", "no", "on", "off"}
MAX_INTEGER = 2**63 - 1  # what torch, Arrow and NumPy hold
MAX_THREADS = 1024  # more end the process inside the threads' library, without a word of ours
NAME_WIDTH = 30  # of a setting's name in help; longer ones are folded
REQUIRED, SETTINGS, ALWAYS = (Group.create_ordered(name) for name in ("Required", "Settings", "Always"))


def parse(prog: str, config_class: type, args: Sequence[str], positional: tuple[str, ...] = ()) -> Any | None:
    """The settings that `args` describe; None when help or the configuration was printed instead.

    Raises UsageError for whatever the user wrote wrong.
    """
    before = args[: args.index("--")] if "--" in args else args
    app = application(prog, config_class, positional, printing="--print-config" in map(dashed, before))
    if not {"-h", "--help"}.isdisjoint(before):
        from rich.console import Console

        app.help_print([], console=Console(width=min(Console().width, MAX_WIDTH)))
        return None
    words = unambiguous(args, get_type_hints(config_class), positional)
    try:
        return app(words, exit_on_error=False, print_error=False, verbose=False)
    except CycloptsError as error:
        raise UsageError(f"{explain_error(error)} Run `{prog} --help`.") from error


def from_values(prog: str, config_class: type, values: Mapping[str, Any]) -> Any:
    """The settings of a call in Python, by their names; `config` is a YAML file.

    Raises UsageError as `parse`.
    """
    plain = yaml.safe_load(as_yaml({name: value for name, value in values.items() if name != "config"}))
    words = ["--config", str(values["config"])] if values.get("config") is not None else []
    try:
        return application(prog, config_class, values=plain)(words, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise UsageError(explain_error(error)) from error


def application(
    prog: str,
    config_class: type,
    positional: tuple[str, ...] = (),
    printing: bool = False,
    values: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> App:
    """A command as cyclopts knows it; called with words, it returns the settings.

    positional: settings that may also be given without their names, in this order.
    printing: print the settings, of which required ones may be missing.
    values: settings that are given beside the words. name: of the app, where it is not `prog`.
    """
    own = own_parameters(config_class, tuple(shipped(prog)))
    settings = setting_parameters(config_class, positional, printing)

    def command(*unnamed: Any, **named: Any) -> Any | None:
        given = dict(zip(positional, unnamed, strict=False)) | named
        asked = {parameter.name: given.pop(parameter.name, None) for parameter in own}
        if printing:
            print(as_yaml(defaults_of(config_class) | given), end="")
            return None
        config = config_class(**given)
        from draftsmith.data.store.special import check_paths

        check_paths(config)
        return config if asked.get("revision") is None else at_revision(config, asked["revision"])

    def read_files(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        names = {f"--{dashed(parameter.name)}" for parameter in own}  # no settings of a file
        known = ArgumentCollection(argument for argument in arguments if argument.name not in names)
        if values:
            Dict(dict(values), source=prog)(app, commands, known)
        for token in reversed(arguments["--config"].tokens):  # what is set stays as it is
            file = config_file(prog, token.value)
            Dict(read_yaml(file), source=str(file))(app, commands, known)
        refuse_fractions(known)

    command.__signature__ = inspect.Signature([*settings, *own])  # type: ignore[attr-defined]  # `inspect` reads it
    return App(
        name=name or prog,
        help=one_line(described(config_class).description or ""),
        help_formatter=DefaultFormatter(column_specs=help_columns),
        default_command=command,
        config=read_files,
        help_flags=(),
        version_flags=(),
        result_action="return_value",
        default_parameter=Parameter(allow_repeating=True, negative_iterable=()),
    )


def setting_parameters(config_class: type, positional: tuple[str, ...], printing: bool) -> list[inspect.Parameter]:
    """The fields of a dataclass as parameters of a function, positional ones first."""
    hints, meanings, defaults = get_type_hints(config_class), field_meanings(config_class), defaults_of(config_class)
    parameters = {}
    for name in field_names(config_class):
        kind, needed = hints[name], name not in defaults
        options: dict[str, Any] = {"help": meanings.get(name), "validator": limits(name)}
        if is_list(kind):
            if str in members(kind):  # which a script may pass; words are always several
                kind = next(member for member in members(kind) if is_list(member)) | None
            # `decode --draft DIR "PROMPT"`: one value behind each --draft, so that it never swallows the prompt.
            options |= {"n_tokens": -1, "consume_multiple": None if name == "draft" else 1, "json_list": False}
            options |= {"show_default": bool(defaults.get(name)) and (lambda values: ", ".join(map(str, values)))}
        if name != "command" and bool not in members(kind) and (is_list(kind) or type(None) in members(kind)):
            options |= {"converter": reader(kind)}  # the words of another command stay as they are
        if needed and printing:
            kind, defaults[name] = kind | None, None
        default = defaults.get(name, inspect.Parameter.empty)
        parameters[name] = keyword(name, kind, default, REQUIRED if needed else SETTINGS, **options)
    first = [parameters.pop(name) for name in positional]
    return [*(p.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD) for p in first), *parameters.values()]


def own_parameters(config_class: type, configs: tuple[str, ...]) -> list[inspect.Parameter]:
    """Return the options of every command. --help and OUTPUT_OPTIONS are read before; cyclopts only shows them.

    configs: names of the files that ship for it.
    """
    flags = {
        "print_config": "print the settings as YAML and stop",
        "help": "print this and stop",
        **OUTPUT_OPTIONS,
    }
    kind: Any = Path | Literal[configs] if configs else Path
    meaning = "settings: YAML, or a shipped name" if configs else "settings: YAML"
    files = keyword("config", list[kind] | None, None, ALWAYS, metavar="FILE", help=meaning)
    plain: dict[str, Any] = {"negative": (), "show_default": False}
    own = [keyword(name, bool, False, ALWAYS, help=text, **plain) for name, text in flags.items()]
    owner = revised(config_class)
    if owner is not None:
        meaning = f"branch, tag or commit of the hub's repository {owner.upper()}; of others: ID@REVISION"
        own.append(keyword("revision", str | None, None, SETTINGS, help=meaning))
    return [files, *own]


def keyword(name: str, kind: Any, default: Any, group: Group, **options: Any) -> inspect.Parameter:
    annotation = Annotated[kind, Parameter(group=group, **options)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def help_columns(console: Any, options: Any, entries: Any) -> tuple[ColumnSpec, ...]:
    """Columns of a table of settings: names of moderate width, and all the rest of the line for what they mean."""
    names = ColumnSpec(renderer=NameRenderer(NAME_WIDTH), max_width=NAME_WIDTH, style="cyclopts.name")
    return names, ColumnSpec(renderer=DescriptionRenderer(), overflow="fold")


def field_meanings(config_class: type) -> dict[str, str]:
    """What the docstrings of a dataclass, and of those that it extends, say of its fields."""
    bases = [base for base in reversed(config_class.__mro__) if dataclasses.is_dataclass(base)]
    return {entry.arg_name: one_line(entry.description or "") for base in bases for entry in described(base).params}


def described(config_class: type) -> docstring_parser.Docstring:
    return docstring_parser.parse(inspect.getdoc(config_class) or "", docstring_parser.DocstringStyle.GOOGLE)


def field_names(config_class: type) -> list[str]:
    """A command's own settings first, then those that it shares with others."""
    declared = dict.fromkeys(name for base in config_class.__mro__ for name in inspect.get_annotations(base))
    taken = {field.name for field in dataclasses.fields(config_class) if field.init}
    return [name for name in declared if name in taken]


def defaults_of(config_class: type) -> dict[str, Any]:
    """Defaults of the fields that have one."""
    fields = dataclasses.fields(config_class)
    made = {f.name: f.default_factory() for f in fields if f.default_factory is not dataclasses.MISSING}
    given = {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
    return {name: (made | given)[name] for name in field_names(config_class) if name in made | given}


def is_list(kind: Any) -> bool:
    return any(get_origin(member) in {list, tuple} for member in members(kind))


def members(kind: Any) -> tuple[Any, ...]:
    """Types of a union, or the type itself."""
    return get_args(kind) if get_origin(kind) in {Union, UnionType} else (kind,)


def reader(kind: Any) -> Callable[[Any, Sequence[Token]], Any]:
    """What cyclopts calls with the words of a list, or of a setting that may be nothing."""

    def read(plain: Any, tokens: Sequence[Token]) -> Any:
        if [token.value for token in tokens] == ["null"] and type(None) in members(kind):
            return None
        items = [token.evolve(value=text) for token in tokens for text in split(token)] if is_list(kind) else tokens
        return convert(plain, items)

    return read


def split(token: Token) -> list[str]:
    """Items of a list in one word: with commas, or as a YAML list where they hold commas."""
    if token.source != "cli":
        return [token.value]
    if token.value.startswith("["):
        return [str(item) for item in yaml.safe_load(token.value)]
    return [text for text in token.value.split(",") if text]


def refuse_fractions(arguments: ArgumentCollection) -> None:
    """Raise CoercionError for a fraction where a setting takes integers; cyclopts would round it."""
    for argument in arguments:
        kinds = {item for kind in members(argument.hint) for item in get_args(kind) or (kind,)}
        if int in kinds and kinds.isdisjoint({float, str}):
            fraction = next((token for token in argument.tokens if "." in token.value), None)
            if fraction is not None:
                raise CoercionError(argument=argument, token=fraction, target_type=int)


def limits(name: str) -> Callable[[Any, Any], None]:
    """What is true of the numbers of every command: finite, within 64 bits; seeds not negative. Their own ranges are
    checked where they are used."""
    least = 0 if name.endswith("seed") else -MAX_INTEGER
    most = MAX_THREADS if name == "num_threads" else MAX_INTEGER

    def check(kind: Any, value: Any) -> None:
        for number in value if isinstance(value, list | tuple) else (value,):
            if isinstance(number, float) and not math.isfinite(number):
                raise ValueError("Expected a finite number.")
            if isinstance(number, int) and not least <= number <= most:
                raise ValueError(f"Expected an integer from {least} to {most}.")

    return check


def unambiguous(args: Sequence[str], hints: Mapping[str, Any], positional: tuple[str, ...]) -> list[str]:
    """Words as cyclopts reads them as they are meant: names with dashes, `--flag true` as `--flag=true`, and what
    begins with a dash as a value behind a name or, where it is a text, as the first positional setting."""
    flags = {f"--{dashed(name)}" for name, kind in hints.items() if bool in members(kind)}
    words: list[str] = []
    for number, word in enumerate(args):
        if word == "--":
            return [*words, *args[number:]]
        name = words[-1] if words and words[-1].startswith("--") and "=" not in words[-1] else None
        hyphen = word.startswith("-") and not word.startswith("--")
        if word.lower() in TRUTH if name in flags else hyphen and name is not None:
            words[-1] += f"={word}"
        elif hyphen and " " in word and positional:
            words.append(f"--{positional[0]}={word}")
        elif word.startswith("--"):
            option, equals, value = word.partition("=")
            words.append(dashed(option) + equals + value)
        else:
            words.append(word)
    return words


def revised(config_class: type) -> str | None:
    """The setting whose repository --revision is of: the first of these that a command has. All other models take
    ID@REVISION only, and so does this one in a YAML file."""
    names = {field.name for field in dataclasses.fields(config_class)}
    if "revision" in names:  # of something else
        return None
    return next((name for name in ("directory", "target", "draft") if name in names), None)


def at_revision(config: Any, revision: str) -> Any:
    """`--target ID --revision R` is `--target ID@R`."""
    owner = str(revised(type(config)))
    named = getattr(config, owner)
    if named is None or "@" in str(named) or str(named).startswith("embedded:") or Path(named).exists():
        found = f"{revision} with --{owner} {named}"
        raise UsageError(f"--revision: found {found}, expected a hub id without one. Leave --revision out.")
    return dataclasses.replace(config, **{owner: type(named)(f"{named}@{revision}")})


def config_file(prog: str, name: str) -> Path:
    """A YAML file by its path, or one that ships with the package by its name: `eagle-small` after `train eagle`, and
    the recipes of real models, which are settings of a training."""
    file = Path(name)
    if file.is_file():
        return file
    known = shipped(prog)
    if name.removesuffix(".yaml") in known:
        return known[name.removesuffix(".yaml")]
    from draftsmith.data.store.special import special_kind

    what = "a directory" if file.is_dir() else special_kind(file) or "no such file"
    names = ", ".join(known) or "none"
    raise UsageError(f"--config: found {what} at {name}, expected a YAML file or a shipped one ({names}). Correct it.")


def shipped(prog: str) -> dict[str, Path]:
    """The YAML files that ship for a command, by their names."""
    group = prog.split()[1] if len(prog.split()) > 1 else ""
    folders = ("train", "recipes") if group in {"train", "plan"} else (group,)
    root = Path(__file__).parents[1] / "configs"
    found = {path.stem: path for folder in folders for path in (root / folder).glob("*.yaml")}
    return dict(sorted(found.items()))


def read_yaml(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        content = yaml.safe_load(stream)
    if not isinstance(content, dict):
        raise UsageError(f"--config: found {type(content).__name__} in {file}, expected `key: value` lines.")
    check_keys(content, file)
    return content


def check_keys(content: Any, file: Path) -> None:
    """Raises UsageError for a key that YAML reads as something else than text, such as 1, null or yes."""
    for key, value in content.items() if isinstance(content, dict) else ():
        if not isinstance(key, str):
            raise UsageError(f"--config: found the key {key!r} in {file}, expected names of settings. Correct it.")
        check_keys(value, file)


def as_yaml(settings: Mapping[str, Any]) -> str:
    """The settings as --config reads them."""
    plain = json.loads(
        json.dumps(settings, default=lambda value: vars(value) if dataclasses.is_dataclass(value) else str(value))
    )
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)


def explain_error(error: CycloptsError) -> str:
    """cyclopts' message in one line, with the name of what is wrong."""
    text = one_line(str(error))
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        return f"found {error.unused_tokens[0]!r} without a name, expected --name value."
    if isinstance(error, UnknownOptionError) and error.token.source != "cli":
        key = str(error.token.keyword).strip("[]").replace("][", ".")
        known = [argument.name.removeprefix("--").replace("-", "_") for argument in error.argument_collection]
        return f"{error.token.source}: unknown key {key}.{did_you_mean(key, known)}"
    name = error.argument.name if error.argument is not None else ""
    return text if name.removeprefix("--").replace("-", "_") in text.replace("-", "_") else f"{name}: {text}"


def dashed(name: str) -> str:
    return name.replace("_", "-")
