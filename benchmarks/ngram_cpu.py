"""Hash and lookup of 4096 tokens on the CPU, against transformers' PLE embedding on the same table, in turns.

python benchmarks/ngram_cpu.py          needs transformers 5.24
"""

import statistics
import time
from collections.abc import Callable

import torch
from environment import save
from transformers import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextNGramEmbedding

from deltagram.ngram.formats import RowFormat
from deltagram.ngram.spec import HashConstants, qwen4_exp_spec
from deltagram.ngram.stores import DeviceStore

TOKENS, VOCAB, BASE, WIDTH, EOS = 4096, 248320, 50021, 2560, 248044
ROUNDS = 40
CPU = torch.device("cpu")


class Identity(torch.nn.Module):
    """In the table's place, to time the hash alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.empty(0)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return ids[..., None]


def in_turns(calls: dict[str, Callable[[], object]]) -> dict[str, dict[str, float]]:
    """Median and least wall-clock microseconds of each call, one of each after the other."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - begin) * 1e6)
    return {
        name: {"median us": round(statistics.median(each), 1), "least us": round(min(each), 1)}
        for name, each in times.items()
    }


def main() -> None:
    config = Qwen4ExpTextConfig(
        vocab_size=VOCAB, ple_layer_ids=[1], ngram_vocab_size_base=BASE, eos_token_id=EOS, ple_embed_dim=WIDTH
    )
    theirs = Qwen4ExpTextNGramEmbedding(config, WIDTH, 0, 0).eval()
    sizes = {"vocab_size": VOCAB, "max_order": 3, "heads": 8, "base": BASE, "divisor": 128, "seed": 1234}
    spec = qwen4_exp_spec(**sizes, end_of_sequence=EOS, layer=0)
    constants = HashConstants.of([spec], CPU)
    store = DeviceStore(spec.num_rows, RowFormat(torch.float32, WIDTH // 16), CPU)
    table = theirs.ngram_embedding
    with torch.no_grad():
        store.values.copy_(table.weight)
    text = torch.randint(VOCAB, (1, TOKENS))
    history, position = text.int(), torch.arange(TOKENS, dtype=torch.int32)
    sequence, row = torch.zeros(TOKENS, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    out = torch.empty(TOKENS, 16, WIDTH // 16)

    def our_ids() -> torch.Tensor:
        return constants.ids(history, sequence, row, position)[0]

    with torch.no_grad():
        assert torch.equal(store.lookup(our_ids(), torch.float32, out).flatten(1), theirs(text, None)[0])
        found = in_turns(
            {
                "transformers, hash and lookup": lambda: theirs(text, None),
                "deltagram, hash and lookup": lambda: store.lookup(our_ids(), torch.float32, out),
            }
        )
        theirs.ngram_embedding = Identity()
        found |= in_turns({"transformers, hash": lambda: theirs(text, None), "deltagram, hash": our_ids})
    for part in ("hash", "hash and lookup"):
        ratio = found[f"transformers, {part}"]["least us"] / found[f"deltagram, {part}"]["least us"]
        found[f"{part}: times faster, least of each"] = round(ratio, 2)  # type: ignore[assignment]
    for name, value in found.items():
        print(name, value)
    print(save("ngram_cpu", found))


if __name__ == "__main__":
    main()
