"""User-defined loss, --custom-loss-function-path: function(inputs, config) for each micro-batch."""

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
        ValueError: There is no such function. The returned loss raises it for a result that is not
            a `PolicyLossOutput` with [T] losses.
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
            kind = type(output).__name__
            raise ValueError(f"{FLAG} {path!r}: returned a {kind}, not a PolicyLossOutput")
        losses = output.token_losses
        expected = tuple(inputs.log_probs.shape)
        if not isinstance(losses, torch.Tensor):
            kind = type(losses).__name__
            raise ValueError(f"{FLAG} {path!r}: token_losses is a {kind}, not a tensor")
        if losses.shape != expected:
            shape = tuple(losses.shape)
            raise ValueError(f"{FLAG} {path!r}: token_losses must be [T] = {expected}, got {shape}")
        return output

    return fn
