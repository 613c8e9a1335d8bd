"""The layers of the three families from token ids on, against others' implementations or float64 transcriptions."""

import types

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.models import WordLevel

from deltagram.layers.basic import Factory
from deltagram.ngram.engram import BLOCK, EngramLayer, dequantize
from deltagram.ngram.formats import RowFormat
from deltagram.ngram.longcat import LongCatEmbedding
from deltagram.ngram.spec import HashConstants, engram_specs, longcat_spec
from deltagram.ngram.stores import DeviceStore
from deltagram.ngram.tokens import read_token_map, token_map
from deltagram.testing.ngram import same_bits

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
WORDS = [
    "<pad>", "<eos>", "<img>", "Cat", "cat", "cät", "ＣＡＴ", " cat", "cat ", " ", "  ", "\t\n", "\n", "", "É", "e",
    "ﬁ", "fi", "\u0301", "日本", "か\u3099", "が", "Ⅳ", "iv", "a\r\nb", "a b", "ß", "SS", "İ", "\ue000",
]  # fmt: skip


def tokenizer() -> Tokenizer:
    """Words that the map's rules tell apart, or do not; and bytes that are no text alone."""
    built = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    built.add_special_tokens([AddedToken(word, special=True) for word in WORDS[:3]])
    return built


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate(alphabet)}
    built = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    built.pre_tokenizer, built.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    built.add_special_tokens([AddedToken("<eos>", special=True)])
    return built


def test_the_token_map_by_hand():
    ids = dict(zip(WORDS, token_map(tokenizer()), strict=True))
    assert ids["Cat"] == ids["cat"] == ids["cät"] == ids["ＣＡＴ"] == ids[" cat"] == ids["cat "] != ids["e"]
    assert ids[" "] == ids["  "] == ids["\t\n"] == ids["\n"]  # one space, which is kept
    assert ids["ﬁ"] == ids["fi"] and ids["が"] == ids["か\u3099"] and ids["Ⅳ"] == ids["iv"] and ids["É"] == ids["e"]
    assert ids["<pad>"] == 0 and sorted(set(ids.values())) == list(range(len(set(ids.values()))))
    bytes_alone = token_map(byte_tokenizer())
    assert (
        len(set(bytes_alone)) == 257 - 26 - 3
    )  # letters without case; tab, newline and return are spaces; others differ


@pytest.mark.oracle
@pytest.mark.parametrize("build", [tokenizer, byte_tokenizer])
def test_the_token_map_is_nemo_automodels(build):
    engram = pytest.importorskip("nemo_automodel.components.models.deepseek_v41.engram")
    from transformers import PreTrainedTokenizerFast

    theirs, count = engram._compressed_token_map(PreTrainedTokenizerFast(tokenizer_object=build()))
    assert list(theirs) == token_map(build()) and count == len(set(theirs))


def test_another_tokenizer_is_refused(tmp_path):
    """A map from another tokenizer has another number of ids, and every hash would be another."""
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    mapped = read_token_map(tmp_path)
    sizes = {"pad_token": 0, "max_order": 3, "heads": 2, "base": 100, "layers": [1], "num_rows": [1000]}
    engram_specs(token_map=mapped, compressed_vocab_size=len(set(mapped)), **sizes)
    with pytest.raises(ValueError, match="it is another tokenizer"):
        engram_specs(token_map=mapped, compressed_vocab_size=len(set(mapped)) + 1, **sizes)
    with pytest.raises(ValueError, match=r"tokenizer.json does not exist"):
        read_token_map(tmp_path / "nowhere")


def engram_config(tokens: Tokenizer) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        engram_layer_ids=[1, 4], engram_num_embeddings=[1000, 2000], engram_max_ngram_size=4, engram_vocab_size=61,
        engram_n_heads=3, engram_head_dim=8, engram_pad_token_id=0, hidden_size=24, hc_mult=2, rms_norm_eps=1e-6,
        engram_compressed_vocab_size=len(set(token_map(tokens))), initializer_range=0.3, dtype="float32",
    )  # fmt: skip


@pytest.mark.oracle
def test_engram_is_nemo_automodels_from_ids_to_streams():
    engram = pytest.importorskip("nemo_automodel.components.models.deepseek_v41.engram")
    from nemo_automodel.components.models.common import BackendConfig
    from transformers import PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = engram_config(tokenizer())
    backend = BackendConfig(attn="sdpa", linear="torch", rms_norm="torch")
    hasher = engram.DeepseekV41NgramHash(config, PreTrainedTokenizerFast(tokenizer_object=tokenizer()))
    specs = engram_specs(
        token_map=token_map(tokenizer()),
        compressed_vocab_size=config.engram_compressed_vocab_size,
        pad_token=0,
        max_order=4,
        heads=3,
        base=61,
        layers=config.engram_layer_ids,
        num_rows=config.engram_num_embeddings,
    )
    text, live = torch.randint(len(WORDS), (1, 200)), torch.rand(1, 200) > 0.2
    constants = HashConstants.of(specs, CPU)
    position, zeros = torch.arange(200, dtype=torch.int32), torch.zeros(200, dtype=torch.int32)
    ids = constants.ids(text.int(), zeros, zeros[:1], position, ~live)
    their_ids = hasher(text, token_mask=live)[0]
    assert torch.equal(ids, their_ids.transpose(0, 1))
    for index, layer in enumerate(config.engram_layer_ids):
        theirs = engram.DeepseekV41Engram(config, layer, backend)
        with torch.no_grad():
            theirs.q_weight.uniform_(-1, 2)
            theirs.k_weight.uniform_(-1, 2)
        store = DeviceStore(specs[index].num_rows, RowFormat(torch.float32, 8), CPU)
        store.values.copy_(theirs.embed.weight.detach()[: specs[index].num_rows])
        ours = EngramLayer(24, 2, 9, 1e-6, Factory(CPU, torch.float32), store)
        ours.load(theirs.wkv.weight.detach(), None, theirs.q_weight.detach(), theirs.k_weight.detach())
        hidden = torch.randn(1, 200, 2, 24)
        want = theirs(hidden, their_ids[None, :, index], token_mask=live)[0]
        got = ours(hidden[0], ids[index], live[0])
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        assert torch.equal(got[~live[0]], hidden[0][~live[0]])


def test_an_fp8_projection_is_its_bf16_one():
    """Squares of 32 by 32 share a ue8m0 scale: dequantized once, to weights that bf16 holds exactly."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3 * 64, 2 * 64, generator=generator).to(FP8)
    scale = torch.randint(110, 135, (6, 4), dtype=torch.uint8, generator=generator).view(torch.float8_e8m0fnu)
    exact = torch.empty(weight.shape, dtype=torch.float64)
    for i in range(weight.shape[0]):
        for block in range(4):
            factor = 2.0 ** (int(scale.view(torch.uint8)[i // BLOCK, block]) - 127)
            columns = slice(block * BLOCK, (block + 1) * BLOCK)
            exact[i, columns] = weight[i, columns].double() * factor
    assert torch.equal(dequantize(weight, scale, torch.bfloat16).double(), exact)
    store = DeviceStore(50, RowFormat(torch.float32, 64), CPU)
    store.values.normal_(generator=generator)
    q, k = torch.randn(2, 2, 64, generator=generator)
    quantized, plain = (EngramLayer(64, 2, 2, 1e-6, Factory(CPU, torch.bfloat16), store) for _ in range(2))
    quantized.load(weight, scale, q, k)
    plain.load(exact.bfloat16(), None, q, k)
    hidden, ids = torch.randn(5, 2, 64, generator=generator).bfloat16(), torch.randint(-1, 50, (5, 2))
    assert torch.equal(quantized(hidden, ids), plain(hidden, ids))


def test_scales_of_a_projection_are_checked():
    weight = torch.zeros(64, 96).to(FP8)
    with pytest.raises(ValueError, match=r"are \[2, 2\]; expected \[2, 3\]"):
        dequantize(weight, torch.ones(2, 2), torch.float32)
    with pytest.raises(ValueError, match="1 of 6 scales are not finite"):
        dequantize(weight, torch.full((2, 3), 255, dtype=torch.uint8).index_fill(1, torch.tensor([0, 2]), 3)
                   .index_fill(0, torch.tensor([1]), 3).view(torch.float8_e8m0fnu), torch.float32)  # fmt: skip
    layer = EngramLayer(32, 2, 3, 1e-6, Factory(CPU, torch.float32), DeviceStore(3, RowFormat(torch.float32, 32), CPU))
    ones = torch.ones(2, 32)
    with pytest.raises(ValueError, match="scales are missing"):
        layer.load(torch.zeros(96, 96).to(FP8), None, ones, ones)


@pytest.mark.parametrize("scale_word", [True, False])
def test_longcat_is_its_rules_in_float64(scale_word):
    """From ids to embeddings, token by token, with an ignored token and an end of sequence in the text."""
    vocab, eos, ignored = 60, 7, range(3, 5)
    spec = longcat_spec(vocab_size=vocab, max_order=4, heads=2, ratio=3, end_of_sequence=eos, ignored=[ignored])
    text = [9, 8, 3, 10, 11, 7, 12, 7, 7, 13, 4, 14, 15, 16]
    generator = torch.Generator().manual_seed(0)
    words = torch.randn(vocab, 12, generator=generator)
    tables = [torch.randn(3 * vocab + 2 * i + 1, 2, generator=generator) for i in range(6)]
    projections = [torch.randn(12, 2, generator=generator) for _ in range(6)]

    want = []
    for t, token in enumerate(text):
        total = torch.zeros(12, dtype=torch.float64)
        for i in range(6):
            order, modulus, number = 2 + i // 2, 3 * vocab + 2 * i + 1, 0
            for j in range(order):
                if t - j < 0 or text[t - j] in ignored or (j > 0 and text[t - j] == eos):
                    break
                number += text[t - j] * (pow(vocab, j) % modulus)
            total += projections[i].double() @ tables[i][number % modulus].double()
        word = words[token].double()
        want.append((word + total) / 7 if scale_word else word + total / 7)

    store = DeviceStore(spec.num_rows, RowFormat(torch.float32, 2), CPU)
    store.values.copy_(torch.cat(tables))
    layer = LongCatEmbedding(12, 6, 2, Factory(CPU, torch.float32), scale_word)
    for column, tensor in enumerate(layer.tensors("x").values()):
        tensor.copy_(projections[column])
    assert list(layer.tensors("x"))[5] == "x.post_projs.5.weight"
    position, zeros = torch.arange(len(text), dtype=torch.int32), torch.zeros(len(text), dtype=torch.int32)
    history = torch.tensor([text], dtype=torch.int32)
    ids = HashConstants.of([spec], CPU).ids(history, zeros, zeros[:1], position)[0]
    got = layer(words[torch.tensor(text)], store.lookup(ids, torch.float32))
    torch.testing.assert_close(got.double(), torch.stack(want), rtol=1e-5, atol=1e-5)


def test_a_nan_scale_byte_reaches_the_row_it_belongs_to_and_no_other():
    form = RowFormat(FP8, 64, 32)
    store = DeviceStore(2, form, CPU)
    store.table.fill_(0x38)
    store.table[:, 64:] = torch.tensor([[127, 255], [127, 127]])
    rows = store.lookup(torch.tensor([0, 1]), torch.float32)
    assert rows[0, :32].eq(1).all() and rows[0, 32:].isnan().all() and same_bits(rows[1], torch.ones(64))
