//! How much memory a program takes: what tensors take on a GPU, or else what the process holds as the
//! operating system counts it, and how much there is.
//!
//! Linux: `VmRSS` and `VmHWM` of `/proc/self/status` (proc_pid_status(5)) and `MemAvailable` of
//! `/proc/meminfo` (proc_meminfo(5)). macOS: the resident
//! size of `proc_pid_rusage` and the `ru_maxrss` of `getrusage(2)`. Elsewhere nothing is known.

use crate::Result;
use candle_core::Device;
use metal_candle_kernels::devices;

/// The most memory a model on `device` has taken so far, in bytes: that of its tensors on a GPU, the
/// resident memory of the process on the CPU; `None` where the system does not say.
///
/// # Errors
/// When the device's driver doesn't answer.
pub fn peak_bytes(device: &Device) -> Result<Option<u64>> {
    Ok(match devices::memory(device)? {
        Some(memory) => Some(memory.peak),
        None => peak_resident_bytes(),
    })
}

/// The resident memory of this process now, in bytes; `None` where the system does not say.
pub fn resident_bytes() -> Option<u64> {
    system::resident_bytes()
}

/// The memory that processes can still take without others being swapped out, in bytes; `None` where the
/// system does not say.
pub fn available_bytes() -> Option<u64> {
    system::available_bytes()
}

/// The most resident memory this process has had so far, in bytes; `None` where the system does
/// not say.
pub fn peak_resident_bytes() -> Option<u64> {
    system::peak_resident_bytes()
}

#[cfg(target_os = "linux")]
mod system {
    pub fn resident_bytes() -> Option<u64> {
        super::status_bytes(&std::fs::read_to_string("/proc/self/status").ok()?, "VmRSS")
    }

    pub fn peak_resident_bytes() -> Option<u64> {
        super::status_bytes(&std::fs::read_to_string("/proc/self/status").ok()?, "VmHWM")
    }

    pub fn available_bytes() -> Option<u64> {
        super::status_bytes(&std::fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable")
    }
}

/// The value in bytes of a line such as `VmHWM:     1234 kB`.
#[cfg(target_os = "linux")]
fn status_bytes(status: &str, key: &str) -> Option<u64> {
    let value = status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    let kibibytes: u64 = value.trim().strip_suffix("kB")?.trim_end().parse().ok()?;
    kibibytes.checked_mul(1024)
}

#[cfg(target_os = "macos")]
mod system {
    use std::mem::MaybeUninit;

    pub fn resident_bytes() -> Option<u64> {
        let process = libc::c_int::try_from(std::process::id()).ok()?;
        let mut usage = MaybeUninit::<libc::rusage_info_v2>::zeroed();
        // SAFETY: the buffer has the type that RUSAGE_INFO_V2 asks for and lives over the call.
        let code = unsafe {
            libc::proc_pid_rusage(process, libc::RUSAGE_INFO_V2, usage.as_mut_ptr().cast())
        };
        // SAFETY: zeroed integers are valid, and the call has filled them when it returns 0.
        (code == 0).then(|| unsafe { usage.assume_init() }.ri_resident_size)
    }

    pub fn peak_resident_bytes() -> Option<u64> {
        let mut usage = MaybeUninit::<libc::rusage>::zeroed();
        // SAFETY: the pointer is to a whole `rusage` that lives over the call.
        let code = unsafe { libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr()) };
        // SAFETY: zeroed integers are valid, and the call has filled them when it returns 0.
        // macOS counts ru_maxrss in bytes, where other systems count kibibytes.
        (code == 0)
            .then(|| unsafe { usage.assume_init() }.ru_maxrss)
            .and_then(|b| b.try_into().ok())
    }

    pub fn available_bytes() -> Option<u64> {
        None
    }
}

#[cfg(not(any(target_os = "linux", target_os = "macos")))]
mod system {
    pub fn resident_bytes() -> Option<u64> {
        None
    }

    pub fn peak_resident_bytes() -> Option<u64> {
        None
    }

    pub fn available_bytes() -> Option<u64> {
        None
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_status_line_is_read_in_bytes() {
        let status = "VmPeak:\t  99 kB\nVmHWM:\t    1234 kB\nVmRSS:\t 56 kB\n";
        assert_eq!(status_bytes(status, "VmHWM"), Some(1234 * 1024));
        assert_eq!(status_bytes(status, "VmRSS"), Some(56 * 1024));
        for bad in ["", "VmHWM", "VmHWM: kB", "VmHWM: 12", "VmHWM: 99999999999999999999 kB"] {
            assert_eq!(status_bytes(bad, "VmHWM"), None, "{bad:?}");
        }
    }

    #[test]
    fn the_peak_keeps_what_the_current_size_gives_back() {
        const BYTES: u64 = 96 << 20;
        let before = resident_bytes().expect("Linux says");
        let block = vec![1u8; BYTES as usize];
        std::hint::black_box(&block);
        let during = resident_bytes().expect("Linux says");
        drop(block);
        let peak = peak_resident_bytes().expect("Linux says");
        // Other tests of this process allocate and free meanwhile, hence half.
        assert!(during >= before.saturating_sub(BYTES / 2) + BYTES / 2, "{before} {during}");
        // Linux counts for each thread by itself, and adds up now and then.
        assert!(peak >= BYTES && peak + BYTES / 2 >= during, "{during} {peak}");
    }
}
