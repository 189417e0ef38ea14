"""Rows of request logs, as gateways, servers and batch files write them: the bodies of a request and its response.

A request is one of /v1/chat/completions, /v1/responses or /v1/messages. Bodies may be JSON text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from draftsmith.data.text.agents import EMPTY, parse_json, thought
from draftsmith.data.text.template import RowError

# Where rows have them: any gateway's and OpenAI's batches, Helicone's, LiteLLM's, OpenInference's (Envoy), Langfuse's.
REQUESTS = (
    "request.body",
    "request",
    "body",
    "request_body",
    "proxy_server_request",
    "attributes.input.value",
    "input",
)
RESPONSES = ("response.body", "response", "response_body", "attributes.output.value", "output")
NO_ANSWER = "no_answer"  # why a row is dropped whose request failed, or was answered by nothing
STATUS, ERRORS = ("status", "status_code", "response_status", "level"), ("error", "error_str")
FAILED = re.compile(r"[45]\d\d|failure|failed|error|cancelled|queued|in_progress", re.IGNORECASE)
# Ends of answers that the model did not choose.
CUT = {"length", "max_tokens", "content_filter", "stop_sequence", "abort", "incomplete"}
# Fields of a request that are read; those that change neither its prompt nor the distribution of its answer; and values
# that change nothing.
READ = {"messages", "input", "instructions", "system", "tools", "functions", "chat_template_kwargs"}
NEUTRAL = {"temperature", "top_p", "top_k", "model", "stream", "stream_options", "user", "metadata", "store", "n"}
NEUTRAL |= {"max_tokens", "max_completion_tokens", "max_output_tokens", "parallel_tool_calls", "logprobs", "seed"}
SAID = {*READ, "choices", "output", "content"}  # fields of requests and responses that hold chats
SILENT = (*EMPTY, False, "auto", "disabled", {"type": "text"}, {"format": {"type": "text"}})
# What a request may refer to; its prompt is not in the row then.
ELSEWHERE = ("previous_response_id", "conversation", "prompt")
ANSWER = ("content", "tool_calls", "function_call", "reasoning_content", "reasoning")
ITEM_KEYS = {"type", "id", "status", "role", "content", "call_id", "name", "arguments", "output"}
SECRET_NAME = re.compile(
    r"(.*[-_])?(authorization|cookie|password|secret|(api|subscription)[-_]?key(_hash)?|"
    r"(access|auth|refresh|session|security)[-_]?token)|token",
    re.IGNORECASE,
)
SECRET_TEXT = re.compile(r"\b(sk|pk|rk|ghp|hf|xoxb)[-_][\w-]{16,}|\b(Bearer|Basic) [\w.=+/-]{8,}|\beyJ[\w-]+\.eyJ")


def is_secret(name: str, value: Any = "") -> bool:
    """Return whether a part of a dotted name, or a value, looks like a key or a password."""
    return any(map(SECRET_NAME.fullmatch, name.split("."))) or bool(SECRET_TEXT.search(str(value)))


def num_secrets(value: Any, name: str = "") -> int:
    """Count the values that look like secrets outside of chats."""
    value = parse_json(value)
    if isinstance(value, Mapping):
        return sum(num_secrets(inner, key) for key, inner in value.items() if key not in SAID)
    if isinstance(value, list):
        return sum(num_secrets(inner, name) for inner in value)
    return int(value not in EMPTY and is_secret(name, value))


def look_up(value: Any, name: str) -> Any:
    """Return what an object, or its JSON, has under a name, whose dots may lead into objects; None if nothing."""
    value = as_object(value)
    if value.get(name) is not None:
        return value[name]
    places = (at for at, letter in enumerate(name) if letter == ".")
    return next((own for at in places if (own := look_up(value.get(name[:at]), name[at + 1 :])) is not None), None)


def bodies(row: Mapping[str, Any]) -> tuple[dict[str, Any], Any] | None:
    """Return the request and the response (or None) of a row of a log; None for any other row."""
    asked, given = ([parse_json(look_up(row, name)) for name in names] for names in (REQUESTS, RESPONSES))
    response = next((body for body in given if body not in EMPTY), None)
    for body in asked if "instruction" not in row else ():
        if isinstance(body, Mapping) and not {"messages", "input", *ELSEWHERE}.isdisjoint(body):
            return dict(body), response
        if body and isinstance(body, list) and all(look_up(turn, "role") for turn in body):
            return {"messages": body}, response
    # LiteLLM's own.
    if "messages" in row and ("call_type" in row or look_up(response, "choices")):
        return {**as_object(row.get("model_parameters")), "messages": row["messages"]}, response
    return None


def read_log(row: Mapping[str, Any]) -> tuple[dict[str, Any], bool, set[str]] | None:
    """Read a row of a log as one of messages, the last of which is the answer if there is one; None for another row.

    Return also whether the answer was cut before its model ended it, and the names of fields that are not read.

    Raises:
        RowError: a request that failed, or whose chat is not in the row; or a response that is no message.
    """
    if (found := bodies(row)) is None:
        return None
    request, response = found
    for part in (row, row.get("response"), response):
        status = [str(look_up(part, name)) for name in STATUS]
        if any(map(FAILED.fullmatch, status)) or any(look_up(part, name) not in EMPTY for name in ERRORS):
            raise RowError("a request that failed", reason=NO_ANSWER)
    if name := next((name for name in ELSEWHERE if request.get(name) not in EMPTY), None):
        remedy = "Log what is sent to /v1/chat/completions, or whole inputs of /v1/responses."
        raise RowError(f"a request whose chat is in its {name}, not in the row", remedy)

    # The request.
    asked = request.get("messages", request.get("input"))
    listed, system = parse_json(asked), request.get("instructions") or request.get("system")
    turns, ignored = turns_of(listed if isinstance(listed, list) else [{"role": "user", "content": asked}])
    if turns and look_up(turns[-1], "role") == "assistant":
        raise RowError("a request that ends with an answer, which its response continues")
    turns = [{"role": "system", "content": system}, *turns] if system else turns
    tools = parse_json(request.get("tools") or request.get("functions") or [])
    functions = [
        tool for tool in (tools if isinstance(tools, list) else []) if look_up(tool, "type") in (None, "function")
    ]
    ignored |= {key for key in request.keys() - READ - NEUTRAL if request[key] not in SILENT}
    ignored |= {"tools"} if functions != tools else set()

    # The response: a chat completion, items, or a message.
    body = response if isinstance(response, Mapping) else {"content": response}
    unread_text = isinstance(response, str) and re.match(r"\s*(data:|event:|\{|\[)", response)
    if unread_text or {"choices", "output", *ANSWER}.isdisjoint(body):
        raise RowError("a response of another kind, or not whole", "Log whole bodies, and join the events of streams.")
    choices, output = (
        [*map(as_object, body[key])] if isinstance(body.get(key), list) else [] for key in ("choices", "output")
    )
    choice = choices[0] if choices else {}
    message = as_object(choice.get("message")) or {key: body[key] for key in ANSWER if key in body}
    answer, unread = turns_of(output or [{**message, "role": "assistant"}])
    if response in EMPTY:
        answer = []
    elif all(turn.get(key) in EMPTY for turn in answer for key in ANSWER):
        raise RowError("a response that says nothing", reason=NO_ANSWER)
    elif len(answer) > 1:
        raise RowError(f"a response of {len(answer)} messages, expected one")
    ends = {str(end) for end in (choice.get("finish_reason"), body.get("stop_reason"), body.get("status"))}
    # vLLM's and SGLang's name of a string that stopped the answer; a token is a number.
    cut = bool(ends & CUT) or isinstance(choice.get("stop_reason", choice.get("matched_stop")), str)
    ignored |= unread | ({"choices"} if len(choices) > 1 else set())
    chat = {"messages": turns + answer, "tools": functions, "chat_template_kwargs": request.get("chat_template_kwargs")}
    return chat, cut, ignored


def as_object(value: Any) -> Mapping[str, Any]:
    """Return an object, or its JSON, as it is; anything else as an empty one."""
    value = parse_json(value)
    return value if isinstance(value, Mapping) else {}


def turns_of(items: Iterable[Any]) -> tuple[list[dict[str, Any]], set[str]]:
    """Return chat messages, or items of /v1/responses, as messages, and the names of items' fields that are not read.

    The thought, the text and the calls of an answer become one message.

    Raises:
        RowError: an item that is no text, thought or call.
    """
    turns, ignored = list[dict[str, Any]](), set[str]()
    for item in items:
        kind = item.get("type") if isinstance(item, Mapping) else None
        if kind is None:
            turns.append(item)
            continue
        call = {"id": item.get("call_id"), "name": item.get("name"), "arguments": item.get("arguments")}
        turn = {
            "message": {"role": item.get("role"), "content": item.get("content")},
            "reasoning": {"role": "assistant", "reasoning_content": thought(item.get("content") or [])},
            "function_call": {"role": "assistant", "tool_calls": [call]},
            "function_call_output": {"role": "tool", "tool_call_id": call["id"], "content": item.get("output")},
        }.get(str(kind))
        if turn is None:
            raise RowError(f"an item of type {kind}, expected messages, thoughts, and calls of functions")
        ignored |= {key for key in item.keys() - ITEM_KEYS if item[key] not in EMPTY}
        last = turns[-1] if turns else {}
        if turn["role"] == look_up(last, "role") == "assistant" and turn.keys() & last.keys() <= {"role", "tool_calls"}:
            turns[-1] = {**last, **turn, "tool_calls": [*last.get("tool_calls", ()), *turn.get("tool_calls", ())]}
        else:
            turns.append(turn)
    return turns, ignored
