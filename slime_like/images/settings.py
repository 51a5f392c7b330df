"""How a model sees images: what its family says of the tower, and what one config.json says."""

from __future__ import annotations

from dataclasses import dataclass, field

from slime_like.images.rows import PlaceholderRule


@dataclass(frozen=True, slots=True)
class RotaryAxes:
    """A rotary embedding of three axes (time, height, width; Qwen2-VL, arXiv 2409.12191)."""

    # number of a head's angle pairs of each axis, if a file does not say; none: it has to
    sections: tuple[int, ...] = ()
    # the axes take turns, time, height, width, time, ..., as long as they last (Qwen3-VL, arXiv
    # 2511.21631, "interleaved MRoPE"); otherwise each has its angles in one block
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """The vision tower of a family: the modules of transformers' own class that its
    `get_image_features` needs."""

    # attributes of transformers' class, with the prefix of their tensors in the file
    modules: tuple[tuple[str, str], ...]
    image_token: str = "image_token_id"  # key of config.json: the placeholder of one feature
    axes: RotaryAxes | None = None
    features: str | None = None  # key of config.json, of towers that make as many of every image
    both_directions: bool = False  # see `PlaceholderRule`
    # key of `vision_config`: a list with one entry for each of the first text layers whose output
    # gets further features (DeepStack, arXiv 2406.04334)
    deepstack: str | None = None


@dataclass(frozen=True, slots=True)
class VisionSettings:
    """The tower of one model."""

    family: VisionFamily
    config: str = field(repr=False)  # config.json
    rule: PlaceholderRule
    sections: tuple[int, ...]  # see `RotaryAxes`; none without axes
    deepstack_layers: int
    trained: bool = False
    learning_rate: float | None = None  # of a trained tower, if it has its own
