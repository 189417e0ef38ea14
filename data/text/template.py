"""Chat messages to token ids and loss masks, by the tokenizer's chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftsmith.data.models.loading import load_tokenizer, read_config
from draftsmith.data.store.reading import read_text
from draftsmith.modules.types import InputError

Messages = list[dict[str, str]]
MASK_REMEDY = "Pass --chat-template FILE with {% generation %}...{% endgeneration %} around the assistant's words."


class RowError(ValueError):
    """A row that cannot be used: stages count it, or raise an InputError that names it.

    remedy: what to do; empty if the row itself must be corrected. reason: name under which it is counted.
    """

    def __init__(self, message: str, remedy: str = "", reason: str = "invalid"):
        super().__init__(message)
        self.remedy, self.reason = remedy, reason


def load_chat_tokenizer(target: str, chat_template: Path | None = None) -> Any:
    """Load the target's tokenizer with a chat template: its own, or the one in the file `chat_template`."""
    tokenizer = load_tokenizer(target)
    if chat_template is not None:
        if not Path(chat_template).is_file():
            raise InputError("chat_template", chat_template, "a file with a Jinja template", "Check the path.")
        tokenizer.chat_template = read_text(chat_template, "a Jinja template", "Check the path.")
    if not tokenizer.chat_template:
        remedy = "Pass --chat-template FILE, or choose an instruction-tuned model."
        raise InputError("chat_template", f"none in {target}", "a chat template", remedy)
    return tokenizer


def context_length(target: str) -> int | None:
    """Return the most positions that the target can read; None if its config does not say."""
    raw = read_config(target)
    return (raw.get("text_config") or raw).get("max_position_embeddings")


def check_context(row: int, length: int, max_position: int | None) -> None:
    """Raise InputError for a prompt that leaves no room for an answer."""
    if max_position is not None and length >= max_position:
        expected = f"fewer than the target's context, {max_position}"
        remedy = "Make the prompts for this target: data prompts --overlong drop."
        raise InputError(f"prompt {row}", f"{length} tokens", expected, remedy)


def prompt_ids(tokenizer: Any, messages: Messages) -> list[int]:
    """Tokenize messages up to and including the generation prompt; RowError if the template refuses them."""
    return _apply_template(tokenizer, messages, add_generation_prompt=True)["input_ids"]


def user_turn(tokenizer: Any) -> tuple[list[int], str]:
    """Return the token ids in front of a first user message, and the first word that the template writes behind it.

    Raises:
        InputError: a template that shows the user's words otherwise.
    """
    words = "WORDS"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": words}], tokenize=False, add_generation_prompt=True
    )
    before, found, behind = text.partition(words)
    if not found or not behind.split():
        expected = "a template that shows a user's words, and where they end"
        raise InputError("chat_template", repr(text[-80:]), expected, "Use prompts of your own.")
    return tokenizer(before, add_special_tokens=False)["input_ids"], behind.split()[0]


def supervised_ids(tokenizer: Any, messages: Messages) -> tuple[list[int], list[bool]]:
    """Tokenize a whole conversation; return ids and a mask that is true on the assistant's tokens.

    Raises:
        InputError: a template without generation tags, or a mask that is all zero: training would learn nothing.
        RowError: the template refuses these messages.
    """
    # Without these tags the tokenizer returns a mask of zeros and a warning only.
    template = tokenizer.get_chat_template()
    if "generation" not in template or "endgeneration" not in template:
        raise InputError("chat_template", "no {% generation %} tags", "a template that marks the answers", MASK_REMEDY)
    encoded = _apply_template(tokenizer, messages, return_assistant_tokens_mask=True)
    mask = [bool(value) for value in encoded["assistant_masks"]]
    if not any(mask):
        raise InputError("loss_mask", "all zero", "a mask that covers the assistant's tokens", MASK_REMEDY)
    return encoded["input_ids"], mask


def _apply_template(tokenizer: Any, messages: Messages, **kwargs: Any) -> Any:
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **kwargs)
    except TemplateError as error:
        raise RowError(f"the chat template refuses it: {error}") from error
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
        # Expressions in the template raise these.
        raise RowError(f"the chat template fails on it ({type(error).__name__}: {error})") from error
