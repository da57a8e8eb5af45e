"""Triton's interpreter for the tests' own processes, and only while they ask for it: it is slow."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import math
import os
import pkgutil
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

_GPU = torch.cuda.is_available()  # a real one: simulated GPUs come later


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Lets kernels run in Triton's interpreter within a block; does nothing where there is a GPU, or no triton.

    Whether a kernel is interpreted is decided when triton and the kernel are imported, so both are imported here.
    """
    if _GPU:
        yield
        return
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        with contextlib.suppress(ModuleNotFoundError):
            _patch_language_once()
            _work_out_types_once()
            for module in pkgutil.iter_modules(importlib.import_module("dbsp_kernels.triton").__path__):
                importlib.import_module(f"dbsp_kernels.triton.{module.name}")
        yield
    finally:
        del os.environ["TRITON_INTERPRET"]
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before


def _patch_language_once() -> None:
    """Lets the interpreter replace Triton's language once a process, and not at each launch and each device function.

    It would take nearly half of the time.
    """
    runtime: Any = importlib.import_module("triton.runtime.interpreter")
    if hasattr(runtime._patch_lang, "replaced"):
        return
    replace, replaced, language = runtime._patch_lang, set[str](), (runtime.tl, runtime.tl.core)

    @functools.cache
    def parts_used(function: Any) -> set[str]:
        return {m.__name__ for m in function.__globals__.values() if inspect.ismodule(m) and m in language}

    def replace_once(function: Any) -> Any:
        if not parts_used(function) <= replaced:
            replace(function)
            # Triton 3.6 and older convert an array of one number, which NumPy 2.4 refuses.
            runtime.tl.core.tensor.__index__ = lambda self: int(self.handle.data.item())
            replaced.update(parts_used(function))
        return SimpleNamespace(restore=lambda: None)

    replace_once.replaced = replaced  # type: ignore[attr-defined]
    runtime._patch_lang = replace_once


def _work_out_types_once() -> None:
    """Keeps what the interpreter finds of types and shapes, and drops its check of integers for overflow.

    It would take half of the time, and sizes are tiny.
    """
    runtime: Any = importlib.import_module("triton.runtime.interpreter")
    if not runtime.interpreter_builder.options.sanitize_overflow:
        return
    runtime.interpreter_builder.options = runtime.InterpreterOptions(sanitize_overflow=False)
    make, pointer = runtime._get_np_dtype, runtime.tl.pointer_type
    of_scalar = functools.cache(make)

    def numpy_type(of_tensor: Any) -> Any:
        scalar = of_tensor.scalar
        return make(scalar) if isinstance(scalar, pointer) else of_scalar(scalar)  # a pointer's type has no hash

    runtime._get_np_dtype = numpy_type
    block, known = runtime.tl.block_type, dict[tuple[Any, ...], tuple[Any, int, str]]()
    begin = block.__init__

    def begin_once(self: Any, element_ty: Any, shape: Any) -> None:
        key = (str(element_ty), *(getattr(size, "value", size) for size in shape))
        if key not in known:
            begin(self, element_ty, shape)
            known[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = known[key]

    block.__init__ = begin_once
    core, shapes = runtime.tl.core, dict[tuple[int, ...], tuple[Any, Any]]()

    def begin_tensor(self: Any, handle: Any, of_tensor: Any) -> None:
        shape = tuple(of_tensor.shape) if of_tensor.is_block() else ()
        if shape not in shapes:
            shapes[shape] = core.constexpr(math.prod(shape)), core.tuple([core.constexpr(size) for size in shape])
        self.handle, self.type, self.dtype = handle, of_tensor, of_tensor.scalar
        self.numel, self.shape = shapes[shape]

    core.tensor.__init__ = begin_tensor


with interpreted():
    pass  # the imports, before anything else imports triton otherwise
