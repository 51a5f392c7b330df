"""The HTTP routes of the API. They parse bodies; the logic is in service.py, the records that they
return in serializers.py."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from arguments.rules.server import is_loopback
from slime_like.extras import pip_install
from slime_like.tinker import schemas
from slime_like.tinker.descriptions import POSTS, body_schema
from slime_like.tinker.downloads import Downloads
from slime_like.tinker.errors import HttpError
from slime_like.tinker.futures import PROTOBUF
from slime_like.tinker.middleware import DOWNLOADS, IS_OPERATOR, OWNER, supports_zstd
from slime_like.tinker.model_registry import KINDS
from slime_like.tinker.prometheus import make_metrics
from slime_like.tinker.serializers import (
    checkpoint_record,
    open_sessions,
    page_of,
    run_record,
    session_record,
)
from slime_like.tinker.service import Service

ROOT = "/api/v1"
B = TypeVar("B", bound=schemas.Body)
CLIENT_CONFIG = {  # features of the SDK that are not implemented here are off
    "pjwt_auth_enabled": False,
    # one after the other, so that a missing request is known to be given up (`Queue.in_order`); an
    # earlier chunk is executed while the next is on its way
    "parallel_fwdbwd_chunks": False,
    "fwdbwd_max_chunk_len": 1024,
    "fwdbwd_max_chunk_bytes_count": 5_000_000,
    "sample_use_retrieve_futures": False,
    "custom_loss_server_side": True,
    "sample_join_sampling_session": True,
    # of older SDKs, such as 0.24 (SkyRL's): what 0.38 always does
    "proto_write_fwdbwd": True,
    "fwd_via_fwdbwd": True,
    "create_model_via_load_weights": True,
}
# if the client supports it, larger results are announced with their size first
METADATA_ONLY_BYTES = 2**20


def make_app(service: Service) -> FastAPI:
    app = FastAPI(title="slime_like", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(HttpError, _error_response)
    app.add_exception_handler(HTTPException, _error_response)
    _json_routes(app, service)
    _protobuf_routes(app, service)
    _session_routes(app, service)
    _list_routes(app, service)
    _checkpoint_routes(app, service)
    _operator_routes(app, service)
    _download_routes(app, service)
    _metrics_route(app, service)
    return app


def json_response(value: object, status: int = 200) -> Response:
    """A JSON response in ASCII, because a client's text may not be encodable in UTF-8."""
    text = json.dumps(value, allow_nan=False)
    return Response(text, status_code=status, media_type="application/json")


async def _error_response(request: Request, error: Exception) -> Response:
    if isinstance(error, HttpError):
        return json_response({"detail": str(error)}, error.status)
    assert isinstance(error, HTTPException)
    detail = error.detail
    if detail in ("Not Found", "Method Not Allowed"):  # Starlette's text for an unknown route
        detail = f"{request.method} {request.url.path[:256]} is not supported"
    return json_response({"detail": detail}, error.status_code)


async def read(request: Request, kind: type[B]) -> B:
    """Parse the body of a request. Raises HttpError 400 for invalid JSON, 422 for an invalid
    structure."""
    try:
        value = json.loads(await request.body() or b"{}")
    except (ValueError, RecursionError) as error:
        raise HttpError(400, f"the body is not valid JSON: {error}") from error
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False, include_context=False)
        message = "; ".join(
            f"{'.'.join(map(str, problem['loc'])) or 'body'}: {problem['msg']}"
            for problem in problems[:5]
        )
        raise HttpError(422, f"{kind.__name__}: {message}") from error


def owner_of(request: Request) -> str:
    return str(request.scope[OWNER])


def _json_routes(app: FastAPI, service: Service) -> None:
    """Routes with a JSON body that respond immediately; those that need the workers return the id
    of a future."""

    def post(path: str, kind: type[B], handler: Callable[[B, str], object]) -> None:
        async def route(request: Request) -> Response:
            owner = owner_of(request)
            try:
                return json_response(handler(await read(request, kind), owner))
            except HttpError as error:
                if error.status == 422:
                    value = json.loads(await request.body() or b"{}")
                    service.refuse_in_turn(path, value, owner, str(error))
                raise

        app.add_api_route(
            f"{ROOT}/{path}",
            route,
            methods=["POST"],
            description=POSTS[path],
            openapi_extra=body_schema(kind),
        )

    # compression costs more than it saves unless bodies cross a network
    compress = supports_zstd() and not is_loopback(service.config.host)
    config = CLIENT_CONFIG | {"proto_compress_fwdbwd": compress}
    dynamic_config = {"sample_cancel_enabled": True}
    post("client/config", schemas.ClientConfig, lambda body, owner: config)
    post("client/dynamic_config", schemas.ClientConfig, lambda body, owner: dynamic_config)
    post("create_session", schemas.CreateSession, service.sessions.create_session)
    post("session_heartbeat", schemas.Heartbeat, service.heartbeat)
    post("create_model", schemas.CreateModel, service.create_model)
    post("get_info", schemas.ModelRequest, service.get_info)
    post("unload_model", schemas.ModelRequest, service.unload_model)
    post("create_custom_loss", schemas.CreateCustomLoss, service.create_custom_loss)
    post("optim_step", schemas.OptimStep, service.optim_step)
    post("save_weights", schemas.SaveWeights, service.save_weights)
    post("save_weights_for_sampler", schemas.SaveWeightsForSampler, service.save_for_sampler)
    post("save_weights_external", schemas.SaveWeightsExternal, service.save_external)
    post("load_weights", schemas.LoadWeights, service.load_weights)
    post("create_sampling_session", schemas.CreateSamplingSession, service.create_sampling_session)
    post("join_sampling_session", schemas.JoinSamplingSession, service.join_sampling_session)
    post("asample", schemas.Sample, service.sample)
    post("cancel_future", schemas.CancelFuture, service.cancel)
    post("weights_info", schemas.WeightsInfo, service.weights_info)


def _protobuf_routes(app: FastAPI, service: Service) -> None:
    """Routes with bodies or results other than JSON."""

    @app.post(f"{ROOT}/forward_backward")
    async def forward_backward(request: Request) -> Response:
        """Future: a forward pass and, unless `forward_only`, a backward pass that accumulates
        gradients. The body is the SDK's ForwardBackwardRequest in protobuf; the result is protobuf
        as well."""
        return json_response(service.forward_backward(await request.body(), owner_of(request)))

    @app.post(f"{ROOT}/retrieve_future", openapi_extra=body_schema(schemas.RetrieveFuture))
    async def retrieve_future(request: Request) -> Response:
        """Wait for a future. Returns its result, an error with its category, or
        `{"type": "try_again"}` if it is not done after a while."""
        body = await read(request, schemas.RetrieveFuture)
        future = service.dispatcher.find(body.request_id, owner_of(request))
        result = await service.dispatcher.result(future, hold_s=service.config.future_hold_s)
        if isinstance(result, dict):
            return json_response(result)
        content, content_type = result
        if body.allow_metadata_only and len(content) > METADATA_ONLY_BYTES:
            return json_response(
                {"status": "complete_metadata", "response_payload_size": len(content)}
            )
        if content_type == PROTOBUF and PROTOBUF not in request.headers.get("accept", ""):
            raise HttpError(406, f"the result is protobuf; Accept must name {PROTOBUF}")
        return Response(content, media_type=content_type)

    @app.post(f"{ROOT}/telemetry")
    async def telemetry(request: Request) -> Response:
        """Accepted and discarded unread."""
        return json_response({"status": "accepted"})


def _session_routes(app: FastAPI, service: Service) -> None:
    registry = service.registry

    @app.get(f"{ROOT}/healthz")
    async def healthz() -> Response:
        """200 while requests are executed, otherwise 503 with the reason. Needs no key."""
        problem = service.problem()
        if problem is not None:
            return json_response({"status": "unhealthy", "detail": problem}, 503)
        return json_response({"status": "ok"})

    @app.get(f"{ROOT}/get_server_capabilities")
    async def capabilities() -> Response:
        """The served models and their context lengths."""
        return json_response(service.capabilities())

    @app.get(f"{ROOT}/sessions")
    async def sessions(request: Request) -> Response:
        """List the open sessions of this key."""
        owner = owner_of(request)
        return json_response(
            {"sessions": [s.id for s in registry.sessions.values() if s.owner == owner]}
        )

    @app.get(f"{ROOT}/sessions/{{session_id}}")
    async def get_session(request: Request, session_id: str) -> Response:
        """Describe a session with its models and samplers."""
        session = registry.sessions.get(session_id)
        if session is None or session.owner != owner_of(request):
            raise HttpError(404, f"session {session_id} does not exist")
        return json_response(session_record(registry, session))

    @app.post(
        f"{ROOT}/sessions/{{session_id}}/finish", openapi_extra=body_schema(schemas.FinishSession)
    )
    async def finish(request: Request, session_id: str) -> Response:
        """End a session with its models and samplers; checkpoints are kept."""
        await read(request, schemas.FinishSession)
        service.sessions.finish_session(session_id, owner_of(request))
        return json_response({})

    @app.get(f"{ROOT}/samplers/{{sampler_id}}")
    async def get_sampler(request: Request, sampler_id: str) -> Response:
        """Describe a sampler and the weights that it samples from."""
        sampler = service.sampler(sampler_id, owner_of(request))
        return json_response(
            {
                "sampler_id": sampler.id,
                "base_model": service.base.name,
                "model_path": sampler.source,
            }
        )


def _list_routes(app: FastAPI, service: Service) -> None:
    registry = service.registry

    @app.get(f"{ROOT}/training_runs")
    async def training_runs(request: Request) -> Response:
        """List the models of this key, newest first. Query parameters: `limit`, `offset`."""
        models = [m for m in registry.models.values() if m.owner == owner_of(request)]
        models.sort(key=lambda m: -m.created)
        page, cursor = page_of(models, request.query_params)
        records = [run_record(registry, model) for model in page]
        return json_response({"training_runs": records, "cursor": cursor})

    @app.get(f"{ROOT}/training_runs/{{run_id}}")
    async def training_run(request: Request, run_id: str) -> Response:
        """Describe a model."""
        return json_response(run_record(registry, registry.model(run_id, owner_of(request))))

    @app.get(f"{ROOT}/training_runs/{{run_id}}/checkpoints")
    async def checkpoints_of_run(request: Request, run_id: str) -> Response:
        """List the checkpoints of a model."""
        own = [c for c in registry.checkpoints.values() if c.owner == owner_of(request)]
        records = [checkpoint_record(c) for c in own if c.run == run_id]
        return json_response({"checkpoints": records})


def _checkpoint_routes(app: FastAPI, service: Service) -> None:
    registry = service.registry

    @app.get(f"{ROOT}/checkpoints")
    async def checkpoints(request: Request) -> Response:
        """List the checkpoints of this key, newest first. Query parameters: `limit`, `offset`."""
        own = [c for c in registry.checkpoints.values() if c.owner == owner_of(request)]
        own.sort(key=lambda c: -c.created)
        page, cursor = page_of(own, request.query_params)
        return json_response(
            {"checkpoints": [checkpoint_record(c) for c in page], "cursor": cursor}
        )

    @app.delete(f"{ROOT}/training_runs/{{run_id}}/checkpoints/{{checkpoint_id:path}}/publish")
    async def unpublish(run_id: str, checkpoint_id: str) -> Response:
        """Not supported (404): checkpoints cannot be published."""
        raise HttpError(404, "checkpoints cannot be published")

    @app.delete(f"{ROOT}/training_runs/{{run_id}}/checkpoints/{{checkpoint_id:path}}")
    async def delete_checkpoint(request: Request, run_id: str, checkpoint_id: str) -> Response:
        """Delete a checkpoint: 204. Its id has its kind (`weights/NAME`): checkpoints of several
        kinds may have one name."""
        if "/" not in checkpoint_id:
            kinds = ", ".join(f"{kind}/{checkpoint_id}" for kind in KINDS.values())
            raise HttpError(400, f"checkpoint {checkpoint_id!r}: give its kind, too: {kinds}")
        checkpoint = service.checkpoint(f"tinker://{run_id}/{checkpoint_id}", owner_of(request))
        service.operations.drop_checkpoint(checkpoint)
        return Response(status_code=204)

    @app.put(
        f"{ROOT}/training_runs/{{run_id}}/checkpoints/{{checkpoint_id:path}}/ttl",
        openapi_extra=body_schema(schemas.SetTtl),
    )
    async def set_ttl(request: Request, run_id: str, checkpoint_id: str) -> Response:
        """Set when a checkpoint expires, in seconds from now; `null` keeps it forever."""
        checkpoint = service.checkpoint(f"tinker://{run_id}/{checkpoint_id}", owner_of(request))
        seconds = (await read(request, schemas.SetTtl)).ttl_seconds
        checkpoint.expires = None if seconds is None else time.time() + seconds
        registry.keep(checkpoint)
        return json_response({})


def _download_routes(app: FastAPI, service: Service) -> None:
    """Download routes. Links require a key; the files behind them do not, since their path is
    signed."""
    downloads = Downloads(service.registry)

    @app.get(
        f"{ROOT}/training_runs/{{run_id}}/checkpoints/{{checkpoint_id:path}}/external_weights_urls"
    )
    async def links(request: Request, run_id: str, checkpoint_id: str) -> Response:
        """Signed download links to the files of an external checkpoint."""
        checkpoint = service.checkpoint(f"tinker://{run_id}/{checkpoint_id}", owner_of(request))
        base_url = f"{request.base_url}{DOWNLOADS.lstrip('/')}"
        return json_response(downloads.links(checkpoint, base_url))

    @app.get(f"{DOWNLOADS}{{expires:int}}/{{signature}}/{{path:path}}")
    async def file(expires: int, signature: str, path: str) -> Response:
        """Download a file through a signed link. Needs no key."""
        return FileResponse(downloads.file(expires, signature, path))


def _metrics_route(app: FastAPI, service: Service) -> None:
    metrics = make_metrics(service)

    @app.get("/metrics")
    async def prometheus() -> Response:
        """Metrics for Prometheus."""
        if metrics is None:
            raise HttpError(404, f"install prometheus_client: {pip_install('server')}")
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")


def _operator_routes(app: FastAPI, service: Service) -> None:
    """Routes for operators, covering all keys."""

    def check(request: Request) -> None:
        if not request.scope[IS_OPERATOR]:
            raise HttpError(403, "this route requires a key of --operator-key-file")

    @app.get(f"{ROOT}/operator/sessions")
    async def sessions(request: Request) -> Response:
        """For operators: list the open sessions of all keys, with their models and samplers."""
        check(request)
        return json_response(
            {"sessions": open_sessions(service.registry), "problem": service.problem()}
        )

    @app.post(f"{ROOT}/operator/sessions/{{session_id}}/finish")
    async def finish(request: Request, session_id: str) -> Response:
        """For operators: end a session of any key."""
        check(request)
        session = service.registry.sessions.get(session_id)
        if session is None:
            raise HttpError(404, f"session {session_id} does not exist")
        service.sessions.finish_session(session_id, session.owner, "by an operator")
        return json_response({})
