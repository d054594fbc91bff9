//! Parallel loops. Bits never depend on the number of threads: work is cut by fixed sizes taken
//! from shapes alone, or into parts that are joined in the same order however many they are; every
//! output element is written by one task, and sums run in a fixed order inside it.
//!
//! A decoding step is hundreds of loops of a few microseconds, so threads are handed work in well
//! under one: they wait actively for a moment before they sleep, and the caller works as well. A
//! thread gets the same part of the tasks each time, so that what it read before may still be in
//! its cache, and takes over what the others haven't begun when it has finished its own.

use metal_candle_cpu::simd::vectorize;
use std::any::Any;
use std::marker::PhantomData;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Threads that take part in one loop at most.
const MAX_THREADS: usize = 256;
/// How long a thread waits actively for work before it sleeps.
const ACTIVE_WAIT: Duration = Duration::from_micros(200);

/// How many threads a loop that starts here runs on: those of the current rayon pool.
pub(crate) fn threads() -> usize {
    rayon::current_num_threads().clamp(1, MAX_THREADS)
}

/// Calls `task(index)` for `0..count`, on threads when there are several.
pub(crate) fn run(count: usize, task: impl Fn(usize) + Sync) {
    let threads = threads().min(count);
    let body = |range: &AtomicUsize, end: usize| {
        loop {
            let index = range.fetch_add(1, Ordering::Relaxed);
            if index >= end {
                return;
            }
            run_one(&task, index);
        }
    };
    // Perhaps another loop is under way, or this call is inside of one.
    match (threads > 1).then(Busy::acquire).flatten() {
        Some(busy) => busy.pool.run(threads, count, &body),
        None => body(&AtomicUsize::new(0), count),
    }
}

/// One task, compiled for the machine's instruction set, in one place for all callers.
#[inline(never)]
fn run_one(task: &impl Fn(usize), index: usize) {
    vectorize(
        #[inline(always)]
        || task(index),
    );
}

/// Works through the tasks from a counter up to an end.
type Body<'a> = dyn Fn(&AtomicUsize, usize) + Sync + 'a;

/// A number alone in its cache lines.
#[repr(align(128))]
#[derive(Default)]
struct Padded<T>(T);

/// The loop that is under way.
struct Job {
    body: *const Body<'static>,
    count: usize,
    threads: usize,
}

impl Job {
    /// The tasks that thread `thread` begins with.
    fn part(&self, thread: usize) -> Range<usize> {
        self.count * thread / self.threads..self.count * (thread + 1) / self.threads
    }
}

struct Pool {
    /// Which job it is, how many workers may join it, whether it is open and how many are in it.
    gate: Padded<AtomicU64>,
    /// The next task of every thread's part.
    next: Vec<Padded<AtomicUsize>>,
    job: Mutex<Option<Job>>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    busy: AtomicBool,
    workers: AtomicUsize,
    sleepers: AtomicUsize,
    sleep: Mutex<()>,
    wake: Condvar,
}

// SAFETY: the pointer in the job is read by workers that entered an open gate only, and the job's
// caller does not return before the gate is closed and all have left.
unsafe impl Send for Job {}

/// The fields of the gate: job number, workers that may join, open, workers inside.
mod gate {
    pub const INSIDE: u64 = 0xffff;
    pub const OPEN: u64 = 1 << 16;
    const LIMIT_SHIFT: u32 = 17;
    const NUMBER_SHIFT: u32 = 32;

    pub fn opened(previous: u64, workers: usize) -> u64 {
        let number = (previous >> NUMBER_SHIFT).wrapping_add(1);
        number << NUMBER_SHIFT | (workers as u64) << LIMIT_SHIFT | OPEN
    }
    pub fn number(gate: u64) -> u64 {
        gate >> NUMBER_SHIFT
    }
    pub fn admits(gate: u64, worker: usize) -> bool {
        gate & OPEN != 0 && (worker as u64) < (gate >> LIMIT_SHIFT) & 0x7fff
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The right to run a loop on the pool's threads.
struct Busy {
    pool: &'static Pool,
}

impl Busy {
    fn acquire() -> Option<Busy> {
        static POOL: OnceLock<Pool> = OnceLock::new();
        let pool = POOL.get_or_init(|| Pool {
            gate: Padded::default(),
            next: (0..MAX_THREADS).map(|_| Padded::default()).collect(),
            job: Mutex::new(None),
            panic: Mutex::new(None),
            busy: AtomicBool::new(false),
            workers: AtomicUsize::new(0),
            sleepers: AtomicUsize::new(0),
            sleep: Mutex::new(()),
            wake: Condvar::new(),
        });
        let free = pool.busy.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed);
        free.ok().map(|_| Busy { pool })
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.pool.busy.store(false, Ordering::Release);
    }
}

impl Pool {
    fn run(&'static self, threads: usize, count: usize, body: &Body<'_>) {
        self.start_workers(threads - 1);
        // SAFETY: only the lifetime changes, and the pointer is not read after this call returns.
        let body: *const Body<'static> = unsafe { std::mem::transmute(body as *const Body<'_>) };
        let job = Job { body, count, threads };
        for thread in 0..threads {
            self.next[thread].0.store(job.part(thread).start, Ordering::Relaxed);
        }
        *lock(&self.job) = Some(job);
        let gate = gate::opened(self.gate.0.load(Ordering::Relaxed), threads - 1);
        self.gate.0.store(gate, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            drop(lock(&self.sleep));
            self.wake.notify_all();
        }
        let result = catch_unwind(AssertUnwindSafe(|| self.work(0)));
        self.gate.0.fetch_and(!gate::OPEN, Ordering::AcqRel);
        let mut waited = 0u32;
        while self.gate.0.load(Ordering::Acquire) & gate::INSIDE != 0 {
            pause(&mut waited);
        }
        *lock(&self.job) = None;
        let panic = lock(&self.panic).take();
        if let Some(panic) = panic.or(result.err()) {
            resume_unwind(panic);
        }
    }

    /// Works through the part of one thread and then what is left of the others'.
    fn work(&self, thread: usize) {
        let (body, job) = {
            let job = lock(&self.job);
            let Some(Job { body, count, threads }) = *job else { return };
            (body, Job { body, count, threads })
        };
        // SAFETY: the gate is open or this thread is inside, so the caller still waits.
        let body = unsafe { &*body };
        for offset in 0..job.threads {
            let part = (thread + offset) % job.threads;
            body(&self.next[part].0, job.part(part).end);
        }
    }

    fn start_workers(&'static self, count: usize) {
        // Only the holder of `busy` comes here.
        for worker in self.workers.load(Ordering::Relaxed)..count {
            let started = std::thread::Builder::new()
                .name(format!("metal-candle-{worker}"))
                .spawn(move || self.worker(worker));
            // With fewer threads than wished the work still gets done.
            if started.is_err() {
                return;
            }
            self.workers.store(worker + 1, Ordering::Relaxed);
        }
    }

    fn worker(&self, worker: usize) {
        let mut done = 0;
        let mut idle_since = Instant::now();
        let mut waited = 0u32;
        loop {
            let gate = self.gate.0.load(Ordering::Acquire);
            let new = gate::number(gate) != done && gate::admits(gate, worker);
            if new {
                let enter = self.gate.0.compare_exchange_weak(
                    gate,
                    gate + 1,
                    Ordering::AcqRel,
                    Ordering::Relaxed,
                );
                if enter.is_ok() {
                    done = gate::number(gate);
                    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.work(worker + 1))) {
                        *lock(&self.panic) = Some(panic);
                    }
                    self.gate.0.fetch_sub(1, Ordering::Release);
                    idle_since = Instant::now();
                    waited = 0;
                }
                continue;
            }
            pause(&mut waited);
            if waited.is_multiple_of(64) && idle_since.elapsed() > ACTIVE_WAIT {
                let guard = lock(&self.sleep);
                self.sleepers.fetch_add(1, Ordering::SeqCst);
                let gate = self.gate.0.load(Ordering::SeqCst);
                if gate::number(gate) == done || !gate::admits(gate, worker) {
                    drop(self.wake.wait(guard));
                }
                self.sleepers.fetch_sub(1, Ordering::SeqCst);
                idle_since = Instant::now();
            }
        }
    }
}

/// Waits a moment; gives the core away now and then, for when there are more threads than cores.
fn pause(waited: &mut u32) {
    *waited = waited.wrapping_add(1);
    if waited.is_multiple_of(1024) {
        std::thread::yield_now();
    } else {
        std::hint::spin_loop();
    }
}

/// A mutable slice that tasks write to at places that don't overlap.
pub(crate) struct Disjoint<'a, T> {
    start: *mut T,
    len: usize,
    lifetime: PhantomData<&'a mut [T]>,
}

// SAFETY: access goes through `slice`, whose callers promise that ranges don't overlap.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Disjoint { start: slice.as_mut_ptr(), len: slice.len(), lifetime: PhantomData }
    }

    /// # Safety
    /// No two slices that are alive at the same time may overlap.
    #[allow(clippy::mut_from_ref)]
    #[inline(always)]
    pub(crate) unsafe fn slice(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "disjoint slice out of bounds");
        // SAFETY: in bounds as checked, and the caller promises that nothing overlaps.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}

/// Elements of one parallel task in element-wise loops: enough to be worth handing to a thread.
pub(crate) const PARALLEL_CHUNK: usize = 16 * 1024;

/// Rows of one parallel task when a row has `columns` elements.
pub(crate) fn rows_per_task(columns: usize) -> usize {
    (PARALLEL_CHUNK / columns.max(1)).max(1)
}

/// Calls `task(index, chunk)` for every chunk of `chunk_len` elements, on threads when there are several.
#[inline]
pub(crate) fn for_each_chunk<T: Send>(
    out: &mut [T],
    chunk_len: usize,
    task: impl Fn(usize, &mut [T]) + Sync,
) {
    let (chunk_len, len) = (chunk_len.max(1), out.len());
    let out = Disjoint::new(out);
    run(
        len.div_ceil(chunk_len),
        #[inline(always)]
        |index| {
            let start = index * chunk_len;
            // SAFETY: chunks don't overlap.
            task(index, unsafe { out.slice(start..(start + chunk_len).min(len)) });
        },
    );
}

/// Like [`for_each_chunk`] over two outputs cut into the same number of chunks.
#[inline]
pub(crate) fn for_each_chunk2<T: Send, U: Send>(
    first: &mut [T],
    first_len: usize,
    second: &mut [U],
    second_len: usize,
    task: impl Fn(usize, &mut [T], &mut [U]) + Sync,
) {
    let (first_len, second_len) = (first_len.max(1), second_len.max(1));
    let ends = (first.len(), second.len());
    let (first, second) = (Disjoint::new(first), Disjoint::new(second));
    run(
        ends.0.div_ceil(first_len),
        #[inline(always)]
        |index| {
            let starts = (index * first_len, (index * second_len).min(ends.1));
            // SAFETY: chunks don't overlap.
            let (first, second) = unsafe {
                (
                    first.slice(starts.0..(starts.0 + first_len).min(ends.0)),
                    second.slice(starts.1..(starts.1 + second_len).min(ends.1)),
                )
            };
            task(index, first, second);
        },
    );
}

/// Calls `task(index)` for `0..count`, on threads when `parallel`.
#[inline]
pub(crate) fn for_each_index(count: usize, parallel: bool, task: impl Fn(usize) + Sync + Send) {
    if parallel {
        run(count, task);
    } else {
        (0..count).for_each(|index| run_one(&task, index));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    fn on_threads<R: Send>(threads: usize, task: impl FnOnce() -> R + Send) -> R {
        rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(task)
    }

    #[test]
    fn every_task_runs_once() {
        for threads in [1, 2, 3, 8] {
            on_threads(threads, || {
                for count in [0, 1, 2, 7, 1000] {
                    for _ in 0..50 {
                        let seen: Vec<AtomicU32> = (0..count).map(|_| AtomicU32::new(0)).collect();
                        run(count, |index| {
                            seen[index].fetch_add(1, Ordering::Relaxed);
                        });
                        assert!(seen.iter().all(|seen| seen.load(Ordering::Relaxed) == 1));
                    }
                }
            });
        }
    }

    #[test]
    fn loops_run_inside_loops_and_at_the_same_time() {
        let total = AtomicU32::new(0);
        let total = &total;
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    on_threads(4, || {
                        for _ in 0..100 {
                            run(8, |_| {
                                run(8, |_| {
                                    total.fetch_add(1, Ordering::Relaxed);
                                })
                            });
                        }
                    })
                });
            }
        });
        assert_eq!(total.load(Ordering::Relaxed), 4 * 100 * 64);
    }

    #[test]
    fn threads_that_sleep_wake_up() {
        on_threads(2, || {
            for _ in 0..20 {
                let (main, others) = (AtomicU32::new(0), AtomicU32::new(0));
                let caller = std::thread::current().id();
                run(40, |_| {
                    let own = std::thread::current().id() == caller;
                    if own { &main } else { &others }.fetch_add(1, Ordering::Relaxed);
                    std::thread::sleep(Duration::from_micros(100));
                });
                assert_eq!(main.into_inner() + others.into_inner(), 40);
                std::thread::sleep(Duration::from_millis(1));
            }
        });
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_next_loop_runs() {
        for panicking in [0, 63] {
            let result = on_threads(3, || {
                catch_unwind(|| run(64, |index| assert!(index != panicking, "task {index}")))
            });
            assert!(result.is_err());
            let ran = AtomicU32::new(0);
            on_threads(3, || {
                run(64, |_| {
                    ran.fetch_add(1, Ordering::Relaxed);
                })
            });
            assert_eq!(ran.into_inner(), 64);
        }
    }
}
