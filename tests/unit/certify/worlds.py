"""A trainer, a local engine with its weights, and the reference, of a tiny model in one process."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.parity.steps import settings
from scripts.make_tiny_model import make_tiny_model
from slime_like.certify.compare import Examination, Reference
from slime_like.certify.layered import LayeredModel
from slime_like.certify.run import Certifier, CertifierSettings, as_slots, file_model
from slime_like.engines.base import SamplingParams
from slime_like.engines.local.engine import LocalEngine
from slime_like.megatron.backend import MegatronBackend


@dataclass
class World:
    """What the tests compare."""

    backend: MegatronBackend
    engine: LocalEngine
    certifier: Certifier
    reference: Reference

    def examine_engine(self, plant: Any) -> Examination:
        """Examine a copy of the engine's model with a fault."""
        model = copy.deepcopy(self.engine.model)
        with torch.no_grad():
            plant(model)
            engine = LayeredModel(model)
            states = engine.run(self.reference.sequences, self.reference.inputs)
            return self.reference.examine("engine", states, engine.weights())

    def examine_trainer(self) -> Examination:
        """Examine the trainer as it is now, against the folder's model."""
        states = self.certifier._trainer_states()
        reference = Reference(
            self.reference.exact, self._rounded(), self.reference.sequences, states
        )
        weights = as_slots(self._rounded(), self.certifier._trainer_weights())
        return reference.examine("trainer", states, weights)

    def _rounded(self) -> LayeredModel:
        folder = self.certifier._settings.folder
        return file_model(folder, self.backend.transformer.params_dtype, False)


def make_world(
    family: str,
    folder: Path,
    flags: str,
    *,
    layout: Any,
    seed: int = 1,
    changes: Mapping[str, Any] | None = None,
) -> World:
    """changes: of config.json."""
    if not folder.exists():
        make_tiny_model(family, folder, seed=seed, **{"num_hidden_layers": 2, **(changes or {})})
    config = settings(str(folder), flags)
    backend = MegatronBackend(config, layout, total_steps=3)
    dtype = config.megatron.transformer.params_dtype
    engine = LocalEngine(str(folder), None, dtype=dtype)
    backend.sync_weights(engine, 1)
    own = CertifierSettings(str(folder), "local", (folder,), seed, SamplingParams())
    certifier = Certifier(backend, engine, own)
    states = certifier._trainer_states()
    reference = Reference(
        file_model(str(folder), torch.float64, False),
        file_model(str(folder), dtype, False),
        certifier._sequences,
        states,
    )
    return World(backend, engine, certifier, reference)
