"""What holds for every test."""

from __future__ import annotations

from hypothesis import settings

# No deadline: the machines are shared, and a slow example is no wrong one. A failure prints what repeats it.
settings.register_profile("midstream", deadline=None, print_blob=True)
settings.load_profile("midstream")
