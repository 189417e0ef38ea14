"""The launchers: what they start is what was written, nothing else is run, and nothing starts that would fail at once.

Job scripts run in a real bash, with programs in the place of SLURM's that record how they were called. tests/cluster
has the real SLURM.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed.run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.run import get_args_parser

from draftsmith.launch import cli, slurm
from draftsmith.launch.commands import configure
from draftsmith.modules.drafters import learned
from draftsmith.modules.types import InputError
from draftsmith.train.config import TrainAcceptanceConfig, drafter_config

# What a shell, sbatch or an argument parser would take for something else.
NASTY = [
    "$(touch injected)",
    "`touch injected`",
    "; touch injected",
    "a b",
    'it\'s "x"',
    "a,b",
    "[1, 2]",
    "null",
    "007",
]
NASTY += ["--signal", "", "\\", "a\n#SBATCH --nodes=99\ntouch injected", "%j %n", "ü", "*", "~", "-- x", "x=$HOME"]
TRAIN = ["train", "eagle", "--config", "eagle-embedded", "--data", "d", "--target", "t", "--output", "o"]


@pytest.fixture
def started(monkeypatch) -> list[list[str]]:
    """Words that torchrun was called with."""
    calls: list[list[str]] = []
    monkeypatch.setattr(torch.distributed.run, "main", calls.append)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return calls


@pytest.mark.parametrize("launcher", ["torchrun", "slurm"])
def test_words_behind_the_dashes_are_left_alone(launcher):
    words = ["train", "eagle", "--config", "x", "--debug", "--", *NASTY]
    _, config = configure(f"launch {launcher}", ["--", *words])
    assert config.command == tuple(words)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["torchrun", "--nproc-per-node", "2", *TRAIN],
            ["`draftsmith launch torchrun --nproc-per-node 2 -- train eagle"],
        ),
        (["torchrun", "--", "train", "eagel"], ["'train eagel'", "Did you mean train eagle?"]),
        (["torchrun", "--", *TRAIN, "--epochs", "many"], ["--epochs", '"many"', "int"]),
        (["torchrun", "--", "launch", "torchrun", "--", *TRAIN], ["'launch torchrun'", "Launch once"]),
        (["torchrun", "--nproc-per-node", "0", "--", *TRAIN], ["nproc_per_node: found 0"]),
        (["torchrun", "--nnodes", "2", "--", *TRAIN], ["rdzv_endpoint", "HOST:PORT"]),
        (["slurm", "--gpus-per-node", "8", "--", "eval", "bench"], ["'eval bench' for several processes"]),
    ],
)
def test_what_would_not_start_is_one_line_and_nothing_is_started(started, capsys, words, expected):
    assert cli.main(["launch", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("draftsmith: error: ") and captured.err.count("\n") == 1
    assert all(part in captured.err for part in expected), captured.err
    assert started == []


def test_torchrun_reads_what_was_meant(started):
    """Its own parser decides."""
    assert cli.main(["launch", "torchrun", "--nproc-per-node", "8", "--", *TRAIN, "--debug"]) == 0
    read = get_args_parser().parse_args(started[0])
    assert (read.standalone, read.nproc_per_node, read.max_restarts) == (True, "8", 0)
    assert (read.module, read.training_script, read.training_script_args) == (True, "draftsmith", [*TRAIN, "--debug"])


@pytest.mark.parametrize("kind", ["acceptance", *sorted(learned())])
def test_no_option_of_a_training_abbreviates_one_of_torchruns(kind):
    """Its parser takes `--log` for `--log-dir` or `--logs-specs`, and stops, wherever the word stands."""
    theirs = get_args_parser()._option_string_actions
    config = TrainAcceptanceConfig if kind == "acceptance" else drafter_config(kind)
    ours = ["--" + field.name.replace("_", "-") for field in dataclasses.fields(config)]
    clashes = [(own, other) for own in ours for other in theirs if other.startswith(own) and other != own]
    assert len(ours) > 30 and clashes == []


def test_after_a_signal_torchrun_waits_and_its_code_is_a_shells(started, monkeypatch):
    def stopped(words: list[str]) -> None:
        raise SignalException("", signal.SIGINT)

    monkeypatch.setattr(torch.distributed.run, "main", stopped)
    assert cli.main(["launch", "torchrun", "--nproc-per-node", "2", "--", *TRAIN]) == 130
    assert int(os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) >= 600


def test_torchrun_on_several_machines_that_may_restart(started):
    words = ["--nnodes", "2", "--rdzv-endpoint", "first:29400"]
    assert cli.main(["launch", "torchrun", *words, "--max-restarts", "3", "--", *TRAIN]) == 0
    read = get_args_parser().parse_args(started[0])
    assert (read.standalone, read.nnodes, read.rdzv_backend, read.rdzv_endpoint) == (False, "2", "c10d", "first:29400")
    assert (read.rdzv_id, read.max_restarts) == ("draftsmith", 3)
    assert read.training_script_args == TRAIN


# --- SLURM


@pytest.fixture
def stubs(tmp_path, monkeypatch) -> Path:
    """Programs named srun, scontrol and sbatch before all others: each appends its words to calls.jsonl. srun also
    records where processes meet, prints STUB_SAYS, waits STUB_WAITS seconds and ends with STUB_CODE."""
    folder = tmp_path / "stubs"
    folder.mkdir()
    record = (
        f"#!{sys.executable}\n"
        "import json, os, sys, time\n"
        "name = os.path.basename(sys.argv[0])\n"
        "meeting = [os.environ.get(n) for n in ('MASTER_ADDR', 'MASTER_PORT', 'OMP_NUM_THREADS')]\n"
        f"open({str(tmp_path / 'calls.jsonl')!r}, 'a').write(json.dumps([[name, *sys.argv[1:]], meeting]) + '\\n')\n"
        "if name == 'scontrol' and sys.argv[1] == 'show': print('first\\nsecond')\n"
        "if name == 'sbatch': print('42;cluster')\n"
        "if name == 'srun': time.sleep(float(os.environ.get('STUB_WAITS', 0)))\n"
        "sys.exit(int(os.environ.get('STUB_CODE', 0)) if name == 'srun' else 0)\n"
    )
    for name in ("srun", "scontrol", "sbatch"):
        (folder / name).write_text(record)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    for name in ("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def calls(root: Path, program: str) -> list[list[str]]:
    lines = (root / "calls.jsonl").read_text().splitlines() if (root / "calls.jsonl").exists() else []
    return [words[1:] for words, _ in map(json.loads, lines) if words[0] == program]


def bash(root: Path, script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash"], input=script, cwd=root, capture_output=True, text=True, check=False)


def test_a_job_script_starts_the_words_and_runs_nothing_else(stubs):
    words = ("train", "eagle", *NASTY)
    script = slurm.job_script(slurm.SlurmConfig(words, nodes=2, cpus_per_task=3, log_dir=stubs))
    result = bash(stubs, script)
    assert (result.returncode, result.stderr) == (0, "")
    options = ["--kill-on-bad-exit=1", "--cpus-per-task=3"]
    assert calls(stubs, "srun") == [[*options, sys.executable, "-m", "draftsmith", *words]]
    assert not (stubs / "injected").exists()
    # sbatch reads options up to the first line that is no comment.
    head = script[: script.index("\necho")].replace(str(stubs), "")
    assert [line for line in head.splitlines() if "99" in line or not line.startswith("#")] == []


def test_processes_meet_on_the_first_node_unless_told_otherwise(stubs, monkeypatch):
    script = slurm.job_script(slurm.SlurmConfig(tuple(TRAIN), log_dir=stubs))
    bash(stubs, script)
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "5")
    bash(stubs, script)
    met = [meeting for words, meeting in map(json.loads, (stubs / "calls.jsonl").open()) if words[0] == "srun"]
    assert met == [["first", "20042", "1"], ["10.0.0.1", "5", "1"]]


@pytest.mark.parametrize(("code", "requeues"), [(0, 0), (2, 0), (3, 2)])
def test_a_failed_job_is_requeued_as_often_as_allowed(stubs, monkeypatch, code, requeues):
    monkeypatch.setenv("STUB_CODE", str(code))
    script = slurm.job_script(slurm.SlurmConfig(tuple(TRAIN), max_restarts=2, log_dir=stubs))
    assert [bash(stubs, script).returncode for _ in range(4)] == [code] * 4
    assert calls(stubs, "scontrol").count(["requeue", "42"]) == requeues


def test_a_data_stage_is_requeued_before_the_time_limit(stubs, monkeypatch):
    monkeypatch.setenv("STUB_WAITS", "3")
    script = slurm.job_script(slurm.SlurmConfig(("data", "features"), log_dir=stubs))
    assert "#SBATCH --signal=B:USR1@120" in script
    process = subprocess.Popen(["bash", "-c", script], cwd=stubs, stdout=subprocess.PIPE, text=True)
    while not calls(stubs, "srun"):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGUSR1)
    assert "requeued" in process.communicate()[0] and process.returncode == 0
    assert calls(stubs, "scontrol")[-1] == ["requeue", "42"]


def test_only_what_goes_on_is_requeued():
    train, bench = (slurm.job_script(slurm.SlurmConfig(words)) for words in (("train", "eagle"), ("eval", "bench")))
    assert "#SBATCH --requeue\n#SBATCH --signal=USR1@120\n" in train
    assert "#SBATCH --no-requeue" in bench and "--signal" not in bench


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("job_name", "a\n#SBATCH --nodes=9"),
        ("time", "soon"),
        ("log_dir", Path("/logs/a b")),
        ("sbatch_args", ("--qos=a\n#SBATCH",)),
        ("nodes", 0),
    ],
)
def test_what_sbatch_could_read_otherwise_is_refused(name, value):
    with pytest.raises(InputError, match=name):
        slurm.SlurmConfig(("train", "eagle"), **{name: value})


def test_sbatch_gets_every_option():
    args = ("--qos=high", "--exclude=n[1-3],n7", "--exclusive")
    config = slurm.SlurmConfig(
        tuple(TRAIN),
        nodes=2,
        gpus_per_node=8,
        time="24:00:00",
        sbatch_args=args,
    )

    def directives(config: slurm.SlurmConfig) -> set[str]:
        lines = slurm.job_script(config).splitlines()
        return {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")}

    expected = {"--nodes=2", "--ntasks-per-node=8", "--gpus-per-node=8", "--time=24:00:00"}
    assert expected | {*args} <= directives(config)
    without = directives(slurm.SlurmConfig(tuple(TRAIN), gpus_per_node=0))
    assert "--ntasks-per-node=1" in without and not any("gpu" in word for word in without)


def test_a_dry_run_prints_the_script_and_submits_nothing(stubs, capsys):
    words = ["--dry-run", "--time", "24:00:00", "--log-dir", str(stubs / "logs"), "--", *TRAIN]
    assert cli.main(["launch", "slurm", *words]) == 0
    assert capsys.readouterr().out.startswith("#!/bin/bash\n#SBATCH --job-name=draftsmith\n")
    assert calls(stubs, "sbatch") == [] and not (stubs / "logs").exists()


def test_a_job_is_submitted_by_its_script_and_its_number_told(stubs, capsys):
    words = ["--no-follow", "--log-dir", str(stubs / "logs"), "--", *TRAIN]
    assert cli.main(["launch", "slurm", *words]) == 0
    assert cli.main(["launch", "slurm", *words]) == 0
    scripts = sorted(map(str, (stubs / "logs").iterdir()))
    assert sorted(call[1] for call in calls(stubs, "sbatch")) == scripts and len(scripts) == 2
    assert f"job 42: script {scripts[0]}, output {stubs}/logs/draftsmith-42.log" in capsys.readouterr().out


def test_following_shows_new_lines_through_a_requeue_until_the_end(tmp_path, monkeypatch, capsys):
    log = tmp_path / "log"
    states = [("PENDING", "Resources", b""), ("RUNNING", "None", "half an \u00fc".encode()[:-1])]
    states += [("PENDING", "BeginTime", "\u00fc\nwhole\n".encode()[1:]), ("COMPLETED", "None", b"last")]
    left = iter(states)

    def state(job: str) -> tuple[str, str]:
        name, reason, written = next(left)
        with log.open("ab") as file:
            file.write(written)
        return name, reason

    monkeypatch.setattr(slurm, "job_state", state)
    monkeypatch.setattr(slurm, "POLL_S", 0)
    assert slurm.follow("42", log) == 0
    expected = ["job 42: pending (Resources)", "job 42: running", "job 42: pending (BeginTime)"]
    assert capsys.readouterr().out.splitlines() == [*expected, "half an ü", "whole", "job 42: completed", "last"]


@pytest.mark.parametrize(
    ("state", "code"),
    [("COMPLETED", 0)]
    + [(state, 1) for state in ("BOOT_FAIL", "CANCELLED", "CANCELLED by 1000", "DEADLINE", "FAILED", "NODE_FAIL")]
    + [(state, 1) for state in ("OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT")],
)
def test_every_final_state_that_slurm_documents_ends_the_following(tmp_path, monkeypatch, state, code):
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\necho 'JobId=7 JobName=x JobState={state} Reason=None'\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def wait(seconds: float) -> None:
        raise AssertionError(f"{state} is not taken for an end")

    monkeypatch.setattr(slurm.time, "sleep", wait)
    assert slurm.follow("7", tmp_path / "log") == code


def test_a_failed_job_fails_the_call_and_an_interrupt_leaves_the_job_alone(stubs, monkeypatch, capsys):
    words = ["launch", "slurm", "--log-dir", str(stubs / "logs"), "--", *TRAIN]
    monkeypatch.setattr(slurm, "job_state", lambda job: ("FAILED", "NonZeroExitCode"))
    assert cli.main(words) == 1
    assert "job 42 ended as failed. Its output: " in capsys.readouterr().out

    def interrupt(job: str) -> tuple[str, str]:
        raise KeyboardInterrupt

    monkeypatch.setattr(slurm, "job_state", interrupt)
    assert cli.main(words) == 130
    said = capsys.readouterr().out
    assert "job 42 keeps running. Follow it: tail -F" in said and "scancel 42" in said
    assert calls(stubs, "scontrol") == []


def test_without_slurm_or_when_it_refuses_there_is_one_line(stubs, monkeypatch, capsys):
    words = ["launch", "slurm", "--log-dir", str(stubs / "logs"), "--", *TRAIN]
    (stubs / "stubs" / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid partition' >&2\nexit 1\n")
    assert cli.main(words) == 2
    assert "invalid partition" in capsys.readouterr().err
    monkeypatch.setattr(slurm.shutil, "which", lambda name: None)
    assert cli.main(words) == 2
    assert "--dry-run" in capsys.readouterr().err


def test_a_server_of_states_is_started_with_the_layers_of_the_drafter_and_what_follows_the_dashes(tmp_path, capsys):
    words = ["launch", "vllm", "--target", "embedded:target", "--drafter", "eagle3", "--engine-path", sys.executable]
    words += ["--states", str(tmp_path), "--feature-dtype", "fp8", "--dry-run", "--", "--port", "8001", "--x", "a b"]
    assert cli.main(words) == 0
    python, *rest = shlex.split(capsys.readouterr().out)
    assert python == sys.executable and rest[:2] == ["-m", "draftsmith.data.engines.vllm_serve"]
    assert rest[-4:] == ["--port", "8001", "--x", "a b"]
    options = dict(zip(rest[2:-4:2], rest[3:-4:2], strict=True))
    assert Path(options["--model"], "config.json").is_file() and options["--served-model-name"] == "embedded:target"
    draft = json.loads(options["--speculative-config"])["draft_model_config"]
    assert draft["hf_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 6, 9, 12]
    connector = json.loads(options["--kv-transfer-config"])
    assert connector["kv_connector_extra_config"] == {
        "directory": str(tmp_path),
        "feature_dtype": "fp8",
        "layers": [2, 6, 9, 13],
    }
    module, name = connector["kv_connector_module_path"], connector["kv_connector"]
    assert f"class {name}(" in Path(*module.split(".")[1:]).with_suffix(".py").read_text()
