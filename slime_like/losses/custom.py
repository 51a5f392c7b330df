"""A user's own loss, --custom-loss-function-path: called as function(inputs, config) for each
micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

from slime_like.import_utils import load_function
from slime_like.lazy import torch
from slime_like.losses.inputs import LossInputs, PolicyLossOutput
from slime_like.losses.registry import PolicyLoss

FLAG = "--custom-loss-function-path"


def custom_loss(path: str) -> PolicyLoss:
    """Load the user's loss at `path`, "module.function" or "file.py:function".

    It is called with a namespace of the settings of all losses, named as the flags (eps_clip, ...).
    `total_loss` still applies masking, token weights, off-policy correction, KL and entropy.

    Raises:
        ValueError: There is no such function. The loss itself raises it for a result that is not a
            `PolicyLossOutput` with [T] losses.
    """
    return PolicyLoss(
        name="custom",
        config_type=SimpleNamespace,
        fn=_checked(path, load_function(path, FLAG)),
        needs=frozenset(),
        homogeneous=False,
    )


def _checked(
    path: str, function: Callable[..., object]
) -> Callable[[LossInputs, object], PolicyLossOutput]:
    def fn(inputs: LossInputs, config: object) -> PolicyLossOutput:
        output = function(inputs, config)
        if not isinstance(output, PolicyLossOutput):
            raise ValueError(
                f"{FLAG} {path!r}: returned a {type(output).__name__}, not a PolicyLossOutput"
            )
        losses = output.token_losses
        if not isinstance(losses, torch.Tensor) or losses.shape != inputs.log_probs.shape:
            shape = (
                tuple(losses.shape) if isinstance(losses, torch.Tensor) else type(losses).__name__
            )
            raise ValueError(
                f"{FLAG} {path!r}: token_losses must be [T] = {tuple(inputs.log_probs.shape)}, got {shape}"
            )
        return output

    return fn
