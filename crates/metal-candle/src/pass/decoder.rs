//! The decoder's forward pass: one for training, evaluation and generation.

use super::linear;
use super::paged::{Paging, Pools};
use super::{Pass, Spread, Wanted};
use crate::adapter::Adapter;
use crate::autograd::{NormValues, Tape, Value};
use crate::model::layer::{
    Attention, Experts, FeedForward, GateUp, Layer, Linear, Mlp, Norm, QueryKeyValue,
};
use crate::model::rope::Rotation;
use crate::{Error, Result};
use candle_core::{DType, Tensor};
use metal_candle_kernels::experts::Dispatch;
use metal_candle_kernels::experts::routed::Options;
use metal_candle_kernels::glu::Activation;
use metal_candle_kernels::recording;
use std::sync::Arc;

impl Norm {
    fn forward(&self, tape: &Tape, x: &Value, pass: &Pass) -> Result<Value> {
        pass.with_adapters(tape, self.weight, x, |x, adapter| {
            let weight = self.weight_of(tape, pass, adapter, x.tensor().dtype())?;
            tape.rms_norm(x, &weight, self.epsilon, self.offset)
        })
    }

    /// The weight, or that of an adapter which replaces it.
    pub(super) fn weight_of(
        &self,
        tape: &Tape,
        pass: &Pass,
        adapter: Option<&Adapter>,
        dtype: DType,
    ) -> Result<Value> {
        tape.cast(&pass.weight_of(tape, self.weight, adapter)?, dtype)
    }

    /// As values of the tape, with this weight.
    pub(super) fn values<'a>(&self, weight: &'a Value) -> NormValues<'a> {
        NormValues { weight, epsilon: self.epsilon, offset: self.offset }
    }

    /// `x + branch` and its norm.
    pub(super) fn forward_residual(
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
        let adapter = adapter.map(|it| &**it);
        let weight = self.weight_of(tape, pass, adapter, x.tensor().dtype())?;
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
        wanted: Option<&Wanted>,
    ) -> Result<Stream> {
        let read = Normed { stream, norm: self.before_attention.as_ref() };
        let (x, attended) = self.attention.attend(tape, read, pass, cache)?;
        let rows = wanted.map(|wanted| wanted.pass(pass));
        let pass = rows.as_ref().unwrap_or(pass);
        let (x, attended) = match wanted {
            Some(wanted) => (wanted.rows(tape, &x)?, wanted.rows(tape, &attended)?),
            None => (x, attended),
        };
        let output = linear::forward(&self.attention.output, tape, &attended, pass)?;
        drop(attended);
        let attended = pass.whole(tape, output)?;
        let branch = Some(self.branch(tape, self.after_attention.as_ref(), &attended, pass)?);
        drop(attended);
        let read = Normed { stream: Stream { x, branch }, norm: self.before_mlp.as_ref() };
        let (x, output) = match &self.feed_forward {
            FeedForward::Mlp(mlp) => mlp.forward(tape, read, pass)?,
            FeedForward::Experts(experts) => experts.forward(tape, read, pass)?,
        };
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
    /// The stream, and what the heads give for it, before the output projection.
    fn attend(
        &self,
        tape: &Tape,
        read: Normed,
        pass: &Pass,
        cache: Option<Cached>,
    ) -> Result<(Value, Value)> {
        let (batch, seq, _) = read.stream.x.tensor().dims3()?;
        let query_width = self.heads * self.head_dim;
        let (stream, [q, k, v]) = match &self.projections {
            QueryKeyValue::Separate { q, k, v } => read.project([q, k, v], tape, pass)?,
            QueryKeyValue::Fused(qkv) => {
                let (stream, [fused]) = read.project([qkv], tape, pass)?;
                // Heads can be read where they lie, and what isn't contiguous can't be seen as heads without a copy.
                let shape = (batch, seq, self.heads + 2 * self.kv_heads, self.head_dim);
                let fused = tape.reshape(&fused, shape)?;
                let sizes = [self.heads, self.kv_heads, self.kv_heads];
                let mut parts = tape.split(&fused, &sizes, 2)?.into_iter();
                match (parts.next(), parts.next(), parts.next()) {
                    (Some(q), Some(k), Some(v)) => (stream, [q, k, tape.compact(&v)?]),
                    _ => {
                        return Err(candle_core::Error::msg("split gave fewer than 3 parts").into());
                    }
                }
            }
        };
        let q = self.heads_of(tape, &q, self.query_norm.as_ref(), self.heads, pass)?;
        let k = self.heads_of(tape, &k, self.key_norm.as_ref(), self.kv_heads, pass)?;
        let v = tape.reshape(&v, (batch, seq, self.kv_heads, self.head_dim))?;
        let seen = self.seen(tape, [&q, &k, &v], pass, cache)?;
        Ok((stream, tape.reshape(&seen, (batch, seq, query_width))?))
    }

    /// What the queries see, of q and k `(batch, seq, heads, head_dim)` before their rotation.
    fn seen(
        &self,
        tape: &Tape,
        [q, k, v]: [&Value; 3],
        pass: &Pass,
        cache: Option<Cached>,
    ) -> Result<Value> {
        let rotation = |index: usize| {
            pass.ropes.get(index).ok_or_else(|| {
                let count = pass.ropes.len();
                Error::option("rope", format!("{index} is a layer's, and the pass has {count}"))
            })
        };
        let rotation = self.rope.map(rotation).transpose()?;
        let sinks = self.sinks_of(tape, q.tensor().dtype(), pass)?;
        let options = self.options.with_sinks(sinks.as_ref().map(Value::tensor));
        let (q, k) = match (rotation, &cache) {
            (Some(Rotation { cos, sin, queries: None }), Some(Cached { pools, paging })) => {
                let [q, k, v] = [q, k, v].map(Value::tensor);
                let attended = pools.rotate_and_attend(q, [k, v], [cos, sin], paging, &options)?;
                return Ok(tape.constant(attended));
            }
            (Some(Rotation { cos, sin, queries: Some((query_cos, query_sin)) }), _) => {
                (tape.rotate(q, query_cos, query_sin)?, tape.rotate(k, cos, sin)?)
            }
            (Some(Rotation { cos, sin, queries: None }), None) => tape.rope(q, k, cos, sin)?,
            (None, _) => (q.clone(), k.clone()),
        };
        if let Some(Cached { pools, paging }) = cache {
            let rows = |x: &Value| x.tensor().squeeze(1);
            let (q, k, v) = (rows(&q)?, rows(&k)?, rows(v)?);
            return Ok(tape.constant(pools.attend(&q, [&k, &v], paging, &options)?));
        }
        let first_key = pass.first_key.as_ref();
        let Some(spread) = &pass.spread else {
            return tape.attention([&q, &k, v], first_key, sinks.as_ref(), &self.options);
        };
        let [q, k, v] = [&q, &k, v].map(|x| spread.apart(tape, x));
        let attended = tape.attention([&q?, &k?, &v?], first_key, sinks.as_ref(), &self.options)?;
        spread.together(tape, &attended)
    }

    /// The sinks of the heads, if they have any.
    fn sinks_of(&self, tape: &Tape, dtype: DType, pass: &Pass) -> Result<Option<Value>> {
        let Some(id) = self.sinks else { return Ok(None) };
        let replaces = |adapter: &Adapter| adapter.replacement(id).is_some();
        let adapter = pass.adapters.in_common(replaces).map_err(|_| {
            Error::Unsupported("sinks that differ from row to row of a batch".into())
        })?;
        let sinks = pass.weight_of(tape, id, adapter.map(|it| &**it))?;
        tape.cast(&sinks, dtype).map(Some)
    }

    /// Queries or keys, of which there are all heads in a row or each by itself, as heads, normalised.
    fn heads_of(
        &self,
        tape: &Tape,
        x: &Value,
        norm: Option<&Norm>,
        heads: usize,
        pass: &Pass,
    ) -> Result<Value> {
        let (batch, seq) = (x.tensor().dim(0)?, x.tensor().dim(1)?);
        let shape = (batch, seq, heads, self.head_dim);
        match norm {
            Some(norm) if !self.norm_per_head => {
                let rows = tape.reshape(x, (batch, seq, heads * self.head_dim))?;
                tape.reshape(&norm.forward(tape, &rows, pass)?, shape)
            }
            norm => apply(norm, tape, &tape.reshape(x, shape)?, pass),
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
    /// The stream, and what this adds to it.
    fn forward(&self, tape: &Tape, read: Normed, pass: &Pass) -> Result<(Value, Value)> {
        let (stream, [gate, up]) = match &self.projections {
            GateUp::Separate { gate, up } => {
                match read.unit([gate, up], tape, self.activation, pass)? {
                    Ok((stream, unit)) => {
                        let added = linear::forward(&self.down, tape, &unit, pass)?;
                        return Ok((stream, pass.whole(tape, added)?));
                    }
                    Err(read) => read.project([gate, up], tape, pass)?,
                }
            }
            GateUp::Fused(gate_up) => {
                let (stream, [fused]) = read.project([gate_up], tape, pass)?;
                let mut parts = tape.split(&fused, &[self.width, self.width], 2)?.into_iter();
                match (parts.next(), parts.next()) {
                    (Some(gate), Some(up)) => (stream, [gate, up]),
                    _ => {
                        return Err(candle_core::Error::msg("split gave fewer than 2 parts").into());
                    }
                }
            }
        };
        let gated = (&gate, &up);
        let added = linear::forward_gated(&self.down, tape, gated, self.activation, pass)?;
        Ok((stream, pass.whole(tape, added)?))
    }
}

impl Experts {
    /// The stream, and what this adds to it.
    fn forward(&self, tape: &Tape, read: Normed, pass: &Pass) -> Result<(Value, Value)> {
        let (stream, normed) = read.stream.normed(tape, read.norm, pass)?;
        let (batch, seq, hidden) = normed.tensor().dims3()?;
        let tokens = batch * seq;
        let logits = linear::forward_router(&self.router, tape, &normed, pass)?;
        let logits = tape.reshape(&logits, (tokens, self.router.output))?;
        let rows = tape.reshape(&normed, (tokens, hidden))?;
        let added = match linear::forward_routed_experts(self, tape, [&rows, &logits], pass)? {
            Some(added) => added,
            None => self.forward_by_host(tape, [&rows, &logits], pass)?,
        };
        let added = tape.reshape(&added, (batch, seq, hidden))?;
        Ok((stream, pass.whole(tape, added)?))
    }

    /// What the experts of `x (tokens, hidden)` add up to by their logits `(tokens, experts)`: the host chooses them, the rows
    /// of each token's are gathered, expert by expert, and added up by their weights.
    fn forward_by_host(&self, tape: &Tape, [x, logits]: [&Value; 2], pass: &Pass) -> Result<Value> {
        let Options { active, normalized, activation } = self.options;
        let (tokens, hidden) = x.tensor().dims2()?;
        let (weights, routes) = tape.route(logits, active, normalized)?;
        let Dispatch { tokens: order, places, experts } = routes.dispatch();
        let device = x.tensor().device();
        let count = order.len();
        let order = Tensor::from_vec(order, (1, count), device)?;
        let places = Tensor::from_vec(places, (tokens, active), device)?;
        let gathered = tape.rows(x, &order)?;
        let gathered = tape.reshape(&gathered, (count, hidden))?;
        let experts: Vec<_> =
            experts.iter().map(|(expert, rows)| (&self.experts[*expert], *rows)).collect();
        let outputs = linear::forward_experts(&experts, tape, &gathered, activation, pass)?;
        tape.combine(&outputs, &weights, &places)
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

/// What a part of the decoder reads.
struct Normed<'a> {
    stream: Stream,
    norm: Option<&'a Norm>,
}

impl Normed<'_> {
    /// The stream with the branch added, and what layers make of its norm.
    fn project<const N: usize>(
        self,
        layers: [&Linear; N],
        tape: &Tape,
        pass: &Pass,
    ) -> Result<(Value, [Value; N])> {
        match self {
            Self { stream: Stream { x, branch: Some(branch) }, norm: Some(norm) } => {
                linear::forward_normed(layers, tape, [x, branch], norm, pass)
            }
            Self { stream, norm } => {
                let (x, normed) = stream.normed(tape, norm, pass)?;
                Ok((x, linear::forward_shared(layers, tape, &normed, pass)?))
            }
        }
    }

    /// The stream with the branch added, and the gated unit of two layers of its norm; itself where the unit is made of
    /// their outputs, as these are wanted.
    fn unit(
        self,
        layers: [&Linear; 2],
        tape: &Tape,
        activation: Activation,
        pass: &Pass,
    ) -> Result<std::result::Result<(Value, Value), Self>> {
        match self {
            Self { stream: Stream { x, branch: Some(branch) }, norm: Some(norm) }
                if linear::make_units(tape, pass) =>
            {
                let norm = (norm, activation);
                Ok(Ok(linear::forward_normed_unit(layers, tape, [x, branch], norm, pass)?))
            }
            read => Ok(Err(read)),
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

/// Runs all layers, the last of them for the tokens that are wanted, if not all are.
pub(super) fn run_layers(
    layers: &[Arc<Layer>],
    tape: &Tape,
    x: Value,
    pass: &Arc<Pass>,
    caches: Caches,
    wanted: Option<&Wanted>,
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
                    layer.forward(tape, stream, &pass, None, None)?.joined(tape)
                });
                layers.collect()
            });
            // Only the sum is kept between two layers.
            match tape.segment(&[&stream.joined(tape)?], segment)?.pop() {
                Some(x) => Stream { x, branch: None },
                None => return Err(candle_core::Error::msg("a segment gave no output").into()),
            }
        } else {
            let wanted = wanted.filter(|_| index + 1 == count);
            layer.forward(tape, stream, &*pass.of_layer(index, count, tape)?, cache, wanted)?
        };
    }
    Ok(stream)
}
