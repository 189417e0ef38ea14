"""`draftsmith run`: commands of a YAML file, one after the other, of which finished ones are skipped.

A pipeline names its variables and its stages. A stage is a command of Draftsmith (`run`) or another program (`program`,
started without a shell), in which {names} stand for variables. configs/pipelines holds those that ship;
docs/command-line.md describes the form.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from string import Formatter
from typing import Any, cast

from rich.text import Text

from draftsmith.launch.cli import dispatch
from draftsmith.launch.commands import command_name, configure, unknown_command
from draftsmith.launch.errors import did_you_mean
from draftsmith.modules.types import InputError

SHIPPED = Path(__file__).parents[1] / "configs" / "pipelines"
STAGES = "stages.json"  # finished commands, with their seconds
BEGUN = "begun"  # in it: the command that writes a new output
KEYS = {"about": str, "base": str, "output": str, "variables": dict, "measured": dict, "stages": list, "show": list}
STAGE_KEYS = {"title": str, "run": str, "program": str, "when": str, "otherwise": str, "minutes": list}


@dataclass(frozen=True)
class RunConfig:
    """Run a pipeline: commands of a YAML file, one after the other. What it takes on this machine is said first. The
    same command skips finished stages and continues an interrupted one.

    Attributes:
        pipeline: A YAML file, or a shipped one: demo (everything on the embedded models), demo-full, laptop (a head for
            SmolLM2-135M or your GGUF), refresh (train an old head on for a changed target).
        set: Variables of the file, as KEY=VALUE; --dry-run lists them.
        output: Directory of everything it makes. Default: the file's.
        dry_run: Print the variables, the commands, and what they take here, and stop.
    """

    pipeline: str
    set: tuple[str, ...] = ()
    output: Path | None = None
    dry_run: bool = False


@dataclass(frozen=True)
class Stage:
    """One command of a pipeline. minutes: expected on two idle cores of the machine that measured them; 0: unknown."""

    title: str
    argv: tuple[str, ...]  # behind `draftsmith`, or of another program
    is_program: bool = False
    minutes: float = 0.0

    @property
    def command(self) -> str:
        return shlex.join(self.argv if self.is_program else ("draftsmith", *self.argv))

    @property
    def output(self) -> Path | None:
        return Path(self.argv[self.argv.index("--output") + 1]) if "--output" in self.argv else None

    def is_done(self, finished: Mapping[str, Any], output: Path) -> bool:
        """Return whether the stage finished with this command, and what it wrote is still there."""
        return self.command in finished and (self.output or output).exists()


def run(config: RunConfig) -> Path:
    """Run the stages that are missing, then print the tables that the pipeline shows.

    Raises:
        InputError: no such pipeline, or one of its variables or stages is wrong.
        SystemExit: a stage failed, with its exit code.
    """
    from draftsmith.data.console import log_note, print_table, print_text
    from draftsmith.data.store.writer import writing_alone
    from draftsmith.eval.bench.tables import results_tables
    from draftsmith.launch.machine import forecast
    from draftsmith.modules.pretrained.reading import read_object

    plan = read_pipeline(config.pipeline)
    output = config.output or Path(plan["output"])
    values = variables(plan, config.set, output)
    stages = make_stages(plan, values)
    for stage in stages:
        check_stage(stage)
    if config.dry_run:
        for name in plan["variables"]:
            print_text(f"{name} = {values[name]}")
        for stage in stages:
            print_text(Text.assemble("\n", (stage.title, "bold"), "\n", stage.command))
    missing = sum(stage.minutes for stage in stages if not stage.is_done(read_finished(output), output))
    pace = forecast(plan["measured"], missing, int(values.get("num_threads", 2))) if missing else 1.0
    if config.dry_run:
        return output

    with writing_alone(output):
        started = time.monotonic()
        run_stages(plan, values, output, pace)
        for name in plan["show"]:
            print_table(results_tables(read_object(output / name / "results.json", {}))[0], bold="fastest")
        minutes = (time.monotonic() - started) / 60
        log_note(f"{minutes:.1f} minutes in this run; a second run skips what is finished")
    print_text(f"Written to {output}")
    return output


def run_stages(plan: Mapping[str, Any], values: Mapping[str, Any], output: Path, pace: float) -> None:
    """Run the stages that are missing, and say before each one how long it and all that is left should take.

    pace: this machine's minutes for an expected one, until the stages of this run tell.
    """
    from draftsmith.data.console import log_note
    from draftsmith.modules.pretrained.files import write_json

    expected = spent = 0.0
    for number in range(len(make_stages(plan, values))):
        # Made again: a variable may stand for results of the stages before.
        stages, finished = make_stages(plan, values), read_finished(output)
        stage, begun = stages[number], finished.pop(BEGUN, None)
        left = sum(later.minutes for later in stages[number:] if not later.is_done(finished, output))
        pace = spent / expected if expected >= 1 else pace  # a few seconds say nothing about the machine
        remaining = f" ({number + 1} of {len(stages)}"
        if stage.minutes:
            now, rest = max(1.0, stage.minutes * pace), max(1.0, left * pace)
            remaining += f"; about {now:.0f} min, all that is left {rest:.0f} min"
        if done := stage.is_done(finished, output):
            remaining = " (done before"
        log_note(Text.assemble("\n", (stage.title, "bold"), (remaining + ")", "dim")))
        log_note(Text(f"  {stage.command}", "cyan"))
        if done:
            continue
        resumed, started = stage.output is not None and stage.output.exists(), time.monotonic()
        if not resumed:
            write_json(output / STAGES, finished | {BEGUN: stage.command})
        elif begun == stage.command and stage.argv[0] in ("export", "import"):
            # They refuse an output that exists: this one is of a run that ended before it was recorded or uploaded.
            shutil.rmtree(cast(Path, stage.output))
        try:
            if code := execute(stage):  # the command has printed why
                raise SystemExit(code)
        except SystemExit:
            log_note(f"Stopped at {stage.title}: the same `draftsmith run` continues from there.")
            raise
        seconds = time.monotonic() - started
        write_json(output / STAGES, finished | {stage.command: round(seconds, 1)})
        log_note(Text(f"  {seconds:.0f} s", "dim"))
        if not resumed:
            expected, spent = expected + stage.minutes, spent + seconds / 60
    for stage in plan["stages"]:
        if "otherwise" in stage and not holds(stage["when"], values):
            log_note(fill(stage["otherwise"], values))


def execute(stage: Stage) -> int:
    """Run a stage and return its exit code: in this process, but for other programs and what a launcher starts."""
    if stage.is_program:
        return subprocess.run(stage.argv, check=False).returncode
    if stage.argv[0] == "launch":  # it replaces its process
        return subprocess.run([sys.executable, "-m", "draftsmith", *stage.argv], check=False).returncode
    return dispatch(list(stage.argv))


def read_pipeline(name: str, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a pipeline by the path of its file, or a shipped one by its name; a `base` gives what the file leaves out.

    Raises:
        InputError: no such file, or one of another form.
    """
    from draftsmith.launch.yaml_files import read_yaml
    from draftsmith.modules.pretrained.reading import check_shape

    shipped = {path.stem: path for path in sorted(SHIPPED.glob("*.yaml"))}
    path = Path(name) if Path(name).is_file() else shipped.get(name)
    if path is None:
        expected = f"a YAML file, or one of {', '.join(shipped)}"
        raise InputError("pipeline", repr(name), expected, f"Correct it.{did_you_mean(name, shipped)}")
    if path in above:
        raise InputError(str(path), "a base of itself", "another file", "Correct the file.")
    plan = read_yaml(path)
    check_keys(str(path), plan, KEYS)
    if "base" in plan:
        base = read_pipeline(plan["base"], (*above, path))
        plan = {**base, **plan, "variables": base["variables"] | plan.get("variables", {})}
    plan = {"output": f"runs/{path.stem}", "variables": {}, "measured": {}, "show": []} | plan
    check_shape(path, plan, {"stages": list})
    for number, stage in enumerate(plan["stages"], 1):
        place = f"{path}, stage {number}"
        check_keys(place, stage, STAGE_KEYS)
        if "title" not in stage or ("run" in stage) == ("program" in stage):
            found = f"the keys {', '.join(stage)}"
            raise InputError(place, found, "title, and run or program", "Correct the file.")
    return plan


def check_keys(place: str, content: Any, keys: Mapping[str, type]) -> None:
    """Raise InputError if a mapping has unknown keys, or values of another type."""
    for key, value in content.items() if isinstance(content, dict) else [("", content)]:
        if key not in keys:
            raise InputError(place, f"the key {key!r}", f"some of {', '.join(keys)}", "Correct the file.")
        if not isinstance(value, keys[key]):
            raise InputError(f"{place}, {key}", repr(value), f"a {keys[key].__name__}", "Correct the file.")


class Computed:
    """A variable that is computed where it is used: `{name}`, or `{name:argument}`."""

    def __init__(self, function: Callable[..., str]) -> None:
        self.function = function

    def __format__(self, argument: str) -> str:
        return self.function(argument) if argument else self.function()


def variables(plan: Mapping[str, Any], given: Sequence[str], output: Path) -> dict[str, Any]:
    """Return the variables: the file's, those given as KEY=VALUE, and what every pipeline may ask of this machine.

    Raises:
        InputError: an unknown variable, one without a value, or words that are none.
    """
    from draftsmith.launch.machine import bfloat16_is_fast

    defaults, key = plan["variables"], ""
    chosen: dict[str, str] = {}
    for word in given:
        name, equals, value = word.partition("=")
        if not equals and key:  # behind a comma in the value of the last one
            chosen[key] += f",{word}"
        elif equals and name in defaults:
            key, chosen[name] = name, value
        else:
            known = f"KEY=VALUE with one of {', '.join(defaults) or 'no variables'}"
            raise InputError("set", repr(word), known, f"Correct it.{did_you_mean(name, defaults)}")
    values: dict[str, Any] = {
        "output": str(output),
        "python": sys.executable,
        "configs": str(SHIPPED.parent),
        "dtype": Computed(lambda: "bfloat16" if bfloat16_is_fast() else "float32"),
        "precision": Computed(lambda: "bf16" if bfloat16_is_fast() else "32"),
        "llama_server": Computed(has_llama_server),
        "package": Computed(lambda name: as_text(find_spec(name) is not None)),
        "kind": Computed(kind_of_head),
        "ships_mtp": Computed(with_mtp),
        "fastest": Computed(fastest_methods),
    }
    for name, default in defaults.items():
        values[name] = chosen[name] if name in chosen else fill(as_text(default), values)
        if values[name] == "":
            raise InputError("set", f"no {name}", "a value", f"Pass --set {name}=VALUE.")
    return values


def as_text(value: Any) -> str:
    """Write a YAML value as a command's word: items with commas, empty for null."""
    if isinstance(value, list):
        return ",".join(map(as_text, value))
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def fill(text: str, values: Mapping[str, Any]) -> str:
    """Replace the {names} in a text.

    Raises:
        InputError: an unknown name, or a brace that is none.
    """
    try:
        for _, name, form, _ in Formatter().parse(text):
            if form and fill(form, values) and not isinstance(values.get(name or ""), Computed):
                raise ValueError(f"{name} takes no {form!r}")
        return text.format_map(values)
    except InputError:  # of what a name is computed from
        raise
    except (KeyError, ValueError, IndexError, TypeError, AttributeError) as error:
        expected = f"names in braces ({', '.join(values)}), and {{{{ for a brace"
        raise InputError("stages", f"{text!r} ({error})", expected, "Correct the file.") from error


def holds(condition: str, values: Mapping[str, Any]) -> bool:
    """Return whether `A == B` or `A != B` is true."""
    sides = re.split(r" (==|!=) ", fill(condition, values))
    if len(sides) != 3:
        raise InputError("when", repr(condition), "A == B or A != B", "Correct the file.")
    return (sides[0] == sides[2]) == (sides[1] == "==")


def make_stages(plan: Mapping[str, Any], values: Mapping[str, Any]) -> list[Stage]:
    """Build the stages whose `when` is true. `minutes` are a constant and what 1,000 `prompts` add."""
    stages = []
    for stage in plan["stages"]:
        if holds(stage["when"], values) if "when" in stage else True:
            try:
                words = shlex.split(stage["program" if "program" in stage else "run"])
                constant, per_thousand = map(float, stage.get("minutes", (0, 0)))
                minutes = constant + per_thousand * float(values.get("prompts", 0)) / 1000
            except (ValueError, TypeError) as error:
                expected = "a command, and minutes and prompts as numbers"
                raise InputError(f"stage {stage['title']!r}", error, expected, "Correct the file.") from error
            argv = tuple(fill(word, values) for word in words)
            stages.append(Stage(stage["title"], argv, "program" in stage, minutes))
    return stages


def check_stage(stage: Stage) -> None:
    """Check that a stage is a command that would start.

    Raises:
        InputError: it is not.
    """
    if stage.is_program:
        if not stage.argv or shutil.which(stage.argv[0]) is None:
            raise InputError(stage.title, f"no program {stage.command!r}", "one on the PATH", "Correct the file.")
        return
    name = command_name(stage.argv)
    if name is None or name == "run":
        raise unknown_command(stage.argv)
    configure(name, stage.argv[len(name.split()) :])


def read_finished(output: Path) -> dict[str, Any]:
    from draftsmith.modules.pretrained.reading import read_object

    return read_object(output / STAGES, {}) if (output / STAGES).exists() else {}


def has_llama_server() -> str:
    from draftsmith.data.engines.llamacpp import server_binary

    try:
        server_binary()
    except InputError:
        return "false"
    return "true"


def kind_of_head(directory: str) -> str:
    """Return the kind of a trained head."""
    from draftsmith.modules.pretrained.heads import head_config

    kind: str = head_config(directory)["kind"]
    return kind


def with_mtp(target: str) -> str:
    """Return whether a target's files hold an MTP module."""
    from draftsmith.modules.pretrained.checkpoint import Checkpoint
    from draftsmith.modules.pretrained.stitch import ships_mtp

    return as_text(ships_mtp(Checkpoint(target)))


def fastest_methods(directory: str) -> str:
    """Return the fastest setting of each method of a bench, with commas; ar before it has run."""
    from draftsmith.modules.pretrained.reading import read_object

    path = Path(directory, "results.json")
    if not path.exists():
        return "ar"
    best: dict[str, Any] = {}
    for row in read_object(path, {"methods": [{"method": str, "tokens_per_s": float}]})["methods"]:
        name = row["method"].split(":")[0]
        if name != "ar" and (name not in best or row["tokens_per_s"] > best[name]["tokens_per_s"]):
            best[name] = row
    return ",".join(row["method"] for row in best.values())
