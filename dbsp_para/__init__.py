"""db-SP for diffusers pipelines, in the manner of ParaAttention.

Example::

    import dbsp_para
    dbsp_para.parallelize_pipe(pipe)                                          # on every rank
    # or through para-attn's own functions, to which db-SP adds two arguments:
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
