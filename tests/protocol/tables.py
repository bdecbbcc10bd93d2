"""Tables of the wire format for authors of clients in other languages, generated from the types themselves."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import typing
from collections.abc import Iterator

import msgspec
from msgspec import NODEFAULT, Struct
from msgspec import inspect as types

from midstream.history import messages
from midstream.protocol import frames
from midstream.session import calls, records

CLIENT: tuple[type[Struct], ...] = typing.get_args(frames.ClientFrame)
PAYLOADS: tuple[type[Struct], ...] = typing.get_args(frames.Payload)
SERVER: tuple[type[Struct], ...] = typing.get_args(frames.ServerFrame)
WITHIN: tuple[type[Struct], ...] = (
    messages.Text,
    messages.File,
    records.ClientTool,
    messages.ToolSpec,
    messages.ToolResult,
    frames.EventFrame,
    messages.UserMessage,
    messages.Response,
    messages.Thinking,
    messages.ToolCall,
    messages.UpstreamCall,
    messages.Usage,
    calls.CallPlan,
)
_ARGUMENT = re.compile(r"^    (?P<names>[\w, ]+): (?P<text>.+(?:\n {8}.+)*)", re.MULTILINE)


def members(kinds: tuple[type[Struct], ...]) -> str:
    """Return a table of the members of some frames or their parts."""
    rows = "".join(_rows(kind) for kind in kinds)
    return f"| member | is | left out, it is | means |\n| --- | --- | --- | --- |\n{rows}"


def record_kinds() -> str:
    """Return a table of the records that events carry."""
    rows = "".join(
        f"| `{_name(kind)}` | {_first_paragraph(kind)} | {', '.join(_with_mark(field) for field in _fields(kind))} |\n"
        for kind in typing.get_args(records.Record)
    )
    return f"| type | meaning | members |\n| --- | --- | --- |\n{rows}"


def _head(kind: type[Struct]) -> str:
    return f"| **`{_name(kind)}`** | | | {_first_paragraph(kind)} |\n"


def _rows(kind: type[Struct]) -> str:
    lines = [f"| **`{_name(kind)}`** | | | {_first_paragraph(kind)} |\n"]
    meanings = _meanings(kind)
    for field in _fields(kind):
        default = "" if field.required else f"`{_json(_default(field))}`"
        reported = _one_line(meanings.get(field.encode_name, ""))
        lines.append(f"| `{field.encode_name}` | {_word(field.type)} | {default} | {reported} |\n")
    return "".join(lines)


def _fields(kind: type[Struct]) -> tuple[types.Field, ...]:
    info = types.type_info(kind)
    assert isinstance(info, types.StructType)
    return info.fields


def _name(kind: type[Struct]) -> str:
    return str(kind.__struct_config__.tag or kind.__name__)


def _with_mark(field: types.Field) -> str:
    return field.encode_name if field.required else f"{field.encode_name}?"


def _default(field: types.Field) -> object:
    return field.default_factory() if field.default is NODEFAULT else field.default


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _word(kind: types.Type) -> str:
    match kind:
        case types.Metadata(type=described):
            return _word(described)
        case types.StrType():
            return "text"
        case types.IntType():
            return "integer"
        case types.FloatType():
            return "number"
        case types.BoolType():
            return "true or false"
        case types.NoneType():
            return "null"
        case types.EnumType(cls=cls):
            return ", ".join(f"`{each.value}`" for each in cls)
        case types.VarTupleType(item_type=item):
            return f"list of {_word(item)}"
        case types.UnionType(types=each):
            return " or ".join(map(_word, each))
        case types.StructType(cls=cls):
            return f"`{_name(cls)}`"
        case types.DictType(value_type=value) if not isinstance(value, types.AnyType):
            return f"object of {_word(value)}"
        case _:
            return "object"


def _meanings(kind: type[Struct]) -> dict[str, str]:
    """Return the description of each member, from the docstring or below the member itself."""
    found = dict(_docs_of_fields(kind))
    reported = inspect.getdoc(kind) or ""
    for each in _ARGUMENT.finditer(reported.partition("Args:\n")[2]):
        for name in each["names"].split(", "):
            found[name] = each["text"]
    return found


def _docs_of_fields(kind: type[Struct]) -> Iterator[tuple[str, str]]:
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    for before, after in zip(body.body, body.body[1:], strict=False):
        if not (isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name)):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            yield before.target.id, str(after.value.value)


def _first_paragraph(kind: type[Struct]) -> str:
    return _one_line((inspect.getdoc(kind) or "").partition("\n\n")[0])


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("None", "null")
