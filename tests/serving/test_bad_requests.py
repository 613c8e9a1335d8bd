"""Every bad request is refused in words, soon, and changes nothing for anybody else."""

import json
import threading
import time

import pytest

CONTROL = {"prompt": "It was", "temperature": 0, "max_tokens": 12, "ignore_eos": True}
DEEP = "[" * 3000 + "]" * 3000


def nested_schema(depth: int) -> str:
    return '{"type":"object","properties":{"a":' * depth + '{"type":"string"}' + "}}" * depth


def schema(text: str) -> str:
    return '{"prompt":"a","response_format":{"type":"json_schema","json_schema":{"name":"n","schema":' + text + "}}}"


def regex(pattern: str) -> str:
    return json.dumps({"prompt": "a", "regex": pattern})


def chat(**fields) -> str:
    return json.dumps({"messages": [{"role": "user", "content": "a"}]} | fields)


def image(url: str) -> str:
    return chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}])


COMPLETIONS = {
    "n huge": '{"prompt":"a","n":100000000}',
    "n zero": '{"prompt":"a","n":0}',
    "n above the limit": '{"prompt":"a","n":17}',
    "100,000 prompts": json.dumps({"prompt": ["a"] * 100_000}),
    "no prompts": '{"prompt":[]}',
    "empty prompt": '{"prompt":""}',
    "empty among prompts": '{"prompt":["a",""]}',
    "bias out of range": '{"prompt":"a","logit_bias":{"264":1}}',
    "bias of no number": '{"prompt":"a","logit_bias":{"one":1}}',
    "bias of a negative": '{"prompt":"a","logit_bias":{"-1":1}}',
    "bias too strong": '{"prompt":"a","logit_bias":{"1":101}}',
    "bias written twice": '{"prompt":"a","logit_bias":{"01":1,"1":2}}',
    "bias of too many": json.dumps({"prompt": "a", "logit_bias": {str(i): 1 for i in range(1025)}}),
    "token -1": '{"prompt":[1,-1]}',
    "token vocab": '{"prompt":[1,264]}',
    "token true": '{"prompt":[true]}',
    "token huge": '{"prompt":[1,100000000000000000000]}',
    "temperature NaN": '{"prompt":"a","temperature":NaN}',
    "temperature Infinity": '{"prompt":"a","temperature":Infinity}',
    "temperature 1e999": '{"prompt":"a","temperature":1e999}',
    "temperature -1": '{"prompt":"a","temperature":-1}',
    "temperature text": '{"prompt":"a","temperature":"1"}',
    "seed 2^63": '{"prompt":"a","seed":9223372036854775808}',
    "seed 2^64": '{"prompt":"a","seed":18446744073709551616}',
    "max_tokens 0": '{"prompt":"a","max_tokens":0}',
    "max_tokens -1": '{"prompt":"a","max_tokens":-1}',
    "max_tokens 1.5": '{"prompt":"a","max_tokens":1.5}',
    "prompt over the context": json.dumps({"prompt": "a" * 512}),
    "prompt far over the context": json.dumps({"prompt": "a b" * 300_000}),
    "deep tools": '{"prompt":"a","tools":' + DEEP + "}",
    "deep schema": schema(nested_schema(5000)),
    "schema over the depth": schema(nested_schema(20)),
    "schema over the size": schema(json.dumps({"enum": ["x" * 70_000]})),
    "schema of itself": schema('{"$ref":"#"}'),
    "schema in a circle": schema('{"$defs":{"a":{"items":{"$ref":"#/$defs/a"}}},"$ref":"#/$defs/a"}'),
    "schema elsewhere": schema('{"$ref":"http://127.0.0.1:1/x"}'),
    "schema of a file": schema('{"$ref":"file:///etc/passwd"}'),
    "schema nowhere": schema('{"$ref":"#/$defs/a"}'),
    "schema of no type": schema('{"type":"foo"}'),
    "schema of nothing": schema('{"not":{}}'),
    "schema a list": schema("[]"),
    "schema pattern": schema('{"type":"string","pattern":"(a+)+b"}'),
    "regex backtracks": regex("(a+)+b"),
    "regex backtracks too": regex("x(?:[ab]*){2,}"),
    "regex looks ahead": regex("(?=a)b"),
    "regex unfinished": regex("[a"),
    "regex empty": regex(""),
    "regex too long": regex("a" * 70_000),
    "regex and format": '{"prompt":"a","regex":"a","response_format":{"type":"json_object"}}',
    "format unknown": '{"prompt":"a","response_format":{"type":"xml"}}',
    "format and min_tokens": '{"prompt":"a","regex":"a","min_tokens":3}',
    "lone surrogate": '{"prompt":"\\ud800"}',
    "lone surrogate in stop": '{"prompt":"a","stop":"\\udfff"}',
    "raw 0xFF": b'{"prompt":"\xff\xfe"}',
    "raw 0xFF alone": b"\xff",
    "invalid JSON": '{"prompt":',
    "no object": "[1]",
    "nothing": "",
    "12,000 malformed items": json.dumps({"prompt": [{"a": i} for i in range(12_000)]}),
    "12,000 unknown fields": json.dumps({"prompt": "a"} | {f"f{i}": i for i in range(12_000)}),
    "deep": DEEP,
    "logprobs 10^6": '{"prompt":"a","logprobs":1000000}',
    "stop token out of range": '{"prompt":"a","stop_token_ids":[264]}',
    "stop token -1": '{"prompt":"a","stop_token_ids":[-1]}',
    "many stop strings": json.dumps({"prompt": "a", "stop": ["x"] * 17}),
    "long stop string": json.dumps({"prompt": "a", "stop": "x" * 257}),
    "empty stop string": '{"prompt":"a","stop":""}',
    "unknown field": '{"prompt":"a","use_beam_search":true}',
    "long field name": json.dumps({"prompt": "a", "x" * 100_000: 1}),
    "best_of": '{"prompt":"a","best_of":3}',
    "echo": '{"prompt":"a","echo":true}',
    "options without stream": '{"prompt":"a","stream_options":{"include_usage":true}}',
    "unknown model of a strange type": '{"model":3,"prompt":"a"}',
}
CHATS = {
    "no messages": '{"messages":[]}',
    "top_logprobs 10^6": chat(logprobs=True, top_logprobs=10**6),
    "top_logprobs alone": chat(top_logprobs=2),
    "image of loopback": image("http://127.0.0.1:1/x.png"),
    "image of a file": image("file:///etc/passwd"),
    "role unknown": chat(messages=[{"role": "king", "content": "a"}]),
    "content a number": chat(messages=[{"role": "user", "content": 3}]),
    "12,000 malformed messages": chat(messages=[{"role": 1}] * 12_000),
    "tools": chat(tools=[{"type": "function", "function": {"name": "f"}}]),
    "two lengths": chat(max_tokens=3, max_completion_tokens=4),
    "own template": chat(chat_template="{{ 1 }}"),
    "template switch unknown": chat(chat_template_kwargs={"enable_thinking": False}),
    "template switch of ours": chat(chat_template_kwargs={"messages": "x"}),
    "template switch self": chat(chat_template_kwargs={"self": "x"}),
    "template special token": chat(chat_template_kwargs={"eos_token": "x"}),
    "deep tools": '{"messages":[{"role":"user","content":"a"}],"tools":' + DEEP + "}",
}
OTHERS = {
    "/tokenize": ["{}", '{"prompt":"a","messages":[]}', '{"prompt":"\\ud800"}', '{"prompt":3}', "[", '{"messages":[]}'],
    "/detokenize": ["{}", '{"tokens":[-1]}', '{"tokens":[264]}', '{"tokens":["a"]}', '{"tokens":[1e3]}', "\x00"],
}
CASES = [("/v1/completions", name, body) for name, body in COMPLETIONS.items()]
CASES += [("/v1/chat/completions", name, body) for name, body in CHATS.items()]
CASES += [(path, body, body) for path, bodies in OTHERS.items() for body in bodies]


class Witness(threading.Thread):
    """A stream that is open while bad requests are made, read slowly enough to last."""

    def __init__(self, client) -> None:
        super().__init__(daemon=True)
        self.client, self.text = client, ""
        self.start()

    def run(self) -> None:
        body = {"prompt": "Once", "max_tokens": 480, "temperature": 0, "ignore_eos": True, "stream": True}
        with self.client.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    self.text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]


@pytest.fixture(scope="module")
def control(server):
    """What the server says before anything bad was asked."""
    return server.client.post("/v1/completions", json=CONTROL).json()["choices"][0]["text"]


@pytest.fixture(scope="module")
def witness_text(server):
    witness = Witness(server.client)
    witness.join()
    assert len(witness.text) > 100
    return witness.text


@pytest.mark.parametrize(("path", "name", "body"), CASES, ids=[f"{path} {name}"[:60] for path, name, _ in CASES])
def test_a_bad_request(server, control, path, name, body):
    began = time.perf_counter()
    data = body if isinstance(body, bytes) else body.encode()
    response = server.client.post(path, content=data, headers={"Content-Type": "application/json"})
    seconds = time.perf_counter() - began
    assert response.status_code in (400, 422), (response.status_code, response.text[:300])
    message = response.json()["error"]["message"]
    assert 0 < len(message.encode()) < 65_536 and seconds < 1.0, (seconds, message[:300])
    assert server.client.get("/health").status_code == 200
    assert server.client.post("/v1/completions", json=CONTROL).json()["choices"][0]["text"] == control


def test_a_stream_that_was_open_before_ends_unchanged(server, control, witness_text):
    witness = Witness(server.client)
    while not witness.text:
        time.sleep(0.01)
    for path, _, body in CASES:
        data = body if isinstance(body, bytes) else body.encode()
        server.client.post(path, content=data, headers={"Content-Type": "application/json"})
    witness.join()
    assert witness.text == witness_text
    assert server.client.get("/health").status_code == 200
    assert server.client.post("/v1/completions", json=CONTROL).json()["choices"][0]["text"] == control
    assert server.gauges()["deltagram_in_flight"] == 0


def test_bodies_that_are_not_json_or_too_large(server):
    plain = server.client.post("/v1/completions", content='{"prompt":"a"}', headers={"Content-Type": "text/plain"})
    assert plain.status_code == 400  # or any page on the web could send one without asking
    large = server.client.post("/v1/completions", json={"prompt": "a" * (1 << 21)})
    assert large.status_code == 413 and "1048576 bytes" in large.json()["error"]["message"]

    def pieces():
        for _ in range(3000):
            yield b"a" * 1000

    endless = server.client.post("/v1/completions", content=pieces(), headers={"Content-Type": "application/json"})
    assert endless.status_code == 413


def test_routes_that_are_not_there(server):
    assert server.client.get("/v1/engines").json()["error"]["type"] == "not_found_error"
    assert server.client.get("/v1/completions").status_code == 405
    assert server.client.get("/../../etc/passwd").status_code == 404
