"""Classification of a provider's refusal: tables from statuses, codes and texts to typed errors.

The class decides about retries: at once, later, never, or after a person has changed something (`retry` of each class).
The most exact evidence decides: the provider's own code, then the HTTP status, then its general type, then the text. An
unlisted error is retried only if the status shows a fault of the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from midstream.errors import (
    ContextOverflowError,
    ModelAccessError,
    ModelError,
    ModelFilteredError,
    ModelNotFoundError,
    ModelOverloadedError,
    ModelQuotaError,
    ModelRateLimitedError,
    ModelRejectedError,
    ModelStalledError,
    ModelUnavailableError,
)

REASON_CHARS_MAX = 300
"""Characters of a server's text in an error."""

_LATER = ModelUnavailableError
_FULL = ModelOverloadedError
_RATE = ModelRateLimitedError
_STALL = ModelStalledError
_NEVER = ModelRejectedError
_ASK = ModelAccessError
_QUOTA = ModelQuotaError
_NO_MODEL = ModelNotFoundError
_FILTER = ModelFilteredError
_LONG = ContextOverflowError

Table = Mapping[str, type[ModelError]]


def _table(rows: Mapping[type[ModelError], str]) -> Table:
    return MappingProxyType({word: kind for kind, words in rows.items() for word in words.split()})


STATUSES: Mapping[int, type[ModelError]] = MappingProxyType(
    {
        int(status): kind
        for status, kind in _table(
            {
                # 424: a failed model of Bedrock; 498: an expired token; 529: Anthropic is overloaded.
                _LATER: (
                    "408 409 421 423 424 425 449 499 500 502 504 506 507 508 509 520 521 522 523 524 525 526 527 530 "
                    "598 599"
                ),
                _FULL: "503 529",
                _RATE: "429",
                _ASK: "301 302 303 307 308 401 403 404 405 407 410 498 511",
                _QUOTA: "402",
                _NEVER: "400 406 411 412 414 415 416 417 418 422 426 428 431 501 505 510",
                _LONG: "413",
                _FILTER: "451",
            }
        ).items()
    }
)
"""Every HTTP status with which a provider or its proxy is known to answer, except 200."""

CODES: Table = _table(
    {
        _LATER: (
            # OpenAI and compatible servers
            "server_error vector_store_timeout failed_to_download_image conversation_locked "
            # Anthropic
            "api_error conflict_error memory_precondition_failed_error memory_path_conflict_error "
            "cmek_context_unavailable cmek_key_unreachable "
            # Google and Bedrock
            "INTERNAL ABORTED CANCELLED UNKNOWN DATA_LOSS InternalServerException ModelErrorException "
            "ModelStreamErrorException"
        ),
        _FULL: (
            "server_overloaded server_is_overloaded engine_overloaded model_overloaded slow_down overloaded_error "
            "UNAVAILABLE ServiceUnavailableException ModelNotReadyException"
        ),
        _RATE: (
            "rate_limit_exceeded rate_limit_error ramp_limit_exceeded RESOURCE_EXHAUSTED ThrottlingException "
            "ServiceQuotaExceededException"
        ),
        _STALL: "timeout_error DEADLINE_EXCEEDED ModelTimeoutException request_timeout",
        _NEVER: (
            "invalid_prompt invalid_image invalid_image_format invalid_base64_image invalid_image_url image_too_large "
            "image_too_small image_parse_error invalid_image_mode image_file_too_large unsupported_image_media_type "
            "empty_image_file image_file_not_found invalid_function_parameters invalid_type unknown_parameter "
            "unsupported_parameter unsupported_value missing_required_parameter invalid_value "
            "request_body_encoding_invalid request_body_encoding_unsupported INVALID_ARGUMENT OUT_OF_RANGE "
            "UNIMPLEMENTED ALREADY_EXISTS ValidationException"
        ),
        _FILTER: (
            "content_filter content_policy_violation image_content_policy_violation bio_policy "
            "misalignment_policy_violation ResponsibleAIPolicyViolation moderation_blocked SAFETY PROHIBITED_CONTENT"
        ),
        _ASK: (
            "account_deactivated invalid_api_key "
            "invalid_organization incorrect_api_key mismatched_organization unsupported_country_region_territory "
            "data_residency_mismatch "
            "authentication_error permission_error not_found_error "
            "linked_organization_billing_unavailable organization_on_hold organization_type_not_supported "
            "parent_organization_required cmek_key_disabled cmek_key_network_blocked sandbox_egress_restricted "
            "claude_code_key_creator_not_member claude_code_version_too_old UNAUTHENTICATED PERMISSION_DENIED "
            "NOT_FOUND FAILED_PRECONDITION AccessDeniedException ResourceNotFoundException "
            "UnrecognizedClientException ExpiredTokenException"
        ),
        _QUOTA: (
            "insufficient_quota billing_hard_limit_reached billing_not_active billing_error insufficient_credits "
            "contract_spend_limit_reached enforced_spend_limit_reached linked_organization_spend_limit_reached"
        ),
        _NO_MODEL: "model_not_found deployment_not_found DeploymentNotFound",
        _LONG: (
            "context_length_exceeded exceed_context_size_error request_too_large "
            "request_body_too_large_after_decoding string_above_max_length"
        ),
    }
)
"""Codes, types and states that are exact: they outrank the status."""

TYPES: Table = _table({_NEVER: "invalid_request_error"})
"""General types, which are used only without a status, during a stream."""

OVERFLOW_WORDS = (
    "context length",
    "context size",
    "context window",
    "context limit",
    "maximum context",
    "prompt is too long",
    "input is too long",
    "model token limit",
    "exceeds the maximum number of tokens",
    "reduce the length of the messages",
)
"""Messages for a conversation that is too long, of providers without a code."""

_HINTS: Mapping[type[ModelError], str] = MappingProxyType(
    {
        _LONG: " (the conversation is longer than the model can read)",
        **dict.fromkeys(
            (_ASK, _QUOTA, _NO_MODEL),
            " (check the API key, the account and the name of the model; then resume the turn)",
        ),
        _FILTER: " (its content filter; another text may pass)",
    }
)
_CLIENT_ERROR, _SERVER_ERROR = 400, 500


def error_of(error: object, *, status: int | None = None, retry_after_s: float | None = None) -> ModelError:
    """Return the typed error for a server's `error` value.

    Args:
        error: The value of `error` in the body or in a chunk, of any type.
        status: The HTTP status; without one, a numeric `code` in the error is used.
        retry_after_s: The server's requested wait, in seconds.
    """
    fields = error if isinstance(error, dict) else {"message": error}
    names = _names_of(fields)
    words = str(fields.get("message") or "")[:REASON_CHARS_MAX]
    if status is None:
        status = next((int(name) for name in names if name.isdecimal() and len(name) == 3), None)  # noqa: PLR2004 - an HTTP status
    what = f"HTTP {status}" if status is not None else "an error"
    kind = _kind_of(names, words, status)
    reason = words or ", ".join(sorted(set(names))) or "without a reason"
    return kind(f"the server answered {what}: {reason}{_HINTS.get(kind, '')}", retry_after_s=retry_after_s)


def _names_of(fields: Mapping[str, object]) -> list[str]:
    """Return the names in an error, the most exact one first."""
    details = fields.get("details")
    inner = fields.get("innererror")
    found = [
        details.get("error_code") if isinstance(details, dict) else None,
        inner.get("code") if isinstance(inner, dict) else None,
        *(fields.get(key) for key in ("code", "type", "status")),
    ]
    return [str(name)[:REASON_CHARS_MAX] for name in found if isinstance(name, str | int)]


def _kind_of(names: list[str], words: str, status: int | None) -> type[ModelError]:
    exact = [CODES[name] for name in names if name in CODES]
    if _LONG in exact or any(sign in words.lower() for sign in OVERFLOW_WORDS):
        return _LONG
    if exact:
        is_model = exact[0] is _ASK and "not_found_error" in names and words.startswith("model")
        return (
            _NO_MODEL if is_model else exact[0]
        )  # Anthropic has one name for everything that does not exist
    if status is not None:
        return STATUSES.get(status) or (_NEVER if _CLIENT_ERROR <= status < _SERVER_ERROR else _LATER)
    return next((TYPES[name] for name in names if name in TYPES), _LATER)
