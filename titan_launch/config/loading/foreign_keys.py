"""Keys of TorchTitan, TRL, Transformers' Trainer, Axolotl, LLaMA-Factory, torchtune, Lightning and others, with their
replacements in titan_launch."""

from __future__ import annotations

import re

from titan_launch.config.axes import AXES
from titan_launch.core.errors import KeyPath

_LORA = 'use "lora.targets", "lora.rank" and "lora.alpha"'
_NO_STAGE_LAYERS = 'use "parallelism.pipeline_parallel_split_points": the first modules of the second and later stages'
_TOKENIZER = 'use "tokenizer.path" with "tokenizer.kind" = "huggingface"'
_DATASET = 'use "data.path", with "data.kind" = "huggingface" for a data set of the Hugging Face Hub'
_PROFILE = 'use "profiling.start_step", the first step of a profile, and "profiling.num_steps"'
_PROFILE_FOLDER = "not needed; profiles are in profiling/ of the run folder"
_WANDB = 'use "metrics.sinks" = ["wandb"]; environment variables such as WANDB_PROJECT set the rest'
_ACCUMULATION = 'set "training.global_batch_size" to local_batch_size x data-parallel ranks x accumulation steps'
_BETAS = 'use "optimizer.beta1" and "optimizer.beta2"'
_MODE = 'use "activation_checkpoint.mode"; "none" disables activation checkpointing'
_NO_COMPILE_MODE = "not supported; inductor always runs in its default mode; remove this key"
_NO_EARLY_STEP = "not supported, since clipping needs all gradients before the update; remove this key"
_NO_ANOMALY = "anomaly detection is not supported; remove this key"
_MODEL_ONLY = 'use "titan-launch export" to write the model alone; every checkpoint has the whole training state'
_FOLDER = 'use "job.dump_folder"; checkpoints are in checkpoints/ of the run folder'

TORCHTITAN_KEYS: dict[str, str] = {
    "job.config_file": "use the option --config of `train` and `launch`",
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
    "optimizer.early_step_in_backward": _NO_EARLY_STEP,
    "optimizer.fused": 'use "optimizer.implementation" = "fused"',
    "optimizer.foreach": 'use "optimizer.implementation" = "foreach"',
    "optimizer.momentum": 'use "optimizer.sgd.momentum" or "optimizer.muon.momentum"',
    "lr_scheduler.total_steps": 'use "training.steps"; the schedule ends with the run',
    "lr_scheduler.decay_steps": 'use "lr_scheduler.decay_ratio", a fraction of "training.steps"',
    "lr_scheduler.lr_min": 'use "lr_scheduler.min_lr_factor", a fraction of "optimizer.lr"',
    "lr_scheduler.name": "lr_scheduler.kind",
    "parallelism.disable_loss_parallel": 'use "parallelism.loss_parallel", with the opposite value',
    "parallelism.enable_async_tensor_parallel": "asynchronous tensor parallelism is not supported; remove this key",
    "parallelism.expert_tensor_parallel_degree": 'use "parallelism.tensor_parallel_degree", which also divides experts',
    "parallelism.context_parallel_load_balancer": 'use "parallelism.context_parallel_load_balance", a bool',
    "parallelism.module_fqns_per_model_part": _NO_STAGE_LAYERS,
    "parallelism.pipeline_parallel_layers_per_stage": _NO_STAGE_LAYERS,
    "parallelism.pipeline_parallel_microbatch_size": "training.local_batch_size",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "checkpoint.folder": _FOLDER,
    "checkpoint.keep_latest_k": "checkpoint.keep_latest",
    "checkpoint.load_step": "checkpoint.load",
    "checkpoint.load_only": 'use "checkpoint.initial_load_path" with "checkpoint.enable" = false',
    "checkpoint.initial_load_model_only": 'use "checkpoint.initial_load_path", which loads only parameters and buffers',
    "checkpoint.initial_load_in_hf": 'use "model.weights" with the folder',
    "checkpoint.last_save_in_hf": 'not needed; "titan-launch export" writes the Hugging Face format of a checkpoint',
    "checkpoint.last_save_model_only": _MODEL_ONLY,
    "checkpoint.export_dtype": 'use "titan-launch export --dtype"; a checkpoint has the dtypes of the training state',
    "checkpoint.create_seed_checkpoint": 'not needed; initial parameters depend only on "training.seed"',
    "activation_checkpoint.enable": _MODE,
    "activation_checkpoint.type": "activation_checkpoint.mode",
    "activation_checkpoint.early_stop": "not supported; remove this key",
    "activation_checkpoint.preserve_rng_state": "not supported; remove this key",
    "compile.mode": _NO_COMPILE_MODE,
    "compile.fullgraph": "not needed, since each block is always one graph; remove this key",
    "metrics.enable_wandb": _WANDB,
    "metrics.disable_color_printing": "use the environment variable NO_COLOR",
    "metrics.save_tb_folder": "not needed; TensorBoard files are in tb/ of the run folder",
    "comm.backend": 'use "job.device", which sets the backend: NCCL for "cuda", gloo for "cpu"',
    "comm.mode": "use the option --fake-world-size of `launch` for a dry run",
    "comm.train_timeout_seconds": "comm.timeout_seconds",
    "comm.trace_buf_size": "comm.flight_recorder_size",
    "float8.enable_fsdp_float8_all_gather": "float8.all_gather",
    "float8.filter_fqns": 'use "float8.modules": the modules to convert, not those to skip',
    "float8.precompute_float8_dynamic_scale_for_fsdp": 'not needed; "float8.all_gather" always precomputes the scales',
    "float8.recipe_name": "float8.recipe",
    "debug.detect_anomaly": _NO_ANOMALY,
    "debug.moe_force_load_balance": "not supported; remove this key",
    "debug.seed": "training.seed",
    "debug.deterministic_warn_only": 'use "debug.deterministic"; nondeterministic kernels are then an error',
    "validation.enable": 'use "validation.freq"; 0 disables validation',
    "validation.dataset": _DATASET.replace("data.", "validation.data."),
    "validation.dataset_path": "validation.data.path",
    "validation.steps": 'use "validation.max_samples", in samples',
    "experimental": 'use "model.name" = "package.module:factory" for your own model',
    "fault_tolerance": "torchft is not supported; use the option --max-restarts of `launch` to restart failed ranks",
    "memory_estimation": "use the command `plan`, which estimates memory",
    "profiling.enable_profiling": _PROFILE,
    "profiling.profile_freq": _PROFILE,
    "profiling.profiler_active": "profiling.num_steps",
    "profiling.profiler_warmup": 'not needed; set "profiling.start_step" to a step after the slow first steps',
    "profiling.enable_memory_snapshot": 'use "profiling.memory", with "profiling.start_step"',
    "profiling.save_traces_folder": _PROFILE_FOLDER,
    "profiling.save_memory_snapshot_folder": _PROFILE_FOLDER,
    "quantize": "float8.enable",
}
"""Remedies for TorchTitan's keys and sections that have another name in titan_launch, or that titan_launch lacks. A key
that has the same name in another section needs no entry: `explain_unknown_key` finds this section."""

_NAMES: dict[str, str] = {
    # The model.
    'use "model.weights" with the folder of the model': (
        "base_model model_name_or_path model_name pretrained_model_name_or_path"
    ),
    'use "kernels.attention"; "auto", the default, chooses the first kernel that can be used': (
        "attn_implementation flash_attention flash_attn sdp_attention"
    ),
    'use "precision.param_dtype" for the computation, and "precision.storage_dtype" for stored parameters': (
        "torch_dtype dtype"
    ),
    _TOKENIZER: "tokenizer_name tokenizer_name_or_path",
    # Adapters and frozen parameters.
    _LORA: "lora peft use_peft finetuning_type",
    'use "lora.targets", "lora.rank" and "lora.alpha"; "lora.adapter" names a folder of adapters to start from': (
        "adapter"
    ),
    "lora.adapter": "adapter_name_or_path lora_model_dir",
    "lora.rank": "r lora_r lora_rank",
    "lora.alpha": "lora_alpha",
    "lora.dropout": "lora_dropout",
    'use "lora.targets", which also accepts module names of `transformers`': (
        "lora_target_modules target_modules lora_target lora_attn_modules"
    ),
    'use "lora.targets" = ["all-linear"]': "lora_target_linear",
    'use a table [[lora.rules]] with "lora.rules.match" and "lora.rules.rank"': "rank_pattern",
    'use a table [[lora.rules]] with "lora.rules.match" and "lora.rules.alpha"': "alpha_pattern",
    "lora.rank_stabilized": "use_rslora peft_use_rslora",
    "DoRA is not supported; remove this key": "use_dora peft_use_dora",
    "training.trainable": "modules_to_save lora_modules_to_save unfrozen_parameters",
    'QLoRA is not supported; use "precision.frozen_storage_dtype" = "bfloat16" for frozen parameters in 16 bits': (
        "base_dtype load_in_4bit load_in_8bit quantize_base quantization_bit "
        "bnb_4bit_quant_type bnb_4bit_compute_dtype quantization_config"
    ),
    # Data.
    _DATASET: "dataset dataset_name",
    "data.subset": "dataset_config_name",
    "data.hf_split": "dataset_split",
    'use "data.field" with "data.kind" = "jsonl", or "data.column" with other kinds': "dataset_text_field",
    'use a table [[data.sources]] for each source of a mixture, with "data.sources.weight"': (
        "datasets dataset_mixer interleave_probs"
    ),
    'use "data.packing" = "documents"': "packing packed sample_packing neat_packing",
    'not needed; every sample has "training.seq_len" tokens': "pad_to_sequence_len group_by_length",
    'use "data.template" with "data.kind" = "chat"': "chat_template template",
    'use "data.train_on" with "data.kind" = "chat"; "all" trains on all tokens': (
        "train_on_inputs train_on_prompt roles_to_train assistant_only_loss"
    ),
    'use "data.train_on" = "last" with "data.kind" = "chat"': "completion_only_loss mask_history",
    'use "data.validation_percent", with "data.split" = "train" and "validation.data.split" = "validation"': (
        "val_set_size val_size"
    ),
    "data.num_workers": "dataloader_num_workers",
    "training.seq_len": "max_length max_seq_length max_seq_len sequence_len cutoff_len model_max_length",
    # Batches, steps and the optimizer.
    "training.seed": "seed data_seed",
    "training.local_batch_size": (
        "batch_size micro_batch_size per_device_train_batch_size train_micro_batch_size_per_gpu"
    ),
    "validation.local_batch_size": "per_device_eval_batch_size eval_batch_size",
    _ACCUMULATION: "gradient_accumulation_steps accumulate_grad_batches",
    "training.epochs": "num_train_epochs num_epochs epochs max_epochs",
    "training.steps": "max_steps limit_train_batches",
    'use "training.steps", with a small number': "fast_dev_run",
    "optimizer.lr": "learning_rate",
    _BETAS: "betas",
    "optimizer.beta1": "adam_beta1",
    "optimizer.beta2": "adam_beta2",
    "optimizer.eps": "adam_epsilon",
    "optimizer.name": "optim",
    _NO_EARLY_STEP: "optimizer_in_bwd",
    "lr_scheduler.kind": "lr_scheduler_type",
    'use "lr_scheduler.warmup_steps", in steps': "warmup_ratio",
    "lr_scheduler.warmup_steps": "num_warmup_steps",
    'use "lr_scheduler.min_lr_factor", a fraction of "optimizer.lr"': "min_lr min_lr_ratio cosine_min_lr_ratio",
    "training.max_norm": "grad_clip clip_grad clip_grad_norm max_grad_norm gradient_clip_val gradient_clipping",
    # The loss.
    'use "loss.dpo.beta", "loss.ipo.beta", "loss.kto.beta" or "loss.simpo.beta"': "beta pref_beta",
    "loss.dpo.beta": "dpo_beta",
    'use "loss.dpo.reference", "loss.ipo.reference" or "loss.kto.reference"': "ref_model",
    "loss.simpo.gamma": "simpo_gamma",
    "loss.orpo.weight": "orpo_alpha",
    'use "loss.name" = "dpo", or another loss of pairs, with "data.kind" = "preferences"': "pref_loss",
    (
        'use "loss.name" = "dpo", or another loss of pairs, with "data.kind" = "preferences"; for answers with a '
        'label, use "loss.name" = "kto"'
    ): "rl",
    (
        'use "loss.name" = "dpo", "loss.name" = "kto" or "loss.name" = "reward"; for fine-tuning, use "data.kind" = '
        '"chat"'
    ): "stage",
    "loss.label_smoothing": "label_smoothing_factor",
    'use "loss.chunks": logits then exist for a part of the classes at a time': "use_liger_kernel enable_liger_kernel",
    "NEFTune is not supported; remove this key": "neftune_noise_alpha",
    # Precision, compilation, memory.
    'use "precision.param_dtype" = "bfloat16"': "bf16 mixed_precision",
    'float16 needs loss scaling, which is not supported; use "precision.param_dtype" = "bfloat16"': "fp16",
    'use "kernels.float32_precision" = "tf32"': "tf32",
    "compile.enable": "torch_compile",
    "compile.backend": "dynamo_backend torch_compile_backend",
    _NO_COMPILE_MODE: "torch_compile_mode",
    _MODE: (
        "gradient_checkpointing gradient_checkpointing_kwargs use_gradient_checkpointing "
        "disable_gradient_checkpointing activation_checkpointing enable_activation_checkpointing"
    ),
    "activation_checkpoint.offload": "activation_offloading enable_activation_offloading",
    "training.enable_cpu_offload": "cpu_offload fsdp_cpu_offload",
    # Ranks.
    "parallelism.data_parallel_shard_degree": "fsdp fsdp_config",
    'use "parallelism.data_parallel_shard_degree" and the other degrees of [parallelism]': "strategy",
    'use "batchnorm.statistics" = "synchronized"': "sync_batchnorm",
    'DeepSpeed is not supported; FSDP2 shards over "parallelism.data_parallel_shard_degree" ranks': (
        "deepspeed zero_stage"
    ),
    "comm.timeout_seconds": "ddp_timeout",
    "job.device": "accelerator",
    "the number of processes is not part of the job; use the option --nproc-per-node of `launch`": (
        "devices num_processes"
    ),
    "the number of hosts is not part of the job; use the option --nnodes of `launch`": "num_nodes num_machines",
    "the number of this host is not part of the job; use the option --node-rank of `launch`": "machine_rank",
    "the address of rank 0 is not part of the job; use the option --master-addr of `launch`": "main_process_ip",
    # Checkpoints.
    "checkpoint.interval": "save_steps save_freq save_interval save_strategy saves_per_epoch every_n_train_steps",
    "checkpoint.enable": "enable_checkpointing",
    "checkpoint.keep_latest": "save_total_limit",
    "checkpoint.keep_best": "save_top_k",
    'use "validation.patience" and "checkpoint.keep_best"; the best checkpoint is the result': "load_best_model_at_end",
    'use "checkpoint.keep_best", which compares the validation loss': "metric_for_best_model",
    _MODEL_ONLY: "save_only_model",
    'uploads are not supported; "titan-launch export" writes a folder that can be uploaded': "push_to_hub hub_model_id",
    "checkpoint.load": "resume_from_checkpoint ckpt_path",
    _FOLDER: "output_dir default_root_dir",
    'use "checkpoint.load" = "none"; an earlier run is moved aside': "overwrite_output_dir",
    # Reports and validation.
    "job.name": "run_name",
    "metrics.log_freq": "logging_steps log_interval log_every_n_steps",
    'use "metrics.sinks" = ["wandb"] or "metrics.sinks" = ["mlflow"], and "metrics.enable_tensorboard"': (
        "report_to logger metric_logger"
    ),
    _WANDB: "wandb use_wandb wandb_project wandb_entity wandb_name wandb_run_name",
    'use "metrics.sinks" = ["mlflow"]; environment variables such as MLFLOW_TRACKING_URI set the rest': (
        "mlflow use_mlflow mlflow_tracking_uri mlflow_experiment_name"
    ),
    'use "job.dump_folder"; TensorBoard files are in tb/ of the run folder': "logging_dir",
    'not needed; "titan-launch report" plots the loss of a run': "plot_loss",
    _PROFILE: "profiler",
    _NO_ANOMALY: "detect_anomaly",
    "debug.deterministic": "full_determinism",
    "validation.freq": "eval_steps eval_interval eval_freq val_check_interval run_val_every_n_steps",
    'use "validation.freq", in optimizer steps, with data in [validation.data]': (
        "eval_strategy evaluation_strategy do_eval evals_per_epoch check_val_every_n_epoch"
    ),
    'use "validation.patience", a number of validations': "early_stopping",
    "validation.patience": "early_stopping_patience",
    "validation.min_improvement": "early_stopping_threshold",
    'use "validation.max_samples", in samples': "limit_val_batches",
}
"""For each remedy, the keys of other tools (not of TorchTitan) that get this remedy, separated by spaces."""

COMMON_NAMES: dict[str, str] = {
    **{name: remedy for remedy, names in _NAMES.items() for name in names.split()},
    **{
        f"{name}{end}": ".".join(axis.key)
        for axis in AXES.values()
        for name, end in ((axis.short, ""), (axis.short, "_size"), (axis.short, "_degree"), (axis.setting, "_size"))
    },
}
"""Remedies for keys of tools other than TorchTitan, by the name of the key without its section."""

FOREIGN_KEYS: dict[str, str] = {
    **TORCHTITAN_KEYS,
    **COMMON_NAMES,
    "optimizer.beta": _BETAS,  # in other sections, `beta` means a key of a loss
    # Names of titan_launch's sections that are keys with a single value in other tools.
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
"""Remedies for the keys of all tools, by dotted key (for one section) or by name (for any section). A remedy is a key
of titan_launch, or a clause that contains keys of titan_launch in quotes."""


def foreign_key(key: KeyPath) -> tuple[str, list[KeyPath]] | None:
    """Return the remedy for a key of another tool, and the keys of titan_launch that the remedy names; None for any
    other key."""
    text = FOREIGN_KEYS.get(".".join(map(str, key))) or FOREIGN_KEYS.get(str(key[-1]))
    if text is None:
        return None
    remedy = text if " " in text else f'use "{text}"'
    return remedy, [tuple(named.split(".")) for named in re.findall(r'"(\w+(?:\.\w+)+)"', remedy)]
