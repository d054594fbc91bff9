//! The gated unit on the CPU: a task is a block of rows.

use super::Activation;
use crate::device::cpu::{
    Element, Real, Values, for_each_chunk, for_each_chunk2, rows_per_task, write_through,
};

/// Rows at one distance from each other inside a storage.
#[derive(Clone, Copy)]
pub(super) struct Strided {
    pub start: usize,
    pub columns: usize,
    pub stride: usize,
}

type Rows<'a, A> = (Values<'a, A>, Strided);

fn row<'b, 'a: 'b, A: Real>(rows: &Rows<'a, A>, index: usize, scratch: &'b mut Vec<A>) -> &'b [A] {
    let start = rows.1.start + index * rows.1.stride;
    rows.0.block(start..start + rows.1.columns, scratch)
}

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

pub(super) fn forward<T: Element>(
    activation: Activation,
    gate: Rows<T::Acc>,
    up: Rows<T::Acc>,
    out: &mut [T],
) {
    match activation {
        Activation::Silu => forward_with(silu, gate, up, out),
        Activation::Gelu => forward_with(gelu, gate, up, out),
        Activation::GeluTanh => forward_with(gelu_tanh, gate, up, out),
    }
}

fn forward_with<T: Element>(
    function: impl Fn(T::Acc) -> (T::Acc, T::Acc) + Sync,
    gate: Rows<T::Acc>,
    up: Rows<T::Acc>,
    out: &mut [T],
) {
    let columns = gate.1.columns;
    let block = rows_per_task(columns);
    for_each_chunk(
        out,
        block * columns,
        #[inline(always)]
        |index, out| {
            let (mut gate_scratch, mut up_scratch, mut scratch) =
                (Vec::new(), Vec::new(), Vec::new());
            for (offset, out) in out.chunks_exact_mut(columns).enumerate() {
                let gate = row(&gate, index * block + offset, &mut gate_scratch);
                let up = row(&up, index * block + offset, &mut up_scratch);
                write_through(out, &mut scratch, |out| {
                    for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
                        *out = function(*gate).0 * *up;
                    }
                });
            }
        },
    );
}

pub(super) fn backward<T: Element>(
    activation: Activation,
    gate: Rows<T::Acc>,
    up: Rows<T::Acc>,
    d_out: Rows<T::Acc>,
    dgate: &mut [T],
    dup: &mut [T],
) {
    match activation {
        Activation::Silu => backward_with(silu, gate, up, d_out, dgate, dup),
        Activation::Gelu => backward_with(gelu, gate, up, d_out, dgate, dup),
        Activation::GeluTanh => backward_with(gelu_tanh, gate, up, d_out, dgate, dup),
    }
}

fn backward_with<T: Element>(
    function: impl Fn(T::Acc) -> (T::Acc, T::Acc) + Sync,
    gate: Rows<T::Acc>,
    up: Rows<T::Acc>,
    d_out: Rows<T::Acc>,
    dgate: &mut [T],
    dup: &mut [T],
) {
    let columns = gate.1.columns;
    let block = rows_per_task(columns);
    for_each_chunk2(
        dgate,
        block * columns,
        dup,
        block * columns,
        #[inline(always)]
        |index, dgate, dup| {
            let mut scratch = [const { Vec::new() }; 5];
            let [gate_scratch, up_scratch, d_scratch, dgate_scratch, dup_scratch] = &mut scratch;
            let pairs = dgate.chunks_exact_mut(columns).zip(dup.chunks_exact_mut(columns));
            for (offset, (dgate, dup)) in pairs.enumerate() {
                let gate = row(&gate, index * block + offset, gate_scratch);
                let up = row(&up, index * block + offset, up_scratch);
                let d = row(&d_out, index * block + offset, d_scratch);
                write_through(dgate, dgate_scratch, |dgate| {
                    write_through(dup, dup_scratch, |dup| {
                        for i in 0..columns {
                            let (value, slope) = function(gate[i]);
                            dgate[i] = d[i] * up[i] * slope;
                            dup[i] = d[i] * value;
                        }
                    });
                });
            }
        },
    );
}
