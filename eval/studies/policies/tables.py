"""What the comparison of stop policies found, as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draftsmith.eval.replay import replay
from draftsmith.eval.report.tables import Column, Table, drawn_data, plain
from draftsmith.eval.studies.common import slug
from draftsmith.eval.studies.policies.bars import bar_rows
from draftsmith.eval.studies.policies.comparison import AtCost, Chosen, DrafterMode, PolicyComparison
from draftsmith.eval.studies.policies.families import (
    AS_PUBLISHED,
    FITTED,
    FIXED,
    ONLINE,
    ONLINE_MAX_Q,
    ONLINE_Q,
    RAW,
)
from draftsmith.eval.studies.predictors import (
    ENTROPY,
    LABELS,
    MAX_Q,
    QUALITY,
    LabelledTokens,
    Prediction,
    by_value,
    confidences,
    fitted_probs,
    labelled_tokens,
    online_probs,
    probabilities_of,
    quality_by,
    quality_rows,
    reliability_rows,
)

Row = dict[str, Any]
# Names of tables.
BARS, GAINS, BENCH, WHO_KNOWS = "policies-bars", "policies-gains", "policies-bench", "policies-quality"
# Of the charts, where they could not be told apart from what is shown; tables have them.
LEFT_OUT = {MAX_Q, ENTROPY, ONLINE_Q, ONLINE_MAX_Q}
OVERLAP = "policies-overlap"  # name of a table
INTERVALS = "Intervals are 95 %, by bootstrap over prompts in pairs."
MODEL = (
    "Time is counted in rounds without a draft: 1 a round and c a drafted token, the prefill counting 1. All policies "
    "walk the target's own text, with the same accept draws. Settings are chosen on dev prompts at each c. "
)
# Drafter and mode -> reported tokens, and what every predictor says of them.
Findings = Mapping[str, tuple[LabelledTokens, Mapping[str, Prediction]]]


def tables_of(found: Sequence[PolicyComparison], measured: Sequence[Row]) -> list[Table]:
    """All of them. measured: of the cross-check, none where nothing was decoded."""
    said: dict[str, tuple[LabelledTokens, dict[str, Prediction]]] = {}
    for compared in found:
        tokens = labelled_tokens(compared.scene.test)
        said[compared.scene.title] = tokens, predictions(compared.scene, tokens)
    by_depth = depth_rows(said)
    return [
        bars_table(found, measured),
        *(gain_table(compared) for compared in found),
        drawn_data("policies-gain", chart_rows(found)),
        settings_table(found),
        *([bench_table(measured)] if measured else []),
        task_table(found),
        overlap_table(found),
        quality_table(said),
        drawn_data("policies-reliability", shown_rows(said)),
        *(
            drawn_data(f"policies-{key}-by-depth", [row for row in by_depth if row[key] is not None])
            for key in ("auc", "ece")
        ),
    ]


def shown_first(tables: Sequence[Table]) -> list[str]:
    """Names of the tables for the screen: the rest is for the report."""
    return [table.name for table in tables if table.name.startswith((BARS, GAINS, BENCH, WHO_KNOWS))]


def bars_table(found: Sequence[PolicyComparison], measured: Sequence[Row]) -> Table:
    columns = [
        Column("scene", "drafter, mode"), Column("c", "c"), Column("what", "what"), Column("value", "value", "+.1%"),
        Column("interval", "interval"), Column("bar", "bar", ".1%"), Column("reached", "reached"), Column("who", "who"),
    ]  # fmt: skip
    note = (
        "What was asked for before anything was measured. The head and the training-free policy are the best of all "
        "such on dev prompts. Training-free policies are of two kinds: those that go by the draft's confidence alone, "
        f"and the one that looks for repetitions of the text too; the head is held against both. {INTERVALS}"
    )
    return Table(BARS, "The bars, and what was reached", columns, bar_rows(found, measured), note)


def gain_table(compared: PolicyComparison) -> Table:
    """A row a family, a column a c."""
    scene = compared.scene
    columns = [Column("policy", "policy"), Column("role", "kind")]
    columns += [Column(f"c{number}", f"c = {at.name}") for number, at in enumerate(compared.at)]
    rows = []
    for name, chosen in compared.at[0].chosen.items():
        row: Row = {"policy": name, "role": KINDS[chosen.family.role]}
        for number, at in enumerate(compared.at):
            row[f"c{number}"] = at.fixed.policy.label if name == FIXED else compared.gain(at, at.chosen[name]).text
        rows.append(row)
    title = f"Gain over the best fixed K, {scene.title}"
    return Table(f"{GAINS}-{scene.drafter}-{slug(scene.mode)}", title, columns, rows, MODEL + INTERVALS)


KINDS = {
    "fixed": "baseline", "free": "training-free", "looking": "training-free, looks into the text",
    "fitted": "fitted on dev labels", "head": "trained head",
    "ceiling": "knows p and q", "oracle": "knows the accept draws",
}  # fmt: skip


def gain_rows(found: Sequence[PolicyComparison]) -> list[Row]:
    """One row for each scene, c and family but the fixed, with the setting chosen and its counts."""
    rows = []
    for compared in found:
        for at in compared.at:
            for name, chosen in at.chosen.items():
                totals, made = compared.totals(at, chosen), compared.gain(at, chosen)
                rows.append(
                    plain(
                        {
                            "scene": compared.scene.title, "c": at.c, "at": at.name, "policy": name,
                            "setting": chosen.policy.label, "dev_gain": chosen.dev_gain, "gain": made.value,
                            "low": made.low, "high": made.high, "tau": totals.tau,
                            "drafted": totals.num_draft_tokens / max(totals.num_target_calls - totals.prompts, 1),
                            "discard_rate": totals.discard_rate,
                        }
                    )
                )  # fmt: skip
    return rows


def chart_rows(found: Sequence[PolicyComparison]) -> list[Row]:
    """The best of every kind, by rising c: all families together could not be told apart."""
    rows = [
        {"scene": compared.scene.title, "c": at.c, "policy": role, "setting": setting_of(chosen),
         "gain": made.value, "low": made.low, "high": made.high}
        for compared in found
        for at in compared.at
        for role, chosen in {**compared_policies(at), **published(at)}.items()
        for made in [compared.gain(at, chosen)]
    ]  # fmt: skip
    return sorted(rows, key=lambda row: row["c"])


def setting_of(chosen: Chosen) -> str:
    return ": ".join(part for part in (chosen.family.name, chosen.policy.label) if part)


def published(at: AtCost) -> dict[str, Chosen]:
    """SpecDec++'s own setting, where a head of its kind is there; of several the best on dev prompts."""
    own = [chosen for chosen in at.of("head") if chosen.family.name.endswith(AS_PUBLISHED)]
    return {"SpecDec++ as published": max(own, key=lambda chosen: chosen.dev_gain)} if own else {}


def settings_table(found: Sequence[PolicyComparison]) -> Table:
    columns = [
        Column("scene", "drafter, mode"), Column("at", "c"), Column("policy", "policy"), Column("setting", "setting"),
        Column("dev_gain", "gain on dev", "+.1%"), Column("gain", "gain", "+.1%"), Column("tau", "tau", ".2f"),
        Column("drafted", "drafted a round", ".2f"), Column("discard_rate", "discarded", ".0%"),
    ]  # fmt: skip
    note = "Settings chosen on dev prompts, and what they do on the reported ones."
    return Table("policies-settings", "What was chosen", columns, gain_rows(found), note)


def bench_table(measured: Sequence[Row]) -> Table:
    columns = [
        Column("scene", "drafter, mode"), Column("role", "role"), Column("method", "method"),
        Column("tokens_per_s", "tokens/s", ",.1f"), Column("speedup", "over ar", ".2fx"),
        Column("gain", "over the fastest K", "+.1%"), Column("low", "from", "+.1%"), Column("high", "to", "+.1%"),
        Column("tau", "tau", ".2f"), Column("tau_replayed", "tau, replayed", ".2f"),
        Column("discard_rate", "discarded", ".0%"), Column("discard_replayed", "replayed", ".0%"),
    ]  # fmt: skip
    note = (
        "Decoded for real with the settings of this machine's c; the fastest K is the fastest of those measured here, "
        "which flatters it. Greedy, replayed counts differ where the first prompts are decoded more than once and a "
        f"policy has learned from them; sampling, also by the accept draws. {INTERVALS}"
    )
    return Table(BENCH, "Decoded for real", columns, measured, note)


def compared_policies(at: AtCost) -> dict[str, Chosen]:
    """Policies that tables by group show."""
    named = {
        "best head": at.best("head"), "best training-free": at.best("free"),
        "online with repetitions": at.best("looking"), "best fitted on dev": at.best("fitted"),
        "true p/q": at.best("ceiling"), "oracle": at.best("oracle"),
    }  # fmt: skip
    return {name: chosen for name, chosen in named.items() if chosen is not None}


def task_table(found: Sequence[PolicyComparison]) -> Table:
    """Gains by task, at this machine's c."""
    rows = [
        {
            "scene": compared.scene.title, "task": task, "prompts": int(mask.sum()), "at": compared.own.name,
            **{
                role: compared.gain(compared.own, chosen, mask=mask).text
                for role, chosen in compared_policies(compared.own).items()
            },
        }
        for compared in found
        for task, mask in by_value(compared.tasks).items()
    ]  # fmt: skip
    columns = [Column("scene", "drafter, mode"), Column("task", "task"), Column("prompts", "prompts", "d")]
    columns += [Column("at", "c"), *role_columns(rows)]
    return Table("policies-by-task", "Gain over the best fixed K by task", columns, rows, INTERVALS)


def role_columns(rows: Sequence[Row]) -> list[Column]:
    """Columns of the roles that occur."""
    known = ("best head", "best training-free", "best fitted on dev", "true p/q", "oracle")
    return [Column(role, role) for role in known if any(role in row for row in rows)]


def overlap_table(found: Sequence[PolicyComparison]) -> Table:
    """Gains on the third of prompts whose answers have the least in common with the training text, and on the rest."""
    rows = []
    for compared in found:
        for at in compared.at:
            for name, mask in (("least overlap", compared.least), ("the others", ~compared.least)):
                if not mask.any():
                    continue
                share = sum(own for own, chosen in zip(compared.overlaps, mask, strict=True) if chosen) / mask.sum()
                rows.append(
                    {
                        "scene": compared.scene.title, "at": at.name, "prompts": name, "count": int(mask.sum()),
                        "overlap": float(share),
                        **{
                            role: compared.gain(at, chosen, mask=mask).text
                            for role, chosen in compared_policies(at).items()
                        },
                    }
                )  # fmt: skip
    columns = [
        Column("scene", "drafter, mode"), Column("at", "c"), Column("prompts", "third"),
        Column("count", "prompts", "d"), Column("overlap", "n-grams known", ".0%"), *role_columns(rows),
    ]  # fmt: skip
    note = (
        "Overlap: share of the n-grams of the target's answer that occur in the text heads were trained on, mean over "
        f"prompts. Settings and fixed K are those chosen on all dev prompts. {INTERVALS}"
    )
    return Table(OVERLAP, "Gain where the least text is memorised", columns, rows, note)


def predictions(scene: DrafterMode, tokens: LabelledTokens) -> dict[str, Prediction]:
    """Name -> prediction for these tokens, of everything that policies go by."""
    rollouts = scene.test
    probs = {FITTED: fitted_probs(rollouts, scene.dev)}
    probs |= {name: online_probs(rollouts, *how) for name, how in ONLINE.items()}
    for name, head in scene.heads.items():
        for suffix, calibrated in ((RAW, False), ("", True)):
            probs[name + suffix] = replay.head_probs(rollouts.heads[name], head, calibrated)
    return confidences(tokens) | {name: probabilities_of(tokens, own) for name, own in probs.items()}


def quality_table(said: Findings) -> Table:
    columns = [Column("scene", "drafter, mode"), Column("predictor", "predictor"), *QUALITY]
    rows = [{"scene": scene, **row} for scene, own in said.items() for row in quality_rows(*own)]
    note = f"{LABELS} What is fitted is fitted on dev prompts."
    return Table(WHO_KNOWS, "Who knows what will be accepted", columns, rows, note)


def shown_rows(said: Findings) -> list[Row]:
    """Rows of the reliability diagram."""
    return [
        {"scene": scene, **row}
        for scene, (tokens, own) in said.items()
        for row in reliability_rows(tokens, own, [name for name in own if name not in LEFT_OUT])
    ]


def depth_rows(said: Findings) -> list[Row]:
    """Quality by place in the draft."""
    return [
        {"scene": scene, **row}
        for scene, (tokens, own) in said.items()
        for row in quality_by(tokens, own, "depth", sorted(own.keys() - LEFT_OUT))
    ]


def summary_of(found: Sequence[PolicyComparison], measured: Sequence[Row]) -> dict[str, Any]:
    """Flat numbers that texts quote: gains at each c by scene and policy, and the bars."""
    gains = {f"{row['scene']}, c={row['at']}, {row['policy']}: gain": row["gain"] for row in gain_rows(found)}
    bars = {
        f"{row['scene']}, c={row['c']}, {row['what']}: {key}": row[key]
        for row in bar_rows(found, measured)
        for key in ("value", "reached")
    }
    return {**bars, **gains}
