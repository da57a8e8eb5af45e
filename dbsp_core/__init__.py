"""db-SP: dual-balanced sequence parallelism for block-sparse attention."""

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.comm.redistribution import Redistribution, sp_gather, sp_shard
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.masks.mask_file import MaskFile, save_mask
from dbsp_core.planning.plan import Plan, make_plan
from dbsp_core.runtime.attention import DualBalancedAttention, dual_balanced_attention
from dbsp_core.utils.errors import UserError

__all__ = [
    "BlockGrid",
    "BlockMask",
    "DualBalancedAttention",
    "MaskFile",
    "Plan",
    "Redistribution",
    "SequenceGroup",
    "SequenceLayout",
    "Strategy",
    "UserError",
    "dual_balanced_attention",
    "make_plan",
    "save_mask",
    "sp_gather",
    "sp_shard",
]
__version__ = "0.1.0"
