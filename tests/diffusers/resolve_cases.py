"""What the workers run: settings for a model, which all ranks must agree on."""

from __future__ import annotations

from typing import Any

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.config import DbspConfig
from dbsp_diffusers.resolve import resolve_config
from tests.support.models.transformers_for_tests import make_transformer


def settings_by_rank(rank: int, world: int, configs: list[Any]) -> DbspConfig:
    """Each rank is given a configuration of its own."""
    return resolve_config(configs[rank], make_transformer("wan"), SequenceGroup.of())


def attach_to_another_model(rank: int, world: int, config: str) -> str:
    """What dbsp_para says of a configuration for another model."""
    import dbsp_para

    transformer = make_transformer("wan")
    try:
        dbsp_para.parallelize_transformer(transformer, config=config)
    except ValueError as error:
        assert not hasattr(transformer, "_is_parallelized")
        return str(error)
    raise AssertionError("it must be refused")
