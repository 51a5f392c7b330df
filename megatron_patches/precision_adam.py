"""Adam whose state may be in bf16, in plain torch: `--use-precision-aware-optimizer` without
Transformer Engine.

Target    optimizer: _get_megatron_optimizer_based_on_param_groups, and the name is_te_min_version that it asks; optimizer.clip_grads: the
          name l2_norm_impl; DistributedOptimizer._copy_model_params_to_main_params.
Why       megatron-core hands this optimizer the model's bf16 parameters themselves, their gradients apart (`decoupled_grad`), and leaves
          moments and fp32 main parameters to it: Transformer Engine's FusedAdam, the only class
          that it knows for it. torch's Adam takes none of these arguments. Without Transformer
          Engine the question for its version raises TypeError. torch's norm of a bf16 gradient is
          rounded to bf16. And where weights are written from outside, main parameters kept by the
          optimizer would stay the old ones, and the next step would bring these back.
How       `PrecisionAwareAdam` has FusedAdam's interface; everything else, checkpoints too, is megatron-core's own code for it.
          The norm is replaced when the first such optimizer is built.
When      Neither Transformer Engine nor Apex.
Versions  megatron-core 0.16.1 to 0.19. (OptimizerConfig's own check for Transformer Engine: see
arguments/megatron_configs.py.)
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
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
    "optimizer.clip_grads:l2_norm_impl",
)
CHUNK = (
    1 << 20
)  # elements that are computed at once: temporary fp32 copies of bf16 state take 4 bytes of each


class PrecisionAwareAdam(torch.optim.AdamW):
    """Adam on fp32 main parameters of its own, with moments of any floating-point type, computed in
    fp32. With fp32 moments a step has the bits of torch's AdamW (adam_w_mode) or Adam on the main
    parameters.

    State of a parameter: step, exp_avg, exp_avg_sq, master_param (of an fp32 parameter: the
    parameter itself). The arguments, and the names of the methods that checkpoints use, are those
    of Transformer Engine's FusedAdam.
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
            "refused on the command line"
        )
        self.adam_w_mode = adam_w_mode
        self.dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}
        super().__init__(params, **settings)

    def initialize_state(self, parameter: Tensor) -> None:
        """The state before the first step."""
        whole = parameter.detach()
        self.state[parameter] = {
            "step": torch.tensor(0.0),
            **{name: torch.zeros_like(whole, dtype=dtype) for name, dtype in self.dtypes.items()},
            "master_param": whole.float(),
        }

    def get_unscaled_state(self, parameter: Tensor, name: str) -> Tensor:
        value: Tensor = self.state[parameter][name]
        return value

    def set_scaled_state(self, parameter: Tensor, name: str, value: Tensor) -> None:
        """In place, in the state's own type."""
        self.state[parameter][name].copy_(value)

    def restart_main_parameters(self) -> None:
        """From the parameters, which were written from outside."""
        for parameter, state in self.state.items():
            state["master_param"].copy_(parameter.detach())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but tensors keep their types, where torch gives them the parameter's. Main
        parameters of fp32 parameters are these themselves, and are not written."""
        super().load_state_dict(state_dict)
        given = [number for group in state_dict["param_groups"] for number in group["params"]]
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(given, own, strict=True):
            if state := state_dict["state"].get(number):
                self.initialize_state(parameter)
                for name, value in state.items():
                    if name != "master_param" or parameter.dtype != torch.float32:
                        self.set_scaled_state(parameter, name, value)

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """One step for every parameter that has a gradient."""
        assert closure is None, "megatron-core gives none"
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = getattr(parameter, "decoupled_grad", None)
                if gradient is None:
                    continue
                if not self.state[parameter]:
                    self.initialize_state(parameter)
                state = self.state[parameter]
                state["step"] += 1
                for chunk in _chunks(
                    parameter,
                    gradient,
                    state["exp_avg"],
                    state["exp_avg_sq"],
                    state["master_param"],
                ):
                    _adam(
                        *chunk,
                        group=group,
                        step=float(state["step"]),
                        decoupled_decay=self.adam_w_mode,
                    )


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same piece of all, flat: the distributed optimizer's shards are."""
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
    """Adam (arXiv 1412.6980), with the weight decay of AdamW (1711.05101) or in the gradient; in
    torch's order of operations. In place."""
    (beta1, beta2), rate, decay = group["betas"], group["lr"], group["weight_decay"]
    gradient, first, second = gradient.float(), exp_avg.float(), exp_avg_sq.float()
    if decoupled_decay:
        main.mul_(1 - rate * decay)
    elif decay != 0:
        gradient = gradient.add(main, alpha=decay)
    first.lerp_(gradient, 1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    denominator = (second.sqrt() / (1 - beta2**step) ** 0.5).add_(group["eps"])
    main.addcdiv_(first, denominator, value=-rate / (1 - beta1**step))
    for stored, computed in ((exp_avg, first), (exp_avg_sq, second), (parameter, main)):
        if stored.dtype != computed.dtype:  # else it is the same tensor
            stored.copy_(computed)


def check() -> None:
    for target in (BUILD, RELOAD, *NAMES):
        find(NAME, target)


def install() -> None:
    optimizer, clip_grads = find(NAME, "optimizer"), find(NAME, "optimizer.clip_grads")
    was_build, was_reload, was_norm = find(NAME, BUILD), find(NAME, RELOAD), clip_grads.l2_norm_impl

    @functools.wraps(was_build)
    def build(config: OptimizerConfig, *args: object, **kwargs: object) -> MegatronOptimizer:
        if not config.use_precision_aware_optimizer or config.optimizer_cpu_offload:
            return was_build(config, *args, **kwargs)
        clip_grads.l2_norm_impl = norm
        kept = optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER
        optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = PrecisionAwareAdam, False
        try:
            return was_build(config, *args, **kwargs)
        finally:
            optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = kept

    @functools.wraps(was_reload)
    def reload(self: DistributedOptimizer, *args: object, **kwargs: object) -> None:
        was_reload(self, *args, **kwargs)
        if isinstance(self.optimizer, PrecisionAwareAdam):
            self.optimizer.restart_main_parameters()

    def norm(
        chunk_size: int, no_op: object, lists: Sequence[Sequence[Tensor]], *args: object
    ) -> object:
        # a norm that is rounded to bf16 would be off by 0.4 %
        return was_norm(
            chunk_size,
            no_op,
            [[_norm_in_fp32(tensor) for tensor in tensors] for tensors in lists],
            *args,
        )

    optimizer.is_te_min_version = lambda *version, **how: False
    setattr(optimizer, BUILD.rpartition(":")[2], build)
    find(NAME, RELOAD.rpartition(".")[0])._copy_model_params_to_main_params = reload


def _norm_in_fp32(gradient: Tensor) -> Tensor:
    """What has the same norm: a bf16 gradient's is computed in fp32, and stands for it as one
    number."""
    if gradient.dtype == torch.bfloat16:
        return torch.linalg.vector_norm(gradient, dtype=torch.float32)
    return gradient


PATCH = Patch(NAME, TORCH_ADAM, check, install)
