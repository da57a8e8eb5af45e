"""`UserError`, and the links and install commands in its messages."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution


class UserError(ValueError):
    """An error that the user can fix: a wrong setting, file or input, or an unsupported framework version.

    The one-line message (line breaks become spaces) names the problem and the fix; commands print only this line and
    exit with 2. Any other exception is a bug in db-SP or its environment and keeps its traceback.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


REPOSITORY = "https://github.com/db-sp/db-sp"


def page(name: str) -> str:
    """Returns the URL of docs/NAME.md, which wheels do not contain."""
    return f"{REPOSITORY}/blob/main/docs/{name}.md"


def install_command(extra: str) -> str:
    """Returns the command that installs an extra's dependencies, for the installed package or else the checkout.

    db-SP is not on PyPI; for an installed package pip reads the extras from its metadata.
    """
    try:
        distribution("dbsp-attention")
    except PackageNotFoundError:
        return f"pip install '.[{extra}]' in db-SP's repository"
    return f"pip install 'dbsp-attention[{extra}]'"
