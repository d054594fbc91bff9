//! Where the matrices of a model's layers lie between their uses: on the device, in the memory of the host, or in parts
//! on the GPUs of several processes. Those that lie elsewhere are brought to the device a layer at a time, the next one
//! while a layer is computed (as ZeRO does with parameters; Rajbhandari et al., 2019, arXiv:1910.02054).

use super::arrivals::{Arrivals, Transfers};
use super::layer::Layer;
use super::quantization::Quantization;
use super::tensor_parallel::TensorRank;
use super::weight::{Absent, FrozenWeights, Storage, WeightId, sample};
use crate::Result;
use candle_core::{DType, Device, Shape, Tensor};
use metal_candle_kernels::host::{HostBuffers, Uploads};
use metal_candle_kernels::quantized::{Quantized, Weight};
use std::fmt::Debug;
use std::sync::Arc;

/// Where the matrices of a model's layers lie. Norms, biases, the embedding and the head are always on the device.
#[derive(Debug, Clone, Default)]
pub enum Placement {
    /// On the device.
    #[default]
    Device,
    /// In the memory of the host, for a model that is larger than the device's; with CUDA in pinned memory.
    Host,
    /// Each of several processes has a part of every layer on its device, and of every weight where all are trained
    /// ([`Adapter::full`](crate::adapter::Adapter::full)). All of them make the same passes in the same order.
    Sharded(Arc<dyn Shards>),
    /// This is the part of a tensor-parallel rank, which an engine over all of them computes with: see
    /// [`parallel::tensor`](crate::parallel::tensor).
    TensorParallel(TensorRank),
}

/// How a model's weights are held.
#[derive(Debug, Clone, Default)]
pub struct Holding {
    /// What dense matrices are brought into.
    pub quantization: Option<Quantization>,
    /// Where matrices lie.
    pub placement: Placement,
}

impl From<Option<Quantization>> for Holding {
    fn from(quantization: Option<Quantization>) -> Self {
        Self { quantization, placement: Placement::Device }
    }
}

impl From<Quantization> for Holding {
    fn from(quantization: Quantization) -> Self {
        Some(quantization).into()
    }
}

/// Processes that put tensors together of which each has a part, and add up what belongs to such parts: one of each at a
/// time, which all begin and end in the same order.
pub trait Shards: Debug + Send + Sync {
    /// This process's number, from 0.
    fn rank(&self) -> usize;

    /// How many processes there are.
    fn size(&self) -> usize;

    /// Begins to put together the processes' `parts`, each `(n)`: for each a tensor `(size · n)` on the device with the
    /// parts by rank, which may be used from [`Self::end`] on. The parts stay until then.
    ///
    /// # Errors
    /// [`Error::Rank`](crate::Error::Rank) naming a process that is lost, and when the device has no room.
    fn begin(&self, parts: &[Tensor]) -> Result<Vec<Tensor>>;

    /// Waits until the parts that were begun with last are put together.
    ///
    /// # Errors
    /// As [`Self::begin`].
    fn end(&self) -> Result<()>;

    /// Begins to add up the processes' buffers `(size · n)` in f32 on the device: from [`Self::end_sum`] on the own part by
    /// rank has the sum, and anything is in the rest. Until then the buffer stays, and nobody else writes to it.
    ///
    /// # Errors
    /// As [`Self::begin`].
    fn begin_sum(&self, buffer: &Tensor) -> Result<()>;

    /// Waits until the sum that was begun last is done.
    ///
    /// # Errors
    /// As [`Self::begin`].
    fn end_sum(&self) -> Result<()>;
}

/// Where a matrix begins in the buffer of its layer: at multiples of this many bytes, which every kernel can read from.
const ALIGNMENT: usize = 256;

/// The matrices of all layers, away from the device, and how they come to it.
#[derive(Debug)]
pub(crate) struct Away(Arrivals<Layers>);

/// Where the matrices of all layers are.
#[derive(Debug)]
struct Layers {
    home: Home,
    /// Those of each layer.
    matrices: Vec<Vec<Packed>>,
}

/// Where each layer's buffers are, one for each dtype: whole in the memory of the host, or a part of each.
#[derive(Debug)]
enum Home {
    Host { uploads: Uploads, device: Device, layers: Vec<HostBuffers> },
    Shards { shards: Arc<dyn Shards>, layers: Vec<Vec<Tensor>> },
}

impl Home {
    /// How many parts a buffer is cut into.
    fn parts(&self) -> usize {
        match self {
            Self::Host { .. } => 1,
            Self::Shards { shards, .. } => shards.size(),
        }
    }

    /// Keeps the buffers of the next layer.
    fn keep(&mut self, buffers: Vec<Tensor>) -> Result<()> {
        match self {
            Self::Host { device, layers, .. } => {
                let like: Vec<_> =
                    buffers.iter().map(|it| (it.dims().to_vec(), it.dtype())).collect();
                layers.push(HostBuffers::new(&like, device)?.copy(&buffers)?.wait()?);
            }
            Self::Shards { shards, layers } => {
                let part = |buffer: Tensor| {
                    let length = buffer.elem_count() / shards.size();
                    buffer.narrow(0, shards.rank() * length, length)?.force_contiguous()
                };
                layers.push(buffers.into_iter().map(part).collect::<candle_core::Result<_>>()?);
            }
        }
        Ok(())
    }

    /// Begins to bring the buffers of a layer to the device.
    fn begin(&self, layer: usize) -> Result<Vec<Tensor>> {
        match self {
            Self::Host { uploads, layers, .. } => Ok(uploads.begin(of_layer(layers, layer)?)?),
            Self::Shards { shards, layers } => shards.begin(of_layer(layers, layer)?),
        }
    }

    /// Waits for them.
    fn end(&self) -> Result<()> {
        match self {
            Self::Host { uploads, .. } => Ok(uploads.end()?),
            Self::Shards { shards, .. } => shards.end(),
        }
    }
}

fn of_layer<T>(layers: &[T], layer: usize) -> candle_core::Result<&T> {
    let missing = || candle_core::Error::msg(format!("there is no layer {layer}"));
    layers.get(layer).ok_or_else(missing)
}

/// A matrix within its layer's buffers.
#[derive(Debug)]
struct Packed {
    id: WeightId,
    form: Form,
    pieces: Vec<Piece>,
}

#[derive(Debug)]
enum Form {
    Dense,
    /// Without its numbers.
    Quantized(Quantized),
}

/// One tensor of a matrix.
#[derive(Debug)]
struct Piece {
    buffer: usize,
    /// In elements.
    start: usize,
    shape: Shape,
}

/// A layer's matrices on the device.
pub(crate) type Brought = Vec<(WeightId, Storage)>;

impl Away {
    /// None yet; nothing where matrices are to stay on the device.
    pub fn new(placement: &Placement, device: &Device) -> Result<Option<Self>> {
        let home = match placement {
            Placement::Device | Placement::TensorParallel(_) => return Ok(None),
            Placement::Host => Home::Host {
                uploads: Uploads::new(device)?,
                device: device.clone(),
                layers: Vec::new(),
            },
            Placement::Sharded(shards) => {
                Home::Shards { shards: shards.clone(), layers: Vec::new() }
            }
        };
        Ok(Some(Self(Arrivals::new(Layers { home, matrices: Vec::new() }))))
    }

    /// Takes the matrices of the next layer.
    pub fn take(&mut self, layer: &Layer, weights: &mut FrozenWeights) -> Result<()> {
        let Layers { home, matrices: layers } = &mut self.0.transfers;
        let number = layers.len();
        let mut buffers: Vec<Buffer> = Vec::new();
        let mut matrices = Vec::new();
        for linear in layer.matrices() {
            let id = linear.weight;
            let held = weights.get(id)?;
            let mut pieces = Vec::new();
            let mut pack = |tensor: &Tensor| pieces.push(Buffer::add(&mut buffers, tensor));
            let (form, bytes) = match held {
                Weight::Dense(tensor) => {
                    pack(tensor);
                    (Form::Dense, tensor.elem_count() * tensor.dtype().size_in_bytes())
                }
                Weight::Quantized(quantized) => {
                    let empty = quantized.map(|tensor| {
                        pack(tensor);
                        Tensor::zeros(0, tensor.dtype(), &Device::Cpu)
                    })?;
                    (Form::Quantized(empty), quantized.size_in_bytes())
                }
            };
            let is_quantized = matches!(form, Form::Quantized(_));
            let sample = sample(&held)?;
            let shape = weights.shape(id);
            matrices.push(Packed { id, form, pieces });
            let absent = Absent { layer: number, shape, is_quantized, bytes, sample };
            weights.set(id, Storage::Absent(Arc::new(absent)));
        }
        let buffers = buffers.into_iter().map(|buffer| buffer.joined(home.parts()));
        let buffers = buffers.collect::<candle_core::Result<Vec<_>>>()?;
        home.keep(buffers)?;
        layers.push(matrices);
        Ok(())
    }

    /// The processes that have parts, where they do.
    pub fn shards(&self) -> Option<&Arc<dyn Shards>> {
        match &self.0.transfers.home {
            Home::Host { .. } => None,
            Home::Shards { shards, .. } => Some(shards),
        }
    }

    /// The matrices of a layer, on the device; those of `next` begin to come.
    pub fn bring(&self, layer: usize, next: Option<usize>) -> Result<Arc<Brought>> {
        self.0.bring(layer, next)
    }
}

impl Transfers for Layers {
    type Piece = usize;
    type Coming = Vec<Tensor>;
    type Here = Brought;

    fn begin(&self, layer: usize) -> Result<Vec<Tensor>> {
        self.home.begin(layer)
    }

    fn end(&self) -> Result<()> {
        self.home.end()
    }

    fn unpack(&self, layer: usize, buffers: Vec<Tensor>) -> Result<Brought> {
        let matrices = of_layer(&self.matrices, layer)?.iter().map(|packed| {
            let mut pieces = packed.pieces.iter();
            let mut next = || match pieces.next() {
                Some(piece) => piece.of(&buffers),
                None => Err(candle_core::Error::msg("a matrix has more tensors than were packed")),
            };
            let storage = match &packed.form {
                Form::Dense => Storage::Dense(next()?),
                Form::Quantized(form) => Storage::Quantized(Arc::new(form.map(|_| next())?)),
            };
            Ok((packed.id, storage))
        });
        matrices.collect()
    }
}

/// Tensors of one dtype that become one.
struct Buffer {
    dtype: DType,
    /// In elements.
    length: usize,
    tensors: Vec<Tensor>,
}

impl Buffer {
    /// Adds a tensor to the buffer of its dtype.
    fn add(buffers: &mut Vec<Self>, tensor: &Tensor) -> Piece {
        let dtype = tensor.dtype();
        let index = match buffers.iter().position(|buffer| buffer.dtype == dtype) {
            Some(index) => index,
            None => {
                buffers.push(Self { dtype, length: 0, tensors: Vec::new() });
                buffers.len() - 1
            }
        };
        let buffer = &mut buffers[index];
        let piece = Piece { buffer: index, start: buffer.length, shape: tensor.shape().clone() };
        let aligned = ALIGNMENT / dtype.size_in_bytes();
        buffer.length += tensor.elem_count().next_multiple_of(aligned);
        buffer.tensors.push(tensor.clone());
        piece
    }

    /// One tensor `(n)`, which can be cut into so many parts.
    fn joined(self, parts: usize) -> candle_core::Result<Tensor> {
        let aligned = ALIGNMENT / self.dtype.size_in_bytes();
        let length = self.length.next_multiple_of(aligned * parts);
        let device = self.tensors.first().map_or(Device::Cpu, |tensor| tensor.device().clone());
        let whole = Tensor::zeros(length, self.dtype, &device)?;
        let mut start = 0;
        for tensor in &self.tensors {
            whole.slice_set(&tensor.flatten_all()?.contiguous()?, 0, start)?;
            start += tensor.elem_count().next_multiple_of(aligned);
        }
        Ok(whole)
    }
}

impl Piece {
    fn of(&self, buffers: &[Tensor]) -> candle_core::Result<Tensor> {
        let missing = || candle_core::Error::msg("a layer has fewer buffers than were packed");
        let buffer = buffers.get(self.buffer).ok_or_else(missing)?;
        buffer.narrow(0, self.start, self.shape.elem_count())?.reshape(&self.shape)
    }
}
