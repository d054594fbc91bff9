//! The decoder's forward pass: one for training, evaluation and generation.

use super::linear::{self, forward_shared};
use super::paged::{Paging, Pools};
use super::{Pass, Spread};
use crate::adapter::Adapter;
use crate::autograd::{Tape, Value};
use crate::model::layer::{Attention, GateUp, Layer, Mlp, Norm, QueryKeyValue};
use crate::model::rope::Rotation;
use crate::{Error, Result};
use candle_core::Tensor;
use metal_candle_kernels::recording;
use std::sync::Arc;

impl Norm {
    fn forward(&self, tape: &Tape, x: &Value, pass: &Pass) -> Result<Value> {
        pass.with_adapters(tape, self.weight, x, |x, adapter| {
            let weight = pass.weight_of(tape, self.weight, adapter)?;
            let weight = tape.cast(&weight, x.tensor().dtype())?;
            tape.rms_norm(x, &weight, self.epsilon, self.offset)
        })
    }

    /// `x + branch` and its norm.
    fn forward_residual(
        &self,
        tape: &Tape,
        x: &Value,
        branch: &Value,
        pass: &Pass,
    ) -> Result<(Value, Value)> {
        let replaces = |adapter: &Adapter| adapter.replacement(self.weight).is_some();
        let Ok(adapter) = pass.adapters.in_common(replaces) else {
            let sum = tape.add(x, branch)?;
            let normed = self.forward(tape, &sum, pass)?;
            return Ok((sum, normed));
        };
        let weight = pass.weight_of(tape, self.weight, adapter.map(|it| &**it))?;
        let weight = tape.cast(&weight, x.tensor().dtype())?;
        tape.rms_norm_residual(x, branch, &weight, self.epsilon, self.offset)
    }
}

impl Layer {
    fn forward(
        &self,
        tape: &Tape,
        stream: Stream,
        pass: &Pass,
        cache: Option<Cached>,
    ) -> Result<Stream> {
        let (x, normed) = stream.normed(tape, self.before_attention.as_ref(), pass)?;
        let attended = self.attention.forward(tape, &normed, pass, cache)?;
        drop(normed);
        let branch = Some(self.branch(tape, self.after_attention.as_ref(), &attended, pass)?);
        drop(attended);
        let (x, normed) = Stream { x, branch }.normed(tape, self.before_mlp.as_ref(), pass)?;
        let output = self.mlp.forward(tape, &normed, pass)?;
        let branch = Some(self.branch(tape, self.after_mlp.as_ref(), &output, pass)?);
        Ok(Stream { x, branch })
    }

    /// What a branch adds to the residual stream.
    fn branch(
        &self,
        tape: &Tape,
        norm: Option<&Norm>,
        output: &Value,
        pass: &Pass,
    ) -> Result<Value> {
        let normed = apply(norm, tape, output, pass)?;
        if self.residual_multiplier == 1.0 {
            Ok(normed)
        } else {
            tape.scale(&normed, self.residual_multiplier)
        }
    }
}

fn apply(norm: Option<&Norm>, tape: &Tape, x: &Value, pass: &Pass) -> Result<Value> {
    norm.map_or_else(|| Ok(x.clone()), |norm| norm.forward(tape, x, pass))
}

impl Attention {
    fn forward(&self, tape: &Tape, x: &Value, pass: &Pass, cache: Option<Cached>) -> Result<Value> {
        let (batch, seq, _) = x.tensor().dims3()?;
        let (query_width, key_width) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let [q, k, v] = match &self.projections {
            QueryKeyValue::Separate { q, k, v } => forward_shared([q, k, v], tape, x, pass)?,
            QueryKeyValue::Fused(qkv) => {
                let fused = linear::forward(qkv, tape, x, pass)?;
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
        let q = self.heads_of(tape, &q, self.query_norm.as_ref(), self.heads, pass)?;
        let k = self.heads_of(tape, &k, self.key_norm.as_ref(), self.kv_heads, pass)?;
        let rotation = |index: usize| {
            pass.ropes.get(index).ok_or_else(|| {
                let count = pass.ropes.len();
                Error::option("rope", format!("{index} is a layer's, and the pass has {count}"))
            })
        };
        let (q, k) = match self.rope.map(rotation).transpose()? {
            Some(Rotation { cos, sin, queries: Some((query_cos, query_sin)) }) => {
                (tape.rotate(&q, query_cos, query_sin)?, tape.rotate(&k, cos, sin)?)
            }
            Some(Rotation { cos, sin, queries: None }) => tape.rope(&q, &k, cos, sin)?,
            None => (q, k),
        };
        let v = tape.reshape(&v, (batch, seq, self.kv_heads, self.head_dim))?;
        let attended = match cache {
            Some(Cached { pools, paging }) => {
                let rows = |x: &Value| x.tensor().squeeze(1);
                let (q, k, v) = (rows(&q)?, rows(&k)?, rows(&v)?);
                tape.constant(pools.attend(&q, [&k, &v], paging, &self.options)?)
            }
            None => match &pass.spread {
                None => tape.attention(&q, &k, &v, pass.first_key.as_ref(), &self.options)?,
                Some(spread) => {
                    let [q, k, v] = [&q, &k, &v].map(|x| spread.apart(tape, x));
                    let (q, k, v) = (q?, k?, v?);
                    let first_key = pass.first_key.as_ref();
                    let attended = tape.attention(&q, &k, &v, first_key, &self.options)?;
                    spread.together(tape, &attended)?
                }
            },
        };
        let attended = tape.reshape(&attended, (batch, seq, query_width))?;
        pass.whole(tape, linear::forward(&self.output, tape, &attended, pass)?)
    }

    /// Queries or keys as heads, normalised.
    fn heads_of(
        &self,
        tape: &Tape,
        x: &Value,
        norm: Option<&Norm>,
        heads: usize,
        pass: &Pass,
    ) -> Result<Value> {
        let (batch, seq, _) = x.tensor().dims3()?;
        let shape = (batch, seq, heads, self.head_dim);
        if self.norm_per_head {
            apply(norm, tape, &tape.reshape(x, shape)?, pass)
        } else {
            tape.reshape(&apply(norm, tape, x, pass)?, shape)
        }
    }
}

impl Spread {
    /// Heads `(batch, seq, heads, head_dim)` of the batch as attention reads them, with beginnings repeated.
    fn apart(&self, tape: &Tape, x: &Value) -> Result<Value> {
        rows_of(tape, x, &self.source)
    }

    /// What attention gives, of each place of the batch once.
    fn together(&self, tape: &Tape, attended: &Value) -> Result<Value> {
        rows_of(tape, attended, &self.result)
    }
}

/// The places `(batch, length)` of `x (batch, seq, heads, head_dim)`.
fn rows_of(tape: &Tape, x: &Value, places: &Tensor) -> Result<Value> {
    let (batch, seq, heads, head_dim) = x.tensor().dims4()?;
    let rows = tape.reshape(x, (batch * seq, heads * head_dim))?;
    let rows = tape.rows(&rows, places)?;
    tape.reshape(&rows, (batch, places.dim(1)?, heads, head_dim))
}

impl Mlp {
    fn forward(&self, tape: &Tape, x: &Value, pass: &Pass) -> Result<Value> {
        let [gate, up] = match &self.projections {
            GateUp::Separate { gate, up } => forward_shared([gate, up], tape, x, pass)?,
            GateUp::Fused(gate_up) => {
                let fused = linear::forward(gate_up, tape, x, pass)?;
                let mut parts = tape.split(&fused, &[self.width, self.width])?.into_iter();
                match (parts.next(), parts.next()) {
                    (Some(gate), Some(up)) => [gate, up],
                    _ => {
                        return Err(candle_core::Error::msg("split gave fewer than 2 parts").into());
                    }
                }
            }
        };
        let read = (&gate, &up);
        pass.whole(tape, linear::forward_gated(&self.down, tape, read, self.activation, pass)?)
    }
}

/// The residual stream between two parts of the decoder. What the last branch gave is added together
/// with the norm that follows, in one pass.
pub(super) struct Stream {
    x: Value,
    branch: Option<Value>,
}

impl Stream {
    /// The stream with the branch added, and what `norm` makes of it.
    pub(super) fn normed(
        self,
        tape: &Tape,
        norm: Option<&Norm>,
        pass: &Pass,
    ) -> Result<(Value, Value)> {
        match (self.branch, norm) {
            (Some(branch), Some(norm)) => norm.forward_residual(tape, &self.x, &branch, pass),
            (None, Some(norm)) => {
                let normed = norm.forward(tape, &self.x, pass)?;
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
            Some(branch) => tape.add(&self.x, &branch),
            None => Ok(self.x),
        }
    }
}

/// Where the keys and values of all layers are that come before those of a pass.
#[derive(Clone, Copy)]
pub(super) enum Caches<'a> {
    None,
    /// With the kind of each layer, and a paging for each of these.
    Paged {
        layers: &'a [(usize, Pools)],
        paging: &'a [Paging],
    },
}

/// Those of one layer.
struct Cached<'a> {
    pools: &'a Pools,
    paging: &'a Paging,
}

impl<'a> Caches<'a> {
    fn of_layer(self, index: usize) -> Result<Option<Cached<'a>>> {
        let Self::Paged { layers, paging } = self else { return Ok(None) };
        let of_layer = layers.get(index);
        let found = of_layer.and_then(|(kind, pools)| Some((pools, paging.get(*kind)?)));
        let (pools, paging) = found.ok_or_else(|| {
            Error::option("cache", format!("has no layer {index}, which the model has"))
        })?;
        Ok(Some(Cached { pools, paging }))
    }
}

/// Runs all layers.
pub(super) fn run_layers(
    layers: &[Arc<Layer>],
    tape: &Tape,
    x: Value,
    pass: &Arc<Pass>,
    caches: Caches,
) -> Result<Stream> {
    let mut stream = Stream { x, branch: None };
    let count = layers.len();
    for (index, layer) in layers.iter().enumerate() {
        // A layer reads the stream and the branch of the one before it.
        recording::next_part();
        let cache = caches.of_layer(index)?;
        stream = if cache.is_none() && tape.is_checkpointing() {
            let (layer, pass) = (layer.clone(), pass.clone());
            let segment = Arc::new(move |tape: &Tape, inputs: &[Value]| {
                let pass = pass.of_layer(index, count, tape)?;
                let layers = inputs.iter().map(|x| {
                    let stream = Stream { x: x.clone(), branch: None };
                    layer.forward(tape, stream, &pass, None)?.joined(tape)
                });
                layers.collect()
            });
            // Only the sum is kept between two layers.
            match tape.segment(&[&stream.joined(tape)?], segment)?.pop() {
                Some(x) => Stream { x, branch: None },
                None => return Err(candle_core::Error::msg("a segment gave no output").into()),
            }
        } else {
            layer.forward(tape, stream, &*pass.of_layer(index, count, tape)?, cache)?
        };
    }
    Ok(stream)
}
