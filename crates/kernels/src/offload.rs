//! Tensors of a forward pass that wait for its backward pass in the memory of the host (activation offloading).
//!
//! On CUDA they leave for pinned memory, and come back from it, beside the device's work, each way on a stream of its own.
//! Elsewhere both are copies at once.

use candle_core::{Device, Result, Tensor};
use std::sync::Arc;

/// Where tensors wait. It takes memory of the host as they are put there and keeps it for the next ones, once nothing
/// waits any more.
#[derive(Debug)]
pub struct Offload {
    device: Device,
    #[cfg(feature = "cuda")]
    cuda: Option<crate::backend::cuda::Offload>,
}

/// Tensors that wait. Dropped, they are no longer wanted.
#[derive(Debug)]
pub struct Offloaded {
    offload: Arc<Offload>,
    waiting: Waiting,
}

#[derive(Debug)]
enum Waiting {
    Host(Vec<Tensor>),
    #[cfg(feature = "cuda")]
    Cuda(crate::backend::cuda::Ticket),
}

impl Offload {
    /// For tensors of this device.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn new(device: &Device) -> Result<Arc<Self>> {
        Ok(Arc::new(Self {
            #[cfg(feature = "cuda")]
            cuda: device
                .is_cuda()
                .then(|| crate::backend::cuda::Offload::new(device))
                .transpose()?,
            device: device.clone(),
        }))
    }

    /// Puts contiguous tensors of the device away. Those that are put away last should be asked for first: they come back
    /// while what was put away after them is used. On CUDA the tensors themselves are held until they have been copied, which
    /// is two calls later at most.
    ///
    /// # Errors
    /// When one isn't contiguous or is elsewhere, or the driver refuses.
    pub fn put(self: &Arc<Self>, tensors: &[Tensor]) -> Result<Offloaded> {
        for tensor in tensors {
            if !tensor.is_contiguous() || !tensor.device().same_device(&self.device) {
                candle_core::bail!(
                    "metal-candle-kernels: offload: {:?} {:?} is no contiguous tensor of the device",
                    tensor.dims(),
                    tensor.dtype()
                )
            }
        }
        #[cfg(feature = "cuda")]
        if let Some(cuda) = &self.cuda {
            let waiting = Waiting::Cuda(cuda.put(tensors)?);
            return Ok(Offloaded { offload: self.clone(), waiting });
        }
        let copies = tensors.iter().map(|tensor| tensor.to_device(&Device::Cpu)?.copy());
        let waiting = Waiting::Host(copies.collect::<Result<_>>()?);
        Ok(Offloaded { offload: self.clone(), waiting })
    }
}

impl Offloaded {
    /// The tensors, back on the device; those that were put away before them begin to come.
    ///
    /// # Errors
    /// When the device has no room, or the driver refuses.
    pub fn take(self) -> Result<Vec<Tensor>> {
        let Self { offload, waiting } = self;
        match waiting {
            Waiting::Host(tensors) => {
                tensors.iter().map(|tensor| tensor.to_device(&offload.device)).collect()
            }
            #[cfg(feature = "cuda")]
            Waiting::Cuda(ticket) => ticket.redeem(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::DType;

    fn numbers(tensor: &Tensor) -> Vec<f32> {
        tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
    }

    /// The tensors of layer `layer` of pass `pass`, of several dtypes and sizes.
    fn layer(pass: usize, layer: usize, device: &Device) -> Vec<Tensor> {
        let count = 1000 * (1 + (pass * 7 + layer * 3) % 5) + layer;
        let start = (pass * 100 + layer) as f32;
        let numbers = Tensor::arange(start, start + count as f32, device).unwrap();
        let half = numbers.affine(0.5, 1.0).unwrap().to_dtype(DType::BF16).unwrap();
        vec![numbers, half, Tensor::zeros((0, 3), DType::F32, device).unwrap()]
    }

    fn tensors_come_back_as_they_were(device: &Device) {
        const LAYERS: usize = 9;
        let offload = Offload::new(device).unwrap();
        for pass in 0..4 {
            let mut waiting = Vec::new();
            for index in 0..LAYERS {
                let tensors = layer(pass, index, device);
                waiting.push(offload.put(&tensors).unwrap());
                drop(tensors);
                // Its memory, if it were free, would be this one's.
                crate::arithmetic::scale(&layer(pass, index, device)[0], -1.0).unwrap();
            }
            // Mostly the last first; a pass asks for all, another leaves some out, another ends early.
            let mut order: Vec<usize> = (0..LAYERS).rev().collect();
            order.swap(1, 4);
            let mut waiting: Vec<_> = waiting.into_iter().map(Some).collect();
            for (place, index) in order.into_iter().enumerate() {
                let offloaded = waiting[index].take().unwrap();
                if pass == 1 && index % 3 == 0 {
                    drop(offloaded);
                    continue;
                }
                if pass == 2 && place == 4 {
                    break;
                }
                let found = offloaded.take().unwrap();
                for (found, expected) in found.iter().zip(&layer(pass, index, device)) {
                    assert_eq!((found.dims(), found.dtype()), (expected.dims(), expected.dtype()));
                    assert!(found.device().same_device(device));
                    assert_eq!(numbers(found), numbers(expected), "pass {pass}, layer {index}");
                }
            }
        }
        let view = Tensor::zeros((2, 3), DType::F32, device).unwrap().t().unwrap();
        assert!(offload.put(&[view]).unwrap_err().to_string().contains("contiguous"));
        // Nobody waits for it.
        let kept = offload.put(&layer(9, 0, device)).unwrap();
        drop(offload);
        assert_eq!(numbers(&kept.take().unwrap()[0]), numbers(&layer(9, 0, device)[0]));
    }

    #[test]
    fn tensors_come_back_to_the_cpu_as_they_were() {
        tensors_come_back_as_they_were(&Device::Cpu);
    }

    #[cfg(feature = "cuda")]
    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_tensors_come_back_as_they_were() {
        tensors_come_back_as_they_were(&crate::testing::cuda());
    }

    /// Tensors that leave are written to by nobody else before they have left, and those that come are complete, though
    /// copies take far longer than the work between them; and what has left takes no memory on the device.
    #[cfg(feature = "cuda")]
    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_large_tensors_leave_and_come_beside_work() {
        const LAYERS: usize = 24;
        const SIDE: usize = 4096;
        let device = crate::testing::cuda();
        let offload = Offload::new(&device).unwrap();
        let forward = |start: f64| {
            let x = Tensor::ones((SIDE, SIDE), DType::F32, &device).unwrap();
            let mut x = crate::arithmetic::scale(&x, start).unwrap();
            let used = || crate::devices::memory(&device).unwrap().unwrap().current;
            let (before, mut most, mut waiting) = (used(), 0, Vec::new());
            for _ in 0..LAYERS {
                waiting.push(offload.put(std::slice::from_ref(&x)).unwrap());
                // Exact.
                x = crate::arithmetic::scale(&x, 2.0).unwrap();
                most = most.max(used() - before);
            }
            assert!(most <= (6 * SIDE * SIDE * 4) as u64, "{most}");
            waiting
        };
        let mut left = forward(1.0);
        // The next ones come already, into the place of which others are put.
        drop(left.pop().unwrap().take().unwrap());
        drop(left.pop().unwrap().take().unwrap());
        drop(left);
        for start in [3.0, 5.0] {
            let waiting = forward(start);
            let found: Vec<_> = waiting.into_iter().rev().map(|it| it.take().unwrap()).collect();
            for (index, found) in found.iter().rev().enumerate() {
                let expected = start * 2f64.powi(index as i32);
                let apart = found[0].affine(1.0, -expected).unwrap().abs().unwrap();
                let apart = apart.sum_all().unwrap().to_scalar::<f32>().unwrap();
                assert_eq!(apart, 0.0, "from {start}, layer {index}");
            }
        }
    }
}
