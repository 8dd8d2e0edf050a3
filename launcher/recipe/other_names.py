"""Names of accelerate, axolotl, LLaMA-Factory, torchtune, TRL and transformers' TrainingArguments.

Each name is described once, for the answer to it in a recipe and for `launcher new from=`
(`launcher/convert/`): it is in NAMES if a key here does the same, in ABSENT if nothing here does and the
training differs without it, and in NEEDLESS if the training is the same without it.
"""

from __future__ import annotations

from collections.abc import Collection

NAMES = {
    "activation_checkpointing": "gradient_checkpointing",
    "batch.global_batch_size": "train_batch_size total_batch_size",
    "batch.micro_batch_size": "per_device_train_batch_size per_device_eval_batch_size "
    "train_micro_batch_size_per_gpu eval_batch_size",
    "checkpoint.every_steps": "save_steps save_strategy saves_per_epoch checkpointing_steps "
    "save_every_n_steps save_every_n_epochs",
    "checkpoint.keep_best": "load_best_model_at_end metric_for_best_model",
    "checkpoint.keep_last": "save_total_limit",
    "checkpoint.resume": "resume_from_checkpoint auto_resume_from_checkpoints",
    "data.chat_template": "template chat_template_path chat_template_jinja",
    "data.columns": "field_instruction field_input field_output",
    "data.kind": "stage finetuning_stage dataset_type type reward_model",
    "data.limit": "max_samples max_train_samples",
    "data.loss_on": "train_on_inputs train_on_prompt train_on_input mask_history "
    "assistant_only_loss completion_only_loss roles_to_train",
    "data.messages_column": "field_messages",
    "data.overlong": "excess_length_strategy truncation_mode",
    "data.packing": "sample_packing neat_packing packed",
    "data.pin_memory": "dataloader_pin_memory",
    "data.prefetch_factor": "dataloader_prefetch_factor",
    "data.processes": "dataset_num_proc dataset_processes preprocessing_num_workers",
    "data.shuffle": "shuffle_merged_datasets shuffle_dataset disable_shuffling",
    "data.similar_lengths": "group_by_length",
    "data.system": "default_system default_system_message",
    "data.system_column": "field_system",
    "data.sequence_length": "max_length max_seq_length max_seq_len sequence_len seq_length "
    "cutoff_len block_size model_max_length",
    "data.text_column": "dataset_text_field field",
    "data.tokenizer": "tokenizer_name tokenizer_config tokenizer_name_or_path",
    "data.train": "dataset datasets dataset_name dataset_path data_path data_files train_file "
    "train_dataset pretraining_dataset",
    "data.validation": "eval_dataset test_datasets validation_file dataset_val",
    "data.validation_split": "val_set_size val_size test_size test_split_size",
    "data.workers": "dataloader_num_workers num_workers",
    "distillation.teacher": "teacher_model_name_or_path teacher_model",
    "distillation.temperature": "kd_temperature",
    "distillation.weight": "kd_alpha kd_ratio",
    "evaluation.at_start": "eval_on_start",
    "evaluation.every_steps": "eval_steps eval_strategy evaluation_strategy evals_per_epoch "
    "run_val_every_n_steps",
    "evaluation.stop_after": "early_stopping_patience",
    "kto": "kto_beta",
    "kto.desirable_weight": "kto_desirable_weight kto_chosen_weight",
    "kto.undesirable_weight": "kto_undesirable_weight kto_rejected_weight",
    "logging.every_steps": "logging_steps log_every_n_steps",
    "logging.tensorboard": "use_tensorboard",
    "logging.wandb": "report_to use_wandb",
    "logging.wandb.entity": "wandb_entity",
    "logging.wandb.project": "wandb_project",
    "lora": "adapter use_peft peft peft_config finetuning_type",
    "lora.alpha": "lora_alpha",
    "lora.b_ratio": "loraplus_lr_ratio",
    "lora.dora": "use_dora peft_use_dora",
    "lora.dropout": "lora_dropout",
    "lora.init": "init_lora_weights peft_init_lora_weights pissa_init",
    "lora.modules_to_save": "lora_modules_to_save additional_target",
    "lora.path": "lora_model_dir adapter_name_or_path",
    "lora.quantize": "load_in_4bit load_in_8bit quantization_bit",
    "lora.rank": "r lora_r lora_rank",
    "lora.rank_stabilized": "use_rslora peft_use_rslora",
    "lora.target_modules": "lora_target lora_target_modules lora_target_linear",
    "lora.target_parameters": "lora_target_parameters",
    "model.attention": "attn_implementation flash_attention flash_attn use_flash_attention_2 "
    "sdp_attention eager_attention",
    "model.chunked_loss": "use_liger_kernel use_liger enable_liger_kernel cut_cross_entropy "
    "liger_fused_linear_cross_entropy chunked_cross_entropy",
    "model.compile": "torch_compile",
    "model.neftune_noise_alpha": "neftune_alpha noisy_embedding_alpha",
    "model.new_tokens": "add_tokens add_special_tokens new_special_tokens_config",
    "model.path": "base_model model_name model_name_or_path pretrained_model_name_or_path",
    "model.qat": "quantizer",
    "objective.loss": "label_smoothing_factor",
    "optimizer.betas": "adam_beta1 adam_beta2 beta1 beta2",
    "optimizer.eps": "adam_epsilon adam_eps epsilon",
    "optimizer.groups": "lr_groups embedding_lr embedding_lr_scale param_groups",
    "optimizer.layer_decay": "layerwise_lr_decay llrd lr_decay layer_wise_lr_decay",
    "optimizer.learning_rate": "lr",
    "optimizer.max_grad_norm": "gradient_clipping clip_grad_norm max_norm",
    "optimizer.name": "optim optimizer_type use_muon optim_config",
    "preference.beta": "dpo_beta pref_beta rl_beta",
    "preference.loss": "loss_type pref_loss dpo_loss_type",
    "preference.margin": "simpo_gamma",
    "run.dir": "output_dir output logging_dir save_dir out",
    "run.epochs": "num_epochs num_train_epochs",
    "run.deterministic": "full_determinism",
    "run.float32_matmul": "tf32",
    "run.max_loss_ratio": "loss_watchdog_threshold loss_watchdog_patience",
    "run.name": "run_name wandb_name wandb_run_name",
    "run.timeout": "ddp_timeout",
    "schedule.kind": "lr_scheduler lr_scheduler_type lr_scheduler_kwargs",
    "schedule.min_ratio": "cosine_min_lr_ratio min_lr_ratio",
    "schedule.warmup_steps": "num_warmup_steps",
    "strategy.context_parallel_size": "cp_size sequence_parallel_size sequence_parallel_degree",
    "strategy.cpu_offload": "fsdp_offload_params offload_optimizer offload_params",
    "strategy.expert_parallel_size": "ep_size expert_model_parallel_size",
    "strategy.pipeline_parallel_size": "pp_size pipeline_model_parallel_size",
    "strategy.tensor_parallel_size": "tp_size tensor_parallel tensor_model_parallel_size "
    "tensor_parallel_dim",
    "strategy.kind": "deepspeed fsdp fsdp_config fsdp_version zero_stage distributed_type",
    "strategy.mixed_precision.param_dtype": "bf16 fp16 dtype torch_dtype bfloat16 float16 "
    "float32 pure_bf16",
    "strategy.mixed_precision.float8": "fp8 fp8_backend fp8_enable_fsdp_float8_all_gather",
    "images.train": "freeze_vision_tower freeze_multi_modal_projector freeze_mm_modules",
    "images.max_pixels": "image_max_pixels",
    "images.folder": "media_dir image_folder image_dir",
    "videos.fps": "video_fps",
    "videos.max_frames": "video_maxlen",
    "videos.max_pixels": "video_max_pixels",
    "videos.folder": "video_folder video_dir",
    "strategy.replicate": "dp_replicate_size data_parallel_replicate_dim",
    "strategy.reshard_after_forward": "fsdp_reshard_after_forward fsdp_sharding_strategy",
}
"""For each of our keys, their names. Names that end as our keys (max_steps) need no row."""
ABSENT = {
    "the sum of the losses is cross-entropy and nothing else": "dpo_use_weighting dpo_loss_weights "
    "use_weighting discopop_tau f_divergence_type f_alpha_divergence_coef router_aux_loss_coef "
    "moe_aux_loss_coef pref_ftx pref_bco_weight cpo_alpha rpo_alpha use_dft_loss use_asft_loss "
    "use_eaft_loss use_eaft ld_alpha center_rewards_coefficient",
    "reinforcement learning; TRL, verl and prime-rl have it": "reward_funcs "
    "num_generations vllm_server_host reward_functions grpo_samples ppo_epochs ppo_batch_size",
    "the optimizers are those of optimizer.name": "use_galore use_apollo use_badam "
    "use_adam_mini use_q_galore lisa_n_layers relora relora_steps relora_prune_ratio "
    "optim_target_modules",
    "adapters are LoRA and DoRA, and their first values those of lora.init": "pissa_iter "
    "pissa_convert oft_block_size oft_rank oft_target loftq_config lora_rank_pattern "
    "lora_alpha_pattern peft_layers_to_transform "
    "peft_trainable_token_indices peft_layer_replication peft_layers_pattern lora_bias",
    "model.freeze names what is not trained, by patterns": "unfrozen_parameters freeze_modules "
    "freeze_trainable_layers freeze_trainable_modules freeze_extra_modules use_llama_pro",
    "the model is trained as its config says; model.config changes the config": "shift_attn "
    "mixture_of_depths rope_scaling upcast_layernorm upcast_lmhead_output reinit_weights "
    "fp32_norms fp32_norm_classes scaling_softmax fix_untrained_tokens shrink_embeddings "
    "added_tokens_overrides split_special_tokens quantization is_falcon_derived_model llama4_linearized_experts use_onebitllms",
    "strategy.pipeline_schedule=interleaved_1f1b has two stages on each rank": (
        "virtual_pipeline_model_parallel_size"
    ),
    "each source is read whole and once an epoch; data.train.NAME.weight mixes sources": "mix_strategy "
    "interleave_probs dataset_shard_num dataset_shard_idx shuffle_before_merging_datasets "
    "use_pose eval_sequence_len dataset_exact_deduplication min_sample_len curriculum_sampling",
    "prompts are read whole; data.sequence_length limits them with their answers": "max_prompt_len "
    "max_prompt_length",
    "audio is not trained on": "audio_sampling_rate use_audio_in_video",
    "the processor of the model scales videos; see videos.max_pixels": "video_min_pixels",
    "the processor of the model scales images; see images.max_pixels": "image_min_pixels "
    "image_size processor_type",
    "the reference is the model before training": "ref_model sync_ref_model ref_model_adapters "
    "ref_model_mixup_alpha ref_model_sync_steps",
}
"""What differs without a name that has no equal here, and these names."""
NEEDLESS = {
    "speed and memory only; kernels are chosen by torch": "liger_rope liger_rms_norm "
    "liger_rms_norm_gated liger_layer_norm liger_glu_activation lora_mlp_kernel lora_qkv_kernel "
    "lora_o_kernel lora_embedding_kernel use_kernels use_scattermoe use_sonicmoe "
    "experts_implementation tiled_mlp flash_attn_cross_entropy flash_attn_rms_norm "
    "flash_attn_fuse_mlp flash_optimum flex_attn_compile_kwargs fused_attn_kernel "
    "gemma4_hybrid_attn_impl use_unsloth use_unsloth_gc use_v1_kernels kernel_config low_cpu_mem_usage "
    "gradient_checkpointing_kwargs use_reentrant_gc torch_compile_mode torch_compile_backend "
    "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers torch_empty_cache_steps "
    "gc_steps use_dsv4_kernels use_glm_dsa_kernels quantize_moe_experts model_quantization_config model_quantization_config_kwargs "
    "pad_to_multiple_of pad_to_sequence_len padding_free eval_sample_packing eval_packing "
    "packing_strategy precompute_ref_log_probs use_cache double_quantization "
    "bnb_config_kwargs use_bnb_nested_quant quantization_device_map experimental_skip_move_to_device "
    "auto_find_batch_size device_map moe_grouped_gemm moe_token_dispatcher_type apply_rope_fusion "
    "bias_activation_fusion overlap_grad_reduce overlap_param_gather use_distributed_optimizer "
    "recompute_granularity custom_sharded_layers optimizer_in_bwd init_config dist_backend "
    "sequence_parallel use_mca batch_flattening deepcompile dpo_padding_free dpo_use_liger_kernel "
    "chunked_cross_entropy_num_chunks gc_collect_steps large_head_attention layer_offloading "
    "lora_on_cpu multipack_real_batches qlora_sharded_model_loading ring_attn_func sage_attention "
    "flash_attn_d512 sdpa_varlen sample_packing_bin_size sample_packing_group_size "
    "sample_packing_mp_start_method tiled_mlp_num_shards tiled_mlp_use_original_mlp "
    "torch_compile_options use_ray ray_num_workers ray_run_name resources_per_worker world_size "
    "block_diag_attn offload_folder use_kv_cache activation_checkpointing_kwargs ddp_backend "
    "ddp_static_graph dataloader_in_order dataloader_multiprocessing_context "
    "dataloader_persistent_workers bf16_full_eval fp16_full_eval batch_eval_metrics "
    "eval_do_concat_batches eval_use_gather_object liger_kernel_config skip_memory_metrics "
    "precompute_ref_batch_size optimizer_offload ignore_bias_buffers",
    "metrics go to metrics.jsonl, wandb or TensorBoard": "wandb_watch wandb_log_model wandb_run_id "
    "logging_first_step logging_strategy plot_loss use_swanlab swanlab_project swanlab_run_name "
    "swanlab_mode swanlab_workspace swanlab_experiment_name swanlab_description swanlab_log_model "
    "swanlab_log_completions swanlab_completion_log_interval swanlab_completion_max_buffer "
    "use_mlflow mlflow_tracking_uri mlflow_experiment_name use_comet comet_project_name "
    "trackio_project_name trackio_run_name trackio_space_id use_otel_metrics otel_metrics_host "
    "otel_metrics_port include_tokens_per_second include_num_input_tokens_seen log_level "
    "disable_tqdm include_tkps is_preprocess use_trackio trackio_bucket_id trackio_static_space_id "
    "log_level_replica log_on_each_node logging_nan_inf_filter profiler_steps "
    "profiler_steps_start include_effective_tokens_per_second print_param_status compute_accuracy "
    "eval_on_each_dataset do_bench_eval bench_dataset bench_split mlflow_run_name "
    "hf_mlflow_log_artifacts eval_table_size generate_samples log_peak_memory_stats metric_logger",
    "`hf upload` sends RUN_DIR/hf to the hub": "push_to_hub hub_model_id hub_strategy hub_token "
    "hub_private_repo hub_revision hub_always_push hf_hub_token ms_hub_token om_hub_token push_dataset_to_hub hf_use_auth_token",
    "data.shuffle shuffles each shard of a stream whole": "shuffle_buffer buffer_size",
    "data are tokenized once, into data.cache": "dataset_prepared_path skip_prepare_dataset "
    "overwrite_cache preprocessing_batch_size tokenized_path dataset_keep_in_memory cache_dir "
    "sample_packing_eff_est total_num_tokens streaming_multipack_buffer_size "
    "remove_unused_columns preprocess_iterable num_dataset_shards_to_save label_names "
    "length_column_name data_shared_file_system",
    "the model and its tokenizer say it": "model_type cls_model_config tokenizer_type tokenizer_use_fast "
    "tokenizer_legacy tokenizer_use_mistral_common use_fast_tokenizer is_llama_derived_model "
    "is_mistral_derived_model is_qwen_derived_model lora_fan_in_fan_out "
    "mean_resizing_embeddings tokenizer_save_jinja_files merge_method ignore_pad_token_for_loss "
    "resize_token_embeddings_to_32x resize_vocab eot_tokens task_type lora_task_type",
    "a checkpoint holds all that a resume needs, and the export the weights": "save_only_model "
    "save_first_step fsdp_final_state_dict_type enable_jit_checkpoint ignore_data_skip "
    "restore_callback_states_from_checkpoint save_safetensors overwrite_output_dir save_on_each_node merge_lora save_adapter_weights_only",
    "the command says what to do": "do_train do_eval do_predict strict debug local_rank "
    "predict_with_generate include_for_metrics prediction_loss_only",
}
"""Why the training is the same without a name, and these names."""
FILES_OF_A_SOURCE = ("path", "paths", "file", "data_files", "data_path", "dataset", "dataset_name")
"""Their names for `files` of a source in a mixture."""
NEEDLESS_BEGINNINGS = {
    "export_": "`launcher export` writes models",
    **dict.fromkeys(("gradio_", "generation_", "vllm_", "sglang_"), "only for generating"),
    **dict.fromkeys(
        ("wandb_", "swanlab_", "comet_", "mlflow_", "trackio_"),
        "metrics go to metrics.jsonl, wandb or TensorBoard",
    ),
}
"""The same for names that begin so and have no row of their own."""
KEYS_BY_NAME = {name: key for key, names in NAMES.items() for name in names.split()}
ABSENT_BY_NAME = {name: what for what, names in ABSENT.items() for name in names.split()}
NEEDLESS_BY_NAME = {name: why for why, names in NEEDLESS.items() for name in names.split()}
_BATCH = (
    "batch.global_batch_size is that of an optimizer step over all ranks, batch.micro_batch_size that "
    "of a rank's forward pass"
)
OPTIONS = {
    "out": "o output output_file output_path output_dir outfile file save save_to save_path html json",
    "gpus": "devices num_devices gpu_count gpus_per_node",
    "recipe": "config_file config_path config_name cfg yaml",
    "sequence_length": "max_length max_seq_length max_seq_len sequence_len seq_length cutoff_len",
    "max_new_tokens": "max_length max_tokens n_predict",
    "temperature": "temp t",
    "top_p": "p",
    "system": "system_prompt",
    "model": "model_name model_name_or_path base_model checkpoint",
    "data": "dataset dataset_name data_path train_file",
    "step": "checkpoint ckpt checkpoint_step",
    "dtype": "torch_dtype precision",
}
"""For options of the commands, what other programs call them."""
_ANSWERS = {
    **dict.fromkeys(("batch_size", "bs", "batchsize"), _BATCH),
    "config": "did you mean recipe=FILE? model.config is the config of a model",
    "gradient_accumulation_steps": "gradient accumulation follows from batch.global_batch_size, "
    "batch.micro_batch_size and the number of ranks",
    **dict.fromkeys(
        (
            "num_processes",
            "num_machines",
            "nproc_per_node",
            "nnodes",
            "ranks",
            "world_size",
            "num_gpus",
            "n_gpus",
            "ngpus",
        ),
        "the command has the options gpus and nodes",
    ),
    "nodes": "launcher train, plan and submit take nodes",
    "cpu": "run.device=cpu trains on the CPU, and gpu=cpu plans for it",
    "steps": "run.max_steps is the number of optimizer steps, profile.steps that of a profile",
    "rl": "data.kind and the section preference (dpo, ipo, simpo, orpo) or kto; preference.loss=dpo, or "
    "kto.beta=0.1 with data.kind=unpaired",
}


def option_meant(word: str, options: Collection[str]) -> str | None:
    """Which of a command's options another program calls so; None: none of them."""
    return next((name for name in options if word in OPTIONS.get(name, "").split()), None)


def answer_to(name: str) -> str | None:
    """The answer to a key's name in another tool, such as `did you mean KEY?`; None: not known."""
    name = name.removeprefix("--").replace("-", "_")
    if name in _ANSWERS:
        return _ANSWERS[name]
    if name in KEYS_BY_NAME:
        return f"did you mean {KEYS_BY_NAME[name]}?"
    if name in ABSENT_BY_NAME:
        return f"not available: {ABSENT_BY_NAME[name]}"
    return f"not needed: {NEEDLESS_BY_NAME[name]}" if name in NEEDLESS_BY_NAME else None
