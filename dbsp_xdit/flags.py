"""The flags that db-SP adds to xfuser's, and the configuration they make."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from dbsp_core.config import DbspConfig, default_config, require_same_model
from dbsp_core.layout.strategy import Strategy
from dbsp_core.models.table import find_model_spec, signature_of_model
from dbsp_core.utils.errors import UserError
from dbsp_xdit.command_line import full_name

__all__ = ["add_flags", "config_from", "parse_known", "strategy_from"]

BACKENDS = ("usp", "dbsp")
_REMOVED = {
    "--sp_mask": "write --sp-config MASK",
    "--sp_strategy": "the degrees say it; others: strategy in the file of --sp-config",
    "--sp_planner": "write planner in the file of --sp-config",
    "--sp_vae": "write vae: true in the file of --sp-config",
    "--sp_report": "write report: DIR in the file of --sp-config",
}
"""Flags of earlier versions, and what to write instead."""
_DEGREES = ("ulysses_degree", "ring_degree", "pipefusion_parallel_degree", "tensor_parallel_degree")
_SIZES = ("height", "width", "num_frames")
_SWITCHES = {
    "use_hybrid_attn_schedule": "its schedule is of self-attention's backends, which are not used",
    "use_spargeattn_head_balance": "db-SP balances heads itself",
    "use_fp8_comms": "db-SP has an exchange of its own, in 8 bits with precision: int8 in --sp-config",
    "use_teacache": "it decides whether to skip by one rank's tokens",
    "use_fbcache": "it decides whether to skip by one rank's tokens; --cache_method fbcache or dbcache goes together",
}
"""xfuser's switches that don't go with db-SP, and why."""
CACHE_METHODS = ("dbcache", "fbcache")
"""xfuser's step caches that are cache-dit's, on Wan: all ranks decide together there."""
_SPARSE = ("SPARGE", "SPARSE", "VSA", "SSTA", "FLEX_BLOCK")  # in the names of xfuser's sparse attention backends


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds db-SP's options. Underscores: xfuser's parser rewrites dashes to them, so that both spellings work."""
    group = parser.add_argument_group("db-SP")
    group.add_argument(
        "--sp_backend",
        choices=BACKENDS,
        default="usp",
        help="Sequence parallelism of self-attention: xDiT's own (usp) or dual-balanced block-sparse (dbsp).",
    )
    group.add_argument(
        "--sp_config",
        help="db-SP's settings: a YAML file, the name of a shipped one, or a mask alone, such as sparge:cdf=0.92, "
        "window:window=[7,21,33] or a mask file. Default: what is shipped for the model.",
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def parse_known(argv: Sequence[str]) -> dict[str, Any]:
    """Parses what db-SP needs to know of an xdit command line, before xfuser parses all of it.

    Raises:
        UserError: An argument cannot be understood.
    """
    parser = _Parser(prog="xdit", add_help=False, allow_abbrev=False)
    add_flags(parser)
    parser.add_argument("--model")
    parser.add_argument("--nnodes", default="1")
    for degree in _DEGREES:
        parser.add_argument(f"--{degree}", type=int, default=1)
    for size in _SIZES:
        parser.add_argument(f"--{size}", type=int)
    for switch in ("use_cfg_parallel", "use_parallel_vae", *_SWITCHES):
        parser.add_argument(f"--{switch}", action="store_true")
    for name in ("attention_backend", "cache_method", "task"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--input_images", nargs="+")
    normal = []
    for argument in argv:
        name, equals, value = argument.partition("=")
        name = full_name(name)
        removed = name.replace("-", "_").replace("__", "--", 1)
        if removed in _REMOVED:
            raise UserError(f"{name} was removed; {_REMOVED[removed]}")
        normal.append(name.replace("-", "_").replace("__", "--", 1) + equals + value if name[:2] == "--" else argument)
    return vars(parser.parse_known_args(normal)[0])


def config_from(args: Mapping[str, Any], read: DbspConfig | None = None) -> DbspConfig | None:
    """Returns the configuration that parsed arguments ask for, or None for backend "usp".

    Args:
        read: The configuration, if it has been read already.

    Raises:
        UserError: Settings make no sense, each or together.
    """
    if args.get("sp_backend", "usp") == "usp":
        if args.get("sp_config") is not None:
            raise UserError("--sp-config has no effect without --sp-backend dbsp; add it")
        return None
    model = None if args.get("model") is None else signature_of_model(args["model"])
    if read is not None:
        config = read
    elif args.get("sp_config") is None:
        config = default_config(model, find_model_spec(args.get("model") or ""))
    else:
        config = DbspConfig.load(args["sp_config"])
    require_same_model(config, model)
    if config.vae and args.get("use_parallel_vae"):
        raise UserError("--use_parallel_vae shares decoding out already; leave it out, or setting vae")
    for name in _DEGREES[2:]:
        if (args.get(name) or 1) > 1:
            raise UserError(f"--{name} {args[name]} does not go with --sp-backend dbsp; leave it at 1")
    _require_no_rival(args)
    strategy_from(config, args.get("ulysses_degree") or 1, args.get("ring_degree") or 1)
    return config


def _require_no_rival(args: Mapping[str, Any]) -> None:
    """Raises UserError for options of xfuser that also decide how self-attention is computed, or whether."""
    for name, why in _SWITCHES.items():
        if args.get(name):
            raise UserError(f"--{name} does not go with --sp-backend dbsp: {why}; leave it out")
    if args.get("cache_method") not in (None, *CACHE_METHODS):
        raise UserError(
            f"--cache_method {args['cache_method']} does not go with --sp-backend dbsp: {_SWITCHES['use_teacache']}; "
            f"choose {' or '.join(CACHE_METHODS)}"
        )
    backend = args.get("attention_backend")
    if backend is not None and any(word in str(backend).upper() for word in _SPARSE):
        raise UserError(
            f"--attention_backend {backend} computes sparse self-attention of its own; leave it out, and choose the "
            "mask with --sp-config"
        )


def strategy_from(config: DbspConfig, ulysses_degree: int, ring_degree: int) -> Strategy | None:
    """The configured strategy, else the host's degrees; None for "auto".

    Raises UserError when they need different numbers of GPUs.
    """
    host = Strategy(ulysses_degree, ring_degree)
    strategy = config.strategy_or(host)
    if strategy is not None and strategy.world != host.world:
        raise UserError(
            f"strategy {strategy} needs {strategy.world} GPUs, but --ulysses_degree {ulysses_degree} "
            f"and --ring_degree {ring_degree} make {host.world}; change one of them"
        )
    return strategy
