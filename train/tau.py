"""tau while training: emitted tokens per target call, read along answers that are there (modules/along.py).

A greedy answer does not depend on what drafts it. So the target, in this process or at a server, answers the held-out
prompts when the training begins; every validation drafts along these answers and finds the rounds that decoding would
have. The answers are kept with the run, a server's states too, and a resumed run asks for nothing again.

A training on stored states loads no layer of the target: it reads along the recorded answers of the held-out rows. If
these were sampled, tau is that of decoding at their temperature, top-k and top-p, in the mean over its random numbers:
p follows from the stored final states, as they are rounded, by the target's readout and lm_head.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import lightning.pytorch as pl
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftsmith.data.engines.own import generate_all
from draftsmith.data.engines.served_target import served_answers
from draftsmith.data.engines.vllm_states import ServedStates
from draftsmith.data.store.feature_codec import decoded
from draftsmith.data.store.manifest import open_artifact
from draftsmith.data.store.rows import Rows
from draftsmith.data.text.answers import spans
from draftsmith.data.text.template import prompt_ids
from draftsmith.modules.along import Answer, TargetText, Text, along_head, read, rounds_by_place
from draftsmith.modules.decoding.trace import tau
from draftsmith.modules.drafters.base import DraftHead
from draftsmith.modules.drafters.branches import as_decoding
from draftsmith.modules.pretrained.checkpoint import checkpoint_of
from draftsmith.modules.pretrained.files import write_tensors
from draftsmith.modules.pretrained.hub import EMBEDDED, resolve_model
from draftsmith.modules.targets.base import CausalLM, final_state
from draftsmith.modules.targets.outer import OuterLM
from draftsmith.modules.types import InputError, SamplingParams
from draftsmith.train.config import TrainDrafterConfig
from draftsmith.train.data import Samples
from draftsmith.train.metrics import gathered, num_ranks, rank, say_on_rank_zero, sum_over_ranks
from draftsmith.train.module import LitDrafter

# Prompts of tau_general: chat, code, maths.
GENERAL = f"{EMBEDDED}chat-prompts"
GREEDY = SamplingParams()
# Tokens of an answer that count. The target's go past end tokens, as short answers say little.
ANSWER_TOKENS = 64
ANSWERED_TOGETHER = 16
# The answers, in the run's output.
ANSWERS = "tau.safetensors"

T = TypeVar("T")


@dataclass(frozen=True)
class AnsweredPrompt:
    """Token ids of a prompt and its answer, which begins at `begin` and would have been cut at `limit`.

    states: [T, L*H] that the head is trained on; None: the target reads them here.
    """

    ids: list[int]
    begin: int
    limit: int
    states: Tensor | None = None

    @property
    def prompt(self) -> list[int]:
        return self.ids[: self.begin]


class TauProbe:
    """Measures tau of drafts of `depth` tokens along answers, on all ranks, at validations; tau picks best/.

    Beside it stands `tau_general`, on general prompts that ship: tau on held-out training data does not predict other
    text.

    measured: description of the measurement, for the log. digest: of the held-out answers.
    """

    def __init__(
        self,
        target: CausalLM,
        layers: Sequence[int],
        depth: int,
        held_out: Sequence[AnsweredPrompt],
        general: Sequence[AnsweredPrompt] = (),
        params: SamplingParams = GREEDY,
    ):
        """layers: whose states the head is trained on (`DraftHead.loss_layers`). depth: tokens of a draft. held_out,
        general: the same on every rank; each rank reads its share. params: how the answers were sampled."""
        self.target, self.layers, self.depth, self.params = target, layers, depth, params
        self.counts, self.digest = (len(held_out), len(general)), digest(held_out)
        self._texts = [[self._read(own) for own in texts[rank() :: num_ranks()]] for texts in (held_out, general)]
        lengths, shipped = [own.begin for own in held_out], f", tau_general on {len(general)} that ship"
        sizes = f"{len(held_out)} prompt(s) of {min(lengths):,} to {max(lengths):,} tokens{shipped if general else ''}"
        self.measured = f"tau on {sizes}, {ANSWER_TOKENS} each at most, drafts of {depth}"

    def _read(self, own: AnsweredPrompt) -> TargetText:
        answer, target = Answer(own.begin, len(own.ids), own.limit), self.target
        with as_decoding(target.device):
            if own.states is None:
                return read(target, own.ids, [answer], self.params, self.layers)
            layers = self.layers or (final_state(target.info.num_layers),)
            stored = Text.of(own.ids, [answer], own.states.to(target.device, target.dtype), layers)
            return read(target, own.ids, [answer], self.params, layers, stored)

    def __call__(
        self, head: DraftHead, device: torch.device, before_each: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """Return tau over all prompts of all ranks, tau_general, and the share accepted by place in the draft: of the
        rounds that draft n tokens or more, those that accept n or more.

        device: that ranks communicate through. before_each: called on all ranks before each prompt.
        """
        with as_decoding(self.target.device):
            found, places = self._measure(head, 0, device, before_each)
            measured = {"tau": found}
            if self.counts[1]:
                measured["tau_general"], _ = self._measure(head, 1, device, before_each)
        shares = ((n, kept / drafted) for n, (kept, drafted) in enumerate(places.T.tolist(), 1) if drafted)
        return measured | {f"accepted_{n}": share for n, share in shares}

    def _measure(
        self, head: DraftHead, group: int, device: torch.device, before_each: Callable[[], None]
    ) -> tuple[float, Tensor]:
        """Return tau over one group of prompts, and the rounds by place [2, K] (`along.rounds_by_place`)."""
        along = along_head(self.depth, head.net(self.target), head.config.max_position, shorter=False)
        counts = torch.zeros(2, 1 + self.depth, dtype=torch.float64)
        for place in range(-(-self.counts[group] // num_ranks())):
            before_each()
            if place < len(self._texts[group]):
                ((walk,),) = along.walk(self._texts[group][place], [self.depth])
                tokens_and_calls = torch.tensor([[walk.num_tokens], [float(walk.calls[-1])]])
                counts += torch.cat([tokens_and_calls, rounds_by_place([walk])], 1)
        counts = sum_over_ranks(counts.to(device)).cpu()
        return tau(*counts[:, 0].tolist()), counts[:, 1:]


class MeasureTau(pl.Callback):
    """Callback that gives a drafter its probe before it learns anything."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if isinstance(pl_module, LitDrafter) and pl_module.config.tau_prompts and trainer.limit_val_batches:
            probe = pl_module.probe = tau_probe(pl_module, cast(Any, trainer).datamodule.val)
            if probe is not None:
                state = pl_module.state
                if state.tau_on not in ("", probe.digest):
                    # Resumed with other prompts: tau of best/ is not comparable.
                    state.best.pop("tau", None)
                state.tau_on = probe.digest


def tau_probe(module: LitDrafter, val: Samples) -> TauProbe | None:
    """Return the probe of a training; None without prompts, which is logged.

    The first time, the target or its server answers; all ranks call it, and share the output directory.

    Raises:
        InputError: as `probe_prompts`, a server that refuses a prompt, or a damaged file of answers.
    """
    config, target, source, params = module.config, module.target, module.source, GREEDY
    server = None if source.stream is None else source.stream.server
    contexts = [target.info.max_position, module.head.config.max_position]
    if server is not None and server.context is not None:
        contexts.append(server.context)
    context = min(contexts)
    if server is None and isinstance(target, OuterLM):
        params, held_out = recorded_answers(val, config.tau_prompts, context, target.info.eos_ids)
        general: Sequence[AnsweredPrompt] = ()
    else:
        prompts = probe_prompts(config, target, val, context)
        asked, path = prompts and prompts + general_prompts(config, target, context), config.output / ANSWERS
        if asked and rank() == 0 and [own.prompt for own in read_answers(path, target)] != asked:
            write_answers(path, target, answer_prompts(target, server, asked))
        # The others read what rank 0 has written.
        gathered(None)
        answered = read_answers(path, target) if asked else []
        if [own.prompt for own in answered] != asked:
            found = f"{path} of other prompts than rank 0 has written"
            raise InputError("output", found, "a directory that all ranks share", "Put it on a shared file system.")
        held_out, general = answered[: len(prompts)], answered[len(prompts) :]
    if not held_out:
        say_on_rank_zero("note: tau is not measured: the held-out rows have no answer of the target")
        return None
    depth = draft_depth(module.head, config)
    probe = TauProbe(target, source.aux_layers, depth, held_out, general, params)
    say_on_rank_zero(probe.measured)
    return probe


def draft_depth(head: DraftHead, config: TrainDrafterConfig) -> int:
    """Return the tokens of the drafts that a head is trained on; if it knows single ones only, its default."""
    depth = getattr(config, head.depth_option, None) if head.depth_option else None
    return min(depth if isinstance(depth, int) and depth > 1 else head.default_k, head.longest_draft)


def answer_prompts(
    target: CausalLM, server: ServedStates | None, prompts: Sequence[Sequence[int]]
) -> list[AnsweredPrompt]:
    """Let the target, or its server, answer prompts greedily, past end tokens."""
    if server is None:
        answers = generate_all(target, prompts, GREEDY, ANSWER_TOKENS, ANSWERED_TOGETHER, eos_ids=())
    else:
        answers = served_answers(server, checkpoint_of(target), prompts, GREEDY, ANSWER_TOKENS, ignore_eos=True)
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    states = [None if server is None else server.read_unrounded(text) for text in texts]
    begins = map(len, prompts)
    return [AnsweredPrompt(ids, begin, len(ids), own) for ids, begin, own in zip(texts, begins, states, strict=True)]


def write_answers(path: Path, target: CausalLM, answered: Sequence[AnsweredPrompt]) -> None:
    """Write a target's answers, and states that came from its server."""
    tensors = {f"{number}.ids": torch.tensor(own.ids) for number, own in enumerate(answered)}
    states = {f"{number}.states": own.states for number, own in enumerate(answered)}
    tensors |= {name: own.contiguous() for name, own in states.items() if own is not None}
    metadata = {"prompt_tokens": [own.begin for own in answered], "target": target.info.identity}
    metadata["sha256"] = digest(answered)
    write_tensors(path, tensors, {name: json.dumps(value) for name, value in metadata.items()})


def digest(answered: Iterable[AnsweredPrompt]) -> str:
    """Return a hash of the answers and their states."""
    content = hashlib.sha256()
    for own in answered:
        content.update(repr((own.ids, own.begin)).encode())
        if own.states is not None:
            content.update(own.states.contiguous().view(torch.uint8).numpy().tobytes())
    return content.hexdigest()


def read_answers(path: Path, target: CausalLM) -> list[AnsweredPrompt]:
    """Read what `write_answers` wrote; [] if there is no file, or one of another target.

    Raises:
        InputError: the file is damaged.
    """
    if not path.exists():
        return []
    try:
        with safe_open(path, "pt") as file:
            names, answered = set(file.keys()), list[AnsweredPrompt]()
            metadata = {name: json.loads(value) for name, value in file.metadata().items()}
            for number, begin in enumerate(metadata["prompt_tokens"]):
                ids, states = file.get_tensor(f"{number}.ids").tolist(), f"{number}.states"
                own = file.get_tensor(states) if states in names else None
                answered.append(AnsweredPrompt(ids, begin, len(ids), own))
            if digest(answered) != metadata["sha256"]:
                raise ValueError("other content than its hash says")
            return answered if metadata["target"] == target.info.identity else []
    except (SafetensorError, OSError, KeyError, ValueError, TypeError, AttributeError) as error:
        remedy = "Delete it: the target answers the prompts again."
        raise InputError(str(path), f"unreadable ({error})", "answers that tau is measured along", remedy) from error


# -- prompts and answers


def probe_prompts(config: TrainDrafterConfig, target: CausalLM, val: Samples, context: int) -> list[list[int]]:
    """Return prompts to measure tau on, preferring those that leave room for an answer in the context.

    Raises:
        InputError: `tau_data` holds no prompts, or those of another tokenizer.
    """
    if config.tau_data is None:
        prompts = held_out_prompts(val)
    else:
        manifest = open_artifact(config.tau_data, "prompts", checkpoint_of(target).text_identity())
        rows = Rows(manifest, ["prompt_ids"], vocab_size=target.info.vocab_size)
        prompts = (row["prompt_ids"] for row in rows.iterate())
    return with_room(prompts, len, config.tau_prompts, context)


def with_room(found: Iterable[T], length: Callable[[T], int], count: int, context: int) -> list[T]:
    """Return the first `count` of what is found after a prompt of this length; what leaves room for an answer in the
    context, if anything does."""
    chosen, tight, too_long = list[T](), list[T](), 0
    for one in found:
        if length(one) <= context - ANSWER_TOKENS:
            chosen.append(one)
        elif length(one) < context:
            tight.append(one)
        else:
            too_long += length(one) >= context
        if len(chosen) == count:
            break
    left_out = too_long + (len(tight) if chosen else 0)
    if left_out:
        say_on_rank_zero(f"note: tau leaves out {left_out} prompt(s) with no room for an answer in {context:,} tokens")
    return chosen or tight[:count]


def general_prompts(config: TrainDrafterConfig, target: CausalLM, context: int) -> list[list[int]]:
    """Return the general prompts that ship (chat, code, maths; those not for tests), as the target's template has them.

    Return [] if --tau-data is given, the target has no chat template (logged), or it is an embedded model.
    """
    if config.tau_data is not None or config.target.startswith(EMBEDDED):
        return []
    tokenizer = checkpoint_of(target).tokenizer
    if not tokenizer.chat_template:
        say_on_rank_zero("note: no tau_general: the target has no chat template")
        return []
    rows = (json.loads(line) for line in Path(resolve_model(GENERAL)).read_text("utf-8").splitlines())
    asked = [[{"role": "user", "content": row["prompt"]}] for row in rows if row["split"] == "dev"]
    prompts = [list(prompt_ids(tokenizer, messages)) for messages in asked]
    return [prompt for prompt in prompts if len(prompt) <= context - ANSWER_TOKENS][: config.tau_prompts]


def held_out_prompts(samples: Samples) -> Iterator[list[int]]:
    """Yield the text before each of `held_out_answers`, once where several answers follow it."""
    texts = [ids for ids, _ in samples.dataset.whole_texts(samples.indices)]
    prompts = (tuple(texts[text][:begin].tolist()) for text, begin, _ in held_out_answers(samples))
    return (list(prompt) for prompt in dict.fromkeys(prompts))


def held_out_answers(samples: Samples) -> Iterator[tuple[int, int, int]]:
    """Yield an answer of each validation text, then the texts' other answers: number of the text, begin and end.

    It is the first answer of the first text, the second of the second, and so on, so that prompts are as long as
    conversations get. Texts are whole: an answer in a piece of one has lost its context.
    """
    texts = [[span for span in spans(mask) if span[0] > 0] for _, mask in samples.dataset.whole_texts(samples.indices)]
    for more in range(max(map(len, texts), default=0)):
        for i, answers in enumerate(texts):
            if more < len(answers):
                yield (i, *answers[(i + more) % len(answers)])


def recorded_answers(
    samples: Samples, count: int, context: int, ends: Collection[int]
) -> tuple[SamplingParams, list[AnsweredPrompt]]:
    """Return recorded answers of the held-out rows, with stored states, and how they were sampled. ends: end tokens."""
    dataset = samples.dataset
    manifest = getattr(dataset, "manifest", None)
    if manifest is None or manifest.kind != "features" or manifest.sampling is None:
        return GREEDY, []
    found = with_room(held_out_answers(samples), lambda answer: answer[1], count, context)
    # They are of the first texts: no more are read.
    read_texts = itertools.islice(
        dataset.whole_items(samples.indices), max(text for text, *_ in found) + 1 if found else 0
    )
    texts, answered = list(read_texts), list[AnsweredPrompt]()
    for text, begin, end in found:
        ids = texts[text]["input_ids"][: min(end, begin + ANSWER_TOKENS)]
        # A shorter answer without an end token was cut there.
        ended = len(ids) == begin + ANSWER_TOKENS or int(ids[-1]) in ends
        limit = begin + ANSWER_TOKENS if ended else len(ids)
        states = decoded(texts[text]["features"], texts[text].get("scale"))[: len(ids)]
        answered.append(AnsweredPrompt(ids.tolist(), begin, limit, states))
    return SamplingParams(**manifest.sampling), answered
