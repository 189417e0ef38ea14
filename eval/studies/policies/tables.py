"""What the comparison of stop policies found, as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from draftsmith.data.console import Column, Table, json_values
from draftsmith.eval.report.tables import drawn_data
from draftsmith.eval.studies.common import slug
from draftsmith.eval.studies.policies.comparison import (
    AS_PUBLISHED,
    COPYING,
    FITTED,
    FIXED,
    KNOWN,
    ONLINE,
    ONLINE_MAX_Q,
    ONLINE_Q,
    ORACLE,
    AtCost,
    Chosen,
    DrafterMode,
    Mask,
    PolicyComparison,
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
    labelled_tokens,
    online_probs,
    probabilities_of,
    quality_by,
    quality_rows,
    reliability_rows,
)

Row = dict[str, Any]
# Names of tables.
OF_HEAD, GAINS, BENCH, WHO_KNOWS, COPIES, OVERLAP = (
    f"policies-{name}" for name in ("head", "gains", "bench", "quality", "copying", "overlap")
)
# What of a scene is decoded for real, beside fixed K.
HEAD, FREE, LOOKING = "best head", "best training-free", "online with repetitions"
KINDS = {
    "fixed": "baseline", "free": "training-free", "looking": "training-free, looks into the text",
    "fitted": "fitted on dev labels", "head": "trained head",
    "ceiling": "knows p and q", "oracle": "knows the accept draws",
}  # fmt: skip
# Of the charts, where they could not be told apart from what is shown; tables have them.
LEFT_OUT = {MAX_Q, ENTROPY, ONLINE_Q, ONLINE_MAX_Q}
INTERVALS = "Intervals are 95 %, by bootstrap over prompts in pairs."
MODEL = (
    "Time is counted in rounds without a draft: 1 a round and c a drafted token, the prefill counting 1. All policies "
    "walk the target's own text, with the same accept draws. Settings are chosen on dev prompts at each c. "
)
SCENE = Column("scene", "drafter, mode")


def tables_of(found: Sequence[PolicyComparison], decoded: Sequence[Row]) -> list[Table]:
    """All of them. decoded: of the cross-check, none where nothing was decoded."""
    said = {compared.scene.title: predictions(compared.scene) for compared in found}
    shown = {scene: [name for name in own if name not in LEFT_OUT] for scene, (_, own) in said.items()}
    reliability = [{"scene": s, **row} for s, own in said.items() for row in reliability_rows(*own, shown[s])]
    by_depth = [{"scene": s, **row} for s, own in said.items() for row in quality_by(*own, "depth", sorted(shown[s]))]
    return [
        *([head_table(found)] if any(compared.scene.heads for compared in found) else []),
        *(gain_table(compared) for compared in found),
        drawn_data("policies-gain", chart_rows(found)),
        settings_table(found),
        *([bench_table(decoded)] if decoded else []),
        task_table(found),
        copying_table(found),
        overlap_table(found),
        quality_table(said),
        drawn_data("policies-reliability", reliability),
        *(
            drawn_data(f"policies-{key}-by-depth", [row for row in by_depth if row[key] is not None])
            for key in ("auc", "ece")
        ),
    ]


def shown_first(tables: Sequence[Table]) -> list[str]:
    """Names of the tables for the screen: the rest is for the report."""
    return [table.name for table in tables if table.name.startswith((OF_HEAD, GAINS, BENCH, WHO_KNOWS))]


def summary_of(found: Sequence[PolicyComparison], decoded: Sequence[Row]) -> dict[str, Any]:
    """Flat numbers that texts quote: gains at each c by scene and policy, and what the head gains over others."""
    gains = {f"{row['scene']}, c={row['at']}, {row['policy']}: gain": row["gain"] for row in gain_rows(found)}
    measured = {
        f"{row['scene']}, c=, head over the fastest fixed K, tokens/s measured: value": row["gain"]
        for row in decoded
        if row["role"] == HEAD
    }
    over = {f"{row['scene']}, c={row['c']}, {row['what']}: value": row["value"] for row in head_rows(found)}
    return {**over, **measured, **gains}


def head_table(found: Sequence[PolicyComparison]) -> Table:
    columns = [
        SCENE, Column("c", "c"), Column("what", "what"), Column("value", "value", "+.1%"),
        Column("interval", "interval"), Column("head", "head"), Column("base", "base"),
    ]  # fmt: skip
    note = (
        "The head and what it is held against are the best of their kind on dev prompts. Training-free policies are of "
        "two kinds: those that go by the draft's confidence alone, and the one that looks for repetitions of the text "
        f"too. {INTERVALS}"
    )
    return Table(OF_HEAD, "The trained head beside the other policies", columns, list(head_rows(found)), note)


def head_rows(found: Sequence[PolicyComparison]) -> Iterator[Row]:
    """Gains of the best head over the best of other kinds, and its share of what true p/q gain; none of scenes without
    a head."""
    for compared in found:
        for at in compared.at:
            best = best_by_kind(at)
            head = best.get(HEAD)
            if head is None:
                continue
            row: Row = {"scene": compared.scene.title, "c": at.name, "head": head.family.name}
            for what, base in (
                ("head over the best fixed K", at.fixed),
                ("head over the best training-free that goes by confidence", best[FREE]),
                ("head over the training-free that looks for repetitions", best[LOOKING]),
            ):
                made = compared.gain(at, head, base)
                yield json_values(
                    {**row, "what": what, "value": made.value, "interval": made.ends, "base": base.family.name}
                )
            most = compared.gain(at, best[KNOWN]).value if KNOWN in best else 0.0
            if most > 0:  # else there is nothing to have a share of
                share = compared.gain(at, head).value / most
                yield json_values({**row, "what": "share of the gain with true p/q known", "value": share})


def gain_table(compared: PolicyComparison) -> Table:
    """A row a family, a column a c."""
    scene = compared.scene
    columns = [Column("policy", "policy"), Column("role", "kind")]
    columns += [Column(f"c{number}", f"c = {at.name}") for number, at in enumerate(compared.at)]
    rows = []
    for name, chosen in compared.own.chosen.items():
        row: Row = {"policy": name, "role": KINDS[chosen.family.role]}
        for number, at in enumerate(compared.at):
            row[f"c{number}"] = at.fixed.policy.label if name == FIXED else compared.gain(at, at.chosen[name]).text
        rows.append(row)
    title = f"Gain over the best fixed K, {scene.title}"
    return Table(f"{GAINS}-{scene.drafter}-{slug(scene.mode)}", title, columns, rows, MODEL + INTERVALS)


def gain_rows(found: Sequence[PolicyComparison]) -> Iterator[Row]:
    """One row for each scene, c and family, with the setting chosen and its counts."""
    for compared in found:
        for at in compared.at:
            for name, chosen in at.chosen.items():
                totals, made = compared.totals(at, chosen.policy), compared.gain(at, chosen)
                row = {
                    "scene": compared.scene.title, "c": at.c, "at": at.name, "policy": name,
                    "setting": chosen.policy.label, "dev_gain": chosen.dev_gain, "gain": made.value,
                    "low": made.low, "high": made.high, "tau": totals.tau,
                    "drafted": totals.num_draft_tokens / max(totals.num_target_calls - totals.prompts, 1),
                    "discard_rate": totals.discard_rate,
                }  # fmt: skip
                yield json_values(row)


def settings_table(found: Sequence[PolicyComparison]) -> Table:
    columns = [
        SCENE, Column("at", "c"), Column("policy", "policy"), Column("setting", "setting"),
        Column("dev_gain", "gain on dev", "+.1%"), Column("gain", "gain", "+.1%"), Column("tau", "tau", ".2f"),
        Column("drafted", "drafted a round", ".2f"), Column("discard_rate", "discarded", ".0%"),
    ]  # fmt: skip
    note = "Settings chosen on dev prompts, and what they do on the reported ones."
    return Table("policies-settings", "What was chosen", columns, list(gain_rows(found)), note)


def chart_rows(found: Sequence[PolicyComparison]) -> list[Row]:
    """The best of every kind, by rising c: all families together could not be told apart. And SpecDec++'s own setting,
    where a head of its kind is there; of several the best on dev prompts."""
    rows = []
    for compared in found:
        for at in compared.at:
            shown = best_by_kind(at)
            own = [chosen for chosen in at.of("head") if chosen.family.name.endswith(AS_PUBLISHED)]
            if own:
                shown["SpecDec++ as published"] = max(own, key=lambda chosen: chosen.dev_gain)
            for kind, chosen in shown.items():
                made = compared.gain(at, chosen)
                setting = ": ".join(part for part in (chosen.family.name, chosen.policy.label) if part)
                rows.append({"scene": compared.scene.title, "c": at.c, "policy": kind, "setting": setting,
                             "gain": made.value, "low": made.low, "high": made.high})  # fmt: skip
    return sorted(rows, key=lambda row: row["c"])


def best_by_kind(at: AtCost) -> dict[str, Chosen]:
    named = {
        HEAD: at.best("head"), FREE: at.best("free"), LOOKING: at.best("looking"),
        "best fitted on dev": at.best("fitted"), KNOWN: at.best("ceiling"), ORACLE: at.best("oracle"),
    }  # fmt: skip
    return {name: chosen for name, chosen in named.items() if chosen is not None}


def bench_table(decoded: Sequence[Row]) -> Table:
    columns = [
        SCENE, Column("role", "role"), Column("method", "method"),
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
    return Table(BENCH, "Decoded for real", columns, decoded, note)


def gains_by_kind(compared: PolicyComparison, at: AtCost, mask: Mask) -> Row:
    """The gains of every kind's best on the prompts in the mask."""
    return {kind: compared.gain(at, chosen, mask=mask).text for kind, chosen in best_by_kind(at).items()}


def kind_columns(rows: Sequence[Row]) -> list[Column]:
    """Columns of the kinds that occur."""
    known = (HEAD, FREE, LOOKING, "best fitted on dev", KNOWN, ORACLE)
    return [Column(kind, kind) for kind in known if any(kind in row for row in rows)]


def task_table(found: Sequence[PolicyComparison]) -> Table:
    """Gains by task, at this machine's c."""
    rows = [
        {"scene": compared.scene.title, "task": task, "prompts": int(mask.sum()), "at": compared.own.name,
         **gains_by_kind(compared, compared.own, mask)}
        for compared in found
        for task, mask in by_value(compared.tasks).items()
    ]  # fmt: skip
    columns = [SCENE, Column("task", "task"), Column("prompts", "prompts", "d"), Column("at", "c"), *kind_columns(rows)]
    return Table("policies-by-task", "Gain over the best fixed K by task", columns, rows, INTERVALS)


def copying_table(found: Sequence[PolicyComparison]) -> Table:
    """Gains apart for answers that copy and answers that do not."""
    rows = [
        {"scene": compared.scene.title, "at": at.name, "prompts": name, "count": int(mask.sum()),
         "copied": float(np.mean(np.array(compared.copied)[mask])), **gains_by_kind(compared, at, mask)}
        for compared in found
        for at in compared.at
        for name, mask in (("new text", ~compared.copies), ("copying", compared.copies))
        if mask.any()
    ]  # fmt: skip
    columns = [
        SCENE, Column("at", "c"), Column("prompts", "answers"), Column("count", "prompts", "d"),
        Column("copied", "tokens copied", ".0%"), *kind_columns(rows),
    ]  # fmt: skip
    note = (
        f"Copying: more than {COPYING:.0%} of the answer's tokens go on with a repetition, they and the three before "
        "them having stood before in prompt or answer. Settings and fixed K are those chosen on all dev prompts. "
        f"{INTERVALS}"
    )
    return Table(COPIES, "Gain on answers that copy, and on new text", columns, rows, note)


def overlap_table(found: Sequence[PolicyComparison]) -> Table:
    """Gains on the third of prompts whose answers have the least in common with the training text, and on the rest."""
    rows = [
        {"scene": compared.scene.title, "at": at.name, "prompts": name, "count": int(mask.sum()),
         "overlap": float(np.mean(np.array(compared.overlaps)[mask])), **gains_by_kind(compared, at, mask)}
        for compared in found
        for at in compared.at
        for name, mask in (("least overlap", compared.least_known), ("the others", ~compared.least_known))
        if mask.any()
    ]  # fmt: skip
    columns = [
        SCENE, Column("at", "c"), Column("prompts", "third"),
        Column("count", "prompts", "d"), Column("overlap", "n-grams known", ".0%"), *kind_columns(rows),
    ]  # fmt: skip
    note = (
        "Overlap: share of the n-grams of the target's answer that occur in the text heads were trained on, mean over "
        f"prompts. Settings and fixed K are those chosen on all dev prompts. {INTERVALS}"
    )
    return Table(OVERLAP, "Gain where the least text is memorised", columns, rows, note)


def predictions(scene: DrafterMode) -> tuple[LabelledTokens, dict[str, Prediction]]:
    """The reported prompts' tokens, and what everything that policies go by says of them, by name."""
    rollouts = scene.test
    tokens, of_heads = labelled_tokens(rollouts), scene.probs(rollouts)
    of_heads.pop(KNOWN, None)  # a label knows it too
    online = {name: online_probs(rollouts, *how) for name, how in ONLINE.items()}
    probs = {FITTED: of_heads.pop(FITTED), **online, **of_heads}
    return tokens, confidences(tokens) | {name: probabilities_of(tokens, own) for name, own in probs.items()}


def quality_table(said: Mapping[str, tuple[LabelledTokens, Mapping[str, Prediction]]]) -> Table:
    rows = [{"scene": scene, **row} for scene, own in said.items() for row in quality_rows(*own)]
    columns = [SCENE, Column("predictor", "predictor"), *QUALITY]
    note = f"{LABELS} What is fitted is fitted on dev prompts."
    return Table(WHO_KNOWS, "Who knows what will be accepted", columns, rows, note)
