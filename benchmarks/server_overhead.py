"""What the server costs: tokens a second of 16 streams through HTTP, beside the engine's own, on the shipped model.

Both are loaded at once and take turns, so that a machine that slows down slows both; a figure is the median over the
turns of the ratio of two neighbours. Each has one thread of its own for the model.

On a machine that others use, the two cores that a server needs are not there, and the ratio says little. `busy_ratio`
then says more: the share of the time that the engine spends inside steps, behind the server over alone.

    python benchmarks/server_overhead.py [--rounds 7]
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
from environment import save
from rich.console import Console

from deltagram import LLM, SamplingParams
from deltagram.testing.server import RunningServer

STREAMS, NEW = 16, 128
PROMPTS = [f"It was day number {i} and" for i in range(STREAMS)]
TOKENS = STREAMS * NEW


def engine_rate(llm: LLM) -> float:
    params = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
    began = time.perf_counter()
    done = llm.generate(PROMPTS, params)
    seconds = time.perf_counter() - began
    assert sum(len(completion.outputs[0].token_ids) for completion in done) == TOKENS
    return TOKENS / seconds


async def server_rate(url: str) -> float:
    """The client reads bytes and counts events, so that it takes little of what it measures."""
    host, port = url.removeprefix("http://").split(":")

    async def stream(prompt: str) -> int:
        reader, writer = await asyncio.open_connection(host, int(port))
        asked = {"prompt": prompt, "max_tokens": NEW, "temperature": 0, "ignore_eos": True, "stream": True}
        body = json.dumps(asked).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
        )
        writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        said = await reader.read()
        writer.close()
        assert said.startswith(b"HTTP/1.1 200") and b"data: [DONE]" in said, said[-600:]
        return said.count(b"data: {")

    began = time.perf_counter()
    chunks = await asyncio.gather(*map(stream, PROMPTS))
    seconds = time.perf_counter() - began
    assert sum(chunks) > 0.9 * TOKENS, "tokens came in lumps"
    return TOKENS / seconds


def server_step_seconds(server: RunningServer) -> float:
    lines = server.client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("deltagram_step_seconds_sum{"))


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    llm = LLM(device="cpu")
    with tempfile.TemporaryDirectory() as folder, RunningServer(Path(folder), "--device", "cpu") as server:
        engine_rate(llm)
        asyncio.run(server_rate(server.url))
        turns = []
        for i in range(rounds):
            rates: dict[str, float] = {}
            before = llm.stats.seconds, server_step_seconds(server)
            for who in ("engine", "server") if i % 2 else ("server", "engine"):
                rates[who] = engine_rate(llm) if who == "engine" else asyncio.run(server_rate(server.url))
            busy = {
                "engine": (llm.stats.seconds - before[0]) * rates["engine"] / TOKENS,
                "server": (server_step_seconds(server) - before[1]) * rates["server"] / TOKENS,
            }
            ratios = {"ratio": rates["server"] / rates["engine"], "busy_ratio": busy["server"] / busy["engine"]}
            turns.append(rates | ratios)
            Console().print(f"engine {rates['engine']:.0f}, server {rates['server']:.0f} tokens/s")
        cpu = {"server": cpu_seconds(server.process.pid), "engine": cpu_seconds(server.engine_pid())}
    medians = {
        name: statistics.median(turn[name] for turn in turns) for name in ("engine", "server", "ratio", "busy_ratio")
    }
    Console().print(
        f"server / engine: {medians['ratio']:.3f}; of the share of time in steps: {medians['busy_ratio']:.3f}"
    )
    save(
        "server_overhead",
        {"streams": STREAMS, "new_tokens": NEW, "medians": medians, "turns": turns, "cpu_seconds": cpu},
    )


if __name__ == "__main__":
    main()
