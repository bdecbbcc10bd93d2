"""A real language model in this process: no network, no key."""

from midstream.integrations.local.model import LocalModel

__all__ = ["LocalModel"]
