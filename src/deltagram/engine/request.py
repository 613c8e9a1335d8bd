"""A request as the host knows it: its tokens, how many are computed, and what it owns."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from torch import Tensor

from deltagram.engine.detokenizer import Detokenizer
from deltagram.engine.params import SamplingParams
from deltagram.engine.speculate import Gain, PromptLookup


class Status(enum.Enum):
    """Where a request is in its life."""

    NEW = "new"  # not queued yet
    WAITING = "waiting"  # owns nothing; queued, or preempted
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"  # an end token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the end of the context
    ABORT = "abort"
    ERROR = "error"  # the step that ran it failed


class Constraint(Protocol):
    """What a sequence may say, token by token: a grammar's state. Only sampled tokens are told to it, so preemption
    leaves it as it is; a sequence that has one needs its token on the host before its next step is run."""

    @property
    def allowed(self) -> np.ndarray:
        """bool [V]: the tokens that may come next, at least one."""
        ...

    @property
    def finished(self) -> bool:
        """Whether the text is complete and nothing may follow."""
        ...

    def accept(self, token: int) -> None:
        """Go on past a sampled token. What it raises ends its own request alone."""
        ...


@dataclass(eq=False, slots=True)
class Request:
    """One sequence being generated.

    `tokens` are the prompt's and the output's; `computed` of them have been scheduled. A request is prefilled up to
    `prefill_target`, its length when it was (re)admitted, and decodes from there: which of the two it does next follows
    from these alone. While a step that samples for it is `in_flight`, its last token is known to the device alone;
    while one that verifies drafts is, so is how many tokens it has: `computed` is then the most there can be.
    """

    id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_length: int  # tokens at which it ends, prompt included
    end_token_ids: frozenset[int]
    detokenizer: Detokenizer | None = None
    wants_prompt_logits: bool = False
    constraint: Constraint | None = None
    salt: str = ""  # computed state may be shared only among requests of one salt

    status: Status = Status.NEW
    finish_reason: FinishReason | None = None
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    in_flight: int = 0  # steps that run and will bring it a token
    uncertain: int = 0  # of `computed`: drafts that a step verifies which has not ended
    drafted: int = 0  # drafts that its last step verifies, or has verified: they may wait in the rings
    drafts: tuple[int, ...] = ()  # of the host's drafter, for its next step
    num_draft: int = 0  # of a draft head, which its last step leaves on the device for the next one
    drafts_on_host: bool = False
    gain: Gain = field(default_factory=Gain)
    lookup: PromptLookup | None = None
    chain: Sequence[tuple[str, bytes]] = ()  # the keys of its beginnings (engine/prefix.py), when it had so many tokens
    chain_length: int = 0
    cuts: tuple[int, ...] = ()  # where its prefill chunks are to end
    prefill_target: int = 0
    slot: int = -1
    generation: int = 0
    pages: list[int] = field(default_factory=list)
    num_preemptions: int = 0
    prompt_logits: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - len(self.prompt)

    @property
    def needs_last_token(self) -> bool:
        """Whether its next step cannot be planned before the host knows the token of the last one: a constraint or the
        host's drafter asks for it."""
        return self.in_flight > 0 and (self.constraint is not None or self.drafts_on_host)

    @property
    def is_prefilling(self) -> bool:
        """Whether its next tokens are ones that are all known: then they run as prefill, however few they are."""
        return self.computed < self.prefill_target
