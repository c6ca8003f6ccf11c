"""Imports go one way: executor -> octotune -> simulator; and what is heavy is loaded on use."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("simulator", "octotune", "executor")
MAY_IMPORT = {
    "simulator": {"simulator"},
    "octotune": {"octotune", "simulator"},
    "executor": {"executor", "octotune", "simulator"},
}
SOLVERS_AND_FILES = {"ortools", "optuna", "yaml", "click", "rich", "matplotlib"}
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def imports(tree: ast.AST) -> list[tuple[str, ast.stmt]]:
    """The top-level packages that a module imports anywhere, with the statements."""
    found: list[tuple[str, ast.stmt]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(name.name.partition(".")[0], node) for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            found.append(((node.module or "").partition(".")[0], node))
    return found


def at_import_time(tree: ast.Module) -> set[ast.stmt]:
    """The statements that run when the module is imported: none inside functions, and none that
    only type checkers see."""
    found: set[ast.stmt] = set()

    def visit(body: list[ast.stmt]) -> None:
        for node in body:
            found.add(node)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                visit(node.orelse)
                continue
            for part in ("body", "orelse", "finalbody"):
                visit(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                visit(handler.body)

    visit(tree.body)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_in_one_direction(path):
    package = path.relative_to(ROOT).parts[0]
    tree = ast.parse(path.read_text(), str(path))
    loaded = at_import_time(tree)
    for name, node in imports(tree):
        place = f"{path.relative_to(ROOT)}:{node.lineno}"
        if name in PACKAGES:
            assert name in MAY_IMPORT[package], f"{place} imports {name}"
        assert name not in ("tests", "benchmarks"), f"{place} imports {name}"
        if package == "simulator":
            assert name != "torch", f"{place} imports torch"
            assert name not in SOLVERS_AND_FILES, f"{place} imports {name}"
        if package == "octotune":
            assert not (name == "torch" and node in loaded), f"{place} imports torch when loaded"


def test_the_rule_sees_through_functions_and_type_checking():
    tree = ast.parse(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import torch\n"
        "else:\n    import a\n"
        "def f():\n    import torch\n"
        "class C:\n    import b\n"
        "try:\n    import c\nexcept ImportError:\n    import d\n"
    )
    loaded = at_import_time(tree)
    names = {name for name, node in imports(tree) if node in loaded}
    assert names == {"typing", "a", "b", "c", "d"}
    assert [name for name, node in imports(tree) if node not in loaded] == ["torch", "torch"]


HEAVY = ("torch", "ortools", "numba", "networkx", "matplotlib", "optuna")


def modules_after(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter has loaded after running some code."""
    printed = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return {name.partition(".")[0] for name in printed.splitlines()[-1].split()}


def test_importing_octotune_loads_nothing_heavy():
    assert not modules_after("import octotune") & set(HEAVY)


def test_reading_files_loads_nothing_heavy():
    code = "import octotune; octotune.read_workload('llama3-8b'); octotune.read_cluster('h100x8')"
    loaded = modules_after(code)
    assert "msgspec" in loaded
    assert not loaded & set(HEAVY)


def test_checking_a_plan_as_json_loads_what_it_needs_only(tmp_path):
    from tests import valid_files

    path = valid_files.write(tmp_path, valid_files.plan())
    loaded = modules_after(
        f"from octotune.__main__ import main; assert main(['check', '--json', {str(path)!r}]) == 0"
    )
    assert "numba" in loaded
    assert not loaded & {"torch", "ortools", "networkx", "matplotlib", "optuna", "rich"}


def test_planning_from_files_never_imports_torch(tmp_path):
    from tests import valid_files

    workload = valid_files.write(tmp_path, valid_files.workload(), "workload.json")
    arguments = ["tune", "--workload", str(workload), "--cluster", "2", "--microbatches", "2"]
    arguments += ["--time-limit", "0.5", "-o", str(tmp_path / "plan.json")]
    loaded = modules_after(f"from octotune.__main__ import main; assert main({arguments!r}) == 0")
    assert "octotune" in loaded
    assert "torch" not in loaded
    assert (tmp_path / "plan.json").exists()
