//! Products of a few rows with a matrix: one pass over the matrix, bound by memory. They are long and have many callers,
//! so they are compiled once for all, and choose the instruction set themselves.

use crate::backend::cpu::{Real, Values};
use crate::quantized::cpu as quantized;
pub(crate) use metal_candle_cpu::few_rows::{FEW_ROWS, sum_lanes};
use metal_candle_cpu::simd::{prefetch, vectorize};
use std::ops::Range;

/// Lines that pieces are asked for ahead: as long as memory takes.
const AHEAD: usize = 16;

/// Bytes of such pieces at most.
const PIECE: usize = 1024;

/// Partial sums of a dot product.
const LANES: usize = 32;

/// Runs `$body` with `$slice` the stored numbers of `$values` and `$widen` their conversion.
macro_rules! with_stored {
    ($values:expr, $real:ident, ($slice:ident, $widen:ident) => $body:expr) => {
        match $values {
            Values::Native($slice) => {
                let $widen = $real::itself;
                $body
            }
            Values::F32($slice) => {
                let $widen = $real::from_f32;
                $body
            }
            Values::Bf16($slice) => {
                let $widen = $real::from_bf16;
                $body
            }
            Values::F16($slice) => {
                let $widen = $real::from_f16;
                $body
            }
            Values::Quantized(_) => unreachable!("has loops of its own"),
        }
    };
}

/// `out[row][line] = Σ_k x[row][k]·matrix[line][k]` for some lines of a matrix whose lines start
/// `stride` apart: `x` `(rows, depth)`, `out` `(rows, lines.len())`. Those of a matrix in fewer bits are multiplied by
/// [`quantized::Rows`].
#[inline(never)]
pub(crate) fn dots<A: Real>(
    rows: usize,
    depth: usize,
    x: &[A],
    matrix: Values<A>,
    stride: usize,
    lines: Range<usize>,
    out: &mut [A],
) {
    vectorize(
        #[inline(always)]
        || {
            with_stored!(matrix, A, (matrix, widen) => {
                let first = lines.start;
                let line = |index: usize| &matrix[(first + index) * stride..][..depth];
                for row in 0..rows {
                    let x = &x[row * depth..][..depth];
                    let out = &mut out[row * lines.len()..][..lines.len()];
                    let mut fours = out.chunks_exact_mut(4);
                    let mut index = 0;
                    for out in &mut fours {
                        let lines =
                            [line(index), line(index + 1), line(index + 2), line(index + 3)];
                        let ahead = matrix.as_ptr().wrapping_add((first + index + 4) * stride);
                        out.copy_from_slice(&dot_lines(lines, x, ahead, widen));
                        index += 4;
                    }
                    for out in fours.into_remainder() {
                        let ahead = matrix.as_ptr().wrapping_add((first + index + 1) * stride);
                        *out = dot_lines([line(index)], x, ahead, widen)[0];
                        index += 1;
                    }
                }
            });
        },
    );
}

/// Bytes of the lines that are read together up to which the next ones are asked for ahead. They lie
/// next to each other, but what the processor sees is several short streams, which it does not
/// foresee; of longer ones it does.
const SHORT: usize = 16 * 1024;

/// The dot products of some lines with `x`, each in an order given by the length alone. As many
/// numbers from `ahead` on will be read next.
#[inline(always)]
fn dot_lines<A: Real, S: Copy, const N: usize>(
    lines: [&[S]; N],
    x: &[A],
    ahead: *const S,
    widen: impl Fn(S) -> A + Copy,
) -> [A; N] {
    let whole = x.len() / LANES * LANES;
    let lines = lines.map(|line| &line[..x.len()]);
    let mut sums = [[A::ZERO; LANES]; N];
    let short = N * x.len() * size_of::<S>() <= SHORT;
    for start in (0..whole).step_by(LANES) {
        if short {
            for line in (0..N * LANES).step_by((64 / size_of::<S>()).max(1)) {
                prefetch(ahead.wrapping_add(N * start + line));
            }
        }
        let x = &x[start..start + LANES];
        for (sums, line) in sums.iter_mut().zip(&lines) {
            let line = &line[start..start + LANES];
            for lane in 0..LANES {
                sums[lane] += x[lane] * widen(line[lane]);
            }
        }
    }
    let mut out = [A::ZERO; N];
    for ((out, sums), line) in out.iter_mut().zip(sums).zip(&lines) {
        let mut tail = A::ZERO;
        for (x, line) in x[whole..].iter().zip(&line[whole..]) {
            tail += *x * widen(*line);
        }
        *out = sum_lanes(sums) + tail;
    }
    out
}

/// `out[row][column] += Σ_k x[row][k]·matrix[k][column]` for some columns of a matrix `width` wide:
/// the rows of `x` `(rows, depth)` start `x_stride` apart; `out` is `(rows, columns.len())`.
#[inline(never)]
#[allow(clippy::too_many_arguments)]
pub(crate) fn add_combinations<A: Real>(
    rows: usize,
    depth: usize,
    x_stride: usize,
    x: &[A],
    matrix: Values<A>,
    width: usize,
    columns: Range<usize>,
    out: &mut [A],
) {
    vectorize(
        #[inline(always)]
        || {
            if let Values::Quantized(matrix) = matrix {
                return quantized::add_combinations(
                    x, x_stride, depth, matrix, width, columns, out,
                );
            }
            with_stored!(matrix, A, (matrix, widen) => {
                for row in 0..rows {
                    let x = &x[row * x_stride..][..depth];
                    let out = &mut out[row * columns.len()..][..columns.len()];
                    let line =
                        |k: usize| &matrix[k * width + columns.start..k * width + columns.end];
                    match columns.len() {
                        4 => add_lines_fixed::<A, _, 4>(x, line, widen, out),
                        8 => add_lines_fixed::<A, _, 8>(x, line, widen, out),
                        16 => add_lines_fixed::<A, _, 16>(x, line, widen, out),
                        32 => add_lines_fixed::<A, _, 32>(x, line, widen, out),
                        64 => add_lines_fixed::<A, _, 64>(x, line, widen, out),
                        128 => add_lines_fixed::<A, _, 128>(x, line, widen, out),
                        _ => add_lines(x, line, widen, out),
                    }
                }
            });
        },
    );
}

#[inline(always)]
fn add_lines_fixed<'a, A: Real, S: Copy + 'a, const N: usize>(
    x: &[A],
    line: impl Fn(usize) -> &'a [S],
    widen: impl Fn(S) -> A + Copy,
    out: &mut [A],
) {
    let mut sums = [A::ZERO; N];
    add_lines(x, |k| &line(k)[..N], widen, &mut sums);
    for (out, sum) in out.iter_mut().zip(&sums) {
        *out += *sum;
    }
}

#[inline(always)]
fn add_lines<'a, A: Real, S: Copy + 'a>(
    x: &[A],
    line: impl Fn(usize) -> &'a [S],
    widen: impl Fn(S) -> A + Copy,
    out: &mut [A],
) {
    let whole = x.len() / 4 * 4;
    for k in (0..whole).step_by(4) {
        let (a, b, c, d) = (line(k), line(k + 1), line(k + 2), line(k + 3));
        // Pieces of lines that are far apart: nothing the processor foresees.
        let ahead = if size_of_val(a) <= PIECE { k + AHEAD..k + AHEAD + 4 } else { 0..0 };
        for ahead in ahead.start..ahead.end.min(x.len()) {
            for piece in line(ahead).chunks((64 / size_of::<S>()).max(1)) {
                prefetch(piece.as_ptr());
            }
        }
        let lines = a.iter().zip(b).zip(c).zip(d);
        for (out, (((a, b), c), d)) in out.iter_mut().zip(lines) {
            let first = x[k] * widen(*a) + x[k + 1] * widen(*b);
            let second = x[k + 2] * widen(*c) + x[k + 3] * widen(*d);
            *out += first + second;
        }
    }
    for (k, x) in x.iter().enumerate().skip(whole) {
        for (out, a) in out.iter_mut().zip(line(k)) {
            *out += *x * widen(*a);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_size_gives_the_exact_product() {
        for (rows, depth, width) in [(1, 0, 3), (1, 1, 1), (2, 33, 5), (3, 70, 8), (4, 128, 130)] {
            let number = |i: usize| ((i * 31 + 7) % 13) as f64 - 6.0;
            let x: Vec<f64> = (0..rows * depth).map(number).collect();
            let matrix: Vec<f64> = (0..depth * width).map(|i| number(i + 3)).collect();
            let mut by_lines = vec![f64::NAN; rows * width];
            dots(rows, depth, &x, Values::Native(&matrix), depth, 0..width, &mut by_lines);
            let mut by_columns = vec![1.0; rows * width];
            let values = Values::Native(&matrix[..]);
            add_combinations(rows, depth, depth, &x, values, width, 0..width, &mut by_columns);
            for row in 0..rows {
                for column in 0..width {
                    let x = &x[row * depth..][..depth];
                    let line: f64 = (0..depth).map(|k| x[k] * matrix[column * depth + k]).sum();
                    assert_eq!(by_lines[row * width + column], line);
                    let across: f64 = (0..depth).map(|k| x[k] * matrix[k * width + column]).sum();
                    assert_eq!(by_columns[row * width + column], 1.0 + across);
                }
            }
        }
    }
}
