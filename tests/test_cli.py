"""The command line: text, errors and signals with a stand-in for the model, and all of it with a tiny one."""

import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import deltagram
from deltagram.cli import app
from deltagram.testing.checkpoints import write_tiny_checkpoint

FAKE = """
from dataclasses import dataclass, field
from types import SimpleNamespace

@dataclass
class Stats:
    prefill_tokens: int = 3
    memory_rows: int = 12
    padding_tokens: int = 0
    peak_pages: int = 1
    num_pages: int = 9
    steps: list = field(default_factory=lambda: [
        {"step": 0, "ms": 10.0, "kind": "prefill", "tokens": 3}, {"step": 1, "ms": 2.0, "kind": "decode", "tokens": 1}])

class Tokenizer:
    chat_template = "yes"
    def apply_chat_template(self, messages):
        return "|".join(f"{m['role']}:{m['content']}" for m in messages)
    def encode(self, text, add_special_tokens=True):
        assert not add_special_tokens
        return text

class FakeLLM:
    pieces = ["héllo", " ", "wörld"]
    def __init__(self, model=None, *, device, dtype, progress=None, capturing=None, group=None, **settings):
        calls.append(("load", model, device, dtype, settings))
        if model == "broken":
            raise ValueError("config.json is broken:\\n- [red]two[/red] problems")
        progress(100)
        capturing(0, 2)
        capturing(2, 2)
        self.tokenizer, self.stats, self.notes = Tokenizer(), Stats(), ("the vision tower is skipped",)
    def generate(self, prompt, params):
        calls.append(("generate", prompt, params))
        output = SimpleNamespace(text="".join(self.pieces), token_ids=(5, 6), finish_reason="stop")
        return [SimpleNamespace(prompt_token_ids=(1, 2, 3), outputs=[output])]
    def stream(self, prompt, params):
        calls.append(("stream", prompt, params))
        try:
            for piece in self.pieces:
                if isinstance(piece, BaseException):
                    raise piece
                yield SimpleNamespace(text=piece)
        finally:
            calls.append("closed")

calls = []
"""


@pytest.fixture
def fake(monkeypatch):
    """Puts the stand-in where LLM is; `fake.calls` is what was asked of it."""
    names: dict = {"__name__": __name__}
    exec(FAKE, names)
    monkeypatch.setattr(deltagram, "LLM", names["FakeLLM"], raising=False)
    return SimpleNamespace(calls=names["calls"], LLM=names["FakeLLM"], Tokenizer=names["Tokenizer"])


def run(*arguments, stdin=None):
    return CliRunner().invoke(app, [str(a) for a in arguments], input=stdin)


def test_generate_streams_text_to_stdout_and_the_rest_to_stderr(fake):
    result = run(
        "generate", "Once upon", "--max-tokens", 9, "--temperature", 0, "--stop", "a", "--stop", "b", "--seed", 4
    )
    assert (result.exit_code, result.stdout) == (0, "héllo wörld")
    load, stream, closed = fake.calls
    assert load == ("load", None, "auto", "auto", {})
    params = deltagram.SamplingParams(max_tokens=9, temperature=0.0, stop=["a", "b"], seed=4)
    assert (stream, closed) == (("stream", "Once upon", params), "closed")
    assert "the vision tower is skipped" in result.stderr
    rows = {line.split()[0]: line.split()[1:] for line in result.stderr.splitlines() if line.split()}
    assert rows["prefill"] == ["1", "3", "10", "ms", "300"] and rows["decode"] == ["1", "1", "2", "ms", "500"]
    assert rows["memory"][-1] == "12" and rows["cache"] == ["pages", "1", "of", "9"]


def test_what_is_left_out_keeps_the_defaults_of_the_library(fake):
    run("generate", "x")
    assert fake.calls[1] == ("stream", "x", deltagram.SamplingParams())


def test_generate_json(fake):
    result = run("generate", "x", "--json", "--ignore-eos")
    out = json.loads(result.stdout)
    assert (out["prompt"], out["prompt_token_ids"], out["text"]) == ("x", [1, 2, 3], "héllo wörld")
    assert (out["token_ids"], out["finish_reason"]) == ([5, 6], "stop")
    assert out["stats"]["memory_rows"] == 12 and "steps" not in out["stats"]
    assert fake.calls[1] == ("generate", "x", deltagram.SamplingParams(ignore_eos=True))


def test_prompt_from_stdin(fake):
    assert run("generate", "-", stdin="naïve\n").exit_code == 0
    assert fake.calls[1][1] == "naïve\n"
    result = run("generate", "-", stdin=b"\xff")
    assert result.exit_code == 2 and "must be UTF-8" in result.stderr and len(fake.calls) == 3


def test_settings(fake):
    options = ("--set", "max_context=4096", "--set", "poison=true", "--set", "placement=pinned", "--device", "cpu")
    assert run("generate", "x", "--model", "some/where", *options, "--dtype", "float32").exit_code == 0
    settings = {"max_context": 4096, "poison": True, "placement": "pinned"}
    assert fake.calls[0] == ("load", "some/where", "cpu", "float32", settings)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--set", "max_context"), "--set must be KEY=VALUE, got 'max_context'"),
        (("--set", "=3"), "--set must be KEY=VALUE, got '=3'"),
        (("--set", "a=1", "--set", "a=2"), "a is set twice"),
        (("--set", "device=cpu"), "use --device instead"),
        (("--temperature", "nan"), "temperature must be a finite number of at least 0, got nan"),
        (("--max-tokens", "0"), "max_tokens must be"),
        (("--stop", ""), "stop must be"),
        (("--trace", "/nowhere/at/all"), "/nowhere/at/all"),
        (("--model", "broken"), "- [red]two[/red] problems"),
        (("--best-of", "2"), "--best-of"),
        (("--max-tokens", "many"), "--max-tokens"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(fake, arguments, message):
    result = run("generate", "x", *arguments)
    assert (
        (result.exit_code, result.stdout) == (2, "") and message in result.stderr and "Traceback" not in result.stderr
    )
    assert fake.calls == [] or arguments[0] == "--model"  # refused before a model is loaded


def test_a_fault_of_ours_keeps_its_traceback(fake):
    fake.LLM.pieces = ["a", RuntimeError("the step failed")]
    result = run("generate", "x")
    assert result.exit_code == 1 and str(result.exception) == "the step failed" and fake.calls[-1] == "closed"


def test_trace(fake, tmp_path):
    fake.LLM.pieces = ["a", KeyboardInterrupt()]
    result = run("generate", "x", "--trace", tmp_path / "trace.jsonl")
    assert result.exit_code == 130 and result.stdout == "a" and "interrupted" in result.stderr
    assert fake.calls[-1] == "closed"
    records = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert [record["kind"] for record in records] == ["prefill", "decode"]


PROGRAM = f"""
import os, signal, sys
{FAKE}
import deltagram
deltagram.LLM = FakeLLM
FakeLLM.pieces = (f"{{i}} " for i in range(10**9))
sys.argv = ["deltagram", "generate", "x"]
from deltagram.cli import main
main()
"""


@pytest.mark.parametrize("how", ["broken pipe", "ctrl-C"])
def test_leaves_cleanly(how):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ
    )
    assert process.stdout.read(4) == b"0 1 "
    if how == "ctrl-C":
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 130 and b"interrupted" in errors
    else:
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait(timeout=60) == 141
    assert b"Traceback" not in errors and b"Exception" not in errors


def test_chat_keeps_the_history(fake):
    result = run("chat", "--system", "Be kind.", stdin="hi\n\n/what\nbye\n/reset\nagain\n/exit\nnever\n")
    assert (result.exit_code, result.stdout) == (0, "héllo wörld\n" * 3)
    prompts = [call[1] for call in fake.calls if call[0] == "stream"]
    once = "system:Be kind.|user:hi|assistant:héllo wörld|user:bye"
    assert prompts == ["system:Be kind.|user:hi", once, "system:Be kind.|user:again"]
    assert "unknown command /what; known are /reset and /exit" in result.stderr
    assert fake.calls[1][2].max_tokens == 512


def test_chat_goes_on_after_a_refusal_and_after_ctrl_c(fake):
    fake.LLM.pieces = ["so", KeyboardInterrupt()]
    result = run("chat", stdin="a\nb\n")
    assert result.exit_code == 0 and result.stdout == "so\nso\n" and "interrupted" in result.stderr
    assert fake.calls[3][1] == "user:a|assistant:so|user:b"
    fake.calls.clear()
    fake.LLM.pieces = [ValueError("the prompt is too long")]
    result = run("chat", stdin="a\nb\n")
    assert result.exit_code == 0 and result.stderr.count("the prompt is too long\n(/reset") == 2
    assert [call[1] for call in fake.calls if call[0] == "stream"] == ["user:a", "user:b"]


def test_chat_refuses_bad_parameters_before_loading(fake):
    result = run("chat", "--max-tokens", 0, stdin="hi\n")
    assert result.exit_code == 2 and "max_tokens must be" in result.stderr and not fake.calls


def test_chat_needs_a_template(fake):
    fake.Tokenizer.chat_template = None
    result = run("chat", stdin="hi\n")
    assert result.exit_code == 2 and "no chat template" in result.stderr


def test_help_is_quick_and_needs_no_torch():
    program = """
import sys
from typer.testing import CliRunner
from deltagram.cli import app
for arguments in (["--help"], ["--version"], ["generate", "--help"], ["doctor", "--help"], []):
    result = CliRunner().invoke(app, arguments)
    assert result.output, arguments
heavy = {"torch", "numpy", "tokenizers", "jinja2", "scipy", "huggingface_hub", "transformers"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_version():
    assert run("--version").stdout == deltagram.__version__ + "\n"


def test_experiments_say_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("deltagram.experiments")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ["scipy", *(name for name in sys.modules if name.startswith("scipy."))]:
        monkeypatch.setitem(sys.modules, name, None)
    for command in ("compare", "bench"):
        result = run(command, "plan.toml")
        assert result.exit_code == 1
        assert f"`deltagram {command}` needs scipy: pip install 'deltagram[experiments]'" in result.stderr


def test_experiments_are_mounted():
    pytest.importorskip("scipy")
    assert "plan" in run("compare", "--help").stdout
    assert "serve" in run("bench", "--help").stdout
    assert run("compare", "--no-such-option").exit_code == 2


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def test_end_to_end(tiny, tmp_path):
    llm = deltagram.LLM(tiny, device="cpu")
    expected = llm.generate("One two", deltagram.SamplingParams(max_tokens=12, temperature=0.8, seed=3))[0]
    options = ("--model", tiny, "--device", "cpu", "--max-tokens", 12, "--temperature", 0.8, "--seed", 3)
    streamed = run("generate", "One two", *options, "--trace", tmp_path / "trace")
    assert (streamed.exit_code, streamed.stdout) == (0, expected.outputs[0].text)
    records = [json.loads(line) for line in (tmp_path / "trace").read_text().splitlines()]
    assert [record["kind"] for record in records] == ["prefill"] + ["decode"] * (len(expected.outputs[0].token_ids) - 1)
    printed = json.loads(run("generate", "One two", *options, "--json").stdout)
    assert (printed["text"], tuple(printed["token_ids"])) == (expected.outputs[0].text, expected.outputs[0].token_ids)
    assert printed["stats"]["prefill_tokens"] == len(expected.prompt_token_ids)

    talk = run("chat", *options[:6], stdin="hello\n")
    assert talk.exit_code == 0 and len(talk.stdout) > 1

    for arguments, message in [
        (("",), "prompt is empty"),
        (("x" * 600,), "600 tokens"),
        (("x\ud800",), "lone surrogate"),
        (("x", "--set", "max_contxt=3"), "unknown settings: max_contxt"),
        (("x", "--dtype", "int8"), "int8"),
        (("x", "--device", "abacus"), "abacus"),
        (("x", "--model", tmp_path / "none"), "does not exist"),
    ]:
        refused = run("generate", "--model", tiny, *arguments)
        assert (refused.exit_code, refused.stdout) == (2, "") and message in refused.stderr


def test_doctor(tiny, tmp_path, monkeypatch):
    for module in ("deltagram.llm", "deltagram.doctor"):
        __import__(module)
        monkeypatch.setattr(sys.modules[module], "shipped_model", lambda: tiny)
    result = run("doctor", "--model", tiny)
    assert result.exit_code == 0
    for part in (
        f"torch {sys.modules['torch'].__version__}",
        "loads in",
        "qwen4_exp",
        "layers 1, 3",
        "n-gram tables",
        "a chat template",
    ):
        assert part in " ".join(result.stdout.split())

    broken = write_tiny_checkpoint(tmp_path / "broken", "qwen3_5")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (broken / "tokenizer.json").unlink()
    result = run("doctor", "--model", broken)
    assert (
        result.exit_code == 1 and "model.safetensors" in result.stdout and "must hold a tokenizer.json" in result.stdout
    )
    monkeypatch.setattr(sys.modules["deltagram.llm"], "shipped_model", lambda: broken)
    result = run("doctor")
    assert result.exit_code == 1 and "does not run: ValueError" in result.stdout


def test_ranks_that_are_refused_leave_their_group(monkeypatch):
    """A thread of a group that is still joined can abort the process as it exits, whose code is then not 2."""

    def refuse(*arguments, **options):
        raise ValueError("no such thing")

    left = []
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("deltagram.cli._group", lambda device: SimpleNamespace(close=lambda: left.append(True)))
    monkeypatch.setattr(deltagram, "LLM", refuse, raising=False)
    result = run("generate", "x", "--ranks", 2)
    assert result.exit_code == 2 and "no such thing" in result.stderr and left == [True]


def test_a_file_that_cannot_be_written_is_a_line_and_no_traceback(tmp_path):
    options = ["bench", "step", "--device", "cpu", "--steps", "4", "--json", str(tmp_path / "none" / "step.json")]
    command = [sys.executable, "-c", "from deltagram.cli import main; main()", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2 and not done.stdout, "it is said before anything is measured"
    assert "step.json cannot be written: expected a file in a folder that exists" in done.stderr
    assert "Traceback" not in done.stderr
