"""Charts of `eval/report/figures.py` as Vega-Lite specifications, through Altair: page, PNG and SVG draw the same.

Colours and fonts are not in them but in `themes.py`, so that one specification serves both themes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from draftsmith.eval.report.figures import Axis, Chart, Row

MAX_CELL_LABELS = 260  # more numbers than that in a heatmap are not read
MANY_POINTS = 40  # of a line: beyond, its points only answer to the pointer
LONG_LABEL = 9  # characters; longer names are written along y, where they need not be turned
PANEL_WIDTH, PANEL_HEIGHT, PANEL_COLUMNS = 230, 200, 3
SQUARE = 360  # pixels of a side where x and y are both probabilities


def specification(chart: Chart) -> dict[str, Any]:
    """A Vega-Lite specification without width where it is a single panel: who draws it sets that."""
    rows = [dict(row) for row in chart.rows if row.get(chart.x.key) is not None and row.get(chart.y.key) is not None]
    heatmap = chart.mark == "heatmap"
    layers = _heatmap(chart, rows) if heatmap else _marks(chart, rows)
    drawn = alt.layer(*layers)
    panels = count(rows, chart.facet) if chart.facet is not None else 1
    sizes: dict[str, Any] = {}
    if chart.facet is not None:
        sizes |= {"width": PANEL_WIDTH}
    elif chart.diagonal:
        sizes |= {"width": SQUARE}
    if heatmap:
        sizes |= {"height": 27 * count(rows, chart.y.key)}
        sizes |= {"width": alt.Step(_cell_width(chart, rows))} if chart.facet is not None else {}
    elif _along_y(chart, rows):
        each = count(rows, chart.series) if chart.series and chart.mark == "bar" else 1
        sizes |= {"height": (12 * each + 12 if each > 1 else 27) * count(rows, chart.x.key)}
    else:
        sizes |= {"height": PANEL_HEIGHT if chart.facet is not None else SQUARE if chart.diagonal else 320}
    drawn = drawn.properties(**sizes)
    data = alt.Data(values=rows)
    if chart.facet is None:
        whole: Any = drawn.properties(data=data)
    else:
        header = alt.Header(title=None, labelLimit=PANEL_WIDTH)
        facet = alt.Facet(field=field(chart.facet), type=kind_of(rows, chart.facet), header=header, sort=None)
        whole = drawn.properties(data=data).facet(facet=facet, columns=2 if panels in (2, 4) else PANEL_COLUMNS)
    # For who fits it to a width: panels, and the characters of the longest entry of its legend and name along y.
    entry = longest(rows, chart.series) if chart.series is not None else 0
    along_y = chart.y.key if heatmap else chart.x.key if _along_y(chart, rows) else None
    meta = {"panels": panels, "entry": entry, "names": longest(rows, along_y) if along_y is not None else 6}
    return whole.properties(description=f"{chart.title}. {chart.note}".strip(), usermeta=meta).to_dict()


def field(key: str) -> str:
    """A key of a row as Vega names fields: it reads dots and brackets as paths."""
    return "".join("\\" + char if char in ".[]'\"\\" else char for char in key)


def kind_of(rows: Sequence[Row], key: str) -> Any:
    """Numbers have an order that colours can show; names have none."""
    values = [row[key] for row in rows if row.get(key) is not None]
    ordered = bool(values) and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    return "ordinal" if ordered else "nominal"


def _position(axis: Axis, rows: Sequence[Row], channel: Any, chart: Chart) -> Any:
    """The x or y channel of an axis."""
    if axis.scale == "ordinal" or chart.mark == "heatmap":
        numeric = kind_of(rows, axis.key) == "ordinal"
        # Names stay in the order of the rows; numbers rise, upwards along y.
        sort: Any = None if not numeric else "descending" if channel is alt.Y else "ascending"
        angle = 0 if numeric or longest(rows, axis.key) <= LONG_LABEL or channel is alt.Y else -35
        labels = alt.Axis(labelAngle=angle, grid=False, labelOverlap=numeric)  # no name is left out
        gaps: dict[str, Any] = {"scale": alt.Scale(paddingInner=0.3, paddingOuter=0.15)} if chart.mark == "bar" else {}
        # Names along y say what they are, and a turned title beside them costs their room.
        title = axis.title if numeric or channel is alt.X else None
        return channel(field=field(axis.key), type="ordinal", title=title, sort=sort, axis=labels, **gaps)
    from_zero = axis.zero or (chart.mark == "bar" and axis is chart.y)
    if chart.diagonal:
        scale = alt.Scale(domain=[0, 1])
    elif axis.scale == "log":
        scale = alt.Scale(type="log", padding=10)
    else:  # no mark stands on the edge, unless the edge is zero
        scale = alt.Scale(zero=True) if from_zero else alt.Scale(zero=False, padding=10)
    form: dict[str, Any] = {"format": axis.format} if axis.format else {}
    numbers = alt.Axis(tickCount=5 if chart.facet is not None else 8, **form)
    return channel(field=field(axis.key), type="quantitative", title=axis.title, scale=scale, axis=numbers)


def count(rows: Sequence[Row], key: str) -> int:
    """Distinct values."""
    return len({row.get(key) for row in rows})


def longest(rows: Sequence[Row], key: str) -> int:
    return max((len(str(row.get(key, ""))) for row in rows), default=0)


def _along_y(chart: Chart, rows: Sequence[Row]) -> bool:
    """Whether names are too long, or too many, to stand under their marks: then x and y change places."""
    if chart.mark not in ("bar", "point") or chart.x.scale != "ordinal" or chart.y.scale == "ordinal":
        return False
    return kind_of(rows, chart.x.key) == "nominal" and (
        longest(rows, chart.x.key) > LONG_LABEL or count(rows, chart.x.key) > 8
    )


def _tooltip(chart: Chart) -> list[alt.Tooltip]:
    """Everything a mark knows, in the order in which a reader asks."""
    formats = {chart.x.key: chart.x.format, chart.y.key: chart.y.format}
    titles = {chart.x.key: chart.x.title, chart.y.key: chart.y.title}
    keys = [chart.label, chart.series, chart.facet, chart.x.key, chart.y.key, chart.low, chart.high]
    keys += [chart.color, chart.size, *chart.hover]
    for end, word in ((chart.low, "from"), (chart.high, "to")):
        if end is not None:
            formats[end], titles[end] = chart.y.format, word
    if chart.series is not None and chart.series not in titles:
        titles[chart.series] = chart.series_title or chart.series
    if chart.color is not None:
        formats[chart.color], titles[chart.color] = chart.color_format, chart.color_title or chart.color
    shown = []
    for key in dict.fromkeys(key for key in keys if key is not None):
        # A number without a format is a count or a setting: as it is.
        numeric = bool(formats.get(key)) and _numeric(chart, key)
        how: dict[str, Any] = {"format": formats[key], "type": "quantitative"} if numeric else {"type": "nominal"}
        shown.append(alt.Tooltip(field=field(key), title=titles.get(key, key.replace("_", " ")), **how))
    return shown


def _numeric(chart: Chart, key: str) -> bool:
    return kind_of(chart.rows, key) == "ordinal"


def _marks(chart: Chart, rows: list[dict[str, Any]]) -> list[Any]:
    """Lines, points or bars with what is drawn around them, the lowest layer first."""
    turned = _along_y(chart, rows)
    first, second = (alt.Y, alt.X) if turned else (alt.X, alt.Y)
    x, y = _position(chart.x, rows, first, chart), _position(chart.y, rows, second, chart)
    place: dict[str, Any] = {"y": x, "x": y} if turned else {"x": x, "y": y}
    grouped: dict[str, Any] = {}
    if chart.series is not None and chart.mark == "bar":
        offset = alt.YOffset if turned else alt.XOffset
        grouped = {"yOffset" if turned else "xOffset": offset(field=field(chart.series), sort=None)}
    colour = _colour(chart, rows)
    layers: list[Any] = []
    if chart.diagonal:
        ends = alt.Data(values=[{"x": 0, "y": 0}, {"x": 1, "y": 1}])
        corner: dict[str, Any] = {
            name: channel(field=name, type="quantitative") for name, channel in (("x", alt.X), ("y", alt.Y))
        }
        layers.append(alt.Chart(ends, mark=alt.MarkDef(type="line", style="reference")).encode(**corner))
    main = [alt.Chart(mark=_mark(chart, rows)).encode(**place, **grouped, **colour, **_more(chart, rows))]
    if chart.mark == "line" and chart.size is not None:  # points have sizes, the line that joins them has none
        main.insert(0, alt.Chart(mark=alt.MarkDef(type="line")).encode(**place, **colour))
    around = (
        _interval(chart, place, grouped, colour, turned) if chart.low is not None and chart.high is not None else []
    )
    layers += main + around if chart.mark == "bar" else around + main  # a bar would hide half of its interval
    if chart.label is not None:
        beside = alt.MarkDef(type="text", align="left", dx=9, fontSize=11)
        layers.append(alt.Chart(mark=beside).encode(**place, text=alt.Text(field=field(chart.label))))
    return layers


def _mark(chart: Chart, rows: Sequence[Row]) -> alt.MarkDef:
    if chart.mark == "line" and chart.size is None:
        series = max(1, count(rows, chart.series)) if chart.series else 1
        point: Any = "transparent" if len(rows) / series > MANY_POINTS else alt.OverlayMarkDef(filled=True, size=38)
        return alt.MarkDef(type="line", point=point, interpolate="linear")
    if chart.mark == "bar":
        return alt.MarkDef(type="bar", cornerRadiusEnd=2)
    return alt.MarkDef(type="point")


def _colour(chart: Chart, rows: Sequence[Row]) -> dict[str, Any]:
    if chart.series is None:
        return {}
    kind = kind_of(rows, chart.series)
    title = chart.series_title or chart.series
    found = {"color": alt.Color(field=field(chart.series), type=kind, title=title, sort=_sort(kind))}
    return found


def _more(chart: Chart, rows: Sequence[Row]) -> dict[str, Any]:
    """The channels of the marks themselves, not of what is drawn around them."""
    found: dict[str, Any] = {"tooltip": _tooltip(chart)}
    if chart.mark == "point" and chart.series is not None and kind_of(rows, chart.series) == "nominal":
        title = chart.series_title or chart.series
        found["shape"] = alt.Shape(field=field(chart.series), type="nominal", title=title, sort=None)
    if chart.size is not None:
        title = chart.size.replace("_", " ")
        scale = alt.Scale(range=[24, 420], zero=True)
        legend = alt.Legend(tickCount=3)
        found["size"] = alt.Size(field=field(chart.size), type="quantitative", title=title, scale=scale, legend=legend)
    return found


def _sort(kind: str) -> Any:
    """Series of names come in the order of the rows."""
    return None if kind == "nominal" else "ascending"


def _interval(
    chart: Chart, place: dict[str, Any], grouped: dict[str, Any], colour: dict[str, Any], turned: bool
) -> Any:
    """A band around a line, a rule through anything else."""
    assert chart.low is not None and chart.high is not None
    along = "x" if turned else "y"
    channels = {"x": (alt.X, alt.X2), "y": (alt.Y, alt.Y2)}[along]
    title = chart.y.title
    low = channels[0](field=field(chart.low), type="quantitative", title=title, scale=place[along]["scale"])
    ends: dict[str, Any] = {along: low, f"{along}2": channels[1](field=field(chart.high))}
    rest = {name: channel for name, channel in place.items() if name != along}
    filtered = f"isValid(datum[{chart.low!r}]) && isValid(datum[{chart.high!r}])"
    band = chart.mark == "line" and chart.x.scale != "ordinal"
    mark = alt.MarkDef(type="area", style="band") if band else alt.MarkDef(type="rule", style="interval")
    shown = colour if band else {}
    if chart.mark == "point":
        shown = colour  # a rule through a point belongs to its series
    return [alt.Chart(mark=mark).transform_filter(filtered).encode(**rest, **ends, **grouped, **shown)]


def _heatmap(chart: Chart, rows: list[dict[str, Any]]) -> list[Any]:
    """Cells, with their numbers where there is room."""
    assert chart.color is not None, f"{chart.name}: a heatmap has a color"
    place: dict[str, Any] = {"x": _position(chart.x, rows, alt.X, chart), "y": _position(chart.y, rows, alt.Y, chart)}
    values = [row[chart.color] for row in rows if row.get(chart.color) is not None]
    legend = alt.Legend(format=chart.color_format) if chart.color_format else alt.Legend()
    title = chart.color_title or chart.color
    scale = alt.Scale(scheme="viridis", zero=False, nice=False)
    fill = alt.Color(field=field(chart.color), type="quantitative", title=title, scale=scale, legend=legend)
    cells = alt.Chart(mark=alt.MarkDef(type="rect")).encode(**place, color=fill, tooltip=_tooltip(chart))
    if not values or len(rows) > MAX_CELL_LABELS:
        return [cells]
    # Viridis is dark below and bright above: ink that is read on either half.
    middle = min(values) + 0.5 * (max(values) - min(values))
    ink = alt.condition(f"datum[{chart.color!r}] > {middle}", alt.value("#10141a"), alt.value("#ffffff"))
    number = alt.Text(field=field(chart.color), type="quantitative", format=chart.color_format or ".3~g")
    text = alt.Chart(mark=alt.MarkDef(type="text", fontSize=11)).encode(**place, text=number, color=ink)
    return [cells, text]


def _cell_width(chart: Chart, rows: Sequence[Row]) -> int:
    """Pixels of a cell in a panel: room for its number, and for all columns."""
    columns = max(1, count(rows, chart.x.key))
    label = longest(rows, chart.x.key)
    level = 8 * label + 6 if label <= LONG_LABEL else 0  # names that are not turned stand beside each other
    return max(30, level, min(48, (PANEL_WIDTH + 60) // columns))


def against(rows: Sequence[Row], methods: Sequence[str]) -> dict[str, Any]:
    """Two methods prompt by prompt, chosen by the reader: `rows` have method, prompt, task and tokens_per_s.

    A prompt above the diagonal is faster by the method along y.
    """
    first = methods[0]
    last = max(methods[1:], key=lambda method: sum(row["tokens_per_s"] for row in rows if row["method"] == method))
    choose = [
        alt.param(name=name, value=value, bind=alt.binding_select(options=list(methods), name=title))
        for name, value, title in (("method_x", first, "along x "), ("method_y", last, "along y "))
    ]

    def pairs() -> Any:
        """One row a prompt: x and y."""
        return (
            alt.Chart()
            .transform_calculate(
                along_x="datum.method == method_x ? datum.tokens_per_s : null",
                along_y="datum.method == method_y ? datum.tokens_per_s : null",
            )
            .transform_aggregate(x="max(along_x)", y="max(along_y)", groupby=["prompt", "task"])
            .transform_filter("isValid(datum.x) && isValid(datum.y)")
        )

    diagonal = (
        pairs()
        .transform_aggregate(most_x="max(x)", most_y="max(y)")
        .transform_calculate(end="[0, max(datum.most_x, datum.most_y)]")
        .transform_flatten(["end"])
        .mark_line(style="reference")
        .encode(x="end:Q", y="end:Q")
    )
    points = (
        pairs()
        .transform_calculate(ratio="datum.y / datum.x")
        .mark_point()
        .encode(
            x=alt.X("x:Q", title="tokens/s of the method along x", scale=alt.Scale(zero=True)),
            y=alt.Y("y:Q", title="tokens/s of the method along y", scale=alt.Scale(zero=True)),
            color=alt.Color("task:N", title="task"),
            shape=alt.Shape("task:N", title="task"),
            tooltip=[
                alt.Tooltip("prompt:N"),
                alt.Tooltip("task:N"),
                alt.Tooltip("x:Q", title="tokens/s along x", format=".1f"),
                alt.Tooltip("y:Q", title="tokens/s along y", format=".1f"),
                alt.Tooltip("ratio:Q", title="y by x", format=".2f"),
            ],
        )
    )
    drawn = alt.layer(points, diagonal, data=alt.Data(values=list(rows))).add_params(*choose)
    about = "Tokens per second of two methods, prompt by prompt."
    meta = {"panels": 1, "entry": longest(rows, "task")}
    return drawn.properties(width=SQUARE + 60, height=SQUARE, description=about, usermeta=meta).to_dict()
