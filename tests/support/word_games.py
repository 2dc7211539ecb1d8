"""What TextArena's word games look up, with one word alone: nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

WORD = "crane"
_WHERE: list[Path] = []  # nltk reads a list once in a process, and games keep what it has read


def one_word(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``nltk`` find a list of words, and a tagger that knows that its word is a noun, in a directory."""
    nltk: Any = pytest.importorskip("nltk")
    if not _WHERE:
        _write(directory)
        _WHERE.append(directory)
    monkeypatch.setattr(nltk, "download", lambda *names, **options: True)
    monkeypatch.setattr(nltk.data, "path", [str(_WHERE[0])])


def _write(directory: Path) -> None:
    words, tagger = directory / "corpora" / "words", directory / "taggers" / "averaged_perceptron_tagger_eng"
    words.mkdir(parents=True)
    tagger.mkdir(parents=True)
    for name in ("en", "en-basic", "README"):
        (words / name).write_text(f"{WORD}\n")
    for part, value in {"weights": {}, "tagdict": {WORD: "NN", "test": "NN"}, "classes": ["NN"]}.items():
        (tagger / f"averaged_perceptron_tagger_eng.{part}.json").write_text(json.dumps(value))
