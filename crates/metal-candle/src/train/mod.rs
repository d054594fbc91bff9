//! Training: the loop, the optimiser's options, schedules, checkpoints and metrics.

mod base;
mod checkpoint;
mod evaluate;
mod gradients;
mod lock;
pub mod memory;
pub mod metrics;
mod optimizer;
mod options;
mod saving;
pub mod schedule;
pub mod tensorboard;
mod trainer;

pub use checkpoint::latest as latest_checkpoint;
pub use evaluate::{Evaluation, evaluate};
pub use gradients::Gradients;
pub use lock::FolderLock;
pub use metrics::{FanOut, JsonLines, Metric, MetricsSink, Phase, Position};
pub use optimizer::{
    AdafactorOptions, AdamOptions, AdamWOptions, LionOptions, MuonOptions, Optimizer, SgdOptions,
};
pub use options::{Duration, MAX_STEPS, TrainOptions, total_steps};
pub use schedule::{LearningRate, MlxSchedule, Schedule, ScheduleOptions, Warmup};
pub use tensorboard::TensorBoard;
pub use trainer::{Outcome, Resumed, SampleFn, Summary, Trainer};
