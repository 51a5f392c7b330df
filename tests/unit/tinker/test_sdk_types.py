"""What the SDK can send: its routes, and the fields of what it sends, are taken, or refused where a page
says so."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker
from fastapi.routing import APIRoute
from starlette.routing import Match
from tinker import types

from slime_like.tinker import schemas
from slime_like.tinker.app import CLIENT_CONFIG, make_app
from tests.api_in_process import Api
from tests.paths import ROOT

SDK = Path(inspect.getfile(tinker)).parent
# of the SDK's source: a method of its HTTP client, and the path in its first argument
CALL = re.compile(r"""\._?(get|post|put|patch|delete)\(\s*f?"(/api/v1/[^"]*)\"""")
NOT_HERE = {  # route -> the method that the page names, or the switch of the SDK that is off
    ("POST", "/api/v1/auth/token"): "pjwt_auth_enabled",
    ("POST", "/api/v1/retrieve_futures"): "sample_use_retrieve_futures",
    ("POST", "/api/v1/copy_weights"): "copy_weights",
    ("POST", "/api/v1/training_runs/x/checkpoints/x/publish"): "publish_checkpoint_from_tinker_path",
    ("PUT", "/api/v1/sessions/x/project"): "assign_session_project",
    ("GET", "/api/v1/sessions/x/trace_export"): "export_session_trace",
    ("POST", "/api/v1/sessions/search"): "search_sessions",
    ("GET", "/api/v1/audit"): "get_audit_log",
    ("GET", "/api/v1/billing/usage/events"): "get_billing_usage",
    ("GET", "/api/v1/billing/usage/checkpoints/current"): "get_current_checkpoint_storage_usage",
}  # fmt: skip


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    made = Api(tmp_path_factory.mktemp("api"))
    yield made
    made.close()


def routes_of_the_sdk() -> set[tuple[str, str]]:
    """(method, path with x in place of ids)."""
    files = [f for f in SDK.rglob("*.py") if not f.name.endswith("_test.py")]
    found = [match for file in files for match in CALL.findall(file.read_text(encoding="utf-8"))]
    return {(method.upper(), re.sub(r"{[^}]*}", "x", path)) for method, path in found}


def test_every_route_of_the_sdk(api: Api) -> None:
    """Is here, or in the list of those that are not."""
    routes = [r for r in make_app(api.service).routes if isinstance(r, APIRoute)]

    def is_here(method: str, path: str) -> bool:
        scope = {"type": "http", "method": method, "path": path}
        return any(route.matches(scope)[0] is Match.FULL for route in routes)

    asked = routes_of_the_sdk()
    assert len(asked) > 40, "the SDK's source looks otherwise than this test expects"
    assert {route for route in asked if not is_here(*route)} == NOT_HERE.keys()


def test_what_is_not_here_is_said() -> None:
    pages = [(ROOT / "docs" / language / "server.md").read_text() for language in ("en", "zh")]
    for name in NOT_HERE.values():
        assert CLIENT_CONFIG.get(name) is False or all(f"`{name}`" in page for page in pages), name


PAIRS = [  # what the SDK sends, and what the server reads
    (types.AdamParams, schemas.AdamParams),
    (types.SamplingParams, schemas.SamplingParams),
    (types.LoraConfig, schemas.LoraConfig),
    (types.SampleRequest, schemas.Sample),
    (types.CreateModelRequest, schemas.CreateModel),
    (types.CreateSessionRequest, schemas.CreateSession),
    (types.SaveWeightsRequest, schemas.SaveWeights),
    (types.SaveWeightsForSamplerRequest, schemas.SaveWeightsForSampler),
    (types.LoadWeightsRequest, schemas.LoadWeights),
    (types.CreateSamplingSessionRequest, schemas.CreateSamplingSession),
]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0].__name__)
def test_every_field_of_the_sdk(pair: tuple[type, type[schemas.Body]]) -> None:
    """Unknown ones are status 422: a field that a new SDK brings is missed here, not by its users.
    With the SDK's default of the field, where it has a plain one."""
    sent, read = pair
    fields = {**sent.model_fields}  # type: ignore[attr-defined]
    fields.pop("type", None)
    assert fields.keys() <= read.model_fields.keys()
    for name, field in fields.items():
        ours = read.model_fields[name]
        if isinstance(field.default, str | int | float) and not ours.is_required():
            assert ours.default == field.default, name


def test_optimizers_of_the_sdk() -> None:
    """AdamW is the one that is here; another one of a new SDK needs a decision."""
    optimizers = {
        name
        for name in dir(types)
        if name.endswith(("OptimizerConfig", "Params")) and inspect.isclass(getattr(types, name))
    }
    assert optimizers == {
        "AdamOptimizerConfig", "AdamParams", "DimuonOptimizerConfig", "DimuonParams", "SamplingParams",
    }  # fmt: skip
