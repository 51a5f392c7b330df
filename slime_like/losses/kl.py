"""Estimators of the KL divergence between the policy and the reference, from the log-probs of
sampled tokens.

With d = log_probs - ref_log_probs (Schulman 2020, "Approximating KL divergence"):

    k1 = d    k2 = d^2 / 2    k3 = exp(-d) - 1 + d    low_var_kl = k3 clamped to +-10    abs = |d|

On-policy, the expected gradient is 0 for k1 (only noise), that of KL(policy || ref) for k2, and
that of KL(ref || policy) for k3; abs is a diagnostic. Weighted by the ratio r of current to old
policy, an estimator has the gradient of KL(policy || ref), also off-policy: for k1 and k3 the
gradient passes through r; for k2, whose gradient is right already, r is a constant. `k1+`, `k3+`,
`low_var_kl+` and `abs+` are straight-through: the value before the plus, the gradient of k2.
"""

from __future__ import annotations

from collections.abc import Callable

from slime_like.lazy import Tensor, torch
from slime_like.validation import require_choice, require_shape, require_tensor

EXPONENT_CLAMP = 20.0
LOW_VAR_CLAMP = 10.0


def _k3(d: Tensor) -> Tensor:
    # expm1: near 0, exp(-d) - 1 would lose all significant digits
    return torch.expm1((-d).clamp(-EXPONENT_CLAMP, EXPONENT_CLAMP)) + d


_VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": _k3,
    "low_var_kl": lambda d: _k3(d).clamp(-LOW_VAR_CLAMP, LOW_VAR_CLAMP),
    "abs": lambda d: d.abs(),
}
KL_ESTIMATORS: tuple[str, ...] = (*_VALUES, "k1+", "k3+", "low_var_kl+", "abs+")


def kl_estimate(
    kind: str, log_probs: Tensor, ref_log_probs: Tensor, *, log_ratio: Tensor | None = None
) -> Tensor:
    """Estimate the KL at each token. Inactive tokens must be masked out before.

    Args:
        kind: One of `KL_ESTIMATORS`.
        log_probs: Any shape, current policy, with grad.
        ref_log_probs: Same shape, reference model.
        log_ratio: Same shape, log of current over old policy, with grad: weight the estimate by
            this importance ratio, so that it estimates KL(policy || ref) off-policy too. None: no
            weight.

    Returns:
        Same shape as log_probs.

    Raises:
        ValueError: An unknown estimator or a wrong shape.
    """
    require_choice("KL estimator", kind, KL_ESTIMATORS)
    require_shape(
        "ref_log_probs", ref_log_probs, require_tensor("log_probs", log_probs), "log_probs"
    )
    d = log_probs - ref_log_probs
    base = kind.removesuffix("+")
    value = _VALUES[base](d)
    if kind.endswith("+"):
        k2 = d * d / 2
        # the bracket is exactly 0, so a large k2 does not round the value
        value = value.detach() + (k2 - k2.detach())
    if log_ratio is None:
        return value
    ratio = log_ratio.exp()
    gradient_is_right = base == "k2" or kind.endswith("+")
    return (ratio.detach() if gradient_is_right else ratio) * value
