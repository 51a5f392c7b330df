"""Workers of tests/dist/test_convert_checkpoints.py: conversions in one layout after another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import megatron_patches
from arguments.hf.model import read_hf_model

megatron_patches.apply()

from slime_like.checkpoints.folders import checkpoint_folder  # noqa: E402
from slime_like.conversion.network import MetaNetwork, conversion_layout  # noqa: E402
from slime_like.conversion.to_hf import NetworkSource, convert_to_hf  # noqa: E402
from slime_like.conversion.to_megatron import convert_to_megatron  # noqa: E402
from slime_like.conversion.verify import compare_bits  # noqa: E402
from slime_like.megatron.checkpoint import SavedNetwork, load_weights  # noqa: E402
from slime_like.weights.hf_export import HfExport  # noqa: E402
from slime_like.weights.untrained import untrained_prefixes  # noqa: E402
from tests.dist.convert_worker import build, parallel, stored_weights  # noqa: E402


def round_trips(rank: int, world_size: int, arguments: dict[str, Any]) -> list[str]:
    """(folder, layout it is written in, layout it is loaded in) -> written, loaded by
    megatron-core, converted back, all bit by bit."""
    done = []
    for folder, written, loaded in arguments["cases"]:
        case = f"{Path(folder).name}-{'-'.join(map(str, (*written, *loaded)))}"
        root, output = f"{arguments['out']}/{case}", f"{arguments['out']}/{case}-hf"
        network = "critic" if Path(folder).name == "critic" else "policy"
        critic = network == "critic"
        hf = read_hf_model(folder, value_head=critic)
        stored, other = stored_weights(folder), untrained_prefixes(hf)
        read = {name: tensor for name, tensor in stored.items() if not name.startswith(other)}
        with parallel(*written) as layout:
            settings = conversion_layout(
                hf,
                tensor=layout.tp_size,
                pipeline=layout.pp_size,
                expert=layout.ep_size,
                expert_tensor=layout.etp_size,
            )
            converted = MetaNetwork(hf, settings, layout, value_head=critic)
            convert_to_megatron(converted, folder, root, workers=2, file_bytes=30_000)
        checkpoint = checkpoint_folder(root, 0)
        with parallel(*loaded) as layout:
            chunks, _, gpt = build(folder, layout, value_head=critic)
            load_weights(
                checkpoint,
                network,
                SavedNetwork(chunks, None, None, layout),
                verify=True,
            )
            exported = dict(
                HfExport(chunks, hf=hf, gpt=gpt, layout=layout, value_head=critic).stream()
            )
            assert exported.keys() == read.keys(), case
            assert all(torch.equal(exported[name], read[name]) for name in read), case
        with parallel() as layout:
            alone = MetaNetwork(hf, conversion_layout(hf), layout, value_head=critic)
            source = NetworkSource(alone, checkpoint / network, folder)
            convert_to_hf(source, folder, output, checkpoint=checkpoint, max_shard_bytes=40_000)
            assert compare_bits(source, output) > 0
        back = stored_weights(output)
        assert back.keys() == stored.keys(), case
        assert all(torch.equal(back[name], stored[name]) for name in stored), case
        done.append(case)
    return done
