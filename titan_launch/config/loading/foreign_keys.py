"""Keys of TorchTitan, Transformers' Trainer, Lightning and Accelerate, with the keys of this job file that replace
them."""

from __future__ import annotations

import re

from titan_launch.core.errors import KeyPath

_LORA = 'use "lora.targets", "lora.rank" and "lora.alpha"'
_NO_QUANTIZED_BASE = (
    "a quantized base (QLoRA) is not supported; frozen parameters are stored in 16 bits with "
    '"precision.frozen_storage_dtype" = "bfloat16"'
)
_NO_STAGE_LAYERS = 'use "parallelism.pipeline_parallel_split_points": the first module of every stage but the first'
_TOKENIZER = 'use "tokenizer.path" with tokenizer.kind = "huggingface"'
_DATASET = 'use "data.path", with "data.kind" = "huggingface" for a data set of the Hugging Face Hub'
_MIXTURE = 'use a table [[data.sources]] for each source of a mixture, with "data.sources.weight"'
_PACKING = 'use "data.packing" = "documents"'
_NO_TRACE = (
    'profiler traces are not supported; "comm.profile_freq" profiles single steps to report exposed communication'
)
_NO_WANDB = (
    'wandb is not supported; reports are written to metrics.jsonl, and to TensorBoard with "metrics.enable_tensorboard"'
)
_NO_DEEPSPEED = 'DeepSpeed is not supported; FSDP2 shards over "parallelism.data_parallel_shard_degree" ranks'
_ACCUMULATION = (
    'set "training.global_batch_size" instead: local_batch_size times data-parallel ranks times accumulation steps'
)
_BF16 = 'use "precision.param_dtype" = "bfloat16"'
_FP16 = 'float16 needs loss scaling, which is not supported; use "precision.param_dtype" = "bfloat16"'
_BETAS = 'use "optimizer.beta1" and "optimizer.beta2"'
_MODE = 'use "activation_checkpoint.mode"; "none" disables activation checkpointing'
_RANKS = "the number of processes is not part of the job; use the option --nproc-per-node of `launch`"
_HOSTS = "the number of hosts is not part of the job; use the option --nnodes of `launch`"
_FOLDER = 'use "job.dump_folder"; checkpoints are in checkpoints/ of the run folder'

TORCHTITAN_KEYS: dict[str, str] = {
    "job.config_file": "not supported in a job file; use the option --config",
    "job.custom_config_module": 'use "model.name" = "package.module:factory", with arguments in [model.args]',
    "job.description": "job.name",
    "model.converters": 'use "float8.enable"',
    "model.dim": "model.args.dim",
    "model.hf_assets_path": _TOKENIZER,
    "model.tokenizer_path": _TOKENIZER,
    "tokenizer.name": _TOKENIZER,
    "training.dtype": "precision.storage_dtype",
    "training.mixed_precision_param": "precision.param_dtype",
    "training.mixed_precision_reduce": "precision.reduce_dtype",
    "training.dataset": _DATASET,
    "training.dataset_path": "data.path",
    "training.max_context_length": "training.seq_len",
    "training.gc_debug": "not supported; remove this key",
    "training.compile": "compile.enable",
    "training.deterministic": "debug.deterministic",
    "optimizer.betas": _BETAS,
    "optimizer.early_step_in_backward": "not supported, since clipping needs all gradients before the update",
    "optimizer.fused": 'use "optimizer.implementation" = "fused"',
    "optimizer.foreach": 'use "optimizer.implementation" = "foreach"',
    "optimizer.momentum": 'use "optimizer.sgd.momentum" or "optimizer.muon.momentum"',
    "lr_scheduler.total_steps": 'use "training.steps"; the schedule ends with the run',
    "lr_scheduler.decay_steps": 'use "lr_scheduler.decay_ratio", a fraction of "training.steps"',
    "lr_scheduler.lr_min": 'use "lr_scheduler.min_lr_factor", a fraction of "optimizer.lr"',
    "lr_scheduler.name": "lr_scheduler.kind",
    "parallelism.disable_loss_parallel": 'use "parallelism.loss_parallel", with the opposite value',
    "parallelism.enable_async_tensor_parallel": "asynchronous tensor parallelism is not supported; remove this key",
    "parallelism.expert_tensor_parallel_degree": '"parallelism.tensor_parallel_degree" also divides experts',
    "parallelism.context_parallel_load_balancer": 'use "parallelism.context_parallel_load_balance", a bool',
    "parallelism.module_fqns_per_model_part": _NO_STAGE_LAYERS,
    "parallelism.pipeline_parallel_layers_per_stage": _NO_STAGE_LAYERS,
    "parallelism.pipeline_parallel_microbatch_size": "training.local_batch_size",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "checkpoint.folder": _FOLDER,
    "checkpoint.keep_latest_k": "checkpoint.keep_latest",
    "checkpoint.load_step": "checkpoint.load",
    "checkpoint.load_only": 'use "checkpoint.initial_load_path" with "checkpoint.enable" = false',
    "checkpoint.initial_load_model_only": '"checkpoint.initial_load_path" always loads only parameters and buffers',
    "checkpoint.initial_load_in_hf": 'use "model.weights" with the folder',
    "checkpoint.last_save_in_hf": 'not needed; "titan-launch export" writes the Hugging Face format of a checkpoint',
    "checkpoint.last_save_model_only": "not supported, since every checkpoint can be resumed; remove this key",
    "checkpoint.export_dtype": 'use "titan-launch export --dtype"; a checkpoint has the dtypes of the training state',
    "checkpoint.create_seed_checkpoint": 'not needed; initial parameters depend only on "training.seed"',
    "activation_checkpoint.enable": _MODE,
    "activation_checkpoint.type": "activation_checkpoint.mode",
    "activation_checkpoint.early_stop": "not supported; remove this key",
    "activation_checkpoint.preserve_rng_state": "not supported; remove this key",
    "compile.mode": "not supported; inductor always runs in its default mode; remove this key",
    "compile.fullgraph": "not needed, since each block is always one graph; remove this key",
    "metrics.enable_wandb": _NO_WANDB,
    "metrics.disable_color_printing": "not needed, since the console output has no colors; remove this key",
    "metrics.save_tb_folder": "not supported; TensorBoard files are in tb/ of the run folder",
    "comm.backend": '"job.device" sets the backend: NCCL for "cuda", gloo for "cpu"',
    "comm.mode": "not supported in a job file; use the option --fake-world-size",
    "comm.train_timeout_seconds": "comm.timeout_seconds",
    "comm.trace_buf_size": "comm.flight_recorder_size",
    "float8.enable_fsdp_float8_all_gather": "float8.all_gather",
    "float8.filter_fqns": 'use "float8.modules": the modules to convert, not those to skip',
    "float8.precompute_float8_dynamic_scale_for_fsdp": 'not needed; "float8.all_gather" always precomputes the scales',
    "float8.recipe_name": "float8.recipe",
    "debug.detect_anomaly": "anomaly detection is not supported; remove this key",
    "debug.deterministic_warn_only": 'not supported; "debug.deterministic" makes nondeterministic kernels an error',
    "validation.enable": 'use "validation.freq"; 0 disables validation',
    "validation.dataset": _DATASET.replace("data.", "validation.data."),
    "validation.dataset_path": "validation.data.path",
    "validation.steps": 'use "validation.max_samples", in samples',
    "experimental": 'not supported; use "model.name" = "package.module:factory" for your own model',
    "fault_tolerance": "torchft is not supported; use the option --max-restarts of `launch` to restart failed ranks",
    "memory_estimation": "not supported; the command `plan` estimates memory",
    "profiling": _NO_TRACE,
    "quantize": "float8.enable",
}
"""Remedies for TorchTitan's keys and sections that have another name in this job file, or that do not exist here. A key
that has the same name in another section here needs no entry: the error for unknown keys finds it."""

COMMON_NAMES: dict[str, str] = {
    "seed": "training.seed",
    "batch_size": "training.local_batch_size",
    "per_device_train_batch_size": "training.local_batch_size",
    "per_device_eval_batch_size": "validation.local_batch_size",
    "gradient_accumulation_steps": _ACCUMULATION,
    "accumulate_grad_batches": _ACCUMULATION,
    "learning_rate": "optimizer.lr",
    "betas": _BETAS,
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "adam_epsilon": "optimizer.eps",
    "optim": "optimizer.name",
    "lr_scheduler_type": "lr_scheduler.kind",
    "warmup_ratio": 'use "lr_scheduler.warmup_steps", in steps',
    "num_train_epochs": "training.epochs",
    "num_epochs": "training.epochs",
    "epochs": "training.epochs",
    "chat_template": 'use "data.template" with data.kind = "chat"',
    "train_on_inputs": 'use "data.train_on" with data.kind = "chat"; "all" trains on all tokens',
    "dataset": _DATASET,
    "dataset_name": _DATASET,
    "dataset_config_name": "data.subset",
    "dataset_split": "data.hf_split",
    "dataset_text_field": 'use "data.field" with data.kind = "jsonl", or "data.column" with other kinds',
    "datasets": _MIXTURE,
    "sample_packing": _PACKING,
    "tokenizer_name": _TOKENIZER,
    "tokenizer_name_or_path": _TOKENIZER,
    "val_set_size": 'use "data.validation_percent", with split = "train" and split = "validation"',
    "grad_clip": "training.max_norm",
    "max_epochs": "training.epochs",
    "max_steps": "training.steps",
    "max_seq_length": "training.seq_len",
    "sequence_len": "training.seq_len",
    "fast_dev_run": 'not supported; set "training.steps" to a small number',
    "max_grad_norm": "training.max_norm",
    "gradient_clip_val": "training.max_norm",
    "gradient_clipping": "training.max_norm",
    "bf16": _BF16,
    "mixed_precision": _BF16,
    "fp16": _FP16,
    "tf32": 'use "kernels.float32_precision" = "tf32"',
    "gradient_checkpointing": _MODE,
    "torch_compile": "compile.enable",
    "label_smoothing_factor": "loss.label_smoothing",
    "use_liger_kernel": 'use "loss.chunks" for a loss without the logits of a microbatch',
    "dynamo_backend": "compile.backend",
    "cpu_offload": "training.enable_cpu_offload",
    "activation_offloading": "activation_checkpoint.offload",
    "enable_activation_offloading": "activation_checkpoint.offload",
    "fsdp": "parallelism.data_parallel_shard_degree",
    "fsdp_config": "parallelism.data_parallel_shard_degree",
    "strategy": 'not supported; use "parallelism.data_parallel_shard_degree" and the other degrees of [parallelism]',
    "sync_batchnorm": 'use "batchnorm.statistics" = "synchronized"',
    "deepspeed": _NO_DEEPSPEED,
    "zero_stage": _NO_DEEPSPEED,
    "lora": _LORA,
    "peft": _LORA,
    **dict.fromkeys(
        ("base_dtype", "load_in_4bit", "load_in_8bit", "quantize_base", "bnb_4bit_quant_type", "quantization_config"),
        _NO_QUANTIZED_BASE,
    ),
    "save_steps": "checkpoint.interval",
    "every_n_train_steps": "checkpoint.interval",
    "save_total_limit": "checkpoint.keep_latest",
    "save_top_k": "checkpoint.keep_best",
    "load_best_model_at_end": 'use "validation.patience" and "checkpoint.keep_best"; the best checkpoint is the result',
    "early_stopping": 'use "validation.patience", a number of validations',
    "early_stopping_patience": "validation.patience",
    "early_stopping_threshold": "validation.min_improvement",
    "resume_from_checkpoint": "checkpoint.load",
    "output_dir": _FOLDER,
    "default_root_dir": _FOLDER,
    "run_name": "job.name",
    "logging_steps": "metrics.log_freq",
    "log_every_n_steps": "metrics.log_freq",
    "report_to": _NO_WANDB,
    "wandb": _NO_WANDB,
    "eval_steps": "validation.freq",
    "val_check_interval": "validation.freq",
    "check_val_every_n_epoch": 'use "validation.freq", in optimizer steps',
    "limit_val_batches": 'use "validation.max_samples", in samples',
    "dataloader_num_workers": "data.num_workers",
    "ddp_timeout": "comm.timeout_seconds",
    "profiler": _NO_TRACE,
    "accelerator": "job.device",
    "devices": _RANKS,
    "num_processes": _RANKS,
    "num_nodes": _HOSTS,
    "num_machines": _HOSTS,
    "machine_rank": "the number of this host is not part of the job; use the option --node-rank of `launch`",
    "main_process_ip": "the address of rank 0 is not part of the job; use the option --master-addr of `launch`",
}
"""Remedies for the keys of the other tools. They apply to a key of this name in any section."""

FOREIGN_KEYS: dict[str, str] = {
    **TORCHTITAN_KEYS,
    **COMMON_NAMES,
    # Sections of this job file that other tools set to a single value.
    "activation_checkpoint": "activation_checkpoint.mode",
    "compile": "compile.enable",
    "data": "data.path",
    "float8": "float8.enable",
    "gradient_accumulation": _ACCUMULATION,
    "lr_scheduler": "lr_scheduler.kind",
    "model": "model.name",
    "optimizer": "optimizer.name",
    "precision": 'use "precision.param_dtype", such as "bfloat16"',
}
"""Remedies of all tools, by dotted key (for one section) or by name (for any section). A remedy is a key of this job
file, or a clause with such keys in quotes."""


def foreign_key(key: KeyPath) -> tuple[str, list[KeyPath]] | None:
    """Return the remedy for a key of another tool, and the keys of this job file that the remedy names; None for any
    other key."""
    text = FOREIGN_KEYS.get(".".join(map(str, key))) or FOREIGN_KEYS.get(str(key[-1]))
    if text is None:
        return None
    remedy = text if " " in text else f'use "{text}"'
    return remedy, [tuple(named.split(".")) for named in re.findall(r'"(\w+(?:\.\w+)+)"', remedy)]
