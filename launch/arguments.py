"""Config dataclasses from command-line words, YAML files and Python values.

cyclopts parses: to it a command is a function whose parameters are the fields of the dataclass, with their types,
defaults and the help in the docstring's `Attributes`. This module adds shipped YAML files by name, lists with commas,
`null`, `--flag true` and --print-config.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import re
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import docstring_parser
import yaml
from cyclopts import App, ArgumentCollection, CoercionError, CycloptsError, Group, Parameter, Token, convert
from cyclopts.config import Dict
from cyclopts.exceptions import MissingArgumentError, UnknownOptionError, UnusedCliTokensError
from cyclopts.help import ColumnSpec, DefaultFormatter, DescriptionRenderer, HelpEntry, NameRenderer

from draftsmith.launch import MAX_WIDTH, OUTPUT_OPTIONS
from draftsmith.launch.errors import UsageError, did_you_mean, one_line

# Values of a flag; cyclopts does not know the last two.
TRUTH = {"true": "true", "false": "false", "yes": "true", "no": "false", "on": "true", "off": "false"}
MAX_INTEGER = 2**63 - 1  # the largest that torch, Arrow and NumPy hold
MAX_THREADS = 1024  # with more, the threads' library ends the process without a message
NAME_WIDTH = 30  # of an option's name in help; longer ones are folded
REQUIRED, SETTINGS, ALWAYS = "Required", "Settings", "Always"
HELP_ALL = "help_all"
# Names in transformers, SpecForge, speculators and vLLM that mean what ours mean: they are accepted.
SAME = {
    theirs: ours
    for ours, names in {
        "lr": "learning_rate",
        "epochs": "num_epochs num_train_epochs",
        "clip": "max_grad_norm grad_clip",
        "max_length": "max_seq_len max_seq_length seq_length max_model_len",
        "warmup_share": "warmup_ratio",
        "output": "output_dir save_path out",
        "target": "model model_name_or_path target_model target_model_path verifier",
        "draft": "draft_model draft_model_path speculative_model",
        "data": "data_path train_data_path dataset",
        "ttt_steps": "ttt_length",
        "draft_vocab": "draft_vocab_size",
        "num_drafted": "num_speculative_tokens speculative_num_steps",
        "max_new_tokens": "max_tokens n_predict",
        "loggers": "report_to log_with",
    }.items()
    for theirs in names.split()
}
# Names of settings that count differently here: the error explains ours.
DIFFERENT = {
    theirs: ours
    for names, ours in {
        "per_device_train_batch_size train_batch_size": "--batch-size, of all devices and accumulated parts together",
        "gradient_accumulation_steps accumulation_steps": "--accumulate, which divides --batch-size",
        "num_speculative_tokens speculative_num_steps": "it in a method: --methods eagle3:k=5",
    }.items()
    for theirs in names.split()
}


def parse(prog: str, config_class: type, args: Sequence[str], positional: tuple[str, ...] = ()) -> Any | None:
    """Build a config from command-line words; return None if help or the config was printed instead.

    Raises:
        UsageError: the words are wrong.
    """
    before = set(map(dashed, args[: args.index("--")] if "--" in args else args))
    everything = f"--{dashed(HELP_ALL)}" in before
    app = application(prog, config_class, positional, "--print-config" in before, everything=everything)
    if everything or not {"-h", "--help"}.isdisjoint(before):
        from rich.console import Console

        app.help_print([], console=Console(width=min(Console().width, MAX_WIDTH)))
        return None
    words = plain_words(args, get_type_hints(config_class), positional)
    try:
        return app(words, exit_on_error=False, print_error=False, verbose=False)
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
        return application(prog, config_class, values=plain)(words, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise UsageError(explain_error(error)) from error


def application(
    prog: str,
    config_class: type,
    positional: tuple[str, ...] = (),
    printing: bool = False,
    values: Mapping[str, Any] | None = None,
    everything: bool = False,
) -> App:
    """Build the cyclopts app of a command; called with words, it returns the config.

    Args:
        positional: options that may also be given without their names, in this order.
        printing: print the options as YAML instead; required ones may be missing.
        values: options set beside the words; words have precedence.
        everything: list rarely needed options in the help too.
    """
    rarely = {name for base in config_class.__mro__ for name in vars(base).get("help_rarely", ())}
    settings = setting_parameters(config_class, positional, printing, hidden=set() if everything else rarely)
    common = common_parameters(len(rarely), ", ".join(shipped_configs(prog)))
    hints = get_type_hints(config_class)

    def command(*unnamed: Any, **named: Any) -> Any | None:
        options = dict(zip(positional, unnamed, strict=False)) | named
        for parameter in common:
            options.pop(parameter.name, None)
        if printing:
            print(as_yaml(defaults_of(config_class) | options), end="")
            return None
        return config_class(**options)

    def read_files(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        names = {f"--{dashed(parameter.name)}" for parameter in common}  # not allowed in a file
        allowed = ArgumentCollection(argument for argument in arguments if argument.name not in names)
        if values:
            Dict(dict(values), source=prog)(app, commands, allowed)
        for token in reversed(arguments["--config"].tokens):  # cyclopts keeps what is set first
            file = config_file(prog, token.value)
            content = {our_name(key, hints): value for key, value in read_yaml(file).items()}
            Dict(content, source=str(file))(app, commands, allowed)
        # cyclopts would round a fraction where an integer is expected.
        for argument in allowed:
            kinds = {item for kind in members(argument.hint) for item in get_args(kind) or (kind,)}
            if bool in kinds:
                argument.tokens[:] = [t.evolve(value=TRUTH.get(t.value.lower(), t.value)) for t in argument.tokens]
            if int in kinds and kinds.isdisjoint({float, str}):
                fraction = next((token for token in argument.tokens if "." in token.value), None)
                if fraction is not None:
                    raise CoercionError(argument=argument, token=fraction, target_type=int)

    command.__signature__ = inspect.Signature([*settings, *common])  # type: ignore[attr-defined]  # read by cyclopts
    # Names of limited width, and the rest of the line for their meaning.
    names = ColumnSpec(renderer=NameRenderer(NAME_WIDTH), max_width=NAME_WIDTH, style="cyclopts.name")
    columns = names, ColumnSpec(renderer=describe, overflow="fold")
    return App(
        name=prog,
        help=one_line(parsed_docstring(config_class).description or ""),
        help_formatter=DefaultFormatter(column_specs=columns),
        help_epilogue="Every command takes --json, --quiet, --verbose and --debug: draftsmith --help.",
        default_command=command,
        config=read_files,
        help_flags=(),
        version_flags=(),
        result_action="return_value",
        default_parameter=Parameter(allow_repeating=True, negative_iterable=()),
    )


def describe(entry: HelpEntry) -> Any:
    """Render the meaning of an option, whose group says already that it is required."""
    return DescriptionRenderer()(entry.copy(required=False))


def setting_parameters(
    config_class: type, positional: tuple[str, ...], printing: bool, hidden: set[str]
) -> list[inspect.Parameter]:
    """Describe the fields of a dataclass as function parameters, positional ones first.

    The command's own fields come before those it inherits, which stand in groups of their own: `help_group` of the
    class that introduces them.

    Args:
        hidden: fields that help does not list.
    """
    titles = dict.fromkeys(vars(base).get("help_group", SETTINGS) for base in config_class.__mro__)
    groups = {title: Group(title, sort_key=number) for number, title in enumerate([REQUIRED, SETTINGS, *titles])}
    hints, meanings, defaults = get_type_hints(config_class), field_meanings(config_class), defaults_of(config_class)
    parameters = {}
    for name in field_names(config_class):
        kind, required = hints[name], name not in defaults
        options: dict[str, Any] = {"help": meanings.get(name), "validator": number_limits(name)}
        options["show"] = name not in hidden
        if is_list(kind):
            if str in members(kind):  # for callers in Python; words are always several
                kind = next(member for member in members(kind) if is_list(member)) | None
            # One value behind each --draft, so that `decode --draft DIR "PROMPT"` does not take the prompt for a head.
            options |= {"n_tokens": -1, "consume_multiple": None if name == "draft" else 1, "json_list": False}
            options |= {"show_default": bool(defaults.get(name)) and (lambda values: ", ".join(map(str, values)))}
        if name != "command" and bool not in members(kind) and (is_list(kind) or type(None) in members(kind)):
            options |= {"converter": list_or_none_converter(kind)}  # words of a launched command stay as they are
        if required and printing:
            kind, defaults[name] = kind | None, None
        default = defaults.get(name, inspect.Parameter.empty)
        origin = next(base for base in reversed(config_class.__mro__) if name in inspect.get_annotations(base))
        if defaults.get(name) is False:
            options["show_default"] = False
        title = REQUIRED if required else vars(origin).get("help_group", SETTINGS)
        parameters[name] = keyword(name, kind, default, groups[title], **options)
    first = [parameters.pop(name) for name in positional]
    return [*(p.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD) for p in first), *parameters.values()]


def common_parameters(num_hidden: int, shipped: str) -> list[inspect.Parameter]:
    """Describe the options of every command. num_hidden: number of options that help does not list.

    shipped: names of the command's files of settings.

    All but --config are handled before cyclopts is called; it only lists them, and OUTPUT_OPTIONS not even that.
    """
    flags = {"print_config": "print the settings as YAML and stop"}
    flags |= {HELP_ALL: f"list {num_hidden} rarely needed options too"} if num_hidden else {}
    meaning = f"settings: a YAML file, or the name of a shipped one ({shipped})" if shipped else "settings: a YAML file"
    group = Group(ALWAYS, sort_key=99)
    files = keyword("config", list[Path] | None, None, group, metavar="FILE", help=meaning)
    plain: dict[str, Any] = {"negative": (), "show_default": False}
    hidden = dict.fromkeys({HELP_ALL, "help", *OUTPUT_OPTIONS} - flags.keys(), "")
    return [
        files,
        *(
            keyword(name, bool, False, group, help=text, show=bool(text), **plain)
            for name, text in (flags | hidden).items()
        ),
    ]


def keyword(name: str, kind: Any, default: Any, group: Group, **options: Any) -> inspect.Parameter:
    annotation = Annotated[kind, Parameter(group=group, **options)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def field_meanings(config_class: type) -> dict[str, str]:
    """Read the help of every field from the docstrings of a dataclass and its bases."""
    bases = [base for base in reversed(config_class.__mro__) if dataclasses.is_dataclass(base)]
    entries = [entry for base in bases for entry in parsed_docstring(base).params]
    return {entry.arg_name: one_line(entry.description or "") for entry in entries}


def parsed_docstring(config_class: type) -> docstring_parser.Docstring:
    return docstring_parser.parse(inspect.getdoc(config_class) or "", docstring_parser.DocstringStyle.GOOGLE)


def field_names(config_class: type) -> list[str]:
    """Return the names of the fields: the class's own first, then those of its bases."""
    declared = dict.fromkeys(name for base in config_class.__mro__ for name in inspect.get_annotations(base))
    accepted = {field.name for field in dataclasses.fields(config_class) if field.init}
    return [name for name in declared if name in accepted]


def defaults_of(config_class: type) -> dict[str, Any]:
    """Return the defaults of the fields that have one."""
    defaults = {}
    for field in dataclasses.fields(config_class):
        if field.default_factory is not dataclasses.MISSING:
            defaults[field.name] = field.default_factory()
        elif field.default is not dataclasses.MISSING:
            defaults[field.name] = field.default
    return {name: defaults[name] for name in field_names(config_class) if name in defaults}


def is_list(kind: Any) -> bool:
    return any(get_origin(member) in {list, tuple} for member in members(kind))


def members(kind: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the type itself."""
    return get_args(kind) if get_origin(kind) in {Union, UnionType} else (kind,)


def list_or_none_converter(kind: Any) -> Callable[[Any, Sequence[Token]], Any]:
    """Return cyclopts' converter for a list or an optional value: `null`, items with commas, YAML lists."""

    def read(plain: Any, tokens: Sequence[Token]) -> Any:
        if [token.value for token in tokens] == ["null"] and type(None) in members(kind):
            return None
        if not is_list(kind):
            return convert(plain, tokens)
        items = []
        for token in tokens:
            if token.source != "cli":  # of a YAML file, which has lists of its own
                texts = [token.value]
            elif token.value.startswith("["):  # a YAML list, for items with commas
                texts = [str(item) for item in yaml.load(token.value, PlainLoader)]
            else:
                texts = [text for text in token.value.split(",") if text]
            items += [token.evolve(value=text) for text in texts]
        return convert(plain, items)

    return read


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


def our_name(name: str, known: Container[str]) -> str:
    """Return our name of an option, with underscores: of another project's name that means the same."""
    plain = name.replace("-", "_")
    return SAME[plain] if plain not in known and SAME.get(plain) in known else plain


def plain_words(args: Sequence[str], hints: Mapping[str, Any], positional: tuple[str, ...]) -> list[str]:
    """Rewrite words so that cyclopts reads them as intended.

    Names become ours, with dashes, `--flag true` becomes `--flag=true`, and a word that begins with a dash becomes a
    value if it follows a name or, as a text with blanks or a lone dash, the first positional option.
    """
    flags = {f"--{dashed(name)}" for name, kind in hints.items() if bool in members(kind)}
    words: list[str] = []
    for number, word in enumerate(args):
        if word == "--":
            return [*words, *args[number:]]
        name = words[-1] if words and words[-1].startswith("--") and "=" not in words[-1] else None
        hyphen = word.startswith("-") and not word.startswith("--")
        if word.lower() in TRUTH if name in flags else hyphen and name is not None:
            words[-1] += f"={TRUTH.get(word.lower(), word) if name in flags else word}"
        elif hyphen and (" " in word or word == "-") and positional:
            words.append(f"--{positional[0]}={word}")
        elif word.startswith("--"):
            option, equals, value = word[2:].partition("=")
            head, dot, nested = option.partition(".")
            option = f"--{dashed(our_name(head, hints) + dot + nested)}"
            words.append(option + equals + (TRUTH.get(value.lower(), value) if option in flags else value))
        else:
            words.append(word)
    return words


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


def explain_error(error: CycloptsError) -> str:
    """Return cyclopts' message as one line that names the option."""
    text = one_line(str(error))
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        return f"found {error.unused_tokens[0]!r} without a name, expected --name value."
    if isinstance(error, UnknownOptionError) and error.token.source != "cli":
        key = str(error.token.keyword).strip("[]").replace("][", ".")
        names = [argument.name.removeprefix("--").replace("-", "_") for argument in error.argument_collection]
        return f"{error.token.source}: unknown key {key}.{did_you_mean(key, names)}"
    if isinstance(error, UnknownOptionError):
        unknown = (error.token.keyword or error.token.value).lstrip("-").partition("=")[0]
        ours = DIFFERENT.get(unknown.replace("-", "_"), "")
        if any(ours.startswith(one.name) or f" {one.name} " in ours for one in error.argument_collection):
            return f"found --{unknown}, expected {ours}."
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        return f"found no {error.argument.name}, expected it with a value."
    name = error.argument.name if error.argument is not None else ""
    return text if name.removeprefix("--").replace("-", "_") in text.replace("-", "_") else f"{name}: {text}"


def dashed(name: str) -> str:
    return name.replace("_", "-")
