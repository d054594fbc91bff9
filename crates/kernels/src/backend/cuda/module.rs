//! The compiled kernels of an operation, loaded when they are first used, and their launch.

use super::Cuda;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::sys::CUfunction_attribute_enum::{
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
    CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
};
use candle_core::cuda_backend::cudarc::driver::sys::{
    CUlaunchAttribute, CUlaunchAttributeID, CUlaunchConfig, cuLaunchKernelEx,
};
use candle_core::cuda_backend::cudarc::driver::{
    CudaFunction, CudaModule, CudaStream, DeviceRepr, result,
};
use candle_core::cuda_backend::cudarc::nvrtc::Ptx;
use candle_core::{Result, bail};
use std::ffi::c_void;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, RwLock};

/// The kernels of one operation, embedded in the binary.
pub(crate) struct Module {
    image: &'static [u8],
    loaded: RwLock<Loaded>,
}

struct Loaded {
    /// With the ordinals of their devices.
    modules: Vec<(usize, Arc<CudaModule>)>,
    /// There are few: a search that compares addresses of names is faster than one that reads them.
    kernels: Vec<(usize, &'static str, Kernel)>,
}

#[derive(Clone)]
struct Kernel {
    function: Arc<CudaFunction>,
    /// Whether the device can start it while what comes before still runs.
    overlaps: bool,
    /// The most shared memory so far of a launch that prefers the cache; negative before there is one.
    most_shared: Arc<AtomicI64>,
}

/// The kernels of the operation in the folder of this name.
macro_rules! module {
    ($name:literal) => {
        $crate::backend::cuda::Module::new(include_bytes!(concat!(
            env!("OUT_DIR"),
            "/",
            $name,
            ".fatbin"
        )))
    };
}
pub(crate) use module;

/// The kernel `$name` for elements of dtype `$dtype`.
macro_rules! by_dtype {
    ($name:literal, $dtype:expr) => {
        $crate::backend::kernel_name!("CUDA", $name, $dtype)
    };
}
pub(crate) use by_dtype;

impl Module {
    pub(crate) const fn new(image: &'static [u8]) -> Self {
        let loaded = Loaded { modules: Vec::new(), kernels: Vec::new() };
        Module { image, loaded: RwLock::new(loaded) }
    }

    fn kernel(&self, cuda: &Cuda, name: &'static str, shared: u32) -> Result<Kernel> {
        let context = cuda.stream.context();
        let ordinal = context.ordinal();
        if let Ok(loaded) = self.loaded.read() {
            let found = loaded.kernels.iter().find(|(device, known, _)| {
                *device == ordinal && std::ptr::eq(known.as_ptr(), name.as_ptr())
            });
            if let Some((_, _, kernel)) = found {
                return Ok(kernel.clone());
            }
        }
        let Ok(mut loaded) = self.loaded.write() else {
            bail!("metal-candle-kernels: another thread failed while it loaded kernels")
        };
        let known = loaded.modules.iter().find(|(device, _)| *device == ordinal);
        let module = match known.map(|(_, module)| module.clone()) {
            Some(module) => module,
            None if self.image.is_empty() => bail!(
                "metal-candle-kernels: the program was built without kernels (METAL_CANDLE_CUDA_ARCHITECTURES=none)"
            ),
            None => {
                let module = context.load_module(Ptx::from_binary(self.image.to_vec())).w()?;
                loaded.modules.push((ordinal, module.clone()));
                module
            }
        };
        let function = module.load_function(name).w()?;
        if shared > 0 {
            // Without asking, a kernel has 48 KiB at most.
            let fixed = function.get_attribute(CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES).w()?;
            let most = cuda.most_shared_memory()? as i32 - fixed;
            function.set_attribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, most).w()?;
        }
        let (major, _) = context.compute_capability().w()?;
        let kernel = Kernel {
            function: Arc::new(function),
            overlaps: major >= 9,
            most_shared: Arc::new(AtomicI64::new(-1)),
        };
        loaded.kernels.push((ordinal, name, kernel.clone()));
        Ok(kernel)
    }

    /// Prepares a launch of the kernel `name` with `shared` bytes of shared memory beside what it declares;
    /// a kernel that is ever given more than 48 KiB is given some the first time.
    pub(crate) fn launch(
        &self,
        cuda: &Cuda,
        name: &'static str,
        grid: (u32, u32, u32),
        block: u32,
        shared: u32,
    ) -> Result<Launch> {
        Ok(Launch {
            kernel: self.kernel(cuda, name, shared)?,
            stream: cuda.stream.clone(),
            grid,
            block: (block, 1, 1),
            shared,
            overlapping: false,
            cooperative: false,
        })
    }
}

/// A kernel about to be launched.
pub(crate) struct Launch {
    kernel: Kernel,
    stream: Arc<CudaStream>,
    grid: (u32, u32, u32),
    block: (u32, u32, u32),
    shared: u32,
    overlapping: bool,
    cooperative: bool,
}

/// Arguments that a kernel has at most.
const MOST_ARGUMENTS: usize = 48;

/// The arguments of a launch, in order.
pub(crate) struct Arguments<'a> {
    pointers: [*mut c_void; MOST_ARGUMENTS],
    count: usize,
    borrowed: PhantomData<&'a ()>,
}

impl<'a> Arguments<'a> {
    /// Adds an argument, which the launch copies.
    pub(crate) fn arg<T: DeviceRepr>(&mut self, argument: &'a T) -> &mut Self {
        self.pointers[self.count] = std::ptr::from_ref(argument).cast_mut().cast();
        self.count += 1;
        self
    }
}

impl Launch {
    /// The kernel, which has a `follow_previous`, may start while what comes before it still runs
    /// (programmatic dependent launch).
    pub(crate) fn overlapping(mut self) -> Launch {
        self.overlapping = self.kernel.overlaps;
        self
    }

    /// The cache is to have all of the memory that it shares with shared memory but for what `blocks` blocks of the kernel
    /// need at most. Otherwise a multiprocessor keeps what a kernel before had, and decoding by bf16 weights took up to 13 %
    /// longer.
    pub(crate) fn preferring_cache(self, cuda: &Cuda, blocks: usize) -> Result<Launch> {
        let shared = i64::from(self.shared);
        if self.kernel.most_shared.fetch_max(shared, Ordering::Relaxed) < shared {
            // Beside what a block asks for, it has a KiB.
            let needed = if shared == 0 { 0 } else { blocks * (self.shared as usize + 1024) };
            let percent = (100 * needed).div_ceil(cuda.shared_memory_at_once()?).min(100);
            let attribute = CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
            self.kernel.function.set_attribute(attribute, percent as i32).w()?;
        }
        Ok(self)
    }

    /// The blocks of the kernel, all of which have to fit on the device at once, wait for each other.
    pub(crate) fn cooperative(mut self) -> Launch {
        self.cooperative = true;
        self
    }

    /// Launches with the arguments that `push` gives; nothing when the grid is empty.
    ///
    /// # Safety
    /// The arguments have to be those of the kernel in number, order and size, and its accesses within
    /// memory that stays allocated until later work of the stream.
    pub(crate) unsafe fn with<'a>(&'a self, push: impl FnOnce(&mut Arguments<'a>)) -> Result<()> {
        let (x, y, z) = self.grid;
        if x == 0 || y == 0 || z == 0 {
            return Ok(());
        }
        let mut arguments = Arguments {
            pointers: [std::ptr::null_mut(); MOST_ARGUMENTS],
            count: 0,
            borrowed: PhantomData,
        };
        push(&mut arguments);
        self.stream.context().bind_to_thread().w()?;
        let given = &mut arguments.pointers[..arguments.count];
        let (function, stream) = (self.kernel.function.cu_function(), self.stream.cu_stream());
        if self.overlapping {
            let (block_x, block_y, block_z) = self.block;
            // SAFETY: all bits zero are a value of these structs of C.
            let mut attribute: CUlaunchAttribute = unsafe { std::mem::zeroed() };
            attribute.id =
                CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            attribute.value.programmaticStreamSerializationAllowed = 1;
            let configuration = CUlaunchConfig {
                gridDimX: x,
                gridDimY: y,
                gridDimZ: z,
                blockDimX: block_x,
                blockDimY: block_y,
                blockDimZ: block_z,
                sharedMemBytes: self.shared,
                hStream: stream,
                attrs: &raw mut attribute,
                numAttrs: 1,
            };
            let (pointers, extra) = (given.as_mut_ptr(), std::ptr::null_mut());
            // SAFETY: as the caller promises; the kernel waits for what came before.
            return unsafe { cuLaunchKernelEx(&configuration, function, pointers, extra) }
                .result()
                .w();
        }
        if self.cooperative {
            let (grid, block, shared) = (self.grid, self.block, self.shared);
            // SAFETY: as the caller promises.
            return unsafe {
                result::launch_cooperative_kernel(function, grid, block, shared, stream, given)
            }
            .w();
        }
        // SAFETY: as the caller promises.
        unsafe {
            result::launch_kernel(function, self.grid, self.block, self.shared, stream, given)
        }
        .w()
    }
}
