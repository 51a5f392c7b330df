"""Records of clients' sessions, models, samplers and checkpoints, with owners and quotas; persisted
in the journal."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from slime_like.tinker.errors import HttpError, Refused
from slime_like.tinker.loss_graph import LossGraph
from slime_like.tinker.store import Journal

ROLES = ("policy", "critic")
KINDS = {"training": "weights", "sampler": "sampler_weights", "external": "external_weights"}


@dataclass(slots=True)
class ApiSession:
    """A client's session."""

    id: str
    owner: str  # of the key that created it
    created: float
    seen: float
    finished: bool = False
    user_metadata: dict[str, object] | None = None
    display_name: str | None = None
    in_order: bool = False  # see `request_queue.Queue`


@dataclass(slots=True)
class RegisteredModel:
    """A training model."""

    id: str
    session: str
    owner: str
    base_model: str
    role: str
    created: float
    seen: float
    lora: dict[str, object] | None = None
    policy: str | None = None  # of a critic, the model that it belongs to
    state: str = "creating"  # creating, ready or ended, with the reason
    reason: str = ""
    corrupted: bool = False  # it ended by a failure, not by its client
    next_seq: int = 1  # sequence number of the next request
    incomplete: str = ""  # why gradients for the next optim_step are missing
    user_metadata: dict[str, object] | None = None


@dataclass(slots=True)
class Sampler:
    """A sampling session."""

    id: str
    session: str
    owner: str
    folder: str  # of its weights: Hugging Face's, or PEFT's of an adapter
    # the checkpoint's path; None for the base model or an unnamed snapshot
    source: str | None = None
    used: float = 0.0
    clients: int = 0  # number of clients that have joined
    follows: str | None = None  # of inflight weights: the model, whose later saves it takes
    adapter: bool = False  # the folder has an adapter beside the base model


@dataclass(slots=True)
class Checkpoint:
    """A saved checkpoint."""

    path: str  # as clients see it
    run: str
    kind: str  # training, sampler or external
    name: str
    owner: str
    folder: str
    created: float
    base_model: str
    role: str
    size: int = 0
    lora: dict[str, object] | None = None
    expires: float | None = None  # time, or None for never
    user_metadata: dict[str, object] | None = None
    adapter: bool = False  # the folder has an adapter beside the base model, in PEFT's format

    @property
    def id(self) -> str:
        return self.path

    @property
    def checkpoint_id(self) -> str:
        return f"{KINDS[self.kind]}/{self.name}"

    def has_expired(self, now: float) -> bool:
        return self.expires is not None and self.expires < now


@dataclass(slots=True)
class CustomLoss:
    """A loss that a client has sent."""

    id: str
    session: str
    owner: str
    graph: dict[str, object]  # a LossGraph as plain values


AnyRecord = ApiSession | RegisteredModel | Sampler | Checkpoint | CustomLoss
_TABLES: dict[type, str] = {  # name in the journal
    ApiSession: "session",
    RegisteredModel: "model",
    Sampler: "sampler",
    Checkpoint: "checkpoint",
    CustomLoss: "graph",
}


@dataclass(frozen=True, slots=True)
class Quota:
    """How many models or sessions may exist."""

    kind: str  # models or sessions
    limit: int  # over all keys
    # limit per key; None: with several keys, a key may hold at most as many as are still free
    per_key: int | None

    def refusal(self, owners: Sequence[str], owner: str, *, several: bool) -> str | None:
        """Reason why `owner` cannot have another one; None if it can.

        Args:
            owners: Owners of the existing ones.
            several: Whether there are several keys.
        """
        flag = f"--max-{self.kind}"
        held = owners.count(owner)
        if len(owners) >= self.limit:
            return f"{len(owners)} {self.kind} are open ({flag} {self.limit})"
        limit = self.per_key
        if limit is None:
            limit = max(1, self.limit - len(owners)) if several else self.limit
        if held >= limit:
            return (
                f"this key has {held} open {self.kind}, its maximum ({flag}-per-key; {flag} "
                f"{self.limit} for all keys)"
            )
        return None


@dataclass
class ModelRegistry:
    """Sessions, models, samplers and checkpoints. Every change goes through `keep` or `forget`,
    which write it to the journal."""

    journal: Journal
    sessions: dict[str, ApiSession] = field(default_factory=dict)
    models: dict[str, RegisteredModel] = field(default_factory=dict)
    samplers: dict[str, Sampler] = field(default_factory=dict)
    checkpoints: dict[str, Checkpoint] = field(default_factory=dict)
    graphs: dict[str, CustomLoss] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for record_type, name in _TABLES.items():
            for id, record, _, _ in self.journal.entries(name):
                self._table(name)[id] = record_type(**record)
        for session in self.sessions.values():
            if not session.finished:
                session.seen = time.time()  # the journal's is of when the session was created

    def _table(self, name: str) -> dict[str, AnyRecord]:
        return getattr(self, f"{name}s")

    def keep(self, record: AnyRecord) -> None:
        name = _TABLES[type(record)]
        self._table(name)[record.id] = record
        self.journal.put(name, record.id, dataclasses.asdict(record))

    def forget(self, record: AnyRecord) -> None:
        name = _TABLES[type(record)]
        self._table(name).pop(record.id, None)
        self.journal.remove(name, record.id)

    # --- sessions ---

    def new_session(
        self,
        owner: str,
        *,
        user_metadata: dict[str, object] | None,
        display_name: str | None,
        in_order: bool,
    ) -> ApiSession:
        now = time.time()
        id = f"session-{secrets.token_hex(8)}"
        session = ApiSession(
            id,
            owner,
            now,
            now,
            user_metadata=user_metadata,
            display_name=display_name,
            in_order=in_order,
        )
        self.keep(session)
        return session

    def session(self, id: str, owner: str) -> ApiSession:
        """An open session. Raises HttpError 404 if it does not exist, 410 if it has ended."""
        session = self.sessions.get(id)
        if session is None or session.owner != owner:
            raise HttpError(404, f"session {id} does not exist")
        if session.finished:
            raise HttpError(410, f"session {id} has finished")
        session.seen = time.time()
        return session

    # --- models ---

    def model(self, id: str, owner: str) -> RegisteredModel:
        model = self.models.get(id)
        if model is None or model.owner != owner:
            raise HttpError(404, f"model {id} does not exist")
        model.seen = time.time()
        session = self.sessions.get(model.session)
        if session is not None and not session.finished:
            session.seen = model.seen
        return model

    def lost(self, model: RegisteredModel, reason: str) -> str:
        """Message that a model is lost, why, and from which checkpoint to continue."""
        newest = self.newest_checkpoint(model.id, "training")
        remedy = "it was never saved"
        if newest is not None:
            remedy = f"continue from its newest checkpoint, {newest.path}"
        return f"model {model.id} is lost: {reason}; {remedy}"

    def live_models(self) -> list[RegisteredModel]:
        return [m for m in self.models.values() if m.state != "ended"]

    def policy_for_critic(self, session: str) -> str:
        """The policy that a session's new critic belongs to: the newest one without a critic.
        Raises Refused."""
        models = [m for m in self.live_models() if m.session == session]
        policies = [m for m in models if m.role == "policy"]
        if not policies:
            raise Refused("create a policy before its critic: this session has none")
        taken = {m.policy for m in models if m.role == "critic"}
        free = [m for m in policies if m.id not in taken]
        if not free:
            ids = ", ".join(m.id for m in policies)
            raise Refused(f"one critic per policy: {ids} already has one")
        return max(free, key=lambda m: m.created).id

    # --- custom losses ---

    def graph(self, id: str, model: RegisteredModel) -> LossGraph:
        """A custom loss for a model. Raises Refused if the model's session has not created it."""
        loss = self.graphs.get(id)
        if loss is None or loss.session != model.session:
            raise Refused(f"custom loss {id:.256} does not exist in session {model.session}")
        return LossGraph.from_plain(loss.graph)

    # --- checkpoints ---

    def checkpoint(self, path: str, owner: str, kind: str | None = None) -> Checkpoint:
        """Look up a checkpoint. Raises Refused if this owner has none with this path and kind, or
        it has expired."""
        checkpoint = self.checkpoints.get(path)
        if checkpoint is None or checkpoint.owner != owner or checkpoint.has_expired(time.time()):
            raise Refused(f"checkpoint {path} does not exist")
        if kind is not None and checkpoint.kind != kind:
            raise Refused(
                f"checkpoint {path} is of kind {checkpoint.kind}, must be of kind {kind} "
                f"({KINDS[kind]}/...)"
            )
        return checkpoint

    def newest_checkpoint(self, run: str, kind: str) -> Checkpoint | None:
        checkpoints = [c for c in self.checkpoints.values() if c.run == run and c.kind == kind]
        return max(checkpoints, key=lambda c: c.created, default=None)


def losses_queue(session: str) -> str:
    """Key of the queue in which a session's custom losses are created."""
    return f"{session}:loss"


def role_of(user_metadata: dict[str, object] | None, model_role: str | None) -> str:
    """The role of a new model, from either way of declaring it. Raises Refused."""
    in_metadata = (user_metadata or {}).get("model_role")
    if None not in (in_metadata, model_role) and in_metadata != model_role:
        raise Refused(
            f"model_role is {model_role!r}, but {in_metadata!r} in user_metadata; give one of them"
        )
    roles = [role for role in (model_role, in_metadata, "policy") if role is not None]
    if roles[0] not in ROLES:
        raise Refused(f"unknown model_role {roles[0]!r}; accepted: {', '.join(ROLES)}")
    return str(roles[0])
