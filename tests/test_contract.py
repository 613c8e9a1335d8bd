"""The rules the whole package keeps: imports go one way, and every op follows the op contract of AGENTS.md."""

import ast
import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "deltagram"
ROOMS = (
    "kernels", "step", "parallel", "layers", "ngram", "gdn", "attention", "models", "graphs", "engine", "serving",
    "experiments", "testing",
)  # fmt: skip
OPS = sorted(
    path.stem
    for path in (PACKAGE / "kernels").iterdir()
    if not path.stem.startswith("_") and (path.suffix == ".py" or (path / "__init__.py").is_file())
)


def imported(path: Path) -> set[str]:
    """Modules of ours that a file imports, at its top or inside a function."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names.add(node.module or "")
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return {name for name in names if name.startswith("deltagram.")}


@pytest.mark.parametrize("room", [room for room in ROOMS if (PACKAGE / room).is_dir()])
def test_a_room_imports_only_rooms_above_it(room: str) -> None:
    allowed = {"testing"} if room == "testing" else set()
    allowed |= set(ROOMS[: ROOMS.index(room) + 1])
    if room in ("serving", "experiments", "testing"):
        allowed |= {"llm"}  # the front door, above which only the commands stand
    for path in (PACKAGE / room).rglob("*.py"):
        if path.name == "cli.py":  # a room's commands stand above all rooms, as the top-level ones do
            continue
        for name in imported(path):
            target = name.split(".")[1]
            public = target in ("LLM", "SamplingParams") and "llm" in allowed
            assert target in allowed or target == "__version__" or public, f"{path.relative_to(PACKAGE)} imports {name}"


def test_kernels_import_nothing_of_ours_but_their_own_support() -> None:
    for path in (PACKAGE / "kernels").rglob("*.py"):
        for name in imported(path):
            top = name.split(".")[2] if name.count(".") >= 2 else ""
            own = path.parent.name if path.parent.name != "kernels" else path.stem
            assert name == "deltagram.kernels" or top.startswith("_") or top == own, f"{path.name} imports {name}"


@pytest.mark.parametrize("op", OPS)
def test_an_op_has_reference_test_and_benchmark(op: str) -> None:
    module = import_module(f"deltagram.kernels.{op}")
    public = getattr(module, op)
    reference = module._reference
    names = [name for name in inspect.signature(public).parameters if name != "impl"]
    assert names == list(inspect.signature(reference).parameters), f"{op}: _reference takes what {op} takes"
    assert (module.__doc__ or "").strip(), f"{op} says what it computes"
    assert (ROOT / "tests" / "kernels" / f"test_{op}.py").is_file(), f"{op} has a test"
    assert (ROOT / "benchmarks" / "kernels" / f"bench_{op}.py").is_file(), f"{op} has a benchmark"


def test_everything_imports_without_triton() -> None:
    modules = [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        for room in ("kernels", "step", "parallel", "layers", "ngram", "gdn", "attention", "models", "engine")
        for path in sorted((PACKAGE / room).rglob("*.py"))
    ]
    code = "import importlib, sys\nsys.modules['triton'] = None\n"
    code += f"for module in {modules!r}: importlib.import_module(module)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_files_are_sized_to_be_read_in_one_sitting() -> None:
    long = {
        str(path.relative_to(ROOT)): count
        for path in PACKAGE.rglob("*.py")
        if (count := path.read_text().count("\n")) > 500
    }
    assert not long, f"split these: {long}"
