"""Config dataclasses from command-line words, YAML files and Python values.

cyclopts reads a command's dataclass: names, types, defaults, and the help in the docstring's `Attributes`. This module
adds groups by the class that introduces an option, shipped YAML files by name, lists with commas, `--flag true` and
--print-config.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, TypedDict, Union, get_args, get_origin, get_type_hints

import yaml
from cyclopts import (
    App,
    Argument,
    ArgumentCollection,
    CoercionError,
    CycloptsError,
    Group,
    Parameter,
    Token,
)
from cyclopts.config import Dict
from cyclopts.field_info import get_field_infos

from draftsmith.launch import MAX_WIDTH, TRUTH
from draftsmith.launch.errors import UsageError, explain_error, one_line

REQUIRED, SETTINGS = "Required", "Settings"
TEXTS = ("prompt", "system", "command")  # options whose words stay as they are
MAX_INTEGER = 2**63 - 1  # the largest that torch, Arrow and NumPy hold
MOST_VALUES = 10_000  # of a YAML file, with those that its aliases stand for
MAX_THREADS = 1024  # with more, the threads' library ends the process without a message

Switch = Annotated[bool, Parameter(negative=(), show_default=False)]


@dataclass(frozen=True)
class Always:
    """Options of every command; all but `config` are handled before cyclopts is called, which lists them.

    Attributes:
        config: settings: a YAML file
        print_config: print the settings as YAML and stop
        help_all: list rarely needed options too
    """

    config: Annotated[list[Path] | None, Parameter(metavar="FILE")] = None
    print_config: Switch = False
    help_all: Switch = False


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


def parse(
    prog: str,
    config_class: type,
    args: Sequence[str],
    positional: tuple[str, ...] = (),
    defaults: Mapping[str, Any] | None = None,
) -> Any | None:
    """Build a config from command-line words; return None if help or the config was printed instead.

    defaults: values of options that are given nowhere, in place of their own defaults.

    Raises:
        UsageError: the words are wrong.
    """
    before = set(map(dashed, args[: args.index("--")] if "--" in args else args))
    everything = "--help-all" in before
    app = CommandApp(prog, config_class, positional, printing="--print-config" in before, everything=everything)
    if everything or not {"-h", "--help"}.isdisjoint(before):
        app.print_help()
        return None
    if "--print-config" not in before:
        app.defaults = defaults or {}
    words = app.plain_words(args)
    try:
        return app(words)
    except CycloptsError as error:
        raise UsageError(f"{explain_error(error)} Run `{prog} --help`.") from error


def from_values(prog: str, config_class: type, values: Mapping[str, Any]) -> Any:
    """Build a config from Python values by name; `config` is a YAML file, as on the command line.

    Raises:
        UsageError: as `parse`.
    """
    plain = yaml.load(as_yaml({name: value for name, value in values.items() if name != "config"}), PlainLoader)
    words = ["--config", str(values["config"])] if values.get("config") is not None else []
    try:
        return CommandApp(prog, config_class, values=plain)(words)
    except CycloptsError as error:
        raise UsageError(explain_error(error)) from error


class CommandApp(App):
    """The cyclopts app of a command; called with words, it returns the config.

    Args:
        positional: options that may also be given without their names, in this order.
        printing: print the options as YAML instead; required ones may be missing.
        everything: list rarely needed options in the help too.
        values: options set beside the words; words have precedence.
    """

    def __init__(
        self,
        prog: str,
        config_class: type,
        positional: tuple[str, ...] = (),
        *,
        printing: bool = False,
        everything: bool = False,
        values: Mapping[str, Any] | None = None,
    ) -> None:
        self.prog, self.positional, self.everything, self.values = prog, positional, everything, values or {}
        self.defaults: Mapping[str, Any] = {}
        fields, bases = get_field_infos(config_class), config_class.__mro__
        self.rare = {name for base in bases for name in vars(base).get("help_rarely", ())}
        # Options whose help another command prints, once for all commands that share them.
        shared = next((base for base in bases if "help_command" in vars(base)), None)
        self.elsewhere = vars(shared)["help_command"] if shared is not None else prog
        self.shared = set[str]()
        if shared is not None and shared is not config_class:
            same = get_field_infos(shared)
            self.shared = {
                name for name in same if not fields[name].required and fields[name].default == same[name].default
            }
        # The command's own options come before those it inherits, which stand in groups of their own: `help_group` of
        # the class that introduces them.
        declared = ((name, base) for base in bases for name in inspect.get_annotations(base) if name in fields)
        titles = dict.fromkeys([REQUIRED, SETTINGS, *(vars(base).get("help_group", SETTINGS) for base in bases)])
        groups = {title: Group(title, sort_key=number) for number, title in enumerate(titles)}
        self.group_of = {
            name: groups[REQUIRED if fields[name].required else vars(origin).get("help_group", SETTINGS)]
            for name, origin in (dict.fromkeys(positional) | dict(declared)).items()
        }
        self.flags = {f"--{dashed(name)}" for name, field in fields.items() if bool in members(field.annotation)}

        def build(*, options: Any, always: Any) -> Any:
            return config_class() if options is None else options

        def show(*, options: Any, always: Any) -> None:
            defaults = {name: fields[name].default for name in self.group_of if not fields[name].required}
            print(as_yaml(defaults | (options or {})), end="")

        # A dataclass leaves texts here, which only the modules that declare its fields can resolve.
        vars(config_class)["__init__"].__annotations__ |= get_type_hints(config_class)
        types = {name: field.annotation for name, field in fields.items()}
        given = TypedDict("given", types, total=False)  # type: ignore[misc]  # mypy knows literal ones only
        command = show if printing else build
        command.__annotations__ = {  # what cyclopts reads
            "options": Annotated[given if printing else config_class, Parameter(name="*", show=False)],
            "always": Annotated[Always, Parameter(name="*", group=Group("Always", sort_key=99))],
        }
        command.__kwdefaults__ = {"always": Always()}
        if printing or not any(field.required for field in fields.values()):
            command.__kwdefaults__["options"] = None
        super().__init__(
            name=prog,
            help=one_line((config_class.__doc__ or "").split("Attributes:")[0]),
            help_epilogue=self.epilogue(),
            default_command=command,
            config=self.read_values,
            # Markdown would take the stars of two words for emphasis.
            help_format="plaintext",
            help_flags=(),
            version_flags=(),
            result_action="return_value",
            exit_on_error=False,
            print_error=False,
            verbose=False,
            default_parameter=Parameter(allow_repeating=True, negative_iterable=()),
        )

    def print_help(self) -> None:
        """Print the help of the command."""
        from rich.console import Console

        self.help_print([], console=Console(width=min(Console().width, MAX_WIDTH)))

    def epilogue(self) -> str:
        """Return where the help of further options is."""
        every = "Every command takes --json, --quiet, --verbose and --debug: draftsmith --help."
        shared = f"{self.elsewhere} --help explains {len(self.shared)} options of every training. "
        return shared + every if self.shared else every

    def assemble_argument_collection(self, **options: Any) -> ArgumentCollection:
        """Give the options that cyclopts has read groups and limits."""
        arguments = super().assemble_argument_collection(**options)
        arguments[0].field_info.annotation = Any  # else pydantic, where it is loaded, checks the config once more
        for argument in self.settings(arguments):
            self.complete(argument)
        shipped = ", ".join(shipped_configs(self.prog))
        if shipped:
            add(arguments["--config"], help=f"settings: a YAML file, or the name of a shipped one ({shipped})")
        hidden = self.rare | self.shared
        add(arguments["--help-all"], help=f"list {len(hidden)} further options too", show=bool(hidden))
        return arguments

    def settings(self, arguments: ArgumentCollection) -> ArgumentCollection:
        """Return the options of the config, without those of every command."""
        return ArgumentCollection(one for one in arguments if one.keys and one.keys[0] in self.group_of)

    def complete(self, argument: Argument) -> None:
        """Complete what cyclopts knows of an option."""
        name, default = argument.keys[0], argument.field_info.default
        show = self.everything or name not in self.rare | self.shared
        add(argument, group=self.group_of[name], show=show)
        add(argument, help=one_line(argument.parameter.help or ""), validator=number_limits(name))
        kinds = [kind for kind in members(argument.hint) if kind is not NoneType]
        several = [kind for kind in kinds if get_origin(kind) in {list, tuple}]
        # A text may stand for a list in Python only. `null` is None, and a text such as `none` is not.
        argument.hint = functools.reduce(operator.or_, several[:1] or kinds)
        if several:
            # One value behind each --head, so that `decode --head DIR "PROMPT"` does not take the prompt for a head.
            add(argument, n_tokens=-1, consume_multiple=None if name == "head" else 1, json_list=False)
            add(argument, show_default=bool(default) and (lambda values: ", ".join(map(str, values))))
        elif default is False:
            add(argument, show_default=False)
        if name in self.positional:
            argument.index = self.positional.index(name)
            argument.field_info.kind = inspect.Parameter.POSITIONAL_OR_KEYWORD

    def read_values(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Add values from Python and YAML files to those of the command line, and bring all to cyclopts' form."""
        settings = self.settings(arguments)
        Dict(dict(self.values), source=self.prog)(app, commands, settings)
        for token in reversed(arguments["--config"].tokens):  # cyclopts keeps what is set first
            file = config_file(self.prog, token.value)
            Dict(read_yaml(file), source=str(file))(app, commands, settings)
        Dict(dict(self.defaults), source=self.prog)(app, commands, settings)
        for argument in settings:
            argument.tokens[:] = plain_tokens(argument)

    def plain_words(self, args: Sequence[str]) -> list[str]:
        """Rewrite words so that cyclopts reads them as intended.

        `--flag on` becomes `--flag=true`, and a word that begins with a dash becomes a value if it follows a name or,
        as a text with blanks or a lone dash, the first positional option.
        """
        words: list[str] = []
        for number, word in enumerate(args):
            if word == "--":
                return [*words, *args[number:]]
            name = words[-1] if words and words[-1].startswith("--") and "=" not in words[-1] else ""
            hyphen = word.startswith("-") and not word.startswith("--")
            option, equals, value = word.partition("=")
            if word.lower() in TRUTH if dashed(name) in self.flags else hyphen and name:
                words[-1] += f"={TRUTH.get(word.lower(), word)}"
            elif hyphen and (" " in word or word == "-") and self.positional:
                words.append(f"--{self.positional[0]}={word}")
            elif equals and dashed(option) in self.flags:
                words.append(f"{option}={TRUTH.get(value.lower(), value)}")
            else:
                words.append(word)
        return words


def add(argument: Argument, **options: Any) -> None:
    argument.parameter = Parameter.combine(argument.parameter, Parameter(**options))


def members(kind: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the type itself."""
    return get_args(kind) if get_origin(kind) in {Union, UnionType} else (kind,)


def plain_tokens(argument: Argument) -> list[Token]:
    """Return the words of an option in cyclopts' form: None for `null`, true for `on`, items for a list with commas.

    Raises:
        CoercionError: a fraction in place of an integer, which cyclopts would round.
    """
    tokens = argument.tokens
    if argument.name.lstrip("-") not in TEXTS:
        # Shells expand `~`, but not in `--output=~/runs`; YAML and Python do not.
        tokens = [
            token.evolve(value=str(Path.home() / rest)) if start in ("~", "$HOME", "${HOME}") and slash else token
            for token in tokens
            for start, slash, rest in [token.value.partition("/")]
        ]
    kinds = {item for kind in members(argument.hint) for item in get_args(kind) or (kind,)}
    if [token.value for token in tokens] == ["null"] and NoneType in members(argument.field_info.annotation):
        return [tokens[0].evolve(value="", implicit_value=None)]
    if bool in kinds:
        return [token.evolve(value=str(TRUTH.get(token.value.lower(), token.value))) for token in tokens]
    if get_origin(argument.hint) in {list, tuple} and argument.keys != ("command",):  # whose words stay as they are
        items = []
        for token in tokens:
            if token.source != "cli":  # of a YAML file, which has lists of its own
                texts = [token.value]
            elif token.value.startswith("["):  # a YAML list, for items with commas
                texts = [str(item) for item in yaml.load(token.value, PlainLoader)]
            else:
                texts = [text for text in token.value.split(",") if text]
            items += [token.evolve(value=text) for text in texts]
        tokens = items or [token.evolve(implicit_value=get_origin(argument.hint)()) for token in tokens[:1]]
    for token in tokens:
        if int in kinds and kinds.isdisjoint({float, str}) and "." in token.value:
            raise CoercionError(argument=argument, token=token, target_type=int)
    return tokens


def number_limits(name: str) -> Callable[[Any, Any], None]:
    """Return the validator of numbers of every command; a command's own ranges are checked by its config."""
    least = 0 if name.endswith("seed") else -MAX_INTEGER
    most = MAX_THREADS if name == "num_threads" else MAX_INTEGER

    def check(kind: Any, value: Any) -> None:
        for number in value if isinstance(value, list | tuple) else (value,):
            if isinstance(number, float) and not math.isfinite(number):
                raise ValueError("Expected a finite number.")
            if isinstance(number, int) and not least <= number <= most:
                raise ValueError(f"Expected an integer from {least} to {most}.")

    return check


def dashed(name: str) -> str:
    return name.replace("_", "-")


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
