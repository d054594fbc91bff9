//! Training: the loop, objectives, the optimiser's options, schedules, checkpoints and metrics.

mod base;
mod checkpoint;
pub mod eva;
mod evaluate;
mod gradients;
mod lock;
mod loss_scale;
pub mod metrics;
pub mod objectives;
mod optimizer;
mod options;
mod references;
mod saving;
pub mod schedule;
mod summing;
mod task;
mod teach;
pub mod tensorboard;
mod trainer;

pub use base::know_base;
pub use checkpoint::{batch_rows, latest as latest_checkpoint, layer_ranks, run_steps};
pub use evaluate::{Evaluation, TOKEN_ACCURACY, evaluate};
pub use gradients::Gradients;
pub use lock::FolderLock;
pub use metrics::{FanOut, JsonLines, Metric, MetricsSink, Phase, Position};
pub use objectives::Objective;
pub use optimizer::{
    AdafactorOptions, AdamOptions, AdamWOptions, LionOptions, MuonOptions, Optimizer,
    OptimizerPlacement, SgdOptions,
};
pub use options::{
    ActivationPlacement, BestBy, Duration, MAX_STEPS, TrainOptions, total_steps,
    total_steps_resumed,
};
pub use references::FILE as REFERENCES;
pub use schedule::{LearningRate, MlxSchedule, Schedule, ScheduleOptions, Warmup};
pub use task::Task;
pub use teach::write_teacher;
pub use tensorboard::TensorBoard;
pub use trainer::{Outcome, Resumed, SampleFn, Summary, Trainer};
