"""One report for a whole xfuser run, in which the pipeline may be called several times: the last one's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dbsp_diffusers.report_hook import report_or_say_why_not, shown_name
from dbsp_xdit.attaching import session_of

__all__ = ["recorded"]


@contextmanager
def recorded(pipe: Any, model: str) -> Iterator[None]:
    """Reports once the pipeline runs inside succeeded, so that writing is in none of xfuser's own timings. Collective.

    Without a folder for reports, nothing.
    """
    session = session_of(pipe)
    if session is None or session.observer is None:
        yield
        return
    session.observer.postponed = True
    try:
        yield
    finally:
        session.observer.postponed = False
    report_or_say_why_not(session, shown_name(model), "xdit")
