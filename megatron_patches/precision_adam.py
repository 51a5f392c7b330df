"""Adam with optimizer state in bf16, in plain torch: `--use-precision-aware-optimizer` without
Transformer Engine.

Target    optimizer: _get_megatron_optimizer_based_on_param_groups and its is_te_min_version;
          optimizer.distrib_optimizer: DistributedOptimizer._copy_model_params_to_main_params.
Why       megatron-core passes this optimizer the bf16 model parameters, with gradients in
          `decoupled_grad`, and lets it own the moments and the fp32 main parameters. It supports
          only Transformer Engine's FusedAdam for this.
Without   torch's Adam rejects the arguments, and without Transformer Engine the check of its
          version raises TypeError. One fault would be silent: after model weights are overwritten,
          the main parameters in the optimizer keep the old values, which the next step writes back.
How       `PrecisionAwareAdam` has FusedAdam's interface, and everything else, including
          checkpoints, is megatron-core's own code.
When      Neither Transformer Engine nor Apex.
Versions  megatron-core 0.16.1 to 0.19. (arguments/megatron_configs.py handles OptimizerConfig's own
          check for Transformer Engine.)
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_patches.patch import TORCH_ADAM, Patch, find

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from torch.optim.optimizer import ParamsT


NAME = "precision_adam"
BUILD = "optimizer:_get_megatron_optimizer_based_on_param_groups"
RELOAD = "optimizer.distrib_optimizer:DistributedOptimizer._copy_model_params_to_main_params"
NAMES = (
    "optimizer:is_te_min_version",
    "optimizer:Adam",
    "optimizer:USING_PYTORCH_OPTIMIZER",
)
# elements per block: bounds the temporary fp32 copies of bf16 state (4 bytes per element)
CHUNK = 1 << 20


class PrecisionAwareAdam(torch.optim.AdamW):
    """Adam that owns fp32 main parameters and stores its moments in any floating-point type. It
    computes in fp32: with fp32 moments a step is bitwise equal to torch's AdamW (adam_w_mode) or
    Adam on the main parameters.

    State of a parameter: step, exp_avg, exp_avg_sq, master_param (for an fp32 parameter, the
    parameter itself). The arguments, and the methods that checkpointing calls, have the names of
    Transformer Engine's FusedAdam.
    """

    def __init__(
        self,
        params: ParamsT,
        *,
        adam_w_mode: bool,
        exp_avg_dtype: torch.dtype,
        exp_avg_sq_dtype: torch.dtype,
        master_weights: bool,
        use_decoupled_grad: bool,
        master_weight_dtype: torch.dtype,
        **settings: Any,
    ) -> None:
        assert master_weights and use_decoupled_grad and master_weight_dtype == torch.float32, (
            "rejected on the command line"
        )
        self.adam_w_mode = adam_w_mode
        self.dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}
        super().__init__(params, **settings)

    def initialize_state(self, parameter: Tensor) -> None:
        """Create the state before the first step."""
        value = parameter.detach()
        self.state[parameter] = {
            "step": torch.tensor(0.0),
            **{name: torch.zeros_like(value, dtype=dtype) for name, dtype in self.dtypes.items()},
            "master_param": value.float(),
        }

    def get_unscaled_state(self, parameter: Tensor, name: str) -> Tensor:
        value: Tensor = self.state[parameter][name]
        return value

    def set_scaled_state(self, parameter: Tensor, name: str, value: Tensor) -> None:
        """Write `value` into the state in place, converted to its dtype."""
        self.state[parameter][name].copy_(value)

    def restart_main_parameters(self) -> None:
        """Copy the model parameters, which were overwritten, into the main parameters."""
        for parameter, state in self.state.items():
            state["master_param"].copy_(parameter.detach())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Like torch's, except that state tensors keep their dtype instead of taking the
        parameter's. The main parameter of an fp32 parameter is the parameter itself and is not
        written."""
        super().load_state_dict(state_dict)
        for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=True):
            for number, parameter in zip(saved["params"], group["params"], strict=True):
                if state := state_dict["state"].get(number):
                    self.initialize_state(parameter)
                    for name, value in state.items():
                        if name != "master_param" or parameter.dtype != torch.float32:
                            self.set_scaled_state(parameter, name, value)

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None, "megatron-core passes none"
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = getattr(parameter, "decoupled_grad", None)
                if gradient is None:
                    continue
                if not self.state[parameter]:
                    self.initialize_state(parameter)
                state = self.state[parameter]
                state["step"] += 1
                step = float(state["step"])
                decoupled = self.adam_w_mode
                moments = (state["exp_avg"], state["exp_avg_sq"])
                for chunk in _chunks(parameter, gradient, *moments, state["master_param"]):
                    _adam(*chunk, group=group, step=step, decoupled_decay=decoupled)


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split equally long tensors into pieces of CHUNK elements. They are flat, as shards of the
    distributed optimizer are."""
    return zip(*(tensor.view(-1).split(CHUNK) for tensor in tensors), strict=True)


def _adam(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    main: Tensor,
    *,
    group: dict[str, Any],
    step: float,
    decoupled_decay: bool,
) -> None:
    """One Adam step in place (arXiv 1412.6980), in torch's order of operations. Weight decay is
    decoupled (AdamW, arXiv 1711.05101) or added to the gradient."""
    (beta1, beta2), rate, decay = group["betas"], group["lr"], group["weight_decay"]
    gradient = gradient.float()
    first = exp_avg.float()
    second = exp_avg_sq.float()
    if decoupled_decay:
        main.mul_(1 - rate * decay)
    elif decay != 0:
        gradient = gradient.add(main, alpha=decay)
    first.lerp_(gradient, 1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    denominator = (second.sqrt() / (1 - beta2**step) ** 0.5).add_(group["eps"])
    main.addcdiv_(first, denominator, value=-rate / (1 - beta1**step))
    for stored, computed in ((exp_avg, first), (exp_avg_sq, second), (parameter, main)):
        if stored.dtype != computed.dtype:  # otherwise both are the same tensor
            stored.copy_(computed)


def check() -> None:
    for target in (BUILD, RELOAD, *NAMES):
        find(NAME, target)


def install() -> None:
    optimizer = find(NAME, "optimizer")
    original_build = find(NAME, BUILD)
    original_reload = find(NAME, RELOAD)

    @functools.wraps(original_build)
    def build(config: OptimizerConfig, *args: object, **kwargs: object) -> MegatronOptimizer:
        if not config.use_precision_aware_optimizer or config.optimizer_cpu_offload:
            return original_build(config, *args, **kwargs)
        kept = optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER
        optimizer.Adam = PrecisionAwareAdam
        optimizer.USING_PYTORCH_OPTIMIZER = False
        try:
            return original_build(config, *args, **kwargs)
        finally:
            optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = kept

    @functools.wraps(original_reload)
    def reload(self: DistributedOptimizer, *args: object, **kwargs: object) -> None:
        original_reload(self, *args, **kwargs)
        if isinstance(self.optimizer, PrecisionAwareAdam):
            self.optimizer.restart_main_parameters()

    optimizer.is_te_min_version = lambda *version, **how: False
    setattr(optimizer, BUILD.rpartition(":")[2], build)
    find(NAME, RELOAD.rpartition(".")[0])._copy_model_params_to_main_params = reload


PATCH = Patch(NAME, TORCH_ADAM, check, install)
