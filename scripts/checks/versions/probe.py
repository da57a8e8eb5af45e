"""Probe of an environment of some versions: which private names hold there, and whether tiny models are exact.

Its last line is {"versions": {package: …}, "names": {package: {"of": …, "messages": […]}},
"runs": {name: its largest error, or what went wrong}}. With --names, only the first two.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dbsp_core.utils.process import installed_version
from tests.support import interpreter  # noqa: F401  before anything else imports triton
from tests.support.workers import WorkerError, WorkerPool

os.environ.setdefault("CACHE_DIT_LOG_LEVEL", "ERROR")

MASK = {"source": "synthetic", "density": 0.3, "block_q": 16, "block_k": 8}
SPARGE = {"source": "sparge", "cdf": 0.6, "similarity": 0.0, "block_q": 16, "block_k": 8}
PATIENCE_S = 300.0
"""For one run; the first ones compile all that they import, in an environment that is new."""
PACKAGES = ("torch", "diffusers", "xfuser", "para-attn", "cache-dit", "transformers", "accelerate", "numpy", "triton")
Run = Callable[[WorkerPool], float]


def private_names() -> dict[str, Any]:
    from dbsp_cli.import_hook import after_import
    from dbsp_xdit.runner import install
    from scripts.checks.versions.looking_up import belongs, message
    from scripts.checks.versions.private_names import PRIVATE_NAMES

    install(after_import)  # without which xfuser cannot be imported where there is no accelerator
    found = {}
    for package, those in PRIVATE_NAMES.items():
        names = [one for one in those if belongs(one, package)]
        found[package] = {"of": len(names), "messages": list(filter(None, map(message, names)))}
    return found


def _attention(pool: WorkerPool) -> float:
    from tests.support.attention_cases import Case, run_case

    cases = [Case("U2R1", tokens=130), Case("U1R2", tokens=130), Case("U1R2", tokens=130, keys="needed")]
    return max(error for case in cases for error in pool.run(run_case, case))


def _gradients(pool: WorkerPool) -> float:
    from tests.core.runtime.gradients.gradient_cases import run_gradients
    from tests.support.attention_cases import Case

    return max(max(errors) for errors in pool.run(run_gradients, Case("U1R2", tokens=130)))


def _diffusers(pool: WorkerPool) -> float:
    from tests.diffusers.enable_cases import run_transformer

    return max(error for strategy in ("U2R1", "U1R2") for error, *_ in pool.run(run_transformer, strategy))


def _para_attn(pool: WorkerPool) -> float:
    from tests.para.para_cases import run_through_para_attn

    return max(pool.run(run_through_para_attn, 2, {"mask": MASK}))


def _xfuser(pool: WorkerPool) -> float:
    from tests.xdit.xdit_cases import XditCase, run_xdit_case, start_xfuser

    pool.run(start_xfuser)
    config = {"mask": SPARGE, "strategy": "U1R2"}
    cases = [XditCase((3, 5, 7), config, model=model) for model in ("wan", "cogvideox")]
    return max(error for case in cases for error, _ in pool.run(run_xdit_case, case))


def _cache(name: str) -> Run:
    def run(pool: WorkerPool) -> float:
        from tests.diffusers.cache_cases import CacheCase, run_cache_case

        case = CacheCase(name, "wan", (0.3,), strategy="U1R2", batch=1)
        outcomes = [one for by_rank in pool.run(run_cache_case, case) for one in by_rank]
        if any(one.ours != one.expected for one in outcomes):
            raise AssertionError("other layers are skipped than in one process")
        return max(one.difference for one in outcomes)

    return run


def _pipeline(pool: WorkerPool) -> float:
    from dbsp_cli.tiny_models import make_tiny
    from tests.diffusers.enable_cases import run_pipeline

    with tempfile.TemporaryDirectory() as folder:
        tiny = str(make_tiny("wan", Path(folder) / "wan"))
        return max(error for error, *_ in pool.run(run_pipeline, tiny))


RUNS: dict[str, Run] = {
    "attention": _attention,
    "gradients": _gradients,
    "diffusers": _diffusers,
    "pipeline": _pipeline,
    "first-block cache": _cache("first block"),
    "para-attn": _para_attn,
    "xfuser": _xfuser,
    "cache-dit": _cache("cache-dit"),
}


def attempt(run: Callable[[], Any]) -> Any:
    """Returns its result, or what went wrong in one line."""
    try:
        return run()
    except WorkerError as error:
        return " ".join(f"{error.errors[0][1]}: {error.errors[0][2]}".split())
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())


def main() -> None:
    found = {
        "versions": {"python": platform.python_version()} | {name: installed_version(name) for name in PACKAGES},
        "names": attempt(private_names),
        "runs": {},
    }
    pool = None
    for name, run in [] if "--names" in sys.argv else RUNS.items():
        pool = pool or WorkerPool(2, ("tests.support.interpreter",), PATIENCE_S)
        found["runs"][name] = attempt(lambda run=run, pool=pool: run(pool))  # type: ignore[misc]
        if isinstance(found["runs"][name], str):  # the workers may be out of step
            pool.close()
            pool = None
    if pool is not None:
        pool.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
