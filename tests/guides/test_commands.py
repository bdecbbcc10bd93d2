"""Blocks of the README and the guides that are no programs: commands, and configuration of client applications."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Iterator

import click
import pytest

from midstream.cli import midstream_command
from tests.guides.blocks import COMMANDS, all_blocks

pytestmark = pytest.mark.slow

BLOCKS = {block.key: block for block in all_blocks()}


def test_every_json_block_is_json() -> None:
    shown = [block for block in BLOCKS.values() if block.language == "json"]
    assert shown
    for block in shown:
        assert json.loads(block.code), block.key


def test_every_toml_block_is_toml() -> None:
    shown = [block for block in BLOCKS.values() if block.language == "toml"]
    assert shown
    for block in shown:
        assert tomllib.loads(block.code), block.key


def test_every_yaml_block_is_yaml() -> None:
    yaml = pytest.importorskip("yaml")
    for block in BLOCKS.values():
        if block.language == "yaml":
            assert yaml.safe_load(block.code), block.key


def test_the_configuration_of_continue_has_all_that_its_schema_requires() -> None:
    """`packages/config-yaml/src/schemas/index.ts` of continuedev/continue refuses a file without these."""
    yaml = pytest.importorskip("yaml")
    (shown,) = [block for block in BLOCKS.values() if "provider: openai\n" in block.code]
    found = yaml.safe_load(shown.code)
    assert found.keys() >= {"name", "version", "schema", "models"}
    assert all(each.keys() >= {"name", "provider", "model"} for each in found["models"])


def _commands() -> Iterator[tuple[str, str]]:
    for (page, language, _), block in BLOCKS.items():
        if language in COMMANDS:
            for line in re.findall(r"^(?:\$ )?(?:\S+ )*?(midstream .*)$", block.code, re.MULTILINE):
                yield page, line


@pytest.mark.parametrize(("page", "line"), [*_commands()])
def test_every_command_exists_with_its_options(page: str, line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    command: click.Command = midstream_command
    context = click.Context(command, info_name="midstream", resilient_parsing=True)
    while isinstance(command, click.Group) and words:
        if command.invoke_without_command:  # Its own options come before the name of a command.
            _, words, _ = command.make_parser(context).parse_args([*words])
            if not words:
                return
        name, found, words = command.resolve_command(context, words)
        assert found is not None, name
        command, context = found, click.Context(found, context, name, resilient_parsing=True)
    command.make_parser(context).parse_args([*words])  # Refuses unknown options.
