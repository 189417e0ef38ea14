"""`draftsmith eval lossless`: a certificate that methods leave a model's output as it is, for your models and machine.

Greedy: token by token what autoregression emits (float32), or tokens whose logit is within a stated gap of the best one
(bfloat16, where another number of rows rounds differently). Sampling: the laws of the first token and of the first two,
tested against the target's own by chi-square.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table

from draftsmith.data.device import check_device
from draftsmith.data.files import make_directory, write_json
from draftsmith.data.manifest import package_versions, resolved
from draftsmith.data.models import load_lm
from draftsmith.data.writer import sole_writer
from draftsmith.eval.bench import longest_sequence, model_paths
from draftsmith.eval.load import LOADING, load_models
from draftsmith.eval.measure import BenchPrompt, EngineRunner
from draftsmith.eval.methods import check_needs, parse_methods
from draftsmith.eval.methods.base import Named, at_least, between
from draftsmith.eval.methods.hf import HFAssisted, HFGenerate
from draftsmith.eval.prompts import read_prompts
from draftsmith.eval.provenance import hardware
from draftsmith.modules.sampling import probabilities
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import InputError, SamplingParams

RESULTS = "lossless.json"
SAMPLED_TOKENS = 4  # long enough that the second token comes out of a whole round
MIN_EXPECTED = 5.0  # cells of fewer expected counts are pooled, as chi-square needs


@dataclass(frozen=True)
class LosslessConfig:
    """Certifies that decoding methods do not change what the target says. Exit code 1 when one does.

    target: model directory, hub id or embedded:target.
    prompts: JSONL, JSON or Parquet file of chats, a prompts artefact, a data set, or embedded:prompts.
    output: directory that receives lossless.json.
    methods: name:setting=value, separated by commas, as in `draftsmith eval bench`.
    draft: draft model.
    mid: model between draft and target.
    eagle: EAGLE head directory.
    acceptance: acceptance head directory.
    split: keep prompts of this split.
    keep_tasks: keep prompts of these tasks, separated by commas.
    limit: prompts of the greedy test.
    max_new_tokens: longest answer of the greedy test.
    ignore_eos: in the greedy test go on after the end token, up to max_new_tokens.
    sampled_prompts: prompts of the sampling test; 0 leaves it out.
    samples: answers sampled to each.
    temperature: of the sampling test.
    top_k: of the sampling test; 0 keeps all.
    top_p: of the sampling test; 1 keeps all.
    alpha: chance that all sampling tests together fail a lossless method.
    max_gap: largest logit gap to the best token of a greedy token, where the dtype is not float32.
    dtype: float32, bfloat16 or float16.
    device: cpu, cuda, cuda:1, ...
    engine: lean (Llama family), hf (any transformers model), or auto.
    packed: on a CPU, hold large weights in the layout of its kernels (lean engine).
    num_threads: CPU threads.
    seed: of sampling.
    trust_remote_code: run code that comes with a model.
    """

    target: str
    prompts: str
    output: Path
    methods: str = "spec:k=5"
    draft: str | None = None
    mid: str | None = None
    eagle: str | None = None
    acceptance: str | None = None
    split: str | None = None
    keep_tasks: str | None = None
    limit: int = 20
    max_new_tokens: int = 64
    ignore_eos: bool = False
    sampled_prompts: int = 2
    samples: int = 300
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    alpha: float = 1e-3
    max_gap: float = 0.5
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "cpu"
    engine: Literal["auto", "lean", "hf"] = "auto"
    packed: bool = True
    num_threads: int = 1
    seed: int = 0
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        for name in ("limit", "max_new_tokens", "samples", "num_threads"):
            at_least(name, getattr(self, name), 1)
        at_least("sampled_prompts", self.sampled_prompts, 0)
        between("alpha", self.alpha, 0, 1)
        if self.sampling.greedy:
            raise InputError("temperature", self.temperature, "more than 0", "The greedy test is always made.")

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(self.temperature, self.top_k, self.top_p)


@sole_writer()
def run(config: LosslessConfig) -> int:
    """Test every method, print and write the verdicts; 0 when all passed, else 1."""
    named = parse_methods(config.methods)
    for method in named:
        check_needs(method, model_paths(config))
        if isinstance(method.method, HFGenerate | HFAssisted):
            raise InputError("methods", method.label, "methods of this engine", "Remove it.")
    check_device(config.device)
    torch.set_num_threads(config.num_threads)
    prompts = read_prompts(config.prompts, config.target, config.split, config.keep_tasks, config.limit)
    how = {name: getattr(config, name) for name in LOADING}
    target = load_lm(config.target, **how)
    longest = longest_sequence(prompts, max(config.max_new_tokens, SAMPLED_TOKENS), target.info.max_position)
    models = load_models(named, model_paths(config), longest, config.sampling, target, **how)
    sampled = prompts[: config.sampled_prompts]
    laws = [PairLaw(target, prompt, config.sampling) for prompt in sampled]
    reference = None if config.dtype == "float32" else load_lm(config.target, **{**how, "dtype": "float32"})
    ends = () if config.ignore_eos else target.info.eos_ids
    answers = [
        EngineRunner(target, None, SamplingParams(), ends)(prompt.prompt_ids, config.max_new_tokens, 0).tokens
        for prompt in prompts
    ]
    found = []
    for method in named:
        drafter = method.method.build(models)
        greedy = EngineRunner(target, drafter, SamplingParams(), ends)
        drawn = EngineRunner(target, drafter, config.sampling, ())
        found.append(
            {
                "method": method.label,
                "greedy": greedy_test(greedy, prompts, answers, config, reference),
                "sampling": [sampling_test(drawn, law, config) for law in laws],
            }
        )
    judge(found, config.alpha)
    write(config, named, found, target)
    return 0 if all(row["passed"] for row in found) else 1


def greedy_test(
    runner: EngineRunner,
    prompts: Sequence[BenchPrompt],
    answers: Sequence[list[int]],
    config: LosslessConfig,
    reference: CausalLM | None,
) -> dict[str, Any]:
    """Equality with `answers`, or, with a float32 `reference`, the largest gap to its best token."""
    identical, tokens, gap, first = 0, 0, 0.0, None
    for prompt, answer in zip(prompts, answers, strict=True):
        made = runner(prompt.prompt_ids, config.max_new_tokens, config.seed).tokens
        tokens += len(made)
        identical += made == answer
        if reference is not None:
            gap = max(gap, largest_gap(reference, prompt.prompt_ids, made))
        elif made != answer and first is None:
            place = next((i for i, (a, b) in enumerate(zip(made, answer, strict=False)) if a != b), None)
            first = {"prompt": prompt.id, "place": min(len(made), len(answer)) if place is None else place}
    passed = identical == len(prompts) if reference is None else gap <= config.max_gap
    found: dict[str, Any] = {"prompts": len(prompts), "tokens": tokens, "identical": identical, "passed": passed}
    return found | ({"first_difference": first} if reference is None else {"largest_logit_gap": gap})


@torch.inference_mode()
def largest_gap(reference: CausalLM, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """max over the answer's tokens of (best logit - its logit), teacher-forced."""
    ids = torch.tensor([[*prompt, *answer]], device=reference.device)
    logits = reference.lm_head(reference.features(ids)[0, len(prompt) - 1 : -1]).double()
    chosen = logits.gather(-1, ids[0, len(prompt) :, None])[:, 0]
    return float((logits.max(-1).values - chosen).max())


class PairLaw:
    """The target's own law of the first token after a prompt and of the first two."""

    def __init__(self, target: CausalLM, prompt: BenchPrompt, params: SamplingParams):
        self.prompt = prompt
        self._target, self._params = target, params
        self._after: dict[int, torch.Tensor] = {}
        self.first = self._law([])

    @torch.inference_mode()
    def _law(self, more: list[int]) -> torch.Tensor:
        session = self._target.session(len(self.prompt.prompt_ids) + 1)
        logits = session.extend([*self.prompt.prompt_ids, *more]).logits[-1]
        return probabilities(logits, self._params).double()

    def second(self, token: int) -> torch.Tensor:
        """[V], given the first token."""
        if token not in self._after:
            self._after[token] = self._law([token])
        return self._after[token]

    def pair(self, first: int, second: int) -> float:
        return float(self.first[first] * self.second(first)[second])


def sampling_test(runner: EngineRunner, law: PairLaw, config: LosslessConfig) -> dict[str, Any]:
    """p-values of `samples` answers against the law."""
    firsts: Counter[Any] = Counter()
    pairs: Counter[Any] = Counter()
    for i in range(config.samples):
        tokens = runner(law.prompt.prompt_ids, SAMPLED_TOKENS, config.seed * 1_000_003 + i).tokens
        firsts[tokens[0]] += 1
        pairs[tokens[0], tokens[1]] += 1
    first_law = {token: float(p) for token, p in enumerate(law.first) if p > 0}
    pair_law = {
        (first, second): p * float(q)
        for first, p in first_law.items()
        if p * config.samples >= MIN_EXPECTED  # a pair of a rarer first token is too rare itself
        for second, q in enumerate(law.second(first))
        if p * q * config.samples >= MIN_EXPECTED
    }
    impossible = sum(count for (a, b), count in pairs.items() if law.pair(a, b) == 0)
    return {
        "prompt": law.prompt.id,
        "samples": config.samples,
        "first_token_p": chi_square(firsts, first_law, config.samples),
        "pair_p": chi_square(pairs, pair_law, config.samples),
        "impossible": impossible,
    }


def chi_square(counts: Mapping[Any, int], law: Mapping[Any, float], total: int) -> float:
    """p-value of the counts under the law; what the law leaves out, and cells too rare for the test, are one cell."""
    cells = [(counts.get(key, 0), p * total) for key, p in law.items() if p * total >= MIN_EXPECTED]
    rest = total - sum(observed for observed, _ in cells), total - sum(expected for _, expected in cells)
    if rest[1] >= MIN_EXPECTED:
        cells.append(rest)
    elif cells and rest[1] > 0:  # too rare for a cell of its own
        cells[-1] = cells[-1][0] + rest[0], cells[-1][1] + rest[1]
    if len(cells) < 2:
        return 1.0
    statistic = sum((observed - expected) ** 2 / expected for observed, expected in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def judge(found: Sequence[dict[str, Any]], alpha: float) -> None:
    """Set `passed`: p-values are held against alpha over their number (Bonferroni)."""
    tests = [row for method in found for row in method["sampling"]]
    limit = alpha / max(1, 2 * len(tests))
    for row in tests:
        row["passed"] = row["impossible"] == 0 and min(row["first_token_p"], row["pair_p"]) >= limit
    for method in found:
        method["passed"] = method["greedy"]["passed"] and all(row["passed"] for row in method["sampling"])


def write(config: LosslessConfig, named: Sequence[Named], found: Sequence[dict[str, Any]], target: CausalLM) -> None:
    """lossless.json, and a table on the screen."""
    meta = {
        "settings": resolved(config),
        "methods": {item.label: dataclasses.asdict(item.method) for item in named},
        "target": target.info.identity,
        "versions": package_versions(),
        "hardware": hardware(config.device),
    }
    make_directory(config.output)
    write_json(config.output / RESULTS, {"meta": meta, "methods": found})
    table = Table(box=None)
    for name in ("method", "greedy", "first token p", "pair p", "verdict"):
        table.add_column(name)
    for row in found:
        greedy = row["greedy"]
        said = f"{greedy['identical']} of {greedy['prompts']} equal"
        if "largest_logit_gap" in greedy:
            said += f", gap {greedy['largest_logit_gap']:.3f}"
        p_values = [", ".join(f"{test[key]:.3f}" for test in row["sampling"]) for key in ("first_token_p", "pair_p")]
        verdict = "[green]lossless[/green]" if row["passed"] else "[red]NOT lossless[/red]"
        table.add_row(row["method"], said, *p_values, verdict)
    console = Console(highlight=False)
    console.print(table)
    console.print(f"[dim]Written to {config.output / RESULTS}[/dim]")
