"""64 streams at once for minutes, on the shipped model: no error, no memory grown, the tokens of each request alone.

    python benchmarks/server_soak.py [--minutes 10] [--streams 64]

Each stream asks again as soon as it has its answer. Answers are greedy in float32, so each must equal what the server
said to the same prompt when it was alone; where it parts, the two likeliest tokens must have been as good as equal
there (a near tie, below 1e-4, decided by how the sums of a shared step were rounded), and such cases are counted.
"""

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from environment import save
from rich.console import Console

from deltagram.testing.server import RunningServer

NEAR = 1e-4
STARTS = ["It was a fine day", "The king", "Alice", "Sir,"]
PROMPTS = [f"{STARTS[i % 4]} {i} " * (1 + i % 9) for i in range(256)]


def asked(i: int) -> dict[str, Any]:
    body = {"prompt": PROMPTS[i], "max_tokens": 16 + 7 * (i % 13), "temperature": 0, "ignore_eos": True, "logprobs": 2}
    return body | {"stream": True}


async def answer(client: httpx.AsyncClient, i: int) -> list[tuple[str, dict[str, float]]]:
    """Tokens, each with its two likeliest."""
    said: list[tuple[str, dict[str, float]]] = []
    done = False
    async with client.stream("POST", "/v1/completions", json=asked(i)) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                logprobs = event["choices"][0]["logprobs"]
                said += zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True)
            done = done or line == "data: [DONE]"
    assert done and len(said) == asked(i)["max_tokens"], (done, len(said))
    return said


def parts_at_near_tie(alone: list[tuple[str, dict[str, float]]], shared: list[tuple[str, dict[str, float]]]) -> bool:
    """False where the tokens are equal; an error where they part for no good reason."""
    for (token, top), (other, _) in zip(alone, shared, strict=True):
        if token != other:
            best, second = sorted(top.values(), reverse=True)
            assert best - second < NEAR, (token, other, top)
            return True
    return False


def memory(pid: int) -> int:
    """Resident memory of a process, MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) // 1024


async def soak(server: RunningServer, streams: int, seconds: float) -> dict[str, Any]:
    pids = {"server": server.process.pid, "engine": server.engine_pid()}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits) as client:
        alone = [await answer(client, i) for i in range(streams)]
        counts = {"answers": 0, "tokens": 0, "near_ties": 0}
        samples: list[dict[str, float]] = []
        end = time.monotonic() + seconds

        async def ask_again(i: int) -> None:
            while time.monotonic() < end:
                said = await answer(client, i)
                counts["answers"] += 1
                counts["tokens"] += len(said)
                counts["near_ties"] += parts_at_near_tie(alone[i], said)

        async def watch() -> None:
            while time.monotonic() < end:
                await asyncio.sleep(min(10.0, seconds / 10))
                sample = {name: memory(pid) for name, pid in pids.items()}
                samples.append({"second": round(seconds - (end - time.monotonic())), **sample})

        await asyncio.gather(watch(), *(ask_again(i) for i in range(streams)))
    gauges = {name: value for name, value in server.gauges().items() if name.split("_", 1)[1] in GAUGES}
    assert set(gauges.values()) == {0.0}, gauges
    return {"streams": streams, "seconds": seconds, **counts, "memory_mib": samples, "gauges_after": gauges}


GAUGES = ("in_flight", "running", "waiting", "cache_pages_used", "state_slots_used")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--streams", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, RunningServer(Path(folder), "--device", "cpu") as server:
        results = asyncio.run(soak(server, options.streams, options.minutes * 60))
        samples = results["memory_mib"]
        settled = samples[len(samples) // 5 :]  # the first fifth fills caches
        for name in ("server", "engine"):
            growth = settled[-1][name] - settled[0][name]
            results[f"{name}_growth_mib"] = growth
            assert growth <= 0.05 * settled[0][name], f"{name} grew by {growth} MiB: {samples}"
        assert server.client.get("/health").status_code == 200
    Console().print({name: value for name, value in results.items() if name != "memory_mib"})
    save("server_soak", results)


if __name__ == "__main__":
    main()
