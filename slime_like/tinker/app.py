"""The routes of the API. Bodies are parsed here; what they mean is in service.py, how records are
told in records.py."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from arguments.rules.server import is_loopback
from slime_like.tinker import schemas
from slime_like.tinker.descriptions import POSTS, takes
from slime_like.tinker.downloads import Downloads
from slime_like.tinker.errors import HttpError
from slime_like.tinker.futures import PROTOBUF
from slime_like.tinker.middleware import DOWNLOADS, IS_OPERATOR, OWNER, unpacks
from slime_like.tinker.prometheus import make_metrics
from slime_like.tinker.serializers import (
    checkpoint_record,
    holdings,
    page_of,
    run_record,
    session_record,
)
from slime_like.tinker.service import Service

ROOT = "/api/v1"
B = TypeVar("B", bound=schemas.Body)
# Nothing needs to be negotiated: features that are not implemented are off.
CLIENT_CONFIG = {
    "pjwt_auth_enabled": False, "parallel_fwdbwd_chunks": True, "fwdbwd_max_chunk_len": 1024,
    "fwdbwd_max_chunk_bytes_count": 5_000_000, "sample_use_retrieve_futures": False, "custom_loss_server_side": False,
    "sample_join_sampling_session": True,
}  # fmt: skip
METADATA_ONLY_BYTES = (
    2**20
)  # larger results are announced with their size first, if the client supports it


def make_app(service: Service) -> FastAPI:
    app = FastAPI(title="slime_like", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(HttpError, _told)
    app.add_exception_handler(HTTPException, _told)
    _posts(app, service)
    _work_routes(app, service)
    _session_routes(app, service)
    _list_routes(app, service)
    _checkpoint_routes(app, service)
    _operator_routes(app, service)
    _download_routes(app, service)
    _metrics_route(app, service)
    return app


def answer(value: Any, status: int = 200) -> Response:
    """A JSON response in ASCII, because a client's text may not be encodable in UTF-8."""
    return Response(
        json.dumps(value, allow_nan=False), status_code=status, media_type="application/json"
    )


async def _told(request: Request, error: Exception) -> Response:
    if isinstance(error, HttpError):
        return answer({"detail": str(error)}, error.status)
    assert isinstance(error, HTTPException)
    unknown = error.detail in (
        "Not Found",
        "Method Not Allowed",
    )  # Starlette's text for an unknown route
    detail = (
        f"{request.method} {request.url.path[:256]} is not offered here"
        if unknown
        else error.detail
    )
    return answer({"detail": detail}, error.status_code)


async def read(request: Request, kind: type[B]) -> B:
    """Parse the body of a request. Raises HttpError 400 for invalid JSON, 422 for an invalid
    structure."""
    try:
        value = json.loads(await request.body() or b"{}")
    except (ValueError, RecursionError) as error:
        raise HttpError(400, f"the body is not JSON: {error}") from error
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[:5]
        words = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in first)
        raise HttpError(422, f"{kind.__name__}: {words}") from error


def owner_of(request: Request) -> str:
    return str(request.scope[OWNER])


def _posts(app: FastAPI, service: Service) -> None:
    """Routes with a JSON body that respond immediately; those that need the workers return the id
    of a future."""

    def post(path: str, kind: type[B], does: Callable[[B, str], object]) -> None:
        async def route(request: Request) -> Response:
            return answer(does(await read(request, kind), owner_of(request)))

        app.add_api_route(
            f"{ROOT}/{path}",
            route,
            methods=["POST"],
            description=POSTS[path],
            openapi_extra=takes(kind),
        )

    # compression costs more than it saves unless bodies cross a network
    packed = {"proto_compress_fwdbwd": unpacks() and not is_loopback(service.config.host)}
    post("client/config", schemas.ClientConfig, lambda body, owner: CLIENT_CONFIG | packed)
    post(
        "client/dynamic_config",
        schemas.ClientConfig,
        lambda body, owner: {"sample_cancel_enabled": False},
    )
    post("create_session", schemas.CreateSession, service.lifetimes.create_session)
    post("session_heartbeat", schemas.Heartbeat, service.heartbeat)
    post("create_model", schemas.CreateModel, service.create_model)
    post("get_info", schemas.ModelRequest, service.get_info)
    post("unload_model", schemas.ModelRequest, service.unload_model)
    post("optim_step", schemas.OptimStep, service.optim_step)
    post("save_weights", schemas.SaveWeights, service.save_weights)
    post("save_weights_for_sampler", schemas.SaveWeightsForSampler, service.save_for_sampler)
    post("save_weights_external", schemas.SaveWeightsExternal, service.save_external)
    post("load_weights", schemas.LoadWeights, service.load_weights)
    post("create_sampling_session", schemas.CreateSamplingSession, service.create_sampling_session)
    post("join_sampling_session", schemas.JoinSamplingSession, service.join_sampling_session)
    post("asample", schemas.Sample, service.sample)
    post("weights_info", schemas.WeightsInfo, service.weights_info)


def _work_routes(app: FastAPI, service: Service) -> None:
    """Routes with bodies or results other than JSON."""

    @app.post(f"{ROOT}/forward_backward")
    async def forward_backward(request: Request) -> Response:
        """A future: a forward pass, with its gradients added up or without; the body is the SDK's ForwardBackwardRequest in protobuf, and so is the result."""
        return answer(service.forward_backward(await request.body(), owner_of(request)))

    @app.post(f"{ROOT}/retrieve_future", openapi_extra=takes(schemas.RetrieveFuture))
    async def retrieve_future(request: Request) -> Response:
        """Wait for a future for a while: its result, `{"type": "try_again"}` while it is not done, or an error with its category."""
        body = await read(request, schemas.RetrieveFuture)
        future = service.dispatcher.find(body.request_id, owner_of(request))
        result = await service.dispatcher.result(future, hold_s=service.config.future_hold_s)
        if isinstance(result, dict):
            return answer(result)
        content, content_type = result
        if body.allow_metadata_only and len(content) > METADATA_ONLY_BYTES:
            return answer({"status": "complete_metadata", "response_payload_size": len(content)})
        if content_type == PROTOBUF and PROTOBUF not in request.headers.get("accept", ""):
            raise HttpError(406, f"this result is protobuf: accept {PROTOBUF}")
        return Response(content, media_type=content_type)

    @app.post(f"{ROOT}/telemetry")
    async def telemetry(request: Request) -> Response:
        """Accepted, and thrown away unread."""
        return answer({"status": "accepted"})  # discarded unread


def _session_routes(app: FastAPI, service: Service) -> None:
    registry = service.registry

    @app.get(f"{ROOT}/healthz")
    async def healthz() -> Response:
        """200 while requests are executed, else 503 with the reason; needs no key."""
        problem = service.problem()
        if problem is not None:
            return answer({"status": "unhealthy", "detail": problem}, 503)
        return answer({"status": "ok"})

    @app.get(f"{ROOT}/get_server_capabilities")
    async def capabilities() -> Response:
        """The models that are served, and limits."""
        return answer(service.capabilities())

    @app.get(f"{ROOT}/sessions")
    async def sessions(request: Request) -> Response:
        """Sessions of this key that are open."""
        owner = owner_of(request)
        return answer({"sessions": [s.id for s in registry.sessions.values() if s.owner == owner]})

    @app.get(f"{ROOT}/sessions/{{session_id}}")
    async def session(request: Request, session_id: str) -> Response:
        """A session with its models and samplers."""
        found = registry.sessions.get(session_id)
        if found is None or found.owner != owner_of(request):
            raise HttpError(404, f"session {session_id} does not exist")
        return answer(session_record(registry, found))

    @app.post(f"{ROOT}/sessions/{{session_id}}/finish", openapi_extra=takes(schemas.FinishSession))
    async def finish(request: Request, session_id: str) -> Response:
        """End a session with its models and samplers; what is saved stays."""
        await read(request, schemas.FinishSession)
        service.lifetimes.finish_session(session_id, owner_of(request))
        return answer({})

    @app.get(f"{ROOT}/samplers/{{sampler_id}}")
    async def sampler(request: Request, sampler_id: str) -> Response:
        """A sampler and what it samples from."""
        found = service.sampler(sampler_id, owner_of(request))
        return answer(
            {"sampler_id": found.id, "base_model": service.base.name, "model_path": found.source}
        )


def _list_routes(app: FastAPI, service: Service) -> None:
    registry = service.registry

    @app.get(f"{ROOT}/training_runs")
    async def training_runs(request: Request) -> Response:
        """Models of this key, the newest first; `limit` and `offset` in the query."""
        mine = sorted(
            (m for m in registry.models.values() if m.owner == owner_of(request)),
            key=lambda m: -m.created,
        )
        page, cursor = page_of(mine, request.query_params)
        return answer(
            {"training_runs": [run_record(registry, model) for model in page], "cursor": cursor}
        )

    @app.get(f"{ROOT}/training_runs/{{run_id}}")
    async def training_run(request: Request, run_id: str) -> Response:
        """One model."""
        return answer(run_record(registry, registry.model(run_id, owner_of(request))))

    @app.get(f"{ROOT}/training_runs/{{run_id}}/checkpoints")
    async def checkpoints_of_run(request: Request, run_id: str) -> Response:
        """Checkpoints of one model."""
        mine = [
            c
            for c in registry.checkpoints.values()
            if c.run == run_id and c.owner == owner_of(request)
        ]
        return answer({"checkpoints": [checkpoint_record(c) for c in mine]})


def _checkpoint_routes(app: FastAPI, service: Service) -> None:
    registry = service.registry

    @app.get(f"{ROOT}/checkpoints")
    async def checkpoints(request: Request) -> Response:
        """Checkpoints of this key, the newest first; `limit` and `offset` in the query."""
        mine = sorted(
            (c for c in registry.checkpoints.values() if c.owner == owner_of(request)),
            key=lambda c: -c.created,
        )
        page, cursor = page_of(mine, request.query_params)
        return answer({"checkpoints": [checkpoint_record(c) for c in page], "cursor": cursor})

    @app.delete(f"{ROOT}/training_runs/{{run_id}}/checkpoints/{{checkpoint_id:path}}/publish")
    async def unpublish(run_id: str, checkpoint_id: str) -> Response:
        """Refused (404): no checkpoint is public."""
        raise HttpError(404, "unpublish is not offered here: no checkpoint is public")

    @app.delete(f"{ROOT}/training_runs/{{run_id}}/checkpoints/{{checkpoint_id:path}}")
    async def delete_checkpoint(request: Request, run_id: str, checkpoint_id: str) -> Response:
        """Delete a checkpoint."""
        service.operations.drop_checkpoint(
            service.checkpoint(f"tinker://{run_id}/{checkpoint_id}", owner_of(request))
        )
        return answer({})

    @app.put(
        f"{ROOT}/training_runs/{{run_id}}/checkpoints/{{checkpoint_id:path}}/ttl",
        openapi_extra=takes(schemas.SetTtl),
    )
    async def set_ttl(request: Request, run_id: str, checkpoint_id: str) -> Response:
        """A checkpoint goes after so many seconds; `null` keeps it."""
        checkpoint = service.checkpoint(f"tinker://{run_id}/{checkpoint_id}", owner_of(request))
        seconds = (await read(request, schemas.SetTtl)).ttl_seconds
        checkpoint.expires = None if seconds is None else time.time() + seconds
        registry.keep(checkpoint)
        return answer({})


def _download_routes(app: FastAPI, service: Service) -> None:
    """Download routes. Links require a key; the files behind them do not, since their path is
    signed."""
    downloads = Downloads(service.registry)

    @app.get(
        f"{ROOT}/training_runs/{{run_id}}/checkpoints/{{checkpoint_id:path}}/external_weights_urls"
    )
    async def links(request: Request, run_id: str, checkpoint_id: str) -> Response:
        """Signed links to the files of an exported folder."""
        found = service.checkpoint(f"tinker://{run_id}/{checkpoint_id}", owner_of(request))
        return answer(downloads.links(found, f"{request.base_url}{DOWNLOADS.lstrip('/')}"))

    @app.get(f"{DOWNLOADS}{{expires:int}}/{{signature}}/{{path:path}}")
    async def file(expires: int, signature: str, path: str) -> Response:
        """A file behind a signed link; needs no key."""
        return FileResponse(downloads.file(expires, signature, path))


def _metrics_route(app: FastAPI, service: Service) -> None:
    metrics = make_metrics(service)

    @app.get("/metrics")
    async def prometheus() -> Response:
        """Metrics for Prometheus."""
        if metrics is None:
            raise HttpError(404, "metrics need prometheus_client; pip install 'slime_like[server]'")
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")


def _operator_routes(app: FastAPI, service: Service) -> None:
    """Routes for operators, covering all keys."""

    def check(request: Request) -> None:
        if not request.scope[IS_OPERATOR]:
            raise HttpError(403, "this is for keys of --operator-key-file")

    @app.get(f"{ROOT}/operator/sessions")
    async def sessions(request: Request) -> Response:
        """For operators: who holds what, of all keys."""
        check(request)
        return answer({"sessions": holdings(service.registry), "problem": service.problem()})

    @app.post(f"{ROOT}/operator/sessions/{{session_id}}/finish")
    async def finish(request: Request, session_id: str) -> Response:
        """For operators: end a session of any key."""
        check(request)
        session = service.registry.sessions.get(session_id)
        if session is None:
            raise HttpError(404, f"session {session_id} does not exist")
        service.lifetimes.finish_session(session_id, session.owner, "by an operator")
        return answer({})
