"""Muon: momentum, orthogonalised by a Newton-Schulz iteration (Jordan et al. 2024, "Muon: An
optimizer for hidden layers in neural networks"), as implemented in megatron-core.

It updates weight matrices; embeddings, output layers, norms and biases use AdamW.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from torch import Tensor

from megatron_patches.patch import release
from slime_like.distributed.collectives import gather


def build_muon(
    config: OptimizerConfig, chunks: Sequence[DistributedDataParallel]
) -> MegatronOptimizer:
    """Build megatron-core's chain of Muon and AdamW over the wrapped chunks. Collective. Raises
    ValueError if the model has no trained parameter for one of the two."""
    parameters = itertools.chain.from_iterable(chunk.parameters() for chunk in chunks)
    trained = [p for p in parameters if p.requires_grad]
    for kind, by_muon in (
        ("weight matrix", True),
        ("norm, bias, embedding or output layer", False),
    ):
        if not any(gather(any(has_muon(p) is by_muon for p in trained))):
            raise ValueError(
                f"--optimizer muon: no {kind} is trained; train more parameters, or use adam"
            )
    if release() >= (0, 18):
        return get_megatron_optimizer(config, list(chunks))
    from megatron.core.optimizer.muon import get_megatron_muon_optimizer

    # a copy: it becomes the configuration of Adam
    return get_megatron_muon_optimizer(copy.copy(config), list(chunks))


def has_muon(parameter: Tensor) -> bool:
    """Whether Muon updates this parameter, rather than AdamW; megatron-core's condition."""
    is_end = getattr(parameter, "is_embedding_or_output_parameter", False)
    return parameter.dim() == 2 and not is_end


def is_muon(plain: torch.optim.Optimizer) -> bool:
    """Whether one of `plain_optimizers` is Muon, and not its AdamW."""
    return type(plain).__name__ == "TensorParallelMuon"


def init_momentum(muon: torch.optim.Optimizer) -> None:
    """Create the initial state of every parameter that has none yet."""
    for group in muon.param_groups:
        for parameter in group["params"]:
            if not muon.state[parameter]:
                muon.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}
