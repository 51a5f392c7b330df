"""A user's own reward function: where it is found, and its settings."""

from __future__ import annotations

import sys

import pytest

from slime_like.rewards.custom import RewardArgs, load_function


def test_function_from_a_file_and_a_module(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("value = 3\ndef score(args, sample):\n    return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_function("mine.score")(None, None) == 1.0
    by_file = load_function(f"{tmp_path}/mine.py:score")
    assert by_file(None, None) == 1.0
    assert load_function(f"{tmp_path}/mine.py:score") is by_file
    sys.modules.pop("mine")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("score", "must be module.function or path/to/file.py:function"),
        ("no_such_module.score", "cannot import 'no_such_module'"),
        ("json.scores", "'json' has no 'scores'; its functions: .*loads"),
        ("{tmp}/none.py:score", "no such file"),
        ("{tmp}/broken.py:score", "cannot import .*broken.py.*SyntaxError"),
        ("{tmp}/raises.py:score", "ZeroDivisionError"),
        ("{tmp}/fine.py:number", "'number' is a int, not a function"),
        ("{tmp}/fine.py:missing", "has no 'missing'; its functions: score"),
    ],
)
def test_paths_that_are_no_function(tmp_path, path, words):
    (tmp_path / "broken.py").write_text("def score(:\n")
    (tmp_path / "raises.py").write_text("1 / 0\n")
    (tmp_path / "fine.py").write_text("number = 3\ndef score(args, sample):\n    return 1.0\n")
    with pytest.raises(ValueError, match=f"--custom-rm-path .*{words}"):
        load_function(path.format(tmp=tmp_path))


def test_args_are_read_only():
    with pytest.raises(AttributeError):
        RewardArgs().reward_key = "x"  # type: ignore[misc]
