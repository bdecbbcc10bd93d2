"""The system's keyring: which backends are accepted, and the limited wait for them."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from keyring.backends import chainer
from keyring.core import load_keyring

from midstream.client.os_keyring import SERVICE, OsKeyring
from midstream.errors import UnavailableError
from tests.client.keyrings import BrokenKeyring, FileKeyring, LockedKeyring, LossyKeyring, use_keyring
from tests.house.source import ROOT

CALLS = 50
WAIT_S = 60.0


class EmptyChain(chainer.ChainerBackend):
    """A chain without a backend."""

    backends = ()

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of the package


def test_an_entry_is_stored_read_and_deleted(ring: FileKeyring) -> None:
    ours = OsKeyring(answer_s=WAIT_S)
    assert ours.get("a") is None
    ours.put("a", "secret")
    assert (ours.get("a"), ring.get_password(SERVICE, "a")) == ("secret", "secret")
    ours.delete("a")
    ours.delete("a")
    assert (ours.get("a"), ring.stored()) == (None, [])


NOTHING = ("keyring.backends.fail.Keyring", "keyring.backends.null.Keyring", "an empty chain")


@pytest.mark.parametrize("backend", NOTHING)
def test_a_backend_that_stores_nothing_is_not_accepted(backend: str) -> None:
    ours = OsKeyring(answer_s=WAIT_S)
    with use_keyring(EmptyChain() if "chain" in backend else load_keyring(backend)):
        with pytest.raises(UnavailableError, match="no usable keyring"):
            ours.put("a", "secret")
        with pytest.raises(UnavailableError, match="no usable keyring"):
            ours.get("a")


def test_the_error_for_a_missing_package_contains_the_remedy() -> None:
    script = (
        "import sys\nsys.modules['keyring'] = None\n"
        "from midstream.client.os_keyring import OsKeyring\n"
        "from midstream.errors import UnavailableError\n"
        "try:\n    OsKeyring().get('a')\nexcept UnavailableError as error:\n    print(error.message)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, cwd=ROOT, timeout=WAIT_S, capture_output=True, text=True
    )
    assert "pip install 'midstream[keyring]'" in done.stdout


@pytest.mark.slow
def test_a_failed_call_leaves_no_reference_cycles() -> None:
    ours = OsKeyring(answer_s=WAIT_S)
    with use_keyring(load_keyring("keyring.backends.fail.Keyring")):
        _fail(ours)
        gc.collect()
        gc.disable()
        try:
            for _ in range(CALLS):
                _fail(ours)
            found = gc.collect()
        finally:
            gc.enable()
    assert found < CALLS, "a cycle for each call"


def _fail(ours: OsKeyring) -> None:
    with contextlib.suppress(UnavailableError):
        ours.get("a")
        raise AssertionError("this keyring has nothing")


def test_a_prompt_is_not_waited_for_and_the_keyring_works_after_its_answer(tmp_path: Path) -> None:
    backend = LockedKeyring()
    backend.path = str(tmp_path / "keyring.json")
    ours = OsKeyring(answer_s=0.01)
    with use_keyring(backend):
        with pytest.raises(UnavailableError, match=r"within 0\.01 s"):
            ours.put("a", "secret")
        with pytest.raises(UnavailableError, match="earlier call"):
            ours.get("a")
        backend.unlocked.set()
        for thread in threading.enumerate():
            if thread.name == "midstream-keyring":
                thread.join(WAIT_S)
        ours._answer_s = WAIT_S
        assert ours.get("a") == "secret"


def test_a_blocked_keyring_does_not_keep_the_program_running() -> None:
    script = (
        "import keyring\n"
        "from midstream.client.os_keyring import OsKeyring\n"
        "from midstream.errors import UnavailableError\n"
        "from tests.client.keyrings import LockedKeyring\n"
        "keyring.set_keyring(LockedKeyring())\n"
        "try:\n    OsKeyring(answer_s=0.01).put('a', 'secret')\nexcept UnavailableError:\n    print('left')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, cwd=ROOT, timeout=WAIT_S, capture_output=True, text=True
    )
    assert done.stdout == "left\n"


@pytest.mark.parametrize("kind", [BrokenKeyring, LossyKeyring])
def test_a_keyring_that_did_not_store_a_secret_raises_an_error_without_it(
    tmp_path: Path, kind: type[FileKeyring]
) -> None:
    backend = kind()
    backend.path = str(tmp_path / "keyring.json")
    with use_keyring(backend), pytest.raises(UnavailableError) as caught:
        OsKeyring(answer_s=WAIT_S).put("a", "secret-of-ours")
    assert "secret-of-ours" not in str(caught.value)
    assert (caught.value.__cause__, caught.value.__context__) == (None, None)
