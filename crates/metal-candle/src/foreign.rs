//! Calls into libraries that panic on input they did not expect.

use std::any::Any;
use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;

thread_local! {
    /// Whether a panic of this thread becomes an error, and so is not to be announced.
    static CONTAINED: Cell<bool> = const { Cell::new(false) };
}

/// Calls a library that may panic, and gives the panic's message as the error. Nothing of it reaches stderr.
///
/// What the call was changing when it panicked may be half changed: it must not be used afterwards, or must be as good
/// as before for a library's own caches.
pub(crate) fn contained<T>(call: impl FnOnce() -> T) -> Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let announce = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !CONTAINED.try_with(Cell::get).unwrap_or(false) {
                announce(info);
            }
        }));
    });
    let outer = CONTAINED.replace(true);
    let outcome = panic::catch_unwind(AssertUnwindSafe(call));
    CONTAINED.set(outer);
    outcome.map_err(|payload| message(&*payload))
}

/// What a panic said.
pub(crate) fn message(payload: &(dyn Any + Send)) -> String {
    let text = payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    crate::files::cut(text.unwrap_or("no reason given"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_an_error_and_a_result_stays() {
        assert_eq!(contained(|| 3), Ok(3));
        assert_eq!(contained(|| -> u8 { panic!("a value") }), Err("a value".into()));
        assert_eq!(contained(|| contained(|| panic!("inner {}", 1))), Ok(Err("inner 1".into())));
        assert!(!CONTAINED.get());
    }
}
