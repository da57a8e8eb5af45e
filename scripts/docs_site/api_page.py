"""Writes docs/api.md from docstrings: what the packages export, with arguments, results and errors.

tests/docs/test_site.py asks whether it is up to date.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import griffe

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "api.md"
PACKAGES = {
    "dbsp_diffusers": "diffusers pipelines and transformers: what most scripts need.",
    "dbsp_para": "In the manner of ParaAttention.",
    "dbsp_xdit": "Scripts of your own with xfuser.",
    "dbsp_core": "The attention by itself, without a model.",
}
_HEAD = """# API

What each package exports, from its docstrings (`python -m scripts.docs_site.api_page` writes this page). Start with
`dbsp_diffusers.enable`. The command line says its own: `dbsp --help`.

"""


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """The whole page."""
    contents = "".join(f"- [`{name}`](#{name}): {what}\n" for name, what in PACKAGES.items())
    loader = griffe.GriffeLoader(docstring_parser="google", search_paths=[str(ROOT), str(ROOT / "kernels")])
    packages = {name: loader.load(name) for name in PACKAGES}
    loader.load("dbsp_kernels")  # whose errors the others export
    loader.resolve_aliases()
    return _HEAD + contents + "".join(f"\n## `{name}`\n{_package(name, one)}" for name, one in packages.items())


def _package(name: str, package: griffe.Object | griffe.Alias) -> str:
    exported = sorted(str(one).strip("\"'") for one in package.exports or ())
    found = {one: package[one] if one in package.members else _lazily(package, one) for one in exported}
    return "".join(_member(f"{name}.{one}", member) for one, member in found.items())


def _lazily(package: griffe.Object | griffe.Alias, name: str) -> griffe.Object | griffe.Alias:
    """An export that a package's `__getattr__` finds in one of its modules."""
    homes = [module for module in package.modules.values() if name in module.members]
    return next(module[name] for module in homes if not module[name].is_alias)


def _member(path: str, member: griffe.Object | griffe.Alias) -> str:
    text = f"\n### `{path}`\n\n"
    if member.is_function:
        text += _signature(path.rpartition(".")[2], member) + _docstring(member)
    elif member.is_class:
        text += _docstring(member)
        for method in _methods(member):
            text += f"**`{method.name}`**\n\n" + _signature(method.name, method) + _docstring(method)
    else:
        text += _docstring(member)
    return text.rstrip() + "\n"


def _methods(cls: griffe.Object | griffe.Alias) -> Iterator[griffe.Object | griffe.Alias]:
    """Public methods that have something to say."""
    for method in cls.members.values():
        if method.is_function and not method.name.startswith("_") and method.has_docstring:
            yield method


def _signature(name: str, function: griffe.Object | griffe.Alias) -> str:
    written, keyword_only = [], False
    for parameter in function.parameters:
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is griffe.ParameterKind.keyword_only and not keyword_only:
            keyword_only = True
            written.append("*")
        star = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}.get(parameter.kind)
        keyword_only = keyword_only or star == "*"
        kind = "" if parameter.annotation is None else f": {parameter.annotation}"
        default = "" if parameter.default is None or star else f" = {parameter.default}"
        written.append(f"{star or ''}{parameter.name}{kind}{default}")
    result = "" if function.returns is None else f" -> {function.returns}"
    line = f"{name}({', '.join(written)}){result}"
    if len(line) > 100:
        line = f"{name}(\n" + "".join(f"    {one},\n" for one in written) + f"){result}"
    return f"```python\n{line}\n```\n\n"


def _docstring(member: griffe.Object | griffe.Alias) -> str:
    return "" if member.docstring is None else "".join(map(_section, member.docstring.parsed))


def _section(section: griffe.DocstringSection) -> str:
    kind = section.kind
    if kind is griffe.DocstringSectionKind.text:
        return f"{section.value}\n\n"
    if kind in (griffe.DocstringSectionKind.parameters, griffe.DocstringSectionKind.attributes):
        rows = "".join(f"| `{one.name}` | {_line(one.description)} |\n" for one in section.value)
        title = "argument" if kind is griffe.DocstringSectionKind.parameters else "attribute"
        return f"| {title} | |\n|---|---|\n{rows}\n"
    if kind in (griffe.DocstringSectionKind.returns, griffe.DocstringSectionKind.yields):
        return f"*{kind.value.capitalize()}:* " + " ".join(_line(one.description) for one in section.value) + "\n\n"
    if kind is griffe.DocstringSectionKind.raises:
        said = "; ".join(f"`{one.annotation}` {_line(one.description)}" for one in section.value)
        return f"*Raises:* {said}\n\n"
    if kind is griffe.DocstringSectionKind.admonition:
        return f"{section.value.description}\n\n"
    raise ValueError(f"docstrings have no section {kind.value}")


def _line(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


if __name__ == "__main__":
    main()
