"""Engine side of a run: sampling, grading, evaluation and weight sync.

Weight sync retries after server failures and verifies the servers' log-probs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from arguments.run_config import RunConfig
from slime_like.data.prompts import PromptSource
from slime_like.errors import RunError
from slime_like.megatron.backend import MegatronBackend
from slime_like.metrics.progress import Progress
from slime_like.rollout.engines.base import RolloutEngine
from slime_like.rollout.evaluate import make_evaluator
from slime_like.rollout.hooks import UserSource
from slime_like.rollout.rollouter import Rollouter
from slime_like.rollout.step_plan import flatten
from slime_like.sample_index import AnySample
from slime_like.trainer.guards import train_rollout_limit
from slime_like.trainer.rollout_manager import (
    RolloutManager,
    function_evaluator,
    make_rollouter,
    make_teacher,
)
from slime_like.types import Prompt, SampleGroup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from slime_like.trainer.weight_check import WeightCheck

ATTEMPTS = 4  # each failed attempt loses a server


class WeightSync:
    """Syncs policy weights to the rollout engine. Collective over all ranks."""

    def __init__(
        self,
        backend: MegatronBackend,
        engine: RolloutEngine,
        progress: Progress,
        *,
        check: WeightCheck | None = None,
        check_always: bool = False,
    ) -> None:
        """check: verifies the engine's weights after the first update, or after each with
        check_always."""
        self._backend = backend
        self._engine = engine
        self._progress = progress
        self._check = check
        self._check_always = check_always
        self._checked_once = False
        self.metrics: dict[str, float] = {}  # metrics of the latest check

    def sync(self, version: int) -> None:
        """Sync weights of this version, unless the engine has them. Raises RunError if it fails or
        if the check finds other weights."""
        self._engine.check_health()
        if self._engine.weight_version == version:
            return
        with self._progress.phase("sync"):
            for attempt in range(ATTEMPTS):
                if attempt:
                    # if no server is left, waits for one to restart
                    self._engine.check_health()
                self._backend.sync_weights(self._engine, version)
                if self._engine.weight_version == version:
                    break
            else:
                raise RunError(
                    f"the weights of version {version} did not reach the engines in {ATTEMPTS} attempts"
                )
            if self._check is not None and (self._check_always or not self._checked_once):
                self.metrics |= self._check.run(version)
                self._checked_once = True


class Sampling:
    """The engine side of a run. Collective over all ranks. source, eval_prompts: see `make_source`
    and `load_prompts`."""

    def __init__(
        self,
        run: RunConfig,
        backend: MegatronBackend,
        tokenizer: PreTrainedTokenizerBase,
        progress: Progress,
        *,
        source: PromptSource | UserSource | None,
        eval_prompts: Mapping[str, Sequence[Prompt]],
        num_rollouts: int,
        output_dir: Path,
    ) -> None:
        self._progress = progress
        self._rollouter = make_rollouter(run, backend, tokenizer, output_dir=output_dir)
        teacher = make_teacher(run, tokenizer)
        self._weights = make_weight_sync(run, backend, self._rollouter, progress)
        evaluator = make_evaluator(run, self._rollouter, eval_prompts)
        self.supply = RolloutManager(
            run,
            source,
            self._rollouter,
            evaluator,
            tokenizer,
            num_rollouts=num_rollouts,
            teacher=teacher,
        )
        self._offloaded: TrainerMemory | None = None
        if run.sglang.offload_train and self._rollouter is not None:
            from slime_like.megatron.offload import TrainerMemory
            from slime_like.megatron.trained_network import TrainedNetwork

            networks = (backend.policy, backend.critic)
            trained = [each for each in networks if isinstance(each, TrainedNetwork)]
            self._offloaded = TrainerMemory(trained)
        self._offloaded_gb = 0.0
        self.evaluator = function_evaluator(run, self._rollouter, evaluator, self.supply)

    def deliver_ahead(
        self, deliver: Callable[[Sequence[AnySample], dist.ProcessGroup | None], None]
    ) -> None:
        """Deliver prefetched rollouts to the ranks that train on them from the sampling thread.
        deliver: called with all samples of a rollout and a process group of all ranks."""
        rollouter = self._rollouter
        if self.supply.ahead is not None and rollouter is not None:
            self.supply.ahead.deliver = lambda groups: deliver(flatten(groups), rollouter.group)

    def sync_weights(self, version: int) -> None:
        """Sync policy weights to the engine, if there is one and it has another version."""
        if self._weights is not None:
            self._weights.sync(version)

    def groups_of(self, step: int) -> tuple[list[SampleGroup], dict[str, float]]:
        """The graded groups of a rollout, and metrics of their collection."""
        self._offload()
        with self._progress.phase("generate"):
            return self.supply.groups_of(step)

    def release_engine(self) -> dict[str, float]:
        """Release the engine's memory to the trainer until the next rollout; returns metrics."""
        if self._rollouter is None:
            return {}
        metrics = self._rollouter.engine.take_metrics()
        if self._offloaded is not None:
            metrics["perf/offloaded_gb"] = self._offloaded_gb
        self._release()
        return metrics

    def _offload(self) -> None:
        """Offload the trainer before servers generate."""
        if self._offloaded is not None:
            with self._progress.phase("offload"):
                self._offloaded_gb = self._offloaded.release() / 1e9

    def _release(self) -> None:
        """Release the servers' memory before the trainer runs."""
        assert self._rollouter is not None
        self._rollouter.engine.release_memory()
        if self._offloaded is not None:
            with self._progress.phase("offload"):
                self._offloaded.restore()

    def evaluate(self, step: int, weight_version: int) -> dict[str, float]:
        """Evaluate these weights, after draining in-flight requests; returns scores."""
        assert self.evaluator is not None
        self.supply.drain()
        self.sync_weights(weight_version)
        self._offload()
        with self._progress.phase("eval"):
            scores = self.evaluator.evaluate(step)
        if self._offloaded is not None:
            self._release()
        return scores

    def close(self) -> None:
        """End the graders and engines that this process started. Idempotent."""
        self.supply.close()
        if self.evaluator is not None:
            self.evaluator.close()
        if self._rollouter is not None:
            self._rollouter.grader.close()
            self._rollouter.engine.close()
            self._rollouter = None


def make_weight_sync(
    run: RunConfig, backend: MegatronBackend, rollouter: Rollouter | None, progress: Progress
) -> WeightSync | None:
    """The weight sync of a run with an engine, with a check if the engine is made of servers."""
    if rollouter is None:
        return None
    check = None
    if run.rollout.rollout_engine == "sglang":
        from slime_like.trainer.weight_check import WeightCheck

        limit = train_rollout_limit(run)
        check = WeightCheck(backend, rollouter.engine, limit=limit, seed=run.data.rollout_seed)
    always = run.sglang.check_weight_update_equal
    return WeightSync(backend, rollouter.engine, progress, check=check, check_always=always)
