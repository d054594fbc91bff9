//! Ctrl-C. Where a command watches for it, the first one asks for an orderly end and a second one
//! ends the program at once; elsewhere the first one does.

use crate::errors::INTERRUPTED;
use crate::output::say;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

static STOP: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);
/// What to say at the first Ctrl-C; `None` where nobody watches.
static WATCHED: Mutex<Option<&'static str>> = Mutex::new(None);

/// Takes over the handling of Ctrl-C. This starts a thread.
pub fn install() -> anyhow::Result<()> {
    ctrlc::set_handler(|| {
        let message = *WATCHED.lock().unwrap_or_else(PoisonError::into_inner);
        match message {
            Some(message) if !STOP.swap(true, Ordering::SeqCst) => {
                if !message.is_empty() {
                    say(message);
                }
            }
            _ => std::process::exit(i32::from(INTERRUPTED)),
        }
    })?;
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
