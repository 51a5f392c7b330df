"""Executes accepted requests: sends a command to the workers, then updates registry and files from
the response."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from slime_like.tinker import codec
from slime_like.tinker.errors import Failed, Refused
from slime_like.tinker.futures import Request, json_result
from slime_like.tinker.losses import STABLE_REINFORCE
from slime_like.tinker.model_registry import (
    KINDS,
    Checkpoint,
    CustomLoss,
    ModelRegistry,
    RegisteredModel,
    Sampler,
)
from slime_like.tinker.request_queue import Result, named
from slime_like.tinker.results import forward_backward_output, sample_output
from slime_like.tinker.sample_records import SampledRecord, SampleRecords

log = logging.getLogger(__name__)
SHARED = ("sampling", "prompt_log_probs", "seeded", "top_k_prompt", "top_k_sample")  # of a batch
SAVE_TYPES = {  # kind of checkpoint -> type of the response
    "training": "save_weights",
    "sampler": "save_weights_for_sampler",
    "external": "save_weights_external",
}
Call = Callable[[str, codec.Message], Awaitable[Any]]  # request id, command


class EndModel(Protocol):
    """Signature of SessionManager.end_model."""

    def __call__(self, model: RegisteredModel, reason: str, *, corrupted: bool = False) -> None: ...


class ServerOperations:
    """Executes requests.

    Args:
        call: Sends a command to the workers.
        folder: For everything that the server stores.
        base: Folder of the base model.
        max_snapshots: Per key.
        exports_adapters: Samplers get adapters beside the base model, not merged weights.
        max_adapters: That one batch of samples may need.
    """

    def __init__(
        self,
        registry: ModelRegistry,
        call: Call,
        *,
        folder: Path,
        base: str,
        max_snapshots: int,
        exports_adapters: bool = False,
        max_adapters: int = 1,
    ) -> None:
        self.registry = registry
        self.call = call
        self.folder = folder
        self.base = base
        self.max_snapshots = max_snapshots
        self.exports_adapters = exports_adapters
        self.max_adapters = max_adapters
        self.records = SampleRecords()
        self.end_model: EndModel = lambda model, reason, *, corrupted=False: None
        # have the workers unload a model of which `end_model` does not know that they have it
        self.unload: Callable[[RegisteredModel], object] = lambda model: None

    async def execute(self, requests: Sequence[Request]) -> Sequence[Result | Exception]:
        if requests[0].op == "sample":
            return await self._sample(requests)
        (request,) = requests
        if "refusal" in request.body:
            raise Refused(request.body["refusal"])
        run: Callable[[Request], Awaitable[Result]] = getattr(self, f"_{request.op}")
        try:
            return [await run(request)]
        except Failed as error:
            model = self.registry.models.get(request.body.get("model", ""))
            if model is None:
                raise
            if error.broken and model.state != "ended":
                self.end_model(model, self.registry.lost(model, str(error)), corrupted=True)
            if model.corrupted:  # by this failure, or because its workers ended
                raise Failed(model.reason) from error
            raise

    def needs_workers(self, request: Request) -> bool:
        """False for requests that are rejected anyway, and for those of ended models."""
        if request.op == "unload":
            return True
        if request.op == "create_custom_loss":
            return False
        model = self.registry.models.get(request.body.get("model", ""))
        return "refusal" not in request.body and (model is None or model.state != "ended")

    def executed(self, request: Request) -> None:
        """Record that a model's request is done and its sequence number consumed."""
        model = self.registry.models.get(request.queue)
        if model is None:
            return
        model.next_seq = request.seq + 1
        if (
            request.op in ("create_model", "load_new")
            and request.failed
            and model.state == "creating"
        ):
            self.end_model(model, f"model {model.id} was not created")
        self.registry.keep(model)

    def failed(self, request: Request, reason: str) -> None:
        """After a forward_backward that failed, the next optim_step would apply a part of its
        client's batch: the SDK sends a batch in chunks, and the step before it knows of their
        fate."""
        if request.op == "forward_backward" and not request.body.get("forward_only"):
            self._lacks_gradients(request.queue, f"request {request.seq} failed: {reason}")

    def skipped(self, queue: str, numbers: range) -> None:
        self._lacks_gradients(queue, f"{named(numbers)} never came")

    def _lacks_gradients(self, model_id: str, reason: str) -> None:
        """Have the model's next optim_step refused, for the first reason."""
        model = self.registry.models.get(model_id)
        if model is not None and not model.incomplete:
            model.incomplete = reason
            self.registry.keep(model)

    def _model(self, request: Request) -> RegisteredModel:
        """The request's model. Raises Failed if it has ended."""
        model = self.registry.models[request.body["model"]]
        if model.state == "ended":
            raise Failed(model.reason)
        return model

    # --- models ---

    async def _create_model(self, request: Request) -> Result:
        model = self._model(request)
        await self._create(request.id, model, policy=model.policy)
        model.state = "ready"
        self.registry.keep(model)
        log.info("model %s of %s: created", model.id, model.owner)
        return json_result({"model_id": model.id, "type": "create_model"})

    async def _load_new(self, request: Request) -> Result:
        """Create a model from a checkpoint."""
        model = self._model(request)
        await self._create(request.id, model, policy=None)
        try:
            return await self._load(request)
        except Exception:
            self.unload(model)
            raise

    async def _create(self, id: str, model: RegisteredModel, *, policy: str | None) -> None:
        command = {"op": "create", "model": model.id, "role": model.role, "lora": model.lora}
        await self.call(id, {**command, "policy": policy})
        if model.state == "ended":  # meanwhile
            self.unload(model)
            raise Failed(model.reason)

    async def _load(self, request: Request) -> Result:
        model = self._model(request)
        path = request.body["path"]
        checkpoint = self.registry.checkpoint(path, request.owner, "training")
        self._check_shape(model, checkpoint)
        command = {
            "op": "load",
            "model": model.id,
            "folder": checkpoint.folder,
            "optimizer": request.body["optimizer"],
        }
        await self.call(request.id, command)
        self._model(request)  # it may have ended meanwhile
        model.state = "ready"
        model.incomplete = ""
        self.registry.keep(model)
        return json_result({"path": path, "model_id": model.id, "type": "load_weights"})

    @staticmethod
    def _check_shape(model: RegisteredModel, checkpoint: Checkpoint) -> None:
        if checkpoint.role != model.role:
            raise Refused(
                f"checkpoint {checkpoint.path} is of a {checkpoint.role}, model {model.id} is a "
                f"{model.role}"
            )
        if checkpoint.lora != model.lora:
            raise Refused(
                f"checkpoint {checkpoint.path} has {describe_lora(checkpoint.lora)}, model "
                f"{model.id} {describe_lora(model.lora)}"
            )

    async def _unload(self, request: Request) -> Result:
        model = request.body["model"]
        await self.call(request.id, {"op": "unload", "model": model})
        return json_result({"model_id": model, "type": "unload_model"})

    async def _forward_backward(self, request: Request) -> Result:
        model = self._model(request)
        command = dict(request.body["command"])
        widths = command.pop("widths", None)
        value = await self.call(
            request.id, {"op": "forward_backward", "model": model.id, **command}
        )
        critic = model.role == "critic"
        if command["loss"].get("name") == STABLE_REINFORCE:
            value["metrics"]["is_open_equivalent_of_stable_reinforce"] = ("mean", 1.0)
        return forward_backward_output(value, command["lengths"], widths, critic=critic)

    async def _optim_step(self, request: Request) -> Result:
        model = self._model(request)
        adam = request.body["adam"]
        missing = model.incomplete
        command = {"op": "optim_step", "model": model.id, "adam": adam, "missing": missing}
        try:
            value = await self.call(request.id, command)
        finally:
            model.incomplete = ""  # if it was not, this step was refused and the gradients dropped
        norm = value["grad_norm"]
        if not value["stepped"]:
            reason = f"the gradient norm is {norm}"
            if not isinstance(norm, str):
                reason = f"with gradient norm {norm:g} and these settings a weight may overflow"
            raise Refused(
                f"model {model.id}: optimizer step skipped: {reason}; weights and moments are "
                "unchanged, the gradients are discarded"
            )
        metrics = {"grad_norm": norm, "learning_rate": adam["learning_rate"]}
        return json_result({"metrics": metrics, "type": "optim_step"})

    async def _create_custom_loss(self, request: Request) -> Result:
        session = request.body["session"]
        id = f"{request.queue}:{request.seq}"
        self.registry.keep(CustomLoss(id, session, request.owner, request.body["graph"]))
        return json_result({"loss_id": id, "type": "create_custom_loss"})

    # --- checkpoints ---

    async def _save(self, request: Request) -> Result:
        """Save a checkpoint. kind: training (full state, to resume from), sampler or external (a
        Hugging Face model)."""
        model = self._model(request)
        body = request.body
        kind = body["kind"]
        name = body["name"]
        training = kind == "training"
        path = f"tinker://{model.id}/{KINDS[kind]}/{name}"
        existing = self.registry.checkpoints.get(path)
        if existing is not None and not body["overwrite"]:
            overwrite = ", or overwrite=True" if training else ""
            raise Refused(f"checkpoint {path} exists; give another name{overwrite}")
        root = self.folder / "checkpoints" / model.id / KINDS[kind]
        folder = root / f"{name}.{request.seq}"
        adapter = kind == "sampler" and self._exports_adapter(model)
        op = "save" if training else "export_adapter" if adapter else "export"
        await self.call(request.id, {"op": op, "model": model.id, "folder": str(folder)})
        self._add_checkpoint(model, body, path, folder, adapter=adapter)
        if existing is not None:
            remove_tree(Path(existing.folder))
        return json_result({"path": path, "type": SAVE_TYPES[kind]})

    def _exports_adapter(self, model: RegisteredModel) -> bool:
        """Whether a model's sampling weights are its adapter alone."""
        return self.exports_adapters and model.lora is not None

    def _add_checkpoint(
        self,
        model: RegisteredModel,
        body: codec.Message,
        path: str,
        folder: Path,
        *,
        adapter: bool,
    ) -> None:
        now = time.time()
        checkpoint = Checkpoint(
            path,
            model.id,
            body["kind"],
            body["name"],
            model.owner,
            str(folder),
            now,
            model.base_model,
            model.role,
            size=size_of(folder),
            lora=model.lora,
            expires=None if body["ttl_seconds"] is None else now + body["ttl_seconds"],
            user_metadata=body["user_metadata"],
            adapter=adapter,
        )
        self.registry.keep(checkpoint)

    async def _snapshot(self, request: Request) -> Result:
        """Export the model for a new sampling session without a named checkpoint. With inflight
        weights, all earlier sessions of this kind take them, too; waiting requests of theirs are
        sampled from the new weights."""
        model = self._model(request)
        sampler_id = request.body["sampler"]
        folder = self.folder / "snapshots" / f"{model.id}.{request.seq}"
        adapter = self._exports_adapter(model)
        op = "export_adapter" if adapter else "export"
        await self.call(request.id, {"op": op, "model": model.id, "folder": str(folder)})
        if self.registry.sessions[model.session].finished:  # meanwhile, with all its samplers
            remove_tree(folder)
            raise Failed(model.reason)
        sampler = Sampler(
            sampler_id,
            model.session,
            model.owner,
            str(folder),
            used=time.time(),
            adapter=adapter,
        )
        if request.body.get("inflight"):
            sampler.follows = model.id
            for other in [s for s in self.registry.samplers.values() if s.follows == model.id]:
                before = Path(other.folder)
                other.folder = str(folder)
                other.adapter = adapter
                self.registry.keep(other)
                self._remove_unused(before)
        self.registry.keep(sampler)
        self._drop_old_snapshots(model.owner)
        return json_result({"sampling_session_id": sampler_id, "type": "save_weights_for_sampler"})

    def _drop_old_snapshots(self, owner: str) -> None:
        """Remove a key's least recently used snapshots over --max-snapshots; the limit is per
        key."""
        samplers = self.registry.samplers.values()
        snapshots = [s for s in samplers if s.owner == owner and self._is_snapshot(s)]
        snapshots.sort(key=lambda s: s.used)
        for sampler in snapshots[: max(0, len(snapshots) - self.max_snapshots)]:
            self.drop_sampler(sampler)

    def _is_snapshot(self, sampler: Sampler) -> bool:
        """Whether the weights are the sampler's own, not of a checkpoint or the base model."""
        return Path(sampler.folder).parent == self.folder / "snapshots"

    def drop_sampler(self, sampler: Sampler) -> None:
        """Forget a sampler, and delete its weights if they are a snapshot."""
        self.registry.forget(sampler)
        if self._is_snapshot(sampler):
            self._remove_unused(Path(sampler.folder))

    def _remove_unused(self, folder: Path) -> None:
        """Delete a snapshot that no sampler uses any more."""
        if all(Path(sampler.folder) != folder for sampler in self.registry.samplers.values()):
            remove_tree(folder)

    def drop_checkpoint(self, checkpoint: Checkpoint) -> None:
        self.registry.forget(checkpoint)
        for sampler in [s for s in self.registry.samplers.values() if s.source == checkpoint.path]:
            self.registry.forget(sampler)
        remove_tree(Path(checkpoint.folder))

    # --- sampling ---

    def can_batch(self, batch: Sequence[Request], other: Request) -> bool:
        first = batch[0]
        if not first.op == other.op == "sample":
            return False
        if "refusal" in first.body or "refusal" in other.body:
            return False
        if first.body.get("images") or other.body.get("images"):
            return False  # damage of an image's file shows when it is decoded
        if any(first.body.get(name) != other.body.get(name) for name in SHARED):
            return False
        if first.queue == other.queue:
            return True
        samplers = [self.registry.samplers.get(request.queue) for request in (*batch, other)]
        weights = {None if sampler is None else self._weights(sampler) for sampler in samplers}
        adapters = {sampler.folder for sampler in samplers if sampler and sampler.adapter}
        return None not in weights and len(weights) == 1 and len(adapters) <= self.max_adapters

    def _weights(self, sampler: Sampler) -> str:
        """Folder of the whole weights that a sampler needs."""
        return self.base if sampler.adapter else sampler.folder

    async def _sample(self, requests: Sequence[Request]) -> Sequence[Result | Exception]:
        """Requests of one sampler, or of several with the same weights and other adapters."""
        if "refusal" in requests[0].body:
            raise Refused(requests[0].body["refusal"])
        queues = list(dict.fromkeys(request.queue for request in requests))
        try:
            return await self._sample_together(requests)
        except (Refused, Failed) as error:
            if len(queues) == 1:
                raise
            if is_common(error):
                log.warning("samples of %s failed: %s", ", ".join(queues), error)
                raise
            log.info("samples of %s are executed alone: %s", ", ".join(queues), error)
        # which of them is to blame is unknown, and the others' clients have nothing to do with it
        results: dict[str, Result | Exception] = {}
        fault: Exception | None = None  # that the rest would meet, too
        for queue in queues:
            alone = [request for request in requests if request.queue == queue]
            answers: Sequence[Result | Exception]
            try:
                if fault is not None:
                    raise fault
                answers = await self._sample_together(alone)
            except (Refused, Failed) as error:
                if is_common(error) and fault is None:
                    log.warning("the other samples are not tried: %s", error)
                    fault = error
                answers = [error] * len(alone)
            results |= {request.id: answer for request, answer in zip(alone, answers, strict=True)}
        return [results[request.id] for request in requests]

    async def _sample_together(self, requests: Sequence[Request]) -> Sequence[Result | Exception]:
        """Raises Refused or Failed for all of them."""
        samplers = {
            request.queue: self.registry.samplers.get(request.queue) for request in requests
        }
        found = {queue: sampler for queue, sampler in samplers.items() if sampler is not None}
        if len(found) < len(samplers):  # then it is the only one
            return [Refused(snapshot_removed(requests[0].queue))] * len(requests)
        for sampler in found.values():
            sampler.used = time.time()
        first = requests[0].body
        adapters = [
            found[request.queue].folder if found[request.queue].adapter else ""
            for request in requests
        ]
        command = {
            "op": "sample",
            "folder": self._weights(found[requests[0].queue]),
            **{name: first[name] for name in SHARED if name in first},
            "prompts": [request.body["prompt"] for request in requests],
            "counts": [request.body["count"] for request in requests],
            "seeds": [request.body["seed"] for request in requests],
            "targets": [cells_of(request.body.get("targets")) for request in requests],
            "alt_tokens": [request.body.get("alt_tokens", 0) for request in requests],
            "images": [request.body.get("images", []) for request in requests],
            "adapters": adapters if any(adapters) else [],
        }
        # all their ids: workers keep their last answer for an API process that starts again, which
        # must not take it for the answer to another batch that begins with the same request
        value = await self.call(" ".join(request.id for request in requests), command)
        for request, samples in zip(requests, value, strict=True):
            for i, sequence in enumerate(
                samples["sequences"] if request.body.get("record") else []
            ):
                record = SampledRecord.of(found[request.queue].session, sequence)
                self.records.keep(f"{request.queue}/{request.seq}/{i}", record)
        return [
            sample_output(samples, request.body)
            for request, samples in zip(requests, value, strict=True)
        ]


def is_common(error: Exception) -> bool:
    """See `Failed`."""
    return isinstance(error, Failed) and error.common


def cells_of(targets: codec.Message | None) -> codec.Message | None:
    """What the workers need of the tokens to score."""
    return None if targets is None else {name: targets[name] for name in ("rows", "tokens")}


def snapshot_removed(id: str) -> str:
    return (
        f"sampling session {id} has ended: its snapshot was removed to make room "
        "(--max-snapshots), or its checkpoint was deleted"
    )


def describe_lora(lora: dict[str, object] | None) -> str:
    if lora is None:
        return "full weights"
    return f"an adapter ({', '.join(f'{name}={value}' for name, value in lora.items())})"


def remove_tree(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
