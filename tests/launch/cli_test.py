"""The command line: exit codes, one-line errors, lazy imports, and settings that survive a round trip."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
import yaml

import draftsmith
from draftsmith.eval.settings import AnyFormat, DecodeConfig, WrittenFormat
from draftsmith.launch import cli
from draftsmith.launch.arguments import CommandApp, from_values, parse
from draftsmith.launch.commands import COMMANDS, Command, configure
from draftsmith.modules.drafters.method_names import parse_method
from draftsmith.modules.formats import formats
from draftsmith.modules.types import InputError
from draftsmith.train.config import TrainDrafterConfig

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "lightning", "datasets", "deepspeed", "wandb", "pyarrow", "numpy", "safetensors")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shared:
    """Shared settings.

    Attributes:
        maybe: none or text.
        pair: two numbers.
    """

    maybe: str | None = None
    pair: tuple[float, float] = (0.5, 1.0)


@dataclasses.dataclass(frozen=True)
class ProbeConfig(Shared):
    """A command for these tests.

    Attributes:
        name: who.
        count: how many,
            on two lines.
        ignore_case: a flag.
        files: several.
        where: a path.
        scale: a number.
    """

    name: str
    count: int = 3
    ignore_case: bool = False
    files: tuple[str, ...] = ()
    where: Path = Path("runs/probe")
    scale: float = 1.0


@pytest.fixture
def probe(monkeypatch) -> ModuleType:
    """A command `probe` whose `run` a test may set; it records its configuration."""
    module: Any = ModuleType("draftsmith.probe")
    module.ProbeConfig, module.seen = ProbeConfig, []
    module.run = module.seen.append
    monkeypatch.setitem(sys.modules, "draftsmith.probe", module)
    monkeypatch.setitem(COMMANDS, "probe", Command("probe:ProbeConfig", "probe", "Probe", ("name", "files")))
    return module


def words(*args: str) -> Any:
    return parse("draftsmith probe", ProbeConfig, args, ("name", "files"))


def error_line(capsys) -> str:
    """The one line that an error may print; its shape is checked here."""
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("draftsmith: error: ") and captured.err.endswith("\n")
    assert captured.err.count("\n") == 1, captured.err
    return captured.err.removeprefix("draftsmith: error: ")


@pytest.mark.parametrize("start", ["~", "$HOME", "${HOME}"])
def test_the_home_directory_is_meant_in_a_file_and_in_python(tmp_path, monkeypatch, start):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "x.yaml").write_text(f"where: {start}/runs\nfiles: ['{start}/a', 'b{start}/c']\n")
    read = words("--name", "x", "--config", str(tmp_path / "x.yaml"))
    python = from_values("draftsmith probe", ProbeConfig, {"name": f"{start}x", "where": Path(f"{start}/runs")})
    assert read.where == python.where == tmp_path / "home" / "runs"
    assert read.files == (f"{tmp_path}/home/a", f"b{start}/c") and python.name == f"{start}x"
    assert from_values("draftsmith decode", DecodeConfig, {"prompt": f"{start}/x is"}).prompt == f"{start}/x is"


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--name", "x", "--cuont", "4"], ["--cuont", "--count"]),
        (["--name", "x", "--count", "four"], ["--count", '"four"', "int"]),
        (["--count", "4"], ["--name"]),
        (["--name", "x", "--config", "absent.yaml"], ["absent.yaml", "no such file"]),
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
        ("count: [1", ["line 1"]),
        ("a: &a [x, x, x, x, x, x, x, x, x]\n"
         + "".join(f"{b}: &{b} [{', '.join(9 * [f'*{a}'])}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
         ["settings.yaml", "at most 10,000 values"]),
        ("layers: &l [*l]", ["settings.yaml", "values without end"]),
        ("layers: &l {a: *l}", ["settings.yaml", "values without end"]),
        ("layers: " + "[" * 100_000, ["settings.yaml", "values without end"]),
        ("name: !!binary aGk=", ["settings.yaml, line 1", "binary"]),
        ("name: !!set {a}", ["settings.yaml, line 1", "set"]),
        ("count: !!int x", ["settings.yaml, line 1", "int"]),
        ("count: !!bool x", ["settings.yaml"]),
        ("count: many", ["settings.yaml", "[count]", '"many"', "int"]),
    ],
)  # fmt: skip
def test_a_wrong_config_file_ends_with_code_2_and_one_line(probe, capsys, tmp_path, content, expected):
    file = tmp_path / "settings.yaml"
    file.write_text(content)
    assert cli.main(["probe", "--name", "x", "--config", str(file)]) == 2
    line = error_line(capsys)
    assert all(part in line for part in expected), line


def test_debug_adds_the_traceback(probe, capsys):
    probe.run = lambda config: open("/nonexistent/rows.jsonl")  # noqa: SIM115
    assert cli.main(["probe", "x", "--debug"]) == 2
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err and err.splitlines()[-1].startswith("draftsmith: error: ")


def test_a_defect_keeps_its_traceback_and_code_1():
    code = (
        "import sys, types, dataclasses\n"
        "from draftsmith.launch import cli, commands\n"
        "module = types.ModuleType('draftsmith.probe')\n"
        "@dataclasses.dataclass(frozen=True)\n"
        "class C:\n    a: int = 1\n"
        "def run(config): raise KeyError('a defect')\n"
        "module.C, module.run = C, run\n"
        "sys.modules['draftsmith.probe'] = module\n"
        "commands.COMMANDS['probe'] = commands.Command('probe:C', 'probe', 'Probe')\n"
        "sys.exit(cli.main(['probe']))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "Traceback" in result.stderr and "KeyError: 'a defect'" in result.stderr


@pytest.mark.parametrize("words", [["eval", "bench"], ["data", "prompts"], ["export"]])
def test_an_interrupt_says_whether_the_same_command_continues(words, capsys):
    def interrupt(args: list[str]) -> int:
        raise KeyboardInterrupt

    assert cli.guarded(interrupt, [*words, "--output", "x"]) == 130
    again = "" if words == ["export"] else ". The same command continues."
    assert capsys.readouterr().err == f"draftsmith: interrupted{again}\n"


def test_flags_lists_and_negative_numbers():
    assert words("x", "--ignore-case").ignore_case is True
    assert words("x", "--ignore_case", "--count", "-4") == ProbeConfig("x", -4, True)
    assert words("x", "--no-ignore-case").ignore_case is False
    assert words("x", "--ignore-case", "false").ignore_case is False
    assert words("x", "--files", "a", "b", "--files=c").files == ("a", "b", "c")
    assert words("x", "--files", "a,b").files == ("a", "b")
    assert words("x", "--files", '["a,b", "c"]').files == ("a,b", "c")
    assert words("x", "--files", "[]").files == ()
    assert words("x", "--pair", "1", "2").pair == words("x", "--pair=1,2").pair == (1.0, 2.0)
    assert words("x", "a", "b").files == ("a", "b")  # the last positional takes the rest
    assert words("x", "--maybe", "null").maybe is None
    assert words("x", "--count", "4", "--count", "5").count == 5
    assert words("--", "--not-an-option").name == "--not-an-option"


@pytest.mark.parametrize("text", ["null", "a: b", "[1, 2", "two\nlines"])
def test_text_that_looks_like_yaml_stays_text_through_a_round_trip(tmp_path, capsys, text):
    assert words(text).name == text
    assert words(text, "--print-config") is None
    file = tmp_path / "printed.yaml"
    file.write_text(capsys.readouterr().out)
    assert words("--config", str(file)).name == text


@pytest.mark.parametrize(
    "text", ["24:00:00", "1:30.5", "off", "no", "Yes", "2026-11-27", "010", "0x1f", "1_000", "0.10", "null x", "~x"]
)
def test_a_word_in_a_file_is_what_the_same_word_is_on_the_command_line(tmp_path, text):
    """YAML 1.1 reads 86400, 90.5, False, False, True, a date, 8, 31 and 1000."""
    file = tmp_path / "settings.yaml"
    file.write_text(f"name: {text}\nfiles: [{text}, b]\n")
    assert words("--config", str(file)) == words(text, "--files", f"[{text}, b]") == words(text, "--files", text, "b")


@pytest.mark.parametrize("text", ["true", "false", "yes", "no", "on", "off"])
def test_a_flag_in_a_file_is_what_it_is_on_the_command_line(tmp_path, text):
    file = tmp_path / "settings.yaml"
    file.write_text(f"name: x\nignore_case: {text}\n")
    assert words("--config", str(file)) == words("x", "--ignore-case", text)
    assert words("x", "--ignore-case", text).ignore_case == (text in ("true", "yes", "on"))


def test_print_config_gives_back_every_setting_and_words_win_over_the_file(tmp_path, capsys):
    line = "x --count 9 --ignore-case --files a b --where out --scale 0.5"
    args = line.split()
    direct = words(*args)
    assert words(*args, "--print_config") is None
    file = tmp_path / "printed.yaml"
    file.write_text(capsys.readouterr().out)
    assert set(yaml.safe_load(file.read_text())) == {field.name for field in dataclasses.fields(ProbeConfig)}
    assert words("--config", str(file)) == direct
    assert words("--config", str(file), "--count", "1") == dataclasses.replace(direct, count=1)
    later = tmp_path / "later.yaml"
    later.write_text("count: 2\nmaybe: null\npair: [1e-3, 2]\n")
    expected = dataclasses.replace(direct, count=2, pair=(0.001, 2.0))
    assert words("--config", str(file), "--config", str(later)) == expected


def test_a_shipped_config_is_found_by_its_name(capsys):
    assert cli.main(["eval", "bench", "--config", "bench", "--limit", "7", "--print-config"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert (printed["target"], printed["limit"]) == ("embedded:target", 7)
    assert cli.main(["eval", "bench", "--config", "bnech"]) == 2
    assert "a shipped one (bench)" in error_line(capsys)


# The drafters of papers_drafters.py are not in a process of its own.
HELPS = ["", "eval", *(name for name in COMMANDS if name not in ("train medusa", "train hydra"))]
# Each in a process forked from one that has imported the command line alone.
ASK_FOR_HELP = f"""
import contextlib, io, json, os, sys
from draftsmith.launch.cli import main
for command in {HELPS!r}:
    if not os.fork():
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            code = main([*command.split(), "--help"])
        loaded = [name for name in {HEAVY!r} if name in sys.modules]
        os.write(1, json.dumps([command, code, loaded, shown.getvalue()]).encode() + b"\\n")
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def helps() -> dict[str, list[Any]]:
    """Exit code, loaded modules and text of the help of every command."""
    environment = {**os.environ, "COLUMNS": "80"}
    done = subprocess.run([sys.executable, "-c", ASK_FOR_HELP], capture_output=True, text=True, env=environment)
    return {command: found for command, *found in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("command", HELPS)
def test_no_help_loads_anything_heavy(helps, command):
    code, loaded, shown = helps[command]
    assert (code, loaded) == (0, [])
    assert shown and all(len(line) <= 80 for line in shown.splitlines())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_setting_of_every_command_is_explained(name, capsys):
    command = COMMANDS[name]
    config_class = command.config_class()
    assert callable(command.function())
    assert dataclasses.is_dataclass(config_class) and config_class.__dataclass_params__.frozen
    options = CommandApp(name, config_class).assemble_argument_collection(parse_docstring=True)
    meanings = {option.keys[0]: option.parameter.help for option in options if option.keys}
    fields = [field for field in dataclasses.fields(config_class) if field.init]
    assert [field.name for field in fields if not meanings.get(field.name)] == []
    assert cli.main([*name.split(), "--help-all"]) == 0
    shown = capsys.readouterr().out
    said = "".join(shown.replace("│", " ").split())
    for field in fields:
        assert f"--{field.name.replace('_', '-')}" in shown
        assert [word for word in meanings[field.name].split() if word not in said] == []


@pytest.mark.parametrize("name", [name for name in COMMANDS if name.split()[0] in ("data", "train", "eval")])
def test_help_lists_the_files_of_settings_that_ship_for_a_command(name, capsys):
    """A file is named after its command, with words around it; those of recipes after the model too."""
    group, command = name.split()
    folders = ("train", "recipes") if group == "train" else (group,)
    files = [file.stem for folder in folders for file in (ROOT / "configs" / folder).glob("*.yaml")]
    assert cli.main([*name.split(), "--help"]) == 0
    shown = "".join(capsys.readouterr().out.replace("│", " ").split())
    own = sorted(stem for stem in files if f"-{command}-" in f"-{stem}-")
    assert f"shippedone({','.join(own)})" in shown if own else "shippedone" not in shown


def test_formats_of_heads_on_the_command_line_are_those_that_exist():
    assert set(get_args(WrittenFormat)) == {row.name for row in formats().values() if row.writes}
    assert set(get_args(AnyFormat)) == {"auto", *(row.name for row in formats().values())}


def test_every_method_that_help_and_documents_name_is_one():
    """Labels such as spec:k=5; settings in capitals stand for a value."""
    texts = [command.config_class().__doc__ or "" for command in COMMANDS.values()]
    texts += [path.read_text() for folder in ("docs", "benchmarks") for path in (ROOT / folder).rglob("*.md")]
    label = re.compile(r"(?<![\w/:.=-])[a-z][\w+-]*(?:@\w+)?(?::\w+=[\w.-]+)+")
    labels = {found for text in texts for found in label.findall(text) if not re.search(r"=[A-Z]", found)}
    assert len(labels) > 30
    wrong = {}
    # The form itself, and a policy of the reader's own.
    for found in sorted(labels - {"name:setting=value", "streak:low=2:high=8", "streak:low=2"}):
        try:
            parse_method(found.rstrip("."))
        except InputError as error:
            wrong[found] = str(error)
    assert wrong == {}


def test_help_leaves_rarely_needed_settings_to_help_all_and_shared_ones_to_the_group(capsys):
    def shown(*words: str) -> str:
        assert cli.main(list(words)) == 0
        return capsys.readouterr().out

    short, whole, group = shown("train", "eagle3", "--help"), shown("train", "eagle3", "--help-all"), shown("train")
    for name, shorts, groups in (("ttt-step-decay", False, False), ("betas", False, False), ("batch-size", False, True),
                                 ("draft-vocab", True, False), ("data", True, True), ("lr", True, True)):  # fmt: skip
        option = re.compile(rf"--{name}\b")
        found = [bool(option.search(text)) for text in (short, whole, group)]
        assert found == [shorts, True, groups], name
    titles = ["Required", "Data", "Acceptance length", "Optimization", "Hardware", "Target", "Validation", "Always"]
    assert sorted(titles, key=group.index) == titles and re.search(r"list \d+ further options too", short)
    assert "draftsmith train --help explains" in short


def test_options_and_their_names_stay_few():
    """What help lists: of trainings the shared options once. More need a reason; remove another first.

    Medusa and Hydra are registered by these tests.
    """
    options = {name: {field.name for field in dataclasses.fields(command.config_class())}
               for name, command in COMMANDS.items() if name not in ("train hydra", "train medusa")}  # fmt: skip
    shared = {field.name for field in dataclasses.fields(TrainDrafterConfig)}
    own = [names - shared if name.startswith("train ") else names for name, names in options.items()]
    assert len(shared) + sum(map(len, own)) <= 382
    assert len(set().union(*options.values())) <= 166


def test_pydantic_does_not_check_the_options_of_a_command_once_more():
    """cyclopts does, where another library has imported pydantic, and refuses None in place of no options."""
    pytest.importorskip("pydantic")
    assert configure("doctor", [])[1] is not None and configure("launch torchrun", [])[1] is not None


def test_a_reader_that_goes_away_ends_the_output_quietly():
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "draftsmith", "--version"]
    try:
        result = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(write)
    assert (result.returncode, result.stderr) == (1, "")


def test_a_script_of_one_command_has_the_same_help_settings_and_errors(capsys):
    seen: list[ProbeConfig] = []
    assert cli.main_of(ProbeConfig, seen.append, ["--name", "x", "--count=4"]) == 0
    assert seen == [ProbeConfig("x", 4)]
    assert cli.main_of(ProbeConfig, seen.append, ["--name", "x", "--cuont", "4"]) == 2
    assert "--cuont" in error_line(capsys) and len(seen) == 1
    assert cli.main_of(ProbeConfig, seen.append, ["--help"]) == 0 and len(seen) == 1


def test_openmp_threads_soon_sleep():
    """OpenMP itself shows what it read when torch loaded it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    environment |= {"OMP_DISPLAY_ENV": "verbose"}
    shown = subprocess.run(
        [sys.executable, "-m", "draftsmith", "doctor"], env=environment, capture_output=True, text=True, check=True
    ).stderr
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in shown and "GOMP_SPINCOUNT = '5000'" in shown


@pytest.mark.parametrize(("values", "words"), [({"dta": "x"}, "dta"), ({"data": "nope"}, "found no --target")])
def test_wrong_options_from_python_are_an_input_error(values, words):
    with pytest.raises(draftsmith.InputError, match=words):
        draftsmith.run("train eagle3", output="unused", **values)
