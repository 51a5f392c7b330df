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

LORA_ALPHA = 32.0  # the API does not say it; this is what its own service trains with


@dataclass(slots=True)
class HostedModel:
    """slot: of all weights, where they are resident; else stored is their state. adapter: its
    network; outside: while it waits in host memory. used: when, by the host's clock. passes: made,
    for losses that draw random numbers. incomplete: why gradients are missing for the next step."""

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
        """base: folder of the base model, and hf what that says. seed: of adapters that name none.
        max_models, max_adapters: on the device; None for any number."""
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
        """Raises Refused for an adapter with nothing to train."""
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
        """With this model in it, brought back from host memory if it has to be."""
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
            except BaseException:  # its state is still in host memory
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
        """From its policy's weights as they are now, of an adapter from the base, with values of 0."""
        if policy is not None:
            start_from_policy(critic, self.network(policy))
            return
        # a critic that is about to be loaded: any weights will do
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
        """A network for a model: a free one, a new one while there may be more, else the one whose
        model was not used for longest."""
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
        """How a network is trained. The schedule is never stepped: each optimizer step brings its
        settings, which are written into the optimizer's own."""
        own = dataclasses.replace(self.settings.optimizer)
        return self.settings.training(total_steps=1, optimizer=own)

    # --- adapters ---------------------------------------------------------------------------------------------------

    def _make_room_for_an_adapter(self) -> None:
        """Those that were not used for longest go to host memory, until one more may come."""
        most = self.max_adapters
        inside = sorted(
            (m for m in self.models.values() if m.adapter is not None and m.outside is None),
            key=lambda m: m.used,
        )
        for out in [] if most is None else inside[: max(0, len(inside) - most + 1)]:
            assert out.adapter is not None
            out.outside = OffloadedNetwork(out.adapter)

    def _new_adapter(self, lora: Mapping[str, Any], role: str) -> LoraNetwork:
        """On the one frozen base, which is made with the first adapter. A critic's starts from that
        base, with values of 0. Raises Refused when there is nothing to train."""
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
