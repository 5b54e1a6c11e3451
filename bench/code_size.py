"""How large is the package? `python -m bench.code_size [CHECKOUT] [--package pipeline/ortprep]`.

Prints a Markdown row per figure. A function's length counts from its `def` to its last line, docstring
included; parameters include `self`.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles

Function = ast.FunctionDef | ast.AsyncFunctionDef


def main() -> None:
    """Prints the figures of a checkout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", nargs="?", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--package", default="pipeline/ortprep")
    arguments = parser.parse_args()
    for name, figure in measure_code(arguments.checkout / arguments.package).items():
        print(f"| {name} | {figure:,.0f} |")


def measure_code(package: Path) -> dict[str, float]:
    """Returns each figure of a folder of Python files by its name."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py"))]
    if not texts:
        raise SystemExit(f"no Python files in {package}")
    functions = [function for text in texts for function in _functions(ast.parse(text))]
    lengths = [_length(function) for function in functions]
    return {
        "modules": len(texts),
        "lines": sum(len(text.splitlines()) for text in texts),
        "longest module, lines": max(len(text.splitlines()) for text in texts),
        "functions": len(functions),
        "function length, median": median(lengths),
        "function length, 90th percentile": quantiles(lengths, n=10)[-1],
        "longest function, lines": max(lengths),
        "most parameters": max(_parameters(function.args) for function in functions),
    }


def _functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def _length(function: Function) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def _parameters(arguments: ast.arguments) -> int:
    return len([*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs])


if __name__ == "__main__":
    main()
