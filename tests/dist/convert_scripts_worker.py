"""What tests/dist/test_convert_scripts.py runs on several processes: conversions in one layout after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import megatron_patches
from arguments.groups import ParallelConfig
from arguments.hf_model import read_hf_model

megatron_patches.apply()

from slime_like.checkpoints.folders import checkpoint_folder  # noqa: E402
from slime_like.convert.blueprint import make_blueprint  # noqa: E402
from slime_like.convert.to_hf import NetworkSource, convert_to_hf, verify_round_trip  # noqa: E402
from slime_like.convert.to_megatron import convert_to_megatron  # noqa: E402
from slime_like.megatron_backend.backend import load_network  # noqa: E402
from tests.dist.convert_worker import build, parallel, stored_weights  # noqa: E402


def round_trips(rank: int, world_size: int, arguments: dict[str, Any]) -> list[str]:
    """(folder, layout it is written in, layout it is loaded in) -> written, loaded by megatron-core, converted back, all bit by bit."""
    done = []
    for folder, written, loaded in arguments["cases"]:
        case = f"{Path(folder).name}-{'-'.join(map(str, (*written, *loaded)))}"
        root, output = f"{arguments['out']}/{case}", f"{arguments['out']}/{case}-hf"
        hf = read_hf_model(folder)
        stored = stored_weights(folder)
        with parallel(*written) as layout:
            settings = ParallelConfig(
                tensor_model_parallel_size=layout.tp_size,
                pipeline_model_parallel_size=layout.pp_size,
                expert_model_parallel_size=layout.ep_size,
                expert_tensor_parallel_size=layout.etp_size,
                sequence_parallel=layout.tp_size > 1 and bool(hf.transformer.get("num_moe_experts")),
            )
            blueprint = make_blueprint(hf, settings, layout, torch.float32, value_head=False)
            convert_to_megatron(blueprint, folder, root, network="policy", workers=2, file_bytes=30_000)
        with parallel(*loaded) as layout:
            chunks, _, gpt = build(folder, layout)
            network = type("Network", (), {"chunks": chunks})()
            load_network(network, root, flag="--ref-load", step=None, verify=True, tell=lambda text: None)  # type: ignore[arg-type]
            from slime_like.convert.export import export_hf_weights

            exported = dict(export_hf_weights(chunks, hf=hf, gpt=gpt, layout=layout))
            assert exported.keys() == stored.keys(), case
            assert all(torch.equal(exported[name], stored[name]) for name in stored), case
        with parallel() as layout:
            blueprint = make_blueprint(hf, ParallelConfig(), layout, torch.float32, value_head=False)
            checkpoint = checkpoint_folder(root, 0)
            source = NetworkSource(blueprint, checkpoint / "policy", folder, None)
            convert_to_hf(source, folder, output, checkpoint=checkpoint, max_shard_bytes=40_000)
            assert verify_round_trip(source, output) > 0
        back = stored_weights(output)
        assert back.keys() == stored.keys(), case
        assert all(torch.equal(back[name], stored[name]) for name in stored), case
        done.append(case)
    return done
