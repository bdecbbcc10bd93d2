"""Turns and tasks for tests of single steps."""

# ruff: noqa: ANN401 - a history may hold anything
from __future__ import annotations

from typing import Any

from midstream.core.formats.named import format_named
from midstream.core.formats.parts import Turn
from midstream.core.profiles import profile_for
from midstream.core.repair.task import Task


def task_for(form: str = "anthropic", profile: str | None = None, **more: Any) -> Task:
    made = format_named(form)
    return Task(form=made, profile=profile_for(made, profile), **more)


def turns_for(task: Task, messages: list[Any]) -> list[Turn]:
    return [task.form.parse(message, at) for at, message in enumerate(messages)]


def codes(task: Task) -> list[str]:
    return [edit.code for edit in task.report.edits]
