"""Verifiable instructions, slime's ``ifbench``: 1 if the response follows all of them, otherwise 0,
in the strict mode of IFEval (Zhou et al. 2023, arXiv 2311.07911) and IFBench (Pyatkin et al. 2025,
arXiv 2507.02833).

The verifiers are from the Allen Institute's package ``ifbench``. Its NLTK data, which its first
import downloads, must be in the package's folder, the only one that a confined worker can read.

Metadata, as in the data sets of both: ``instruction_id_list``, ``kwargs`` (an object for each
instruction, or one for all) and ``prompt_text``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

NLTK_DATA = ("tokenizers/punkt_tab", "corpora/stopwords", "taggers/averaged_perceptron_tagger_eng")


def prepare() -> None:
    """Import the verifiers. Raises RuntimeError if their data is missing."""
    _verifiers()
    import nltk

    for name in NLTK_DATA:
        try:
            nltk.data.find(name)
        except LookupError as error:
            raise RuntimeError(
                f"--rm-type ifbench: NLTK's {name} is not in the folder of the package ifbench; "
                'fetch it once, with a network: python -c "import ifbench"'
            ) from error


def problem(label: object, metadata: Mapping[str, object]) -> str | None:
    """Why no response to this row can be scored, or None."""
    ids = metadata.get("instruction_id_list")
    kwargs = metadata.get("kwargs")
    if not isinstance(ids, list) or not any(_name(value) for value in ids):
        return "the metadata has no instruction_id_list, which --rm-type ifbench verifies"
    if not (kwargs is None or isinstance(kwargs, list | Mapping)):
        return f"the metadata's kwargs is {type(kwargs).__name__}, must be a list of objects"
    return None


def score(response: str, label: Any, metadata: Mapping[str, Any]) -> float:
    """1 if the response follows all instructions, otherwise 0; the label is unused. Raises
    ValueError for an instruction that the package does not know."""
    names = [name for value in metadata["instruction_id_list"] if (name := _name(value))]
    settings = _settings(metadata.get("kwargs"), len(names))
    unknown = [name for name in names if name not in _verifiers()]
    if unknown:
        raise ValueError(f"ifbench has no instruction {unknown[0]!r}")
    prompt = str(metadata.get("prompt_text") or "")
    if not response.strip():
        return 0.0
    return float(all(_follows(response, *each, prompt) for each in zip(names, settings)))


def _follows(response: str, name: str, settings: Mapping[str, object], prompt: str) -> bool:
    verifier = _verifiers()[name](name)
    verifier.build_description(**settings)
    if "prompt" in (verifier.get_instruction_args() or ()):
        verifier.build_description(prompt=prompt)
    return bool(verifier.check_following(response))


def _settings(kwargs: object, count: int) -> list[dict[str, object]]:
    """Settings of each instruction, without None values. Like in slime, a single object applies to
    all instructions, and the last object of a short list to the remaining ones."""
    settings = []
    for value in kwargs if isinstance(kwargs, list) else [kwargs]:
        items = value.items() if isinstance(value, Mapping) else ()
        settings.append({name: setting for name, setting in items if setting is not None})
    settings = settings or [{}]
    return (settings + [settings[-1]] * (count - len(settings)))[:count]


def _name(value: object) -> str:
    return "" if value is None else str(value).strip()


@functools.cache
def _verifiers() -> Mapping[str, Any]:
    """Verifier classes by instruction."""
    from ifbench.instructions_registry import INSTRUCTION_DICT

    verifiers: Mapping[str, Any] = INSTRUCTION_DICT
    return verifiers
