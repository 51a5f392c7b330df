"""Rules about multi-token prediction layers."""

from __future__ import annotations

from arguments.hf.model import read_hf_model
from arguments.rules.base import Settings, problem
from slime_like.config import ConfigError, Problem


def prediction_layers_are_there(s: Settings) -> list[Problem]:
    """--mtp-num-layers agrees with the checkpoint."""
    count, folder = s.gpt.mtp_num_layers, s.model.hf_checkpoint
    if count is None or folder is None:
        return []
    try:
        model = read_hf_model(folder)
    except ConfigError:  # reported where the model is read
        return []
    there = model.prediction_layers
    if there == count:
        return []
    words = (
        f"the checkpoint has {there} layers of multi-token prediction; legal value: {there}"
        if there
        else f"the checkpoint ({model.architecture}) has no layer of multi-token prediction that can be trained; leave it out"
    )
    return problem("mtp_num_layers", count, words)
