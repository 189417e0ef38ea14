"""Models whose hidden states heads read, and real text of them to run heads on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from draftsmith.data.engines.own import generate_all
from draftsmith.data.engines.served_target import load_target
from draftsmith.eval.answer import encode_messages
from draftsmith.eval.diagnose.drafts import answered
from draftsmith.modules.formats.base import TargetFacts
from draftsmith.modules.pretrained.checkpoint import Checkpoint, checkpoint_of
from draftsmith.modules.pretrained.heads import FrozenDrafter, load_drafter
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.targets.outer import OuterLM
from draftsmith.modules.types import InputError, SamplingParams

# Editing tasks, which any model can do and answers at some length: a head is measured on its target's own text.
PROMPTS = (
    """Remove the type hints:

def total(prices: list[float], rate: float = 0.2) -> float:
    subtotal = sum(prices)
    if rate < 0:
        raise ValueError("the rate must not be negative")
    return subtotal * (1 + rate)""",
    """Rename items to records:

def first_match(items, wanted):
    for number, item in enumerate(items):
        if item.name == wanted:
            return number
    return len(items)""",
    """Add the docstring: Close the file and forget its path.

def close(self):
    if self._file is not None:
        self._file.close()
    self._file = None
    self.path = None""",
)
MAX_NEW_TOKENS = 80


@dataclass(frozen=True)
class StateSource:
    """A model whose hidden states a head reads.

    drafter: the model, with a drafting head on it if an acceptance head reads that one's states. facts: of the model.
    """

    drafter: FrozenDrafter
    facts: TargetFacts

    @property
    def checkpoint(self) -> Checkpoint:
        """The files of the model."""
        return checkpoint_of(self.drafter.lm)

    @property
    def path(self) -> str:
        """The model as the user named it."""
        return self.checkpoint.path


def state_source(predicts: bool, target: str | None, draft: str | Path | None, loading: Any) -> StateSource:
    """Load what a head reads: the target, or for an acceptance head, which predicts, the draft.

    draft: a model, or the directory of a drafting head for the target. loading: arguments of `load_target`.

    Raises:
        InputError: a model that is needed was not given.
    """

    def named_target() -> CausalLM:
        if target is None:
            raise InputError("target", "none", "the target", "Pass --target.")
        return load_target(target, **loading)

    if not predicts:
        lm = named_target()
        return StateSource(FrozenDrafter(lm, lm.info.identity), facts_of(lm))
    assert draft is not None
    # A drafting head brings the target with it; a draft model is read alone.
    drafter = load_drafter(draft, named_target, lambda path: load_target(path, **{**loading, "server": None}))
    # An acceptance head reads states alone.
    return StateSource(drafter, checkpoint_of(drafter.lm).facts)


def facts_of(lm: CausalLM) -> TargetFacts:
    """Return what formats need to know of a loaded model.

    The tables are the model's own weights in the type it was loaded in, on the CPU, as other systems read them from its
    files; `lm.embed` may scale them.
    """
    if isinstance(lm, OuterLM):
        embeddings, bias = lm.weights.embeddings, lm.weights.bias
    else:
        model = cast(Any, lm).model  # a LlamaModel, or one of transformers
        embed = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else model.embed_tokens
        output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else model.lm_head
        embeddings, bias = embed.weight, getattr(output, "bias", None)
    left_out = {"softcap": lm.readout.softcap, "bias of lm_head": bias}
    named = " and ".join(name for name, value in left_out.items() if value is not None)
    facts, tables = checkpoint_of(lm).facts, (embeddings.detach().cpu(), lm.lm_head_weight().cpu())
    return TargetFacts(facts.raw, *tables, lm.readout.scale, named)


def answered_prompts(lm: CausalLM, longest: int) -> list[dict[str, Any]]:
    """Let the model answer PROMPTS greedily; return input_ids and loss_mask of the texts.

    longest: most tokens of a text.
    """
    longest = min(longest, lm.info.max_position)
    room, checkpoint = min(MAX_NEW_TOKENS, longest // 2), checkpoint_of(lm)
    # By the chat template, if there is one: that is the text that the model is served on.
    encoded = [
        encode_messages(checkpoint, [{"role": "user", "content": text}])
        if checkpoint.tokenizer.chat_template
        else list(checkpoint.tokenizer(text)["input_ids"])
        for text in PROMPTS
    ]
    # The end of a long prompt is cut, so that a head has positions for prompt and answer.
    prompts = [ids[: longest - room] for ids in encoded]
    return answered(prompts, generate_all(lm, prompts, SamplingParams(), room, len(prompts)))
