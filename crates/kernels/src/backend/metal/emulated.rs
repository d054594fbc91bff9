//! Stands in for a device in tests: kernels are run by an emulator, on tensors of the CPU.

use super::{Argument, Array, Constant, Dispatch, Kernel};
use crate::devices::MetalMatmul;
use candle_core::{
    CpuStorage, DType, Device, InplaceOp1, Layout, Result, Shape, Storage, Tensor, bail,
};
use half::{bf16, f16};
use std::cell::RefCell;
use std::sync::Arc;

/// Runs a kernel, and gives what the buffers hold then that it writes, in their order.
pub type Run = dyn Fn(&Launch) -> Vec<Vec<u8>> + Send + Sync;

/// What runs kernels in place of a device.
#[derive(Clone)]
pub struct Emulator {
    /// Runs kernels.
    pub run: Arc<Run>,
    /// The order of the threads.
    pub seed: u64,
    /// Threads that a threadgroup may have.
    pub most_threads: usize,
    /// Who makes the large products of linear layers. Candle's and Apple's are made by Candle on the CPU.
    pub matmul: MetalMatmul,
}

/// A kernel that is to be run.
#[derive(Debug)]
pub struct Launch<'a> {
    /// Its name in the text of all kernels.
    pub kernel: &'static str,
    /// Its function constants, and their indices.
    pub constants: &'a [(usize, Constant)],
    /// What is bound.
    pub buffers: Vec<Bound>,
    /// Threadgroups.
    pub groups: [u32; 3],
    /// Threads of a threadgroup.
    pub threads: u32,
    /// The order of the threads, [`Emulator::seed`].
    pub seed: u64,
}

/// A buffer, or a value as the bytes of one.
#[derive(Debug)]
pub struct Bound {
    /// Which of the kernel's buffers it is.
    pub index: u32,
    /// All of its bytes.
    pub bytes: Vec<u8>,
    /// Bytes before the kernel's first.
    pub offset: usize,
    /// Whether the kernel writes it.
    pub written: bool,
}

thread_local! {
    static EMULATOR: RefCell<Option<Emulator>> = const { RefCell::new(None) };
}

/// What `task` gives when this thread's operations on tensors of the CPU are computed as on a Metal device,
/// by kernels that `emulator` runs. An operation of this crate that is left to the CPU is an error then.
pub fn emulate<R>(emulator: Emulator, task: impl FnOnce() -> R) -> R {
    /// Takes the emulator away, also from a task that panics.
    struct End;
    impl Drop for End {
        fn drop(&mut self) {
            EMULATOR.set(None);
        }
    }
    let _end = End;
    EMULATOR.set(Some(emulator));
    task()
}

/// Whether a test asked for the emulator.
pub(crate) fn computes(_: &Tensor) -> bool {
    is_emulating()
}

/// Whether this thread's tensors stand for those of a Metal device.
pub(crate) fn is_emulating() -> bool {
    EMULATOR.with_borrow(Option::is_some)
}

#[derive(Clone)]
pub(super) struct Buffer;

pub(super) struct Pipeline {
    name: &'static str,
    constants: Box<[(usize, Constant)]>,
    most_threads: usize,
}

impl Pipeline {
    pub(super) fn max_total_threads_per_threadgroup(&self) -> usize {
        self.most_threads
    }
}

/// A kernel that is made for so many threads takes them however few others take.
pub(super) fn takes(_: &Pipeline, _: usize) -> bool {
    true
}

#[derive(Clone)]
pub(crate) struct Metal {
    emulator: Emulator,
}

impl Metal {
    pub(crate) fn of(_: &Tensor) -> Result<Metal> {
        match EMULATOR.with_borrow(Clone::clone) {
            Some(emulator) => Ok(Metal { emulator }),
            None => bail!("there is no emulator"),
        }
    }

    pub(crate) fn strided(&self, tensor: &Tensor) -> Result<Array> {
        let (tensor, dtype) = (tensor.clone(), tensor.dtype());
        let offset = tensor.layout().start_offset() * dtype.size_in_bytes();
        Ok(Array { buffer: Buffer, offset, dtype, tensor })
    }

    /// Floats are NaN until they are written.
    pub(crate) fn empty(&self, shape: impl Into<Shape>, dtype: DType) -> Result<Array> {
        let shape = shape.into();
        let tensor = if dtype.is_float() {
            Tensor::full(f32::NAN, shape, &Device::Cpu)?.to_dtype(dtype)?
        } else {
            Tensor::zeros(shape, dtype, &Device::Cpu)?
        };
        self.strided(&tensor)
    }

    pub(super) fn pipeline(&self, Kernel { name, constants }: Kernel) -> Result<Pipeline> {
        let most_threads = self.emulator.most_threads;
        Ok(Pipeline { name, constants: constants.into(), most_threads })
    }

    pub(super) fn matmul(&self) -> MetalMatmul {
        self.emulator.matmul
    }

    /// What Candle's and Apple's kernels do, by Candle on the CPU.
    pub(super) fn multiply(
        &self,
        [rows, columns, inner]: [usize; 3],
        [(left, left_transposed), (right, right_transposed)]: [(&Array, bool); 2],
        to: &Array,
    ) -> Result<()> {
        let matrix = |array: &Array, transposed: bool, rows: usize, columns: usize| {
            let tensor = array.tensor.to_dtype(DType::F64)?;
            if transposed {
                tensor.reshape((columns, rows))?.t()
            } else {
                tensor.reshape((rows, columns))
            }
        };
        let left = matrix(left, left_transposed, rows, inner)?;
        let product = left.matmul(&matrix(right, right_transposed, inner, columns)?)?;
        to.tensor.inplace_op1(&Write(bytes(&product.to_dtype(to.dtype)?)))
    }

    pub(crate) fn run(&self, dispatches: &[Dispatch]) -> Result<()> {
        for Dispatch { pipeline, arguments, groups, threads } in dispatches {
            if groups.contains(&0) {
                continue;
            }
            let bound =
                (0..).zip(*arguments).filter_map(|(index, argument)| bound(index, argument));
            let launch = Launch {
                kernel: pipeline.name,
                constants: &pipeline.constants,
                buffers: bound.collect(),
                groups: groups.map(|count| count as u32),
                threads: *threads as u32,
                seed: self.emulator.seed,
            };
            let mut found = (self.emulator.run)(&launch).into_iter();
            for argument in *arguments {
                if let Argument::Output(array) = argument {
                    let Some(bytes) = found.next() else { bail!("the emulator gave too little") };
                    if array.tensor.elem_count() > 0 {
                        array.tensor.inplace_op1(&Write(bytes))?;
                    }
                }
            }
        }
        Ok(())
    }
}

/// As an emulator takes it.
fn bound(index: u32, argument: &Argument) -> Option<Bound> {
    let value = |bytes: Vec<u8>| Bound { index, bytes, offset: 0, written: false };
    let array = |array: &Array, written: bool| {
        let (bytes, offset) = (bytes(&array.tensor), array.offset);
        Bound { index, bytes, offset, written }
    };
    Some(match argument {
        Argument::Input(of) => array(of, false),
        Argument::Output(of) => array(of, true),
        Argument::Absent => return None,
        Argument::U32(number) => value(number.to_le_bytes().into()),
        Argument::U64(number) => value(number.to_le_bytes().into()),
        Argument::F32(number) => value(number.to_le_bytes().into()),
        Argument::U32s(numbers) => value(numbers.iter().flat_map(|n| n.to_le_bytes()).collect()),
        Argument::F32s(numbers) => value(numbers.iter().flat_map(|n| n.to_le_bytes()).collect()),
        Argument::U64s(numbers) => value(numbers.iter().flat_map(|n| n.to_le_bytes()).collect()),
    })
}

/// All bytes that a tensor is a part of.
fn bytes(tensor: &Tensor) -> Vec<u8> {
    let (storage, _) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cpu(CpuStorage::U8(numbers)) => numbers.clone(),
        Storage::Cpu(CpuStorage::U32(numbers)) => {
            numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
        }
        Storage::Cpu(CpuStorage::F32(numbers)) => {
            numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
        }
        Storage::Cpu(CpuStorage::F16(numbers)) => {
            numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
        }
        Storage::Cpu(CpuStorage::BF16(numbers)) => {
            numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
        }
        _ => panic!("no buffer of these tensors"),
    }
}

/// Puts bytes into all that a tensor is a part of.
struct Write(Vec<u8>);

impl InplaceOp1 for Write {
    fn name(&self) -> &'static str {
        "write"
    }
    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
        let (halves, words) = (self.0.as_chunks::<2>().0, self.0.as_chunks::<4>().0);
        match storage {
            CpuStorage::U8(numbers) => numbers.copy_from_slice(&self.0),
            CpuStorage::U32(numbers) => {
                *numbers = words.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
            }
            CpuStorage::F32(numbers) => {
                *numbers = words.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
            }
            CpuStorage::F16(numbers) => {
                *numbers = halves.iter().map(|bytes| f16::from_le_bytes(*bytes)).collect();
            }
            CpuStorage::BF16(numbers) => {
                *numbers = halves.iter().map(|bytes| bf16::from_le_bytes(*bytes)).collect();
            }
            _ => panic!("no buffer of these tensors"),
        }
        Ok(())
    }
}
