//! The operations of the model as methods of the tape. Each calls one operation of
//! `metal-candle-kernels` forward and, when it has a node, its backward.

use super::{Tape, Value};
use crate::Result;
use candle_core::{DType, Shape, Tensor};
use metal_candle_kernels::cross_entropy::Targets;
use metal_candle_kernels::quantized::{Quantized, Weight};
use metal_candle_kernels::{
    arithmetic, attention, copy, cross_entropy, devices, dora, embedding, experts, glu,
    lora_linear, matmul, rms_norm, rope,
};
use std::sync::Arc;

/// The low-rank path of a linear layer, as values of the tape.
pub struct LoraValues<'a> {
    /// `(in, rank)`
    pub a: &'a Value,
    /// `(rank, out)`
    pub b: &'a Value,
    /// What the path is multiplied by.
    pub scale: f64,
    /// Dropout on the input of the path.
    pub dropout: Option<lora_linear::Dropout>,
}

/// The rows of an expert, and the layers that read them.
#[derive(Clone, Debug)]
pub struct ExpertValues {
    /// How many rows it has.
    pub rows: usize,
    /// A matrix `(out, in)` each, and a bias `(out)`.
    pub layers: Vec<(Matrix, Option<Value>)>,
}

/// What the backward pass needs of an expert's layer.
struct SavedLayer {
    weight: SavedMatrix,
    weight_is_trained: bool,
    bias_is_trained: bool,
}

/// Where an expert's rows begin and how many there are, and its layers.
type SavedExpert = ((usize, usize), Vec<SavedLayer>);

/// A matrix `(out, in)` that an operation reads: a value of the tape, or a frozen one in fewer bits.
#[derive(Clone, Debug)]
pub enum Matrix {
    /// As it is computed with.
    Dense(Value),
    /// In fewer bits.
    Quantized(Arc<Quantized>),
}

impl Matrix {
    /// As the kernels take it.
    pub fn as_weight(&self) -> Weight<'_> {
        match self {
            Self::Dense(value) => Weight::Dense(value.tensor()),
            Self::Quantized(quantized) => Weight::Quantized(quantized),
        }
    }

    fn needs_gradient(&self) -> bool {
        matches!(self, Self::Dense(value) if value.needs_gradient())
    }

    /// For a backward pass.
    fn save(&self) -> SavedMatrix {
        match self {
            Self::Dense(value) => SavedMatrix::Dense(value.tensor().clone()),
            Self::Quantized(quantized) => SavedMatrix::Quantized(quantized.clone()),
        }
    }
}

/// What the backward pass needs of a [`Matrix`].
enum SavedMatrix {
    Dense(Tensor),
    Quantized(Arc<Quantized>),
}

impl SavedMatrix {
    fn as_weight(&self) -> Weight<'_> {
        match self {
            Self::Dense(tensor) => Weight::Dense(tensor),
            Self::Quantized(quantized) => Weight::Quantized(quantized),
        }
    }
}

/// One of the linear layers that [`Tape::projections`] computes, as values of the tape.
pub struct ProjectionValues<'a> {
    /// `(out, in)`
    pub weight: &'a Matrix,
    /// `(out)`
    pub bias: Option<&'a Value>,
    /// The adapter, on a frozen weight.
    pub lora: Option<LoraValues<'a>>,
}

/// An RMS norm, as values of the tape.
#[derive(Clone, Copy)]
pub struct NormValues<'a> {
    /// `(hidden)`
    pub weight: &'a Value,
    /// What is added to the mean of the squares.
    pub epsilon: f64,
    /// What is added to the weight.
    pub offset: f64,
}

impl NormValues<'_> {
    fn borrow(&self) -> lora_linear::Norm<'_> {
        let Self { weight, epsilon, offset } = *self;
        lora_linear::Norm { weight: weight.tensor(), eps: epsilon, weight_offset: offset }
    }
}

/// What gives logits, as values of the tape.
#[derive(Clone, Copy)]
pub struct HeadValues<'a> {
    /// `(n, hidden)`
    pub hidden: &'a Value,
    /// `(vocabulary, hidden)`
    pub weight: &'a Value,
    /// `(n, rank)` and `(vocabulary, rank)`, whose products are added to those of a frozen weight.
    pub update: Option<(&'a Value, &'a Value)>,
}

impl HeadValues<'_> {
    fn inputs(&self) -> Vec<&Value> {
        match self.update {
            None => vec![self.hidden, self.weight],
            Some((x, left)) => vec![self.hidden, x, left],
        }
    }

    /// As one product, with an update `[x, hidden]` and `[left, weight]`.
    fn joined(&self) -> Result<JoinedHead> {
        // Rows that begin at whole 16 bytes are multiplied sooner.
        const ALIGNMENT: usize = 8;
        let (hidden, weight) = (self.hidden.tensor(), self.weight.tensor());
        let Some((x, left)) = self.update else {
            return Ok(JoinedHead {
                hidden: hidden.clone(),
                weight: weight.clone(),
                needs_dhidden: self.hidden.needs_gradient(),
                trained: if self.weight.needs_gradient() { weight.dim(1)? } else { 0 },
                update: None,
            });
        };
        if self.weight.needs_gradient() {
            return Err(candle_core::Error::msg(
                "the head has an update and is trained, expected it frozen",
            )
            .into());
        }
        let (rank, width) = (x.tensor().dim(1)?, hidden.dim(1)?);
        let padding = (rank + width).next_multiple_of(ALIGNMENT) - rank - width;
        let beside = |narrow: &Tensor, wide: &Tensor| -> Result<Tensor> {
            let mut parts = vec![copy::cast(narrow, wide.dtype())?, wide.clone()];
            // A GPU has no memory of nothing.
            if padding > 0 {
                let shape = (wide.dim(0)?, padding);
                parts.push(Tensor::zeros(shape, wide.dtype(), wide.device())?);
            }
            Ok(copy::join(&parts.iter().collect::<Vec<_>>(), 1)?)
        };
        Ok(JoinedHead {
            hidden: beside(x.tensor(), hidden)?,
            weight: beside(&left.tensor().contiguous()?, weight)?,
            needs_dhidden: self.hidden.needs_gradient() || x.needs_gradient(),
            trained: if left.needs_gradient() { rank } else { 0 },
            update: Some((rank, width, x.tensor().dtype())),
        })
    }
}

/// A cross entropy, before it is divided by the number of tokens.
#[derive(Debug)]
pub struct Loss {
    /// The sum over the target tokens, a scalar in nats.
    pub sum: Value,
    /// How many target tokens there were: rows that count.
    pub tokens: usize,
    /// Entropies and hits of the rows, where they were asked for.
    pub statistics: Option<cross_entropy::Statistics>,
}

/// A head and its update as one product.
#[derive(Clone)]
struct JoinedHead {
    hidden: Tensor,
    weight: Tensor,
    needs_dhidden: bool,
    /// Leading columns of the weight that need a gradient.
    trained: usize,
    /// The update's rank, the width of what follows it, and the dtype of its input.
    update: Option<(usize, usize, DType)>,
}

impl JoinedHead {
    fn forward(
        &self,
        targets: &Targets,
        options: &cross_entropy::Options,
        trained: usize,
    ) -> Result<cross_entropy::Output> {
        Ok(cross_entropy::forward(
            &self.hidden,
            &self.weight,
            targets,
            options,
            self.needs_dhidden,
            trained,
        )?)
    }

    /// The gradients of [`HeadValues::inputs`].
    fn split(
        &self,
        dhidden: Option<Tensor>,
        dweight: Option<Tensor>,
    ) -> Result<Vec<Option<Tensor>>> {
        let Some((rank, width, dtype)) = self.update else { return Ok(vec![dhidden, dweight]) };
        let (dhidden, dx) = match dhidden {
            None => (None, None),
            Some(dboth) => {
                let dx = dboth.narrow(1, 0, rank)?.contiguous()?;
                let dhidden = dboth.narrow(1, rank, width)?.contiguous()?;
                (Some(dhidden), Some(copy::cast(&dx, dtype)?))
            }
        };
        Ok(vec![dhidden, dx, dweight])
    }
}

/// What the backward pass needs of a projection.
struct SavedProjection {
    weight: SavedMatrix,
    bias: Option<Tensor>,
    lora: Option<SavedLora>,
}

struct SavedLora {
    a: Tensor,
    b: Tensor,
    scale: f64,
    dropout: Option<lora_linear::Dropout>,
}

impl ProjectionValues<'_> {
    /// Whether its weight or its bias is trained.
    fn is_trained(&self) -> bool {
        self.weight.needs_gradient() || self.bias.is_some_and(Value::needs_gradient)
    }
}

impl SavedLora {
    fn new(lora: &LoraValues<'_>) -> Self {
        Self {
            a: lora.a.tensor().clone(),
            b: lora.b.tensor().clone(),
            scale: lora.scale,
            dropout: lora.dropout,
        }
    }

    fn borrow(&self) -> lora_linear::Lora<'_> {
        lora_linear::Lora { a: &self.a, b: &self.b, scale: self.scale, dropout: self.dropout }
    }
}

impl SavedProjection {
    fn new(layer: &ProjectionValues<'_>) -> Self {
        let lora = layer.lora.as_ref().map(SavedLora::new);
        let bias = layer.bias.map(|bias| bias.tensor().clone());
        Self { weight: layer.weight.save(), bias, lora }
    }

    fn borrow(&self) -> lora_linear::Projection<'_> {
        let lora = self.lora.as_ref().map(SavedLora::borrow);
        lora_linear::Projection { weight: self.weight.as_weight(), bias: self.bias.as_ref(), lora }
    }
}

/// Makes the RMS norm of `x` again.
fn normed_again(
    x: &Tensor,
    weight: &Tensor,
    epsilon: f64,
    offset: f64,
) -> impl Fn() -> Result<Tensor> + 'static {
    let (x, weight) = (x.clone(), weight.clone());
    move || Ok(rms_norm::forward(&x, &weight, epsilon, offset)?)
}

/// What stands for a projection of `x (.., in)` into `width` outputs that nothing reads. It takes no memory.
fn stand_in(x: &Tensor, width: usize) -> Result<Tensor> {
    let (mut element, mut shape) = (x.clone(), x.dims().to_vec());
    for dimension in 0..x.rank() {
        element = element.narrow(dimension, 0, 1)?;
    }
    if let Some(last) = shape.last_mut() {
        *last = width;
    }
    Ok(element.broadcast_as(shape)?)
}

impl Tape {
    /// Rows of `table (vocabulary, hidden)` for `ids (batch, seq)`: `(batch, seq, hidden)`.
    pub fn embedding(&self, table: &Value, ids: &Tensor) -> Result<Value> {
        let output = embedding::forward(table.tensor(), ids)?;
        if let Some(rows) = self.push_rows(table, &output, ids)? {
            return Ok(rows);
        }
        let (ids, vocabulary) = (ids.clone(), table.tensor().dim(0)?);
        self.push(&[table], output, move |dy| {
            Ok(vec![Some(embedding::backward(&dy, &ids, vocabulary)?)])
        })
    }

    /// The rows of `x (n, d)` at the indices `rows`, in its dtype.
    pub fn rows(&self, x: &Value, rows: &Tensor) -> Result<Value> {
        let output = embedding::forward(x.tensor(), rows)?;
        let (rows, n, dtype) = (rows.clone(), x.tensor().dim(0)?, x.tensor().dtype());
        self.push(&[x], output, move |dy| {
            Ok(vec![Some(copy::cast(&embedding::backward(&dy, &rows, n)?, dtype)?)])
        })
    }

    /// RMS norm over the last dimension, times `offset + weight`.
    pub fn rms_norm(&self, x: &Value, weight: &Value, epsilon: f64, offset: f64) -> Result<Value> {
        let output = rms_norm::forward(x.tensor(), weight.tensor(), epsilon, offset)?;
        let needs = (x.needs_gradient(), weight.needs_gradient());
        let (saved_x, saved_weight) = (x.tensor().clone(), weight.tensor().clone());
        let again = normed_again(&saved_x, &saved_weight, epsilon, offset);
        let normed = self.push(&[x, weight], output, move |dy| {
            let (dx, dweight) = rms_norm::backward(
                &saved_x,
                &saved_weight,
                epsilon,
                offset,
                &dy,
                needs.0,
                needs.1,
            )?;
            Ok(vec![dx, dweight])
        })?;
        Ok(normed.with_recipe(again))
    }

    /// `x + residual` and its RMS norm over the last dimension, times `offset + weight`.
    pub fn rms_norm_residual(
        &self,
        x: &Value,
        residual: &Value,
        weight: &Value,
        epsilon: f64,
        offset: f64,
    ) -> Result<(Value, Value)> {
        let (sum, normed) = rms_norm::forward_residual(
            x.tensor(),
            residual.tensor(),
            weight.tensor(),
            epsilon,
            offset,
        )?;
        let needs_dx = x.needs_gradient() || residual.needs_gradient();
        let needs_dweight = weight.needs_gradient();
        let (saved_sum, saved_weight) = (sum.clone(), weight.tensor().clone());
        let again = normed_again(&saved_sum, &saved_weight, epsilon, offset);
        let inputs = [x, residual, weight];
        let mut outputs = self.push_many(&inputs, vec![sum, normed], move |gradients| {
            let mut gradients = gradients.into_iter();
            let (dsum, dy) = (gradients.next().flatten(), gradients.next().flatten());
            let (dx, dweight) = match dy {
                Some(dy) if needs_dx => {
                    let (dx, dweight) = rms_norm::backward_residual(
                        &saved_sum,
                        &saved_weight,
                        epsilon,
                        offset,
                        &dy,
                        dsum.as_ref(),
                        needs_dweight,
                    )?;
                    (Some(dx), dweight)
                }
                Some(dy) => rms_norm::backward(
                    &saved_sum,
                    &saved_weight,
                    epsilon,
                    offset,
                    &dy,
                    false,
                    needs_dweight,
                )?,
                None => (dsum, None),
            };
            Ok(vec![dx.clone(), dx, dweight])
        })?;
        let normed = outputs.pop();
        match (outputs.pop(), normed) {
            (Some(sum), Some(normed)) => Ok((sum, normed.with_recipe(again))),
            _ => Err(candle_core::Error::msg("rms_norm_residual gave fewer than 2 values").into()),
        }
    }

    /// `x · weightᵀ + bias`, with `weight (out, in)`.
    pub fn linear(&self, x: &Value, weight: &Value, bias: Option<&Value>) -> Result<Value> {
        let output = matmul::linear(x.tensor(), weight.tensor(), bias.map(Value::tensor))?;
        let mut inputs = vec![x, weight];
        inputs.extend(bias);
        let needs: Vec<bool> = inputs.iter().map(|value| value.needs_gradient()).collect();
        // What a gradient will not need is not kept alive.
        let saved_x = needs[1].then(|| x.tensor().clone());
        let saved_weight = needs[0].then(|| weight.tensor().clone());
        self.push(&inputs, output, move |dy| {
            let dx = saved_weight.map(|w| matmul::linear_backward_input(&dy, &w)).transpose()?;
            let dweight = saved_x.map(|x| matmul::linear_backward_weight(&x, &dy)).transpose()?;
            let mut gradients = vec![dx, dweight];
            if let Some(&needed) = needs.get(2) {
                gradients.push(needed.then(|| matmul::linear_backward_bias(&dy)).transpose()?);
            }
            Ok(gradients)
        })
    }

    /// Several linear layers of the same `x (.., in)`, which is read once for all:
    /// `x · weightᵀ + bias`, and where there is an adapter `+ scale · (dropout(x) · a) · b` on a frozen
    /// `weight` and `bias`.
    pub fn projections(&self, x: &Value, layers: &[ProjectionValues<'_>]) -> Result<Vec<Value>> {
        let (number, skip) = self.skippable(&[]);
        let outputs = if layers.iter().any(ProjectionValues::is_trained) {
            let mut outputs = Vec::with_capacity(layers.len());
            for layer in layers {
                outputs.extend(match (&layer.lora, layer.is_trained()) {
                    (None, _) => vec![match (layer.weight, layer.bias) {
                        (Matrix::Dense(weight), bias) => self.linear(x, weight, bias)?,
                        (weight @ Matrix::Quantized(_), bias) => {
                            let frozen = ProjectionValues { weight, bias: None, lora: None };
                            let output = self.projection_of(x, &frozen)?;
                            match bias {
                                Some(bias) => self.add_bias(&output, bias)?,
                                None => output,
                            }
                        }
                    }],
                    (Some(_), false) => {
                        self.frozen_projections(x, std::slice::from_ref(layer), false)?
                    }
                    (Some(_), true) => {
                        return Err(candle_core::Error::msg(
                            "a linear layer with an adapter has a weight or bias that is trained, \
                             expected both frozen",
                        )
                        .into());
                    }
                });
            }
            outputs
        } else {
            self.frozen_projections(x, layers, skip)?
        };
        Ok(outputs.into_iter().map(|output| output.numbered(number)).collect())
    }

    /// [`Self::projections`] with frozen weights; with `skip` their values aren't computed, as nothing reads
    /// them.
    fn frozen_projections(
        &self,
        x: &Value,
        layers: &[ProjectionValues<'_>],
        skip: bool,
    ) -> Result<Vec<Value>> {
        let mut inputs = vec![x];
        for lora in layers.iter().filter_map(|layer| layer.lora.as_ref()) {
            inputs.extend([lora.a, lora.b]);
        }
        let projections: Vec<_> = layers.iter().map(SavedProjection::new).collect();
        let borrowed: Vec<_> = projections.iter().map(SavedProjection::borrow).collect();
        let (outputs, xas): (Vec<_>, Vec<_>) = if skip {
            let xas = lora_linear::forward_again(x.tensor(), &borrowed)?;
            let outputs =
                borrowed.iter().map(|layer| stand_in(x.tensor(), layer.weight.shape()?.0));
            (outputs.collect::<Result<_>>()?, xas)
        } else if inputs.iter().any(|input| input.needs_gradient()) {
            let outputs = lora_linear::forward_shared(x.tensor(), &borrowed)?;
            outputs.into_iter().map(|output| (output.y, output.xa)).unzip()
        } else {
            (lora_linear::forward_only(x.tensor(), &borrowed)?, Vec::new())
        };
        let (needs_dx, saved_x) = (x.needs_gradient(), self.save(x));
        self.push_many(&inputs, outputs, move |dys| {
            // An output that nothing used adds nothing to any gradient.
            let used = || dys.iter().map(Option::is_some);
            let mut borrowed = Vec::with_capacity(dys.len());
            let mut saved_xas = Vec::with_capacity(dys.len());
            for ((projection, xa), used) in projections.iter().zip(&xas).zip(used()) {
                if used {
                    borrowed.push(projection.borrow());
                    saved_xas.push(xa.as_ref());
                }
            }
            let incoming: Vec<_> = dys.iter().flatten().collect();
            let x = saved_x.tensor()?;
            let found =
                lora_linear::backward_shared(&x, &borrowed, &saved_xas, &incoming, needs_dx)?;
            let mut adapters = found.adapters.into_iter();
            let mut gradients = vec![found.dx];
            for (projection, used) in projections.iter().zip(used()) {
                let adapter = match used {
                    true => adapters.next().ok_or_else(|| {
                        candle_core::Error::msg("a projection got no gradient of its adapter")
                    })?,
                    false => None,
                };
                if projection.lora.is_some() {
                    let (da, db) = adapter.unzip();
                    gradients.extend([da, db]);
                }
            }
            Ok(gradients)
        })
    }

    /// Rotates the heads of `queries (batch, seq, heads, head_dim)` and of
    /// `keys (batch, seq, kv_heads, head_dim)` by the angles whose `cos` and `sin` are
    /// `(batch, seq, rotated / 2)`.
    pub fn rope(
        &self,
        queries: &Value,
        keys: &Value,
        cos: &Tensor,
        sin: &Tensor,
    ) -> Result<(Value, Value)> {
        let rotated = rope::forward_both(queries.tensor(), keys.tensor(), cos, sin)?;
        Ok((self.rotated(queries, rotated.0, cos, sin)?, self.rotated(keys, rotated.1, cos, sin)?))
    }

    /// [`Self::rope`] of queries or keys alone.
    pub fn rotate(&self, x: &Value, cos: &Tensor, sin: &Tensor) -> Result<Value> {
        self.rotated(x, rope::forward(x.tensor(), cos, sin)?, cos, sin)
    }

    fn rotated(&self, x: &Value, output: Tensor, cos: &Tensor, sin: &Tensor) -> Result<Value> {
        let (cos, sin) = (cos.clone(), sin.clone());
        self.push(&[x], output, move |dy| Ok(vec![Some(rope::backward(&dy, &cos, &sin)?)]))
    }

    /// Causal attention of `q (batch, seq, heads, head_dim)` over `k` and `v`
    /// `(batch, keys, kv_heads, head_dim)`, with `sinks (heads)` in the place of those of the options.
    pub fn attention(
        &self,
        [q, k, v]: [&Value; 3],
        first_key: Option<&Tensor>,
        sinks: Option<&Value>,
        options: &attention::Options,
    ) -> Result<Value> {
        let options = options.with_sinks(sinks.map(Value::tensor));
        let [output, log_sum_exp] = self.keep(|| {
            let (output, log_sum_exp) =
                attention::forward(q.tensor(), k.tensor(), v.tensor(), first_key, &options)?;
            Ok([output, log_sum_exp])
        })?;
        let stored = self.store(&[q, k, v])?;
        let (first_key, saved_output) = (first_key.cloned(), output.clone());
        let trained = sinks.filter(|sinks| sinks.needs_gradient());
        let inputs: Vec<&Value> = [q, k, v].into_iter().chain(trained).collect();
        let are_trained = trained.is_some();
        self.push(&inputs, output, move |dy| {
            let [q, k, v] = stored.array()?;
            let (dq, dk, dv) = attention::backward(
                &q,
                &k,
                &v,
                &saved_output,
                &log_sum_exp,
                first_key.as_ref(),
                &options,
                &dy,
            )?;
            let mut gradients = vec![Some(dq), Some(dk), Some(dv)];
            if let (true, Some(sinks)) = (are_trained, &options.sinks) {
                let dsinks = attention::backward_sinks(sinks, &saved_output, &log_sum_exp, &dy)?;
                gradients.push(Some(copy::cast(&dsinks, sinks.dtype())?));
            }
            Ok(gradients)
        })
    }

    /// `activation(gate) · up`.
    pub fn glu(&self, gate: &Value, up: &Value, activation: glu::Activation) -> Result<Value> {
        let output = glu::forward(gate.tensor(), up.tensor(), activation)?;
        let (stored_gate, saved_up) = (self.store(&[gate])?, up.tensor().clone());
        let needs = (gate.needs_gradient(), up.needs_gradient());
        let (again_gate, again_up) = (stored_gate.clone(), saved_up.clone());
        let gated = self.push(&[gate, up], output, move |dy| {
            let [gate] = stored_gate.array()?;
            let (dgate, dup) = glu::backward(&gate, &saved_up, activation, &dy, needs.0, needs.1)?;
            Ok(vec![dgate, dup])
        })?;
        Ok(gated.with_recipe(move || {
            let [gate] = again_gate.array()?;
            Ok(glu::forward(&gate, &again_up, activation)?)
        }))
    }

    /// The projection `layer` of `activation(gate) · up`, as [`Self::glu`] and [`Self::projections`] give it.
    /// On a GPU both have one backward pass, in which the unit is made again.
    pub fn gated_projection(
        &self,
        gate: &Value,
        up: &Value,
        activation: glu::Activation,
        layer: &ProjectionValues<'_>,
    ) -> Result<Value> {
        let again = gate.needs_gradient()
            && up.needs_gradient()
            && devices::computes_on_gpu(gate.tensor())
            && !self.is_replaying();
        let lora = layer.lora.as_ref().filter(|lora| lora.dropout.is_none());
        let Some(lora) = lora.filter(|_| again && !layer.is_trained()) else {
            return self.projection_of(&self.glu(gate, up, activation)?, layer);
        };
        let unit = glu::forward(gate.tensor(), up.tensor(), activation)?;
        let saved = SavedProjection::new(layer);
        let output = lora_linear::forward_shared(&unit, &[saved.borrow()])?.pop();
        let Some(lora_linear::Output { y, xa: Some(xa) }) = output else {
            return Err(candle_core::Error::msg("a layer with an adapter gave no xa").into());
        };
        let (stored_gate, saved_up) = (self.store(&[gate])?, up.tensor().clone());
        let (weight, saved_lora) = (layer.weight.save(), SavedLora::new(lora));
        self.push(&[gate, up, lora.a, lora.b], y, move |dy| {
            let [gate] = stored_gate.array()?;
            let found = lora_linear::backward_gated(
                &gate,
                &saved_up,
                activation,
                weight.as_weight(),
                &xa,
                &saved_lora.borrow(),
                &dy,
            )?;
            Ok(vec![Some(found.dgate), Some(found.dup), Some(found.da), Some(found.db)])
        })
    }

    /// `x + residual`, and the projections `layers` of its norm, as [`Self::rms_norm_residual`] and
    /// [`Self::projections`] give them. Where no backward pass follows they are one operation.
    pub fn normed_projections(
        &self,
        [x, residual]: [Value; 2],
        norm: NormValues<'_>,
        layers: &[ProjectionValues<'_>],
    ) -> Result<(Value, Vec<Value>)> {
        let NormValues { weight, epsilon, offset } = norm;
        if !self.computes_once() {
            let (sum, normed) = self.rms_norm_residual(&x, &residual, weight, epsilon, offset)?;
            // Their memory may be that of the outputs.
            drop((x, residual));
            return Ok((sum, self.projections(&normed, layers)?));
        }
        let saved: Vec<_> = layers.iter().map(SavedProjection::new).collect();
        let borrowed: Vec<_> = saved.iter().map(SavedProjection::borrow).collect();
        let (x, residual) = (x.tensor(), residual.tensor());
        let (sum, outputs) = lora_linear::forward_normed(x, residual, &norm.borrow(), &borrowed)?;
        let outputs = outputs.into_iter().map(|output| self.constant(output));
        Ok((self.constant(sum), outputs.collect()))
    }

    /// `x + residual`, and the gated unit `activation(gate)·up` of two projections of its norm, as
    /// [`Self::normed_projections`] and [`Self::glu`] give them. Where no backward pass follows they are one operation.
    pub fn normed_unit(
        &self,
        [x, residual]: [Value; 2],
        norm: NormValues<'_>,
        [gate, up]: [ProjectionValues<'_>; 2],
        activation: glu::Activation,
    ) -> Result<(Value, Value)> {
        if !self.computes_once() {
            let (sum, outputs) = self.normed_projections([x, residual], norm, &[gate, up])?;
            return match &outputs[..] {
                [gate, up] => Ok((sum, self.glu(gate, up, activation)?)),
                _ => Err(candle_core::Error::msg("2 projections gave more or fewer").into()),
            };
        }
        let saved = [&gate, &up].map(SavedProjection::new);
        let both = saved.each_ref().map(SavedProjection::borrow);
        let (x, residual, norm) = (x.tensor(), residual.tensor(), norm.borrow());
        let (sum, unit) = lora_linear::forward_normed_unit(x, residual, &norm, both, activation)?;
        Ok((self.constant(sum), self.constant(unit)))
    }

    fn projection_of(&self, x: &Value, layer: &ProjectionValues<'_>) -> Result<Value> {
        match self.projections(x, std::slice::from_ref(layer))?.pop() {
            Some(output) => Ok(output),
            None => Err(candle_core::Error::msg("a projection gave no output").into()),
        }
    }

    /// The cross entropy of the logits that `head` gives for the targets of `n` rows, summed over the rows that count.
    /// The gradients are made in the forward pass, chunk by chunk, so that the logits of a whole batch never exist.
    pub fn cross_entropy(
        &self,
        head: &HeadValues<'_>,
        targets: &Targets,
        options: &cross_entropy::Options,
    ) -> Result<Loss> {
        let joined = head.joined()?;
        let output = joined.forward(targets, options, joined.trained)?;
        let (dhidden, dweight) = (output.dhidden, output.dweight);
        let sum = self.push(&head.inputs(), output.loss, move |dy| {
            // Never read: on a GPU that would wait for the forward pass.
            let scaled = |gradient: Option<Tensor>| {
                gradient.map(|gradient| arithmetic::scale_by(&gradient, &dy)).transpose()
            };
            joined.split(scaled(dhidden)?, scaled(dweight)?)
        })?;
        Ok(Loss { sum, tokens: output.count, statistics: output.statistics })
    }

    /// The cross entropy of each row by itself, `(n)`, 0 where the target doesn't count: the negative log-probability
    /// of the target, for losses that are functions of these. The logits are made once for both directions, but twice
    /// where the head is trained, whose gradient is a sum over rows with weights that only the backward pass knows.
    pub fn token_losses(
        &self,
        head: &HeadValues<'_>,
        targets: &[u32],
        options: &cross_entropy::Options,
    ) -> Result<(Value, Option<cross_entropy::Statistics>)> {
        let joined = head.joined()?;
        let output = joined.forward(&Targets::new(targets), options, 0)?;
        let dhidden = output.dhidden;
        let (targets, options) = (targets.to_vec(), *options);
        let losses = self.push(&head.inputs(), output.losses, move |dy| {
            let dweight = match joined.trained {
                0 => None,
                trained => {
                    let weights = dy.to_dtype(DType::F32)?.to_vec1::<f32>()?;
                    let joined = JoinedHead { needs_dhidden: false, ..joined.clone() };
                    let targets = Targets { weights: Some(&weights), ..Targets::new(&targets) };
                    joined.forward(&targets, &options, trained)?.dweight
                }
            };
            let dhidden = dhidden.map(|dhidden| arithmetic::scale_rows(&dhidden, &dy));
            joined.split(dhidden.transpose()?, dweight)
        })?;
        Ok((losses, output.statistics))
    }

    /// `x + y`, of the same shape.
    pub fn add(&self, x: &Value, y: &Value) -> Result<Value> {
        let (number, skip) = self.skippable(&[x, y]);
        let output =
            if skip { x.tensor().clone() } else { arithmetic::add(x.tensor(), y.tensor())? };
        let sum = self.push_sum(&[x, y], output, |dy| Ok(vec![Some(dy.clone()), Some(dy)]))?;
        Ok(sum.numbered(number))
    }

    /// `y ⊙ m / norms + bias`, the columns of `y (.., out)` multiplied, with norms that are constants: what DoRA
    /// makes of a linear layer without its bias. `m`, `norms` and `factor = m / norms` are `(out)` in f32.
    pub fn scale_columns(
        &self,
        y: &Value,
        m: &Value,
        (norms, factor): (&Tensor, &Tensor),
        bias: Option<&Value>,
    ) -> Result<Value> {
        let output = dora::scale_columns(y.tensor(), factor, bias.map(Value::tensor))?;
        let mut inputs = vec![y, m];
        inputs.extend(bias);
        let needs: Vec<bool> = inputs.iter().map(|value| value.needs_gradient()).collect();
        // dm = Σ dz·y / norms, or Σ dz·z / m of the result z, which the operations that read it mostly keep anyway.
        let (saved, divisor) = match bias {
            Some(_) => (y.tensor().clone(), norms.clone()),
            None => (output.clone(), m.tensor().clone()),
        };
        let (factor, keeps_output) = (factor.clone(), bias.is_none());
        let scaled = self.push(&inputs, output, move |dz| {
            let needs_dbias = needs.get(2).copied().unwrap_or(false);
            let found = dora::scale_columns_backward(&saved, &factor, &dz, needs_dbias)?;
            let dm = needs[1].then(|| found.dfactor / divisor).transpose()?;
            let mut gradients = vec![Some(found.dy), dm];
            if needs.len() > 2 {
                gradients.push(found.dbias);
            }
            Ok(gradients)
        })?;
        Ok(scaled.kept(keeps_output))
    }

    /// `y + bias`, with `bias (out)` added to the columns of `y (.., out)`.
    pub fn add_bias(&self, y: &Value, bias: &Value) -> Result<Value> {
        let output = y.tensor().broadcast_add(bias.tensor())?;
        let needs = bias.needs_gradient();
        self.push(&[y, bias], output, move |dy| {
            let dbias = needs.then(|| matmul::linear_backward_bias(&dy)).transpose()?;
            Ok(vec![Some(dy), dbias])
        })
    }

    /// `x` and a constant, one after the other along `dimension`.
    pub fn join(&self, x: &Value, constant: &Tensor, dimension: usize) -> Result<Value> {
        let output = copy::join(&[x.tensor(), constant], dimension)?;
        let length = x.tensor().dim(dimension)?;
        self.push(&[x], output, move |dy| Ok(vec![Some(dy.narrow(dimension, 0, length)?)]))
    }

    /// The transpose of a matrix, as a view.
    pub fn transpose(&self, x: &Value) -> Result<Value> {
        self.push(&[x], x.tensor().t()?, |dy| Ok(vec![Some(dy.t()?)]))
    }

    /// Inverted dropout.
    pub fn dropout(&self, x: &Value, dropout: lora_linear::Dropout) -> Result<Value> {
        let output = lora_linear::dropout(x.tensor(), dropout)?;
        self.push(&[x], output, move |dy| Ok(vec![Some(lora_linear::dropout(&dy, dropout)?)]))
    }

    /// `factor · x`.
    pub fn scale(&self, x: &Value, factor: f64) -> Result<Value> {
        let output = arithmetic::scale(x.tensor(), factor)?;
        self.push(&[x], output, move |dy| Ok(vec![Some(arithmetic::scale(&dy, factor)?)]))
    }

    /// The same elements in another shape.
    pub fn reshape(&self, x: &Value, shape: impl Into<Shape>) -> Result<Value> {
        let shape = shape.into();
        if *x.shape() == shape {
            return Ok(x.clone());
        }
        let output = x.tensor().reshape(shape)?;
        let original = x.shape().clone();
        let reshaped = self.push(&[x], output, move |dy| Ok(vec![Some(dy.reshape(original)?)]))?;
        Ok(reshaped.kept(x.is_kept()))
    }

    /// The same numbers in another dtype; the gradient comes back in the original one.
    pub fn cast(&self, x: &Value, dtype: DType) -> Result<Value> {
        let original = x.tensor().dtype();
        if original == dtype {
            return Ok(x.clone());
        }
        let output = copy::cast(x.tensor(), dtype)?;
        self.push(&[x], output, move |dy| Ok(vec![Some(copy::cast(&dy, original)?)]))
    }

    /// [`Self::cast`] of a matrix; one in fewer bits is as it is.
    pub fn cast_matrix(&self, matrix: &Matrix, dtype: DType) -> Result<Matrix> {
        Ok(match matrix {
            Matrix::Dense(value) => Matrix::Dense(self.cast(value, dtype)?),
            Matrix::Quantized(quantized) => Matrix::Quantized(quantized.clone()),
        })
    }

    /// Cuts dimension `dim` into pieces of the given sizes, which are views.
    pub fn split(&self, x: &Value, sizes: &[usize], dim: usize) -> Result<Vec<Value>> {
        let mut outputs = Vec::with_capacity(sizes.len());
        let mut start = 0;
        for &size in sizes {
            outputs.push(x.tensor().narrow(dim, start, size)?);
            start += size;
        }
        let whole = x.shape().clone();
        let (dtype, device) = (x.tensor().dtype(), x.tensor().device().clone());
        let sizes = sizes.to_vec();
        self.push_many(&[x], outputs, move |gradients| {
            let mut dims = whole.dims().to_vec();
            let mut pieces = Vec::with_capacity(sizes.len());
            for (gradient, size) in gradients.into_iter().zip(sizes) {
                pieces.push(match gradient {
                    Some(gradient) => gradient,
                    None => {
                        dims[dim] = size;
                        Tensor::zeros(dims.as_slice(), dtype, &device)?
                    }
                });
            }
            Ok(vec![Some(copy::join(&pieces.iter().collect::<Vec<_>>(), dim)?)])
        })
    }

    /// The experts of each token by `logits (tokens, experts)`, and their weights `(tokens, active)` in f32.
    pub fn route(
        &self,
        logits: &Value,
        active: usize,
        normalized: bool,
    ) -> Result<(Value, Arc<experts::Routes>)> {
        let tensor = logits.tensor();
        let routes = Arc::new(experts::Routes::new(tensor, active, normalized)?);
        let (dtype, device) = (tensor.dtype(), tensor.device());
        let (weights, saved) = (routes.weights(dtype, device)?, routes.clone());
        let weights = self.push(&[logits], weights, move |dweights| {
            Ok(vec![Some(copy::cast(&saved.backward(&dweights)?, dtype)?)])
        })?;
        Ok((weights, routes))
    }

    /// `x (rows, in)` whose rows are those of the experts in their order, through each of an expert's layers: a value
    /// `(rows, out)` for each.
    pub fn grouped(&self, x: &Value, experts: &[ExpertValues]) -> Result<Vec<Value>> {
        let borrowed = experts.iter().map(|expert| experts::grouped::Expert {
            rows: expert.rows,
            layers: expert
                .layers
                .iter()
                .map(|(weight, bias)| experts::grouped::Layer {
                    weight: weight.as_weight(),
                    bias: bias.as_ref().map(Value::tensor),
                })
                .collect(),
        });
        let outputs = experts::grouped::forward(x.tensor(), &borrowed.collect::<Vec<_>>())?;
        let layers = || experts.iter().flat_map(|expert| &expert.layers);
        let trained = layers().flat_map(|(weight, bias)| {
            let weight = match weight {
                Matrix::Dense(value) => Some(value),
                Matrix::Quantized(_) => None,
            };
            [weight, bias.as_ref()].into_iter().flatten().filter(|value| value.needs_gradient())
        });
        let inputs: Vec<&Value> = [x].into_iter().chain(trained).collect();
        let needs_dx = x.needs_gradient();
        let saved_x =
            layers().any(|(weight, _)| weight.needs_gradient()).then(|| x.tensor().clone());
        let mut start = 0;
        let saved: Vec<SavedExpert> = experts
            .iter()
            .map(|ExpertValues { rows, layers }| {
                let place = (start, *rows);
                start += rows;
                let layers = layers.iter().map(|(weight, bias)| SavedLayer {
                    weight: weight.save(),
                    weight_is_trained: weight.needs_gradient(),
                    bias_is_trained: bias.as_ref().is_some_and(Value::needs_gradient),
                });
                (place, layers.collect())
            })
            .collect();
        self.push_many(&inputs, outputs, move |dys| {
            let mut gradients = vec![None];
            if needs_dx && dys.iter().any(Option::is_some) {
                let experts = saved.iter().map(|((_, rows), layers)| experts::grouped::Expert {
                    rows: *rows,
                    layers: layers.iter().map(|layer| layer.weight.as_weight().into()).collect(),
                });
                let dys: Vec<_> = dys.iter().map(Option::as_ref).collect();
                let experts: Vec<_> = experts.collect();
                gradients[0] = Some(experts::grouped::backward_input(&dys, &experts)?);
            }
            for ((start, rows), layers) in &saved {
                for (layer, dy) in layers.iter().zip(&dys) {
                    let dy = dy.as_ref().map(|dy| dy.narrow(0, *start, *rows)).transpose()?;
                    if layer.weight_is_trained {
                        gradients.push(match (&saved_x, &dy) {
                            (Some(x), Some(dy)) => {
                                let x = x.narrow(0, *start, *rows)?;
                                Some(matmul::linear_backward_weight(&x, dy)?)
                            }
                            _ => None,
                        });
                    }
                    if layer.bias_is_trained {
                        let dbias = dy.as_ref().map(matmul::linear_backward_bias).transpose()?;
                        gradients.push(dbias);
                    }
                }
            }
            Ok(gradients)
        })
    }

    /// The sums `(tokens, d)` of the rows of `y (rows, d)` at `places (tokens, active)`, each row one token's, times
    /// `weights (tokens, active)`.
    pub fn combine(&self, y: &Value, weights: &Value, places: &Tensor) -> Result<Value> {
        let output = experts::combine(y.tensor(), weights.tensor(), places)?;
        let saved = (y.tensor().clone(), weights.tensor().clone(), places.clone());
        self.push(&[y, weights], output, move |dout| {
            let (y, weights, places) = saved;
            let gradients = experts::combine_backward(&y, &weights, &places, &dout)?;
            Ok(vec![Some(gradients.dy), Some(gradients.dweights)])
        })
    }

    /// `x` in memory of its own, where it is a view of something larger that would be kept for it; itself where nothing is
    /// kept, as it needs no gradient.
    pub fn compact(&self, x: &Value) -> Result<Value> {
        if !x.needs_gradient() || x.tensor().is_contiguous() {
            return Ok(x.clone());
        }
        self.push(&[x], copy::contiguous(x.tensor())?, |dy| Ok(vec![Some(dy)]))
    }
}
