"""Training throughput: tokens and FLOPs per second and device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from arguments.run_config import RunConfig
from slime_like.megatron.backend import MegatronBackend
from slime_like.metrics.timers import STEP_SECONDS, phase_metric
from slime_like.preflight.flops import TERA, ForwardFlops, forward_flops, peak_tflops


class Throughput:
    """Computes throughput metrics from phase times and sequence lengths.

    Args:
        config: Configuration, possibly with --device-peak-tflops.
        devices: Number of trainer devices, without devices used only by rollout engines.
        device: Device name; "" for the CPU, which has no known peak.
        log_prob_passes: Forward passes of the policy's size in the log_probs phase.
    """

    def __init__(
        self, config: RunConfig, *, devices: int, device: str, log_prob_passes: int
    ) -> None:
        self._flops: ForwardFlops = forward_flops(config.megatron.transformer, config.gpt)
        self._peak = config.profiling.device_peak_tflops or peak_tflops(device)
        self._devices = devices
        self._passes = log_prob_passes
        # 3 matmuls per weight: forward, input gradient, weight gradient; with LoRA the base weights
        # have no weight gradient
        self._of_weights = 2.0 if config.lora.lora_rank else 3.0
        self._of_critic = 2.0 if config.critic.critic_lora_rank else 3.0

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
            "critic_train": ("train_critic", self._of_critic * weights + 3 * rest),
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


def throughput_of(config: RunConfig, backend: MegatronBackend) -> Throughput:
    """The throughput of a run. A teacher's FLOPs are not counted: its size may differ."""
    device = ""
    if backend.device.type == "cuda":
        device = torch.cuda.get_device_name(backend.device)
    passes = 0
    if backend.teacher is None:
        passes = (not config.old_is_current) + (backend.reference is not None)
    return Throughput(
        config, devices=backend.layout.world_size, device=device, log_prob_passes=passes
    )
