"""The command line: exit codes, one-line errors, lazy imports, and settings that survive a round trip."""

from __future__ import annotations

import dataclasses
import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from draftsmith.launch import cli, help
from draftsmith.launch.arguments import parse

HEAVY = ("torch", "transformers", "lightning", "datasets", "deepspeed", "wandb", "pyarrow", "numpy", "safetensors")


@dataclasses.dataclass(frozen=True)
class Inner:
    """Inner.

    depth: how deep.
    """

    depth: int = 1


@dataclasses.dataclass(frozen=True)
class ProbeConfig:
    """A command for these tests.

    name: who.
    count: how many,
        on two lines.
    ignore_case: a flag.
    files: several.
    inner: nested.
    where: a path.
    scale: a number.
    maybe: none or text.
    """

    name: str
    count: int = 3
    ignore_case: bool = False
    files: tuple[str, ...] = ()
    inner: Inner = dataclasses.field(default_factory=Inner)
    where: Path = Path("runs/probe")
    scale: float = 1.0
    maybe: str | None = None


@pytest.fixture
def probe(monkeypatch) -> ModuleType:
    """A command `probe` whose `run` a test may set; it records its configuration."""
    module: Any = ModuleType("draftsmith.probe")
    module.ProbeConfig, module.seen = ProbeConfig, []
    module.run = module.seen.append
    monkeypatch.setitem(sys.modules, "draftsmith.probe", module)
    monkeypatch.setitem(cli.COMMANDS, "probe", cli.Command("probe", "ProbeConfig", "Probe", ("name", "files")))
    return module


def words(*args: str) -> Any:
    return parse("draftsmith probe", ProbeConfig, args, ("name", "files"), "Probe")


def error_line(capsys) -> str:
    """The one line that an error may print; its shape is checked here."""
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("draftsmith: error: ") and captured.err.endswith("\n")
    assert captured.err.count("\n") == 1, captured.err
    return captured.err.removeprefix("draftsmith: error: ")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--name", "x", "--cuont", "4"], ["--cuont", "--count"]),
        (["--name", "x", "--count", "four"], ["--count", "'four'", "an integer"]),
        (["--name", "x", "--scale", "big"], ["--scale", "'big'", "a number"]),
        (["--name", "x", "--inner.depth", "deep"], ["--inner.depth", "'deep'", "an integer"]),
        (["--count", "4"], ["--name"]),
        (["--name"], ["--name", "expected a value"]),
        (["--name", "x", "--config", "absent.yaml"], ["absent.yaml", "no such file"]),
        (["--name", "x", "--config", "."], ["a directory", "a YAML file"]),
    ],
)
def test_a_wrong_word_ends_with_code_2_and_one_line(probe, capsys, args, expected):
    assert cli.main(["probe", *args]) == 2
    line = error_line(capsys)
    assert all(part in line for part in expected), line
    assert probe.seen == []


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("cuont: 4", ["unknown key cuont", "count"]),
        ("inner: {deptth: 4}", ["unknown key inner.deptth", "depth"]),
        ("count: [1", ["line 1"]),
        ("- a\n- b", ["list", "key: value"]),
        ("count: many", ["--count", "'many'", "an integer"]),
    ],
)
def test_a_wrong_config_file_ends_with_code_2_and_one_line(probe, capsys, tmp_path, content, expected):
    file = tmp_path / "settings.yaml"
    file.write_text(content)
    assert cli.main(["probe", "--name", "x", "--config", str(file)]) == 2
    line = error_line(capsys)
    assert all(part in line for part in expected), line


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["trian", "eagle"], ["'trian eagle'", "Did you mean train eagle?"]),
        (["eval", "bnech"], ["'eval bnech'", "Did you mean eval bench?"]),
        (["--hlep"], ["--hlep"]),
    ],
)
def test_an_unknown_command_is_named_with_the_nearest_one(capsys, args, expected):
    assert cli.main(args) == 2
    line = error_line(capsys)
    assert all(part in line for part in expected), line


def test_a_missing_path_inside_a_command_is_the_users_error(probe, capsys):
    probe.run = lambda config: open("/nonexistent/rows.jsonl")  # noqa: SIM115
    assert cli.main(["probe", "x"]) == 2
    assert "/nonexistent/rows.jsonl: no such file" in error_line(capsys)


def test_an_input_error_is_one_line_even_when_its_parts_are_not(probe, capsys):
    from draftsmith.modules.types import InputError

    def run(config):
        raise InputError("prompts", "a\nb", "one line", "Join them.")

    probe.run = run
    assert cli.main(["probe", "x"]) == 2
    assert error_line(capsys) == "prompts: found a b, expected one line. Join them.\n"


def test_debug_adds_the_traceback(probe, capsys):
    probe.run = lambda config: open("/nonexistent/rows.jsonl")  # noqa: SIM115
    assert cli.main(["probe", "x", "--debug"]) == 2
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err and err.splitlines()[-1].startswith("draftsmith: error: ")


def test_a_defect_keeps_its_traceback_and_code_1():
    code = (
        "import sys, types, dataclasses\n"
        "from draftsmith.launch import cli\n"
        "module = types.ModuleType('draftsmith.probe')\n"
        "@dataclasses.dataclass(frozen=True)\n"
        "class C:\n    a: int = 1\n"
        "def run(config): raise KeyError('a defect')\n"
        "module.C, module.run = C, run\n"
        "sys.modules['draftsmith.probe'] = module\n"
        "cli.COMMANDS['probe'] = cli.Command('probe', 'C', 'Probe')\n"
        "sys.exit(cli.main(['probe']))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "Traceback" in result.stderr and "KeyError: 'a defect'" in result.stderr


def test_an_interrupt_ends_with_130_and_no_traceback(probe, capsys):
    def run(config):
        raise KeyboardInterrupt

    probe.run = run
    assert cli.main(["probe", "x"]) == 130
    assert capsys.readouterr().err == "draftsmith: interrupted\n"


@pytest.mark.parametrize(
    "args", [("--name", "x", "--count", "5"), ("--name=x", "--count=5"), ("x", "--count", "5"), ("--count", "5", "x")]
)
def test_a_setting_can_be_written_in_several_ways(args):
    assert words(*args) == ProbeConfig("x", 5)


def test_flags_lists_negative_numbers_and_nested_settings():
    assert words("x", "--ignore-case").ignore_case is True
    assert words("x", "--ignore_case", "--count", "-4") == ProbeConfig("x", -4, True)
    assert words("x", "--no-ignore-case").ignore_case is False
    assert words("x", "--ignore-case", "false").ignore_case is False
    assert words("x", "--files", "a", "b", "--files=c").files == ("a", "b", "c")
    assert words("x", "--files", "a,b").files == ("a", "b")
    assert words("x", "a", "b").files == ("a", "b")  # the last positional takes the rest
    assert words("x", "--inner.depth", "7").inner == Inner(7)
    assert words("--", "--not-an-option").name == "--not-an-option"


@pytest.mark.parametrize("text", ["null", "123", "a: b", "[1, 2", "- x", 'it\'s "quoted"', "{}", "two\nlines", "ü"])
def test_text_that_looks_like_yaml_stays_text_through_a_round_trip(tmp_path, capsys, text):
    assert words(text).name == text
    assert words(text, "--print-config") is None
    file = tmp_path / "printed.yaml"
    file.write_text(capsys.readouterr().out)
    assert words("--config", str(file)).name == text


def test_print_config_gives_back_every_setting_and_words_win_over_the_file(tmp_path, capsys):
    line = "x --count 9 --ignore-case --files a b --inner.depth 4 --where out --scale 0.5"
    args = line.split()
    direct = words(*args)
    assert words(*args, "--print_config") is None
    file = tmp_path / "printed.yaml"
    file.write_text(capsys.readouterr().out)
    assert set(yaml.safe_load(file.read_text())) == {field.name for field in dataclasses.fields(ProbeConfig)}
    assert words("--config", str(file)) == direct
    assert words("--config", str(file), "--count", "1") == dataclasses.replace(direct, count=1)


def test_a_shipped_config_is_found_by_its_name(capsys):
    assert cli.main(["eval", "bench", "--config", "bench", "--limit", "7", "--print-config"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert (printed["target"], printed["limit"]) == ("embedded:target", 7)
    assert cli.main(["eval", "bench", "--config", "bnech"]) == 2
    assert "a shipped one (bench, bench-gpu" in error_line(capsys)


@pytest.mark.parametrize("recipe", ["llama-3.1-8b-eagle", "qwen3-8b-eagle"])
@pytest.mark.parametrize("group", ["train", "plan"])
def test_recipes_of_real_models_are_found_by_their_names(group, recipe, capsys):
    assert cli.main([group, "eagle", "--config", recipe, "--print-config"]) == 0
    assert "target: " in capsys.readouterr().out


@pytest.mark.parametrize("args", [["--help"], [], ["data", "--help"], ["eval"], ["--version"]])
def test_overview_and_version_load_nothing_heavy(args):
    code = (
        f"import sys; from draftsmith.launch.cli import main; code = main({args!r}); "
        f"print([m for m in {HEAVY!r} if m in sys.modules]); sys.exit(code)"
    )
    environment = {**os.environ, "COLUMNS": "80"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    *shown, loaded = result.stdout.splitlines()
    assert (result.returncode, loaded) == (0, "[]"), result.stderr
    assert shown and all(len(line) <= 80 for line in shown)


def test_every_command_is_in_the_overview_once():
    listed = [name for names in cli.SECTIONS.values() for name in names]
    assert sorted(listed) == sorted(cli.COMMANDS)
    # Two columns of 80: indent 2, the longest name, a gap of 2.
    width = 80 - 4 - max(len(name) for name in cli.COMMANDS)
    assert all(len(command.help) <= width for command in cli.COMMANDS.values())


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_setting_of_every_command_is_explained(name, capsys):
    command = cli.COMMANDS[name]
    module = importlib.import_module(f"draftsmith.{command.module}")
    setting, _, kind = command.config.partition(":")
    config_class = getattr(module, setting)(kind) if kind else getattr(module, setting)
    assert callable(module.run)
    assert dataclasses.is_dataclass(config_class) and config_class.__dataclass_params__.frozen
    unexplained = [row[0] for row in help.settings(config_class) if not row[3]]
    assert unexplained == []
    assert cli.main([*name.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"--{row[0].replace('_', '-')}" in shown for row in help.settings(config_class))


def test_a_meaning_may_go_on_in_the_next_line():
    assert help.field_meanings(ProbeConfig)["count"] == "how many, on two lines."


def test_python_dash_m_is_the_same_command_line():
    command = [sys.executable, "-m", "draftsmith", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "") and result.stdout.startswith("draftsmith ")


def test_a_reader_that_goes_away_ends_the_output_quietly():
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "draftsmith", "--version"]
    try:
        result = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(write)
    assert (result.returncode, result.stderr) == (1, "")
