//! The optimisers and their options, with the defaults of the field's implementations.

mod state;
#[cfg(test)]
mod tests;

pub(super) use state::{Home, OptimizerState, Rates, is_moved_with_b};

use crate::adapter::Entry;
use crate::bounds::{NORM, RATE, not_negative, positive, share};
use crate::{Error, Result};
use serde::{Deserialize, Serialize};

/// Where what an optimiser keeps from step to step lies. It changes no bit of what comes out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OptimizerPlacement {
    /// On the device.
    #[default]
    Device,
    /// In the memory of the host, pinned with CUDA, where the step reads and writes it over the bus; with several processes
    /// a part for each.
    Host,
    /// A part for each of several processes on its device, which makes the step of that part (as ZeRO's first stage does;
    /// Rajbhandari et al., 2019, arXiv:1910.02054).
    Sharded,
}

impl OptimizerPlacement {
    /// Whether what this optimiser keeps can lie there, with so many processes.
    ///
    /// # Errors
    /// [`Error::Option`] saying what can.
    pub fn check(self, optimizer: &Optimizer, processes: usize) -> Result<()> {
        let word = match self {
            Self::Device => return Ok(()),
            Self::Host => "host",
            Self::Sharded => "sharded",
        };
        let problem = match optimizer {
            Optimizer::Sgd(SgdOptions { momentum, .. }) if *momentum == 0.0 => {
                "but sgd without momentum keeps nothing; expected device".to_string()
            }
            Optimizer::Adafactor(_) => {
                "but adafactor keeps next to nothing; expected device".to_string()
            }
            _ if self == Self::Sharded && processes == 1 => {
                "which needs several processes (--gpus, or torchrun); with one, expected device or host"
                    .to_string()
            }
            other if processes > 1 && !other.is_by_element() => format!(
                "but {} can't be in parts with several processes; expected device, or adamw, adam, lion or sgd with momentum",
                other.name()
            ),
            _ => return Ok(()),
        };
        Err(Error::option("optimizer_placement", format!("is {word}, {problem}")))
    }
}

/// How gradients change the parameters.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Optimizer {
    /// Adam.
    Adam(AdamOptions),
    /// AdamW.
    AdamW(AdamWOptions),
    /// Stochastic gradient descent.
    Sgd(SgdOptions),
    /// Lion.
    Lion(LionOptions),
    /// AdamW with moments of 8 bits.
    AdamW8bit(AdamWOptions),
    /// Adafactor.
    Adafactor(AdafactorOptions),
    /// Muon.
    Muon(MuonOptions),
}

impl Default for Optimizer {
    fn default() -> Self {
        Self::AdamW(AdamWOptions::default())
    }
}

/// Adam (Kingma and Ba, 2015, arXiv:1412.6980), with the defaults of `torch.optim.Adam`. It has no weight
/// decay.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdamOptions {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Whether the moments are corrected for beginning at zero, as the paper and PyTorch do it.
    /// `mlx.optimizers.Adam` leaves that out unless told.
    pub bias_correction: bool,
}

impl Default for AdamOptions {
    fn default() -> Self {
        Self { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, bias_correction: true }
    }
}

/// AdamW (Loshchilov and Hutter, 2019, arXiv:1711.05101), with the defaults of `torch.optim.AdamW`. Weight
/// decay applies to tensors with two or more dimensions.
///
/// With moments of 8 bits (Dettmers et al., 2021, arXiv:2110.02861), as bitsandbytes keeps them, they take
/// about a quarter of the memory: blocks of 256 elements share a scale, and tensors of less than 4096
/// elements keep f32.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdamWOptions {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// The share of a parameter that a step at rate 1 removes.
    pub weight_decay: f64,
    /// Whether the moments are corrected for beginning at zero, as PyTorch does it. `mlx.optimizers.AdamW`
    /// leaves that out unless told.
    pub bias_correction: bool,
}

impl Default for AdamWOptions {
    fn default() -> Self {
        let AdamOptions { beta1, beta2, epsilon, bias_correction } = AdamOptions::default();
        Self { beta1, beta2, epsilon, weight_decay: 0.01, bias_correction }
    }
}

/// Stochastic gradient descent, with the defaults of `torch.optim.SGD` and `mlx.optimizers.SGD`: no
/// momentum, no weight decay.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SgdOptions {
    /// Decay of the momentum; 0 keeps none.
    pub momentum: f64,
    /// The share of a gradient that the momentum leaves out, but for the first, as `torch.optim.SGD` does it.
    pub dampening: f64,
    /// Whether a step looks ahead, as Nesterov's does.
    pub nesterov: bool,
    /// Added to a gradient times the parameter, for tensors with two or more dimensions.
    pub weight_decay: f64,
}

/// Lion (Chen et al., 2023, arXiv:2302.06675), with the defaults of the paper and `mlx.optimizers.Lion`. Its
/// steps have one size, so its learning rate is 3 to 10 times smaller than AdamW's. Weight decay applies to
/// tensors with two or more dimensions.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LionOptions {
    /// The share of the momentum in a step's direction.
    pub beta1: f64,
    /// Decay of the momentum.
    pub beta2: f64,
    /// The share of a parameter that a step at rate 1 removes.
    pub weight_decay: f64,
}

impl Default for LionOptions {
    fn default() -> Self {
        Self { beta1: 0.9, beta2: 0.99, weight_decay: 0.0 }
    }
}

/// Adafactor (Shazeer and Stern, 2018, arXiv:1804.04235), which keeps next to nothing: the means of rows and
/// of columns of squared gradients. It has no first moment. The defaults are those of transformers' trainer:
/// steps of the learning rate and its schedule, neither relative nor scaled. `transformers.Adafactor` and
/// `mlx.optimizers.Adafactor` by themselves do both, and ignore the learning rate. Weight decay applies to
/// tensors with two or more dimensions.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdafactorOptions {
    /// Added to squared gradients.
    pub epsilon: f64,
    /// The smallest size of a parameter that scales a step.
    pub scale_epsilon: f64,
    /// The largest root of the mean of squares of an update at rate 1.
    pub clip_threshold: f64,
    /// The exponent of the step's number in the decay of means, `1 - t^decay_rate`.
    pub decay_rate: f64,
    /// Whether steps are scaled by the root of the mean of squares of the parameter.
    pub scale_parameter: bool,
    /// Whether the learning rate is `min(0.01, 1/sqrt(t))` instead of the schedule's.
    pub relative_step: bool,
    /// Whether that begins with `0.000001·t`.
    pub warmup_init: bool,
    /// The share of a parameter that a step at rate 1 removes.
    pub weight_decay: f64,
}

impl Default for AdafactorOptions {
    fn default() -> Self {
        Self {
            epsilon: 1e-30,
            scale_epsilon: 1e-3,
            clip_threshold: 1.0,
            decay_rate: -0.8,
            scale_parameter: false,
            relative_step: false,
            warmup_init: false,
            weight_decay: 0.0,
        }
    }
}

/// Muon (Jordan et al., 2024, <https://kellerjordan.github.io/posts/muon/>), with the defaults of
/// `torch.optim.Muon`: momentum whose direction is made orthogonal, for matrices, and AdamW for vectors, the
/// embedding and the head. A step of a matrix is multiplied by `sqrt(max(1, outputs / inputs))`, where
/// `mlx.optimizers.Muon` takes rows for outputs also of LoRA's matrices, which it stores transposed. Weight
/// decay applies to tensors with two or more dimensions, and not through the gradient, as in MLX.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MuonOptions {
    /// Decay of the momentum.
    pub momentum: f64,
    /// Whether a step looks ahead, as Nesterov's does.
    pub nesterov: bool,
    /// The share of a parameter that a step at rate 1 removes.
    pub weight_decay: f64,
    /// Iterations of Newton and Schulz.
    pub ns_steps: usize,
    /// AdamW's learning rate as a share of Muon's; by default that of the authors, 3e-4 beside 0.02.
    pub adamw_share: f64,
}

impl Default for MuonOptions {
    fn default() -> Self {
        Self { momentum: 0.95, nesterov: true, weight_decay: 0.1, ns_steps: 5, adamw_share: 0.015 }
    }
}

impl Optimizer {
    /// Its name in settings and files.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Adam(_) => "adam",
            Self::AdamW(_) => "adamw",
            Self::Sgd(_) => "sgd",
            Self::Lion(_) => "lion",
            Self::AdamW8bit(_) => "adamw8bit",
            Self::Adafactor(_) => "adafactor",
            Self::Muon(_) => "muon",
        }
    }

    /// The highest learning rate unless told otherwise, where LoRA or, with `every_weight`, the whole model is
    /// trained: for LoRA with AdamW QLoRA's (Dettmers et al., 2023, arXiv:2305.14314), for Lion a tenth of it, as
    /// its authors advise, for SGD that of PyTorch's examples, for Adafactor that of transformers'
    /// documentation, for Muon PyTorch's.
    pub fn default_learning_rate(&self, every_weight: bool) -> f64 {
        let rate = match self {
            Self::Adam(_) | Self::AdamW(_) | Self::AdamW8bit(_) => 2e-4,
            Self::Adafactor(_) | Self::Muon(_) => 1e-3,
            Self::Lion(_) => 2e-5,
            Self::Sgd(_) => 0.1,
        };
        // LoRA's best rate is about ten times that of every weight (https://thinkingmachines.ai/blog/lora/).
        if every_weight { rate / 10.0 } else { rate }
    }

    /// Checks every value.
    pub fn validate(&self) -> Result<()> {
        match *self {
            Self::Adam(options) => {
                share("beta1", options.beta1)?;
                share("beta2", options.beta2)?;
                epsilon(options.epsilon)
            }
            Self::AdamW(options) | Self::AdamW8bit(options) => {
                share("beta1", options.beta1)?;
                share("beta2", options.beta2)?;
                epsilon(options.epsilon)?;
                not_negative("weight_decay", options.weight_decay, RATE)
            }
            Self::Sgd(SgdOptions { momentum, dampening, nesterov, weight_decay }) => {
                share("momentum", momentum)?;
                share("dampening", dampening)?;
                not_negative("weight_decay", weight_decay, RATE)?;
                if nesterov && (momentum == 0.0 || dampening != 0.0) {
                    return Err(Error::option(
                        "nesterov",
                        format!(
                            "needs a momentum and no dampening, and they are {momentum} and {dampening}"
                        ),
                    ));
                }
                Ok(())
            }
            Self::Lion(options) => {
                share("beta1", options.beta1)?;
                share("beta2", options.beta2)?;
                not_negative("weight_decay", options.weight_decay, RATE)
            }
            Self::Adafactor(options) => {
                epsilon(options.epsilon)?;
                not_negative("scale_epsilon", options.scale_epsilon, RATE)?;
                positive("clip_threshold", options.clip_threshold, NORM)?;
                if !(-1.0..0.0).contains(&options.decay_rate) {
                    return Err(Error::option(
                        "decay_rate",
                        format!("is {}, expected at least -1 and below 0", options.decay_rate),
                    ));
                }
                if options.warmup_init && !options.relative_step {
                    return Err(Error::option("warmup_init", "needs relative_step, which is off"));
                }
                not_negative("weight_decay", options.weight_decay, RATE)
            }
            Self::Muon(MuonOptions { momentum, nesterov, weight_decay, ns_steps, adamw_share }) => {
                share("momentum", momentum)?;
                not_negative("weight_decay", weight_decay, RATE)?;
                not_negative("adamw_share", adamw_share, RATE)?;
                if nesterov && momentum == 0.0 {
                    return Err(Error::option("nesterov", "needs a momentum, and it is 0"));
                }
                // As in PyTorch; 5 are usual.
                if !(1..100).contains(&ns_steps) {
                    return Err(Error::option(
                        "ns_steps",
                        format!("is {ns_steps}, expected at least 1 and below 100"),
                    ));
                }
                Ok(())
            }
        }
    }

    /// The name and every option, as `name key value, key value`.
    pub fn describe(&self) -> String {
        let options = match self {
            Self::Adam(options) => serde_json::to_value(options),
            Self::AdamW(options) | Self::AdamW8bit(options) => serde_json::to_value(options),
            Self::Sgd(options) => serde_json::to_value(options),
            Self::Lion(options) => serde_json::to_value(options),
            Self::Adafactor(options) => serde_json::to_value(options),
            Self::Muon(options) => serde_json::to_value(options),
        };
        let Ok(serde_json::Value::Object(options)) = options else { return self.name().into() };
        let options: Vec<String> =
            options.iter().map(|(key, value)| format!("{key} {value}")).collect();
        format!("{} {}", self.name(), options.join(", "))
    }

    /// Whether an element's step depends on nothing of others but the norm of all gradients.
    fn is_by_element(&self) -> bool {
        matches!(self, Self::Adam(_) | Self::AdamW(_) | Self::Sgd(_) | Self::Lion(_))
    }

    /// Whether it makes the step of parameters of which several processes have a part each.
    ///
    /// # Errors
    /// [`Error::Option`] saying what does.
    pub fn check_in_parts(&self) -> Result<()> {
        match self.is_by_element() {
            true => Ok(()),
            false => Err(Error::option(
                "base_placement",
                format!(
                    "is sharded, but {} makes no step of a part of every matrix; expected adamw, adam, lion or sgd",
                    self.name()
                ),
            )),
        }
    }

    /// What it keeps beside these parameters and their gradients, in bytes.
    pub fn state_bytes(&self, parameters: &[Entry]) -> u64 {
        let layout = state::layout(self, parameters);
        layout.iter().map(|part| (part.count * part.dtype.size_in_bytes()) as u64).sum()
    }
}

/// Steps are computed in f32, in which a smaller one is 0 or loses its digits.
fn epsilon(epsilon: f64) -> Result<()> {
    positive("epsilon", epsilon, RATE)?;
    if epsilon < f64::from(f32::MIN_POSITIVE) {
        return Err(Error::option(
            "epsilon",
            format!("is {epsilon:e}, expected at least {:e}", f32::MIN_POSITIVE),
        ));
    }
    Ok(())
}
