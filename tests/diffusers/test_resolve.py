"""Which settings hold, that all ranks agree on them, and what is said of them; what `dbsp generate` refuses."""

from __future__ import annotations

import json
import types
from unittest import mock

import pytest
import torch
from diffusers import WanTransformer3DModel

import tests.support.single_process
from dbsp_cli.generate.job import GenerateRequest, resolve
from dbsp_cli.generate.rank_output import LogFollower
from dbsp_core import Strategy
from dbsp_core.config import DEFAULT_ORIGIN, DbspConfig
from dbsp_core.models.table import MODEL_SPECS, published_model
from dbsp_diffusers.resolve import resolve_config
from dbsp_start.module import module_command
from dbsp_xdit.command_line import config_from
from tests.diffusers.resolve_cases import attach_to_another_model, settings_by_rank
from tests.support.models.transformers_for_tests import make_transformer
from tests.support.repository import ROOT
from tests.support.single_process import attach_single_process
from tests.support.workers import WorkerError


def published(name: str):
    """A pipeline with a published checkpoint's transformer, apart from its weights."""
    signature = MODEL_SPECS[name].signature
    layers, heads, head_dim, frames = signature.sizes
    wan = signature.pipeline.startswith("Wan")
    patch = {"patch_size": (1, 2, 2)} if wan else {"patch_size": 2, "patch_size_t": frames if frames > 1 else None}
    config = {"num_layers": layers, "num_attention_heads": heads, "attention_head_dim": head_dim, **patch}
    transformer = types.SimpleNamespace(config=config)
    both = {"transformer": transformer, "transformer_2": transformer} if signature.variant == "two" else {}
    parts = both | {"config": {"expand_timesteps": signature.variant == "ti2v"}}
    return type(signature.pipeline, (), parts)(), transformer


@pytest.mark.parametrize("name", MODEL_SPECS)
def test_without_a_configuration_a_known_model_has_its_own(name):
    pipe, transformer = published(name)
    config = resolve_config(None, transformer, pipe=pipe)
    if name == "cogvideox-5b":
        assert (config, config.origin) == (DbspConfig(), DEFAULT_ORIGIN)
    else:
        same = published_model(MODEL_SPECS[name].signature).name
        assert config == DbspConfig.load(f"{same}-sparge")
        assert config.model == same


@pytest.mark.parametrize("name", ["wan2.1-t2v-1.3b", None])
def test_the_single_process_reference_has_the_same(name):
    """Without a configuration: what is shipped for the checkpoint, dense where nothing is."""
    expected = DbspConfig.load(f"{name}-sparge" if name else {})
    if name is None:
        transformer = make_transformer("wan")
    else:
        pipe, sizes = published(name)
        with torch.device("meta"):
            transformer = WanTransformer3DModel(**sizes.config)
        assert resolve_config(None, transformer, pipe=pipe) == expected
    assert resolve_config(None, transformer) == expected
    with mock.patch.object(tests.support.single_process, "MaskProvider") as feed:
        attach_single_process(transformer, None).detach()
    assert feed.call_args.args[:2] == (expected.mask, expected.dense_schedule)


def test_a_configuration_of_another_model_is_refused():
    pipe, transformer = published("wan2.1-t2v-1.3b")
    with pytest.raises(ValueError, match=r"sparge\) is for wan2\.1-t2v-14b, the model is wan2\.1-t2v-1\.3b"):
        resolve_config("wan2.1-t2v-14b-sparge", transformer, pipe=pipe)
    resolve_config({"mask": {"source": "radial"}}, transformer, pipe=pipe)


def test_all_ranks_refuse_together(pool):
    for said in pool(2).run(attach_to_another_model, "wan2.1-t2v-14b-window"):
        assert "is for wan2.1-t2v-14b, the model is a WanPipeline with" in said
    same = {"mask": {"source": "window"}, "strategy": "U1R2"}
    assert len(set(map(repr, pool(2).run(settings_by_rank, [same, same])))) == 1
    for other in (same | {"planner": "paper"}, same | {"mask": {"source": "window", "block_q": 32}}):
        with pytest.raises(WorkerError) as raised:
            pool(2).run(settings_by_rank, [same, other])
        assert [kind for _, kind, _ in raised.value.errors] == ["UserError"] * 2
        assert "the configuration differs on rank(s) [1]" in raised.value.errors[0][2]
    with pytest.raises(WorkerError) as raised:
        pool(2).run(settings_by_rank, [same, {"planer": "dbsp"}])
    assert {text for _, _, text in raised.value.errors} == {
        "rank(s) [1]: unknown key 'planer' in the configuration; did you mean 'planner'?"
    }


def test_xdit_without_a_configuration():
    def asked(model: str, given: str | None = None) -> DbspConfig | None:
        return config_from({"sp_backend": "dbsp", "model": model, "sp_config": given})

    assert asked("Wan2.1-T2V") == DbspConfig.load("wan2.1-t2v-14b-sparge")
    assert asked("Wan2.1-T2V", "radial") != asked("Wan2.1-T2V")
    assert asked("unheard-of") == DbspConfig()
    with pytest.raises(ValueError, match=r"is for cogvideox1\.5-5b, the model is wan2.1-t2v-14b"):
        asked("Wan2.1-T2V", "cogvideox1.5-5b-sparge")


class TestGenerateRefuses:
    """Before a process is launched, with one line."""

    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            ("--prompt x", "nothing says which model; give --model"),
            ("--config tiny-wan", "there is no prompt; give one with --prompt"),
            (
                "--config tiny-wam --prompt x",
                "does not exist; give the path of a YAML file or a shipped one's name; did you mean 'tiny-wan'?",
            ),
            ("--config tiny-wan --prompt x --model ./nowhere", "--model ./nowhere: neither a known model (wan2.1"),
            ("--config tiny-wan --prompt x --model wan2.1-t2v-14b", "is for tiny-wan, the model is wan2.1-t2v-14b"),
            ("--config tiny-wan --prompt x --set mask.density=2", "--set mask.density: density=2.0 must lie between"),
            ("--config tiny-wan --prompt x --set mask.dnsity=2", "--set mask.dnsity: unknown key 'dnsity' in mask so"),
            ("--config tiny-wan --prompt x --set cdf=2", "--set cdf: unknown key 'cdf'; it belongs under 'mask'"),
            ("--config tiny-wan --prompt x --set model.x=1", "--set model.x: 'model' is 'tiny-wan', not a mapping"),
            ("--config tiny-wan --prompt x --set generate.steps", "--set generate.steps is not of the form KEY=VALUE"),
            ("--config tiny-wan --prompt x --set mask=[", "--set mask: '[' is not YAML"),
            ("--config tiny-wan --prompt x --set generate.num_frames=32", "generate.num_frames=32 must be 4k + 1"),
            ("--config tiny-wan --prompt x --seed -1", "--seed: generate.seed=-1 must be at least 0"),
            ("--config tiny-wan --prompt x --out a.avi", "--out a.avi must end in .mp4"),
            ("--config tiny-wan --prompt x --host xfuser", "unknown host 'xfuser'; use diffusers"),
            ("--config tiny-wan --prompt x --nproc 0", "--nproc 0 must be at least 1"),
            ("--config tiny-wan --prompt x --nproc 3 --set strategy=U2R2", "strategy U2R2 needs 2·2 = 4 GPUs but"),
            ("--config tiny-wan --prompt x --nnodes 2", "--nnodes 2 needs a place to meet"),
            ("--config tiny-wan --prompt x --nnodes 2 --master-addr a", "--master-addr needs a --node-rank"),
            ("--config tiny-wan --prompt x --node-rank 1", "--node-rank 1 needs as many nodes; add --nnodes"),
            ("--config tiny-wan --prompt x --set machine=h300", "--set machine: no hardware 'h300'; use "),
            (
                "--config tiny-wan-sparge --prompt x --set layout=learned",
                "--set layout: layout was removed; leave it out",
            ),
            ("--model Wan21-T2V-14B --prompt x", "did you mean 'wan2.1-t2v-14b'?"),
            (
                "--config tiny-wan --prompt x --set model=tiny-van",
                "--set model: model tiny-van: neither a known model",
            ),
            ("--config tiny-wan-paro --prompt x", "tiny-wan-paro.yaml:6: mask file masks/tiny-wan-paro.safetensors"),
        ],
    )
    def test_one_line(self, dbsp, arguments, complaint, monkeypatch, tmp_path):
        monkeypatch.chdir(tmp_path)
        code, out, err = dbsp("generate", *arguments.split(" "))
        assert (code, out) == (2, "")
        assert complaint in err
        assert len(err.splitlines()) == 1
        assert list(tmp_path.iterdir()) == []

    def test_more_processes_than_gpus(self, monkeypatch):
        monkeypatch.setattr("torch.cuda.device_count", lambda: 2)  # mocked: there is no GPU here
        request = GenerateRequest(config="tiny-wan", prompt="x", host="para", nproc=3)
        with pytest.raises(ValueError, match="--nproc 3 is more than the 2 GPUs of this machine"):
            resolve(request)
        assert resolve(GenerateRequest(config="tiny-wan", prompt="x", host="para")).launch.nproc == 2

    def test_para_is_another_name_of_diffusers(self):
        requests = [GenerateRequest(config="tiny-wan", prompt="x", host=name) for name in ("para", "diffusers")]
        assert [resolve(request).host for request in requests] == ["diffusers", "diffusers"]


class TestWhatWouldRun:
    def asked(self, dbsp, *arguments):
        code, out, err = dbsp("generate", "--prompt", "x", "--dry-run", "--json", *arguments)
        assert (code, err) == (0, "")
        return json.loads(out)

    def test_everything_is_filled_in_from_the_checkpoint(self, dbsp):
        said = self.asked(dbsp, "--model", "Wan2.1-T2V-1.3B", "--host", "para", "--nproc", 8)
        video = said["settings"]["generate"]
        assert (video["height"], video["width"], video["num_frames"], video["flow_shift"]) == (480, 832, 81, 3.0)
        assert video["negative_prompt"].startswith("Bright tones")
        assert said["settings"]["model"] == "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
        assert said["settings"]["mask"]["cdf"] == 0.92
        assert said["settings"]["strategy"] == "U8R1"
        assert said["command"][1:4] == [*module_command("torch.distributed.run"), "--standalone"]
        assert said["command"][-3:] == ["WORK/dbsp.yaml", "WORK/video.mp4", "600"]
        assert said["command"][-6:-3] == module_command("dbsp_start.rank", "dbsp_para.generate")

    def test_changes_go_before_the_file(self, dbsp):
        changes = ("--set", "mask.density=0.5", "--set", "strategy=auto", "--set", "dense_schedule={first_steps: 1}")
        settings = self.asked(dbsp, "--config", "tiny-wan", *changes, "--seed", 3)["settings"]
        assert settings["mask"] == {"source": "synthetic", "density": 0.5, "block_q": 32, "block_k": 32}
        assert (settings["strategy"], settings["dense_schedule"], settings["generate"]["seed"]) == (
            "auto",
            {"first_steps": 1},
            3,
        )

    def test_several_nodes_meet_as_torchrun_has_it(self, dbsp):
        meeting = ("--nnodes", 2, "--rdzv-endpoint", "host:29500", "--rdzv-id", "a", "--nproc", 4)
        said = self.asked(dbsp, "--config", "tiny-wan", *meeting)
        options = ["--nproc-per-node=4", "--nnodes=2", "--rdzv-endpoint=host:29500", "--rdzv-id=a"]
        assert {*options, "--rdzv-backend=c10d"} <= set(said["command"])
        assert said["settings"]["strategy"] == str(Strategy(4, 2))

    def test_an_unknown_local_model_runs_dense(self, dbsp, tmp_path):
        folder = tmp_path / "model"
        (folder / "transformer").mkdir(parents=True)
        (folder / "model_index.json").write_text('{"_class_name": "WanPipeline"}')
        sizes = {"num_layers": 3, "num_attention_heads": 5, "attention_head_dim": 8, "patch_size": [1, 2, 2]}
        (folder / "transformer" / "config.json").write_text(json.dumps(sizes))
        code, _, err = dbsp("generate", "--model", folder, "--prompt", "x", "--dry-run")
        assert code == 2
        assert "generate.height is not set, and no default size is known for this model" in err
        size = [part for name in ("height=64", "width=64", "num_frames=5") for part in ("--set", f"generate.{name}")]
        assert "mask" not in self.asked(dbsp, "--model", folder, *size)["settings"]


class TestWatcher:
    def test_progress_is_that_of_rank_0_and_of_the_denoising(self):
        done: list[int] = []
        watcher = LogFollower(steps=8, on_step=done.append)
        for line in (
            "(rank 0) Loading:  50%|#####     | 1/2 [00:00<00:00]",
            "(rank 1)  38%|###8      | 3/8 [00:01<00:02]",
            "(rank 0)  12%|#2        | 1/8 [00:01<00:02](rank 0) ",
            "(rank 0)  25%|##5       | 2/8 [00:01<00:02](rank 1)  25%|##5       | 5/8 [00:01<00:02]",
        ):
            watcher.line(line)
        assert done == [1, 2]

    def test_what_ranks_have_for_the_user_is_told_once(self):
        told: list[str] = []
        watcher = LogFollower(steps=8, on_notice=told.append)
        for rank in range(3):
            watcher.line(f"(rank {rank}) dbsp: no accelerator found")
            watcher.line(f"(rank {rank}) dbsp: error: the mask is for another video")
        watcher.line("(rank 0) a library's remark")
        assert told == ["dbsp: no accelerator found"]
        assert set(watcher.user_errors.values()) == {"the mask is for another video"}


def test_documentation_names_no_flag_that_is_not_there():
    text = (ROOT / "docs" / "quick-start.md").read_text()
    import re

    import typer

    from dbsp_cli.cli import app

    known = {name for p in typer.main.get_command(app).commands["generate"].params for name in p.opts}
    for line in re.findall(r"^dbsp generate.*(?:\\\n.*)*", text, re.MULTILINE):
        assert set(re.findall(r"(--[a-z-]+)", line)) <= known, line
