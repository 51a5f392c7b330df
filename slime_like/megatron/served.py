"""A network that is trained from outside, call by call: gradients add up over any number of passes,
until a step takes them.

The loss of a pass is a sum over its tokens, which nothing divides, so that it makes no difference
how a batch is cut into calls. Gradients of the ranks are added up once, at the step. Every method
is called by all ranks together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_patches.torch_adam_ckpt import init_adam_state
from slime_like.distributed.collectives import gather
from slime_like.megatron.checkpoint.networks import plain_optimizers
from slime_like.megatron.forward_step import ForwardStep
from slime_like.megatron.lora import LoraBase, LoraNetwork, LoraSpec
from slime_like.megatron.moe import begin_routing, expert_biases, restore_expert_biases
from slime_like.megatron.network import TrainedNetwork
from slime_like.megatron.optimizer import step_if_finite
from slime_like.megatron.pipeline import run_schedule
from slime_like.types import MicroBatch, TrainSample

LARGEST_UPDATE = 1e38  # of float32, which ends at 3.4e38


@dataclass(frozen=True, slots=True)
class AdamStep:
    """The settings of one optimizer step. max_norm: largest global L2 norm of the gradient, 0 for
    any. weight_decay: decoupled; biases and norms have none, as everywhere in Megatron."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    max_norm: float


class Served(TrainedNetwork):
    """It has no schedule: every step brings its own settings."""

    def _start_serving(self) -> None:
        for adam in plain_optimizers(self.optimizer):
            if isinstance(adam, torch.optim.Adam | torch.optim.AdamW):
                init_adam_state(adam)
        self.clear_gradients()

    def clear_gradients(self) -> None:
        """Forget what has been accumulated."""
        for module in self.trained_modules:
            module.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._expert_biases = expert_biases(self.chunks)

    def add_gradients(
        self,
        step: ForwardStep,
        groups: Sequence[Sequence[TrainSample]],
        batches: Sequence[MicroBatch],
    ) -> list[list[Tensor]]:
        """Forward and backward over `batches`, which hold the samples of `groups`; their gradients
        are added to this rank's. Returns the columns that `step`'s loss function reports under
        "columns", as `evaluate` does."""
        for module in self.modules:
            module.train()
        begin_routing(self.chunks, batches, self.layout)
        with self.in_use():
            self.config.finalize_model_grads_func = None  # at the step, not after every pass
            outputs = run_schedule(self.modules, batches, step, self.layout, forward_only=False)
        return self.columns_of_samples([output["columns"] for output in outputs], groups, batches)

    def abandon_gradients(self) -> None:
        """After a pass that failed: forget what has been accumulated, its routing statistics too."""
        restore_expert_biases(self.chunks, self._expert_biases)
        self.clear_gradients()

    def has_non_finite(self) -> bool:
        """Whether a weight or a moment of the optimizer is NaN or infinite, on any rank. A
        collective."""
        tensors = [p.data for chunk in self.saved_chunks for p in chunk.parameters()]
        tensors += self._optimizer_state()
        return any(gather(not math.isfinite(largest(tensors))))

    def step_stays_finite(self, adam: AdamStep) -> bool:
        """Whether no weight or moment can overflow float32 in this step, on any rank. A collective.

        Bounds of Adam (Kingma and Ba, algorithm 1) with decoupled weight decay, from the largest
        absolute values of weights w, gradients g and moments m, v:
        |m'| <= b1 |m| + (1 - b1) |g|, v' <= b2 v + (1 - b2) g^2,
        |w'| <= (1 + lr wd) |w| + lr |m'| / ((1 - b1^t) eps).
        """
        bounds = [0.0]
        for optimizer in plain_optimizers(self.optimizer):
            for group in optimizer.param_groups:
                params = [p for p in group["params"] if p.grad is not None]
                states = [optimizer.state[p] for p in params]
                if not params:
                    continue
                weight, gradient = largest(params), largest([p.grad for p in params])
                first = largest([s["exp_avg"] for s in states])
                first = adam.beta1 * first + (1 - adam.beta1) * gradient
                second = adam.beta2 * largest([s["exp_avg_sq"] for s in states])
                step = float(states[0].get("step", group.get("step", 0))) + 1
                scale = group["lr"] / ((1 - adam.beta1**step) * group["eps"])
                bounds += [
                    (1 + group["lr"] * group["weight_decay"]) * weight + scale * first,
                    second + (1 - adam.beta2) * gradient * gradient,
                ]
        return all(gather(all(bound <= LARGEST_UPDATE for bound in bounds)))

    def take_step(
        self, adam: AdamStep, before_change: Callable[[], None] = lambda: None
    ) -> tuple[bool, float]:
        """One optimizer step. Either way no gradient is left.

        Args:
            before_change: Called when nothing but the change of the weights is left to do.

        Returns:
            Whether it was taken, and the global L2 norm of the gradient before clipping. It is
            skipped on all ranks when the norm is not finite, or a weight might not be after it.
        """

        def allowed() -> bool:
            if not self.step_stays_finite(adam):
                return False
            before_change()
            return True

        self.finalize_gradients(self.modules)
        for part in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            part.config.clip_grad = adam.max_norm
        for group in self.optimizer.param_groups:
            group["lr"] = adam.learning_rate * group.get("lr_mult", 1.0)
            group["betas"] = (adam.beta1, adam.beta2)
            group["eps"] = adam.eps
            group["weight_decay"] = adam.weight_decay * group.get("wd_mult", 1.0)
        stepped, grad_norm = step_if_finite(self.optimizer, allowed)
        if not stepped:
            restore_expert_biases(self.chunks, self._expert_biases)
        self.clear_gradients()
        return stepped, grad_norm

    def start_afresh(self) -> None:
        """To be called when other weights were written: no gradients, and an optimizer that has not
        stepped yet."""
        self.clear_gradients()
        for tensor in self._optimizer_state():
            tensor.zero_()
        self.weights_changed()

    def tensors(self) -> list[Tensor]:
        """Everything that makes this network what it is: weights, gradients, the optimizer's
        copies, moments and steps. Each is written in place to make another network of the same
        shape of this one."""
        found = [
            t.data for chunk in self.saved_chunks for t in (*chunk.parameters(), *chunk.buffers())
        ]
        found += [
            buffer.grad_data
            for module in self.trained_modules
            for buffer in (*module.buffers, *module.expert_parallel_buffers)
        ]
        found += [
            p.data
            for adam in plain_optimizers(self.optimizer)
            for group in adam.param_groups
            for p in group["params"]
        ]
        found += self._optimizer_state()
        return list({(t.data_ptr(), t.numel()): t for t in found}.values())

    def _optimizer_state(self) -> list[Tensor]:
        states = [
            adam.state[p]
            for adam in plain_optimizers(self.optimizer)
            for group in adam.param_groups
            for p in group["params"]
        ]
        # by name: an optimizer that was loaded has them in another order
        return [
            value
            for state in states
            for _, value in sorted(state.items())
            if isinstance(value, Tensor)
        ]


def largest(tensors: Sequence[Tensor]) -> float:
    """The largest absolute value, NaN where there is one; 0 for none."""
    found = [t.detach() for t in tensors if t.numel() and t.is_floating_point()]
    if not found:
        return 0.0
    return float(torch.stack([n.double() for n in torch._foreach_norm(found, math.inf)]).max())


class ServedNetwork(Served):
    """All weights are trained."""

    def __init__(self, *shape: Any, **settings: Any) -> None:
        """As TrainedNetwork's. Needs gradients that are not reduced behind the backward pass
        (--overlap-grad-reduce)."""
        super().__init__(*shape, total_steps=1, **settings)
        assert not settings["ddp"].overlap_grad_reduce, "refused on the command line"
        self._start_serving()


class ServedAdapter(LoraNetwork, Served):
    """An adapter, with an optimizer of its own, on a base that other adapters share."""

    def __init__(self, base: LoraBase, spec: LoraSpec, **settings: Any) -> None:
        """As LoraNetwork's."""
        super().__init__(base, spec, total_steps=1, **settings)
        self._start_serving()


class OffloadedNetwork:
    """A network whose tensors lie in host memory. On the device it holds nothing, and it cannot be
    used, until `restore`. Where the device is the CPU, storage that others have seen (numpy, when a
    checkpoint was written) cannot be given back and stays, in host memory as it is."""

    def __init__(self, network: Served) -> None:
        network.finish_updates()
        self._stored = []
        for storage in storages_of(network):
            if not storage.resizable():
                assert storage.device.type == "cpu"
                continue
            outside = torch.empty(
                storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda"
            )
            self._stored.append((storage, outside.copy_(bytes_of(storage))))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        for storage, _ in self._stored:
            storage.resize_(0)

    def restore(self) -> None:
        """Everything is where it was."""
        for storage, outside in self._stored:
            storage.resize_(outside.numel())
            bytes_of(storage).copy_(outside)
        self._stored = []


def storages_of(network: Served) -> list[torch.UntypedStorage]:
    """The memory of all that makes the network what it is."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in network.tensors()}
    return [storage for storage in found.values() if storage.nbytes()]


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class StoredState:
    """A network's tensors in host memory, outside the network."""

    def __init__(self, network: Served) -> None:
        network.finish_updates()
        on_device = torch.cuda.is_available()
        self._stored = [
            torch.empty_like(t, device="cpu", pin_memory=on_device).copy_(t)
            for t in network.tensors()
        ]

    @torch.no_grad()
    def restore(self, network: Served) -> None:
        """Write them into a network of the same shape."""
        for tensor, stored in zip(network.tensors(), self._stored, strict=True):
            tensor.copy_(stored)
        network._expert_biases = expert_biases(network.chunks)
