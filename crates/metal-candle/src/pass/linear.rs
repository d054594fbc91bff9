//! Linear layers with the adapters of a batch's rows.

use super::Pass;
use super::adapters::{Groups, RowAdapters};
use crate::Result;
use crate::adapter::{Adapter, LowRank};
use crate::autograd::{LoraValues, ProjectionValues, Tape, Value};
use crate::model::layer::Linear;
use crate::random::SplitMix64;
use candle_core::{DType, Tensor};
use metal_candle_kernels::glu::Activation;
use metal_candle_kernels::lora_linear::Dropout;
use metal_candle_kernels::{arithmetic, copy, matmul};

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
    match &pass.adapters {
        RowAdapters::Same(adapter) => {
            let dtype = gate.tensor().dtype();
            with_values(&[layer], tape, dtype, pass, adapter.as_deref(), |layers| {
                tape.gated_projection(gate, up, activation, &layers[0])
            })
        }
        RowAdapters::Grouped(_) => forward(layer, tape, &tape.glu(gate, up, activation)?, pass),
    }
}

/// Several layers that read the same `x (batch, seq, in)`, which is read once for all.
pub(super) fn forward_shared<const N: usize>(
    layers: [&Linear; N],
    tape: &Tape,
    x: &Value,
    pass: &Pass,
) -> Result<[Value; N]> {
    let forward = |adapter: Option<&Adapter>| {
        with_values(&layers, tape, x.tensor().dtype(), pass, adapter, |values| {
            tape.projections(x, values)
        })
    };
    let mut outputs = match &pass.adapters {
        RowAdapters::Same(adapter) => forward(adapter.as_deref())?,
        // The frozen weights are read once for all rows.
        RowAdapters::Grouped(_) => forward(None)?,
    };
    if let RowAdapters::Grouped(groups) = &pass.adapters {
        for (layer, output) in layers.iter().zip(&mut outputs) {
            let adapted = adapt(layer, groups, tape, x.tensor(), output.tensor(), pass)?;
            if let Some(adapted) = adapted {
                *output = tape.constant(adapted);
            }
        }
    }
    outputs.try_into().map_err(|outputs: Vec<Value>| {
        let found = outputs.len();
        candle_core::Error::msg(format!("{N} projections gave {found} outputs")).into()
    })
}

/// What the adapters of the rows make of the output `y` that the frozen weights have given for `x`; `None`
/// where none of them adapts the layer.
fn adapt(
    layer: &Linear,
    groups: &Groups,
    tape: &Tape,
    x: &Tensor,
    y: &Tensor,
    pass: &Pass,
) -> Result<Option<Tensor>> {
    let replaces = |adapter: &Adapter| {
        [Some(layer.weight), layer.bias]
            .into_iter()
            .flatten()
            .any(|id| adapter.replacement(id).is_some())
    };
    if !groups.adapters().any(|adapter| adapter.update(layer).is_some() || replaces(adapter)) {
        return Ok(None);
    }
    let adapted = groups.map([x, y], |adapter, [x, y]| {
        let Some(adapter) = adapter else { return Ok(y) };
        if replaces(adapter) {
            let x = tape.constant(x);
            let dtype = x.tensor().dtype();
            let outputs = with_values(&[layer], tape, dtype, pass, Some(adapter), |values| {
                tape.projections(&x, values)
            })?;
            return outputs
                .into_iter()
                .next()
                .map(Value::into_tensor)
                .ok_or_else(|| candle_core::Error::msg("a projection gave no output").into());
        }
        match adapter.update(layer) {
            Some(update) => add_update(&x, &y, update),
            None => Ok(y),
        }
    })?;
    Ok(Some(adapted))
}

/// `y + scale · (x·A)·B`, summed in f32.
fn add_update(x: &Tensor, y: &Tensor, update: &LowRank) -> Result<Tensor> {
    let columns = |matrix: &Tensor| matrix.t()?.contiguous();
    let xa = matmul::linear(&copy::cast(x, DType::F32)?, &columns(update.a.tensor())?, None)?;
    let change = matmul::linear(&xa, &columns(update.b.tensor())?, None)?;
    let change = arithmetic::scale(&change, update.scale)?;
    let sum = arithmetic::add(&copy::cast(y, DType::F32)?, &change)?;
    Ok(copy::cast(&sum, y.dtype())?)
}

/// What `forward` makes of the layers as values of a tape, for activations of `dtype`.
fn with_values<R>(
    layers: &[&Linear],
    tape: &Tape,
    dtype: DType,
    pass: &Pass,
    adapter: Option<&Adapter>,
    forward: impl FnOnce(&[ProjectionValues<'_>]) -> Result<R>,
) -> Result<R> {
    let values = layers.iter().map(|layer| {
        let weight_as = |id| tape.cast(&pass.weight_of(tape, id, adapter)?, dtype);
        let weight = weight_as(layer.weight)?;
        let bias = layer.bias.map(weight_as).transpose()?;
        let update = adapter
            .and_then(|adapter| adapter.update(layer))
            .map(|update| (update, tape.parameter(&update.a), tape.parameter(&update.b)));
        Ok((weight, bias, update))
    });
    let values = values.collect::<Result<Vec<_>>>()?;
    let projections: Vec<_> = values
        .iter()
        .map(|(weight, bias, update)| {
            let lora = update.as_ref().map(|(update, a, b)| {
                let seed = tape.dropout_seed().filter(|_| update.dropout > 0.0);
                let dropout = seed.map(|seed| Dropout {
                    probability: update.dropout,
                    seed: SplitMix64::stream(seed, update.stream).next_u64(),
                });
                LoraValues { a, b, scale: update.scale, dropout }
            });
            ProjectionValues { weight, bias: bias.as_ref(), lora }
        })
        .collect();
    forward(&projections)
}
