//! What all optimisers share: the passes over a flat gradient (its norm, adding to it, clearing it), and a
//! step that clips on the way.
//!
//! A clipped step takes the norm of the gradients, scales them to a norm of at most `max_norm`, as
//! `torch.nn.utils.clip_grad_norm_` does it, changes the parameters and leaves the gradients zero. When the
//! norm isn't finite, only the gradients are changed.
//!
//! On CUDA what an optimiser keeps of each parameter may lie in pinned memory of the host
//! ([`HostBuffers`](crate::host::HostBuffers)) instead of on the device: a step reads and writes it there over the bus,
//! with the same result. The host may look at it once the device is done.

pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
#[cfg(any(feature = "metal", feature = "metal-emulation", test))]
pub(crate) mod metal;
#[cfg(test)]
pub(crate) mod tests;

use crate::backend::cpu::{
    FULL_PRECISION, Input, Real, change_all_in_place, change_in_place, dispatch_full,
    is_full_precision, require_separate,
};
use crate::backend::{on_gpu, require_dtype, require_rank, require_shape, require_together};
use candle_core::{DType, Result, Tensor, bail};
use cpu::{Gradients, Rule};

/// What a step is made of: flat parameters and gradients `(n)` of one dtype, f32 or f64, and what the
/// optimiser keeps of each element, by name. Weight decay applies to the first `decayed` elements.
pub(crate) struct Step<'a, const STATES: usize> {
    pub(crate) operation: &'static str,
    pub(crate) params: &'a Tensor,
    pub(crate) grads: &'a Tensor,
    pub(crate) states: [(&'static str, &'a Tensor); STATES],
    pub(crate) decayed: usize,
}

/// What gradients are clipped to.
#[derive(Clone, Copy, Debug, Default)]
pub struct Clip<'a> {
    /// The largest norm; any without it.
    pub max_norm: Option<f64>,
    /// The contiguous gradients whose norm that is, where the step is one of a part of them; by default it is that of
    /// the step's own.
    pub norm_of: Option<&'a Tensor>,
}

impl From<Option<f64>> for Clip<'_> {
    fn from(max_norm: Option<f64>) -> Self {
        Self { max_norm, norm_of: None }
    }
}

impl<const STATES: usize> Step<'_, STATES> {
    /// An error for shapes or dtypes that don't fit, tensors that share storage, aren't within reach of one device or,
    /// but for the gradients, aren't contiguous.
    pub(crate) fn check(&self) -> Result<()> {
        let operation = self.operation;
        let all: Vec<(&str, &Tensor)> = [("params", self.params), ("grads", self.grads)]
            .into_iter()
            .chain(self.states)
            .collect();
        require_together(operation, &[self.params, self.grads])?;
        for (_, state) in self.states {
            require_within_reach(operation, self.params, state)?;
        }
        require_rank(operation, "params", self.params, 1, "(n)")?;
        let n = self.params.elem_count();
        for &(name, tensor) in &all {
            require_shape(operation, name, tensor, &[n])?;
            require_dtype(operation, name, tensor, self.params.dtype())?;
            // Gradients that are only read are copied if need be.
            if name != "grads" {
                require_contiguous(operation, name, tensor)?;
            }
        }
        if !is_full_precision(self.params.dtype()) {
            bail!(
                "metal-candle-kernels: {operation}: params are {:?}, expected {FULL_PRECISION}: keep trainable parameters in full precision",
                self.params.dtype()
            )
        }
        if self.decayed > n {
            bail!(
                "metal-candle-kernels: {operation}: {} elements are to decay, expected at most {n}",
                self.decayed
            )
        }
        let names: Vec<&str> = all.iter().map(|(name, _)| *name).collect();
        let names = names.join(", ");
        for (index, (_, a)) in all.iter().enumerate() {
            for (_, b) in &all[..index] {
                if a.device().same_device(b.device()) {
                    require_separate(operation, &names, a, b)?;
                }
            }
        }
        Ok(())
    }

    /// [`Step::check`], and that the gradients, which are to be changed, and those whose norm is clipped are contiguous.
    pub(crate) fn check_clipped(&self, clip: Clip) -> Result<()> {
        self.check()?;
        require_contiguous(self.operation, "grads", self.grads)?;
        let Some(norm_of) = clip.norm_of else { return Ok(()) };
        require_together(self.operation, &[self.grads, norm_of])?;
        require_dtype(self.operation, "norm_of", norm_of, self.grads.dtype())?;
        require_contiguous(self.operation, "norm_of", norm_of)
    }

    /// The gradients whose norm is clipped.
    pub(crate) fn clipped<'a>(&'a self, clip: Clip<'a>) -> &'a Tensor {
        clip.norm_of.unwrap_or(self.grads)
    }

    /// The step with gradients that stay as they are, on the CPU.
    pub(crate) fn on_cpu(
        &self,
        grad_scale: f32,
        rule: &(impl Rule<f32, STATES> + Rule<f64, STATES>),
    ) -> Result<()> {
        dispatch_full!(self.params.dtype(), A => self.on_cpu_in::<A>(grad_scale, rule))
    }

    fn on_cpu_in<A: Real>(&self, grad_scale: f32, rule: &impl Rule<A, STATES>) -> Result<()> {
        let grads = Input::contiguous(self.grads)?;
        let grads = grads.read();
        let grads = grads.slice::<A>()?;
        let (operation, states) = (self.operation, self.states.map(|(_, state)| state));
        let scale = A::from_f64(grad_scale.into());
        change_in_place::<A>(operation, self.params, |params| {
            change_all_in_place::<A, STATES>(operation, states, |states| {
                cpu::step(rule, params, Gradients::Kept(grads), states, scale, self.decayed);
                Ok(())
            })
        })
    }

    /// The clipped step on the CPU; gives the norm.
    pub(crate) fn clipped_on_cpu(
        &self,
        clip: Clip,
        rule: &(impl Rule<f32, STATES> + Rule<f64, STATES>),
    ) -> Result<f64> {
        let norm = norm(self.clipped(clip))?;
        let Some(grad_scale) = clip_scale(norm, clip.max_norm) else {
            fill_zero(self.grads)?;
            return Ok(norm);
        };
        self.cleared_on_cpu(grad_scale, rule)?;
        Ok(norm)
    }

    /// The step with gradients that are zero afterwards, on the CPU.
    pub(crate) fn cleared_on_cpu(
        &self,
        grad_scale: f32,
        rule: &(impl Rule<f32, STATES> + Rule<f64, STATES>),
    ) -> Result<()> {
        dispatch_full!(self.params.dtype(), A => self.cleared_on_cpu_in::<A>(grad_scale, rule))
    }

    fn cleared_on_cpu_in<A: Real>(
        &self,
        grad_scale: f32,
        rule: &impl Rule<A, STATES>,
    ) -> Result<()> {
        let (operation, states) = (self.operation, self.states.map(|(_, state)| state));
        let scale = A::from_f64(grad_scale.into());
        change_all_in_place::<A, 2>(operation, [self.params, self.grads], |[params, grads]| {
            change_all_in_place::<A, STATES>(operation, states, |states| {
                cpu::step(rule, params, Gradients::Cleared(grads), states, scale, self.decayed);
                Ok(())
            })
        })
    }
}

/// What gradients of a norm are multiplied by, so that it is at most `max_norm`, as
/// `torch.nn.utils.clip_grad_norm_` does it; `None`, for no step at all, when the norm isn't finite.
pub fn clip_scale(norm: f64, max_norm: Option<f64>) -> Option<f32> {
    /// Keeps the norm's reciprocal finite.
    const CLIP_EPSILON: f64 = 1e-6;
    let scale = max_norm.map_or(1.0, |max_norm| (max_norm / (norm + CLIP_EPSILON)).min(1.0));
    norm.is_finite().then_some(scale as f32)
}

/// An error unless the device of `params` finds what an optimiser keeps: it is there, too, or, on CUDA, in the memory of
/// the host, which the driver has to have pinned.
pub(crate) fn require_within_reach(operation: &str, params: &Tensor, state: &Tensor) -> Result<()> {
    match params.device().is_cuda() && state.device().is_cpu() {
        true => Ok(()),
        false => require_together(operation, &[params, state]),
    }
}

/// An error unless steps count from 1.
pub(crate) fn require_step(operation: &str, step: usize) -> Result<()> {
    if step == 0 {
        bail!("metal-candle-kernels: {operation}: the step is 0, expected 1 for the first")
    }
    Ok(())
}

pub(crate) fn require_contiguous(operation: &str, name: &str, tensor: &Tensor) -> Result<()> {
    if !tensor.is_contiguous() {
        bail!("metal-candle-kernels: {operation}: {name} is not contiguous, expected it to be")
    }
    Ok(())
}

/// The Euclidean norm of a tensor of any shape, added up in f64, on Metal in f32. A NaN or infinite
/// element gives a result that isn't finite. On a GPU this waits for the device.
///
/// # Errors
/// When the tensor isn't a float, or on a device that this build has no kernels for.
pub fn norm(grads: &Tensor) -> Result<f64> {
    require_together("flat::norm", &[grads])?;
    on_gpu!(grads, gpu => gpu::norm(grads));
    let grads = Input::contiguous(grads)?;
    let grads = grads.read();
    Ok(cpu::norm(grads.values()?))
}

/// `dst += scale·src` in place: `dst` f32 or f64 and contiguous (a view of a flat buffer will do), `src`
/// a float tensor of its shape that shares no storage with it.
///
/// # Errors
/// When shapes or dtypes don't fit, `dst` isn't contiguous, storage is shared, or the tensors aren't
/// on one device.
pub fn accumulate(dst: &Tensor, src: &Tensor, scale: f64) -> Result<()> {
    accumulate_all(&[(dst, src)], scale)
}

/// [`accumulate`] for each `(dst, src)` in turn, with the same result, where no `src` shares storage with any `dst`; on CUDA
/// many are one launch.
///
/// # Errors
/// Like [`accumulate`], for the tensors of all pairs together.
pub fn accumulate_all(pairs: &[(&Tensor, &Tensor)], scale: f64) -> Result<()> {
    const OPERATION: &str = "flat::accumulate";
    let all: Vec<&Tensor> = pairs.iter().flat_map(|(dst, src)| [*dst, *src]).collect();
    require_together(OPERATION, &all)?;
    for (dst, src) in pairs {
        require_shape(OPERATION, "src", src, dst.dims())?;
        require_contiguous(OPERATION, "dst", dst)?;
        require_separate(OPERATION, "dst and src", dst, src)?;
    }
    #[cfg(feature = "cuda")]
    if pairs.first().is_some_and(|(dst, _)| dst.device().is_cuda()) {
        return cuda::accumulate(OPERATION, pairs, scale);
    }
    for &(dst, src) in pairs {
        match dst.dtype() {
            #[cfg(any(feature = "metal", feature = "metal-emulation", test))]
            DType::F32 if crate::backend::metal::computes(dst) => {
                metal::accumulate(dst, src, scale)?;
            }
            dtype if is_full_precision(dtype) => {
                dispatch_full!(dtype, A => accumulate_in::<A>(OPERATION, dst, src, scale)?)
            }
            other => {
                bail!(
                    "metal-candle-kernels: {OPERATION}: dst is {other:?}, expected {FULL_PRECISION}"
                )
            }
        }
    }
    Ok(())
}

fn accumulate_in<A: Real>(
    operation: &'static str,
    dst: &Tensor,
    src: &Tensor,
    scale: f64,
) -> Result<()> {
    let src = Input::contiguous(src)?;
    let src = src.read();
    let src = src.values::<A>()?;
    change_in_place::<A>(operation, dst, |dst| {
        cpu::accumulate(dst, src, A::from_f64(scale));
        Ok(())
    })
}

/// Sets every element to zero, in place.
///
/// # Errors
/// When the tensor is on a device that this build has no kernels for.
pub fn fill_zero(dst: &Tensor) -> Result<()> {
    const OPERATION: &str = "flat::fill_zero";
    require_together(OPERATION, &[dst])?;
    #[cfg(feature = "cuda")]
    if dst.device().is_cuda() && dst.is_contiguous() {
        return cuda::fill_zero(dst);
    }
    #[cfg(any(feature = "metal", feature = "metal-emulation", test))]
    if crate::backend::metal::computes(dst) && dst.dtype() == DType::F32 && dst.is_contiguous() {
        return metal::fill_zero(dst);
    }
    match dst.dtype() {
        DType::F32 if dst.is_contiguous() => change_in_place::<f32>(OPERATION, dst, |dst| {
            cpu::fill_zero(dst);
            Ok(())
        }),
        _ => dst.zero_set(),
    }
}
