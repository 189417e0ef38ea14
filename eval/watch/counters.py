"""What servers count of their drafts: vLLM's, SGLang's and llama.cpp's pages of metrics, and saved answers.

vLLM counts every verified draft, whole: also accepted tokens beyond the end of an answer. SGLang and llama.cpp add the
counts of an answer when it ends. SGLang has no counter of accepted tokens: they are all tokens but the first of every
answer and one of every verification, so tokens of requests without drafts are counted as accepted. llama.cpp counts no
answers, and writes six digits: above a million its sums are rounded, those by place are not.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.data.engines.server import READ_LOG, SHOWN_CHARS
from draftsmith.modules.pretrained.reading import misfits, read_lines, read_text
from draftsmith.modules.types import InputError

# System -> metric, without the ending `_total` that counters have -> field of EngineCounts.
DRAFTS = {
    "spec_decode_num_drafts": "drafts",
    "spec_decode_num_draft_tokens": "drafted",
    "spec_decode_num_accepted_tokens": "accepted",
    "spec_decode_num_accepted_tokens_per_pos": "by_place",
}
METRICS = {
    "vllm": DRAFTS
    | {"generation_tokens": "generated", "request_success": "finished", "num_requests_running": "running"},
    "sglang": {"spec_verify_calls": "drafts", "num_requests": "finished", "generation_tokens": "generated"},
    "llamacpp": DRAFTS | {"tokens_predicted": "generated"},
}
STARTED = ("process_start_time_seconds",)
SERIES = re.compile(r'(?:(\w+):)?(\w+?)(?:_total)?(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})?\s+(\S+).*')
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
COUNT = re.compile(r"\d{1,20}(?:\.\d*)?(?:e\+?\d\d?)?")
TIME = re.compile(r"# time (\d+(?:\.\d*)?)")
PARTS = {"position", "finished_reason", "is_streaming", "priority"}  # all other labels tell engines apart
MANY = 100  # drafts from which a changed length is said
TRIAL = 10  # looks without counts after a fall that nothing explains; a second fall among them shows several servers

PROCESS = {"name": str, "last": {"*": int}, "sums": {"*": int}, "answers": int, "trial": int}
STATE = {"server": str, "system": str, "time": (float, None), "processes": {"*": PROCESS}, "present": [str]}
OF_VLLM = {"acceptance_histogram": [int], "num_draft_tokens": int}
ANSWER = (
    {"timings": {"predicted_n": int, "draft_n?": int, "draft_n_accepted?": int}},
    {"metrics": {"speculative_decoding": (OF_VLLM, None)}, "usage": {"completion_tokens": int}},
)

Counts = dict[str, int]  # field of EngineCounts, or place in the draft -> count
Series = tuple[str, str, dict[str, str], float]  # system, metric, labels, value


@dataclass(frozen=True)
class EngineCounts:
    """Counts of an engine, or several. None: the server does not say.

    drafts: rounds with a draft. drafted, accepted, generated: tokens. finished: answers. running: requests at this
    moment, where their drafts are counted already. by_place: drafts of which n tokens or more were accepted, for
    n = 1, 2, ...; empty if unknown.
    """

    drafts: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    finished: int | None = None
    running: int | None = None
    generated: int | None = None
    by_place: tuple[int, ...] = ()

    @classmethod
    def of(cls, counts: Iterable[Counts]) -> EngineCounts:
        """Add up counts."""
        sums: Counts = functools.reduce(plus, counts, {})
        places = sorted((name for name in sums if name.isdecimal()), key=int)
        by_place = tuple(sums.pop(place) for place in places)
        return cls(by_place=by_place, **sums)


def plus(one: Counts, two: Counts, sign: int = 1) -> Counts:
    """Add counts, or with sign -1 subtract them. A counter that is missing has counted nothing yet."""
    return {name: one.get(name, 0) + sign * two.get(name, 0) for name in one | two}


@dataclass(frozen=True)
class Snapshot:
    """Counts of all engines behind an address, by their labels.

    time: Unix time; None for a saved page without one. started: of the process that answered, if it says so.
    """

    time: float | None
    system: str
    started: float | None
    engines: dict[str, Counts]

    @property
    def total(self) -> EngineCounts:
        return EngineCounts.of(self.engines.values())


def read_page(text: str, time: float | None) -> Snapshot:
    """Read a page of metrics in Prometheus' text format.

    Raises:
        InputError: it has no metrics of a known server, or values that are no counts.
    """
    pages = list(read_pages(text, time))
    if len(pages) != 1:
        remedy = "Check the address; llama.cpp needs --metrics, SGLang --enable-metrics, vLLM no --disable-log-stats."
        raise InputError("server", f"{len(pages)} pages with metrics of vLLM, SGLang or llama.cpp", "one", remedy)
    return pages[0]


def read_pages(text: str, time: float | None = None) -> Iterator[Snapshot]:
    """Yield the pages of a text in their order. A line `# time UNIX` begins a page, and a series that repeats."""
    page: dict[str, Series] = {}
    for line in [*map(str.strip, text.splitlines()), "# time 0"]:
        stamp, series = TIME.fullmatch(line), _series(line)
        name = str(series[:3]) if series else ""
        if stamp or name in page:
            if any(system for system, *_ in page.values()):
                yield _snapshot(page.values(), time)
            page, time = {}, float(stamp[1]) if stamp else None
        if series:
            page[name] = series


def _series(line: str) -> Series | None:
    """Read a line of a page; return None for one that is not needed."""
    match = SERIES.fullmatch(line)
    if match is None or match[2] not in (METRICS.get(match[1], ()) if match[1] else STARTED):
        return None
    labels = dict(LABEL.findall(match[3] or ""))
    if not COUNT.fullmatch(match[4]) or not COUNT.fullmatch(labels.get("position", "0")):
        raise InputError("server", line[:SHOWN_CHARS], "counts", READ_LOG)
    return match[1] or "", match[2], labels, float(match[4])


def _snapshot(page: Iterable[Series], time: float | None) -> Snapshot:
    """Add up the series of every engine of a page."""
    system, *others = sorted({system for system, *_ in page} - {""})
    if others:
        raise InputError("server", f"metrics of {system} and {others[0]}", "those of one system", READ_LOG)
    started, engines = None, dict[str, Counts]()
    for own, metric, labels, value in page:
        if not own:
            started = value
            continue
        counts = engines.setdefault(", ".join(f"{n}={labels[n]}" for n in sorted(labels.keys() - PARTS)) or system, {})
        kind = METRICS[own][metric]
        kind = labels.get("position", "0") if kind == "by_place" else kind
        counts[kind] = counts.get(kind, 0) + int(value)
    for counts in engines.values():
        if places := [counts[kind] for kind in counts if kind.isdecimal()]:
            counts["accepted"] = sum(places)  # llama.cpp rounds its own sum
        elif "accepted" not in METRICS[system].values() and counts.keys() >= {"drafts", "generated", "finished"}:
            counts["accepted"] = counts["generated"] - counts["finished"] - counts["drafts"]
    return Snapshot(time, system, started, engines)


@dataclass
class Process:
    """What an engine's process has counted since it started.

    name: labels of the engine. answers: whose drafts are counted. trial: looks that are not counted yet after an
    unexplained fall; -1: several servers, of which none is counted.
    """

    name: str
    last: Counts = field(default_factory=dict)
    sums: Counts = field(default_factory=dict)
    answers: int = 0
    trial: int = 0

    def add(self, counts: Counts) -> str:
        """Count what came since the last look; return what a reader must know of it."""
        places, before = (sum(map(str.isdecimal, one)) for one in (counts, self.last))
        if before and places and places != before:
            self.last, self.sums, self.answers = counts, {}, 0
            return f"drafts of {places} tokens, {before} before: counts begin anew"
        if missing := sorted(self.last.keys() - counts.keys()):
            return f"no count of {', '.join(missing)}; nothing is counted until it is back"
        change, self.last = plus(counts, self.last, -1), counts
        change.pop("running", None)
        if self.trial < 0:
            return ""
        if min(count for name, count in change.items() if name != "accepted") < 0:
            self.trial = -1 if self.trial else TRIAL
            if self.trial < 0:
                return "counts fall again: several servers answer in turn. None is counted; watch each by itself"
            return f"counts fell: a restart, or another server. The next {TRIAL} looks are not counted"
        if self.trial:
            self.trial -= 1
            return ""
        mean = self.sums.get("drafted", 0) / (self.sums.get("drafts") or 1)
        self.sums = plus(self.sums, change)
        self.answers = max(self.answers, self.sums.get("finished", 0) + counts.get("running", 0))
        length = change.get("drafted", 0) / (change.get("drafts") or 1)
        moved = mean and change.get("drafts", 0) >= MANY and abs(length - mean) > 0.5
        return f"drafts of {length:.1f} tokens, {mean:.1f} before" if moved else ""


@dataclass
class Tally:
    """What a server counted since its start, across restarts.

    A process of an engine is known by its labels and its start time: restarts, and replicas that answer in turn behind
    one address, are each counted by themselves. Without a start time only a counter that falls shows them.
    """

    server: str
    system: str = ""
    time: float | None = None
    processes: dict[str, Process] = field(default_factory=dict)
    present: list[str] = field(default_factory=list)

    @property
    def drafting(self) -> list[Process]:
        """Processes whose drafts are counted."""
        return [own for own in self.processes.values() if "drafts" in own.last and own.trial >= 0]

    @property
    def total(self) -> EngineCounts:
        return EngineCounts.of(own.sums for own in self.drafting)

    @property
    def answers(self) -> int | None:
        """Answers whose drafts are counted; None if unknown."""
        known = all("finished" in own.last for own in self.drafting)
        return sum(own.answers for own in self.drafting) if known else None

    def add(self, snapshot: Snapshot) -> list[str]:
        """Count what came since the last look; return in sentences what a reader must know of it.

        Raises:
            InputError: it is of another system.
        """
        if self.system not in ("", snapshot.system):
            raise InputError("server", snapshot.system, self.system, "Delete the state file to begin anew.")
        notes = [f"{name}: gone" for name in self.present if name not in snapshot.engines]
        for name, counts in snapshot.engines.items():
            key = f"{name} since {snapshot.started}"
            if key not in self.processes:
                others = any(own.name == name for own in self.processes.values())
                new = self.time is not None and (snapshot.started or 0.0) > self.time
                self.processes[key] = Process(name)
                if others:
                    said = "restarted; what it counted after the last look is lost"
                    other = "another server answers at this address; each is counted by itself"
                    notes.append(f"{name}: {said if new else other}")
                elif self.present:
                    notes.append(f"{name}: a new engine")
            if note := self.processes[key].add(counts):
                notes.append(f"{name}: {note}")
        if len({len(own.last) for own in self.drafting if own.name in snapshot.engines}) > 1:
            notes.append("engines draft different numbers of tokens: their sums measure neither")
        self.time, self.system, self.present = snapshot.time, snapshot.system, list(snapshot.engines)
        return notes

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Any, server: str) -> Tally:
        """Read what `to_json` gave.

        Raises:
            InputError: it is damaged, older, or of another server.
        """
        misfit = next(misfits(content, STATE), None)
        if misfit is None and content["server"] != server:
            misfit = content["server"], server
        if misfit:
            raise InputError("state", *misfit, "Delete it, or name another one.")
        processes = {key: Process(**{name: own[name] for name in PROCESS}) for key, own in content["processes"].items()}
        return cls(server, content["system"], content["time"], processes, content["present"])


def read_saved(path: Path) -> tuple[list[Snapshot], list[EngineCounts]]:
    """Read saved pages of metrics, or answers with their own counts, one response or logged request a line.

    llama.cpp's answers say no drafts, but their tokens and how many of them were accepted, also behind the end of the
    answer. vLLM's have all counts with --per-request-spec-decode-metrics summary, but for answers that a stop string
    ended.

    Raises:
        InputError: neither of them, or not all lines.
    """
    expected = "pages of metrics, or answers of llama.cpp with timings or of vLLM with metrics.speculative_decoding"
    text, answers = read_text(path, expected), []
    if not text.lstrip().startswith("{"):
        pages = list(read_pages(text))
        if not pages:
            raise InputError(str(path), "no metrics of vLLM, SGLang or llama.cpp", expected, "Check the file.")
        return pages, []
    for number, row in enumerate(read_lines(path, {"response?": dict}), start=1):
        reply = row.get("response", row)
        if any(misfits(reply, ANSWER)):
            raise InputError(str(path), f"line {number} without these counts", expected, "Leave it out.")
        if timings := reply.get("timings"):
            drafted, accepted = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
            answers.append(EngineCounts(None, drafted, accepted, 1, generated=timings["predicted_n"]))
        elif counts := reply["metrics"]["speculative_decoding"]:
            rounds = counts["acceptance_histogram"]
            by_place = tuple(sum(rounds[place:]) for place in range(1, len(rounds)))
            sums = sum(rounds), counts["num_draft_tokens"], sum(by_place), 1
            answers.append(EngineCounts(*sums, generated=reply["usage"]["completion_tokens"], by_place=by_place))
        else:  # ended by a stop string
            answers.append(EngineCounts(finished=1, generated=reply["usage"]["completion_tokens"]))
    return [], answers
