"""db-SP for diffusers pipelines, in the manner of ParaAttention.

Example::

    import dbsp_para
    dbsp_para.parallelize_pipe(pipe, config={"mask": {"source": "window"}})    # changes nothing but this pipe
    # or, through para-attn's own functions, which know two more arguments wherever db-SP is installed:
    from para_attn.context_parallel.diffusers_adapters import parallelize_pipe
    parallelize_pipe(pipe, mesh=mesh, attn="dbsp", config=...)

    dbsp_para.unparallelize(pipe)                                             # as it was
"""

from dbsp_diffusers import DbspConfig, session_of, write_report
from dbsp_para.attach import parallelize_pipe, parallelize_transformer, unparallelize
from dbsp_para.patches import install, uninstall

__all__ = [
    "DbspConfig",
    "install",
    "parallelize_pipe",
    "parallelize_transformer",
    "session_of",
    "uninstall",
    "unparallelize",
    "write_report",
]

install()
