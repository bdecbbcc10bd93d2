"""Numbers by name, with less memory than a dict."""

from __future__ import annotations

from array import array

NOTHING = -1
_SLOTS_MIN = 64


class Index:
    """A number for each name: 18 to 36 bytes each, for names of any length.

    Names are distinguished by the 64 bits of their hash. Numbers are not negative and fit in 31 bits.
    """

    def __init__(self) -> None:
        self._count = 0
        self._make(_SLOTS_MIN)

    def __len__(self) -> int:
        return self._count

    def __contains__(self, name: str) -> bool:
        return self._numbers[self._slot(hash(name))] != NOTHING

    def __setitem__(self, name: str, number: int) -> None:
        slot = self._slot(hash(name))
        if self._numbers[slot] == NOTHING:
            self._count += 1
            self._hashes[slot] = hash(name)
        self._numbers[slot] = number
        if 3 * self._count > 2 * len(self._numbers):
            self._grow()

    def get(self, name: str) -> int | None:
        """Return the number of a name, or None."""
        number = self._numbers[self._slot(hash(name))]
        return None if number == NOTHING else number

    def _slot(self, hashed: int) -> int:
        """Return the slot of a name, or its free slot."""
        numbers, hashes, mask = self._numbers, self._hashes, len(self._numbers) - 1
        slot = hashed & mask
        while numbers[slot] != NOTHING and hashes[slot] != hashed:
            slot = (slot + 1) & mask
        return slot

    def _make(self, slots: int) -> None:
        self._hashes = array("q", bytes(8 * slots))
        self._numbers = array("i", [NOTHING]) * slots

    def _grow(self) -> None:
        hashes, numbers = self._hashes, self._numbers
        self._make(2 * len(numbers))
        for hashed, number in zip(hashes, numbers, strict=True):
            if number != NOTHING:
                slot = self._slot(hashed)
                self._hashes[slot], self._numbers[slot] = hashed, number
