"""What `dbsp generate --host xdit` checks before its ranks are started, and that each rank reads its settings once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dbsp_core.config import DbspConfig
from dbsp_core.models.table import MODEL_SPECS
from dbsp_core.utils.errors import SettingError, UserError
from dbsp_diffusers.patching import PatchSet
from dbsp_xdit import attachment, runner_models
from dbsp_xdit.flags import parse_known
from dbsp_xdit.generate import check, runner_arguments
from dbsp_xdit.patches import _patch_args, _patch_base_model

WAN = MODEL_SPECS["wan2.1-t2v-1.3b"]
ELSEWHERE = "cpu" if torch.cuda.is_available() else "fa4"


@pytest.mark.parametrize("strategy", ["U2R4", "auto"])
def test_the_check_before_the_ranks_is_of_the_configuration_that_is_given(strategy, monkeypatch):
    """And of no file that is shipped for the model."""
    monkeypatch.setattr("dbsp_xdit.flags.default_config", None)
    good = DbspConfig.load({"mask": {"source": "radial"}, "strategy": strategy, "report": "/proc/nowhere"})
    check(good, WAN.hub, WAN.signature)
    with pytest.raises(SettingError, match=f"kernel {ELSEWHERE!r} cannot be used here"):
        check(replace(good, kernel=ELSEWHERE), WAN.hub, WAN.signature)


def test_the_model_is_what_the_job_says():
    with pytest.raises(UserError, match="that folder does not exist"):
        check(DbspConfig(), "./nowhere", WAN.signature)


def test_a_rank_reads_its_configuration_once(tmp_path, monkeypatch):
    file = tmp_path / "dbsp.yaml"
    file.write_text(f"model: {WAN.hub}\nstrategy: U2R1\nmask: {{source: radial}}\ngenerate: {{prompt: a ball}}\n")
    config = DbspConfig.load(file)
    arguments = parse_known(runner_arguments(tmp_path, config, 2))

    def again(source: object) -> None:
        raise AssertionError(f"{source} is read again")

    monkeypatch.setattr(DbspConfig, "load", again)
    given = []
    monkeypatch.setattr(runner_models, "register", lambda name, model, config: given.append(config))
    monkeypatch.setattr(attachment, "attach", lambda pipe, config: given.append(config))

    class Arguments:
        add_runner_args = staticmethod(lambda parser: parser)

        @classmethod
        def from_runner_args(cls, args):
            return cls()

    class Model:
        def __init__(self, config):
            self.config, self.pipe = config, object()

        def _post_load_and_state_initialization(self, input_args): ...
        def initialize(self, input_args): ...
        def run(self, input_args): ...

    with PatchSet() as patches:
        _patch_args(SimpleNamespace(xFuserArgs=Arguments), patches, read=config)
        _patch_base_model(SimpleNamespace(xFuserModel=Model), patches)
        model = Model(Arguments.from_runner_args(arguments))
        model._post_load_and_state_initialization(arguments)
    assert given == [config, config]
    assert given[0] is given[1]


def test_other_files_of_the_run_are_in_its_folder():
    config = DbspConfig.load({"model": WAN.hub})
    assert "--output_directory=somewhere" in runner_arguments(Path("somewhere"), config, 2)
