"""The pool of models: on the device, or offloaded to host memory. Every method is collective.

Fully trained models share slots, which are networks with the shape of the base model: a model's
state is in a slot or in host memory, and is swapped in on request. Adapters share one frozen base;
an offloaded adapter frees its device memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from arguments.hf.model import HfModel
from arguments.schema.lora import TARGETS
from slime_like.megatron.factory import NetworkSettings, TrainingSettings, start_from_policy
from slime_like.megatron.lora import LoraBase, LoraNetwork, LoraSpec
from slime_like.megatron.offload import OffloadedNetwork, StoredState
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.megatron.trained_network import TrainedNetwork
from slime_like.tinker.errors import Failed, Refused

LORA_ALPHA = 32.0  # the API does not specify it; this is the value of the official service


@dataclass(slots=True)
class HostedModel:
    """A model of a client."""

    id: str
    role: str
    # index of its network if all weights are trained and resident; otherwise `stored` is its state
    slot: int | None = None
    stored: StoredState | None = None
    adapter: LoraNetwork | None = None  # its LoRA network
    # its copy in host memory while it is not on the device
    offloaded: OffloadedNetwork | None = None
    used: int = 0  # logical time of last use
    passes: int = 0  # forward passes so far, a seed for losses that draw random numbers


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
        """
        Args:
            base: Folder of the base model.
            hf: Its configuration.
            seed: For adapters without one.
            max_models, max_adapters: Maximum on the device; None for no limit.
        """
        assert not settings.ddp.overlap_grad_reduce, "rejected on the command line"
        self.settings = settings
        self.layout = layout
        self.hf = hf
        self.base = base
        self.seed = seed
        self.max_models = max_models
        self.max_adapters = max_adapters
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
            self._make_room_for_adapter()
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
        network.reset_training_state()

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
            if hosted.offloaded is not None:
                self._make_room_for_adapter()
                hosted.offloaded.restore()
                hosted.offloaded = None
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

    # --- all weights ---

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
        index = self._free_slot(hosted.role)
        self._slots[index].model = hosted.id
        hosted.slot = index
        return self._slots[index].network

    def _free_slot(self, role: str) -> int:
        slots = [i for i, slot in enumerate(self._slots) if slot.role == role]
        for i in slots:
            if self._slots[i].model is None:
                return i
        if self.max_models is None or len(self._slots) < self.max_models or not slots:
            self._slots.append(Slot(role, self._new_network(role)))
            return len(self._slots) - 1
        oldest = min(slots, key=lambda i: self.models[self._slots[i].model or ""].used)
        evicted = self.models[self._slots[oldest].model or ""]
        evicted.stored = StoredState(self._slots[oldest].network)
        evicted.slot = None
        return oldest

    def _new_network(self, role: str) -> TrainedNetwork:
        network = TrainedNetwork(
            *self.settings.shape, self.layout, **self._training(), value_head=role == "critic"
        )
        network.allocate_moments()
        return network

    def _training(self) -> TrainingSettings:
        """Training settings of a network. The schedule is unused: each optim_step brings its own
        settings, which are written into the optimizer."""
        own = dataclasses.replace(self.settings.optimizer)
        return self.settings.training(total_steps=1, optimizer=own)

    # --- adapters ---

    def _make_room_for_adapter(self) -> None:
        """Offload the least recently used adapters to host memory until there is room for one
        more."""
        if self.max_adapters is None:
            return
        resident = [
            m for m in self.models.values() if m.adapter is not None and m.offloaded is None
        ]
        resident.sort(key=lambda m: m.used)
        for evicted in resident[: max(0, len(resident) - self.max_adapters + 1)]:
            assert evicted.adapter is not None
            evicted.offloaded = OffloadedNetwork(evicted.adapter)

    def _new_adapter(self, lora: Mapping[str, Any], role: str) -> LoraNetwork:
        """Create an adapter on the shared frozen base, which is created with the first adapter. A
        critic's adapter starts from that base, with zero values. Raises Refused if there is nothing
        to train."""
        parts = [part for part in ("attn", "mlp", "unembed") if lora[f"train_{part}"]]
        if not parts:
            if role == "critic":
                raise Refused(
                    "train_attn and train_mlp are both False: a critic has no other layers to train"
                )
            raise Refused("train_attn, train_mlp and train_unembed are all False: nothing to train")
        targets = frozenset[str]().union(*(TARGETS[part] for part in parts))
        if self._base_of_adapters is None:
            self._base_of_adapters = LoraBase(*self.settings.shape, self.layout, hf=self.hf)
            self._base_of_adapters.load_hf(self.base)
        seed = self.seed if lora["seed"] is None else lora["seed"]
        spec = LoraSpec(lora["rank"], LORA_ALPHA, targets, seed, value_head=role == "critic")
        network = LoraNetwork(self._base_of_adapters, spec, **self._training())
        network.allocate_moments()
        return network
