"""Entries of one request in the audit log."""

from __future__ import annotations

import re

from starlette.types import Scope

from midstream.server.audit_log import ADMITTED, AuditLog
from midstream.server.auth.issued_credentials import ID_LENGTH
from midstream.server.auth.principals import Principal
from midstream.session.turn.commands import Answer, Command

_EVENTS: tuple[tuple[str, str, str], ...] = (
    ("GET", r"/v1/sessions|/v1/questions|/v1/access|/v1/nodes", "list"),
    ("POST", r"/v1/login", "login"),
    ("POST", r"/v1/logout", "logout"),
    ("POST", r"/v1/login-links", "link"),
    ("DELETE", r"/v1/access(/[^/]+)?", "revoke"),
    ("GET", r"/metrics", "metrics"),
    ("POST", r"/v1/sessions/[^/]+/(events|poll)", "read"),
    ("POST", r"/v1/sessions/[^/]+/(commands|cancel|resume|withdraw)", "send"),
    ("POST", r"/v1/sessions/[^/]+/answer", "answer"),
    ("POST", r"/v1/sessions/[^/]+/tickets", "ticket"),
    ("POST", r"/v1/sessions/[^/]+/viewers", "share"),
    ("PUT", r"/v1/sessions/[^/]+/readers/[^/]+", "share"),
    ("DELETE", r"/v1/sessions/[^/]+/(viewers|readers/[^/]+)", "unshare"),
    ("DELETE", r"/v1/sessions/[^/]+", "delete"),
    ("GET", r"/v1/sessions/[^/]+(/.*)?", "read"),
    ("POST", r"/v1/chat", "send"),
    ("GET", r"/v1/chat/[^/]+/(stream|messages)", "read"),
    ("GET", r"/v1/stream/__ds/jwks\.json", ""),
    ("DELETE", r"/v1/stream/__ds/subscriptions/[^/]+/streams/.+", "send"),
    ("PUT", r"/v1/stream/.+", "send"),
    ("POST", r"/v1/stream/.+", "send"),
    ("DELETE", r"/v1/stream/.+", "delete"),
    ("GET", r"/v1/stream/.+", "read"),
    ("POST", r"/v1/langgraph/threads/search", "list"),
    ("POST", r"/v1/langgraph/threads/[^/]+/(history|stream/events)", "read"),
    ("POST", r"/v1/langgraph/threads(/.*)?", "send"),
    ("PATCH", r"/v1/langgraph/threads/[^/]+", "send"),
    ("DELETE", r"/v1/langgraph/threads/[^/]+", "delete"),
    ("GET", r"/v1/langgraph/threads/.*", "read"),
    ("POST", r"/v1/ag-ui", "send"),
    ("POST", r"/v1/ag-ui/connect", "read"),
    ("GET", r"/v1/ag-ui/.*", "read"),
    ("POST", r"/v1/mcp", "send"),
    ("GET", r"/v1/mcp", "read"),
    ("GET", r"/v1/a2a/tasks", "list"),
    ("GET", r"/v1/a2a/.*", "read"),
    ("POST", r"/v1/a2a/tasks/.*:subscribe", "read"),
    ("POST", r"/v1/a2a(/.*)?", "send"),
)
"""Method, path and event of the logged requests; a WebSocket counts as a GET. Other requests are not logged."""
_TABLE = [(method, re.compile(path, re.DOTALL), event) for method, path, event in _EVENTS]
_SESSION = re.compile(r"/v1/sessions/([^/]+)")
_LATE = re.compile(
    r"/v1/(?:chat|ag-ui|mcp|a2a)(?:/.*)?|/v1/stream/.*|/v1/langgraph/threads(?!/search$)(?:/.*)?", re.DOTALL
)
"""Requests with the session in their body, such as chats or threads. They are logged when it is known."""
_NEXT_POLL = re.compile(rb"(?:^|&)n=0*[1-9]")
"""A poll that is not the first of its connection; only the first one is logged."""


class AuditTrail:
    """Logs the acts of one request; without a log it does nothing.

    Args:
        log: The audit log, or None.
        scope: The request.
        path: Path of the request below the mount point of the app.
    """

    def __init__(self, log: AuditLog | None = None, scope: Scope | None = None, path: str = "") -> None:
        self._log = log
        self._event = ""
        self._is_late = _LATE.fullmatch(path) is not None
        self._fields: dict[str, str] = {}
        if log is None or scope is None:
            return
        self._event = event_of(scope, path)
        client, found = scope.get("client"), _SESSION.match(path)
        self._fields = {
            "address": str(client[0]) if client else "",
            "session": found[1] if found else "",
            "method": str(scope.get("method", "GET")),
            "path": path,
        }

    def identify(self, principal: Principal, session: str) -> None:
        """Set the principal of the request, and the stored name of its session."""
        if self._log is not None:
            self._fields["principal"] = principal.name
            self._fields["credential"] = principal.via[:ID_LENGTH]
            self._fields["session"] = session

    def set_session(self, session: str) -> None:
        """Set the session from the body of a request, and log that the request will be served.

        Raises:
            UnavailableError: The log cannot be written: the request must not be served.
        """
        if self._log is not None:
            self._fields["session"] = session
            self._is_late = False
            self.note_admission()

    def note_admission(self, target: str = "") -> None:
        """Log that a request will be served. Answers and logins are logged later, with more data.

        Raises:
            UnavailableError: The log cannot be written: the request must not be served.
        """
        if self._log is not None and not self._is_late and self._event not in {"", "answer", "login"}:
            self._log.write(self._event, ADMITTED, **self._fields, target=target)

    def note_answer(self, answer: Answer) -> None:
        """Log that a question will be answered.

        Raises:
            UnavailableError: The log cannot be written; the answer must not be accepted.
        """
        if self._log is not None:
            fields = {**self._fields, "call": answer.ref.call_id, "choice": answer.choice.value}
            self._log.write("answer", ADMITTED, **fields)

    def note_command(self, command: Command | None) -> None:
        """Log that a command on a connection will be accepted. Answers are logged by `note_answer`.

        Raises:
            UnavailableError: The log cannot be written; the command must not be accepted.
        """
        if self._log is not None and not isinstance(command, Answer):
            self._log.write("send", ADMITTED, **self._fields)

    def note_refused_command(self, command: Command | None, code: str) -> None:
        """Log that a command on a connection was refused, or failed."""
        if self._log is not None:
            event = "answer" if isinstance(command, Answer) else "send"
            self._log.write_refusal(event, code, **self._fields)

    def note_login(self, principal: Principal) -> None:
        """Log that a browser will be logged in.

        Raises:
            UnavailableError: The log cannot be written; the login must be refused.
        """
        if self._log is not None:
            self._log.write("login", ADMITTED, **self._fields, target=principal.name)

    def note_failure(self, code: str) -> None:
        """Log that a request was refused, or failed after its admission."""
        if self._log is not None and self._event:
            self._log.write_refusal(self._event, code, **self._fields)


def event_of(scope: Scope, path: str) -> str:
    """Return the event of a request; "" if it is not logged."""
    method = scope.get("method", "GET")
    if path.endswith("/poll") and _NEXT_POLL.search(scope.get("query_string", b"")):
        return ""
    return next((event for way, form, event in _TABLE if way == method and form.fullmatch(path)), "")
