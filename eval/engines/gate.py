"""`draftsmith check --engine vllm`: the real engine serves a directory, and does with it what our own chain does."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from draftsmith.data.console import log_note
from draftsmith.data.export import check
from draftsmith.data.export.check import differences as head_differences
from draftsmith.data.export.check import foreign_package, hashes_of
from draftsmith.data.export.directory import package_directory
from draftsmith.data.export.states import facts_of
from draftsmith.data.heads.directory import build_head, load_head, stored_tensors
from draftsmith.data.models.hub import EMBEDDED, model_directory
from draftsmith.data.models.loading import check_same_tokenizer, load_lm
from draftsmith.data.settings import MODEL
from draftsmith.data.text.template import load_chat_tokenizer, prompt_ids
from draftsmith.eval.bench.prompts import BenchPrompt, read_prompts
from draftsmith.eval.engines.chain import OurChain, margin, misread
from draftsmith.eval.engines.process import running
from draftsmith.eval.engines.settings import EngineCheckConfig
from draftsmith.eval.engines.show import DIRECTORY, TEMPLATE, Compared, Located, Verdict, show
from draftsmith.eval.engines.vllm import ANSWERED_S, ENVIRONMENT, VllmClient, engine_python, server_words
from draftsmith.modules.formats import formats
from draftsmith.modules.formats.base import ForeignHead, Package, Served, TargetFacts
from draftsmith.modules.formats.detect import causal_lm, detect, named_format
from draftsmith.modules.formats.vllm import command
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import InputError

DRAFTED = 5
QUESTION = "What is two and two?"
TRIED = 6  # prompts on which other readings of the head are tried


@dataclass(frozen=True)
class Ours:
    """The drafter as we have it. drafter: a head of this kind, or a model. package: the directory, of a head."""

    kind: str
    drafter: Any
    package: Package | None = None


def run(config: EngineCheckConfig) -> int:
    """0 when nothing differs, else 1.

    Raises:
        InputError: as of `data.export.check`; no engine, or one that does not start, answer or count.
    """
    if config.serves:
        return check_served(config)
    for name in ("engine_python", "server", "prompts"):
        if getattr(config, name) is not None:
            raise InputError(name, getattr(config, name), "--engine vllm, which reads it", "Add it, or leave this out.")
    return check.run(config)


def check_served(config: EngineCheckConfig) -> int:
    """The same of a whole engine."""
    if config.target is None:
        raise InputError("target", "none", "the target", "Pass --target.")
    if config.server is not None and config.engine_python is not None:
        found = "--server and --engine-python"
        raise InputError("server", found, "a server that runs, or what starts one", "Pass one of them.")
    if config.server is None:
        engine_python(config.engine_python)
    prompts = chosen_prompts(config, config.target)
    target = load_lm(config.target, **config.loading)
    facts = facts_of(config.target, target)
    ours = our_drafter(config, target, facts)
    with client_of(config, target, ours, prompts) as client:
        before, _ = client.counts()
        chain = OurChain(target, len(before.by_place), config.max_new_tokens)
        check_room(config, chain, prompts, min(target.info.max_position, client.about.length or 2**62))
        log_note(f"{client.url}: asking {len(prompts)} prompts, each for at most {ANSWERED_S:g} s")
        theirs = [client.answer(number, prompt.prompt_ids) for number, prompt in enumerate(prompts)]
        template = template_difference(client, config.target)
        about = client.about
    own = [chain.answer(prompt.prompt_ids, ours.kind, ours.drafter) for prompt in prompts]
    rows = [Compared(prompt.id, *pair) for prompt, *pair in zip(prompts, theirs, own, strict=True)]
    located = []
    if any(not row.same_counts for row in rows):
        located.append(located_drafts(ours, chain, prompts, rows, facts))
    elif config.head is not None and (found := differences(ours, facts)):
        # A head that knows little drafts as well with other layers as with its own.
        located.append(Located(DIRECTORY, f"is another head for vLLM than --head: {found}"))
    located += [
        located_text(target, prompt, row) for prompt, row in zip(prompts, rows, strict=True) if not row.same_text
    ]
    located += [] if template is None else [Located(TEMPLATE, template)]
    verdict = Verdict(str(config.directory), f"vLLM {about.version}", str(config.loading["dtype"]), rows, located)
    show(verdict)
    return 0 if verdict.equal else 1


def chosen_prompts(config: EngineCheckConfig, target: str) -> list[BenchPrompt]:
    source, split = config.prompts, config.split
    if source is None:
        if not target.startswith(EMBEDDED):
            raise InputError("prompts", "none", "held-out prompts of the target's", "Pass --prompts.")
        source, split = f"{EMBEDDED}prompts", split or "test"
    return read_prompts(source, target, split, limit=config.limit)


def our_drafter(config: EngineCheckConfig, target: CausalLM, facts: TargetFacts) -> Ours:
    """The head that the directory was exported from, else the directory as its own system means it; or a model.

    Raises:
        InputError: neither a head that vLLM serves nor a model.
    """
    assert config.target is not None
    path = str(config.directory)
    package = foreign_package(config.directory)
    foreign = ForeignHead.of(package)
    if causal_lm(foreign):
        check_same_tokenizer(config.target, path, MODEL)
        return Ours(MODEL, load_lm(path, **config.loading))
    named = config.format in {name for name, _ in formats()}
    format = named_format(config.format, foreign) if named else detect(foreign)
    if ("vllm", format.kind) not in formats():
        raise InputError(
            "directory", f"a head of kind {format.kind}", "one that vLLM serves", "Check it with --format."
        )
    if config.head is not None:
        return Ours(format.kind, load_head(config.head, target, kind=format.kind), package)
    parsed = format.read(package, facts)
    return Ours(format.kind, placed(target, format.kind, parsed.config, parsed.state), package)


def placed(target: CausalLM, kind: str, config: Any, state: Mapping[str, Tensor]) -> Any:
    """A head of these settings and weights, ready to draft for the target."""
    return build_head(kind, config, state).to(target.device, target.dtype).eval().requires_grad_(False)


@contextmanager
def client_of(
    config: EngineCheckConfig, target: CausalLM, ours: Ours, prompts: Sequence[BenchPrompt]
) -> Iterator[VllmClient]:
    """A server with the target and the directory: the one that was named, or one that is started, and ended."""
    assert config.target is not None
    if config.server is not None:
        client = VllmClient(config.server, config.target, config.max_new_tokens)
        drafted = len(client.counts()[0].by_place)
        if config.num_drafted not in (0, drafted):
            found = f"{config.num_drafted} tokens a round"
            raise InputError("num_drafted", found, f"{drafted}, as the server drafts", "Leave it out.")
        yield client
        return
    chain = OurChain(target, config.num_drafted or DRAFTED, config.max_new_tokens)
    check_room(config, chain, prompts, target.info.max_position)
    directory = package_directory(str(config.directory)).absolute()
    served = Served(str(model_directory(config.target).absolute()), str(directory), chain.length)
    printed = command(served, "draft_model") if ours.kind == MODEL else formats()["vllm", ours.kind].serve(served)
    longest = min(max(chain.room(prompt.prompt_ids) for prompt in prompts) + chain.length, target.info.max_position)
    words = server_words(engine_python(config.engine_python), printed, config.loading["dtype"], longest)
    with running(words, ENVIRONMENT) as url:
        yield VllmClient(url, config.target, config.max_new_tokens)


def check_room(config: EngineCheckConfig, chain: OurChain, prompts: Sequence[BenchPrompt], most: int) -> None:
    """Raises InputError for prompts whose last drafts do not fit a context: the engine and we would cut them apart."""
    longest = max(prompts, key=lambda prompt: len(prompt.prompt_ids))
    if chain.room(longest.prompt_ids) > most:
        found = f"{len(longest.prompt_ids)} tokens in prompt {longest.id}"
        expected = f"at most {most - chain.room([])}: the context is {most}"
        raise InputError("prompts", found, expected, f"Lower --max-new-tokens {config.max_new_tokens}, or shorten it.")


def template_difference(client: VllmClient, target: str) -> str | None:
    """Where the server's own template makes other tokens of a question than the target's; None where it does not, or
    one of the two has none."""
    tokenizer = load_chat_tokenizer(target)
    if not tokenizer.chat_template:
        return None
    ours, theirs = prompt_ids(tokenizer, [{"role": "user", "content": QUESTION}]), client.templated(QUESTION)
    if theirs is None or theirs == ours:
        return None
    place = first_difference(ours, theirs)
    few = slice(place, place + 4)
    return f"makes other tokens of a question from place {place} on: {theirs[few]}, here {ours[few]}"


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """The first place at which two unequal sequences differ."""
    return next(place for place, (a, b) in enumerate(itertools.zip_longest(one, other)) if a != b)


def located_text(target: CausalLM, prompt: BenchPrompt, row: Compared) -> Located:
    """Where an answer differs, and by how little the target prefers its own token there."""
    ours, theirs = row.ours.tokens, row.theirs.tokens
    place = first_difference(ours, theirs)
    if place >= min(len(ours), len(theirs)):
        return Located(f"text of {row.id}", f"{len(theirs)} tokens, here {len(ours)}: another end token or limit")
    apart = margin(target, [*prompt.prompt_ids, *ours[:place]], ours[place], theirs[place])
    why = "a tie, which another order of sums breaks" if abs(apart) < 1e-3 else "another target, type or kernel"
    found = f"from token {place} on: {theirs[place]}, here {ours[place]}"
    return Located(f"text of {row.id}", f"{found}, whose logit is {apart:.2g} larger ({why})")


def located_drafts(
    ours: Ours, chain: OurChain, prompts: Sequence[BenchPrompt], rows: Sequence[Compared], facts: TargetFacts
) -> Located:
    """Why the drafts are others: readings of the head by which our chain counts what the engine does."""
    if ours.kind == MODEL:
        return Located("drafts", "those of another draft model, type or kernel: a whole model has no layout to misread")
    # Prompts whose text is another say nothing about drafts.
    used = [pair for pair in zip(prompts, rows, strict=True) if pair[1].same_text]
    used = sorted(used, key=lambda pair: pair[1].same_counts)[:TRIED]
    target, found, tried = chain.target, list[str](), list[str]()
    for name, config, state in readings(ours, target, facts):
        head = placed(target, ours.kind, config, state)
        counted = [chain.answer(prompt.prompt_ids, ours.kind, head).counts for prompt, _ in used]
        (found if used and counted == [row.theirs.counts for _, row in used] else tried).append(name)
    differ = differences(ours, facts)
    held = f" The directory is another head for vLLM than ours: {differ}." if differ else ""
    if found:
        return Located("drafts", f"are exactly what our chain gives with {' or with '.join(found)}.{held}")
    return Located("drafts", f"are not explained by any of: {'; '.join(tried) or 'nothing to try'}.{held}")


def readings(ours: Ours, target: CausalLM, facts: TargetFacts) -> Iterator[tuple[str, Any, Mapping[str, Tensor]]]:
    """Names, configs and tensors of what the engine may take the head for."""
    head: Any = ours.drafter
    state = stored_tensors(head)
    yield from misread(head.config, state, facts.raw, target.info.num_layers)
    try:
        assert ours.package is not None
        parsed = formats()["vllm", ours.kind].read(ours.package, facts)
    except InputError:  # then vLLM would not have served it
        return
    kept = dataclasses.replace(
        parsed.config, llama=dataclasses.replace(parsed.config.llama, max_position=head.config.max_position)
    )
    yield "the head of the directory by vLLM's rules", kept, parsed.state


def differences(ours: Ours, facts: TargetFacts) -> str:
    """What vLLM would hold in memory that is not in our head, a few of it; nothing of a model."""
    if ours.package is None:
        return ""
    try:
        theirs = formats()["vllm", ours.kind].read(ours.package, facts)
    except InputError as error:
        return str(error)
    config, hashes = dataclasses.asdict(ours.drafter.config), hashes_of(stored_tensors(ours.drafter))
    found = [*theirs.problems, *head_differences(config, hashes, theirs)]
    return "; ".join(f"{problem.where}: {problem.text}" for problem in found[:4])
