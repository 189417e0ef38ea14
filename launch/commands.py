"""Table of all commands: where each one lives and its one-line help.

A command is a frozen dataclass of options and a function `run(config)`, in a module that is imported only when the
command is called.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.launch.errors import UsageError, did_you_mean


@dataclass(frozen=True)
class Command:
    """Location and help of a command.

    Attributes:
        settings: `module:name` of its config dataclass, relative to the package; for a command about a trained
            drafter, of a function from the drafter's kind to that dataclass.
        help: one line for the overview.
        positional: options that may also be given without their names, in this order.
        runner: `module` or `module:function` that runs it; by default `run` in the module of the dataclass.
        drafter: kind of the trained drafter that the command is about.
    """

    settings: str
    help: str
    positional: tuple[str, ...] = ()
    runner: str | None = None
    drafter: str | None = None

    def config_class(self) -> type:
        """Import and return the config dataclass."""
        module, _, name = self.settings.partition(":")
        settings = getattr(importlib.import_module(f"draftsmith.{module}"), name)
        return settings if self.drafter is None else settings(self.drafter)

    def function(self) -> Callable[[Any], Any]:
        """Import and return the function that runs the command; --help does not need it."""
        module, _, name = (self.runner or self.settings.partition(":")[0]).partition(":")
        function: Callable[[Any], Any] = getattr(importlib.import_module(f"draftsmith.{module}"), name or "run")
        return function

    def run(self, config: Any) -> Any:
        return self.function()(config)


def of_drafters(verb: str, settings: str, runner: str | None = None, about: str = "{first_line}") -> dict[str, Command]:
    """Return a command `VERB KIND` for every trained drafter in modules/drafters.

    Args:
        about: help, with `{kind}` and `{first_line}` (of the drafter's file) filled in.
    """
    from draftsmith.modules.drafters import learned

    return {
        f"{verb} {kind}": Command(
            settings, about.format(kind=kind, first_line=line.removesuffix(".")), runner=runner, drafter=kind
        )
        for kind, line in learned().items()
    }


# Commands by sections of the overview, in the order in which a newcomer needs them.
SECTIONS: dict[str, dict[str, Command]] = {
    "Start here": {
        "run": Command(
            "launch.pipeline:RunConfig", "Run a pipeline: demo, laptop, refresh, or a YAML file", ("pipeline",)
        ),
        "decode": Command(
            "eval.settings:DecodeConfig",
            "Answer a prompt and show which tokens were drafted",
            ("prompt",),
            runner="eval.decode",
        ),
    },
    "Make training data with the target": {
        "data prompts": Command(
            "data.settings:PromptsConfig", "Chat rows to prompts, with the loss mask", runner="data.prompts"
        ),
        "data responses": Command(
            "data.settings:ResponsesConfig", "The target answers the prompts", runner="data.responses"
        ),
        "data acceptance": Command(
            "data.settings:AcceptanceConfig", "Label which drafted tokens the target keeps", runner="data.acceptance"
        ),
        "data features": Command(
            "data.settings:FeaturesConfig", "The target's hidden states, to train a draft head", runner="data.features"
        ),
        "data inspect": Command(
            "data.settings:InspectConfig", "Look at rows, their mask in color", ("artifact",), "data.inspect"
        ),
    },
    "Train heads": {
        "train acceptance": Command(
            "train.config:TrainAcceptanceConfig", "Acceptance head: when to stop drafting", runner="launch.training"
        ),
        **of_drafters("train", "train.config:drafter_config", "launch.training"),
    },
    "Run data and train commands on many devices": {
        "launch torchrun": Command(
            "launch.launchers:TorchrunConfig",
            "Processes on this machine, or one group per machine",
            ("command",),
            "launch.launchers:run_torchrun",
        ),
        "launch slurm": Command("launch.slurm:SlurmConfig", "A SLURM job: submitted, followed, requeued", ("command",)),
        "launch vllm": Command(
            "launch.vllm:VllmConfig", "A vLLM server that hands out a target's hidden states", ("command",)
        ),
    },
    "Use heads elsewhere, and others' here": {
        "export": Command(
            "launch.export.settings:ExportConfig",
            "A head as another system loads it, checked",
            runner="launch.export.export",
        ),
        "check": Command(
            "eval.settings:EngineCheckConfig",
            "What another system makes of a directory",
            ("directory",),
            runner="eval.check.engine",
        ),
        "import": Command(
            "launch.export.settings:ImportConfig",
            "A public head as one of ours",
            ("directory",),
            runner="launch.export.import_head",
        ),
    },
    "Measure": {
        "diagnose": Command(
            "eval.settings:DiagnoseConfig",
            "Why a drafter drafts badly, and its files corrected",
            ("draft",),
            runner="launch.export.diagnose",
        ),
        "eval bench": Command(
            "eval.settings:BenchConfig",
            "Compare methods: speed, tau, equality with the target",
            runner="eval.bench.command",
        ),
        "eval served": Command(
            "eval.settings:ServedConfig", "A head in a server, by load and draft length", runner="eval.engines.served"
        ),
        "eval compare": Command(
            "eval.settings:CompareConfig",
            "Two runs of the bench, prompt by prompt",
            ("runs",),
            runner="eval.bench.compare",
        ),
        "eval report": Command(
            "eval.settings:ReportConfig", "Finished runs as one HTML page", ("runs",), runner="eval.report.command"
        ),
        "eval certify": Command(
            "eval.settings:CertifyConfig",
            "Certify that answers follow the target: a server's, or a method's",
            runner="eval.certify",
        ),
    },
    "Your machine": {
        "doctor": Command("launch.doctor:DoctorConfig", "What is installed here and what of it can be used"),
    },
}
COMMANDS = {name: command for section in SECTIONS.values() for name, command in section.items()}


def leading_words(args: Sequence[str]) -> list[str]:
    return [arg for arg in args[:2] if not arg.startswith("-")]


def command_name(args: Sequence[str]) -> str | None:
    """Return the command at the beginning of `args`, which has one or two words."""
    words = leading_words(args)
    return next((name for name in (" ".join(words), "".join(words[:1])) if name in COMMANDS), None)


def unknown_command(args: Sequence[str]) -> UsageError:
    """Build the error that names the nearest commands."""
    words = leading_words(args)
    typed = " ".join(words) or args[0]
    candidates = [name for name in COMMANDS if words and name.split()[0] == words[0]] or list(COMMANDS)
    return UsageError(
        f"found command {typed!r}, expected one of: {', '.join(candidates)}.{did_you_mean(typed, candidates)} "
        "Run `draftsmith --help`."
    )


def check_dashes(launcher: str, args: Sequence[str]) -> None:
    """Check that `--` precedes the command; without it the launcher would take the command's options for its own.

    Raises:
        UsageError: there is a command's name but no `--`.
    """
    if "--" in args:
        return
    for start, word in enumerate(args):
        if not word.startswith("-") and command_name(args[start:]) is not None:
            before, after = " ".join(args[:start]), " ".join(args[start:])
            corrected = " ".join(part for part in (f"draftsmith {launcher}", before, "--", after) if part)
            raise UsageError(f"command: found {word!r} without `--` before it. Write `{corrected}`.")


def configure(name: str, args: Sequence[str]) -> tuple[Callable[[Any], Any], Any | None]:
    """Return the function that runs a command, and its config; None as config if help was printed instead."""
    from draftsmith.launch.arguments import parse

    command = COMMANDS[name]
    return command.run, parse(f"draftsmith {name}", command.config_class(), args, command.positional)


def install_completion() -> Path:
    """Write the completion of commands and options for the user's shell, and return its file."""
    from cyclopts import App

    from draftsmith.launch.arguments import application

    root = App("draftsmith", help_flags=("--help",), version_flags=())
    groups = {"": root}
    for name, command in COMMANDS.items():
        group, _, last = name.rpartition(" ")
        if group not in groups:
            groups[group] = App(group, version_flags=())
            root.command(groups[group])
        app = application(f"draftsmith {name}", command.config_class(), command.positional, everything=True)
        groups[group].command(app, name=last)
    return root.install_completion()
