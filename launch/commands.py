"""Table of all commands: where each one lives and its one-line help.

A command is a frozen dataclass of options and a function `run(config)`, in a module that is imported only when the
command is called.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.launch.errors import UsageError, did_you_mean
from draftsmith.modules.drafters import learned


@dataclass(frozen=True)
class Command:
    """Location and help of a command.

    Attributes:
        settings: `module:name` of its config dataclass, relative to the package; for `train KIND`, of a function from
            the kind to that dataclass.
        runner: `module`, whose `run(config)` runs it, or `module:function`.
        help: one line for the overview.
        positional: options that may also be given without their names, in this order.
        drafter: kind of the trained drafter that the command is about.
    """

    settings: str
    runner: str
    help: str
    positional: tuple[str, ...] = ()
    drafter: str | None = None

    def config_class(self) -> type:
        """Import and return the config dataclass."""
        module, _, name = self.settings.partition(":")
        settings = getattr(importlib.import_module(f"draftsmith.{module}"), name)
        return settings if self.drafter is None else settings(self.drafter)

    def function(self) -> Callable[[Any], Any]:
        """Import and return the function that runs the command; --help does not need it."""
        module, _, name = self.runner.partition(":")
        function: Callable[[Any], Any] = getattr(importlib.import_module(f"draftsmith.{module}"), name or "run")
        return function

    def run(self, config: Any) -> Any:
        return self.function()(config)


# Commands by sections of the overview, in the order in which a newcomer needs them.
SECTIONS: dict[str, dict[str, Command]] = {
    "Start here": {
        "decode": Command(
            "eval.settings:DecodeConfig",
            "eval.decode",
            "Answer a prompt and show which tokens were drafted",
            ("prompt",),
        )
    },
    "Make training data with the target": {
        "data prompts": Command(
            "data.stages:PromptsConfig", "data.prompts", "Chat rows to prompts, with the loss mask"
        ),
        "data responses": Command("data.stages:ResponsesConfig", "data.responses", "The target answers the prompts"),
        "data acceptance": Command(
            "data.stages:AcceptanceConfig", "data.acceptance", "Label which drafted tokens the target keeps"
        ),
        "data features": Command(
            "data.stages:FeaturesConfig", "data.features", "The target's hidden states, to train a draft head"
        ),
        "data inspect": Command(
            "data.stages:InspectConfig", "data.inspect", "Look at rows, their mask in color", ("data",)
        ),
    },
    "Train heads": {
        "train acceptance": Command(
            "train.config:TrainAcceptanceConfig", "launch.training", "Acceptance head: when to stop drafting"
        )
    },
    "Run data and train commands on many devices": {
        "launch torchrun": Command(
            "launch.launchers:TorchrunConfig",
            "launch.launchers:run_torchrun",
            "Processes on this machine, or one group per machine",
            ("command",),
        ),
        "launch slurm": Command(
            "launch.slurm:SlurmConfig", "launch.slurm", "A SLURM job: submitted, followed, requeued", ("command",)
        ),
        "launch vllm": Command(
            "launch.vllm:VllmConfig",
            "launch.vllm",
            "A vLLM server that hands out a target's hidden states",
            ("command",),
        ),
    },
    "Use heads elsewhere, and others' here": {
        "export": Command(
            "launch.export.settings:ExportConfig", "launch.export.export", "A head as another system loads it, checked"
        ),
        "check": Command(
            "eval.settings:CheckConfig", "eval.check.check", "What another system makes of a directory", ("directory",)
        ),
        "import": Command(
            "launch.export.settings:ImportConfig",
            "launch.export.import_head",
            "A public head as one of ours",
            ("directory",),
        ),
    },
    "Measure": {
        "diagnose": Command(
            "eval.settings:DiagnoseConfig",
            "launch.diagnose",
            "Why a drafter drafts badly, and its files corrected",
            ("head",),
        ),
        "eval bench": Command(
            "eval.settings:BenchConfig", "eval.bench.command", "Compare methods: speed, tau, equality with the target"
        ),
        "eval served": Command(
            "eval.settings:ServedConfig", "eval.engines.served", "A head in a server, by load and draft length"
        ),
        "eval compare": Command(
            "eval.settings:CompareConfig", "eval.bench.compare", "Two runs of the bench, prompt by prompt", ("runs",)
        ),
        "eval report": Command(
            "eval.settings:ReportConfig", "eval.report", "Finished runs as one HTML page", ("runs",)
        ),
        "eval certify": Command(
            "eval.settings:CertifyConfig", "eval.certify", "Certify that a server's answers follow the target"
        ),
    },
    "In production": {
        "watch": Command(
            "eval.settings:WatchConfig", "eval.watch.command", "A server's acceptance beside what its head measured"
        )
    },
    "Your machine": {
        "doctor": Command(
            "launch.doctor:DoctorConfig", "launch.doctor", "What is installed here and what of it can be used"
        )
    },
}
# Groups whose help also prints the options that their commands share: the name it is printed for, and the dataclass.
SHARED = {"train": ("draftsmith train KIND", "train.config:TrainDrafterConfig")}
COMMANDS = {name: command for section in SECTIONS.values() for name, command in section.items()}


def add_trainers() -> None:
    """Add `train KIND` of every trained drafter that is registered by now (`draftsmith.add_drafters`)."""
    for kind, line in learned().items():
        command = Command("train.config:drafter_config", "launch.training", line.removesuffix("."), drafter=kind)
        SECTIONS["Train heads"][f"train {kind}"] = COMMANDS[f"train {kind}"] = command


add_trainers()


def leading_words(args: Sequence[str]) -> list[str]:
    return [arg for arg in args[:2] if not arg.startswith("-")]


def command_name(args: Sequence[str]) -> str | None:
    """Return the command at the beginning of `args`, which has one or two words."""
    words = leading_words(args)
    return next((name for name in (" ".join(words), "".join(words[:1])) if name in COMMANDS), None)


def unknown_command(args: Sequence[str]) -> UsageError:
    """Build the error that names the nearest commands."""
    words = leading_words(args)
    typed = " ".join(words or args[:1])
    candidates = [name for name in COMMANDS if words and name.split()[0] == words[0]] or list(COMMANDS)
    nearest = did_you_mean(typed, candidates)
    expected = "another" if nearest else f"one of: {', '.join(candidates)}"
    return UsageError(f"found command {typed!r}, expected {expected}.{nearest} Run `draftsmith --help`.")


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

    command, defaults = COMMANDS[name], {}
    if command.drafter is not None and any(word.partition("=")[0] == "--plan" for word in args):
        from draftsmith.train.config import NO_DATA

        defaults = {"data": NO_DATA}  # a plan can be made before there is data
    return command.run, parse(f"draftsmith {name}", command.config_class(), args, command.positional, defaults)
