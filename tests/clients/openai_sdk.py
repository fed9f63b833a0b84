"""The Python SDK of OpenAI over Chat Completions, Completions and Responses, streamed and not.

usage: openai_sdk.py text|tool     BASE and MODEL name the server, KEY its key
"""
import json
import os
import sys

import openai

client = openai.OpenAI(
    base_url=os.environ["BASE"] + "/v1", api_key=os.environ.get("KEY", "none"), max_retries=0, timeout=120
)
MODEL = os.environ["MODEL"]
# A small model says what it likes, and long: only the shapes are checked then.
SCRIPTED = os.environ.get("SCRIPTED", "1") == "1"
LIMIT = {} if SCRIPTED else {"max_tokens": 24}
OUTPUT = {} if SCRIPTED else {"max_output_tokens": 24}
QUESTION = "Say that the probe is done."
TASK = "PROBE-TOOL: run the command echo probe-ok, then say that the probe is done."
SCHEMA = {
    "type": "object",
    "properties": {"command": {"type": "string"}},
    "required": ["command"],
    "additionalProperties": False,
}
FUNCTION = {"name": "run_shell_command", "description": "Runs one command.", "parameters": SCHEMA}


def text():
    assert MODEL in [m.id for m in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL
    asked = [{"role": "user", "content": QUESTION}]
    whole = client.chat.completions.create(model=MODEL, messages=asked, seed=1, **LIMIT)
    usage = whole.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens is not None
    said = ""
    reasons = []
    last = None
    stream = client.chat.completions.create(
        model=MODEL, messages=asked, seed=1, stream=True, stream_options={"include_usage": True}, **LIMIT
    )
    for chunk in stream:
        for choice in chunk.choices:
            said += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
        last = chunk
    assert said == (whole.choices[0].message.content or ""), (said, whole)
    assert len(reasons) == 1 and last.usage.total_tokens > 0
    several = client.chat.completions.create(
        model=MODEL, messages=asked, n=2, logprobs=True, top_logprobs=1, **LIMIT
    )
    assert [c.index for c in several.choices] == [0, 1]

    answer = client.responses.create(model=MODEL, input=QUESTION, **OUTPUT)
    with client.responses.stream(model=MODEL, input=QUESTION, **OUTPUT) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    # The wrapper knows no final response of one that was cut.
    final = events[-1].response
    assert kinds[0] == "response.created", kinds
    assert kinds[-1] in ("response.completed", "response.incomplete"), kinds
    assert final.usage.total_tokens == final.usage.input_tokens + final.usage.output_tokens
    assert client.responses.retrieve(answer.id).id == answer.id
    assert len(list(client.responses.input_items.list(answer.id))) == 1
    assert client.responses.input_tokens.count(model=MODEL, input=QUESTION).input_tokens > 0
    client.responses.delete(answer.id)
    try:
        client.responses.retrieve(answer.id)
        raise AssertionError("a deleted response is still there")
    except openai.NotFoundError:
        pass

    scored = client.completions.create(model=MODEL, prompt="one two", echo=True, logprobs=1, max_tokens=0)
    scores = scored.choices[0].logprobs
    assert scored.choices[0].text == "one two" and scores.token_logprobs[0] is None
    assert len(scores.tokens) == len(scores.token_logprobs) == len(scores.text_offset)
    streamed = client.completions.create(model=MODEL, prompt="one two", max_tokens=8, stream=True)
    assert all(c.object == "text_completion" for c in streamed)
    try:
        client.chat.completions.create(model=MODEL, messages=[], max_tokens=4)
        raise AssertionError("a conversation of nothing was answered")
    except openai.BadRequestError as error:
        assert error.body["message"]
    print(said or answer.output_text)


def tool():
    asked = [{"role": "user", "content": TASK}]
    declared = [{"type": "function", "function": FUNCTION}]
    calls = {}
    reason = None
    stream = client.chat.completions.create(
        model=MODEL, messages=asked, tools=declared, tool_choice="required", stream=True,
        **({} if SCRIPTED else {"max_tokens": 200}),
    )
    for chunk in stream:
        for choice in chunk.choices:
            for part in choice.delta.tool_calls or []:
                call = calls.setdefault(part.index, {"id": "", "name": "", "arguments": ""})
                call["id"] += part.id or ""
                call["name"] += part.function.name or ""
                call["arguments"] += part.function.arguments or ""
            reason = choice.finish_reason or reason
    if not calls and not SCRIPTED:
        assert reason == "length", reason
        print("cut before the call was complete")
        return
    assert reason == "tool_calls" and calls, (reason, calls)
    call = calls[0]
    assert isinstance(json.loads(call["arguments"]), dict)
    asked += [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": call["id"], "type": "function", "function": {k: call[k] for k in ("name", "arguments")}}
            ],
        },
        {"role": "tool", "tool_call_id": call["id"], "content": "probe-ok"},
    ]
    done = client.chat.completions.create(model=MODEL, messages=asked, tools=declared, **LIMIT)
    print(done.choices[0].message.content)
    if not SCRIPTED:
        return

    flat = [{"type": "function", "strict": True, **FUNCTION}]
    with client.responses.stream(model=MODEL, input=TASK, tools=flat, tool_choice="required") as stream:
        for _ in stream:
            pass
        first = stream.get_final_response()
    made = [item for item in first.output if item.type == "function_call"]
    assert "command" in json.loads(made[0].arguments)
    result = {"type": "function_call_output", "call_id": made[0].call_id, "output": "probe-ok"}
    stored = client.responses.create(model=MODEL, previous_response_id=first.id, input=[result], tools=flat)
    items = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in first.output]
    replayed = client.responses.create(
        model=MODEL,
        store=False,
        tools=flat,
        include=["reasoning.encrypted_content"],
        input=[{"role": "user", "content": TASK}, *items, result],
    )
    assert stored.output_text == replayed.output_text, (stored.output_text, replayed.output_text)
    print(stored.output_text)


{"text": text, "tool": tool}[sys.argv[1]]()
