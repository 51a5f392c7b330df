"""docs/http_api.md is what the apps of the server and of the gateway say."""

from __future__ import annotations

import ast
import re

import pytest

from scripts.generate_http_api import (
    GATEWAY_ERRORS,
    PAGE,
    SERVER_ERRORS,
    gateway,
    page,
    routes,
    server,
)
from slime_like.agents.app import _STATUS
from tests.paths import ROOT

STARLETTES = {405}  # for a route with another method


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page()


@pytest.mark.parametrize("make", [server, gateway])
def test_every_route_says_what_it_does(make) -> None:
    found = list(routes(make()))
    assert len(found) >= 9
    assert not [route.path for route in found if not route.description]


def test_a_body_that_is_parsed_is_described() -> None:
    """Every model that the code reads a body as is in the page."""
    text = (ROOT / "slime_like/tinker/app.py").read_text()
    read = set(re.findall(r"schemas\.([A-Z]\w+)", text))
    described = {
        route.openapi_extra["requestBody"]["content"]["application/json"]["schema"]["title"]
        for route in routes(server())
        if route.openapi_extra
    }
    assert described == read - {"Body"}


def statuses(folder: str, names: set[str]) -> set[int]:
    """Numbers from 400 on that are arguments of calls of these names."""
    found = set()
    for path in (ROOT / "slime_like" / folder).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                called = getattr(node.func, "id", getattr(node.func, "attr", ""))
                values = [a.value for a in node.args if isinstance(a, ast.Constant)]
                if called in names:
                    found |= {v for v in values if isinstance(v, int) and 400 <= v < 600}
    return found


def test_the_errors_are_those_of_the_code() -> None:
    assert SERVER_ERRORS.keys() - STARLETTES == statuses("tinker", {"HttpError", "json_response"})
    own = {status for status, _ in _STATUS.values()}
    assert GATEWAY_ERRORS.keys() == own | statuses("agents", {"RefusedRequest", "error_response"})
