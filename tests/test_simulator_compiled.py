"""The stamp of a compiled kernel covers every source it is made of."""

import ast
from pathlib import Path

import pytest

from simulator import compiled

ROOT = Path(compiled.__file__).resolve().parent.parent
FILES = [
    path
    for package in ("simulator", "octotune")
    for path in sorted((ROOT / package).rglob("*.py"))
    if "@kernel" in path.read_text(encoding="utf-8") and path.name != "compiled.py"
]


def test_a_stamp_covers_inlined_kernels_constants_and_tuples_at_any_remove():
    tune = ROOT / "octotune" / "tune"
    found = compiled.sources(tune / "anneal.py")
    assert {tune / f"{name}.py" for name in ("anneal", "scheduler", "moves", "problem")} <= found
    assert ROOT / "simulator" / "actions.py" in compiled.sources(ROOT / "simulator" / "kernel.py")


def test_a_stamp_does_not_hang_on_files_from_which_nothing_is_compiled():
    found = compiled.sources(ROOT / "octotune" / "tune" / "anneal.py")
    assert not any("contract" in path.parts for path in found)


def test_a_stamp_changes_with_a_source_at_second_hand(monkeypatch, tmp_path):
    package = tmp_path / "octotune"
    package.mkdir()
    (package / "low.py").write_text("SIZE = 3\n")
    (package / "middle.py").write_text(
        "from octotune.low import SIZE\n\n@kernel\ndef inner() -> int:\n    return SIZE\n"
    )
    (package / "top.py").write_text(
        "from octotune.middle import inner\n\n@kernel\ndef outer() -> int:\n    return inner()\n"
    )
    monkeypatch.setattr(compiled, "_ROOT", tmp_path)
    before = compiled.stamp(package / "top.py")
    compiled.stamp.cache_clear()
    (package / "low.py").write_text("SIZE = 4\n")
    assert compiled.stamp(package / "top.py") != before
    compiled.stamp.cache_clear()


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_kernels_are_compiled_by_the_one_helper(path):
    """A bare njit would keep code of old sources."""
    names = {
        node.id for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, ast.Name)
    }
    assert "njit" not in names
    assert path in compiled.sources(path)


def test_no_other_file_uses_numba_directly():
    users = [
        path.relative_to(ROOT).as_posix()
        for package in ("simulator", "octotune")
        for path in sorted((ROOT / package).rglob("*.py"))
        if "njit(" in path.read_text(encoding="utf-8")
    ]
    assert users == ["simulator/compiled.py"]
