"""Time and memory of a vision tower's pass per image token: all images of a micro-batch at once, as
in training, and one by one.

    python benchmarks/bench_tower.py [--images 16] [--side 224] [--repeats 2]
                                     [--trained [--recompute]] [--json FILE]

The tower has the sizes of Qwen3-VL-2B's, with random weights. On a CPU the memory is the peak of
the process's resident set above that before the pass; on a GPU that of torch's allocator.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.bench_common import write_json
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


@dataclass(frozen=True, slots=True)
class Case:
    """Passes over `images` square images of `side` pixels."""

    packed: bool
    images: int
    side: int
    trained: bool
    recompute: bool
    repeats: int

    @property
    def image_tokens(self) -> int:
        return self.images * (self.side // 32) ** 2


def measure(case: Case) -> tuple[float, int]:
    """Seconds of a pass, the best of `repeats`, and bytes above the tower and its gradients."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    patches = case.side // 16
    generator = torch.Generator().manual_seed(2)
    grid = torch.tensor([[1, patches, patches]], device=device)
    parts = [
        ImageInputs(torch.randn(patches**2, 1536, generator=generator).to(device), grid)
        for _ in range(case.images)
    ]
    if case.packed:
        parts = [concatenate(parts)]
    tower = make_tower(trained=case.trained, device=device).train()
    if case.recompute:
        tower.recompute_layers()
    for parameter in tower.parameters() if case.trained else ():
        parameter.grad = torch.empty_like(parameter).zero_()  # `zeros` would take its pages later
    gc.collect()
    before = peak_bytes(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = int(torch.cuda.memory_allocated(device))
    seconds = []
    for _ in range(case.repeats):
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
    parser.add_argument("--trained", action="store_true", help="with gradients of the tower")
    parser.add_argument(
        "--recompute", action="store_true", help="its layers, as --recompute-granularity full does"
    )
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args()
    if options.side < 32 or options.side % 32:
        parser.error(f"--side must be a multiple of 32, not {options.side}")
    if options.recompute and not options.trained:
        parser.error("--recompute needs --trained: a frozen tower keeps nothing for later")
    rows: list[dict[str, str | float]] = []
    times: list[float] = []
    # a process's peak never falls, so each case has its own
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as pool:
        for packed in (True, False):
            trained, recompute = options.trained, options.recompute
            case = Case(packed, options.images, options.side, trained, recompute, options.repeats)
            seconds, memory = pool.submit(measure, case).result()
            name = "packed" if packed else "one by one"
            ms = 1e3 * seconds / case.image_tokens
            mib = memory / case.image_tokens / 2**20
            rows.append({"case": name, "ms": ms, "mib": mib})
            times.append(seconds)
            print(f"{name}: {ms:.2f} ms and {mib:.2f} MiB an image token")
    print(f"packed to one by one: {times[0] / times[1]:.2f} of the time")
    write_json(options.json, rows)


if __name__ == "__main__":
    main()
