"""The ASGI apps: the server and the gateway, authentication, rights and limits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from midstream.lazy_names import lazy_names

if TYPE_CHECKING:
    from midstream.dialects.a2a_messages import A2aOptions as A2aOptions
    from midstream.dialects.a2a_messages import A2aSkill as A2aSkill
    from midstream.dialects.mcp_messages import McpOptions as McpOptions
    from midstream.dialects.mcp_messages import McpTool as McpTool
    from midstream.protocol.stream_settings import StreamSettings as StreamSettings
    from midstream.server.app import App as App
    from midstream.server.app import asgi as asgi
    from midstream.server.audit_log import AuditLog as AuditLog
    from midstream.server.auth.access import Access as Access
    from midstream.server.auth.access import bearer as bearer
    from midstream.server.auth.access import cookie as cookie
    from midstream.server.auth.access import first_of as first_of
    from midstream.server.auth.access import proxy_user as proxy_user
    from midstream.server.auth.access import this_user as this_user
    from midstream.server.auth.access import token_file as token_file
    from midstream.server.auth.access import tokens as tokens
    from midstream.server.auth.origins import HostGuard as HostGuard
    from midstream.server.auth.principals import Action as Action
    from midstream.server.auth.principals import Principal as Principal
    from midstream.server.auth.principals import Scope as Scope
    from midstream.server.gateway_app import Gateway as Gateway
    from midstream.server.gateway_app import gateway as gateway
    from midstream.server.key_service import key_app as key_app
    from midstream.server.limits import Limits as Limits

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "dialects.mcp_messages": "McpOptions McpTool",
        "dialects.a2a_messages": "A2aOptions A2aSkill",
        "protocol.stream_settings": "StreamSettings",
        "server.app": "App asgi",
        "server.audit_log": "AuditLog",
        "server.auth.access": ("Access bearer cookie first_of proxy_user this_user token_file tokens"),
        "server.auth.origins": "HostGuard",
        "server.auth.principals": "Action Principal Scope",
        "server.gateway_app": "Gateway gateway",
        "server.key_service": "key_app",
        "server.limits": "Limits",
    },
)
