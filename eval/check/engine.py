"""`draftsmith check --engine`: serve a head with vLLM or llama.cpp and compare it with our own chain."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.text import Text
from torch import Tensor

from draftsmith.data.console import log_note, print_table, print_text, table_from_cells
from draftsmith.data.engines.llamacpp import server_binary
from draftsmith.data.engines.process import running
from draftsmith.data.stages import ANSWER_S
from draftsmith.data.text.template import prompt_ids
from draftsmith.eval.bench.prompts import BenchPrompt, read_prompts
from draftsmith.eval.check.record import differences as head_differences
from draftsmith.eval.check.record import hashes_of
from draftsmith.eval.check.states import facts_of
from draftsmith.eval.engines.chain import Counted, EngineAnswer, OurChain, accepted_by_place, tau_of
from draftsmith.eval.engines.llamacpp import LlamaCppClient, ServedModels, moved_states
from draftsmith.eval.engines.llamacpp import server_words as llamacpp_words
from draftsmith.eval.engines.vllm import ENVIRONMENT, VllmClient, engine_python, server_words
from draftsmith.eval.settings import SYSTEMS, CheckConfig
from draftsmith.modules.drafters import MODEL
from draftsmith.modules.formats import formats
from draftsmith.modules.formats.base import Package, Served, TargetFacts
from draftsmith.modules.formats.commands import served_kind, vllm_command
from draftsmith.modules.formats.foreign import Names, detect, named_format
from draftsmith.modules.formats.readings import Reading, engine_readings, readings
from draftsmith.modules.llama_config import rope_settings
from draftsmith.modules.pretrained.checkpoint import Checkpoint, check_same_tokenizer, checkpoint_of
from draftsmith.modules.pretrained.directory import foreign_package, gguf_file, package_directory
from draftsmith.modules.pretrained.gguf import is_gguf_model
from draftsmith.modules.pretrained.gguf_writer import widen_gguf
from draftsmith.modules.pretrained.heads import build_head, load_head, stored_tensors
from draftsmith.modules.pretrained.hub import EMBEDDED, resolve_model
from draftsmith.modules.pretrained.models import load_fitting, load_lm
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import InputError

NUM_DRAFTED = 5
QUESTION = "What is two and two?"
MISREAD_PROMPTS = 6  # prompts on which misreadings of the head are tried
TEMPLATE, DIRECTORY = "the server's chat template", "the directory"
MOVED = (
    "llama.cpp reads these prompts in parts, and its EAGLE-3 draft the state of each part's last token in the place of "
    "the one before the part: our chain does the same. Answers are right; a few drafts are worse for it."
)
Located = tuple[str, str]  # what differs, and where or why


@dataclass(frozen=True)
class OurDrafter:
    """The drafter as we have it: a head of a kind, or a model; `package` is the directory of a head."""

    kind: str
    drafter: Any
    package: Package | None = None


@dataclass(frozen=True)
class ComparedPrompt:
    """One prompt, answered by the engine and by us."""

    id: str
    theirs: EngineAnswer
    ours: EngineAnswer

    @property
    def same_text(self) -> bool:
        return self.theirs.tokens == self.ours.tokens

    @property
    def same_counts(self) -> bool:
        if self.theirs.drafted not in (None, self.ours.drafted):
            return False
        if not self.theirs.by_place:
            return self.theirs.accepted == self.ours.accepted
        return self.theirs.counts == self.ours.counts


def run(config: CheckConfig) -> int:
    """Serve a directory and compare it with our chain; return 0 if nothing differs, else 1.

    Raises:
        InputError: the directory is none that the engine serves; the engine does not start, answer or count.
    """
    if config.target is None:
        raise InputError("target", "none", "the target", "Pass --target.")
    if config.server is not None and config.engine_path is not None:
        found = "--server and --engine-path"
        raise InputError("server", found, "a server that runs, or what starts one", "Pass one of them.")
    if config.server is None:
        (engine_python if config.engine == "vllm" else server_binary)(config.engine_path)
    checkpoint = Checkpoint(config.target, config.trust_remote_code)
    prompts = held_out_prompts(config, checkpoint)
    target = load_lm(checkpoint, **config.loading)
    facts = facts_of(target)
    ours = our_drafter(config, target, facts)
    check_served(config, ours)

    # The engine first: our chain has the length that the server drafts.
    connect = vllm_client if config.engine == "vllm" else llamacpp_client
    with connect(config, target, ours, prompts) as client:
        chain = our_chain(config, target, ours, client.num_drafted)
        check_room(config, chain, prompts, min(target.info.max_position, client.length or 2**62))
        log_note(f"{client.url}: asking {len(prompts)} prompts, each for at most {ANSWER_S:g} s")
        theirs = [client.answer(number, prompt.prompt_ids) for number, prompt in enumerate(prompts)]
        tokenizer, version = checkpoint.tokenizer, client.version
        question = prompt_ids(tokenizer, [{"role": "user", "content": QUESTION}]) if tokenizer.chat_template else []
        templated = client.templated(QUESTION) if question else []
    if ours.kind == "eagle3" and any(chain.moved(len(prompt.prompt_ids)) for prompt in prompts):
        print_text(MOVED)
    rows = [
        ComparedPrompt(prompt.id, answer, chain.answer(prompt.prompt_ids, ours.kind, ours.drafter))
        for prompt, answer in zip(prompts, theirs, strict=True)
    ]

    located: list[Located] = []
    if any(not row.same_counts for row in rows):
        located.append(("drafts", locate_drafts(config.engine, ours, chain, prompts, rows, facts)))
    elif config.head is not None and (found := directory_differences(config.engine, ours, facts)):
        # A weak head drafts as well with other layers as with its own, so equal counts do not prove it.
        located.append((DIRECTORY, f"is another head for {SYSTEMS[config.engine]} than --head: {found}"))
    for prompt, row in zip(prompts, rows, strict=True):
        if not row.same_text:
            located.append((f"text of {row.id}", locate_text(target, prompt, row)))
    if question != templated:
        place = first_difference(question, templated)
        some = slice(place, place + 4)
        text = f"makes other tokens of a question from place {place} on: {templated[some]}, here {question[some]}"
        located.append((TEMPLATE, text))
    print_comparison(
        str(config.directory), f"{SYSTEMS[config.engine]} {version}", str(config.loading["dtype"]), rows, located
    )
    return 0 if not located and all(row.same_text and row.same_counts for row in rows) else 1


def held_out_prompts(config: CheckConfig, target: Checkpoint) -> list[BenchPrompt]:
    """Read --data, or the embedded target's own test prompts."""
    source, split = config.data, config.split
    if source is None:
        if not target.path.startswith(EMBEDDED):
            raise InputError("data", "none", "held-out prompts of the target's", "Pass --data.")
        source, split = f"{EMBEDDED}prompts", split or "test"
    return read_prompts(source, target, split, limit=config.limit)


def our_drafter(config: CheckConfig, target: CausalLM, facts: TargetFacts) -> OurDrafter:
    """Load --head, else the directory as its own system reads it; or a draft model.

    Raises:
        InputError: neither a head that the engine serves nor a model.
    """
    path = str(config.directory)
    if config.engine == "llamacpp" and (file := gguf_file(config.directory)) is not None and is_gguf_model(file):
        return OurDrafter(MODEL, load_fitting(str(file), target, **config.loading))
    package = foreign_package(config.directory)
    if Names(package).causal_lm:
        draft = Checkpoint(path)
        check_same_tokenizer(checkpoint_of(target), draft, "directory")
        return OurDrafter(MODEL, load_fitting(draft, target, **config.loading))
    named = config.format in {name for name, _ in formats()}
    format = named_format(config.format, package) if named else detect(package, facts)
    if (config.engine, format.kind) not in formats():
        found = f"a head of kind {format.kind}"
        raise InputError("directory", found, f"one that {SYSTEMS[config.engine]} serves", "Check it with --format.")
    if config.head is not None:
        if package.quantized:
            remedy = "Leave it out: the directory's own weights are compared."
            raise InputError("head", config.head, "none beside weights of 8 bits, to which it is not rounded", remedy)
        head = load_head(config.head, target, kind=format.kind)
        # Rounded as the directory's weights are.
        dtype = next(tensor.dtype for tensor in package.tensors.values() if tensor.ndim == 2)
        return OurDrafter(format.kind, as_served(head.to(dtype).to(target.dtype), target), package)
    parsed = format.read(package, facts)
    return OurDrafter(format.kind, head_for(target, format.kind, parsed.config, parsed.state), package)


def head_for(target: CausalLM, kind: str, config: Any, state: Mapping[str, Tensor]) -> Any:
    """Build a head on the target's device and in its type."""
    head = build_head(kind, config, state).to(target.device, target.dtype).eval().requires_grad_(False)
    return as_served(head, target)


def as_served(head: Any, target: CausalLM) -> Any:
    """Let a head that borrows the target's lm_head draft from its products: no server bounds them, as the target's."""
    if target.readout.softcap is not None and not hasattr(head, "lm_head"):
        readout = dataclasses.replace(target.readout, softcap=None)
        head.output = partial(readout.logits, weight=target.lm_head_weight())
    return head


@contextmanager
def vllm_client(
    config: CheckConfig, target: CausalLM, ours: OurDrafter, prompts: Sequence[BenchPrompt]
) -> Iterator[VllmClient]:
    """Yield a client of --server, or of a server that is started with the target and the directory, and ended."""
    if config.server is not None:
        client = VllmClient(config.server, checkpoint_of(target), config.max_new_tokens)
        if config.num_drafted not in (0, client.num_drafted):
            found = f"{config.num_drafted} drafted tokens"
            raise InputError("num_drafted", found, f"{client.num_drafted}, as the server drafts", "Leave it out.")
        yield client
        return
    chain = our_chain(config, target, ours)
    check_room(config, chain, prompts, target.info.max_position)
    directory = package_directory(str(config.directory)).absolute()
    opened = checkpoint_of(target)
    served = Served(str(opened.directory), str(directory), chain.length, family=opened.facts.served_family)
    printed = vllm_command("draft_model" if ours.kind == MODEL else ours.kind, served)
    longest = min(max(chain.room(prompt.prompt_ids) for prompt in prompts) + chain.length, target.info.max_position)
    words = server_words(engine_python(config.engine_path), printed, config.loading["dtype"], longest)
    with running(words, ENVIRONMENT) as url:
        yield VllmClient(url, opened, config.max_new_tokens)


@contextmanager
def llamacpp_client(
    config: CheckConfig, target: CausalLM, ours: OurDrafter, prompts: Sequence[BenchPrompt]
) -> Iterator[LlamaCppClient]:
    """Yield a client of --server, or of a llama.cpp server that is started, and ended.

    The server that is started reads copies of target and drafter in float32, in which both sides compute the same.
    """
    chain = our_chain(config, target, ours)
    if config.server is not None:
        yield LlamaCppClient(config.server, config.max_new_tokens, num_drafted=chain.length)
        return
    check_room(config, chain, prompts, target.info.max_position)
    drafter = gguf_file(config.directory)
    if drafter is None:
        found, remedy = f"{config.directory} without a .gguf file", "Export the head with --format llamacpp."
        raise InputError("directory", found, "one that llama.cpp serves", remedy)
    named = Path(resolve_model(checkpoint_of(target).path))
    file = config.target_gguf or (named if named.suffix == ".gguf" else None)
    if file is None:
        remedy = "Convert it with llama.cpp's convert_hf_to_gguf.py, and pass the file as --target-gguf."
        raise InputError("target", named, "its GGUF file, which llama.cpp serves", remedy)
    with tempfile.TemporaryDirectory(prefix="draftsmith-engine-") as folder:
        target_file, drafter_file = Path(folder, "target.gguf"), Path(folder, "drafter.gguf")
        widen_gguf(file, target_file)
        widen_gguf(drafter, drafter_file)
        kind = "draft-simple" if ours.kind == MODEL else f"draft-{served_kind(ours.kind)}"
        models = ServedModels(target_file, drafter_file, kind)
        longest = max(chain.room(prompt.prompt_ids) for prompt in prompts) + chain.length
        binary = server_binary(config.engine_path)
        words = llamacpp_words(binary, models, longest, chain.length, exact=True)
        with running(words, {}) as url:
            yield LlamaCppClient(url, config.max_new_tokens, num_drafted=chain.length)


def our_chain(config: CheckConfig, target: CausalLM, ours: OurDrafter, num_drafted: int = 0) -> OurChain:
    """Return our chain of the length that the engine drafts, with the engine's last draft."""
    length = num_drafted or config.num_drafted or getattr(ours.drafter.config, "drafts", NUM_DRAFTED)
    if config.engine == "vllm":
        return OurChain(target, length, config.max_new_tokens)
    shape = checkpoint_of(target).shape
    moved = partial(moved_states, checkpoints=shape.hybrid or shape.windowed)
    return OurChain(target, length, config.max_new_tokens, False, moved)


def check_served(config: CheckConfig, ours: OurDrafter) -> None:
    """Raise InputError for a block drafter that the engine does not serve."""
    drafts = getattr(ours.drafter.config, "drafts", config.num_drafted)
    if config.num_drafted > drafts:
        found = f"{config.num_drafted} drafted tokens"
        raise InputError("num_drafted", found, f"at most {drafts}, as the head's blocks have", "Lower it.")
    if config.engine == "vllm" and ours.kind in ("dflash2", "dspark") and config.server is None:
        words = [str(engine_python(config.engine_path)), "-c", "import triton"]
        if subprocess.run(words, capture_output=True, check=False).returncode:
            expected = "Triton, with which alone vLLM drafts as DSpark and DFlash2"
            remedy = "Pass --server of a vLLM on a GPU, or check the head with --engine llamacpp."
            raise InputError("engine", "a vLLM without Triton", expected, remedy)


def check_room(config: CheckConfig, chain: OurChain, prompts: Sequence[BenchPrompt], context: int) -> None:
    """Raise InputError if a last draft would not fit the context: the engine and we would truncate it differently."""
    longest = max(prompts, key=lambda prompt: len(prompt.prompt_ids))
    if chain.room(longest.prompt_ids) > context:
        found = f"{len(longest.prompt_ids)} tokens in prompt {longest.id}"
        expected = f"at most {context - chain.room([])}: the context is {context}"
        raise InputError("data", found, expected, f"Lower --max-new-tokens {config.max_new_tokens}, or shorten it.")


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    return next(place for place, (a, b) in enumerate(itertools.zip_longest(one, other)) if a != b)


@torch.inference_mode()
def locate_text(target: CausalLM, prompt: BenchPrompt, row: ComparedPrompt) -> str:
    """Return where an answer differs, and by how much the target prefers its own token there."""
    ours, theirs = row.ours.tokens, row.theirs.tokens
    place = first_difference(ours, theirs)
    if place >= min(len(ours), len(theirs)):
        return f"{len(theirs)} tokens, here {len(ours)}: another end token or limit"
    ids = torch.tensor([[*prompt.prompt_ids, *ours[:place]]], device=target.device)
    logits = target.lm_head(target.features(ids)[0, -1:])[0].float()  # [V]
    margin = float(logits[ours[place]] - logits[theirs[place]])
    why = "a tie, which another order of sums breaks" if abs(margin) < 1e-3 else "another target, type or kernel"
    return f"from token {place} on: {theirs[place]}, here {ours[place]}, whose logit is {margin:.2g} larger ({why})"


def locate_drafts(
    engine: str,
    ours: OurDrafter,
    chain: OurChain,
    prompts: Sequence[BenchPrompt],
    rows: Sequence[ComparedPrompt],
    facts: TargetFacts,
) -> str:
    """Return the misreadings of the head with which our chain counts what the engine does."""
    if ours.kind == MODEL:
        return "those of another draft model, type or kernel: a whole model has no layout to misread"
    # Prompts whose text differs say nothing about drafts.
    used = [pair for pair in zip(prompts, rows, strict=True) if pair[1].same_text and pair[1].theirs.by_place]
    used = sorted(used, key=lambda pair: pair[1].same_counts)[:MISREAD_PROMPTS]
    target, head = chain.target, ours.drafter
    state, rope = stored_tensors(head), rope_settings(facts.text)
    candidates = [
        *readings(head.config, state, target.info.num_layers, rope, masks=(0,)),
        *engine_readings(head.config, state, facts.window),
    ]
    assert ours.package is not None
    try:
        parsed = formats()[engine, ours.kind].read(ours.package, facts)
        llama = dataclasses.replace(parsed.config.llama, max_position=head.config.max_position)
        config = dataclasses.replace(parsed.config, llama=llama)
        label = f"the head of the directory by {SYSTEMS[engine]}'s rules"
        candidates.append(Reading("directory", label, config, parsed.state))
    except InputError:  # the engine would not have served it
        pass

    explained, tried = list[str](), list[str]()
    for reading in candidates:
        misread = head_for(target, ours.kind, reading.config, reading.state)
        counts = [chain.answer(prompt.prompt_ids, ours.kind, misread).counts for prompt, _ in used]
        (explained if used and counts == [row.theirs.counts for _, row in used] else tried).append(reading.label)
    differ = directory_differences(engine, ours, facts)
    directory = f" The directory is another head for {SYSTEMS[engine]} than ours: {differ}." if differ else ""
    if explained:
        return f"are exactly what our chain gives with {' or with '.join(explained)}.{directory}"
    return f"are not explained by any of: {'; '.join(tried) or 'nothing to try'}.{directory}"


def directory_differences(engine: str, ours: OurDrafter, facts: TargetFacts) -> str:
    """Return some of what the engine reads from the directory that our head does not have; empty for a model."""
    if ours.package is None:
        return ""
    try:
        theirs = formats()[engine, ours.kind].read(ours.package, facts)
    except InputError as error:
        return str(error)
    config, hashes = dataclasses.asdict(ours.drafter.config), hashes_of(stored_tensors(ours.drafter))
    problems = [*theirs.problems, *head_differences(config, hashes, theirs)]
    return "; ".join(f"{problem.where}: {problem.text}" for problem in problems[:4])


def print_comparison(
    directory: str, engine: str, dtype: str, rows: Sequence[ComparedPrompt], located: Sequence[Located]
) -> None:
    """Print the sums, the prompts that differ, what was located, and one line of conclusion."""
    by_place = [row for row in rows if row.theirs.by_place]
    theirs, ours = Counted.of([row.theirs for row in by_place]), Counted.of([row.ours for row in by_place])
    lengths = f"{tau_of([theirs]):.3f}", f"{tau_of([ours]):.3f}"
    sides = [row.theirs for row in rows], [row.ours for row in rows]
    print_text(Text(f"{directory} in {engine}, beside our chain of {len(rows[0].ours.counts) - 1}", "bold"))
    drafted = [("drafted tokens", *(f"{sum(answer.drafted or 0 for answer in side):,}" for side in sides))]
    if any(row.theirs.drafted is None for row in rows):  # the engine does not count them
        drafted = []
    sums = [
        ("prompts, greedy", str(len(rows)), f"{len(rows)}, {dtype}"),
        ("tokens", *(f"{sum(len(answer.tokens) for answer in side):,}" for side in sides)),
        *drafted,
        ("accepted tokens", *(f"{sum(answer.accepted for answer in side):,}" for side in sides)),
        ("drafts", *(f"{sum(side.counts[:1]):,}" for side in (theirs, ours))),
    ]
    for place, shares in enumerate(zip(accepted_by_place([theirs]), accepted_by_place([ours]), strict=False), 1):
        sums.append((f"  accepted at place {place}", *(f"{share:.1%}" for share in shares)))
    sums.append(("tau", *lengths))
    print_table(table_from_cells("sums", ("count", engine, "here"), sums, (engine, "here")))
    if summed := [row.id for row in rows if not row.theirs.by_place]:
        why = "llama.cpp streams no ids of tokens that end inside of a character"
        print_text(f"From drafts on, the counts are without {', '.join(summed)}: {why}.")

    differing = [row for row in rows if not (row.same_text and row.same_counts)]
    if differing:
        cells = []
        for row in differing:
            drafts = row.theirs.counts[0] if row.theirs.by_place else "-"
            numbers = (drafts, row.ours.counts[0], row.theirs.accepted, row.ours.accepted)
            cells.append((row.id, "same" if row.same_text else "DIFFERS", *numbers))
        right = ("drafts", "here", "accepted", "accepted here")
        print_table(table_from_cells("differing", ("prompt", "text", *right), cells, right))
    for what, text in located:
        print_text(Text.assemble((what, "bold"), f" {text}"))

    if not located and not differing:
        text = f"equal: text, drafts and accepted tokens of all {len(rows)} prompts, tau {lengths[0]}"
        print_text(Text(text, "green"))
    else:
        texts, drafts = sum(not row.same_text for row in rows), sum(not row.same_counts for row in rows)
        others = "".join(f", {what}" for what, _ in located if what in (TEMPLATE, DIRECTORY))
        text = f"differs: text of {texts} and drafts of {drafts} of {len(rows)} prompts{others}"
        print_text(Text(f"{text}, tau {lengths[0]}, {lengths[1]} here", "bold red"))
