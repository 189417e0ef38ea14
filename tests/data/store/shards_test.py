"""kill -9 in the middle of every stage, then continue, then compare with the unbroken run; and several ranks."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from draftsmith.data.store import shards
from draftsmith.data.store.manifest import MANIFEST, Field, Manifest, command_line
from draftsmith.data.store.rows import Rows
from draftsmith.data.store.shards import Shard, ShardContent, StagePlan, run_stage
from draftsmith.modules.pretrained.files import CannotWrite
from draftsmith.modules.pretrained.provenance import file_sha256
from draftsmith.modules.types import InputError

STAGES = ("prompts", "responses", "acceptance", "features")
# Moments of death: the table of shard 1 is written but has no name yet; it has its name but the shard is not recorded;
# every shard is there but the manifest is not.
MOMENTS = {
    "unnamed": ("shard-00001.parquet", "before"),
    "unrecorded": ("shard-00001.parquet", "after"),
    "no-manifest": (MANIFEST, "before"),
}
# Every stage at one moment, and one stage at all.
KILLED = [*((stage, "unnamed") for stage in STAGES), ("responses", "unrecorded"), ("responses", "no-manifest")]


UNCOMPARED = (MANIFEST, "started.json", "finished.json")


def files(directory: Path) -> dict[str, str]:
    """Content hashes of everything but what names the directory itself, and safetensors' own temporary files, which a
    kill leaves (`files.clear_files` takes them an hour later)."""
    kept = (p for p in directory.iterdir() if p.name not in UNCOMPARED and not p.match(".tmp??????"))
    return {p.name: file_sha256(p) for p in kept}


def same(left: Path, right: Path) -> None:
    assert files(left) == files(right)
    ours, theirs = Manifest.read(left), Manifest.read(right)
    assert ours.digest == theirs.digest
    # Where and by which commit it was made may differ; nothing else.
    plain = [
        dataclasses.replace(m, command="", git_commit=None, config={**m.config, "output": ""}) for m in (ours, theirs)
    ]
    assert plain[0] == plain[1]


@pytest.fixture(scope="module")
def broken(chain, tmp_path_factory) -> dict[str, tuple[object, list[int]]]:
    """Every job of this file, run by one helper process: name -> (configuration, wait statuses of its processes)."""
    root = tmp_path_factory.mktemp("broken")
    jobs: dict[str, tuple[object, int, list | None]] = {}
    for stage, name in KILLED:
        config = dataclasses.replace(chain.configs[stage], output=root / f"{stage}-{name}")
        jobs[f"{stage}-{name}"] = (config, 1, [0, *MOMENTS[name]])
    for stage in STAGES:
        config = dataclasses.replace(chain.configs[stage], output=root / f"{stage}-ranks")
        jobs[f"{stage}-ranks"] = (config, 2, None)
    config = dataclasses.replace(chain.configs["responses"], output=root / "rank-1-dies")
    jobs["rank-1-dies"] = (config, 2, [1, "shard-00003.parquet", "before"])
    described = [
        {"args": shlex.split(command_line(f"data {config_stage(config)}", config))[1:], "ranks": ranks, "die": die}
        for config, ranks, die in jobs.values()
    ]
    (root / "jobs.json").write_text(json.dumps(described))
    helper = Path(__file__).parents[1] / "broken_runs.py"
    command = [sys.executable, str(helper), str(root / "jobs.json"), str(chain.target)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if line.replace(" ", "").isdigit()]
    statuses = [[int(word) for word in line.split()] for line in lines]
    return {name: (job[0], status) for (name, job), status in zip(jobs.items(), statuses, strict=True)}


def config_stage(config: object) -> str:
    return type(config).__name__.removesuffix("Config").lower()


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "moment"), KILLED)
def test_a_killed_stage_continues_to_the_same_bytes(chain, broken, make_stage, stage, moment):
    config, statuses = broken[f"{stage}-{moment}"]
    assert [os.WTERMSIG(status) for status in statuses] == [signal.SIGKILL]
    # It died with a file that had no name yet; behind the name of one, the next may have been begun.
    assert list(config.output.glob("*.tmp-*")) or moment == "unrecorded"
    with pytest.raises(InputError, match=f"unfinished stage.*Continue it: draftsmith data {stage} "):
        Manifest.read(config.output)
    before = {p.name: p.stat().st_mtime_ns for p in config.output.glob("shard-00000.*")}
    assert before
    make_stage(stage, config)
    assert before == {p.name: p.stat().st_mtime_ns for p in config.output.glob("shard-00000.*")}  # kept, not remade
    assert not list(config.output.glob("*.tmp-*"))
    same(config.output, chain.directory(stage))


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_write_what_one_writes(chain, broken, stage):
    config, statuses = broken[f"{stage}-ranks"]
    assert statuses == [0, 0]
    same(config.output, chain.directory(stage))


@pytest.mark.slow
def test_one_rank_continues_what_two_began(chain, broken, make_stage):
    config, statuses = broken["rank-1-dies"]
    assert [os.WTERMSIG(status) for status in statuses] == [signal.SIGKILL]
    assert (config.output / "shard-00001.done.json").exists()  # rank 1 had finished its first shard
    make_stage("responses", config)
    same(config.output, chain.directory("responses"))


@dataclasses.dataclass(frozen=True)
class OneRowEach:
    output: Path
    rows_per_shard: int = 1


def a_row(shard: Shard) -> ShardContent:
    return ShardContent([{"id": f"row-{shard.start}"}])


def test_a_shard_is_written_while_the_next_one_is_made(tmp_path, monkeypatch):
    """The first write ends when the second shard is being made; written one after the other, this would wait for ever,
    or here for its deadline."""
    making, write = threading.Event(), shards.write_shard

    def waiting(plan, shard, content):
        assert making.wait(30) or shard.index
        write(plan, shard, content)

    def make(shard, advance):
        if shard.index:
            making.set()
        return a_row(shard)

    monkeypatch.setattr(shards, "write_shard", waiting)
    plan = StagePlan("prompts", "data prompts", OneRowEach(tmp_path / "out"), 3, (Field("id", "string"),), {}, {})
    run_stage(plan, make)
    assert [row["id"] for row in Rows(Manifest.read(plan.directory)).read(0, 9)] == [f"row-{i}" for i in range(3)]


@pytest.mark.parametrize("failing", [0, 7])
def test_a_disk_that_refuses_a_shard_ends_the_stage_soon(tmp_path, monkeypatch, failing):
    """At most those are still made that are written beside it; the error of the last one is raised too."""
    made, write = [], shards.write_table

    def refused(path, *args, **options):
        if path.name == f"shard-{failing:05d}.parquet":
            raise CannotWrite(str(path), "No space left on device", "room to write it", "Free some space.")
        write(path, *args, **options)

    def make(shard, advance):
        made.append(shard.index)
        return a_row(shard)

    plan = StagePlan("prompts", "data prompts", OneRowEach(tmp_path / "out"), 8, (Field("id", "string"),), {}, {})
    with monkeypatch.context() as patch:
        patch.setattr(shards, "write_table", refused)
        patch.setattr(shards, "WAIT_S", 0.2)  # for a shard that nobody writes
        with pytest.raises(CannotWrite, match="No space left"):
            run_stage(plan, make)
    assert made == list(range(len(made))) and failing < len(made) <= failing + 1 + shards.WRITERS
    done = [shard.index for shard in plan.shards if shards.read_done(plan.directory, shard) is not None]
    assert failing not in done and not (plan.directory / MANIFEST).exists()
    assert run_stage(plan, make).counts["rows"] == 8  # and goes on where it ended


def test_rank_0_says_what_is_missing_when_another_rank_never_delivers(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(shards, "WAIT_S", 0.2)
    plan = StagePlan("prompts", "data prompts", OneRowEach(tmp_path / "out"), 4, (), {}, {})
    with pytest.raises(InputError, match=r"ranks: found 2 shards of other ranks missing"):
        run_stage(plan, lambda shard, advance: ShardContent([], {"invalid_dropped": 1}))
    assert Shard(1, 1, 2).name + ".done.json" not in {p.name for p in plan.directory.iterdir()}
