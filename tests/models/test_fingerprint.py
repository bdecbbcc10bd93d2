from __future__ import annotations

import base64
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.history.messages import (
    Entry,
    File,
    History,
    Response,
    Step,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
    ToolSpec,
    UserMessage,
    UserPart,
)
from midstream.models.fingerprint import (
    LINK_BYTES,
    Chain,
    canonical,
    common_users,
    file_digest,
    identity_digest,
    outline,
    servers_digest,
    system_digest,
    tools_digest,
)
from midstream.tools.forwarded_servers import ForwardedMcpServer
from tests.agents.reuse_examples import HERE, conversation, outline_of, step_of, user_message
from tests.spec import spec

PNG = base64.b64encode(bytes(range(250))).decode()


@spec("REUSE-1")
def test_text_of_models_and_tools_does_not_count() -> None:
    outline = outline_of(user_message("a"), step_of("yes", calls=["c1"]), user_message("b"))
    response = Response(
        (Thinking("hm", "sig"), Text("as the host writes it"), ToolCall("c1", "other", "[1]")), model="m"
    )
    rewritten = outline_of(
        user_message("a"), Step(response, (ToolResult("c1", "[cleared]"),)), user_message("b")
    )
    assert rewritten == outline


@spec("REUSE-1")
@pytest.mark.parametrize(
    "other",
    [
        outline_of(user_message("a"), system="Be long."),
        outline_of(user_message("a"), tools=[ToolSpec("read")]),
        outline_of(user_message("a"), servers=[ForwardedMcpServer("files", command="serve")]),
        outline_of(user_message("a"), identity={"model": "haiku", "folder": "/work"}),
        outline_of(user_message("A")),
        outline_of(user_message("a"), user_message("a")),
        outline_of(),
    ],
)
def test_every_other_difference_counts(other: object) -> None:
    assert other != outline_of(user_message("a"))


@spec("REUSE-2")
def test_the_order_of_tools_and_of_keys_at_any_depth_does_not_count() -> None:
    one = ToolSpec(
        "read", "d", {"type": "object", "properties": {"a": {"x": 1, "y": [{"p": 1, "q": 2}]}, "b": {}}}
    )
    two = ToolSpec(
        "read", "d", {"properties": {"b": {}, "a": {"y": [{"q": 2, "p": 1}], "x": 1}}, "type": "object"}
    )
    other = ToolSpec("write")
    assert tools_digest([one, other]) == tools_digest([other, two])

    env = {"A": "1", "B": "2"}
    files = ForwardedMcpServer("files", command="serve", env=env)
    same = ForwardedMcpServer("files", command="serve", env=dict(reversed(env.items())))
    web = ForwardedMcpServer("web", transport="http", url="u")
    assert servers_digest([files, web]) == servers_digest([web, same])


@spec("REUSE-2")
def test_the_order_of_lists_and_every_value_counts() -> None:
    def tool(names: Sequence[object]) -> bytes:
        return tools_digest([ToolSpec("read", parameters={"properties": {"a": {"enum": list(names)}}})])

    assert len({tool(["a", "b"]), tool(["b", "a"]), tool(["a"]), tool(["a", "b", None])}) == 4
    assert servers_digest([ForwardedMcpServer("f", args=("a", "b"))]) != servers_digest(
        [ForwardedMcpServer("f", args=("b", "a"))]
    )


@spec("REUSE-2")
def test_empty_and_missing_are_equal() -> None:
    assert tools_digest([]) == servers_digest(()) == system_digest("") == identity_digest({})
    assert tools_digest([ToolSpec("read", "", {})]) == tools_digest([ToolSpec("read")])
    assert servers_digest([ForwardedMcpServer("f", env={}, headers={}, args=())]) == servers_digest(
        [ForwardedMcpServer("f")]
    )
    assert identity_digest({"model": "opus", "folder": ""}) == identity_digest({"model": "opus"})


@spec("REUSE-2")
def test_two_different_sets_are_never_encoded_alike() -> None:
    assert tools_digest([ToolSpec("a"), ToolSpec("b")]) != tools_digest([ToolSpec('a"}{"name":"b')])
    assert tools_digest([ToolSpec("a"), ToolSpec("a")]) != tools_digest([ToolSpec("a")])


def test_a_lone_surrogate_does_not_fail() -> None:
    assert canonical({"b": 1, "a": "\ud800"}) == b'{"a":"\\ud800","b":1}'
    assert system_digest("\ud800") != system_digest("?")
    assert outline_of(user_message("\ud800")) != outline_of(user_message("?"))
    assert tools_digest([ToolSpec("\ud800")]) != tools_digest([ToolSpec("?")])


@spec("REUSE-3")
def test_text_counts_however_it_is_split_into_parts() -> None:
    def print_of(*parts: UserPart) -> bytes:
        return outline_of(UserMessage(parts)).fingerprint.users

    image = File("image/png", PNG)
    assert print_of(Text("ab")) == print_of(Text("a"), Text(""), Text("b"))
    assert print_of(Text("ab"), image) == print_of(Text("a"), Text("b"), image, Text(""))
    assert print_of() == print_of(Text(""))
    different = [
        print_of(Text("ab"), image),
        print_of(image, Text("ab")),
        print_of(Text("a"), image, Text("b")),
        print_of(image, image),
        print_of(image),
        print_of(Text("ab")),
        print_of(),
    ]
    assert len(set(different)) == len(different)


@spec("REUSE-4")
def test_an_attachment_is_identified_by_its_content() -> None:
    other = base64.b64encode(bytes(250)).decode()
    assert file_digest(File("image/png", PNG)) != file_digest(File("image/png", other))
    assert file_digest(File("image/png", PNG, name="a.png")) == file_digest(
        File("image/png", PNG, name="b.png")
    )
    assert file_digest(File("image/png", PNG)) != file_digest(File("image/gif", PNG))
    assert file_digest(File("IMAGE/PNG ", PNG)) == file_digest(File("image/png", PNG))


@spec("REUSE-4")
@pytest.mark.parametrize(
    "same",
    [
        File("image/png", PNG.rstrip("=")),
        File("image/png", "\n".join(PNG[at : at + 76] for at in range(0, len(PNG), 76)) + "\r\n"),
        File("image/png", PNG.replace("+", "-").replace("/", "_")),
        File("image/png", url=f"data:image/png;base64,{PNG}"),
        File("", url=f"DATA:image/png;BASE64,{PNG}"),
        File("image/png", url=f"data:;base64,{PNG}"),
    ],
)
def test_the_same_bytes_in_another_base64_are_the_same_attachment(same: File) -> None:
    assert file_digest(same) == file_digest(File("image/png", PNG))


@spec("REUSE-4")
def test_an_unreadable_attachment_is_compared_unchanged() -> None:
    files = [
        File("image/png", url="https://a/1"),
        File("image/png", url="https://a/2"),
        File("image/png", "https://a/1"),
        File("image/png", url="data:image/png,plain"),
        File("image/png"),
        File("image/png", name="a"),
        File("image/png", "ü"),
        File("image/png", "\ud800"),
    ]
    assert len({file_digest(file) for file in files}) == len(files)


@spec("REUSE-5")
@given(st.lists(st.sampled_from("abc"), max_size=40), st.lists(st.sampled_from("abc"), max_size=40))
def test_the_longest_common_prefix_is_found(one: list[str], two: list[str]) -> None:
    links = [outline_of(*conversation(*texts)).fingerprint for texts in (one, two)]
    expected = next(
        (at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two))
    )
    assert common_users(links[0].users, links[1].users) == expected
    assert [found.count for found in links] == [len(one), len(two)]


@spec("REUSE-5")
def test_the_common_prefix_is_found_by_bisection() -> None:
    class Watched(bytes):
        looks = 0

        def __getitem__(self, key: object) -> bytes:  # type: ignore[override]
            Watched.looks += 1
            return super().__getitem__(key)  # type: ignore[call-overload,no-any-return]

    same, count = Watched(bytes(100_000 * LINK_BYTES)), 99_999
    changed = bytes(count * LINK_BYTES) + b"\1" * LINK_BYTES
    assert common_users(same, changed) == count
    assert Watched.looks <= 17


@spec("REUSE-1")
def test_the_tail_consists_of_the_trailing_user_messages_and_results() -> None:
    outline = outline_of(
        user_message("a"),
        step_of(calls=["c1"]),
        step_of(calls=["c2", "c3"]),
        user_message("b"),
        user_message("c"),
    )
    assert (outline.tail_users, outline.tail_results, outline.answered) == (
        2,
        ("c2", "c3"),
        ("c1", "c2", "c3"),
    )
    outline = outline_of(user_message("a"), step_of(calls=["c1"]), step_of(), user_message("b"))
    assert (outline.tail_users, outline.tail_results, outline.answered) == (1, (), ("c1",))
    outline = outline_of(user_message("a"), step_of(calls=["c1"]))
    assert (outline.tail_users, outline.tail_results, outline.answered) == (0, ("c1",), ("c1",))
    outline = outline_of(step_of())
    assert (outline.tail_users, outline.tail_results, outline.answered, outline.fingerprint.count) == (
        0,
        (),
        (),
        0,
    )


_entries = st.lists(
    st.one_of(
        st.builds(user_message, st.sampled_from("abc")), st.just(step_of()), st.just(step_of(calls=["c1"]))
    ),
    max_size=12,
)


@spec("REUSE-6")
@given(st.lists(_entries, max_size=6), st.booleans())
def test_a_chain_equals_the_hash_of_the_whole_history(batches: list[list[Entry]], is_growing: bool) -> None:  # noqa: FBT001 - drawn
    chain = Chain()
    history = History()
    for batch in batches:
        history = History((*(history.entries if is_growing else ()), *batch))
        chain = chain.then(history)
        assert chain.digest.outline("s", (), (), HERE) == outline("s", (), (), HERE, history)
        assert chain == chain.then(History(tuple(history.entries)))


@spec("REUSE-6")
def test_a_chain_hashes_only_new_entries() -> None:
    class Counted(str):
        __slots__ = ()
        reads = 0

        def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
            Counted.reads += 1
            return super().encode(encoding, errors)

    chain = Chain()
    entries: list[Entry] = []
    for turn in range(50):
        entries += [user_message(Counted(f"question {turn}")), step_of()]
        chain = chain.then(History(tuple(entries)))
    assert Counted.reads == 50


@spec("REUSE-6")
def test_a_chain_notices_a_replaced_entry() -> None:
    first, second, third = user_message("a"), user_message("b"), user_message("c")
    chain = Chain().then(History((first, second)))
    edited = History((user_message("A"), second, third))
    assert chain.then(edited) == Chain().then(edited)
