"""slime_like: reinforcement-learning training backend for large language models on Megatron-core.

The names in `__all__` are the public API; everything else may change. They are imported on first
access, so that `import slime_like` loads neither torch nor
megatron-core. Call `megatron_patches.apply()` before the first use of `MegatronBackend` or
`process_groups`.
"""

from __future__ import annotations

import importlib
import sys

if sys.argv[:1] == ["-m"]:  # python -m puts the working folder before the library: a logging.py or
    sys.path.append(sys.path.pop(0))  # json.py there would take the place of Python's own

__version__ = "0.1.0"

_HOMES = {
    "parse_args": "arguments.parse",
    "make_config": "arguments.parse",
    "RunConfig": "arguments.run_config",
    "ConfigError": "slime_like.config",
    "RunError": "slime_like.errors",
    "Prompt": "slime_like.types",
    "Sample": "slime_like.types",
    "SampleGroup": "slime_like.samples.groups",
    "SampleStatus": "slime_like.types",
    "TrainBatch": "slime_like.types",
    "TrainSample": "slime_like.types",
    "StepResult": "slime_like.types",
    "advantage_estimators": "slime_like.advantages",
    "compute_advantages": "slime_like.advantages",
    "policy_losses": "slime_like.losses",
    "compute_policy_loss": "slime_like.losses",
    "compute_off_policy_correction": "slime_like.losses",
    "kl_estimate": "slime_like.losses",
    "reduction_weights": "slime_like.losses",
    "token_weights": "slime_like.losses",
    "value_loss": "slime_like.losses",
    "GenerateOutput": "slime_like.engines.base",
    "GenerateRequest": "slime_like.engines.base",
    "RolloutEngine": "slime_like.engines.base",
    "SamplingParams": "slime_like.engines.base",
    "LocalEngine": "slime_like.engines.local.engine",
    "MegatronBackend": "slime_like.megatron.backend",
    "ParallelLayout": "slime_like.megatron.parallel_layout",
    "process_groups": "slime_like.megatron.init",
    "Trainer": "slime_like.trainer.trainer",
    "FinishedRun": "slime_like.trainer.python_api",
    "train": "slime_like.trainer.python_api",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
