"""`python benchmarks/embedded/build.py --output data/embedded`: the models that ship, with their prompts and card.

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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from draftsmith.benchmarks.embedded import card
from draftsmith.benchmarks.embedded.corpus import SOURCES, read_corpus
from draftsmith.benchmarks.embedded.language_model import TokenRow, evaluate
from draftsmith.benchmarks.embedded.models import DRAFTS, MAX_POSITION, TARGET_STAGES, Builder
from draftsmith.benchmarks.embedded.tasks import Turn, turns
from draftsmith.benchmarks.embedded.tokenizer import ASSISTANT, END, USER, train_tokenizer
from draftsmith.data.answering.batched import set_threads
from draftsmith.data.models.loading import load_lm
from draftsmith.data.store.files import make_directory, write_json, write_text
from draftsmith.data.store.writer import sole_writer
from draftsmith.launch.cli import main_of
from draftsmith.modules.layers import LlamaModel
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.targets.llama import LlamaLM

MAX_ROW_TOKENS = 512
TOKENIZER_TEXTS = 20_000
# How often a turn of each task is taken: edits of plentiful kinds are thinned, rare ones repeated.
TASK_SHARE = {"wrap_in_try": 0.45, "rename": 0.8, "remove_type_hints": 0.6, "add_type_hints": 0.8, "complete": 0.4}
SORT_IMPORTS_VARIANTS = 4
DISTIL_PROMPTS = 2_500
DISTIL_GREEDY_SHARE = 0.3  # drafts serve greedy and sampled decoding
SHIPPED_PROMPTS = {"train": 3_240, "dev": 180, "test": 380}
CARD_PROMPTS = 40  # per task, of the shipped test prompts


@dataclass(frozen=True)
class BuildConfig:
    """Where and how the embedded models are built.

    Attributes:
        output: Directory that receives target/, draft/, draft-small/, prompts.jsonl, MODEL_CARD.md and NOTICE.md.
        work: Scratch folder; finished stages in it are not repeated.
        seed: Of the corpus' random parts, the weights and the order of batches.
        num_threads: CPU threads.
    """

    output: Path
    work: Path = Path("runs/embedded")
    seed: int = 0
    num_threads: int = 2


@sole_writer()
def run(config: BuildConfig) -> Path:
    """Build everything, or what is missing of it."""
    set_threads(config.num_threads)
    make_directory(config.work)
    started = time.time()

    def log(text: str) -> None:
        print(f"{time.time() - started:8.0f} s  {text}", flush=True)

    turns = make_turns(config.work, config.seed)
    tokenizer = make_tokenizer(config.work, turns, config.seed)
    rows = training_rows(turns, tokenizer, config.seed)
    dev = fitting([t for t in turns if t.split == "dev" and t.task != "complete"], tokenizer)
    log(f"{len(rows)} training rows, {sum(len(row.ids) for row in rows) / 1e6:.1f} M tokens")
    builder = Builder(config.work, dev, tokenizer.pad_token_id, config.seed, log)
    export_model(builder.target(rows, len(tokenizer)), config.output / "target", tokenizer)
    # From here on the target is what ships: bf16 weights, read back.
    target = load_lm(str(config.output / "target"))
    own_text = distillation_rows(config, turns, tokenizer, target, log)
    assert isinstance(target, LlamaLM)
    for name in DRAFTS:
        draft = builder.draft(name, target.model, rows, own_text)
        export_model(draft, config.output / name, tokenizer)
    write_lines(config.output / "prompts.jsonl", shipped_prompts(turns, tokenizer, config.seed))
    write_card(config, tokenizer, dev, rows)
    log(f"card written to {config.output / 'MODEL_CARD.md'}")
    return config.output


def make_turns(work: Path, seed: int) -> list[Turn]:
    """All chat turns, from `work`/turns.jsonl when it is there."""
    path = work / "turns.jsonl"
    if not path.exists():
        corpus = read_corpus()
        made = turns(corpus, seed)
        blocks_only = dataclasses.replace(corpus, functions=())
        for variant in range(1, SORT_IMPORTS_VARIANTS):
            made += [turn for turn in turns(blocks_only, seed, variant) if turn.split == "train"]
        write_lines(path, map(dataclasses.asdict, made))
    return [Turn(**row) for row in read_lines(path)]


def make_tokenizer(work: Path, turns: list[Turn], seed: int) -> Any:
    """Learned on training turns only."""
    path = work / "tokenizer"
    if not (path / "tokenizer_config.json").exists():
        train = [turn for turn in turns if turn.split == "train"]
        sample = random.Random(seed).sample(train, min(TOKENIZER_TEXTS, len(train)))
        train_tokenizer((f"{t.prompt}\n{t.answer}" for t in sample), MAX_POSITION).save_pretrained(str(path))
    return AutoTokenizer.from_pretrained(str(path))


def token_rows(turns: Sequence[Turn], tokenizer: Any) -> list[TokenRow]:
    """Turns as the chat template writes them; the answer ends with the end token."""
    user, assistant, end = (tokenizer.convert_tokens_to_ids(token) for token in (USER, ASSISTANT, END))
    prompts = tokenizer([turn.prompt for turn in turns], add_special_tokens=False)["input_ids"]
    answers = tokenizer([turn.answer for turn in turns], add_special_tokens=False)["input_ids"]
    return [TokenRow((user, *p, end, assistant, *a, end), len(p) + 3) for p, a in zip(prompts, answers, strict=True)]


def fitting(turns: Sequence[Turn], tokenizer: Any) -> list[TokenRow]:
    """The rows of `turns` that are short enough to train on."""
    return [row for row in token_rows(turns, tokenizer) if len(row.ids) <= MAX_ROW_TOKENS]


def training_rows(turns: list[Turn], tokenizer: Any, seed: int) -> list[TokenRow]:
    """The training split, thinned to TASK_SHARE and to rows that fit."""
    rng = random.Random(seed)
    return fitting([t for t in turns if t.split == "train" and rng.random() < TASK_SHARE.get(t.task, 1.0)], tokenizer)


def export_model(model: LlamaModel, directory: Path, tokenizer: Any) -> None:
    """An ordinary transformers directory in bf16, with the tokenizer and its chat template."""
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
    config: BuildConfig, turns: list[Turn], tokenizer: Any, target: CausalLM, log: Callable[[str], None]
) -> list[TokenRow]:
    """What the target itself answers to training prompts, sampled and greedy; from `work`/own_text.jsonl when there."""
    path = config.work / "own_text.jsonl"
    if not path.exists():
        rng = random.Random(config.seed + 1)
        chosen = rng.sample([t for t in turns if t.split == "train" and t.task != "complete"], DISTIL_PROMPTS)
        prompts = [row.ids[: row.answer_start] for row in fitting(chosen, tokenizer)]
        num_greedy = round(DISTIL_GREEDY_SHARE * len(prompts))
        answers = card.answers_to(target, prompts[:num_greedy], 0.0, config.seed)
        answers += card.answers_to(target, prompts[num_greedy:], 1.0, config.seed)
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


def card_questions(path: Path, tokenizer: Any) -> list[card.HeldOutPrompt]:
    """Held-out prompts for the card: CARD_PROMPTS a task from the shipped test split."""
    rows = [row for row in read_lines(path) if row["split"] == "test"]
    test = [Turn(key=row.pop("id"), **row) for row in rows]
    taken: Counter[str] = Counter()
    questions = []
    for turn, tokens in zip(test, token_rows(test, tokenizer), strict=True):
        taken[turn.task] += 1
        if taken[turn.task] <= CARD_PROMPTS:
            start = tokens.answer_start
            questions.append(card.HeldOutPrompt(turn.task, tokens.ids[:start], tokens.ids[start:]))
    return questions


def source_versions() -> dict[str, str]:
    """Installed version of each source package."""
    found = {"stdlib": platform.python_version()}
    for package in SOURCES:
        try:
            found.setdefault(package, version({"yaml": "pyyaml"}.get(package, package)))
        except PackageNotFoundError:
            continue
    return found


def write_card(config: BuildConfig, tokenizer: Any, dev: list[TokenRow], rows: list[TokenRow]) -> None:
    """MODEL_CARD.md, its numbers as card.json, and NOTICE.md."""
    questions = card_questions(config.output / "prompts.jsonl", tokenizer)
    models: dict[str, Any] = {name: load_lm(str(config.output / name)) for name in ("target", *DRAFTS)}
    scores = {name: card.score_pair(models["target"], models[name], questions, config.seed) for name in DRAFTS}
    held_out = {
        name: dict(zip(("loss", "top1"), evaluate(lm.model, dev, tokenizer.pad_token_id), strict=True))
        for name, lm in models.items()
    }
    stages = {name: recipe for name, (_, recipe) in TARGET_STAGES.items()}
    for name, draft in DRAFTS.items():
        stages |= {f"{name}, start": draft.start} if draft.start is not None else {}
        stages |= {f"{name}, distilled": draft.distil}
    num_tokens = sum(len(row.ids) for row in rows)
    facts = card.BuildFacts(source_versions(), len(rows), num_tokens, stages, held_out)
    samples = card.verbatim_samples(models["target"], tokenizer, questions, config.seed)
    numbers = card.card_numbers(held_out, scores)
    write_text(config.output / "MODEL_CARD.md", card.render(facts, numbers, samples))
    write_json(config.output / "card.json", numbers, indent=2)
    write_text(config.output / "NOTICE.md", card.notice(facts))


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_lines(path: Path, rows: Iterable[Any]) -> None:
    """JSON lines, whole or not at all."""
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    sys.exit(main_of(BuildConfig, run))
