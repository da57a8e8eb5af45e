"""Reversible changes to a framework (hooks, attributes, pipeline calls), and the current CFG pass."""

from __future__ import annotations

import functools
import inspect
import itertools
import pkgutil
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

from torch import nn

from dbsp_core.utils.errors import UserError
from dbsp_core.utils.process import installed_version

_MISSING = object()
Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # a call's positional and keyword arguments


class PatchSet:
    """A stack of changes to a framework; `detach` undoes all in reverse order, once, even if one undo fails.

    As a context manager, it undoes the changes if the body raises.
    """

    def __init__(self) -> None:
        self._undo = ExitStack()

    def __enter__(self) -> PatchSet:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.detach()

    def set_attribute(self, target: Any, name: str, value: Any) -> None:
        """Sets an instance attribute; undo restores the old value or removes it."""
        self._undo.callback(_set(target, name, value))

    def add_module(self, target: nn.Module, name: str, module: nn.Module) -> None:
        """Adds a submodule; undo removes it."""
        target.add_module(name, module)
        self._undo.callback(target._modules.pop, name, None)  # others may have removed it

    def replace_forward(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Replaces a module's own forward by `forward(own forward, *args, **kwargs)`.

        Wrappers of diffusers and accelerate hooks (attention caches, offloading) stay around it, in whatever order
        hooks and this change are added or removed.
        """
        owner, name = _innermost_forward(module)
        before = getattr(owner, name)
        replacement: Callable[..., Any] | None = forward

        @functools.wraps(before)
        def either(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return before(*args, **kwargs) if replacement is None else replacement(before, *args, **kwargs)

        own_module = inspect.Parameter("_", inspect.Parameter.POSITIONAL_ONLY)
        parameters = [own_module, *inspect.signature(before).parameters.values()]
        either.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        # A bound method like the original, since cache-dit binds the restored function to the module.
        bound = types.MethodType(either, module)

        def restore() -> None:
            nonlocal replacement
            replacement = None  # free it, since libraries may keep `either`
            if vars(owner).get(name) is bound:
                undo()
            # hooks added or removed since may have moved it
            kept = [(module, attribute) for attribute in vars(module)]
            for holder, attribute in (_innermost_forward(module), *kept):
                if vars(holder).get(attribute) is bound:
                    setattr(holder, attribute, before)

        undo = _set(owner, name, bound)
        self._undo.callback(restore)

    def replace_class(self, module: nn.Module, cls: type[nn.Module]) -> None:
        """Gives a module another class; saved references to its forward call the current class's forward."""
        own_class, (owner, name) = type(module), _innermost_forward(module)

        @functools.wraps(cls.forward)
        def current(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return type(self).forward(self, *args, **kwargs)

        bound = types.MethodType(current, module)
        module.__class__ = cls
        undo = _set(owner, name, bound)

        def restore() -> None:
            module.__class__ = own_class
            if vars(owner).get(name) is bound:
                undo()

        self._undo.callback(restore)

    def hook(self, register: Callable[..., Any], function: Callable[..., Any], **options: Any) -> None:
        """Registers a module hook, for example hook(module.register_forward_hook, function, with_kwargs=True)."""
        self._undo.callback(register(function, **options).remove)

    def on_detach(self, function: Callable[[], None]) -> None:
        self._undo.callback(function)

    def detach(self) -> None:
        self._undo.close()


def _set(target: Any, name: str, value: Any) -> Callable[[], None]:
    """Sets an instance attribute, and returns a function that restores or removes it."""
    before = vars(target).get(name, _MISSING)

    def restore() -> None:
        if before is not _MISSING:
            setattr(target, name, before)
        elif name in vars(target):  # others may have removed it, as cache-dit does
            delattr(target, name)

    setattr(target, name, value)
    return restore


def _innermost_forward(module: nn.Module) -> tuple[Any, str]:
    """Returns object and attribute that hold a module's forward inside the hooks of diffusers and accelerate."""
    if isinstance(vars(module).get("_old_forward"), types.MethodType):  # otherwise made by diffusers' hooks
        return module, "_old_forward"
    innermost = next(iter(getattr(getattr(module, "_diffusers_hook", None), "_fn_refs", ())), None)
    if innermost is None:
        return module, "forward"
    return innermost, "forward" if innermost.original_forward is None else "original_forward"


def has_class_forward(module: nn.Module) -> bool:
    """Returns True if a module's forward, inside hooks, is its class's."""
    owner, name = _innermost_forward(module)
    return getattr(getattr(owner, name), "__func__", None) is type(module).forward


def signature_of(module: nn.Module) -> inspect.Signature:
    """Returns the signature of the class's forward, since libraries replace an instance's by (*args, **kwargs)."""
    signature = inspect.signature(type(module).forward)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def without_argument(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Arguments:
    """Returns the arguments of a module's forward with argument `name`, if passed, set to None."""
    call = signature_of(module).bind(*args, **kwargs)
    if name in call.arguments:
        call.arguments[name] = None
    return call.args, call.kwargs


def require_names(package: str, names: Mapping[str, Sequence[str]], fix: str) -> None:
    """Raises UserError unless a package has the private functions that db-SP wraps.

    `names` has required arguments by each function's path "module:Class.method".
    """
    for owner, arguments in names.items():
        try:
            taken = set(inspect.signature(pkgutil.resolve_name(owner)).parameters)
        except (ImportError, AttributeError):
            taken = set()
        if not taken.issuperset(arguments):
            raise UserError(
                f"{package} {installed_version(package)} does not have {owner}({', '.join(arguments)}), which db-SP "
                f"expects; {fix}"
            )


def cache_contexts(transformer: Any, patches: PatchSet) -> Callable[[], str | None]:
    """Returns a function that returns the current `transformer.cache_context(name)`, or None outside of contexts.

    diffusers' pipelines name the CFG pass with it.
    """
    entered: str | None = None
    enter = getattr(transformer, "cache_context", None)
    if enter is None:
        return lambda: None

    @contextmanager
    def cache_context(name: str, *args: Any, **kwargs: Any) -> Iterator[None]:
        nonlocal entered
        outer, entered = entered, name
        try:
            with enter(name, *args, **kwargs):
                yield
        finally:
            entered = outer

    patches.set_attribute(transformer, "cache_context", cache_context)
    return lambda: entered


def current_cfg_pass(transformer: Any, patches: PatchSet) -> Callable[[], int | None]:
    """Returns a function that returns the current CFG pass, or None if the pipeline does not name it."""
    branches = {"cond": 0, "cond_uncond": 0, "pred_cond": 0, "uncond": 1, "pred_uncond": 1}
    entered = cache_contexts(transformer, patches)
    numbers: dict[str, int] = {}  # other names are numbered in order of appearance

    def branch() -> int | None:
        context = entered()
        if context is None:
            return None
        free = next(number for number in itertools.count() if number not in numbers.values())
        return numbers.setdefault(context, branches.get(context, free))

    return branch


def reject_copies(part: Any, patches: PatchSet) -> None:
    """Makes copy, pickle and torch.save of a pipeline or its part raise UserError.

    A copy would compute with the original's weights, to which the replaced methods are bound.
    """
    name = type(part).__name__

    def reject(protocol: int) -> NoReturn:
        raise UserError(
            f"cannot copy or pickle this {name} while db-SP is enabled; call `disable` first "
            "(state_dict and save_pretrained still work)"
        )

    patches.set_attribute(part, "__reduce_ex__", reject)  # used by copy, pickle and torch.save


def around_calls(target: Any, around: Callable[..., Any], patches: PatchSet, name: str = "__call__") -> None:
    """Replaces `pipe(...)`, or another method of an object, by `around(own method, *args, **kwargs)`.

    Later wrappers are outermost. Python looks up `__call__` on the class, so the object gets its own subclass of the
    same name. If other code has since replaced or wrapped the subclass (as para-attn's first-block cache does), undo
    leaves it in place, passing calls through. A copy of the object has its class's method.
    """
    cls, replaced = type(target), True

    @functools.wraps(getattr(cls, name))
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = functools.partial(getattr(cls, name), self)
        is_target = replaced and self is target  # excludes objects made by type(target)(...)
        return around(bound, *args, **kwargs) if is_target else bound(*args, **kwargs)

    names = {name: call, "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__slots__": ()}
    wrapped = types.new_class(cls.__name__, (cls,), exec_body=lambda namespace: namespace.update(names))
    target.__class__ = wrapped

    def restore() -> None:
        nonlocal replaced
        replaced = False
        if type(target) is wrapped and vars(wrapped)[name] is call:
            target.__class__ = cls

    patches.on_detach(restore)
