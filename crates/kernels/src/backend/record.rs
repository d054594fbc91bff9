//! Operations in Candle's autograd whose result is there already: for those that have more results than
//! one, or inputs that are no tensors of the graph.

use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, CustomOp3, InplaceOp1, Layout, MetalStorage,
    Result, Shape, Storage, Tensor, bail,
};
use std::sync::{Mutex, PoisonError};

/// `output` as a node with the input `x`. `backward(x, y, dy)` gives the gradient of `x`.
pub(crate) fn record1(
    name: &'static str,
    x: &Tensor,
    output: Tensor,
    backward: impl Fn(&Tensor, &Tensor, &Tensor) -> Result<Option<Tensor>> + Send + Sync + 'static,
) -> Result<Tensor> {
    x.apply_op1(Recorded::new(name, output, backward)?)
}

/// `output` as a node with two inputs. `backward(inputs, y, dy)` gives their gradients.
pub(crate) fn record2(
    name: &'static str,
    [a, b]: [&Tensor; 2],
    output: Tensor,
    backward: impl Fn([&Tensor; 2], &Tensor, &Tensor) -> Result<[Option<Tensor>; 2]>
    + Send
    + Sync
    + 'static,
) -> Result<Tensor> {
    a.apply_op2(b, Recorded::new(name, output, backward)?)
}

/// `output` as a node with three inputs. `backward(inputs, y, dy)` gives their gradients.
pub(crate) fn record3(
    name: &'static str,
    [a, b, c]: [&Tensor; 3],
    output: Tensor,
    backward: impl Fn([&Tensor; 3], &Tensor, &Tensor) -> Result<[Option<Tensor>; 3]>
    + Send
    + Sync
    + 'static,
) -> Result<Tensor> {
    a.apply_op3(b, c, Recorded::new(name, output, backward)?)
}

struct Recorded<F> {
    name: &'static str,
    output: Mutex<Option<(Storage, Shape)>>,
    backward: F,
}

impl<F> Recorded<F> {
    fn new(name: &'static str, output: Tensor, backward: F) -> Result<Self> {
        let shape = output.shape().clone();
        let output = Mutex::new(Some((into_storage(output)?, shape)));
        Ok(Recorded { name, output, backward })
    }

    fn take(&self) -> Result<(Storage, Shape)> {
        match self.output.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(output) => Ok(output),
            None => bail!("metal-candle-kernels: {}: the result was taken before", self.name),
        }
    }

    fn take_cpu(&self) -> Result<(CpuStorage, Shape)> {
        match self.take()? {
            (Storage::Cpu(storage), shape) => Ok((storage, shape)),
            _ => bail!("metal-candle-kernels: {}: the result is not on the CPU", self.name),
        }
    }

    fn take_cuda(&self) -> Result<(CudaStorage, Shape)> {
        match self.take()? {
            (Storage::Cuda(storage), shape) => Ok((storage, shape)),
            _ => bail!("metal-candle-kernels: {}: the result is not on a CUDA device", self.name),
        }
    }

    fn take_metal(&self) -> Result<(MetalStorage, Shape)> {
        match self.take()? {
            (Storage::Metal(storage), shape) => Ok((storage, shape)),
            _ => bail!("metal-candle-kernels: {}: the result is not on a Metal device", self.name),
        }
    }
}

/// Moves the numbers out of a fresh result that nothing else refers to.
fn into_storage(tensor: Tensor) -> Result<Storage> {
    struct Take(Mutex<Option<Storage>>);
    impl Take {
        fn put(&self, storage: Storage) {
            *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(storage);
        }
    }
    impl InplaceOp1 for Take {
        fn name(&self) -> &'static str {
            "take"
        }
        fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
            self.put(Storage::Cpu(std::mem::replace(storage, CpuStorage::U8(Vec::new()))));
            Ok(())
        }
        #[cfg(feature = "cuda")]
        fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> Result<()> {
            let device = storage.device.clone();
            let nothing = CudaStorage::wrap_cuda_slice(device.alloc_zeros::<u8>(1)?, device);
            self.put(Storage::Cuda(std::mem::replace(storage, nothing)));
            Ok(())
        }
        #[cfg(feature = "metal")]
        fn metal_fwd(&self, storage: &mut MetalStorage, _: &Layout) -> Result<()> {
            use candle_core::backend::BackendStorage;
            let nothing = super::metal::nothing(storage.device())?;
            self.put(Storage::Metal(std::mem::replace(storage, nothing)));
            Ok(())
        }
    }
    let take = Take(Mutex::new(None));
    tensor.inplace_op1(&take)?;
    match take.0.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(storage) => Ok(storage),
        None => bail!("metal-candle-kernels: a result was on no device that this build has"),
    }
}

/// The name and the forward passes of an operation with as many inputs as there are `_`.
macro_rules! forward {
    ($($input:tt)+) => {
        fn name(&self) -> &'static str {
            self.name
        }
        fn cpu_fwd(
            &self,
            $($input: &CpuStorage, _: &Layout),+
        ) -> Result<(CpuStorage, Shape)> {
            self.take_cpu()
        }
        fn cuda_fwd(
            &self,
            $($input: &CudaStorage, _: &Layout),+
        ) -> Result<(CudaStorage, Shape)> {
            self.take_cuda()
        }
        fn metal_fwd(
            &self,
            $($input: &MetalStorage, _: &Layout),+
        ) -> Result<(MetalStorage, Shape)> {
            self.take_metal()
        }
    };
}

impl<F> CustomOp1 for Recorded<F>
where
    F: Fn(&Tensor, &Tensor, &Tensor) -> Result<Option<Tensor>> + Send + Sync,
{
    forward!(_);
    fn bwd(&self, x: &Tensor, y: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        (self.backward)(x, y, dy)
    }
}

impl<F> CustomOp2 for Recorded<F>
where
    F: Fn([&Tensor; 2], &Tensor, &Tensor) -> Result<[Option<Tensor>; 2]> + Send + Sync,
{
    forward!(_ _);
    fn bwd(
        &self,
        a: &Tensor,
        b: &Tensor,
        y: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        Ok((self.backward)([a, b], y, dy)?.into())
    }
}

impl<F> CustomOp3 for Recorded<F>
where
    F: Fn([&Tensor; 3], &Tensor, &Tensor) -> Result<[Option<Tensor>; 3]> + Send + Sync,
{
    forward!(_ _ _);
    fn bwd(
        &self,
        a: &Tensor,
        b: &Tensor,
        c: &Tensor,
        y: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        Ok((self.backward)([a, b, c], y, dy)?.into())
    }
}
