"""The Python SDK of Anthropic over Messages, streamed and not, and count_tokens.

usage: anthropic_sdk.py text|tool
"""
import os
import sys

import anthropic

client = anthropic.Anthropic(
    base_url=os.environ["BASE"], api_key=os.environ.get("KEY", "none"), max_retries=0, timeout=120
)
MODEL = os.environ["MODEL"]
SCRIPTED = os.environ.get("SCRIPTED", "1") == "1"
LIMIT = 2048 if SCRIPTED else 24
BASH = {
    "name": "Bash",
    "description": "Runs one command.",
    "input_schema": {
        "type": "object",
        "properties": {"command": {"type": "string"}},
        "required": ["command"],
    },
}
THINKING = {"type": "enabled", "budget_tokens": 1024} if SCRIPTED else {"type": "disabled"}


def words(message):
    return " ".join(block.text for block in message.content if block.type == "text")


def text():
    asked = [{"role": "user", "content": "Say that the probe is done."}]
    counted = client.messages.count_tokens(model=MODEL, messages=asked, tools=[BASH])
    assert counted.input_tokens > 0
    whole = client.messages.create(model=MODEL, max_tokens=LIMIT, messages=asked)
    assert whole.stop_reason in ("end_turn", "max_tokens") and whole.usage.output_tokens > 0
    with client.messages.stream(model=MODEL, max_tokens=LIMIT, messages=asked, thinking=THINKING) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop", kinds
    for block in message.content:
        assert block.type != "thinking" or block.signature
    print(words(message))


def tool():
    asked = [
        {"role": "user", "content": "PROBE-TOOL: run the command echo probe-ok, then say that the probe is done."}
    ]
    choice = {"type": "auto"} if SCRIPTED else {"type": "any"}
    with client.messages.stream(
        model=MODEL, max_tokens=2048 if SCRIPTED else 200, messages=asked, tools=[BASH], tool_choice=choice,
        thinking=THINKING,
    ) as stream:
        message = stream.get_final_message()
    made = [block for block in message.content if block.type == "tool_use"]
    if not made and not SCRIPTED:
        assert message.stop_reason == "max_tokens", message
        print("cut before the call was complete")
        return
    assert message.stop_reason == "tool_use" and isinstance(made[0].input, dict), message
    fields = {
        "thinking": ("type", "thinking", "signature"),
        "text": ("type", "text"),
        "tool_use": ("type", "id", "name", "input"),
    }
    replay = [{name: getattr(block, name) for name in fields[block.type]} for block in message.content]
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "probe-ok"}]}
        for block in made
    ]
    asked += [{"role": "assistant", "content": replay}, {"role": "user", "content": results}]
    done = client.messages.create(model=MODEL, max_tokens=LIMIT, messages=asked, tools=[BASH], thinking=THINKING)
    print(words(done))


def search():
    """A deferred tool, found by a search that runs at the server; only shapes can be checked here."""
    deferred = {**BASH, "name": "weather", "description": "Tells the weather.", "defer_loading": True}
    message = client.beta.messages.create(
        model=MODEL,
        max_tokens=LIMIT,
        messages=[{"role": "user", "content": "Weather?"}],
        tools=[{"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"}, deferred, BASH],
    )
    assert message.stop_reason


{"text": text, "tool": tool, "search": search}[sys.argv[1]]()
