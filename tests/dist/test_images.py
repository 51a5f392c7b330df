"""Models that see images: logits and all gradients against transformers' whole class in float64,
and layouts against one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.parity.cells import RECOMPUTE
from benchmarks.parity.ranks import run_ranks
from slime_like.images.settings import VisionSettings
from slime_like.megatron.ops.tables import prepare_rows
from slime_like.megatron.packed_batches import rows_of_pass
from slime_like.megatron.packing import pack_all
from slime_like.types import TrainSample
from tests.dist import convert_worker, vision_models
from tests.dist.family_layouts import CP2, EP2, PP2, TP2
from tests.dist.float64 import WithoutFloat32
from tests.dist.test_families import (
    TP2_EP2,
    Ours,
    apart,
    exact_embedding_scale,
    objective,
    of_transformers,
)
from tests.dist.vision_models import CANCELLING, IMAGE

GEMMA3 = vision_models.GEMMA3
QWEN3 = "Qwen3VLForConditionalGeneration"
EXACT = 1e-12  # relative to a tensor's norm


class Seeing(Ours):
    """`Ours` with the vision tower."""

    def __init__(
        self,
        folder: Path,
        layout: Any,
        dtype: torch.dtype,
        vision: VisionSettings,
        *,
        recompute: bool = False,
    ) -> None:
        self.layout, self.folder = layout, str(folder)
        self.chunks, self.hf, self.gpt = convert_worker.build(
            self.folder, layout, dtype, vision=vision, recompute=recompute
        )
        convert_worker.load_hf_weights(self.chunks, self.folder, **self.model)
        if dtype == torch.float64:
            convert_worker.in_float64(self.chunks)

    def logits_of(self, samples: Sequence[TrainSample]) -> list[Tensor]:
        """Of sequences packed into one row."""
        (chunk,) = self.chunks
        (batch,) = pack_all([samples], multiple=1, equal_lengths=False)
        assert batch.packed is not None
        seen = None if batch.images is None else batch.images.last_visible
        prepare_rows(batch.packed, chunk.config, last_visible=seen)
        rows = rows_of_pass(batch)
        hidden = chunk(batch.tokens, batch.position_ids, None, packed_seq_params=rows)
        logits = (hidden @ convert_worker.head_weight(chunk).t())[0]
        return list(logits[:, : self.hf.gpt["vocab_size"]].split([len(s.tokens) for s in samples]))


def sequences(vision: VisionSettings) -> list[TrainSample]:
    """A text, two sequences with the same two images, a text, and one with one image."""
    generator = torch.Generator().manual_seed(3)
    plain = [
        TrainSample(
            torch.randint(IMAGE, (n,), generator=generator),
            1,
            torch.ones(1, dtype=torch.bool),
            torch.ones(1),
        )
        for n in (7, 5, 11, 9, 3)
    ]
    pair = vision_models.images(vision, 1, 2)
    single = vision_models.images(vision, 2, 1)
    seen = [None, pair, pair, None, single]
    return [
        s if x is None else vision_models.with_images(s, vision, i, x)
        for i, (s, x) in enumerate(zip(plain, seen, strict=True))
    ]


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("architecture", vision_models.MODELS)
def test_against_transformers(architecture: str, trained: bool, alone: Any, tmp_path: Path) -> None:
    check_against_transformers(architecture, trained, alone, tmp_path)


@pytest.mark.parametrize(
    "architecture", ["Qwen3VLForConditionalGeneration", "Qwen3_5ForConditionalGeneration"]
)
def test_yarn_turns_images_too(architecture: str, alone: Any, tmp_path: Path) -> None:
    """On their three axes by its frequencies, of part of each head in the second model."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    rope = {**vision_models.MODELS[architecture]["rope_parameters"], **yarn}
    check_against_transformers(architecture, False, alone, tmp_path, rope_parameters=rope)


@pytest.mark.parametrize("architecture", [QWEN3, GEMMA3])
def test_a_recomputed_tower_keeps_less_and_has_the_same_gradients(
    architecture: str, alone: Any, tmp_path: Path
) -> None:
    """Of its layers only their inputs: each tensor that its pass saves, with three layers and
    with eight."""
    saved = {}
    gradients = {}
    for layers in (3, 8):
        tower = dict(vision_models.MODELS[architecture]["vision_config"])
        tower["num_hidden_layers" if architecture == GEMMA3 else "depth"] = layers
        folder = tmp_path / f"{layers}"
        vision_models.make_model(architecture, folder, vision_config=tower)
        vision = vision_models.vision_of(folder, trained=True)
        images = vision_models.images(vision, 1, 2)
        for recompute in (False, True):
            network = Seeing(folder, alone, torch.float32, vision, recompute=recompute)
            (chunk,) = network.chunks
            seen = chunk.vision.train()
            count = 0

            def keep(tensor: Tensor) -> Tensor:
                nonlocal count
                count += tensor.nbytes
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                features, deepstack = seen(images)
            saved[layers, recompute] = count
            torch.cat([features, *deepstack]).square().sum().backward()
            gradients[layers, recompute] = {n: p.grad for n, p in seen.named_parameters()}
    for layers in (3, 8):
        for name, gradient in gradients[layers, False].items():
            assert torch.equal(gradients[layers, True][name], gradient), name
    more, fewer = (saved[8, recompute] - saved[3, recompute] for recompute in (False, True))
    assert 0 < fewer < more / 8


def check_against_transformers(
    architecture: str, trained: bool, alone: Any, tmp_path: Path, **changes: Any
) -> None:
    reference = vision_models.make_model(architecture, tmp_path / "model", **changes)
    vision = vision_models.vision_of(tmp_path / "model", trained=trained)
    samples = sequences(vision)
    vocab = reference.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(4)
    coefficients = [
        torch.randn(len(s.tokens), vocab, generator=generator, dtype=torch.float64) for s in samples
    ]
    with WithoutFloat32():
        theirs = type(reference)(reference.config).double().eval()
        theirs.load_state_dict(reference.state_dict())
        exact_embedding_scale(theirs, torch.float64)
        expected, their_gradients = of_transformers(
            theirs, samples, coefficients, tmp_path / "gradients", their_logits
        )
        ours = Seeing(tmp_path / "model", alone, torch.float64, vision)
        found = ours.logits_of(samples)
        objective(found, coefficients).backward()
        gradients = ours.gradients()
    if not trained:
        tower = tuple(prefix for _, prefix in vision.family.modules)
        their_gradients = {n: g for n, g in their_gradients.items() if not n.startswith(tower)}
    for name in [name for name in gradients if CANCELLING.search(name)]:
        both = torch.stack([gradients.pop(name), their_gradients.pop(name)])
        assert float(both.abs().max()) < EXACT, name
    differences = apart(
        {"logits": torch.cat(found).detach(), **gradients},
        {"logits": torch.cat(expected), **their_gradients},
    )
    print(max(differences.values()), len(differences))
    assert max(differences.values()) < EXACT, differences
    plain = ours.logits_of([replace(s, images=None) for s in samples])
    assert float((torch.cat(plain).detach() - torch.cat(expected)).norm()) > 0.1, "what this shows"


def their_logits(model: Any, sample: TrainSample) -> Tensor:
    """[L, vocab] of one sequence."""
    tokens = sample.tokens[None]
    if sample.images is None:
        return model(tokens).logits[0]
    inputs = sample.images.inputs
    kinds = (tokens == IMAGE).int()
    more = {"image_grid_thw": inputs.grids, "mm_token_type_ids": kinds}
    if inputs.grids is None:
        more = {"token_type_ids": kinds}
    return model(tokens, pixel_values=inputs.load().pixels, **more).logits[0]


TRAINED = " --train-vision-tower"  # at the end of a cell's flags
# by number of processes: (architecture, flags)
VP2 = f"{PP2} --num-virtual-stages-per-pipeline-rank 2"
SHARDED = "--micro-batch-size 1 --use-distributed-optimizer"
CELLS = {
    2: [
        (QWEN3, f"{PP2} {RECOMPUTE['recompute']}{TRAINED}"),
        (QWEN3, f"{TP2} {RECOMPUTE['recompute']}"),
        (QWEN3, "--tensor-model-parallel-size 2" + TRAINED),
        (QWEN3, CP2 + TRAINED),
        (QWEN3, f"{SHARDED} --overlap-grad-reduce --overlap-param-gather" + TRAINED),
        ("Qwen2_5_VLForConditionalGeneration", VP2 + TRAINED),
        ("Qwen2_5_VLForConditionalGeneration", f"{CP2} {RECOMPUTE['recompute']}"),
        ("Qwen3VLMoeForConditionalGeneration", TP2_EP2 + TRAINED),
        ("Qwen3_5ForConditionalGeneration", TP2 + TRAINED),
        ("Glm4vForConditionalGeneration", CP2 + TRAINED),
        ("Exaone4_5_ForConditionalGeneration", TP2 + TRAINED),
        (GEMMA3, TP2 + TRAINED),
        (GEMMA3, f"{CP2} {RECOMPUTE['recompute']}"),
        (GEMMA3, f"{PP2} --tensor-model-parallel-size 1"),
        ("Qwen3_5MoeForConditionalGeneration", f"{CP2} {EP2}"),
    ],
    4: [
        (QWEN3, f"{TP2} {PP2}" + TRAINED),
        (QWEN3, f"{TP2} {CP2} {RECOMPUTE['recompute']}" + TRAINED),
        ("Qwen2_5_VLForConditionalGeneration", f"{PP2} {CP2}" + TRAINED),
        ("Qwen3VLMoeForConditionalGeneration", f"{PP2} {EP2}" + TRAINED),
        ("Qwen3_5ForConditionalGeneration", f"{TP2} {CP2}" + TRAINED),
    ],
}
IN_MAKE_TEST = [(QWEN3, TP2 + TRAINED), (QWEN3, CP2)]


def test_layouts(tmp_path: Path) -> None:
    check(2, IN_MAKE_TEST, tmp_path)


@pytest.mark.extended
@pytest.mark.parametrize("ranks", CELLS)
def test_further_layouts(tmp_path: Path, ranks: int) -> None:
    check(ranks, CELLS[ranks], tmp_path)


def check(ranks: int, cells: Sequence[tuple[str, str]], folder: Path) -> None:
    words = {}
    singles = {}
    for architecture, flags in cells:
        model = folder / architecture
        if not model.exists():
            vision_models.make_model(architecture, model)
        trained = flags.endswith(TRAINED)
        common = "--micro-batch-size 2 --clip-grad 0"
        singles[f"{architecture} {trained}"] = (str(model), common, trained)
        words[f"{architecture} {flags}"] = (
            str(model),
            f"{common} {flags.removesuffix(TRAINED)}",
            trained,
        )
    worker = "tests.dist.images_worker:run_cells"
    run_ranks(worker, 1, folder / "one", {"cells": singles}, timeout_s=200)
    for found in run_ranks(worker, ranks, folder / "more", {"cells": words}, timeout_s=400):
        assert len(found) == len(cells)
        for name, far in found.items():
            for what in ("loss", "gradients", "weights", "log_probs", "grad_norm"):
                assert far[what] < EXACT, (name, what, far)
