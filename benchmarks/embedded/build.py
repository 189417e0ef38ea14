"""`python benchmarks/embedded/build.py --output data/embedded`: the models that ship, with their prompts and scores;
`--domain prose --output data/embedded/prose` makes the pair for text that does not copy.

Hours rather than minutes on two cores. Stages write into a work folder and are skipped when their file is there, so a
killed build goes on where it was. Steps and seeds are fixed; the installed versions of the source packages are the only
other input, and the card records them.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from draftsmith.benchmarks.embedded import card
from draftsmith.benchmarks.embedded.domains import DOMAINS, MAX_POSITION, Domain
from draftsmith.benchmarks.embedded.language_model import (
    Recipe,
    TokenRow,
    distillation_loss,
    evaluate,
    grow,
    init_weights,
    load_weights,
    next_token_loss,
    train_stage,
)
from draftsmith.benchmarks.embedded.tasks import Turn
from draftsmith.benchmarks.embedded.tokenizer import ASSISTANT, END, USER, train_tokenizer
from draftsmith.data.engines.own import set_threads
from draftsmith.data.store.writer import sole_writer
from draftsmith.launch.cli import main_of
from draftsmith.modules.layers import LlamaModel
from draftsmith.modules.pretrained.files import make_directory, write_json, write_text
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.targets.llama import LlamaLM

MAX_ROW_TOKENS = 512
TOKENIZER_TEXTS = 20_000
DISTIL_PROMPTS = 2_500
DISTIL_GREEDY_SHARE = 0.3  # drafts serve greedy and sampled decoding
SHIPPED_PROMPTS = {"train": 3_240, "dev": 180, "test": 380}
CARD_PROMPTS = 40  # per task, of the shipped test prompts


@dataclass(frozen=True)
class BuildConfig:
    """Options of the build of the embedded models.

    Attributes:
        output: Directory that receives target/, draft/, draft-small/, prompts.jsonl and card.json.
        domain: edits or prose: which pair.
        work: Scratch folder; finished stages in it are not repeated. runs/embedded/DOMAIN where none is named.
        seed: Of the corpus' random parts, the weights and the order of batches.
        num_threads: CPU threads.
        packages: Learn from these source packages only. All of the domain's where none is named.
    """

    output: Path
    domain: Literal["edits", "prose"] = "edits"
    work: Path | None = None
    seed: int = 0
    num_threads: int = 2
    packages: list[str] | None = None


@sole_writer()
def run(config: BuildConfig) -> Path:
    """Build whatever is missing."""
    set_threads(config.num_threads)
    domain = DOMAINS[config.domain]
    work = config.work or Path("runs/embedded") / config.domain
    make_directory(work)
    started = time.time()

    def log(text: str) -> None:
        print(f"{time.time() - started:8.0f} s  {text}", flush=True)

    turns = make_turns(domain, work, config)
    tokenizer = make_tokenizer(domain, work, turns, config.seed)
    rows = training_rows(domain, turns, tokenizer, config.seed)
    measured = [turn for turn in turns if turn.task not in domain.unmeasured]
    dev = fitting([turn for turn in measured if turn.split == "dev"], tokenizer)
    log(f"{len(rows)} training rows, {sum(len(row.ids) for row in rows) / 1e6:.1f} M tokens")
    write_lines(config.output / "prompts.jsonl", shipped_prompts(turns, tokenizer, config.seed))
    known = read_prompts(config.output / "prompts.jsonl")
    builder = Builder(domain, work, dev, tokenizer.pad_token_id, config.seed, log)
    export_model(builder.target(rows, fitting(known, tokenizer), len(tokenizer)), config.output / "target", tokenizer)
    # From here on the target is what ships: bf16 weights, read back.
    target = load_lm(str(config.output / "target"))
    asked = measured if domain.by_heart is None else known
    questions = [turn for turn in asked if turn.split == "train"]
    own_text = distillation_rows(work / "own_text.jsonl", questions, tokenizer, target, config.seed, log)
    assert isinstance(target, LlamaLM)
    for name in domain.drafts:
        draft = builder.draft(name, target.model, rows, own_text)
        export_model(draft, config.output / name, tokenizer)
    write_card(domain, config, tokenizer, dev)
    log(f"scores written to {config.output / 'card.json'}")
    return config.output


@dataclass(frozen=True)
class Builder:
    """Trains the shipped models in a work folder: the target, grown from a small one, and the drafts, distilled on its
    own text. dev: held-out rows, of which a stage says how well it knows them."""

    domain: Domain
    work: Path
    dev: Sequence[TokenRow]
    pad: int
    seed: int
    log: Callable[[str], None]

    def target(self, rows: Sequence[TokenRow], shipped: Sequence[TokenRow], vocab_size: int) -> LlamaModel:
        """Run the stages one after the other. shipped: the rows of the shipped prompts."""
        model: LlamaModel | None = None
        for name, (num_layers, recipe) in self.domain.target_stages.items():
            if model is None:
                model = LlamaModel(self.domain.shape.config(vocab_size, num_layers))
                init_weights(model, self.seed)
            else:
                model = grow(model, num_layers, self.seed + num_layers)
            self._stage(name, model, recipe, rows, next_token_loss)
        assert model is not None
        if self.domain.by_heart is not None:
            self._stage("by-heart", model, self.domain.by_heart, shipped, next_token_loss)
        return model

    def draft(
        self, name: str, target: LlamaModel, rows: Sequence[TokenRow], own_text: Sequence[TokenRow]
    ) -> LlamaModel:
        """Train a draft on `rows` or from the seedling, then distil it on text that the target wrote."""
        plan = self.domain.drafts[name]
        draft = LlamaModel(self.domain.shape.config(target.config.vocab_size, plan.num_layers))
        if plan.start is None:
            load_weights(self._path("seedling"), draft)
        elif not self._path(name).exists():
            init_weights(draft, self.seed)
            self._stage(f"{name}-start", draft, plan.start, rows, next_token_loss)
        self._stage(name, draft, plan.distil, own_text, distillation_loss(target))
        return draft

    def _stage(self, name: str, model: LlamaModel, recipe: Recipe, rows: Sequence[TokenRow], loss_of: Any) -> None:
        """Run a stage; print the loss every 50 steps, the held-out one every 500 and at the end."""

        def report(step: int, loss: float) -> None:
            if step % 50 == 0:
                self.log(f"{name} step {step}/{recipe.steps} loss {loss:.4f}")
            if step % 500 == 499 or step == recipe.steps - 1:
                held_out, top1 = evaluate(model, self.dev, self.pad)
                self.log(f"{name} step {step + 1}: held-out loss {held_out:.4f}, top-1 {top1:.4f}")

        train_stage(self._path(name), model, rows, recipe, self.pad, loss_of, report)

    def _path(self, name: str) -> Path:
        return self.work / f"{name}.safetensors"


def make_turns(domain: Domain, work: Path, config: BuildConfig) -> list[Turn]:
    """Read all chat turns from `work`/turns.jsonl, or make them."""
    path = work / "turns.jsonl"
    if not path.exists():
        write_lines(path, map(dataclasses.asdict, domain.turns(config.seed, config.packages)))
    return [Turn(**row) for row in read_lines(path)]


def make_tokenizer(domain: Domain, work: Path, turns: list[Turn], seed: int) -> Any:
    """Train the tokenizer on training turns only."""
    path = work / "tokenizer"
    if not (path / "tokenizer_config.json").exists():
        train = [turn for turn in turns if turn.split == "train"]
        sample = random.Random(seed).sample(train, min(TOKENIZER_TEXTS, len(train)))
        texts = (f"{t.prompt}\n{t.answer}" for t in sample)
        train_tokenizer(texts, domain.shape.vocab_size, MAX_POSITION).save_pretrained(str(path))
    return AutoTokenizer.from_pretrained(str(path))


def token_rows(turns: Sequence[Turn], tokenizer: Any) -> list[TokenRow]:
    """Tokenize turns by the chat template; the answer ends with the end token."""
    user, assistant, end = (tokenizer.convert_tokens_to_ids(token) for token in (USER, ASSISTANT, END))
    prompts = tokenizer([turn.prompt for turn in turns], add_special_tokens=False)["input_ids"]
    answers = tokenizer([turn.answer for turn in turns], add_special_tokens=False)["input_ids"]
    return [TokenRow((user, *p, end, assistant, *a, end), len(p) + 3) for p, a in zip(prompts, answers, strict=True)]


def fitting(turns: Sequence[Turn], tokenizer: Any) -> list[TokenRow]:
    """Return the rows of `turns` that are short enough to train on."""
    return [row for row in token_rows(turns, tokenizer) if len(row.ids) <= MAX_ROW_TOKENS]


def training_rows(domain: Domain, turns: list[Turn], tokenizer: Any, seed: int) -> list[TokenRow]:
    """Return the training split, thinned to the domain's shares of tasks and to rows that fit."""
    rng, share = random.Random(seed), domain.task_share
    return fitting([t for t in turns if t.split == "train" and rng.random() < share.get(t.task, 1.0)], tokenizer)


def export_model(model: LlamaModel, directory: Path, tokenizer: Any) -> None:
    """Write a transformers directory in bf16, with the tokenizer and its chat template."""
    config = model.config
    exported = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            max_position_embeddings=config.max_position,
            rms_norm_eps=config.rms_eps,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    state = model.state_dict()
    exported.load_state_dict({k if k.startswith("lm_head") else f"model.{k}": tensor for k, tensor in state.items()})
    exported.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=False
    )
    exported.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(str(directory))


def distillation_rows(
    path: Path, questions: Sequence[Turn], tokenizer: Any, target: CausalLM, seed: int, log: Callable[[str], None]
) -> list[TokenRow]:
    """Read or generate the target's own answers to training prompts, sampled and greedy."""
    if not path.exists():
        chosen = random.Random(seed + 1).sample(questions, min(DISTIL_PROMPTS, len(questions)))
        prompts = [row.ids[: row.answer_start] for row in fitting(chosen, tokenizer)]
        num_greedy = round(DISTIL_GREEDY_SHARE * len(prompts))
        answers = card.answers_to(target, prompts[:num_greedy], 0.0, seed)
        answers += card.answers_to(target, prompts[num_greedy:], 1.0, seed)
        log(f"{len(answers)} answers of the target's own, {sum(map(len, answers)) / 1e6:.2f} M tokens")
        write_lines(path, zip(prompts, answers, strict=True))
    return [TokenRow((*prompt, *answer), len(prompt)) for prompt, answer in read_lines(path)]


def shipped_prompts(turns: list[Turn], tokenizer: Any, seed: int) -> list[dict[str, str]]:
    """The prompts that ship, with their right answers, task, split, package and licence: SHIPPED_PROMPTS a split, the
    tasks in equal parts, no function twice in a task."""
    rng = random.Random(seed + 2)
    chosen: list[Turn] = []
    for split, count in SHIPPED_PROMPTS.items():
        by_task: dict[str, list[Turn]] = defaultdict(list)
        for turn in turns:
            if turn.split == split:
                by_task[turn.task].append(turn)
        for task in sorted(by_task):
            rng.shuffle(by_task[task])
            wanted = -(-count // len(by_task))
            rows = token_rows(by_task[task][: 4 * wanted], tokenizer)
            short = [t for t, row in zip(by_task[task], rows, strict=False) if len(row.ids) <= MAX_ROW_TOKENS]
            unique = list({turn.key: turn for turn in short}.values())
            chosen += unique[:wanted]
    rng.shuffle(chosen)  # so that the first so many rows of a split are a mix of tasks
    shipped = map(dataclasses.asdict, chosen)
    return [{"id": f"{row['task']}-{row.pop('key')}", **row} for row in shipped]


def card_questions(path: Path, tokenizer: Any) -> list[tuple[str, TokenRow]]:
    """Return held-out prompts for the card: CARD_PROMPTS per task from the shipped test split."""
    test = [turn for turn in read_prompts(path) if turn.split == "test"]
    taken: Counter[str] = Counter()
    questions = []
    for turn, tokens in zip(test, token_rows(test, tokenizer), strict=True):
        taken[turn.task] += 1
        if taken[turn.task] <= CARD_PROMPTS:
            questions.append((turn.task, tokens))
    return questions


def source_versions(sources: Iterable[str]) -> dict[str, str]:
    """Return the installed version of each source package."""
    distributions = packages_distributions()
    found = {name: version(distributions[name][0]) for name in sources if name in distributions}
    return {"stdlib": platform.python_version(), **found}


def write_card(domain: Domain, config: BuildConfig, tokenizer: Any, dev: list[TokenRow]) -> None:
    """Write card.json: the models' scores, and the versions of the packages whose text they learned."""
    questions = card_questions(config.output / "prompts.jsonl", tokenizer)
    models: dict[str, Any] = {name: load_lm(str(config.output / name)) for name in ("target", *domain.drafts)}
    scores = {name: card.score_pair(models["target"], models[name], questions, config.seed) for name in domain.drafts}
    numbers = card.card_numbers(domain.sums, scores)
    numbers["held_out"] = {
        name: dict(zip(("loss", "top1"), evaluate(lm.model, dev, tokenizer.pad_token_id), strict=True))
        for name, lm in models.items()
    }
    write_json(config.output / "card.json", numbers | {"sources": source_versions(domain.sources)}, indent=2)


def read_prompts(path: Path) -> list[Turn]:
    """Read the shipped prompts by their ids."""
    return [Turn(key=row.pop("id"), **row) for row in read_lines(path)]


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_lines(path: Path, rows: Iterable[Any]) -> None:
    """Write JSON lines, atomically."""
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    sys.exit(main_of(BuildConfig, run))
