#!/usr/bin/env python
"""Make a tiny model of an architecture: config.json, a character tokenizer, and random weights.

    python scripts/make_tiny_model.py --like GLM-4.5-Air --output-dir outputs/tiny

--like: a published model, an architecture (Glm4MoeForCausalLM) or a model_type (glm4_moe). Nothing
is downloaded."""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from arguments.hf.model import read_hf_model  # noqa: E402
from slime_like.cli.tiny_model import (  # noqa: E402
    IMAGE,
    IMAGE_END,
    IMAGE_START,
    image_template,
    make_tokenizer,
    save_image_processor,
)
from slime_like.weights.families import ModelFamily, model_families  # noqa: E402
from slime_like.weights.published import as_published  # noqa: E402

SIZES: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
    **{"initializer_range": 0.1, "tie_word_embeddings": False, "attention_dropout": 0.0},
    **{"bos_token_id": None, "pad_token_id": None},
}
# keys about images, which are beside `text_config`
IMAGE_KEYS = (
    *("image_token_id", "vision_start_token_id", "vision_end_token_id"),
    *("image_token_index", "boi_token_index", "eoi_token_index", "mm_tokens_per_image"),
)
# of a tower of Qwen's: three colours, a feature for 8 x 8 pixels
PATCH_TOWER = {"in_channels": 3, "patch_size": 4, "spatial_merge_size": 2}
WHOLE_IMAGE_TOWER = {
    **{"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 24},
    **{"num_attention_heads": 2, "image_size": 16, "patch_size": 4},
}


def family_of(name: str) -> ModelFamily:
    """The family of an architecture, a model_type, or a published model, with or without its
    organisation. Raises ValueError naming the legal values."""
    families = [model_families.get(known) for known in model_families.names()]
    for family in families:
        if name in (family.architecture, family.model_type, *family.other_model_types):
            return family
    model = name.rpartition("/")[2].lower()
    matches: dict[int, ModelFamily] = {}
    for family in families:
        for prefix in family.published:
            if model.startswith(prefix.lower()):
                matches.setdefault(len(prefix), family)
    if not matches:
        legal = [word for f in families for word in (f.architecture, *f.published)]
        raise ValueError(f"--like {name!r} is no known model; legal values: {', '.join(legal)}")
    return matches[max(matches)]


def tiny_settings(family: ModelFamily, **changes: Any) -> dict[str, Any]:
    """Keys of a tiny model's configuration class. changes: of these keys. A family's `layer_types`
    are repeated for all layers, of its other lists by layer the last one."""
    settings = {**SIZES, **family.tiny, **changes}
    if "layer_types" not in changes and (kinds := settings.get("layer_types")):
        repeated = itertools.cycle(kinds)
        settings["layer_types"] = list(itertools.islice(repeated, settings["num_hidden_layers"]))
    if "mlp_layer_types" not in changes and (kinds := settings.get("mlp_layer_types")):
        missing = settings["num_hidden_layers"] - len(kinds)
        settings["mlp_layer_types"] = [*kinds, *[kinds[-1]] * missing]
    for key in ("swiglu_limits", "swiglu_limits_shared"):
        if bounds := settings.get(key):
            count = settings["num_hidden_layers"]
            settings[key] = [*bounds, *[bounds[-1]] * count][:count]
    if not family.text_config:
        return settings
    vision = settings.pop("vision_config")
    if "image_token_id" in settings and "rope_parameters" not in changes:
        settings["rope_parameters"] = rope_of_images(family, settings)
    of_images = {key: settings.pop(key) for key in IMAGE_KEYS if key in settings}
    tied = bool(settings["tie_word_embeddings"])
    return {
        "text_config": settings,
        "vision_config": vision,
        "tie_word_embeddings": tied,
        **of_images,
    }


def image_settings(family: ModelFamily, tokenizer: Any) -> dict[str, Any]:
    """Keys of a tiny model that takes images: the ids of its tokens, and a tower for colours."""
    start, place, end = tokenizer.convert_tokens_to_ids([IMAGE_START, IMAGE, IMAGE_END])
    if takes_whole_images(family):
        ids = {"boi_token_index": start, "eoi_token_index": end, "image_token_index": place}
        return ids | {"mm_tokens_per_image": 4, "vision_config": {**WHOLE_IMAGE_TOWER}}
    ids = {"vision_start_token_id": start, "vision_end_token_id": end, "image_token_id": place}
    tower = {**dict(family.tiny["vision_config"]), **PATCH_TOWER}  # type: ignore[call-overload]
    return ids | {"vision_config": tower}


def rope_of_images(family: ModelFamily, settings: dict[str, Any]) -> dict[str, Any]:
    """Rotary embeddings of a head, with their angles spread over time, height and width."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, **settings.get("rope_parameters", {})}
    size = settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"]
    share = rope.get("partial_rotary_factor", settings.get("partial_rotary_factor"))
    if share is None:
        share = 1.0
        if family.rotary_percent is not None:  # a quarter would leave height and width no angles
            share = rope["partial_rotary_factor"] = 0.5
    pairs = int(size * share) // 2
    rope["mrope_section"] = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
    axes = getattr(family.vision, "axes", None)
    if axes is not None and axes.interleaved:  # SGLang asks the file, transformers the family
        rope["mrope_interleaved"] = True
    return rope


def takes_whole_images(family: ModelFamily) -> bool:
    """Whether the tower takes images of one size, as opposed to any number of patches."""
    return family.model_type == "gemma3"


def make_tiny_model(
    like: str, folder: Path, *, seed: int = 1, images: bool = False, **changes: Any
) -> Any:
    """Make a model of transformers' class and save it in `folder` with its tokenizer.

    Args:
        images: Make its vision tower one for pictures, and save an image processor.
        changes: Keys of config.json to override.

    Raises:
        ValueError: For an unknown `like`, or one without a vision tower with `images`.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    family = family_of(like)
    if images and not family.text_config:
        raise ValueError(f"--images: {like} has no vision tower")
    tokenizer = make_tokenizer(images=images)
    keys = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    if images:
        keys |= image_settings(family, tokenizer)
        if takes_whole_images(family):
            tokenizer.chat_template = image_template(IMAGE_START)
    of_class = class_family(family)
    settings = tiny_settings(of_class, **(keys | changes))
    model_type = family.same_as or family.model_type
    config = AutoConfig.for_model(model_type, **settings, dtype=torch.float32)
    torch.manual_seed(seed)
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    auto = AutoModelForImageTextToText if of_class.text_config else AutoModelForCausalLM
    model = auto.from_config(config, **plain).eval()
    randomize(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if images:
        save_image_processor(folder, config.vision_config.to_dict())
    weights = folder / "model.safetensors"
    tensors = published_tensors(type(model).__name__, load_file(weights))
    if of_class is not family:
        tower = family.untrained_prefixes
        tensors = {name: x for name, x in tensors.items() if not name.startswith(tower)}
    save_file(tensors, weights, metadata={"format": "pt"})
    if family.same_as is not None:
        path = folder / "config.json"
        path.write_text(json.dumps(own_config(family, json.loads(path.read_text()))))
    if count := read_hf_model(str(folder)).prediction_layers:
        add_prediction_layers(folder, family, count)
    return model


def class_family(family: ModelFamily) -> ModelFamily:
    """The family itself, or that of a model with a tower, if transformers has the text of this one
    there alone."""
    if family.same_as is None or family.text_config:
        return family
    other = family_of(family.same_as)
    return other if other.text_config else family


def own_config(family: ModelFamily, saved: dict[str, Any]) -> dict[str, Any]:
    """config.json of a family without a class in transformers, as saved by that of another one."""
    text = saved if class_family(family) is family else saved["text_config"]
    return {**text, "architectures": [family.architecture], "model_type": family.model_type}


def published_tensors(class_name: str, tensors: dict[str, Any]) -> dict[str, Any]:
    """What transformers' class saves, as the published files of the model have it."""
    pairs = (as_published(class_name, name, tensor) for name, tensor in tensors.items())
    return {name: tensor.contiguous() for name, tensor in pairs}


def add_prediction_layers(folder: Path, family: ModelFamily, count: int) -> None:
    """Add multi-token prediction layers, which transformers lacks, to a saved model. They are like
    its last layer with attention."""
    import torch
    from safetensors.torch import load_file, save_file

    from slime_like.weights.mappings import Sizes

    names = family.prediction
    path = folder / "model.safetensors"
    assert names is not None
    tensors = load_file(path)
    hf = read_hf_model(str(folder))
    layers = hf.transformer["num_layers"]
    starts = [f"{names.layers}.".format(layer=n) for n in range(layers)]
    starts = [s for s in starts if any(name.startswith(f"{s}self_attn") for name in tensors)]
    # with sparse attention, choose a layer with an indexer
    counts = [sum(name.startswith(s) for name in tensors) for s in starts]
    like = [s for s, n in zip(starts, counts, strict=True) if n == max(counts)][-1]
    own = {name.removeprefix(like): x for name, x in tensors.items() if name.startswith(like)}
    own_sizes = Sizes(hf.transformer["hidden_size"], 0, 0, 0, 0, 0)
    for number in range(count):
        layer = number + layers * names.after_the_last
        start = f"{names.layer}.".format(layer=layer)
        shapes = {start + name: (*x.shape,) for name, x in own.items()}
        for mapping in names.parameters.values():
            shapes |= mapping.at(layer).hf_shapes(own_sizes)
        tensors |= {
            name: (0.9 if len(s) == 1 else 0.0) + 0.1 * torch.randn(s) for name, s in shapes.items()
        }
        tensors |= {
            copy.format(layer=layer): tensors[name].clone() for name, copy in names.copies.items()
        }
    save_file(tensors, path, metadata={"format": "pt"})


def randomize(model: Any) -> None:
    """Randomise parameters that are initialised to ones or zeros (norms, biases, router
    corrections, scalars of layers), so that tests notice if two are swapped. Router logits are no
    larger than those of a trained model."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):  # faster decays would leave little but rounding errors
                parameter.copy_(0.3 * torch.randn_like(parameter) - 2.0)
            elif name.endswith("_hc.fn") or name.endswith(
                "ple.conv1d.weight"
            ):  # weights of residual streams, by the token
                parameter.copy_(0.3 * torch.randn_like(parameter))
            elif name.endswith("_compress_gate"):
                parameter.copy_(0.1 * torch.randn_like(parameter))
            elif name.endswith(("hc_head.hc_fn", "compressor.gate_proj.weight")):
                parameter.copy_(0.3 * torch.randn_like(parameter))
            elif parameter.dim() == 1 or name.endswith(("_bias", "_compress_ape")):
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif name.endswith(("gate.weight", "mm_input_projection_weight")):
                parameter.copy_(0.3 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "feed_forward.expert_bias")):
                buffer.copy_(0.2 * torch.randn_like(buffer))
            elif name.endswith("tid2eid"):  # distinct experts of each token
                order = torch.rand(len(buffer), model.config.n_routed_experts).argsort(1)
                buffer.copy_(order[:, : buffer.size(1)])
            elif name.endswith("layer_scalar"):
                buffer.copy_(1.0 + 0.3 * torch.rand_like(buffer))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--like", required=True, metavar="NAME")
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--images", action="store_true", help="with an image processor and a tower for pictures"
    )
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=JSON", help="keys of config.json"
    )
    parser.add_argument("--import-modules", nargs="*", default=[], help="families of your own")
    args = parser.parse_args()
    for module in args.import_modules:
        importlib.import_module(module)
    try:
        changes = {key: json.loads(value) for key, _, value in (s.partition("=") for s in args.set)}
        model = make_tiny_model(
            args.like, args.output_dir, seed=args.seed, images=args.images, **changes
        )
    except ValueError as error:
        parser.error(str(error))
    print(f"{args.output_dir}: {type(model).__name__}, {model.num_parameters():,} parameters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
