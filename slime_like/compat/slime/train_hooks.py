"""slime's conventions for user functions in training and logging: a `HookAdapter` (batching/
user_hooks.py) that calls each function as slime does, and validates its result."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from arguments.run_config import RunConfig
from slime_like.compat.slime.samples import SlimeSample, raising, slime_args, to_slime
from slime_like.compat.slime.train_data import read_train_data
from slime_like.config import flag_name
from slime_like.import_utils import load_function
from slime_like.types import Sample, TrainSample

if TYPE_CHECKING:
    from slime_like.batching.user_hooks import RankData
    from slime_like.megatron.trained_network import TrainedNetwork


class SlimeHooks:
    """See `HookAdapter`. Functions are imported in the constructor."""

    def __init__(self, config: RunConfig) -> None:
        self._args = slime_args(config)
        self._vocab_size = config.gpt.vocab_size or 2**31
        self._per_token = config.algorithm.loss_reduction == "token_mean"
        self._functions: dict[str, tuple[str, Callable[..., object]]] = {}
        for field in dataclasses.fields(config.hooks):
            path = getattr(config.hooks, field.name)
            flag = flag_name(field.name)
            if isinstance(path, str):
                self._functions[field.name] = f"{flag} {path}", load_function(path, flag)

    def has(self, name: str) -> bool:
        return name in self._functions

    def _call(self, field: str, *arguments: object) -> tuple[str, object]:
        """Call a function; returns its flag and value, for messages, and its result."""
        name, function = self._functions[field]
        with raising(name):
            return name, function(*arguments)

    def megatron_init(self) -> None:
        """Call ``function(args)``."""
        self._call("custom_megatron_init_path", self._args)

    def before_log_prob(self, chunks: Sequence[object], prefix: str) -> None:
        """Call ``function(args, model, store_prefix)``, with the list of model chunks."""
        field = "custom_megatron_before_log_prob_hook_path"
        self._call(field, self._args, list(chunks), prefix)

    def before_train_step(self, rollout_id: int, step_id: int, network: TrainedNetwork) -> None:
        """Call ``function(args, rollout_id, step_id, model, optimizer, opt_param_scheduler)``."""
        model = list(network.chunks)
        optimizer = network.optimizer
        scheduler = network.scheduler
        field = "custom_megatron_before_train_step_hook_path"
        self._call(field, self._args, rollout_id, step_id, model, optimizer, scheduler)

    def train_data(self, samples: Sequence[Sample]) -> list[Sample]:
        """Call ``function(args, samples)``, and convert its dict of lists to samples; see
        `read_train_data`."""
        field = "custom_convert_samples_to_train_data_path"
        name, result = self._call(field, self._args, _to_slime(samples))
        return read_train_data(result, samples, name, vocab_size=self._vocab_size)

    def advantages(self, data: RankData) -> tuple[list[Tensor], list[Tensor]]:
        """Call ``function(args, rollout_data)``, which sets advantages and returns in the dict."""
        rollout = rollout_data(data)
        name, _ = self._call("custom_advantage_function_path", self._args, rollout)
        return (
            _columns(rollout, "advantages", data.train, name),
            _columns(rollout, "returns", data.train, name),
        )

    def postprocess(self, rollout_id: int, data: RankData) -> tuple[list[Tensor], list[Tensor]]:
        """Call ``function(args, rollout_id, rollout_data)``; returns loss masks and advantages, [R]
        by sample."""
        rollout = rollout_data(data)
        field = "rollout_data_postprocess_path"
        name, _ = self._call(field, self._args, rollout_id, rollout)
        masks = _columns(rollout, "loss_masks", data.train, name)
        for place, (mask, sample) in enumerate(zip(masks, data.train)):
            if bool(((mask != 0) & ~sample.loss_mask.cpu()).any()):
                raise ValueError(
                    f"{name}: loss_masks[{place}] has tokens that were masked before; the function "
                    "may only mask more tokens"
                )
        advantages = _columns(rollout, "advantages", data.train, name)
        return [mask != 0 for mask in masks], advantages

    def policy_weights(self, samples: Sequence[TrainSample]) -> list[Tensor]:
        """Call ``function(total_lengths, response_lengths, loss_masks, calculate_per_token_loss)``,
        which returns a function of all token losses [T]; returns that function's weights, [R] by
        sample."""
        lengths = [sample.response_length for sample in samples]
        name, reduce = self._call(
            "custom_pg_loss_reducer_function_path",
            [int(sample.tokens.numel()) for sample in samples],
            lengths,
            [sample.loss_mask.float() for sample in samples],
            self._per_token,
        )
        if not callable(reduce):
            raise ValueError(f"{name}: returned {type(reduce).__name__}; return a function")
        losses = torch.linspace(-1, 1, sum(lengths), requires_grad=True)
        total = reduce(losses)
        if not isinstance(total, Tensor) or total.numel() != 1 or total.grad_fn is None:
            raise ValueError(f"{name}: the reducer must return a scalar sum of the token losses")
        (weights,) = torch.autograd.grad(total.sum(), losses)
        if not torch.allclose(weights @ losses.detach(), total.detach().sum(), atol=1e-5):
            raise ValueError(f"{name}: the reducer must be linear in the token losses")
        return list(weights.split(lengths))

    def log_rollout(
        self, rollout_id: int, samples: Sequence[Sample], metrics: dict[str, float], seconds: float
    ) -> bool:
        """Call ``function(rollout_id, args, samples, rollout_extra_metrics, rollout_time)``."""
        field = "custom_rollout_log_function_path"
        arguments = (rollout_id, self._args, _to_slime(samples), metrics, seconds)
        return bool(self._call(field, *arguments)[1])

    def log_eval(
        self, rollout_id: int, sets: Mapping[str, Sequence[Sample]], metrics: dict[str, float]
    ) -> bool:
        """Call ``function(rollout_id, args, data, extra_metrics)``."""
        data: dict[str, dict[str, object]] = {}
        for name, samples in sets.items():
            data[name] = {
                "rewards": _rewards(samples),
                "truncated": [s.status == "truncated" for s in samples],
                "samples": _to_slime(samples),
            }
        field = "custom_eval_rollout_log_function_path"
        return bool(self._call(field, rollout_id, self._args, data, metrics)[1])


def _to_slime(samples: Sequence[Sample]) -> list[SlimeSample]:
    return [to_slime(sample) for sample in samples]


def _rewards(samples: Sequence[Sample]) -> list[float]:
    return [0.0 if sample.reward is None else sample.reward for sample in samples]


def rollout_data(data: RankData) -> dict[str, object]:
    """A rank's samples in slime's format: lists with an entry per sample. Tensors are copies that
    cover full responses on every rank, in every layout."""
    train = data.train
    columns: dict[str, object] = {}
    for name, values in data.columns.items():
        if values is not None:
            columns[name] = [value.clone() for value in values]
    return {
        "tokens": [sample.tokens.clone() for sample in train],
        "response_lengths": [sample.response_length for sample in train],
        "total_lengths": [int(sample.tokens.numel()) for sample in train],
        "loss_masks": [sample.loss_mask.int() for sample in train],
        "sample_indices": [sample.sample_id for sample in data.samples],
        "rewards": list(data.rewards),
        "raw_reward": _rewards(data.samples),
        "truncated": [int(s.status == "truncated") for s in data.samples],
        **columns,
    }


def _columns(
    rollout: Mapping[str, object], key: str, train: Sequence[TrainSample], name: str
) -> list[Tensor]:
    """Tensors [R] that a function stored in the dict."""
    column = rollout.get(key)
    if not isinstance(column, Collection) or len(column) != len(train):
        raise ValueError(
            f"{name}: rollout_data[{key!r}] must be a list of {len(train)} tensors, one per sample"
        )
    values = [torch.as_tensor(value).detach().cpu() for value in column]
    for place, (value, sample) in enumerate(zip(values, train)):
        if value.shape != (sample.response_length,):
            raise ValueError(
                f"{name}: rollout_data[{key!r}][{place}] has shape {tuple(value.shape)}, must be "
                f"({sample.response_length},)"
            )
    return values
