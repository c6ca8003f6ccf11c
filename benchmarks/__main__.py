"""python -m benchmarks: list the benchmarks, or run the named one with its own options.

A benchmark is a module of this package with a function `main(arguments)`.
"""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def benchmarks() -> dict[str, str]:
    """Return the benchmarks and the first line of what each says of itself, without a run."""
    found: dict[str, str] = {}
    for path in sorted(FOLDER.glob("*.py")):
        if path.stem.startswith("_"):
            continue
        module = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in module.body):
            found[path.stem] = (ast.get_docstring(module) or "").partition("\n")[0]
    return found


def main(arguments: list[str]) -> int:
    """List, or run one; return the exit status."""
    found = benchmarks()
    if not arguments:
        width = max(map(len, found), default=0)
        print("python -m benchmarks NAME [OPTION...] runs one of:")
        for name, line in found.items():
            print(f"  {name:{width}}  {line}")
        return 0
    name, *options = arguments
    if name not in found:
        print(f"there is no benchmark {name!r}; write one of {', '.join(found)}", file=sys.stderr)
        return 2
    importlib.import_module(f"benchmarks.{name}").main(options)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
