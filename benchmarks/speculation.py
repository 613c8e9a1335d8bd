"""What speculation costs and gains.

    python benchmarks/speculation.py cpu     prompt lookup with the shipped model: its own text, and repeated text;
                                             --head FOLDER: and the draft head of a copy of it that has one
    python benchmarks/speculation.py gpu     the 4B shape, captured: a verify step beside a decode step, tokens a second
                                             with a synthetic acceptance of 3.5 tokens a step of 1 + 5 beside none, and
                                             the bytes of state that a step writes

Writes results/speculation_cpu.json (speculation_cpu_head.json with a head) or speculation_cuda.json. Random weights say
nothing about what a drafter is worth, so on a GPU the acceptance is given. On a CPU all take turns, and each step
counts with the first decile of its size's times: what held it up beyond that was something else on the machine.
"""

import argparse
import statistics
import time
from typing import Any

import torch
from environment import save

from deltagram import LLM, SamplingParams
from deltagram.engine.engine import Engine
from deltagram.engine.settings import Settings, resolve
from deltagram.layers.basic import Factory
from deltagram.models.mtp import add_head
from deltagram.models.qwen3_5 import Qwen35
from deltagram.step.buckets import Ladder
from deltagram.testing.shapes import qwen3_5_config, randomise
from deltagram.testing.step_harness import Mix, StepHarness

K, MEAN, CONTEXT = 5, 3.5, 128
PROMPTS = ("It is a truth universally acknowledged, that", "In the beginning", "Call me", "The heart of the matter")


def quick(ms: list[float]) -> float:
    return statistics.quantiles(ms, n=10, method="inclusive")[0] if len(ms) > 1 else ms[0]


def cpu(rounds: int, head: str | None) -> dict[str, Any]:
    """Steps of the same generation without drafts, with prompt lookup, and with the draft head of a checkpoint that
    is the shipped model otherwise."""
    llms = {"off": LLM(device="cpu", max_num_sequences=1)}
    llms["prompt lookup"] = LLM(device="cpu", max_num_sequences=1, speculation="prompt_lookup", num_draft=K)
    for k in (1, 2, 3) if head else ():
        options: dict[str, Any] = {"speculation": "mtp", "num_draft": k}
        llms[f"draft head, k = {k}"] = LLM(head, device="cpu", max_num_sequences=1, adaptive_drafts=False, **options)
    if head:
        llms["draft head, adaptive"] = LLM(head, device="cpu", max_num_sequences=1, **options)
    own = SamplingParams(max_tokens=160, temperature=0.8, seed=1, ignore_eos=True)
    passage = llms["off"].generate(PROMPTS[0], SamplingParams(max_tokens=60, temperature=0.8, seed=2, ignore_eos=True))
    repeated = (PROMPTS[0] + passage[0].outputs[0].text + "\n") * 3 + PROMPTS[0]
    copied = SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True)
    results: dict[str, Any] = {}
    for name, prompts, params in (("its own text", PROMPTS, own), ("repeated text", (repeated,), copied)):
        steps: dict[str, dict[str, list[float]]] = {label: {} for label in llms}
        before = {label: (llm.stats.drafted_tokens, llm.stats.accepted_tokens) for label, llm in llms.items()}
        for turn in range(rounds):
            texts: dict[str, list[tuple[int, ...]]] = {label: [] for label in llms}
            for prompt in prompts:
                for label, llm in list(llms.items())[:: 1 if turn % 2 else -1]:
                    llm.stats.steps.clear()
                    texts[label].append(llm.generate(prompt, params)[0].outputs[0].token_ids)
                    for step in llm.stats.steps:
                        steps[label].setdefault(f"{step['kind']} of {step['tokens']}", []).append(step["ms"])
            assert all(each == texts["off"] for each in texts.values()), "the tokens are the same"
        typical = {label: sum(len(ms) * quick(ms) for ms in each.values()) for label, each in steps.items()}
        results[name] = {}
        for label, llm in llms.items():
            results[name][label] = {
                "steps and their ms": {size: (len(ms), quick(ms)) for size, ms in sorted(steps[label].items())},
            }
            if llm.engine.speculation is None:
                continue
            drafted = llm.stats.drafted_tokens - before[label][0]
            accepted = llm.stats.accepted_tokens - before[label][1]
            results[name][label] |= {
                "speedup": typical["off"] / typical[label],
                "drafted a token": drafted / rounds / sum(len(each) for each in texts[label]),
                "accepted of drafted": accepted / max(drafted, 1),
                "price of a draft": llm.engine.speculation.cost.price(1),
            }
        print(name, results[name], flush=True)
    return results


def model_4b() -> Qwen35:
    make = Factory(torch.device("cuda"), torch.bfloat16)
    model = Qwen35(qwen3_5_config("4B"), 8192, make)
    add_head(model, make)
    randomise(model)
    assert model.mtp is not None
    for weight in model.mtp.weights({}).values():
        for part in weight.parts:
            part.normal_(0.0, 0.02)
    return model


def without_head(model: Qwen35) -> Any:
    """The model, whose draft head nobody sees, and how to give it back."""
    head, layer = model.mtp, model.attention_layers.pop()
    model.mtp = None

    def give_back() -> None:
        model.mtp = head
        model.attention_layers.append(layer)

    return give_back


def steps(model: Qwen35) -> dict[str, Any]:
    """Device times of captured steps. A verify step accepts MEAN - 1 drafts on average, which the next one replays."""
    results: dict[str, Any] = {}
    for name, mixes, most in (
        ("off", [Mix(decode=8), Mix(decode=1)], 0),
        ("on", [Mix(verify=8, num_draft=K), Mix(decode=8), Mix(verify=1, num_draft=K), Mix(decode=1)], K),
    ):
        harness = StepHarness(model, torch.device("cuda"), 8, CONTEXT, 64, most, acceptance=MEAN if most else 1.0)
        harness.capture([harness.bucket(mix) for mix in mixes])
        for mix in mixes:
            results[f"{name}, {mix}"] = harness.device_us(mix)
        del harness
        torch.cuda.empty_cache()
    for count in (1, 8):
        verify = results[f"on, {Mix(verify=count, num_draft=K)}"]
        results[f"verify / decode, {count}"] = verify / results[f"off, {Mix(decode=count)}"]
    return results


def tokens_a_second(model: Qwen35, speculation: str, counts: tuple[int, ...] = (1, 8)) -> dict[str, Any]:
    """Of an engine with captured steps, the time between the first and the last token of all requests."""
    options = {} if speculation == "off" else {"num_draft": K, "adaptive_drafts": False, "synthetic_acceptance": MEAN}
    settings = resolve(
        Settings(device="cuda", max_context=1024, max_num_sequences=8, max_num_tokens=256, speculation=speculation,
                 **options),  # type: ignore[arg-type]
        model.config,
    )  # fmt: skip
    most = settings.max_draft
    decode = sorted({1, 1 + most, 8, 8 * (1 + most), *(8 * (1 + most) * part // 4 for part in (1, 2, 3) if most)})
    ladder = Ladder(tuple(decode), (256,), 8, most)
    drafter = (lambda tokens, count: [0] * count) if speculation == "drafter" else None
    engine = Engine(model, settings, buckets=ladder, drafter=drafter)
    params = SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True)
    results: dict[str, Any] = {}
    for count in counts:
        speeds = []
        for _ in range(3):
            for n in range(count):
                engine.add_request([7 * n + i for i in range(30)], params, 0)
            while any(request.num_output == 0 for request in engine.scheduler.running) or engine.scheduler.waiting:
                engine.step()
            began, tokens = time.perf_counter(), 0
            while len(engine.scheduler.running) == count:
                tokens += sum(len(delta.token_ids) for delta in engine.step())
            speeds.append(tokens / (time.perf_counter() - began))
            while engine.has_work:
                engine.step()
        results[f"batch {count}"] = statistics.median(speeds)
    stats = engine.stats
    if most:
        results["tokens a verify step"] = 1 + K * stats.accepted_tokens / max(stats.drafted_tokens, 1)
    engine.scheduler.check_empty()
    return results


def state_bytes(model: Qwen35) -> dict[str, Any]:
    """Written by a verify step of one request in all layers: a state (where it stores it) and what the rings take, or
    1 + k states."""
    one = kept = 0
    for layer in model.linear_layers:
        one += layer.num_value_heads * layer.value_dim * layer.key_dim * 4
        inputs = (layer.num_key_heads * layer.key_dim + layer.num_value_heads * layer.value_dim) * 2
        kept += K * (inputs + 2 * layer.num_value_heads * 4)
    return {"ours": one + kept, "1 + k states": (1 + K) * one, "ratio": (1 + K) * one / (one + kept)}


def gpu() -> dict[str, Any]:
    results: dict[str, Any] = {}
    model = model_4b()
    give_back = without_head(model)
    results["state bytes"] = state_bytes(model)
    results["device us"] = steps(model)
    print(results, flush=True)
    save("speculation_cuda", results)
    for speculation in ("off", "drafter", "mtp"):
        if speculation == "mtp":
            give_back()
        results[f"tokens a second, {speculation}"] = tokens_a_second(model, speculation)
        torch.cuda.empty_cache()
        print(speculation, results[f"tokens a second, {speculation}"], flush=True)
        save("speculation_cuda", results)
    for speculation in ("drafter", "mtp"):
        for count in (1, 8):
            ours = results[f"tokens a second, {speculation}"][f"batch {count}"]
            results[f"speedup, {speculation}, batch {count}"] = ours / results["tokens a second, off"][f"batch {count}"]
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("where", choices=("cpu", "gpu"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--head", help="checkpoint folder: tools/train_draft_head.py's output over the shipped model")
    arguments = parser.parse_args()
    if arguments.where == "cpu":
        name = "speculation_cpu_head" if arguments.head else "speculation_cpu"
        print(save(name, cpu(arguments.rounds, arguments.head)))
    else:
        print(save("speculation_cuda", gpu()))
