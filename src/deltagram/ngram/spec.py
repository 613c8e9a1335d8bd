"""Hash families: which rows of a memory table the n-grams ending at a token read.

A HashSpec holds the constants of one memory layer, derived from its model's config as the model's authors derive them;
kernels/ngram_hash.py turns it and the token history into row ids.
"""

from dataclasses import dataclass

_MASK64 = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_INT64_MAX = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class HashSpec:
    """The constants of one memory layer's hash.

    multipliers: one a lookback, odd, so small that token * multiplier stays in int64; moduli and offsets: one a column, in
    (order, head) order; num_rows: rows of the layer's table, padding included; fill: the token id that stands for a missing
    one; end_of_sequence: the token id that closes the text before it.
    """

    multipliers: tuple[int, ...]
    moduli: tuple[int, ...]
    offsets: tuple[int, ...]
    num_rows: int
    fill: int
    end_of_sequence: int

    @property
    def num_columns(self) -> int:
        """Rows a token reads."""
        return len(self.moduli)


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

    Multipliers: splitmix64 of seed + 10007 * layer, one a lookback. Moduli: the next unused primes from `base` on, so that no
    two columns of the model share one. Rows are padded to a multiple of `divisor`. Source: Qwen4-Exp's published config.
    """
    half_bound = max(1, (_INT64_MAX // vocab_size) // 2)
    start = seed + 10007 * layer
    multipliers = tuple(_splitmix64(start + _GAMMA * (i + 1)) % half_bound * 2 + 1 for i in range(max_order))
    columns = (max_order - 1) * heads
    moduli = primes_from(base, columns * (layer + 1))[columns * layer :]
    offsets = tuple(sum(moduli[:column]) for column in range(columns))
    num_rows = -(-sum(moduli) // divisor) * divisor
    return HashSpec(multipliers, tuple(moduli), offsets, num_rows, end_of_sequence, end_of_sequence)


def primes_from(start: int, count: int) -> list[int]:
    """The first `count` primes that are at least `start`."""
    primes: list[int] = []
    candidate = max(start, 2)
    while len(primes) < count:
        if _is_prime(candidate):
            primes.append(candidate)
        candidate += 1
    return primes


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
