"""The store: Parquet files, and the database that is built from them."""

from pathlib import Path

SQL = Path(__file__).parent / "sql"  # a view and a table: the store's own take most of a build
