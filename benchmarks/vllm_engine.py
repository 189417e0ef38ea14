"""`VLLM_PYTHON benchmarks/vllm_engine.py`: answers and hidden states from vLLM against our own engine, in CPU time.

Run by the python of an environment with vLLM (`make engines ENGINES=vllm_cpu`: .engines/vllm_cpu/bin/python). Both
engines have one thread and answer the same prompts, in turn; CPU seconds are those of this process and of vLLM's
workers, without starting them. vLLM's scheduler is left out: it polls while the worker computes.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from draftsmith.data.console import print_table, table_from_cells
from draftsmith.data.engines.own import generate_all, length_batches, pad_right, set_threads
from draftsmith.data.engines.vllm import VllmEngine
from draftsmith.data.engines.vllm_states import VllmStates
from draftsmith.data.settings import Dtype
from draftsmith.data.store import feature_codec
from draftsmith.data.store.manifest import open_artifact
from draftsmith.data.store.rows import Rows
from draftsmith.data.text.turns import AnswerSettings, PendingTurn
from draftsmith.launch.cli import main_of
from draftsmith.modules.drafters.eagle3 import default_layers
from draftsmith.modules.pretrained.files import make_directory, write_json, write_text
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.pretrained.provenance import package_versions
from draftsmith.modules.types import SamplingParams

GREEDY = SamplingParams()


@dataclass(frozen=True)
class VllmBenchConfig:
    """Measures `data responses` and `data features` with vLLM against our own engine.

    Attributes:
        target: Model directory, GGUF file, hub id or embedded:target.
        prompts: Directory that `data prompts` wrote.
        output: Directory that receives vllm.json.
        limit: The first so many prompts.
        max_new_tokens: Tokens of each answer; end tokens are ignored.
        dtype: Type of the weights.
        batch_size: Prompts answered together, and requests in vLLM at once.
        repeats: Runs of everything, in turn; the median counts.
    """

    target: str
    prompts: Path
    output: Path
    limit: int = 64
    max_new_tokens: int = 100
    dtype: Dtype = "bfloat16"
    batch_size: int = 32
    repeats: int = 3


def cpu_seconds() -> float:
    """Return the CPU time of this process and its descendants, which all live as long as their engine."""

    def tree(process: int) -> float:
        name, _, rest = Path(f"/proc/{process}/stat").read_text().rpartition(")")
        fields, polls = rest.split(), "EngineCor" in name
        children = [path.read_text().split() for path in Path(f"/proc/{process}/task").glob("*/children")]
        own = 0.0 if polls else (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return own + sum(tree(int(child)) for some in children for child in some)

    return tree(os.getpid())


def run(config: VllmBenchConfig) -> Path:
    """Measure, print the table, write vllm.json; return its path."""
    set_threads(1)
    for name, value in {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}.items():
        os.environ.setdefault(name, value)
    rows = Rows(config.prompts, open_artifact(config.prompts, "prompts"), ["id", "prompt_ids"]).read(0, config.limit)
    prompts = [row["prompt_ids"] for row in rows]
    turns = [PendingTurn(number, 1, row["id"], row["prompt_ids"]) for number, row in enumerate(rows)]
    lm = load_lm(config.target, config.dtype, packed=True)
    layers = (*default_layers(lm.info.num_layers), lm.info.num_layers)
    length = max(map(len, prompts)) + config.max_new_tokens + 1
    settings = AnswerSettings(config.target, GREEDY, config.max_new_tokens, True, 0)
    texts = generate_all(lm, prompts, GREEDY, config.max_new_tokens, config.batch_size, eos_ids=())
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, texts, strict=True)]
    answered, read = len(prompts) * config.max_new_tokens, sum(map(len, texts))

    def own_states() -> None:
        for batch in length_batches([len(text) for text in texts], 8):
            with torch.inference_mode():
                states = lm.features(pad_right([texts[i] for i in batch], lm), aux_layers=layers)
            for i, row in zip(batch, states, strict=True):
                feature_codec.encode(row[: len(texts[i])], "bf16")

    with tempfile.TemporaryDirectory() as folder:
        options = {"max_model_len": length, "max_num_seqs": config.batch_size, "enforce_eager": True}
        args = Path(folder, "args.json")
        write_text(args, json.dumps({**options, "enable_prefix_caching": False}))
        with (
            VllmEngine(settings, config.dtype, args, False) as engine,
            VllmStates(config.target, layers, config.dtype, "bf16", Path(folder), args) as source,
        ):
            calls: dict[str, tuple[int, Callable[[], object]]] = {
                "answers, our own engine": (
                    answered,
                    lambda: generate_all(lm, prompts, GREEDY, config.max_new_tokens, config.batch_size, eos_ids=()),
                ),
                "answers, vLLM": (answered, lambda: list(engine.answers(turns))),
                "states, our own engine": (read, own_states),
                "states, vLLM": (read, lambda: list(source.read(texts))),
            }
            seconds: dict[str, list[float]] = {name: [] for name in calls}
            # The first round warms up.
            for turn in range(config.repeats + 1):
                for name, (_, call) in calls.items():
                    before = cpu_seconds()
                    call()
                    if turn:
                        seconds[name].append(cpu_seconds() - before)

    table, numbers = [], {}
    for kind in ("answers", "states"):
        names = [f"{kind}, our own engine", f"{kind}, vLLM"]
        rates = [calls[name][0] / statistics.median(seconds[name]) for name in names]
        ratio = statistics.median(own / theirs for own, theirs in zip(*(seconds[name] for name in names), strict=True))
        numbers[kind] = {"own": rates[0], "vllm": rates[1], "ratio": ratio}
        table.append([kind, f"{rates[0]:,.0f}", f"{rates[1]:,.0f}", f"{ratio:.2f}x"])
    headings = ["tokens per CPU second", "our own engine", "vLLM", "vLLM / ours"]
    print_table(table_from_cells("vllm", headings, table, headings[1:]))
    path = make_directory(config.output) / "vllm.json"
    settings_json = {name: str(value) for name, value in vars(config).items()}
    write_json(path, {"config": settings_json, "packages": package_versions(), "seconds": seconds, **numbers})
    return path


if __name__ == "__main__":
    sys.exit(main_of(VllmBenchConfig, run))
