"""The rule of each finding, and providers' texts of their refusals."""

from __future__ import annotations

from msgspec import Struct


class HistoryRule(Struct, frozen=True):
    """One rule that histories break: what it asks for, and the error texts people search for."""

    rule: str
    errors: tuple[str, ...] = ()


REFUSALS: dict[str, HistoryRule] = {
    "dangling-call": HistoryRule(
        "Every tool call has a result, directly after it.",
        (
            "`tool_use` ids were found without `tool_result` blocks immediately after",
            (
                "An assistant message with 'tool_calls' must be followed by tool messages responding to each"
                " 'tool_call_id'"
            ),
            "insufficient tool messages following tool_calls message",
            "No tool output found for function call",
            "Expected toolResult blocks at messages.N.content for the following Ids",
            "Not the same number of function calls and responses",
            (
                "the number of function response parts is equal to the number of function call parts of the function"
                " call turn"
            ),
            "Found AIMessages with tool_calls that do not have a corresponding ToolMessage",
        ),
    ),
    "orphan-result": HistoryRule(
        "Every result belongs to a tool call in the message before it.",
        (
            "unexpected `tool_use_id` found in `tool_result` blocks",
            "messages with role 'tool' must be a response to a preceeding message with 'tool_calls'",
            "No tool call found for function call output with call_id",
            "The number of toolResult blocks exceeds the number of toolUse blocks of previous turn",
            "tool result's tool id not found (2013)",
            "tool_call_id is not found",
        ),
    ),
    "misplaced-result": HistoryRule(
        "A result stands directly after its call, with nothing in between.",
        (
            "`tool_use` ids were found without `tool_result` blocks immediately after",
            "tool call result does not follow tool call (2013)",
        ),
    ),
    "result-not-first": HistoryRule(
        "In a user message the results come before everything else.",
        ("Did not find 1 `tool_result` block(s) at the beginning of this message",),
    ),
    "repeated-result": HistoryRule(
        "A call has one result.",
        (
            "each tool_use must have a single result. Found multiple `tool_result` blocks with id",
            "Duplicate function_call_output for call_id",
        ),
    ),
    "late-result": HistoryRule("A call has one result."),
    "foreign-result-id": HistoryRule(
        "A result has the id of its call.", ("unexpected `tool_use_id` found in `tool_result` blocks",)
    ),
    "foreign-result-name": HistoryRule("A function response has the name of its call."),
    "repeated-call": HistoryRule("A call is written once.", ("`tool_use` ids must be unique",)),
    "repeated-step": HistoryRule(
        "A call that was retried is written once, with its result.",
        ("`tool_use` ids must be unique", "Duplicate value for 'tool_call_id'"),
    ),
    "repeated-id": HistoryRule(
        "Call ids are unique.", ("`tool_use` ids must be unique", "Duplicate value for 'tool_call_id'")
    ),
    "bad-id": HistoryRule(
        "A call id has the provider's characters and length.",
        (
            "tool_use.id: String should match pattern '^[a-zA-Z0-9_-]+$'",
            "string too long. Expected a string with maximum length 40",
            "Tool call id was ... but must be a-z, A-Z, 0-9, with a length of 9",
        ),
    ),
    "broken-arguments": HistoryRule(
        "The arguments of a call are a JSON object.",
        ("tool_use.input: Input should be a valid dictionary", "invalid function arguments json string"),
    ),
    "call-without-name": HistoryRule(
        "A call names its tool.", ("GenerateContentRequest: function name is empty",)
    ),
    "blank-text": HistoryRule(
        "Texts are not blank.",
        (
            "text content blocks must be non-empty",
            "text content blocks must contain non-whitespace text",
            "The text field in the ContentBlock object is blank",
        ),
    ),
    "empty-part": HistoryRule(
        "Parts are not empty.", ("required oneof field 'data' must have one initialized field",)
    ),
    "empty-message": HistoryRule(
        "Messages are not empty.",
        (
            "all messages must have non-empty content except for the optional final assistant message",
            "contents.parts must not be empty",
            "Invalid assistant message: content or tool_calls must be set",
            "Assistant message must have either content or tool_calls, but not none",
        ),
    ),
    "empty-result": HistoryRule("An error has a message; output is not blank."),
    "null-content": HistoryRule(
        "Content is never null.",
        (
            "Invalid value for 'content': expected a string, got null",
            "Missing required parameter: 'input[N].output'",
        ),
    ),
    "bad-result": HistoryRule("A result's content has the provider's shape."),
    "empty-calls": HistoryRule(
        "A list of calls is not empty.", ("Invalid 'messages[1].tool_calls': empty array",)
    ),
    "content-shape": HistoryRule("Content is a list of blocks."),
    "empty-content": HistoryRule("Content is null or a list with something in it."),
    "unlisted-call": HistoryRule("A call in the content stands in `tool_calls` too."),
    "user-in-response": HistoryRule("A response holds no parts of a request."),
    "bad-name": HistoryRule("A tool's name is made of letters, digits, `_` and `-`, at most 64 of them."),
    "hosted-result-first": HistoryRule("A result of a tool that the provider runs follows its call."),
    "unknown-role": HistoryRule("A message has one of the provider's roles."),
    "not-a-message": HistoryRule("Every message is an object."),
    "response-in-user-turn": HistoryRule("Calls and thinking stand in the assistant's messages."),
    "unsigned-thinking": HistoryRule(
        "Thinking has its signature.",
        ("Invalid `signature` in `thinking` block", "signature: Field required"),
    ),
    "foreign-thinking": HistoryRule(
        "Thinking has the signature of this provider's model.", ("Invalid `signature` in `thinking` block",)
    ),
    "repeated-thinking": HistoryRule(
        "The same thinking occurs only once in a history.",
        ("`thinking` or `redacted_thinking` blocks in the latest assistant message cannot be modified",),
    ),
    "spliced-thinking": HistoryRule(
        "One message holds the thinking of one response.",
        ("`thinking` or `redacted_thinking` blocks in the latest assistant message cannot be modified",),
    ),
    "thinking-last": HistoryRule(
        "Thinking is followed by text or a call.",
        ("The final block in an assistant message cannot be `thinking`",),
    ),
    "split-response": HistoryRule("One response is one message."),
    "hosted-call-without-result": HistoryRule(
        "A call of a tool that the provider runs has its result in the same message.",
        (
            "`web_search` tool use with id ... was found without a corresponding `web_search_tool_result` block",
        ),
    ),
    "hosted-result-without-call": HistoryRule(
        "A result of a tool that the provider runs has its call before it.",
        ("must have a corresponding `server_tool_use` block before it",),
    ),
    "system-in-list": HistoryRule(
        "System prompts stand where the provider accepts them.",
        (
            "use the top-level 'system' parameter for the initial system prompt",
            "role 'system' must precede an 'assistant' message or end the array",
            "System message must be at the beginning.",
        ),
    ),
    "repeated-system": HistoryRule("A system prompt occurs once."),
    "starts-with-response": HistoryRule(
        "The first message is the user's.",
        (
            "first message must use the user role",
            "No user query found in messages.",
            "function call turn comes immediately after a user turn or after a function response turn",
        ),
    ),
    "same-role-twice": HistoryRule(
        "Messages of user and assistant alternate.",
        (
            "conversation roles must alternate user/assistant/user/assistant/...",
            'roles must alternate between "user" and "assistant"',
            "function call turn comes immediately after a user turn or after a function response turn",
        ),
    ),
    "user-after-result": HistoryRule(
        "A response stands between a result and the next user message.",
        ("Unexpected role 'user' after role 'tool'",),
    ),
    "white-prefill": HistoryRule(
        "A response that the model is to continue does not end in white space.",
        ("final assistant content cannot end with trailing whitespace",),
    ),
    "misplaced-file": HistoryRule(
        "Attachments are at a place that the provider accepts.",
        (
            "all content must be type 'text' if 'is_error' is true",
            "Image URLs are only allowed for messages with role 'user'",
        ),
    ),
    "foreign-message": HistoryRule("All messages have the shape of one provider."),
    "mixed-turn": HistoryRule("Results and text stand in separate messages."),
    "repeated-item": HistoryRule("An item id occurs once.", ("Duplicate item found with id",)),
    "bad-item-id": HistoryRule("An item id has its kind's prefix and at most 64 characters."),
    "reasoning-without-follower": HistoryRule(
        "Reasoning is followed by the message or call that it led to.",
        ("Item 'rs_...' of type 'reasoning' was provided without its required following item",),
    ),
    "nameless-follower": HistoryRule(
        "A message that follows a reasoning item has an id of its own.",
        ("Item 'rs_...' of type 'reasoning' was provided without its required following item",),
    ),
    "item-without-reasoning": HistoryRule(
        "An item of a reasoning model comes with its reasoning.",
        ("'function_call' was provided without its required 'reasoning' item",),
    ),
    "call-without-signature": HistoryRule(
        "The first call of each step has its thought signature.",
        ("Function call is missing a thought_signature",),
    ),
    "missing-reasoning": HistoryRule(
        "A response has its reasoning.",
        ("The `reasoning_content` in the thinking mode must be passed back to the API",),
    ),
    "lone-surrogate": HistoryRule(
        "Text is valid Unicode.", ("The request body is not valid JSON: no low surrogate in string",)
    ),
    "rolled-back": HistoryRule("Requested: the history ends with its last complete step."),
    "sanitized": HistoryRule("Requested: the rest of an aborted run is made ready for the next run."),
    "dropped": HistoryRule("Requested: incomplete parts are left out."),
}
