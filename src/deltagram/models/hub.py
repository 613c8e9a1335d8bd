"""From what a user calls a model to a folder on this machine."""

from pathlib import Path

# What a checkpoint is made of here; a repository's other formats and subfolders stay where they are.
ALLOW_PATTERNS = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "*.safetensors",
    "model.safetensors.index.json",
]
IGNORE_PATTERNS = ["*/*"]


def resolve_model(model: str | Path, progress: bool = True) -> Path:
    """The folder of `model`: a local folder, or else the download (or cached copy) of a Hugging Face hub id.

    A hub id is "owner/name". `progress` shows the hub's bars on stderr. Raises ValueError where there is neither, and
    where the hub cannot be reached, does not know the id or does not give it out.
    """
    name = str(model)
    if not name.strip():
        raise ValueError(f"model is {name!r}; expected a checkpoint folder or a hub id such as owner/name")
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            return path
        is_file = path.is_file()
    except (OSError, RuntimeError, TypeError) as error:  # a name too long, an unknown user after the tilde, no name
        raise ValueError(f"model is {name!r:.200}, which cannot be a folder: {error}") from error
    if is_file:
        raise ValueError(f"{model} is a file; expected a checkpoint folder or a hub id such as owner/name")
    if isinstance(model, Path) or name.startswith(("/", ".", "~")) or name.count("/") > 1 or name.endswith("/"):
        raise ValueError(f"the folder {model} does not exist")
    if "/" not in name:
        raise ValueError(f"{model} is neither a folder here nor a hub id, which reads owner/name")
    return _download(name, progress)


def _download(name: str, progress: bool) -> Path:
    # Imported here, as most runs use a local folder and need none of it.
    from huggingface_hub import errors, snapshot_download
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    quiet = not progress and not are_progress_bars_disabled()
    if quiet:
        disable_progress_bars()
    try:
        folder = Path(snapshot_download(name, allow_patterns=ALLOW_PATTERNS, ignore_patterns=IGNORE_PATTERNS))
    except errors.HFValidationError as error:
        raise ValueError(f"{name} is neither a folder here nor a hub id: {error}") from error
    except errors.GatedRepoError as error:
        page = f"https://huggingface.co/{name}"
        raise ValueError(f"{name} is gated: accept its terms at {page}, then log in with `hf auth login`") from error
    except errors.RepositoryNotFoundError as error:
        message = f"{name} is neither a folder here nor a model on the hub; a private one needs `hf auth login`"
        raise ValueError(message) from error
    except errors.LocalEntryNotFoundError as error:
        message = f"{name} is not a folder here, not in the download cache, and the hub cannot be reached"
        raise ValueError(f"{message} ({str(error).splitlines()[0]})") from error
    except (
        Exception
    ) as error:  # the hub's, the network library's and the disk's, all ending the same way for the caller
        raise ValueError(f"downloading {name} failed: {type(error).__name__}: {error}") from error
    finally:
        if quiet:
            enable_progress_bars()
    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"{name} has no safetensors file on the hub; weights in other formats are not loaded")
    return folder
