"""Asks the database for rows of the figures, their devices, and their variants."""

from collections.abc import Iterable, Sequence
from typing import Any

import altair as alt
import duckdb
import pyarrow as pa

from tnp.figures.words import NAMED, words
from tnp.store.schemas import ROLES

Row = dict[str, Any]

BASELINE_COLOR = "#6e7781"
# PyTorch's variants and implementations. Two in a panel always differ.
PYTORCH_COLORS = [
    "#0072B2", "#2A9ACB", "#332288", "#2E9C8B", "#117733", "#5C8A94",
    "#7B6FD0", "#003F5C", "#6C9A36", "#4B0082", "#00A0A0", "#3F51D8",
]  # fmt: skip
OWN_COLORS = ["#D55E00", "#C98500", "#882255", "#C56C9C", "#AA4499", "#6B5D00"]
# Holds colours by role. The plain forms of a step and of an operator share a colour.
COLORS = {"baseline": [BASELINE_COLOR], "peer": PYTORCH_COLORS, "own": OWN_COLORS}


def query(connection: duckdb.DuckDBPyConnection, sql: str, **parameters: object) -> list[Row]:
    """Returns the result of `sql` as dictionaries of Python values. `$name` is a parameter.

    Names of variants, implementations and components are replaced by titles (`tnp.figures.words`).
    """
    cursor = connection.execute(sql, parameters or None)
    names = [column[0] for column in cursor.description]
    rows = [dict(zip(names, values, strict=True)) for values in cursor.fetchall()]
    for row in rows:
        row |= {name: words(row[name]) for name in NAMED & row.keys() if row[name] is not None}
    return rows


def drawing(rows: list[Row]) -> alt.Chart:
    """Returns a chart of `rows` without a mark. All rows have the columns of the first.

    It uses Arrow, because Altair copies lists of dictionaries each time charts are put together.
    """
    return alt.Chart(pa.Table.from_pylist(rows))


def devices(connection: duckdb.DuckDBPyConnection, view: str) -> dict[str, Row]:
    """Returns {slug: slug and name} of devices with rows in `view`, GPUs first, largest first."""
    found = query(
        connection,
        f"""
        select device, coalesce(arg_max(device_name, recorded_at), device) as name
        from (select distinct device from {view}) left join environments using (device)
        group by device
        order by device = 'cpu', max(memory_bytes) desc, device
        """,
    )
    return {row["device"]: row for row in found}


def grouped(rows: Iterable[Row], *columns: str) -> list[list[Row]]:
    """Returns the rows of each combination of values of `columns`, in the order of the rows."""
    found: dict[tuple, list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in columns), []).append(row)
    return list(found.values())


def by_device(devices: dict[str, Row], rows: Iterable[Row]) -> list[tuple[Row, list[Row]]]:
    """Returns each device that has rows, with its rows, in the order of `devices`."""
    of_device = {own[0]["device"]: own for own in grouped(rows, "device")}
    return [(device, of_device[slug]) for slug, device in devices.items() if slug in of_device]


def of_first(devices: dict[str, Row], rows: Iterable[Row]) -> tuple[list[Row], str]:
    """Returns the rows of the first device that has any, and its name; [] and "" without rows."""
    for device, own in by_device(devices, rows):
        return own, device["name"]
    return [], ""


def recorded(
    connection: duckdb.DuckDBPyConnection,
    view: str,
    device: Row,
    keys: Sequence[str] | None = None,
) -> str:
    """Returns when the rows behind `view` were measured on `device`: all rows, or of `questions`.

    Examples: "recorded 2026-02-01", "recorded 2026-02-01 to 2026-03-01", "this machine,
    2026-02-01", or both kinds. The result is "" if no row tells.
    """
    rows = query(
        connection,
        """
        select origin, min(first_day) as first_day, max(last_day) as last_day
        from recording_days
        where
            view_name = $view
            and device = $device
            and ($keys is null or list_contains($keys, comparison_key))
        group by origin
        order by origin
        """,
        view=view,
        device=device["device"],
        keys=keys,
    )
    return "; ".join(
        ("recorded " if row["origin"] == "recorded" else "this machine, ")
        + " to ".join(dict.fromkeys(str(row[end]) for end in ("first_day", "last_day")))
        for row in rows
    )


def joined(said: Sequence[str]) -> str:
    """Joins texts about a measurement in one line."""
    return " · ".join(filter(None, said))


def roles(connection: duckdb.DuckDBPyConnection) -> dict[str, str]:
    """Returns {variant or implementation with rows: role}, "baseline" first, then "peer", "own".

    A variant that was only trained has no role in its rows: it counts as ours.
    """
    found = query(
        connection,
        """
        with named as (
            select variant, role from memory
            union select implementation, role from roofline where not is_ceiling(op)
            union
            select
                implementation,
                case when provider = 'own' then 'own' when rank = 0 then 'baseline' else 'peer' end
            from host inner join implementations using (op, implementation)
            union select variant, role from step_host
            union select variant, role from stage_share
            union select variant, null from training_curves
        )

        select variant, coalesce(min(role), 'own') as role from named
        where variant is not null
        group by variant
        """,
    )
    found.sort(key=lambda row: (ROLES.index(row["role"]), row["variant"]))
    return {row["variant"]: row["role"] for row in found}


def variants(connection: duckdb.DuckDBPyConnection) -> list[str]:
    """Returns variants and implementations with rows, in the order of their roles."""
    return list(roles(connection))


def variant_colors(connection: duckdb.DuckDBPyConnection) -> alt.Scale:
    """Returns a colour for each variant, the same in all figures of one database."""
    names = roles(connection)
    colors = {}
    for role, of_role in COLORS.items():
        of_this = [name for name in names if names[name] == role]
        colors |= {name: of_role[i % len(of_role)] for i, name in enumerate(of_this)}
    return alt.Scale(domain=list(names), range=[colors[name] for name in names])


def steps_measured(connection: duckdb.DuckDBPyConnection, view: str, device: Row) -> str:
    """Returns when, in which dtypes and how often steps of `view` were timed on `device`."""
    (row,) = query(
        connection,
        """
        select
            list(distinct dtype order by dtype) as dtypes,
            min(n_runs) as fewest,
            max(n_runs) as most
        from step_summary where status = 'ok' and device = $device
        """,
        device=device["device"],
    )
    when = recorded(connection, view, device)
    if not row["dtypes"]:
        return joined([when, "nothing could be timed"])
    fewest, most = row["fewest"], row["most"]
    runs = f"{most}" if fewest == most else f"{fewest} to {most}"
    noun = "run" if most == 1 else "runs"
    return joined([when, ", ".join(row["dtypes"]), f"{runs} {noun} a configuration"])
