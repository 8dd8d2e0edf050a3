"""Names of accelerate, axolotl, LLaMA-Factory, TRL and transformers' TrainingArguments for keys."""

from __future__ import annotations

NAMES = {
    "activation_checkpointing": "gradient_checkpointing",
    "batch.global_batch_size": "train_batch_size total_batch_size",
    "batch.micro_batch_size": "per_device_train_batch_size per_device_eval_batch_size "
    "train_micro_batch_size_per_gpu eval_batch_size",
    "checkpoint.every_steps": "save_steps save_strategy saves_per_epoch checkpointing_steps",
    "checkpoint.keep_best": "load_best_model_at_end metric_for_best_model",
    "checkpoint.keep_last": "save_total_limit",
    "checkpoint.resume": "resume_from_checkpoint",
    "data.chat_template": "template chat_template_path",
    "data.kind": "stage finetuning_stage rl dataset_type type",
    "data.messages_column": "field_messages",
    "data.packing": "sample_packing",
    "data.pin_memory": "dataloader_pin_memory",
    "data.prefetch_factor": "dataloader_prefetch_factor",
    "data.processes": "dataset_num_proc dataset_processes preprocessing_num_workers",
    "data.sequence_length": "max_length max_seq_length max_seq_len sequence_len seq_length "
    "cutoff_len block_size model_max_length",
    "data.text_column": "dataset_text_field field",
    "data.tokenizer": "tokenizer_name tokenizer_config tokenizer_name_or_path",
    "data.train": "dataset datasets dataset_name dataset_path data_path data_files train_file",
    "data.validation": "eval_dataset test_datasets validation_file",
    "data.validation_split": "val_set_size val_size test_size",
    "data.workers": "dataloader_num_workers num_workers",
    "distillation.teacher": "teacher_model_name_or_path teacher_model",
    "distillation.temperature": "kd_temperature",
    "distillation.weight": "kd_alpha kd_ratio",
    "evaluation.every_steps": "eval_steps eval_strategy evaluation_strategy evals_per_epoch",
    "evaluation.stop_after": "early_stopping_patience",
    "logging.every_steps": "logging_steps",
    "logging.wandb": "report_to use_wandb",
    "logging.wandb.entity": "wandb_entity",
    "logging.wandb.project": "wandb_project",
    "lora": "adapter use_peft peft peft_config finetuning_type",
    "lora.alpha": "lora_alpha",
    "lora.dropout": "lora_dropout",
    "lora.quantize": "load_in_4bit load_in_8bit quantization_bit",
    "lora.rank": "r lora_r lora_rank",
    "lora.target_modules": "lora_target lora_target_modules lora_target_linear",
    "lora.target_parameters": "lora_target_parameters",
    "model.attention": "attn_implementation flash_attention flash_attn use_flash_attention_2",
    "model.chunked_loss": "use_liger_kernel use_liger enable_liger_kernel",
    "model.compile": "torch_compile",
    "model.path": "base_model model_name model_name_or_path pretrained_model_name_or_path",
    "optimizer.betas": "adam_beta1 adam_beta2 beta1 beta2",
    "optimizer.eps": "adam_epsilon epsilon",
    "optimizer.learning_rate": "lr",
    "optimizer.max_grad_norm": "gradient_clipping clip_grad_norm max_norm",
    "optimizer.name": "optim optimizer_type",
    "preference.beta": "dpo_beta pref_beta rl_beta",
    "preference.loss": "loss_type pref_loss",
    "run.dir": "output_dir output",
    "run.epochs": "num_epochs num_train_epochs",
    "run.float32_matmul": "tf32",
    "run.name": "run_name wandb_name wandb_run_name",
    "run.timeout": "ddp_timeout",
    "schedule.kind": "lr_scheduler lr_scheduler_type",
    "schedule.min_ratio": "cosine_min_lr_ratio min_lr_ratio",
    "schedule.warmup_steps": "num_warmup_steps",
    "strategy.context_parallel_size": "cp_size sequence_parallel_size sequence_parallel_degree",
    "strategy.cpu_offload": "fsdp_offload_params offload_optimizer offload_params",
    "strategy.expert_parallel_size": "ep_size",
    "strategy.tensor_parallel_size": "tp_size tensor_parallel",
    "strategy.kind": "deepspeed fsdp fsdp_config fsdp_version zero_stage distributed_type",
    "strategy.mixed_precision.param_dtype": "bf16 fp16 dtype torch_dtype",
    "strategy.reshard_after_forward": "fsdp_reshard_after_forward fsdp_sharding_strategy",
}
"""For each of our keys, their names. Names that end as our keys (max_steps) need no row."""
FILES_OF_A_SOURCE = ("path", "paths", "file", "data_files", "data_path", "dataset", "dataset_name")
"""Their names for `files` of a source in a mixture."""
_KEYS = {name: key for key, names in NAMES.items() for name in names.split()}
_ANSWERS = {
    "batch_size": "batch.global_batch_size is that of an optimizer step over all ranks, "
    "batch.micro_batch_size that of a rank's forward pass",
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
    "train_on_inputs": "loss is on the answers with data.kind: chat and instruct, and on every "
    "token with text",
}


def answer_to(name: str) -> str | None:
    """The answer to a key's name in another tool, `did you mean KEY?`; None if it is not known."""
    name = name.removeprefix("--").replace("-", "_")
    return f"did you mean {_KEYS[name]}?" if name in _KEYS else _ANSWERS.get(name)
