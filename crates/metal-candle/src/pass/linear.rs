//! Linear layers with the adapters of a batch's rows.

use super::Pass;
use super::adapters::{Groups, RowAdapters};
use crate::adapter::{Adapter, Lengths, LowRank};
use crate::autograd::{ExpertValues, LoraValues, Matrix, ProjectionValues, Tape, Value};
use crate::model::layer::{Expert, Experts, Linear, Norm};
use crate::model::weight::FrozenWeights;
use crate::random::SplitMix64;
use crate::{Error, Result};
use candle_core::DType;
use metal_candle_kernels::batch_invariance;
use metal_candle_kernels::experts::routed;
use metal_candle_kernels::glu::Activation;
use metal_candle_kernels::lora_linear::Dropout;
use std::sync::{Arc, PoisonError};

/// One layer.
pub(super) fn forward(layer: &Linear, tape: &Tape, x: &Value, pass: &Pass) -> Result<Value> {
    let [output] = forward_shared([layer], tape, x, pass)?;
    Ok(output)
}

/// The logits of a layer's experts.
pub(super) fn forward_router(
    router: &Linear,
    tape: &Tape,
    x: &Value,
    pass: &Pass,
) -> Result<Value> {
    pass.with_adapters(tape, router.weight, x, |x, adapter| {
        only(of_value(&[router], tape, x, pass, adapter)?)
    })
}

impl Expert {
    /// Whether an adapter has another weight in the place of one of its own. None has an update for it.
    fn is_replaced(&self, adapter: &Adapter) -> bool {
        let replaces = |id| adapter.replacement(id).is_some();
        self.layers().iter().any(|it| replaces(it.weight) || it.bias.is_some_and(replaces))
    }
}

/// What experts make of their rows `x (rows, hidden)`, one expert's after the other's: which experts, and how many rows each.
pub(super) fn forward_experts(
    experts: &[(&Expert, usize)],
    tape: &Tape,
    x: &Value,
    activation: Activation,
    pass: &Pass,
) -> Result<Value> {
    let replaces = |adapter: &Adapter| experts.iter().any(|(it, _)| it.is_replaced(adapter));
    let adapter = pass.adapters.in_common(replaces).map_err(|_| {
        Error::Unsupported("experts whose weights differ from row to row of a batch".into())
    })?;
    let (adapter, dtype) = (adapter.map(|it| &**it), x.tensor().dtype());
    let values = |layer: &Linear| -> Result<_> {
        let weight = tape.cast_matrix(&pass.matrix_of(tape, layer.weight, adapter)?, dtype)?;
        let bias = |id| tape.cast(&pass.weight_of(tape, id, adapter)?, dtype);
        Ok((weight, layer.bias.map(bias).transpose()?))
    };
    let (mut into, mut back) = (Vec::new(), Vec::new());
    for (expert, rows) in experts {
        let [gate, up, down] = expert.layers().map(values);
        into.push(ExpertValues { rows: *rows, layers: vec![gate?, up?] });
        back.push(ExpertValues { rows: *rows, layers: vec![down?] });
    }
    let [gate, up] = as_many(tape.grouped(x, &into)?)?;
    only(tape.grouped(&tape.glu(&gate, &up, activation)?, &back)?)
}

/// What the experts of each token add up to, where the device alone chooses them: `x (tokens, hidden)` and their logits
/// `(tokens, experts)`. `None` where that isn't computed so.
pub(super) fn forward_routed_experts(
    experts: &Experts,
    tape: &Tape,
    [x, logits]: [&Value; 2],
    pass: &Pass,
) -> Result<Option<Value>> {
    let (x, logits) = (x.tensor(), logits.tensor());
    let replaces = |adapter: &Adapter| experts.experts.iter().any(|it| it.is_replaced(adapter));
    let is_possible = x.device().is_cuda()
        && tape.computes_once()
        && !batch_invariance::is_on()
        && match pass.adapters.in_common(replaces) {
            Ok(adapter) => !adapter.is_some_and(|adapter| replaces(adapter)),
            Err(_) => false,
        };
    if !is_possible {
        return Ok(None);
    }
    let held: Option<Vec<_>> =
        experts.experts.iter().map(|expert| expert.held(&pass.weights)).collect();
    let Some(held) = held else { return Ok(None) };
    let known = || experts.routed.lock().unwrap_or_else(PoisonError::into_inner);
    let layer = known().as_ref().filter(|layer| layer.has(&held, x.dtype())).cloned();
    let layer = match layer {
        Some(layer) => layer,
        None => {
            let Some(layer) = routed::Layer::new(&held, x.dtype())? else { return Ok(None) };
            known().insert(Arc::new(layer)).clone()
        }
    };
    if x.dim(0)? > layer.most_tokens() {
        return Ok(None);
    }
    Ok(Some(tape.constant(layer.forward(x, logits, experts.options)?)))
}

/// One layer, of `activation(gate)·up`.
pub(super) fn forward_gated(
    layer: &Linear,
    tape: &Tape,
    (gate, up): (&Value, &Value),
    activation: Activation,
    pass: &Pass,
) -> Result<Value> {
    match (&pass.adapters, &pass.observer) {
        (RowAdapters::Same(adapter), None) => {
            let dtype = gate.tensor().dtype();
            let values = LayerValues::new(layer, tape, dtype, pass, adapter.as_deref())?;
            let output = tape.gated_projection(gate, up, activation, &values.projection(tape))?;
            values.finish(tape, output)
        }
        _ => forward(layer, tape, &tape.glu(gate, up, activation)?, pass),
    }
}

/// `x + branch`, and several layers that read its norm.
pub(super) fn forward_normed<const N: usize>(
    layers: [&Linear; N],
    tape: &Tape,
    [x, branch]: [Value; 2],
    norm: &Norm,
    pass: &Pass,
) -> Result<(Value, [Value; N])> {
    match (&pass.adapters, &pass.observer) {
        (RowAdapters::Same(adapter), None) => {
            let (adapter, dtype) = (adapter.as_deref(), x.tensor().dtype());
            let weight = norm.weight_of(tape, pass, adapter, dtype)?;
            let values = values_of(&layers, tape, dtype, pass, adapter)?;
            let projections = projections_of(&values, tape);
            let norm = norm.values(&weight);
            let (sum, outputs) = tape.normed_projections([x, branch], norm, &projections)?;
            Ok((sum, as_many(finished(&values, tape, outputs)?)?))
        }
        _ => {
            let (sum, normed) = norm.forward_residual(tape, &x, &branch, pass)?;
            Ok((sum, forward_shared(layers, tape, &normed, pass)?))
        }
    }
}

/// Whether a gated unit may be one operation with the layers whose outputs it is made of: nothing is recorded, and all
/// rows have one adapter, or none.
pub(super) fn make_units(tape: &Tape, pass: &Pass) -> bool {
    let is_same = matches!(pass.adapters, RowAdapters::Same(_));
    tape.computes_once() && is_same && pass.observer.is_none()
}

/// `x + branch`, and the gated unit of two layers of its norm, in a pass that [`make_units`] said yes to.
pub(super) fn forward_normed_unit(
    [gate, up]: [&Linear; 2],
    tape: &Tape,
    both: [Value; 2],
    (norm, activation): (&Norm, Activation),
    pass: &Pass,
) -> Result<(Value, Value)> {
    let adapter = match &pass.adapters {
        RowAdapters::Same(adapter) => adapter.as_deref(),
        _ => None,
    };
    let dtype = both[0].tensor().dtype();
    let weight = norm.weight_of(tape, pass, adapter, dtype)?;
    let gate = LayerValues::new(gate, tape, dtype, pass, adapter)?;
    let up = LayerValues::new(up, tape, dtype, pass, adapter)?;
    let norm = norm.values(&weight);
    let projections = [gate.projection(tape), up.projection(tape)];
    if gate.is_a_product() && up.is_a_product() {
        return tape.normed_unit(both, norm, projections, activation);
    }
    let (sum, outputs) = tape.normed_projections(both, norm, &projections)?;
    let [of_gate, of_up] = as_many(outputs)?;
    let (gate, up) = (gate.finish(tape, of_gate)?, up.finish(tape, of_up)?);
    Ok((sum, tape.glu(&gate, &up, activation)?))
}

/// Several layers that read the same `x (batch, seq, in)`, which is read once for all.
pub(super) fn forward_shared<const N: usize>(
    layers: [&Linear; N],
    tape: &Tape,
    x: &Value,
    pass: &Pass,
) -> Result<[Value; N]> {
    if let Some(observer) = &pass.observer {
        observer.see(&layers, x.tensor())?;
    }
    let outputs = match &pass.adapters {
        RowAdapters::Same(adapter) => of_value(&layers, tape, x, pass, adapter.as_deref())?,
        adapters => {
            // The frozen weights are read once for all rows.
            let outputs = of_value(&layers, tape, x, pass, None)?;
            if let Some(updates) = &pass.updates {
                updates.add(&layers, x.tensor(), &outputs)?;
            }
            let with_rows_apart = |(layer, output): (&&Linear, Value)| match adapters
                .in_common(|adapter| adapter.is_apart(layer))
            {
                Ok(_) => Ok(output),
                Err(groups) => with_rows_apart(layer, groups, tape, x, output, pass),
            };
            layers.iter().zip(outputs).map(with_rows_apart).collect::<Result<_>>()?
        }
    };
    as_many(outputs)
}

fn as_many<const N: usize>(outputs: Vec<Value>) -> Result<[Value; N]> {
    outputs.try_into().map_err(|outputs: Vec<Value>| {
        let found = outputs.len();
        candle_core::Error::msg(format!("{N} projections gave {found} outputs")).into()
    })
}

fn only(mut outputs: Vec<Value>) -> Result<Value> {
    match (outputs.pop(), outputs.len()) {
        (Some(output), 0) => Ok(output),
        _ => Err(candle_core::Error::msg("a projection gave more or less than one output").into()),
    }
}

/// The output of a layer with the rows of those adapters whose part in it is more than an update: they are computed by
/// themselves, frozen weights and all.
fn with_rows_apart(
    layer: &Linear,
    groups: &Groups,
    tape: &Tape,
    x: &Value,
    output: Value,
    pass: &Pass,
) -> Result<Value> {
    let rows = groups.map([x.tensor(), output.tensor()], |adapter, [x, y]| match adapter {
        Some(adapter) if adapter.is_apart(layer) => {
            let x = tape.constant(x);
            Ok(only(of_value(&[layer], tape, &x, pass, Some(adapter))?)?.into_tensor())
        }
        _ => Ok(y),
    })?;
    Ok(tape.constant(rows))
}

/// The update of a layer as values of a tape, as [`LowRank::effective`] gives it.
struct UpdateValues<'a> {
    update: &'a LowRank,
    a: Value,
    b: Value,
    /// The lengths of DoRA's rows.
    lengths: Option<(Value, Lengths)>,
}

impl<'a> UpdateValues<'a> {
    fn new(
        tape: &Tape,
        layer: &Linear,
        update: &'a LowRank,
        adapter: &Adapter,
        weights: &FrozenWeights,
    ) -> Result<Self> {
        let (mut a, mut b) = (tape.parameter(&update.a), tape.parameter(&update.b));
        if let Some(start) = &update.start {
            (a, b) = (tape.join(&a, &start.a, 1)?, tape.join(&b, &start.minus_b, 0)?);
        }
        let lengths = update.magnitude.as_ref().map(|magnitude| {
            let lengths = magnitude.lengths(adapter.parameters().generation(), || {
                let weight = weights.dense(layer.weight)?;
                magnitude.norms(&weight, a.tensor(), b.tensor(), update.scale)
            });
            Ok::<_, Error>((tape.parameter(&magnitude.parameter), lengths?))
        });
        Ok(Self { lengths: lengths.transpose()?, update, a, b })
    }

    fn dropout(&self, tape: &Tape) -> Option<Dropout> {
        dropout(tape, self.update.dropout, self.update.stream)
    }
}

/// The dropout of an adapter's input in training; `stream` sets it apart from that of others.
pub(super) fn dropout(tape: &Tape, probability: f32, stream: u64) -> Option<Dropout> {
    let seed = tape.dropout_seed().filter(|_| probability > 0.0)?;
    let seed = SplitMix64::stream(seed, stream).next_u64();
    Some(Dropout { probability, seed })
}

/// The layers of `x`, with one adapter, or none.
fn of_value(
    layers: &[&Linear],
    tape: &Tape,
    x: &Value,
    pass: &Pass,
    adapter: Option<&Adapter>,
) -> Result<Vec<Value>> {
    let values = values_of(layers, tape, x.tensor().dtype(), pass, adapter)?;
    let outputs = tape.projections(x, &projections_of(&values, tape))?;
    finished(&values, tape, outputs)
}

/// A layer with one adapter, or none, as values of a tape.
struct LayerValues<'a> {
    weight: Matrix,
    bias: Option<Value>,
    update: Option<UpdateValues<'a>>,
    /// What is added to the output afterwards.
    bias_after: Option<Value>,
}

impl<'a> LayerValues<'a> {
    fn new(
        layer: &Linear,
        tape: &Tape,
        dtype: DType,
        pass: &Pass,
        adapter: Option<&'a Adapter>,
    ) -> Result<Self> {
        let weight = tape.cast_matrix(&pass.matrix_of(tape, layer.weight, adapter)?, dtype)?;
        let bias = layer
            .bias
            .map(|id| tape.cast(&pass.weight_of(tape, id, adapter)?, dtype))
            .transpose()?;
        let update = match adapter.and_then(|it| Some((it, it.update(layer)?))) {
            Some((adapter, update)) => {
                Some(UpdateValues::new(tape, layer, update, adapter, &pass.weights)?)
            }
            None => None,
        };
        // A bias that is trained, or comes after the lengths, is added to what the product with an update gives.
        let (mut bias, mut bias_after) = (bias, None);
        if update.as_ref().is_some_and(|update| update.lengths.is_some())
            || (update.is_some() && bias.as_ref().is_some_and(Value::needs_gradient))
        {
            bias_after = bias.take();
        }
        Ok(Self { weight, bias, update, bias_after })
    }

    /// Its product.
    fn projection(&self, tape: &Tape) -> ProjectionValues<'_> {
        ProjectionValues {
            weight: &self.weight,
            bias: self.bias.as_ref(),
            lora: self.update.as_ref().map(|update| LoraValues {
                a: &update.a,
                b: &update.b,
                scale: update.update.scale,
                dropout: update.dropout(tape),
            }),
        }
    }

    /// Whether its output is what the product gives.
    fn is_a_product(&self) -> bool {
        let has_lengths = self.update.as_ref().is_some_and(|update| update.lengths.is_some());
        !has_lengths && self.bias_after.is_none()
    }

    /// Its output, of what the product gives.
    fn finish(&self, tape: &Tape, output: Value) -> Result<Value> {
        match (self.update.as_ref().and_then(|update| update.lengths.as_ref()), &self.bias_after) {
            (Some((m, Lengths { norms, factor })), bias) => {
                tape.scale_columns(&output, m, (norms, factor), bias.as_ref())
            }
            (None, Some(bias)) => tape.add_bias(&output, bias),
            (None, None) => Ok(output),
        }
    }
}

fn values_of<'a>(
    layers: &[&Linear],
    tape: &Tape,
    dtype: DType,
    pass: &Pass,
    adapter: Option<&'a Adapter>,
) -> Result<Vec<LayerValues<'a>>> {
    layers.iter().map(|layer| LayerValues::new(layer, tape, dtype, pass, adapter)).collect()
}

fn projections_of<'v>(values: &'v [LayerValues<'_>], tape: &Tape) -> Vec<ProjectionValues<'v>> {
    values.iter().map(|values| values.projection(tape)).collect()
}

fn finished(values: &[LayerValues<'_>], tape: &Tape, outputs: Vec<Value>) -> Result<Vec<Value>> {
    values.iter().zip(outputs).map(|(values, output)| values.finish(tape, output)).collect()
}
