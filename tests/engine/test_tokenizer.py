"""The tokenizer against transformers' own, and clear errors for broken folders, texts and templates."""

import json
import re

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from deltagram.engine import chat_template
from deltagram.engine.chat_template import ChatTemplate
from deltagram.engine.tokenizer import Tokenizer

TEMPLATE = """\
{%- if messages[0]["role"] == "system" %}
    {{- bos_token + messages[0].content }}
{%- endif %}
{% for message in messages if message.role != "system" %}
    {% if loop.index0 > 40 %}{% break %}{% endif %}
    {{- "<|start|>" + message.role + "\\n" }}{% generation %}{{ message.content | trim }}{% endgeneration %}
    {%- for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %}
    {{- eos_token + "\\n" }}
{% endfor %}
{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{% if add_generation_prompt %}<|start|>assistant{{ "\\n<think>" if enable_thinking is not defined or enable_thinking }}
{% endif %}"""


def byte_level_backend():
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|bos|>", "<|eos|>"])
    backend.train_from_iterator(["the cat sat on the mat, the hat"] * 5, trainer)
    backend.add_special_tokens([AddedToken("<|start|>", special=True)])
    return backend


@pytest.fixture
def folder(tmp_path):
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "tokenizer_config.json", TOKENIZER_CONFIG)
    write(tmp_path, "config.json", {"eos_token_id": 5})
    write(tmp_path, "generation_config.json", {"eos_token_id": [7, 8]})
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": {"content": "<|bos|>", "__type": "AddedToken"},
    "eos_token": "<|eos|>",
    "pad_token": None,
}


def write(folder, name, value):
    (folder / name).write_text(json.dumps(value))


@pytest.mark.oracle
def test_agrees_with_transformers(folder):
    from transformers import AutoTokenizer

    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    for text in ["", "the cat", " spaced  out \n", "naïve 😀 \ufffd", "a<|eos|>b<|start|> the"]:
        assert ours.encode(text) == theirs(text)["input_ids"]
        ids = ours.encode(text)
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    call = {"name": "f", "arguments": {"q": "<é'\">"}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "  hi é <b> "},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    for kwargs in ({}, {"add_generation_prompt": False}, {"enable_thinking": False}, {"tools": [{"type": "é"}]}):
        kwargs = {"add_generation_prompt": True} | kwargs
        expected = theirs.apply_chat_template(messages, tokenize=False, **kwargs)
        assert ours.apply_chat_template(messages, **kwargs) == expected
        assert "é <b>" in expected and "<|bos|>Be brief." in expected


def test_settings_of_training_do_not_cut_or_pad(folder):
    backend = byte_level_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=20)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.decode(tokenizer.encode("the cat sat")) == "the cat sat"
    assert 2 < len(tokenizer.encode("the cat sat")) < 20


def test_end_tokens(folder):
    eos = byte_level_backend().token_to_id("<|eos|>")
    assert Tokenizer.load(folder).eos_token_ids == (7, 8, eos)
    (folder / "generation_config.json").unlink()
    assert Tokenizer.load(folder).eos_token_ids == (5, eos)
    write(folder, "config.json", {"text_config": {"eos_token_id": [6, eos]}})
    assert Tokenizer.load(folder).eos_token_ids == (6, eos)
    (folder / "config.json").unlink()
    assert Tokenizer.load(folder).eos_token_ids == (eos,)
    (folder / "tokenizer_config.json").unlink()
    assert Tokenizer.load(folder).eos_token_ids == ()
    write(folder, "generation_config.json", {"eos_token_id": "end"})
    with pytest.raises(ValueError, match=r"eos_token_id in .* must be a token id or a list of them, got 'end'"):
        Tokenizer.load(folder)


def test_vocabulary(folder):
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.vocab_size == max(tokenizer.encode("<|start|>")) + 1
    assert tokenizer.is_byte_level and tokenizer.special_ids == set(tokenizer.encode("<|bos|><|eos|><|start|>"))
    assert tokenizer.decode([10**6]) == ""
    small = Tokenizer.load(folder, model_vocab_size=tokenizer.vocab_size - 1)
    assert small.encode("the") == tokenizer.encode("the")
    with pytest.raises(ValueError, match=rf"got token '<\|start\|>' with id {tokenizer.vocab_size - 1}$"):
        small.encode("a<|start|>b")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, r"must hold a tokenizer\.json"),
        ("tokenizer.json", "{", r"tokenizer\.json is not a readable tokenizer: "),
        ("tokenizer.json", '{"version": "1.0"}', r"tokenizer\.json is not a readable tokenizer: "),
        ("tokenizer_config.json", "[1]", r"tokenizer_config\.json must hold a JSON object, got \[1\]"),
        ("generation_config.json", "{,}", r"generation_config\.json is not valid JSON"),
        ("chat_template.jinja", None, None),
    ],
)
def test_broken_folders(folder, name, content, message):
    (folder / name).unlink() if content is None else (folder / name).write_text(content)
    if message:
        with pytest.raises(ValueError, match=message):
            Tokenizer.load(folder)
    else:
        with pytest.raises(ValueError, match="has no chat template"):
            Tokenizer.load(folder).apply_chat_template([{"role": "user", "content": ""}])


def test_places_of_a_template(folder):
    def rendered():
        return Tokenizer.load(folder).apply_chat_template([{"role": "user"}])

    (folder / "chat_template.jinja").unlink()
    write(folder, "chat_template.json", {"chat_template": "json"})
    assert rendered() == "json"
    write(folder, "tokenizer_config.json", {"chat_template": "config"})
    assert rendered() == "config"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "default"}]
    write(folder, "tokenizer_config.json", {"chat_template": named})
    assert rendered() == "default"
    (folder / "chat_template.jinja").write_text("file")
    assert rendered() == "file"
    (folder / "chat_template.jinja").unlink()
    for wrong in (named[:1], 5):
        write(folder, "tokenizer_config.json", {"chat_template": wrong})
        with pytest.raises(ValueError, match="chat_template must"):
            rendered()


@pytest.mark.parametrize("text", ["a\ud83d", "\udc00"])
def test_lone_surrogates(folder, text):
    at = len(text) - 1
    with pytest.raises(ValueError, match=rf"lone surrogate U\+{ord(text[at]):04X} at character {at}$"):
        Tokenizer.load(folder).encode(text)


def test_text_must_be_a_string(folder):
    with pytest.raises(ValueError, match="text must be a string, got b'x'"):
        Tokenizer.load(folder).encode(b"x")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "failed: roles must alternate"),
        ("a\n{% for %}", "failed at line 2: "),
        ("{{ messages[0].content + 1 }}", "failed: .*"),
        ("{{ undefined_thing.x }}", "failed: 'undefined_thing' is undefined"),
        ("{{ ''.__class__.__mro__ }}", "failed: .*__class__.* unsafe"),
        ("{{ messages.append(1) }}", "failed: .*'append' .* unsafe"),
        ("{% for i in range(10**9) %}x{% endfor %}", "failed: .*[Rr]ange"),
        ("{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}", "loops took more than"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "failed: .*recursion"),
        ("{% for i in range(999) %}{{ 'x' * 99999 }}{% endfor %}", "wrote more than"),
    ],
)
def test_templates_that_go_wrong(source, message):
    template = ChatTemplate(source, {})
    with pytest.raises(ValueError, match=f"the chat template {message}" if "failed" in message else message):
        template.render([{"role": "user", "content": "x"}])


def test_loop_steps_are_counted_per_rendering(monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_LOOP_STEPS", 10)
    template = ChatTemplate("{% for i in range(5) %}{% for j in 'a' %}{{ loop.length }}{% endfor %}{% endfor %}", {})
    for _ in range(3):
        assert template.render([{"role": "user"}]) == "11111"


@pytest.mark.parametrize("messages", [[], [1], ["hi"], [{"content": "x"}], [{"role": 1}], [{"role": "user"}, None]])
def test_messages_of_another_form(messages):
    with pytest.raises(ValueError, match=r"messages must|messages\[\d\] must be a mapping"):
        ChatTemplate("", {}).render(messages)


def test_variables_that_the_template_does_not_read():
    template = ChatTemplate(
        "{% if enable_thinking %}x{% endif %}{% if not messages %}{{ raise_exception('') }}{% endif %}", {}
    )
    assert template.render([{"role": "user"}], enable_thinking=True) == "x"
    with pytest.raises(
        ValueError, match=re.escape("does not read enable_thinkin; it reads: ['enable_thinking', 'messages']")
    ):
        template.render([{"role": "user"}], enable_thinkin=True)
