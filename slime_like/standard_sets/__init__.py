"""Standard evaluation sets by name: which columns their published files have, what the prompt is,
and which reward grades it."""

from slime_like.standard_sets import choice, instructions, math, programs
from slime_like.standard_sets.base import StandardSet, standard_sets
from slime_like.standard_sets.files import located

__all__ = ["StandardSet", "choice", "instructions", "located", "math", "programs", "standard_sets"]
