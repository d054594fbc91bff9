//! Ctrl-C. Where a command watches for it, the first one asks for an orderly end and a second one
//! ends the program at once; elsewhere the first one does.

use crate::errors::INTERRUPTED;
use crate::output::say;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

static STOP: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);
/// What to say at the first Ctrl-C; `None` where nobody watches.
static WATCHED: Mutex<Option<&'static str>> = Mutex::new(None);
/// Whether the program is being ended at once.
static ENDING: AtomicBool = AtomicBool::new(false);
/// What to tidy up before that.
static TIDY: Mutex<Option<Box<dyn FnOnce() + Send>>> = Mutex::new(None);

/// Takes over the handling of Ctrl-C, and of the signals that end a program or its terminal, but for
/// those that the program was started to ignore. This starts a thread.
pub fn install() -> anyhow::Result<()> {
    let handler = || {
        let message = *WATCHED.lock().unwrap_or_else(PoisonError::into_inner);
        match message {
            Some(message) if !STOP.swap(true, Ordering::SeqCst) => {
                if !message.is_empty() {
                    say(message);
                }
            }
            _ => {
                ENDING.store(true, Ordering::SeqCst);
                let tidy = TIDY.lock().unwrap_or_else(PoisonError::into_inner).take();
                if let Some(tidy) = tidy {
                    tidy();
                }
                std::process::exit(i32::from(INTERRUPTED))
            }
        }
    };
    keep_ignored(|| ctrlc::set_handler(handler))?;
    Ok(())
}

/// From now on the first Ctrl-C sets the flag that this gives, and `message` is said.
pub fn watch(message: &'static str) -> Arc<AtomicBool> {
    STOP.store(false, Ordering::SeqCst);
    *WATCHED.lock().unwrap_or_else(PoisonError::into_inner) = Some(message);
    Arc::clone(&STOP)
}

/// From now on Ctrl-C ends the program.
pub fn unwatch() {
    *WATCHED.lock().unwrap_or_else(PoisonError::into_inner) = None;
}

/// What to do before Ctrl-C ends the program at once.
pub fn tidy_up_with(tidy: impl FnOnce() + Send + 'static) {
    *TIDY.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(tidy));
}

/// Waits for the end of a program that is being ended at once: what is being tidied up may be missed by whoever still
/// works with it, and is no failure of theirs to tell.
pub fn wait_if_ending() {
    while ENDING.load(Ordering::SeqCst) {
        std::thread::park();
    }
}

/// Runs `install`, after which the signals that were ignored before still are: that of a closed
/// terminal under `nohup`, and Ctrl-C in what a script has started with `&`.
#[cfg(unix)]
fn keep_ignored<T>(install: impl FnOnce() -> T) -> T {
    use std::mem::zeroed;
    use std::ptr::{null, null_mut};
    const SIGNALS: [libc::c_int; 3] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];
    // SAFETY: each call gets a valid signal and structures of its own, for which zeros are valid. All
    // three signals are held back meanwhile, so none of them reaches a handler that is to go again.
    unsafe {
        let (mut held, mut mask) = (zeroed(), zeroed());
        libc::sigemptyset(&mut held);
        for signal in SIGNALS {
            libc::sigaddset(&mut held, signal);
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, &held, &mut mask);
        let is_ignored = SIGNALS.map(|signal| {
            let mut action: libc::sigaction = zeroed();
            libc::sigaction(signal, null(), &mut action) == 0
                && action.sa_sigaction == libc::SIG_IGN
        });
        let result = install();
        for (signal, ignored) in SIGNALS.into_iter().zip(is_ignored) {
            if ignored {
                libc::signal(signal, libc::SIG_IGN);
            }
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, &mask, null_mut());
        result
    }
}

/// Runs something that takes Ctrl-C over for itself, and takes it back.
#[cfg(unix)]
pub fn keep_handler<T>(run: impl FnOnce() -> T) -> T {
    use std::ptr::{null, null_mut};
    // SAFETY: both calls get a structure of our own, and the second one what the first one gave.
    unsafe {
        let mut handler = std::mem::zeroed();
        let known = libc::sigaction(libc::SIGINT, null(), &mut handler) == 0;
        let result = run();
        if known {
            libc::sigaction(libc::SIGINT, &handler, null_mut());
        }
        result
    }
}

/// Makes a file that would grow beyond `ulimit -f` an error of writing it, which names it, rather than the end of the program.
#[cfg(unix)]
pub fn ignore_file_size() {
    // SAFETY: `signal` touches no memory of this process, and nothing else handles this signal.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

/// Elsewhere no signal is inherited, and a handler is added to those that there are.
#[cfg(not(unix))]
mod elsewhere {
    pub fn ignore_file_size() {}

    pub(super) fn keep_ignored<T>(install: impl FnOnce() -> T) -> T {
        install()
    }

    pub fn keep_handler<T>(run: impl FnOnce() -> T) -> T {
        run()
    }
}

#[cfg(not(unix))]
use elsewhere::keep_ignored;
#[cfg(not(unix))]
pub use elsewhere::{ignore_file_size, keep_handler};
