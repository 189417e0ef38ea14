"""The commands: where each lives, and what it is for.

A command is a frozen dataclass of settings and a function `run(config)` in one module, which is imported only when
the command is called.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.launch.errors import UsageError, did_you_mean


@dataclass(frozen=True)
class Command:
    """Where a command lives.

    settings: its dataclass, as `module:name` relative to the package; of a drafter's command, a function from the
        drafter's name to the dataclass.
    help: one line for the overview.
    positional: settings that may also be given without their names, in this order.
    runner: the module with `run(config)`, where it is not that of the settings.
    drafter: the learned drafter that the command is about.
    """

    settings: str
    help: str
    positional: tuple[str, ...] = ()
    runner: str | None = None
    drafter: str | None = None

    @property
    def module(self) -> str:
        """The module with `run`, which --help does not need."""
        return f"draftsmith.{self.runner or self.settings.partition(':')[0]}"

    def config_class(self) -> type:
        """The dataclass of settings."""
        place, _, name = self.settings.partition(":")
        settings = getattr(importlib.import_module(f"draftsmith.{place}"), name)
        return settings if self.drafter is None else settings(self.drafter)

    def run(self, config: Any) -> Any:
        return importlib.import_module(self.module).run(config)


def of_drafters(verb: str, settings: str, runner: str | None = None, about: str = "{first_line}") -> dict[str, Command]:
    """`VERB KIND` of every learned drafter in modules/drafters.

    settings, runner: as of `Command`. about: its help, with the first line of the drafter's file or its kind in it.
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
        "demo": Command("launch.demo:DemoConfig", "Run the whole pipeline on the embedded models (8 minutes)"),
        "decode": Command(
            "eval.decode:DecodeConfig", "Answer a prompt and show which tokens were drafted", ("prompt",)
        ),
    },
    "Make training data with the target": {
        "data prompts": Command("data.prompts:PromptsConfig", "Chat rows to prompts, with the loss mask"),
        "data responses": Command("data.responses:ResponsesConfig", "The target answers the prompts"),
        "data acceptance": Command("data.acceptance:AcceptanceConfig", "Label which drafted tokens the target keeps"),
        "data features": Command("data.features:FeaturesConfig", "The target's hidden states, to train a draft head"),
        "data inspect": Command("data.inspect:InspectConfig", "Look at rows, their mask in colour", ("artefact",)),
    },
    "Train heads": {
        "train acceptance": Command(
            "train.acceptance:TrainAcceptanceConfig", "Acceptance head: when to stop drafting", runner="train.run"
        ),
        **of_drafters("train", "train.config:drafter_config", "train.run"),
        **of_drafters(
            "plan",
            "train.planning.settings:plan_config",
            "train.planning.plan",
            "What `train {kind}` takes: memory, disk, time",
        ),
        "plan acceptance": Command(
            "train.planning.settings:PlanAcceptanceConfig",
            "The same for `train acceptance`",
            runner="train.planning.plan",
        ),
    },
    "Run data and train commands on many devices": {
        "launch torchrun": Command(
            "launch.torchrun:TorchrunConfig", "Processes on this machine, or one group per machine", ("command",)
        ),
        "launch slurm": Command("launch.slurm:SlurmConfig", "A SLURM job: submitted, followed, requeued", ("command",)),
        "launch deepspeed": Command(
            "launch.deepspeed:DeepspeedConfig", "Machines of a hostfile, through ssh", ("command",)
        ),
    },
    "Use heads elsewhere, and others' here": {
        "export": Command("data.export.export:ExportConfig", "A head as another system loads it, checked"),
        "check": Command(
            "eval.engines.settings:EngineCheckConfig",
            "What another system makes of a directory",
            ("directory",),
            "eval.engines.gate",
        ),
        "import": Command("data.export.import_head:ImportConfig", "A public head as one of ours", ("directory",)),
    },
    "Measure": {
        "diagnose": Command("eval.diagnose:DiagnoseConfig", "Why a drafter drafts badly, and the remedy", ("draft",)),
        "eval bench": Command(
            "eval.bench.command:BenchConfig", "Compare methods: speed, tau, equality with the target"
        ),
        "eval schedule": Command(
            "eval.schedule:ScheduleConfig", "How many tokens servers should draft, by load", ("run",)
        ),
        "eval compare": Command(
            "eval.bench.compare:CompareConfig", "Two runs of the bench, prompt by prompt", ("runs",)
        ),
        "eval tune": Command("eval.tuning.tune:TuneConfig", "The fastest method and settings here, as decode.yaml"),
        "eval tree": Command("eval.tuning.tree:TreeConfig", "The static draft tree that suits a head, as YAML"),
        "eval report": Command("eval.report.command:ReportConfig", "Finished runs as one HTML page", ("runs",)),
        "eval lossless": Command(
            "eval.lossless.command:LosslessConfig", "Certify that methods leave the output as it is"
        ),
    },
    "The papers' experiments": {
        "eval specdecpp": Command(
            "eval.studies.specdecpp.study:SpecDecPPConfig",
            "SpecDec++'s experiments, heads trained for them",
            runner="launch.specdecpp",
        ),
        "eval eagle2": Command(
            "eval.studies.eagle2.study:Eagle2Config", "EAGLE-2's experiments: what a draft tree is worth"
        ),
        "eval hsddw": Command(
            "eval.studies.hsddw.study:HsddwConfig", "HSDDW's experiments: three models, windows by entropy"
        ),
        "eval calibration": Command(
            "eval.studies.calibration.study:CalibrationConfig", "Are acceptance probabilities right, and better than q?"
        ),
        "eval policies": Command(
            "eval.studies.policies.study:PoliciesConfig", "Acceptance heads against every stop policy"
        ),
    },
    "Your shell and machine": {
        "doctor": Command("launch.doctor:DoctorConfig", "What is installed here and what of it can be used"),
        "completion": Command(
            "launch.completion:CompletionConfig", "What completes these commands in bash, zsh or fish", ("shell",)
        ),
    },
}
COMMANDS = {name: command for section in SECTIONS.values() for name, command in section.items()}


def leading_words(args: Sequence[str]) -> list[str]:
    return [arg for arg in args[:2] if not arg.startswith("-")]


def command_name(args: Sequence[str]) -> str | None:
    """The command at the beginning of `args`: two words, or one."""
    words = leading_words(args)
    return next((name for name in (" ".join(words), "".join(words[:1])) if name in COMMANDS), None)


def unknown_command(args: Sequence[str]) -> UsageError:
    """The error that names the nearest commands."""
    words = leading_words(args)
    typed = " ".join(words) or args[0]
    known = [name for name in COMMANDS if words and name.split()[0] == words[0]] or list(COMMANDS)
    return UsageError(
        f"found command {typed!r}, expected one of: {', '.join(known)}.{did_you_mean(typed, known)} "
        "Run `draftsmith --help`."
    )


def configure(name: str, args: Sequence[str]) -> tuple[Callable[[Any], Any], Any | None]:
    """What runs the command, and the settings that `args` describe; None when help was printed instead."""
    from draftsmith.launch.arguments import parse

    command = COMMANDS[name]
    return command.run, parse(f"draftsmith {name}", command.config_class(), args, command.positional)
