//! How a call is timed: alone, from the call until its result is complete, and as one of many in
//! sequence whose results are all kept until the clock has stopped.

use candle_core::{Device, Tensor};
use metal_candle::{Result, devices};
use serde::Serialize;
use std::time::{Duration, Instant};

/// Results that a queue of calls keeps at most, in bytes: on the CPU, and on a GPU, where a short queue
/// would time the way there.
const QUEUE_BYTES: usize = 64 << 20;
const GPU_QUEUE_BYTES: usize = 4 << 30;
/// Calls in a queue at most.
pub(crate) const QUEUE_CALLS: usize = 100;

/// Something to time: the same work at every call.
pub trait Workload {
    /// Makes the next call possible; never timed.
    fn reset(&mut self) -> Result<()> {
        Ok(())
    }

    /// Does the work and returns its results, in the order of
    /// [`Work::outputs`](crate::Work::outputs). On a GPU they may be under way: the clock stops when
    /// the device has been waited for.
    fn call(&mut self) -> Result<Vec<Tensor>>;
}

/// A function that needs no reset is work as it is.
impl<F: FnMut() -> Result<Vec<Tensor>>> Workload for F {
    fn call(&mut self) -> Result<Vec<Tensor>> {
        self()
    }
}

/// How long to warm up and how many samples to take.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// Untimed calls go on for this long, and are at least one.
    pub warm_up: Duration,
    /// Timed calls.
    pub samples: usize,
}

/// What samples come to, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Summary {
    /// Half of the samples are at most this.
    pub median: f64,
    /// A tenth of them are at most this.
    pub p10: f64,
    /// Nine tenths of them are at most this.
    pub p90: f64,
    /// How many there were.
    pub samples: usize,
}

impl Summary {
    /// Of samples in any order; zeros when there are none. A percentile between two samples is
    /// interpolated.
    pub fn of(samples: &[f64]) -> Self {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        let at = |share: f64| {
            let place = share * sorted.len().saturating_sub(1) as f64;
            let below = sorted.get(place.floor() as usize).copied().unwrap_or(0.0);
            let above = sorted.get(place.ceil() as usize).copied().unwrap_or(0.0);
            below + (above - below) * place.fract()
        };
        Self { median: at(0.5), p10: at(0.1), p90: at(0.9), samples: sorted.len() }
    }
}

/// Calls without a clock for `duration`, at least once.
pub fn warm_up(workload: &mut dyn Workload, device: &Device, duration: Duration) -> Result<()> {
    let started = Instant::now();
    loop {
        devices::step(device, || -> Result<()> {
            workload.reset()?;
            workload.call()?;
            Ok(device.synchronize()?)
        })?;
        if started.elapsed() >= duration {
            return Ok(());
        }
    }
}

/// The seconds of each of `calls` calls, every one alone.
pub fn one_by_one(workload: &mut dyn Workload, device: &Device, calls: usize) -> Result<Vec<f64>> {
    let mut seconds = Vec::with_capacity(calls);
    for _ in 0..calls {
        seconds.push(devices::step(device, || -> Result<f64> {
            workload.reset()?;
            device.synchronize()?;
            let started = Instant::now();
            let results = workload.call()?;
            device.synchronize()?;
            let elapsed = started.elapsed().as_secs_f64();
            drop(results);
            Ok(elapsed)
        })?);
    }
    Ok(seconds)
}

/// The seconds of `calls` calls in sequence, together. All results exist when the clock stops.
pub fn in_a_queue(workload: &mut dyn Workload, device: &Device, calls: usize) -> Result<f64> {
    devices::step(device, || {
        let mut results = Vec::with_capacity(calls);
        workload.reset()?;
        device.synchronize()?;
        let started = Instant::now();
        for _ in 0..calls {
            results.push(workload.call()?);
        }
        device.synchronize()?;
        Ok(started.elapsed().as_secs_f64())
    })
}

/// How many calls a queue has when each leaves `bytes` of results.
pub fn queue_length(bytes: usize, gpu: bool) -> usize {
    let most = if gpu { GPU_QUEUE_BYTES } else { QUEUE_BYTES };
    (most / bytes.max(1)).clamp(1, QUEUE_CALLS)
}

/// Times one call alone after warming up.
pub fn latency(workload: &mut dyn Workload, device: &Device, plan: Plan) -> Result<Summary> {
    warm_up(workload, device, plan.warm_up)?;
    Ok(Summary::of(&one_by_one(workload, device, plan.samples)?))
}

/// Times a call in a queue of `calls`, after warming up.
pub fn queued(
    workload: &mut dyn Workload,
    device: &Device,
    calls: usize,
    plan: Plan,
) -> Result<Summary> {
    warm_up(workload, device, plan.warm_up)?;
    let samples = (0..plan.samples)
        .map(|_| Ok(in_a_queue(workload, device, calls)? / calls.max(1) as f64))
        .collect::<Result<Vec<_>>>()?;
    Ok(Summary::of(&samples))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_interpolates_between_samples() {
        let summary = Summary::of(&[5.0, 1.0, 4.0, 2.0, 3.0]);
        assert_eq!((summary.median, summary.samples), (3.0, 5));
        assert!((summary.p10 - 1.4).abs() < 1e-12 && (summary.p90 - 4.6).abs() < 1e-12);
        assert_eq!(Summary::of(&[]).median, 0.0);
        assert_eq!(Summary::of(&[7.0]).p90, 7.0);
    }

    #[test]
    fn a_queue_is_bounded_by_calls_and_by_bytes() {
        assert_eq!(queue_length(0, false), 100);
        assert_eq!(queue_length(1 << 20, false), 64);
        assert_eq!(queue_length(1 << 26, true), 64);
        assert_eq!(queue_length(1 << 40, true), 1);
    }
}
