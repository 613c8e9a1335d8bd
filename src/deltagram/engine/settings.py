"""The engine's settings: frozen, resolved once against the model and the machine, every problem reported at once."""

from dataclasses import dataclass, fields
from typing import Any

import torch

from deltagram.attention.cache import page_size
from deltagram.engine.sampler import MAX_VOCAB_SIZE
from deltagram.engine.speculate import MAX_DRAFT
from deltagram.kernels.paged_attention.tile import MOST_COUNTERS
from deltagram.models.config import FULL, ModelConfig, Qwen4ExpConfig
from deltagram.ngram.exchange_choice import check_name
from deltagram.ngram.placement import Placement
from deltagram.ngram.sharding import check_way
from deltagram.step.plan import CHUNK

SPECULATION = ("off", "prompt_lookup", "mtp", "drafter")
MOST_TOKENS = 65_528  # of a step and its sequences on a GPU: tiles of both go along a grid's second dimension
MOST_BLOCKS = 65_535  # of an indexer, of which kernels/select_blocks.py counts two kinds in one word
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a user may set. Sizes bound memory and the largest step; they never change a result.

    device: "auto" (CUDA if there is one), "cpu", "cuda" or "cuda:N".
    dtype: what the model computes in: "auto" (float32 on a CPU, bfloat16 on a GPU), "float32" or "bfloat16".
    max_context: tokens a request may reach, prompt and output together; if None the model's own limit, or what the
        kernels of an indexer take on a GPU, if that is less.
    max_num_sequences: requests that run at once; others wait.
    max_num_tokens: tokens of the largest step, at least 63 + max_num_sequences, or + (1 + num_draft) *
        max_num_sequences with speculation; longer prompts are run in chunks.
    cache_bytes: memory for keys, values and index keys; 1 GiB on a CPU and 60 % of what is free on a GPU if None.
    state_dtype: what the recurrent state is kept in. "bfloat16", on a GPU only, halves what a decode step moves and
        costs accuracy, with every token a little more: docs/gated-delta.md has the figures of both.
    ngram_placement: where memory tables live: "device", "host", "shared", "disk" or "cached:SIZE:KIND", which give the
        same bits; see docs/ngram-memory.md.
    ngram_split: how ranks divide the tables: "heads", "rows", or "auto": by heads where they can be. Tables that are
        "shared" are not divided. ngram_exchange: how rows come from the ranks that have them: "collective", "peer",
        "lamport", or "auto", the first that is possible. The bits are the same; see docs/exchange.md.
    run_ahead: whether memory chains start with the step, beside the layers (on a GPU); else each runs where its layer
        asks for it. The bits are the same.
    eager: run steps without capturing them as graphs. Slow; for debugging. On a CPU there are no graphs.
    graph_bytes: memory the graphs may take; starting fails if they need more. No bound if None.
    speculation: who drafts tokens that the next step verifies: "off"; "prompt_lookup", from the request's own text;
        "mtp", the checkpoint's draft head; "drafter", the callable given to LLM(drafter=...). The tokens are the same.
    num_draft: the most drafts a step verifies for a request, 1 to 5.
    adaptive_drafts: draft as much for each request as pays, which may be nothing; else always `num_draft`.
    synthetic_acceptance: for benchmarks only: tokens that a step with drafts is to add on average, 1 to 1 + num_draft,
        whatever was drafted. The text is then nonsense.
    prefix_cache_bytes: device memory for copies of states that let requests go on from beginnings which others had too;
        0 keeps none. Their keys and values stay in `cache_bytes`, until requests need them. See docs/speculation.md.
    poison: fill free slots and pages with NaN, to show that no result depends on them. Slow; for tests.
    """

    device: str = "auto"
    dtype: str = "auto"
    max_context: int | None = None
    max_num_sequences: int = 16
    max_num_tokens: int = 512
    cache_bytes: int | None = None
    state_dtype: str = "float32"
    ngram_placement: str = "device"
    ngram_split: str = "auto"
    ngram_exchange: str = "auto"
    run_ahead: bool = True
    eager: bool = False
    graph_bytes: int | None = None
    speculation: str = "off"
    num_draft: int = 3
    adaptive_drafts: bool = True
    synthetic_acceptance: float | None = None
    prefix_cache_bytes: int = 0
    poison: bool = False


@dataclass(frozen=True, slots=True)
class Resolved:
    """Settings with every choice made."""

    device: torch.device
    dtype: torch.dtype
    max_context: int
    max_num_sequences: int
    max_num_tokens: int
    cache_bytes: int | None
    state_dtype: torch.dtype
    ngram_placement: str
    ngram_split: str
    ngram_exchange: str
    run_ahead: bool
    eager: bool
    graph_bytes: int | None
    speculation: str
    num_draft: int
    adaptive_drafts: bool
    synthetic_acceptance: float | None
    prefix_cache_bytes: int
    poison: bool

    @property
    def max_draft(self) -> int:
        """The most drafts a step verifies for a request; 0 without speculation."""
        return self.num_draft if self.speculation != "off" else 0


def parse(values: dict[str, Any]) -> Settings:
    """Settings from keyword arguments. Raises ValueError naming every unknown one."""
    known = [field.name for field in fields(Settings)]
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ValueError(f"unknown settings: {', '.join(unknown)}; known are {', '.join(known)}")
    return Settings(**values)


def resolve(settings: Settings, config: ModelConfig) -> Resolved:
    """Make every choice that is left open.

    Raises ValueError listing every setting that this model or machine cannot honour.
    """
    problems: list[str] = []

    def positive(name: str, optional: bool = False) -> bool:
        value = getattr(settings, name)
        fine = (optional and value is None) or (isinstance(value, int) and not isinstance(value, bool) and value > 0)
        if not fine:
            problems.append(f"{name} must be a positive integer, got {value!r}")
        return fine

    device = find_device(settings.device, problems)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    if settings.dtype != "auto":
        if isinstance(settings.dtype, str) and settings.dtype in _DTYPES:
            dtype = _DTYPES[settings.dtype]
        else:
            problems.append(f"dtype must be auto, {' or '.join(_DTYPES)}, got {settings.dtype!r}")
    limit = config.max_position_embeddings
    if positive("max_context", optional=True) and settings.max_context is not None and settings.max_context > limit:
        problems.append(f"max_context must be at most the model's {limit} positions, got {settings.max_context}")
    if settings.max_context == 1:
        problems.append("max_context must be at least 2, a token to read and one to write, got 1")
    sizes = positive("max_num_sequences"), positive("max_num_tokens")
    drafting = settings.speculation != "off"
    if settings.speculation not in SPECULATION:
        problems.append(f"speculation must be one of {', '.join(SPECULATION)}, got {settings.speculation!r}")
    if positive("num_draft") and settings.num_draft > MAX_DRAFT:
        problems.append(f"num_draft must be from 1 to {MAX_DRAFT}, got {settings.num_draft}")
    elif all(sizes) and isinstance(settings.num_draft, int):
        least = CHUNK - 1 + settings.max_num_sequences * (1 + settings.num_draft * drafting)
        if settings.max_num_tokens < least:
            problems.append(
                f"max_num_tokens must be at least {least}, a prefill chunk of {CHUNK} beside a token"
                f"{' and num_draft drafts' if drafting else ''} for each other of the {settings.max_num_sequences} "
                f"requests of max_num_sequences, got {settings.max_num_tokens}"
            )
    mean = settings.synthetic_acceptance
    if mean is not None:
        numeric = isinstance(mean, int | float) and not isinstance(mean, bool)
        if (
            not drafting
            or not numeric
            or not isinstance(settings.num_draft, int)
            or not 1 <= mean <= 1 + settings.num_draft
        ):
            problems.append(
                f"synthetic_acceptance must be None, or with speculation a number from 1 to 1 + num_draft, got {mean!r}"
            )
    kept = settings.prefix_cache_bytes
    if not isinstance(kept, int) or isinstance(kept, bool) or kept < 0:
        problems.append(f"prefix_cache_bytes must be an integer of at least 0, got {kept!r}")
    positive("cache_bytes", optional=True)
    positive("graph_bytes", optional=True)
    if settings.state_dtype not in ("float32", *(["bfloat16"] if device.type == "cuda" else [])):
        problems.append(f"state_dtype must be float32, or bfloat16 on a GPU, got {settings.state_dtype!r}")
    for check, value in (
        (Placement.parse, settings.ngram_placement),
        (check_way, settings.ngram_split),
        (check_name, settings.ngram_exchange),
    ):
        try:
            check(value)
        except (ValueError, TypeError) as error:
            problems.append(str(error))
    for name in ("run_ahead", "eager", "adaptive_drafts", "poison"):
        if not isinstance(getattr(settings, name), bool):
            problems.append(f"{name} must be True or False, got {getattr(settings, name)!r}")
    _refuse(problems)
    resolved = Resolved(
        device,
        dtype,
        settings.max_context or (limit if device.type == "cpu" else min(limit, _longest(config))),
        settings.max_num_sequences,
        settings.max_num_tokens,
        settings.cache_bytes,
        _DTYPES[settings.state_dtype],
        settings.ngram_placement,
        settings.ngram_split,
        settings.ngram_exchange,
        settings.run_ahead,
        settings.eager,
        settings.graph_bytes,
        settings.speculation,
        settings.num_draft,
        settings.adaptive_drafts,
        settings.synthetic_acceptance,
        settings.prefix_cache_bytes,
        settings.poison,
    )
    _refuse(_too_large(resolved, config))
    return resolved


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ValueError("settings that cannot be honoured:\n" + "\n".join(f"- {problem}" for problem in problems))


def _too_large(settings: Resolved, config: ModelConfig) -> list[str]:
    """Sizes past what the kernels of a step are made for."""
    problems: list[str] = []
    if config.vocab_size > MAX_VOCAB_SIZE:
        problems.append(f"the model's vocab_size must be at most {MAX_VOCAB_SIZE}, got {config.vocab_size}")
    if settings.device.type == "cpu":
        return problems
    tokens, sequences, context = settings.max_num_tokens, settings.max_num_sequences, settings.max_context
    if tokens + sequences > MOST_TOKENS:
        problems.append(
            f"max_num_tokens and max_num_sequences together must be at most {MOST_TOKENS} on a GPU, "
            f"got {tokens} + {sequences}"
        )
    if FULL not in config.layer_types:
        return problems
    most, heads = MOST_COUNTERS // config.num_key_value_heads, f"{config.num_key_value_heads} heads of keys"
    if not isinstance(config, Qwen4ExpConfig) or config.indexer_budget >= context:
        each = 1 + settings.max_draft
        if sequences * each > most:
            drafts = f" and num_draft {settings.num_draft}" if settings.max_draft else ""
            problems.append(
                f"max_num_sequences must be at most {most // each} on a GPU with the model's {heads}{drafts}, "
                f"got {sequences}"
            )
        return problems
    if tokens > most // 8 * 8:  # the largest bucket is a multiple of 8
        problems.append(
            f"max_num_tokens must be at most {most // 8 * 8} on a GPU with the model's {heads}, got {tokens}"
        )
    if context > _longest(config):
        problems.append(
            f"max_context must be at most {_longest(config)} on a GPU with the model's indexer of blocks of "
            f"{config.indexer_compress_ratio} tokens, got {context}"
        )
    return problems


def _longest(config: ModelConfig) -> int:
    """The longest context whose blocks the kernels of an indexer can number."""
    positions = config.max_position_embeddings
    if not isinstance(config, Qwen4ExpConfig) or FULL not in config.layer_types or config.indexer_budget >= positions:
        return positions
    page = page_size(config.indexer_compress_ratio)
    return MOST_BLOCKS // (page // config.indexer_compress_ratio) * page


def find_device(name: str, problems: list[str]) -> torch.device:
    """The device of a name, or of "auto". What this machine lacks is added to `problems`, and the CPU is returned."""
    cpu = torch.device("cpu")
    if name == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else cpu
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        problems.append(f"device must be auto, cpu, cuda or cuda:N, got {name!r}")
        return cpu
    if device.type == "cpu":
        return cpu
    if device.type != "cuda":
        problems.append(f"device must be a CPU or a CUDA device, got {name!r}")
        return cpu
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        problems.append(f"device {name!r} asked for, this machine has {count} CUDA devices")
        return cpu
    return torch.device("cuda", device.index or 0)
