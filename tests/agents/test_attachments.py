"""Which attachment URLs an agent on this machine receives, and which are replaced by text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.agents.attachments import (
    is_public_address,
    refuse_local_files,
    resolve,
    with_readable_files,
)
from midstream.agents.upstream_abilities import Abilities
from midstream.errors import AccessError
from midstream.history.messages import File, History, Text, UserMessage
from midstream.testing.scripted_upstream import ScriptedUpstream
from tests.agents.pooling import PoolBench
from tests.spec import spec

PUBLIC = "93.184.215.14"


def message_with(url: str) -> UserMessage:
    return UserMessage((Text("look"), File("image/png", url=url, name="a.png")))


async def resolve_public(_: str) -> Sequence[str]:
    return (PUBLIC,)


async def attach(url: str, folder: Path, *addresses: str) -> str | None:
    """Return the URL that an agent receives; None if it receives text."""

    async def look_up(_: str) -> Sequence[str]:
        return addresses

    message = await with_readable_files(message_with(url), folder, look_up if addresses else resolve)
    file = message.parts[1]
    if isinstance(file, File):
        return file.url
    assert file.text.startswith("[An attachment was left out, because ")
    assert url not in file.text
    return None


@spec("SEC-80")
@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/x",
        "http://localhost:8000/v1/sessions",
        "http://127.1/",
        "http://0/",
        "http://2130706433/",
        "http://0x7f000001/",
        "http://[::1]/",
        "http://[::ffff:127.0.0.1]/",
        "http://[::ffff:7f00:1]/",
        "http://[64:ff9b::a9fe:a9fe]/",
        "http://[2002:7f00:1::]/",
        "http://[fe80::1%25lo]/",
        "http://169.254.169.254/latest/meta-data/",
        "http://10.0.0.1/",
        "http://172.16.0.1/",
        "http://192.168.1.1/",
        "http://100.64.0.1/",
        "http://224.0.0.1/",
        "http://[fd00:ec2::254]/",
        "http://user@127.0.0.1/",
        "http:///etc/passwd",
        "http://127.0.0.1\\@example.com/",
        "http://exa mple.com/",
        "HTTP://127.0.0.1/",
        " http://127.0.0.1/",
        "ftp://93.184.215.14/x",
        "gopher://93.184.215.14/x",
        "//127.0.0.1/x",
        "/etc/passwd",
        "C:\\x",
        "",
        "javascript:alert(1)",
    ],
)
async def test_an_address_that_is_not_public_is_omitted(url: str, tmp_path: Path) -> None:
    if url:
        assert await attach(url, tmp_path) is None


@spec("SEC-80")
async def test_a_public_address_and_inline_content_are_passed(tmp_path: Path) -> None:
    for url in (f"https://{PUBLIC}/a.png?b=c", "data:image/png;base64,AAAA"):
        assert await attach(url, tmp_path) == url
    assert await attach("https://example.com/a", tmp_path, PUBLIC) == "https://example.com/a"
    inline = UserMessage((File("image/png", data="AAAA"), Text("look")))
    assert await with_readable_files(inline, tmp_path) is inline


@spec("SEC-80")
async def test_a_name_with_one_private_address_is_omitted(tmp_path: Path) -> None:
    assert await attach("https://example.com/a", tmp_path, PUBLIC, "10.0.0.1") is None
    assert await attach("https://no-such-host.invalid/a", tmp_path) is None


@spec("SEC-81")
async def test_a_file_is_passed_by_its_real_path_only_below_the_folder(tmp_path: Path) -> None:
    folder, outside = tmp_path / "work", tmp_path / "secret"
    (folder / "in").mkdir(parents=True)
    (folder / "in/a b.png").touch()
    outside.touch()
    (folder / "link").symlink_to(outside)
    (folder / "ring").symlink_to(folder / "ring")
    (folder / "good").symlink_to(folder / "in")
    real = (folder / "in/a b.png").resolve().as_uri()
    assert await attach(f"{folder.as_uri()}/good/a%20b.png", folder) == real
    assert await attach(f"{real}#L10", folder) == f"{real}#L10"
    for url in (
        "file:///etc/passwd",
        outside.as_uri(),
        f"{folder.as_uri()}/../secret",
        f"{folder.as_uri()}/%2e%2e/secret",
        f"{folder.as_uri()}/link",
        f"{folder.as_uri()}/ring",
        f"file://elsewhere{folder}/in/a",
        f"{folder.as_uri()}2/x",
        f"FILE://{outside}",
        f" file://{outside}",
        f"file:{outside}",
        "file:///etc/pass\0wd",
        "file://[",
    ):
        assert await attach(url, folder) is None, url


@spec("SEC-81")
@pytest.mark.parametrize("url", ["file:///etc/passwd", "FILE:x", "\tfile:x"])
def test_a_file_url_of_this_machine_is_refused_from_another_sender(url: str) -> None:
    with pytest.raises(AccessError, match="send the content"):
        refuse_local_files(message_with(url))
    refuse_local_files(message_with("https://example.com/file:x"))
    refuse_local_files(UserMessage((File("image/png", data="AAAA"),)))


@given(st.ip_addresses(v=4))
def test_an_ipv4_address_is_judged_the_same_inside_ipv6(address: object) -> None:
    is_public = is_public_address(str(address))
    assert is_public_address(f"::ffff:{address}") == is_public_address(f"64:ff9b::{address}") == is_public
    assert not is_public_address(f"{address}.1")


@spec("SEC-80")
async def test_an_agent_of_a_pool_receives_no_address_that_is_not_public(tmp_path: Path) -> None:
    upstream = ScriptedUpstream(identity={"cwd": str(tmp_path)}, abilities=Abilities(takes_files=True))
    bench = PoolBench(upstream)
    host = await bench.host()
    host.history = History((message_with("http://169.254.169.254/latest/"),))
    await host.ask()
    (received,) = bench.upstream.sends
    assert not any(isinstance(part, File) for part in received.message.message.parts)
    assert "left out" in bench.sent_texts()[0]
