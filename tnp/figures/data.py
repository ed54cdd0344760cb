"""What every figure asks the database: rows, which devices they come from, which variants exist."""

from typing import Any

import altair as alt
import duckdb
import pyarrow as pa

Row = dict[str, Any]

BASELINE, BASELINE_COLOR = "sdpa_flash", "#6e7781"
# One for each of PyTorch's variants and implementations: two in a panel are never the same.
PYTORCH_COLORS = [
    "#0072B2", "#56B4E9", "#332288", "#44AA99", "#117733", "#88CCEE",
    "#7B6FD0", "#003F5C", "#8FBC5A", "#4B0082", "#00A6A6", "#A7B8E8",
]  # fmt: skip
OWN_COLORS = ["#D55E00", "#E69F00", "#882255", "#CC79A7", "#AA4499", "#DDCC77"]


def query(connection: duckdb.DuckDBPyConnection, sql: str, **parameters: object) -> list[Row]:
    """The result of `sql` as dictionaries of plain Python values; `$name` is a parameter."""
    cursor = connection.execute(sql, parameters or None)
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, values, strict=True)) for values in cursor.fetchall()]


def drawing(rows: list[Row]) -> alt.Chart:
    """A chart of `rows`, which all have the first one's columns, still without a mark.

    Arrow, because Altair copies lists of dictionaries each time charts are put together.
    """
    return alt.Chart(pa.Table.from_pylist(rows))


def is_pytorch(variant: str) -> bool:
    """Whether a variant, by its name, or an operator's implementation is not ours."""
    peers = ("sdpa_", "flex", "fa3", "fa4", "torch", "compiled", "loop", "bmm", "grouped_mm")
    return variant.startswith(peers)


def devices(connection: duckdb.DuckDBPyConnection, view: str) -> dict[str, Row]:
    """Slug → name, origin and day of each device with rows in `view`; GPUs first, largest first."""
    found = query(
        connection,
        f"""
        select
            device,
            coalesce(arg_max(device_name, recorded_at), device) as name,
            bool_and(origin = 'recorded') as recorded,
            cast(cast(max(recorded_at) as timestamp) as date) as day
        from (select distinct device from {view}) left join environments using (device)
        group by device
        order by device = 'cpu', max(memory_bytes) desc, device
        """,
    )
    return {row["device"]: row for row in found}


def origin(device: Row) -> str:
    """ "recorded 2026-02-01" or "this machine, 2026-02-01"; "" without an environment row."""
    if device["day"] is None:
        return ""
    return f"{'recorded' if device['recorded'] else 'this machine,'} {device['day']}"


def variants(connection: duckdb.DuckDBPyConnection) -> list[str]:
    """Variants and implementations with rows: the baseline, PyTorch's others, the project's."""
    found = query(
        connection,
        """
        select variant from memory
        union select variant from stage_share
        union select variant from training_curves
        union select implementation from roofline where op not in ('matmul', 'copy')
        """,
    )
    names = {row["variant"] for row in found if row["variant"]}
    return sorted(names, key=lambda name: (name != BASELINE, not is_pytorch(name), name))


def variant_colors(connection: duckdb.DuckDBPyConnection) -> alt.Scale:
    """One colour per variant, the same in every figure drawn from the same database."""
    order = variants(connection)
    pytorch = [name for name in order if is_pytorch(name) and name != BASELINE]
    own = [name for name in order if not is_pytorch(name)]
    colors = {BASELINE: BASELINE_COLOR}
    colors |= {name: PYTORCH_COLORS[i % len(PYTORCH_COLORS)] for i, name in enumerate(pytorch)}
    colors |= {name: OWN_COLORS[i % len(OWN_COLORS)] for i, name in enumerate(own)}
    return alt.Scale(domain=order, range=[colors[name] for name in order])


def steps_measured(connection: duckdb.DuckDBPyConnection, device: Row) -> str:
    """Origin, dtypes and replicates of the steps timed on `device`, for the line under its name."""
    (row,) = query(
        connection,
        """
        select
            list(distinct dtype order by dtype) as dtypes,
            min(n_replicates) as fewest,
            max(n_replicates) as most
        from step_summary where status = 'ok' and device = $device
        """,
        device=device["device"],
    )
    if not row["dtypes"]:
        return f"{origin(device)} · nothing could be timed"
    fewest, most = row["fewest"], row["most"]
    replicates = f"{most}" if fewest == most else f"{fewest} to {most}"
    noun = "replicate" if most == 1 else "replicates"
    return f"{origin(device)} · {', '.join(row['dtypes'])} · {replicates} {noun} a configuration"
