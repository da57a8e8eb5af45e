"""Which configuration goes with a model: the one that is shipped for it, or one that does not name another."""

from __future__ import annotations

from dbsp_core.config.config import DbspConfig
from dbsp_core.models.lookup import model_title, published_model, signature_of_model
from dbsp_core.models.signature import ModelSignature
from dbsp_core.models.table import ModelSpec
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.yaml_file import shipped_configs, shown_config

__all__ = ["DEFAULT_ORIGIN", "default_config", "require_same_model"]

DEFAULT_ORIGIN = "no configuration was given and none is shipped for this model"
"""Stands for a file's name as the origin of settings."""


def default_config(identity: ModelSignature | None, spec: ModelSpec | None = None) -> DbspConfig:
    """The settings where nothing is configured: those shipped for a known model, dense attention for others.

    Args:
        spec: Which of the models with this signature it is, where a name tells.
    """
    spec = spec or (None if identity is None else published_model(identity))
    path = None if spec is None else shipped_configs() / f"{spec.name}-sparge.yaml"
    if path is None or not path.is_file():
        return DbspConfig(origin=DEFAULT_ORIGIN)
    return DbspConfig.load(path)


def require_same_model(config: DbspConfig, actual: ModelSignature | None, with_pipeline: bool = True) -> None:
    """Raises UserError when a configuration names another checkpoint than the actual one, if both can be told.

    Args:
        with_pipeline: Whether the actual pipeline is known, not only its transformer.
    """
    wanted = None if config.generate.model is None else signature_of_model(config.generate.model)
    if wanted is None or actual is None:
        return
    same = wanted == actual if with_pipeline else wanted.sizes == actual.sizes
    if not same:
        where = f" ({shown_config(config.origin)})" if config.origin else ""
        raise UserError(
            f"the configuration{where} is for {model_title(wanted)}, the model is {model_title(actual)}; take the "
            "configuration of that model, or leave out 'model' to use these settings for any"
        )
