"""Models: the protocol for your own, and adapters for providers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from midstream.lazy_names import lazy_names

if TYPE_CHECKING:
    from midstream.history.messages import Finish as Finish
    from midstream.history.messages import Usage as Usage
    from midstream.models.anthropic_messages import AnthropicMessages as AnthropicMessages
    from midstream.models.http_limits import HttpLimits as HttpLimits
    from midstream.models.model import GrantingModel as GrantingModel
    from midstream.models.model import Model as Model
    from midstream.models.model import PassingModel as PassingModel
    from midstream.models.model import ResumableModel as ResumableModel
    from midstream.models.model import StoredModel as StoredModel
    from midstream.models.openai_compatible import OpenAICompatible as OpenAICompatible
    from midstream.models.openai_responses import OpenAIResponses as OpenAIResponses
    from midstream.models.prompt_prefix import anchor as anchor
    from midstream.models.prompt_prefix import anchor_chat as anchor_chat
    from midstream.models.pydantic_ai import PydanticAIModel as PydanticAIModel
    from midstream.models.responses import Finished as Finished
    from midstream.models.responses import KeepAlive as KeepAlive
    from midstream.models.responses import ModelEvent as ModelEvent
    from midstream.models.responses import ModelRequest as ModelRequest
    from midstream.models.responses import PassedAnswer as PassedAnswer
    from midstream.models.responses import Resumable as Resumable
    from midstream.models.responses import TextDelta as TextDelta
    from midstream.models.responses import ThinkingDelta as ThinkingDelta
    from midstream.models.responses import ToolCallRequested as ToolCallRequested
    from midstream.models.responses import UpstreamCallEnded as UpstreamCallEnded
    from midstream.models.responses import UpstreamCallStarted as UpstreamCallStarted
    from midstream.models.responses import Working as Working
    from midstream.models.routed_models import Route as Route
    from midstream.models.routed_models import RoutedModels as RoutedModels

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "history.messages": "Finish Usage",
        "models.anthropic_messages": "AnthropicMessages",
        "models.http_limits": "HttpLimits",
        "models.model": "GrantingModel Model PassingModel ResumableModel StoredModel",
        "models.openai_compatible": "OpenAICompatible",
        "models.openai_responses": "OpenAIResponses",
        "models.prompt_prefix": "anchor anchor_chat",
        "models.pydantic_ai": "PydanticAIModel",
        "models.routed_models": "Route RoutedModels",
        "models.responses": (
            "Finished KeepAlive ModelEvent ModelRequest PassedAnswer Resumable TextDelta ThinkingDelta "
            "ToolCallRequested UpstreamCallEnded UpstreamCallStarted Working"
        ),
    },
)
