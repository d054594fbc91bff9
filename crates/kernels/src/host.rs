//! Copies of a device's tensors in the memory of the host, made beside the work that follows, and back.
//!
//! On CUDA the memory is pinned, and a copy is launched behind the work that makes the tensors: nothing
//! waits, and later work may overwrite them. On Metal a copy waits for that work; on the CPU it is a copy
//! in memory.

use crate::copy;
use candle_core::{DType, Device, Result, Tensor, bail};
#[cfg(feature = "cuda")]
use std::sync::Arc;

/// Memory of the host for copies of certain tensors, to be used again for the next copies of them.
#[derive(Debug)]
pub struct HostBuffers {
    /// Stands first, as it is to be dropped before the memory that it pins.
    #[cfg(feature = "cuda")]
    _pinned: Vec<crate::backend::cuda::Pinned>,
    tensors: Vec<Tensor>,
}

impl HostBuffers {
    /// Memory for copies of tensors of these shapes and dtypes that lie on `device`. On CUDA it is
    /// touched and pinned here, which takes a while for gigabytes.
    ///
    /// # Errors
    /// When the driver refuses to pin it.
    pub fn new(like: &[(Vec<usize>, DType)], device: &Device) -> Result<Self> {
        let zeros = |shape: &[usize], dtype: DType| {
            #[cfg(feature = "cuda")]
            if device.is_cuda() {
                return crate::backend::cuda::zeros_on_own_pages(shape, dtype);
            }
            Tensor::zeros(shape, dtype, &Device::Cpu)
        };
        let tensors = like.iter().map(|(shape, dtype)| zeros(shape, *dtype));
        let tensors = tensors.collect::<Result<Vec<_>>>()?;
        #[cfg(feature = "cuda")]
        let pinned = match device {
            Device::Cuda(_) => tensors
                .iter()
                .filter(|tensor| tensor.elem_count() > 0)
                .map(|tensor| crate::backend::cuda::Pinned::new(tensor, device))
                .collect::<Result<_>>()?,
            _ => Vec::new(),
        };
        #[cfg(not(feature = "cuda"))]
        let _ = device;
        Ok(Self {
            #[cfg(feature = "cuda")]
            _pinned: pinned,
            tensors,
        })
    }

    /// Begins to copy `tensors`, which are contiguous, of the shapes and dtypes that this was made for, and on its device or
    /// the host, where nothing may be at work on them. They may be overwritten as soon as this returns, by work on the
    /// same device.
    ///
    /// # Errors
    /// When they are others, or the driver refuses.
    pub fn copy(self, tensors: &[Tensor]) -> Result<HostCopy> {
        if tensors.len() != self.tensors.len() {
            bail!(
                "metal-candle-kernels: host: {} tensors to copy, expected {}",
                tensors.len(),
                self.tensors.len()
            )
        }
        for (from, to) in tensors.iter().zip(&self.tensors) {
            if from.dims() != to.dims() || from.dtype() != to.dtype() || !from.is_contiguous() {
                bail!(
                    "metal-candle-kernels: host: {:?} {:?} cannot be copied to {:?} {:?}; it must be contiguous and of that shape",
                    from.dims(),
                    from.dtype(),
                    to.dims(),
                    to.dtype()
                )
            }
        }
        // Launched first, as the others are copied meanwhile.
        #[cfg(feature = "cuda")]
        let copied = tensors
            .iter()
            .find(|tensor| tensor.device().is_cuda())
            .map(|it| crate::backend::cuda::copy_to_host(it.device(), tensors, &self.tensors))
            .transpose()?;
        for (from, to) in tensors.iter().zip(&self.tensors) {
            if !from.device().is_cuda() {
                copy_to_host(&to.flatten_all()?, 0, from)?;
            }
        }
        Ok(HostCopy {
            #[cfg(feature = "cuda")]
            copied,
            buffers: self,
        })
    }

    /// Copies a contiguous `part` `(n)`, on the device that this was made for or the host, into the elements of a flat tensor
    /// from `start` on, and waits for it.
    ///
    /// # Errors
    /// When there are no such elements, or the driver refuses.
    pub fn write(&self, tensor: usize, start: usize, part: &Tensor) -> Result<()> {
        let to = self.tensors.get(tensor).filter(|to| {
            to.rank() == 1
                && part.rank() == 1
                && part.is_contiguous()
                && to.dtype() == part.dtype()
                && start + part.elem_count() <= to.elem_count()
        });
        let Some(to) = to else {
            bail!(
                "metal-candle-kernels: host: {:?} {:?} cannot be copied into tensor {tensor} of {} from {start} on",
                part.dims(),
                part.dtype(),
                self.tensors.len()
            )
        };
        #[cfg(feature = "cuda")]
        if part.device().is_cuda() {
            let to = to.narrow(0, start, part.elem_count())?;
            let (from, to) = (std::slice::from_ref(part), std::slice::from_ref(&to));
            return crate::backend::cuda::copy_to_host(part.device(), from, to)?.wait();
        }
        copy_to_host(to, start, part)
    }

    /// What was copied last; at first zeros. A clone of one of these sees the next copy. On CUDA an optimiser may keep its
    /// numbers here, see [`flat`](crate::flat).
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }
}

/// Brings numbers from a device to the host without waiting for the work that follows theirs.
#[derive(Clone, Debug)]
pub struct Downloads {
    device: Device,
    #[cfg(feature = "cuda")]
    lane: Option<Arc<crate::backend::cuda::Lane>>,
}

/// Numbers that are on their way.
#[derive(Debug)]
pub struct Download {
    numbers: Tensor,
    /// What brings them, and the place behind which they are there.
    #[cfg(feature = "cuda")]
    lane: Option<(Arc<crate::backend::cuda::Lane>, crate::backend::cuda::Event)>,
}

impl Downloads {
    /// Of tensors of `device`.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn new(device: &Device) -> Result<Self> {
        Ok(Self {
            device: device.clone(),
            #[cfg(feature = "cuda")]
            lane: match device {
                Device::Cuda(_) => Some(Arc::new(crate::backend::cuda::Lane::new(device)?)),
                _ => None,
            },
        })
    }

    /// Brings contiguous u32 as they are once the work that was launched before is done. Nothing may overwrite them
    /// until [`Download::wait`] returns. Elsewhere than on CUDA, that waits for later work, too.
    ///
    /// # Errors
    /// When they are others, or the driver refuses.
    pub fn begin(&self, numbers: &Tensor) -> Result<Download> {
        let is_here = numbers.device().same_device(&self.device);
        if numbers.dtype() != DType::U32 || !numbers.is_contiguous() || !is_here {
            bail!(
                "metal-candle-kernels: host: {:?} of {:?} on {:?}, expected contiguous U32 on {:?}",
                numbers.dims(),
                numbers.dtype(),
                numbers.device().location(),
                self.device.location()
            )
        }
        Ok(Download {
            numbers: numbers.clone(),
            #[cfg(feature = "cuda")]
            lane: match &self.lane {
                Some(lane) => Some((lane.clone(), lane.device_place()?)),
                None => None,
            },
        })
    }
}

impl Download {
    /// The numbers.
    ///
    /// # Errors
    /// When the work before them has failed.
    pub fn wait(self) -> Result<Vec<u32>> {
        #[cfg(feature = "cuda")]
        if let Some((lane, place)) = &self.lane {
            lane.wait_for(place)?;
            return lane.read(&self.numbers);
        }
        self.numbers.flatten_all()?.to_vec1()
    }
}

/// Numbers `(n)` of the host on a device, without waiting for the work that was launched there.
pub(crate) fn numbers_on(device: &Device, numbers: &[u32]) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if device.is_cuda() {
        return Ok(crate::backend::cuda::Cuda::on(device)?.upload(numbers, numbers.len())?.tensor);
    }
    Tensor::from_slice(numbers, numbers.len(), device)
}

/// The tensor in the memory of the host, contiguous; itself where it is that.
///
/// # Errors
/// When the device or the host has no room, or the work before it has failed.
pub fn on_the_host(tensor: &Tensor) -> Result<Tensor> {
    match tensor.device() {
        Device::Cpu => tensor.contiguous(),
        // Candle brings all that a view is a view of, such as every parameter for one of them.
        Device::Cuda(_) => tensor.force_contiguous()?.to_device(&Device::Cpu),
        Device::Metal(_) => {
            let whole = Tensor::zeros(tensor.elem_count(), tensor.dtype(), &Device::Cpu)?;
            copy_to_host(&whole, 0, &copy::contiguous(tensor)?)?;
            whole.reshape(tensor.shape())
        }
    }
}

/// Copies a contiguous tensor into the elements of a flat one on the host, from `start` on.
fn copy_to_host(to: &Tensor, start: usize, from: &Tensor) -> Result<()> {
    /// Elements that come at a time: Candle takes memory for two copies of them on the way.
    const PIECE: usize = 16 << 20;
    let from = from.flatten_all()?;
    match from.device() {
        _ if from.elem_count() == 0 => Ok(()),
        Device::Cpu => to.slice_set(&from, 0, start),
        _ => copy_in_pieces(to, start, &from, PIECE),
    }
}

/// The same of a flat tensor, so many elements at a time.
fn copy_in_pieces(to: &Tensor, start: usize, from: &Tensor, piece: usize) -> Result<()> {
    let count = from.elem_count();
    for place in (0..count).step_by(piece) {
        // By itself, as Candle copies all that a view is a view of.
        let part = from.narrow(0, place, piece.min(count - place))?.force_contiguous()?;
        to.slice_set(&part.to_device(&Device::Cpu)?, 0, start + place)?;
    }
    Ok(())
}

/// Brings what lies in the memory of the host to a device, beside its work: one transfer at a time.
#[derive(Debug)]
pub struct Uploads {
    device: Device,
    #[cfg(feature = "cuda")]
    lane: Option<crate::backend::cuda::Lane>,
}

impl Uploads {
    /// To this device.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn new(device: &Device) -> Result<Self> {
        Ok(Self {
            #[cfg(feature = "cuda")]
            lane: device.is_cuda().then(|| crate::backend::cuda::Lane::new(device)).transpose()?,
            device: device.clone(),
        })
    }

    /// Begins to bring these tensors, which stay until [`Self::end`]. What is given may be used from then on. On CUDA the
    /// transfer runs beside the work that is launched after this; elsewhere it is done at once.
    ///
    /// # Errors
    /// When the device has no room, or the driver refuses.
    pub fn begin(&self, buffers: &HostBuffers) -> Result<Vec<Tensor>> {
        #[cfg(feature = "cuda")]
        if let Some(lane) = &self.lane {
            return crate::backend::cuda::launch_uploads(lane, &buffers.tensors, &self.device);
        }
        let begin = |tensor: &Tensor| match tensor.elem_count() {
            // Metal makes no buffer of no bytes.
            0 => Tensor::zeros(tensor.shape(), tensor.dtype(), &self.device),
            _ => tensor.to_device(&self.device),
        };
        buffers.tensors.iter().map(begin).collect()
    }

    /// Waits until what was begun is done.
    ///
    /// # Errors
    /// When the transfer, or work before it, failed.
    pub fn end(&self) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Some(lane) = &self.lane {
            return lane.wait();
        }
        Ok(())
    }
}

/// A copy under way.
#[derive(Debug)]
pub struct HostCopy {
    /// Dropped, and so waited for, before the memory it writes to.
    #[cfg(feature = "cuda")]
    copied: Option<crate::backend::cuda::Copied>,
    buffers: HostBuffers,
}

impl HostCopy {
    /// Waits for the copy. Any thread may do this.
    ///
    /// # Errors
    /// When the copy, or work before it, failed.
    pub fn wait(self) -> Result<HostBuffers> {
        #[cfg(feature = "cuda")]
        if let Some(copied) = self.copied {
            copied.wait()?;
        }
        Ok(self.buffers)
    }
}

/// What was written is a copy that is done.
impl From<HostBuffers> for HostCopy {
    fn from(buffers: HostBuffers) -> Self {
        Self {
            #[cfg(feature = "cuda")]
            copied: None,
            buffers,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Copies of tensors of several dtypes are exact, and keep what they hold when the tensors change.
    fn copies_hold_what_was_there(device: &Device) {
        let numbers = Tensor::arange(0f32, 70_001.0, device).unwrap();
        let whole = numbers.affine(1.5, -3.0).unwrap();
        // A view of the middle: only that is copied.
        let view = whole.narrow(0, 257, 60_000).unwrap();
        let small = numbers.narrow(0, 0, 255).unwrap().to_dtype(DType::U8).unwrap();
        let none = Tensor::zeros((0, 3), DType::F32, device).unwrap();
        let tensors = [view.clone(), small.clone(), none];
        let like: Vec<_> =
            tensors.iter().map(|tensor| (tensor.dims().to_vec(), tensor.dtype())).collect();
        let mut buffers = HostBuffers::new(&like, device).unwrap();
        for round in 0..3 {
            let expected: Vec<f32> = view.force_contiguous().unwrap().to_vec1().unwrap();
            let copy = buffers.copy(&tensors).unwrap();
            // Behind the copy in the stream.
            crate::flat::accumulate(&view, &view.force_contiguous().unwrap(), 0.5).unwrap();
            buffers = copy.wait().unwrap();
            assert_eq!(buffers.tensors()[0].to_vec1::<f32>().unwrap(), expected, "round {round}");
            let bytes: Vec<u8> = buffers.tensors()[1].to_vec1().unwrap();
            assert_eq!(bytes, (0..255).collect::<Vec<u8>>());
            assert_eq!(buffers.tensors()[2].dims(), [0, 3]);
        }
        // In pieces.
        let whole: Vec<f32> = view.force_contiguous().unwrap().to_vec1().unwrap();
        let split = 12_345;
        for (start, length) in [(split, 60_000 - split), (0, split)] {
            buffers.write(0, start, &view.narrow(0, start, length).unwrap()).unwrap();
        }
        assert_eq!(buffers.tensors()[0].to_vec1::<f32>().unwrap(), whole);
        for (tensor, start) in [(0, 1), (1, 0), (3, 0)] {
            assert!(buffers.write(tensor, start, &view).is_err());
        }
        // A copy that nobody waits for ends before its memory is given back.
        drop(buffers.copy(&tensors).unwrap());
    }

    #[test]
    fn what_comes_in_pieces_is_whole_and_changes_nothing_else() {
        for (count, piece) in [(0, 4), (3, 4), (4, 4), (11, 4), (12, 4), (5, 1)] {
            let whole = Tensor::arange(0f32, 20.0, &Device::Cpu).unwrap();
            let from = whole.narrow(0, 2, count).unwrap();
            let to = Tensor::full(-1f32, 17, &Device::Cpu).unwrap();
            copy_in_pieces(&to, 3, &from, piece).unwrap();
            let place = |index: usize| match index {
                index if (3..3 + count).contains(&index) => (index - 3 + 2) as f32,
                _ => -1.0,
            };
            let expected: Vec<f32> = (0..17).map(place).collect();
            assert_eq!(to.to_vec1::<f32>().unwrap(), expected, "{count} by {piece}");
        }
    }

    /// Views come as they are, in their shapes.
    fn tensors_come_to_the_host(device: &Device) {
        let whole = Tensor::arange(0f32, 60.0, device).unwrap().reshape((3, 20)).unwrap();
        let none = Tensor::zeros((0, 3), DType::F32, device).unwrap();
        for tensor in [whole.narrow(1, 2, 7).unwrap(), whole.t().unwrap(), whole, none] {
            let found = on_the_host(&tensor).unwrap();
            assert!(found.device().is_cpu() && found.is_contiguous());
            assert_eq!(found.dims(), tensor.dims());
            crate::testing::assert_identical(&found, &crate::testing::here(&tensor));
        }
    }

    #[test]
    fn tensors_of_the_cpu_come_to_the_host() {
        tensors_come_to_the_host(&Device::Cpu);
    }

    #[cfg(feature = "cuda")]
    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_tensors_come_to_the_host() {
        tensors_come_to_the_host(&crate::testing::cuda());
    }

    #[cfg(feature = "metal")]
    #[test]
    #[ignore = "needs a Mac's GPU"]
    fn metal_tensors_come_to_the_host() {
        tensors_come_to_the_host(&crate::testing::metal());
    }

    #[test]
    fn copies_on_the_cpu_hold_what_was_there() {
        copies_hold_what_was_there(&Device::Cpu);
    }

    #[cfg(feature = "cuda")]
    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_copies_hold_what_was_there() {
        let device = crate::testing::cuda();
        copies_hold_what_was_there(&device);
    }

    /// What was kept comes back as it was, beside work that fills the device.
    fn uploads_bring_what_was_kept(device: &Device) {
        let numbers = Tensor::arange(0f32, 70_001.0, device).unwrap();
        let tensors = [
            numbers.affine(1.5, -3.0).unwrap(),
            numbers.narrow(0, 0, 255).unwrap().to_dtype(DType::U8).unwrap(),
            Tensor::zeros((0, 3), DType::F32, device).unwrap(),
        ];
        let like: Vec<_> =
            tensors.iter().map(|tensor| (tensor.dims().to_vec(), tensor.dtype())).collect();
        let kept = HostBuffers::new(&like, device).unwrap().copy(&tensors).unwrap().wait().unwrap();
        let uploads = Uploads::new(device).unwrap();
        let square = Tensor::ones((1024, 1024), DType::F32, device).unwrap();
        for _ in 0..3 {
            let brought = uploads.begin(&kept).unwrap();
            let product = square.matmul(&square).unwrap();
            uploads.end().unwrap();
            for (tensor, brought) in tensors.iter().zip(&brought) {
                assert_eq!((tensor.dims(), tensor.dtype()), (brought.dims(), brought.dtype()));
                assert!(brought.device().same_device(device));
                let numbers = |x: &Tensor| {
                    let x = x.to_dtype(DType::F32).unwrap().flatten_all().unwrap();
                    x.to_vec1::<f32>().unwrap()
                };
                assert_eq!(numbers(tensor), numbers(brought));
            }
            drop(product);
        }
    }

    #[test]
    fn uploads_to_the_cpu_bring_what_was_kept() {
        uploads_bring_what_was_kept(&Device::Cpu);
    }

    #[cfg(feature = "cuda")]
    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_uploads_bring_what_was_kept() {
        uploads_bring_what_was_kept(&crate::testing::cuda());
    }

    #[test]
    fn other_tensors_are_refused() {
        let like = [(vec![2, 3], DType::F32)];
        for wrong in [
            Tensor::zeros((3, 2), DType::F32, &Device::Cpu).unwrap(),
            Tensor::zeros((2, 3), DType::F64, &Device::Cpu).unwrap(),
            Tensor::zeros((3, 2), DType::F32, &Device::Cpu).unwrap().t().unwrap(),
        ] {
            assert!(HostBuffers::new(&like, &Device::Cpu).unwrap().copy(&[wrong]).is_err());
        }
        assert!(HostBuffers::new(&like, &Device::Cpu).unwrap().copy(&[]).is_err());
    }
}
