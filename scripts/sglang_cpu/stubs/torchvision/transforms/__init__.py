from enum import Enum

from torchvision import Missing


class InterpolationMode(Enum):
    """SGLang uses members of it as default values."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def __getattr__(name: str) -> Missing:
    if name.startswith("__"):
        raise AttributeError(name)
    return Missing()


from torchvision.transforms import functional  # noqa: E402, F401
