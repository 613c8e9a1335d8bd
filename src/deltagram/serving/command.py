"""What `deltagram serve` does with its arguments."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deltagram.serving import limits as limits_
from deltagram.serving.run import serve

SHIPPED = "deltagram-demo"


def run(
    options: dict[str, Any],
    *,
    name: str | None,
    host: str,
    port: int,
    limits: Mapping[str, Any],
    keys: Sequence[str],
    say: Callable[[str], None],
) -> None:
    """Serve until told to stop. `options` are the keywords of LLM; without a `name` the model is called as its folder
    or hub id is. Raises ValueError or OSError for what the user can put right."""
    if any(not key.strip() for key in keys):
        raise ValueError("an API key must not be empty")
    logging.basicConfig(format="%(levelname)s server: %(message)s")
    model = options["model"]
    if name is None:
        name = SHIPPED if model is None else Path(model).resolve().name if Path(model).is_dir() else str(model)
    work = serve(
        options, name=name, host=host, port=port, limits=limits_.parse(limits), keys=keys,
        ready=lambda url: say(f"{name} is served at {url}"),
    )  # fmt: skip
    asyncio.run(work)
