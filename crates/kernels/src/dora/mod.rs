//! What a layer needs beside a low-rank adapter to learn the length of its weight's rows apart from their
//! direction (DoRA, Liu et al. 2024, <https://arxiv.org/abs/2402.09353>).
//!
//! ```text
//! V = W + s·(A·B)ᵀ             n_o = ‖V_o‖, the norm of a row of the merged weight
//! y = x·Vᵀ                     what lora_linear gives without a bias
//! z = (m ⊘ n) ⊙ y + bias       the layer's output; m (out) is trained
//! ```
//!
//! The norms are constants in the backward pass, as section 4.3 of the paper has it, so that with
//! `f = m ⊘ n`:
//!
//! ```text
//! dy = dz ⊙ f        df_o = Σ_rows dz·y        dm = df ⊘ n        dbias = Σ_rows dz
//! ```
//!
//! They are found without the merged weight, whose rows are never made:
//!
//! ```text
//! n_o² = ‖W_o‖² + Σ_r B_ro·(2s·(W·A)_or + s²·(AᵀA·B)_ro)
//! ```

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(any(feature = "metal", feature = "metal-emulation", test))]
mod metal;
#[cfg(test)]
mod tests;

use crate::backend::cpu::{Input, Sum, add_sums, dispatch, rows_per_sum, unwritten};
use crate::backend::{
    dtype_of_sums, on_gpu, record2, record3, require_dtype, require_rank, require_shape,
    require_together, rows_and_columns,
};
use crate::{copy, matmul};
use candle_core::{Device, Result, Tensor};

/// `‖W_o‖²` of every row of `weight` `(out, in)`, `(out)` in f32 (f64 for f64): what [`merged_norms`] reads of
/// a frozen weight, to be computed once.
///
/// # Errors
/// When `weight` isn't a matrix of floats, or this build doesn't compute on its device.
pub fn squared_norms(weight: &Tensor) -> Result<Tensor> {
    const OPERATION: &str = "dora::squared_norms";
    require_together(OPERATION, &[weight])?;
    require_rank(OPERATION, "weight", weight, 2, "(out, in)")?;
    on_gpu!(weight, gpu => gpu::squared_norms(OPERATION, weight));
    let outer = weight.dim(0)?;
    let weight = Input::collapsed_rows(weight)?;
    let weight = weight.read();
    dispatch!(OPERATION, weight.dtype(), T => {
        let mut squares = unwritten::<Sum<T>>(outer);
        cpu::squared_norms(weight.rows::<T>()?, &mut squares);
        Tensor::from_vec(squares, outer, &Device::Cpu)
    })
}

/// The norms `‖W_o + s·(A·B)ᵀ_o‖` of the merged rows, `(out)` in f32 (f64 for f64): `weight` `(out, in)`,
/// `base_squares` of it from [`squared_norms`], `a` `(in, rank)`, `b` `(rank, out)`.
///
/// A and B are read in f32, and their products with a weight of any dtype are made in f32; on CUDA A has
/// 16 bits of precision beside a bf16 weight. A norm isn't less than `‖W_o‖·√ε` for f32's ε: where an adapter
/// takes a row away, less than that is rounding.
///
/// # Errors
/// When shapes don't fit, a dtype isn't a float, `base_squares` isn't f32 (f64 beside an f64 weight), or the
/// tensors aren't on one device.
pub fn merged_norms(
    weight: &Tensor,
    base_squares: &Tensor,
    a: &Tensor,
    b: &Tensor,
    scale: f64,
) -> Result<Tensor> {
    const OPERATION: &str = "dora::merged_norms";
    require_together(OPERATION, &[weight, base_squares, a, b])?;
    require_rank(OPERATION, "weight", weight, 2, "(out, in)")?;
    let (outer, inner) = weight.dims2()?;
    require_rank(OPERATION, "a", a, 2, "(in, rank)")?;
    let rank = a.dim(1)?;
    require_shape(OPERATION, "a", a, &[inner, rank])?;
    require_shape(OPERATION, "b", b, &[rank, outer])?;
    require_shape(OPERATION, "base_squares", base_squares, &[outer])?;
    let dtype = dtype_of_sums(weight.dtype());
    require_dtype(OPERATION, "base_squares", base_squares, dtype)?;
    if rank == 0 || outer == 0 {
        return base_squares.detach().sqrt();
    }
    let (a, b) = (copy::cast(a, dtype)?, copy::cast(b, dtype)?);
    let gram_b = matmul::linear_backward_input(&matmul::linear_backward_weight(&a, &a)?, &b)?;
    on_gpu!(weight, gpu => gpu::merged_norms(weight, base_squares, &a, &b, &gram_b, scale));
    let products = weight_times_a(weight, &a)?;
    let [base, products, gram_b, b] = [base_squares, &products, &gram_b, &b].map(Input::contiguous);
    let (base, products, gram_b, b) = (base?, products?, gram_b?, b?);
    let (base, products, gram_b, b) = (base.read(), products.read(), gram_b.read(), b.read());
    dispatch!(OPERATION, dtype, T => {
        let mut norms = unwritten::<Sum<T>>(outer);
        let merged = cpu::Merged {
            base: base.slice()?,
            products: products.slice()?,
            gram_b: gram_b.slice()?,
            b: b.slice()?,
            scale,
        };
        merged.norms(&mut norms);
        Tensor::from_vec(norms, outer, &Device::Cpu)
    })
}

/// `(W·A)ᵀ` `(rank, out)` in the dtype of A.
fn weight_times_a(weight: &Tensor, a: &Tensor) -> Result<Tensor> {
    matmul::linear(&a.t()?, weight, None)
}

/// `y ⊙ factor + bias`, the columns of `y` `(.., out)` multiplied: `factor` `(out)` in f32 (f64 for f64), `bias`
/// `(out)` in any float dtype, result like `y`.
///
/// # Errors
/// When shapes or dtypes don't fit, or the tensors aren't on one device.
pub fn scale_columns(y: &Tensor, factor: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    const OPERATION: &str = "dora::scale_columns";
    let (rows, columns) = check(OPERATION, y, factor)?;
    matmul::check_bias(OPERATION, y, bias, columns)?;
    on_gpu!(y, gpu => gpu::scale_columns(OPERATION, y, factor, bias, rows, columns));
    let shape = y.dims();
    let (y, factor) = (Input::collapsed_rows(y)?, Input::contiguous(factor)?);
    let bias = bias.map(Input::contiguous).transpose()?;
    let (y, factor, bias) = (y.read(), factor.read(), bias.as_ref().map(Input::read));
    dispatch!(OPERATION, y.dtype(), T => {
        let bias = matmul::numbers::<Sum<T>>(&bias)?;
        let mut out = unwritten::<T>(rows * columns);
        cpu::scale_columns(y.rows::<T>()?, factor.slice()?, bias.as_deref(), &mut out);
        Tensor::from_vec(out, shape, &Device::Cpu)
    })
}

/// Like [`scale_columns`], recorded in Candle's autograd.
///
/// # Errors
/// Like [`scale_columns`].
pub fn differentiable(y: &Tensor, factor: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    const NAME: &str = "scale_columns";
    let z = scale_columns(y, factor, bias)?;
    let Some(bias) = bias else {
        return record2(NAME, [y, factor], z, |[y, factor], _, dz| {
            let Gradients { dy, dfactor, .. } = scale_columns_backward(y, factor, dz, false)?;
            Ok([Some(dy), Some(dfactor)])
        });
    };
    record3(NAME, [y, factor, bias], z, |[y, factor, bias], _, dz| {
        let Gradients { dy, dfactor, dbias } =
            scale_columns_backward(y, factor, dz, bias.track_op())?;
        let dbias = dbias.map(|dbias| dbias.to_dtype(bias.dtype())).transpose()?;
        Ok([Some(dy), Some(dfactor), dbias])
    })
}

/// What [`scale_columns_backward`] returns.
#[derive(Debug)]
pub struct Gradients {
    /// `(.., out)` in the dtype of `y`.
    pub dy: Tensor,
    /// `(out)`, f32 (f64 for f64).
    pub dfactor: Tensor,
    /// `(out)`, f32 (f64 for f64); `None` unless asked for.
    pub dbias: Option<Tensor>,
}

/// The gradients of [`scale_columns`], in one pass: its `y` `(.., out)` and `factor` `(out)`, and `dz`, that of
/// its result, like `y`.
///
/// # Errors
/// Like [`scale_columns`].
pub fn scale_columns_backward(
    y: &Tensor,
    factor: &Tensor,
    dz: &Tensor,
    need_dbias: bool,
) -> Result<Gradients> {
    const OPERATION: &str = "dora::scale_columns_backward";
    let (rows, columns) = check(OPERATION, y, factor)?;
    require_together(OPERATION, &[y, dz])?;
    require_shape(OPERATION, "dz", dz, y.dims())?;
    require_dtype(OPERATION, "dz", dz, y.dtype())?;
    on_gpu!(y, gpu => gpu::backward(OPERATION, y, factor, dz, need_dbias, rows, columns));
    let shape = y.dims();
    let (y, dz) = (Input::collapsed_rows(y)?, Input::collapsed_rows(dz)?);
    let factor = Input::contiguous(factor)?;
    let (y, dz, factor) = (y.read(), dz.read(), factor.read());
    dispatch!(OPERATION, y.dtype(), T => {
        let sums = rows.div_ceil(rows_per_sum(rows, columns)) * columns;
        let mut dy = unwritten::<T>(rows * columns);
        let mut dfactor = unwritten::<Sum<T>>(sums);
        let mut dbias = need_dbias.then(|| unwritten::<Sum<T>>(sums));
        let problem = cpu::Backward {
            rows,
            y: y.rows::<T>()?,
            factor: factor.slice()?,
            dz: dz.rows::<T>()?,
        };
        problem.run(&mut dy, &mut dfactor, dbias.as_deref_mut());
        let total =
            |sums: Vec<Sum<T>>| Tensor::from_vec(add_sums(&sums, columns), columns, &Device::Cpu);
        Ok(Gradients {
            dy: Tensor::from_vec(dy, shape, &Device::Cpu)?,
            dfactor: total(dfactor)?,
            dbias: dbias.map(total).transpose()?,
        })
    })
}

fn check(operation: &str, y: &Tensor, factor: &Tensor) -> Result<(usize, usize)> {
    require_together(operation, &[y, factor])?;
    let (rows, columns) = rows_and_columns(operation, "y", y)?;
    require_shape(operation, "factor", factor, &[columns])?;
    require_dtype(operation, "factor", factor, dtype_of_sums(y.dtype()))?;
    Ok((rows, columns))
}
