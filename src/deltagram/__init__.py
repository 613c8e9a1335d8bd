"""deltagram: an engine for language models with n-gram memory and Gated DeltaNet layers.

`from deltagram import LLM, SamplingParams` is the whole public surface; the rooms below it are described in
docs/tour.md. Both names are imported on first use, so that `import deltagram` costs neither torch nor a model.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from deltagram.engine.params import SamplingParams
    from deltagram.llm import LLM


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from deltagram.llm import LLM

        return LLM
    if name == "SamplingParams":
        from deltagram.engine.params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'deltagram' has no attribute {name!r}")
