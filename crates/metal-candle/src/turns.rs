//! Whose turn it is on a device that the engine shares with other work: training takes its share of the time while
//! texts are written, and all of it while none are.

use crate::Result;
use candle_core::Device;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long somebody who works is waited for between two turns.
const PAUSE: Duration = Duration::from_millis(5);

/// Two kinds of work that share a device by time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Engine = 0,
    Training = 1,
}

impl Kind {
    fn other(self) -> Self {
        match self {
            Self::Engine => Self::Training,
            Self::Training => Self::Engine,
        }
    }
}

/// What each kind has used of its share, in seconds over the share.
#[derive(Debug)]
struct Ledger {
    shares: [f64; 2],
    used: [f64; 2],
}

impl Ledger {
    /// What wasn't used while there was nothing to do is no claim on the future.
    fn joins(&mut self, kind: Kind) {
        let (me, other) = (kind as usize, kind.other() as usize);
        self.used[me] = self.used[me].max(self.used[other]);
    }

    fn add(&mut self, kind: Kind, seconds: f64) {
        self.used[kind as usize] += seconds / self.shares[kind as usize];
    }

    /// Whether a kind may go although the other comes, too.
    fn is_first(&self, kind: Kind) -> bool {
        self.used[kind as usize] <= self.used[kind.other() as usize]
    }
}

/// Gives the device to one at a time. All of them launch their work on the same device, so what the engine has launched
/// when its turn ends, one pass at most, is done before theirs.
///
/// While both want it, the engine and training take turns such that training gets its share of the time. Other work
/// ([`Turns::hold`]) goes first and counts for nobody, but never twice while one of these two waits: however much of it
/// comes, they go on.
pub struct Turns {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    ledger: Ledger,
    held: bool,
    /// Who waits to go first.
    urgent: usize,
    /// Whether such work was done while the engine or training waited, whose turn it is then.
    owed: bool,
    of: [Worker; 2],
}

#[derive(Debug, Clone, Copy)]
struct Worker {
    waiting: bool,
    /// Between its first turn and the word that there are no more for now.
    works: bool,
    released: Instant,
}

impl Worker {
    /// Whether it wants a turn, or is about to.
    fn comes(&self) -> bool {
        self.waiting || (self.works && self.released.elapsed() < PAUSE)
    }
}

impl State {
    /// Whether the engine or training waits.
    fn has_waiting(&self) -> bool {
        self.of.iter().any(|worker| worker.waiting)
    }
}

impl fmt::Debug for Turns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Turns").finish_non_exhaustive()
    }
}

impl Turns {
    /// Training gets `share` of the time, which is brought between 0.01 and 0.99, while texts are written; half of it for
    /// a `share` that is no number.
    pub fn new(share: f64) -> Arc<Self> {
        let share = if share.is_nan() { 0.5 } else { share.clamp(0.01, 0.99) };
        let worker = Worker { waiting: false, works: false, released: Instant::now() };
        let ledger = Ledger { shares: [1.0 - share, share], used: [0.0; 2] };
        let state = State { ledger, held: false, urgent: 0, owed: false, of: [worker; 2] };
        Arc::new(Self { state: Mutex::new(state), changed: Condvar::new() })
    }

    /// Waits for the step under way, and has the device until the turn is dropped. A step of the engine or of training that
    /// has waited for other such work goes before. It must not be asked for by a thread that has a turn.
    pub fn hold(&self) -> Turn<'_> {
        let mut state = self.state();
        state.urgent += 1;
        while state.held || (state.owed && state.has_waiting()) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.urgent -= 1;
        state.held = true;
        Turn { turns: self, kind: None, began: Instant::now() }
    }

    /// A turn of the engine.
    pub(crate) fn engine(&self) -> Turn<'_> {
        self.take(Kind::Engine)
    }

    /// Whether nobody else wants the device for now, so that the engine may launch more than it waits for in its turn.
    pub(crate) fn engine_is_alone(&self) -> bool {
        let state = self.state();
        state.urgent == 0 && !state.of[Kind::Training as usize].comes()
    }

    /// That the engine has nothing to do.
    pub(crate) fn engine_rests(&self) {
        self.rests(Kind::Engine);
    }

    /// Does a part of a training run in a turn of its own, if turns are to be taken, and waits for the device. It must
    /// not be called by a thread that has a turn.
    ///
    /// # Errors
    /// What `work` gives, and when the device fails.
    pub fn train<T>(
        turns: Option<&Arc<Self>>,
        device: &Device,
        work: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let Some(turns) = turns else { return work() };
        let _turn = turns.training();
        let result = work()?;
        device.synchronize()?;
        Ok(result)
    }

    /// A turn of training.
    fn training(&self) -> Turn<'_> {
        self.take(Kind::Training)
    }

    /// That training has nothing to do on the device.
    pub(crate) fn training_rests(&self) {
        self.rests(Kind::Training);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Every change of it is whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, kind: Kind) -> Turn<'_> {
        let (me, other) = (kind as usize, kind.other() as usize);
        let mut state = self.state();
        if !state.of[me].works {
            state.of[me].works = true;
            state.ledger.joins(kind);
        }
        state.of[me].waiting = true;
        loop {
            let comes = state.of[other].comes();
            let goes_before_holds = state.urgent == 0 || state.owed;
            let may_go = goes_before_holds && (!comes || state.ledger.is_first(kind));
            if !state.held && may_go {
                break;
            }
            let waited = self.changed.wait_timeout(state, PAUSE);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        state.of[me].waiting = false;
        state.owed = false;
        state.held = true;
        Turn { turns: self, kind: Some(kind), began: Instant::now() }
    }

    fn rests(&self, kind: Kind) {
        self.state().of[kind as usize].works = false;
        self.changed.notify_all();
    }
}

/// The device is its holder's until it is dropped.
#[derive(Debug)]
pub struct Turn<'a> {
    turns: &'a Turns,
    kind: Option<Kind>,
    began: Instant,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut state = self.turns.state();
        state.held = false;
        match self.kind {
            Some(kind) => {
                state.ledger.add(kind, self.began.elapsed().as_secs_f64());
                state.of[kind as usize].released = Instant::now();
            }
            None => state.owed = state.has_waiting(),
        }
        drop(state);
        self.turns.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn training_gets_its_share_whatever_the_lengths_of_turns() {
        for (share, lengths) in [(0.5, [1.0, 50.0]), (0.25, [2.0, 470.0]), (0.75, [20.0, 1.0])] {
            let mut ledger = Ledger { shares: [1.0 - share, share], used: [0.0; 2] };
            let mut had = [0.0; 2];
            for _ in 0..100_000 {
                let kind =
                    [Kind::Engine, Kind::Training].into_iter().find(|&it| ledger.is_first(it));
                let kind = kind.expect("one of them may go");
                ledger.add(kind, lengths[kind as usize]);
                had[kind as usize] += lengths[kind as usize];
            }
            let found = had[1] / (had[0] + had[1]);
            assert!((found - share).abs() < 0.01, "{share}: {found}");
        }
        // Time without work is no claim.
        let mut ledger = Ledger { shares: [0.5; 2], used: [0.0; 2] };
        ledger.add(Kind::Engine, 1000.0);
        ledger.joins(Kind::Training);
        ledger.add(Kind::Training, 1.0);
        assert!(ledger.is_first(Kind::Engine) && !ledger.is_first(Kind::Training));
    }

    #[test]
    fn every_share_lets_both_go_on() {
        let shares = [(f64::NAN, 0.5), (-1.0, 0.01), (0.3, 0.3), (f64::INFINITY, 0.99)];
        for (given, expected) in shares {
            let turns = Turns::new(given);
            assert_eq!(turns.state().ledger.shares, [1.0 - expected, expected]);
        }
    }

    #[test]
    fn the_engine_is_alone_unless_somebody_works_or_waits() {
        let turns = Turns::new(0.5);
        drop(turns.hold());
        let turn = turns.engine();
        assert!(turns.engine_is_alone());
        std::thread::scope(|scope| {
            scope.spawn(|| drop(turns.hold()));
            while turns.engine_is_alone() {
                std::thread::yield_now();
            }
            drop(turn);
        });
        assert!(turns.engine_is_alone());
        let turn = turns.engine();
        std::thread::scope(|scope| {
            scope.spawn(|| drop(turns.training()));
            while turns.engine_is_alone() {
                std::thread::yield_now();
            }
            drop(turn);
        });
        turns.training_rests();
        assert!(turns.engine_is_alone());
    }

    #[test]
    fn whoever_waits_goes_on_after_one_hold() {
        for kind in [Kind::Engine, Kind::Training] {
            let turns = Turns::new(0.5);
            let order = Mutex::new(Vec::new());
            let held = turns.hold();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let _turn = turns.take(kind);
                    order.lock().unwrap().push("waits");
                });
                while !turns.state().has_waiting() {
                    std::thread::yield_now();
                }
                for _ in 0..2 {
                    scope.spawn(|| {
                        let _turn = turns.hold();
                        order.lock().unwrap().push("hold");
                    });
                }
                while turns.state().urgent < 2 {
                    std::thread::yield_now();
                }
                drop(held);
            });
            assert_eq!(*order.lock().unwrap(), ["waits", "hold", "hold"], "{kind:?}");
        }
    }

    #[test]
    fn one_at_a_time_has_the_device_and_all_get_it() {
        let turns = Turns::new(0.5);
        let (inside, most) = (Mutex::new(0), Mutex::new(0));
        let work = || {
            let now = {
                let mut inside = inside.lock().unwrap();
                *inside += 1;
                *inside
            };
            let mut most = most.lock().unwrap();
            *most = now.max(*most);
            *inside.lock().unwrap() -= 1;
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..200 {
                    let _turn = turns.engine();
                    work();
                }
                turns.engine_rests();
            });
            scope.spawn(|| {
                for _ in 0..200 {
                    let _turn = turns.training();
                    work();
                }
                turns.training_rests();
            });
            for _ in 0..50 {
                let _turn = turns.hold();
                work();
            }
        });
        assert_eq!(*most.lock().unwrap(), 1);
    }
}
