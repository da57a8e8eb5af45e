"""What db-SP imports, patches or reads of xfuser that it does not document."""

from __future__ import annotations

from scripts.checks.versions.looking_up import PrivateName

__all__ = ["XFUSER"]

_RUNNERS = "xfuser.model_executor.models.runner_models"
_TRANSFORMERS = "xfuser.model_executor.models.transformers"
_BASE = f"{_RUNNERS}.base_model"
_STATE = "xfuser.core.distributed.runtime_state"
XFUSER = (
    PrivateName("xfuser.cli:main", "dbsp_xdit.patches", ("args",), ("xfuser.runner", "torch.distributed.run")),
    PrivateName("xfuser.runner", "dbsp_xdit.generate", says=('if __name__ == "__main__"',)),
    PrivateName("xfuser.config.args:xFuserArgs.add_runner_args", "dbsp_xdit.patches", ("parser",)),
    PrivateName("xfuser.config.args:xFuserArgs.from_runner_args", "dbsp_xdit.patches", ("args",)),
    PrivateName("xfuser.config.args", "dbsp_xdit.flags", says=('.replace("-", "_")',)),
    PrivateName("xfuser.envs:_is_cuda", "dbsp_xdit.cpu_shim"),
    PrivateName("xfuser.envs:get_device_version", "dbsp_xdit.cpu_shim"),
    PrivateName("xfuser.envs:get_torch_distributed_backend", "dbsp_xdit.cpu_shim"),
    PrivateName("xfuser.envs:PACKAGES_CHECKER.get_packages_info", "dbsp_xdit.cpu_shim"),
    PrivateName("xfuser.envs", "dbsp_xdit.cpu_shim", says=('packages_info["has_long_ctx_attn"]',)),
    PrivateName(f"{_RUNNERS}.loading.placement:place_pipeline_components", "dbsp_xdit.cpu_shim", ("loader",)),
    PrivateName(f"{_BASE}:MODEL_REGISTRY", "dbsp_xdit.runner_models"),
    *(
        PrivateName(f"{_BASE}:xFuserModel.{name}", "dbsp_xdit.patches", ("self", "input_args"))
        for name in ("_post_load_and_state_initialization", "initialize", "run", "_run_pipe")
    ),
    PrivateName(f"{_BASE}:xFuserModel._load_model", "dbsp_xdit.runner_models", ("self",)),
    PrivateName(f"{_BASE}:xFuserModel._customize_settings", "dbsp_xdit.runner_models", ("self", "config")),
    PrivateName(f"{_BASE}:xFuserModel._make_generator", "dbsp_xdit.runner_models", ("seed",)),
    PrivateName(f"{_BASE}:xFuserModel.save_output", "dbsp_xdit.generate", ("self", "output")),
    PrivateName(
        f"{_BASE}:DefaultInputValues",
        "dbsp_xdit.runner_models",
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
    PrivateName(f"{_BASE}:DiffusionOutput", "dbsp_xdit.runner_models", ("videos", "pipe_args")),
    PrivateName(
        f"{_BASE}:ModelCapabilities",
        "dbsp_xdit.runner_models",
        (
            "use_cfg_parallel",
            "enable_slicing",
            "enable_tiling",
            "use_vae_channels_last_format",
            "use_fp8_gemms",
            "use_fp4_gemms",
            "use_fp6_gemms",
        ),
    ),
    PrivateName(
        f"{_BASE}:ModelSettings",
        "dbsp_xdit.runner_models",
        ("model_name", "output_name", "model_output_type", "mod_value", "resolution_divisor", "fps"),
    ),
    PrivateName(
        f"{_STATE}:RuntimeState._check_if_backend_compatible_with_current_configuration",
        "dbsp_xdit.patches",
        ("self", "attention_backend"),
    ),
    PrivateName(f"{_STATE}:DiTRuntimeState._check_model_and_parallel_config", "dbsp_xdit.patches", ("self",)),
    *(
        PrivateName(f"xfuser.core.distributed:{name}", "dbsp_xdit.attachment")
        for name in (
            "get_cfg_group",
            "get_sp_group",
            "get_runtime_state",
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
    PrivateName("xfuser.core.utils.runner_utils:is_last_process", "dbsp_xdit.generate"),
    PrivateName(
        "xfuser.model_executor.pipelines.pipeline_wan_i2v:xFuserWanImageToVideoPipeline", "dbsp_xdit.runner_models"
    ),
    *(
        PrivateName(f"{_TRANSFORMERS}.{name}", "dbsp_xdit.stock")
        for name in (
            "transformer_wan:xFuserWanTransformer3DWrapper",
            "transformer_wan_vace:xFuserWanVACETransformer3DWrapper",
            "cogvideox_transformer_3d:xFuserCogVideoXTransformer3DWrapper",
        )
    ),
    PrivateName("xfuser.model_executor.base_wrapper:xFuserBaseWrapper.__init__", "dbsp_xdit.stock", ("module",)),
    PrivateName(
        "xfuser.model_executor.pipelines.base_pipeline:xFuserPipelineBaseWrapper.check_to_use_naive_forward",
        "dbsp_xdit.stock",
        says=("self.use_naive_forward()", "self.module("),
    ),
)
