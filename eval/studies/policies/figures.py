"""Tables and charts of the comparison of stop policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draftsmith.eval.report.figures import Axis, Chart, Column, Figure, Table, plain
from draftsmith.eval.studies.common import slug
from draftsmith.eval.studies.policies.bars import bar_rows
from draftsmith.eval.studies.policies.found import AtCost, Chosen, Compared
from draftsmith.eval.studies.policies.play import AS_PUBLISHED, FIXED, ONLINE_MAX_Q, ONLINE_Q
from draftsmith.eval.studies.policies.predictors import Prediction, by_value, part
from draftsmith.eval.studies.policies.quality import ENTROPY, MAX_Q, Tokens, labelled_tokens
from draftsmith.eval.studies.reliability import quality, reliability_bins

Row = dict[str, Any]
BARS, GAINS, BENCH, QUALITY = "policies-bars", "policies-gains", "policies-bench", "policies-quality"
# Of the charts, where they could not be told apart from what is shown; tables have them.
LEFT_OUT = {MAX_Q, ENTROPY, ONLINE_Q, ONLINE_MAX_Q}
OVERLAP = "policies-overlap"  # name of a table
INTERVALS = "Intervals are 95 %, by bootstrap over prompts in pairs."
MODEL = (
    "Time is counted in rounds without a draft: 1 a round and c a drafted token, the prefill counting 1. All policies "
    "walk the target's own text, with the same accept coins. Settings are chosen on dev prompts at each c. "
)
QUALITY_COLUMNS = (
    Column("tokens", "tokens", ",d"), Column("accepted", "accepted", ".1%"), Column("kl", "KL (nats)", ".4f"),
    Column("brier", "Brier", ".4f"), Column("ece", "ECE", ".4f"), Column("auc", "AUC", ".3f"),
)  # fmt: skip


def figures_of(found: Sequence[Compared], measured: Sequence[Row], seed: int) -> list[Figure]:
    """All of them. measured: of the cross-check, none where nothing was decoded."""
    tokens = {compared.scene.title: labelled_tokens(compared.scene) for compared in found}
    return [
        bars_table(found, measured),
        *(gain_table(compared) for compared in found),
        gain_chart(found),
        settings_table(found),
        *([bench_table(measured)] if measured else []),
        task_table(found),
        overlap_table(found),
        quality_table(tokens),
        reliability_chart(tokens),
        *depth_charts(tokens),
    ]


def shown_first(figures: Sequence[Figure]) -> list[str]:
    """Names of the tables for the screen: the rest is for the report."""
    return [figure.name for figure in figures if figure.name.startswith((BARS, GAINS, BENCH, QUALITY))]


def bars_table(found: Sequence[Compared], measured: Sequence[Row]) -> Table:
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


def gain_table(compared: Compared) -> Table:
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
    "ceiling": "knows p and q", "oracle": "knows the coin",
}  # fmt: skip


def gain_rows(found: Sequence[Compared]) -> list[Row]:
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


def gain_chart(found: Sequence[Compared]) -> Chart:
    """The best of every kind: all families together could not be told apart."""
    rows = [
        plain({"scene": compared.scene.title, "c": at.c, "policy": role, "setting": setting_of(chosen),
               "gain": made.value, "low": made.low, "high": made.high})
        for compared in found
        for at in compared.at
        for role, chosen in {**compared_policies(at), **published(at)}.items()
        for made in [compared.gain(at, chosen)]
    ]  # fmt: skip
    return Chart(
        "policies-gain", "Gain over the best fixed K by the cost of a drafted token", "line",
        sorted(rows, key=lambda row: row["c"]), Axis("c", "c of a drafted token", ".2f"),
        Axis("gain", "gain in tokens by time", "+.0%"),
        series="policy", facet="scene", low="low", high="high", hover=("setting",), note=MODEL + INTERVALS,
    )  # fmt: skip


def setting_of(chosen: Chosen) -> str:
    return ": ".join(part for part in (chosen.family.name, chosen.policy.label) if part)


def published(at: AtCost) -> dict[str, Chosen]:
    """SpecDec++'s own setting, where a head of its kind is there; of several the best on dev prompts."""
    own = [chosen for chosen in at.of("head") if chosen.family.name.endswith(AS_PUBLISHED)]
    return {"SpecDec++ as published": max(own, key=lambda chosen: chosen.dev_gain)} if own else {}


def settings_table(found: Sequence[Compared]) -> Table:
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
        f"policy has learned from them; sampling, also by the coins. {INTERVALS}"
    )
    return Table(BENCH, "Decoded for real", columns, measured, note)


def compared_policies(at: AtCost) -> dict[str, Chosen]:
    """What tables by group show."""
    named = {
        "best head": at.best("head"), "best training-free": at.best("free"),
        "online with repetitions": at.best("looking"), "best fitted on dev": at.best("fitted"),
        "true p/q": at.best("ceiling"), "oracle": at.best("oracle"),
    }  # fmt: skip
    return {name: chosen for name, chosen in named.items() if chosen is not None}


def task_table(found: Sequence[Compared]) -> Table:
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
    """Of the roles that occur."""
    known = ("best head", "best training-free", "best fitted on dev", "true p/q", "oracle")
    return [Column(role, role) for role in known if any(role in row for row in rows)]


def overlap_table(found: Sequence[Compared]) -> Table:
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


def quality_rows(tokens: Mapping[str, Tokens]) -> list[Row]:
    """One row for each scene and predictor."""
    return [
        {"scene": scene, "predictor": name, **measured_on(own, prediction)}
        for scene, own in tokens.items()
        for name, prediction in own.said.items()
    ]


def measured_on(tokens: Tokens, prediction: Prediction) -> Row:
    accepted = {"accepted": float(tokens.label.mean()) if len(tokens.label) else None}
    return plain({**accepted, **quality(prediction.score, prediction.prob, tokens.label)})


def quality_table(tokens: Mapping[str, Tokens]) -> Table:
    columns = [Column("scene", "drafter, mode"), Column("predictor", "predictor"), *QUALITY_COLUMNS]
    note = (
        "Labels are min(1, p(y)/q(y)), greedy 1 or 0, of drafted tokens down to and with the first rejected one of "
        "rounds that begin at every position of the reported answers. Soft labels: a perfect predictor has KL 0 and "
        "Brier 0. What is fitted is fitted on dev prompts. ECE: 15 bins of equal mass."
    )
    return Table(QUALITY, "Who knows what will be accepted", columns, quality_rows(tokens), note)


def reliability_chart(tokens: Mapping[str, Tokens]) -> Chart:
    rows = [
        plain({"scene": scene, "predictor": name, **found})
        for scene, own in tokens.items()
        for name, prediction in own.said.items()
        if name not in LEFT_OUT and prediction.prob is not None
        for found in reliability_bins(prediction.prob, own.label)
    ]
    return Chart(
        "policies-reliability", "Reliability of the probabilities", "line", rows,
        Axis("predicted", "predicted probability of acceptance", ".2f", zero=True),
        Axis("observed", "accepted", ".2f", zero=True),
        series="predictor", facet="scene", size="count", diagonal=True,
        note="On the diagonal what is predicted is what happens; below it the predictor promises too much.",
    )  # fmt: skip


def depth_charts(tokens: Mapping[str, Tokens]) -> list[Chart]:
    """AUC and ECE by place in the draft."""
    rows = []
    for scene, own in tokens.items():
        for depth, mask in by_value(own.depth).items():
            label = part(Prediction(own.label, None), mask).score
            for name in sorted(own.said.keys() - LEFT_OUT):
                prediction = own.said[name]
                chosen = part(prediction, mask)
                found = quality(chosen.score, chosen.prob, label)
                rows.append(plain({"scene": scene, "depth": depth, "predictor": name, **found}))
    note = "Later places are reached only when all before were accepted: their tokens are a selection."
    return [
        Chart(
            f"policies-{key}-by-depth", f"{key.upper()} by place in the draft", "line",
            [row for row in rows if row[key] is not None], Axis("depth", "place in the draft", "d"),
            Axis(key, key.upper(), ".3f"), series="predictor", facet="scene", hover=("tokens",), note=note,
        )
        for key in ("auc", "ece")
    ]  # fmt: skip


def summary_of(found: Sequence[Compared], measured: Sequence[Row]) -> dict[str, Any]:
    """Flat numbers that texts quote: gains at each c by scene and policy, and the bars."""
    gains = {f"{row['scene']}, c={row['at']}, {row['policy']}: gain": row["gain"] for row in gain_rows(found)}
    bars = {
        f"{row['scene']}, c={row['c']}, {row['what']}: {key}": row[key]
        for row in bar_rows(found, measured)
        for key in ("value", "reached")
    }
    return {**bars, **gains}
