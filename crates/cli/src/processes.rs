//! Several processes of this command that a launcher has started to train together.

use crate::errors::usage;
use metal_candle::parallel::launcher::{Launched, launched};
use std::sync::LazyLock;

/// What lines on stderr begin with, where this isn't the only process and not the one that reports.
pub fn prefix() -> &'static str {
    static PREFIX: LazyLock<String> = LazyLock::new(|| match launched() {
        Some(Launched { rank, .. }) if rank > 0 => format!("[rank {rank}] "),
        _ => String::new(),
    });
    &PREFIX
}

/// That a command that works in one process isn't started as several, which would write the same files.
pub fn refuse(command: &str) -> anyhow::Result<()> {
    match launched() {
        Some(launched) => launched.refuse(command).map_err(usage),
        None => Ok(()),
    }
}

/// The threads of each of several processes on this machine: a part of its cores, where the launcher has given it none of
/// its own. `None` where rayon finds the number.
pub fn threads(launched: &Launched) -> Option<usize> {
    let here = launched.on_this_machine.filter(|processes| *processes > 1)?;
    if std::env::var_os("RAYON_NUM_THREADS").is_some() || has_own_cores() {
        return None;
    }
    let cores = std::thread::available_parallelism().ok()?.get();
    Some((cores / here).max(1))
}

/// Whether the launcher, which is this process's parent, may use other cores than this process.
#[cfg(target_os = "linux")]
fn has_own_cores() -> bool {
    let cores = |process: &str| {
        let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
        status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:").map(String::from))
    };
    let parent = std::os::unix::process::parent_id().to_string();
    match (cores("self"), cores(&parent)) {
        (Some(own), Some(of_parent)) => own != of_parent,
        _ => false,
    }
}

#[cfg(not(target_os = "linux"))]
fn has_own_cores() -> bool {
    false
}
