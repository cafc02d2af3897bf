"""Triton's CPU interpreter with the library's BF16 arithmetic, for kernels that tests define.

``install_on_import()`` repairs it as soon as something imports Triton's interpreter, so that a test
session which never touches a kernel never pays for importing Triton. The library's own kernels need
nothing of this: they repair it themselves (`stable_attention.interpreter`).
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from typing import Any

MODULE = "triton.runtime.interpreter"


def _install() -> None:
    # Here and not above: some processes choose the library's tree after they have imported this.
    from stable_attention.interpreter import install

    install()


class _InstallAfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook: run the real loader of Triton's interpreter, then ``_install``."""

    def __init__(self) -> None:
        self._loader: Any = None

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != MODULE or self._loader is not None:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self._loader.exec_module(module)
        # ``tl`` is importable here: the interpreter module has imported it itself.
        _install()


def install_on_import() -> None:
    """Patch the interpreter now if Triton is loaded, otherwise when it gets loaded."""
    if MODULE in sys.modules:
        _install()
    elif not any(isinstance(finder, _InstallAfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _InstallAfterImport())
