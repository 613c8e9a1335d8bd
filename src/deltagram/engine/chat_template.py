"""Chat templates: a checkpoint's Jinja text that turns messages into a prompt, run as the foreign code that it is.

The environment offers what templates written for Hugging Face expect: `raise_exception`, `strftime_now`, `tojson` that
escapes nothing, `break` and `continue`, `{% generation %}` blocks. It is sandboxed, and bounded in output and loop
steps. Whatever goes wrong inside a template is a ValueError that says so.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import meta, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_OUTPUT = 16 * 2**20  # characters
MAX_LOOP_STEPS = 2**20  # of all loops of one rendering together


class ChatTemplate:
    """A template and the special tokens that it may name (`bos_token`, `eos_token`, ...)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self.special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt for these messages, each a mapping with a string "role" and whatever else the template reads.

        `variables` are the template's own switches (such as `enable_thinking`). Raises ValueError for messages of
        another form, for a variable that the template never reads, and for whatever the template raises or exceeds.
        """
        if not messages:
            raise ValueError("messages must hold at least one message, got none")
        for i, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise ValueError(f'messages[{i}] must be a mapping with a string "role", got {message!r:.200}')
        try:
            template, known = self._compiled
            unknown = sorted(set(variables) - known)
            if unknown:
                raise ValueError(f"the chat template does not read {', '.join(unknown)}; it reads: {sorted(known)}")
            pieces = template.generate(
                self.special_tokens
                | dict(messages=messages, add_generation_prompt=add_generation_prompt, tools=tools, documents=None)
                | variables
                | dict(_steps=itertools.count(1)),
            )
            return "".join(_bounded_output(pieces))
        except ValueError:
            raise
        except Exception as error:  # a template can raise anything
            where = f" at line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise ValueError(f"the chat template failed{where}: {error or type(error).__name__}") from error

    @cached_property
    def _compiled(self) -> tuple[jinja2.Template, set[str]]:
        """The template and the variables that it reads."""
        environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
        environment.filters["tojson"] = _to_json
        environment.filters["_bounded"] = _bounded_loop
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        read = meta.find_undeclared_variables(environment.parse(self.source))
        return environment.from_string(self.source), read - set(environment.globals)


class _Environment(ImmutableSandboxedEnvironment):
    """Counts the steps of every `for` by passing what it iterates over through a filter."""

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "_bounded", [], [], None, None, lineno=loop.lineno)
        return template


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training masks; for a prompt its body is plain text."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@pass_context
def _bounded_loop(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        if next(context["_steps"]) > MAX_LOOP_STEPS:
            raise jinja2.TemplateRuntimeError(f"its loops took more than {MAX_LOOP_STEPS} steps")
        yield item


def _bounded_output(pieces: Iterable[str]) -> Iterator[str]:
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > MAX_OUTPUT:
            raise jinja2.TemplateRuntimeError(f"it wrote more than {MAX_OUTPUT} characters")
        yield piece


def _raise(message: str) -> None:
    raise jinja2.TemplateRuntimeError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
