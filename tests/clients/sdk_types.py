"""Every document, event and error of the server against the types of the official SDKs, strictly.

usage: sdk_types.py     needs the packages openai and anthropic; BASE, MODEL, KEY
"""
import json
import os
import urllib.error
import urllib.request

from anthropic.types import ErrorResponse, Message, MessageTokensCount, RawMessageStreamEvent
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent
from openai.types.responses.input_token_count_response import InputTokenCountResponse
from openai.types.shared import ErrorObject
from pydantic import TypeAdapter

BASE, MODEL = os.environ["BASE"], os.environ["MODEL"]
SCRIPTED = os.environ.get("SCRIPTED", "1") == "1"
# A small model says what it likes: answers are kept short there.
SHORT = 4096 if SCRIPTED else 24
counts = {"documents": 0, "events": 0, "errors": 0}


def send(path, body=None, method=None):
    headers = {"content-type": "application/json"}
    if os.environ.get("KEY"):
        headers["authorization"] = "Bearer " + os.environ["KEY"]
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(BASE + path, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def fits(kind, text, where):
    try:
        TypeAdapter(kind).validate_json(text, strict=True)
    except Exception as error:
        raise AssertionError(f"{where}: {error}\n{text[:2000]}") from error


def document(kind, path, body=None, change=lambda v: None):
    status, text = send(path, body)
    assert status == 200, (path, status, text)
    value = json.loads(text)
    change(value)
    fits(kind, json.dumps(value), path)
    counts["documents"] += 1
    return value


def stream(kind, path, body, change=lambda v: None):
    status, text = send(path, {**body, "stream": True})
    assert status == 200, (path, status, text)
    for line in text.split("\n"):
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        value = json.loads(line[6:])
        # The form of pings is the wire's alone: the SDK drops them before its types.
        if value.get("type") == "ping":
            continue
        change(value)
        fits(kind, json.dumps(value), f"{path} stream")
        counts["events"] += 1


def refused(kind, path, body, inner):
    status, text = send(path, body)
    assert 400 <= status < 500, (path, status, text)
    value = json.loads(text)
    fits(kind, json.dumps(value["error"] if inner else value), path)
    counts["errors"] += 1


def broken(kind, path, body, inner=None):
    """A stream that fails in the middle: its last event."""
    status, text = send(path, {**body, "stream": True})
    assert status == 200, (path, status, text)
    last = json.loads([line[6:] for line in text.split("\n") if line.startswith("data: ")][-1])
    fits(kind, json.dumps(last[inner] if inner else last), f"{path} failure")
    counts["errors"] += 1


SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
FUNCTION = {"name": "run_shell_command", "description": "Runs a command.", "parameters": SCHEMA}
ASK = "Say that the probe is done."
TASK = "PROBE-TOOL: run the command echo probe-ok, then say that the probe is done."


def chat():
    def turn(text, **fields):
        return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": SHORT, **fields}

    tools = [{"type": "function", "function": FUNCTION}]
    usage = {"stream_options": {"include_usage": True}}
    bodies = [
        turn(ASK),
        turn(ASK, n=2, logprobs=True, top_logprobs=1),
        turn(ASK, enable_thinking=False, stop=["zzz"], seed=3, max_tokens=5),
        turn(TASK, tools=tools),
        turn(TASK, tools=tools, parallel_tool_calls=False, **({} if SCRIPTED else {"max_tokens": 200})),
    ]
    for body in bodies:
        document(ChatCompletion, "/v1/chat/completions", body)
        stream(ChatCompletionChunk, "/v1/chat/completions", {**body, **usage})
    stream(ChatCompletionChunk, "/v1/chat/completions", turn(ASK, return_progress=True, timings_per_token=True))
    for bad in [turn(ASK, temperature=9), {"model": MODEL}, turn(ASK, model="other"), turn(ASK, tools=[{"type": 1}])]:
        refused(ErrorObject, "/v1/chat/completions", bad, True)
    document(Model, f"/v1/models/{MODEL}")


def completions():
    # The type says that the reason is never null; the services send null until the last chunk, and so do we.
    def closed(value):
        for choice in value["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"

    # Nor does it know that the first token of an echoed prompt has no score.
    def scored(value):
        for choice in value["choices"]:
            choice["logprobs"]["token_logprobs"][0] = choice["logprobs"]["token_logprobs"][0] or 0.0
            choice["logprobs"]["top_logprobs"][0] = choice["logprobs"]["top_logprobs"][0] or {}

    body = {"model": MODEL, "prompt": "one two", "max_tokens": 8}
    document(Completion, "/v1/completions", body)
    echo = {**body, "echo": True, "logprobs": 1, "n": 2, "prompt": ["a b", "c"]}
    document(Completion, "/v1/completions", echo, scored)
    stream(Completion, "/v1/completions", body, closed)
    stream(Completion, "/v1/completions", {**body, "logprobs": 2, "n": 2}, closed)
    refused(ErrorObject, "/v1/completions", {"model": MODEL, "prompt": 7}, True)


def responses():
    def turn(asked, **fields):
        return {"model": MODEL, "input": asked, "max_output_tokens": SHORT, **fields}

    flat = {"type": "function", "strict": True, **FUNCTION, "parameters": {**SCHEMA, "additionalProperties": False}}
    group = {"type": "namespace", "name": "crew", "description": "A crew.", "tools": [flat]}
    custom = {"type": "custom", "name": "shell", "format": {"type": "grammar", "syntax": "regex", "definition": "[a-z -]+"}}
    # A scripted engine writes a call of a free-form tool no better than of any other.
    bodies = [
        turn(ASK),
        turn(ASK, instructions="Be brief.", metadata={"a": "b"}, include=["reasoning.encrypted_content"]),
        turn(ASK, top_logprobs=1, include=["message.output_text.logprobs"], temperature=0.5, top_p=0.9),
        turn(TASK, tools=[flat]),
        turn(ASK, tools=[group, custom, {"type": "web_search"}], parallel_tool_calls=False),
        turn(ASK, text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}, max_output_tokens=8),
        turn(ASK, text={"format": {"type": "text"}}, reasoning={"effort": "low", "summary": "auto"}, store=False),
    ]
    for body in bodies:
        made = document(Response, "/v1/responses", body)
        stream(ResponseStreamEvent, "/v1/responses", body)
        if made["store"]:
            document(Response, f"/v1/responses/{made['id']}")
            document(ResponseItemList, f"/v1/responses/{made['id']}/input_items")
    document(InputTokenCountResponse, "/v1/responses/input_tokens", {"model": MODEL, "input": ASK})
    refused(ErrorObject, "/v1/responses", turn(ASK, colour=1), True)
    refused(ErrorObject, "/v1/responses", turn(ASK, previous_response_id="resp_none"), True)


def messages():
    def turn(text, **fields):
        return {"model": MODEL, "max_tokens": SHORT, "messages": [{"role": "user", "content": text}], **fields}

    tools = [{"name": "Bash", "description": "Runs a command.", "input_schema": SCHEMA}]
    thinking = {"type": "enabled", "budget_tokens": 1024} if SCRIPTED else {"type": "disabled"}
    bodies = [
        turn(ASK),
        turn(ASK, thinking=thinking, system="Be brief.", stop_sequences=["zzz"], metadata={"user_id": "u"}),
        turn(ASK, thinking={"type": "adaptive", "display": "omitted"}),
        turn(TASK, tools=tools, thinking=thinking),
        turn(ASK, max_tokens=3),
    ]
    for body in bodies:
        document(Message, "/v1/messages", body)
        stream(RawMessageStreamEvent, "/v1/messages", body)
    count = turn(ASK, tools=tools)
    count.pop("max_tokens")
    document(MessageTokensCount, "/v1/messages/count_tokens", count)
    refused(ErrorResponse, "/v1/messages", turn(ASK, max_tokens=0), False)
    refused(ErrorResponse, "/v1/messages", {"model": MODEL}, False)


def failures():
    said = [{"role": "user", "content": "PROBE-FAIL"}]
    broken(ErrorObject, "/v1/chat/completions", {"model": MODEL, "messages": said}, "error")
    broken(ErrorObject, "/v1/completions", {"model": MODEL, "prompt": "PROBE-FAIL"}, "error")
    broken(ResponseStreamEvent, "/v1/responses", {"model": MODEL, "input": "PROBE-FAIL"})
    broken(ErrorResponse, "/v1/messages", {"model": MODEL, "max_tokens": 99, "messages": said})


for part in (chat, completions, responses, messages, *([failures] if SCRIPTED else [])):
    part()
print("all fit the SDKs' types:", ", ".join(f"{n} {what}" for what, n in counts.items()), "(probe)")
