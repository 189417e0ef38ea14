"""`draftsmith eval certify`: whether the answers that a server sampled follow the target, from the answers alone.

The answers come from `data responses`, asked of a server that speculates. Every token is scored under the target here,
and bets at the target's odds decide (`sampling.py`). A server computes in another type and with other kernels, so its
tokens do not quite follow the target that runs here even without a drafter. How far they drift is measured first, on
answers of the same server without its drafter, the control; the bets then pay only beyond that.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.text import Text
from torch import Tensor

from draftsmith.data.console import Table, log_note, print_table, print_text, table_from_cells
from draftsmith.data.settings import Loading, check_not_negative
from draftsmith.data.store.manifest import Manifest, open_artifact, resolved
from draftsmith.data.store.rows import Rows
from draftsmith.data.store.writer import sole_writer
from draftsmith.eval.lossless.sampling import (
    MAX_GAP,
    DraftedPlace,
    Drift,
    Evidence,
    decided_tokens,
    ends_as_asked,
)
from draftsmith.modules.pretrained.files import make_directory, write_json
from draftsmith.modules.pretrained.heads import FrozenDrafter, load_drafter
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.pretrained.provenance import package_versions
from draftsmith.modules.pretrained.tokenizers import check_same_tokenizer, text_identity
from draftsmith.modules.sampling import best_tokens, probabilities
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import InputError, SamplingParams, check_range

RESULTS = "certificate.json"
CONTROL, SERVER = "control", "server"
MOST_DRIFT = 0.05  # the strongest bet stakes 0.95 on a score's gain, which a drift may raise by this
# Greedy: a token may lie this many times as far below the target's best one as any of the control.
GAP_FACTOR = 1.5


@dataclass(frozen=True, kw_only=True)
class CertifyConfig(Loading):
    """Certify that a server's answers follow the target, at any temperature. The exit code is 1 if they do not.

    Attributes:
        target: The model that is served, in the weights that are served: a directory, hub id or GGUF file.
        answers: Output of `data responses`, asked of the server that speculates.
        control: The same of the server without its drafter, with as many answers or more.
        output: Directory that receives certificate.json.
        draft: The model or head that the server drafts with, if it runs here. Its distribution at every token makes
            smaller mistakes visible.
        limit: Only the first so many answers; 0 takes all.
        alpha: Highest probability that a server which follows the target fails.
        num_threads: CPU threads.
    """

    target: str
    answers: Path
    control: Path | None = None
    output: Path
    draft: str | None = None
    limit: int = 0
    alpha: float = 1e-3
    num_threads: int = 1

    def __post_init__(self) -> None:
        check_not_negative(self, "limit")
        check_range("alpha", self.alpha, 0.0, 1.0, "()")


@dataclass(frozen=True)
class ServerAnswers:
    """Answers of a server, and how they were asked for."""

    directory: Path
    manifest: Manifest
    rows: Rows

    @classmethod
    def open(cls, directory: Path, config: CertifyConfig) -> ServerAnswers:
        manifest = open_artifact(directory, "responses", text_identity(config.target))
        if manifest.config["ignore_eos"] and "llamacpp" in manifest.identity.get("answered_by", {}):
            found = "answers of llama.cpp with --ignore-eos, which bars end tokens from being sampled"
            raise InputError(str(directory), found, "answers that may end", "Ask again without it.")
        return cls(directory, manifest, Rows(directory, manifest, ["id", "input_ids", "loss_mask"], config.limit))

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(**(self.manifest.sampling or {}))

    def __iter__(self) -> Iterator[tuple[str, list[int], list[int]]]:
        """Yield the id, the tokens before each answer, and the answer's."""
        for row in self.rows.iterate():
            place = 0
            for is_answer, run in itertools.groupby(row["loss_mask"]):
                end = place + len(list(run))
                if is_answer:
                    yield row["id"], row["input_ids"][:place], row["input_ids"][place:end]
                place = end

    def ends_well(self, prompt: list[int], answer: list[int], target: CausalLM) -> bool:
        """Return whether the answer ends with its first end token, or at its length limit."""
        asked = self.manifest.config
        room = min(asked["max_new_tokens"], target.info.max_position - len(prompt))
        return ends_as_asked(answer, () if asked["ignore_eos"] else target.info.eos_ids, room)


@sole_writer()
def run(config: CertifyConfig) -> int:
    """Print and write the certificate; return 0 if the server follows the target, else 1.

    Raises:
        InputError: answers of another target, control answers that were asked for otherwise, or that drift too far.
    """
    torch.set_num_threads(config.num_threads)
    answers = {SERVER: ServerAnswers.open(config.answers, config)}
    if config.control is not None:
        answers = {CONTROL: ServerAnswers.open(config.control, config), **answers}
        asked = [own.sampling for own in answers.values()]
        if asked[0] != asked[1]:
            raise InputError("control", f"answers with {asked[0]}", str(asked[1]), "Ask both servers alike.")
    else:
        log_note("No control: what the server's type and kernels change counts as a mistake of its speculation.")

    params = answers[SERVER].sampling
    target = load_lm(config.target, **config.loading)
    drafter = None
    if config.draft is not None:
        drafter = load_drafter(config.draft, lambda: target, lambda path: load_lm(path, **config.loading))
        if drafter.head is None:
            check_same_tokenizer(config.target, config.draft)
            drafter.lm.fit_vocabulary(target.info.vocab_size)
    certify = certify_greedy if params.greedy else certify_sampled
    rows = certify(config, target, drafter, answers)
    result = {
        "meta": {
            "settings": resolved(config),
            "sampling": answers[SERVER].manifest.sampling,
            "target": target.info.identity,
            "versions": package_versions(),
        },
        "passed": rows[-1]["passed"],
        "answers": rows,
    }
    make_directory(config.output)
    write_json(config.output / RESULTS, result)
    dtype, top = str(target.dtype).removeprefix("torch."), f", top-k {params.top_k}" if params.top_k else ""
    top += f", top-p {params.top_p:g}" if params.top_p < 1 else ""
    print_text(f"Answers at temperature {params.temperature:g}{top}, scored under {config.target} in {dtype}.")
    print_table(certificate(rows))
    if not params.greedy:
        print_table(shifts(rows))
        print_text(f"A server that follows the target fails with a probability of {config.alpha:g} at most.")
    log_note(f"Written to {config.output / RESULTS}")
    return 0 if result["passed"] else 1


def certify_sampled(
    config: CertifyConfig, target: CausalLM, drafter: FrozenDrafter | None, answers: dict[str, ServerAnswers]
) -> list[dict[str, Any]]:
    """Bet on the server's tokens, beyond what the control's drift. Returns a row for each set of answers.

    The control's bounds and the bets on the server each fail with at most half of alpha.
    """
    drift, rows, drafts = Drift(), list[dict[str, Any]](), FirstDrafts(drafter) if drafter else None
    level = config.alpha / 2
    for name, own in answers.items():
        bounds = drift.bounds(level) if name == SERVER and drift.count else {}
        if bounds and (most := max(abs(value) for pair in bounds.values() for value in pair)) > MOST_DRIFT:
            found = f"a drift of up to {most:.3f} by {drift.count:,} tokens"
            remedy = "Make more control answers, or pass the --dtype and weights that are served."
            raise InputError("control", found, f"one below {MOST_DRIFT}", remedy)
        evidence, wrong_ends, count = Evidence(bounds), 0, 0
        for _, prompt, answer in own:
            wrong_ends += not own.ends_well(prompt, answer, target)
            places = drafts.places(prompt, answer, own.sampling) if drafts else [DraftedPlace()] * len(answer)
            decided, impossible = decided_tokens(target, prompt, answer, places, (), own.sampling, MAX_GAP)
            evidence.impossible += impossible
            for part in decided.parts():
                evidence.add(part)
            count += len(answer)
        row = {
            "of": name,
            "tokens": count,
            "p_value": evidence.p_value,
            "level": level,
            "impossible": evidence.impossible,
            "wrong_ends": wrong_ends,
            "strongest_bet": evidence.strongest,
            "shift": evidence.moments.means,
            "passed": not wrong_ends and evidence.p_value > level,
        }
        if name == SERVER:
            row |= {"drift": bounds, "detectable": evidence.detectable(level)}
        drift = evidence.moments
        rows.append(row)
    return rows


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


@torch.inference_mode()
def certify_greedy(
    config: CertifyConfig, target: CausalLM, drafter: FrozenDrafter | None, answers: dict[str, ServerAnswers]
) -> list[dict[str, Any]]:
    """Compare each token with the target's first choice: how often it differs, and by how much at most."""
    rows: list[dict[str, Any]] = []
    for name, own in answers.items():
        largest, differing, count, wrong_ends, first = 0.0, 0, 0, 0, None
        for number, prompt, answer in own:
            wrong_ends += not own.ends_well(prompt, answer, target)
            ids = torch.tensor([[*prompt, *answer]], device=target.device)
            logits = target.lm_head(target.features(ids)[0, len(prompt) - 1 : -1]).double()
            gap = logits.max(-1).values - logits.gather(-1, ids[0, len(prompt) :, None])[:, 0]  # [T]
            places = gap.nonzero()[:, 0].tolist()
            if places and first is None:
                first = {"id": number, "token": places[0], "gap": float(gap[places[0]])}
            largest = max(largest, float(gap.max()), key=lambda value: (value != value, value))
            differing, count = differing + len(places), count + len(answer)
        allowed = max([MAX_GAP, *(GAP_FACTOR * row["largest_gap"] for row in rows)])
        row = {"of": name, "tokens": count, "differing": differing, "first_difference": first, "largest_gap": largest}
        rows.append(
            row | {"allowed": allowed, "wrong_ends": wrong_ends, "passed": not wrong_ends and largest <= allowed}
        )
    return rows


def shifts(rows: list[dict[str, Any]]) -> Table:
    """Return a table of how much more often than under the target each kind of token comes."""
    cells = [
        (name, *(f"{row['shift'][name]:+.4f}" for row in rows), f"{found:.4f}")
        for name, found in rows[-1]["detectable"].items()
    ]
    headings = ("mean shift towards", *(row["of"] for row in rows), "found in 9 of 10 runs")
    return table_from_cells("shifts", headings, cells)


def certificate(rows: list[dict[str, Any]]) -> Table:
    """Return a table with a row for the control and for the server."""
    cells = []
    for row in rows:
        finds = f"{row['wrong_ends']} answers end wrong" if row["wrong_ends"] else ""
        verdict = Text("follows the target", "green") if row["passed"] else Text("does NOT follow it", "red")
        if "p_value" in row:
            if row["impossible"]:
                finds = finds or f"{row['impossible']} impossible tokens"
            found = f"{row['p_value']:.2g}" if row["p_value"] or row["impossible"] else "below 1e-300"
            finds = finds or ("" if row["passed"] else row["strongest_bet"])
        else:
            found = f"{row['differing']} differ, by {row['largest_gap']:.3f} at most"
        cells.append((row["of"], f"{row['tokens']:,}", found, finds, verdict))
    heading = "p" if "p_value" in rows[-1] else "from its first choice"
    return table_from_cells("certificate", ("answers of", "tokens", heading, "finds", "verdict"), cells)
