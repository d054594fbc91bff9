//! The layers of the decoder: one forward for training, evaluation and generation, shaped by the
//! configuration.

use super::cache::LayerCache;
use super::config::{Config, NormPlacement, QueryKeyNorm};
use super::linear::{Linear, forward_shared, weight_as};
use crate::Result;
use crate::autograd::{Tape, Value, Weight};
use candle_core::Tensor;
use metal_candle_kernels::attention;
use metal_candle_kernels::glu::Activation;
use std::sync::Arc;

/// What is the same for all layers in one forward pass.
#[derive(Debug)]
pub(crate) struct Pass {
    /// Cosines and sines `(batch, seq, rotated / 2)` of each of the configuration's ropes.
    pub ropes: Vec<(Tensor, Tensor)>,
    /// `(batch, seq)`: the first key each query may see; `None` is 0 for all.
    pub first_key: Option<Tensor>,
    /// `(1)`: how many tokens come before the one, where only the device knows.
    pub before: Option<Tensor>,
    /// Set in training: where the layers' dropout begins.
    pub dropout_seed: Option<u64>,
}

#[derive(Debug)]
pub(crate) struct Norm {
    pub path: String,
    pub weight: Weight,
    pub epsilon: f64,
    pub offset: f64,
}

impl Norm {
    pub fn forward(&self, tape: &Tape, x: &Value) -> Result<Value> {
        let weight = weight_as(tape, &self.weight, x.tensor().dtype())?;
        tape.rms_norm(x, &weight, self.epsilon, self.offset)
    }

    /// `x + branch` and its norm.
    pub fn forward_residual(
        &self,
        tape: &Tape,
        x: &Value,
        branch: &Value,
    ) -> Result<(Value, Value)> {
        let weight = weight_as(tape, &self.weight, x.tensor().dtype())?;
        tape.rms_norm_residual(x, branch, &weight, self.epsilon, self.offset)
    }
}

/// The projections into queries, keys and values.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "there is one a layer, and all of a model are alike")]
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

#[derive(Debug)]
pub(crate) struct Layer {
    pub before_attention: Option<Norm>,
    pub attention: Attention,
    pub after_attention: Option<Norm>,
    pub before_mlp: Option<Norm>,
    pub mlp: Mlp,
    pub after_mlp: Option<Norm>,
    pub residual_multiplier: f64,
}

/// Gives the weights of a decoder by name while it is built.
pub(crate) trait Source {
    fn weight(&mut self, name: String, shape: &[usize], kind: Kind) -> Result<Weight>;
}

/// What a weight is for, which decides how it starts when a model is made from nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Matrix,
    Bias,
    Norm,
}

impl Layer {
    pub fn build(config: &Config, index: usize, source: &mut dyn Source) -> Result<Self> {
        let path = format!("model.layers.{index}");
        let mut norm = |name: &str, width: usize| {
            let path = format!("{path}.{name}");
            build_norm(config, path, width, source)
        };
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
        let mut linear = |name: &str, input: usize, output: usize, bias: bool| -> Result<Linear> {
            let path = format!("{path}.{name}");
            let weight = source.weight(format!("{path}.weight"), &[output, input], Kind::Matrix)?;
            let bias = bias
                .then(|| source.weight(format!("{path}.bias"), &[output], Kind::Bias))
                .transpose()?;
            Ok(Linear { path, weight, bias, lora: None })
        };
        let bias = config.attention_bias;
        let projections = if config.fused_projections {
            let width = query_width + 2 * key_width;
            QueryKeyValue::Fused(linear("self_attn.qkv_proj", hidden, width, bias)?)
        } else {
            QueryKeyValue::Separate {
                q: linear("self_attn.q_proj", hidden, query_width, bias)?,
                k: linear("self_attn.k_proj", hidden, key_width, bias)?,
                v: linear("self_attn.v_proj", hidden, key_width, bias)?,
            }
        };
        let output = linear("self_attn.o_proj", query_width, hidden, config.attention_output_bias)?;
        let (width, bias) = (config.intermediate_size, config.mlp_bias);
        let gate_up = if config.fused_projections {
            GateUp::Fused(linear("mlp.gate_up_proj", hidden, 2 * width, bias)?)
        } else {
            GateUp::Separate {
                gate: linear("mlp.gate_proj", hidden, width, bias)?,
                up: linear("mlp.up_proj", hidden, width, bias)?,
            }
        };
        let down = linear("mlp.down_proj", width, hidden, bias)?;
        let layer = &config.layers[index];
        Ok(Self {
            before_attention,
            attention: Attention {
                projections,
                output,
                query_norm,
                key_norm,
                norm_per_head: config.query_key_norm == QueryKeyNorm::PerHead,
                heads: config.heads,
                kv_heads: config.kv_heads,
                head_dim: config.head_dim,
                rope: layer.rope,
                options: attention::Options {
                    scale: config.attention_scale,
                    softcap: config.attention_softcap,
                    window: layer.window,
                },
            },
            after_attention,
            before_mlp,
            mlp: Mlp { projections: gate_up, down, width, activation: config.activation },
            after_mlp,
            residual_multiplier: config.residual_multiplier,
        })
    }

    pub fn forward(
        &self,
        tape: &Tape,
        stream: Stream,
        pass: &Pass,
        cache: Option<&mut LayerCache>,
    ) -> Result<Stream> {
        let (x, normed) = stream.normed(tape, self.before_attention.as_ref())?;
        let attended = self.attention.forward(tape, &normed, pass, cache)?;
        drop(normed);
        let branch = Some(self.branch(tape, self.after_attention.as_ref(), &attended)?);
        drop(attended);
        let (x, normed) = Stream { x, branch }.normed(tape, self.before_mlp.as_ref())?;
        // A layer that is run again ends in what nothing reads, unless a norm or a factor comes after.
        let unread =
            tape.is_replaying() && self.after_mlp.is_none() && self.residual_multiplier == 1.0;
        let stand_in = unread.then(|| x.tensor());
        let output = self.mlp.forward(tape, &normed, pass, stand_in)?;
        let branch = Some(self.branch(tape, self.after_mlp.as_ref(), &output)?);
        Ok(Stream { x, branch })
    }

    /// What a branch adds to the residual stream.
    fn branch(&self, tape: &Tape, norm: Option<&Norm>, output: &Value) -> Result<Value> {
        let normed = apply(norm, tape, output)?;
        if self.residual_multiplier == 1.0 {
            Ok(normed)
        } else {
            tape.scale(&normed, self.residual_multiplier)
        }
    }

    pub fn linears(&self) -> Vec<&Linear> {
        let mut linears = match &self.attention.projections {
            QueryKeyValue::Separate { q, k, v } => vec![q, k, v],
            QueryKeyValue::Fused(qkv) => vec![qkv],
        };
        linears.push(&self.attention.output);
        match &self.mlp.projections {
            GateUp::Separate { gate, up } => linears.extend([gate, up]),
            GateUp::Fused(gate_up) => linears.push(gate_up),
        }
        linears.push(&self.mlp.down);
        linears
    }

    pub fn linears_mut(&mut self) -> Vec<&mut Linear> {
        self.linears_and_norms_mut().0
    }

    pub fn norms(&self) -> impl Iterator<Item = &Norm> {
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

    /// In the orders of [`Self::linears`] and [`Self::norms`].
    pub fn linears_and_norms_mut(&mut self) -> (Vec<&mut Linear>, Vec<&mut Norm>) {
        let mut linears = match &mut self.attention.projections {
            QueryKeyValue::Separate { q, k, v } => vec![q, k, v],
            QueryKeyValue::Fused(qkv) => vec![qkv],
        };
        linears.push(&mut self.attention.output);
        match &mut self.mlp.projections {
            GateUp::Separate { gate, up } => linears.extend([gate, up]),
            GateUp::Fused(gate_up) => linears.push(gate_up),
        }
        linears.push(&mut self.mlp.down);
        let norms = [
            &mut self.before_attention,
            &mut self.attention.query_norm,
            &mut self.attention.key_norm,
            &mut self.after_attention,
            &mut self.before_mlp,
            &mut self.after_mlp,
        ];
        (linears, norms.into_iter().flatten().collect())
    }
}

pub(crate) fn build_norm(
    config: &Config,
    path: String,
    width: usize,
    source: &mut dyn Source,
) -> Result<Norm> {
    let weight = source.weight(format!("{path}.weight"), &[width], Kind::Norm)?;
    let (epsilon, offset) = (config.rms_norm_eps, config.norm_weight_offset);
    Ok(Norm { path, weight, epsilon, offset })
}

fn apply(norm: Option<&Norm>, tape: &Tape, x: &Value) -> Result<Value> {
    norm.map_or_else(|| Ok(x.clone()), |norm| norm.forward(tape, x))
}

impl Attention {
    fn forward(
        &self,
        tape: &Tape,
        x: &Value,
        pass: &Pass,
        cache: Option<&mut LayerCache>,
    ) -> Result<Value> {
        let (batch, seq, _) = x.tensor().dims3()?;
        let (query_width, key_width) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let [q, k, v] = match &self.projections {
            QueryKeyValue::Separate { q, k, v } => forward_shared([q, k, v], tape, x, pass)?,
            QueryKeyValue::Fused(qkv) => {
                let fused = qkv.forward(tape, x, pass)?;
                let mut parts =
                    tape.split(&fused, &[query_width, key_width, key_width])?.into_iter();
                match (parts.next(), parts.next(), parts.next()) {
                    (Some(q), Some(k), Some(v)) => [q, k, v],
                    _ => {
                        return Err(candle_core::Error::msg("split gave fewer than 3 parts").into());
                    }
                }
            }
        };
        let q = self.heads_of(tape, &q, self.query_norm.as_ref(), (batch, seq, self.heads))?;
        let k = self.heads_of(tape, &k, self.key_norm.as_ref(), (batch, seq, self.kv_heads))?;
        let (q, k) = match self.rope.and_then(|index| pass.ropes.get(index)) {
            Some((cos, sin)) => tape.rope(&q, &k, cos, sin)?,
            None => (q, k),
        };
        let v = tape.reshape(&v, (batch, seq, self.kv_heads, self.head_dim))?;
        let attended = match (cache, &pass.before) {
            (Some(cache), Some(before)) => {
                let (keys, values) = cache.write_at(k.tensor(), v.tensor(), before)?;
                let q = q.tensor();
                let options = &self.options;
                tape.constant(attention::forward_cached(q, &keys, &values, before, options)?)
            }
            (Some(cache), None) => {
                let (keys, values) = cache.append(k.tensor(), v.tensor())?;
                let (k, v) = (tape.constant(keys), tape.constant(values));
                tape.attention(&q, &k, &v, pass.first_key.as_ref(), &self.options)?
            }
            (None, _) => tape.attention(&q, &k, &v, pass.first_key.as_ref(), &self.options)?,
        };
        let attended = tape.reshape(&attended, (batch, seq, query_width))?;
        self.output.forward(tape, &attended, pass)
    }

    /// Queries or keys as heads, normalised.
    fn heads_of(
        &self,
        tape: &Tape,
        x: &Value,
        norm: Option<&Norm>,
        (batch, seq, heads): (usize, usize, usize),
    ) -> Result<Value> {
        let shape = (batch, seq, heads, self.head_dim);
        if self.norm_per_head {
            apply(norm, tape, &tape.reshape(x, shape)?)
        } else {
            tape.reshape(&apply(norm, tape, x)?, shape)
        }
    }
}

impl Mlp {
    /// `stand_in` stands for the result where nothing reads that.
    fn forward(
        &self,
        tape: &Tape,
        x: &Value,
        pass: &Pass,
        stand_in: Option<&Tensor>,
    ) -> Result<Value> {
        let [gate, up] = match &self.projections {
            GateUp::Separate { gate, up } => forward_shared([gate, up], tape, x, pass)?,
            GateUp::Fused(gate_up) => {
                let fused = gate_up.forward(tape, x, pass)?;
                let mut parts = tape.split(&fused, &[self.width, self.width])?.into_iter();
                match (parts.next(), parts.next()) {
                    (Some(gate), Some(up)) => [gate, up],
                    _ => {
                        return Err(candle_core::Error::msg("split gave fewer than 2 parts").into());
                    }
                }
            }
        };
        match stand_in {
            Some(stand_in) => {
                let gated = tape.glu(&gate, &up, self.activation)?;
                self.down.forward_unread(tape, &gated, pass, stand_in)
            }
            None => self.down.forward_gated(tape, (&gate, &up), self.activation, pass),
        }
    }
}

/// The residual stream between two parts of the decoder. What the last branch gave is added together
/// with the norm that follows, in one pass.
pub(crate) struct Stream {
    x: Value,
    branch: Option<Value>,
}

impl Stream {
    /// The stream with the branch added, and what `norm` makes of it.
    pub fn normed(self, tape: &Tape, norm: Option<&Norm>) -> Result<(Value, Value)> {
        match (self.branch, norm) {
            (Some(branch), Some(norm)) => norm.forward_residual(tape, &self.x, &branch),
            (None, Some(norm)) => {
                let normed = norm.forward(tape, &self.x)?;
                Ok((self.x, normed))
            }
            (branch, None) => {
                let x = match branch {
                    Some(branch) => tape.add(&self.x, &branch)?,
                    None => self.x,
                };
                Ok((x.clone(), x))
            }
        }
    }

    /// The stream with the branch added, at the end of a segment.
    fn joined(self, tape: &Tape) -> Result<Value> {
        match self.branch {
            Some(branch) if tape.is_replaying() => tape.unread_add(&self.x, &branch),
            Some(branch) => tape.add(&self.x, &branch),
            None => Ok(self.x),
        }
    }
}

/// Runs all layers, storing or recomputing their activations.
pub(crate) fn run_layers(
    layers: &[Arc<Layer>],
    tape: &Tape,
    x: Value,
    pass: &Arc<Pass>,
    mut caches: Option<&mut [LayerCache]>,
    recompute: bool,
) -> Result<Stream> {
    let mut stream = Stream { x, branch: None };
    for (index, layer) in layers.iter().enumerate() {
        let cache = caches.as_mut().and_then(|caches| caches.get_mut(index));
        stream = if recompute && cache.is_none() {
            let (layer, pass) = (layer.clone(), pass.clone());
            let segment = Arc::new(move |tape: &Tape, inputs: &[Value]| {
                let layers = inputs.iter().map(|x| {
                    let stream = Stream { x: x.clone(), branch: None };
                    layer.forward(tape, stream, &pass, None)?.joined(tape)
                });
                layers.collect()
            });
            // Only the sum and what attention gives are kept for the backward pass.
            match tape.checkpoint(&[&stream.joined(tape)?], segment)?.pop() {
                Some(x) => Stream { x, branch: None },
                None => return Err(candle_core::Error::msg("a segment gave no output").into()),
            }
        } else {
            layer.forward(tape, stream, pass, cache)?
        };
    }
    Ok(stream)
}
