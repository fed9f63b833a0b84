"""lm-eval's local-completions on a task file of our own: scored choices, and texts up to a stop string.

usage: lm_eval_task.py     needs the package lm_eval, but neither torch nor transformers: the server's own tokenizer
is asked (`tokenizer_backend=remote`). BASE, MODEL
"""
import json
import math
import os
import pathlib
import urllib.request

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", OPENAI_API_KEY=os.environ.get("KEY", "none"))
import lm_eval  # noqa: E402

BASE, MODEL = os.environ["BASE"], os.environ["MODEL"]
DATA = str(pathlib.Path(__file__).with_name("lm_eval_task.jsonl"))
COMMON = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": DATA}},
    "test_split": "test",
    "doc_to_text": "{{question}}",
}
CHOICES = {
    **COMMON,
    "task": "choices",
    "output_type": "multiple_choice",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}
TEXTS = {
    **COMMON,
    "task": "texts",
    "output_type": "generate_until",
    "doc_to_target": "{{choices[answer]}}",
    "generation_kwargs": {"until": ["."], "max_gen_toks": 12, "temperature": 0},
    "metric_list": [{"metric": "bleu", "aggregation": "bleu", "higher_is_better": True}],
}


def post(path, body):
    headers = {"content-type": "application/json"}
    if os.environ.get("KEY"):
        headers["authorization"] = "Bearer " + os.environ["KEY"]
    request = urllib.request.Request(BASE + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)


def score(context, continuation):
    """The same number by hand."""
    ids = [post("/tokenize", {"prompt": text})["tokens"] for text in (context, context + continuation)]
    answer = post("/v1/completions", {"model": MODEL, "prompt": [ids[1]], "max_tokens": 0, "logprobs": 1, "echo": True})
    return sum(answer["choices"][0]["logprobs"]["token_logprobs"][len(ids[0]):])


arguments = {
    "model": MODEL,
    "base_url": BASE + "/v1/completions",
    "num_concurrent": 2,
    "max_retries": 1,
    "tokenizer_backend": "remote",
    "tokenized_requests": True,
    "batch_size": 2,
}
found = lm_eval.simple_evaluate(
    model="local-completions", model_args=arguments, tasks=[CHOICES, TEXTS], bootstrap_iters=0, log_samples=True
)
choices, texts = found["samples"]["choices"], found["samples"]["texts"]
assert len(choices) == len(texts) >= 4, (len(choices), len(texts))
for sample in choices:
    for option, (given,) in zip(sample["doc"]["choices"], sample["resps"]):
        mine = score(sample["doc"]["question"], option)
        assert math.isclose(float(given[0]), mine, abs_tol=1e-3), (sample["doc"], option, given, mine)
assert all(isinstance(sample["resps"][0][0], str) for sample in texts)
print("lm-eval scores", len(choices), "questions (probe): accuracy", found["results"]["choices"]["acc,none"])
