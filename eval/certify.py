"""`draftsmith eval certify`: whether answers follow the target, of a server, or of this decoder's methods.

A server's answers come from `data responses`. A server computes in another type and with other kernels, so its tokens
do not quite follow the target that runs here even without a drafter. How far they drift is measured first, on answers
of the same server without its drafter, the control; the bets (`bets.py`) then pay only beyond that.

A method of this decoder answers prompts one at a time and, if it can, in rows side by side, which use other caches and
shapes. Its greedy answers are compared with autoregressive ones, and its sampled tokens with the target's distribution.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.data.console import Table, log_note, print_table, print_text, table_from_cells
from draftsmith.data.engines.served_target import load_target
from draftsmith.data.store.manifest import Manifest, open_artifact
from draftsmith.data.store.rows import Rows
from draftsmith.data.store.writer import sole_writer
from draftsmith.eval.bench.prompts import BenchPrompt, read_prompts
from draftsmith.eval.bench.runner import load_run
from draftsmith.eval.bets import (
    MAX_GAP,
    SHIFTS,
    DraftedPlace,
    Drift,
    Evidence,
    RecordingRunner,
    answer_logits,
    decided_tokens,
    ends_as_asked,
)
from draftsmith.eval.meta import RESULTS, describe
from draftsmith.eval.report.tables import to_json
from draftsmith.eval.settings import CertifyConfig
from draftsmith.modules.decoding.loop import room_for
from draftsmith.modules.drafters.method import Models
from draftsmith.modules.drafters.methods import LabeledMethod, parse_methods
from draftsmith.modules.pretrained.files import make_directory, write_json
from draftsmith.modules.pretrained.heads import FrozenDrafter, load_drafter
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.pretrained.tokenizers import check_same_tokenizer, text_identity
from draftsmith.modules.sampling import best_tokens, probabilities
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.targets.llama import LlamaLM
from draftsmith.modules.types import InputError, SamplingParams

CONTROL, SERVER = "control", "server"
MOST_DRIFT = 0.05  # the strongest bet stakes 0.95 on a score's gain, which a drift may raise by this
# Greedy: a token may lie this many times as far below the target's best one as any of the control.
GAP_FACTOR = 1.5
SAMPLED_PROMPTS = 4  # fewer than a batch, so that rows which share their random numbers repeat an answer


@dataclass(frozen=True)
class Answered:
    """Answer to test. places: of its tokens. previous: tokens of the prompt's previous answer, if there was one."""

    id: str
    prompt: Sequence[int]
    tokens: Sequence[int]
    ends_well: bool
    places: Sequence[DraftedPlace] = ()
    previous: Sequence[int] = ()


@sole_writer()
def run(config: CertifyConfig) -> int:
    """Print and write the certificate; return 0 if all answers follow the target, else 1.

    Raises:
        InputError: answers of another target, control answers that were asked for otherwise, or that drift too far; bad
            models or methods.
    """
    torch.set_num_threads(config.num_threads)
    rows, about = (certify_methods if config.prompts is not None else certify_server)(config)
    tables = [certificate(rows)]
    if any(row["sampling"] for row in rows):
        tables.append(shifts(rows))
    # A control that fails says nothing of the server's drafter.
    passed = rows[-1]["passed"] if rows[-1]["of"] == SERVER else all(row["passed"] for row in rows)
    make_directory(config.output)
    meta = describe("certify", config, **about)
    write_json(config.output / RESULTS, {"meta": meta, "tables": to_json(tables), "passed": passed, "answers": rows})
    for table in tables:
        print_table(table)
    log_note(f"Written to {config.output / RESULTS}")
    return 0 if passed else 1


# -- the two tests


@torch.inference_mode()
def greedy_test(reference: CausalLM, answers: Iterable[Answered], allowed: float) -> dict[str, Any]:
    """Compare each token with the first choice of a reference: how often it differs, and by how much at most.

    An answer must also end with an end token or at its limit, so a truncated one fails.
    """
    gaps, differing, count, num_tokens, wrong_ends, first = [0.0], 0, 0, 0, 0, None
    for one in answers:
        count, num_tokens, wrong_ends = count + 1, num_tokens + len(one.tokens), wrong_ends + (not one.ends_well)
        if not one.tokens:
            continue
        logits = answer_logits(reference, one.prompt, one.tokens, SamplingParams())[0].double()  # [T, V]
        tokens = torch.tensor(one.tokens, device=logits.device)
        gap = logits.max(-1).values - logits.gather(-1, tokens[:, None])[:, 0]  # [T]
        places = gap.nonzero()[:, 0].tolist()
        if places and first is None:
            first = {"id": one.id, "token": places[0], "gap": float(gap[places[0]])}
        differing += len(places)
        gaps.append(float(gap.max()))
    # NaN sorts first, so that it is what the result shows.
    largest = max(gaps, key=lambda gap: (gap != gap, gap))
    row: dict[str, Any] = {"answers": count, "tokens": num_tokens, "differing": differing, "first_difference": first}
    row |= {"largest_gap": largest, "allowed": allowed, "wrong_ends": wrong_ends}
    return row | {"passed": not wrong_ends and largest <= allowed}


def sampling_test(
    target: CausalLM, answers: Iterable[Answered], params: SamplingParams, level: float, evidence: Evidence
) -> dict[str, Any]:
    """Bet on the tokens of answers.

    level: highest probability that answers which follow the target fail. evidence: without a bet yet.
    """
    count, num_tokens, wrong_ends = 0, 0, 0
    for one in answers:
        count, num_tokens, wrong_ends = count + 1, num_tokens + len(one.tokens), wrong_ends + (not one.ends_well)
        if not one.tokens:
            continue
        places = one.places or [DraftedPlace()] * len(one.tokens)
        decided, impossible = decided_tokens(target, one.prompt, one.tokens, places, one.previous, params, MAX_GAP)
        evidence.impossible += impossible
        for part in decided.parts():
            evidence.add(part)
    return {
        "answers": count,
        "tokens": num_tokens,
        "p_value": evidence.p_value,
        "level": level,
        "impossible": evidence.impossible,
        "wrong_ends": wrong_ends,
        "strongest_bet": evidence.strongest,
        "shift": evidence.moments.means,
        "drift": evidence.drift,
        "detectable": evidence.detectable(level),
        "passed": not wrong_ends and evidence.p_value > level,  # not for NaN
    }


def row_of(name: str, greedy: dict[str, Any] | None, sampling: dict[str, Any] | None) -> dict[str, Any]:
    """Return the row of one set of answers."""
    passed = all(test["passed"] for test in (greedy, sampling) if test is not None)
    return {"of": name, "greedy": greedy, "sampling": sampling, "passed": passed}


# -- answers of a server


@dataclass(frozen=True)
class ServerAnswers:
    """Answers of a server, and how they were asked for."""

    manifest: Manifest
    rows: Rows

    @classmethod
    def open(cls, directory: Path, config: CertifyConfig) -> ServerAnswers:
        manifest = open_artifact(directory, "responses", text_identity(config.target))
        if manifest.config["ignore_eos"] and "llamacpp" in manifest.identity.get("answered_by", {}):
            found = "answers of llama.cpp with --ignore-eos, which bars end tokens from being sampled"
            raise InputError(str(directory), found, "answers that may end", "Ask again without it.")
        return cls(manifest, Rows(manifest.directory, manifest, ["id", "input_ids", "loss_mask"], config.limit))

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(**(self.manifest.sampling or {}))

    def read(self, target: CausalLM, drafts: FirstDrafts | None) -> Iterator[Answered]:
        """Yield every answer, with what the drafter drafts at its tokens."""
        asked = self.manifest.config
        ends = () if asked["ignore_eos"] else target.info.eos_ids
        for row in self.rows.iterate():
            place = 0
            for is_answer, same in itertools.groupby(row["loss_mask"]):
                end = place + len(list(same))
                if is_answer:
                    prompt, answer = row["input_ids"][:place], row["input_ids"][place:end]
                    room = min(asked["max_new_tokens"], target.info.max_position - len(prompt))
                    places = drafts.places(prompt, answer, self.sampling) if drafts else ()
                    yield Answered(row["id"], prompt, answer, ends_as_asked(answer, ends, room), places)
                place = end


def certify_server(config: CertifyConfig) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Test a server's answers beyond what the control's drift. Return a row for each of both, and what meta holds.

    The control's bounds and the bets on the server each fail with at most half of alpha.
    """
    assert config.answers is not None
    answers = {SERVER: ServerAnswers.open(config.answers, config)}
    if config.control is not None:
        answers = {CONTROL: ServerAnswers.open(config.control, config), **answers}
        asked = [each.sampling for each in answers.values()]
        if asked[0] != asked[1]:
            raise InputError("control", f"answers with {asked[0]}", str(asked[1]), "Ask both servers alike.")
    else:
        log_note("No control: what the server's type and kernels change counts as a mistake of its speculation.")
    params, target = answers[SERVER].sampling, load_target(config.target, **config.loading)
    drafts = None if not config.draft or params.greedy else FirstDrafts(load_server_drafter(config, target))

    rows, drift, level = list[dict[str, Any]](), Drift(), config.alpha / 2
    for name, each in answers.items():
        given = each.read(target, drafts)
        if params.greedy:
            allowed = max([MAX_GAP, *(GAP_FACTOR * row["greedy"]["largest_gap"] for row in rows)])
            rows.append(row_of(name, greedy_test(target, given, allowed), None))
            continue
        bounds = drift.bounds(level) if drift.count else {}
        if bounds and (most := max(abs(value) for pair in bounds.values() for value in pair)) > MOST_DRIFT:
            found = f"a drift of up to {most:.3f} by {drift.count:,} tokens"
            remedy = "Make more control answers, or pass the --dtype and weights that are served."
            raise InputError("control", found, f"one below {MOST_DRIFT}", remedy)
        evidence = Evidence(bounds)
        rows.append(row_of(name, None, sampling_test(target, given, params, level, evidence)))
        drift = evidence.moments
    where = f"at {config.target_server}" if config.target_server else f"in {str(target.dtype).removeprefix('torch.')}"
    top = f", top-k {params.top_k}" if params.top_k else ""
    top += f", top-p {params.top_p:g}" if params.top_p < 1 else ""
    print_text(f"Answers at temperature {params.temperature:g}{top}, scored under {config.target} {where}.")
    if not params.greedy:
        print_text(f"A server that follows the target fails with a probability of {config.alpha:g} at most.")
    return rows, {"target": target.info.identity, "sampling": answers[SERVER].manifest.sampling}


def load_server_drafter(config: CertifyConfig, target: CausalLM) -> FrozenDrafter:
    """Load the model or head that the server drafts with.

    Raises:
        InputError: several, or one of another target.
    """
    if len(config.draft or ()) > 1:
        raise InputError("draft", ", ".join(config.draft or ()), "one drafter: the server's", "Pass one.")
    path = (config.draft or ())[0]
    drafter = load_drafter(path, lambda: target, lambda path: load_target(path, **{**config.loading, "server": None}))
    if drafter.head is None:
        check_same_tokenizer(config.target, path)
        drafter.lm.fit_vocabulary(target.info.vocab_size)
    return drafter


class FirstDrafts:
    """Distributions of the first drafted token at every place of a text."""

    def __init__(self, drafter: FrozenDrafter):
        self.drafter, self.branches = drafter, drafter.branches(1)

    def places(self, prompt: list[int], answer: list[int], params: SamplingParams) -> list[DraftedPlace]:
        """Return the place of each token of an answer. Its first token comes from reading the prompt."""
        ids, places = [*prompt, *answer], [DraftedPlace()] * len(answer)
        starts = range(max(len(prompt) + 1, self.branches.min_start), len(ids))
        if not starts:
            return places
        self.branches.open(ids, self.drafter.features(ids, len(ids)))

        def record(piece: slice, _: int, logits: Tensor) -> Tensor:
            likeliest = best_tokens(logits)
            for start, q, token in zip(starts[piece], probabilities(logits, params), likeliest.tolist(), strict=True):
                # Which of the two a server does is not known: most draft the likeliest token at any temperature.
                places[start - len(prompt)] = DraftedPlace(False, q, (token,))
            return likeliest

        self.branches.grow(starts, 1, record)
        return places


# -- answers of this decoder


def certify_methods(config: CertifyConfig) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Test every method in each of its loops. Return a row for each, and what meta holds."""
    assert config.prompts is not None
    methods = parse_methods(config.methods)
    prompts = read_prompts(config.prompts, config.target, config.split, config.keep_tasks, config.limit or 20)
    models = load_run(config, methods, prompts, [config.sampling])
    exact = models.target.dtype == torch.float32
    reference = models.target if exact else load_lm(config.target, **{**config.loading, "dtype": "float32"})
    rows = methods_rows(config, methods, models, prompts, reference)
    about = {"prompts": prompts, "source": config.prompts, "target": models.target.info.identity}
    return rows, {**about, "methods": {item.label: dataclasses.asdict(item.method) for item in methods}}


def methods_rows(
    config: CertifyConfig,
    methods: Sequence[LabeledMethod],
    models: Models,
    prompts: Sequence[BenchPrompt],
    reference: CausalLM,
) -> list[dict[str, Any]]:
    """Return a row for each method and loop. reference: the target in float32."""
    # One prompt at a time, and several if the models read rows side by side.
    lms = (models.target, models.draft, models.mid)
    side_by_side = config.batch_size > 1 and all(isinstance(lm, LlamaLM) for lm in lms if lm is not None)
    counts = {item.label: [1, config.batch_size] if side_by_side and item.method.batchable else [1] for item in methods}
    loops = [(item, count) for item in methods for count in counts[item.label]]
    level = config.alpha / len(loops)  # Bonferroni: all sampling tests share alpha
    expected = greedy_answers(RecordingRunner(None, models), prompts, config)
    rows = []
    for item, count in loops:
        answers = greedy_answers(RecordingRunner(item.method, models, count), prompts, config)
        greedy = greedy_test(reference, answers, MAX_GAP)
        # In other dtypes another number of rows rounds differently and may change a token.
        same = [one.tokens == other.tokens for one, other in zip(answers, expected, strict=True)]
        greedy["identical"] = sum(same)
        if reference is models.target:
            greedy["passed"] = all(same) and not greedy["wrong_ends"]
            pairs = zip(answers, expected, strict=True)
            differing = (first_difference(*pair) for pair in pairs if pair[0].tokens != pair[1].tokens)
            greedy["first_difference"] = next(differing, None)
        sampling = None
        if config.sampled_tokens:
            # Methods that learn online start anew, so that the test does not depend on the greedy prompts.
            runner, evidence = RecordingRunner(item.method, models, count), Evidence()
            given = sampled_answers(runner, item.label, prompts[:SAMPLED_PROMPTS], config, level, evidence)
            sampling = sampling_test(models.target, given, config.sampling, level, evidence)
        name = f"{item.label}, {'single' if count == 1 else 'batched'}"
        rows.append(row_of(name, greedy, sampling))
    return rows


def greedy_answers(runner: RecordingRunner, prompts: Sequence[BenchPrompt], config: CertifyConfig) -> list[Answered]:
    """Decode every prompt greedily."""
    ids, seeds = [prompt.prompt_ids for prompt in prompts], [config.seed] * len(prompts)
    decoded = runner(ids, SamplingParams(), config.max_new_tokens, seeds)
    return [answered(runner, prompt, tokens, config) for prompt, (tokens, _) in zip(prompts, decoded, strict=True)]


def answered(
    runner: RecordingRunner, prompt: BenchPrompt, tokens: list[int], config: CertifyConfig, **more: Any
) -> Answered:
    """Return an answer of this decoder, with whether it ends as it should."""
    room = room_for(prompt.prompt_ids, config.max_new_tokens, runner.target.info)
    return Answered(prompt.id, prompt.prompt_ids, tokens, ends_as_asked(tokens, runner.ends, room), **more)


def first_difference(one: Answered, other: Answered) -> dict[str, Any]:
    """Return where an answer differs from the autoregressive one."""
    differs = (i for i, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=False)) if a != b)
    return {"id": one.id, "token": next(differs, min(len(one.tokens), len(other.tokens)))}


def sampled_answers(
    runner: RecordingRunner,
    label: str,
    prompts: Sequence[BenchPrompt],
    config: CertifyConfig,
    level: float,
    evidence: Evidence,
) -> Iterator[Answered]:
    """Sample answers of a method until `sampled_tokens` are tested, one ends wrong, or the evidence suffices."""
    previous: dict[int, list[int]] = {}  # number of the prompt -> its last answer
    tested = 0
    for batch in itertools.count():
        numbers = range(batch * config.batch_size, (batch + 1) * config.batch_size)
        asked = [number % len(prompts) for number in numbers]
        parts = ((config.seed, label, runner.rows > 1, prompts[number % len(prompts)].id, number) for number in numbers)
        seeds = [int.from_bytes(hashlib.sha256(repr(part).encode()).digest()[:8], "big") >> 1 for part in parts]
        ids = [prompts[each].prompt_ids for each in asked]
        ends_well = True
        for each, (tokens, places) in zip(
            asked, runner(ids, config.sampling, config.max_new_tokens, seeds), strict=True
        ):
            before = previous.get(each, [])
            one = answered(runner, prompts[each], tokens, config, places=places, previous=before)
            yield one
            ends_well &= one.ends_well
            previous[each] = tokens or before
            tested += len(tokens)
        if tested >= config.sampled_tokens or not ends_well or not evidence.p_value > level:  # also for NaN
            return


# -- tables


def certificate(rows: Sequence[dict[str, Any]]) -> Table:
    """Return a table with a row for each set of answers."""
    cells = []
    for row in rows:
        greedy, sampling = row["greedy"], row["sampling"]
        test: dict[str, Any] = sampling or greedy
        choices = ""
        if greedy is not None and "identical" in greedy:
            choices = f"{greedy['identical']} of {greedy['answers']} equal"
        elif greedy is not None:
            choices = f"{greedy['differing']} differ, by {greedy['largest_gap']:.3f} at most"
        wrong_ends = sum(part["wrong_ends"] for part in (greedy, sampling) if part)
        finds = "" if test["passed"] else test.get("strongest_bet", "")
        if wrong_ends:
            finds = f"{wrong_ends} answers end wrong"
        elif test.get("impossible"):
            finds = f"{test['impossible']} impossible tokens"
        p_value = ""
        if sampling is not None:
            small = not sampling["p_value"] and not sampling["impossible"]
            p_value = "below 1e-300" if small else f"{sampling['p_value']:.2g}"
        verdict = "follows the target" if row["passed"] else "does NOT follow it"
        cells.append((row["of"], choices, f"{test['tokens']:,}", p_value, finds, verdict))
    return table_from_cells("certificate", ("answers of", "greedy", "tokens", "p", "finds", "verdict"), cells)


def shifts(rows: Sequence[dict[str, Any]]) -> Table:
    """Return a table of how much more often than under the target each kind of token comes, and what would be found."""
    cells = []
    for name, row in itertools.product(SHIFTS, rows):
        test = row["sampling"]
        if test and name in test["detectable"]:
            least = "" if row["of"] == CONTROL else f"{test['detectable'][name]:.4f}"
            cells.append((name, row["of"], f"{test['shift'][name]:+.4f}", least))
    return table_from_cells("shifts", ("towards", "answers of", "mean shift", "found in 9 of 10 runs"), cells)
