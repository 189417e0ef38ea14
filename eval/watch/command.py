"""`draftsmith watch`: a server's counters beside its head's card, look by look."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.data.console import Column, Table, add_result, log_note, print_table, print_text
from draftsmith.data.engines.server import Server
from draftsmith.data.stages import ServerConfig
from draftsmith.eval.engines.served import call_seconds
from draftsmith.eval.meta import read_results
from draftsmith.eval.settings import WatchConfig
from draftsmith.eval.watch.counters import EngineCounts, Tally, read_page, read_saved
from draftsmith.eval.watch.evidence import FEWEST_ANSWERS, CardAnswers, Evidence
from draftsmith.modules.pretrained.card import MEASURED, measured_chains, measured_of
from draftsmith.modules.pretrained.files import write_json
from draftsmith.modules.pretrained.heads import head_config
from draftsmith.modules.pretrained.hub import resolve_model
from draftsmith.modules.pretrained.reading import check_shape, read_object
from draftsmith.modules.types import InputError

BELOW, UNKNOWN = 1, 3  # exit codes
HOUR_S = 3600.0
WHOLE = 0.95  # share of the places of drafts that are filled, if none end early
FASTER, DEVIATIONS = 1.03, 4.0  # least gain of another draft length that is said, and how sure it must be
ANSWERS = {"methods": [{"method": str, "answers?": {"drafts": [int], "accepted": [[int]]}}]}
STATE = {"card": dict, "tally": dict, "looks": [list], "length": int, "evidence": (dict, None)}
ANSWERS_AT_ONCE = 20
MEASURE = "Measure it: draftsmith eval bench --card, with as many prompts as you can."
ANEW = "Delete it, or name another file."


@dataclass(frozen=True)
class Card:
    """Measured answers of a head's chains, by the tokens of a draft, as its card keeps them.

    kind: of the head. id: hash of its weights.
    """

    kind: str
    id: str
    temperature: float
    chains: Mapping[int, CardAnswers]

    @classmethod
    def read(cls, head: str, temperature: float | None) -> Card:
        """Read the card of a head, at a temperature, or the only one that was measured.

        Raises:
            InputError: no card with answers of chains at this temperature, or too few of them.
        """
        directory = Path(resolve_model(head))
        kind, measured = head_config(directory)["kind"], measured_of(directory)
        if measured is None:
            raise InputError("head", f"{head}, not measured with these weights", "one with a card", MEASURE)
        check_shape(directory / MEASURED, measured, ANSWERS, MEASURE)
        known = sorted({row["temperature"] for row in measured["methods"]})
        if temperature is None and len(known) > 1:
            expected = f"one of {', '.join(f'{each:g}' for each in known)}, which the card has"
            raise InputError("temperature", "none", expected, "Pass that of the requests.")
        chosen = known[0] if temperature is None else temperature
        rows = measured_chains(measured, kind, chosen)
        chains = {length: answers_of(row["answers"]) for length, row in rows.items() if row.get("answers")}
        chains = {length: own for length, own in chains.items() if len(own.drafts) >= FEWEST_ANSWERS}
        if not chains:
            found = f"{head}, whose card has no {FEWEST_ANSWERS} answers of {kind}:k=N at temperature {chosen:g}"
            raise InputError("head", found, "as many or more", MEASURE)
        return cls(kind, measured["head_sha256"], chosen, chains)

    @property
    def facts(self) -> dict[str, Any]:
        """Facts that a state file must share."""
        answers = {str(length): [len(own.drafts), own.tau] for length, own in self.chains.items()}
        return {"head": self.id, "temperature": self.temperature, "answers": answers}


def answers_of(counts: Mapping[str, Any]) -> CardAnswers:
    """Read the answers of a card's chain; those without a draft are left out."""
    drafts, accepted = np.array(counts["drafts"], float), np.array(counts["accepted"], float)
    return CardAnswers(drafts[drafts > 0], accepted[drafts > 0])


@dataclass(frozen=True)
class Look:
    """Sums at a time: Unix seconds, None if unknown; answers; drafts; accepted tokens by place, or of all as one."""

    time: float | None
    answers: int | None
    drafts: int
    accepted: tuple[int, ...]

    def since(self, before: Look) -> Look:
        answers = None if self.answers is None or before.answers is None else self.answers - before.answers
        accepted = tuple(now - then for now, then in zip(self.accepted, before.accepted, strict=True))
        return Look(self.time, answers, self.drafts - before.drafts, accepted)

    @property
    def tau(self) -> float:
        """Tokens that a round with a draft emits."""
        return 1 + sum(self.accepted) / max(1, self.drafts)


@dataclass
class Watch:
    """Counts of a server since its start, and their verdict.

    Attributes:
        tally: counts of the server's pages. looks: the latest is the last one; of the others, those of the last hour,
            and one an hour.
        length: tokens of a draft; 0 until they are known. evidence: against the card's chain of this length, if it has
            one. trouble: why nothing can be said.
    """

    card: Card
    tally: Tally
    looks: list[Look] = field(default_factory=list)
    length: int = 0
    evidence: Evidence | None = None
    trouble: str = "no drafts were counted yet"

    @classmethod
    def open(cls, card: Card, server: str, state: Path | None) -> Watch:
        """Continue what a state file holds, or begin.

        Raises:
            InputError: it is damaged, or of another server or card.
        """
        if state is None or not state.exists():
            return cls(card, Tally(server))
        saved = read_object(state, STATE, ANEW)
        if saved["card"] != card.facts:
            raise InputError("state", f"{state}, of another card", "the head's, as it is now", ANEW)
        try:
            looks = [Look(when, answers, drafts, tuple(own)) for when, answers, drafts, own in saved["looks"]]
            watch = cls(card, Tally.from_json(saved["tally"], server), looks, saved["length"])
            if saved["evidence"] is not None:
                watch.evidence = Evidence(card.chains[watch.length])
                watch.evidence.restore(saved["evidence"])
        except InputError:
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise InputError("state", f"{state}, damaged ({error})", "what this version wrote", ANEW) from error
        return watch

    def to_json(self) -> dict[str, Any]:
        """Return the content of the state file."""
        looks = [[one.time, one.answers, one.drafts, list(one.accepted)] for one in self.looks]
        evidence = None if self.evidence is None else self.evidence.to_json()
        kept = {"looks": looks, "length": self.length, "evidence": evidence}
        return {"card": self.card.facts, "tally": self.tally.to_json(), **kept}

    def add(self, when: float | None, counts: EngineCounts, answers: int | None) -> None:
        """Take in the counts so far. answers: those that began."""
        self.trouble = self.tally.trouble or self.trouble
        if not counts.drafts or counts.accepted is None:
            return
        now = Look(when, answers, counts.drafts, counts.by_place or (counts.accepted,))
        length = len(counts.by_place) or self.tally.places or draft_length(counts)
        if not length and len(self.card.chains) == 1:
            (length,) = self.card.chains
        before = self.looks[-1] if self.looks else Look(None, 0, 0, (0,) * len(now.accepted))
        if length != self.length or len(before.accepted) != len(now.accepted) or before.drafts > now.drafts:
            # Counts began anew.
            self.looks, self.length = [], length
            self.evidence = Evidence(self.card.chains[length]) if length in self.card.chains else None
            before = Look(None, 0, 0, (0,) * len(now.accepted))
        self.trouble = self.tally.trouble or self._trouble(now, counts)
        new = now.since(before)
        if self.evidence is not None and not self.trouble:
            self.evidence.add(new.answers or 0, new.drafts, new.accepted)
        self.looks = [*thinned(self.looks, when), now]

    def _trouble(self, now: Look, counts: EngineCounts) -> str:
        """Return why the counts cannot be compared with the card; empty if they can."""
        if self.length not in self.card.chains:
            measured = ", ".join(f"{self.card.kind}:k={length}" for length in sorted(self.card.chains))
            drafts = f"drafts {self.length} tokens" if self.length else "does not say how many tokens it drafts"
            return f"the server {drafts}; the card has {measured}. Measure it as it is served: eval bench --card"
        if now.answers is None:
            return "the server does not count answers, which are the sample: save them, and pass --counters"
        if counts.drafted is not None and counts.drafted < WHOLE * self.length * (counts.drafts or 0):
            mean = counts.drafted / (counts.drafts or 1)
            return f"the server ends drafts early ({mean:.1f} of {self.length} tokens); the card's chains do not"
        most = now.drafts if counts.by_place else now.drafts * self.length
        if max(now.accepted) > most or list(now.accepted) != sorted(now.accepted, reverse=True):
            return "more tokens were accepted than drafted, or more of a later place: these are no counts of drafts"
        return ""

    def window(self, seconds: float) -> Look | None:
        """Return what was counted in the last so many seconds or a little more, if the looks reach back so far."""
        last = self.looks[-1].time if self.looks else None
        before = [one for one in self.looks if one.time is not None and last is not None and one.time <= last - seconds]
        return self.looks[-1].since(before[-1]) if before else None

    def verdict(self, alpha: float) -> tuple[int, str]:
        """Return the exit code, and what is said."""
        if self.evidence is None:
            return UNKNOWN, f"cannot tell: {self.trouble}"
        card, bets = self.card.chains[self.length], self.evidence
        if bets.p_fall <= alpha:
            return BELOW, f"below what was measured (p {bets.p_fall:.1g}): {self._farthest(card.tau, -1)}"
        if self.trouble:
            return UNKNOWN, f"cannot tell: {self.trouble}"
        if (count := self.looks[-1].answers or 0) < FEWEST_ANSWERS:
            return UNKNOWN, f"cannot tell: {count} answers so far, of at least {FEWEST_ANSWERS}"
        if bets.p_rise <= alpha:
            return 0, f"above what was measured (p {bets.p_rise:.1g}): {self._farthest(card.tau, 1)}"
        least = card.detectable(alpha)
        return 0, f"as measured (p {bets.p_fall:.2g}); this card can show a fall of {least:.0%} or more"

    def _farthest(self, tau: float, sign: int) -> str:
        """Name the latest answers that are farthest below (sign -1) or above the card's tau, in standard errors.

        A change after months has hardly moved the tau since the start.
        """
        now = self.looks[-1]
        spans = [now, *(now.since(before) for before in self.looks[:-1])]
        far = max(spans, key=lambda own: sign * (own.tau - tau) * own.drafts / math.sqrt(max(1, own.answers or 0)))
        return f"tau {far.tau:.2f} in the last {far.answers or 0:,} answers, card {tau:.2f}"


def draft_length(counts: EngineCounts) -> int:
    """Return the tokens of a draft by their sums; 0 if unknown. The last draft of an answer may be shorter."""
    return math.ceil(counts.drafted / counts.drafts - 1e-6) if counts.drafted and counts.drafts else 0


def thinned(looks: Sequence[Look], now: float | None) -> list[Look]:
    """Return the looks that are kept: those of the last hour or without a time, and the first of every hour."""
    kept: list[Look] = []
    hours: set[float | None] = set()
    for look in looks:
        hour = look.time and look.time // HOUR_S
        if hour is None or hour not in hours or now is None or (look.time or now) > now - HOUR_S:
            kept.append(look)
        hours.add(hour)
    return kept


def faster(now: Look, card: CardAnswers, rows: Sequence[Mapping[str, Any]]) -> str:
    """Say which shorter drafts would be faster, if any, at each number of requests at once of a run of `eval served`.

    Longer ones than the server's are unknown: nothing says how often their tokens would be accepted.
    """
    length, gains = card.accepted.shape[1], []
    if len(now.accepted) != length or not now.answers:
        return "Another draft length: unknown, as the server does not count accepted tokens by place"
    sums = np.array([now.drafts, *now.accepted], float)  # [1 + K]
    for load in sorted({int(row["requests"]) for row in rows}):
        seconds = call_seconds(rows, load)
        speeds = {k: sums[: k + 1].sum() / own for k, own in seconds.items() if k <= length}
        if length not in speeds:
            continue
        best = max(speeds, key=lambda k: speeds[k])
        # The gain is a sum over answers too, with the variance that it has in the card.
        used = [np.arange(1 + length) <= k for k in (best, length)]
        weights = used[0] / seconds[best] - used[1] / seconds[length]
        own = card.drafts * weights[0] + card.accepted @ weights[1:]
        noise = own - own.sum() / card.drafts.sum() * card.drafts
        sure = weights @ sums > DEVIATIONS * math.sqrt(now.answers * float(noise @ noise) / len(noise))
        gain = speeds[best] / speeds[length]
        if gain >= FASTER and sure:
            drafts = f"drafts of {best}" if best else "no drafts"
            gains.append(f"{drafts} by {gain - 1:.0%} with {load} at once")
    if gains:
        return f"Another draft length would be faster: {', '.join(gains)}"
    return f"No shorter drafts than {length} would be faster for sure"


# -- the command


def run(config: WatchConfig) -> int:
    """Watch until interrupted, or once, and print the tables and the verdict.

    Raises:
        InputError: no card, a page without counters, or, at the first look, no server.
    """
    card = Card.read(config.head, config.temperature)
    costs = None if config.served is None else read_results(config.served, {"meta": dict, "rows": [dict]})["rows"]
    if config.counters is not None:
        watch = Watch(card, Tally(str(config.counters)))
        pages, answers = read_saved(config.counters)
        for page in pages:
            note(watch.tally.add(page), page.time)
            watch.add(page.time, watch.tally.total, watch.tally.answers)
        add_answers(watch, answers)
        return report(config, watch, costs)
    if not config.once and add_result():
        raise InputError("json", "--json without --once", "one look, as a document", "Add --once.")
    server = Server(ServerConfig(server=str(config.server)), "a vLLM, SGLang or llama.cpp server", root=True)
    watch = Watch.open(card, server.url, config.state)
    look(server, watch, config)
    try:
        while not config.once:
            time.sleep(config.interval_s)
            try:
                look(server, watch, config)
            except InputError as error:  # a server that restarts is no reason to end
                log_note(f"{clock()}  {error}")
    except KeyboardInterrupt:
        log_note("")
    return report(config, watch, costs)


def look(server: Server, watch: Watch, config: WatchConfig) -> None:
    """Read a server's counters, keep them, and print their line."""
    page = read_page(server.page("metrics").decode("utf-8", "replace"), time.time())
    note(watch.tally.add(page), page.time)
    watch.add(page.time, watch.tally.total, watch.tally.answers)
    if config.state is not None:
        write_json(config.state, watch.to_json(), indent=None)
    if not config.once:
        print_text(line(watch, config.alpha))


def add_answers(watch: Watch, answers: Sequence[EngineCounts]) -> None:
    """Take in answers that have their own counts, ANSWERS_AT_ONCE together."""
    counted = [one for one in answers if one.accepted is not None and one.generated is not None]
    if uncounted := len(answers) - len(counted):
        log_note(f"Answers without counts of their drafts, left out: {uncounted:,}")
    # A round emits its accepted tokens and one more; the first token comes from the prompt.
    rounds = [max(0, (one.generated or 0) - 1 - (one.accepted or 0)) for one in counted]
    # Tokens behind the end count as accepted, and a last round may be without a draft: whole drafts tell their number
    # better, but too few where drafts before the length limit are shorter.
    mean = sum(one.drafted or 0 for one in counted) / max(1, sum(rounds))
    length = max(1, round(mean))
    drafts, drafted, accepted = 0, 0, np.zeros(0, int)
    for number, (one, own_rounds) in enumerate(zip(counted, rounds, strict=True), start=1):
        own = np.array(one.by_place or (one.accepted,))
        accepted = own if not len(accepted) else accepted + own
        drafted += one.drafted or 0
        if one.drafts is not None:
            drafts += one.drafts
        else:
            whole = math.ceil((one.drafted or 0) / length)
            drafts += max(whole, own_rounds - 1) if mean >= WHOLE * length else own_rounds
        if number % ANSWERS_AT_ONCE == 0 or number == len(counted):
            by_place = tuple(map(int, accepted)) if one.by_place else ()
            watch.add(None, EngineCounts(drafts, drafted, int(accepted.sum()), by_place=by_place), number)


def note(sentences: Sequence[str], when: float | None) -> None:
    """Print what a reader must know of a page. when: it was read, in Unix seconds; None: unknown."""
    for sentence in sentences:
        log_note(sentence if when is None else f"{clock(when)}  {sentence}")


def clock(when: float | None = None) -> str:
    """Return a time, by default now, as it is printed."""
    return datetime.fromtimestamp(time.time() if when is None else when).astimezone().strftime("%Y-%m-%d %H:%M")


def line(watch: Watch, alpha: float) -> str:
    """Return the line of a look."""
    said = watch.verdict(alpha)[1]
    if not watch.looks:
        return f"{clock()}  {said}"
    now = watch.window(HOUR_S) or watch.looks[-1]
    places = " ".join(f"{count / max(1, now.drafts):.0%}" for count in now.accepted)
    counted = "" if now.answers is None else f"{now.answers:,} answers, "
    return f"{clock()}  tau {now.tau:.2f}  accepted {places}  {counted}{now.drafts:,} drafts  {said}"


def report(config: WatchConfig, watch: Watch, costs: Sequence[Mapping[str, Any]] | None) -> int:
    """Print the table and the verdict, and return the exit code."""
    spans = [("since the start", watch.looks[-1] if watch.looks else None)]
    spans += [("the last hour", watch.window(HOUR_S)), ("the last day", watch.window(24 * HOUR_S))]
    card = watch.card.chains.get(watch.length)
    if card is not None:
        drafts, *accepted = (int(own) for own in (card.drafts.sum(), *card.accepted.sum(0)))
        measured = Look(None, len(card.drafts), drafts, tuple(accepted))
        spans.insert(0, (f"card: {watch.card.kind}:k={watch.length}", measured))
    rows = []
    for name, look in spans:
        if look is not None:
            shares = [count / max(1, look.drafts) for count in look.accepted]
            places = {str(n): share for n, share in enumerate(shares, 1) if len(shares) == watch.length}
            rows.append({"of": name, "answers": look.answers, "drafts": look.drafts, "tau": look.tau, **places})
    columns = [Column("of", ""), Column("answers", "answers", ",d"), Column("drafts", "drafts", ",d")]
    columns += [Column("tau", "tau", ".3f"), *(Column(str(n), str(n), ".1%") for n in range(1, watch.length + 1))]
    note = "tau: tokens of a round with a draft. 1, 2, ...: drafts of which so many tokens or more were accepted."
    print_table(Table("watch", f"{config.head} at {config.server or config.counters}", columns, rows, note))
    code, said = watch.verdict(config.alpha)
    print_text(said)
    if costs is not None and card is not None and watch.looks:
        print_text(faster(watch.looks[-1], card, costs))
    bets = watch.evidence
    add_result(verdict=said, p_fall=bets and bets.p_fall, p_rise=bets and bets.p_rise)
    return code
