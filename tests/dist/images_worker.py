"""Workers of tests/dist/test_images.py."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from arguments.run_config import RunConfig
from benchmarks.parity.cells import sizes_of
from benchmarks.parity.steps import differences, parallel, train, train_samples
from slime_like.images.settings import VisionSettings
from slime_like.types import TrainSample
from tests.dist import vision_models
from tests.dist.float64 import WithoutFloat32


def samples_of(step: int, vision: VisionSettings) -> list[TrainSample]:
    """Of the eight samples of a step the first three share two images, two have others, and three
    have none."""
    pair = vision_models.images(vision, step, 2)
    others = [vision_models.images(vision, 100 + step + n, 1 + n) for n in range(2)]
    seen = [pair, pair, pair, None, *others, None, None]
    return [
        s if x is None else vision_models.with_images(s, vision, i, x)
        for i, (s, x) in enumerate(zip(train_samples(step), seen, strict=True))
    ]


def seeing(config: RunConfig, vision: VisionSettings) -> RunConfig:
    return dataclasses.replace(config, gpt=dataclasses.replace(config.gpt, vision=vision))


def run_cells(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """For every cell, by name, how far three steps in its layout are from those of one process."""
    found = {}
    for name, (folder, flags, trained) in arguments["cells"].items():
        vision = vision_models.vision_of(folder, trained=trained)
        base_file = f"{folder}/one_{trained}.pt"
        with WithoutFloat32(), parallel(**sizes_of(flags)) as layout:
            local = train(
                folder,
                layout,
                flags,
                "float64",
                partial(samples_of, vision=vision),
                partial(seeing, vision=vision),
            )
        for what in list(local["gradients"]):
            if vision_models.CANCELLING.search(what.rpartition(" ")[2]):
                del local["gradients"][what]
        if world_size == 1:
            torch.save(local, base_file)
            continue
        apart = differences(local, torch.load(base_file))
        found[name] = {k: v for k, v in apart.items() if k != "metrics"}
        if rank == 0:
            print(name, found[name], flush=True)
    dist.barrier()
    return found
