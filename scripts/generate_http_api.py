"""Write docs/http_api.md: the routes of the Tinker server and of the agent gateway, with bodies and
errors, from their FastAPI apps.

python scripts/generate_http_api.py [--check]
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute

from arguments.schema import ServerConfig
from slime_like.agents.app import make_app as make_gateway
from slime_like.agents.tasks import TaskQueue
from slime_like.origin_check import OriginCheck
from slime_like.tinker.app import make_app as make_server
from slime_like.tinker.base_model import BaseModel
from slime_like.tinker.data import DataLimits
from slime_like.tinker.model_registry import ModelRegistry
from slime_like.tinker.operations import ServerOperations
from slime_like.tinker.request_queue import Dispatcher
from slime_like.tinker.service import Service, make_folders
from slime_like.tinker.store import Journal

PAGE = Path(__file__).resolve().parent.parent / "docs/http_api.md"
SERVER_ERRORS = {
    400: "the body is not JSON, protobuf or zstd",
    401: "the key in `X-API-Key` (or `Authorization: Bearer`) is missing or unknown; see"
    " `--api-key-file`",
    403: "the `Host` or `Origin` is not this machine's, a download link is invalid or expired, the"
    " route is for operators, or the limit of sessions or models is reached",
    404: "unknown route, session, model, sampler or checkpoint, or one that belongs to another key",
    405: "the route does not accept this method",
    406: "the result is protobuf and `Accept` does not include it",
    408: "the body took too long to arrive",
    410: "the session or model has ended, or the result is no longer kept",
    413: "the body exceeds `--max-body-mb`",
    415: "a content encoding other than zstd",
    422: "the JSON does not match the schema; the message names the field and its legal values",
    429: "too many queued requests: retry later",
    431: "too many headers",
    503: "the request cannot be stored, or (`/api/v1/healthz`) requests are not being executed",
}
GATEWAY_ERRORS = {
    400: "the body is not a JSON object, a parameter is invalid or unsupported (the message names"
    " it), or the prompt is too long",
    401: "the key is missing, or belongs to no running episode",
    403: "the request is of a web page (its `Host` or `Origin` is not the gateway's)",
    408: "the body took too long to arrive",
    410: "the episode has ended",
    413: "the body is too large",
    429: "too many concurrent requests of one episode; `retry-after` says when to retry",
    500: "the gateway failed on this request",
    503: "the engine aborted the request",
}


def server() -> FastAPI:
    """The Tinker server's app with an empty registry; its workers are never called."""

    async def nobody(id: str, command: dict[str, Any]) -> Any:
        raise AssertionError("a description executes nothing")

    with tempfile.TemporaryDirectory() as name:
        make_folders(Path(name))
        journal = Journal(":memory:")
        config = ServerConfig()
        registry = ModelRegistry(journal)
        operations = ServerOperations(
            registry, nobody, folder=Path(name), base="/m", max_snapshots=1
        )
        dispatcher = Dispatcher(journal, operations, max_waiting=1, gap_s=1.0, batch=1)
        base = BaseModel("/m", "m", "Arch")
        limits = DataLimits(100, 32, 4096)
        return make_server(Service(config, base, limits, registry, dispatcher, operations))


def gateway() -> FastAPI:
    tasks = TaskQueue(["key"], heartbeat_s=1.0, timeout_s=1.0)
    return make_gateway({}, max_body=1, origin_check=OriginCheck("127.0.0.1"), tasks=tasks)


def routes(app: FastAPI) -> Iterator[APIRoute]:
    """All routes once; the gateway's variants with the key in the path are skipped."""
    for route in app.routes:
        if isinstance(route, APIRoute) and not route.path.startswith("/session/{key}/"):
            yield route


def _bound(value: float) -> str:
    powers = {2**n - less: f"2^{n}" + " - 1" * less for n in (31, 63) for less in (0, 1)}
    powers |= {-(2**63): "-2^63"}
    return powers.get(int(value)) or f"{value:.6g}"


def _kind(schema: Mapping[str, Any], models: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return f"`{schema['$ref'].rsplit('/', 1)[1]}`"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_kind(each, models) for each in schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(f"`{json.dumps(value)}`" for value in values)
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}), models)}"
    names = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    names |= {"minLength": "length >=", "maxLength": "length <="}
    bounds = [f"{sign} {_bound(schema[name])}" for name, sign in names.items() if name in schema]
    return " ".join([schema.get("type", "any"), f"({', '.join(bounds)})" if bounds else ""]).strip()


def _fields(schema: Mapping[str, Any]) -> Iterator[str]:
    """Table rows: field, type and default."""
    models = schema.get("$defs", {})
    required = schema.get("required", [])
    for name, field in schema.get("properties", {}).items():
        if name == "type" and field.get("default", "") is None:
            continue  # the SDK's name of the body, which is not used
        if name in required:
            default = "required"
        else:
            default = f"`{json.dumps(field['default'])}`" if "default" in field else ""
        kind = _kind(field, models)
        yield f"| `{name}` | {kind} | {default} |".replace("|  |", "| |")
    for name, model in models.items():
        for row in _fields(model):
            yield row.replace("| `", f"| `{name}.", 1)


def _section(route: APIRoute) -> Iterator[str]:
    yield f"### `{' '.join(sorted(route.methods or ()))} {route.path}`"
    yield ""
    yield " ".join(route.description.split())
    yield ""
    content = (route.openapi_extra or {}).get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema", {})
    if rows := list(_fields(schema)):
        yield from ("| field | value | default |", "|---|---|---|", *rows, "")


def _errors(errors: Mapping[int, str]) -> Iterator[str]:
    yield from ("| status | when |", "|---|---|")
    yield from (f"| {status} | {words} |" for status, words in errors.items())
    yield ""


def page() -> str:
    """The text of docs/http_api.md."""
    lines = [
        "# HTTP API", "",
        "Routes of the [Tinker-compatible server](en/server.md) ([中文](zh/server.md)) and of the",
        "[agent gateway](en/agents.md) ([中文](zh/agents.md)), written from the FastAPI apps by",
        "`scripts/generate_http_api.py`. Bodies and replies are JSON unless stated otherwise;",
        "unknown fields are rejected.", "",
        "## Tinker server", "",
        "Pass the key as `X-API-Key` or `Authorization: Bearer`. A future is",
        "`{\"request_id\": ...}`; `retrieve_future` waits for its result. A retried request with",
        "the same sequence numbers and the same body gets the same future. Errors are",
        "`{\"detail\": ...}`:", "",
        *_errors(SERVER_ERRORS),
    ]  # fmt: skip
    for route in routes(server()):
        lines += _section(route)
    lines += [
        "## Agent gateway", "",
        "Pass the key as `Authorization: Bearer`, as `X-Api-Key`, or in the path:",
        "`/session/KEY/v1/...`. Sampling parameters are those of the run, whatever a client asks",
        "for. A field listed with values accepts only these; any other field accepts what its API",
        "allows. Errors have the format of the API that was called,",
        "`{\"error\": {\"type\": ..., \"message\": ...}}`:", "",
        *_errors(GATEWAY_ERRORS),
    ]  # fmt: skip
    for route in routes(gateway()):
        lines += _section(route)
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    if "--check" in sys.argv[1:]:
        if PAGE.read_text(encoding="utf-8") == page():
            return 0
        print(f"{PAGE.name} is not current: python scripts/generate_http_api.py", file=sys.stderr)
        return 1
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
