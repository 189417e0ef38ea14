"""`draftsmith embedded build`: make the embedded pair again, from the installed packages' code to the model card.

Stages write into a work folder and are skipped when their file is there, so a killed build goes on where it was. Steps
and seeds are fixed; the installed versions of the source packages are the only other input, and the card records them.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftsmith.data.embedded.tasks import Turn
    from draftsmith.modules.layers import LlamaModel
    from draftsmith.train.language_model import Recipe, TokenRow

MAX_POSITION = 1024
MAX_ROW_TOKENS = 512
TOKENIZER_TEXTS = 20_000
# How often a turn of each task is taken: edits of plentiful kinds are thinned, rare ones repeated.
TASK_SHARE = {"wrap_in_try": 0.45, "rename": 0.8, "remove_type_hints": 0.6, "add_type_hints": 0.8, "complete": 0.4}
SORT_IMPORTS_VARIANTS = 4


@dataclass(frozen=True)
class BuildConfig:
    """Where and how the embedded pair is built.

    output: directory that receives target/, draft/, draft-small/, prompts.jsonl and MODEL_CARD.md.
    work: scratch folder; finished stages in it are not repeated.
    seed: of the corpus' random parts, the weights and the order of batches.
    num_threads: CPU threads.
    """

    output: Path
    work: Path = Path("runs/embedded")
    seed: int = 0
    num_threads: int = 2


def stages() -> dict[str, tuple[int, Recipe]]:
    """Name -> (layers, recipe). Each grows from the one before: depth is cheap to add once the rest has learned."""
    from draftsmith.train.language_model import Recipe

    return {
        "seedling": (2, Recipe(steps=3600, min_lr_fraction=0.2, seed=1)),
        "sapling": (6, Recipe(steps=900, decay_from=1.0 - 1e-9, lr=3e-3, seed=2)),
        "target": (12, Recipe(steps=2600, decay_from=0.3, lr=3e-3, min_lr_fraction=0.03, seed=3)),
    }


def make_turns(work: Path, seed: int) -> list[Turn]:
    """All chat turns, from `work`/turns.jsonl when it is there."""
    from draftsmith.data.embedded.corpus import read_corpus
    from draftsmith.data.embedded.tasks import Turn, turns

    path = work / "turns.jsonl"
    if not path.exists():
        corpus = read_corpus()
        made = turns(corpus, seed)
        for variant in range(1, SORT_IMPORTS_VARIANTS):
            blocks_only = dataclasses.replace(corpus, functions=())
            made += [turn for turn in turns(blocks_only, seed, variant) if turn.split == "train"]
        _write_atomically(path, "".join(json.dumps(dataclasses.asdict(turn)) + "\n" for turn in made))
    return [Turn(**json.loads(line)) for line in path.read_text().splitlines()]


def make_tokenizer(work: Path, turns: list[Turn], seed: int) -> Any:
    """Learned on training turns only."""
    from transformers import AutoTokenizer

    from draftsmith.data.embedded.tokenizer import train_tokenizer

    path = work / "tokenizer"
    if not (path / "tokenizer_config.json").exists():
        train = [turn for turn in turns if turn.split == "train"]
        sample = random.Random(seed).sample(train, min(TOKENIZER_TEXTS, len(train)))
        train_tokenizer((f"{t.prompt}\n{t.answer}" for t in sample), MAX_POSITION).save_pretrained(str(path))
    return AutoTokenizer.from_pretrained(str(path))


def token_rows(turns: list[Turn], tokenizer: Any) -> list[TokenRow]:
    """Turns as the chat template writes them; the answer ends with the end token."""
    from draftsmith.data.embedded.tokenizer import ASSISTANT, END, USER
    from draftsmith.train.language_model import TokenRow

    user, assistant, end = (tokenizer.convert_tokens_to_ids(token) for token in (USER, ASSISTANT, END))
    prompts = tokenizer([turn.prompt for turn in turns], add_special_tokens=False)["input_ids"]
    answers = tokenizer([turn.answer for turn in turns], add_special_tokens=False)["input_ids"]
    return [TokenRow((user, *p, end, assistant, *a, end), len(p) + 3) for p, a in zip(prompts, answers, strict=True)]


def training_rows(turns: list[Turn], tokenizer: Any, seed: int) -> list[TokenRow]:
    """The training split, thinned to TASK_SHARE and to rows that fit."""
    rng = random.Random(seed)
    chosen = [t for t in turns if t.split == "train" and rng.random() < TASK_SHARE.get(t.task, 1.0)]
    return [row for row in token_rows(chosen, tokenizer) if len(row.ids) <= MAX_ROW_TOKENS]


def train_target(config: BuildConfig, turns: list[Turn], tokenizer: Any, log: Callable[[str], None]) -> LlamaModel:
    """seedling -> sapling -> target, each saved to `work`."""
    import torch

    from draftsmith.modules.layers import LlamaModel
    from draftsmith.train.language_model import batches, evaluate, fit, grow, init_weights, next_token_loss

    rows = training_rows(turns, tokenizer, config.seed)
    dev_turns = [t for t in turns if t.split == "dev" and t.task != "complete"]
    dev = [row for row in token_rows(dev_turns, tokenizer) if len(row.ids) <= MAX_ROW_TOKENS]
    log(f"{len(rows)} training rows, {sum(len(row.ids) for row in rows) / 1e6:.1f} M tokens")
    torch.manual_seed(config.seed)
    model: LlamaModel | None = None
    for name, (num_layers, recipe) in stages().items():
        if model is None:
            model = LlamaModel(architecture(len(tokenizer), num_layers))
            init_weights(model, config.seed)
        else:
            model = grow(model, num_layers, config.seed + num_layers)
        path = config.work / f"{name}.safetensors"
        if not path.exists():

            def report(step: int, loss: float, name: str = name, model: LlamaModel = model, recipe: Recipe = recipe):
                if step % 50 == 0:
                    log(f"{name} step {step}/{recipe.steps} loss {loss:.4f}")
                if step % 500 == 499:
                    held_out = evaluate(model, dev, tokenizer.pad_token_id)
                    log(f"{name} step {step + 1} held-out loss {held_out[0]:.4f} top-1 {held_out[1]:.4f}")
                    save_weights(model, config.work / f"{name}.partial.safetensors")

            fit(model, batches(rows, recipe, tokenizer.pad_token_id), recipe, next_token_loss, report)
            save_weights(model, path)
        load_weights(model, path)
    assert model is not None
    return model


def architecture(vocab_size: int, num_layers: int) -> Any:
    """Llama with tied embeddings; narrow and deep, so that a draft of few layers is cheap beside it."""
    from draftsmith.modules.layers import LlamaConfig

    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=352,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=4,
        head_dim=32,
        max_position=MAX_POSITION,
        tie_embeddings=True,
    )


def save_weights(model: LlamaModel, path: Path) -> None:
    """One safetensors file, complete or absent."""
    from safetensors.torch import save_file

    partial = path.with_name(path.name + ".tmp")
    save_file({k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}, partial)
    partial.replace(path)


def load_weights(model: LlamaModel, path: Path) -> None:
    """Inverse of `save_weights`; the tied lm_head follows the embedding."""
    from safetensors.torch import load_file

    model.load_state_dict(load_file(path), strict=False)


def _write_atomically(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".tmp")
    partial.write_text(text)
    partial.replace(path)
