"""What can be read off the text of the kernels."""

from __future__ import annotations

import ast
from pathlib import Path

import stable_attention

PACKAGE = Path(stable_attention.__file__).parent
# Takes what every launcher passes to its kernel.
SHARED = {"scores_kernel": {"DV", "BDV"}}


def test_every_parameter_of_a_kernel_is_read() -> None:
    unread = {}
    for file in PACKAGE.rglob("*.py"):
        for function in ast.walk(ast.parse(file.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            if not any("triton.jit" in ast.unparse(d) for d in function.decorator_list):
                continue
            names = {n.id for part in function.body for n in ast.walk(part) if _is_name(n)}
            left = {a.arg for a in function.args.args} - names
            left -= SHARED.get(function.name, set())
            if left:
                unread[function.name] = left
    assert not unread


def _is_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Name)
