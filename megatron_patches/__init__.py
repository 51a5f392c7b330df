"""Patches for released versions of megatron-core, applied by one explicit call:

    report = megatron_patches.apply()  # once per process, before building a model; idempotent
    print(report)

megatron-core assumes a CUDA device and, in places, Transformer Engine. Each patch removes one such
assumption or fixes one bug. It has its own file, which documents the target, the reason and the
affected versions, and it is applied only where its condition holds: with CUDA and Transformer
Engine, only `torch_norm_sp`, `recompute_rest`, `moe_permute`, `mla_tp_grads`, `mla_no_q_norm`,
`geglu_clamp`, `rope_thd`, `yarn_parts`, `known_shapes`, `offload_ckpt` and `safe_checkpoints`
remain. All patches verify their targets before the first one changes anything. Importing this
package imports neither torch nor megatron-core.
"""

from __future__ import annotations

import importlib

from megatron_patches.patch import Entry, Patch, Report

ORDER = (
    "jit_on_cpu",  # first: it must be the one that imports megatron.core
    "torch_on_cpu",
    "type_strings",
    "tensor_cuda",
    "rng_on_cpu",
    "torch_norm_sp",
    "recompute_no_te",
    "recompute_rest",
    "moe_no_te",
    "latent_moe_no_te",
    "moe_permute",
    "mla_no_te",
    "mla_tp_grads",
    "mla_no_q_norm",
    "geglu_clamp",
    "rope_thd",
    "yarn_parts",
    "known_shapes",
    "moe_split_sizes",
    "gloo_uneven",
    "torch_norms",
    "precision_adam",
    "offload_on_cpu",
    "torch_adam_ckpt",
    "offload_ckpt",
    "safe_checkpoints",
)

_installed: dict[str, Entry] = {}


def load_patch(name: str) -> Patch:
    """Load the patch from the file `name`; see ORDER."""
    patch = importlib.import_module(f"{__name__}.{name}").PATCH
    assert isinstance(patch, Patch)
    return patch


def apply() -> Report:
    """Install every patch whose condition holds, in order.

    Returns the installed patches (including those of earlier calls) and the skipped ones, with
    reasons. Raises RuntimeError, before changing anything, if megatron-core lacks a patch's target.
    """
    patches = {name: load_patch(name) for name in ORDER}
    due = [name for name in ORDER if name not in _installed and not patches[name].skip_reason()]
    for name in due:
        patches[name].check()
    for name in due:
        patches[name].install()
        _installed[name] = Entry(name, patches[name].condition.reason)
    skipped = [Entry(name, patches[name].skip_reason()) for name in ORDER if name not in _installed]
    return Report(
        applied=[_installed[name] for name in ORDER if name in _installed], skipped=skipped
    )


__all__ = ["ORDER", "Entry", "Patch", "Report", "apply", "load_patch"]
