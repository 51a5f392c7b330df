"""Text from outside, made fit for logs."""

from __future__ import annotations

import pytest

from slime_like.text import (
    LONGEST,
    clean,
    duration,
    mask_argv,
    mask_settings,
    mask_url,
    printable,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\nfake line: ok\r\n\tb", "a fake line: ok b"),
        ("\x1b[2J\x1b]0;title\x07red", r"\x1b[2J\x1b]0;title\x07red"),
        ("half \ud800 of a pair", r"half \ud800 of a pair"),
        ("turned\u202e round", r"turned\u202e round"),
        ("at https://me:secret@host:1/x?k=1 and http://token@h",
            "at https://***@host:1/x?k=1 and http://***@h"),
        ("mail me@example.org, åß 漢字", "mail me@example.org, åß 漢字"),
        (KeyError("x"), "'x'"),
    ],
)  # fmt: skip
def test_clean(text: object, expected: str) -> None:
    assert clean(text) == expected
    clean(text).encode()


def test_clean_is_bounded() -> None:
    assert len(clean("x" * 10**6)) == LONGEST and clean("x" * 10**6).endswith("...")


def test_lines_stay_in_what_is_printed() -> None:
    assert printable("a\n\tb\x1b[0m\r") == "a\n\tb\\x1b[0m\\r"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://h/score?api_key=SECRET&b=1", "https://h/score?api_key=***&b=***"),
        ("https://me:SEC/RET@h/x", "https://***@h/x"),
        ("a note of https://h/x?k=SECRET, once", "a note of https://h/x?k=*** once"),
        ("http://h:80/v1@main", "http://h:80/v1@main"),
        ("sqlite:///runs/mlflow.db", "sqlite:///runs/mlflow.db"),
    ],
)
def test_settings_hide_queries_and_passwords(text: str, expected: str) -> None:
    assert mask_settings(text) == expected


def test_credentials() -> None:
    assert mask_url("https://me:secret@host:80/score?key=abc&b=1") == (
        "https://***@host:80/score?key=***&b=***"
    )
    assert mask_url("http://[broken") == "***"
    settings = {"argv": ["--rm-url", "http://a:b@h/x"], "n": 1, "pair": ("x", None)}
    assert mask_settings(settings) == {
        "argv": ["--rm-url", "http://***@h/x"],
        "n": 1,
        "pair": ("x", None),
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("env OPENAI_API_KEY=sk-1 agent.py --n 3", "env OPENAI_API_KEY=*** agent.py --n 3"),
        ("env A=1 HF_TOKEN='a b' X_SECRET=\"c d\" run", "env A=1 HF_TOKEN=*** X_SECRET=*** run"),
        ("agent --api-key sk-1 --token=t --password p", "agent --api-key *** --token=*** --password ***"),
        ("AWS_ACCESS_KEY_ID=a DB_PASSWORD=b KEY=c", "AWS_ACCESS_KEY_ID=*** DB_PASSWORD=*** KEY=***"),
        ("agent --db postgres://me:pw@h/x", "agent --db postgres://***@h/x"),
        *[(text, text) for text in ("--max-tokens-per-gpu 10", "--input-key=prompt", "label_key=a", "MONKEY=1")],
    ],
)  # fmt: skip
def test_secrets_of_a_command_are_hidden(text: str, expected: str) -> None:
    assert mask_settings(text) == expected
    assert mask_argv(["--agent-command", text]) == ["--agent-command", expected]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.4213, "0.421 s"),
        (60, "1 min"),
        (96.3, "1 min 36 s"),
        (119.7, "2 min"),
        (7500, "2 h 5 min"),
        (3.2 * 86_400, "3 d 5 h"),
    ],
)
def test_durations_are_as_people_say_them(seconds: float, expected: str) -> None:
    assert duration(seconds) == expected
