//! NCCL's library and those of its functions that are called, as `nccl.h` declares them.

use super::Result;
use candle_core::bail;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

/// Codes of `ncclResult_t`.
pub(super) const SUCCESS: c_int = 0;
pub(super) const IN_PROGRESS: c_int = 7;
/// `ncclSystemError`, `ncclInternalError` and `ncclRemoteError`: what it gives when a connection to another process fails.
pub(super) const OF_CONNECTIONS: [c_int; 3] = [2, 3, 6];
/// `ncclUint8`, `ncclFloat16`, `ncclFloat32` and `ncclBfloat16` of `ncclDataType_t`, `ncclSum` of `ncclRedOp_t`.
pub(super) const BYTE: c_int = 1;
pub(super) const FLOAT16: c_int = 6;
pub(super) const FLOAT32: c_int = 7;
pub(super) const BFLOAT16: c_int = 9;
pub(super) const SUM: c_int = 0;
/// `NCCL_UNIQUE_ID_BYTES`.
pub(super) const ID_BYTES: usize = 128;

/// The first version whose settings are [`Config`]: 2.17.
const OLDEST: c_int = 21700;
/// By the names that it is installed as.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// `ncclComm_t`.
pub(super) type Comm = *mut c_void;

/// `ncclUniqueId`, which is passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Id(pub [u8; ID_BYTES]);

/// `ncclConfig_t` of version 2.17, which later ones take by its size and version.
#[repr(C)]
pub(super) struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

impl Config {
    /// NCCL's defaults, but for calls that don't wait.
    pub(super) fn without_blocking() -> Self {
        const MAGIC: c_uint = 0xcafe_beef;
        const UNDEFINED: c_int = c_int::MIN;
        Self {
            size: size_of::<Self>(),
            magic: MAGIC,
            version: OLDEST as c_uint,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
        }
    }
}

type Code = c_int;

/// What is called of the library.
#[derive(Debug)]
pub(super) struct Library {
    get_version: unsafe extern "C" fn(*mut c_int) -> Code,
    get_error_string: unsafe extern "C" fn(Code) -> *const c_char,
    get_last_error: unsafe extern "C" fn(Comm) -> *const c_char,
    pub(super) get_unique_id: unsafe extern "C" fn(*mut Id) -> Code,
    pub(super) init_rank_config:
        unsafe extern "C" fn(*mut Comm, c_int, Id, c_int, *mut Config) -> Code,
    pub(super) get_async_error: unsafe extern "C" fn(Comm, *mut Code) -> Code,
    pub(super) all_reduce: unsafe extern "C" fn(
        *const c_void,
        *mut c_void,
        usize,
        c_int,
        c_int,
        Comm,
        *mut c_void,
    ) -> Code,
    pub(super) reduce_scatter: unsafe extern "C" fn(
        *const c_void,
        *mut c_void,
        usize,
        c_int,
        c_int,
        Comm,
        *mut c_void,
    ) -> Code,
    pub(super) all_gather:
        unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, Comm, *mut c_void) -> Code,
    pub(super) broadcast: unsafe extern "C" fn(
        *const c_void,
        *mut c_void,
        usize,
        c_int,
        c_int,
        Comm,
        *mut c_void,
    ) -> Code,
    pub(super) group_start: unsafe extern "C" fn() -> Code,
    pub(super) group_end: unsafe extern "C" fn() -> Code,
    pub(super) abort: unsafe extern "C" fn(Comm) -> Code,
    /// The functions are in it.
    _file: libloading::Library,
}

impl Library {
    /// The library, which is loaded when it is first asked for.
    pub(super) fn get() -> Result<&'static Self> {
        static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
        match LIBRARY.get_or_init(Self::load) {
            Ok(library) => Ok(library),
            Err(message) => bail!("metal-candle-kernels: nccl: {message}"),
        }
    }

    fn load() -> Result<Self, String> {
        let mut first = None;
        let mut open = |name: &&str| {
            // SAFETY: NCCL's library does nothing when it is loaded that others would notice.
            unsafe { libloading::Library::new(*name) }
                .map_err(|error| first.get_or_insert(error.to_string()).clone())
                .ok()
        };
        let Some(file) = NAMES.iter().find_map(&mut open) else {
            let why = first.map_or(String::new(), |first| format!(" ({first})"));
            return Err(format!(
                "{} was not found{why}; install NVIDIA's NCCL 2.17 or later (libnccl2, or the Python package \
                 nvidia-nccl-cu13), and name its folder in LD_LIBRARY_PATH if the system doesn't know it",
                NAMES[0]
            ));
        };
        /// SAFETY: `F` is the function's type, and it is not called once `file` is closed.
        unsafe fn find<F: Copy>(file: &libloading::Library, name: &CStr) -> Result<F, String> {
            match unsafe { file.get::<F>(name.to_bytes_with_nul()) } {
                Ok(symbol) => Ok(*symbol),
                Err(error) => {
                    Err(format!("{} has no {}: {error}", NAMES[0], name.to_string_lossy()))
                }
            }
        }
        // SAFETY: these are their types in `nccl.h`, and the file stays open in what this gives.
        let library = unsafe {
            Self {
                get_version: find(&file, c"ncclGetVersion")?,
                get_error_string: find(&file, c"ncclGetErrorString")?,
                get_last_error: find(&file, c"ncclGetLastError")?,
                get_unique_id: find(&file, c"ncclGetUniqueId")?,
                init_rank_config: find(&file, c"ncclCommInitRankConfig")?,
                get_async_error: find(&file, c"ncclCommGetAsyncError")?,
                all_reduce: find(&file, c"ncclAllReduce")?,
                reduce_scatter: find(&file, c"ncclReduceScatter")?,
                all_gather: find(&file, c"ncclAllGather")?,
                broadcast: find(&file, c"ncclBroadcast")?,
                group_start: find(&file, c"ncclGroupStart")?,
                group_end: find(&file, c"ncclGroupEnd")?,
                abort: find(&file, c"ncclCommAbort")?,
                _file: file,
            }
        };
        let mut version = 0;
        // SAFETY: the place is one for a number.
        let code = unsafe { (library.get_version)(&mut version) };
        if code != SUCCESS || version < OLDEST {
            return Err(format!(
                "{} has version {version}, expected {OLDEST} (2.17) or later",
                NAMES[0]
            ));
        }
        Ok(library)
    }

    /// NCCL's error, if this code is one, in its own words.
    pub(super) fn check(&self, what: &str, code: Code) -> Result<()> {
        if code == SUCCESS {
            return Ok(());
        }
        // SAFETY: NCCL gives texts that stay, of any code, and of the last error that this process had.
        let texts = unsafe {
            [(self.get_error_string)(code), (self.get_last_error)(std::ptr::null_mut())].map(
                |text| {
                    if text.is_null() { "".into() } else { CStr::from_ptr(text).to_string_lossy() }
                },
            )
        };
        let [name, last] = texts.map(|text| text.trim().to_string());
        let last = if last.is_empty() { last } else { format!(" ({last})") };
        bail!("metal-candle-kernels: nccl: {what} failed: {name}{last}")
    }
}
