"""Undocumented names of frameworks that db-SP imports, patches or reads. tests/scripts/test_versions.py holds
each against what is installed; scripts/versions against the oldest and newest that pyproject.toml admits."""

from __future__ import annotations

from scripts.checks.versions.looking_up import PrivateName
from scripts.checks.versions.xfuser_names import XFUSER

_HOOKS = "diffusers.hooks"
_WAN = ("patch_embedding", "rope", "condition_embedder", "scale_shift_table", "norm_out", "proj_out", "blocks")
_JOINT = (
    *("x_embedder", "context_embedder", "time_text_embed", "norm_out", "proj_out"),
    *("transformer_blocks", "single_transformer_blocks"),
)
_DOUBLE = ("norm1", "norm1_context", "attn", "norm2", "ff", "norm2_context", "ff_context")
_SINGLE = ("norm", "proj_mlp", "act_mlp", "proj_out", "attn")
_CLASSES = {
    "WanTransformer3DModel": ("hidden_states", "timestep", "encoder_hidden_states"),
    "WanVACETransformer3DModel": ("hidden_states", "timestep", "control_hidden_states"),
    "SkyReelsV2Transformer3DModel": ("hidden_states", "timestep", "enable_diffusion_forcing"),
    "ChronoEditTransformer3DModel": ("hidden_states", "timestep"),
    "CogVideoXTransformer3DModel": ("hidden_states", "encoder_hidden_states", "timestep", "image_rotary_emb"),
    "HunyuanVideoTransformer3DModel": ("hidden_states", "timestep", "encoder_attention_mask"),
    "HunyuanVideo15Transformer3DModel": (
        *("hidden_states", "timestep", "encoder_attention_mask", "encoder_attention_mask_2", "image_embeds"),
    ),
    "LTXVideoTransformer3DModel": ("hidden_states", "timestep", "num_frames", "height", "width", "video_coords"),
    "FluxTransformer2DModel": ("hidden_states", "encoder_hidden_states", "timestep", "img_ids", "txt_ids"),
    "Flux2Transformer2DModel": ("hidden_states", "encoder_hidden_states", "timestep", "img_ids", "txt_ids"),
    "QwenImageTransformer2DModel": ("hidden_states", "encoder_hidden_states_mask", "timestep", "img_shapes"),
    "MiniMaxH3Transformer3DModel": (
        *("hidden_states", "video_indices", "position_ids", "timestep", "timestep_indices"),
    ),
}
"""Arguments of each transformer's forward that have its tokens."""
_PLANNED = (
    *("LTXVideoTransformer3DModel", "FluxTransformer2DModel", "Flux2Transformer2DModel"),
    *("QwenImageTransformer2DModel", "MiniMaxH3Transformer3DModel"),
)
_IMAGE_MODELS = ("Flux", "Qwen", "ZImage", "Krea2", "Ernie", "LongCat", "Ovis")


def _family(name: str) -> str:
    return "image_models" if name.startswith(_IMAGE_MODELS) else "video_models"


_SINCE = {"MiniMaxH3Transformer3DModel": "0.40"}
_DIFFUSERS = (
    *(
        PrivateName(
            f"diffusers:{cls}.forward",
            f"dbsp_diffusers.models.{_family(cls)}",
            ("self", *arguments),
            since=_SINCE.get(cls, ""),
        )
        for cls, arguments in _CLASSES.items()
    ),
    *(
        PrivateName(f"diffusers:{cls}._cp_plan", "dbsp_diffusers.models.architecture", since=_SINCE.get(cls, ""))
        for cls in _PLANNED
    ),
    PrivateName(
        "diffusers:WanTransformer3DModel.__init__",
        "dbsp_diffusers.packed.wan",
        says=tuple(f"self.{name} =" for name in _WAN),
    ),
    *(
        PrivateName(
            f"diffusers:{cls}.__init__",
            "dbsp_diffusers.packed.mmdit",
            says=tuple(f"self.{name} =" for name in (*_JOINT, rotary)),
        )
        for cls, rotary in (
            ("FluxTransformer2DModel", "pos_embed"),
            ("HunyuanVideoTransformer3DModel", "rope"),
        )
    ),
    *(
        PrivateName(
            f"diffusers.models.transformers.{file}:{cls}TransformerBlock.__init__",
            "dbsp_diffusers.packed.mmdit",
            says=tuple(f"self.{name} =" for name in names),
        )
        for file, name in (("transformer_flux", "Flux"), ("transformer_hunyuan_video", "HunyuanVideo"))
        for cls, names in ((name, _DOUBLE), (f"{name}Single", _SINGLE))
    ),
    *(
        PrivateName(
            f"diffusers.models.normalization:{cls}.__init__",
            "dbsp_diffusers.packed.mmdit",
            says=("self.silu =", "self.linear =", "self.norm ="),
        )
        for cls in ("AdaLayerNormZero", "AdaLayerNormZeroSingle", "AdaLayerNormContinuous")
    ),
    PrivateName("diffusers:WanTransformer3DModel.cache_context", "dbsp_diffusers.patching", ("name",)),
    PrivateName(
        "diffusers:ModelMixin.__init__", "dbsp_diffusers.packed.passes", says=("self._gradient_checkpointing_func =",)
    ),
    PrivateName("diffusers:ModelMixin._parallel_config", "dbsp_diffusers.attach"),
    PrivateName(
        "diffusers.models.attention_dispatch:AttentionBackendName.NATIVE", "dbsp_diffusers.sharding.attention"
    ),
    *(
        PrivateName(f"diffusers.models.transformers.transformer_wan:WanAttnProcessor.{name}", user)
        for name, user in (
            ("_attention_backend", "dbsp_diffusers.sharding.attention"),
            ("_parallel_config", "dbsp_diffusers.attach"),
        )
    ),
    PrivateName(
        f"{_HOOKS}.hooks:HookRegistry.__init__", "dbsp_diffusers.patching", says=("self.hooks", "self._fn_refs")
    ),
    PrivateName(
        f"{_HOOKS}.hooks:HookRegistry.check_if_exists_or_initialize",
        "dbsp_diffusers.patching",
        says=("_diffusers_hook",),
    ),
    PrivateName(
        f"{_HOOKS}.hooks:HookRegistry.register_hook",
        "dbsp_diffusers.patching",
        says=('hasattr(hook, "new_forward")', "fn_ref.original_forward"),
    ),
    PrivateName(
        f"{_HOOKS}.hooks:HookRegistry.reset_stateful_hooks",
        "dbsp_diffusers.sharding.step_caches",
        says=("hook._is_stateful", "hook.reset_state(self._module_ref)"),
    ),
    PrivateName(
        f"{_HOOKS}.first_block_cache:FBCHeadBlockHook.__init__",
        "dbsp_diffusers.sharding.step_caches",
        says=("self.state_manager =", "self.threshold ="),
    ),
    PrivateName(
        f"{_HOOKS}.first_block_cache:FBCHeadBlockHook._should_compute_remaining_blocks",
        "dbsp_diffusers.sharding.step_caches",
        ("hidden_states_residual",),
    ),
    PrivateName(f"{_HOOKS}.first_block_cache", "dbsp_diffusers.sharding.step_caches", says=("head_block_residual",)),
)
_ADAPTERS = "para_attn.context_parallel.diffusers_adapters"
_PARA_ATTN = (
    *(
        PrivateName(f"{_ADAPTERS}.{name}:{function}", "dbsp_para.patches", takes)
        for name in ("wan", "cogvideox", "flux", "hunyuan_video", "mochi")
        for function, takes in (("parallelize_pipe", ("pipe",)), ("parallelize_transformer", ("mesh",)))
    ),
    PrivateName(
        "para_attn.first_block_cache.utils:are_two_tensors_similar",
        "dbsp_para.patches",
        ("t1", "t2", "threshold", "parallelized"),
    ),
    PrivateName(
        "para_attn.first_block_cache.utils",
        "dbsp_para.patches",
        says=('getattr(self.transformer, "_is_parallelized", False)',),
    ),
    PrivateName(
        "para_attn.context_parallel:init_context_parallel_mesh",
        "dbsp_para.attach",
        ("max_batch_dim_size", "max_ring_dim_size"),
    ),
)
_CONTEXTS = "cache_dit.caching.cache_contexts.cache_manager"
_CACHE_DIT = (
    PrivateName(
        f"{_CONTEXTS}:CachedContextManager.similarity",
        "dbsp_diffusers.sharding.step_caches",
        ("t1", "t2", "threshold", "parallelized"),
    ),
    PrivateName(
        f"{_CONTEXTS}:CachedContextManager.get_important_condition_threshold", "dbsp_diffusers.sharding.step_caches"
    ),
    PrivateName(
        f"{_CONTEXTS}:CachedContextManager.can_cache",
        "dbsp_diffusers.sharding.step_caches",
        says=("self.similarity(",),
    ),
    PrivateName(
        "cache_dit.caching.cache_adapters.cache_adapter",
        "dbsp_diffusers.sharding.step_caches",
        says=("transformer._context_manager =", "_is_cached = True"),
    ),
)
_TORCH = (
    PrivateName("torch:_import_device_backends", "dbsp_cli.autoload", says=("torch.backends",)),
    PrivateName("torch._utils:_flatten_dense_tensors", "dbsp_diffusers.sum_gradients"),
    PrivateName("torch._utils:_unflatten_dense_tensors", "dbsp_diffusers.sum_gradients"),
    PrivateName("torch.distributed:ProcessGroup._device_types", "dbsp_core.comm.process_groups"),
    PrivateName("torch.distributed:ProcessGroup._get_backend", "dbsp_core.comm.process_groups"),
    PrivateName("torch.distributed:ProcessGroupGloo._Options._timeout", "dbsp_core.comm.process_groups"),
    PrivateName("torch.distributed:ProcessGroup.group_name", "dbsp_core.comm.process_groups"),
    PrivateName(
        "torch.distributed.distributed_c10d:_new_process_group_helper",
        "dbsp_core.comm.process_groups",
        *(("group_size", "group_rank", "global_ranks_in_group", "backend", "store", "group_name", "timeout"),),
    ),
    PrivateName("torch.distributed.distributed_c10d:_get_default_store", "dbsp_core.comm.process_groups"),
    PrivateName("torch.distributed.distributed_c10d:_get_default_group", "dbsp_core.comm.process_groups"),
    PrivateName("torch.distributed:ProcessGroup.bound_device_id", "dbsp_core.comm.process_groups"),
    PrivateName("torch.distributed.distributed_c10d:_world.pg_group_ranks", "dbsp_core.comm.process_groups"),
    PrivateName("torch.distributed.distributed_c10d:_abort_process_group", "dbsp_diffusers.rank_program"),
    PrivateName("torch.distributed.device_mesh:DeviceMesh._flatten", "dbsp_para.attach"),
    PrivateName("torch.accelerator:is_available", "dbsp_xdit.cpu_shim"),
    PrivateName("torch._C._functorch:is_functorch_wrapped_tensor", "dbsp_core.comm.consistency"),
    PrivateName("torch._C._functorch:peek_interpreter_stack", "dbsp_core.comm.consistency"),
    PrivateName("torch._functorch.pyfunctorch:temporarily_clear_interpreter_stack", "dbsp_core.comm.consistency"),
    PrivateName("torch._dynamo.eval_frame:OptimizedModule", "dbsp_diffusers.attached", says=("_orig_mod",)),
    *(
        PrivateName(f"torch.ops:aten._scaled_dot_product_flash_attention_for_cpu{suffix}", "dbsp_kernels.backends.cpu")
        for suffix in ("", "_backward")
    ),
    *(
        PrivateName(f"torch.ops:aten._scaled_dot_product_{name}_attention", "dbsp_kernels.dense")
        for name in ("flash", "efficient", "cudnn")
    ),
    PrivateName("torch:_fused_sdp_choice", "dbsp_kernels.dense"),
    PrivateName("torch.distributed.launcher.api:elastic_launch", "dbsp_cli.generate.ranks"),
)
PRIVATE_NAMES = {
    "xfuser": XFUSER,
    "diffusers": _DIFFUSERS,
    "para-attn": _PARA_ATTN,
    "cache-dit": _CACHE_DIT,
    "torch": _TORCH,
}
"""By the package that has them."""
