"""Shows whether the model learns from its context, and equally well through our kernels.

If view `training_equivalence` compares runs, their losses and differences (`training_differences`)
come first. View `training_seeds` compares runs of several seeds. View `training_curves` gives a
panel for each device and other run: the held-out log-likelihood, and a control with the context's y
permuted. It also has the values of an exact predictor and of one that ignores the context.
"""

import altair as alt
import duckdb

from tnp.figures import data, theme
from tnp.figures.data import Row
from tnp.figures.layout import Layout

PANEL_WIDTH, PANEL_HEIGHT = 480, 240  # px
COLUMNS = 2  # panels abreast
PAIRED = "Loss of runs on the same tasks from the same weights"
EVALUATED = "Log-likelihood on held-out tasks"
SEEDS = "Held-out log-likelihood of pairs of runs with equal seeds"
STUDIED = "Log-likelihood on held-out tasks, of runs that differ in one thing"
LINES = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#8c6d1f", "#2A9ACB"]  # a study's runs
FLOOR = 3.0  # nats below the best that a study's panel shows

# Column of the view → name, colour and dash.
SERIES = {
    "heldout_log_likelihood": ("held-out tasks", "#009E73", [1, 0]),
    "heldout_log_likelihood_shuffled": ("context y shuffled (control)", "#AA4499", [6, 3]),
    "exact_log_likelihood": ("exact posterior", "#1f2328", [2, 2]),
    "prior_log_likelihood": ("prior, knowing nothing", "#8c959f", [8, 4]),
}
DASHES = [dash for _, _, dash in SERIES.values()]

QUERY = """
    select *
    from training_curves
    where
        isfinite(heldout_log_likelihood)
        and coalesce(recipe, '') not in (select recipe from training_seeds where n_seeds > 1)
    order by exact_log_likelihood is null, run, step
"""

PAIRS = "from training_equivalence where device = $device order by run"

COMPARED_SEEDS = """
    select
        *,
        format('{} {} × ({:,}, {:,})', replace(source, '_', ' '), batch, n_context, n_target)
            as tasks
    from training_seeds
    where n_seeds > 1 and device = $device
    order by products != '', source, batch desc, steps desc, products, last_in_16_bits, variant
"""

PAIRED_LOSSES = """
    select run, variant, step, loss
    from training_curves
    where device = $device and loss is not null and list_contains($runs, run)
    order by run, step
"""

PAIRED_DIFFERENCES = """
    from training_differences
    where device = $device and list_contains($runs, run)
    order by run, step
"""


def chart(connection: duckdb.DuckDBPyConnection, layout: Layout) -> alt.TopLevelMixin:
    """Draws pairs of runs, runs of several seeds, studies and single runs of each device.

    The title is about the first device that has such rows.
    """
    rows = data.query(connection, QUERY)
    devices = data.devices(connection, "training_curves")
    seeds = {slug: data.query(connection, COMPARED_SEEDS, device=slug) for slug in devices}
    if not rows and not any(seeds.values()):
        return theme.no_rows(
            "no training run has been evaluated", "snakemake --cores 1 all", layout
        )
    blocks, compared = [], []
    for slug, device in devices.items():
        when = data.recorded(connection, "training_curves", device)
        pairs = data.query(connection, PAIRS, device=slug)
        if pairs:
            compared += pairs
            panels = _paired_panels(connection, slug, pairs, layout)
            blocks.append(layout.block(panels, f"{PAIRED}, on {device['name']}", when, COLUMNS))
        if seeds[slug]:
            panel = _seeds_panel(seeds[slug], layout)
            blocks.append(layout.block([panel], f"{SEEDS}, on {device['name']}", when, 1))
        of_device = [row for row in rows if row["device"] == slug]
        for of_study in data.grouped((row for row in of_device if row["study"]), "study"):
            title = f"{STUDIED}: study {of_study[0]['study']}, on {device['name']}"
            blocks.append(layout.block([_study_panel(of_study, layout)], title, when, 1))
        runs = data.grouped((row for row in of_device if not row["study"]), "run")
        panels = [_panel(of_run, layout) for of_run in runs]
        if panels:
            blocks.append(layout.block(panels, f"{EVALUATED}, on {device['name']}", when, COLUMNS))
    said = theme.sentence(finding(rows, devices, compared)) if rows else ""
    of_seeds = theme.sentence(_of_seeds(next(filter(None, seeds.values()), [])))
    subtitle = [
        *([f"{said}."] if said and of_seeds else []),
        "Log-likelihood: mean over target values of held-out tasks, in nats; higher is better. "
        "Shuffled: the same tasks with the context's y permuted, which must be worse if the model "
        "uses its context. That line is cut off far below the others.",
        "Band: 95% interval over held-out tasks. One seed each, where no seeds are compared.",
    ]
    page = theme.stacked(blocks).resolve_scale(color="independent", strokeDash="independent")
    return theme.page(page, of_seeds or said, subtitle, layout)


def finding(rows: list[Row], devices: dict[str, Row], pairs: list[Row]) -> str:
    """Says whether runs on the same tasks are equivalent, and what their last evaluations show.

    All are on the first device. The first run is described in full. Others are named if they are
    not shown to use their context.
    """
    slug = next(slug for slug in devices if any(row["device"] == slug for row in rows))
    last: dict[str, Row] = {}
    for row in sorted((r for r in rows if r["device"] == slug), key=lambda row: row["step"]):
        last[row["run"]] = row
    runs = dict.fromkeys(
        row["run"] for row in rows if row["device"] == slug and not row["study"]
    ) or dict.fromkeys(row["run"] for row in rows if row["device"] == slug)
    first, *others = (last[run] for run in runs)
    unused = [row["run"] for row in others if row["nats_from_context"] is None]
    said = _learned(first, f"on {devices[slug]['name']} after {first['step']:,} steps")
    if unused:
        verb = "is" if len(unused) == 1 else "are"
        said = f"{said}; {theme.listed(unused)} {verb} not shown to use it"
    alike = [_alike(pair) for pair in pairs if pair["device"] == slug]
    return "; ".join([*filter(None, alike), said])


def _of_seeds(rows: list[Row]) -> str:
    """Says how steps in 8 bits train beside their baselines, in the words of the view."""
    said = []
    for of_pair in data.grouped(
        (row for row in rows if row["difference_8_bits"] is not None or row["last_in_16_bits"]),
        "variant",
        "baseline_variant",
    ):
        pair = of_pair[0]
        step = "less accurate a step, " if pair["less_accurate"] else ""
        found = pair["variant_verdict"] or "training not judged here"
        said.append(f"{pair['variant']} beside {pair['baseline_variant']}: {step}{found}")
    return "; ".join(said)


def _seeds_panel(rows: list[Row], layout: Layout) -> alt.TopLevelMixin:
    """Draws each mean difference with its 90 % interval, and grey what counts as equivalent."""
    margin = rows[0]["margin"]
    shown = [row | {"lines": _lines_of_seeds(row)} for row in rows]
    names = alt.Y("lines:N", axis=None, sort=[row["lines"] for row in shown])
    band, marks = data.drawing([{"low": -margin, "high": margin}]), data.drawing(shown)
    x = {
        "scale": alt.Scale(type="symlog", constant=margin, padding=12),
        "axis": alt.Axis(
            values=[-10, -1, -0.1, -0.01, 0, 0.01, 0.1, 1, 10],
            format="~g",
            labelOverlap="greedy",
            labelSeparation=8,
        ),
        "title": "nats per target value",
    }
    tooltip = ["lines:N", alt.Tooltip("mean_difference:Q", format=".4f")]
    drawn = alt.layer(
        band.mark_rect(color=theme.RULE).encode(x=alt.X("low:Q", **x), x2="high:Q"),
        marks.mark_rule(strokeWidth=2.5, color=LINES[0]).encode(
            x=alt.X("difference_low:Q", **x), x2="difference_high:Q", y=names
        ),
        marks.mark_point(filled=True, size=70, color=LINES[0]).encode(
            x=alt.X("mean_difference:Q", **x), y=names, tooltip=tooltip
        ),
        marks.mark_text(align="left", dy=-24, lineBreak="\n", color=theme.INK).encode(
            x=alt.value(4), y=names, text="lines:N"
        ),
    )
    baselines = theme.listed(sorted({row["baseline_variant"] for row in rows}))
    return drawn.properties(
        width=layout.plot_width(2 * PANEL_WIDTH),
        height=56 * len(shown),
        title=layout.title(
            f"Mean difference from {baselines}, and its 90% interval; grey: equivalent",
            [f"The axis is logarithmic beyond ±{margin}."],
        ),
    )


def _lines_of_seeds(row: Row) -> str:
    """Returns two lines: the tasks, and what was trained, with its verdict."""
    how = f" in {row['products']}" if row["products"] else ""
    if row["last_in_16_bits"]:
        how += f", the last {row['last_in_16_bits']:,} in 16 bits"
    said = f"{row['n_pairs']} of {row['n_seeds']} seeds, {row['verdict']}"
    return f"{row['tasks']}, {row['steps']:,} steps:\n{row['variant']}{how}: {said}"


def _alike(pair: Row) -> str:
    """Says whether a run is equivalent to PyTorch's; "" for the null pair or without a margin."""
    if pair["is_null_pair"] or pair["margin"] is None:
        return ""
    is_or_not = "is" if pair["equivalent"] else "is not"
    return (
        f"the loss of {pair['variant']} {is_or_not} equivalent to that of "
        f"{pair['baseline_variant']}, within {pair['margin']:.3f} nats"
    )


def _learned(last: Row, where: str) -> str:
    """Summarizes a run's last evaluation in one sentence."""
    run, from_context = last["run"], last["nats_from_context"]
    if from_context is None:
        return f"run {run} is not shown to use its context {where}: shuffling it costs too little"
    if last["gap_closed"] is not None and last["gap_closed"] > 0:
        return (
            f"run {run} learns from its context {where}: "
            f"{last['gap_closed']:.0%} of the way from the prior to the exact posterior"
        )
    prior = last["prior_log_likelihood"]
    below_prior = prior is not None and last["heldout_log_likelihood"] < prior
    return (
        f"run {run} learns from its context {where}: it is worth {from_context:.2f} nats per value"
        f"{', though still below the prior' if below_prior else ''}"
    )


def _panel(rows: list[Row], layout: Layout) -> alt.TopLevelMixin:
    points = [
        {"step": row["step"], "series": name, "value": row[column]}
        for row in rows
        for column, (name, _, _) in SERIES.items()
        if row[column] is not None
    ]
    band = [
        {
            "step": row["step"],
            "low": row["heldout_log_likelihood"] - 1.96 * row["heldout_log_likelihood_stderr"],
            "high": row["heldout_log_likelihood"] + 1.96 * row["heldout_log_likelihood_stderr"],
        }
        for row in rows
        if row["heldout_log_likelihood_stderr"] is not None
    ]
    # A confident model with a wrong context falls tens of nats below all other lines.
    control = SERIES["heldout_log_likelihood_shuffled"][0]
    values = [point["value"] for point in points if point["series"] != control] + [
        end for row in band for end in (row["low"], row["high"])
    ]
    margin = 0.06 * (max(values) - min(values)) or 1.0
    domain = alt.Scale(domain=[min(values) - margin, max(values) + margin], nice=False)
    names, colors, dashes = zip(*SERIES.values(), strict=True)
    x = alt.X("step:Q", title="training step").axis(format=",d", tickCount=5, grid=False)
    y = alt.Y("value:Q", title="log-likelihood, nats per target value", scale=domain)
    y = y.axis(orient=layout.side)
    lines = data.drawing(points).encode(
        x=x,
        y=y,
        color=alt.Color(
            "series:N",
            scale=alt.Scale(domain=names, range=colors),
            legend=alt.Legend(symbolSize=500, symbolStrokeWidth=2.5),
            title=None,
        ),
        strokeDash=alt.StrokeDash(
            "series:N", scale=alt.Scale(domain=names, range=dashes), title=None
        ),
        tooltip=["series:N", "step:Q", alt.Tooltip("value:Q", format=".4f")],
    )
    area = data.drawing(band).mark_area(color=colors[0], opacity=0.2)
    return alt.layer(
        area.encode(x=x, y=alt.Y("low:Q", scale=domain), y2="high:Q"),
        lines.mark_line(strokeWidth=2.5, clip=True),
        width=layout.plot_width(PANEL_WIDTH),
        height=PANEL_HEIGHT,
        title=layout.title(rows[0]["run"], _said(rows[-1])),
    )


def _study_panel(rows: list[Row], layout: Layout) -> alt.TopLevelMixin:
    """Draws the held-out log-likelihood of every run. Values far below the best are cut off."""
    runs = list(dict.fromkeys(row["run"] for row in rows))
    exact = {row["exact_log_likelihood"] for row in rows} - {None}
    top = max([*(row["heldout_log_likelihood"] for row in rows), *exact])
    scale = alt.Scale(domain=[top - FLOOR, top + 0.1], nice=False)
    dashes = [DASHES[i % len(DASHES)] for i in range(len(runs))]
    legend = alt.Legend(symbolSize=500, symbolStrokeWidth=2.5, columns=1, labelLimit=400)
    lines = data.drawing(rows).encode(
        x=alt.X("step:Q", title="training step").axis(format=",d", tickCount=5, grid=False),
        y=alt.Y("heldout_log_likelihood:Q", title="log-likelihood, nats per target value")
        .scale(scale)
        .axis(orient=layout.side),
        color=alt.Color("run:N", title=None, legend=legend).scale(domain=runs, range=LINES),
        strokeDash=alt.StrokeDash("run:N", title=None).scale(domain=runs, range=dashes),
        tooltip=["run:N", "step:Q", alt.Tooltip("heldout_log_likelihood:Q", format=".4f")],
    )
    ends = ", ".join(
        f"{run} {last:.2f}"
        for run, last in sorted(
            {row["run"]: row["heldout_log_likelihood"] for row in rows}.items(),
            key=lambda end: -end[1],
        )
    )
    said = [f"at the end, best first: {ends}"]
    if exact:
        said.append(f"the exact posterior has {max(exact):.2f}")
    return lines.mark_line(strokeWidth=2, clip=True).properties(
        width=layout.plot_width(2 * PANEL_WIDTH),
        height=PANEL_HEIGHT,
        title=layout.title(rows[0]["source"].replace("_", " "), said, 100),
    )


def _said(last: Row) -> list[str]:
    """Describes a run and its tasks, and the panel's values at the last step."""
    source = last["source"].replace("_", " ")
    sizes = f"{last['batch']} tasks of {last['n_context']:,} + {last['n_target']:,} points"
    said = [f"{source}, {sizes}, {last['variant']}, {last['dtype']}, seed {last['seed']}"]
    if last["heldout_log_likelihood_shuffled"] is None:
        return said
    gain = last["nats_from_context"]
    if gain is None:
        return [
            *said,
            "not shown to use its context: shuffling it costs less than two standard errors",
        ]
    return [*said, f"uses its context: shuffling it costs {theme.number(gain)} nats per value"]


def _paired_panels(
    connection: duckdb.DuckDBPyConnection, device: str, pairs: list[Row], layout: Layout
) -> list[alt.TopLevelMixin]:
    """Returns the losses of all runs, and their differences from the first run's."""
    runs = [pairs[0]["baseline_run"], *(pair["run"] for pair in pairs)]
    variants = [pairs[0]["baseline_variant"], *(pair["variant"] for pair in pairs)]
    scale = data.variant_colors(connection)
    of_variant = dict(zip(scale.domain, scale.range, strict=True))
    # A run is called by its variant, unless another run has the same variant.
    called = variants if len(set(variants)) == len(variants) else runs
    names = dict(zip(runs, called, strict=True))
    colors = alt.Scale(domain=called, range=[of_variant[variant] for variant in variants])
    losses, differences = (
        _paired_lines(
            [
                row | {"name": names[row["run"]]}
                for row in data.query(connection, query, device=device, runs=runs)
            ],
            value,
            colors,
            layout,
        )
        for query, value in ((PAIRED_LOSSES, "loss:Q"), (PAIRED_DIFFERENCES, "difference:Q"))
    )
    margin = next((pair["margin"] for pair in pairs if pair["margin"] is not None), None)
    if margin is not None:
        band = data.drawing([{"low": -margin, "high": margin}]).mark_rect(color=theme.RULE)
        differences = alt.layer(band.encode(y="low:Q", y2="high:Q"), differences)
    said = [_difference(pair) for pair in pairs]
    return [
        losses.properties(title=layout.title("Training loss")),
        differences.properties(title=layout.title(f"Less that of {called[0]}", said, 100)),
    ]


def _paired_lines(rows: list[Row], value: str, colors: alt.Scale, layout: Layout) -> alt.Chart:
    lines = data.drawing(rows).mark_line(strokeWidth=2.5)
    return lines.encode(
        x=alt.X("step:Q", title="training step").axis(format=",d", tickCount=5, grid=False),
        y=alt.Y(value, title="nats per target value").scale(zero=False).axis(orient=layout.side),
        color=alt.Color("name:N", title=None, scale=colors).legend(
            symbolSize=500, symbolStrokeWidth=2.5
        ),
        strokeDash=alt.StrokeDash("name:N", title=None).scale(domain=colors.domain, range=DASHES),
        tooltip=["run:N", "variant:N", "step:Q", alt.Tooltip(value, format=".4f")],
    ).properties(width=layout.plot_width(PANEL_WIDTH), height=PANEL_HEIGHT)


def _difference(pair: Row) -> str:
    mean, low, high = (
        f"{pair[name]:+.4f}".replace("-", "−")
        for name in ("mean_difference", "difference_low", "difference_high")
    )
    if pair["is_null_pair"]:
        verdict = "PyTorch against itself"
    elif pair["margin"] is None:
        verdict = "not comparable: PyTorch's own runs are further apart"
    else:
        verdict = (
            f"{'' if pair['equivalent'] else 'not '}equivalent within ±{pair['margin']:.4f} (grey)"
        )
    return f"{pair['run']} ({pair['variant']}): {mean} (90% interval {low} to {high}), {verdict}"
