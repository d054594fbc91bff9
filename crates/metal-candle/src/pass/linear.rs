//! Linear layers with the adapters of a batch's rows.

use super::Pass;
use super::adapters::{Groups, RowAdapters};
use crate::adapter::{Adapter, Lengths, LowRank};
use crate::autograd::{LoraValues, ProjectionValues, Tape, Value};
use crate::model::layer::Linear;
use crate::model::weight::FrozenWeights;
use crate::random::SplitMix64;
use crate::{Error, Result};
use metal_candle_kernels::glu::Activation;
use metal_candle_kernels::lora_linear::Dropout;

/// What several layers read.
#[derive(Clone, Copy)]
enum Read<'a> {
    /// x `(.., in)`
    Value(&'a Value),
    /// `activation(gate)·up`
    Gated(&'a Value, &'a Value, Activation),
}

/// One layer.
pub(super) fn forward(layer: &Linear, tape: &Tape, x: &Value, pass: &Pass) -> Result<Value> {
    let [output] = forward_shared([layer], tape, x, pass)?;
    Ok(output)
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
            let read = Read::Gated(gate, up, activation);
            only(project(&[layer], tape, read, pass, adapter.as_deref())?)
        }
        _ => forward(layer, tape, &tape.glu(gate, up, activation)?, pass),
    }
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
        RowAdapters::Same(adapter) => {
            project(&layers, tape, Read::Value(x), pass, adapter.as_deref())?
        }
        adapters => {
            // The frozen weights are read once for all rows.
            let outputs = project(&layers, tape, Read::Value(x), pass, None)?;
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
            Ok(only(project(&[layer], tape, Read::Value(&x), pass, Some(adapter))?)?.into_tensor())
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

/// The layers with one adapter, or none.
fn project(
    layers: &[&Linear],
    tape: &Tape,
    read: Read<'_>,
    pass: &Pass,
    adapter: Option<&Adapter>,
) -> Result<Vec<Value>> {
    let dtype = match read {
        Read::Value(x) | Read::Gated(x, ..) => x.tensor().dtype(),
    };
    let values = layers.iter().map(|layer| {
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
        Ok((weight, bias, update, bias_after))
    });
    let values = values.collect::<Result<Vec<_>>>()?;
    let projections: Vec<_> = values
        .iter()
        .map(|(weight, bias, update, _)| ProjectionValues {
            weight,
            bias: bias.as_ref(),
            lora: update.as_ref().map(|update| LoraValues {
                a: &update.a,
                b: &update.b,
                scale: update.update.scale,
                dropout: update.dropout(tape),
            }),
        })
        .collect();
    let outputs = match (read, projections.as_slice()) {
        (Read::Value(x), layers) => tape.projections(x, layers)?,
        (Read::Gated(gate, up, activation), [layer]) => {
            vec![tape.gated_projection(gate, up, activation, layer)?]
        }
        (Read::Gated(gate, up, activation), layers) => {
            tape.projections(&tape.glu(gate, up, activation)?, layers)?
        }
    };
    let outputs = outputs.into_iter().zip(&values).map(|(output, (_, _, update, bias))| {
        match (update.as_ref().and_then(|update| update.lengths.as_ref()), bias) {
            (Some((m, Lengths { norms, factor })), bias) => {
                tape.scale_columns(&output, m, (norms, factor), bias.as_ref())
            }
            (None, Some(bias)) => tape.add_bias(&output, bias),
            (None, None) => Ok(output),
        }
    });
    outputs.collect()
}
