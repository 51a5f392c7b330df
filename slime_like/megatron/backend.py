"""The trainer's interface to Megatron: log-probs and values, optimizer steps, weight export.
Checkpoints are in run_state.py. Every method is collective over all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from arguments.hf.model import HfModel, read_hf_model
from arguments.run_config import RunConfig
from slime_like.distributed.collectives import from_rank_zero
from slime_like.megatron.factory import (
    FrozenModel,
    make_critic,
    make_head,
    make_objective,
    make_policy,
    make_prediction_loss,
    make_reference,
    make_self_teacher,
    make_teacher,
    self_teacher,
    start_from_policy,
)
from slime_like.megatron.forward_step import TokenComputation
from slime_like.megatron.indexer_replay import indexer_disagreement, select_stage_keys
from slime_like.megatron.init import device_of_this_process
from slime_like.megatron.lora import LoraNetwork, load_adapter, save_adapter
from slime_like.megatron.lora.gather import factor_stream
from slime_like.megatron.lora.rounding import MergeRounding
from slime_like.megatron.micro_batching import MicroBatchSize, micro_batch_size
from slime_like.megatron.moe import replay_disagreement, routing_metrics, select_stage_experts
from slime_like.megatron.network import Network, PassOutput, SelectionSeed
from slime_like.megatron.objectives import (
    PolicyObjective,
    RewardObjective,
    ValueObjective,
    critic_values,
    reward_scores,
)
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.megatron.reshard import copy_same_layout
from slime_like.megatron.trained_network import TrainedNetwork
from slime_like.types import StepResult, TrainBatch, TrainSample
from slime_like.weights.gather import WeightStream
from slime_like.weights.quantized import QuantizedWeight
from slime_like.weights.safetensors_reader import stored_format, weights_digest
from slime_like.weights.untrained import untrained_prefixes, with_trained_tower


@dataclass(frozen=True, slots=True)
class LogProbOutput:
    """Forward-only results of one sample, on the host, over its response; zero where the loss mask
    is False."""

    log_probs: Tensor  # [R] float32
    entropy: Tensor  # [R] float32
    # [L, MoE layers of this pipeline stage, topk] int16: routed experts, if recorded
    routed_experts: Tensor | None = None
    squared_probs: Tensor | None = None  # [R] float32, sum of p^2 over the vocabulary, if requested
    label_log_probs: Tensor | None = None  # [R, K] float32, of the sample's label sets
    top_tokens: Tensor | None = None  # [R, K], the most likely tokens, if requested


@dataclass(frozen=True, slots=True)
class PendingStep:
    """Result of forward and backward, before the optimizer step."""

    metrics: dict[str, float]
    network: TrainedNetwork
    log_probs: Sequence[LogProbOutput] = ()  # of the samples, with `TrainBatch.old_is_current`


class WeightReceiver(Protocol):
    """The part of a rollout engine that receives weights."""

    takes_quantized: bool  # see `RolloutEngine`
    takes_prediction_layers: bool
    takes_adapter: bool
    weight_version: int

    def update_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None: ...


class MegatronBackend:
    """The networks of this rank: the policy and, as needed, reference model, distillation teacher
    and critic."""

    def __init__(self, config: RunConfig, layout: ParallelLayout, *, total_steps: int) -> None:
        """
        Args:
            total_steps: Optimizer steps of the run, for the learning-rate schedules. The first ones
                may train the critic only.
        """
        self.layout = layout
        self.algorithm = config.algorithm
        self.gpt = config.gpt
        self.transformer = config.megatron.transformer
        self.device = device_of_this_process()
        self.hf: HfModel | None = None
        if config.model.hf_checkpoint:
            self.hf = read_hf_model(config.model.hf_checkpoint)
            vision = config.gpt.vision
            if vision is not None and vision.trained:
                self.hf = with_trained_tower(self.hf, vision)
        self.head = make_head(config, layout, temperature=config.log_prob_temperature)
        self.objective = make_objective(config)
        self._prediction = make_prediction_loss(config, self.head)
        self._hf_checkpoint = config.model.hf_checkpoint
        self.seed = config.model.seed
        self._bucket_bytes = config.sglang.update_weight_buffer_size

        self.policy = make_policy(config, layout, self.hf, total_steps=total_steps)
        self._merge_rounding: MergeRounding | None = None
        interval = config.lora.lora_rounding_interval
        is_rounded = self.transformer.params_dtype.itemsize < 4
        if isinstance(self.policy, LoraNetwork) and is_rounded and interval:
            self._merge_rounding = MergeRounding(self.policy, interval)
        self.adapter_shape = self._start_adapter(config.lora.lora_adapter_path)
        self.reference = make_reference(config, self.policy)
        self.averaged_policy = make_self_teacher(config, self.policy)
        self.teacher = make_teacher(config, layout)
        if config.distillation.teaches_itself:
            self.teacher = self_teacher(config, self.policy, self.averaged_policy)
        self.critic: TrainedNetwork | None = None
        if config.trains_critic:
            self.critic = make_critic(config, self.policy, total_steps=total_steps)
            start_from_policy(self.critic, self.policy)
        self._value_loss = config.value_loss
        self.critic_rank = config.critic.critic_lora_rank
        self._rollout_routing_replay = config.rollout.use_rollout_routing_replay
        self._rollout_indexer_replay = config.rollout.use_rollout_indexer_replay
        self.resets_reference = config.model.ref_update_interval is not None

    @property
    def trained(self) -> TrainedNetwork:
        """The policy, in a run that trains it."""
        assert isinstance(self.policy, TrainedNetwork), "untrained with --debug-rollout-only"
        return self.policy

    def update_reference(self) -> None:
        """Reset the reference model to the current policy, if there is a reference model."""
        if self.reference is not None:
            assert isinstance(self.reference, Network), "checked on the command line"
            self.policy.finish_updates()
            copy_same_layout(self.policy, self.reference)

    def set_entropy_coef(self, value: float) -> None:
        """Set the entropy coefficient, equal on all ranks, from the next optimizer step on."""
        terms = dataclasses.replace(self.objective.terms, entropy_coef=value)
        self.objective = dataclasses.replace(self.objective, terms=terms)

    def forward(
        self,
        samples: Sequence[TrainSample],
        network: FrozenModel | None = None,
        *,
        squared_probs: bool = False,
        top_k: int = 0,
    ) -> list[LogProbOutput]:
        """Log-probs and entropies of the response tokens at the sampling temperature; scores in
        place of log-probs for a reward model.

        Args:
            samples: Of this data-parallel rank.
            network: None: the policy, which replays the samples' routed experts and
                selected keys if they have any.
            squared_probs: Also return sums of squared probabilities of the policy.
            top_k: Also return the policy's most likely tokens.

        Returns:
            One output per sample, on all pipeline stages.
        """
        size = self._micro_batch_size(self.layout, forward_only=True)
        head = dataclasses.replace(self.head, squared_probs=squared_probs, top_k=top_k)
        if network is None or network is self.policy:
            record = self.algorithm.use_routing_replay and not self._rollout_routing_replay
            compute: TokenComputation = reward_scores if self.policy.value_head else head
            output = self.policy.forward(samples, compute, size, record_routed_experts=record)
        else:  # no replay in other networks
            head = dataclasses.replace(self.head, vocab_size=network.gpt.vocab_size or 0)
            squared_probs = False
            top_k = 0
            unrouted = [
                dataclasses.replace(sample, routed_experts=None, indexer_topk=None)
                for sample in samples
            ]
            output = network.forward(unrouted, head, size)
        # of each sample: log-prob, entropy, sum of squares if requested, and K further columns,
        # which are the top-k tokens if requested, otherwise log-probs of the sample's label sets
        log_probs, entropy, *further = output.columns
        absent: list[Tensor | None] = [None] * len(samples)
        squared: Sequence[Tensor | None] = absent
        if squared_probs and further:
            squared = further[0]
            further = further[1:]
        tokens: Sequence[Tensor | None] = absent
        set_log_probs: Sequence[Tensor | None] = absent
        if further:
            tables = [torch.stack(row, dim=1) for row in zip(*further)]
            if top_k:
                tokens = tables
            else:
                set_log_probs = tables
        routed_experts = output.routed_experts or absent
        rows = zip(log_probs, entropy, routed_experts, squared, set_log_probs, tokens, strict=True)
        return [LogProbOutput(*row) for row in rows]

    def with_choices_of_stage(self, samples: Sequence[TrainSample]) -> list[TrainSample]:
        """Select this pipeline stage's layers from the routed experts and keys of the engine."""
        chunks, config = self.policy.chunks, self.transformer
        selected = []
        for sample in samples:
            if sample.routed_experts is not None:
                experts = select_stage_experts(sample.routed_experts, chunks, config)
                sample = dataclasses.replace(sample, routed_experts=experts)
            if sample.indexer_topk is not None:
                keys = select_stage_keys(sample.indexer_topk, chunks, config)
                sample = dataclasses.replace(sample, indexer_topk=keys)
            selected.append(sample)
        return selected

    def replay_disagreement(self) -> float:
        """Replay disagreement of the policy's last forward pass; see moe.py."""
        return replay_disagreement(self.policy.chunks)

    def indexer_disagreement(self) -> float:
        """The same of the keys of sparse attention; see indexer_replay.py."""
        return indexer_disagreement(self.policy.chunks)

    def forward_backward(self, batch: TrainBatch) -> PendingStep:
        """Forward and backward over the samples of one optimizer step; weights do not change.

        Returns:
            The argument of `optim_step`. Its metrics are reduced over the data-parallel ranks and
            equal on all ranks.
        """
        objective: TokenComputation = PolicyObjective(
            self.head, self.objective, batch.old_is_current, self._prediction
        )
        if self.policy.value_head:
            objective = RewardObjective(self.objective, self.layout)
        selection = SelectionSeed(self.seed, self.trained.scheduler.num_steps)
        output = self._forward_backward(
            self.trained, batch.samples, objective, selection, per_token=batch.old_is_current
        )
        metrics = reduce_metrics(output, self.layout)
        metrics |= routing_metrics(
            self.policy.chunks, self.transformer, self.layout, output.num_micro_batches
        )
        if self._rollout_indexer_replay:
            metrics["indexer_replay_disagreement"] = self.indexer_disagreement()
        log_probs = [LogProbOutput(*row) for row in zip(*output.columns, strict=True)]
        return PendingStep(metrics, self.trained, log_probs)

    def optim_step(self, pending: PendingStep) -> StepResult:
        """Take the optimizer step of `forward_backward` or `forward_backward_critic`; skipped on
        all ranks if the gradient norm is not finite."""
        stepped, grad_norm, learning_rate = pending.network.optim_step()
        if stepped and self.averaged_policy is not None and pending.network is self.policy:
            self.policy.finish_updates()
            self.averaged_policy.update(self.policy)
        return StepResult(
            metrics=pending.metrics,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            skipped=not stepped,
            loss_scale=pending.network.loss_scale,
        )

    def update(self, batch: TrainBatch) -> StepResult:
        """One optimizer step of the policy."""
        return self.optim_step(self.forward_backward(batch))

    def forward_critic(self, samples: Sequence[TrainSample]) -> list[Tensor]:
        """Critic values of every response token, [R] float32, 0 where the loss mask is False, on
        all pipeline stages. samples: of this rank's data-parallel rank in the critic's layout."""
        assert self.critic is not None
        size = self._micro_batch_size(self.critic.layout, forward_only=True)
        (values,) = self.critic.forward(without_policy_fields(samples), critic_values, size).columns
        return values

    def forward_backward_critic(self, batch: TrainBatch) -> PendingStep:
        """As `forward_backward`, for the critic. batch: of this rank's data-parallel rank in the
        critic's layout."""
        assert self.critic is not None
        samples = without_policy_fields(batch.samples)
        output = self._forward_backward(self.critic, samples, ValueObjective(self._value_loss))
        output = dataclasses.replace(output, packing={})  # reported for the policy only
        return PendingStep(reduce_metrics(output, self.critic.layout), self.critic)

    def update_critic(self, batch: TrainBatch) -> StepResult:
        """One optimizer step of the critic."""
        return self.optim_step(self.forward_backward_critic(batch))

    def _forward_backward(
        self,
        network: TrainedNetwork,
        samples: Sequence[TrainSample],
        compute: TokenComputation,
        selection: SelectionSeed | None = None,
        *,
        per_token: bool = False,
    ) -> PassOutput:
        size = self._micro_batch_size(network.layout, forward_only=False)
        return network.forward_backward(
            samples, compute, size, selection=selection, per_token=per_token
        )

    def _micro_batch_size(self, layout: ParallelLayout, *, forward_only: bool) -> MicroBatchSize:
        return micro_batch_size(self.algorithm, layout.cp_size, forward_only=forward_only)

    def export_weights(self, *, quantized: bool = False) -> WeightStream:
        """(Hugging Face name, full tensor) pairs of the policy, on every rank or on the sending
        ranks, in buckets of --update-weight-buffer-size. quantized: in --hf-checkpoint's format."""
        assert self.hf is not None, "weights have Hugging Face names only with --hf-checkpoint"
        self.policy.finish_updates()
        formats = self._quantized_weights if quantized else None
        return self.policy.export_hf(self.hf, bucket_bytes=self._bucket_bytes, quantized=formats)

    @cached_property
    def _quantized_weights(self) -> Mapping[str, QuantizedWeight]:
        return from_rank_zero(lambda: stored_format(str(self._hf_checkpoint)))

    def sync_weights(self, engine: WeightReceiver, version: int) -> dict[str, float]:
        """Sync the policy's weights, or its adapter, to a rollout engine as version `version`.
        Returns metrics."""
        if engine.takes_adapter:
            assert isinstance(self.policy, LoraNetwork), "checked on the command line"
            self.policy.finish_updates()
            factors = factor_stream(self.policy, bucket_bytes=self._bucket_bytes)
            engine.update_weights(factors, version)
            return {}
        weights: Iterator[tuple[str, Tensor]] = self.export_weights(
            quantized=engine.takes_quantized
        )
        if self.gpt.mtp_num_layers and not engine.takes_prediction_layers:
            assert self.hf is not None
            unused = untrained_prefixes(self.hf)
            weights = (pair for pair in weights if not pair[0].startswith(unused))
        engine.update_weights(weights, version)
        if self._merge_rounding is None or engine.weight_version != version:  # to be repeated
            return {}
        if engine.takes_quantized and self._quantized_weights:
            return {}  # what the engine has is rounded otherwise
        return self._merge_rounding.measure()

    def _start_adapter(self, path: str | None) -> dict[str, object]:
        """Load the initial adapter from `path`, if given; returns settings that identify adapter
        and base model in checkpoints."""
        if not isinstance(self.policy, LoraNetwork):
            return {"lora_rank": 0}
        assert self._hf_checkpoint is not None
        base = self._hf_checkpoint
        if path is not None:
            load_adapter(path, self.policy, base)
        return {
            **self.policy.spec.describe(),
            "base_model_digest": from_rank_zero(lambda: weights_digest(base)),
        }

    def save_adapter(self, folder: str) -> str:
        """Write the policy's adapter in PEFT's format."""
        assert isinstance(self.policy, LoraNetwork), "checked on the command line"
        save_adapter(folder, self.policy, self._hf_checkpoint)
        return folder

    def save_hf(self, folder: str) -> str:
        """Write the policy as a Hugging Face model; see `Network.save_hf`."""
        assert self._hf_checkpoint is not None and self.hf is not None
        self.policy.save_hf(folder, self.hf, self._hf_checkpoint, self._bucket_bytes)
        return folder

    @property
    def trained_networks(self) -> dict[str, TrainedNetwork]:
        """Networks stored in a checkpoint, by folder name."""
        networks = {}
        if isinstance(self.policy, TrainedNetwork):
            networks["policy"] = self.policy
        if self.critic is not None:
            networks["critic"] = self.critic
        return networks


def reduce_metrics(output: PassOutput, layout: ParallelLayout) -> dict[str, float]:
    """Reduce this rank's metrics to those of the whole step, equal on all ranks. layout: the
    network's."""
    metrics: dict[str, float] = {}
    if layout.is_last_stage:
        output.metrics.add(output.packing)
        metrics = output.metrics.reduce(layout.dp_cp_group)
    return broadcast_from_last_stage(metrics, layout)


def broadcast_from_last_stage(value: dict[str, float], layout: ParallelLayout) -> dict[str, float]:
    """The value of the last pipeline stage, on all stages."""
    if layout.pp_size == 1:
        return value
    holder = [value]
    source = dist.get_global_rank(layout.pp_group, layout.pp_size - 1)
    dist.broadcast_object_list(holder, source, group=layout.pp_group)
    return holder[0]


def without_policy_fields(samples: Sequence[TrainSample]) -> list[TrainSample]:
    """The samples without routed experts, selected keys and sampling masks, which only apply to the
    policy."""
    return [
        dataclasses.replace(sample, routed_experts=None, indexer_topk=None, sampling_mask=None)
        for sample in samples
    ]
