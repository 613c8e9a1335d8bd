"""The page at /docs: an OpenAPI description as plain HTML, without scripts or anything from other servers."""

from html import escape
from typing import Any

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }
body { max-width: 60rem; margin: 0 auto; padding: 1rem }
h2 { margin: 2rem 0 .5rem; border-top: 1px solid #8886; padding-top: 1rem; overflow-wrap: anywhere }
code, .type { font-family: ui-monospace, monospace; font-size: .9em }
div { overflow-x: auto }
td, th { text-align: left; vertical-align: top; padding: .15rem 1rem .15rem 0 }
"""


def page(api: dict[str, Any]) -> str:
    """A document of every route and every body of `api`, an OpenAPI description."""
    routes = [
        _route(method, path, operation)
        for path, operations in api["paths"].items()
        for method, operation in operations.items()
    ]
    bodies = [_body(name, schema) for name, schema in sorted(api["components"]["schemas"].items())]
    title = f"{escape(api['info']['title'])} {escape(api['info']['version'])}"
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    intro = f'{escape(api["info"]["description"])} For programs: <a href="openapi.json">openapi.json</a>.'
    return (
        f'<!doctype html><html lang="en"><head>{head}<style>{STYLE}</style></head><body><h1>{title}</h1><p>{intro}</p>'
        + "".join(routes + bodies)
        + "</body></html>"
    )


def _route(method: str, path: str, operation: dict[str, Any]) -> str:
    body = operation.get("requestBody")
    asked = f"<p>Body: {_type(body['content']['application/json']['schema'])}</p>" if body else ""
    answers = "".join(
        f"<tr><td>{escape(status)}</td><td>{escape(answer['description'])}</td></tr>"
        for status, answer in sorted(operation["responses"].items())
    )
    text = escape(operation.get("description", ""))
    return (
        f"<h2>{method.upper()} <code>{escape(path)}</code></h2><p>{text}</p>{asked}<div><table>{answers}</table></div>"
    )


def _body(name: str, schema: dict[str, Any]) -> str:
    needed = schema.get("required", ())
    rows = "".join(
        f"<tr><td><code>{escape(field)}</code>{' (required)' if field in needed else ''}</td>"
        f'<td class="type">{_type(of)}</td><td>{escape(of.get("description", ""))}</td></tr>'
        for field, of in schema.get("properties", {}).items()
    )
    text = escape(schema.get("description", ""))
    return f'<h2 id="{escape(name)}">{escape(name)}</h2><p>{text}</p><div><table>{rows}</table></div>'


def _type(schema: dict[str, Any]) -> str:
    """What a value may be, in words and links."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return " or ".join(_type(each) for each in schema[several])
    if "const" in schema or "enum" in schema:
        return " or ".join(f"<code>{escape(repr(each))}</code>" for each in schema.get("enum", [schema.get("const")]))
    match schema.get("type"):
        case "array":
            return f"list of ({_type(schema['items'])})"
        case "object" if isinstance(values := schema.get("additionalProperties"), dict):
            return f"object of ({_type(values)})"
        case kind:
            return escape(kind or "anything")
