"""The pool of models: on the device, or offloaded to host memory. Every method is collective.

Fully trained models share slots, networks with the shape of the base model: a model's state is in a
slot or in host memory, and is swapped in on request. Adapters share one frozen base; an offloaded
adapter frees its device memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from arguments.hf.model import HfModel
from arguments.schema.lora import TARGETS
from slime_like.megatron.factory import NetworkSettings, start_from_policy
from slime_like.megatron.lora import LoraBase, LoraNetwork, LoraSpec
from slime_like.megatron.offload import OffloadedNetwork, StoredState
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.megatron.trained_network import TrainedNetwork
from slime_like.tinker.errors import Failed, Refused

LORA_ALPHA = 32.0  # the API does not specify it; this is the value of the official service


@dataclass(slots=True)
class HostedModel:
    """A model of a client. slot: index of its network if all weights are trained and resident;
    otherwise `stored` is its state. adapter: its LoRA network; outside: its copy in host memory
    while offloaded. used: logical time of last use. passes: forward passes so far, a seed for
    losses that draw random numbers. incomplete: why gradients for the next step are missing."""

    id: str
    role: str
    slot: int | None = None
    stored: StoredState | None = None
    adapter: LoraNetwork | None = None
    outside: OffloadedNetwork | None = None
    used: int = 0
    passes: int = 0
    incomplete: str = ""


@dataclass(slots=True)
class Slot:
    role: str
    network: TrainedNetwork
    model: str | None = None


class ModelPool:
    def __init__(
        self,
        settings: NetworkSettings,
        layout: ParallelLayout,
        hf: HfModel,
        *,
        base: str,
        seed: int,
        max_models: int | None,
        max_adapters: int | None,
    ) -> None:
        """base: folder of the base model; hf: its configuration. seed: for adapters without one.
        max_models, max_adapters: maximum on the device; None for no limit."""
        assert not settings.ddp.overlap_grad_reduce, "refused on the command line"
        self.settings, self.layout, self.hf = settings, layout, hf
        self.base, self.seed = base, seed
        self.max_models, self.max_adapters = max_models, max_adapters
        self.models: dict[str, HostedModel] = {}
        self._slots: list[Slot] = []
        self._base_of_adapters: LoraBase | None = None
        self._clock = 0

    def create(
        self, model: str, role: str, policy: str | None, lora: Mapping[str, object] | None
    ) -> None:
        """Create a model. Raises Refused for an adapter with nothing to train."""
        assert model not in self.models, model
        created = HostedModel(model, role)
        if lora is not None:
            self._make_room_for_an_adapter()
            created.adapter = self._new_adapter(lora, role)
            self._use(created)
        else:
            try:
                self._fill(created, policy)
            except BaseException:
                self._free(created)
                raise
        self.models[model] = created

    def _fill(self, created: HostedModel, policy: str | None) -> None:
        network = self._network(created)
        if created.role == "critic":
            self._start_critic(network, policy)
        else:
            network.load_hf(self.base)
        network.start_afresh()

    def unload(self, model: str) -> None:
        hosted = self.models.pop(model, None)
        if hosted is not None:
            self._free(hosted)

    def network(self, model: str) -> TrainedNetwork:
        """The model's network, restored from host memory if needed."""
        if model not in self.models:
            raise Failed(f"the workers do not have model {model}", broken=True)
        hosted = self.models[model]
        self._use(hosted)
        if hosted.adapter is not None:
            if hosted.outside is not None:
                self._make_room_for_an_adapter()
                hosted.outside.restore()
                hosted.outside = None
            return hosted.adapter
        if hosted.slot is None:
            assert hosted.stored is not None
            try:
                hosted.stored.restore(self._network(hosted))
            except BaseException:  # the state is still in host memory
                self._free(hosted)
                raise
            hosted.stored = None
        assert hosted.slot is not None
        return self._slots[hosted.slot].network

    def _use(self, hosted: HostedModel) -> None:
        self._clock += 1
        hosted.used = self._clock

    # --- all weights ------------------------------------------------------------------------------------------------

    def _start_critic(self, critic: TrainedNetwork, policy: str | None) -> None:
        """Initialise a critic from its policy's current weights (from the base if the policy is an
        adapter), so that its values are 0."""
        if policy is not None:
            start_from_policy(critic, self.network(policy))
            return
        # weights are irrelevant for a critic that is about to be loaded
        source = HostedModel("~base", "policy")
        try:
            start_from_policy(critic, self._network(source))
        finally:
            self._free(source)

    def _free(self, hosted: HostedModel) -> None:
        if hosted.slot is not None:
            self._slots[hosted.slot].model = None
            hosted.slot = None

    def _network(self, hosted: HostedModel) -> TrainedNetwork:
        """A network for a model: a free one, a new one if allowed, otherwise that of the least
        recently used model."""
        self._use(hosted)
        free = next(
            (
                i
                for i, slot in enumerate(self._slots)
                if slot.role == hosted.role and slot.model is None
            ),
            None,
        )
        if free is None:
            free = self._make_room(hosted.role)
        self._slots[free].model = hosted.id
        hosted.slot = free
        return self._slots[free].network

    def _make_room(self, role: str) -> int:
        most = self.max_models
        taken = [i for i, slot in enumerate(self._slots) if slot.role == role]
        if most is None or len(self._slots) < most or not taken:
            self._slots.append(Slot(role, self._new_network(role)))
            return len(self._slots) - 1
        oldest = min(taken, key=lambda i: self.models[self._slots[i].model or ""].used)
        out = self.models[self._slots[oldest].model or ""]
        out.stored, out.slot = StoredState(self._slots[oldest].network), None
        return oldest

    def _new_network(self, role: str) -> TrainedNetwork:
        network = TrainedNetwork(
            *self.settings.shape,
            self.layout,
            **self._training(),
            value_head=role == "critic",
        )
        network.allocate_moments()
        return network

    def _training(self) -> dict[str, Any]:
        """Training settings of a network. The schedule is unused: each optim_step brings its own
        settings, which are written into the optimizer."""
        own = dataclasses.replace(self.settings.optimizer)
        return self.settings.training(total_steps=1, optimizer=own)

    # --- adapters ---------------------------------------------------------------------------------------------------

    def _make_room_for_an_adapter(self) -> None:
        """Offload the least recently used adapters to host memory until there is room for one
        more."""
        most = self.max_adapters
        inside = sorted(
            (m for m in self.models.values() if m.adapter is not None and m.outside is None),
            key=lambda m: m.used,
        )
        for out in [] if most is None else inside[: max(0, len(inside) - most + 1)]:
            assert out.adapter is not None
            out.outside = OffloadedNetwork(out.adapter)

    def _new_adapter(self, lora: Mapping[str, Any], role: str) -> LoraNetwork:
        """Create an adapter on the shared frozen base, which is created with the first adapter. A
        critic's adapter starts from that base, with zero values. Raises Refused if there is nothing
        to train."""
        parts = {
            "attn": lora["train_attn"],
            "mlp": lora["train_mlp"],
            "unembed": lora["train_unembed"],
        }
        targets = frozenset(
            name for part, wanted in parts.items() if wanted for name in TARGETS[part]
        )
        if not targets:
            words = (
                "train_attn, train_mlp and train_unembed are all False: there is nothing to train"
            )
            if role == "critic":
                words = "train_attn and train_mlp are both False: an adapter of a critic has no other layers, for it has no output layer"
            raise Refused(words)
        if self._base_of_adapters is None:
            self._base_of_adapters = LoraBase(*self.settings.shape, self.layout, hf=self.hf)
            self._base_of_adapters.load_hf(self.base)
        seed = self.seed if lora["seed"] is None else lora["seed"]
        spec = LoraSpec(lora["rank"], LORA_ALPHA, targets, seed, value_head=role == "critic")
        network = LoraNetwork(self._base_of_adapters, spec, **self._training())
        network.allocate_moments()
        return network
