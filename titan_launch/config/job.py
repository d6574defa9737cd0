"""The whole job file: all sections in reading order."""

from __future__ import annotations

from pydantic import Field

from titan_launch.config.sections.checkpoint import CheckpointConfig
from titan_launch.config.sections.data import DataSource, TextData, ValidationConfig
from titan_launch.config.sections.loss import LossConfig
from titan_launch.config.sections.model import LoRAConfig, ModelConfig
from titan_launch.config.sections.parallelism import ActivationCheckpointConfig, CompileConfig, ParallelismConfig
from titan_launch.config.sections.precision import BatchNormConfig, Float8Config, KernelsConfig, PrecisionConfig
from titan_launch.config.sections.run import (
    CommConfig,
    DebugConfig,
    GeneralConfig,
    MetricsConfig,
    PlannerConfig,
    ProfilingConfig,
    ProveConfig,
)
from titan_launch.config.sections.section import Section
from titan_launch.config.sections.tokenizer import TokenizerConfig
from titan_launch.config.sections.training import (
    EMAConfig,
    GradientAccumulationConfig,
    MupConfig,
    OptimizerConfig,
    SchedulerConfig,
    TrainingConfig,
    WarmupStableDecay,
)


class JobConfig(Section):
    """A complete training job. Every section may be omitted."""

    job: GeneralConfig = Field(default_factory=GeneralConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    lora: LoRAConfig = Field(default_factory=LoRAConfig)
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig)
    data: DataSource = Field(default_factory=TextData)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    loss: LossConfig = Field(default_factory=LossConfig)
    precision: PrecisionConfig = Field(default_factory=PrecisionConfig)
    batchnorm: BatchNormConfig = Field(default_factory=BatchNormConfig)
    activation_checkpoint: ActivationCheckpointConfig = Field(default_factory=ActivationCheckpointConfig)
    gradient_accumulation: GradientAccumulationConfig = Field(default_factory=GradientAccumulationConfig)
    compile: CompileConfig = Field(default_factory=CompileConfig)
    kernels: KernelsConfig = Field(default_factory=KernelsConfig)
    float8: Float8Config = Field(default_factory=Float8Config)
    parallelism: ParallelismConfig = Field(default_factory=ParallelismConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    mup: MupConfig = Field(default_factory=MupConfig)
    lr_scheduler: SchedulerConfig = Field(default_factory=WarmupStableDecay)
    ema: EMAConfig = Field(default_factory=EMAConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    validation: ValidationConfig = Field(default_factory=ValidationConfig)
    metrics: MetricsConfig = Field(default_factory=MetricsConfig)
    profiling: ProfilingConfig = Field(default_factory=ProfilingConfig)
    planner: PlannerConfig = Field(default_factory=PlannerConfig)
    prove: ProveConfig = Field(default_factory=ProveConfig)
    comm: CommConfig = Field(default_factory=CommConfig)
    debug: DebugConfig = Field(default_factory=DebugConfig)
