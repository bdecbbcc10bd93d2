"""How far properties are searched: the same examples every time, or new ones by chance.

`make test` and `make check` try the same examples on every run, drawn from each test itself: a run that fails there
fails again. `make search` draws new ones, `TIMES` as many; what it finds becomes an example that is always tried.
"""

from __future__ import annotations

import os
from typing import Final

TIMES: Final = int(os.environ.get("MIDSTREAM_SEARCH") or 1)
"""How many times the usual number of examples a test tries; a search by chance where the variable is set."""
EXAMPLES: Final = 100 * TIMES
"""What a test tries that names no number of its own."""
PROFILE: Final = "search" if os.environ.get("MIDSTREAM_SEARCH") else "midstream"
"""Which of the settings in `tests/conftest.py` hold."""
