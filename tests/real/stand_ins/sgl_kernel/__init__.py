"""Stands in for SGLang's kernel package on machines that it has no binary for (no CUDA, no AVX-512).

SGLang imports many names from it and, on a plain CPU with the torch-native attention, calls none of them. So each name
is a function that raises when it is called. Those parts of the installed package that are plain Python stay reachable.
"""

import importlib.abc
import importlib.machinery
import importlib.metadata
import os
import sys
import types

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_INSTALLED = importlib.machinery.PathFinder.find_spec(
    "sgl_kernel", [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]
)

__path__ = list(_INSTALLED.submodule_search_locations or []) if _INSTALLED else []
__version__ = importlib.metadata.version("sglang-kernel")


def _absent(name):
    def kernel(*_arguments, **_named):
        raise NotImplementedError(f"no binary for {name} on this machine")

    kernel.__name__ = kernel.__qualname__ = name
    return kernel


def __getattr__(name):
    # What Python itself asks modules for (`__wrapped__`, `__all__`, …) must stay absent.
    if name.startswith("__"):
        raise AttributeError(name)
    return _absent(f"{__name__}.{name}")


class _Submodule(types.ModuleType):
    """A submodule that is not installed."""

    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _absent(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Asked last: finds every submodule that nobody else has found."""

    def find_spec(self, name, _path, _target=None):
        if name.startswith(f"{__name__}."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Submodule(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.append(_Finder())
