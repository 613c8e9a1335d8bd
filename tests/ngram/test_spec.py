"""The constants of the three families: those their authors published, and what does not fit is refused."""

import time

import pytest
import torch

from deltagram.ngram.spec import HashConstants, engram_specs, longcat_spec, primes_from, qwen4_exp_spec

ENGRAM = {
    "compressed_vocab_size": 99092,
    "pad_token": 2,
    "max_order": 4,
    "heads": 8,
    "base": 16_000_000,
    "layers": [1, 14],
    "num_rows": [384006168, 384016682],
}
QWEN4_EXP = {
    "vocab_size": 248320,
    "max_order": 3,
    "heads": 8,
    "base": 20_000_000,
    "divisor": 128,
    "seed": 1234,
    "end_of_sequence": 248044,
}
LONGCAT = {"vocab_size": 131072, "max_order": 4, "heads": 4, "ratio": 78, "end_of_sequence": 2}


def test_published_constants_in_under_five_seconds():
    begin = time.perf_counter()
    first, last = engram_specs(token_map=range(99092), **ENGRAM)
    ple = qwen4_exp_spec(**QWEN4_EXP, layer=0)
    longcat = longcat_spec(**LONGCAT)
    assert time.perf_counter() - begin < 5
    assert first.multipliers == (76632096046245, 4839876093313, 35959672319349, 73987337458391)
    assert last.multipliers == (67716810739261, 51510806800915, 30921347202721, 82619226485591)
    assert (first.moduli[0], first.moduli[-1]) == (16000057, 16000463)
    assert (last.moduli[0], last.moduli[-1]) == (16000477, 16000889)
    assert [sum(spec.moduli) for spec in (first, last)] == ENGRAM["num_rows"]
    assert len({*first.moduli, *last.moduli}) == 48 and first.num_columns == 24
    assert ple.multipliers == (23703573157769, 20109073645365, 8052911324071)
    assert (ple.moduli[0], ple.moduli[-1]) == (20000003, 20000171)
    assert (sum(ple.moduli), ple.num_rows) == (320001446, 320001536)
    assert longcat.moduli == tuple(10223616 + 2 * column + 1 for column in range(12))
    for spec in (first, last, ple, longcat):
        assert spec.offsets[0] == 0 and spec.offsets[-1] + spec.moduli[-1] == sum(spec.moduli) <= spec.num_rows


def test_no_product_leaves_int64():
    """The remedy for silent wrap-around: multipliers small enough for the largest token, and sums of reduced powers."""
    for spec, largest in (
        (engram_specs(token_map=range(99092), **ENGRAM)[0], 99091),
        (qwen4_exp_spec(**QWEN4_EXP, layer=1), 248319),
    ):
        assert max(spec.multipliers) * largest < 2**63
    constants = HashConstants.of([longcat_spec(**LONGCAT)], torch.device("cpu"))
    assert int(constants.multipliers.amax()) * 131071 * 4 < 2**63


def test_columns_of_different_layers_share_no_modulus():
    layers = [qwen4_exp_spec(**QWEN4_EXP, layer=layer) for layer in range(3)]
    assert len({modulus for spec in layers for modulus in spec.moduli}) == 3 * 16


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"token_map": range(99091)}, "compresses to 99091 ids; engram_compressed_vocab_size is 99092"),
        ({"pad_token": 99092}, "engram_pad_token_id is 99092"),
        ({"num_rows": [384006168]}, "do not pair up"),
        (
            {"num_rows": [384006167, 384016682]},
            "layer 1 hashes to 384006168 rows; engram_num_embeddings gives it 384006167",
        ),
    ],
)
def test_engram_refuses_what_does_not_fit(changed, problem):
    with pytest.raises(ValueError, match=problem):
        engram_specs(**({"token_map": range(99092)} | ENGRAM | changed))


def test_primes():
    assert primes_from(2, 6) == [2, 3, 5, 7, 11, 13]
    assert primes_from(3215031751, 1) != [3215031751]  # a strong pseudoprime to the bases 2, 3, 5 and 7
    assert primes_from(5, 3, {7}) == [5, 11, 13]


def test_unused_lookbacks_have_multiplier_zero():
    constants = HashConstants.of([qwen4_exp_spec(**QWEN4_EXP, layer=0)], torch.device("cpu"))
    assert constants.multipliers.shape == (1, 3, 16)
    assert (constants.multipliers[0, 2, :8] == 0).all() and (constants.multipliers[0, 2, 8:] != 0).all()
