//! What the machine is, and what it can do at best: measured here, so that a row's share of it
//! means something. Bandwidth is that of plain reads and copies on all threads, for several sizes,
//! because a weight that stays in a cache is read faster than one that doesn't; arithmetic is f32
//! fused multiply-adds in registers, and the product of large matrices as our own linear does it.

use crate::rows::{Cost, Packing, Precision, random_ids};
use crate::timing::{Plan, QUEUE_CALLS, Workload, latency};
use candle_core::{DType, Device, Tensor};
use metal_candle::Result;
use metal_candle_kernels::quantized::{Weight, quantize};
use metal_candle_kernels::{devices, matmul};
use serde::Serialize;
use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};

/// Sizes of the buffers that reads are timed on, in bytes.
const READ_SIZES: [usize; 4] = [1 << 20, 16 << 20, 128 << 20, 1 << 30];
/// Bytes that a timed pass over a smaller buffer is repeated up to.
const READ_AT_LEAST: usize = 256 << 20;
/// Each peak is the best of this many tries.
const TRIES: usize = 5;

/// The machine that a report comes from.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Machine {
    /// The processor's name.
    pub processor: String,
    /// Cores that the system lets this process use.
    pub cores: usize,
    /// Bytes of memory; 0 where the system doesn't say.
    pub memory: u64,
    /// Operating system and architecture.
    pub system: String,
}

impl Machine {
    /// This one.
    pub fn this() -> Self {
        Self {
            processor: processor().unwrap_or_else(|| "unknown processor".into()),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory: memory().unwrap_or(0),
            system: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
        }
    }
}

#[cfg(target_os = "linux")]
fn processor() -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_string())
}

#[cfg(target_os = "linux")]
fn memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("MemTotal:"))?;
    Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? << 10)
}

#[cfg(not(target_os = "linux"))]
fn sysctl(key: &str) -> Option<String> {
    let output = std::process::Command::new("sysctl").args(["-n", key]).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_string())
}

#[cfg(not(target_os = "linux"))]
fn processor() -> Option<String> {
    sysctl("machdep.cpu.brand_string")
}

#[cfg(not(target_os = "linux"))]
fn memory() -> Option<u64> {
    sysctl("hw.memsize")?.parse().ok()
}

/// What the machine did at best.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Peaks {
    /// Threads that took part.
    pub threads: usize,
    /// Reading a buffer again and again: its bytes, and bytes a second.
    pub read: Vec<(usize, f64)>,
    /// Copying a large buffer, bytes read plus bytes written a second.
    pub copy: f64,
    /// f32 fused multiply-adds in registers, two operations each, a second.
    pub fma: f64,
    /// `x·Wᵀ` with f32 `(1024, 2048)` and `(2048, 2048)`, operations a second.
    pub linear_f32: f64,
    /// The same in bf16.
    pub linear_bf16: f64,
    /// The same in bf16 with weights in Q8_0.
    pub linear_packed: f64,
    /// Seconds of an operation that does nothing, of many in a queue: memory for its result and the launch
    /// of its kernel. `None` where that isn't measured: on the CPU and on Metal.
    pub launch: Option<f64>,
}

impl Peaks {
    /// Measures a device: the CPU with as many threads as rayon has, on buffers of at most `largest`
    /// bytes; a GPU by copies within its memory instead of reads, and by the product in f32 instead of
    /// multiply-adds.
    ///
    /// # Errors
    /// When the matrices don't fit into memory.
    pub fn measure(device: &Device, largest: usize) -> Result<Self> {
        if device.is_cpu() { Self::of_cpu(largest) } else { Self::of_gpu(device) }
    }

    fn of_cpu(largest: usize) -> Result<Self> {
        let threads = rayon::current_num_threads();
        let largest = largest.clamp(READ_SIZES[0], READ_SIZES[3]);
        let buffer = vec![1.0f32; largest / size_of::<f32>()];
        let read = READ_SIZES
            .into_iter()
            .filter(|&size| size <= largest)
            .map(|size| (size, read_bandwidth(&buffer[..size / size_of::<f32>()], threads)))
            .collect();
        let copy = copy_bandwidth(buffer, threads);
        Ok(Self {
            threads,
            read,
            copy,
            fma: fma_rate(threads),
            linear_f32: linear_rate(Precision::F32, None)?,
            linear_bf16: linear_rate(Precision::Bf16, None)?,
            linear_packed: linear_rate(Precision::Bf16, Some(Packing::Q8_0))?,
            launch: None,
        })
    }

    fn of_gpu(device: &Device) -> Result<Self> {
        let read = READ_SIZES[1..]
            .iter()
            .map(|&size| Ok((size, device_copy_bandwidth(device, size)?)))
            .collect::<Result<Vec<_>>>()?;
        let linear_f32 = device_linear_rate(device, Precision::F32, None)?;
        Ok(Self {
            threads: 1,
            copy: read.last().map_or(0.0, |&(_, rate)| rate),
            read,
            fma: linear_f32,
            linear_f32,
            linear_bf16: device_linear_rate(device, Precision::Bf16, None)?,
            linear_packed: device_linear_rate(device, Precision::Bf16, Some(Packing::Q8_0))?,
            launch: launch(device)?,
        })
    }

    /// Bytes a second of reading `bytes` again and again: that of the measured size that is nearest
    /// by ratio.
    pub fn bandwidth(&self, bytes: f64) -> f64 {
        let distance = |size: usize| (bytes.max(1.0) / size as f64).ln().abs();
        self.read
            .iter()
            .min_by(|a, b| distance(a.0).total_cmp(&distance(b.0)))
            .map_or(self.copy, |&(_, rate)| rate)
    }

    /// Operations a second at best in that dtype, by dense or packed weights: in bf16, what our own linear
    /// reaches where that is more than f32 arithmetic can do.
    pub fn arithmetic(&self, dtype: Precision, packed: bool) -> f64 {
        let linear = match dtype {
            Precision::F32 => self.linear_f32,
            Precision::Bf16 if packed => self.linear_bf16.max(self.linear_packed),
            Precision::Bf16 => self.linear_bf16,
        };
        self.fma.max(linear)
    }

    /// The seconds that a call has to take on this machine, by weights that are packed or not, when it reads again what
    /// `working_set` bytes (see [`Work::working_set`](crate::Work::working_set)) came after.
    pub fn floor(&self, cost: Cost, working_set: f64, dtype: Precision, packed: bool) -> f64 {
        let reading = cost.bytes / self.bandwidth(working_set);
        let computing = cost.operations / self.arithmetic(dtype, packed);
        reading.max(computing).max(self.launch.unwrap_or(0.0))
    }
}

/// Runs `task(thread)` on every thread at once and returns the seconds of the slowest.
fn on_all_threads(threads: usize, task: impl Fn(usize) + Sync) -> f64 {
    let barrier = Barrier::new(threads);
    let (task, barrier) = (&task, &barrier);
    std::thread::scope(|scope| {
        let handles: Vec<_> = (0..threads)
            .map(|thread| {
                scope.spawn(move || {
                    barrier.wait();
                    let started = Instant::now();
                    task(thread);
                    started.elapsed().as_secs_f64()
                })
            })
            .collect();
        handles.into_iter().filter_map(|handle| handle.join().ok()).fold(0.0, f64::max)
    })
}

/// The largest of several measurements of `amount` a second.
fn best(amount: f64, seconds: impl Fn() -> f64) -> f64 {
    (0..TRIES).map(|_| amount / seconds().max(1e-9)).fold(0.0, f64::max)
}

fn read_bandwidth(buffer: &[f32], threads: usize) -> f64 {
    let bytes = size_of_val(buffer);
    let passes = READ_AT_LEAST.div_ceil(bytes);
    let part = buffer.len().div_ceil(threads);
    let parts: Vec<&[f32]> = buffer.chunks(part).collect();
    best((bytes * passes) as f64, || {
        on_all_threads(threads, |thread| {
            for _ in 0..passes {
                black_box(sum(black_box(parts.get(thread).copied().unwrap_or(&[]))));
            }
        })
    })
}

fn copy_bandwidth(mut buffer: Vec<f32>, threads: usize) -> f64 {
    let half = buffer.len() / 2;
    let (from, to) = buffer.split_at_mut(half);
    let part = from.len().div_ceil(threads);
    let pairs: Vec<_> =
        from.chunks(part).zip(to.chunks_mut(part).map(std::sync::Mutex::new)).collect();
    let bytes = 2 * size_of_val(from);
    best(bytes as f64, || {
        on_all_threads(threads, |thread| {
            if let Some((from, to)) = pairs.get(thread)
                && let Ok(mut to) = to.lock()
            {
                to[..from.len()].copy_from_slice(from);
            }
        })
    })
}

fn fma_rate(threads: usize) -> f64 {
    const STEPS: usize = 4_000_000;
    best((threads * STEPS * FMA_OPERATIONS) as f64, || {
        on_all_threads(threads, |thread| {
            black_box(multiply_add(STEPS, black_box(thread as f32)));
        })
    })
}

fn linear_rate(dtype: Precision, packing: Option<Packing>) -> Result<f64> {
    linear_rate_of(&Device::Cpu, dtype, packing, 1024, 2048)
}

/// The best of some queues, as those that operations are timed in.
fn launch(device: &Device) -> Result<Option<f64>> {
    let queues = (0..10 * TRIES).map(|_| devices::launch_time(device, QUEUE_CALLS));
    let best = queues.collect::<candle_core::Result<Option<Vec<_>>>>()?;
    let best = best.and_then(|times| times.into_iter().min());
    Ok(best.map(|time| time.as_secs_f64() / QUEUE_CALLS as f64))
}

/// `x·Wᵀ` with x `(8192, 8192)` and W the same, operations a second.
fn device_linear_rate(device: &Device, dtype: Precision, packing: Option<Packing>) -> Result<f64> {
    linear_rate_of(device, dtype, packing, 8192, 8192)
}

fn linear_rate_of(
    device: &Device,
    dtype: Precision,
    packing: Option<Packing>,
    rows: usize,
    size: usize,
) -> Result<f64> {
    let matrix = |rows: usize, seed| -> Result<Tensor> {
        let values: Vec<f32> =
            random_ids(rows * size, 1000, seed).into_iter().map(|id| id as f32 / 1e3).collect();
        Ok(Tensor::from_vec(values, (rows, size), &Device::Cpu)?)
    };
    let stored = |matrix: &Tensor| matrix.to_dtype(dtype.dtype())?.to_device(device);
    let (x, weight) = (stored(&matrix(rows, 0)?)?, matrix(size, 1)?);
    let packed = packing
        .map(|packing| quantize(&weight, packing.format())?.to_device(device))
        .transpose()?;
    let weight = stored(&weight)?;
    let mut product = || {
        let weight = packed.as_ref().map_or(Weight::from(&weight), Weight::from);
        Ok(vec![matmul::linear(&x, weight, None)?])
    };
    let plan = Plan { warm_up: Duration::ZERO, samples: TRIES };
    let seconds = latency(&mut product as &mut dyn Workload, device, plan)?.p10;
    Ok((2 * rows * size * size) as f64 / seconds)
}

/// Bytes read plus bytes written a second.
fn device_copy_bandwidth(device: &Device, bytes: usize) -> Result<f64> {
    let from = Tensor::zeros(bytes / 2 / size_of::<f32>(), DType::F32, device)?;
    let calls = READ_AT_LEAST.div_ceil(bytes).max(8);
    let mut copies = || {
        for _ in 0..calls {
            // Candle's `copy` copies nothing on Metal.
            from.force_contiguous()?;
        }
        Ok(Vec::new())
    };
    let plan = Plan { warm_up: Duration::ZERO, samples: TRIES };
    let seconds = latency(&mut copies as &mut dyn Workload, device, plan)?.p10;
    Ok((bytes * calls) as f64 / seconds)
}

/// Numbers side by side in one accumulator: a register of the widest kind.
const LANES: usize = 16;
/// Accumulators, enough to hide the latency of an addition or a fused multiply-add.
const ACCUMULATORS: usize = 12;
/// Operations in one step of [`multiply_add`].
const FMA_OPERATIONS: usize = 2 * LANES * ACCUMULATORS;

/// Compiles a function for the widest registers that there are and calls the best version.
macro_rules! for_widest_registers {
    ($name:ident($($argument:ident: $kind:ty),*) -> $result:ty = $body:ident) => {
        fn $name($($argument: $kind),*) -> $result {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,fma")]
                fn avx512($($argument: $kind),*) -> $result {
                    $body($($argument),*)
                }
                #[target_feature(enable = "avx2,fma")]
                fn avx2($($argument: $kind),*) -> $result {
                    $body($($argument),*)
                }
                if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("fma") {
                    // SAFETY: the processor has been asked for it.
                    return unsafe { avx512($($argument),*) };
                }
                if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                    // SAFETY: the processor has been asked for it.
                    return unsafe { avx2($($argument),*) };
                }
            }
            $body($($argument),*)
        }
    };
}

for_widest_registers!(sum(values: &[f32]) -> f32 = sum_in_lanes);
for_widest_registers!(multiply_add(steps: usize, seed: f32) -> f32 = multiply_add_in_lanes);

#[inline(always)]
fn sum_in_lanes(values: &[f32]) -> f32 {
    let mut sums = [[0.0f32; LANES]; ACCUMULATORS];
    for block in values.chunks_exact(LANES * ACCUMULATORS) {
        for (sums, values) in sums.iter_mut().zip(block.chunks_exact(LANES)) {
            for (sum, value) in sums.iter_mut().zip(values) {
                *sum += value;
            }
        }
    }
    sums.iter().flatten().sum()
}

#[inline(always)]
fn multiply_add_in_lanes(steps: usize, seed: f32) -> f32 {
    let mut sums = [[seed; LANES]; ACCUMULATORS];
    let factor = [0.999f32 + seed * 1e-9; LANES];
    for _ in 0..steps {
        for sums in &mut sums {
            for (sum, factor) in sums.iter_mut().zip(&factor) {
                *sum = fused(*sum, *factor);
            }
        }
    }
    sums.iter().flatten().sum()
}

/// `a·b + b`, as one instruction where processors have it.
#[inline(always)]
fn fused(a: f32, b: f32) -> f32 {
    if cfg!(any(target_arch = "x86_64", target_arch = "aarch64")) {
        a.mul_add(b, b)
    } else {
        a * b + b
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_has_a_processor_memory_and_cores() {
        let machine = Machine::this();
        assert!(!machine.processor.is_empty() && machine.cores > 0, "{machine:?}");
        assert!(machine.memory > 1 << 28, "{machine:?}");
    }

    #[test]
    fn the_sum_reads_everything_and_the_nearest_size_is_taken() {
        assert_eq!(sum(&vec![1.0; 192 * 10]), 1920.0);
        let peaks = Peaks {
            threads: 1,
            read: vec![(1 << 20, 4.0), (1 << 30, 1.0)],
            copy: 1.0,
            fma: 10.0,
            linear_f32: 5.0,
            linear_bf16: 20.0,
            linear_packed: 40.0,
            launch: Some(0.5),
        };
        assert_eq!((peaks.bandwidth(3e6), peaks.bandwidth(5e8)), (4.0, 1.0));
        let cost = Cost { bytes: 8.0, operations: 40.0 };
        assert_eq!(peaks.floor(cost, 8.0, Precision::F32, true), 4.0);
        assert_eq!(peaks.floor(cost, 1e9, Precision::Bf16, false), 8.0);
        let packed = |dtype| [false, true].map(|packed| peaks.arithmetic(dtype, packed));
        assert_eq!((packed(Precision::F32), packed(Precision::Bf16)), ([10.0; 2], [20.0, 40.0]));
        let small = Cost { bytes: 1.0, operations: 4.0 };
        assert_eq!(peaks.floor(small, 1.0, Precision::F32, false), 0.5);
    }
}
