//! The values of settings that are words.

use crate::errors::usage;
use candle_core::DType;
use clap::ValueEnum;
use metal_candle::data::LossOn;
use metal_candle::model::Quantization;
use metal_candle::train::{self, Schedule};
use serde::{Deserialize, Serialize};

/// What is trained.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum FineTuneType {
    /// Low-rank adapters on a frozen model
    #[default]
    Lora,
    /// LoRA that also trains the length of each row of the weights
    Dora,
    /// Every weight
    Full,
}

/// Which tokens the loss counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Loss {
    /// Conversations: assistant; prompts: completion; texts: all
    #[default]
    Auto,
    /// Every token
    All,
    /// What follows the prompt; in a conversation, the last turn of the assistant
    Completion,
    /// Every turn of the assistant
    Assistant,
}

impl From<Option<LossOn>> for Loss {
    fn from(loss_on: Option<LossOn>) -> Self {
        match loss_on {
            None => Self::Auto,
            Some(LossOn::All) => Self::All,
            Some(LossOn::Completion) => Self::Completion,
            Some(LossOn::Assistant) => Self::Assistant,
        }
    }
}

impl Loss {
    /// The library's word for it.
    pub fn for_data(self) -> Option<LossOn> {
        match self {
            Self::Auto => None,
            Self::All => Some(LossOn::All),
            Self::Completion => Some(LossOn::Completion),
            Self::Assistant => Some(LossOn::Assistant),
        }
    }
}

/// How the learning rate moves after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Course {
    /// Stays at the peak
    #[serde(alias = "constant_with_warmup")]
    #[value(alias = "constant_with_warmup")]
    Constant,
    /// Falls in a straight line
    Linear,
    /// Falls along half a cosine
    Cosine,
}

impl From<Schedule> for Course {
    fn from(schedule: Schedule) -> Self {
        match schedule {
            Schedule::Constant => Self::Constant,
            Schedule::Linear => Self::Linear,
            Schedule::Cosine => Self::Cosine,
        }
    }
}

impl From<Course> for Schedule {
    fn from(course: Course) -> Self {
        match course {
            Course::Constant => Self::Constant,
            Course::Linear => Self::Linear,
            Course::Cosine => Self::Cosine,
        }
    }
}

/// What the frozen linear layers are multiplied in.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum BaseCompute {
    /// The dtype of weights and activations
    #[default]
    Auto,
    /// 8-bit floats (e4m3): weights with a scale a row, inputs and gradients rounded row by row; adapters as ever. For
    /// NVIDIA's Hopper
    Fp8,
    /// 8-bit integers, in the same way. For the processor
    Int8,
}

impl BaseCompute {
    /// What a dense model is brought into while it is loaded, by this and `quantize`, of which one may say so.
    pub fn quantization(
        self,
        quantize: Option<Quantization>,
    ) -> anyhow::Result<Option<Quantization>> {
        match (self.described(), quantize) {
            (None, Some(Quantization::FP8_COMPUTE)) => {
                Err(usage("quantize: is fp8-compute, which is no format; say base_compute: fp8"))
            }
            (None, Some(Quantization::INT8_COMPUTE)) => {
                Err(usage("quantize: is int8-compute, which is no format; say base_compute: int8"))
            }
            (None, quantize) => Ok(quantize),
            (Some((compute, ..)), None) => Ok(Some(compute)),
            (Some((_, word, numbers)), Some(quantize)) => Err(usage(format!(
                "base_compute: is {word}, which holds the weights in {numbers}, but quantize is {quantize}; keep one of them"
            ))),
        }
    }

    /// What a dense model is brought into by this alone, its word, and what that holds the weights in; `None` for `auto`.
    pub fn described(self) -> Option<(Quantization, &'static str, &'static str)> {
        match self {
            Self::Auto => None,
            Self::Fp8 => Some((Quantization::FP8_COMPUTE, "fp8", "8-bit floats (e4m3)")),
            Self::Int8 => Some((Quantization::INT8_COMPUTE, "int8", "8-bit integers")),
        }
    }
}

/// Where the matrices of a base's layers lie between their uses, or what is trained in their place.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum BasePlacement {
    /// In the device's memory
    #[default]
    Device,
    /// In the host's memory, from where each layer comes to the GPU for its use: for a base larger than the GPU's. Needs
    /// --grad-checkpoint
    Host,
    /// A part of each layer on each of several GPUs (--gpus), which put it together for its use. Needs --grad-checkpoint,
    /// unless every weight is trained (--fine-tune-type full), of which gradients and moments are in parts then, too
    Sharded,
}

/// Where activations wait for the backward pass.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum ActivationPlacement {
    /// In the device's memory
    #[default]
    Device,
    /// In the host's memory, to and from which an NVIDIA GPU copies them beside its work: with --grad-checkpoint all that is
    /// kept of a layer, otherwise a part of it
    Host,
}

impl From<train::ActivationPlacement> for ActivationPlacement {
    fn from(placement: train::ActivationPlacement) -> Self {
        match placement {
            train::ActivationPlacement::Device => Self::Device,
            train::ActivationPlacement::Host => Self::Host,
        }
    }
}

impl From<ActivationPlacement> for train::ActivationPlacement {
    fn from(placement: ActivationPlacement) -> Self {
        match placement {
            ActivationPlacement::Device => Self::Device,
            ActivationPlacement::Host => Self::Host,
        }
    }
}

/// Where what the optimiser keeps from step to step lies.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerPlacement {
    /// In the device's memory
    #[default]
    Device,
    /// In the host's memory, which the GPU reads and writes in each step: for full fine-tuning of models whose moments the
    /// GPU has no room for. With several GPUs a part for each
    Host,
    /// A part on each of several GPUs (--gpus) or processes, each of which makes the step of its part
    Sharded,
}

impl From<train::OptimizerPlacement> for OptimizerPlacement {
    fn from(placement: train::OptimizerPlacement) -> Self {
        match placement {
            train::OptimizerPlacement::Device => Self::Device,
            train::OptimizerPlacement::Host => Self::Host,
            train::OptimizerPlacement::Sharded => Self::Sharded,
        }
    }
}

impl From<OptimizerPlacement> for train::OptimizerPlacement {
    fn from(placement: OptimizerPlacement) -> Self {
        match placement {
            OptimizerPlacement::Device => Self::Device,
            OptimizerPlacement::Host => Self::Host,
            OptimizerPlacement::Sharded => Self::Sharded,
        }
    }
}

/// The dtype of weights and activations.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// bf16
    #[default]
    Auto,
    /// 32-bit float
    #[serde(alias = "float32")]
    #[value(alias = "float32")]
    F32,
    /// Brain float, 16 bits
    #[serde(alias = "bfloat16")]
    #[value(alias = "bfloat16")]
    Bf16,
    /// 16-bit float
    #[serde(alias = "float16")]
    #[value(alias = "float16")]
    F16,
}

impl Precision {
    /// The name of a dtype that weights and activations can have.
    pub fn of(dtype: DType) -> Self {
        match dtype {
            DType::BF16 => Self::Bf16,
            DType::F16 => Self::F16,
            _ => Self::F32,
        }
    }
}

/// The device that computes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Processor {
    /// The GPU if this build and this machine have one, else the processor
    #[default]
    Auto,
    /// The processor
    Cpu,
    /// An NVIDIA GPU, in a build with the feature `cuda`
    Cuda,
    /// The GPU of a Mac, in a build with the feature `metal`
    Metal,
}

/// Who makes the large products of linear layers on Metal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Matmul {
    /// metal-candle, together with what the adapter adds
    Fused,
    /// Candle's kernels
    Candle,
    /// Apple's Metal Performance Shaders, for f32 and f16
    Mps,
}
