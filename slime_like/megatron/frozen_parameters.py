"""Training a part of the parameters (--freeze-params-name-list, --only-train-params-name-list, and
those of the critic).

Frozen parameters have no gradient buffer and no optimizer state. Names are Megatron's module names
with global layer and expert indices, so that a pattern selects the same parameters in every layout;
a tied weight has the embedding's name.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from arguments.schema import CriticConfig, ModelConfig
from slime_like.config import flag_name
from slime_like.distributed.collectives import gather
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.weights.families import EMBEDDING, OUTPUT_LAYER
from slime_like.weights.parameter_map import global_parameters, unwrap

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule


_NUMBER = re.compile(r"(?<=^decoder\.layers\.)\d+")


@dataclass(frozen=True, slots=True)
class FrozenParameters:
    """Regular expressions, searched in parameter names."""

    only: tuple[str, ...]  # patterns of trained parameters
    others: tuple[str, ...]  # patterns of frozen ones, if `only` is empty
    tied: bool  # embedding and output layer share a weight
    prefix: str = ""  # of the flags

    @classmethod
    def of(
        cls, model: ModelConfig, *, tied: bool, extra: Sequence[str] = ()
    ) -> FrozenParameters | None:
        """None if everything is trained. extra: additional patterns of frozen parameters."""
        only = tuple(model.only_train_params_name_list)
        others = (*model.freeze_params_name_list, *extra)
        return cls(only, others, tied) if only or others else None

    @classmethod
    def of_critic(cls, critic: CriticConfig) -> FrozenParameters | None:
        """None if everything is trained. A critic has no output layer to share its embedding
        with."""
        only = tuple(critic.critic_only_train_params_name_list)
        others = tuple(critic.critic_freeze_params_name_list)
        return cls(only, others, tied=False, prefix="critic_") if only or others else None

    def apply(
        self, chunks: Sequence[MegatronModule], config: TransformerConfig, layout: ParallelLayout
    ) -> bool:
        """Freeze parameters of these chunks. Collective. Returns whether something is trained in
        some layers and frozen in others. Raises ValueError naming the flag, for a pattern that
        matches no parameter of the model, or a pipeline stage without any trained parameter."""
        parameters = list(self._named(chunks))
        names = set(itertools.chain(*gather([name for name, _ in parameters])))
        for pattern in self.patterns:
            if not any(re.search(pattern, name) for name in names):
                examples = ", ".join(sorted(names)[:5])
                raise ValueError(
                    f"{self.flag}: {pattern!r} matches no parameter; their names are as {examples}"
                )
        self.freeze(chunks, config, layout)
        if not all(gather(any(parameter.requires_grad for _, parameter in parameters))):
            raise ValueError(
                f"{self.flag}: leaves a pipeline stage without a trained parameter; use other "
                "patterns, or fewer stages"
            )
        trained = {(_NUMBER.sub("", name), self.trains(name)) for name in names}
        return any((name, not trains) in trained for name, trains in trained)

    def freeze(
        self, chunks: Sequence[MegatronModule], config: TransformerConfig, layout: ParallelLayout
    ) -> None:
        """`apply` without the checks."""
        for name, parameter in self._named(chunks):
            if isinstance(parameter, torch.nn.Parameter):  # buffers never are
                # a vision tower is frozen already, without --train-vision-tower
                parameter.requires_grad_(parameter.requires_grad and self.trains(name))
        carries = config.recompute_granularity is not None or layout.pp_size > 1
        if carries and layout.is_first_stage:
            unwrap(chunks[0]).embedding.register_forward_hook(_begin_graph)

    @property
    def patterns(self) -> tuple[str, ...]:
        return self.only or self.others

    @property
    def flag(self) -> str:
        kind = "only_train" if self.only else "freeze"
        return flag_name(f"{self.prefix}{kind}_params_name_list")

    def trains(self, name: str) -> bool:
        return any(re.search(pattern, name) for pattern in self.patterns) == bool(self.only)

    def _named(self, chunks: Sequence[MegatronModule]) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in global_parameters(chunks):
            yield (EMBEDDING if self.tied and name == OUTPUT_LAYER else name), parameter


def _begin_graph(module: torch.nn.Module, inputs: object, output: Tensor) -> None:
    """Make the output require a gradient: recomputation and pipeline schedules only run backward
    through inputs that do."""
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_()
