"""Where messages send the user: pages of the documentation, and the command that installs an extra."""

from __future__ import annotations

__all__ = ["DOCS", "REPOSITORY", "install_command", "page"]

REPOSITORY = "https://github.com/db-sp/db-sp"
DOCS = f"{REPOSITORY}/blob/main/docs"


def page(name: str) -> str:
    """The address of docs/NAME.md, which a wheel does not have."""
    return f"{DOCS}/{name}.md"


def install_command(extra: str) -> str:
    """The command that installs what an extra needs. It names no package index: db-SP is on none."""
    return f"pip install '.[{extra}]' in db-SP's repository"
