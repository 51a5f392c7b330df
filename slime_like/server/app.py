"""The routes of the API. Bodies are parsed here, what they mean is in service.py."""

from __future__ import annotations

import datetime
import json
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from slime_like.server import bodies
from slime_like.server.errors import HttpError
from slime_like.server.futures import PROTOBUF
from slime_like.server.limits import OWNER
from slime_like.server.registry import Checkpoint, Model
from slime_like.server.service import Service

ROOT = "/api/v1"
B = TypeVar("B", bound=bodies.Body)
# Nothing here has to be negotiated: what is not implemented stays off.
CLIENT_CONFIG = {
    "pjwt_auth_enabled": False, "parallel_fwdbwd_chunks": True, "proto_compress_fwdbwd": False, "fwdbwd_max_chunk_len": 1024,
    "fwdbwd_max_chunk_bytes_count": 5_000_000, "sample_use_retrieve_futures": False, "custom_loss_server_side": False,
    "sample_join_sampling_session": True,
}  # fmt: skip
PAGE = 100
METADATA_ONLY_BYTES = 2**20  # results above this are announced by their size first, where the client allows it


def make_app(service: Service) -> FastAPI:
    app = FastAPI(title="slime_like", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(HttpError, _told)
    app.add_exception_handler(HTTPException, _told)
    _session_routes(app, service)
    _training_routes(app, service)
    _sampling_routes(app, service)
    _question_routes(app, service)
    return app


def answer(value: Any, status: int = 200) -> Response:
    """ASCII: a text of a client may hold what UTF-8 cannot say."""
    return Response(json.dumps(value, allow_nan=False), status_code=status, media_type="application/json")


async def _told(request: Request, error: Exception) -> Response:
    if isinstance(error, HttpError):
        return answer({"detail": str(error)}, error.status)
    assert isinstance(error, HTTPException)
    return answer({"detail": error.detail}, error.status_code)


async def read(request: Request, kind: type[B]) -> B:
    """The body of a request. Raises HttpError 400 for what is no JSON, 422 for another shape."""
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


def _session_routes(app: FastAPI, service: Service) -> None:
    @app.get(f"{ROOT}/healthz")
    async def healthz() -> Response:
        return answer({"status": "ok"})

    @app.post(f"{ROOT}/client/config")
    async def client_config(request: Request) -> Response:
        await read(request, bodies.ClientConfig)
        return answer(CLIENT_CONFIG)

    @app.post(f"{ROOT}/client/dynamic_config")
    async def dynamic_config(request: Request) -> Response:
        await read(request, bodies.ClientConfig)
        return answer({"sample_cancel_enabled": False})

    @app.post(f"{ROOT}/create_session")
    async def create_session(request: Request) -> Response:
        return answer(service.create_session(await read(request, bodies.CreateSession), owner_of(request)))

    @app.post(f"{ROOT}/session_heartbeat")
    async def heartbeat(request: Request) -> Response:
        service.registry.session((await read(request, bodies.Heartbeat)).session_id, owner_of(request))
        return answer({"type": "session_heartbeat"})

    @app.post(f"{ROOT}/sessions/{{session_id}}/finish")
    async def finish(request: Request, session_id: str) -> Response:
        await read(request, bodies.FinishSession)
        service.finish_session(session_id, owner_of(request))
        return answer({})

    @app.get(f"{ROOT}/sessions")
    async def sessions(request: Request) -> Response:
        owner = owner_of(request)
        return answer({"sessions": [s.id for s in service.registry.sessions.values() if s.owner == owner]})

    @app.get(f"{ROOT}/sessions/{{session_id}}")
    async def session(request: Request, session_id: str) -> Response:
        registry, owner = service.registry, owner_of(request)
        found = registry.sessions.get(session_id)
        if found is None or found.owner != owner:
            raise HttpError(404, f"session {session_id} does not exist")
        runs = [m.id for m in registry.models.values() if m.session == session_id]
        samplers = [s.id for s in registry.samplers.values() if s.session == session_id]
        metadata = texts(found.user_metadata)
        return answer({"training_run_ids": runs, "sampler_ids": samplers, "user_metadata": metadata, "display_name": found.display_name})

    @app.post(f"{ROOT}/telemetry")
    async def telemetry(request: Request) -> Response:
        return answer({"status": "accepted"})  # and thrown away


def _training_routes(app: FastAPI, service: Service) -> None:
    @app.post(f"{ROOT}/create_model")
    async def create_model(request: Request) -> Response:
        return answer(service.create_model(await read(request, bodies.CreateModel), owner_of(request)))

    @app.post(f"{ROOT}/get_info")
    async def get_info(request: Request) -> Response:
        return answer(service.get_info((await read(request, bodies.ModelRequest)).model_id, owner_of(request)))

    @app.post(f"{ROOT}/forward_backward")
    async def forward_backward(request: Request) -> Response:
        return answer(service.forward_backward(await request.body(), owner_of(request)))

    @app.post(f"{ROOT}/optim_step")
    async def optim_step(request: Request) -> Response:
        return answer(service.optim_step(await read(request, bodies.OptimStep), owner_of(request)))

    @app.post(f"{ROOT}/save_weights")
    async def save_weights(request: Request) -> Response:
        return answer(service.save_weights(await read(request, bodies.SaveWeights), owner_of(request)))

    @app.post(f"{ROOT}/save_weights_for_sampler")
    async def save_for_sampler(request: Request) -> Response:
        return answer(service.save_for_sampler(await read(request, bodies.SaveWeightsForSampler), owner_of(request)))

    @app.post(f"{ROOT}/save_weights_external")
    async def save_external(request: Request) -> Response:
        return answer(service.save_external(await read(request, bodies.SaveWeightsExternal), owner_of(request)))

    @app.post(f"{ROOT}/load_weights")
    async def load_weights(request: Request) -> Response:
        return answer(service.load_weights(await read(request, bodies.LoadWeights), owner_of(request)))

    @app.post(f"{ROOT}/retrieve_future")
    async def retrieve_future(request: Request) -> Response:
        body = await read(request, bodies.RetrieveFuture)
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


def _sampling_routes(app: FastAPI, service: Service) -> None:
    @app.post(f"{ROOT}/create_sampling_session")
    async def create_sampling_session(request: Request) -> Response:
        return answer(service.create_sampling_session(await read(request, bodies.CreateSamplingSession), owner_of(request)))

    @app.post(f"{ROOT}/join_sampling_session")
    async def join_sampling_session(request: Request) -> Response:
        sampler = service.sampler((await read(request, bodies.JoinSamplingSession)).sampling_session_id, owner_of(request))
        sampler.clients += 1
        service.registry.keep(sampler)
        return answer({"client_counter": sampler.clients, "type": "join_sampling_session"})

    @app.get(f"{ROOT}/samplers/{{sampler_id}}")
    async def get_sampler(request: Request, sampler_id: str) -> Response:
        sampler = service.sampler(sampler_id, owner_of(request))
        return answer({"sampler_id": sampler.id, "base_model": service.base.name, "model_path": sampler.source})

    @app.post(f"{ROOT}/asample")
    async def asample(request: Request) -> Response:
        return answer(service.sample(await read(request, bodies.Sample), owner_of(request)))


def _question_routes(app: FastAPI, service: Service) -> None:
    registry = service.registry

    @app.get(f"{ROOT}/get_server_capabilities")
    async def capabilities() -> Response:
        return answer(service.capabilities())

    @app.post(f"{ROOT}/weights_info")
    async def weights_info(request: Request) -> Response:
        return answer(service.weights_info((await read(request, bodies.WeightsInfo)).tinker_path, owner_of(request)))

    @app.get(f"{ROOT}/training_runs")
    async def training_runs(request: Request) -> Response:
        mine = sorted((m for m in registry.models.values() if m.owner == owner_of(request)), key=lambda m: -m.created)
        page, cursor = page_of(mine, request)
        return answer({"training_runs": [run_record(service, model) for model in page], "cursor": cursor})

    @app.get(f"{ROOT}/training_runs/{{run_id}}")
    async def training_run(request: Request, run_id: str) -> Response:
        return answer(run_record(service, registry.model(run_id, owner_of(request))))

    @app.get(f"{ROOT}/training_runs/{{run_id}}/checkpoints")
    async def checkpoints_of_run(request: Request, run_id: str) -> Response:
        mine = [c for c in registry.checkpoints.values() if c.run == run_id and c.owner == owner_of(request)]
        return answer({"checkpoints": [checkpoint_record(c) for c in mine]})

    @app.get(f"{ROOT}/checkpoints")
    async def checkpoints(request: Request) -> Response:
        mine = sorted((c for c in registry.checkpoints.values() if c.owner == owner_of(request)), key=lambda c: -c.created)
        page, cursor = page_of(mine, request)
        return answer({"checkpoints": [checkpoint_record(c) for c in page], "cursor": cursor})

    @app.delete(f"{ROOT}/training_runs/{{run_id}}/checkpoints/{{checkpoint_id:path}}")
    async def delete_checkpoint(request: Request, run_id: str, checkpoint_id: str) -> Response:
        service.operations.drop_checkpoint(service.checkpoint(f"tinker://{run_id}/{checkpoint_id}", owner_of(request)))
        return answer({})


def page_of(records: list[Any], request: Request) -> tuple[list[Any], dict[str, int]]:
    """The part that `limit` and `offset` of the query ask for. Raises HttpError."""
    try:
        limit, offset = int(request.query_params.get("limit", 20)), int(request.query_params.get("offset", 0))
    except ValueError:
        raise HttpError(422, "limit and offset are whole numbers") from None
    if not 1 <= limit <= 10 * PAGE or not 0 <= offset < 2**31:
        raise HttpError(422, f"limit is 1 to {10 * PAGE}, offset at least 0")
    return records[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(records)}


def moment(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()


def texts(metadata: dict[str, Any] | None) -> dict[str, str] | None:
    """Clients read texts alone."""
    return None if metadata is None else {key: str(value) for key, value in metadata.items()}


def checkpoint_record(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "checkpoint_id": checkpoint.checkpoint_id,
        "checkpoint_type": checkpoint.kind,
        "time": moment(checkpoint.created),
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.size,
        "public": False,
        "user_metadata": texts(checkpoint.user_metadata),
        "expires_at": None if checkpoint.expires is None else moment(checkpoint.expires),
    }


def run_record(service: Service, model: Model) -> dict[str, Any]:
    def newest(kind: str) -> dict[str, Any] | None:
        mine = [c for c in service.registry.checkpoints.values() if c.run == model.id and c.kind == kind]
        return checkpoint_record(max(mine, key=lambda c: c.created)) if mine else None

    return {
        "training_run_id": model.id,
        "base_model": model.base_model,
        "model_owner": model.owner,
        "is_lora": model.lora is not None,
        "lora_rank": None if model.lora is None else model.lora["rank"],
        "corrupted": model.state == "ended",
        "last_request_time": moment(model.seen),
        "last_checkpoint": newest("training"),
        "last_sampler_checkpoint": newest("sampler"),
        "user_metadata": texts(model.user_metadata),
    }
