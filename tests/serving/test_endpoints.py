"""What the routes answer, and that a stream says what a whole answer says."""

import json
import re

import pytest

from deltagram.testing.server import ask, events, streamed_texts

GREEDY = {"temperature": 0, "max_tokens": 24}
EMOJI = {"regex": "(😀|é|日本){40}", "max_tokens": 60, "temperature": 1, "seed": 5}


def test_models(server):
    listed = server.client.get("/v1/models").json()
    assert [model["id"] for model in listed["data"]] == ["tiny"]
    assert server.client.get("/v1/models/tiny").json() == listed["data"][0]
    missing = server.client.get("/v1/models/other")
    assert missing.status_code == 404 and "'tiny'" in missing.json()["error"]["message"]
    assert server.client.post("/v1/completions", json={"model": "other", "prompt": "a"}).status_code == 404


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "It was", **GREEDY},
        {"prompt": ["It was", "éa"], "n": 2, "temperature": 1, "seed": 3, "max_tokens": 17},
        {
            "prompt": "a",
            "top_k": 5,
            "top_p": 0.9,
            "min_p": 0.01,
            "repetition_penalty": 1.2,
            "seed": 1,
            "max_tokens": 30,
        },
        {"prompt": "a", "logit_bias": {"65": 100}, "presence_penalty": 1, "frequency_penalty": 0.5, "max_tokens": 9},
        {"prompt": "a", "logprobs": 3, **GREEDY},
        {"prompt": "a", **EMOJI},
        {"prompt": "a", **EMOJI, "stop": ["é😀", "日本日"]},
        {"prompt": "a", **EMOJI, "stop": "本é", "include_stop_str_in_output": True},
    ],
)
def test_completions_stream_what_they_say_whole(server, body):
    body = body | {"seed": body.get("seed", 11)}
    whole = ask(server.client, "/v1/completions", body)
    chunks = events(server.client, "/v1/completions", body | {"stream_options": {"include_usage": True}})
    choices = whole["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    assert streamed_texts(chunks, len(choices)) == [choice["text"] for choice in choices]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    for choice in choices:
        reasons = [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert reasons[-1] == choice["finish_reason"] and set(reasons[:-1]) <= {None}
    if "logprobs" in body:
        parts = [c["logprobs"] for chunk in chunks for c in chunk["choices"]]
        joined = {name: [each for part in parts for each in part[name]] for name in parts[0]}
        assert joined == choices[0]["logprobs"] and len(joined["tokens"]) == whole["usage"]["completion_tokens"]
        assert all(len(top) == 3 for top in joined["top_logprobs"])


def test_characters_over_token_borders_come_whole(server):
    chunks = events(server.client, "/v1/completions", {"prompt": "a", **EMOJI})
    (text,) = streamed_texts(chunks, 1)
    # 60 byte tokens end in the middle of a character now and then, which is U+FFFD at the very end alone
    assert re.fullmatch("(😀|é|日本)+日?\ufffd?", text) and any("😀" in c["text"] for e in chunks for c in e["choices"])


def test_stop_strings_over_token_borders(server):
    body = {"prompt": "a", "regex": "x{1,8}STOP!y{30}", "max_tokens": 60, "temperature": 1, "seed": 1}
    stopped = ask(server.client, "/v1/completions", body | {"stop": ["STOP!"]})["choices"][0]
    assert re.fullmatch("x{1,8}", stopped["text"]) and stopped["finish_reason"] == "stop"
    chunks = events(server.client, "/v1/completions", body | {"stop": ["STOP!"]})
    assert streamed_texts(chunks, 1) == [stopped["text"]]
    assert "STOP!" in ask(server.client, "/v1/completions", body)["choices"][0]["text"]


@pytest.mark.parametrize(
    "extra", [GREEDY, {"n": 3, "seed": 4, "max_tokens": 10}, {"max_completion_tokens": 5, "seed": 1}]
)
def test_chat_streams_what_it_says_whole(server, extra):
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]},
    ]
    body = {"messages": messages, "logprobs": True, "top_logprobs": 2, **extra}
    whole = ask(server.client, "/v1/chat/completions", body)
    chunks = events(server.client, "/v1/chat/completions", body)
    count = extra.get("n", 1)
    assert [c["delta"] for c in chunks[0]["choices"]] == [{"role": "assistant", "content": ""}] * count
    assert streamed_texts(chunks, count) == [choice["message"]["content"] for choice in whole["choices"]]
    assert "usage" not in chunks[0]
    content = whole["choices"][0]["logprobs"]["content"]
    streamed = [c["logprobs"]["content"] for e in chunks for c in e["choices"] if c["index"] == 0 and c["logprobs"]]
    assert [entry for part in streamed for entry in part] == content
    assert all(len(entry["top_logprobs"]) == 2 and bytes(entry["bytes"]) for entry in content if entry["token"])
    as_tokens = ask(server.client, "/tokenize", {"messages": messages})
    assert as_tokens["count"] == whole["usage"]["prompt_tokens"]


def test_usage_in_every_chunk(server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(
        server.client, "/v1/completions", {"prompt": "a", **GREEDY, "ignore_eos": True, "stream_options": options}
    )
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 24 and counts[0] < 24


def test_same_seed_same_text_and_n_starts_with_it(server):
    body = {"prompt": "a", "temperature": 1, "max_tokens": 20, "seed": 9}
    (one,) = ask(server.client, "/v1/completions", body)["choices"]
    many = ask(server.client, "/v1/completions", body | {"n": 4})["choices"]
    assert many[0]["text"] == one["text"] and len({choice["text"] for choice in many}) == 4
    drawn = {ask(server.client, "/v1/completions", body | {"seed": None})["choices"][0]["text"] for _ in range(3)}
    assert len(drawn) == 3


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 999}, "b": {"enum": ["x", "y"]}, "c": {"$ref": "#/$defs/flag"}},
    "required": ["a", "b", "c"],
    "additionalProperties": False,
    "$defs": {"flag": {"type": "boolean"}},
}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_structured_output(server, path):
    prompt = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}

    def say(form, **more):
        (choice,) = ask(server.client, path, prompt | {"max_tokens": 80, "seed": 3, "response_format": form} | more)[
            "choices"
        ]
        return choice.get("text") or choice["message"]["content"], choice["finish_reason"]

    text, reason = say({"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}})
    said = json.loads(text)
    assert reason == "stop" and set(said) == {"a", "b", "c"} and said["b"] in "xy" and isinstance(said["a"], int)
    text, reason = say({"type": "regex", "regex": "[0-9]{3}-[a-f]{2}"})
    assert re.fullmatch("[0-9]{3}-[a-f]{2}", text) and reason == "stop"
    text, _ = say({"type": "json_object"}, logit_bias={str(ord("}")): 100, str(ord("{")): -100})
    assert json.loads(text) == {}
    assert say({"type": "text"}, seed=1) == say(None, seed=1)


def test_tokenize_and_detokenize(server):
    for text in ("It was a fine day", "日本😀", ""):
        tokens = ask(server.client, "/tokenize", {"prompt": text})
        assert tokens["tokens"] == list(text.encode()) and tokens["count"] == len(text.encode())
        assert tokens["max_model_len"] == 512
        assert ask(server.client, "/detokenize", {"tokens": tokens["tokens"]}) == {"prompt": text}


def test_texts_that_no_context_holds_are_not_tokenized(server):
    for path, body in [
        ("/v1/completions", {"prompt": "a" * 900_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 900_000}]}),
        ("/tokenize", {"prompt": "a" * 900_000}),
    ]:
        answer = server.client.post(path, json=body)
        assert answer.status_code == 400 and re.search(r"9\d{5} characters", answer.json()["error"]["message"])
    assert ask(server.client, "/tokenize", {"prompt": "a" * 600})["count"] == 600


def test_operators_routes(server):
    assert server.client.get("/live").json() == server.client.get("/health").json() == {"status": "ok"}
    before = server.gauges()
    ask(server.client, "/v1/completions", {"prompt": "a" * 100, "max_tokens": 7, "ignore_eos": True, "n": 2})
    after = server.gauges()
    rise = {name: after[name] - before.get(name, 0) for name in after}
    assert rise["deltagram_prefill_tokens_total"] == 200 and rise["deltagram_decode_tokens_total"] == 12
    assert (
        rise["deltagram_time_to_first_token_seconds_count"]
        == rise["deltagram_time_per_output_token_seconds_count"]
        == 2
    )
    assert rise["deltagram_memory_rows_total"] > 0 and rise["deltagram_steps_total"] >= 7
    assert after["deltagram_in_flight"] == after["deltagram_running"] == after["deltagram_cache_pages_used"] == 0
    text = server.client.get("/metrics").text
    assert re.search(r'deltagram_step_seconds_count\{kind="decode",size="2x2"\} [1-9]', text)
    for name in ("eager_segments", "run_ahead_hits", "run_ahead_stalls", "prefix_hits", "cached_row_hits"):
        assert f"deltagram_{name}_total 0.0" in text  # of what this server has none of, or on a CPU
    assert re.search(r'deltagram_table_bytes\{tier="device"\} [1-9]', text)
    schema = server.client.get("/openapi.json").json()
    assert set(schema["paths"]) >= {"/v1/completions", "/v1/chat/completions", "/tokenize", "/health", "/metrics"}
    docs = server.client.get("/docs")
    assert all(path in docs.text for path in schema["paths"]) and 'href="openapi.json"' in docs.text
    fields = {field for body in schema["components"]["schemas"].values() for field in body.get("properties", {})}
    assert fields > {"prompt", "stream_options"} and all(f"<code>{field}</code>" in docs.text for field in fields)
    assert set(re.findall(r'href="#(\w+)"', docs.text)) <= set(re.findall(r'id="(\w+)"', docs.text))
    assert "http" not in docs.text and "<script" not in docs.text and "default-src 'none'" in str(docs.headers)
    assert server.client.get("/redoc").status_code == 404
