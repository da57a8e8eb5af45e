"""db-SP for diffusers: sharding a pipeline's transformer over GPUs, its self-attention sparse and dual-balanced.

import dbsp_diffusers
dbsp_diffusers.enable(pipe, {"mask": {"source": "sparge"}})  # on every rank, under torchrun
video = pipe("a red ball bounces over a blue floor").frames[0]
dbsp_diffusers.disable(pipe)                                 # as it was
"""

from dbsp_core.config.config import DbspConfig
from dbsp_diffusers.enabling import disable, enable, session_of, sessions_of, write_report
from dbsp_diffusers.packed.denoising import PackedRequest, denoise_packed
from dbsp_diffusers.packed.forward import LocalPredictions, packed_forward, packed_forward_local
from dbsp_diffusers.packed.samples import PackedSample
from dbsp_diffusers.sharding.sum_gradients import sum_gradients

__all__ = [
    "DbspConfig",
    "LocalPredictions",
    "PackedRequest",
    "PackedSample",
    "denoise_packed",
    "disable",
    "enable",
    "packed_forward",
    "packed_forward_local",
    "session_of",
    "sessions_of",
    "sum_gradients",
    "write_report",
]
