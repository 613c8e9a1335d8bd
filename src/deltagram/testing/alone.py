"""What a request of a tiny model gets alone and without drafts, and engines that are to give it the same."""

import dataclasses
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from deltagram.engine.engine import Engine
from deltagram.engine.params import SamplingParams
from deltagram.engine.request import Request
from deltagram.llm import LLM
from deltagram.step.buckets import ExactBuckets, Ladder

NOISE = 1e-4
CONTEXT = 256


def text_of(length: int, seed: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(256), k=length))


class Alone:
    """A tiny model with its draft head and again without, and what each request gets alone and without drafts."""

    def __init__(self, folder: Path) -> None:
        options: dict[str, Any] = {
            "device": "cpu", "dtype": "float32", "max_context": CONTEXT, "poison": True, "max_num_sequences": 1,
            "max_num_tokens": 256,
        }  # fmt: skip
        self.single, self.plain = LLM(folder, **options), LLM(folder, **options)
        self.heads = LLM(folder, **options, speculation="mtp")
        self.known: dict[tuple[Any, ...], tuple[int, ...]] = {}
        self.texts: list[tuple[int, ...]] = []  # with their continuations, for a drafter that knows them

    def engine(
        self, speculation: str, slots: int = 3, spare_tokens: int = 40, num_pages: int | None = None,
        padded: bool = False, ahead: bool = False, drafter: Callable[..., Sequence[int]] | None = None, **changes: Any,
    ) -> Engine:  # fmt: skip
        llm = self.heads if speculation == "mtp" else self.plain
        options: dict[str, Any] = {"num_draft": 3, "adaptive_drafts": False, "speculation": speculation} | changes
        most = options["num_draft"] if speculation != "off" else 0
        options |= {"max_num_sequences": slots, "max_num_tokens": 63 + slots * (1 + most) + spare_tokens}
        ladder = Ladder((1, 3, 7, slots * (1 + most) + 7), (1, 5, 64, 96, 256), slots, most)
        return Engine(
            llm.engine.model,
            dataclasses.replace(llm.settings, **options),
            llm.tokenizer,
            num_pages=num_pages,
            buckets=ladder if padded else ExactBuckets(most),
            ahead=ahead,
            drafter=drafter,
        )

    def alone(self, prompt: tuple[int, ...], params: SamplingParams, seed: int) -> tuple[int, ...]:
        key = prompt, params.max_tokens, params.temperature, params.stop, params.logprobs, seed
        if key not in self.known:
            self.known[key] = run(self.single.engine, [(prompt, params, seed)])[0]
            self.texts.append(prompt + self.known[key])
        return self.known[key]

    def scripted(self, chance: float, seed: int) -> Callable[..., Sequence[int]]:
        """A drafter that knows what comes, and says it with a probability of `chance` a token."""
        source = random.Random(seed)

        def draft(tokens: Sequence[int], num_draft: int) -> list[int]:
            texts = [text for text in self.texts if text[: len(tokens)] == tokens]
            coming = texts[-1][len(tokens) :][:num_draft] if texts else ()
            right = [token if source.random() < chance else source.randrange(256) for token in coming]
            return right[: source.randint(0, num_draft)] if source.random() < 0.3 else right

        return draft

    def checkpoint_bytes(self, num_draft: int = 3) -> int:
        """What a checkpoint of an engine with up to `num_draft` drafts takes."""
        engine = self.engine("prompt_lookup", 1, num_draft=num_draft, num_pages=1)
        return sum(pool[0].nbytes for pool in engine.runner._pools)

    def is_close(self, request: Request, tokens: tuple[int, ...], alone: tuple[int, ...]) -> bool:
        """Whether noise on the logits gives a request, alone, the first token that is another."""
        at = next(i for i, (one, other) in enumerate(zip(tokens, alone, strict=False)) if one != other)
        source = random.Random(at)
        for _ in range(50):
            bias = request.params.logit_bias or {}
            noise = {token: bias.get(token, 0.0) + source.uniform(-NOISE, NOISE) for token in range(264)}
            params = dataclasses.replace(request.params, logit_bias=noise)
            got = run(self.single.engine, [(request.prompt, params, request.seed)])[0]
            if got[: at + 1] == tokens[: at + 1]:
                return True
        return False


def run(engine: Engine, asked: Sequence[tuple[tuple[int, ...], SamplingParams, int]]) -> list[tuple[int, ...]]:
    requests = [engine.add_request(*each) for each in asked]
    got: dict[int, tuple[int, ...]] = {request.id: () for request in requests}
    while engine.has_work:
        for delta in engine.step():
            assert delta.error is None
            got[delta.request.id] += delta.token_ids
    return [got[request.id] for request in requests]
