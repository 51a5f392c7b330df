"""The server's logic behind the HTTP routes: accepts valid requests and answers queries."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from arguments.schema import ServerConfig
from slime_like.tinker import schemas
from slime_like.tinker.base_model import BaseModel, adapter_of, check_optimizer, check_served
from slime_like.tinker.data import DataLimits, check_forward_backward, parse_request
from slime_like.tinker.errors import HttpError, Refused
from slime_like.tinker.futures import Request
from slime_like.tinker.loss_graph import LossGraph, check_graph
from slime_like.tinker.model_registry import (
    Checkpoint,
    ModelRegistry,
    RegisteredModel,
    Sampler,
    losses_queue,
    role_of,
)
from slime_like.tinker.operations import ServerOperations, snapshot_removed
from slime_like.tinker.request_queue import Dispatcher, request_id
from slime_like.tinker.sampling import sample_body
from slime_like.tinker.serializers import as_strings
from slime_like.tinker.session_manager import SessionManager

ModelBody = (  # names a model and a sequence number
    schemas.OptimStep
    | schemas.SaveWeights
    | schemas.SaveWeightsForSampler
    | schemas.SaveWeightsExternal
    | schemas.LoadWeights
)


class Service:
    def __init__(
        self,
        config: ServerConfig,
        base: BaseModel,
        limits: DataLimits,
        registry: ModelRegistry,
        dispatcher: Dispatcher,
        operations: ServerOperations,
    ) -> None:
        self.config = config
        self.base = base
        self.limits = limits
        self.registry = registry
        self.dispatcher = dispatcher
        self.operations = operations
        self.problem: Callable[[], str | None] = lambda: None  # why requests are not executed
        self.sessions = SessionManager(config, registry, dispatcher, operations)
        for model in registry.models.values():
            self._open_queue(model)
        for sampler in registry.samplers.values():
            dispatcher.queue(sampler.id, next_seq=None)
        for session in registry.sessions.values():
            if not session.finished:
                dispatcher.queue(losses_queue(session.id), next_seq=None)

    def heartbeat(self, body: schemas.Heartbeat, owner: str) -> dict[str, object]:
        self.registry.session(body.session_id, owner)
        return {"type": "session_heartbeat"}

    # --- requests with a future ---

    def _accept(
        self,
        op: str,
        queue: str,
        seq: int,
        owner: str,
        digest: str,
        body: dict[str, object],
        **extra: object,
    ) -> dict[str, object]:
        request = Request(
            request_id(queue, seq), op, queue, seq, owner, digest, time.time(), body, extra=extra
        )
        return future_of(self.dispatcher.accept(request))

    def _earlier(self, queue: str, seq: int, digest: str) -> dict[str, object] | None:
        """The future of an earlier identical request, which the client is retrying."""
        earlier = self.dispatcher.accepted(queue, seq, digest)
        return None if earlier is None else future_of(earlier)

    def create_model(self, body: schemas.CreateModel, owner: str) -> dict[str, object]:
        session = self.registry.session(body.session_id, owner)
        id = f"{session.id}:train:{body.model_seq_id}"
        digest = digest_of("create_model", body)
        if (earlier := self._earlier(id, 0, digest)) is not None:
            return earlier
        model = self._new_model(id, session.id, owner, body.user_metadata)
        request: dict[str, object] = {"model": id}
        try:
            model.role = role_of(body.user_metadata, body.model_role)
            self.base.check_name(body.base_model)
            check_optimizer(body.optimizer_config)
            model.lora = adapter_of(body.lora_config, model.role, self.base)
            if model.role == "critic":
                model.policy = self.registry.policy_for_critic(session.id)
        except Refused as error:
            request["refusal"] = str(error)
        return self._accept_new("create_model", model, digest, request)

    def _new_model(
        self, id: str, session: str, owner: str, user_metadata: dict[str, object] | None
    ) -> RegisteredModel:
        if id in self.registry.models:
            raise HttpError(422, f"model {id} exists")
        self.sessions.make_room_for_model(owner)
        now = time.time()
        base = self.base.name
        return RegisteredModel(
            id, session, owner, base, "policy", now, now, next_seq=0, user_metadata=user_metadata
        )

    def _accept_new(
        self, op: str, model: RegisteredModel, digest: str, request: dict[str, object]
    ) -> dict[str, object]:
        """Register a model and accept the request that creates it, both or neither."""
        self.registry.keep(model)
        self._open_queue(model)
        try:
            return self._accept(op, model.id, 0, model.owner, digest, request)
        except HttpError:
            self.registry.forget(model)
            self.dispatcher.queues.pop(model.id)
            raise

    def _open_queue(self, model: RegisteredModel) -> None:
        session = self.registry.sessions.get(model.session)
        in_order = session is not None and session.in_order
        self.dispatcher.queue(model.id, next_seq=model.next_seq, in_order=in_order)

    def load_weights(self, body: schemas.LoadWeights, owner: str) -> dict[str, object]:
        existing = body.model_id is not None and body.seq_id is not None
        new = body.session_id is not None and body.model_seq_id is not None
        one_id = (body.model_id is None) != (body.session_id is None)
        if not one_id or existing == new:
            raise HttpError(
                422,
                "give session_id and model_seq_id for a new model, or model_id and seq_id for an "
                "existing one",
            )
        if existing:
            request = {"path": body.path, "optimizer": body.optimizer}
            return self._of_model("load", body, owner, request, digest_op="load_weights")
        return self._load_new(body, owner)

    def _load_new(self, body: schemas.LoadWeights, owner: str) -> dict[str, object]:
        assert body.session_id is not None
        session = self.registry.session(body.session_id, owner)
        id = f"{session.id}:train:{body.model_seq_id}"
        digest = digest_of("load_weights", body)
        if (earlier := self._earlier(id, 0, digest)) is not None:
            return earlier
        model = self._new_model(id, session.id, owner, body.user_metadata)
        request: dict[str, object] = {"model": id, "path": body.path, "optimizer": body.optimizer}
        try:
            if body.base_model is not None:
                self.base.check_name(body.base_model)
            check_optimizer(body.optimizer_config)
            if body.optimizer and body.optimizer_config is not None:
                raise Refused(
                    "optimizer=True loads the checkpoint's optimizer; leave optimizer_config out"
                )
            checkpoint = self.registry.checkpoint(body.path, owner, "training")
            check_served(checkpoint.lora, checkpoint.role, self.base)
            model.role = checkpoint.role
            model.lora = checkpoint.lora
            role = role_of(body.user_metadata, None)
            if (body.user_metadata or {}).get("model_role") is not None and role != model.role:
                raise Refused(
                    f"model_role is {role}, but checkpoint {body.path} is of a {model.role}"
                )
            if model.role == "critic":
                model.policy = self.registry.policy_for_critic(session.id)
        except Refused as error:
            request["refusal"] = str(error)
        return self._accept_new("load_new", model, digest, request)

    def unload_model(self, body: schemas.ModelRequest, owner: str) -> dict[str, object]:
        """End a model; its memory is free when the future is done."""
        model = self.registry.model(body.model_id, owner)
        if model.state == "ended":
            raise HttpError(410, model.reason)
        return future_of(self.sessions.unload_model(model, digest_of("unload_model", body)))

    def forward_backward(self, data: bytes, owner: str) -> dict[str, object]:
        request = parse_request(data)
        model = self.registry.model(request.model_id, owner)
        digest = hashlib.sha256(
            b"forward_backward" + request.SerializeToString(deterministic=True)
        ).hexdigest()
        if (earlier := self._earlier(model.id, request.seq_id, digest)) is not None:
            return earlier
        body: dict[str, object] = {"model": model.id, "forward_only": request.forward_only}
        try:
            checked = check_forward_backward(
                request,
                role=model.role,
                limits=self.limits,
                find_graph=lambda id: self.registry.graph(id, model),
                records=self.operations.records,
                session=model.session,
            )
            body["command"] = checked.command()
        except Refused as error:
            body["refusal"] = str(error)
        return self._accept("forward_backward", model.id, request.seq_id, owner, digest, body)

    def create_custom_loss(self, body: schemas.CreateCustomLoss, owner: str) -> dict[str, object]:
        session = self.registry.session(body.session_id, owner)
        queue = losses_queue(session.id)
        digest = digest_of("create_custom_loss", body)
        if (earlier := self._earlier(queue, body.custom_loss_seq_id, digest)) is not None:
            return earlier
        graph = LossGraph(
            body.name,
            tuple((each.name, each.rank) for each in body.inputs),
            tuple(node.model_dump(exclude={"type"}) for node in body.graph.nodes),
        )
        request: dict[str, object] = {"session": session.id, "graph": graph.plain()}
        try:
            check_graph(graph)
            self.sessions.check_room_for_loss(session.id)
        except Refused as error:
            request = {"refusal": str(error)}
        self.dispatcher.queue(queue, next_seq=None)
        return self._accept(
            "create_custom_loss", queue, body.custom_loss_seq_id, owner, digest, request
        )

    def optim_step(self, body: schemas.OptimStep, owner: str) -> dict[str, object]:
        request: dict[str, object] = {
            "adam": (body.adam_params or schemas.AdamParams()).model_dump(exclude={"type"})
        }
        if body.optimizer_params is not None:
            kind = body.optimizer_params.get("type")
            request["refusal"] = (
                f"optimizer {kind!r} is not supported, must be adamw with adam_params"
            )
        elif body.adam_params is None:
            request["refusal"] = "adam_params is missing"
        return self._of_model("optim_step", body, owner, request)

    def save_weights(self, body: schemas.SaveWeights, owner: str) -> dict[str, object]:
        return self._of_model(
            "save", body, owner, save_request("training", body, overwrite=body.overwrite)
        )

    def save_external(self, body: schemas.SaveWeightsExternal, owner: str) -> dict[str, object]:
        request = save_request("external", body, overwrite=False)
        if body.age_encryption_recipients:
            request["refusal"] = "age_encryption_recipients is not supported; leave it out"
        return self._of_model("save", body, owner, self._policies_only(body.model_id, request))

    def save_for_sampler(
        self, body: schemas.SaveWeightsForSampler, owner: str
    ) -> dict[str, object]:
        if (body.path is None) == (body.sampling_session_seq_id is None):
            raise HttpError(
                422, "give path for a checkpoint, or sampling_session_seq_id for a sampling session"
            )
        if body.path is not None:
            request = save_request("sampler", body, overwrite=False)
        else:
            model = self.registry.model(body.model_id, owner)
            request = {"sampler": f"{model.session}:sample:{body.sampling_session_seq_id}"}
            if request["sampler"] in self.registry.samplers:
                request["refusal"] = f"sampling session {request['sampler']} exists"
            request["inflight"] = body.kind == "inflight"
        if body.path is not None and body.kind == "inflight":
            request["refusal"] = "kind='inflight' is for sampling sessions, a path names a snapshot"
        if self.base.no_whole and self.registry.model(body.model_id, owner).lora is None:
            request["refusal"] = self.base.no_whole
        op = "save" if body.path is not None else "snapshot"
        return self._of_model(op, body, owner, self._policies_only(body.model_id, request))

    def _policies_only(self, model_id: str, request: dict[str, object]) -> dict[str, object]:
        model = self.registry.models.get(model_id)
        if model is not None and model.role == "critic":
            request["refusal"] = (
                f"model {model.id} is a critic: sampler checkpoints are for policies only"
            )
        return request

    def _of_model(
        self, op: str, body: ModelBody, owner: str, request: dict[str, object], digest_op: str = ""
    ) -> dict[str, object]:
        """Accept a request of an existing model. digest_op: see `digest_of`; default `op`."""
        assert body.model_id is not None and body.seq_id is not None
        model = self.registry.model(body.model_id, owner)
        digest = digest_of(digest_op or op, body)
        if (earlier := self._earlier(model.id, body.seq_id, digest)) is not None:
            return earlier
        request = {"model": model.id, **request}
        return self._accept(op, model.id, body.seq_id, owner, digest, request)

    def refuse_in_turn(self, op: str, body: object, owner: str, reason: str) -> None:
        """Consume the sequence number of a request that is answered with an error instead of a
        future: its client has counted it, and what it sends next would wait for it. No-op for a
        request without one, or with one that is taken."""
        try:
            turn = schemas.Turn.model_validate(body)
        except ValidationError:
            return
        model = self.registry.models.get(turn.model_id)
        queue = self.dispatcher.queues.get(turn.model_id)
        if model is None or model.owner != owner or queue is None or queue.has_taken(turn.seq_id):
            return
        if request_id(model.id, turn.seq_id) not in self.dispatcher.requests:
            digest = hashlib.sha256(json.dumps([op, body], sort_keys=True).encode()).hexdigest()
            refused: dict[str, object] = {"model": model.id, "refusal": reason}
            self._accept(op, model.id, turn.seq_id, owner, digest, refused)

    # --- sampling ---

    def create_sampling_session(
        self, body: schemas.CreateSamplingSession, owner: str
    ) -> dict[str, object]:
        session = self.registry.session(body.session_id, owner)
        id = f"{session.id}:sample:{body.sampling_session_seq_id}"
        if (body.base_model is None) == (body.model_path is None) and body.model_path is None:
            raise HttpError(422, "give base_model or model_path")
        try:
            folder = self.base.folder
            adapter = False
            source = body.model_path
            if body.base_model is not None:
                self.base.check_name(body.base_model)
            if body.model_path is not None:
                checkpoint = self.registry.checkpoint(body.model_path, owner, "sampler")
                adapter = checkpoint.adapter
                if adapter and self.base.no_unmerged:
                    raise Refused(f"checkpoint {source} is an adapter {self.base.no_unmerged}")
                if not adapter and self.base.no_whole:
                    raise Refused(f"checkpoint {source} is a whole model: {self.base.no_whole}")
                check_served(checkpoint.lora, checkpoint.role, self.base, adapter=adapter)
                folder = checkpoint.folder
        except Refused as error:
            raise HttpError(422, str(error)) from error
        before = self.registry.samplers.get(id)
        if before is not None and (before.folder, before.source) != (folder, source):
            raise HttpError(422, f"sampling session {id} exists with other weights")
        if before is None:
            sampler = Sampler(
                id, session.id, owner, folder, source, used=time.time(), adapter=adapter
            )
            self.registry.keep(sampler)
        return {"sampling_session_id": id, "type": "create_sampling_session"}

    def join_sampling_session(
        self, body: schemas.JoinSamplingSession, owner: str
    ) -> dict[str, object]:
        sampler = self.sampler(body.sampling_session_id, owner)
        sampler.clients += 1
        self.registry.keep(sampler)
        return {"client_counter": sampler.clients, "type": "join_sampling_session"}

    def sampler(self, id: str, owner: str) -> Sampler:
        sampler = self.registry.samplers.get(id)
        if sampler is None or sampler.owner != owner:
            created_in = self.registry.sessions.get(id.partition(":sample:")[0])
            existed = sampler is None and created_in is not None and created_in.owner == owner
            missing = f"sampling session {id} does not exist"
            raise HttpError(404, snapshot_removed(id) if existed else missing)
        session = self.registry.sessions.get(sampler.session)
        if session is not None and not session.finished:
            session.seen = time.time()
        return sampler

    def sample(self, body: schemas.Sample, owner: str) -> dict[str, object]:
        sampler = self.sampler(body.sampling_session_id, owner)
        digest = digest_of("asample", body)
        if (earlier := self._earlier(sampler.id, body.seq_id, digest)) is not None:
            return earlier
        self.dispatcher.queue(sampler.id, next_seq=None)
        ids = [f"{sampler.id}/{body.seq_id}/{i}" for i in range(body.num_samples)]
        try:
            request = sample_body(body, self.limits)
        except Refused as error:
            request = {"refusal": str(error)}
        return self._accept(
            "sample", sampler.id, body.seq_id, owner, digest, request, sample_sequence_ids=ids
        )

    def cancel(self, body: schemas.CancelFuture, owner: str) -> dict[str, object]:
        self.dispatcher.cancel(body.request_id, owner)
        return {}

    # --- queries ---

    def get_info(self, body: schemas.ModelRequest, owner: str) -> dict[str, object]:
        model = self.registry.model(body.model_id, owner)
        data = {
            "arch": self.base.arch,
            "model_name": self.base.name,
            "tokenizer_id": self.base.folder,
        }
        rank = None if model.lora is None else model.lora["rank"]
        return {
            "model_id": model.id,
            "model_data": data,
            "is_lora": rank is not None,
            "lora_rank": rank,
            "model_name": self.base.name,
            "type": "get_info",
        }

    def weights_info(self, body: schemas.WeightsInfo, owner: str) -> dict[str, object]:
        checkpoint = self.checkpoint(body.tinker_path, owner)
        lora = checkpoint.lora
        info: dict[str, object] = {"base_model": checkpoint.base_model, "is_lora": lora is not None}
        if lora is not None:
            info["lora_rank"] = lora["rank"]
            info |= {name: lora[name] for name in ("train_unembed", "train_mlp", "train_attn")}
        return info

    def checkpoint(self, path: str, owner: str) -> Checkpoint:
        try:
            return self.registry.checkpoint(path, owner)
        except Refused as error:
            raise HttpError(404, str(error)) from error

    def capabilities(self) -> dict[str, object]:
        return {
            "supported_models": [
                {
                    "model_name": self.base.name,
                    "max_context_length": self.limits.max_length,
                    "trainable": True,
                    "sampleable": True,
                }
            ]
        }


def save_request(
    kind: str,
    body: schemas.SaveWeights | schemas.SaveWeightsForSampler | schemas.SaveWeightsExternal,
    *,
    overwrite: bool,
) -> dict[str, object]:
    return {
        "kind": kind,
        "name": body.path,
        "ttl_seconds": body.ttl_seconds,
        "overwrite": overwrite,
        "user_metadata": as_strings(getattr(body, "user_metadata", None)),
    }


def digest_of(op: str, body: schemas.Body) -> str:
    """Digest of a request's body, to distinguish a retry from a different request."""
    return hashlib.sha256(json.dumps([op, body.model_dump()], sort_keys=True).encode()).hexdigest()


def future_of(request: Request) -> dict[str, object]:
    return {"request_id": request.id, **request.extra}


def make_folders(root: Path) -> None:
    for folder in (root, root / "checkpoints", root / "snapshots"):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
