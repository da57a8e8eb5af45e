"""What the workers run: settings for a model, which all ranks must agree on."""

from __future__ import annotations

from typing import Any

import dbsp_diffusers
from dbsp_core.config import DbspConfig
from tests.support.models.transformers_for_tests import make_transformer


def settings_by_rank(rank: int, world: int, configs: list[Any]) -> DbspConfig:
    """Each rank is given a configuration of its own, by `enable`."""
    return dbsp_diffusers.enable(make_transformer("wan"), configs[rank]).config


def attach_to_another_model(rank: int, world: int, config: str) -> str:
    """What dbsp_para says of a configuration for another model."""
    import dbsp_para

    transformer = make_transformer("wan")
    try:
        dbsp_para.parallelize_transformer(transformer, config=config)
    except ValueError as error:
        assert not hasattr(transformer, "_is_parallelized")
        return str(error)
    raise AssertionError("it must be rejected")
