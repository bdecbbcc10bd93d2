"""PostgreSQL databases as stores."""

from midstream.store.postgres.postgres_store import PostgresStore

__all__ = ["PostgresStore"]
