"""What the engine may be set to do changes what an answer costs, never what it says, nor who shares with whom."""

import httpx
import pytest

from deltagram.serving.worker import _public
from deltagram.testing.server import RunningServer, ask, events, streamed_texts

KEYS = ("sk-first", "sk-second")
PREFIX = "The ferry left at noon and came back before the rain. " * 6  # five pages of 64 bytes, which are tokens here
FEW = {"logit_bias": {str(ord(letter)): 90 for letter in "abc"}}  # letters, so that text repeats itself and drafts fit
BODIES = {
    "greedy": {"prompt": PREFIX, "temperature": 0, "max_tokens": 60, "ignore_eos": True, "logprobs": 2, **FEW},
    "seeded": {"prompt": PREFIX, "temperature": 0.7, "seed": 4, "max_tokens": 60, "logprobs": 0, "n": 2, **FEW},
    "penalties": {"prompt": PREFIX, "temperature": 0, "max_tokens": 40, "presence_penalty": 1, "logit_bias": {"65": 2}},
    "grammar": {"prompt": PREFIX, "temperature": 0, "max_tokens": 40, "regex": "(the rain. ){2,9}"},
}
OURS = ("in_flight", "running", "waiting", "cache_pages_used", "state_slots_used")


def told(choices: list[dict]) -> list[dict]:
    """Choices with what they say of probabilities to six places: a step's other tokens move the last ones."""

    def rounded(value):
        if isinstance(value, float):
            return pytest.approx(value, abs=1e-5)
        if isinstance(value, dict):
            return {key: rounded(each) for key, each in value.items()}
        return [rounded(each) for each in value] if isinstance(value, list) else value

    return rounded(choices)


def client_of(server, key: str) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=60, headers={"Authorization": f"Bearer {key}"})


def test_prefixes_are_shared_within_one_key_alone(server, start):
    cached = start(*(word for key in KEYS for word in ("--api-key", key)), "--set", "prefix_cache_bytes=16777216")
    first, second = (client_of(cached, key) for key in KEYS)
    cached.client = first

    def hits() -> float:
        return cached.gauges()["deltagram_prefix_hits_total"]

    body = BODIES["greedy"]
    whole = ask(server.client, "/v1/completions", body)["choices"]
    guesses = {"user": KEYS[0], "prompt_cache_key": KEYS[0], "metadata": {"salt": KEYS[0]}}
    for name in ("salt", "cache_salt"):
        assert second.post("/v1/completions", json=body | {name: KEYS[0]}).status_code == 400
    for client, more, expected in [(first, {}, 0), (second, guesses, 0), (second, {}, 1), (first, guesses, 2)]:
        assert ask(client, "/v1/completions", body | more)["choices"] == told(whole)
        assert hits() == expected
    text = first.get("/metrics").text
    assert 'prefix_misses_total{reason="no_entry"} 2.0' in text and 'reason="salt"' not in text
    for body in BODIES.values():
        whole = ask(server.client, "/v1/completions", body)["choices"]
        assert ask(first, "/v1/completions", body)["choices"] == told(whole)
        chunks = events(second, "/v1/completions", body)
        assert streamed_texts(chunks, len(whole)) == [choice["text"] for choice in whole]
    assert hits() == 12  # two of them are of two sequences
    with first.stream("POST", "/v1/completions", json=body | {"n": 4, "stream": True}) as left:
        next(left.iter_lines())
    cached.wait_until(lambda: not any(cached.gauges()[f"deltagram_{name}"] for name in OURS), 1.0)
    kept = cached.gauges()
    assert kept["deltagram_prefix_pages"] >= 2 * len(PREFIX) // 64 and kept["deltagram_prefix_checkpoints"] >= 2
    first.close(), second.close()


def test_misses_do_not_tell_of_other_keys():
    assert _public({"salt": 2, "evicted": 1}) == {"no_entry": 2, "evicted": 1}
    assert _public({"salt": 2, "no_entry": 1}) == {"no_entry": 3} and _public({}) == {}


@pytest.fixture(scope="module")
def drafting(tiny, tmp_path_factory):
    settings = ("speculation=prompt_lookup", "num_draft=3", "adaptive_drafts=false")
    words = [word for setting in settings for word in ("--set", setting)]
    running = RunningServer(tmp_path_factory.mktemp("drafting"), str(tiny), "--name", "tiny", "--device", "cpu", *words)
    yield running
    running.close()


def accepted(server) -> float:
    return server.gauges()["deltagram_accepted_tokens_total"]


@pytest.mark.parametrize("name", BODIES)
def test_a_server_that_drafts_says_what_one_without_says(server, drafting, name):
    body, before = BODIES[name], accepted(drafting)
    whole = ask(server.client, "/v1/completions", body)
    drafted = ask(drafting.client, "/v1/completions", body)
    assert drafted["choices"] == told(whole["choices"]) and drafted["usage"] == whole["usage"]
    chunks = events(drafting.client, "/v1/completions", body)
    assert streamed_texts(chunks, len(whole["choices"])) == [choice["text"] for choice in whole["choices"]]
    if "logprobs" in body:
        assert accepted(drafting) > before
        assert max(len(chunk["choices"][0]["logprobs"]["tokens"]) for chunk in chunks) > 1


def test_stop_strings_over_accepted_drafts(server, drafting):
    body = BODIES["greedy"] | {"logprobs": None}
    text = ask(server.client, "/v1/completions", body)["choices"][0]["text"]
    before = accepted(drafting)
    for start in range(5, len(text) - 3, 5):
        stop = text[start : start + 3]
        for include in (False, True):
            asked = body | {"stop": [stop], "include_stop_str_in_output": include}
            (choice,) = ask(drafting.client, "/v1/completions", asked)["choices"]
            assert choice["text"] == text[: text.index(stop) + include * len(stop)]
            assert choice["finish_reason"] == "stop"
            assert streamed_texts(events(drafting.client, "/v1/completions", asked), 1) == [choice["text"]]
    assert accepted(drafting) > before
