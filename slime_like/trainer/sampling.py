"""The engine side of a run: rollouts, evaluation, weight sync, and the memory that trainer and
servers share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from slime_like.engines.base import RolloutEngine
from slime_like.metrics.progress import Progress
from slime_like.rollout.evaluate import Evaluator
from slime_like.rollout.generated import GeneratedRollout
from slime_like.rollout.hooks import UserRollout
from slime_like.rollout.rollouter import Rollouter
from slime_like.samples.index import AnySample
from slime_like.trainer.rollout_manager import RolloutManager
from slime_like.weight_sync.sync import WeightSync

if TYPE_CHECKING:
    from slime_like.megatron.offload import TrainerMemory


class Sampling:
    """The engine side of a run. Collective over all ranks.

    rollouter, weights, evaluator: None if the run needs none. trainer_memory: what the trainer
    releases while servers generate; None if they do not share GPUs.
    """

    def __init__(
        self,
        rollout_manager: RolloutManager,
        rollouter: Rollouter | None,
        weights: WeightSync | None,
        evaluator: Evaluator | UserRollout | None,
        progress: Progress,
        *,
        trainer_memory: TrainerMemory | None,
    ) -> None:
        self.rollout_manager = rollout_manager
        self._rollouter = rollouter
        self._weights = weights
        self.evaluator = evaluator
        self._progress = progress
        self._trainer_memory = trainer_memory
        self._offloaded_gb = 0.0

    def deliver_early(
        self, deliver: Callable[[int, Sequence[AnySample], dist.ProcessGroup | None], None]
    ) -> None:
        """Deliver prefetched rollouts to the ranks that train on them from the sampling thread.
        deliver: called with the id of a rollout, all of its samples, and a process group of all
        ranks."""
        queue = self.rollout_manager.queue
        rollouter = self._rollouter
        if queue is not None and rollouter is not None:
            queue.deliver = lambda step, samples: deliver(step, samples, rollouter.group)

    def sync_weights(self, version: int) -> None:
        """Sync policy weights to the engine, if there is one and it has another version."""
        if self._weights is not None:
            self.rollout_manager.before_new_weights()
            self._weights.sync(version)

    @property
    def engine(self) -> RolloutEngine | None:
        return None if self._rollouter is None else self._rollouter.engine

    def generate(self, step: int) -> GeneratedRollout:
        """A graded rollout."""
        self._offload()
        with self._progress.phase("generate"):
            return self.rollout_manager.generate(step)

    def release_engine(self) -> dict[str, float]:
        """Release the engine's memory to the trainer until the next rollout; returns metrics."""
        if self._rollouter is None:
            return {}
        metrics = self._rollouter.engine.take_metrics()
        if self._weights is not None:
            metrics |= self._weights.take_metrics()
        if self._trainer_memory is not None:
            metrics["perf/offloaded_gb"] = self._offloaded_gb
        self._release()
        return metrics

    def _offload(self) -> None:
        """Offload the trainer before servers generate."""
        if self._trainer_memory is not None:
            with self._progress.phase("offload"):
                self._offloaded_gb = self._trainer_memory.release() / 1e9

    def _release(self) -> None:
        """Release the servers' memory before the trainer runs."""
        assert self._rollouter is not None
        self._rollouter.engine.release_memory()
        if self._trainer_memory is not None:
            with self._progress.phase("offload"):
                self._trainer_memory.restore()

    def take_engine(self, version: int) -> None:
        """Wait until no request is in flight, and sync these weights: until the next `generate` the
        engine is the caller's alone."""
        self.rollout_manager.drain()
        self.sync_weights(version)

    def evaluate(self, step: int, weight_version: int) -> dict[str, float]:
        """Evaluate these weights, after draining in-flight requests; returns scores."""
        assert self.evaluator is not None
        self.take_engine(weight_version)
        self._offload()
        with self._progress.phase("eval"):
            scores = self.evaluator.evaluate(step)
        if self._trainer_memory is not None:
            self._release()
        return scores

    def close(self) -> None:
        """End the graders and engines that this process started. Idempotent."""
        self.rollout_manager.close()
        if self.evaluator is not None:
            self.evaluator.close()
        if self._rollouter is not None:
            self._rollouter.grader.close()
            self._rollouter.engine.close()
            self._rollouter = None
