//! A step of Adafactor on Metal, see `kernel.metal`.

use super::{Buffers, Update};
use crate::backend::metal::{Argument, Metal, size};
use candle_core::{DType, Result};

/// Threadgroups that go over all elements at most: as many pairs of sums are added up by each.
const PARTS: usize = 256;
/// Elements that a threadgroup goes over at least.
const SHARE: usize = 2048;

pub(super) fn step(buffers: &Buffers, update: &Update) -> Result<()> {
    let Buffers { params, grads, row_means, column_means, rows, columns } = *buffers;
    let metal = Metal::of(params)?;
    let (params, grads) = (metal.strided(params)?, metal.strided(grads)?);
    let (row_means, column_means) = (metal.strided(row_means)?, metal.strided(column_means)?);
    let count = rows * columns;
    let parts = count.div_ceil(SHARE).min(PARTS);
    let (mean, partial) = (metal.empty(1, DType::F32)?, metal.empty(2 * parts, DType::F32)?);
    let constants = update.constants();
    let means = |means, count: usize, stride: usize, distance: usize| {
        [
            Argument::Input(&grads),
            Argument::Output(means),
            Argument::F32s(&constants),
            Argument::U64(count as u64),
            Argument::U64(stride as u64),
            Argument::U64(distance as u64),
        ]
    };
    let of_rows = means(&row_means, columns, 1, columns);
    let of_columns = means(&column_means, rows, columns, 1);
    let of_means =
        [Argument::Input(&row_means), Argument::Output(&mean), Argument::U64(rows as u64)];
    let measured = [
        Argument::Input(&params),
        Argument::Input(&grads),
        Argument::Input(&row_means),
        Argument::Input(&column_means),
        Argument::Input(&mean),
        Argument::Output(&partial),
        Argument::F32s(&constants),
        Argument::U64(count as u64),
        Argument::U64(columns as u64),
        Argument::U32(size("adafactor::step", parts)?),
    ];
    let mut updated = measured;
    updated[0] = Argument::Output(&params);
    updated[1] = Argument::Output(&grads);
    updated[5] = Argument::Input(&partial);
    metal.run(&[
        metal.by_row("adafactor_means", rows, columns, &of_rows)?,
        metal.by_row("adafactor_means", columns, rows, &of_columns)?,
        metal.by_row("adafactor_mean", 1, rows, &of_means)?,
        metal.by_row("adafactor_measure", parts, SHARE, &measured)?,
        metal.by_row("adafactor_update", parts, SHARE, &updated)?,
    ])
}
