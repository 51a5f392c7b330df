"""Rules about multi-token prediction layers."""

from __future__ import annotations

from arguments.hf.model import read_hf_model
from arguments.rules.base import Settings, problem
from slime_like.config import ConfigError, Problem


def check_mtp_layers(s: Settings) -> list[Problem]:
    """--mtp-num-layers agrees with the checkpoint."""
    count = s.gpt.mtp_num_layers
    folder = s.model.hf_checkpoint
    if count is None or folder is None:
        return []
    try:
        model = read_hf_model(folder)
    except ConfigError:  # reported where the model is read
        return []
    layers = model.prediction_layers
    if layers == count:
        return []
    if layers:
        message = f"--hf-checkpoint has {layers} MTP layers; legal value: {layers}"
    else:
        message = f"--hf-checkpoint ({model.architecture}) has no trainable MTP layers; remove it"
    return problem("mtp_num_layers", count, message)
