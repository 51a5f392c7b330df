"""Workers of tests/dist/test_quantized.py, on two processes."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.parity.steps import parallel
from slime_like.weights.hf_export import HfExport
from slime_like.weights.hf_import import load_hf_weights
from slime_like.weights.hf_save import save_hf
from slime_like.weights.safetensors_reader import stored_format
from slime_like.weights.untrained import untrained_weights
from tests.dist.convert_worker import build
from tests.dist.weight_update_worker import engine_on

BUCKET = 2**14


def load_and_export(rank: int, world_size: int, arguments: dict[str, Any]) -> list[str]:
    """Every model, quantised and as what it stands for, in every layout. Then it goes out in its
    format, into a folder and to servers. The parameters that differ."""
    different = []
    for number, sizes in enumerate(arguments["layouts"]):
        with parallel(*sizes) as layout:
            for name, (quantized, plain) in arguments["models"].items():
                loaded = []
                for folder in (quantized, plain):
                    chunks, hf, gpt = build(folder, layout)
                    load_hf_weights(chunks, folder, hf=hf, gpt=gpt, layout=layout)
                    loaded.append(chunks)
                pairs = zip(
                    *[[p for c in chunks for p in c.named_parameters()] for chunks in loaded],
                    strict=True,
                )
                case = f"{name} {layout.describe()}"
                different += [f"{case}: {n}" for (n, a), (_, b) in pairs if not torch.equal(a, b)]
                export: dict[str, Any] = dict(
                    hf=hf, gpt=gpt, layout=layout, quantized=stored_format(quantized), bucket_bytes=BUCKET
                )  # fmt: skip
                stream = HfExport(loaded[0], **export).stream()
                save_hf(f"{arguments['out']}/{name}-{number}", stream, quantized)
                if name != arguments["served"]:
                    continue
                del export["quantized"]
                stream, extra = (
                    HfExport(loaded[0], **export).stream(),
                    untrained_weights(hf, quantized),
                )
                save_hf(f"{arguments['out']}/plain-{number}", stream, quantized, extra=extra)
                export["quantized"] = stored_format(quantized)
                serves = number < arguments["served_layouts"]
                for version, transport in enumerate(arguments["transports"] if serves else (), 1):
                    served = {"folder": quantized, "urls": arguments["urls"]}
                    with engine_on(rank, transport, served) as engine:
                        engine.update_weights(HfExport(loaded[0], **export).stream(), version)
                        assert engine.weight_version == version, transport
    return different
