"""The whole job file."""

from __future__ import annotations

from titan_launch.config.base import Section
from titan_launch.config.checkpoint import CheckpointConfig
from titan_launch.config.comm import CommConfig
from titan_launch.config.data import DataConfig, TextData
from titan_launch.config.debug import DebugConfig
from titan_launch.config.general import GeneralConfig
from titan_launch.config.gradient_accumulation import GradientAccumulationConfig
from titan_launch.config.lr_scheduler import SchedulerConfig, WarmupStableDecay
from titan_launch.config.metrics import MetricsConfig
from titan_launch.config.model import ModelConfig
from titan_launch.config.optimizer import OptimizerConfig
from titan_launch.config.parallelism import ParallelismConfig
from titan_launch.config.precision import PrecisionConfig
from titan_launch.config.tokenizer import TokenizerConfig
from titan_launch.config.training import TrainingConfig
from titan_launch.config.validation import ValidationConfig


class JobConfig(Section):
    """A training job, complete. Every section may be left out."""

    job: GeneralConfig = GeneralConfig()
    model: ModelConfig = ModelConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    data: DataConfig = TextData()
    training: TrainingConfig = TrainingConfig()
    precision: PrecisionConfig = PrecisionConfig()
    gradient_accumulation: GradientAccumulationConfig = GradientAccumulationConfig()
    parallelism: ParallelismConfig = ParallelismConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lr_scheduler: SchedulerConfig = WarmupStableDecay()
    checkpoint: CheckpointConfig = CheckpointConfig()
    validation: ValidationConfig = ValidationConfig()
    metrics: MetricsConfig = MetricsConfig()
    comm: CommConfig = CommConfig()
    debug: DebugConfig = DebugConfig()
