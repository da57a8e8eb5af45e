"""The hosts that `dbsp generate` runs videos in, and which of them is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass

from dbsp_core.utils.errors import UserError
from dbsp_kernels.errors import install_command

__all__ = ["HOSTS", "Host", "find_host", "missing_packages"]


def missing_packages(names: Iterable[str]) -> list[str]:
    """The packages, by import name, that cannot be found."""
    return [name for name in names if importlib.util.find_spec(name) is None]


@dataclass(frozen=True)
class Host:
    """A program that makes videos.

    Attributes:
        module: Runs in every rank with arguments CONFIG VIDEO SECONDS; its `check` refuses jobs before that.
        needs: Packages to be imported.
        extra: Extra of dbsp-attention that installs them.
    """

    module: str
    needs: tuple[str, ...]
    extra: str

    @property
    def missing(self) -> list[str]:
        return missing_packages(self.needs)


HOSTS = {
    "diffusers": Host("dbsp_para.generate", ("diffusers", "transformers", "imageio_ffmpeg"), "diffusers"),
}
_SYNONYMS = {"para": "diffusers"}


def find_host(name: str | None) -> str:
    """Returns the key in `HOSTS` of this host, or of the first that is installed. Raises UserError for none."""
    if name is None:
        name = next((host for host in HOSTS if not HOSTS[host].missing), None)
        if name is None:
            raise UserError(f"diffusers is not installed; {install_command('diffusers')}")
    name = _SYNONYMS.get(name, name)
    if name not in HOSTS:
        raise UserError(f"unknown host {name!r}; use {' or '.join(HOSTS)}")
    missing = HOSTS[name].missing
    if missing:
        raise UserError(f"--host {name} lacks {', '.join(missing)}; {install_command(HOSTS[name].extra)}")
    return name
