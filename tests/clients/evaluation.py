"""The requests of lm-eval's local-completions: scores of continuations, given as token ids, and greedy texts.

usage: evaluation.py     BASE, MODEL, KEY; uses the standard library only
"""
import json
import os
import urllib.request

BASE, MODEL = os.environ["BASE"], os.environ["MODEL"]


def post(path, body):
    headers = {"content-type": "application/json"}
    if os.environ.get("KEY"):
        headers["authorization"] = "Bearer " + os.environ["KEY"]
    request = urllib.request.Request(BASE + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)


def ids(text):
    return post("/tokenize", {"model": MODEL, "prompt": text})["tokens"]


def score(pairs):
    """Log-likelihoods as lm-eval reads them: context and continuation in one prompt, echoed with scores."""
    prompts = [ids(a) + ids(b) for a, b in pairs]
    lengths = [len(ids(a)) for a, _ in pairs]
    answer = post("/v1/completions", {
        "model": MODEL, "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True,
    })
    out = []
    for choice, length, prompt in zip(sorted(answer["choices"], key=lambda c: c["index"]), lengths, prompts):
        scores = choice["logprobs"]
        # One for the token that was chosen, too, even if it ended the answer: lm-eval drops the last one.
        assert len(scores["token_logprobs"]) == len(prompt) + 1, choice
        mine = scores["token_logprobs"][length:len(prompt)]
        tops = scores["top_logprobs"][length:len(prompt)]
        assert all(s is not None and s <= 0 for s in mine) and len(tops) == len(mine)
        out.append((sum(mine), all(max(t.values()) <= s + 1e-4 for s, t in zip(mine, tops))))
    return out


first = score([("The sky is", " blue."), ("One, two,", " three.")])
again = score([("The sky is", " blue.")])
assert abs(first[0][0] - again[0][0]) < 1e-3, (first, again)
text = post("/v1/completions", {
    "model": MODEL, "prompt": ["Question: 1+1?\nAnswer:"], "max_tokens": 8, "temperature": 0, "stop": ["\n\n"], "seed": 1234,
})
assert isinstance(text["choices"][0]["text"], str)
print("scores", [round(s, 3) for s, _ in first])
