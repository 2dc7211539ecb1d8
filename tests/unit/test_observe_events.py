"""Event names are an interface: unique, of one form, and each with a line about it."""

import ast
import re
from pathlib import Path

from pipeline.observe import events

NAMES = {name: value for name, value in vars(events).items() if name.isupper()}


def test_names_are_unique() -> None:
    assert len(set(NAMES.values())) == len(NAMES) > 20


def test_names_are_noun_dot_verb_and_their_constants_say_the_same() -> None:
    for constant, name in NAMES.items():
        assert re.fullmatch(r"[a-z]+\.[a-z]+(_[a-z]+)*", name), name
        assert constant == name.replace(".", "_").upper()


def test_each_name_is_followed_by_one_line_with_its_level() -> None:
    body = ast.parse(Path(events.__file__).read_text()).body
    for statement, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign):
            assert isinstance(after, ast.Expr)
            assert isinstance(after.value, ast.Constant)
            text = str(after.value.value)
            assert re.match(r"(debug|info|warning|error)( when \w+, else \w+)?\. [A-Z].*\.$", text), text


def test_each_name_is_emitted_somewhere() -> None:
    package = Path(events.__file__).parents[1]
    text = "".join(path.read_text() for path in package.rglob("*.py") if path.name != "events.py")
    assert [name for name in NAMES if not re.search(rf"\b{name}\b", text)] == []
