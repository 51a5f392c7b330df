"""Time and memory of a vision tower's pass per image token: all images of a micro-batch at once, as
in training, and one by one.

    python benchmarks/bench_tower.py --images 16 --side 224 --case packed

The tower has the sizes of Qwen3-VL-2B's, with random weights. On a CPU the memory is the peak of
the process's resident set above that before the pass; on a GPU that of torch's allocator.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from slime_like.images.inputs import ImageInputs, concatenate
from slime_like.images.rows import PlaceholderRule
from slime_like.images.settings import VisionSettings
from slime_like.images.tower import ImageTower
from slime_like.weights.families import model_families

FAMILY = "Qwen3VLForConditionalGeneration"
TOWER = {
    **{"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16},
    **{"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3},
    **{"out_hidden_size": 2048, "num_position_embeddings": 2304},
    "deepstack_visual_indexes": [5, 11, 17],
}


def make_tower(*, trained: bool, device: torch.device) -> ImageTower:
    family = model_families.get(FAMILY).vision
    assert family is not None and not isinstance(family, str)
    config = {"model_type": "qwen3_vl", "vision_config": TOWER, "text_config": {}}
    rule = PlaceholderRule(0, merge_size=2)
    settings = VisionSettings(family, json.dumps(config), rule, (24, 20, 20), 3, trained)
    tower = ImageTower(settings).to(device)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in tower.parameters():
            parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
    return tower


def run(tower: ImageTower, parts: list[ImageInputs]) -> None:
    """One pass for each part, of a trained tower with its gradients."""
    for inputs in parts:
        features, deepstack = tower(inputs)
        total = features.sum() + sum(d.sum() for d in deepstack)
        if total.requires_grad:
            total.backward()


def peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(
    parts: list[ImageInputs], *, trained: bool, device: torch.device, repeats: int
) -> tuple[float, int]:
    """Seconds of a pass, the best of `repeats`, and bytes above the tower and its gradients."""
    tower = make_tower(trained=trained, device=device)
    for parameter in tower.parameters() if trained else ():
        parameter.grad = torch.empty_like(parameter).zero_()  # `zeros` would take its pages later
    gc.collect()
    before = peak_bytes(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = int(torch.cuda.memory_allocated(device))
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        run(tower, parts)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return min(seconds), peak_bytes(device) - before


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument(
        "--side", type=int, default=224, help="pixels of an image, a multiple of 32"
    )
    parser.add_argument("--repeats", type=int, default=2)
    # a process's peak never falls: one case a process
    parser.add_argument("--case", choices=("packed", "one by one"), required=True)
    parser.add_argument("--trained", action="store_true")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    patches = (options.side // 16) ** 2
    generator = torch.Generator().manual_seed(2)
    grid = torch.tensor([[1, options.side // 16, options.side // 16]], device=device)
    images = [
        ImageInputs(torch.randn(patches, 1536, generator=generator).to(device), grid)
        for _ in range(options.images)
    ]
    parts = [concatenate(images)] if options.case == "packed" else images
    seconds, memory = measure(
        parts, trained=options.trained, device=device, repeats=options.repeats
    )
    tokens = options.images * patches // 4
    print(
        f"{options.case}, {'trained' if options.trained else 'frozen'}: {options.images} images, "
        f"{tokens} image tokens; {1e3 * seconds / tokens:.2f} ms and {memory / tokens / 2**20:.2f} "
        f"MiB an image token"
    )


if __name__ == "__main__":
    main()
