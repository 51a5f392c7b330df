"""Training throughput: tokens and FLOPs per second and device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slime_like.metrics.timers import STEP_SECONDS, phase_metric
from slime_like.preflight.flops import TERA, ForwardFlops


class Throughput:
    """Computes throughput metrics from phase times and sequence lengths.

    Args:
        flops: Of a forward pass of the policy.
        peak_tflops: Of a device; None if it is not known.
        devices: Number of trainer devices, without devices used only by rollout engines.
        log_prob_passes: Forward passes of the policy's size in the log_probs phase.
        lora, critic_lora: Whether policy and critic train adapters only.
        critic_passes: Training passes of the critic over a rollout.
    """

    def __init__(
        self,
        flops: ForwardFlops,
        *,
        peak_tflops: float | None,
        devices: int,
        log_prob_passes: int,
        lora: bool = False,
        critic_lora: bool = False,
        critic_passes: int = 1,
    ) -> None:
        self._flops = flops
        self._peak = peak_tflops
        self._devices = devices
        self._passes = log_prob_passes
        # 3 matmuls per weight: forward, input gradient, weight gradient; with LoRA the base weights
        # have no weight gradient
        self._of_weights = 2.0 if lora else 3.0
        self._of_critic = 2.0 if critic_lora else 3.0
        self._critic_passes = critic_passes

    def metrics(
        self, lengths: Sequence[tuple[int, int]], seconds: Mapping[str, float]
    ) -> dict[str, float]:
        """Throughput metrics of one rollout.

        Args:
            lengths: (tokens, tokens with a log-prob) of each trained sequence, over all ranks.
            seconds: Metrics that include ``perf/<phase>_s`` and ``perf/step_s``.
        """
        if not lengths:
            return {}
        tokens = sum(length for length, _ in lengths)
        weights, rest = self._flops.of_sequences(length for length, _ in lengths)
        head = self._flops.head * sum(active for _, active in lengths)
        flops = {
            "actor_train": ("train", self._of_weights * (weights + head) + 3 * rest),
            "log_probs": ("log_probs", self._passes * (weights + head + rest)),
            "critic_train": (
                "train_critic",
                self._critic_passes * (self._of_critic * weights + 3 * rest),
            ),
            "values": ("values", weights + rest),
        }
        metrics = {}
        total = 0.0
        for name, (phase, operations) in flops.items():
            phase_s = seconds.get(phase_metric(phase))
            if phase_s and operations:
                metrics[f"perf/{name}_tflops"] = operations / phase_s / self._devices / TERA
                total += operations
        if train_s := seconds.get(phase_metric("train")):
            metrics["perf/actor_train_tok_per_s"] = tokens / train_s
        if step_s := seconds.get(STEP_SECONDS):
            metrics["perf/tokens_per_s_per_device"] = tokens / step_s / self._devices
            metrics["perf/step_tflops"] = total / step_s / self._devices / TERA
        if self._peak:
            for metric, name in (("actor_train", "perf/mfu"), ("step", "perf/step_mfu")):
                if (tflops := metrics.get(f"perf/{metric}_tflops")) is not None:
                    metrics[name] = tflops / self._peak
        return metrics
