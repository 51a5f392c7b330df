"""Make what the demo with images needs: a tiny Qwen3-VL model with random weights, and pictures of
coloured squares to describe.

    python scripts/make_image_demo.py --output-dir outputs/images

writes `model/` (a Hugging Face folder with an image processor), `pictures/`, `train.jsonl` and
`heldout.jsonl`. A picture has one to three squares of one colour, somewhere on a grid of nine; the
answer is their number and colour, e.g. "3 red". Shades and background are noisy, and held-out
pictures have other places. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.make_tiny_model import PATCH_TOWER, make_tiny_model

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 80, 220),
    "white": (235, 235, 235),
    "pink": (230, 110, 190),
    "yellow": (225, 205, 50),
}
GRID = 3  # places on each of height and width
CELL = 8  # pixels of a place; one feature of the model's tower
MOST = 3  # squares of a picture
QUESTION = "<image>What is it?"
Picture = tuple[str, tuple[int, ...]]  # colour, places of the squares


def every_picture() -> list[Picture]:
    """All pictures, as colour and places."""
    places = range(GRID * GRID)
    sets = [s for n in range(1, MOST + 1) for s in itertools.combinations(places, n)]
    return [(colour, each) for colour in COLOURS for each in sets]


def draw(picture: Picture, path: Path, noise: random.Random) -> None:
    """Save a picture: squares of 6 x 6 pixels on dark, slightly noisy ground."""
    from PIL import Image

    colour, places = picture
    image = Image.new("RGB", (GRID * CELL, GRID * CELL))
    for x, y in itertools.product(range(GRID * CELL), repeat=2):
        image.putpixel((x, y), (noise.randint(0, 30),) * 3)
    shade = tuple(min(255, max(0, part + noise.randint(-20, 20))) for part in COLOURS[colour])
    for place in places:
        top, left = (place // GRID) * CELL + 1, (place % GRID) * CELL + 1
        image.paste(shade, (left, top, left + CELL - 2, top + CELL - 2))
    image.save(path)


def write_rows(folder: Path, name: str, pictures: list[Picture], noise: random.Random) -> None:
    """Write pictures and their rows, with paths relative to the file."""
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
        for number, picture in enumerate(pictures):
            path = f"pictures/{name}_{number}.png"
            draw(picture, folder / path, noise)
            row = {
                "question": QUESTION,
                "images": [path],
                "answer": f"{len(picture[1])} {picture[0]}",
            }
            file.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument("--num-heldout", type=int, default=128)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    from transformers.utils import logging

    logging.disable_progress_bar()
    size = options.hidden_size
    tower = {
        **{"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2},
        **{"temporal_patch_size": 1, "num_position_embeddings": 36, "out_hidden_size": size},
        "deepstack_visual_indexes": [0],
        "initializer_range": 0.1,  # smaller ones make all pictures alike
    }
    model = make_tiny_model(
        "Qwen3-VL",
        options.output_dir / "model",
        seed=options.seed,
        images=True,
        hidden_size=size,
        intermediate_size=3 * size,
        num_hidden_layers=options.num_layers,
        head_dim=size // 4,
        initializer_range=0.05,
        tie_word_embeddings=True,
        vision_config={**tower, **PATCH_TOWER},
    )
    shuffled = every_picture()
    noise = random.Random(options.seed)
    noise.shuffle(shuffled)
    parts = {"heldout": shuffled[: options.num_heldout], "train": shuffled[options.num_heldout :]}
    for name, part in parts.items():
        write_rows(options.output_dir, name, part, noise)
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"made {options.output_dir / 'model'} ({parameters:,} parameters), {len(parts['train'])} "
        f"training and {len(parts['heldout'])} held-out pictures"
    )


if __name__ == "__main__":
    main()
