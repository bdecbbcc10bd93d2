"""SQLite files as stores."""

from midstream.store.sqlite.store import SQLiteStore, engine_version

__all__ = ["SQLiteStore", "engine_version"]
