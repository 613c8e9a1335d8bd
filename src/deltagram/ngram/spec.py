"""Hash families: which rows of a memory table the n-grams ending at a token read.

A HashSpec holds the constants of one memory layer, derived from its model's config as the model's authors derive them;
HashConstants puts those of all layers on a device, where kernels/ngram_hash.py turns token history into row ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from deltagram.kernels.ngram_hash import ngram_hash

_MASK64 = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_INT64_MAX = (1 << 63) - 1
_LAYER_SEED = 10007


@dataclass(frozen=True, slots=True)
class HashSpec:
    """The constants of one memory layer's hash; kernels/ngram_hash.py says how they are used.

    multipliers: one a lookback. For the xor mix odd, and so small that token * multiplier stays in int64; for the
    polynomial mix the powers of the vocabulary, which are reduced by each column's modulus before use. moduli and
    offsets: one a column, in (order, head) order. num_rows: rows of the layer's table, padding included. fill: the
    (mapped) id that stands for a missing token. end_of_sequence: the token id that closes the text before it, -1 for
    none. token_map: token id to the id that is hashed, negative for tokens that end an n-gram like the start does;
    None where tokens are hashed as they are.
    """

    multipliers: tuple[int, ...]
    moduli: tuple[int, ...]
    offsets: tuple[int, ...]
    num_rows: int
    fill: int
    end_of_sequence: int = -1
    polynomial: bool = False
    token_map: tuple[int, ...] | None = None

    @property
    def max_order(self) -> int:
        """Tokens of the longest n-gram."""
        return len(self.multipliers)

    @property
    def num_columns(self) -> int:
        """Rows a token reads."""
        return len(self.moduli)


def engram_specs(
    *,
    token_map: Sequence[int],
    compressed_vocab_size: int,
    pad_token: int,
    max_order: int,
    heads: int,
    base: int,
    layers: Sequence[int],
    num_rows: Sequence[int],
) -> list[HashSpec]:
    """The hashes of all memory layers of a DeepSeek-V4.1 model, `layers` being their ids and `num_rows` their tables'
    rows.

    token_map: ngram/tokens.py's, of the model's tokenizer; it must have exactly `compressed_vocab_size` distinct ids,
    as every multiplier derives from that number. Multipliers: numpy's default_rng(10007 * layer id). Moduli: for each
    layer and order, the next primes from `base` on that no other layer or order has. Raises ValueError with
    everything that does not fit. Source: DeepSeek-V4.1's published config and rules.
    """
    count = len(set(token_map))
    problems = []
    if count != compressed_vocab_size:
        problems.append(
            f"the tokenizer compresses to {count} ids; engram_compressed_vocab_size is {compressed_vocab_size}: "
            "it is another tokenizer, and every hash would differ"
        )
    if not 0 <= pad_token < len(token_map):
        raise ValueError(f"engram_pad_token_id is {pad_token}; expected an id of the tokenizer's {len(token_map)}")
    if len(layers) != len(num_rows) or len(set(layers)) != len(layers):
        problems.append(f"engram_layer_ids {list(layers)} and engram_num_embeddings {list(num_rows)} do not pair up")
    bound = max(1, (_INT64_MAX // compressed_vocab_size) // 2)
    mapped = tuple(token_map)
    used: set[int] = set()
    specs = []
    for layer, rows in zip(layers, num_rows, strict=False):
        drawn = np.random.default_rng(_LAYER_SEED * layer).integers(0, bound, size=max_order, dtype=np.int64)
        multipliers = tuple(int(value) * 2 + 1 for value in drawn)
        moduli: list[int] = []
        for _ in range(max_order - 1):
            primes = primes_from(base, heads, used)
            used.update(primes)
            moduli += primes
        if sum(moduli) > rows:
            problems.append(f"layer {layer} hashes to {sum(moduli)} rows; engram_num_embeddings gives it {rows}")
        fill = mapped[pad_token]
        specs.append(HashSpec(multipliers, tuple(moduli), _offsets(moduli), rows, fill, token_map=mapped))
    if problems:
        raise ValueError("\n".join(problems))
    return specs


def qwen4_exp_spec(
    *,
    vocab_size: int,
    max_order: int,
    heads: int,
    base: int,
    divisor: int,
    seed: int,
    end_of_sequence: int,
    layer: int,
) -> HashSpec:
    """The hash of the `layer`-th (from 0) memory layer of a Qwen4-Exp model.

    Multipliers: splitmix64 of seed + 10007 * layer, one a lookback. Moduli: the next unused primes from `base` on, so
    that no two columns of the model share one. Rows are padded to a multiple of `divisor`. Source: Qwen4-Exp's
    published config.
    """
    half_bound = max(1, (_INT64_MAX // vocab_size) // 2)
    start = seed + _LAYER_SEED * layer
    multipliers = tuple(_splitmix64(start + _GAMMA * (i + 1)) % half_bound * 2 + 1 for i in range(max_order))
    columns = (max_order - 1) * heads
    moduli = primes_from(base, columns * (layer + 1))[columns * layer :]
    num_rows = -(-sum(moduli) // divisor) * divisor
    return HashSpec(multipliers, tuple(moduli), _offsets(moduli), num_rows, end_of_sequence, end_of_sequence)


def longcat_spec(
    *,
    vocab_size: int,
    max_order: int,
    heads: int,
    ratio: int,
    end_of_sequence: int,
    ignored: Sequence[range] = (),
) -> HashSpec:
    """The hash of LongCat's n-gram embedding, whose tables are numbered here as one.

    Column c has ratio * vocab_size + 2c + 1 rows; its id is the n-gram read as a number in base `vocab_size`, modulo
    its rows, with 0 for missing tokens. Tokens in `ignored` end an n-gram and have id 0. Source: LongCat-Flash-Lite's
    config.
    """
    columns = (max_order - 1) * heads
    moduli = [ratio * vocab_size + 2 * column + 1 for column in range(columns)]
    powers = tuple(vocab_size**lag for lag in range(max_order))
    token_map = None
    if ignored:
        mapped = np.arange(vocab_size)
        for tokens in ignored:
            mapped[tokens.start : tokens.stop] = -1
        token_map = tuple(mapped.tolist())
    return HashSpec(powers, tuple(moduli), _offsets(moduli), sum(moduli), 0, end_of_sequence, True, token_map)


@dataclass(frozen=True, slots=True)
class HashConstants:
    """The constants of a model's memory layers on a device, in the shapes of kernels/ngram_hash.py."""

    multipliers: Tensor
    moduli: Tensor
    offsets: Tensor
    fill: int
    end_of_sequence: int
    polynomial: bool
    token_map: Tensor | None

    @staticmethod
    def of(specs: Sequence[HashSpec], device: torch.device) -> "HashConstants":
        """Those of `specs`, which must be one family's: they share all but multipliers, moduli and offsets."""
        first = specs[0]
        shared = {(s.fill, s.end_of_sequence, s.polynomial, s.token_map, s.max_order, s.num_columns) for s in specs}
        assert len(shared) == 1, "the layers of a model share a family"
        heads = first.num_columns // (first.max_order - 1)
        multipliers = torch.tensor([[spec.multipliers] * spec.num_columns for spec in specs]).transpose(1, 2)
        moduli = torch.tensor([spec.moduli for spec in specs])
        if first.polynomial:
            multipliers = multipliers % moduli[:, None]
        order = 2 + torch.arange(first.num_columns) // heads
        multipliers = multipliers * (torch.arange(first.max_order)[:, None] < order)
        token_map = None
        if first.token_map is not None:
            token_map = torch.tensor(first.token_map, dtype=torch.int32, device=device)
        return HashConstants(
            multipliers.contiguous().to(device),
            moduli.to(device),
            torch.tensor([spec.offsets for spec in specs], device=device),
            first.fill,
            first.end_of_sequence,
            first.polynomial,
            token_map,
        )

    def ids(
        self, history: Tensor, sequence: Tensor, row: Tensor, position: Tensor, dead: Tensor | None = None
    ) -> Tensor:
        """Row ids of a step's tokens, int64 [layers, T, columns]; the arguments are ngram_hash's."""
        return ngram_hash(
            history,
            sequence,
            row,
            position,
            self.multipliers,
            self.moduli,
            self.offsets,
            self.fill,
            self.end_of_sequence,
            self.polynomial,
            self.token_map,
            dead,
        )


def primes_from(start: int, count: int, used: frozenset[int] | set[int] = frozenset()) -> list[int]:
    """The first `count` primes that are at least `start` and not in `used`."""
    primes: list[int] = []
    candidate = max(start, 2)
    while len(primes) < count:
        if candidate not in used and _is_prime(candidate):
            primes.append(candidate)
        candidate += 1
    return primes


def _offsets(moduli: Sequence[int]) -> tuple[int, ...]:
    return (0, *accumulate(moduli[:-1]))


def _is_prime(value: int) -> bool:
    """Deterministic Miller-Rabin, exact for every value under 3.3e24."""
    small = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
    if value in small:
        return True
    if value < 2 or any(value % prime == 0 for prime in small):
        return False
    twos = ((value - 1) & -(value - 1)).bit_length() - 1
    odd = (value - 1) >> twos
    for base in small:
        power = pow(base, odd, value)
        if power in (1, value - 1):
            continue
        for _ in range(twos - 1):
            power = power * power % value
            if power == value - 1:
                break
        else:
            return False
    return True


def _splitmix64(value: int) -> int:
    value = (value + _GAMMA) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)
