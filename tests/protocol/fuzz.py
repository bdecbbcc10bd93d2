"""A coverage-guided fuzzer of the decoders and both halves: python -m tests.protocol.fuzz [SECONDS] [SEED].

`make fuzz` runs it with atheris, in an environment of its own. Findings are written to a file; they belong
into `upright.FOUND`, where `make test` tries them from then on.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random

import atheris

with atheris.instrument_imports(include=["midstream", "tests.protocol"]):
    from tests.protocol.upright import dictionary, mutate, seeds, take

SECONDS = 600
INPUT_BYTES_MAX = 8192


def _mutated(data: bytes, bytes_max: int, seed: int) -> bytes:
    """Return another input: a mutated frame as often as mutated bytes."""
    chance = Random(seed)
    if chance.randrange(2):
        return bytes(mutate(data, chance)[:bytes_max])
    return bytes(atheris.Mutate(data, bytes_max))


def main(arguments: Sequence[str]) -> None:
    """Fuzz for so many seconds; the process ends with 0, or with another number after an exception."""
    place = Path(tempfile.mkdtemp(prefix="midstream-fuzz-"))
    corpus = place / "corpus"
    corpus.mkdir()
    for number, data in enumerate(seeds()):
        (corpus / f"seed-{number}").write_bytes(data)
    (place / "words").write_text("\n".join(dictionary()))
    options = [
        f"-max_total_time={arguments[0] if arguments else SECONDS}",
        f"-max_len={INPUT_BYTES_MAX}",
        f"-dict={place / 'words'}",
        f"-artifact_prefix={place}/",
        *(f"-seed={seed}" for seed in arguments[1:2]),
    ]
    print(f"what is found is written to {place}", flush=True)  # noqa: T201 - a command writes to a terminal
    atheris.Setup([sys.argv[0], *options, str(corpus)], take, custom_mutator=_mutated)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1:])
