"""Keys of TorchTitan, Transformers' Trainer, Lightning and Accelerate, and what each is called here."""

from __future__ import annotations

import re

from titan_launch.core.errors import KeyPath

_NO_LORA = "there is no LoRA here: all parameters are trained, unless your model sets requires_grad = False"
_NO_EXPERTS = "there is no expert parallelism here"
_NO_HUGGING_FACE = "there is no Hugging Face format here: checkpoints are those of torch.distributed.checkpoint"
_NO_STAGE_LAYERS = 'here it is "parallelism.pipeline_parallel_split_points": the modules that stages begin with'
_NO_TOKENIZER = 'there is no tokenizer from a file here: a token is a byte ("tokenizer.kind")'
_NO_DATASET = 'there are no named data sets here: "data.path" is a file, a folder or a glob'
_NO_TRACE = (
    'there are no profiler traces here: "comm.profile_freq" profiles single steps to report exposed communication'
)
_NO_WANDB = 'there is no wandb here: reports go to metrics.jsonl, and to TensorBoard with "metrics.enable_tensorboard"'
_NO_EPOCHS = 'a run is measured in optimizer steps here, not in epochs: "training.steps"'
_NO_DEEPSPEED = 'there is no DeepSpeed here: FSDP2 shards over "parallelism.data_parallel_shard_degree" ranks'
_ACCUMULATION = (
    'here it follows from "training.global_batch_size": '
    "local_batch_size times data-parallel ranks times accumulation steps"
)
_BF16 = 'here it is "precision.param_dtype" = "bfloat16"'
_FP16 = 'float16 needs loss scaling, which is not supported: use "precision.param_dtype" = "bfloat16"'
_BETAS = 'here they are "optimizer.beta1" and "optimizer.beta2"'
_MODE = 'here it is "activation_checkpoint.mode": "none" is off'
_RANKS = "the job does not say how many processes there are: use launch --nproc-per-node"
_HOSTS = "the job does not say how many hosts there are: use launch --nnodes"
_FOLDER = 'here it is "job.dump_folder": checkpoints are in checkpoints/ of the run\'s folder'

TORCHTITAN_KEYS: dict[str, str] = {
    "job.config_file": "there is no such key here: the command line has --config",
    "job.custom_config_module": 'here it is "model.name" = "package.module:factory", with arguments in [model.args]',
    "job.description": "job.name",
    "model.converters": 'here it is "float8.enable"',
    "model.dim": "model.args.dim",
    "model.hf_assets_path": _NO_TOKENIZER,
    "model.tokenizer_path": _NO_TOKENIZER,
    "tokenizer.path": _NO_TOKENIZER,
    "tokenizer.name": _NO_TOKENIZER,
    "training.dtype": "precision.storage_dtype",
    "training.mixed_precision_param": "precision.param_dtype",
    "training.mixed_precision_reduce": "precision.reduce_dtype",
    "training.dataset": _NO_DATASET,
    "training.dataset_path": "data.path",
    "training.max_context_length": "training.seq_len",
    "training.gc_debug": "there is no such key here",
    "training.compile": "compile.enable",
    "training.deterministic": "debug.deterministic",
    "optimizer.betas": _BETAS,
    "optimizer.early_step_in_backward": "there is no such key here: gradients are clipped before the first update",
    "optimizer.fused": 'here it is "optimizer.implementation" = "fused"',
    "optimizer.foreach": 'here it is "optimizer.implementation" = "foreach"',
    "optimizer.momentum": 'here it is "optimizer.sgd.momentum" or "optimizer.muon.momentum"',
    "lr_scheduler.total_steps": 'here it is "training.steps": the schedule ends with the run',
    "lr_scheduler.decay_steps": 'here it is "lr_scheduler.decay_ratio", a fraction of "training.steps"',
    "lr_scheduler.lr_min": 'here it is "lr_scheduler.min_lr_factor", a fraction of "optimizer.lr"',
    "lr_scheduler.name": "lr_scheduler.kind",
    "parallelism.disable_loss_parallel": 'here it is "parallelism.loss_parallel", with the opposite value',
    "parallelism.enable_async_tensor_parallel": "there is no asynchronous tensor parallelism here",
    "parallelism.expert_parallel_degree": _NO_EXPERTS,
    "parallelism.expert_tensor_parallel_degree": _NO_EXPERTS,
    "parallelism.context_parallel_load_balancer": 'here it is "parallelism.context_parallel_load_balance", a bool',
    "parallelism.module_fqns_per_model_part": _NO_STAGE_LAYERS,
    "parallelism.pipeline_parallel_layers_per_stage": _NO_STAGE_LAYERS,
    "parallelism.pipeline_parallel_microbatch_size": "training.local_batch_size",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "checkpoint.folder": _FOLDER,
    "checkpoint.keep_latest_k": "checkpoint.keep_latest",
    "checkpoint.load_step": "checkpoint.load",
    "checkpoint.load_only": 'here it is "checkpoint.initial_load_path" with "checkpoint.enable" = false',
    "checkpoint.initial_load_model_only": '"checkpoint.initial_load_path" always loads parameters and buffers alone',
    "checkpoint.initial_load_in_hf": _NO_HUGGING_FACE,
    "checkpoint.last_save_in_hf": _NO_HUGGING_FACE,
    "checkpoint.last_save_model_only": "there is no such key here: a run can be resumed from each of its checkpoints",
    "checkpoint.export_dtype": "there is no export here: a checkpoint has the dtypes of the training state",
    "checkpoint.create_seed_checkpoint": 'initial parameters follow from "training.seed" alone, on any number of ranks',
    "activation_checkpoint.enable": _MODE,
    "activation_checkpoint.type": "activation_checkpoint.mode",
    "activation_checkpoint.early_stop": "there is no such key here",
    "activation_checkpoint.preserve_rng_state": "there is no such key here",
    "compile.mode": "there is no such key here: inductor runs in its default mode",
    "compile.fullgraph": "there is no such key here: each block is one graph",
    "metrics.enable_wandb": _NO_WANDB,
    "metrics.disable_color_printing": "there is no such key here: the console has no colours",
    "metrics.save_tb_folder": "there is no such key here: TensorBoard files are in tb/ of the run's folder",
    "comm.backend": 'the backend follows "job.device": NCCL for "cuda", gloo for "cpu"',
    "comm.mode": "there is no such key here: the command line has --fake-world-size",
    "comm.train_timeout_seconds": "comm.timeout_seconds",
    "comm.trace_buf_size": "comm.flight_recorder_size",
    "float8.enable_fsdp_float8_all_gather": "float8.all_gather",
    "float8.filter_fqns": 'here it is "float8.modules": the modules to convert, not those to leave out',
    "float8.precompute_float8_dynamic_scale_for_fsdp": 'there is no such key here: "float8.all_gather" does it',
    "float8.recipe_name": "float8.recipe",
    "debug.detect_anomaly": "there is no anomaly detection here",
    "debug.deterministic_warn_only": 'there is no such key here: "debug.deterministic" fails at such a kernel',
    "validation.enable": 'here it is "validation.freq": 0 is off',
    "validation.dataset": _NO_DATASET.replace("data.path", "validation.data.path"),
    "validation.dataset_path": "validation.data.path",
    "validation.steps": 'here it is "validation.max_samples", in samples',
    "experimental": 'there is no such section here: "model.name" = "package.module:factory" takes your own model',
    "fault_tolerance": "there is no torchft here: launch --max-restarts starts failed ranks again",
    "memory_estimation": "there is no such section here: the command `plan` estimates memory",
    "profiling": _NO_TRACE,
    "quantize": "float8.enable",
}
"""Keys and sections of TorchTitan with another name here. A key that only stands in another section needs no entry."""

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
    "warmup_ratio": 'here it is "lr_scheduler.warmup_steps", in steps',
    "num_train_epochs": _NO_EPOCHS,
    "num_epochs": _NO_EPOCHS,
    "epochs": _NO_EPOCHS,
    "dataset": _NO_DATASET,
    "grad_clip": "training.max_norm",
    "max_epochs": _NO_EPOCHS,
    "max_steps": "training.steps",
    "max_seq_length": "training.seq_len",
    "fast_dev_run": 'there is no such key here: set "training.steps" to a few',
    "max_grad_norm": "training.max_norm",
    "gradient_clip_val": "training.max_norm",
    "gradient_clipping": "training.max_norm",
    "bf16": _BF16,
    "mixed_precision": _BF16,
    "fp16": _FP16,
    "tf32": 'here it is "kernels.float32_precision" = "tf32"',
    "gradient_checkpointing": _MODE,
    "torch_compile": "compile.enable",
    "dynamo_backend": "compile.backend",
    "cpu_offload": "training.enable_cpu_offload",
    "fsdp": "parallelism.data_parallel_shard_degree",
    "fsdp_config": "parallelism.data_parallel_shard_degree",
    "strategy": 'there is no such key here: "parallelism.data_parallel_shard_degree" and the degrees beside it decide',
    "sync_batchnorm": 'here it is "batchnorm.statistics" = "synchronized"',
    "deepspeed": _NO_DEEPSPEED,
    "zero_stage": _NO_DEEPSPEED,
    "lora": _NO_LORA,
    "peft": _NO_LORA,
    "save_steps": "checkpoint.interval",
    "every_n_train_steps": "checkpoint.interval",
    "save_total_limit": "checkpoint.keep_latest",
    "save_top_k": "checkpoint.keep_best",
    "load_best_model_at_end": 'here it is "checkpoint.keep_best": the best checkpoints stay on disk',
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
    "check_val_every_n_epoch": 'here it is "validation.freq", in optimizer steps',
    "limit_val_batches": 'here it is "validation.max_samples", in samples',
    "dataloader_num_workers": "data.num_workers",
    "ddp_timeout": "comm.timeout_seconds",
    "profiler": _NO_TRACE,
    "accelerator": "job.device",
    "devices": _RANKS,
    "num_processes": _RANKS,
    "num_nodes": _HOSTS,
    "num_machines": _HOSTS,
    "machine_rank": "the job does not say which host this is: use launch --node-rank",
    "main_process_ip": "the job does not say where rank 0 is: use launch --master-addr",
}
"""Names of keys of these tools, in any section."""

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
    "precision": 'here it is "precision.param_dtype", such as "bfloat16"',
}
"""Remedies by dotted key or by name: a key of ours, or a clause in which keys of ours are quoted."""


def foreign_key(key: KeyPath) -> tuple[str, list[KeyPath]] | None:
    """Return the remedy for a key of another tool, and the keys of ours that it names; None for any other key."""
    text = FOREIGN_KEYS.get(".".join(map(str, key))) or FOREIGN_KEYS.get(str(key[-1]))
    if text is None:
        return None
    remedy = text if " " in text else f'here it is "{text}"'
    return remedy, [tuple(named.split(".")) for named in re.findall(r'"(\w+(?:\.\w+)+)"', remedy)]
