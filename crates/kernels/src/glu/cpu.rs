//! The gated unit on the CPU: a task is a block of rows.

use super::{Activation, CLAMPED_LIMIT, CLAMPED_SLOPE};
use crate::backend::cpu::{
    Disjoint, Element, Real, StridedRows, for_each_chunk, for_each_index, rows_per_task,
    write_through,
};

#[inline(always)]
fn sigmoid<A: Real>(x: A) -> A {
    A::ONE / (A::ONE + (-x).exp())
}

/// The activation and its derivative.
#[inline(always)]
fn silu<A: Real>(x: A) -> (A, A) {
    let s = sigmoid(x);
    (x * s, s * (A::ONE + x * (A::ONE - s)))
}

#[inline(always)]
fn gelu<A: Real>(x: A) -> (A, A) {
    let (cumulative, density) = x.normal();
    (x * cumulative, cumulative + x * density)
}

/// With `(1 + tanh u) / 2 = σ(2u)`.
#[inline(always)]
fn gelu_tanh<A: Real>(x: A) -> (A, A) {
    let cubic = A::from_f64(0.044715);
    let factor = A::from_f64(std::f64::consts::FRAC_2_SQRT_PI * std::f64::consts::SQRT_2);
    let square = x * x;
    let s = sigmoid(factor * (x + cubic * square * x));
    let slope = factor * (A::ONE + A::from_f64(3.0) * cubic * square);
    (x * s, s + x * s * (A::ONE - s) * slope)
}

#[inline(always)]
fn clamped<A: Real>(x: A) -> (A, A) {
    let (limit, factor) = (A::from_f64(CLAMPED_LIMIT), A::from_f64(CLAMPED_SLOPE));
    let is_beyond = x > limit;
    let x = if is_beyond { limit } else { x };
    let s = sigmoid(factor * x);
    (x * s, if is_beyond { A::ZERO } else { s * (A::ONE + factor * x * (A::ONE - s)) })
}

/// The value and its derivative.
#[inline(always)]
fn as_it_is<A: Real>(up: A) -> (A, A) {
    (up, A::ONE)
}

/// What stands in the place of a value beside [`clamped`], and its derivative.
#[inline(always)]
fn clamped_value<A: Real>(up: A) -> (A, A) {
    let limit = A::from_f64(CLAMPED_LIMIT);
    if up > limit {
        (limit + A::ONE, A::ZERO)
    } else if up < -limit {
        (A::ONE - limit, A::ZERO)
    } else {
        (up + A::ONE, A::ONE)
    }
}

/// Calls `$body` with what gates and values go through as functions of their own types, so that they are inlined.
macro_rules! with_functions {
    ($activation:expr, $functions:ident => $body:expr) => {
        match $activation {
            Activation::Silu => {
                let $functions = (silu, as_it_is);
                $body
            }
            Activation::Gelu => {
                let $functions = (gelu, as_it_is);
                $body
            }
            Activation::GeluTanh => {
                let $functions = (gelu_tanh, as_it_is);
                $body
            }
            Activation::Clamped => {
                let $functions = (clamped, clamped_value);
                $body
            }
        }
    };
}

/// A value and its derivative.
trait Function<A>: Fn(A) -> (A, A) + Sync {}
impl<A, F: Fn(A) -> (A, A) + Sync> Function<A> for F {}

pub(super) fn forward<T: Element>(
    activation: Activation,
    gate: StridedRows<T>,
    up: StridedRows<T>,
    out: &mut [T],
) {
    with_functions!(activation, functions => forward_with(functions, gate, up, out))
}

fn forward_with<T: Element>(
    (of_gate, of_up): (impl Function<T::Acc>, impl Function<T::Acc>),
    gate: StridedRows<T>,
    up: StridedRows<T>,
    out: &mut [T],
) {
    let columns = gate.columns.max(1);
    let block = rows_per_task(columns);
    for_each_chunk(
        out,
        block * columns,
        #[inline(always)]
        |index, out| {
            let mut scratch = [const { Vec::new() }; 3];
            let [gate_scratch, up_scratch, out_scratch] = &mut scratch;
            for (offset, out) in out.chunks_exact_mut(columns).enumerate() {
                let gate = gate.row(index * block + offset, gate_scratch);
                let up = up.row(index * block + offset, up_scratch);
                write_through(
                    out,
                    out_scratch,
                    #[inline(always)]
                    |out| {
                        for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
                            *out = of_gate(*gate).0 * of_up(*up).0;
                        }
                    },
                );
            }
        },
    );
}

pub(super) fn backward<T: Element>(
    activation: Activation,
    gate: StridedRows<T>,
    up: StridedRows<T>,
    d_out: StridedRows<T>,
    rows: usize,
    dgate: Option<&mut [T]>,
    dup: Option<&mut [T]>,
) {
    let inputs = [gate, up, d_out];
    with_functions!(activation, functions => backward_with(functions, inputs, rows, dgate, dup))
}

fn backward_with<T: Element>(
    (of_gate, of_up): (impl Function<T::Acc>, impl Function<T::Acc>),
    [gate, up, d_out]: [StridedRows<T>; 3],
    rows: usize,
    dgate: Option<&mut [T]>,
    dup: Option<&mut [T]>,
) {
    let columns = gate.columns;
    let block = rows_per_task(columns);
    let (dgate, dup) = (dgate.map(Disjoint::new), dup.map(Disjoint::new));
    for_each_index(
        rows.div_ceil(block),
        true,
        #[inline(always)]
        |index| {
            let mut scratch = [const { Vec::new() }; 5];
            let [gate_scratch, up_scratch, d_scratch, dgate_scratch, dup_scratch] = &mut scratch;
            for row in index * block..rows.min((index + 1) * block) {
                let gate = gate.row(row, gate_scratch);
                let up = up.row(row, up_scratch);
                let d = d_out.row(row, d_scratch);
                let place = row * columns..(row + 1) * columns;
                // SAFETY: every task has rows of its own.
                let dgate = dgate.as_ref().map(|all| unsafe { all.slice(place.clone()) });
                // SAFETY: as above.
                let dup = dup.as_ref().map(|all| unsafe { all.slice(place) });
                match (dgate, dup) {
                    (Some(dgate), Some(dup)) => write_through(
                        dgate,
                        dgate_scratch,
                        #[inline(always)]
                        |dgate| {
                            write_through(
                                dup,
                                dup_scratch,
                                #[inline(always)]
                                |dup| {
                                    let inputs = gate.iter().zip(up).zip(d);
                                    let outputs = dgate.iter_mut().zip(dup);
                                    for (((gate, up), d), (dgate, dup)) in inputs.zip(outputs) {
                                        let (value, slope) = of_gate(*gate);
                                        let (by, slope_of_up) = of_up(*up);
                                        *dgate = *d * by * slope;
                                        *dup = *d * value * slope_of_up;
                                    }
                                },
                            );
                        },
                    ),
                    (Some(dgate), None) => write_through(
                        dgate,
                        dgate_scratch,
                        #[inline(always)]
                        |dgate| {
                            for (((dgate, gate), up), d) in
                                dgate.iter_mut().zip(gate).zip(up).zip(d)
                            {
                                *dgate = *d * of_up(*up).0 * of_gate(*gate).1;
                            }
                        },
                    ),
                    (None, Some(dup)) => write_through(
                        dup,
                        dup_scratch,
                        #[inline(always)]
                        |dup| {
                            for (((dup, gate), up), d) in dup.iter_mut().zip(gate).zip(up).zip(d) {
                                *dup = *d * of_gate(*gate).0 * of_up(*up).1;
                            }
                        },
                    ),
                    (None, None) => {}
                }
            }
        },
    );
}
