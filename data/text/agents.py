"""Turns of agents as Anthropic, LlamaFactory, ms-swift and OpenAI's older protocol write them, read as OpenAI's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from draftsmith.data.text.template import RowError

EMPTY: tuple[Any, ...] = (None, "", [], {})
# Roles of turns whose text is calls as JSON: LlamaFactory's and ms-swift's.
CALL_ROLES = ("function_call", "tool_call")
ANSWER_ROLES = ("assistant", "gpt")
# SWE-agent's system turns have a system_prompt.
CONTENT = ("content", "value", "text", "system_prompt")
# Names of a call's arguments: OpenAI's, LangChain's, Llama 3's, Anthropic's.
ARGUMENTS = ("arguments", "args", "parameters", "input")
TEXTS = ("text", "input_text", "output_text")  # types of parts that are text
# Parts of a turn, and the keys of each that are read.
PARTS = {
    **{kind: {"type", "text", "logprobs"} for kind in TEXTS},
    "thinking": {"type", "thinking"},
    "redacted_thinking": {"type", "data"},
    "tool_use": {"type", "id", "name", "input"},
    "tool_result": {"type", "tool_use_id", "content"},
}


def parse_json(value: Any) -> Any:
    """Return a list or an object that is written as JSON; anything else as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def openai_turns(turns: Sequence[Any]) -> tuple[list[Any], set[str]]:
    """Return turns as OpenAI writes them, and the names of fields of their parts and calls that say something and are
    not read.

    Results of tools become turns in front of the text beside them, and calls a part of the text in front of them.

    Raises:
        RowError: a turn of calls without calls, or a thought without text.
    """
    read: list[Any] = []
    ignored: set[str] = set()
    for turn in turns:
        if not isinstance(turn, Mapping):
            read.append(turn)
            continue
        role = next((turn[key] for key in ("role", "from") if turn.get(key) is not None), None)
        used = next((key for key in CONTENT if turn.get(key) is not None), "content")
        content: Any = turn.get(used)
        fields = {key: value for key, value in turn.items() if key not in ("role", "from", used)}
        if str(role).lower() in CALL_ROLES:
            fields["tool_calls"] = written_calls(content)
            before = read[-1] if read and isinstance(read[-1], dict) else {}
            role, content = "assistant", ""
            if str(before.get("role")).lower() in ANSWER_ROLES:
                calls = [*(before.get("tool_calls") or ()), *fields["tool_calls"]]
                role, content, fields = before["role"], before["content"], {**before, **fields, "tool_calls": calls}
                read.pop()
        elif call := fields.pop("function_call", None):
            fields["tool_calls"] = [call]
        if isinstance(content, list):
            ignored |= unread_keys(content)
            content, results, more = split_parts(content)
            for key, value in more.items():
                if fields.get(key) in EMPTY:
                    fields[key] = value
                elif value and functions(fields[key]) != functions(value):
                    ignored.add(key)
            read += results
            if results and not content:
                continue
        if isinstance(made := fields.get("tool_calls"), list):
            fields["tool_calls"] = calls = [openai_call(call) for call in made]
            ignored = ignored.union(*map(unread_call_keys, calls))
        read.append({**fields, "role": role, "content": content})
    return read, ignored


def split_parts(parts: Sequence[Any]) -> tuple[list[Any], list[dict[str, Any]], dict[str, Any]]:
    """Return what remains of a turn's parts, the tools' results in it, and its calls and reasoning as fields."""
    kept, results, calls, thoughts = list[Any](), list[dict[str, Any]](), list[Any](), list[str]()
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "thinking":
            thoughts.append(thought(part.get("thinking")))
        elif kind == "tool_use":
            calls.append({"id": part.get("id"), "name": part.get("name"), "arguments": part.get("input") or {}})
        elif kind == "tool_result":
            content = part.get("content")
            results.append({"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": content})
        elif kind != "redacted_thinking":
            kept.append(part)
    return kept, results, {"tool_calls": calls, "reasoning_content": "".join(thoughts)}


def unread_keys(parts: Sequence[Any]) -> set[str]:
    """Return the keys of parts that say something and are not read: is_error, signature, cache_control."""
    known = [part for part in parts if isinstance(part, Mapping) and str(part.get("type")) in PARTS]
    unread = {key for part in known for key in part.keys() - PARTS[part["type"]] if part[key] not in (*EMPTY, False)}
    unread |= {part["type"] for part in known} & {"redacted_thinking"}
    return unread.union(*(unread_keys(part["content"]) for part in known if isinstance(part.get("content"), list)))


def thought(value: Any) -> str:
    """Return the text of a thought, which Mistral writes as parts; raise RowError for anything else."""
    texts: list[Any] = (
        [part.get("text") for part in value if isinstance(part, Mapping)] if isinstance(value, list) else [value]
    )
    if not all(isinstance(text, str) for text in texts):
        raise RowError(f"a thought is {value!r:.60}, expected text")
    return "".join(texts)


def written_calls(text: Any) -> list[Any]:
    """Return the calls that a text holds as JSON, one or a list; raise RowError if it holds something else."""
    calls = parse_json(text)
    calls = [calls] if isinstance(calls, Mapping) else calls
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) and "name" in call for call in calls):
        raise RowError(f"a turn of calls is {text!r:.60}, expected JSON with name and arguments")
    return calls


def openai_call(call: Any) -> Any:
    """Return a call of a tool in OpenAI's wrapper, its arguments as an object: templates read objects, not JSON."""
    if not isinstance(call, Mapping):
        raise RowError(f"a call of a tool is {call!r:.60}, expected an object")
    function = call.get("function")
    if function is None and "name" in call:
        function = {key: call[key] for key in ("name", *ARGUMENTS) if key in call}
        call = {"type": "function", **{key: value for key, value in call.items() if key not in function}}
    if not isinstance(function, Mapping | None):
        raise RowError(f"a call of a tool has the function {function!r:.60}, expected an object")
    if function is None:
        return call
    parts = [
        {key: parse_json(value) if key in ARGUMENTS else value for key, value in part.items()}
        for part in (function, call)
    ]
    given = [part[key] for part in parts for key in ARGUMENTS if part.get(key) not in EMPTY]
    # Servers read no arguments as an object without any. Other ones stay where they are, and are counted.
    arguments = given[0] if given else {}
    read = (*EMPTY, arguments)
    function, call = (
        {key: value for key, value in part.items() if key not in ARGUMENTS or value not in read} for part in parts
    )
    return {**call, "function": {**function, "arguments": arguments}}


def functions(value: Any) -> Any:
    """Return what each of a list of calls calls, however it is written; anything else as it is."""
    return [openai_call(call).get("function") for call in value] if isinstance(value, list) else value


def unread_call_keys(call: Mapping[str, Any]) -> set[str]:
    """Return the keys of a call in OpenAI's wrapper that say something and are not read: namespace, index."""
    function = call.get("function") or {}
    return {key for key in call.keys() - {"id", "type", "function"} if call[key] not in EMPTY} | {
        key for key in function.keys() - {"name", "arguments"} if function[key] not in EMPTY
    }


def openai_tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tool in OpenAI's wrapper, where it is a bare function or one of Anthropic's."""
    function = {key: value for key, value in tool.items() if key != "type"}
    if "input_schema" in tool:
        function["parameters"] = function.pop("input_schema")
    elif "name" not in tool or tool.get("type") not in (None, "function"):
        return tool
    return {"type": "function", "function": function}
