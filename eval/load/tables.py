"""A run under load as tables: on the screen, and for the report, which also draws two of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draftsmith.data.tables import Column, Table, interval
from draftsmith.eval.bench.results import BASELINE
from draftsmith.eval.load.requests import Load
from draftsmith.eval.load.summary import LATENCIES, QUANTILES
from draftsmith.eval.report.tables import drawn_data

Row = Mapping[str, Any]
HEADINGS = {"closed": ("users", "users"), "open": ("rate", "requests a second")}


def load_tables(rows: Sequence[Row], paying: Sequence[Row], goals: str, note: str) -> list[Table]:
    """All tables. rows: of `summary.summarise`. paying: of `summary.paying`. goals: in words, or nothing."""
    found = []
    for kind, (short, said) in HEADINGS.items():
        own = [row for row in rows if row["load"] == kind]
        if own:
            name = "Fixed numbers of users" if kind == "closed" else "Requests at a rate"
            found += [speeds(kind, f"{name}: throughput", short, own, goals), latencies(kind, name, short, own, note)]
        ends = [row for row in paying if row["load"] == kind]
        if ends:
            found.append(where_it_pays(kind, said, ends))
        if kind == "closed" and own:
            found += [drawn_data("load-throughput", curve(own, ends)), drawn_data("load-speedup", ratios(own))]
    return found


def speeds(kind: str, title: str, short: str, rows: Sequence[Row], goals: str) -> Table:
    """Fits in 80 columns with methods' names folded."""
    columns = [Column("at", short), Column("method", "method"), Column("tokens_per_s", "tok/s", ",.0f")]
    columns += [Column("tokens_ci", "95 % CI")] if any(row.get("tokens_per_s_ci95") for row in rows) else []
    columns += [Column("speedup", "x ar", ".2fx"), Column("speedup_ci", "95 % CI")]
    columns += [Column("user_tokens_per_s", "a user", ",.0f")]
    columns += [Column("goodput", "good/s", ".2f")] if goals else []
    columns += [Column("length", "tau", ".2f")]
    note = (
        "tok/s: output tokens a second of all users; a user: what one sees behind the first token (1 / time per output "
        "token). x ar: tokens by the time that their requests took, over ar's under the same load."
    )
    note += f" good/s: requests a second that meet {goals}." if goals else ""
    checked = [row["matches_ar"] for row in rows if "matches_ar" in row]
    if checked and all(checked):
        note += " Every answer is that of ar alone, token for token."
    elif checked:
        columns.append(Column("equal", "= ar"))
        note += " = ar: whether all answers are those of ar alone, and how many are not."
    return Table(f"load-{kind}", title, columns, [shown(row) for row in rows], note)


def shown(row: Row) -> dict[str, Any]:
    matches, tau = row.get("matches_ar"), row.get("tau")
    equal = "-" if matches is None else "yes" if matches else f"no ({row['num_differing']})"
    return {
        **row,
        "at": str(Load(row["load"], row["value"])),
        "tokens_ci": interval(row.get("tokens_per_s_ci95"), ".0f"),
        "speedup_ci": "" if row["method"] == BASELINE else interval(row.get("speedup_ci95")),
        "length": row.get("round_tokens") if tau is None else tau,
        "equal": equal,
    }


def latencies(kind: str, name: str, short: str, rows: Sequence[Row], note: str) -> Table:
    """Milliseconds; the three percentiles of each in one cell."""
    columns = [Column("at", short), Column("method", "method")]
    titles = {"ttft": "first token", "tpot": "per token", "itl": "gap", "e2e": "whole answer"}
    columns += [Column(key, title) for key, title in titles.items()]
    cells = []
    for row in rows:
        texts = {}
        for key in titles:
            found = [row.get(f"{key}_{point}") for point in QUANTILES]
            texts[key] = "/".join("-" if value is None else milliseconds(value) for value in found)
        cells.append({"at": str(Load(row["load"], row["value"])), "method": row["method"], **texts})
    said = (
        "Milliseconds, p50/p95/p99 over requests, from when a request was to begin; gap: between arrivals of tokens, "
        "over all of them."
    )
    return Table(f"load-{kind}-latency", f"{name}: latencies", columns, cells, f"{said} {note}")


def milliseconds(seconds: float) -> str:
    value = 1000 * seconds
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def where_it_pays(kind: str, said: str, rows: Sequence[Row]) -> Table:
    columns = [Column("method", "method"), Column("best", "best", ".2fx"), Column("best_at", f"at {said}", "g")]
    columns += [Column("stops", "stops paying")]
    texts = [{**row, "stops": stops(row, said)} for row in rows]
    note = "Where the speed over ar falls below 1 and stays there, on a straight line over the logarithm of the load."
    return Table(f"load-{kind}-pays", "Where speculation stops paying", columns, texts, note)


def stops(row: Row, said: str) -> str:
    if not row["pays"]:
        return f"does not pay at {row['stops_at']:g} or more"
    if row["stops_at"] is None:
        return f"pays up to {row['last']:g}, the most that was measured"
    low, high = row["between"]
    return f"at about {row['stops_at']:.2g} {said} (between {low:g} and {high:g})"


def curve(rows: Sequence[Row], paying: Sequence[Row]) -> list[dict[str, Any]]:
    """Points of throughput by what a user sees, a line a method; and where the line crosses that of `ar`."""
    known = [row for row in rows if row.get("user_tokens_per_s")]
    found = [
        {"method": row["method"], "users": row["value"], "user_tokens_per_s": row["user_tokens_per_s"],
         "tokens_per_s": row["tokens_per_s"], "speedup": row.get("speedup")}
        for row in known
    ]  # fmt: skip
    at = {(row["method"], row["value"]): row for row in known}
    for row in paying:
        if "between" not in row:
            continue
        low, high = (at.get((row["method"], end)) for end in row["between"])
        if low and high:
            share, user = row["share"], "user_tokens_per_s"
            place = {
                user: low[user] * (high[user] / low[user]) ** share,  # on the line: its axis is logarithmic
                "tokens_per_s": low["tokens_per_s"] + share * (high["tokens_per_s"] - low["tokens_per_s"]),
            }
            stops = f"1x at {row['stops_at']:.2g}"
            found.append({"method": row["method"], "users": row["stops_at"], "stops": stops, **place})
    return found


def ratios(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Speed over `ar` by users, with intervals."""
    found = []
    for row in rows:
        if row["method"] != BASELINE and row.get("speedup") is not None:
            low, high = row.get("speedup_ci95") or (None, None)
            found.append({"method": row["method"], "users": row["value"], "speedup": row["speedup"],
                          "low": low, "high": high})  # fmt: skip
    return found


def numbers(rows: Sequence[Row]) -> dict[str, Any]:
    """Flat numbers that texts quote."""
    keys = ("tokens_per_s", "speedup", *(f"{name}_p99" for name in LATENCIES))
    return {
        f"{row['method']} at {Load(row['load'], row['value'])}: {key}": row[key]
        for row in rows
        for key in keys
        if row.get(key) is not None
    }
