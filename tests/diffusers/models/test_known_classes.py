"""Every transformer class of diffusers is known or rejected with a reason, and none other."""

from __future__ import annotations

import inspect

import pytest
from torch import nn

from dbsp_diffusers.models import ARCHITECTURES, UNSUPPORTED, architecture_of, register_architecture


def test_each_class_is_known_or_rejected():
    """A new version's class, which neither table has, fails here, and so does an entry that it no longer has."""
    from diffusers.models import transformers

    classes = {name for name, cls in vars(transformers).items() if inspect.isclass(cls) and issubclass(cls, nn.Module)}
    assert len(classes) > 60
    assert {*ARCHITECTURES, *UNSUPPORTED} == classes
    assert ARCHITECTURES.keys() & UNSUPPORTED.keys() == set()


def made(name: str, *bases: type) -> nn.Module:
    return type(name, bases or (nn.Module,), {})()


def test_rejection_gives_its_reason():
    for cls in (made("SanaVideoTransformer3DModel"), made("Mine", type(made("SanaVideoTransformer3DModel")))):
        with pytest.raises(ValueError, match="its attention is linear"):
            architecture_of(cls)


def test_registered_class_is_no_longer_rejected(monkeypatch):
    monkeypatch.setattr("dbsp_diffusers.models.table.ARCHITECTURES", dict(ARCHITECTURES))
    ours = ARCHITECTURES["WanTransformer3DModel"]
    register_architecture("PixArtTransformer2DModel", ours)
    assert architecture_of(made("PixArtTransformer2DModel")) is ours
    assert "PixArtTransformer2DModel" not in ARCHITECTURES
