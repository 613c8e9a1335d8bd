"""Clients leave, engines fail and processes are told to stop; nothing is lost that need not be, and nothing leaks."""

import asyncio
import json
import os
import signal
import threading
import time

import httpx
import pytest

LONG = {"prompt": "Once", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
GAUGES = ("in_flight", "running", "waiting", "cache_pages_used", "state_slots_used")


def gauges(server) -> list[float]:
    found = server.gauges()
    return [found[f"deltagram_{name}"] for name in GAUGES]


class Stream(threading.Thread):
    """A stream that is read in a thread: `pieces` of text, then `error` or `done`."""

    def __init__(self, server, body=LONG) -> None:
        super().__init__(daemon=True)
        self.client = httpx.Client(base_url=server.url, timeout=60)
        self.body, self.pieces, self.error, self.done = body | {"stream": True}, [], None, False
        self.start()

    def run(self) -> None:
        with self.client.stream("POST", "/v1/completions", json=self.body) as response:
            for line in response.iter_lines():
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    self.done = True
                elif data:
                    event = json.loads(data)
                    if "error" in event:
                        self.error = event["error"]["message"]
                    else:
                        self.pieces.append(event["choices"][0]["text"])

    def wait_for_text(self, server) -> "Stream":
        server.wait_until(lambda: self.pieces, 30)
        return self


def test_200_clients_that_leave_after_three_chunks_leave_nothing_behind(start):
    server = start("--limit", "max_queued=300")
    baseline = gauges(server)

    async def leave(client: httpx.AsyncClient, i: int) -> None:
        body = LONG | {"prompt": f"{i}" * (i % 40 + 1), "n": 1 + i % 2, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            count = 0
            async for line in response.aiter_lines():
                count += line.startswith("data: ")
                if count == 3:
                    return

    async def all_of_them() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
            await asyncio.gather(*(leave(client, i) for i in range(200)))

    asyncio.run(all_of_them())
    server.wait_until(lambda: gauges(server) == baseline == [0] * 5, 1.0)
    assert server.client.post("/v1/completions", json=LONG | {"max_tokens": 3}).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_an_aborted_request_owns_nothing_a_second_later(server, stream):
    def ask() -> None:
        client = httpx.Client(base_url=server.url, timeout=httpx.Timeout(10, read=0.5))
        try:
            with client.stream("POST", "/v1/completions", json=LONG | {"n": 8, "stream": stream}) as response:
                for count, _ in enumerate(response.iter_lines()):
                    if count == 5:
                        return
        except httpx.ReadTimeout:
            pass

    ask()
    server.wait_until(lambda: gauges(server) == [0] * 5, 1.0)


def test_sigterm_lets_requests_finish_and_takes_no_new_ones(start_paced):
    server = start_paced()
    whole = Stream(server)
    whole.join()
    stream = Stream(server).wait_for_text(server)
    server.process.send_signal(signal.SIGTERM)
    server.wait_until(lambda: server.client.get("/health").status_code == 503, 1.0)
    assert server.client.get("/live").status_code == 200
    refused = server.client.post("/v1/completions", json=LONG)
    assert refused.status_code == 503 and "shutting down" in refused.json()["error"]["message"]
    assert not stream.done
    stream.join()
    assert stream.done and "".join(stream.pieces) == "".join(whole.pieces)
    assert server.process.wait(10) == 0


def test_requests_that_outlast_the_grace_time_are_told(start_paced):
    server = start_paced("--limit", "grace_seconds=0.3")
    stream = Stream(server, LONG | {"prompt": ["a"] * 16}).wait_for_text(server)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(10) == 0
    stream.join()
    assert stream.error == "the server is shutting down" and not stream.done


def test_a_second_sigterm_ends_at_once_whatever_the_engine_does(start_paced):
    server = start_paced()
    Stream(server).wait_for_text(server)
    engine = server.engine_pid()
    os.kill(engine, signal.SIGSTOP)
    server.process.send_signal(signal.SIGTERM)
    server.wait_until(lambda: server.client.get("/health").status_code == 503, 1.0)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(2) == 128 + signal.SIGTERM
    server.wait_until(lambda: not alive(engine), 5.0)


def test_a_killed_server_leaves_no_engine_behind(start):
    server = start()
    Stream(server).wait_for_text(server)
    engine = server.engine_pid()
    server.process.kill()
    server.process.wait()
    server.wait_until(lambda: not alive(engine), 5.0)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended may still be listed until somebody asks how."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_stopped_engine_turns_health_and_goes_on_when_it_may(start):
    server = start("--limit", "stall_seconds=0.7")
    whole = Stream(server)
    whole.join()
    stream = Stream(server).wait_for_text(server)
    os.kill(server.engine_pid(), signal.SIGSTOP)
    seconds = server.wait_until(lambda: server.client.get("/health").status_code == 503, 1.5)
    assert seconds > 0.3
    assert "no step" in server.client.get("/health").json()["error"]["message"]
    assert server.client.get("/live").status_code == 200
    os.kill(server.engine_pid(), signal.SIGCONT)
    server.wait_until(lambda: server.client.get("/health").status_code == 200, 2.0)
    stream.join()
    assert stream.done and stream.pieces and "".join(stream.pieces) == "".join(whole.pieces)
    time.sleep(0.8)
    assert server.client.get("/health").status_code == 200  # idle is not stalled


def test_a_failing_step_fails_its_requests_alone(start_faulty):
    server = start_faulty("--set", "max_num_sequences=1")
    control = server.client.post("/v1/completions", json=LONG).json()["choices"][0]["text"]
    waiting: list[httpx.Response] = []
    first = Stream(server).wait_for_text(server)
    bad = Stream(server, LONG | {"prompt": "my secret is \x01"})
    ask = threading.Thread(target=lambda: waiting.append(server.client.post("/v1/completions", json=LONG)))
    ask.start()
    for thread in (first, bad, ask):
        thread.join()
    assert first.done and "".join(first.pieces) == control
    assert bad.error == "the step that ran this request failed (RuntimeError)" and not bad.done
    assert waiting[0].json()["choices"][0]["text"] == control
    answer = server.client.post("/v1/completions", json=LONG | {"prompt": "my secret is \x01"})
    assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
    assert server.client.get("/health").status_code == 200 and gauges(server) == [0] * 5
    assert "a step failed" in server.messages() and "secret" not in server.messages()


@pytest.mark.parametrize(
    ("token", "code", "said"),
    [("\x02", 9, ""), ("\x03", 1, "DeviceFault"), ("\x04", 1, "AssertionError")],
    ids=["dies", "device fails", "engine raises"],
)
def test_when_the_engine_process_ends_everybody_hears_of_it(start_faulty, token, code, said):
    server = start_faulty()
    streams = [Stream(server, LONG | {"max_tokens": 2000}) for _ in range(3)]  # long enough that none ends by itself
    for stream in streams:
        stream.wait_for_text(server)
    began = time.monotonic()
    answer = server.client.post("/v1/completions", json=LONG | {"prompt": f"my secret {token}"})
    for stream in streams:
        stream.join()
    assert time.monotonic() - began < 2.0
    assert answer.status_code == 503 and {stream.error for stream in streams} == {"the engine process has ended"}
    health = server.client.get("/health")
    assert health.status_code == 503 and "engine process" in health.json()["error"]["message"]
    assert server.client.post("/v1/completions", json=LONG).status_code == 503
    assert server.client.get("/live").status_code == 200 and server.gauges()["deltagram_in_flight"] == 0
    server.wait_until(lambda: f"ended, with exit code {code}\n" in server.messages(), 2.0)
    assert said in server.messages() and "secret" not in server.messages()
