"""Which schemas and patterns are taken, and what is made of them."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltagram.engine.tokenizer import Tokenizer
from deltagram.serving.grammar import GrammarError, Grammars, check_regex, check_schema
from deltagram.serving.limits import Limits
from deltagram.testing.checkpoints import END_OF_TEXT, END_OF_TURN

LIMITS = Limits()


@pytest.fixture(scope="module")
def grammars(tiny):
    return Grammars(Tokenizer.load(tiny), 264, (END_OF_TEXT, END_OF_TURN))


def follow(constraint, text: str) -> bool:
    """Whether the constraint allows the text, byte by byte, and then an end."""
    for byte in text.encode():
        if constraint.finished or not constraint.allowed[byte]:
            return False
        constraint.accept(byte)
    return constraint.finished or bool(constraint.allowed[END_OF_TEXT])


@pytest.mark.parametrize(
    ("pattern", "fits", "fails"),
    [
        ("[0-9]{3}", ["123"], ["12", "1234", "abc"]),
        ("(ab|cd)+e?", ["ab", "abcde"], ["", "e", "abe e"]),
        ("([a-z]+ )*[a-z]+", ["a b c", "word"], ["a  b", " a"]),
        ("é😀?", ["é", "é😀"], ["e", "é😀😀"]),
        (r"\(\+(1|2)*\)", ["(+)", "(+1212)"], ["(+3)"]),
    ],
)
def test_regex(grammars, pattern, fits, fails):
    check_regex(pattern, LIMITS)
    assert all(follow(grammars.constraint({"regex": pattern}), text) for text in fits)
    assert not any(follow(grammars.constraint({"regex": pattern}), text) for text in fails)


LEAVES = st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.text('aé"\\\n😀', max_size=5)
VALUES = st.recursive(LEAVES, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text("ab"), v, max_size=3))


@settings(max_examples=60, deadline=None)
@given(VALUES)
def test_any_json_is_allowed_where_any_is_asked_for(grammars, value):
    text = json.dumps({"value": value}, ensure_ascii=False, separators=(",", ":"))
    assert follow(grammars.constraint({"schema": {"type": "object"}}), text)


def test_masks_hold_the_whole_vocabulary_and_special_tokens_only_end(grammars):
    constraint = grammars.constraint({"regex": "a*"})
    assert constraint.allowed.shape == (264,)
    assert {int(i) for i in constraint.allowed.nonzero()[0]} == {ord("a"), END_OF_TEXT, END_OF_TURN}
    constraint.accept(END_OF_TURN)
    assert constraint.finished


def test_tokens_that_the_model_lacks(tiny):
    fewer = Grammars(Tokenizer.load(tiny), 100, (END_OF_TEXT,))
    assert fewer.constraint({"regex": "[A-z]+"}).allowed.nonzero()[0].tolist() == list(range(ord("A"), 100))
    with pytest.raises(GrammarError, match="the model lacks"):
        fewer.constraint({"regex": "z+"})


@pytest.mark.parametrize(
    "source", [{"regex": "["}, {"regex": "(?=a)"}, {"schema": {"type": "x"}}, {"schema": {"not": {}}}]
)
def test_what_cannot_be_compiled_is_said(grammars, source):
    with pytest.raises(GrammarError, match="cannot be followed"):
        grammars.constraint(source)


def test_a_token_that_is_not_allowed_is_an_error(grammars):
    constraint = grammars.constraint({"regex": "ab"})
    with pytest.raises(GrammarError):
        constraint.accept(ord("x"))


@pytest.mark.parametrize("pattern", ["(a+)+", "x(a*)*y", "(?:[ab]+){2,}", r"(\w+)*$", r"(\)+)+", "([^)]+)+"])
def test_a_repeated_repetition_is_refused(pattern):
    with pytest.raises(ValueError, match="repeat a repetition"):
        check_regex(pattern, LIMITS)
    with pytest.raises(ValueError, match="repeat a repetition"):
        check_schema({"properties": {"a": {"items": [{"pattern": pattern}]}}}, LIMITS)


@pytest.mark.parametrize("pattern", ["(a+b)+", "(a+)?", "(a{2})+", r"\(a+\)+", "(a+)", "([+*])+", r"(\+)+"])
def test_other_repetitions_are_not(pattern):
    check_regex(pattern, LIMITS)
    re.compile(pattern)


SHARED = {"$defs": {"a": {"type": "string"}, "b/c": {"items": {"$ref": "#/$defs/a"}}}}


def test_references_within_a_schema():
    check_schema(SHARED | {"prefixItems": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b~1c"}]}, LIMITS)
    check_schema({"properties": {"$ref": {"type": "string"}}}, LIMITS)
    check_schema({"prefixItems": [{"type": "string"}], "items": {"$ref": "#/prefixItems/0"}}, LIMITS)


CHAIN = {"$ref": "#/$defs/d0", "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(101)}}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"$ref": "#"}, "must not refer to itself"),
        ({"properties": {"a": {"$ref": "#/properties/a"}}}, "must not refer to itself"),
        ({"properties": {"a": {"items": {"$ref": "#/properties"}}}}, "must not refer to itself"),
        ({"$ref": "#/$defs/b", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "itself"),
        ({"$ref": "https://json-schema.org/x"}, "into its own schema"),
        ({"$ref": 3}, "into its own schema"),
        ({"$ref": "#/$defs/none"}, "a part of the schema"),
        ({"prefixItems": [{}], "$ref": "#/prefixItems/1"}, "a part of the schema"),
        (CHAIN, "lead on at most 100 times"),
        ([], "must be a JSON object"),
        ({"enum": ["x" * LIMITS.max_schema_bytes]}, "at most 65536 bytes"),
    ],
)  # fmt: skip
def test_schemas_that_are_refused(schema, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        check_schema(schema, LIMITS)


def test_depth_is_counted_in_objects_and_lists():
    schema: dict = {}
    for _ in range(31):
        schema = {"items": schema}
    check_schema(schema, LIMITS)
    with pytest.raises(ValueError, match="at most 32 deep, got 33"):
        check_schema({"items": schema}, LIMITS)
    for _ in range(100_000):
        schema = {"items": schema}
    with pytest.raises(ValueError, match="got 100032"):
        check_schema(schema, LIMITS)
