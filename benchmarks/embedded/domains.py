"""The shipped pairs, each the master of one kind of text: where it comes from, and how its models are trained.

edits: changes of short functions, whose answers repeat most of their prompt. prose: what libraries' documentation says,
whose answers do not. A conclusion about speculative decoding that holds for one need not hold for the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from draftsmith.benchmarks.embedded.corpus import SOURCES
from draftsmith.benchmarks.embedded.language_model import Recipe
from draftsmith.benchmarks.embedded.prose import PROSE_SOURCES, PROSE_TASKS, prose_turns
from draftsmith.benchmarks.embedded.tasks import EDIT_TASKS, HEADLINE_TASKS, Turn, edit_turns
from draftsmith.modules.llama_config import LlamaConfig

MAX_POSITION = 1024


@dataclass(frozen=True)
class Shape:
    """Size of a domain's models; their depth is a stage's."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int

    def config(self, vocab_size: int, num_layers: int) -> LlamaConfig:
        """Llama with tied embeddings; narrow and deep, so that a draft of few layers is cheap beside it. vocab_size: of
        the tokenizer as it came out, which has fewer pieces when its text is small."""
        return LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_dim=self.hidden_size // self.num_heads,
            max_position=MAX_POSITION,
            tie_embeddings=True,
        )


@dataclass(frozen=True)
class DraftRecipe:
    """Recipe of a draft model.

    start: training on the corpus, before distillation; None takes the first layers of the target's seedling.
    distil: training on what the target answers.
    """

    num_layers: int
    start: Recipe | None
    distil: Recipe


@dataclass(frozen=True)
class Domain:
    """One kind of text and the pair that is made for it.

    Attributes:
        turns: All chat turns for a seed, of all or of the named source packages.
        sources: Package -> SPDX licence.
        shape: Size of the models.
        target_stages: Name -> (layers, recipe); each grows from the one before, and the last is the target.
        by_heart: A last stage of the target, on the shipped prompts of all splits; None where it is not needed.
        drafts: Name -> recipe.
        sums: Name of a line of the card -> the tasks it sums up.
        task_share: How often a training turn of a task is taken: plentiful ones are thinned.
        unmeasured: Tasks that no held-out loss and no distillation looks at.
    """

    turns: Callable[[int, Sequence[str] | None], list[Turn]]
    sources: Mapping[str, str]
    shape: Shape
    target_stages: Mapping[str, tuple[int, Recipe]]
    drafts: Mapping[str, DraftRecipe]
    sums: Mapping[str, tuple[str, ...]]
    by_heart: Recipe | None = None
    task_share: Mapping[str, float] = field(default_factory=dict)
    unmeasured: tuple[str, ...] = ()


EDITS = Domain(
    turns=edit_turns,
    sources=SOURCES,
    shape=Shape(vocab_size=2048, hidden_size=128, intermediate_size=352, num_heads=4),
    # Depth is cheap to add once the rest has learned to copy.
    target_stages={
        "seedling": (2, Recipe(steps=3600, min_lr_fraction=0.2, seed=1)),
        "sapling": (6, Recipe(steps=900, decay_from=1.0 - 1e-9, lr=3e-3, seed=2)),
        "target": (12, Recipe(steps=900, decay_from=0.3, lr=3e-3, min_lr_fraction=0.03, seed=3)),
    },
    # The two-layer draft stops early on purpose: trained as long as the target's seedling, two layers come to agree
    # with 99 % of its tokens, which no draft of a real model does, and leave nothing to measure.
    drafts={
        "draft": DraftRecipe(
            2,
            start=Recipe(steps=1300, decay_from=0.75, min_lr_fraction=0.1, seed=1),
            distil=Recipe(steps=100, lr=5e-4, warmup=10, decay_from=0.1, min_lr_fraction=0.03, seed=4),
        ),
        "draft-small": DraftRecipe(
            1, start=None, distil=Recipe(steps=400, lr=3e-3, decay_from=0.1, min_lr_fraction=0.03, seed=5)
        ),
    },
    sums={"all edits": EDIT_TASKS, "edits and explain": HEADLINE_TASKS},
    task_share={"wrap_in_try": 0.45, "rename": 0.8, "remove_type_hints": 0.6, "add_type_hints": 0.8, "complete": 0.4},
    unmeasured=("complete",),
)
# So small a model cannot write what it has not read: its greedy text goes round in circles. A large target has read the
# documentation that it is asked about, and so has this one: the splits are for what is trained on its answers.
PROSE = Domain(
    turns=prose_turns,
    sources=PROSE_SOURCES,
    shape=Shape(vocab_size=4096, hidden_size=160, intermediate_size=432, num_heads=5),
    target_stages={
        "seedling": (2, Recipe(steps=2000, min_lr_fraction=0.2, seed=1, bf16=True)),
        "target": (8, Recipe(steps=900, decay_from=0.3, lr=3e-3, min_lr_fraction=0.03, seed=3, bf16=True)),
    },
    drafts={
        "draft": DraftRecipe(
            1, start=None, distil=Recipe(steps=400, lr=3e-3, decay_from=0.1, min_lr_fraction=0.03, seed=5, bf16=True)
        ),
    },
    by_heart=Recipe(steps=500, tokens_per_step=2048, decay_from=0.4, lr=3e-3, min_lr_fraction=0.03, seed=6, bf16=True),
    sums={"all prose": PROSE_TASKS},
)
DOMAINS = {"edits": EDITS, "prose": PROSE}
