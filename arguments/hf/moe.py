"""Which layers of a network are MoE layers, in terms of megatron-core's `moe_layer_freq`."""

from __future__ import annotations


def layer_pattern(pattern: str) -> int | list[int]:
    """Parse --moe-layer-freq as Megatron-LM does: "2", or a list expression with + and *, e.g.
    "[0]*3+[1]*45".

    Raises ValueError for anything else.
    """
    legal = (
        'must be a number, or a list of 0 (dense) and 1 (experts) as "[1,0,1]" or "[0]*3+[1]*45"'
    )
    total: list[int] = []
    text = pattern.replace(" ", "").removeprefix("(").removesuffix(")")
    if text.isdigit() and int(text) > 0:
        return int(text)
    for term in text.split("+"):
        part, star, times = term.partition("*")
        part = part.removeprefix("(")
        inner = part.removeprefix("[").removesuffix("]").split(",")
        if (
            not (part.startswith("[") and part.endswith("]"))
            or not set(inner) <= {"0", "1"}
            or (star and not times.isdigit())
        ):
            raise ValueError(legal)
        total += [int(digit) for digit in inner] * (int(times) if star else 1)
    return 1 if all(total) else total


def moe_layers(freq: int | list[int] | None, num_layers: int) -> list[bool]:
    """Whether each layer is an MoE layer. freq: megatron-core's `moe_layer_freq`; None for a dense
    model."""
    if freq is None:
        return [False] * num_layers
    if isinstance(freq, int):
        return [layer % freq == 0 for layer in range(num_layers)]
    return [bool(mark) for mark in freq]
