//! Several processes that train one adapter together: data-parallel training.
//!
//! Every process (a rank) has the whole model, or a part of each of its layers, and reads all data in the same order. A
//! batch is that of all ranks together: rank r of n takes the rows r, r + n, r + 2n of it, which differ little in length,
//! as rows of a batch stand by length. The gradient of each row is divided by the target tokens of the whole step, as with
//! accumulation, so what the ranks add up is the gradient of one process with the whole batch, but for the rounding of
//! sums. Sums are made in an order that doesn't change from run to run, so the same number of ranks gives the same bits,
//! and all ranks take the same step.
//!
//! [`Collectives`] is what a way to talk has to offer, [`Group`] what training asks of it. A group of one costs nothing.

pub mod launcher;
#[cfg(any(feature = "cuda", test))]
mod meeting;
mod member;
#[cfg(feature = "mpi")]
mod mpi;
#[cfg(feature = "cuda")]
mod nccl;
#[cfg(any(feature = "cuda", test))]
mod tcp;
pub mod tensor;
#[cfg(any(feature = "cuda", test))]
mod torch_store;

pub use member::Member;

use crate::data::BatchPlan;
#[cfg(any(feature = "cuda", feature = "mpi", test))]
use crate::hash::Hash;
use crate::{Error, Result};
use candle_core::{Device, Tensor};
use std::fmt::Debug;
use std::ops::Range;
use std::time::{Duration, Instant};

/// What ranks do together. Each calls the same functions in the same order, and none waits forever for another, also not for
/// a rank 0 that says that it is busy. What only the thread that has joined may use is an error on any other.
pub trait Collectives: Debug + Sync {
    /// This process's number, from 0.
    fn rank(&self) -> usize;

    /// How many processes there are.
    fn size(&self) -> usize;

    /// How long a rank waits for another that says nothing.
    fn limit(&self) -> Duration {
        Duration::MAX
    }

    /// What each rank has given, by rank; of any length. `what` it is goes into messages.
    ///
    /// # Errors
    /// [`Error::Rank`] naming one that is lost, late, or elsewhere in the program.
    fn gather(&self, what: &'static str, mine: &[u8]) -> Result<Vec<Vec<u8>>>;

    /// Tells the others, if this is rank 0, that it lives and does what they may have to wait for longer than they wait
    /// otherwise. Where that fails, what they do together next says why.
    fn tell_busy(&self) {}

    /// Adds up the ranks' buffers `(n)` in f32, in place: each element in an order that is the same in every run, over MPI
    /// `((x₀ + x₁) + x₂) + …`.
    ///
    /// # Errors
    /// As [`Self::gather`].
    fn sum(&self, what: &'static str, buffer: &Tensor) -> Result<()>;

    /// Gives what a rank has in its part of buffers `(n)` in f32 to all others, in place: the parts by rank, which don't
    /// overlap and may be empty.
    ///
    /// # Errors
    /// As [`Self::gather`].
    fn spread(&self, what: &'static str, buffer: &Tensor, parts: &[Range<usize>]) -> Result<()>;

    /// Whether [`Self::sum`] takes buffers of this device.
    fn takes(&self, device: &Device) -> bool;

    /// Whether sums can be made while the device does other work.
    fn sums_beside_work(&self) -> bool {
        false
    }

    /// Begins a sum as [`Self::sum`] makes it, behind the work so far. Until [`Self::end_begun`] nobody else writes there.
    ///
    /// # Errors
    /// As [`Self::gather`].
    fn begin_sum(&self, what: &'static str, buffer: &Tensor) -> Result<()> {
        self.sum(what, buffer)
    }

    /// Begins what [`Self::spread`] does, as [`Self::begin_sum`] begins a sum.
    ///
    /// # Errors
    /// As [`Self::gather`].
    fn begin_spread(
        &self,
        what: &'static str,
        buffer: &Tensor,
        parts: &[Range<usize>],
    ) -> Result<()> {
        self.spread(what, buffer, parts)
    }

    /// Waits until all that was begun is done.
    ///
    /// # Errors
    /// As [`Self::gather`].
    fn end_begun(&self, what: &'static str) -> Result<()> {
        let _ = what;
        Ok(())
    }
}

/// How long rank 0 works before it says again that it does.
const BUSY: Duration = Duration::from_millis(200);
/// How many times as long as they wait otherwise the others wait for a rank 0 that is busy: a file system may never answer.
const LONGER: u32 = 10;
/// How often it is told that they wait.
const REPORT: Duration = Duration::from_secs(60);

/// Rows of a batch that a rank reads.
pub(crate) struct Rows {
    pub plan: BatchPlan,
    /// Whether they are its own.
    pub counts: bool,
}

/// The ranks that train together, as one of them sees them; by default there is no other.
#[derive(Debug, Clone, Copy, Default)]
pub struct Group<'a>(Option<&'a dyn Collectives>);

impl<'a> Group<'a> {
    /// Those that these functions reach.
    pub fn new(collectives: &'a dyn Collectives) -> Self {
        Self((collectives.size() > 1).then_some(collectives))
    }

    /// This process's number, from 0.
    pub fn rank(self) -> usize {
        self.0.map_or(0, Collectives::rank)
    }

    /// How many processes there are.
    pub fn size(self) -> usize {
        self.0.map_or(1, Collectives::size)
    }

    /// Whether this is the rank that writes files and reports.
    pub fn is_root(self) -> bool {
        self.rank() == 0
    }

    /// What of a list is this rank's.
    pub fn share<T: Clone>(self, list: &[T]) -> Vec<T> {
        list.iter().skip(self.rank()).step_by(self.size()).cloned().collect()
    }

    /// The rows of a batch that are this rank's; `None` where the batch has too few. Where all ranks have to make the same
    /// passes, as each has a part of the weights (`together`), it reads rows of another rank then, which don't count.
    pub(crate) fn rows(self, plan: &BatchPlan, together: bool) -> Option<Rows> {
        let rows = self.share(&plan.rows);
        let counts = !rows.is_empty();
        let rows = match counts {
            true => rows,
            false if together => plan.rows.iter().take(1).cloned().collect(),
            false => return None,
        };
        Some(Rows { plan: BatchPlan { rows }, counts })
    }

    /// What rank 0 has given.
    ///
    /// # Errors
    /// As [`Collectives::gather`].
    pub fn of_root(self, what: &'static str, mine: &[u8]) -> Result<Vec<u8>> {
        self.gather(what, mine)?.into_iter().next().ok_or_else(|| elsewhere(0, what))
    }

    /// Waits until all ranks are here.
    ///
    /// # Errors
    /// As [`Collectives::gather`].
    pub fn wait(self, what: &'static str) -> Result<()> {
        self.gather(what, &[]).map(drop)
    }

    /// Whether it is so for one rank at least.
    ///
    /// # Errors
    /// As [`Collectives::gather`].
    pub fn any(self, what: &'static str, mine: bool) -> Result<bool> {
        Ok(match self.0 {
            None => mine,
            Some(_) => self.gather(what, &[mine.into()])?.iter().any(|it| it.first() == Some(&1)),
        })
    }

    /// Counts of all ranks together.
    ///
    /// # Errors
    /// As [`Collectives::gather`].
    pub(crate) fn count<const N: usize>(
        self,
        what: &'static str,
        mine: [usize; N],
    ) -> Result<[usize; N]> {
        if self.0.is_none() {
            return Ok(mine);
        }
        let mine = mine.map(|count| count as u64);
        let bytes: Vec<u8> = mine.iter().flat_map(|count| count.to_le_bytes()).collect();
        let mut all = [0; N];
        for (rank, counts) in self.gather(what, &bytes)?.into_iter().enumerate() {
            let (counts, rest) = counts.as_chunks::<8>();
            if counts.len() != N || !rest.is_empty() {
                return Err(elsewhere(rank, what));
            }
            for (sum, count) in all.iter_mut().zip(counts) {
                *sum += u64::from_le_bytes(*count) as usize;
            }
        }
        Ok(all)
    }

    /// Adds up numbers of all ranks, each in the order of ranks.
    ///
    /// # Errors
    /// As [`Collectives::gather`].
    pub(crate) fn add_up(self, what: &'static str, mine: &mut [f64]) -> Result<()> {
        if self.0.is_none() {
            return Ok(());
        }
        let bytes: Vec<u8> = mine.iter().flat_map(|number| number.to_le_bytes()).collect();
        for (rank, numbers) in self.gather(what, &bytes)?.into_iter().enumerate() {
            let (numbers, rest) = numbers.as_chunks::<8>();
            if numbers.len() != mine.len() || !rest.is_empty() {
                return Err(elsewhere(rank, what));
            }
            for (sum, number) in mine.iter_mut().zip(numbers) {
                let number = f64::from_le_bytes(*number);
                *sum = if rank == 0 { number } else { *sum + number };
            }
        }
        Ok(())
    }

    /// What each rank has given, by rank.
    ///
    /// # Errors
    /// As [`Collectives::gather`].
    pub(crate) fn gather(self, what: &'static str, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        match self.0 {
            None => Ok(vec![mine.to_vec()]),
            Some(collectives) => collectives.gather(what, mine),
        }
    }

    /// Does what may take longer than the others wait, as writing files does, on a thread beside this one, which tells them
    /// meanwhile that it goes on, as [`Self::busy_until`] does.
    pub(crate) fn busy_with<T: Send>(self, work: impl FnOnce() -> T + Send) -> T {
        if self.0.is_none() {
            return work();
        }
        std::thread::scope(|scope| {
            let thread = scope.spawn(work);
            self.busy_until(|| thread.is_finished());
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Waits for what another thread does, and tells the others meanwhile, but no longer than [`LONGER`] says: then they notice
    /// it as they notice a process that stands still. One process alone has nobody to tell: it doesn't wait here.
    pub(crate) fn busy_until(self, is_done: impl Fn() -> bool) {
        let Some(collectives) = self.0 else { return };
        let most = collectives.limit().saturating_mul(LONGER);
        let begun = Instant::now();
        let (mut told, mut reported) = (begun, begun);
        while !is_done() {
            let waited = begun.elapsed();
            if told.elapsed() >= BUSY && waited < most {
                collectives.tell_busy();
                told = Instant::now();
            }
            if reported.elapsed() >= REPORT {
                let (waited, most) = (waited.as_secs(), most.as_secs());
                tracing::warn!(
                    "files are being written for {waited} s; other processes wait for no more than {most} s"
                );
                reported = Instant::now();
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Gives each rank's part of a buffer to all others, see [`Collectives::spread`].
    ///
    /// # Errors
    /// As [`Collectives::gather`].
    pub(crate) fn spread(
        self,
        what: &'static str,
        buffer: &Tensor,
        parts: &[Range<usize>],
    ) -> Result<()> {
        self.0.map_or(Ok(()), |collectives| collectives.spread(what, buffer, parts))
    }

    /// Whether buffers of this device can be added up.
    pub(crate) fn takes(self, device: &Device) -> bool {
        self.0.is_none_or(|collectives| collectives.takes(device))
    }

    /// Whether there are others, and sums with them can be made beside other work.
    pub(crate) fn sums_beside_work(self) -> bool {
        self.0.is_some_and(Collectives::sums_beside_work)
    }

    /// Begins to add up a buffer, see [`Collectives::begin_sum`].
    ///
    /// # Errors
    /// As [`Collectives::gather`].
    pub(crate) fn begin_sum(self, what: &'static str, buffer: &Tensor) -> Result<()> {
        self.0.map_or(Ok(()), |collectives| collectives.begin_sum(what, buffer))
    }

    /// Begins to give each rank's part of a buffer to all others, see [`Collectives::begin_spread`].
    ///
    /// # Errors
    /// As [`Collectives::gather`].
    pub(crate) fn begin_spread(
        self,
        what: &'static str,
        buffer: &Tensor,
        parts: &[Range<usize>],
    ) -> Result<()> {
        self.0.map_or(Ok(()), |collectives| collectives.begin_spread(what, buffer, parts))
    }

    /// Waits for what was begun.
    ///
    /// # Errors
    /// As [`Collectives::gather`].
    pub(crate) fn end_begun(self, what: &'static str) -> Result<()> {
        self.0.map_or(Ok(()), |collectives| collectives.end_begun(what))
    }
}

/// That a rank has given what doesn't belong here.
pub(crate) fn elsewhere(rank: usize, what: &str) -> Error {
    Error::Rank { rank, message: format!("is at another place of the program than {what}") }
}

/// What a place of the program is known by.
#[cfg(any(feature = "cuda", feature = "mpi", test))]
fn place(what: &str) -> u64 {
    let mut hash = Hash::new();
    hash.add(what.as_bytes());
    hash.finish()
}

/// How somebody waits who looks again and again: at first without rest, later with some between two looks.
#[cfg(any(feature = "cuda", feature = "mpi", test))]
struct Pause(Instant);

#[cfg(any(feature = "cuda", feature = "mpi", test))]
impl Pause {
    const BUSY: Duration = Duration::from_millis(50);
    const REST: Duration = Duration::from_micros(100);

    fn new() -> Self {
        Self(Instant::now())
    }

    fn rest(&mut self) {
        match self.0.elapsed() < Self::BUSY {
            true => std::thread::yield_now(),
            false => std::thread::sleep(Self::REST),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn a_group_of_one_asks_nobody() {
        let group = Group::default();
        assert_eq!((group.rank(), group.size(), group.is_root()), (0, 1, true));
        assert_eq!(group.share(&[1, 2, 3]), [1, 2, 3]);
        let plan = BatchPlan { rows: vec![vec![0], vec![1]] };
        let rows = group.rows(&plan, true).unwrap();
        assert!(rows.counts && rows.plan.rows == plan.rows);
        assert_eq!(group.count("x", [3, 4]).unwrap(), [3, 4]);
        assert!(group.any("x", true).unwrap() && !group.any("x", false).unwrap());
        let mut numbers = [0.1, f64::NAN];
        group.add_up("x", &mut numbers).unwrap();
        assert!(numbers[0] == 0.1 && numbers[1].is_nan());
        group.wait("x").unwrap();
        group.busy_until(|| false);
        assert_eq!(group.busy_with(|| 7), 7);
    }

    /// The first of two ranks, which counts how often it tells the other that it is busy, and how long that one waits.
    #[derive(Debug)]
    struct Telling(AtomicUsize, Duration);

    impl Collectives for Telling {
        fn rank(&self) -> usize {
            0
        }

        fn size(&self) -> usize {
            2
        }

        fn limit(&self) -> Duration {
            self.1
        }

        fn gather(&self, what: &'static str, _: &[u8]) -> Result<Vec<Vec<u8>>> {
            Err(elsewhere(1, what))
        }

        fn tell_busy(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }

        fn sum(&self, what: &'static str, _: &Tensor) -> Result<()> {
            Err(elsewhere(1, what))
        }

        fn spread(&self, what: &'static str, _: &Tensor, _: &[Range<usize>]) -> Result<()> {
            Err(elsewhere(1, what))
        }

        fn takes(&self, _: &Device) -> bool {
            true
        }
    }

    #[test]
    fn others_are_told_as_long_as_work_goes_on() {
        let telling = Telling(AtomicUsize::new(0), Duration::MAX);
        let told = || telling.0.load(Ordering::Relaxed);
        let group = Group::new(&telling);
        assert_eq!(group.busy_with(|| 7), 7);
        // Ends when the others have been told three times.
        let done = group.busy_with(|| {
            while told() < 3 {
                std::thread::sleep(Duration::from_millis(1));
            }
            told()
        });
        assert!(done >= 3);
        group.busy_until(|| told() >= done + 2);
    }

    #[test]
    fn others_are_not_told_without_end_of_work_that_does_not_end() {
        let telling = Telling(AtomicUsize::new(0), Duration::from_millis(100));
        let begun = Instant::now();
        Group::new(&telling).busy_until(|| begun.elapsed() > Duration::from_secs(4));
        // Within the first of these seconds.
        assert!(telling.0.into_inner() <= 5);
    }
}
