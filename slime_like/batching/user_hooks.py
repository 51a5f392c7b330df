"""User functions in training and logging (arguments/schema/hooks.py).

An adapter, which `rollout/hooks.py` looks up if a flag names a function, defines their arguments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from arguments.run_config import RunConfig
from slime_like.advantages import AdvantageSettings
from slime_like.advantages.estimate import Outcomes
from slime_like.advantages.outcome import compute_advantages
from slime_like.advantages.registry import OutcomeEstimator, advantage_estimators
from slime_like.batching.train_samples import map_steps
from slime_like.distributed.collectives import from_rank_zero
from slime_like.megatron.trained_network import TrainedNetwork
from slime_like.rollout.hooks import hook_adapter
from slime_like.samples.episodes import complete
from slime_like.samples.exchange import gather_on_rank_zero
from slime_like.samples.groups import SampleGroup, flatten
from slime_like.samples.index import AnySample, Rows, Versions, remote_samples, rows_of
from slime_like.types import Sample, TrainBatch, TrainSample

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule


Columns = Mapping[str, Sequence[Tensor] | None]


@dataclass(frozen=True, slots=True)
class RankData:
    """This rank's samples of a rollout."""

    samples: Sequence[Sample]  # with tokens
    train: Sequence[TrainSample]  # the same samples as inputs of the loss
    rewards: Sequence[float]  # after group normalisation
    columns: Columns  # further per-token tensors by name, [R] per sample


class HookAdapter(Protocol):
    """Calls user functions. Each method raises ValueError, naming the flag, for an invalid result.
    has: whether a flag names the function."""

    def __init__(self, config: RunConfig) -> None: ...

    def has(self, name: str) -> bool: ...

    def megatron_init(self) -> None: ...

    def before_log_prob(self, chunks: Sequence[MegatronModule], prefix: str) -> None: ...

    def before_train_step(self, rollout_id: int, step_id: int, network: TrainedNetwork) -> None: ...

    def train_data(self, samples: Sequence[Sample]) -> list[Sample]: ...

    def advantages(self, data: RankData) -> tuple[list[Tensor], list[Tensor]]: ...

    def postprocess(self, rollout_id: int, data: RankData) -> tuple[list[Tensor], list[Tensor]]: ...

    def policy_weights(self, samples: Sequence[TrainSample]) -> list[Tensor]: ...

    def log_rollout(
        self, rollout_id: int, samples: Sequence[Sample], metrics: dict[str, float], seconds: float
    ) -> bool: ...

    def log_eval(
        self, rollout_id: int, sets: Mapping[str, Sequence[Sample]], metrics: dict[str, float]
    ) -> bool: ...


class TrainHooks:
    """What a run calls around training and logging. Here nothing happens; `UserHooks` calls the
    user's functions."""

    converts: bool = False  # whether `convert` changes the samples

    def begin_rollout(self, rollout_id: int) -> None:
        """Called before the samples of a rollout are generated or taken."""

    def megatron_init(self) -> None:
        """Called before the model is built, on every rank."""

    def before_log_prob(self, chunks: Sequence[MegatronModule], prefix: str = "") -> None:
        """Called before a pass that computes log-probs. prefix: "", "ref_" or "teacher_"."""

    def before_train_step(self, step_id: int, network: TrainedNetwork) -> None:
        """Called before the forward and backward pass of each optimizer step."""

    def convert(self, samples: Sequence[AnySample]) -> list[AnySample]:
        """The sequences to train on. Collective. samples: of a rollout, each followed by its
        branches."""
        return list(samples)

    def advantages(self, data: Callable[[], RankData]) -> tuple[list[Tensor], list[Tensor]] | None:
        """Advantages and returns, [R] per sample; None: use the estimator."""
        return None

    def finish(
        self, batches: Sequence[TrainBatch], data: Callable[[], RankData]
    ) -> list[TrainBatch]:
        """The batches with other loss weights, advantages or masks. data: returns the same samples
        in the same order."""
        return list(batches)

    def log_rollout(
        self, samples: Sequence[AnySample], metrics: Mapping[str, float], seconds: float
    ) -> bool:
        """Log a rollout. Returns whether to omit ``rollout/`` metrics. Collective."""
        return False

    def log_eval(
        self, step: int, sets: Mapping[str, Sequence[SampleGroup]], metrics: Mapping[str, float]
    ) -> bool:
        """Log an evaluation. Returns whether to omit ``eval/`` metrics. Collective."""
        return False


class UserHooks(TrainHooks):
    """The user functions of a run. A method without a function does as in `TrainHooks`."""

    def __init__(self, config: RunConfig) -> None:
        self._adapter: HookAdapter = hook_adapter(config)
        self._buffer_size = config.rollout.sample_buffer_size
        self._batch_size = config.algorithm.global_batch_size or 1
        self._per_token = config.algorithm.loss_reduction == "token_mean"
        self._rollout_id = 0
        self.converts = self._named("custom_convert_samples_to_train_data_path") is not None

    def begin_rollout(self, rollout_id: int) -> None:
        self._rollout_id = rollout_id

    def _named(self, name: str) -> HookAdapter | None:
        return self._adapter if self._adapter.has(name) else None

    def megatron_init(self) -> None:
        if (adapter := self._named("custom_megatron_init_path")) is not None:
            adapter.megatron_init()

    def before_log_prob(self, chunks: Sequence[MegatronModule], prefix: str = "") -> None:
        adapter = self._named("custom_megatron_before_log_prob_hook_path")
        if adapter is not None:
            adapter.before_log_prob(chunks, prefix)

    def before_train_step(self, step_id: int, network: TrainedNetwork) -> None:
        adapter = self._named("custom_megatron_before_train_step_hook_path")
        if adapter is not None:
            adapter.before_train_step(self._rollout_id, step_id, network)

    def convert(self, samples: Sequence[AnySample]) -> list[AnySample]:
        """With `TRAIN_REWARD` in their metadata; the function runs on rank 0."""
        adapter = self._named("custom_convert_samples_to_train_data_path")
        if adapter is None:
            return list(samples)
        train_data = adapter.train_data
        gathered = gather_on_rank_zero(samples, buffer_size=self._buffer_size)
        converted: list[Sample] = []  # on rank 0

        def convert() -> tuple[Rows, Versions]:
            converted.extend(train_data(complete(gathered)))
            return rows_of(converted, 0)

        index = from_rank_zero(convert)
        return [*converted] if converted else [*remote_samples(*index)]

    def advantages(self, data: Callable[[], RankData]) -> tuple[list[Tensor], list[Tensor]] | None:
        adapter = self._named("custom_advantage_function_path")
        return None if adapter is None else adapter.advantages(data())

    def finish(
        self, batches: Sequence[TrainBatch], data: Callable[[], RankData]
    ) -> list[TrainBatch]:
        if (adapter := self._named("custom_pg_loss_reducer_function_path")) is not None:
            batches = [self._with_weights(adapter, batch) for batch in batches]
        adapter = self._named("rollout_data_postprocess_path")
        if adapter is None:
            return list(batches)
        steps = [batch.samples for batch in batches]
        rank_data = dataclasses.replace(data(), train=list(chain.from_iterable(steps)))
        masks, advantages = adapter.postprocess(self._rollout_id, rank_data)

        def replaced(i: int, sample: TrainSample) -> TrainSample:
            return dataclasses.replace(sample, loss_mask=masks[i], advantages=advantages[i])

        return map_steps(steps, replaced)

    def _with_weights(self, adapter: HookAdapter, batch: TrainBatch) -> TrainBatch:
        """Apply the user's weights to one optimizer step: per sample or, with token_mean, per
        token, where the default weight is one over the number of tokens."""
        if not any(sample.response_length for sample in batch.samples):
            return batch
        scale = 1 / self._batch_size
        if self._per_token:
            scale = float(torch.cat([sample.loss_weights for sample in batch.samples]).max())
        weights = adapter.policy_weights(batch.samples)
        samples = tuple(
            dataclasses.replace(sample, policy_weights=weight * scale)
            for sample, weight in zip(batch.samples, weights)
        )
        return dataclasses.replace(batch, samples=samples)

    def log_rollout(
        self, samples: Sequence[AnySample], metrics: Mapping[str, float], seconds: float
    ) -> bool:
        adapter = self._named("custom_rollout_log_function_path")
        if adapter is None:
            return False
        log = adapter.log_rollout
        rollout_id = self._rollout_id
        gathered = gather_on_rank_zero(samples, buffer_size=self._buffer_size)
        return from_rank_zero(lambda: log(rollout_id, complete(gathered), dict(metrics), seconds))

    def log_eval(
        self, step: int, sets: Mapping[str, Sequence[SampleGroup]], metrics: Mapping[str, float]
    ) -> bool:
        adapter = self._named("custom_eval_rollout_log_function_path")
        if adapter is None:
            return False
        log = adapter.log_eval
        gathered = {
            name: gather_on_rank_zero(flatten(groups), buffer_size=self._buffer_size)
            for name, groups in sets.items()
        }

        def log_on_rank_zero() -> bool:
            samples = {name: complete(each) for name, each in gathered.items()}
            return log(step, samples, dict(metrics))

        return from_rank_zero(log_on_rank_zero)


def make_train_hooks(config: RunConfig) -> TrainHooks:
    """The hooks of a run: the user's, if a flag names a function."""
    is_set = any(getattr(config.hooks, f.name) for f in dataclasses.fields(config.hooks))
    return UserHooks(config) if is_set else TrainHooks()


def group_rewards(
    settings: AdvantageSettings, outcomes: Outcomes, indices: Sequence[int]
) -> list[float]:
    """Rewards of this rank's samples as slime passes them: normalised within groups if the
    estimator does so for entire responses. 0 if there is no finite number."""
    values = outcomes.rewards if outcomes.processed is None else outcomes.processed
    grouped = isinstance(advantage_estimators.get(settings.estimator), OutcomeEstimator)
    if outcomes.processed is None and grouped:
        values = compute_advantages(
            settings.estimator,
            rewards=outcomes.rewards.double(),
            group_ids=outcomes.group_ids,
            lengths=outcomes.lengths,
            normalize_std=settings.normalize_std,
            singleton=settings.singleton,
        ).values
    return [float(v) for v in torch.nan_to_num(values, 0.0, 0.0, 0.0)[list(indices)]]
