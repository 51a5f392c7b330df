"""Worker of tests/dist/test_certify.py."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from benchmarks.parity.cells import sizes_of
from benchmarks.parity.steps import parallel, settings
from slime_like.certify.compare import Reference
from slime_like.certify.run import Certifier, CertifierSettings, as_slots, file_model
from slime_like.engines.base import SamplingParams
from slime_like.engines.local.engine import LocalEngine
from slime_like.megatron.backend import MegatronBackend


def examine(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """On rank 0, the findings in the trainer and in the engine by model and layout."""
    found: dict[str, dict[str, Any]] = {}
    for folder, flags in arguments["cells"]:
        with parallel(**sizes_of(flags)) as layout:
            config = settings(folder, flags)
            backend = MegatronBackend(config, layout, total_steps=3)
            engine = LocalEngine(folder, None)
            backend.sync_weights(engine, 1)
            if arguments["faults"]:
                plant(backend)
            own = CertifierSettings(folder, "local", (), 1, SamplingParams())
            certifier = Certifier(backend, engine, own)
            states = certifier._trainer_states()
            weights = certifier._trainer_weights()
            if rank == 0:
                exact = file_model(folder, torch.float64, False)
                rounded = file_model(folder, torch.float32, False)
                reference = Reference(exact, rounded, certifier._sequences, states)
                result = reference.examine("trainer", states, as_slots(rounded, weights))
                certificate, _ = certifier._examine(states, weights, [], [], folder)
                found[f"{folder} {flags}"] = {
                    "findings": [asdict(finding) for finding in result.findings],
                    "findings_of_engine": [f.text for f in certificate["engine"].findings],
                    "sites": list(result.gaps),
                }
    return found


def plant(backend: MegatronBackend) -> None:
    """A fault on rank 1 alone."""
    layout = backend.layout
    (chunk,) = backend.policy.chunks
    for layer in chunk.decoder.layers:
        if layer.layer_number != 3 or layout.rank != 1:
            continue
        if layout.tp_size > 1:
            with torch.no_grad():
                layer.self_attention.linear_proj.weight.neg_()
        else:
            layer.input_layernorm.eps *= 100
