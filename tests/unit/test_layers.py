"""The layout: who may import whom, what an import loads, and how large things may grow."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "pipeline"

# A module imports lower numbers and its own folder. Longest prefix counts.
LEVELS = {
    "pipeline.errors": 0,
    "pipeline.records": 0,
    "pipeline.clock": 0,
    "pipeline.connections": 0,
    "pipeline.intervals": 0,
    "pipeline.locations": 0,
    "pipeline.names": 0,
    "pipeline.waiting": 0,
    "pipeline.forking": 0,
    "pipeline.config": 1,
    "pipeline.interfaces": 1,
    "pipeline.observe": 1,
    "pipeline.store": 1,
    "pipeline.supervisor": 1,
    "pipeline.task": 2,
    "pipeline.control": 2,
    "pipeline.sampler": 2,
    "pipeline.ledger": 2,
    "pipeline.buffer": 2,
    "pipeline.checkpoint": 3,
    "pipeline.runner": 3,
    "pipeline.engines": 3,
    "pipeline.distributed": 3,
    "pipeline.conversation": 4,
    "pipeline.wiring": 5,
    "pipeline.pipeline": 6,
    "pipeline.replay": 6,
    "pipeline.serve": 6,
    "pipeline.sync_form": 7,
    "pipeline.tools": 7,
    "pipeline.testing": 8,
    "pipeline.cli": 8,
    "pipeline": 9,
}
# These meet only in interfaces.py.
STRANGERS = ("pipeline.sampler", "pipeline.buffer", "pipeline.runner", "pipeline.engines")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def component(module: str) -> str:
    return next(
        prefix
        for prefix in sorted(LEVELS, key=len, reverse=True)
        if module == prefix or module.startswith(prefix + ".")
    )


def imports(tree: ast.AST, *, run_time_only: bool) -> list[str]:
    """Modules that a file imports; those under ``if TYPE_CHECKING`` are no dependency at run time."""
    skipped: set[int] = set()
    if run_time_only:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
                skipped |= {id(child) for child in ast.walk(node)}
    found = []
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return found


SOURCES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_a_module_imports_lower_levels_and_its_own_folder(path: Path) -> None:
    module = module_name(path)
    own = component(module)
    lazy = ("pipeline.pipeline", "pipeline.sync_form", "pipeline.serve")  # they know each other, inside functions
    for target in imports(ast.parse(path.read_text()), run_time_only=True):
        if not target.startswith("pipeline.") or own == "pipeline":
            continue
        other = component(target)
        if other == own or (own in lazy and other in lazy):
            continue
        assert LEVELS[other] < LEVELS[own], f"{module} ({LEVELS[own]}) imports {target} ({LEVELS[other]})"


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_sampler_buffer_runner_and_engines_meet_only_in_interfaces(path: Path) -> None:
    own = component(module_name(path))
    if own not in STRANGERS:
        return
    for target in imports(ast.parse(path.read_text()), run_time_only=True):
        other = next((each for each in STRANGERS if target.startswith(each)), own)
        assert other == own, f"{module_name(path)} imports {target}"


def test_the_engine_never_imports_the_tasks() -> None:
    for path in SOURCES:
        for target in imports(ast.parse(path.read_text()), run_time_only=False):
            assert target.split(".")[0] not in ("tasks", "forebay", "tests", "examples"), path


def test_ray_is_imported_where_runners_go_to_it_and_where_trainers_come_from_it_alone() -> None:
    """An engine and serving are of different levels, so each has a module of its own for it."""
    found = {
        module_name(path)
        for path in SOURCES
        for target in imports(ast.parse(path.read_text()), run_time_only=False)
        if target.split(".")[0] == "ray"
    }
    assert found == {"pipeline.engines.ray_engine", "pipeline.serve.ray_gate"}


def test_importing_the_package_loads_nothing_that_is_optional() -> None:
    # torch itself loads some of them; what is asked is what this project adds.
    script = (
        "import sys, torch; before = set(sys.modules)\n"
        "import pipeline, tasks, forebay; print(*sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
    )
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    names = set(loaded.stdout.split())
    assert not names & {"ray", "gymnasium", "numba", "tqdm", "matplotlib", "openai", "trio", "yaml"}


@pytest.mark.parametrize("path", SOURCES + sorted((ROOT / "tasks").rglob("*.py")), ids=module_name)
def test_modules_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 500, f"{path.name}: over 500 lines; a second room, perhaps?"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < 50, f"{path.name}: {node.name} is too long"


def test_no_test_folder_hides_a_package() -> None:
    folders = {path.name for path in (ROOT / "tests").rglob("*") if path.is_dir()}
    assert not folders & {"pipeline", "tasks", "forebay"}


def test_nothing_unpickles() -> None:
    for path in [*SOURCES, *(ROOT / "tasks").rglob("*.py"), *(ROOT / "forebay").rglob("*.py")]:
        for target in imports(ast.parse(path.read_text()), run_time_only=False):
            assert target.split(".")[0] not in ("pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"), path


def test_public_names_are_explicit_and_the_thin_module_has_them_all() -> None:
    import forebay
    import pipeline
    import tasks

    for package in (pipeline, tasks):
        tree = ast.parse(Path(str(package.__file__)).read_text())
        names = [alias for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names]
        for alias in names:
            if alias.name == "annotations":
                continue
            assert alias.asname == alias.name, f"{package.__name__}: write `import {alias.name} as {alias.name}`"
            assert getattr(forebay, alias.name) is getattr(package, alias.name)
