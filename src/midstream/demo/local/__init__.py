"""A real language model in this process: no network, no key."""

from midstream.demo.local.local_model import LocalModel

__all__ = ["LocalModel"]
