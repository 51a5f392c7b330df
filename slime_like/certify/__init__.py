"""Compares trainer, transformers and engine on the same tokens, layer by layer, and names where
they first differ and why.

The trainer's hidden states are the input of every layer of the others, so that each layer is
compared alone: what an earlier layer did wrong is not seen again, and rounding does not add up.
The reference is transformers in float64; how far the same model in the trainer's dtype is from it
is the rounding that a difference must exceed (`compare.py`). The cause is found by intervention: of
the changes of the reference that would make it compute what was observed, from another weight to
another rope base, the one that does is named (`causes.py`)."""
