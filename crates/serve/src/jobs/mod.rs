//! Fine-tuning jobs: what is asked for, what data are, and the threads that work on jobs.
//!
//! One thread looks at the files of new jobs, another trains one job after the other in the order in which they came.
//! Both work on what the database says, so a server that is started again goes on where the last one was: a run goes on
//! from its newest checkpoint, bit for bit.

mod basis;
mod check;
mod hyperparameters;
mod log;
mod plan;
mod request;
mod results;
mod run;
mod samples;
mod signals;
mod validate;

pub(crate) use check::check;
pub(crate) use hyperparameters::Hyperparameters;
pub(crate) use plan::{Method, Plan};
pub(crate) use request::{CreateJob, PAIRS};
pub(crate) use run::{tidy, tidy_ended};
pub(crate) use signals::Signals;
pub(crate) use validate::data_options;

use crate::app::{App, Shared};
use crate::store::{Job, JobError, Status};
use metal_candle::{Error, Result};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::runtime::Handle;

/// How long to wait after the database has failed.
const AFTER_FAILURE: Duration = Duration::from_secs(1);

/// The threads that work on jobs. They hold the server's state, so they are to be [stopped](Self::stop).
pub struct Jobs {
    app: Shared,
    threads: Vec<JoinHandle<()>>,
}

/// Works on a job of a thread; an error is the server's, not the job's.
type Work = fn(&Shared, &Handle, &Job) -> Result<()>;

impl Jobs {
    /// Starts them, in a runtime of tokio. What was under way goes on.
    ///
    /// # Errors
    /// When the system has no threads left.
    pub fn start(app: &Shared) -> Result<Self> {
        let runtime = Handle::current();
        if let Err(error) = tidy_ended(&app.store) {
            tracing::warn!("what jobs that have ended need no more is not removed: {error}");
        }
        let mut jobs = Self { app: app.clone(), threads: Vec::new() };
        if app.model.is_tensor_parallel() {
            for statuses in [[Status::ValidatingFiles; 2], [Status::Queued, Status::Running]] {
                if app.store.next_job(&app.options.model_name, statuses)?.is_some() {
                    tracing::warn!(
                        "fine-tuning jobs wait for a server that has the model on one device, not in parts on several"
                    );
                    break;
                }
            }
            return Ok(jobs);
        }
        let works: [(&str, [Status; 2], Work); 2] = [
            ("data of jobs", [Status::ValidatingFiles; 2], validate::validate),
            ("fine-tuning", [Status::Queued, Status::Running], run::work),
        ];
        for (name, statuses, work) in works {
            let (app, runtime) = (app.clone(), runtime.clone());
            let thread = std::thread::Builder::new()
                .name(name.into())
                .spawn(move || work_on(&app, &runtime, statuses, work))
                .map_err(Error::io(name))?;
            jobs.threads.push(thread);
        }
        Ok(jobs)
    }

    /// Ends them, and waits for it: a run under way stops after its step, with a checkpoint.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        self.app.store.signals.end_all();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a thread that works on jobs has panicked");
            }
        }
    }
}

impl Drop for Jobs {
    fn drop(&mut self) {
        self.end();
    }
}

/// Works on jobs with these statuses, one after the other, until all is to end.
fn work_on(app: &Shared, runtime: &Handle, statuses: [Status; 2], work: Work) {
    let signals = &app.store.signals;
    while !signals.is_ending() {
        let changes = signals.changes();
        let done = match app.store.next_job(&app.options.model_name, statuses) {
            Ok(None) => {
                signals.wait(changes);
                continue;
            }
            Ok(Some(job)) => guarded(app, &job, || work(app, runtime, &job)),
            Err(error) => Err(error),
        };
        if let Err(error) = done {
            tracing::error!("the work on jobs is tried again: {error}");
            std::thread::sleep(AFTER_FAILURE);
        }
    }
}

/// Does some work on a job, which fails if that panics.
fn guarded(app: &App, job: &Job, work: impl FnOnce() -> Result<()>) -> Result<()> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let message = panic_message(&*panic);
        tracing::error!("the work on {} panicked: {message}", job.id);
        app.store.fail_job(
            &job.id,
            &JobError {
                code: "server_error".into(),
                message: "the server has made a mistake; its log says more".into(),
                param: None,
            },
        )
    })
}

fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("for an unknown reason")
}
