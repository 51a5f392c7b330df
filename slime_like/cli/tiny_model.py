"""A tiny Qwen3 model with random weights and a character tokenizer, for the demo and new recipes.
Nothing is downloaded."""

from __future__ import annotations

import json
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast


END = "<|endoftext|>"
PAD = "<|pad|>"
UNKNOWN = "<|unknown|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
IMAGE_START = "<|vision_start|>"
IMAGE = "<|image_pad|>"
IMAGE_END = "<|vision_end|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|user|>' if m.role == 'user' else '<|assistant|>' }}"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Answers end as they do when they are sampled, so fine-tuning on conversations teaches the end.
ENDING_TEMPLATE = CHAT_TEMPLATE.replace(
    "{{ m.content }}",
    "{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}",
)


def image_template(written: str) -> str:
    """`CHAT_TEMPLATE` for contents with images. written: what it writes for an image."""
    parts = (
        "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
        f"{{% if part.type == 'image' %}}{written}"
        "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    )
    return CHAT_TEMPLATE.replace("{{ m.content }}", parts)


def make_tokenizer(*, images: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per printable ASCII character, and a few special tokens.

    images: Also those of images, which the chat template writes as Qwen's does.
    """
    special = [END, PAD, USER, ASSISTANT, UNKNOWN]
    of_images = [IMAGE_START, IMAGE, IMAGE_END] if images else []
    characters = sorted(set(string.printable) - set("\t\r\x0b\x0c"))
    return character_tokenizer(
        special + characters + of_images,
        eos_token=END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        additional_special_tokens=[USER, ASSISTANT, *of_images],
        chat_template=image_template(IMAGE_START + IMAGE + IMAGE_END) if images else CHAT_TEMPLATE,
    )


def save_image_processor(
    folder: Path, vision: Mapping[str, Any], *, min_pixels: int = 1, max_pixels: int = 2**20
) -> None:
    """Write the settings of transformers' image processor for a tower: Qwen's, which take patches,
    or SigLIP, which takes whole images.

    Args:
        folder: Of the model.
        vision: Its `vision_config`.
        min_pixels, max_pixels: Images of patches beyond them are made larger or smaller.
    """
    settings: dict[str, Any] = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    if "spatial_merge_size" in vision:
        settings |= {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": vision["patch_size"],
            "merge_size": vision["spatial_merge_size"],
            "temporal_patch_size": vision["temporal_patch_size"],
            "size": {"shortest_edge": min_pixels, "longest_edge": max_pixels},
        }
    else:
        size = vision["image_size"]
        settings |= {
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": size, "width": size},
        }
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def character_tokenizer(
    tokens: Sequence[str], *, unk_token: str, **settings: object
) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character; ids are indices in `tokens`. settings: of
    transformers' PreTrainedTokenizerFast."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unk_token))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=unk_token, **settings)


def make_model(
    tokenizer: PreTrainedTokenizerBase, *, hidden_size: int, num_layers: int, seed: int
) -> PreTrainedModel:
    """A Qwen3 model with random weights."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden_size // 4,
        max_position_embeddings=512,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        initializer_range=0.05,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = Qwen3ForCausalLM(config)
    # set afterwards, because the constructor would zero the padding token's embedding, where the
    # gradient of RMSNorm explodes if that token is ever sampled
    model.config.pad_token_id = tokenizer.pad_token_id
    return model


def save_model(
    folder: Path,
    *,
    hidden_size: int,
    num_layers: int,
    seed: int = 1,
    chat_template: str = CHAT_TEMPLATE,
) -> PreTrainedModel:
    """Save a model with its tokenizer as a Hugging Face folder."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = chat_template
    model = make_model(tokenizer, hidden_size=hidden_size, num_layers=num_layers, seed=seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model
