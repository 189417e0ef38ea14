"""`draftsmith eval certify`: whether a server's answers, which come from `data responses`, follow the target.

A server computes in another type and with other kernels, so its tokens do not quite follow the target that runs here
even without a drafter. How far they drift is measured first, on answers of the same server without its drafter, the
control; the bets (`bets.py`) then pay only beyond that.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.data.console import Table, log_note, print_table, print_text, table_from_cells, tables_to_json
from draftsmith.data.engines.served_target import load_target
from draftsmith.data.store.manifest import Manifest, open_artifact
from draftsmith.data.store.rows import Rows
from draftsmith.data.store.writer import sole_writer
from draftsmith.data.text.answers import spans
from draftsmith.eval.bets import (
    MAX_GAP,
    SHIFTS,
    Drift,
    Evidence,
    answer_logits,
    decided_tokens,
    ends_as_asked,
)
from draftsmith.eval.meta import RESULTS, describe
from draftsmith.eval.settings import CertifyConfig
from draftsmith.modules.pretrained.checkpoint import Checkpoint, check_same_tokenizer, checkpoint_of
from draftsmith.modules.pretrained.files import make_directory, write_json
from draftsmith.modules.pretrained.heads import FrozenDrafter, load_drafter
from draftsmith.modules.sampling import best_tokens, probabilities
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import InputError, SamplingParams

CONTROL, SERVER = "control", "server"
MOST_DRIFT = 0.05  # the strongest bet stakes 0.95 on a score's gain, which a drift may raise by this
# Greedy: a token may lie this many times as far below the target's best one as any of the control.
GAP_FACTOR = 1.5


@dataclass(frozen=True)
class Answered:
    """Answer to test. drafted: at its tokens, as of `decided_tokens`."""

    id: str
    prompt: Sequence[int]
    tokens: Sequence[int]
    ends_well: bool
    drafted: tuple[Tensor, Tensor] | None = None


@sole_writer()
def run(config: CertifyConfig) -> int:
    """Print and write the certificate; return 0 if all answers follow the target, else 1.

    Raises:
        InputError: answers of another target, control answers that were asked for otherwise, or that drift too far.
    """
    torch.set_num_threads(config.num_threads)
    config, checkpoint = config.open(config.target)
    rows, about = certify_server(config, checkpoint)
    tables = [certificate(rows)]
    if any(row["sampling"] for row in rows):
        tables.append(shifts(rows))
    # A control that fails says nothing of the server's drafter, whose row is the last.
    passed = rows[-1]["passed"]
    make_directory(config.output)
    meta = describe("certify", config, **about)
    results = {"meta": meta, "tables": tables_to_json(tables), "passed": passed, "answers": rows}
    write_json(config.output / RESULTS, results)
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
        decided, impossible = decided_tokens(target, one.prompt, one.tokens, params, MAX_GAP, one.drafted)
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


# -- answers of a server


@dataclass(frozen=True)
class ServerAnswers:
    """Answers of a server, and how they were asked for."""

    manifest: Manifest
    rows: Rows

    @classmethod
    def open(cls, directory: Path, config: CertifyConfig, target: Checkpoint) -> ServerAnswers:
        # Of a server's model the weights are unknown, and not compared.
        identity: dict[str, Any] = {**target.text_identity(), "target": target.identity}
        manifest = open_artifact(directory, "responses", identity)
        if manifest.config["ignore_eos"] and "llamacpp" in manifest.identity.get("answered_by", {}):
            found = "answers of llama.cpp with --ignore-eos, which bars end tokens from being sampled"
            raise InputError(str(directory), found, "answers that may end", "Ask again without it.")
        return cls(manifest, Rows(manifest, ["id", "input_ids", "loss_mask"], config.limit))

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(**(self.manifest.sampling or {}))

    def read(self, target: CausalLM, drafts: FirstDrafts | None) -> Iterator[Answered]:
        """Yield every answer, with what the drafter drafts at its tokens."""
        asked = self.manifest.config
        ends = () if asked["ignore_eos"] else target.info.eos_ids
        for row in self.rows.iterate():
            for begin, end in spans(row["loss_mask"]):
                prompt, answer = row["input_ids"][:begin], row["input_ids"][begin:end]
                room = min(asked["max_new_tokens"], target.info.max_position - begin)
                drafted = drafts.along(prompt, answer, self.sampling) if drafts else None
                yield Answered(row["id"], prompt, answer, ends_as_asked(answer, ends, room), drafted)


def certify_server(config: CertifyConfig, checkpoint: Checkpoint) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Test a server's answers beyond what the control's drift. Return a row for each of both, and what meta holds.

    The control's bounds and the bets on the server each fail with at most half of alpha.
    """
    answers = {SERVER: ServerAnswers.open(config.data, config, checkpoint)}
    if config.control is not None:
        answers = {CONTROL: ServerAnswers.open(config.control, config, checkpoint), **answers}
        asked = [each.sampling for each in answers.values()]
        if asked[0] != asked[1]:
            raise InputError("control", f"answers with {asked[0]}", str(asked[1]), "Ask both servers alike.")
    else:
        log_note("No control: what the server's type and kernels change counts as a mistake of its speculation.")
    params, target = answers[SERVER].sampling, load_target(checkpoint, **config.loading)
    drafts = None
    if config.head is not None and not params.greedy:
        drafts = FirstDrafts(load_server_drafter(config, config.head, target), target.info.vocab_size)

    rows, drift, level = list[dict[str, Any]](), Drift(), config.alpha / 2
    for name, each in answers.items():
        given = each.read(target, drafts)
        if params.greedy:
            allowed = max([MAX_GAP, *(GAP_FACTOR * row["greedy"]["largest_gap"] for row in rows)])
            test = greedy_test(target, given, allowed)
            rows.append({"of": name, "greedy": test, "sampling": None, "passed": test["passed"]})
            continue
        bounds = drift.bounds(level) if drift.count else {}
        if bounds and (most := max(abs(value) for pair in bounds.values() for value in pair)) > MOST_DRIFT:
            found = f"a drift of up to {most:.3f} by {drift.count:,} tokens"
            remedy = "Make more control answers, or pass the --dtype and weights that are served."
            raise InputError("control", found, f"one below {MOST_DRIFT}", remedy)
        evidence = Evidence(bounds)
        test = sampling_test(target, given, params, level, evidence)
        rows.append({"of": name, "greedy": None, "sampling": test, "passed": test["passed"]})
        drift = evidence.moments
    where = f"at {config.server}" if config.server else f"in {str(target.dtype).removeprefix('torch.')}"
    top = f", top-k {params.top_k}" if params.top_k else ""
    top += f", top-p {params.top_p:g}" if params.top_p < 1 else ""
    print_text(f"Answers at temperature {params.temperature:g}{top}, scored under {config.target} {where}.")
    if not params.greedy:
        print_text(f"A server that follows the target fails with a probability of {config.alpha:g} at most.")
    return rows, {"target": target.info.identity, "sampling": answers[SERVER].manifest.sampling}


def load_server_drafter(config: CertifyConfig, path: str, target: CausalLM) -> FrozenDrafter:
    """Load the model or head that the server drafts with.

    Raises:
        InputError: one of another target.
    """
    drafter = load_drafter(path, lambda: target, lambda path: load_target(path, **{**config.loading, "server": None}))
    if drafter.head is None:
        check_same_tokenizer(checkpoint_of(target), checkpoint_of(drafter.lm))
        drafter.lm.fit_vocabulary(target.info.vocab_size)
    return drafter


class FirstDrafts:
    """Distributions of the first drafted token at every place of a text."""

    def __init__(self, drafter: FrozenDrafter, vocab_size: int):
        self.drafter, self.branches, self.vocab_size = drafter, drafter.branches(1), vocab_size

    def along(self, prompt: list[int], answer: list[int], params: SamplingParams) -> tuple[Tensor, Tensor]:
        """Return `draft` and `children` [N, V] of an answer's tokens. The first token comes from reading the prompt."""
        ids = [*prompt, *answer]
        draft = torch.zeros(len(answer), self.vocab_size, dtype=torch.float64, device=self.drafter.lm.device)
        children = torch.zeros_like(draft, dtype=torch.bool)
        starts = range(max(len(prompt) + 1, self.branches.min_start), len(ids))

        def record(piece: slice, _: int, logits: Tensor) -> Tensor:
            rows, likeliest = torch.tensor(starts[piece]) - len(prompt), best_tokens(logits)
            # Which of the two a server does is not known: most draft the likeliest token at any temperature.
            draft[rows] = probabilities(logits, params).double()
            children[rows, likeliest] = True
            return likeliest

        if starts:
            self.drafter.read(ids).open(self.branches, len(ids)).grow(starts, 1, record)
        return draft, children


# -- tables


def certificate(rows: Sequence[dict[str, Any]]) -> Table:
    """Return a table with a row for each set of answers."""
    cells = []
    for row in rows:
        greedy, sampling = row["greedy"], row["sampling"]
        test: dict[str, Any] = sampling or greedy
        choices = ""
        if greedy is not None:
            choices = f"{greedy['differing']} differ, by {greedy['largest_gap']:.3f} at most"
        finds = "" if test["passed"] else test.get("strongest_bet", "")
        if test["wrong_ends"]:
            finds = f"{test['wrong_ends']} answers end wrong"
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
