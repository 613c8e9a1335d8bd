import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from deltagram.models import weights
from deltagram.models.safetensors_header import DTYPES, MAX_HEADER
from deltagram.models.weights import Weight, check_weights, load_weights, open_checkpoint, read_tensor

SINGLE, INDEX = weights.SINGLE_FILE, weights.INDEX_FILE


def write_raw(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> None:
    """A file with this header (JSON, or bytes as they are), whatever is wrong with it."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def write_shards(folder: Path, shards: dict[str, dict[str, torch.Tensor]], weight_map: Any = None) -> None:
    for file, tensors in shards.items():
        save_file(tensors, folder / file)
    if weight_map is None:
        weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def refusal(function: Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises(ValueError) as caught:
        function(*arguments)
    return str(caught.value)


def test_every_dtype_reads_as_the_safetensors_package_wrote_it(tmp_path: Path) -> None:
    tensors = {}
    for i, (code, dtype) in enumerate(DTYPES.items()):
        shape = [(), (0, 3), (5,), (2, 3, 4)][i % 4]
        raw = torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8)
        tensors[code] = raw.view(dtype).reshape(shape)
    save_file(tensors, tmp_path / SINGLE, {"format": "pt"})
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.tensors.keys() == tensors.keys() and checkpoint.notes == ()
    assert checkpoint.nbytes == sum(tensor.nbytes for tensor in tensors.values())
    content = (tmp_path / SINGLE).read_bytes()
    for code, tensor in tensors.items():
        info = checkpoint.tensors[code]
        assert (info.dtype, info.shape, info.nbytes) == (tensor.dtype, tuple(tensor.shape), tensor.nbytes)
        held = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert content[info.offset : info.offset + info.nbytes] == held
        assert read_tensor(info).reshape(-1).view(torch.uint8).numpy().tobytes() == held


DAMAGED: dict[str, tuple[Any, bytes, int | None, str]] = {
    "json": (b"{", b"", None, "cannot be read"),
    "utf-8": (b'{"\xff": 1}', b"", None, "cannot be read"),
    "nesting": (b"[" * 200_000, b"", None, "cannot be read"),
    "list": ([1], b"", None, "the header is a JSON list; expected an object"),
    "long header": (
        {},
        b"",
        1000,
        "truncated or no safetensors file: it has 10 bytes, but its header ends at byte 1008",
    ),
    "endless header": ({}, b"", 2**64 - 1, "truncated or no safetensors file"),
    "entry": ({"a": 1}, b"", None, "tensor a: header entry is 1; expected dtype, shape and data_offsets"),
    "no offsets": ({"a": {"dtype": "F32", "shape": []}}, b"", None, "tensor a: header entry is"),
    "dtype": ({"a": entry("F7")}, b"12345678", None, "tensor a: dtype is 'F7'; expected one of BOOL"),
    "dtype kind": ({"a": entry(["F32"])}, b"12345678", None, "tensor a: dtype is ['F32']"),
    "shape": ({"a": entry(shape=[-1])}, b"12345678", None, "tensor a: shape is [-1]"),
    "shape kind": ({"a": entry(shape=[2.0])}, b"12345678", None, "tensor a: shape is [2.0]"),
    "shape bool": ({"a": entry(shape=[True], offsets=(0, 4))}, b"1234", None, "tensor a: shape is [True]"),
    "shape text": ({"a": entry(shape="2")}, b"12345678", None, "tensor a: shape is '2'"),
    "offsets": ({"a": entry(offsets=[8, 0])}, b"12345678", None, "tensor a: data_offsets is [8, 0]"),
    "negative": ({"a": entry(offsets=[-8, 0])}, b"12345678", None, "tensor a: data_offsets is [-8, 0]"),
    "three offsets": ({"a": entry(offsets=[0, 4, 8])}, b"12345678", None, "tensor a: data_offsets is [0, 4, 8]"),
    "count": ({"a": entry(shape=[3])}, b"12345678", None, "data_offsets [0, 8] span 8 bytes; F32 [3] takes 12"),
    "huge": ({"a": entry(shape=[2**62, 2**62])}, b"12345678", None, "tensor a: data_offsets [0, 8] span 8 bytes"),
    "truncated": ({"a": entry()}, b"1234567", None, "tensor a: ends at byte"),
    "overlap": ({"a": entry(), "b": entry(offsets=(4, 12))}, b"123456789012", None, "tensor b overlaps the tensor"),
    "same bytes": ({"a": entry(), "b": entry()}, b"12345678", None, "tensor b overlaps the tensor before it"),
    "gap": ({"a": entry(), "b": entry(offsets=(12, 20))}, b"1" * 20, None, "tensor b leaves a gap before it"),
    "surplus bytes": ({"a": entry()}, b"123456789", None, "its tensors end at byte"),
    "duplicate": (
        b'{"a": {"dtype":"U8","shape":[],"data_offsets":[0,1]}, "a": {"dtype":"U8","shape":[],"data_offsets":[0,1]}}',
        b"1",
        None,
        "duplicate key 'a'",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, case: str) -> None:
    header, data, length, message = DAMAGED[case]
    write_raw(tmp_path / SINGLE, header, data, length)
    said = refusal(open_checkpoint, tmp_path)
    assert message in said and SINGLE in said and said.count("\n- ") == 1


def test_a_header_beyond_the_formats_limit_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / SINGLE).open("wb") as file:
        file.write((MAX_HEADER + 1).to_bytes(8, "little"))
        file.truncate(MAX_HEADER + 100)  # sparse
    assert "expected at most 100000000" in refusal(open_checkpoint, tmp_path)


def test_a_git_lfs_pointer_is_called_one(tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    assert "git lfs pull" in refusal(open_checkpoint, tmp_path)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3), "b": torch.ones(2, 2, dtype=torch.bfloat16)}, tmp_path / SINGLE)
    content = (tmp_path / SINGLE).read_bytes()
    for size in range(len(content)):
        (tmp_path / SINGLE).write_bytes(content[:size])
        assert SINGLE in refusal(open_checkpoint, tmp_path)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 219), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_corrupted_header_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, bytes_at: Any) -> None:
    folder = tmp_path_factory.mktemp("corrupted")
    save_file({"a": torch.ones(3), "b": torch.ones(2, 2, dtype=torch.bfloat16)}, folder / SINGLE, {"format": "pt"})
    content = bytearray((folder / SINGLE).read_bytes())
    for at, byte in bytes_at:
        content[at % len(content)] = byte
    (folder / SINGLE).write_bytes(content)
    try:
        checkpoint = open_checkpoint(folder)
    except ValueError as error:
        assert SINGLE in str(error)
    else:
        for info in checkpoint.tensors.values():
            assert info.offset + info.nbytes <= len(content)
            assert info.nbytes == math.prod(info.shape) * info.dtype.itemsize


A, B, C = (torch.full((4,), float(value)) for value in range(3))


def test_shards_are_read_through_the_index(tmp_path: Path) -> None:
    write_shards(tmp_path, {"x.safetensors": {"a": A, "c": C}, "y.safetensors": {"b": B}})
    save_file({"unrelated": A}, tmp_path / "adapter.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert {name: info.file.name for name, info in checkpoint.tensors.items()} == {
        "a": "x.safetensors",
        "c": "x.safetensors",
        "b": "y.safetensors",
    }
    assert all(torch.equal(read_tensor(checkpoint.tensors[name]), want) for name, want in (("a", A), ("b", B)))


def test_an_index_may_name_the_single_file(tmp_path: Path) -> None:
    write_shards(tmp_path, {SINGLE: {"a": A}})
    assert open_checkpoint(tmp_path).tensors.keys() == {"a"}


X, Y = {"x.safetensors": {"a": A, "c": C}}, {"y.safetensors": {"b": B}}
DISAGREEMENTS: dict[str, tuple[dict[str, Any], Any, str]] = {
    "missing shard": (
        X,
        {"a": "x.safetensors", "c": "x.safetensors", "b": "y.safetensors"},
        "y.safetensors is missing",
    ),
    "tensor not in shard": (X, {n: "x.safetensors" for n in "abc"}, "x.safetensors lacks b, which"),
    "tensor not in index": (X, {"a": "x.safetensors"}, f"x.safetensors has c, which {INDEX} does not name"),
    "duplicate": (
        X | {"y.safetensors": {"a": A, "b": B}},
        {"a": "x.safetensors", "c": "x.safetensors", "b": "y.safetensors"},
        f"y.safetensors has a, which {INDEX} places in x.safetensors",
    ),
    "outside": (X, {"a": "x.safetensors", "c": "x.safetensors", "b": "../y.safetensors"}, "names '../y.safetensors'"),
    "absolute": (X, {"a": "x.safetensors", "c": "x.safetensors", "b": "/etc/passwd"}, "names '/etc/passwd'; expected"),
    "pickle shard": (X, {"a": "x.safetensors", "c": "x.safetensors", "b": "y.bin"}, "names 'y.bin'; expected a .safe"),
    "list": (X, ["a"], "has no weight_map"),
    "numbers": (X, {"a": 1}, "has no weight_map"),
    "stale single file": ({SINGLE: {"a": A}, **Y}, {"b": "y.safetensors"}, "remove the stale one"),
}


@pytest.mark.parametrize("case", DISAGREEMENTS)
def test_an_index_that_disagrees_with_its_shards_is_refused(tmp_path: Path, case: str) -> None:
    shards, weight_map, message = DISAGREEMENTS[case]
    write_shards(tmp_path, shards, weight_map)
    said = refusal(open_checkpoint, tmp_path)
    assert message in said and said.count("\n- ") == 1


def test_all_faults_of_all_shards_are_in_one_message(tmp_path: Path) -> None:
    write_shards(tmp_path, X | Y, {"a": "x.safetensors", "b": "y.safetensors", "d": "z.safetensors"})
    (tmp_path / "y.safetensors").write_bytes(b"damaged")
    said = refusal(open_checkpoint, tmp_path)
    assert said.count("\n- ") == 3
    assert (
        "x.safetensors has c" in said and "y.safetensors cannot be read" in said and "z.safetensors is missing" in said
    )


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], f"has no weights; expected {SINGLE}, or shards and {INDEX}"),
        (["pytorch_model.bin", "training.pt"], "weights as pickles (pytorch_model.bin, training.pt)"),
        (["consolidated.00.pth"], "only safetensors are loaded"),
        (["model-00001-of-00002.safetensors", "pytorch_model.bin"], f"but neither {SINGLE} nor {INDEX}"),
    ],
)
def test_a_folder_without_a_safetensors_checkpoint_says_what_it_has(
    tmp_path: Path, files: list[str], message: str
) -> None:
    for file in files:
        (tmp_path / file).touch()
    assert message in refusal(open_checkpoint, tmp_path)


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "is not a folder" in refusal(open_checkpoint, tmp_path / "file")
    assert "is not a folder" in refusal(open_checkpoint, tmp_path / "nowhere")


def test_multimodal_names_become_text_names(tmp_path: Path) -> None:
    names = {
        "model.language_model.embed_tokens.weight": "model.embed_tokens.weight",
        "language_model.model.norm.weight": "model.norm.weight",
        "language_model.lm_head.weight": "lm_head.weight",
        "model.layers.0.x": "model.layers.0.x",
    }
    extra = ["mtp.fc.weight", "model.visual.a", "visual.b"]
    save_file({name: A + 0 for name in [*names, *extra]}, tmp_path / SINGLE)
    checkpoint = open_checkpoint(tmp_path)
    assert {info.name: name for name, info in checkpoint.tensors.items()} == names
    with_head = open_checkpoint(tmp_path, mtp=True)
    assert with_head.tensors.keys() == checkpoint.tensors.keys() | {"mtp.fc.weight"}
    assert with_head.notes == checkpoint.notes[:1]
    assert checkpoint.notes == (
        "the vision tower (2 tensors) is skipped: this model reads text alone",
        "multi-token prediction weights (1 tensors) are recognised and not loaded",
    )


def test_two_names_of_one_weight_are_refused(tmp_path: Path) -> None:
    save_file({"model.norm.weight": A, "model.language_model.norm.weight": B}, tmp_path / SINGLE)
    assert "the same weight" in refusal(open_checkpoint, tmp_path)


@pytest.fixture
def checkpoint(tmp_path: Path) -> weights.Checkpoint:
    tensors = {
        "a": torch.arange(12.0).reshape(3, 4),
        "half": torch.arange(6, dtype=torch.bfloat16) / 3,
        "ids": torch.tensor([1, -2, 2**62]),
        "fp8": torch.ones(4).to(torch.float8_e4m3fn),
    }
    save_file(tensors, tmp_path / SINGLE)
    return open_checkpoint(tmp_path)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def fitting() -> dict[str, Weight]:
    return {
        "a": Weight(meta(3, 4)),
        "half": Weight(meta(6)),
        "ids": Weight(expected=torch.tensor([1, -2, 2**62])),
        "fp8": Weight(),
        "tied": Weight(),
        "rare": Weight(meta(1), optional=True),
    }


def test_a_fitting_plan_passes_on_the_meta_device(checkpoint: weights.Checkpoint) -> None:
    check_weights(checkpoint, fitting())
    check_weights(checkpoint, fitting() | {"a": Weight(meta(3, 4, dtype=torch.bfloat16))})
    check_weights(checkpoint, fitting() | {"fp8": Weight(meta(4, dtype=torch.float8_e4m3fn))})


UNFIT: dict[str, tuple[dict[str, Weight | None], str]] = {
    "missing": ({"b": Weight(meta(2, 5))}, "missing: b [2, 5]"),
    "missing constant": ({"b": Weight(expected=torch.tensor([1]))}, "missing: b [1]"),
    "surplus": ({"fp8": None}, f"surplus: fp8 in {SINGLE}"),
    "shape": ({"a": Weight(meta(4, 3))}, f"a in {SINGLE} has shape [3, 4]; expected [4, 3]"),
    "dimensions": ({"a": Weight(meta(1, 3, 4))}, "has shape [3, 4]; expected [1, 3, 4]"),
    "optional shape": ({"a": Weight(meta(4, 3), optional=True)}, "has shape [3, 4]; expected [4, 3]"),
    "ids for floats": ({"ids": Weight(meta(3))}, "ids in model.safetensors has dtype int64; expected float32 or"),
    "floats for ids": ({"a": Weight(meta(3, 4, dtype=torch.int64))}, "has dtype float32; expected int64"),
    "narrow ids": ({"ids": Weight(meta(3, dtype=torch.int32))}, "has dtype int64; expected int32"),
    "unscaled fp8": ({"fp8": Weight(meta(4))}, "has dtype float8_e4m3fn; expected float32 or bfloat16 or float16"),
    "constant": (
        {"ids": Weight(expected=torch.tensor([1, -2, 3]))},
        "holds [1, -2, 4611686018427387904]; expected [1, -2, 3]",
    ),
    "constant shape": ({"ids": Weight(expected=torch.tensor([1, -2]))}, "has shape [3]; expected [2]"),
    "constant dtype": (
        {"a": Weight(expected=torch.ones(3, 4, dtype=torch.int64))},
        "has dtype float32; expected int64",
    ),
}


@pytest.mark.parametrize("case", UNFIT)
def test_what_does_not_fit_is_named(checkpoint: weights.Checkpoint, case: str) -> None:
    change, message = UNFIT[case]
    plan = {name: weight for name, weight in (fitting() | change).items() if weight is not None}
    said = refusal(check_weights, checkpoint, plan)
    assert message in said and said.count("\n- ") == 1


def test_everything_that_does_not_fit_is_listed_up_to_a_limit(checkpoint: weights.Checkpoint) -> None:
    plan = {f"new.{i}": Weight(meta(2)) for i in range(120)} | {"a": Weight(meta(1)), "ids": Weight()}
    said = refusal(check_weights, checkpoint, plan)
    assert "(120 missing, 2 surplus, 1 wrong)" in said and said.count("missing: ") == 50 and "- and 70 more" in said
    assert "surplus: fp8" in said and "surplus: half" in said and "a in model.safetensors has shape" in said


def layouts(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Destinations of one shape: whole, rows of a fused tensor, a column block, transposed, every other element."""
    rows, *rest = shape
    return {
        "whole": torch.full(shape, 7).to(dtype),
        "rows": torch.full((rows + 3, *rest), 7).to(dtype)[2 : 2 + rows],
        "columns": torch.full((*shape[:-1], shape[-1] + 3), 7).to(dtype)[..., 1 : 1 + shape[-1]],
        "transposed": torch.full(shape[::-1], 7).to(dtype).permute(*range(len(shape))[::-1]),
        "strided": torch.full((2 * rows, *rest), 7).to(dtype)[::2],
    }


@pytest.mark.parametrize("staging", [16, 64, weights.STAGING_BYTES])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values_arrive_in_any_layout_and_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staging: int, stored: torch.dtype, wanted: torch.dtype
) -> None:
    monkeypatch.setattr(weights, "STAGING_BYTES", staging)
    shapes = [(1,), (17,), (5, 7), (1, 40), (3, 1, 4), (2, 3, 5)]
    generator = torch.Generator().manual_seed(0)
    tensors, plan, around = {}, {}, []
    for shape in shapes:
        for layout, destination in layouts(shape, wanted).items():
            name = f"{shape}.{layout}"
            tensors[name] = torch.randn(shape, generator=generator).to(stored)
            plan[name] = Weight(destination.requires_grad_() if layout == "whole" else destination)
            base = destination if destination._base is None else destination._base
            around.append((base, base.numel() - destination.numel()))
    names = list(tensors)
    write_shards(tmp_path, {f"{i}.safetensors": {name: tensors[name] for name in names[i::2]} for i in range(2)})
    checkpoint, pieces = open_checkpoint(tmp_path), []
    load_weights(checkpoint, plan, pieces.append)
    for name, tensor in tensors.items():
        assert torch.equal(plan[name].destination, tensor.to(wanted)), name
    for base, others in around:
        assert (base == 7).sum() >= others, "wrote beside its destination"
    assert sum(pieces) == checkpoint.nbytes and max(pieces) <= staging


@pytest.mark.parametrize("staging", [16, weights.STAGING_BYTES])
def test_rows_may_go_to_several_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staging: int) -> None:
    monkeypatch.setattr(weights, "STAGING_BYTES", staging)
    stored = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    save_file({"a": stored}, tmp_path / SINGLE)
    fused = torch.zeros(9, 5)
    parts = (fused[6:9], fused[0:1], torch.zeros(5, 3).t())
    pieces: list[int] = []
    load_weights(open_checkpoint(tmp_path), {"a": Weight(parts)}, pieces.append)
    assert torch.equal(torch.cat(parts), stored.float()) and sum(pieces) == stored.nbytes
    assert fused[1:6].count_nonzero() == 0
    short = Weight(tuple(part.to("meta") for part in parts[:2]))
    assert "a in model.safetensors has shape [7, 5]; expected [4, 5]" in refusal(
        check_weights, open_checkpoint(tmp_path), {"a": short}
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_values_arrive_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "STAGING_BYTES", 1 << 16)  # so that the buffer is used again and again
    tensors = {str(dtype): torch.randn(777, 333).to(dtype) for dtype in (torch.float32, torch.bfloat16)}
    save_file(tensors, tmp_path / SINGLE)
    for wanted in (torch.float32, torch.bfloat16):
        fused = torch.zeros(2, 777, 335, dtype=wanted, device="cuda")
        plan = {name: Weight(fused[i, :, 1:334]) for i, name in enumerate(tensors)}
        load_weights(open_checkpoint(tmp_path), plan)
        for i, tensor in enumerate(tensors.values()):
            assert torch.equal(fused[i, :, 1:334].cpu(), tensor.to(wanted))
        assert fused[..., 0].count_nonzero() == fused[..., 334].count_nonzero() == 0


def test_scalars_empty_tensors_and_other_dtypes_load(tmp_path: Path) -> None:
    tensors = {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "ids": torch.tensor([[1, -1]]),
        "flags": torch.tensor([True, False]),
        "fp8": torch.tensor([0.5, 2.0]).to(torch.float8_e4m3fn),
    }
    save_file(tensors, tmp_path / SINGLE)
    plan = {name: Weight(torch.zeros_like(tensor)) for name, tensor in tensors.items()}
    load_weights(open_checkpoint(tmp_path), plan)
    for name, tensor in tensors.items():
        got = plan[name].destination
        assert got is not None and got.dtype == tensor.dtype and torch.equal(got.float(), tensor.float())


def test_loading_checks_first_and_leaves_optional_ones_alone(checkpoint: weights.Checkpoint) -> None:
    kept = torch.full((1,), 9.0)
    real = fitting() | {"a": Weight(torch.zeros(3, 4)), "half": Weight(torch.zeros(6)), "rare": Weight(kept)}
    assert "missing: rare" in refusal(load_weights, checkpoint, real)
    assert real["a"].destination.count_nonzero() == 0
    pieces: list[int] = []
    load_weights(checkpoint, real | {"rare": Weight(kept, optional=True)}, pieces.append)
    assert real["a"].destination.count_nonzero() == 11 and kept.item() == 9 and sum(pieces) == checkpoint.nbytes


@pytest.mark.parametrize("ending", ["shorter", "gone", "constant shorter"])
def test_a_file_that_changes_under_the_reader_is_named(checkpoint: weights.Checkpoint, ending: str) -> None:
    plan = fitting() | {"a": Weight(torch.zeros(3, 4)), "half": Weight(torch.zeros(6))}
    name = "ids" if ending.startswith("constant") else "half"
    if not ending.startswith("constant"):
        plan["ids"] = Weight()
    info = checkpoint.tensors[name]
    if ending == "gone":
        info.file.unlink()
    else:
        with info.file.open("r+b") as file:
            file.truncate(info.offset + info.nbytes - 1)
    said = refusal(load_weights, checkpoint, plan)
    assert str(info.file) in said
    assert "cannot be opened" in said if ending == "gone" else f"ended while tensor {name} was read, 1 bytes" in said


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file whose reads fail")
def test_a_read_error_names_the_file_and_the_tensor() -> None:
    mem = Path("/proc/self/mem")  # reading its first page is an I/O error
    info = weights.TensorInfo("a", mem, torch.float32, (2,), 0, 8)
    said = refusal(load_weights, weights.Checkpoint(mem.parent, {"a": info}, ()), {"a": Weight(torch.zeros(2))})
    assert "reading tensor a from /proc/self/mem failed: [Errno 5]" in said


PEAK = """
import resource, sys
from pathlib import Path
import torch
from deltagram.models.weights import Weight, load_weights, open_checkpoint

def peak():  # bytes; VmHWM starts anew with the process, ru_maxrss does not
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024

checkpoint = open_checkpoint(Path(sys.argv[1]))
torch.ones(4, dtype=torch.bfloat16).float()  # what first use costs is no part of loading
before = peak()
dtype = getattr(torch, sys.argv[2])
plan = {name: Weight(torch.empty(info.shape, dtype=dtype)) for name, info in checkpoint.tensors.items()}
load_weights(checkpoint, plan)
print((peak() - before) / checkpoint.nbytes)
"""


@pytest.mark.parametrize(("stored", "wanted", "held"), [("BF16", "bfloat16", 1.0), ("F32", "bfloat16", 0.5)])
def test_loading_a_gigabyte_takes_little_more_than_the_weights(
    tmp_path: Path, stored: str, wanted: str, held: float
) -> None:
    size, count = (1 << 30) // 8, 4  # two shards of four sparse tensors, 128 MiB each
    shape = [size // DTYPES[stored].itemsize // 1024, 1024]
    weight_map = {}
    for shard in range(2):
        file = f"{shard}.safetensors"
        names = [f"{shard}.{i}" for i in range(count)]
        write_raw(
            tmp_path / file, {name: entry(stored, shape, (i * size, (i + 1) * size)) for i, name in enumerate(names)}
        )
        with (tmp_path / file).open("r+b") as opened:
            opened.truncate((tmp_path / file).stat().st_size + count * size)
        weight_map |= dict.fromkeys(names, file)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    arguments = [sys.executable, "-c", PEAK, str(tmp_path), wanted]
    ran = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=120)
    assert held <= float(ran.stdout) <= held + 0.1
