//! The frozen weights of the decoder's layers, shaped by the configuration.

use super::config::{Config, ExpertsConfig, NormPlacement, QueryKeyNorm};
use super::quantization::Quantization;
use super::tensor_parallel::{Along, Cut, TensorRank};
use super::weight::{FrozenWeights, Storage, WeightId};
use crate::Result;
use candle_core::Device;
use metal_candle_kernels::glu::Activation;
use metal_candle_kernels::quantized::Weight;
use metal_candle_kernels::{attention, experts};
use std::sync::{Arc, Mutex};

/// The weight of a norm and how it is used.
#[derive(Debug)]
pub(crate) struct Norm {
    pub weight: WeightId,
    pub epsilon: f64,
    pub offset: f64,
}

/// A linear layer, `x · weightᵀ + bias`.
#[derive(Debug)]
pub(crate) struct Linear {
    /// Its place among the linear layers that adapters can have, or [`Self::NO_ADAPTER`].
    pub index: usize,
    /// Its path in the model, such as `model.layers.0.self_attn.q_proj`.
    pub path: String,
    /// Inputs that are here.
    pub input: usize,
    /// Outputs that are here.
    pub output: usize,
    /// `(out, in)`
    pub weight: WeightId,
    /// `(out)`
    pub bias: Option<WeightId>,
    /// Which part of the layer this is, where ranks have a part each.
    pub cut: Option<Box<Cut>>,
}

impl Linear {
    /// The index of those that adapters don't have: routers and experts.
    const NO_ADAPTER: usize = usize::MAX;
}

/// The projections into queries, keys and values.
#[derive(Debug)]
pub(crate) enum QueryKeyValue {
    Separate { q: Linear, k: Linear, v: Linear },
    Fused(Linear),
}

#[derive(Debug)]
pub(crate) struct Attention {
    pub projections: QueryKeyValue,
    pub output: Linear,
    pub query_norm: Option<Norm>,
    pub key_norm: Option<Norm>,
    pub norm_per_head: bool,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub rope: Option<usize>,
    /// `(heads)`
    pub sinks: Option<WeightId>,
    /// Without the sinks.
    pub options: attention::Options,
}

/// The projections into the MLP's gate and value.
#[derive(Debug)]
pub(crate) enum GateUp {
    Separate { gate: Linear, up: Linear },
    Fused(Linear),
}

#[derive(Debug)]
pub(crate) struct Mlp {
    pub projections: GateUp,
    pub down: Linear,
    pub width: usize,
    pub activation: Activation,
}

/// MLPs of which each token is read by some.
#[derive(Debug)]
pub(crate) struct Experts {
    /// Into a logit for each expert.
    pub router: Linear,
    pub experts: Vec<Expert>,
    pub options: experts::routed::Options,
    /// As a GPU reads them by itself, once it has.
    pub routed: Mutex<Option<Arc<experts::routed::Layer>>>,
}

#[derive(Debug)]
pub(crate) struct Expert {
    pub gate: Linear,
    pub up: Linear,
    pub down: Linear,
}

impl Expert {
    /// Into its gate and value, and back.
    pub fn layers(&self) -> [&Linear; 3] {
        [&self.gate, &self.up, &self.down]
    }

    /// Its weights where they are on the model's device.
    pub fn held<'w>(&self, weights: &'w FrozenWeights) -> Option<experts::routed::Expert<'w>> {
        let weight = |layer: &Linear| match weights.storage(layer.weight) {
            Storage::Dense(tensor) => Some(Weight::Dense(tensor)),
            Storage::Quantized(quantized) => Some(Weight::Quantized(quantized)),
            _ => None,
        };
        let bias = |layer: &Linear| match weights.storage(layer.bias?) {
            Storage::Dense(tensor) => Some(tensor),
            _ => None,
        };
        let [gate, up, down] = self.layers();
        let weights = [weight(gate)?, weight(up)?, weight(down)?];
        let biases = [bias(gate), bias(up), bias(down)];
        // One that was moved isn't none.
        let has_all = biases
            .iter()
            .zip(self.layers())
            .all(|(bias, layer)| bias.is_some() == layer.bias.is_some());
        has_all.then_some(experts::routed::Expert { weights, biases })
    }
}

/// What follows attention in a layer.
#[derive(Debug)]
pub(crate) enum FeedForward {
    Mlp(Mlp),
    Experts(Experts),
}

#[derive(Debug)]
pub(crate) struct Layer {
    pub before_attention: Option<Norm>,
    pub attention: Attention,
    pub after_attention: Option<Norm>,
    pub before_mlp: Option<Norm>,
    pub feed_forward: FeedForward,
    pub after_mlp: Option<Norm>,
    pub residual_multiplier: f64,
}

/// Gives the weights of a decoder by name while it is built.
pub(crate) trait Source {
    /// A weight of this shape on `device`.
    fn weight(
        &mut self,
        name: &str,
        shape: &[usize],
        kind: Kind,
        device: &Device,
    ) -> Result<Storage>;

    /// On the CPU, what of a linear layer's weight `(out, in)` is cut out.
    fn part(&mut self, name: &str, shape: [usize; 2], cut: &Cut) -> Result<Storage> {
        cut.weight(name, self.weight(name, &shape, Kind::Linear, &Device::Cpu)?)
    }
}

/// What a weight is for, which decides how it starts when a model is made from nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Of a linear layer that isn't one of an expert, `(out, in)`.
    Linear,
    /// The same of an expert.
    Expert,
    /// Of what chooses experts, `(experts, hidden)`, which isn't brought into fewer bits: small differences choose others.
    Router,
    /// The embedding or the head, `(vocabulary, hidden)`.
    Table,
    Bias,
    Norm,
    /// `(heads)`
    Sinks,
}

/// A decoder under construction.
pub(crate) struct Builder<'a> {
    pub config: &'a Config,
    pub source: &'a mut dyn Source,
    pub device: &'a Device,
    /// What dense matrices are brought into.
    pub quantization: Option<Quantization>,
    /// Of which rank the layers are, where several have a part each.
    pub rank: Option<&'a TensorRank>,
    pub weights: FrozenWeights,
    pub linears: usize,
}

impl Builder<'_> {
    pub fn weight(&mut self, name: String, shape: &[usize], kind: Kind) -> Result<WeightId> {
        let storage = self.read(&name, shape, kind)?.to_device(self.device)?;
        Ok(self.weights.push(name, kind, storage))
    }

    /// A weight, which is still on the CPU if it was brought into fewer bits.
    fn read(&mut self, name: &str, shape: &[usize], kind: Kind) -> Result<Storage> {
        let wanted = self.quantization.filter(|quantization| quantization.wants(kind));
        let first = if wanted.is_some() { &Device::Cpu } else { self.device };
        Ok(match (self.source.weight(name, shape, kind, first)?, wanted) {
            (Storage::Dense(tensor), Some(quantization)) => {
                Storage::Quantized(Arc::new(quantization.apply(name, &tensor)?))
            }
            (storage, _) => storage,
        })
    }

    /// A linear layer that adapters can have.
    fn linear(&mut self, path: String, along: Along, has_bias: bool) -> Result<Linear> {
        let index = self.linears;
        self.linears += 1;
        self.projection(index, path, along, has_bias)
    }

    /// A linear layer into parts of the layer's width or back into the residual stream, or what a rank has of it.
    fn projection(
        &mut self,
        index: usize,
        path: String,
        along: Along,
        has_bias: bool,
    ) -> Result<Linear> {
        let hidden = self.config.hidden_size;
        let (input, output) = match along {
            Along::Outputs(widths) => (hidden, widths.iter().sum()),
            Along::Inputs(width) => (width, hidden),
        };
        let (name, bias) = (format!("{path}.weight"), format!("{path}.bias"));
        let kind = if index == Linear::NO_ADAPTER { Kind::Expert } else { Kind::Linear };
        let Some(rank) = self.rank else {
            let weight = self.weight(name, &[output, input], kind)?;
            let bias = has_bias.then(|| self.weight(bias, &[output], Kind::Bias)).transpose()?;
            return Ok(Linear { index, path, input, output, weight, bias, cut: None });
        };
        let cut = Box::new(rank.cut(along));
        let matrix = match self.quantization {
            // Before it is cut, so that its numbers are those of the whole.
            Some(_) => cut.weight(&name, self.read(&name, &[output, input], kind)?)?,
            None => self.source.part(&name, [output, input], &cut)?,
        };
        let weight = self.weights.push(name, kind, matrix.to_device(self.device)?);
        let bias = match has_bias {
            false => None,
            true => {
                let whole = self.source.weight(&bias, &[output], Kind::Bias, self.device)?;
                Some(self.weights.push(bias, Kind::Bias, cut.bias(rank, whole)?))
            }
        };
        let (input, output) = cut.sizes(input, output);
        Ok(Linear { index, path, input, output, weight, bias, cut: Some(cut) })
    }

    /// The MLP of a layer.
    fn mlp(&mut self, path: &str) -> Result<Mlp> {
        let config = self.config;
        let (width, bias) = (config.intermediate_size, config.mlp_bias);
        let mut linear =
            |name: &str, along: Along| self.linear(format!("{path}.mlp.{name}"), along, bias);
        let projections = if config.fused_projections {
            GateUp::Fused(linear("gate_up_proj", Along::Outputs(&[width, width]))?)
        } else {
            GateUp::Separate {
                gate: linear("gate_proj", Along::Outputs(&[width]))?,
                up: linear("up_proj", Along::Outputs(&[width]))?,
            }
        };
        let down = linear("down_proj", Along::Inputs(width))?;
        let ranks = self.rank.map_or(1, |rank| rank.size);
        Ok(Mlp { projections, down, width: width / ranks, activation: config.activation })
    }

    /// The experts of a layer, each of which a rank has a part of.
    fn experts(&mut self, path: &str, config: &ExpertsConfig) -> Result<Experts> {
        let (input, output) = (self.config.hidden_size, config.count);
        let of_router = format!("{path}.{}", config.router());
        let (name, bias) = (format!("{of_router}.weight"), format!("{of_router}.bias"));
        let router = Linear {
            index: Linear::NO_ADAPTER,
            path: of_router,
            input,
            output,
            weight: self.weight(name, &[output, input], Kind::Router)?,
            bias: config
                .has_biases
                .then(|| self.weight(bias, &[output], Kind::Bias))
                .transpose()?,
            cut: None,
        };
        let expert = |index: usize| {
            let mut linear = |name: &str, along: Along| {
                let path = format!("{path}.{name}");
                self.projection(Linear::NO_ADAPTER, path, along, config.has_biases)
            };
            let [gate, up, down] = config.projections(index);
            Ok(Expert {
                gate: linear(&gate, Along::Outputs(&[config.width]))?,
                up: linear(&up, Along::Outputs(&[config.width]))?,
                down: linear(&down, Along::Inputs(config.width))?,
            })
        };
        let all = (0..config.count).map(expert).collect::<Result<_>>()?;
        let ExpertsConfig { active, normalized, .. } = *config;
        let options =
            experts::routed::Options { active, normalized, activation: self.config.activation };
        Ok(Experts { router, experts: all, options, routed: Mutex::new(None) })
    }

    /// A number for each head of a layer, of which a rank has those of its heads.
    fn sinks(&mut self, path: &str) -> Result<WeightId> {
        let (name, heads) = (format!("{path}.self_attn.sinks"), self.config.heads);
        let Some(rank) = self.rank else { return self.weight(name, &[heads], Kind::Sinks) };
        let whole = self.source.weight(&name, &[heads], Kind::Sinks, self.device)?;
        let own = rank.cut(Along::Outputs(&[heads])).bias(rank, whole)?;
        Ok(self.weights.push(name, Kind::Sinks, own))
    }

    pub fn norm(&mut self, path: &str, width: usize) -> Result<Norm> {
        let weight = self.weight(format!("{path}.weight"), &[width], Kind::Norm)?;
        let (epsilon, offset) = (self.config.rms_norm_eps, self.config.norm_weight_offset);
        Ok(Norm { weight, epsilon, offset })
    }
}

impl Layer {
    pub fn build(index: usize, builder: &mut Builder<'_>) -> Result<Self> {
        let config = builder.config;
        let path = format!("model.layers.{index}");
        let mut norm = |name: &str, width| builder.norm(&format!("{path}.{name}"), width);
        let hidden = config.hidden_size;
        let (before_attention, after_attention, before_mlp, after_mlp) = match config.norm_placement
        {
            NormPlacement::Pre => (
                Some(norm("input_layernorm", hidden)?),
                None,
                Some(norm("post_attention_layernorm", hidden)?),
                None,
            ),
            NormPlacement::Sandwich => (
                Some(norm("input_layernorm", hidden)?),
                Some(norm("post_attention_layernorm", hidden)?),
                Some(norm("pre_feedforward_layernorm", hidden)?),
                Some(norm("post_feedforward_layernorm", hidden)?),
            ),
            NormPlacement::Post => (
                None,
                Some(norm("post_attention_layernorm", hidden)?),
                None,
                Some(norm("post_feedforward_layernorm", hidden)?),
            ),
        };
        let (query_width, key_width) =
            (config.heads * config.head_dim, config.kv_heads * config.head_dim);
        let (query_norm, key_norm) = match config.query_key_norm {
            QueryKeyNorm::None => (None, None),
            QueryKeyNorm::PerHead => (
                Some(norm("self_attn.q_norm", config.head_dim)?),
                Some(norm("self_attn.k_norm", config.head_dim)?),
            ),
            QueryKeyNorm::FullWidth => (
                Some(norm("self_attn.q_norm", query_width)?),
                Some(norm("self_attn.k_norm", key_width)?),
            ),
        };
        let mut linear =
            |name: &str, along: Along, bias| builder.linear(format!("{path}.{name}"), along, bias);
        let bias = config.attention_bias;
        let projections = if config.fused_projections {
            let widths = [query_width, key_width, key_width];
            QueryKeyValue::Fused(linear("self_attn.qkv_proj", Along::Outputs(&widths), bias)?)
        } else {
            let (queries, keys) = ([query_width], [key_width]);
            QueryKeyValue::Separate {
                q: linear("self_attn.q_proj", Along::Outputs(&queries), bias)?,
                k: linear("self_attn.k_proj", Along::Outputs(&keys), bias)?,
                v: linear("self_attn.v_proj", Along::Outputs(&keys), bias)?,
            }
        };
        let bias = config.attention_output_bias;
        let output = linear("self_attn.o_proj", Along::Inputs(query_width), bias)?;
        let sinks = config.attention_sinks.then(|| builder.sinks(&path)).transpose()?;
        let layer = &config.layers[index];
        let feed_forward = match &config.experts {
            Some(experts) if layer.has_experts => {
                FeedForward::Experts(builder.experts(&path, experts)?)
            }
            _ => FeedForward::Mlp(builder.mlp(&path)?),
        };
        let ranks = builder.rank.map_or(1, |rank| rank.size);
        Ok(Self {
            before_attention,
            attention: Attention {
                projections,
                output,
                query_norm,
                key_norm,
                norm_per_head: config.query_key_norm == QueryKeyNorm::PerHead,
                heads: config.heads / ranks,
                kv_heads: config.kv_heads / ranks,
                head_dim: config.head_dim,
                rope: layer.rope,
                sinks,
                options: attention::Options {
                    scale: config.attention_scale,
                    softcap: config.attention_softcap,
                    window: layer.window,
                    sinks: None,
                },
            },
            after_attention,
            before_mlp,
            feed_forward,
            after_mlp,
            residual_multiplier: config.residual_multiplier,
        })
    }

    /// The linear layers that adapters can have.
    pub fn linears(&self) -> Vec<&Linear> {
        let mut linears = match &self.attention.projections {
            QueryKeyValue::Separate { q, k, v } => vec![q, k, v],
            QueryKeyValue::Fused(qkv) => vec![qkv],
        };
        linears.push(&self.attention.output);
        if let FeedForward::Mlp(mlp) = &self.feed_forward {
            match &mlp.projections {
                GateUp::Separate { gate, up } => linears.extend([gate, up]),
                GateUp::Fused(gate_up) => linears.push(gate_up),
            }
            linears.push(&mlp.down);
        }
        linears
    }

    /// All linear layers.
    pub fn matrices(&self) -> Vec<&Linear> {
        let mut matrices = self.linears();
        if let FeedForward::Experts(Experts { router, experts, .. }) = &self.feed_forward {
            matrices.push(router);
            matrices.extend(experts.iter().flat_map(Expert::layers));
        }
        matrices
    }

    /// The weights that aren't of linear layers: of norms, and sinks.
    pub fn others(&self) -> impl Iterator<Item = WeightId> {
        self.norms().map(|norm| norm.weight).chain(self.attention.sinks)
    }

    fn norms(&self) -> impl Iterator<Item = &Norm> {
        [
            &self.before_attention,
            &self.attention.query_norm,
            &self.attention.key_norm,
            &self.after_attention,
            &self.before_mlp,
            &self.after_mlp,
        ]
        .into_iter()
        .flatten()
    }
}
