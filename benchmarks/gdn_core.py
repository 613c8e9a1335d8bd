"""The Gated DeltaNet core on a GPU: its kernels beside flash-linear-attention's, and whole steps, eager and captured.

    python benchmarks/gdn_core.py [--quick]

Writes results/gdn_kernels.json and results/gdn_core.json. Steps are the core and its gated norm, over 8 layers with
pools of their own, times per layer. Padding is the share of the bucket's tokens that no request uses.
"""

import argparse
from typing import Any

import torch
from environment import save
from kernels import (
    bench_causal_conv1d,
    bench_gated_delta_chunk,
    bench_gated_delta_decode,
    bench_gated_delta_prep,
    bench_gated_delta_recurrent,
    bench_rms_norm_gated,
)

from deltagram.gdn.state import STORED_EVERY
from deltagram.kernels._gates import FEW_STATES
from deltagram.kernels.rms_norm_gated import rms_norm_gated
from deltagram.step.plan import Bucket, Kind
from deltagram.testing.core_steps import CoreShape, CoreSteps, Part, Stream, oracle
from deltagram.testing.timing import captured_us, eager_us, launches

SHAPE = CoreShape(16, 32, 128, 128)
LAYERS, SLOTS = 8, 64


def batch(steps: CoreSteps, decodes: int, drafts: int, prefills: tuple[int, ...]) -> list[Part]:
    """Decode (or, with drafts, verify) sequences deep in their text, then prompts."""
    streams = [steps.stream(1 + drafts, slot) for slot in range(decodes)]
    kind = Kind.VERIFY if drafts else Kind.DECODE
    parts = [Part(stream, kind, 1 + drafts) for stream in streams]
    return parts + [Part(steps.stream(size, decodes + i), Kind.PREFILL, size) for i, size in enumerate(prefills)]


STEPS = {
    "1 decode": (1, 0, (), Bucket(1, 1, False)),
    "48 decode": (48, 0, (), Bucket(48, 48, False)),
    "48 decode in a bucket of 64": (48, 0, (), Bucket(64, 64, False)),
    "8 verify of 6": (8, 5, (), Bucket(48, 8, False)),
    "48 decode, 16-token chunk": (48, 0, (16,), Bucket(64, 49, True)),
    "48 decode, 16-token chunk, bucket of 128": (48, 0, (16,), Bucket(128, 64, True)),
    "16 decode, 496-token chunk": (16, 0, (496,), Bucket(512, 17, True)),
    "prompt of 2048": (0, 0, (2048,), Bucket(2048, 1, True)),
    "32 prompts of 64": (0, 0, (64,) * 32, Bucket(2048, 32, True)),
}


def measure_steps() -> list[dict[str, Any]]:
    device = torch.device("cuda")
    layers = [
        CoreSteps(SHAPE, SLOTS, torch.bfloat16, device, max_draft=5, seed=i, every=STORED_EVERY, few=FEW_STATES)
        for i in range(LAYERS)
    ]
    for layer in layers:
        for pool in layer.pools():
            pool.normal_(std=0.1)
    weight = torch.rand(SHAPE.value_dim, device=device)
    results = []
    for name, (decodes, drafts, prefills, bucket) in STEPS.items():
        parts = batch(layers[0], decodes, drafts, prefills)
        rows = layers[0].rows(parts, bucket)
        layers[0].come_a_long_way(parts)
        table = layers[0].table(parts, bucket)
        z = torch.randn(bucket.tokens, SHAPE.value_heads, SHAPE.value_dim, device=device).bfloat16()

        def call(layer: CoreSteps, table: Any = table, rows: torch.Tensor = rows, z: torch.Tensor = z) -> None:
            rms_norm_gated(layer.run(table, rows), z, weight, table.cu_tokens, 1e-6, "silu")

        calls = [lambda layer=layer, call=call: call(layer) for layer in layers]
        host, eager = eager_us(calls)
        tokens = sum(part.num_new for part in parts)
        results.append(
            {
                "step": name,
                "bucket": str(bucket),
                "padding": 1 - tokens / bucket.tokens,
                "launches": launches(calls[0]),
                "captured_us": captured_us(calls),
                "eager_us": eager,
                "eager_host_us": host,
                "state_us_at_3.4_tb_per_s": layers[0].state_traffic(table) / 3.4e6,
            }
        )
    return results


def measure_state_dtypes() -> list[dict[str, Any]]:
    """What a bf16 state costs: error against float64 of the outputs of a prompt of 512 and 512 decoded tokens."""
    rows = []
    for state in (torch.float32, torch.bfloat16):
        steps = CoreSteps(CoreShape(2, 4, 128, 128), 1, torch.bfloat16, torch.device("cuda"), 0, state)
        stream = steps.stream(1024, 0)
        outputs, _ = oracle(steps, Stream(stream.qkv, stream.a, stream.b, 0))
        out = [steps.step([Part(stream, Kind.PREFILL, 512)])[0]]
        out += [steps.step([Part(stream, Kind.DECODE)])[0] for _ in range(512)]
        error = torch.cat(out).double().cpu() - outputs
        decoded = error[512:].norm(dim=(1, 2)) / outputs[512:].norm(dim=(1, 2))
        speed = bench_gated_delta_decode.measure(state, (1, 64, 256))
        rows.append(
            {
                "state": str(state),
                "prefill_error": (error[:512].norm() / outputs[:512].norm()).item(),
                "decode_error": (error[512:].norm() / outputs[512:].norm()).item(),
                "worst_token_error": decoded.max().item(),
                "decode_us": {row["sequences"]: row["us"] for row in speed},
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="whole steps and dtypes of the state only")
    quick = parser.parse_args().quick
    steps = {"steps": measure_steps(), "state_dtypes": measure_state_dtypes()}
    for row in steps["steps"] + steps["state_dtypes"]:
        print(row)
    save("gdn_core", steps)
    if quick:
        return
    modules = (
        bench_gated_delta_recurrent, bench_gated_delta_chunk,
        bench_causal_conv1d, bench_gated_delta_prep, bench_rms_norm_gated,
    )  # fmt: skip
    kernels = {}
    for module in modules:
        kernels[module.__name__.removeprefix("kernels.bench_")] = rows = module.measure()
        for row in rows:
            print(row)
    save("gdn_kernels", kernels)


if __name__ == "__main__":
    main()
