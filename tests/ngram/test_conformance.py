"""The conformance kit: our own implementation passes it, its golden vectors are others', and wrong engines fail it."""

import importlib.util
import json
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from deltagram.kernels.row_decode import row_decode
from deltagram.layers.basic import Factory
from deltagram.ngram.engram import EngramLayer
from deltagram.ngram.formats import RowFormat
from deltagram.ngram.layer import PLELayer
from deltagram.ngram.longcat import LongCatEmbedding
from deltagram.ngram.spec import HashConstants, HashSpec, qwen4_exp_spec
from deltagram.ngram.stores import DeviceStore
from deltagram.ngram.verify import ids_by_the_rules
from deltagram.testing.ngram import FORMATS
from deltagram.testing.ngram_checkpoints import FAMILIES, engram_hashes, longcat_hash
from deltagram.testing.ngram_conformance import (
    SCALE,
    Disagreement,
    fuzz_hash,
    fuzz_lookup,
    fuzz_stateful_hash,
    golden,
)

CPU = torch.device("cpu")


def specs_of(family: str) -> list[HashSpec]:
    if family == "engram":
        return engram_hashes()
    if family == "longcat":
        return [longcat_hash()]
    sizes = {"vocab_size": 50, "max_order": 3, "heads": 2, "base": 31, "divisor": 8, "seed": 1234, "end_of_sequence": 3}
    return [qwen4_exp_spec(**sizes, layer=layer) for layer in range(2)]


def hash_text(specs: list[HashSpec], tokens: list[int], dead: list[bool]) -> list[list[list[int]]]:
    count = len(tokens)
    zeros = torch.zeros(count, dtype=torch.int32)
    history, marks = torch.tensor([tokens], dtype=torch.int32), torch.tensor([dead])
    position = torch.arange(count, dtype=torch.int32)
    return HashConstants.of(specs, CPU).ids(history, zeros, zeros[:1], position, marks).tolist()


class Engine:
    """Our op as an engine uses it: a history and nothing else, from which each step hashes what is new."""

    def __init__(self, specs: list[HashSpec]) -> None:
        self.constants = HashConstants.of(specs, CPU)
        self.history = torch.full((4, 1 << 15), 2**31 - 1, dtype=torch.int32)
        self.dead = torch.ones(4, 1 << 15, dtype=torch.bool)
        self.length = [0] * 4

    def extend(self, request: int, tokens: list[int], dead: list[bool]):
        begin, end = self.length[request], self.length[request] + len(tokens)
        self.history[request, begin:end] = torch.tensor(tokens, dtype=torch.int32)
        self.dead[request, begin:end] = torch.tensor(dead)
        self.length[request] = end
        sequence = torch.zeros(len(tokens), dtype=torch.int32)
        row, position = torch.tensor([request], dtype=torch.int32), torch.arange(begin, end, dtype=torch.int32)
        return self.constants.ids(self.history, sequence, row, position, self.dead).tolist()

    def truncate(self, request: int, length: int) -> None:
        self.length[request] = length


class CachingEngine(Engine):
    """What this project does not do: the last tokens of each request in a cache, which a rejected draft does not
    undo."""

    def __init__(self, specs: list[HashSpec]) -> None:
        super().__init__(specs)
        self.specs, self.cache = specs, {request: ([], []) for request in range(4)}

    def extend(self, request: int, tokens: list[int], dead: list[bool]):
        past, past_dead = self.cache[request]
        whole, whole_dead = past + tokens, past_dead + dead
        keep = self.specs[0].max_order - 1
        self.cache[request] = (whole[-keep:], whole_dead[-keep:])
        return [ids_by_the_rules(spec, whole, whole_dead)[len(past) :] for spec in self.specs]

    def truncate(self, request: int, length: int) -> None:
        pass


@pytest.mark.parametrize("family", FAMILIES)
def test_our_hash_passes(family):
    specs = specs_of(family)
    fuzz_hash(specs, lambda tokens, dead: hash_text(specs, tokens, dead), cases=60)
    fuzz_stateful_hash(specs, Engine(specs), steps=150)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_that_does_not_roll_back_fails(family):
    with pytest.raises(Disagreement, match="the last tokens"):
        fuzz_stateful_hash(specs_of(family), CachingEngine(specs_of(family)))


WRONG = {
    "other tokens before": lambda tokens, dead: ([max(t - 1, 0) for t in tokens[:-1]] + tokens[-1:], dead),
    "no dead marks": lambda tokens, dead: (tokens, [False] * len(dead)),
    "one token late": lambda tokens, dead: ([tokens[0], *tokens[:-1]], dead),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fault", WRONG)
def test_a_hash_of_the_wrong_tokens_fails(family, fault):
    specs = specs_of(family)
    with pytest.raises(Disagreement):
        fuzz_hash(specs, lambda tokens, dead: hash_text(specs, *WRONG[fault](tokens, dead)))


@pytest.mark.parametrize("family", FAMILIES)
def test_offsets_applied_twice_fail(family):
    specs = specs_of(family)
    offsets = np.array([spec.offsets for spec in specs])[:, None]
    with pytest.raises(Disagreement):
        fuzz_hash(specs, lambda tokens, dead: np.array(hash_text(specs, tokens, dead)) + offsets)


@pytest.mark.parametrize("name", FORMATS)
def test_our_lookup_passes(name):
    form = FORMATS[name]

    def lookup(table: bytes, ids: list[int], wrong: float = 1.0):
        rows = torch.frombuffer(bytearray(table), dtype=torch.uint8).view(-1, form.row_bytes)
        scale = torch.tensor([SCALE * wrong]) if form.table_scale else None
        return row_decode(rows, torch.tensor(ids), form.values, form.dim, torch.float32, form.group, scale).numpy()

    fuzz_lookup(form, lookup)
    with pytest.raises(Disagreement):  # a missing row's id taken from the end, as Python would
        fuzz_lookup(form, lambda table, ids: lookup(table, [i if i >= 0 else 0 for i in ids]))
    if form.table_scale:
        with pytest.raises(Disagreement):
            fuzz_lookup(form, lambda table, ids: lookup(table, ids, 2.0))


def test_a_scale_byte_of_zero_read_as_zero_fails():
    """As some engines have it: byte 0 is 2^-127."""
    form = FORMATS["ue8m0"]

    def lookup(table: bytes, ids: list[int]):
        rows = np.frombuffer(table, np.uint8).reshape(-1, form.row_bytes)
        held = torch.tensor(rows), torch.tensor(ids)
        found = row_decode(*held, form.values, form.dim, torch.float32, form.group).numpy()
        zeroed = np.repeat(rows[np.maximum(ids, 0)][:, form.value_bytes :] == 0, form.group, axis=1)
        return np.where(zeroed, np.float32(0), found)

    with pytest.raises(Disagreement):
        fuzz_lookup(form, lookup, cases=60)


# Golden vectors


@pytest.mark.parametrize("family", FAMILIES)
def test_golden_ids(family):
    for text in golden()[family]["texts"]:
        assert hash_text(specs_of(family), text["tokens"], text["dead"]) == text["ids"]


def test_golden_rows():
    for entry in golden()["rows"]:
        form: RowFormat = FORMATS[entry["name"]]
        assert str(form) == entry["format"]
        table = torch.tensor([list(bytes.fromhex(row)) for row in entry["table"]], dtype=torch.uint8)
        scale = None if entry["scale"] is None else torch.tensor([entry["scale"]])
        got = row_decode(table, torch.tensor(entry["ids"]), form.values, form.dim, torch.float32, form.group, scale)
        want = torch.tensor([[float("nan") if x is None else float(x) for x in row] for row in entry["values"]])
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def tensors(values: dict) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value) for name, value in values.items() if isinstance(value, list)}


def test_golden_engram_layer():
    given = golden()["engram"]["fuse"]
    held = tensors(given)
    store = DeviceStore(30, RowFormat(torch.float32, 2), CPU)
    store.values.copy_(held["rows"].view(30, 2))
    layer = EngramLayer(6, 2, 6, given["eps"], Factory(CPU, torch.float32), store)
    layer.load(held["wkv"], None, held["q_weight"], held["k_weight"])
    got = layer(held["hidden"].float(), torch.arange(30).view(5, 6), held["live"])
    torch.testing.assert_close(got, held["out"].float(), rtol=1e-5, atol=1e-5)


def test_golden_ple_layer():
    """The whole layer from tokens to streams, over a text in one step."""
    given = golden()["qwen4_exp"]["fuse"]
    spec = specs_of("qwen4_exp")[0]
    count = len(given["tokens"])
    store = DeviceStore(spec.num_rows, RowFormat(torch.float32, 2), CPU)
    store.values.copy_(torch.tensor(given["table"]))
    layer = PLELayer(8, 4, 2, 2, 3, 1e-6, Factory(CPU, torch.float32))
    for name, value in layer.tensors("ple").items():
        value.copy_(torch.tensor(given["weights"][name.removeprefix("ple.")]))
    layer.history = torch.full((1, 3, 8), torch.nan)
    ints = {"cu_tokens": [0, count], "sequence": [0] * count, "position": range(count), "start": [0], "slot": [0]}
    table = types.SimpleNamespace(**{n: torch.tensor(v, dtype=torch.int32) for n, v in ints.items()}, row=None)
    ids = torch.tensor(hash_text([spec], given["tokens"], [False] * count)[0])
    streams = torch.tensor(given["streams"])
    layer(streams, *layer.projection(store.lookup(ids, torch.float32)), table)
    torch.testing.assert_close(streams, torch.tensor(given["out"]), rtol=1e-4, atol=1e-4)


def test_golden_longcat():
    held = tensors(golden()["longcat"]["fuse"])
    layer = LongCatEmbedding(8, 6, 2, Factory(CPU, torch.float32))
    for column, value in enumerate(layer.tensors("x").values()):
        value.copy_(held["projections"][column])
    torch.testing.assert_close(layer(held["words"], held["rows"]), held["out"], rtol=1e-6, atol=1e-6)


def test_golden_constants_are_the_published_ones():
    published = golden()["published"]
    assert published["deepseek v4.1 flash, layer 1"]["multipliers"][0] == 76632096046245
    assert published["deepseek v4.1 flash, layer 14"]["moduli"][-1] == 16000889
    assert published["qwen3.8 flash next"]["rows"] == 320001536
    assert len(published["longcat flash lite"]["moduli"]) == 12


@pytest.mark.oracle
def test_the_golden_vectors_are_what_others_give():
    pytest.importorskip("nemo_automodel.components.models.deepseek_v41.engram")
    spec = importlib.util.spec_from_file_location("write_golden", Path(__file__).parent / "write_golden.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made, kept = json.loads(json.dumps(module.build())), golden()
    for family in ("engram", "qwen4_exp"):
        for field in ("tokens", "live"):
            assert made[family]["fuse"].pop(field, None) == kept[family]["fuse"].pop(field, None)
        for name, value in tensors(made[family].pop("fuse")).items():
            torch.testing.assert_close(value, torch.tensor(kept[family]["fuse"][name]), rtol=1e-5, atol=1e-5)
        kept[family].pop("fuse")
    assert made == kept
