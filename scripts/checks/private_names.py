"""Undocumented names of frameworks that db-SP relies on (private_names.yaml), and whether what is installed has them.

As a program, prints {"of": {package: names}, "messages": [what is not as db-SP takes it to be]}.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import pkgutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from packaging.version import Version

NAMES = Path(__file__).with_suffix(".yaml")


@dataclass(frozen=True)
class PrivateName:
    """One name."""

    where: str  # "package.module:Class.attribute", or a module alone
    user: str  # the module of ours that relies on it
    takes: tuple[str, ...] = ()  # arguments by which we call it, or by which we are called instead of it
    says: tuple[str, ...] = ()  # what must be in its source, as names of attributes that it sets
    since: str = ""  # the package's first version that has it, where db-SP goes with older ones too

    @property
    def package(self) -> str:
        return self.where.partition(":")[0].partition(".")[0].replace("_", "-")

    @property
    def belongs(self) -> bool:
        """True if the installed version of its package is one that should have it."""
        return not self.since or Version(version(self.package)) >= Version(self.since)


def private_names() -> Iterator[PrivateName]:
    """Yields what private_names.yaml has."""
    for user, names in yaml.safe_load(NAMES.read_text(encoding="utf-8")).items():
        for where, more in names.items():
            takes, says = (tuple(more.get(key, ())) for key in ("takes", "says"))
            yield PrivateName(where, user, takes, says, more.get("since", ""))


def message(name: PrivateName) -> str | None:
    """Returns what is not as db-SP takes it to be, in a few words; None where all is."""
    module, _, path = name.where.partition(":")
    try:
        if not path and not name.takes and module.endswith((".run", ".runner")):
            value: Any = importlib.util.find_spec(module)  # a program: importing it may run it
        else:
            value = pkgutil.resolve_name(name.where)
    except Exception as error:  # of any kind: a library raises what it likes for what it cannot import
        return f"{name.where}: {' '.join(str(error).split())}"
    lacking = [argument for argument in name.takes if argument not in _parameters(value)]
    if lacking:
        return f"{name.where} takes no {', '.join(lacking)}"
    silent = [text for text in name.says if text not in _source(value)]
    return f"{name.where} does not have {' or '.join(silent)} in its source" if silent else None


def _parameters(function: Any) -> set[str]:
    """Returns arguments through decorators, and what a class is made with."""
    return set(inspect.signature(function).parameters) | set(inspect.signature(inspect.unwrap(function)).parameters)


def _source(value: Any) -> str:
    origin = getattr(value, "origin", None)  # of a module that was not imported
    return Path(origin).read_text(encoding="utf-8") if isinstance(origin, str) else inspect.getsource(value)


def main() -> None:
    from dbsp_xdit.runner import install
    from tests.support import interpreter  # noqa: F401  before anything else imports triton

    install()  # without which xfuser cannot be imported where there is no accelerator
    names = [name for name in private_names() if name.belongs]
    report = {"of": Counter(name.package for name in names), "messages": list(filter(None, map(message, names)))}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
