"""CPU decode and prefill of the shipped model, against transformers' generate on the same weights, fp32, same threads.

The two take turns, so that a machine that slows down slows both; a figure is the median over the turns of the ratio
of two neighbours. Each turn is run once before it is timed: threads of either spin for milliseconds when they are
done, on the core that the other's need, and its weights have left the caches. A decode step's time is that of NEW
tokens less that of one, over NEW - 1.

    python benchmarks/cpu_generate.py [--rounds 7] [--threads 2 1]
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from environment import save
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from deltagram import LLM, SamplingParams
from deltagram.llm import shipped_model

NEW = 33
PROMPT = 64


def seconds(run: Callable[[], Any]) -> float:
    run()
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()], help="torch's, in turn")
    rounds, threads = parser.parse_args().rounds, parser.parse_args().threads
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    oracle = AutoModelForCausalLM.from_pretrained(shipped_model(), dtype=torch.float32).eval()
    llm = LLM(device="cpu", dtype="float32", max_num_tokens=512)
    generator = torch.Generator().manual_seed(0)

    def theirs(prompts: torch.Tensor, new: int) -> float:
        with torch.inference_mode():
            return seconds(lambda: oracle.generate(prompts, max_new_tokens=new, min_new_tokens=new, do_sample=False))

    def ours(prompts: torch.Tensor, new: int) -> float:
        params = SamplingParams(max_tokens=new, ignore_eos=True, temperature=0.0)
        return seconds(lambda: llm.generate(prompts.tolist(), params))

    def step(run: Callable[[torch.Tensor, int], float], prompts: torch.Tensor) -> float:
        first = run(prompts, 1)
        return (run(prompts, NEW) - first) / (NEW - 1)

    cases = {f"decode step, batch {batch}": (step, (batch, PROMPT)) for batch in (1, 8)}
    cases["prefill of 512 tokens"] = (lambda run, prompts: run(prompts, 1), (1, 512))  # type: ignore[assignment]
    results = {}
    for count, (case, (measure, shape)) in itertools.product(threads, cases.items()):
        torch.set_num_threads(count)
        name = f"{case}, {count} threads"
        prompts = torch.randint(3, llm.config.vocab_size, shape, generator=generator)
        measure(theirs, prompts), measure(ours, prompts)
        pairs = []
        for _ in track(range(rounds), name, console=Console(stderr=True), transient=True):
            pairs.append((measure(theirs, prompts), measure(ours, prompts)))
        results[name] = {
            "transformers_ms": statistics.median(1e3 * a for a, _ in pairs),
            "deltagram_ms": statistics.median(1e3 * b for _, b in pairs),
            "times_faster": statistics.median(a / b for a, b in pairs),
            "pairs_ms": [[round(1e3 * a, 3), round(1e3 * b, 3)] for a, b in pairs],
        }
    table = Table("", "transformers ms", "deltagram ms", "times faster")
    for name, row in results.items():
        table.add_row(name, *(f"{row[key]:.2f}" for key in ("transformers_ms", "deltagram_ms", "times_faster")))
    Console().print(table)
    print(save("cpu_generate", results))


if __name__ == "__main__":
    main()
