//! Train.

pub mod memory;
pub mod metrics;
pub mod plot;
pub mod schedule;
pub mod tensorboard;

pub use metrics::{FanOut, JsonLines, Metric, MetricsSink};
pub use plot::LossCurve;
pub use schedule::{LearningRate, MlxSchedule, Schedule, ScheduleOptions, Warmup};
pub use tensorboard::TensorBoard;
