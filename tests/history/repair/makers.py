"""Turns and tasks for tests of single steps."""

# ruff: noqa: ANN401 - a history may hold anything
from __future__ import annotations

from typing import Any

from midstream.history.codecs.codec_spec import MessageTurn
from midstream.history.codecs.format_registry import find_format
from midstream.history.profiles import profile_for
from midstream.history.repair.repair_task import Task


def task_for(form: str = "anthropic", profile: str | None = None, **more: Any) -> Task:
    made = find_format(form)
    return Task(form=made, profile=profile_for(made, profile), **more)


def turns_for(task: Task, messages: list[Any]) -> list[MessageTurn]:
    return [task.form.parse(message, at) for at, message in enumerate(messages)]


def codes(task: Task) -> list[str]:
    return [edit.code for edit in task.report.edits]
