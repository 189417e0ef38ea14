"""The command line: `draftsmith <group> <command> [--config FILE] [--print-config] [--name value ...] [--debug]`."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from os import PathLike
from typing import Any

import draftsmith
from draftsmith.launch import MAX_WIDTH, OUTPUT_OPTIONS, TRUTH
from draftsmith.launch.commands import (
    COMMANDS,
    SECTIONS,
    SHARED,
    Command,
    add_trainers,
    check_dashes,
    command_name,
    configure,
    leading_words,
    unknown_command,
)
from draftsmith.launch.errors import UsageError, user_message
from draftsmith.launch.finished import CONTINUED, run_once
from draftsmith.modules.types import without_controls

DRAFTERS = "DRAFTSMITH_DRAFTERS"  # environment variable: folders of a user's own drafters, separated as in PATH
# Of glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code.

    The code is 0, 1 if a certificate or check failed, 2 for bad input, and 130 if interrupted.
    """
    return guarded(dispatch, sys.argv[1:] if argv is None else argv)


def main_of(config_class: type, run: Callable[[Any], Any], argv: Sequence[str] | None = None) -> int:
    """Run a script outside the package that has a single command."""

    def work(args: list[str]) -> int:
        from draftsmith.launch.arguments import parse

        config = parse(f"python {sys.argv[0]}", config_class, args)
        return 0 if config is None else run_config(run, config)

    return guarded(work, sys.argv[1:] if argv is None else argv)


def guarded(work: Callable[[list[str]], int], words: Sequence[str]) -> int:
    """Return the exit code of `work`, and print errors that users can fix as one line.

    Bugs are not caught: a bug report needs their traceback, and Python exits with 1.
    """
    # Libraries report every load of a tiny model; their warnings are still printed.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # OpenMP's threads wait for each other by spinning, after each of thousands of small products. If another program
    # has one of their cores, all of them spin for as long as it does. 5,000 spins before they sleep cost an idle
    # machine nothing that could be measured (docs/command-line.md). OpenMP reads both when torch is imported.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")

    keep_freed_memory()

    args = list(words)
    before, after = (args[: args.index("--")], args[args.index("--") :]) if "--" in args else (args, [])
    options: set[str] = set()
    run: Callable[[list[str]], int | None] = work
    if "TORCHELASTIC_ERROR_FILE" in os.environ:  # torchrun reports the failure of a rank from this file
        from torch.distributed.elastic.multiprocessing.errors import record

        run = record(work)
    try:
        before = take_output_options(before, options)
        with output_options(options) as to_json:
            from draftsmith.data.ranks import place

            printing = "json" in options and place().rank == 0
            code = run(before + after) or 0
        if printing:
            print(to_json(exit_code=code))
        sys.stdout.flush()  # a closed pipe is caught here, and not while Python shuts down
        return code
    except KeyboardInterrupt:
        again = ". The same command continues." if f"{' '.join(before[:2])} ".startswith(CONTINUED) else ""
        print(f"draftsmith: interrupted{again}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of a pipe (`| head`) has closed it. The final flush must not fail either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except BaseException as error:
        message = user_message(error)
        if message is None:
            raise
        if "debug" in options:
            print(without_controls(traceback.format_exc()), end="", file=sys.stderr)
        print(f"draftsmith: error: {message}", file=sys.stderr)
        return 2


def keep_freed_memory() -> None:
    """Let the C library keep the memory of freed tensors for the next ones.

    By default glibc returns large blocks to the kernel and asks for them again, and filling a page for the first time
    costs a CPU more than a softmax over what stands in it: with 49,152 tokens, half of a round of 64 rows.
    """
    with suppress(AttributeError, OSError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, 2**30)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def take_output_options(words: list[str], options: set[str]) -> list[str]:
    """Add the OUTPUT_OPTIONS that are given to `options`, and return the other words."""
    others = []
    for word in words:
        name, equals, value = word.partition("=")
        if not word.startswith("--") or name[2:] not in OUTPUT_OPTIONS:
            others.append(word)
        elif equals and value.lower() not in TRUTH:
            raise UsageError(f"{name}: found {value!r}, expected true or false. Leave it out, or correct it.")
        elif not equals or TRUTH[value.lower()]:
            options.add(name[2:])
    return others


@contextmanager
def output_options(options: Set[str]) -> Iterator[Callable[..., str]]:
    """Apply --quiet, --verbose and --json inside the block; yields a function that returns the JSON document."""
    from draftsmith.data.console import console_output

    if {"quiet", "verbose"} <= options:
        raise UsageError("found --quiet and --verbose, expected one of them. Leave one out.")
    with console_output("quiet" in options, "json" in options) as to_json, warnings.catch_warnings():
        if "quiet" in options:
            warnings.simplefilter("ignore")
            logging.disable(logging.WARNING)
        if "verbose" in options:
            for library in ("TRANSFORMERS", "DATASETS", "HF_HUB"):
                os.environ.setdefault(f"{library}_VERBOSITY", "info")
            logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
        try:
            yield to_json
        finally:
            logging.disable(logging.NOTSET)


def dispatch(args: list[str]) -> int:
    """Run the command at the beginning of `args`, or print the version or the overview."""
    for folder in filter(None, os.environ.get(DRAFTERS, "").split(os.pathsep)):
        draftsmith.add_drafters(folder)
    add_trainers()
    if args and args[0] in {"--version", "-V"}:
        print(f"draftsmith {draftsmith.__version__}")
        return 0
    name = command_name(args)
    if name is not None:
        rest = args[len(name.split()) :]
        if name.startswith("launch "):
            check_dashes(name, rest)
        run, config = configure(name, rest)
        if config is None:
            return 0
        from draftsmith.data.console import add_result

        try:
            return run_config(run, config, name)
        finally:
            # A command may run others: the last one to end is the one that was called.
            add_result(command=name)

    words = leading_words(args)
    groups = {command.split()[0] for command in COMMANDS}
    if (not words or words[0] in groups) and set(args[min(len(words), 1) :]) <= {"-h", "--help", "--help-all"}:
        print(overview(words[0] if words else None))
        if words and (shared := SHARED.get(words[0])) is not None:
            print_options(*shared, everything="--help-all" in args)
        return 0
    raise unknown_command(args)


def print_options(prog: str, settings: str, everything: bool) -> None:
    """Print the help of options that several commands share."""
    from draftsmith.launch.arguments import CommandApp

    CommandApp(prog, Command(settings, "", "").config_class(), everything=everything).print_help()


def run_config(run: Callable[[Any], Any], config: Any, name: str = "") -> int:
    """Run a command and return its exit code; a path that it returns becomes part of the result.

    name: of a command of the package, which is not run again where it has finished.
    """
    from draftsmith.data.console import add_result

    if getattr(config, "trust_remote_code", False):
        from draftsmith.modules.pretrained.tokenizers import trust_code

        trust_code()  # tokenizers need it too, wherever they are loaded
    result = run_once(name, run, config) if name else run(config)
    if isinstance(result, PathLike):
        add_result(output=str(result))
    return result if isinstance(result, int) else 0


def overview(group: str | None) -> str:
    """Format the list of all commands by section, or of those of one group."""
    bold = "\033[1m{}\033[0m" if sys.stdout.isatty() and "NO_COLOR" not in os.environ else "{}"
    width, columns = max(map(len, COMMANDS)), min(shutil.get_terminal_size().columns, MAX_WIDTH)
    lines = []
    if group is None:
        lines += [f"{bold.format('draftsmith')} {draftsmith.__version__}"]
        lines += ["Trains the learned parts of speculative decoding and measures their gain", ""]
    prefix = "draftsmith" if group is None else f"draftsmith {group}"
    lines += [bold.format("Usage:") + f" {prefix} <command> [--config FILE] [--name value ...]", ""]
    for title, commands in SECTIONS.items():
        shown = {name: command for name, command in commands.items() if group in (None, name.split()[0])}
        if shown:
            lines += [bold.format(title)]
            for name, command in shown.items():
                first, *more = textwrap.wrap(command.help, max(columns - width - 4, 20))
                lines += [f"  {name:{width}}  {first}", *(f"  {'':{width}}  {line}" for line in more)]
            lines += [""]
    lines += [
        "--help after a command lists its settings; --print-config prints them as YAML;",
        "--json prints one document, --quiet the result alone, --verbose library logs;",
        "--debug shows the traceback of an error; --version prints the version.",
    ]
    return "\n".join(lines)
