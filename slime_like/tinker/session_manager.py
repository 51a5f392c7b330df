"""When sessions, models and samplers end: by their client, by silence, or with the workers; and what their waiting requests are told."""

from __future__ import annotations

import time
from typing import Any

from arguments.schema import ServerConfig
from slime_like.tinker import schemas
from slime_like.tinker.errors import Failed, HttpError, Refused
from slime_like.tinker.futures import Request
from slime_like.tinker.model_registry import Model, Registry
from slime_like.tinker.operations import ServerOperations, snapshot_is_gone
from slime_like.tinker.request_queue import Dispatcher

HOUSEKEEPING = "~server"  # queue of what the server asks of the workers itself
FORGOTTEN_AFTER_S = 86400.0  # sessions and models that have ended


class SessionManager:
    def __init__(
        self,
        config: ServerConfig,
        registry: Registry,
        dispatcher: Dispatcher,
        operations: ServerOperations,
    ) -> None:
        self.config = config
        self.registry = registry
        self.dispatcher = dispatcher
        self.operations = operations
        operations.end_model = self.end_model
        dispatcher.queue(HOUSEKEEPING, next_seq=None)
        self._housekeeping = 0

    def create_session(self, body: schemas.CreateSession, owner: str) -> dict[str, Any]:
        self.end_silent_sessions()
        session = self.registry.new_session(
            owner,
            most=self.config.max_sessions,
            user_metadata=body.user_metadata,
            display_name=body.display_name,
        )
        return {"session_id": session.id, "type": "create_session"}

    def finish_session(self, id: str, owner: str) -> None:
        session = self.registry.sessions.get(id)
        if session is None or session.owner != owner:
            raise HttpError(404, f"session {id} does not exist")
        session.finished = True
        self.registry.keep(session)
        for model in [
            m for m in self.registry.models.values() if m.session == id and m.state != "ended"
        ]:
            self.end_model(model, f"model {model.id} is unloaded, for its session has finished")
        for sampler in [s for s in self.registry.samplers.values() if s.session == id]:
            self.operations.drop_sampler(sampler)
            self.dispatcher.fail_all(sampler.id, Refused(snapshot_is_gone(sampler.id)), forget=True)

    def end_silent_sessions(self, now: float | None = None) -> None:
        """Finish sessions that have not been heard of; forget those that finished long ago, and checkpoints that have expired."""
        now = time.time() if now is None else now
        for session in list(self.registry.sessions.values()):
            if not session.finished and now - session.seen > self.config.session_timeout_s:
                self.finish_session(session.id, session.owner)
            elif session.finished and now - session.seen > FORGOTTEN_AFTER_S:
                self.registry.forget(session)
        for model in list(self.registry.models.values()):
            if model.state == "ended" and now - model.seen > FORGOTTEN_AFTER_S:
                self.dispatcher.fail_all(model.id, Failed(model.reason), forget=True)
                self.registry.forget(model)
        for checkpoint in list(self.registry.checkpoints.values()):
            if checkpoint.expires is not None and checkpoint.expires < now:
                self.operations.drop_checkpoint(checkpoint)

    def end_model(self, model: Model, reason: str, *, unload: bool = True) -> None:
        """Its waiting requests fail with the reason, and so will later ones. unload: the workers have it."""
        had_weights = model.state == "ready"
        model.state, model.reason = "ended", reason
        queue = self.dispatcher.queues.get(model.id)
        self.dispatcher.fail_all(model.id, Failed(reason))
        if queue is not None and queue.next_seq is not None:
            model.next_seq = max(model.next_seq, queue.next_seq)
        self.registry.keep(model)
        for critic in [
            m for m in self.registry.models.values() if m.policy == model.id and m.state != "ended"
        ]:
            critic.policy = None  # it goes on without
            self.registry.keep(critic)
        if unload and had_weights:
            self._housekeeping += 1
            key = f"{time.time_ns()}.{self._housekeeping}"
            request = Request(
                f"{HOUSEKEEPING}/{key}",
                "unload",
                HOUSEKEEPING,
                0,
                "",
                key,
                time.time(),
                {"model": model.id},
            )
            self.dispatcher.accept(request, internal=True)

    def workers_came(self, hello: dict[str, Any]) -> None:
        """The models that these workers do not have are lost, unless they were never made."""
        held = set(hello["facts"]["models"])
        for model in list(self.registry.live_models()):
            if model.state == "ready" and model.id not in held:
                self.end_model(
                    model, self.registry.lost(model, "the workers were started anew"), unload=False
                )

    def workers_ended(self, reason: str) -> None:
        for model in self.registry.live_models():
            if model.state == "ready":
                self.end_model(
                    model,
                    self.registry.lost(model, f"the workers have ended ({reason})"),
                    unload=False,
                )
