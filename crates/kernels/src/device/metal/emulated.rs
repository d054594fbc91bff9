//! Stands in for a device in tests: kernels are run by the emulator, on tensors of the CPU.

use super::source::source;
use super::{Argument, Array, Dispatch};
use crate::devices::MetalMatmul;
use candle_core::{
    CpuStorage, DType, Device, InplaceOp1, Layout, Result, Shape, Storage, Tensor, bail,
};
use half::{bf16, f16};
use metal_emulator::{Library, Mode, Source};
use std::cell::RefCell;
use std::path::Path;
use std::sync::{Arc, LazyLock, OnceLock};

/// What a test runs kernels with.
#[derive(Clone)]
pub(crate) struct Emulator {
    pub(crate) library: Arc<Library>,
    pub(crate) seed: u64,
    /// Threads that a threadgroup may have.
    pub(crate) most_threads: usize,
    /// Who makes the large products of linear layers.
    pub(crate) matmul: MetalMatmul,
}

impl Emulator {
    /// All kernels as a mode compiles them; `None`, said once, where that can't be done.
    pub(crate) fn open(mode: Mode) -> Option<Emulator> {
        // Where tests/metal_emulator.rs has it too, so that it is compiled once for both.
        static SOURCE: LazyLock<Source> = LazyLock::new(|| {
            let path = Path::new(env!("OUT_DIR")).join("metal-candle-kernels.metal");
            std::fs::write(&path, source()).unwrap();
            Source::file(path)
        });
        static EMULATORS: [OnceLock<Option<Emulator>>; 3] = [const { OnceLock::new() }; 3];
        let open = || {
            metal_emulator::available().then(|| {
                let library = Arc::new(SOURCE.compile(mode).unwrap());
                let matmul = MetalMatmul::Fused;
                Emulator { library, seed: 0, most_threads: 1024, matmul }
            })
        };
        EMULATORS[mode as usize].get_or_init(open).clone()
    }
}

thread_local! {
    static EMULATOR: RefCell<Option<Emulator>> = const { RefCell::new(None) };
}

/// What `task` gives when Metal's operations compute on tensors of the CPU.
pub(crate) fn emulate<R>(emulator: Emulator, task: impl FnOnce() -> R) -> R {
    EMULATOR.set(Some(emulator));
    let result = task();
    EMULATOR.set(None);
    result
}

/// Whether a test asked for the emulator.
pub(crate) fn computes(_: &Tensor) -> bool {
    EMULATOR.with_borrow(Option::is_some)
}

#[derive(Clone)]
pub(super) struct Buffer;

pub(super) struct Pipeline {
    name: &'static str,
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

    pub(super) fn pipeline(&self, name: &'static str) -> Result<Pipeline> {
        Ok(Pipeline { name, most_threads: self.emulator.most_threads })
    }

    pub(super) fn matmul(&self) -> MetalMatmul {
        self.emulator.matmul
    }

    /// What Candle's and Apple's kernels do, by Candle on the CPU.
    pub(super) fn multiply(
        &self,
        [rows, columns, inner]: [usize; 3],
        [(left, left_turned), (right, right_turned)]: [(&Array, bool); 2],
        to: &Array,
    ) -> Result<()> {
        let matrix = |array: &Array, turned: bool, rows: usize, columns: usize| {
            let tensor = array.tensor.to_dtype(DType::F64)?;
            if turned {
                tensor.reshape((columns, rows))?.t()
            } else {
                tensor.reshape((rows, columns))
            }
        };
        let left = matrix(left, left_turned, rows, inner)?;
        let product = left.matmul(&matrix(right, right_turned, inner, columns)?)?;
        to.tensor.inplace_op1(&Write(bytes(&product.to_dtype(to.dtype)?)))
    }

    pub(crate) fn run(&self, dispatches: &[Dispatch]) -> Result<()> {
        for Dispatch { pipeline, arguments, groups, threads } in dispatches {
            if groups.contains(&0) {
                continue;
            }
            let kernel = self.emulator.library.kernel(pipeline.name).unwrap();
            let mut run = kernel.dispatch().seed(self.emulator.seed);
            for (index, argument) in (0..).zip(*arguments) {
                run = match *argument {
                    Argument::Input(array) | Argument::Output(array) => {
                        run.buffer_at::<u8>(index, &bytes(&array.tensor), array.offset)
                    }
                    Argument::U32(value) => run.value(index, value),
                    Argument::U64(value) => run.value(index, value),
                    Argument::F32(value) => run.value(index, value),
                    Argument::U32s(values) => run.buffer(index, values),
                    Argument::F32s(values) => run.buffer(index, values),
                    Argument::U64s(values) => run.buffer(index, values),
                };
            }
            let size = [*threads as u32, 1, 1];
            let found = run.threadgroups(groups.map(|count| count as u32), size).unwrap();
            for (index, argument) in (0..).zip(*arguments) {
                if let Argument::Output(array) = argument
                    && array.tensor.elem_count() > 0
                {
                    array.tensor.inplace_op1(&Write(found.read::<u8>(index).unwrap()))?;
                }
            }
        }
        Ok(())
    }
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
