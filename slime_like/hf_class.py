"""Which of transformers' classes a model's folder is loaded with, and how it is made."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig


_ONE_AT_A_TIME = threading.Lock()


@contextmanager
def uninitialised_weights() -> Iterator[None]:
    """Models made within have weights without values, which are loaded later. transformers replaces
    functions of the whole process for it: of two threads that did so at a time, the last one would
    restore the replacements, and no later model were initialised or tied."""
    from transformers.initialization import no_init_weights

    with _ONE_AT_A_TIME, no_init_weights():
        yield


def class_for_text(config: PretrainedConfig) -> Any:
    """AutoModelForCausalLM, or AutoModelForImageTextToText for a model with a vision tower of whose
    text transformers has no class."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    if type(config) in AutoModelForImageTextToText._model_mapping and (
        type(config) not in AutoModelForCausalLM._model_mapping
    ):
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def class_for_images(config: PretrainedConfig) -> Any:
    """AutoModelForImageTextToText. Raises ValueError if transformers' class of the model takes no
    images."""
    from transformers import AutoModelForImageTextToText

    if type(config) not in AutoModelForImageTextToText._model_mapping:
        raise ValueError(
            f"--multimodal-keys: transformers has no class of {config.model_type} that takes images"
        )
    return AutoModelForImageTextToText
