"""The whole job file."""

from __future__ import annotations

from pydantic import Field

from titan_launch.config.activation_checkpoint import ActivationCheckpointConfig
from titan_launch.config.base import Section
from titan_launch.config.batchnorm import BatchNormConfig
from titan_launch.config.checkpoint import CheckpointConfig
from titan_launch.config.comm import CommConfig
from titan_launch.config.compile import CompileConfig
from titan_launch.config.data import DataConfig, TextData
from titan_launch.config.debug import DebugConfig
from titan_launch.config.float8 import Float8Config
from titan_launch.config.general import GeneralConfig
from titan_launch.config.gradient_accumulation import GradientAccumulationConfig
from titan_launch.config.kernels import KernelsConfig
from titan_launch.config.lr_scheduler import SchedulerConfig, WarmupStableDecay
from titan_launch.config.metrics import MetricsConfig
from titan_launch.config.model import ModelConfig
from titan_launch.config.optimizer import OptimizerConfig
from titan_launch.config.parallelism import ParallelismConfig
from titan_launch.config.planner import PlannerConfig
from titan_launch.config.precision import PrecisionConfig
from titan_launch.config.tokenizer import TokenizerConfig
from titan_launch.config.training import TrainingConfig
from titan_launch.config.validation import ValidationConfig


class JobConfig(Section):
    """A training job, complete. Every section may be left out."""

    job: GeneralConfig = Field(default_factory=GeneralConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig)
    data: DataConfig = Field(default_factory=TextData)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    precision: PrecisionConfig = Field(default_factory=PrecisionConfig)
    batchnorm: BatchNormConfig = Field(default_factory=BatchNormConfig)
    activation_checkpoint: ActivationCheckpointConfig = Field(default_factory=ActivationCheckpointConfig)
    gradient_accumulation: GradientAccumulationConfig = Field(default_factory=GradientAccumulationConfig)
    compile: CompileConfig = Field(default_factory=CompileConfig)
    kernels: KernelsConfig = Field(default_factory=KernelsConfig)
    float8: Float8Config = Field(default_factory=Float8Config)
    parallelism: ParallelismConfig = Field(default_factory=ParallelismConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    lr_scheduler: SchedulerConfig = Field(default_factory=WarmupStableDecay)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    validation: ValidationConfig = Field(default_factory=ValidationConfig)
    metrics: MetricsConfig = Field(default_factory=MetricsConfig)
    planner: PlannerConfig = Field(default_factory=PlannerConfig)
    comm: CommConfig = Field(default_factory=CommConfig)
    debug: DebugConfig = Field(default_factory=DebugConfig)
