"""``import slime...`` in user functions, where slime is not installed: the names that such
functions import come from `slime_like.compat.slime`."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

_API = "slime_like.compat.slime.api"
_NAMES: Mapping[str, str] = {
    "slime.rollout.sglang_rollout": "GenerateState generate generate_and_rm generate_and_rm_group "
    "generate_rollout eval_rollout get_model_url",
    "slime.rollout.base_types": "RolloutFnTrainOutput RolloutFnEvalOutput",
    "slime.rollout.data_source": "DataSource RolloutDataSource RolloutDataSourceWithBuffer "
    "pop_first",
    "slime.rollout.rm_hub": "async_rm batched_async_rm",
    "slime.rollout.filter_hub.base_types": "DynamicFilterOutput",
    "slime.rollout.filter_hub.dynamic_sampling_filters": "check_reward_nonzero_std",
    "slime.utils.http_utils": "post",
    "slime.utils.async_utils": "run",
    "slime.utils.processing_utils": "build_processor_kwargs encode_image_for_rollout_engine",
}
# a module without torch, since the processes of rewards import it
_SAMPLE = {"Sample": ("slime_like.samples.slime_sample", "SlimeSample")}
MODULES: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "slime.utils.types": _SAMPLE,
    **{module: {n: (_API, n) for n in names.split()} for module, names in _NAMES.items()},
}
_PACKAGES = {module.rsplit(".", depth)[0] for module in MODULES for depth in (1, 2, 3)}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `MODULES` and their packages, after every other finder."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in MODULES and name not in _PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=name in _PACKAGES)

    def exec_module(self, module: ModuleType) -> None:
        names = MODULES.get(module.__name__, {})

        def get(name: str) -> Any:
            if name not in names:
                raise AttributeError(
                    f"{module.__name__} stands for slime_like's own names here, and has no "
                    f"{name!r}; it has: {', '.join(sorted(names)) or 'none'}"
                )
            place, own_name = names[name]
            return getattr(importlib.import_module(place), own_name)

        module.__getattr__ = get  # type: ignore[method-assign]


def provide() -> None:
    """Let ``import slime`` find these modules, unless slime is installed. Idempotent."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
