"""`draftsmith eval report`: runs as one HTML page that loads nothing and has no script.

A run has its tables, and the answers whose rounds were traced. A token is colored by how it came:

    accepted    a drafted token that the target accepted
    bonus       the target's own token after a fully accepted draft
    correction  the target's own token in place of a rejected one
    alone       the target's own token where nothing was drafted, also the prefill's
"""

from __future__ import annotations

import datetime
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from draftsmith.data.console import merged, print_text, tables_from_json
from draftsmith.eval.bench.tables import mode, results_tables
from draftsmith.eval.bench.trace import TEXTS, TRACE
from draftsmith.eval.meta import MEASURE, RESULTS, read_results
from draftsmith.eval.settings import ReportConfig
from draftsmith.modules.pretrained.files import make_directory, write_text
from draftsmith.modules.pretrained.reading import read_lines, read_object
from draftsmith.modules.types import InputError

Row = Mapping[str, Any]
SHAPE: dict[str, Any] = {
    "meta": {f"{name}?": (dict, None) for name in ("settings", "hardware", "prompts", "versions", "models")},
    "methods?": [{"method": str, "temperature": float, "by?": {"*": [dict]}}],
    "tables?": [{"name": str, "columns?": [{"key": str, "title": str}], "rows?": [dict]}],
}
TITLES = {"bench": "Benchmark", "certify": "Certificate", "replay": "Replayed answers", "served": "In a server"}
TRACE_BYTES = 2_600_000  # of trace lines for all runs together: the page stays under 5 MB


def run(config: ReportConfig) -> Path:
    """Write the page and return its path.

    Raises:
        InputError: a directory is not a run.
    """
    runs = read_runs(config.runs)
    traced = [one for one in runs if (one.path / TRACE).exists()]
    sections = [section_of(one, TRACE_BYTES // max(1, len(traced))) for one in runs]
    output = config.output
    assert output is not None
    make_directory(output.parent)
    write_text(output, render(sections))
    print_text(f"Written to {output} ({output.stat().st_size / 1e6:.1f} MB)")
    return output


def render(sections: Sequence[Row]) -> str:
    """Render the page; everything except this project's own template is escaped, and no script would run."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string((files("draftsmith.eval") / "report.html.jinja").read_text("utf-8"))
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return template.render(sections=sections, date=date)


@dataclass(frozen=True)
class Run:
    """A run's directory and results; its name is the directory's, with the parent's if another run has the same."""

    path: Path
    name: str
    results: Mapping[str, Any]


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read finished runs.

    Raises:
        InputError: a path without complete results, or with results of something else.
    """
    directories = [path.parent if path.name == RESULTS else path for path in paths]
    resolved = [path.resolve() for path in directories]
    if twice := [path for number, path in enumerate(directories) if resolved[number] in resolved[:number]]:
        raise InputError("runs", f"{twice[0]} twice", "each run once", "Name it once.")
    seen = Counter(path.name for path in resolved)
    runs = []
    for path, whole in zip(directories, resolved, strict=True):
        results = read_results(path, SHAPE)
        if not results.get("methods") and not results.get("tables"):
            raise InputError(str(path / RESULTS), "nothing measured", "rows of a method or a table", MEASURE)
        runs.append(Run(path, whole.name if seen[whole.name] == 1 else f"{whole.parent.name}/{whole.name}", results))
    return runs


def section_of(one: Run, trace_bytes: int) -> dict[str, Any]:
    """Return what the page shows of a run; its traced answers take at most `trace_bytes` of trace lines."""
    meta = one.results["meta"]
    kind = str(meta.get("kind", "bench"))
    tables = results_tables({"failures": (), **one.results}) if kind == "bench" else tables_from_json(one.results)
    prompts, hardware, settings = (meta.get(name) or {} for name in ("prompts", "hardware", "settings"))
    about = [f"Target {settings.get('target', 'not named')}"]
    about += [f"{prompts['count']} prompts of {prompts.get('source', 'an unnamed source')}"] if prompts else []
    if machine := hardware.get("gpu") or hardware.get("cpu"):
        about.append(f"{machine}, {hardware.get('torch_threads', '?')} CPU thread(s)")
    return {
        "title": f"{TITLES.get(kind, kind)} · {one.name}",
        "about": f"{'; '.join(about)}. Measured {str(meta.get('date', 'at an unknown date'))[:10]}.",
        "tables": [merged(table) for table in tables if table.columns],
        "prompts": traced_prompts(one.path, trace_bytes),
        "command": str(meta.get("command") or ""),
    }


# -- answers, token by token


def kinds(line: Row) -> list[str]:
    """Return the kind of each emitted token of a round."""
    emitted, path = line["emitted"], list(line.get("accepted", ()))
    if line.get("prefill") or not line.get("drafted"):
        return ["alone"] * len(emitted)
    found = ["accepted"] * min(len(path), len(emitted))
    if len(emitted) > len(found):
        last = path[-1] if path else -1
        found.append("correction" if last in line["parents"] else "bonus")
    return found


def traced_prompts(directory: Path, max_bytes: int) -> list[dict[str, Any]]:
    """Return the prompts of a run that the page shows, with all their traced answers; none if rounds were not traced.

    They are taken from the tasks in turn, as long as their lines fit into `max_bytes`.
    """
    if not (directory / TRACE).exists() or not (directory / TEXTS).exists():
        return []
    again = "Delete it, and measure again with --traces."
    texts = read_object(directory / TEXTS, {"prompts": dict, "tokens": dict}, again)
    sizes, tasks = dict[tuple[int, int], int](), dict[tuple[int, int], str]()
    for line in read_lines(directory / TRACE, {}, again):
        prompt = line["prompt"], line["turn"]
        tasks[prompt], sizes[prompt] = line["task"] or "", sizes.get(prompt, 0) + len(json.dumps(line))
    chosen = shown_prompts(sizes, tasks, max_bytes)
    shown = {prompt: {"text": texts["prompts"].get(f"{prompt[0]}/{prompt[1]}", ""), "answers": {}} for prompt in chosen}
    for line in read_lines(directory / TRACE, {}, again):
        if (own := shown.get((line["prompt"], line["turn"]))) is not None:
            turn = f", turn {line['turn']}" if line["turn"] > 1 else ""
            own["title"] = f"{line['task'] or ''} {line['id']}{turn}".strip()
            named = f"{line['method']}, {mode(line['temperature'])}"
            answer = own["answers"].setdefault(named, {"tokens": [], "rounds": 0})
            answer["tokens"] += shown_tokens(line, answer["rounds"], texts["tokens"])
            answer["rounds"] += 1
    return list(shown.values())


def shown_tokens(line: Row, number: int, texts: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield a round's tokens as (kind, text, what is said of it), with those that were drafted and not kept."""

    def text(token: int) -> str:
        return texts.get(str(token), f"<{token}>")

    def about(node: int) -> str:
        return f", q {line['q'][node]:.3g}" if line.get("q") else ""

    drafted, path = line.get("drafted") or [], list(line.get("accepted", ()))
    times = f"target {1000 * line['target_s']:.3g} ms" if line.get("target_s") is not None else ""
    times += f", drafting {1000 * line['draft_s']:.3g} ms" if line.get("draft_s") is not None else ""
    said = f"round {number}: {len(drafted)} drafted, {len(path)} accepted; {times}".removesuffix("; ")
    lost = [node for node in range(len(drafted)) if node not in path]
    for place, (token, kind) in enumerate(zip(line["emitted"], kinds(line), strict=True)):
        if kind != "accepted":
            yield from (("discarded", text(drafted[node]), f"thrown away{about(node)}") for node in lost)
            lost = []
        yield kind, text(token), f"{kind}{about(path[place]) if kind == 'accepted' else ''}\n{said}"
    yield from (("discarded", text(drafted[node]), f"thrown away{about(node)}") for node in lost)


def shown_prompts(
    sizes: Mapping[tuple[int, int], int], tasks: Mapping[tuple[int, int], str], max_bytes: int
) -> list[tuple[int, int]]:
    """Choose prompts that fit, the first of every task before the second of any."""
    by_task: dict[str, list[tuple[int, int]]] = {}
    for prompt in sizes:
        by_task.setdefault(tasks[prompt], []).append(prompt)
    chosen, left = [], max_bytes
    for prompt in itertools.chain.from_iterable(itertools.zip_longest(*by_task.values())):
        if prompt is not None and sizes[prompt] <= left:
            chosen.append(prompt)
            left -= sizes[prompt]
    return chosen
