"""Errors that are the user's to mend, and where their messages send the user."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution


class UserError(ValueError):
    """An error that the user can put right: a setting, a file, an input or a framework that does not fit.

    Its message is one line that names the problem and the fix, so a command shows nothing else and exits with 2. Every
    other exception is a fault of db-SP or of what it runs on, and keeps its traceback.

    Args:
        message: Line breaks in it, as names of files and other errors' texts may have them, become spaces.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


REPOSITORY = "https://github.com/db-sp/db-sp"


def page(name: str) -> str:
    """Returns the address of docs/NAME.md, which a wheel does not have."""
    return f"{REPOSITORY}/blob/main/docs/{name}.md"


def install_command(extra: str) -> str:
    """Returns the command that installs what an extra needs: of the installed package, else of the checkout.

    db-SP is on no package index: pip reads the extras of the installed package from its own metadata.
    """
    try:
        distribution("dbsp-attention")
    except PackageNotFoundError:
        return f"pip install '.[{extra}]' in db-SP's repository"
    return f"pip install 'dbsp-attention[{extra}]'"
