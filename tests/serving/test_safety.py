"""Keys, secrets and the wire."""

import ast
import base64
import hmac
import queue
import socket
from pathlib import Path

import pytest

import deltagram.serving
from deltagram import LLM
from deltagram.serving import channel
from deltagram.serving.http import Guard
from deltagram.serving.limits import Limits
from deltagram.serving.worker import Worker

KEYS = ("sk-first-0123", "sk-second-4567")
SECRET = "the treasure lies under the oak"


def basic(key: str) -> str:
    return "Basic " + base64.b64encode(f"anyone:{key}".encode()).decode()


def test_a_key_on_every_route_but_liveness_and_no_secret_in_the_log(start_faulty):
    server = start_faulty("--api-key", KEYS[0], "--api-key", KEYS[1])
    right = {"Authorization": f"Bearer {KEYS[1]}"}
    paths = server.client.get("/openapi.json", headers=right).json()["paths"]
    routes = [
        (method.upper(), path.replace("{model}", "tiny")) for path, methods in paths.items() for method in methods
    ]
    routes += [("GET", path) for path in ("/", "/docs", "/openapi.json", "/nowhere")]
    assert ("POST", "/v1/chat/completions") in routes and ("GET", "/metrics") in routes
    for method, path in routes:
        if path == "/live":
            assert server.client.request(method, path).status_code == 200
            continue
        wrong = ["Bearer x", f"Bearer {KEYS[0]}x", f"Basic {KEYS[0]}", basic("x"), f"{KEYS[0]}", "Bearer", "Digest a"]
        for value in [None, *wrong]:
            answer = server.client.request(method, path, headers={"Authorization": value} if value else {})
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key", (path, value)
            assert answer.headers["www-authenticate"].startswith("Basic")
    raw = server.client.get("/health", headers={b"Authorization": b"Bearer \xff\xfe"})
    assert raw.status_code == 401
    for value in (f"bearer {KEYS[0]}", f"Bearer {KEYS[1]}", basic(KEYS[0])):
        assert server.client.get("/v1/models", headers={"Authorization": value}).status_code == 200
        body = {"prompt": SECRET, "max_tokens": 3, "user": KEYS[0]}
        assert server.client.post("/v1/completions", json=body, headers={"Authorization": value}).status_code == 200
    for body in ({"prompt": SECRET, "n": 0}, {"prompt": [SECRET, 3]}, {"prompt": SECRET + "\x01"}, {SECRET: 1}):
        assert server.client.post("/v1/completions", json=body, headers=right).status_code >= 400
    server.client.get(f"/v1/models?key={KEYS[0]}", headers=right)
    said = server.messages()
    assert "a step failed" in said and "RuntimeError" in said
    assert not any(word in said for word in ("treasure", "oak", *KEYS, "0123", "4567"))


def test_the_key_may_come_from_the_environment(start_paced):
    server = start_paced(DELTAGRAM_API_KEY=KEYS[0])
    assert server.client.get("/health").status_code == 401
    assert server.client.get("/health", headers={"Authorization": f"Bearer {KEYS[0]}"}).status_code == 200


@pytest.mark.parametrize("sent", ["a", "b", "c", "x", ""])
def test_every_key_is_compared_whichever_fits(monkeypatch, sent):
    compared = []
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((len(a), len(b))) or real(a, b))
    guard = Guard(None, None, Limits(), ["a", "b", "c"], [])  # type: ignore[arg-type]
    salt = guard._salt({"headers": [(b"authorization", f"Bearer {sent}".encode())]})
    assert (salt is not None) == (sent in ("a", "b", "c")) and compared == [(32, 32)] * 3


def test_salts_are_those_of_keys():
    guard = Guard(None, None, Limits(), KEYS, [])  # type: ignore[arg-type]
    salts = [guard._salt({"headers": [(b"authorization", f"Bearer {key}".encode())]}) for key in KEYS]
    assert salts[0] != salts[1] and not any(key in salt for key in KEYS for salt in salts if salt)
    assert salts[0] == guard._salt({"headers": [(b"authorization", basic(KEYS[0]).encode())]})
    assert Guard(None, None, Limits(), [], [])._salt({"headers": []}) == ""  # type: ignore[arg-type]


def test_the_salt_reaches_the_request(tiny):
    ours, theirs = socket.socketpair()
    worker = Worker(LLM(tiny, device="cpu"), theirs)
    params = {"max_tokens": 1, "logit_bias": None}
    add = {"add": 5, "prompts": [{"tokens": [1, 2], "seeds": [3, 4]}], "params": params, "grammar": None, "salt": "who"}
    worker.inbox.put((add, [None, None]))
    worker._take(wait=False)
    assert [request.salt for request in worker.requests.values()] == ["who", "who"]
    assert list(worker.requests) == [5, 6] and [request.seed for request in worker.requests.values()] == [3, 4]
    with pytest.raises(queue.Empty):
        worker.inbox.get(block=False)
    with ours.makefile("rb") as file:
        assert channel.read(file) == {"request": 5, "accepted": True}
    for end in (ours, theirs):
        end.close()


def test_nothing_that_is_read_from_a_wire_can_run():
    for path in Path(deltagram.serving.__file__).parent.glob("*.py"):
        names = {
            name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in [getattr(node, "module", None), *(alias.name for alias in node.names)]
        }
        assert not names & {"pickle", "marshal", "shelve", "dill", "multiprocessing", "torch", "requests", "urllib"}, (
            path
        )
        called = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
        assert not called & {"eval", "exec"}, path


def test_messages_survive_the_wire_and_a_broken_one_is_the_end(tmp_path):
    messages = [{"a": "é😀\n", "b": [1, 2.5, None]}, {}, {"long": "x" * 100_000}]
    (tmp_path / "wire").write_bytes(b"".join(map(channel.pack, messages)) + channel.pack({"cut": 1})[:-1])
    with (tmp_path / "wire").open("rb") as file:
        assert [channel.read(file) for _ in messages] == messages and channel.read(file) is None
