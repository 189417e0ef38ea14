"""`draftsmith decode`: one answer, streamed, with drafted tokens and the target's own in two colors."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable

from rich.text import Text

from draftsmith.data.console import SafeConsole, add_result, log_note
from draftsmith.data.text.conversations import well_formed
from draftsmith.data.text.template import RowError
from draftsmith.eval.answer import Answer, TokenStream, encode_messages
from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.bench.runner import load_run
from draftsmith.eval.settings import DecodeConfig
from draftsmith.modules.decoding.loop import Generation
from draftsmith.modules.drafters import MODEL
from draftsmith.modules.drafters.method_names import LabeledMethod, parse_methods
from draftsmith.modules.drafters.methods import by_drafter, chain_drafters
from draftsmith.modules.finite import name_nonfinite
from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.pretrained.heads import head_config
from draftsmith.modules.types import InputError, check_ranges, without_controls

DRAFTED, OWN = "green", "yellow"


def run(config: DecodeConfig) -> Generation:
    """Stream the answer to standard output.

    Raises:
        InputError: bad options or models, or a prompt that the chat template or the context does not take.
    """
    named = choose_method(config)
    params = config.sampling
    check_ranges(config, max_new_tokens=1, num_threads=1)
    config, target = config.open(config.target)
    prompt = encode_prompt(config, target)
    models = load_run(config, target, [named], [BenchPrompt("on the command line", prompt)], [params])
    drafter = named.method.build(models)

    console = SafeConsole(highlight=False, soft_wrap=True)
    legend = Text.assemble((f"{named.label}: ", "dim"), ("drafted and accepted", DRAFTED))
    log_note(legend.append(" · ", "dim").append("the target's own", OWN).append("\n"))
    stream = TokenStream(target.tokenizer)
    answer: list[str] = []

    def show(pieces: Iterable[tuple[str, bool]]) -> None:
        for piece, drafted in pieces:
            answer.append(piece)
            if console.is_terminal:
                console.print(Text(without_controls(piece), DRAFTED if drafted else OWN), end="")
            else:
                print(piece, end="", flush=True)

    decoded = Answer(models.target, drafter, prompt, params, config.max_new_tokens, config.seed, ends=models.ends)
    start = time.perf_counter()
    with name_nonfinite(["on the command line"]):
        for done in decoded:
            show(stream.push(done.tokens, done.num_accepted))
    elapsed_s, generation, totals = time.perf_counter() - start, decoded.generation, decoded.totals
    show(stream.finish())
    console.print()

    counts = {"tau": totals.tau, "target_calls": totals.num_target_calls, "accepted": totals.num_accepted}
    counts |= {"drafted": totals.num_draft_tokens, "tokens": totals.num_tokens, "wall_s": elapsed_s}
    add_result(method=named.label, answer="".join(answer), ended=generation.ended, **counts)
    why = "ended by itself" if generation.ended else "cut at the limit"
    footer = (
        f"{totals.num_tokens} tokens ({why}), tau {totals.tau:.2f} ({totals.num_target_calls} target calls, "
        f"{totals.num_accepted} of {totals.num_draft_tokens} drafted tokens accepted), "
        f"{totals.num_tokens / elapsed_s:.1f} tokens/s"
    )
    log_note(Text(f"\n{footer}", "dim"))
    return generation


def choose_method(config: DecodeConfig) -> LabeledMethod:
    """Return the requested method; `auto` drafts chains with what was passed, a head before a draft model."""
    label = config.method
    if label == "auto":
        # The last one: `chain_drafters` lists the draft model before heads.
        drafters = [name for name in chain_drafters() if name in config.drafters]
        if not drafters:
            label = "ar"
        elif config.acceptance is None:
            label = "online" + by_drafter(drafters[-1])
        else:
            # The acceptance head fits one of several drafters: the one that it was trained for.
            drafter = drafters[-1] if len(drafters) == 1 else head_config(config.acceptance).get("drafter") or MODEL
            label = "specdec++" + by_drafter(drafter)
    named = parse_methods(label)
    if len(named) > 1:
        raise InputError("method", repr(label), "one method", "To compare several use `draftsmith eval bench`.")
    return named[0]


def encode_prompt(config: DecodeConfig, target: Checkpoint) -> list[int]:
    """Return the prompt's token ids."""
    text = config.prompt
    if text == "-":
        log_note("reading the prompt from standard input, up to its end")
    try:
        # Windows' pipes begin with a byte-order mark.
        text = well_formed(sys.stdin.read().removeprefix("\ufeff") if text == "-" else text, "prompt")
    except (RowError, UnicodeDecodeError) as error:
        raise InputError("prompt", error, "text in UTF-8", "Correct it.") from error
    if not text.strip():
        raise InputError("prompt", "no text", "a prompt", 'Write it after the command: draftsmith decode "..."')
    if config.raw:
        return list(target.tokenizer(text)["input_ids"])
    system = [{"role": "system", "content": config.system}] if config.system else []
    return encode_messages(target, [*system, {"role": "user", "content": text}])
