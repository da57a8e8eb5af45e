"""db-SP: dual-balanced sequence parallelism for block-sparse attention."""

from dbsp_core.attention import DualBalancedAttention, dual_balanced_attention
from dbsp_core.config import DbspConfig
from dbsp_core.grid import BlockGrid
from dbsp_core.groups import SequenceGroup
from dbsp_core.home import HomeLayout
from dbsp_core.mask import BlockMask
from dbsp_core.mask_file import MaskFile, save_mask
from dbsp_core.plan import Plan, make_plan
from dbsp_core.strategy import Strategy

__all__ = [
    "BlockGrid",
    "BlockMask",
    "DbspConfig",
    "DualBalancedAttention",
    "HomeLayout",
    "MaskFile",
    "Plan",
    "SequenceGroup",
    "Strategy",
    "dual_balanced_attention",
    "make_plan",
    "save_mask",
]
__version__ = "0.1.0"
