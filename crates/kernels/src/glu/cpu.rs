//! The gated unit on the CPU: a task is a block of rows.

use super::Activation;
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

/// Calls `$body` with the activation as a function of its own type, so that it is inlined.
macro_rules! with_function {
    ($activation:expr, $function:ident => $body:expr) => {
        match $activation {
            Activation::Silu => {
                let $function = silu;
                $body
            }
            Activation::Gelu => {
                let $function = gelu;
                $body
            }
            Activation::GeluTanh => {
                let $function = gelu_tanh;
                $body
            }
        }
    };
}

pub(super) fn forward<T: Element>(
    activation: Activation,
    gate: StridedRows<T>,
    up: StridedRows<T>,
    out: &mut [T],
) {
    with_function!(activation, function => forward_with(function, gate, up, out))
}

fn forward_with<T: Element>(
    function: impl Fn(T::Acc) -> (T::Acc, T::Acc) + Sync,
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
                            *out = function(*gate).0 * *up;
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
    with_function!(activation, function => backward_with(function, inputs, rows, dgate, dup))
}

fn backward_with<T: Element>(
    function: impl Fn(T::Acc) -> (T::Acc, T::Acc) + Sync,
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
                                        let (value, slope) = function(*gate);
                                        *dgate = *d * *up * slope;
                                        *dup = *d * value;
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
                                *dgate = *d * *up * function(*gate).1;
                            }
                        },
                    ),
                    (None, Some(dup)) => write_through(
                        dup,
                        dup_scratch,
                        #[inline(always)]
                        |dup| {
                            for ((dup, gate), d) in dup.iter_mut().zip(gate).zip(d) {
                                *dup = *d * function(*gate).0;
                            }
                        },
                    ),
                    (None, None) => {}
                }
            }
        },
    );
}
