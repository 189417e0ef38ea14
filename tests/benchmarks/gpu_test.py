"""The command for one GPU: stages in processes of their own, time limits, the summary, and what is brought back."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.benchmarks import gpu
from draftsmith.benchmarks.gpu import GpuConfig, Stage
from draftsmith.benchmarks.measured import Measured


@pytest.mark.parametrize(
    ("aim", "reached"), [(">= 3", True), ("<= 2", False), ("< 3", False), ("0.9 to 3.0", True), ("", None)]
)
def test_an_aim_is_read(aim, reached):
    assert Measured("", 3.0, "", aim).reached is reached


def test_stages_that_fail_hang_or_do_not_fit_leave_the_others_alone(tmp_path, monkeypatch, capfd):
    def fails(config, output):
        yield Measured("before", 2.0, "ms", "< 1")
        raise RuntimeError("no luck")

    def hangs(config, output):
        yield Measured("begun", 1.0)
        time.sleep(60)

    def works(config, output):
        (output / "log.txt").write_text("a log")
        head = tmp_path / "head" / "eagle3" / "best"
        head.mkdir(parents=True)
        save_file({"fc.weight": weight}, head / "model.safetensors")
        yield Measured("speed", 5.0, "tokens/s", ">= 4")

    weight = torch.randn(1000, 1000)
    stages = {
        "fails": Stage(1, fails), "hangs": Stage(0.2, hangs), "large": Stage(1000, works),
        "lacks": Stage(1, works, lambda config: "no package"), "works": Stage(1, works),
    }  # fmt: skip
    monkeypatch.setattr(gpu, "STAGES", stages)
    monkeypatch.setattr(gpu, "gpu_head", SimpleNamespace(Stages=gpu.gpu_head.Stages, import_all=lambda: None))
    (tmp_path / "lacks.json").write_text(json.dumps({"rows": [{"what": "of an earlier run", "value": 1.0}]}))
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "heads.tar.4").write_text("of an earlier run")
    monkeypatch.setattr(gpu, "FILE_BYTES", 2**19)
    with capfd.disabled():  # a stage writes to the descriptors of its process
        code = gpu.run(GpuConfig(output=tmp_path, minutes=1, stages=",".join(stages), device="cpu"))
    assert code == 1
    done = {stage["stage"]: stage for stage in json.loads((tmp_path / "gpu.json").read_text())["stages"]}
    assert {name: stage["outcome"] for name, stage in done.items()} == {
        "fails": "failed (256)", "hangs": "stopped after 2 s", "large": done["large"]["outcome"],
        "lacks": "not run: no package", "works": "ok",
    }  # fmt: skip
    assert done["large"]["outcome"].startswith("not run: 5") and done["hangs"]["seconds"] < 20
    # Also the numbers of a stage that failed or was stopped.
    assert [row["what"] for stage in done.values() for row in stage["rows"]] == ["before", "begun", "speed"]
    text = (tmp_path / "back" / "gpu.md").read_text()
    assert "| before | 2 ms | < 1 | no |" in text and "| speed | 5 tokens/s | >= 4 | yes |" in text
    assert "RuntimeError: no luck" in (tmp_path / "log.txt").read_text()

    back = sorted(tmp_path.glob("back/*"))
    assert "heads.tar.4" not in [path.name for path in back]
    assert len(back) <= 8 and all(path.stat().st_size <= 2**19 for path in back)
    whole = tmp_path / "heads.tar"
    whole.write_bytes(b"".join(path.read_bytes() for path in back if path.name.startswith("heads.tar.")))
    with gpu.tarfile.open(whole) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    found = load_file(tmp_path / "unpacked" / "eagle3" / "model.safetensors")
    assert torch.equal(found["fc.weight"], weight.bfloat16())
