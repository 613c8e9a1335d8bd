"""What the server costs: tokens a second of 16 streams through HTTP, beside the engine's own, on the shipped model.

Both are loaded at once and take turns, so that a machine that slows down slows both; a figure is the median over the
turns of the ratio of two neighbours. Each has one thread of its own for the model.

    python benchmarks/server_overhead.py [--rounds 7]
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

import httpx
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
    async def stream(client: httpx.AsyncClient, prompt: str) -> int:
        body = {"prompt": prompt, "max_tokens": NEW, "temperature": 0, "ignore_eos": True, "stream": True}
        count = 0
        async with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                count += line.startswith("data: {")
        return count

    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        began = time.perf_counter()
        chunks = await asyncio.gather(*(stream(client, prompt) for prompt in PROMPTS))
        seconds = time.perf_counter() - began
    assert sum(chunks) > 0.9 * TOKENS, "tokens came in lumps"
    return TOKENS / seconds


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
            for who in ("engine", "server") if i % 2 else ("server", "engine"):
                rates[who] = engine_rate(llm) if who == "engine" else asyncio.run(server_rate(server.url))
            turns.append(rates | {"ratio": rates["server"] / rates["engine"]})
            Console().print(f"engine {rates['engine']:.0f}, server {rates['server']:.0f} tokens/s")
    medians = {name: statistics.median(turn[name] for turn in turns) for name in ("engine", "server", "ratio")}
    Console().print(f"server / engine: {medians['ratio']:.3f}")
    save("server_overhead", {"streams": STREAMS, "new_tokens": NEW, "medians": medians, "turns": turns})


if __name__ == "__main__":
    main()
