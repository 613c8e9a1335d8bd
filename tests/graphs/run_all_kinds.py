"""Makes an engine ready, then runs all that steps may hold, once. Started by test_graphs_gpu.py, in a fresh process.

    python run_all_kinds.py FOLDER drafter|mtp

Prints, as JSON, how many kernels were compiled `before` the engine was ready, the names of those compiled `after`, and
how many `bytes` of device memory its steps took.
"""

import itertools
import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton

from deltagram import LLM, SamplingParams
from deltagram.engine.engine import Engine
from deltagram.engine.request import Request
from deltagram.testing.alone import text_of

PARAMS = (
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.9, max_tokens=9, logprobs=2, ignore_eos=True),
    SamplingParams(temperature=1.3, top_k=7, frequency_penalty=0.4, repetition_penalty=1.2, max_tokens=12),
    SamplingParams(temperature=0.7, min_p=0.1, presence_penalty=0.2, max_tokens=9, logprobs=20, ignore_eos=True),
    SamplingParams(temperature=0.0, logit_bias={5: 100.0}, min_tokens=6, max_tokens=16),  # one token over and over
)


class EvenTokens:
    """A grammar that allows every other token."""

    finished = False

    def __init__(self, vocab: int) -> None:
        self.allowed = np.arange(vocab) % 2 == 0

    def accept(self, token: int) -> None:
        assert self.allowed[token]


def draft(tokens: Sequence[int], count: int) -> list[int]:
    return [5] * count


def requests(engine: Engine) -> list[Request]:
    """Texts that fill parts of a chunk, whole ones and several, alone and behind a beginning that all know."""
    asked = []
    sizes = (1, 5, 63, 64, 65, 100)
    for n, (shared, size) in enumerate(itertools.product((0, 130), sizes)):
        prompt = text_of(130, 1)[:shared] + text_of(size, size)
        grammar = EvenTokens(engine.model.config.vocab_size) if n % 4 == 3 else None
        asked.append(engine.make_request(prompt, PARAMS[n % len(PARAMS)], n, constraint=grammar))
    return asked


def run(engine: Engine, seldom: int) -> None:
    """All of them, one more every `seldom` steps."""
    waiting = requests(engine)
    for step in itertools.count():
        if waiting and step % seldom == 0:
            engine.add(waiting.pop(0))
        if not waiting and not engine.has_work:
            return
        for delta in engine.step():
            assert delta.error is None, delta.error


def main(folder: str, speculation: str) -> None:
    compiled: list[str] = []
    triton.knobs.compilation.listener = lambda *, src, **_: compiled.append(
        f"{src.fn.module}.{src.name} {src.signature}"
    )
    options: dict[str, Any] = {"max_num_sequences": 4, "max_num_tokens": 96, "max_context": 256}
    options |= {"num_draft": 3, "adaptive_drafts": False, "prefix_cache_bytes": 8 << 20}
    options |= {"speculation": "mtp"} if speculation == "mtp" else {"drafter": draft}
    engine = LLM(folder, device="cuda", dtype="bfloat16", **options).engine
    before, reserved = len(compiled), torch.cuda.memory_reserved()
    for seldom in (1, 4, 20):  # in company, in changing company, alone
        run(engine, seldom)
    stats = engine.stats
    assert {record["kind"] for record in stats.steps} == {"prefill", "decode", "mixed"}
    assert stats.prefix_hits > 10 and stats.drafted_tokens > 200 and stats.eager_segments == 0, stats
    assert speculation == "mtp" or stats.accepted_tokens > 50
    grown = torch.cuda.memory_reserved() - reserved
    print(json.dumps({"before": before, "after": compiled[before:], "bytes": grown}))


if __name__ == "__main__":
    main(*sys.argv[1:])
