from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors
from huggingface_hub.utils import are_progress_bars_disabled

from deltagram.models.hub import resolve_model


def hub_answers(monkeypatch: pytest.MonkeyPatch, answer: Callable[..., str]) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", answer)


def http_error(kind: type[errors.HfHubHTTPError]) -> Exception:
    return kind("no", response=httpx.Response(404, request=httpx.Request("GET", "https://huggingface.co")))  # type: ignore[arg-type]


@pytest.mark.parametrize("as_path", [False, True])
def test_a_local_folder_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_path: bool) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    hub_answers(monkeypatch, lambda *_, **__: pytest.fail("the hub was asked"))
    assert resolve_model(Path("owner/name") if as_path else "owner/name") == Path("owner/name")


def test_the_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~") == tmp_path


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("", "model is ''; expected a checkpoint folder or a hub id"),
        ("  \n", "expected a checkpoint folder"),
        ("./owner/name", "does not exist"),
        ("../name", "does not exist"),
        ("/nowhere/name", "does not exist"),
        ("~/nowhere", "does not exist"),
        ("a/b/c", "does not exist"),
        ("owner/name/", "does not exist"),
        (Path("owner/name"), "does not exist"),
        ("name", "neither a folder here nor a hub id, which reads owner/name"),
        ("config.json", "config.json is a file; expected"),
        ("x" * 10_000, "cannot be a folder"),
        ("~no-such-user-here/x", "cannot be a folder"),
        ("own er/name", "neither a folder here nor a hub id: "),
        ("owner/\0name", "neither a folder here nor a hub id: "),
    ],
)
def test_what_is_neither_folder_nor_id_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str | Path, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").touch()
    with pytest.raises(ValueError) as refusal:
        resolve_model(model)
    assert message in str(refusal.value)


@pytest.mark.parametrize("progress", [False, True])
def test_a_hub_id_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, progress: bool) -> None:
    asked: dict[str, Any] = {}

    def answer(name: str, **options: Any) -> str:
        asked.update(options, name=name, quiet=are_progress_bars_disabled())
        (tmp_path / "model.safetensors").touch()
        return str(tmp_path)

    hub_answers(monkeypatch, answer)
    before = are_progress_bars_disabled()
    assert resolve_model("owner/name", progress=progress) == tmp_path
    assert asked["name"] == "owner/name" and asked["quiet"] is (not progress)
    assert are_progress_bars_disabled() is before
    files = [
        "config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "model-00001-of-00002.safetensors",
        "a.bin",
        "a.py",
    ]
    taken = huggingface_hub.utils.filter_repo_objects(
        [*files, "original/model.safetensors"],
        allow_patterns=asked["allow_patterns"],
        ignore_patterns=asked["ignore_patterns"],
    )
    assert list(taken) == files[:4]


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (http_error(errors.RepositoryNotFoundError), "owner/name is neither a folder here nor a model on the hub"),
        (
            http_error(errors.GatedRepoError),
            "owner/name is gated: accept its terms at https://huggingface.co/owner/name",
        ),
        (errors.LocalEntryNotFoundError("Got: no route"), "the hub cannot be reached (Got: no route)"),
        (http_error(errors.HfHubHTTPError), "downloading owner/name failed: HfHubHTTPError"),
        (httpx.ProxyError("proxy says no"), "downloading owner/name failed: ProxyError: proxy says no"),
        (OSError(28, "No space left on device"), "downloading owner/name failed: OSError"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_failed_download_says_why(monkeypatch: pytest.MonkeyPatch, failure: Exception, message: str) -> None:
    def answer(*_: Any, **__: Any) -> str:
        raise failure

    hub_answers(monkeypatch, answer)
    before = are_progress_bars_disabled()
    with pytest.raises(ValueError) as refusal:
        resolve_model("owner/name", progress=False)
    assert message in str(refusal.value)
    assert are_progress_bars_disabled() is before


def test_a_repository_without_safetensors_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").touch()
    hub_answers(monkeypatch, lambda *_, **__: str(tmp_path))
    with pytest.raises(ValueError, match="owner/name has no safetensors file on the hub"):
        resolve_model("owner/name")
