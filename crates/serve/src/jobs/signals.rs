//! What is told to the threads that work on jobs: that there is work, that a run is to stop, that all are to end.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use tokio::sync::Semaphore;

/// Files that are looked at at once for those who ask.
const CHECKS: usize = 2;

/// What is told to the threads that work on jobs.
#[derive(Debug)]
pub(crate) struct Signals {
    state: Mutex<State>,
    changed: Condvar,
    /// Who may look at a file, which takes all cores for a while.
    pub checks: Arc<Semaphore>,
}

impl Default for Signals {
    fn default() -> Self {
        let (state, changed) = Default::default();
        Self { state, changed, checks: Arc::new(Semaphore::new(CHECKS)) }
    }
}

#[derive(Debug, Default)]
struct State {
    /// Goes up whenever there may be work.
    changes: u64,
    /// The job that is trained, and what stops it.
    running: Option<(String, Arc<AtomicBool>)>,
    /// Whether all are to end.
    ending: bool,
}

impl Signals {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// There may be work.
    pub fn wake(&self) {
        self.lock().changes += 1;
        self.changed.notify_all();
    }

    /// How often there may have been work so far; what comes before the work is looked for.
    pub fn changes(&self) -> u64 {
        self.lock().changes
    }

    /// Waits until there may be other work than at `changes`; false when all are to end.
    pub fn wait(&self, changes: u64) -> bool {
        let state = self.lock();
        let waits = |state: &mut State| state.changes == changes && !state.ending;
        let state = self.changed.wait_while(state, waits).unwrap_or_else(PoisonError::into_inner);
        !state.ending
    }

    /// A job is about to be trained; what is given is true once that is to stop.
    pub fn begin(&self, job: &str) -> Arc<AtomicBool> {
        let mut state = self.lock();
        let stop = Arc::new(AtomicBool::new(state.ending));
        state.running = Some((job.to_string(), stop.clone()));
        stop
    }

    /// It is trained no more.
    pub fn end(&self) {
        self.lock().running = None;
    }

    /// Whether a job is trained at the moment.
    pub fn is_training(&self, job: &str) -> bool {
        self.lock().running.as_ref().is_some_and(|(running, _)| running == job)
    }

    /// Stops the training of a job, if it is trained.
    pub fn stop_job(&self, job: &str) {
        match &self.lock().running {
            Some((running, stop)) if running == job => stop.store(true, Ordering::Relaxed),
            _ => {}
        }
    }

    /// Ends all.
    pub fn end_all(&self) {
        let mut state = self.lock();
        state.ending = true;
        if let Some((_, stop)) = &state.running {
            stop.store(true, Ordering::Relaxed);
        }
        self.changed.notify_all();
    }

    /// Whether all are to end.
    pub fn is_ending(&self) -> bool {
        self.lock().ending
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_waits_for_work_and_ends_when_it_is_told_to() {
        let signals = Arc::new(Signals::default());
        let seen = signals.changes();
        signals.wake();
        assert!(signals.wait(seen), "there was work meanwhile");
        let waiting = std::thread::spawn({
            let signals = signals.clone();
            move || signals.wait(signals.changes())
        });
        let stop = signals.begin("ftjob-a");
        signals.stop_job("ftjob-b");
        assert!(!stop.load(Ordering::Relaxed));
        signals.stop_job("ftjob-a");
        assert!(stop.load(Ordering::Relaxed));
        signals.end();
        signals.end_all();
        assert!(!waiting.join().unwrap());
        assert!(signals.begin("ftjob-b").load(Ordering::Relaxed), "nothing begins any more");
    }
}
