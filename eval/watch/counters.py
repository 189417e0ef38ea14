"""Counts of drafts from vLLM's, SGLang's and llama.cpp's pages of metrics, and from saved answers.

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
DRAFTS = {"spec_decode_num_drafts": "drafts", "spec_decode_num_draft_tokens": "drafted"}
DRAFTS |= {"spec_decode_num_accepted_tokens": "accepted", "spec_decode_num_accepted_tokens_per_pos": "by_place"}
METRICS = {
    "vllm": {"request_success": "finished", "num_requests_running": "running", "generation_tokens": "generated"},
    "sglang": {"spec_verify_calls": "drafts", "num_requests": "finished", "generation_tokens": "generated"}
    | {"spec_num_steps": "places"},
    "llamacpp": DRAFTS | {"tokens_predicted": "generated"},
    "": {"process_start_time_seconds": "started"},
}
METRICS["vllm"] |= DRAFTS
SERIES = re.compile(r'((?:(\w+):)?(\w+?)(?:_total)?\s*(?:\{(?:[^"}]|"(?:[^"\\]|\\.)*")*\})?)\s+(\S+).*')
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
COUNT = re.compile(r"\d{1,20}(?:\.\d*)?(?:e\+?\d\d?)?")
PLACE = re.compile(r"\d{1,4}")
TIME = re.compile(r"# time (\d+(?:\.\d*)?)")
PARTS = {"position", "finished_reason", "is_streaming", "priority"}  # all other labels tell engines apart
MANY = 100  # times the rounding that new drafts must be
TRIAL = 10  # looks without counts after a fall that nothing explains; a second fall among them shows several servers

PROCESS = {"name": str, "last": {"*": int}, "before": {"*": int}, "answers": int, "trial": int}
STATE = {"server": str, "system": str, "time": (float, None), "places": int, "present": [str]}
STATE |= {"processes": {"*": PROCESS}}
OF_VLLM = ({"speculative_decoding?": ({"acceptance_histogram": [int], "num_draft_tokens": int}, None)}, None)
ANSWER = (
    {"timings": {"predicted_n": int, "draft_n?": int, "draft_n_accepted?": int}},
    {"metrics": OF_VLLM, "usage": {"completion_tokens": int}},
)

Counts = dict[str, int]  # field of EngineCounts, or place in the draft -> count


def plus(one: Counts, two: Counts) -> Counts:
    """Add counts. A counter that is missing has counted nothing yet."""
    return {name: one.get(name, 0) + two.get(name, 0) for name in one | two}


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
        sums = functools.reduce(plus, counts, Counts())
        by_place = tuple(sums.pop(place) for place in sorted(filter(str.isdecimal, sums), key=int))
        if by_place:
            sums["accepted"] = sum(by_place)  # llama.cpp rounds its own sum
        elif "drafted" not in sums and sums.keys() >= {"generated", "finished", "drafts"}:
            sums["accepted"] = sums["generated"] - sums["finished"] - sums["drafts"]
        return cls(by_place=by_place, **sums)


@dataclass
class Snapshot:
    """A page of metrics. time: Unix time, if known. started: of the process that answered, if it says so.

    places: tokens of a draft; 0 if it does not say. engines: counts of all engines behind the address, by their labels,
    since their start.
    """

    time: float | None
    system: str = ""
    started: float | None = None
    places: int = 0
    engines: dict[str, Counts] = field(default_factory=dict)

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
    page, names = Snapshot(time), set[str]()
    for line in [*map(str.strip, text.splitlines()), "# time 0"]:
        stamp, series = TIME.fullmatch(line), SERIES.fullmatch(line)
        if stamp or (series and series[1] in names):
            if page.system:
                yield page
            page, names = Snapshot(float(stamp[1]) if stamp else None), set()
        if series is None or (system := series[2] or "") not in METRICS:
            continue
        if system and page.system not in ("", system):
            raise InputError("server", f"metrics of {page.system} and {system}", "those of one system", READ_LOG)
        page.system = system or page.system
        kind, labels = METRICS[system].get(series[3]), dict(LABEL.findall(series[1]))
        if kind is None:
            continue
        if not COUNT.fullmatch(series[4]) or not PLACE.fullmatch(labels.get("position", "0")):
            raise InputError("server", line[:SHOWN_CHARS], "counts", READ_LOG)
        names.add(series[1])
        if not system:
            page.started = float(series[4])
            continue
        if kind == "places":
            page.places = max(page.places, int(float(series[4])))
            continue
        engine = ", ".join(f"{label}={labels[label]}" for label in sorted(labels.keys() - PARTS)) or system
        counted = {labels.get("position", "0") if kind == "by_place" else kind: int(float(series[4]))}
        page.engines[engine] = plus(page.engines.get(engine, {}), counted)


@dataclass
class Process:
    """Counts of an engine's process since it started.

    name: labels of the engine. before: counts of earlier processes that nothing tells apart from this one. answers:
    whose drafts are counted. trial: looks that are not counted yet after an unexplained fall; -1: several servers, of
    which none is counted.
    """

    name: str
    last: Counts = field(default_factory=dict)
    before: Counts = field(default_factory=dict)
    answers: int = 0
    trial: int = 0

    @property
    def counts(self) -> Counts:
        """Sums since the start of the first process."""
        counted = self.before if self.trial else plus(self.before, self.last)
        return {name: count for name, count in counted.items() if name != "running"}

    def add(self, counts: Counts, least: int) -> str:
        """Take in the counts so far; return what a reader must know. least: drafts that must be new."""
        if any(counts.get(name, count) < count for name, count in self.last.items() if name != "running"):
            self.before, self.last, again = self.counts, counts, self.trial != 0
            self.trial = -1 if again else TRIAL
            if again:
                return "counts fall again: several servers answer in turn. None is counted; watch each by itself"
            return f"counts fell: a restart, or another server. The next {TRIAL} looks are not counted yet"
        if missing := sorted(self.last.keys() - counts.keys()):
            return f"no count of {', '.join(missing)}; nothing is counted until it is back"
        if counts.get("drafts", 0) - self.last.get("drafts", 0) >= least:
            self.last = counts
            self.trial -= self.trial > 0
            running = 0 if self.trial else counts.get("running", 0)
            self.answers = max(self.answers, self.counts.get("finished", 0) + running)
        return ""


@dataclass
class Tally:
    """What a server counted since its start, across restarts.

    A process of an engine is known by its labels and its start time: restarts, and replicas that answer in turn behind
    one address, are each counted by themselves. Without a start time only a counter that falls shows them.
    """

    server: str
    system: str = ""
    time: float | None = None
    places: int = 0  # of drafts
    present: list[str] = field(default_factory=list)
    processes: dict[str, Process] = field(default_factory=dict)

    @property
    def drafting(self) -> list[Process]:
        """Processes whose drafts are counted."""
        return [own for own in self.processes.values() if "drafts" in own.last and own.trial >= 0]

    @property
    def total(self) -> EngineCounts:
        return EngineCounts.of(own.counts for own in self.drafting)

    @property
    def trouble(self) -> str:
        """Say why counts of the engines that are there are not sums of one kind; empty if they are."""
        here = [own for own in self.processes.values() if own.name in self.present]
        if any(own.trial < 0 for own in here):
            return "several servers answer in turn at this address: watch each by itself"
        if looks := max((own.trial for own in here), default=0):
            return f"counts fell, by a restart or as several servers answer in turn; {looks} more looks tell"
        if here and not any("drafts" in own.last for own in here):
            return "no drafts are counted: there were none, or the server has no drafter or no counts of it"
        return ""

    @property
    def answers(self) -> int | None:
        """Answers whose drafts are counted; None if unknown."""
        known = all("finished" in own.last for own in self.drafting)
        return sum(own.answers for own in self.drafting) if known else None

    def add(self, snapshot: Snapshot) -> list[str]:
        """Take in a page; return in sentences what a reader must know of it.

        Raises:
            InputError: it is of another system.
        """
        if self.system not in ("", snapshot.system):
            raise InputError("server", snapshot.system, self.system, "Delete the state file to begin anew.")
        notes = [f"{name}: gone" for name in self.present if name not in snapshot.engines]
        places = len(snapshot.total.by_place) or snapshot.places
        if self.places and places and places != self.places:
            notes.append(f"drafts of {places} tokens, {self.places} before: counts begin anew")
            self.processes, self.present = {}, []
        for name, counts in snapshot.engines.items():
            key = f"{name} since {snapshot.started}"
            if key not in self.processes:
                known = any(own.name == name for own in self.processes.values())
                new = self.time is not None and (snapshot.started or 0.0) > self.time
                said = "restarted; its last counts are lost" if new else "another process; each is counted by itself"
                notes += [f"{name}: {said if known else 'a new engine'}"] if self.present else []
                notes += [f"{name}: counts no drafts so far"] if "drafts" not in counts else []
                self.processes[key] = Process(name)
            # llama.cpp writes six digits of its sums.
            rounding = 10 ** max(len(str(counts.get("drafts", 0))) - 6, 0) if self.system == "llamacpp" else 1
            note = self.processes[key].add(counts, MANY * rounding if rounding > 1 else 0)
            notes += [f"{name}: {note}"] if note else []
        self.time, self.system, self.present = snapshot.time, snapshot.system, list(snapshot.engines)
        self.places = places or self.places
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
        return cls(**{name: content[name] for name in STATE} | {"processes": processes})


def read_saved(path: Path) -> tuple[list[Snapshot], list[EngineCounts]]:
    """Read saved pages of metrics, or answers with their own counts, one response or logged request a line.

    llama.cpp's answers say no drafts, but their tokens and how many of them were accepted, also behind the end of the
    answer. vLLM's have all counts with --per-request-spec-decode-metrics summary, but for answers that a stop string
    ended.

    Raises:
        InputError: neither of them, or not all lines.
    """
    expected = "pages of metrics, or answers of llama.cpp with timings or of vLLM with metrics.speculative_decoding"
    text, answers = read_text(path, expected), list[EngineCounts]()
    pages = [] if text.lstrip().startswith("{") else list(read_pages(text))
    for number, row in enumerate([] if pages else read_lines(path, {"response?": dict}), start=1):
        reply = row.get("response", row)
        if any(misfits(reply, ANSWER)):
            raise InputError(str(path), f"line {number} without these counts", expected, "Leave it out.")
        if timings := reply.get("timings"):
            drafted, accepted = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
            answers.append(EngineCounts(None, drafted, accepted, generated=timings["predicted_n"]))
            continue
        counts = (reply["metrics"] or {}).get("speculative_decoding") or {}
        rounds = counts.get("acceptance_histogram", ())  # by accepted tokens
        by_place = tuple(sum(rounds[place:]) for place in range(1, len(rounds)))
        drafts, drafted = (sum(rounds), counts["num_draft_tokens"]) if counts else (None, None)
        accepted, generated = sum(by_place) if counts else None, reply["usage"]["completion_tokens"]
        answers.append(EngineCounts(drafts, drafted, accepted, generated=generated, by_place=by_place))
    return pages, answers
