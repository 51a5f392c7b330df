"""Verifiable instructions, slime's ``ifbench``: 1 if the response follows all of them, otherwise 0,
in the strict mode of IFEval (Zhou et al. 2023, arXiv 2311.07911) and IFBench (Pyatkin et al. 2025,
arXiv 2507.02833), or in their loose one.

The verifiers are from the Allen Institute's package ``ifbench``, or from ``if-verifiable``; each
has those of both sets. NLTK's data must be where a confined worker can read it: in the folder of
``ifbench``, whose first import downloads it, or beside the package nltk.

Metadata, as in the data sets of both: ``instruction_id_list``, ``kwargs`` (an object for each
instruction, or one for all) and ``prompt_text``; with ``loose``, an instruction is also followed if
the response is without its first line, its last line, or its asterisks.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_BOTH = ("if_verifiable.ifeval", "if_verifiable.ifbench")
NLTK_DATA = ("tokenizers/punkt_tab", "corpora/stopwords", "taggers/averaged_perceptron_tagger_eng")


def prepare() -> None:
    """Import the verifiers. Raises RuntimeError if their data is missing."""
    import nltk

    folder = str(Path(nltk.__file__).parents[1] / "nltk_data")
    if folder not in nltk.data.path:
        nltk.data.path.append(folder)
    if _modules() == _BOTH:
        names = [each.rpartition("/")[2] for each in NLTK_DATA]
        _require_data(f"import nltk; nltk.download({names}, {folder!r})")  # or the import tries to
    _verifiers()
    _require_data("import ifbench")


def _require_data(remedy: str) -> None:
    import nltk

    for name in NLTK_DATA:
        try:
            nltk.data.find(name)
        except LookupError as error:
            raise RuntimeError(
                f"--rm-type ifbench: NLTK's {name} is not where graders can read it; "
                f'fetch it once, with a network: python -c "{remedy}"'
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
    """1 if the response, after the last ``</think>``, follows all instructions, otherwise 0; the
    label is unused. Raises ValueError for an instruction that the package does not know."""
    names = [name for value in metadata["instruction_id_list"] if (name := _name(value))]
    settings = _settings(metadata.get("kwargs"), len(names))
    unknown = [name for name in names if name not in _verifiers()]
    if unknown:
        raise ValueError(f"ifbench has no instruction {unknown[0]!r}")
    prompt = str(metadata.get("prompt_text") or "")
    _, thought, answer = response.rpartition("</think>")
    answer = answer.strip() if thought else answer
    texts = [answer, *(_loosened(answer) if metadata.get("loose") else ())]
    texts = [text for text in texts if text.strip()]
    return float(
        all(any(_follows(text, *each, prompt) for text in texts) for each in zip(names, settings))
    )


def _loosened(text: str) -> list[str]:
    """The text without its first line, its last one or both, and all four without asterisks."""
    lines = text.split("\n")
    parts = [text, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return [*parts[1:], *(part.replace("*", "") for part in parts)]


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


def _modules() -> tuple[str, ...]:
    """The modules with verifiers: of the Allen Institute's package, unless only the other is
    there."""
    has = [importlib.util.find_spec(name) is not None for name in ("ifbench", "if_verifiable")]
    return _BOTH if has == [False, True] else ("ifbench",)


@functools.cache
def _verifiers() -> Mapping[str, Any]:
    """Verifier classes by instruction."""
    found: dict[str, Any] = {}
    for name in _modules():
        found |= importlib.import_module(f"{name}.instructions_registry").INSTRUCTION_DICT
    return found
