"""db-SP for diffusers: sharding a pipeline's transformer over GPUs, its self-attention sparse and dual-balanced.

Example::

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))         # in a script that torchrun starts
    torch.distributed.init_process_group("nccl")
    pipe.to("cuda")
    dbsp_diffusers.enable(pipe)                                  # on every rank
    video = pipe("a red ball bounces over a blue floor").frames[0]
    dbsp_diffusers.disable(pipe)                                 # as it was
    torch.distributed.destroy_process_group()
"""

from dbsp_core.config import DbspConfig
from dbsp_diffusers.api import disable, enable, session_of, sessions_of, sum_gradients, write_report
from dbsp_diffusers.packed.forward import LocalPredictions, packed_forward, packed_forward_local
from dbsp_diffusers.packed.samples import PackedSample

__all__ = [
    "DbspConfig",
    "LocalPredictions",
    "PackedSample",
    "disable",
    "enable",
    "packed_forward",
    "packed_forward_local",
    "session_of",
    "sessions_of",
    "sum_gradients",
    "write_report",
]
