"""The findings about one variant as one record of a table; a failure is a record, too."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

import triton

from scripts.checks.machine_code.reading import Step, findings
from scripts.checks.machine_code.variants import Variant, compiled


def reported(variant: Variant) -> dict[str, Any]:
    """Returns the record of a variant, or of its failure."""
    try:
        return examined(variant)
    except Exception as error:  # for any compilers or the reading raise: the other variants don't depend on it
        return failed(variant, error)


def examined(variant: Variant) -> dict[str, Any]:
    """Returns the record of a variant. What is counted of a step is None if there is none."""
    found = asdict(findings(compiled(variant), variant.arch))
    step = found.pop("step")
    counted = step or dict.fromkeys(field.name for field in fields(Step))
    return _named(variant) | counted | found | {"remark": "" if step else "no tensor cores"}


def failed(variant: Variant, error: BaseException) -> dict[str, Any]:
    """Returns the record of a variant that could not be compiled or read."""
    said = " ".join(str(error).split())
    return _named(variant) | {"remark": f"failed: {type(error).__name__}: {said}", "failed": True}


def _named(variant: Variant) -> dict[str, Any]:
    return {"triton": triton.__version__, **asdict(variant)}
