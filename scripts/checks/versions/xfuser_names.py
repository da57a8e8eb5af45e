"""Undocumented names of xfuser that db-SP imports, patches or reads."""

from __future__ import annotations

from scripts.checks.versions.looking_up import PrivateName

_RUNNERS = "xfuser.model_executor.models.runner_models"
_TRANSFORMERS = "xfuser.model_executor.models.transformers"
_BASE = f"{_RUNNERS}.base_model"
_STATE = "xfuser.core.distributed.runtime_state"
XFUSER = (
    PrivateName("xfuser.cli:main", "dbsp_xdit.runner", ("args",), ("xfuser.runner", "torch.distributed.run")),
    PrivateName("xfuser.cli:extract_torchrun_args", "dbsp_xdit.runner", ("args",), ("TORCHRUN_ARGS",)),
    PrivateName(
        "xfuser.runner", "dbsp_xdit.runner", says=("xFuserArgs.add_runner_args", "xFuserArgs.from_runner_args")
    ),
    PrivateName("xfuser.config.args:xFuserArgs.add_runner_args", "dbsp_xdit.runner", ("parser",)),
    PrivateName("xfuser.config.args:xFuserArgs.from_runner_args", "dbsp_xdit.runner", ("args",)),
    PrivateName("xfuser.config.args", "dbsp_xdit.command_line", says=('.replace("-", "_")',)),
    PrivateName("xfuser.envs:_is_cuda", "dbsp_xdit.cpu_shim"),
    PrivateName("xfuser.envs:get_device_version", "dbsp_xdit.cpu_shim"),
    PrivateName("xfuser.envs:get_torch_distributed_backend", "dbsp_xdit.cpu_shim"),
    PrivateName("xfuser.envs:PACKAGES_CHECKER.get_packages_info", "dbsp_xdit.cpu_shim"),
    PrivateName("xfuser.envs", "dbsp_xdit.cpu_shim", says=('packages_info["has_long_ctx_attn"]',)),
    PrivateName(f"{_RUNNERS}.loading.placement:place_pipeline_components", "dbsp_xdit.cpu_shim", ("loader",)),
    PrivateName(f"{_BASE}:MODEL_REGISTRY", "dbsp_xdit.command_line"),
    *(
        PrivateName(f"{_BASE}:xFuserModel.{name}", "dbsp_xdit.runner", ("self", "input_args"))
        for name in ("_post_load_and_state_initialization", "initialize", "run", "_run_pipe")
    ),
    PrivateName(f"{_BASE}:xFuserModel._load_model", "dbsp_xdit.command_line", ("self",)),
    PrivateName(f"{_BASE}:xFuserModel._make_generator", "dbsp_xdit.command_line", ("seed",)),
    PrivateName(
        f"{_BASE}:DefaultInputValues",
        "dbsp_xdit.command_line",
        (
            "height",
            "width",
            "num_frames",
            "guidance_scale",
            "guidance_scale_2",
            "flow_shift",
            "num_inference_steps",
            "max_sequence_length",
        ),
    ),
    PrivateName(f"{_BASE}:DiffusionOutput", "dbsp_xdit.command_line", ("images", "videos", "pipe_args")),
    PrivateName(
        f"{_BASE}:ModelCapabilities",
        "dbsp_xdit.command_line",
        ("enable_slicing", "enable_tiling", "use_vae_channels_last_format"),
    ),
    PrivateName(
        f"{_BASE}:ModelSettings",
        "dbsp_xdit.command_line",
        ("model_name", "output_name", "model_output_type", "fps"),
    ),
    PrivateName(
        f"{_STATE}:RuntimeState._check_if_backend_compatible_with_current_configuration",
        "dbsp_xdit.runner",
        ("self", "attention_backend"),
    ),
    PrivateName(
        f"{_STATE}:DiTRuntimeState._check_model_and_parallel_config", "dbsp_xdit.runner", ("parallel_config",)
    ),
    *(
        PrivateName(f"xfuser.core.distributed:{name}", "dbsp_xdit.attachment")
        for name in (
            "get_cfg_group",
            "get_sp_group",
            "get_ring_parallel_world_size",
            "get_ulysses_parallel_world_size",
            "get_pipeline_parallel_world_size",
            "get_tensor_model_parallel_world_size",
            "model_parallel_is_initialized",
            "initialize_runtime_state",
        )
    ),
    PrivateName(
        "xfuser.core.distributed.group_coordinator:GroupCoordinator",
        "dbsp_xdit.attachment",
        says=("self.device_group",),
    ),
    *(
        PrivateName(f"{_TRANSFORMERS}.{name}", "dbsp_xdit.attachment")
        for name in (
            "transformer_wan:xFuserWanTransformer3DWrapper",
            "transformer_wan_vace:xFuserWanVACETransformer3DWrapper",
            "cogvideox_transformer_3d:xFuserCogVideoXTransformer3DWrapper",
        )
    ),
    PrivateName("xfuser.model_executor.base_wrapper:xFuserBaseWrapper.__init__", "dbsp_xdit.attachment", ("module",)),
    PrivateName(
        "xfuser.model_executor.pipelines.base_pipeline:xFuserPipelineBaseWrapper.check_to_use_naive_forward",
        "dbsp_xdit.attachment",
        says=("self.use_naive_forward()", "self.module("),
    ),
)
