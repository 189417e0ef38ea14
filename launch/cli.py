"""The command line: `draftsmith <group> <command> [--config FILE] [--print-config] [--name value ...] [--debug]`.

A command is a frozen dataclass of settings and a function `run(config)` in one module, which is imported only when
the command is called: help and version load nothing heavy.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from draftsmith.launch.errors import UsageError, did_you_mean, name_model, user_message


@dataclass(frozen=True)
class Command:
    """Where a command lives.

    module: relative to the package; has `run(config)`.
    config: name of the module's dataclass of settings; or FUNCTION:KIND, of what gives it.
    help: one line for the overview.
    positional: settings that may also be given without their names, in this order.
    """

    module: str
    config: str
    help: str
    positional: tuple[str, ...] = ()


COMMANDS: dict[str, Command] = {
    "demo": Command("launch.demo", "DemoConfig", "Run the whole pipeline on the embedded models (8 minutes)"),
    "decode": Command("eval.decode", "DecodeConfig", "Answer a prompt and show which tokens were drafted", ("prompt",)),
    "data prompts": Command("data.prompts", "PromptsConfig", "Chat rows to prompts, with the loss mask"),
    "data responses": Command("data.responses", "ResponsesConfig", "The target answers the prompts"),
    "data acceptance": Command("data.acceptance", "AcceptanceConfig", "Label which drafted tokens the target keeps"),
    "data features": Command("data.features", "FeaturesConfig", "The target's hidden states, to train a draft head"),
    "data inspect": Command("data.inspect", "InspectConfig", "Look at rows, their mask in colour", ("artefact",)),
    "train acceptance": Command("train.run", "TrainAcceptanceConfig", "Acceptance head: when to stop drafting"),
    "train eagle": Command("train.run", "drafter_config:eagle", "EAGLE head: drafts from the target's own features"),
    "export": Command("data.exchange.export", "ExportConfig", "A head as another system loads it, checked"),
    "check": Command(
        "data.exchange.check", "CheckConfig", "What another system makes of a directory", ("directory",)
    ),
    "import": Command("data.exchange.import_head", "ImportConfig", "A public head as one of ours", ("directory",)),
    "plan eagle": Command("train.planning.plan", "PlanEagleConfig", "What `train eagle` will take: memory, disk, time"),
    "plan acceptance": Command("train.planning.plan", "PlanAcceptanceConfig", "The same for `train acceptance`"),
    "train throughput": Command("train.throughput", "ThroughputConfig", "What a training step costs, beside others"),
    "plan check": Command("train.planning.check", "PlanCheckConfig", "Plans of memory beside measured peaks"),
    "eval bench": Command("eval.bench.command", "BenchConfig", "Compare methods: speed, tau, equality with the target"),
    "eval compare": Command(
        "eval.bench.compare", "CompareConfig", "Two runs of the bench, prompt by prompt", ("runs",)
    ),
    "eval tune": Command("eval.tuning.tune", "TuneConfig", "The fastest method and settings here, as decode.yaml"),
    "eval report": Command("eval.report.command", "ReportConfig", "Finished runs as one HTML page", ("runs",)),
    "eval lossless": Command(
        "eval.lossless.command", "LosslessConfig", "Certify that methods leave the output as it is"
    ),
    "eval specdecpp": Command("launch.specdecpp", "SpecDecPPConfig", "SpecDec++'s experiments, heads trained for them"),
    "eval eagle2": Command(
        "eval.studies.eagle2.study", "Eagle2Config", "EAGLE-2's experiments: what a draft tree is worth"
    ),
    "eval hsddw": Command(
        "eval.studies.hsddw.study", "HsddwConfig", "HSDDW's experiments: three models, windows by entropy"
    ),
    "eval calibration": Command(
        "eval.studies.calibration.study", "CalibrationConfig", "Are acceptance probabilities right, and better than q?"
    ),
    "eval policies": Command(
        "eval.studies.policies.study", "PoliciesConfig", "Acceptance heads against every stop policy"
    ),
    "launch torchrun": Command(
        "launch.torchrun", "TorchrunConfig", "Processes on this machine, or one group per machine", ("command",)
    ),
    "launch slurm": Command("launch.slurm", "SlurmConfig", "A SLURM job: submitted, followed, requeued", ("command",)),
    "launch deepspeed": Command(
        "launch.deepspeed", "DeepspeedConfig", "Machines of a hostfile, through ssh", ("command",)
    ),
    "embedded build": Command("launch.embedded", "BuildConfig", "Train the shipped models again, from their corpus"),
}  # fmt: skip

# Sections of the overview, in the order in which a newcomer needs them.
SECTIONS: dict[str, tuple[str, ...]] = {
    "Start here": ("demo", "decode"),
    "Make training data with the target": ("data prompts", "data responses", "data acceptance", "data features",
                                           "data inspect"),
    "Train heads": ("train acceptance", "train eagle", "plan eagle", "plan acceptance"),
    "Run data and train commands on many devices": ("launch torchrun", "launch slurm", "launch deepspeed"),
    "Use heads elsewhere, and others' here": ("export", "check", "import"),
    "Measure": ("eval bench", "eval compare", "eval tune", "eval report", "eval lossless"),
    "The papers' experiments": ("eval specdecpp", "eval eagle2", "eval hsddw", "eval calibration", "eval policies"),
    "Measure Draftsmith itself": ("train throughput", "plan check"),
    "The shipped models": ("embedded build",),
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; the exit code is 0, 1 for a failed certificate, 2 for bad input and 130 when
    interrupted.

    Defects are not caught: their traceback is what a bug report needs, and Python exits with 1.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    before, after = (args[: args.index("--")], args[args.index("--") :]) if "--" in args else (args, [])
    debug = "--debug" in before
    args = [arg for arg in before if arg != "--debug"] + after
    try:
        code = recorded(dispatch)(args)
        sys.stdout.flush()  # here, where a closed pipe is caught, and not while Python shuts down
        return code or 0
    except KeyboardInterrupt:
        print("draftsmith: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of a pipe (`| head`) has gone: nobody is left to tell, and the final flush must not fail either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        message = user_message(error)
        if debug or message is None:
            if message is None:
                raise
            import traceback

            traceback.print_exc()
        print(f"draftsmith: error: {message}", file=sys.stderr)
        return 2


def recorded(run: Callable[[list[str]], int]) -> Callable[[list[str]], int | None]:
    """Under torchrun, what a rank fails with is written where torchrun's report looks for it."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return run
    from torch.distributed.elastic.multiprocessing.errors import record

    return record(run)


def dispatch(args: list[str]) -> int:
    """Find the command at the beginning of `args` and run it."""
    if args and args[0] in {"--version", "-V"}:
        print(f"draftsmith {version()}")
        return 0
    name = command_name(args)
    if name is not None:
        return run_command(name, args[len(name.split()) :])
    words = leading_words(args)
    groups = {command.split()[0] for command in COMMANDS}
    if (not words or words[0] in groups) and not unknown_rest(args, words):
        from draftsmith.launch.help import print_overview

        print_overview(version(), COMMANDS, SECTIONS, group=words[0] if words else None)
        return 0
    raise unknown_command(args)


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
    known = [c for c in COMMANDS if words and c.split()[0] == words[0]] or list(COMMANDS)
    return UsageError(
        f"found command {typed!r}, expected one of: {', '.join(known)}.{did_you_mean(typed, known)} "
        "Run `draftsmith --help`."
    )


def unknown_rest(args: list[str], words: list[str]) -> bool:
    """True when anything but a request for help follows the group's name."""
    return any(arg not in {"-h", "--help"} for arg in args[min(len(words), 1) :])


def run_command(name: str, args: list[str]) -> int:
    """Parse the settings of one command and run it. A command that judges returns its exit code, others a path."""
    # The libraries below report every load of a tiny model; their warnings are still shown.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    module, config = configure(name, args)
    if getattr(config, "trust_remote_code", False):
        from draftsmith.data.models.loading import trust_code

        trust_code()  # of tokenizers too, wherever they are loaded
    try:
        result = module.run(config) if config is not None else 0
    except Exception as error:
        name_model(error, config)
        raise
    return result if isinstance(result, int) else 0


def configure(name: str, args: list[str]) -> tuple[ModuleType, Any | None]:
    """The command's module and the settings that `args` describe; None when help was printed instead."""
    command = COMMANDS[name]
    if name.startswith("launch "):
        from draftsmith.launch.inner import check_dashes

        check_dashes(name, args)
    module = importlib.import_module(f"draftsmith.{command.module}")

    from draftsmith.launch.arguments import parse

    setting, _, kind = command.config.partition(":")
    config_class = getattr(module, setting)(kind) if kind else getattr(module, setting)
    return module, parse(f"draftsmith {name}", config_class, args, command.positional, command.help)


def version() -> str:
    from importlib.metadata import PackageNotFoundError

    import draftsmith

    try:
        return draftsmith.__version__
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "(not installed)"
