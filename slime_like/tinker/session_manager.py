"""Lifetimes of sessions, models and samplers: they end by their client, by missed heartbeats, or
with the workers; their queued requests then fail with the reason."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Collection, Sequence

from arguments.schema import ServerConfig
from slime_like.tinker import codec, schemas
from slime_like.tinker.errors import Failed, HttpError, Refused
from slime_like.tinker.futures import Request
from slime_like.tinker.model_registry import (
    ModelRegistry,
    Quota,
    RegisteredModel,
    losses_queue,
)
from slime_like.tinker.operations import ServerOperations
from slime_like.tinker.request_queue import Dispatcher

log = logging.getLogger(__name__)
HOUSEKEEPING = "~server"  # queue of the server's own requests to the workers
MAX_LOSSES = 256  # custom losses per session
SILENT_S = 60.0  # clients send a heartbeat every 10 s
FORGOTTEN_AFTER_S = 86400.0  # after sessions and models have ended
RELEASE = re.compile(r"\d+\.\d+\.\d+")  # sdk_version of Tinker's SDK


class SessionManager:
    def __init__(
        self,
        config: ServerConfig,
        registry: ModelRegistry,
        dispatcher: Dispatcher,
        operations: ServerOperations,
    ) -> None:
        self.config = config
        self.registry = registry
        self.dispatcher = dispatcher
        self.operations = operations
        operations.end_model = self.end_model
        operations.unload = self._unload
        dispatcher.queue(HOUSEKEEPING, next_seq=None)
        self._housekeeping = 0
        self.keys: Callable[[], int] = lambda: 1  # number of API keys
        self.sessions_quota = Quota("sessions", config.max_sessions, config.max_sessions_per_key)
        self.models_quota = Quota("models", config.max_models, config.max_models_per_key)

    def create_session(self, body: schemas.CreateSession, owner: str) -> dict[str, object]:
        self.end_silent_sessions()
        sessions = [s for s in self.registry.sessions.values() if not s.finished]
        self.make_room(self.sessions_quota, owner, [(s.id, s.owner) for s in sessions])
        session = self.registry.new_session(
            owner,
            user_metadata=body.user_metadata,
            display_name=body.display_name,
            in_order=RELEASE.match(body.sdk_version) is not None,
        )
        log.info("session %s of %s: created", session.id, owner)
        return {"session_id": session.id, "type": "create_session"}

    def make_room(self, quota: Quota, owner: str, held: Sequence[tuple[str, str]]) -> None:
        """Make room for another model or session of `owner`, by ending silent sessions if
        necessary: the longest silent first, and none whose end does not help.

        Args:
            held: Session and owner of each existing one.

        Raises:
            HttpError: 403 if there is no room; then none was ended.
        """

        def refusal(without: Collection[str]) -> str | None:
            owners = [each for session, each in held if session not in without]
            return quota.refusal(owners, owner, several=self.keys() > 1)

        reason = refusal(())
        if reason is None:
            return
        now = time.time()
        sessions = self.registry.sessions.values()
        silent = [s for s in sessions if not s.finished and now - s.seen > SILENT_S]
        silent.sort(key=lambda s: s.seen)
        ending = [s.id for s in silent]
        if refusal(ending) is not None:
            raise HttpError(403, f"{reason}; close another session, or wait for one to end")
        for session in reversed(silent):
            others = [id for id in ending if id != session.id]
            if refusal(others) is None:
                ending = others
        for session in [s for s in silent if s.id in ending]:
            self.finish_session(session.id, session.owner, "silent, to make room for another")

    def make_room_for_model(self, owner: str) -> None:
        """Make room for another model. Raises HttpError 403 if there is none."""
        models = self.registry.live_models()
        self.make_room(self.models_quota, owner, [(m.session, m.owner) for m in models])

    def check_room_for_loss(self, session: str) -> None:
        """Raise Refused if a session has too many custom losses."""
        count = sum(loss.session == session for loss in self.registry.graphs.values())
        if count >= MAX_LOSSES:
            raise Refused(f"this session has {count} custom losses, its maximum; reuse their ids")

    def unload_model(self, model: RegisteredModel, digest: str) -> Request:
        """End a model for its client. Returns a request that is done when its memory is free."""
        self.end_model(model, f"model {model.id} was unloaded by its client", unload=False)
        return self._unload(model, digest)

    def finish_session(self, id: str, owner: str, reason: str = "by its client") -> None:
        session = self.registry.sessions.get(id)
        if session is None or session.owner != owner:
            raise HttpError(404, f"session {id} does not exist")
        log.info("session %s of %s: finished %s", id, owner, reason)
        session.finished = True
        self.registry.keep(session)
        for model in [m for m in self.registry.live_models() if m.session == id]:
            self.end_model(model, f"model {model.id} was unloaded: its session has finished")
        for sampler in [s for s in self.registry.samplers.values() if s.session == id]:
            self.operations.drop_sampler(sampler)
            reason = f"sampling session {sampler.id} has ended: its session has finished"
            self.dispatcher.fail_all(sampler.id, Refused(reason), forget=True)
        for loss in [each for each in self.registry.graphs.values() if each.session == id]:
            self.registry.forget(loss)
        self.operations.records.forget_session(id)
        reason = f"session {id} has finished"
        self.dispatcher.fail_all(losses_queue(id), Refused(reason), forget=True)

    def end_silent_sessions(self, now: float | None = None) -> None:
        """Finish silent sessions; remove long-finished sessions and expired checkpoints."""
        now = time.time() if now is None else now
        self.operations.records.expire(now)
        for session in list(self.registry.sessions.values()):
            if not session.finished and now - session.seen > self.config.session_timeout_s:
                self.finish_session(session.id, session.owner, "silent for --session-timeout-s")
            elif session.finished and now - session.seen > FORGOTTEN_AFTER_S:
                self.registry.forget(session)
        for model in list(self.registry.models.values()):
            if model.state == "ended" and now - model.seen > FORGOTTEN_AFTER_S:
                self.dispatcher.fail_all(model.id, Failed(model.reason), forget=True)
                self.registry.forget(model)
        for checkpoint in list(self.registry.checkpoints.values()):
            if checkpoint.has_expired(now):
                self.operations.drop_checkpoint(checkpoint)

    def end_model(
        self, model: RegisteredModel, reason: str, *, unload: bool = True, corrupted: bool = False
    ) -> None:
        """End a model; its waiting and later requests fail with the reason.

        Args:
            unload: Unload it from the workers.
            corrupted: It ended by a failure.
        """
        had_weights = model.state == "ready"
        log.info("model %s of %s: ended: %s", model.id, model.owner, reason)
        model.state = "ended"
        model.reason = reason
        model.corrupted = corrupted
        queue = self.dispatcher.queues.get(model.id)
        self.dispatcher.fail_all(model.id, Failed(reason))
        if queue is not None and queue.next_seq is not None:
            model.next_seq = max(model.next_seq, queue.next_seq)
        self.registry.keep(model)
        for critic in [m for m in self.registry.live_models() if m.policy == model.id]:
            critic.policy = None  # the critic continues without a policy
            self.registry.keep(critic)
        if unload and had_weights:
            self._unload(model)

    def _unload(self, model: RegisteredModel, digest: str = "") -> Request:
        self._housekeeping += 1
        id = f"{HOUSEKEEPING}/{time.time_ns()}.{self._housekeeping}"
        body = {"model": model.id}
        now = time.time()
        request = Request(id, "unload", HOUSEKEEPING, 0, model.owner, digest, now, body)
        return self.dispatcher.accept(request, internal=True)

    def workers_connected(self, hello: codec.Message) -> None:
        """Handle new workers: models that they do not have are lost, except those still to be
        created. Those that ended while an earlier API process had them created are unloaded."""
        held = hello["facts"]["models"]
        self._lose_models("the workers were restarted", kept=held)
        for model in [m for m in self.registry.models.values() if m.id in held]:
            if model.state == "ended":
                self._unload(model)

    def workers_ended(self, reason: str) -> None:
        self._lose_models(f"the workers have ended ({reason})")

    def _lose_models(self, reason: str, kept: Collection[str] = ()) -> None:
        for model in self.registry.live_models():
            if model.state == "ready" and model.id not in kept:
                lost = self.registry.lost(model, reason)
                self.end_model(model, lost, unload=False, corrupted=True)
