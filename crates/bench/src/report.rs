//! A row measured on this machine: what it took and its share of what the machine can do.

use crate::machine::Peaks;
use crate::rows::{Inputs, Row};
use crate::timing::{Plan, Summary, latency, queue_length, queued};
use crate::{Workload, model, operations};
use candle_core::Device;
use metal_candle::Result;
use metal_candle::memory::peak_resident_bytes;
use metal_candle_kernels::devices;
use serde::Serialize;

/// What a row took.
#[derive(Debug, Clone, Serialize)]
pub struct Measured {
    /// The row.
    #[serde(flatten)]
    pub row: Row,
    /// Seconds of one call, from the call until its result is complete.
    pub call: Summary,
    /// Seconds of a call in a queue, of work that can be queued.
    pub queue: Option<Summary>,
    /// Tokens a second, of work on a model.
    pub tokens_per_second: Option<f64>,
    /// The seconds that a call has to take at the machine's measured peaks.
    pub floor: f64,
    /// The floor over the median call.
    pub share_of_peak: f64,
    /// The most bytes that tensors took on a GPU, or that were resident, while a model was at work;
    /// `None` where the system can't forget what there was before.
    pub peak_memory: Option<u64>,
}

/// Measures a row on inputs or a model made up from `seed`.
///
/// # Errors
/// For a model or inputs that don't fit into memory, and when the work fails.
pub fn measure(
    row: &Row,
    plan: Plan,
    peaks: &Peaks,
    device: &Device,
    seed: u64,
) -> Result<Measured> {
    let operation = row.work.is_operation();
    let forgotten = !operation && forget_peak_memory();
    let mut workload: Box<dyn Workload> = if operation {
        operations::prepare(&row.work, &Inputs::random(&row.work, seed)?.of(&row.work, device)?)?
    } else {
        model::prepare_random(&row.work, device, seed)?
    };
    devices::reset_peak_memory(device)?;
    let call = latency(workload.as_mut(), device, plan)?;
    let queue = row
        .work
        .can_queue()
        .then(|| {
            queued(
                workload.as_mut(),
                device,
                queue_length(row.work.result_bytes(), !device.is_cpu()),
                plan,
            )
        })
        .transpose()?;
    let peak_memory = match devices::memory(device)? {
        Some(memory) => (!operation).then_some(memory.peak),
        None if forgotten => peak_resident_bytes(),
        None => None,
    };
    let work = &row.work;
    let floor =
        peaks.floor(work.cost()?, work.working_set()?, work.precision(), work.has_packed_weights());
    Ok(Measured {
        row: row.clone(),
        call,
        queue,
        tokens_per_second: row.work.tokens().map(|tokens| tokens as f64 / call.median),
        floor,
        share_of_peak: floor / call.median,
        peak_memory,
    })
}

/// Lets the peak of resident memory begin anew; whether the system can.
fn forget_peak_memory() -> bool {
    // proc_pid_clear_refs(5): 5 sets the peak to what is resident now.
    cfg!(target_os = "linux") && std::fs::write("/proc/self/clear_refs", "5").is_ok()
}
